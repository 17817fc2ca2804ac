"""Jobs in stages, so that every byte enters a rack, and a host, at most once.

Links within a host are faster than links between hosts. If several ranks of a host need the
same bytes, one copy is sent to the host, and forwarded within it::

    host 0            host 1
    rank 0 --- a ---> rank 2 --- a ---> rank 3       exchange: to any host, divided among the
    rank 1 --- b ---> rank 3 --- b ---> rank 2       ranks that need the bytes
                                                     fan-out: from each relay to the others

Between the two there may be stages between racks and between hosts, in which bytes that have
entered one rack or host are forwarded to others (`spreading`).

1. Each host receives what it lacks: from its own ranks if they hold it, otherwise from other
   hosts (`flows`).
2. The ranks that send first copies, and those that forward them, get shares that balance the
   total that each rank sends (`copy_shares`, `fragments`).
3. Fragments of flows are expanded to boxes: in the exchange from source cells to target cells,
   in all other stages from target cells to target cells.

This is scatter and all-gather within a host (van de Geijn 1994), with one relay for each rank
that needs the bytes. Every rank still receives each element that it lacks once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from reshard._validation import check_type
from reshard.binding import Binding, RankMemory
from reshard.cost.estimate import Estimate
from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.plans.estimates import across_part, stages_estimate
from reshard.plans.hosts.element_groups import ElementGroups, find_element_groups
from reshard.plans.hosts.flows import Flows, Reach, across_hosts_bound_elements, find_flows
from reshard.plans.hosts.fragment_boxes import (
    exchange_transfers,
    fan_out_transfers,
    find_boxes,
    transfers_of_slot,
)
from reshard.plans.hosts.fragments import Fragments, divide_flows
from reshard.plans.hosts.pipeline import LATENCIES_COUNT_BYTES, PipelineTimes, count_parts
from reshard.plans.hosts.spreading import STAGES, choose_reach, find_stages, spread
from reshard.plans.hosts.verification import verify_stages
from reshard.plans.job import Job
from reshard.plans.job_item import JobItem
from reshard.plans.run import run_stages
from reshard.runs import IntArray
from reshard.topology import Topology

Array = TypeVar("Array")


StageTransfers = tuple[Transfers, ...]
"""The transfers of one tensor, stage by stage: first the exchange, last the fan-out.

