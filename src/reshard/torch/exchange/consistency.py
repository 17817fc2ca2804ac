"""Consistency of tensors after a failed run: marks on the tensors that it wrote into.

A run that fails leaves the tensors that it wrote into partly new and partly old. They are marked
until a later run has filled them, or the user has written into them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

# Weak, so that a mark keeps no tensor in memory.
_MARKED = WeakTensorKeyDictionary()
# The number of runs that wrote into inference tensors, by address; others count their writes.
_RUNS_INTO: dict[int, int] = {}


def is_usable(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is consistent: no failed run wrote into it since it was last filled.

    The tensor object that was given is marked, or the local tensor of its `DTensor`; other views of
    the same memory are not. Writes to an inference tensor are not detected.

    >>> is_usable(torch.ones(2))
    True
    """
    local = _local(tensor)
    mark = _MARKED.get(local)
    if mark is None:
        return True
    return bool(mark != _make_mark(local))


def find_unusable(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield the names of tensors that are not usable."""
    # Usually no tensor is marked, even among very many.
    if _MARKED:
        yield from (name for name, tensor in tensors.items() if not is_usable(tensor))


def mark_unusable(*tensors: torch.Tensor) -> None:
    """Mark `tensors` as partly written by a failed run."""
    for local in map(_local, tensors):
        _MARKED[local] = _make_mark(local)
    count_runs(list_uncounted(tensors))


def mark_usable(*tensors: torch.Tensor) -> None:
    """Remove the marks of `tensors`, all of which have been written."""
    unmark(tensors)
    count_runs(list_uncounted(tensors))


def unmark(tensors: Iterable[torch.Tensor]) -> None:
    """Forget that runs into `tensors` have failed."""
    # Usually no tensor is marked, even among very many.
    for local in map(_local, tensors) if _MARKED else ():
        _MARKED.pop(local, None)


def list_uncounted(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the inference tensors on this process, whose writes torch does not count.

    This does not change during a tensor's life, so callers with many runs call it once.

    >>> list_uncounted([torch.zeros(2)])
    []
    """
    return [_local(tensor) for tensor in tensors if tensor.is_inference()]


def count_runs(uncounted: Iterable[torch.Tensor]) -> None:
    """Count a run that has written into tensors of `list_uncounted`."""
    for local in uncounted:
        _RUNS_INTO[local.data_ptr()] = _RUNS_INTO.get(local.data_ptr(), 0) + 1


def written_states(tensors: Iterable[torch.Tensor]) -> tuple[object, ...]:
    """Return a state that differs after a write into any of the tensors, if writes are counted.

    Torch does not count writes into inference tensors, for which only runs are counted, nor writes
    by other views of their memory such as NumPy's.

    >>> tensor = torch.zeros(2)
    >>> before = written_states([tensor])
    >>> _ = tensor.add_(1)
    >>> before == written_states([tensor])
    False
    """
    return tuple((_count_writes(tensor), _count_writes(_local(tensor))) for tensor in tensors)


def _count_writes(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.is_inference():
        return tensor.data_ptr(), _RUNS_INTO.get(tensor.data_ptr(), 0)
    return 0, tensor._version


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _make_mark(tensor: torch.Tensor) -> tuple[int, int | None]:
    """Return a tensor's address, and the version that a run left; None if versions are not kept."""
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version
