"""Sums that wait: against every choice of the values that do, and against the dense results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import SpecError
from reshard.spmd.propagation.partial_sums import keep_partial, largest_closure
from reshard.spmd.propagation.reshards import explicit_reshards

MESH = DeviceMesh.of(k=2)
STRATEGIES = ("basic", "aggressive", "widest")
# Name, operands, whether it works on contributions to all operands together.
Step = tuple[str, tuple[int, ...], bool]
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "product": lambda x, u: x @ u,
    "add": lambda a, b: a + b,
    "negative": lambda a: -a,
    "scale": lambda a: a * 3.0,
    "total": lambda a: sp.sum(a, axis=1, keepdims=True),
    "spread": lambda a: sp.broadcast_to(a, (6, 6)),
    "turn": lambda a: sp.permute_dims(a, (1, 0)),
    "exp": lambda a: sp.exp(a * 0.01),
}
SHAPES: dict[str, Callable[..., tuple[int, ...]]] = {
    "product": lambda x, u: (6, 6),
    "add": lambda a, b: np.broadcast_shapes(a, b),
    "total": lambda a: (a[0], 1),
    "spread": lambda a: (6, 6),
    "turn": lambda a: a[::-1],
}


def random_steps(random: Random) -> tuple[list[Step], list[tuple[int, ...]]]:
    """Steps on values of which 0 and 1 are the factors, and the shapes of all values."""
    steps: list[Step] = [("product", (0, 1), False)]
    shapes: list[tuple[int, ...]] = [(6, 4), (4, 6), (6, 6)]
    for _ in range(random.randint(1, 7)):
        name = random.choice(list(FUNCTIONS))
        if name == "product":
            operands: tuple[int, ...] = (0, 1)
        elif name == "add":
            operands = (random.randrange(2, len(shapes)), random.randrange(2, len(shapes)))
        else:
            operands = (random.randrange(2, len(shapes)),)
        given = [shapes[one] for one in operands]
        # A column is turned into a row once: rows and columns would broadcast.
        if name == "turn" and 1 in given[0]:
            continue
        steps.append((name, operands, name not in ("product", "exp")))
        shapes.append(SHAPES.get(name, lambda a: a)(*given))
    return steps, shapes


def outputs_of(steps: list[Step], count: int) -> set[int]:
    read = {operand for _, operands, _ in steps for operand in operands}
    return set(range(2, count)) - read


def program(steps: list[Step]) -> Callable[..., list[Any]]:
    def run(x: Any, u: Any) -> list[Any]:
        values = [x, u]
        for name, operands, _ in steps:
            values.append(FUNCTIONS[name](*(values[one] for one in operands)))
        return [values[one] for one in sorted(outputs_of(steps, len(values)))]

    return run


def least_bytes(steps: list[Step], shapes: list[tuple[int, ...]]) -> int:
    """What crosses between two devices at least, every value waiting or not."""
    count, outputs = len(shapes), outputs_of(steps, len(shapes))
    least = None
    for choice in itertools.product([False, True], repeat=len(steps)):
        waits = [False, False, *choice]
        if any(waits[one] for one in outputs):
            continue
        made = [False, False]
        for name, operands, is_linear in steps:
            kinds = {waits[one] for one in operands}
            if (kinds == {True} and not is_linear) or len(kinds) > 1:
                break
            made.append(name == "product" or kinds == {True})
        if len(made) < count or any(w and not m for w, m in zip(waits, made, strict=True)):
            continue
        crossed = sum(
            2 * 8 * math.prod(shape)
            for shape, m, w in zip(shapes, made, waits, strict=True)
            if m and not w
        )
        least = crossed if least is None else min(least, crossed)
    assert least is not None
    return least


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_of_values_that_wait_moves_less(seed: int) -> None:
    steps, shapes = random_steps(Random(seed))
    random = np.random.default_rng(seed)
    dense = [random.normal(size=shape) for shape in shapes[:2]]
    arrays = [
        sp.array(one, spec(MESH, text)) for one, text in zip(dense, ("-, k", "k, -"), strict=True)
    ]
    expected = program(steps)(*(sp.array(one, spec(MESH, "-, -")) for one in dense))
    for strategy in STRATEGIES:
        # Scalars are numbers of the trace, which two equal products are not.
        traced = sp.trace(program(steps), *arrays, strategy=strategy)
        assert traced.moved_bytes == least_bytes(steps, shapes)
        for found, right in zip(traced.run(*arrays), expected, strict=True):
            np.testing.assert_allclose(found.to_dense(), right.to_dense(), rtol=1e-12)


def cut(shape: tuple[int, ...], text: str, dtype: str = "float32") -> Any:
    return sp.abstract(shape, dtype, spec(MESH, text))


PAIR = [cut((8, 8), text) for text in ("-, k", "k, -", "-, k", "k, -")]
ONCE = 2 * 8 * 8 * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("function", "all_reduces"),
    [
        (lambda x, u, y, v: x @ u + y @ v, 1),
        (lambda x, u, y, v: x @ u - 2 * (y @ v).T, 1),
        (lambda x, u, y, v: sp.reshape(x @ u + y @ v, (4, 16)), 1),
        # A reader that needs the sum stops it for the others too.
        (lambda x, u, y, v: (x @ u + y @ v, sp.exp(x @ u)), 2),
        (lambda x, u, y, v: (x @ u) * (y @ v), 2),
        # Two halves are as much as the whole, and a part less.
        (lambda x, u, y, v: (x @ u)[:4] + (y @ v)[:4], 0.5),
        (lambda x, u, y, v: sp.sum(x @ u, axis=0), 1 / 8),
        (lambda x, u, y, v: sp.astype(x @ u + y @ v, "float64"), 1),
        (lambda x, u, y, v: sp.concat([x @ u, x @ u, x @ u]), 1),
        (lambda x, u, y, v: sp.maximum(x @ u, y @ v), 2),
        (lambda x, u, y, v: x @ u + sp.sum(y @ v, axis=0), 1),
    ],
)
def test_how_much_crosses(function: Callable[..., Any], all_reduces: float, strategy: str) -> None:
    def run(*arrays: Any) -> Any:
        # Equal products are one in a program alone.
        return sp.jit(function, strategy=strategy).trace(*arrays)

    assert run(*PAIR).moved_bytes == all_reduces * ONCE


def test_a_narrower_type_combines_first() -> None:
    traced = sp.trace(
        lambda x, u, y, v: sp.astype(x @ u, "float16") + sp.astype(y @ v, "float16"),
        *PAIR,
        strategy="basic",
    )
    assert traced.moved_bytes == 2 * ONCE


def test_what_is_given_a_sharding_does_not_wait() -> None:
    whole = spec(MESH, "-, -")
    traced = sp.trace(lambda x, u, y, v: (x @ u).shard(whole) + y @ v, *PAIR, strategy="basic")
    assert traced.moved_bytes == 2 * ONCE
    rule = "([i, k], [k, j]) -> ([i, j]) {i=8, j=8, k=8} reduction={k}"
    graph = sp.Graph.of(
        [(8, 8)] * 2,
        [("matmul", [0, 1], rule), ("negative", [2], "([i, j]) -> ([i, j]) {i=8, j=8}")] * 1
        + [("add", [2, 3], "([i, j], [i, j]) -> ([i, j]) {i=8, j=8}")],
        [4],
    )
    cuts = {0: spec(MESH, "-, k"), 1: spec(MESH, "k, -")}
    for given in (cuts, {**cuts, 2: whole}):
        placed = explicit_reshards(keep_partial(sp.propagate_graph(graph, given)))
        assert [move.value for move in placed.moved] == [2]


def test_factors_that_are_not_finite_are_multiplied_by_sums() -> None:
    """`3 inf - 1 inf` is no number, `2 inf` is infinite."""
    x, u = np.array([[3.0, -1.0]]), np.array([[1.0], [1.0]])
    factor = np.array([[np.inf, 2.0]])
    arrays = [
        sp.array(one, spec(MESH, text))
        for one, text in ((x, "-, k"), (u, "k, -"), (factor, "-, -"))
    ]

    def run(x: Any, u: Any, factor: Any) -> Any:
        one = sp.broadcast_to(x @ u, (1, 2)) * factor
        return sp.sum(one, axis=0) + sp.sum(one, axis=0)

    for strategy in STRATEGIES:
        found = sp.jit(run, strategy=strategy)(*arrays)
        np.testing.assert_array_equal(found.to_dense(), [np.inf, 8.0])


def test_what_is_not_propagated_is_refused() -> None:
    with pytest.raises(SpecError, match="is not propagated"):
        keep_partial("x")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(200))
def test_no_closed_set_has_more_and_of_equals_none_is_smaller(seed: int) -> None:
    random = Random(seed)
    count = random.randint(0, 7)
    gains = [random.randint(-5, 6) for _ in range(count)]
    needs = [[other for other in range(count) if random.random() < 0.25] for _ in range(count)]
    every = [
        set(some)
        for size in range(count + 1)
        for some in itertools.combinations(range(count), size)
        if all(other in some for one in some for other in needs[one])
    ]
    most = max(sum(gains[one] for one in some) for some in every)
    # The smallest first.
    best = next(some for some in every if sum(gains[one] for one in some) == most)
    assert largest_closure(gains, needs) == best


def test_a_long_chain() -> None:
    count = 300
    gains = [-1] * (count - 1) + [count]
    needs = [[number - 1] if number else [] for number in range(count)]
    assert largest_closure(gains, needs) == set(range(count))
    gains[-1] = count - 1
    assert largest_closure(gains, needs) == set()
