"""Memory of a run: the arrays it reads, and the arrays it writes, given or new.

All checks are made before the first element is copied.

*Arrays that are read*: an array for every slot of the source that holds elements, of its local
shape; all of the same kind and dtype, in memory that can be shared.

*Arrays that the caller gives to be written*:

1. an array for every slot of the target that holds elements, of its local shape, and of the kind
   and dtype of the sources;
2. writable memory in which every element has its own location;
3. no memory shared with another array of the run: neither a source, which is read meanwhile, nor
   another target.

They need not be contiguous: columns of a single array may be targets of several slots.

*New arrays.* The system maps and clears a page of new memory on its first write. Large pages (2
MiB) take a third of the time of small pages of the same total size if they are available. Otherwise
they may take ten times as long: the system has to compact memory first, or, in a virtual machine
whose host reclaims free memory, fetch every large page from the host, while small pages are left
over from before. This is not known in advance, so:

1. Each large array has its own mapping, in which it begins at a large page::

       mapping  |....|========|========|========|===.....|
       array         | large pages              | small|         dots are never touched

2. Threads write to each large page before anything is copied, and measure how long that takes.
3. After several slow pages, the rest is mapped in small pages, when it is copied to.

The memory is unmapped with the last array that refers to it. On systems without large pages, and
for small arrays, NumPy allocates.
"""

from __future__ import annotations

import math
import mmap
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.dtypes import DType
from reshard.errors import ShardError
from reshard.execution.arrays import ArrayKind, Storage, check_reduction, kind_of
from reshard.layout import Layout
from reshard.system import advise_pages, has_large_pages

BY_RANK = "give arrays by rank, such as {0: array}"
BY_NAME = "give arrays by tensor and rank, such as {'w': {0: array}}"


def check_mapping(arrays: object, name: str, hint: str) -> None:
    """Raise ShardError unless arrays are in a mapping; the `hint` is `BY_RANK` or `BY_NAME`.

    Unlike `check_type`, the error omits the value: its arrays may be large.

    >>> check_mapping([np.zeros(2)], "out", BY_RANK)
    Traceback (most recent call last):
        ...
    reshard.errors.ShardError: out is a list; give arrays by rank, such as {0: array}
    """
    if not isinstance(arrays, Mapping):
        raise ShardError(f"{name} is a {type(arrays).__name__}; {hint}")


def sort_for_reading(keys: Iterable[Any]) -> list[Any]:
    """Return keys sorted, for an error; unsorted if they cannot be compared.

    >>> sort_for_reading([2, 1]), sort_for_reading([2, "1"])
    ([1, 2], [2, '1'])
    """
    listed = list(keys)
    try:
        return sorted(listed)
    except TypeError:
        return listed


def check_shards(
    source: Layout,
    shards: Mapping[int, Any],
    tensor: str = "",
    dtype: DType | None = None,
    target_reduction: str | None = None,
) -> ArrayKind:
    """Return the kind of the arrays of a source layout, or raise ShardError if they do not match
    it.

    Args:
        source: the layout.
        shards: the arrays by slot. Arrays of slots that hold nothing are ignored, and slots
            without elements do not need an array.
        tensor: the tensor's name in errors, if a run has several.
        dtype: the required dtype; any if None.
        target_reduction: the reduction of the target, if it is partial.
    """
    check_mapping(shards, f"shards{tensor}", BY_RANK)
    holders = [slot for slot in source.holders if slot in shards]
    # If the tensor has no elements, an array is needed for the type.
    needed = source.element_holders or source.holders[: not holders]
    missing = [slot for slot in needed if slot not in shards]
    if missing:
        raise ShardError(
            f"no array{tensor} for rank {missing[0]}; the source holds data on ranks "
            f"{list(source.holders)}, got {sort_for_reading(shards)}"
        )
    if not holders:
        raise ShardError(f"the source layout{tensor} holds nothing, so there is nothing to copy")
    kinds = {slot: kind_of(shards[slot], source_name(slot, tensor)) for slot in holders}
    kind = kinds[holders[0]]
    for slot, other in kinds.items():
        shape, expected = tuple(shards[slot].shape), source.local_shapes[slot]
        if shape != expected:
            raise ShardError(
                f"{source_name(slot, tensor)} has shape {list(shape)}, but the source layout "
                f"has {list(expected)}"
            )
        if other.dtype is not kind.dtype or type(other) is not type(kind):
            raise ShardError(
                f"{source_name(slot, tensor)} is {type(other).__name__} of {other.dtype.name}, "
                f"that of rank {holders[0]} {type(kind).__name__} of {kind.dtype.name}; "
                "all must be alike"
            )
    if dtype is not None and kind.dtype is not dtype:
        raise ShardError(
            f"arrays{tensor} of {kind.dtype.name} for a plan of {dtype.name}; nothing is cast"
        )
    for reduction in {source.reduction, target_reduction} - {None}:
        # If only the target is a mean, its contributions are copies: nothing is divided.
        if reduction != "mean" or source.reduction == "mean":
            check_reduction(str(reduction), kind.dtype)
    return kind


