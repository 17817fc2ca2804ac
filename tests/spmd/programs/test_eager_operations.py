"""Functions that need elements within traced functions: what they give, move and refuse."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import ArrayIndexError, UsageError
from selection import keep_covering

MESH = DeviceMesh.of(x=2, y=3)
TOKENS, WIDTH, INNER, COUNT = 12, 4, 8, 6
DRAW = np.random.default_rng(0)
UP, DOWN = DRAW.normal(size=(COUNT, WIDTH, INNER)), DRAW.normal(size=(COUNT, INNER, WIDTH))
ROUTER = DRAW.normal(size=(WIDTH, COUNT))


@sp.eagerly
def experts(x: Any, which: Any, weights: Any, matrices: dict[str, Any], capacity: Any) -> Any:
    routing = sp.expert_routing(which, COUNT, axes="y", capacity=capacity)
    inner = sp.silu(routing.multiply(routing.send(x), matrices["up"]))
    return routing.back(routing.multiply(inner, matrices["down"]), weights)


def layer(x: Any, router: Any, matrices: dict[str, Any], capacity: int | None = None) -> Any:
    """The experts between operations of other kinds."""
    weights, which = sp.top_k(sp.softmax(x @ router), 2)
    return sp.rms_norm(x + experts(x, which, weights, matrices, capacity))


def given(seed: int, cut: str = "x, -") -> tuple[Any, ...]:
    x = np.random.default_rng(seed).normal(size=(TOKENS, WIDTH))
    matrices = {
        name: sp.array(one, spec(MESH, "y, -, -")) for name, one in (("up", UP), ("down", DOWN))
    }
    return sp.array(x, spec(MESH, cut)), sp.array(ROUTER), matrices


@pytest.mark.parametrize(
    ("strategy", "cut", "library"),
    keep_covering(
        1,
        itertools.product(
            ["eager", "basic", "aggressive", "widest", "cost"],
            ["x, -", "x y, -", "-, -"],
            ["numpy", "torch"],
        ),
        "every combination; each strategy, cut and library is in a default case",
    ),
)
def test_programs_with_experts(strategy: str, cut: str, library: str) -> None:
    def loss(x: Any, router: Any, matrices: Any) -> Any:
        return sp.sum(sp.sin(layer(x, router, matrices)))

    with sp.running(sp.in_process(library)):
        forward = sp.jit(layer, strategy=strategy)
        both = sp.jit(sp.value_and_grad(loss, (0, 1, 2)), strategy=strategy)
        for seed in range(3):
            arguments = given(seed, cut)
            for capacity in (None, 2):
                found, expected = forward(*arguments, capacity), layer(*arguments, capacity)
                np.testing.assert_allclose(found.to_dense(), expected.to_dense(), 1e-11, 1e-12)
            value, slopes = both(*arguments)
            right, own = sp.value_and_grad(loss, (0, 1, 2))(*arguments)
            np.testing.assert_allclose(value.to_dense(), right.to_dense(), 1e-11)
            pairs = [(slopes[0], own[0]), (slopes[1], own[1])]
            pairs += [(slopes[2][name], own[2][name]) for name in ("up", "down")]
            for one, other in pairs:
                np.testing.assert_allclose(one.to_dense(), other.to_dense(), 1e-10, 1e-11)
        assert forward.traced_count == 2 and both.traced_count == 1


def test_second_derivatives_and_gradients_of_programs() -> None:
    x, router, matrices = given(0)

    def steep(x: Any) -> Any:
        inner = sp.grad(lambda x: sp.sum(sp.sin(layer(x, router, matrices))))
        return sp.sum(sp.square(inner(x)))

    expected = sp.grad(steep)(x).to_dense()
    for program in (sp.jit(sp.grad(steep)), sp.grad(sp.jit(steep)), sp.jit(sp.grad(sp.jit(steep)))):
        for _ in range(2):
            np.testing.assert_allclose(program(x).to_dense(), expected, 1e-9, 1e-11)


def test_within_loops_and_by_name() -> None:
    x, router, _ = given(0)

    @sp.eagerly
    def send_back(x: Any, *, which: Any, count: int = COUNT) -> Any:
        routing = sp.expert_routing(which, count, axes="y")
        return {"back": routing.back(routing.send(x)) * 0.5, "same": [x]}

    def turn(x: Any) -> Any:
        found = send_back(x, which=sp.argmax(x @ router, axis=-1))
        return found["back"] + found["same"][0]

    def turns(x: Any) -> Any:
        return sp.scan(lambda x, _: (turn(x), None), x, length=3)[0]

    program = sp.jit(turns)
    remade = sp.jit(sp.grad(lambda x: sp.sum(sp.rematerialized(turns)(x))))
    for _ in range(2):
        np.testing.assert_allclose(program(x).to_dense(), x.to_dense() * 1.5**3, 1e-12)
        np.testing.assert_allclose(remade(x).to_dense(), np.full(x.shape, 1.5**3), 1e-12)


def test_pytorchs_own_gradients_go_through() -> None:
    leaf = torch.tensor(np.random.default_rng(0).normal(size=(TOKENS, WIDTH)), requires_grad=True)
    program = sp.jit(lambda *arguments: sp.sum(sp.sin(layer(*arguments))))
    with sp.running(sp.in_process("torch")):
        x, router, matrices = given(0)
        expected = sp.grad(lambda x: sp.sum(sp.sin(layer(x, router, matrices))))(x)
        for _ in range(2):
            leaf.grad = None
            program(sp.array(leaf, spec(MESH, "x, -")), router, matrices).to_dense().backward()
            np.testing.assert_allclose(leaf.grad, expected.to_dense(), 1e-10, 1e-12)


def test_a_trace_says_what_even_experts_move() -> None:
    # Each expert is chosen twice by the tokens of each part.
    tokens, width, parts = 36, 16, 3
    which = np.arange(tokens) % COUNT
    mesh = DeviceMesh.of(y=parts)
    x = sp.array(np.ones((tokens, width)), spec(mesh, "y, -"))
    chosen = sp.array(which, spec(mesh, "y"))

    @sp.eagerly
    def there_and_back(x: Any, which: Any) -> Any:
        routing = sp.expert_routing(which, COUNT, axes="y")
        return routing.back(routing.send(x))

    moved_rows = sp.expert_routing(chosen, COUNT, axes="y").moved_rows
    counts_bytes = parts * (parts - 1) * (COUNT + 2) * 8
    traced = sp.trace(there_and_back, x, chosen)
    assert traced.moved_bytes == counts_bytes + 2 * moved_rows * width * 8
    assert [one.operation.operator for one in traced.operations] == ["eagerly"]
    assert "function=there_and_back" in str(traced)


def test_what_moves_in_loops_and_branches_is_counted() -> None:
    mesh = DeviceMesh.of(x=2)
    w, x = sp.ones((4, 4), spec=spec(mesh, "x, -")), sp.ones((4, 4), spec=spec(mesh, "-, -"))

    def step(x: Any) -> Any:
        return sp.tanh(x @ w)

    once = sp.trace(step, x).moved_bytes
    assert once > 0
    turns = sp.trace(lambda x: sp.scan(lambda c, _: (step(c), None), x, length=5)[0], x)
    assert turns.moved_bytes == 5 * once
    branch = sp.trace(lambda x: sp.cond(sp.sum(x) > 0, step, lambda x: x, x), x)
    assert branch.moved_bytes == once
    loop = sp.trace(lambda x: sp.while_loop(lambda x: sp.sum(x) > 9, step, x), x)
    assert loop.moved_bytes == once


def test_what_cannot_be_traced_is_refused() -> None:
    x, router, matrices = given(0)
    weights, which = sp.top_k(x @ router, 2)

    def reads_more(x: Any, which: Any) -> Any:
        y = x * 2.0
        return sp.eagerly(lambda x: sp.expert_routing(which, COUNT).send(x) * sp.sum(y))(x)

    with pytest.raises(UsageError, match="beside its arguments; give it as an argument"):
        sp.trace(reads_more, x, which)
    with pytest.raises(UsageError, match=r"under @sp\.eagerly"):
        sp.jit(lambda x, which: sp.expert_routing(which, COUNT).send(x))(x, which)
    with pytest.raises(UsageError, match="were asked for"):
        sp.jit(sp.eagerly(lambda x: x * float(sp.sum(x))))(x)
    with pytest.raises(UsageError, match="a function of arrays in shards"):
        sp.eagerly(3)  # type: ignore[arg-type]

    @sp.eagerly
    def as_many_as_there_are(x: Any, which: Any) -> Any:
        routing = sp.expert_routing(which, COUNT, capacity=1)
        return routing.send(x)

    with pytest.raises(UsageError, match="must not depend on elements"):
        sp.jit(as_many_as_there_are)(x, which * 0)
    bad = sp.jit(lambda x, which: experts(x, which, weights, matrices, None))
    with pytest.raises(ArrayIndexError, match="expert 99 of 6"):
        bad(x, which + 99)


def test_functions_make_arrays_of_their_own() -> None:
    x, other = sp.array(ROUTER), sp.array(np.ones((2,)))

    @sp.eagerly
    def masked(x: Any, other: Any) -> Any:
        return sp.tril(x) * np.ones((1, COUNT)) + sp.ones_like(x), sp.one_hot(sp.argmax(x), 3)

    def value(x: Any, other: Any) -> Any:
        return sp.sum(sp.sin(masked(x, other)[0]))

    for found, expected in zip(sp.jit(masked)(x, other), masked(x, other), strict=True):
        np.testing.assert_allclose(found.to_dense(), expected.to_dense())
    # What the function does not read has a gradient of zeros.
    slopes = sp.jit(sp.grad(value, (0, 1)))(x, other)
    for one, two in zip(slopes, sp.grad(value, (0, 1))(x, other), strict=True):
        np.testing.assert_allclose(one.to_dense(), two.to_dense())
    assert not slopes[1].to_dense().any()
