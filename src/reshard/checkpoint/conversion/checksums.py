"""Checksums and items of the files that a run reads and writes.

The files of some formats contain checksums, such as a CRC-32 for each storage in PyTorch's
archives. A checksum is combined from the blocks while they are copied (`range_checksums`), so that
no byte is read twice:

1. The bytes that were read must have the source file's checksum; it is compared at the end. PyTorch
   itself does not compare it. Tensors with digests in a manifest are not checked a second time, and
   copies that no block reads are not checked.
2. The checksum of the written bytes is stored at the end, in the bytes that close the file
   (`NewFile`).
3. A range whose blocks were not all copied by this run is read once more at the end. In a source,
   an earlier run copied some blocks or the shard has strides; in a target, the range has padding.
4. Blocks that an earlier run wrote are read from the staging folder, as if they were written again.
5. Items that are not tensors are copied byte for byte.

Each block counts once, whichever process copies it. A file's checksum can therefore be combined
from the checksums of several processes, each of which has a part of the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path

from reshard.checkpoint.blocks.block_io import OpenFiles, Watch
from reshard.checkpoint.blocks.grid import block_digest, tensor_digest
from reshard.checkpoint.contents import Checkpoint, StoredChecksum, StoredItem
from reshard.checkpoint.copy_checks import list_read_checksums
from reshard.checkpoint.formats.write_plan import WritePlan
from reshard.checkpoint.storage.local_files import SourceFile, TargetFile
from reshard.checkpoint.storage.range_checksums import RangeChecksums, crc32
from reshard.errors import DigestError, RunError

# The digest of an item is computed from the digests of pieces of this size, so it cannot change.
PIECE_BYTES = 1024 * 1024

_Seen = dict[str, list[tuple[int, int]]]
ChecksumState = tuple[_Seen, _Seen]


class ChecksumTracker:
    """Tracks the checksums and items of a run's files; does nothing if the files have neither.

    `watch_source` and `watch_target` are called with every range that is read or written; they are
    None if nothing is checked.
    """

    def __init__(self, source: Checkpoint, write_plan: WritePlan, content: Path) -> None:
        self._source = source
        self._write_plan = write_plan
        self._content = content
        self._checksums = list_read_checksums(source)
        self._read = source_checksums(self._checksums)
        ranges = {file.stored.name: file.checked_ranges for file in write_plan.files}
        self._written = RangeChecksums({name: own for name, own in ranges.items() if own})
        self.watch_source: Watch | None = self._read.add if self._read.ranges else None
        self.watch_target: Watch | None = self._written.add if self._written.ranges else None

    def state(self) -> ChecksumState:
        """Return the checksums of this process, for `merge` in process 0."""
        return self._read.state(), self._written.state()

    def merge(self, state: ChecksumState) -> None:
        """Add the checksums of another process."""
        self._read.merge(state[0])
        self._written.merge(state[1])

    def check_sources(self, sources: OpenFiles[SourceFile]) -> None:
        """Compare the checksums of the bytes that were read with the checksums in the files.

        Raises:
            DigestError: bytes that differ from those written.
        """
        for damaged, actual in damaged_ranges(self._checksums, self._read, sources):
            path, start = self._source.path(damaged.place.path), damaged.place.start_bytes
            raise DigestError(
                f"{path} bytes {start}:{start + damaged.size_bytes}, {damaged.part} of tensor "
                f"{damaged.tensor!r}, are not what was written: their checksum is {actual:08x}, "
                f"the file has the checksum {damaged.crc32:08x}. It was damaged, fetch it again"
            )

    def complete_targets(
        self,
        sources: OpenFiles[SourceFile],
        targets: OpenFiles[TargetFile],
        spread: Collection[str] = (),
    ) -> dict[str, bytes]:
        """Write the items and the ends of files, and return the items' digests.

        This host has only a part of the files `spread`.

        Raises:
            DigestError: an item whose bytes differ from those written.
            RunError: as `close_targets`.
        """
        digests = {}
        for name, item in self._write_plan.items.items():
            stored = self._source.items[name]
            # In pieces, so that an item of any size takes little memory.
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
        whole = {file.stored.name for file in self._write_plan.files}.difference(spread)
        with contextlib.closing(self.staged()) as staged:
            self.close_targets(targets, whole, staged)
        if spread:
            self.close_targets(targets, spread)
        return digests

    def staged(self) -> OpenFiles[SourceFile]:
        """Return the written files, opened for reading."""
        return OpenFiles(lambda name: SourceFile(self._content / name))

    def close_targets(
        self,
        targets: OpenFiles[TargetFile],
        names: Collection[str],
        staged: OpenFiles[SourceFile] | None = None,
    ) -> None:
        """Write the bytes of these files that follow from checksums.

        Ranges whose blocks were not all copied here are read from `staged`. Raises RunError if such
        a range exists and `staged` is None.
        """

        def find_checksum(name: str, start_bytes: int, size_bytes: int) -> int:
            checksum = self._written.of(name, start_bytes)
            if checksum is not None:
                return checksum
            if staged is None:
                raise RunError(
                    f"bytes {start_bytes}:{start_bytes + size_bytes} of {name}, of which it has "
                    "the checksum, were not all seen by the processes of this run; start over "
                    "with --restart"
                )
            return _compute_checksum(staged[name], start_bytes, size_bytes)

        for file in self._write_plan.files:
            name = file.stored.name
            if name in names:
                for start, content in file.closing_bytes(partial(find_checksum, name)):
                    targets[name].write(memoryview(bytearray(content)), start)


def item_ranges(write_plan: WritePlan) -> dict[str, list[tuple[int, int]]]:
    """Return the ranges of files that contain items: first byte and end."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for item in write_plan.items.values():
        start = item.place.start_bytes
        ranges.setdefault(item.place.path, []).append((start, start + item.size_bytes))
    return ranges


