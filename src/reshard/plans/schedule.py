"""Messages of an exchange between ranks: their sizes, what travels in each, and their order.

Both ends of a message find the same, from what both know of a plan, so nothing but elements is
sent. How large messages are follows from the limit of memory (`limit_message_bytes`).

1. The pieces between two ranks are taken in the order of their place in the tensor
   (`order_transfers`).
2. Small pieces are packed together, each at an aligned place; one larger than a message is cut
   into messages of its own (`group_pieces`).
3. All messages of an exchange have one order, which both ends of each know (`order_message`):
   contributions by their order of combination, then the first few of all pairs before the next of
   any, then those to the next rank before those to the one behind it. Ranks that treat theirs in
   this order, with room for one at least, never wait for each other in a ring.
4. Where the contributions to every region are cut alike (`are_cut_alike`), all of a region may
   travel before the next region does, so that it is combined while it is in a cache::

       order of messages    region 0 of ranks 1, 2, 3 | region 1 of ranks 1, 2, 3 | ...

5. What needs memory beside its messages waits in batches, one after another in the same memory
   (`fill_batches`).

Pipelines of stages: parts of a tensor are forwarded while the next ones arrive.

A staged transfer is divided into parts, each of which goes through the stages one step after the
previous part. So data moves between hosts and within hosts at the same time::

    step          0           1           2           3
    exchange      part 0      part 1      part 2
    fan-out                   part 0      part 1      part 2

Every box is divided in the same way in each stage, so a part of a stage consists of elements that
the same part of earlier stages has delivered.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from reshard._validation import check_int
from reshard.cost.estimate import Estimate, Part
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.runs import IntArray

Bytes = TypeVar("Bytes", int, IntArray)

# Every piece in a packed message begins where any dtype may.
ALIGNMENT_BYTES = 16
# The most bytes of a message. Smaller ones would be in a nearer cache when they are sent or
# unpacked, but gloo takes about 0.1 ms of processor time for each.
MESSAGE_BYTES = 1 << 22
# The same between ranks that share memory: what is packed is mostly in a cache when it is unpacked.
NEAR_MESSAGE_BYTES = 1 << 21
# Pieces as large as this are not worth packing with others.
LARGE_PIECE_BYTES = 1 << 18
# The fewest messages that have to fit in a limit: two in each direction.
_LEAST_MESSAGES = 4
# Each message takes about 0.1 ms, whatever its bytes. Smaller ones than these are refused where
# they would be more than so many.
SMALL_MESSAGE_BYTES, MOST_SMALL_MESSAGES = 1 << 16, 1 << 14


def limit_message_bytes(extra_bytes: int, peers: int = 1, moved_bytes: int = 0) -> int:
    """The most bytes of a message, so that enough of them for `peers` fit in a limit.

    `moved_bytes` is what a rank sends, or receives, as far as it is known.

    Raises:
        UsageError: a limit that is no whole number, that has no room for the smallest messages, or
            for so small ones only that the time for each is what counts.

    >>> limit_message_bytes(64 << 20) == MESSAGE_BYTES
    True
    >>> limit_message_bytes(100)
    16
    """
    extra_bytes = check_int(extra_bytes, "extra_bytes")
    places = _LEAST_MESSAGES * max(peers, 1)
    each = extra_bytes // places // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    least_each = min(align(-(-moved_bytes // MOST_SMALL_MESSAGES)), SMALL_MESSAGE_BYTES)
    least = places * max(least_each, ALIGNMENT_BYTES)
    if each < ALIGNMENT_BYTES:
        raise UsageError(
            f"extra_bytes={extra_bytes}: too little to send and receive with; give at least {least}"
        )
    if each < least_each:
        raise UsageError(
            f"extra_bytes={extra_bytes}: {moved_bytes} bytes would travel in messages of {each}, "
            f"each of which takes about 0.1 ms; give at least {least}"
        )
    return min(each, MESSAGE_BYTES)


def align(size_bytes: Bytes) -> Bytes:
    """The next multiple of the alignment, or those of an array."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def order_transfers(rows: Transfers) -> list[int]:
    """The rows in the order both ends of a message list them."""
    columns = [rows.target_cell, rows.source_cell, rows.order, *rows.start.T[::-1]]
    order: list[int] = np.lexsort(columns).tolist()
    return order


def group_pieces(
    sizes_bytes: Sequence[int], message_bytes: int
) -> tuple[list[list[int]], list[int]]:
    """The pieces that travel together, message by message, and those that travel alone, by number.

    The messages of those that travel together come first. One that travels alone is cut into as
    many messages as it needs.

    >>> group_pieces([40, 1 << 20, 40, 40], 112)
    ([[0, 2], [3]], [1])
    """
    large_bytes = min(LARGE_PIECE_BYTES, message_bytes)
    if len(sizes_bytes) == 1:
        # A tensor alone mostly has one piece for each other rank.
        return ([], [0]) if sizes_bytes[0] >= large_bytes else ([[0]], [])
    sizes = np.array(sizes_bytes, dtype=np.int64)
    is_large = sizes >= large_bytes
    small = np.flatnonzero(~is_large)
    # Where each begins, and ends, if all small ones lie one behind the other.
    begin = np.concatenate(([0], np.cumsum(align(sizes[small]))))
    end = begin[:-1] + sizes[small]
    together: list[list[int]] = []
    first = 0
    while first < len(small):
        behind = int(np.searchsorted(end, begin[first] + message_bytes, side="right"))
        together.append(small[first:behind].tolist())
        first = behind
    return together, np.flatnonzero(is_large).tolist()


