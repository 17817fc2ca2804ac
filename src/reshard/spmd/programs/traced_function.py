"""Traced functions: bodies of loops and branches, executed depending on element values.

The branches of a `cond` and the bodies of loops are recorded once, by themselves, when the function
around them is. Arrays of that function that they read in addition to their arguments are lifted:
they become operands of the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.arrays.sharded_array import ShardedArray
from reshard.spmd.core.array_type import ArrayType, settled
from reshard.spmd.gradients.tape import is_real_floating
from reshard.spmd.gradients.transforms import vjp
from reshard.spmd.graph import BodyCosts, Graph, Spec
from reshard.spmd.programs.program import Program
from reshard.spmd.programs.simplification import simplify
from reshard.spmd.propagation.strategies import assign_shardings
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import unrecorded
from reshard.spmd.shards.runner import Runner
from reshard.spmd.tracing.abstract_runner import AbstractRunner
from reshard.spmd.tracing.estimates import held_bytes
from reshard.spmd.tracing.graph_recording import GraphRecorder, record
from reshard.spmd.tracing.trace import Trace, trace_graph

Function = Callable[..., Any]


class TracedFunction:
    """A function that was recorded within another.

    Args:
        function: of arrays, in trees.
        arguments: types of its arguments, in trees.
        recorder: of the function around it.

    Attributes:
        captured: the arrays that it reads in addition to its arguments.
        results: the returned tree, with a value for each array.
        meshes: those of its arrays.
    """

    def __init__(
        self, function: Function, arguments: Sequence[Any], recorder: GraphRecorder
    ) -> None:
        with unrecorded():
            graph = simplify(record(function, arguments, True, recorder.runner))
        self.captured = tuple(x for x in graph.constants.values() if isinstance(x, ArrayValue))
        numbers = {n: x for n, x in graph.constants.items() if not isinstance(x, ArrayValue)}
        self._graph = replace(graph, constants=MappingProxyType(numbers), is_checked=True)
        self.results = graph.returned
        self.meshes = graph.meshes
        self._programs: dict[Any, Program] = {}
        self._kinds: dict[Any, tuple[ArrayType, ...]] = {}
        self._within: dict[Any, BodyCosts] = {}

    def run(self, arrays: Sequence[Any], runner: Runner) -> Any:
        """Run it as a program on its arguments followed by the captured arrays."""
        return self._program(arrays, runner).run(arrays, runner)

    def inline(self, arrays: Sequence[Any], runner: Runner) -> Any:
        """Run it as `run` does, operation by operation, for recorders that listen."""
        return self._program(arrays, runner).interpret(arrays, runner)

    def _program(self, arrays: Sequence[Any], runner: Runner) -> Program:
        types = tuple(array.type for array in arrays)
        key = (types, runner)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = Program(self._with_types(types))
        return program

    def _with_types(self, types: Sequence[ArrayType]) -> Graph:
        graph = self._graph
        shardings: list[Spec] = [None] * len(graph.values)
        for number, kind in zip(graph.arguments, types, strict=True):
            shardings[number] = kind.spec
        return assign_shardings(graph.with_shardings(shardings), "eager")

    def count_within(self, types: Sequence[ArrayType]) -> BodyCosts:
        """Return its data movement, and its memory beyond the arguments, for these types."""
        key = tuple(types)
        if key not in self._within:
            self._within[key] = costs_within(trace_graph(self._with_types(key)), key)
        return self._within[key]

    def result_types(self, types: Sequence[ArrayType]) -> tuple[ArrayType, ...]:
        """Return the types of its results, without pending sums."""
        key = tuple(types)
        if key not in self._kinds:
            runner = AbstractRunner(self._graph.library)
            with unrecorded():
                results = self.run([runner.array(kind, ShardedArray) for kind in key], runner)
            self._kinds[key] = tuple(settled(array.type) for array in arrays_of(results))
        return self._kinds[key]


def costs_within(traced: Trace, arguments: Sequence[ArrayType]) -> BodyCosts:
    """Return the data movement of a trace, and its memory beyond the arguments."""
    argument_bytes = held_bytes(arguments, traced.ranks)
    pairs = zip(traced.peak_bytes.items(), argument_bytes, strict=True)
    held: dict[int | None, int] = {rank: peak - size for (rank, peak), size in pairs}
    if not traced.meshes:
        held = {None: held[0]}
    return BodyCosts(traced.moved_bytes, held)


MakeBack = Callable[[Callable[[list[Any]], Sequence[Any]]], Function]
"""From a function of arrays to the function from these, and the cotangents of its real results, to
the cotangents of the real arrays."""


def pull_back_body(
    operands: Sequence[Any],
    results: Sequence[Any],
    cotangents: Any,
    call_back: Callable[[MakeBack, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Return the cotangents of the operands of an operation whose body is computed again.

    Args:
        operands, results: of the operation.
        cotangents: of the results: an array, or a tuple of them.
        call_back: returns the cotangents of the real operands, from what differentiates a function
            and the cotangents of the real results.
    """
    result_cotangents = cotangents if isinstance(cotangents, tuple) else (cotangents,)
    real, real_results = (
        [n for n, x in enumerate(arrays) if is_real_floating(x.type.dtype)]
        for arrays in (operands, results)
    )

    def make_back(function: Callable[[list[Any]], Sequence[Any]]) -> Function:
        def back(arrays: Sequence[Any], slopes: Any) -> list[Any]:
            def of_real(*chosen: Any) -> list[Any]:
                inputs = list(arrays)
                for n, x in zip(real, chosen, strict=True):
                    inputs[n] = x
                outputs = function(inputs)
                return [outputs[n] for n in real_results]

            _, pullback = vjp(of_real, *(arrays[n] for n in real))
            return list(pullback(slopes))

        return back

    slopes: list[Any] = [None] * len(operands)
    real_slopes = call_back(make_back, [result_cotangents[n] for n in real_results])
    for n, slope in zip(real, real_slopes, strict=True):
        slopes[n] = slope
    return slopes


def arrays_of(tree: Any) -> list[Any]:
    """Return the arrays of a tree, in order."""
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, ArrayValue)]


def bring(x: Any, kind: ArrayType) -> Any:
    """Reshard an array to the sharding of a type; reduce it if the type has none."""
    spec = kind.spec
    if x.type.spec is spec:
        return x
    if spec is None:
        return x.reduced()
    return x.shard(spec)


def as_abstract(runner: Any, kind: ArrayType) -> Any:
    """Return an array of a type without elements, of an abstract runner."""
    return runner.array(kind, ShardedArray)
