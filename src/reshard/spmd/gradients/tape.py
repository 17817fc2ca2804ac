"""Tapes: the recorded operations of a function, and the backward pass through them.

A tape is a `Recorder` of `reshard.spmd.shards.operation_call`. It stores the operations that depend
on the arrays it watches, with their operands and results. In the backward pass each operation's
pullback computes the cotangents of its operands from those of its results, with the public
operators, so that their shardings follow from the same rules:

    forward     y = x @ w           x: dp, -    w: -, -     y: dp, -
    backward    dw = x.T @ dy       dp is summed over       dw: -, - | sum(dp)

A cotangent represents a full array, whatever its sharding, so reshards need no derivative.
Contributions to a parameter's gradient stay pending until all are added. Contributions to other
cotangents are reduced before the next pullback, in the sharding of the value: the cotangent of a
gathered value is reduce-scattered, and the cotangent of a reduce-scattered value is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from reshard.dtypes import DType
from reshard.errors import UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType, replicated, without_partial
from reshard.spmd.core.operator import (
    JointPullback,
    Pullback,
    TapeStep,
    find_operator,
    operators,
    shipped_operators,
)
from reshard.spmd.core.result_types import kind_of
from reshard.spmd.graph import WITH_SHARDING
from reshard.spmd.ops import data_types
from reshard.spmd.ops.filling import zeros_like
from reshard.spmd.ops.movement import summed_to
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import (
    CompiledCall,
    Recorder,
    notify_recorder,
    placed,
    recorders,
)
from reshard.spmd.shards.partial_sums import settles

_pullbacks: dict[str, Pullback] = {}
"""Derivatives that were registered by `gradient`, by operator."""


def find_pullback(call: CompiledCall) -> Pullback | None:
    """Return the pullback of an operation; None if its results do not change with small changes.

    Raises UsageError for an operator that cannot be differentiated, with the reason.
    """
    operator = find_operator(call.name)
    pullback = _pullbacks.get(call.name, operator.pullback)
    if pullback is not None or operator.is_constant:
        return pullback
    reason = operator.no_pullback or "its derivative is not known"
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
    shipped = operators[name] if name in shipped_operators() else None
    if shipped is not None and (shipped.pullback is not None or shipped.is_constant):
        raise UsageError(
            f"operator {name} has a derivative of the package's; name your operator differently"
        )

    def add(function: UserPullback) -> UserPullback:
        def pull_back(step: TapeStep, g: Any) -> tuple[Any, ...]:
            results = step.results if len(step.results) > 1 else step.result
            cotangents = function(g, *step.operands, results, **step.attributes)
            if not isinstance(cotangents, tuple) or len(cotangents) != len(step.operands):
                raise UsageError(
                    f"the gradient of {name} returned {type(cotangents).__name__}; a tuple of "
                    f"{len(step.operands)} was expected, one for each operand, or None"
                )
            return cotangents

        _pullbacks[name] = JointPullback(pull_back)
        return function

    return add


def remove_gradient(name: str) -> None:
    """Forget the gradient of a custom operator."""
    _pullbacks.pop(name, None)


def is_real_floating(dtype: DType) -> bool:
    """Return whether arrays of a type have gradients."""
    return kind_of(dtype) == "real floating"


class Tape(Recorder):
    """A record of the operations that depend on watched arrays, in order."""

    differentiates = True

    def __init__(self) -> None:
        self.steps: list[TapeStep] = []
        # Arrays are known by their identity, so none of them may be freed.
        self._active: dict[int, ArrayValue] = {}

    def watch(self, array: ArrayValue) -> None:
        """Record all operations on this array from now on."""
        self._active[id(array)] = array

    def is_active(self, operand: object) -> bool:
        """Return whether an operand depends on watched arrays."""
        return id(operand) in self._active and isinstance(operand, ArrayValue)

    def watches(self, arrays: Sequence[Any]) -> bool:
        """Return whether any of the arrays depends on watched arrays."""
        return any(map(self.is_active, arrays))

    def record(
        self, call: CompiledCall, operands: Sequence[Any], results: Sequence[ArrayValue]
    ) -> None:
        """Record an operation. Raises UsageError if it cannot be differentiated."""
        if not any(map(self.is_active, operands)):
            return
        pullback = find_pullback(call)
        if pullback is None:
            return
        attributes = {**call.attributes, **call.options}
        combined: tuple[ShardingSpec | None, ...] = ()
        if call.name not in _READING_NONE:
            combined = tuple(map(_find_combined, call.operands, call.runs_with))
        self.add(
            TapeStep(call.name, attributes, tuple(operands), tuple(results), pullback, combined)
        )

    @property
    def of_elements(self) -> OfElements:
        """The recorder that listens for it inside a traced function."""
        return OfElements(self)

    def record_reshard(self, operand: ArrayValue, result: ArrayValue) -> None:
        """Record a reshard."""
        if self.is_active(operand):
            self.add(TapeStep(WITH_SHARDING, {}, (operand,), (result,), _move_back))

    def record_read(self, array: ArrayValue) -> None:
        """Raise UsageError: values computed from an array's elements would have no gradient."""
        if self.is_active(array):
            raise UsageError(
                f"the elements of {array.type} were asked for within a function that is "
                "differentiated, and what is made of them would have no gradient; return the "
                "array beside the value (has_aux=True), or read sp.stop_gradient(x)"
            )

    def add(self, step: TapeStep) -> None:
        """Record a step, and watch the results that are real numbers."""
        differentiable = [result for result in step.results if is_real_floating(result.type.dtype)]
        for result in step.results:
            if kind_of(result.type.dtype) == "complex floating":
                raise UsageError(
                    f"the gradient of {step.name}, which makes {result.type}: complex numbers have "
                    "no gradients here; keep to real ones, or take sp.stop_gradient(x) before"
                )
        if differentiable:
            self.steps.append(step)
            for result in differentiable:
                self.watch(result)

    def pulled_back(self, cotangents: Sequence[tuple[ArrayValue, Any]]) -> Cotangents:
        """Return the cotangents of watched arrays, from the cotangents of results.

        Args:
            cotangents: pairs of an array and its cotangent, of its shape and element type.
        """
        accumulated = Cotangents(cotangents)
        combined: _Combined = {}
        for step in reversed(self.steps):
            result_cotangents = _take_results(step, accumulated)
            if result_cotangents is not None:
                active = [
                    number
                    for number, operand in enumerate(step.operands)
                    if self.is_active(operand)
                ]
                _pull_into(accumulated, step, combined, result_cotangents, active)
        return accumulated

    def pulled_back_in_two(
        self, cotangents: Sequence[tuple[ArrayValue, Any]], towards: Sequence[ArrayValue]
    ) -> tuple[Cotangents, Callable[[], None]]:
        """Return the cotangents of some watched arrays, and a function that adds the others.

        Operations on the path from results to `towards` pull back to operands on that path at once,
        and to their other operands, such as weights, later (Qi et al., "Zero Bubble Pipeline
        Parallelism", 2023). A joint pullback returns all cotangents at once.

        Args:
            cotangents: as in `pulled_back`.
            towards: watched arrays, whose cotangents are computed first.
        """
        accumulated = Cotangents(cotangents)
        combined: _Combined = {}
        reached = {id(array) for array in towards}
        for step in self.steps:
            if any(id(operand) in reached for operand in step.operands):
                reached.update(map(id, step.results))
        waiting: list[tuple[TapeStep, Any, list[int]]] = []
        for step in reversed(self.steps):
            active = [
                number for number, operand in enumerate(step.operands) if self.is_active(operand)
            ]
            if not any(id(result) in reached for result in step.results):
                # Its cotangents arrive from steps that are pulled back later.
                waiting.append((step, None, active))
                continue
            result_cotangents = _take_results(step, accumulated)
            if result_cotangents is None:
                continue
            now = active
            # A joint pullback computes all cotangents at once, so splitting it would compute them
            # twice.
            if not isinstance(step.pullback, JointPullback):
                now = [number for number in active if id(step.operands[number]) in reached]
                later = [number for number in active if number not in now]
                waiting.append((step, result_cotangents, later))
            _pull_into(accumulated, step, combined, result_cotangents, now)

        def pull_rest() -> None:
            for step, saved, numbers in waiting:
                result_cotangents = _take_results(step, accumulated) if saved is None else saved
                if result_cotangents is not None and numbers:
                    _pull_into(accumulated, step, combined, result_cotangents, numbers)
            # The cotangents and operands that it kept are freed.
            waiting.clear()

        return accumulated, pull_rest


