"""Propagation: the shardings that Shardy's own tests expect, entered by hand, and what is ours."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from reshard import DeviceMesh, spec
from reshard.errors import SpecError
from reshard.sharding import ShardingSpec
from reshard.spmd.graph import Graph
from reshard.spmd.propagation.merging import Direction
from reshard.spmd.propagation.propagation import PropagatedGraph, propagate
from reshard.spmd.propagation.reshards import explicit_reshards
from reshard.spmd.propagation.strategies import propagate_graph
from reshard.spmd.rules.sharding_rule import OpShardingRule

ADD = "([i, j], [i, j]) -> ([i, j]) {i=8, j=8}"
DOT = "([i, k], [k, j]) -> ([i, j]) {i=8, j=8, k=8} reduction={k}"
NEGATE = "([i, j]) -> ([i, j]) {i=8, j=8}"
BASIC = {"strategy": "basic", "operator_priorities": False}


def shardings(
    mesh: DeviceMesh,
    rule: str,
    operands: list[str | None],
    results: list[str | None],
    strategy: str = "basic",
) -> list[str]:
    """The text of all tensors' shardings after one step."""
    read = [
        [None if text is None else spec(mesh, text) for text in side]
        for side in (operands, results)
    ]
    found = propagate(OpShardingRule.parse(rule), *read, strategy=strategy)
    return ["none" if one is None else str(one) for side in found for one in side]


