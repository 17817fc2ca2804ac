"""Operators that move elements and compute nothing: transposes, reshapes, broadcasts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.spmd.core.operator import Example, Infer, Operator, OperatorClass
from reshard.spmd.core.result_types import promoted
from reshard.spmd.local import movement as local
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import (
    Axes,
    axes_of,
    axis_of,
    broadcast_factors,
    broadcast_shape,
    one_operand,
)
from reshard.spmd.rules.templates import (
    Template,
    broadcast_with_shapes_template,
    dimensions,
    reshape_template,
    transpose_template,
)


def _infer_by_template(template: Template, shape: Shape) -> Inferred:
    rule = template.rule(shape)
    return Inferred(rule, rule.result_shapes)


def permute_dims(shapes: Sequence[Shape], axes: Sequence[int] | None = None) -> Inferred:
    """Dimension `d` of the result is `axes[d]` of the operand; reversed when not given."""
    shape = one_operand("permute_dims", shapes)
    given = range(len(shape))[::-1] if axes is None else axes
    return _infer_by_template(transpose_template(len(shape), tuple(given)), shape)


def matrix_transpose(shapes: Sequence[Shape]) -> Inferred:
    """The last two dimensions swapped."""
    shape = one_operand("matrix_transpose", shapes)
    if len(shape) < 2:
        raise SpecError(f"shape {shape} is no matrix; 2 or more dimensions were expected")
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    return permute_dims(shapes, order)


def moveaxis(
    shapes: Sequence[Shape], source: int | Sequence[int], destination: int | Sequence[int]
) -> Inferred:
    """Axes put elsewhere, the others kept in order."""
    rank = len(one_operand("moveaxis", shapes))
    given, wanted = (
        [axis_of(rank, axis) for axis in ([axes] if isinstance(axes, int) else axes)]
        for axes in (source, destination)
    )
    if len(given) != len(wanted) or len({*given}) != len(given) or len({*wanted}) != len(wanted):
        raise SpecError(
            f"moveaxis of {source} to {destination}; name as many places as axes, each once"
        )
    order = [dim for dim in range(rank) if dim not in given]
    # In rising order of places, so that no axis shifts one that was put in before.
    for place, dim in sorted(zip(wanted, given, strict=True)):
        order.insert(place, dim)
    return permute_dims(shapes, order)


def reshape(shapes: Sequence[Shape], shape: Sequence[int]) -> Inferred:
    """The same elements in row-major order; one size may be -1.

    >>> print(reshape([(4, 6)], shape=(2, -1)).rule)
    ([ij, k]) -> ([i, jk]) {i=2, j=2, k=6}
    """
    given = one_operand("reshape", shapes)
    wanted = tuple(shape)
    if wanted.count(-1) == 1:
        others = math.prod(size for size in wanted if size != -1)
        if others == 0 or math.prod(given) % others:
            raise SpecError(f"shape {given} cannot be reshaped to {wanted}: -1 has no one size")
        # -1 stands for what the other sizes leave.
        wanted = tuple(math.prod(given) // others if size == -1 else size for size in wanted)
    return _infer_by_template(reshape_template(given, wanted), given)


def flatten(shapes: Sequence[Shape]) -> Inferred:
    """All dimensions merged into one."""
    return reshape(shapes, (math.prod(one_operand("flatten", shapes)),))


def expand_dims(shapes: Sequence[Shape], axis: Axes = 0) -> Inferred:
    """New dimensions of size 1 at these places of the result.

    >>> print(expand_dims([(4, 8)], axis=1).rule)
    ([i, k]) -> ([i, j, k]) {i=4, j=1, k=8}
    """
    shape = one_operand("expand_dims", shapes)
    given = [axis] if isinstance(axis, int) else list(axis or ())
    added = dimensions(len(shape) + len(given), given)
    sizes = iter(shape)
    result = tuple(1 if d in added else next(sizes) for d in range(len(shape) + len(added)))
    builder = RuleBuilder([shape], [result])
    source = iter(range(len(shape)))
    for dim in range(len(result)):
        builder.factor([None if dim in added else next(source)], [dim], size=result[dim])
    return builder.build()


def squeeze(shapes: Sequence[Shape], axis: Axes = None) -> Inferred:
    """Without these dimensions of size 1; without all of them when not given.

    >>> print(squeeze([(4, 1, 8)], axis=1).rule)
    ([i, j, k]) -> ([i, k]) {i=4, j=1, k=8} need_replication={j}
    """
    shape = one_operand("squeeze", shapes)
    ones = [dim for dim, size in enumerate(shape) if size == 1]
    gone = ones if axis is None else axes_of(len(shape), axis)
    if not set(gone) <= set(ones):
        raise SpecError(f"dimensions {gone} of {shape} to squeeze; each must have size 1")
    builder = RuleBuilder([shape], [tuple(s for dim, s in enumerate(shape) if dim not in gone)])
    place = 0
    for dim in range(len(shape)):
        # A dimension that goes has a factor of the operand alone, which `build` makes whole.
        builder.factor([dim], [None if dim in gone else place])
        place += dim not in gone
    return builder.build()


def broadcast_to(shapes: Sequence[Shape], shape: Sequence[int]) -> Inferred:
    """NumPy's broadcast to a shape."""
    given = one_operand("broadcast_to", shapes)
    return _infer_by_template(broadcast_with_shapes_template(given, tuple(shape)), given)


