"""Flows of elements between hosts: how each group gets to the hosts that lack it.

A *flow* is a group on its way to the target cells of one host that want it::

    from elsewhere, handed on        from the host itself

    far ranks --+--> rank 4 ---+     rank 0 --+--> rank 1
    (senders)   |              |     (sender) |
                +--> rank 5 <--+              +--> rank 2
                     (relays)

1. A target cell whose slot holds the group keeps it.
2. The other cells of a host that want it have one flow. Where ranks of the host hold it, they
   are its senders; otherwise all who hold it are.
3. A flow from elsewhere crosses into the host once, divided among its receivers, and each hands
   its share on to the others. One from the host itself may be handed on, or come directly.
4. Contributions that are combined with others are not handed on, for a receiver has no room for
   them apart: its senders send them to every receiver.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.replicas import find_in
from reshard.plans.hosts.element_groups import find_element_groups
from reshard.runs import IntArray, ragged_arange
from reshard.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """The flows of a plan as columns of shape `(flows,)`, in the order of groups and hosts.

    Flow `i` brings `group[i]` to `host[i]`. Its senders are the source cells
    `sender[sender_begin[i]:sender_begin[i + 1]]`, its receivers likewise target cells, one a
    slot, in the order of their slots. `is_inner` says that the senders are on the host, and
    `is_alone` that nothing else is combined with the group. `staying_group`, `staying_source` and
    `staying_target` are what stays.
    """

    group: IntArray
    host: IntArray
    is_inner: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    is_alone: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    sender_begin: IntArray
    sender: IntArray
    receiver_begin: IntArray
    receiver: IntArray
    staying_group: IntArray
    staying_source: IntArray
    staying_target: IntArray

    def __len__(self) -> int:
        return len(self.group)


@lru_cache(maxsize=128)
def find_flows(plan: LayoutChange, topology: Topology) -> Flows:
    """The flows of a plan between ranks of a topology.

    Raises:
        PlanError: an element that no source slot holds.
        LayoutError: a slot that is no rank of the topology.
    """
    groups = find_element_groups(plan)
    holder_group = np.repeat(np.arange(len(groups)), np.diff(groups.holder_begin))
    holder_slot = plan.source.cell_slot[groups.holder]
    holder_host = topology.host_of(holder_slot)
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

    # Where cells of one slot overlap, each has memory of its own: the second has a flow apart.
    order = np.lexsort((cell, slot, group))
    changes = [np.diff(column[order], prepend=-1) != 0 for column in (group, slot)]
    first = np.flatnonzero(np.logical_or.reduce(changes))
    turn = np.empty(len(group), dtype=np.int64)
    turn[order] = ragged_arange(np.diff(np.append(first, len(group))))
    order = np.lexsort((slot, turn, host, group))
    group, cell, host, turn = (column[order] for column in (group, cell, host, turn))
    changes = [np.diff(column, prepend=-1) != 0 for column in (group, host, turn)]
    first = np.flatnonzero(np.logical_or.reduce(changes))

    # The senders of a flow are the holders of its group, or those of them that are near.
    near = np.unique(holder_group * topology.hosts + holder_host)
    _, is_inner = find_in(near, group[first] * topology.hosts + host[first])
    begin = groups.holder_begin[group[first]]
    count = groups.holder_begin[group[first] + 1] - begin
    sending = np.repeat(np.arange(len(first)), count)
    holder = np.repeat(begin, count) + ragged_arange(count)
    may_send = ~is_inner[sending] | (holder_host[holder] == host[first][sending])
    sending, holder = sending[may_send], holder[may_send]
    return Flows(
        group[first],
        host[first],
        is_inner,
        groups.is_alone[group[first]],
        np.searchsorted(sending, np.arange(len(first) + 1)),
        groups.holder[holder],
        np.append(first, len(group)),
        cell,
        *kept,
    )


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
