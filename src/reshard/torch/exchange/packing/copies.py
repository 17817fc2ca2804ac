"""Copies and combinations of pieces of tensors, on any device and for any dtype.

1. *Combining contributions.* On the CPU the code is that of a single process
   (`reshard.execution.arrays`), so both give the same bits; elsewhere torch computes, in the dtype
   itself or, where torch cannot compute in it, in float32.
2. *Staging memory.* Fresh memory is mapped page by page, as it is first written: of
   64 MiB, 16,384 times 4 KiB. Where the system has larger pages it is asked for them: 32 times
   2 MiB. Results come by turns: memory of an earlier result that has been freed is used again, as
   its pages are there (`keep_memory`).
3. *Copying rows.* Where a copy moves rows and changes no element, a long row is one `memcpy`,
   which NumPy calls for each; torch has a loop of its own, which is quicker for short ones.
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

from reshard.errors import ShardError, UsageError
from reshard.execution.arrays import TorchTensors
from reshard.execution.engine import complete_contributions
from reshard.geometry.layout_change import LayoutChange
from reshard.system import find_large_page_advice
from reshard.torch.exchange.packing.pieces import cut, row_bytes

# How much of a tensor is computed at once: what that needs beside it stays small, at most 15
# times this for elements of a byte, that are computed in float32.
_AT_ONCE_BYTES = 1 << 18
# What torch adds as it is.
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
_OPERATIONS = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def combine(reduction: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Put the combination of both, of equal shape and dtype, into `target`."""
    is_closed = target.is_inference() and not torch.is_inference_mode_enabled()
    if target.device.type == "cpu" and is_added_in_place(reduction, target.dtype) and not is_closed:
        into, part = target.detach(), source.detach()
        if into.is_complex() and not into.is_conj():
            # The sum multiplies its second operand by 1, which is no number of infinite ones.
            into, part = torch.view_as_real(into), torch.view_as_real(part.resolve_conj())
        torch.add(into, part, out=into)
        return
    parts = zip(cut(target, _AT_ONCE_BYTES), cut(source, _AT_ONCE_BYTES), strict=True)
    for into, part in parts:
        if target.device.type == "cpu":
            # On the CPU as in one process (`execution`), so that both give the same bits.
            kind = TorchTensors(into)
            storage = kind.storage(into)
            storage[...] = kind.combine(reduction, storage, kind.storage(part))
        else:
            wide = _choose_compute_dtype(target.dtype)
            # What was staged in the host's memory goes to the device first.
            into.copy_(_OPERATIONS[reduction](into.to(wide), part.to(into.device, wide)))


def is_added_in_place(reduction: str, dtype: torch.dtype) -> bool:
    """Whether torch's sum into one of its operands has the bits of `execution`'s combination.

    Products of complex numbers, and the greater of two zeros, depend on how memory is aligned.

    >>> is_added_in_place("sum", torch.bfloat16), is_added_in_place("sum", torch.uint16)
    (True, False)
    """
    return reduction in ("sum", "mean") and dtype in _ADDED


