"""Tables of layouts and movements."""

from __future__ import annotations

import reshard
from reshard.layout import Box, Layout
from reshard.plans.plan import Plan
from reshard.plans.tables import format_layouts, format_movements
from reshard.plans.traffic import Traffic


def test_a_whole_part_among_others_is_a_part() -> None:
    """One of two parts has the length of the dimension, so that they overlap."""
    layout = Layout.from_boxes((4,), [(0, Box((0,), (4,))), (1, Box((2,), (4,)))])
    assert "4+2, overlapping" in format_layouts({"source": layout})


def planned(source: str, target: str, *shape: int, **axes: int) -> Plan:
    mesh = reshard.DeviceMesh.of(**axes)
    return reshard.plan(*(reshard.spec(mesh, text).layout(shape) for text in (source, target)))


def lines(plan: Plan, max_rows: int) -> list[str]:
    moving = plan.transfers.moving
    traffic = Traffic.of_transfers(moving, plan.target.slots)
    return format_movements(moving, traffic, max_rows).split("\n")


def test_few_transfers_box_by_box() -> None:
    plan = planned("tp, -", "-, tp", 4000, 4000, tp=2)
    assert lines(plan, 2) == [
        "from  to   elements  box",
        "----  --  ---------  -------------------",
        "   1   0  4,000,000  [2000:4000, 0:2000]",
        "   0   1  4,000,000  [0:2000, 2000:4000]",
    ]


def test_more_of_them_by_pairs() -> None:
    plan = planned("tp@cyclic1", "tp", 8, tp=2)
    assert lines(plan, 2) == [
        "from  to  elements  boxes",
        "----  --  --------  -----",
        "   0   1         2      2",
        "   1   0         2      2",
    ]


def test_many_transfers_by_kind_of_rank() -> None:
    plan = planned("tp, -", "-, tp", 64, 64, tp=64)
    assert lines(plan, 24)[2:] == ["0-63              63        63        63          63"]
    text = lines(planned("tp@sizes[1,2,3,4,0,0,0,0]", "tp@sizes[0,0,0,0,1,2,3,4]", 10, tp=8), 2)
    assert text[-1] == "... and 6 ranks that move less"
    assert [line.split()[0] for line in text[2:4]] == ["3", "7"]
