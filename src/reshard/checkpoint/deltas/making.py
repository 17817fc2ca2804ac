"""The delta of two checkpoints, found block by block, whatever their cuts and formats.

1. Names, types and shapes are compared by headers. A tensor that is only in the second is added;
   one of another type or shape is replaced: both are stored whole. What is only in the first is
   removed.
2. Where manifests recorded digests, blocks with equal ones are not read. Where one did, a block of
   the other is read and digested, and its counterpart only if the digests differ.
3. Threads read the other blocks of both, and encode what changed (`encoding`). Payloads are written
   as they are finished; the index has them in the order of the blocks.
4. Items, values and files beside the tensors: those that changed are stored whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.blocks import grid
from reshard.checkpoint.blocks.block_io import BlockReader, Workspace, WorkspaceSize, open_sources
from reshard.checkpoint.blocks.grid import DIGEST_BYTES, BlockGrid, block_digest, tensor_digest
from reshard.checkpoint.changes.computed import SCRATCH_BYTES
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.checkpoint.conversion.conversion import DEFAULT_EXTRA_BYTES, DEFAULT_THREADS
from reshard.checkpoint.conversion.file_checksums import item_digest, item_pieces
from reshard.checkpoint.deltas.beside import encode_value
from reshard.checkpoint.deltas.compression import COMPRESSIONS, compress
from reshard.checkpoint.deltas.delta_file import RECORD, DeltaWriter
from reshard.checkpoint.deltas.encoding import EncodedBlock, encode_block, word_bytes
from reshard.checkpoint.files.folders import refusals_explained
from reshard.checkpoint.files.pipeline import run_in_threads
from reshard.checkpoint.files.progress import Progress, ProgressFunction
from reshard.checkpoint.files.source_file import SourceFile
from reshard.checkpoint.formats.format import Holding
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.formats.registry import find_format
from reshard.errors import UsageError

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DeltaReport:
    """What a delta has. `changed_bytes` are those of the elements that changed, of kept shapes.

    `blocks` are those of all tensors afterwards; `read_bytes` were read of both checkpoints.
    """

    path: Path
    tensors: int
    changed: tuple[str, ...]
    added: tuple[str, ...]
    replaced: tuple[str, ...]
    removed: tuple[str, ...]
    blocks: int
    changed_blocks: int
    changed_bytes: int
    payload_bytes: int
    size_bytes: int
    read_bytes: int
    seconds_s: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Pair:
    """A tensor afterwards, what it was, and the number of its first block."""

    after: StoredTensor
    before: StoredTensor | None
    first_block: int
    grid: BlockGrid


@dataclass(frozen=True, slots=True)
class _Found:
    """A block that was looked at: its digests, and what changed."""

    pair: _Pair
    block: int
    before: bytes
    after: bytes
    change: EncodedBlock | None


class _PairMemory:
    """The memory of one thread, which reads blocks of two checkpoints."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        self.before = Workspace(*sizes)
        self.after = Workspace(*sizes)

    def close(self) -> None:
        self.before.close()
        self.after.close()


def diff(
    before: str | os.PathLike[str] | Checkpoint,
    after: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    *,
    compression: str | None = None,
    overwrite: bool = False,
    extra_bytes: int = DEFAULT_EXTRA_BYTES,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
) -> DeltaReport:
    """Write what changed from one checkpoint to another as a file, which appears whole or not.

    Digests of manifests are believed: blocks whose digests are equal are not read.

    Args:
        before, after: checkpoints, or where they are; of any cuts and formats.
        out: the file of the delta.
        compression: `zstd`, or None.
        overwrite: replace a file that is there.
        extra_bytes: what the work may allocate.
        threads: at most so many at a time; as many as fit, up to 4, when None.
        progress: called after every block that is looked at.

    Raises:
        CheckpointError: one of the checkpoints cannot be used.
        UsageError: a file that is there; too small a memory limit; an unknown compression.
        DigestError: bytes that are not what a manifest recorded.
        RunError: a file that cannot be read or written.
        MissingExtraError: xxhash or zstandard is needed and not installed.
    """
    began_s = time.monotonic()
    if compression is not None and compression not in COMPRESSIONS:
        raise UsageError(f"compression {compression!r}; it can be {', '.join(COMPRESSIONS)}")
    if compression is not None:
        # A package that is missing must be known before anything is written.
        compress(b"")
    a = before if isinstance(before, Checkpoint) else open_checkpoint(before)
    b = after if isinstance(after, Checkpoint) else open_checkpoint(after)
    making = _Making(a, b, compression is not None)
    workers = making.threads(extra_bytes, threads)
    try:
        with DeltaWriter(out, overwrite=overwrite) as writer:
            making.write_blocks(writer, workers, progress)
            content = making.describe(writer, compression)
            writer.finish(content, making.digests, making.finished_records())
            return making.report(writer, time.monotonic() - began_s)
    finally:
        making.close()


