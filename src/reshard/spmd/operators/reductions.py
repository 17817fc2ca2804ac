"""Reductions: sums, extremes and means over axes, and those that need their axes replicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.spmd.core.operator import Infer, Operator
from reshard.spmd.core.result_types import boolean, index, of_first, total
from reshard.spmd.local import reductions
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import Axes, axes_of, one_operand
from reshard.spmd.rules.templates import reduce_template


def _make_reduction(reduction: str, *, adjusted: bool = False) -> Infer:
    def infer(shapes: Sequence[Shape], axis: Axes = None, keepdims: bool = False) -> Inferred:
        shape = one_operand("a reduction", shapes)
        rule = reduce_template(
            len(shape),
            axes_of(len(shape), axis),
            keepdims=keepdims,
            reduction_operator=reduction,
        ).rule(shape)
        # Adjusted factors are cut only where a local function accounts for its part, as a mean's
        # does.
        return Inferred(rule, rule.result_shapes, rule.reduction if adjusted else ())

    return infer


def whole_axes(shapes: Sequence[Shape], axis: Axes = None, keepdims: bool = False) -> Inferred:
    """A reduction whose parts do not combine: each device needs the axes whole.

    >>> print(whole_axes([(4, 8)], axis=1).rule)
    ([i, j]) -> ([i]) {i=4, j=8} need_replication={j}
    """
    shape = one_operand("a reduction", shapes)
    reduced = axes_of(len(shape), axis)
    result = tuple(
        1 if dim in reduced else size
        for dim, size in enumerate(shape)
        if keepdims or dim not in reduced
    )
    builder = RuleBuilder([shape], [result])
    place = 0
    for dim in range(len(shape)):
        # A reduced axis is a factor of the operand alone; with keepdims the result has one of size
        # 1.
        if dim in reduced:
            builder.factor([dim], kind="need_replication")
            if keepdims:
                builder.factor((), [place], size=1)
                place += 1
        else:
            builder.factor([dim], [place])
            place += 1
    return builder.build()


def _infer_spread(
    shapes: Sequence[Shape], axis: Axes = None, correction: float = 0.0, keepdims: bool = False
) -> Inferred:
    return whole_axes(shapes, axis, keepdims)


def _row(name: str, infer: Infer, **options: Any) -> Operator:
    return Operator(name, "reductions", infer, example=([(4, 8)], {"axis": 1}), **options)


_SPREAD = "needs the mean first: made of sums, or of whole axes"
_PLACE = "an index says nothing without its value"

OPERATORS: tuple[Operator, ...] = (
    _row("sum", _make_reduction("sum"), linear="each", result_types=total),
    _row(
        "mean",
        # A part that divided by its own count would give a mean of means; `sp.mean` divides a sum.
        _make_reduction("sum", adjusted=True),
        linear="each",
        note="each part divides its sum by the whole count; contributions are summed",
    ),
    _row("prod", _make_reduction("product"), commutes=("product",), result_types=total),
    _row(
        "max",
        _make_reduction("max"),
        commutes=("max",),
        local=reductions.extremum,
        result_types=of_first,
    ),
    _row(
        "min",
        _make_reduction("min"),
        commutes=("min",),
        local=reductions.extremum,
        result_types=of_first,
    ),
    _row(
        "any",
        _make_reduction("max"),
        commutes=("max",),
        result_types=boolean,
        note="truth values: contributions combine by max",
    ),
    _row(
        "all",
        _make_reduction("min"),
        commutes=("min",),
        result_types=boolean,
        note="truth values: contributions combine by min",
    ),
    _row("count_nonzero", _make_reduction("sum"), note="contributions are counts"),
    _row("var", _infer_spread, note=_SPREAD),
    _row("std", _infer_spread, note=_SPREAD),
    _row("argmax", whole_axes, result_types=index, note=_PLACE),
    _row("argmin", whole_axes, result_types=index, note=_PLACE),
    _row("logsumexp", whole_axes, note="needs the maximum first"),
)
