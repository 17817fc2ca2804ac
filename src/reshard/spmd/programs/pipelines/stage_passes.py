"""Passes of a stage for one micro-batch: forward, and backward in one task or in two.

    F     made = begin(parameters, x)           values for the backward pass are stored
    B     slope, gradients = go_back(...)       both tasks below in one
    I     slope = go_back_to_input(...)
    W     gradients = find_gradients(...)       added to those of other microbatches

Passes run as programs (`stage_programs.py`), traced at a stage's first microbatch of a kind. They
go operation by operation where somebody listens, such as a trace around the pipeline, and where a
stage asks for elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol

from reshard.errors import ReshardError
from reshard.spmd.arrays.argument_tree import leaves, replaced
from reshard.spmd.arrays.sharded_array import ShardedArray
from reshard.spmd.gradients.transforms import vjp, vjp_in_two
from reshard.spmd.programs.jit import read_kind
from reshard.spmd.programs.pipelines.recorded_stage import Back, Differentiated, record_stage
from reshard.spmd.programs.pipelines.stage_programs import ProgramPass, StagePrograms
from reshard.spmd.shards.operation_call import recorders
from reshard.spmd.shards.runner import runner_for

Stage = Callable[..., Any]


class StagePass(Protocol):
    """The result of a forward pass, and its backward pass, which runs once."""

    @property
    def made(self) -> Any:
        """What the stage returned."""

    def go_back(self, cotangent: Any, known: Any) -> tuple[Any, Any]:
        """The cotangent of the stage's array, and gradients added to those that are `known`."""

    def go_back_to_input(self, cotangent: Any) -> Any:
        """The cotangent of the stage's array; None for the first stage's."""

    def find_gradients(self, known: Any) -> Any:
        """After `go_back_to_input`: gradients of the parameters, added to those `known`."""


class StagePasses:
    """The passes of one stage.

    Args:
        function: of the stage's parameters, its array, and maybe targets.
        has_gradient: whether the cotangent of its array is asked for: not of the first stage.
        specs: shardings for the gradients, in the places of the parameters; their own when None.
    """

    def __init__(self, function: Stage, has_gradient: bool, specs: Any = None) -> None:
        self._function, self._has_gradient, self._specs = function, has_gradient, specs
        # None where a stage cannot be traced.
        self._programs: dict[Any, StagePrograms | None] = {}
        self._lock = RLock()

    def begin(self, own: Any, given: Sequence[Any], is_split: bool) -> StagePass:
        """A forward pass.

        Args:
            own: the stage's parameters.
            given: its array, and the targets where it takes them.
            is_split: whether the backward pass is two tasks.

        Raises what the function does.
        """
        arrays: list[Any] = []
        programs = None if recorders else self._find_programs(own, given, is_split, arrays)
        if programs is None:
            return _EagerPass(*self._differentiate(is_split)(own, *given))
        return ProgramPass(programs, arrays)

    def _find_programs(
        self, own: Any, given: Sequence[Any], is_split: bool, arrays: list[Any]
    ) -> StagePrograms | None:
        """The programs for arguments of a kind, and the arrays among them."""
        key: list[Any] = [is_split]
        try:
            read_kind([own, *given], key, arrays)
        except ReshardError:
            return None
        runners = [one.runner for one in arrays if isinstance(one, ShardedArray)]
        if any(one.is_abstract for one in runners):
            return None
        runner = runners[0] if runners else runner_for(*arrays[:1])
        whole = (*key, runner)
        with self._lock:
            if whole not in self._programs:
                try:
                    function = self._differentiate(is_split)
                    stage = record_stage(function, own, given, is_split)
                    self._programs[whole] = StagePrograms(stage, runner)
                except ReshardError:
                    # Where that is no wonder, it is raised again operation by operation.
                    self._programs[whole] = None
            return self._programs[whole]

    def _differentiate(self, is_split: bool) -> Differentiated:
        """The stage and its backward pass, as a function of its parameters and what it is given."""
        function, specs = self._function, self._specs

        def differentiated(own: Any, x: Any, *more: Any) -> tuple[Any, Back]:
            # Tokens have no gradients, and nobody asks for those of others.
            if is_split and self._has_gradient:
                return vjp_in_two(lambda p, x: function(p, x, *more), own, x, specs)
            if is_split:
                return vjp_in_two(lambda p: function(p, x, *more), own, None, specs)
            if self._has_gradient:
                made, pullback = vjp(lambda p, x: function(p, x, *more), own, x)
            else:
                made, pullback = vjp(lambda p: function(p, x, *more), own)
            wanted = None if specs is None else (specs, None)[: 1 + self._has_gradient]

            def back(cotangent: Any) -> tuple[Any, Callable[[], Any]]:
                gradients, *slopes = pullback(cotangent, specs=wanted)
                return (slopes[0] if slopes else None), lambda: gradients

            return made, back

        return differentiated


@dataclass
class _EagerPass:
    """A pass that goes operation by operation."""

    made: Any
    _back: Back
    _rest: Callable[[], Any] = lambda: None

    def go_back(self, cotangent: Any, known: Any) -> tuple[Any, Any]:
        return self.go_back_to_input(cotangent), self.find_gradients(known)

    def go_back_to_input(self, cotangent: Any) -> Any:
        slope, self._rest = self._back(cotangent)
        return slope

    def find_gradients(self, known: Any) -> Any:
        found = self._rest()
        if known is None:
            return found
        before = iter([leaf for _, leaf in leaves([known])])
        return replaced([found], lambda leaf: _sum(next(before), leaf))[0]


def _sum(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else one + other
