"""Floats that NumPy alone lacks, on PyTorch's shards: made, read, cast, put together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import ArrayIndexError, MissingExtraError, SpecError, UsageError

MESH = DeviceMesh.of(x=2, y=3)
DATA = np.arange(35.0).reshape(7, 5)


@pytest.fixture(autouse=True)
def tensors() -> Iterator[None]:
    with sp.running(sp.in_process("torch")):
        yield


def brain() -> Any:
    return sp.array(torch.from_numpy(DATA).to(torch.bfloat16), spec(MESH, "x, y"))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (sp.tril, np.tril(DATA)),
        (lambda x: sp.triu(x, k=1), np.triu(DATA, 1)),
        (sp.zeros_like, 0 * DATA),
        (sp.ones_like, np.ones_like(DATA)),
        (lambda x: sp.full_like(x, 2.5), np.full_like(DATA, 2.5)),
        (lambda x: sp.concat([x, x], axis=1), np.concat([DATA, DATA], axis=1)),
        (lambda x: sp.stack([x, x]), np.stack([DATA, DATA])),
        (lambda x: sp.max(x, axis=0), DATA.max(0)),
        (lambda x: sp.max_pool(x, (2, 2), padding=1)[:1, :1], np.zeros((1, 1))),
        (lambda x: sp.where(x > 3, x, 0.0), np.where(DATA > 3, DATA, 0)),
        (lambda x: sp.clip(x, 1, 9), np.clip(DATA, 1, 9)),
        (lambda x: x[1:3, np.array([0, 2])], DATA[1:3, [0, 2]]),
        (lambda x: sp.sort(x, axis=1, descending=True), DATA[:, ::-1]),
    ],
)
def test_functions_keep_the_type(function: Callable[[Any], Any], expected: np.ndarray) -> None:
    found = function(brain())
    assert found.dtype.name == "bfloat16"
    np.testing.assert_array_equal(np.asarray(found).astype(float), expected)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_arrays_are_made_read_and_cast(name: str) -> None:
    kind = getattr(ml_dtypes, name)
    few = np.array([0.5, 1.0, -2.0], dtype=kind)
    x = sp.array(few, spec(MESH, "x"))
    assert x.dtype.name == name and x.shards[0].dtype is getattr(torch, name)
    assert np.asarray(x).dtype == kind
    np.testing.assert_array_equal(np.asarray(x).astype(float), few.astype(float))
    assert sp.astype(x, "float32").dtype is sp.float32
    for made in (
        sp.zeros(3, dtype=name),
        sp.full((2, 3), 1.5, dtype=name, spec=spec(MESH, "x, -")),
        sp.eye(2, dtype=name),
        sp.array([1.0, 2.0], dtype=name),
        sp.astype(sp.ones(3), name),
    ):
        assert made.dtype.name == name
    with sp.running(sp.in_process("numpy")):
        again = sp.array(torch.tensor([0.5, 1.0]).to(getattr(torch, name)))
    assert again.dtype.name == name and np.asarray(again).astype(float).tolist() == [0.5, 1.0]


def test_what_pytorch_can_needs_no_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = brain(), np.zeros(7, np.int64)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    for function in (
        *(sp.mean, sp.var, sp.std, sp.softmax, sp.layer_norm, sp.rms_norm, sp.gelu, sp.tril),
        *(sp.zeros_like, sp.max, sp.sum, sp.sort, sp.linalg.vector_norm),
        lambda x: sp.astype(sp.astype(x, "float32"), "bfloat16"),
        lambda x: sp.concat([x, x]),
        lambda x: sp.cross_entropy(x, labels),
        lambda x: sp.attention(x[None], x[None], x[None]),
        lambda x: (x @ x.T) * x[:, :1],
        lambda x: sp.cumulative_sum(x, axis=0),
        lambda x: sp.convolution(x[None, None], x[None, None, :2, :2]),
    ):
        assert function(x).dtype.name == "bfloat16"
    with pytest.raises(MissingExtraError, match="ml_dtypes"):
        np.asarray(x)


def test_sums_that_wait_stay_so_in_a_wider_type() -> None:
    pending = brain() @ torch.ones(5, 2, dtype=torch.bfloat16)
    assert str(pending.spec) == "x, - | sum(y)"
    assert str(sp.astype(pending, "float32").spec) == "x, - | sum(y)"


@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (lambda: sp.tril(sp.ones(3)), SpecError, r"triangle of shape \[3\]"),
        (lambda: sp.triu(sp.ones((3, 3)), k=0.5), UsageError, r"diagonal 0\.5"),
        (lambda: sp.full((2,), [1, 2]), UsageError, r"full of \[1, 2\].*one number"),
        (lambda: sp.expand_dims(sp.ones(3), 2), ArrayIndexError, "at 2; a place from -2 to 1"),
        (lambda: sp.expand_dims(sp.ones(3), -3), ArrayIndexError, "at -3; a place from -2 to 1"),
        (lambda: sp.expand_dims(sp.ones(3), axis=(0, 1)), SpecError, "dimensions"),
        (lambda: sp.expand_dims(sp.ones(3), axis=()), SpecError, "dimensions"),
        (lambda: sp.permute_dims(sp.ones(3), None), SpecError, "permutation None"),
    ],
)
def test_what_cannot_be_is_said(function: Callable[[], Any], kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        function()


def test_arrays_are_lists_of_their_rows_and_numbers_are_appended() -> None:
    x = sp.array(DATA, spec(MESH, "x, y"))
    np.testing.assert_array_equal(np.asarray(sp.concat(x)), DATA.reshape(-1))
    np.testing.assert_array_equal(np.asarray(sp.stack(x)), DATA)
    np.testing.assert_array_equal(np.asarray(sp.diff(x, append=3)), np.diff(DATA, append=3))
    assert sp.broadcast_to(sp.asarray(1.0), 3).shape == (3,)
