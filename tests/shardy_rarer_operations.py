"""Random operations of StableHLO of which programs have few, and custom calls.

Together with `shardy_operations` these are all kinds of rules that Shardy registers, but for
collectives, which no operator of ours is. An operation of several names has one of them.
"""

from __future__ import annotations

import math

from shardy_operations import ADD, Maker, numbers
from shardy_writer import Shape, Writer

GENERIC = '"stablehlo.{op}"({operands}) @attributes : ({{types}}) -> {{result}}'
SEVERAL = '"stablehlo.{op}"({operands}) @attributes : ({{types}}) -> ({{result}})'


def generic(op: str, operands: int, results: int = 1) -> str:
    """The template of an operation without regions."""
    words = ", ".join(f"{{{number}}}" for number in range(operands))
    return (GENERIC if results == 1 else SEVERAL).format(op=op, operands=words)


def called(target: str, backend: str = "") -> str:
    """The attributes of a custom call."""
    return f'call_target_name = "{target}"' + (f", {backend}" if backend else "")


def new(w: Writer, least: int, most: int) -> Shape:
    """A new shape."""
    return tuple(w.random.choice(w.sizes) for _ in range(w.random.randint(least, most)))


UNARY = {
    "abs": "abs",
    "ceil": "ceil",
    "cbrt": "cbrt",
    "cos": "cosine",
    "expm1": "exponential_minus_one",
    "floor": "floor",
    "log": "log",
    "log1p": "log_plus_one",
    "round": "round_nearest_even",
    "rsqrt": "rsqrt",
    "sigmoid": "logistic",
    "sign": "sign",
    "sin": "sine",
    "sqrt": "sqrt",
    "tan": "tan",
}
BINARY = {
    "atan2": "atan2",
    "divide": "divide",
    "fmod": "remainder",
    "minimum": "minimum",
    "pow": "power",
}


def rarer_unary(w: Writer) -> None:
    a = w.value(range(4))
    name, op = w.random.choice(sorted(UNARY.items()))
    w.write(name, [a], [w.values[a]], generic(op, 1))


def rarer_binary(w: Writer) -> None:
    a = w.value(range(4))
    name, op = w.random.choice(sorted(BINARY.items()))
    w.write(name, [a, w.like(w.shape(a))], [w.values[a]], generic(op, 2))


def isfinite(w: Writer) -> None:
    a = w.value(range(4))
    w.write("isfinite", [a], [(w.shape(a), "i1")], generic("is_finite", 1))


def astype(w: Writer) -> None:
    """To whole numbers, which are then shifted or inverted, and back."""
    a = w.value(range(4))
    shape = w.shape(a)
    whole = w.write("astype", [a], [(shape, "i32")], generic("convert", 1))
    two = {
        "bitwise_and": "and",
        "bitwise_or": "or",
        "bitwise_xor": "xor",
        "bitwise_left_shift": "shift_left",
        "bitwise_right_shift": "shift_right_arithmetic",
    }
    if w.random.random() < 0.5:
        name, op = w.random.choice(sorted(two.items()))
        whole = w.write(name, [whole, whole], [(shape, "i32")], generic(op, 2))
    else:
        name, op = w.random.choice([("bitwise_invert", "not"), ("bitwise_count", "popcnt")])
        whole = w.write(name, [whole], [(shape, "i32")], generic(op, 1))
    w.write("astype", [whole], [(shape, "f32")], generic("convert", 1))


def complex_(w: Writer) -> None:
    """A complex array of two, and its parts."""
    a = w.value(range(4))
    shape = w.shape(a)
    both = w.write("complex", [a, w.like(shape)], [(shape, "complex<f32>")], generic("complex", 2))
    name = w.random.choice(["real", "imag"])
    w.write(name, [both], [(shape, "f32")], generic(name, 1))


def reduce_precision(w: Writer) -> None:
    a = w.value(range(4))
    bits = "exponent_bits = 5 : i32, mantissa_bits = 10 : i32"
    w.write("reduce_precision", [a], [w.values[a]], generic("reduce_precision", 1), bits)


