"""Translation of errors of libraries to errors that name the operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from reshard.errors import ArrayIndexError, ReshardError, SpecError, UsageError
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.local_work import LocalWork
from reshard.spmd.core.operator import Operator
from reshard.spmd.core.result_types import compute_few
from reshard.spmd.rules.rule_builder import Inferred
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.runner import Runner

REFUSALS = (TypeError, ValueError, ArithmeticError, RuntimeError, IndexError)
"""The errors that libraries raise for elements or shapes that they do not support."""


def check_function(name: str, function: object, use: str) -> None:
    """Raise UsageError unless the argument of `sp.name` is a function; `use` is how to pass one."""
    if not callable(function):
        raise UsageError(
            f"sp.{name} of {function!r}, a {type(function).__name__}; a function of arrays in "
            f"shards was expected: {use}"
        )


def refuse_traced(asked: str, value: object) -> None:
    """Raise UsageError for a value that JAX traces in `jax.grad` or `jax.jit`."""
    for kind in type(value).__mro__:
        if kind.__name__ == "Tracer" and kind.__module__.partition(".")[0] == "jax":
            raise UsageError(
                f"{asked} of a value that JAX traces, a {type(value).__name__}: arrays in shards "
                "compute at once, and jax.grad and jax.jit do not go through them; differentiate "
                "with sp.grad, and see what is computed with sp.trace"
            )


def infer_checked(
    operator: Operator,
    operands: Sequence[ArrayType | None],
    attributes: Mapping[str, Any],
) -> Inferred:
    """Return the rule and the result shapes of an operation on operands without a mesh.

    Raises SpecError if the operator does not accept the operands' shapes or its attributes.
    """
    shapes = [() if operand is None else operand.shape for operand in operands]
    try:
        return operator.inferred(shapes, **attributes)
    except SpecError as error:
        described = ", ".join(
            "a number" if operand is None else str(operand) for operand in operands
        )
        said = f"{operator.name} of "
        text = str(error).removeprefix(said)
        raise SpecError(f"{said}{described}: {text}") from None


def check_types(
    operator: Operator, work: LocalWork, operands: Sequence[Any], runner: Runner
) -> None:
    """Raise, on a rank without elements, the errors that other ranks raise for their element types.

    Libraries accept empty arrays of any type. If only some ranks raised, the others would wait for
    them.
    """
    # The attributes of other operators may not be valid for a few elements.
    is_known = operator.result_types is None or operator.family in ("elementwise", "reductions")
    takes_few = is_known or operator.name in ("sort", "argsort")
    if not takes_few or not _lacks_elements(work):
        return
    numbers = [operand for operand in operands if not isinstance(operand, ArrayValue)]
    try:
        compute_few(operator, work, numbers)
    except REFUSALS as error:
        refuse(work.name, operands, runner, error)


def _lacks_elements(work: LocalWork) -> bool:
    """Return whether no rank is here, or all parts here of a nonempty operand are empty."""
    return not work.ranks or any(
        operand is not None and 0 not in operand.shape and all(0 in shape for shape in parts)
        for operand, parts in (
            (operand, work.operand_shapes_here(number))
            for number, operand in enumerate(work.operands)
        )
    )


def make_refusal(name: str, operands: Sequence[Any], runner: Runner, error: Exception) -> Exception:
    """Translate a library's error into an error that names the operation and its operands."""
    # Running out of memory does not depend on the operands' elements, and callers may catch the
    # library's own error.
    if isinstance(error, ReshardError) or "OutOfMemory" in type(error).__name__:
        return error
    described = ", ".join(str(x.type if isinstance(x, ArrayValue) else x) for x in operands)
    kind = ArrayIndexError if isinstance(error, IndexError) else UsageError
    refusal = kind(
        f"{name} of {described}: {runner.computing.name} cannot: {str(error).strip()}; give it "
        "elements that it takes, by sp.astype for instance"
    )
    refusal.__cause__ = error
    return refusal


def refuse(name: str, operands: Sequence[Any], runner: Runner, error: Exception) -> NoReturn:
    """Raise a library's error, translated by `make_refusal`."""
    raise make_refusal(name, operands, runner, error)
