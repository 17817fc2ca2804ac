"""Regions traced through copies, against all positions one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from reshard.errors import RunError
from reshard.geometry.regions import Index, Region
from reshard.geometry.strided_overlap import find_regions, trace_copy


def region(offset: int, shape: Index, strides: Index) -> Region:
    return Region((0,) * len(shape), shape, "memory", offset, strides)


def numbered(target: Region) -> Region:
    """The source of a target, whose elements are at their row-major numbers."""
    return Region.dense(target.shape, "file")


def check(view: Region, target: Region, source: Region | None = None) -> int:
    """Each element that the view shares with the target is in one part. Return how many."""
    source = source or numbered(target)
    written = dict(
        zip(target.positions.ravel().tolist(), source.positions.ravel().tolist(), strict=True)
    )
    found = np.full(view.shape, -1)
    parts = list(trace_copy(view, target, source))
    for part in parts:
        inside = tuple(slice(a, b) for a, b in zip(*part.box, strict=True))
        assert (found[inside] == -1).all(), "parts overlap"
        found[inside] = part.positions
        assert part.container == source.container
    expected = [written.get(position, -1) for position in view.positions.ravel().tolist()]
    assert found.ravel().tolist() == expected
    return len(parts)


@st.composite
def views(draw: st.DrawFn, shape: Index) -> Region:
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
    return region(offset, tuple(n for n, _ in view), tuple(s for _, s in view))


SHAPES = [(4, 6), (12,), (2, 3, 4), (5, 7), (6, 1, 4), (8, 8)]


def is_written_once(target: Region) -> bool:
    return len(set(target.positions.ravel().tolist())) == target.elements


@given(st.data())
def test_views_of_a_tensor_are_traced_through_writes_in_another_shape(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    total = math.prod(shape)
    others = [other for other in [*SHAPES, (total,)] if math.prod(other) == total]
    view = data.draw(views(shape))
    # Written through another shape of the same memory: reshaped on the way.
    target = data.draw(views(data.draw(st.sampled_from(others))))
    if is_written_once(target):
        check(view, target)


@given(st.data())
def test_any_regions_are_traced(data: st.DataObject) -> None:
    def draw_region() -> Region:
        dims = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3))
        return region(
            data.draw(st.integers(0, 9)), tuple(n for n, _ in dims), tuple(s for _, s in dims)
        )

    view, target = draw_region(), draw_region()
    if is_written_once(target):
        # A source of its own strides: transposed, reversed, repeated.
        strides = tuple(data.draw(st.integers(-5, 5)) for _ in target.shape)
        check(view, target, Region(target.start, target.stop, "file", 100, strides))


def test_a_view_that_is_not_at_the_origin_has_parts_in_its_own_indices() -> None:
    rows, columns = region(6, (2, 6), (6, 1)), region(2, (4, 2), (6, 1))
    for view in (columns, region(2, (4, 2), (6, 2))):
        here = list(trace_copy(view, rows, numbered(rows)))
        there = list(trace_copy(view.translate((10, 20)), rows, numbered(rows)))
        assert there == [part.translate((10, 20)) for part in here]


def test_rows_and_columns_share_a_single_region() -> None:
    rows, columns = region(6, (2, 6), (6, 1)), region(2, (4, 2), (6, 1))
    assert check(rows, columns) == 1
    assert check(columns, rows) == 1
    # A tensor that was written by heads of two rows each: the heads follow each other.
    heads = region(0, (2, 2, 6), (12, 6, 1))
    assert check(region(0, (4, 6), (6, 1)), heads) == 1
    assert check(heads, region(0, (24,), (1,))) == 1
    # The heads are stored in another order.
    reversed_heads = Region((0, 0, 0), (2, 2, 6), "file", 12, (-12, 6, 1))
    assert check(region(0, (4, 6), (6, 1)), heads, reversed_heads) == 2


def test_large_regions_are_quick_if_strides_divide() -> None:
    view = region(0, (8192, 28672), (28672, 1))
    target = region(28672 * 1024, (56, 128, 28672), (128 * 28672, 28672, 1))
    (part,) = trace_copy(view, target, numbered(target))
    assert part.box == ((1024, 0), (8192, 28672))
    # A region for each step of the largest dimension, if these do not continue each other.
    apart = Region(target.start, target.stop, "file", 0, (1 << 30, 28672, 1))
    parts = list(trace_copy(view, target, apart))
    assert len(parts) == 56
    assert (parts[0].start, parts[-1].stop) == ((1024, 0), (8192, 28672))
    whole = region(28672 * 1024, (7168, 28672), (28672, 1))
    (part,) = trace_copy(view, whole, numbered(whole))
    assert (part.start, part.stop, part.offset) == ((1024, 0), (8192, 28672), 0)


def test_a_slice_that_was_written_is_a_region() -> None:
    """As an expert's matrix in a stack of them."""
    view, expert = region(0, (4, 6, 5), (30, 5, 1)), region(70, (2, 5), (5, 1))
    (part,) = trace_copy(view, expert, numbered(expert))
    assert part == Region((2, 2, 0), (3, 4, 5), "file", 0, (0, 5, 1))


def test_large_regions_whose_strides_do_not_divide_are_refused() -> None:
    view, target = region(0, (4096, 4096), (4096, 1)), region(0, (2000, 1000), (1025, 1))
    with pytest.raises(RunError, match="do not divide one another"):
        list(trace_copy(view, target, numbered(target)))


GRIDS = npst.array_shapes(min_dims=0, max_dims=3, max_side=5)


@given(
    GRIDS.flatmap(lambda s: st.tuples(*[npst.arrays(np.int64, s, elements=st.integers(0, 3))] * 2))
)
def test_regions_have_the_numbers_of_the_arrays(arrays: tuple[np.ndarray, np.ndarray]) -> None:  # type: ignore[type-arg]
    offsets, labels = arrays
    covered = np.zeros(offsets.shape, dtype=int)
    for found in find_regions(offsets, labels):
        inside = tuple(slice(a, b) for a, b in zip(*found.box, strict=True))
        covered[inside] += 1
        assert (labels[inside] == found.container[0]).all()
        assert (offsets[inside] == found.positions).all()
    assert (covered == 1).all()


def test_few_regions_are_found() -> None:
    rows = np.arange(40).reshape(10, 4)
    assert len([*find_regions(rows)]) == 1
    assert len([*find_regions(rows[:, ::2].T)]) == 1
    fused = np.concatenate([rows[:4], rows[8:] + 1000, rows[5:7, ::-1]])
    assert len([*find_regions(fused)]) == 3
    heads = np.concatenate([rows[i : i + 2] for i in (0, 4, 2, 6)])
    assert len([*find_regions(heads)]) <= 4
    side_by_side = np.concatenate([rows, rows[::-1] + 500], axis=1)
    assert len([*find_regions(side_by_side)]) == 2
    assert math.prod(rows.shape) == 40