class TestOneOperator:
    """Section 4 of the issue: shardings expected."""

    mesh = DeviceMesh.of(a=2, b=2)

    def test_add_extends_open_dimensions(self) -> None:
        found = shardings(self.mesh, ADD, ["a, b", "?, ?"], [None])
        assert found == ["a, b", "a ?, b ?", "a ?, b ?"]

    def test_dot_cuts_the_open_dimension_of_its_result(self) -> None:
        found = shardings(self.mesh, DOT, ["a, -", "-, b"], ["-, ?"])
        assert found == ["a, -", "-, b", "-, b ?"]

    def test_a_replicated_axis_leaves_all_as_it_is(self) -> None:
        given = ["a, b", "-, - | replicated(a)", "?, -"]
        assert shardings(self.mesh, ADD, given[:2], given[2:]) == given

    @pytest.mark.parametrize(
        ("size", "expected"),
        [
            (4, "a:(1)2 ?, a:(2)2 ?"),
            (6, "a:(1)2 ?, a:(2)3 ?"),
            (3, "none"),
            (16, "a:(1)2 ?, a:(2)8 ?"),
        ],
    )
    def test_a_reshape_splits_an_axis(self, size: int, expected: str) -> None:
        found = shardings(DeviceMesh.of(a=size), "([ij]) -> ([i, j]) {i=2, j=4}", ["a"], [None])
        assert found == ["a", expected]

    def test_a_reshape_that_merges_keeps_the_major_axis_where_the_next_has_holes(self) -> None:
        assert shardings(self.mesh, "([i, j]) -> ([ij]) {i=4, j=4}", ["a, b"], [None])[1] == "a ?"

    def test_a_reshape_that_merges_keeps_both_where_the_major_is_cut_to_ones(self) -> None:
        assert shardings(self.mesh, "([i, j]) -> ([ij]) {i=2, j=4}", ["a, b"], [None])[1] == "a b ?"

    def test_aggressive_add_cuts_the_result_where_the_first_operand_is_cut(self) -> None:
        found = shardings(self.mesh, ADD, ["a, ?", "?, a"], [None], "aggressive")
        assert found == ["a, ?", "?, a", "a ?, ?"]

    def test_aggressive_add_prefers_more_shards(self) -> None:
        found = shardings(self.mesh, ADD, ["-, a", "b a, -"], [None], "aggressive")
        assert found == ["-, a", "b a, -", "b a ?, ?"]

    def test_widest_takes_the_cut_into_more_parts(self) -> None:
        mesh = DeviceMesh.of(a=2, b=4)
        line = "([i], [i]) -> ([i]) {i=8}"
        assert shardings(mesh, line, ["a ?", "b ?"], [None], "aggressive")[2] == "none"
        assert shardings(mesh, line, ["a ?", "b ?"], [None], "widest")[2] == "b ?"
        assert shardings(mesh, line, ["b ?", "a ?"], [None], "widest")[2] == "b ?"
        # Parts without elements do not count: of 2 elements b makes no more than a.
        assert shardings(mesh, line.replace("8", "2"), ["a ?", "b ?"], [None], "widest")[2] == "a ?"
        # What is cut stays as it is, and no axis cuts twice.
        assert shardings(mesh, ADD, ["a, -", "-, b a"], [None], "widest")[2] == "?, b a ?"
        assert shardings(mesh, ADD, ["a, -", "-, b a"], [None], "aggressive")[2] == "?, b a ?"
        assert shardings(mesh, ADD, ["b, -", "-, b"], ["-, ? | replicated(b)"], "widest")[2] == (
            "-, ? | replicated(b)"
        )

    def test_of_as_many_parts_the_larger_tensor_decides(self) -> None:
        outer = "([i, j], [j]) -> ([i, j]) {i=8, j=8}"
        assert shardings(self.mesh, outer, ["?, a", "b"], [None], "widest")[2] == "?, a ?"
        assert shardings(self.mesh, ADD, ["?, a", "?, b"], [None], "widest")[2] == "?, a ?"

    def test_widest_only_goes_where_it_may(self) -> None:
        mesh = DeviceMesh.of(a=2, b=4)
        rule = OpShardingRule.parse(NEGATE)
        given = [spec(mesh, "a ?, ?")], [spec(mesh, "?, b ?")]
        ways = {
            Direction.FORWARD: ["a ?, ?", "a ?, b ?"],
            Direction.BACKWARD: ["a ?, b ?", "?, b ?"],
        }
        for direction, expected in ways.items():
            found = propagate(rule, *given, strategy="widest", direction=direction)
            assert [str(one) for side in found for one in side] == expected

    def test_a_dot_with_one_axis_in_two_places(self) -> None:
        assert shardings(self.mesh, DOT, ["a, -", "-, b a"], [None], "aggressive")[2] == "a ?, b ?"
        assert shardings(self.mesh, DOT, ["a, -", "-, b a"], [None], "basic")[2] == "?, b ?"

    def test_a_partial_axis_blocks_backwards(self) -> None:
        found = shardings(self.mesh, NEGATE, ["?, ? | sum(b)"], ["a, b"])
        assert found == ["a ?, ? | sum(b)", "a, b"]

    def test_size_zero_and_scalars(self) -> None:
        assert shardings(self.mesh, "([i], []) -> ([i]) {i=0}", ["a", None], [None]) == [
            "a",
            "none",
            "a ?",
        ]


def graph(*operations: tuple[str, list[int], str], inputs: int = 2) -> Graph:
    count = inputs + len(operations)
    return Graph.of([(8, 8)] * inputs, operations, [count - 1])


def _without(one: ShardingSpec) -> ShardingSpec:
    """A sharding whose dimensions all join in at once."""
    return spec(one.mesh, re.sub("!\\d", "", str(one)))


def _plain(one: ShardingSpec | None) -> str:
    return "?, ?" if one is None else str(_without(one))


