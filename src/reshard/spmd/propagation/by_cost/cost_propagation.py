"""Propagation by cost: the shardings with the least estimated time.

The strategy "cost" weighs what the others decide by rules: which operand moves where two disagree,
whether contributions are combined at once or later, whether several devices may do the same work.
Each value has a choice of shardings, each operation a choice of ways of running (`candidates`). A
choice costs the time of the operations, and of the movements between the sharding of a value and
those in which operations read and make it (`cost_model`)::

    seconds = sum over operations   compute(way)
            + sum over operands     movement(value's sharding -> what the way reads)
            + sum over results      movement(what the way makes -> value's sharding)
            + sum over outputs      movement(value's sharding -> what was asked for)

The minimum is found exactly by elimination (`factor_graph`) in chains, trees, and graphs in which
few values are live at once; otherwise by descent from the results of the other strategies.

A movement takes the time of the program that is run for it. Programs take milliseconds to find, so
formulas choose first; the chosen movements are priced by their programs, and the choice is changed
where that shows a better one. In a small graph bounds follow: whatever could be better by them is
priced, until nothing could. Either way the time of the answer is that of its programs, and it does
not depend on how long the search takes.

For graphs of any size:

1. Formulas choose, by elimination and by descent, as if each reader moved its operand itself.
2. The best result descends with shared movements made once, then in windows.
3. Its movements are priced by their programs, and it descends again if that shows something better.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from reshard._contexts import pause_gc
from reshard._validation import check_type
from reshard.sharding import ShardingSpec
from reshard.spmd.graph import Graph
from reshard.spmd.propagation.axes import AxisTable
from reshard.spmd.propagation.by_cost.cost_model import CostModel, Machine
from reshard.spmd.propagation.by_cost.cost_problem import CostProblem
from reshard.spmd.propagation.by_cost.movements import NOTHING
from reshard.spmd.propagation.propagation import PropagatedGraph, propagate_by_rules

# Changes to the choice of formulas.
MAX_CHANGES = 4
# Entries of tables if elimination is not exact.
MAX_BOUND_ENTRIES = 1 << 16
# Operations of a graph in which elimination is done again as if readers shared what they can.
MAX_BOUNDED_OPERATIONS = 512

Choices = tuple[int, ...]


def solve_nearly(
    problem: CostProblem, begun: Sequence[Choices], *, eliminates: bool = True
) -> tuple[Choices, float]:
    """Return choices of a low sum, and the seconds, with each movement priced by its program.

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
    answers = [chosen]
    if not is_least:
        sums = total, problem.sum(NOTHING, {})
        answers += [cost_sum.nearly_eliminated(MAX_BOUND_ENTRIES)[0] for cost_sum in sums]
        return improved(problem, begun, answers)
    if problem.reads.groups and len(problem.graph.operations) <= MAX_BOUNDED_OPERATIONS:
        bound = problem.sum(NOTHING, problem.reads.parts(chosen))
        answers += filter(None, [bound.eliminated()])
    return improved(problem, begun, answers, is_least=True, in_windows=False)


def improved(
    problem: CostProblem,
    begun: Sequence[Choices],
    answers: Sequence[Choices] = (),
    *,
    is_least: bool = False,
    in_windows: bool = True,
) -> tuple[Choices, float]:
    """Improve answers by descent, with each movement priced by its program; also the seconds.

    Args:
        problem: whose movements are filled.
        begun: starting answers; the result is no worse than the best of them.
        answers: other answers.
        is_least: whether these are the least where nothing is shared: they descend only with what
            is.
        in_windows: whether the best descend in windows, too.
    """
    total = problem.sum()
    ways = range(len(problem.graph.values), len(total.choices))
    # 1. With what is shared then moved once.
    if not is_least:
        answers = [total.descended(answer, ways) for answer in dict.fromkeys((*answers, *begun))]
    chosen = min(answers, key=problem.seconds_s)
    if not is_least:
        chosen = _descend(problem, chosen, ways, in_windows)
    # 2. With the prices of programs. Answers whose movements are priced stay as they are.
    problem.price(begun)
    seen_s = {answer: problem.seconds_s(answer) for answer in begun}
    for _ in range(MAX_CHANGES + 1):
        is_changed = problem.price([chosen])
        seen_s[chosen] = problem.seconds_s(chosen)
        best = min(seen_s, key=seen_s.__getitem__)
        if not is_changed:
            break
        chosen = _descend(problem, best, ways, in_windows)
    return best, seen_s[best]


def _descend(problem: CostProblem, start: Choices, ways: range, in_windows: bool) -> Choices:
    """Descend as long as that helps, with shared movements made once.

    The shared movements are those of the previous answer, so no answer is underestimated.
    """
    chosen, seconds_s = start, problem.seconds_s(start)
    for _ in range(MAX_CHANGES):
        total = problem.sum(problem.shared(chosen))
        descended = total.descended_in_windows if in_windows else total.descended
        result = descended(chosen, ways)
        result_s = problem.seconds_s(result)
        if result_s >= seconds_s:
            break
        chosen, seconds_s = result, result_s
    return chosen


