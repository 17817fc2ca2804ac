"""Flows of elements between hosts: how each group reaches the hosts that lack it.

A *flow* is a group and the target cells that need it and share what is received::

    from other hosts, forwarded      from the host itself

    far ranks --+--> rank 4 ---+     rank 0 --+--> rank 1
    (senders)   |              |     (sender) |
                +--> rank 5 <--+              +--> rank 2
                     (relays)

1. A target cell whose slot holds the group keeps it.
2. If ranks of a host hold it, they send it to the other cells of the host that need it.
3. If no rank of a rack holds it, all cells of the rack that need it are one flow, sent by all its
   holders. Otherwise the cells of each host that lacks it are one flow, sent from within the rack.
4. A flow from another host is sent once, divided among its receivers, and each receiver forwards
   its share to the others (`spreading`). One from the host itself is forwarded or sent directly.
5. With a `Reach`, the hosts or racks that would each have a flow share one: the senders send it
   once, and not once for each of them.
6. Contributions that are reduced are not forwarded, because a receiver has no memory in which to
   keep them separately: the senders send them to every receiver, host by host.

Spreading: which rank forwards what to which, so that a byte enters each rack and host once.

The bytes that one receiver of a flow, the *entry*, has received are forwarded to one receiver of
every other rack, from each of these to one of every other host of its rack, and on each host to
the others::

    entry e --+-----------------> d   host 1, rack 0       between racks   e to g
              |                                            between hosts   e to d, g to k
              +--> f   host 0                              fan-out         e to f, g to h
              |
              +== uplinks ==> g --+--> h   host 2, rack 1
                                  +--> k   host 3

Which receiver that is follows from the entry's position in the flow, so that all take turns. The
bytes of a flow are divided among all its receivers, on any host. So every host sends about as
much as every other: this is scatter and all-gather (van de Geijn 1994) between hosts and racks.

`choose_reach` decides which receivers share a flow: as few as possible, unless sharing among more
takes at least one part in `_WORTHWHILE` off the busiest host or rack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from reshard.geometry.holders import find_in
from reshard.geometry.layout_change import LayoutChange
from reshard.plans.element_groups import find_element_groups
from reshard.plans.job import JobItem
from reshard.runs import IntArray, ragged_arange
from reshard.topology import Topology


class Reach(IntEnum):
    """The receivers that share a flow, besides those of a rack in which no rank holds the group."""

    HOST = 0  # no others
    RACK = 1  # those of all hosts of a rack that lack it
    EVERYWHERE = 2  # and those of all racks in which no rank holds it


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """The flows of a plan as columns of shape `(flows,)`, in the order of groups.

    Flow `i` brings `group[i]` to its receivers, the target cells
    `receiver[receiver_begin[i]:receiver_begin[i + 1]]`, one a slot, rack by rack, host by host and
    in the order of their slots. Its senders are likewise source cells. `is_inner` says that the
    senders are on the host of all receivers, and `is_alone` that nothing else is combined with the
    group. `staying_group`, `staying_source` and `staying_target` are what stays.

    `host_begin` and `host_count` say of each receiver where the receivers of the same flow on its
    host begin, and how many they are; `rack_begin` and `rack_count` likewise of its rack.
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
        """How many receivers each flow has."""
        return np.diff(self.receiver_begin)


