"""Recorded programs: a recorded function, run eagerly once, and then run as a program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import RLock
from typing import Any

from reshard.spmd.arrays.sharded_array import ShardedArray, array
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.graph import Graph
from reshard.spmd.programs.prepared_program import (
    ChangeRuns,
    Preparation,
    PreparedProgram,
    UnforeseenElementsError,
)
from reshard.spmd.shards.operation_call import recorders
from reshard.spmd.shards.runner import Runner
from reshard.spmd.tracing.graph_recording import filled
from reshard.spmd.tracing.trace import interpret


class RecordedProgram:
    """A recorded function with its shardings, and its program once it was carried out.

    `overlap` movements at most are under way beside others, and `backend` of `torch.compile`
    compiles what ranks compute: True for its default, False for none.
    """

    def __init__(
        self,
        graph: Graph,
        overlap: int = 0,
        backend: bool | str = False,
    ) -> None:
        self._overlap = overlap
        self._backend = backend
        self._graph = graph
        self._program: PreparedProgram | None = None
        self._types: tuple[ArrayType, ...] = ()
        self._lock = RLock()
        # The types in which the program takes its inputs; None for numbers.
        self._wanted = dict(zip(graph.inputs, graph.input_types, strict=True))
        self._arguments = graph.arguments
        self._inputs = [number for number, kind in self._wanted.items() if kind is not None]
        self._outputs = tuple(dict.fromkeys(graph.outputs))
        self._fixed: dict[int, Any] = {}

    def interpret(self, given: Sequence[Any], runner: Runner) -> Any:
        """As `run`, operation by operation."""
        arrays = {
            number: self._enter(x, number, runner)
            for number, x in zip(self._arguments, given, strict=True)
        }
        return self._interpret(arrays, runner, None)

    def run(self, given: Sequence[Any], runner: Runner, given_up: Sequence[int] = ()) -> Any:
        """The results for arrays among the arguments, in their order.

        `given_up` are places of arrays that nobody else has: each is freed after its last use.
        """
        arrays = {
            number: self._enter(x, number, runner)
            for number, x in zip(self._arguments, given, strict=True)
        }
        if recorders or runner.is_abstract:
            # Whoever listens, a gradient's tape for one, is to see operations.
            return self._interpret(arrays, runner, None)
        program = self._program
        if program is None:
            with self._lock:
                if self._program is None:
                    return self._prepare(arrays, runner)
                program = self._program
        every = arrays | self._fixed if self._fixed else arrays
        inputs = [every[number]._shards for number in self._inputs]
        if not program.may_stop:
            for place in given_up:
                # Nothing but the program holds them from here on.
                given[place]._shards = ()
                every[self._arguments[place]]._shards = ()
                arrays.pop(self._arguments[place], None)
                if every is not arrays:
                    every.pop(self._arguments[place], None)
        try:
            made = program.run(inputs)
        except UnforeseenElementsError:
            return self._interpret(arrays, runner, None)
        values = {}
        for number, kind, shards, may_view in zip(
            self._outputs, self._types, made, program.outputs_view, strict=True
        ):
            # An argument that is returned is the argument.
            known = every.get(number)
            if known is None:
                make = ShardedArray.given if may_view else ShardedArray.of_shards
                known = make(kind, shards, runner)
            values[number] = known
        return filled(self._graph.returned, values)

    def _enter(self, x: Any, number: int, runner: Runner) -> Any:
        """An argument as the program wants it."""
        wanted = self._wanted[number]
        if isinstance(x, ShardedArray) and x.type is wanted and x.runner is runner:
            return x
        return array(x, None if wanted is None else wanted.spec, runner=runner)

    def _interpret(self, arrays: dict[int, Any], runner: Runner, watcher: Any) -> Any:
        values = self._compute(arrays, runner, watcher)
        return filled(self._graph.returned, values)

    def _compute(self, arrays: dict[int, Any], runner: Runner, watcher: Any) -> dict[int, Any]:
        if not self._fixed:
            self._fixed = {
                number: x if self._wanted[number] is None else self._enter(x, number, runner)
                for number, x in self._graph.constants.items()
            }
        return interpret(self._graph, arrays | self._fixed, watcher)

    def _prepare(self, arrays: dict[int, Any], runner: Runner) -> Any:
        """The results of the first run, after which there is a program."""
        kinds = {number: kind for number, kind in self._wanted.items() if kind is not None}
        preparation = Preparation(runner, kinds)
        compiled = self._find_compiling(runner)
        values = self._compute(arrays, runner, preparation)
        self._types = tuple(values[number].type for number in self._outputs)
        self._program = preparation.program(self._inputs, self._outputs, self._overlap, compiled)
        return filled(self._graph.returned, values)

    def _find_compiling(self, runner: Runner) -> ChangeRuns | None:
        """What compiles the program's runs, if something does."""
        if self._backend is False:
            return None
        # With PyTorch, which programs of NumPy do without.
        from reshard.spmd.programs.steps.compiled_work import compiled_runs, compiler

        return partial(compiled_runs, compile_whole=compiler(self._backend, runner))
