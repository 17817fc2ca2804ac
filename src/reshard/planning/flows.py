"""How does each lot get to the hosts that lack it?

A *flow* is a lot on its way to some target cells of one host::

    a holder is on the host          no holder is on the host

      rank 0 --------> rank 1        far ranks ---> rank 4 --+--> rank 5
      (sender)     \\-> rank 2          (senders)   (relay)   +--> rank 6
                                                  ---> rank 5 ...   each relay its share

1. A target cell whose slot holds the lot keeps it.
2. Where a rank of the host holds it, every other cell of the host that wants it has a flow of
   its own, from the holders on the host.
3. Otherwise all cells of the host that want it have one flow, from holders elsewhere. It crosses
   into the host once, divided among the ranks that want it; these are its relays, and each hands
   its share on to the others.
4. Contributions that are combined with others are not handed on, for a relay has no room for
   them apart: each cell has a flow of its own, from the host's holders if there are any.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from reshard.planning.copies import find_in
from reshard.planning.lots import find_lots
from reshard.planning.plan import Plan
from reshard.runs import IntArray, ragged_arange
from reshard.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """The flows of a plan as columns of shape `(flows,)`, in the order of lots and hosts.

    Flow `i` brings `lot[i]` to `host[i]`. Its senders are the source cells
    `sender[sender_begin[i]:sender_begin[i + 1]]`, its receivers target cells, its relays those
    of the receivers that senders send to: one cell of each slot. `is_inner` says that the
    senders are on the host. `kept_lot`, `kept_source` and `kept_target` are what stays.
    """

    lot: IntArray
    host: IntArray
    is_inner: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    sender_begin: IntArray
    sender: IntArray
    relay_begin: IntArray
    relay: IntArray
    receiver_begin: IntArray
    receiver: IntArray
    kept_lot: IntArray
    kept_source: IntArray
    kept_target: IntArray

    def __len__(self) -> int:
        return len(self.lot)


@lru_cache(maxsize=128)
def find_flows(plan: Plan, topology: Topology) -> Flows:
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

    near = np.unique(holder_lot * topology.hosts + holder_host)
    _, is_inner = find_in(near, lot * topology.hosts + host)
    order = np.lexsort((cell, slot, host, lot))
    lot, cell, slot, host = (column[order] for column in (lot, cell, slot, host))
    is_inner = is_inner[order]
    is_apart = is_inner | ~lots.is_alone[lot]
    new = (np.diff(lot, prepend=-1) != 0) | (np.diff(host, prepend=-1) != 0) | is_apart
    first = np.flatnonzero(new)
    flow = np.cumsum(new) - 1
    is_relay = new | (np.diff(slot, prepend=-1) != 0)

    # The senders of a flow are the holders of its lot, or those of them that are near.
    begin = lots.holder_begin[lot[first]]
    count = lots.holder_begin[lot[first] + 1] - begin
    sending = np.repeat(np.arange(len(first)), count)
    holder = np.repeat(begin, count) + ragged_arange(count)
    may_send = ~is_inner[first][sending] | (holder_host[holder] == host[first][sending])
    sending, holder = sending[may_send], holder[may_send]
    edges = np.arange(len(first) + 1)
    return Flows(
        lot[first],
        host[first],
        is_inner[first],
        np.searchsorted(sending, edges),
        lots.holder[holder],
        np.searchsorted(flow[is_relay], edges),
        cell[is_relay],
        np.append(first, len(lot)),
        cell,
        *kept,
    )


def across_hosts_bound_elements(plan: Plan, topology: Topology) -> int:
    """Elements that must go from one host to another: each counts once for each host that has
    a rank which wants it, and none which holds it.

    >>> import reshard
    >>> mesh = reshard.DeviceMesh.of(host=2, gpu=4)
    >>> plan = reshard.plan(*(reshard.spec(mesh, text).layout((8,)) for text in ("gpu", "-")))
    >>> across_hosts_bound_elements(plan, Topology.of(hosts=2, ranks_per_host=4))
    0
    >>> across_hosts_bound_elements(plan, Topology.of(hosts=4, ranks_per_host=2))
    16
    """
    lots = find_lots(plan)
    number = np.arange(len(lots))
    wanting, holding = (
        np.unique(
            np.repeat(number, np.diff(begin)) * topology.hosts + topology.host_of(layout[cell])
        )
        for begin, cell, layout in (
            (lots.wanting_begin, lots.wanting, plan.target.cell_slot),
            (lots.holder_begin, lots.holder, plan.source.cell_slot),
        )
    )
    lacking = np.setdiff1d(wanting, holding, assume_unique=True)
    return int(lots.elements[lacking // topology.hosts].sum())
