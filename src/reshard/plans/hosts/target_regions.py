"""Regions of a target: the elements that the same slots want.

A replicated target wants each element many times. A *region* is a set of elements that the
same target cells want, with the same contributions combined; regions are disjoint, and every
cell is made of whole regions::

    part 0  |------------|              regions  a    b     c
    part 1        |--------------|      wanted   {0}  {0,1} {1}

1. A target cell wants all it has, stale halos included: as a layout in which every halo is
   fresh, the target *holds* what it wants, and `holders` answers who else does.
2. Cells that are filled from the same source contributions want the same, whichever
   contribution of the target they carry.
3. Where no two keys share an element, the keys are the regions. Otherwise every dimension is
   cut at all boundaries, and a region is one set of parts a dimension.

The regions are a layout themselves, one slot each, so that the planner can be asked where each
of them comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from reshard.errors import PlanError
from reshard.geometry.holders import DimensionHolders, Holders, find_holders
from reshard.layout import Layout
from reshard.runs import FRESH_HALO, HALO, IntArray, RunTable, ragged_arange


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """The regions of a target, and the cells that want each.

    Region `i` is cell `i` of `layout`; its target cells are `cell[begin[i]:begin[i + 1]]`, in
    order. `combines[c]` are the source contributions of the regions that carry `c`. `wanted`
    has the dimensions of the target as holders of what they want; the local positions of
    `layout` are those of the target's parts only where `is_plain`.
    """

    layout: Layout
    combines: tuple[tuple[int, ...], ...]
    begin: IntArray
    cell: IntArray
    wanted: tuple[DimensionHolders, ...]
    is_plain: bool


@lru_cache(maxsize=32)
def find_regions(target: Layout, combines: tuple[tuple[int, ...], ...]) -> Regions:
    """The regions of `target`, whose contribution `c` combines `combines[c]` of the source.

    Raises:
        PlanError: a part that has an index of its dimension twice.
    """
    distinct = tuple(dict.fromkeys(combines))
    # Contributions that combine the same sources want the same, and count as one.
    label = np.array([distinct.index(sources) for sources in combines], dtype=np.int64)
    wanting = Layout(
        target.shape,
        [_refresh_halos(table) for table in target.tables],
        target.slots,
        target.cell_slot,
        target.cell_part,
        label[target.cell_contribution],
        len(distinct),
        "sum" if len(distinct) > 1 else None,
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
    """All cells of each key, `cells[begin[k]:begin[k + 1]]`: a slot that has a key twice wants
    it twice, though it holds it once.
    """
    key = holders.key_of(wanting.cell_contribution, list(wanting.cell_part.T))
    cells = np.argsort(key, kind="stable")
    return np.searchsorted(key[cells], np.arange(len(holders.cell_begin))), cells


def _give_slots(
    wanting: Layout, tables: tuple[RunTable, ...], part: IntArray, cells: IntArray
) -> Layout:
    """A layout with a slot for each row of `part`, which carries what its cell carries."""
    return Layout(
        wanting.shape,
        tables,
        max(len(cells), 1),
        np.arange(len(cells)),
        part,
        wanting.cell_contribution[cells],
        wanting.contributions,
        wanting.reduction,
    )


def _cut_regions(
    wanting: Layout,
    holders: Holders,
    combines: tuple[tuple[int, ...], ...],
    cell_begin: IntArray,
    cells: IntArray,
) -> Regions:
    """Regions as products of sets of parts, one set a dimension."""
    # The product, by dimension, of the sets that contain the key's part: rows are a key with a
    # region that it is made of.
    key = np.arange(len(cell_begin) - 1)
    key_cell = cells[cell_begin[:-1]]
    sets: list[IntArray] = []
    for d, dimension in enumerate(holders.dimensions):
        part = wanting.cell_part[key_cell[key], d]
        begin, of_part = _find_sets_of_parts(dimension)
        count = begin[part + 1] - begin[part]
        row = np.repeat(np.arange(len(key)), count)
        chosen = of_part[np.repeat(begin[part], count) + ragged_arange(count)]
        key = key[row]
        sets = [*(column[row] for column in sets), chosen]
    carried = wanting.cell_contribution[key_cell[key]]
    described = np.column_stack((carried, *sets))
    rows, first, region = np.unique(described, axis=0, return_index=True, return_inverse=True)
    # The cells of a region are those of all its keys.
    count = np.diff(cell_begin)[key]
    of_cell = np.repeat(region.reshape(-1), count)
    cell = cells[np.repeat(cell_begin[key], count) + ragged_arange(count)]
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
    """The sets that contain part `p`, as `of_part[begin[p]:begin[p + 1]]`."""
    of_set = np.repeat(np.arange(dimension.sets), np.diff(dimension.set_begin))
    order = np.argsort(dimension.set_part, kind="stable")
    begin = np.searchsorted(dimension.set_part[order], np.arange(dimension.parts + 1))
    return begin, of_set[order]


def _build_table_of_sets(dimension: DimensionHolders, length: int) -> RunTable:
    """A run table whose parts are the sets of a dimension."""
    size = dimension.stop - dimension.start
    # Backwards, so that no two stretches are joined: what follows one another in the tensor may
    # lie apart in a part that has both.
    order = np.lexsort((-dimension.start, dimension.holder_set))
    part = dimension.holder_set[order]
    before = np.cumsum(size[order]) - size[order]
    local = before - before[np.searchsorted(part, part)]
    return RunTable.from_columns(
        length, max(dimension.sets, 1), part, dimension.start[order], size[order], local
    )


def _check_complete(target: Layout, regions: Regions) -> None:
    found = np.zeros(target.cells, dtype=np.int64)
    elements = np.repeat(regions.layout.cell_elements, np.diff(regions.begin))
    np.add.at(found, regions.cell, elements)
    short = np.flatnonzero(found != target.cell_elements)
    if len(short):
        raise PlanError(
            f"cell {short[0]} of the target has {target.cell_elements[short[0]]} elements, but "
            f"only {found[short[0]]} different ones; a part may have each index once"
        )
