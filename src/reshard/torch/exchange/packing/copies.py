"""Copies and combinations of pieces of tensors, on any device and for any dtype.

1. *Combining contributions.* On the CPU the code is that of a single process
   (`reshard.execution.arrays`), so both give the same bits; elsewhere torch computes, in the dtype
   itself or, where torch cannot compute in it, in float32.
2. *Staging memory.* New memory is mapped page by page, on the first write: 64 MiB have 16,384 pages
   of 4 KiB. If the system has larger pages, they are requested: 32 pages of 2 MiB. Freed memory of
   earlier results is reused for new results, since its pages are already mapped (`keep_memory`).
3. *Copying rows.* If a copy moves rows without changing elements, each long row is a `memcpy` by
   NumPy; for short rows torch's own loop is faster.
4. *Many small copies.* They are a single call, whose loop runs outside of Python.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reshard.binding import dense_strides
from reshard.errors import ShardError, UsageError
from reshard.execution import arrays
from reshard.execution.arrays import TorchTensors
from reshard.execution.engine import complete_contributions
from reshard.geometry.layout_change import LayoutChange
from reshard.system import find_large_page_advice
from reshard.torch.exchange.packing.messages import cut, row_bytes

# The bytes of a tensor that are computed at a time, which limits temporary memory: at most 15 times
# this for elements of a byte that are computed in float32.
_AT_ONCE_BYTES = 1 << 18
# Dtypes that torch adds without conversion.
_ADDED = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
}


def combine(reduction: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Write the combination of both, of equal shape and dtype, into `target`."""
    is_closed = target.is_inference() and not torch.is_inference_mode_enabled()
    if target.device.type == "cpu" and is_added_in_place(reduction, target.dtype) and not is_closed:
        into, part = target.detach(), source.detach()
        if into.is_complex() and not into.is_conj():
            # The sum multiplies its second operand by 1, which makes NaN of complex infinities.
            into, part = torch.view_as_real(into), torch.view_as_real(part.resolve_conj())
        torch.add(into, part, out=into)
        return
    parts = zip(cut(target, _AT_ONCE_BYTES), cut(source, _AT_ONCE_BYTES), strict=True)
    for into, part in parts:
        if target.device.type == "cpu":
            # On the CPU as in a single process (`execution`), so that both give the same bits.
            kind = TorchTensors(into)
            storage = kind.storage(into)
            storage[...] = kind.combine(reduction, storage, kind.storage(part))
        else:
            # Elements staged in the host's memory are copied to the device first.
            into.copy_(arrays.combine(reduction, into, part.to(into.device)))


def is_added_in_place(reduction: str, dtype: torch.dtype) -> bool:
    """Return whether torch's sum into an operand has the bits of `execution`'s combination.

    Products of complex numbers, and the maximum of two zeros, depend on the alignment of memory.

    >>> is_added_in_place("sum", torch.bfloat16), is_added_in_place("sum", torch.uint16)
    (True, False)
    """
    return reduction in ("sum", "mean") and dtype in _ADDED


def finish_contributions(change: LayoutChange, cells: Mapping[int, torch.Tensor]) -> None:
    """Scale the means in a rank's target cells, and fill contributions that combine nothing.

    Raises ShardError for a contribution to be filled on another device than the CPU.
    """
    numerator, denominator = change.scale
    for cell, tensor in cells.items():
        if not change.combines[int(change.target.cell_contribution[cell])]:
            _fill(change, cell, tensor)
        elif numerator != denominator:
            for part in cut(tensor, _AT_ONCE_BYTES):
                _scale(part, numerator, denominator)


