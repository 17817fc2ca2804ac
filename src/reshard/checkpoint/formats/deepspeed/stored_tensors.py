"""Tensors bound to the files of a DeepSpeed checkpoint, with the checksums of their storages.

A tensor is whole in a file, or in pieces of flat buffers. A piece becomes boxes of the tensor,
which are contiguous in the buffer::

    elements 3:14 of (4, 4)      . . . #     [0:1, 3:4]
                                 # # # #     [1:3, 0:4]
                                 # # # #
                                 # # . .     [3:4, 0:2]

Bytes of a storage that are not elements, such as padding, are listed with its checksum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from reshard.binding import Binding, FileRange, View
from reshard.checkpoint.blocks.spans import is_dense
from reshard.checkpoint.contents import StoredChecksum, StoredTensor
from reshard.checkpoint.formats.deepspeed.flat_buffers import lay_out
from reshard.checkpoint.formats.torch_files.reading import StorageChecksums
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.errors import FormatError
from reshard.layout import Box, Layout

Shape = tuple[int, ...]


class StoredPiece(NamedTuple):
    """Elements `start:stop` of a flattened tensor, at element `offset` of a flat tensor in `file`.

    `slot` is the rank that has them.
    """

    slot: int
    start: int
    stop: int
    file: str
    buffer: ArchivedTensor
    offset: int


class StoredCell(NamedTuple):
    """A box of a tensor, stored in the file of `buffer` as `view` describes.

    The view counts from the first element of the buffer's storage.
    """

    slot: int
    box: Box
    view: View
    file: str
    buffer: ArchivedTensor


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

    def add_whole(self, name: str, file: str, archived: ArchivedTensor, slot: int = 0) -> None:
        """Add a tensor that is whole in a file."""
        self._add(name, archived, self._bind_whole(name, file, archived, slot))

    def _bind_whole(self, name: str, file: str, archived: ArchivedTensor, slot: int) -> Binding:
        start_bytes = archived.start_bytes
        views = {}
        itemsize_bytes = archived.dtype.itemsize_bytes
        if is_dense(archived.view, archived.shape):
            start_bytes += archived.view.offset * itemsize_bytes
            size_bytes = math.prod(archived.shape) * itemsize_bytes
            self._read(name, file, archived, (start_bytes, start_bytes + size_bytes))
        else:
            views[slot] = archived.view
            self._read(name, file, archived, None)
        address = FileRange(self._prefix + file, start_bytes)
        return Binding(Layout.whole(archived.shape, [slot], self._slots), {slot: address}, views)

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
        addresses, views = dict(first.binding.addresses), dict(first.binding.views)
        is_alike = (first.dtype, first.shape) == (archived.dtype, archived.shape)
        if not is_alike or slot in addresses:
            return
        copy = self._bind_whole(name, file, archived, slot)
        addresses, views = {**addresses, **copy.addresses}, {**views, **copy.views}
        layout = Layout.whole(archived.shape, sorted(addresses), self._slots)
        self.tensors[name] = StoredTensor(name, first.dtype, Binding(layout, addresses, views))

    def add_pieces(self, name: str, shape: Shape, pieces: Sequence[StoredPiece]) -> None:
        """Add a tensor that lies in pieces, in the order of ranks and elements.

        Raises:
            FormatError: pieces of different element types, or beyond their buffers.
        """
        first = pieces[0].buffer
        addresses: dict[int, list[FileRange]] = {}
        for piece in pieces:
            buffer = piece.buffer
            end = piece.offset + piece.stop - piece.start
            if buffer.dtype is not first.dtype or end > buffer.shape[0]:
                raise FormatError(
                    f"{self._folder / piece.file} has {buffer.shape[0]} elements of {buffer.dtype} "
                    f"where {end} of {first.dtype} were expected for {name!r}; the files belong to "
                    "different saves"
                )
            itemsize_bytes = buffer.dtype.itemsize_bytes
            start_bytes = buffer.start_bytes + (buffer.view.offset + piece.offset) * itemsize_bytes
            size_bytes = (piece.stop - piece.start) * itemsize_bytes
            self._read(name, piece.file, buffer, (start_bytes, start_bytes + size_bytes))
            address = FileRange(self._prefix + piece.file, start_bytes)
            addresses.setdefault(piece.slot, []).append(address)
        ranges = tuple((piece.slot, piece.start, piece.stop) for piece in pieces)
        layout, counts = lay_out(shape, ranges, self._slots)
        bound: dict[int, FileRange | tuple[FileRange, ...]] = {}
        at = dict.fromkeys(addresses, 0)
        found: dict[int, list[FileRange]] = {}
        for piece, boxes in zip(pieces, counts, strict=True):
            slot = piece.slot
            address = addresses[slot][at[slot]]
            at[slot] += 1
            offset = 0
            for elements in boxes:
                start = address.start_bytes + offset * first.dtype.itemsize_bytes
                found.setdefault(slot, []).append(FileRange(address.path, start))
                offset += elements
        for slot, ones in found.items():
            # A single address suffices if all cells of a rank are contiguous.
            bound[slot] = ones[0] if len(addresses[slot]) == 1 else tuple(ones)
        self._add(name, first, Binding(layout, bound, {}))

    def add_cells(self, name: str, shape: Shape, cells: Sequence[StoredCell]) -> None:
        """Add a tensor that lies in boxes, some of them strided, in the order of ranks.

        Raises:
            FormatError: boxes of different element types.
        """
        first = cells[0].buffer
        addresses: dict[int, list[FileRange]] = {}
        views: dict[int, list[View]] = {}
        for cell in cells:
            buffer, itemsize_bytes = cell.buffer, first.dtype.itemsize_bytes
            if buffer.dtype is not first.dtype:
                raise FormatError(
                    f"{self._folder / cell.file} has elements of {buffer.dtype} of {name!r}, and "
                    f"other ranks have {first.dtype}; the files belong to different saves"
                )
            start_bytes = buffer.start_bytes + cell.view.offset * itemsize_bytes
            end_bytes = start_bytes + cell.box.elements * itemsize_bytes
            is_dense_cell = is_dense(cell.view, cell.box.shape)
            self._read(name, cell.file, buffer, (start_bytes, end_bytes) if is_dense_cell else None)
            address = FileRange(self._prefix + cell.file, start_bytes)
            addresses.setdefault(cell.slot, []).append(address)
            views.setdefault(cell.slot, []).append(View(0, cell.view.strides))
        layout = Layout.from_boxes(shape, [(cell.slot, cell.box) for cell in cells], self._slots)
        bound = {slot: own[0] if len(own) == 1 else tuple(own) for slot, own in addresses.items()}
        seen = {slot: own[0] if len(own) == 1 else tuple(own) for slot, own in views.items()}
        self._add(name, first, Binding(layout, bound, seen))

    def _read(
        self, name: str, file: str, archived: ArchivedTensor, byte_range: tuple[int, int] | None
    ) -> None:
        """Note for its checksum that a tensor reads a range of a storage; None if strided."""
        part = f"storage at byte {archived.start_bytes}"
        ranges = None if byte_range is None else [byte_range]
        self._checksums.add(name, part, self._prefix + file, archived, ranges)

    def _add(self, name: str, archived: ArchivedTensor, binding: Binding) -> None:
        if name in self.tensors:
            raise FormatError(
                f"{self._folder} has {name!r} twice; files of two saves are mixed in it"
            )
        self.tensors[name] = StoredTensor(name, archived.dtype, binding)
