"""Local functions of libraries: einsum's way through several products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec

RANDOM = np.random.default_rng(2)
CHAIN = "ij,jk,kl->il"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The `optimize=` of every call of NumPy's einsum."""
    seen: list[Any] = []
    own = np.einsum

    def einsum(*operands: Any, optimize: Any = None, **options: Any) -> Any:
        seen.append(optimize)
        return own(*operands, optimize=optimize, **options)

    monkeypatch.setattr(np, "einsum", einsum)
    return seen


@pytest.mark.parametrize("cut", ["x, y", "y, -", "-, x y"])
def test_einsum_goes_along_a_path_on_every_rank(asked: list[Any], cut: str) -> None:
    mesh = DeviceMesh.of(x=2, y=2)
    arrays = [RANDOM.normal(size=size) for size in ((16, 24), (24, 32), (32, 8))]
    operands = [sp.array(one, spec(mesh, cut)) for one in arrays]
    found = sp.einsum(CHAIN, *operands)
    assert np.allclose(found.to_dense(), arrays[0] @ arrays[1] @ arrays[2])
    # Without a path NumPy goes through all letters in one loop, which is 30 times as much work.
    assert len(asked) == 4
    assert all(one[0] == "einsum_path" and len(one) == 3 for one in asked)


def test_one_product_has_a_path_too(asked: list[Any]) -> None:
    x, w = RANDOM.normal(size=(16, 24)), RANDOM.normal(size=(24, 8))
    found = sp.einsum("ij,jk->ik", sp.array(x, spec(DeviceMesh.of(x=2), "x, -")), w)
    assert np.allclose(found.to_dense(), x @ w)
    assert asked == [["einsum_path", (0, 1)]] * 2


def test_a_path_is_found_once_for_equal_shapes(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []
    own = np.einsum_path

    def einsum_path(text: str, *operands: Any, **options: Any) -> Any:
        searched.append(text)
        return own(text, *operands, **options)

    monkeypatch.setattr(np, "einsum_path", einsum_path)
    mesh = DeviceMesh.of(x=2)
    # Sizes of this test alone: what was compiled for others has its paths.
    arrays = [RANDOM.normal(size=size) for size in ((10, 26), (26, 34), (34, 6))]
    for _ in range(3):
        sp.einsum(CHAIN, sp.array(arrays[0], spec(mesh, "x, -")), *arrays[1:])
    assert len(asked) == 6 and searched == [CHAIN]


def test_few_elements_are_multiplied_at_once(asked: list[Any]) -> None:
    x, w = RANDOM.normal(size=(4, 3)), RANDOM.normal(size=(3, 2))
    found = sp.einsum("ij,jk->ik", sp.array(x, spec(DeviceMesh.of(x=2), "x, -")), w)
    assert np.allclose(found.to_dense(), x @ w)
    assert asked == [False, False]
