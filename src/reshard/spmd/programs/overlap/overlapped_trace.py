"""Traces of programs with overlapped movements: their memory and their time.

The steps and their order are those of the program (`prepared_program`, `step_order`), executed
without elements:

    memory   what is in registers, and of each movement under way its result and what it needs
    time     operators one after another, movements one after another, and who reads waits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from reshard.errors import UsageError
from reshard.runs import IntArray
from reshard.spmd.arrays.sharded_array import ShardedArray
from reshard.spmd.programs.prepared_program import Preparation
from reshard.spmd.programs.steps.step_order import Action, ProgramStep
from reshard.spmd.tracing.abstract_runner import AbstractRunner
from reshard.spmd.tracing.memory import extra_bytes_of, held_bytes
from reshard.spmd.tracing.trace import Trace, interpret
from reshard.spmd.tracing.traced_operation import InsertedReshard, TracedOperation


def check_overlap(overlap: Any) -> None:
    """Raises UsageError for what is no count of movements."""
    if not isinstance(overlap, int) or isinstance(overlap, bool) or overlap < 0:
        raise UsageError(
            f"overlap={overlap!r}; give how many movements may be under way beside what is "
            "computed, such as overlap=2, or 0 for none"
        )


def with_overlap(traced: Trace, overlap: int, library: str, given_up: Sequence[int] = ()) -> Trace:
    """A trace with the memory and the time of its program, with movements beside computing.

    Args:
        traced: of the function.
        overlap: how many movements are under way at most.
        library: whose collectives take the time.
        given_up: inputs that the caller does not keep, by number.
    """
    graph = traced.graph
    kinds = {n: one for n, one in zip(graph.inputs, traced.inputs, strict=True) if one is not None}
    runner = AbstractRunner(graph.library)
    preparation = Preparation(runner, kinds)
    arrays = dict(graph.constants) | {
        number: runner.array(kind, ShardedArray) for number, kind in kinds.items()
    }
    interpret(graph, arrays, preparation)
    order = preparation.order(graph.outputs, overlap)
    gone = () if preparation.may_stop else given_up
    inputs = preparation.registers([n for n in kinds if n not in gone])
    operations = _with_memory(traced, preparation, order, inputs)
    if traced.topology is None:
        return replace(traced, operations=operations)
    overlapped_s = _count_seconds(traced, preparation.steps, order, library)
    return replace(traced, operations=operations, overlapped_s=overlapped_s)


def _with_memory(
    traced: Trace, preparation: Preparation, order: Sequence[Action], inputs: Sequence[int]
) -> tuple[TracedOperation, ...]:
    ranks, steps = traced.ranks, preparation.steps
    sizes = {
        register: np.array(held_bytes([kind], ranks))
        for register, kind in preparation.kinds.items()
        # The caller keeps the arguments.
        if register not in set(inputs)
    }
    held: IntArray = np.array(held_bytes(traced.inputs, ranks))
    found: list[tuple[IntArray, IntArray] | None] = [None] * len(traced.operations)
    at = 0
    for action in order:
        one = steps[action.step]
        before, extra = held, np.zeros_like(held)
        if one.moved is not None:
            moved = InsertedReshard(0, *one.moved)
            extra = np.array(extra_bytes_of(moved, ranks))
        elif one.makes:
            # A function holds more within, before its results are there.
            within = traced.operations[one.operation].within
            extra = np.array([within.held_by(rank) for rank in ranks])
            for register in one.makes:
                extra = extra - sizes.get(register, 0)
            extra = np.maximum(extra, 0)
        if action.kind == "wait":
            held = held - extra
        else:
            for register in one.makes:
                held = held + sizes.get(register, 0)
        most = held + extra
        if action.kind == "begin":
            held = most
        else:
            at = one.operation
        known = found[at]
        found[at] = (before, most) if known is None else (known[0], np.maximum(known[1], most))
        for register in action.frees:
            held = held - sizes.get(register, 0)
    operations = []
    last = np.array(held_bytes(traced.inputs, ranks))
    for operation, counted in zip(traced.operations, found, strict=True):
        # Those of which a program has no step hold what is there.
        before, most = (last, last) if counted is None else counted
        last = before if counted is None else last
        operations.append(
            replace(operation, held_bytes=tuple(before.tolist()), live_bytes=tuple(most.tolist()))
        )
    return tuple(operations)


def _count_seconds(
    traced: Trace, steps: Sequence[ProgramStep], order: Sequence[Action], library: str
) -> float:
    """When the last step has ended, with what computes and what moves each on a line of its own."""
    computing = {one.operation: number for number, one in enumerate(steps) if one.moved is None}
    now_s = moved_s = 0.0
    ends_s: dict[int, float] = {}
    for action in order:
        one = steps[action.step]
        if action.kind == "wait":
            now_s = max(now_s, ends_s[action.step])
        elif one.moved is None:
            if computing[one.operation] == action.step:
                now_s += traced.operations[one.operation].busiest_s
        else:
            moved = InsertedReshard(0, *one.moved, traced.topology, library)
            moved_s = max(now_s, moved_s) + moved.seconds_s
            if action.kind == "begin":
                ends_s[action.step] = moved_s
            else:
                now_s = moved_s
    return now_s