class TestPriorities:
    mesh = DeviceMesh.of(a=2, b=2)

    def test_priority_0_comes_before_priority_1(self) -> None:
        one = graph(("add", [0, 1], ADD))
        given = {0: spec(self.mesh, "a !1, -"), 1: spec(self.mesh, "-, a")}
        found = propagate_graph(one, given)
        assert str(found.values[2]) == "?, a ?"
        swapped = {0: spec(self.mesh, "a, -"), 1: spec(self.mesh, "-, a !1")}
        assert str(propagate_graph(one, swapped).values[2]) == "a ?, ?"

    def test_without_user_priorities_all_join_at_once(self) -> None:
        one = graph(("add", [0, 1], ADD))
        given = {0: spec(self.mesh, "a !1, -"), 1: spec(self.mesh, "-, a")}
        found = propagate_graph(one, given, user_priorities=False)
        assert str(found.values[2]) == "a ?, ?"

    @pytest.mark.parametrize("strategy", ["basic", "aggressive", "widest"])
    @pytest.mark.parametrize("rule", [ADD, DOT])
    def test_one_operator_heeds_them_as_a_graph_of_it_does(self, rule: str, strategy: str) -> None:
        parsed = OpShardingRule.parse(rule)
        name = "add" if rule == ADD else "matmul"
        texts = ("a !1, -", "-, a", "?, a !1", "a ?!2, b ?!1", "b !1, ?", "a b !1, ?", "?, ?!1")
        different = 0
        for first, second, result in itertools.product(texts, texts, ("?, ?", "?, b ?!1", "a, -")):
            given = [spec(self.mesh, text) for text in (first, second, result)]
            operands, results = propagate(parsed, given[:2], given[2:], strategy=strategy)
            whole = Graph.of([(8, 8)] * 2, [(name, [0, 1], parsed)], [])
            found = propagate_graph(
                whole, dict(enumerate(given)), strategy=strategy, operator_priorities=False
            )
            alone = [_plain(one) for one in (*operands, *results)]
            assert alone == [_plain(one) for one in found.values], (first, second, result)
            at_once = propagate(
                parsed,
                *[[_without(one) for one in side] for side in (given[:2], given[2:])],
                strategy=strategy,
            )
            different += alone != [_plain(one) for side in at_once for one in side]
        # The order of the priorities decides in some of these cases. What all operands of a sum
        # agree on, as the strategy "basic" asks, is the same in any order.
        assert (different == 0) == ((rule, strategy) == (ADD, "basic"))

    def test_what_has_priorities_keeps_them(self) -> None:
        operands, results = propagate(
            OpShardingRule.parse(ADD),
            [spec(self.mesh, "a !1, ?!2"), spec(self.mesh, "?, a")],
            [None],
        )
        assert [str(one) for one in (*operands, *results)] == ["a !1, ?!2", "?, a", "?, a ?"]

    def test_elementwise_operators_come_before_products(self) -> None:
        two = graph(("matmul", [0, 1], DOT), ("exp", [2], NEGATE))
        given = {0: spec(self.mesh, "a, -"), 3: spec(self.mesh, "?, a")}
        assert str(propagate_graph(two, given).values[2]) == "?, a ?"
        alike = propagate_graph(two, given, operator_priorities=False)
        assert str(alike.values[2]) == "a ?, ?"


class TestMovements:
    """Section 4 of the issue: what moves."""

    mesh = DeviceMesh.of(x=2, y=2)

    def moved(self, one: Graph, given: dict[int, str]) -> list[str]:
        specs = {number: spec(self.mesh, text) for number, text in given.items()}
        return [str(move) for move in explicit_reshards(propagate_graph(one, specs)).moved]

    def test_a_contraction_is_reduced_and_then_resharded(self) -> None:
        one = graph(("matmul", [0, 1], DOT))
        assert self.moved(one, {0: "-, y", 1: "y, -", 2: "x, y"}) == [
            "%0, operand 0 of operation 0: resharded from `-, y` to `x, y`",
            "%2, result 0 of operation 0: reduced over y from `x, - | sum(y)` to `x, -`",
            "%2, result 0 of operation 0: resharded from `x, -` to `x, y`",
        ]

    def test_a_sort_moves_the_cut_to_another_dimension(self) -> None:
        one = Graph.of(
            [(4, 8, 8)],
            [("sort", [0], "([i, j, k]) -> ([i, j, k]) {i=4, j=8, k=8} need_replication={i}")],
            [1],
        )
        given = {0: spec(self.mesh, "x, y, -"), 1: spec(self.mesh, "x, y, -")}
        placed = explicit_reshards(propagate_graph(one, given))
        assert [str(one) for one in placed.operands[0]] == ["-, y x, -"]

    def test_only_what_is_not_asked_for_is_reduced(self) -> None:
        one = Graph.of(
            [(8, 8)], [("sum", [0], "([i, j]) -> ([]) {i=8, j=8} reduction={i, j}")], [1]
        )
        assert self.moved(one, {0: "x, y", 1: "| sum(x)"})[:1] == [
            "%1, result 0 of operation 0: reduced over y from `| sum(x y)` to `| sum(x)`"
        ]

    def test_contributions_stay_through_linear_operators_only(self) -> None:
        given = {0: "-, - | sum(x)", 1: "-, - | sum(x)"}
        add = graph(("exp", [0], NEGATE), inputs=1)
        assert self.moved(add, {0: "-, - | sum(x)", 1: "-, - | sum(x)"})[0] == (
            "%0, operand 0 of operation 0: reduced over x from `-, - | sum(x)` to `-, -`"
        )
        both = explicit_reshards(
            propagate_graph(
                graph(("add", [0, 1], ADD)),
                {n: spec(self.mesh, t) for n, t in (given | {2: "-, - | sum(x)"}).items()},
                outputs={0: spec(self.mesh, "-, - | sum(x)")},
            )
        )
        assert both.moved == ()

    def test_nothing_moves_without_shardings(self) -> None:
        assert self.moved(graph(("add", [0, 1], ADD)), {}) == []