def select(w: Writer) -> None:
    """One of two arrays, whole."""
    a = w.value(range(4))
    condition = w.argument((), "i1")
    w.write("where", [condition, a, w.like(w.shape(a))], [w.values[a]], generic("select", 3))


def view(w: Writer) -> None:
    """The bits of an array as narrower numbers, or wider ones."""
    if w.random.random() < 0.5:
        a = w.value(range(3))
        w.write("view", [a], [((*w.shape(a), 2), "i16")], generic("bitcast_convert", 1))
    else:
        shape = new(w, 0, 2)
        a = w.argument((*shape, 2), "i16")
        w.write("view", [a], [(shape, "f32")], generic("bitcast_convert", 1))


def broadcast_in_place(w: Writer) -> None:
    """Dimensions of one element become longer, with new ones among them."""
    shape = tuple(w.random.choice([1, *w.sizes]) for _ in range(w.random.randint(1, 3)))
    a = w.like(shape)
    target: list[int] = []
    places: list[int] = []
    for size in shape:
        if w.random.random() < 0.3 and len(target) < 3:
            target.append(w.random.choice(w.sizes))
        places.append(len(target))
        target.append(w.random.choice(w.sizes) if size == 1 else size)
    w.write(
        "broadcast_to",
        [a],
        [(tuple(target), "f32")],
        generic("broadcast_in_dim", 1),
        f"broadcast_dimensions = {numbers(places)}",
    )


def product_of_axes(w: Writer) -> None:
    """Products of several batch and contracted dimensions in any order."""
    batch, common = new(w, 0, 2), new(w, 0, 2)
    free = [new(w, 0, 1), new(w, 0, 1)]
    operands, places = [], []
    for own in free:
        sizes = [*batch, *common, *own]
        order = w.random.sample(range(len(sizes)), len(sizes))
        places.append([order.index(d) for d in range(len(sizes))])
        operands.append(w.like(tuple(sizes[d] for d in order)))
    lead, most = len(batch), len(batch) + len(common)
    sides = [
        f"{side}_{kind}_dimensions = {own[low:high]}"
        for kind, low, high in (("batching", 0, lead), ("contracting", lead, most))
        for side, own in zip(("lhs", "rhs"), places, strict=True)
    ]
    w.write(
        "dot_general",
        operands,
        [((*batch, *free[0], *free[1]), "f32")],
        generic("dot_general", 2),
        f"dot_dimension_numbers = #stablehlo.dot<{', '.join(sides)}>",
    )


def dot(w: Writer) -> None:
    """Vectors and matrices."""
    a = w.value(range(1, 3))
    shape = w.shape(a)
    columns = new(w, 0, 1)
    b = w.like((shape[-1], *columns))
    w.write("matmul", [a, b], [((*shape[:-1], *columns), "f32")], generic("dot", 2))


def other_reduce(w: Writer) -> None:
    a = w.value(range(1, 4))
    shape = w.shape(a)
    dims = sorted(w.random.sample(range(len(shape)), w.random.randint(0, len(shape))))
    w.write(
        "prod",
        [a, w.argument(())],
        [(tuple(s for d, s in enumerate(shape) if d not in dims), "f32")],
        '"stablehlo.reduce"({0}, {1}) ' + ADD.replace("add", "multiply") + " @attributes : "
        "({types}) -> {result}",
        f"dimensions = {numbers(dims)}",
    )


def argmax(w: Writer) -> None:
    """Values and their indices reduced together."""
    a = w.value(range(1, 4))
    shape = w.shape(a)
    axis = w.random.randrange(len(shape))
    rest = shape[:axis] + shape[axis + 1 :]
    heads = "%p: tensor<f32>, %i: tensor<i32>, %q: tensor<f32>, %j: tensor<i32>"
    w.write(
        w.random.choice(["argmax", "argmin"]),
        [a, w.argument(shape, "i32"), w.argument(()), w.argument((), "i32")],
        [(rest, "f32"), (rest, "i32")],
        f'"stablehlo.reduce"({{0}}, {{1}}, {{2}}, {{3}}) ({{{{ ^bb0({heads}): '
        '"stablehlo.return"(%p, %i) : (tensor<f32>, tensor<i32>) -> () }}) @attributes : '
        "({types}) -> ({result})",
        f"dimensions = {numbers([axis])}",
    )


