"""Boxes of parts of element groups, and where they are at both ends.

A group is a list of boxes, and a part of it a range of its elements, counted box by box and row
by row. Most boxes lie inside the range; one that a cut goes through becomes a few smaller ones
(`flat_range_boxes`)::

    group     box 0         box 1       part 5:14    box 0         box 1
            0  1  2  3    8  9 10                  .  5 | 6 7    8  9 10
            4  5  6  7   11 12 13                  -------->    11 12 13
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.geometry.transfers import Transfers
from reshard.layout import flat_range_boxes
from reshard.plans.hosts.element_groups import ElementGroups
from reshard.runs import IntArray, ragged_arange


@dataclass(frozen=True, slots=True, eq=False)
class FragmentBoxes:
    """Boxes of parts of groups: part `of[i]` of `group[i]` has the box `start[i]`, `shape[i]`.

    `piece` is the piece of each dimension's overlap that a box comes from.
    """

    of: IntArray
    group: IntArray
    start: IntArray
    shape: IntArray
    piece: IntArray

    def take(self, index: IntArray) -> FragmentBoxes:
        """The chosen boxes, in the order asked for."""
        columns = (self.of, self.group, self.start, self.shape, self.piece)
        return FragmentBoxes(*(column[index] for column in columns))


def find_boxes(
    groups: ElementGroups, group: IntArray, first: IntArray, stop: IntArray
) -> FragmentBoxes:
    """The boxes of elements `first[i]:stop[i]` of `group[i]`, part by part and in order."""
    boxes = groups.boxes
    # Ranges of elements on the line of all boxes of all groups: which boxes each one meets.
    base = np.append(boxes.before, 0)[boxes.begin[group]]
    low = np.searchsorted(boxes.before, base + first, side="right") - 1
    count = np.searchsorted(boxes.before, base + stop, side="left") - low
    of = np.repeat(np.arange(len(group)), count)
    box = np.repeat(low, count) + ragged_arange(count)
    size = boxes.shape[box].prod(axis=1)
    inside = boxes.before[box] - base[of]
    begin, end = np.maximum(first[of] - inside, 0), np.minimum(stop[of] - inside, size)
    start, shape = boxes.start[box], boxes.shape[box]
    cut = np.flatnonzero((begin > 0) | (end < size))
    if not len(cut):
        return FragmentBoxes(of, group[of], start, shape, boxes.piece[box])
    pieces = [
        flat_range_boxes(row, a, b)
        for row, a, b in zip(
            shape[cut].tolist(), begin[cut].tolist(), end[cut].tolist(), strict=True
        )
    ]
    # Boxes that are cut are replaced by their pieces, in place.
    count = np.ones(len(of), dtype=np.int64)
    count[cut] = [len(found) for found in pieces]
    row = np.repeat(np.arange(len(of)), count)
    is_cut = np.zeros(len(of), dtype=bool)
    is_cut[cut] = True
    start, shape, is_cut = start[row], shape[row], is_cut[row]
    start[is_cut] += np.array([box.start for found in pieces for box in found])
    shape[is_cut] = np.array([box.shape for found in pieces for box in found])
    return FragmentBoxes(of[row], group[of][row], start, shape, boxes.piece[box][row])


def exchange_transfers(
    groups: ElementGroups, boxes: FragmentBoxes, source_cell: IntArray, target_cell: IntArray
) -> Transfers:
    """Boxes from source cells to target cells, one of each a box."""
    source_slot = groups.source.cell_slot[source_cell]
    target_slot = groups.target.cell_slot[target_cell]
    return Transfers(
        source_slot,
        target_slot,
        source_cell,
        target_cell,
        groups.order[boxes.group],
        source_slot == target_slot,
        boxes.start,
        boxes.shape,
        groups.source_start(source_cell, boxes.start, boxes.piece),
        groups.target_start(target_cell, boxes.start, boxes.piece),
    )


def fan_out_transfers(
    groups: ElementGroups, boxes: FragmentBoxes, relay_cell: IntArray, target_cell: IntArray
) -> Transfers:
    """Boxes from target cells that have them to others that want them."""
    relay_slot = groups.target.cell_slot[relay_cell]
    target_slot = groups.target.cell_slot[target_cell]
    return Transfers(
        relay_slot,
        target_slot,
        relay_cell,
        target_cell,
        np.zeros(len(boxes.of), dtype=np.int64),
        relay_slot == target_slot,
        boxes.start,
        boxes.shape,
        groups.target_start(relay_cell, boxes.start, boxes.piece),
        groups.target_start(target_cell, boxes.start, boxes.piece),
    )


def transfers_of_slot(transfers: Transfers, slot: int) -> Transfers:
    """The transfers that a slot sends or receives."""
    return transfers.take((transfers.source_slot == slot) | (transfers.target_slot == slot))