Behind the exchange the sender's cell, `source_cell`, is a cell of the *target*, which an earlier
stage has filled, and so is the local position `source_start`.
"""


@dataclass(frozen=True)
class StagedJob:
    """A job between ranks on hosts, in stages.

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
        check_type(self.job, Job, "job", "make one: reshard.Job([...])", PlanError)
        check_type(self.topology, Topology, "topology", "give the hosts of the ranks", PlanError)
        for item in self.job.items:
            for binding in (item.source, item.target):
                _check_binding(item.name, binding)

    @cached_property
    def fragments(self) -> Fragments:
        """The parts that flows are divided into, with a sender and a relay each."""
        return divide_flows(self.job.items, self.topology, self.reach)

    @cached_property
    def reach(self) -> Reach:
        """Whose receivers share what enters."""
        return choose_reach(self.job.items, self.topology)

    @cached_property
    def _stages(self) -> tuple[int, ...]:
        changes = dict.fromkeys(item.change for item in self.job.items)
        return find_stages([self._find_flows(change) for change in changes])

    @property
    def stage_names(self) -> tuple[str, ...]:
        """What its stages are called, in their order."""
        return tuple(STAGES[stage] for stage in self._stages)

    @cached_property
    def _item_begin(self) -> IntArray:
        return np.searchsorted(self.fragments.item, np.arange(len(self.job.items) + 1))

    def _find_flows(self, change: LayoutChange) -> Flows:
        return find_flows(change, self.topology, self.reach)

    def _find_parts(self, item: JobItem) -> tuple[ElementGroups, Flows]:
        return find_element_groups(item.change), self._find_flows(item.change)

    def transfers(self, item: int) -> StageTransfers:
        """All transfers of item number `item`."""
        begin, end = self._item_begin[item : item + 2].tolist()
        return self._expand(item, np.arange(begin, end), None)

    def for_rank(self, rank: int) -> tuple[StageTransfers, ...]:
        """The transfers of one rank stage by stage, item by item."""
        found = []
        for number in range(len(self.job.items)):
            begin, end = self._item_begin[number : number + 2].tolist()
            found.append(self._expand(number, self._select_of_rank(number, begin, end, rank), rank))
        return tuple(found)

    def _select_of_rank(self, number: int, begin: int, end: int, rank: int) -> IntArray:
        """The fragments that a rank sends, forwards or receives."""
        item, columns = self.job.items[number], self.fragments
        _, flows = self._find_parts(item)
        source, target = item.change.source, item.change.target
        mine = source.cell_slot[columns.source_cell[begin:end]] == rank
        second = source.cell_slot[columns.second_cell[begin:end]] == rank
        mine |= columns.is_direct[begin:end] & second
        receiving = np.zeros(len(flows), dtype=bool)
        flow = np.repeat(np.arange(len(flows)), flows.receivers)
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
        source, relay = columns.source_cell[chosen], flows.receiver[columns.relay[chosen]]
        # First every fragment goes to its relay.
        exchange = [exchange_transfers(groups, boxes, source[boxes.of], relay[boxes.of])]

        # The other receivers have each box from those who have it, or from a source cell as well.
        on = spread(flows, flow[boxes.of], columns.relay[chosen][boxes.of])
        direct = columns.is_direct[chosen][boxes.of][on.row]
        row = on.row[direct]
        second = columns.second_cell[chosen][boxes.of][row]
        receiver = flows.receiver[on.receiver[direct]]
        exchange.append(exchange_transfers(groups, boxes.take(row), second, receiver))
        handed_on = []
        for stage in self._stages[1:]:
            at = np.flatnonzero(~direct & (on.stage == stage))
            giver, receiver = flows.receiver[on.giver[at]], flows.receiver[on.receiver[at]]
            handed_on.append(fan_out_transfers(groups, boxes.take(on.row[at]), giver, receiver))

        # What stays is copied in the exchange, whose transfers begin in source cells.
        keeps = np.arange(len(flows.staying_group))
        if rank is not None:
            keeps = np.flatnonzero(item.change.target.cell_slot[flows.staying_target] == rank)
        group = flows.staying_group[keeps]
        kept = find_boxes(groups, group, np.zeros_like(group), groups.elements[group])
        source, target = flows.staying_source[keeps][kept.of], flows.staying_target[keeps][kept.of]
        exchange.append(exchange_transfers(groups, kept, source, target))
        stages = (Transfers.joined(exchange), *handed_on)
        if rank is None:
            return stages
        return tuple(transfers_of_slot(part, rank) for part in stages)

    @cached_property
    def _list_copies(self) -> tuple[IntArray, ...]:
        """Senders, receivers and bytes of all copies, added up by pairs of both."""
        columns, ranks = self.fragments, self.topology.ranks
        total: dict[int, int] = {}
        for number, item in enumerate(self.job.items):
            rows = slice(*self._item_begin[number : number + 2].tolist())
            _, flows = self._find_parts(item)
            slot = item.change.target.cell_slot[flows.receiver]
            source = item.change.source.cell_slot
            size = (columns.stop[rows] - columns.first[rows]) * item.dtype.itemsize_bytes
            on = spread(flows, columns.flow[rows], columns.relay[rows])
            sender = np.where(
                columns.is_direct[rows][on.row],
                source[columns.second_cell[rows][on.row]],
                slot[on.giver],
            )
            pair = np.concatenate(
                (
                    source[columns.source_cell[rows]] * ranks + slot[columns.relay[rows]],
                    sender * ranks + slot[on.receiver],
                )
            )
            pair, at = np.unique(pair, return_inverse=True)
            moved = np.zeros(len(pair), dtype=np.int64)
            np.add.at(moved, at.reshape(-1), np.append(size, size[on.row]))
            for one, size_bytes in zip(pair.tolist(), moved.tolist(), strict=True):
                total[one] = total.get(one, 0) + size_bytes
        pair = np.array(sorted(total), dtype=np.int64)
        moved = np.array([total[one] for one in pair.tolist()], dtype=np.int64)
        return pair // ranks, pair % ranks, moved

    @cached_property
    def sent_bytes(self) -> IntArray:
        """Bytes each rank sends to others, in all stages: shape `(topology.ranks,)`."""
        sender, _, size = self._list_copies
        total = np.zeros(self.topology.ranks, dtype=np.int64)
        np.add.at(total, sender, size)
        return total

    @cached_property
    def received_bytes(self) -> IntArray:
        """Bytes each rank receives from others, in all stages: shape `(topology.ranks,)`."""
        total = np.zeros(self.topology.ranks, dtype=np.int64)
        for item in self.job.items:
            groups, flows = self._find_parts(item)
            size = groups.elements[flows.group] * item.dtype.itemsize_bytes
            rank = item.change.target.cell_slot[flows.receiver]
            np.add.at(total, rank, np.repeat(size, flows.receivers))
        return total

    @property
    def moved_bytes(self) -> int:
        """Bytes that move between ranks, in all stages."""
        return int(self.received_bytes.sum())

    @cached_property
    def host_bytes(self) -> IntArray:
        """Bytes that go from host to host, within hosts on the diagonal: `(hosts, hosts)`."""
        sender, receiver, size = self._list_copies
        total = np.zeros((self.topology.hosts, self.topology.hosts), dtype=np.int64)
        np.add.at(total, (self.topology.host_of(sender), self.topology.host_of(receiver)), size)
        return total

    @property
    def across_hosts_bytes(self) -> int:
        """Bytes that go from one host to another."""
        return int(self.host_bytes.sum() - np.trace(self.host_bytes))

    @property
    def across_racks_bytes(self) -> int:
        """Bytes that go from one rack to another."""
        rack = self.topology.host_rack
        return int(self.host_bytes[rack[:, None] != rack[None, :]].sum())

    @cached_property
    def across_hosts_bound_bytes(self) -> int:
        """The fewest bytes that must: of each host, what its ranks want and none of them holds.

        Contributions count one by one, as if they were combined where they are wanted.
        """
        return self._find_bound_bytes(self.topology)

    @cached_property
    def across_racks_bound_bytes(self) -> int:
        """The fewest bytes that must go from rack to rack, likewise."""
        return self._find_bound_bytes(Topology(self.topology.host_rack[self.topology.rank_host]))

    def _find_bound_bytes(self, boxes: Topology) -> int:
        known: dict[LayoutChange, int] = {}
        for item in self.job.items:
            if item.change not in known:
                known[item.change] = across_hosts_bound_elements(item.change, boxes)
        return sum(known[item.change] * item.dtype.itemsize_bytes for item in self.job.items)

    @cached_property
    def digest(self) -> str:
        """A digest that two ranks share exactly when they mean the same job on the same hosts."""
        hasher = hashlib.blake2b(self.job.digest.encode(), digest_size=16)
        hasher.update(self.topology.rank_host.tobytes() + self.topology.host_rack.tobytes())
        return hasher.hexdigest()

    def verify(self) -> None:
        """Check all stages of every tensor against its layouts.

        Raises:
            PlanError: elements are missing, duplicated, misplaced, sent by a rank that does not
                hold them, or forwarded by one that has not received them.
        """
        for number, item in enumerate(self.job.items):
            try:
                verify_stages(item.change, *self.transfers(number))
            except PlanError as error:
                raise PlanError(f"tensor {item.name!r}: {error}") from error

    @cached_property
    def _all_transfers(self) -> list[StageTransfers]:
        return [self.transfers(number) for number in range(len(self.job.items))]

    def estimate(self) -> Estimate:
        """The seconds of all stages on the topology, one after another, see `reshard.cost`.

        Raises LayoutError for a link in use that the topology does not know.
        """
        return stages_estimate(self.job.items, self._all_transfers, self.stage_names, self.topology)

    @cached_property
    def _times(self) -> PipelineTimes:
        across = across_part(self.job.items, self._all_transfers, self.topology)
        return PipelineTimes.of(self.estimate(), across)

    @cached_property
    def parts(self) -> int:
        """Into how many parts the tensors are cut, so that all stages run at once.

        Where the topology knows no links, what the rank that receives most receives stands for
        their times.
        """
        topology = self.topology
        links = [topology.within_host, topology.between_hosts]
        links += [topology.between_racks] if topology.racks > 1 else []
        if None in links:
            return count_parts(float(self.received_bytes.max()), LATENCIES_COUNT_BYTES)
        return self._times.best_parts

    @property
    def pipelined_s(self) -> float:
        """The seconds of all stages where they run at once. Raises as `estimate` does."""
        return self._times.in_parts(self.parts)

    def run(self, shards: Mapping[str, Mapping[int, Array]]) -> dict[str, dict[int, Array]]:
        """Carry all stages out on arrays in this process: `{name: {rank: array}}` of each.

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
