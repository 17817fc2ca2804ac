"""Which shardings take the least time?

The third strategy of propagation weighs what the other two decide by rules: whose operand moves
where two disagree, whether contributions are combined at once or later, whether a device may do
the work of several. Each value chooses among shardings, each operation among ways of running
(`cost_candidates`); a choice costs what the operations take, and what moves between the sharding
of a value and those in which operations read and make it (`cost_model`)::

    seconds = sum over operations   compute(way)
            + sum over operands     movement(value's sharding -> what the way reads)
            + sum over results      movement(what the way makes -> value's sharding)
            + sum over outputs      movement(value's sharding -> what was asked for)

The least sum is found exactly where the graph lets it be (`least_sum`: chains, trees, and
graphs in which few values are alive at once), else by descent from what the other strategies
say. The answer has no clock in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.dtypes import dtype
from reshard.sharding import ShardingSpec
from reshard.spmd.axis_parts import AxisTable, Sharding
from reshard.spmd.cost_candidates import Way, pieces_of, shardings_of, ways_of
from reshard.spmd.cost_model import CostModel, Machine
from reshard.spmd.graph import Graph
from reshard.spmd.least_sum import Sum, Table
from reshard.spmd.propagation import PropagatedGraph, Run, propagate_graph
from reshard.spmd.sharding_rule import OpShardingRule

OTHERS = ("aggressive", "basic")


@dataclass(frozen=True, slots=True)
class CostedGraph:
    """A propagated graph and its estimated time.

    Args:
        propagated: the shardings, and what each operation runs with.
        seconds_s: estimated time of all operations and movements, one behind the other.
        is_exact: whether no choice among the candidates takes less.
        others_s: the same time for the shardings of the other strategies, each operation run in
            the way that suits those best.
    """

    propagated: PropagatedGraph
    seconds_s: float
    is_exact: bool
    others_s: Mapping[str, float]


def propagate_by_cost(
    graph: Graph,
    annotations: Mapping[int, ShardingSpec],
    *,
    outputs: Mapping[int, ShardingSpec] | None = None,
    machine: Machine | None = None,
    exact: bool | None = None,
) -> CostedGraph:
    """The shardings of least estimated time.

    Args:
        graph: the function.
        annotations: shardings of some values, by their numbers. They are kept.
        outputs: shardings in which outputs are asked for, by their position.
        machine: links and devices; hosts of eight H100 when None.
        exact: False never looks for the exact answer; else it is looked for first.

    Raises:
        SpecError: as `propagate_graph` does.

    >>> from reshard import DeviceMesh, spec
    >>> mesh = DeviceMesh.of(x=2)
    >>> rule = "([i, k], [k, j]) -> ([i, j]) {i=64, j=64, k=65536} reduction={k}"
    >>> graph = Graph.of([(64, 65536), (65536, 64)], [("matmul", [0, 1], rule)], [2])
    >>> given = {0: spec(mesh, "-, x"), 1: spec(mesh, "x, -")}
    >>> found = propagate_by_cost(graph, given)
    >>> found.is_exact, str(found.propagated.values[2])
    (True, 'x, -')
    """
    bases = [
        propagate_graph(graph, annotations, outputs=outputs, strategy=strategy)
        for strategy in OTHERS
    ]
    mesh = bases[0].mesh
    if mesh is None:
        return CostedGraph(bases[0], 0.0, True, dict.fromkeys(OTHERS, 0.0))
    table = AxisTable.of(mesh)
    problem = _Problem(graph, table, CostModel(table, machine or Machine()))
    problem.candidates(annotations, dict(outputs or {}), bases)
    total = problem.sum()
    ways = range(len(graph.values), len(total.choices))
    starts = [problem.start(number) for number in range(len(bases))]
    others = [total.value(total.descended(start, ways, sweeps=0)) for start in starts]
    chosen = None if exact is False else total.eliminated()
    is_exact = chosen is not None
    if chosen is None:
        chosen = min((total.descended(start, ways) for start in starts), key=total.value)
    return CostedGraph(
        problem.answer(chosen, bases[0]),
        total.value(chosen),
        is_exact,
        dict(zip(OTHERS, others, strict=True)),
    )


class _Problem:
    """Candidates and tables of one graph. Variables: values first, then operations."""

    def __init__(self, graph: Graph, table: AxisTable, model: CostModel) -> None:
        self.graph = graph
        self.table = table
        self.model = model
        self.itemsize = [_itemsize_bytes(value.dtype) for value in graph.values]
        self.values: list[list[Sharding]] = []
        self.ways: list[list[Way]] = []
        self.known: list[list[Sharding]] = []
        self.asked: dict[int, Sharding] = {}
        self._reads: dict[tuple[OpShardingRule, Way], Run] = {}
        self._tables: dict[object, np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = {}

    def candidates(
        self,
        annotations: Mapping[int, ShardingSpec],
        asked: Mapping[int, ShardingSpec],
        bases: Sequence[PropagatedGraph],
    ) -> None:
        """Find what may be chosen."""
        graph, table = self.graph, self.table
        given = {number: table.encoded(spec) for number, spec in annotations.items()}
        self.asked = {place: _closed(table.encoded(spec)) for place, spec in asked.items()}
        pieces = pieces_of([*given.values(), *self.asked.values()])
        self.known = [
            [
                _closed(table.encoded(spec)) if spec is not None else _whole(value.shape)
                for spec, value in zip(base.values, graph.values, strict=True)
            ]
            for base in bases
        ]
        around: list[dict[Sharding, None]] = [{} for _ in graph.values]
        found: dict[object, list[Way]] = {}
        for operation in graph.operations:
            places = (*operation.operands, *operation.results)
            known = tuple(tuple(base[value] for value in places) for base in self.known)
            shapes = [graph.values[value].shape for value in places]
            key = (operation.operator, operation.rule, str(operation.attributes), known)
            if key not in found:
                found[key] = ways_of(operation, shapes, pieces, known, table.mesh)
            self.ways.append(found[key])
            for way in found[key]:
                reads, makes = self.run(operation.rule, way)
                for value, sharding in zip(places, (*reads, *makes), strict=True):
                    around[value].setdefault(sharding)
        outputs = set(graph.outputs)
        self.values = [
            shardings_of(
                given.get(number),
                around[number],
                [base[number] for base in self.known],
                number in outputs,
            )
            for number in range(len(graph.values))
        ]

    def run(self, rule: OpShardingRule, way: Way) -> Run:
        """What an operation reads and makes when it runs in a way."""
        found = self._reads.get((rule, way))
        if found is None:
            found = self._reads[rule, way] = (way.reads(rule), way.makes(rule))
        return found

    def sum(self) -> Sum:
        """The seconds of all choices."""
        graph = self.graph
        count = len(graph.values)
        tables: list[Table] = []
        for number, operation in enumerate(graph.operations):
            variable = count + number
            ways = self.ways[number]
            places = (*operation.operands, *operation.results)
            size = max((self.itemsize[value] for value in places), default=4)
            seconds = [self.model.compute_s(operation.rule, way.cuts, size) for way in ways]
            tables.append(Table((variable,), np.array(seconds)))
            runs = [self.run(operation.rule, way) for way in ways]
            for position, value in enumerate(places):
                is_operand = position < len(operation.operands)
                ends = tuple((*reads, *makes)[position] for reads, makes in runs)
                found = self._movements(value, ends, is_operand)
                tables.append(Table((value, variable), found))
        for place, target in self.asked.items():
            value = graph.outputs[place]
            found = self._movements(value, (target,), True)
            tables.append(Table((value,), found[:, 0]))
        choices = (*map(len, self.values), *map(len, self.ways))
        return Sum(choices, tables)

    def _movements(
        self, value: int, ends: tuple[Sharding, ...], is_operand: bool
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Seconds between each sharding of a value and each one that is read or made."""
        shape = self.graph.values[value].shape
        key = (tuple(self.values[value]), ends, is_operand, shape, self.itemsize[value])
        found = self._tables.get(key)
        if found is None:
            found = np.array(
                [
                    [
                        self.model.movement_s(
                            own if is_operand else end,
                            end if is_operand else own,
                            shape,
                            self.itemsize[value],
                        )
                        for end in ends
                    ]
                    for own in self.values[value]
                ]
            )
            self._tables[key] = found
        return found

    def start(self, base: int) -> tuple[int, ...]:
        """The choices nearest to what another strategy says."""
        chosen = []
        for number, shardings in enumerate(self.values):
            wanted = self.known[base][number]
            place = next((i for i, one in enumerate(shardings) if one.dims == wanted.dims), 0)
            chosen.append(place)
        return (*chosen, *([0] * len(self.ways)))

    def answer(self, chosen: Sequence[int], base: PropagatedGraph) -> PropagatedGraph:
        """The graph with what was chosen."""
        count = len(self.graph.values)
        shardings = [own[place] for own, place in zip(self.values, chosen, strict=False)]
        runs = tuple(
            self.run(operation.rule, ways[place])
            for operation, ways, place in zip(
                self.graph.operations, self.ways, chosen[count:], strict=True
            )
        )
        outputs = tuple(
            self.table.decoded(self.asked.get(place, _closed(shardings[value])))
            for place, value in enumerate(self.graph.outputs)
        )
        values = tuple(map(self.table.decoded, shardings))
        return PropagatedGraph(self.graph, base.mesh, values, outputs, runs)


def _closed(sharding: Sharding) -> Sharding:
    return sharding._replace(is_closed=(True,) * len(sharding.dims), replicated=())


def _whole(shape: Sequence[int]) -> Sharding:
    return Sharding(((),) * len(shape), (True,) * len(shape))


def _itemsize_bytes(name: str) -> int:
    return dtype(name).itemsize_bytes
