"""Cuts that are bound to the length of their dimension, and axes that two operands cut by."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard.spmd as sp
from reshard import DeviceMesh, ShardingSpec, spec
from selection import keep_covering

MESH = DeviceMesh.of(x=2, y=2)
DATA = np.arange(48.0).reshape(8, 6)
CUTS = (
    *("x@sizes[5,3], -", "x@blocks[2,6], -", "x@whole[4,4], -", "x@windows[0:5,3:8], -"),
    *("x@sizes[5,3], y", "-, y@sizes[1,5]"),
)
KERNEL = np.ones((1, 1, 3, 3))


def images(x: Any) -> Any:
    return x[None, None]


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "concat": lambda xp, x: xp.concat([x, x]),
    "concat 1": lambda xp, x: xp.concat([x, x], axis=1),
    "hstack": lambda xp, x: np.hstack([x, x]),
    "append": lambda xp, x: xp.diff(x, axis=0, append=x[:1]),
    "prepend": lambda xp, x: xp.diff(x, axis=1, prepend=x[:, :2]),
}
WINDOWS: dict[str, Callable[[Any], Any]] = {
    "padded convolution": lambda x: sp.convolution(images(x), KERNEL, padding=1),
    "strided convolution": lambda x: sp.convolution(images(x), KERNEL, strides=2),
    "padded pooling": lambda x: sp.max_pool(images(x), (2, 2), padding=1),
    "strided pooling": lambda x: sp.avg_pool(images(x), (2, 2), strides=3),
    "pad": lambda x: sp.pad(x, 1),
    "repeat": lambda x: sp.repeat(x, 2, axis=0),
    "with initial": lambda x: sp.cumulative_sum(x, axis=0, include_initial=True),
}


@pytest.mark.parametrize(
    ("cut", "name"),
    keep_covering(
        1,
        itertools.product(CUTS, [*FUNCTIONS, *WINDOWS]),
        "another cut of a function that another case has",
    ),
)
def test_a_cut_that_is_bound_to_a_length_meets_another(cut: str, name: str) -> None:
    x = sp.array(DATA, spec(MESH, cut))
    if name in FUNCTIONS:
        function: Callable[[Any], Any] = lambda a: FUNCTIONS[name](sp, a)  # noqa: E731
        expected = FUNCTIONS[name](np, DATA)
    else:
        function = WINDOWS[name]
        expected = np.asarray(function(sp.array(DATA)))
    np.testing.assert_array_equal(np.asarray(function(x)), expected)
    for strategy in ("basic", "aggressive", "cost"):
        traced = sp.trace(function, x, strategy=strategy)
        np.testing.assert_array_equal(np.asarray(traced.run(x)), expected)


# Where one axis cuts a dimension of the result in one operand, and one that is summed over in
# another.

LINE = DeviceMesh.of(x=3)
CUT = st.sampled_from((None, 0, 1))


def one_cut(dims: int, dim: int | None) -> ShardingSpec:
    return spec(LINE, ", ".join("x" if place == dim else "-" for place in range(dims)))


def held(shape: tuple[int, ...], dim: int | None, rank: int) -> set[tuple[int, ...]]:
    """The elements that a rank has of an array that is cut by ceil."""
    every = itertools.product(*map(range, shape))
    return {at for at in every if dim is None or at[dim] // -(-shape[dim] // 3) == rank}


def received(shape: tuple[int, ...], before: int | None, after: int | None) -> int:
    return sum(len(held(shape, after, r) - held(shape, before, r)) for r in range(3))


@given(*[st.integers(1, 9)] * 3, CUT, CUT)
def test_a_product_keeps_the_cut_of_its_result_and_moves_the_least(
    i: int, k: int, j: int, cut_x: int | None, cut_y: int | None
) -> None:
    data = (
        np.random.default_rng(0).normal(size=(i, k)),
        np.random.default_rng(1).normal(size=(k, j)),
    )
    x, y = (sp.array(one, one_cut(2, cut)) for one, cut in zip(data, (cut_x, cut_y), strict=True))
    for product in (sp.matmul, sp.jit(sp.matmul)):
        np.testing.assert_allclose(np.asarray(product(x, y)), data[0] @ data[1], atol=1e-12)
    # 1. The result: cut as the larger operand that cuts it; else a sum, if something is cut.
    cuts = {"ik"[cut_x]} if cut_x is not None else set()
    cuts |= {"kj"[cut_y]} if cut_y is not None else set()
    wanted = max(
        cuts, key=lambda f: {"i": (1, i * k, 1), "j": (1, k * j, 0), "k": (0,)}[f], default=""
    )
    expected = {"i": "x, -", "j": "-, x", "k": "-, - | sum(x)", "": "-, -"}[wanted]
    assert str(sp.matmul(x, y).spec) == expected
    # 2. The movements: of every way that an operand asks for the one of the fewest elements.
    counts = [0] if not cuts else []
    for way in cuts:
        place = {"i": (0, None, 0), "k": (1, 0, None), "j": (None, 1, 1)}[way]
        count = received((i, k), cut_x, place[0]) + received((k, j), cut_y, place[1])
        if way == "k" and wanted != "k":
            # Every rank gets two more contributions to each element of its part.
            count += 2 * i * j
        elif way != wanted:
            count += received((i, j), place[2], {"i": 0, "j": 1}[wanted])
        counts.append(count)
    assert sp.trace(sp.matmul, x, y).moved_elements == min(counts)


@given(*[st.integers(1, 9)] * 4, st.sampled_from((None, 0, 1)), CUT)
def test_a_lookup_is_cut_as_its_indices_are(
    rows: int, width: int, batch: int, length: int, cut_table: int | None, cut: int | None
) -> None:
    random = np.random.default_rng(0)
    data = random.normal(size=(rows, width))
    indices = random.integers(0, rows, size=(batch, length))
    table, at = sp.array(data, one_cut(2, cut_table)), sp.array(indices, one_cut(2, cut))
    found = sp.embedding(at, table)
    np.testing.assert_array_equal(np.asarray(found), data[indices])
    if cut is not None:
        assert found.spec is one_cut(3, cut)
    elif cut_table == 1:
        assert str(found.spec) == "-, -, x"


def test_a_lookup_in_columns_keeps_the_rows_of_the_larger_operand() -> None:
    at = sp.array(np.array([4, 0, 3]), spec(LINE, "x"))
    found = sp.take(sp.array(DATA, spec(LINE, "x, -")), at, axis=1)
    assert str(found.spec) == "x, -"
    np.testing.assert_array_equal(np.asarray(found), DATA[:, [4, 0, 3]])


def test_contributions_that_wait_already_go_on_waiting() -> None:
    random = np.random.default_rng(0)
    data = [random.normal(size=shape) for shape in ((8, 6), (6, 64), (64, 8))]
    left, right, last = (
        sp.array(one, spec(MESH, text))
        for one, text in zip(data, ("x, y", "-, -", "x, -"), strict=True)
    )
    waiting = left @ right
    assert str(waiting.spec) == "x, - | sum(y)"
    found = waiting @ last
    assert str(found.spec) == "x, - | sum(y)"
    np.testing.assert_allclose(np.asarray(found), data[0] @ data[1] @ data[2], atol=1e-12)
    (product,) = sp.trace(sp.matmul, waiting, last).operations
    assert str(product.computed[0].spec) == "-, - | sum(y x)"
