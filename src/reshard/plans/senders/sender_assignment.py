"""Senders of a job: all moved bytes in one order, divided among the ranks that hold them.

All bytes that move are put in one sequence, the byte line, in an order that every rank knows, and
the line is divided among the senders. A rank then finds the sender of a byte from its position
alone, without a list of what other ranks do::

    class     |  held by ranks 0 and 1              |  held by 2 and 3
    receiver  |    4     |    5     |    6    |  7  |    4     |    5 ...
    tensor    | a | b |c | a | b |c | a |b |c | a..
    sender    |---------- 0 -------------|---- 1 ---|----- 2 -------...

1. Tensors of one change of layouts and one dtype are a *tensor group*. Its needs are found once.
2. Ranks that belong to the same holder sets and need the same target keys are a *rank group*.
3. A *row* is a need of a tensor group and of a rank group. If the rank group holds the elements,
   they stay. Otherwise they are a demand on the *class* of their holders.
4. The order of the line: class, rank group, receiver, tensor group, tensor, need, box, element.
   The bytes of one class that a receiver lacks are adjacent, so a sender serves few receivers,
   and all senders are busy whichever tensors are moved first. Every position is a sum of
   products, so no list grows with the number of ranks times that of tensors.
5. Shares are balanced over the classes once for the whole job (`shares`). On the line they are
   in the order of class, rank group and rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.dtypes import DType
from reshard.geometry.holders import find_in
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.routes import Needs
from reshard.plans.senders.rank_groups import RankGroups, group_ranks
from reshard.plans.senders.shares import group_shares, member_shares
from reshard.runs import IntArray, distinct, ragged_arange

# What rounding cuts to whole boxes and rows may add to the largest load.
_ROUNDING = 64


@dataclass(frozen=True, slots=True, eq=False)
class TensorGroup:
    """The tensors of one change of layouts and one dtype; `items` are their numbers in the job."""

    change: LayoutChange
    dtype: DType
    items: IntArray
    needs: Needs


@dataclass(frozen=True, slots=True, eq=False)
class DemandRows:
    """Needs with the rank groups that want them, as columns of shape `(rows,)`.

    They are sorted by tensor group.

    Receiver `i` of the rank group begins to need it, of tensor `j` of the tensor group, at position
    `begin + i * receiver_step + j * item_step` of the line; meaningless where it `stays`.
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


