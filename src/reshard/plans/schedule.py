"""The schedule of an exchange: messages, their sizes and order, batches, and pipelines of stages.

Both ends of a message derive the same schedule from what both know of a plan, so only elements are
sent. The size of messages follows from the memory limit (`limit_message_bytes`).

1. The pieces between two ranks are listed in the order of their offset in the tensor
   (`order_transfers`).
2. Small pieces are packed together, each at an aligned offset. A piece larger than a message is
   split into messages of its own (`group_pieces`).
3. All messages of an exchange have a total order that both ends know (`order_message`):
   contributions in the order in which they are combined, then the first few messages of all pairs
   before the next of any, then those to the next rank before those to the rank after it. Ranks
   that process their messages in this order, with room for at least one, never deadlock.
4. If the contributions to every region are split alike (`are_cut_alike`), all of a region may be
   sent before the next region, so that it is combined while it is in a cache::

       order of messages    region 0 of ranks 1, 2, 3 | region 1 of ranks 1, 2, 3 | ...

5. Tensors that need memory besides their messages wait in batches, which use the same memory one
   after another (`fill_batches`).

The stages of a hierarchical job run as a pipeline. Tensors are divided into parts, each of which
goes through a stage some steps after the previous stage, so data moves between hosts and within
hosts at the same time::

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
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from reshard._records import Record
from reshard._validation import check_int
from reshard.cost.estimate import Estimate, Part
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.runs import IntArray

Bytes = TypeVar("Bytes", int, IntArray)

# Pieces in a packed message begin at offsets that are aligned for any dtype.
ALIGNMENT_BYTES = 16
# The maximum size of a message. Smaller messages would be in a nearer cache when they are sent or
# unpacked, but each takes 0.1 ms of processor time with gloo, and 0.2 ms in shared memory, where
# the copies before it leave none of the interpreter's own data in a cache.
MESSAGE_BYTES = 1 << 22
# Pieces of at least this size are not packed with others.
LARGE_PIECE_BYTES = 1 << 18
# The minimum number of messages that must fit in a limit: two in each direction.
_MIN_MESSAGES = 4
# Each message takes about 0.1 ms, whatever its size. A limit is refused if it leads to more
# messages than this that are smaller than this.
SMALL_MESSAGE_BYTES, MAX_SMALL_MESSAGES = 1 << 16, 1 << 14


def limit_message_bytes(extra_bytes: int, peers: int = 1, moved_bytes: int = 0) -> int:
    """Return the maximum size of a message such that enough messages for `peers` fit in a limit.

    `moved_bytes` are the bytes that a rank sends or receives, as far as known.

    Raises:
        UsageError: a limit that is not an integer, that is too low for the smallest messages, or
            only for messages so small that latency dominates.

    >>> limit_message_bytes(64 << 20) == MESSAGE_BYTES
    True
    >>> limit_message_bytes(100)
    16
    """
    extra_bytes = check_int(extra_bytes, "extra_bytes")
    messages = _MIN_MESSAGES * max(peers, 1)
    each = extra_bytes // messages // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    # Smaller messages would be so many that their latencies dominate.
    min_each = min(align(-(-moved_bytes // MAX_SMALL_MESSAGES)), SMALL_MESSAGE_BYTES)
    min_bytes = messages * max(min_each, ALIGNMENT_BYTES)
    if each < ALIGNMENT_BYTES:
        raise UsageError(
            f"extra_bytes={extra_bytes}: too little to send and receive with; give at least "
            f"{min_bytes}"
        )
    if each < min_each:
        raise UsageError(
            f"extra_bytes={extra_bytes}: {moved_bytes} bytes would be sent in messages of {each}, "
            f"each of which takes about 0.1 ms; give at least {min_bytes}"
        )
    return min(each, MESSAGE_BYTES)


def align(size_bytes: Bytes) -> Bytes:
    """Round up to a multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def order_transfers(rows: Transfers) -> list[int]:
    """Return the rows in the order in which both ends of a message list them."""
    columns = [rows.target_cell, rows.source_cell, rows.order, *rows.start.T[::-1]]
    order: list[int] = np.lexsort(columns).tolist()
    return order


