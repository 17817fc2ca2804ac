"""Which rows of a job one rank sends, and to whom: the policy of senders.

1. *Balanced* senders: those rows that lie on the rank's ranges of the byte line, which are divided
   so that the most loaded rank sends as little as possible (`sender_assignment`).
2. *Stable* senders: the holders of a need take turns (`replicas.replica_turns`). Further ranks
   behind the others change nothing of that, and what other tensors need does not either.
3. Any other policy is a row of `POLICIES`: a function that names one holder for each row and
   receiver, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from reshard.geometry.holders import replica_turns
from reshard.plans.senders.sender_assignment import SenderAssignment
from reshard.runs import IntArray, distinct, ragged_arange

FindSenders = Callable[[SenderAssignment, IntArray, IntArray], IntArray]
"""The rank that sends each row to each receiver, of those that hold it."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Rows with a receiver each, and which items of the tensor group: `first:stop`."""

    row: IntArray
    receiver: IntArray
    first: IntArray
    stop: IntArray

    def take(self, index: IntArray) -> Selection:
        """The chosen of the chosen, in the order asked for."""
        return Selection(self.row[index], self.receiver[index], self.first[index], self.stop[index])


def select_all_items(assignment: SenderAssignment, row: IntArray, receiver: IntArray) -> Selection:
    """Rows and receivers with all items of their tensor groups."""
    items = np.array(
        [len(tensor_group.items) for tensor_group in assignment.tensor_groups], dtype=np.int64
    )
    return Selection(
        row, receiver, np.zeros(len(row), dtype=np.int64), items[assignment.rows.tensor_group[row]]
    )


def select_sent(assignment: SenderAssignment, rank: int) -> Selection:
    """The rows and receivers that a sender's stretches touch."""
    ranges, rows = assignment.ranges, assignment.rows
    mine = np.flatnonzero(assignment.sender == rank)
    stop = assignment.cut[mine]
    begin = np.where(mine > 0, assignment.cut[mine - 1], 0)
    # Every stretch with every range it reaches, then with every receiver of that.
    low = np.searchsorted(ranges.stop, begin, side="right")
    count = np.searchsorted(ranges.begin, stop, side="left") - low
    number = np.repeat(low, count) + ragged_arange(count)
    begin, stop = np.repeat(begin, count), np.repeat(stop, count)
    each = ranges.receiver_bytes[number]
    low = np.maximum(begin - ranges.begin[number], 0) // each
    # Rounded up: the last receiver that the stretch reaches.
    count = np.minimum(
        -((ranges.begin[number] - stop) // each),
        assignment.rank_groups.size[ranges.rank_group[number]],
    )
    count -= low
    receiver = np.repeat(low, count) + ragged_arange(count)
    number, begin, stop = (np.repeat(column, count) for column in (number, begin, stop))
    # And with every row, of as many tensors as lie in the stretch.
    count = ranges.row_begin[number + 1] - ranges.row_begin[number]
    row = ranges.row[np.repeat(ranges.row_begin[number], count) + ragged_arange(count)]
    receiver, begin, stop = (np.repeat(column, count) for column in (receiver, begin, stop))
    chosen = select_all_items(assignment, row, receiver)
    place = rows.begin[row] + receiver * rows.receiver_step[row]
    step = rows.item_step[row]
    # Tensor `j` lies at `place + j * step`: those whose bytes meet the stretch.
    first = np.maximum((begin - place - rows.size_bytes[row]) // step + 1, 0)
    last = np.minimum(-((place - stop) // step), chosen.stop)
    some = np.flatnonzero(first < last)
    return Selection(row, receiver, first, last).take(some)


def select_found(assignment: SenderAssignment, rank: int, find_senders: FindSenders) -> Selection:
    """The rows and receivers that `rank` sends as a policy finds it."""
    rows = assignment.rows
    # Only rows that the rank holds can be its own; whose they are is asked of the policy.
    holds = np.zeros(len(assignment.set_begin) - 1, dtype=bool)
    of_set = np.repeat(np.arange(len(holds)), np.diff(assignment.set_begin))
    holds[of_set[assignment.set_slot == rank]] = True
    row = np.flatnonzero(holds[rows.holder_set] & ~rows.stays)
    count = assignment.rank_groups.size[rows.rank_group[row]]
    row, receiver = np.repeat(row, count), ragged_arange(count)
    mine = np.flatnonzero(find_senders(assignment, row, receiver) == rank)
    return select_all_items(assignment, row[mine], receiver[mine])


def find_turns(assignment: SenderAssignment, row: IntArray, receiver: IntArray) -> IntArray:
    """The holder whose turn it is, for each row and receiver."""
    rows = assignment.rows
    slot = assignment.rank_groups.member[
        assignment.rank_groups.member_begin[rows.rank_group[row]] + receiver
    ]
    turn = np.zeros(len(row), dtype=np.int64)
    for number in distinct(rows.tensor_group[row]).tolist():
        of_group = np.flatnonzero(rows.tensor_group[row] == number)
        needs = assignment.tensor_groups[number].needs
        key = needs.of_keys.target_key[rows.need[row[of_group]]]
        cell = needs.target_copies.cell_on_slot(key, slot[of_group])
        turn[of_group] = replica_turns(needs.target.placement)[cell]
    holders = rows.holder_set[row]
    begin = assignment.set_begin[holders]
    return assignment.set_slot[begin + turn % (assignment.set_begin[holders + 1] - begin)]


# By the name that is a job's `sources`. Balanced senders are found on the byte line, not by rows.
POLICIES: dict[str, FindSenders | None] = {"balanced": None, "stable": find_turns}
