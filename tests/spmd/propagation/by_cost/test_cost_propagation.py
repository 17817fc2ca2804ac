"""Shardings of least time: against every choice, against what is moved, and by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import reshard.spmd as sp
from reshard import DeviceMesh, ShardingSpec, spec
from reshard.cost import load_preset
from reshard.dtypes import dtype
from reshard.plans.plan import Plan
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.operator import rule_of
from reshard.spmd.graph import Graph
from reshard.spmd.propagation.axes import AxisTable
from reshard.spmd.propagation.by_cost import cost_propagation
from reshard.spmd.propagation.by_cost.cost_model import CostModel, Machine
from reshard.spmd.propagation.by_cost.cost_problem import CostProblem
from reshard.spmd.propagation.by_cost.cost_propagation import OTHERS, propagate_by_cost
from reshard.spmd.propagation.reshards import explicit_reshards
from reshard.spmd.propagation.strategies import propagate_graph
from reshard.spmd.shards.chosen_program import chosen_program
from reshard.topology import Device, Link, Overhead, Topology
from selection import choose

MESH = DeviceMesh.of(x=2, y=2)
ONE_AXIS = DeviceMesh.of(x=2)
CUTS = ["-, -", "x, -", "-, y", "x, y", "y, x", "x y, -", "y x, -", "-, x y"]
SPECS = [spec(MESH, text) for text in CUTS]
SPECS += [spec(MESH, f"{text} | sum(x)") for text in ("-, -", "y, -", "-, y")]
SPECS += [
    spec(MESH, f"-, - | {kind}")
    for kind in ("sum(x y)", "sum(y x)", "sum(y)", "max(y)", "mean(x)", "mean(x y)")
]
SHAPES = [(8, 8), (5, 7), (64, 3), (1, 9), (4096, 512)]


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
    problem = CostProblem(graph, table, CostModel(table, Machine()))
    problem.candidates(specs, {}, bases)
    problem.fill(bounds=False)
    every = itertools.product(*map(range, problem.sum().choices))
    least = min(map(problem.seconds_s, every))
    assert found.is_exact
    assert found.seconds_s == pytest.approx(least)


@st.composite
def small_graphs(draw: st.DrawFn) -> tuple[Graph, dict[int, ShardingSpec]]:
    """Up to three operators, some of which read the same values, and some shardings on one axis."""
    size = draw(st.sampled_from([6, 64, 512]))
    operations: list[tuple[str, list[int], str]] = []
    for number in range(draw(st.integers(1, 3))):
        values = st.integers(0, 1 + number)
        kind = draw(st.sampled_from(["matmul", "add", "exp"]))
        operands = [draw(values) for _ in range(1 if kind == "exp" else 2)]
        rules = {"matmul": dot(size, size, size), "add": add(size, size), "exp": exp(size, size)}
        operations.append((kind, operands, rules[kind]))
    texts = st.sampled_from(["x, -", "-, x", "-, -", "x ?, ?"])
    given = draw(st.dictionaries(st.integers(0, 1 + len(operations)), texts, min_size=1))
    graph = Graph.of([(size, size)] * 2, operations, [1 + len(operations)])
    return graph, {number: spec(ONE_AXIS, text) for number, text in given.items()}


@given(small_graphs(), st.sampled_from([0, 1, 2, 3, 256]), st.floats(0, 1))
@settings(max_examples=choose(30, 100), deadline=None)
def test_what_is_called_exact_is_the_least_of_all_choices(
    given: tuple[Graph, dict[int, ShardingSpec]], rounds: int, place: float
) -> None:
    """From any answer, in any number of rounds: only what no choice is below is called exact."""
    graph, specs = given
    bases = [propagate_graph(graph, specs, strategy=strategy) for strategy in OTHERS]
    table = AxisTable.of(ONE_AXIS)
    problem = CostProblem(graph, table, CostModel.of(table, Machine()))
    problem.candidates(specs, {}, bases)
    problem.fill(bounds=False)
    choices = problem.sum().choices
    assume(math.prod(choices) <= 4096)
    every = list(itertools.product(*map(range, choices)))
    problem.price(every)
    least_s = min(map(problem.seconds_s, every))
    # The worst answer, or one on the way from there to the least.
    start = sorted(every, key=problem.seconds_s)[round(place * (len(every) - 1))]
    start_s = problem.seconds_s(start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_propagation, "MAX_ROUNDS", rounds)
        patch.setattr(cost_propagation, "solve_nearly", lambda *_, **__: (start, start_s))
        found = propagate_by_cost(graph, specs)
    assert least_s * (1 - 1e-9) <= found.seconds_s <= start_s
    assert found.is_exact or rounds < 256
    assert found.seconds_s <= least_s * (1 + 1e-9) or not found.is_exact
    # A proof takes a round at least.
    assert not (found.is_exact and rounds == 0)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("exact", [None, False])
def test_the_time_is_that_of_what_moves_and_runs(seed: int, exact: bool | None) -> None:
    graph, given = random_graph(Random(seed))
    specs = {0: spec(MESH, "x, y")} | {n: spec(MESH, text) for n, text in given.items()}
    found = propagate_by_cost(graph, specs, exact=exact)
    topology = load_preset("h100-8").topology()
    placed = explicit_reshards(found.propagated)
    total = 0.0
    # What several operations read so is moved once.
    for value, start, end in {(one.value, one.source, one.target) for one in placed.moved}:
        source = ArrayType(graph.values[value].shape, dtype("float32"), start)
        program = chosen_program(source, end)
        total += program.estimate("float32", topology).seconds_s
    for operation, operands, results in zip(
        graph.operations, placed.operands, placed.results, strict=True
    ):
        numbers = (*operation.operands, *operation.results)
        shapes = [
            one.layout(graph.values[number].shape).local_shape(0) or ()
            for number, one in zip(numbers, (*operands, *results), strict=True)
        ]
        products = 0
        if operation.operator == "matmul":
            (rows, middle), (_, columns), _ = shapes
            products = rows * middle * columns
        moved_bytes = 4 * sum(map(math.prod, shapes))
        total += max(2 * products / 67e12, moved_bytes / 3.35e12)
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


@pytest.mark.parametrize(("seed", "exact", "rounds"), [(0, None, 256), (1, None, 2), (2, False, 2)])
def test_three_axes(
    seed: int, exact: bool | None, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact or not, after enough rounds or too few: what is chosen has its programs' price."""
    monkeypatch.setattr(cost_propagation, "MAX_ROUNDS", rounds)
    mesh = DeviceMesh.of(x=2, y=2, z=2)
    graph, _ = random_graph(Random(seed))
    specs = {0: spec(mesh, "x, y z"), 1: spec(mesh, "-, x")}
    found = propagate_by_cost(graph, specs, exact=exact)
    assert found.is_exact == (rounds == 256)
    topology = load_preset("h100-8").topology()
    moved_s = sum(
        chosen_program(
            ArrayType(graph.values[move.value].shape, dtype("float32"), move.source), move.target
        )
        .estimate("float32", topology)
        .seconds_s
        for move in explicit_reshards(found.propagated).moved
    )
    assert 0 < moved_s <= found.seconds_s <= min(found.others_s.values()) * (1 + 1e-12)


