"""What has a run to do for files that are made of archives, beside moving blocks?

PyTorch's archives have a checksum of each storage. It is put together from the blocks as they
pass by (`range_checksums`), so that no byte is read twice:

1. Of what is read: at the end it must be what the source's archive says. PyTorch itself does
   not look. Tensors with digests in a manifest are not checked a second time.
2. Of what is written: at the end it goes into the archive's directory.
3. A range that was not seen whole, because an earlier run did some of its blocks or because
   the shard has strides, is read once more at the end.
4. Items that are no tensors are copied byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from reshard.checkpoint.blocks.block_io import OpenFiles, Watch
from reshard.checkpoint.blocks.grid import block_digest, tensor_digest
from reshard.checkpoint.contents import Checkpoint, StoredChecksum, StoredItem
from reshard.checkpoint.files.range_checksums import RangeChecksums, crc32
from reshard.checkpoint.files.source_file import SourceFile
from reshard.checkpoint.files.target_file import TargetFile
from reshard.checkpoint.formats.arrangement import Arrangement
from reshard.errors import DigestError

_PIECE_BYTES = 1024 * 1024

_Seen = dict[str, list[tuple[int, int]]]
ArchivesState = tuple[_Seen, _Seen]


class Archives:
    """The archives that one run reads and writes; without any, there is nothing to do."""

    def __init__(self, source: Checkpoint, arrangement: Arrangement, content: Path) -> None:
        self._source = source
        self._arrangement = arrangement
        self._content = content
        self._read = source_checksums(source.checksums)
        self._written = RangeChecksums(
            {
                file.stored.name: [(a.storage_start_bytes, a.storage_bytes) for a in file.archives]
                for file in arrangement.files
                if file.archives
            }
        )

    @staticmethod
    def expect_library(source: Checkpoint, arrangement: Arrangement) -> None:
        """Raise MissingExtraError where there are checksums, and nothing to find them with."""
        if source.checksums or any(file.archives for file in arrangement.files):
            crc32(b"")

    @property
    def watch_source(self) -> Watch | None:
        """What is to be told of every range that is read."""
        return self._read.add if self._read.ranges else None

    @property
    def watch_target(self) -> Watch | None:
        """What is to be told of every range that is written."""
        return self._written.add if self._written.ranges else None

    def state(self) -> ArchivesState:
        """What this process saw of archives, for `merge` in process 0."""
        return self._read.state(), self._written.state()

    def merge(self, state: ArchivesState) -> None:
        """Take in what another process saw."""
        self._read.merge(state[0])
        self._written.merge(state[1])

    def check_sources(self, sources: OpenFiles[SourceFile]) -> None:
        """Compare the checksums of what was read.

        Raises:
            DigestError: bytes that are not those that were written.
        """
        for damaged, found in damaged_ranges(self._source.checksums, self._read, sources):
            path, start = self._source.path(damaged.place.path), damaged.place.start_bytes
            raise DigestError(
                f"{path} bytes {start}:{start + damaged.size_bytes}, {damaged.part} of tensor "
                f"{damaged.tensor!r}, are not what was written: their checksum is {found:08x}, "
                f"the file itself says {damaged.crc32:08x}. It was damaged, fetch it again"
            )

    def complete_targets(
        self, sources: OpenFiles[SourceFile], targets: OpenFiles[TargetFile]
    ) -> dict[str, bytes]:
        """Write the items and the ends of all archives; answers the items' digests.

        Raises:
            DigestError: an item that is not what was written.
        """
        digests = {}
        for name, item in self._arrangement.items.items():
            stored = self._source.items[name]
            pieces, at = [], item.place.start_bytes
            for piece in item_pieces(stored, sources):
                targets[item.place.path].write(piece, at)
                at += len(piece)
                pieces.append(block_digest(piece))
            digests[name] = tensor_digest(pieces).tensor
            if stored.digest not in (None, digests[name]):
                raise DigestError(
                    f"{name!r} in {self._source.path(stored.place.path)} is not what was "
                    f"written: its digest is {digests[name].hex()}, the manifest says "
                    f"{(stored.digest or b'').hex()}. The file is damaged, fetch it again"
                )
        self._end_archives(targets)
        return digests

    def _end_archives(self, targets: OpenFiles[TargetFile]) -> None:
        staged = OpenFiles(lambda name: SourceFile(self._content / name))
        try:
            for file in self._arrangement.files:
                name = file.stored.name
                for archive in file.archives:
                    start, size = archive.storage_start_bytes, archive.storage_bytes
                    checksum = self._written.of(name, start)
                    if checksum is None:
                        checksum = _checksum(staged[name], start, size)
                    tail = memoryview(bytearray(archive.tail(checksum)))
                    targets[name].write(tail, start + size)
        finally:
            staged.close()


def source_checksums(checksums: Iterable[StoredChecksum]) -> RangeChecksums:
    """The ranges with a checksum whose bytes are each read once when the tensors are."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for one in checksums:
        if one.is_read_once:
            ranges.setdefault(one.place.path, []).append((one.place.start_bytes, one.size_bytes))
    return RangeChecksums(ranges)


def damaged_ranges(
    checksums: Iterable[StoredChecksum], found: RangeChecksums, sources: OpenFiles[SourceFile]
) -> Iterator[tuple[StoredChecksum, int]]:
    """The ranges whose bytes have another checksum than the file says, and that.

    Those that `found` has not seen whole are read.
    """
    for one in checksums:
        name, start = one.place.path, one.place.start_bytes
        checksum = found.of(name, start) if one.is_read_once else None
        if checksum is None:
            checksum = _checksum(sources[name], start, one.size_bytes)
        if checksum != one.crc32:
            yield one, checksum


def item_pieces(item: StoredItem, files: OpenFiles[SourceFile]) -> Iterator[memoryview]:
    """The bytes of an item, 1 MiB at a time; its digest is that of the digests of these."""
    for offset in range(0, item.size_bytes, _PIECE_BYTES):
        piece = memoryview(bytearray(min(_PIECE_BYTES, item.size_bytes - offset)))
        files[item.place.path].read_into(piece, item.place.start_bytes + offset)
        yield piece


def item_digest(item: StoredItem, files: OpenFiles[SourceFile]) -> bytes:
    """The digest of an item's bytes as they are now."""
    return tensor_digest(block_digest(piece) for piece in item_pieces(item, files)).tensor


def _checksum(file: SourceFile, start_bytes: int, size_bytes: int) -> int:
    """The CRC-32 of a range of a file."""
    checksum = 0
    piece = memoryview(bytearray(min(size_bytes, _PIECE_BYTES)))
    for offset in range(0, size_bytes, _PIECE_BYTES):
        part = piece[: min(_PIECE_BYTES, size_bytes - offset)]
        file.read_into(part, start_bytes + offset)
        checksum = crc32(part, checksum)
    return checksum