def source_storages(
    source: Layout, kind: ArrayKind, shards: Mapping[int, Any], tensor: str = ""
) -> dict[int, Storage]:
    """Return the memory of the source's arrays, which have been checked.

    Raises ShardError if it is on a device, or cannot be shared; `tensor` as in `check_shards`.
    """
    storages = {}
    for slot in source.holders:
        if slot in shards:
            storages[slot] = kind.storage(shards[slot], source_name(slot, tensor))
        else:
            # It has no elements, so nothing is read.
            storages[slot] = np.empty(source.local_shapes[slot], dtype=kind.dtype.storage)
    return storages


def source_name(slot: int, tensor: str = "") -> str:
    """Return the name of the array of a slot, for errors."""
    return f"the array of rank {slot}{tensor}"


# The C library keeps the freed memory of smaller arrays and reuses it: glibc's mallopt(3),
# M_MMAP_THRESHOLD, which rises to this limit.
LARGE_ARRAY_BYTES = 32 << 20
_LARGE_PAGE_BYTES = 2 << 20
# The smallest page of any system: a write to each maps a large page of small pages, too.
_SMALL_PAGE_BYTES = 4 << 10
# A processor clears 2 MiB in a quarter of this, or less.
_SLOW_S = 1e-3
# A single page may be slow because of another process.
_MAX_SLOW_PAGES = 3


class FreshMemory:
    """Memory for new arrays, mapped by `find` or on their first write.

    >>> memory = FreshMemory()
    >>> array = memory.array((2, 3), np.dtype(np.uint8))
    >>> memory.find(threads=2)
    >>> array.shape
    (2, 3)
    """

    def __init__(self) -> None:
        self._mappings: list[mmap.mmap] = []
        self._large_pages: deque[NDArray[np.uint8]] = deque()
        self._slow_pages = 0

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a new array with undefined contents. Raises MemoryError if memory is exhausted."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < LARGE_ARRAY_BYTES or not has_large_pages():
            return np.empty(shape, dtype)
        try:
            # Private: a child process gets a copy.
            mapping = mmap.mmap(
                -1,
                size_bytes + _LARGE_PAGE_BYTES,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            )
        except (OSError, OverflowError):
            # If memory is exhausted, NumPy raises MemoryError.
            return np.empty(shape, dtype)
        whole: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        # Align to a large page: an additional page was mapped for that.
        begin = -whole.__array_interface__["data"][0] % _LARGE_PAGE_BYTES
        large_bytes = size_bytes // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES
        if not advise_pages(mapping, begin, large_bytes, large=True):
            return np.empty(shape, dtype)
        self._mappings.append(mapping)
        # A byte of each small page: writing it makes the system map the page.
        self._large_pages.extend(
            whole[at : at + _LARGE_PAGE_BYTES : _SMALL_PAGE_BYTES]
            for at in range(begin, begin + large_bytes, _LARGE_PAGE_BYTES)
        )
        return whole[begin : begin + size_bytes].view(dtype).reshape(shape)

    def find(self, threads: int) -> None:
        """Map the memory of the arrays, by at most `threads` threads.

        Call it once, before anything is written to the arrays.
        """
        workers = min(threads, len(self._large_pages))
        if workers > 1:
            with ThreadPoolExecutor(workers, "reshard memory") as pool:
                for worker in [pool.submit(self._touch) for _ in range(workers)]:
                    worker.result()
        else:
            self._touch()
        if self._slow_pages >= _MAX_SLOW_PAGES:
            for mapping in self._mappings:
                advise_pages(mapping, 0, len(mapping), large=False)
        # References kept here would keep the memory.
        self._mappings.clear()
        self._large_pages.clear()

    def _touch(self) -> None:
        while self._slow_pages < _MAX_SLOW_PAGES:
            try:
                page = self._large_pages.popleft()
            except IndexError:
                return
            # The time of this thread only, without others on the processor. NumPy releases the
            # interpreter lock for this many elements.
            begin_s = time.thread_time()
            page[...] = 0
            if time.thread_time() - begin_s > _SLOW_S:
                self._slow_pages += 1


# Whether arrays in the same memory overlap is decided by solving for the indices of a common
# element; arrays that need more attempts than this are refused.
_MAX_ATTEMPTS = 1_000_000
# NumPy's type stubs allow only two values of `max_work`.
_shares_memory: Any = np.shares_memory


NamedStorage = tuple[str, Storage]
"""The name of an array in errors, and its memory."""


def new_storages(layout: Layout, kind: ArrayKind, memory: FreshMemory) -> dict[int, Storage]:
    """Return new memory for each slot that holds cells; its contents are undefined."""
    return {
        slot: memory.array(layout.local_shapes[slot], kind.dtype.storage) for slot in layout.holders
    }


