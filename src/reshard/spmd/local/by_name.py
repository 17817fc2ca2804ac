"""Local functions that a library has: in its namespace, or its `linalg` and `fft`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from reshard.spmd.core.backend import records_gradient
from reshard.spmd.core.local_work import Function, LocalWork, find_function, own_attributes

_FEW_ELEMENTS = 256
_MATRIX_ELEMENTS = 16_384
"""From which on a product with one matrix takes far longer than its call."""
_TO_EACH = re.compile(r"(\w+)(\w),(\w)(\w\w)->\1\3(\w)")
_OVER_ALL = re.compile(r"(\w+)(\w)(\w),\2(\w\w)->\1(\w)")


def in_linalg(work: LocalWork) -> Function:
    """The function of that name in the library's `linalg`."""
    function = find_function(work, work.library.namespace.linalg, work.name)
    return partial(function, **own_attributes(work)) if work.attributes else function


def in_fft(work: LocalWork) -> Function:
    """The function of that name in the library's `fft`."""
    names = {"axis": "axes", "n": "s"} if work.name.endswith("fftn") else {}
    options = {names.get(name, name): value for name, value in work.attributes.items()}
    function = partial(find_function(work, work.library.namespace.fft, work.name), **options)
    if work.library.name == "numpy":
        return function
    by_numpy = partial(getattr(np.fft, work.name), **options)

    def transformed(x: Any) -> Any:
        # PyTorch refuses a part without elements.
        if 0 in x.shape:
            empty = x if work.library.name == "numpy" else x.detach()
            made = work.library.array(by_numpy(work.library.numpy(empty)), beside=x)
            return work.library.linked(made, x)
        return function(x)

    return transformed


def einsum(work: LocalWork) -> Function:
    """The library's own einsum, which the array API has not."""
    name, text = work.library.name, work.attributes["subscripts"]
    if name != "numpy":
        return torch_einsum(text)

    @lru_cache(maxsize=8)
    def find_path(shapes: tuple[tuple[int, ...], ...]) -> Any:
        # Without a path, NumPy goes through all letters in one loop: no BLAS. Few products are
        # sooner done than a path is gone.
        if sum(map(math.prod, shapes)) < _FEW_ELEMENTS:
            return False
        arrays = (np.broadcast_to(0.0, shape) for shape in shapes)
        return np.einsum_path(text, *arrays, optimize="greedy")[0]

    def function(*arrays: Any) -> Any:
        return np.einsum(text, *arrays, optimize=find_path(tuple([one.shape for one in arrays])))

    return function


def torch_einsum(text: str) -> Function:
    """PyTorch's einsum, but with stacked matrices, as those of experts, one matrix after the other.

    `btd,edf->btef` and `btef,efd->btd` are one product of matrices each in PyTorch's einsum, which
    copies all of the weights for it where two of their dimensions do not lie behind one another.
    """
    torch = import_module("torch")
    spaceless = text.replace(" ", "")
    multiply: Callable[..., Any]
    if found := _TO_EACH.fullmatch(spaceless):
        rows, summed, stacked, matrix, kept = found.groups()
        multiply, behind = _multiply_with_each, kept
    elif found := _OVER_ALL.fullmatch(spaceless):
        rows, stacked, summed, matrix, kept = found.groups()
        multiply, behind = _multiply_over_all, summed
    if found is None or not _is_product(rows, stacked, summed, kept, matrix):
        return lambda *arrays: torch.einsum(text, *arrays)
    by_slices = partial(multiply, turned=matrix[0] != summed)
    second = matrix.index(behind) + 1

    def function(x: Any, weights: Any) -> Any:
        # Under a gradient of PyTorch its own function records one step; small matrices are sooner
        # copied; and what lies behind one another is one product without a copy.
        if (
            type(x) is torch.Tensor
            and type(weights) is torch.Tensor
            and x.device.type == "cpu"
            and x.dtype == weights.dtype
            and x.dtype in (torch.float32, torch.float64)
            and math.prod(weights.shape[1:]) >= _MATRIX_ELEMENTS
            and weights.shape[0] > 1
            and weights.stride(0) != weights.stride(second) * weights.shape[second]
            and not records_gradient(x)
            and not records_gradient(weights)
        ):
            return by_slices(x, weights)
        return torch.einsum(text, x, weights)

    return function


def _is_product(rows: str, stacked: str, summed: str, kept: str, matrix: str) -> bool:
    """Whether the letters are all different, and the matrix has the summed and the kept one."""
    letters = f"{rows}{stacked}{summed}{kept}"
    return len(set(letters)) == len(letters) and sorted(matrix) == sorted(summed + kept)


def _multiply_with_each(x: Any, weights: Any, turned: bool) -> Any:
    """`[..., k]` with each of `[e, k, n]`, or of `[e, n, k]` turned: `[..., e, n]`."""
    torch = import_module("torch")
    matrices = weights.transpose(1, 2) if turned else weights
    made = x.new_empty((*x.shape[:-1], matrices.shape[0], matrices.shape[2]))
    rows, places = x.reshape(-1, x.shape[-1]), made.view(-1, *made.shape[-2:])
    for number, matrix in enumerate(matrices.unbind()):
        torch.mm(rows, matrix, out=places[:, number])
    return made


def _multiply_over_all(x: Any, weights: Any, turned: bool) -> Any:
    """The sum of `[..., e, k]`'s products with `[e, k, n]`, or `[e, n, k]` turned: `[..., n]`."""
    matrices = weights.transpose(1, 2) if turned else weights
    rows = x.reshape(-1, *x.shape[-2:])
    made = rows[:, 0] @ matrices[0]
    for number in range(1, matrices.shape[0]):
        made.addmm_(rows[:, number], matrices[number])
    return made.view(*x.shape[:-2], made.shape[-1])