@lru_cache(maxsize=128)
def find_flows(plan: LayoutChange, topology: Topology, reach: Reach = Reach.HOST) -> Flows:
    """The flows of a plan between ranks of a topology.

    Raises:
        PlanError: an element that no source slot holds.
        LayoutError: a slot that is no rank of the topology.
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
    # What stays: the wanting slot holds the group itself. Pairs of a group and a slot are looked up
    # as single numbers.
    at, holds = find_in(holder_group * slots + holder_slot, group * slots + slot)
    kept = (group[holds], groups.holder[at[holds]], cell[holds])
    group, cell, slot, host = (column[~holds] for column in (group, cell, slot, host))
    rack = topology.host_rack[host]

    # How near the nearest holder is: 0 on the host, 1 in the rack, 2 elsewhere.
    near = np.unique(holder_group * topology.hosts + holder_host)
    _, on_host = find_in(near, group * topology.hosts + host)
    near = np.unique(holder_group * topology.racks + holder_rack)
    _, in_rack = find_in(near, group * topology.racks + rack)
    distance = np.where(on_host, 0, np.where(in_rack, 1, 2))
    # Hosts come first among the numbers of boxes, then racks, then all of them together.
    box = host.copy()
    shared = groups.is_alone[group]
    share_rack = shared & ((distance == 2) | ((distance == 1) & (reach >= Reach.RACK)))
    box[share_rack] = topology.hosts + rack[share_rack]
    box[shared & (distance == 2) & (reach >= Reach.EVERYWHERE)] = topology.hosts + topology.racks

    # Where cells of one slot overlap, each has memory of its own: the second has a flow apart.
    order = np.lexsort((cell, slot, group))
    turn = np.empty(len(group), dtype=np.int64)
    turn[order] = _count_within(group[order], slot[order])
    order = np.lexsort((slot, host, rack, turn, box, group))
    group, cell, host, rack = (column[order] for column in (group, cell, host, rack))
    box, turn, distance = (column[order] for column in (box, turn, distance))
    first = _find_first(group, box, turn)
    host_begin, host_count = _find_stretches(group, box, turn, rack, host)
    rack_begin, rack_count = _find_stretches(group, box, turn, rack)

    # The senders of a flow are the nearest holders of its group.
    begin = groups.holder_begin[group[first]]
    count = groups.holder_begin[group[first] + 1] - begin
    sending = np.repeat(np.arange(len(first)), count)
    holder = np.repeat(begin, count) + ragged_arange(count)
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
        *kept,
    )


def _find_first(*columns: IntArray) -> IntArray:
    """Where each stretch of rows that are equal in all columns begins."""
    changes = [np.diff(column, prepend=-1) != 0 for column in columns]
    return np.flatnonzero(np.logical_or.reduce(changes))


def _count_within(*columns: IntArray) -> IntArray:
    """The place of each row in its stretch of equal ones."""
    first = _find_first(*columns)
    return ragged_arange(np.diff(np.append(first, len(columns[0]))))


def _find_stretches(*columns: IntArray) -> tuple[IntArray, IntArray]:
    """Of each row, where its stretch of equal ones begins, and how long that is."""
    first = _find_first(*columns)
    count = np.diff(np.append(first, len(columns[0])))
    return np.repeat(first, count), np.repeat(count, count)


def across_hosts_bound_elements(plan: LayoutChange, topology: Topology) -> int:
    """Elements that must go from one host to another: each counts once for each host that has
    a rank which wants it, and none which holds it.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(host=2, gpu=4)
    >>> plan = LayoutChange(*(reshard.spec(mesh, text).layout((8,)) for text in ("gpu", "-")))
    >>> across_hosts_bound_elements(plan, Topology.of(hosts=2, ranks_per_host=4))
    0
    >>> across_hosts_bound_elements(plan, Topology.of(hosts=4, ranks_per_host=2))
    16
    """
    groups = find_element_groups(plan)
    # Pairs of a group and a host, each once: wanted there, and held there.
    number = np.arange(len(groups))
    wanting, holding = (
        np.unique(
            np.repeat(number, np.diff(begin)) * topology.hosts + topology.host_of(slots[cell])
        )
        for begin, cell, slots in (
            (groups.wanting_begin, groups.wanting, plan.target.cell_slot),
            (groups.holder_begin, groups.holder, plan.source.cell_slot),
        )
    )
    lacking = np.setdiff1d(wanting, holding, assume_unique=True)
    return int(groups.elements[lacking // topology.hosts].sum())


def crossing_elements(plan: LayoutChange, topology: Topology) -> IntArray:
    """Elements that ranks of host `a` want and none of host `b` holds: `(hosts, hosts)`.

    So many must cross into host `b` where the target's ranks of host `a` are on it.
    """
    groups = find_element_groups(plan)
    at_host = []
    for begin, cell, slots in (
        (groups.wanting_begin, groups.wanting, plan.target.cell_slot),
        (groups.holder_begin, groups.holder, plan.source.cell_slot),
    ):
        found = np.zeros((len(groups), topology.hosts), dtype=np.int64)
        group = np.repeat(np.arange(len(groups)), np.diff(begin))
        found[group, topology.host_of(slots[cell])] = 1
        at_host.append(found)
    wanted, held = at_host
    # `[a, b]`: the elements of the groups that `a` wants and `b` does not hold, as a product of
    # matrices over groups.
    crossing: IntArray = (wanted * groups.elements[:, None]).T @ (1 - held)
    return crossing


STAGES = ("exchange", "between racks", "between hosts", "fan-out")
_BETWEEN_RACKS, _BETWEEN_HOSTS, _FAN_OUT = 1, 2, 3
_WORTHWHILE = 21


class HandOns(NamedTuple):
    """What is forwarded, as columns: which fragment, in which of `STAGES`, and the receivers that
    send and receive it, as numbers of the flows' receivers.
    """

    row: IntArray
    stage: IntArray
    giver: IntArray
    receiver: IntArray


def spread(flows: Flows, flow: IntArray, entry: IntArray) -> HandOns:
    """How fragments of flows get from their entries to all other receivers."""
    begin = flows.receiver_begin[flow]
    count = flows.receivers[flow]
    row = np.repeat(np.arange(len(flow)), count)
    receiver = np.repeat(begin, count) + ragged_arange(count)
    row, receiver = (column[receiver != entry[row]] for column in (row, receiver))
    first, turn = entry[row], (entry - begin)[row]
    # Of each rack and host the receiver that has it first.
    of_rack = np.where(
        flows.rack_begin[receiver] == flows.rack_begin[first],
        first,
        flows.rack_begin[receiver] + turn % flows.rack_count[receiver],
    )
    of_host = flows.host_begin[receiver] + turn % flows.host_count[receiver]
    for known in (of_rack, first):
        of_host = np.where(flows.host_begin[receiver] == flows.host_begin[known], known, of_host)
    giver = np.where(receiver != of_host, of_host, np.where(receiver != of_rack, of_rack, first))
    stage = np.where(
        receiver != of_host,
        _FAN_OUT,
        np.where(receiver != of_rack, _BETWEEN_HOSTS, _BETWEEN_RACKS),
    )
    return HandOns(row, stage, giver, receiver)


def find_stages(flows: Sequence[Flows]) -> tuple[int, ...]:
    """Which of `STAGES` flows take: numbers, the exchange and the fan-out always among them."""
    found = [0]
    far = [(one, ~one.is_inner & one.is_alone) for one in flows]
    first = [(one, one.receiver_begin[:-1][is_far], is_far) for one, is_far in far]
    if any((one.rack_count[at] < one.receivers[is_far]).any() for one, at, is_far in first):
        found.append(_BETWEEN_RACKS)
    receivers = [(one, np.repeat(is_far, one.receivers)) for one, is_far in far]
    if any((one.host_count[is_far] < one.rack_count[is_far]).any() for one, is_far in receivers):
        found.append(_BETWEEN_HOSTS)
    return (*found, _FAN_OUT)


def choose_reach(items: Sequence[JobItem], topology: Topology) -> Reach:
    """Whose receivers share flows; the same on every rank. Raises as `find_flows` does."""
    if topology.hosts < 3:
        # There are no two hosts that could share anything.
        return Reach.HOST
    size_bytes: dict[LayoutChange, int] = {}
    for item in items:
        size_bytes[item.change] = size_bytes.get(item.change, 0) + item.dtype.itemsize_bytes
    reaches = [reach for reach in Reach if reach < Reach.EVERYWHERE or topology.racks > 2]
    loads = [
        find_load(
            [(one, find_flows(one, topology, reach), size) for one, size in size_bytes.items()],
            topology,
        )
        for reach in reaches
    ]
    return next(
        reach
        for reach, load in zip(reaches, loads, strict=True)
        if load <= min(loads) * _WORTHWHILE / (_WORTHWHILE - 1)
    )


def find_load(plans: Sequence[tuple[LayoutChange, Flows, int]], topology: Topology) -> float:
    """The most bytes that a host sends to others, or receives, or a rack likewise.

    Flows are divided equally among the ranks that may send or forward them. Sums are computed in a
    fixed order, so they are the same on every rank.
    """
    sent, received = np.zeros(topology.hosts), np.zeros(topology.hosts)
    rack_sent, rack_received = np.zeros(topology.racks), np.zeros(topology.racks)
    for plan, flows, itemsize_bytes in plans:
        if not len(flows):
            continue
        size = find_element_groups(plan).elements[flows.group] * float(itemsize_bytes)
        size[flows.is_inner] = 0
        # First copies leave their senders' hosts: one for the flow, or one for each receiver.
        copies = np.where(flows.is_alone, 1, flows.receivers)
        senders = np.diff(flows.sender_begin)
        host = topology.host_of(plan.source.cell_slot[flows.sender])
        part = np.repeat(size * copies / senders, senders)
        np.add.at(sent, host, part)
        into = topology.host_of(plan.target.cell_slot[flows.receiver])
        rack_of_flow = topology.host_rack[into[flows.receiver_begin[:-1]]]
        # Senders within the rack are taken where there are some.
        leaves = topology.host_rack[host] != np.repeat(rack_of_flow, senders)
        np.add.at(rack_sent, topology.host_rack[host[leaves]], part[leaves])
        is_from_elsewhere = np.ones(len(flows), dtype=bool)
        is_from_elsewhere[np.repeat(np.arange(len(flows)), senders)[~leaves]] = False

        # What each receiver's share of the flow is, and how often it goes on to other boxes.
        flow = np.repeat(np.arange(len(flows)), flows.receivers)
        number = np.arange(len(flow))
        is_alone = flows.is_alone[flow]
        begins_host = flows.host_begin == number
        begins_rack = flows.rack_begin == number
        hosts, racks = (np.concatenate(([0], np.cumsum(one))) for one in (begins_host, begins_rack))
        of_rack = hosts[flows.rack_begin + flows.rack_count] - hosts[flows.rack_begin]
        of_flow = (racks[flows.receiver_begin[1:]] - racks[flows.receiver_begin[:-1]])[flow]
        share = np.where(is_alone, size[flow] / flows.receivers[flow], 0.0)
        # It enters here, or in another rack and then comes here first.
        others = (flows.receivers[flow] - flows.rack_count) / flows.rack_count
        np.add.at(sent, into, share * (of_flow - 1 + (1 + others) * (of_rack - 1)))
        np.add.at(rack_sent, topology.host_rack[into], share * (of_flow - 1))
        enters = np.where(is_alone, begins_host, True)
        np.add.at(received, into[enters], size[flow][enters])
        enters = np.where(is_alone, begins_rack, True) & is_from_elsewhere[flow]
        np.add.at(rack_received, topology.host_rack[into[enters]], size[flow][enters])
    return max(float(one.max()) for one in (sent, received, rack_sent, rack_received))
