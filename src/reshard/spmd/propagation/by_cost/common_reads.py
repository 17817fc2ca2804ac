"""Common reads: values that several operations read in one other sharding, moved once.

An array keeps what it was moved to. What moves therefore depends on all readers of a value
together, while tables have one reader each. Two sums of such tables say it on either side::

    moved once     some movements of some values are paid by the first reader, whatever is read, and
                   cost the others nothing: never less than what is moved, and as much where
                   several readers do read it
    in parts       each reader pays a part of a movement, all parts together the whole: never more
                   than what is moved, and as much where those that have parts all read it

So an answer is made better by taking the movements that it shares as moved once, and looking for
the least sum then. That nothing is better is shown by parts, and by deciding, one after the other,
which of the movements are made once (`cost_propagation`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from reshard.spmd.propagation.by_cost.cost_table import CostTable, FloatArray
from reshard.spmd.propagation.by_cost.edge_moves import EdgeMoves
from reshard.spmd.propagation.by_cost.movement_tables import Between

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
        """The row and the column of an answer."""
        return chosen[self.value], 0 if self.way is None else chosen[self.way]


@dataclass(frozen=True, slots=True)
class Decisions:
    """What is decided of movements that may be shared.

    Args:
        once: those that the first reader pays, whatever is read.
        apart: those that each reader pays wholly.
    """

    once: frozenset[SharedMove] = frozenset()
    apart: frozenset[SharedMove] = frozenset()

    def both(self, move: SharedMove) -> tuple[Decisions, Decisions]:
        """What else may be decided of a movement: the two together leave nothing out."""
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
        groups: of each value that is read more than once, the places of its reads in `ends`, and
            likewise of its edges.
    """

    ends: Sequence[MoveEnds]
    groups: list[list[int]] = field(init=False)
    _changed: dict[object, tuple[FloatArray, FloatArray | None, FloatArray]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        of: dict[tuple[int, type], list[int]] = {}
        for place, one in enumerate(self.ends):
            if one.between.is_read:
                of.setdefault((one.number, type(one.between)), []).append(place)
        self.groups = [places for places in of.values() if len(places) > 1]

    def targets(self, chosen: Sequence[int]) -> Iterable[tuple[int, list[int | None]]]:
        """What each reader of each group needs in an answer, None where it lies so."""
        for number, places in enumerate(self.groups):
            ends = [self.ends[place] for place in places]
            yield number, [one.between.target(*one.places(chosen)) for one in ends]

    def shared(self, chosen: Sequence[int]) -> dict[SharedMove, int]:
        """The movements that several readers need in an answer, and how many of them."""
        return {
            (number, target): count
            for number, targets in self.targets(chosen)
            for target, count in Counter(targets).items()
            if target is not None and count > 1
        }

    def parts(self, chosen: Sequence[int]) -> dict[SharedMove, tuple[float, ...]]:
        """Parts with which tables in parts say as much of an answer as is moved in it."""
        found = {}
        for number, targets in self.targets(chosen):
            for target, count in Counter(targets).items():
                if target is not None:
                    found[number, target] = tuple(
                        [1 / count if one == target else 0.0 for one in targets]
                    )
        return found

    def saved_s(self, chosen: Sequence[int]) -> float:
        """By how much tables say more of an answer than is moved where each reader pays for it."""
        shared = self.shared(chosen)
        return math.fsum(
            [(count - 1) * self._move_s(move, chosen) for move, count in shared.items()]
        )

    def _move_s(self, move: SharedMove, chosen: Sequence[int]) -> float:
        """The seconds of a movement of a group's value."""
        first = self.ends[self.groups[move[0]][0]]
        row = chosen[first.value]
        return first.between.seconds_to((move[1],)).item(row, 0)

    def gaps_s(
        self, chosen: Sequence[int], parts: Parts, decided: Decisions
    ) -> dict[SharedMove, float]:
        """By how much tables in parts say less than what is moved, for what is not decided."""
        found = {}
        for number, targets in self.targets(chosen):
            for target in dict.fromkeys(targets):
                if target is None:
                    continue
                move = (number, target)
                if move in decided.once or move in decided.apart:
                    continue
                of = parts.get(move)
                share = (
                    targets.count(target) / len(targets)
                    if of is None
                    else sum(part for part, one in zip(of, targets, strict=True) if one == target)
                )
                found[move] = (1 - share) * self._move_s(move, chosen)
        return found

    def change(
        self, tables: list[CostTable], decided: Decisions, parts: Parts | None = None
    ) -> None:
        """Change the tables of reads, in which each reader pays each movement wholly.

        Args:
            tables: one for each of the ends.
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
                        own = parts.get(move)
                        shares[target] = 1 / len(places) if own is None else own[position]
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
        """A table with a part of each column, and what is paid whatever is read."""
        before_s = table.seconds_s
        paid_s = between.seconds_to(paid) if paid else None
        if paid_s is None and columns.count(1.0) == len(columns):
            return table
        # Equal ones stay one object, by which layers alike are told. What they were made of is
        # kept, so that no other array gets their identities.
        key = (id(before_s), id(paid_s), columns)
        known = self._changed.get(key)
        if known is None:
            has_ways = before_s.ndim == 2
            after_s = before_s * np.array(columns if has_ways else columns[0])
            if paid_s is not None:
                after_s += paid_s.sum(axis=1, keepdims=True) if has_ways else paid_s.sum(axis=1)
            known = self._changed[key] = (before_s, paid_s, after_s)
        return CostTable(table.variables, known[2])
