"""Hierarchical jobs: every byte enters a rack, and a host, at most once.

Links within a host are faster than links between hosts. If several ranks of a host need the same
bytes, a single copy is sent to the host, and forwarded within it::

    host 0            host 1
    rank 0 --- a ---> rank 2 --- a ---> rank 3       exchange: to any host, divided among the
    rank 1 --- b ---> rank 3 --- b ---> rank 2       ranks that need the bytes
                                                     fan-out: from each relay to the others

Between the two there may be stages between racks and between hosts, in which bytes that have
entered a rack or host are forwarded to others.

1. Each host receives the elements that it lacks: from its own ranks if they hold them, otherwise
   from other hosts. Elements with the same holders and receivers (`element_groups`) form flows
   (`broadcast_tree`).
2. The ranks that send first copies, and those that forward them, get shares that balance the total
   that each rank sends (`fragments`).
3. Fragments of flows are expanded to boxes: in the exchange from source cells to target cells, in
   all other stages from target cells to target cells.
4. The stages run as a pipeline over parts of the tensors (`schedule`).

This is scatter and all-gather within a host (van de Geijn 1994), with a relay for each rank that
needs the bytes. Every rank still receives each element that it lacks once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TypeVar

import numpy as np

from reshard._records import Record
from reshard._validation import check_type
from reshard.cost.estimate import Estimate, Part
from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.geometry.verification import check_ends, check_slots, verify_transfers
from reshard.plans import broadcast_tree, schedule
from reshard.plans.element_groups import ElementGroups, GroupBoxes, find_element_groups
from reshard.plans.estimates import estimate_transfers
from reshard.plans.fragments import Fragments, divide_flows
from reshard.plans.job import Job, JobItem
from reshard.plans.run import run_stages
from reshard.plans.source_selection import split_boxes
from reshard.runs import IntArray, find_distinct, ragged_numbers, sum_by
from reshard.topology import Topology


def find_boxes(
    groups: ElementGroups, group: IntArray, first: IntArray, stop: IntArray
) -> tuple[IntArray, GroupBoxes]:
    """Return the boxes of elements `first[i]:stop[i]` of `group[i]`, and the `i` of each.

    Elements are counted box by box in row-major order. Most boxes are inside the range; a box that
    contains a cut is split into a few smaller ones (`split_boxes`)::

        group     box 0         box 1       part 5:14    box 0         box 1
                0  1  2  3    8  9 10                  .  5 | 6 7    8  9 10
                4  5  6  7   11 12 13                  -------->    11 12 13
    """
    boxes = groups.boxes
    # The boxes that intersect each range, among all boxes of all groups.
    before = groups.elements_before
    base = np.append(before, 0)[np.searchsorted(boxes.group, group)]
    low = np.searchsorted(before, base + first, side="right") - 1
    count = np.searchsorted(before, base + stop, side="left") - low
    index, box = ragged_numbers(low, count)
    chosen = boxes.take(box)
    inside, size = before[box] - base[index], chosen.shape.prod(axis=1)
    begin, end = np.maximum(first[index] - inside, 0), np.minimum(stop[index] - inside, size)
    cut = np.flatnonzero((begin > 0) | (end < size))
    if not len(cut):
        return index, chosen
    of_cut, part_start, part_shape = split_boxes(chosen.shape[cut], begin[cut], end[cut])
    # The parts replace the box that was split, in the same position.
    count = np.ones(len(index), dtype=np.int64)
    count[cut] = np.bincount(of_cut, minlength=len(cut))
    row = np.repeat(np.arange(len(index)), count)
    is_cut = np.zeros(len(index), dtype=bool)
    is_cut[cut] = True
    chosen, is_cut = chosen.take(row), is_cut[row]
    chosen.start[is_cut] += part_start
    chosen.shape[is_cut] = part_shape
    return index[row], chosen


def make_transfers(
    groups: ElementGroups,
    boxes: GroupBoxes,
    cell: IntArray,
    target_cell: IntArray,
    *,
    is_forwarded: bool = False,
) -> Transfers:
    """Return the transfers of boxes, each from a source cell to a target cell.

    Boxes that are forwarded are taken from a target cell that has received them.
    """
    sender = groups.target if is_forwarded else groups.source
    find_start = groups.target_start if is_forwarded else groups.source_start
    slot, target_slot = sender.cell_slot[cell], groups.target.cell_slot[target_cell]
    order = groups.order[boxes.group]
    return Transfers(
        slot,
        target_slot,
        cell,
        target_cell,
        np.zeros_like(order) if is_forwarded else order,
        slot == target_slot,
        boxes.start,
        boxes.shape,
        find_start(cell, boxes.start, boxes.piece),
        groups.target_start(target_cell, boxes.start, boxes.piece),
    )


def verify_stages(plan: LayoutChange, exchange: Transfers, *forwarded: Transfers) -> None:
    """Raise PlanError unless the stages deliver every element of the target exactly once.

    Every stage after the exchange forwards elements that earlier stages have delivered. Its
    transfers are traced back to the origin of their boxes, and all transfers are then verified like
    those of a plan without stages:

    1. Every transfer of a later stage is inside its two target cells, at the given offsets.
    2. Its box is split by the boxes that earlier stages delivered to the cell it comes from.
       Together they must cover it, for every contribution that the cell combines.
    3. Each of these parts comes from the source cell from which the exchange took it.
    """
    whole = exchange
    for stage in forwarded:
        check_slots(plan.target, plan.target, stage)
        for d in range(plan.target.ndim):
            check_ends(plan.target, stage.source_cell, stage.source_start, stage, d, "relay")
        whole = Transfers.joined((whole, _trace_back(plan, whole, stage)))
    verify_transfers(plan.source, plan.target, plan.combines, whole)


def _trace_back(plan: LayoutChange, exchange: Transfers, fan_out: Transfers) -> Transfers:
    """Return the transfers of a stage from the source cells from which its boxes originate.

    `exchange` are the transfers of all earlier stages, traced back likewise.
    """
    row, origin = _match_boxes(plan, exchange, fan_out)
    start = np.maximum(fan_out.start[row], exchange.start[origin])
    stop = np.minimum(
        fan_out.start[row] + fan_out.shape[row], exchange.start[origin] + exchange.shape[origin]
    )
    delivered = sum_by(len(fan_out), row, (stop - start).prod(axis=1))
    counts = np.array([len(sources) for sources in plan.combines], dtype=np.int64)
    expected = fan_out.elements * counts[plan.target.cell_contribution[fan_out.source_cell]]
    short = np.flatnonzero(delivered != expected)
    if len(short):
        at = int(short[0])
        raise PlanError(
            f"a later stage sends {fan_out.box(at)} from rank {fan_out.source_slot[at]} to rank "
            f"{fan_out.target_slot[at]}, but earlier stages deliver {delivered[at]} of its "
            f"{expected[at]} elements to the sender"
        )
    return Transfers(
        exchange.source_slot[origin],
        fan_out.target_slot[row],
        exchange.source_cell[origin],
        fan_out.target_cell[row],
        exchange.order[origin],
        # Elements that the receiver held from the start must not be forwarded to it.
        np.zeros(len(row), dtype=bool),
        start,
        stop - start,
        exchange.source_start[origin] + start - exchange.start[origin],
        fan_out.target_start[row] + start - fan_out.start[row],
    )


def _match_boxes(
    plan: LayoutChange, exchange: Transfers, fan_out: Transfers
) -> tuple[IntArray, IntArray]:
    """Return pairs of rows of the fan-out and of the exchange that have elements in common."""
    boxes = np.concatenate(
        (
            np.column_stack((exchange.target_cell, exchange.start, exchange.shape)),
            np.column_stack((fan_out.source_cell, fan_out.start, fan_out.shape)),
        )
    )
    _, _, number = find_distinct(boxes)
    counts = np.array([len(sources) for sources in plan.combines], dtype=np.int64)
    expected = counts[plan.target.cell_contribution[fan_out.source_cell]]
    # Most boxes are forwarded as they were received.
    row, origin = _match_equal(number[len(exchange) :], number[: len(exchange)])
    is_equal = np.bincount(row, minlength=len(fan_out)) == expected
    row, origin = row[is_equal[row]], origin[is_equal[row]]
    # The others are compared with all boxes that were delivered to their cell.
    rest = np.flatnonzero(~is_equal)
    at, other = _match_equal(fan_out.source_cell[rest], exchange.target_cell)
    at = rest[at]
    intersects = np.ones(len(at), dtype=bool)
    for d in range(plan.target.ndim):
        a, b = fan_out.start[at, d], exchange.start[other, d]
        intersects &= (a < b + exchange.shape[other, d]) & (b < a + fan_out.shape[at, d])
    return np.concatenate((row, at[intersects])), np.concatenate((origin, other[intersects]))


def _match_equal(left: IntArray, right: IntArray) -> tuple[IntArray, IntArray]:
    """Return all pairs of indices at which `left` and `right` are equal."""
    order = np.argsort(right, kind="stable")
    low = np.searchsorted(right[order], left, side="left")
    count = np.searchsorted(right[order], left, side="right") - low
    at, entry = ragged_numbers(low, count)
    return at, order[entry]


Array = TypeVar("Array")


StageTransfers = tuple[Transfers, ...]
"""The transfers of a tensor, stage by stage: first the exchange, last the fan-out.

