"""A job: a set of tensors that move together.

A `Job` lists tensors, each with its change of layouts and the places its shards are in. Tensors of
equal layouts share one change, so a job of thousands of tensors is planned as often as it has
different geometries. Bytes, senders and the digest belong to the job, since they concern all
tensors together.

Who sends what is chosen for all tensors at once. What a rank holds stays; what it lacks comes
from ranks that hold it, so that the most loaded of them sends as little as possible (see
`reshard.plans.senders`); a box may come in parts, from several. Or the senders are *stable*:
holders take turns, and what one rank gets from whom does not depend on ranks added behind the
others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from reshard.cost.estimate import Estimate
from reshard.dtypes import DType
from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.routes import find_needs
from reshard.geometry.transfers import Transfers
from reshard.geometry.verification import verify_transfers
from reshard.plans.estimates import exchange_estimate
from reshard.plans.job_item import JobItem
from reshard.plans.job_transfers import JobTransfers
from reshard.plans.run import run_changes
from reshard.plans.senders.selection import POLICIES
from reshard.plans.senders.sender_assignment import SenderAssignment, TensorGroup, assign_senders
from reshard.plans.senders.sender_transfers import (
    GroupTransfers,
    sent_bytes,
    transfers_of_all,
    transfers_of_rank,
)
from reshard.plans.tables.job_table import job_table
from reshard.plans.traffic import Traffic
from reshard.runs import IntArray
from reshard.topology import Topology


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
    sources: str

    def __init__(self, items: Iterable[JobItem], sources: str = "balanced") -> None:
        if not isinstance(items, Iterable):
            raise PlanError(f"a job of {items!r}; give its items, such as a list")
        object.__setattr__(self, "items", tuple(items))
        object.__setattr__(self, "sources", sources)
        if sources not in POLICIES:
            others = "".join(f", or {name!r}" for name in [*POLICIES][2:])
            raise PlanError(
                f"sources={sources!r}; senders are 'balanced', or 'stable' where ranks will be "
                f"added to the target{others}"
            )
        names: set[str] = set()
        for item in self.items:
            if not isinstance(item, JobItem):
                raise PlanError(f"{item!r} in a job; expected items, such as JobItem.between_ranks")
            if item.name in names:
                raise PlanError(f"tensor {item.name!r} appears twice in one job")
            names.add(item.name)

    @cached_property
    def assignment(self) -> SenderAssignment:
        """The senders of all that moves, the same on all ranks.

        Raises PlanError where a source leaves out an element.
        """
        # Tensors of one change and one dtype are a group, whose needs are found once.
        numbers: dict[tuple[LayoutChange, DType], list[int]] = {}
        for number, item in enumerate(self.items):
            numbers.setdefault((item.change, item.dtype), []).append(number)
        tensor_groups = [
            TensorGroup(plan, dtype, np.array(items), find_needs(plan.source, plan.target))
            for (plan, dtype), items in numbers.items()
        ]
        slots = max(
            (max(b.change.source.slots, b.change.target.slots) for b in tensor_groups), default=0
        )
        return assign_senders(tensor_groups, slots)

    @cached_property
    def transfers(self) -> JobTransfers:
        """The transfers of every tensor, by name; those that stay included."""
        return self._name_items(transfers_of_all(self.assignment, POLICIES[self.sources]))

    def for_rank(self, rank: int) -> JobTransfers:
        """The transfers of one rank, of every tensor: to it, within it and from it.

        Raises PlanError for a negative rank, and where a source leaves out an element.

        >>> import reshard
        >>> from reshard.dtypes import dtype
        >>> whole, parts = reshard.Layout.replicated((6,), 2), reshard.Layout.whole((6,), [2], 3)
        >>> job = Job([JobItem.between_ranks("a", dtype("int8"), whole, parts)])
        >>> print(job.for_rank(1)["a"])
        1 -> 2 [3:6]
        """
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 0:
            raise PlanError(f"rank {rank!r}; ranks are whole numbers from 0")
        found = transfers_of_rank(self.assignment, rank, POLICIES[self.sources])
        return self._name_items(found)

    def _name_items(self, found: Iterable[GroupTransfers]) -> JobTransfers:
        return JobTransfers(tuple(item.name for item in self.items), found)

    @property
    def moved_bytes(self) -> int:
        """Bytes that move between slots."""
        return int(self.received_bytes.sum())

    @property
    def lower_bound_bytes(self) -> int:
        """The fewest bytes any direct exchange can move."""
        return sum(
            item.change.lower_bound_elements * item.dtype.itemsize_bytes for item in self.items
        )

    @cached_property
    def sent_bytes(self) -> IntArray:
        """Bytes each source slot sends to others: shape `(slots,)`."""
        slots = max((item.change.source.slots for item in self.items), default=0)
        return sent_bytes(self.assignment, POLICIES[self.sources])[:slots]

    @cached_property
    def received_bytes(self) -> IntArray:
        """Bytes each target slot receives from others: shape `(slots,)`."""
        rows, rank_groups = self.assignment.rows, self.assignment.rank_groups
        of_rank_group = np.zeros(len(rank_groups.size), dtype=np.int64)
        items = np.array(
            [len(tensor_group.items) for tensor_group in self.assignment.tensor_groups],
            dtype=np.int64,
        )
        moving = ~rows.stays
        size = rows.size_bytes[moving] * items[rows.tensor_group[moving]]
        np.add.at(of_rank_group, rows.rank_group[moving], size)
        slots = max((item.change.target.slots for item in self.items), default=0)
        received: IntArray = of_rank_group[rank_groups.group[:slots]]
        return received

    @cached_property
    def traffic(self) -> Traffic:
        """The bytes that each rank sends to each other."""
        ranks = max(len(self.sent_bytes), len(self.received_bytes), 1)
        return Traffic.of_groups(self.transfers.groups, ranks)

    @cached_property
    def digest(self) -> str:
        """A digest that two ranks share exactly when they mean the same job."""
        hasher = hashlib.blake2b(f"{self.sources}\0".encode(), digest_size=16)
        # What is said of an item behind its name, by its change and dtype.
        said: dict[tuple[int, int], bytes] = {}
        for item in self.items:
            change, key = item.change, (id(item.change), id(item.dtype))
            if key not in said:
                prints = change.source.fingerprint + change.target.fingerprint
                said[key] = f"\0{item.dtype.name}\0".encode() + prints
            hasher.update(item.name.encode() + said[key])
        return hasher.hexdigest()

    def verify(self) -> None:
        """Check the transfers of every tensor against its layouts, see `Plan.verify`.

        Raises:
            PlanError: naming the tensor, where a box is missing, doubled, misplaced, or sent by
                a slot that has it not; or where more moves than must.
        """
        found = self.transfers
        checked: set[tuple[object, ...]] = set()
        for item in self.items:
            plan = item.change
            transfers = found.get(item.name, Transfers.none(plan.source.ndim))
            # The layers of a model mostly move alike.
            same = (plan, *(column.tobytes() for column in transfers.columns))
            if same in checked:
                continue
            checked.add(same)
            try:
                verify_transfers(plan.source, plan.target, plan.combines, transfers)
            except PlanError as error:
                raise PlanError(f"tensor {item.name!r}: {error}") from error
        if self.moved_bytes != self.lower_bound_bytes:
            raise PlanError(
                f"the job moves {self.moved_bytes} bytes where {self.lower_bound_bytes} suffice"
            )

    def estimate(self, topology: Topology) -> Estimate:
        """The seconds that the exchange of all tensors takes, see `reshard.cost`.

        Raises:
            PlanError: a shard that is not in the memory of the rank of its number.
            LayoutError: a rank that the topology has not, or a link that it does not know.
        """
        return exchange_estimate(self.items, self.transfers, topology)

    def run(
        self,
        arrays: Mapping[str, Mapping[int, Any]],
        out: Mapping[str, Mapping[int, Any]] | None = None,
        threads: int | None = None,
    ) -> dict[str, dict[int, Any]]:
        """Carry the job out on arrays in this process: `{name: {rank: array}}` to the same.

        Writes to the arrays in `out` where they are given, by at most `threads` threads; one
        for each processor when None. See `reshard.plans.run.run_changes`.
        """
        changes = [(item.name, item.dtype, item.change) for item in self.items]
        return run_changes(changes, arrays, out, threads)

    def __str__(self) -> str:
        return job_table(self.items, self.transfers, self.sent_bytes, self.received_bytes)

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"<Job of {len(self.items)} tensors>"
