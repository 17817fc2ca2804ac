"""Meetings of strided regions, against all positions one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from reshard.errors import RunError
from reshard.torch.loaders.strided_overlap import (
    StridedRegion,
    find_aligned_overlap,
    find_boxes,
    find_overlaps,
)


def index_of_positions(region: StridedRegion) -> dict[int, tuple[int, ...]]:
    """For each position an index that has it."""
    return {
        region.offset + sum(i * s for i, s in zip(index, region.strides, strict=True)): index
        for index in itertools.product(*map(range, region.sizes))
    }


def check(read: StridedRegion, written: StridedRegion) -> int:
    """Every element that is read and was written is in one overlap; how many there are."""
    there = index_of_positions(written)
    found: set[tuple[int, ...]] = set()
    boxes = 0
    overlaps = list(find_overlaps(read, written))
    aligned = find_aligned_overlap(read, written)
    if aligned is not None:
        assert overlaps == aligned
    for start, stop, first, steps in overlaps:
        boxes += 1
        for index in itertools.product(*map(range, start, stop)):
            assert index not in found
            found.add(index)
            ahead = [i - a for i, a in zip(index, start, strict=True)]
            other = [
                at + sum(n * along[k] for n, along in zip(ahead, steps, strict=True))
                for k, at in enumerate(first)
            ]
            assert all(0 <= i < n for i, n in zip(other, written.sizes, strict=True))
            assert position(read, index) == position(written, other)
    expected = {
        index
        for index in itertools.product(*map(range, read.sizes))
        if position(read, index) in there
    }
    assert found == expected
    return boxes


def position(region: StridedRegion, index: object) -> int:
    return region.offset + sum(i * s for i, s in zip(index, region.strides, strict=True))  # type: ignore[call-overload]


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...]) -> StridedRegion:
    """A view of a dense tensor: narrow, every so many, permuted, split and joined."""
    offset = 0
    dims = [(n, math.prod(shape[d + 1 :])) for d, n in enumerate(shape)]
    view = []
    for n, stride in dims:
        start = draw(st.integers(0, n - 1))
        step = draw(st.sampled_from([1, 1, 1, 2, 3]))
        size = draw(st.integers(1, (n - start - 1) // step + 1))
        offset += start * stride
        parts = [k for k in range(1, size + 1) if size % k == 0]
        inner = draw(st.sampled_from(parts))
        if inner in (1, size):
            view.append((size, stride * step))
        else:
            view += [(size // inner, inner * stride * step), (inner, stride * step)]
    if draw(st.booleans()):
        view.append((draw(st.integers(1, 3)), 0))
    view = draw(st.permutations(view))
    return StridedRegion(offset, tuple(n for n, _ in view), tuple(s for _, s in view))


SHAPES = [(4, 6), (12,), (2, 3, 4), (5, 7), (6, 1, 4), (8, 8)]


@given(st.data())
def test_views_of_a_tensor_meet_where_they_do(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    total = math.prod(shape)
    others = [one for one in [*SHAPES, (total,)] if math.prod(one) == total]
    read = data.draw(views(shape))
    # Written through another shape of the same memory: reshaped on the way.
    written = data.draw(views(data.draw(st.sampled_from(others))))
    written_once = len(index_of_positions(written)) == math.prod(written.sizes)
    if written_once:
        check(read, written)


@given(st.data())
def test_any_regions_meet_where_they_do(data: st.DataObject) -> None:
    def region() -> StridedRegion:
        dims = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3))
        sizes = tuple(n for n, _ in dims)
        return StridedRegion(data.draw(st.integers(0, 9)), sizes, tuple(s for _, s in dims))

    read, written = region(), region()
    if len(index_of_positions(written)) == math.prod(written.sizes):
        check(read, written)


def test_rows_and_columns_are_one_meeting() -> None:
    rows, columns = StridedRegion(6, (2, 6), (6, 1)), StridedRegion(2, (4, 2), (6, 1))
    assert check(rows, columns) == 1
    assert check(columns, rows) == 1
    # A tensor read by heads, of which each has two rows.
    heads = StridedRegion(0, (2, 2, 6), (12, 6, 1))
    assert check(StridedRegion(0, (4, 6), (6, 1)), heads) == 2
    assert check(heads, StridedRegion(0, (24,), (1,))) == 1


def test_large_regions_are_quick_where_strides_divide() -> None:
    read = StridedRegion(0, (8192, 28672), (28672, 1))
    written = StridedRegion(28672 * 1024, (64, 128, 28672), (128 * 28672, 28672, 1))
    # A box for each step of the largest dimension: rows are one dimension here and two there.
    overlaps = list(find_overlaps(read, written._replace(sizes=(56, 128, 28672))))
    assert len(overlaps) == 56
    assert (overlaps[0].start, overlaps[-1].stop) == ((1024, 0), (8192, 28672))
    whole = written._replace(sizes=(7168, 28672), strides=(28672, 1))
    (overlap,) = find_overlaps(read, whole)
    assert find_aligned_overlap(read, whole) == [overlap]
    assert (overlap.start, overlap.stop, overlap.written) == ((1024, 0), (8192, 28672), (0, 0))


def test_a_slice_that_was_written_is_aligned() -> None:
    """As an expert's matrix in a stack of them."""
    read, expert = StridedRegion(0, (4, 6, 5), (30, 5, 1)), StridedRegion(70, (2, 5), (5, 1))
    (overlap,) = find_aligned_overlap(read, expert) or ()
    assert (overlap.start, overlap.stop) == ((2, 2, 0), (3, 4, 5))
    assert overlap.steps == ((0, 0), (1, 0), (0, 1))
    assert [overlap] == list(find_overlaps(read, expert))


