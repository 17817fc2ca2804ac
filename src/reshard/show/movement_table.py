"""Who sends what to whom, as a table that stays short however many ranks there are.

1. A few transfers are listed box by box.
2. More of them are added up by sender and receiver.
3. Where there are too many pairs too, ranks that do the same are one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.planning.plan import Plan
from reshard.show.quantities import count_text, table
from reshard.show.rank_text import rank_text
from reshard.show.traffic import Traffic

MOST_ROWS = 24


def movement_table(plan: Plan, traffic: Traffic, most_rows: int = MOST_ROWS) -> str:
    """What moves between ranks, in at most `most_rows` rows and a line on what is left out.

    Args:
        plan: what moves.
        traffic: `Traffic.of_plan(plan)`.
        most_rows: rows below the headers.

    >>> from reshard.layout import Layout
    >>> half = Layout.flat_ranges((6,), {0: (0, 4), 1: (4, 6)})
    >>> plan = Plan(half, Layout.replicated((6,), 2))
    >>> print(movement_table(plan, Traffic.of_plan(plan)))
    from  to  elements  box
    ----  --  --------  -----
       1   0         2  [4:6]
       0   1         4  [0:4]
    """
    pairs = len(traffic.amount)
    if pairs <= most_rows:
        moving = plan.transfers.moving
        if len(moving) <= most_rows:
            rows = [
                (moving.source_slot[row], moving.target_slot[row], elements, moving.box(row))
                for row, elements in enumerate(moving.elements.tolist())
            ]
            return _counted(rows, ("from", "to", "elements", "box"), "rrrl")
        boxes = Traffic.gathered(
            traffic.ranks, moving.source_slot, moving.target_slot, np.ones_like(moving.source_slot)
        )
        columns = (traffic.sender, traffic.receiver, traffic.amount, boxes.amount)
        return _counted(
            list(zip(*(column.tolist() for column in columns), strict=True)),
            ("from", "to", "elements", "boxes"),
            "rrrr",
        )
    return _by_kind(traffic, most_rows)


def _counted(rows: Sequence[Sequence[object]], headers: Sequence[str], align: str) -> str:
    """A table whose numbers have separated thousands."""
    texts = [[count_text(e) if isinstance(e, int) else e for e in row] for row in rows]
    return table(texts, headers, align)


def _by_kind(traffic: Traffic, most_rows: int) -> str:
    columns = (traffic.sent, traffic.receivers, traffic.received, traffic.senders)
    kinds: dict[tuple[int, ...], list[int]] = {}
    for rank, numbers in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if any(numbers):
            kinds.setdefault(numbers, []).append(rank)
    shown = sorted(kinds.items(), key=lambda kind: kind[1])
    if len(shown) > most_rows:
        shown.sort(key=lambda kind: (-max(kind[0][0], kind[0][2]), kind[1]))
    rows = [(_ranks(ranks), *numbers) for numbers, ranks in shown[:most_rows]]
    headers = ("each of ranks", "sends", "to ranks", "receives", "from ranks")
    text = _counted(rows, headers, "lrrrr")
    left_out = sum(len(ranks) for _, ranks in shown[most_rows:])
    if left_out:
        text += f"\n... and {count_text(left_out, 'rank')} that move less"
    return text


def _ranks(ranks: list[int], most_letters: int = 28) -> str:
    text = rank_text(ranks)
    if len(text) <= most_letters:
        return text
    return f"{ranks[0]}..{ranks[-1]} ({count_text(len(ranks), 'rank')})"
