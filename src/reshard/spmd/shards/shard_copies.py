"""Copies of shards between layouts within one process, as views where possible.

A change of layouts lists the boxes that each rank needs. Arrays of `spmd` are immutable, so most
changes need no copy, and work on any device and with the gradients of any library:

1. ranks that need the same box share an array;
2. a box within one shard is a view of it;
3. boxes that are adjacent along a dimension are concatenated by a single call;
4. if every rank needs pieces of all shards, and the source is sharded along one dimension, the
   shards are concatenated once, and each rank gets a view of the whole;
5. contributions to a whole shard are reduced directly;
6. everything else is written box by box into a new array.

Contributions are combined as by `reshard.execution`, to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import sub
from typing import Any

import numpy as np

from reshard.execution.arrays import check_reduction, combine, identity, scale
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Box, Layout
from reshard.spmd.core.backend import Library

Shards = tuple[Any, ...]
Movement = Callable[[Shards], Shards]
# Where a piece of a shard comes from and goes to: the source shard's number, the window in it
# (None for all of it), the place in the target, and its place among the contributions there.
_Piece = tuple[int, tuple[slice, ...] | None, tuple[slice, ...], int]


def copies(
    change: LayoutChange, sources: Sequence[int], targets: Sequence[int], library: Library
) -> Movement:
    """Return a function from the shards of the ranks `sources` to shards for the ranks `targets`.

    >>> import reshard
    >>> from reshard.spmd.core.backend import library
    >>> mesh = reshard.DeviceMesh.of(x=2)
    >>> rows, columns = (reshard.spec(mesh, text).layout((2, 4)) for text in ("x, -", "-, x"))
    >>> move = copies(LayoutChange(rows, columns), (0, 1), (0, 1), library("numpy"))
    >>> move((np.array([[0, 1, 2, 3]]), np.array([[4, 5, 6, 7]])))[1].tolist()
    [[2, 3], [6, 7]]
    """
    movement = _take_parts(change, sources, targets)
    if movement is not None:
        return movement
    position = {rank: number for number, rank in enumerate(sources)}
    pieces = _find_pieces(change, targets, position)
    makers: list[Callable[[Shards], Any]] = []
    which: list[int] = []
    # Ranks with equal boxes share an array: each distinct box has a maker, and `which` is the
    # number of each rank's maker.
    maker_of: dict[tuple[bytes, int], int] = {}
    target = change.target
    # The first cell of each rank, since cells are sorted by rank.
    cells = np.searchsorted(target.cell_slot, targets).tolist()
    for rank, cell in zip(targets, cells, strict=True):
        box = (target.cell_part[cell].tobytes(), int(target.cell_contribution[cell]))
        if box not in maker_of:
            maker_of[box] = len(makers)
            shape = target.local_shapes[rank]
            makers.append(_make_shard(change, pieces.get(rank, []), cell, shape, library))
        which.append(maker_of[box])
    # Joining the whole copies it once, which pays if ranks take more than two pieces each.
    is_many = len(change.transfers) > 2 * len(targets) > 2
    if is_many and change.source.contributions == 1 and _is_plain(change):
        through = _join_the_whole(change, sources, targets, library)
        if through is not None:
            return through
    if len(makers) == len(which):
        return lambda shards: tuple([make(shards) for make in makers])

    def moved(shards: Shards) -> Shards:
        arrays = [make(shards) for make in makers]
        return tuple([arrays[number] for number in which])

    return moved


def _take_parts(
    change: LayoutChange, sources: Sequence[int], targets: Sequence[int]
) -> Movement | None:
    """Return a movement in which each rank takes a view of its shard; None if ranks need others'.

    It is found without the boxes that ranks send each other.
    """
    before, after = _find_boxes(change.source), _find_boxes(change.target)
    if before is None or after is None or not before.keys() >= set(targets):
        return None
    position = {rank: number for number, rank in enumerate(sources)}
    # Ranks with equal boxes share an array.
    places: dict[Box, int] = {}
    pieces: list[tuple[int, tuple[slice, ...] | None]] = []
    for rank in targets:
        own, needed = before[rank], after[rank]
        if own.intersect(needed) != needed:
            return None
        if needed not in places:
            places[needed] = len(pieces)
            start = tuple(map(sub, needed.start, own.start))
            window = None if own == needed else _find_slices(start, needed.shape)
            pieces.append((position[rank], window))
    which = [places[after[rank]] for rank in targets]

    def moved(shards: Shards) -> Shards:
        arrays = [shards[n] if window is None else shards[n][window] for n, window in pieces]
        return tuple([arrays[number] for number in which])

    return moved


def _find_boxes(layout: Layout) -> dict[int, Box] | None:
    """Return the box of each rank; None if a rank's shard is not exactly a box of elements."""
    if layout.cells != len(layout.holders) or layout.contributions > 1:
        return None
    columns = []
    for dimension, table in enumerate(layout.tables):
        runs = table.single_runs()
        # A part without a run is empty.
        is_interval = len(runs.part) == table.parts and bool((np.diff(runs.part) == 1).all())
        if not is_interval or runs.role.any() or not runs.length.all():
            return None
        part = layout.cell_part[:, dimension]
        columns.append((runs.start[part].tolist(), runs.stop[part].tolist()))
    starts = zip(*(start for start, _ in columns), strict=True)
    stops = zip(*(stop for _, stop in columns), strict=True)
    # Without dimensions there are no columns.
    boxes = map(Box, starts, stops) if columns else [Box((), ())] * layout.cells
    return dict(zip(layout.holders, boxes, strict=True))