class TestLevels:
    """Levels with a rule of their own."""

    mesh = DeviceMesh.of(a=2, b=2)

    def found(self, one: Graph, given: dict[int, str]) -> PropagatedGraph:
        return propagate_graph(one, {n: spec(self.mesh, text) for n, text in given.items()})

    @pytest.mark.parametrize("text", ["a@stride2, b", "a / b, -", "a b@stride2, -"])
    def test_they_are_carried_unchanged_through_pointwise_factors(self, text: str) -> None:
        found = self.found(graph(("exp", [0], NEGATE), ("add", [1, 2], ADD)), {0: text})
        cut = found.values[3]
        assert cut is not None
        assert [dim.levels for dim in cut.dim_specs] == [
            dim.levels for dim in spec(self.mesh, text).dim_specs
        ]

    def test_a_level_is_carried_as_a_whole_or_not_at_all(self) -> None:
        found = self.found(graph(("add", [0, 1], ADD)), {0: "a b@stride2, -", 1: "?, b"})
        assert str(found.values[2]) == "a b@stride2 ?, ?"
        blocked = self.found(
            graph(("exp", [0], NEGATE), inputs=1),
            {0: "a b@stride2, -", 1: "?, ? | replicated(b)"},
        )
        assert str(blocked.values[1]) == "?, ? | replicated(b)"

    def test_they_are_not_carried_along_a_reduction(self) -> None:
        found = self.found(graph(("matmul", [0, 1], DOT)), {0: "-, a@stride2"})
        assert found.values[1] is None

    def test_they_are_resharded_and_reported_elsewhere(self) -> None:
        found = self.found(graph(("matmul", [0, 1], DOT)), {0: "-, a@stride2", 1: "-, -"})
        assert [str(move) for move in explicit_reshards(found).moved] == [
            "%0, operand 0 of operation 0: resharded from `-, a@stride2` to `-, -`"
        ]

    def test_a_flat_cut_and_a_strided_one_conflict(self) -> None:
        found = self.found(graph(("add", [0, 1], ADD)), {0: "a, -", 1: "a@stride2, -"})
        assert found.values[2] is None


class TestDirections:
    mesh = DeviceMesh.of(a=2, b=2)

    def test_forward_does_not_take_from_results(self) -> None:
        rule = OpShardingRule.parse(NEGATE)
        result = [spec(self.mesh, "a, b")]
        forward = propagate(rule, [None], result, direction=Direction.FORWARD)
        backward = propagate(rule, [None], result, direction=Direction.BACKWARD)
        assert forward[0] == (None,)
        assert [str(one) for one in backward[0]] == ["a ?, b ?"]

    def test_blocked_factors_carry_nothing(self) -> None:
        found = shardings(self.mesh, NEGATE + " blocked={i}", ["a, b"], [None])
        assert found[1] == "?, b ?"

    def test_sideways(self) -> None:
        assert shardings(self.mesh, DOT, ["-, a", "?, ?"], [None])[1] == "a ?, ?"