def late_ranges(write_plan: WritePlan) -> dict[str, list[tuple[int, int]]]:
    """Return the ranges of files that `ChecksumTracker.complete_targets` writes: start and stop."""
    ranges = item_ranges(write_plan)
    for file in write_plan.files:
        # The offsets do not depend on the values of the checksums, so any value will do.
        for start, content in file.closing_bytes(lambda start, size: 0):
            ranges.setdefault(file.stored.name, []).append((start, start + len(content)))
    return ranges


def source_checksums(checksums: Iterable[StoredChecksum]) -> RangeChecksums:
    """Return the checksummed ranges whose bytes are each read once when the tensors are read."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for checksum in checksums:
        if checksum.is_read_once:
            ranges.setdefault(checksum.place.path, []).append(
                (checksum.place.start_bytes, checksum.size_bytes)
            )
    return RangeChecksums(ranges)


def damaged_ranges(
    checksums: Iterable[StoredChecksum], computed: RangeChecksums, sources: OpenFiles[SourceFile]
) -> Iterator[tuple[StoredChecksum, int]]:
    """Yield the ranges whose checksum differs from the file's, each with the computed checksum.

    If `computed` lacks some bytes of a range, the range is read; if it only lacks the padding, only
    the padding is read.
    """
    for item in checksums:
        name, start = item.place.path, item.place.start_bytes
        for padding, size_bytes in item.padding if item.is_read_once else ():
            for at, piece in _read_pieces(sources[name], padding, size_bytes):
                computed.add(name, at, piece)
        checksum = computed.of(name, start) if item.is_read_once else None
        if checksum is None:
            checksum = _compute_checksum(sources[name], start, item.size_bytes)
        if checksum != item.crc32:
            yield item, checksum


def item_pieces(item: StoredItem, files: OpenFiles[SourceFile]) -> Iterator[memoryview]:
    """Yield an item's bytes in pieces of 1 MiB; its digest is computed from the pieces' digests."""
    for offset in range(0, item.size_bytes, PIECE_BYTES):
        piece = memoryview(bytearray(min(PIECE_BYTES, item.size_bytes - offset)))
        files[item.place.path].read_into(piece, item.place.start_bytes + offset)
        yield piece


def item_digest(item: StoredItem, files: OpenFiles[SourceFile]) -> bytes:
    """Compute the digest of an item's present bytes."""
    return tensor_digest(block_digest(piece) for piece in item_pieces(item, files)).tensor


def _compute_checksum(file: SourceFile, start_bytes: int, size_bytes: int) -> int:
    """Return the CRC-32 of a range of a file."""
    checksum = 0
    for _, part in _read_pieces(file, start_bytes, size_bytes):
        checksum = crc32(part, checksum)
    return checksum


def _read_pieces(
    file: SourceFile, start_bytes: int, size_bytes: int
) -> Iterator[tuple[int, memoryview]]:
    """Yield a range of a file in pieces: offset and bytes, valid until the next piece."""
    piece = memoryview(bytearray(min(size_bytes, PIECE_BYTES)))
    for offset in range(0, size_bytes, PIECE_BYTES):
        part = piece[: min(PIECE_BYTES, size_bytes - offset)]
        file.read_into(part, start_bytes + offset)
        yield start_bytes + offset, part
