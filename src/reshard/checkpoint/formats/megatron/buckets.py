"""Buckets of the distributed optimizer: where in a flat buffer each parameter is.

Megatron-core puts the parameters of one type on a rank behind one another, last first, each from
a multiple of 64 elements on, and cuts the buffer into buckets that data-parallel ranks can share::

    buffer   | output_layer | final_layernorm |pad| ... | pad || word_embeddings | pad |
             |<----------------- bucket 0 ----------->|        |<---- bucket 1 ------->|
                                                  unpadded: without the padding at its end

1. A bucket ends when it has the elements that one should have, where gradients are reduced while
   others are computed.
2. An embedding that two pipeline stages share has a bucket of its own.
3. `coalesced` buffers have the buckets without the padding at their ends, one behind another.

What is computed here is compared with the lengths that a checkpoint has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_ALIGNMENT = 64


class BufferedParameter(NamedTuple):
    """A parameter of a buffer: its name, its block's shape, whether two stages share it."""

    name: str
    shape: tuple[int, ...]
    is_shared: bool = False


class BucketPlace(NamedTuple):
    """Where a parameter begins: the bucket, and the index in it."""

    bucket: int
    start: int


@dataclass(frozen=True)
class BufferPlan:
    """The buckets of one buffer: their lengths without padding, and where parameters are."""

    lengths: tuple[int, ...]
    places: tuple[tuple[BufferedParameter, BucketPlace], ...]

    @property
    def coalesced_length(self) -> int:
        """The length of the buffer without the padding of its buckets."""
        return sum(self.lengths)

    def coalesced(self) -> Iterator[tuple[BufferedParameter, int]]:
        """Where each parameter begins in the buffer without padding between buckets."""
        ahead = [sum(self.lengths[:bucket]) for bucket in range(len(self.lengths))]
        for parameter, place in self.places:
            yield parameter, ahead[place.bucket] + place.start


def plan_buffer(
    parameters: Sequence[BufferedParameter], bucket_elements: int | None = None
) -> BufferPlan:
    """The buckets of parameters, given in the order of the modules.

    `bucket_elements` is how many a bucket should have; None for one bucket.

    >>> plan_buffer([BufferedParameter("a", (5,)), BufferedParameter("b", (70,))]).places[1]
    (BufferedParameter(name='a', shape=(5,), is_shared=False), BucketPlace(bucket=0, start=128))
    """
    lengths: list[int] = []
    places: list[tuple[BufferedParameter, BucketPlace]] = []
    # Indices in the bucket: buckets begin at multiples of the alignment.
    at, is_empty = 0, True
    for parameter in reversed(parameters):
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        if parameter.is_shared and not is_empty:
            lengths.append(at)
            at = 0
        places.append((parameter, BucketPlace(len(lengths), at)))
        at += math.prod(parameter.shape)
        is_empty = False
        is_full = bucket_elements is not None and at >= bucket_elements
        if is_full or parameter.is_shared:
            lengths.append(at)
            at, is_empty = 0, True
    if not is_empty:
        lengths.append(at)
    return BufferPlan(tuple(lengths), tuple(places))


def find_plan(
    parameters: Sequence[BufferedParameter],
    lengths: int | Sequence[int],
    bucket_elements: Iterable[int] = (),
) -> BufferPlan | None:
    """The plan whose buckets have the lengths that a checkpoint says; None where none has.

    Args:
        parameters: in the order of the modules.
        lengths: of each bucket without padding, or of all of them.
        bucket_elements: how many elements a bucket may have been asked to have.
    """
    sizes: list[int | None] = [None, *bucket_elements]
    if not isinstance(lengths, int):
        # The first bucket was full when it was closed, and not before.
        sizes += list(dict.fromkeys(lengths))
    for size in sizes:
        plan = plan_buffer(parameters, size)
        if isinstance(lengths, int):
            if plan.coalesced_length == lengths:
                return plan
        elif plan.lengths == tuple(lengths):
            return plan
    return None
