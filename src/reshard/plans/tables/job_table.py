"""The text of `print(job)`: what moves, the least that could, the busiest ranks, the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reshard.dtypes import DType
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.geometry.volumes import gather_elements
from reshard.plans.job_item import JobItem
from reshard.plans.job_transfers import JobTransfers
from reshard.plans.tables.plan_table import busiest_row, gather_row, messages_text
from reshard.runs import IntArray
from reshard.text import bytes_text, count_text, shortened, table

# The most kinds of tensors that are listed, and the columns that names are cut to.
_MOST_KINDS = 8
_NAME_WIDTH = 40


@dataclass(frozen=True, slots=True)
class _Kind:
    """Tensors that share a plan and a width, and the transfers of all of them."""

    items: list[JobItem]
    transfers: Transfers

    @property
    def change(self) -> LayoutChange:
        return self.items[0].change

    @property
    def name(self) -> str:
        first = shortened(self.items[0].name, _NAME_WIDTH)
        return first if len(self.items) == 1 else f"{first} and {len(self.items) - 1:,} more"

    @property
    def moved_bytes(self) -> int:
        return int(self.transfers.moving.elements.sum()) * self.items[0].dtype.itemsize_bytes

    @property
    def kept_bytes(self) -> int:
        kept = self.transfers.take(self.transfers.stays)
        return int(kept.elements.sum()) * self.items[0].dtype.itemsize_bytes


def job_table(
    items: Sequence[JobItem],
    transfers: JobTransfers,
    sent_bytes: IntArray,
    received_bytes: IntArray,
) -> str:
    """The text that `print(job)` shows. Tensors that share a plan are one line.

    Args:
        items: of the job.
        transfers: of all its tensors.
        sent_bytes, received_bytes: of each rank, shape `(ranks,)`.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(tp=2)
    >>> rows, columns = (reshard.spec(mesh, text).layout((8, 8)) for text in ("tp, -", "-, tp"))
    >>> job = reshard.Job([JobItem.between_ranks(n, "int8", rows, columns) for n in "ab"])
    >>> table = job_table(job.items, job.transfers, job.sent_bytes, job.received_bytes)
    >>> print(table.splitlines()[-1])
    a and 1 more  int8   8x8     64 B          4
    """
    kinds = _find_kinds(items, transfers)
    senders = {slot for kind in kinds for slot in kind.change.source.holders}
    receivers = {slot for kind in kinds for slot in kind.change.target.holders}
    moved = int(received_bytes.sum())
    least, gathered = (
        sum(
            len(kind.items) * kind.items[0].dtype.itemsize_bytes * elements(kind.change)
            for kind in kinds
        )
        for elements in (
            lambda change: change.lower_bound_elements,
            lambda change: gather_elements(change.source, change.target),
        )
    )
    rows = [
        ("moved", moved, ""),
        ("least possible", least, ""),
        gather_row(gathered, moved),
        ("stays in place", sum(kind.kept_bytes for kind in kinds), ""),
        busiest_row("sender", sent_bytes, tuple(sorted(senders))),
        busiest_row("receiver", received_bytes, tuple(sorted(receivers))),
    ]
    sizes = [(name, bytes_text(size_bytes), remark) for name, size_bytes, remark in rows]
    # `nothing` stands in front, for a job without tensors has no columns to join.
    moving = [kind.transfers.moving for kind in kinds]
    nothing = np.zeros(0, dtype=np.int64)
    lines = [
        f"Job of {count_text(len(items), 'tensor')} in {count_text(len(kinds), 'plan')} from "
        f"{len(senders):,} to {count_text(len(receivers), 'rank')}",
        "",
        table(sizes, ("", "bytes", ""), "lrl"),
        "",
        messages_text(
            sum(map(len, moving)),
            np.concatenate([nothing, *(one.source_slot for one in moving)]),
            np.concatenate([nothing, *(one.target_slot for one in moving)]),
        ),
    ]
    if kinds:
        lines += ["", _table_of_largest(kinds)]
    return "\n".join(lines)


def _find_kinds(items: Sequence[JobItem], transfers: JobTransfers) -> list[_Kind]:
    # Tensors without elements are in no group of transfers.
    found = {
        (of_group.tensors.change, of_group.tensors.dtype): of_group.transfers
        for of_group in transfers.groups
    }
    alike: dict[tuple[LayoutChange, DType], list[JobItem]] = {}
    for item in items:
        alike.setdefault((item.change, item.dtype), []).append(item)
    return [
        _Kind(some, found.get(key, Transfers.none(some[0].change.source.ndim)))
        for key, some in alike.items()
    ]


def _table_of_largest(kinds: list[_Kind]) -> str:
    order = sorted(kinds, key=lambda kind: -kind.moved_bytes)
    rows = [
        (
            kind.name,
            kind.items[0].dtype.name,
            "x".join(map(str, kind.change.source.shape)) or "scalar",
            bytes_text(kind.moved_bytes),
            f"{len(kind.transfers.moving):,}",
        )
        for kind in order[:_MOST_KINDS]
    ]
    if rest := order[_MOST_KINDS:]:
        rows.append(
            (
                count_text(sum(len(kind.items) for kind in rest), "other tensor"),
                "",
                "",
                bytes_text(sum(kind.moved_bytes for kind in rest)),
                f"{sum(len(kind.transfers.moving) for kind in rest):,}",
            )
        )
    return table(rows, ("tensors", "dtype", "shape", "moved", "transfers"), "lllrr")
