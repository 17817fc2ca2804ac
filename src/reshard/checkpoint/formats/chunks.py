"""Tensors assembled from the parts of ranks, in the files of these.

A *chunk* is a box of the tensor, in a file of the rank that wrote it. The chunks of a tensor must
cover it, each element once; equal boxes of several ranks may be copies. Most tensors of a model
have chunks that differ from those of another tensor only in their offsets in the files: such
tensors are a kind, which is checked once (`ChunkBinder`).

A *block* is what a rank of tensor parallelism has of a parameter. Along the sharded dimension, it
is a stretch of the whole, or several: of a gated layer a part of the gate, then a part of the other
half (`BlockPlace`)::

    whole  | gate 0 | gate 1 | up 0 | up 1 |        block of rank 1  | gate 1 | up 1 |
                                                    boxes  0:4 at 4, 4:8 at 12

A block is stored as a tensor, or flat in a buffer (`flat_block`): as regions of a container, each
with the rank that has it. `WholeTensors` assembles the blocks of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from reshard.checkpoint.blocks.tensor_columns import TensorColumns, TensorKind
from reshard.checkpoint.contents import StoredTensor
from reshard.dtypes import DType
from reshard.errors import CoverageError, FormatError
from reshard.geometry.regions import Region, bind_regions, flat_regions
from reshard.layout import Box

Shape = tuple[int, ...]
# A region of a tensor or of a block, with the rank that stores it.
RankRegion = tuple[int, Region]


class ChunkBinder:
    """The tensors of the checkpoint in a folder, collected by their chunks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers: dict[Hashable, int] = {}
        self._kinds: list[TensorKind] = []
        self._names: list[str] = []
        self._kind: list[int] = []
        self._starts: list[int] = []

    def add(
        self,
        name: str,
        dtype: DType,
        shape: tuple[int, ...],
        chunks: Sequence[tuple[int, Region]],
        slots: int,
        *,
        has_copies: bool = True,
    ) -> None:
        """Add a tensor of `slots` ranks, given by the rank and the region of each chunk, in bytes.

        `has_copies` is whether equal boxes of several ranks are copies.

        Raises CoverageError for chunks that overlap, or leave part of the tensor out.
        """
        # The places of a kind are in the order of ranks.
        chunks = sorted(chunks, key=itemgetter(0))
        alike = tuple([(rank, *region[:3], region.strides) for rank, region in chunks])
        key = dtype, shape, slots, has_copies, alike
        if key not in self._numbers:
            self._numbers[key] = len(self._kinds)
            boxes = [(str(region.container), region.box) for _, region in chunks]
            # Ranks that saved without collectives each have a copy of what they hold alike.
            if has_copies:
                boxes = [(file, box) for box, file in {b: f for f, b in reversed(boxes)}.items()]
            _check_disjoint(self._folder, name, boxes)
            binding = bind_regions(shape, chunks, slots, dtype.itemsize_bytes)
            tensor = StoredTensor(name, dtype, binding)
            expect_covered(self._folder, tensor)
            self._kinds += TensorColumns.of({name: tensor}).kinds
        self._names.append(name)
        self._kind.append(self._numbers[key])
        self._starts += [region.offset for _, region in chunks]

    def bind(self) -> TensorColumns:
        """Return the tensors, bound to the files of their chunks."""
        return TensorColumns(self._names, self._kinds, self._kind, self._starts)


def expect_covered(folder: Path, tensor: StoredTensor) -> None:
    """Raise CoverageError if shards of a tensor are missing."""
    try:
        _ = tensor.assembly
    except CoverageError as error:
        raise CoverageError(f"{folder}: {error}") from None


def _check_disjoint(folder: Path, name: str, boxes: list[tuple[str, Box]]) -> None:
    """Raise CoverageError for shards (file, box) of the tensor `name` that overlap."""
    # In the order of their starts, only boxes that overlap along the first dimension are compared.
    filled = [(file, box) for file, box in boxes if box.elements]
    ordered = sorted(filled, key=lambda item: item[1].start)
    open_boxes: list[tuple[str, Box]] = []
    for file, box in ordered:
        # A box that ends before this box overlaps none of the later boxes.
        if box.start:
            open_boxes = [item for item in open_boxes if item[1].stop[0] > box.start[0]]
        for other_file, other in open_boxes:
            if box.intersect(other) is not None:
                raise CoverageError(
                    f"two shards of {name!r} overlap: {other} in {folder / other_file} and {box} "
                    f"in {folder / file}; a file is left over from another save, or the shards "
                    "are copies, which only files that reshard wrote may have"
                )
        open_boxes.append((file, box))


