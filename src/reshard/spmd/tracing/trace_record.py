"""The record of a trace: a function's graph, its operations on shards, and their totals.

`Trace` is the record with what reaches further: running, printing, pages and documents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from reshard.mesh import DeviceMesh
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.graph import Graph
from reshard.spmd.tracing.memory import held_bytes
from reshard.spmd.tracing.mesh_parts import ranks_of
from reshard.spmd.tracing.traced_operation import TracedOperation
from reshard.topology import Topology


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
    """

    graph: Graph
    strategy: str
    operations: tuple[TracedOperation, ...]
    outputs: tuple[ArrayType, ...]
    topology: Topology | None
    overlapped_s: float | None = None

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
        return sum(one.moved_elements for one in self.operations)

    @property
    def moved_bytes(self) -> int:
        """Bytes that ranks receive from others, summed over ranks and operations."""
        return sum(one.moved_bytes for one in self.operations)

    @property
    def counts_compute(self) -> bool:
        """Whether times include computation: whether the topology describes devices."""
        return self.topology is not None and self.topology.device is not None

    @property
    def inserted_s(self) -> float | None:
        """The time of all inserted reshards; None without a topology."""
        if self.topology is None:
            return None
        return sum(one.inserted_s for one in self.operations)

    @cached_property
    def compute_s(self) -> Mapping[int, float] | None:
        """The compute time of each rank; None without a topology that describes devices."""
        if not self.counts_compute:
            return None
        # A row an operation, a column a rank; the row of zeros stands for a function without
        # operations.
        rows = [(0.0,) * len(self.ranks), *(one.compute_s for one in self.operations)]
        return {rank: math.fsum(own) for rank, *own in zip(self.ranks, *rows, strict=True)}

    @property
    def seconds_s(self) -> float | None:
        """The time of the function; None without a topology.

        The sum over operations of the time on the slowest rank, because collectives wait for all
        ranks; or the overlapped time of a program with overlap. If the topology does not describe
        devices, only the time of the reshards.
        """
        if self.topology is None or self.overlapped_s is not None:
            return self.overlapped_s
        return sum(one.seconds_s for one in self.operations)

    @cached_property
    def peak_bytes(self) -> Mapping[int, int]:
        """The peak memory of each rank, including arguments."""
        rows = [held_bytes(self.inputs, self.ranks), *(one.live_bytes for one in self.operations)]
        return {rank: max(sizes) for rank, *sizes in zip(self.ranks, *rows, strict=True)}
