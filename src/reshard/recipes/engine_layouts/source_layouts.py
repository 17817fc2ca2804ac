"""Which rank holds which part of each source, from what the ranks' parameters take of it.

A model of many ranks takes millions of regions of its tensors, and few different ones:

1. Regions of one pattern are found once, and numbered.
2. What all ranks take is a table of (source, rank, region), sorted. A source's rows say all about
   it, so sources with equal rows and shapes share one layout.
3. The regions of a rank are united: what it takes twice it holds once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from reshard.layout import Layout
from reshard.recipes.engine_layouts.patterns import ParameterPattern
from reshard.recipes.engine_layouts.strided_regions import Product, Stretches, find_products, unite
from reshard.runs import IntArray, RunTable

_Region = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]


class _Regions:
    """The different regions of sources, by number: shape of the source, sizes, offset, strides."""

    def __init__(self) -> None:
        self.numbers: dict[_Region, int] = {}
        self.of_patterns: dict[object, tuple[IntArray, IntArray]] = {}

    def of(
        self, pattern: ParameterPattern, shapes: tuple[tuple[int, ...], ...]
    ) -> tuple[IntArray, IntArray]:
        """The numbers of the sources that a pattern takes from, and of the regions it takes."""
        key = (pattern, shapes)
        if key not in self.of_patterns:
            sources, regions = [], []
            for source, region in _list_regions(pattern, shapes):
                sources.append(source)
                regions.append(self.numbers.setdefault(region, len(self.numbers)))
            self.of_patterns[key] = (np.array(sources, np.int64), np.array(regions, np.int64))
        return self.of_patterns[key]


def _list_regions(
    pattern: ParameterPattern, shapes: tuple[tuple[int, ...], ...]
) -> Iterable[tuple[int, _Region]]:
    columns = pattern.columns
    sizes = (columns.stop - columns.start).tolist()
    rows = (columns.source.tolist(), sizes, columns.offset.tolist(), columns.strides.tolist())
    for source, size, offset, strides in zip(*rows, strict=True):
        yield source, (shapes[source], tuple(size), offset, tuple(strides))
    for one in pattern.computed:
        for source in one.sources:
            shape = shapes[source]
            if one.view is not None:
                yield source, (shape, one.box.shape, one.view.offset, one.view.strides)
            else:
                # Nobody knows which elements it depends on: the whole.
                yield source, (shape, (math.prod(shape),), 0, (1,))


def list_source_layouts(
    shapes: Mapping[str, tuple[int, ...]],
    held: Sequence[tuple[int, Sequence[tuple[ParameterPattern, tuple[str, ...]]]]],
    slots: int,
) -> dict[str, Layout]:
    """For every source its layout over `slots` ranks.

    Args:
        shapes: of the sources, by name.
        held: each rank, and the patterns of its parameters with the names of their sources.
        slots: how many ranks there are.
    """
    numbers = {name: number for number, name in enumerate(shapes)}
    regions = _Regions()
    known: dict[tuple[str, ...], tuple[IntArray, tuple[tuple[int, ...], ...]]] = {}
    columns: list[tuple[IntArray, IntArray, IntArray]] = []
    # 1. A row for each region that a rank takes.
    for rank, parameters in held:
        for pattern, sources in parameters:
            if sources not in known:
                own = np.array([numbers[name] for name in sources], dtype=np.int64)
                known[sources] = (own, tuple(shapes[name] for name in sources))
            own, own_shapes = known[sources]
            source, region = regions.of(pattern, own_shapes)
            columns.append((own[source], np.full(len(source), rank), region))
    if not columns:
        return {name: _lay_out(shape, {}, slots) for name, shape in shapes.items()}
    table = np.stack([np.concatenate(column) for column in zip(*columns, strict=True)], axis=1)
    table = table[np.lexsort((table[:, 2], table[:, 1], table[:, 0]))]
    table = table[np.append(True, (np.diff(table, axis=0) != 0).any(axis=1))]
    # 2. Sources whose rows are equal share a layout.
    ends = np.searchsorted(table[:, 0], np.arange(len(shapes) + 1))
    by_number = list(regions.numbers)
    found: dict[tuple[tuple[int, ...], bytes], Layout] = {}
    layouts = {}
    for number, (name, shape) in enumerate(shapes.items()):
        rows = table[ends[number] : ends[number + 1], 1:]
        key = (shape, rows.tobytes())
        if key not in found:
            of_ranks: dict[int, list[Product]] = {}
            for rank, region in rows.tolist():
                of_ranks.setdefault(rank, []).extend(find_products(*by_number[region]))
            # 3. What a rank takes twice it holds once.
            united = {rank: unite(products) for rank, products in of_ranks.items()}
            found[key] = _lay_out(shape, united, slots)
        layouts[name] = found[key]
    return layouts


def _lay_out(shape: tuple[int, ...], held: Mapping[int, Iterable[Product]], slots: int) -> Layout:
    """The layout of products on ranks."""
    numbers: list[dict[Stretches, int]] = [{} for _ in shape]
    cell_slot, cell_part = [], []
    # Parts are numbered by what they have, so that equal layouts are one.
    for stretches_of, d in zip(numbers, range(len(shape)), strict=True):
        every = {product[d] for products in held.values() for product in products}
        stretches_of.update({stretches: i for i, stretches in enumerate(sorted(every))})
    for rank, products in held.items():
        for product in products:
            cell_slot.append(rank)
            cell_part.append([numbers[d][stretches] for d, stretches in enumerate(product)])
    tables = []
    for length, stretches_of in zip(shape, numbers, strict=True):
        rows = []
        for stretches, part in stretches_of.items():
            local = 0
            for start, stop in stretches:
                rows.append((part, start, stop - start, local))
                local += stop - start
        tables.append(RunTable(length, max(len(stretches_of), 1), rows))
    parts = np.array(cell_part, dtype=np.int64).reshape(len(cell_slot), len(shape))
    return Layout(shape, tables, slots, cell_slot, parts)
