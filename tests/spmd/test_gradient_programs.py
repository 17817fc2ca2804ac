"""Random programs: gradients over shardings are those of the same program on whole arrays.

A program is a chain of operations on arrays of one shape, resharded at random in between; the
gradients on whole arrays are held to differences along random directions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh
from spmd.eager_cases import specs

MESH = DeviceMesh.of(x=2, y=3)
SHAPE = (6, 6)
SPECS = list(specs(MESH, 2, partial=True))
LENGTH = 9

Step = Callable[[Any, Any, Any], Any]
STEPS: dict[str, Step] = {
    "tanh": lambda x, w, b: sp.tanh(x),
    "square": lambda x, w, b: sp.square(x) * 0.5,
    "silu": lambda x, w, b: sp.silu(x),
    "matmul": lambda x, w, b: x @ w,
    "matmul from the left": lambda x, w, b: sp.tanh(w) @ x * 0.3,
    "add": lambda x, w, b: x + b,
    "multiply": lambda x, w, b: x * sp.sin(b) + w,
    "transpose": lambda x, w, b: sp.permute_dims(x, (1, 0)),
    "reshape": lambda x, w, b: sp.reshape(sp.reshape(x, (4, 9)) * 1.5, SHAPE),
    "softmax": lambda x, w, b: sp.softmax(x) * 2.0,
    "norm": lambda x, w, b: sp.rms_norm(x, b),
    "mean": lambda x, w, b: x - sp.mean(x, axis=0, keepdims=True),
    "roll": lambda x, w, b: sp.roll(x, 2, axis=1),
    "concat": lambda x, w, b: sp.concat([x[2:], x[:2] * 2.0], axis=0),
    "cumulative": lambda x, w, b: sp.cumulative_sum(x, axis=0) * 0.2,
    "take": lambda x, w, b: sp.take(x, np.array([5, 0, 0, 3, 2, 1]), axis=0),
    "where": lambda x, w, b: sp.where(np.arange(6) % 2 == 0, x, w),
    "einsum": lambda x, w, b: sp.einsum("ij,kj->ik", x, w) * 0.5,
}


def make_program(seed: int) -> tuple[list[str], Callable[..., Any]]:
    choose = random.Random(seed)
    names = choose.choices(sorted(STEPS), k=LENGTH)
    targets = [choose.choice([None, *SPECS]) for _ in names]
    layers = [choose.random() < 0.2 for _ in names]

    def program(x: Any, w: Any, b: Any, moves: bool) -> Any:
        for name, target, again in zip(names, targets, layers, strict=True):
            step = sp.rematerialized(STEPS[name]) if again else STEPS[name]
            x = step(x, w, b)
            if moves and target is not None:
                x = x.shard(target)
        return sp.mean(x * x) + sp.sum(x) * 0.1

    return names, program


@pytest.mark.parametrize("seed", range(60))
def test_a_random_program(seed: int) -> None:
    names, program = make_program(seed)
    choose = random.Random(seed + 1000)
    numbers = np.random.default_rng(seed)
    arrays = [numbers.normal(size=size) for size in (SHAPE, SHAPE, SHAPE[1:])]

    def whole(*given: Any) -> Any:
        return program(*given, False)

    value, expected = sp.value_and_grad(whole, (0, 1, 2))(*map(sp.array, arrays))
    # 1. On whole arrays, against differences along a direction.
    direction = [numbers.normal(size=one.shape) for one in arrays]
    ends = [
        float(
            whole(*(sp.array(a + sign * 1e-6 * d) for a, d in zip(arrays, direction, strict=True)))
        )
        for sign in (1, -1)
    ]
    slope = sum(float((e.to_dense() * d).sum()) for e, d in zip(expected, direction, strict=True))
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=1e-6), names
    # 2. Over shardings, resharded on the way.
    given = [sp.array(one, choose.choice(list(specs(MESH, one.ndim)))) for one in arrays]
    moved, found = sp.value_and_grad(lambda *a: program(*a, True), (0, 1, 2))(*given)
    assert float(moved) == pytest.approx(float(value), rel=1e-9)
    for one, parameter, right in zip(found, given, expected, strict=True):
        assert one.spec is parameter.spec, names
        np.testing.assert_allclose(one.to_dense(), right.to_dense(), rtol=1e-7, atol=1e-9)
