"""Which rows of a job does one rank send, and to whom?

With balanced senders, those that lie on its stretches of the line. With stable senders there
is no line: the holders of a need take turns (`copies.turns`). Further ranks behind the others
change nothing of that, and what other tensors need does not either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.geometry.replicas import turns
from reshard.plans.senders.byte_line import Line
from reshard.runs import IntArray, distinct, ragged_arange


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Rows with a receiver each, and which items of the bundle: `first:stop`."""

    row: IntArray
    receiver: IntArray
    first: IntArray
    stop: IntArray

    def take(self, index: IntArray) -> Chosen:
        """The chosen of the chosen, in the order asked for."""
        return Chosen(self.row[index], self.receiver[index], self.first[index], self.stop[index])


def every_item(line: Line, row: IntArray, receiver: IntArray) -> Chosen:
    """Rows and receivers with all items of their bundles."""
    items = np.array([len(bundle.items) for bundle in line.bundles], dtype=np.int64)
    return Chosen(row, receiver, np.zeros(len(row), dtype=np.int64), items[line.rows.bundle[row]])


def stretches_of(line: Line, rank: int) -> Chosen:
    """The rows and receivers that a sender's stretches touch."""
    pairs, rows = line.pairs, line.rows
    mine = np.flatnonzero(line.sender == rank)
    stop = line.cut[mine]
    begin = np.where(mine > 0, line.cut[mine - 1], 0)
    # Every stretch with every pair it reaches, then with every receiver of that.
    low = np.searchsorted(pairs.stop, begin, side="right")
    count = np.searchsorted(pairs.begin, stop, side="left") - low
    pair = np.repeat(low, count) + ragged_arange(count)
    begin, stop = np.repeat(begin, count), np.repeat(stop, count)
    each = pairs.receiver_bytes[pair]
    low = np.maximum(begin - pairs.begin[pair], 0) // each
    count = np.minimum(-((pairs.begin[pair] - stop) // each), line.kinds.size[pairs.kind[pair]])
    count -= low
    receiver = np.repeat(low, count) + ragged_arange(count)
    pair, begin, stop = (np.repeat(column, count) for column in (pair, begin, stop))
    # And with every row, of as many tensors as lie in the stretch.
    count = pairs.row_begin[pair + 1] - pairs.row_begin[pair]
    row = pairs.row[np.repeat(pairs.row_begin[pair], count) + ragged_arange(count)]
    receiver, begin, stop = (np.repeat(column, count) for column in (receiver, begin, stop))
    chosen = every_item(line, row, receiver)
    place = rows.begin[row] + receiver * rows.receiver_step[row]
    step = rows.item_step[row]
    first = np.maximum((begin - place - rows.size_bytes[row]) // step + 1, 0)
    last = np.minimum(-((place - stop) // step), chosen.stop)
    some = np.flatnonzero(first < last)
    return Chosen(row, receiver, first, last).take(some)


def turns_of(line: Line, rank: int) -> Chosen:
    """The rows and receivers whose turn it is to be sent by `rank`."""
    rows = line.rows
    holds = np.zeros(len(line.set_begin) - 1, dtype=bool)
    of_set = np.repeat(np.arange(len(holds)), np.diff(line.set_begin))
    holds[of_set[line.set_slot == rank]] = True
    row = np.flatnonzero(holds[rows.holder_set] & ~rows.stays)
    count = line.kinds.size[rows.kind[row]]
    row, receiver = np.repeat(row, count), ragged_arange(count)
    mine = np.flatnonzero(turn_of(line, row, receiver) == rank)
    return every_item(line, row[mine], receiver[mine])


def turn_of(line: Line, row: IntArray, receiver: IntArray) -> IntArray:
    """The holder whose turn it is, for each row and receiver."""
    rows = line.rows
    slot = line.kinds.member[line.kinds.member_begin[rows.kind[row]] + receiver]
    turn = np.zeros(len(row), dtype=np.int64)
    for number in distinct(rows.bundle[row]).tolist():
        of_bundle = np.flatnonzero(rows.bundle[row] == number)
        needs = line.bundles[number].needs
        key = needs.of_keys.target_key[rows.need[row[of_bundle]]]
        cell = needs.target_copies.cell_on_slot(key, slot[of_bundle])
        turn[of_bundle] = turns(needs.target.placement)[cell]
    holders = rows.holder_set[row]
    begin = line.set_begin[holders]
    return line.set_slot[begin + turn % (line.set_begin[holders + 1] - begin)]
