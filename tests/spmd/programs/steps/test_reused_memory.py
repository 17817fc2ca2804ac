"""Results in the memory of operands: where nobody else has it, and nothing that is kept changes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import UsageError

MESH = DeviceMesh.of(x=2)
ROWS, WIDTH = 256, 128
SHARD_BYTES = ROWS * WIDTH * 8 // 2


def array(seed: int = 0, text: str = "x, -") -> Any:
    data = np.random.default_rng(seed).normal(size=(ROWS, WIDTH))
    return sp.array(data, spec(MESH, text))


def chain(x: Any, y: Any) -> Any:
    for _ in range(4):
        x = sp.tanh(x * 0.5 + y)
    return x


def viewed(x: Any, y: Any) -> Any:
    """A view of what is last read by a function that works element by element."""
    z = x + y
    turned = z.mT
    last = z * 2.0
    return turned + 0.0, last, turned


def read_later(x: Any, y: Any) -> Any:
    z = x + y
    w = z * 2.0
    return z + w, sp.exp(w) * w, w


def in_parts(x: Any, y: Any) -> Any:
    z = x + y
    there = z.shard(spec(MESH, "-, x"))
    return z * 3.0, there * there, sp.sum(z * z) + 1.0, sp.concat([z, z], axis=1)


def alone(x: Any, y: Any) -> Any:
    return x * 1.0, sp.sum(x) * 2.0, x > 0, sp.astype(x + y, "float32") * 2


@pytest.mark.parametrize("function", [chain, viewed, read_later, in_parts, alone])
@pytest.mark.parametrize("text", ["x, -", "-, -", "-, x"])
def test_results_and_arguments_stay(function: Any, text: str) -> None:
    x, y = array(0, text), array(1, text)
    before = [x.to_dense().copy(), y.to_dense().copy()]
    expected = [np.array(one.to_dense()) for one in listed(function(x, y))]
    program = sp.jit(function)
    kept = []
    for _ in range(3):
        found = listed(program(x, y))
        kept += [(one, right) for one, right in zip(found, expected, strict=True)]
        np.testing.assert_array_equal(x.to_dense(), before[0])
        np.testing.assert_array_equal(y.to_dense(), before[1])
    # What another run does is not seen in results of the runs before.
    for one, right in kept:
        np.testing.assert_array_equal(one.to_dense(), right)


def listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple) else [found]


def test_a_chain_needs_one_array() -> None:
    x, y = array(0), array(1)
    program = sp.jit(chain)
    program(x, y)
    tracemalloc.start()
    try:
        found = program(x, y)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.shape == (ROWS, WIDTH)
    # Of both shards; without it there are two at a time.
    assert most < 1.2 * 2 * SHARD_BYTES


def test_refusals_name_the_operator() -> None:
    def function(x: Any) -> Any:
        return sp.log(x * 2.0 + 1.0)

    program = sp.jit(function)
    x = array()
    program(x * x)
    with np.errstate(all="raise"), pytest.raises(UsageError, match="log"):
        program(-(x * x))
