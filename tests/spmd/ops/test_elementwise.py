"""Operands of two libraries in one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, spec

MESH = DeviceMesh.of(x=2)
DATA = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("cut", [None, "x, -", "-, x", "-, - | sum(x)"])
@pytest.mark.parametrize(
    "function",
    [
        lambda xp, a, b: a + b,
        lambda xp, a, b: b @ a.T,
        lambda xp, a, b: xp.where(b > 3, a, b),
        lambda xp, a, b: xp.concat([b, a]),
        lambda xp, a, b: xp.einsum("ij,kj->ik", a, b),
    ],
)
def test_arrays_of_numpy_s_shards_beside_tensors(
    function: Callable[..., Any], cut: str | None
) -> None:
    tensors = sp.array(torch.from_numpy(DATA), spec(MESH, "x, -"))
    arrays = sp.array(DATA, None if cut is None else spec(MESH, cut))
    found = function(sp, tensors, arrays)
    assert found.runner is sp.in_process("torch")
    np.testing.assert_array_equal(np.asarray(found), function(np, DATA, DATA))
