"""The text of `print(plan)`: both layouts, what moves, and what each rank sends and receives."""

from __future__ import annotations

import numpy as np

from reshard.dtypes import DType
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.geometry.volumes import gather_elements
from reshard.plans.tables.busiest import busiest_text
from reshard.plans.tables.layout_table import layout_table
from reshard.plans.tables.movement_table import rank_table
from reshard.plans.traffic import Traffic
from reshard.runs import IntArray
from reshard.text import bytes_text, count_text, table

# Rows of ranks that do alike; with the rest the table fits on a screen.
_MOST_ROWS = 12


def plan_table(change: LayoutChange, transfers: Transfers, dtype: DType | None = None) -> str:
    """The text that `print(plan)` shows: bytes where there is a dtype, else elements.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2, y=3)
    >>> source, target = (reshard.spec(mesh, text).layout((6, 6)) for text in ("x, y", "y, x"))
    >>> change = LayoutChange(source, target)
    >>> print(plan_table(change, change.transfers).split("\\n\\n")[1])
            ranks  dim 0: 6  dim 1: 6  copies
    ------  -----  --------  --------  ------
    source  0-5    2 x 3     3 x 2          1
    target  0-5    3 x 2     2 x 3          1
    """
    source, target = change.source, change.target
    moving = transfers.moving
    traffic = Traffic.of_transfers(transfers, max(source.slots, target.slots, 1))
    moved = traffic.total
    lines = [
        ("moved", moved, ""),
        ("least possible", change.lower_bound_elements, ""),
        gather_row(gather_elements(source, target), moved),
        ("stays in place", change.staying_elements, ""),
        busiest_row("sender", traffic.sent, source.holders),
        busiest_row("receiver", traffic.received, target.holders),
    ]
    if dtype is None:
        rows = [(name, f"{elements:,}", remark) for name, elements, remark in lines]
        body = table(rows, ("", "elements", ""), "lrl")
    else:
        width = dtype.itemsize_bytes
        rows_with_bytes = [
            (name, bytes_text(elements * width), f"{elements:,}", remark)
            for name, elements, remark in lines
        ]
        body = table(rows_with_bytes, ("", "bytes", "elements", ""), "lrrl")
    of = "" if dtype is None else f"{dtype.name} "
    parts = [
        f"Plan of {of}{list(source.shape)} from {len(source.holders):,} to "
        f"{count_text(len(target.holders), 'rank')}",
        layout_table({"source": source, "target": target}),
        body,
    ]
    if moved:
        parts.append(rank_table(traffic, _MOST_ROWS, dtype))
    parts.append(messages_text(len(moving), moving.source_slot, moving.target_slot))
    return "\n\n".join(parts)


def gather_row(gathered: int, moved: int) -> tuple[str, int, str]:
    """The row of an all-gather and a slice, the usual baseline."""
    remark = ""
    if moved and gathered != moved:
        times = gathered / moved
        remark = f"{times:.3g} times as much" if times < 100 else f"{times:,.0f} times as much"
    return ("all-gather and slice", gathered, remark)


def busiest_row(role: str, loads: IntArray, ranks: tuple[int, ...]) -> tuple[str, int, str]:
    """The row of the largest load of those who send, or who receive."""
    return (f"busiest {role}", int(loads.max(initial=0)), busiest_text(loads, ranks))


def messages_text(transfers: int, sender: IntArray, receiver: IntArray) -> str:
    """How many transfers there are, and in how many messages.

    What one rank sends to another is one message.

    >>> messages_text(5, np.array([0, 0, 1]), np.array([1, 1, 0]))
    '5 transfers in 2 messages, at most 1 from a rank and 1 to a rank'
    """
    if not len(sender):
        return "no transfers"
    # A message for each pair of ranks, a pair as one number.
    span = int(receiver.max()) + 1
    pairs = np.unique(sender * span + receiver)
    most_from, most_to = (int(np.bincount(ranks).max()) for ranks in (pairs // span, pairs % span))
    return (
        f"{count_text(transfers, 'transfer')} in {count_text(len(pairs), 'message')}, at most "
        f"{most_from:,} from a rank and {most_to:,} to a rank"
    )
