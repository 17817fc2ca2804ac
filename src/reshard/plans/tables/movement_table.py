"""Tables of what moves between ranks, short however many ranks there are.

1. A few transfers are listed box by box.
2. More of them are added up by sender and receiver.
3. Where there are too many pairs too, ranks that do the same are one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.dtypes import DType
from reshard.geometry.transfers import Transfers
from reshard.plans.traffic import Traffic
from reshard.text import bytes_text, count_text, short_rank_text, table

MOST_ROWS = 24


def movement_table(moving: Transfers, traffic: Traffic, most_rows: int = MOST_ROWS) -> str:
    """A table of what moves between ranks, in at most `most_rows` rows and a line on the rest.

    Args:
        moving: the boxes, without those that stay.
        traffic: what they add up to, see `Traffic.of_transfers`.
        most_rows: rows below the headers.

    >>> from reshard.layout import Layout
    >>> from reshard.geometry.layout_change import LayoutChange
    >>> half = Layout.flat_ranges((6,), {0: (0, 4), 1: (4, 6)})
    >>> moving = LayoutChange(half, Layout.replicated((6,), 2)).transfers.moving
    >>> print(movement_table(moving, Traffic.of_transfers(moving, 2)))
    from  to  elements  box
    ----  --  --------  -----
       1   0         2  [4:6]
       0   1         4  [0:4]
    """
    # The most exact table that has no more rows than allowed: boxes, pairs of ranks, or kinds.
    pairs = len(traffic.amount)
    if pairs <= most_rows:
        if len(moving) <= most_rows:
            rows = [
                (moving.source_slot[row], moving.target_slot[row], elements, moving.box(row))
                for row, elements in enumerate(moving.elements.tolist())
            ]
            return _format_numbers(rows, ("from", "to", "elements", "box"), "rrrl")
        boxes = Traffic.gathered(
            traffic.ranks, moving.source_slot, moving.target_slot, np.ones_like(moving.source_slot)
        )
        columns = (traffic.sender, traffic.receiver, traffic.amount, boxes.amount)
        return _format_numbers(
            list(zip(*(column.tolist() for column in columns), strict=True)),
            ("from", "to", "elements", "boxes"),
            "rrrr",
        )
    return rank_table(traffic, most_rows)


def _format_numbers(rows: Sequence[Sequence[object]], headers: Sequence[str], align: str) -> str:
    """A table whose numbers have separated thousands."""
    texts = [[count_text(e) if isinstance(e, int) else e for e in row] for row in rows]
    return table(texts, headers, align)


def rank_table(traffic: Traffic, most_rows: int = MOST_ROWS, dtype: DType | None = None) -> str:
    """A table of what each rank sends and receives, ranks that do the same in one row.

    Where there are more than `most_rows` kinds of ranks, those that move most are listed. With a
    dtype, amounts are in bytes.

    >>> ring = Traffic.gathered(3, np.arange(3), (np.arange(3) + 1) % 3, np.full(3, 7))
    >>> print(rank_table(ring))
    each of ranks  sends  to ranks  receives  from ranks
    -------------  -----  --------  --------  ----------
    0-2                7         1         7           1
    """
    kinds = traffic.kinds()
    if len(kinds) > most_rows:
        kinds.sort(key=lambda kind: (-kind.load, kind.ranks))

    def amount(elements: int) -> str:
        if dtype is None:
            return count_text(elements)
        return bytes_text(elements * dtype.itemsize_bytes)

    rows = [
        (
            short_rank_text(kind.ranks, 28),
            amount(kind.sends),
            count_text(kind.receivers),
            amount(kind.receives),
            count_text(kind.senders),
        )
        for kind in kinds[:most_rows]
    ]
    headers = ("each of ranks", "sends", "to ranks", "receives", "from ranks")
    text = table(rows, headers, "lrrrr")
    left_out = sum(len(kind.ranks) for kind in kinds[most_rows:])
    if left_out:
        text += f"\n... and {count_text(left_out, 'rank')} that move less"
    return text
