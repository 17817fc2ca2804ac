"""Grouped products against a product for each row, for every type, size and library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from reshard.spmd.core.backend import library
from reshard.spmd.local.expert_rows import grouped_outer, grouped_product

ENDS = ([0, 2, 2, 7], [3, 3, 3, 3], [1, 2, 3, 4], [0, 0, 0, 0])
# Sizes that PyTorch's kernel takes, and others.
SIZES = ((8, 16), (3, 5))


@pytest.mark.parametrize("name", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_as_each_row_by_its_matrix(
    ends: list[int], sizes: tuple[int, int], dtype: str, name: str
) -> None:
    draw = np.random.default_rng(ends[-1])
    # Whole numbers, whose products no type rounds.
    rows, others = (draw.integers(-3, 4, (ends[-1], size)) for size in sizes)
    matrices = draw.integers(-3, 4, (4, *sizes))
    experts = np.searchsorted(ends, np.arange(ends[-1]), side="right")

    def made(array: Any) -> Any:
        if name == "torch":
            return torch.tensor(array, dtype=getattr(torch, dtype))
        ml_dtypes = pytest.importorskip("ml_dtypes")
        return array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def same(found: Any, expected: Any) -> None:
        assert found.shape == expected.shape
        found = found.to(torch.float64) if name == "torch" else found.astype(np.float64)
        np.testing.assert_array_equal(np.asarray(found), expected)

    space, stops = library(name), np.array(ends)
    product = np.einsum("nd,nde->ne", rows, matrices[experts])
    turned = np.swapaxes(made(np.swapaxes(matrices, 1, 2).copy()), 1, 2)
    for given in (made(matrices), turned):
        same(grouped_product(space, made(rows), given, stops), product)
    outer = np.zeros((4, *sizes))
    np.add.at(outer, experts, rows[:, :, None] * others[:, None, :])
    same(grouped_outer(space, made(rows), made(others), stops), outer)


@pytest.mark.parametrize("sizes", SIZES)
def test_no_experts_and_gradients(sizes: tuple[int, int]) -> None:
    space = library("torch")
    none, rows = np.zeros(0, np.int64), torch.zeros((0, sizes[0]))
    found = grouped_product(space, rows, torch.zeros((0, *sizes)), none)
    assert found.shape == (0, sizes[1])
    assert grouped_outer(space, rows, found, none).shape == (0, *sizes)
    for count in (0, 5):
        rows = torch.ones((count, sizes[0]), requires_grad=True)
        matrices = torch.ones((2, *sizes), requires_grad=True)
        grouped_product(space, rows, matrices, np.array([0, count])).sum().backward()
        assert rows.grad is not None and matrices.grad is not None
        assert (rows.grad == sizes[1]).all() and (matrices.grad[1] == count).all()
