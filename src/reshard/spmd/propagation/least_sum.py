"""Least sums of tables: one choice for each variable, by elimination or descent.

Each variable has a number of choices, each table gives seconds for the choices of a few of them.

*Elimination* is exact: a variable is taken out by adding the tables that have it and keeping, for
each choice of the others, the least; backwards, the choices are read off. Variables whose tables
stay small go first. It stops where a table would become too large (Dechter, "Bucket elimination",
1999)::

    f(a, b) + g(b, c)       c out: h(b) = min over c of g(b, c), at c(b)
    f(a, b) + h(b)          b out: k(a) = min over b of f(a, b) + h(b), at b(a)
    k(a)                    a is where k is least; then b(a), then c(b)

*Descent* starts from given choices and changes one variable at a time, with the inner ones beside
it, as long as that helps.

Both give the same answer on every machine: sums are made in one order, and of equals the first
choice is taken.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

# Entries of the largest table that elimination makes.
LARGEST_TABLE = 1 << 19


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds for the choices of some variables, one axis a variable, in rising order."""

    variables: tuple[int, ...]
    seconds_s: FloatArray


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

    def __post_init__(self) -> None:
        self._of = [[] for _ in self.choices]
        for number, table in enumerate(self.tables):
            for variable in table.variables:
                self._of[variable].append(number)

    def value(self, chosen: Sequence[int]) -> float:
        """The sum for choices of all variables."""
        # fsum rounds once, so that the sum does not depend on the order of the tables.
        return math.fsum(
            float(table.seconds_s[tuple(chosen[variable] for variable in table.variables)])
            for table in self.tables
        )

    def eliminated(self, largest: int = LARGEST_TABLE) -> tuple[int, ...] | None:
        """The choices of the least sum; None where a table would be larger than `largest`."""
        # 1. The tables left, those of each variable, and a heap of variables by the size of their
        # joined table.
        tables: dict[int, CostTable] = dict(enumerate(self.tables))
        of = [set(numbers) for numbers in self._of]
        waiting = [(self._count_joined(tables, of, v), v) for v in range(len(self.choices))]
        heapq.heapify(waiting)
        is_out = [False] * len(self.choices)
        taken: list[tuple[int, tuple[int, ...], FloatArray]] = []
        while waiting:
            size, variable = heapq.heappop(waiting)
            if is_out[variable]:
                continue
            # Sizes change as others are taken out; an entry that is out of date goes back.
            now = self._count_joined(tables, of, variable)
            if now != size:
                heapq.heappush(waiting, (now, variable))
                continue
            if size > largest:
                return None
            # 2. Join the variable's tables, an axis a variable, into one.
            numbers = sorted(of[variable])
            scope = sorted({v for number in numbers for v in tables[number].variables} | {variable})
            total = np.zeros([self.choices[v] for v in scope])
            for number in numbers:
                total += _spread_axes(tables[number], scope, self.choices)
                for other in tables[number].variables:
                    of[other].discard(number)
                del tables[number]
            # 3. Take the variable out: the least over its axis, and where it is, for choices of the
            # rest.
            rest = tuple(v for v in scope if v != variable)
            place = scope.index(variable)
            taken.append((variable, rest, np.asarray(total.argmin(axis=place))))
            is_out[variable] = True
            if rest:
                # Beyond all numbers in use: each variable that is taken out adds one table at most.
                new = len(self.tables) + len(taken)
                tables[new] = CostTable(rest, total.min(axis=place))
                for other in rest:
                    of[other].add(new)
                    heapq.heappush(waiting, (self._count_joined(tables, of, other), other))
        # 4. Backwards: when a variable is read off, the rest of its table is chosen already.
        chosen = [0] * len(self.choices)
        for variable, rest, best in reversed(taken):
            chosen[variable] = int(best[tuple(chosen[v] for v in rest)])
        return tuple(chosen)

    def _count_joined(self, tables: dict[int, CostTable], of: list[set[int]], variable: int) -> int:
        scope = {v for number in of[variable] for v in tables[number].variables} | {variable}
        return math.prod(self.choices[v] for v in scope)

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
            chosen[variable] = int(self._sum_costs(variable, chosen).argmin())
        outer = [v for v in range(len(chosen)) if not is_inner[v]]
        for _ in range(sweeps):
            has_changed = False
            for variable in outer:
                costs = self._sum_costs(variable, chosen, is_inner)
                best = int(costs.argmin())
                if costs[best] < costs[chosen[variable]]:
                    has_changed = True
                    chosen[variable] = best
                    for other in self._find_beside(variable, is_inner):
                        chosen[other] = int(self._sum_costs(other, chosen).argmin())
            if not has_changed:
                break
        return tuple(chosen)

    def _find_beside(self, variable: int, is_inner: Sequence[bool]) -> list[int]:
        """The inner variables that a variable shares a table with."""
        found = {
            other
            for number in self._of[variable]
            for other in self.tables[number].variables
            if is_inner[other]
        }
        return sorted(found)

    def _sum_costs(
        self, variable: int, chosen: Sequence[int], is_inner: Sequence[bool] = ()
    ) -> FloatArray:
        """The sum of a variable's tables for each choice of it, inner variables at their best."""
        costs = np.zeros(self.choices[variable])
        for number in self._of[variable]:
            table = self.tables[number]
            if not is_inner or not any(is_inner[other] for other in table.variables):
                costs += self._slice_table(table, (variable,), chosen)
        for other in self._find_beside(variable, is_inner) if is_inner else ():
            # A row for each choice of the variable, a column for each of the inner one beside it.
            both = np.zeros((self.choices[variable], self.choices[other]))
            for number in self._of[other]:
                table = self.tables[number]
                if variable in table.variables:
                    both += self._slice_table(table, (variable, other), chosen)
                else:
                    both += self._slice_table(table, (other,), chosen)
            costs += both.min(axis=1)
        return costs

    def _slice_table(
        self, table: CostTable, free: tuple[int, ...], chosen: Sequence[int]
    ) -> FloatArray:
        """A table with all but the free variables at their choices, in the order of `free`."""
        at = tuple(slice(None) if v in free else chosen[v] for v in table.variables)
        found: FloatArray = table.seconds_s[at]
        kept = [v for v in table.variables if v in free]
        # Tables have their variables in rising order, which need not be the order of `free`.
        return found.T if len(kept) == 2 and kept != list(free) else found


def _spread_axes(table: CostTable, scope: Sequence[int], choices: Sequence[int]) -> FloatArray:
    """A table with an axis of length 1 for each variable it has not."""
    shape = [choices[v] if v in table.variables else 1 for v in scope]
    return table.seconds_s.reshape(shape)