def finish_contributions(change: LayoutChange, cells: Mapping[int, torch.Tensor]) -> None:
    """Scale the means in a rank's target cells, and fill those that combine nothing.

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
    complete_contributions(
        change.target, change.combines, change.scale, kind, {cell: kind.storage(tensor)}
    )


def _scale(tensor: torch.Tensor, numerator: int, denominator: int) -> None:
    if tensor.device.type == "cpu":
        kind = TorchTensors(tensor)
        storage = kind.storage(tensor)
        storage[...] = kind.scale(storage, numerator, denominator)
        return
    wide = _choose_compute_dtype(tensor.dtype)
    tensor.copy_(tensor.to(wide) * numerator / denominator)


def _choose_compute_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype == torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.itemsize == 1 and dtype.is_floating_point else dtype


# From here on, large pages are asked for: as NumPy does.
_LARGE_BYTES = 1 << 22


_ADVISE_LARGE_PAGES = find_large_page_advice()
# Rows as long as this are quicker by `memcpy`.
_ROW_BYTES = 1 << 10
# What is smaller is copied with others.
_SMALL_BYTES = 1 << 14
#: By itemsize, what an element is copied as, by its bytes. NumPy knows all of these, as it does not
#: all that they stand for.
WORDS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


class KeptMemory:
    """A cache of the latest results' memory, for results of equal size after it is freed.

    What is kept is held as torch's storage, and counts as free where this is all that has it: no
    tensor, view, array or storage of the user's. So no two tensors in use ever share it.

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
        # The oldest first.
        self._storages: list[torch.UntypedStorage] = []
        self._bytes = 0

    def limit(self, most_bytes: int) -> None:
        """Keep no more than so many bytes from here on."""
        with self._lock:
            self._most_bytes = most_bytes
            self._drop()

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Hold a storage for later, and drop the oldest where they are too many bytes."""
        # A thread that finds the lock taken does without the cache.
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
                    found = self._storages.pop(number)
                    self._storages.append(found)
                    return found
        finally:
            self._lock.release()
        return None

    def _is_free(self, number: int) -> bool:
        # The object is the one that a user has too, so what refers to it counts as well: here the
        # list, and the argument of the call. Of the memory it is the only holder.
        if sys.getrefcount(self._storages[number]) > _REFERENCES_OF_ONE:
            return False
        storage = self._storages[number]
        if _COUNT_USERS(storage._cdata) > 1 or storage.is_shared():
            return False
        # Two storages may have one memory, until one of them is written.
        return not _IS_CLONED_ON_WRITE(torch.empty(0, dtype=torch.uint8).set_(storage))

    def _drop(self) -> None:
        # A storage that somebody has resized has other bytes than when it came.
        self._bytes = sum(one.nbytes() for one in self._storages)
        while self._bytes > self._most_bytes:
            self._bytes -= self._storages.pop(0).nbytes()


# Torch's own, which a version of it may lack: then nothing is kept.
_COUNT_USERS: Any = getattr(torch._C, "_storage_Use_Count", None)
_IS_CLONED_ON_WRITE: Any = getattr(torch._C, "_is_cow_tensor", None)
# What `sys.getrefcount` gives of an object that a list has, and nobody else.
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
    """A tensor of any values, to be written once; on the CPU of large pages where there are some.

    >>> empty_result((2, 3), torch.float32, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < _LARGE_BYTES or device.type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    known = _KEPT.find(size_bytes)
    if known is not None:
        # No view, but a tensor as `torch.empty` gives it.
        found = torch.empty(0, dtype=dtype, device=device)
        if type(found) is torch.Tensor:
            strides = [math.prod(shape[number + 1 :]) for number in range(len(shape))]
            return found.set_(known, 0, tuple(shape), strides)
    found = torch.empty(tuple(shape), dtype=dtype, device=device)
    # Fake tensors have no memory.
    if type(found) is not torch.Tensor:
        return found
    if _ADVISE_LARGE_PAGES is not None:
        # Whole pages only: what else lies in the first and last one is not ours.
        begin = -(-found.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (found.data_ptr() + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        # Advice: where it is not taken, pages are as small as ever.
        _ADVISE_LARGE_PAGES(begin, end - begin)
    _KEPT.keep(found.untyped_storage())
    return found


def empty_bytes(size_bytes: int, device: torch.device, is_hosted: bool = False) -> torch.Tensor:
    """Bytes of any values, to stage in; on the CPU of large pages where there are some.

    What is staged in the host's memory for a CUDA device (`is_hosted`) has pages that do not move.

    >>> empty_bytes(6, torch.device("cpu")).shape
    torch.Size([6])
    """
    if device.type != "cpu" and not is_hosted:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
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
    word = WORDS.get(source.dtype.itemsize)
    if not (on_host and is_same and word and min(map(row_bytes, (target, source))) >= _ROW_BYTES):
        return functools.partial(target.copy_, source)
    into, what = (one.detach().view(word).numpy() for one in (target, source))
    return functools.partial(np.copyto, into, what)


def copiers(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Callable[[], object]]:
    """What copies each source to its target, of pairs `(target, source)`, in a few calls.

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
        # Of small pieces to call once for each takes longer than to copy them.
        alone.append(
            functools.partial(torch._foreach_copy_, *map(list, zip(*together, strict=True)))
        )
    return alone
