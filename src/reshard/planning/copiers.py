"""Who makes the first copy of each byte, and who the others, so that nobody sends too much?

Flows that the same ranks may send, to the same receivers, are one *class*. Each receiver needs a
copy. The first comes from the senders; the others may come from receivers that have theirs::

    direct    sender ----> a, b, c         3 copies are work for the senders
    handed on sender ----> a ----> b, c    1 for the senders, 2 for the receivers

1. Into another host only first copies go, and its receivers make the others.
2. Within a host the senders can make all copies themselves, which takes one stage. So they do,
   unless handing on takes at least a part in `_WORTHWHILE` off the largest load of the job;
   then senders and receivers share in making the other copies, in the classes of overloaded
   senders, or if that is not enough in all.
3. Contributions that are combined come directly.
4. Either way the shares of all classes are found together (`shares`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.planning.flows import Flows
from reshard.planning.plan import Plan
from reshard.planning.shares import balanced_shares
from reshard.runs import IntArray, ragged_arange

BoolArray = NDArray[np.bool_]

# 1.05 times the least is as good as the least.
_WORTHWHILE = 21

# Only senders make copies; senders on the host; senders elsewhere.
DIRECT, NEAR, FAR = range(3)


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """Classes in the order of their first flows.

    `flow_class[p]` has the class of each flow of plan `p`. Class `c` has the ranks `senders[c]`
    and `receivers[c]`; where its flows have one receiver each, these may differ, and are left
    out. `nature[c]` is `DIRECT`, `NEAR` or `FAR`.
    """

    flow_class: list[IntArray]
    senders: list[IntArray]
    receivers: list[IntArray]
    nature: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """The ranks `rank[begin[c]:begin[c + 1]]` divide the bytes of class `c` in these shares."""

    begin: IntArray
    rank: IntArray
    share: IntArray

    @property
    def counts(self) -> IntArray:
        """How many ranks have a share in each class."""
        return np.diff(self.begin)

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
class Copying:
    """Who makes the first copies of each class, and the others where `is_relayed`.

    In making the others of a `NEAR` class, its senders come before its receivers.
    """

    is_relayed: BoolArray
    first: Shares
    others: Shares

    def loads(self, ranks: int) -> IntArray:
        """Bytes each of `ranks` ranks sends."""
        total = np.zeros(ranks, dtype=np.int64)
        for shares in (self.first, self.others):
            np.add.at(total, shares.rank, shares.share)
        return total


def find_classes(plans: list[Plan], flows: list[Flows]) -> Classes:
    """The classes of the flows of some plans."""
    number: dict[tuple[bytes, bytes, int], int] = {}
    senders: list[IntArray] = []
    receivers: list[IntArray] = []
    found = []
    for plan, flow in zip(plans, flows, strict=True):
        sender = plan.source.cell_slot[flow.sender]
        receiver = plan.target.cell_slot[flow.receiver]
        is_one = np.diff(flow.receiver_begin) == 1
        nature = np.where(~flow.is_alone | is_one, DIRECT, np.where(flow.is_inner, NEAR, FAR))
        columns = (
            *(
                edges
                for begin in (flow.sender_begin, flow.receiver_begin)
                for edges in (begin[:-1], begin[1:])
            ),
            flow.host,
            nature,
        )
        classes = np.empty(len(flow), dtype=np.int64)
        for i, (a, b, c, d, host, kind) in enumerate(zip(*columns, strict=True)):
            to = receiver[c:d].tobytes() if d - c > 1 else b"%d" % host
            key = (sender[a:b].tobytes(), to, kind)
            if key not in number:
                number[key] = len(number)
                senders.append(sender[a:b])
                receivers.append(receiver[c:d] if d - c > 1 else receiver[:0])
            classes[i] = number[key]
        found.append(classes)
    natures = np.array([kind for _, _, kind in number], dtype=np.int64)
    return Classes(found, senders, receivers, natures)


def find_copying(
    classes: Classes, size_bytes: IntArray, grain_bytes: IntArray, ranks: int
) -> Copying:
    """Who makes which part of the copies of classes of `size_bytes`, between `ranks` ranks.

    Shares are whole elements of `grain_bytes`, one number a class.
    """
    far, near = classes.nature == FAR, classes.nature == NEAR
    direct = _shared(classes, size_bytes, grain_bytes, far)
    if not near.any():
        return direct
    relayed = _shared(classes, size_bytes, grain_bytes, far | near)
    enough = int(relayed.loads(ranks).max()) * _WORTHWHILE // (_WORTHWHILE - 1)
    load = direct.loads(ranks)
    if load.max() <= enough:
        return direct
    overloaded = np.array([bool((load[some] > enough).any()) for some in classes.senders])
    some = _shared(classes, size_bytes, grain_bytes, far | (near & overloaded))
    return some if some.loads(ranks).max() <= enough else relayed


def _shared(
    classes: Classes, size_bytes: IntArray, grain_bytes: IntArray, is_relayed: BoolArray
) -> Copying:
    """The least largest load, where the other copies of some classes are handed on."""
    copies = np.array([max(len(ranks), 1) for ranks in classes.receivers], dtype=np.int64)
    copiers = []
    for number, receivers in enumerate(classes.receivers):
        if not is_relayed[number]:
            copiers.append(receivers[:0])
        elif classes.nature[number] == NEAR:
            copiers.append(np.concatenate((classes.senders[number], receivers)))
        else:
            copiers.append(receivers)
    sets = classes.senders + copiers
    begin = np.cumsum([0, *(len(ranks) for ranks in sets)])
    rank = np.concatenate([*sets, np.zeros(0, dtype=np.int64)])
    # How often those who make first copies send each byte, and those who make the others.
    times = np.concatenate((np.where(is_relayed, 1, copies), np.where(is_relayed, copies - 1, 0)))
    grain = np.tile(grain_bytes, 2) * np.maximum(times, 1)
    share = balanced_shares(np.tile(size_bytes, 2) * times, begin, rank, grain)
    count = len(classes.senders)
    middle = int(begin[count])
    return Copying(
        is_relayed,
        Shares(begin[: count + 1], rank[:middle], share[:middle]),
        Shares(begin[count:] - middle, rank[middle:], share[middle:]),
    )


def _part_of(length: IntArray, part: IntArray, whole: IntArray) -> IntArray:
    """`length * part / whole`, rounded down; all at least 0, `part` at most `whole`."""
    # What would outgrow 62 bits is divided by a power of two first.
    bits = np.frexp(length.astype(np.float64))[1] + np.frexp(whole.astype(np.float64))[1]
    shift = np.maximum(bits.astype(np.int64) - 62, 0)
    scaled: IntArray = length * (part >> shift) // np.maximum(whole >> shift, 1)
    return scaled
