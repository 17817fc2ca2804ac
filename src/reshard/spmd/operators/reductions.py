"""The rules of reductions."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.spmd.operators.operator import Infer, Operator
from reshard.spmd.operators.shapes import Axes, axes_of, one_operand
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.templates import reduce_template


def _reduced(reduction: str, *, adjusted: bool = False) -> Infer:
    def infer(shapes: Sequence[Shape], axis: Axes = None, keepdims: bool = False) -> Inferred:
        shape = one_operand("a reduction", shapes)
        rule = reduce_template(
            len(shape),
            axes_of(len(shape), axis),
            keepdims=keepdims,
            reduction_operator=reduction,
        ).rule(shape)
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
        if dim in reduced:
            builder.factor([dim], kind="need_replication")
            if keepdims:
                builder.factor((), [place], size=1)
                place += 1
        else:
            builder.factor([dim], [place])
            place += 1
    return builder.build()


def _spread(
    shapes: Sequence[Shape], axis: Axes = None, correction: float = 0.0, keepdims: bool = False
) -> Inferred:
    return whole_axes(shapes, axis, keepdims)


_MEAN = "each part divides its sum by the whole count; contributions are summed"
_SPREAD = "needs the mean first: made of sums, or of whole axes"


def _row(name: str, infer: Infer, linear: bool, commutes: tuple[str, ...], note: str) -> Operator:
    return Operator(
        name,
        "reductions",
        infer,
        "each" if linear else "none",
        commutes,
        note=note,
    )


OPERATORS: tuple[Operator, ...] = (
    _row("sum", _reduced("sum"), True, (), ""),
    _row("mean", _reduced("sum", adjusted=True), True, (), _MEAN),
    _row("prod", _reduced("product"), False, ("product",), ""),
    _row("max", _reduced("max"), False, ("max",), ""),
    _row("min", _reduced("min"), False, ("min",), ""),
    _row("any", _reduced("max"), False, ("max",), "truth values: contributions combine by max"),
    _row("all", _reduced("min"), False, ("min",), "truth values: contributions combine by min"),
    _row("count_nonzero", _reduced("sum"), False, (), "contributions are counts"),
    _row("var", _spread, False, (), _SPREAD),
    _row("std", _spread, False, (), _SPREAD),
    _row("argmax", whole_axes, False, (), "an index says nothing without its value"),
    _row("argmin", whole_axes, False, (), "an index says nothing without its value"),
    _row("logsumexp", whole_axes, False, (), "needs the maximum first"),
)
