"""Overlap of communication and computation: the time and the memory of a program with it.

A trace with overlap has the steps and the order of the program (`program`, `steps`), executed
without elements::

    memory   registers, and for each reshard in flight its result and its buffers
    time     operators in sequence, reshards in sequence, and readers wait

Products are decomposed into pieces that overlap with their reshards (`decomposition`) if that is
faster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from reshard.runs import IntArray
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.programs.decomposition import decompose
from reshard.spmd.programs.program import make_steps
from reshard.spmd.programs.reshard_insertion import insert_reshards
from reshard.spmd.programs.steps import Action, ProgramStep, overlapped_order
from reshard.spmd.tracing.abstract_runner import AbstractRunner
from reshard.spmd.tracing.estimates import (
    InsertedReshard,
    TracedOperation,
    count_extra,
    count_held,
    held_bytes,
)
from reshard.spmd.tracing.trace import Trace


def estimate_overlap(
    traced: Trace,
    overlap: int,
    donated: Sequence[int] = (),
    runner: AbstractRunner | None = None,
) -> Trace:
    """Estimate the memory and the time of a trace with overlap.

    Args:
        traced: of the function.
        overlap: the maximum number of reshards of a kind in flight.
        donated: inputs that the caller does not keep, by number.
        runner: as for `insert_reshards`.
    """
    runner = AbstractRunner(traced.graph.library) if runner is None else runner
    inserted = insert_reshards(traced.graph, runner=runner)
    steps, constants = make_steps(inserted, runner)
    order = overlapped_order(steps, {*constants, *inserted.graph.outputs}, overlap)
    gone = () if inserted.looks_at_elements else donated
    operations = _count_memory(traced, inserted.types, steps, order, gone)
    if traced.topology is None:
        return replace(traced, operations=operations)
    overlapped_s = _count_seconds(traced, steps, order)
    return replace(traced, operations=operations, overlapped_s=overlapped_s)


def _count_memory(
    traced: Trace,
    types: Mapping[int, ArrayType],
    steps: Sequence[ProgramStep],
    order: Sequence[Action],
    donated: Collection[int],
) -> tuple[TracedOperation, ...]:
    ranks = traced.ranks
    # The caller keeps the other arguments.
    produced = {register for step in steps for register in step.makes}
    sizes = {number: count_held(types[number], ranks) for number in (*produced, *donated)}
    held: IntArray = np.array(held_bytes(traced.inputs, ranks))
    memory: list[tuple[IntArray, IntArray] | None] = [None] * len(traced.operations)
    at = 0
    for action in order:
        step = steps[action.step]
        before, extra = held, np.zeros_like(held)
        if step.moved is not None:
            moved = InsertedReshard(0, *step.moved)
            extra = count_extra(moved, ranks)
        elif step.makes:
            # A function holds more within, before its results are there.
            within = traced.operations[step.operation].within
            extra = np.array([within.held_by(rank) for rank in ranks])
            for register in step.makes:
                extra = extra - sizes.get(register, 0)
            extra = np.maximum(extra, 0)
        if action.kind == "wait":
            held = held - extra
        else:
            for register in step.makes:
                held = held + sizes.get(register, 0)
        most = held + extra
        if action.kind == "begin":
            held = most
        else:
            at = step.operation
        earlier = memory[at]
        memory[at] = (
            (before, most) if earlier is None else (earlier[0], np.maximum(earlier[1], most))
        )
        for register in action.frees:
            held = held - sizes.get(register, 0)
    operations = []
    last = np.array(held_bytes(traced.inputs, ranks))
    for operation, counted in zip(traced.operations, memory, strict=True):
        # An operation without a step has the memory of the previous operation.
        before, most = (last, last) if counted is None else counted
        last = before if counted is None else last
        operations.append(
            replace(operation, held_bytes=tuple(before.tolist()), live_bytes=tuple(most.tolist()))
        )
    return tuple(operations)


def _count_seconds(traced: Trace, steps: Sequence[ProgramStep], order: Sequence[Action]) -> float:
    """Return when the last step ends, if operators and reshards run in parallel sequences."""
    computing = {step.operation: number for number, step in enumerate(steps) if step.moved is None}
    now_s = moved_s = 0.0
    ends_s: dict[int, float] = {}
    for action in order:
        step = steps[action.step]
        if action.kind == "wait":
            now_s = max(now_s, ends_s[action.step])
        elif step.moved is None:
            if computing[step.operation] == action.step:
                now_s += traced.operations[step.operation].busiest_s
        else:
            moved = InsertedReshard(0, *step.moved, traced.topology, traced.library)
            moved_s = max(now_s, moved_s) + moved.seconds_s
            if action.kind == "begin":
                ends_s[action.step] = moved_s
            else:
                now_s = moved_s
    return now_s


def overlapped(
    traced: Trace,
    overlap: int,
    donated: Sequence[int] = (),
    live_bytes: int | None = None,
) -> Trace:
    """Estimate a trace with overlap, and its products in pieces if that is faster.

    Args: those of `estimate_overlap`, and the limit on the memory of a rank.
    """
    # One runner, so that equal operations are compiled once.
    runner = AbstractRunner(traced.graph.library)
    whole = estimate_overlap(traced, overlap, donated, runner)
    in_pieces = decompose(traced, runner)
    if in_pieces is None or whole.overlapped_s is None:
        return whole
    decomposed = estimate_overlap(in_pieces, overlap, donated, runner)
    fits = live_bytes is None or max(decomposed.peak_bytes.values()) <= live_bytes
    is_quicker = (
        decomposed.overlapped_s is not None and decomposed.overlapped_s < whole.overlapped_s
    )
    return decomposed if fits and is_quicker else whole
