"""A job: a set of tensors that are moved together.

A `Job` lists `JobItem`s: tensors, each with its change of layouts and the addresses of its shards.
Tensors with equal layouts share a `LayoutChange`, so a job of thousands of tensors is planned as
often as it has distinct changes. Senders, bytes and the digest belong to the job because they
depend on all tensors together.

The senders of all tensors are chosen together (`reshard.plans.source_selection`). A rank keeps the
elements that it already holds; the elements that it lacks come from ranks that hold them, so that
the most loaded sender sends as little as possible. A box may be sent in parts by several ranks.
With `sources="stable"` holders take turns instead, and the sources of a rank do not depend on ranks
added after the existing ones.

Each transfer has an identity that sender and receiver both know without communication
(`JobTransfers.identities`): the tensor, the target rank, the unsplit box and the contribution, and
for a part of a box its range of elements. It names neither the sender nor other ranks, so ranks
added to the target leave the identities of existing transfers unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from reshard._records import Record
from reshard._validation import check_int
from reshard.binding import Binding, RankMemory
from reshard.cost.estimate import Estimate, LocalCopies
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.routes import find_needs
from reshard.geometry.transfers import Transfers
from reshard.geometry.verification import verify_transfers
from reshard.layout import Layout
from reshard.plans.estimates import check_topology, estimate_transfers, find_copies
from reshard.plans.run import run_changes
from reshard.plans.source_selection import (
    POLICIES,
    GroupTransfers,
    SenderAssignment,
    TensorGroup,
    assign_senders,
    list_all_transfers,
    list_rank_transfers,
    sent_bytes,
)
from reshard.plans.tables import format_job
from reshard.plans.traffic import Traffic
from reshard.runs import IntArray
from reshard.topology import Topology


# Jobs have tens of thousands of items, which a dataclass builds faster than `Record` does.
@dataclass(frozen=True, slots=True)
class JobItem:
    """A tensor of a job: its name, dtype, change of layouts, and the addresses of its shards.

    `dtype` may be given as a name, or as a dtype of NumPy or torch.

    Raises:
        PlanError: a name that is not a string, or a binding of another layout than the change's.
        UsageError: an unknown dtype.
    """

    name: str
    dtype: DType
    change: LayoutChange
    source: Binding
    target: Binding

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise PlanError(f"a tensor named {self.name!r}; expected a string")
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        for side, binding, layout in (
            ("source", self.source, self.change.source),
            ("target", self.target, self.change.target),
        ):
            if binding.layout is not layout:
                raise PlanError(
                    f"the {side} binding of {self.name!r} has layout {binding.layout!r}, but its "
                    f"change has {layout!r}; both must be the same layout"
                )

    def named(self, name: str) -> JobItem:
        """Return the same item with another name."""
        return JobItem(name, self.dtype, self.change, self.source, self.target)

    @classmethod
    def between_ranks(cls, name: str, dtype: object, source: Layout, target: Layout) -> JobItem:
        """Return a tensor whose slots are the memories of the ranks with the same numbers.

        Raises PlanError for layouts of different shapes, or arguments that are not layouts.
        """
        return cls(name, as_dtype(dtype), *_bind_to_ranks(source, target))

    def check_in_rank_memory(self, purpose: str, *, target_only: bool = False) -> None:
        """Raise PlanError unless each shard is in the memory of the rank with its number."""
        sides = {"source": self.source, "target": self.target}
        if target_only:
            del sides["source"]
        for side, binding in sides.items():
            for slot, address in binding.addresses.items():
                if address != RankMemory(slot):
                    raise PlanError(
                        f"{side} shard {slot} of {self.name!r} is at {address}; {purpose} each "
                        "shard in the memory of the rank with its number"
                    )


# The layers of a model usually have equal layouts.
@lru_cache(maxsize=4096)
def _bind_to_ranks(source: Layout, target: Layout) -> tuple[LayoutChange, Binding, Binding]:
    return LayoutChange(source, target), Binding.to_ranks(source), Binding.to_ranks(target)


class JobTransfers(Mapping[str, Transfers]):
    """Transfers by the names of their tensors, in the order of the job.

    Tensors without transfers are left out. `len` counts tensors, `count` transfers. The tensors of
    a tensor group share columns, and the rows of a tensor are sliced out on access.
    """

    def __init__(self, names: tuple[str, ...], groups: Iterable[GroupTransfers]) -> None:
        self._names = names
        self.groups = tuple(groups)

    @cached_property
    def _rows(self) -> dict[str, tuple[GroupTransfers, int, int]]:
        """Each tensor's group and its first and last row there."""
        entries = []
        for group in self.groups:
            bounds = group.begin.tolist()
            for index, item in enumerate(group.tensors.items.tolist()):
                if bounds[index] < bounds[index + 1]:
                    entries.append((item, (group, bounds[index], bounds[index + 1])))
        entries.sort(key=lambda entry: entry[0])
        return {self._names[item]: rows for item, rows in entries}

    def __getitem__(self, name: str) -> Transfers:
        group, low, high = self._rows[name]
        return group.transfers.take(slice(low, high))

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def shared(self) -> dict[str, Transfers]:
        """Return the transfers of every tensor; equal transfers are the same object."""
        result: dict[str, Transfers] = {}
        for group in self.groups:
            # A rank may have no transfers in a group.
            if not len(group.transfers):
                continue
            columns = [column.reshape(len(column), -1) for column in group.transfers.columns]
            rows = np.ascontiguousarray(np.concatenate(columns, axis=1, dtype=np.int64))
            distinct: dict[bytes, Transfers] = {}
            bounds = group.begin.tolist()
            for index, item in enumerate(group.tensors.items.tolist()):
                low, high = bounds[index], bounds[index + 1]
                if low == high:
                    continue
                key = rows[low:high].tobytes()
                if key not in distinct:
                    distinct[key] = group.transfers.take(slice(low, high))
                result[self._names[item]] = distinct[key]
        return result

    @property
    def count(self) -> int:
        """The number of transfers of all tensors."""
        return sum(len(group.transfers) for group in self.groups)

    def identities(self, name: str) -> list[str]:
        """Return the identity of each transfer of a tensor: 32 hexadecimal digits.

        Transfers that differ in the tensor, the receiver, the unsplit box, the contribution, the
        receiver's cell or the range of elements have different identities.
        """
        group, low, high = self._rows[name]
        rows = np.arange(low, high)
        transfers, target = group.transfers, group.tensors.change.target
        box = group.box[rows]
        whole = zip(group.whole_start[box].tolist(), group.whole_shape[box].tolist(), strict=True)
        elements = transfers.shape[rows].prod(axis=1)
        cell = transfers.target_cell[rows]
        # A cell's index on its slot, not its number, which further slots change.
        first = target.cell_slot.searchsorted(target.cell_slot[cell])
        ranges = zip(
            group.first_element[rows].tolist(),
            elements.tolist(),
            group.whole_shape[box].prod(axis=1).tolist(),
            strict=True,
        )
        ends = zip(
            transfers.target_slot[rows].tolist(),
            (cell - first).tolist(),
            transfers.order[rows].tolist(),
            strict=True,
        )
        identities = []
        for end, (start, shape), (begin, count, total) in zip(ends, whole, ranges, strict=True):
            part = "" if count == total else f"{begin}:{begin + count}"
            text = f"{name}\0{end}{start}{shape}{part}"
            identities.append(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
        return identities


class Job(Record):
    """A set of tensors that are moved together. Raises PlanError for duplicate names.

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
            raise PlanError(f"items={items!r}: expected an iterable of JobItem, such as a list")
        object.__setattr__(self, "items", tuple(items))
        object.__setattr__(self, "sources", sources)
        if sources not in POLICIES:
            others = "".join(f", or {name!r}" for name in [*POLICIES][2:])
            raise PlanError(
                f"sources={sources!r}: expected 'balanced', or 'stable' if ranks will be added to "
                f"the target{others}"
            )
        names: set[str] = set()
        for item in self.items:
            if not isinstance(item, JobItem):
                raise PlanError(
                    f"{item!r} in a job: expected a JobItem, such as JobItem.between_ranks(...)"
                )
            if item.name in names:
                raise PlanError(
                    f"two tensors of the job are named {item.name!r}; names must be unique"
                )
            names.add(item.name)

    @cached_property
    def assignment(self) -> SenderAssignment:
        """The senders of all moved elements, equal on all ranks.

        Raises PlanError if no source rank holds an element.
        """
        # The needs of tensors with equal change and dtype are computed once.
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
        """The transfers of every tensor by name, including the elements that stay."""
        return self._name_items(list_all_transfers(self.assignment, POLICIES[self.sources]))

    def for_rank(self, rank: int) -> JobTransfers:
        """Return the transfers to, within and from a rank, of every tensor.

        Raises PlanError for a negative rank, or if no source rank holds an element.

        >>> import reshard
        >>> from reshard.dtypes import dtype
        >>> whole, parts = reshard.Layout.replicated((6,), 2), reshard.Layout.whole((6,), [2], 3)
        >>> job = Job([JobItem.between_ranks("a", dtype("int8"), whole, parts)])
        >>> print(job.for_rank(1)["a"])
        1 -> 2 [3:6]
        """
        rank = check_int(rank, "rank", PlanError)
        return self._name_items(list_rank_transfers(self.assignment, rank, POLICIES[self.sources]))

    def _name_items(self, groups: Iterable[GroupTransfers]) -> JobTransfers:
        return JobTransfers(tuple(item.name for item in self.items), groups)

    @property
    def moved_bytes(self) -> int:
        """Bytes that move between slots."""
        return int(self.received_bytes.sum())

    @property
    def lower_bound_bytes(self) -> int:
        """The minimum number of bytes that any direct exchange can move."""
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
        """The bytes that each rank sends to each other rank."""
        ranks = max(len(self.sent_bytes), len(self.received_bytes), 1)
        return Traffic.of_groups(self.transfers.groups, ranks)

    @cached_property
    def digest(self) -> str:
        """A digest that is equal on two ranks exactly if their jobs are equal."""
        hasher = hashlib.blake2b(f"{self.sources}\0".encode(), digest_size=16)
        # The bytes hashed after an item's name depend only on its change and dtype.
        suffixes: dict[tuple[int, int], bytes] = {}
        for item in self.items:
            # By identity: the items keep both alive, and both are interned.
            change, key = item.change, (id(item.change), id(item.dtype))
            if key not in suffixes:
                prints = change.source.fingerprint + change.target.fingerprint
                suffixes[key] = f"\0{item.dtype.name}\0".encode() + prints
            hasher.update(item.name.encode() + suffixes[key])
        return hasher.hexdigest()

    def verify(self) -> None:
        """Check the transfers of every tensor against its layouts, see `Plan.verify`.

        Raises:
            PlanError: a box of the named tensor is missing, duplicated, misplaced or sent by a
                slot that does not hold it, or more bytes move than necessary.
        """
        transfers_of = self.transfers
        checked: set[tuple[object, ...]] = set()
        for item in self.items:
            plan = item.change
            transfers = transfers_of.get(item.name, Transfers.none(plan.source.ndim))
            # The layers of a model usually have equal transfers.
            key = (plan, *(column.tobytes() for column in transfers.columns))
            if key in checked:
                continue
            checked.add(key)
            try:
                verify_transfers(plan.source, plan.target, plan.combines, transfers)
            except PlanError as error:
                raise PlanError(f"tensor {item.name!r}: {error}") from error
        if self.moved_bytes != self.lower_bound_bytes:
            raise PlanError(
                f"the job moves {self.moved_bytes} bytes, but {self.lower_bound_bytes} suffice"
            )

    def estimate(self, topology: Topology) -> Estimate:
        """Estimate the seconds that the exchange of all tensors takes, see `reshard.cost`.

        Raises:
            PlanError: a shard that is not in the memory of the rank with its number.
            LayoutError: a rank outside the topology, or a link of unknown speed.
        """
        check_topology(topology)
        for item in self.items:
            item.check_in_rank_memory("estimates require")
        groups = [
            (group.transfers, group.tensors.change, group.tensors.dtype.itemsize_bytes)
            for group in self.transfers.groups
        ]
        copies = None
        if topology.overhead.counts_copies:
            copies = LocalCopies.joined(
                find_copies(transfers, change.source, change.target, itemsize_bytes)
                for transfers, change, itemsize_bytes in groups
            )
        sizes = [(transfers, itemsize_bytes) for transfers, _, itemsize_bytes in groups]
        part = estimate_transfers(sizes, topology, "exchange", copies)
        return Estimate((part,), topology.overhead.call_s)

    def run(
        self,
        arrays: Mapping[str, Mapping[int, Any]],
        out: Mapping[str, Mapping[int, Any]] | None = None,
        threads: int | None = None,
    ) -> dict[str, dict[int, Any]]:
        """Run the job on arrays in this process: `{name: {rank: array}}` to the same.

        Writes to the arrays in `out` if given, with at most `threads` threads, by default
        as many as processors. See `reshard.plans.run.run_changes`.
        """
        changes = [(item.name, item.dtype, item.change) for item in self.items]
        return run_changes(changes, arrays, out, threads)

    def __str__(self) -> str:
        transfers = {
            (group.tensors.change, group.tensors.dtype): group.transfers
            for group in self.transfers.groups
        }
        names: dict[tuple[LayoutChange, DType], list[str]] = {}
        for item in self.items:
            names.setdefault((item.change, item.dtype), []).append(item.name)
        # Tensors without elements are in no group of transfers.
        kinds = [
            (some, *key, transfers.get(key, Transfers.none(key[0].source.ndim)))
            for key, some in names.items()
        ]
        return format_job(kinds, self.sent_bytes, self.received_bytes)

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"<Job of {len(self.items)} tensors>"
