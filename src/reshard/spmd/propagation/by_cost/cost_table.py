"""Cost tables: times for the choices of a few variables, and sums of several tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
        scope: variables, the first one in any place, the others in rising order.
        choices: how many each variable has.
    """
    sizes = [choices[v] for v in scope]
    total: FloatArray | None = None
    # Small ones first: the sum of those that have few of the variables is small.
    for table in sorted(tables, key=lambda one: one.seconds_s.size):
        variables, seconds_s = table
        if scope and scope[0] in variables:
            seconds_s = np.moveaxis(seconds_s, variables.index(scope[0]), 0)
        # An axis of length 1 for each variable that the table has not.
        own = seconds_s.reshape([choices[v] if v in variables else 1 for v in scope])
        if total is None:
            total = own.copy()
            continue
        # In rows of the scope, whatever order tables are in.
        shape = np.broadcast_shapes(total.shape, own.shape)
        total = np.add(total, own, out=total if total.shape == shape else np.empty(shape))
    return np.zeros(sizes) if total is None else total


def least_over(seconds_s: FloatArray, scope: Sequence[int], variables: Sequence[int]) -> FloatArray:
    """The least over the axes of a scope that are not those of some variables."""
    axes = tuple(place for place, v in enumerate(scope) if v not in variables)
    return np.asarray(seconds_s.min(axis=axes))


def taken_apart(
    variable: int, tables: Iterable[CostTable], choices: Sequence[int], largest: int
) -> list[CostTable]:
    """A lower bound of the least over a variable, where its tables are too large together.

    They are joined in groups, the largest first, each of which has its least for itself. What
    groups say of the variable's choices is evened out before, which makes the bound a closer one
    (Dechter and Rish, "Mini-buckets", 2003; Ihler et al., "Join-graph based cost-shifting schemes",
    2012).

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
    groups: list[tuple[set[int], list[CostTable]]] = []
    for table in sorted(tables, key=lambda one: -one.seconds_s.size):
        own = {v for v in table.variables if choices[v] > 1}
        for joined, some in groups:
            if math.prod([choices[v] for v in joined | own]) <= largest:
                joined |= own
                some.append(table)
                break
        else:
            groups.append((own, [table]))
    totals = []
    for own, some in groups:
        scope = tuple(sorted(own))
        totals.append((scope, joined_table(some, scope, choices)))
    own_s = [least_over(total, scope, (variable,)) for scope, total in totals]
    mean_s = sum(own_s) / len(own_s)
    left = []
    for (scope, total), least_s in zip(totals, own_s, strict=True):
        place = scope.index(variable)
        total += (mean_s - least_s).reshape([-1 if v == variable else 1 for v in scope])
        rest = scope[:place] + scope[place + 1 :]
        left.append(CostTable(rest, np.asarray(total.min(axis=place))))
    return left
