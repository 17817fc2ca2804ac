"""Input search: shardings of a graph's inputs that take little time, for a price of their memory.

What is looked for is the least sum of `cost_problem` with all inputs free, and for each of them
its bytes on a rank, times a price. Where the graph lets it be, that is found by elimination. Else

1. *seeds* are laid: one dimension of inputs of a kind is cut over an axis, the strategy
   "aggressive" carries that through the graph, and the operations run in the ways that suit it
   best. The seed that helps most stays, others are laid beside it, as long as one helps;
2. the best of what was seen *descends*, one value at a time, then in *windows*: the values and
   operations around an input, all chosen at once by elimination.

Inputs of a kind have the same shape, element type and readers, as the weights of a model's layers.
Data parallelism is one seed, tensor parallelism one for each block of a layer, and what is cut to
save memory comes from the price.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from reshard.dtypes import dtype
from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd.propagation.axis_parts import AxisTable, Sharding, size_of
from reshard.spmd.propagation.by_cost.cost_model import CostModel, Machine
from reshard.spmd.propagation.by_cost.cost_problem import CostProblem, close
from reshard.spmd.propagation.by_cost.cost_table import CostTable, FloatArray
from reshard.spmd.propagation.by_cost.least_sum import CostSum
from reshard.spmd.propagation.graph import Graph
from reshard.spmd.propagation.propagation import propagate_by_rules

# Kinds of inputs that are seeds, the largest ones first, and seeds that are laid beside others.
MOST_KINDS = 24
MOST_BESIDE = 8
MOST_SEEDS = 12
# Of what was seen, how many descend; values between the centres of two windows then.
MOST_DESCENTS = 4
CENTRES_APART = 8
# Variables of the windows in which the best of them descends further.
WIDE_WINDOW = 128

Choices = tuple[int, ...]


class Seed(NamedTuple):
    """A dimension of all inputs of a kind, cut over an axis of the mesh."""

    kind: int
    dim: int
    axis: str


class InputSearch:
    """The search for one graph.

    Args:
        graph: the function.
        annotations: shardings of some values, by their numbers.
        free: the inputs whose shardings are looked for.
        ties: values that are to lie where an input does, by the numbers of both.
        mesh: over whose axes inputs may be cut.
        machine: links and devices.
    """

    def __init__(
        self,
        graph: Graph,
        annotations: Mapping[int, ShardingSpec],
        free: Sequence[int],
        ties: Mapping[int, int],
        mesh: DeviceMesh,
        machine: Machine,
    ) -> None:
        self.graph = graph
        self.annotations = dict(annotations)
        self.free = tuple(free)
        self.mesh = mesh
        self.table = AxisTable.of(mesh)
        self.kinds = self._find_kinds()
        self.problem = CostProblem(graph, self.table, CostModel.of(self.table, machine))
        base = propagate_by_rules(graph, self._annotate(()), strategy="aggressive")
        self.problem.candidates(annotations, {}, [base], self.free, ties)
        self.problem.fill(bounds=False)
        self.total = self.problem.sum()
        self.sizes_bytes = {number: self._count_bytes(number) for number in self.free}
        self._ways = range(len(graph.values), len(self.total.choices))

    @cached_property
    def byte_s(self) -> float:
        """About the seconds of the function for each byte of its free inputs: a scale of prices."""
        found = self.total.eliminated()
        seconds_s = min(map(self.total.value, self._seeds if found is None else [found]))
        return seconds_s / max(sum(self._count_whole(number) for number in self.free), 1)

    def least(self, price_s: float) -> Choices:
        """Choices of little time, with so many seconds for each byte of an input on a rank."""
        tables = [*self.total.tables]
        tables += [
            CostTable((number,), size_bytes * price_s)
            for number, size_bytes in self.sizes_bytes.items()
        ]
        total = CostSum(self.total.choices, tables)
        found = total.eliminated()
        if found is not None:
            return found
        best = sorted(self._seeds, key=total.value)[:MOST_DESCENTS]
        centres = [*self.free, *range(0, self._ways.start, CENTRES_APART)]
        ended = [total.descended_in_windows(one, centres, self._ways) for one in best]
        least = min(ended, key=total.value)
        return total.descended_in_windows(least, centres[::2], self._ways, WIDE_WINDOW)

    def specs(self, chosen: Choices) -> list[ShardingSpec]:
        """The shardings of all values."""
        return [self.table.decoded(one) for one in self.problem.shardings(chosen)]

    def _find_kinds(self) -> list[tuple[int, ...]]:
        """Inputs that are read alike, the largest first."""
        readers: dict[int, list[object]] = {number: [] for number in self.free}
        for operation in self.graph.operations:
            for place, operand in enumerate(operation.operands):
                if operand in readers:
                    readers[operand].append((operation.operator, operation.rule, place))
        kinds: dict[object, list[int]] = {}
        for number in self.free:
            value = self.graph.values[number]
            key = (value.shape, value.dtype, tuple(readers[number]))
            kinds.setdefault(key, []).append(number)
        found = sorted(kinds.values(), key=lambda some: -len(some) * self._count_whole(some[0]))
        return [tuple(some) for some in found]

    def _count_whole(self, number: int) -> int:
        value = self.graph.values[number]
        return math.prod(value.shape) * dtype(value.dtype).itemsize_bytes

    def _count_bytes(self, number: int) -> FloatArray:
        """The bytes of an input on a rank, for each of its candidates."""
        value = self.graph.values[number]
        found = [
            math.prod(
                -(-size // size_of(axes)) for size, axes in zip(value.shape, one.dims, strict=True)
            )
            for one in self.problem.values[number]
        ]
        return np.array(found, dtype=np.float64) * dtype(value.dtype).itemsize_bytes

    def _annotate(self, seeds: Sequence[Seed]) -> dict[int, ShardingSpec]:
        """The annotations, with free inputs open and cut by seeds."""
        cuts: dict[tuple[int, int], list[str]] = {}
        for kind, dim, axis in seeds:
            for number in self.kinds[kind]:
                cuts.setdefault((number, dim), []).append(axis)
        open_ = {
            number: ShardingSpec(
                self.mesh,
                [
                    DimSpec(cuts.get((number, dim), []), is_open=True)
                    for dim in range(len(self.graph.values[number].shape))
                ],
            )
            for number in self.free
        }
        return self.annotations | open_

    @cached_property
    def _seeds(self) -> list[Choices]:
        """What seeds become, those that help laid beside each other."""
        starts: dict[Choices, Choices] = {}
        found_s: dict[Choices, float] = {}

        def judge(*seeds: Seed) -> float:
            start = self._start(seeds)
            if start not in starts:
                starts[start] = self.total.descended(start, self._ways, sweeps=0)
            chosen = starts[start]
            if chosen not in found_s:
                found_s[chosen] = self.total.value(chosen)
            return found_s[chosen]

        laid: list[Seed] = []
        best_s = judge()
        for axis in self.mesh.axis_names:
            waiting = self._list_seeds(axis)
            for _ in range(MOST_SEEDS):
                if not waiting:
                    break
                judged = [(judge(*laid, one), place) for place, one in enumerate(waiting)]
                least_s, place = min(judged)
                if least_s >= best_s:
                    break
                best_s = least_s
                laid.append(waiting[place])
                others = [waiting[at] for _, at in sorted(judged)]
                waiting = [one for one in others if one.kind != laid[-1].kind][:MOST_BESIDE]
        return list(found_s)

    def _list_seeds(self, axis: str) -> list[Seed]:
        size = self.mesh.axis_size(axis)
        return [
            Seed(kind, dim, axis)
            for kind, some in enumerate(self.kinds[:MOST_KINDS])
            for dim, length in enumerate(self.graph.values[some[0]].shape)
            if length % size == 0
        ]

    def _start(self, seeds: Sequence[Seed]) -> Choices:
        """The choices nearest to what seeds become."""
        found = propagate_by_rules(self.graph, self._annotate(seeds), strategy="aggressive")
        return self.problem.nearest(
            [
                Sharding(((),) * len(value.shape), (True,) * len(value.shape))
                if one is None
                else close(self.table.encoded(one))
                for one, value in zip(found.values, self.graph.values, strict=True)
            ]
        )