class OfElements(Recorder):
    """A recorder that forwards only operations on arrays with elements to another recorder."""

    differentiates = True

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def record_read(self, array: ArrayValue) -> None:
        """Forward a read."""
        self.recorder.record_read(array)

    @property
    def of_elements(self) -> OfElements:
        """The recorder itself, for another function that is traced inside."""
        return self

    def watches(self, arrays: Sequence[Any]) -> bool:
        """Return whether the recorder watches any of the arrays, all of which have elements."""
        is_abstract = any(isinstance(x, ArrayValue) and x.runner.is_abstract for x in arrays)
        return not is_abstract and self.recorder.watches(arrays)

    def record(
        self, call: CompiledCall, operands: Sequence[Any], results: Sequence[ArrayValue]
    ) -> None:
        """Forward an operation."""
        if not results[0].runner.is_abstract:
            notify_recorder(self.recorder, call, operands, results)

    def record_reshard(self, operand: ArrayValue, result: ArrayValue) -> None:
        """Forward a reshard."""
        if not result.runner.is_abstract:
            self.recorder.record_reshard(operand, result)


def _list_hearing(arrays: Sequence[Any]) -> list[tuple[Recorder, Recorder]]:
    """Return the recorders that observe operations on arrays, with the recorder that each serves.

    While a function is traced, tapes observe only arrays with elements.
    """
    is_abstract = any(isinstance(x, ArrayValue) and x.runner.is_abstract for x in arrays)
    observers: list[tuple[Recorder, Recorder]] = []
    for recorder in recorders.active:
        if not isinstance(recorder, OfElements):
            observers.append((recorder, recorder))
        elif not is_abstract:
            observers.append((recorder, recorder.recorder))
    return observers


