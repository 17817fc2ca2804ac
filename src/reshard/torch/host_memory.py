"""How does memory of the host cost little to take, and its rows little to copy?

1. Memory that nobody has used comes page by page, as it is first written: of 64 MiB, 16,384 times
   4 KiB. Where the system has larger pages it is asked for them: 32 times 2 MiB.
2. Where a copy moves rows and changes no element, a long row is one `memcpy`, which NumPy calls
   for each; torch has a loop of its own, which is quicker for short ones.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import torch

# Below it, large pages save less than asking for them costs.
_ADVISED_BYTES = 4 << 20
_LARGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
# Rows as long as this are quicker by `memcpy`.
_ROW_BYTES = 1 << 10
# An element that is copied as it is, by its bytes. NumPy knows all of these, as it does not all
# that they stand for.
_WORDS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A dense tensor of `shape`, of any values; on the CPU of large pages where there are some.

    >>> empty((2, 3), torch.int8, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    size_bytes = tensor.numel() * dtype.itemsize
    if device.type == "cpu" and size_bytes >= _ADVISED_BYTES and _LARGE_PAGES is not None:
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        whole_bytes = tensor.data_ptr() + size_bytes - begin
        # Only advice: a system that does not take it has the memory all the same.
        _system().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(whole_bytes), _LARGE_PAGES)
    return tensor


@functools.cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def copier(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    """What copies `source` to `target`, of equal shape, each time it is called.

    >>> source, target = torch.arange(4.0), torch.zeros(4)
    >>> _ = copier(target, source)()
    >>> target
    tensor([0., 1., 2., 3.])
    """
    on_host = target.device.type == source.device.type == "cpu"
    # Torch computes these bits only as it copies.
    is_pending = source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg()
    is_same = target.dtype is source.dtype and not is_pending
    word = _WORDS.get(source.dtype.itemsize)
    if not (on_host and is_same and word and min(map(row_bytes, (target, source))) >= _ROW_BYTES):
        return functools.partial(target.copy_, source)
    into, what = (one.detach().view(word).numpy() for one in (target, source))
    return functools.partial(np.copyto, into, what)


def row_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the longest runs of memory that a tensor is made of, in row major order.

    >>> row_bytes(torch.zeros(3, 4, 5)[:, :2]), row_bytes(torch.zeros(4, 5).T)
    (40, 4)
    """
    elements = 1
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if length != 1:
            if stride != elements:
                break
            elements *= length
    return int(elements * tensor.dtype.itemsize)