def _join_the_whole(
    change: LayoutChange, sources: Sequence[int], targets: Sequence[int], library: Library
) -> Movement | None:
    """Join the source once; return None if it is not split into intervals of one dimension."""
    boxes: dict[Box, int] = {}
    for number, rank in enumerate(sources):
        own = change.source.boxes(rank)
        # A shard with a halo is larger than its own box.
        if len(own) > 1 or not _is_all_of(own, change.source, rank):
            return None
        if own and all(low < high for low, high in zip(own[0].start, own[0].stop, strict=True)):
            boxes.setdefault(own[0], number)
    axes = {
        axis
        for box in boxes
        for axis, size in enumerate(change.source.shape)
        if box.stop[axis] - box.start[axis] != size
    }
    needed = [change.target.boxes(rank) for rank in targets]
    if len(axes) != 1 or any(len(own) != 1 for own in needed):
        return None
    if not all(
        _is_all_of(own, change.target, rank) for own, rank in zip(needed, targets, strict=True)
    ):
        return None
    (axis,) = axes
    parts = sorted(boxes, key=lambda box: box.start[axis])
    # Boxes that overlap, or leave a gap, cannot be joined by a single call.
    if any(a.stop[axis] != b.start[axis] for a, b in itertools.pairwise(parts)):
        return None
    order = [boxes[box] for box in parts]
    views = [tuple(map(slice, own[0].start, own[0].stop)) for own in needed]
    concat = library.namespace.concat

    def moved(shards: Shards) -> Shards:
        whole = concat([shards[number] for number in order], axis=axis)
        return tuple([whole[view] for view in views])

    return moved


def _is_all_of(boxes: Sequence[Box], layout: Layout, rank: int) -> bool:
    """Return whether a rank's shard consists of exactly its single box, or is empty."""
    shape = layout.local_shape(rank) or ()
    if not boxes:
        return 0 in shape
    return shape == tuple(map(sub, boxes[0].stop, boxes[0].start))


def _is_plain(change: LayoutChange) -> bool:
    # Each holder has a single cell: its shard is a single box.
    single = all(layout.cells == len(layout.holders) for layout in (change.source, change.target))
    numerator, denominator = change.scale
    return (
        single
        and change.target.contributions == 1
        and numerator == denominator
        and not change.target.is_padded
    )


