"""Local functions of libraries: einsum's way through several products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.spmd.ops.products import torch_einsum

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


class Copies(TorchDispatchMode):
    """Counts the elements that PyTorch copies so that they lie behind one another."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.elements += found.numel()
        return found


STACKED = {
    "btd,edf->btef": ((2, 3, 160), (4, 160, 128)),
    "btf,edf->bted": ((2, 3, 128), (4, 160, 128)),
    "btef,efd->btd": ((2, 3, 4, 160), (4, 160, 128)),
    "bted,efd->btf": ((2, 3, 4, 128), (4, 160, 128)),
    "td, edf -> tef": ((3, 160), (4, 160, 128)),
}


@pytest.mark.parametrize("text", STACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_with_stacked_matrices_are_those_of_einsum(text: str, dtype: Any) -> None:
    """Whole weights, and those that are a cut of others and thus apart in memory."""
    left, right = STACKED[text]
    x = torch.as_tensor(RANDOM.normal(size=left), dtype=dtype)
    wide = torch.as_tensor(RANDOM.normal(size=(right[0], right[1] * 2, right[2] * 2)), dtype=dtype)
    tolerance = 1e-4 if dtype is torch.float32 else 1e-12
    for w in (
        wide[:, : right[1], : right[2]].contiguous(),
        wide[:, right[1] :, : right[2]],
        wide[:, : right[1], ::2],
    ):
        found = torch_einsum(text)(x, w)
        assert found.is_contiguous()
        torch.testing.assert_close(found, torch.einsum(text, x, w), rtol=0, atol=tolerance)


@pytest.mark.parametrize("text", STACKED)
def test_weights_of_experts_are_not_copied(text: str) -> None:
    left, right = STACKED[text]
    x, wide = torch.ones(left), torch.ones(right[0], right[1] * 2, right[2])
    with Copies() as ours:
        torch_einsum(text)(x, wide[:, : right[1]])
    with Copies() as theirs:
        torch.einsum(text, x, wide[:, : right[1]])
    assert ours.elements < wide.numel() // 2 <= theirs.elements


@pytest.mark.parametrize("text", ["btd,edf->btef", "btef,efd->btd", "bd,edd->bed", "td,edf->tfe"])
def test_what_is_small_or_differentiated_or_otherwise_spelled_is_einsum_itself(text: str) -> None:
    sizes = dict(zip("btdef", (2, 3, 130, 4, 130), strict=True))
    x, w = (
        torch.as_tensor(RANDOM.normal(size=[sizes[letter] for letter in one]))
        for one in text.split("->")[0].split(",")
    )
    w.requires_grad_()
    found = torch_einsum(text)(x, w)
    assert torch.equal(found, torch.einsum(text, x, w))
    (ours,) = torch.autograd.grad(found.square().sum(), w)
    (theirs,) = torch.autograd.grad(torch.einsum(text, x, w).square().sum(), w)
    assert torch.equal(ours, theirs)
    w = w.detach()
    assert torch.allclose(torch_einsum(text)(x, w), torch.einsum(text, x, w))
    few = (x[..., :2], w[:, :2]) if text == "btd,edf->btef" else (x[:1], w)
    assert torch.allclose(torch_einsum(text)(*few), torch.einsum(text, *few))


def test_rows_without_elements() -> None:
    w = torch.ones(2, 300, 130)[:, :150]
    assert torch_einsum("td,edf->tef")(torch.ones(0, 150), w).shape == (0, 2, 130)
    assert torch_einsum("ted,edf->tf")(torch.ones(0, 2, 150), w).shape == (0, 130)
