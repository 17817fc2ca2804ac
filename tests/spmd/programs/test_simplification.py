"""What a program computes twice all the same: values that are not to be kept."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec

MESH = DeviceMesh.of(x=4)
LAYERS, ROWS = 6, 4096


def step(is_again: bool) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return sp.tanh(sp.exp(sp.tanh(x @ w) * 0.1) + x)

    kept = sp.rematerialized(layer) if is_again else layer

    def loss(weights: list[Any], x: Any) -> Any:
        for w in weights:
            x = kept(x, w)
        return sp.sum(x * x)

    return sp.value_and_grad(loss)


def arguments() -> tuple[list[sp.ShardedArray], sp.ShardedArray]:
    generator = np.random.default_rng(0)
    weights = [generator.normal(size=(16, 16)) / 4 for _ in range(LAYERS)]
    x = sp.array(generator.normal(size=(ROWS, 16)), spec(MESH, "x, -"))
    return [sp.array(w, spec(MESH, "-, -")) for w in weights], x


@pytest.mark.parametrize("strategy", ["eager", "basic", "cost"])
def test_rematerialized_values_are_computed_again(strategy: str) -> None:
    given = arguments()
    plain, again = (sp.jit(step(one), strategy=strategy) for one in (False, True))
    tanhs = [
        sum(one.operation.operator == "tanh" for one in program.trace(*given).operations)
        for program in (plain, again)
    ]
    assert tanhs == [2 * LAYERS, 4 * LAYERS]
    expected, found = plain(*given), again(*given)
    np.testing.assert_allclose(found[0].to_dense(), expected[0].to_dense(), rtol=1e-12)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one.to_dense(), other.to_dense(), rtol=1e-9)


def test_programs_hold_less_with_rematerialized_values() -> None:
    peaks = []
    for is_again in (False, True):
        given, program = arguments(), sp.jit(step(is_again))
        program(*given)
        tracemalloc.start()
        program(*given)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 0.7 * peaks[0]
