"""Copies between the cells of two layouts: columns, strided NumPy views, and threads.

*Columns* (`CopyColumns`) list copies. A row is a product of *pieces*: in every dimension some
ranges of indices, with their offsets in the cell that is read and in the cell that is written::

    rows of the source    0 1 | . . | 2 3 | . . | 4 5 | . .     3 pieces of 2 rows, 4 apart
    rows of the target    0 1   2 3   4 5                       the same, 2 apart

1. Most rows are a few boxes at most. The slices of all of these are made at once.
2. The pieces of other rows become *windows*: pieces of equal length at equal distances, in source
   and target, are a strided view in which two dimensions, the pieces and the indices in a piece,
   replace the dimension. Two interleaved splits intersect in a pattern that repeats every few
   pieces; then the pieces at the same position of the pattern make a window. A row is the product
   of the windows of its dimensions, a NumPy copy each.
3. If that results in copies of few elements, a row is copied by lists of positions instead.

*NumPy copies* (`Copy`) are carried out by threads, at the speed of memory:

1. Copies are divided into parts of about a quarter of a MiB, along the dimension whose elements are
   farthest apart in the target.
2. Parts are sorted by address on the side that is read or written in scattered runs::

       source, by columns        targets         Neighbours in a row are copied one after the
       +----+----+----+          +----+          other, so cache lines of that side are fetched
       | 1  | 2  | 3  |          | 1  |  ...     once and in order; the runs of the other side
       | 4  | 5  | 6  |          | 4  |          are long anyway.
       +----+----+----+          +----+

3. Threads take parts from a queue; NumPy copies without holding the interpreter lock. If a thread
   fails, the others stop after their current part, and its exception is raised.

Contributions are combined with the elements in place in a separate phase after the copies, so that
their order, and with it every bit of the result, is the same for any number of threads.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from reshard._records import Record
from reshard.errors import UsageError
from reshard.execution.arrays import Storage
from reshard.geometry.overlap import RoutePieces
from reshard.geometry.routes import Routes
from reshard.geometry.transfers import Transfers
from reshard.runs import IntArray, find_distinct, ragged_arange, ragged_ranges
from reshard.system import count_processors

# The longest pattern of pieces that is tried.
_MAX_PATTERN = 8


class Window(NamedTuple):
    """`pieces` ranges of `length` indices of a dimension, at equal distances in both arrays."""

    pieces: int
    length: int
    target: int
    target_step: int
    source: int
    source_step: int


def find_windows(length: IntArray, target: IntArray, source: IntArray) -> list[Window]:
    """Return the windows of pieces, given by their lengths and their offsets in target and source.

    >>> find_windows(np.array([2, 2, 2]), np.array([0, 2, 4]), np.array([0, 4, 8]))
    [Window(pieces=3, length=2, target=0, target_step=2, source=0, source_step=4)]
    """
    if len(length) == 1:
        return [Window(1, int(length[0]), int(target[0]), 0, int(source[0]), 0)]
    best: list[Window] = []
    # In an interleaved pattern, every `period`-th piece belongs to the same progression.
    for period in range(1, min(len(length) // 2, _MAX_PATTERN) + 1):
        windows = [
            window
            for first in range(period)
            for window in _split_progressions(
                length[first::period], target[first::period], source[first::period]
            )
        ]
        if not best or len(windows) < len(best):
            best = windows
        # A longer period results in at least as many windows as its length.
        if len(best) <= period:
            break
    return best


def _split_progressions(length: IntArray, target: IntArray, source: IntArray) -> Iterator[Window]:
    """Yield windows of consecutive pieces."""
    target_step, source_step = np.diff(target), np.diff(source)
    alike = length[1:] == length[:-1]
    # A piece ends its window if the distance to the next changes.
    turns = (np.diff(target_step) != 0) | (np.diff(source_step) != 0)
    breaks = ~alike
    breaks[1:] |= turns & alike[:-1]
    begin = np.append(0, np.flatnonzero(breaks) + 1).tolist()
    for low, high in itertools.pairwise([*begin, len(length)]):
        many = high - low > 1
        yield Window(
            high - low,
            int(length[low]),
            int(target[low]),
            int(target_step[low]) if many else 0,
            int(source[low]),
            int(source_step[low]) if many else 0,
        )


def view_windows(
    array: Storage, windows: Sequence[Window], places: Sequence[tuple[int, int]]
) -> Storage:
    """Return the strided view of an array at windows that begin at `(begin, step)` per
    dimension.
    """
    if all(window.pieces == 1 for window in windows):
        dims = zip(places, windows, strict=True)
        # Keep a scalar an array, so that it can be written to.
        return array[tuple(slice(at, at + w.length) for (at, _), w in dims) or ...]
    shape: list[int] = []
    strides: list[int] = []
    for stride, (_, step), window in zip(array.strides, places, windows, strict=True):
        # Each dimension becomes two: the piece, and the index in the piece.
        shape += [window.pieces, window.length]
        strides += [step * stride, stride]
    first = array[tuple(slice(begin, None) for begin, _ in places)]
    return np.lib.stride_tricks.as_strided(first, shape, strides)


PIECE_BYTES = 1 << 18
# Starting a thread takes as long as copying some hundred KiB.
BYTES_FOR_A_THREAD = 1 << 20
# NumPy holds the interpreter lock for fewer than 500 elements, which serializes threads.
_BYTES_WITHOUT_LOCK = 1 << 11
# Number of copies sampled to decide which side is scattered.
_COPIES_LOOKED_AT = 32

Combine = Callable[[Storage, Storage], Storage]


class Copy(NamedTuple):
    """A copy of elements of an array to another of the same shape and dtype.

    Args:
        target, source: the arrays; the target is written in place.
        order: copies of lower order are carried out first. Copies of equal order are disjoint.
        combine: reduces the elements in place and the new elements; None to replace them.
        target_index, source_index: the elements, if not all: index lists as of `np.ix_`.
        target_address, source_address: of the first elements, if known.
    """

    target: Storage
    source: Storage
    order: int = 0
    combine: Combine | None = None
    target_index: Any = ...
    source_index: Any = ...
    # Reading the address of an array takes longer than copying a small box.
    target_address: int | None = None
    source_address: int | None = None

    @property
    def size_bytes(self) -> int:
        """Number of bytes that are written."""
        if self.target_index is ...:
            return self.target.nbytes
        count = self.target.itemsize
        for positions in self.target_index:
            count *= positions.size
        return count

    def carry_out(self) -> None:
        """Copy all elements, or combine them with the elements in place."""
        if self.combine is None and self.target_index is ...:
            self.target[...] = self.source
            return
        data = self.source[self.source_index]
        if self.combine is not None:
            data = self.combine(self.target[self.target_index], data)
        self.target[self.target_index] = data

    def pieces(self) -> Iterator[Copy]:
        """Yield the same elements, in copies of about `PIECE_BYTES`."""
        if self.size_bytes <= PIECE_BYTES:
            yield self
        elif self.target_index is ...:
            strides = self.target.strides
            # Largest stride first, so that a piece is contiguous in the target.
            axes = sorted(range(self.target.ndim), key=lambda axis: -abs(strides[axis]))
            views = self.target.transpose(axes), self.source.transpose(axes)
            for target, source in _cut_views(*views):
                yield Copy(target, source, self.order, self.combine)
        else:
            counts = [positions.size for positions in self.target_index]
            # The longest dimension has the smallest rows, so pieces are closest to their size.
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
    """Yield parts along the first dimension, and parts of its rows if a row is too large."""
    if target.nbytes <= PIECE_BYTES:
        yield target, source
        return
    rows = PIECE_BYTES * len(target) // target.nbytes
    # A single row is too large: divide it.
    if rows == 0:
        for row in range(len(target)):
            yield from _cut_views(target[row], source[row])
        return
    for low in range(0, len(target), rows):
        yield target[low : low + rows], source[low : low + rows]


def check_threads(threads: int | None) -> int:
    """Return the number of threads; by default the available processors. Raises UsageError below 1.

    >>> check_threads(0)
    Traceback (most recent call last):
        ...
    reshard.errors.UsageError: threads=0; expected at least 1, or None for one per processor
    """
    if threads is None:
        return count_processors()
    # True is an int to Python, but not a number of threads.
    is_number = isinstance(threads, int | np.integer) and not isinstance(threads, bool)
    if not is_number or threads < 1:
        raise UsageError(f"threads={threads!r}; expected at least 1, or None for one per processor")
    return int(threads)


def carry_out(copies: Iterable[Copy], threads: int) -> None:
    """Carry out copies, order by order, with at most `threads` threads.

    Exceptions of threads are raised when all threads have ended.

    >>> import numpy as np
    >>> source, target = np.arange(4), np.zeros(4, int)
    >>> carry_out([Copy(target[2:], source[:2])], threads=1)
    >>> target.tolist()
    [0, 0, 0, 1]
    """
    phases: dict[int, list[Copy]] = defaultdict(list)
    for copy in copies:
        phases[copy.order].append(copy)
    # A phase begins when the previous phase has ended, since it combines with its results.
    for _, phase in sorted(phases.items()):
        sizes_bytes = [copy.size_bytes for copy in phase]
        total_bytes = sum(sizes_bytes)
        # Few bytes fit the processor's cache, wherever they are.
        if total_bytes < max(BYTES_FOR_A_THREAD, len(phase) * _BYTES_WITHOUT_LOCK):
            _share(phase, 1)
            continue
        pieces = _sort_pieces(phase, sizes_bytes)
        _share(pieces, min(threads, len(pieces), total_bytes // BYTES_FOR_A_THREAD))


def _sort_pieces(copies: Sequence[Copy], sizes_bytes: Sequence[int]) -> list[Copy]:
    """Return the pieces of copies sorted by address, on the side that is scattered more widely.

    If neither is, they are sorted by the addresses that are read.
    """
    pieces: list[Copy] = []
    for copy, size_bytes in zip(copies, sizes_bytes, strict=True):
        if size_bytes <= PIECE_BYTES:
            pieces.append(copy)
        else:
            pieces += copy.pieces()
    # Copies between two layouts are mostly alike, so a sample suffices.
    sample = copies[:: max(1, len(copies) // _COPIES_LOOKED_AT)]
    read = sum(_extent_bytes(copy.source) for copy in sample)
    written = sum(_extent_bytes(copy.target) for copy in sample)
    pieces.sort(key=_source_address if read >= written else _target_address)
    return pieces


def _source_address(copy: Copy) -> int:
    return _address(copy.source) if copy.source_address is None else copy.source_address


def _target_address(copy: Copy) -> int:
    return _address(copy.target) if copy.target_address is None else copy.target_address


def _extent_bytes(array: Storage) -> int:
    """Return the bytes from the first of an array's elements to the last."""
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
            # The other threads stop after their current piece.
            waiting.clear()
            raise

    with ThreadPoolExecutor(workers, "reshard copy") as pool:
        try:
            for worker in [pool.submit(work) for _ in range(workers)]:
                worker.result()
        finally:
            # An interruption of this thread ends the others, too.
            waiting.clear()


