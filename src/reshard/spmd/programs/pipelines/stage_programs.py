"""Programs of the passes of a stage, and the stored values that each of them reads.

    F   parameters, x  -> the stage's output, and values for the backward pass
    I   cotangent, ..  -> the cotangent of x, and what W reads
    W   gradients, ..  -> these, with the microbatch's own added

A value is free once the last pass that reads it has done so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.arrays.sharded_array import ShardedArray
from reshard.spmd.programs.pipelines.recorded_stage import RecordedStage
from reshard.spmd.programs.recorded_program import RecordedProgram
from reshard.spmd.programs.simplification import simplified
from reshard.spmd.shards.runner import Runner
from reshard.spmd.tracing.graph_recording import filled_in_order
from reshard.spmd.tracing.trace import assign_shardings


@dataclass(frozen=True)
class _PassProgram:
    """That of a pass, and the places of what it is given that nobody reads after it."""

    program: RecordedProgram
    given_up: list[int]


class StagePrograms:
    """The programs of a stage for arguments of a kind, each made when it first runs."""

    def __init__(self, stage: RecordedStage, runner: Runner) -> None:
        self.stage, self.runner = stage, runner
        self._programs: dict[tuple[int, bool], _PassProgram] = {}

    def program(self, place: int, known: bool) -> _PassProgram:
        """That of a pass; with gradients that are `known` it adds its own to these."""
        found = self._programs.get((place, known))
        if found is None:
            found = self._programs[place, known] = self._make(place, known)
        return found

    def _make(self, place: int, known: bool) -> _PassProgram:
        stage, part = self.stage, self.stage.parts[place]
        # What others have, they go on having: passes are given objects of their own.
        passed = {number for one in stage.parts for number in one.makes} | {stage.cotangent}
        passed -= {*part.kept, stage.returned[place]}
        given_up = [n for n, number in enumerate(part.reads) if number in passed]
        if known:
            count = len(stage.gradient_numbers)
            given_up += range(len(part.reads), len(part.reads) + count)
        graph = assign_shardings(simplified(stage.graph_of(part, known)), "eager")
        return _PassProgram(RecordedProgram(graph), given_up)


class ProgramPass:
    """A pass of a stage by programs, see `StagePass`."""

    def __init__(self, programs: StagePrograms, arrays: Sequence[Any]) -> None:
        self._programs = programs
        self._stage = programs.stage
        self._values = dict(zip(self._stage.arguments, arrays, strict=True))
        self._run(0)
        self.made = self._take(0, self._stage.made)

    def go_back(self, cotangent: Any, known: Any) -> tuple[Any, Any]:
        """The cotangent of the stage's array, and gradients added to those that are `known`."""
        self._enter(cotangent)
        found = self._run(1, known)
        return self._slope(), self._in_places(found)

    def go_back_to_input(self, cotangent: Any) -> Any:
        """The cotangent of the stage's array; None for the first stage's."""
        self._enter(cotangent)
        self._run(1)
        return self._slope()

    def find_gradients(self, known: Any) -> Any:
        """After `go_back_to_input`: gradients of the parameters, added to those `known`."""
        return self._in_places(self._run(2, known))

    def _enter(self, cotangent: Any) -> None:
        self.made = None
        self._values[self._stage.cotangent] = _another(cotangent)

    def _slope(self) -> Any:
        number = self._stage.slope
        return None if number is None else self._take(1, number)

    def _take(self, place: int, number: int) -> Any:
        """A value for others."""
        is_kept = number in self._stage.parts[place].kept
        return _another(self._values[number]) if is_kept else self._values.pop(number)

    def _in_places(self, gradients: Sequence[Any]) -> Any:
        return filled_in_order([self._stage.gradients], gradients)[0]

    def _run(self, place: int, known: Any = None) -> Sequence[Any]:
        """The gradients, of the last pass; of others nothing."""
        part, values = self._stage.parts[place], self._values
        found = self._programs.program(place, known is not None)
        given = [values[number] for number in part.reads]
        given += [_another(leaf) for _, leaf in leaves([known]) if leaf is not None]
        # What is returned may be an argument.
        for number in values.keys() - part.kept - {self._stage.returned[place]}:
            del values[number]
        made = found.program.run(given, self._programs.runner, found.given_up)
        values.update(zip(part.makes, made, strict=False))
        gradients: Sequence[Any] = made[len(part.makes) :]
        return gradients


def _another(x: Any) -> Any:
    """The same array as another object, which may be given up by itself."""
    if not isinstance(x, ShardedArray):
        return x
    make = ShardedArray.given if x.is_given else ShardedArray.of_shards
    return make(x.type, x._shards, x.runner)
