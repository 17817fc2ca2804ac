"""Cost problems: the choices in a graph, and the tables of their times.

Variables are the values, which choose among shardings, and the operations, which choose among ways
of running. Each operation has a table of what it computes in each way, and with each of its
values a table of the movements between them::

    value %0 --- reads --- operation 0 --- makes --- value %2
                           computes

A model repeats its layers: equal operations in equal surroundings share their ways and tables.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import eq

import numpy as np

from reshard.dtypes import DType, dtype
from reshard.sharding import ShardingSpec
from reshard.spmd.graph import WITH_SHARDING, Graph
from reshard.spmd.propagation.axes import AxisTable, Sharding
from reshard.spmd.propagation.axes import Parts as AxisParts
from reshard.spmd.propagation.by_cost.candidates import (
    RunOption,
    cuts_of,
    every_piece,
    pieces_of,
    shardings_of,
    ways_of,
)
from reshard.spmd.propagation.by_cost.cost_model import CostModel
from reshard.spmd.propagation.by_cost.factor_graph import CostSum, CostTable, FloatArray
from reshard.spmd.propagation.by_cost.movements import (
    NOTHING,
    Between,
    CommonReads,
    Decisions,
    EdgeMoves,
    Move,
    MoveEnds,
    Parts,
    ValueMovements,
)
from reshard.spmd.propagation.propagation import OperationShardings, PropagatedGraph

# Operations of a graph in which axes are tried in every order; there are factorially many.
MAX_PERMUTED_OPERATIONS = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """The ways of an operation, and what it reads and makes in them.

    Args:
        options: the ways.
        cuts: of each factor, in each way.
        shardings: of each operand and result, in each way.
        different: the same without repetitions.
    """

    options: tuple[RunOption, ...]
    cuts: tuple[tuple[AxisParts, ...], ...]
    shardings: tuple[tuple[Sharding, ...], ...]
    different: tuple[tuple[Sharding, ...], ...]

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(options: tuple[RunOption, ...]) -> _Ways:
        """Return the ways of an operation, cached between propagations."""
        # Transpose rows, of the ways, to columns, of the tensors.
        rows = [(*way.reads, *way.makes) for way in options]
        columns = tuple(zip(*rows, strict=True))
        different = tuple(tuple(dict.fromkeys(column)) for column in columns)
        return _Ways(options, tuple([way.cuts for way in options]), columns, different)

    @property
    def are_placed(self) -> bool:
        """Whether the operation may need more than it reads in any of them."""
        return any(way.runs_with is not None for way in self.options)

    def run(self, place: int, count: int) -> OperationShardings:
        """Return the shardings of an operation's `count` operands and its results in a way."""
        shardings = tuple(column[place] for column in self.shardings)
        return shardings[:count], shardings[count:]


