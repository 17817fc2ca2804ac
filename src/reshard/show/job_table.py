"""What does a job move, how little could that be, who is busiest, and which tensors are large?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.planning.job import Job, JobItem
from reshard.show.busiest import busiest_text
from reshard.show.plan_table import messages_text
from reshard.show.quantities import bytes_text, count_text, table
from reshard.show.text_width import shortened

# So many kinds of tensors are listed, and names are cut to so many columns.
_MOST_KINDS = 8
_NAME_WIDTH = 40


@dataclass(frozen=True, slots=True)
class _Kind:
    """Tensors that share a plan and a width."""

    items: list[JobItem]

    @property
    def name(self) -> str:
        first = shortened(self.items[0].name, _NAME_WIDTH)
        return first if len(self.items) == 1 else f"{first} and {len(self.items) - 1:,} more"

    @property
    def moved_bytes(self) -> int:
        item = self.items[0]
        return len(self.items) * item.plan.moved_elements * item.dtype.itemsize_bytes

    @property
    def kept_bytes(self) -> int:
        item, routes = self.items[0], self.items[0].plan.routes
        kept = int(routes.elements[routes.stays].sum())
        return len(self.items) * kept * item.dtype.itemsize_bytes

    @property
    def transfers(self) -> int:
        return len(self.items) * len(self.items[0].plan.transfers.moving)


def job_table(job: Job) -> str:
    """The text that `print(job)` shows. Tensors that share a plan are one line."""
    kinds = _kinds(job)
    senders = {slot for kind in kinds for slot in kind.items[0].plan.source.holders}
    receivers = {slot for kind in kinds for slot in kind.items[0].plan.target.holders}
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
    ends = [kind.items[0].plan.transfers.moving for kind in kinds]
    nothing = np.zeros(0, dtype=np.int64)
    lines = [
        f"Job of {count_text(len(job), 'tensor')} in {count_text(len(kinds), 'plan')} from "
        f"{len(senders)} to {count_text(len(receivers), 'rank')}",
        "",
        table(
            [(name, bytes_text(size), who) for name, size, who in rows], ("", "bytes", ""), "lrl"
        ),
        "",
        messages_text(
            sum(kind.transfers for kind in kinds),
            np.concatenate([nothing, *(moving.source_slot for moving in ends)]),
            np.concatenate([nothing, *(moving.target_slot for moving in ends)]),
        ),
    ]
    if kinds:
        lines += ["", _largest(kinds)]
    return "\n".join(lines)


def _kinds(job: Job) -> list[_Kind]:
    found: dict[object, _Kind] = {}
    for item in job.items:
        found.setdefault((item.plan, item.dtype), _Kind([])).items.append(item)
    return list(found.values())


def _largest(kinds: list[_Kind]) -> str:
    order = sorted(kinds, key=lambda kind: -kind.moved_bytes)
    rows = [
        (
            kind.name,
            kind.items[0].dtype.name,
            "x".join(map(str, kind.items[0].plan.source.shape)) or "scalar",
            bytes_text(kind.moved_bytes),
            f"{kind.transfers:,}",
        )
        for kind in order[:_MOST_KINDS]
    ]
    if rest := order[_MOST_KINDS:]:
        rows.append(
            (
                f"{count_text(sum(len(kind.items) for kind in rest), 'other tensor')}",
                "",
                "",
                bytes_text(sum(kind.moved_bytes for kind in rest)),
                f"{sum(kind.transfers for kind in rest):,}",
            )
        )
    return table(rows, ("tensors", "dtype", "shape", "moved", "transfers"), "lllrr")
