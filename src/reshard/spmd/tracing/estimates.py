"""Estimates of operations: their shardings, reshards, memory and time.

*Memory*. A value occupies memory from the operation that computes it to the last that reads it.
Arguments belong to the caller and are held throughout, except donated ones; results are held to the
end. Around an operation:

    operand reshards   the value, the reshards so far, the new shards, what the program needs
    the operator       all operands as it runs with them, and its results
    a loop, a branch   the operands, and what it holds within
    result reshards    those, the new shards, what the program needs

`with_sharding` computes nothing: its operand is its result before it is resharded. Where nothing
moves, or an operation before moved it there, its result is memory that is held already.

*Time*. An operation runs on shards, which may differ between ranks: of 5 rows over 2 ranks, rank 0
computes 3. The shards of its operands and results on a rank determine the size of each factor of
its rule there, and these its operations, and the bytes that it reads and writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from reshard.collectives.program import Program
from reshard.collectives.steps import Permute
from reshard.cost.estimate import Estimate
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.runs import IntArray
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.graph import WITH_SHARDING, BodyCosts, Graph, Operation
from reshard.spmd.propagation.by_cost.cost_model import least_s, moved_bytes, operations_of
from reshard.spmd.propagation.strategies import ranks_of
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.shards.chosen_program import chosen_program
from reshard.topology import Device, Topology


@dataclass(frozen=True)
class InsertedReshard:
    """A reshard of a value.

    Args:
        value: its number in the graph.
        source: the type of the array before.
        target: the sharding after.
        topology: the topology for time estimates; None without times.
        library: the library whose collectives are assumed.
    """

    value: int
    source: ArrayType
    target: ShardingSpec
    topology: Topology | None = None
    library: str = "nccl"

    @cached_property
    def program(self) -> Program:
        """The collectives, or the direct exchange."""
        # Cached, since the table, the page and the memory ask for it, and a search takes
        # milliseconds.
        return chosen_program(self.source, self.target)

    @property
    def result(self) -> ArrayType:
        """The array after."""
        return self.source.with_spec(self.target)

    @property
    def moved_elements(self) -> int:
        """Elements that ranks receive from others, summed over ranks."""
        return self.program.moved_elements

    @property
    def moved_bytes(self) -> int:
        """Bytes that ranks receive from others, summed over ranks."""
        return self.moved_elements * self.source.dtype.itemsize_bytes

    @cached_property
    def estimate(self) -> Estimate | None:
        """The time of the collectives; None without a topology."""
        if self.topology is None:
            return None
        return self.program.estimate(self.source.dtype, self.topology, self.library)

    @property
    def seconds_s(self) -> float:
        """The time of the collectives in seconds; 0 without a topology."""
        return 0.0 if self.estimate is None else self.estimate.seconds_s

    def __str__(self) -> str:
        steps = " ".join(map(str, self.program.steps)) or "nothing"
        return f"%{self.value} {steps} to `{self.target}`"


@dataclass(frozen=True)
class TracedOperation:
    """An operation, the reshards around it, and estimates of its memory and time.

    Args:
        operation: of the graph.
        operands: types as they are made; None for a number.
        runs_with: shardings that the operator runs with; None for what is not sharded.
        results: types of the results, as later operations read them.
        computed: types of the results as the operator computes them.
        before: operands that are resharded, in the order of the operands.
        after: results that are resharded.
        reused: operands that an earlier operation resharded in the same way.
        live_bytes: the peak memory of each rank during the operation, in the order of the mesh's
            devices: arguments, values that are read later, and the buffers of reshards.
        held_bytes: the memory of each rank when the operation begins.
        compute_s: the compute time of each rank in seconds; empty if no device is known.
        within: the data movement and memory of a body: of all iterations of a `scan`, an iteration
            of a `while_loop`, and the maximum over the branches of a `cond`.
        may_stop: whether a program looks at elements before it, and may have to be executed again
            from its arguments, operation by operation.
    """

    operation: Operation
    operands: tuple[ArrayType | None, ...]
    runs_with: tuple[ShardingSpec | None, ...]
    results: tuple[ArrayType, ...]
    computed: tuple[ArrayType, ...]
    before: tuple[InsertedReshard, ...] = ()
    after: tuple[InsertedReshard, ...] = ()
    reused: tuple[InsertedReshard, ...] = ()
    live_bytes: tuple[int, ...] = field(default=())
    held_bytes: tuple[int, ...] = field(default=())
    compute_s: tuple[float, ...] = field(default=())
    within: BodyCosts = field(default_factory=BodyCosts)
    may_stop: bool = False

    @property
    def reshards(self) -> Iterator[InsertedReshard]:
        """All reshards, in order."""
        yield from self.before
        yield from self.after

    @property
    def moved_elements(self) -> int:
        """Elements that ranks receive from others, summed over ranks."""
        return sum(reshard.moved_elements for reshard in self.reshards)

    @property
    def moved_bytes(self) -> int:
        """Bytes that ranks receive from others, summed over ranks."""
        return self.within.moved_bytes + sum(reshard.moved_bytes for reshard in self.reshards)

    @property
    def inserted_s(self) -> float:
        """The time of the inserted reshards; 0 without a topology."""
        return sum(reshard.seconds_s for reshard in self.reshards)

    @property
    def busiest_s(self) -> float:
        """The compute time of the slowest rank; 0 if no device is known."""
        return max(self.compute_s, default=0.0)

    @property
    def seconds_s(self) -> float:
        """The time of the operation: its reshards, and the slowest rank's computation."""
        # One after the other: collectives wait for the slowest rank, and none of them overlaps
        # computing.
        return self.inserted_s + self.busiest_s


