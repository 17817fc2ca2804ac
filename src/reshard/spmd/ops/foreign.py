"""Operators of imported graphs, which `sp` never calls.

Graphs of other programs (StableHLO, other libraries) have operators that `sp` composes of other
operators, such as `stack`, or does not have at all. Propagation needs their rules; no rank computes
them here. A test shows that the rule of a composed operator equals its composition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from reshard.errors import SpecError
from reshard.spmd.core.operator import Example, ship
from reshard.spmd.core.result_types import boolean, of_first
from reshard.spmd.ops import elementwise, linalg, movement, networks, products, reductions
from reshard.spmd.ops.indexing import _register_lookup, take_rule
from reshard.spmd.ops.indexing import register as register_indexing
from reshard.spmd.rules import rule_builder as rules
from reshard.spmd.rules.rule_builder import Axes, Inferred, Shape

OF_GRAPHS = "it stands in other programs' graphs, and no rank computes it"
COMPOSED = "sp composes it of other operators, which have derivatives"
_UNARY = "angle cbrt degrees radians erf rsqrt softplus exp2 sinc i0 spacing"
_BINARY = "heaviside gcd lcm ldexp fmod float_power logaddexp2 fmax fmin"
for _name in _UNARY.split():
    elementwise.register_unary(_name, no_pullback=OF_GRAPHS)
for _name in _BINARY.split():
    elementwise.register_binary(_name, no_pullback=OF_GRAPHS)


elementwise.register_unary("gelu", no_pullback=COMPOSED)

elementwise.register(
    "clamp",
    elementwise._THREE,
    ([(), (4, 8), ()], {}),
    note="operands are the lower bound, the array, the upper bound",
    no_pullback=OF_GRAPHS,
)

elementwise.register(
    "select",
    elementwise._THREE,
    elementwise._OF_THREE,
    linear=(1, 2),
    commutes=("max", "min", "product"),
    note="where, by another name",
    no_pullback=OF_GRAPHS,
)


# ---- matrix_transpose


def matrix_transpose_rule(shapes: Sequence[Shape]) -> Inferred:
    """Infer matrices with their last two dimensions swapped."""
    shape = rules.one_operand("matrix_transpose", shapes)
    if len(shape) < 2:
        raise SpecError(f"shape {shape} is no matrix; 2 or more dimensions were expected")
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    return movement.permute_dims_rule(shapes, order)


movement.register(
    "matrix_transpose",
    matrix_transpose_rule,
    ([(2, 4, 8)], {}),
    operator_class=movement._REARRANGING,
    no_pullback=COMPOSED,
)


# ---- moveaxis


def moveaxis_rule(
    shapes: Sequence[Shape], source: int | Sequence[int], destination: int | Sequence[int]
) -> Inferred:
    """Infer axes that are moved, with the others kept in order."""
    rank = len(rules.one_operand("moveaxis", shapes))
    sources, destinations = (
        [rules.axis_of(rank, axis) for axis in ([axes] if isinstance(axes, int) else axes)]
        for axes in (source, destination)
    )
    if (
        len(sources) != len(destinations)
        or len({*sources}) != len(sources)
        or len({*destinations}) != len(destinations)
    ):
        raise SpecError(
            f"moveaxis of {source} to {destination}; name as many places as axes, each once"
        )
    order = [dim for dim in range(rank) if dim not in sources]
    # Axes are inserted in increasing order, so that no insertion shifts an earlier axis.
    for place, dim in sorted(zip(destinations, sources, strict=True)):
        order.insert(place, dim)
    return movement.permute_dims_rule(shapes, order)


movement.register(
    "moveaxis",
    moveaxis_rule,
    ([(2, 4, 8)], {"source": 0, "destination": 2}),
    operator_class=movement._REARRANGING,
    no_pullback=COMPOSED,
)


# ---- flatten


def flatten_rule(shapes: Sequence[Shape]) -> Inferred:
    """Merge all dimensions into a single dimension."""
    return movement.reshape_rule(shapes, (math.prod(rules.one_operand("flatten", shapes)),))


movement.register(
    "flatten",
    flatten_rule,
    ([(4, 8)], {}),
    operator_class=movement._REARRANGING,
    note="a reshape",
    no_pullback=COMPOSED,
)


# ---- broadcast_arrays


def broadcast_arrays_rule(shapes: Sequence[Shape]) -> Inferred:
    """Broadcast each operand to their common shape.

    >>> print(broadcast_arrays_rule([(4, 1), (8,)]).rule)
    ([i, j], [k]) -> ([i, k], [i, k]) {i=4, j=1, k=8} need_replication={j}
    """
    terms = ", ".join(["..."] * len(shapes))
    return rules.from_pattern(f"{terms} -> {terms}", shapes)


movement.register(
    "broadcast_arrays",
    broadcast_arrays_rule,
    ([(4, 1), (8,)], {}),
    operator_class=movement._BROADCASTING,
    no_pullback=COMPOSED,
)


# ---- stack


def stack_rule(shapes: Sequence[Shape], axis: int = 0) -> Inferred:
    """Stack arrays of equal shape along a new axis.

    >>> print(stack_rule([(4,), (4,)], axis=1).rule)
    ([i], [i]) -> ([i, j]) {i=4, j=2} need_replication={j}
    """
    movement.check_some("stack", shapes)
    if len(set(shapes)) > 1:
        raise SpecError(f"stack of {', '.join(map(str, shapes))}; one shape was expected")
    dims = range(len(shapes[0]) + 1)
    place = rules.axis_of(len(dims), axis)
    others = [dim for dim in dims if dim != place]
    sizes = {place: len(shapes)}
    return rules.from_dims([others] * len(shapes), [dims], shapes, sizes=sizes, whole=[place])


movement.register("stack", stack_rule, ([(4,), (4,)], {"axis": 1}), no_pullback=COMPOSED)


# ---- unstack


def unstack_rule(shapes: Sequence[Shape], axis: int = 0) -> Inferred:
    """Return the slices along an axis as separate arrays.

    >>> print(unstack_rule([(4, 2)], axis=1).rule)
    ([i, j]) -> ([i], [i]) {i=4, j=2} need_replication={j}
    """
    shape = rules.one_operand("unstack", shapes)
    dims, place = range(len(shape)), rules.axis_of(len(shape), axis)
    others = [dim for dim in dims if dim != place]
    return rules.from_dims([dims], [others] * shape[place], [shape], order=dims)


movement.register(
    "unstack", unstack_rule, ([(4, 2)], {"axis": 1}), reads_part=True, no_pullback=COMPOSED
)


# ---- split


def split_rule(
    shapes: Sequence[Shape], indices_or_sections: int | Sequence[int], axis: int = 0
) -> Inferred:
    """Split an axis into a number of equal pieces, or at indices, as `numpy.split`.

    >>> split_rule([(8,)], [3, 5]).result_shapes
    ((3,), (2,), (3,))
    """
    shape = rules.one_operand("split", shapes)
    place = rules.axis_of(len(shape), axis)
    size = shape[place]
    if isinstance(indices_or_sections, int):
        if indices_or_sections < 1 or size % indices_or_sections:
            raise SpecError(
                f"split of {size} into {indices_or_sections} equal pieces; give a divisor, or "
                "where they begin"
            )
        step = size // indices_or_sections
        cuts = [step * number for number in range(1, indices_or_sections)]
    else:
        # As in NumPy, negative indices count from the end, and indices are clipped to the axis.
        cuts = [slice(where).indices(size)[1] for where in indices_or_sections]
    ends = zip([0, *cuts], [*cuts, size], strict=True)
    results = [(*shape[:place], max(stop - start, 0), *shape[place + 1 :]) for start, stop in ends]
    dims, moved = range(len(shape)), [place] if len(results) > 1 else []
    return rules.from_dims([dims], [dims] * len(results), [shape], results, moved=moved)


movement.register(
    "split",
    split_rule,
    (movement._ROWS, {"indices_or_sections": 2, "axis": 1}),
    reads_part=True,
    note="as a slice for each piece",
    no_pullback=COMPOSED,
)


# ---- tile


def tile_rule(shapes: Sequence[Shape], repetitions: Sequence[int]) -> Inferred:
    """Infer repetitions: a dimension of the result is the repetitions, then the array's.

    >>> print(tile_rule([(4,)], (2, 3)).rule)
    ([k]) -> ([i, jk]) {i=2, j=3, k=4}
    """
    shape = rules.one_operand("tile", shapes)
    # Shapes and repetitions are aligned at the end: dimensions are counted from there.
    dims = range(-max(len(shape), len(repetitions)), 0)
    times = {f"times {dim}": repetitions[dim] if -dim <= len(repetitions) else 1 for dim in dims}
    result = [
        (*([name] if count != 1 or -dim > len(shape) else []), *([dim] * (-dim <= len(shape))))
        for dim, (name, count) in zip(dims, times.items(), strict=True)
    ]
    return rules.from_dims([range(-len(shape), 0)], [result], [shape], sizes=times)


movement.register(
    "tile",
    tile_rule,
    (movement._ROWS, {"repetitions": (3, 1)}),
    note="repetitions are the major factor of a dimension",
    no_pullback=COMPOSED,
)


# ---- repeat


def repeat_rule(
    shapes: Sequence[Shape], repeats: int | Sequence[int], axis: int | None = None
) -> Inferred:
    """Repeat each element; without an axis, of the flattened array.

    >>> print(repeat_rule([(4, 8)], repeats=3, axis=0).rule)
    ([i, k]) -> ([ij, k]) {i=4, j=3, k=8}
    """
    shape = rules.one_operand("repeat", shapes)
    place = None if axis is None else rules.axis_of(len(shape), axis)
    size = math.prod(shape) if place is None else shape[place]
    counts = [repeats] if isinstance(repeats, int) else list(repeats)
    if len(counts) not in (1, size):
        raise SpecError(f"{len(counts)} repeats of {size} elements; give one, or one for each")
    dims: list[Any] = list(range(len(shape)))
    if len(counts) == 1:
        # Equal repeats are a minor factor of the dimension.
        times = ["times"] if counts[0] != 1 or not dims else []
        each = [(dim, *times) if dim == place else dim for dim in dims]
        result = [(*dims, *times)] if place is None else each
        return rules.from_dims([dims], [result], [shape], sizes={"times": counts[0]})
    # Unequal repeats need the whole dimension.
    total = sum(counts)
    if place is None:
        return Inferred(rules.replicated_rule(shapes, [(total,)]), ((total,),))
    repeated = ["total" if dim == place else dim for dim in dims]
    order = [*dims[: place + 1], "total"]
    sizes = {"total": total}
    return rules.from_dims([dims], [repeated], [shape], order=order, sizes=sizes, whole=["total"])


movement.register(
    "repeat",
    repeat_rule,
    (movement._ROWS, {"repeats": 3, "axis": 0}),
    note="repetitions are the minor factor of a dimension; whole if they differ",
    no_pullback=COMPOSED,
)


# ---- meshgrid


def meshgrid_rule(shapes: Sequence[Shape], indexing: str = "xy") -> Inferred:
    """Broadcast each vector along its own dimension; "xy" swaps the first two dimensions.

    >>> print(meshgrid_rule([(4,), (8,)], indexing="ij").rule)
    ([i], [j]) -> ([i, j], [i, j]) {i=4, j=8}
    """
    if any(len(shape) > 1 for shape in shapes):
        raise SpecError(f"meshgrid of {', '.join(map(str, shapes))}; vectors were expected")
    # The number of the vector that each dimension of the result belongs to.
    order = list(range(len(shapes)))
    if indexing == "xy" and len(shapes) > 1:
        order[:2] = [1, 0]
    vectors = [[number] * len(shape) for number, shape in enumerate(shapes)]
    # The product of a scalar's shape is 1: it spans a dimension of size 1.
    return rules.from_dims(
        vectors, [order] * len(shapes), shapes, sizes=dict(enumerate(map(math.prod, shapes)))
    )


movement.register(
    "meshgrid", meshgrid_rule, ([(4,), (8,)], {"indexing": "ij"}), no_pullback=COMPOSED
)


# ---- tril


def triangle_rule(shapes: Sequence[Shape], k: int = 0) -> Inferred:
    """Zero above or below a diagonal of the last two dimensions."""
    shape = rules.one_operand("tril or triu", shapes)
    if len(shape) < 2:
        raise SpecError(f"shape {shape} is no matrix; 2 or more dimensions were expected")
    return rules.from_pattern("*b i j -> *b i j", shapes, adjusted="ij")


_TRIANGLE = "the diagonal lies elsewhere in a part"
movement.register("tril", triangle_rule, (movement._ROWS, {}), note=_TRIANGLE, no_pullback=COMPOSED)
movement.register("triu", triangle_rule, (movement._ROWS, {}), note=_TRIANGLE, no_pullback=COMPOSED)


# ---- diff


def diff_rule(shapes: Sequence[Shape], axis: int = -1, n: int = 1) -> Inferred:
    """Compute differences of neighbours, `n` times; further operands are prepended and appended.

    >>> print(diff_rule([(4, 8)]).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} permutation={j}
    """
    if not 1 <= len(shapes) <= 3:
        # Raises, since the number of shapes is not 1.
        rules.counted("diff", shapes, 1)
    dims = range(len(shapes[0]))
    place = rules.axis_of(len(dims), axis)
    joined = movement.concat_rule(shapes, axis).result_shapes[0]
    result = (*joined[:place], max(joined[place] - n, 0), *joined[place + 1 :])
    others = [[None if dim == place else dim for dim in dims]] * (len(shapes) - 1)
    moved = [place] if n or others else []
    return rules.from_dims([dims, *others], [dims], shapes, [result], moved=moved)


movement.register(
    "diff",
    diff_rule,
    (movement._ROWS, {}),
    commutes=(),
    note="neighbours lie in other parts",
    no_pullback=COMPOSED,
)


# ---- embedding


_register_lookup(
    "embedding",
    lambda shapes: take_rule(shapes, axis=0),
    ([(100, 8), (2, 4)], {}),
    no_pullback=COMPOSED,
)


# ---- one_hot


def one_hot_rule(shapes: Sequence[Shape], num_classes: int, axis: int = -1) -> Inferred:
    """Return 1 at the class of each element and 0 elsewhere; the classes are a new dimension.

    >>> print(one_hot_rule([(4,)], num_classes=10).rule)
    ([i]) -> ([i, j]) {i=4, j=10}
    """
    place = rules.axis_of(len(rules.one_operand("one_hot", shapes)) + 1, axis)
    lengths, sizes = {"a": place}, {"c": num_classes}
    return rules.from_pattern(
        "*a *b -> *a c *b", shapes, lengths=lengths, sizes=sizes, adjusted="c"
    )


register_indexing(
    "one_hot",
    one_hot_rule,
    ([(4,)], {"num_classes": 10}),
    note="a part has its own classes",
    is_constant=True,
)


# ---- isin


def isin_rule(shapes: Sequence[Shape], invert: bool = False) -> Inferred:
    """Return whether elements are among those of the second operand, which devices need whole."""
    return rules.from_pattern("*i, *_ -> *i", shapes)


register_indexing("isin", isin_rule, ([(4, 8), (3,)], {}), result_types=boolean, is_constant=True)

reductions.register(
    "mean",
    # The operator is a sum: parts that divided by their own counts would give a mean of means.
    reductions._make_reduction("sum", adjusted=True),
    linear="each",
    note="each part divides its sum by the whole count; contributions are summed",
    no_pullback=COMPOSED,
)

reductions.register(
    "count_nonzero",
    reductions._make_reduction("sum"),
    note="contributions are counts",
    is_constant=True,
)


# ---- var


def _infer_spread(
    shapes: Sequence[Shape], axis: Axes = None, correction: float = 0.0, keepdims: bool = False
) -> Inferred:
    return reductions.whole_axes(shapes, axis, keepdims)


_SPREAD = "needs the mean first: made of sums, or of whole axes"
reductions.register("var", _infer_spread, note=_SPREAD, no_pullback=COMPOSED)
reductions.register("std", _infer_spread, note=_SPREAD, no_pullback=COMPOSED)
reductions.register(
    "logsumexp", reductions.whole_axes, note="needs the maximum first", no_pullback=COMPOSED
)


# ---- dot_general


def dot_general_rule(
    shapes: Sequence[Shape],
    batching: Sequence[Sequence[int]] = ((), ()),
    contracting: Sequence[Sequence[int]] = ((), ()),
) -> Inferred:
    """Infer XLA's product: batch dimensions first, then the left's, then the right's.

    >>> print(dot_general_rule([(2, 4, 8), (2, 8, 5)], [[0], [0]], [[2], [1]]).rule)
    ([i, j, l], [i, l, k]) -> ([i, j, k]) {i=2, j=4, k=5, l=8} reduction={l}
    """
    rules.counted("dot_general", shapes, 2)
    batch, summed = (
        [
            [rules.axis_of(len(shape), axis) for axis in side]
            for shape, side in zip(shapes, pairs, strict=True)
        ]
        for pairs in (batching, contracting)
    )
    return products.product_of_pairs(shapes, batch, summed)


products.register(
    "dot_general",
    dot_general_rule,
    ([(2, 4, 8), (2, 8, 5)], {"batching": [[0], [0]], "contracting": [[2], [1]]}),
    note="XLA's dot, with batch axes",
    no_pullback=OF_GRAPHS,
)


# ---- outer


def outer_rule(shapes: Sequence[Shape]) -> Inferred:
    """Infer `[i], [j] -> [i, j]`.

    >>> print(outer_rule([(4,), (8,)]).rule)
    ([i], [j]) -> ([i, j]) {i=4, j=8}
    """
    return products.einsum_rule(shapes, "a,b->ab")


products.register("outer", outer_rule, ([(4,), (8,)], {}), no_pullback=COMPOSED)

linalg.register_factorisation(
    "matrix_power",
    lambda shapes, n=1: linalg.same_matrix(shapes),
    ([(2, 4, 4)], {"n": 2}),
    lambda m, n: 2 * n**3,
    no_pullback=COMPOSED,
)

linalg.register_factorisation(
    "eig",
    linalg.matrix_rule(lambda m, n: ((m,), (m, m)), square=True),
    linalg._SQUARES,
    lambda m, n: 25 * n**3,
    no_pullback=OF_GRAPHS,
)

linalg.register_factorisation(
    "eigvals",
    linalg.matrix_rule(lambda m, n: ((m,),), square=True),
    linalg._SQUARES,
    lambda m, n: 10 * n**3,
    no_pullback=OF_GRAPHS,
)


# ---- pinv


linalg.register_factorisation(
    "pinv",
    linalg.matrix_rule(lambda rows, columns, rtol=None: ((columns, rows),)),
    linalg._STACK,
    lambda m, n: 14 * max(m, n) * min(m, n) ** 2 + 8 * min(m, n) ** 3,
    no_pullback=COMPOSED,
)


# ---- matrix_rank


def _rank(rows: int, columns: int, rtol: float | None = None) -> tuple[Shape, ...]:
    return ((),)


linalg.register_factorisation(
    "matrix_rank",
    linalg.matrix_rule(_rank),
    linalg._STACK,
    lambda m, n: 4 * (max(m, n) - min(m, n) / 3) * min(m, n) ** 2,
    no_pullback=COMPOSED,
)


# ---- matrix_norm


def matrix_norm_rule(
    shapes: Sequence[Shape],
    keepdims: bool = False,
    ord: float | str = "fro",
) -> Inferred:
    """Infer norms over the last two dimensions."""
    return reductions.whole_axes(shapes, (-2, -1), keepdims)


linalg.register("matrix_norm", matrix_norm_rule, linalg._STACK, no_pullback=COMPOSED)


# ---- vector_norm


def vector_norm_rule(
    shapes: Sequence[Shape],
    axis: Axes = None,
    keepdims: bool = False,
    ord: float = 2,
) -> Inferred:
    """Infer lengths of vectors along axes."""
    return reductions.whole_axes(shapes, axis, keepdims)


linalg.register(
    "vector_norm",
    vector_norm_rule,
    linalg._STACK,
    note="the axes are whole on each device",
    no_pullback=COMPOSED,
)


# ---- triangular_solve


def triangular_solve_rule(shapes: Sequence[Shape], left_side: bool = True, **_: Any) -> Inferred:
    """Infer solutions of `a x = b` for a triangular `a`, or of `x a = b`.

    >>> print(triangular_solve_rule([(4, 4), (3, 4)], left_side=False).rule)
    ([k, j], [i, j]) -> ([i, k]) {i=3, j=4, k=4} need_replication={j, k}
    """
    if left_side:
        return linalg.solve_rule(shapes)
    rules.counted("triangular_solve", shapes, 2)
    left, right = shapes
    if len(left) != len(right) or left[:-2] != right[:-2] or {*left[-2:]} != {*right[-1:]}:
        raise SpecError(f"triangular solve of {left} and {right}; [..., m, m] and [..., n, m]")
    return rules.from_pattern("*b k j, *b i j -> *b i k", shapes, order="bij", whole="jk")


linalg.register(
    "triangular_solve",
    triangular_solve_rule,
    ([(2, 4, 4), (2, 4, 3)], {}),
    note="as solve",
    linear=(1,),
    work=linalg.of_systems(lambda n, k: n**2 * k),
    no_pullback=COMPOSED,
)


# ---- cross


def cross_rule(shapes: Sequence[Shape], axis: int = -1) -> Inferred:
    """Infer cross products of the vectors of 3 along an axis.

    >>> print(cross_rule([(4, 3), (4, 3)]).rule)
    ([i, j], [i, j]) -> ([i, j]) {i=4, j=3} need_replication={j}
    """
    rules.counted("cross", shapes, 2)
    # Counted from the end, since operands of other ranks broadcast to the left of it.
    back = axis if axis < 0 else axis - max(map(len, shapes))
    if any(len(shape) < -back or shape[back] != 3 for shape in shapes):
        raise SpecError(f"cross of {shapes[0]} and {shapes[1]}; axis {axis} must have size 3")
    pattern = "... k *b, ... k *b -> ... k *b"
    return rules.from_pattern(pattern, shapes, lengths={"b": -1 - back}, broadcast="b", whole="k")


linalg.register(
    "cross",
    cross_rule,
    ([(4, 3), (4, 3)], {}),
    note="the axis of 3 is whole on each device",
    linear="one",
    no_pullback=COMPOSED,
)


# ---- trace


def trace_rule(shapes: Sequence[Shape], offset: int = 0) -> Inferred:
    """Infer the sums of the diagonals of the last two dimensions."""
    return linalg.matrix_rule(lambda rows, columns: ((),))(shapes)


linalg.register(
    "trace", trace_rule, linalg._STACK, linear="each", reads_part=True, no_pullback=COMPOSED
)


# ---- fftshift


def shifted(shapes: Sequence[Shape], axes: Axes = None) -> Inferred:
    """Infer axes whose halves are swapped."""
    shape = rules.one_operand("a shift", shapes)
    return rules.kept(shape, moved=rules.axes_of(len(shape), axes))


for _name in ("fftshift", "ifftshift"):
    movement.register(
        _name,
        shifted,
        ([(4, 8)], {"axes": 1}),
        family="Fourier transforms",
        result_types=of_first,
        no_pullback=COMPOSED,
    )

reductions.register_cumulative(
    "cumulative_max",
    reductions.cumulative_rule,
    commutes=("max",),
    note=reductions._TOTALS,
    no_pullback=OF_GRAPHS,
)

reductions.register_cumulative(
    "cumulative_min",
    reductions.cumulative_rule,
    commutes=("min",),
    note=reductions._TOTALS,
    no_pullback=OF_GRAPHS,
)


# ---- softmax


def softmax_rule(shapes: Sequence[Shape], axis: int | Sequence[int] = -1) -> Inferred:
    """Infer exponentials over their sum along an axis.

    >>> print(softmax_rule([(4, 8)]).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} need_replication={j}
    """
    shape = rules.one_operand("softmax", shapes)
    return rules.kept(shape, whole=rules.axes_of(len(shape), axis))


networks.register(
    "softmax", softmax_rule, ([(4, 8)], {"axis": 1}), note=networks._WHOLE, no_pullback=COMPOSED
)

networks.register(
    "log_softmax", softmax_rule, ([(4, 8)], {"axis": 1}), note=networks._WHOLE, no_pullback=COMPOSED
)


# ---- batch_norm


def batch_norm_rule(shapes: Sequence[Shape], axis: int = 1) -> Inferred:
    """Infer batch normalization of an array by vectors: scale, offset, given mean and variance.

    >>> print(batch_norm_rule([(4, 8), (8,), (8,), (8,), (8,)]).rule)
    ([i, j], [j], [j], [j], [j]) -> ([i, j]) {i=4, j=8}
    """
    rules.counted("batch_norm", shapes, 5)
    lengths = {"a": rules.axis_of(len(shapes[0]), axis)}
    return rules.from_pattern("*a c *b, c, c, c, c -> *a c *b", shapes, lengths=lengths)


networks.register(
    "batch_norm",
    batch_norm_rule,
    ([(4, 8), (8,), (8,), (8,), (8,)], {}),
    note="mean and variance are known",
    no_pullback=OF_GRAPHS,
)


# ---- cross_entropy


def cross_entropy_rule(shapes: Sequence[Shape], axis: int = -1) -> Inferred:
    """Infer the loss of each element: logits with classes along an axis, labels without it.

    >>> print(cross_entropy_rule([(4, 10), (4,)]).rule)
    ([i, j], [i]) -> ([i]) {i=4, j=10} need_replication={j}
    """
    rules.counted("cross_entropy", shapes, 2)
    lengths = {"a": rules.axis_of(len(shapes[0]), axis)}
    return rules.from_pattern("*a c *b, *a *b -> *a *b", shapes, lengths=lengths)


networks.register(
    "cross_entropy",
    cross_entropy_rule,
    ([(4, 10), (4,)], {}),
    note="classes are whole on each device",
    no_pullback=COMPOSED,
)


# ---- zeros


_PLACES = "a part has the numbers of its own places"


register_creation = partial(ship, family="creation", note=_PLACES, is_constant=True)


def constant_rule(shapes: Sequence[Shape], shape: int | Sequence[int] = (), **_: Any) -> Inferred:
    """Fill an array with a value."""
    return filled(shapes, shape)


def filled(
    shapes: Sequence[Shape], shape: int | Sequence[int] = (), *, adjusted: bool = False
) -> Inferred:
    """Infer a result of a shape, of which each device creates its part. Operands are scalars.

    >>> print(filled([], (4, 8)).rule)
    () -> ([i, j]) {i=4, j=8}
    """
    result = (shape,) if isinstance(shape, int) else tuple(shape)
    dims = range(len(result))
    return rules.from_dims(
        [()] * len(shapes), [dims], shapes, [result], adjusted=dims if adjusted else ()
    )


_FILLED: Example = ([], {"shape": (4, 8)})
for _name in ("zeros", "ones", "empty", "full"):
    register_creation(_name, constant_rule, _FILLED, note="")


# ---- zeros_like


_BESIDE: Example = ([(4, 8)], {})
for _name in ("zeros_like", "ones_like", "empty_like", "full_like"):
    register_creation(_name, rules.elementwise_rule, _BESIDE, note="")


# ---- arange


def arange_rule(
    shapes: Sequence[Shape], start: float = 0, stop: float | None = None, step: float = 1, **_: Any
) -> Inferred:
    """Infer numbers at equal steps, `start` being the end without a `stop`.

    >>> arange_rule([], 2, 9, 3).result_shapes
    ((3,),)
    """
    # As in NumPy, a single number is the end of the range.
    low, high = (0, start) if stop is None else (start, stop)
    return filled(shapes, max(math.ceil((high - low) / step), 0), adjusted=True)


register_creation("arange", arange_rule, ([], {"start": 8}))


# ---- linspace


def linspace_rule(
    shapes: Sequence[Shape], start: complex = 0, stop: complex = 1, num: int = 50, **_: Any
) -> Inferred:
    """Infer `num` numbers at equal distances from `start` to `stop`."""
    return filled(shapes, num, adjusted=True)


register_creation("linspace", linspace_rule, ([], {"start": 0, "stop": 1, "num": 8}))


# ---- eye


def eye_rule(
    shapes: Sequence[Shape], n_rows: int, n_cols: int | None = None, k: int = 0
) -> Inferred:
    """Infer ones on a diagonal."""
    return filled(shapes, (n_rows, n_rows if n_cols is None else n_cols), adjusted=True)


register_creation("eye", eye_rule, ([], {"n_rows": 4}))


# ---- iota


def iota_rule(shapes: Sequence[Shape], shape: Sequence[int], axis: int = 0) -> Inferred:
    """Infer each element's index along an axis."""
    return filled(shapes, shape, adjusted=True)


