"""Input search: fast shardings of a graph's inputs, for a given price of memory.

The search minimizes the sum of `cost_problem` with all inputs free, in which a value that several
operations read is moved once, plus the bytes of some values on a rank times a price. If the graph
permits it, the minimum is found by elimination. Otherwise

1. *seeds* are combined: a seed shards one dimension of inputs of a kind over an axis, the strategy
   "aggressive" propagates it through the graph, and each operation runs with its best sharding. The
   best seed is kept, and others are added as long as one improves the result;
2. the best combinations, or known programs, are improved by *descent*, one value at a time, then in
   *windows*: neighbouring values and operations, optimized together by elimination.

Inputs of a kind have the same shape, element type and readers, which are between similar
operations, such as a weight in each layer of a model. Data parallelism is one seed, tensor
parallelism one for each block of a layer, and sharding that saves memory results from the price.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from reshard.dtypes import dtype
from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd.graph import Graph
from reshard.spmd.propagation.axis_parts import AxisTable, Sharding, size_of
from reshard.spmd.propagation.by_cost.cost_model import CostModel, Machine
from reshard.spmd.propagation.by_cost.cost_problem import CostProblem, close
from reshard.spmd.propagation.by_cost.cost_table import CostTable, FloatArray
from reshard.spmd.propagation.by_cost.nearly_least import Choices, improved
from reshard.spmd.propagation.propagation import PropagatedGraph, propagate_by_rules

# Kinds of inputs that are seeds, the largest ones first, and seeds that are laid beside others.
MOST_KINDS = 24
MOST_BESIDE = 8
MOST_SEEDS = 12
# Of what was seen, how many descend.
MOST_DESCENTS = 8


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
        self._base = propagate_by_rules(graph, self._annotate(()), strategy="aggressive")
        self.problem.candidates(annotations, {}, [self._base], self.free, ties)
        self.problem.fill(bounds=False)
        self.total = self.problem.sum()
        self.sizes_bytes = {number: self._count_bytes(number) for number in self.free}
        self._begun: dict[tuple[Seed, ...], Choices] = {}
        self._ways = range(len(graph.values), len(self.total.choices))

    @cached_property
    def byte_s(self) -> float:
        """About the seconds of the function for each byte of its free inputs: a scale of prices."""
        found = self.total.eliminated()
        seconds_s = min(map(self.total.value, self._seeds if found is None else [found]))
        return seconds_s / max(sum(self._count_whole(number) for number in self.free), 1)

    def least(
        self,
        price_s: float,
        held: Collection[int],
        near: Sequence[Sequence[ShardingSpec | None]] = (),
    ) -> Choices:
        """Choices of little time, with a price of memory.

        Args:
            price_s: seconds for each byte that the busiest rank has.
            held: variables of `problem`: values, and operations with all that they read and make.
            near: shardings of all values, near which to look; near seeds when there are none.
        """
        self.problem.charge(self._charge(price_s, held))
        total = self.problem.sum()
        chosen = total.eliminated()
        if chosen is not None:
            return improved(self.problem, (), [chosen], is_least=True)[0]
        begun = [
            total.descended(self._find_nearest(some), self._ways, sweeps=0) for some in near
        ] or sorted(self._seeds, key=total.value)[:MOST_DESCENTS]
        return improved(self.problem, begun)[0]

    def descended(self, start: Choices) -> tuple[Choices, float]:
        """What is between inputs descended from choices, and about the seconds then."""
        charges = []
        for number in self.free:
            # Other choices of the inputs take for ever.
            seconds_s = np.full(len(self.problem.values[number]), math.inf)
            seconds_s[start[number]] = 0.0
            charges.append(CostTable((number,), seconds_s))
        self.problem.charge(charges)
        total = self.problem.sum()
        chosen = total.descended_in_windows(start, self._ways)
        return chosen, total.value(chosen)

    def _charge(self, price_s: float, held: Collection[int]) -> list[CostTable]:
        problem, first = self.problem, len(self.graph.values)
        counts = Counter(problem.variables[one] if one < first else one for one in held)
        known: dict[object, FloatArray] = {}
        found = []
        for variable, count in sorted(counts.items()):
            if variable >= first:
                size_bytes = self._count_run_bytes(variable - first)
                found.append(CostTable((variable,), size_bytes * price_s))
                continue
            # Equal ones stay one object, by which layers alike are told.
            value = self.graph.values[variable]
            key = (value.shape, value.dtype, id(problem.values[variable]), count)
            if key not in known:
                known[key] = self._count_bytes(variable) * (price_s * count)
            found.append(CostTable((variable,), known[key]))
        return found

    def held_bytes(self, chosen: Choices, held: Collection[int]) -> float:
        """The bytes that a rank has of some variables, as of `least`, in choices."""
        return sum(
            float(table.seconds_s[chosen[table.variables[0]]]) for table in self._charge(1.0, held)
        )

    def placed(self, chosen: Choices) -> PropagatedGraph:
        """The graph with what was chosen."""
        return self.problem.answer(chosen, self._base)

    def _find_kinds(self) -> list[tuple[int, ...]]:
        """Inputs that are read alike, the largest first."""
        # An identity, as of what is differentiated by, is no reader, but those of its result are.
        inputs = {number: number for number in self.free}
        readers: dict[int, list[object]] = {number: [] for number in self.free}
        for operation, alike in zip(self.graph.operations, _find_alike(self.graph), strict=True):
            for place, operand in enumerate(operation.operands):
                if operand not in inputs:
                    continue
                if operation.operator == "identity":
                    inputs[operation.results[0]] = inputs[operand]
                else:
                    readers[inputs[operand]].append((alike, place))
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

    def _count_bytes(self, number: int, shardings: Sequence[Sharding] | None = None) -> FloatArray:
        """The bytes of a value on a rank, for each of some shardings; for its own when None."""
        value = self.graph.values[number]
        found = [
            math.prod(
                -(-size // size_of(axes)) for size, axes in zip(value.shape, one.dims, strict=True)
            )
            for one in (self.problem.values[number] if shardings is None else shardings)
        ]
        return np.array(found, dtype=np.float64) * dtype(value.dtype).itemsize_bytes

    def _count_run_bytes(self, number: int) -> FloatArray:
        """The bytes of all that an operation reads and makes, for each of its ways."""
        operation, ways = self.graph.operations[number], self.problem.ways[number]
        values = (*operation.operands, *operation.results)
        total = np.zeros(len(ways.options))
        for value, shardings in zip(values, ways.shardings, strict=True):
            total += self._count_bytes(value, shardings)
        return total

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
        laid: list[Seed] = []
        found: dict[Choices, float] = {}

        def judge(*seeds: Seed) -> float:
            chosen = self.begin(seeds)
            if chosen not in found:
                found[chosen] = self.total.value(chosen)
            return found[chosen]

        best_s = judge()
        for axis in self.mesh.axis_names:
            waiting = self.list_seeds(axis)
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
        return list(found)

    def list_seeds(self, axis: str) -> list[Seed]:
        """The seeds along an axis, those of the largest inputs first."""
        size = self.mesh.axis_size(axis)
        return [
            Seed(kind, dim, axis)
            for kind, some in enumerate(self.kinds[:MOST_KINDS])
            for dim, length in enumerate(self.graph.values[some[0]].shape)
            if length % size == 0
        ]

    def begin(self, seeds: Iterable[Seed]) -> Choices:
        """The choices nearest to what seeds become, operations in the ways that suit it best."""
        # Axes cut a dimension in the order of the mesh, as candidates have them.
        laid = tuple(sorted(seeds, key=lambda seed: (self.mesh.axis_names.index(seed.axis), seed)))
        if laid not in self._begun:
            found = propagate_by_rules(self.graph, self._annotate(laid), strategy="aggressive")
            self._begun[laid] = self._choose_ways(self._find_nearest(found.values))
        return self._begun[laid]

    def with_inputs(self, chosen: Choices, specs: Mapping[int, ShardingSpec]) -> Choices:
        """Choices with inputs nearest to other shardings, operations in the ways that suit best."""
        shardings: list[Sharding] = self.problem.shardings(chosen)
        for number, spec in specs.items():
            shardings[number] = close(self.table.encoded(spec))
        return self._choose_ways(self.problem.nearest(shardings))

    def _choose_ways(self, start: Choices) -> Choices:
        return self.total.descended(start, self._ways, sweeps=0)

    def _find_nearest(self, specs: Sequence[ShardingSpec | None]) -> Choices:
        """The choices nearest to shardings of all values."""
        return self.problem.nearest(
            [
                Sharding(((),) * len(value.shape), (True,) * len(value.shape))
                if one is None
                else close(self.table.encoded(one))
                for one, value in zip(specs, self.graph.values, strict=True)
            ]
        )


def _find_alike(graph: Graph) -> list[int]:
    """A number for each operation: the same where the operations beside it are alike, too."""
    makers: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for place, operation in enumerate(graph.operations):
        makers.update(dict.fromkeys(operation.results, place))
        for number in operation.operands:
            readers.setdefault(number, []).append(place)
    own = _number((one.operator, one.rule) for one in graph.operations)
    return _number(
        (
            own[place],
            *[own[makers[number]] if number in makers else None for number in one.operands],
            *[tuple(sorted(own[n] for n in readers.get(number, ()))) for number in one.results],
        )
        for place, one in enumerate(graph.operations)
    )


def _number(some: Iterable[object]) -> list[int]:
    """Equal ones have the same number."""
    known: dict[object, int] = {}
    return [known.setdefault(one, len(known)) for one in some]