def _fill(change: LayoutChange, cell: int, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ShardError(
            f"a contribution that combines nothing on {tensor.device}; reshard to partial layouts "
            "on the CPU"
        )
    kind = TorchTensors(tensor)
    complete_contributions(change, kind, {cell: kind.storage(tensor)})


def _scale(tensor: torch.Tensor, numerator: int, denominator: int) -> None:
    if tensor.device.type == "cpu":
        kind = TorchTensors(tensor)
        storage = kind.storage(tensor)
        storage[...] = kind.scale(storage, numerator, denominator)
        return
    tensor.copy_(arrays.scale(tensor, numerator, denominator))


# For allocations of at least this size, large pages are requested, as by NumPy.
_LARGE_BYTES = 1 << 22


_ADVISE_LARGE_PAGES = find_large_page_advice()
# Rows of at least this length are faster by `memcpy`.
_ROW_BYTES = 1 << 10
# Smaller copies are grouped.
_SMALL_BYTES = 1 << 14
#: By itemsize, the dtype by which elements are copied as bytes. NumPy has all of these, but not all
#: dtypes that they represent.
WORDS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


class KeptMemory:
    """A cache of the latest results' memory, for results of equal size after it is freed.

    Memory is kept as torch's storage, and is free if nothing else refers to it: no tensor, view,
    array or storage of the user. So no two tensors in use ever share it.

    >>> kept, result = KeptMemory(most_bytes=64), torch.zeros(4)
    >>> address = result.data_ptr()
    >>> kept.keep(result.untyped_storage())
    >>> kept.find(16) is None
    True
    >>> del result
    >>> kept.find(16).data_ptr() == address
    True
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        # Ordered from the oldest.
        self._storages: list[torch.UntypedStorage] = []
        self._bytes = 0

    def limit(self, most_bytes: int) -> None:
        """Limit the kept memory to so many bytes from now on."""
        with self._lock:
            self._most_bytes = most_bytes
            self._drop()

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Keep a storage for reuse, and drop the oldest if the limit is exceeded."""
        # A thread that finds the lock held does without the cache.
        can_tell = _COUNT_USERS is not None and _IS_CLONED_ON_WRITE is not None
        if (
            not can_tell
            or storage.nbytes() > self._most_bytes
            or not self._lock.acquire(blocking=False)
        ):
            return
        try:
            self._storages.append(storage)
            self._bytes += storage.nbytes()
            self._drop()
        finally:
            self._lock.release()

    def find(self, size_bytes: int) -> torch.UntypedStorage | None:
        """Return a free storage of exactly this size; it counts as the latest."""
        if not self._storages or not self._lock.acquire(blocking=False):
            return None
        try:
            for number in range(len(self._storages)):
                if self._storages[number].nbytes() == size_bytes and self._is_free(number):
                    storage = self._storages.pop(number)
                    self._storages.append(storage)
                    return storage
        finally:
            self._lock.release()
        return None

    def _is_free(self, number: int) -> bool:
        # The user has the same storage object, so references to it count as well. The two known
        # references are the list and the argument of the call; the storage must be the memory's
        # only user.
        if sys.getrefcount(self._storages[number]) > _REFERENCES_OF_ONE:
            return False
        storage = self._storages[number]
        if _COUNT_USERS(storage._cdata) > 1 or storage.is_shared():
            return False
        # A copy-on-write clone shares the memory until either storage is written.
        return not _IS_CLONED_ON_WRITE(torch.empty(0, dtype=torch.uint8).set_(storage))

    def _drop(self) -> None:
        # A storage that a user has resized has another size than when it was kept.
        self._bytes = sum(storage.nbytes() for storage in self._storages)
        while self._bytes > self._most_bytes:
            self._bytes -= self._storages.pop(0).nbytes()


# Private functions of torch, which a version of it may lack: then nothing is kept.
_COUNT_USERS: Any = getattr(torch._C, "_storage_Use_Count", None)
_IS_CLONED_ON_WRITE: Any = getattr(torch._C, "_is_cow_tensor", None)
# The result of `sys.getrefcount` for an object that only a list refers to.
_LISTED = [object()]
_REFERENCES_OF_ONE = sys.getrefcount(_LISTED[0])
DEFAULT_KEPT_BYTES = 512 << 20
_KEPT = KeptMemory(DEFAULT_KEPT_BYTES)


def keep_memory(most_bytes: int) -> None:
    """Set how much memory of freed CPU results is cached for reuse, and free what exceeds it.

    Writing to newly allocated memory is slow, because the operating system clears each page. So
    results of 4 MiB or more, of `redistribute` and of partitioned tensors, reuse the memory of
    earlier results of the same size that have been freed. Until then the memory stays with this
    process: at most 512 MiB by default.

    Args:
        most_bytes: the maximum number of bytes to cache; 0 caches nothing.

    Raises:
        UsageError: an invalid number.

    >>> keep_memory(0)
    >>> keep_memory(DEFAULT_KEPT_BYTES)
    """
    if isinstance(most_bytes, bool) or not isinstance(most_bytes, int) or most_bytes < 0:
        raise UsageError(f"most_bytes={most_bytes!r}; give a whole number of bytes, 0 for none")
    _KEPT.limit(most_bytes)


def empty_result(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor to be written once; on the CPU with large pages if available.

    >>> empty_result((2, 3), torch.float32, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < _LARGE_BYTES or device.type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    kept = _KEPT.find(size_bytes)
    if kept is not None:
        # Set the storage of an empty tensor, so that the result is not a view.
        result = torch.empty(0, dtype=dtype, device=device)
        if type(result) is torch.Tensor:
            return result.set_(kept, 0, tuple(shape), dense_strides(shape))
    result = torch.empty(tuple(shape), dtype=dtype, device=device)
    # Fake tensors have no memory.
    if type(result) is not torch.Tensor:
        return result
    if _ADVISE_LARGE_PAGES is not None:
        # Whole pages only: the first and last page may contain other data.
        begin = -(-result.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (result.data_ptr() + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        # This is advice: if it is ignored, pages have the usual size.
        _ADVISE_LARGE_PAGES(begin, end - begin)
    _KEPT.keep(result.untyped_storage())
    return result


def empty_bytes(size_bytes: int, device: torch.device, is_hosted: bool = False) -> torch.Tensor:
    """Return uninitialized bytes for staging; on the CPU with large pages if available.

    Staging memory on the host for a CUDA device (`is_hosted`) is pinned.

    >>> empty_bytes(6, torch.device("cpu")).shape
    torch.Size([6])
    """
    if device.type != "cpu" and not is_hosted:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    # NumPy requests large pages itself.
    return torch.from_numpy(np.empty(size_bytes, np.uint8))


def rows_of(tensor: torch.Tensor) -> NDArray[Any] | None:
    """Return a tensor of long rows in the host's memory as an array of words, or None.

    Arrays of equal words are copied row by row, each by `memcpy`.

    >>> rows_of(torch.zeros(2, 1024, dtype=torch.bfloat16)).dtype
    dtype('int16')
    >>> rows_of(torch.zeros(1024, 2).T) is None
    True
    """
    # Torch applies conjugation and negation only while it copies.
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return None
    word = WORDS.get(tensor.dtype.itemsize)
    if word is None or row_bytes(tensor) < _ROW_BYTES:
        return None
    rows: NDArray[Any] = tensor.detach().view(word).numpy()
    return rows


def copier(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    """Return a function that copies `source` to `target`, of equal shape, on each call.

    >>> source, target = torch.arange(4.0), torch.zeros(4)
    >>> _ = copier(target, source)()
    >>> target
    tensor([0., 1., 2., 3.])
    """
    if target.dtype is source.dtype:
        into, rows = rows_of(target), rows_of(source)
        if into is not None and rows is not None:
            return functools.partial(np.copyto, into, rows)
    return functools.partial(target.copy_, source)


def copiers(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Callable[[], object]]:
    """Return few functions that copy all sources to targets, given pairs `(target, source)`.

    >>> source, targets = torch.arange(4.0), torch.zeros(2, 4)
    >>> calls = copiers([(target, source) for target in targets])
    >>> _ = [call() for call in calls]
    >>> targets[1], len(calls)
    (tensor([0., 1., 2., 3.]), 1)
    """
    listed = list(pairs)
    small = [target.nbytes < _SMALL_BYTES for target, _ in listed]
    together = listed if all(small) else list(itertools.compress(listed, small))
    alone: list[Callable[[], object]] = []
    if len(together) < len(listed):
        large = map(operator.not_, small)
        alone += [copier(target, source) for target, source in itertools.compress(listed, large)]
    if together:
        # For small pieces, separate calls take longer than the copies.
        alone.append(
            functools.partial(torch._foreach_copy_, *map(list, zip(*together, strict=True)))
        )
    return alone
