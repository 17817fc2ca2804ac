"""Blocks of ranks: their boxes in the whole parameter, and their locations in flat buffers.

A rank has a block of each parameter. Along the dimension of tensor parallelism, the block is a
stretch of the whole, or several: of a gated layer a part of the gate, then a part of the other half
(`BlockPlace`)::

    whole  | gate 0 | gate 1 | up 0 | up 1 |        block of rank 1  | gate 1 | up 1 |
                                                    stretches        (0, 4, 4), (4, 8, 12)

A block is stored as a tensor (`dense_block`), or flat in a bucket of the distributed optimizer
(`flat_block`). `WholeTensors` assembles the blocks of all ranks.

Megatron-core's optimizer puts the parameters of a dtype on a rank into a buffer, in reversed order,
each at a multiple of 64 elements, and divides the buffer into buckets that data-parallel ranks can
share (`plan_buffer`)::

    buffer   | output_layer | final_layernorm |pad| ... | pad || word_embeddings | pad |
             |<----------------- bucket 0 ----------->|        |<---- bucket 1 ------->|
                                                  unpadded: without the padding at its end

1. A bucket ends when it has the requested number of elements, if gradients are reduced during the
   backward pass.
2. An embedding that two pipeline stages share has a bucket of its own.
3. A `coalesced` buffer consists of the buckets without the padding at their ends.

The lengths are compared with those in the checkpoint (`find_plan`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.binding import FileRange, View
from reshard.checkpoint.blocks.fusing import StoredBox, bind_stored_boxes
from reshard.checkpoint.contents import StoredTensor
from reshard.dtypes import DType
from reshard.errors import FormatError
from reshard.layout import Box, flat_range_boxes


class Stretch(NamedTuple):
    """Indices `start:stop` of a block, which begin at `whole_start` in the whole."""

    start: int
    stop: int
    whole_start: int


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The place of a rank's block in the whole of `shape`, sharded in a dimension or in none."""

    shape: tuple[int, ...]
    dimension: int | None = None
    stretches: tuple[Stretch, ...] = ()

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of the block."""
        if self.dimension is None:
            return self.shape
        length = sum(stretch.stop - stretch.start for stretch in self.stretches)
        at = self.dimension
        return (*self.shape[:at], length, *self.shape[at + 1 :])

    @classmethod
    def cut(
        cls, block: Sequence[int], dimension: int | None, part: int, parts: int, stride: int = 1
    ) -> BlockPlace:
        """Return the place of block number `part` of `parts` blocks of the shape `block`.

        `stride` is the number of stretches of a block, as Megatron's `partition_stride`.

        >>> BlockPlace.cut((8, 4), 0, 1, 2, 2).stretches
        (Stretch(start=0, stop=4, whole_start=4), Stretch(start=4, stop=8, whole_start=12))
        """
        if dimension is None or parts == 1:
            return cls(tuple(block))
        length = block[dimension] // stride
        stretches = tuple(
            Stretch(n * length, (n + 1) * length, (n * parts + part) * length)
            for n in range(stride)
        )
        whole = (*block[:dimension], block[dimension] * parts, *block[dimension + 1 :])
        return cls(whole, dimension, stretches)

    def boxes(self) -> list[Box]:
        """Return the boxes of the block in the whole, in the block's order."""
        return [box for box, _ in self.split(Box((0,) * len(self.shape), self.block_shape))]

    def split(self, box: Box) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Yield a box of the block as boxes of the whole, each with its offset in the given box."""
        at = self.dimension
        if at is None:
            yield box, (0,) * len(self.shape)
            return
        for start, stop, whole_start in self.stretches:
            low, high = max(start, box.start[at]), min(stop, box.stop[at])
            if low < high:
                ahead = whole_start - start
                ends = [
                    (*end[:at], edge + ahead, *end[at + 1 :])
                    for end, edge in ((box.start, low), (box.stop, high))
                ]
                first = [0] * len(self.shape)
                first[at] = low - box.start[at]
                yield Box(*ends), tuple(first)


def dense_block(
    slot: int, path: str, start_bytes: int, shape: Sequence[int], view: View
) -> StoredBox:
    """Return a block that is a tensor of a file, whose storage begins at `start_bytes`."""
    box = Box((0,) * len(shape), tuple(shape))
    place = FileRange(path, start_bytes)
    return StoredBox(slot, box, place, view.strides)


def flat_block(
    boxes: Iterable[StoredBox], start: int, shape: Sequence[int], itemsize_bytes: int
) -> Iterator[StoredBox]:
    """Yield the block of `shape` that is flat in a 1-D tensor, from index `start` on.

    `boxes` are those in which the 1-D tensor is stored.
    """
    stop = start + math.prod(shape)
    for one in boxes:
        low, high = max(start, one.box.start[0]), min(stop, one.box.stop[0])
        done = low
        for box in flat_range_boxes(shape, low - start, high - start) if low < high else ():
            further = (done - one.box.start[0]) * one.strides[0] * itemsize_bytes
            strides = tuple(
                math.prod(box.shape[d + 1 :]) * one.strides[0] for d in range(len(shape))
            )
            yield one.moved(box, further, strides)
            done += box.elements


@dataclass
class WholeTensor:
    """A tensor that is assembled from the blocks of ranks."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    # The label of its first block, for errors.
    first: str
    boxes: list[StoredBox] = field(default_factory=list)

    def add(self, block: Iterable[StoredBox], place: BlockPlace) -> None:
        """Add the boxes of a block, given in the block's indices."""
        itemsize_bytes = self.dtype.itemsize_bytes
        for one in block:
            for box, first in place.split(one.box):
                ahead = sum(a * stride for a, stride in zip(first, one.strides, strict=True))
                self.boxes.append(one.moved(box, ahead * itemsize_bytes))

    def stored(self, slots: int) -> StoredTensor:
        """Return the tensor over `slots` ranks.

        Raises CoverageError if a part is missing.
        """
        binding = bind_stored_boxes(self.shape, self.boxes, slots)
        return StoredTensor(self.name, self.dtype, binding)


