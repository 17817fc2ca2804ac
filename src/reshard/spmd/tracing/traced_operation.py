"""Traced operations: their shardings, and the reshards before and after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from reshard.collectives.program import Program
from reshard.cost.estimate import Estimate
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.graph import BodyCosts, Operation
from reshard.spmd.shards.chosen_program import chosen_program
from reshard.topology import Topology


@dataclass(frozen=True)
class InsertedReshard:
    """A value that gets another sharding.

    Args:
        value: its number in the graph.
        source: the array before.
        target: the sharding after.
        topology: by which the time is estimated; None for no times.
        library: whose collectives take it.
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
        """How long the collectives take; None without a topology."""
        if self.topology is None:
            return None
        return self.program.estimate(self.source.dtype, self.topology, self.library)

    @property
    def seconds_s(self) -> float:
        """How long the collectives take; 0 without a topology."""
        return 0.0 if self.estimate is None else self.estimate.seconds_s

    def __str__(self) -> str:
        steps = " ".join(map(str, self.program.steps)) or "nothing"
        return f"%{self.value} {steps} to `{self.target}`"


@dataclass(frozen=True)
class TracedOperation:
    """An operation and what goes on around it.

    Args:
        operation: of the graph.
        operands: types as they are made; None for a number.
        runs_with: shardings that the operator runs with; None for what is not sharded.
        results: types of the results, as the operations that follow find them.
        computed: types of the results as the operator makes them.
        before: operands that are resharded, in the order of the operands.
        after: results that are resharded.
        reused: operands that lie in another sharding since an operation before moved them there.
        live_bytes: the most memory that each rank holds meanwhile, in the order of the mesh's
            devices: arguments, values still to be used, and what reshards need beside them.
        held_bytes: what each rank holds when the operation begins.
        compute_s: seconds that each rank computes; empty where no device is known.
        within: what an operation that is a function moves and holds within: all turns of a `scan`,
            one of a `while_loop`, and of the branches of a `cond` the greater of both.
        may_stop: whether a program looks at elements before it, and may have to be carried out
            from its arguments again, operation by operation.
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
        """All that is resharded, in order."""
        yield from self.before
        yield from self.after

    @property
    def moved_elements(self) -> int:
        """Elements that ranks receive from others, summed over ranks."""
        return sum(one.moved_elements for one in self.reshards)

    @property
    def moved_bytes(self) -> int:
        """Bytes that ranks receive from others, summed over ranks."""
        return self.within.moved_bytes + sum(one.moved_bytes for one in self.reshards)

    @property
    def inserted_s(self) -> float:
        """How long what is inserted takes; 0 without a topology."""
        return sum(one.seconds_s for one in self.reshards)

    @property
    def busiest_s(self) -> float:
        """How long the rank computes that computes longest; 0 where no device is known."""
        return max(self.compute_s, default=0.0)

    @property
    def seconds_s(self) -> float:
        """How long all of it takes: what is inserted, and the rank that computes longest."""
        # One after the other: collectives wait for the slowest rank, and none of them overlaps
        # computing.
        return self.inserted_s + self.busiest_s
