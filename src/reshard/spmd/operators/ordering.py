"""Operators that sort elements or find unique ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.spmd.core.operator import Example, Infer, Operator
from reshard.spmd.core.result_types import index, of_first, value_and_index
from reshard.spmd.local import ordering
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import axis_of


def ordered(
    shapes: Sequence[Shape], axis: int = -1, descending: bool = False, stable: bool = True
) -> Inferred:
    """Operands of one shape put in the order of the first along an axis; as many results.

    >>> print(ordered([(4, 8)]).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} need_replication={j}
    """
    if not shapes or len(set(shapes)) > 1:
        raise SpecError(f"a sort of {', '.join(map(str, shapes))}; one shape was expected")
    shape = shapes[0]
    place = axis_of(len(shape), axis)
    builder = RuleBuilder(shapes, shapes)
    alone = all(size == 1 for dim, size in enumerate(shape) if dim != place)
    for dim in range(len(shape)):
        builder.factor(
            [dim] * len(shapes),
            [dim] * len(shapes),
            kind="need_replication" if dim == place else "pass_through",
            # Without another dimension that could be cut instead, a cut has nowhere to go.
            blocked=alone and dim == place,
        )
    return builder.build()


def top_k(shapes: Sequence[Shape], k: int, axis: int = -1) -> Inferred:
    """The `k` largest along an axis, and where they were.

    >>> print(top_k([(4, 8)], k=3).rule)
    ([i, j]) -> ([i, j], [i, j]) {i=4, j=8} need_replication={j} blocked={j}
    """
    if len(shapes) != 1:
        raise SpecError(f"{len(shapes)} operands for top_k; 1 was expected")
    shape = shapes[0]
    place = axis_of(len(shape), axis)
    if not 0 <= k <= shape[place]:
        raise SpecError(f"top {k} of {shape[place]}; 0 to {shape[place]} were expected")
    builder = RuleBuilder([shape], [(*shape[:place], k, *shape[place + 1 :])] * 2)
    for dim in range(len(shape)):
        here = dim == place
        builder.factor(
            [dim],
            [dim, dim],
            kind="need_replication" if here else "pass_through",
            blocked=here,
        )
    return builder.build()


def _row(name: str, infer: Infer | None, **options: Any) -> Operator:
    return Operator(name, "ordering", infer, **options)


_EXAMPLE: Example = ([(4, 8)], {"axis": 1})
_VALUES = "how many there are depends on the values"

OPERATORS: tuple[Operator, ...] = (
    _row(
        "sort",
        ordered,
        local=ordering.sort,
        result_types=of_first,
        example=_EXAMPLE,
        note="further operands are put in the first's order",
    ),
    _row("argsort", ordered, local=ordering.argsort, result_types=index, example=_EXAMPLE),
    _row(
        "top_k",
        top_k,
        local=ordering.top_k,
        result_types=value_and_index,
        example=([(4, 8)], {"k": 3}),
        note="results are the values and their indices",
    ),
    _row("unique_all", None, note=_VALUES),
    _row("unique_counts", None, note=_VALUES),
    _row("unique_inverse", None, note=_VALUES),
    _row("unique_values", None, note=_VALUES),
)
