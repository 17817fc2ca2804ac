"""Edges that operators need of other parts: kept by the value, or moved for each reader."""

from __future__ import annotations

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, dtype, spec
from reshard.cost import load_preset
from reshard.spmd.propagation.axis_parts import AxisTable
from reshard.spmd.propagation.by_cost.cost_candidates import PlacedRun
from reshard.spmd.propagation.by_cost.cost_model import CostModel, Machine
from reshard.spmd.propagation.by_cost.edge_moves import NO_EDGES, EdgeMoves, KnownEdges

MESH = DeviceMesh.of(x=2)
SHAPE = (64, 64)


def test_edges_are_the_value_s_where_it_lies_as_it_is_read() -> None:
    model = CostModel(AxisTable.of(MESH), Machine())
    rows, columns, whole = (
        model.table.encoded(spec(MESH, text)) for text in ("x, -", "-, x", "-, -")
    )
    known = KnownEdges(model, SHAPE, dtype("float32"))
    # Two ways: one runs on rows with more than they are, one on columns as they are.
    placed = [PlacedRun((rows,), (whole,), ()), None]
    kept, moved = EdgeMoves.of(known, (0, 1), (0, 1), (rows, columns), placed, 0)
    price_s = model.program_s(rows, whole, SHAPE, dtype("float32"))
    assert price_s > 0 and known.seconds_s == [price_s]
    assert kept.others == moved.others == (0, NO_EDGES)
    # A value that lies in rows keeps the edges; one that is moved to rows has them for this once.
    assert kept.seconds_s.tolist() == [[price_s, 0], [0, 0]]
    assert moved.seconds_s.tolist() == [[0, 0], [price_s, 0]]
    targets = [kept.target(row, column) for row in (0, 1) for column in (0, 1)]
    assert targets == [0, None, None, None]
    assert kept.seconds_to((0,)).tolist() == [[price_s], [0]]
    # Another operator that needs the same edges knows them by the same number.
    again, _ = EdgeMoves.of(known, (0, 1), (0,), (rows,), placed[:1], 0)
    assert again.others == (0,) and len(known.seconds_s) == 1
    assert EdgeMoves.of(known, (0, 1), (1,), (columns,), [None], 0) == ()


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
