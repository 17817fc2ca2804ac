"""Choices nearest to shardings that are wanted, and seconds that are charged for choices."""

from __future__ import annotations

import numpy as np
import pytest

from reshard import DeviceMesh, spec
from reshard.spmd.graph import Graph
from reshard.spmd.propagation.axes import AxisTable
from reshard.spmd.propagation.by_cost.cost_model import CostModel, Machine
from reshard.spmd.propagation.by_cost.cost_problem import CostProblem
from reshard.spmd.propagation.by_cost.factor_graph import CostTable
from reshard.spmd.propagation.propagation import propagate_by_rules


def test_the_nearest_of_a_sharding_that_is_no_candidate_cuts_most_dimensions_so() -> None:
    mesh = DeviceMesh.of(a=2, b=3)
    # Over b nothing can be cut evenly but the last dimension, which the operator needs whole.
    rule = "([i, j, k]) -> ([i, j, k]) {i=8, j=8, k=9} need_replication={k}"
    graph = Graph.of([(8, 8, 9)], [("sort", [0], rule)], [1])
    annotations = {0: spec(mesh, "a, -, -")}
    table = AxisTable.of(mesh)
    problem = CostProblem(graph, table, CostModel.of(table, Machine()))
    problem.candidates(annotations, {}, [propagate_by_rules(graph, annotations)])
    made = problem.values[1]
    wanted = [table.encoded(spec(mesh, text)) for text in ("a, -, -", "-, a, b")]
    assert wanted[1].dims not in [one.dims for one in made]
    nearest = problem.nearest(wanted)
    assert str(table.decoded(made[nearest[1]])) == "-, a, -"
    # What is a candidate is found itself.
    for place, one in enumerate(made):
        assert problem.nearest([wanted[0], one])[1] == [other.dims for other in made].index(
            one.dims
        ), place


def test_charges_are_added_in_place_of_those_before() -> None:
    mesh = DeviceMesh.of(a=2)
    graph = Graph.of([(8,)], [("exp", [0], "([i]) -> ([i]) {i=8}")], [1])
    annotations = {0: spec(mesh, "a")}
    table = AxisTable.of(mesh)
    problem = CostProblem(graph, table, CostModel.of(table, Machine()))
    problem.candidates(annotations, {}, [propagate_by_rules(graph, annotations)])
    problem.fill(bounds=False)
    chosen = problem.start(0)
    alone_s = problem.seconds_s(chosen)
    count = len(problem.values[1])
    # The same variables, then others, then none.
    for variables, seconds_s in (((1,), 2.0), ((1,), 3.0), ((1, 1), 5.0), ((), 0.0)):
        problem.charge([CostTable((v,), np.full(count, seconds_s)) for v in variables])
        expected_s = alone_s + len(variables) * seconds_s
        assert problem.seconds_s(chosen) == pytest.approx(expected_s, rel=1e-12)
        assert problem.sum().value(chosen) == pytest.approx(expected_s, rel=1e-12)