class _Making:
    """A delta under way."""

    def __init__(self, a: Checkpoint, b: Checkpoint, compressed: bool) -> None:
        self.a, self.b, self._compressed = a, b, compressed
        self._files_a, self._files_b = open_sources(a), open_sources(b)
        self.pairs: list[_Pair] = []
        self.kinds: dict[str, str] = {}
        first = 0
        for name, tensor in b.tensors.items():
            was = a.tensors.get(name)
            same = was is not None and (was.dtype, was.shape) == (tensor.dtype, tensor.shape)
            self.kinds[name] = "kept" if same else "added" if was is None else "replaced"
            blocked = BlockGrid.of(tensor.shape, tensor.dtype.itemsize_bytes)
            self.pairs.append(_Pair(tensor, was if same else None, first, blocked))
            first += blocked.count
        self.digests = np.zeros((first, DIGEST_BYTES), np.uint8)
        self._records: list[tuple[Any, ...]] = []
        self._sizes = self._find_workspace_sizes()
        self._readers = lru_cache(maxsize=64)(self._open_readers)
        self.changed_bytes = 0
        self.notes: list[str] = []

    def _find_workspace_sizes(self) -> tuple[int, int]:
        block = span = 0
        for pair in self.pairs:
            for tensor, files in ((pair.after, self._files_b), (pair.before, self._files_a)):
                if tensor is not None:
                    reader = BlockReader(tensor, files)
                    block = max(block, reader.grid.largest_bytes)
                    span = max(span, reader.span_bytes)
        return block, span

    def threads(self, extra_bytes: int, most: int | None) -> int:
        """How many threads fit into a limit.

        Raises:
            UsageError: not even one does, or numbers that cannot be.
        """
        for what, given, least in (("a memory limit", extra_bytes, 0), ("threads", most, 1)):
            if given is not None and (type(given) is not int or given < least):
                raise UsageError(f"{what} of {given!r}; expected a whole number from {least}")
        # Each thread: two blocks with their spans, arithmetic, and a payload that waits its turn.
        each = 2 * WorkspaceSize(*self._sizes).size_bytes + SCRATCH_BYTES + 2 * self._sizes[0]
        fit = extra_bytes // each
        if fit < 1:
            raise UsageError(
                f"a memory limit of {extra_bytes} bytes; one thread needs {each} for one block of "
                "the largest tensor of both, give at least that"
            )
        return min(fit, most or DEFAULT_THREADS)

    def close(self) -> None:
        self._files_a.close()
        self._files_b.close()

    def _open_readers(self, number: int) -> tuple[BlockReader | None, BlockReader]:
        pair = self.pairs[number]
        before = None if pair.before is None else BlockReader(pair.before, self._files_a)
        return before, BlockReader(pair.after, self._files_b)

    def _list_tasks(self) -> Iterator[tuple[int, int]]:
        """The blocks to look at: a pair and a block; the others are as they were."""
        for place, pair in enumerate(self.pairs):
            known = pair.after.digest
            old = pair.before.digest if pair.before is not None else None
            for block in range(pair.grid.count):
                if known and old and known.blocks[block] == old.blocks[block]:
                    row = pair.first_block + block
                    self.digests[row] = np.frombuffer(known.blocks[block], np.uint8)
                    continue
                yield place, block

    def _look(self, task: tuple[int, int], memory: _PairMemory) -> _Found:
        place, block = task
        pair = self.pairs[place]
        old, new = self._readers(place)
        if old is None:
            content, digest = new.read_checked(block, memory.after)
            change = self._encode(None, content, pair)
            return _Found(pair, block, bytes(DIGEST_BYTES), digest, change)
        known = pair.before.digest if pair.before is not None else None
        # Of the two, the one without a recorded digest is read first: the other may not need to be.
        if known is None and pair.after.digest is not None:
            was, before = old.read_checked(block, memory.before)
            if before == pair.after.digest.blocks[block]:
                return _Found(pair, block, before, before, None)
            content, digest = new.read_checked(block, memory.after)
        else:
            content, digest = new.read_checked(block, memory.after)
            if known is not None and digest == known.blocks[block]:
                return _Found(pair, block, digest, digest, None)
            was, before = old.read_checked(block, memory.before)
        return _Found(pair, block, before, digest, self._encode(was, content, pair))

    def _encode(
        self, before: memoryview | None, after: memoryview, pair: _Pair
    ) -> EncodedBlock | None:
        itemsize = pair.after.dtype.itemsize_bytes
        return encode_block(before, after, itemsize, compressed=self._compressed)

    def write_blocks(
        self, writer: DeltaWriter, threads: int, progress: ProgressFunction | None
    ) -> None:
        """Look at all blocks, and write what changed."""
        total = sum(pair.after.size_bytes for pair in self.pairs)
        done = 0
        results = run_in_threads(
            self._list_tasks(), self._look, lambda: _PairMemory(self._sizes), threads
        )
        try:
            for found in results:
                self._record(found, writer)
                done += found.pair.grid.size_bytes(found.block)
                if progress is not None:
                    progress(Progress(done, total, 0, found.pair.after.name))
        finally:
            results.close()
        for source in (*self._files_a, *self._files_b):
            source.check_unchanged()

    def _record(self, found: _Found, writer: DeltaWriter) -> None:
        row = found.pair.first_block + found.block
        self.digests[row] = np.frombuffer(found.after, np.uint8)
        change = found.change
        if change is None:
            return
        start = writer.append(change.payload)
        self._records.append(
            (
                row,
                found.before,
                start,
                len(change.payload),
                change.plain_bytes,
                change.words,
                change.coding,
                change.flags,
                0,
            )
        )
        name = found.pair.after.name
        if self.kinds[name] == "kept":
            self.kinds[name] = "changed"
        if self.kinds[name] == "changed":
            self.changed_bytes += change.words * word_bytes(found.pair.after.dtype.itemsize_bytes)

    def finished_records(self) -> NDArray[Any]:
        """The rows of the changed blocks."""
        return np.sort(np.array(self._records, dtype=RECORD), order="block")

    def describe(self, writer: DeltaWriter, compression: str | None) -> dict[str, Any]:
        """The part of the index that is JSON; files and items that changed are written."""
        tensors = []
        for pair in self.pairs:
            tensor = pair.after
            row: list[Any] = [
                tensor.name,
                tensor.dtype.name,
                list(tensor.shape),
                self.kinds[tensor.name],
            ]
            if self.kinds[tensor.name] == "replaced":
                was = self.a.tensors[tensor.name]
                row += [was.dtype.name, list(was.shape)]
            tensors.append(row)
        content = {
            "tensors": tensors,
            "removed": [
                [name, tensor.dtype.name, list(tensor.shape)]
                for name, tensor in self.a.tensors.items()
                if name not in self.b.tensors
            ],
            "items": self._describe_items(writer),
            "files": self._describe_files(writer),
            "values": self._describe_values("values", Holding.VALUES),
            "metadata": self._describe_values("metadata", Holding.METADATA),
            "attributes": self._describe_values("attributes", Holding.ATTRIBUTES),
            "paths": {name: list(path) for name, path in self.b.paths.items()} or None,
            "compression": compression,
            "block_bytes": grid.BLOCK_BYTES,
        }
        return {**content, "notes": self.notes}

    def _have_both(self, holding: Holding) -> bool:
        formats = [find_format(one.format) for one in (self.a, self.b)]
        return all(format is not None and holding in format.can_hold for format in formats)

    def _describe_values(self, what: str, holding: Holding) -> dict[str, Any] | None:
        """Plain values of the second; None where one of the two formats has no place for them."""
        if not self._have_both(holding):
            return None
        own = find_format(self.b.format)
        format_keys = own.own_metadata if own is not None and what == "metadata" else frozenset()
        found = {}
        for name, value in getattr(self.b, what).items():
            if name in format_keys:
                continue
            try:
                found[name] = encode_value(value)
            except UsageError as error:
                self.notes.append(f"not in the delta: {name} ({error})")
        return found

    def _describe_items(self, writer: DeltaWriter) -> list[list[Any]] | None:
        if not self._have_both(Holding.ITEMS):
            return None
        rows = []
        for name, item in self.b.items.items():
            was = self.a.items.get(name)
            digest = item_digest(item, self._files_b)
            start = None
            same = was is not None and was.transforms == item.transforms
            if was is None or not same or item_digest(was, self._files_a) != digest:
                start = writer.payload_bytes
                for piece in item_pieces(item, self._files_b):
                    writer.append(piece)
            rows.append(
                [name, digest.hex(), item.size_bytes, start, list(item.transforms), item.rank]
            )
        return rows

    def _describe_files(self, writer: DeltaWriter) -> list[list[Any]]:
        rows = []
        for name in self.b.carried:
            digest, size = _digest_file(self.b.path(name))
            start = None
            if name not in self.a.carried or _digest_file(self.a.path(name)) != (digest, size):
                start = writer.payload_bytes
                with refusals_explained("read a file beside the tensors", self.b.path(name)):
                    writer.append(self.b.path(name).read_bytes())
            rows.append([name, digest.hex(), size, start])
        return rows

    def report(self, writer: DeltaWriter, seconds_s: float) -> DeltaReport:
        """What was found."""

        def of_kind(kind: str) -> tuple[str, ...]:
            return tuple(name for name, one in self.kinds.items() if one == kind)

        files: tuple[SourceFile, ...] = (*self._files_a, *self._files_b)
        return DeltaReport(
            writer.path,
            len(self.pairs),
            of_kind("changed"),
            of_kind("added"),
            of_kind("replaced"),
            tuple(name for name in self.a.tensors if name not in self.b.tensors),
            len(self.digests),
            len(self._records),
            self.changed_bytes,
            writer.payload_bytes,
            writer.path.stat().st_size,
            sum(file.read_bytes for file in files),
            seconds_s,
            tuple(self.notes),
        )


def _digest_file(path: Path) -> tuple[bytes, int]:
    """The digest of a file's content, and its size."""
    digests, size = [], 0
    with refusals_explained("read a file beside the tensors", path), path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digests.append(block_digest(piece))
            size += len(piece)
    return tensor_digest(digests).tensor, size