def add_step(step: TapeStep) -> None:
    """Record a step that is not an operator on the tapes on whose watched arrays it depends."""
    for _, recorder in _list_hearing((*step.operands, *step.results)):
        if isinstance(recorder, Tape) and any(map(recorder.is_active, step.operands)):
            recorder.add(step)
        else:
            recorder.record_operands(step.operands)


def find_tapes(arrays: Sequence[Any]) -> list[Recorder]:
    """Return the recorders of the tapes that record a step of some arrays."""
    return [
        listening for listening, recorder in _list_hearing(arrays) if isinstance(recorder, Tape)
    ]


# Operators whose pullbacks read only the result or the cotangent, not the operands.
_READING_NONE_NAMES = """
exp expm1 reciprocal sqrt tan tanh
add subtract negative positive astype identity sum cumulative_sum diagonal
broadcast_to concat expand_dims flip pad permute_dims reshape roll slice squeeze
"""
_READING_NONE = frozenset(_READING_NONE_NAMES.split())


def _find_combined(kind: ArrayType | None, ran: ShardingSpec | None) -> ShardingSpec | None:
    """Return the sharding in which an operand's contributions were combined, or None."""
    is_pending = kind is not None and kind.spec is not None and bool(kind.spec.partial_axes)
    return ran if is_pending and ran is not None and not ran.partial_axes else None


_Combined = dict[tuple[int, ShardingSpec], Any]
"""Operands whose contributions the backward pass reduced, once for all readers: by identity."""


def _with_combined(step: TapeStep, combined: _Combined) -> TapeStep:
    """Return the step with operands as the operation read them, for the pullback."""
    if not any(step.combined) or not settles():
        return step
    operands = []
    for operand, spec in zip(step.operands, step.combined, strict=True):
        if spec is not None:
            key = (id(operand), spec)
            if key not in combined:
                # Once for all readers: each reduction moves the whole array.
                combined[key] = operand.shard(spec)
            operand = combined[key]
        operands.append(operand)
    return replace(step, operands=tuple(operands))


def _take_results(step: TapeStep, cotangents: Cotangents) -> Any:
    """Return the cotangents of a step's results for its pullback, or None if there are none."""
    taken = [cotangents.take(result) for result in step.results]
    if all(cotangent is None for cotangent in taken):
        return None
    # Unused results have a cotangent of zeros, and indices have no cotangent.
    filled = tuple(
        _settle(cotangent, result.type, step.name)
        if cotangent is not None
        else zeros_like(result)
        if is_real_floating(result.type.dtype)
        else None
        for cotangent, result in zip(taken, step.results, strict=True)
    )
    return filled[0] if len(filled) == 1 else filled


