"""Random operations of StableHLO, each of which writes itself onto a `Writer`.

Names of operations are those that our graphs have: the array API's where it has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from shardy_writer import Shape, Writer

Maker = Callable[[Writer], object]

ADD = (
    '({{ ^bb0(%x: tensor<f32>, %y: tensor<f32>): %z = "stablehlo.add"(%x, %y) : '
    '(tensor<f32>, tensor<f32>) -> tensor<f32> "stablehlo.return"(%z) : (tensor<f32>) -> () }})'
)


def unary(w: Writer) -> None:
    a = w.value(range(5))
    name, op = w.random.choice([("exp", "exponential"), ("negative", "negate"), ("tanh", "tanh")])
    w.write(
        name, [a], [w.values[a]], f'"stablehlo.{op}"({{0}}) @attributes : ({{types}}) -> {{result}}'
    )


def binary(w: Writer) -> None:
    a = w.value(range(5))
    b = w.like(w.shape(a))
    name, op = w.random.choice(
        [("add", "add"), ("multiply", "multiply"), ("maximum", "maximum"), ("subtract", "subtract")]
    )
    w.write(
        name,
        [a, b],
        [w.values[a]],
        f'"stablehlo.{op}"({{0}}, {{1}}) @attributes : ({{types}}) -> {{result}}',
    )


def where(w: Writer) -> None:
    a = w.value(range(4))
    b = w.like(w.shape(a))
    shape = w.shape(a)
    condition = w.write(
        "less",
        [a, b],
        [(shape, "i1")],
        '"stablehlo.compare"({0}, {1}) @attributes : ({types}) -> {result}',
        "comparison_direction = #stablehlo<comparison_direction LT>",
    )
    w.write(
        "where",
        [condition, b, a],
        [(shape, "f32")],
        '"stablehlo.select"({0}, {1}, {2}) @attributes : ({types}) -> {result}',
    )


def clip(w: Writer) -> None:
    a = w.value(range(1, 4))
    if w.random.random() < 0.5:
        low, high = w.argument(()), w.argument(())
    else:
        low, high = w.like(w.shape(a)), w.like(w.shape(a))
    w.write(
        "clip",
        [low, a, high],
        [w.values[a]],
        '"stablehlo.clamp"({0}, {1}, {2}) @attributes : ({types}) -> {result}',
    )


def matmul(w: Writer) -> None:
    a = w.value(range(2, 4))
    shape = w.shape(a)
    batches = 1 if len(shape) == 3 and w.random.random() < 0.6 else 0
    contracted = w.random.choice(range(batches, len(shape)))
    n = w.random.choice(w.sizes)
    b = w.like((*shape[:batches], shape[contracted], n))
    rest = [size for d, size in enumerate(shape) if d >= batches and d != contracted]
    batch = list(range(batches))
    w.write(
        "matmul",
        [a, b],
        [((*shape[:batches], *rest, n), "f32")],
        '"stablehlo.dot_general"({0}, {1}) @attributes : ({types}) -> {result}',
        f"dot_dimension_numbers = #stablehlo.dot<lhs_batching_dimensions = {batch}, "
        f"rhs_batching_dimensions = {batch}, lhs_contracting_dimensions = [{contracted}], "
        f"rhs_contracting_dimensions = [{batches}]>",
    )


def transpose(w: Writer) -> None:
    a = w.value(range(2, 5))
    order = list(range(len(w.shape(a))))
    w.random.shuffle(order)
    w.write(
        "permute_dims",
        [a],
        [(tuple(w.shape(a)[d] for d in order), "f32")],
        '"stablehlo.transpose"({0}) @attributes : ({types}) -> {result}',
        f"permutation = array<i64: {', '.join(map(str, order))}>",
    )


def broadcast(w: Writer) -> None:
    a = w.value(range(3))
    shape = w.shape(a)
    at = w.random.randint(0, len(shape))
    new = w.random.choice(w.sizes)
    target = (*shape[:at], new, *shape[at:])
    dims = [d if d < at else d + 1 for d in range(len(shape))]
    numbers = f"array<i64: {', '.join(map(str, dims))}>" if dims else "array<i64>"
    w.write(
        "broadcast_to",
        [a],
        [(target, "f32")],
        '"stablehlo.broadcast_in_dim"({0}) @attributes : ({types}) -> {result}',
        f"broadcast_dimensions = {numbers}",
    )


def reshaped(random: Random, count: int) -> Shape:
    """A shape of so many elements."""
    shape: list[int] = []
    while count > 1 and len(shape) < 3:
        divisors = [d for d in range(2, count + 1) if count % d == 0]
        size = random.choice(divisors)
        shape.append(size)
        count //= size
    return (*shape, count) if count > 1 or not shape else tuple(shape)


def reshape(w: Writer) -> None:
    a = w.value(range(1, 5))
    target = reshaped(w.random, math.prod(w.shape(a)))
    w.write(
        "reshape",
        [a],
        [(target, "f32")],
        '"stablehlo.reshape"({0}) @attributes : ({types}) -> {result}',
    )


def reduce(w: Writer) -> None:
    a = w.value(range(1, 5))
    shape = w.shape(a)
    dims = sorted(w.random.sample(range(len(shape)), w.random.randint(1, min(2, len(shape)))))
    name, op = w.random.choice([("sum", "add"), ("max", "maximum"), ("min", "minimum")])
    start = w.argument(())
    w.write(
        name,
        [a, start],
        [(tuple(s for d, s in enumerate(shape) if d not in dims), "f32")],
        '"stablehlo.reduce"({0}, {1}) ({{ ^bb0(%x: tensor<f32>, %y: tensor<f32>): '
        f'%z = "stablehlo.{op}"(%x, %y) : (tensor<f32>, tensor<f32>) -> tensor<f32> '
        '"stablehlo.return"(%z) : (tensor<f32>) -> () }}) @attributes : ({types}) -> {result}',
        f"dimensions = array<i64: {', '.join(map(str, dims))}>",
    )


def concat(w: Writer) -> None:
    a = w.value(range(1, 4))
    shape = w.shape(a)
    axis = w.random.randrange(len(shape))
    other = (
        *shape[:axis],
        w.random.choice([shape[axis], w.random.choice(w.sizes)]),
        *shape[axis + 1 :],
    )
    b = w.like(other)
    w.write(
        "concat",
        [a, b],
        [((*shape[:axis], shape[axis] + other[axis], *shape[axis + 1 :]), "f32")],
        '"stablehlo.concatenate"({0}, {1}) @attributes : ({types}) -> {result}',
        f"dimension = {axis} : i64",
    )


def numbers(values: list[int]) -> str:
    return f"array<i64: {', '.join(map(str, values))}>" if values else "array<i64>"


def slice_(w: Writer) -> None:
    a = w.value(range(1, 4))
    shape = w.shape(a)
    starts, stops = [], []
    for size in shape:
        start = w.random.choice([0, 0, w.random.randrange(size)])
        starts.append(start)
        stops.append(w.random.choice([size, size, w.random.randint(start + 1, size)]))
    w.write(
        "slice",
        [a],
        [(tuple(b - a for a, b in zip(starts, stops, strict=True)), "f32")],
        '"stablehlo.slice"({0}) @attributes : ({types}) -> {result}',
        f"start_indices = {numbers(starts)}, limit_indices = {numbers(stops)}, "
        f"strides = {numbers([1] * len(shape))}",
    )


def pad(w: Writer) -> None:
    a = w.value(range(1, 4))
    shape = w.shape(a)
    low = [w.random.choice([0, 0, 1]) for _ in shape]
    high = [w.random.choice([0, 0, 2]) for _ in shape]
    w.write(
        "pad",
        [a, w.argument(())],
        [(tuple(sum(x) for x in zip(shape, low, high, strict=True)), "f32")],
        '"stablehlo.pad"({0}, {1}) @attributes : ({types}) -> {result}',
        f"edge_padding_low = {numbers(low)}, edge_padding_high = {numbers(high)}, "
        f"interior_padding = {numbers([0] * len(shape))}",
    )


def flip(w: Writer) -> None:
    a = w.value(range(1, 4))
    dims = w.random.sample(range(len(w.shape(a))), 1)
    w.write(
        "flip",
        [a],
        [w.values[a]],
        '"stablehlo.reverse"({0}) @attributes : ({types}) -> {result}',
        f"dimensions = {numbers(dims)}",
    )


def dynamic_slice(w: Writer) -> None:
    a = w.value(range(1, 4))
    shape = w.shape(a)
    sizes = [w.random.choice([size, w.random.randint(1, size)]) for size in shape]
    starts = [w.argument((), "i32") for _ in shape]
    words = ", ".join(f"{{{i}}}" for i in range(1 + len(starts)))
    w.write(
        "dynamic_slice",
        [a, *starts],
        [(tuple(sizes), "f32")],
        f'"stablehlo.dynamic_slice"({words}) @attributes : ({{types}}) -> {{result}}',
        f"slice_sizes = {numbers(sizes)}",
    )


def dynamic_update_slice(w: Writer) -> None:
    a = w.value(range(1, 4))
    shape = w.shape(a)
    b = w.like(tuple(w.random.choice([size, w.random.randint(1, size)]) for size in shape))
    starts = [w.argument((), "i32") for _ in shape]
    words = ", ".join(f"{{{i}}}" for i in range(2 + len(starts)))
    w.write(
        "dynamic_update_slice",
        [a, b, *starts],
        [w.values[a]],
        f'"stablehlo.dynamic_update_slice"({words}) @attributes : ({{types}}) -> {{result}}',
    )


def sort(w: Writer) -> None:
    a = w.value(range(1, 4))
    both = w.random.random() < 0.3
    operands = [a, w.like(w.shape(a))] if both else [a]
    names = "%p: tensor<f32>, %q: tensor<f32>"
    if both:
        names += ", %r: tensor<f32>, %s: tensor<f32>"
    words = "{0}, {1}" if both else "{0}"
    w.write(
        "sort",
        operands,
        [w.values[a]] * len(operands),
        f'"stablehlo.sort"({words}) ({{{{ ^bb0({names}): '
        '%c = "stablehlo.compare"(%p, %q) {{comparison_direction = '
        "#stablehlo<comparison_direction LT>}} : (tensor<f32>, tensor<f32>) -> tensor<i1> "
        '"stablehlo.return"(%c) : (tensor<i1>) -> () }}) @attributes : ({types}) -> ({result})',
        f"dimension = {w.random.randrange(len(w.shape(a)))} : i64, is_stable = true",
    )


def fft(w: Writer) -> None:
    shape = tuple(w.random.choice(w.sizes) for _ in range(w.random.randint(1, 3)))
    a = w.argument(shape, "complex<f32>")
    w.write(
        "fft",
        [a],
        [w.values[a]],
        '"stablehlo.fft"({0}) @attributes : ({types}) -> {result}',
        f"fft_length = {numbers([shape[-1]])}, fft_type = #stablehlo<fft_type FFT>",
    )


def cholesky(w: Writer) -> None:
    n = w.random.choice(w.sizes)
    a = w.argument((w.random.choice(w.sizes), n, n))
    w.write(
        "cholesky",
        [a],
        [w.values[a]],
        '"stablehlo.cholesky"({0}) @attributes : ({types}) -> {result}',
        "lower = true",
    )


def triangular_solve(w: Writer) -> None:
    n, m = w.random.choice(w.sizes), w.random.choice(w.sizes)
    a, b = w.argument((n, n)), w.argument((n, m))
    w.write(
        "triangular_solve",
        [a, b],
        [((n, m), "f32")],
        '"stablehlo.triangular_solve"({0}, {1}) @attributes : ({types}) -> {result}',
        "left_side = true, lower = true, unit_diagonal = false, "
        "transpose_a = #stablehlo<transpose NO_TRANSPOSE>",
    )


def convolution(w: Writer) -> None:
    n, h, c, o = (w.random.choice(w.sizes) for _ in range(4))
    a, k = w.argument((n, h, h, c)), w.argument((3, 3, c, o))
    w.write(
        "convolution",
        [a, k],
        [((n, h, h, o), "f32")],
        '"stablehlo.convolution"({0}, {1}) @attributes : ({types}) -> {result}',
        "batch_group_count = 1 : i64, feature_group_count = 1 : i64, "
        "padding = dense<1> : tensor<2x2xi64>, dimension_numbers = "
        "#stablehlo.conv<[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]>",
    )


def gather(w: Writer) -> None:
    rows, width = w.random.choice(w.sizes), w.random.choice(w.sizes)
    table = w.like((rows, width))
    count = w.random.choice(w.sizes)
    indices = w.argument((count, 1), "i32")
    w.write(
        "take",
        [table, indices],
        [((count, width), "f32")],
        '"stablehlo.gather"({0}, {1}) @attributes : ({types}) -> {result}',
        "dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], "
        "start_index_map = [0], index_vector_dim = 1>, "
        f"slice_sizes = {numbers([1, width])}, indices_are_sorted = false",
    )


def scatter(w: Writer) -> None:
    rows, width = w.random.choice(w.sizes), w.random.choice(w.sizes)
    table = w.like((rows, width))
    count = w.random.choice(w.sizes)
    indices, update = w.argument((count, 1), "i32"), w.like((count, width))
    w.write(
        "scatter",
        [table, indices, update],
        [((rows, width), "f32")],
        '"stablehlo.scatter"({0}, {1}, {2}) ({{ ^bb0(%x: tensor<f32>, %y: tensor<f32>): '
        '%z = "stablehlo.add"(%x, %y) : (tensor<f32>, tensor<f32>) -> tensor<f32> '
        '"stablehlo.return"(%z) : (tensor<f32>) -> () }}) @attributes : ({types}) -> {result}',
        "scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], "
        "inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>, "
        "indices_are_sorted = false, unique_indices = false",
    )


def pooling(w: Writer) -> None:
    a = w.value(range(2, 4), at_least=2)
    shape = w.shape(a)
    window = [1] * len(shape)
    window[w.random.randrange(len(shape))] = 2
    w.write(
        "max_pool",
        [a, w.argument(())],
        [(tuple(s - k + 1 for s, k in zip(shape, window, strict=True)), "f32")],
        '"stablehlo.reduce_window"({0}, {1}) ({{ ^bb0(%x: tensor<f32>, %y: tensor<f32>): '
        '%z = "stablehlo.maximum"(%x, %y) : (tensor<f32>, tensor<f32>) -> tensor<f32> '
        '"stablehlo.return"(%z) : (tensor<f32>) -> () }}) @attributes : ({types}) -> {result}',
        f"window_dimensions = {numbers(window)}",
    )


def constraint(w: Writer) -> None:
    a = w.value(range(1, 4))
    w.write("sharding_constraint", [a], [w.values[a]], "")


OFTEN: list[Maker] = [unary, binary, binary, matmul, matmul, transpose, broadcast, reshape, reduce]
OTHERS: list[Maker] = [
    where,
    clip,
    concat,
    slice_,
    pad,
    flip,
    dynamic_slice,
    dynamic_update_slice,
    sort,
    fft,
    cholesky,
    triangular_solve,
    convolution,
    gather,
    scatter,
    pooling,
    constraint,
]