def broadcast_arrays(shapes: Sequence[Shape]) -> Inferred:
    """Each operand broadcast to the shape that they have together.

    >>> print(broadcast_arrays([(4, 1), (8,)]).rule)
    ([i, j], [k]) -> ([i, k], [i, k]) {i=4, j=1, k=8} need_replication={j}
    """
    result = broadcast_shape(shapes)
    builder = RuleBuilder(shapes, [result] * len(shapes))
    broadcast_factors(builder, result, operands=range(len(shapes)))
    return builder.build()


_ALL = ("max", "min", "product")


def moving(
    name: str,
    infer: Infer,
    example: Example,
    operator_class: OperatorClass = OperatorClass.OTHER,
    **options: Any,
) -> Operator:
    """A row of an operator that only moves elements: partial operands stay so, of any kind."""
    return Operator(
        name,
        "movement",
        infer,
        "each",
        _ALL,
        operator_class=operator_class,
        result_types=promoted,
        example=example,
        **options,
    )


_REARRANGING = OperatorClass.REARRANGING
_BROADCASTING = OperatorClass.BROADCASTING

OPERATORS: tuple[Operator, ...] = (
    moving("permute_dims", permute_dims, ([(2, 4, 8)], {"axes": (2, 0, 1)}), _REARRANGING),
    moving("matrix_transpose", matrix_transpose, ([(2, 4, 8)], {}), _REARRANGING),
    moving("moveaxis", moveaxis, ([(2, 4, 8)], {"source": 0, "destination": 2}), _REARRANGING),
    moving(
        "reshape",
        reshape,
        ([(4, 6)], {"shape": (2, 12)}),
        _REARRANGING,
        local=local.to_shape,
        note="a dimension that splits or merges has several factors; parts agree where sizes "
        "divide",
    ),
    moving("flatten", flatten, ([(4, 8)], {}), _REARRANGING, note="a reshape"),
    moving("expand_dims", expand_dims, ([(4, 8)], {"axis": 1}), _REARRANGING),
    moving("squeeze", squeeze, ([(4, 1, 8)], {"axis": 1}), _REARRANGING),
    moving(
        "broadcast_to",
        broadcast_to,
        ([(1, 8)], {"shape": (2, 4, 8)}),
        _BROADCASTING,
        local=local.to_shape,
    ),
    moving("broadcast_arrays", broadcast_arrays, ([(4, 1), (8,)], {}), _BROADCASTING),
)
