"""Factor graphs: the minimum of a sum of tables, by elimination or descent.

Each variable has a number of choices, each table gives seconds for the choices of a few of them.

*Elimination* is exact. A variable is eliminated by adding the tables that have it and keeping, for
each choice of the others, the minimum; backwards, the choices are read off. Variables whose tables
stay small are eliminated first (Dechter, "Bucket elimination", 1999)::

    f(a, b) + g(b, c)       c out: h(b) = min over c of g(b, c)
    f(a, b) + h(b)          b out: k(a) = min over b of f(a, b) + h(b)
    k(a)                    a is where k is minimal; then b where f(a, b) + h(b) is, then c

The order, and the size of tables, depend on which variables each table has, not on its values: an
order is found once for all sums of such tables. If a table would become too large, elimination
stops, or goes on with the tables split, and then gives a lower bound. Forwards again, each joined
table gets the sum of the tables outside of it, and then has the minimum for every single choice: a
choice whose minimum is above a known sum can be excluded.

*Descent* starts from given choices and changes a variable at a time, with the inner variables next
to it, as long as that helps. In *windows*, all variables but a few are chosen at once: the others
keep their choices, and are such that elimination of the rest makes no large table. Each window
leaves out other variables.

Both give the same answer on every machine: sums are computed in a fixed order, and among equals the
first choice is taken.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

# Entries that are added at once: larger tables would come from memory each time.
BLOCK_ENTRIES = 1 << 15


class CostTable(NamedTuple):
    """Seconds for the choices of some variables, with an axis for each in ascending order."""

    variables: tuple[int, ...]
    seconds_s: FloatArray


TableView = tuple[int, tuple[int, ...] | None, tuple[int, ...]]
"""How to broadcast a table to a scope: its number, its axes with several choices in the order of
the scope (None if they are in that order), and its shape, with an axis of length 1 for each
variable of the scope that it lacks."""


Places = tuple[int, ...]
"""The variables of a table that have several choices, by their places in a scope."""


@lru_cache(maxsize=1 << 14)
def _find_views(tables: tuple[Places, ...], sizes: tuple[int, ...]) -> tuple[TableView, ...]:
    """Return views of tables, small ones first, whose sum has few of the variables.

    Args:
        tables: their variables, which are in rising order but for the first of the scope.
        sizes: choices of each variable of the scope.
    """
    views: list[TableView] = []
    for number, places in enumerate(tables):
        at = places.index(0) if 0 in places else 0
        axes = (at, *[axis for axis in range(len(places)) if axis != at]) if at else None
        shape = tuple([size if place in places else 1 for place, size in enumerate(sizes)])
        views.append((number, axes, shape))
    return tuple(sorted(views, key=lambda view: math.prod(view[2])))


def _view(tables: Sequence[CostTable], views: Sequence[TableView]) -> list[FloatArray]:
    parts = []
    for number, axes, shape in views:
        seconds_s = tables[number].seconds_s
        if axes is not None:
            if seconds_s.ndim > len(axes):
                # Axes of variables that have a single choice.
                seconds_s = seconds_s.squeeze()
            seconds_s = seconds_s.transpose(axes)
        parts.append(seconds_s.reshape(shape))
    return parts


def joined_table(
    tables: Sequence[CostTable], scope: Sequence[int], choices: Sequence[int]
) -> FloatArray:
    """Return the sum of tables, an array of its own with an axis for each variable of a scope.

    Args:
        tables: of these variables, and others that have a single choice.
        scope: all that have several choices; the first is any, the others are in rising order.
        choices: how many each variable has.
    """
    sizes = tuple([choices[v] for v in scope])
    places = [tuple([scope.index(v) for v in table.variables if v in scope]) for table in tables]
    parts = _view(tables, _find_views(tuple(places), sizes))
    return _add(parts, np.empty(sizes)) if parts else np.zeros(sizes)


def _add(parts: Sequence[FloatArray], total: FloatArray) -> FloatArray:
    """Return the sum of parts, into a total that has all of their axes."""
    if len(parts) == 1:
        np.copyto(total, parts[0])
        return total
    # In rows of the scope, whatever order the tables are in.
    subtotal = parts[0]
    for part in parts[1:-1]:
        subtotal = np.add(subtotal, part, order="C")
    return np.add(subtotal, parts[-1], out=total)


def least_joined(
    tables: Sequence[CostTable], places: tuple[Places, ...], sizes: tuple[int, ...]
) -> FloatArray:
    """Return the least of the sum of tables over the first variable of their scope.

    Args:
        tables: as for `joined_table`.
        places: the variables of each by their places in the scope.
        sizes: choices of each variable of the scope.

    >>> table = CostTable((0, 1), np.array([[5.0, 6.0], [0.0, 9.0]]))
    >>> least_joined([table], ((0, 1),), (2, 2)).tolist()
    [0.0, 6.0]
    """
    if not tables:
        return np.zeros(sizes[1:])
    parts = _view(tables, _find_views(places, sizes))
    rest = math.prod(sizes[1:])
    rows = max(BLOCK_ENTRIES // rest, 1)
    if rows >= sizes[0]:
        total = parts[0]
        for part in parts[1:]:
            total = np.add(total, part, order="C")
        return np.asarray(np.minimum.reduce(total))
    # In blocks of rows, whose memory is used again.
    block, least_s = np.empty((rows, *sizes[1:])), np.full(sizes[1:], math.inf)
    for first in range(0, sizes[0], rows):
        blocks = [part[first : first + rows] if len(part) > 1 else part for part in parts]
        block_s = _add(blocks, block[: sizes[0] - first])
        np.minimum(np.minimum.reduce(block_s), least_s, out=least_s)
    return least_s


def costs_along(table: CostTable, variable: int, chosen: Sequence[int]) -> FloatArray:
    """Return a table's seconds for each choice of a variable, with the others at theirs.

    >>> costs_along(CostTable((0, 2), np.array([[1.0, 2.0], [3.0, 4.0]])), 0, (0, 0, 1)).tolist()
    [2.0, 4.0]
    """
    variables, seconds_s = table
    if len(variables) == 1:
        return seconds_s
    if len(variables) == 2:
        first, second = variables
        return seconds_s[:, chosen[second]] if first == variable else seconds_s[chosen[first]]
    return seconds_s[tuple([slice(None) if v == variable else chosen[v] for v in variables])]


def sliced(table: CostTable, free: tuple[int, ...], chosen: Sequence[int]) -> FloatArray:
    """Return a table with all but the free variables at their choices, in the order of `free`.

    >>> sliced(CostTable((0, 2), np.array([[1.0, 2.0], [3.0, 4.0]])), (0,), (0, 0, 1)).tolist()
    [2.0, 4.0]
    """
    variables, seconds_s = table
    selected: FloatArray = seconds_s[
        tuple([slice(None) if v in free else chosen[v] for v in variables])
    ]
    remaining = [v for v in variables if v in free]
    # Tables have their variables in rising order, which need not be the order of `free`.
    return selected.T if len(remaining) == 2 and remaining != list(free) else selected


def least_over(seconds_s: FloatArray, scope: Sequence[int], variables: Sequence[int]) -> FloatArray:
    """Return the least over the axes of a scope that are not those of some variables."""
    axes = tuple(place for place, v in enumerate(scope) if v not in variables)
    return np.asarray(seconds_s.min(axis=axes))


def grouped(
    scopes: Sequence[tuple[int, ...]], choices: Sequence[int], largest: int
) -> list[tuple[tuple[int, ...], list[int]]]:
    """Return groups of tables that are not too large together, the largest tables first.

    A group is its variables in ascending order, and the places of its tables.

    Args:
        scopes: the variables of each table.
        choices: how many each variable has; variables with a single choice are omitted.
        largest: entries of a group's table, unless a single table is larger.

    >>> grouped([(0, 1), (0, 2), (0,)], (2, 2, 2), 4)
    [((0, 1), [0, 2]), ((0, 2), [1])]
    """
    sizes = [math.prod([choices[v] for v in scope]) for scope in scopes]
    groups: list[tuple[set[int], list[int]]] = []
    for place in sorted(range(len(scopes)), key=lambda n: -sizes[n]):
        variables = {v for v in scopes[place] if choices[v] > 1}
        for joined, places in groups:
            if math.prod([choices[v] for v in joined | variables]) <= largest:
                joined |= variables
                places.append(place)
                break
        else:
            groups.append((variables, [place]))
    return [(tuple(sorted(variables)), places) for variables, places in groups]


def taken_apart(
    variable: int,
    tables: Sequence[CostTable],
    choices: Sequence[int],
    largest: int,
) -> list[CostTable]:
    """Return a lower bound of the least over a variable, where its tables are too large together.

    They are joined in groups, each of which is minimized separately. The minima of the groups
    for the variable's choices are balanced before, which tightens the bound (Dechter and Rish,
    "Mini-buckets", 2003; Ihler et al., "Join-graph based cost-shifting schemes", 2012).

    Args:
        variable: that is taken out.
        tables: all that have it.
        choices: how many each variable has.
        largest: entries of a group's table.

    >>> tables = [CostTable((0, v), np.array([[1.0, 5.0], [3.0, 0.0]])) for v in (1, 2)]
    >>> apart = taken_apart(0, tables, (2, 2, 2), 4)
    >>> [(table.variables, table.seconds_s.tolist()) for table in apart]
    [((1,), [1.0, 0.0]), ((2,), [1.0, 0.0])]
    """
    # The variable first, whose axis is that of rows.
    totals = []
    for scope, places in grouped([table.variables for table in tables], choices, largest):
        rest = tuple([v for v in scope if v != variable])
        joined = [tables[place] for place in places]
        totals.append((rest, joined_table(joined, (variable, *rest), choices)))
    minima_s = [total.reshape(choices[variable], -1).min(axis=1) for _, total in totals]
    mean_s = sum(minima_s) / len(minima_s)
    left = []
    for (rest, total), least_s in zip(totals, minima_s, strict=True):
        total += (mean_s - least_s).reshape(-1, *[1] * len(rest))
        left.append(CostTable(rest, np.asarray(np.minimum.reduce(total))))
    return left


# Entries of the largest joined table of which is kept what came of it.
MAX_CACHED_ENTRIES = 1 << 16


class EliminationStep(NamedTuple):
    """A variable that is to be taken out.

    Args:
        scope: the variables of its tables, itself first.
        joined: its tables by number; those that steps leave are numbered after those of the sum.
        pattern: how many choices the variable has, and for each table -1 and the places of its
            variables in the scope.
        size: entries of all its tables together.
        largest: entries of a table, where they are too large together and are taken apart.
    """

    scope: tuple[int, ...]
    joined: tuple[int, ...]
    pattern: tuple[int, ...]
    size: int
    largest: int | None


class Elimination(NamedTuple):
    """A variable taken out of some tables.

    Args:
        scope: the variables of the tables, the eliminated variable first.
        joined: the tables.
        left: the least seconds then, a table of the rest, or several that come to no more.
        best: the variable's choice, for choices of the rest that have been requested; None if
            the tables are too large together.
    """

    scope: tuple[int, ...]
    joined: list[CostTable]
    left: list[CostTable]
    best: dict[tuple[int, ...], int] | None


KnownTables = dict[object, tuple[list[CostTable], FloatArray, dict[tuple[int, ...], int]]]
"""Results of eliminations by the pattern and the identities of their tables: the tables, which are
kept so that their identities stay unique, and `left` and `best` of `Elimination`."""


def find_order(
    choices: Sequence[int],
    scopes: Sequence[tuple[int, ...]],
    largest: int,
    *,
    apart: bool = False,
) -> list[EliminationStep] | None:
    """Return the elimination order, or None if a table would be larger than `largest`.

    If `apart`, such tables are not made: see `taken_apart`.

    Args:
        choices: how many each variable has.
        scopes: the variables of each table.
        largest: entries of a table.

    >>> [step.scope for step in find_order((2, 2, 2), [(0, 1), (1, 2)], 4) or ()]
    [(0, 1), (1, 2), (2,)]
    """
    # 1. The tables left of each variable by their numbers, the adjacent variables, and a heap of
    # variables by the size of their joined table. Variables without a choice stay: without them,
    # scopes are as few axes as they can be.
    tables_of: list[dict[int, tuple[int, ...]]] = [{} for _ in choices]
    open_scopes = [tuple([v for v in scope if choices[v] > 1]) for scope in scopes]
    for number, scope in enumerate(open_scopes):
        for variable in scope:
            tables_of[variable][number] = scope
    neighbours, sizes, waiting = _find_neighbours(choices, open_scopes)
    order: list[EliminationStep] = []
    next_number = len(scopes)
    while waiting:
        size, variable = heapq.heappop(waiting)
        # Sizes change as others are eliminated; an outdated entry has a newer copy.
        if size != sizes[variable]:
            continue
        if size > largest and not apart:
            return None
        # 2. The variable's tables, which are joined into a table, or several.
        tables = tables_of[variable]
        is_apart = size > largest
        rest = tuple(sorted(neighbours[variable] - {variable}))
        scope = (variable, *rest)
        pattern = [choices[variable]]
        for table in tables.values():
            pattern += [-1, *map(scope.index, table)]
        numbers = tuple(tables)
        order.append(
            EliminationStep(scope, numbers, tuple(pattern), size, largest if is_apart else None)
        )
        left = [rest]
        if is_apart:
            groups = grouped(list(tables.values()), choices, largest)
            left = [tuple([v for v in some if v != variable]) for some, _ in groups]
        # 3. The tables that are left belong to the rest.
        sizes[variable] = 0
        for other in rest:
            other_tables = tables_of[other]
            for number in tables:
                other_tables.pop(number, None)
            for number, left_scope in enumerate(left, next_number):
                if other in left_scope:
                    other_tables[number] = left_scope
            adjacent = neighbours[other]
            if is_apart:
                adjacent = neighbours[other] = {
                    other,
                    *itertools.chain.from_iterable(other_tables.values()),
                }
                now = math.prod([choices[v] for v in adjacent])
            else:
                added = [v for v in rest if v not in adjacent]
                adjacent.update(added)
                adjacent.discard(variable)
                now = sizes[other] // choices[variable] * math.prod([choices[v] for v in added])
            if now != sizes[other]:
                sizes[other] = now
                heapq.heappush(waiting, (now, other))
        next_number += len(left)
    return order


def _find_neighbours(
    choices: Sequence[int], scopes: Sequence[tuple[int, ...]]
) -> tuple[list[set[int]], list[int], list[tuple[int, int]]]:
    """Return the variables adjacent to each, and the size of their joined table.

    The third result is a heap of the variables with a choice, by that size.
    """
    neighbours = [{variable} for variable in range(len(choices))]
    for scope in scopes:
        for variable in scope:
            neighbours[variable].update(scope)
    sizes = [math.prod([choices[v] for v in some]) for some in neighbours]
    waiting = [(size, variable) for variable, size in enumerate(sizes) if size > 1]
    heapq.heapify(waiting)
    return neighbours, sizes, waiting


def find_cut_set(
    choices: Sequence[int],
    scopes: Sequence[tuple[int, ...]],
    largest: int,
    free: Collection[int] = (),
) -> set[int]:
    """Find variables without which elimination makes no table larger than `largest`, or few.

    Variables are taken out as by `find_order`. Where the smallest table would be too large, the
    variable in it with the most adjacent variables is in the set.

    Args:
        choices: how many each variable has.
        scopes: the variables of each table.
        largest: entries of a table.
        free: variables that are found only where there are no others.

    >>> sorted(find_cut_set((2, 2, 2, 2), [(0, 1), (1, 2), (2, 3), (0, 3)], 4))
    [0]
    """
    open_scopes = [tuple([v for v in scope if choices[v] > 1]) for scope in scopes]
    neighbours, sizes, waiting = _find_neighbours(choices, open_scopes)
    cut_set: set[int] = set()
    while waiting:
        size, variable = heapq.heappop(waiting)
        if size != sizes[variable]:
            continue
        adjacent = neighbours[variable]
        is_cut = size > largest
        if is_cut:
            # `-v` takes the first among equals, so that all machines find the same set.
            variable = max(
                adjacent, key=lambda v: (v not in free, len(neighbours[v]), choices[v], -v)
            )
            cut_set.add(variable)
            adjacent = neighbours[variable]
        sizes[variable] = 0
        for other in adjacent - {variable}:
            if not is_cut:
                neighbours[other] |= adjacent
            neighbours[other].discard(variable)
            now = math.prod([choices[v] for v in neighbours[other]])
            # This puts back the variable that was popped, if another was put into the set.
            if now != sizes[other]:
                sizes[other] = now
                heapq.heappush(waiting, (now, other))
    return cut_set


def take_out(
    order: Sequence[EliminationStep],
    tables: Sequence[CostTable],
    choices: Sequence[int],
    cache: KnownTables,
) -> list[Elimination]:
    """Eliminate the variables of a sum.

    Equal tables in equal places are joined once, because graphs repeat their layers.

    Args:
        order: in which they are, from `find_order`.
        tables: of the sum.
        choices: how many each variable has.
        cache: the results of small tables. Tables are identified by their arrays, so
            those of `tables` must be kept as long as the cache.
    """
    numbered = list(tables)
    taken: list[Elimination] = []
    # Large tables are shared within this sum only: kept, they would take too much memory.
    of_large: KnownTables = {}
    for scope, numbers, pattern, size, largest in order:
        variable, rest = scope[0], scope[1:]
        joined = [numbered[number] for number in numbers]
        if largest is not None:
            left = taken_apart(variable, joined, choices, largest)
            taken.append(Elimination(scope, joined, left, None))
        else:
            # The least over the variable's axis, for choices of the rest.
            results = cache if size <= MAX_CACHED_ENTRIES else of_large
            key = (pattern, *[id(seconds_s) for _, seconds_s in joined])
            result = results.get(key)
            if result is None:
                sizes = tuple([choices[v] for v in scope])
                least_s = least_joined(joined, _read_places(pattern), sizes)
                result = results[key] = joined, least_s, {}
            left = [CostTable(rest, result[1])]
            taken.append(Elimination(scope, joined, left, result[2]))
        numbered += left
    return taken


def _read_places(pattern: Sequence[int]) -> tuple[Places, ...]:
    """Return the places of each table's variables.

    >>> _read_places((7, -1, 0, 2, -1, 1))
    ((0, 2), (1,))
    """
    places: list[list[int]] = []
    for place in pattern[1:]:
        if place < 0:
            places.append([])
        else:
            places[-1].append(place)
    return tuple(map(tuple, places))


def read_off(taken: Sequence[Elimination], choices: Sequence[int]) -> tuple[int, ...]:
    """Return the choices where the sum is least, or near that if tables were taken apart.

    >>> tables = [CostTable((0, 1), np.array([[5.0, 6.0], [0.0, 9.0]]))]
    >>> order = find_order((2, 2), [(0, 1)], 4) or []
    >>> read_off(take_out(order, tables, (2, 2), {}), (2, 2))
    (1, 0)
    """
    # Backwards: when a variable is read off, the rest of its tables is chosen already.
    chosen = [0] * len(choices)
    for (variable, *rest), joined, _, best in reversed(taken):
        best_choices = {} if best is None else best
        at = tuple([chosen[v] for v in rest])
        choice = best_choices.get(at)
        if choice is None:
            costs = np.zeros(choices[variable])
            for table in joined:
                costs += costs_along(table, variable, chosen)
            choice = best_choices[at] = int(costs.argmin())
        chosen[variable] = choice
    return tuple(chosen)


# Entries of the largest table that elimination makes, of all variables and of a window's.
MAX_TABLE_ENTRIES = 1 << 19
MAX_WINDOW_ENTRIES = 1 << 16
# Windows of all variables but a few, and how often they are looked at.
N_WINDOWS = 2
MAX_PASSES = 3


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
class CostSum:
    """A sum of tables.

    Args:
        choices: how many each variable has.
        tables: what is added.

    >>> seconds_s = [np.array([0.0, 1.0]), np.array([[5.0, 6.0], [0.0, 9.0]])]
    >>> total = CostSum((2, 2), list(map(CostTable, [(0,), (0, 1)], seconds_s)))
    >>> total.eliminated(), total.value((1, 0))
    ((1, 0), 1.0)
    """

    choices: tuple[int, ...]
    tables: list[CostTable]
    _of: list[list[int]] = field(init=False)
    # Caches, which sums with some of the tables replaced share. Tables are identified by their
    # arrays, so all of them are kept.
    _kept: dict[int, FloatArray] = field(init=False, default_factory=dict)
    _costs: dict[object, FloatArray] = field(init=False, default_factory=dict)
    _least: dict[object, int] = field(init=False, default_factory=dict)
    _windows: dict[object, tuple[int, ...]] = field(init=False, default_factory=dict)
    _joined: KnownTables = field(init=False, default_factory=dict)
    _orders: dict[tuple[int, bool], list[EliminationStep] | None] = field(
        init=False, default_factory=dict
    )
    _fitting: dict[int, list[_Window]] = field(init=False, default_factory=dict)
    _slices: dict[object, FloatArray] = field(init=False, default_factory=dict)
    _adjacent: dict[tuple[int, ...], dict[int, list[int]]] = field(init=False, default_factory=dict)
    # Where descent ended, and inner variables of it: with which tables.
    _ends: dict[tuple[tuple[int, ...], tuple[int, ...]], list[CostTable]] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self._keep(self.tables)
        self._of = [[] for _ in self.choices]
        for number, table in enumerate(self.tables):
            for variable in table.variables:
                self._of[variable].append(number)

    def replaced(self, tables: list[CostTable]) -> CostSum:
        """Return the sum with other tables of the same variables."""
        new_sum = copy(self)
        new_sum.tables = tables
        self._keep(tables)
        return new_sum

    def _keep(self, tables: Iterable[CostTable]) -> None:
        self._kept.update((id(table.seconds_s), table.seconds_s) for table in tables)

    def value(self, chosen: Sequence[int]) -> float:
        """Return the sum for choices of all variables."""
        return _add_up(self.tables, chosen)

    def eliminated(self, largest: int = MAX_TABLE_ENTRIES) -> tuple[int, ...] | None:
        """Return the choices of the minimum, or None if a table would be larger than `largest`."""
        taken = self._take_out(largest)
        return None if taken is None else read_off(taken, self.choices)

    def nearly_eliminated(self, largest: int = MAX_TABLE_ENTRIES) -> tuple[tuple[int, ...], bool]:
        """Return choices of a low sum, and whether it is proven minimal.

        Tables that would be larger than `largest` are taken apart: see `taken_apart`.
        """
        taken = self._take_out(largest, apart=True) or []
        return read_off(taken, self.choices), all(
            elimination.best is not None for elimination in taken
        )

    def least_of_choices(self, largest: int = MAX_TABLE_ENTRIES) -> list[FloatArray] | None:
        """Return the minimum for each choice of each variable, up to rounding, or None.

        >>> seconds_s = [np.array([0.0, 1.0]), np.array([[5.0, 6.0], [0.0, 9.0]])]
        >>> tables = list(map(CostTable, [(0,), (0, 1)], seconds_s))
        >>> [least_s.tolist() for least_s in CostSum((2, 2), tables).least_of_choices()]
        [[5.0, 1.0], [1.0, 6.0]]
        """
        taken = self._take_out(largest)
        if taken is None:
            return None
        # Variables that share no table, directly or by others, are sums of their own.
        # No table is split here, so each step leaves a single table.
        lefts = [elimination.left[0] for elimination in taken]
        parts_s = [float(left.seconds_s) for left in lefts if not left.variables]
        # Tables of variables that have a single choice are in none of those.
        parts_s += [table.seconds_s.item() for table in self.tables if table.seconds_s.size == 1]
        whole_s = math.fsum(parts_s)
        left_ids = set(map(id, lefts))
        outside_s: dict[int, FloatArray] = {}
        minima: list[FloatArray] = [np.full(1, whole_s)] * len(self.choices)
        for elimination, left in zip(reversed(taken), reversed(lefts), strict=True):
            # All tables of the sum, for choices of these variables: those below, and those outside.
            total = joined_table(elimination.joined, elimination.scope, self.choices)
            if left.variables:
                total += outside_s.pop(id(left))
            else:
                total += whole_s - float(left.seconds_s)
            variable = elimination.scope[0]
            minima[variable] = least_over(total, elimination.scope, (variable,))
            for table in elimination.joined:
                if id(table) in left_ids:
                    least_s = least_over(total, elimination.scope, table.variables)
                    least_s = np.moveaxis(least_s, 0, table.variables.index(variable))
                    outside_s[id(table)] = least_s - table.seconds_s
        return minima

    def restricted(self, allowed: Sequence[IntArray]) -> CostSum:
        """Return the sum with some choices of each variable, by their numbers."""
        tables = [
            CostTable(
                table.variables, table.seconds_s[np.ix_(*(allowed[v] for v in table.variables))]
            )
            for table in self.tables
        ]
        return CostSum(tuple(map(len, allowed)), tables)

    def _take_out(self, largest: int, *, apart: bool = False) -> list[Elimination] | None:
        """Eliminate the variables; None if a table would be larger than `largest`.

        If `apart`, such tables are not made: see `taken_apart`.

        """
        key = largest, apart
        if key not in self._orders:
            scopes = [table.variables for table in self.tables]
            self._orders[key] = find_order(self.choices, scopes, largest, apart=apart)
        order = self._orders[key]
        if order is None:
            return None
        return take_out(order, self.tables, self.choices, self._joined)

    def descended(
        self, start: Sequence[int], inner: Sequence[int] = (), sweeps: int = 12
    ) -> tuple[int, ...]:
        """Descend to choices that changing a variable, with its inner variables, does not improve.

        Args:
            start: the choices to begin with; those of inner variables do not count.
            inner: variables that are never in a table together: given all others, the best choice
                of each is found separately, and an adjacent variable is evaluated with it.
            sweeps: the most times that all variables are looked at.
        """
        chosen = list(start)
        # Where another sum with most of these tables ended, only what the others change is new.
        ended = self._ends.get((tuple(start), tuple(inner))) if sweeps else None
        near: Collection[int] = range(len(chosen))
        if ended is not None:
            pairs = zip(self.tables, ended, strict=True)
            near = {
                v
                for table, ended_table in pairs
                if table[1] is not ended_table[1]
                for v in table[0]
            }
        for variable in inner:
            if variable in near:
                chosen[variable] = self._find_least(variable, chosen)
        if not sweeps:
            return tuple(chosen)
        adjacent = self._find_adjacent(tuple(inner))
        # All are looked at once, then those near which something has changed since.
        waiting = set(adjacent) if ended is None else self._find_near(near) & adjacent.keys()
        for _ in range(sweeps):
            for variable in sorted(waiting):
                waiting.discard(variable)
                costs = self._sum_costs(variable, chosen, adjacent[variable])
                best = int(costs.argmin())
                # Only a lower sum counts, so that equal choices do not alternate.
                if costs[best] < costs[chosen[variable]]:
                    chosen[variable] = best
                    for other in adjacent[variable]:
                        chosen[other] = self._find_least(other, chosen)
                    waiting.update(
                        self._find_near((variable, *adjacent[variable])) & adjacent.keys()
                    )
                    # Its own choice is the best now.
                    waiting.discard(variable)
            if not waiting:
                self._ends[tuple(chosen), tuple(inner)] = self.tables
                break
        return tuple(chosen)

    def descended_in_windows(
        self, start: Sequence[int], inner: Sequence[int] = (), largest: int = MAX_WINDOW_ENTRIES
    ) -> tuple[int, ...]:
        """Return choices that no change of all variables of a window at once improves.

        Args:
            start: the choices to begin with, which descend by single variables first.
            inner: as for `descended`.
            largest: entries of a window's tables.
        """
        chosen = self.descended(start, inner)
        windows = self._find_windows(largest)
        # In turns, until all others are unchanged since a window was solved.
        unchanged = 0
        for window in windows * MAX_PASSES:
            solved = self._solve_window(window, chosen)
            # 1, because the window that has changed is at its minimum.
            unchanged = unchanged + 1 if solved == chosen else 1
            chosen = solved
            if unchanged == len(windows):
                break
        return chosen

    def _find_windows(self, largest: int) -> list[_Window]:
        """Return windows, each of all variables but a few, which differ."""
        windows = self._fitting.get(largest)
        if windows is None:
            windows = self._fitting[largest] = []
            outside: set[int] = set()
            for _ in range(N_WINDOWS):
                window = self._find_window(largest, outside)
                outside.update(set(range(len(self.choices))).difference(window.variables))
                windows.append(window)
                if len(outside) == self.choices.count(1):
                    # All variables that have a choice are in it.
                    break
        return windows

    def _find_window(self, largest: int, inside: Collection[int]) -> _Window:
        """Return a window of all variables, but those that must be fixed to eliminate the others.

        Args:
            largest: entries of a table.
            inside: variables that are rather in it than others.
        """
        order = None
        while order is None:
            scopes = [table.variables for table in self.tables]
            outside = find_cut_set(self.choices, scopes, largest, inside)
            variables = tuple(
                [v for v, count in enumerate(self.choices) if count > 1 and v not in outside]
            )
            places = {variable: place for place, variable in enumerate(variables)}
            numbers = list(dict.fromkeys(n for v in variables for n in self._of[v]))
            tables = [scopes[number] for number in numbers]
            window_scopes = tuple(
                [tuple([places[v] for v in some if v in places]) for some in tables]
            )
            order = find_order(
                [self.choices[v] for v in variables], window_scopes, MAX_TABLE_ENTRIES
            )
            # Another order than that in which the variables outside were found.
            largest //= 4
        axes = [tuple([n for n, v in enumerate(some) if v not in places]) for some in tables]
        return _Window(variables, numbers, window_scopes, axes, order)

    def _solve_window(self, window: _Window, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """Return the best choices of a window's variables, all others being chosen."""
        tables = []
        slices = self._slices
        for number, scope, axes in zip(window.numbers, window.scopes, window.axes, strict=True):
            variables, seconds_s = self.tables[number]
            if axes:
                # The same object each time.
                key = (id(seconds_s), axes, *[chosen[variables[axis]] for axis in axes])
                slice_s = slices.get(key)
                if slice_s is None:
                    place = tuple(
                        [
                            chosen[v] if axis in axes else slice(None)
                            for axis, v in enumerate(variables)
                        ]
                    )
                    slice_s = slices[key] = seconds_s[place]
                seconds_s = slice_s
            tables.append(CostTable(scope, seconds_s))
        before = tuple([chosen[v] for v in window.variables])
        key = (window.variables, *[id(seconds_s) for _, seconds_s in tables])
        solution = self._windows.get(key)
        if solution is None:
            choices = [self.choices[v] for v in window.variables]
            taken = take_out(window.order, tables, choices, self._joined)
            solution = self._windows[key] = read_off(taken, choices)
        # Elimination adds in another order: a difference of rounding alone is not a gain.
        if solution == before or _add_up(tables, solution) >= _add_up(tables, before):
            return chosen
        changed = list(chosen)
        for variable, choice in zip(window.variables, solution, strict=True):
            changed[variable] = choice
        return tuple(changed)

    def _find_near(self, some: Iterable[int]) -> set[int]:
        """Return some variables, and all variables that share a table with any of them."""
        numbers = {number for variable in some for number in self._of[variable]}
        return {variable for number in numbers for variable in self.tables[number].variables}

    def _find_adjacent(self, inner: tuple[int, ...]) -> dict[int, list[int]]:
        """Return the inner variables that each of the others shares a table with."""
        adjacent = self._adjacent.get(inner)
        if adjacent is None:
            inner_set = set(inner)
            outer = [v for v, count in enumerate(self.choices) if count > 1 and v not in inner_set]
            adjacent = {v: sorted(self._find_near((v,)) & inner_set) for v in outer}
            self._adjacent[inner] = adjacent
        return adjacent

    def _find_least(self, variable: int, chosen: Sequence[int]) -> int:
        """Return the best choice of a variable, all others being chosen."""
        key = (self.choices[variable], *self._read_keys(variable, (variable,), chosen))
        best = self._least.get(key)
        if best is None:
            best = self._least[key] = int(self._sum_costs(variable, chosen).argmin())
        return best

    def _sum_costs(
        self, variable: int, chosen: Sequence[int], inner: Sequence[int] = ()
    ) -> FloatArray:
        """Return the sum of a variable's tables for each of its choices, with the best inner ones.

        Args:
            variable: that is free.
            chosen: the choices of the others.
            inner: adjacent ones that take their best choice each time.
        """
        cache = self._costs
        keys = [tuple(self._read_keys(variable, (variable, *inner), chosen))]
        keys += [tuple(self._read_keys(other, (variable, other), chosen)) for other in inner]
        key = (self.choices[variable], *keys)
        costs = cache.get(key)
        if costs is not None:
            return costs
        costs = np.zeros(self.choices[variable])
        for number in self._of[variable]:
            table = self.tables[number]
            if not any(other in inner for other in table.variables):
                costs += costs_along(table, variable, chosen)
        for other, inner_key in zip(inner, keys[1:], strict=True):
            least_s = cache.get(inner_key)
            if least_s is None:
                # A row for each choice of the variable, a column for each of the inner variable.
                both = np.zeros((self.choices[variable], self.choices[other]))
                for number in self._of[other]:
                    table = self.tables[number]
                    if variable in table.variables:
                        both += sliced(table, (variable, other), chosen)
                    else:
                        both += costs_along(table, other, chosen)
                least_s = cache[inner_key] = both.min(axis=1)
            costs += least_s
        cache[key] = costs
        return costs

    def _read_keys(self, variable: int, free: tuple[int, ...], chosen: Sequence[int]) -> list[int]:
        """Return a key of a variable's tables and the choices at which they are read."""
        tables, keys = self.tables, []
        for number in self._of[variable]:
            variables, seconds_s = tables[number]
            keys.append(id(seconds_s))
            # The places of free variables distinguish a table from its transpose.
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