def _pull_into(
    cotangents: Cotangents,
    step: TapeStep,
    combined: _Combined,
    result_cotangents: Any,
    positions: Sequence[int],
) -> None:
    """Add the cotangents of the operands of a step at some positions."""
    pullback, read = step.pullback, _with_combined(step, combined)
    if isinstance(pullback, JointPullback):
        operand_cotangents = pullback.function(read, result_cotangents)
        pulled = [operand_cotangents[number] for number in positions]
    else:
        pulled = [pullback(read, result_cotangents, number) for number in positions]
    for operand, cotangent in zip(
        [step.operands[number] for number in positions], pulled, strict=True
    ):
        if cotangent is not None:
            # A cotangent has the operand's shape and element type: broadcast dimensions are summed.
            fitting = summed_to(cotangent, operand.type.shape)
            cotangents.add(operand, data_types.astype(fitting, operand.type.dtype))


class Cotangents:
    """A store of cotangents by array, which adds them up."""

    def __init__(self, pairs: Sequence[tuple[ArrayValue, Any]]) -> None:
        self._by_id: dict[int, Any] = {}
        for array, cotangent in pairs:
            self.add(array, cotangent)

    def add(self, array: Any, cotangent: Any) -> None:
        earlier = self._by_id.get(id(array))
        if earlier is not None:
            spec, other = cotangent.type.spec, earlier.type.spec
            # An array that was sent to another mesh may have cotangents over both.
            if spec is not None and other is not None and spec.mesh is not other.mesh:
                cotangent = cotangent.shard(replicated(other.mesh, cotangent.ndim))
            cotangent = earlier + cotangent
        self._by_id[id(array)] = cotangent

    def take(self, array: Any) -> Any:
        """Remove and return the cotangent of an array, or None if it has none."""
        # Removed, so that a cotangent is freed once it was pulled back.
        return self._by_id.pop(id(array), None)

    def of(self, array: Any) -> Any:
        """Return the cotangent of an array, or None if it has none."""
        return self._by_id.get(id(array))


def _move_back(step: TapeStep, cotangent: Any, number: int) -> Any:
    """Return the cotangent of a resharded array, in any sharding over the array's own mesh.

    Operations bring it to the sharding that they need, but they cannot bring it to another mesh.
    """
    spec, cotangent_spec = step.operands[0].type.spec, cotangent.type.spec
    if spec is not None and cotangent_spec is not None and spec.mesh is not cotangent_spec.mesh:
        return placed(cotangent, without_partial(spec))
    return cotangent


_PASSING = frozenset(
    ["broadcast_to", "expand_dims", "identity", "negative", "permute_dims", "reshape", "squeeze"]
)


def _settle(cotangent: Any, kind: ArrayType, name: str) -> Any:
    """Return a value's cotangent for its pullback: combined, and sharded where that is free."""
    spec, value_spec = cotangent.type.spec, kind.spec
    if not settles() or name == WITH_SHARDING:
        return cotangent
    if spec is not None and spec.partial_axes:
        # Pullbacks that only move elements leave contributions to what comes before them.
        if name in _PASSING:
            return cotangent
        return placed(
            cotangent,
            replicated(spec.mesh, kind.ndim) if value_spec is None else without_partial(value_spec),
        )
    if value_spec is None:
        return cotangent
    # A whole cotangent is sharded without moving anything. The cotangent of contributions is
    # gathered once here, since each pullback of the operations that made them needs it whole.
    if value_spec.partial_axes or not cotangent.type.is_cut:
        return placed(cotangent, without_partial(value_spec))
    return cotangent


def ended(x: Any, spec: ShardingSpec, like: Any = None) -> Any:
    """Return a function's result in its final sharding.

    Strategies that choose all shardings observe the sharding even if `x` already has it.

    Args:
        x: an array.
        spec: the sharding.
        like: the array whose sharding that is, such as a gradient's parameter.
    """
    if settles():
        return placed(x, spec)
    result = x.shard(spec)
    if like is not None:
        for recorder in recorders.active:
            recorder.record_end(result, like)
    return result
