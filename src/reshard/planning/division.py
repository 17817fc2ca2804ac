"""Who sends, and who hands on, which elements of every flow of a job?

Flows that the same ranks may send, to the same relays, are one *class*. Its bytes lie on one
line, tensor by tensor; senders and relays each cut the line into consecutive shares::

    bytes of a class    |  w1  |      w2      |  w3  |
    senders             |    rank 0   |    rank 1    |
    relays              |  rank 4 | rank 5  | rank 6 |
    fragments           |---|-----|--|--|---|-|------|    one sender and one relay each

1. The shares of all classes are found together (`shares`). Sending a class's bytes is work for
   its senders; handing each byte on to the other receivers of its host is work for its relays.
2. A line is cut in *stretches*, whole tensors' flows of at least `_STRETCH_BYTES`, and each
   stretch in the proportions of the shares. So all senders are busy in every part of a job,
   and yet no small tensor goes in crumbs.
3. Between two neighbouring cuts lies a fragment. Cuts are moved back to the boundary of an
   element.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.planning.flows import Flows, find_flows
from reshard.planning.job import Job
from reshard.planning.lots import find_lots
from reshard.planning.plan import Plan
from reshard.planning.shares import balanced_shares
from reshard.runs import IntArray, ragged_arange
from reshard.topology import Topology

_STRETCH_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Parts of flows as columns of shape `(fragments,)`, in the order of items and flows.

    Fragment `i` is elements `first[i]:stop[i]` of `flow[i]` of `item[i]`, counted in the
    row-major order of the lot. `source_cell` sends it to `relay_cell`, which hands it on to the
    other receivers of the flow.
    """

    item: IntArray
    flow: IntArray
    first: IntArray
    stop: IntArray
    source_cell: IntArray
    relay_cell: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _Classes:
    """Class `c` has the ranks `rank[begin[c]:begin[c + 1]]`, and each a share of its bytes."""

    begin: IntArray
    rank: IntArray
    share: IntArray

    def cuts(self, stretch_class: IntArray, stretch_bytes: IntArray) -> tuple[IntArray, IntArray]:
        """Where each share begins in each stretch, stretch by stretch, and whose it is.

        Returns the row of `rank` and the distance from the start of its stretch.
        """
        total = np.concatenate(([0], np.cumsum(self.share)))
        low = self.begin[stretch_class]
        count = self.begin[stretch_class + 1] - low
        stretch = np.repeat(np.arange(len(count)), count)
        row = np.repeat(low, count) + ragged_arange(count)
        before = total[row] - total[low][stretch]
        whole = total[self.begin[stretch_class + 1]] - total[low]
        return row, _part_of(stretch_bytes[stretch], before, whole[stretch])


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """The flows of all items end to end, class by class, as columns of shape `(rows,)`.

    Row `i` is `flow[i]` of `item[i]`, in elements of `itemsize[i]` bytes, at bytes
    `start[i]:start[i + 1]` of the line.
    """

    item: IntArray
    flow: IntArray
    itemsize: IntArray
    row_class: IntArray
    start: IntArray


