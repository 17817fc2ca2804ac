"""The text of `print(plan)` and `print(job)`, and tables of layouts and of movements between ranks.

`format_plan` and `format_job` list the moved elements, the lower bound, and the ranks with the
largest loads. Movements are listed in a table that stays short however many ranks there are: a few
transfers box by box, more of them by pairs of ranks, and more still by ranks that send and receive
the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from reshard.dtypes import DType
from reshard.geometry.holders import Replicas, find_replicas
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.geometry.volumes import gather_elements
from reshard.layout import Layout
from reshard.plans.traffic import Traffic
from reshard.runs import PAD, IntArray, RunTable, concatenate, distinct
from reshard.text import bytes_text, count_text, ranks_text, short_rank_text, shortened, table

# The maximum number of part sizes listed, and the widths to which ranks are truncated.
_MAX_SIZES = 4
_RANKS_WIDTH, _TOP_RANKS_WIDTH = 28, 32
# The maximum number of rows of movement tables, and of the ranks of a plan, which then fits on a
# screen.
MAX_ROWS, _MAX_RANK_ROWS = 24, 12
# The maximum number of kinds of tensors listed, and the width to which names are truncated.
_MAX_KINDS, _NAME_WIDTH = 8, 40


def format_layouts(layouts: Mapping[str, Layout]) -> str:
    """Return a table of the layouts of a tensor: ranks, parts of each dimension, and copies.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2, y=3)
    >>> print(format_layouts({"source": reshard.spec(mesh, "x, -").layout((6, 8))}))
            ranks  dim 0: 6  dim 1: 8  copies
    ------  -----  --------  --------  ------
    source  0-5    2 x 3     whole          3
    """
    shape = next(iter(layouts.values())).shape
    rows = [(name, *_describe(layout)) for name, layout in layouts.items()]
    headers = ("", "ranks", *(f"dim {d}: {size:,}" for d, size in enumerate(shape)), "copies", "")
    return table(rows, headers, "ll" + "l" * len(shape) + "rl")


def _describe(layout: Layout) -> list[str]:
    """Return the ranks, the parts of each dimension, the copies and the reduction of a layout."""
    copies = find_replicas(layout.placement)
    # Cells form a grid if every product of the parts in use is a key. The product may exceed 64
    # bits.
    parts = [distinct(layout.cell_part[:, d]) for d in range(layout.ndim)]
    keys = int(np.prod([len(used) for used in parts], dtype=object)) * layout.contributions
    if copies.keys == keys:
        cuts = [
            _describe_cut(table, used) for table, used in zip(layout.tables, parts, strict=True)
        ]
    else:
        # The boxes are not a product of parts of the dimensions.
        cuts = [count_text(copies.keys, "box", "boxes"), *[""] * (layout.ndim - 1)]
    ranks = short_rank_text(layout.holders, _RANKS_WIDTH)
    reduction = (
        f"{layout.contributions:,} contributions, {layout.reduction}" if layout.reduction else ""
    )
    return [ranks, *cuts[: layout.ndim], _count_copies(copies), reduction]


def _describe_cut(table: RunTable, parts: IntArray) -> str:
    """Describe the parts of a dimension: number, lengths, and whether they are split or overlap."""
    if not len(parts):
        return "nothing"
    sizes = table.element_lengths[parts]
    if len(parts) == 1 and sizes[0] == table.dimension_length:
        return "whole"
    if (sizes == sizes[0]).all():
        text = f"{len(parts)} x {sizes[0]:,}"
    elif len(parts) <= _MAX_SIZES:
        text = "+".join(f"{size:,}" for size in sizes.tolist())
    else:
        text = f"{len(parts)} x {sizes.min():,}..{sizes.max():,}"
    runs = table.single_runs()
    # Padding is a run, but not a piece of the tensor.
    count = np.bincount(runs.part[runs.role != PAD], minlength=table.parts)[parts]
    if count.max() > 1:
        text += f" in {count.max():,} pieces"
    # Parts with halos have more elements together than the dimension.
    if sizes.sum() > table.dimension_length:
        text += ", overlapping"
    return text


def _count_copies(copies: Replicas) -> str:
    count = distinct(np.diff(copies.begin)).tolist()
    if len(count) <= 1:
        return f"{count[0]:,}" if count else "none"
    return f"{count[0]:,}..{count[-1]:,}"


def format_top_ranks(loads: IntArray, ranks: Iterable[int]) -> str:
    """Return the ranks with the largest load, and its ratio to the mean load of `ranks`.

    Args:
        loads: of each rank, shape `(ranks,)`.
        ranks: that could have a load.

    >>> format_top_ranks(np.array([4, 6, 6, 0, 0]), range(4))
    'ranks 1,2: 1.50 times the mean'
    """
    able = [rank for rank in ranks if rank < len(loads)]
    total = int(loads[able].sum()) if able else 0
    if not total:
        return ""
    largest = int(loads.max())
    top = np.flatnonzero(loads == largest).tolist()
    return f"{ranks_text(top, _TOP_RANKS_WIDTH)}: {largest * len(able) / total:.2f} times the mean"


def format_movements(moving: Transfers, traffic: Traffic, max_rows: int = MAX_ROWS) -> str:
    """Return a table of transfers between ranks, with at most `max_rows` rows.

    It lists boxes if they are few, else pairs of ranks, else ranks that send and receive the same.

    Args:
        moving: the boxes, without those that stay.
        traffic: their sum, see `Traffic.of_transfers`.
        max_rows: below the headers.

    >>> from reshard.layout import Layout
    >>> from reshard.geometry.layout_change import LayoutChange
    >>> half = Layout.flat_ranges((6,), {0: (0, 4), 1: (4, 6)})
    >>> moving = LayoutChange(half, Layout.replicated((6,), 2)).transfers.moving
    >>> print(format_movements(moving, Traffic.of_transfers(moving, 2)))
    from  to  elements  box
    ----  --  --------  -----
       1   0         2  [4:6]
       0   1         4  [0:4]
    """
    pairs = len(traffic.amount)
    if pairs <= max_rows:
        if len(moving) <= max_rows:
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
    return format_rank_loads(traffic, max_rows)


def _format_numbers(rows: Sequence[Sequence[object]], headers: Sequence[str], align: str) -> str:
    """Return a table with thousands separators."""
    texts = [[count_text(e) if isinstance(e, int) else e for e in row] for row in rows]
    return table(texts, headers, align)


def format_rank_loads(
    traffic: Traffic, max_rows: int = MAX_ROWS, dtype: DType | None = None
) -> str:
    """Return a table of the amounts that ranks send and receive, with equal ranks in a row.

    Of more than `max_rows` kinds of ranks, those with the largest load are listed. With a dtype,
    amounts are in bytes.

    >>> ring = Traffic.gathered(3, np.arange(3), (np.arange(3) + 1) % 3, np.full(3, 7))
    >>> print(format_rank_loads(ring))
    each of ranks  sends  to ranks  receives  from ranks
    -------------  -----  --------  --------  ----------
    0-2                7         1         7           1
    """
    kinds = traffic.kinds()
    if len(kinds) > max_rows:
        kinds.sort(key=lambda kind: (-kind.load, kind.ranks))

    def amount(elements: int) -> str:
        if dtype is None:
            return count_text(elements)
        return bytes_text(elements * dtype.itemsize_bytes)

    rows = [
        (
            short_rank_text(kind.ranks, _RANKS_WIDTH),
            amount(kind.sends),
            count_text(kind.receivers),
            amount(kind.receives),
            count_text(kind.senders),
        )
        for kind in kinds[:max_rows]
    ]
    headers = ("each of ranks", "sends", "to ranks", "receives", "from ranks")
    text = table(rows, headers, "lrrrr")
    left_out = sum(len(kind.ranks) for kind in kinds[max_rows:])
    if left_out:
        text += f"\n... and {count_text(left_out, 'rank')} that move less"
    return text


def format_plan(change: LayoutChange, transfers: Transfers, dtype: DType | None = None) -> str:
    """Return the text of `print(plan)`, in bytes if there is a dtype, else in elements.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(x=2, y=3)
    >>> source, target = (reshard.spec(mesh, text).layout((6, 6)) for text in ("x, y", "y, x"))
    >>> change = LayoutChange(source, target)
    >>> print(format_plan(change, change.transfers).split("\\n\\n")[1])
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
        _gather_row(gather_elements(source, target), moved),
        ("stays in place", change.staying_elements, ""),
        _busiest_row("sender", traffic.sent, source.holders),
        _busiest_row("receiver", traffic.received, target.holders),
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
    element_type = "" if dtype is None else f"{dtype.name} "
    parts = [
        f"Plan of {element_type}{list(source.shape)} from {len(source.holders):,} to "
        f"{count_text(len(target.holders), 'rank')}",
        format_layouts({"source": source, "target": target}),
        body,
    ]
    if moved:
        parts.append(format_rank_loads(traffic, _MAX_RANK_ROWS, dtype))
    parts.append(format_message_count(len(moving), moving.source_slot, moving.target_slot))
    return "\n\n".join(parts)


