"""Least sums of tables: one choice for each variable, by elimination or descent.

Each variable has a number of choices, each table gives seconds for the choices of a few of them.

*Elimination* is exact: a variable is taken out by adding the tables that have it and keeping, for
each choice of the others, the least; backwards, the choices are read off. Variables whose tables
stay small go first (Dechter, "Bucket elimination", 1999). Where a table would become too large, it
stops, or goes on with the tables taken apart, and then is near the least sum::

    f(a, b) + g(b, c)       c out: h(b) = min over c of g(b, c), at c(b)
    f(a, b) + h(b)          b out: k(a) = min over b of f(a, b) + h(b), at b(a)
    k(a)                    a is where k is least; then b(a), then c(b)

Forwards again, each joined table gets what lies outside of it, and then shows the least sum for
every single choice: a choice whose least sum is above one that is known can be left out.

*Descent* starts from given choices and changes one variable at a time, with the inner ones beside
it, as long as that helps. In *windows*, all variables near one are chosen at once, by elimination
of their tables.

Both give the same answer on every machine: sums are made in one order, and of equals the first
choice is taken.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from reshard.spmd.propagation.by_cost.cost_table import (
    CostTable,
    FloatArray,
    IntArray,
    joined_table,
    least_over,
    taken_apart,
)

# Entries of the largest table that elimination makes, of all variables and of a window's.
LARGEST_TABLE = 1 << 19
LARGEST_OF_WINDOW = 1 << 16
# And of one of which is kept what was found.
MOST_KEPT = 1 << 14
# How often all windows are looked at.
MOST_PASSES = 3


class Elimination(NamedTuple):
    """A variable taken out of some tables.

    Args:
        variable: that is taken out.
        scope: the variables of the tables, this one first.
        joined: the tables.
        left: the least seconds then, a table of the rest, or several that come to no more.
        best: the variable's choice, for choices of the rest that have been asked for; None where
            the tables are too large together.
    """

    variable: int
    scope: tuple[int, ...]
    joined: list[CostTable]
    left: list[CostTable]
    best: dict[tuple[int, ...], int] | None


class _Joined(NamedTuple):
    """Tables, which are kept, and what comes of their variable taken out, as in `Elimination`."""

    tables: list[CostTable]
    left_s: FloatArray
    best: dict[tuple[int, ...], int]


@dataclass(slots=True)
class _Known:
    """What was found in a sum, and in those with some other tables, for the same tables in each.

    Tables are told apart by the memory they are in, so all of them are kept.
    """

    costs: dict[object, FloatArray] = field(default_factory=dict)
    least: dict[object, int] = field(default_factory=dict)
    windows: dict[object, tuple[int, ...] | None] = field(default_factory=dict)
    joined: dict[object, _Joined] = field(default_factory=dict)
    _kept: dict[int, FloatArray] = field(default_factory=dict)

    def keep(self, tables: Iterable[CostTable]) -> None:
        """Tables by which something may be known."""
        self._kept.update((id(one.seconds_s), one.seconds_s) for one in tables)


@dataclass(slots=True)
class CostSum:
    """A sum of tables.

    Args:
        choices: how many each variable has.
        tables: what is added.

    >>> one, two = np.array([0.0, 1.0]), np.array([[5.0, 6.0], [0.0, 9.0]])
    >>> tables = [CostTable((0,), one), CostTable((0, 1), two)]
    >>> one = CostSum((2, 2), tables)
    >>> one.eliminated(), one.value((1, 0))
    ((1, 0), 1.0)
    """

    choices: tuple[int, ...]
    tables: list[CostTable]
    _of: list[list[int]] = field(init=False)
    _known: _Known = field(init=False)

    def __post_init__(self) -> None:
        self._known = _Known()
        self._known.keep(self.tables)
        self._of = [[] for _ in self.choices]
        for number, table in enumerate(self.tables):
            for variable in table.variables:
                self._of[variable].append(number)

    def replaced(self, tables: list[CostTable]) -> CostSum:
        """The sum of as many other tables, in each place one of the same variables."""
        found = copy(self)
        found.tables = tables
        self._known.keep(tables)
        return found

    def value(self, chosen: Sequence[int]) -> float:
        """The sum for choices of all variables."""
        # fsum rounds once, so that the sum does not depend on the order of the tables.
        return math.fsum(
            [
                seconds_s.item(*[chosen[variable] for variable in variables])
                for variables, seconds_s in self.tables
            ]
        )

    def eliminated(self, largest: int = LARGEST_TABLE) -> tuple[int, ...] | None:
        """The choices of the least sum; None where a table would be larger than `largest`."""
        taken = self._take_out(largest)
        return None if taken is None else self._read_off(taken)

    def nearly_eliminated(self, largest: int = LARGEST_TABLE) -> tuple[tuple[int, ...], bool]:
        """Choices of a low sum, and whether it is the least for sure.

        Tables that would be larger than `largest` are taken apart: see `taken_apart`.
        """
        taken = self._take_out(largest, apart=True) or []
        return self._read_off(taken), all(one.best is not None for one in taken)

    def _read_off(self, taken: list[Elimination]) -> tuple[int, ...]:
        # Backwards: when a variable is read off, the rest of its tables is chosen already.
        chosen = [0] * len(self.choices)
        for one in reversed(taken):
            at = tuple([chosen[v] for v in one.scope[1:]])
            known = {} if one.best is None else one.best
            if at not in known:
                costs = np.zeros(self.choices[one.variable])
                for table in one.joined:
                    costs += self._slice_table(table, (one.variable,), chosen)
                known[at] = int(costs.argmin())
            chosen[one.variable] = known[at]
        return tuple(chosen)

    def least_of_choices(self, largest: int = LARGEST_TABLE) -> list[FloatArray] | None:
        """The least sum with each choice of each variable, up to rounding; None as `eliminated`.

        >>> one, two = np.array([0.0, 1.0]), np.array([[5.0, 6.0], [0.0, 9.0]])
        >>> tables = [CostTable((0,), one), CostTable((0, 1), two)]
        >>> [least_s.tolist() for least_s in CostSum((2, 2), tables).least_of_choices()]
        [[5.0, 1.0], [1.0, 6.0]]
        """
        taken = self._take_out(largest)
        if taken is None:
            return None
        # Variables that share no table, directly or by others, are sums of their own.
        # None is taken apart here, so that each leaves one table.
        lefts = [one.left[0] for one in taken]
        parts_s = [float(left.seconds_s) for left in lefts if not left.variables]
        # Tables of variables that have one choice alone are in none of those.
        parts_s += [one.seconds_s.item() for one in self.tables if one.seconds_s.size == 1]
        whole_s = math.fsum(parts_s)
        made = set(map(id, lefts))
        outside_s: dict[int, FloatArray] = {}
        found: list[FloatArray] = [np.full(1, whole_s)] * len(self.choices)
        for one, left in zip(reversed(taken), reversed(lefts), strict=True):
            # All tables of the sum, for choices of these variables: those below, and those outside.
            total = joined_table(one.joined, one.scope, self.choices)
            if left.variables:
                total += outside_s.pop(id(left))
            else:
                total += whole_s - float(left.seconds_s)
            found[one.variable] = least_over(total, one.scope, (one.variable,))
            for table in one.joined:
                if id(table) in made:
                    least_s = least_over(total, one.scope, table.variables)
                    least_s = np.moveaxis(least_s, 0, table.variables.index(one.variable))
                    outside_s[id(table)] = least_s - table.seconds_s
        return found

    def restricted(self, kept: Sequence[IntArray]) -> CostSum:
        """The sum with some choices of each variable, by their numbers."""
        tables = [
            CostTable(one.variables, one.seconds_s[np.ix_(*(kept[v] for v in one.variables))])
            for one in self.tables
        ]
        return CostSum(tuple(map(len, kept)), tables)

    def _take_out(self, largest: int, *, apart: bool = False) -> list[Elimination] | None:
        """The variables taken out one by one; None where a table would be larger than `largest`.

        If `apart`, such tables are not made: see `taken_apart`.

        What the same tables give in the same places is found once: graphs repeat their layers.
        Of small tables it is kept for the next time.
        """
        large: dict[object, _Joined] = {}
        choices = self.choices
        # 1. The tables left of each variable by their numbers, the variables beside it, and a heap
        # of variables by the size of their joined table.
        of = [{number: self.tables[number] for number in numbers} for numbers in self._of]
        beside = [{variable} for variable in range(len(choices))]
        # Variables with one choice stay: without them, scopes are as few axes as they can be.
        for variables, _ in self.tables:
            open_ = [variable for variable in variables if choices[variable] > 1]
            if len(open_) > 1:
                for variable in open_:
                    beside[variable].update(open_)
        sizes = [math.prod([choices[v] for v in some]) for some in beside]
        waiting = [(size, variable) for variable, size in enumerate(sizes) if size > 1]
        heapq.heapify(waiting)
        taken: list[Elimination] = []
        # Of the tables that are left.
        next_number = len(self.tables)
        while waiting:
            size, variable = heapq.heappop(waiting)
            # Sizes change as others are taken out; an entry that is out of date has a newer one.
            if size != sizes[variable]:
                continue
            if size > largest and not apart:
                return None
            # 2. The variable's tables, which become one with an axis a variable.
            numbers = of[variable]
            joined = list(numbers.values())
            rest = tuple(sorted(beside[variable] - {variable}))
            scope = (variable, *rest)
            # 3. Take the variable out: the least over its axis, for choices of the rest. Tables
            # are told apart by the memory they are in.
            best = None
            if size > largest:
                left = taken_apart(variable, joined, choices, largest)
            else:
                axes = {v: axis for axis, v in enumerate(scope)}
                key = [choices[variable]]
                for variables, seconds_s in joined:
                    key.append(id(seconds_s))
                    key += [axes[v] for v in variables if v in axes]
                known = self._known.joined if size <= MOST_KEPT else large
                found = known.get(tuple(key))
                if found is None:
                    total = joined_table(joined, scope, choices)
                    found = _Joined(joined, np.asarray(total.min(axis=0)), {})
                    known[tuple(key)] = found
                best = found.best
                left = [CostTable(rest, found.left_s)]
            taken.append(Elimination(variable, scope, joined, left, best))
            sizes[variable] = 0
            new = range(next_number, next_number + len(left))
            next_number = new.stop
            for other in rest:
                own_tables, own = of[other], beside[other]
                for number in numbers:
                    own_tables.pop(number, None)
                for number, table in zip(new, left, strict=True):
                    if other in table.variables:
                        own_tables[number] = table
                if best is None:
                    own = beside[other] = {
                        v for one in own_tables.values() for v in one.variables if choices[v] > 1
                    }
                    own.add(other)
                    now = math.prod([choices[v] for v in own])
                else:
                    own.discard(variable)
                    now = sizes[other] // choices[variable]
                    for one in rest:
                        if one not in own:
                            own.add(one)
                            now *= choices[one]
                if now != sizes[other]:
                    sizes[other] = now
                    heapq.heappush(waiting, (now, other))
        return taken

    def descended(
        self, start: Sequence[int], inner: Sequence[int] = (), sweeps: int = 12
    ) -> tuple[int, ...]:
        """Choices where changing one variable, and the inner ones beside it, helps no more.

        Args:
            start: the choices to begin with; those of inner variables do not count.
            inner: variables that are never in one table: given all others, the best choice of
                each is found by itself, and a variable beside them is judged by that.
            sweeps: the most times that all variables are looked at.
        """
        chosen = list(start)
        is_inner = [False] * len(chosen)
        for variable in inner:
            is_inner[variable] = True
        for variable in inner:
            chosen[variable] = self._find_least(variable, chosen)
        if not sweeps:
            return tuple(chosen)
        outer = [v for v, count in enumerate(self.choices) if count > 1 and not is_inner[v]]
        beside = {v: self._find_beside(v, is_inner) for v in outer}
        # All are looked at once, then those near which something has changed since.
        waiting = set(outer)
        for _ in range(sweeps):
            for variable in sorted(waiting):
                waiting.discard(variable)
                costs = self._sum_costs(variable, chosen, beside[variable])
                best = int(costs.argmin())
                if costs[best] < costs[chosen[variable]]:
                    chosen[variable] = best
                    for other in beside[variable]:
                        chosen[other] = self._find_least(other, chosen)
                    waiting.update(self._find_near((variable, *beside[variable])) & beside.keys())
                    waiting.discard(variable)
            if not waiting:
                break
        return tuple(chosen)

    def descended_in_windows(
        self,
        start: Sequence[int],
        centres: Sequence[int],
        inner: Sequence[int] = (),
        window: int = 32,
    ) -> tuple[int, ...]:
        """Choices where changing all variables of a window at once helps no more.

        Args:
            start: the choices to begin with, which descend by single variables first.
            centres: variables, around each of which a window lies.
            inner: as for `descended`.
            window: how many variables one has, fewer where a table would be too large.
        """
        chosen = self.descended(start, inner)
        windows = [self._find_window(centre, window) for centre in centres]
        for _ in range(MOST_PASSES):
            before = chosen
            for one in windows:
                chosen = self._solve_window(one, chosen)
            if chosen == before:
                break
        return chosen

    def _find_window(self, centre: int, most: int) -> list[int]:
        """A variable and those nearest to it by the tables that they share."""
        found = {centre: None}
        waiting = deque([centre])
        while waiting and len(found) < most:
            for number in self._of[waiting.popleft()]:
                for other in self.tables[number].variables:
                    if other not in found and self.choices[other] > 1:
                        found[other] = None
                        waiting.append(other)
        return list(found)[:most]

    def _solve_window(self, window: Sequence[int], chosen: tuple[int, ...]) -> tuple[int, ...]:
        """The best choices of a window's variables, all others being chosen."""
        inside = {variable: place for place, variable in enumerate(sorted(window))}
        tables, key = [], []
        for number in dict.fromkeys(n for v in inside for n in self._of[v]):
            variables, seconds_s = self.tables[number]
            at = [slice(None) if v in inside else chosen[v] for v in variables]
            own = tuple([inside[v] for v in variables if v in inside])
            tables.append(CostTable(own, seconds_s[tuple(at)]))
            key.append((id(seconds_s), own, *[chosen[v] for v in variables if v not in inside]))
        before = tuple([chosen[v] for v in inside])
        # Layers alike have windows alike.
        whole_key = (before, *key)
        known = self._known.windows
        if whole_key not in known:
            part = CostSum(tuple([self.choices[v] for v in inside]), tables)
            solved = part.eliminated(LARGEST_OF_WINDOW)
            if solved is not None and part.value(solved) >= part.value(before):
                solved = before
            known[whole_key] = solved
        found = known[whole_key]
        if found is None:
            # Its tables are too large: a part of it.
            return self._solve_window(window[: len(window) * 2 // 3], chosen)
        if found == before:
            return chosen
        changed = list(chosen)
        for variable, place in inside.items():
            changed[variable] = found[place]
        return tuple(changed)

    def _find_near(self, some: Iterable[int]) -> set[int]:
        """The variables that some share a table with, and those themselves."""
        numbers = {number for variable in some for number in self._of[variable]}
        return {variable for number in numbers for variable in self.tables[number].variables}

    def _find_beside(self, variable: int, is_inner: Sequence[bool]) -> list[int]:
        """The inner variables that a variable shares a table with."""
        found = {
            other
            for number in self._of[variable]
            for other in self.tables[number].variables
            if is_inner[other]
        }
        return sorted(found)

    def _find_least(self, variable: int, chosen: Sequence[int]) -> int:
        """The best choice of a variable, all others being chosen."""
        key = (self.choices[variable], *self._read_keys(variable, (variable,), chosen))
        found = self._known.least.get(key)
        if found is None:
            found = self._known.least[key] = int(self._sum_costs(variable, chosen).argmin())
        return found

    def _sum_costs(
        self, variable: int, chosen: Sequence[int], inner: Sequence[int] = ()
    ) -> FloatArray:
        """The sum of a variable's tables for each choice of it, inner variables at their best.

        Args:
            variable: that is free.
            chosen: the choices of the others.
            inner: those beside it that take their best choice each time.
        """
        known = self._known.costs
        keys = [tuple(self._read_keys(variable, (variable, *inner), chosen))]
        keys += [tuple(self._read_keys(other, (variable, other), chosen)) for other in inner]
        key = (self.choices[variable], *keys)
        costs = known.get(key)
        if costs is not None:
            return costs
        costs = np.zeros(self.choices[variable])
        for number in self._of[variable]:
            table = self.tables[number]
            if not any(other in inner for other in table.variables):
                costs += self._slice_table(table, (variable,), chosen)
        for other, own in zip(inner, keys[1:], strict=True):
            least_s = known.get(own)
            if least_s is None:
                # A row for each choice of the variable, a column for each of the inner one.
                both = np.zeros((self.choices[variable], self.choices[other]))
                for number in self._of[other]:
                    table = self.tables[number]
                    if variable in table.variables:
                        both += self._slice_table(table, (variable, other), chosen)
                    else:
                        both += self._slice_table(table, (other,), chosen)
                least_s = known[own] = both.min(axis=1)
            costs += least_s
        known[key] = costs
        return costs

    def _read_keys(self, variable: int, free: tuple[int, ...], chosen: Sequence[int]) -> list[int]:
        """Of a variable's tables: which is read at which choices, or for all of a free variable."""
        keys = []
        for number in self._of[variable]:
            variables, seconds_s = self.tables[number]
            keys.append(id(seconds_s))
            for other in variables:
                # The places of free variables tell a table from its transpose.
                keys.append(-1 - free.index(other) if other in free else chosen[other])
        return keys

    def _slice_table(
        self, table: CostTable, free: tuple[int, ...], chosen: Sequence[int]
    ) -> FloatArray:
        """A table with all but the free variables at their choices, in the order of `free`."""
        at = tuple(slice(None) if v in free else chosen[v] for v in table.variables)
        found: FloatArray = table.seconds_s[at]
        kept = [v for v in table.variables if v in free]
        # Tables have their variables in rising order, which need not be the order of `free`.
        return found.T if len(kept) == 2 and kept != list(free) else found
