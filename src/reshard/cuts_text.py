"""The cuts of a layout as text: how each dimension is cut, and which ranks hold its parts.

::

    6 x 9 on ranks 0-5
    dimension 0 in 2 parts
      0:3  ranks 0-2
      3:6  ranks 3-5
    dimension 1 in 3 parts
      0:3  ranks 0,3
      3:6  ranks 1,4
      6:9  ranks 2,5

A rank that holds several boxes, as of a flat buffer, is listed with its boxes instead. Where there
are many parts, ranks or boxes, the first and the last are shown and the others counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from reshard.runs import OWNED, PAD, ROLE_NAMES, IntArray, Run, RunTable, distinct
from reshard.text.rank_sets import ranks_text

# A table of more lines is no longer read but scrolled through.
_MOST_LINES, _LAST_LINES, _MOST_RUNS = 8, 2, 3


def cuts_text(
    tables: Sequence[RunTable],
    slot: IntArray,
    part: IntArray,
    boxes_of: Callable[[int], Sequence[object]],
    carried: tuple[str, IntArray] | None = None,
) -> str:
    """The lines for a layout.

    Args:
        tables: one a dimension.
        slot: the rank of each cell, rising, shape `(cells,)`.
        part: of each dimension that a cell takes, shape `(cells, dims)`.
        boxes_of: the boxes of a rank.
        carried: of a partial layout, its reduction and the contribution of each cell.
    """
    holders = distinct(slot)
    shape = " x ".join(str(table.dimension_length) for table in tables) or "scalar"
    lines = [f"{shape} on {_name_ranks(holders)}"]
    # Ranks of several boxes, such as flat ranges, are listed by rank, all others by dimension.
    if len(holders) < len(slot):
        listed = [(_name_ranks([rank]), _list_boxes(boxes_of(rank))) for rank in _ends(holders)]
        lines += _align(listed, len(holders), "rank")
    else:
        lines += _list_dimensions(tables, slot, part)
    if carried is not None:
        reduction, contribution = carried
        which = distinct(contribution)
        lines.append(f"{reduction} of {len(which)} contributions")
        listed = [
            (str(one), _name_ranks(distinct(slot[contribution == one]))) for one in _ends(which)
        ]
        lines += _align(listed, len(which), "contribution")
    return "\n".join(lines)


def grid_text(tables: Sequence[RunTable], slot: IntArray, part: IntArray) -> str | None:
    """Return how a grid of ranks shards a tensor, such as `dim 0 over 4`; None for other layouts.

    Args:
        tables: one a dimension.
        slot: the rank of each cell, rising, shape `(cells,)`.
        part: of each dimension that a cell takes, shape `(cells, dims)`.
    """
    counts = []
    for dimension, table in enumerate(tables):
        taken = distinct(part[:, dimension])
        rows = table.rows[np.isin(table.rows[:, 0], taken)]
        runs = [Run(*row) for row in rows.tolist()]
        is_plain = all(run.role == OWNED and run.repeat == 1 for run in runs)
        length = sum(run.length for run in runs)
        if not is_plain or len(runs) != len(taken) or length != table.dimension_length:
            return None
        counts.append(len(taken))
    boxes = len(np.unique(part, axis=0)) if part.shape[1] else 1
    if len(distinct(slot)) < len(slot) or boxes != math.prod(counts):
        return None
    words = [f"dim {dimension} over {count}" for dimension, count in enumerate(counts) if count > 1]
    if len(slot) > boxes:
        copies, rest = divmod(len(slot), boxes)
        words.append(f"{copies}{'' if not rest else ' or more'} copies")
    return ", ".join(words) or None


def _list_dimensions(tables: Sequence[RunTable], slot: IntArray, part: IntArray) -> list[str]:
    lines = []
    for dimension, table in enumerate(tables):
        column = part[:, dimension]
        taken = distinct(column)
        if len(taken) == 1 and table.runs_of(int(taken[0])) == _cover(table):
            lines.append(f"dimension {dimension} whole")
            continue
        lines.append(f"dimension {dimension} in {table.parts} parts")
        listed = [
            (_list_runs(table, one), _name_ranks(slot[column == one])) for one in _ends(taken)
        ]
        lines += _align(listed, len(taken), "part")
    return lines


def _ends(numbers: IntArray) -> list[int]:
    """All numbers, or the first and the last of many."""
    if len(numbers) > _MOST_LINES:
        numbers = np.append(numbers[: _MOST_LINES - _LAST_LINES - 1], numbers[-_LAST_LINES:])
    return [int(number) for number in numbers]


def _align(listed: Sequence[tuple[str, str]], count: int, what: str) -> list[str]:
    width = max((len(left) for left, _ in listed), default=0)
    lines = [f"  {left:<{width}}  {right}" for left, right in listed]
    if count > len(listed):
        lines.insert(len(lines) - _LAST_LINES, f"  ... {count - len(listed):,} {what}s more")
    return lines


def _cover(table: RunTable) -> list[tuple[int, int, int, int]]:
    return [(0, table.dimension_length, 0, OWNED)] if table.dimension_length else []


def _name_ranks(ranks: Sequence[int] | IntArray) -> str:
    return ranks_text([int(rank) for rank in ranks]) if len(ranks) else "no ranks"


def _list_runs(table: RunTable, part: int) -> str:
    """The indices of a part: `0:4`, `0:2, 4:6, 8:10` or `0:2 and 62 more every 4`."""
    words = []
    rows = table.rows[table.rows[:, 0] == part]
    for row in rows[:_MOST_RUNS].tolist():
        run = Run(*row)
        role = "" if run.role in (OWNED, PAD) else f" ({ROLE_NAMES[run.role]})"
        if run.role == PAD:
            words.append(f"{run.length} of padding")
            continue
        starts = [run.start + run.global_step * i for i in range(min(run.repeat, _MOST_RUNS))]
        shown = starts if run.repeat <= _MOST_RUNS else starts[:1]
        words += [f"{start}:{start + run.length}{role}" for start in shown]
        if run.repeat > _MOST_RUNS:
            words[-1] += f" and {run.repeat - 1:,} more every {run.global_step}"
    if len(rows) > _MOST_RUNS:
        words.append(f"{len(rows) - _MOST_RUNS:,} runs more")
    return ", ".join(words) or "nothing"


def _list_boxes(boxes: Sequence[object]) -> str:
    words = [str(box) for box in boxes[:_MOST_RUNS]]
    if len(boxes) > _MOST_RUNS:
        words.append(f"and {len(boxes) - _MOST_RUNS:,} boxes more")
    return " ".join(words) or "nothing"
