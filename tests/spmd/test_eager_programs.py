"""Random programs on random meshes and shardings, sub-axes and levels among them, against NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard.spmd as sp
from reshard import Axis, DeviceMesh, DimSpec, Level, ShardingSpec
from selection import choose

MESHES = [
    DeviceMesh.of(x=2, y=2),
    DeviceMesh.of(x=3),
    DeviceMesh.of(x=4, y=3, devices=[5, 3, 1, 0, 2, 4, 6, 7, 11, 10, 9, 8]),
    DeviceMesh.of(x=2, y=1, z=2),
    DeviceMesh.of(x=4),
]

Step = Callable[[Any, Any, Any], Any]

# Each takes two arrays of one shape, of 2 dimensions, and gives one of 2 dimensions.
STEPS: dict[str, Step] = {
    "add": lambda xp, a, b: a + b,
    "multiply": lambda xp, a, b: a * b,
    "gram": lambda xp, a, b: a @ xp.permute_dims(b, (1, 0)),
    "inner": lambda xp, a, b: xp.permute_dims(a, (1, 0)) @ b,
    "transpose": lambda xp, a, b: xp.permute_dims(a - b, (1, 0)),
    "less the mean": lambda xp, a, b: a - xp.mean(b, axis=0, keepdims=True),
    "over the maximum": lambda xp, a, b: a / (2 + xp.max(abs(b), axis=1, keepdims=True)),
    "sums, repeated": lambda xp, a, b: xp.broadcast_to(xp.sum(a, axis=0), b.shape),
    "rows behind": lambda xp, a, b: xp.concat([a, b], axis=0),
    "columns behind": lambda xp, a, b: xp.concat([a, b], axis=1),
    "running": lambda xp, a, b: xp.cumulative_sum(a, axis=0) - b,
    "running products": lambda xp, a, b: xp.cumulative_prod(a, axis=1) + b,
    "columns picked": lambda xp, a, b: a[:, np.arange(a.shape[1])[::-1]] - b,
    "rows apart": lambda xp, a, b: xp.concat(xp.unstack(a[:, None], axis=0)[::-1], axis=0),
    "sorted": lambda xp, a, b: xp.sort(a, axis=1) + b,
    "reshaped": lambda xp, a, b: xp.reshape(a, (a.shape[1], a.shape[0])),
    "flat": lambda xp, a, b: xp.reshape(xp.reshape(a + b, (-1,)), (-1, a.shape[1])),
    "upside down": lambda xp, a, b: xp.flip(a, axis=0) + b,
    "first half": lambda xp, a, b: a[: (a.shape[0] + 1) // 2] * 2.0,
    "positive": lambda xp, a, b: xp.where(a > b, a, b),
    "tanh": lambda xp, a, b: xp.tanh(a),
    "rolled": lambda xp, a, b: xp.roll(a, 1, axis=1) + b,
    "taken": lambda xp, a, b: xp.take(a, np.arange(a.shape[0])[::-2], axis=0),
}


@st.composite
def shardings(draw: st.DrawFn, mesh: DeviceMesh) -> ShardingSpec:
    """Any sharding of 2 dimensions, by whole axes and halves of them, in levels."""
    pieces: list[Axis] = []
    for name, size in zip(mesh.axis_names, mesh.shape, strict=True):
        if size == 4 and draw(st.booleans()):
            pieces += [Axis(name, 1, 2), Axis(name, 2, 2)]
        else:
            pieces.append(Axis(name))
    cut: list[list[Axis]] = [[], [], []]
    for axis in draw(st.permutations(pieces)):
        cut[draw(st.integers(0, 2))].append(axis)
    dims = []
    for axes in cut[:2]:
        if len(axes) > 1 and draw(st.booleans()):
            dims.append(DimSpec([Level([axis]) for axis in axes]))
        else:
            dims.append(DimSpec(axes))
    return ShardingSpec(mesh, dims)


@given(st.data())
@settings(max_examples=choose(45, 150))
def test_random_programs(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    random = np.random.default_rng(0)
    a, b = (random.uniform(-1, 1, size=shape) for _ in range(2))
    x, y = (sp.array(one, data.draw(shardings(mesh))) for one in (a, b))
    for _ in range(data.draw(st.integers(1, 5))):
        name = data.draw(st.sampled_from(sorted(STEPS)))
        with np.errstate(all="ignore"):
            a, x = STEPS[name](np, a, b), STEPS[name](sp, x, y)
        if x.shape != y.shape or data.draw(st.booleans()):
            b, y = a, x
        if data.draw(st.booleans()):
            x = x.shard(data.draw(shardings(mesh)))
        assert x.shape == a.shape
        scale = max(1.0, float(np.abs(a).max(initial=0)))
        np.testing.assert_allclose(x.to_dense() / scale, a / scale, 1e-9, 1e-9, err_msg=name)
        if math.prod(a.shape) > 400 or scale > 1e6:
            break
