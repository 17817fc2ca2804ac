"""Nearly least: heuristic solutions for graphs of any size.

1. Formulas choose, by elimination and by descent, as if each reader moved what it reads.
2. What is best of that descends with what readers share moved once, then in windows.
3. Its movements get the prices of their programs, and it descends again where that shows something
   better.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.spmd.propagation.by_cost.common_reads import NOTHING
from reshard.spmd.propagation.by_cost.cost_problem import CostProblem

# How often what formulas chose is changed.
MOST_CHANGES = 4
# Entries of tables where larger ones than those of an exact answer would be needed.
LARGEST = 1 << 16
# Operations of a graph in which elimination is done again as if readers shared what they can.
MOST_BOUNDED = 512

Choices = tuple[int, ...]


def solve_nearly(
    problem: CostProblem, begun: Sequence[Choices], *, eliminates: bool = True
) -> tuple[Choices, float]:
    """Choices of a low sum, each movement priced by its program, and the seconds.

    Args:
        problem: whose movements are filled.
        begun: answers to begin with.
        eliminates: whether to look further than by single changes of these.
    """
    if not eliminates:
        return improved(problem, begun, in_windows=False)
    # As if each reader moved what it reads, and as if they shared what they can.
    total = problem.sum()
    chosen, is_least = total.nearly_eliminated()
    found = [chosen]
    if not is_least:
        sums = total, problem.sum(NOTHING, {})
        found += [one.nearly_eliminated(LARGEST)[0] for one in sums]
        return improved(problem, begun, found)
    if problem.reads.groups and len(problem.graph.operations) <= MOST_BOUNDED:
        bound = problem.sum(NOTHING, problem.reads.parts(chosen))
        found += filter(None, [bound.eliminated()])
    return improved(problem, begun, found, is_least=True, in_windows=False)


def improved(
    problem: CostProblem,
    begun: Sequence[Choices],
    found: Sequence[Choices] = (),
    *,
    is_least: bool = False,
    in_windows: bool = True,
) -> tuple[Choices, float]:
    """What descent makes of answers, each movement priced by its program, and the seconds.

    Args:
        problem: whose movements are filled.
        begun: answers, no worse than which is what comes of them.
        found: other answers.
        is_least: whether these are the least where nothing is shared: they descend only with what
            is.
        in_windows: whether the best descend in windows, too.
    """
    total = problem.sum()
    ways = range(len(problem.graph.values), len(total.choices))
    # 1. With what is shared then moved once.
    if not is_least:
        found = [total.descended(one, ways) for one in dict.fromkeys((*found, *begun))]
    chosen = min(found, key=problem.seconds_s)
    if not is_least:
        chosen = _descend(problem, chosen, ways, in_windows)
    # 2. With the prices of programs. Answers whose movements are priced stay as they are.
    problem.price(begun)
    seen_s = {one: problem.seconds_s(one) for one in begun}
    for _ in range(MOST_CHANGES + 1):
        is_changed = problem.price([chosen])
        seen_s[chosen] = problem.seconds_s(chosen)
        best = min(seen_s, key=seen_s.__getitem__)
        if not is_changed:
            break
        chosen = _descend(problem, best, ways, in_windows)
    return best, seen_s[best]


def _descend(problem: CostProblem, start: Choices, ways: range, in_windows: bool) -> Choices:
    """Descends as long as that helps, with what readers share moved once.

    What is shared is that of the answer before, with which no answer is taken for less than it is.
    """
    chosen, seconds_s = start, problem.seconds_s(start)
    for _ in range(MOST_CHANGES):
        total = problem.sum(problem.shared(chosen))
        descended = total.descended_in_windows if in_windows else total.descended
        found = descended(chosen, ways)
        found_s = problem.seconds_s(found)
        if found_s >= seconds_s:
            break
        chosen, seconds_s = found, found_s
    return chosen