@dataclass(frozen=True, slots=True, eq=False)
class DemandRanges:
    """Classes with the rank groups that lack them: shape `(ranges,)`, in the order of the line.

    The rows of range `p` are `row[row_begin[p]:row_begin[p + 1]]`. Each of its receivers takes
    `receiver_bytes`; the first begins at `begin`, the last ends at `stop`.
    """

    rank_group: IntArray
    row_begin: IntArray
    row: IntArray
    receiver_bytes: IntArray
    begin: IntArray
    stop: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class SenderAssignment:
    """The byte line of a job and its senders: number `i` is rank `sender[i]`, up to `cut[i]`.

    Cuts are moved by up to `rounding_bytes` to where a box or a row of one ends.
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
    """The senders of what some tensor groups move between `slots` ranks."""
    # Steps 1 and 2: the sets of slots that hold or want something, and the groups of ranks that
    # belong to the same of them.
    sets = _HolderSets()
    holder_set = [
        sets.add(b.needs.set_begin, b.needs.set_slot) + b.needs.holder_set for b in tensor_groups
    ]
    target_set = [
        sets.add(b.needs.target_copies.begin, b.needs.target_copies.slot)
        + b.needs.of_keys.target_key
        for b in tensor_groups
    ]
    rank_groups = group_ranks(sets.begin, sets.slot, slots)
    counts = np.array([len(b.needs) for b in tensor_groups], dtype=np.int64)
    columns = _NeedColumns(
        np.repeat(np.arange(len(tensor_groups)), counts),
        ragged_arange(counts),
        _concatenate([b.needs.of_keys.elements * b.dtype.itemsize_bytes for b in tensor_groups]),
        _concatenate(holder_set),
    )
    # Step 3: every need with every rank group of its target key's slots.
    wanted = _concatenate(target_set)
    low = rank_groups.set_begin[wanted]
    count = rank_groups.set_begin[wanted + 1] - low
    columns = columns.take(np.repeat(np.arange(len(wanted)), count))
    rank_group = rank_groups.set_group[np.repeat(low, count) + ragged_arange(count)]
    # A row stays where its rank group is in the set of its holders: pairs of a set and a rank
    # group are looked up as single numbers.
    known = np.repeat(np.arange(len(rank_groups.set_begin) - 1), np.diff(rank_groups.set_begin))
    number = len(rank_groups.size)
    held = known * number + rank_groups.set_group
    _, stays = find_in(held, columns.holder_set * number + rank_group)
    classes = _HolderClasses(rank_groups, columns.holder_set[~stays])
    items = np.array([len(b.items) for b in tensor_groups], dtype=np.int64)
    rows, ranges, range_class = _order_demand(
        columns, rank_group, stays, classes, items, rank_groups
    )
    # Step 5: the bytes of each class, to be divided in units of whole elements. A class of several
    # dtypes has the greatest unit that divides all of them.
    demand = np.zeros(len(classes.begin) - 1, dtype=np.int64)
    np.add.at(demand, range_class, ranges.stop - ranges.begin)
    unit = np.zeros(len(demand), dtype=np.int64)
    itemsize = np.array([b.dtype.itemsize_bytes for b in tensor_groups], dtype=np.int64)
    np.gcd.at(unit, classes.of_row, itemsize[rows.tensor_group[~stays]])
    sender, cut, rounding = _divide(demand, classes, rank_groups, unit)
    return SenderAssignment(
        tuple(tensor_groups),
        rank_groups,
        sets.begin,
        sets.slot,
        rows,
        ranges,
        sender,
        cut,
        rounding,
    )


class _HolderSets:
    """Sets of slots of all tensor groups. Most tensor groups have the sets of another."""

    def __init__(self) -> None:
        self._count = 0
        self._known: list[tuple[IntArray, IntArray]] = []
        self._alike: dict[tuple[int, ...], list[tuple[int, IntArray, IntArray]]] = {}

    def add(self, begin: IntArray, slot: IntArray) -> int:
        """The number that the first of these sets has among all."""
        # Only sets of the same lengths and ends are compared in full.
        ends = (int(slot[0]), int(slot[-1])) if len(slot) else ()
        alike = self._alike.setdefault((len(begin), len(slot), *ends), [])
        for number, *known in alike:
            if np.array_equal(known[1], slot) and np.array_equal(known[0], begin):
                return number
        number = self._count
        alike.append((number, begin, slot))
        self._known.append((begin, slot))
        self._count += len(begin) - 1
        return number

    @property
    def slot(self) -> IntArray:
        """The slots of all sets, end to end."""
        return _concatenate([slot for _, slot in self._known])

    @property
    def begin(self) -> IntArray:
        """Where each set begins in `slot`: shape `(sets + 1,)`."""
        counts = _concatenate([np.diff(begin) for begin, _ in self._known])
        return np.append(0, np.cumsum(counts))


@dataclass(frozen=True, slots=True, eq=False)
class _NeedColumns:
    tensor_group: IntArray
    need: IntArray
    size_bytes: IntArray
    holder_set: IntArray

    def take(self, index: IntArray) -> _NeedColumns:
        return _NeedColumns(
            self.tensor_group[index],
            self.need[index],
            self.size_bytes[index],
            self.holder_set[index],
        )


class _HolderClasses:
    """Holder sets of the same slots are one class; class `c` has the rank groups
    `rank_group[begin[c]:begin[c + 1]]`. `of_row` has the class of each given set.
    """

    def __init__(self, rank_groups: RankGroups, holder_set: IntArray) -> None:
        used = distinct(holder_set)
        numbers: dict[bytes, int] = {}
        of_used = np.zeros(len(used), dtype=np.int64)
        for i, number in enumerate(used.tolist()):
            held = rank_groups.set_group[
                rank_groups.set_begin[number] : rank_groups.set_begin[number + 1]
            ]
            of_used[i] = numbers.setdefault(held.tobytes(), len(numbers))
        members = [np.frombuffer(held, dtype=np.int64) for held in numbers]
        self.of_row: IntArray = of_used[np.searchsorted(used, holder_set)]
        self.rank_group = _concatenate(members)
        self.begin = np.cumsum([0, *(len(held) for held in members)])


def _order_demand(
    columns: _NeedColumns,
    rank_group: IntArray,
    stays: NDArray[np.bool_],
    classes: _HolderClasses,
    items: IntArray,
    rank_groups: RankGroups,
) -> tuple[DemandRows, DemandRanges, IntArray]:
    """The place of every row on the line, the ranges, and the class of each range."""
    moving = np.flatnonzero(~stays)
    code = classes.of_row * len(rank_groups.size) + rank_group[moving]
    # Rows are sorted by tensor group and need already, and the sort is stable.
    order = np.argsort(code, kind="stable")
    code, row = code[order], moving[order]
    tensor_group, size = columns.tensor_group[row], columns.size_bytes[row]
    new_range = np.diff(code, prepend=-1) != 0
    # A block is what one receiver of a range lacks of one tensor of a tensor group.
    new_block = new_range | (np.diff(tensor_group, prepend=-1) != 0)
    block = np.cumsum(new_block) - 1
    block_first, range_first = np.flatnonzero(new_block), np.flatnonzero(new_range)
    # Prefix sums over the sorted rows: bytes of a block (`step`), where a row begins in its block,
    # and where a block begins among all, repeated for each tensor of its group.
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
    # The columns `begin`, `receiver_step` and `item_step` of `DemandRows`.
    places = np.zeros((3, len(rank_group)), dtype=np.int64)
    places[0, row] = (begin - block_total[block_of_range])[number] + block_total[block] + in_block
    places[1, row] = receiver_bytes[number]
    places[2, row] = step[block]
    rows = DemandRows(
        columns.tensor_group,
        columns.need,
        rank_group,
        columns.size_bytes,
        columns.holder_set,
        stays,
        *places,
    )
    row_begin = np.append(range_first, len(row))
    return (
        rows,
        DemandRanges(range_rank_group, row_begin, row, receiver_bytes, begin, stop),
        range_class,
    )


def _divide(
    demand: IntArray, classes: _HolderClasses, rank_groups: RankGroups, unit: IntArray
) -> tuple[IntArray, IntArray, int]:
    """The senders in the order of the line, where the stretch of each ends, and the rounding."""
    shares = group_shares(demand, classes.begin, classes.rank_group, rank_groups.size, unit)
    of_class = np.repeat(np.arange(len(demand)), np.diff(classes.begin))
    parts = member_shares(shares, classes.rank_group, rank_groups.size, unit[of_class])
    count = rank_groups.size[classes.rank_group]
    member = np.repeat(rank_groups.member_begin[classes.rank_group], count) + ragged_arange(count)
    sender = rank_groups.member[member]
    sends = parts > 0
    sender, parts = sender[sends], parts[sends]
    if not len(sender):
        return sender, parts, 0
    load = np.zeros(int(sender.max()) + 1, dtype=np.int64)
    np.add.at(load, sender, parts)
    # A sender's stretches are each rounded at both ends, by half of this.
    rounding = int(load.max()) // (_ROUNDING * int(np.bincount(sender).max()))
    return sender, np.cumsum(parts), rounding


def _concatenate(columns: list[IntArray]) -> IntArray:
    return np.concatenate(columns) if columns else np.zeros(0, dtype=np.int64)
