"""Boxes of parts of element groups, and where they are at both ends.

A group is a list of boxes, and a part of it a range of its elements, counted box by box and row
by row. Most boxes lie inside the range; one that a cut goes through becomes a few smaller ones
(`flat_range_boxes`)::

    group     box 0         box 1       part 5:14    box 0         box 1
            0  1  2  3    8  9 10                  .  5 | 6 7    8  9 10
            4  5  6  7   11 12 13                  -------->    11 12 13

Verification of stages: together they deliver every element of the target exactly once.

Every stage after the exchange forwards what earlier stages have delivered. Its transfers are
traced back to the origin of their boxes, and then the whole is checked like a plan without stages
(`verification`):

1. every transfer of a later stage lies inside its two target cells, where it says;
2. its box is cut by the boxes that the stages before it brought into the cell it comes from;
   together they must be all of it, of every contribution that the cell combines;
3. each of those parts comes, in the end, from the source cell that the exchange took it from:
   with these transfers instead, all stages together must be a plan.

Jobs in stages, so that every byte enters a rack, and a host, at most once.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from reshard._validation import check_type
from reshard.cost.estimate import Estimate, Part
from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.geometry.verification import check_ends, check_slots, verify_transfers
from reshard.layout import flat_range_boxes
from reshard.plans.broadcast_tree import (
    STAGES,
    Flows,
    Reach,
    across_hosts_bound_elements,
    choose_reach,
    find_flows,
    find_stages,
    spread,
)
from reshard.plans.element_groups import ElementGroups, find_element_groups
from reshard.plans.estimates import transfers_part
from reshard.plans.fragments import Fragments, divide_flows
from reshard.plans.job import Job, JobItem
from reshard.plans.run import run_stages
from reshard.plans.schedule import LATENCIES_COUNT_BYTES, PipelineTimes, count_parts
from reshard.runs import IntArray, ragged_arange
from reshard.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class FragmentBoxes:
    """Boxes of parts of groups: part `of[i]` of `group[i]` has the box `start[i]`, `shape[i]`.

    `piece` is the piece of each dimension's overlap that a box comes from.
    """

    of: IntArray
    group: IntArray
    start: IntArray
    shape: IntArray
    piece: IntArray

    def take(self, index: IntArray) -> FragmentBoxes:
        """The chosen boxes, in the order asked for."""
        columns = (self.of, self.group, self.start, self.shape, self.piece)
        return FragmentBoxes(*(column[index] for column in columns))


def find_boxes(
    groups: ElementGroups, group: IntArray, first: IntArray, stop: IntArray
) -> FragmentBoxes:
    """The boxes of elements `first[i]:stop[i]` of `group[i]`, part by part and in order."""
    boxes = groups.boxes
    # Ranges of elements on the line of all boxes of all groups: which boxes each one meets.
    base = np.append(boxes.before, 0)[boxes.begin[group]]
    low = np.searchsorted(boxes.before, base + first, side="right") - 1
    count = np.searchsorted(boxes.before, base + stop, side="left") - low
    of = np.repeat(np.arange(len(group)), count)
    box = np.repeat(low, count) + ragged_arange(count)
    size = boxes.shape[box].prod(axis=1)
    inside = boxes.before[box] - base[of]
    begin, end = np.maximum(first[of] - inside, 0), np.minimum(stop[of] - inside, size)
    start, shape = boxes.start[box], boxes.shape[box]
    cut = np.flatnonzero((begin > 0) | (end < size))
    if not len(cut):
        return FragmentBoxes(of, group[of], start, shape, boxes.piece[box])
    pieces = [
        flat_range_boxes(row, a, b)
        for row, a, b in zip(
            shape[cut].tolist(), begin[cut].tolist(), end[cut].tolist(), strict=True
        )
    ]
    # Boxes that are cut are replaced by their pieces, in place.
    count = np.ones(len(of), dtype=np.int64)
    count[cut] = [len(found) for found in pieces]
    row = np.repeat(np.arange(len(of)), count)
    is_cut = np.zeros(len(of), dtype=bool)
    is_cut[cut] = True
    start, shape, is_cut = start[row], shape[row], is_cut[row]
    start[is_cut] += np.array([box.start for found in pieces for box in found])
    shape[is_cut] = np.array([box.shape for found in pieces for box in found])
    return FragmentBoxes(of[row], group[of][row], start, shape, boxes.piece[box][row])


def exchange_transfers(
    groups: ElementGroups, boxes: FragmentBoxes, source_cell: IntArray, target_cell: IntArray
) -> Transfers:
    """Boxes from source cells to target cells, one of each a box."""
    source_slot = groups.source.cell_slot[source_cell]
    target_slot = groups.target.cell_slot[target_cell]
    return Transfers(
        source_slot,
        target_slot,
        source_cell,
        target_cell,
        groups.order[boxes.group],
        source_slot == target_slot,
        boxes.start,
        boxes.shape,
        groups.source_start(source_cell, boxes.start, boxes.piece),
        groups.target_start(target_cell, boxes.start, boxes.piece),
    )


def fan_out_transfers(
    groups: ElementGroups, boxes: FragmentBoxes, relay_cell: IntArray, target_cell: IntArray
) -> Transfers:
    """Boxes from target cells that have them to others that want them."""
    relay_slot = groups.target.cell_slot[relay_cell]
    target_slot = groups.target.cell_slot[target_cell]
    return Transfers(
        relay_slot,
        target_slot,
        relay_cell,
        target_cell,
        np.zeros(len(boxes.of), dtype=np.int64),
        relay_slot == target_slot,
        boxes.start,
        boxes.shape,
        groups.target_start(relay_cell, boxes.start, boxes.piece),
        groups.target_start(target_cell, boxes.start, boxes.piece),
    )


def transfers_of_slot(transfers: Transfers, slot: int) -> Transfers:
    """The transfers that a slot sends or receives."""
    return transfers.take((transfers.source_slot == slot) | (transfers.target_slot == slot))


def verify_stages(plan: LayoutChange, exchange: Transfers, *handed_on: Transfers) -> None:
    """Raise PlanError unless all stages, one after the other, do what the layouts ask for."""
    whole = exchange
    for stage in handed_on:
        check_slots(plan.target, plan.target, stage)
        for d in range(plan.target.ndim):
            check_ends(plan.target, stage.source_cell, stage.source_start, stage, d, "relay")
        whole = Transfers.joined((whole, _trace_back(plan, whole, stage)))
    verify_transfers(plan.source, plan.target, plan.combines, whole)


def _trace_back(plan: LayoutChange, exchange: Transfers, fan_out: Transfers) -> Transfers:
    """A stage as transfers from the source cells that its boxes come from.

    `exchange` is what the stages before it bring, as if all of it were exchanged.
    """
    row, origin = _match_boxes(plan, exchange, fan_out)
    start = np.maximum(fan_out.start[row], exchange.start[origin])
    stop = np.minimum(
        fan_out.start[row] + fan_out.shape[row], exchange.start[origin] + exchange.shape[origin]
    )
    brought = np.zeros(len(fan_out), dtype=np.int64)
    np.add.at(brought, row, (stop - start).prod(axis=1))
    counts = np.array([len(sources) for sources in plan.combines], dtype=np.int64)
    due = fan_out.elements * counts[plan.target.cell_contribution[fan_out.source_cell]]
    short = np.flatnonzero(brought != due)
    if len(short):
        at = int(short[0])
        raise PlanError(
            f"a later stage sends {fan_out.box(at)} from rank {fan_out.source_slot[at]} to rank "
            f"{fan_out.target_slot[at]}, but what comes before it brings {brought[at]} of its "
            f"{due[at]} elements there"
        )
    return Transfers(
        exchange.source_slot[origin],
        fan_out.target_slot[row],
        exchange.source_cell[origin],
        fan_out.target_cell[row],
        exchange.order[origin],
        # What the receiver had to begin with must not be handed to it.
        np.zeros(len(row), dtype=bool),
        start,
        stop - start,
        exchange.source_start[origin] + start - exchange.start[origin],
        fan_out.target_start[row] + start - fan_out.start[row],
    )


def _match_boxes(
    plan: LayoutChange, exchange: Transfers, fan_out: Transfers
) -> tuple[IntArray, IntArray]:
    """Rows of the fan-out, and rows of the exchange that brought some of the same elements."""
    described = np.concatenate(
        (
            np.column_stack((exchange.target_cell, exchange.start, exchange.shape)),
            np.column_stack((fan_out.source_cell, fan_out.start, fan_out.shape)),
        )
    )
    _, number = np.unique(described, axis=0, return_inverse=True)
    number = number.reshape(-1)
    counts = np.array([len(sources) for sources in plan.combines], dtype=np.int64)
    due = counts[plan.target.cell_contribution[fan_out.source_cell]]
    # Mostly a box is forwarded as it was received.
    row, origin = _match_equal(number[len(exchange) :], number[: len(exchange)])
    alike = np.bincount(row, minlength=len(fan_out)) == due
    row, origin = row[alike[row]], origin[alike[row]]
    # The others are compared with all that was brought into their cell.
    rest = np.flatnonzero(~alike)
    at, other = _match_equal(fan_out.source_cell[rest], exchange.target_cell)
    at = rest[at]
    meets = np.ones(len(at), dtype=bool)
    for d in range(plan.target.ndim):
        a, b = fan_out.start[at, d], exchange.start[other, d]
        meets &= (a < b + exchange.shape[other, d]) & (b < a + fan_out.shape[at, d])
    return np.concatenate((row, at[meets])), np.concatenate((origin, other[meets]))


def _match_equal(left: IntArray, right: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs of places where `left` and `right` are equal."""
    order = np.argsort(right, kind="stable")
    low = np.searchsorted(right[order], left, side="left")
    count = np.searchsorted(right[order], left, side="right") - low
    at = np.repeat(np.arange(len(left)), count)
    return at, order[np.repeat(low, count) + ragged_arange(count)]


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
            item.check_in_rank_memory("a job in stages requires")

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
        parts = (self._estimate_stages([i], name) for i, name in enumerate(self.stage_names))
        return Estimate(tuple(parts), self.topology.overhead.call_s)

    def _estimate_stages(self, stages: Iterable[int], name: str) -> Part:
        """The messages of some stages of all tensors, sent at once."""
        sizes = [item.dtype.itemsize_bytes for item in self.job.items]
        transfers = [
            (of_item[stage], size)
            for stage in stages
            for of_item, size in zip(self._all_transfers, sizes, strict=True)
        ]
        return transfers_part(transfers, self.topology, name)

    @cached_property
    def _times(self) -> PipelineTimes:
        # All stages but the last, which is within hosts, share the links between hosts.
        across = self._estimate_stages(range(len(self._stages) - 1), "across")
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
