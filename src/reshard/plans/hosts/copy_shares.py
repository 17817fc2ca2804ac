"""Shares of the copies of flows: which ranks send the first copies of bytes, and which the others.

Each receiver of a flow needs a copy. The senders send the first one; the others may come from
receivers that have theirs::

    direct       sender ----> a, b, c         the senders send 3 copies
    forwarded    sender ----> a ----> b, c    the senders send 1 copy, a receiver 2

Flows whose copies the same ranks may send are one *class*, and the ranks of a class divide its
bytes. There are two kinds of classes, for first copies and for the others.

1. To another host only first copies are sent, and its receivers forward them.
2. Within a host the senders can send all copies themselves, which takes one stage. They do so
   unless forwarding takes at least one part in `_WORTHWHILE` off the largest load of the job.
   Then receivers share in sending the other copies, where senders are overloaded, or everywhere
   if that is not enough.
3. Contributions that are reduced come directly.
4. In both cases the shares of all classes are computed together (`shares`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.layout_change import LayoutChange
from reshard.plans.hosts.flows import Flows
from reshard.plans.senders.shares import balanced_shares
from reshard.runs import IntArray

BoolArray = NDArray[np.bool_]

# 1.05 times the least is as good as the least.
_WORTHWHILE = 21

# Only senders make copies; senders on the host; senders elsewhere.
_DIRECT, _NEAR, _FAR = range(3)


@dataclass(frozen=True, slots=True, eq=False)
class CopyClasses:
    """The classes of the flows of some plans, numbered by their first flows.

    `first[p]` has the class of first copies of each flow of plan `p`, and `others[p]` that of
    the other copies, -1 where only the senders may make them. The ranks of the classes are
    `senders` and `other_senders`; of a flow from its own host, its senders come before its
    receivers there. A byte of first class `c` goes to `receivers[c]` ranks, where that is one
    number for all its flows, and one of other class `c` is forwarded to `others_receivers[c]`.
    """

    first: list[IntArray]
    others: list[IntArray]
    senders: list[IntArray]
    receivers: IntArray
    nature: IntArray
    other_senders: list[IntArray]
    others_receivers: IntArray


def find_copy_classes(plans: list[LayoutChange], flows: list[Flows]) -> CopyClasses:
    """The classes of the flows of some plans."""
    sending: dict[tuple[bytes, int, int], int] = {}
    forwarding: dict[tuple[bytes, bytes], int] = {}
    senders: list[IntArray] = []
    other_senders: list[IntArray] = []
    first, others = [], []
    for plan, flow in zip(plans, flows, strict=True):
        sender = plan.source.cell_slot[flow.sender]
        receiver = plan.target.cell_slot[flow.receiver]
        is_one = flow.receivers == 1
        nature = np.where(~flow.is_alone | is_one, _DIRECT, np.where(flow.is_inner, _NEAR, _FAR))
        begins = (flow.sender_begin, flow.receiver_begin)
        edges = [edge for begin in begins for edge in (begin[:-1], begin[1:])]
        columns = (column.tolist() for column in (*edges, nature))
        both = np.full((2, len(flow)), -1, dtype=np.int64)
        for i, (a, b, c, d, kind) in enumerate(zip(*columns, strict=True)):
            # Equal lists of ranks have equal bytes. A far flow crosses once, so the number of its
            # receivers is no part of its class.
            key = (sender[a:b].tobytes(), kind, 1 if kind == _FAR else d - c)
            both[0, i] = sending.setdefault(key, len(sending))
            if len(sending) > len(senders):
                senders.append(sender[a:b])
            if kind == _DIRECT:
                continue
            near = sender[a:b] if kind == _NEAR else sender[:0]
            pair = (near.tobytes(), receiver[c:d].tobytes())
            both[1, i] = forwarding.setdefault(pair, len(forwarding))
            if len(forwarding) > len(other_senders):
                other_senders.append(np.concatenate((near, receiver[c:d])))
        first.append(both[0])
        others.append(both[1])
    word = np.dtype(np.int64).itemsize
    return CopyClasses(
        first,
        others,
        senders,
        np.array([count for _, _, count in sending], dtype=np.int64),
        np.array([kind for _, kind, _ in sending], dtype=np.int64),
        other_senders,
        np.array([len(receivers) // word - 1 for _, receivers in forwarding], dtype=np.int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class ClassShares:
    """The ranks `rank[begin[c]:begin[c + 1]]` divide the bytes of class `c` in these shares."""

    begin: IntArray
    rank: IntArray
    share: IntArray

    @property
    def counts(self) -> IntArray:
        """How many ranks have a share in each class."""
        return np.diff(self.begin)


@dataclass(frozen=True, slots=True, eq=False)
class CopyAssignment:
    """The shares of ranks in the first copies, and in the others where a class `is_relayed`."""

    is_relayed: BoolArray
    first: ClassShares
    others: ClassShares

    def loads(self, ranks: int) -> IntArray:
        """Bytes each of `ranks` ranks sends."""
        total = np.zeros(ranks, dtype=np.int64)
        for shares in (self.first, self.others):
            np.add.at(total, shares.rank, shares.share)
        return total


@dataclass(frozen=True, slots=True, eq=False)
class ClassSizes:
    """Bytes of classes, as columns: `size` of those of both classes `first` and `others`.

    `unit` has the bytes of the widest element of each.
    """

    first: IntArray
    others: IntArray
    size: IntArray
    unit: IntArray


def assign_copies(classes: CopyClasses, sizes: ClassSizes, ranks: int) -> CopyAssignment:
    """The shares of `ranks` ranks in the copies of some classes."""
    far, near = classes.nature == _FAR, classes.nature == _NEAR
    direct = _share_copies(classes, sizes, far)
    if not near.any():
        return direct
    relayed = _share_copies(classes, sizes, far | near)
    # In the order of preference: nothing is relayed within hosts, then only where senders are
    # overloaded, then everywhere.
    enough = int(relayed.loads(ranks).max()) * _WORTHWHILE // (_WORTHWHILE - 1)
    load = direct.loads(ranks)
    if load.max() <= enough:
        return direct
    overloaded = np.array([bool((load[some] > enough).any()) for some in classes.senders])
    some = _share_copies(classes, sizes, far | (near & overloaded))
    return some if some.loads(ranks).max() <= enough else relayed


def _share_copies(classes: CopyClasses, sizes: ClassSizes, is_relayed: BoolArray) -> CopyAssignment:
    """The shares with the smallest maximum load, if other copies are forwarded in some classes."""
    first, others = len(classes.senders), len(classes.other_senders)
    demand = np.zeros(first + others, dtype=np.int64)
    unit = np.ones(first + others, dtype=np.int64)
    # Bytes to send: one copy where the others are forwarded, else one for each receiver.
    times = np.where(is_relayed, 1, classes.receivers)
    np.add.at(demand, sizes.first, sizes.size * times[sizes.first])
    np.maximum.at(unit, sizes.first, sizes.unit * times[sizes.first])
    handed = is_relayed[sizes.first] & (sizes.others >= 0)
    number = sizes.others[handed]
    times = classes.others_receivers[number]
    np.add.at(demand, first + number, sizes.size[handed] * times)
    np.maximum.at(unit, first + number, sizes.unit[handed] * times)
    sets = classes.senders + classes.other_senders
    begin = np.cumsum([0, *(len(ranks) for ranks in sets)])
    rank = np.concatenate([*sets, np.zeros(0, dtype=np.int64)])
    share = balanced_shares(demand, begin, rank, unit)
    middle = int(begin[first])
    return CopyAssignment(
        is_relayed,
        ClassShares(begin[: first + 1], rank[:middle], share[:middle]),
        ClassShares(begin[first:] - middle, rank[middle:], share[middle:]),
    )
