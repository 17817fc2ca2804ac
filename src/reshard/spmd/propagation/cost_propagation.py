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

Movements are priced by the programs that are run. Those take milliseconds to find, so formulas
choose first; what they choose is priced, and changed where that shows something better. In a small
graph bounds follow: what could be better by them is priced, until nothing can. Either way the
answer's seconds are those of its programs. There is no clock in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.dtypes import DType, dtype
from reshard.errors import UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.propagation.axis_parts import AxisTable, Sharding
from reshard.spmd.propagation.cost_candidates import RunOption, pieces_of, shardings_of, ways_of
from reshard.spmd.propagation.cost_model import CostModel, Machine
from reshard.spmd.propagation.graph import Graph
from reshard.spmd.propagation.least_sum import CostSum, CostTable, FloatArray
from reshard.spmd.propagation.movement_tables import Move, ValueMovements
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
# Sums of tables are compared up to this part of them, far beyond what rounding does.
SLACK = 1e-6
# How often what formulas chose is changed.
MOST_CHANGES = 4
# Operations of a graph that is small enough for axes to be tried in every order.
SMALL = 4


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
    problem = _Problem(graph, table, CostModel.of(table, machine))
    problem.candidates(annotations, dict(outputs or {}), bases)
    # 3. The other strategies' seconds. Operations are the inner variables: no table has two of
    # them, so that each finds its best way by itself once the values are chosen.
    problem.fill(bounds=False)
    total = problem.sum()
    ways = range(len(graph.values), len(total.choices))
    starts = [problem.start(number) for number in range(len(bases))]
    others = [total.descended(start, ways, sweeps=0) for start in starts]
    problem.price(others)
    total = problem.sum()
    others_s = {other: total.value(other) for other in others}
    # 4. What formulas choose, corrected by prices of programs.
    chosen, seconds_s = _solve_nearly(problem, others_s, exact)
    # 5. What is better, or the proof that nothing is, where the graph is small enough.
    is_exact = False
    if exact is not False and len(graph.operations) <= MOST_JUDGED:
        chosen, seconds_s, is_exact = _solve_exactly(problem, chosen, seconds_s)
    return CostedGraph(
        problem.answer(chosen, bases[0]),
        seconds_s,
        is_exact,
        {name: others_s[other] for name, other in zip(OTHERS, others, strict=True)},
    )


Choices = tuple[int, ...]


def _solve_exactly(problem: _Problem, best: Choices, best_s: float) -> tuple[Choices, float, bool]:
    """The least sum with every movement priced by its program, and whether it was found for sure.

    Prices begin as bounds that no program stays below. The least sum of those is found, the
    movements in it get the price of their programs, and so on until it is no less than the best
    answer seen: then every other choice takes as long even by its bounds. Choices that take longer
    than that answer by their bounds are left out on the way.

    Args:
        problem: whose movements are priced.
        best: an answer to begin with.
        best_s: its seconds, all of its movements priced.
    """
    problem.fill(bounds=True)
    kept = [np.arange(count) for count in problem.sum().choices]
    for turn in range(MOST_ROUNDS):
        total = problem.sum().restricted(kept)
        # In the rounds 0, 1, 2, 4, 8 and so on, since it takes as long as some rounds.
        if turn & (turn - 1) <= 0:
            least_s = total.least_of_choices()
            if least_s is None:
                break
            kept = [
                numbers[(own_s <= best_s * (1 + SLACK)) | (numbers == choice)]
                for numbers, own_s, choice in zip(kept, least_s, best, strict=True)
            ]
            total = problem.sum().restricted(kept)
        places = total.eliminated()
        if places is None:
            break
        if total.value(places) >= best_s:
            return best, best_s, True
        chosen = tuple(int(own[place]) for own, place in zip(kept, places, strict=True))
        is_changed = problem.price([chosen])
        chosen_s = problem.sum().value(chosen)
        if chosen_s < best_s:
            best, best_s = chosen, chosen_s
        if not is_changed:
            return best, best_s, True
    return best, best_s, False


