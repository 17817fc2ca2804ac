"""What has to move for a whole set of tensors?

A `Job` lists tensors, each with its plan and the places its shards are in. Tensors of equal
layouts share one plan, so a job of thousands of tensors is planned as often as it has
different geometries. Bytes, senders and the digest belong to the job, since they concern all
tensors together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reshard.binding import Binding
from reshard.dtypes import DType
from reshard.errors import PlanError
from reshard.layout import Layout
from reshard.planning.plan import Plan
from reshard.runs import IntArray


@dataclass(frozen=True, slots=True)
class JobItem:
    """One tensor of a job. Raises PlanError where a binding is not of the plan's layout."""

    name: str
    dtype: DType
    plan: Plan
    source: Binding
    target: Binding

    def __post_init__(self) -> None:
        for side, binding, layout in (
            ("source", self.source, self.plan.source),
            ("target", self.target, self.plan.target),
        ):
            if binding.layout is not layout:
                raise PlanError(
                    f"the {side} binding of {self.name!r} is of {binding.layout!r}, its plan of "
                    f"{layout!r}"
                )

    @classmethod
    def between_ranks(cls, name: str, dtype: DType, source: Layout, target: Layout) -> JobItem:
        """A tensor whose slots are the memories of the ranks of the same numbers."""
        return cls(
            name,
            dtype,
            Plan(source, target, dtype),
            Binding.to_ranks(source),
            Binding.to_ranks(target),
        )


@dataclass(frozen=True)
class Job:
    """Tensors to move together. Raises PlanError for a name that appears twice.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(tp=2)
    >>> rows, columns = (reshard.spec(mesh, text).layout((4, 4)) for text in ("tp, -", "-, tp"))
    >>> from reshard.dtypes import dtype
    >>> job = Job([JobItem.between_ranks(n, dtype("int8"), rows, columns) for n in "ab"])
    >>> job.moved_bytes, job.lower_bound_bytes, job.received_bytes.tolist()
    (16, 16, [8, 8])
    """

    items: tuple[JobItem, ...]

    def __init__(self, items: Iterable[JobItem]) -> None:
        object.__setattr__(self, "items", tuple(items))
        names: set[str] = set()
        for item in self.items:
            if item.name in names:
                raise PlanError(f"tensor {item.name!r} appears twice in one job")
            names.add(item.name)

    @property
    def moved_bytes(self) -> int:
        """Bytes that move between slots."""
        return int(self.received_bytes.sum())

    @property
    def lower_bound_bytes(self) -> int:
        """The fewest bytes any direct exchange can move."""
        return sum(
            item.plan.lower_bound_elements * item.dtype.itemsize_bytes for item in self.items
        )

    @cached_property
    def sent_bytes(self) -> IntArray:
        """Bytes each source slot sends to others: shape `(slots,)`."""
        return self._total([(item, item.plan.sent_elements) for item in self.items])

    @cached_property
    def received_bytes(self) -> IntArray:
        """Bytes each target slot receives from others: shape `(slots,)`."""
        return self._total([(item, item.plan.received_elements) for item in self.items])

    @staticmethod
    def _total(columns: list[tuple[JobItem, IntArray]]) -> IntArray:
        total = np.zeros(max((len(column) for _, column in columns), default=0), dtype=np.int64)
        for item, column in columns:
            total[: len(column)] += column * item.dtype.itemsize_bytes
        return total

    @cached_property
    def digest(self) -> str:
        """A digest that two ranks share exactly when they mean the same job."""
        hasher = hashlib.blake2b(digest_size=16)
        for item in self.items:
            hasher.update(f"{item.name}\0{item.dtype.name}\0".encode())
            for layout in (item.plan.source, item.plan.target):
                hasher.update(layout.fingerprint)
        return hasher.hexdigest()

    def verify(self) -> None:
        """Check every plan, see `Plan.verify`. Raises PlanError naming the tensor."""
        checked: set[Plan] = set()
        for item in self.items:
            if item.plan in checked:
                continue
            checked.add(item.plan)
            try:
                item.plan.verify()
            except PlanError as error:
                raise PlanError(f"tensor {item.name!r}: {error}") from error

    def to_json(self) -> str:
        """This job as a short JSON document, see `reshard.planning.job_serialization`."""
        from reshard.planning.job_serialization import job_to_json

        return job_to_json(self)

    @staticmethod
    def from_json(text: str) -> Job:
        """The job that `to_json` wrote. Raises ReshardError for a text that is no job's document."""
        from reshard.planning.job_serialization import job_from_json

        return job_from_json(text)

    def __str__(self) -> str:
        from reshard.show.job_table import job_table

        return job_table(self)

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"<Job of {len(self.items)} tensors>"
