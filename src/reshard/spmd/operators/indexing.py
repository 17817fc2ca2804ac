"""Operators that read or write at indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.sharding import ShardingSpec
from reshard.spmd.core.local_work import has_plain_parts
from reshard.spmd.core.operator import Example, Infer, Operator, OperatorClass
from reshard.spmd.core.result_types import boolean, index, of_first
from reshard.spmd.local import indexing
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import axis_of, counted, one_operand


def take(shapes: Sequence[Shape], axis: int | None = None) -> Inferred:
    """Slices of an axis at indices; the indices' dimensions stand in the axis's place.

    A device that has some of the slices gives those, and zero for the others. Rows of a table are
    cut as their indices are, before they are cut as the table is.

    >>> print(take([(100, 8), (4,)], axis=0).rule)
    ([k, j], [i]) -> ([i, j]) {i=4, j=8, k=100} reduction={k}
    """
    counted("take", shapes, 2)
    shape, indices = shapes
    if axis is None and len(shape) != 1:
        raise SpecError(f"take of {shape} without an axis; say which axis the indices are of")
    place = axis_of(len(shape), axis or 0)
    result = shape[:place] + indices + shape[place + 1 :]
    builder = RuleBuilder(shapes, [result])
    for dim in range(place):
        builder.factor([dim], [dim])
    # The indices' dimensions lie between those before the axis and those behind it.
    for dim in range(len(indices)):
        builder.factor([None, dim], [place + dim], leading=place == 0)
    for dim in range(place + 1, len(shape)):
        builder.factor([dim], [dim - 1 + len(indices)])
    _add_looked_up_axis(builder, place)
    return builder.build()


def _add_looked_up_axis(builder: RuleBuilder, place: int) -> None:
    """Adds the axis that indices are of. An axis of one element is the same for each index."""
    if builder.operands[0][place] == 1:
        builder.factor([place], kind="need_replication")
    else:
        builder.factor([place], kind="reduction", adjusted=True)


def embedding(shapes: Sequence[Shape]) -> Inferred:
    """Rows of a table `[v, d]` at indices."""
    return take(shapes, axis=0)


def take_along_axis(shapes: Sequence[Shape], axis: int = -1) -> Inferred:
    """An element of an axis for each index; the other dimensions run along together.

    >>> print(take_along_axis([(4, 8), (4, 3)]).rule)
    ([i, k], [i, j]) -> ([i, j]) {i=4, j=3, k=8} reduction={k}
    """
    counted("take_along_axis", shapes, 2)
    shape, indices = shapes
    if len(shape) != len(indices):
        raise SpecError(f"take_along_axis of {shape} at {indices}; ranks must be equal")
    place = axis_of(len(shape), axis)
    result = []
    for dim, (size, other) in enumerate(zip(shape, indices, strict=True)):
        if dim != place and size != other and 1 not in (size, other):
            raise SpecError(f"take_along_axis of {shape} at {indices}; dimension {dim} differs")
        result.append(other if dim == place or size == 1 else size)
    builder = RuleBuilder(shapes, [tuple(result)])
    for dim, size in enumerate(result):
        if dim == place:
            builder.factor([None, dim], [dim])
            continue
        found: list[int | None] = [None, None]
        for tensor, given in enumerate((shape, indices)):
            # A size of 1 that broadcasts is a factor of its own.
            if given[dim] == size:
                found[tensor] = dim
            else:
                builder.factor([None] * tensor + [dim], size=1)
        builder.factor(found, [dim], size=size)
    _add_looked_up_axis(builder, place)
    return builder.build()


def scatter(shapes: Sequence[Shape], axis: int = 0, mode: str = "set") -> Inferred:
    """An array with slices of an axis, at indices, replaced by updates or combined with them.

    Operands are the array, the indices and the updates: the indices' dimensions, in the axis's
    place, then the array's others. Each device keeps the updates of the slices it has.

    >>> print(scatter([(100, 8), (4,), (4, 8)]).rule)
    ([k, j], [i], [i, j]) -> ([k, j]) {i=4, j=8, k=100} need_replication={i}
    """
    counted("scatter", shapes, 3)
    shape, indices, updates = shapes
    place = axis_of(len(shape), axis)
    if updates != shape[:place] + indices + shape[place + 1 :]:
        raise SpecError(
            f"scatter into {shape} of updates {updates} at {indices}; updates of "
            f"{shape[:place] + indices + shape[place + 1 :]} were expected"
        )
    builder = RuleBuilder(shapes, [shape])
    for dim in range(place):
        builder.factor([dim, None, dim], [dim])
    for dim in range(len(indices)):
        # Any of the indices may fall into a device's part: indices and their updates are needed
        # whole.
        builder.factor([None, dim, place + dim], kind="need_replication")
    for dim in range(place + 1, len(shape)):
        builder.factor([dim, None, dim - 1 + len(indices)], [dim])
    builder.factor([place], [place], adjusted=True)
    return builder.build()


def _adds(**attributes: Any) -> bool:
    # Setting is not linear: contributions that are set do not add up to what is.
    return bool(attributes.get("mode", "set") == "add")


def checked_index(shapes: Sequence[Shape], size: int) -> Inferred:
    """Indices of an axis of this size, counted from its start; none may be out of range.

    >>> print(checked_index([(4, 3)], size=10).rule)
    ([i, j]) -> ([i, j]) {i=4, j=3}
    """
    shape = one_operand("checked_index", shapes)
    builder = RuleBuilder([shape], [shape])
    for dim in range(len(shape)):
        builder.factor([dim], [dim])
    return builder.build()


def dynamic_slice(shapes: Sequence[Shape], sizes: Sequence[int]) -> Inferred:
    """A rectangle of these sizes that begins at scalars, one per dimension.

    >>> print(dynamic_slice([(4, 8), (), ()], sizes=[4, 3]).rule)
    ([i, j], [], []) -> ([i, j]) {i=4, j=8} need_replication={j} blocked={j}
    """
    shape = shapes[0]
    counted("dynamic_slice", shapes, 1 + len(shape))
    if len(sizes) != len(shape) or any(a > b for a, b in zip(sizes, shape, strict=True)):
        raise SpecError(f"dynamic slice of sizes {tuple(sizes)} from {shape}; it must fit inside")
    builder = RuleBuilder(shapes, [tuple(sizes)])
    for dim, size in enumerate(shape):
        # Where a rectangle begins is a value: which part has it is not known before it runs.
        short = sizes[dim] != size
        builder.factor(
            [dim], [dim], kind="need_replication" if short else "pass_through", blocked=short
        )
    return builder.build()


def dynamic_update_slice(shapes: Sequence[Shape]) -> Inferred:
    """An array with a rectangle replaced: the array, the rectangle, and where it begins.

    >>> print(dynamic_update_slice([(4, 8), (4, 3), (), ()]).rule)
    ([i, j], [i, k], [], []) -> ([i, j]) {i=4, j=8, k=3} need_replication={k}
    """
    shape, update = shapes[:2]
    counted("dynamic_update_slice", shapes, 2 + len(shape))
    if len(update) != len(shape) or any(a > b for a, b in zip(update, shape, strict=True)):
        raise SpecError(f"an update {update} of {shape}; it must fit inside")
    builder = RuleBuilder(shapes, [shape])
    for dim, size in enumerate(shape):
        if update[dim] == size:
            builder.factor([dim, dim], [dim])
        else:
            builder.factor([dim], [dim], adjusted=True)
            builder.factor([None, dim], kind="need_replication")
    return builder.build()


def one_hot(shapes: Sequence[Shape], num_classes: int, axis: int = -1) -> Inferred:
    """Ones where a class is an element's own; the classes are a new dimension.

    >>> print(one_hot([(4,)], num_classes=10).rule)
    ([i]) -> ([i, j]) {i=4, j=10}
    """
    shape = one_operand("one_hot", shapes)
    place = axis_of(len(shape) + 1, axis)
    builder = RuleBuilder([shape], [(*shape[:place], num_classes, *shape[place:])])
    for dim in range(len(shape) + 1):
        if dim == place:
            builder.factor((), [dim], adjusted=True)
        else:
            builder.factor([dim - (dim > place)], [dim])
    return builder.build()


def searchsorted(shapes: Sequence[Shape], side: str = "left") -> Inferred:
    """Where values belong in a sorted vector: the vector, the values, and maybe its order.

    >>> print(searchsorted([(8,), (4,)]).rule)
    ([j], [i]) -> ([i]) {i=4, j=8} need_replication={j}
    """
    if len(shapes) not in (2, 3):
        counted("searchsorted", shapes, 2)
    builder = RuleBuilder(shapes, [shapes[1]])
    # The vector gets no factor here, so that `build` makes it whole.
    for dim in range(len(shapes[1])):
        builder.factor([None, dim], [dim])
    return builder.build()


def isin(shapes: Sequence[Shape], invert: bool = False) -> Inferred:
    """Whether elements are among others, of which each device needs all."""
    counted("isin", shapes, 2)
    # The second operand gets no factor, so that `build` makes it whole.
    builder = RuleBuilder(shapes, [shapes[0]])
    for dim in range(len(shapes[0])):
        builder.factor([dim], [dim])
    return builder.build()


def _finds_own_rows(
    specs: Sequence[ShardingSpec], shapes: Sequence[Shape], attributes: Mapping[str, Any]
) -> bool:
    """Each rank looks its own rows up where every part is one stretch of its dimension."""
    return all(map(has_plain_parts, specs))


def _row(
    name: str, infer: Infer | None, example: Example | None = None, **options: Any
) -> Operator:
    return Operator(name, "indexing", infer, example=example, **options)


def _looking_up(name: str, infer: Infer, example: Example, **options: Any) -> Operator:
    return _row(
        name,
        infer,
        example,
        linear=(0,),
        reads_part=True,
        result_types=of_first,
        note="a part gives the slices it has, zero for others; contributions are summed",
        **options,
    )


_ALL = ("max", "min", "product")

OPERATORS: tuple[Operator, ...] = (
    _looking_up(
        "take",
        take,
        ([(100, 8), (4,)], {"axis": 0}),
        local=indexing.take,
        knows_place=_finds_own_rows,
    ),
    _looking_up("embedding", embedding, ([(100, 8), (2, 4)], {})),
    _looking_up(
        "take_along_axis",
        take_along_axis,
        ([(4, 8), (4, 3)], {"axis": 1}),
        local=indexing.take_along_axis,
        knows_place=_finds_own_rows,
    ),
    _row(
        "checked_index",
        checked_index,
        ([(4,)], {"size": 10}),
        local=indexing.checked_index,
        fails="any",
        result_types=index,
        note="indices counted from the start; one out of range is refused on every rank",
    ),
    _row(
        "scatter",
        scatter,
        ([(100, 8), (4,), (4, 8)], {"axis": 0}),
        linear=(0, 2),
        linear_if=_adds,
        local=indexing.scatter,
        knows_place=_finds_own_rows,
        result_types=of_first,
        note="a part keeps the updates of its own slices; linear where it adds",
    ),
    _row(
        "dynamic_slice",
        dynamic_slice,
        ([(4, 8), (), ()], {"sizes": (4, 3)}),
        linear=(0,),
        commutes=_ALL,
        operator_class=OperatorClass.SLICING,
        local=indexing.dynamic_slice,
        reads_part=True,
        result_types=of_first,
    ),
    _row(
        "dynamic_update_slice",
        dynamic_update_slice,
        ([(4, 8), (4, 3), (), ()], {}),
        linear=(0, 1),
        commutes=_ALL,
        operator_class=OperatorClass.SLICING,
        local=indexing.dynamic_update_slice,
        result_types=of_first,
        note="a part takes what of the update lies in it",
    ),
    _row("one_hot", one_hot, ([(4,)], {"num_classes": 10}), note="a part has its own classes"),
    _row("searchsorted", searchsorted, ([(8,), (4,)], {}), result_types=index),
    _row("isin", isin, ([(4, 8), (3,)], {}), result_types=boolean),
    _row("nonzero", None, note="how many there are depends on the values"),
)
