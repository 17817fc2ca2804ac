"""Least inputs: optimal shardings of a small graph's inputs, with a proof of optimality.

Inputs are chosen one after another. A partial choice has a lower bound: the minimum sum, in which
every movement has the time of a bound that no program stays below, or of its program if that is
known, and a value that several operations read is moved once. No program with these choices takes
less time, and choices whose inputs alone exceed the limit are discarded::

    x: rows                 w: whole         9 us     judged: 11 us
       17 us                   columns      12 us     left out
    x: columns  14 us                                 left out

The partial choice with the lowest bound is expanded first: its movements are priced with their
programs, which may raise the bound, then the next input is chosen. If all inputs are chosen, the
program is traced and evaluated. If no remaining bound is below the best program seen, that program
is optimal (best-first branch and bound; Land and Doig, 1960).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from reshard.spmd.programs.automatic.input_search import InputSearch
from reshard.spmd.propagation.by_cost.common_reads import NOTHING

# How many beginnings are looked at.
MOST_LOOKS = 2048
# Sums are compared up to this part of them, far beyond what rounding does.
SLACK = 1e-9


class _Beginning(NamedTuple):
    """The choices of the first inputs, and the seconds that no program with them takes less than.

    `place` is in which order beginnings were found: of equals the first is looked at.
    """

    bound_s: float
    place: int
    chosen: tuple[int, ...]


def least_inputs(
    search: InputSearch,
    judge: Callable[[tuple[int, ...]], float],
    best_s: float,
    limit: float,
) -> bool:
    """Judges all choices of inputs that may take less than the best. Whether it came to the end.

    Args:
        search: of the graph.
        judge: the seconds of the program with choices of all free inputs, infinite where it holds
            more than the limit.
        best_s: the seconds of the best program known.
        limit: the most bytes that all inputs together may have on a rank.
    """
    problem, free = search.problem, search.free
    problem.fill(bounds=True)
    sizes = [search.sizes_bytes[number] for number in free]
    # The least that inputs from each place on take.
    least_bytes = [sum(float(one.min()) for one in sizes[place:]) for place in range(len(free) + 1)]
    waiting, count = [_Beginning(0.0, 0, ())], 1
    for _ in range(MOST_LOOKS):
        if not waiting or waiting[0].bound_s >= best_s * (1 - SLACK):
            return True
        bound_s, place, chosen = heapq.heappop(waiting)
        kept = [np.arange(choices) for choices in search.total.choices]
        for number, choice in zip(free, chosen, strict=False):
            kept[number] = np.array([choice])
        total = problem.sum(NOTHING, {}).restricted(kept)
        places = total.eliminated()
        if places is None:
            return False
        answer = tuple(int(own[at]) for own, at in zip(kept, places, strict=True))
        has_risen = problem.price([answer])
        least_s = max(bound_s, total.value(places))
        if has_risen or least_s > bound_s * (1 + SLACK):
            # With its movements priced it may not be the least any more.
            heapq.heappush(waiting, _Beginning(least_s, place, chosen))
            continue
        if len(chosen) == len(free):
            best_s = min(best_s, judge(chosen))
            continue
        every_s = total.least_of_choices()
        if every_s is None:
            return False
        held_bytes = sum(float(own[at]) for own, at in zip(sizes, chosen, strict=False))
        for choice, own_s in enumerate(every_s[free[len(chosen)]]):
            size_bytes = held_bytes + float(sizes[len(chosen)][choice])
            if size_bytes + least_bytes[len(chosen) + 1] <= limit:
                # Sums are found up to rounding.
                beginning = _Beginning(float(own_s) * (1 - SLACK), count, (*chosen, choice))
                heapq.heappush(waiting, beginning)
                count += 1
    return False