# The setup cost of a copy by windows, in elements copied by lists of positions.
_ELEMENTS_FOR_A_WINDOW = 1024
# Creating a strided view takes as long as slicing this many boxes.
_MAX_BOXES = 16

Cells = Mapping[int, Storage]


class CopyColumns(Record, eq=False):
    """Copies from cells to cells, as columns of shape `(copies,)`.

    Args:
        source_cell, target_cell: the numbers of the cells.
        order: the position among the contributions combined there; the first replaces.
        elements: number of elements of each copy.
        pieces: for each dimension, the pieces of every copy.
    """

    source_cell: IntArray
    target_cell: IntArray
    order: IntArray
    elements: IntArray
    pieces: tuple[RoutePieces, ...]

    @classmethod
    def of_routes(cls, routes: Routes, pieces: tuple[RoutePieces, ...]) -> CopyColumns:
        """Return every route as a copy of the product of its pieces."""
        return cls(routes.source_cell, routes.target_cell, routes.order, routes.elements, pieces)

    @classmethod
    def of_transfers(cls, transfers: Transfers) -> CopyColumns:
        """Return every box as a copy."""
        t = transfers
        pieces = _pieces_of_boxes(t.start, t.shape, t.source_start, t.target_start)
        return cls(t.source_cell, t.target_cell, t.order, t.elements, pieces)

    @classmethod
    def of_cells(cls, source_cell: IntArray, target_cell: IntArray, shape: IntArray) -> CopyColumns:
        """Return copies of whole cells, of shape `(copies, dims)`."""
        begin = np.zeros_like(shape)
        pieces = _pieces_of_boxes(begin, shape, begin, begin)
        return cls(source_cell, target_cell, np.zeros_like(source_cell), shape.prod(axis=1), pieces)

    def copies(self, sources: Cells, targets: Cells, combine: Combine) -> list[Copy]:
        """Return the NumPy copies between the arrays of cells.

        `combine` reduces the elements in place and the elements of a later contribution.
        """
        count = np.ones(len(self.order), dtype=np.int64)
        for pieces in self.pieces:
            count *= pieces.count
        # Rows of few boxes are expanded together in NumPy; only the others need a Python loop.
        few = count <= _MAX_BOXES
        copies = self._copies_of_boxes(np.flatnonzero(few), sources, targets, combine)
        # Most rows share the pieces of a dimension with others.
        cache: dict[tuple[int, int, int], list[Window]] = {}
        for row in np.flatnonzero(~few).tolist():
            dims = []
            for dimension, pieces in enumerate(self.pieces):
                key = (dimension, int(pieces.begin[row]), int(pieces.count[row]))
                if key not in cache:
                    cache[key] = find_windows(*_pieces_of(pieces, row))
                dims.append(cache[key])
            copies += self._copies_of_row(row, dims, sources, targets, combine)
        return copies

    def _copies_of_boxes(
        self, rows: IntArray, sources: Cells, targets: Cells, combine: Combine
    ) -> list[Copy]:
        # The expanded rows: the row of each box, and its piece in every dimension.
        at: list[IntArray] = []
        for pieces in self.pieces:
            row, piece = ragged_ranges(pieces.begin[rows], pieces.count[rows])
            if not isinstance(row, slice):
                at = [earlier[row] for earlier in at]
                rows = rows[row]
            at.append(piece)
        columns = list(zip(self.pieces, at, strict=True))
        length = [pieces.length[piece] for pieces, piece in columns]
        into = (targets, self.target_cell[rows], [p.target_local[piece] for p, piece in columns])
        out_of = (sources, self.source_cell[rows], [p.source_local[piece] for p, piece in columns])
        places: Iterable[tuple[int | None, int | None]] = itertools.repeat((None, None), len(rows))
        # Addresses are for sorting only, and copies of few bytes are not sorted.
        itemsize = targets[int(into[1][0])].itemsize if len(rows) else 0
        if int(self.elements.sum()) * itemsize >= BYTES_FOR_A_THREAD:
            places = zip(_box_addresses(*into), _box_addresses(*out_of), strict=True)
        return [
            Copy(target, source, order, combine if order else None, ..., ..., *place)
            for target, source, order, place in zip(
                _view_boxes(*into, length),
                _view_boxes(*out_of, length),
                self.order[rows].tolist(),
                places,
                strict=True,
            )
        ]

    def _copies_of_row(
        self,
        row: int,
        dims: Sequence[list[Window]],
        sources: Cells,
        targets: Cells,
        combine: Combine,
    ) -> list[Copy]:
        into, out_of = targets[int(self.target_cell[row])], sources[int(self.source_cell[row])]
        order = int(self.order[row])
        reduction = combine if order else None
        count = math.prod(len(windows) for windows in dims)
        # Many small views take longer than a copy by index lists.
        if count > 1 and count * _ELEMENTS_FOR_A_WINDOW > self.elements[row]:
            places, positions = (_positions(self.pieces, row, side) for side in range(2))
            return [Copy(into, out_of, order, reduction, places, positions)]
        return [
            Copy(
                view_windows(into, windows, [(w.target, w.target_step) for w in windows]),
                view_windows(out_of, windows, [(w.source, w.source_step) for w in windows]),
                order,
                reduction,
            )
            for windows in itertools.product(*dims)
        ]