OVERHEAD = Overhead(1e-4, 1e-5, Link(1e9), 2.0, Link(3e9), None, (("all-reduce", Link(9e9)),))
MACHINES = [
    Machine(),
    Machine(load_preset("h100-8").topology(2)),
    Machine(load_preset("gloo-host").topology(), "gloo"),
    Machine(load_preset("tpu-v5p").topology(), "xla"),
    Machine(Topology([0] * 4, within_host=Link(1e9, 1e-6), overhead=OVERHEAD), "gloo"),
    Machine(Topology([0, 1, 0, 1], None, Link(1e9, 1e-6), Link(1e8, 1e-5)), "any"),
]


@given(st.sampled_from(SPECS), st.sampled_from(SPECS), st.sampled_from(SHAPES), st.integers(0, 5))
@settings(max_examples=choose(45, 150))
def test_no_program_takes_less_than_the_bound(
    source: ShardingSpec, target: ShardingSpec, shape: tuple[int, int], number: int
) -> None:
    table = AxisTable.of(MESH)
    model = CostModel(table, MACHINES[number])
    ends = table.encoded(source), table.encoded(target)
    bound_s = model.bound_s(*ends, shape, 4)
    assert bound_s <= model.program_s(*ends, shape, dtype("float32")) * (1 + 1e-12)
    # It says something wherever parts of a whole are not where they are wanted.
    plan = Plan(source.layout(shape), target.layout(shape))
    assert bound_s > 0 or plan.moved_elements == 0


def test_contributions_of_another_kind_are_not_taken_for_nothing() -> None:
    """Two maxima are added: each is combined first, for a sum of maxima is no maximum of sums."""
    rule = "([i, j]) -> ([i]) {i=64, j=64} reduction={j:max}"
    graph = Graph.of(
        [(64, 64)] * 2,
        [
            ("max", [0], rule),
            ("max", [1], rule),
            ("add", [2, 3], "([i], [i]) -> ([i]) {i=64}"),
        ],
        [4],
    )
    given = {0: spec(MESH, "-, x"), 1: spec(MESH, "-, x"), 4: spec(MESH, "-")}
    placed = explicit_reshards(propagate_by_cost(graph, given, machine=links(1e3)).propagated)
    reduced = [move for move in placed.moved if move.reduced]
    assert [move.value for move in reduced if move.source.partial_axes] == [2, 3]
    assert all(move.source.reduction == "max" for move in reduced)


def test_contributions_by_maxima_are_carried_too() -> None:
    rule = "([i, j]) -> ([i]) {i=64, j=64} reduction={j:max}"
    graph = Graph.of(
        [(64, 64)] * 2,
        [
            ("max", [0], rule),
            ("max", [1], rule),
            ("maximum", [2, 3], "([i], [i]) -> ([i]) {i=64}"),
        ],
        [4],
    )
    given = {0: spec(MESH, "-, x"), 1: spec(MESH, "-, x"), 4: spec(MESH, "-")}
    placed = explicit_reshards(propagate_by_cost(graph, given, machine=links(1e3)).propagated)
    assert [(move.value, str(move.source)) for move in placed.moved] == [(4, "- | max(x)")]


