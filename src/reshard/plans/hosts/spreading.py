"""Spreading: which rank forwards what to which, so that a byte enters each rack and host once.

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
from typing import NamedTuple

import numpy as np

from reshard.geometry.layout_change import LayoutChange
from reshard.plans.hosts.element_groups import find_element_groups
from reshard.plans.hosts.flows import Flows, Reach, find_flows
from reshard.plans.job_item import JobItem
from reshard.runs import IntArray, ragged_arange
from reshard.topology import Topology

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
