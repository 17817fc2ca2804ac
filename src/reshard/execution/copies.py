"""Copies between arrays, in pieces that threads share, as fast as memory allows.

1. Copies are cut into *pieces* of about a quarter of a MiB, along the dimension whose elements
   lie farthest apart in the target.
2. Pieces are sorted by where they lie on the side that is read or written in scattered runs::

       source, by columns        targets         Neighbours in a row are copied one behind the
       +----+----+----+          +----+          other, so lines of that side's memory are
       | 1  | 2  | 3  |          | 1  |  ...     fetched once and in order; the other side's
       | 4  | 5  | 6  |          | 4  |          runs are long anyway.
       +----+----+----+          +----+

3. Threads take pieces one by one; NumPy copies without holding Python's lock. When one fails, the
   others stop behind the piece that they are at, and its failure is raised.

Contributions are combined with what is there in a phase of their own, behind the copies, so that
their order is the same for any number of threads. Pieces are, too, and with them every bit of
the result.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import UsageError
from reshard.execution.arrays import Storage
from reshard.system import count_processors

PIECE_BYTES = 1 << 18
# A thread takes as long to start as some hundred KiB to copy.
BYTES_FOR_A_THREAD = 1 << 20
# NumPy copies fewer than 500 elements under Python's lock, so that threads would take turns.
_BYTES_WITHOUT_LOCK = 1 << 11
# How many copies are asked which side is scattered.
_COPIES_LOOKED_AT = 32

Combine = Callable[[Storage, Storage], Storage]


class Copy(NamedTuple):
    """Elements of one array that go to another, of the same shape, and of the same dtype.

    Args:
        target, source: the arrays; the target is written in place.
        order: copies of a lower order come before. Those of one order are disjoint.
        combine: what becomes of what is there and what comes; None where it is replaced.
        target_index, source_index: which elements, where it is not all of them: index lists
            as `np.ix_` gives them.
        target_address, source_address: of the first elements, where they are known.
    """

    target: Storage
    source: Storage
    order: int = 0
    combine: Combine | None = None
    target_index: Any = ...
    source_index: Any = ...
    # Asking an array for its address takes longer than copying a small box.
    target_address: int | None = None
    source_address: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that are written."""
        if self.target_index is ...:
            return self.target.nbytes
        count = self.target.itemsize
        for positions in self.target_index:
            count *= positions.size
        return count

    def carry_out(self) -> None:
        """Copy all elements, or combine them with what is there."""
        if self.combine is None and self.target_index is ...:
            self.target[...] = self.source
            return
        data = self.source[self.source_index]
        if self.combine is not None:
            data = self.combine(self.target[self.target_index], data)
        self.target[self.target_index] = data

    def pieces(self) -> Iterator[Copy]:
        """The same elements, in copies of about `PIECE_BYTES`."""
        if self.size_bytes <= PIECE_BYTES:
            yield self
        elif self.target_index is ...:
            strides = self.target.strides
            # The dimension of the largest stride first: a piece lies together in the target.
            axes = sorted(range(self.target.ndim), key=lambda axis: -abs(strides[axis]))
            views = self.target.transpose(axes), self.source.transpose(axes)
            for target, source in _cut_views(*views):
                yield Copy(target, source, self.order, self.combine)
        else:
            counts = [positions.size for positions in self.target_index]
            # The longest dimension has the smallest rows, so pieces come closest to their size.
            axis = counts.index(max(counts))
            rows = max(1, PIECE_BYTES * counts[axis] // self.size_bytes)
            for low in range(0, counts[axis], rows):
                part = (*[slice(None)] * axis, slice(low, low + rows))
                indexes = [list(self.target_index), list(self.source_index)]
                for index in indexes:
                    index[axis] = index[axis][part]
                into, out_of = map(tuple, indexes)
                yield Copy(self.target, self.source, self.order, self.combine, into, out_of)


def _cut_views(target: Storage, source: Storage) -> Iterator[tuple[Storage, Storage]]:
    """Parts along the first dimension, and of its rows where one is too large."""
    if target.nbytes <= PIECE_BYTES:
        yield target, source
        return
    rows = PIECE_BYTES * len(target) // target.nbytes
    # A single row is too large: cut within it.
    if rows == 0:
        for row in range(len(target)):
            yield from _cut_views(target[row], source[row])
        return
    for low in range(0, len(target), rows):
        yield target[low : low + rows], source[low : low + rows]


def available_threads() -> int:
    """The processors that this process may use: how many threads copy where none are asked for.

    >>> available_threads() >= 1
    True
    """
    return count_processors()


def check_threads(threads: int | None) -> int:
    """A number of threads, the available ones for None. Raises UsageError for fewer than one.

    >>> check_threads(0)
    Traceback (most recent call last):
        ...
    reshard.errors.UsageError: threads=0; at least one thread copies, or None for one on each
    processor
    """
    if threads is None:
        return available_threads()
    is_number = isinstance(threads, int | np.integer) and not isinstance(threads, bool)
    if not is_number or threads < 1:
        raise UsageError(
            f"threads={threads!r}; at least one thread copies, or None for one on each processor"
        )
    return int(threads)


def carry_out(copies: Iterable[Copy], threads: int) -> None:
    """Carry out copies, order by order, by at most so many threads.

    What fails in a thread is raised here when all threads have ended.

    >>> import numpy as np
    >>> source, target = np.arange(4), np.zeros(4, int)
    >>> carry_out([Copy(target[2:], source[:2])], threads=1)
    >>> target.tolist()
    [0, 0, 0, 1]
    """
    phases: dict[int, list[Copy]] = defaultdict(list)
    for copy in copies:
        phases[copy.order].append(copy)
    # A phase begins when the one before has ended, since it combines with what that wrote.
    for _, phase in sorted(phases.items()):
        sizes_bytes = [copy.size_bytes for copy in phase]
        total_bytes = sum(sizes_bytes)
        # Few bytes lie in the processor's cache altogether, wherever they are.
        if total_bytes < max(BYTES_FOR_A_THREAD, len(phase) * _BYTES_WITHOUT_LOCK):
            _share(phase, 1)
            continue
        pieces = _sort_pieces(phase, sizes_bytes)
        _share(pieces, min(threads, len(pieces), total_bytes // BYTES_FOR_A_THREAD))


def _sort_pieces(copies: Sequence[Copy], sizes_bytes: Sequence[int]) -> list[Copy]:
    """The pieces of copies by where they begin, on the side that is scattered more widely.

    Where neither is, by what is read: then the copies of one piece follow one another.
    """
    pieces: list[Copy] = []
    for copy, size_bytes in zip(copies, sizes_bytes, strict=True):
        if size_bytes <= PIECE_BYTES:
            pieces.append(copy)
        else:
            pieces += copy.pieces()
    # The copies between two layouts are mostly alike, so some of them say it of all.
    some = copies[:: max(1, len(copies) // _COPIES_LOOKED_AT)]
    read = sum(_extent_bytes(copy.source) for copy in some)
    written = sum(_extent_bytes(copy.target) for copy in some)
    pieces.sort(key=_source_address if read >= written else _target_address)
    return pieces


def _source_address(copy: Copy) -> int:
    return _address(copy.source) if copy.source_address is None else copy.source_address


def _target_address(copy: Copy) -> int:
    return _address(copy.target) if copy.target_address is None else copy.target_address


def _extent_bytes(array: Storage) -> int:
    """Bytes from the first of an array's elements to the last."""
    extent = array.itemsize
    for size, stride in zip(array.shape, array.strides, strict=True):
        extent += (size - 1) * abs(stride)
    return extent


def _address(array: Storage) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _share(pieces: Sequence[Copy], workers: int) -> None:
    if workers <= 1:
        for piece in pieces:
            piece.carry_out()
        return
    # Its methods are atomic, so threads need no lock.
    waiting = deque(pieces)

    def work() -> None:
        try:
            while True:
                try:
                    piece = waiting.popleft()
                except IndexError:
                    return
                piece.carry_out()
        except BaseException:
            waiting.clear()
            raise

    with ThreadPoolExecutor(workers, "reshard copy") as pool:
        try:
            for worker in [pool.submit(work) for _ in range(workers)]:
                worker.result()
        finally:
            # Whoever interrupts this thread ends the others, too.
            waiting.clear()
