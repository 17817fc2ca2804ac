"""Tables of movements: both directions, columns that repeat, and prices that come later."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, dtype, spec
from reshard.cost import load_preset
from reshard.spmd.core.operator import rule_of
from reshard.spmd.graph import Graph
from reshard.spmd.propagation.axes import AxisTable
from reshard.spmd.propagation.by_cost.cost_model import CostModel, Machine
from reshard.spmd.propagation.by_cost.cost_problem import CostProblem
from reshard.spmd.propagation.by_cost.cost_propagation import OTHERS
from reshard.spmd.propagation.by_cost.movements import (
    NO_EDGES,
    NOTHING,
    Decisions,
    EdgeMoves,
    ValueMovements,
)
from reshard.spmd.propagation.strategies import propagate_graph

MESH = DeviceMesh.of(x=2, y=2)
SHAPE, ELEMENT = (64, 64), dtype("float32")


def make() -> tuple[ValueMovements, tuple[int, ...]]:
    model = CostModel(AxisTable.of(MESH), Machine())
    moves = ValueMovements(model, SHAPE, ELEMENT)
    texts = ("-, -", "x, -", "-, y", "x, y")
    numbers = moves.numbers(model.table.encoded(spec(MESH, text)) for text in texts)
    moves.fill(bounds=False)
    return moves, numbers


def test_a_sharding_has_one_number() -> None:
    moves, numbers = make()
    again = moves.numbers([moves.model.table.encoded(spec(MESH, "-, y"))])
    assert numbers == (0, 1, 2, 3) and again == (2,)


def test_rows_are_the_values_whichever_way_it_goes() -> None:
    moves, (whole, rows, columns, both) = make()
    read = moves.table((rows, both), (whole, columns, whole), True)
    made = moves.table((rows, both), (whole, columns, whole), False)
    model = moves.model
    texts = {whole: "-, -", rows: "x, -", columns: "-, y", both: "x, y"}
    every = {number: model.table.encoded(spec(MESH, text)) for number, text in texts.items()}
    for i, own in enumerate((rows, both)):
        for j, other in enumerate((whole, columns, whole)):
            ends = every[own], every[other]
            assert read[i, j] == model.movement_s(*ends, SHAPE, 4)
            assert made[i, j] == model.movement_s(*ends[::-1], SHAPE, 4)
    assert (read[:, 0] > 0).all() and not made[:, 0].any()


def test_a_price_stands_in_every_column_of_it_and_elsewhere_nothing_changes() -> None:
    moves, (whole, rows, columns, both) = make()
    before = moves.table((rows, both), (whole, columns, whole), True)
    other = moves.table((columns,), (both,), True)
    assert moves.price([(rows, whole), (rows, rows)])
    after = moves.table((rows, both), (whole, columns, whole), True)
    price_s = moves.model.program_s(
        *(moves.model.table.encoded(spec(MESH, text)) for text in ("x, -", "-, -")), SHAPE, ELEMENT
    )
    assert after[0].tolist() == [price_s, before[0, 1], price_s]
    assert after[1].tolist() == before[1].tolist()
    # What no price concerns is the same object: what was found with it holds.
    assert moves.table((columns,), (both,), True) is other
    assert after is not before
    assert not moves.price([(rows, whole)])


def test_prices_stay_when_the_rest_is_found_again() -> None:
    moves, (whole, rows, _, _) = make()
    moves.price([(rows, whole)])
    moves.fill(bounds=True)
    assert moves.table((rows,), (whole,), True)[0, 0] == moves.priced[rows, whole]


COMMON_READS_MESH = DeviceMesh.of(x=2, y=2)
READS_SHAPE = (64, 64)
REL = 1e-9


def problem() -> CostProblem:
    """A value that three operations read, one of them twice, and another that two read."""
    product = rule_of("matmul", [READS_SHAPE, READS_SHAPE])
    both = rule_of("add", [READS_SHAPE, READS_SHAPE])
    graph = Graph.of(
        [READS_SHAPE, READS_SHAPE],
        [
            ("matmul", [0, 0], product),
            ("matmul", [0, 1], product),
            ("add", [2, 3], both),
            ("add", [4, 0], both),
            ("matmul", [3, 5], product),
        ],
        [6],
    )
    given = {0: spec(COMMON_READS_MESH, "x, y"), 1: spec(COMMON_READS_MESH, "y, x")}
    bases = [propagate_graph(graph, given, strategy=strategy) for strategy in OTHERS]
    table = AxisTable.of(COMMON_READS_MESH)
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
        total += one.model.movement_s(*ends, READS_SHAPE, 4)
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


EDGE_MOVES_MESH = DeviceMesh.of(x=2)
EDGE_MOVES_SHAPE = (64, 64)


def test_edges_are_the_value_s_where_it_lies_as_it_is_read() -> None:
    model = CostModel(AxisTable.of(EDGE_MOVES_MESH), Machine())
    rows, columns, whole = (
        model.table.encoded(spec(EDGE_MOVES_MESH, text)) for text in ("x, -", "-, x", "-, -")
    )
    known = ValueMovements(model, EDGE_MOVES_SHAPE, dtype("float32"))
    # Two ways: one runs on rows with more than they are, one on columns as they are.
    runs_with = [whole, None]
    kept, moved = EdgeMoves.of(known, (0, 1), (0, 1), (rows, columns), runs_with)
    price_s = model.program_s(rows, whole, EDGE_MOVES_SHAPE, dtype("float32"))
    assert price_s > 0 and known.edges_s == [price_s]
    assert kept.others == moved.others == (0, NO_EDGES)
    # A value that lies in rows keeps the edges; one that is moved to rows has them for this once.
    assert kept.seconds_s.tolist() == [[price_s, 0], [0, 0]]
    assert moved.seconds_s.tolist() == [[0, 0], [price_s, 0]]
    targets = [kept.target(row, column) for row in (0, 1) for column in (0, 1)]
    assert targets == [0, None, None, None]
    assert kept.seconds_to((0,)).tolist() == [[price_s], [0]]
    # Another operator that needs the same edges knows them by the same number.
    again, _ = EdgeMoves.of(known, (0, 1), (0,), (rows,), runs_with[:1])
    assert again.others == (0,) and len(known.edges_s) == 1
    assert EdgeMoves.of(known, (0, 1), (1,), (columns,), [None]) == ()


@pytest.mark.parametrize("over", ["x, -, -, -", "-, -, x, -"])
def test_a_convolution_s_gradients_share_their_edges(over: str) -> None:
    """By cost they take no longer than by rules, over whatever axes."""
    mesh = DeviceMesh.of(x=2, y=2)

    def loss(w: object, x: object) -> object:
        return sp.sum(sp.square(sp.convolution(x, w, padding=1)))

    x = sp.array(np.ones((4, 3, 32, 32), np.float32), spec(mesh, over))
    w = sp.array(np.ones((5, 3, 3, 3), np.float32), spec(mesh, "-, -, -, -"))
    both = sp.value_and_grad(loss, argnums=(0, 1))
    topology = load_preset("h100-8").topology()
    taken = {
        strategy: sp.trace(both, w, x, strategy=strategy, topology=topology).seconds_s
        for strategy in ("basic", "aggressive", "cost")
    }
    assert taken["cost"] <= min(taken.values()) * (1 + 1e-9)
