"""The layout of each source over ranks, from the regions that the ranks' parameters take.

A loader takes a region of a tensor by an offset, sizes and strides, after any views, transposes
and reshapes. The region is a union of products of indices along each dimension::

    a tensor 6 x 4, row major        offset 4, sizes (2, 2, 4), strides (8, 4, 1)

    . . . .                          rows 1 + {0, 2} + {0, 1} = 1, 2, 3, 4
    # # # #                          columns 0 + {0, 1, 2, 3}
    # # # #
    # # # #                          so a product: 1:5 of the rows, 0:4 of the columns
    # # # #
    . . . .

1. Adjacent sizes and strides are joined.
2. From the smallest stride up, each belongs to the dimension whose step divides it. While it stays
   inside, it adds its steps to the indices there.
3. A stride that wraps around fills the dimension if its rounds are whole, and continues in the
   dimension before it. Otherwise it is split before the first and after the last whole round, and
   there is a product for each part.

A model of many ranks takes millions of regions of its tensors, most of them equal. The regions of
a pattern are computed once, and numbered. The regions of all ranks are a sorted table of (source,
rank, region): sources with equal rows and shapes share a layout. The regions of a rank are united.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from reshard.binding import dense_strides
from reshard.errors import LayoutError
from reshard.geometry.boxes import cover_grid, find_edges, merge_intervals
from reshard.layout import Layout, flat_range_boxes
from reshard.recipes.engine_layouts.parameter_layout import ParameterPattern
from reshard.runs import IntArray, RunTable, distinct

# The stretches `(start, stop)` of indices along a dimension, rising and apart.
Stretches = tuple[tuple[int, int], ...]
# Stretches along each dimension; the region is all combinations.
Product = tuple[Stretches, ...]

MAX_PRODUCTS = 1 << 17


@lru_cache(maxsize=1 << 16)
def find_products(
    shape: tuple[int, ...], sizes: tuple[int, ...], offset: int, strides: tuple[int, ...]
) -> tuple[Product, ...]:
    """Return the products of indices that a strided region of a row-major tensor of `shape` has.

    Products may share elements if the region has some twice.

    Raises LayoutError if there are too many.

    >>> find_products((6, 4), (2, 2, 4), 4, (8, 4, 1))
    ((((1, 5),), ((0, 4),)),)
    >>> find_products((4, 4), (5,), 3, (1,))
    ((((0, 1),), ((3, 4),)), (((1, 2),), ((0, 4),)))
    """
    if not math.prod(sizes):
        return ()
    axes = []
    for size, stride in zip(sizes, strides, strict=True):
        # Elements that are taken again are the same elements.
        if size > 1 and stride:
            # A negative stride has the elements of the positive stride from its other end.
            offset += min(0, (size - 1) * stride)
            axes.append((abs(stride), size))
    # A single flat range, which is split as well as any other form.
    joined = _join(sorted(axes, reverse=True))
    if len(joined) == 1 and joined[0][0] == 1:
        boxes = flat_range_boxes(shape, offset, offset + joined[0][1])
        ends = ((box.start, box.stop) for box in boxes)
        return tuple(
            tuple(((a, b),) for a, b in zip(start, stop, strict=True)) for start, stop in ends
        )
    products = list(itertools.islice(_list_products(shape, joined, offset), MAX_PRODUCTS + 1))
    if len(products) > MAX_PRODUCTS:
        raise LayoutError(
            f"the region of sizes {list(sizes)} at {offset} with strides {list(strides)} of a "
            f"tensor of shape {list(shape)} is too fragmented: it has too many boxes"
        )
    return tuple(products)


def _join(axes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return axes (stride and size, the largest stride first), with those that continue others
    joined.
    """
    joined: list[tuple[int, int]] = []
    for stride, size in axes:
        if joined and joined[-1][0] == stride * size:
            joined[-1] = (stride, size * joined[-1][1])
        else:
            joined.append((stride, size))
    return joined


