import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.binding import FileRange, View
from reshard.geometry.regions import (
    Region,
    bind_regions,
    coalesce,
    flat_regions,
    multiply_runs,
)
from reshard.layout import Layout


def positions(*regions: Region) -> dict[tuple[int, ...], tuple[object, int]]:
    """Return where each index of the regions is stored, element by element."""
    where = {}
    for region in regions:
        for index in itertools.product(*map(range, region.start, region.stop)):
            steps = zip(index, region.start, region.strides, strict=True)
            assert index not in where, f"{index} is in two regions"
            where[index] = (region.container, region.offset + sum((i - a) * s for i, a, s in steps))
    return where


@st.composite
def boxes(draw: st.DrawFn, dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    corners = [draw(st.tuples(st.integers(0, 5), st.integers(1, 4))) for _ in range(dims)]
    return tuple(a for a, _ in corners), tuple(a + n for a, n in corners)


@st.composite
def regions(draw: st.DrawFn, dims: int = 2) -> Region:
    strides = tuple(draw(st.integers(-12, 12)) for _ in range(dims))
    return Region(*draw(boxes(dims)), "file", draw(st.integers(0, 99)), strides)


@given(regions(), boxes(2))
def test_intersection_and_difference_divide_a_region_and_keep_its_positions(region, box):
    inside = region.intersect(*box)
    outside = region.subtract(*box)
    parts = outside + ([inside] if inside else [])
    assert positions(*parts) == positions(region)
    low, high = box
    for index in positions(*outside):
        assert not all(a <= i < b for a, i, b in zip(low, index, high, strict=True))
    for index in positions(*([inside] if inside else [])):
        assert all(a <= i < b for a, i, b in zip(low, index, high, strict=True))


@given(regions(), st.integers(0, 1), st.integers(-1, 9), st.integers(-3, 3), st.integers(1, 6))
def test_a_progression_of_indices_is_a_region(region, dimension, first, step, count):
    where, expected = positions(region), {}
    for k in range(count):
        for index, position in where.items():
            if index[dimension] == first + k * step:
                at = list(index)
                at[dimension] = 7 + k
                expected[tuple(at)] = position
    part = region.step(dimension, first, step, count, at=7)
    assert positions(*([part] if part else [])) == expected


@given(regions(3), st.permutations(range(3)), st.tuples(*[st.integers(-3, 3)] * 3))
def test_dimensions_are_permuted_moved_inserted_and_dropped(region, order, by):
    where = positions(region)
    assert positions(region.permute(order)) == {
        tuple(index[d] for d in order): p for index, p in where.items()
    }
    moved = {tuple(map(sum, zip(i, by, strict=True))): p for i, p in where.items()}
    assert positions(region.translate(by)) == moved
    shifted = region.shift(0, by[0]).shift(1, by[1]).shift(2, by[2])
    assert shifted == region.translate(by)
    inserted = region.insert(1, 5)
    assert positions(inserted) == {(i[0], 5, *i[1:]): p for i, p in where.items()}
    assert positions(inserted.drop(1, 5)) == where
    last = region.stop[0] - 1
    assert positions(region.drop(0, last)) == {i[1:]: p for i, p in where.items() if i[0] == last}


@given(regions(3), st.integers(1, 40), st.sampled_from([None, 0, 2]))
def test_parts_of_a_split_cover_the_region_and_keep_the_limits(region, max_extent, max_gap):
    parts = list(region.split(max_extent, max_gap=max_gap))
    assert positions(*parts) == positions(region)
    for part in parts:
        low, high = part.bounds
        where = sorted(position for _, position in positions(part).values())
        assert (low, high) == (where[0], where[-1])
        # What repeats an element cannot be split below the extent of one.
        assert part.elements == 1 or high - low + 1 <= max_extent


@given(st.data(), st.integers(1, 3))
def test_split_regions_are_coalesced(data, dims):
    whole = Region.dense((4, 3, 2)[:dims], "file", 5)
    parts = [whole]
    for _ in range(data.draw(st.integers(0, 3))):
        part = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        cut = part.intersect(*data.draw(boxes(dims)))
        parts += [*part.subtract(*cut[:2]), cut] if cut else [part]
    merged = coalesce(parts)
    assert positions(*merged) == positions(whole)
    assert coalesce(list(whole.split(4))) == [whole]


def test_regions_of_other_containers_or_with_gaps_are_not_merged():
    first = Region.dense((2, 3), "a")
    for second in (Region.dense((2, 3), "b", 6), Region.dense((2, 3), "a", 7)):
        assert len(coalesce([first, second.translate((2, 0))])) == 2
    # A constant continues itself.
    constant = Region((0,), (2,), 0.5, 0, (0,))
    assert coalesce([constant, constant.translate((2,))]) == [constant._replace(stop=(4,))]


@given(st.integers(0, 24), st.integers(0, 24))
def test_a_flat_range_is_stored_in_order(start, stop):
    parts = flat_regions((2, 3, 4), start, stop, "buffer", 100, itemsize=2)
    listed = [position for _, position in positions(*parts).values()]
    assert listed == [100 + 2 * n for n in range(max(stop - start, 0))]
    numbers = [int(np.ravel_multi_index(index, (2, 3, 4))) for index in positions(*parts)]
    assert numbers == list(range(start, stop))


def test_a_shard_is_the_product_of_its_runs():
    runs = [[(0, 2, 0), (6, 8, 2)], [(3, 4, 0)]]
    parts = list(multiply_runs(runs, "shard", 10, (1, 4)))
    assert [str(part) for part in parts] == [
        "[0:2, 3:4] at 10 of shard",
        "[6:8, 3:4] at 12 of shard",
    ]


def test_regions_of_files_are_bound_in_bytes():
    rows, column = Region.dense((2, 3), "a", 64, 4), Region((0, 0), (2, 1), "b", 8, (12, 4))
    binding = bind_regions((2, 4), [(0, rows.translate((0, 1))), (1, column)], 3, 4)
    assert binding.layout == Layout.from_boxes(
        (2, 4), [(0, rows.translate((0, 1)).box), (1, column.box)], 3
    )
    assert binding.addresses == {0: (FileRange("a", 64),), 1: (FileRange("b", 8),)}
    assert binding.views == {1: (View(0, (3, 1)),)}


@pytest.mark.parametrize("shape", [(0, 3), (1,), ()])
def test_small_regions_are_dense(shape):
    region = Region.dense(shape, "a")
    assert region.is_dense()
    assert next(iter(region.split(1))).container == "a"
    assert bind_regions(shape, [(0, region)], 1, 1).views == {}
