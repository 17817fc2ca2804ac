"""Layouts: who holds what, flat ranges as boxes, bindings and views."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reshard
from oracle import NO_ELEMENT
from reshard.binding import Binding, FileRange, RankMemory, TensorName, View
from reshard.errors import LayoutError
from reshard.layout import Box, Layout, flat_range_boxes
from reshard.runs import FRESH_HALO, HALO, RunTable
from strategies import LayoutAndContents, Shape, layouts_with_contents, shapes


@st.composite
def layouts_of_some_shape(draw: st.DrawFn) -> LayoutAndContents:
    return draw(layouts_with_contents(draw(shapes())))


@given(layouts_of_some_shape())
def test_local_shapes_and_sizes_are_those_of_the_contents(pair: LayoutAndContents) -> None:
    layout, held = pair
    assert layout.holders == tuple(sorted(held.elements))
    for slot in range(layout.slots):
        expected = held.elements[slot].shape if slot in held.elements else None
        assert layout.local_shape(slot) == expected
        cells = layout.cells_of(slot)
        elements = sum(int(layout.cell_elements[cell]) for cell in cells)
        real = held.elements[slot] != NO_ELEMENT if slot in held.elements else np.zeros(0)
        assert elements == real.sum()


@given(layouts_of_some_shape())
def test_boxes_have_the_elements_that_a_slot_owns(pair: LayoutAndContents) -> None:
    layout, held = pair
    numbers = np.arange(math.prod(layout.shape)).reshape(layout.shape)
    for slot in layout.holders:
        found: list[int] = []
        for box in layout.boxes(slot):
            window = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            found += numbers[window].ravel().tolist()
        assert len(found) == len(set(found))
        assert set(found) <= set(held.elements[slot].ravel().tolist())
        if not has_halos(layout):
            assert set(found) == set(held.elements[slot].ravel().tolist()) - {NO_ELEMENT}


def has_halos(layout: Layout) -> bool:
    roles = [table.single_runs().role for table in layout.tables]
    return any(np.isin(role, (HALO, FRESH_HALO)).any() for role in roles)


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[Shape, int, int]:
    shape = draw(shapes(min_rank=1))
    total = math.prod(shape)
    start = draw(st.integers(0, total))
    return shape, start, draw(st.integers(start, total))


@given(flat_ranges())
def test_a_flat_range_is_few_boxes_with_its_elements_in_order(
    case: tuple[Shape, int, int],
) -> None:
    shape, start, stop = case
    boxes = flat_range_boxes(shape, start, stop)
    assert len(boxes) <= 2 * len(shape) - 1
    assert all(box.elements > 0 for box in boxes)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    found: list[int] = []
    for box in boxes:
        window = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        found += numbers[window].ravel().tolist()
    assert found == list(range(start, stop))


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_the_worst_flat_range_needs_two_boxes_a_dimension_less_one(rank: int) -> None:
    shape = (4,) * rank
    assert len(flat_range_boxes(shape, 1, 4**rank - 1)) == 2 * rank - 1


def test_a_flat_range_of_whole_rows_is_one_box() -> None:
    assert flat_range_boxes((4, 3, 2), 6, 18) == [Box((1, 0, 0), (3, 3, 2))]
    assert flat_range_boxes((), 0, 1) == [Box((), ())]
    assert flat_range_boxes((4, 3), 5, 5) == []


def test_leading_dimensions_alone_are_flattened() -> None:
    layout = Layout.flat_ranges((2, 3, 4), {0: (0, 2), 1: (2, 6)}, dims=2)
    assert layout.boxes(0) == (Box((0, 0, 0), (1, 2, 4)),)
    assert layout.boxes(1) == (Box((0, 2, 0), (1, 3, 4)), Box((1, 0, 0), (2, 3, 4)))
    assert layout.local_shape(1) == (16,)


def test_an_empty_range_of_no_dimensions_holds_nothing() -> None:
    layout = Layout.flat_ranges((3,), {0: (0, 0), 1: (0, 1)}, dims=0)
    assert layout.local_shape(0) == (0,)
    assert layout.local_shape(1) == (3,)


def test_an_empty_range_of_a_scalar_holds_nothing() -> None:
    layout = Layout.flat_ranges((), {0: (0, 0), 1: (0, 1)})
    assert layout.local_shape(0) is None
    assert layout.holders == (1,)


def test_a_slot_that_holds_nothing_has_no_shape() -> None:
    layout = Layout.whole((2, 3), [1], 3)
    assert [layout.local_shape(slot) for slot in range(3)] == [None, (2, 3), None]
    assert layout.boxes(0) == ()


def test_a_scalar_has_one_element_everywhere() -> None:
    layout = Layout.replicated((), 2)
    assert layout.local_shape(1) == ()
    assert layout.boxes(1) == (Box((), ()),)
    assert layout.cell_elements.tolist() == [1, 1]


def test_a_tensor_without_elements_is_laid_out_too() -> None:
    layout = reshard.spec(reshard.DeviceMesh.of(x=2), "x, -").layout((4, 0))
    assert layout.local_shape(0) == (2, 0)
    assert layout.cell_elements.tolist() == [0, 0]


def test_boxes_print_as_slices() -> None:
    assert str(Box((0, 2), (4, 5))) == "[0:4, 2:5]"
    assert Box((0, 2), (4, 5)).elements == 12
    assert str(Box((), ())) == "[]" and Box((), ()).elements == 1


ROWS = RunTable(4, 2, [(0, 0, 2, 0), (1, 2, 2, 0)])


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: Layout((5,), [ROWS], 2, [0], [[0]]), r"lengths \[4\] for .* shape \[5\]"),
        (
            lambda: Layout((4,), [ROWS], 2, [2], [[0]]),
            "cells on ranks 2 to 2, but there are 2",
        ),
        (lambda: Layout((4,), [ROWS], 2, [-1], [[0]]), "there are 2"),
        (lambda: Layout((4,), [ROWS], 2, [0], [[2]]), "dimension 0 has 2 parts, a cell takes part"),
        (lambda: Layout((4,), [ROWS], 2, [0], [[-1]]), "a cell takes part -1"),
        (
            lambda: Layout((4,), [ROWS], 2, [0], [[0]], [0], 2),
            "2 contributions with reduction None",
        ),
        (
            lambda: Layout((4,), [ROWS], 2, [0], [[0]], [0], 1, "sum"),
            "1 contributions with reduction 'sum'",
        ),
        (
            lambda: Layout((4,), [ROWS], 2, [0], [[0]], [0], 2, "median"),
            "unknown reduction 'median'",
        ),
        (
            lambda: Layout((4,), [ROWS], 2, [0], [[0]], [2], 2, "sum"),
            r"one of the 2 contributions, got \[2\]",
        ),
        (
            lambda: Layout((4,), [ROWS], 2, [0], [[0]], [0, 1], 2, "sum"),
            r"one of the 2 contributions, got \[0, 1\]",
        ),
        (lambda: Layout.replicated((4,), 2).cells_of(2), "rank 2 of a layout over ranks 0 to 1"),
        (lambda: Layout.replicated((4,), 2).local_shape(-1), "rank -1 must not be negative"),
        (
            lambda: Layout.from_boxes((4,), [(0, Box((0,), (5,)))]),
            r"box \[0:5\] is outside a tensor of shape \[4\]",
        ),
        (lambda: Layout.from_boxes((4,), [(0, Box((3,), (2,)))]), r"box \[3:2\]"),
        (lambda: Layout.from_boxes((4,), [(0, Box((0, 0), (1, 1)))]), r"box \[0:1, 0:1\]"),
        (lambda: Layout.from_boxes((4, 2), [(0, Box((0,), (1,)))]), r"box \[0:1\]"),
        (lambda: Layout.from_boxes((4, 2), [(0, Box((0, 0), (1,)))]), r"\(0, 0\) to \(1,\)"),
        (
            lambda: Layout.flat_ranges((4, 2), {1: (0, 9)}),
            "range 0:9 of rank 1 is not within the 8 indices",
        ),
        (lambda: Layout.flat_ranges((4, 2), {1: (3, 2)}), "range 3:2"),
        (lambda: Layout.flat_ranges((4, 2), {0: (0, 5)}, dims=1), "the 4 indices of the leading 1"),
        (lambda: Layout.flat_ranges((4, 2), {0: (0, 4)}, dims=3), "the leading 3 dimensions of"),
        (lambda: Layout.flat_ranges((4, 2), [(0, 4)]), r"ranges \[\(0, 4\)\]; give \{rank"),
        (lambda: Layout((4,), ["rows"], 2, [0], [[0]]), "give a RunTable for each dimension"),
        (lambda: Layout((4,), [ROWS], 2, [0, 1], [[0]]), "give one part per cell and dimension"),
        (
            lambda: Layout.from_boxes((4,), [Box((0,), (4,))]),
            "is not a rank and a box",
        ),
        (lambda: Layout.from_boxes((4,), [3]), "3 is not a rank and a box"),
    ],
)
def test_invalid_layouts_are_refused(refused: Callable[[], object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        refused()


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: Layout.replicated((2.5,), 2), r"shape \[2\.5\] must be a list of whole numbers"),
        (lambda: Layout.replicated("75", 2), "shape '75' must be a list of whole numbers"),
        (lambda: Layout.replicated(75, 2), "shape 75 must be a list of whole numbers"),
        (lambda: Layout.replicated((True,), 2), r"shape \[True\] must be"),
        (lambda: Layout.replicated((-4,), 2), r"shape \[-4\] must not be negative"),
        (lambda: Layout.replicated((4,), 2.0), r"number of ranks 2\.0"),
        (lambda: Layout.replicated((4,), 1 << 40), "1099511627776 ranks; at most 4194304"),
        (lambda: Layout.whole((4,), [0.0], 2), r"ranks \[0\.0\]"),
        (lambda: Layout((4.0,), [ROWS], 2, [0], [[0]]), r"shape \[4\.0\]"),
        (lambda: Layout((4,), [ROWS], 2.5, [0], [[0]]), r"number of ranks 2\.5"),
        (lambda: Layout((4,), [ROWS], 2, [0.5], [[0]]), r"ranks of cells \[0\.5\]"),
        (lambda: Layout((4,), [ROWS], 2, [0], [[0.5]]), r"parts of cells \[\[0\.5\]\]"),
        (lambda: Layout((4,), [ROWS], 2, [0], [[0]], [0.5]), r"contributions \[0\.5\]"),
        (lambda: Layout((4,), [ROWS], 2, [0], [[0]], None, 1.5), r"contributions 1\.5"),
        (lambda: Layout.replicated((4,), 2).cells_of(0.5), r"rank 0\.5 must be a whole number"),
        (lambda: Layout.replicated((4,), 2).local_shape("0"), "rank '0' must be a whole number"),
        (lambda: Layout.replicated((4,), 2).boxes(True), "rank True must be a whole number"),
        (lambda: Layout.from_boxes((4,), [(0, Box((0.0,), (4,)))]), r"start of a box \[0\.0\]"),
        (lambda: Layout.from_boxes((4,), [(0.5, Box((0,), (4,)))]), r"rank 0\.5"),
        (lambda: Layout.from_boxes((4,), [(0, Box((0,), (4,)))], slots=1.5), "number of ranks"),
        (lambda: Layout.flat_ranges((4,), {0: (0.0, 2)}), r"range of rank 0 \[0\.0, 2\]"),
        (lambda: Layout.flat_ranges((4,), {0: 2}), "range of rank 0 2 must be a list"),
        (lambda: Layout.flat_ranges((4,), {"0": (0, 2)}), "rank '0'"),
        (lambda: Layout.flat_ranges((4,), {0: (0, 2)}, dims=1.0), r"leading dimensions 1\.0"),
        (lambda: View(0.5, (1,)), r"offset of a view 0\.5"),
        (lambda: View(0, (1.5,)), r"strides of a view \[1\.5\]"),
        (lambda: View.row_major((2.5,)), r"shape \[2\.5\]"),
        (lambda: RankMemory(1.5), r"rank 1\.5"),
        (lambda: FileRange("model", -1), "start_bytes -1 must not be negative"),
    ],
)
def test_the_numbers_of_a_layout_are_whole_numbers(
    refused: Callable[[], object], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        refused()


def test_integers_of_numpy_and_torch_make_the_same_layout() -> None:
    known = Layout.replicated((4, 2), 3)
    assert Layout.replicated((np.int32(4), np.uint64(2)), np.int8(3)) is known
    assert Layout.replicated(np.array([4, 2]), 3) is known  # type: ignore[arg-type]
    assert Layout.replicated(torch.ones(4, 2).shape, 3) is known
    assert known.local_shape(np.int64(2)) == (4, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "slots"), [((2**31, 2**31), 1), ((2**62,), 1), ((2**30, 2**28), 16), ((2**70,), 1)]
)
def test_elements_that_64_bits_do_not_count_are_refused(shape: tuple[int, ...], slots: int) -> None:
    with pytest.raises(LayoutError, match=r"at most 576460752303423487|at most 576,460,752,303,"):
        Layout.replicated(shape, slots)


def test_the_largest_tensors_are_counted_right() -> None:
    shape = (2**29 - 1, 2**30)
    everywhere = Layout.replicated(shape, 1)
    halves = Layout.flat_ranges(shape, {0: (0, 5), 1: (5, shape[0] * shape[1])})
    assert everywhere.cell_elements.tolist() == [shape[0] * shape[1]]
    assert reshard.plan(everywhere, halves, dtype="complex128").moved_bytes == 16 * (
        shape[0] * shape[1] - 5
    )


LAYOUT = Layout.flat_ranges((4, 2), {0: (0, 4), 2: (4, 8)})


def test_a_binding_gives_addresses_and_views() -> None:
    addresses = {0: FileRange("model.bin", 128), 2: TensorName("other")}
    column_major = View(3, (1, 2))
    binding = Binding(LAYOUT, addresses, {2: column_major})
    assert binding.view(0) == View(0, (2, 1))
    assert binding.view(2) is column_major
    assert Binding.to_ranks(LAYOUT).addresses == {0: RankMemory(0), 2: RankMemory(2)}


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (
            lambda: Binding(LAYOUT, {1: RankMemory(1)}, {}),
            "rank 1 has an address, but holds no part",
        ),
        (lambda: Binding(LAYOUT, {}, {0: View(0, (1,))}), r"rank 0 has 1 strides for .* \(2, 2\)"),
        (lambda: Binding(LAYOUT, {}, {1: View(0, (1,))}), "rank 1 has 1 strides"),
        (lambda: Binding(LAYOUT, {}, {}).view(1), "rank 1 holds no part"),
    ],
)
def test_invalid_bindings_are_refused(refused: Callable[[], object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        refused()


@given(shapes(max_elements=200), st.integers(0, 5), st.data())
def test_a_views_positions_are_where_its_elements_lie(
    shape: Shape, offset: int, data: st.DataObject
) -> None:
    strides = tuple(data.draw(st.integers(-3, 7)) for _ in shape)
    positions = View(offset, strides).positions(shape)
    assert positions.shape == shape
    for index in np.ndindex(*shape):
        assert positions[index] == offset + sum(i * s for i, s in zip(index, strides, strict=True))


def test_a_view_of_another_rank_has_no_positions() -> None:
    with pytest.raises(LayoutError, match=r"2 strides for a shard of shape \[4\]"):
        View(0, (2, 1)).positions((4,))


def test_views_of_every_order() -> None:
    shape = (2, 3)
    memory = np.arange(10)
    assert memory[View.row_major(shape, 4).positions(shape)].tolist() == [[4, 5, 6], [7, 8, 9]]
    assert memory[View(0, (1, 2)).positions(shape)].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert memory[View(5, (-3, -1)).positions(shape)].tolist() == [[5, 4, 3], [2, 1, 0]]
    assert View(7, ()).positions(()).tolist() == 7


MESH = reshard.DeviceMesh.of(dp=2, tp=4)


def text_of(spec: str, *shape: int) -> str:
    return str(reshard.spec(MESH, spec).layout(shape))


def block(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_each_dimension_shows_its_parts_and_their_ranks() -> None:
    assert text_of("dp, tp", 6, 4096) == block(
        """
        6 x 4096 on ranks 0-7
        dimension 0 in 2 parts
          0:3  ranks 0-3
          3:6  ranks 4-7
        dimension 1 in 4 parts
          0:1024     ranks 0,4
          1024:2048  ranks 1,5
          2048:3072  ranks 2,6
          3072:4096  ranks 3,7
        """
    )


def test_dimensions_without_a_split_are_whole() -> None:
    assert text_of("-, -", 4, 4) == "4 x 4 on ranks 0-7\ndimension 0 whole\ndimension 1 whole"
    assert str(Layout.replicated((), 3)) == "scalar on ranks 0-2"
    assert str(Layout.replicated((0,), 1)) == "0 on rank 0\ndimension 0 whole"
    assert str(Layout.whole((2,), [], 4)) == "2 on no ranks\ndimension 0 in 1 parts"


def test_uneven_interleaved_and_padded_parts() -> None:
    assert text_of("tp", 7) == block(
        """
        7 on ranks 0-7
        dimension 0 in 4 parts
          0:2  ranks 0,4
          2:4  ranks 1,5
          4:6  ranks 2,6
          6:7  ranks 3,7
        """
    )
    assert text_of("tp@cyclic1 | only(dp=0)", 64).splitlines()[2] == (
        "  0:1 and 15 more every 4  rank 0"
    )
    assert "  1:3, 5:7  " in text_of("dp@pieces[1:2,2:2]", 7)
    assert "  768:1000, 24 of padding  ranks 3,7" in text_of("tp@pad128", 1000)
    assert "  4:5 (halo), 5:9  ranks 4-7" in text_of("dp@halo[1,1]", 9)
    assert "  nothing  ranks 3,7" in text_of("tp", 3)


def test_the_text_of_a_partial_layout_lists_contributions() -> None:
    assert text_of("tp | sum(dp)", 4).splitlines()[-3:] == [
        "sum of 2 contributions",
        "  0  ranks 0-3",
        "  1  ranks 4-7",
    ]


def test_ranks_with_several_boxes_are_listed() -> None:
    assert str(Layout.flat_ranges((4, 4), {0: (0, 6), 1: (6, 16)})) == block(
        """
        4 x 4 on ranks 0,1
          rank 0  [0:1, 0:4] [1:2, 0:2]
          rank 1  [1:2, 2:4] [2:4, 0:4]
        """
    )


@pytest.mark.parametrize("text", ["dp, tp", "dp tp, -", "tp@cyclic1, dp"])
def test_a_thousand_ranks_take_a_screen(text: str) -> None:
    mesh = reshard.DeviceMesh.of(dp=32, tp=32)
    shown = str(reshard.spec(mesh, text).layout((50257, 4096))).splitlines()
    assert len(shown) < 24 and max(map(len, shown)) < 100
    assert any("parts more" in line for line in shown)
    assert repr(reshard.spec(mesh, text).layout((50257, 4096))) == (
        "<Layout of [50257, 4096] on 1024 of 1024 ranks>"
    )


def test_a_thousand_flat_ranges_take_a_screen() -> None:
    ranges = {rank: (rank * 41, rank * 41 + 41) for rank in range(1024)}
    shown = str(Layout.flat_ranges((1024, 41), ranges)).splitlines()
    assert shown[0] == "1024 x 41 on ranks 0-1023" and len(shown) < 24
    ranges = {rank: (rank * 41, rank * 41 + 41) for rank in range(1000)}
    shown = str(Layout.flat_ranges((1000, 41), ranges, slots=1001)).splitlines()
    assert len(shown) < 24
