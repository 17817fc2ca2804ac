"""Pipelines of stages: parts of a tensor are handed on while the next ones arrive.

A staged transfer is cut into parts, each of which goes through the stages one step behind the
part before it. What crosses between hosts so travels beside what is handed on within them::

    step          0           1           2           3
    exchange      part 0      part 1      part 2
    fan-out                   part 0      part 1      part 2

Every box is cut in the same way in each stage, so a part of a stage is made of what the same part
of the stages before it brought.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from reshard.cost.estimate import Estimate, Part
from reshard.geometry.transfers import Transfers
from reshard.runs import IntArray

# What a rank receives in a step, at least, so that the wait at its end is worth it; and the most
# parts, beyond which hardly anything is left to hide.
_LEAST_STEP_BYTES, _MOST_PARTS = 1 << 20, 16
# How many steps a part is in a stage behind the one before. No rank waits at the end of a step, so
# these only say what goes first; a part that is late does not hold up the next few.
STEPS_BEHIND = 2


@dataclass(frozen=True, slots=True)
class PipelineSpan:
    """The parts of one tensor in a pipeline: `parts` of them, the first in step `first`.

    >>> list(divide_spans([100, 250, 50], 4))
    [PipelineSpan(first=0, parts=1), PipelineSpan(first=1, parts=3), PipelineSpan(first=3, parts=1)]
    """

    first: int = 0
    parts: int = 1


def count_parts(busiest_bytes: float) -> int:
    """Into how many parts to cut what brings so many bytes to the rank that receives most."""
    return max(1, min(_MOST_PARTS, int(busiest_bytes) // _LEAST_STEP_BYTES))


def divide_spans(sizes: Sequence[int], parts: int) -> Iterator[PipelineSpan]:
    """The spans of tensors of some sizes, one behind the other in a pipeline of `parts` parts."""
    total, before = max(sum(sizes), 1), 0
    for size in sizes:
        first = min(before * parts // total, parts - 1)
        last = max((before + size) * parts - 1, 0) // total
        yield PipelineSpan(first, max(last - first, 0) + 1)
        before += size


def divide_pipelines(
    batches: Iterable[Mapping[str, int]], busiest_bytes: int
) -> dict[str, PipelineSpan]:
    """The spans of tensors whose bytes are given by name, each batch in a pipeline of its own.

    `busiest_bytes` are those of the rank that receives most of all batches.
    """
    given = list(batches)
    total = sum(sum(batch.values()) for batch in given)
    spans: dict[str, PipelineSpan] = {}
    for batch in given:
        parts = count_parts(busiest_bytes * sum(batch.values()) / max(total, 1))
        spans |= dict(zip(batch, divide_spans([*batch.values()], parts), strict=True))
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


def pipelined_s(estimate: Estimate, across: Part, parts: int) -> float:
    """The seconds of stages that run as a pipeline of so many parts.

    All that crosses between hosts shares the ranks' links, whatever its stage: `across` is that
    together, and the last stage is within hosts. What takes longer of both is there all the time;
    of the others only one part is not beside it. Every part has the latencies of its messages.
    """
    moving_s = [part.transfer_s + part.copy_s for part in estimate.parts]
    latency_s = sum(part.latency_s for part in estimate.parts)
    longest_s = max([across.transfer_s + across.copy_s, *moving_s])
    rest_s = max(sum(moving_s) - longest_s, 0.0) / parts
    return estimate.call_s + longest_s + rest_s + latency_s * parts
