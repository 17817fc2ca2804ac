"""Element groups: elements that the same slots hold and the same slots need.

A *group* is what one region of the target takes of one contribution from one set of holders. All
its elements may come from the same source cells and go to the same target cells, so a group can
be divided among senders and forwarded among receivers in any way.

1. The regions of the target take the place of the target (`target_regions`), and the planner finds
   the routes that end in each of them.
2. The holders of a route are all cells that have its elements, one for each slot.
3. A group is a product of pieces, and written out as boxes; along each dimension a box lies in
   one run of every part concerned, so that it can be found in any of the cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from reshard.errors import PlanError
from reshard.geometry.holders import Holders
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.overlap import Overlap
from reshard.geometry.routes import RouteFinder, Routes
from reshard.layout import Layout
from reshard.plans.hosts.target_regions import Regions, find_regions
from reshard.runs import IntArray, ragged_arange


@dataclass(frozen=True, slots=True, eq=False)
class GroupBoxes:
    """The boxes of all groups, those of group `i` are `begin[i]:begin[i + 1]`, in row-major order.

    `start` and `shape` have shape `(boxes, dims)`; `piece` is the piece of each dimension's
    overlap that a box comes from. `before` counts the elements of all boxes before each one,
    those of other groups included.
    """

    begin: IntArray
    start: IntArray
    shape: IntArray
    piece: IntArray
    before: IntArray


@dataclass(frozen=True, eq=False)
class ElementGroups:
    """The groups of a plan, as columns of shape `(groups,)`.

    `order` is the place of a group's contribution among those that are combined. Group `i` is held
    by the source cells `holder[holder_begin[i]:holder_begin[i + 1]]`, one a slot, and wanted by
    the target cells `wanting[wanting_begin[i]:wanting_begin[i + 1]]`, both in order of slots.
    `is_alone` says that nothing else is combined with it.
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
        """Every group written out as boxes."""
        # The product of the pieces of each dimension: rows are repeated once for each piece.
        group = np.arange(len(self))
        pieces: list[IntArray] = []
        for d, overlap in enumerate(self.overlaps):
            pair = self.pair[d][group]
            low = overlap.piece_begin[pair]
            count = overlap.piece_begin[pair + 1] - low
            row = np.repeat(np.arange(len(group)), count)
            group = group[row]
            pieces = [column[row] for column in pieces]
            pieces.append(np.repeat(low, count) + ragged_arange(count))
        size = (len(group), len(self.overlaps))
        start, shape, piece = (np.empty(size, dtype=np.int64) for _ in range(3))
        for d, (overlap, column) in enumerate(zip(self.overlaps, pieces, strict=True)):
            start[:, d], shape[:, d] = overlap.start[column], overlap.length[column]
            piece[:, d] = column
        elements = shape.prod(axis=1)
        begin = np.searchsorted(group, np.arange(len(self) + 1))
        return GroupBoxes(begin, start, shape, piece, np.cumsum(elements) - elements)

    def source_start(self, cell: IntArray, start: IntArray, piece: IntArray) -> IntArray:
        """Where boxes begin in the local arrays of source cells: shape `(boxes, dims)`."""
        local = np.empty_like(start)
        for d, overlap in enumerate(self.overlaps):
            stretch = overlap.stretch[piece[:, d]]
            first = overlap.holders.local_start(stretch, self.source.cell_part[cell, d])
            local[:, d] = first + start[:, d] - overlap.holders.start[stretch]
        return local

    def target_start(self, cell: IntArray, start: IntArray, piece: IntArray) -> IntArray:
        """Where boxes begin in the local arrays of target cells: shape `(boxes, dims)`."""
        local = np.empty_like(start)
        for d, overlap in enumerate(self.overlaps):
            if self.regions.is_plain:
                first = overlap.target_local[piece[:, d]]
                local[:, d] = first + start[:, d] - overlap.start[piece[:, d]]
                continue
            wanted = self.regions.wanted[d]
            stretch = np.searchsorted(wanted.start, start[:, d], side="right") - 1
            first = wanted.local_start(stretch, self.target.cell_part[cell, d])
            local[:, d] = first + start[:, d] - wanted.start[stretch]
        return local


@lru_cache(maxsize=128)
def find_element_groups(plan: LayoutChange) -> ElementGroups:
    """The groups of a plan.

    Raises:
        PlanError: an element that no source slot holds, or a part that has an index twice.
    """
    regions = find_regions(plan.target, plan.combines)
    finder = RouteFinder.between(plan.source, regions.layout, regions.combines)
    try:
        routes = finder.into(np.arange(regions.layout.cells))
    except PlanError:
        # The same is missing in the target, whose slots are ranks that an error can name.
        for slot in plan.target.holders:
            plan.routes_into(slot)
        raise
    holder_begin, holder = _find_holder_cells(plan.source, plan.holders, finder.overlaps, routes)
    counts = np.array([len(sources) for sources in regions.combines], dtype=np.int64)
    wanted = np.diff(regions.begin)[routes.target_cell]
    first = regions.begin[routes.target_cell]
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
        np.concatenate(([0], np.cumsum(wanted))),
        regions.cell[np.repeat(first, wanted) + ragged_arange(wanted)],
    )


def _find_holder_cells(
    source: Layout, holders: Holders, overlaps: tuple[Overlap, ...], routes: Routes
) -> tuple[IntArray, IntArray]:
    """For each route all cells that hold its elements, one for each slot."""
    route = np.arange(len(routes.source_cell))
    if holders.is_exclusive:
        # An element has one key, so the chosen cell's key has all that hold it.
        key_of_cell = np.empty(source.cells, dtype=np.int64)
        counts = np.diff(holders.cell_begin)
        key_of_cell[holders.cells] = np.repeat(np.arange(len(counts)), counts)
        key = key_of_cell[routes.source_cell]
    else:
        parts: list[IntArray] = []
        for overlap, pair in zip(overlaps, routes.pair, strict=True):
            begin, chosen = overlap.holders.set_begin, overlap.pair_set[pair[route]]
            count = begin[chosen + 1] - begin[chosen]
            row = np.repeat(np.arange(len(route)), count)
            member = np.repeat(begin[chosen], count) + ragged_arange(count)
            route = route[row]
            parts = [*(column[row] for column in parts), overlap.holders.set_part[member]]
        key = holders.key_of(source.cell_contribution[routes.source_cell[route]], parts)
        route, key = route[key >= 0], key[key >= 0]
    first = holders.cell_begin[key]
    count = holders.cell_begin[key + 1] - first
    route = np.repeat(route, count)
    cell = holders.cells[np.repeat(first, count) + ragged_arange(count)]
    slots = source.slots
    # A slot may hold a group in several cells; the first of them stands for it.
    _, one_a_slot = np.unique(route * slots + source.cell_slot[cell], return_index=True)
    route, cell = route[one_a_slot], cell[one_a_slot]
    return np.searchsorted(route, np.arange(len(routes.source_cell) + 1)), cell
