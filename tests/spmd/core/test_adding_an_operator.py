"""One row adds an operator: it runs on shards, is traced, propagated, costed and documented."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.cost import load_preset
from reshard.errors import SpecError
from reshard.spmd.core import operator as table
from reshard.spmd.core.local_work import Function, LocalWork
from reshard.spmd.core.operator import Operator, of_product
from reshard.spmd.core.result_types import promoted
from reshard.spmd.propagation.by_cost.cost_model import operations_of
from reshard.spmd.rules.rule_builder import Inferred, Shape, from_pattern

MESH = DeviceMesh.of(x=2, y=2)


def weigh_rule(shapes: Sequence[Shape]) -> Inferred:
    """`[i, k], [k] -> [i]`."""
    rows, weights = shapes
    if len(rows) != 2 or weights != rows[1:]:
        raise SpecError(f"weigh of {rows} by {weights}; one weight a column was expected")
    return from_pattern("i k, k -> i", shapes, reduced="k")


def weigh_here(work: LocalWork) -> Function:
    space = work.library.namespace
    return lambda rows, weights: space.sum(rows * weights, axis=1)


WEIGH = Operator(
    "weigh",
    "products",
    weigh_rule,
    linear="one",
    local=weigh_here,
    work=of_product,
    result_types=promoted,
    example=([(4, 8), (8,)], {}),
    doc="Each row's elements, weighed and added up.",
    note="weights are cut as the columns are",
)


@pytest.fixture
def weigh() -> Iterator[Operator]:
    yield table.register(WEIGH)
    del table._table["weigh"]


@pytest.mark.usefixtures("weigh")
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("text", ["x, -", "-, y", "x, y", "y x, -"])
def test_an_added_operator_runs_on_shards(text: str, library: str) -> None:
    data, weights = np.arange(35.0).reshape(7, 5), np.arange(5.0)
    rows = sp.array(data, spec(MESH, text), runner=sp.in_process(library))
    found = sp.weigh(rows, weights)
    np.testing.assert_array_equal(np.asarray(found), data @ weights)
    for by in (rows, rows + 1):
        assert sp.weigh(by, weights).spec is found.spec
    assert sp.weigh.__doc__ == "Each row's elements, weighed and added up."
    with pytest.raises(SpecError, match="one weight a column"):
        sp.weigh(rows, weights[1:])


@pytest.mark.usefixtures("weigh")
def test_an_added_operator_leaves_its_sum_partial() -> None:
    rows = sp.ones((4, 8), spec=spec(MESH, "-, y"))
    assert str(sp.weigh(rows, np.ones(8)).spec) == "- | sum(y)"


@pytest.mark.usefixtures("weigh")
@pytest.mark.parametrize("strategy", ["eager", "basic", "aggressive", "widest", "cost"])
def test_an_added_operator_is_traced_and_costed(strategy: str) -> None:
    rows = sp.abstract((64, 32), "bfloat16", spec(MESH, "x, -"))
    weights = sp.abstract((32,), "float32")
    topology = load_preset("h100-8").topology()
    found = sp.trace(
        lambda a, b: sp.weigh(a, b), rows, weights, strategy=strategy, topology=topology
    )
    (operation,) = found.operations
    assert found.outputs[0].dtype.name == "float32"
    assert "weigh(%0, %1)" in str(found)
    assert operation.compute_s and min(operation.compute_s) > 0.0
    rule = table.rule_of("weigh", [(64, 32), (32,)])
    assert operations_of("weigh", rule) == 2.0 * 64 * 32


@pytest.mark.usefixtures("weigh")
def test_an_added_operator_propagates_shardings() -> None:
    rule = table.rule_of("weigh", [(4, 8), (8,)])
    graph = sp.Graph.of([(4, 8), (8,)], [("weigh", [0, 1], rule)], [2])
    found = sp.propagate_graph(graph, {0: spec(MESH, "x, y")})
    assert [str(one) for one in found.values] == ["x, y", "y ?", "x ?"]


@pytest.mark.usefixtures("weigh")
def test_an_added_operator_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    page = import_module("rules_page")
    shipped = table.shipped_operators() | {"weigh"}
    monkeypatch.setattr(page, "shipped_operators", lambda: shipped)
    assert (
        "| `weigh` | `([i, j], [j]) -> ([i]) {i=4, j=8} reduction={j}` |  | sum: any one | weights "
        "are cut as the columns are |"
    ) in page.rules_document()


def test_a_removed_operator_is_gone() -> None:
    assert not hasattr(sp, "weigh")
