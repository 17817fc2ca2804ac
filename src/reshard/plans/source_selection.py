"""Source selection: the rank that sends each element that several ranks hold.

`assign_senders` divides all moved bytes of a job among their holders. All bytes are arranged in a
sequence that every rank knows, the *byte line*, and the line is divided among the senders, so that
a rank finds the sender of a byte from its position, without a list of what other ranks do::

    class     |  held by ranks 0 and 1              |  held by 2 and 3
    receiver  |    4     |    5     |    6    |  7  |    4     |    5 ...
    tensor    | a | b |c | a | b |c | a |b |c | a..
    sender    |---------- 0 -------------|---- 1 ---|----- 2 -------...

1. The tensors with equal change and dtype form a *tensor group*, whose needs are found once.
2. Ranks that belong to the same holder sets and need the same target keys form a *rank group*.
3. A *row* is a need of a tensor group and a rank group. If the rank group holds the elements, they
   stay. Otherwise they are a demand on the *class* of their holders.
4. The line is ordered by class, rank group, receiver, tensor group, tensor, need, box and element.
   The bytes of a class that a receiver lacks are adjacent, so a sender serves few receivers, and
   all senders are busy whichever tensors are moved first. Every position is a sum of products, so
   no list grows with the number of ranks times the number of tensors.
5. The shares of all classes are balanced together (`load_balancing`). On the line they follow the
   order of class, rank group and rank.

`POLICIES` has the ways to select senders: `"balanced"` is the byte line. With `"stable"` the
holders of a need take turns (`find_turns`), independently of other tensors and of ranks added
after the existing ones. Any other policy is a function that returns the holder that sends each row
to each receiver, the same on all ranks.

Then the transfers are written out, of all ranks or of a single rank:

1. Select rows and receivers: for all ranks, every row with every rank of its rank group; for a
   single rank, the rows of its rank group, and the rows that it sends.
2. Expand each row to boxes, the product of the pieces of its pairs.
3. Find the sender of each box by its position on the line. A box that contains a cut is sent in
   parts. The cut is moved to the nearest end of the box, or of one of its rows, within
   `SenderAssignment.rounding_bytes`; otherwise to the nearest element::

       boxes    |    a    |    b    |    c    |        cut 1: to the end of a
       cuts     ---------1-------2-----------          cut 2: through b, between two rows

4. The sender's cell is looked up last, so that boxes do not depend on the sender.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.dtypes import DType
from reshard.geometry.holders import find_in, replica_turns
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.routes import Needs
from reshard.geometry.transfers import Transfers
from reshard.layout import flat_range_boxes
from reshard.plans.load_balancing import (
    RankGroups,
    balance_group_shares,
    divide_among_members,
    group_ranks,
)
from reshard.runs import (
    IntArray,
    concatenate,
    distinct,
    ragged_arange,
    ragged_numbers,
    ragged_ranges,
    ragged_rows,
    sum_by,
)

# Rounding cuts to whole boxes and rows may add a 64th to the maximum load.
_ROUNDING = 64


class TensorGroup(Record, eq=False):
    """The tensors of a job with equal change and dtype; `items` are their numbers in the job."""

    change: LayoutChange
    dtype: DType
    items: IntArray
    needs: Needs


class DemandRows(Record, eq=False):
    """Needs with the rank groups that have them, as columns of shape `(rows,)`.

    Rows are sorted by tensor group. The bytes that receiver `i` of the rank group needs of tensor
    `j` of the tensor group begin at position `begin + i * receiver_step + j * item_step` of the
    line; these columns are undefined in rows that stay.
    """

    tensor_group: IntArray
    need: IntArray
    rank_group: IntArray
    size_bytes: IntArray
    holder_set: IntArray
    stays: NDArray[np.bool_]
    begin: IntArray
    receiver_step: IntArray
    item_step: IntArray


class DemandRanges(Record, eq=False):
    """Classes with the rank groups that lack them, as columns in the order of the line.

    The rows of range `p` are `row[row_begin[p]:row_begin[p + 1]]`. Each receiver takes
    `receiver_bytes`; those of the first begin at `begin`, those of the last end at `stop`.
    """

    rank_group: IntArray
    row_begin: IntArray
    row: IntArray
    receiver_bytes: IntArray
    begin: IntArray
    stop: IntArray


class SenderAssignment(Record, eq=False):
    """The byte line of a job and its senders: rank `sender[i]` sends the bytes up to `cut[i]`.

    Cuts are moved by up to `rounding_bytes` to the end of a box or of a row of a box.
    """

    tensor_groups: tuple[TensorGroup, ...]
    rank_groups: RankGroups
    set_begin: IntArray
    set_slot: IntArray
    rows: DemandRows
    ranges: DemandRanges
    sender: IntArray
    cut: IntArray
    rounding_bytes: int


def assign_senders(tensor_groups: Sequence[TensorGroup], slots: int) -> SenderAssignment:
    """Return the senders of the moved bytes of tensor groups between `slots` ranks."""
    # Steps 1 and 2: the sets of slots that hold or need some elements, and the groups of ranks
    # that belong to the same sets.
    all_needs = [tensor_group.needs for tensor_group in tensor_groups]
    first, set_begin, set_slot = _number_sets(
        [(needs.set_begin, needs.set_slot) for needs in all_needs]
        + [(needs.target_copies.begin, needs.target_copies.slot) for needs in all_needs]
    )
    # The first of these are the sets of holders, the others the sets of ranks that need a key.
    firsts = zip(all_needs, first, first[len(all_needs) :], strict=False)
    holder_set, target_set = [], []
    for needs, first_holders, first_targets in firsts:
        holder_set.append(first_holders + needs.holder_set)
        target_set.append(first_targets + needs.target_key)
    rank_groups = group_ranks(set_begin, set_slot, slots)
    counts = np.array([len(b.needs) for b in tensor_groups], dtype=np.int64)
    of_needs = (
        np.repeat(np.arange(len(tensor_groups)), counts),
        ragged_arange(counts),
        concatenate([b.needs.elements * b.dtype.itemsize_bytes for b in tensor_groups]),
        concatenate(holder_set),
    )
    # Step 3: every need with every rank group of its target key's slots.
    needed = concatenate(target_set)
    row, entry = ragged_rows(rank_groups.set_begin, needed)
    tensor_group, need, size_bytes, holder_set_of_row = (column[row] for column in of_needs)
    rank_group = rank_groups.set_group[entry]
    # A row stays if its rank group is in the set of its holders. Pairs of a set and a rank group
    # are looked up as single numbers.
    set_numbers = np.repeat(
        np.arange(len(rank_groups.set_begin) - 1), np.diff(rank_groups.set_begin)
    )
    number = len(rank_groups.size)
    held = set_numbers * number + rank_groups.set_group
    _, stays = find_in(held, holder_set_of_row * number + rank_group)
    class_of_row, class_begin, class_rank_group = _find_classes(
        rank_groups, holder_set_of_row[~stays]
    )
    items = np.array([len(b.items) for b in tensor_groups], dtype=np.int64)
    positions, ranges, range_class = _order_demand(
        tensor_group, size_bytes, rank_group, stays, class_of_row, items, rank_groups
    )
    rows = DemandRows(
        tensor_group, need, rank_group, size_bytes, holder_set_of_row, stays, *positions
    )
    # Step 5: the bytes of each class are divided in units of whole elements. The unit of a class
    # with several dtypes is the greatest common divisor of their sizes.
    demand = sum_by(len(class_begin) - 1, range_class, ranges.stop - ranges.begin)
    unit = np.zeros(len(demand), dtype=np.int64)
    itemsize = np.array([b.dtype.itemsize_bytes for b in tensor_groups], dtype=np.int64)
    np.gcd.at(unit, class_of_row, itemsize[rows.tensor_group[~stays]])
    sender, cut, rounding = _divide(demand, class_begin, class_rank_group, rank_groups, unit)
    return SenderAssignment(
        tuple(tensor_groups),
        rank_groups,
        set_begin,
        set_slot,
        rows,
        ranges,
        sender,
        cut,
        rounding,
    )


def _number_sets(
    sets: Sequence[tuple[IntArray, IntArray]],
) -> tuple[list[int], IntArray, IntArray]:
    """Concatenate lists of sets of slots, each given as `(begin, slot)`, without equal lists.

    Return the number of the first set of each list, and all sets as `begin` and `slot`.
    """
    numbers: list[int] = []
    lists_by_size: dict[tuple[int, ...], list[tuple[int, IntArray, IntArray]]] = {}
    begins, slots = [np.zeros(1, dtype=np.int64)], []
    count, total = 0, 0
    for begin, slot in sets:
        # Only lists of the same lengths and ends are compared in full.
        ends = (int(slot[0]), int(slot[-1])) if len(slot) else ()
        candidates = lists_by_size.setdefault((len(begin), len(slot), *ends), [])
        for number, other_begin, other_slot in candidates:
            if np.array_equal(other_slot, slot) and np.array_equal(other_begin, begin):
                numbers.append(number)
                break
        else:
            candidates.append((count, begin, slot))
            numbers.append(count)
            begins.append(begin[1:] + (total - begin[0]))
            slots.append(slot)
            count, total = count + len(begin) - 1, total + len(slot)
    return numbers, np.concatenate(begins), concatenate(slots)


def _find_classes(
    rank_groups: RankGroups, holder_set: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the class of each holder set, and the rank groups of each class.

    Holder sets of equal ranks are a class. Class `c` has the rank groups
    `rank_group[begin[c]:begin[c + 1]]`.
    """
    used = distinct(holder_set)
    numbers: dict[bytes, int] = {}
    of_used = np.zeros(len(used), dtype=np.int64)
    for i, number in enumerate(used.tolist()):
        low, high = rank_groups.set_begin[number : number + 2]
        held = rank_groups.set_group[low:high].tobytes()
        of_used[i] = numbers.setdefault(held, len(numbers))
    members = [np.frombuffer(held, dtype=np.int64) for held in numbers]
    begin = np.cumsum([0, *map(len, members)])
    return of_used[np.searchsorted(used, holder_set)], begin, concatenate(members)


