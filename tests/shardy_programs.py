"""Random StableHLO functions with random shardings, for Shardy and for us.

`random_program(random)` writes one; its text is MLIR. `operation names` are those our graphs have:
the array API's where it has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from reshard.mesh import Axis, DeviceMesh
from reshard.notation.shardy import shardy_mesh_text, shardy_text
from reshard.sharding import DimSpec, ShardingSpec

Shape = tuple[int, ...]

DTYPES = {"f32": "float32", "i1": "bool", "i32": "int32", "ui64": "uint64", "complex<f32>": "c64"}


@dataclass
class Statement:
    """One operation in MLIR: `{0}`, `{1}`.. stand for the operands."""

    name: str
    operands: list[int]
    results: list[tuple[Shape, str]]
    template: str
    attributes: str = ""
    """Further attributes, inside the braces."""
    numbers: list[int] = field(default_factory=list)


@dataclass
class Program:
    """A function: its mesh, its arguments, its operations, what it returns."""

    mesh: DeviceMesh
    values: list[tuple[Shape, str]]
    inputs: list[int]
    statements: list[Statement]
    outputs: list[int]
    annotations: dict[int, ShardingSpec] = field(default_factory=dict)
    asked: dict[int, ShardingSpec] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The module in MLIR."""
        arguments = ", ".join(
            f"%v{number}: {tensor(*self.values[number])}{self._marked(self.annotations, number)}"
            for number in self.inputs
        )
        results = ", ".join(
            f"{tensor(*self.values[number])}{self._marked(self.asked, place)}"
            for place, number in enumerate(self.outputs)
        )
        lines = [
            "module {",
            shardy_mesh_text(self.mesh),
            f"func.func @main({arguments}) -> ({results}) {{",
        ]
        lines += map(self._line, self.statements)
        names = ", ".join(map(self._name, self.outputs))
        types = ", ".join(tensor(*self.values[number]) for number in self.outputs)
        return "\n".join([*lines, f"return {names} : {types}", "}", "}"])

    def _name(self, number: int) -> str:
        for one in self.statements:
            if number in one.numbers and len(one.numbers) > 1:
                return f"%v{one.numbers[0]}#{one.numbers.index(number)}"
        return f"%v{number}"

    def _marked(self, specs: dict[int, ShardingSpec], number: int) -> str:
        if number not in specs:
            return ""
        return f" {{sdy.sharding = {shardy_text(specs[number])}}}"

    def _line(self, one: Statement) -> str:
        operands = [self._name(number) for number in one.operands]
        types = [tensor(*self.values[number]) for number in one.operands]
        results = [tensor(*self.values[number]) for number in one.numbers]
        given = [self.annotations.get(number) for number in one.numbers]
        attributes = [one.attributes] if one.attributes else []
        if one.name == "sharding_constraint":
            spec = self.annotations[one.numbers[0]]
            sharding = shardy_text(spec).removeprefix("#sdy.sharding")
            constrained = f"sdy.sharding_constraint {operands[0]} {sharding} : {types[0]}"
            return f"%v{one.numbers[0]} = {constrained}"
        if any(spec is not None for spec in given):
            texts = ", ".join(
                shardy_text(
                    spec
                    or ShardingSpec(
                        self.mesh, [DimSpec(is_open=True)] * len(self.values[number][0])
                    )
                ).removeprefix("#sdy.sharding")
                for number, spec in zip(one.numbers, given, strict=True)
            )
            attributes.append(f"sdy.sharding = #sdy.sharding_per_value<[{texts}]>")
        body = one.template.format(
            *operands, types=", ".join(types), result=", ".join(results), first=results[0]
        )
        found = f"%v{one.numbers[0]}" + (f":{len(one.numbers)}" if len(one.numbers) > 1 else "")
        marks = "{" + ", ".join(attributes) + "}" if attributes else ""
        return f"{found} = " + body.replace("@attributes", marks)


def tensor(shape: Shape, dtype: str) -> str:
    """The MLIR type of an array."""
    return f"tensor<{''.join(f'{size}x' for size in shape)}{dtype}>"