def group_pieces(
    sizes_bytes: Sequence[int], message_bytes: int
) -> tuple[list[list[int]], list[int]]:
    """Return the numbers of the pieces packed in each message, and of the pieces sent alone.

    Packed messages are sent first. A piece sent alone is split into as many messages as it needs.

    >>> group_pieces([40, 1 << 20, 40, 40], 112)
    ([[0, 2], [3]], [1])
    """
    large_bytes = min(LARGE_PIECE_BYTES, message_bytes)
    if len(sizes_bytes) == 1:
        # A job of a single tensor usually has a piece for each other rank.
        return ([], [0]) if sizes_bytes[0] >= large_bytes else ([[0]], [])
    sizes = np.array(sizes_bytes, dtype=np.int64)
    is_large = sizes >= large_bytes
    small = np.flatnonzero(~is_large)
    # The begin and end of each small piece if all are packed in sequence.
    begin = np.concatenate(([0], np.cumsum(align(sizes[small]))))
    end = begin[:-1] + sizes[small]
    together: list[list[int]] = []
    first = 0
    while first < len(small):
        stop = int(np.searchsorted(end, begin[first] + message_bytes, side="right"))
        together.append(small[first:stop].tolist())
        first = stop
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
    """Return the sort key of a message in the order of all messages; keys are unique.

    Args:
        order: of its contribution.
        number: among the messages of this contribution between its two ranks.
        sender, receiver: among `ranks`.
        in_a_turn: how many messages are sent to a rank before those to another.
        by_region: whether all contributions to a region are sent before the next region.
    """
    # The next rank first, then the rank after it, so that all ranks send to different receivers.
    shift = (receiver - sender) % ranks
    if by_region:
        return (number, order, shift, sender)
    return (order, number // in_a_turn, shift, number, sender)


@functools.lru_cache(maxsize=256)
def are_cut_alike(change: LayoutChange) -> bool:
    """Return whether each rank gets the same boxes of every contribution, each from a single rank.

    Messages with equal numbers then carry the same region of all contributions.
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
    is_alike = all(
        list(contributions.values()) == [contributions[min(contributions)]] * orders
        for contributions in boxes.values()
    )
    # For each receiver, contributions and senders are in bijection.
    by_order = {(receiver, order) for receiver, order, _ in senders}
    by_sender = {(receiver, sender) for receiver, _, sender in senders}
    return is_alike and len(by_order) == len(by_sender) == len(senders)


def fill_batches(sizes_bytes: Mapping[str, int], limit_bytes: int) -> dict[str, int]:
    """Return the batch number of each name, filling batches in order up to a memory limit.

    A name that exceeds the limit by itself has its own batch.

    >>> fill_batches({"a": 6, "b": 4, "c": 1, "d": 11}, 10)
    {'a': 0, 'b': 0, 'c': 1, 'd': 2}
    """
    batches = {}
    number, filled_bytes = 0, 0
    for name, size_bytes in sizes_bytes.items():
        if filled_bytes and filled_bytes + size_bytes > limit_bytes:
            number, filled_bytes = number + 1, 0
        filled_bytes += size_bytes
        batches[name] = number
    return batches


# The number of parts whose messages are in flight at once, so that their latencies overlap.
PARTS_AT_ONCE = 16
# The maximum number of parts, beyond which hardly any time can be hidden.
_MAX_PARTS = 64
# The bytes as which the latencies of a part's messages count if link speeds are unknown.
LATENCIES_COUNT_BYTES = 1 << 20
# The number of steps between a part's stages. No rank waits at the end of a step, so steps only
# order the messages; a late part does not delay the next few parts.
STEPS_BETWEEN_STAGES = 2
# The number of parts of all other stages that remain when the longest stage has ended. Receivers
# get their pieces of a part at different times, and wait for each other as many steps.
PARTS_LEFT = 1 + STEPS_BETWEEN_STAGES


class PipelineSpan(Record):
    """The parts of a tensor in a pipeline: `parts` of them, the first in step `first`.

    >>> list(divide_spans([100, 250, 50], 4))
    [PipelineSpan(first=0, parts=1), PipelineSpan(first=1, parts=3), PipelineSpan(first=3, parts=1)]
    """

    first: int = 0
    parts: int = 1


def count_parts(rest_s: float, latency_s: float) -> int:
    """Return the number of parts that minimizes the time of a pipeline.

    With `n` parts, the time besides the longest stage is `rest_s / n`, and latencies add
    `n * latency_s / PARTS_AT_ONCE`. The sum is minimal if both are equal.

    Args:
        rest_s: the time of all stages but the longest.
        latency_s: the latency of the messages of a part, in the same unit.

    >>> count_parts(rest_s=1.0, latency_s=0.01), count_parts(rest_s=0.0, latency_s=0.01)
    (40, 1)
    """
    if latency_s * _MAX_PARTS**2 <= rest_s * PARTS_AT_ONCE:
        return _MAX_PARTS if rest_s else 1
    return max(1, round(math.sqrt(rest_s * PARTS_AT_ONCE / latency_s)))


def divide_spans(sizes: Sequence[int], parts: int) -> Iterator[PipelineSpan]:
    """Yield the spans of tensors of given sizes, in sequence in `parts` parts."""
    total, before = max(sum(sizes), 1), 0
    for size in sizes:
        # A tensor without elements after all others would begin beyond the last part.
        first = min(before * parts // total, parts - 1)
        # The part of its last element. Parts are cut by size, so small tensors share a part.
        last = max((before + size) * parts - 1, 0) // total
        yield PipelineSpan(first, max(last - first, 0) + 1)
        before += size


def divide_pipelines(batches: Iterable[Mapping[str, int]], parts: int) -> dict[str, PipelineSpan]:
    """Return the spans of tensors, with a pipeline for each batch of bytes by name.

    `parts` is the number of parts of all batches together. A batch with a share of the bytes has
    the square root of its share of them.
    """
    batches = list(batches)
    total = sum(sum(batch.values()) for batch in batches)
    spans: dict[str, PipelineSpan] = {}
    for batch in batches:
        share = sum(batch.values()) / max(total, 1)
        of_batch = max(1, round(parts * math.sqrt(share)))
        spans |= dict(zip(batch, divide_spans([*batch.values()], of_batch), strict=True))
    return spans


def list_steps(
    stages: Sequence[Transfers], shape: Sequence[int], span: PipelineSpan
) -> Iterator[tuple[int, int, Transfers]]:
    """Yield the transfers of each step as `(step, stage, transfers)`, without empty ones.

    Elements that stay on their rank are in the first step.
    """
    for stage, transfers in enumerate(stages):
        for part, rows in enumerate(cut_parts(transfers, shape, span.parts)):
            if len(rows):
                yield span.first + part + STEPS_BETWEEN_STAGES * stage, stage, rows


def cut_parts(transfers: Transfers, shape: Sequence[int], parts: int) -> tuple[Transfers, ...]:
    """Divide the transfers of a tensor of `shape` into parts, equal boxes in the same way.

    A box is split along its first dimension of at least `parts` indices. A box without such a
    dimension is whole, in the part that corresponds to its offset in the tensor.

    >>> rows = Transfers.joined([Transfers.none(2)])
    >>> [len(part) for part in cut_parts(rows, (4, 4), 3)]
    [0, 0, 0]
    """
    if parts == 1 or not len(transfers) or not shape:
        return (transfers, *[Transfers.none(len(shape))] * (parts - 1))
    rows = np.arange(len(transfers))
    is_long = transfers.shape >= parts
    # Elements that stay are copied once, in the first part.
    can_be_cut = is_long.any(axis=1) & ~transfers.stays
    dimension = is_long.argmax(axis=1)
    # Boxes that are too small are distributed by their offsets.
    strides = np.append(np.cumprod(np.asarray(shape[:0:-1], dtype=np.int64))[::-1], 1)
    offset = (transfers.start * strides[: len(shape)]).sum(axis=1)
    whole = offset * parts // max(int(np.prod(shape)), 1)
    whole[transfers.stays] = 0
    narrowed = []
    for part in range(parts):
        chosen = rows[can_be_cut | (whole == part)]
        narrowed.append(
            _narrow(transfers.take(chosen), dimension[chosen], can_be_cut[chosen], part, parts)
        )
    return tuple(narrowed)


def _narrow(
    transfers: Transfers, dimension: IntArray, is_cut: np.ndarray, part: int, parts: int
) -> Transfers:
    row = np.flatnonzero(is_cut)
    at = dimension[row]
    length = transfers.shape[row, at]
    # The same proportions in every stage, so that equal boxes are divided equally.
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


def find_pipeline_times(estimate: Estimate, across: Part) -> tuple[float, float, float, float]:
    """Return the seconds of stages that run as a pipeline, estimated in sequence.

    All stages between hosts share the links of the ranks: `across` is the estimate of them
    together. The last stage is within hosts.

    Returns:
        The seconds before and after all stages; of the longest stage, which runs all the time; of
        all other stages, of which all but the last few parts overlap with the longest; and the
        latency of the messages of a part, through all stages.
    """
    moving_s = [part.transfer_s + part.copy_s for part in estimate.parts]
    latency_s = sum(part.latency_s for part in estimate.parts)
    longest_s = max([across.transfer_s + across.copy_s, *moving_s])
    return estimate.call_s, longest_s, max(sum(moving_s) - longest_s, 0.0), latency_s


def pipeline_s(
    call_s: float, longest_s: float, rest_s: float, latency_s: float, parts: int
) -> float:
    """Return the seconds of a pipeline of `parts` parts, for the times of `find_pipeline_times`.

    The latencies of `PARTS_AT_ONCE` parts overlap.

    >>> pipeline_s(0.0, 8.0, 4.0, 0.5, 8)
    10.0
    """
    left, at_once = min(parts, PARTS_LEFT), -(-parts // PARTS_AT_ONCE)
    return call_s + longest_s + rest_s * left / parts + latency_s * at_once
