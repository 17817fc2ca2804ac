"""Broadcast trees: how elements reach every host that lacks them once, and the ranks on it.

A *flow* is an element group and the target cells that need it and share what is received. It is
divided among its receivers, and each of them forwards its fragment to the others::

    from other hosts, forwarded      from the host itself

    far ranks --+--> rank 4 ---+     rank 0 --+--> rank 1
    (senders)   |              |     (sender) |
                +--> rank 5 <--+              +--> rank 2
                     (relays)

1. A target cell whose slot holds the group keeps it.
2. If ranks of a host hold it, they send it to the other cells of the host that need it.
3. If no rank of a rack holds it, all cells of the rack that need it are a single flow, sent by all
   holders. Otherwise the cells of each host that lacks it are a flow, sent from within the rack.
4. With a wider `Reach`, hosts or racks that would each have a flow share a single flow: the senders
   send it once instead of once for each of them.
5. Contributions that are reduced are not forwarded, because a receiver lacks memory to keep them
   separately: the senders send them to every receiver, host by host.

A fragment of a flow is forwarded along a tree. The receiver that gets it first, the *entry*, sends
it to a receiver in every other rack, each of these sends it to every other host of its rack, and
on each host it goes to the other receivers::

    entry e --+-----------------> d   host 1, rack 0       between racks   e to g
              |                                            between hosts   e to d, g to k
              +--> f   host 0                              fan-out         e to f, g to h
              |
              +== uplinks ==> g --+--> h   host 2, rack 1
                                  +--> k   host 3

The receiver in each rack and host follows from the position of the entry in the flow, so that all
take turns. The bytes of a flow are divided among all its receivers, on any host, so every host
sends about as much as every other: this is scatter and all-gather (van de Geijn 1994) between hosts
and racks.

`choose_reach` returns the smallest reach, unless a wider one reduces the load of the most loaded
host or rack by at least one part in `WORTHWHILE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

import numpy as np

from reshard._records import Record
from reshard.geometry.holders import find_in
from reshard.geometry.layout_change import LayoutChange
from reshard.plans.element_groups import find_element_groups
from reshard.plans.job import JobItem
from reshard.runs import IntArray, distinct, ragged_arange, ragged_rows
from reshard.topology import Topology


class Reach(IntEnum):
    """The receivers that share a flow, besides those of a rack in which no rank holds the group."""

    HOST = 0  # no others
    RACK = 1  # the receivers on all hosts of a rack that lack the group
    EVERYWHERE = 2  # also the receivers in all racks that lack it


class Flows(Record, eq=False):
    """The flows of a plan as columns of shape `(flows,)`, in the order of groups.

    Flow `i` sends `group[i]` to its receivers, the target cells
    `receiver[receiver_begin[i]:receiver_begin[i + 1]]`, in distinct slots, sorted by rack, host and
    slot. Its senders are source cells, listed in the same way. `is_inner` is whether the senders
    are on the host of all receivers, `is_alone` whether no other contribution is combined with the
    group. `staying_group`, `staying_source` and `staying_target` are the elements that stay.

    For each receiver, `host_begin` and `host_count` are the range of receivers of the same flow on
    its host, `rack_begin` and `rack_count` the range in its rack.
    """

    group: IntArray
    is_inner: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    is_alone: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    sender_begin: IntArray
    sender: IntArray
    receiver_begin: IntArray
    receiver: IntArray
    host_begin: IntArray
    host_count: IntArray
    rack_begin: IntArray
    rack_count: IntArray
    staying_group: IntArray
    staying_source: IntArray
    staying_target: IntArray

    def __len__(self) -> int:
        return len(self.group)

    @property
    def receivers(self) -> IntArray:
        """The number of receivers of each flow."""
        return np.diff(self.receiver_begin)


@lru_cache(maxsize=128)
def find_flows(plan: LayoutChange, topology: Topology, reach: Reach = Reach.HOST) -> Flows:
    """Return the flows of a plan between the ranks of a topology.

    Raises:
        PlanError: an element that no source slot holds.
        LayoutError: a slot that is not a rank of the topology.
    """
    groups = find_element_groups(plan)
    holder_group = np.repeat(np.arange(len(groups)), np.diff(groups.holder_begin))
    holder_slot = plan.source.cell_slot[groups.holder]
    holder_host = topology.host_of(holder_slot)
    holder_rack = topology.host_rack[holder_host]
    group = np.repeat(np.arange(len(groups)), np.diff(groups.wanting_begin))
    cell = groups.wanting
    slot = plan.target.cell_slot[cell]
    host = topology.host_of(slot)

    slots = max(plan.source.slots, plan.target.slots)
    # Elements stay if the receiving slot holds the group itself. Pairs of a group and a slot are
    # looked up as single numbers.
    at, holds = find_in(holder_group * slots + holder_slot, group * slots + slot)
    staying = (group[holds], groups.holder[at[holds]], cell[holds])
    group, cell, slot, host = (column[~holds] for column in (group, cell, slot, host))
    rack = topology.host_rack[host]

    # The distance of the nearest holder: 0 on the host, 1 in the rack, 2 elsewhere.
    near = distinct(holder_group * topology.hosts + holder_host)
    _, on_host = find_in(near, group * topology.hosts + host)
    near = distinct(holder_group * topology.racks + holder_rack)
    _, in_rack = find_in(near, group * topology.racks + rack)
    distance = np.where(on_host, 0, np.where(in_rack, 1, 2))
    # The scope in which receivers share a flow: a host, a rack, or all racks, as a number.
    scope = host.copy()
    shared = groups.is_alone[group]
    share_rack = shared & ((distance == 2) | ((distance == 1) & (reach >= Reach.RACK)))
    scope[share_rack] = topology.hosts + rack[share_rack]
    scope[shared & (distance == 2) & (reach >= Reach.EVERYWHERE)] = topology.hosts + topology.racks

    # Overlapping cells of a slot have separate memory: the second is in another flow.
    order = np.lexsort((cell, slot, group))
    turn = np.empty(len(group), dtype=np.int64)
    turn[order] = _count_within(group[order], slot[order])
    order = np.lexsort((slot, host, rack, turn, scope, group))
    group, cell, host, rack = (column[order] for column in (group, cell, host, rack))
    scope, turn, distance = (column[order] for column in (scope, turn, distance))
    first = _find_first(group, scope, turn)
    host_begin, host_count = _find_stretches(group, scope, turn, rack, host)
    rack_begin, rack_count = _find_stretches(group, scope, turn, rack)

    # The senders of a flow are the nearest holders of its group.
    sending, holder = ragged_rows(groups.holder_begin, group[first])
    distance = distance[first]
    of_flow = distance[sending]
    may_send = (of_flow == 2) | (holder_rack[holder] == rack[first][sending])
    may_send &= (of_flow > 0) | (holder_host[holder] == host[first][sending])
    sending, holder = sending[may_send], holder[may_send]
    return Flows(
        group[first],
        distance == 0,
        groups.is_alone[group[first]],
        np.searchsorted(sending, np.arange(len(first) + 1)),
        groups.holder[holder],
        np.append(first, len(group)),
        cell,
        host_begin,
        host_count,
        rack_begin,
        rack_count,
        *staying,
    )


def _find_first(*columns: IntArray) -> IntArray:
    """Return the first row of each stretch of rows that are equal in all columns."""
    changes = [np.diff(column, prepend=-1) != 0 for column in columns]
    return np.flatnonzero(np.logical_or.reduce(changes))


def _count_within(*columns: IntArray) -> IntArray:
    """Return the index of each row within its stretch of equal rows."""
    first = _find_first(*columns)
    return ragged_arange(np.diff(np.append(first, len(columns[0]))))


def _find_stretches(*columns: IntArray) -> tuple[IntArray, IntArray]:
    """Return the begin and the length of each row's stretch of equal rows."""
    first = _find_first(*columns)
    count = np.diff(np.append(first, len(columns[0])))
    return np.repeat(first, count), np.repeat(count, count)


