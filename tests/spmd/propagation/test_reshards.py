"""What operators run with where levels with a rule of their own meet other axes."""

from __future__ import annotations

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec

MESH = DeviceMesh.of(x=2, y=2)


@pytest.mark.parametrize("strategy", ["basic", "aggressive", "widest", "cost"])
def test_a_level_is_taken_whole_or_not_at_all(strategy: str) -> None:
    data = np.arange(64.0).reshape(8, 8)
    q = sp.array(data, spec(MESH, "-, y x@cyclic1"))
    traced = sp.trace(lambda q: q.shard(spec(MESH, "x, -")) @ q, q, strategy=strategy)
    np.testing.assert_array_equal(np.asarray(traced.run(q)), data @ data)


@pytest.mark.parametrize("strategy", ["eager", "basic", "aggressive", "widest", "cost"])
@pytest.mark.parametrize("other", ["x, -", "-, x", "-, - | sum(x)", "y, -", "-, - | sum(x y)"])
@pytest.mark.parametrize("pending", ["-, - | sum(x)", "y, - | sum(x)", "-, - | max(x)"])
def test_contributions_along_an_axis_of_one_device(pending: str, other: str, strategy: str) -> None:
    mesh = DeviceMesh.of(x=1, y=2)
    data, more = np.arange(12.0).reshape(4, 3), np.ones((4, 3))
    p, w = sp.array(data, spec(mesh, pending)), sp.array(more, spec(mesh, other))
    for function in (lambda p, w: p - w, lambda p, w: w - p, lambda p, w: p @ w.T):
        traced = sp.trace(function, p, w, strategy=strategy)
        np.testing.assert_array_equal(np.asarray(traced.run(p, w)), function(data, more))
        np.testing.assert_array_equal(np.asarray(function(p, w)), function(data, more))
