"""How does memory of the host cost little to take, and its rows little to copy?

1. Memory that nobody has used comes page by page, as it is first written: of 64 MiB, 16,384 times
   4 KiB. Where the system has larger pages it is asked for them: 32 times 2 MiB.
2. Where a copy moves rows and changes no element, a long row is one `memcpy`, which NumPy calls
   for each; torch has a loop of its own, which is quicker for short ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

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


def empty_bytes(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Bytes of any values, to stage in; on the CPU of large pages where there are some.

    >>> empty_bytes(6, torch.device("cpu")).shape
    torch.Size([6])
    """
    if device.type != "cpu":
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    # NumPy asks for large pages itself.
    return torch.from_numpy(np.empty(size_bytes, np.uint8))


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