def _find_slices(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple([slice(low, low + size) for low, size in zip(start, shape, strict=True)])


def _find_pieces(
    change: LayoutChange, targets: Sequence[int], position: Mapping[int, int]
) -> dict[int, list[_Piece]]:
    """Return the pieces of each target rank's shard."""
    rows, shapes = change.transfers, change.source.local_shapes
    if len(targets) < len(change.target.holders):
        # Over processes, the shards that other ranks' pieces are of are not here.
        rows = rows.take(np.isin(rows.target_slot, targets))
    # Of a rank by contribution, then by offset: pieces are in order along an axis, and the first
    # contribution is written before others are combined with it.
    order = np.lexsort((*rows.target_start.T[::-1], rows.order, rows.target_slot))
    columns = (rows.target_slot, rows.order, rows.source_slot)
    boxes = (rows.source_start, rows.target_start, rows.shape)
    pieces: dict[int, list[_Piece]] = {}
    for target, contribution, source, start, place, shape in zip(
        *(column[order].tolist() for column in (*columns, *boxes)), strict=True
    ):
        # A piece that is the whole shard needs no view.
        window = None if tuple(shape) == shapes[source] else _find_slices(start, shape)
        piece = (position[source], window, _find_slices(place, shape), contribution)
        pieces.setdefault(target, []).append(piece)
    return pieces


def _make_shard(
    change: LayoutChange,
    pieces: list[_Piece],
    cell: int,
    shape: tuple[int, ...],
    library: Library,
) -> Callable[[Shards], Any]:
    """Return a function that makes the shard of a rank, whose first cell is `cell`."""
    combine_two = partial(combine, change.source.reduction or "sum")
    whole = tuple(slice(0, size) for size in shape)
    if not change.combines[int(change.target.cell_contribution[cell])]:
        return _fill_identity(change.target, cell, library)
    if pieces and all(place == whole for _, _, place, _ in pieces):
        make = _combine_pieces(pieces, combine_two)
    else:
        axis = None if change.target.is_padded else _find_joined_axis(pieces, whole)
        if axis is None:
            make = _write_pieces(pieces, shape, combine_two, library)
        else:
            make = _concatenate_pieces(pieces, axis, library)
    numerator, denominator = change.scale
    if numerator == denominator:
        return make

    def scaled(shards: Shards) -> Any:
        # A mean of integers is not exact.
        check_reduction(change.source.reduction or "sum", library.dtype_of(shards[0]))
        return scale(make(shards), numerator, denominator)

    return scaled


def _fill_identity(layout: Layout, cell: int, library: Library) -> Callable[[Shards], Any]:
    """Return a contribution filled with the identity of the reduction; its padding is 0."""
    from reshard.execution.engine import element_positions

    shape = tuple(layout.cell_shape[cell].tolist())
    positions = element_positions(layout, cell) if layout.is_padded else None
    reduction = layout.reduction or "sum"

    def made(shards: Shards) -> Any:
        value = identity(reduction, library.dtype_of(shards[0]))
        filled = library.filled(shape, value if positions is None else 0, shards[0])
        if positions is not None:
            filled[positions] = value
        return library.linked(filled, shards[0])

    return made


def _take_piece(shards: Shards, piece: _Piece) -> Any:
    index, window, _, _ = piece
    return shards[index] if window is None else shards[index][window]


def _combine_pieces(
    pieces: list[_Piece], combine: Callable[[Any, Any], Any]
) -> Callable[[Shards], Any]:
    if len(pieces) == 1:
        return lambda shards: _take_piece(shards, pieces[0])

    def made(shards: Shards) -> Any:
        return reduce(combine, [_take_piece(shards, piece) for piece in pieces])

    return made


def _find_joined_axis(pieces: list[_Piece], whole: tuple[slice, ...]) -> int | None:
    """Return the dimension along which the pieces are adjacent, or None if there is none."""
    if not pieces or any(combines for _, _, _, combines in pieces):
        return None
    axes = {
        axis
        for _, _, place, _ in pieces
        for axis, (part, full) in enumerate(zip(place, whole, strict=True))
        if part != full
    }
    return axes.pop() if len(axes) == 1 else None


def _concatenate_pieces(
    pieces: list[_Piece], axis: int, library: Library
) -> Callable[[Shards], Any]:
    concat = library.namespace.concat
    return lambda shards: concat([_take_piece(shards, piece) for piece in pieces], axis=axis)


def _write_pieces(
    pieces: list[_Piece],
    shape: tuple[int, ...],
    combine: Callable[[Any, Any], Any],
    library: Library,
) -> Callable[[Shards], Any]:
    # Each contribution is written to a new array: arrays that were combined are not written to
    # afterwards, because autograd would not record that correctly.
    rounds: list[list[_Piece]] = []
    for piece in pieces:
        if not rounds or piece[3] > rounds[-1][0][3]:
            rounds.append([])
        rounds[-1].append(piece)

    def write(shards: Shards, few: list[_Piece]) -> Any:
        filled = library.filled(shape, 0, shards[0])
        for piece in few:
            filled[piece[2]] = _take_piece(shards, piece)
        return filled

    def made(shards: Shards) -> Any:
        if not rounds:
            return library.linked(library.filled(shape, 0, shards[0]), shards[0])
        return reduce(combine, [write(shards, few) for few in rounds])

    return made