def top_k(w: Writer) -> None:
    a = w.value(range(1, 4))
    shape = w.shape(a)
    kept = (*shape[:-1], w.random.choice([shape[-1], w.random.randint(1, shape[-1])]))
    w.write(
        "top_k",
        [a],
        [(kept, "f32"), (kept, "i32")],
        generic("custom_call", 1, 2),
        called("mhlo.topk", f"mhlo.attributes = {{k = {kept[-1]} : i64, largest = true}}"),
    )


def approximate_top_k(w: Writer) -> None:
    a = w.value(range(1, 4))
    shape = w.shape(a)
    axis = w.random.randrange(len(shape))
    kept = (*shape[:axis], w.random.randint(1, shape[axis]), *shape[axis + 1 :])
    w.write(
        "top_k",
        [a, w.argument(shape, "i32"), w.argument(()), w.argument((), "i32")],
        [(kept, "f32"), (kept, "i32")],
        generic("custom_call", 4, 2),
        called(w.random.choice(["ApproxTopK", "PartialReduce"])),
    )


def cumulative(w: Writer) -> None:
    """Running totals: a window as long as the axis, padded in front."""
    a = w.value(range(1, 4))
    shape = w.shape(a)
    axis = w.random.randrange(len(shape))
    name, op = w.random.choice(
        [
            ("cumulative_sum", "add"),
            ("cumulative_prod", "multiply"),
            ("cumulative_max", "maximum"),
            ("cumulative_min", "minimum"),
        ]
    )
    window = [size if d == axis else 1 for d, size in enumerate(shape)]
    padding = [[size - 1 if d == axis else 0, 0] for d, size in enumerate(shape)]
    w.write(
        name,
        [a, w.argument(())],
        [w.values[a]],
        '"stablehlo.reduce_window"({0}, {1}) ' + ADD.replace("add", op) + " @attributes : "
        "({types}) -> {result}",
        f"window_dimensions = {numbers(window)}, padding = dense<{padding}> : "
        f"tensor<{len(shape)}x2xi64>",
    )


