"""Random operations of StableHLO, and what they are in the table of rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """An operation's text, its arguments', and the operator and attributes that say the same.

    `operands` are the shapes of the operator's operands: the first of the operation's, which may
    have scalars behind them that the operator has not.
    """

    kind: str
    arguments: str
    text: str
    operator: str
    operands: tuple[Shape, ...]
    attributes: dict[str, Any] = field(default_factory=dict)


def tensor(shape: Shape, element: str = "f32") -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"


def arguments(*types: str) -> str:
    return ", ".join(f"%a{number}: {kind}" for number, kind in enumerate(types))


def region(body: str, *names: str, element: str = "f32") -> str:
    heads = ", ".join(f"%{name}: tensor<{element}>" for name in names)
    return f"({{\n^bb0({heads}):\n{body}\n}})"


ADD = region("%s = stablehlo.add %x, %y : tensor<f32>\nstablehlo.return %s : tensor<f32>", "x", "y")
LESS = region(
    "%s = stablehlo.compare LT, %x, %y : (tensor<f32>, tensor<f32>) -> tensor<i1>\n"
    "stablehlo.return %s : tensor<i1>",
    "x",
    "y",
)

UNARY = {
    **{name: name for name in ("abs", "sqrt", "tanh", "floor", "rsqrt", "ceil", "sign", "log")},
    "exponential": "exp",
    "negate": "negative",
    "logistic": "sigmoid",
    "sine": "sin",
    "cosine": "cos",
    "exponential_minus_one": "expm1",
    "log_plus_one": "log1p",
    "round_nearest_even": "round",
    "cbrt": "cbrt",
}
BINARY = {
    **{name: name for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum")},
    "power": "pow",
    "atan2": "atan2",
    "remainder": "fmod",
}

MAKERS: dict[str, Callable[[Random], Operation]] = {}


def maker(function: Callable[[Random], Operation]) -> Callable[[Random], Operation]:
    MAKERS[function.__name__.strip("_")] = function
    return function


def a_shape(random: Random, least: int = 0, most: int = 4, zero: bool = True) -> Shape:
    sizes = [1, 2, 3, 4, 5, 6, 8, 12] + [0] * zero
    return tuple(random.choice(sizes) for _ in range(random.randint(least, most)))


def dims(values: Any) -> str:
    return f"[{', '.join(map(str, values))}]"


def array(values: Any) -> str:
    text = ", ".join(map(str, values))
    return f"array<i64: {text}>" if text else "array<i64>"


@maker
def _elementwise(random: Random) -> Operation:
    shape = a_shape(random)
    kind = tensor(shape)
    if random.random() < 0.5:
        name, ours = random.choice(list(UNARY.items()))
        text = f"%0 = stablehlo.{name} %a0 : {kind}"
        return Operation("elementwise", arguments(kind), text, ours, (shape,))
    name, ours = random.choice(list(BINARY.items()))
    text = f"%0 = stablehlo.{name} %a0, %a1 : {kind}"
    return Operation("elementwise", arguments(kind, kind), text, ours, (shape, shape))


@maker
def _select(random: Random) -> Operation:
    shape = a_shape(random)
    condition = random.choice([shape, ()])
    kinds = (tensor(condition, "i1"), tensor(shape), tensor(shape))
    text = f"%0 = stablehlo.select %a0, %a1, %a2 : {kinds[0]}, {kinds[1]}"
    return Operation("select", arguments(*kinds), text, "select", (condition, shape, shape))


@maker
def _clamp(random: Random) -> Operation:
    shape = a_shape(random)
    bound = random.choice([shape, ()])
    kinds = (tensor(bound), tensor(shape), tensor(bound))
    text = f"%0 = stablehlo.clamp %a0, %a1, %a2 : ({', '.join(kinds)}) -> {kinds[1]}"
    return Operation("clamp", arguments(*kinds), text, "clamp", (bound, shape, bound))


@maker
def _convert(random: Random) -> Operation:
    shape = a_shape(random)
    text = f"%0 = stablehlo.convert %a0 : ({tensor(shape)}) -> {tensor(shape, 'i32')}"
    return Operation("convert", arguments(tensor(shape)), text, "astype", (shape,))


@maker
def _dot_general(random: Random) -> Operation:
    batch, common, *free = (a_shape(random, 0, 2) for _ in range(4))
    shapes: list[Shape] = []
    batching, contracting, rest = [], [], []
    for own in free:
        sizes = [*batch, *common, *own]
        order = random.sample(range(len(sizes)), len(sizes))
        places = [order.index(d) for d in range(len(sizes))]
        shapes.append(tuple(sizes[d] for d in order))
        rest += [sizes[d] for d in order if d >= len(batch) + len(common)]
        batching.append(places[: len(batch)])
        contracting.append(places[len(batch) : len(batch) + len(common)])
    kinds = [tensor(shape) for shape in shapes]
    result = tensor((*batch, *rest))
    pairs = [
        f"{name}_dims = {dims(a)} x {dims(b)}, "
        for name, (a, b) in (("batching", batching), ("contracting", contracting))
        if a or name == "contracting"
    ]
    text = (
        f"%0 = stablehlo.dot_general %a0, %a1, {''.join(pairs)}precision = [DEFAULT, DEFAULT] : "
        f"({', '.join(kinds)}) -> {result}"
    )
    return Operation(
        "dot",
        arguments(*kinds),
        text,
        "dot_general",
        tuple(shapes),
        {"batching": batching, "contracting": contracting},
    )


@maker
def _transpose(random: Random) -> Operation:
    shape = a_shape(random)
    axes = random.sample(range(len(shape)), len(shape))
    result = tuple(shape[axis] for axis in axes)
    text = (
        f"%0 = stablehlo.transpose %a0, dims = {dims(axes)} : ({tensor(shape)}) -> {tensor(result)}"
    )
    return Operation(
        "transpose", arguments(tensor(shape)), text, "permute_dims", (shape,), {"axes": axes}
    )


@maker
def _broadcast(random: Random) -> Operation:
    shape = a_shape(random, 0, 3)
    result = a_shape(random, 0, 2) + tuple(
        random.choice([2, 3, 4]) if size == 1 else size for size in shape
    )
    lead = len(result) - len(shape)
    text = (
        f"%0 = stablehlo.broadcast_in_dim %a0, dims = {dims(range(lead, len(result)))} : "
        f"({tensor(shape)}) -> {tensor(result)}"
    )
    return Operation(
        "broadcast", arguments(tensor(shape)), text, "broadcast_to", (shape,), {"shape": result}
    )


def factored(random: Random, size: int) -> Shape:
    found = []
    while size > 1 and random.random() < 0.75:
        part = random.choice([d for d in range(1, size + 1) if size % d == 0])
        found.append(part)
        size //= part
    if size > 1:
        found.append(size)
    if random.random() < 0.3:
        found.insert(random.randint(0, len(found)), 1)
    if random.random() < 0.3:
        random.shuffle(found)
    return tuple(found)


@maker
def _reshape(random: Random) -> Operation:
    size = random.choice([1, 2, 4, 6, 8, 12, 16, 24, 30, 36, 48, 60, 64, 96, 120, 210, 0])
    if size:
        shape, result = factored(random, size), factored(random, size)
    else:
        rest = a_shape(random, 0, 2)
        shape, result = (
            tuple(random.sample(own, len(own)))
            for own in ([0, *rest], [0, *random.choice([rest, (2,), (3, 4)])])
        )
    text = f"%0 = stablehlo.reshape %a0 : ({tensor(shape)}) -> {tensor(result)}"
    return Operation(
        "reshape", arguments(tensor(shape)), text, "reshape", (shape,), {"shape": result}
    )


@maker
def _reduce(random: Random) -> Operation:
    shape = a_shape(random)
    axes = tuple(d for d in range(len(shape)) if random.random() < 0.5)
    name, ours = random.choice(
        [("add", "sum"), ("maximum", "max"), ("minimum", "min"), ("multiply", "prod")]
    )
    result = tensor(tuple(s for d, s in enumerate(shape) if d not in axes))
    text = (
        f"%0 = stablehlo.reduce(%a0 init: %a1) applies stablehlo.{name} across dimensions = "
        f"{dims(axes)} : ({tensor(shape)}, tensor<f32>) -> {result}"
    )
    kinds = arguments(tensor(shape), "tensor<f32>")
    return Operation("reduce", kinds, text, ours, (shape,), {"axis": axes})


@maker
def _argmax(random: Random) -> Operation:
    shape = a_shape(random, 1)
    axis = random.randrange(len(shape))
    result = shape[:axis] + shape[axis + 1 :]
    body = region("stablehlo.return %x, %y : tensor<f32>, tensor<f32>", "x", "y", "z", "w")
    kinds = [tensor(shape), "tensor<f32>"]
    text = (
        f'%0:2 = "stablehlo.reduce"(%a0, %a0, %a1, %a1) <{{dimensions = {array([axis])}}}> {body} '
        f": ({kinds[0]}, {kinds[0]}, {kinds[1]}, {kinds[1]}) -> "
        f"({tensor(result)}, {tensor(result)})"
    )
    return Operation("argmax", arguments(*kinds), text, "argmax", (shape,), {"axis": axis})


@maker
def _concatenate(random: Random) -> Operation:
    shape = a_shape(random, 1)
    axis = random.randrange(len(shape))
    shapes = []
    for _ in range(random.randint(1, 3)):
        shapes.append((*shape[:axis], random.randint(1, 6), *shape[axis + 1 :]))
    result = (*shape[:axis], sum(own[axis] for own in shapes), *shape[axis + 1 :])
    kinds = [tensor(own) for own in shapes]
    names = ", ".join(f"%a{number}" for number in range(len(shapes)))
    text = (
        f"%0 = stablehlo.concatenate {names}, dim = {axis} : ({', '.join(kinds)}) -> "
        f"{tensor(result)}"
    )
    return Operation(
        "concatenate", arguments(*kinds), text, "concat", tuple(shapes), {"axis": axis}
    )


@maker
def _slice(random: Random) -> Operation:
    shape = a_shape(random)
    parts, result = [], []
    for size in shape:
        start = random.choice([0, random.randint(0, size)])
        limit = random.choice([size, random.randint(start, size)])
        step = random.choice([1, 1, 2])
        parts.append((start, limit, step))
        result.append(-((start - limit) // step))
    text = (
        f"%0 = stablehlo.slice %a0 [{', '.join(f'{a}:{b}:{c}' for a, b, c in parts)}] : "
        f"({tensor(shape)}) -> {tensor(tuple(result))}"
    )
    words = ("starts", "limits", "strides")
    columns = zip(*parts, strict=True) if parts else ((), (), ())
    attributes = dict(zip(words, columns, strict=True))
    return Operation("slice", arguments(tensor(shape)), text, "slice", (shape,), attributes)


@maker
def _pad(random: Random) -> Operation:
    shape = a_shape(random, zero=False)
    low, high, inner = (
        [random.choice([0, 0, 1, 2]) for _ in shape],
        [random.choice([0, 0, 1, -1]) for _ in shape],
        [random.choice([0, 0, 0, 1]) for _ in shape],
    )
    result = tuple(
        a + size + b + c * max(size - 1, 0)
        for size, a, b, c in zip(shape, low, high, inner, strict=True)
    )
    text = (
        f"%0 = stablehlo.pad %a0, %a1, low = {dims(low)}, high = {dims(high)}, interior = "
        f"{dims(inner)} : ({tensor(shape)}, tensor<f32>) -> {tensor(result)}"
    )
    attributes = {"pad_width": list(zip(low, high, strict=True)), "interior": inner}
    kinds = arguments(tensor(shape), "tensor<f32>")
    return Operation("pad", kinds, text, "pad", (shape,), attributes)


@maker
def _reverse(random: Random) -> Operation:
    shape = a_shape(random)
    axes = tuple(d for d in range(len(shape)) if random.random() < 0.5)
    text = f"%0 = stablehlo.reverse %a0, dims = {dims(axes)} : {tensor(shape)}"
    return Operation("reverse", arguments(tensor(shape)), text, "flip", (shape,), {"axis": axes})


def _within(random: Random) -> tuple[Shape, Shape]:
    shape = a_shape(random, zero=False)
    return shape, tuple(random.choice([size, random.randint(1, size)]) for size in shape)


@maker
def _dynamic_slice(random: Random) -> Operation:
    shape, sizes = _within(random)
    kinds = [tensor(shape)] + ["tensor<i32>"] * len(shape)
    names = ", ".join(f"%a{number}" for number in range(len(kinds)))
    text = (
        f"%0 = stablehlo.dynamic_slice {names}, sizes = {dims(sizes)} : ({', '.join(kinds)}) -> "
        f"{tensor(sizes)}"
    )
    operands = (shape, *((),) * len(shape))
    return Operation(
        "dynamic slice", arguments(*kinds), text, "dynamic_slice", operands, {"sizes": sizes}
    )


@maker
def _dynamic_update(random: Random) -> Operation:
    shape, sizes = _within(random)
    kinds = [tensor(shape), tensor(sizes)] + ["tensor<i32>"] * len(shape)
    names = ", ".join(f"%a{number}" for number in range(len(kinds)))
    text = f"%0 = stablehlo.dynamic_update_slice {names} : ({', '.join(kinds)}) -> {tensor(shape)}"
    operands = (shape, sizes, *((),) * len(shape))
    return Operation("dynamic update", arguments(*kinds), text, "dynamic_update_slice", operands)


@maker
def _sort(random: Random) -> Operation:
    shape = a_shape(random, 1)
    axis = random.randrange(len(shape))
    kind = tensor(shape)
    text = f'%0 = "stablehlo.sort"(%a0) <{{dimension = {axis} : i64}}> {LESS} : ({kind}) -> {kind}'
    return Operation("sort", arguments(kind), text, "sort", (shape,), {"axis": axis})


@maker
def _top_k(random: Random) -> Operation:
    shape = a_shape(random, 1, zero=False)
    k = random.randint(1, shape[-1])
    result = (*shape[:-1], k)
    text = (
        "%0:2 = stablehlo.custom_call @mhlo.topk(%a0) "
        f"{{mhlo.attributes = {{k = {k} : i64, largest = true}}, mhlo.version = 1 : i64}} : "
        f"({tensor(shape)}) -> ({tensor(result)}, {tensor(result, 'i32')})"
    )
    return Operation("top-k", arguments(tensor(shape)), text, "top_k", (shape,), {"k": k})


@maker
def _take(random: Random) -> Operation:
    shape = a_shape(random, 1, 3, zero=False)
    indices = a_shape(random, 0, 2, zero=False)
    axis = random.randrange(len(shape))
    result = shape[:axis] + indices + shape[axis + 1 :]
    offsets = [d for d in range(len(result)) if not axis <= d < axis + len(indices)]
    sizes = [1 if d == axis else size for d, size in enumerate(shape)]
    kinds = (tensor(shape), tensor(indices, "i32"))
    text = (
        '%0 = "stablehlo.gather"(%a0, %a1) <{dimension_numbers = #stablehlo.gather<'
        + (f"offset_dims = {dims(offsets)}, " if offsets else "")
        + f"collapsed_slice_dims = [{axis}], start_index_map = [{axis}], "
        f"index_vector_dim = {len(indices)}>, slice_sizes = {array(sizes)}}}> : "
        f"({', '.join(kinds)}) -> {tensor(result)}"
    )
    return Operation("gather", arguments(*kinds), text, "take", (shape, indices), {"axis": axis})


@maker
def _take_along(random: Random) -> Operation:
    shape = a_shape(random, 1, 3, zero=False)
    axis = random.randrange(len(shape))
    indices = (*shape[:axis], random.randint(1, 6), *shape[axis + 1 :])
    batch = [d for d in range(len(shape)) if d != axis]
    kinds = (tensor(shape), tensor(indices, "i32"))
    text = (
        '%0 = "stablehlo.gather"(%a0, %a1) <{dimension_numbers = #stablehlo.gather<'
        f"collapsed_slice_dims = [{axis}], "
        + (
            f"operand_batching_dims = {dims(batch)}, start_indices_batching_dims = {dims(batch)}, "
            if batch
            else ""
        )
        + f"start_index_map = [{axis}], index_vector_dim = {len(shape)}>, "
        f"slice_sizes = {array([1] * len(shape))}}}> : ({', '.join(kinds)}) -> {tensor(indices)}"
    )
    return Operation(
        "gather along", arguments(*kinds), text, "take_along_axis", (shape, indices), {"axis": axis}
    )


@maker
def _scatter(random: Random) -> Operation:
    shape = a_shape(random, 1, 3, zero=False)
    indices = a_shape(random, 0, 2, zero=False)
    axis = random.randrange(len(shape))
    updates = shape[:axis] + indices + shape[axis + 1 :]
    windows = [d for d in range(len(updates)) if not axis <= d < axis + len(indices)]
    kinds = (tensor(shape), tensor(indices, "i32"), tensor(updates))
    text = (
        '%0 = "stablehlo.scatter"(%a0, %a1, %a2) <{scatter_dimension_numbers = #stablehlo.scatter<'
        + (f"update_window_dims = {dims(windows)}, " if windows else "")
        + f"inserted_window_dims = [{axis}], scatter_dims_to_operand_dims = [{axis}], "
        f"index_vector_dim = {len(indices)}>}}> {ADD} : ({', '.join(kinds)}) -> {tensor(shape)}"
    )
    operands = (shape, indices, updates)
    return Operation(
        "scatter", arguments(*kinds), text, "scatter", operands, {"axis": axis, "mode": "add"}
    )


@maker
def _convolution(random: Random) -> Operation:
    space = random.randint(0, 2)
    groups, batch_groups = random.choice([(1, 1), (2, 1), (3, 1), (1, 2), (1, 4)])
    channels, own, batch = (random.choice([1, 2, 3, 4, 6]) for _ in range(3))
    sizes = [random.randint(2, 8) for _ in range(space)]
    window = [random.randint(1, size) for size in sizes]
    strides = [random.randint(1, 2) for _ in sizes]
    pads = [(random.randint(0, 1), random.randint(0, 1)) for _ in sizes]
    places = [
        (size + a + b - w) // step + 1
        for size, w, step, (a, b) in zip(sizes, window, strides, pads, strict=True)
    ]
    outputs = own * groups * batch_groups
    image = (batch * batch_groups, channels * groups, *sizes)
    kernel = (outputs, channels, *window)
    result = (batch, outputs, *places)
    names = "".join(f", {d}" for d in range(space))
    inside = [
        *([f"stride = {dims(strides)}", f"pad = {[list(p) for p in pads]}"] if space else []),
    ]
    text = (
        f"%0 = stablehlo.convolution(%a0, %a1) dim_numbers = [b, f{names}]x[o, i{names}]->"
        f"[b, f{names}], window = {{{', '.join(inside)}}} {{batch_group_count = {batch_groups} : "
        f"i64, feature_group_count = {groups} : i64}} : ({tensor(image)}, {tensor(kernel)}) -> "
        f"{tensor(result)}"
    )
    attributes = {
        "strides": strides,
        "padding": pads,
        "groups": groups,
        "batch_groups": batch_groups,
    }
    kinds = arguments(tensor(image), tensor(kernel))
    return Operation("convolution", kinds, text, "convolution", (image, kernel), attributes)


@maker
def _reduce_window(random: Random) -> Operation:
    shape = a_shape(random, 1, zero=False)
    window = [random.choice([1, 1, random.randint(1, size)]) for size in shape]
    strides = [random.choice([1, wide]) for wide in window]
    places = tuple((s - w) // step + 1 for s, w, step in zip(shape, window, strides, strict=True))
    text = (
        f'%0 = "stablehlo.reduce_window"(%a0, %a1) <{{window_dimensions = {array(window)}, '
        f"window_strides = {array(strides)}}}> {ADD} : ({tensor(shape)}, tensor<f32>) -> "
        f"{tensor(places)}"
    )
    kinds = arguments(tensor(shape), "tensor<f32>")
    attributes = {"window": window, "strides": strides}
    return Operation("reduce window", kinds, text, "sum_pool", (shape,), attributes)


@maker
def _cumulative(random: Random) -> Operation:
    shape = a_shape(random, 1, zero=False)
    axis = random.randrange(len(shape))
    window = [size if d == axis else 1 for d, size in enumerate(shape)]
    padding = [[size - 1 if d == axis else 0, 0] for d, size in enumerate(shape)]
    text = (
        f'%0 = "stablehlo.reduce_window"(%a0, %a1) <{{window_dimensions = {array(window)}, '
        f"padding = dense<{padding}> : tensor<{len(shape)}x2xi64>}}> {ADD} : ({tensor(shape)}, "
        f"tensor<f32>) -> {tensor(shape)}"
    )
    kinds = arguments(tensor(shape), "tensor<f32>")
    return Operation("cumulative", kinds, text, "cumulative_sum", (shape,), {"axis": axis})


@maker
def _fft(random: Random) -> Operation:
    shape = a_shape(random, 1, 4, zero=False)
    count = random.randint(1, min(3, len(shape)))
    axes = tuple(range(len(shape) - count, len(shape)))
    kind = random.choice(["FFT", "IFFT", "RFFT", "IRFFT"])
    lengths = list(shape[-count:])
    result, elements = shape, ["complex<f32>", "complex<f32>"]
    if kind == "RFFT":
        result, elements = (*shape[:-1], shape[-1] // 2 + 1), ["f32", "complex<f32>"]
    elif kind == "IRFFT":
        lengths[-1] = 2 * (shape[-1] - 1) + random.randint(shape[-1] == 1, 1)
        result, elements = (*shape[:-1], lengths[-1]), ["complex<f32>", "f32"]
    text = (
        f"%0 = stablehlo.fft %a0, type = {kind}, length = {dims(lengths)} : "
        f"({tensor(shape, elements[0])}) -> {tensor(result, elements[1])}"
    )
    ours = {"FFT": "fftn", "IFFT": "ifftn", "RFFT": "rfftn", "IRFFT": "irfftn"}[kind]
    kinds = arguments(tensor(shape, elements[0]))
    return Operation("FFT", kinds, text, ours, (shape,), {"axis": axes, "n": lengths})


@maker
def _cholesky(random: Random) -> Operation:
    size = random.randint(0, 6)
    shape = (*a_shape(random, 0, 2), size, size)
    text = f"%0 = stablehlo.cholesky %a0, lower = true : {tensor(shape)}"
    return Operation("cholesky", arguments(tensor(shape)), text, "cholesky", (shape,))


@maker
def _triangular_solve(random: Random) -> Operation:
    lead, size, columns = a_shape(random, 0, 2), random.randint(1, 6), random.randint(1, 6)
    left_side = random.random() < 0.5
    shapes = (
        (*lead, size, size),
        (*lead, size, columns) if left_side else (*lead, columns, size),
    )
    kinds = tuple(map(tensor, shapes))
    text = (
        f'%0 = "stablehlo.triangular_solve"(%a0, %a1) <{{left_side = {str(left_side).lower()}, '
        "lower = true, transpose_a = #stablehlo<transpose NO_TRANSPOSE>, unit_diagonal = false}> "
        f": ({', '.join(kinds)}) -> {kinds[1]}"
    )
    return Operation(
        "triangular solve",
        arguments(*kinds),
        text,
        "triangular_solve",
        shapes,
        {"left_side": left_side},
    )


@maker
def _random_bits(random: Random) -> Operation:
    shape = a_shape(random)
    text = (
        "%0:2 = stablehlo.rng_bit_generator %a0, algorithm = DEFAULT : (tensor<2xui64>) -> "
        f"(tensor<2xui64>, {tensor(shape, 'ui32')})"
    )
    return Operation(
        "random bits", arguments("tensor<2xui64>"), text, "random_bits", ((2,),), {"shape": shape}
    )


@maker
def _batch_norm(random: Random) -> Operation:
    shape = a_shape(random, 1)
    axis = random.randrange(len(shape))
    kinds = [tensor(shape)] + [tensor((shape[axis],))] * 4
    text = (
        '%0 = "stablehlo.batch_norm_inference"(%a0, %a1, %a2, %a3, %a4) '
        f"<{{epsilon = 1.0e-5 : f32, feature_index = {axis} : i64}}> : ({', '.join(kinds)}) -> "
        f"{kinds[0]}"
    )
    operands = (shape, *((shape[axis],),) * 4)
    return Operation("batch norm", arguments(*kinds), text, "batch_norm", operands, {"axis": axis})


def operations(seed: int, each: int) -> list[Operation]:
    """So many random operations of each kind."""
    random = Random(seed)
    return [make(random) for make, _ in itertools.product(MAKERS.values(), range(each))]