Ranks = tuple[int, ...]
Shape = tuple[int, ...]


def estimate_compute(
    operations: Sequence[TracedOperation], ranks: Ranks, device: Device
) -> tuple[TracedOperation, ...]:
    """Return the operations with the seconds that each rank computes at each.

    Args:
        operations: of the function.
        ranks: of the mesh, in its order.
        device: of each rank.
    """
    return tuple(
        replace(traced, compute_s=_estimate_seconds(traced, ranks, device)) for traced in operations
    )


def _estimate_seconds(traced: TracedOperation, ranks: Ranks, device: Device) -> tuple[float, ...]:
    if traced.operation.operator == WITH_SHARDING:
        return (0.0,) * len(ranks)
    read = [
        None if kind is None else kind.with_spec(spec)
        for kind, spec in zip(traced.operands, traced.runs_with, strict=True)
    ]
    kinds = (*read, *traced.computed)
    shapes = [((),) * len(ranks) if kind is None else shapes_of(kind, ranks) for kind in kinds]
    widths = [0 if kind is None else kind.dtype.itemsize_bytes for kind in kinds]
    # Zero-dimensional arrays do not decide in which type a device computes.
    array_dtypes = tuple(kind.dtype for kind in read if kind is not None and kind.ndim)
    dtypes = array_dtypes or tuple(kind.dtype for kind in traced.computed)
    name, rule, count = traced.operation.operator, traced.operation.rule, len(traced.operands)
    # Most ranks have shards of the same shapes: each set of shapes is estimated once.
    seconds: dict[tuple[Shape, ...], float] = {}
    for here in zip(*shapes, strict=True):
        if here not in seconds:
            sizes_bytes = [math.prod(s) * width for s, width in zip(here, widths, strict=True)]
            moved = moved_bytes(name, sizes_bytes[:count], sizes_bytes[count:])
            sizes = local_sizes(rule, here)
            operations = operations_of(name, rule, sizes, traced.operation.attributes)
            seconds[here] = least_s(device, operations, moved, dtypes)
    # Ranks of other meshes wait meanwhile.
    mesh = None if traced.results[0].spec is None else traced.results[0].spec.mesh
    return tuple(
        seconds[here] if mesh is None or rank in mesh.devices else 0.0
        for rank, here in zip(ranks, zip(*shapes, strict=True), strict=True)
    )


