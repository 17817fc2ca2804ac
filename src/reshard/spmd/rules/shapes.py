"""Axes and shapes, as operators read them: counted from the start, and broadcast."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import SpecError
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.templates import dimensions

Axes = int | Sequence[int] | None


def axis_of(rank: int, axis: int) -> int:
    """An axis counted from the start.

    >>> axis_of(3, -1)
    2
    """
    return dimensions(rank, [axis])[0]


def axes_of(rank: int, axis: Axes) -> tuple[int, ...]:
    """Axes counted from the start, in rising order; None means all.

    >>> axes_of(3, None), axes_of(3, (-1, 0)), axes_of(3, 1)
    ((0, 1, 2), (0, 2), (1,))
    """
    if axis is None:
        return tuple(range(rank))
    return dimensions(rank, axis if isinstance(axis, Sequence) else [axis])


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    """The shape that NumPy gives operands of these shapes.

    >>> broadcast_shape([(8, 1), (4,), ()])
    (8, 4)
    """
    found: list[int] = []
    # From the last dimension to the first, where shapes are lined up.
    for back in range(1, max((len(shape) for shape in shapes), default=0) + 1):
        sizes = {shape[-back] for shape in shapes if len(shape) >= back}
        if len(sizes - {1}) > 1:
            raise SpecError(
                f"shapes {', '.join(map(str, shapes))} do not broadcast; sizes counted from the "
                "end must be equal, or 1"
            )
        found.append(next(iter(sizes - {1}), 1))
    return tuple(reversed(found))


def one_operand(name: str, shapes: Sequence[Shape]) -> Shape:
    """The shape of the only operand."""
    counted(name, shapes, 1)
    return shapes[0]


def counted(name: str, shapes: Sequence[Shape], count: int) -> None:
    """Refuses another number of operands."""
    if len(shapes) != count:
        raise SpecError(f"{len(shapes)} operands for {name}; {count} were expected")


def kept(
    shape: Shape,
    result: Shape | None = None,
    *,
    whole: Sequence[int] = (),
    moved: Sequence[int] = (),
    blocked: Sequence[int] = (),
) -> Inferred:
    """The rule of an operand whose dimensions are the result's.

    Args:
        shape: of the operand.
        result: the result's, where sizes differ.
        whole: dimensions that each device needs whole.
        moved: dimensions whose elements move between devices.
        blocked: dimensions along which nothing propagates.

    >>> print(kept((4, 8), whole=[1]).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} need_replication={j}
    """
    builder = RuleBuilder([shape], [shape if result is None else result])
    for dim in range(len(shape)):
        builder.factor(
            [dim],
            [dim],
            kind="need_replication"
            if dim in whole
            else "permutation"
            if dim in moved
            else "pass_through",
            blocked=dim in blocked,
        )
    return builder.build()


def broadcast_factors(
    builder: RuleBuilder, result: Shape, *, operands: Sequence[int], skip: int = 0
) -> None:
    """Adds the factors of operands that broadcast to the result's leading dimensions.

    The last `skip` dimensions of each operand take no part. An operand's dimension of size 1 that
    becomes larger is a factor of its own, ahead of the result's.
    """
    for dim, size in enumerate(result):
        back = len(result) - dim + skip
        # The tensors that have the result's factor; those with a 1 there get a factor of their own.
        found: list[int | None] = [None] * len(builder.operands)
        for tensor in operands:
            shape = builder.operands[tensor]
            if len(shape) < back:
                continue
            if shape[-back] == size:
                found[tensor] = len(shape) - back
            else:
                builder.factor([None] * tensor + [len(shape) - back], size=1)
        builder.factor(found, [dim] * len(builder.results), size=size)