def strided_pooling(w: Writer) -> None:
    a = w.value(range(1, 4), at_least=2)
    shape = w.shape(a)
    window = [w.random.choice([1, 2]) for _ in shape]
    steps = [w.random.choice([1, wide]) for wide in window]
    places = tuple((s - k) // step + 1 for s, k, step in zip(shape, window, steps, strict=True))
    w.write(
        "sum_pool",
        [a, w.argument(())],
        [(places, "f32")],
        '"stablehlo.reduce_window"({0}, {1}) ' + ADD + " @attributes : ({types}) -> {result}",
        f"window_dimensions = {numbers(window)}, window_strides = {numbers(steps)}",
    )


def gradient_of_pooling(w: Writer) -> None:
    a = w.value(range(1, 4), at_least=2)
    shape = w.shape(a)
    window = [w.random.choice([1, 2]) for _ in shape]
    places = tuple((s - k) // k + 1 for s, k in zip(shape, window, strict=True))
    compared = (
        '({{ ^bb0(%x: tensor<f32>, %y: tensor<f32>): %z = "stablehlo.compare"(%x, %y) '
        "{{comparison_direction = #stablehlo<comparison_direction GE>}} : "
        '(tensor<f32>, tensor<f32>) -> tensor<i1> "stablehlo.return"(%z) : (tensor<i1>) -> () }}, '
    )
    w.write(
        "gradient_of_pooling",
        [a, w.like(places), w.argument(())],
        [w.values[a]],
        '"stablehlo.select_and_scatter"({0}, {1}, {2}) '
        + compared
        + ADD.removeprefix("(")
        + " @attributes : ({types}) -> {result}",
        f"window_dimensions = {numbers(window)}, window_strides = {numbers(window)}",
    )


def take_along_axis(w: Writer) -> None:
    shape = new(w, 1, 3)
    a = w.like(shape)
    axis = w.random.randrange(len(shape))
    found = (*shape[:axis], w.random.choice(w.sizes), *shape[axis + 1 :])
    batch = [d for d in range(len(shape)) if d != axis]
    batching = (
        f"operand_batching_dims = {batch}, start_indices_batching_dims = {batch}, " if batch else ""
    )
    w.write(
        "take_along_axis",
        [a, w.argument(found, "i32")],
        [(found, "f32")],
        generic("gather", 2),
        f"dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [{axis}], {batching}"
        f"start_index_map = [{axis}], index_vector_dim = {len(shape)}>, "
        f"slice_sizes = {numbers([1] * len(shape))}, indices_are_sorted = false",
    )


def take(w: Writer) -> None:
    """Slices along any axis, by indices of any rank; windows of them too."""
    shape, indices = new(w, 1, 3), new(w, 0, 2)
    a = w.like(shape)
    axis = w.random.randrange(len(shape))
    sizes = [
        1 if d == axis else w.random.choice([size, size, w.random.randint(1, size)])
        for d, size in enumerate(shape)
    ]
    kept = [size for d, size in enumerate(sizes) if d != axis]
    result = (*kept[:axis], *indices, *kept[axis:])
    offsets = [d for d in range(len(result)) if not axis <= d < axis + len(indices)]
    w.write(
        "take",
        [a, w.argument(indices, "i32")],
        [(result, "f32")],
        generic("gather", 2),
        "dimension_numbers = #stablehlo.gather<"
        + (f"offset_dims = {offsets}, " if offsets else "")
        + f"collapsed_slice_dims = [{axis}], start_index_map = [{axis}], "
        f"index_vector_dim = {len(indices)}>, slice_sizes = {numbers(sizes)}, "
        "indices_are_sorted = false",
    )


def scatter_along(w: Writer) -> None:
    """Updates along any axis, by indices of any rank."""
    shape, indices = new(w, 1, 3), new(w, 0, 2)
    axis = w.random.randrange(len(shape))
    updates = shape[:axis] + indices + shape[axis + 1 :]
    windows = [d for d in range(len(updates)) if not axis <= d < axis + len(indices)]
    w.write(
        "scatter",
        [w.like(shape), w.argument(indices, "i32"), w.like(updates)],
        [(shape, "f32")],
        '"stablehlo.scatter"({0}, {1}, {2}) ' + ADD + " @attributes : ({types}) -> {result}",
        "scatter_dimension_numbers = #stablehlo.scatter<"
        + (f"update_window_dims = {windows}, " if windows else "")
        + f"inserted_window_dims = [{axis}], scatter_dims_to_operand_dims = [{axis}], "
        f"index_vector_dim = {len(indices)}>, indices_are_sorted = false, unique_indices = false",
    )


def other_slice(w: Writer) -> None:
    """Every other element, and windows."""
    a = w.value(range(1, 4))
    steps = [w.random.choice([1, 1, 2]) for _ in w.shape(a)]
    w.write(
        "slice",
        [a],
        [(tuple(-(-size // step) for size, step in zip(w.shape(a), steps, strict=True)), "f32")],
        generic("slice", 1),
        f"start_indices = {numbers([0] * len(steps))}, limit_indices = "
        f"{numbers(list(w.shape(a)))}, strides = {numbers(steps)}",
    )


def other_pad(w: Writer) -> None:
    """Between elements, and cropping."""
    a = w.value(range(1, 4), at_least=2)
    shape = w.shape(a)
    low, high, inner = (
        [w.random.choice(amounts) for _ in shape] for amounts in ([0, 0, 1], [0, -1], [0, 0, 1])
    )
    result = tuple(
        s + i * (s - 1) + a + b for s, a, b, i in zip(shape, low, high, inner, strict=True)
    )
    w.write(
        "pad",
        [a, w.argument(())],
        [(result, "f32")],
        generic("pad", 2),
        f"edge_padding_low = {numbers(low)}, edge_padding_high = {numbers(high)}, "
        f"interior_padding = {numbers(inner)}",
    )


def real_fft(w: Writer) -> None:
    """Of real arrays, or to them, over several axes."""
    shape = new(w, 1, 3)
    count = w.random.randint(1, len(shape))
    kind = w.random.choice(["FFT", "IFFT", "RFFT", "IRFFT"])
    lengths, result = list(shape[-count:]), shape
    given, made = "complex<f32>", "complex<f32>"
    if kind == "RFFT":
        given, result = "f32", (*shape[:-1], shape[-1] // 2 + 1)
    elif kind == "IRFFT":
        made, lengths[-1] = "f32", max(2 * (shape[-1] - 1), 1)
        result = (*shape[:-1], lengths[-1])
    names = {"FFT": "fftn", "IFFT": "ifftn", "RFFT": "rfftn", "IRFFT": "irfftn"}
    a = w.like(shape) if given == "f32" else w.argument(shape, given)
    w.write(
        names[kind],
        [a],
        [(result, made)],
        generic("fft", 1),
        f"fft_length = {numbers(lengths)}, fft_type = #stablehlo<fft_type {kind}>",
    )


def solve(w: Writer) -> None:
    """From either side, transposed or not, with batches."""
    lead, (n, m) = new(w, 0, 1), (w.random.choice(w.sizes), w.random.choice(w.sizes))
    is_left = w.random.random() < 0.5
    other = (*lead, n, m) if is_left else (*lead, m, n)
    turned = w.random.choice(["NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"])
    w.write(
        "triangular_solve",
        [w.like((*lead, n, n)), w.like(other)],
        [(other, "f32")],
        generic("triangular_solve", 2),
        f"left_side = {str(is_left).lower()}, lower = true, unit_diagonal = false, "
        f"transpose_a = #stablehlo<transpose {turned}>",
    )


def matrices(w: Writer) -> int:
    """An array of matrices."""
    return w.value(range(2, 4))


def qr(w: Writer) -> None:
    a = matrices(w)
    *lead, m, n = w.shape(a)
    w.write(
        "qr",
        [a],
        [w.values[a], ((*lead, min(m, n)), "f32")],
        generic("custom_call", 1, 2),
        called(w.random.choice(["Qr", "QrDecompositionBlock"])),
    )


def reflectors(w: Writer) -> None:
    """The product of what `Qr` makes."""
    a = matrices(w)
    *lead, m, n = w.shape(a)
    taus = w.like((*lead, min(m, n)))
    call = called("ProductOfElementaryHouseholderReflectors")
    w.write("householder_product", [a, taus], [w.values[a]], generic("custom_call", 2), call)


def eigh(w: Writer) -> None:
    shape = (*new(w, 0, 1), *[w.random.choice(w.sizes)] * 2)
    a = w.like(shape)
    w.write(
        "eigh",
        [a],
        [w.values[a], (shape[:-1], "f32")],
        generic("custom_call", 1, 2),
        called("Eigh"),
    )


def call(w: Writer) -> None:
    """Custom calls whose results lie as their operands do; one in six that nobody knows."""
    a = w.value(range(1, 4))
    known = "annotate_device_placement Cholesky LayoutConstraint mhlo.erf MoveToDevice MoveToHost"
    is_known = w.random.random() < 5 / 6
    target = w.random.choice(known.split()) if is_known else "nobody_knows_this"
    w.write(
        "call" if is_known else "unknown",
        [a],
        [w.values[a]],
        generic("custom_call", 1),
        called(target),
    )


def random_bits(w: Writer) -> None:
    shape = new(w, 1, 3)
    state = w.argument((2,), "ui64")
    bits = w.write(
        "random_bits",
        [state],
        [((2,), "ui64"), (shape, "ui32")],
        generic("rng_bit_generator", 1, 2),
        "rng_algorithm = #stablehlo<rng_algorithm DEFAULT>",
    )
    w.write("astype", [bits + 1], [(shape, "f32")], generic("convert", 1))


def batch_norm(w: Writer) -> None:
    a = w.value(range(1, 4))
    axis = w.random.randrange(len(w.shape(a)))
    vectors = [w.like((w.shape(a)[axis],)) for _ in range(4)]
    w.write(
        "batch_norm",
        [a, *vectors],
        [w.values[a]],
        generic("batch_norm_inference", 5),
        f"epsilon = 1.0e-5 : f32, feature_index = {axis} : i64",
    )


def convolution_in_groups(w: Writer) -> None:
    groups, batch_groups = w.random.choice([(1, 1), (2, 1), (3, 1), (1, 2), (1, 4)])
    n, c, o = (w.random.choice(w.sizes) for _ in range(3))
    space = w.random.randint(0, 2)
    sizes = [w.random.choice([2, 4, 8]) for _ in range(space)]
    window = [w.random.randint(1, size) for size in sizes]
    steps = [w.random.choice([1, 1, 2]) for _ in sizes]
    places = tuple((s - k) // step + 1 for s, k, step in zip(sizes, window, steps, strict=True))
    outputs = o * groups * batch_groups
    a = w.like((n * batch_groups, c * groups, *sizes))
    k = w.like((outputs, c, *window))
    names = "".join(f", {d}" for d in range(space))
    w.write(
        "convolution",
        [a, k],
        [((n, outputs, *places), "f32")],
        generic("convolution", 2),
        f"batch_group_count = {batch_groups} : i64, feature_group_count = {groups} : i64, "
        f"window_strides = {numbers(steps)}, dimension_numbers = "
        f"#stablehlo.conv<[b, f{names}]x[o, i{names}]->[b, f{names}]>",
    )


def several_totals(w: Writer) -> None:
    """Two arrays reduced together."""
    a = w.value(range(1, 4))
    shape = w.shape(a)
    dims = sorted(w.random.sample(range(len(shape)), w.random.randint(1, len(shape))))
    rest = tuple(s for d, s in enumerate(shape) if d not in dims)
    heads = ", ".join(f"%{name}: tensor<f32>" for name in "pqrs")
    w.write(
        "sum",
        [a, w.like(shape), w.argument(()), w.argument(())],
        [(rest, "f32"), (rest, "f32")],
        f'"stablehlo.reduce"({{0}}, {{1}}, {{2}}, {{3}}) ({{{{ ^bb0({heads}): '
        '"stablehlo.return"(%p, %q) : (tensor<f32>, tensor<f32>) -> () }}) @attributes : '
        "({types}) -> ({result})",
        f"dimensions = {numbers(dims)}",
    )


def merged(w: Writer) -> None:
    """A dimension that splits where others merge: reshapes that share few factors."""
    a = w.value(range(1, 4))
    count = math.prod(w.shape(a))
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    first = w.random.choice(divisors)
    inner = [d for d in range(1, count // first + 1) if (count // first) % d == 0]
    second = w.random.choice(inner)
    w.write(
        "reshape",
        [a],
        [((first, second, count // first // second), "f32")],
        generic("reshape", 1),
    )


# Those of many names are there more than once, so that none of their names is too rare.
RARER: list[Maker] = [
    *[rarer_unary] * 3,
    rarer_binary,
    isfinite,
    *[astype] * 2,
    complex_,
    reduce_precision,
    select,
    view,
    broadcast_in_place,
    product_of_axes,
    dot,
    other_reduce,
    argmax,
    top_k,
    approximate_top_k,
    cumulative,
    strided_pooling,
    gradient_of_pooling,
    take_along_axis,
    take,
    scatter_along,
    other_slice,
    other_pad,
    real_fft,
    solve,
    qr,
    reflectors,
    eigh,
    call,
    random_bits,
    batch_norm,
    convolution_in_groups,
    several_totals,
    merged,
]