class CostProblem:
    """The candidates and tables of a graph. Variables: values first, then operations."""

    def __init__(self, graph: Graph, table: AxisTable, model: CostModel) -> None:
        self.graph = graph
        self.table = table
        self.model = model
        self.elements = [dtype(value.dtype) for value in graph.values]
        self.values: list[list[Sharding]] = []
        self.ways: list[_Ways] = []
        self.known: list[list[Sharding]] = []
        self.variables = list(range(len(graph.values)))
        self.asked: dict[int, Sharding] = {}
        self._seconds: dict[object, FloatArray] = {}
        self._moves: dict[tuple[tuple[int, ...], DType], ValueMovements] = {}
        self._kinds: list[ValueMovements] = []
        self._between: list[Between | EdgeMoves] = []
        self.reads = CommonReads([])
        self._sum: CostSum | None = None
        # Whether movements have other prices since, and what answers take with these.
        self._is_changed = False
        self._answers_s: dict[tuple[int, ...], float] = {}
        self._computing: list[CostTable] = []
        self._charges: list[CostTable] = []

    def candidates(
        self,
        annotations: Mapping[int, ShardingSpec],
        asked: Mapping[int, ShardingSpec],
        bases: Sequence[PropagatedGraph],
        free: Collection[int] = (),
        ties: Mapping[int, int] | None = None,
    ) -> None:
        """Find what may be chosen.

        Args:
            annotations: shardings of some values, by their numbers.
            asked: those of outputs, by their position.
            bases: the results of other strategies.
            free: inputs that may be cut over all axes of the mesh, whatever else is.
            ties: values that have the sharding of an input, by the numbers of both.
        """
        graph, table = self.graph, self.table
        for value, input_ in (ties or {}).items():
            self.variables[value] = input_
        annotated = {number: table.encoded(spec) for number, spec in annotations.items()}
        self.asked = {place: table.encoded(spec).plain for place, spec in asked.items()}
        # The axes in the pieces that annotations use, others as a whole.
        used = pieces_of([*annotated.values(), *self.asked.values()])
        pieces = every_piece(used, table.mesh)
        # Equal shardings are the same object, so they are compared by identity below.
        alike: dict[object, Sharding] = {}

        def find_known(spec: ShardingSpec | None, shape: Sequence[int]) -> Sharding:
            key = len(shape) if spec is None else spec
            sharding = alike.get(key)
            if sharding is None:
                sharding = Sharding.whole(len(shape)) if spec is None else table.encoded(spec).plain
                sharding = alike[key] = alike.setdefault(sharding, sharding)
            return sharding

        self.known = [
            [
                find_known(spec, value.shape)
                for spec, value in zip(base.values, graph.values, strict=True)
            ]
            for base in bases
        ]
        reductions = _find_reductions(graph, annotated.values())
        is_small = len(graph.operations) <= MAX_PERMUTED_OPERATIONS
        around: list[list[tuple[Sharding, ...]]] = [[] for _ in graph.values]
        known_ways: dict[object, _Ways] = {}
        for operation in graph.operations:
            places = (*operation.operands, *operation.results)
            # A model repeats its layers: equal operations in equal surroundings share their ways,
            # and all that follows from them.
            key = (
                operation.operator,
                operation.rule,
                str(operation.attributes),
                *[id(base[value]) for base in self.known for value in places],
            )
            ways = known_ways.get(key)
            if ways is None:
                shapes = [graph.values[value].shape for value in places]
                known_shardings = [[base[value] for value in places] for base in self.known]
                options = ways_of(
                    operation, shapes, pieces, known_shardings, table.mesh, reductions, is_small
                )
                ways = known_ways[key] = _Ways.of(tuple(options))
            self.ways.append(ways)
            # The shardings that a way reads and computes become candidates of the values around it.
            for value, shardings in zip(places, ways.different, strict=True):
                around[self.variables[value]].append(shardings)
        outputs = set(graph.outputs)
        known_values: dict[object, list[Sharding]] = {}
        for number in range(len(graph.values)):
            if self.variables[number] != number:
                # Inputs come first.
                self.values.append(self.values[self.variables[number]])
                continue
            annotation, is_output = annotated.get(number), number in outputs or number in free
            bases_of = [base[number] for base in self.known]
            value_key = (annotation, is_output, *map(id, bases_of), *map(id, around[number]))
            candidates = known_values.get(value_key)
            if candidates is None:
                adjacent = dict.fromkeys(itertools.chain.from_iterable(around[number]))
                if number in free:
                    adjacent |= dict.fromkeys(cuts_of(graph.values[number].shape, pieces))
                candidates = shardings_of(annotation, adjacent, bases_of, is_output)
                known_values[value_key] = candidates
            self.values.append(candidates)
        self.reads = CommonReads(list(self._find_ends()))
        count = len(graph.values)
        self._computing = [
            CostTable((count + number,), self._tabulate_compute(number))
            for number in range(len(graph.operations))
        ]

    def fill(self, *, bounds: bool) -> None:
        """Find the seconds of movements by bounds or formulas, or by programs if priced."""
        for moves in self._moves.values():
            moves.fill(bounds=bounds)
        self._is_changed = True

    def charge(self, charges: Sequence[CostTable]) -> None:
        """Replace the penalties that are added to choices, such as prices of memory."""
        before, self._charges = self._charges, list(charges)
        self._is_changed = True
        if [charge.variables for charge in before] != [charge.variables for charge in charges]:
            self._sum = None

    def sum(self, decided: Decisions = NOTHING, parts: Parts | None = None) -> CostSum:
        """Return the seconds of all choices; movements as they are priced by then.

        Args:
            decided: movements that are made once for all that read a value so.
            parts: what each reader pays of the others, for bounds; all of it when None.
        """
        if self._sum is None:
            value_counts = [
                len(shardings) if self.variables[number] == number else 1
                for number, shardings in enumerate(self.values)
            ]
            choices = (*value_counts, *(len(ways.options) for ways in self.ways))
            self._sum = CostSum(choices, [*self._fixed, *self._tabulate_moves()])
            self._answers_s = {}
        elif self._is_changed:
            self._sum = self._sum.replaced([*self._fixed, *self._tabulate_moves()])
            self._answers_s = {}
        self._is_changed = False
        if parts is None and not decided.once:
            return self._sum
        moves = self._sum.tables[len(self._fixed) :]
        self.reads.change(moves, decided, parts)
        return self._sum.replaced([*self._fixed, *moves])

    @property
    def _fixed(self) -> list[CostTable]:
        """The tables that movements' prices leave as they are."""
        return [*self._computing, *self._charges]

    def _tabulate_moves(self) -> list[CostTable]:
        """Return the seconds of the movements at all ends, if each reader pays for its own."""
        seconds_s = {id(between): between.seconds_s for between in self._between}
        return [
            # An output has a single sharding that was requested: the only column.
            CostTable((ends.value,), seconds_s[id(ends.between)][:, 0])
            if ends.way is None
            else CostTable((ends.value, ends.way), seconds_s[id(ends.between)])
            for ends in self.reads.ends
        ]

    def shared(self, chosen: Sequence[int]) -> Decisions:
        """Return the movements of an answer that several readers share: made once each.

        With these `sum` is what the answer takes, and no less than what any other does.
        """
        return Decisions(frozenset(self.reads.shared(chosen)))

    def seconds_s(self, chosen: Sequence[int]) -> float:
        """Return the time of an answer, with each movement that readers share made once."""
        total = self.sum()
        key = tuple(chosen)
        answer_s = self._answers_s.get(key)
        if answer_s is None:
            answer_s = self._answers_s[key] = total.value(chosen) - self.reads.saved_s(chosen)
        return answer_s

    def computing_s(self, chosen: Sequence[int]) -> float:
        """Return the computation time of an answer."""
        return math.fsum(
            [table.seconds_s.item(chosen[table.variables[0]]) for table in self._computing]
        )

    def price(self, answers: Iterable[Sequence[int]]) -> bool:
        """Price by its program each movement of some answers. Whether that was not done before."""
        # Dictionaries for their order, so that prices are found in the same order each time.
        new: dict[int, dict[Move, None]] = {}
        for chosen in answers:
            for ends in self.reads.ends:
                between = ends.between
                if isinstance(between, Between):
                    row, column = ends.places(chosen)
                    own_number, other_number = between.own[row], between.others[column]
                    if own_number != other_number:
                        move = (
                            (own_number, other_number)
                            if between.is_read
                            else (other_number, own_number)
                        )
                        new.setdefault(id(between.moves), {})[move] = None
        has_new = False
        for moves in self._moves.values():
            has_new |= moves.price(new.get(id(moves), ()))
        self._is_changed |= has_new
        return has_new

    def _tabulate_compute(self, number: int) -> FloatArray:
        """Return the compute time of an operation in each of its ways."""
        operation, ways = self.graph.operations[number], self.ways[number]
        if operation.operator == WITH_SHARDING:
            return np.zeros(len(ways.options))
        places = (*operation.operands, *operation.results)
        tensors = tuple((self.graph.values[v].shape, self.elements[v]) for v in places)
        key = (id(ways), operation.operator, tensors, str(operation.attributes))
        seconds_s = self._seconds.get(key)
        if seconds_s is None:
            seconds_s = self._seconds[key] = self.model.computing_s(
                operation.operator, operation.rule, ways.cuts, tensors, operation.attributes
            )
        return seconds_s

    def _find_ends(self) -> Iterator[MoveEnds]:
        """Yield the possible movements around operations, and to requested shardings."""
        count = len(self.graph.values)
        for tensor, element in zip(self.graph.values, self.elements, strict=True):
            key = (tensor.shape, element)
            if key not in self._moves:
                self._moves[key] = ValueMovements(self.model, tensor.shape, element)
            self._kinds.append(self._moves[key])
        numbers: dict[tuple[int, int], tuple[int, ...]] = {}
        betweens: dict[tuple[int, int, bool], Between] = {}

        def find_numbers(moves: ValueMovements, shardings: Sequence[Sharding]) -> tuple[int, ...]:
            # Equal values, and equal operations, share their lists.
            cached = numbers.get((id(moves), id(shardings)))
            if cached is None:
                cached = numbers[id(moves), id(shardings)] = moves.numbers(shardings)
            return cached

        def find_between(
            moves: ValueMovements, own: tuple[int, ...], others: tuple[int, ...], is_read: bool
        ) -> Between:
            # Lists are those of `numbers`, so their identity includes the kind of values.
            key = (id(own), id(others), is_read)
            cached = betweens.get(key)
            if cached is None:
                cached = betweens[key] = Between(moves, own, others, is_read)
                self._between.append(cached)
            return cached

        own = list(map(find_numbers, self._kinds, self.values))
        around: dict[tuple[int, ...], list[tuple[int, Between | EdgeMoves]]] = {}
        for number, (operation, ways) in enumerate(
            zip(self.graph.operations, self.ways, strict=True)
        ):
            places = (*operation.operands, *operation.results)
            surroundings = (id(ways), *[id(own[value]) for value in places])
            numbered = around.get(surroundings)
            if numbered is None:
                numbered = around[surroundings] = []
                for position, (value, others) in enumerate(
                    zip(places, ways.shardings, strict=True)
                ):
                    moves = self._kinds[value]
                    is_read = position < len(operation.operands)
                    way_numbers = find_numbers(moves, others)
                    numbered.append(
                        (position, find_between(moves, own[value], way_numbers, is_read))
                    )
                    if not is_read or not ways.are_placed:
                        continue
                    runs_with = [
                        None if way.runs_with is None else way.runs_with[position]
                        for way in ways.options
                    ]
                    for edge in EdgeMoves.of(moves, own[value], way_numbers, others, runs_with):
                        self._between.append(edge)
                        numbered.append((position, edge))
            for position, between in numbered:
                value = places[position]
                yield MoveEnds(self.variables[value], count + number, between, value)
        for place, target in self.asked.items():
            value = self.graph.outputs[place]
            moves = self._kinds[value]
            between = find_between(moves, own[value], moves.numbers([target]), True)
            yield MoveEnds(self.variables[value], None, between, value)

    def start(self, base: int) -> tuple[int, ...]:
        """Return the choices nearest to the result of another strategy."""
        return self.nearest(self.known[base])

    def nearest(self, targets: Sequence[Sharding]) -> tuple[int, ...]:
        """Return the choices nearest to shardings of all values."""
        chosen = []
        for number, (shardings, target) in enumerate(zip(self.values, targets, strict=True)):
            # Compared by their cuts alone: candidates are closed and without replicated axes.
            place = _find_nearest(target.dims, [sharding.dims for sharding in shardings])
            # A tied value makes no choice: `shardings` reads its input's.
            chosen.append(place if self.variables[number] == number else 0)
        return (*chosen, *([0] * len(self.ways)))

    def shardings(self, chosen: Sequence[int]) -> list[Sharding]:
        """Return the sharding of each value in an answer."""
        return [
            candidates[chosen[variable]]
            for candidates, variable in zip(self.values, self.variables, strict=True)
        ]

    def answer(self, chosen: Sequence[int], base: PropagatedGraph) -> PropagatedGraph:
        """Return the graph with what was chosen."""
        count = len(self.graph.values)
        shardings = self.shardings(chosen)
        runs = tuple(
            ways.run(place, len(operation.operands))
            for operation, ways, place in zip(
                self.graph.operations, self.ways, chosen[count:], strict=True
            )
        )
        outputs = tuple(
            self.table.decoded(self.asked.get(place, shardings[value].plain))
            for place, value in enumerate(self.graph.outputs)
        )
        values = tuple(map(self.table.decoded, shardings))
        return PropagatedGraph(self.graph, base.mesh, values, outputs, runs)


def _find_nearest(target: Sequence[AxisParts], candidates: Sequence[Sequence[AxisParts]]) -> int:
    """Return the place of the requested sharding, or of the first with the most equal dims."""
    if target in candidates:
        return candidates.index(target)
    return max(range(len(candidates)), key=lambda place: sum(map(eq, target, candidates[place])))


def _find_reductions(graph: Graph, shardings: Iterable[Sharding]) -> tuple[str, ...]:
    """Return the reductions of all contributions that a graph may have."""
    reductions = [
        operation.rule.reduction_operator
        for operation in graph.operations
        if operation.rule.reduction
    ]
    reductions += [sharding.reduction for sharding in shardings if sharding.reduction is not None]
    return tuple(dict.fromkeys(["sum", *reductions]))
