"""Cost tables: times for the choices of a few variables, and sums of several tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

# Entries that are added at once: larger tables would come from memory each time.
LARGEST_BLOCK = 1 << 15


class CostTable(NamedTuple):
    """Seconds for the choices of some variables, one axis a variable, in rising order."""

    variables: tuple[int, ...]
    seconds_s: FloatArray


class TableView(NamedTuple):
    """How a table is seen among others that it is added to.

    Args:
        number: of the table.
        axes: its axes of several choices in the order of the scope; None where they are so.
        shape: an axis of length 1 for each variable of the scope that the table has not.
    """

    number: int
    axes: tuple[int, ...] | None
    shape: tuple[int, ...]


Places = tuple[int, ...]
"""The variables of a table that have several choices, by their places in a scope."""


@lru_cache(maxsize=1 << 14)
def _find_views(tables: tuple[Places, ...], sizes: tuple[int, ...]) -> tuple[TableView, ...]:
    """Views of tables, small ones first: the sum of those that have few of the variables is small.

    Args:
        tables: their variables, which are in rising order but for the first of the scope.
        sizes: choices of each variable of the scope.
    """
    found = []
    for number, places in enumerate(tables):
        at = places.index(0) if 0 in places else 0
        axes = (at, *[axis for axis in range(len(places)) if axis != at]) if at else None
        shape = tuple([size if place in places else 1 for place, size in enumerate(sizes)])
        found.append(TableView(number, axes, shape))
    return tuple(sorted(found, key=lambda view: math.prod(view.shape)))


def _view(tables: Sequence[CostTable], views: Sequence[TableView]) -> list[FloatArray]:
    parts = []
    for number, axes, shape in views:
        seconds_s = tables[number].seconds_s
        if axes is not None:
            if seconds_s.ndim > len(axes):
                # Axes of variables that have one choice.
                seconds_s = seconds_s.squeeze()
            seconds_s = seconds_s.transpose(axes)
        parts.append(seconds_s.reshape(shape))
    return parts


def joined_table(
    tables: Sequence[CostTable], scope: Sequence[int], choices: Sequence[int]
) -> FloatArray:
    """The sum of tables, an array of its own with an axis for each variable of a scope.

    Args:
        tables: of these variables, and others that have one choice.
        scope: all that have several choices; the first is any, the others are in rising order.
        choices: how many each variable has.
    """
    sizes = tuple([choices[v] for v in scope])
    places = [tuple([scope.index(v) for v in one.variables if v in scope]) for one in tables]
    parts = _view(tables, _find_views(tuple(places), sizes))
    return _add(parts, np.empty(sizes)) if parts else np.zeros(sizes)


def _add(parts: Sequence[FloatArray], total: FloatArray) -> FloatArray:
    """The sum of parts, into a total that has all of their axes."""
    if len(parts) == 1:
        np.copyto(total, parts[0])
        return total
    # In rows of the scope, whatever order the tables are in.
    found = parts[0]
    for part in parts[1:-1]:
        found = np.add(found, part, order="C")
    return np.add(found, parts[-1], out=total)


def least_joined(
    tables: Sequence[CostTable], places: tuple[Places, ...], sizes: tuple[int, ...]
) -> FloatArray:
    """The least of the sum of tables over the first variable of their scope.

    Args:
        tables: as for `joined_table`.
        places: the variables of each by their places in the scope.
        sizes: choices of each variable of the scope.

    >>> one = CostTable((0, 1), np.array([[5.0, 6.0], [0.0, 9.0]]))
    >>> least_joined([one], ((0, 1),), (2, 2)).tolist()
    [0.0, 6.0]
    """
    if not tables:
        return np.zeros(sizes[1:])
    parts = _view(tables, _find_views(places, sizes))
    rest = math.prod(sizes[1:])
    rows = max(LARGEST_BLOCK // rest, 1)
    if rows >= sizes[0]:
        total = parts[0]
        for part in parts[1:]:
            total = np.add(total, part, order="C")
        return np.asarray(np.minimum.reduce(total))
    # In blocks of rows, whose memory is used again.
    block, least_s = np.empty((rows, *sizes[1:])), np.full(sizes[1:], math.inf)
    for first in range(0, sizes[0], rows):
        some = [part[first : first + rows] if len(part) > 1 else part for part in parts]
        own_s = _add(some, block[: sizes[0] - first])
        np.minimum(np.minimum.reduce(own_s), least_s, out=least_s)
    return least_s


def row_of(table: CostTable, variable: int, chosen: Sequence[int]) -> FloatArray:
    """A table for each choice of a variable, with the others at theirs.

    >>> row_of(CostTable((0, 2), np.array([[1.0, 2.0], [3.0, 4.0]])), 0, (0, 0, 1)).tolist()
    [2.0, 4.0]
    """
    variables, seconds_s = table
    if len(variables) == 1:
        return seconds_s
    if len(variables) == 2:
        one, other = variables
        return seconds_s[:, chosen[other]] if one == variable else seconds_s[chosen[one]]
    return seconds_s[tuple([slice(None) if v == variable else chosen[v] for v in variables])]


def sliced(table: CostTable, free: tuple[int, ...], chosen: Sequence[int]) -> FloatArray:
    """A table with all but the free variables at their choices, in the order of `free`.

    >>> sliced(CostTable((0, 2), np.array([[1.0, 2.0], [3.0, 4.0]])), (0,), (0, 0, 1)).tolist()
    [2.0, 4.0]
    """
    variables, seconds_s = table
    found: FloatArray = seconds_s[
        tuple([slice(None) if v in free else chosen[v] for v in variables])
    ]
    kept = [v for v in variables if v in free]
    # Tables have their variables in rising order, which need not be the order of `free`.
    return found.T if len(kept) == 2 and kept != list(free) else found


def least_over(seconds_s: FloatArray, scope: Sequence[int], variables: Sequence[int]) -> FloatArray:
    """The least over the axes of a scope that are not those of some variables."""
    axes = tuple(place for place, v in enumerate(scope) if v not in variables)
    return np.asarray(seconds_s.min(axis=axes))


class TableGroup(NamedTuple):
    """Tables that are joined: their variables in rising order, and their places among others."""

    scope: tuple[int, ...]
    places: list[int]


def grouped(
    scopes: Sequence[tuple[int, ...]], choices: Sequence[int], largest: int
) -> list[TableGroup]:
    """Groups of tables that are not too large together, the largest tables first.

    Args:
        scopes: the variables of each table.
        choices: how many each variable has; those that have one are left out.
        largest: entries of a group's table, unless one table alone is larger.

    >>> for group in grouped([(0, 1), (0, 2), (0,)], (2, 2, 2), 4):
    ...     print(group.scope, group.places)
    (0, 1) [0, 2]
    (0, 2) [1]
    """
    sizes = [math.prod([choices[v] for v in scope]) for scope in scopes]
    groups: list[tuple[set[int], list[int]]] = []
    for place in sorted(range(len(scopes)), key=lambda one: -sizes[one]):
        own = {v for v in scopes[place] if choices[v] > 1}
        for joined, places in groups:
            if math.prod([choices[v] for v in joined | own]) <= largest:
                joined |= own
                places.append(place)
                break
        else:
            groups.append((own, [place]))
    return [TableGroup(tuple(sorted(own)), places) for own, places in groups]


def taken_apart(
    variable: int,
    tables: Sequence[CostTable],
    choices: Sequence[int],
    largest: int,
) -> list[CostTable]:
    """A lower bound of the least over a variable, where its tables are too large together.

    They are joined in groups, each of which has its least for itself. What groups say of the
    variable's choices is evened out before, which makes the bound a closer one (Dechter and Rish,
    "Mini-buckets", 2003; Ihler et al., "Join-graph based cost-shifting schemes", 2012).

    Args:
        variable: that is taken out.
        tables: all that have it.
        choices: how many each variable has.
        largest: entries of a group's table.

    >>> one, two = (CostTable((0, v), np.array([[1.0, 5.0], [3.0, 0.0]])) for v in (1, 2))
    >>> apart = taken_apart(0, [one, two], (2, 2, 2), 4)
    >>> [(table.variables, table.seconds_s.tolist()) for table in apart]
    [((1,), [1.0, 0.0]), ((2,), [1.0, 0.0])]
    """
    # The variable first, whose axis is that of rows.
    totals = []
    for scope, places in grouped([one.variables for one in tables], choices, largest):
        rest = tuple([v for v in scope if v != variable])
        joined = [tables[place] for place in places]
        totals.append((rest, joined_table(joined, (variable, *rest), choices)))
    own_s = [total.reshape(choices[variable], -1).min(axis=1) for _, total in totals]
    mean_s = sum(own_s) / len(own_s)
    left = []
    for (rest, total), least_s in zip(totals, own_s, strict=True):
        total += (mean_s - least_s).reshape(-1, *[1] * len(rest))
        left.append(CostTable(rest, np.asarray(np.minimum.reduce(total))))
    return left
