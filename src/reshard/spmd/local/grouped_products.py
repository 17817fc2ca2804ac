"""Grouped products: rows that are sorted by expert, by the matrix of each row's expert.

Each expert has a stretch of the rows, which may be empty::

    rows        0 0 0 | 1 | 3 3        experts 0, 1 and 3; none for 2
    ends        3 4 4 6

On PyTorch's tensors in CPU memory it is one kernel, elsewhere a product for each expert that has
rows. No row is padded.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from reshard.spmd.local.expert_rows import Integers
from reshard.spmd.local.library import Library, records_gradient

_NARROW = ("float32", "float16", "bfloat16")
_ALIGNED_BYTES = 16


def grouped_product(library: Library, rows: Any, matrices: Any, ends: Integers) -> Any:
    """Rows `[n, d]` by `[experts, d, e]`: `[n, e]`; `ends` is where the rows of each expert stop.

    >>> from reshard.spmd.local.library import library
    >>> rows, matrices = np.ones((3, 2)), np.array([[[1.0], [1.0]], [[5.0], [5.0]]])
    >>> grouped_product(library("numpy"), rows, matrices, np.array([1, 3]))[:, 0].tolist()
    [2.0, 10.0, 10.0]
    """
    kernel = _find_kernel(library, rows, matrices, ends)
    if kernel is not None and _is_dense(matrices):
        return kernel(rows.contiguous(), matrices, offs=library.array(ends.astype(np.int32)))
    made = [
        _multiply(library, rows[a:b], matrices[number])
        for number, (a, b) in enumerate(_stretches(ends))
        if b > a
    ]
    none = library.filled((0, matrices.shape[-1]), 0, rows)
    whole = library.namespace.concat([none, *made], axis=0)
    # All ranks record gradients alike, also those that have no rows.
    return library.linked(library.linked(whole, rows), matrices)


def grouped_outer(library: Library, rows: Any, others: Any, ends: Integers) -> Any:
    """Of each expert the sum over its rows of `[n, d]` by `[n, e]`: `[experts, d, e]`."""
    space = library.namespace
    kernel = _find_kernel(library, rows, others, ends)
    if kernel is not None:
        turned = space.matrix_transpose(rows.contiguous())
        return kernel(turned, others.contiguous(), offs=library.array(ends.astype(np.int32)))
    made = [
        _multiply(library, space.matrix_transpose(rows[a:b]), others[a:b])
        for a, b in _stretches(ends)
    ]
    none = library.filled((0, rows.shape[-1], others.shape[-1]), 0, rows)
    return space.stack(made, axis=0) if made else none


def _find_kernel(library: Library, rows: Any, others: Any, ends: Integers) -> Any:
    """PyTorch's own, where it takes such operands; None elsewhere."""
    if library.name != "torch" or not len(ends) or not len(rows) or rows.device.type != "cpu":
        return None
    widths_bytes = [one.shape[-1] * one.itemsize for one in (rows, others)]
    if any(one % _ALIGNED_BYTES for one in widths_bytes):
        return None
    # Its gradient refuses cotangents that are broadcast, as that of a sum.
    if records_gradient(rows) or records_gradient(others):
        return None
    if str(rows.dtype).removeprefix("torch.") not in _NARROW:
        return None
    # Not in every version.
    return getattr(import_module("torch").nn.functional, "grouped_mm", None)


def _is_dense(matrices: Any) -> bool:
    """Whether each matrix lies row by row, or column by column."""
    return bool(matrices.is_contiguous() or matrices.transpose(-1, -2).is_contiguous())


def _stretches(ends: Integers) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)) if len(ends) else []


def _multiply(library: Library, one: Any, other: Any) -> Any:
    """A product of matrices, in float32 where NumPy has none of a narrow type."""
    if library.name == "numpy" and one.dtype.kind == "V":
        return (one.astype(np.float32) @ other.astype(np.float32)).astype(one.dtype)
    return library.namespace.matmul(one, other)