def test_a_machine_computes_as_its_topology_says() -> None:
    device = Device(1e9, (("float32", 1e6),))
    topology = Topology([0] * 4, within_host=Link(1e9), device=device)
    assert Machine(topology).device is device
    assert Machine().device is load_preset("h100-8").device
    assert Machine(Topology([0], within_host=Link(1e9))).device is load_preset("h100-8").device
    own = Machine(topology, operations_per_s=5.0).device
    assert own.memory_bytes_per_s == 1e9 and own.operations_for("float32") == 5.0
    graph = Graph.of([(64, 64)] * 2, [("matmul", [0, 1], dot(64, 64, 64))], [2])
    given = {n: spec(ONE_AXIS, text) for n, text in enumerate(("x, -", "-, -", "x, -"))}
    found = propagate_by_cost(graph, given, machine=Machine(topology))
    assert found.seconds_s == pytest.approx(2 * 32 * 64 * 64 / 1e6)


def test_rows_of_a_table_are_not_multiplied_by_it() -> None:
    """Slow devices and quick links: a table is read where it lies, since reading rows is little."""
    table, rows = (1 << 16, 64), (8,)
    rule = rule_of("take", [table, rows], axis=0)
    graph = Graph.of([table, rows], [("take", [0, 1], rule)], [2])
    given = {n: spec(MESH, text) for n, text in ((0, "-, -"), (1, "-"), (2, "-, -"))}
    given[0] = spec(MESH, "-, - | replicated(x)")
    machine = Machine(links(1e9).topology, operations_per_s=1.0, memory_bytes_per_s=1e12)
    found = propagate_by_cost(graph, given, machine=machine)
    assert found.seconds_s < 1e-6


SQUARE: list[tuple[Callable[..., Any], tuple[str | None, ...]]] = [
    (lambda x, up, down: sp.relu(x @ up) @ down, ("x, -", "-, y", "y, -")),
    (lambda a, b: a + b, ("x, y", "y, x")),
    (lambda a: sp.sum(a, axis=0) + 1.0, ("x y, -",)),
    (lambda a: sp.softmax(a @ a.mT, axis=-1) @ a, ("x, y",)),
    (lambda a, b: sp.exp(a @ b) * 2.0, ("-, x", "x, -")),
    (lambda a, b: sp.max(a @ b, axis=1), ("-, x y", None)),
]


@pytest.mark.parametrize(("function", "texts"), SQUARE)
def test_a_trace_takes_as_long_as_the_strategy_says(
    function: Callable[..., Any], texts: tuple[str | None, ...]
) -> None:
    """The same programs and the same work, found in two ways, where sizes divide."""
    topology = load_preset("h100-8").topology()
    specs = [None if text is None else spec(MESH, text) for text in texts]
    kinds = [sp.abstract((512, 512), "float32", one) for one in specs]
    traced = sp.trace(function, *kinds, strategy="cost", topology=topology)
    given = {number: one for number, one in enumerate(specs) if one is not None}
    found = propagate_by_cost(traced.graph, given, machine=Machine(topology))
    assert traced.seconds_s == pytest.approx(found.seconds_s, rel=1e-3)


def test_annotations_and_outputs_are_kept() -> None:
    graph = Graph.of([(64, 64)] * 2, [("matmul", [0, 1], dot(64, 64, 64))], [2])
    given = {0: spec(MESH, "x, y"), 1: spec(MESH, "-, y"), 2: spec(MESH, "y, x")}
    asked = {0: spec(MESH, "-, x")}
    found = propagate_by_cost(graph, given, outputs=asked).propagated
    assert dict(enumerate(found.values)) == given
    assert found.outputs == (asked[0],)
    by_name = propagate_graph(graph, given, outputs=asked, strategy="cost")
    assert by_name == found


def test_what_only_a_result_has_is_made_whole_and_cut() -> None:
    """A broadcast's new rows: the model takes as long as the program that is run."""
    rule = "([j]) -> ([i, j]) {i=65536, j=64}"
    graph = Graph.of([(64,)], [("broadcast_to", [0], rule)], [1])
    given = {0: spec(ONE_AXIS, "-"), 1: spec(ONE_AXIS, "x, -")}
    found = propagate_by_cost(graph, given)
    memory_bytes_per_s = Machine().device.memory_bytes_per_s
    assert found.seconds_s == pytest.approx(4 * 64 * 65537 / memory_bytes_per_s, rel=1e-12)


def test_the_small_operand_moves() -> None:
    """Two operands disagree: whichever is the small one is moved, whatever its place."""
    for small, large in ((0, 1), (1, 0)):
        shapes = [(8, 4096), (8, 4096)]
        given = {small: spec(ONE_AXIS, "x, -"), large: spec(ONE_AXIS, "-, x")}
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
    given = {n: spec(ONE_AXIS, "-, x" if n % 2 == 0 else "x, -") for n in range(4)}
    given[6] = spec(ONE_AXIS, "-, -")
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