def order_message(
    order: int,
    number: int,
    sender: int,
    receiver: int,
    ranks: int,
    in_a_turn: int = 1,
    by_region: bool = False,
) -> tuple[int, ...]:
    """The place of a message in the order of all, to sort by; no two messages have the same.

    Args:
        order: of its contributions.
        number: among the messages of these contributions between its two ranks.
        sender, receiver: among `ranks`.
        in_a_turn: how many messages go to one rank before those to another.
        by_region: whether all contributions to a region travel before the next region does.
    """
    # The next rank first, then the one behind it: all ranks send to different ones at a time.
    shift = (receiver - sender) % ranks
    if by_region:
        return (number, order, shift, sender)
    return (order, number // in_a_turn, shift, number, sender)


@functools.lru_cache(maxsize=256)
def are_cut_alike(change: LayoutChange) -> bool:
    """Whether each rank gets the same boxes of every contribution, each from one rank.

    Messages of one number then carry the same region of all contributions.
    """
    rows = change.transfers
    boxes: dict[int, dict[int, list[Any]]] = {}
    senders: set[tuple[int, int, int]] = set()
    for row in order_transfers(rows):
        order, receiver = int(rows.order[row]), int(rows.target_slot[row])
        box = (int(rows.target_cell[row]), rows.start[row].tolist(), rows.shape[row].tolist())
        boxes.setdefault(receiver, {}).setdefault(order, []).append(box)
        senders.add((receiver, order, int(rows.source_slot[row])))
    orders = len(set(rows.order.tolist()))
    is_alike = all(list(of.values()) == [of[min(of)]] * orders for of in boxes.values())
    # To each receiver every order has one sender, and every sender one order.
    by_order = {(receiver, order) for receiver, order, _ in senders}
    by_sender = {(receiver, sender) for receiver, _, sender in senders}
    return is_alike and len(by_order) == len(by_sender) == len(senders)


def fill_batches(sizes_bytes: Mapping[str, int], limit_bytes: int) -> dict[str, int]:
    """The batch of each name, from 0 up: in their order, as many in each as fit in the memory.

    What does not fit by itself is alone.

    >>> fill_batches({"a": 6, "b": 4, "c": 1, "d": 11}, 10)
    {'a': 0, 'b': 0, 'c': 1, 'd': 2}
    """
    found = {}
    number, filled_bytes = 0, 0
    for name, size_bytes in sizes_bytes.items():
        if filled_bytes and filled_bytes + size_bytes > limit_bytes:
            number, filled_bytes = number + 1, 0
        filled_bytes += size_bytes
        found[name] = number
    return found


# Of how many parts messages are under way at once: so many have their latencies together.
PARTS_AT_ONCE = 16
# The most parts, beyond which hardly anything is left to hide.
_MOST_PARTS = 64
# For how many bytes the latencies of a part's messages count where no link says so.
LATENCIES_COUNT_BYTES = 1 << 20
# How many steps a part is in a stage behind the one before. No rank waits at the end of a step, so
# these only say what goes first; a part that is late does not hold up the next few.
STEPS_BEHIND = 2
# How many parts of all other stages are still to come where the longest stage has ended. Receivers
# have their pieces of a part at different times, and wait for each other as many steps as that.
_PARTS_LEFT = 1 + STEPS_BEHIND


@dataclass(frozen=True, slots=True)
class PipelineSpan:
    """The parts of one tensor in a pipeline: `parts` of them, the first in step `first`.

    >>> list(divide_spans([100, 250, 50], 4))
    [PipelineSpan(first=0, parts=1), PipelineSpan(first=1, parts=3), PipelineSpan(first=3, parts=1)]
    """

    first: int = 0
    parts: int = 1


def count_parts(rest_s: float, latency_s: float) -> int:
    """Into how many parts to cut what is moved, so that it takes least.

    Of `n` parts one takes `rest_s / n` beside the stage that takes longest, and all have
    `n * latency_s / PARTS_AT_ONCE` of latencies; the sum is least where both are equal.

    Args:
        rest_s: of the stages that may be beside the one that takes longest.
        latency_s: of the messages of one part, in the same unit.

    >>> count_parts(rest_s=1.0, latency_s=0.01), count_parts(rest_s=0.0, latency_s=0.01)
    (40, 1)
    """
    if latency_s * _MOST_PARTS**2 <= rest_s * PARTS_AT_ONCE:
        return _MOST_PARTS if rest_s else 1
    return max(1, round(math.sqrt(rest_s * PARTS_AT_ONCE / latency_s)))


def divide_spans(sizes: Sequence[int], parts: int) -> Iterator[PipelineSpan]:
    """The spans of tensors of some sizes, one behind the other in a pipeline of `parts` parts."""
    total, before = max(sum(sizes), 1), 0
    for size in sizes:
        first = min(before * parts // total, parts - 1)
        last = max((before + size) * parts - 1, 0) // total
        yield PipelineSpan(first, max(last - first, 0) + 1)
        before += size


def divide_pipelines(batches: Iterable[Mapping[str, int]], parts: int) -> dict[str, PipelineSpan]:
    """The spans of tensors whose bytes are given by name, each batch in a pipeline of its own.

    `parts` are those of all batches as one; the parts of a share are the root of it as many.
    """
    given = list(batches)
    total = sum(sum(batch.values()) for batch in given)
    spans: dict[str, PipelineSpan] = {}
    for batch in given:
        share = sum(batch.values()) / max(total, 1)
        of_batch = max(1, round(parts * math.sqrt(share)))
        spans |= dict(zip(batch, divide_spans([*batch.values()], of_batch), strict=True))
    return spans


def list_steps(
    stages: Sequence[Transfers], shape: Sequence[int], span: PipelineSpan
) -> Iterator[tuple[int, int, Transfers]]:
    """What moves in each step: `(step, stage, transfers)`, without those that are empty.

    What stays on its rank is in the first step.
    """
    for stage, transfers in enumerate(stages):
        for part, rows in enumerate(cut_parts(transfers, shape, span.parts)):
            if len(rows):
                yield span.first + part + STEPS_BEHIND * stage, stage, rows


def cut_parts(transfers: Transfers, shape: Sequence[int], parts: int) -> tuple[Transfers, ...]:
    """Transfers of a tensor of `shape`, in parts; boxes alike are cut alike.

    A box is cut along its first dimension of at least as many indices. One without such a
    dimension is whole in the part that its place in the tensor says.

    >>> rows = Transfers.joined([Transfers.none(2)])
    >>> [len(part) for part in cut_parts(rows, (4, 4), 3)]
    [0, 0, 0]
    """
    if parts == 1 or not len(transfers) or not shape:
        return (transfers, *[Transfers.none(len(shape))] * (parts - 1))
    rows = np.arange(len(transfers))
    is_long = transfers.shape >= parts
    can_be_cut = is_long.any(axis=1) & ~transfers.stays
    dimension = is_long.argmax(axis=1)
    # Boxes that are too small are spread by where they begin.
    strides = np.append(np.cumprod(np.asarray(shape[:0:-1], dtype=np.int64))[::-1], 1)
    place = (transfers.start * strides[: len(shape)]).sum(axis=1)
    whole = place * parts // max(int(np.prod(shape)), 1)
    whole[transfers.stays] = 0
    found = []
    for part in range(parts):
        chosen = rows[can_be_cut | (whole == part)]
        found.append(
            _narrow(transfers.take(chosen), dimension[chosen], can_be_cut[chosen], part, parts)
        )
    return tuple(found)


def _narrow(
    transfers: Transfers, dimension: IntArray, is_cut: np.ndarray, part: int, parts: int
) -> Transfers:
    row = np.flatnonzero(is_cut)
    at = dimension[row]
    length = transfers.shape[row, at]
    low, high = length * part // parts, length * (part + 1) // parts
    boxes = [
        column.copy()
        for column in (transfers.start, transfers.source_start, transfers.target_start)
    ]
    for column in boxes:
        column[row, at] += low
    size = transfers.shape.copy()
    size[row, at] = high - low
    start, source_start, target_start = boxes
    return replace(
        transfers, start=start, shape=size, source_start=source_start, target_start=target_start
    )


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """The seconds of stages of which many parts are under way at once.

    Args:
        call_s: before and after all of them.
        longest_s: of what takes longest, which is there all the time.
        rest_s: of all else, of which only the last few parts are not beside it.
        latency_s: of the messages of one part, through all stages.
    """

    call_s: float
    longest_s: float
    rest_s: float
    latency_s: float

    @classmethod
    def of(cls, estimate: Estimate, across: Part) -> PipelineTimes:
        """The times of stages that are estimated one after another.

        All that crosses between hosts shares the ranks' links, whatever its stage: `across` is
        that together, and the last stage is within hosts. What takes longer of both is longest.
        """
        moving_s = [part.transfer_s + part.copy_s for part in estimate.parts]
        latency_s = sum(part.latency_s for part in estimate.parts)
        longest_s = max([across.transfer_s + across.copy_s, *moving_s])
        return cls(estimate.call_s, longest_s, max(sum(moving_s) - longest_s, 0.0), latency_s)

    @property
    def best_parts(self) -> int:
        """In how many parts it takes least."""
        return count_parts(_PARTS_LEFT * self.rest_s, self.latency_s)

    def in_parts(self, parts: int) -> float:
        """The seconds in so many parts: `PARTS_AT_ONCE` of them have their latencies together."""
        left, at_once = min(parts, _PARTS_LEFT), -(-parts // PARTS_AT_ONCE)
        return self.call_s + self.longest_s + self.rest_s * left / parts + self.latency_s * at_once
