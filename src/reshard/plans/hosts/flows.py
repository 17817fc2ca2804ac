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
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np

from reshard.geometry.holders import find_in
from reshard.geometry.layout_change import LayoutChange
from reshard.plans.hosts.element_groups import find_element_groups
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