def _pieces_of_boxes(
    start: IntArray, shape: IntArray, source_start: IntArray, target_start: IntArray
) -> tuple[RoutePieces, ...]:
    """Return a piece per box in every dimension."""
    row = np.arange(len(shape))
    ones = np.ones_like(row)
    columns = zip(start.T, shape.T, source_start.T, target_start.T, strict=True)
    return tuple(RoutePieces(row, ones, *column) for column in columns)


def _view_boxes(
    arrays: Cells, cell: IntArray, begin: Sequence[IntArray], length: Sequence[IntArray]
) -> Iterator[Storage]:
    """Yield boxes of the arrays of cells, by their offsets and lengths in each dimension."""
    slices = [
        map(slice, low.tolist(), (low + size).tolist())
        for low, size in zip(begin, length, strict=True)
    ]
    # Keep a scalar an array, so that it can be written to.
    boxes: Iterable[Any] = zip(*slices, strict=True) if slices else itertools.repeat(...)
    return (arrays[number][box] for number, box in zip(cell.tolist(), boxes, strict=False))


def _box_addresses(arrays: Cells, cell: IntArray, begin: Sequence[IntArray]) -> list[int]:
    """Return the addresses of the first elements of boxes."""
    # Read the address of each array once, and compute the addresses of all boxes together.
    cells, _, position = find_distinct(cell)
    used = [arrays[number] for number in cells.tolist()]
    address = np.array([_address(array) for array in used])[position]
    for dimension, low in enumerate(begin):
        address += low * np.array([array.strides[dimension] for array in used])[position]
    addresses: list[int] = address.tolist()
    return addresses


def _pieces_of(pieces: RoutePieces, row: int) -> tuple[IntArray, IntArray, IntArray]:
    rows = pieces.rows(row)
    return pieces.length[rows], pieces.target_local[rows], pieces.source_local[rows]


def _positions(pieces: tuple[RoutePieces, ...], row: int, side: int) -> Any:
    """Return the positions of a row's elements in the target's cell (0), or the source's (1)."""
    positions = []
    for column in pieces:
        length, *begin = _pieces_of(column, row)
        positions.append(np.repeat(begin[side], length) + ragged_arange(length))
    return np.ix_(*positions)
