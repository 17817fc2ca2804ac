""""""

from __future__ import annotations

import itertools

from reshard.layout import Box, Layout
from reshard.runs import HALO, Run, RunTable
from reshard.show.regions import Interval, drawn_dimensions, region_grid
from reshard.show.text_picture import picture


def test_boxes_of_one_slot_that_touch_are_one_region() -> None:
    halves = [(0, Box((0, 0), (2, 3))), (0, Box((2, 0), (4, 3)))]
    grid = region_grid(Layout.from_boxes((4, 3), halves), 0, 1)
    assert grid.rows == (Interval(0, 4),)
    assert "2" not in picture(Layout.from_boxes((4, 3), halves))


def test_a_slot_that_owns_a_rectangle_is_no_halo_holder_of_it() -> None:
    table = RunTable(4, 2, [Run(0, 0, 4, 0), Run(1, 0, 2, 0, role=HALO)])
    grid = region_grid(Layout((4,), [table], 1, [0, 0], [[0], [1]]), None, 0)
    assert [[h.is_halo for h in place] for place in grid.holdings[0]] == [[False]]


def test_limiting_twice_counts_everything_left_out() -> None:
    layout = Layout.flat_ranges((100,), {slot: (slot, slot + 1) for slot in range(100)})
    grid = region_grid(layout, None, 0)
    assert [i.left_out for i in grid.columns if i.left_out] == [36]
    for limit in (63, 10, 1, 0):
        columns = grid.limited(1, limit).columns
        assert [i.left_out for i in columns if i.left_out] == [100 - limit]
        assert columns[0].start == 0 and columns[-1].stop == 100
        assert all(a.stop == b.start for a, b in itertools.pairwise(columns))


def test_the_two_most_cut_dimensions_are_drawn() -> None:
    def part(index: int) -> Box:
        return Box((0, index, 0, 2 * index), (9, index + 1, 9, 2 * index + 2))

    layout = Layout.from_boxes((9, 3, 9, 6), [(slot, part(slot)) for slot in range(3)])
    assert drawn_dimensions(layout) == (1, 3)
