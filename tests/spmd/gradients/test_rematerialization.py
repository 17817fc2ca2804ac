"""What is computed again has the same gradients, and is not kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import UsageError

MESH = DeviceMesh.of(dp=2, tp=2)
X = np.random.default_rng(0).normal(size=(8, 4))
W = np.random.default_rng(1).normal(size=(4, 4))


def layer(p: dict[str, Any], x: Any, *, scale: Any = 1.0) -> Any:
    return {"x": sp.tanh(x @ p["w"]) * scale + x, "n": sp.argmax(x)}


def loss(function: Any, w: Any, x: Any) -> Any:
    for _ in range(3):
        x = function({"w": w}, x, scale=sp.sum(w))["x"]
    return sp.sum(x**2)


def test_the_same_gradients() -> None:
    w, x = sp.array(W, spec(MESH, "-, tp")), sp.array(X, spec(MESH, "dp, -"))
    expected = sp.grad(lambda w, x: loss(layer, w, x), (0, 1))(w, x)
    found = sp.grad(lambda w, x: loss(sp.rematerialized(layer), w, x), (0, 1))(w, x)
    nested = sp.rematerialized(lambda *a, **b: sp.rematerialized(layer)(*a, **b))
    again = sp.grad(lambda w, x: loss(nested, w, x), (0, 1))(w, x)
    for right, one, other in zip(expected, found, again, strict=True):
        assert one.spec is right.spec
        np.testing.assert_allclose(one.to_dense(), right.to_dense(), rtol=1e-12)
        np.testing.assert_allclose(other.to_dense(), right.to_dense(), rtol=1e-12)


def test_arrays_from_elsewhere_have_gradients_too() -> None:
    w, x = sp.array(W), sp.array(X)

    def value(w: Any, x: Any) -> Any:
        twice = w * 2.0

        @sp.rematerialized
        def inner(x: Any) -> tuple[Any, Any]:
            return sp.sin(x @ twice) * sp.sum(w), w

        found, same = inner(x)
        return sp.sum(found) + sp.sum(same**2)

    def plain(w: Any, x: Any) -> Any:
        return sp.sum(sp.sin(x @ (w * 2.0)) * sp.sum(w)) + sp.sum(w**2)

    for right, one in zip(sp.grad(plain, (0, 1))(w, x), sp.grad(value, (0, 1))(w, x), strict=True):
        np.testing.assert_allclose(one.to_dense(), right.to_dense(), rtol=1e-12)


def _in_loop(x: Any, w: Any) -> Any:
    return sp.scan(lambda c, _: (sp.sin(c @ w), None), x, length=2)[0]


def _in_branch(x: Any, w: Any) -> Any:
    return sp.cond(sp.sum(x) > -99, lambda x: sp.sin(x @ w), lambda x: x, x)


def _eagerly(x: Any, w: Any) -> Any:
    return sp.eagerly(lambda x, w: sp.sin(x @ w))(x, w)


def _in_ring(x: Any, w: Any) -> Any:
    return sp.attention(sp.reshape(x, (1, 8, 4)), w, w)


def _by_experts(x: Any, w: Any) -> Any:
    routing = sp.expert_routing(sp.zeros(8, dtype="int64", spec=spec(MESH, "dp")), 1, axes="tp")
    return routing.back(routing.multiply(routing.send(x), w))


def _as_it_is(x: Any, w: Any) -> Any:
    return w


READERS = {
    _as_it_is: "",
    _in_loop: "",
    _in_branch: "",
    _eagerly: "",
    _in_ring: "-, dp, -",
    _by_experts: "tp, -, -",
}


@pytest.mark.parametrize(("function", "text"), READERS.items())
def test_arrays_from_elsewhere_that_no_operator_reads(function: Any, text: str) -> None:
    """Loops, branches and what goes from rank to rank read arrays otherwise than operators do."""
    w, x = sp.array(W), sp.array(X, spec(MESH, "dp, -"))

    def value(w: Any, x: Any, is_again: bool) -> Any:
        if text:
            # Read as they lie, so that no movement tells of them.
            w = sp.sin(sp.reshape(w, (1, 4, 4))).shard(spec(MESH, text))
        inner = lambda x: function(x, w)  # noqa: E731
        return sp.sum(sp.cos((sp.rematerialized(inner) if is_again else inner)(x)))

    slopes = [sp.grad(lambda w, x, n=n: value(w, x, n), (0, 1)) for n in (False, True)]
    ways = [slopes[1]] if function is _by_experts else [slopes[1], sp.jit(slopes[1])]
    for way in ways:
        for one, other in zip(way(w, x), slopes[0](w, x), strict=True):
            np.testing.assert_allclose(one.to_dense(), other.to_dense(), 1e-11, 1e-13)


@pytest.mark.parametrize(("function", "text"), READERS.items())
def test_steps_of_a_program_on_arrays_from_elsewhere_alone(function: Any, text: str) -> None:
    """They are computed where the program is traced, and have their gradients there."""
    w, x = sp.array(W), sp.array(X, spec(MESH, "dp, -"))

    def value(w: Any, x: Any, is_program: bool) -> Any:
        if text:
            w = sp.sin(sp.reshape(w, (1, 4, 4))).shard(spec(MESH, text))
        again = lambda y: sp.sum(sp.cos(function(x, w))) * y  # noqa: E731
        return (sp.jit(again) if is_program else again)(sp.array(2.0))

    expected = sp.grad(lambda w, x: value(w, x, False), (0, 1))(w, x)
    found = sp.grad(lambda w, x: value(w, x, True), (0, 1))(w, x)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.to_dense(), other.to_dense(), 1e-11, 1e-13)


def test_gradients_of_gradients_and_traces() -> None:
    w, x = sp.array(W, spec(MESH, "-, tp")), sp.array(X, spec(MESH, "dp, -"))

    def curvature(function: Any) -> Any:
        return sp.grad(lambda w: sp.sum(sp.grad(lambda w: loss(function, w, x))(w) ** 2))(w)

    again = sp.rematerialized(layer)
    np.testing.assert_allclose(curvature(again).to_dense(), curvature(layer).to_dense(), rtol=1e-9)
    traced = sp.trace(sp.grad(lambda w, x: loss(again, w, x)), w, x)
    plain = sp.trace(sp.grad(lambda w, x: loss(layer, w, x)), w, x)
    tanhs = [
        sum(one.operation.operator == "tanh" for one in made.operations) for made in (plain, traced)
    ]
    assert tanhs == [3, 6]
    np.testing.assert_allclose(traced.run(w, x).to_dense(), plain.run(w, x).to_dense(), rtol=1e-12)


def test_inner_values_are_freed() -> None:
    kept: list[weakref.ref[Any]] = []

    @sp.rematerialized
    def inner(x: Any) -> Any:
        middle = sp.exp(x)
        kept.append(weakref.ref(middle._shards[0]))
        return sp.sum(middle * middle)

    value, pullback = sp.vjp(inner, sp.array(X))
    gc.collect()
    assert [one() for one in kept] == [None]
    (found,) = pullback(sp.ones_like(value))
    np.testing.assert_allclose(found.to_dense(), 2 * np.exp(2 * X))
    assert len(kept) == 2


def test_elements_are_refused_within_too() -> None:
    inner = sp.rematerialized(lambda x: x * float(sp.sum(x)))
    with pytest.raises(UsageError, match="were asked for within a function"):
        sp.grad(lambda x: sp.sum(inner(x)))(sp.array(X))
    assert inner(sp.ones((2,))).to_dense().tolist() == [2.0, 2.0]


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(UsageError, match=r"sp.rematerialized of 3, a int"):
        sp.rematerialized(3)
