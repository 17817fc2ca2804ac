"""Movements that readers share: sums on either side of what is moved, for any answer."""

from __future__ import annotations

from random import Random

import pytest

from reshard import DeviceMesh, spec
from reshard.spmd.core.operator import rule_of
from reshard.spmd.graph import Graph
from reshard.spmd.propagation.axis_parts import AxisTable
from reshard.spmd.propagation.by_cost.common_reads import NOTHING, Decisions
from reshard.spmd.propagation.by_cost.cost_model import CostModel, Machine
from reshard.spmd.propagation.by_cost.cost_problem import CostProblem
from reshard.spmd.propagation.by_cost.cost_propagation import OTHERS
from reshard.spmd.propagation.strategies import propagate_graph

MESH = DeviceMesh.of(x=2, y=2)
SHAPE = (64, 64)
REL = 1e-9


def problem() -> CostProblem:
    """A value that three operations read, one of them twice, and another that two read."""
    product = rule_of("matmul", [SHAPE, SHAPE])
    both = rule_of("add", [SHAPE, SHAPE])
    graph = Graph.of(
        [SHAPE, SHAPE],
        [
            ("matmul", [0, 0], product),
            ("matmul", [0, 1], product),
            ("add", [2, 3], both),
            ("add", [4, 0], both),
            ("matmul", [3, 5], product),
        ],
        [6],
    )
    given = {0: spec(MESH, "x, y"), 1: spec(MESH, "y, x")}
    bases = [propagate_graph(graph, given, strategy=strategy) for strategy in OTHERS]
    table = AxisTable.of(MESH)
    found = CostProblem(graph, table, CostModel(table, Machine()))
    found.candidates(given, {}, bases)
    found.fill(bounds=False)
    return found


def draw(one: CostProblem, random: Random, near: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """An answer; beside another, if one is given, with half of its choices."""
    found = tuple(map(random.randrange, one.sum().choices))
    if near is None:
        return found
    return tuple(
        old if random.random() < 0.5 else new for old, new in zip(near, found, strict=True)
    )


def moved_s(one: CostProblem, chosen: tuple[int, ...]) -> float:
    """What an answer takes, counted by hand: what is computed, and each movement once."""
    count = len(one.graph.values)
    values = one.shardings(chosen)
    total, moves = 0.0, set()
    for number, (operation, ways) in enumerate(zip(one.graph.operations, one.ways, strict=True)):
        way = chosen[count + number]
        total += float(one.sum().tables[number].seconds_s[way])
        reads, makes = ways.run(way, len(operation.operands))
        moves.update(
            (value, None, end) for value, end in zip(operation.operands, reads, strict=True)
        )
        moves.update(
            (value, end, None) for value, end in zip(operation.results, makes, strict=True)
        )
    for value, source, target in moves:
        ends = source or values[value], target or values[value]
        total += one.model.movement_s(*ends, SHAPE, 4)
    return total


@pytest.mark.parametrize("seed", range(6))
def test_what_several_read_is_moved_once(seed: int) -> None:
    one, random = problem(), Random(seed)
    for _ in range(30):
        chosen = draw(one, random)
        assert one.seconds_s(chosen) == pytest.approx(moved_s(one, chosen), rel=REL)


@pytest.mark.parametrize("seed", range(6))
def test_moved_once_is_what_the_answer_takes_and_never_less_than_others(seed: int) -> None:
    one, random = problem(), Random(seed)
    chosen = draw(one, random)
    total = one.sum(one.shared(chosen))
    assert total.value(chosen) == pytest.approx(one.seconds_s(chosen), rel=REL)
    for _ in range(50):
        other = draw(one, random, chosen)
        assert total.value(other) >= one.seconds_s(other) * (1 - REL)


@pytest.mark.parametrize("seed", range(6))
def test_in_parts_is_what_the_answer_takes_and_never_more_than_others(seed: int) -> None:
    one, random = problem(), Random(seed)
    chosen = draw(one, random)
    parts = one.reads.parts(chosen)
    total = one.sum(NOTHING, parts)
    assert total.value(chosen) == pytest.approx(one.seconds_s(chosen), rel=REL)
    for _ in range(50):
        other = draw(one, random, chosen)
        gaps_s = one.reads.gaps_s(other, parts, NOTHING)
        assert min(gaps_s.values(), default=0.0) >= -REL
        taken_s = total.value(other) + sum(gaps_s.values())
        assert taken_s == pytest.approx(one.seconds_s(other), rel=REL)


@pytest.mark.parametrize("seed", range(6))
def test_decisions_leave_no_answer_out(seed: int) -> None:
    """Of what may be decided of each movement in turn, one is a bound of any answer still."""
    one, random = problem(), Random(seed)
    parts = one.reads.parts(draw(one, random))
    for _ in range(10):
        other = draw(one, random)
        decided: Decisions = NOTHING
        for move in one.reads.gaps_s(other, parts, NOTHING):
            decided = min(decided.both(move), key=lambda d: one.sum(d, parts).value(other))
            assert one.sum(decided, parts).value(other) <= one.seconds_s(other) * (1 + REL)
        assert not one.reads.gaps_s(other, parts, decided)
        taken_s = one.sum(decided, parts).value(other)
        assert taken_s == pytest.approx(one.seconds_s(other), rel=REL)
