"""Who sends, and who hands on, which elements of every flow of a job?

The bytes of a class of flows lie on one line, tensor by tensor; those who send the first copy of
each byte, and those who make the other copies (`copiers`), each cut it into consecutive shares::

    bytes of a class    |  w1  |      w2      |  w3  |
    first copy          |    rank 0   |    rank 1    |
    other copies        |  rank 4 | rank 5  | rank 6 |
    fragments           |---|-----|--|--|---|-|------|    one of each for a fragment

1. A line is cut in *stretches*, whole tensors' flows of at least `_STRETCH_BYTES`, and each
   stretch in the proportions of the shares. So all senders are busy in every part of a job,
   and yet no small tensor goes in crumbs.
2. Between two neighbouring cuts lies a fragment. Cuts are moved back to the boundary of an
   element.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.planning.copiers import NEAR, BoolArray, Classes, Copying, find_classes, find_copying
from reshard.planning.flows import Flows, find_flows
from reshard.planning.job import Job
from reshard.planning.lots import find_lots
from reshard.planning.plan import Plan
from reshard.runs import IntArray, ragged_arange
from reshard.topology import Topology

_STRETCH_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Parts of flows as columns of shape `(fragments,)`, in the order of items and flows.

    Fragment `i` is elements `first[i]:stop[i]` of `flow[i]` of `item[i]`, counted in the
    row-major order of the lot. `source_cell` sends it to the target cell `relay_cell`. The other
    receivers of the flow get it from there, or, where `is_direct`, from `second_cell`, a source
    cell too.
    """

    item: IntArray
    flow: IntArray
    first: IntArray
    stop: IntArray
    source_cell: IntArray
    relay_cell: IntArray
    second_cell: IntArray
    is_direct: BoolArray


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

    def sizes(self, classes: int) -> tuple[IntArray, IntArray]:
        """Bytes of each class, and of its widest element."""
        size, widest = np.zeros(classes, dtype=np.int64), np.ones(classes, dtype=np.int64)
        np.add.at(size, self.row_class, np.diff(self.start))
        np.maximum.at(widest, self.row_class, self.itemsize)
        return size, widest


def divide(job: Job, topology: Topology) -> Fragments:
    """The fragments of a job's flows.

    Raises:
        PlanError: an element that no source slot holds.
        LayoutError: a slot that is no rank of the topology.
    """
    plans = list(dict.fromkeys(item.plan for item in job.items))
    flows = [find_flows(plan, topology) for plan in plans]
    plan_of_item = np.array([plans.index(item.plan) for item in job.items], dtype=np.int64)
    classes = find_classes(plans, flows)
    line = _line(job, plans, plan_of_item, flows, classes)
    size, grain = line.sizes(len(classes.senders))
    copying = find_copying(classes, size, grain, topology.ranks)
    cuts = _cuts(line, copying)

    edges = np.unique(np.concatenate((line.start, *(cut for cut, _ in cuts))))
    first, stop = edges[:-1], edges[1:]
    row = np.searchsorted(line.start, first, side="right") - 1
    number = line.row_class[row]
    # Which of the ranks of a class has the fragment, among those who make each kind of copy.
    turns = []
    for shares, (cut, owner) in zip((copying.first, copying.others), cuts, strict=True):
        at = np.searchsorted(cut, first, side="right") - 1
        turn = np.append(owner, 0)[at] - shares.begin[number]
        turns.append(np.where(shares.counts[number] > 0, turn, 0))
    sender, copier = turns
    # The senders of a near class come before its receivers in making the other copies.
    near = copying.is_relayed[number] & (classes.nature[number] == NEAR)
    senders = np.where(near, copying.first.counts[number], 0)
    is_direct = ~copying.is_relayed[number] | (near & (copier < senders))
    second = np.where(copying.is_relayed[number], copier, sender)
    relay = np.where(is_direct, 0, copier - senders)

    item, flow = line.item[row], line.flow[row]
    source_cell, relay_cell, second_cell = (np.full_like(item, -1) for _ in range(3))
    for number_of_plan, found in enumerate(flows):
        mine = np.flatnonzero(plan_of_item[item] == number_of_plan)
        own = flow[mine]
        source_cell[mine] = found.sender[found.sender_begin[own] + sender[mine]]
        relay_cell[mine] = found.receiver[found.receiver_begin[own] + relay[mine]]
        direct = mine[is_direct[mine]]
        second_cell[direct] = found.sender[found.sender_begin[flow[direct]] + second[direct]]
    begin, size = line.start[row], line.itemsize[row]
    ends = ((first - begin) // size, (stop - begin) // size)
    order = np.lexsort((first, flow, item))
    cells = (source_cell[order], relay_cell[order], second_cell[order])
    return Fragments(
        item[order], flow[order], ends[0][order], ends[1][order], *cells, is_direct[order]
    )


def _line(
    job: Job, plans: list[Plan], plan_of_item: IntArray, flows: list[Flows], classes: Classes
) -> _Line:
    """All flows of all items on their line."""
    elements = [find_lots(plan).elements[flow.lot] for plan, flow in zip(plans, flows, strict=True)]
    numbers = plan_of_item.tolist()
    counts = np.array([len(flows[number]) for number in numbers], dtype=np.int64)
    sizes = np.array([item.dtype.itemsize_bytes for item in job.items], dtype=np.int64)
    itemsize = np.repeat(sizes, counts)
    nothing = [np.zeros(0, dtype=np.int64)]
    row_class = np.concatenate([classes.flow_class[number] for number in numbers] + nothing)
    row_bytes = np.concatenate([elements[number] for number in numbers] + nothing) * itemsize
    order = np.argsort(row_class, kind="stable")
    return _Line(
        np.repeat(np.arange(len(numbers)), counts)[order],
        ragged_arange(counts)[order],
        itemsize[order],
        row_class[order],
        np.concatenate(([0], np.cumsum(row_bytes[order]))),
    )


def _cuts(line: _Line, copying: Copying) -> list[tuple[IntArray, IntArray]]:
    """Where each share of both kinds begins on the line, rising, and its row of `rank`."""
    new = np.diff(line.row_class, prepend=-1) != 0
    class_start = line.start[:-1][np.flatnonzero(new)[np.cumsum(new) - 1]]
    number = (line.start[:-1] - class_start) // _STRETCH_BYTES
    stretch_row = np.flatnonzero(new | (np.diff(number, prepend=-1) != 0))
    stretch_class = line.row_class[stretch_row]
    start = line.start[stretch_row]
    size = np.diff(np.append(start, line.start[-1]))
    found = []
    for shares in (copying.first, copying.others):
        owner, distance = shares.cuts(stretch_class, size)
        cut = np.repeat(start, shares.counts[stretch_class]) + distance
        row = np.searchsorted(line.start, cut, side="right") - 1
        row = np.minimum(row, len(line.item) - 1)
        found.append((cut - (cut - line.start[row]) % line.itemsize[row], owner))
    return found
