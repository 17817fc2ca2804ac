"""Usability of tensors after a run that failed: marks on those that it wrote into.

A run that fails leaves the tensors that it wrote into partly new and partly old. They are marked,
so that nobody takes them for either, until a later run has filled them, or the user has written
into them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary


class _Mark(NamedTuple):
    """Where a tensor lay, and which version of it a run left; None for one that counts none."""

    address: int
    version: int | None


# Weak, so that a mark keeps no tensor in memory.
_MARKED = WeakTensorKeyDictionary()


def is_usable(tensor: torch.Tensor) -> bool:
    """Whether no run has failed that wrote into `tensor`, or it has been written since.

    It is marked by the tensor that was given, or what its `DTensor` has on this rank: another view
    of the same memory is not. An inference tensor counts no writes of the user's.

    >>> is_usable(torch.ones(2))
    True
    """
    local = _local(tensor)
    mark = _MARKED.get(local)
    if mark is None:
        return True
    return bool(mark != _make_mark(local))


def mark_unusable(tensor: torch.Tensor) -> None:
    """A run into `tensor` has failed."""
    local = _local(tensor)
    _MARKED[local] = _make_mark(local)


def mark_usable(tensor: torch.Tensor) -> None:
    """All of `tensor` has been written."""
    _MARKED.pop(_local(tensor), None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _make_mark(tensor: torch.Tensor) -> _Mark:
    return _Mark(tensor.data_ptr(), None if tensor.is_inference() else tensor._version)