def given_storages(
    layout: Layout, kind: ArrayKind, out: Mapping[int, Any], tensor: str = ""
) -> dict[int, Storage]:
    """Return the memory of the arrays in `out`, by slot that holds cells.

    Args:
        layout: of the target.
        kind: of the sources' arrays.
        out: arrays by slot; arrays of slots that hold nothing are ignored.
        tensor: the tensor's name in errors, if a run has several.

    Raises:
        ShardError: an array that is missing, read-only, or of another shape, kind or dtype.
    """
    check_mapping(out, f"out{tensor}", BY_RANK)
    missing = [slot for slot in layout.element_holders if slot not in out]
    if missing:
        raise ShardError(
            f"no array{tensor} for rank {missing[0]} in out; the target holds data on ranks "
            f"{list(layout.holders)}, got {sort_for_reading(out)}"
        )
    storages = {}
    for slot in layout.holders:
        if slot not in out:
            # It has no elements, so nothing is written.
            storages[slot] = np.empty(layout.local_shapes[slot], dtype=kind.dtype.storage)
            continue
        name, array = output_name(slot, tensor), out[slot]
        other = kind_of(array, name)
        shape = layout.local_shapes[slot]
        if tuple(array.shape) != shape:
            raise ShardError(
                f"{name} has shape {list(array.shape)}, but the target layout has {list(shape)}"
            )
        if other.dtype is not kind.dtype or type(other) is not type(kind):
            raise ShardError(
                f"{name} is {type(other).__name__} of {other.dtype.name}, the sources are "
                f"{type(kind).__name__} of {kind.dtype.name}; nothing is cast"
            )
        storages[slot] = other.writable(array, name)
        if _repeats_itself(storages[slot]):
            raise ShardError(
                f"{name} has several elements at the same address (strides "
                f"{list(storages[slot].strides)} in bytes for shape {list(shape)}); each needs "
                "its own, as in a copy"
            )
    return storages


def output_name(slot: int, tensor: str = "") -> str:
    """Return the name of the output array of a slot, for errors."""
    return f"the array{tensor} for rank {slot} in out"


def check_apart(written: Iterable[NamedStorage], read: Iterable[NamedStorage]) -> None:
    """Raise ShardError if an array that is written shares an element with any other.

    >>> memory = np.zeros(4)
    >>> check_apart([("the left", memory[:2])], [("the right", memory[2:])])
    >>> check_apart([("the left", memory[:2])], [("the middle", memory[1:3])])
    Traceback (most recent call last):
        ...
    reshard.errors.ShardError: the left shares memory with the middle; each array that is written
    needs separate memory
    """
    entries = [(*_bounds(array), True, (name, array)) for name, array in written if array.size]
    # Several slots may share a source array.
    sources = {_place(array): (name, array) for name, array in read if array.size}
    entries += [(*_bounds(named[1]), False, named) for named in sources.values()]
    entries.sort(key=lambda entry: entry[0])
    # A sweep by address: `reaching` are the arrays that extend beyond the start of the next.
    reaching: list[tuple[int, bool, NamedStorage]] = []
    for low, high, is_written, named in entries:
        reaching = [entry for entry in reaching if entry[0] > low]
        for _, other_is_written, other in reaching:
            if is_written or other_is_written:
                first, second = (named, other) if is_written else (other, named)
                _check_pair(first, second)
        reaching.append((high, is_written, named))


def _check_pair(written: NamedStorage, other: NamedStorage) -> None:
    (name, array), (other_name, other_array) = written, other
    try:
        # Arrays with overlapping bounds may still be disjoint, as columns of a matrix are.
        shared = _shares_memory(array, other_array, max_work=_MAX_ATTEMPTS)
    except np.exceptions.TooHardError:
        raise ShardError(
            f"{name} is in the same memory as {other_name}, and it takes too long to find "
            "out whether they share an element; give it separate memory"
        ) from None
    if shared:
        raise ShardError(
            f"{name} shares memory with {other_name}; each array that is written needs "
            "separate memory"
        )


def _place(array: Storage) -> tuple[Any, ...]:
    return array.__array_interface__["data"][0], array.shape, array.strides


def _bounds(array: Storage) -> tuple[int, int]:
    """Return the address of the first byte, and the address after the last."""
    low = high = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        low += min(0, (size - 1) * stride)
        high += max(0, (size - 1) * stride)
    return low, high + array.itemsize


def _repeats_itself(array: Storage) -> bool:
    """Return whether two elements share an address, unless strides prove that none do."""
    reach = array.itemsize
    dims = zip(array.strides, array.shape, strict=True)
    # From the smallest stride up: `reach` is the extent of the dimensions so far.
    for stride, size in sorted((abs(stride), size) for stride, size in dims if size != 1):
        if stride < reach and array.size:
            return True
        reach += stride * (size - 1)
    return False
