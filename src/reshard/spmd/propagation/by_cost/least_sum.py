"""Least sums of tables: one choice for each variable, by elimination or descent.

Each variable has a number of choices, each table gives seconds for the choices of a few of them.

*Elimination* is exact (`elimination`). Where a table would become too large, it stops, or goes on
with the tables taken apart, and then is near the least sum. Forwards again, each joined table gets
what lies outside of it, and then shows the least sum for every single choice: a choice whose least
sum is above one that is known can be left out.

*Descent* starts from given choices and changes one variable at a time, with the inner ones beside
it, as long as that helps. In *windows*, all variables but a few are chosen at once: the others
keep their choices, and are such that elimination of the rest makes no large table. Each window
leaves out others.

Both give the same answer on every machine: sums are made in one order, and of equals the first
choice is taken.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
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
    row_of,
    sliced,
)
from reshard.spmd.propagation.by_cost.elimination import (
    Elimination,
    EliminationStep,
    KnownTables,
    find_cut_set,
    find_order,
    read_off,
    take_out,
)

# Entries of the largest table that elimination makes, of all variables and of a window's.
LARGEST_TABLE = 1 << 19
LARGEST_OF_WINDOW = 1 << 16
# Windows of all variables but a few, and how often they are looked at.
WINDOWS = 2
MOST_PASSES = 3


class _Window(NamedTuple):
    """Variables that are chosen at once.

    Args:
        variables: in rising order.
        numbers: of the tables that have any of them.
        scopes: which of them each of these has, by their places.
        axes: of each of these, which belong to other variables.
        order: in which they are taken out.
    """

    variables: tuple[int, ...]
    numbers: list[int]
    scopes: tuple[tuple[int, ...], ...]
    axes: list[tuple[int, ...]]
    order: list[EliminationStep]


@dataclass(slots=True)
class _Known:
    """What was found in a sum, and in those with some other tables, for the same tables in each.

    Tables are told apart by the memory they are in, so all of them are kept.
    """

    costs: dict[object, FloatArray] = field(default_factory=dict)
    least: dict[object, int] = field(default_factory=dict)
    windows: dict[object, tuple[int, ...]] = field(default_factory=dict)
    joined: KnownTables = field(default_factory=dict)
    orders: dict[tuple[int, bool], list[EliminationStep] | None] = field(default_factory=dict)
    fitting: dict[int, list[_Window]] = field(default_factory=dict)
    slices: dict[object, FloatArray] = field(default_factory=dict)
    beside: dict[tuple[int, ...], dict[int, list[int]]] = field(default_factory=dict)
    # Where descent ended, and inner variables of it: with which tables.
    ends: dict[tuple[tuple[int, ...], tuple[int, ...]], list[CostTable]] = field(
        default_factory=dict
    )
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
        return _add_up(self.tables, chosen)

    def eliminated(self, largest: int = LARGEST_TABLE) -> tuple[int, ...] | None:
        """The choices of the least sum; None where a table would be larger than `largest`."""
        taken = self._take_out(largest)
        return None if taken is None else read_off(taken, self.choices)

    def nearly_eliminated(self, largest: int = LARGEST_TABLE) -> tuple[tuple[int, ...], bool]:
        """Choices of a low sum, and whether it is the least for sure.

        Tables that would be larger than `largest` are taken apart: see `taken_apart`.
        """
        taken = self._take_out(largest, apart=True) or []
        return read_off(taken, self.choices), all(one.best is not None for one in taken)

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

        """
        key = largest, apart
        if key not in self._known.orders:
            scopes = [one.variables for one in self.tables]
            self._known.orders[key] = find_order(self.choices, scopes, largest, apart=apart)
        order = self._known.orders[key]
        if order is None:
            return None
        return take_out(order, self.tables, self.choices, self._known.joined)

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
        # Where another sum with most of these tables ended, only what the others change is new.
        ended = self._known.ends.get((tuple(start), tuple(inner))) if sweeps else None
        near: Collection[int] = range(len(chosen))
        if ended is not None:
            pairs = zip(self.tables, ended, strict=True)
            near = {v for one, other in pairs if one[1] is not other[1] for v in one[0]}
        for variable in inner:
            if variable in near:
                chosen[variable] = self._find_least(variable, chosen)
        if not sweeps:
            return tuple(chosen)
        beside = self._find_beside(tuple(inner))
        # All are looked at once, then those near which something has changed since.
        waiting = set(beside) if ended is None else self._find_near(near) & beside.keys()
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
                self._known.ends[tuple(chosen), tuple(inner)] = self.tables
                break
        return tuple(chosen)

    def descended_in_windows(
        self, start: Sequence[int], inner: Sequence[int] = (), largest: int = LARGEST_OF_WINDOW
    ) -> tuple[int, ...]:
        """Choices where changing all variables of a window at once helps no more.

        Args:
            start: the choices to begin with, which descend by single variables first.
            inner: as for `descended`.
            largest: entries of a window's tables.
        """
        chosen = self.descended(start, inner)
        windows = self._find_windows(largest)
        # In turns, until none of the others has changed anything since one was looked at.
        unchanged = 0
        for one in windows * MOST_PASSES:
            found = self._solve_window(one, chosen)
            unchanged = unchanged + 1 if found == chosen else 1
            chosen = found
            if unchanged == len(windows):
                break
        return chosen

    def _find_windows(self, largest: int) -> list[_Window]:
        """Windows of all variables but a few, others in each."""
        found = self._known.fitting.get(largest)
        if found is None:
            found = self._known.fitting[largest] = []
            outside: set[int] = set()
            for _ in range(WINDOWS):
                window = self._find_window(largest, outside)
                outside.update(set(range(len(self.choices))).difference(window.variables))
                found.append(window)
                if len(outside) == self.choices.count(1):
                    # All variables that have a choice are in it.
                    break
        return found

    def _find_window(self, largest: int, inside: Collection[int]) -> _Window:
        """All variables but those with whose choices given the others can be taken out.

        Args:
            largest: entries of a table.
            inside: variables that are rather in it than others.
        """
        order = None
        while order is None:
            scopes = [one.variables for one in self.tables]
            outside = find_cut_set(self.choices, scopes, largest, inside)
            variables = tuple(
                [v for v, count in enumerate(self.choices) if count > 1 and v not in outside]
            )
            places = {variable: place for place, variable in enumerate(variables)}
            numbers = list(dict.fromkeys(n for v in variables for n in self._of[v]))
            tables = [scopes[number] for number in numbers]
            own = tuple([tuple([places[v] for v in some if v in places]) for some in tables])
            order = find_order([self.choices[v] for v in variables], own, LARGEST_TABLE)
            # Another order than that in which the variables outside were found.
            largest //= 4
        axes = [tuple([n for n, v in enumerate(some) if v not in places]) for some in tables]
        return _Window(variables, numbers, own, axes, order)

    def _solve_window(self, window: _Window, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """The best choices of a window's variables, all others being chosen."""
        tables = []
        slices = self._known.slices
        for number, own, axes in zip(window.numbers, window.scopes, window.axes, strict=True):
            variables, seconds_s = self.tables[number]
            if axes:
                # The same object each time.
                key = (id(seconds_s), axes, *[chosen[variables[axis]] for axis in axes])
                found_s = slices.get(key)
                if found_s is None:
                    place = tuple(
                        [
                            chosen[v] if axis in axes else slice(None)
                            for axis, v in enumerate(variables)
                        ]
                    )
                    found_s = slices[key] = seconds_s[place]
                seconds_s = found_s
            tables.append(CostTable(own, seconds_s))
        before = tuple([chosen[v] for v in window.variables])
        key = (window.variables, *[id(seconds_s) for _, seconds_s in tables])
        found = self._known.windows.get(key)
        if found is None:
            choices = [self.choices[v] for v in window.variables]
            taken = take_out(window.order, tables, choices, self._known.joined)
            found = self._known.windows[key] = read_off(taken, choices)
        if found == before or _add_up(tables, found) >= _add_up(tables, before):
            return chosen
        changed = list(chosen)
        for variable, choice in zip(window.variables, found, strict=True):
            changed[variable] = choice
        return tuple(changed)

    def _find_near(self, some: Iterable[int]) -> set[int]:
        """The variables that some share a table with, and those themselves."""
        numbers = {number for variable in some for number in self._of[variable]}
        return {variable for number in numbers for variable in self.tables[number].variables}

    def _find_beside(self, inner: tuple[int, ...]) -> dict[int, list[int]]:
        """The inner variables that each of the others shares a table with."""
        found = self._known.beside.get(inner)
        if found is None:
            known = set(inner)
            outer = [v for v, count in enumerate(self.choices) if count > 1 and v not in known]
            found = {v: sorted(self._find_near((v,)) & known) for v in outer}
            self._known.beside[inner] = found
        return found

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
                costs += row_of(table, variable, chosen)
        for other, own in zip(inner, keys[1:], strict=True):
            least_s = known.get(own)
            if least_s is None:
                # A row for each choice of the variable, a column for each of the inner one.
                both = np.zeros((self.choices[variable], self.choices[other]))
                for number in self._of[other]:
                    table = self.tables[number]
                    if variable in table.variables:
                        both += sliced(table, (variable, other), chosen)
                    else:
                        both += row_of(table, other, chosen)
                least_s = known[own] = both.min(axis=1)
            costs += least_s
        known[key] = costs
        return costs

    def _read_keys(self, variable: int, free: tuple[int, ...], chosen: Sequence[int]) -> list[int]:
        """Of a variable's tables: which is read at which choices, or for all of a free variable."""
        tables, keys = self.tables, []
        for number in self._of[variable]:
            variables, seconds_s = tables[number]
            keys.append(id(seconds_s))
            # The places of free variables tell a table from its transpose.
            for other in variables:
                keys.append(-1 if other == variable else -2 if other in free else chosen[other])
        return keys


def _add_up(tables: Sequence[CostTable], chosen: Sequence[int]) -> float:
    # fsum rounds once, so that the sum does not depend on the order of the tables.
    return math.fsum(
        [
            seconds_s.item(*[chosen[variable] for variable in variables])
            for variables, seconds_s in tables
        ]
    )
