"""Which partial sums may an operation leave pending, and which must be reduced before it?

An array is pending along the axes whose devices hold contributions to it. An operation `f` may be
applied to each contribution by itself where that gives contributions to its result:

    each    f(a0 + a1, b0 + b1) = f(a0, b0) + f(a1, b1)    add: both pending along the same axes
    one     f(a0 + a1, b) = f(a0, b) + f(a1, b)            multiply: one pending, the other whole

An axis along which that does not hold is reduced first; the operand is then resharded from
contributions to what the operation needs, so that a pending operand of a sharded one is
reduce-scattered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.mesh import Axis
from reshard.sharding import ShardingSpec
from reshard.spmd.array_type import ArrayType
from reshard.spmd.operators.operator import Operator


def kept_pending(
    operator: Operator, operands: Sequence[ArrayType | None], attributes: Mapping[str, Any]
) -> tuple[tuple[Axis, ...], str | None]:
    """The axes along which the operation works on contributions, and how those combine.

    Args:
        operator: what is done.
        operands: their types; None for a number, which is a whole operand.
        attributes: of the operator.
    """
    reductions = {t.spec.reduction for t in operands if t is not None and t.spec is not None}
    reductions.discard(None)
    if len(reductions) != 1:
        return (), None
    (reduction,) = reductions
    pending = [_pending_of(one) for one in operands]
    best: tuple[Axis, ...] = ()
    for chosen in operator.partial_operands(len(operands), str(reduction), **attributes):
        axes = tuple(
            axis
            for axis in pending[min(chosen)]
            if all(axis in pending[number] for number in chosen)
            and not any(_uses(operands[n], axis) for n in range(len(operands)) if n not in chosen)
        )
        best = max(best, axes, key=len)
    return best, reduction if best else None


def _pending_of(one: ArrayType | None) -> tuple[Axis, ...]:
    return () if one is None or one.spec is None else one.spec.partial_axes


def _uses(one: ArrayType | None, axis: Axis) -> bool:
    """Whether an operand differs between devices along an axis, or a part of it."""
    if one is None or one.spec is None:
        return False
    used = [a for dim in one.spec.dim_specs for a in dim.axes] + list(one.spec.partial_axes)
    return any(other.name == axis.name for other in used)


def without_pending(spec: ShardingSpec) -> ShardingSpec:
    """The sharding that is left when all contributions are combined."""
    return ShardingSpec(spec.mesh, spec.dim_specs) if spec.partial_axes else spec


def with_pending(spec: ShardingSpec, axes: Sequence[Axis], reduction: str | None) -> ShardingSpec:
    """The same cuts, and contributions along more axes."""
    if not axes:
        return spec
    return ShardingSpec(
        spec.mesh,
        spec.dim_specs,
        partial_axes=(*axes, *spec.partial_axes),
        reduction=reduction or "sum",
    )