def _order_demand(
    row_tensor_group: IntArray,
    size_bytes: IntArray,
    rank_group: IntArray,
    stays: NDArray[np.bool_],
    class_of_row: IntArray,
    items: IntArray,
    rank_groups: RankGroups,
) -> tuple[IntArray, DemandRanges, IntArray]:
    """Return the positions of rows on the line, the ranges, and the class of each range.

    Positions are the columns `begin`, `receiver_step` and `item_step` of `DemandRows`.
    """
    moving = np.flatnonzero(~stays)
    code = class_of_row * len(rank_groups.size) + rank_group[moving]
    # Rows are sorted by tensor group and need already, and the sort is stable.
    order = np.argsort(code, kind="stable")
    code, row = code[order], moving[order]
    tensor_group, size = row_tensor_group[row], size_bytes[row]
    new_range = np.diff(code, prepend=-1) != 0
    # A block is the bytes of a tensor that a receiver of a range lacks.
    new_block = new_range | (np.diff(tensor_group, prepend=-1) != 0)
    block = np.cumsum(new_block) - 1
    block_first, range_first = np.flatnonzero(new_block), np.flatnonzero(new_range)
    # Prefix sums over the sorted rows: the bytes of a block (`step`), the offset of a row in its
    # block, and the offset of a block among all, which is repeated for each tensor of its group.
    total = np.append(0, np.cumsum(size))
    step = np.diff(total[np.append(block_first, len(row))])
    in_block = total[:-1] - total[block_first][block]
    block_total = np.append(0, np.cumsum(step * items[tensor_group[block_first]]))
    block_of_range = block[range_first]
    receiver_bytes = np.diff(block_total[np.append(block_of_range, len(step))])
    number = np.cumsum(new_range) - 1
    range_class, range_rank_group = np.divmod(code[range_first], max(len(rank_groups.size), 1))
    stop = np.cumsum(receiver_bytes * rank_groups.size[range_rank_group])
    begin = stop - receiver_bytes * rank_groups.size[range_rank_group]
    positions = np.zeros((3, len(rank_group)), dtype=np.int64)
    first = (begin - block_total[block_of_range])[number]
    positions[0, row] = first + block_total[block] + in_block
    positions[1, row] = receiver_bytes[number]
    positions[2, row] = step[block]
    row_begin = np.append(range_first, len(row))
    ranges = DemandRanges(range_rank_group, row_begin, row, receiver_bytes, begin, stop)
    return positions, ranges, range_class


