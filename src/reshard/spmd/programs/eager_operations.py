"""Eager operations: data-dependent functions as operations of a traced function.

A traced function has no elements, so operations that depend on them (the number of rows of an
expert, the ranks between which elements of a sort move) cannot be traced. A data-dependent function
is an operation of the traced function, and is executed eagerly when that runs::

    traced     x -> matmul -> [experts] -> add -> y
    it runs    x -> matmul -> counts, send, multiply, back -> add -> y

The types of its results are found without elements, as if the data were evenly distributed, and its
data movement is estimated in the same way. Its gradient is such an operation too, which
recomputes the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.spmd.arrays.argument_tree import replaced
from reshard.spmd.core.array_type import ArrayType, settled
from reshard.spmd.core.operator import JointPullback, TapeStep
from reshard.spmd.gradients.tape import add_step
from reshard.spmd.graph import Body, BodyCosts, Value
from reshard.spmd.programs.traced_function import (
    MakeBack,
    arrays_of,
    as_abstract,
    bring,
    costs_within,
    pull_back_body,
)
from reshard.spmd.propagation.strategies import assign_shardings
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.error_translation import check_function
from reshard.spmd.shards.operation_call import unrecorded
from reshard.spmd.shards.runner import Runner
from reshard.spmd.tracing.abstract_runner import AbstractRunner, AbstractShard, abstract_values
from reshard.spmd.tracing.graph_recording import (
    GraphRecorder,
    filled,
    filled_in_order,
    is_recorded,
    listening_recorder,
    record,
)
from reshard.spmd.tracing.trace import find_runner, trace_graph

Function = Callable[..., Any]
Kinds = tuple[tuple[ArrayType, ...], BodyCosts]
"""The types of the results, and the data movement and memory of the body."""


def eagerly(function: Function) -> Function:
    """Run a data-dependent function eagerly inside traced functions, as a decorator.

    Within `sp.trace` and `sp.jit`, the function is an operation that is executed eagerly, with
    element values. So is its gradient, which recomputes the function. In eager mode the decorator
    has no effect.

    Args:
        function: a function of arrays, and of lists, tuples and dictionaries of them, which returns
            such values. Other arguments are passed through. It must read no array of the enclosing
            traced function except its arguments, and the shapes of its results must not depend on
            elements.

    Raises:
        UsageError: not a function. When traced: a function that reads arrays of the enclosing
            function other than its arguments, or reads elements in other ways than
            `sp.expert_routing` does. When run: results of other shapes or element types.

    >>> import reshard.spmd as sp
    >>> @sp.eagerly
    ... def experts(x, which, matrices):
    ...     routing = sp.expert_routing(which, count=2)
    ...     return routing.back(routing.multiply(routing.send(x), matrices))
    >>> x, matrices = sp.array([[1.0], [2.0]]), sp.array([[[10.0]], [[100.0]]])
    >>> sp.jit(experts)(x, sp.array([1, 0]), matrices).to_dense().tolist()
    [[100.0], [20.0]]
    """
    check_function("eagerly", function, "@sp.eagerly above its definition")

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        recorder = listening_recorder()
        inputs = [list(arguments), options]
        if recorder is None or not any(x.runner.is_abstract for x in arrays_of(inputs)):
            return function(*arguments, **options)
        return _EagerOperation(function, inputs).record(recorder)

    return called


def eager_operation(
    name: str,
    function: Function,
    x: Any,
    kind: ArrayType,
    moved_bytes: int,
    held: Sequence[ArrayType],
) -> Any:
    """Record a function of an array whose result type is known.

    Args:
        name: of the function.
        function: of an array with elements.
        x: an array of a traced function.
        kind: of the result.
        moved_bytes: that ranks receive of others meanwhile.
        held: types of the temporary arrays, in addition to `x`.
    """
    recorder = listening_recorder()
    if recorder is None:
        return as_abstract(x.runner, kind)

    def run(arrays: Sequence[Any], runner: Runner) -> list[Any]:
        if runner.is_abstract and not is_recorded(runner):
            return [as_abstract(runner, kind)]
        return [bring(function(*arrays), kind)]

    within = BodyCosts(moved_bytes).plus(held)
    body = Body(run, lambda types: within)
    return recorder.add_body("eagerly", body, [x], [kind], {"function": name})[0]


class _EagerOperation:
    """A function as an operation, for positional and keyword arguments."""

    def __init__(self, function: Function, arguments: list[Any]) -> None:
        self._function = function
        self._name = getattr(function, "__name__", repr(function))
        self._operands: list[Any] = []
        self._arguments = replaced(arguments, self._enter)
        self._results: Any = None
        self._meshes: tuple[DeviceMesh, ...] = ()
        self._kinds: dict[tuple[ArrayType, ...], Kinds] = {}

    def _enter(self, leaf: Any) -> Any:
        if not isinstance(leaf, ArrayValue):
            return leaf
        self._operands.append(leaf)
        return Value(len(self._operands) - 1, leaf.type.shape, leaf.type.dtype.name)

    def _call(self, *arrays: Any) -> Any:
        arguments, options = filled(self._arguments, arrays)
        return self._function(*arguments, **options)

    def record(self, recorder: GraphRecorder) -> Any:
        """Record the operation in a graph and on tapes, and return its results without elements."""
        kinds, _ = self._find_kinds([operand.type for operand in self._operands])
        body = Body(self._run, lambda types: self._find_kinds(types)[1], self._meshes)
        attributes = {"function": self._name}
        results = recorder.add_body("eagerly", body, self._operands, kinds, attributes)
        pullback = JointPullback(self._pull_back)
        add_step(TapeStep("eagerly", {}, tuple(self._operands), tuple(results), pullback))
        return filled_in_order(self._results, results)

    def _find_kinds(self, types: Sequence[ArrayType]) -> Kinds:
        key = tuple(types)
        if key not in self._kinds:
            # Arrays of the function around it are known by its runner.
            around = listening_recorder()
            library = find_runner(self._operands).computing
            runner = AbstractRunner(library) if around is None else around.runner
            with unrecorded(), abstract_values():
                recorded = record(lambda *arrays: self._call(*arrays), key, True, runner)
                for x in recorded.constants.values():
                    # Arrays that the function makes of numbers have elements.
                    if isinstance(x, ArrayValue) and isinstance(x._shards[0], AbstractShard):
                        raise UsageError(
                            f"{self._name}, an sp.eagerly function, reads {x.type} of the function "
                            "around it beside its arguments; give it as an argument"
                        )
                traced = trace_graph(assign_shardings(recorded, "eager"))
            self._meshes = traced.meshes
            self._results = recorded.returned
            self._kinds[key] = tuple(map(settled, traced.outputs)), costs_within(traced, key)
        return self._kinds[key]

    def _run(self, arrays: Sequence[Any], runner: Runner) -> list[Any]:
        kinds, _ = self._find_kinds([array.type for array in arrays])
        if is_recorded(runner):
            # Recorded again, in the graph that is being traced now.
            again = eagerly(self._function)
            arguments, options = filled(self._arguments, arrays)
            return list(map(bring, arrays_of(again(*arguments, **options)), kinds))
        if runner.is_abstract:
            return [as_abstract(runner, kind) for kind in kinds]
        results = arrays_of(self._call(*arrays))
        said, expected = (
            [f"{kind.dtype}{list(kind.shape)}" for kind in some]
            for some in ([array.type for array in results], kinds)
        )
        if said != expected:
            raise UsageError(
                f"{self._name}, an sp.eagerly function, returned {', '.join(said)}, where "
                f"{', '.join(expected)} was traced: its results' shapes and element types must not "
                "depend on elements"
            )
        return [bring(array, kind) for array, kind in zip(results, kinds, strict=True)]

    def _pull_back(self, step: TapeStep, cotangents: Any) -> list[Any]:
        """Return the cotangents of the operands, by a function of the same kind."""

        def call_back(back: MakeBack, slopes: list[Any]) -> Any:
            function = back(lambda arrays: arrays_of(self._call(*arrays)))
            function.__name__ = f"{self._name}_back"
            return eagerly(function)(list(step.operands), slopes)

        return pull_back_body(step.operands, step.results, cotangents, call_back)