register_creation("iota", iota_rule, _FILLED)


# ---- fftfreq


def frequencies(halves: bool) -> Any:
    """Infer the frequencies of a Fourier transform of `n` elements."""

    def infer(shapes: Sequence[Shape], n: int, d: float = 1.0, **_: Any) -> Inferred:
        return filled(shapes, n // 2 + 1 if halves else n, adjusted=True)

    return infer


register_creation("fftfreq", frequencies(False), ([], {"n": 8}))
register_creation("rfftfreq", frequencies(True), ([], {"n": 8}))


# ---- random_bits


def random_bits_rule(shapes: Sequence[Shape], shape: Sequence[int]) -> Inferred:
    """Draw bits of a shape from a generator's state; the results are the next state and the bits.

    >>> print(random_bits_rule([(2,)], (4, 8)).rule)
    ([i]) -> ([i], [j, k]) {i=2, j=4, k=8} need_replication={i} blocked={i}
    """
    rules.counted("random_bits", shapes, 1)
    results, lengths = [shapes[0], tuple(shape)], {"i": len(shape)}
    # Each device draws from the same state, and gets the whole next state.
    return rules.from_pattern(
        "*k -> *k, *i",
        shapes,
        results,
        lengths=lengths,
        whole="k",
        blocked="k",
        adjusted="i",
    )


register_creation(
    "random_bits",
    random_bits_rule,
    ([(2,)], {"shape": (4, 8)}),
    note="a part draws the bits of its places",
)
