"""Rules as values and as text."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import DeviceMesh, spec
from reshard.errors import NotationError, SpecError
from reshard.layout import REDUCTIONS
from reshard.spmd.graph import Graph
from reshard.spmd.propagation.reshards import explicit_reshards
from reshard.spmd.propagation.strategies import propagate_graph
from reshard.spmd.rules.alignment import aligned
from reshard.spmd.rules.sharding_rule import OpShardingRule, factor_names
from selection import choose

MATMUL = "([i, k], [k, j]) -> ([i, j]) {i=4, k=8, j=16} reduction={k}"


@st.composite
def rules(draw: Any) -> OpShardingRule:
    """Any rule: factors spread over the dimensions of some tensors, kinds given at random."""
    count = draw(st.integers(0, 24))
    operands = draw(st.integers(1, 3))
    results = draw(st.integers(1, 2))
    tensors: list[list[list[int]]] = []
    for _ in range(operands + results):
        factors = draw(st.permutations(range(count)))[: draw(st.integers(0, count))]
        dims: list[list[int]] = [[] for _ in range(draw(st.integers(0, 4)))]
        for factor in factors if dims else []:
            dims[draw(st.integers(0, len(dims) - 1))].append(factor)
        tensors.append(dims)
    used = {factor for dims in tensors for dim in dims for factor in dim}
    missing = [factor for factor in range(count) if factor not in used]
    tensors[0] += [[factor] for factor in missing]
    of_results = {f for dims in tensors[operands:] for dim in dims for f in dim}
    kinds: dict[str, list[int]] = {
        "reduction": [],
        "need_replication": [],
        "permutation": [],
        "": [],
    }
    for factor in range(count):
        choices = [kind for kind in kinds if kind != "reduction" or factor not in of_results]
        kinds[draw(st.sampled_from(choices))].append(factor)
    del kinds[""]
    return OpShardingRule(
        tensors[:operands],
        tensors[operands:],
        [draw(st.integers(0, 99)) for _ in range(count)],
        blocked=[f for f in range(count) if draw(st.booleans())],
        # Without reduced factors the text does not say how contributions combine.
        reduction_operator=draw(st.sampled_from(REDUCTIONS)) if kinds["reduction"] else "sum",
        **kinds,
    )


@settings(max_examples=choose(45, 150), deadline=None)
@given(rules())
def test_text_is_the_rule(rule: OpShardingRule) -> None:
    assert OpShardingRule.parse(str(rule)) is rule
    assert repr(rule) == f"OpShardingRule({str(rule)!r})"
    assert pickle.loads(pickle.dumps(rule)) is rule
    assert copy.deepcopy(rule) is rule


@settings(max_examples=choose(15, 50), deadline=None)
@given(rules())
def test_shapes_are_products_of_factors(rule: OpShardingRule) -> None:
    for mapping, shape in zip(rule.tensors, rule.operand_shapes + rule.result_shapes, strict=True):
        assert len(mapping) == len(shape)
        for dim, size in zip(mapping, shape, strict=True):
            product = 1
            for factor in dim:
                product *= rule.sizes[factor]
            assert size == product


def test_names_and_order_are_kept() -> None:
    rule = OpShardingRule.parse("([b, m], [m]) -> ([b]) {m=3, b=2} reduction={m:max}")
    assert rule.names == ("m", "b") and rule.sizes == (3, 2)
    assert rule.operands == (((1,), (0,)), ((0,),)) and rule.reduction == (0,)
    assert rule.reduction_operator == "max"
    assert str(rule) == "([b, m], [m]) -> ([b]) {m=3, b=2} reduction={m:max}"


def test_many_factors_have_names() -> None:
    names = factor_names(20)
    assert names[17:] == ("z", "z_1", "z_2") and len(set(names)) == 20


def test_rules_of_scalars_and_of_empty_dimensions_are_read() -> None:
    assert OpShardingRule.parse("([], []) -> ([]) {}").operand_shapes == ((), ())
    assert OpShardingRule.parse("() -> ([i]) {i=0}").result_shapes == ((0,),)
    assert OpShardingRule.parse("([1, i]) -> ([i]) {i=3}").operand_shapes == ((1, 3),)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("([i] -> ([i]) {i=4}", "is not a sharding rule"),
        ("([i]) -> ([i])", "is not a sharding rule"),
        ("([i]) -> ([i]) {i}", "'i' of"),
        ("([i]) -> ([i]) {i=4, i=5}", "'i=5' of"),
        ("([i]) -> ([i]) {i=-4}", "is not a factor's size"),
        ("([i]) -> ([i]) {i=4} folded={i}", "'folded' of"),
        ("([i]) -> ([i]) {i=4} blocked={i} blocked={i}", "there twice"),
        ("([i]) -> ([i]) {i=4} blocked={j}", "factor 'j' of"),
        ("([i, k]) -> ([i]) {i=4}", "factor 'k' of"),
        ("([i, k]) -> ([i]) {i=4, k=2} reduction={k:max, i:min}", "one operator may follow"),
        ("([i]) -> ([i]) {i=4} blocked={i:max}", "one operator may follow"),
        ("(i) -> ([i]) {i=4}", "is not a list of tensors"),
        ("([i] [i]) -> ([i]) {i=4}", "is not a list of tensors"),
        ("([2]) -> ([i]) {i=4}", "is not made of factors"),
    ],
)
def test_texts_that_are_not_rules_are_refused(text: str, part: str) -> None:
    with pytest.raises(NotationError) as caught:
        OpShardingRule.parse(text)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (lambda: OpShardingRule([[[0]]], [[[1]]], [4]), "factor 1 is not one of the 1"),
        (lambda: OpShardingRule([[[0]]], [[[0]]], [4, 5]), "factor j is in no tensor"),
        (lambda: OpShardingRule([[[0], [0]]], [[[0]]], [4]), "is twice in [i, i]"),
        (lambda: OpShardingRule([[[0]]], [[[0]]], [-1]), "has size -1"),
        (lambda: OpShardingRule([[[0]]], [[[0]]], [4], reduction=[0]), "is reduced, but"),
        (
            lambda: OpShardingRule([[[0]]], [[]], [4], reduction=[0], permutation=[0]),
            "is of the kinds reduction and permutation",
        ),
        (lambda: OpShardingRule([[[0]]], [[[0]]], [4], blocked=[1]), "factor 1 is not one"),
        (lambda: OpShardingRule([[[0]]], [[[0]]], [4], permutation=[-1]), "factor -1 is not one"),
        (
            lambda: OpShardingRule([[[0]]], [[[0]]], [4], reduction_operator="xor"),
            "unknown reduction 'xor'",
        ),
        (lambda: OpShardingRule([[[0]]], [[[0]]], [4], names=["i", "j"]), "give each one"),
        (lambda: OpShardingRule([[[0]]], [[[0]]], [4], names=["ij"]), "factor name 'ij'"),
    ],
)
def test_invalid_rules_are_refused(build: Any, part: str) -> None:
    with pytest.raises(SpecError) as caught:
        build()
    assert part in str(caught.value)


def test_a_factor_of_one_result_is_reduced_in_another() -> None:
    """As a gradient's: rows are parts of the one result, and contributions to the other."""
    rule = OpShardingRule.parse("([i, j]) -> ([i, j], [j]) {i=4, j=6} reduction={i}")
    assert rule.contributed == ((), (0,))
    mesh = DeviceMesh.of(x=2)
    rows = spec(mesh, "x, -")
    _, results = aligned(rule, (rows,), ((4, 6),), ((4, 6), (6,)))
    assert [str(one) for one in results] == ["x, -", "- | sum(x)"]
    graph = Graph.of([(4, 6)], [("both", [0], str(rule))], [1, 2])
    for strategy in ("basic", "cost"):
        placed = explicit_reshards(propagate_graph(graph, {0: rows}, strategy=strategy))
        assert [str(one) for one in placed.results[0]] == ["x, -", "- | sum(x)"]


def test_equal_rules_are_the_same_object() -> None:
    assert OpShardingRule.parse(MATMUL) is OpShardingRule.parse(MATMUL.replace(" ", "", 1))
    assert OpShardingRule.parse(MATMUL) is not OpShardingRule.parse(
        MATMUL.replace("reduction={k}", "reduction={k:max}")
    )
