"""The transfers of a job: the boxes that move, and their senders, for one rank or all ranks.

1. Select rows and receivers: for all ranks, every row with every rank of its rank group; for one
   rank, the rows of its own rank group, and those that it sends.
2. Expand each row to boxes: the product of the pieces of its pairs.
3. Find the sender of each box by its position on the byte line. A box that contains a cut is sent
   in parts: the cut is moved to the nearest end of the box, or of one of its rows, if that is
   near enough (`SenderAssignment.rounding_bytes`), and to the nearest element if not::

       boxes    |    a    |    b    |    c    |        cut 1: to the end of a
       cuts     ---------1-------2-----------          cut 2: through b, between two rows

4. The sender's own cell is looked up last, so that boxes do not depend on the sender.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from reshard.geometry.transfers import Transfers
from reshard.plans.senders.box_parts import BoxParts, rounding_elements
from reshard.plans.senders.selection import (
    FindSenders,
    Selection,
    select_all_items,
    select_found,
    select_sent,
)
from reshard.plans.senders.sender_assignment import SenderAssignment, TensorGroup
from reshard.runs import IntArray, ragged_arange, ragged_ranges


@dataclass(frozen=True, slots=True, eq=False)
class GroupTransfers:
    """The transfers of all tensors of a tensor group: those of item `i` of it are
    `begin[i]:begin[i + 1]`.

    Row `r` is of the unsplit box `whole_start[box[r]]`, of shape `whole_shape[box[r]]`; it has
    the elements from `first_element[r]` on of its row-major order.
    """

    tensors: TensorGroup
    begin: IntArray
    transfers: Transfers
    box: IntArray
    whole_start: IntArray
    whole_shape: IntArray
    first_element: IntArray


def transfers_of_all(
    assignment: SenderAssignment, find_senders: FindSenders | None
) -> Iterator[GroupTransfers]:
    """The transfers of all ranks, tensor group by tensor group."""
    for writer in _make_writers(assignment, _select_everything(assignment)):
        yield writer.write(None, find_senders)


def sent_bytes(assignment: SenderAssignment, find_senders: FindSenders | None) -> IntArray:
    """The bytes that each slot sends to others: shape `(slots,)`. Nothing is written out."""
    total = np.zeros(len(assignment.rank_groups.group), dtype=np.int64)
    for writer in _make_writers(assignment, _select_everything(assignment)):
        writer.add_sent(total, find_senders)
    return total


def _select_everything(assignment: SenderAssignment) -> Selection:
    count = assignment.rank_groups.size[assignment.rows.rank_group]
    return select_all_items(
        assignment, np.repeat(np.arange(len(count)), count), ragged_arange(count)
    )


def transfers_of_rank(
    assignment: SenderAssignment, rank: int, find_senders: FindSenders | None
) -> list[GroupTransfers]:
    """The transfers of one rank: to it, within it and from it."""
    if rank >= len(assignment.rank_groups.group):
        return []
    wanted = np.flatnonzero(assignment.rows.rank_group == assignment.rank_groups.group[rank])
    number = np.full(len(wanted), assignment.rank_groups.number[rank])
    received = select_all_items(assignment, wanted, number)
    if find_senders is None:
        sent = select_sent(assignment, rank)
    else:
        sent = select_found(assignment, rank, find_senders)
    chosen = Selection(
        *(
            np.concatenate((getattr(received, name), getattr(sent, name)))
            for name in Selection.__dataclass_fields__
        )
    )
    return [writer.write(rank, find_senders) for writer in _make_writers(assignment, chosen)]


def _make_writers(assignment: SenderAssignment, chosen: Selection) -> Iterator[_BoxWriter]:
    # Rows are sorted by tensor group; those received and those sent are put together.
    tensor_group = assignment.rows.tensor_group[chosen.row]
    order = np.argsort(tensor_group, kind="stable")
    begin = np.searchsorted(tensor_group[order], np.arange(len(assignment.tensor_groups) + 1))
    for number, (low, high) in enumerate(pairwise(begin.tolist())):
        if low < high:
            yield _BoxWriter(
                assignment, assignment.tensor_groups[number], chosen.take(order[low:high])
            )


class _BoxWriter:
    """The boxes of chosen rows of one tensor group, as columns of shape `(boxes,)`."""

    def __init__(
        self, assignment: SenderAssignment, tensor_group: TensorGroup, chosen: Selection
    ) -> None:
        needs, rows = tensor_group.needs, assignment.rows
        self.assignment, self.tensors, self.chosen = assignment, tensor_group, chosen
        # Which of the chosen each box is of; all of them, where each is one box.
        of_box: IntArray | slice = slice(None)
        entries: list[IntArray] = []
        need = rows.need[chosen.row]
        for d, overlap in enumerate(needs.of_keys.overlaps):
            pieces = overlap.shared_pieces
            pair = needs.of_keys.pair[d][need[of_box]]
            low = pieces.begin[pair]
            row, piece = ragged_ranges(low, pieces.begin[pair + 1] - low)
            if not isinstance(row, slice):
                entries = [earlier[row] for earlier in entries]
                of_box = row if isinstance(of_box, slice) else of_box[row]
            entries.append(piece)
        self.of_box = np.arange(len(need))[of_box]
        self.pieces = entries
        count, ndim = len(self.of_box), len(entries)
        boxes = np.empty((3, ndim, count), dtype=np.int64)
        for d, (overlap, piece) in enumerate(zip(needs.of_keys.overlaps, entries, strict=True)):
            pieces = overlap.shared_pieces
            boxes[0, d], boxes[1, d] = pieces.start[piece], pieces.length[piece]
            boxes[2, d] = pieces.target_local[piece]
        self.start, self.shape, self.target_start = (box.T for box in boxes)
        self.row = chosen.row[self.of_box]
        self.need = need[self.of_box]
        self.elements: IntArray = self.shape.prod(axis=1)
        receiver = chosen.receiver[self.of_box]
        rank_group = rows.rank_group[self.row]
        self.target_slot = assignment.rank_groups.member[
            assignment.rank_groups.member_begin[rank_group] + receiver
        ]
        # Elements of the same row and receiver in the boxes before: the place within its need.
        before = np.cumsum(self.elements) - self.elements
        first = np.searchsorted(self.of_box, np.arange(len(need)))
        before -= before[first][self.of_box]
        self.place = (
            rows.begin[self.row]
            + receiver * rows.receiver_step[self.row]
            + before * tensor_group.dtype.itemsize_bytes
        )
        self.stays = rows.stays[self.row]
        self.receiver = receiver

    def write(self, rank: int | None, find_senders: FindSenders | None) -> GroupTransfers:
        """The transfers of every item, or those of them that begin or end on `rank`."""
        items = len(self.tensors.items)
        box, item, sender, parts = self._find_senders(find_senders)
        if len(parts.of):
            whole = np.ones(len(box), dtype=bool)
            whole[parts.of] = False
            # Whole boxes and then parts, put in the order of boxes: a part stands where its box
            # stood. `split` is the number of the part, negative for whole boxes.
            of = np.concatenate((np.flatnonzero(whole), parts.of))
            sender = np.concatenate((sender[whole], parts.sender))
            order = np.argsort(of, kind="stable")
            if rank is not None:
                mine = (sender[order] == rank) | (self.target_slot[box[of[order]]] == rank)
                order = order[mine]
            split = order - (len(of) - len(parts.of))
            box, item, sender = box[of[order]], item[of[order]], sender[order]
        else:
            split = None
            if rank is not None:
                mine = np.flatnonzero((sender == rank) | (self.target_slot[box] == rank))
                box, item, sender = box[mine], item[mine], sender[mine]
        return GroupTransfers(
            self.tensors,
            np.searchsorted(item, np.arange(items + 1)),
            *self._list_transfers(box, sender, parts, split),
        )

    def add_sent(self, total: IntArray, find_senders: FindSenders | None) -> None:
        """Add to `total` the bytes that each slot sends of every item."""
        box, _, sender, parts = self._find_senders(find_senders)
        elements = np.where(self.stays, 0, self.elements)[box]
        elements[parts.of] = 0
        itemsize = self.tensors.dtype.itemsize_bytes
        np.add.at(total, sender, elements * itemsize)
        np.add.at(total, parts.sender, parts.shape.prod(axis=1) * itemsize)

    def _find_senders(
        self, find_senders: FindSenders | None
    ) -> tuple[IntArray, IntArray, IntArray, BoxParts]:
        """Every box of every item, its item and sender, and the parts of those with several."""
        box, item = self._repeat_by_item(len(self.tensors.items))
        if find_senders is None:
            return box, item, *self._cut_boxes(box, item)
        found = find_senders(self.assignment, self.row, self.receiver)
        sender = np.where(self.stays, self.target_slot, found)[box]
        return box, item, sender, BoxParts.none(self.start.shape[1])

    def _repeat_by_item(self, items: int) -> tuple[IntArray, IntArray]:
        """Every box of every chosen item, item by item."""
        first, stop = self.chosen.first[self.of_box], self.chosen.stop[self.of_box]
        boxes = np.arange(len(first))
        if (stop - first == items).all():
            return np.tile(boxes, items), np.repeat(np.arange(items), len(boxes))
        count = stop - first
        box, item = np.repeat(boxes, count), np.repeat(first, count) + ragged_arange(count)
        order = np.argsort(item, kind="stable")
        return box[order], item[order]

    def _cut_boxes(self, box: IntArray, item: IntArray) -> tuple[IntArray, BoxParts]:
        """The sender of every box, and the parts of those that several send."""
        assignment, itemsize = self.assignment, self.tensors.dtype.itemsize_bytes
        ndim = self.start.shape[1]
        if not len(assignment.cut):
            return self.target_slot[box], BoxParts.none(ndim)
        place = self.place[box] + item * assignment.rows.item_step[self.row][box]
        first = np.searchsorted(assignment.cut, place, side="right")
        # The senders of a box's first and last byte: with one for both, nothing is cut.
        last = np.searchsorted(
            assignment.cut, place + (self.elements * itemsize - 1)[box], side="right"
        )
        stays = self.stays[box]
        sender = np.where(stays, self.target_slot[box], assignment.sender.take(first, mode="clip"))
        of = np.flatnonzero((last > first) & ~stays)
        if not len(of):
            return sender, BoxParts.none(ndim)
        # Of each split box the cuts inside of it, in elements from its begin.
        cuts = (last - first)[of]
        which = np.repeat(np.arange(len(of)), cuts)
        number = first[of][which] + ragged_arange(cuts)
        shape = self.shape[box[of]]
        unit = rounding_elements(shape, assignment.rounding_bytes // itemsize)[which]
        unit_bytes = unit * itemsize
        cut = (assignment.cut[number] - place[of][which] + unit_bytes // 2) // unit_bytes * unit
        elements = self.elements[box[of]]
        cut = np.minimum(cut, elements[which])
        # One part more than cuts: it begins where the one before it ends.
        parts = np.repeat(np.arange(len(of)), cuts + 1)
        begin, stop = np.zeros(len(parts), dtype=np.int64), np.empty(len(parts), dtype=np.int64)
        inner = ragged_arange(cuts + 1)
        begin[inner > 0] = cut
        stop[inner < cuts[parts]] = cut
        stop[inner == cuts[parts]] = elements
        some = np.flatnonzero(begin < stop)
        parts, begin, stop, inner = parts[some], begin[some], stop[some], inner[some]
        return sender, BoxParts.of_ranges(
            of[parts], assignment.sender[first[of][parts] + inner], shape[parts], begin, stop
        )

    def _list_transfers(
        self, box: IntArray, sender: IntArray, parts: BoxParts, split: IntArray | None
    ) -> tuple[Transfers, IntArray, IntArray, IntArray, IntArray]:
        """The transfers, and of what boxes they are; `split[r]` is the part that row `r` is."""
        needs = self.tensors.needs
        cell = needs.source_cell(self.need[box], sender)
        key = needs.of_keys.target_key[self.need]
        target_cell = needs.target_copies.cell_on_slot(key, self.target_slot)
        # Four blocks by dimension: start, shape, and where the box begins at either end.
        boxes = np.empty((4, self.start.shape[1], len(box)), dtype=np.int64)
        for d, overlap in enumerate(needs.of_keys.overlaps):
            entry = overlap.shared_pieces.entry[self.pieces[d]]
            boxes[0, d], boxes[1, d] = self.start[box, d], self.shape[box, d]
            boxes[3, d] = self.target_start[box, d]
            # If a set is one part, the local position does not depend on the sender.
            if overlap.holders.is_single:
                part = overlap.pair_set[needs.of_keys.pair[d][self.need]]
                boxes[2, d] = overlap.source_local(entry, part)[box]
            else:
                part = needs.source.cell_part[cell, d]
                boxes[2, d] = overlap.source_local(entry[box], part)
        first = np.zeros(len(box), dtype=np.int64)
        if split is not None:
            # Parts have a shape of their own, and begin inside their box at both ends alike.
            row = np.flatnonzero(split >= 0)
            part = split[row]
            first[row] = parts.first_element[part]
            boxes[1][:, row] = parts.shape[part].T
            for side in (0, 2, 3):
                boxes[side][:, row] += parts.start[part].T
        start, shape, source_start, target_start = (column.T for column in boxes)
        transfers = Transfers(
            sender,
            self.target_slot[box],
            cell,
            target_cell[box],
            needs.of_keys.order[self.need][box],
            self.stays[box],
            start,
            shape,
            source_start,
            target_start,
        )
        return transfers, box, self.start, self.shape, first
