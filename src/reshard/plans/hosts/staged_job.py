"""Jobs in two stages, so that every byte enters a host at most once.

Within a host ranks are close, between hosts they are not. Where several ranks of a host want
the same bytes, one copy is brought in, and handed on inside::

    host 0            host 1
    rank 0 --- a ---> rank 2 --- a ---> rank 3       stage 1, exchange: far or near, divided
    rank 1 --- b ---> rank 3 --- b ---> rank 2       among those who want it
                                                     stage 2, fan-out: each relay to the others

1. What each host lacks flows there, from ranks of the host where they hold it, and else from
   elsewhere (`flows`).
2. Those who send first copies, and those who make the others, get shares that balance what each
   rank sends in all (`copy_shares`, `fragments`).
3. Fragments of flows are written out as boxes: the exchange from source cells to target cells,
   the fan-out from target cells to target cells of the same host.

This is scatter and all-gather within a host (van de Geijn 1994), with as many relays as there
are ranks that want the bytes. Every rank still receives each element it lacks once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from reshard.binding import Binding, RankMemory
from reshard.cost.estimate import Estimate
from reshard.errors import PlanError, expect_kind
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.plans.estimates import stages_estimate
from reshard.plans.hosts.element_groups import ElementGroups, find_element_groups
from reshard.plans.hosts.flows import Flows, across_hosts_bound_elements, find_flows
from reshard.plans.hosts.fragment_boxes import (
    exchange_transfers,
    fan_out_transfers,
    find_boxes,
    transfers_of_slot,
)
from reshard.plans.hosts.fragments import Fragments, divide_flows
from reshard.plans.hosts.pipeline import count_parts, pipelined_s
from reshard.plans.hosts.verification import verify_stages
from reshard.plans.job import Job
from reshard.plans.job_item import JobItem
from reshard.plans.run import run_stages
from reshard.runs import IntArray, ragged_arange
from reshard.topology import Topology

Array = TypeVar("Array")


class StageTransfers(NamedTuple):
    """The transfers of one tensor: first the exchange, then the fan-out.

    In the fan-out the sender's cell, `source_cell`, is a cell of the *target*, which the
    exchange has filled, and so is the local position `source_start`.
    """

    exchange: Transfers
    fan_out: Transfers


@dataclass(frozen=True)
class StagedJob:
    """A job between ranks on hosts, in two stages.

    Raises:
        PlanError: a shard that is not in the memory of the rank of its number; an element that
            no source slot holds.
        LayoutError: a rank that the topology has not.

    >>> import reshard
    >>> from reshard.dtypes import dtype
    >>> mesh = reshard.DeviceMesh.of(host=2, gpu=4)
    >>> cut, whole = (reshard.spec(mesh, text).layout((64,)) for text in ("host gpu", "-"))
    >>> job = reshard.Job([reshard.JobItem.between_ranks("w", dtype("int8"), cut, whole)])
    >>> staged = StagedJob(job, Topology.of(hosts=2, ranks_per_host=4))
    >>> staged.across_hosts_bytes, staged.across_hosts_bound_bytes, staged.moved_bytes
    (64, 64, 448)
    >>> staged.host_bytes.tolist(), staged.sent_bytes.tolist()
    ([[192, 32], [32, 192]], [56, 56, 56, 56, 56, 56, 56, 56])
    """

    job: Job
    topology: Topology

    def __post_init__(self) -> None:
        expect_kind(self.job, Job, "job", "make one: reshard.Job([...])", PlanError)
        expect_kind(self.topology, Topology, "topology", "give the hosts of the ranks", PlanError)
        for item in self.job.items:
            for binding in (item.source, item.target):
                _check_binding(item.name, binding)

    @cached_property
    def fragments(self) -> Fragments:
        """The parts that flows are divided into, with a sender and a relay each."""
        return divide_flows(self.job.items, self.topology)

    @cached_property
    def _item_begin(self) -> IntArray:
        return np.searchsorted(self.fragments.item, np.arange(len(self.job.items) + 1))

    def _find_parts(self, item: JobItem) -> tuple[ElementGroups, Flows]:
        return find_element_groups(item.change), find_flows(item.change, self.topology)

    def transfers(self, item: int) -> StageTransfers:
        """All transfers of item number `item`."""
        begin, end = self._item_begin[item : item + 2].tolist()
        return self._expand(item, np.arange(begin, end), None)

    def for_rank(self, rank: int) -> tuple[StageTransfers, ...]:
        """The transfers of one rank in both stages, item by item."""
        found = []
        for number in range(len(self.job.items)):
            begin, end = self._item_begin[number : number + 2].tolist()
            found.append(self._expand(number, self._select_of_rank(number, begin, end, rank), rank))
        return tuple(found)

    def _select_of_rank(self, number: int, begin: int, end: int, rank: int) -> IntArray:
        """The fragments that a rank sends, hands on or receives."""
        item, columns = self.job.items[number], self.fragments
        _, flows = self._find_parts(item)
        source, target = item.change.source, item.change.target
        mine = source.cell_slot[columns.source_cell[begin:end]] == rank
        second = source.cell_slot[columns.second_cell[begin:end]] == rank
        mine |= columns.is_direct[begin:end] & second
        receiving = np.zeros(len(flows), dtype=bool)
        flow = np.repeat(np.arange(len(flows)), np.diff(flows.receiver_begin))
        receiving[flow[target.cell_slot[flows.receiver] == rank]] = True
        mine |= receiving[columns.flow[begin:end]]
        return begin + np.flatnonzero(mine)

    def _expand(self, number: int, chosen: IntArray, rank: int | None) -> StageTransfers:
        """Fragments written out as boxes, those of one rank only unless it is None."""
        item = self.job.items[number]
        groups, flows = self._find_parts(item)
        columns = self.fragments
        flow = columns.flow[chosen]
        boxes = find_boxes(groups, flows.group[flow], columns.first[chosen], columns.stop[chosen])
        source, relay = columns.source_cell[chosen], columns.relay_cell[chosen]
        # Stage 1: every fragment goes to its relay.
        exchange = [exchange_transfers(groups, boxes, source[boxes.of], relay[boxes.of])]

        # The other receivers have each box from the relay, or from a source cell as well.
        begin = flows.receiver_begin[flow][boxes.of]
        count = flows.receiver_begin[flow + 1][boxes.of] - begin
        row = np.repeat(np.arange(len(count)), count)
        receiver = flows.receiver[np.repeat(begin, count) + ragged_arange(count)]
        is_other = receiver != relay[boxes.of[row]]
        row, receiver = row[is_other], receiver[is_other]
        of = boxes.of[row]
        direct = columns.is_direct[chosen][of]
        second = columns.second_cell[chosen][of]
        exchange.append(
            exchange_transfers(groups, boxes.take(row[direct]), second[direct], receiver[direct])
        )
        fan_out = fan_out_transfers(
            groups, boxes.take(row[~direct]), relay[of[~direct]], receiver[~direct]
        )

        # What stays is copied in the exchange, whose transfers begin in source cells.
        keeps = np.arange(len(flows.staying_group))
        if rank is not None:
            keeps = np.flatnonzero(item.change.target.cell_slot[flows.staying_target] == rank)
        group = flows.staying_group[keeps]
        kept = find_boxes(groups, group, np.zeros_like(group), groups.elements[group])
        source, target = flows.staying_source[keeps][kept.of], flows.staying_target[keeps][kept.of]
        exchange.append(exchange_transfers(groups, kept, source, target))
        both = StageTransfers(Transfers.joined(exchange), fan_out)
        if rank is None:
            return both
        return StageTransfers(*(transfers_of_slot(part, rank) for part in both))

    @cached_property
    def _list_copies(self) -> tuple[IntArray, ...]:
        """Senders, hosts that receive, and bytes: two copies for each fragment."""
        columns = self.fragments
        shape = columns.item.shape
        size, first, second, host, others = (np.zeros(shape, dtype=np.int64) for _ in range(5))
        for number, item in enumerate(self.job.items):
            rows = slice(*self._item_begin[number : number + 2].tolist())
            _, flows = self._find_parts(item)
            flow, source, target = columns.flow[rows], item.change.source, item.change.target
            size[rows] = columns.stop[rows] - columns.first[rows]
            size[rows] *= item.dtype.itemsize_bytes
            first[rows] = source.cell_slot[columns.source_cell[rows]]
            second[rows] = np.where(
                columns.is_direct[rows],
                source.cell_slot[columns.second_cell[rows]],
                target.cell_slot[columns.relay_cell[rows]],
            )
            host[rows] = flows.host[flow]
            others[rows] = np.diff(flows.receiver_begin)[flow] - 1
        return np.append(first, second), np.tile(host, 2), np.append(size, size * others)

    @cached_property
    def sent_bytes(self) -> IntArray:
        """Bytes each rank sends to others, in both stages: shape `(topology.ranks,)`."""
        rank, _, size = self._list_copies
        total = np.zeros(self.topology.ranks, dtype=np.int64)
        np.add.at(total, rank, size)
        return total

    @cached_property
    def received_bytes(self) -> IntArray:
        """Bytes each rank receives from others, in both stages: shape `(topology.ranks,)`."""
        total = np.zeros(self.topology.ranks, dtype=np.int64)
        for item in self.job.items:
            groups, flows = self._find_parts(item)
            size = groups.elements[flows.group] * item.dtype.itemsize_bytes
            rank = item.change.target.cell_slot[flows.receiver]
            np.add.at(total, rank, np.repeat(size, np.diff(flows.receiver_begin)))
        return total

    @property
    def moved_bytes(self) -> int:
        """Bytes that move between ranks, in both stages."""
        return int(self.received_bytes.sum())

    @cached_property
    def host_bytes(self) -> IntArray:
        """Bytes that go from host to host, within hosts on the diagonal: `(hosts, hosts)`."""
        rank, host, size = self._list_copies
        total = np.zeros((self.topology.hosts, self.topology.hosts), dtype=np.int64)
        np.add.at(total, (self.topology.host_of(rank), host), size)
        return total

    @property
    def across_hosts_bytes(self) -> int:
        """Bytes that go from one host to another."""
        return int(self.host_bytes.sum() - np.trace(self.host_bytes))

    @cached_property
    def across_hosts_bound_bytes(self) -> int:
        """The fewest bytes that must: of each host, what its ranks want and none of them holds.

        Contributions count one by one, as if they were combined where they are wanted.
        """
        known: dict[LayoutChange, int] = {}
        for item in self.job.items:
            if item.change not in known:
                known[item.change] = across_hosts_bound_elements(item.change, self.topology)
        return sum(known[item.change] * item.dtype.itemsize_bytes for item in self.job.items)

    @cached_property
    def digest(self) -> str:
        """A digest that two ranks share exactly when they mean the same job on the same hosts."""
        hasher = hashlib.blake2b(self.job.digest.encode(), digest_size=16)
        hasher.update(self.topology.rank_host.tobytes())
        return hasher.hexdigest()

    def verify(self) -> None:
        """Check both stages of every tensor against its layouts.

        Raises:
            PlanError: what is missing, doubled, misplaced, sent by a rank that has it not, or
                handed on by one that has not received it.
        """
        for number, item in enumerate(self.job.items):
            try:
                verify_stages(item.change, *self.transfers(number))
            except PlanError as error:
                raise PlanError(f"tensor {item.name!r}: {error}") from error

    def estimate(self) -> Estimate:
        """The seconds of the exchange and the fan-out on the topology, see `reshard.cost`.

        Raises LayoutError for a link in use that the topology does not know.
        """
        stages = [self.transfers(number) for number in range(len(self.job.items))]
        return stages_estimate(self.job.items, stages, self.topology)

    @property
    def parts(self) -> int:
        """Into how many parts the tensors are cut, so that both stages run at once."""
        return count_parts(self.received_bytes.max())

    @property
    def steps(self) -> int:
        """How many steps its pipeline has: of the parts, each a step behind the one before."""
        return self.parts + len(StageTransfers._fields) - 1

    @cached_property
    def pipelined_s(self) -> float:
        """The seconds of both stages where they run at once. Raises as `estimate` does."""
        return pipelined_s(self.estimate(), self.parts)

    def run(self, shards: Mapping[str, Mapping[int, Array]]) -> dict[str, dict[int, Array]]:
        """Carry both stages out on arrays in this process: `{name: {rank: array}}` of each.

        Raises ShardError for arrays that do not fit the source layouts.
        """
        changes = [(item.name, item.dtype, item.change) for item in self.job.items]
        return run_stages(changes, self.transfers, shards)

    def __repr__(self) -> str:
        return f"<StagedJob of {len(self.job)} tensors on {self.topology.hosts} hosts>"


def _check_binding(name: str, binding: Binding) -> None:
    for slot, address in binding.addresses.items():
        if address != RankMemory(slot):
            raise PlanError(
                f"shard {slot} of {name!r} is at {address}; a job in stages is between ranks, "
                "each shard in the memory of the rank of its number"
            )
