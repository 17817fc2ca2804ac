"""Movements of values: their times for all choices at once, and values moved once for all readers.

Values of equal shape and element type share a square table, with a row for each sharding that some
value or operation has of them and a column for the same as a target. The tables of a sum are parts
of it: a value's candidates by the shardings that an operation reads, or computes::

    value's candidates   0   1   4            all shardings of the kind
    operation reads          1   1   0   7    (a column for each way)

Seconds are estimates or bounds at first, and are replaced by those of programs as movements are
priced.

*Halos* are data that operators such as convolutions need from other shards. An operand moves to the
sharding that its operator reads, and from there to the sharding with halos. A value that is in the
first sharding already keeps the second, for all operators with the same halos::

    value x: y --- halos ---> convolution          moved once
                         ---> its gradient
    value x: x --- reads y --- halos ---> ...      halos of an array that is not kept: each time

An array keeps the shardings that it was moved to, so the movements of a value depend on all of its
readers together, while each table has a single reader. Two sums of tables bound the time:

    moved once     some movements of some values are paid by the first reader, whatever is read, and
                   cost the others nothing: an upper bound, exact if several readers do read it
    in parts       each reader pays a part of a movement, all parts together the whole: a lower
                   bound, exact if all that have parts read it

An answer is improved by taking its shared movements as moved once and minimizing again. That no
answer is better is proven with parts, and by deciding of each movement in turn whether it is made
once (`cost_propagation`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from reshard.dtypes import DType
from reshard.spmd.propagation.axes import Sharding, are_alike
from reshard.spmd.propagation.by_cost.cost_model import CostModel
from reshard.spmd.propagation.by_cost.factor_graph import CostTable, FloatArray

NO_EDGES = -1
EdgePair = tuple[int, Sharding]
"""The number of the sharding that is read, and the one with halos."""
Move = tuple[int, int]
"""From a sharding to another, by their numbers."""


@dataclass(slots=True)
class ValueMovements:
    """The movements of all values of a shape and element type, and the halos they may need.

    >>> from reshard import DeviceMesh, dtype, spec
    >>> from reshard.spmd.propagation.axes import AxisTable
    >>> from reshard.spmd.propagation.by_cost.cost_model import Machine
    >>> mesh = DeviceMesh.of(x=4)
    >>> model = CostModel(AxisTable.of(mesh), Machine())
    >>> moves = ValueMovements(model, (1024,), dtype("float32"))
    >>> cut, whole = moves.numbers(model.table.encoded(spec(mesh, text)) for text in ("x", "-"))
    >>> moves.fill(bounds=False)
    >>> moves.price([(cut, whole)])
    True
    >>> moves.table((cut,), (whole, cut), True)[0].tolist() == [moves.priced[cut, whole], 0.0]
    True
    """

    model: CostModel
    shape: tuple[int, ...]
    element: DType
    priced: dict[Move, float] = field(default_factory=dict)
    _shardings: dict[Sharding, int] = field(default_factory=dict)
    _every_s: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))
    _tables: dict[tuple[tuple[int, ...], tuple[int, ...], bool], FloatArray] = field(
        default_factory=dict
    )
    edges: dict[EdgePair, int] = field(default_factory=dict)
    edges_s: list[float] = field(default_factory=list)

    def numbers(self, shardings: Iterable[Sharding]) -> tuple[int, ...]:
        """Return the number of each sharding; new shardings are numbered."""
        numbered = self._shardings
        return tuple([numbered.setdefault(sharding, len(numbered)) for sharding in shardings])

    def fill(self, *, bounds: bool) -> None:
        """Find the seconds of all movements: by bounds or by formulas, or by programs if priced."""
        shardings = list(self._shardings)
        ask = self.model.bounds_s if bounds else self.model.movements_s
        self._every_s = ask(shardings, shardings, self.shape, self.element.itemsize_bytes)
        for move, seconds_s in self.priced.items():
            self._every_s[move] = seconds_s
        # Tables are parts of the times that were replaced.
        self._tables = {}

    def table(self, own: tuple[int, ...], others: tuple[int, ...], is_read: bool) -> FloatArray:
        """Return the seconds between shardings at their current prices.

        Args:
            own: the shardings of a value by number, for each row.
            others: those of the ways of an operation, for each column.
            is_read: whether the value moves to the others, not from them.
        """
        seconds_s = self._tables.get((own, others, is_read))
        if seconds_s is None:
            every_s = self._every_s if is_read else self._every_s.T
            rows, columns = (np.array(indices, dtype=np.int64) for indices in (own, others))
            seconds_s = self._tables[own, others, is_read] = every_s[rows[:, None], columns]
        return seconds_s

    def edge(self, read: int, sharding: Sharding, runs_with: Sharding) -> int:
        """Return the number of the halos that a way needs of what it reads, or `NO_EDGES`."""
        if are_alike(sharding, runs_with):
            return NO_EDGES
        number = self.edges.setdefault((read, runs_with), len(self.edges))
        if number == len(self.edges_s):
            # They are few, so their programs are found immediately.
            self.edges_s.append(self.model.program_s(sharding, runs_with, self.shape, self.element))
        return number

    def price(self, moves: Iterable[Move]) -> bool:
        """Price movements by their programs. Return whether any was unpriced before."""
        shardings = list(self._shardings)
        new_s: dict[Move, float] = {}
        for move in moves:
            source, target = shardings[move[0]], shardings[move[1]]
            if move not in self.priced and not are_alike(source, target):
                seconds_s = self.model.program_s(source, target, self.shape, self.element)
                self.priced[move] = self._every_s[move] = new_s[move] = seconds_s
        if new_s:
            self._tables = {key: _repriced(*key, s, new_s) for key, s in self._tables.items()}
        return bool(new_s)


def _repriced(
    own: tuple[int, ...],
    others: tuple[int, ...],
    is_read: bool,
    seconds_s: FloatArray,
    moves_s: Mapping[Move, float],
) -> FloatArray:
    """Return a table with new prices of some movements.

    A table without these movements is returned itself: tables are compared by identity.
    """
    repriced: FloatArray | None = None
    own_set, others_set = set(own), set(others)
    for move, new_s in moves_s.items():
        own_end, other_end = move if is_read else move[::-1]
        if own_end in own_set and other_end in others_set:
            repriced = seconds_s.copy() if repriced is None else repriced
            # Several ways may read the same sharding, but a value has each candidate once.
            columns = [column for column, number in enumerate(others) if number == other_end]
            repriced[own.index(own_end), columns] = new_s
    return seconds_s if repriced is None else repriced


@dataclass(frozen=True, slots=True, eq=False)
class Between:
    """Movements of equal values around equal operations.

    Args:
        moves: of values like them.
        own: the shardings that such a value may have.
        others: in which the operation reads or makes it, or what was asked for.
        is_read: whether it goes to those, not from them.
    """

    moves: ValueMovements
    own: tuple[int, ...]
    others: tuple[int, ...]
    is_read: bool

    @property
    def seconds_s(self) -> FloatArray:
        """A row for each sharding of the value, a column for each of the others."""
        return self.moves.table(self.own, self.others, self.is_read)

    def seconds_to(self, targets: tuple[int, ...]) -> FloatArray:
        """Return the seconds from each sharding of the value, a row, to each target."""
        return self.moves.table(self.own, targets, True)

    def target(self, row: int, column: int) -> int | None:
        """Return the other end of the movement at a place, or None if nothing moves."""
        other = self.others[column]
        return None if other == self.own[row] else other


@dataclass(frozen=True, slots=True, eq=False)
class EdgeMoves:
    """The edges that equal operations need of equal values, for all choices at once.

    Args:
        moves: those of values like them.
        own: the shardings that such a value may have, by their numbers.
        reads: which each way reads.
        others: the edges that each way needs, or `NO_EDGES`.
        is_read: whether these are the edges of the value as it lies, which it keeps; else those of
            the array that it is moved to.
    """

    moves: ValueMovements
    own: tuple[int, ...]
    reads: tuple[int, ...]
    others: tuple[int, ...]
    is_read: bool

    @classmethod
    def of(
        cls,
        moves: ValueMovements,
        own: tuple[int, ...],
        reads: tuple[int, ...],
        shardings: Sequence[Sharding],
        runs_with: Sequence[Sharding | None],
    ) -> tuple[EdgeMoves, ...]:
        """Return the edges of an operand, those that it keeps and the others, if there are any.

        Args:
            moves, own, reads: those of the value.
            shardings: that each way reads.
            runs_with: with which each way runs; None if it is that which it reads.
        """
        others = tuple(
            [
                NO_EDGES if target is None else moves.edge(number, sharding, target)
                for number, sharding, target in zip(reads, shardings, runs_with, strict=True)
            ]
        )
        if all(other == NO_EDGES for other in others):
            return ()
        return tuple([cls(moves, own, reads, others, is_kept) for is_kept in (True, False)])

    @property
    def seconds_s(self) -> FloatArray:
        """A row for each sharding of the value, a column for each way."""
        every_s = [0.0 if other == NO_EDGES else self.moves.edges_s[other] for other in self.others]
        # A value keeps the halos of the sharding that it is in, and not of a moved copy.
        lies_so = np.equal(np.array(self.own)[:, None], np.array(self.reads))
        return np.where(lies_so == self.is_read, np.array(every_s), 0.0)

    def seconds_to(self, targets: tuple[int, ...]) -> FloatArray:
        """Return the seconds of some edges that each sharding of the value, a row, keeps."""
        read_by = {number: read for (read, _), number in self.moves.edges.items()}
        every_s = np.array([self.moves.edges_s[target] for target in targets])
        reads = np.array([read_by[target] for target in targets])
        return np.where(np.equal(np.array(self.own)[:, None], reads), every_s, 0.0)

    def target(self, row: int, column: int) -> int | None:
        """Return the halos that are moved in a way, or None if there are none."""
        other = self.others[column]
        lies_so = self.own[row] == self.reads[column]
        return other if other != NO_EDGES and lies_so == self.is_read else None


SharedMove = tuple[int, int]
"""A movement that may be shared: the number of a group of reads, and that of the target."""
Parts = Mapping[SharedMove, tuple[float, ...]]


class MoveEnds(NamedTuple):
    """Movements of a value, from each sharding it may have to each that is read, or back.

    Args:
        value, way: variables; no way where a sharding was asked for.
        between: the movements.
        number: of the value, which may have the variable of another.
    """

    value: int
    way: int | None
    between: Between | EdgeMoves
    number: int

    def places(self, chosen: Sequence[int]) -> tuple[int, int]:
        """Return the row and the column of an answer."""
        return chosen[self.value], 0 if self.way is None else chosen[self.way]


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions about movements that may be shared.

    Args:
        once: those that the first reader pays, whatever is read.
        apart: those that each reader pays wholly.
    """

    once: frozenset[SharedMove] = frozenset()
    apart: frozenset[SharedMove] = frozenset()

    def both(self, move: SharedMove) -> tuple[Decisions, Decisions]:
        """Return the two decisions about a movement, which together exclude nothing."""
        return (
            Decisions(self.once | {move}, self.apart),
            Decisions(self.once, self.apart | {move}),
        )


