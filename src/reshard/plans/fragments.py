"""Shares of the copies of flows: which ranks send the first copies of bytes, and which the others.

Each receiver of a flow needs a copy. The senders send the first one; the others may come from
receivers that have theirs::

    direct       sender ----> a, b, c         the senders send 3 copies
    forwarded    sender ----> a ----> b, c    the senders send 1 copy, a receiver 2

Flows whose copies the same ranks may send are one *class*, and the ranks of a class divide its
bytes. There are two kinds of classes, for first copies and for the others.

1. To another host only first copies are sent, and its receivers forward them.
2. Within a host the senders can send all copies themselves, which takes one stage. They do so
   unless forwarding takes at least one part in `_WORTHWHILE` off the largest load of the job.
   Then receivers share in sending the other copies, where senders are overloaded, or everywhere
   if that is not enough.
3. Contributions that are reduced come directly.
4. In both cases the shares of all classes are computed together (`shares`).

Fragments of the flows of a job: which rank sends, and which forwards, which elements.

The bytes that the same ranks may send are in one sequence, the line, tensor by tensor, which is
divided into consecutive shares of these ranks (`copy_shares`). Every flow is on a line of first
copies, and if it is forwarded, also on a line of other copies::

    first copies    |  w1  |      w2      |  w3  |
                    |    rank 0   |    rank 1    |
    other copies    |  w2          |  w3  |  w4  |
                    |  rank 4  |  rank 5 | rank 6|
    fragments of w2 |------|---|..|     each has one rank of both lines

1. A line is cut in *stretches*, whole tensors' flows of at least one of `_MOST_STRETCHES` parts of
   it, and each stretch in the proportions of the shares. So all senders are busy in every part of
   a job, and yet no small tensor is cut into tiny pieces.
2. Cuts are moved back to the boundary of an element. Between two neighbouring cuts of a flow,
   on whichever line, lies a fragment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.layout_change import LayoutChange
from reshard.plans.broadcast_tree import Flows, Reach, find_flows
from reshard.plans.element_groups import find_element_groups
from reshard.plans.job import JobItem
from reshard.plans.load_balancing import balanced_shares
from reshard.runs import IntArray, ragged_arange
from reshard.topology import Topology

BoolArray = NDArray[np.bool_]

# 1.05 times the least is as good as the least.
_WORTHWHILE = 21

# Only senders make copies; senders on the host; senders elsewhere.
_DIRECT, _NEAR, _FAR = range(3)


@dataclass(frozen=True, slots=True, eq=False)
class CopyClasses:
    """The classes of the flows of some plans, numbered by their first flows.

    `first[p]` has the class of first copies of each flow of plan `p`, and `others[p]` that of
    the other copies, -1 where only the senders may make them. The ranks of the classes are
    `senders` and `other_senders`; of a flow from its own host, its senders come before its
    receivers there. A byte of first class `c` goes to `receivers[c]` ranks, where that is one
    number for all its flows, and one of other class `c` is forwarded to `others_receivers[c]`.
    """

    first: list[IntArray]
    others: list[IntArray]
    senders: list[IntArray]
    receivers: IntArray
    nature: IntArray
    other_senders: list[IntArray]
    others_receivers: IntArray


def find_copy_classes(plans: list[LayoutChange], flows: list[Flows]) -> CopyClasses:
    """The classes of the flows of some plans."""
    sending: dict[tuple[bytes, int, int], int] = {}
    forwarding: dict[tuple[bytes, bytes], int] = {}
    senders: list[IntArray] = []
    other_senders: list[IntArray] = []
    first, others = [], []
    for plan, flow in zip(plans, flows, strict=True):
        sender = plan.source.cell_slot[flow.sender]
        receiver = plan.target.cell_slot[flow.receiver]
        is_one = flow.receivers == 1
        nature = np.where(~flow.is_alone | is_one, _DIRECT, np.where(flow.is_inner, _NEAR, _FAR))
        begins = (flow.sender_begin, flow.receiver_begin)
        edges = [edge for begin in begins for edge in (begin[:-1], begin[1:])]
        columns = (column.tolist() for column in (*edges, nature))
        both = np.full((2, len(flow)), -1, dtype=np.int64)
        for i, (a, b, c, d, kind) in enumerate(zip(*columns, strict=True)):
            # Equal lists of ranks have equal bytes. A far flow crosses once, so the number of its
            # receivers is no part of its class.
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


@dataclass(frozen=True, slots=True, eq=False)
class ClassShares:
    """The ranks `rank[begin[c]:begin[c + 1]]` divide the bytes of class `c` in these shares."""

    begin: IntArray
    rank: IntArray
    share: IntArray

    @property
    def counts(self) -> IntArray:
        """How many ranks have a share in each class."""
        return np.diff(self.begin)


@dataclass(frozen=True, slots=True, eq=False)
class CopyAssignment:
    """The shares of ranks in the first copies, and in the others where a class `is_relayed`."""

    is_relayed: BoolArray
    first: ClassShares
    others: ClassShares

    def loads(self, ranks: int) -> IntArray:
        """Bytes each of `ranks` ranks sends."""
        total = np.zeros(ranks, dtype=np.int64)
        for shares in (self.first, self.others):
            np.add.at(total, shares.rank, shares.share)
        return total


@dataclass(frozen=True, slots=True, eq=False)
class ClassSizes:
    """Bytes of classes, as columns: `size` of those of both classes `first` and `others`.

    `unit` has the bytes of the widest element of each.
    """

    first: IntArray
    others: IntArray
    size: IntArray
    unit: IntArray


def assign_copies(classes: CopyClasses, sizes: ClassSizes, ranks: int) -> CopyAssignment:
    """The shares of `ranks` ranks in the copies of some classes."""
    far, near = classes.nature == _FAR, classes.nature == _NEAR
    direct = _share_copies(classes, sizes, far)
    if not near.any():
        return direct
    relayed = _share_copies(classes, sizes, far | near)
    # In the order of preference: nothing is relayed within hosts, then only where senders are
    # overloaded, then everywhere.
    enough = int(relayed.loads(ranks).max()) * _WORTHWHILE // (_WORTHWHILE - 1)
    load = direct.loads(ranks)
    if load.max() <= enough:
        return direct
    overloaded = np.array([bool((load[some] > enough).any()) for some in classes.senders])
    some = _share_copies(classes, sizes, far | (near & overloaded))
    return some if some.loads(ranks).max() <= enough else relayed


def _share_copies(classes: CopyClasses, sizes: ClassSizes, is_relayed: BoolArray) -> CopyAssignment:
    """The shares with the smallest maximum load, if other copies are forwarded in some classes."""
    first, others = len(classes.senders), len(classes.other_senders)
    demand = np.zeros(first + others, dtype=np.int64)
    unit = np.ones(first + others, dtype=np.int64)
    # Bytes to send: one copy where the others are forwarded, else one for each receiver.
    times = np.where(is_relayed, 1, classes.receivers)
    np.add.at(demand, sizes.first, sizes.size * times[sizes.first])
    np.maximum.at(unit, sizes.first, sizes.unit * times[sizes.first])
    handed = is_relayed[sizes.first] & (sizes.others >= 0)
    number = sizes.others[handed]
    times = classes.others_receivers[number]
    np.add.at(demand, first + number, sizes.size[handed] * times)
    np.maximum.at(unit, first + number, sizes.unit[handed] * times)
    sets = classes.senders + classes.other_senders
    begin = np.cumsum([0, *(len(ranks) for ranks in sets)])
    rank = np.concatenate([*sets, np.zeros(0, dtype=np.int64)])
    share = balanced_shares(demand, begin, rank, unit)
    middle = int(begin[first])
    return CopyAssignment(
        is_relayed,
        ClassShares(begin[: first + 1], rank[:middle], share[:middle]),
        ClassShares(begin[first:] - middle, rank[middle:], share[middle:]),
    )


# As many as a pipeline has parts (`pipeline`), so that each part is divided among all senders; of
# at least so many bytes for each of these, and at most so many in all.
_MOST_STRETCHES, _LEAST_SHARE_BYTES, _STRETCH_BYTES = 16, 1 << 17, 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Parts of flows as columns of shape `(fragments,)`, in the order of items and flows.

    Fragment `i` is elements `first[i]:stop[i]` of `flow[i]` of `item[i]`, counted in the
    row-major order of the group. `source_cell` sends it to the receiver number `relay` of those of
    all flows, a target cell. The other receivers of the flow get it from there (`spreading`), or,
    where `is_direct`, from `second_cell`, a source cell too.
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
    """The fragments of the flows of a job's tensors.

    Raises:
        PlanError: an element that no source slot holds.
        LayoutError: a slot that is no rank of the topology.
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

    # One row for each flow of each item.
    counts = np.array([len(flow) for flow in flows], dtype=np.int64)[plan_of_item]
    item = np.repeat(np.arange(len(counts)), counts)
    flow = ragged_arange(counts)
    widths = np.array([one.dtype.itemsize_bytes for one in items], dtype=np.int64)
    itemsize = widths[item]
    row_first, row_others, row_elements = (
        np.concatenate([columns[i] for i in plan_of_item.tolist()] + [counts[:0]])
        for columns in (classes.first, classes.others, elements)
    )
    start = np.concatenate(([0], np.cumsum(row_elements * itemsize)))
    sizes = ClassSizes(row_first, row_others, row_elements * itemsize, itemsize)
    copying = assign_copies(classes, sizes, topology.ranks)
    is_relayed = copying.is_relayed[row_first]
    sending = _cut_classes(np.arange(len(item)), row_first, item, start, itemsize, copying.first)
    forwarding = _cut_classes(
        np.flatnonzero(is_relayed), row_others, item, start, itemsize, copying.others
    )

    # Between neighbouring cuts of both lines one rank sends and one forwards: a fragment.
    edges = np.unique(np.concatenate((start, sending.cuts, forwarding.cuts)))
    begin, end = edges[:-1], edges[1:]
    row = np.searchsorted(start, begin, side="right") - 1
    sender, other_sender = (line.turns(row, begin - start[row]) for line in (sending, forwarding))
    item, flow, is_relayed = item[row], flow[row], is_relayed[row]
    ends = ((begin - start[row]) // itemsize[row], (end - start[row]) // itemsize[row])

    source_cell, relay, second_cell = (np.empty_like(item) for _ in range(3))
    is_direct = ~is_relayed
    for i, found in enumerate(flows):
        mine = np.flatnonzero(plan_of_item[item] == i)
        own, low = flow[mine], found.sender_begin[flow[mine]]
        # Among those who make other copies, the senders of the host come before its receivers.
        near = np.where(found.is_inner[own], found.sender_begin[own + 1] - low, 0)
        is_direct[mine] |= other_sender[mine] < near
        direct, relayed = is_direct[mine], is_relayed[mine]
        source_cell[mine] = found.sender[low + sender[mine]]
        turn = np.where(direct, 0, other_sender[mine] - near)
        relay[mine] = found.receiver_begin[own] + turn
        second = np.where(relayed & direct, other_sender[mine], sender[mine])
        second_cell[mine] = found.sender[low + second]
    return Fragments(item, flow, *ends, source_cell, relay, second_cell, is_direct)


@dataclass(frozen=True, slots=True, eq=False)
class _ClassCuts:
    """The rows of some classes, class by class, and where they are cut.

    Row `r` begins at byte `place[r]` of the line. Shares begin at `share_place`, rising, and are
    those of the ranks number `share_turn` of their classes. `cuts` are the same places, counted
    in the order of all rows of the job.
    """

    place: IntArray
    share_place: IntArray
    share_turn: IntArray
    cuts: IntArray

    def turns(self, row: IntArray, offset: IntArray) -> IntArray:
        """Which rank of its class has the byte `offset` of each row; 0 for rows elsewhere."""
        if not len(self.share_place):
            return np.zeros_like(row)
        at = np.searchsorted(self.share_place, self.place[row] + offset, side="right") - 1
        return np.where(self.place[row] >= 0, self.share_turn[at], 0)


def _cut_classes(
    rows: IntArray,
    row_class: IntArray,
    item: IntArray,
    start: IntArray,
    itemsize: IntArray,
    shares: ClassShares,
) -> _ClassCuts:
    """The line of the given rows; row `r` has the bytes `start[r]:start[r + 1]` of the job."""
    rows = rows[np.argsort(row_class[rows], kind="stable")]
    size = np.diff(start)[rows]
    row_class = row_class[rows]
    before = np.cumsum(size) - size
    total = np.zeros(len(shares.counts), dtype=np.int64)
    np.add.at(total, row_class, size)
    least = np.minimum(shares.counts * _LEAST_SHARE_BYTES, _STRETCH_BYTES)
    length = np.clip(total // _MOST_STRETCHES, np.maximum(least, 1), _STRETCH_BYTES)
    # A stretch begins with each class, and with the first tensor behind each such length of it.
    # What a tensor has stays together: a pipeline cuts the tensor itself into its parts.
    new = np.diff(row_class, prepend=-1) != 0
    inside = before - before[np.flatnonzero(new)[np.cumsum(new) - 1]]
    begins = new | (np.diff(item[rows], prepend=-1) != 0)
    of_tensor = inside[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    new |= np.diff(of_tensor // length[row_class], prepend=-1) != 0
    new |= np.diff(inside // _STRETCH_BYTES, prepend=-1) != 0
    first = np.flatnonzero(new)
    stretch_bytes = np.add.reduceat(size, first) if len(first) else size

    total = np.concatenate(([0], np.cumsum(shares.share)))
    low, high = shares.begin[row_class[first]], shares.begin[row_class[first] + 1]
    stretch = np.repeat(np.arange(len(first)), high - low)
    turn = ragged_arange(high - low)
    # Shares of the ranks before this one in its class, scaled from the class to the stretch.
    earlier = total[low[stretch] + turn] - total[low][stretch]
    part = _scale(stretch_bytes[stretch], earlier, (total[high] - total[low])[stretch])
    share_place = before[first][stretch] + part
    at = np.minimum(np.searchsorted(before, share_place, side="right") - 1, len(rows) - 1)
    offset = share_place - before[at]
    # A share of nothing at the end of the line begins behind its last row.
    offset -= np.where(offset < size[at], offset % itemsize[rows[at]], 0)
    place = np.full(len(start) - 1, -1, dtype=np.int64)
    place[rows] = before
    return _ClassCuts(place, before[at] + offset, turn, start[rows[at]] + offset)


def _scale(length: IntArray, part: IntArray, whole: IntArray) -> IntArray:
    """`length * part / whole`, rounded down; all at least 0, `part` at most `whole`."""
    # What would outgrow 62 bits is divided by a power of two first.
    bits = np.frexp(length.astype(np.float64))[1] + np.frexp(whole.astype(np.float64))[1]
    shift = np.maximum(bits.astype(np.int64) - 62, 0)
    scaled: IntArray = length * (part >> shift) // np.maximum(whole >> shift, 1)
    return scaled