def _solve_nearly(
    problem: _Problem, others_s: Mapping[Choices, float], exact: bool | None
) -> tuple[Choices, float]:
    """The least sum by formulas, changed as long as prices of programs show something better."""
    total = problem.sum()
    ways = range(len(problem.graph.values), len(total.choices))
    chosen = None if exact is False else total.eliminated()
    if chosen is None:
        chosen = min((total.descended(other, ways) for other in others_s), key=total.value)
    # Seconds of answers whose movements are priced, which stay as they are.
    seen_s: dict[Choices, float] = {}
    for _ in range(MOST_CHANGES + 1):
        is_changed = problem.price([chosen])
        total = problem.sum()
        seen_s[chosen] = total.value(chosen)
        seen_s.update(others_s)
        best = min(seen_s, key=seen_s.__getitem__)
        if not is_changed:
            break
        chosen = total.descended(best, ways)
    return best, seen_s[best]


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """The ways of an operation, and what it reads and makes in them.

    Args:
        options: the ways.
        shardings: of each operand and result, in each way.
        different: the same without repetitions.
    """

    options: list[RunOption]
    shardings: tuple[tuple[Sharding, ...], ...]
    different: tuple[tuple[Sharding, ...], ...]

    @classmethod
    def of(cls, rule: OpShardingRule, options: list[RunOption]) -> _Ways:
        # From rows, one a way, to columns, one a tensor.
        rows = [(*way.reads(rule), *way.makes(rule)) for way in options]
        columns = tuple(zip(*rows, strict=True))
        return cls(options, columns, tuple(tuple(dict.fromkeys(one)) for one in columns))

    def run(self, place: int, count: int) -> OperationShardings:
        """What an operation of `count` operands reads and makes in the way at a place."""
        found = tuple(column[place] for column in self.shardings)
        return found[:count], found[count:]


@dataclass(frozen=True, slots=True)
class _Ends:
    """Movements of a value, from each sharding it may have to each that is read, or back.

    Args:
        value, way: variables; no way where a sharding was asked for.
        moves: of values like it.
        own: the shardings that the value may have.
        others: in which the operation reads or makes it, or what was asked for.
        is_read: whether it goes to those, not from them.
    """

    value: int
    way: int | None
    moves: ValueMovements
    own: tuple[int, ...]
    others: tuple[int, ...]
    is_read: bool