NOTHING = Decisions()


@dataclass(slots=True)
class CommonReads:
    """The reads of a graph whose movements may be shared.

    Args:
        ends: all movements around operations and to what was asked for.
        groups: for each value that is read more than once, the places of its reads in `ends`, and
            of its halos.
    """

    ends: Sequence[MoveEnds]
    groups: list[list[int]] = field(init=False)
    _changed: dict[object, tuple[FloatArray, FloatArray | None, FloatArray]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        reads: dict[tuple[int, type], list[int]] = {}
        for place, end in enumerate(self.ends):
            if end.between.is_read:
                reads.setdefault((end.number, type(end.between)), []).append(place)
        self.groups = [places for places in reads.values() if len(places) > 1]

    def targets(self, chosen: Sequence[int]) -> Iterable[tuple[int, list[int | None]]]:
        """Yield the target of each reader of each group in an answer; None if nothing moves."""
        for number, places in enumerate(self.groups):
            ends = [self.ends[place] for place in places]
            yield number, [end.between.target(*end.places(chosen)) for end in ends]

    def shared(self, chosen: Sequence[int]) -> dict[SharedMove, int]:
        """Return the movements that several readers need in an answer, and how many of them."""
        return {
            (number, target): count
            for number, targets in self.targets(chosen)
            for target, count in Counter(targets).items()
            if target is not None and count > 1
        }

    def parts(self, chosen: Sequence[int]) -> dict[SharedMove, tuple[float, ...]]:
        """Return parts with which the tables in parts are exact for an answer."""
        shares = {}
        for number, targets in self.targets(chosen):
            for target, count in Counter(targets).items():
                if target is not None:
                    shares[number, target] = tuple(
                        [1 / count if other == target else 0.0 for other in targets]
                    )
        return shares

    def saved_s(self, chosen: Sequence[int]) -> float:
        """Return the overestimate of an answer if each reader pays for its movement."""
        shared = self.shared(chosen)
        return math.fsum(
            [(count - 1) * self._move_s(move, chosen) for move, count in shared.items()]
        )

    def _move_s(self, move: SharedMove, chosen: Sequence[int]) -> float:
        """Return the seconds of a movement of a group's value."""
        first = self.ends[self.groups[move[0]][0]]
        row = chosen[first.value]
        return first.between.seconds_to((move[1],)).item(row, 0)

    def gaps_s(
        self, chosen: Sequence[int], parts: Parts, decided: Decisions
    ) -> dict[SharedMove, float]:
        """Return the underestimate of tables in parts, for each undecided movement."""
        gaps = {}
        for number, targets in self.targets(chosen):
            for target in dict.fromkeys(targets):
                if target is None:
                    continue
                move = (number, target)
                if move in decided.once or move in decided.apart:
                    continue
                move_parts = parts.get(move)
                share = (
                    targets.count(target) / len(targets)
                    if move_parts is None
                    else sum(
                        part
                        for part, other in zip(move_parts, targets, strict=True)
                        if other == target
                    )
                )
                gaps[move] = (1 - share) * self._move_s(move, chosen)
        return gaps

    def change(
        self, tables: list[CostTable], decided: Decisions, parts: Parts | None = None
    ) -> None:
        """Change the tables of reads, in which each reader pays each movement wholly.

        Args:
            tables: those of the ends.
            decided: movements that are made once, or are not shared.
            parts: of the others, even ones of those that are not in it; whole when None.
        """
        paid: dict[int, list[int]] = {}
        for number, target in sorted(decided.once):
            paid.setdefault(number, []).append(target)
        for number in paid if parts is None else range(len(self.groups)):
            places = self.groups[number]
            for position, place in enumerate(places):
                end = self.ends[place]
                shares: dict[int, float] = {}
                for target in dict.fromkeys(end.between.others):
                    move = (number, target)
                    if move in decided.once:
                        shares[target] = 0.0
                    elif parts is None or move in decided.apart:
                        shares[target] = 1.0
                    else:
                        move_parts = parts.get(move)
                        shares[target] = (
                            1 / len(places) if move_parts is None else move_parts[position]
                        )
                columns = tuple([shares[target] for target in end.between.others])
                targets = tuple(paid.get(number, ())) if position == 0 else ()
                tables[place] = self._change(tables[place], end.between, columns, targets)

    def _change(
        self,
        table: CostTable,
        between: Between | EdgeMoves,
        columns: tuple[float, ...],
        paid: tuple[int, ...],
    ) -> CostTable:
        """Return a table with a part of each column, and what is paid whatever is read."""
        before_s = table.seconds_s
        paid_s = between.seconds_to(paid) if paid else None
        if paid_s is None and columns.count(1.0) == len(columns):
            return table
        # Equal tables stay the same object, by which equal layers are recognized. Their sources are
        # kept, so that no other array gets their identities.
        key = (id(before_s), id(paid_s), columns)
        cached = self._changed.get(key)
        if cached is None:
            has_ways = before_s.ndim == 2
            after_s = before_s * np.array(columns if has_ways else columns[0])
            if paid_s is not None:
                after_s += paid_s.sum(axis=1, keepdims=True) if has_ways else paid_s.sum(axis=1)
            cached = self._changed[key] = (before_s, paid_s, after_s)
        return CostTable(table.variables, cached[2])