def _divide(
    demand: IntArray,
    class_begin: IntArray,
    class_rank_group: IntArray,
    rank_groups: RankGroups,
    unit: IntArray,
) -> tuple[IntArray, IntArray, int]:
    """Return the senders in the order of the line, where each ends, and the rounding."""
    shares = balance_group_shares(demand, class_begin, class_rank_group, rank_groups.size, unit)
    of_class = np.repeat(np.arange(len(demand)), np.diff(class_begin))
    parts = divide_among_members(shares, class_rank_group, rank_groups.size, unit[of_class])
    _, member = ragged_rows(rank_groups.member_begin, class_rank_group)
    sender = rank_groups.member[member]
    sends = parts > 0
    sender, parts = sender[sends], parts[sends]
    if not len(sender):
        return sender, parts, 0
    load = sum_by(int(sender.max()) + 1, sender, parts)
    # Each interval of a sender is rounded at both ends, by half of this.
    rounding = int(load.max()) // (_ROUNDING * int(np.bincount(sender).max()))
    return sender, np.cumsum(parts), rounding


FindSenders = Callable[[SenderAssignment, IntArray, IntArray], IntArray]
"""A function that returns the holder that sends each row to each receiver."""


Selection = IntArray
"""Rows with a receiver each, and items of their tensor groups: an array of shape `(4, rows)`.

Column `i` is a row, a receiver, and the range `first:stop` of the items.
"""