def divide(job: Job, topology: Topology) -> Fragments:
    """The fragments of a job's flows.

    Raises:
        PlanError: an element that no source slot holds.
        LayoutError: a slot that is no rank of the topology.
    """
    plans = list(dict.fromkeys(item.plan for item in job.items))
    flows = [find_flows(plan, topology) for plan in plans]
    plan_of_item = np.array([plans.index(item.plan) for item in job.items], dtype=np.int64)
    flow_class, senders, relays = _rank_sets(plans, flows)
    line = _line(job, plans, plan_of_item, flows, flow_class)
    sending, relaying = _shared(line, senders, relays)

    new = np.diff(line.row_class, prepend=-1) != 0
    class_start = line.start[:-1][np.flatnonzero(new)[np.cumsum(new) - 1]]
    number = (line.start[:-1] - class_start) // _STRETCH_BYTES
    stretch_row = np.flatnonzero(new | (np.diff(number, prepend=-1) != 0))
    stretch_class = line.row_class[stretch_row]
    stretch_start = line.start[stretch_row]
    stretch_bytes = np.diff(np.append(stretch_start, line.start[-1]))
    cuts, owners = [], []
    for classes in (sending, relaying):
        owner, distance = classes.cuts(stretch_class, stretch_bytes)
        count = np.diff(classes.begin)[stretch_class]
        cut = np.repeat(stretch_start, count) + distance
        row = np.searchsorted(line.start, cut, side="right") - 1
        row = np.minimum(row, len(line.item) - 1)
        cuts.append(cut - (cut - line.start[row]) % line.itemsize[row])
        owners.append(owner)

    edges = np.unique(np.concatenate((line.start, *cuts)))
    first, stop = edges[:-1], edges[1:]
    row = np.searchsorted(line.start, first, side="right") - 1
    place = []
    for classes, cut, owner in zip((sending, relaying), cuts, owners, strict=True):
        at = np.searchsorted(cut, first, side="right") - 1
        chosen = np.append(owner, 0)[at] - classes.begin[line.row_class[row]]
        # Where a class has no relays of its own, every flow has only one.
        place.append(np.where(np.diff(classes.begin)[line.row_class[row]] > 0, chosen, 0))
    item, flow = line.item[row], line.flow[row]
    source_cell, relay_cell = np.empty_like(item), np.empty_like(item)
    for number_of_plan, found in enumerate(flows):
        mine = plan_of_item[item] == number_of_plan
        source_cell[mine] = found.sender[found.sender_begin[flow[mine]] + place[0][mine]]
        relay_cell[mine] = found.relay[found.relay_begin[flow[mine]] + place[1][mine]]
    begin, size = line.start[row], line.itemsize[row]
    fragments = (item, flow, (first - begin) // size, (stop - begin) // size)
    order = np.lexsort((first, flow, item))
    return Fragments(*(column[order] for column in (*fragments, source_cell, relay_cell)))


_RankSets = list[IntArray]


def _rank_sets(
    plans: list[Plan], flows: list[Flows]
) -> tuple[list[IntArray], _RankSets, _RankSets]:
    """The class of every flow of every plan, and the senders and the relays of each class.

    A class has no relays where its flows have one each, which is the receiver.
    """
    number: dict[tuple[bytes, bytes], int] = {}
    senders: _RankSets = []
    relays: _RankSets = []
    found = []
    for plan, flow in zip(plans, flows, strict=True):
        sender = plan.source.cell_slot[flow.sender]
        relay = plan.target.cell_slot[flow.relay]
        classes = np.empty(len(flow), dtype=np.int64)
        edges = zip(
            flow.sender_begin[:-1].tolist(),
            flow.sender_begin[1:].tolist(),
            flow.relay_begin[:-1].tolist(),
            flow.relay_begin[1:].tolist(),
            flow.host.tolist(),
            strict=True,
        )
        for i, (a, b, c, d, host) in enumerate(edges):
            is_relayed = d - c > 1
            to = relay[c:d].tobytes() if is_relayed else b"%d" % host
            key = (sender[a:b].tobytes(), to)
            if key not in number:
                number[key] = len(number)
                senders.append(sender[a:b])
                relays.append(relay[c:d] if is_relayed else relay[:0])
            classes[i] = number[key]
        found.append(classes)
    return found, senders, relays


def _line(
    job: Job,
    plans: list[Plan],
    plan_of_item: IntArray,
    flows: list[Flows],
    flow_class: list[IntArray],
) -> _Line:
    elements = [find_lots(plan).elements[flow.lot] for plan, flow in zip(plans, flows, strict=True)]
    numbers = plan_of_item.tolist()
    counts = [len(flows[number]) for number in numbers]
    sizes = [item.dtype.itemsize_bytes for item in job.items]
    item = np.repeat(np.arange(len(numbers)), counts)
    itemsize = np.repeat(np.array(sizes, dtype=np.int64), counts)
    nothing = [np.zeros(0, dtype=np.int64)]
    row_class = np.concatenate([flow_class[number] for number in numbers] + nothing)
    row_bytes = np.concatenate([elements[number] for number in numbers] + nothing) * itemsize
    order = np.argsort(row_class, kind="stable")
    return _Line(
        item[order],
        ragged_arange(np.array(counts, dtype=np.int64))[order],
        itemsize[order],
        row_class[order],
        np.concatenate(([0], np.cumsum(row_bytes[order]))),
    )


def _shared(line: _Line, senders: _RankSets, relays: _RankSets) -> tuple[_Classes, _Classes]:
    """The shares of senders in sending, and those of relays in handing on."""
    classes = len(senders)
    class_bytes = np.zeros(classes, dtype=np.int64)
    np.add.at(class_bytes, line.row_class, np.diff(line.start))
    grain = np.ones(classes, dtype=np.int64)
    np.maximum.at(grain, line.row_class, line.itemsize)
    others = np.array([max(len(ranks) - 1, 0) for ranks in relays], dtype=np.int64)
    sets = senders + relays
    begin = np.concatenate(([0], np.cumsum([len(ranks) for ranks in sets], dtype=np.int64)))
    rank = np.concatenate([*sets, np.zeros(0, dtype=np.int64)])
    share = balanced_shares(
        np.concatenate((class_bytes, class_bytes * others)),
        begin,
        rank,
        np.concatenate((grain, grain * np.maximum(others, 1))),
    )
    middle = int(begin[classes])
    return (
        _Classes(begin[: classes + 1], rank[:middle], share[:middle]),
        _Classes(begin[classes:] - middle, rank[middle:], share[middle:]),
    )


def _part_of(length: IntArray, part: IntArray, whole: IntArray) -> IntArray:
    """`length * part / whole`, rounded down; all at least 0, `part` at most `whole`."""
    # What would outgrow 62 bits is divided by a power of two first.
    bits = np.frexp(length.astype(np.float64))[1] + np.frexp(whole.astype(np.float64))[1]
    shift = np.maximum(bits.astype(np.int64) - 62, 0)
    scaled: IntArray = length * (part >> shift) // np.maximum(whole >> shift, 1)
    return scaled
