"""The chunks of a PyTorch distributed checkpoint, and where in files their elements are.

For each chunk that `.metadata` lists:

1. Its bytes must lie inside its file.
2. The archive in them says which of them the elements are (`torch_files.archive`); a compressed one
   says where they will be when it is unpacked (`packed_archives`).
3. Its type and shape must be those of `.metadata`.

The chunks of a tensor are then bound to its layout, and proven to cover it once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from reshard.binding import Binding, FileRange, View
from reshard.checkpoint.blocks.strided_spans import is_dense
from reshard.checkpoint.contents import StoredChecksum, StoredTensor
from reshard.checkpoint.files.descriptors import Closing, read_range
from reshard.checkpoint.files.places.ahead_reads import AheadReads, NamedRange
from reshard.checkpoint.formats.safetensors.sharded import check_disjoint
from reshard.checkpoint.formats.torch_dcp.metadata import DcpChunk, DcpTensor, StoredBytes
from reshard.checkpoint.formats.torch_dcp.packed_archives import (
    PackedArchive,
    look_into,
    unpacked_name,
)
from reshard.checkpoint.formats.torch_dcp.stream_transforms import check_transforms
from reshard.checkpoint.formats.torch_files.archive import read_archive
from reshard.checkpoint.formats.torch_files.archived_tensors import ArchivedTensor
from reshard.errors import CheckpointError, CoverageError, FormatError, UnreadableTensorError
from reshard.layout import Box, Layout

# What is read of an archive beside its elements: its first records, and its directory.
_HEAD_BYTES = 1 << 10
_TAIL_BYTES = 4 << 10
_CHUNKS_AT_ONCE = 2048


class _OpenFiles:
    """The files of a folder, each opened once; a few at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._ahead = AheadReads(folder)

    def read_ahead(self, ranges: Iterable[NamedRange]) -> None:
        """Ask a store for ranges together. Raises CheckpointError."""
        try:
            self._ahead.ask(ranges)
        except OSError as error:
            raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Bytes of a file. Raises FormatError where it has fewer."""
        known = self._ahead.find(name, offset, size)
        if known is not None:
            return known
        path = self._folder / name
        try:
            file = self._files.get(name)
            if file is None:
                # A checkpoint has a file a rank, thousands of them; the one opened first is closed.
                if len(self._files) >= 64:
                    self._files.pop(next(iter(self._files))).close()
                file = self._files[name] = path.open("rb", buffering=0)
            content = read_range(file, offset, size)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        if len(content) != size:
            raise FormatError(
                f"{path} ends at byte {offset + len(content)}, {size} bytes at {offset} were "
                "expected; it was cut off"
            )
        return content

    def close(self) -> None:
        """Close all."""
        for file in self._files.values():
            file.close()


class ChunkReader(Closing):
    """Binds the tensors of one checkpoint to its files; a context manager.

    `ranks` and `sizes` are those of the files. What was found on the way: `checksums`, and the
    archives that are `packed`, by the name under which tensors find what is unpacked.
    """

    def __init__(
        self, folder: Path, ranks: Mapping[str, int], sizes: Mapping[str, int], metadata_name: str
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        self._sizes = sizes
        self._metadata_name = metadata_name
        self._files = _OpenFiles(folder)
        self.checksums: list[StoredChecksum] = []
        self.packed: dict[str, list[PackedArchive]] = {}
        self.unreadable: dict[str, str] = {}

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def check_inside(self, name: str, place: StoredBytes) -> None:
        """Raise FormatError for bytes that are not all in their file."""
        size_bytes = self._sizes[place.file]
        if place.start_bytes + place.size_bytes > size_bytes:
            raise FormatError(
                f"{self._folder / place.file} has {size_bytes} bytes, but {name!r} should be in "
                f"bytes {place.start_bytes}:{place.start_bytes + place.size_bytes}; the file was "
                "cut off, or belongs to another save"
            )

    def read(self, place: StoredBytes) -> bytes:
        """The bytes of an item as they lie in the file."""
        return self._files.read(place.file, place.start_bytes, place.size_bytes)

    def bind(self, tensors: Mapping[str, DcpTensor]) -> Iterator[StoredTensor]:
        """Tensors bound to their chunks, each proven to be covered by them once.

        Those that cannot be read are left out, and are in `unreadable` afterwards.
        """
        for names in _group_by_chunks(tensors):
            self._read_ahead(chunk for name in names for chunk in _select_chunks(tensors[name]))
            for name in names:
                try:
                    yield self._bind(name, tensors[name])
                except UnreadableTensorError as error:
                    self.unreadable[name] = str(error)

    def _read_ahead(self, chunks: Iterable[DcpChunk]) -> None:
        ranges: list[NamedRange] = []
        for place in (chunk.place for chunk in chunks if not chunk.place.transforms):
            start, stop = place.start_bytes, place.start_bytes + place.size_bytes
            if stop <= self._sizes[place.file]:
                ranges.append(NamedRange(place.file, start, min(start + _HEAD_BYTES, stop)))
                ranges.append(NamedRange(place.file, max(stop - _TAIL_BYTES, start), stop))
        self._files.read_ahead(ranges)

    def _bind(self, name: str, described: DcpTensor) -> StoredTensor:
        chunks = _select_chunks(described)
        if not chunks:
            raise CoverageError(
                f"tensor {name!r} of shape {list(described.shape)} has no chunk in "
                f"{self._metadata_name} of {self._folder}; a rank's part of the save is missing"
            )
        chunks.sort(key=lambda chunk: self._ranks[chunk.place.file])
        itemsize_bytes = described.dtype.itemsize_bytes
        boxes: list[tuple[int, Box]] = []
        addresses: dict[int, list[FileRange]] = {}
        views: dict[int, list[View]] = {}
        strided: set[int] = set()
        for chunk in chunks:
            self.check_inside(name, chunk.place)
            file, archived = self._find_archived(name, described, chunk)
            rank = self._ranks[chunk.place.file]
            start_bytes = archived.start_bytes
            view = archived.view
            dense = is_dense(view, archived.shape)
            # The file's own checksum is of the whole storage: it can be found in passing only if
            # the tensor is all of it, in order.
            if archived.crc32 is not None and archived.storage_bytes:
                once = dense and chunk.box.elements * itemsize_bytes == archived.storage_bytes
                self.checksums.append(
                    StoredChecksum(
                        name,
                        str(chunk.box),
                        FileRange(file, start_bytes),
                        archived.storage_bytes,
                        archived.crc32,
                        once,
                    )
                )
            # A dense chunk needs no view: its offset becomes part of the address.
            if dense:
                start_bytes += view.offset * itemsize_bytes
                view = View.row_major(archived.shape)
            else:
                strided.add(rank)
            boxes.append((rank, chunk.box))
            addresses.setdefault(rank, []).append(FileRange(file, start_bytes))
            views.setdefault(rank, []).append(view)
        # Equal boxes of ranks that saved on their own are copies; others must not overlap.
        distinct = {chunk.box: chunk.place.file for chunk in reversed(chunks)}
        check_disjoint(self._folder, name, [(file, box) for box, file in distinct.items()])
        layout = Layout.from_boxes(described.shape, boxes, max(self._ranks.values()) + 1)
        binding = Binding(
            layout,
            {rank: tuple(ranges) for rank, ranges in addresses.items()},
            {rank: tuple(views[rank]) for rank in strided},
        )
        tensor = StoredTensor(name, described.dtype, binding)
        _ = tensor.assembly
        return tensor

    def _find_archived(
        self, name: str, described: DcpTensor, chunk: DcpChunk
    ) -> tuple[str, ArchivedTensor]:
        """The file of a chunk's elements and where they are in it, checked against `.metadata`."""
        place = chunk.place
        path, end_bytes = self._folder / place.file, place.start_bytes + place.size_bytes
        label = f"{path} bytes {place.start_bytes}:{end_bytes}: {chunk.box} of tensor {name!r}"

        def read(offset: int, size: int) -> bytes:
            return self._files.read(place.file, offset, size)

        # Only the front of a compressed archive is unpacked: it says how the tensor lies in it.
        if place.transforms:
            try:
                check_transforms(place.transforms, label)
            except CheckpointError as error:
                raise UnreadableTensorError(f"hidden by a transform: {error}") from error
            tensor_bytes = chunk.box.elements * described.dtype.itemsize_bytes
            packed = look_into(
                read,
                FileRange(place.file, place.start_bytes),
                place.size_bytes,
                place.transforms,
                tensor_bytes,
                label,
            )
            archived = packed.front
        else:
            archived = read_archive(read, place.start_bytes, place.size_bytes, label)
        if archived.dtype is not described.dtype or archived.shape != chunk.box.shape:
            raise FormatError(
                f"{label} is {archived.dtype} {list(archived.shape)} in the file, expected "
                f"{described.dtype} {list(chunk.box.shape)} by {self._metadata_name}; they belong "
                "to different saves"
            )
        if not place.transforms:
            return place.file, archived
        file = unpacked_name(place.file)
        others = self.packed.setdefault(file, [])
        # Its storage gets a place behind those of the file's earlier archives.
        start_bytes = others[-1].next_start_bytes if others else 0
        others.append(dataclasses.replace(packed, start_bytes=start_bytes))
        return file, dataclasses.replace(archived, start_bytes=start_bytes)


def _group_by_chunks(tensors: Mapping[str, DcpTensor]) -> Iterator[list[str]]:
    """The names of tensors, of so many at a time that they have a few thousand chunks."""
    names, count = [], 0
    for name, tensor in tensors.items():
        names.append(name)
        count += len(tensor.chunks)
        if count >= _CHUNKS_AT_ONCE:
            yield names
            names, count = [], 0
    yield names


def _select_chunks(tensor: DcpTensor) -> list[DcpChunk]:
    """Return the chunks that hold something, or one that holds nothing if no other is there."""
    filled = [chunk for chunk in tensor.chunks if chunk.box.elements]
    return filled or list(tensor.chunks[:1])
