"""Chunks of an array, as shards of a tensor: each is a range of a file, or is unpacked from one.

1. A chunk without compression is read where it lies.
2. One that is compressed is unpacked when it is first read, as a whole: into the memory that asks
   for all of it, or else into a file without a name (`files.scratch_file`).
3. One that a database has in a node, because it is small, is decoded in the same way.
4. One that is not stored, in a checkpoint that leaves out chunks of zeros, is a hole in that file.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from reshard.binding import FileRange
from reshard.checkpoint.formats.orbax.crc32c import crc32c
from reshard.checkpoint.formats.orbax.key_values import KeyValues, StoredValue
from reshard.checkpoint.formats.orbax.tree_metadata import METADATA_NAME
from reshard.checkpoint.formats.orbax.zarr_metadata import ArrayMetadata
from reshard.checkpoint.storage.byte_streams import (
    ByteStream,
    DeflateStream,
    RangeStream,
    ZStandardStream,
)
from reshard.checkpoint.storage.local_files import BufferRegion, SourceFile
from reshard.checkpoint.storage.scratch_file import ScratchFile, ScratchPart, next_start_bytes
from reshard.errors import CoverageError, DigestError, FormatError
from reshard.layout import Box

_PIECE_BYTES = 1 << 20
_LARGEST_OFFSET = 2**62
_NOTHING = 2**64 - 1
_CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """A chunk that is not read where it lies: `size_bytes` when it is unpacked.

    Attributes:
        label: in errors.
        packed: where its bytes are, or these; None for a chunk of zeros, which is not stored.
        codec: what unpacks it.
        size_bytes: of its elements.
        has_checksum: whether a CRC-32C follows the packed bytes.
        start_bytes: where it has its place in the file without a name.
    """

    label: str
    packed: StoredValue | None
    codec: str
    size_bytes: int
    has_checksum: bool
    start_bytes: int = 0


@dataclass
class PackedChunks:
    """The packed chunks of a checkpoint while it is opened: a file without a name for each file.

    `anchor` is a file of the checkpoint, for chunks that are in none.
    """

    anchor: str = METADATA_NAME
    by_file: dict[str, list[PackedChunk]] = field(default_factory=dict)

    def add(self, chunk: PackedChunk) -> FileRange:
        """Where the chunk will be when it is unpacked.

        Raises FormatError where so much cannot be.
        """
        place = chunk.packed.place if chunk.packed is not None else None
        source = place.path if place is not None else self.anchor
        others = self.by_file.setdefault(source, [])
        start = 0
        if others:
            start = next_start_bytes(others[-1].start_bytes + others[-1].size_bytes)
        if start + chunk.size_bytes > _LARGEST_OFFSET:
            raise FormatError(
                f"{chunk.label} would be unpacked to {chunk.size_bytes} bytes, more than any disk "
                "has; the checkpoint is damaged"
            )
        others.append(replace(chunk, start_bytes=start))
        return FileRange(f"{source}/unpacked", start)

    @property
    def derived(self) -> dict[str, PackedChunkFile]:
        """The files, by the name under which tensors find them."""
        return {
            f"{source}/unpacked": PackedChunkFile(source, tuple(chunks))
            for source, chunks in self.by_file.items()
        }


@dataclass(frozen=True, slots=True)
class PackedChunkFile:
    """The chunks of one file, in the order in which they lie in the file without a name."""

    source: str
    chunks: tuple[PackedChunk, ...]

    def open(self, path: Path, source: SourceFile, scratch: Path | None) -> SourceFile:
        """Open the unpacked contents for reading."""
        return _ChunkFile(path, self.chunks, source, scratch)


class _ChunkFile(ScratchFile):
    """The unpacked chunks of one file."""

    def __init__(
        self,
        path: Path,
        chunks: tuple[PackedChunk, ...],
        packed: SourceFile,
        scratch: Path | None,
    ) -> None:
        self._chunks = chunks
        parts = []
        for one in chunks:
            place = one.packed.place if one.packed is not None else None
            size = one.packed.size_bytes if one.packed is not None else 0
            start = place.start_bytes if place is not None else 0
            parts.append(
                ScratchPart(one.start_bytes, one.size_bytes, packed.path.name, start, size)
            )
        super().__init__(path, parts, packed, scratch)

    def make_part(self, number: int) -> None:
        """Unpack a chunk; one of zeros stays a hole."""
        chunk = self._chunks[number]
        if chunk.packed is None:
            return
        at = chunk.start_bytes
        for piece in _unpack(chunk, self._open(chunk)):
            self.write(piece, at)
            at += len(piece)

    def read_into(self, region: BufferRegion | memoryview, offset_bytes: int) -> None:
        """As `ScratchFile.read_into`; what is asked for as a whole is unpacked where it is asked
        for, if it is not unpacked yet."""
        memory = region.memory if isinstance(region, BufferRegion) else region
        number = self.find_whole(offset_bytes, memory.nbytes)
        if number is None or self._chunks[number].packed is None:
            super().read_into(region, offset_bytes)
            return
        at, view = 0, memory.cast("B")
        for piece in _unpack(self._chunks[number], self._open(self._chunks[number])):
            view[at : at + len(piece)] = piece
            at += len(piece)

    def _open(self, chunk: PackedChunk) -> ByteStream:
        packed = chunk.packed
        if packed is None:
            raise FormatError(f"{chunk.label} is not stored")
        size = packed.size_bytes - _CHECKSUM_BYTES * chunk.has_checksum
        if packed.place is not None:
            self._check(chunk, self.read_packed, packed.place.start_bytes, size)
            return RangeStream(self.read_packed, packed.place.start_bytes, size)
        content = packed.content or b""

        def read(offset: int, size: int) -> bytes:
            return content[offset : offset + size]

        self._check(chunk, read, 0, size)
        return RangeStream(read, 0, size)

    def _check(
        self, chunk: PackedChunk, read: Callable[[int, int], bytes], start: int, size: int
    ) -> None:
        """Compare the CRC-32C behind the packed bytes, where there is one."""
        if not chunk.has_checksum:
            return
        found = 0
        # A chunk may be a shard of any size.
        for at in range(0, size, _PIECE_BYTES):
            found = crc32c(read(start + at, min(_PIECE_BYTES, size - at)), found)
        said = int.from_bytes(read(start + size, _CHECKSUM_BYTES), "little")
        if found != said:
            raise DigestError(
                f"{chunk.label} is not what was written: its CRC-32C is {found:08x}, the file says "
                f"{said:08x}; fetch it again"
            )


def _unpack(chunk: PackedChunk, packed: ByteStream) -> Iterator[bytes]:
    """The elements of a chunk, in pieces that together are `size_bytes`."""
    stream = packed
    if chunk.codec:
        kind = ZStandardStream if chunk.codec == "zstd" else DeflateStream
        stream = kind(packed, chunk.size_bytes, chunk.label, "its array's metadata")
    left = chunk.size_bytes
    while left:
        piece = stream.read(min(_PIECE_BYTES, left))
        if not piece:
            raise FormatError(
                f"{chunk.label} ends early: {chunk.size_bytes - left} bytes come out, expected "
                f"{chunk.size_bytes}; it was cut off, fetch it again"
            )
        left -= len(piece)
        yield piece
    if stream.read(1):
        raise FormatError(
            f"{chunk.label} goes on behind its {chunk.size_bytes} bytes; it is damaged, or of "
            "another save"
        )


def read_scalar(value: StoredValue, array: ArrayMetadata, label: str, folder: Path) -> bytes:
    """The bytes of the one chunk of an array without dimensions.

    Raises FormatError for what is damaged.
    """
    content = value.read(folder)
    if array.index is not None:
        chunk = _list_inner(value, array, label, folder)[0][1]
        if chunk is None:
            raise CoverageError(f"{label} has an empty shard")
        content = chunk.read(folder)
    if array.has_checksum:
        content = content[:-_CHECKSUM_BYTES]
    packed = PackedChunk(label, StoredValue(len(content)), array.codec, array.chunk_bytes, False)
    stream = RangeStream(lambda at, size: content[at : at + size], 0, len(content))
    return b"".join(_unpack(packed, stream))


def list_chunks(
    name: str, array: ArrayMetadata, values: KeyValues, packed: PackedChunks, *, has_all: bool
) -> Iterator[tuple[Box, FileRange]]:
    """The chunks of an array: what each has of it, and where its bytes begin.

    Raises:
        CoverageError: a chunk that is missing, where all should be there.
        FormatError: one that is not as long as it should be.
    """
    for key, start in array.list_keys():
        value = values.find(f"{name}/{key}")
        label = f"{values.folder / name / key}"
        inner: list[tuple[tuple[int, ...], StoredValue | None]]
        if array.index is None or value is None:
            inner = [(start, value)]
            if array.index is not None:
                inner = [(at, None) for at in _list_starts(start, array)]
        else:
            inner = [
                (tuple(a + b for a, b in zip(start, at, strict=True)), one)
                for at, one in _list_inner(value, array, label, values.folder)
            ]
        for at, one in inner:
            box = array.box(at)
            if box is None:
                continue
            if one is None:
                # What is left out is zero, in a checkpoint that leaves it out.
                if has_all or not array.fills_zeros:
                    raise CoverageError(
                        f"{label} is missing, which has {box} of tensor {name!r}; the checkpoint "
                        "was not written completely"
                    )
                yield box, packed.add(PackedChunk(label, None, "", array.chunk_bytes, False))
            elif one.place is not None and not array.codec and not array.has_checksum:
                if one.size_bytes != array.chunk_bytes:
                    raise FormatError(
                        f"{label} has {one.size_bytes} bytes, expected {array.chunk_bytes} for "
                        f"chunks {list(array.chunk)} of {array.dtype.name}"
                    )
                yield box, one.place
            else:
                chunk = PackedChunk(label, one, array.codec, array.chunk_bytes, array.has_checksum)
                yield box, packed.add(chunk)


def _list_starts(start: tuple[int, ...], array: ArrayMetadata) -> Iterator[tuple[int, ...]]:
    counts = array.index.counts if array.index else ()
    for at in itertools.product(*map(range, counts)):
        yield tuple(a + i * n for a, i, n in zip(start, at, array.chunk, strict=True))


def _list_inner(
    value: StoredValue, array: ArrayMetadata, label: str, folder: Path
) -> list[tuple[tuple[int, ...], StoredValue | None]]:
    """The chunks in a shard: where each begins in it, and its bytes; None where it has none."""
    index = array.index
    if index is None or value.size_bytes < index.size_bytes:
        raise FormatError(f"{label} has {value.size_bytes} bytes, too few for an index of chunks")
    start = value.size_bytes - index.size_bytes if index.is_at_end else 0
    content = value.read(folder, start, index.size_bytes)
    if index.has_checksum:
        content, said = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if crc32c(content) != int.from_bytes(said, "little"):
            raise FormatError(
                f"{label} is not what was written: the CRC-32C of its index of chunks is another; "
                "fetch it again"
            )
    numbers = struct.unpack(f"<{2 * math.prod(index.counts)}Q", content)
    found: list[tuple[tuple[int, ...], StoredValue | None]] = []
    origin = (0,) * len(array.chunk)
    for number, at in enumerate(_list_starts(origin, array)):
        begin, size = numbers[2 * number : 2 * number + 2]
        if begin == _NOTHING and size == _NOTHING:
            found.append((at, None))
            continue
        if begin + size > value.size_bytes:
            raise FormatError(
                f"{label} has a chunk in bytes {begin}:{begin + size} of its "
                f"{value.size_bytes}; it was cut off, or is damaged"
            )
        if value.place is None:
            part = (value.content or b"")[begin : begin + size]
            found.append((at, StoredValue(size, content=part)))
        else:
            place = FileRange(value.place.path, value.place.start_bytes + begin)
            found.append((at, StoredValue(size, place)))
    return found
