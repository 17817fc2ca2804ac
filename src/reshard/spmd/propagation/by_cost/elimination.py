"""Elimination: the variables of a sum of tables taken out one by one, and their choices read off.

A variable is taken out by adding the tables that have it and keeping, for each choice of the
others, the least; backwards, the choices are read off. Variables whose tables stay small go first
(Dechter, "Bucket elimination", 1999)::

    f(a, b) + g(b, c)       c out: h(b) = min over c of g(b, c)
    f(a, b) + h(b)          b out: k(a) = min over b of f(a, b) + h(b)
    k(a)                    a is where k is least; then b where f(a, b) + h(b) is, then c

In which order they go, and how large tables become, depends on which variables each table has, not
on what is in it: an order is found once for all sums of such tables.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from reshard.spmd.propagation.by_cost.cost_table import (
    CostTable,
    FloatArray,
    Places,
    grouped,
    least_joined,
    row_of,
    taken_apart,
)

# Entries of the largest joined table of which is kept what came of it.
MOST_KEPT = 1 << 16


class EliminationStep(NamedTuple):
    """A variable that is to be taken out.

    Args:
        scope: the variables of its tables, itself first.
        joined: its tables by their numbers; what steps leave has numbers behind those of the sum.
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


class KnownJoin(NamedTuple):
    """Tables, which are kept, and what comes of their variable taken out, as in `Elimination`."""

    tables: list[CostTable]
    left_s: FloatArray
    best: dict[tuple[int, ...], int]


KnownTables = dict[object, KnownJoin]
"""What came of tables, by their pattern and the memory they are in."""


def find_order(
    choices: Sequence[int],
    scopes: Sequence[tuple[int, ...]],
    largest: int,
    *,
    apart: bool = False,
) -> list[EliminationStep] | None:
    """In which order variables are taken out; None where a table would be larger than `largest`.

    If `apart`, such tables are not made: see `taken_apart`.

    Args:
        choices: how many each variable has.
        scopes: the variables of each table.
        largest: entries of a table.

    >>> [step.scope for step in find_order((2, 2, 2), [(0, 1), (1, 2)], 4) or ()]
    [(0, 1), (1, 2), (2,)]
    """
    # 1. The tables left of each variable by their numbers, the variables beside it, and a heap of
    # variables by the size of their joined table. Variables with one choice stay: without them,
    # scopes are as few axes as they can be.
    of: list[dict[int, tuple[int, ...]]] = [{} for _ in choices]
    beside = [{variable} for variable in range(len(choices))]
    for number, scope in enumerate(scopes):
        open_ = tuple([v for v in scope if choices[v] > 1])
        for variable in open_:
            of[variable][number] = open_
            beside[variable].update(open_)
    sizes = [math.prod([choices[v] for v in some]) for some in beside]
    waiting = [(size, variable) for variable, size in enumerate(sizes) if size > 1]
    heapq.heapify(waiting)
    order: list[EliminationStep] = []
    next_number = len(scopes)
    while waiting:
        size, variable = heapq.heappop(waiting)
        # Sizes change as others are taken out; an entry that is out of date has a newer one.
        if size != sizes[variable]:
            continue
        if size > largest and not apart:
            return None
        # 2. The variable's tables, which become one with an axis a variable, or several.
        tables = of[variable]
        is_apart = size > largest
        rest = tuple(sorted(beside[variable] - {variable}))
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
        # 3. What is left is beside the rest.
        sizes[variable] = 0
        for other in rest:
            own_tables = of[other]
            for number in tables:
                own_tables.pop(number, None)
            for number, one in enumerate(left, next_number):
                if other in one:
                    own_tables[number] = one
            own = beside[other]
            if is_apart:
                own = beside[other] = {other, *itertools.chain.from_iterable(own_tables.values())}
                now = math.prod([choices[v] for v in own])
            else:
                added = [v for v in rest if v not in own]
                own.update(added)
                own.discard(variable)
                now = sizes[other] // choices[variable] * math.prod([choices[v] for v in added])
            if now != sizes[other]:
                sizes[other] = now
                heapq.heappush(waiting, (now, other))
        next_number += len(left)
    return order