class BlockPlace(NamedTuple):
    """The place of a rank's block in the whole of `shape`.

    `pieces` are boxes of the block, each with its first index in the whole.
    """

    shape: Shape
    block_shape: Shape
    pieces: tuple[tuple[Box, Shape], ...]

    @classmethod
    def split(
        cls, block: Sequence[int], dimension: int | None, part: int, parts: int, stride: int = 1
    ) -> BlockPlace:
        """Return the place of block number `part` of `parts` blocks of the shape `block`.

        `stride` is the number of stretches of a block, as Megatron's `partition_stride`.

        >>> [str(box) for box in BlockPlace.split((8, 4), 0, 1, 2, 2).boxes()]
        ['[4:8, 0:4]', '[12:16, 0:4]']
        """
        shape, zeros = tuple(block), (0,) * len(block)
        if dimension is None or parts == 1:
            return cls(shape, shape, ((Box.of(shape), zeros),))
        d, length = dimension, shape[dimension] // stride
        pieces = []
        for n in range(stride):
            start = (*zeros[:d], n * length, *zeros[d + 1 :])
            stop = (*shape[:d], (n + 1) * length, *shape[d + 1 :])
            to = (*zeros[:d], (n * parts + part) * length, *zeros[d + 1 :])
            pieces.append((Box(start, stop), to))
        whole = (*shape[:d], shape[d] * parts, *shape[d + 1 :])
        return cls(whole, shape, tuple(pieces))

    def boxes(self) -> list[Box]:
        """Return the boxes of the block in the whole, in the block's order."""
        return [Box.of(box.shape, to) for box, to in self.pieces]

    def place(self, regions: Iterable[RankRegion]) -> Iterator[RankRegion]:
        """Yield regions of the block as regions of the whole."""
        for slot, region in regions:
            for box, to in self.pieces:
                # A block without elements does not intersect with itself.
                common = region if 0 in self.block_shape else region.intersect(*box)
                if common is not None:
                    by = [a - b for a, b in zip(to, box.start, strict=True)]
                    yield slot, common.translate(by)


def flat_block(regions: Iterable[RankRegion], start: int, shape: Shape) -> Iterator[RankRegion]:
    """Yield the block of `shape` that is flat in a 1-D tensor, from index `start` on.

    `regions` are the regions in which the 1-D tensor is stored.
    """
    stop = start + math.prod(shape)
    for slot, region in regions:
        low, high = max(start, region.start[0]), min(stop, region.stop[0])
        if low < high:
            part = region.narrow(0, low, high)
            for own in flat_regions(
                shape, low - start, high - start, part.container, part.offset, part.strides[0]
            ):
                yield slot, own


class WholeTensors:
    """The tensors of the checkpoint in a folder, assembled from the blocks of ranks, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # By tensor: its type and shape, the label of its first block, and its regions.
        self.tensors: dict[str, tuple[DType, Shape, str, list[RankRegion]]] = {}

    def add(
        self,
        name: str,
        dtype: DType,
        place: BlockPlace,
        block: Iterable[RankRegion],
        label: str,
    ) -> None:
        """Add a rank's block, in regions of the block; `label` names its rank in errors.

        Raises FormatError if ranks have different dtypes or shapes.
        """
        entry = self.tensors.setdefault(name, (dtype, place.shape, label, []))
        if entry[:2] != (dtype, place.shape):
            raise FormatError(
                f"{label} has a part of {name!r}, {dtype.name} {list(place.shape)} in all, where "
                f"{entry[2]} has one of {entry[0].name} {list(entry[1])}; they are of "
                "different saves"
            )
        entry[3].extend(place.place(block))

    def stored(self, slots: int) -> Mapping[str, StoredTensor]:
        """Return the tensors over `slots` ranks.

        Raises CoverageError if a part of a tensor is missing.
        """
        tensors = {}
        for name, (dtype, shape, _, regions) in self.tensors.items():
            binding = bind_regions(shape, regions, slots, dtype.itemsize_bytes)
            tensors[name] = StoredTensor(name, dtype, binding)
            expect_covered(self._folder, tensors[name])
        return tensors
