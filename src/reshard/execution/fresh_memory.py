"""The memory of large new arrays, in large pages where they are quick to find.

A page of new memory is found and cleared by the system when it is first written. Large pages
(2 MiB) take a third of the time of as many small ones, where they are at hand. Sometimes they
are not, and take ten times as long: the system has to make room in a row first, or, in a virtual
machine whose host takes back what lies free, every large page has to come from the host, while
small ones are left from before. Nothing says beforehand which it is, so:

1. Each large array has a mapping of its own, where it begins at a large page::

       mapping  |....|========|========|========|===.....|
       array         | large pages              | small|         dots are never touched

2. Threads write to each large page before anything is copied, and see what that takes.
3. When several took long, all that is left is to be found in small pages, as it is copied to.

The memory is the system's again when the last array that shows it is gone. Where a system has no
such pages, and for small arrays, NumPy's own memory is all there is to it.
"""

from __future__ import annotations

import math
import mmap
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.system import advise_pages, has_large_pages

# Memory of smaller arrays the C library keeps when it is given back, and has it there at once the
# next time: glibc's mallopt(3), M_MMAP_THRESHOLD, which rises to this and no further.
LARGE_ARRAY_BYTES = 32 << 20
_LARGE_PAGE_BYTES = 2 << 20
# The smallest page of any system: one write to each finds a large page of small ones, too.
_SMALL_PAGE_BYTES = 4 << 10
# The processor clears 2 MiB in a quarter of this, or less.
_SLOW_S = 1e-3
# One page may be slow because of another process.
_MOST_SLOW_PAGES = 3


class FreshMemory:
    """Memory of new arrays, to be found at once by `find`, or as they are written.

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
        """A new array; its contents are undefined. Raises MemoryError where there is no room."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < LARGE_ARRAY_BYTES or not has_large_pages():
            return np.empty(shape, dtype)
        try:
            # Of this process alone: one that it starts has a copy.
            mapping = mmap.mmap(
                -1,
                size_bytes + _LARGE_PAGE_BYTES,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            )
        except (OSError, OverflowError):
            return np.empty(shape, dtype)
        whole: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        # To the first address where a large page may begin: one page more was mapped for that.
        begin = -whole.__array_interface__["data"][0] % _LARGE_PAGE_BYTES
        large_bytes = size_bytes // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES
        if not advise_pages(mapping, begin, large_bytes, large=True):
            return np.empty(shape, dtype)
        self._mappings.append(mapping)
        # One byte of each small page: writing it makes the system find the page.
        self._large_pages.extend(
            whole[at : at + _LARGE_PAGE_BYTES : _SMALL_PAGE_BYTES]
            for at in range(begin, begin + large_bytes, _LARGE_PAGE_BYTES)
        )
        return whole[begin : begin + size_bytes].view(dtype).reshape(shape)

    def find(self, threads: int) -> None:
        """Find the memory of the arrays that were made, by at most so many threads.

        To be called once, before anything is written to them.
        """
        workers = min(threads, len(self._large_pages))
        if workers > 1:
            with ThreadPoolExecutor(workers, "reshard memory") as pool:
                for worker in [pool.submit(self._touch) for _ in range(workers)]:
                    worker.result()
        else:
            self._touch()
        if self._slow_pages >= _MOST_SLOW_PAGES:
            for mapping in self._mappings:
                advise_pages(mapping, 0, len(mapping), large=False)
        # What is kept here would keep the memory.
        self._mappings.clear()
        self._large_pages.clear()

    def _touch(self) -> None:
        while self._slow_pages < _MOST_SLOW_PAGES:
            try:
                page = self._large_pages.popleft()
            except IndexError:
                return
            # Of this thread alone, so that others on the processor do not count. NumPy lets
            # Python's lock go for as many elements as these.
            begin_s = time.thread_time()
            page[...] = 0
            if time.thread_time() - begin_s > _SLOW_S:
                self._slow_pages += 1
