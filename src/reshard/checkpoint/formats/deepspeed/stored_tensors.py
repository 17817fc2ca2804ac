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

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from reshard.binding import Binding, FileRange
from reshard.checkpoint.contents import StoredChecksum, StoredTensor
from reshard.checkpoint.formats.torch_files.reading import StorageChecksums, find_address
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.errors import FormatError
from reshard.geometry.regions import Region, bind_regions
from reshard.layout import Layout

Shape = tuple[int, ...]


class Stored(NamedTuple):
    """A tensor of a file."""

    file: str
    tensor: ArchivedTensor


# Regions of a tensor, each with the rank that has it.
Pieces = Sequence[tuple[int, Region]]


@lru_cache(maxsize=4096)
def lay_out(shape: Shape, ranges: tuple[tuple[int, int, int], ...], slots: int) -> Layout:
    """Return the layout of `(rank, start, stop)` ranges of a flattened tensor."""
    # Parameters of equal shape have equal layouts, and a parameter's moments its layout.
    return Layout.flat_ranges(shape, {rank: (a, b) for rank, a, b in ranges}, slots=slots)


class TensorCollector:
    """Binds tensors to the files of a checkpoint; `tensors` are those so far.

    `slots` is the number of ranks; `prefix` is that of the names of files.
    """

    def __init__(self, folder: Path, slots: int, prefix: str = "") -> None:
        self._folder = folder
        self._slots = slots
        self._prefix = prefix
        self._checksums = StorageChecksums()
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

    def add_flat(self, name: str, shape: Shape, pieces: Pieces) -> None:
        """Add a tensor that is stored in regions of the flattened tensor, at most one on a rank.

        Raises:
            FormatError: regions of different element types.
        """
        addresses = {slot: self._read(name, region, pieces) for slot, region in pieces}
        ranges = tuple((slot, region.start[0], region.stop[0]) for slot, region in pieces)
        layout = lay_out(shape, ranges, self._slots)
        self._add(name, pieces[0][1].container.tensor, Binding(layout, addresses, {}))

    def add_regions(self, name: str, shape: Shape, pieces: Pieces) -> None:
        """Add a tensor that is stored in regions, in the order of ranks.

        Raises:
            FormatError: regions of different element types.
        """
        first: ArchivedTensor = pieces[0][1].container.tensor
        itemsize = first.dtype.itemsize_bytes
        bound = []
        for slot, region in pieces:
            path, start = (place := self._read(name, region, pieces)).path, place.start_bytes
            strides = tuple(stride * itemsize for stride in region.strides)
            bound.append((slot, Region(region.start, region.stop, path, start, strides)))
        self._add(name, first, bind_regions(shape, bound, self._slots, itemsize))

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
        start = archived.start_bytes + region.offset * itemsize
        ranges = [(start, start + region.elements * itemsize)] if region.is_dense() else None
        part = f"storage at byte {archived.start_bytes}"
        self._checksums.add(name, part, self._prefix + file, archived, ranges)
        return int(start)

    def _add(self, name: str, archived: ArchivedTensor, binding: Binding) -> None:
        if name in self.tensors:
            raise FormatError(
                f"{self._folder} has {name!r} twice; files of two saves are mixed in it"
            )
        self.tensors[name] = StoredTensor(name, archived.dtype, binding)
