"""The parts of a tensor that ranks hold, put together: boxes of a rank's block as those of it.

A rank has a block of each parameter. Along the dimension that tensor parallelism cuts, the block is
one stretch of the whole, or several: of a gated layer it has its share of the gate, then its share
of the other half::

    whole  | gate 0 | gate 1 | up 0 | up 1 |        block of rank 1  | gate 1 | up 1 |
                                                    stretches        (0, 4, 4), (4, 8, 12)

A block lies in a file as a tensor, or as a flat range of a bucket (`flat_block`).
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
    """Indices `start:stop` of a block, which are those from `whole_start` on of the whole."""

    start: int
    stop: int
    whole_start: int


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a rank's block is in the whole of `shape`, along one dimension, or None of them."""

    shape: tuple[int, ...]
    dimension: int | None = None
    stretches: tuple[Stretch, ...] = ()

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of the block."""
        if self.dimension is None:
            return self.shape
        length = sum(one.stop - one.start for one in self.stretches)
        at = self.dimension
        return (*self.shape[:at], length, *self.shape[at + 1 :])

    @classmethod
    def cut(
        cls, block: Sequence[int], dimension: int | None, part: int, parts: int, stride: int = 1
    ) -> BlockPlace:
        """The place of block number `part` of `parts` equal ones of the shape `block`.

        `stride` is how many stretches each block has, as Megatron's `partition_stride`.

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
        """The boxes of the whole that the block is, in its order."""
        return [box for box, _ in self.split(Box((0,) * len(self.shape), self.block_shape))]

    def split(self, box: Box) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """A box of the block as boxes of the whole, each with where in the given box it begins."""
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
    """A block that is one tensor of a file, whose storage begins at `start_bytes`."""
    box = Box((0,) * len(shape), tuple(shape))
    place = FileRange(path, start_bytes)
    return StoredBox(slot, box, place, view.strides)


def flat_block(
    boxes: Iterable[StoredBox], start: int, shape: Sequence[int], itemsize_bytes: int
) -> Iterator[StoredBox]:
    """The block of `shape` that lies flat from index `start` on in a tensor of one dimension.

    `boxes` are those that the flat tensor is stored in.
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
    """A tensor that is put together of the blocks of ranks."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    # Where its first block is, for errors.
    first: str
    boxes: list[StoredBox] = field(default_factory=list)

    def add(self, block: Iterable[StoredBox], place: BlockPlace) -> None:
        """Add the boxes of a block, which are in its own indices."""
        itemsize_bytes = self.dtype.itemsize_bytes
        for one in block:
            for box, first in place.split(one.box):
                ahead = sum(a * stride for a, stride in zip(first, one.strides, strict=True))
                self.boxes.append(one.moved(box, ahead * itemsize_bytes))

    def stored(self, slots: int) -> StoredTensor:
        """The tensor over `slots` ranks.

        Raises CoverageError for a part that no rank has.
        """
        binding = bind_stored_boxes(self.shape, self.boxes, slots)
        return StoredTensor(self.name, self.dtype, binding)


class WholeTensors:
    """All tensors that blocks of ranks are put into."""

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
        """Add a rank's block; `label` says whose it is.

        Raises FormatError where ranks have other types or shapes.
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
        """The tensors over `slots` ranks, each covered."""
        made = {name: one.stored(slots) for name, one in self.tensors.items()}
        for tensor in made.values():
            _ = tensor.assembly
        return made