def _gather_row(gathered: int, moved: int) -> tuple[str, int, str]:
    """Return the row of an all-gather and a slice, the usual baseline."""
    remark = ""
    if moved and gathered != moved:
        times = gathered / moved
        remark = f"{times:.3g} times as much" if times < 100 else f"{times:,.0f} times as much"
    return ("all-gather and slice", gathered, remark)


def _busiest_row(role: str, loads: IntArray, ranks: tuple[int, ...]) -> tuple[str, int, str]:
    """Return the row of the largest load of senders or receivers."""
    return (f"busiest {role}", int(loads.max(initial=0)), format_top_ranks(loads, ranks))


def format_message_count(transfers: int, sender: IntArray, receiver: IntArray) -> str:
    """Return the number of transfers and of messages; all transfers of a pair are a message.

    >>> format_message_count(5, np.array([0, 0, 1]), np.array([1, 1, 0]))
    '5 transfers in 2 messages, at most 1 from a rank and 1 to a rank'
    """
    if not len(sender):
        return "no transfers"
    # Pairs of ranks as single numbers.
    span = int(receiver.max()) + 1
    pairs = distinct(sender * span + receiver)
    max_from, max_to = (int(np.bincount(ranks).max()) for ranks in (pairs // span, pairs % span))
    return (
        f"{count_text(transfers, 'transfer')} in {count_text(len(pairs), 'message')}, at most "
        f"{max_from:,} from a rank and {max_to:,} to a rank"
    )


def format_job(
    kinds: Sequence[tuple[Sequence[str], LayoutChange, DType, Transfers]],
    sent_bytes: IntArray,
    received_bytes: IntArray,
) -> str:
    """Return the text that `print(job)` shows, with a row for each kind of tensors.

    Args:
        kinds: the names of the tensors with equal change and dtype, and the transfers of all.
        sent_bytes, received_bytes: of each rank, shape `(ranks,)`.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(tp=2)
    >>> rows, columns = (reshard.spec(mesh, text).layout((8, 8)) for text in ("tp, -", "-, tp"))
    >>> items = [reshard.JobItem.between_ranks(name, "int8", rows, columns) for name in "ab"]
    >>> print(str(reshard.Job(items)).splitlines()[-1])
    a and 1 more  int8   8x8     64 B          4
    """
    senders = {slot for _, change, _, _ in kinds for slot in change.source.holders}
    receivers = {slot for _, change, _, _ in kinds for slot in change.target.holders}
    least = gathered = kept_bytes = 0
    moving = []
    for names, change, dtype, transfers in kinds:
        size_bytes = len(names) * dtype.itemsize_bytes
        least += size_bytes * change.lower_bound_elements
        gathered += size_bytes * gather_elements(change.source, change.target)
        staying = transfers.take(transfers.stays)
        kept_bytes += int(staying.elements.sum()) * dtype.itemsize_bytes
        moving.append(transfers.moving)
    moved = int(received_bytes.sum())
    rows = [
        ("moved", moved, ""),
        ("least possible", least, ""),
        _gather_row(gathered, moved),
        ("stays in place", kept_bytes, ""),
        _busiest_row("sender", sent_bytes, tuple(sorted(senders))),
        _busiest_row("receiver", received_bytes, tuple(sorted(receivers))),
    ]
    tensors = sum(len(names) for names, _, _, _ in kinds)
    lines = [
        f"Job of {count_text(tensors, 'tensor')} in {count_text(len(kinds), 'plan')} from "
        f"{len(senders):,} to {count_text(len(receivers), 'rank')}",
        "",
        table(
            [(name, bytes_text(size_bytes), remark) for name, size_bytes, remark in rows],
            ("", "bytes", ""),
            "lrl",
        ),
        "",
        format_message_count(
            sum(map(len, moving)),
            concatenate(transfers.source_slot for transfers in moving),
            concatenate(transfers.target_slot for transfers in moving),
        ),
    ]
    if kinds:
        largest = [
            (names, change, dtype, int(part.elements.sum()) * dtype.itemsize_bytes, len(part))
            for (names, change, dtype, _), part in zip(kinds, moving, strict=True)
        ]
        lines += ["", _table_of_largest(sorted(largest, key=lambda kind: -kind[3]))]
    return "\n".join(lines)


def _table_of_largest(
    kinds: Sequence[tuple[Sequence[str], LayoutChange, DType, int, int]],
) -> str:
    """Return the table of kinds, with their moved bytes and transfers, and a row for the rest."""
    rows = []
    for names, change, dtype, moved_bytes, transfers in kinds[:_MAX_KINDS]:
        label = shortened(names[0], _NAME_WIDTH)
        if len(names) > 1:
            label += f" and {len(names) - 1:,} more"
        shape = "x".join(map(str, change.source.shape)) or "scalar"
        rows.append((label, dtype.name, shape, bytes_text(moved_bytes), f"{transfers:,}"))
    if rest := kinds[_MAX_KINDS:]:
        others = count_text(sum(len(names) for names, *_ in rest), "other tensor")
        moved = bytes_text(sum(kind[3] for kind in rest))
        rows.append((others, "", "", moved, f"{sum(kind[4] for kind in rest):,}"))
    return table(rows, ("tensors", "dtype", "shape", "moved", "transfers"), "lllrr")