def local_sizes(rule: OpShardingRule, shapes: Sequence[Shape]) -> tuple[int, ...]:
    """Return the sizes of a rule's factors on a rank, from the shapes of its tensors there.

    A factor is as large as in the smallest of its dimensions. Of several factors of a dimension
    the major factor is sharded.

    >>> rule = OpShardingRule.parse("([ij], [ij, k]) -> ([i, j, k]) {i=4, j=3, k=8}")
    >>> local_sizes(rule, [(6,), (6, 8), (2, 3, 8)])
    (2, 3, 8)
    """
    sizes = list(rule.sizes)
    for mapping, shape in zip(rule.tensors, shapes, strict=True):
        for dim, length in zip(mapping, shape, strict=True):
            left = length
            # From the minor factor on each has what fits of the local length; the major one has the
            # rest.
            for factor in reversed(dim):
                here = min(rule.sizes[factor], left)
                sizes[factor] = min(sizes[factor], here)
                left = -(-left // here) if here else 0
    return tuple(sizes)


@lru_cache(maxsize=4096)
def shapes_of(kind: ArrayType, ranks: Ranks) -> tuple[Shape, ...]:
    """Return the shape of an array's shard on each rank; of nothing where there is none.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.dtypes import dtype
    >>> rows = ArrayType((5, 4), dtype("float32"), spec(DeviceMesh.of(x=3), "x, -"))
    >>> shapes_of(rows, (0, 1, 2))
    ((2, 4), (2, 4), (1, 4))
    """
    if kind.spec is None:
        return (kind.shape,) * len(ranks)
    return tuple(_find_shape(kind, rank) for rank in ranks)


def _find_shape(kind: ArrayType, rank: int) -> Shape:
    layout = kind.layout
    # Ranks of other meshes may exceed those of this mesh.
    here = layout.local_shape(rank) if rank < layout.slots else None
    if here is None:
        return (0,) * kind.ndim
    if len(here) == kind.ndim:
        return here
    # Parts in several pieces: as many whole rows as they come to.
    row = math.prod(kind.shape[1:])
    return (-(-math.prod(here) // max(row, 1)), *kind.shape[1:])


def count_memory(
    graph: Graph,
    inputs: Iterable[ArrayType | None],
    operations: Sequence[TracedOperation],
    ranks: Ranks,
    donated: Iterable[int] = (),
) -> tuple[TracedOperation, ...]:
    """Return the operations with the memory that is live at each.

    Args:
        graph: of the function.
        inputs: types of its arguments and constants; None for numbers.
        operations: estimates of the graph's operations.
        ranks: of the mesh, in its order.
        donated: inputs that the caller does not keep, by number.
    """
    inputs = list(inputs)
    frees = graph.last_uses()
    # Donated inputs are freed after the last operation that reads them, unless they are returned.
    freed = {*donated} - {*graph.outputs}
    reads = (
        (n, place) for place, operation in enumerate(graph.operations) for n in operation.operands
    )
    for number, place in dict(read for read in reads if read[0] in freed).items():
        frees[place].append(number)
    memory = _LiveMemory(operations, ranks)
    for number, kind in zip(graph.inputs, inputs, strict=True):
        if kind is not None:
            memory.hold(number, count_held(kind, ranks))
    counted = []
    for place, traced in enumerate(operations):
        meanwhile, after = _count_around(traced, ranks)
        live = memory.live_bytes
        counted.append(
            replace(
                traced,
                live_bytes=tuple((live + meanwhile).tolist()),
                held_bytes=tuple(live.tolist()),
            )
        )
        memory.carry_out(place, traced, after)
        for value in frees[place]:
            memory.free(value)
    return tuple(counted)


MovedValue = tuple[int, ArrayType | None, ShardingSpec]
"""A value that was moved, its type before, and the sharding to which it was moved."""


class _LiveMemory:
    """The live memory between two operations, and the values that hold it.

    Values and what they were moved to may share memory: `with_sharding` of an array that lies so,
    or was moved there before, gives what is there.
    """

    def __init__(self, operations: Sequence[TracedOperation], ranks: Ranks) -> None:
        self._ranks = ranks
        # The bytes of each rank.
        self.live_bytes: IntArray = np.zeros(len(ranks), dtype=np.int64)
        self._holders: list[int] = []
        self._sizes: list[IntArray] = []
        self._of: dict[int | MovedValue, int] = {}
        # Values that are the same array as an earlier value.
        self._same: dict[int, int] = {}
        for traced in operations:
            if (
                traced.operation.operator == WITH_SHARDING
                and traced.operands[0] is traced.results[0]
            ):
                (operand,), (result,) = traced.operation.operands, traced.operation.results
                self._same[result] = self._same.get(operand, operand)
        self._last = {
            self._moved_value(moved, moved.value): place
            for place, traced in enumerate(operations)
            for moved in traced.reused
        }
        self._ends: dict[int, list[MovedValue]] = {}
        for moved_value, place in self._last.items():
            self._ends.setdefault(place, []).append(moved_value)

    def hold(self, name: int | MovedValue, size: IntArray) -> None:
        """Add new memory of a value, or of a moved value."""
        self._of[name] = len(self._sizes)
        self._sizes.append(size)
        self._holders.append(1)
        self.live_bytes = self.live_bytes + size

    def free(self, name: int | MovedValue) -> None:
        """Remove a value or a moved value, and its memory if no other value has it."""
        memory = self._of.pop(name)
        self._holders[memory] -= 1
        if not self._holders[memory]:
            self.live_bytes = self.live_bytes - self._sizes[memory]

    def carry_out(self, place: int, traced: TracedOperation, after: Sequence[IntArray]) -> None:
        """Add the results of an operation, and moved operands that are read again."""
        lays_out = traced.operation.operator == WITH_SHARDING
        moved = list(traced.reshards if lays_out else traced.before)
        for reshard in moved:
            moved_value = self._moved_value(
                reshard, traced.operation.operands[0] if lays_out else reshard.value
            )
            if self._last.get(moved_value, place) > place:
                self.hold(moved_value, count_held(reshard.result, self._ranks))
        if lays_out:
            self._lay_out(traced, moved)
        else:
            for value, size in zip(traced.operation.results, after, strict=True):
                self.hold(value, size)
        for moved_value in self._ends.get(place, ()):
            if moved_value in self._of:
                self.free(moved_value)

    def _lay_out(self, traced: TracedOperation, moved: Sequence[InsertedReshard]) -> None:
        """Add the result of `with_sharding`: new memory if data moves, else its operand's."""
        (operand,), (result,) = traced.operation.operands, traced.operation.results
        # The last move is the result, and may be kept for other operations as well.
        there = [self._moved_value(reshard, operand) for reshard in (*traced.reused, *moved)]
        if moved and there[-1] not in self._of:
            self.hold(result, count_held(moved[-1].result, self._ranks))
            return
        self._of[result] = memory = self._of[there[-1] if there else operand]
        self._holders[memory] += 1

    def _moved_value(self, moved: InsertedReshard, value: int) -> MovedValue:
        return self._same.get(value, value), moved.source, moved.target


def held_bytes(kinds: Iterable[ArrayType | None], ranks: Ranks) -> tuple[int, ...]:
    """Return the bytes of arrays of these types on each rank; a number, None, takes no memory."""
    nothing = np.zeros(len(ranks), dtype=np.int64)
    held = sum((count_held(kind, ranks) for kind in kinds if kind is not None), nothing)
    return tuple(held.tolist())


def _count_around(traced: TracedOperation, ranks: Ranks) -> tuple[IntArray, list[IntArray]]:
    """Return the most that an operation holds beyond what is live, and what each result then is."""
    # `extra` grows with every array that stays until the operation is done; `most` is its peak.
    most = extra = np.zeros(len(ranks), dtype=np.int64)
    for reshard in traced.before:
        extra = extra + count_held(reshard.result, ranks)
        most = np.maximum(most, extra + count_extra(reshard, ranks))
    computed = [count_held(kind, ranks) for kind in traced.computed]
    if traced.operation.operator != WITH_SHARDING:
        extra = extra + sum(computed)
        most = np.maximum(most, extra)
    for reshard in traced.after:
        extra = extra + count_held(reshard.result, ranks)
        most = np.maximum(most, extra + count_extra(reshard, ranks))
    after = [count_held(kind, ranks) for kind in traced.results]
    # A body needs its moved operands in addition to its own memory.
    within = np.array([traced.within.held_by(rank) for rank in ranks], dtype=np.int64)
    for reshard in traced.before:
        within = within + count_held(reshard.result, ranks)
    most = np.maximum(most, within)
    if traced.operation.operator == WITH_SHARDING:
        return most, after
    # Results that are not resharded are what is computed; they are counted at least once.
    return np.maximum(most, sum(after, np.zeros_like(most))), after


@lru_cache(maxsize=4096)
def count_held(kind: ArrayType, ranks: Ranks) -> IntArray:
    """Return the bytes of an array's shard on each rank."""
    if kind.spec is None:
        size_bytes = math.prod(kind.shape) * kind.dtype.itemsize_bytes
        return np.full(len(ranks), size_bytes, dtype=np.int64)
    return _count_elements(kind.layout, ranks) * kind.dtype.itemsize_bytes


def _count_elements(layout: Layout, ranks: Ranks) -> IntArray:
    total = np.zeros(max(layout.slots, *ranks) + 1, dtype=np.int64)
    # A slot may hold several cells; indexing with += would count only the last.
    np.add.at(total, layout.cell_slot, layout.cell_shape.prod(axis=1))
    return total[list(ranks)]


def count_extra(reshard: InsertedReshard, ranks: Ranks) -> IntArray:
    """Return the bytes that a movement needs on each rank beyond its source and target."""
    return _count_extra(reshard.program, ranks) * reshard.source.dtype.itemsize_bytes


@lru_cache(maxsize=4096)
def _count_extra(program: Program, ranks: Ranks) -> IntArray:
    """Return the peak elements of each rank beyond source and target: shards on the way, buffers.

    `Program.extra_bytes` is that of the fullest rank.
    """
    most = np.zeros(len(ranks), dtype=np.int64)
    for number, step in enumerate(program.steps):
        here = np.zeros(len(ranks), dtype=np.int64)
        # The program's first source and last target are values, which the caller counts.
        if number:
            here += _count_elements(step.source_layout, ranks)
        if number < len(program.steps) - 1:
            here += _count_elements(step.target_layout, ranks)
        # A send and a receive buffer; a permutation sends whole shards.
        if not isinstance(step, Permute):
            passing = np.zeros(max(ranks) + 1 + len(step.sent_elements), dtype=np.int64)
            # Ranks of other meshes may lie beyond those of this step.
            passing[: len(step.sent_elements)] = step.sent_elements + step.received_elements
            here += passing[list(ranks)]
        most = np.maximum(most, here)
    return most


@dataclass(frozen=True)
class TraceRecord:
    """A traced function, as tables, pages and documents read it.

    Args:
        graph: the function, with the shardings of the strategy.
        strategy: the strategy that chose the shardings.
        operations: an estimate of each operation of the graph.
        outputs: types of the results.
        topology: the topology that times are estimated for; None without times.
        overlapped_s: the time with overlap of communication and computation; None without overlap
            or without a topology.
        library: the library whose collectives are assumed.
    """

    graph: Graph
    strategy: str
    operations: tuple[TracedOperation, ...]
    outputs: tuple[ArrayType, ...]
    topology: Topology | None
    overlapped_s: float | None = None
    library: str = "nccl"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the inputs, in the order of `graph.inputs`."""
        return self.graph.names

    @cached_property
    def inputs(self) -> tuple[ArrayType | None, ...]:
        """The types of the inputs; None for a Python number."""
        return self.graph.input_types

    @cached_property
    def meshes(self) -> tuple[DeviceMesh, ...]:
        """The meshes of all shardings; empty if nothing is sharded."""
        return self.graph.meshes

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of all shardings, the first of several; None if nothing is sharded."""
        return self.meshes[0] if self.meshes else None

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the meshes, in their order; only rank 0 if there is no mesh."""
        return ranks_of(self.meshes)

    @property
    def moved_elements(self) -> int:
        """Elements that ranks receive from others, summed over ranks and operations."""
        return sum(traced.moved_elements for traced in self.operations)

    @property
    def moved_bytes(self) -> int:
        """Bytes that ranks receive from others, summed over ranks and operations."""
        return sum(traced.moved_bytes for traced in self.operations)

    @property
    def counts_compute(self) -> bool:
        """Whether times include computation: whether the topology describes devices."""
        return self.topology is not None and self.topology.device is not None

    @property
    def inserted_s(self) -> float | None:
        """The time of all inserted reshards; None without a topology."""
        if self.topology is None:
            return None
        return sum(traced.inserted_s for traced in self.operations)

    @cached_property
    def compute_s(self) -> Mapping[int, float] | None:
        """The compute time of each rank; None without a topology that describes devices."""
        if not self.counts_compute:
            return None
        # A row an operation, a column a rank; the row of zeros stands for a function without
        # operations.
        rows = [(0.0,) * len(self.ranks), *(traced.compute_s for traced in self.operations)]
        return {rank: math.fsum(seconds) for rank, *seconds in zip(self.ranks, *rows, strict=True)}

    @property
    def seconds_s(self) -> float | None:
        """The time of the function; None without a topology.

        The sum over operations of the time on the slowest rank, because collectives wait for all
        ranks; or the overlapped time of a program with overlap. If the topology does not describe
        devices, only the time of the reshards.
        """
        if self.topology is None or self.overlapped_s is not None:
            return self.overlapped_s
        return sum(traced.seconds_s for traced in self.operations)

    @cached_property
    def peak_bytes(self) -> Mapping[int, int]:
        """The peak memory of each rank, including arguments."""
        rows = [
            held_bytes(self.inputs, self.ranks),
            *(traced.live_bytes for traced in self.operations),
        ]
        return {rank: max(sizes) for rank, *sizes in zip(self.ranks, *rows, strict=True)}