def find_cut_set(
    choices: Sequence[int],
    scopes: Sequence[tuple[int, ...]],
    largest: int,
    free: Collection[int] = (),
) -> set[int]:
    """Variables with whose choices known no table becomes larger than `largest`, or few do.

    Variables are taken out as by `find_order`. Where the smallest table would be too large, the
    variable in it that most others are beside is one of those found.

    Args:
        choices: how many each variable has.
        scopes: the variables of each table.
        largest: entries of a table.
        free: variables that are found only where there are no others.

    >>> sorted(find_cut_set((2, 2, 2, 2), [(0, 1), (1, 2), (2, 3), (0, 3)], 4))
    [0]
    """
    beside = [{variable} for variable in range(len(choices))]
    for scope in scopes:
        open_ = [v for v in scope if choices[v] > 1]
        for variable in open_:
            beside[variable].update(open_)
    sizes = [math.prod([choices[v] for v in some]) for some in beside]
    waiting = [(size, variable) for variable, size in enumerate(sizes) if size > 1]
    heapq.heapify(waiting)
    found: set[int] = set()
    while waiting:
        size, variable = heapq.heappop(waiting)
        if size != sizes[variable]:
            continue
        own = beside[variable]
        is_cut = size > largest
        if is_cut:
            variable = max(own, key=lambda v: (v not in free, len(beside[v]), choices[v], -v))
            found.add(variable)
            own = beside[variable]
        sizes[variable] = 0
        for other in own - {variable}:
            if not is_cut:
                beside[other] |= own
            beside[other].discard(variable)
            now = math.prod([choices[v] for v in beside[other]])
            if now != sizes[other]:
                sizes[other] = now
                heapq.heappush(waiting, (now, other))
    return found


def take_out(
    order: Sequence[EliminationStep],
    tables: Sequence[CostTable],
    choices: Sequence[int],
    known: KnownTables,
) -> list[Elimination]:
    """The variables of a sum taken out one by one.

    What the same tables give in the same places is found once: graphs repeat their layers.

    Args:
        order: in which they are, from `find_order`.
        tables: of the sum.
        choices: how many each variable has.
        known: what came of tables before, and comes of small ones here. They are told apart by the
            memory they are in, so that those of `tables` must be kept as long as this is.
    """
    numbered = list(tables)
    taken: list[Elimination] = []
    of_large: KnownTables = {}
    for scope, numbers, pattern, size, largest in order:
        variable, rest = scope[0], scope[1:]
        joined = [numbered[number] for number in numbers]
        if largest is not None:
            left = taken_apart(variable, joined, choices, largest)
            taken.append(Elimination(variable, scope, joined, left, None))
        else:
            # The least over the variable's axis, for choices of the rest.
            own = known if size <= MOST_KEPT else of_large
            key = (pattern, *[id(seconds_s) for _, seconds_s in joined])
            found = own.get(key)
            if found is None:
                sizes = tuple([choices[v] for v in scope])
                least_s = least_joined(joined, _read_places(pattern), sizes)
                found = own[key] = KnownJoin(joined, least_s, {})
            left = [CostTable(rest, found.left_s)]
            taken.append(Elimination(variable, scope, joined, left, found.best))
        numbered += left
    return taken


def _read_places(pattern: Sequence[int]) -> tuple[Places, ...]:
    """The places of each table's variables.

    >>> _read_places((7, -1, 0, 2, -1, 1))
    ((0, 2), (1,))
    """
    found: list[list[int]] = []
    for place in pattern[1:]:
        if place < 0:
            found.append([])
        else:
            found[-1].append(place)
    return tuple(map(tuple, found))


def read_off(taken: Sequence[Elimination], choices: Sequence[int]) -> tuple[int, ...]:
    """The choices where the sum is least, or near that if tables were taken apart.

    >>> tables = [CostTable((0, 1), np.array([[5.0, 6.0], [0.0, 9.0]]))]
    >>> order = find_order((2, 2), [(0, 1)], 4) or []
    >>> read_off(take_out(order, tables, (2, 2), {}), (2, 2))
    (1, 0)
    """
    # Backwards: when a variable is read off, the rest of its tables is chosen already.
    chosen = [0] * len(choices)
    for variable, scope, joined, _, best in reversed(taken):
        known = {} if best is None else best
        at = tuple([chosen[v] for v in scope[1:]])
        found = known.get(at)
        if found is None:
            costs = np.zeros(choices[variable])
            for table in joined:
                costs += row_of(table, variable, chosen)
            found = known[at] = int(costs.argmin())
        chosen[variable] = found
    return tuple(chosen)