In stages after the exchange, `source_cell` is a cell of the *target* that an earlier stage has
filled, and `source_start` is an offset in it.
"""


class StagedJob(Record):
    """A job between ranks on hosts, in stages.

    Raises:
        PlanError: a shard that is not in the memory of the rank with its number; an element that
            no source slot holds.
        LayoutError: a rank outside the topology.

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
        """The parts of flows, with a sender and a relay each."""
        return divide_flows(self.job.items, self.topology, self.reach)

    @cached_property
    def reach(self) -> broadcast_tree.Reach:
        """The receivers that share a flow."""
        return broadcast_tree.choose_reach(self.job.items, self.topology)

    @cached_property
    def _stages(self) -> tuple[int, ...]:
        changes = dict.fromkeys(item.change for item in self.job.items)
        return broadcast_tree.find_stages([self._find_flows(change) for change in changes])

    @property
    def stage_names(self) -> tuple[str, ...]:
        """The names of the stages, in order."""
        return tuple(broadcast_tree.STAGES[stage] for stage in self._stages)

    @cached_property
    def _item_begin(self) -> IntArray:
        return np.searchsorted(self.fragments.item, np.arange(len(self.job.items) + 1))

    def _find_flows(self, change: LayoutChange) -> broadcast_tree.Flows:
        return broadcast_tree.find_flows(change, self.topology, self.reach)

    def _find_parts(self, item: JobItem) -> tuple[ElementGroups, broadcast_tree.Flows]:
        return find_element_groups(item.change), self._find_flows(item.change)

    def transfers(self, item: int) -> StageTransfers:
        """Return all transfers of item number `item`."""
        begin, end = self._item_begin[item : item + 2].tolist()
        return self._expand(item, np.arange(begin, end), None)

    def for_rank(self, rank: int) -> tuple[StageTransfers, ...]:
        """Return the transfers of a rank for each item, stage by stage."""
        transfers = []
        for number in range(len(self.job.items)):
            begin, end = self._item_begin[number : number + 2].tolist()
            fragments = self._select_of_rank(number, begin, end, rank)
            transfers.append(self._expand(number, fragments, rank))
        return tuple(transfers)

    def _select_of_rank(self, number: int, begin: int, end: int, rank: int) -> IntArray:
        """Return the fragments that a rank sends, forwards or receives."""
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
        """Write out fragments as boxes, of all ranks, or of `rank` only."""
        item = self.job.items[number]
        groups, flows = self._find_parts(item)
        columns = self.fragments
        flow = columns.flow[chosen]
        index, boxes = find_boxes(
            groups, flows.group[flow], columns.first[chosen], columns.stop[chosen]
        )
        fragment = chosen[index]
        source, relay = columns.source_cell[fragment], columns.relay[fragment]
        # Every fragment is first sent to its relay.
        exchange = [make_transfers(groups, boxes, source, flows.receiver[relay])]

        # The other receivers get each box from a receiver that has it, or from a source cell.
        row, stage, sender, receiver = broadcast_tree.build_trees(flows, flow[index], relay)
        is_direct = columns.is_direct[fragment][row]
        at = row[is_direct]
        second, into = columns.second_cell[fragment[at]], flows.receiver[receiver[is_direct]]
        exchange.append(make_transfers(groups, boxes.take(at), second, into))
        forwarded = []
        for number_of_stage in self._stages[1:]:
            at = np.flatnonzero(~is_direct & (stage == number_of_stage))
            ends = (flows.receiver[end[at]] for end in (sender, receiver))
            boxes_of_stage = boxes.take(row[at])
            forwarded.append(make_transfers(groups, boxes_of_stage, *ends, is_forwarded=True))

        # Elements that stay are copied in the exchange, whose transfers begin in source cells.
        staying = np.arange(len(flows.staying_group))
        if rank is not None:
            staying = np.flatnonzero(item.change.target.cell_slot[flows.staying_target] == rank)
        group = flows.staying_group[staying]
        index, boxes = find_boxes(groups, group, np.zeros_like(group), groups.elements[group])
        ends = (end[staying][index] for end in (flows.staying_source, flows.staying_target))
        exchange.append(make_transfers(groups, boxes, *ends))
        stages = (Transfers.joined(exchange), *forwarded)
        if rank is None:
            return stages
        return tuple(
            stage.take((stage.source_slot == rank) | (stage.target_slot == rank))
            for stage in stages
        )

    @cached_property
    def _copies(self) -> tuple[IntArray, ...]:
        """Senders, receivers and bytes of all copies, summed by pair of ranks."""
        columns, ranks = self.fragments, self.topology.ranks
        total: dict[int, int] = {}
        for number, item in enumerate(self.job.items):
            rows = slice(*self._item_begin[number : number + 2].tolist())
            _, flows = self._find_parts(item)
            slot = item.change.target.cell_slot[flows.receiver]
            source = item.change.source.cell_slot
            size = (columns.stop[rows] - columns.first[rows]) * item.dtype.itemsize_bytes
            row, _, sender, receiver = broadcast_tree.build_trees(
                flows, columns.flow[rows], columns.relay[rows]
            )
            sending = np.where(
                columns.is_direct[rows][row], source[columns.second_cell[rows][row]], slot[sender]
            )
            # A pair of ranks is a number. First copies go to relays, the others along the trees.
            pairs = np.concatenate(
                (
                    source[columns.source_cell[rows]] * ranks + slot[columns.relay[rows]],
                    sending * ranks + slot[receiver],
                )
            )
            pairs, _, at = find_distinct(pairs)
            moved = sum_by(len(pairs), at, np.append(size, size[row]))
            # Pairs recur in many items, so only their sums are kept.
            for pair, size_bytes in zip(pairs.tolist(), moved.tolist(), strict=True):
                total[pair] = total.get(pair, 0) + size_bytes
        pairs = np.array(sorted(total), dtype=np.int64)
        moved = np.array([total[pair] for pair in pairs.tolist()], dtype=np.int64)
        return pairs // ranks, pairs % ranks, moved

    @cached_property
    def sent_bytes(self) -> IntArray:
        """Bytes each rank sends to others, in all stages: shape `(topology.ranks,)`."""
        sender, _, size = self._copies
        return sum_by(self.topology.ranks, sender, size)

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
        """Bytes sent from host to host, within hosts on the diagonal: `(hosts, hosts)`."""
        sender, receiver, size = self._copies
        return sum_by(
            (self.topology.hosts, self.topology.hosts),
            (self.topology.host_of(sender), self.topology.host_of(receiver)),
            size,
        )

    @property
    def across_hosts_bytes(self) -> int:
        """Bytes sent between hosts."""
        return int(self.host_bytes.sum() - np.trace(self.host_bytes))

    @property
    def across_racks_bytes(self) -> int:
        """Bytes sent between racks."""
        rack = self.topology.host_rack
        return int(self.host_bytes[rack[:, None] != rack[None, :]].sum())

    @cached_property
    def across_hosts_bound_bytes(self) -> int:
        """The minimum bytes between hosts: for each host, those needed but not held by its ranks.

        Contributions count separately, as if they were combined by the ranks that need them.
        """
        return self._find_bound_bytes(self.topology)

    @cached_property
    def across_racks_bound_bytes(self) -> int:
        """The minimum bytes between racks: for each rack, those that its ranks need and lack."""
        return self._find_bound_bytes(Topology(self.topology.host_rack[self.topology.rank_host]))

    def _find_bound_bytes(self, boxes: Topology) -> int:
        bounds: dict[LayoutChange, int] = {}
        for item in self.job.items:
            if item.change not in bounds:
                bounds[item.change] = broadcast_tree.across_hosts_bound_elements(item.change, boxes)
        return sum(bounds[item.change] * item.dtype.itemsize_bytes for item in self.job.items)

    @cached_property
    def digest(self) -> str:
        """A digest that is equal on two ranks exactly if their jobs and topologies are equal."""
        hasher = hashlib.blake2b(self.job.digest.encode(), digest_size=16)
        hasher.update(self.topology.rank_host.tobytes() + self.topology.host_rack.tobytes())
        return hasher.hexdigest()

    def verify(self) -> None:
        """Check all stages of every tensor against its layouts.

        Raises:
            PlanError: elements are missing, duplicated, misplaced, sent by a rank that does not
                hold them, or forwarded by a rank that did not receive them.
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
        """Estimate the seconds of all stages, in sequence, see `reshard.cost`.

        Raises LayoutError for a link of unknown speed.
        """
        parts = (self._estimate_stages([i], name) for i, name in enumerate(self.stage_names))
        return Estimate(tuple(parts), self.topology.overhead.call_s)

    def _estimate_stages(self, stages: Iterable[int], name: str) -> Part:
        """Estimate the messages of some stages of all tensors, sent at once."""
        sizes = [item.dtype.itemsize_bytes for item in self.job.items]
        transfers = [
            (of_item[stage], size)
            for stage in stages
            for of_item, size in zip(self._all_transfers, sizes, strict=True)
        ]
        return estimate_transfers(transfers, self.topology, name)

    @cached_property
    def _times(self) -> tuple[float, float, float, float]:
        # All stages but the last, which is within hosts, share the links between hosts.
        across = self._estimate_stages(range(len(self._stages) - 1), "across")
        return schedule.find_pipeline_times(self.estimate(), across)

    @cached_property
    def parts(self) -> int:
        """The number of parts into which tensors are divided, so that all stages run at once.

        Without link speeds in the topology, times are approximated by the maximum bytes that a
        rank receives.
        """
        topology = self.topology
        links = [topology.within_host, topology.between_hosts]
        links += [topology.between_racks] if topology.racks > 1 else []
        if None in links:
            return schedule.count_parts(
                float(self.received_bytes.max()), schedule.LATENCIES_COUNT_BYTES
            )
        _, _, rest_s, latency_s = self._times
        return schedule.count_parts(schedule.PARTS_LEFT * rest_s, latency_s)

    @property
    def pipelined_s(self) -> float:
        """The seconds of all stages if they run at once. Raises as `estimate` does."""
        return schedule.pipeline_s(*self._times, self.parts)

    def run(self, shards: Mapping[str, Mapping[int, Array]]) -> dict[str, dict[int, Array]]:
        """Run all stages on arrays in this process: `{name: {rank: array}}` to the same.

        Raises ShardError for arrays that do not match the source layouts.
        """
        changes = [(item.name, item.dtype, item.change) for item in self.job.items]
        return run_stages(changes, self.transfers, shards)

    def __repr__(self) -> str:
        return f"<StagedJob of {len(self.job)} tensors on {self.topology.hosts} hosts>"
