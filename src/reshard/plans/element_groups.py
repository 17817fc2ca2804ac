"""Element groups: elements that the same slots hold and the same slots need.

A *region* of a target is a set of elements that the same target cells need, with the same
contributions combined. Regions are disjoint, and every cell is a union of regions::

    part 0  |------------|              regions  a    b     c
    part 1        |--------------|      needed   {0}  {0,1} {1}

A *group* is the part of a region that comes from the same contribution and the same set of
holders. All its elements may be sent by the same source cells and go to the same target cells, so
a group can be divided among senders and forwarded among receivers in any way.

1. A target cell needs all its elements, stale halos included. In a layout in which all halos are
   fresh, the target *holds* what it needs, and `holders` finds the other cells that do.
2. Cells that are filled from the same source contributions need the same elements, whichever
   contribution of the target they carry.
3. If no two keys share an element, the keys are the regions. Otherwise every dimension is split at
   all boundaries, and a region is a set of parts in each dimension.
4. The regions form a layout with a slot for each. The planner finds the routes into them.
5. The holders of a route are all cells that have its elements, at most one for each slot.
6. A group is a product of pieces, written out as boxes. Along each dimension a box lies in a single
   run of every part concerned, so that it can be located in any of the cells.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from reshard._records import Record
from reshard.errors import PlanError
from reshard.geometry.holders import DimensionHolders, Holders, find_holders
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.overlap import Overlap
from reshard.geometry.routes import RouteFinder, Routes
from reshard.layout import Layout
from reshard.runs import FRESH_HALO, HALO, IntArray, RunTable, find_distinct, ragged_rows


class Regions(Record, eq=False):
    """The regions of a target, and the cells that need each.

    Region `i` is cell `i` of `layout`; its target cells are `cell[begin[i]:begin[i + 1]]`, in
    order. `combines[c]` are the source contributions of the regions that carry `c`. `needed` has
    the dimensions of the target as holders of what they need. Local offsets in `layout` are those
    in the target's parts only if `is_plain`.
    """

    layout: Layout
    combines: tuple[tuple[int, ...], ...]
    begin: IntArray
    cell: IntArray
    needed: tuple[DimensionHolders, ...]
    is_plain: bool


@lru_cache(maxsize=32)
def find_regions(target: Layout, combines: tuple[tuple[int, ...], ...]) -> Regions:
    """Return the regions of `target`; its contribution `c` combines `combines[c]` of the source.

    Raises:
        PlanError: a part that contains an index of its dimension twice.
    """
    distinct = tuple(dict.fromkeys(combines))
    # Contributions that combine the same sources need the same elements: they get the same label.
    label = np.array([distinct.index(sources) for sources in combines], dtype=np.int64)
    wanting = target.replace(
        tables=[_refresh_halos(table) for table in target.tables],
        cell_contribution=label[target.cell_contribution],
        contributions=len(distinct),
        reduction="sum" if len(distinct) > 1 else None,
    )
    holders = find_holders(wanting)
    begin, cells = _find_cells_of_keys(wanting, holders)
    if holders.is_exclusive:
        first = cells[begin[:-1]]
        layout = _give_slots(wanting, wanting.tables, wanting.cell_part[first], first)
        regions = Regions(layout, distinct, begin, cells, holders.dimensions, True)
    else:
        regions = _cut_regions(wanting, holders, distinct, begin, cells)
    _check_complete(target, regions)
    return regions


def _refresh_halos(table: RunTable) -> RunTable:
    runs = table.single_runs()
    if not (runs.role == HALO).any():
        return table
    fresh = replace(runs, role=np.where(runs.role == HALO, FRESH_HALO, runs.role))
    columns = (fresh.part, fresh.start, fresh.length, fresh.local_start, fresh.role)
    return RunTable.from_columns(table.dimension_length, table.parts, *columns)


def _find_cells_of_keys(wanting: Layout, holders: Holders) -> tuple[IntArray, IntArray]:
    """Return all cells of each key, `cells[begin[k]:begin[k + 1]]`.

    A slot with two cells of a key needs it twice, although it holds it once.
    """
    key = holders.key_of(wanting.cell_contribution, list(wanting.cell_part.T))
    cells = np.argsort(key, kind="stable")
    return np.searchsorted(key[cells], np.arange(len(holders.copies.begin))), cells


def _give_slots(
    wanting: Layout, tables: tuple[RunTable, ...], part: IntArray, cells: IntArray
) -> Layout:
    """Return a layout with a slot for each row of `part`, with the contribution of its cell."""
    return wanting.replace(
        tables=tables,
        slots=max(len(cells), 1),
        cell_slot=np.arange(len(cells)),
        cell_part=part,
        cell_contribution=wanting.cell_contribution[cells],
    )


def _cut_regions(
    wanting: Layout,
    holders: Holders,
    combines: tuple[tuple[int, ...], ...],
    cell_begin: IntArray,
    cells: IntArray,
) -> Regions:
    """Return the regions as products of a set of parts in each dimension."""
    # The product, by dimension, of the sets that contain the key's part: a row for each key and
    # each region in it.
    key = np.arange(len(cell_begin) - 1)
    key_cell = cells[cell_begin[:-1]]
    sets: list[IntArray] = []
    for d, dimension in enumerate(holders.dimensions):
        part = wanting.cell_part[key_cell[key], d]
        begin, of_part = _find_sets_of_parts(dimension)
        row, entry = ragged_rows(begin, part)
        key = key[row]
        sets = [*(column[row] for column in sets), of_part[entry]]
    carried = wanting.cell_contribution[key_cell[key]]
    described = np.column_stack((carried, *sets))
    rows, first, region = find_distinct(described)
    # The cells of a region are those of all its keys.
    row, entry = ragged_rows(cell_begin, key)
    of_cell, cell = region[row], cells[entry]
    order = np.lexsort((cell, of_cell))
    tables = tuple(
        _build_table_of_sets(dimension, size)
        for dimension, size in zip(holders.dimensions, wanting.shape, strict=True)
    )
    return Regions(
        _give_slots(wanting, tables, rows[:, 1:], key_cell[key[first]]),
        combines,
        np.searchsorted(of_cell[order], np.arange(len(rows) + 1)),
        cell[order],
        holders.dimensions,
        False,
    )


def _find_sets_of_parts(dimension: DimensionHolders) -> tuple[IntArray, IntArray]:
    """Return the sets that contain each part `p`, as `of_part[begin[p]:begin[p + 1]]`."""
    of_set = np.repeat(np.arange(dimension.sets), np.diff(dimension.set_begin))
    order = np.argsort(dimension.set_part, kind="stable")
    begin = np.searchsorted(dimension.set_part[order], np.arange(dimension.parts + 1))
    return begin, of_set[order]


def _build_table_of_sets(dimension: DimensionHolders, length: int) -> RunTable:
    """Return a run table whose parts are the sets of a dimension."""
    size = dimension.stop - dimension.start
    # In reverse, so that stretches are not joined: neighbours in the tensor may be apart in a part
    # that contains both.
    order = np.lexsort((-dimension.start, dimension.holder_set))
    part = dimension.holder_set[order]
    before = np.cumsum(size[order]) - size[order]
    local = before - before[np.searchsorted(part, part)]
    return RunTable.from_columns(
        length, max(dimension.sets, 1), part, dimension.start[order], size[order], local
    )


def _check_complete(target: Layout, regions: Regions) -> None:
    count = np.zeros(target.cells, dtype=np.int64)
    elements = np.repeat(regions.layout.cell_elements, np.diff(regions.begin))
    np.add.at(count, regions.cell, elements)
    short = np.flatnonzero(count != target.cell_elements)
    if len(short):
        raise PlanError(
            f"cell {short[0]} of the target has {target.cell_elements[short[0]]} elements, but "
            f"only {count[short[0]]} distinct ones; a part may contain each index once"
        )


class GroupBoxes(NamedTuple):
    """Boxes of groups: box `i` is in `group[i]`.

    `start` and `shape` have shape `(boxes, dims)`; `piece` is the piece of each dimension's
    overlap that contains the box.
    """

    group: IntArray
    start: IntArray
    shape: IntArray
    piece: IntArray

    def take(self, index: IntArray) -> GroupBoxes:
        """Return the boxes at `index`, in that order."""
        return GroupBoxes(*(column[index] for column in self))


class ElementGroups(Record, eq=False):
    """The groups of a plan, as columns of shape `(groups,)`.

    `order` is the index of a group's contribution among those that are combined. Group `i` is held
    by the source cells `holder[holder_begin[i]:holder_begin[i + 1]]`, at most one for each slot,
    and needed by the target cells `wanting[wanting_begin[i]:wanting_begin[i + 1]]`, both in the
    order of slots. `is_alone` is whether no other contribution is combined with it.
    """

    source: Layout
    target: Layout
    regions: Regions
    overlaps: tuple[Overlap, ...]
    order: IntArray
    pair: tuple[IntArray, ...]
    elements: IntArray
    is_alone: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    holder_begin: IntArray
    holder: IntArray
    wanting_begin: IntArray
    wanting: IntArray

    def __len__(self) -> int:
        return len(self.order)

    @cached_property
    def boxes(self) -> GroupBoxes:
        """Every group written out as boxes, in row-major order."""
        # The product of the pieces of each dimension: rows are repeated for each piece.
        group = np.arange(len(self))
        pieces: list[IntArray] = []
        for d, overlap in enumerate(self.overlaps):
            row, piece_of_row = ragged_rows(overlap.piece_begin, self.pair[d][group])
            group = group[row]
            pieces = [*(column[row] for column in pieces), piece_of_row]
        size = (len(group), len(self.overlaps))
        start, shape, piece = (np.empty(size, dtype=np.int64) for _ in range(3))
        for d, (overlap, column) in enumerate(zip(self.overlaps, pieces, strict=True)):
            start[:, d], shape[:, d] = overlap.start[column], overlap.length[column]
            piece[:, d] = column
        return GroupBoxes(group, start, shape, piece)

    @cached_property
    def elements_before(self) -> IntArray:
        """The number of elements in all boxes before each box, those of other groups included."""
        elements: IntArray = self.boxes.shape.prod(axis=1)
        return np.cumsum(elements) - elements

    def source_start(self, cell: IntArray, start: IntArray, piece: IntArray) -> IntArray:
        """Return the offsets of boxes in the local arrays of source cells: `(boxes, dims)`."""
        local = np.empty_like(start)
        for d, overlap in enumerate(self.overlaps):
            stretch = overlap.stretch[piece[:, d]]
            first = overlap.holders.local_start(stretch, self.source.cell_part[cell, d])
            local[:, d] = first + start[:, d] - overlap.holders.start[stretch]
        return local

    def target_start(self, cell: IntArray, start: IntArray, piece: IntArray) -> IntArray:
        """Return the offsets of boxes in the local arrays of target cells: `(boxes, dims)`."""
        local = np.empty_like(start)
        for d, overlap in enumerate(self.overlaps):
            if self.regions.is_plain:
                first = overlap.target_local[piece[:, d]]
                local[:, d] = first + start[:, d] - overlap.start[piece[:, d]]
                continue
            needed = self.regions.needed[d]
            stretch = np.searchsorted(needed.start, start[:, d], side="right") - 1
            first = needed.local_start(stretch, self.target.cell_part[cell, d])
            local[:, d] = first + start[:, d] - needed.start[stretch]
        return local


@lru_cache(maxsize=128)
def find_element_groups(plan: LayoutChange) -> ElementGroups:
    """Return the groups of a plan.

    Raises:
        PlanError: an element that no source slot holds, or a part that contains an index twice.
    """
    regions = find_regions(plan.target, plan.combines)
    finder = RouteFinder.between(plan.source, regions.layout, regions.combines)
    try:
        routes = finder.into(np.arange(regions.layout.cells))
    except PlanError:
        # The same routes into the target raise an error that names a rank.
        for slot in plan.target.holders:
            plan.routes_into(slot)
        raise
    holder_begin, holder = _find_holder_cells(plan.source, plan.holders, finder.overlaps, routes)
    counts = np.array([len(sources) for sources in regions.combines], dtype=np.int64)
    row, entry = ragged_rows(regions.begin, routes.target_cell)
    return ElementGroups(
        plan.source,
        plan.target,
        regions,
        finder.overlaps,
        routes.order,
        routes.pair,
        routes.elements,
        counts[regions.layout.cell_contribution[routes.target_cell]] == 1,
        holder_begin,
        holder,
        np.searchsorted(row, np.arange(len(routes.target_cell) + 1)),
        regions.cell[entry],
    )


def _find_holder_cells(
    source: Layout, holders: Holders, overlaps: tuple[Overlap, ...], routes: Routes
) -> tuple[IntArray, IntArray]:
    """Return all cells that hold the elements of each route, at most one for each slot."""
    route = np.arange(len(routes.source_cell))
    if holders.is_exclusive:
        # An element has a single key, so the key of the selected cell has all its holders.
        key_of_cell = np.empty(source.cells, dtype=np.int64)
        counts = np.diff(holders.copies.begin)
        key_of_cell[holders.copies.cells] = np.repeat(np.arange(len(counts)), counts)
        key = key_of_cell[routes.source_cell]
    else:
        parts: list[IntArray] = []
        for overlap, pair in zip(overlaps, routes.pair, strict=True):
            holder_set = overlap.pair_set[pair[route]]
            row, member = ragged_rows(overlap.holders.set_begin, holder_set)
            route = route[row]
            parts = [*(column[row] for column in parts), overlap.holders.set_part[member]]
        key = holders.key_of(source.cell_contribution[routes.source_cell[route]], parts)
        route, key = route[key >= 0], key[key >= 0]
    row, entry = ragged_rows(holders.copies.begin, key)
    route, cell = route[row], holders.copies.cells[entry]
    slots = source.slots
    # If a slot holds a group in several cells, the first is taken.
    _, first_of_slot, _ = find_distinct(route * slots + source.cell_slot[cell])
    route, cell = route[first_of_slot], cell[first_of_slot]
    return np.searchsorted(route, np.arange(len(routes.source_cell) + 1)), cell
