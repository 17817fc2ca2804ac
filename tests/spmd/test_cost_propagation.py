"""Shardings of least time: against every choice, against what is moved, and by hand."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from reshard import DeviceMesh, spec
from reshard.spmd.axis_parts import AxisTable
from reshard.spmd.cost_model import CostModel, Machine
from reshard.spmd.cost_propagation import OTHERS, _Problem, propagate_by_cost
from reshard.spmd.graph import Graph
from reshard.spmd.placement import explicit_reshards
from reshard.spmd.propagation import propagate_graph
from reshard.topology import Link, Topology

MESH = DeviceMesh.of(x=2, y=2)


def dot(i: int, k: int, j: int) -> str:
    return f"([i, k], [k, j]) -> ([i, j]) {{i={i}, j={j}, k={k}}} reduction={{k}}"


def add(i: int, j: int) -> str:
    return f"([i, j], [i, j]) -> ([i, j]) {{i={i}, j={j}}}"


def exp(i: int, j: int) -> str:
    return f"([i, j]) -> ([i, j]) {{i={i}, j={j}}}"


def links(bandwidth_bytes_per_s: float) -> Machine:
    topology = Topology.of(hosts=1, ranks_per_host=4, within_host=Link(bandwidth_bytes_per_s, 1e-6))
    return Machine(topology)


def random_graph(random: Random) -> tuple[Graph, dict[int, str]]:
    """A product, an addition or two, and shardings of the arguments."""
    size = random.choice([6, 64, 512])
    operations: list[tuple[str, list[int], str]] = [("matmul", [0, 1], dot(size, size, size))]
    if random.random() < 0.5:
        operations.append(("add", [2, 0], add(size, size)))
    given = {
        number: random.choice(["x, -", "-, x", "-, -", "x ?, ?"])
        for number in (0, 1)
        if random.random() < 0.8
    }
    count = 2 + len(operations)
    return Graph.of([(size, size)] * 2, operations, [count - 1]), given


@pytest.mark.parametrize("seed", range(8))
def test_no_choice_of_candidates_takes_less(seed: int) -> None:
    mesh = DeviceMesh.of(x=2)
    graph, given = random_graph(Random(seed))
    specs = {number: spec(mesh, text) for number, text in given.items()}
    found = propagate_by_cost(graph, specs)
    bases = [propagate_graph(graph, specs, strategy=strategy) for strategy in OTHERS]
    if bases[0].mesh is None:
        assert found.seconds_s == 0
        return
    table = AxisTable.of(mesh)
    problem = _Problem(graph, table, CostModel(table, Machine()))
    problem.candidates(specs, {}, bases)
    total = problem.sum()
    # Ways are independent of each other once the values' shardings are chosen.
    values, ways = len(graph.values), range(len(graph.values), len(total.choices))
    least = min(
        total.value(total.descended((*chosen, *([0] * len(ways))), ways, sweeps=0))
        for chosen in itertools.product(*map(range, total.choices[:values]))
    )
    assert found.is_exact
    assert found.seconds_s == pytest.approx(least)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("exact", [None, False])
def test_the_time_is_that_of_what_moves_and_runs(seed: int, exact: bool | None) -> None:
    graph, given = random_graph(Random(seed))
    specs = {0: spec(MESH, "x, y")} | {n: spec(MESH, text) for n, text in given.items()}
    found = propagate_by_cost(graph, specs, exact=exact)
    table = AxisTable.of(MESH)
    model = CostModel(table, Machine())
    placed = explicit_reshards(found.propagated)
    total = sum(
        model.movement_s(
            table.encoded(move.source),
            table.encoded(move.target),
            graph.values[move.value].shape,
            4,
        )
        for move in placed.moved
    )
    for operation, operands, results in zip(
        graph.operations, placed.operands, placed.results, strict=True
    ):
        cuts = [()] * len(operation.rule.sizes)
        for mapping, one in zip(operation.rule.tensors, (*operands, *results), strict=True):
            for (factor,), parts in zip(mapping, table.encoded(one).dims, strict=True):
                cuts[factor] = parts
        total += model.compute_s(operation.rule, cuts, 4)
    assert found.seconds_s == pytest.approx(total)


@pytest.mark.parametrize("seed", range(10))
def test_never_slower_than_the_other_strategies_and_descent_not_quicker(seed: int) -> None:
    graph, given = random_graph(Random(seed))
    specs = {0: spec(MESH, "x, y")} | {n: spec(MESH, text) for n, text in given.items()}
    exact = propagate_by_cost(graph, specs)
    near = propagate_by_cost(graph, specs, exact=False)
    assert exact.is_exact and not near.is_exact
    assert exact.seconds_s <= near.seconds_s * (1 + 1e-12)
    assert near.seconds_s <= min(exact.others_s.values()) * (1 + 1e-12)
    assert exact == propagate_by_cost(graph, specs)


def test_annotations_and_outputs_are_kept() -> None:
    graph = Graph.of([(64, 64)] * 2, [("matmul", [0, 1], dot(64, 64, 64))], [2])
    given = {0: spec(MESH, "x, y"), 1: spec(MESH, "-, y"), 2: spec(MESH, "y, x")}
    asked = {0: spec(MESH, "-, x")}
    found = propagate_by_cost(graph, given, outputs=asked).propagated
    assert dict(enumerate(found.values)) == given
    assert found.outputs == (asked[0],)
    by_name = propagate_graph(graph, given, outputs=asked, strategy="cost")
    assert by_name == found


def test_the_small_operand_moves() -> None:
    """Two operands disagree: whichever is the small one is moved, whatever its place."""
    for small, large in ((0, 1), (1, 0)):
        shapes = [(8, 4096), (8, 4096)]
        given = {small: spec(MESH, "x, -"), large: spec(MESH, "-, x")}
        shapes[small] = (8, 1)
        rules = {0: "([i, 1], [i, j]) -> ([i, j])", 1: "([i, j], [i, 1]) -> ([i, j])"}
        graph = Graph.of(shapes, [("add", [0, 1], f"{rules[small]} {{i=8, j=4096}}")], [2])
        moved = explicit_reshards(propagate_by_cost(graph, given, machine=links(1e10)).propagated)
        assert [move.value for move in moved.moved] == [small]


def test_contributions_are_combined_once_behind_an_addition() -> None:
    size = 1024
    graph = Graph.of(
        [(size, size)] * 4,
        [
            ("matmul", [0, 1], dot(size, size, size)),
            ("matmul", [2, 3], dot(size, size, size)),
            ("add", [4, 5], add(size, size)),
        ],
        [6],
    )
    given = {n: spec(MESH, "-, x" if n % 2 == 0 else "x, -") for n in range(4)}
    given[6] = spec(MESH, "-, -")
    found = propagate_by_cost(graph, given, machine=links(1e9))
    assert [str(found.propagated.values[n]) for n in (4, 5)] == ["-, - | sum(x)"] * 2
    assert len(explicit_reshards(found.propagated).moved) == 1


def test_contributions_are_combined_at_once_before_what_is_not_linear() -> None:
    size = 1024
    graph = Graph.of(
        [(size, size)] * 2,
        [("matmul", [0, 1], dot(size, size, size)), ("exp", [2], exp(size, size))],
        [3],
    )
    given = {0: spec(MESH, "-, x"), 1: spec(MESH, "x, -")}
    found = propagate_by_cost(graph, given, machine=links(1e9)).propagated
    assert found.runs is not None
    (reads,), _ = found.runs[1]
    assert not reads.partial


def test_slow_links_do_the_work_twice_and_quick_ones_share_it() -> None:
    """An elementwise operator on a whole operand, of which the result is wanted whole."""
    size = 4096
    rule = dot(size, size, size)
    graph = Graph.of([(size, size)] * 2, [("matmul", [0, 1], rule)], [2])
    given = {n: spec(MESH, "-, -") for n in range(3)} | {0: spec(MESH, "-, - | replicated(x)")}
    asked = {0: spec(MESH, "x, -")}
    slow = propagate_by_cost(graph, given, outputs=asked, machine=links(1e6)).propagated
    assert slow.runs is not None
    assert not any(reads.is_cut for reads in slow.runs[0][0])
    quick = propagate_by_cost(graph, given, outputs=asked, machine=links(1e15)).propagated
    assert quick.runs is not None
    assert any(reads.is_cut for reads in quick.runs[0][0])


def test_without_shardings_there_is_nothing_to_choose() -> None:
    graph = Graph.of([(4, 4)], [("exp", [0], exp(4, 4))], [1])
    found = propagate_by_cost(graph, {})
    assert found.seconds_s == 0
    assert found.propagated.values == (None, None)


def test_means_and_maxima_are_not_made_of_parts_that_do_not_fit() -> None:
    mesh = DeviceMesh.of(x=2)
    for operator in ("mean", "max"):
        rule = f"([i, j]) -> ([i]) {{i=4, j=5}} reduction={{j:{operator}}}"
        graph = Graph.of([(4, 5)], [(operator, [0], rule)], [1])
        found = propagate_by_cost(graph, {0: spec(mesh, "-, x")}).propagated
        assert found.runs is not None
        assert not found.runs[0][1][0].partial
