"""Where on one line of bytes does everything lie that a job moves, and who sends which stretch?

All bytes that move are laid end to end, in an order that every rank knows, and the line is cut
among the senders. Then a rank finds who sends a byte by its position alone, and nobody lists
what the others do::

    class     |  held by ranks 0 and 1              |  held by 2 and 3
    receiver  |    4     |    5     |    6    |  7  |    4     |    5 ...
    tensor    | a | b |c | a | b |c | a |b |c | a..
    sender    |---------- 0 -------------|---- 1 ---|----- 2 -------...

1. Tensors of one plan and dtype are a *bundle*. Its needs are found once.
2. Ranks that belong to the same holder sets and want the same target keys are of one *kind*.
3. A *row* is a need of a bundle and a kind of ranks that want it. Where the kind holds it, it
   stays. Otherwise it is a demand on the *class* of its holders.
4. The order of the line: class, kind, receiver, bundle, tensor, need, box, element. What one
   receiver lacks of one class lies together, so a sender serves few receivers, and all
   receivers at the same time whichever tensors are moved first. Every position is a sum of
   products, so nothing is listed that grows with ranks times tensors.
5. Shares are balanced over the classes once for the whole job (`shares`), and lie on the line
   in the order of class, kind and rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.dtypes import DType
from reshard.geometry.demand import Needs
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.replicas import find_in
from reshard.plans.senders.rank_classes import Membership, membership
from reshard.plans.senders.shares import group_shares, member_shares
from reshard.runs import IntArray, distinct, ragged_arange

# What rounding cuts to whole boxes and rows may add to the largest load.
_ROUNDING = 64


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """The tensors of one plan and dtype: their numbers in the job, in order."""

    change: LayoutChange
    dtype: DType
    items: IntArray
    needs: Needs


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Needs with the kinds that want them, as columns of shape `(rows,)`, sorted by bundle.

    Receiver `i` of the kind begins to need it, of tensor `j` of the bundle, at position
    `begin + i * receiver_step + j * item_step` of the line; meaningless where it `stays`.
    """

    bundle: IntArray
    need: IntArray
    kind: IntArray
    size_bytes: IntArray
    holder_set: IntArray
    stays: NDArray[np.bool_]
    begin: IntArray
    receiver_step: IntArray
    item_step: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Classes with the kinds that lack them, in the order of the line: shape `(pairs,)`.

    The rows of pair `p` are `row[row_begin[p]:row_begin[p + 1]]`. Each of its receivers takes
    `receiver_bytes`; the first begins at `begin`, the last ends at `stop`.
    """

    kind: IntArray
    row_begin: IntArray
    row: IntArray
    receiver_bytes: IntArray
    begin: IntArray
    stop: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """The line of a job. Sender `i` of it is `sender[i]`, up to position `cut[i]`.

    Cuts are moved by up to `rounding_bytes` to where a box or a row of one ends.
    """

    bundles: tuple[Bundle, ...]
    kinds: Membership
    set_begin: IntArray
    set_slot: IntArray
    rows: Rows
    pairs: Pairs
    sender: IntArray
    cut: IntArray
    rounding_bytes: int


def find_line(bundles: Sequence[Bundle], slots: int) -> Line:
    """The line of some bundles over `slots` slots."""
    sets = _Sets()
    holder_set = [
        sets.add(b.needs.set_begin, b.needs.set_slot) + b.needs.holder_set for b in bundles
    ]
    target_set = [
        sets.add(b.needs.target_copies.begin, b.needs.target_copies.slot)
        + b.needs.of_keys.target_key
        for b in bundles
    ]
    kinds = membership(sets.begin, sets.slot, slots)
    counts = np.array([len(b.needs) for b in bundles], dtype=np.int64)
    columns = _Columns(
        np.repeat(np.arange(len(bundles)), counts),
        ragged_arange(counts),
        _joined([b.needs.of_keys.elements * b.dtype.itemsize_bytes for b in bundles]),
        _joined(holder_set),
    )
    # Every need with every kind of its target key's slots.
    wanted = _joined(target_set)
    low = kinds.set_begin[wanted]
    count = kinds.set_begin[wanted + 1] - low
    columns = columns.take(np.repeat(np.arange(len(wanted)), count))
    kind = kinds.set_group[np.repeat(low, count) + ragged_arange(count)]
    known = np.repeat(np.arange(len(kinds.set_begin) - 1), np.diff(kinds.set_begin))
    number = len(kinds.size)
    held = known * number + kinds.set_group
    _, stays = find_in(held, columns.holder_set * number + kind)
    classes = _Classes(kinds, columns.holder_set[~stays])
    items = np.array([len(b.items) for b in bundles], dtype=np.int64)
    rows, pairs, pair_class = _lay_out(columns, kind, stays, classes, items, kinds)
    demand = np.zeros(len(classes.begin) - 1, dtype=np.int64)
    np.add.at(demand, pair_class, pairs.stop - pairs.begin)
    grain = np.zeros(len(demand), dtype=np.int64)
    itemsize = np.array([b.dtype.itemsize_bytes for b in bundles], dtype=np.int64)
    np.gcd.at(grain, classes.of_row, itemsize[rows.bundle[~stays]])
    sender, cut, rounding = _cut(demand, classes, kinds, grain)
    return Line(tuple(bundles), kinds, sets.begin, sets.slot, rows, pairs, sender, cut, rounding)


class _Sets:
    """Sets of slots of all bundles. Most bundles have the sets of another."""

    def __init__(self) -> None:
        self._count = 0
        self._known: list[tuple[IntArray, IntArray]] = []
        self._alike: dict[tuple[int, ...], list[tuple[int, IntArray, IntArray]]] = {}

    def add(self, begin: IntArray, slot: IntArray) -> int:
        """The number that the first of these sets has among all."""
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
        return _joined([slot for _, slot in self._known])

    @property
    def begin(self) -> IntArray:
        """Where each set begins in `slot`: shape `(sets + 1,)`."""
        counts = _joined([np.diff(begin) for begin, _ in self._known])
        return np.append(0, np.cumsum(counts))


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    bundle: IntArray
    need: IntArray
    size_bytes: IntArray
    holder_set: IntArray

    def take(self, index: IntArray) -> _Columns:
        return _Columns(
            self.bundle[index], self.need[index], self.size_bytes[index], self.holder_set[index]
        )


class _Classes:
    """Holder sets of the same slots are one class; class `c` has the kinds
    `kind[begin[c]:begin[c + 1]]`. `of_row` has the class of each given set.
    """

    def __init__(self, kinds: Membership, holder_set: IntArray) -> None:
        used = distinct(holder_set)
        numbers: dict[bytes, int] = {}
        of_used = np.zeros(len(used), dtype=np.int64)
        for i, number in enumerate(used.tolist()):
            held = kinds.set_group[kinds.set_begin[number] : kinds.set_begin[number + 1]]
            of_used[i] = numbers.setdefault(held.tobytes(), len(numbers))
        members = [np.frombuffer(held, dtype=np.int64) for held in numbers]
        self.of_row: IntArray = of_used[np.searchsorted(used, holder_set)]
        self.kind = _joined(members)
        self.begin = np.cumsum([0, *(len(held) for held in members)])


def _lay_out(
    columns: _Columns,
    kind: IntArray,
    stays: NDArray[np.bool_],
    classes: _Classes,
    items: IntArray,
    kinds: Membership,
) -> tuple[Rows, Pairs, IntArray]:
    """The place of every row on the line, the pairs, and each pair's class."""
    moving = np.flatnonzero(~stays)
    code = classes.of_row * len(kinds.size) + kind[moving]
    # Rows are sorted by bundle and need already.
    order = np.argsort(code, kind="stable")
    code, row = code[order], moving[order]
    bundle, size = columns.bundle[row], columns.size_bytes[row]
    new_pair = np.diff(code, prepend=-1) != 0
    # A block is what one receiver of a pair lacks of one tensor of a bundle.
    new_block = new_pair | (np.diff(bundle, prepend=-1) != 0)
    block = np.cumsum(new_block) - 1
    block_first, pair_first = np.flatnonzero(new_block), np.flatnonzero(new_pair)
    total = np.append(0, np.cumsum(size))
    step = np.diff(total[np.append(block_first, len(row))])
    in_block = total[:-1] - total[block_first][block]
    block_total = np.append(0, np.cumsum(step * items[bundle[block_first]]))
    block_of_pair = block[pair_first]
    receiver_bytes = np.diff(block_total[np.append(block_of_pair, len(step))])
    pair = np.cumsum(new_pair) - 1
    pair_class, pair_kind = np.divmod(code[pair_first], max(len(kinds.size), 1))
    stop = np.cumsum(receiver_bytes * kinds.size[pair_kind])
    begin = stop - receiver_bytes * kinds.size[pair_kind]
    places = np.zeros((3, len(kind)), dtype=np.int64)
    places[0, row] = (begin - block_total[block_of_pair])[pair] + block_total[block] + in_block
    places[1, row] = receiver_bytes[pair]
    places[2, row] = step[block]
    rows = Rows(
        columns.bundle, columns.need, kind, columns.size_bytes, columns.holder_set, stays, *places
    )
    row_begin = np.append(pair_first, len(row))
    return rows, Pairs(pair_kind, row_begin, row, receiver_bytes, begin, stop), pair_class


def _cut(
    demand: IntArray, classes: _Classes, kinds: Membership, grain: IntArray
) -> tuple[IntArray, IntArray, int]:
    """The senders in the order of the line, where the stretch of each ends, and the rounding."""
    shares = group_shares(demand, classes.begin, classes.kind, kinds.size, grain)
    of_class = np.repeat(np.arange(len(demand)), np.diff(classes.begin))
    parts = member_shares(shares, classes.kind, kinds.size, grain[of_class])
    count = kinds.size[classes.kind]
    member = np.repeat(kinds.member_begin[classes.kind], count) + ragged_arange(count)
    sender = kinds.member[member]
    sends = parts > 0
    sender, parts = sender[sends], parts[sends]
    if not len(sender):
        return sender, parts, 0
    load = np.zeros(int(sender.max()) + 1, dtype=np.int64)
    np.add.at(load, sender, parts)
    # A sender's stretches are each rounded at both ends, by half of this.
    rounding = int(load.max()) // (_ROUNDING * int(np.bincount(sender).max()))
    return sender, np.cumsum(parts), rounding


def _joined(columns: list[IntArray]) -> IntArray:
    return np.concatenate(columns) if columns else np.zeros(0, dtype=np.int64)
