"""Cost tables: times for the choices of a few variables, and sums of several tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class CostTable(NamedTuple):
    """Seconds for the choices of some variables, one axis a variable, in rising order."""

    variables: tuple[int, ...]
    seconds_s: FloatArray


def joined_table(
    tables: Sequence[CostTable], scope: Sequence[int], choices: Sequence[int]
) -> FloatArray:
    """The sum of tables, an array of its own with an axis for each variable of a scope.

    Args:
        tables: of these variables, and others that have one choice.
        scope: all that have several choices; the first is any, the others are in rising order.
        choices: how many each variable has.
    """
    sizes = [choices[v] for v in scope]
    parts = []
    for variables, seconds_s in tables:
        if scope[0] in variables:
            place = variables.index(scope[0])
            if place:
                others = [axis for axis in range(len(variables)) if axis != place]
                seconds_s = seconds_s.transpose(place, *others)
        # An axis of length 1 for each variable that the table has not.
        parts.append(
            seconds_s.reshape(
                [size if v in variables else 1 for v, size in zip(scope, sizes, strict=True)]
            )
        )
    if len(parts) < 2:
        return parts[0].copy() if parts else np.zeros(sizes)
    # Small ones first: the sum of those that have few of the variables is small. In rows of the
    # scope, whatever order the tables are in.
    parts.sort(key=_size_of)
    total = np.add(parts[0], parts[1], order="C")
    size = math.prod(sizes)
    for part in parts[2:]:
        total = np.add(total, part, order="C", out=total if total.size == size else None)
    return total


def _size_of(table_s: FloatArray) -> int:
    return table_s.size


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
