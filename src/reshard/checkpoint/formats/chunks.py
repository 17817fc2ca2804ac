"""Tensors stored in chunks: boxes, each in a file of the rank that wrote it.

The chunks of a tensor must cover it, each element once; equal boxes of several ranks may be copies.
Most tensors of a model have chunks that differ from those of another tensor only in their offsets
in the files: such tensors are a kind, which is checked once (`ChunkBinder`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import itemgetter
from pathlib import Path

from reshard.checkpoint.blocks.tensor_columns import TensorColumns, TensorKind
from reshard.checkpoint.contents import StoredTensor
from reshard.dtypes import DType
from reshard.errors import CoverageError
from reshard.geometry.regions import Region, bind_regions
from reshard.layout import Box


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
            if all(
                a < d and c < b
                for a, b, c, d in zip(box.start, box.stop, other.start, other.stop, strict=True)
            ):
                raise CoverageError(
                    f"two shards of {name!r} overlap: {other} in {folder / other_file} and {box} "
                    f"in {folder / file}; a file is left over from another save, or the shards "
                    "are copies, which only files that reshard wrote may have"
                )
        open_boxes.append((file, box))
