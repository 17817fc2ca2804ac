"""Contributions of every reduction and type, in operations that may and may not leave them waiting.

Against NumPy on what they are together: negative factors of a maximum, products of contributions,
whole numbers that wrap around, casts that narrow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import ReshardError, ShardError

MESH = DeviceMesh.of(x=2, y=3)
PARTS = (np.array([3, -1, 0, 7]), np.array([-2, 5, 0, 100]))
TOGETHER: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "mean": lambda a, b: (a + b) / 2,
    "product": np.multiply,
}
CHOICE = np.array([True, False, True, False])
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "negative": lambda xp, p: -p,
    "times -2": lambda xp, p: p * -2,
    "-2 times": lambda xp, p: -2 * p,
    "times 0": lambda xp, p: p * 0,
    "times numbers": lambda xp, p: p * np.array([1, -1, 0, 2], np.int8),
    "twice": lambda xp, p: p + p,
    "less itself": lambda xp, p: p - p,
    "plus numbers": lambda xp, p: p + np.array([1, 2, 3, 4], np.int8),
    "abs": lambda xp, p: abs(p),
    "square": lambda xp, p: p * p,
    "power": lambda xp, p: p**2,
    "half": lambda xp, p: p / 2,
    "floor half": lambda xp, p: p // 2,
    "over it": lambda xp, p: 1 / (p + 1.5),
    "sum": lambda xp, p: xp.sum(p),
    "prod": lambda xp, p: xp.prod(p),
    "mean": lambda xp, p: xp.mean(p),
    "max": lambda xp, p: xp.max(p),
    "argmax": lambda xp, p: xp.argmax(p),
    "any": lambda xp, p: xp.any(p),
    "running": lambda xp, p: xp.cumulative_sum(p),
    "sort": lambda xp, p: xp.sort(p),
    "float32": lambda xp, p: xp.astype(p, "float32"),
    "int8": lambda xp, p: xp.astype(p, "int8"),
    "int64": lambda xp, p: xp.astype(p, "int64"),
    "sign": lambda xp, p: xp.sign(p),
    "floor": lambda xp, p: xp.floor(p),
    "where it is positive": lambda xp, p: xp.where(p > 0, p, -p),
    "where": lambda xp, p: xp.where(CHOICE, p, p * 2),
    "clip": lambda xp, p: xp.clip(p, -1, 3),
    "maximum of its own": lambda xp, p: xp.maximum(p, p * -1),
    "minimum of 1": lambda xp, p: xp.minimum(p, 1),
    "at least 1": lambda xp, p: p >= 1,
    "roll": lambda xp, p: xp.roll(p, 1),
    "flip": lambda xp, p: xp.flip(p),
    "slice": lambda xp, p: p[1:3],
    "concat": lambda xp, p: xp.concat([p, p * -1]),
    "differences": lambda xp, p: xp.diff(p),
    "tile": lambda xp, p: xp.tile(p, (2,)),
    "product with a vector": lambda xp, p: p @ np.array([1, -1, 2, 3], np.int8),
}


def pending(reduction: str, dtype: str, library: str) -> Any:
    parts = [np.abs(one) if dtype == "uint8" else one for one in PARTS]
    shards = {rank: parts[n // 3].astype(dtype) for n, rank in enumerate(MESH.devices)}
    with sp.running(sp.in_process(library)):
        return sp.from_shards(shards, (4,), spec(MESH, f"- | {reduction}(x)"))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8", "float32", "float64"])
@pytest.mark.parametrize("reduction", TOGETHER)
def test_contributions_of_every_kind(reduction: str, dtype: str, library: str) -> None:
    x = pending(reduction, dtype, library)
    if reduction == "mean" and "int" in dtype:
        with pytest.raises(ShardError, match="not exact"):
            x.to_dense()
        return
    parts = [np.abs(one) if dtype == "uint8" else one for one in PARTS]
    with np.errstate(all="ignore"):
        dense = TOGETHER[reduction](*(one.astype(dtype) for one in parts)).astype(dtype)
        np.testing.assert_allclose(np.asarray(x), dense)
        done = 0
        for name, operation in OPERATIONS.items():
            try:
                expected = operation(np, dense)
            except OverflowError:
                continue  # -2 is no uint8
            try:
                found = np.asarray(operation(sp, x))
            except ReshardError:
                assert library == "torch", name  # PyTorch lacks some operations of narrow types.
                continue
            done += 1
            np.testing.assert_allclose(
                found.astype(float), np.asarray(expected).astype(float), 1e-5, err_msg=name
            )
    assert done > 30


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
@pytest.mark.parametrize("reduction", ["sum", "max", "min", "product"])
def test_contributions_of_types_that_torch_cannot_add(reduction: str, dtype: str) -> None:
    pytest.importorskip("torch")
    most = np.iinfo(dtype).max
    parts = [np.array(part, dtype=dtype) for part in ([1, 2, most, most - 1], [5, 2, 3, most])]
    runner = sp.in_process("torch")
    shards = {
        rank: runner.library.array(parts[place // 3]) for place, rank in enumerate(MESH.devices)
    }
    waiting = sp.from_shards(shards, (4,), spec(MESH, f"- | {reduction}(x)"), runner=runner)
    expected = TOGETHER[reduction](*parts)
    for found in (waiting, waiting.reduced(), waiting.shard(spec(MESH, "y"))):
        assert np.array_equal(runner.library.numpy(found.to_dense()), expected)
