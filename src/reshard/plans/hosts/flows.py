"""How does each lot get to the hosts that lack it?

A *flow* is a lot on its way to the target cells of one host that want it::

    from elsewhere, handed on        from the host itself

    far ranks --+--> rank 4 ---+     rank 0 --+--> rank 1
    (senders)   |              |     (sender) |
                +--> rank 5 <--+              +--> rank 2
                     (relays)

1. A target cell whose slot holds the lot keeps it.
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
from reshard.plans.hosts.element_classes import find_lots
from reshard.runs import IntArray, ragged_arange
from reshard.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """The flows of a plan as columns of shape `(flows,)`, in the order of lots and hosts.

    Flow `i` brings `lot[i]` to `host[i]`. Its senders are the source cells
    `sender[sender_begin[i]:sender_begin[i + 1]]`, its receivers likewise target cells, one a
    slot, in the order of their slots. `is_inner` says that the senders are on the host, and
    `is_alone` that nothing else is combined with the lot. `kept_lot`, `kept_source` and
    `kept_target` are what stays.
    """

    lot: IntArray
    host: IntArray
    is_inner: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    is_alone: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    sender_begin: IntArray
    sender: IntArray
    receiver_begin: IntArray
    receiver: IntArray
    kept_lot: IntArray
    kept_source: IntArray
    kept_target: IntArray

    def __len__(self) -> int:
        return len(self.lot)


@lru_cache(maxsize=128)
def find_flows(plan: LayoutChange, topology: Topology) -> Flows:
    """The flows of a plan between ranks of a topology.

    Raises:
        PlanError: an element that no source slot holds.
        LayoutError: a slot that is no rank of the topology.
    """
    lots = find_lots(plan)
    holder_lot = np.repeat(np.arange(len(lots)), np.diff(lots.holder_begin))
    holder_slot = plan.source.cell_slot[lots.holder]
    holder_host = topology.host_of(holder_slot)
    lot = np.repeat(np.arange(len(lots)), np.diff(lots.wanting_begin))
    cell = lots.wanting
    slot = plan.target.cell_slot[cell]
    host = topology.host_of(slot)

    slots = max(plan.source.slots, plan.target.slots)
    at, holds = find_in(holder_lot * slots + holder_slot, lot * slots + slot)
    kept = (lot[holds], lots.holder[at[holds]], cell[holds])
    lot, cell, slot, host = (column[~holds] for column in (lot, cell, slot, host))

    # Where cells of one slot overlap, each has memory of its own: the second has a flow apart.
    order = np.lexsort((cell, slot, lot))
    changes = [np.diff(column[order], prepend=-1) != 0 for column in (lot, slot)]
    first = np.flatnonzero(np.logical_or.reduce(changes))
    turn = np.empty(len(lot), dtype=np.int64)
    turn[order] = ragged_arange(np.diff(np.append(first, len(lot))))
    order = np.lexsort((slot, turn, host, lot))
    lot, cell, host, turn = (column[order] for column in (lot, cell, host, turn))
    changes = [np.diff(column, prepend=-1) != 0 for column in (lot, host, turn)]
    first = np.flatnonzero(np.logical_or.reduce(changes))

    # The senders of a flow are the holders of its lot, or those of them that are near.
    near = np.unique(holder_lot * topology.hosts + holder_host)
    _, is_inner = find_in(near, lot[first] * topology.hosts + host[first])
    begin = lots.holder_begin[lot[first]]
    count = lots.holder_begin[lot[first] + 1] - begin
    sending = np.repeat(np.arange(len(first)), count)
    holder = np.repeat(begin, count) + ragged_arange(count)
    may_send = ~is_inner[sending] | (holder_host[holder] == host[first][sending])
    sending, holder = sending[may_send], holder[may_send]
    return Flows(
        lot[first],
        host[first],
        is_inner,
        lots.is_alone[lot[first]],
        np.searchsorted(sending, np.arange(len(first) + 1)),
        lots.holder[holder],
        np.append(first, len(lot)),
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
    lots = find_lots(plan)
    number = np.arange(len(lots))
    wanting, holding = (
        np.unique(
            np.repeat(number, np.diff(begin)) * topology.hosts + topology.host_of(slots[cell])
        )
        for begin, cell, slots in (
            (lots.wanting_begin, lots.wanting, plan.target.cell_slot),
            (lots.holder_begin, lots.holder, plan.source.cell_slot),
        )
    )
    lacking = np.setdiff1d(wanting, holding, assume_unique=True)
    return int(lots.elements[lacking // topology.hosts].sum())


def crossing_elements(plan: LayoutChange, topology: Topology) -> IntArray:
    """Elements that ranks of host `a` want and none of host `b` holds: `(hosts, hosts)`.

    So many must cross into host `b` where the target's ranks of host `a` are on it.
    """
    lots = find_lots(plan)
    at_host = []
    for begin, cell, slots in (
        (lots.wanting_begin, lots.wanting, plan.target.cell_slot),
        (lots.holder_begin, lots.holder, plan.source.cell_slot),
    ):
        found = np.zeros((len(lots), topology.hosts), dtype=np.int64)
        lot = np.repeat(np.arange(len(lots)), np.diff(begin))
        found[lot, topology.host_of(slots[cell])] = 1
        at_host.append(found)
    wanted, held = at_host
    crossing: IntArray = (wanted * lots.elements[:, None]).T @ (1 - held)
    return crossing