def across_hosts_bound_elements(plan: LayoutChange, topology: Topology) -> int:
    """Count the elements that must be sent between hosts.

    An element counts once for each host with a rank that needs it and no rank that holds it.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(host=2, gpu=4)
    >>> plan = LayoutChange(*(reshard.spec(mesh, text).layout((8,)) for text in ("gpu", "-")))
    >>> across_hosts_bound_elements(plan, Topology.of(hosts=2, ranks_per_host=4))
    0
    >>> across_hosts_bound_elements(plan, Topology.of(hosts=4, ranks_per_host=2))
    16
    """
    groups = find_element_groups(plan)
    # The distinct pairs of a group and a host that needs it, and of a group and a host that holds
    # it.
    number = np.arange(len(groups))
    wanting, holding = (
        distinct(np.repeat(number, np.diff(begin)) * topology.hosts + topology.host_of(slots[cell]))
        for begin, cell, slots in (
            (groups.wanting_begin, groups.wanting, plan.target.cell_slot),
            (groups.holder_begin, groups.holder, plan.source.cell_slot),
        )
    )
    lacking = np.setdiff1d(wanting, holding, assume_unique=True)
    return int(groups.elements[lacking // topology.hosts].sum())


def crossing_elements(plan: LayoutChange, topology: Topology) -> IntArray:
    """Count the elements needed by ranks of host `a` and held by no rank of host `b`.

    The result has shape `(hosts, hosts)`: as many must be sent to host `b` if the ranks of the
    target on host `a` are placed there.
    """
    groups = find_element_groups(plan)
    at_host = []
    for begin, cell, slots in (
        (groups.wanting_begin, groups.wanting, plan.target.cell_slot),
        (groups.holder_begin, groups.holder, plan.source.cell_slot),
    ):
        is_there = np.zeros((len(groups), topology.hosts), dtype=np.int64)
        group = np.repeat(np.arange(len(groups)), np.diff(begin))
        is_there[group, topology.host_of(slots[cell])] = 1
        at_host.append(is_there)
    needed, held = at_host
    # A product of matrices, summed over groups.
    crossing: IntArray = (needed * groups.elements[:, None]).T @ (1 - held)
    return crossing


STAGES = ("exchange", "between racks", "between hosts", "fan-out")
_BETWEEN_RACKS, _BETWEEN_HOSTS, _FAN_OUT = 1, 2, 3
#: A load is worth reducing by at least one part in this: up to 21/20 of the minimum is minimal.
WORTHWHILE = 21


def build_trees(
    flows: Flows, flow: IntArray, entry: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Build the trees along which fragments of flows go from their entries to other receivers.

    Return a row for each edge: the fragment, an index of `STAGES`, and the sender and the receiver
    as numbers of the flows' receivers.
    """
    row, receiver = ragged_rows(flows.receiver_begin, flow)
    row, receiver = (column[receiver != entry[row]] for column in (row, receiver))
    first, turn = entry[row], (entry - flows.receiver_begin[flow])[row]
    # The receiver that has the fragment first in the rack, and on the host, of each receiver.
    of_rack = np.where(
        flows.rack_begin[receiver] == flows.rack_begin[first],
        first,
        flows.rack_begin[receiver] + turn % flows.rack_count[receiver],
    )
    of_host = flows.host_begin[receiver] + turn % flows.host_count[receiver]
    for holder in (of_rack, first):
        of_host = np.where(flows.host_begin[receiver] == flows.host_begin[holder], holder, of_host)
    sender = np.where(receiver != of_host, of_host, np.where(receiver != of_rack, of_rack, first))
    stage = np.where(
        receiver != of_host,
        _FAN_OUT,
        np.where(receiver != of_rack, _BETWEEN_HOSTS, _BETWEEN_RACKS),
    )
    return row, stage, sender, receiver


def find_stages(flows_of_plans: Sequence[Flows]) -> tuple[int, ...]:
    """Return the indices of the `STAGES` that flows use, always with the exchange and fan-out."""
    crosses_racks = crosses_hosts = False
    for flows in flows_of_plans:
        is_far = ~flows.is_inner & flows.is_alone
        first = flows.receiver_begin[:-1][is_far]
        crosses_racks |= bool((flows.rack_count[first] < flows.receivers[is_far]).any())
        is_far = np.repeat(is_far, flows.receivers)
        crosses_hosts |= bool((flows.host_count[is_far] < flows.rack_count[is_far]).any())
    return (
        0,
        *([_BETWEEN_RACKS] if crosses_racks else []),
        *([_BETWEEN_HOSTS] if crosses_hosts else []),
        _FAN_OUT,
    )


def choose_reach(items: Sequence[JobItem], topology: Topology) -> Reach:
    """Choose the receivers that share flows, equally on all ranks. Raises as `find_flows` does."""
    if topology.hosts < 3:
        # At most one host lacks any elements.
        return Reach.HOST
    size_bytes: dict[LayoutChange, int] = {}
    for item in items:
        size_bytes[item.change] = size_bytes.get(item.change, 0) + item.dtype.itemsize_bytes
    reaches = [reach for reach in Reach if reach < Reach.EVERYWHERE or topology.racks > 2]
    loads = [
        compute_max_load(
            [(plan, find_flows(plan, topology, reach), size) for plan, size in size_bytes.items()],
            topology,
        )
        for reach in reaches
    ]
    return next(
        reach
        for reach, load in zip(reaches, loads, strict=True)
        if load <= min(loads) * WORTHWHILE / (WORTHWHILE - 1)
    )


def compute_max_load(plans: Sequence[tuple[LayoutChange, Flows, int]], topology: Topology) -> float:
    """Return the maximum bytes that a host, or a rack, sends to others or receives from them.

    Flows are assumed to be divided equally among the ranks that may send or forward them. Sums are
    computed in a fixed order, so that they are equal on all ranks.
    """
    sent, received = np.zeros(topology.hosts), np.zeros(topology.hosts)
    rack_sent, rack_received = np.zeros(topology.racks), np.zeros(topology.racks)
    for plan, flows, itemsize_bytes in plans:
        if not len(flows):
            continue
        size = find_element_groups(plan).elements[flows.group] * float(itemsize_bytes)
        size[flows.is_inner] = 0
        # First copies leave the hosts of senders: once for the flow, or once for each receiver.
        copies = np.where(flows.is_alone, 1, flows.receivers)
        senders = np.diff(flows.sender_begin)
        host = topology.host_of(plan.source.cell_slot[flows.sender])
        part = np.repeat(size * copies / senders, senders)
        np.add.at(sent, host, part)
        into = topology.host_of(plan.target.cell_slot[flows.receiver])
        rack_of_flow = topology.host_rack[into[flows.receiver_begin[:-1]]]
        # A flow with senders in its rack does not enter the rack from outside.
        leaves = topology.host_rack[host] != np.repeat(rack_of_flow, senders)
        np.add.at(rack_sent, topology.host_rack[host[leaves]], part[leaves])
        is_from_elsewhere = np.ones(len(flows), dtype=bool)
        is_from_elsewhere[np.repeat(np.arange(len(flows)), senders)[~leaves]] = False

        # Each receiver's share of the flow, and how often it is forwarded to other hosts and racks.
        flow = np.repeat(np.arange(len(flows)), flows.receivers)
        number = np.arange(len(flow))
        is_alone = flows.is_alone[flow]
        begins_host = flows.host_begin == number
        begins_rack = flows.rack_begin == number
        hosts, racks = (
            np.concatenate(([0], np.cumsum(begins))) for begins in (begins_host, begins_rack)
        )
        of_rack = hosts[flows.rack_begin + flows.rack_count] - hosts[flows.rack_begin]
        of_flow = (racks[flows.receiver_begin[1:]] - racks[flows.receiver_begin[:-1]])[flow]
        share = np.where(is_alone, size[flow] / flows.receivers[flow], 0.0)
        # It enters here, or in another rack from which it comes here first.
        others = (flows.receivers[flow] - flows.rack_count) / flows.rack_count
        np.add.at(sent, into, share * (of_flow - 1 + (1 + others) * (of_rack - 1)))
        np.add.at(rack_sent, topology.host_rack[into], share * (of_flow - 1))
        enters = np.where(is_alone, begins_host, True)
        np.add.at(received, into[enters], size[flow][enters])
        enters = np.where(is_alone, begins_rack, True) & is_from_elsewhere[flow]
        np.add.at(rack_received, topology.host_rack[into[enters]], size[flow][enters])
    return max(float(loads.max()) for loads in (sent, received, rack_sent, rack_received))
