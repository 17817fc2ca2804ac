"""What does a job move, how little could that be, who is busiest, and which tensors are large?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.dtypes import DType
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.plans.job import Job, JobItem
from reshard.plans.tables.busiest import busiest_text
from reshard.plans.tables.plan_table import messages_text
from reshard.text.quantities import bytes_text, count_text, table
from reshard.text.width import shortened

# So many kinds of tensors are listed, and names are cut to so many columns.
_MOST_KINDS = 8
_NAME_WIDTH = 40


@dataclass(frozen=True, slots=True)
class _Kind:
    """Tensors that share a plan and a width, and the transfers of all of them."""

    items: list[JobItem]
    transfers: Transfers

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


def job_table(job: Job) -> str:
    """The text that `print(job)` shows. Tensors that share a plan are one line.

    >>> import reshard
    >>> from reshard.dtypes import dtype
    >>> mesh = reshard.DeviceMesh.of(tp=2)
    >>> rows, columns = (reshard.spec(mesh, text).layout((8, 8)) for text in ("tp, -", "-, tp"))
    >>> job = Job([JobItem.between_ranks(n, dtype("int8"), rows, columns) for n in "ab"])
    >>> print(job_table(job).splitlines()[-1])
    a and 1 more  int8   8x8     64 B          4
    """
    kinds = _kinds(job)
    senders = {slot for kind in kinds for slot in kind.items[0].change.source.holders}
    receivers = {slot for kind in kinds for slot in kind.items[0].change.target.holders}
    sent, received = job.sent_bytes, job.received_bytes
    rows = [
        ("moved", job.moved_bytes, ""),
        ("least possible", job.lower_bound_bytes, ""),
        ("stays in place", sum(kind.kept_bytes for kind in kinds), ""),
        ("busiest sender", int(sent.max(initial=0)), busiest_text(sent, sorted(senders))),
        (
            "busiest receiver",
            int(received.max(initial=0)),
            busiest_text(received, sorted(receivers)),
        ),
    ]
    sizes = [(name, bytes_text(size_bytes), who) for name, size_bytes, who in rows]
    moving = [kind.transfers.moving for kind in kinds]
    nothing = np.zeros(0, dtype=np.int64)
    lines = [
        f"Job of {count_text(len(job), 'tensor')} in {count_text(len(kinds), 'plan')} from "
        f"{len(senders)} to {count_text(len(receivers), 'rank')}",
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
        lines += ["", _largest(kinds)]
    return "\n".join(lines)


def _kinds(job: Job) -> list[_Kind]:
    found = {
        (of_kind.bundle.change, of_kind.bundle.dtype): of_kind.transfers
        for of_kind in job.transfers.bundles
    }
    items: dict[tuple[LayoutChange, DType], list[JobItem]] = {}
    for item in job.items:
        items.setdefault((item.change, item.dtype), []).append(item)
    return [
        _Kind(alike, found.get(key, Transfers.none(alike[0].change.source.ndim)))
        for key, alike in items.items()
    ]


def _largest(kinds: list[_Kind]) -> str:
    order = sorted(kinds, key=lambda kind: -kind.moved_bytes)
    rows = [
        (
            kind.name,
            kind.items[0].dtype.name,
            "x".join(map(str, kind.items[0].change.source.shape)) or "scalar",
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