def test_large_regions_whose_strides_do_not_divide_are_refused() -> None:
    read = StridedRegion(0, (4096, 4096), (4096, 1))
    with pytest.raises(RunError, match="do not divide one another"):
        list(find_overlaps(read, StridedRegion(0, (2000, 1000), (1025, 1))))


GRIDS = npst.array_shapes(min_dims=0, max_dims=3, max_side=5)


@given(
    GRIDS.flatmap(lambda s: st.tuples(*[npst.arrays(np.int64, s, elements=st.integers(0, 3))] * 2))
)
def test_boxes_have_the_numbers_of_the_arrays(arrays: tuple[np.ndarray, np.ndarray]) -> None:  # type: ignore[type-arg]
    stepping, fixed = arrays
    covered = np.zeros(stepping.shape, dtype=int)
    for start, stop, constants, first, steps in find_boxes([stepping], [fixed]):
        inside = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
        covered[inside] += 1
        assert (fixed[inside] == constants[0]).all()
        expected = np.full(stepping[inside].shape, first[0])
        for d, (step,) in enumerate(steps):
            along = np.arange(expected.shape[d]) * step
            expected = expected + along.reshape((-1,) + (1,) * (expected.ndim - d - 1))
        assert (stepping[inside] == expected).all()
    assert (covered == 1).all()


def test_few_boxes_are_found() -> None:
    rows = np.arange(40).reshape(10, 4)
    assert len([*find_boxes([rows])]) == 1
    assert len([*find_boxes([rows[:, ::2].T])]) == 1
    fused = np.concatenate([rows[:4], rows[8:] + 1000, rows[5:7, ::-1]])
    assert len([*find_boxes([fused])]) == 3
    heads = np.concatenate([rows[i : i + 2] for i in (0, 4, 2, 6)])
    assert len([*find_boxes([heads])]) <= 4
    side_by_side = np.concatenate([rows, rows[::-1] + 500], axis=1)
    assert len([*find_boxes([side_by_side])]) == 2
    assert math.prod(rows.shape) == 40