class _Problem:
    """Candidates and tables of one graph. Variables: values first, then operations."""

    def __init__(self, graph: Graph, table: AxisTable, model: CostModel) -> None:
        self.graph = graph
        self.table = table
        self.model = model
        self.elements = [dtype(value.dtype) for value in graph.values]
        self.values: list[list[Sharding]] = []
        self.ways: list[_Ways] = []
        self.known: list[list[Sharding]] = []
        self.asked: dict[int, Sharding] = {}
        self._seconds: dict[object, FloatArray] = {}
        self._moves: dict[tuple[tuple[int, ...], DType], ValueMovements] = {}
        self._kinds: list[ValueMovements] = []
        self._ends: list[_Ends] = []
        self._computing: list[CostTable] = []

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
        around: list[list[tuple[Sharding, ...]]] = [[] for _ in graph.values]
        known_ways: dict[object, _Ways] = {}
        for operation in graph.operations:
            places = (*operation.operands, *operation.results)
            known = tuple(tuple(base[value] for value in places) for base in self.known)
            # A model repeats its layers: equal operations in equal surroundings share their ways,
            # and all that follows from them.
            key = (operation.operator, operation.rule, str(operation.attributes), known)
            ways = known_ways.get(key)
            if ways is None:
                shapes = [graph.values[value].shape for value in places]
                options = ways_of(
                    operation, shapes, pieces, known, table.mesh, reductions, is_small
                )
                ways = known_ways[key] = _Ways.of(operation.rule, options)
            self.ways.append(ways)
            # What a way reads and makes becomes a candidate of the values around it.
            for value, shardings in zip(places, ways.different, strict=True):
                around[value].append(shardings)
        outputs = set(graph.outputs)
        known_values: dict[object, list[Sharding]] = {}
        for number in range(len(graph.values)):
            own, bases_of = given.get(number), tuple(base[number] for base in self.known)
            is_output = number in outputs
            value_key = (own, bases_of, is_output, tuple(map(id, around[number])))
            candidates = known_values.get(value_key)
            if candidates is None:
                every = dict.fromkeys(itertools.chain.from_iterable(around[number]))
                candidates = shardings_of(own, every, bases_of, is_output)
                known_values[value_key] = candidates
            self.values.append(candidates)
        self._ends = list(self._find_ends())
        count = len(graph.values)
        self._computing = [
            CostTable((count + number,), self._tabulate_compute(number))
            for number in range(len(graph.operations))
        ]

    def fill(self, *, bounds: bool) -> None:
        """Find the seconds of movements by bounds or formulas, or by programs if priced."""
        for moves in self._moves.values():
            moves.fill(bounds=bounds)

    def sum(self) -> CostSum:
        """The seconds of all choices; movements as they are priced by then."""
        tables = [*self._computing]
        for ends in self._ends:
            table = ends.moves.table(ends.own, ends.others, ends.is_read).seconds_s
            if ends.way is None:
                # An output has one sharding that was asked for: the only column.
                tables.append(CostTable((ends.value,), table[:, 0]))
            else:
                tables.append(CostTable((ends.value, ends.way), table))
        choices = (*map(len, self.values), *(len(ways.options) for ways in self.ways))
        return CostSum(choices, tables)

    def price(self, answers: Iterable[Sequence[int]]) -> bool:
        """Price by its program each movement of some answers. Whether that was not done before."""
        # A dictionary for its order, so that prices are found in the same order each time.
        new: dict[int, dict[Move, None]] = {}
        for chosen in answers:
            for ends in self._ends:
                other = ends.others[0 if ends.way is None else chosen[ends.way]]
                one = ends.own[chosen[ends.value]]
                if one != other:
                    move = (one, other) if ends.is_read else (other, one)
                    new.setdefault(id(ends.moves), {})[move] = None
        has_new = False
        for moves in self._moves.values():
            has_new |= moves.price(new.get(id(moves), ()))
        return has_new

    def _tabulate_compute(self, number: int) -> FloatArray:
        """Seconds that an operation computes in each of its ways."""
        operation, ways = self.graph.operations[number], self.ways[number]
        places = (*operation.operands, *operation.results)
        tensors = tuple((self.graph.values[v].shape, self.elements[v]) for v in places)
        key = (id(ways), operation.operator, tensors)
        found = self._seconds.get(key)
        if found is None:
            name, rule = operation.operator, operation.rule
            # Ways that differ in contributions alone compute the same.
            seconds_s = {
                cuts: self.model.compute_s(name, rule, cuts, tensors)
                for cuts in dict.fromkeys(way.cuts for way in ways.options)
            }
            found = np.array(
                [
                    seconds_s[way.cuts] + self.model.placing_s(way.placed, tensors)
                    for way in ways.options
                ]
            )
            self._seconds[key] = found
        return found

    def _find_ends(self) -> Iterator[_Ends]:
        """The movements possible around operations, and to what was asked for."""
        count = len(self.graph.values)
        for one, element in zip(self.graph.values, self.elements, strict=True):
            key = (one.shape, element)
            if key not in self._moves:
                self._moves[key] = ValueMovements(self.model, one.shape, element)
            self._kinds.append(self._moves[key])
        numbers: dict[tuple[int, int], tuple[int, ...]] = {}

        def find_numbers(moves: ValueMovements, shardings: Sequence[Sharding]) -> tuple[int, ...]:
            # Equal values, and equal operations, share their lists.
            found = numbers.get((id(moves), id(shardings)))
            if found is None:
                found = numbers[id(moves), id(shardings)] = moves.numbers(shardings)
            return found

        own = list(map(find_numbers, self._kinds, self.values))
        for number, (operation, ways) in enumerate(
            zip(self.graph.operations, self.ways, strict=True)
        ):
            places = (*operation.operands, *operation.results)
            for position, (value, others) in enumerate(zip(places, ways.shardings, strict=True)):
                moves = self._kinds[value]
                is_read = position < len(operation.operands)
                found = find_numbers(moves, others)
                yield _Ends(value, count + number, moves, own[value], found, is_read)
        for place, target in self.asked.items():
            value = self.graph.outputs[place]
            moves = self._kinds[value]
            yield _Ends(value, None, moves, own[value], moves.numbers([target]), True)

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
            ways.run(place, len(operation.operands))
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
