"""Propagation by cost: the shardings of least estimated time.

The third strategy of propagation weighs what the other two decide by rules: whose operand moves
where two disagree, whether contributions are combined at once or later, whether a device may do
the work of several. Each value chooses among shardings, each operation among ways of running
(`cost_candidates`); a choice costs what the operations take, and what moves between the sharding
of a value and those in which operations read and make it (`cost_model`)::

    seconds = sum over operations   compute(way)
            + sum over operands     movement(value's sharding -> what the way reads)
            + sum over results      movement(what the way makes -> value's sharding)
            + sum over outputs      movement(value's sharding -> what was asked for)

The least sum is found exactly where the graph lets it be (`least_sum`: chains, trees, and
graphs in which few values are alive at once), else by descent from what the other strategies
say.

Movements are priced by the programs that are run. Those take milliseconds to find, so formulas
choose first; what they choose is priced, and changed where that shows something better. In a small
graph bounds follow: what could be better by them is priced, until nothing can. Either way the
answer's seconds are those of its programs. There is no clock in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.errors import UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.propagation.axis_parts import AxisTable
from reshard.spmd.propagation.cost_model import CostModel, Machine
from reshard.spmd.propagation.cost_problem import CostProblem, close
from reshard.spmd.propagation.graph import Graph
from reshard.spmd.propagation.propagation import (
    PropagatedGraph,
    propagate_by_rules,
)

OTHERS = ("aggressive", "basic")
# Operations of a graph whose least sum is looked for by prices of programs, and in how many rounds.
MOST_JUDGED = 16
MOST_ROUNDS = 256
# Sums of tables are compared up to this part of them, far beyond what rounding does.
SLACK = 1e-6
# How often what formulas chose is changed.
MOST_CHANGES = 4
# Up to how many times the least sum others descend in windows too.
NEAR = 1.02
# Values between the centres of two windows of descent.
CENTRES_APART = 8


@dataclass(frozen=True, slots=True)
class CostedGraph:
    """A propagated graph and its estimated time.

    Args:
        propagated: the shardings, and what each operation runs with.
        seconds_s: estimated time of all operations and movements, one behind the other.
        is_exact: whether no choice among the candidates takes less, each movement priced by its
            program.
        others_s: the same time for the shardings of the other strategies, each operation run in
            the way that suits those best.
    """

    propagated: PropagatedGraph
    seconds_s: float
    is_exact: bool
    others_s: Mapping[str, float]


def propagate_by_cost(
    graph: Graph,
    annotations: Mapping[int, ShardingSpec],
    *,
    outputs: Mapping[int, ShardingSpec] | None = None,
    machine: Machine | None = None,
    exact: bool | None = None,
    starts: Sequence[Sequence[ShardingSpec]] = (),
) -> CostedGraph:
    """The shardings of least estimated time.

    Args:
        graph: the function.
        annotations: shardings of some values, by their numbers; open ones may be extended.
        outputs: shardings in which outputs are asked for, by their position.
        machine: links and devices; hosts of eight H100 when None.
        exact: False never looks for the exact answer; else it is looked for first.
        starts: shardings of all values, near which to look as well.

    Raises:
        SpecError: as `propagate_graph` does.
        UsageError: what is no machine, or an unknown element type.
        LayoutError: a rank that the topology has not, or a link that it does not know.

    >>> from reshard import DeviceMesh, spec
    >>> mesh = DeviceMesh.of(x=2)
    >>> rule = "([i, k], [k, j]) -> ([i, j]) {i=64, j=64, k=65536} reduction={k}"
    >>> graph = Graph.of([(64, 65536), (65536, 64)], [("matmul", [0, 1], rule)], [2])
    >>> given = {0: spec(mesh, "-, x"), 1: spec(mesh, "x, -")}
    >>> found = propagate_by_cost(graph, given)
    >>> found.is_exact, str(found.propagated.values[2])
    (True, 'x, -')
    """
    machine = Machine() if machine is None else machine
    if not isinstance(machine, Machine):
        raise UsageError(f"{machine!r} is no Machine; give sp.Machine(topology)")
    # 1. What the other strategies say: candidates, starting points, and figures to compare with.
    bases = [
        propagate_by_rules(graph, annotations, outputs=outputs, strategy=strategy)
        for strategy in OTHERS
    ]
    mesh = bases[0].mesh
    if mesh is None:
        return CostedGraph(bases[0], 0.0, True, dict.fromkeys(OTHERS, 0.0))
    table = AxisTable.of(mesh)
    # 2. Candidates of values and operations.
    problem = CostProblem(graph, table, CostModel.of(table, machine))
    problem.candidates(annotations, dict(outputs or {}), bases)
    # 3. The other strategies' seconds. Operations are the inner variables: no table has two of
    # them, so that each finds its best way by itself once the values are chosen.
    problem.fill(bounds=False)
    total = problem.sum()
    ways = range(len(graph.values), len(total.choices))
    nearest = [problem.start(number) for number in range(len(bases))]
    others = [total.descended(one, ways, sweeps=0) for one in nearest]
    problem.price(others)
    total = problem.sum()
    others_s = {other: total.value(other) for other in others}
    # 4. What formulas choose, corrected by prices of programs.
    near = [problem.nearest([close(table.encoded(one)) for one in start]) for start in starts]
    begun = [*others, *(total.descended(one, ways, sweeps=0) for one in near)]
    chosen, seconds_s = _solve_nearly(problem, {one: total.value(one) for one in begun}, exact)
    # 5. What is better, or the proof that nothing is, where the graph is small enough.
    is_exact = False
    if exact is not False and len(graph.operations) <= MOST_JUDGED:
        chosen, seconds_s, is_exact = _solve_exactly(problem, chosen, seconds_s)
    return CostedGraph(
        problem.answer(chosen, bases[0]),
        seconds_s,
        is_exact,
        {name: others_s[other] for name, other in zip(OTHERS, others, strict=True)},
    )


Choices = tuple[int, ...]


def _solve_exactly(
    problem: CostProblem, best: Choices, best_s: float
) -> tuple[Choices, float, bool]:
    """The least sum with every movement priced by its program, and whether it was found for sure.

    Prices begin as bounds that no program stays below. The least sum of those is found, the
    movements in it get the price of their programs, and so on until it is no less than the best
    answer seen: then every other choice takes as long even by its bounds. Choices that take longer
    than that answer by their bounds are left out on the way.

    Args:
        problem: whose movements are priced.
        best: an answer to begin with.
        best_s: its seconds, all of its movements priced.
    """
    problem.fill(bounds=True)
    kept = [np.arange(count) for count in problem.sum().choices]
    for turn in range(MOST_ROUNDS):
        total = problem.sum().restricted(kept)
        # In the rounds 0, 1, 2, 4, 8 and so on, since it takes as long as some rounds.
        if turn & (turn - 1) <= 0:
            least_s = total.least_of_choices()
            if least_s is None:
                break
            kept = [
                numbers[(own_s <= best_s * (1 + SLACK)) | (numbers == choice)]
                for numbers, own_s, choice in zip(kept, least_s, best, strict=True)
            ]
            total = problem.sum().restricted(kept)
        places = total.eliminated()
        if places is None:
            break
        if total.value(places) >= best_s:
            return best, best_s, True
        chosen = tuple(int(own[place]) for own, place in zip(kept, places, strict=True))
        is_changed = problem.price([chosen])
        chosen_s = problem.sum().value(chosen)
        if chosen_s < best_s:
            best, best_s = chosen, chosen_s
        if not is_changed:
            return best, best_s, True
    return best, best_s, False


def _solve_nearly(
    problem: CostProblem, begun_s: Mapping[Choices, float], exact: bool | None
) -> tuple[Choices, float]:
    """The least sum by formulas, changed as long as prices of programs show something better."""
    total = problem.sum()
    ways = range(len(problem.graph.values), len(total.choices))
    chosen = None if exact is False else total.eliminated()
    centres = [] if chosen is not None or exact is False else range(0, ways.start, CENTRES_APART)
    if chosen is None:
        # Windows take long: what is far above another is left.
        lowest_s = {one: total.value(one) for one in (total.descended(o, ways) for o in begun_s)}
        near = [one for one in lowest_s if lowest_s[one] <= NEAR * min(lowest_s.values())]
        ended = (total.descended_in_windows(one, centres, ways) for one in near)
        chosen = min(ended, key=total.value)
    # Seconds of answers whose movements are priced, which stay as they are.
    seen_s: dict[Choices, float] = {}
    for _ in range(MOST_CHANGES + 1):
        is_changed = problem.price([chosen])
        total = problem.sum()
        seen_s[chosen] = total.value(chosen)
        seen_s.update(begun_s)
        best = min(seen_s, key=seen_s.__getitem__)
        if not is_changed:
            break
        chosen = total.descended_in_windows(best, centres, ways)
    return best, seen_s[best]
