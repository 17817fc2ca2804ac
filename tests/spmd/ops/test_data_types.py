"""Narrow floats: what is made of many numbers accumulates in float32, and is rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn import functional

import reshard.spmd as sp
from reshard import DeviceMesh, spec

MESH = DeviceMesh.of(x=2)
X = np.random.default_rng(0).normal(size=(6, 8)) + 2


@pytest.fixture(autouse=True, params=["numpy", "torch"])
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    with sp.running(sp.in_process(request.param)):
        yield request.param


def numbers(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("cut", ["-, -", "x, -", "-, x", "-, - | sum(x)"])
def test_norms_of_large_halves_are_not_zero(cut: str) -> None:
    data = np.array([[300.0, -300.0], [250.0, 400.0]])
    x = sp.array(data, spec(MESH, cut), dtype="float16")
    for found, expected in (
        (sp.rms_norm(x), functional.rms_norm(torch.from_numpy(data), (2,))),
        (sp.layer_norm(x), functional.layer_norm(torch.from_numpy(data), (2,))),
        (sp.linalg.vector_norm(x, axis=1), np.linalg.vector_norm(data, axis=1)),
        (sp.linalg.vector_norm(x, axis=1, ord=3), np.linalg.vector_norm(data, axis=1, ord=3)),
        (sp.linalg.matrix_norm(x), np.linalg.matrix_norm(data)),
    ):
        assert found.dtype.name == "float16"
        np.testing.assert_allclose(numbers(found), expected, 1e-3)


@pytest.mark.parametrize("cut", ["-", "x"])
def test_a_softmax_of_many_zeros(cut: str) -> None:
    x = sp.zeros(70_000, dtype="float16").shard(spec(MESH, cut))
    np.testing.assert_allclose(numbers(sp.softmax(x)), 1 / 70_000, 1e-2)
    np.testing.assert_allclose(numbers(sp.log_softmax(x)), -np.log(70_000), 1e-3)
    assert float(sp.logsumexp(x)) == pytest.approx(np.log(70_000), 1e-3)


@pytest.mark.parametrize("cut", ["-", "x", "- | sum(x)"])
def test_a_sigmoid_of_what_is_small_is_small(cut: str) -> None:
    data = np.array([-20.0, -80.0, 0.0, 30.0])
    x = sp.array(data, spec(MESH, cut), dtype="float32")
    np.testing.assert_allclose(numbers(sp.sigmoid(x)), 1 / (1 + np.exp(-data)), 1e-6)
    np.testing.assert_allclose(numbers(sp.silu(x)), data / (1 + np.exp(-data)), 1e-6)
    huge = sp.array([1e4, -1e4, np.inf, -np.inf], dtype="float32")
    np.testing.assert_array_equal(numbers(sp.sigmoid(huge)), [1, 0, 1, 0])


@pytest.mark.parametrize("cut", ["-", "x"])
def test_logarithms_beside_large_numbers(cut: str) -> None:
    x = sp.array([1e6, 1e6], spec(MESH, cut), dtype="float32")
    np.testing.assert_allclose(numbers(sp.log_softmax(x)), -np.log(2), 1e-6)
    labels = np.array([0, 1])
    loss = sp.cross_entropy(sp.stack([x, x]), labels)
    np.testing.assert_allclose(numbers(loss), np.log(2), 1e-6)


CAUSAL = {"is_causal": True}
BRAIN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention": (
        lambda x: sp.attention(x, x, x, **CAUSAL),
        lambda x: functional.scaled_dot_product_attention(x, x, x, **CAUSAL),
    ),
    "rms_norm": (sp.rms_norm, lambda x: functional.rms_norm(x, x.shape[-1:], eps=1e-5)),
    "layer_norm": (sp.layer_norm, lambda x: functional.layer_norm(x, x.shape[-1:])),
    "softmax": (sp.softmax, lambda x: functional.softmax(x, -1)),
    "log_softmax": (sp.log_softmax, lambda x: functional.log_softmax(x, -1)),
    "gelu": (sp.gelu, lambda x: functional.gelu(x, approximate="tanh")),
    "silu": (sp.silu, functional.silu),
    "sigmoid": (sp.sigmoid, torch.sigmoid),
}


@pytest.mark.parametrize("name", BRAIN)
@pytest.mark.parametrize("cut", ["-, -, -", "x, -, -", "-, x, -", "-, -, x"])
def test_bfloat16_is_as_near_as_in_pytorch(name: str, cut: str) -> None:
    function, by_torch = BRAIN[name]
    narrow = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 16, 32))).bfloat16()
    exact = by_torch(narrow.double()).numpy()
    found = function(sp.array(narrow, spec(MESH, cut)))
    assert found.dtype.name == "bfloat16"
    # A result rounded once is off by half a unit in its last place.
    error = np.abs(numbers(found) - exact).max()
    theirs = np.abs(by_torch(narrow).double().numpy() - exact).max()
    assert error <= 1.05 * theirs + 1e-3 * 2**-8, (error, theirs)


@pytest.mark.parametrize("cut", ["-, -", "x, -", "-, x"])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_gradients_of_norms_of_large_halves(name: str, cut: str) -> None:
    data = np.random.default_rng(3).normal(size=(300, 16)) * 300
    norm = getattr(sp, name)

    def slopes(dtype: str) -> list[Any]:
        x = sp.array(data, spec(MESH, cut), dtype=dtype)
        weight = sp.ones(16, dtype=dtype)
        return list(sp.vjp(norm, x, weight)[1](sp.ones_like(x)))

    for found, exact in zip(slopes("float16"), slopes("float64"), strict=True):
        assert found.dtype.name == "float16"
        # The weight's is a sum of 300 numbers, each rounded to float16 once at most.
        np.testing.assert_allclose(numbers(found), numbers(exact), 2e-3, 2e-3 * 10)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "times": lambda x: x * 0.5,
    "plus": lambda x: 1 + x,
    "matmul": lambda x: x @ x.T,
    "einsum": lambda x: sp.einsum("ij,kj->ik", x, x),
    "vecdot": lambda x: sp.vecdot(x, x),
    "where": lambda x: sp.where(x > 1, x, 0.0),
    "clip": lambda x: sp.clip(x, 1, 2),
    "maximum": lambda x: sp.maximum(x, 2.0),
    "power": lambda x: x**2,
    "divide": lambda x: x / (x + 1),
    "sum": lambda x: sp.sum(x, axis=0),
    "mean": lambda x: sp.mean(x, axis=0),
    "var": sp.var,
    "sqrt": lambda x: sp.sqrt(sp.abs(x)),
    "convolution": lambda x: sp.convolution(x[None, None], x[None, None, :2, :2]),
    "avg_pool": lambda x: sp.avg_pool(x, (2, 2)),
    "cumulative_sum": lambda x: sp.cumulative_sum(x, axis=0),
    "cross_entropy": lambda x: sp.cross_entropy(x, sp.array(np.zeros(6, int))),
    **{name: function for name, (function, _) in BRAIN.items() if name != "attention"},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bfloat16_stays_as_the_trace_says(name: str) -> None:
    data = X.astype(ml_dtypes.bfloat16)
    exact = sp.array(data.astype(np.float64))
    for cut in ("-, -", "x, -", "-, x"):
        x = sp.array(data, spec(MESH, cut))
        found = FUNCTIONS[name](x)
        (traced,) = sp.trace(FUNCTIONS[name], x).outputs
        assert found.dtype.name == traced.dtype.name == "bfloat16"
        expected = numbers(FUNCTIONS[name](exact))
        np.testing.assert_allclose(numbers(found), expected, 2e-2, 2e-2)
