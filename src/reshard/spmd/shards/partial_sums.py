"""Pending sums: which of them an operation keeps, and which are reduced before it.

An array is pending along the axes whose devices hold contributions to it. An operation `f` may be
applied to each contribution separately if that gives contributions to its result:

    each    f(a0 + a1, b0 + b1) = f(a0, b0) + f(a1, b1)    add: both pending along the same axes
    one     f(a0 + a1, b) = f(a0, b) + f(a1, b)            multiply: one pending, the other whole

The second equation holds for finite `b` only: `3 inf - 1 inf` is NaN, and `2 inf` is not. So
factors are checked first (`are_finite`).

An axis along which that does not hold is reduced first. The operand is then resharded directly from
contributions to the sharding that the operation needs: if that is sharded, by a reduce-scatter.

Sums are reduced as in eager programs, or stay pending inside `unsettled`: a strategy that
determines the shardings of all values of a program also decides this.
"""

from __future__ import annotations

import cmath
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from reshard._contexts import set_context
from reshard.mesh import Axis
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.operator import Operator
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.runner import Runner

_settles: ContextVar[bool] = ContextVar("settles", default=True)


def unsettled() -> AbstractContextManager[None]:
    """Leave values inside in the shardings that operations make, for a strategy to decide.

    >>> with unsettled():
    ...     settles()
    False
    """
    return set_context(_settles, False)


def settles() -> bool:
    """Return whether values get their final shardings at once."""
    return _settles.get()


def kept_partial(
    operator: Operator, operands: Sequence[ArrayType | None], attributes: Mapping[str, Any]
) -> tuple[tuple[Axis, ...], str | None]:
    """Return the axes along which the operation works on contributions, and how those combine.

    Args:
        operator: of the operation.
        operands: their types; None for a number, which is not partial.
        attributes: of the operator.
    """
    reductions = {t.spec.reduction for t in operands if t is not None and t.spec is not None}
    reductions.discard(None)
    if len(reductions) != 1:
        return (), None
    (reduction,) = reductions
    pending = [_find_pending(operand) for operand in operands]
    best: tuple[Axis, ...] = ()
    for chosen in operator.partial_operands(len(operands), str(reduction), **attributes):
        axes = tuple(
            axis
            # Axes along which all chosen operands are pending, so any chosen operand has them all.
            for axis in pending[min(chosen)]
            if all(axis in pending[number] for number in chosen)
            and not any(_uses(operands[n], axis) for n in range(len(operands)) if n not in chosen)
        )
        # Choose the set that leaves the most axes pending, and the first among equals.
        best = max(best, axes, key=len)
    return best, reduction if best else None


def _find_pending(operand: ArrayType | None) -> tuple[Axis, ...]:
    return () if operand is None or operand.spec is None else operand.spec.partial_axes


def _uses(operand: ArrayType | None, axis: Axis) -> bool:
    """Return whether an operand differs between devices along an axis, or a part of it."""
    if operand is None or operand.spec is None:
        return False
    # By name alone: a part of an axis and the whole of it are not distinguished.
    used = [a for dim in operand.spec.dim_specs for a in dim.axes] + list(operand.spec.partial_axes)
    return any(other.name == axis.name for other in used)


def factors_of(
    operands: Sequence[Any], runs_with: Sequence[ShardingSpec | None]
) -> tuple[int, ...]:
    """Return the numbers of the operands that contributions are multiplied by and may be infinite.

    Args:
        operands: arrays and numbers.
        runs_with: the shardings that the operation runs with.
    """
    return tuple(
        number
        for number, (operand, spec) in enumerate(zip(operands, runs_with, strict=True))
        if not (spec is not None and spec.partial_axes) and _may_be_infinite(operand)
    )


def _may_be_infinite(operand: Any) -> bool:
    if not isinstance(operand, ArrayValue):
        return isinstance(operand, float | complex)
    return not operand.type.dtype.name.startswith(("bool", "int", "uint"))


def are_finite(factors: Sequence[int], operands: Sequence[Any], runner: Runner) -> bool:
    """Return whether these operands are finite on every rank; all ranks get the same answer.

    Ranks exchange their answers if an operand is sharded. Arrays without elements count as finite.
    """
    all_are, may_differ = True, False
    for number in factors:
        factor = operands[number]
        if not isinstance(factor, ArrayValue):
            all_are = all_are and cmath.isfinite(factor)
        elif not runner.is_abstract:
            # Shards that are the same object are checked once.
            shards = {id(shard): shard for shard in factor._shards}.values()
            all_are = all_are and all(map(runner.library.is_finite, shards))
            kind = factor.type
            has_everyone = kind.spec is None or runner.has_everyone(kind.spec.mesh)
            may_differ = may_differ or kind.is_cut or not has_everyone
    return not runner.on_any_rank(not all_are) if may_differ else all_are


def types_allow_partial(operands: Sequence[ArrayType | None], results: Sequence[ArrayType]) -> bool:
    """Return whether the element types allow an operation on contributions.

    Integers and booleans wrap around in their own type, but not in a floating or wider result type;
    a narrower type rounds each contribution; the truth value of a contribution is not a
    contribution to the truth value of the sum.
    """
    # If the type does not change, a contribution is treated like the whole array.
    pending = {x.dtype for x in operands if x is not None and x.spec and x.spec.partial_axes}
    result_dtypes = {result.dtype for result in results}
    if result_dtypes == pending:
        return True
    wraps = any(dtype.name.startswith(("bool", "int", "uint")) for dtype in pending)
    widest = max(dtype.itemsize_bytes for dtype in pending)
    narrows = any(dtype.itemsize_bytes < widest or dtype.name == "bool" for dtype in result_dtypes)
    return not wraps and not narrows