class TestErrors:
    one = graph(("add", [0, 1], ADD))
    mesh = DeviceMesh.of(a=2)

    def test_two_meshes(self) -> None:
        other = DeviceMesh.of(a=4)
        with pytest.raises(SpecError, match=r"DeviceMesh\(a=2\).*DeviceMesh\(a=4\)"):
            propagate_graph(self.one, {0: spec(self.mesh, "a, -"), 1: spec(other, "a, -")})

    @pytest.mark.parametrize("number", [-1, 3])
    def test_a_value_that_is_not_there(self, number: int) -> None:
        with pytest.raises(SpecError, match=f"%{number}; the graph has %0 to %2"):
            propagate_graph(self.one, {number: spec(self.mesh, "a, -")})

    def test_an_output_that_is_not_there(self) -> None:
        with pytest.raises(SpecError, match="output 1; the graph has 1"):
            propagate_graph(self.one, {}, outputs={1: spec(self.mesh, "a, -")})

    def test_a_wrong_number_of_dimensions(self) -> None:
        with pytest.raises(SpecError, match="1 dimensions, but the value is %0"):
            propagate_graph(self.one, {0: spec(self.mesh, "a")})
        with pytest.raises(SpecError, match="1 dimensions, but the tensor has 2"):
            propagate(OpShardingRule.parse(NEGATE), [spec(self.mesh, "a")], [None])

    def test_a_wrong_number_of_tensors(self) -> None:
        with pytest.raises(SpecError, match="3 shardings for the 2 tensors"):
            propagate(OpShardingRule.parse(NEGATE), [None, None], [None])

    def test_an_unknown_strategy(self) -> None:
        given: dict[int, ShardingSpec] = {0: spec(self.mesh, "a, -")}
        with pytest.raises(SpecError, match="'bold'; it is one of"):
            propagate_graph(self.one, given, strategy="bold")


def test_a_value_that_is_two_operands_of_one_operation() -> None:
    mesh = DeviceMesh.of(a=2)
    found = propagate_graph(graph(("add", [0, 0], ADD), inputs=1), {1: spec(mesh, "a, -")})
    assert str(found.values[0]) == "a ?, ?"


def test_outputs_are_asked_for_apart_from_their_values() -> None:
    mesh = DeviceMesh.of(a=2, b=2)
    one = graph(("exp", [0], NEGATE), inputs=1)
    found = propagate_graph(one, {0: spec(mesh, "a, -")}, outputs={0: spec(mesh, "-, a")}, **BASIC)
    assert [str(one) for one in (*found.values, *found.outputs)] == ["a, -", "?, a ?", "-, a"]


def test_the_example_runs() -> None:
    program = Path(__file__).parents[3] / "examples" / "propagation.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert "reduced over tp from `dp, - | sum(tp)` to `dp, -`" in done.stdout


@pytest.mark.parametrize("strategy", ["basic", "aggressive", "widest"])
def test_maxima_are_no_sums(strategy: str) -> None:
    """A result that is asked for as a sum is what the operator makes, and then moves."""
    mesh = DeviceMesh.of(x=2)
    rule = "([i, j]) -> ([i]) {i=8, j=8} reduction={j:max}"
    graph = Graph.of([(8, 8)], [("max", [0], rule)], [1])
    given = {0: spec(mesh, "-, x"), 1: spec(mesh, "- | sum(x)")}
    placed = explicit_reshards(propagate_graph(graph, given, strategy=strategy))
    assert str(placed.results[0][0]) == "- | max(x)"
    assert [(str(move.source), str(move.target)) for move in placed.moved] == [
        ("- | max(x)", "-"),
        ("-", "- | sum(x)"),
        ("- | sum(x)", "-"),
    ]
