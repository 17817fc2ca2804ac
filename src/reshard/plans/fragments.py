"""Fragments: the rank that sends, and the rank that forwards, each part of the flows of a job.

Each receiver of a flow needs a copy. The senders send the first copies; the others may come from
receivers that have theirs::

    direct       sender ----> a, b, c         the senders send 3 copies
    forwarded    sender ----> a ----> b, c    the senders send 1 copy, a receiver 2

Flows whose copies the same ranks may send form a *class*, whose ranks divide its bytes.
There are classes of first copies and classes of other copies.

1. To another host only first copies are sent, and its receivers forward them.
2. Within a host the senders can send all copies themselves, in a single stage. They do so unless
   forwarding reduces the maximum load of the job by at least one part in `WORTHWHILE`. Then
   receivers send other copies where senders are overloaded, or everywhere if that is not enough.
3. Contributions that are reduced are sent directly.
4. The shares of all classes are balanced together (`load_balancing`).

The bytes of a class are arranged on a line, tensor by tensor, which is divided into the shares of
its ranks. Every flow is on a line of first copies, and if it is forwarded, also on a line of other
copies::

    first copies    |  w1  |      w2      |  w3  |
                    |    rank 0   |    rank 1    |
    other copies    |  w2          |  w3  |  w4  |
                    |  rank 4  |  rank 5 | rank 6|
    fragments of w2 |------|---|..|     each has a rank of either line

5. A line is split into *stretches*: the flows of whole tensors, at least one of `_MAX_STRETCHES`
   parts of the line. Each stretch is divided in the proportions of the shares, so that all senders
   are busy in every part of a job, and no small tensor is split into tiny pieces.
6. Cuts are rounded down to the boundary of an element. A fragment lies between two adjacent cuts of
   a flow, on either line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.geometry.layout_change import LayoutChange
from reshard.plans.broadcast_tree import WORTHWHILE, Flows, Reach, find_flows
from reshard.plans.element_groups import find_element_groups
from reshard.plans.job import JobItem
from reshard.plans.load_balancing import balanced_shares
from reshard.runs import IntArray, distinct, ragged_arange, sum_by
from reshard.topology import Topology

BoolArray = NDArray[np.bool_]

# The kinds of classes: only senders make copies; senders are on the host; senders are elsewhere.
_DIRECT, _NEAR, _FAR = range(3)


class CopyClasses(Record, eq=False):
    """The classes of the flows of some plans, numbered in the order of flows.

    `first[p]` is the class of first copies of each flow of plan `p`, `others[p]` the class of its
    other copies, or -1 if only senders may make them. The ranks of the classes are `senders` and
    `other_senders`; for a flow from its own host, the senders come before the receivers. A byte of
    first class `c` has `receivers[c]` receivers, unless the class is `_FAR`; a byte of other class
    `c` is forwarded to `others_receivers[c]` ranks. `nature` is the kind of a first class.
    """

    first: list[IntArray]
    others: list[IntArray]
    senders: list[IntArray]
    receivers: IntArray
    nature: IntArray
    other_senders: list[IntArray]
    others_receivers: IntArray


def find_copy_classes(plans: list[LayoutChange], flows: list[Flows]) -> CopyClasses:
    """Return the classes of the flows of plans."""
    sending: dict[tuple[bytes, int, int], int] = {}
    forwarding: dict[tuple[bytes, bytes], int] = {}
    senders: list[IntArray] = []
    other_senders: list[IntArray] = []
    first, others = [], []
    for plan, flow in zip(plans, flows, strict=True):
        sender = plan.source.cell_slot[flow.sender]
        receiver = plan.target.cell_slot[flow.receiver]
        is_direct = ~flow.is_alone | (flow.receivers == 1)
        nature = np.where(is_direct, _DIRECT, np.where(flow.is_inner, _NEAR, _FAR))
        begins = (flow.sender_begin, flow.receiver_begin)
        edges = [edge for begin in begins for edge in (begin[:-1], begin[1:])]
        columns = (column.tolist() for column in (*edges, nature))
        both = np.full((2, len(flow)), -1, dtype=np.int64)
        for i, (a, b, c, d, kind) in enumerate(zip(*columns, strict=True)):
            # Lists of ranks are compared by their bytes. A far flow is sent once, so its number of
            # receivers is not part of its class.
            key = (sender[a:b].tobytes(), kind, 1 if kind == _FAR else d - c)
            both[0, i] = sending.setdefault(key, len(sending))
            if len(sending) > len(senders):
                senders.append(sender[a:b])
            if kind == _DIRECT:
                continue
            near = sender[a:b] if kind == _NEAR else sender[:0]
            pair = (near.tobytes(), receiver[c:d].tobytes())
            both[1, i] = forwarding.setdefault(pair, len(forwarding))
            if len(forwarding) > len(other_senders):
                other_senders.append(np.concatenate((near, receiver[c:d])))
        first.append(both[0])
        others.append(both[1])
    word = np.dtype(np.int64).itemsize
    return CopyClasses(
        first,
        others,
        senders,
        np.array([count for _, _, count in sending], dtype=np.int64),
        np.array([kind for _, kind, _ in sending], dtype=np.int64),
        other_senders,
        np.array([len(receivers) // word - 1 for _, receivers in forwarding], dtype=np.int64),
    )


class CopyAssignment(NamedTuple):
    """The shares of ranks in the bytes of classes.

    The classes of first copies come first, then those of other copies, which have no shares if
    senders make them. The ranks of class `c` are `rank[begin[c]:begin[c + 1]]`; `is_relayed` is
    whether the other copies of a class of first copies are forwarded.
    """

    is_relayed: BoolArray
    begin: IntArray
    rank: IntArray
    share: IntArray

    def loads(self, ranks: int) -> IntArray:
        """Count the bytes that each of `ranks` ranks sends."""
        return sum_by(ranks, self.rank, self.share)


def assign_copies(
    classes: CopyClasses,
    first: IntArray,
    others: IntArray,
    size_bytes: IntArray,
    itemsize_bytes: IntArray,
    ranks: int,
) -> CopyAssignment:
    """Divide the copies of flows among ranks.

    Args:
        classes: of the flows.
        first, others: the class of first copies and of other copies of each flow.
        size_bytes, itemsize_bytes: of each flow, and of its elements.
        ranks: the number of ranks.
    """

    def share(is_relayed: BoolArray) -> CopyAssignment:
        """Minimize the maximum load if other copies are forwarded in the given classes."""
        count, other_count = len(classes.senders), len(classes.other_senders)
        demand = np.zeros(count + other_count, dtype=np.int64)
        unit = np.ones(count + other_count, dtype=np.int64)
        # Senders send a single copy if the others are forwarded, else a copy for each receiver.
        times = np.where(is_relayed, 1, classes.receivers)[first]
        np.add.at(demand, first, size_bytes * times)
        np.maximum.at(unit, first, itemsize_bytes * times)
        is_forwarded = is_relayed[first] & (others >= 0)
        number = others[is_forwarded]
        times = classes.others_receivers[number]
        np.add.at(demand, count + number, size_bytes[is_forwarded] * times)
        np.maximum.at(unit, count + number, itemsize_bytes[is_forwarded] * times)
        sets = classes.senders + classes.other_senders
        begin = np.cumsum([0, *(len(members) for members in sets)])
        rank = np.concatenate([*sets, np.zeros(0, dtype=np.int64)])
        return CopyAssignment(is_relayed, begin, rank, balanced_shares(demand, begin, rank, unit))

    far, near = classes.nature == _FAR, classes.nature == _NEAR
    direct = share(far)
    if not near.any():
        return direct
    relayed = share(far | near)
    # In the order of preference: no relays within hosts, relays where senders are overloaded,
    # relays everywhere.
    limit = int(relayed.loads(ranks).max()) * WORTHWHILE // (WORTHWHILE - 1)
    load = direct.loads(ranks)
    if load.max() <= limit:
        return direct
    overloaded = np.array([bool((load[members] > limit).any()) for members in classes.senders])
    partly = share(far | (near & overloaded))
    return partly if partly.loads(ranks).max() <= limit else relayed


# At most as many stretches as a pipeline has parts (`schedule`), so that each part is divided among
# all senders; and the minimum bytes of a stretch for each sender, and the maximum of a stretch.
_MAX_STRETCHES, _MIN_SHARE_BYTES, _STRETCH_BYTES = 16, 1 << 17, 1 << 26


class Fragments(Record, eq=False):
    """Parts of flows as columns of shape `(fragments,)`, in the order of items and flows.

    Fragment `i` is elements `first[i]:stop[i]` of `flow[i]` of `item[i]`, in the row-major order of
    the group. The source cell `source_cell` sends it to `relay`, a number among the receivers of
    all flows. The other receivers get it from the relay (`broadcast_tree`), or, if `is_direct`,
    from the source cell `second_cell`.
    """

    item: IntArray
    flow: IntArray
    first: IntArray
    stop: IntArray
    source_cell: IntArray
    relay: IntArray
    second_cell: IntArray
    is_direct: BoolArray


def divide_flows(
    items: Sequence[JobItem], topology: Topology, reach: Reach = Reach.HOST
) -> Fragments:
    """Divide the flows of a job's tensors into fragments.

    Raises:
        PlanError: an element that no source slot holds.
        LayoutError: a slot that is not a rank of the topology.
    """
    plans = list(dict.fromkeys(item.change for item in items))
    number = {plan: i for i, plan in enumerate(plans)}
    plan_of_item = np.array([number[item.change] for item in items], dtype=np.int64)
    flows = [find_flows(plan, topology, reach) for plan in plans]
    elements = [
        find_element_groups(plan).elements[flow.group]
        for plan, flow in zip(plans, flows, strict=True)
    ]
    classes = find_copy_classes(plans, flows)

    # A row for each flow of each item.
    counts = np.array([len(flow) for flow in flows], dtype=np.int64)[plan_of_item]
    item = np.repeat(np.arange(len(counts)), counts)
    flow = ragged_arange(counts)
    itemsizes = np.array([tensor.dtype.itemsize_bytes for tensor in items], dtype=np.int64)
    itemsize = itemsizes[item]
    row_first, row_others, row_elements = (
        np.concatenate([columns[i] for i in plan_of_item.tolist()] + [counts[:0]])
        for columns in (classes.first, classes.others, elements)
    )
    start = np.concatenate(([0], np.cumsum(row_elements * itemsize)))
    copies = assign_copies(
        classes, row_first, row_others, row_elements * itemsize, itemsize, topology.ranks
    )
    is_relayed = copies.is_relayed[row_first]
    row_others = row_others + len(classes.senders)
    sending, forwarding = (
        _cut_classes(rows, row_class, item, start, itemsize, copies)
        for rows, row_class in (
            (np.arange(len(item)), row_first),
            (np.flatnonzero(is_relayed), row_others),
        )
    )

    # Between adjacent cuts of both lines a single rank sends and a single rank forwards.
    edges = distinct(np.concatenate((start, sending[-1], forwarding[-1])))
    begin, end = edges[:-1], edges[1:]
    row = np.searchsorted(start, begin, side="right") - 1
    sender, other_sender = (
        _find_turns(*line[:3], row, begin - start[row]) for line in (sending, forwarding)
    )
    item, flow, is_relayed = item[row], flow[row], is_relayed[row]
    ends = ((begin - start[row]) // itemsize[row], (end - start[row]) // itemsize[row])

    source_cell, relay, second_cell = (np.empty_like(item) for _ in range(3))
    is_direct = ~is_relayed
    for i, flows_of_plan in enumerate(flows):
        mine = np.flatnonzero(plan_of_item[item] == i)
        own, low = flow[mine], flows_of_plan.sender_begin[flow[mine]]
        # Among the ranks that send other copies, senders on the host come before its receivers.
        near = np.where(flows_of_plan.is_inner[own], flows_of_plan.sender_begin[own + 1] - low, 0)
        is_direct[mine] |= other_sender[mine] < near
        direct, relayed = is_direct[mine], is_relayed[mine]
        source_cell[mine] = flows_of_plan.sender[low + sender[mine]]
        turn = np.where(direct, 0, other_sender[mine] - near)
        relay[mine] = flows_of_plan.receiver_begin[own] + turn
        second = np.where(relayed & direct, other_sender[mine], sender[mine])
        second_cell[mine] = flows_of_plan.sender[low + second]
    return Fragments(item, flow, *ends, source_cell, relay, second_cell, is_direct)


def _find_turns(
    position: IntArray,
    share_position: IntArray,
    share_turn: IntArray,
    row: IntArray,
    offset: IntArray,
) -> IntArray:
    """Return the index of the rank with byte `offset` of each row; 0 if not on the line."""
    if not len(share_position):
        return np.zeros_like(row)
    at = np.searchsorted(share_position, position[row] + offset, side="right") - 1
    return np.where(position[row] >= 0, share_turn[at], 0)


def _cut_classes(
    rows: IntArray,
    row_class: IntArray,
    item: IntArray,
    start: IntArray,
    itemsize: IntArray,
    copies: CopyAssignment,
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return the line of `rows`, class by class, and its cuts.

    Row `r` has the bytes `start[r]:start[r + 1]` of the job. The result is the byte at which each
    row begins on the line, or -1 if it is not on it; the positions at which shares begin,
    ascending; the index of the rank of each share within its class; and the positions of the
    shares in the order of all rows of the job.
    """
    counts = np.diff(copies.begin)
    rows = rows[np.argsort(row_class[rows], kind="stable")]
    size = np.diff(start)[rows]
    row_class = row_class[rows]
    before = np.cumsum(size) - size
    total = sum_by(len(counts), row_class, size)
    minimum = np.minimum(counts * _MIN_SHARE_BYTES, _STRETCH_BYTES)
    length = np.clip(total // _MAX_STRETCHES, np.maximum(minimum, 1), _STRETCH_BYTES)
    # A stretch begins with each class, and with the first tensor after each such length of it. The
    # flows of a tensor stay together, because a pipeline divides the tensor itself into parts.
    new = np.diff(row_class, prepend=-1) != 0
    inside = before - before[np.flatnonzero(new)[np.cumsum(new) - 1]]
    begins = new | (np.diff(item[rows], prepend=-1) != 0)
    of_tensor = inside[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    new |= np.diff(of_tensor // length[row_class], prepend=-1) != 0
    new |= np.diff(inside // _STRETCH_BYTES, prepend=-1) != 0
    first = np.flatnonzero(new)
    stretch_bytes = np.add.reduceat(size, first) if len(first) else size

    total = np.concatenate(([0], np.cumsum(copies.share)))
    low, high = copies.begin[row_class[first]], copies.begin[row_class[first] + 1]
    stretch = np.repeat(np.arange(len(first)), high - low)
    turn = ragged_arange(high - low)
    # The shares of earlier ranks of the class, scaled from the class to the stretch.
    earlier = total[low[stretch] + turn] - total[low][stretch]
    part = _scale(stretch_bytes[stretch], earlier, (total[high] - total[low])[stretch])
    share_position = before[first][stretch] + part
    at = np.minimum(np.searchsorted(before, share_position, side="right") - 1, len(rows) - 1)
    offset = share_position - before[at]
    # An empty share at the end of the line begins after its last row.
    offset -= np.where(offset < size[at], offset % itemsize[rows[at]], 0)
    position = np.full(len(start) - 1, -1, dtype=np.int64)
    position[rows] = before
    return position, before[at] + offset, turn, start[rows[at]] + offset


def _scale(length: IntArray, part: IntArray, whole: IntArray) -> IntArray:
    """Return `length * part // whole` for `0 <= part <= whole`."""
    # Products that exceed 62 bits are divided by a power of two first.
    bits = np.frexp(length.astype(np.float64))[1] + np.frexp(whole.astype(np.float64))[1]
    shift = np.maximum(bits.astype(np.int64) - 62, 0)
    scaled: IntArray = length * (part >> shift) // np.maximum(whole >> shift, 1)
    return scaled
