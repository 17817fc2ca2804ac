"""Operators that concatenate, split, flip or roll arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.spmd.core.operator import Operator
from reshard.spmd.core.result_types import promoted
from reshard.spmd.local import movement as local
from reshard.spmd.operators.movement import moving
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape, replicated_rule
from reshard.spmd.rules.shapes import Axes, axes_of, axis_of, counted, kept, one_operand


def concat(shapes: Sequence[Shape], axis: int | None = 0) -> Inferred:
    """Arrays one behind the other along an axis; all flattened when it is None.

    >>> print(concat([(4, 8), (4, 3)], axis=1).rule)
    ([i, j], [i, j]) -> ([i, j]) {i=4, j=11} need_replication={j}
    """
    _check_some("concat", shapes)
    if axis is None:
        # Elements of flattened arrays are at places that no part of them shares with the result.
        result = (sum(math.prod(shape) for shape in shapes),)
        return Inferred(replicated_rule(shapes, [result]), (result,))
    rank = len(shapes[0])
    place = axis_of(rank, axis)
    if (
        any(len(shape) != rank for shape in shapes)
        or len({shape[:place] + shape[place + 1 :] for shape in shapes}) > 1
    ):
        raise SpecError(f"concat of {', '.join(map(str, shapes))}; they may differ in axis {axis}")
    total = sum(shape[place] for shape in shapes)
    builder = RuleBuilder(shapes, [(*shapes[0][:place], total, *shapes[0][place + 1 :])])
    for dim in range(rank):
        whole = dim == place
        builder.factor(
            [dim] * len(shapes),
            [dim],
            # Of the result's size: the operands' pieces end elsewhere than its parts.
            size=total if dim == place else None,
            kind="need_replication" if whole else "pass_through",
        )
    return builder.build()


def _check_some(name: str, shapes: Sequence[Shape]) -> None:
    if not shapes:
        raise SpecError(f"{name} of no arrays; one or more were expected")


def stack(shapes: Sequence[Shape], axis: int = 0) -> Inferred:
    """Arrays of one shape along a new axis.

    >>> print(stack([(4,), (4,)], axis=1).rule)
    ([i], [i]) -> ([i, j]) {i=4, j=2} need_replication={j}
    """
    _check_some("stack", shapes)
    if len(set(shapes)) > 1:
        raise SpecError(f"stack of {', '.join(map(str, shapes))}; one shape was expected")
    shape = shapes[0]
    place = axis_of(len(shape) + 1, axis)
    builder = RuleBuilder(shapes, [(*shape[:place], len(shapes), *shape[place:])])
    for dim in range(len(shape) + 1):
        if dim == place:
            builder.factor((), [dim], kind="need_replication")
        else:
            builder.factor([dim - (dim > place)] * len(shapes), [dim])
    return builder.build()


def unstack(shapes: Sequence[Shape], axis: int = 0) -> Inferred:
    """The slices along an axis, one by one.

    >>> print(unstack([(4, 2)], axis=1).rule)
    ([i, j]) -> ([i], [i]) {i=4, j=2} need_replication={j}
    """
    shape = one_operand("unstack", shapes)
    place = axis_of(len(shape), axis)
    count = shape[place]
    builder = RuleBuilder([shape], [shape[:place] + shape[place + 1 :]] * count)
    for dim in range(len(shape)):
        if dim == place:
            builder.factor([dim], kind="need_replication")
        else:
            builder.factor([dim], [dim - (dim > place)] * count)
    return builder.build()


def split(
    shapes: Sequence[Shape], indices_or_sections: int | Sequence[int], axis: int = 0
) -> Inferred:
    """Pieces of an axis: a number of equal ones, or those between places, as `numpy.split`.

    >>> split([(8,)], [3, 5]).result_shapes
    ((3,), (2,), (3,))
    """
    shape = one_operand("split", shapes)
    place = axis_of(len(shape), axis)
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
        # As NumPy: counted from the end where negative, and clipped to the axis.
        cuts = [slice(where).indices(size)[1] for where in indices_or_sections]
    ends = zip([0, *cuts], [*cuts, size], strict=True)
    results = [(*shape[:place], max(stop - start, 0), *shape[place + 1 :]) for start, stop in ends]
    builder = RuleBuilder([shape], results)
    for dim in range(len(shape)):
        moves = dim == place and len(results) > 1
        builder.factor([dim], [dim] * len(results), kind="permutation" if moves else "pass_through")
    return builder.build()


def flip(shapes: Sequence[Shape], axis: Axes = None) -> Inferred:
    """The elements of axes in reverse order."""
    shape = one_operand("flip", shapes)
    return kept(shape, moved=axes_of(len(shape), axis))


def roll(shapes: Sequence[Shape], shift: int | Sequence[int], axis: Axes = None) -> Inferred:
    """The elements of axes shifted round; of the whole array, flattened, without axes.

    >>> print(roll([(4, 8)], shift=1, axis=1).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} permutation={j}
    """
    shape = one_operand("roll", shapes)
    named = [axis] if isinstance(axis, int) else axis
    moved = range(len(shape)) if named is None else {axis_of(len(shape), one) for one in named}
    return kept(shape, moved=list(moved))


def pad(
    shapes: Sequence[Shape],
    pad_width: Sequence[Sequence[int]],
    mode: str = "constant",
    constant_values: float = 0,
    interior: Sequence[int] | None = None,
) -> Inferred:
    """(before, after) more elements per dimension, and `interior` ones between neighbours.

    >>> print(pad([(4, 8)], [(0, 0), (1, 2)]).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} permutation={j}
    """
    shape = one_operand("pad", shapes)
    between = (0,) * len(shape) if interior is None else tuple(interior)
    if len(pad_width) != len(shape) or len(between) != len(shape):
        raise SpecError(f"pad of {shape} by {pad_width}; give (before, after) per dimension")
    result = tuple(
        before + size + after + inner * max(size - 1, 0)
        for size, (before, after), inner in zip(shape, pad_width, between, strict=True)
    )
    touched = [
        dim
        for dim, (ends, inner) in enumerate(zip(pad_width, between, strict=True))
        if any(ends) or inner
    ]
    return kept(shape, result, moved=touched)


def _pads_with_zero(**attributes: Any) -> bool:
    return attributes.get("mode", "constant") == "constant" and not attributes.get(
        "constant_values", 0
    )


def slice_(
    shapes: Sequence[Shape],
    starts: Sequence[int],
    limits: Sequence[int],
    strides: Sequence[int] | None = None,
) -> Inferred:
    """A rectangle, with a positive step per dimension.

    >>> print(slice_([(4, 8)], [0, 1], [4, 7], [1, 2]).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} permutation={j}
    """
    shape = one_operand("slice", shapes)
    steps = (1,) * len(shape) if strides is None else tuple(strides)
    if not len(starts) == len(limits) == len(steps) == len(shape):
        raise SpecError(f"slice {starts} to {limits} of {shape}; give each per dimension")
    for start, limit, step, size in zip(starts, limits, steps, shape, strict=True):
        if not (0 <= start <= limit <= size and step > 0):
            raise SpecError(f"slice {start}:{limit}:{step} of {size}; it must lie inside")
    # Divided rounding up: the last step may be a short one.
    result = tuple(
        -((start - limit) // step) for start, limit, step in zip(starts, limits, steps, strict=True)
    )
    return kept(shape, result, moved=[d for d, size in enumerate(shape) if result[d] != size])


def tile(shapes: Sequence[Shape], repetitions: Sequence[int]) -> Inferred:
    """The array many times over: a dimension of the result is the repetitions, then the array's.

    >>> print(tile([(4,)], (2, 3)).rule)
    ([k]) -> ([i, jk]) {i=2, j=3, k=4}
    """
    shape = one_operand("tile", shapes)
    rank = max(len(shape), len(repetitions))
    sizes = (1,) * (rank - len(shape)) + shape
    times = (1,) * (rank - len(repetitions)) + tuple(repetitions)
    builder = RuleBuilder([shape], [tuple(a * b for a, b in zip(sizes, times, strict=True))])
    for dim in range(rank):
        # Shapes and repetitions are lined up at the end; the shorter one is filled with ones.
        source = dim - rank + len(shape)
        if times[dim] != 1 or source < 0:
            builder.factor((), [dim], size=times[dim])
        if source >= 0:
            builder.factor([source], [dim])
    return builder.build()


def repeat(
    shapes: Sequence[Shape], repeats: int | Sequence[int], axis: int | None = None
) -> Inferred:
    """Each element many times; of the flattened array without an axis.

    >>> print(repeat([(4, 8)], repeats=3, axis=0).rule)
    ([i, k]) -> ([ij, k]) {i=4, j=3, k=8}
    """
    shape = one_operand("repeat", shapes)
    size = math.prod(shape) if axis is None else shape[axis_of(len(shape), axis)]
    place = None if axis is None else axis_of(len(shape), axis)
    counts = [repeats] if isinstance(repeats, int) else list(repeats)
    # Equal repeats are a minor factor of the dimension. Unequal ones have no common factor: whole.
    even = len(counts) == 1
    if not even and len(counts) != size:
        raise SpecError(f"{len(counts)} repeats of {size} elements; give one, or one for each")
    total = size * counts[0] if even else sum(counts)
    if place is None:
        result: Shape = (total,)
    else:
        result = (*shape[:place], total, *shape[place + 1 :])
    if not even and place is None:
        return Inferred(replicated_rule(shapes, [result]), (result,))
    builder = RuleBuilder([shape], [result])
    for dim in range(len(shape)):
        if dim == place and not even:
            builder.factor([dim], kind="need_replication")
            builder.factor((), [dim], kind="need_replication")
            continue
        builder.factor([dim], [0 if place is None else dim])
        if dim == place and counts[0] != 1:
            builder.factor((), [dim], size=counts[0])
    if place is None and (counts[0] != 1 or not shape):
        builder.factor((), [0], size=counts[0])
    return builder.build()


def meshgrid(shapes: Sequence[Shape], indexing: str = "xy") -> Inferred:
    """Vectors, each spread over a dimension of its own; the first two swapped for "xy".

    >>> print(meshgrid([(4,), (8,)], indexing="ij").rule)
    ([i], [j]) -> ([i, j], [i, j]) {i=4, j=8}
    """
    if any(len(shape) > 1 for shape in shapes):
        raise SpecError(f"meshgrid of {', '.join(map(str, shapes))}; vectors were expected")
    # The vector that each dimension of the result is of.
    order = list(range(len(shapes)))
    if indexing == "xy" and len(shapes) > 1:
        order[:2] = [1, 0]
    # The product of a scalar's shape is 1: it spans a dimension of one element.
    result = tuple(math.prod(shapes[source]) for source in order)
    builder = RuleBuilder(shapes, [result] * len(shapes))
    for dim, source in enumerate(order):
        own = [None] * source + [0] if shapes[source] else []
        builder.factor(own, [dim] * len(shapes), size=result[dim])
    return builder.build()


def triangle(shapes: Sequence[Shape], k: int = 0) -> Inferred:
    """Zero above or below a diagonal of the last two dimensions."""
    shape = one_operand("tril or triu", shapes)
    if len(shape) < 2:
        raise SpecError(f"shape {shape} is no matrix; 2 or more dimensions were expected")
    builder = RuleBuilder([shape], [shape])
    for dim in range(len(shape)):
        builder.factor([dim], [dim], adjusted=dim >= len(shape) - 2)
    return builder.build()


def diff(shapes: Sequence[Shape], axis: int = -1, n: int = 1) -> Inferred:
    """Differences of neighbours, `n` times; further operands are put before and behind.

    >>> print(diff([(4, 8)]).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} permutation={j}
    """
    if not 1 <= len(shapes) <= 3:
        counted("diff", shapes, 1)
    rank = len(shapes[0])
    place = axis_of(rank, axis)
    joined = concat(shapes, axis).result_shapes[0]
    result = (*joined[:place], max(joined[place] - n, 0), *joined[place + 1 :])
    builder = RuleBuilder(shapes, [result])
    for dim in range(rank):
        if dim != place:
            builder.factor([dim] * len(shapes), [dim])
        else:
            builder.factor(
                [dim], [dim], kind="permutation" if n or len(shapes) > 1 else "pass_through"
            )
    return builder.build()


_ONE: Sequence[Shape] = [(4, 8)]
_TRIANGLE = "the diagonal lies elsewhere in a part"

OPERATORS: tuple[Operator, ...] = (
    moving(
        "concat",
        concat,
        ([(4, 8), (4, 3)], {"axis": 1}),
        local=local.concat,
        note="pieces do not meet the parts of the whole",
    ),
    moving("stack", stack, ([(4,), (4,)], {"axis": 1})),
    moving("unstack", unstack, ([(4, 2)], {"axis": 1}), reads_part=True),
    moving(
        "split",
        split,
        (_ONE, {"indices_or_sections": 2, "axis": 1}),
        reads_part=True,
        note="as a slice for each piece",
    ),
    moving("flip", flip, (_ONE, {"axis": 1})),
    moving("roll", roll, (_ONE, {"shift": 1, "axis": 1})),
    Operator(
        "pad",
        "movement",
        pad,
        "each",
        linear_if=_pads_with_zero,
        local=local.pad,
        result_types=promoted,
        example=(_ONE, {"pad_width": [(0, 0), (1, 2)]}),
        note="linear where it pads with zero",
    ),
    moving(
        "slice",
        slice_,
        (_ONE, {"starts": [0, 1], "limits": [4, 7]}),
        local=local.slice_ranges,
        reads_part=True,
        note="a dimension taken whole passes through",
    ),
    moving(
        "tile",
        tile,
        (_ONE, {"repetitions": (3, 1)}),
        note="repetitions are the major factor of a dimension",
    ),
    moving(
        "repeat",
        repeat,
        (_ONE, {"repeats": 3, "axis": 0}),
        note="repetitions are the minor factor of a dimension; whole if they differ",
    ),
    moving("meshgrid", meshgrid, ([(4,), (8,)], {"indexing": "ij"})),
    moving("tril", triangle, (_ONE, {}), note=_TRIANGLE),
    moving("triu", triangle, (_ONE, {}), note=_TRIANGLE),
    Operator(
        "diff",
        "movement",
        diff,
        "each",
        result_types=promoted,
        example=(_ONE, {}),
        note="neighbours lie in other parts",
    ),
)
