"""Propagation by cost: the shardings with the least estimated time.

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

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from reshard._contexts import pause_gc
from reshard.errors import UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.graph import Graph
from reshard.spmd.propagation.axis_parts import AxisTable
from reshard.spmd.propagation.by_cost.common_reads import NOTHING
from reshard.spmd.propagation.by_cost.cost_model import CostModel, Machine
from reshard.spmd.propagation.by_cost.cost_problem import CostProblem
from reshard.spmd.propagation.by_cost.nearly_least import Choices, solve_nearly
from reshard.spmd.propagation.propagation import PropagatedGraph, propagate_by_rules

OTHERS = ("aggressive", "basic")
# Operations of a graph whose least sum is looked for by prices of programs, and in how many rounds.
MOST_JUDGED = 16
MOST_ROUNDS = 256
# Sums of tables are compared up to this part of them, far beyond what rounding does.
SLACK = 1e-6
# The same, of sums that are added up once.
ROUNDING = 1e-9


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


@pause_gc()
def propagate_by_cost(
    graph: Graph,
    annotations: Mapping[int, ShardingSpec],
    *,
    outputs: Mapping[int, ShardingSpec] | None = None,
    machine: Machine | None = None,
    exact: bool | None = None,
) -> CostedGraph:
    """Infer the shardings of a graph that minimize its estimated time.

    Args:
        graph: the function.
        annotations: shardings of some values, by their numbers; open ones may be extended.
        outputs: requested shardings of outputs, by their position.
        machine: links and devices; hosts of eight H100 when None.
        exact: whether to try to find a provably optimal solution first.

    Raises:
        SpecError: as for `propagate_graph`.
        UsageError: not a machine, or an unknown element type.
        LayoutError: a rank that the topology does not have, or a link of unknown speed.

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
    others_s = {other: problem.seconds_s(other) for other in others}
    # 4. What formulas choose, corrected by prices of programs.
    chosen, seconds_s = solve_nearly(problem, others, eliminates=exact is not False)
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


def _solve_exactly(
    problem: CostProblem, best: Choices, best_s: float
) -> tuple[Choices, float, bool]:
    """The least sum with every movement priced by its program, and whether it was found for sure.

    Prices begin as bounds that no program stays below, and movements that readers may share are
    paid in parts, which come to no more than is moved. The least sum of those is found, the
    movements in it get the price of their programs, and so on until it is no less than the best
    answer seen: then every other choice takes as long even by its bounds. Where parts say less than
    what is moved, it is decided of a movement whether it is made once or paid by each reader, and
    both are looked at (branch and bound). Choices that take longer than the best answer by their
    bounds are left out on the way.

    Args:
        problem: whose movements are priced.
        best: an answer to begin with.
        best_s: its seconds, all of its movements priced.
    """
    problem.fill(bounds=True)
    parts = problem.reads.parts(best)
    kept = [np.arange(count) for count in problem.sum().choices]
    # By their bounds; of equals the first that was made.
    waiting, count = [(0.0, 0, NOTHING)], 1
    for turn in range(MOST_ROUNDS):
        # In the rounds 0, 1, 2, 4, 8 and so on, since it takes as long as some rounds.
        if turn & (turn - 1) <= 0:
            least_s = problem.sum(NOTHING, parts).restricted(kept).least_of_choices()
            if least_s is None:
                break
            kept = [
                numbers[(own_s <= best_s * (1 + SLACK)) | (numbers == choice)]
                for numbers, own_s, choice in zip(kept, least_s, best, strict=True)
            ]
        if not waiting:
            return best, best_s, True
        bound_s, place, decided = heapq.heappop(waiting)
        total = problem.sum(decided, parts).restricted(kept)
        places = total.eliminated()
        if places is None:
            return best, best_s, False
        bound_s = max(bound_s, total.value(places))
        if bound_s >= best_s * (1 - ROUNDING):
            continue
        chosen = tuple(int(own[place]) for own, place in zip(kept, places, strict=True))
        is_changed = problem.price([chosen])
        chosen_s = problem.seconds_s(chosen)
        if chosen_s < best_s:
            best, best_s = chosen, chosen_s
        if is_changed:
            heapq.heappush(waiting, (bound_s, place, decided))
            continue
        gaps_s = problem.reads.gaps_s(chosen, parts, decided)
        move = max(gaps_s, key=gaps_s.__getitem__, default=None)
        if move is not None and gaps_s[move] > best_s * ROUNDING:
            for one in decided.both(move):
                heapq.heappush(waiting, (bound_s, count, one))
                count += 1
    return best, best_s, not waiting
