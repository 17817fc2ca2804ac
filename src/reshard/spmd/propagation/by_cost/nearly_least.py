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
# Entries of tables where larger ones than those of an exact answer would be needed: which is best
# is not known before.
LARGEST = (1 << 14, 1 << 16, 1 << 18)
# Operations of a graph in which elimination is done again as if readers shared what they can.
MOST_BOUNDED = 512
# Of answers found so, how many descend with what readers share.
MOST_DESCENTS = 3
# Values between the centres of two windows of descent.
CENTRES_APART = 8

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
        return improved(problem, begun, centres=())
    total = problem.sum()
    # As if each reader moved what it reads, and as if they shared what they can.
    chosen, is_least = total.nearly_eliminated()
    found = [chosen]
    if is_least and problem.reads.groups and len(problem.graph.operations) <= MOST_BOUNDED:
        bound = problem.sum(NOTHING, problem.reads.parts(chosen))
        found += filter(None, [bound.eliminated()])
    if not is_least:
        sums = total, problem.sum(NOTHING, {})
        found += [one.nearly_eliminated(largest)[0] for one in sums for largest in LARGEST]
        return improved(problem, begun, found)
    return improved(problem, begun, found, is_least=True)


def improved(
    problem: CostProblem,
    begun: Sequence[Choices],
    found: Sequence[Choices] = (),
    *,
    is_least: bool = False,
    centres: Sequence[int] | None = None,
) -> tuple[Choices, float]:
    """What descent makes of answers, each movement priced by its program, and the seconds.

    Args:
        problem: whose movements are filled.
        begun: answers, no worse than which is what comes of them.
        found: other answers.
        is_least: whether these are the least where nothing is shared: they descend only with what
            is.
        centres: of windows in which the best descends; one every few values when None.
    """
    total = problem.sum()
    values = len(problem.graph.values)
    ways = range(values, len(total.choices))
    if centres is None:
        centres = () if is_least else range(0, values, CENTRES_APART)
    # 1. With what is shared then moved once. Windows take long: they are for the best alone.
    if not is_least:
        found = [total.descended(one, ways) for one in dict.fromkeys((*found, *begun))]
        best_few = sorted(found, key=problem.seconds_s)[:MOST_DESCENTS]
        found = [_descend(problem, one, (), ways) for one in best_few]
    chosen = min(found, key=problem.seconds_s)
    if centres:
        chosen = _descend(problem, chosen, centres, ways)
    # 2. With the prices of programs. Answers whose movements are priced stay as they are.
    problem.price(begun)
    seen_s = {one: problem.seconds_s(one) for one in begun}
    for _ in range(MOST_CHANGES + 1):
        is_changed = problem.price([chosen])
        seen_s[chosen] = problem.seconds_s(chosen)
        best = min(seen_s, key=seen_s.__getitem__)
        if not is_changed:
            break
        chosen = _descend(problem, best, centres, ways)
    return best, seen_s[best]


def _descend(problem: CostProblem, start: Choices, centres: Sequence[int], ways: range) -> Choices:
    """Descends as long as that helps, with what readers share moved once.

    What is shared is that of the answer before, with which no answer is taken for less than it is.
    """
    chosen, seconds_s = start, problem.seconds_s(start)
    for _ in range(MOST_CHANGES):
        total = problem.sum(problem.shared(chosen))
        found = total.descended_in_windows(chosen, centres, ways)
        found_s = problem.seconds_s(found)
        if found_s >= seconds_s:
            break
        chosen, seconds_s = found, found_s
    return chosen
