"""Cumulative operators: each element of the result depends on those before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.sharding import ShardingSpec
from reshard.spmd.core.local_work import has_plain_parts, part_lengths
from reshard.spmd.core.operator import Example, Infer, Operator
from reshard.spmd.core.result_types import total
from reshard.spmd.local import reductions
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import axis_of, kept, one_operand


def cumulative(
    shapes: Sequence[Shape],
    axis: int | None = None,
    include_initial: bool = False,
    parts: Sequence[int] | None = None,
) -> Inferred:
    """Running totals along an axis; one more element with the initial value.

    With lengths of parts, the totals begin anew at each: a device that has one part needs no other.

    >>> print(cumulative([(4, 8)], axis=1).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} permutation={j}
    >>> print(cumulative([(4, 8)], axis=1, parts=(3, 3, 2)).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8}
    """
    shape = one_operand("a cumulative operator", shapes)
    if axis is None and len(shape) != 1:
        raise SpecError(f"running totals of {shape} without an axis; say along which")
    place = axis_of(len(shape), axis or 0)
    if parts is not None:
        if include_initial or sum(parts) != shape[place]:
            raise SpecError(f"parts {tuple(parts)} of {shape[place]}; their sum must be that size")
        builder = RuleBuilder([shape], [shape])
        for dim in range(len(shape)):
            # `_begins_at_parts` tells whether a rank's part is one of those: only then may the axis
            # be cut.
            builder.factor([dim], [dim], adjusted=dim == place)
        return builder.build()
    result = (*shape[:place], shape[place] + bool(include_initial), *shape[place + 1 :])
    return kept(shape, result, moved=[] if result[place] == 1 else [place])


def _begins_at_parts(
    specs: Sequence[ShardingSpec], shapes: Sequence[Shape], attributes: Mapping[str, Any]
) -> bool:
    """Totals that begin anew where the ranks' parts do need nothing of other parts."""
    if attributes.get("parts") is None or not all(map(has_plain_parts, specs)):
        return False
    axis = attributes["axis"]
    return part_lengths(specs[0], axis, shapes[0][axis]) == tuple(attributes["parts"])


def _row(name: str, infer: Infer, example: Example, **options: Any) -> Operator:
    return Operator(name, "windows", infer, example=example, **options)


_TOTALLED: Example = ([(4, 8)], {"axis": 1})
_TOTALS = "totals of other parts are needed"

OPERATORS: tuple[Operator, ...] = (
    _row(
        "cumulative_sum",
        cumulative,
        _TOTALLED,
        linear="each",
        local=reductions.running_totals,
        knows_place=_begins_at_parts,
        result_types=total,
        note=_TOTALS,
    ),
    _row(
        "cumulative_prod",
        cumulative,
        _TOTALLED,
        commutes=("product",),
        local=reductions.running_totals,
        knows_place=_begins_at_parts,
        result_types=total,
        note=_TOTALS,
    ),
    _row("cumulative_max", cumulative, _TOTALLED, commutes=("max",), note=_TOTALS),
    _row("cumulative_min", cumulative, _TOTALLED, commutes=("min",), note=_TOTALS),
)