class Writer:
    """Writes operations one after the other."""

    def __init__(self, random: Random, sizes: list[int]) -> None:
        self.random = random
        self.sizes = sizes
        self.values: list[tuple[Shape, str]] = []
        self.statements: list[Statement] = []
        self.inputs: list[int] = []

    def argument(self, shape: Shape, dtype: str = "f32") -> int:
        """A new argument of the function."""
        self.values.append((shape, dtype))
        self.inputs.append(len(self.values) - 1)
        return len(self.values) - 1

    def like(self, shape: Shape) -> int:
        """A value of a shape: one that is there, or a new argument."""
        there = [n for n, value in enumerate(self.values) if value == (shape, "f32")]
        if there and self.random.random() < 0.7:
            return self.random.choice(there)
        return self.argument(shape)

    def write(
        self,
        name: str,
        operands: list[int],
        results: list[tuple[Shape, str]],
        template: str,
        attributes: str = "",
    ) -> int:
        """Add an operation. The number of its first result."""
        numbers = list(range(len(self.values), len(self.values) + len(results)))
        self.values += results
        self.statements.append(Statement(name, operands, results, template, attributes, numbers))
        return numbers[0]

    def value(self, ranks: range, at_least: int = 1) -> int:
        """A value to work on."""
        there = [
            n
            for n, (shape, dtype) in enumerate(self.values)
            if dtype == "f32" and len(shape) in ranks and min(shape, default=1) >= at_least
        ]
        if there and self.random.random() < 0.85:
            return self.random.choice(there[-4:] if self.random.random() < 0.6 else there)
        shape = tuple(
            self.random.choice(self.sizes)
            for _ in range(self.random.randint(ranks.start, min(ranks.stop - 1, 3)))
        )
        return self.argument(shape)

    def shape(self, number: int) -> Shape:
        """The shape of a value."""
        return self.values[number][0]


Maker = Callable[[Writer], object]


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
    return f"array<i64: {', '.join(map(str, values))}>"


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
MAKERS: list[Maker] = [
    *OFTEN,
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


def random_mesh(random: Random) -> DeviceMesh:
    """1 to 4 axes, at most 64 devices."""
    while True:
        sizes = [random.choice([2, 2, 3, 4, 4, 6, 8]) for _ in range(random.randint(1, 4))]
        if math.prod(sizes) <= 96:
            return DeviceMesh("mesh", sizes, ["a", "b", "c", "d"][: len(sizes)])


def random_spec(random: Random, mesh: DeviceMesh, ndim: int, *, partial: float) -> ShardingSpec:
    """Axes and parts of axes dealt to dimensions, some replicated, some partial."""
    parts: list[Axis] = []
    for name, size in zip(mesh.axis_names, mesh.shape, strict=True):
        divisors = [d for d in range(2, size) if size % d == 0]
        if divisors and random.random() < 0.35:
            cut = random.choice(divisors)
            parts += [Axis(name, 1, cut), Axis(name, cut, size // cut)]
        else:
            parts.append(Axis(name))
    random.shuffle(parts)
    dims: list[list[Axis]] = [[] for _ in range(ndim)]
    replicated: list[Axis] = []
    unreduced: list[Axis] = []
    for part in parts:
        draw = random.random()
        if draw < 0.55 and ndim:
            random.choice(dims).append(part)
        elif draw < 0.62:
            replicated.append(part)
        elif draw < 0.62 + partial:
            unreduced.append(part)
    unreduced.sort()
    specs = []
    for axes in dims:
        is_open = random.random() < 0.5
        has_priority = (axes or is_open) and random.random() < 0.25
        specs.append(DimSpec(axes, is_open, random.choice([1, 1, 2, 5]) if has_priority else 0))
    return ShardingSpec(mesh, specs, replicated, unreduced)


def random_program(random: Random, *, makers: list[Maker] | None = None) -> Program:
    """A function of 1 to 12 operations, and shardings of some of its values."""
    mesh = random_mesh(random)
    sizes = random.choice([[2, 4, 8], [4, 8, 16], [2, 3, 4, 6, 8], [3, 5, 7, 8], [1, 2, 6, 12]])
    w = Writer(random, sizes)
    w.argument(tuple(random.choice(sizes) for _ in range(random.randint(1, 3))))
    for _ in range(random.choice([1, 2, 3, 4, 5, 6, 8, 10, 12])):
        if len(w.statements) < 12:
            random.choice(makers or MAKERS)(w)
    used = {number for one in w.statements for number in one.operands}
    made = [number for one in w.statements for number in one.numbers]
    outputs = [number for number in made if number not in used or random.random() < 0.1]
    program = Program(mesh, w.values, sorted(w.inputs), w.statements, outputs)
    partial = random.choice([0.0] * 7 + [0.1])
    how_many = random.choice([0.3, 0.6, 0.9])
    for number, (shape, _) in enumerate(w.values):
        share = how_many if number in w.inputs else how_many / 3
        if random.random() < share:
            program.annotations[number] = random_spec(random, mesh, len(shape), partial=partial)
    for one in w.statements:
        if one.name == "sharding_constraint":
            shape = w.shape(one.numbers[0])
            program.annotations[one.numbers[0]] = random_spec(
                random, mesh, len(shape), partial=partial
            )
    for place, number in enumerate(outputs):
        if random.random() < how_many / 3:
            program.asked[place] = random_spec(random, mesh, len(w.shape(number)), partial=partial)
    return program
