"""Which boxes move of which tensor, and from whom: for one rank, or for all.

1. Choose rows and receivers: for all ranks, every row with every rank of its kind; for one
   rank, the rows of its own kind, and the stretches of the line that it sends.
2. Write each row out as boxes: the product of the pieces of its pairs.
3. Find the sender of each box by its place on the line. A box that lies across a cut is sent
   in parts: the cut is moved to the nearest end of the box, or of one of its rows, if that is
   near enough (`Line.rounding_bytes`), and to the nearest element if not::

       boxes    |    a    |    b    |    c    |        cut 1: to the end of a
       cuts     ---------1-------2-----------          cut 2: through b, between two rows

4. The sender's own cell is looked up last, so that boxes are the same whoever sends them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from reshard.geometry.transfers import Transfers
from reshard.plans.senders.box_parts import Parts, grain_elements
from reshard.plans.senders.byte_line import Bundle, Line
from reshard.plans.senders.selection import Chosen, every_item, stretches_of, turn_of, turns_of
from reshard.runs import IntArray, ragged_arange, ragged_ranges


@dataclass(frozen=True, slots=True, eq=False)
class BundleTransfers:
    """The transfers of all tensors of a bundle: those of item `i` of it are
    `begin[i]:begin[i + 1]`.

    Row `r` is of the unsplit box `whole_start[box[r]]`, of shape `whole_shape[box[r]]`; it has
    the elements from `first_element[r]` on of its row-major order.
    """

    bundle: Bundle
    begin: IntArray
    transfers: Transfers
    box: IntArray
    whole_start: IntArray
    whole_shape: IntArray
    first_element: IntArray


def transfers_of_all(line: Line, is_stable: bool) -> Iterator[BundleTransfers]:
    """The transfers of all ranks, bundle by bundle."""
    for writer in _writers(line, _everything(line)):
        yield writer.write(None, is_stable)


def sent_bytes(line: Line, is_stable: bool) -> IntArray:
    """The bytes that each slot sends to others: shape `(slots,)`. Nothing is written out."""
    total = np.zeros(len(line.kinds.group), dtype=np.int64)
    for writer in _writers(line, _everything(line)):
        writer.add_sent(total, is_stable)
    return total


def _everything(line: Line) -> Chosen:
    count = line.kinds.size[line.rows.kind]
    return every_item(line, np.repeat(np.arange(len(count)), count), ragged_arange(count))


def transfers_of_rank(line: Line, rank: int, is_stable: bool) -> list[BundleTransfers]:
    """What one rank receives, keeps and sends."""
    if rank >= len(line.kinds.group):
        return []
    wanted = np.flatnonzero(line.rows.kind == line.kinds.group[rank])
    number = np.full(len(wanted), line.kinds.number[rank])
    received = every_item(line, wanted, number)
    sent = turns_of(line, rank) if is_stable else stretches_of(line, rank)
    chosen = Chosen(
        *(
            np.concatenate((getattr(received, name), getattr(sent, name)))
            for name in Chosen.__dataclass_fields__
        )
    )
    return [writer.write(rank, is_stable) for writer in _writers(line, chosen)]


def _writers(line: Line, chosen: Chosen) -> Iterator[_Writer]:
    # Rows are sorted by bundle; those received and those sent are put together.
    bundle = line.rows.bundle[chosen.row]
    order = np.argsort(bundle, kind="stable")
    begin = np.searchsorted(bundle[order], np.arange(len(line.bundles) + 1))
    for number, (low, high) in enumerate(pairwise(begin.tolist())):
        if low < high:
            yield _Writer(line, line.bundles[number], chosen.take(order[low:high]))


class _Writer:
    """The boxes of chosen rows of one bundle, as columns of shape `(boxes,)`."""

    def __init__(self, line: Line, bundle: Bundle, chosen: Chosen) -> None:
        needs, rows = bundle.needs, line.rows
        self.line, self.bundle, self.chosen = line, bundle, chosen
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
        kind = rows.kind[self.row]
        self.target_slot = line.kinds.member[line.kinds.member_begin[kind] + receiver]
        before = np.cumsum(self.elements) - self.elements
        first = np.searchsorted(self.of_box, np.arange(len(need)))
        before -= before[first][self.of_box]
        self.place = (
            rows.begin[self.row]
            + receiver * rows.receiver_step[self.row]
            + before * bundle.dtype.itemsize_bytes
        )
        self.stays = rows.stays[self.row]
        self.receiver = receiver

    def write(self, rank: int | None, is_stable: bool) -> BundleTransfers:
        """The transfers of every item, or those of them that begin or end on `rank`."""
        items = len(self.bundle.items)
        box, item, sender, parts = self._sent(is_stable)
        if len(parts.of):
            whole = np.ones(len(box), dtype=bool)
            whole[parts.of] = False
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
        return BundleTransfers(
            self.bundle,
            np.searchsorted(item, np.arange(items + 1)),
            *self._columns(box, sender, parts, split),
        )

    def add_sent(self, total: IntArray, is_stable: bool) -> None:
        """Add to `total` the bytes that each slot sends of every item."""
        box, _, sender, parts = self._sent(is_stable)
        elements = np.where(self.stays, 0, self.elements)[box]
        elements[parts.of] = 0
        itemsize = self.bundle.dtype.itemsize_bytes
        np.add.at(total, sender, elements * itemsize)
        np.add.at(total, parts.sender, parts.shape.prod(axis=1) * itemsize)

    def _sent(self, is_stable: bool) -> tuple[IntArray, IntArray, IntArray, Parts]:
        """Every box of every item, its item and sender, and the parts of those with several."""
        box, item = self._with_items(len(self.bundle.items))
        if not is_stable:
            return box, item, *self._cut(box, item)
        turn = turn_of(self.line, self.row, self.receiver)
        sender = np.where(self.stays, self.target_slot, turn)[box]
        return box, item, sender, Parts.none(self.start.shape[1])

    def _with_items(self, items: int) -> tuple[IntArray, IntArray]:
        """Every box of every chosen item, item by item."""
        first, stop = self.chosen.first[self.of_box], self.chosen.stop[self.of_box]
        boxes = np.arange(len(first))
        if (stop - first == items).all():
            return np.tile(boxes, items), np.repeat(np.arange(items), len(boxes))
        count = stop - first
        box, item = np.repeat(boxes, count), np.repeat(first, count) + ragged_arange(count)
        order = np.argsort(item, kind="stable")
        return box[order], item[order]

    def _cut(self, box: IntArray, item: IntArray) -> tuple[IntArray, Parts]:
        """The sender of every box, and the parts of those that several send."""
        line, itemsize = self.line, self.bundle.dtype.itemsize_bytes
        ndim = self.start.shape[1]
        if not len(line.cut):
            return self.target_slot[box], Parts.none(ndim)
        place = self.place[box] + item * line.rows.item_step[self.row][box]
        first = np.searchsorted(line.cut, place, side="right")
        last = np.searchsorted(line.cut, place + (self.elements * itemsize - 1)[box], side="right")
        stays = self.stays[box]
        sender = np.where(stays, self.target_slot[box], line.sender.take(first, mode="clip"))
        of = np.flatnonzero((last > first) & ~stays)
        if not len(of):
            return sender, Parts.none(ndim)
        # Of each split box the cuts inside of it, in elements from its begin.
        cuts = (last - first)[of]
        which = np.repeat(np.arange(len(of)), cuts)
        number = first[of][which] + ragged_arange(cuts)
        shape = self.shape[box[of]]
        grain = grain_elements(shape, line.rounding_bytes // itemsize)[which]
        grain_bytes = grain * itemsize
        cut = (line.cut[number] - place[of][which] + grain_bytes // 2) // grain_bytes * grain
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
        return sender, Parts.of_ranges(
            of[parts], line.sender[first[of][parts] + inner], shape[parts], begin, stop
        )

    def _columns(
        self, box: IntArray, sender: IntArray, parts: Parts, split: IntArray | None
    ) -> tuple[Transfers, IntArray, IntArray, IntArray, IntArray]:
        """The transfers, and of what boxes they are; `split[r]` is the part that row `r` is."""
        needs = self.bundle.needs
        cell = needs.source_cell(self.need[box], sender)
        key = needs.of_keys.target_key[self.need]
        target_cell = needs.target_copies.cell_on_slot(key, self.target_slot)
        boxes = np.empty((4, self.start.shape[1], len(box)), dtype=np.int64)
        for d, overlap in enumerate(needs.of_keys.overlaps):
            entry = overlap.shared_pieces.entry[self.pieces[d]]
            boxes[0, d], boxes[1, d] = self.start[box, d], self.shape[box, d]
            boxes[3, d] = self.target_start[box, d]
            if overlap.holders.is_single:
                part = overlap.pair_set[needs.of_keys.pair[d][self.need]]
                boxes[2, d] = overlap.source_local(entry, part)[box]
            else:
                part = needs.source.cell_part[cell, d]
                boxes[2, d] = overlap.source_local(entry[box], part)
        first = np.zeros(len(box), dtype=np.int64)
        if split is not None:
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
