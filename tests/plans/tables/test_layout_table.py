"""The table of layouts."""

from __future__ import annotations

from reshard.layout import Box, Layout
from reshard.plans.tables.layout_table import layout_table


def test_a_part_that_is_the_whole_among_others_is_a_part() -> None:
    """One of two parts has the length of the dimension, so that they overlap."""
    layout = Layout.from_boxes((4,), [(0, Box((0,), (4,))), (1, Box((2,), (4,)))])
    assert "4+2, overlapping" in layout_table({"source": layout})
