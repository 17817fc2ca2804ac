"""Tensors bound to the files of a DeepSpeed checkpoint, with the checksums of their storages.

A tensor is a list of regions on ranks, whose container is a tensor of a file (`Stored`) and whose
offset counts from the first element of its storage. A range of a flat buffer is a region of the
flattened tensor. It becomes boxes of the tensor, which are contiguous in the buffer::

    elements 3:14 of (4, 4)      . . . #     [0:1, 3:4]
                                 # # # #     [1:3, 0:4]
                                 # # # #
                                 # # . .     [3:4, 0:2]

Bytes of a storage that are not elements, such as padding, are listed with its checksum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from reshard.binding import Binding, FileRange
from reshard.checkpoint.contents import StoredChecksum, StoredTensor
from reshard.checkpoint.formats.chunks import BlockPlace, flat_block
from reshard.checkpoint.formats.deepspeed.tensor_parallel import Joiner
from reshard.checkpoint.formats.torch_files.reading import StorageChecksums, find_address
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.checkpoint.storage.filesystem import read_up_to
from reshard.errors import CheckpointError, FormatError
from reshard.geometry.regions import Region, bind_regions
from reshard.layout import Layout

Shape = tuple[int, ...]


class Stored(NamedTuple):
    """A tensor of a file."""

    file: str
    tensor: ArchivedTensor


# Regions of a tensor, each with the rank that has it.
Pieces = Sequence[tuple[int, Region]]
# The shape of a rank's part of a tensor, and the regions of the flattened part.
_RankPart = tuple[Shape, Pieces]


@lru_cache(maxsize=4096)
def lay_out(shape: Shape, ranges: tuple[tuple[int, int, int], ...], slots: int) -> Layout:
    """Return the layout of `(rank, start, stop)` ranges of a flattened tensor."""
    # Parameters of equal shape have equal layouts, and a parameter's moments its layout.
    return Layout.flat_ranges(shape, {rank: (a, b) for rank, a, b in ranges}, slots=slots)


class TensorCollector:
    """A builder that binds tensors to the files of a checkpoint; `tensors` are the tensors so far.

    Args:
        folder: of the files.
        slots: the number of ranks.
        prefix: of the names of files.
        joiner: of the parts of tensor-parallel ranks, if there are several. Parts are collected
            until `join`.
    """

    def __init__(
        self, folder: Path, slots: int, prefix: str = "", joiner: Joiner | None = None
    ) -> None:
        self._folder, self._slots, self._prefix, self._joiner = folder, slots, prefix, joiner
        self._checksums = StorageChecksums()
        self._parts: dict[str, dict[tuple[int, int], _RankPart]] = {}
        self._parameters: dict[str, str] = {}
        self.tensors: dict[str, StoredTensor] = {}

    @property
    def checksums(self) -> tuple[StoredChecksum, ...]:
        """The checksums of all storages with a checksum."""
        return self._checksums.list()

    def _bind_whole(self, name: str, file: str, archived: ArchivedTensor, slot: int) -> Binding:
        address, view = find_address(self._prefix + file, archived)
        region = Region.dense(archived.shape, Stored(file, archived), archived.view.offset)
        self._note(name, region if view is None else region._replace(strides=view.strides))
        layout = Layout.whole(archived.shape, [slot], self._slots)
        return Binding(layout, {slot: address}, {} if view is None else {slot: view})

    def add_whole(self, name: str, file: str, archived: ArchivedTensor, slot: int = 0) -> None:
        """Add a tensor that is whole in a file."""
        self._add(name, archived, self._bind_whole(name, file, archived, slot))

    def add_first(self, name: str, file: str, archived: ArchivedTensor, slot: int = 0) -> None:
        """Add a tensor that is whole in a file, unless its name is taken."""
        if name not in self.tensors:
            self.add_whole(name, file, archived, slot)

    def add_copy(self, name: str, file: str, archived: ArchivedTensor, slot: int = 0) -> None:
        """Add a tensor that is whole in a file, or a copy of a whole tensor.

        A copy of another type or shape, or a second copy of a rank, is left out.
        """
        first = self.tensors.get(name)
        if first is None:
            self.add_whole(name, file, archived, slot)
            return
        is_alike = (first.dtype, first.shape) == (archived.dtype, archived.shape)
        if not is_alike or slot in first.binding.addresses:
            return
        copy = self._bind_whole(name, file, archived, slot)
        addresses = {**first.binding.addresses, **copy.addresses}
        layout = Layout.whole(archived.shape, sorted(addresses), self._slots)
        binding = Binding(layout, addresses, {**first.binding.views, **copy.views})
        self.tensors[name] = StoredTensor(name, first.dtype, binding)

    def add_part(
        self, parameter: str, name: str, mp: int, slot: int, file: str, archived: ArchivedTensor
    ) -> None:
        """Add a rank's part of a tensor that is sharded as `parameter`, whole in a file.

        Without tensor parallelism it is the tensor, or a copy.
        """
        if self._joiner is None:
            self.add_copy(name, file, archived, slot)
            return
        if not archived.view.is_dense(archived.shape):
            raise FormatError(
                f"{self._folder / file}: the part of {name!r} is not row by row; save it again "
                "after `.contiguous()`"
            )
        # Whole parts are joined in the same way as flat buffers: as regions of the flattened part.
        elements = math.prod(archived.shape)
        region = Region.dense((elements,), Stored(file, archived), archived.view.offset)
        pieces = [(slot, region)] if elements else []
        self.add_pieces(parameter, name, mp, archived.shape, pieces)

    def add_pieces(self, parameter: str, name: str, mp: int, shape: Shape, pieces: Pieces) -> None:
        """Add a rank's part of a tensor that is sharded as `parameter`, in flat regions.

        `mp` is the number of the model-parallel rank. Only the first part of a rank counts.
        """
        if self._joiner is not None:
            self._parameters[name] = parameter
            ranks = self._parts.setdefault(name, {})
            ranks.setdefault(divmod(mp, self._joiner.ranks), (shape, pieces))
        elif pieces and name not in self.tensors:
            self.add_flat(name, shape, pieces)

    def join(self) -> None:
        """Add the tensors of parts.

        Raises:
            CheckpointError: parts that some ranks do not have.
            FormatError: parts that do not make a tensor.
        """
        if (joiner := self._joiner) is None:
            return
        joins: dict[tuple[str, tuple[Shape, ...]], tuple[tuple[BlockPlace, ...], bool]] = {}
        for name, ranks in self._parts.items():
            stage = min(stage for stage, _ in ranks)
            missing = [r for r in range(joiner.ranks) if (stage, r) not in ranks]
            if missing:
                raise CheckpointError(
                    f"{self._folder} has no part of {name!r} of tensor-parallel rank "
                    f"{missing[0]}, which other ranks have; the files belong to different saves, "
                    "or one of a layer is missing"
                )
            parameter = self._parameters[name]
            shapes = tuple(ranks[stage, rank][0] for rank in range(joiner.ranks))
            # State is sharded as its parameter.
            if (parameter, shapes) not in joins:
                joins[parameter, shapes] = joiner.join(parameter, shapes)
            places, is_averaged = joins[parameter, shapes]
            if is_averaged:
                self._expect_equal(name, [pieces for _, pieces in ranks.values()])
            regions = [
                region
                for (_, rank), (shape, pieces) in ranks.items()
                if shape == places[rank].block_shape
                for region in places[rank].place(flat_block(pieces, 0, shape))
            ]
            if regions:
                # The boxes of a rank must follow each other.
                regions.sort(key=lambda pair: pair[0])
                first: ArchivedTensor = regions[0][1].container.tensor
                itemsize = first.dtype.itemsize_bytes
                bound = []
                for slot, region in regions:
                    file = self._read(name, region, regions)
                    strides = tuple(stride * itemsize for stride in region.strides)
                    own = Region(region.start, region.stop, file.path, file.start_bytes, strides)
                    bound.append((slot, own))
                binding = bind_regions(places[0].shape, bound, self._slots, itemsize)
                self._add(name, first, binding)

    def _expect_equal(self, name: str, parts: Sequence[Pieces]) -> None:
        """Raise FormatError for copies that differ and whose mean counts."""
        contents = {b"".join(self._content(region) for _, region in part) for part in parts}
        if len(contents) > 1:
            raise FormatError(
                f"{self._folder}: {name!r} differs between tensor-parallel ranks, and counts by "
                "its mean (parameter_to_average_patterns), which is not computed here. Convert it "
                "with ds_to_universal, whose result is read"
            )

    def _content(self, region: Region) -> bytes:
        """Return the elements of a region that is dense."""
        stored: Stored = region.container
        path, itemsize_bytes = self._folder / stored.file, stored.tensor.dtype.itemsize_bytes
        size_bytes = region.elements * itemsize_bytes
        try:
            with path.open("rb") as file:
                file.seek(stored.tensor.start_bytes + region.offset * itemsize_bytes)
                content = read_up_to(file, size_bytes)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        if len(content) < size_bytes:
            raise FormatError(f"{path} ends before its elements")
        return content

    def add_flat(self, name: str, shape: Shape, pieces: Pieces) -> None:
        """Add a tensor stored in regions of the flattened tensor, at most a region on a rank.

        Raises:
            FormatError: regions of different element types.
        """
        addresses = {slot: self._read(name, region, pieces) for slot, region in pieces}
        ranges = tuple([(slot, region[0][0], region[1][0]) for slot, region in pieces])
        layout = lay_out(shape, ranges, self._slots)
        self._add(name, pieces[0][1].container.tensor, Binding(layout, addresses, {}))

    def _read(self, name: str, region: Region, pieces: Pieces) -> FileRange:
        """Note that a tensor reads a region; return its address in bytes."""
        stored, first = region.container, pieces[0][1].container
        if stored.tensor.dtype is not first.tensor.dtype:
            raise FormatError(
                f"{self._folder / stored.file} has elements of {stored.tensor.dtype} of {name!r}, "
                f"and other ranks have {first.tensor.dtype}; the files belong to different saves"
            )
        return FileRange(self._prefix + stored.file, self._note(name, region))

    def _note(self, name: str, region: Region) -> int:
        """Note for its checksum that a tensor reads a region; return the region's first byte."""
        file, archived = region.container
        itemsize = archived.dtype.itemsize_bytes
        start: int = archived.start_bytes + region.offset * itemsize
        # A fast path for flat pieces, since there are many: a single stride of 1 is dense.
        is_dense = region.strides == (1,) or region.is_dense()
        ranges = [(start, start + region.elements * itemsize)] if is_dense else None
        part = f"storage at byte {archived.start_bytes}"
        self._checksums.add(name, part, self._prefix + file, archived, ranges)
        return start

    def _add(self, name: str, archived: ArchivedTensor, binding: Binding) -> None:
        if name in self.tensors:
            raise FormatError(
                f"{self._folder} has {name!r} twice; files of two saves are mixed in it"
            )
        self.tensors[name] = StoredTensor(name, archived.dtype, binding)