def select_all_items(assignment: SenderAssignment, row: IntArray, receiver: IntArray) -> Selection:
    """Select rows and receivers with all items of their tensor groups."""
    items = np.array(
        [len(tensor_group.items) for tensor_group in assignment.tensor_groups], dtype=np.int64
    )
    return np.stack((row, receiver, np.zeros_like(row), items[assignment.rows.tensor_group[row]]))


def select_sent(assignment: SenderAssignment, rank: int) -> Selection:
    """Select the rows and receivers whose bytes on the line are sent by `rank`."""
    ranges, rows = assignment.ranges, assignment.rows
    mine = np.flatnonzero(assignment.sender == rank)
    stop = assignment.cut[mine]
    begin = np.where(mine > 0, assignment.cut[mine - 1], 0)
    # Every interval of the sender with every range that it intersects, then with its receivers.
    low = np.searchsorted(ranges.stop, begin, side="right")
    count = np.searchsorted(ranges.begin, stop, side="left") - low
    at, number = ragged_numbers(low, count)
    begin, stop = begin[at], stop[at]
    each = ranges.receiver_bytes[number]
    low = np.maximum(begin - ranges.begin[number], 0) // each
    # Rounded up: the last receiver whose bytes are in the interval.
    count = np.minimum(
        -((ranges.begin[number] - stop) // each),
        assignment.rank_groups.size[ranges.rank_group[number]],
    )
    at, receiver = ragged_numbers(low, count - low)
    number, begin, stop = (column[at] for column in (number, begin, stop))
    # Then with every row, and the tensors whose bytes are in the interval.
    at, entry = ragged_rows(ranges.row_begin, number)
    row = ranges.row[entry]
    receiver, begin, stop = (column[at] for column in (receiver, begin, stop))
    items = select_all_items(assignment, row, receiver)[3]
    position = rows.begin[row] + receiver * rows.receiver_step[row]
    step = rows.item_step[row]
    # Tensor `j` begins at `position + j * step`.
    first = np.maximum((begin - position - rows.size_bytes[row]) // step + 1, 0)
    last = np.minimum(-((position - stop) // step), items)
    return np.stack((row, receiver, first, last))[:, first < last]


def select_found(assignment: SenderAssignment, rank: int, find_senders: FindSenders) -> Selection:
    """Select the rows and receivers for which a policy returns `rank`."""
    rows = assignment.rows
    # The policy is evaluated only for rows that the rank holds.
    holds = np.zeros(len(assignment.set_begin) - 1, dtype=bool)
    of_set = np.repeat(np.arange(len(holds)), np.diff(assignment.set_begin))
    holds[of_set[assignment.set_slot == rank]] = True
    row = np.flatnonzero(holds[rows.holder_set] & ~rows.stays)
    count = assignment.rank_groups.size[rows.rank_group[row]]
    row, receiver = np.repeat(row, count), ragged_arange(count)
    mine = np.flatnonzero(find_senders(assignment, row, receiver) == rank)
    return select_all_items(assignment, row[mine], receiver[mine])


def find_turns(assignment: SenderAssignment, row: IntArray, receiver: IntArray) -> IntArray:
    """Return the holders of each row in turn, by the receiver's index among replicas."""
    rows = assignment.rows
    slot = assignment.rank_groups.member[
        assignment.rank_groups.member_begin[rows.rank_group[row]] + receiver
    ]
    turn = np.zeros(len(row), dtype=np.int64)
    for number in distinct(rows.tensor_group[row]).tolist():
        of_group = np.flatnonzero(rows.tensor_group[row] == number)
        needs = assignment.tensor_groups[number].needs
        key = needs.target_key[rows.need[row[of_group]]]
        cell = needs.target_copies.cell_on_slot(key, slot[of_group])
        turn[of_group] = replica_turns(needs.target.placement)[cell]
    holders = rows.holder_set[row]
    begin = assignment.set_begin[holders]
    return assignment.set_slot[begin + turn % (assignment.set_begin[holders + 1] - begin)]


# By the name passed as `Job(..., sources=name)`. Balanced senders are found on the byte line.
POLICIES: dict[str, FindSenders | None] = {"balanced": None, "stable": find_turns}


class BoxParts(Record, eq=False):
    """The parts of boxes that are sent by several ranks.

    Part `p` is a box within box `of[p]`, with offset `start[p]` and `shape[p]`, sent by
    `sender[p]`; it begins at element `first_element[p]` of the box in row-major order.
    """

    of: IntArray
    sender: IntArray
    start: IntArray
    shape: IntArray
    first_element: IntArray

    @classmethod
    def none(cls, ndim: int) -> BoxParts:
        """Return no parts, of boxes with `ndim` dimensions."""
        nothing, boxes = np.zeros(0, dtype=np.int64), np.zeros((0, ndim), dtype=np.int64)
        return cls(nothing, nothing, boxes, boxes, nothing)

    @classmethod
    def of_ranges(
        cls, index: IntArray, sender: IntArray, shape: IntArray, begin: IntArray, stop: IntArray
    ) -> BoxParts:
        """Split boxes of `shape` by ranges of elements, each sent by a rank."""
        row, part_start, part_shape = split_boxes(shape, begin, stop)
        # Row-major strides of each split box, for the number of each part's first element.
        strides = np.ones_like(part_start)
        for d in range(shape.shape[1] - 2, -1, -1):
            strides[:, d] = strides[:, d + 1] * shape[row, d + 1]
        first_element = (part_start * strides).sum(axis=1)
        return cls(index[row], sender[row], part_start, part_shape, first_element)


def split_boxes(
    shape: IntArray, begin: IntArray, stop: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Return elements `begin:stop` of each box as the fewest boxes: row, offset and shape of each.

    A cut at the end of a row of the first dimension leaves a box on each side, a cut at any other
    element up to `2 * dims - 1`::

        +-----------+          +-----------+
        |  sender 0 |          |  sender 0 |
        |-----------|          |    +------|
        |  sender 1 |          |----+   1  |
        +-----------+          +-----------+

    >>> row, start, shape = split_boxes(np.array([[3, 4]]), np.array([6]), np.array([12]))
    >>> row.tolist(), start.tolist(), shape.tolist()
    ([0, 0], [[1, 2], [2, 0]], [[1, 2], [1, 4]])
    """
    # Equal boxes, as those of the tensors of a group, are often cut at the same elements.
    cached: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    rows: list[int] = []
    parts: list[tuple[int, ...]] = []
    columns = zip(map(tuple, shape.tolist()), begin.tolist(), stop.tolist(), strict=True)
    for row, (size, low, high) in enumerate(columns):
        if (size, low, high) not in cached:
            cached[size, low, high] = [
                box.start + box.shape for box in flat_range_boxes(size, low, high)
            ]
        parts += cached[size, low, high]
        rows += [row] * len(cached[size, low, high])
    ndim = shape.shape[1]
    boxes = np.array(parts, dtype=np.int64).reshape(len(parts), 2 * ndim)
    return np.array(rows, dtype=np.int64), boxes[:, :ndim], boxes[:, ndim:]


def find_rounding_elements(shape: IntArray, rounding: int) -> IntArray:
    """Return the number of elements to which cuts of boxes are rounded: shape `(boxes,)`.

    It is the size of the largest of the whole box, a row of its first dimension, of its second, ...
    that has at most `rounding` elements, or 1.
    """
    unit = np.ones(len(shape), dtype=np.int64)
    size = np.ones(len(shape), dtype=np.int64)
    for d in range(shape.shape[1] - 1, -1, -1):
        size *= shape[:, d]
        unit = np.where(size <= rounding, size, unit)
    return unit


class GroupTransfers(Record, eq=False):
    """The transfers of all tensors of a tensor group.

    Item `i` has the rows `begin[i]:begin[i + 1]`. Row `r` is part of the unsplit box with offset
    `whole_start[box[r]]` and shape `whole_shape[box[r]]`, from its element `first_element[r]` on.
    """

    tensors: TensorGroup
    begin: IntArray
    transfers: Transfers
    box: IntArray
    whole_start: IntArray
    whole_shape: IntArray
    first_element: IntArray


def list_all_transfers(
    assignment: SenderAssignment, find_senders: FindSenders | None
) -> Iterator[GroupTransfers]:
    """Yield the transfers of all ranks, by tensor group."""
    for writer in _make_writers(assignment, _select_everything(assignment)):
        yield writer.write(None, find_senders)


def sent_bytes(assignment: SenderAssignment, find_senders: FindSenders | None) -> IntArray:
    """Count the bytes that each slot sends to others, without writing out transfers."""
    total = np.zeros(len(assignment.rank_groups.group), dtype=np.int64)
    for writer in _make_writers(assignment, _select_everything(assignment)):
        writer.add_sent(total, find_senders)
    return total


def _select_everything(assignment: SenderAssignment) -> Selection:
    count = assignment.rank_groups.size[assignment.rows.rank_group]
    return select_all_items(
        assignment, np.repeat(np.arange(len(count)), count), ragged_arange(count)
    )


def list_rank_transfers(
    assignment: SenderAssignment, rank: int, find_senders: FindSenders | None
) -> list[GroupTransfers]:
    """Return the transfers to, within and from a rank, by tensor group."""
    if rank >= len(assignment.rank_groups.group):
        return []
    rows = np.flatnonzero(assignment.rows.rank_group == assignment.rank_groups.group[rank])
    number = np.full(len(rows), assignment.rank_groups.number[rank])
    received = select_all_items(assignment, rows, number)
    if find_senders is None:
        sent = select_sent(assignment, rank)
    else:
        sent = select_found(assignment, rank, find_senders)
    chosen = np.concatenate((received, sent), axis=1)
    return [writer.write(rank, find_senders) for writer in _make_writers(assignment, chosen)]


def _make_writers(assignment: SenderAssignment, chosen: Selection) -> Iterator[_BoxWriter]:
    # Received and sent rows are each sorted by tensor group; they are merged.
    number_of_row = assignment.rows.tensor_group[chosen[0]]
    order = np.argsort(number_of_row, kind="stable")
    begin = np.searchsorted(number_of_row[order], np.arange(len(assignment.tensor_groups) + 1))
    for number, (low, high) in enumerate(pairwise(begin.tolist())):
        if low < high:
            tensor_group = assignment.tensor_groups[number]
            yield _BoxWriter(assignment, tensor_group, chosen[:, order[low:high]])


class _BoxWriter:
    """The boxes of selected rows of a tensor group, as columns of shape `(boxes,)`."""

    def __init__(
        self, assignment: SenderAssignment, tensor_group: TensorGroup, chosen: Selection
    ) -> None:
        needs, rows = tensor_group.needs, assignment.rows
        self.assignment, self.tensors = assignment, tensor_group
        row, receiver, first_item, stop_item = chosen
        # The selected row of each box; a slice as long as every row is a single box.
        of_box: IntArray | slice = slice(None)
        entries: list[IntArray] = []
        need = rows.need[row]
        for d, overlap in enumerate(needs.overlaps):
            pieces = overlap.shared_pieces
            pair = needs.pair[d][need[of_box]]
            low = pieces.begin[pair]
            index, piece = ragged_ranges(low, pieces.begin[pair + 1] - low)
            if not isinstance(index, slice):
                entries = [earlier[index] for earlier in entries]
                of_box = index if isinstance(of_box, slice) else of_box[index]
            entries.append(piece)
        self.of_box = np.arange(len(need))[of_box]
        self.pieces = entries
        count, ndim = len(self.of_box), len(entries)
        boxes = np.empty((3, ndim, count), dtype=np.int64)
        for d, (overlap, piece) in enumerate(zip(needs.overlaps, entries, strict=True)):
            pieces = overlap.shared_pieces
            boxes[0, d], boxes[1, d] = pieces.start[piece], pieces.length[piece]
            boxes[2, d] = pieces.target_local[piece]
        self.start, self.shape, self.target_start = (box.T for box in boxes)
        self.row = row[self.of_box]
        self.items = (first_item[self.of_box], stop_item[self.of_box])
        self.need = need[self.of_box]
        self.elements: IntArray = self.shape.prod(axis=1)
        receiver = receiver[self.of_box]
        rank_group = rows.rank_group[self.row]
        self.target_slot = assignment.rank_groups.member[
            assignment.rank_groups.member_begin[rank_group] + receiver
        ]
        # The offset of each box within its need, in elements of the same row and receiver.
        before = np.cumsum(self.elements) - self.elements
        first = np.searchsorted(self.of_box, np.arange(len(need)))
        before -= before[first][self.of_box]
        self.position = (
            rows.begin[self.row]
            + receiver * rows.receiver_step[self.row]
            + before * tensor_group.dtype.itemsize_bytes
        )
        self.stays = rows.stays[self.row]
        self.receiver = receiver

    def write(self, rank: int | None, find_senders: FindSenders | None) -> GroupTransfers:
        """Return the transfers of every item, or those from or to `rank`."""
        items = len(self.tensors.items)
        box, item, sender, parts = self._find_senders(find_senders)
        if len(parts.of):
            whole = np.ones(len(box), dtype=bool)
            whole[parts.of] = False
            # Parts replace their box in the order of boxes. `split` is the number of the part,
            # negative for whole boxes.
            index = np.concatenate((np.flatnonzero(whole), parts.of))
            sender = np.concatenate((sender[whole], parts.sender))
            order = np.argsort(index, kind="stable")
            if rank is not None:
                mine = (sender[order] == rank) | (self.target_slot[box[index[order]]] == rank)
                order = order[mine]
            split = order - (len(index) - len(parts.of))
            box, item, sender = box[index[order]], item[index[order]], sender[order]
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
        """Add the bytes that each slot sends of every item to `total`."""
        box, _, sender, parts = self._find_senders(find_senders)
        elements = np.where(self.stays, 0, self.elements)[box]
        elements[parts.of] = 0
        itemsize = self.tensors.dtype.itemsize_bytes
        np.add.at(total, sender, elements * itemsize)
        np.add.at(total, parts.sender, parts.shape.prod(axis=1) * itemsize)

    def _find_senders(
        self, find_senders: FindSenders | None
    ) -> tuple[IntArray, IntArray, IntArray, BoxParts]:
        """Return each box of each item, its item, its sender, and the parts of split boxes."""
        box, item = self._repeat_by_item(len(self.tensors.items))
        if find_senders is None:
            return box, item, *self._cut_boxes(box, item)
        selected = find_senders(self.assignment, self.row, self.receiver)
        sender = np.where(self.stays, self.target_slot, selected)[box]
        return box, item, sender, BoxParts.none(self.start.shape[1])

    def _repeat_by_item(self, items: int) -> tuple[IntArray, IntArray]:
        """Return each box of each selected item, and the item, ordered by item."""
        first, stop = self.items
        boxes = np.arange(len(first))
        if (stop - first == items).all():
            return np.tile(boxes, items), np.repeat(np.arange(items), len(boxes))
        count = stop - first
        box, item = np.repeat(boxes, count), np.repeat(first, count) + ragged_arange(count)
        order = np.argsort(item, kind="stable")
        return box[order], item[order]

    def _cut_boxes(self, box: IntArray, item: IntArray) -> tuple[IntArray, BoxParts]:
        """Return the sender of every box, and the parts of boxes with several senders."""
        assignment, itemsize = self.assignment, self.tensors.dtype.itemsize_bytes
        ndim = self.start.shape[1]
        if not len(assignment.cut):
            return self.target_slot[box], BoxParts.none(ndim)
        position = self.position[box] + item * assignment.rows.item_step[self.row][box]
        # The senders of the first and the last byte of each box.
        first = np.searchsorted(assignment.cut, position, side="right")
        last = np.searchsorted(
            assignment.cut, position + (self.elements * itemsize - 1)[box], side="right"
        )
        stays = self.stays[box]
        # Clipped, because the positions of boxes that stay are undefined.
        sender = np.where(stays, self.target_slot[box], assignment.sender.take(first, mode="clip"))
        split = np.flatnonzero((last > first) & ~stays)
        if not len(split):
            return sender, BoxParts.none(ndim)
        # The cuts inside each split box, in elements from its beginning.
        cuts = (last - first)[split]
        which = np.repeat(np.arange(len(split)), cuts)
        number = first[split][which] + ragged_arange(cuts)
        shape = self.shape[box[split]]
        unit = find_rounding_elements(shape, assignment.rounding_bytes // itemsize)[which]
        unit_bytes = unit * itemsize
        cut = (
            (assignment.cut[number] - position[split][which] + unit_bytes // 2) // unit_bytes * unit
        )
        elements = self.elements[box[split]]
        cut = np.minimum(cut, elements[which])
        # A box with n cuts has n + 1 parts, each of which begins at the end of the previous part.
        parts = np.repeat(np.arange(len(split)), cuts + 1)
        begin, stop = np.zeros(len(parts), dtype=np.int64), np.empty(len(parts), dtype=np.int64)
        inner = ragged_arange(cuts + 1)
        begin[inner > 0] = cut
        stop[inner < cuts[parts]] = cut
        stop[inner == cuts[parts]] = elements
        some = np.flatnonzero(begin < stop)
        parts, begin, stop, inner = parts[some], begin[some], stop[some], inner[some]
        return sender, BoxParts.of_ranges(
            split[parts], assignment.sender[first[split][parts] + inner], shape[parts], begin, stop
        )

    def _list_transfers(
        self, box: IntArray, sender: IntArray, parts: BoxParts, split: IntArray | None
    ) -> tuple[Transfers, IntArray, IntArray, IntArray, IntArray]:
        """Return the columns of `GroupTransfers`; `split[r]` is the part in row `r`."""
        needs = self.tensors.needs
        cell = needs.source_cell(self.need[box], sender)
        key = needs.target_key[self.need]
        target_cell = needs.target_copies.cell_on_slot(key, self.target_slot)
        # By dimension: start, shape, and the offsets of the box in the source and in the target.
        boxes = np.empty((4, self.start.shape[1], len(box)), dtype=np.int64)
        for d, overlap in enumerate(needs.overlaps):
            entry = overlap.shared_pieces.entry[self.pieces[d]]
            boxes[0, d], boxes[1, d] = self.start[box, d], self.shape[box, d]
            boxes[3, d] = self.target_start[box, d]
            # If each set is a single part, the local offset does not depend on the sender.
            if overlap.holders.is_single:
                part = overlap.pair_set[needs.pair[d][self.need]]
                boxes[2, d] = overlap.source_local(entry, part)[box]
            else:
                part = needs.source.cell_part[cell, d]
                boxes[2, d] = overlap.source_local(entry[box], part)
        first = np.zeros(len(box), dtype=np.int64)
        if split is not None:
            # Parts have their own shape, and the same offset in their box on both sides.
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
            needs.order[self.need][box],
            self.stays[box],
            start,
            shape,
            source_start,
            target_start,
        )
        return transfers, box, self.start, self.shape, first
