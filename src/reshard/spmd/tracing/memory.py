"""Memory: the memory of each rank at every operation of a traced function.

A value occupies memory from the operation that computes it to the last one that reads it. Arguments
belong to the caller and are held throughout, except donated ones; results are held to the end.
Around an operation:

    operand reshards   the value, the reshards so far, the new shards, what the program needs
    the operator       all operands as it runs with them, and its results
    a loop, a branch   the operands, and what it holds within
    result reshards    those, the new shards, what the program needs

`with_sharding` computes nothing: its operand is its result before it is resharded. Where nothing
moves, or an operation before moved it there, its result is memory that is held already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from reshard.collectives.program import Program
from reshard.collectives.steps import Permute
from reshard.layout import Layout
from reshard.runs import IntArray
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.graph import WITH_SHARDING, Graph
from reshard.spmd.tracing.traced_operation import InsertedReshard, TracedOperation

Ranks = tuple[int, ...]


def with_memory(
    graph: Graph,
    inputs: Iterable[ArrayType | None],
    operations: Sequence[TracedOperation],
    ranks: Ranks,
    given_up: Iterable[int] = (),
) -> tuple[TracedOperation, ...]:
    """The operations with the memory that is live at each.

    Args:
        graph: of the function.
        inputs: types of its arguments and constants; None for numbers.
        operations: one for each of the graph's.
        ranks: of the mesh, in its order.
        given_up: inputs that the caller does not keep, by number.
    """
    inputs = list(inputs)
    frees = graph.last_uses()
    for place, number in _find_last_reads(graph, given_up):
        frees[place].append(number)
    memory = _LiveMemory(operations, ranks)
    for number, kind in zip(graph.inputs, inputs, strict=True):
        if kind is not None:
            memory.hold(number, _count_held(kind, ranks))
    found = []
    for place, one in enumerate(operations):
        meanwhile, after = _count_around(one, ranks)
        live = memory.live_bytes
        found.append(
            replace(
                one,
                live_bytes=tuple((live + meanwhile).tolist()),
                held_bytes=tuple(live.tolist()),
            )
        )
        memory.carry_out(place, one, after)
        for value in frees[place]:
            memory.free(value)
    return tuple(found)


Kept = tuple[int, ArrayType | None, ShardingSpec]
"""A value that was moved, its type then, and where it was moved to."""


class _LiveMemory:
    """What is live between two operations: memory, and who holds it.

    Values and what they were moved to may be one memory: `with_sharding` of an array that lies so,
    or was moved there before, gives what is there.
    """

    def __init__(self, operations: Sequence[TracedOperation], ranks: Ranks) -> None:
        self._ranks = ranks
        # A row of bytes, one a rank.
        self.live_bytes: IntArray = np.zeros(len(ranks), dtype=np.int64)
        self._holders: list[int] = []
        self._sizes: list[IntArray] = []
        self._of: dict[int | Kept, int] = {}
        # Values that are an earlier one, as watchers of operations have them.
        self._same: dict[int, int] = {}
        for one in operations:
            if one.operation.operator == WITH_SHARDING and one.operands[0] is one.results[0]:
                (operand,), (result,) = one.operation.operands, one.operation.results
                self._same[result] = self._same.get(operand, operand)
        self._last = {
            self._find_kept(moved, moved.value): place
            for place, one in enumerate(operations)
            for moved in one.reused
        }
        self._ends: dict[int, list[Kept]] = {}
        for kept, place in self._last.items():
            self._ends.setdefault(place, []).append(kept)

    def hold(self, name: int | Kept, size: IntArray) -> None:
        """New memory, which a value or a moved one has."""
        self._of[name] = len(self._sizes)
        self._sizes.append(size)
        self._holders.append(1)
        self.live_bytes = self.live_bytes + size

    def free(self, name: int | Kept) -> None:
        """A value or a moved one is gone, and its memory where no other has it."""
        memory = self._of.pop(name)
        self._holders[memory] -= 1
        if not self._holders[memory]:
            self.live_bytes = self.live_bytes - self._sizes[memory]

    def carry_out(self, place: int, one: TracedOperation, after: Sequence[IntArray]) -> None:
        """What an operation leaves: its results, and what was moved and is read there again."""
        lays_out = one.operation.operator == WITH_SHARDING
        moved = list(one.reshards if lays_out else one.before)
        for each in moved:
            kept = self._find_kept(each, one.operation.operands[0] if lays_out else each.value)
            if self._last.get(kept, place) > place:
                self.hold(kept, _count_held(each.result, self._ranks))
        if lays_out:
            self._lay_out(one, moved)
        else:
            for value, size in zip(one.operation.results, after, strict=True):
                self.hold(value, size)
        for kept in self._ends.get(place, ()):
            if kept in self._of:
                self.free(kept)

    def _lay_out(self, one: TracedOperation, moved: Sequence[InsertedReshard]) -> None:
        """The result of `with_sharding`: new memory where something moves, else what is there."""
        (operand,), (result,) = one.operation.operands, one.operation.results
        # What was moved last is the result, and may be kept for other operations as well.
        there = [self._find_kept(each, operand) for each in (*one.reused, *moved)]
        if moved and there[-1] not in self._of:
            self.hold(result, _count_held(moved[-1].result, self._ranks))
            return
        self._of[result] = memory = self._of[there[-1] if there else operand]
        self._holders[memory] += 1

    def _find_kept(self, moved: InsertedReshard, value: int) -> Kept:
        return self._same.get(value, value), moved.source, moved.target


def _find_last_reads(graph: Graph, inputs: Iterable[int]) -> list[tuple[int, int]]:
    """Where some inputs are read last: operations and inputs. Those that are returned are kept."""
    wanted = {*inputs} - {*graph.outputs}
    last = {
        number: place
        for place, one in enumerate(graph.operations)
        for number in one.operands
        if number in wanted
    }
    return [(place, number) for number, place in last.items()]


def held_bytes(kinds: Iterable[ArrayType | None], ranks: Ranks) -> tuple[int, ...]:
    """The bytes of arrays of these types on each rank; None is a number, which takes nothing."""
    nothing = np.zeros(len(ranks), dtype=np.int64)
    held = sum((_count_held(kind, ranks) for kind in kinds if kind is not None), nothing)
    return tuple(held.tolist())


def _count_around(one: TracedOperation, ranks: Ranks) -> tuple[IntArray, list[IntArray]]:
    """The most that an operation holds beyond what is live, and what each result then is."""
    # `beside` grows with every array that stays until the operation is done; `most` is its peak.
    most = beside = np.zeros(len(ranks), dtype=np.int64)
    for reshard in one.before:
        beside = beside + _count_held(reshard.result, ranks)
        most = np.maximum(most, beside + _count_extra_bytes(reshard, ranks))
    made = [_count_held(kind, ranks) for kind in one.computed]
    if one.operation.operator != WITH_SHARDING:
        beside = beside + sum(made)
        most = np.maximum(most, beside)
    for reshard in one.after:
        beside = beside + _count_held(reshard.result, ranks)
        most = np.maximum(most, beside + _count_extra_bytes(reshard, ranks))
    after = [_count_held(kind, ranks) for kind in one.results]
    # A function has its operands, as they were moved, beside what it holds.
    within = np.array([one.within.held_by(rank) for rank in ranks], dtype=np.int64)
    for reshard in one.before:
        within = within + _count_held(reshard.result, ranks)
    most = np.maximum(most, within)
    if one.operation.operator == WITH_SHARDING:
        return most, after
    # Results that are not resharded are what is computed; they are counted at least once.
    return np.maximum(most, sum(after, np.zeros_like(most))), after


@lru_cache(maxsize=4096)
def _count_held(kind: ArrayType, ranks: Ranks) -> IntArray:
    """Bytes of an array's shard on each rank."""
    if kind.spec is None:
        size_bytes = math.prod(kind.shape) * kind.dtype.itemsize_bytes
        return np.full(len(ranks), size_bytes, dtype=np.int64)
    return _count_elements(kind.layout, ranks) * kind.dtype.itemsize_bytes


