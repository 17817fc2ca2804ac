"""Propagation by cost: the shardings of least estimated time.

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
say.

Movements are priced by the programs that are run. Those take milliseconds to find, so a small graph
begins with bounds, and only what looks best is priced, until nothing else can be better. In a large
one formulas choose first; what they choose is priced, and changed where that shows something
better. Either way the answer's seconds are those of its programs. There is no clock in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reshard.dtypes import DType, dtype
from reshard.errors import UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.propagation.axis_parts import AxisTable, Sharding, are_alike
from reshard.spmd.propagation.cost_candidates import RunOption, pieces_of, shardings_of, ways_of
from reshard.spmd.propagation.cost_model import CostModel, Machine
from reshard.spmd.propagation.graph import Graph
from reshard.spmd.propagation.least_sum import CostSum, CostTable, FloatArray
from reshard.spmd.propagation.propagation import (
    OperationShardings,
    PropagatedGraph,
    propagate_by_rules,
)
from reshard.spmd.rules.sharding_rule import OpShardingRule

OTHERS = ("aggressive", "basic")
# Operations of a graph whose least sum is looked for by prices of programs, and in how many rounds.
MOST_JUDGED = 16
MOST_ROUNDS = 256
# How often what formulas chose is changed.
MOST_CHANGES = 4
# Operations of a graph that is small enough for axes to be tried in every order.
SMALL = 4

ValueMovement = tuple[Sharding, Sharding, tuple[int, ...], DType]
"""From a sharding to another, of a value of a shape and element type."""


@dataclass(frozen=True, slots=True)
class CostedGraph:
    """A propagated graph and its estimated time.

    Args:
        propagated: the shardings, and what each operation runs with.
        seconds_s: estimated time of all operations and movements, one behind the other.
        is_exact: whether no choice among the candidates takes less, each movement priced by its
            program.
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
        annotations: shardings of some values, by their numbers; open ones may be extended.
        outputs: shardings in which outputs are asked for, by their position.
        machine: links and devices; hosts of eight H100 when None.
        exact: False never looks for the exact answer; else it is looked for first.

    Raises:
        SpecError: as `propagate_graph` does.
        UsageError: what is no machine, or an unknown element type.
        LayoutError: a rank that the topology has not, or a link that it does not know.

    >>> from reshard import DeviceMesh, spec
    >>> mesh = DeviceMesh.of(x=2)
    >>> rule = "([i, k], [k, j]) -> ([i, j]) {i=64, j=64, k=65536} reduction={k}"
    >>> graph = Graph.of([(64, 65536), (65536, 64)], [("matmul", [0, 1], rule)], [2])
    >>> given = {0: spec(mesh, "-, x"), 1: spec(mesh, "x, -")}
    >>> found = propagate_by_cost(graph, given)
    >>> found.is_exact, str(found.propagated.values[2])
    (True, 'x, -')
    """
    machine = Machine() if machine is None else machine
    if not isinstance(machine, Machine):
        raise UsageError(f"{machine!r} is no Machine; give sp.Machine(topology)")
    # 1. What the other strategies say: candidates, starting points, and figures to compare with.
    bases = [
        propagate_by_rules(graph, annotations, outputs=outputs, strategy=strategy)
        for strategy in OTHERS
    ]
    mesh = bases[0].mesh
    if mesh is None:
        return CostedGraph(bases[0], 0.0, True, dict.fromkeys(OTHERS, 0.0))
    table = AxisTable.of(mesh)
    # 2. Candidates of values and operations.
    problem = _Problem(graph, table, CostModel(table, machine))
    problem.candidates(annotations, dict(outputs or {}), bases)
    # 3. The exact answer, where the graph is small enough.
    found = None
    if exact is not False and len(graph.operations) <= MOST_JUDGED:
        found = _solve_exactly(problem, problem.sum(bounds=True))
    is_exact = found is not None
    # 4. The other strategies' seconds. Operations are the inner variables: no table has two of
    # them, so that each finds its best way by itself once the values are chosen.
    total = problem.sum()
    ways = range(len(graph.values), len(total.choices))
    starts = [problem.start(number) for number in range(len(bases))]
    others = [total.descended(start, ways, sweeps=0) for start in starts]
    problem.price(others)
    # 5. Otherwise formulas choose, and prices of programs correct them.
    chosen = found if found is not None else _solve_nearly(problem, total, others, exact)
    return CostedGraph(
        problem.answer(chosen, bases[0]),
        total.value(chosen),
        is_exact,
        dict(zip(OTHERS, map(total.value, others), strict=True)),
    )


Choices = tuple[int, ...]


def _solve_exactly(problem: _Problem, total: CostSum) -> Choices | None:
    """The least sum with every movement priced by its program; None where that takes too long.

    Prices begin as bounds that no program stays below. The least sum of those is found, the
    movements in it get the price of their programs, and so on until it has no bound in it: then
    every other choice takes as long even by its bounds.
    """
    for _ in range(MOST_ROUNDS):
        chosen = total.eliminated()
        if chosen is None or not problem.price([chosen]):
            return chosen
    return None


def _solve_nearly(
    problem: _Problem, total: CostSum, others: Sequence[Choices], exact: bool | None
) -> Choices:
    """The least sum by formulas, changed as long as prices of programs show something better."""
    ways = range(len(problem.graph.values), len(total.choices))
    chosen = None if exact is False else total.eliminated()
    if chosen is None:
        chosen = min((total.descended(other, ways) for other in others), key=total.value)
    seen = [chosen, *others]
    for _ in range(MOST_CHANGES):
        if not problem.price(seen):
            break
        seen.append(total.descended(min(seen, key=total.value), ways))
    problem.price(seen)
    return min(seen, key=total.value)


class MovementEnds(NamedTuple):
    """Movements of values of one shape and type: from each sharding to each that is read, or back.

    Args:
        own: the shardings that the value may have.
        others: in which operations read or make it.
        is_read: whether it goes to those, not from them.
        shape, element: of the value.
    """

    own: tuple[Sharding, ...]
    others: tuple[Sharding, ...]
    is_read: bool
    shape: tuple[int, ...]
    element: DType

    def movement(self, one: Sharding, other: Sharding) -> ValueMovement:
        """The movement between two of the shardings."""
        ends = (one, other) if self.is_read else (other, one)
        return (*ends, self.shape, self.element)

    def put(self, table: FloatArray, movement: ValueMovement, seconds_s: float) -> None:
        """Write the seconds of a movement into a table of these, wherever it is in it."""
        source, target, shape, element = movement
        one, other = (source, target) if self.is_read else (target, source)
        if shape != self.shape or element is not self.element or one not in self.own:
            return
        columns = [place for place, end in enumerate(self.others) if end == other]
        table[self.own.index(one), columns] = seconds_s


class _Problem:
    """Candidates and tables of one graph. Variables: values first, then operations."""

    def __init__(self, graph: Graph, table: AxisTable, model: CostModel) -> None:
        self.graph = graph
        self.table = table
        self.model = model
        self._bounds = False
        self.elements = [dtype(value.dtype) for value in graph.values]
        self.values: list[list[Sharding]] = []
        self.ways: list[list[RunOption]] = []
        self.known: list[list[Sharding]] = []
        self.asked: dict[int, Sharding] = {}
        self._reads: dict[tuple[OpShardingRule, RunOption], OperationShardings] = {}
        self._seconds: dict[object, FloatArray] = {}
        self._ends_of: dict[int, list[tuple[int, MovementEnds]]] = {}
        self._tables: dict[MovementEnds, FloatArray] = {}
        self._priced: dict[ValueMovement, float] = {}

    def candidates(
        self,
        annotations: Mapping[int, ShardingSpec],
        asked: Mapping[int, ShardingSpec],
        bases: Sequence[PropagatedGraph],
    ) -> None:
        """Find what may be chosen."""
        graph, table = self.graph, self.table
        given = {number: table.encoded(spec) for number, spec in annotations.items()}
        self.asked = {place: _close(table.encoded(spec)) for place, spec in asked.items()}
        # The axes in the pieces that annotations use, and what the other strategies chose.
        pieces = pieces_of([*given.values(), *self.asked.values()])
        self.known = [
            [
                _close(table.encoded(spec)) if spec is not None else _make_whole(value.shape)
                for spec, value in zip(base.values, graph.values, strict=True)
            ]
            for base in bases
        ]
        reductions = _find_reductions(graph, given.values())
        is_small = len(graph.operations) <= SMALL
        around: list[dict[Sharding, None]] = [{} for _ in graph.values]
        found: dict[object, list[RunOption]] = {}
        for operation in graph.operations:
            places = (*operation.operands, *operation.results)
            known = tuple(tuple(base[value] for value in places) for base in self.known)
            shapes = [graph.values[value].shape for value in places]
            # A model repeats its layers: equal operations in equal surroundings share one list of
            # ways, which `_tabulate_compute` relies on.
            key = (operation.operator, operation.rule, str(operation.attributes), known)
            if key not in found:
                found[key] = ways_of(
                    operation, shapes, pieces, known, table.mesh, reductions, is_small
                )
            self.ways.append(found[key])
            # What a way reads and makes becomes a candidate of the values around it.
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

    def run(self, rule: OpShardingRule, way: RunOption) -> OperationShardings:
        """The shardings that an operation reads and makes when it runs in a way."""
        found = self._reads.get((rule, way))
        if found is None:
            found = self._reads[rule, way] = (way.reads(rule), way.makes(rule))
        return found

    def sum(self, *, bounds: bool = False) -> CostSum:
        """The seconds of all choices, movements by formulas; or by bounds where that is asked."""
        self._bounds = bounds
        self._tables = {}
        count = len(self.graph.values)
        tables: list[CostTable] = []
        for number in range(len(self.graph.operations)):
            tables.append(CostTable((count + number,), self._tabulate_compute(number)))
            for value, ends in self._find_ends(number):
                tables.append(CostTable((value, count + number), self._tabulate_movements(ends)))
        for value, ends in self._find_asked():
            # An output has one sharding that was asked for: the only column.
            tables.append(CostTable((value,), self._tabulate_movements(ends)[:, 0]))
        choices = (*map(len, self.values), *map(len, self.ways))
        return CostSum(choices, tables)

    def price(self, answers: Iterable[Sequence[int]]) -> bool:
        """Price by its program each movement of some answers. Whether that was not done before."""
        count = len(self.graph.values)
        # A dictionary for its order, so that prices are found in the same order each time.
        new: dict[ValueMovement, None] = {}
        for chosen in answers:
            for number in range(len(self.graph.operations)):
                for value, ends in self._find_ends(number):
                    other = ends.others[chosen[count + number]]
                    new[ends.movement(ends.own[chosen[value]], other)] = None
            for value, ends in self._find_asked():
                new[ends.movement(ends.own[chosen[value]], ends.others[0])] = None
        waiting = [one for one in new if one not in self._priced and not are_alike(*one[:2])]
        for movement in waiting:
            self._priced[movement] = self.model.program_s(*movement)
            # The tables of the sum are changed in place: its next answer has the new price.
            for ends, table in self._tables.items():
                ends.put(table, movement, self._priced[movement])
        return bool(waiting)

    def _tabulate_compute(self, number: int) -> FloatArray:
        """Seconds that an operation computes in each of its ways."""
        operation, ways = self.graph.operations[number], self.ways[number]
        places = (*operation.operands, *operation.results)
        tensors = tuple((self.graph.values[v].shape, self.elements[v]) for v in places)
        # Equal operations share one list of ways.
        key = (operation.operator, operation.rule, tensors, id(ways))
        found = self._seconds.get(key)
        if found is None:
            name, rule = operation.operator, operation.rule
            found = np.array([self.model.compute_s(name, rule, way.cuts, tensors) for way in ways])
            self._seconds[key] = found
        return found

    def _find_ends(self, number: int) -> Sequence[tuple[int, MovementEnds]]:
        """The movements possible around an operation: of each value, between which shardings."""
        found = self._ends_of.get(number)
        if found is None:
            operation = self.graph.operations[number]
            runs = [self.run(operation.rule, way) for way in self.ways[number]]
            values = (*operation.operands, *operation.results)
            # From rows, one a way, to columns, one a tensor: its sharding in each way.
            columns = zip(*((*reads, *makes) for reads, makes in runs), strict=True)
            found = self._ends_of[number] = [
                (value, self._make_ends(value, others, position < len(operation.operands)))
                for position, (value, others) in enumerate(zip(values, columns, strict=True))
            ]
        return found

    def _find_asked(self) -> Iterator[tuple[int, MovementEnds]]:
        for place, target in self.asked.items():
            value = self.graph.outputs[place]
            yield value, self._make_ends(value, (target,), True)

    def _make_ends(self, value: int, others: tuple[Sharding, ...], is_read: bool) -> MovementEnds:
        shape = self.graph.values[value].shape
        return MovementEnds(tuple(self.values[value]), others, is_read, shape, self.elements[value])

    def _tabulate_movements(self, ends: MovementEnds) -> FloatArray:
        """Seconds between each sharding of a value and each one that is read or made."""
        found = self._tables.get(ends)
        if found is None:
            found = np.array(
                [
                    [self._movement_s(ends.movement(one, other)) for other in ends.others]
                    for one in ends.own
                ]
            )
            self._tables[ends] = found
        return found

    def _movement_s(self, movement: ValueMovement) -> float:
        found = self._priced.get(movement)
        if found is not None:
            return found
        source, target, shape, element = movement
        seconds_s = self.model.bound_s if self._bounds else self.model.movement_s
        return seconds_s(source, target, shape, element.itemsize_bytes)

    def start(self, base: int) -> tuple[int, ...]:
        """The choices nearest to what another strategy says."""
        chosen = []
        for number, shardings in enumerate(self.values):
            wanted = self.known[base][number]
            # Compared by their cuts alone: candidates are closed and without replicated axes.
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
            self.table.decoded(self.asked.get(place, _close(shardings[value])))
            for place, value in enumerate(self.graph.outputs)
        )
        values = tuple(map(self.table.decoded, shardings))
        return PropagatedGraph(self.graph, base.mesh, values, outputs, runs)


def _close(sharding: Sharding) -> Sharding:
    return sharding._replace(is_closed=(True,) * len(sharding.dims), replicated=())


def _make_whole(shape: Sequence[int]) -> Sharding:
    return Sharding(((),) * len(shape), (True,) * len(shape))


def _find_reductions(graph: Graph, given: Iterable[Sharding]) -> tuple[str, ...]:
    """The reductions of all contributions that a graph may have."""
    found = [one.rule.reduction_operator for one in graph.operations if one.rule.reduction]
    found += [one.reduction for one in given if one.reduction is not None]
    return tuple(dict.fromkeys(["sum", *found]))