OTHERS = ("aggressive", "basic")
# Operations of a graph whose minimum is proven, and the rounds that the proof may take.
MAX_EXACT_OPERATIONS = 16
MAX_ROUNDS = 256
# Sums of tables are compared up to this fraction, which is far above rounding errors.
SLACK = 1e-6
# The same for sums that are added up once.
ROUNDING = 1e-9


@pause_gc()
def propagate_by_cost(
    graph: Graph,
    annotations: Mapping[int, ShardingSpec],
    *,
    outputs: Mapping[int, ShardingSpec] | None = None,
    machine: Machine | None = None,
    exact: bool | None = None,
) -> PropagatedGraph:
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
    >>> annotations = {0: spec(mesh, "-, x"), 1: spec(mesh, "x, -")}
    >>> propagated = propagate_by_cost(graph, annotations)
    >>> propagated.is_exact, str(propagated.values[2])
    (True, 'x, -')
    """
    machine = Machine() if machine is None else machine
    check_type(machine, Machine, "machine", "give sp.Machine(topology)")
    # 1. The results of the other strategies: candidates, starting points, and a comparison.
    bases = [
        propagate_by_rules(graph, annotations, outputs=outputs, strategy=strategy)
        for strategy in OTHERS
    ]
    mesh = bases[0].mesh
    if mesh is None:
        others_s = dict.fromkeys(OTHERS, 0.0)
        return replace(bases[0], seconds_s=0.0, is_exact=True, others_s=others_s)
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
    others = [total.descended(start, ways, sweeps=0) for start in nearest]
    problem.price(others)
    known_s = {other: problem.seconds_s(other) for other in others}
    # 4. The choice by formulas, corrected by prices of programs.
    chosen, seconds_s = solve_nearly(problem, others, eliminates=exact is not False)
    # 5. A better choice, or the proof that there is none, if the graph is small enough.
    is_exact = False
    if exact is not False and len(graph.operations) <= MAX_EXACT_OPERATIONS:
        chosen, seconds_s, is_exact = _solve_exactly(problem, chosen, seconds_s)
    return replace(
        problem.answer(chosen, bases[0]),
        seconds_s=seconds_s,
        is_exact=is_exact,
        others_s={name: known_s[other] for name, other in zip(OTHERS, others, strict=True)},
    )


def _solve_exactly(
    problem: CostProblem, best: Choices, best_s: float
) -> tuple[Choices, float, bool]:
    """Return the minimum with every movement priced by its program, and whether it is proven.

    Prices begin as bounds that no program stays below, and movements that readers may share are
    paid in parts, which come to no more than is moved. The least sum of those is found, the
    movements in it get the price of their programs, and so on until it is no less than the best
    answer seen: then every other choice takes as long even by its bounds. If parts of a movement
    come to less than the movement, the search branches on whether it is made once or paid by each
    reader (branch and bound). Choices that take longer than the best answer by their
    bounds are left out on the way.

    Args:
        problem: whose movements are priced.
        best: an answer to begin with.
        best_s: its seconds, all of its movements priced.
    """
    problem.fill(bounds=True)
    parts = problem.reads.parts(best)
    allowed = [np.arange(count) for count in problem.sum().choices]
    # By their bounds; of equals the first that was made.
    waiting, count = [(0.0, 0, NOTHING)], 1
    for turn in range(MAX_ROUNDS):
        # In the rounds 0, 1, 2, 4, 8 and so on, since it takes as long as some rounds.
        if turn & (turn - 1) <= 0:
            least_s = problem.sum(NOTHING, parts).restricted(allowed).least_of_choices()
            if least_s is None:
                break
            allowed = [
                # The best answer's own choices stay, whatever rounding does to their minimum.
                numbers[(choice_s <= best_s * (1 + SLACK)) | (numbers == choice)]
                for numbers, choice_s, choice in zip(allowed, least_s, best, strict=True)
            ]
        if not waiting:
            return best, best_s, True
        bound_s, place, decided = heapq.heappop(waiting)
        total = problem.sum(decided, parts).restricted(allowed)
        places = total.eliminated()
        if places is None:
            return best, best_s, False
        bound_s = max(bound_s, total.value(places))
        if bound_s >= best_s * (1 - ROUNDING):
            continue
        chosen = tuple(int(numbers[place]) for numbers, place in zip(allowed, places, strict=True))
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
            for decision in decided.both(move):
                heapq.heappush(waiting, (bound_s, count, decision))
                count += 1
    return best, best_s, not waiting