def _count_elements(layout: Layout, ranks: Ranks) -> IntArray:
    total = np.zeros(max(layout.slots, *ranks) + 1, dtype=np.int64)
    # A slot may hold several cells; indexing with += would count one of them.
    np.add.at(total, layout.cell_slot, layout.cell_shape.prod(axis=1))
    return total[list(ranks)]


def extra_bytes_of(reshard: InsertedReshard, ranks: Ranks) -> tuple[int, ...]:
    """The bytes that a movement needs on each rank beyond its source and target."""
    return tuple(_count_extra_bytes(reshard, ranks).tolist())


def _count_extra_bytes(reshard: InsertedReshard, ranks: Ranks) -> IntArray:
    return _count_extra(reshard.program, ranks) * reshard.source.dtype.itemsize_bytes


@lru_cache(maxsize=4096)
def _count_extra(program: Program, ranks: Ranks) -> IntArray:
    """The most elements each rank holds beyond its source and target: shards on the way, buffers.

    See `Program.extra_bytes`, which is that of the fullest rank.
    """
    most = np.zeros(len(ranks), dtype=np.int64)
    for number, step in enumerate(program.steps):
        here = np.zeros(len(ranks), dtype=np.int64)
        # The program's first source and last target are values, which the caller counts.
        if number:
            here += _count_elements(step.source_layout, ranks)
        if number < len(program.steps) - 1:
            here += _count_elements(step.target_layout, ranks)
        # A buffer for what is sent and one for what is received; a permutation sends whole shards.
        if not isinstance(step, Permute):
            passing = np.zeros(max(ranks) + 1 + len(step.sent_elements), dtype=np.int64)
            # Ranks of other meshes may lie beyond those of this step.
            passing[: len(step.sent_elements)] = step.sent_elements + step.received_elements
            here += passing[list(ranks)]
        most = np.maximum(most, here)
    return most
