"""Where the parameters of ZeRO's flat buffers lie.

Stages 1 and 2 put the parameters of a group one behind the other, pad the end, and cut the whole
into equal partitions, one a rank::

    | w w w w w w w | b b b | v v v v . |      group of 3 parameters, 16 elements with the padding
    |    rank 0     |      rank 1      |      partitions of 8 elements

Stage 3 cuts each parameter by itself into equal parts of `ceil(elements / ranks)`; a rank has the
parts of a group of parameters one behind the other::

    | w w w w | b b | v v |                   rank 0
    | w w w . | b . | v v |                   rank 1

A parameter's *pieces* say which of its elements, row by row, are where in which buffer.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, and what DeepSpeed writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

#: DeepSpeed makes partitions a multiple of so many elements, for aligned sends.
ALIGNMENT = 2
#: With `parameter_alignment` parameters begin at multiples of so many bytes.
PARAMETER_ALIGNMENT_BYTES = 16


class FlatPiece(NamedTuple):
    """Elements `start:stop` of a parameter, at element `offset` of the buffer of `rank`."""

    rank: int
    start: int
    stop: int
    offset: int


def partition_size(elements: int, ranks: int) -> int:
    """Elements of each rank's partition of a group with so many, paddings between them included.

    >>> partition_size(583, 2), partition_size(3, 4)
    (292, 2)
    """
    alignment = ALIGNMENT * ranks
    return math.ceil(elements / alignment) * alignment // ranks


def parameter_paddings(elements: Sequence[int], itemsize_bytes: int) -> list[int]:
    """The padding behind each parameter under `parameter_alignment`; none behind the last.

    >>> parameter_paddings([3, 8, 1], itemsize_bytes=2)
    [5, 0, 0]
    """
    alignment = PARAMETER_ALIGNMENT_BYTES // math.gcd(PARAMETER_ALIGNMENT_BYTES, itemsize_bytes)
    paddings, at = [], 0
    for count in elements:
        at += count
        paddings.append(-at % alignment)
        at += paddings[-1]
    return [*paddings[:-1], 0] if paddings else []


def flat_pieces(
    elements: Sequence[int], paddings: Sequence[int], size: int
) -> list[tuple[FlatPiece, ...]]:
    """The pieces of each parameter of a group in partitions of `size`, stages 1 and 2.

    >>> flat_pieces([7, 3, 4], [0, 0, 0], 8)[1]
    (FlatPiece(rank=0, start=0, stop=1, offset=7), FlatPiece(rank=1, start=1, stop=3, offset=0))
    """
    found, at = [], 0
    for count, padding in zip(elements, paddings, strict=True):
        pieces = []
        begin, end = at, at + count
        while begin < end:
            rank = begin // size
            stop = min(end, (rank + 1) * size)
            pieces.append(FlatPiece(rank, begin - at, stop - at, begin - rank * size))
            begin = stop
        found.append(tuple(pieces))
        at = end + padding
    return found


def part_size(elements: int, ranks: int) -> int:
    """Elements of each rank's part of a parameter, stage 3."""
    return -(-elements // ranks)


def own_pieces(elements: int, ranks: int, offset: int) -> tuple[FlatPiece, ...]:
    """The pieces of a parameter of stage 3 whose part is at `offset` on every rank.

    >>> own_pieces(5, 2, 10)
    (FlatPiece(rank=0, start=0, stop=3, offset=10), FlatPiece(rank=1, start=3, stop=5, offset=10))
    """
    size = part_size(elements, ranks)
    if not size:
        return ()
    return tuple(
        FlatPiece(rank, rank * size, min((rank + 1) * size, elements), offset)
        for rank in range(-(-elements // size))
    )


def deal_round_robin(count: int, ranks: int) -> list[int]:
    """The order of a group's parameters under `round_robin_gradients`: every `ranks`-th at a time.

    >>> deal_round_robin(5, 2)
    [0, 2, 4, 1, 3]
    """
    return [number for rank in range(ranks) for number in range(rank, count, ranks)]


def sub_groups(parts: Sequence[int], most: int) -> list[list[int]]:
    """The parameters of each sub-group of stage 3: cut when the parts sum up to `most` elements.

    >>> sub_groups([4, 3, 5, 2], 6)
    [[0, 1], [2, 3]]
    """
    if most >= sum(parts):
        return [[*range(len(parts))]]
    found: list[list[int]] = []
    group: list[int] = []
    filled = 0
    for number, part in enumerate(parts):
        group.append(number)
        filled += part
        if filled >= most or number == len(parts) - 1:
            found.append(group)
            group, filled = [], 0
    return found
