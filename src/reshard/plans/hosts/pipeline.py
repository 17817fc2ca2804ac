"""Pipelines of stages: parts of a tensor are forwarded while the next ones arrive.

A staged transfer is divided into parts, each of which goes through the stages one step after the
previous part. So data moves between hosts and within hosts at the same time::

    step          0           1           2           3
    exchange      part 0      part 1      part 2
    fan-out                   part 0      part 1      part 2

Every box is divided in the same way in each stage, so a part of a stage consists of elements that
the same part of earlier stages has delivered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from reshard.cost.estimate import Estimate, Part
from reshard.geometry.transfers import Transfers
from reshard.runs import IntArray

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
