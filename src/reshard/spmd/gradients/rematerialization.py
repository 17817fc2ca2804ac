"""Rematerialization: values inside a function are recomputed in the backward pass, not stored.

A tape that records such a function stores only its arguments and results. The backward pass
executes the function once more, differentiates it, and frees its values again: less memory for more
time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from reshard.spmd.arrays.argument_tree import leaves, replaced
from reshard.spmd.core.operator import JointPullback, TapeStep
from reshard.spmd.gradients.tape import OfElements, Tape, add_step
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.error_translation import check_function
from reshard.spmd.shards.operation_call import CompiledCall, Recorder, call, recorders, recording

Function = Callable[..., Any]


def rematerialized(function: Function) -> Function:
    """Recompute the values inside a function in the backward pass instead of storing them.

    A decorator for layers (activation checkpointing): only the arguments of each layer stay in
    memory until the backward pass, which repeats the computation and the data movement inside.
    Without a gradient, the decorator does nothing.

    Args:
        function: a function of arrays, and of lists, tuples and dictionaries of them, which returns
            such values. It must return the same values when it is called again.

    Raises:
        UsageError: not a function.

    >>> import reshard.spmd as sp
    >>> @sp.rematerialized
    ... def layer(x, w):
    ...     return sp.tanh(x @ w)
    >>> x, w = sp.ones((2, 3)), sp.zeros((3, 3))
    >>> sp.grad(lambda w: sp.sum(layer(x, w)))(w).to_dense()[0].tolist()
    [2.0, 2.0, 2.0]
    """
    check_function("rematerialized", function, "@sp.rematerialized above its definition")

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        tapes = [recorder for recorder in recorders.active if isinstance(recorder, Tape)]
        if not tapes:
            return function(*arguments, **options)
        return _run_hidden(function, arguments, options, tapes)

    return called


class _Outsiders(Recorder):
    """A recorder of the arrays of tapes that a function reads in addition to its arguments."""

    differentiates = True

    def __init__(self, tapes: Sequence[Tape]) -> None:
        self.found: dict[int, Any] = {}
        self._tapes = tapes

    def record(
        self, call: CompiledCall, operands: Sequence[Any], results: Sequence[ArrayValue]
    ) -> None:
        """Observe the operands."""
        self.record_operands(operands)

    def record_reshard(self, operand: ArrayValue, result: ArrayValue) -> None:
        """Observe the operand."""
        self.record_operands((operand,))

    def record_operands(self, operands: Sequence[Any]) -> None:
        """Observe the operands of an operation, or of a step that is not an operator (a loop)."""
        for operand in operands:
            if any(tape.is_active(operand) for tape in self._tapes):
                self.found[id(operand)] = operand

    @property
    def of_elements(self) -> OfElements:
        """The recorder that listens for it inside a traced function."""
        return OfElements(self)

    def record_read(self, array: ArrayValue) -> None:
        """Raise UsageError if elements are read of arrays that depend on differentiated arrays."""
        for tape in self._tapes:
            tape.record_read(array)


@contextmanager
def without(tapes: Sequence[Any]) -> Iterator[None]:
    """Hide operations inside from tapes, and from recorders that listen for tapes."""
    before = recorders.active
    recorders.active = tuple(
        recorder for recorder in before if not any(recorder is tape for tape in tapes)
    )
    try:
        yield
    finally:
        recorders.active = before


def _run_hidden(
    function: Function, arguments: Sequence[Any], options: dict[str, Any], tapes: Sequence[Tape]
) -> Any:
    """Call a function, and record it on the tapes as a single step."""
    everything = [list(arguments), options]
    arrays = [leaf for _, leaf in leaves(everything) if isinstance(leaf, ArrayValue)]
    # Arguments go in as other arrays, so that those the function has from elsewhere are distinct.
    outsiders = _Outsiders(tapes)
    with without(tapes):
        entered = replaced(everything, _enter)
        with recording(outsiders):
            returned = function(*entered[0], **entered[1])
    results = [leaf for _, leaf in leaves(returned) if isinstance(leaf, ArrayValue)]
    outsiders.record_operands(results)
    # An argument that is returned as it is, or an array from elsewhere, is a result of its own.
    with without(tapes):
        outputs = [call("identity", (result,)) for result in results]
    operands = (*arrays, *outsiders.found.values())

    def pull_back(step: TapeStep, cotangents: Any) -> list[Any]:
        return _pull_back_again(function, everything, operands, cotangents)

    pullback = JointPullback(pull_back)
    add_step(TapeStep("rematerialized", {}, operands, tuple(outputs), pullback))
    remaining = iter(outputs)
    return replaced(
        returned, lambda leaf: next(remaining) if isinstance(leaf, ArrayValue) else leaf
    )


def _enter(leaf: Any) -> Any:
    return call("identity", (leaf,)) if isinstance(leaf, ArrayValue) else leaf


def _pull_back_again(
    function: Function, everything: Any, operands: Sequence[Any], cotangents: Any
) -> list[Any]:
    """Return the cotangents of a function's operands, by executing it once more."""
    tape = Tape()
    entered = replaced(everything, _enter)
    watched = [leaf for _, leaf in leaves(entered) if isinstance(leaf, ArrayValue)]
    # Arrays that the function has from elsewhere are read unchanged.
    watched += operands[len(watched) :]
    for array in watched:
        tape.watch(array)
    with recording(tape):
        returned = function(*entered[0], **entered[1])
    results = [leaf for _, leaf in leaves(returned) if isinstance(leaf, ArrayValue)]
    result_cotangents = cotangents if isinstance(cotangents, tuple) else (cotangents,)
    pairs = [
        (result, g) for result, g in zip(results, result_cotangents, strict=True) if g is not None
    ]
    accumulated = tape.pulled_back(pairs)
    return [accumulated.of(array) for array in watched]
