"""What rules, graphs, propagation and traces say of what they cannot take."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.cost import load_preset
from reshard.errors import LayoutError, NotationError, ReshardError, SpecError, UsageError
from reshard.spmd.core import operator as table
from reshard.spmd.graph import Graph
from reshard.spmd.propagation.propagation import propagate
from reshard.spmd.propagation.reshards import explicit_reshards
from reshard.spmd.propagation.strategies import propagate_graph
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.topology import Device, Link, Topology

MESH = DeviceMesh.of(x=2, y=2)
GIVEN = {0: spec(MESH, "x, y")}
TEXT = "([i, k], [k, j]) -> ([i, j]) {i=8, j=8, k=8} reduction={k}"
RULE = OpShardingRule.parse(TEXT)
GRAPH = Graph.of([(8, 8)] * 2, [("matmul", [0, 1], RULE)], [2])
ARRAY = sp.abstract((8, 8), "float32", spec(MESH, "x, y"))


@pytest.fixture(autouse=True)
def own_rules() -> Iterator[None]:
    yield
    for name in set(table._table) - table.shipped_operators():
        del table._table[name]


def ruled(found: object) -> None:
    sp.rule("a_users_own")(lambda shapes: found)  # type: ignore[arg-type, return-value]
    sp.rule_of("a_users_own", [(3,)])


Case = tuple[Callable[[], object], type[ReshardError], str]
CASES: dict[str, Case] = {
    "a name for a topology": (
        lambda: sp.trace(sp.exp, ARRAY, topology="h100-8"),  # type: ignore[arg-type]
        UsageError,
        r"topology 'h100-8' is not a Topology; give .*load_preset\(\"h100-8\"\)",
    ),
    "a preset for a topology": (
        lambda: sp.trace(sp.exp, ARRAY, topology=load_preset("h100-8")),  # type: ignore[arg-type]
        UsageError,
        "is not a Topology",
    ),
    "a negative size": (lambda: sp.abstract((-1, 3)), UsageError, r"shape \(-1, 3\) is not valid"),
    "half a size": (
        lambda: sp.abstract((1.5, 3)),  # type: ignore[arg-type]
        UsageError,
        r"shape \(1.5, 3\) is not valid",
    ),
    "text for a sharding": (
        lambda: sp.abstract((4,), "float32", "x"),  # type: ignore[arg-type]
        UsageError,
        "sharding 'x' is not a ShardingSpec; give reshard.spec",
    ),
    "text for an annotation": (
        lambda: propagate_graph(GRAPH, {0: "x, y"}),  # type: ignore[dict-item]
        SpecError,
        "sharding 'x, y' is not a ShardingSpec",
    ),
    "a list of annotations": (
        lambda: propagate_graph(GRAPH, ["x, y"]),  # type: ignore[arg-type]
        SpecError,
        r"annotations \['x, y'\] must be shardings by number",
    ),
    "an annotation by name": (
        lambda: propagate_graph(GRAPH, {"x": GIVEN[0]}),  # type: ignore[dict-item]
        SpecError,
        "must be a sharding by number",
    ),
    "no graph": (
        lambda: propagate_graph("graph", GIVEN),  # type: ignore[arg-type]
        SpecError,
        "graph 'graph' is not a Graph",
    ),
    "an unknown strategy of nothing": (
        lambda: propagate_graph(GRAPH, {}, strategy="best"),
        SpecError,
        "unknown strategy 'best'",
    ),
    "text for a rule": (
        lambda: propagate(TEXT, [None, None], [None]),  # type: ignore[arg-type]
        SpecError,
        "is not an OpShardingRule; give OpShardingRule.parse",
    ),
    "text for what is known": (
        lambda: propagate(RULE, ["x, y", None], [None]),  # type: ignore[list-item]
        SpecError,
        "sharding 'x, y' is not a ShardingSpec",
    ),
    "a graph that is not propagated": (
        lambda: explicit_reshards(GRAPH),  # type: ignore[arg-type]
        SpecError,
        "is not propagated; give what propagate_graph returns",
    ),
    "a topology for a machine": (
        lambda: sp.propagate_by_cost(GRAPH, GIVEN, machine=Topology([0])),  # type: ignore[arg-type]
        UsageError,
        "is not a Machine; give sp.Machine",
    ),
    "a machine of a name": (
        lambda: sp.Machine("h100-8"),  # type: ignore[arg-type]
        UsageError,
        "'h100-8' is not a Topology",
    ),
    "a machine with another library": (lambda: sp.Machine(library="mpi"), UsageError, "'mpi'"),
    "a machine that computes nothing": (
        lambda: sp.Machine(operations_per_s=0),
        UsageError,
        "operations_per_s is 0; a finite number, more than 0",
    ),
    "a machine that forgets": (
        lambda: sp.Machine(memory_bytes_per_s=-1.0),
        UsageError,
        "memory_bytes_per_s is -1.0",
    ),
    "a machine that is too small": (
        lambda: sp.propagate_by_cost(
            GRAPH, GIVEN, machine=sp.Machine(Topology([0, 0], within_host=Link(1.0)))
        ),
        LayoutError,
        "rank . of a topology over ranks 0 to 1",
    ),
    "a rule of nothing": (
        lambda: OpShardingRule.parse(None),  # type: ignore[arg-type]
        NotationError,
        "None is not a str",
    ),
    "a graph of nothing": (
        lambda: Graph.parse(None),  # type: ignore[arg-type]
        NotationError,
        "None is not a str",
    ),
    "batches by name": (
        lambda: sp.matmul_template("1"),  # type: ignore[arg-type]
        SpecError,
        "number of batch dimensions '1' must be a whole number",
    ),
    "half a dimension": (
        lambda: sp.elementwise_template(2.5),  # type: ignore[arg-type]
        SpecError,
        "rank 2.5 must be a whole number",
    ),
    "no permutation": (
        lambda: sp.transpose_template(2, None),  # type: ignore[arg-type]
        SpecError,
        "permutation None must be a list of whole numbers",
    ),
    "no einsum": (
        lambda: sp.einsum_template(None),  # type: ignore[arg-type]
        SpecError,
        "None is not an einsum",
    ),
    "a shape of letters": (
        lambda: sp.matmul_template(0).rule("ab", "bc"),  # type: ignore[arg-type]
        SpecError,
        "shape 'ab' must be a list of whole numbers",
    ),
    "shapes to reshape by name": (
        lambda: sp.reshape_template((3, 4), "12"),  # type: ignore[arg-type]
        SpecError,
        "shape '12'",
    ),
    "a rule that is none": (lambda: ruled(None), SpecError, "the rule of a_users_own is None"),
    "an unknown linearity": (
        lambda: sp.rule("a_users_own", linear="all"),  # type: ignore[arg-type]
        SpecError,
        "linear='all' of operator a_users_own; it is each, one, none",
    ),
    "an operator without a name": (
        lambda: sp.rule(3),  # type: ignore[arg-type]
        SpecError,
        "operator 3; give its name",
    ),
    "an attribute that is not there": (
        lambda: sp.rule_of("matmul", [(3, 3), (3, 3)], axis=1),
        SpecError,
        "operator matmul with axis: .*; its attributes are none",
    ),
    "an attribute that is missing": (
        lambda: sp.rule_of("reshape", [(3, 3)]),
        SpecError,
        "operator reshape with no attributes: .*; its attributes are shape",
    ),
    "a number for a shape": (
        lambda: sp.rule_of("sum", [3]),  # type: ignore[list-item]
        SpecError,
        "shape 3 must be a list of whole numbers",
    ),
    "no device": (
        lambda: Topology([0], device="h100"),  # type: ignore[arg-type]
        LayoutError,
        "'h100' is not a Device; give Device",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_cannot_be_is_said(case: Case) -> None:
    make, error, message = case
    with pytest.raises(error, match=message):
        make()


def test_a_mistake_inside_a_rule_of_ones_own_is_not_called_an_attribute() -> None:
    def wrong(shapes: object, axis: int = 0) -> str:
        return len(3)  # type: ignore[arg-type, return-value]

    sp.rule("a_users_own")(wrong)
    with pytest.raises(TypeError, match="has no len"):
        sp.rule_of("a_users_own", [(3,)])


def test_numbers_of_numpy_are_sizes() -> None:
    import numpy as np

    sizes = np.array([4, 8])
    assert sp.abstract(sizes).shape == (4, 8)
    assert str(sp.rule_of("exp", [tuple(sizes)])) == "([i, j]) -> ([i, j]) {i=4, j=8}"
    assert Device(1).memory_bytes_per_s == 1.0