class WholeTensors:
    """The tensors that are assembled from the blocks of ranks."""

    def __init__(self) -> None:
        self.tensors: dict[str, WholeTensor] = {}

    def add(
        self,
        name: str,
        dtype: DType,
        place: BlockPlace,
        block: Iterable[StoredBox],
        label: str,
    ) -> None:
        """Add a rank's block; `label` names its rank in errors.

        Raises FormatError if ranks have different dtypes or shapes.
        """
        found = self.tensors.get(name)
        if found is None:
            found = self.tensors[name] = WholeTensor(name, dtype, place.shape, label)
        if (found.dtype, found.shape) != (dtype, place.shape):
            raise FormatError(
                f"{label} has a part of {name!r}, {dtype.name} {list(place.shape)} in all, where "
                f"{found.first} has one of {found.dtype.name} {list(found.shape)}; they are of "
                "different saves"
            )
        found.add(block, place)

    def stored(self, slots: int) -> Mapping[str, StoredTensor]:
        """Return the tensors over `slots` ranks, each covered."""
        made = {name: one.stored(slots) for name, one in self.tensors.items()}
        for tensor in made.values():
            _ = tensor.assembly
        return made


_ALIGNMENT = 64


class BufferedParameter(NamedTuple):
    """A parameter of a buffer: its name, its block's shape, whether two stages share it."""

    name: str
    shape: tuple[int, ...]
    is_shared: bool = False


class BucketPlace(NamedTuple):
    """The bucket of a parameter, and its first index there."""

    bucket: int
    start: int


@dataclass(frozen=True)
class BufferPlan:
    """The buckets of a buffer: their lengths without padding, and the places of parameters."""

    lengths: tuple[int, ...]
    places: tuple[tuple[BufferedParameter, BucketPlace], ...]

    @property
    def coalesced_length(self) -> int:
        """The length of the buffer without the padding of its buckets."""
        return sum(self.lengths)

    def coalesced(self) -> Iterator[tuple[BufferedParameter, int]]:
        """Yield the first index of each parameter in the buffer without padding."""
        ahead = [sum(self.lengths[:bucket]) for bucket in range(len(self.lengths))]
        for parameter, place in self.places:
            yield parameter, ahead[place.bucket] + place.start


def plan_buffer(
    parameters: Sequence[BufferedParameter], bucket_elements: int | None = None
) -> BufferPlan:
    """Plan the buckets of parameters, given in the order of the modules.

    `bucket_elements` is the requested number of elements of a bucket, or None for a single bucket.

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
    """Return a plan whose buckets have the lengths in a checkpoint, or None.

    Args:
        parameters: in the order of the modules.
        lengths: of each bucket without padding, or their sum.
        bucket_elements: possible requested numbers of elements of a bucket.
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