def _list_products(
    shape: tuple[int, ...], axes: Sequence[tuple[int, int]], offset: int
) -> Iterable[Product]:
    steps = dense_strides(shape)
    indices = [np.array([offset // step % n]) for step, n in zip(steps, shape, strict=True)]
    # The smallest stride last, so that it is the first to be taken off.
    left = list(axes)
    while left:
        stride, size = left.pop()
        at = next(
            d for d, (n, s) in enumerate(zip(shape, steps, strict=True)) if s <= stride and n > 1
        )
        # The step in indices of that dimension. With a rest, it moves along others as well.
        within, rest = divmod(stride, steps[at])
        reach = int(indices[at].max())
        # Steps that stay inside the dimension, the first included.
        room = (shape[at] - 1 - reach) // within + 1
        if not rest and size <= room:
            indices[at] = _add_steps(indices[at], within, size)
            continue
        # The steps along the dimension after which the stride wraps around.
        whole = shape[at] // within
        if not rest and shape[at] % within == 0 and reach < within:
            if size % whole == 0:
                indices[at] = _add_steps(indices[at], within, whole)
                left.append((steps[at] * shape[at], size // whole))
                left.sort(reverse=True)
                continue
            room = size // whole * whole
        elif rest:
            room = 1
        # It is split: the axes of each part are computed separately.
        others = list(axes)
        if (stride, size) in others:
            others.remove((stride, size))
        else:
            # The rest of an axis that wrapped around is not an axis: split the largest, by steps.
            (stride, size), room = others.pop(0), 1
        for begin, count in ((0, room), (room, size - room)):
            part = sorted([*others, *([(stride, count)] if count > 1 else [])], reverse=True)
            yield from _list_products(shape, part, offset + begin * stride)
        return
    yield tuple(_list_stretches(index) for index in indices)


def _add_steps(indices: IntArray, step: int, count: int) -> IntArray:
    added: IntArray = (indices[:, None] + step * np.arange(count)).reshape(-1)
    return added


def _list_stretches(indices: IntArray) -> Stretches:
    rising = distinct(indices)
    ends = np.flatnonzero(np.diff(rising) != 1)
    starts = rising[np.append(0, ends + 1)]
    stops = rising[np.append(ends, len(rising) - 1)] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def find_steps(
    shape: tuple[int, ...], sizes: tuple[int, ...], offset: int, strides: tuple[int, ...]
) -> tuple[list[int], list[tuple[int, int] | None]] | None:
    """Return the start of a region in a row-major tensor, and the dimension along which each of its
    own dimensions steps.

    Returns:
        The first index along every dimension; and for each dimension of the region, that of the
        tensor and the step there, or None if it is not used. None in place of both
        if a dimension steps backwards, across others, or along the same dimension as another.

    >>> find_steps((6, 4), (2, 3), 5, (8, 1))
    ([1, 1], [(0, 2), (1, 1)])
    >>> find_steps((6, 4), (8,), 0, (1,)) is None
    True
    """
    steps = dense_strides(shape)
    first = [offset // step % n for step, n in zip(steps, shape, strict=True)]
    along: list[tuple[int, int] | None] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1 or stride == 0:
            along.append(None)
            continue
        at = next(
            (d for d, n in enumerate(shape) if n > 1 and stride > 0 and steps[d] <= stride), None
        )
        by, rest = divmod(stride, steps[at]) if at is not None else (0, 1)
        if at is None or rest or first[at] + by * (size - 1) >= shape[at]:
            return None
        if any(earlier is not None and earlier[0] == at for earlier in along):
            return None
        along.append((at, by))
    return first, along


def unite(products: Iterable[Product]) -> tuple[Product, ...]:
    """Return products without a shared element that have the same elements together.

    >>> unite([(((0, 2),), ((0, 4),)), (((2, 3),), ((0, 4),))])
    ((((0, 3),), ((0, 4),)),)
    """
    distinct = list(dict.fromkeys(products))
    if len(distinct) > 1:
        distinct = _join_alike(distinct)
    return tuple(sorted(distinct)) if len(distinct) <= 1 else tuple(sorted(_cut_apart(distinct)))


def _join_alike(products: list[Product]) -> list[Product]:
    """Join products that differ along a single dimension, repeatedly."""
    changed = True
    while changed and len(products) > 1:
        changed = False
        for d in range(len(products[0])):
            groups: dict[Product, list[Stretches]] = {}
            for product in products:
                groups.setdefault((*product[:d], *product[d + 1 :]), []).append(product[d])
            if len(groups) < len(products):
                changed = True
                products = [
                    (*rest[:d], _unite(itertools.chain(*stretches)), *rest[d:])
                    for rest, stretches in groups.items()
                ]
    return products


def _unite(stretches: Iterable[tuple[int, int]]) -> Stretches:
    return tuple(merge_intervals(stretches))


def _cut_apart(products: list[Product]) -> list[Product]:
    """Split products that may share elements into products that do not."""
    # The ends along each dimension divide it into intervals that no product splits.
    edges = find_edges(products)
    # The grid has a byte for each cell.
    if math.prod(len(edge) for edge in edges) > 1 << 24:
        raise LayoutError(f"{len(products)} regions of a tensor that form no grid")
    covered = cover_grid(products, edges)
    # Each interval of the first dimensions has a row of intervals of the last; equal rows join.
    apart: list[Product] = []
    for place in np.argwhere(covered.any(axis=-1)):
        row = np.flatnonzero(covered[tuple(place)])
        last = _unite(pair for i in row for pair in _interval(edges[-1], int(i)))
        apart.append((*(_interval(edges[d], int(i)) for d, i in enumerate(place)), last))
    return _join_alike(apart)


def _interval(edges: IntArray, number: int) -> Stretches:
    return ((int(edges[number]), int(edges[number + 1])),)


# A region of a source: the shape of the source, then sizes, offset and strides of the region.
_Region = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]


def _list_regions(
    pattern: ParameterPattern, shapes: tuple[tuple[int, ...], ...]
) -> Iterable[tuple[int, _Region]]:
    columns = pattern.columns
    sizes = (columns.stop - columns.start).tolist()
    rows = (columns.source.tolist(), sizes, columns.offset.tolist(), columns.strides.tolist())
    for source, size, offset, strides in zip(*rows, strict=True):
        yield source, (shapes[source], tuple(size), offset, tuple(strides))
    for region in pattern.computed:
        for source in region.sources:
            shape = shapes[source]
            if region.view is not None:
                yield source, (shape, region.box.shape, region.view.offset, region.view.strides)
            else:
                # It may depend on any element, so the rank takes the whole.
                yield source, (shape, (math.prod(shape),), 0, (1,))


def list_source_layouts(
    shapes: Mapping[str, tuple[int, ...]],
    held: Sequence[tuple[int, Sequence[tuple[ParameterPattern, tuple[str, ...]]]]],
    slots: int,
) -> dict[str, Layout]:
    """Return for every source its layout over `slots` ranks.

    Args:
        shapes: of the sources, by name.
        held: each rank, and the patterns of its parameters with the names of their sources.
        slots: how many ranks there are.
    """
    numbers = {name: number for number, name in enumerate(shapes)}
    regions: dict[_Region, int] = {}
    of_patterns: dict[object, tuple[IntArray, IntArray]] = {}
    cached: dict[tuple[str, ...], tuple[IntArray, tuple[tuple[int, ...], ...]]] = {}
    columns: list[tuple[IntArray, IntArray, IntArray]] = []
    # 1. A row for each region that a rank takes.
    for rank, parameters in held:
        for pattern, sources in parameters:
            if sources not in cached:
                own = np.array([numbers[name] for name in sources], dtype=np.int64)
                cached[sources] = (own, tuple(shapes[name] for name in sources))
            own, own_shapes = cached[sources]
            # Layers and ranks share patterns, whose regions are listed and numbered once.
            if (pattern, own_shapes) not in of_patterns:
                listed = list(_list_regions(pattern, own_shapes))
                numbered = [regions.setdefault(region, len(regions)) for _, region in listed]
                of_patterns[pattern, own_shapes] = (
                    np.array([number for number, _ in listed], np.int64),
                    np.array(numbered, np.int64),
                )
            source, region = of_patterns[pattern, own_shapes]
            columns.append((own[source], np.full(len(source), rank), region))
    if not columns:
        return {name: _lay_out(shape, {}, slots) for name, shape in shapes.items()}
    table = np.stack([np.concatenate(column) for column in zip(*columns, strict=True)], axis=1)
    table = table[np.lexsort((table[:, 2], table[:, 1], table[:, 0]))]
    table = table[np.append(True, (np.diff(table, axis=0) != 0).any(axis=1))]
    # 2. Sources whose rows are equal share a layout.
    ends = np.searchsorted(table[:, 0], np.arange(len(shapes) + 1))
    by_number = list(regions)
    shared: dict[tuple[tuple[int, ...], bytes], Layout] = {}
    layouts = {}
    for number, (name, shape) in enumerate(shapes.items()):
        rows = table[ends[number] : ends[number + 1], 1:]
        key = (shape, rows.tobytes())
        if key not in shared:
            of_ranks: dict[int, list[Product]] = {}
            for rank, region in rows.tolist():
                of_ranks.setdefault(rank, []).extend(find_products(*by_number[region]))
            # 3. A rank that takes an element twice holds it once.
            united = {rank: unite(products) for rank, products in of_ranks.items()}
            shared[key] = _lay_out(shape, united, slots)
        layouts[name] = shared[key]
    return layouts


def _lay_out(shape: tuple[int, ...], held: Mapping[int, Iterable[Product]], slots: int) -> Layout:
    """Return the layout of products on ranks."""
    numbers: list[dict[Stretches, int]] = [{} for _ in shape]
    cell_slot, cell_part = [], []
    # Parts are numbered by their contents, so that equal layouts are identical.
    for stretches_of, d in zip(numbers, range(len(shape)), strict=True):
        distinct = {product[d] for products in held.values() for product in products}
        stretches_of.update({stretches: i for i, stretches in enumerate(sorted(distinct))})
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
