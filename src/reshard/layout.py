"""Layouts: which rank holds which elements of a tensor.

A `Layout` is concrete: a shape, and for each of the ranks 0..n-1 the elements it holds. Tables call
a rank a *slot*: it may represent a process, a host, a file, or something else.

The elements of a rank are a list of *cells*. A cell takes one part of each dimension's run table
and holds their product, so a layout whose dimensions are split independently has a cell per rank,
and a flat buffer that is split anywhere has a few::

    6 x 6, rows over 2 and columns over 3        4 x 4, elements 0:6 on rank 0, 6:16 on rank 1

    +----+----+----+                             +-----------+
    | 0  | 1  | 2  |   rank 4 holds              | 0  0  0  0|   rank 0: 2 cells (1x4, 1x2)
    +----+----+----+   part 1 of dim 0           | 0  0 +----+   rank 1: 2 cells (1x2, 2x4)
    | 3  | 4  | 5  |   part 1 of dim 1           +------+ 1  1
    +----+----+----+                             | 1  1  1  1

In the memory of a rank, a cell is a dense row-major array of shape `local_shape`; the cells of a
rank are stored consecutively.

A rank of a partial layout carries a *contribution*: the tensor is the reduction over the
contributions 0..c-1.

`print(layout)` lists how each dimension is split, and the ranks of its parts::

    6 x 9 on ranks 0-5
    dimension 0 in 2 parts
      0:3  ranks 0-2
      3:6  ranks 3-5
    dimension 1 in 3 parts
      0:3  ranks 0,3
      3:6  ranks 1,4
      6:9  ranks 2,5

Ranks with several boxes, as in a flat buffer, are listed with their boxes instead. Long lists are
abbreviated to their ends.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from reshard._interning import Interned
from reshard._validation import (
    MAX_ELEMENTS,
    MAX_RANKS,
    check_int,
    check_int_array,
    check_ints,
    check_type,
)
from reshard.errors import LayoutError
from reshard.runs import OWNED, PAD, ROLE_NAMES, IntArray, Run, RunTable, distinct, find_distinct
from reshard.text import ranks_text

REDUCTIONS = ("sum", "max", "min", "mean", "product")

# Tables with more lines are scrolled past, not read.
_MAX_LINES, _LAST_LINES, _MAX_RUNS = 8, 2, 3


class Box(NamedTuple):
    """A box of a tensor: indices `start[d]:stop[d]` in each dimension.

    >>> Box((0, 2), (4, 5)).shape
    (4, 3)
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], start: Sequence[int] | None = None) -> Box:
        """Return the box of a shape that begins at an index, by default at 0.

        >>> Box.of((2, 3)), Box.of((2, 3), (1, 4))
        (Box(start=(0, 0), stop=(2, 3)), Box(start=(1, 4), stop=(3, 7)))
        """
        if start is None:
            return cls((0,) * len(shape), tuple(shape))
        return cls(tuple(start), tuple(map(operator.add, start, shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of indices in each dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection with another box, or None if it is empty.

        >>> Box((0, 0), (4, 4)).intersect(Box((1, 2), (6, 3)))
        Box(start=(1, 2), stop=(4, 3))
        """
        start, stop = (
            tuple(map(max, self.start, other.start)),
            tuple(map(min, self.stop, other.stop)),
        )
        return Box(start, stop) if all(map(operator.lt, start, stop)) else None

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """Return the part of this box outside of another, as disjoint boxes.

        >>> [str(part) for part in Box((0, 0), (4, 4)).subtract(Box((1, 0), (2, 3)))]
        ['[0:1, 0:4]', '[2:4, 0:4]', '[1:2, 3:4]']
        """
        common = self.intersect(other)
        if common is None:
            return (self,)
        # Dimension by dimension, split off the parts before and after `common`, and narrow the
        # rest to its range.
        parts = []
        start, stop = list(self.start), list(self.stop)
        for d, (low, high) in enumerate(zip(*common, strict=True)):
            if start[d] < low:
                parts.append(Box(tuple(start), (*stop[:d], low, *stop[d + 1 :])))
            if high < stop[d]:
                parts.append(Box((*start[:d], high, *start[d + 1 :]), tuple(stop)))
            start[d], stop[d] = low, high
        return tuple(parts)

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


class Placement(Interned):
    """The slot of each cell, and the parts it takes: a layout without its lengths.

    Tensors that are sharded alike share it, whatever their shapes, and with it all results that
    depend on it alone. Cells are sorted by rank.

    Args:
        slot: the rank of each cell, shape `(cells,)`.
        part: the part of each dimension that a cell takes, shape `(cells, dims)`.
        contribution: the contribution of each cell, shape `(cells,)`.
    """

    field_names = ("slot", "part", "contribution")

    def __init__(self, slot: IntArray, part: IntArray, contribution: IntArray) -> None:
        # Stable, since the cells of a rank are in the order of its memory.
        order = np.argsort(slot, kind="stable")
        self.slot: IntArray = slot[order]
        self.part: IntArray = part[order]
        self.contribution: IntArray = contribution[order]
        for array in (self.slot, self.part, self.contribution):
            array.flags.writeable = False

    def interning_key(self) -> object:
        columns = (self.slot, self.part, self.contribution)
        return (self.part.shape, *(column.tobytes() for column in columns))


class Layout(Interned):
    """Which rank holds which elements of a tensor of `shape`, interned.

    Args:
        shape: of the tensor.
        tables: a run table per dimension.
        slots: number of ranks; a rank without a cell holds nothing.
        cell_slot: the rank of each cell, shape `(cells,)`.
        cell_part: the part of each dimension that a cell takes, shape `(cells, dims)`.
        contribution: the contribution of each cell, shape `(cells,)`; zeros if None.
        contributions: number of contributions; 1 for a layout that is not partial.
        reduction: how contributions combine, one of `REDUCTIONS`; None if the layout is not
            partial.

    Raises:
        LayoutError: tables, parts or ranks that do not match the shape or each other.
    """

    field_names = (
        *("shape", "tables", "slots", "cell_slot", "cell_part", "cell_contribution"),
        *("contributions", "reduction"),
    )

    def __init__(
        self,
        shape: Sequence[int],
        tables: Sequence[RunTable],
        slots: int,
        cell_slot: Sequence[int] | IntArray,
        cell_part: Sequence[Sequence[int]] | IntArray,
        contribution: Sequence[int] | IntArray | None = None,
        contributions: int = 1,
        reduction: str | None = None,
    ) -> None:
        self.shape = check_ints(shape, "shape", LayoutError)
        self.tables = tuple(tables)
        self.slots = check_int(slots, "number of ranks", LayoutError)
        slot = check_int_array(cell_slot, "ranks of cells", LayoutError).reshape(-1)
        part = check_int_array(cell_part, "parts of cells", LayoutError)
        if part.size != len(slot) * len(self.shape):
            raise LayoutError(
                f"parts of cells of shape {list(part.shape)} for {len(slot)} cells of a tensor of "
                f"{len(self.shape)} dimensions; give one part per cell and dimension"
            )
        # Restore the shape of tables without cells or dimensions.
        part = part.reshape(len(slot), len(self.shape))
        if contribution is None:
            carried = np.zeros(len(slot), dtype=np.int64)
        else:
            carried = check_int_array(contribution, "contributions", LayoutError).reshape(-1)
        self.contributions = check_int(contributions, "contributions", LayoutError)
        self.reduction = reduction
        self._check(slot, part, carried)
        self.placement = Placement(slot, part, carried)
        self.cell_slot: IntArray = self.placement.slot
        self.cell_part: IntArray = self.placement.part
        self.cell_contribution: IntArray = self.placement.contribution

    def _check(self, slot: IntArray, part: IntArray, carried: IntArray) -> None:
        if not all(isinstance(table, RunTable) for table in self.tables):
            raise LayoutError(f"tables {list(self.tables)!r}; give a RunTable for each dimension")
        lengths = tuple(table.dimension_length for table in self.tables)
        if lengths != self.shape:
            raise LayoutError(
                f"run tables of lengths {list(lengths)} for a tensor of shape {list(self.shape)}"
            )
        if self.slots > MAX_RANKS:
            raise LayoutError(
                f"a layout over {self.slots} ranks; at most {MAX_RANKS} are supported"
            )
        if len(slot) and (slot.min() < 0 or slot.max() >= self.slots):
            raise LayoutError(
                f"cells on ranks {slot.min()} to {slot.max()}, but there are {self.slots} ranks"
            )
        for dimension, table in enumerate(self.tables):
            column = part[:, dimension]
            if len(column) and (column.min() < 0 or column.max() >= table.parts):
                raise LayoutError(
                    f"dimension {dimension} has {table.parts} parts, a cell takes part "
                    f"{column.max() if column.max() >= table.parts else column.min()}"
                )
        if (self.contributions > 1) != (self.reduction is not None):
            raise LayoutError(
                f"{self.contributions} contributions with reduction {self.reduction!r}: a "
                "reduction is given exactly when there is more than one contribution"
            )
        if self.reduction is not None and self.reduction not in REDUCTIONS:
            raise LayoutError(
                f"unknown reduction {self.reduction!r}; it is one of {', '.join(REDUCTIONS)}"
            )
        if len(carried) != len(slot) or (
            len(carried) and (carried.min() < 0 or carried.max() >= self.contributions)
        ):
            raise LayoutError(
                f"every cell carries one of the {self.contributions} contributions, got "
                f"{carried.tolist()}"
            )
        self._check_total(part)

    def _check_total(self, part: IntArray) -> None:
        """Raise LayoutError if the elements of all ranks together exceed 64-bit counts."""
        # A bound that practically all layouts meet: as if every cell were the largest.
        largest = math.prod(table.max_local_length for table in self.tables)
        if max(largest * len(part), math.prod(self.shape)) <= MAX_ELEMENTS:
            return
        # Exact, cell by cell; in floats, since the sum may exceed 64 bits.
        lengths = [table.local_lengths.astype(np.float64) for table in self.tables]
        each = math.prod((column[part[:, d]] for d, column in enumerate(lengths)), start=1.0)
        held = float(np.sum(each))
        if max(held, math.prod(self.shape)) > MAX_ELEMENTS:
            raise LayoutError(
                f"a tensor of shape {list(self.shape)} has {math.prod(self.shape):,} elements, "
                f"{held:.2g} on all ranks together; at most {MAX_ELEMENTS:,} are supported, so "
                "that their bytes fit 64 bits"
            )

    def interning_key(self) -> object:
        counts = (self.slots, self.contributions, self.reduction)
        return (self.shape, self.tables, self.placement, *counts)

    @classmethod
    def replicated(cls, shape: Sequence[int], slots: int = 1) -> Layout:
        """Return a layout with the whole tensor on each of `slots` ranks.

        >>> Layout.replicated((2, 3), 4).local_shape(3)
        (2, 3)
        """
        slots = check_int(slots, "number of ranks", LayoutError)
        # A count far too large must fail in the checks before all ranks are listed.
        return cls.whole(shape, range(min(slots, MAX_RANKS + 1)), slots)

    @classmethod
    def whole(cls, shape: Sequence[int], holders: Iterable[int], slots: int) -> Layout:
        """Return a layout with the whole tensor on the ranks `holders` of `slots` ranks."""
        shape = check_ints(shape, "shape", LayoutError)
        holders = check_ints(holders, "ranks", LayoutError)
        # Many tensors of a model are whole on the same ranks, and have the same shape.
        # Long lists of ranks are not cached, since they would stay in memory as keys.
        make = _make_whole if len(holders) <= _MAX_CACHED_HOLDERS else _make_whole.__wrapped__
        return make(cls, shape, holders, check_int(slots, "number of ranks", LayoutError))

    @classmethod
    def from_boxes(
        cls, shape: Sequence[int], boxes: Iterable[tuple[int, Box]], slots: int | None = None
    ) -> Layout:
        """Return the layout of `(rank, box)` pairs; the boxes of a rank are stored in this order.

        >>> halves = [(0, Box((0, 0), (1, 4))), (1, Box((1, 0), (2, 4)))]
        >>> Layout.from_boxes((2, 4), halves) is Layout.from_boxes((2, 4), halves, slots=2)
        True
        """
        shape = check_ints(shape, "shape", LayoutError)
        check_type(boxes, Iterable, "boxes", "give a list of (rank, Box)", LayoutError)
        return cls._of_boxes(shape, [_check_box(pair, shape) for pair in boxes], slots)

    @classmethod
    def _of_boxes(
        cls, shape: tuple[int, ...], pairs: list[tuple[int, Box]], slots: int | None
    ) -> Layout:
        """Return the layout of boxes that are known to be valid: flat buffers have thousands."""
        slots = max((slot for slot, _ in pairs), default=0) + 1 if slots is None else slots
        tables, columns = [], []
        for dimension, size in enumerate(shape):
            windows = [(box.start[dimension], box.stop[dimension]) for _, box in pairs]
            # Equal windows share a part of the dimension.
            # Sorted, so that the same windows give the same run table in whatever order the boxes
            # come.
            number = {window: i for i, window in enumerate(sorted(set(windows)))}
            rows = [(i, a, b - a, 0) for (a, b), i in number.items()]
            tables.append(RunTable(size, max(len(number), 1), rows))
            columns.append([number[window] for window in windows])
        part = np.array(columns, dtype=np.int64).reshape(len(shape), len(pairs)).T
        return cls(shape, tables, slots, [slot for slot, _ in pairs], part)

    @classmethod
    def flat_ranges(
        cls,
        shape: Sequence[int],
        ranges: Mapping[int, tuple[int, int]],
        dims: int | None = None,
        slots: int | None = None,
    ) -> Layout:
        """Return the layout of ranges of the flattened leading `dims` dimensions (all if None), by
        rank.

        A range becomes at most `2 * dims - 1` boxes. Sources: ragged shards of veScale and
        FSDP, the flat buffers of ZeRO.

        >>> Layout.flat_ranges((4, 4), {0: (0, 6), 1: (6, 16)}).boxes(1)
        (Box(start=(1, 2), stop=(2, 4)), Box(start=(2, 0), stop=(4, 4)))
        """
        shape = check_ints(shape, "shape", LayoutError)
        dims = len(shape) if dims is None else check_int(dims, "leading dimensions", LayoutError)
        if dims > len(shape):
            raise LayoutError(f"the leading {dims} dimensions of {list(shape)}, which has fewer")
        if not isinstance(ranges, Mapping):
            raise LayoutError(f"ranges {ranges!r}; give {{rank: (start, stop)}}")
        total = math.prod(shape[:dims])
        boxes: list[tuple[int, Box]] = []
        for slot, bounds in ranges.items():
            slot = check_int(slot, "rank", LayoutError)
            ends = check_ints(bounds, f"range of rank {slot}", LayoutError, minimum=None)
            if len(ends) != 2 or not 0 <= ends[0] <= ends[1] <= total:
                raise LayoutError(
                    f"range {':'.join(map(str, ends))} of rank {slot} is not within the {total} "
                    f"indices of the leading {dims} dimensions of {list(shape)}"
                )
            start, stop = ends
            # The dimensions after the flattened ones are whole in every box.
            rest = shape[dims:]
            for box in flat_range_boxes(shape[:dims], start, stop):
                boxes.append((slot, Box(box.start + (0,) * len(rest), box.stop + rest)))
            if start == stop and shape:
                # A rank with an empty range has an empty array; a box of a scalar cannot be empty.
                cut = max(dims, 1)
                boxes.append((slot, Box((0,) * len(shape), (0,) * cut + shape[cut:])))
        if slots is None:
            slots = max(ranges, default=0) + 1
        return cls._of_boxes(shape, boxes, slots)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that are equal in every process for equal layouts."""
        import hashlib

        hasher = hashlib.blake2b(digest_size=16)
        numbers = (self.shape, self.slots, self.contributions, self.reduction)
        hasher.update(repr(numbers).encode())
        for table in self.tables:
            hasher.update(repr((table.dimension_length, table.parts)).encode())
            hasher.update(table.rows.tobytes())
        for column in (self.cell_slot, self.cell_part, self.cell_contribution):
            hasher.update(column.tobytes())
        return hasher.digest()

    @property
    def ndim(self) -> int:
        """Number of tensor dimensions."""
        return len(self.shape)

    @property
    def cells(self) -> int:
        """Number of cells."""
        return len(self.cell_slot)

    def cells_of(self, slot: int) -> range:
        """Return the cells of a rank. Raises LayoutError for a rank beyond the layout."""
        slot = check_int(slot, "rank", LayoutError)
        if slot >= self.slots:
            raise LayoutError(f"rank {slot} of a layout over ranks 0 to {self.slots - 1}")
        # Cells are sorted by rank.
        low, high = self.cell_slot.searchsorted((slot, slot + 1))
        return range(int(low), int(high))

    @cached_property
    def cell_shape(self) -> IntArray:
        """The local shape of every cell, including padding and halos: shape `(cells, dims)`."""
        return self._cell_lengths([table.local_lengths for table in self.tables])

    @cached_property
    def cell_elements(self) -> IntArray:
        """Number of tensor elements of every cell, including halos: shape `(cells,)`."""
        lengths = self._cell_lengths([table.element_lengths for table in self.tables])
        elements: IntArray = lengths.prod(axis=1)
        return elements

    @cached_property
    def cell_offset(self) -> IntArray:
        """Offset of each cell in the memory of its rank, in elements: shape `(cells,)`."""
        sizes = self.cell_shape.prod(axis=1)
        # Cells are sorted by rank: subtract the elements of all previous ranks.
        before = np.cumsum(sizes) - sizes
        offset: IntArray = before - before[np.searchsorted(self.cell_slot, self.cell_slot)]
        return offset

    def _cell_lengths(self, lengths: list[IntArray]) -> IntArray:
        columns = [column[self.cell_part[:, d]] for d, column in enumerate(lengths)]
        return np.array(columns, dtype=np.int64).reshape(self.ndim, self.cells).T

    def local_shape(self, slot: int) -> tuple[int, ...] | None:
        """Return the shape of a rank's memory: its cell's, or `(elements,)` if it has several.

        Return None if the rank holds nothing.
        """
        cells = self.cells_of(slot)
        if not cells:
            return None
        shapes = self.cell_shape[cells.start : cells.stop]
        if len(cells) == 1:
            return tuple(shapes[0].tolist())
        return (int(shapes.prod(axis=1).sum()),)

    @cached_property
    def local_shapes(self) -> dict[int, tuple[int, ...]]:
        """The local shape, as in `local_shape`, of every slot that holds cells."""
        # A single cell on every rank, as in nearly all layouts.
        if len(self.holders) == self.cells:
            return dict(zip(self.holders, map(tuple, self.cell_shape.tolist()), strict=True))
        first = np.searchsorted(self.cell_slot, self.holders)
        count = np.diff(first, append=self.cells)
        sizes = np.add.reduceat(self.cell_shape.prod(axis=1), first).tolist()
        return {
            slot: tuple(self.cell_shape[cell].tolist()) if cells == 1 else (size,)
            for slot, cell, cells, size in zip(self.holders, first, count, sizes, strict=True)
        }

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """The ranks with a cell, in order."""
        return tuple(distinct(self.cell_slot).tolist())

    @cached_property
    def element_holders(self) -> tuple[int, ...]:
        """The ranks with elements, in order; other ranks do not need an array."""
        return tuple(distinct(self.cell_slot[self.cell_elements > 0]).tolist())

    def cell_runs(self, cell: int) -> list[list[tuple[int, int, int, int]]]:
        """Return the runs `(start, stop, local_start, role)` of a cell in each dimension.

        >>> Layout.whole((4, 2), [0], 1).cell_runs(0)
        [[(0, 4, 0, 0)], [(0, 2, 0, 0)]]
        """
        parts = self.cell_part[cell].tolist()
        return [table.runs_of(part) for table, part in zip(self.tables, parts, strict=True)]

    def boxes(self, slot: int) -> tuple[Box, ...]:
        """Return the boxes a rank owns, in the order of its memory, without halos and padding."""
        boxes: list[Box] = []
        for cell in self.cells_of(slot):
            runs = [
                [(start, stop) for start, stop, _, role in runs_of_dim if role == OWNED]
                for runs_of_dim in self.cell_runs(cell)
            ]
            boxes += [
                Box(tuple(a for a, _ in product), tuple(b for _, b in product))
                for product in itertools.product(*runs)
            ]
        return tuple(boxes)

    @cached_property
    def is_padded(self) -> bool:
        """Whether any rank has padding."""
        return any((table.single_runs().role == PAD).any() for table in self.tables)

    def __str__(self) -> str:
        return _layout_text(self)

    def __repr__(self) -> str:
        partial = f", {self.contributions} contributions by {self.reduction}"
        return (
            f"<Layout of {list(self.shape)} on {len(self.holders)} of {self.slots} ranks"
            f"{partial if self.reduction else ''}>"
        )


_MAX_CACHED_HOLDERS = 64


@lru_cache(maxsize=1024)
def _make_whole(
    cls: type[Layout], shape: tuple[int, ...], holders: tuple[int, ...], slots: int
) -> Layout:
    tables = [RunTable(size, 1, [(0, 0, size, 0)]) for size in shape]
    return cls(shape, tables, slots, holders, np.zeros((len(holders), len(tables)), np.int64))


def _check_box(pair: Any, shape: tuple[int, ...]) -> tuple[int, Box]:
    """Return a rank and its box, as ints. Raises LayoutError for a box outside the tensor."""
    try:
        slot, item = pair
        start, stop = item
    except (TypeError, ValueError):
        raise LayoutError(
            f"{pair!r} is not a rank and a box, such as (0, Box((0, 0), (2, 4)))"
        ) from None
    # A fast path for boxes of plain ints: there may be tens of thousands.
    if type(start) is type(stop) is tuple and {*map(type, (slot, *start, *stop))} == {int}:
        box = item if type(item) is Box else Box(start, stop)
    else:
        slot = check_int(slot, "rank", LayoutError)
        box = Box(
            check_ints(start, "start of a box", LayoutError, minimum=None),
            check_ints(stop, "stop of a box", LayoutError, minimum=None),
        )
    if len(box.start) != len(box.stop):
        raise LayoutError(
            f"a box from {box.start} to {box.stop}; both corners need one index per dimension"
        )
    inside = all(0 <= a <= b <= n for a, b, n in zip(*box, shape, strict=False))
    if len(box.start) != len(shape) or not inside:
        raise LayoutError(f"box {box} is outside a tensor of shape {list(shape)}")
    if slot < 0:
        raise LayoutError(f"rank {slot} must not be negative")
    return slot, box


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the range `start:stop` of a flattened array of `shape`, as boxes in order.

    There are at most `2 * len(shape) - 1` boxes: at most one per dimension up to the largest whole
    block, and again after it.

    >>> [str(box) for box in flat_range_boxes((2, 2, 4), 3, 14)]
    ['[0:1, 0:1, 3:4]', '[0:1, 1:2, 0:4]', '[1:2, 0:1, 0:4]', '[1:2, 1:2, 0:2]']
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if len(shape) == 1:
        return [Box((start,), (stop,))]

    def below(index: int, low: int, high: int) -> list[Box]:
        return [
            Box((index, *box.start), (index + 1, *box.stop))
            for box in flat_range_boxes(shape[1:], low, high)
        ]

    # The elements before `start` in its slab of the first dimension, and before `stop` in its slab.
    head, tail = start - first * inner, stop - last * inner
    if first == last and (head > 0 or tail < inner):
        return below(first, head, tail)
    # The end of the first slab, all whole slabs as a box, the beginning of the last slab.
    boxes: list[Box] = []
    if head > 0:
        boxes += below(first, head, inner)
        first += 1
    whole = last + 1 if tail == inner else last
    if first < whole:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (whole, *shape[1:])))
    if whole == last:
        boxes += below(last, 0, tail)
    return boxes


def _layout_text(layout: Layout) -> str:
    """Return the lines of `print(layout)`."""
    tables, slot, holders = layout.tables, layout.cell_slot, layout.holders
    shape = " x ".join(map(str, layout.shape)) or "scalar"
    lines = [f"{shape} on {_name_ranks(holders)}"]
    # Ranks with several boxes, such as flat ranges, are listed by rank, all others by dimension.
    if len(holders) < layout.cells:
        listed = [
            (_name_ranks([rank]), _list_boxes(layout.boxes(rank)))
            for rank in _ends(np.array(holders))
        ]
        lines += _align(listed, len(holders), "rank")
    else:
        lines += _list_dimensions(tables, slot, layout.cell_part)
    if layout.reduction is not None:
        contribution = layout.cell_contribution
        numbers = distinct(contribution)
        lines.append(f"{layout.reduction} of {len(numbers)} contributions")
        listed = [
            (str(number), _name_ranks(distinct(slot[contribution == number])))
            for number in _ends(numbers)
        ]
        lines += _align(listed, len(numbers), "contribution")
    return "\n".join(lines)


def grid_text(layout: Layout) -> str | None:
    """Describe how a grid of ranks shards a tensor, such as `dim 0 over 4`; None for other layouts.

    Cells without elements are ignored.
    """
    held = np.flatnonzero(layout.cell_elements)
    slot, part = layout.cell_slot[held], layout.cell_part[held]
    counts = []
    for dimension, table in enumerate(layout.tables):
        used = distinct(part[:, dimension])
        rows = table.rows[np.isin(table.rows[:, 0], used)]
        runs = [Run(*row) for row in rows.tolist()]
        # Halos, padding and repeated patterns are described in full, not as a grid.
        is_plain = all(run.role == OWNED and run.repeat == 1 for run in runs)
        length = sum(run.length for run in runs)
        if not is_plain or len(runs) != len(used) or length != table.dimension_length:
            return None
        counts.append(len(used))
    # In a grid every product of parts occurs, and each cell is on a slot of its own.
    boxes = len(find_distinct(part)[0]) if part.shape[1] else 1
    if len(distinct(slot)) < len(slot) or boxes != math.prod(counts):
        return None
    words = [f"dim {dimension} over {count}" for dimension, count in enumerate(counts) if count > 1]
    if len(slot) > boxes:
        copies, rest = divmod(len(slot), boxes)
        words.append(f"{copies}{'' if not rest else ' or more'} copies")
    return ", ".join(words) or None


def _list_dimensions(tables: Sequence[RunTable], slot: IntArray, part: IntArray) -> list[str]:
    lines = []
    for dimension, table in enumerate(tables):
        column = part[:, dimension]
        used = distinct(column)
        if len(used) == 1 and table.runs_of(int(used[0])) == _cover(table):
            lines.append(f"dimension {dimension} whole")
            continue
        lines.append(f"dimension {dimension} in {table.parts} parts")
        listed = [
            (_list_runs(table, number), _name_ranks(slot[column == number]))
            for number in _ends(used)
        ]
        lines += _align(listed, len(used), "part")
    return lines


def _ends(numbers: IntArray) -> list[int]:
    """Return all numbers, or the first and the last of many."""
    if len(numbers) > _MAX_LINES:
        numbers = np.append(numbers[: _MAX_LINES - _LAST_LINES - 1], numbers[-_LAST_LINES:])
    return [int(number) for number in numbers]


def _align(listed: Sequence[tuple[str, str]], count: int, what: str) -> list[str]:
    width = max((len(left) for left, _ in listed), default=0)
    lines = [f"  {left:<{width}}  {right}" for left, right in listed]
    if count > len(listed):
        lines.insert(len(lines) - _LAST_LINES, f"  ... {count - len(listed):,} {what}s more")
    return lines


def _cover(table: RunTable) -> list[tuple[int, int, int, int]]:
    return [(0, table.dimension_length, 0, OWNED)] if table.dimension_length else []


def _name_ranks(ranks: Sequence[int] | IntArray) -> str:
    return ranks_text([int(rank) for rank in ranks]) if len(ranks) else "no ranks"


def _list_runs(table: RunTable, part: int) -> str:
    """Return the indices of a part as text: `0:4`, `0:2, 4:6, 8:10` or `0:2 and 62 more
    every 4`.
    """
    words = []
    rows = table.rows[table.rows[:, 0] == part]
    for row in rows[:_MAX_RUNS].tolist():
        run = Run(*row)
        role = "" if run.role in (OWNED, PAD) else f" ({ROLE_NAMES[run.role]})"
        if run.role == PAD:
            words.append(f"{run.length} of padding")
            continue
        starts = [run.start + run.global_step * i for i in range(min(run.repeat, _MAX_RUNS))]
        shown = starts if run.repeat <= _MAX_RUNS else starts[:1]
        words += [f"{start}:{start + run.length}{role}" for start in shown]
        if run.repeat > _MAX_RUNS:
            words[-1] += f" and {run.repeat - 1:,} more every {run.global_step}"
    if len(rows) > _MAX_RUNS:
        words.append(f"{len(rows) - _MAX_RUNS:,} runs more")
    return ", ".join(words) or "nothing"


def _list_boxes(boxes: Sequence[object]) -> str:
    words = [str(box) for box in boxes[:_MAX_RUNS]]
    if len(boxes) > _MAX_RUNS:
        words.append(f"and {len(boxes) - _MAX_RUNS:,} boxes more")
    return " ".join(words) or "nothing"
