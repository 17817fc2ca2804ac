"""The table of derivatives: the pullback of every operator, or the reason why it has none.

The pullbacks are in the modules of their operator families. `gradient` adds one for a custom
operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from reshard.errors import UsageError
from reshard.spmd.core.operator import SHIPPED, JointPullback, Pullback, TapeStep, find_operator
from reshard.spmd.gradients import (
    elementwise,
    indexing,
    linear_algebra,
    movement,
    products,
    reductions,
    windows,
)
from reshard.spmd.operators import creation
from reshard.spmd.shards.operation_call import CompiledCall

_pullbacks: dict[str, Pullback] = {
    name: pullback
    for family in (
        elementwise,
        products,
        reductions,
        movement,
        indexing,
        windows,
        linear_algebra,
    )
    for name, pullback in family.PULLBACKS.items()
}

pullbacks: Mapping[str, Pullback] = MappingProxyType(_pullbacks)
"""The operators that can be differentiated."""

# Operators that make arrays of nothing depend on no array, or on its shape alone.
CONSTANT: frozenset[str] = (
    elementwise.CONSTANT
    | reductions.CONSTANT
    | indexing.CONSTANT
    | frozenset(one.name for one in creation.OPERATORS)
)
"""Operators whose results do not change with small changes of their operands."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **elementwise.REFUSED,
        **products.REFUSED,
        **reductions.REFUSED,
        **movement.REFUSED,
        **indexing.REFUSED,
        **windows.REFUSED,
        **linear_algebra.REFUSED,
    }
)
"""Operators that cannot be differentiated, with the reason."""


def find_pullback(call: CompiledCall) -> Pullback | None:
    """The pullback of an operation; None where its results do not change with small changes.

    Raises UsageError for an operator that has none, with the reason.
    """
    operator = find_operator(call.name)
    found = _pullbacks.get(call.name, operator.pullback)
    if found is not None or call.name in CONSTANT or operator.is_constant:
        return found
    reason = REFUSED.get(call.name, operator.no_pullback)
    reason = reason or "nobody has said what its derivative is"
    raise UsageError(
        f"the gradient of {call.name}: {reason}; give one with "
        f'@sp.gradient("{call.name}"), or gradient= of sp.operator, or take sp.stop_gradient(x) '
        "before"
    )


UserPullback = Callable[..., Any]


def gradient(name: str) -> Callable[[UserPullback], UserPullback]:
    """Define the gradient of a custom operator, as a decorator.

    The function receives the cotangent of the result (a tuple for several results), the operands,
    the result (a tuple, too) and the attributes of the operator as keyword arguments. It
    returns a cotangent, or None, for each operand. Write it with the functions of `reshard.spmd`,
    so that it works for every sharding.

    Raises UsageError for a built-in operator that has a derivative, or is constant.

    >>> import reshard.spmd as sp
    >>> @sp.gradient("twice")
    ... def twice_back(cotangent, x, result):
    ...     return (2 * cotangent,)
    """
    if not isinstance(name, str):
        raise UsageError(f'the gradient of {name!r}; give an operator\'s name: @gradient("name")')
    if name in SHIPPED and (name in _SHIPPED_PULLBACKS or name in CONSTANT):
        raise UsageError(
            f"operator {name} has a derivative of the package's; name your operator differently"
        )

    def add(function: UserPullback) -> UserPullback:
        def pull_back(step: TapeStep, g: Any) -> tuple[Any, ...]:
            results = step.results if len(step.results) > 1 else step.result
            found = function(g, *step.operands, results, **step.attributes)
            if not isinstance(found, tuple) or len(found) != len(step.operands):
                raise UsageError(
                    f"the gradient of {name} returned {type(found).__name__}; a tuple of "
                    f"{len(step.operands)} was expected, one for each operand, or None"
                )
            return found

        _pullbacks[name] = JointPullback(pull_back)
        return function

    return add


def remove_gradient(name: str) -> None:
    """Forgets how an operator of the user's own is differentiated."""
    if name not in _SHIPPED_PULLBACKS:
        _pullbacks.pop(name, None)


_SHIPPED_PULLBACKS = frozenset(_pullbacks)
