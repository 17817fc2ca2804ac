"""Creating the delta of two checkpoints, block by block, whatever their shardings and formats.

1. Names, types and shapes are compared by headers. A tensor that is only in the second checkpoint
   is added; a tensor of another type or shape is replaced: both are stored whole. A tensor that is
   only in the first is removed.
2. Blocks of both are read, digested, and compared with the digests recorded in manifests. If these
   digests are trusted, blocks with equal digests are not read. If only one manifest has digests, a
   block of the other checkpoint is read, and its counterpart only if the digests differ.
3. Threads read the other blocks of both, and encode the changes (`encoding`). Payloads are written
   as they are finished; the index has them in the order of the blocks.
4. Changed items, values and files other than tensors are stored whole.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard._validation import check_used
from reshard.checkpoint.blocks import grid
from reshard.checkpoint.blocks.block_io import (
    BlockReader,
    Section,
    Workspace,
    WorkspacePair,
    WorkspaceSize,
    open_sources,
)
from reshard.checkpoint.blocks.grid import DIGEST_BYTES, block_digest, tensor_digest
from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.changes.computed_tensors import SCRATCH_BYTES
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.conversion.checksums import PIECE_BYTES, item_digest, item_pieces
from reshard.checkpoint.conversion.work_items import Batch, BlockDigests, WorkItems
from reshard.checkpoint.copy_checks import expect_equal_copies
from reshard.checkpoint.deltas.delta_file import RECORD, DeltaWriter, encode_value
from reshard.checkpoint.deltas.encoding import EncodedBlock, compress, encode_block, word_bytes
from reshard.checkpoint.formats.format import Capability
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.formats.registry import find_format
from reshard.checkpoint.options import DiffOptions
from reshard.checkpoint.storage.filesystem import translate_os_errors
from reshard.checkpoint.storage.local_files import SourceFile
from reshard.checkpoint.storage.permissions import common_mode_bits
from reshard.checkpoint.storage.remote_files import choose_threads
from reshard.checkpoint.storage.threads import Progress, run_in_threads
from reshard.errors import UsageError
from reshard.runs import IntArray

if TYPE_CHECKING:
    from reshard.checkpoint.keywords import DiffArguments


class DeltaReport(Record):
    """A summary of a delta.

    `changed_bytes` is the size of the changed elements of tensors that keep their type and shape,
    `blocks` the number of blocks of all tensors afterwards, and `read_bytes` the number of bytes
    read from both checkpoints.
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


# A batch of compared blocks, their digests before and after, and their changes by position.
_ComparedBatch = tuple[Batch, list[bytes], list[bytes], list[tuple[int, EncodedBlock]]]


def diff(
    before: str | os.PathLike[str] | Checkpoint,
    after: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    options: DiffOptions | None = None,
    **arguments: Unpack[DiffArguments],
) -> DeltaReport:
    """Write the changes from one checkpoint to another as a file, which appears when complete.

    Args:
        before: the first checkpoint, or its path.
        after: the second checkpoint, or its path; of any sharding and format.
        out: the file of the delta.
        options: how it is written; or its fields as keywords (see `DiffOptions`).

    Raises:
        CheckpointError: a checkpoint cannot be used.
        UsageError: a file that exists; too small a memory limit; an unknown compression.
        DigestError: bytes that differ from the digests of a manifest.
        RunError: a file that cannot be read or written.
        MissingExtraError: xxhash or zstandard is needed and not installed.
    """
    began_s = time.monotonic()
    options = DiffOptions.of(options, arguments)
    if options.compression is not None:
        # Report a missing package before anything is written.
        compress(b"")
    a = before if isinstance(before, Checkpoint) else open_checkpoint(before)
    b = after if isinstance(after, Checkpoint) else open_checkpoint(after)
    a.expect_readable()
    b.expect_readable()
    a, b = expect_equal_copies(a), expect_equal_copies(b)
    creation = _Creation(a, b, options)
    workers = creation.threads()
    try:
        read = [side.path(file.name) for side in (a, b) for file in side.files]
        # A folder that others cannot enter protects even files with permissive modes, and the delta
        # may be outside of it: so the modes of the folders limit the delta's mode too.
        bits = common_mode_bits([a.folder, b.folder, *read])
        with DeltaWriter(out, overwrite=options.overwrite, open_bits=bits) as writer:
            creation.write_blocks(writer, workers)
            content = creation.describe(writer)
            writer.finish(content, creation.digests, creation.finished_records())
            return creation.report(writer, time.monotonic() - began_s)
    finally:
        creation.close()


class _Creation:
    """The creation of a delta; `kinds` has the kind of each tensor afterwards."""

    def __init__(self, a: Checkpoint, b: Checkpoint, options: DiffOptions) -> None:
        self.a, self.b, self._options = a, b, options
        before, after = TensorColumns.of(a.tensors), TensorColumns.of(b.tensors)
        check_used(
            "trust_digests",
            not options.trust_digests or before.digests is not None or after.digests is not None,
            "neither checkpoint has a manifest with digests",
        )
        self._files_a, self._files_b = open_sources(a), open_sources(b)
        self.kinds = list(_find_kinds(before, after))
        rest = {name for name, kind in zip(after.names, self.kinds, strict=True) if kind != "kept"}
        self._work_items = WorkItems(before, after, rest)
        self._old = BlockReader(before, self._files_a)
        self._new = BlockReader(after, self._files_b)
        self._blocks = BlockDigests(self._work_items)
        self._records: list[tuple[Any, ...]] = []
        self._sizes = (WorkspaceSize(0, 0), WorkspaceSize(0, 0))
        self.changed_bytes = 0
        self.notes: list[str] = []

    def _find_sizes(self, batch_bytes: int) -> tuple[WorkspaceSize, WorkspaceSize]:
        rows = self._work_items.source_rows
        return (
            self._old.workspace_size(rows[rows >= 0]).with_batches(batch_bytes),
            self._new.workspace_size().with_batches(batch_bytes),
        )

    def threads(self) -> int:
        """Return the number of threads that fit into memory, reducing batches if needed.

        Raises:
            UsageError: a limit too small for a single thread.
        """
        extra_bytes = self._options.extra_bytes
        batch_bytes = self._work_items.batched_bytes
        while True:
            self._sizes = before, after = self._find_sizes(batch_bytes)
            # Each thread has two blocks with their spans, memory for arithmetic, and a payload
            # waiting to be written.
            block_bytes = max(before.block_bytes, after.block_bytes)
            each = before.size_bytes + after.size_bytes + SCRATCH_BYTES + 2 * block_bytes
            if each <= extra_bytes:
                threads = choose_threads(self._options.threads, self.a.folder, self.b.folder)
                return min(extra_bytes // each, threads)
            if not batch_bytes:
                raise UsageError(
                    f"a memory limit of {extra_bytes} bytes; a thread needs {each} for a block of "
                    "the largest tensor, give at least that"
                )
            # Smaller batches take less memory; without batches, a thread has single blocks.
            batch_bytes //= 2

    def close(self) -> None:
        self._files_a.close()
        self._files_b.close()

    @property
    def digests(self) -> NDArray[np.uint8]:
        """The digests of all blocks afterwards, shape `(blocks, 16)`."""
        return self._blocks.found

    def _find_unknown(self) -> IntArray:
        """Return the blocks to compare; trusted digests show that the others are unchanged."""
        work_items, old, new = (
            self._work_items,
            self._old.columns.digests,
            self._new.columns.digests,
        )
        is_left = np.ones(work_items.count, dtype=bool)
        if self._options.trust_digests and old is not None and new is not None:
            rows = np.flatnonzero(work_items.source_rows >= 0)
            rows = rows[new.is_known(rows) & old.is_known(work_items.source_rows[rows])]
            is_both = np.zeros(len(work_items.target), dtype=bool)
            is_both[rows] = True
            numbers = np.flatnonzero(np.repeat(is_both, work_items.block_counts))
            before, after = old.take(work_items.source_rows[rows]).rows, new.take(rows).rows
            is_same = (before == after).all(axis=1)
            self._blocks.found[numbers[is_same]] = after[is_same]
            is_left[numbers[is_same]] = False
        return np.flatnonzero(is_left)

    def _look(self, batch: Batch, memory: WorkspacePair) -> _ComparedBatch:
        old_memory, new_memory = memory.first, memory.second
        if not batch.read:
            content, after = _read(self._new, batch.written, new_memory)
            none = [bytes(DIGEST_BYTES)] * len(after)
            pairs: list[tuple[memoryview | None, memoryview]] = [(None, block) for block in content]
            return batch, none, after, list(self._encode(batch, range(len(after)), pairs))
        if not self._options.trust_digests:
            content, after = _read(self._new, batch.written, new_memory)
            was, before = _read(self._old, batch.read, old_memory)
            return self._compare(batch, (was, before), (content, after))
        known_before = _list_known(self._old, batch.read)
        known_after = _list_known(self._new, batch.written)
        # Read the checkpoint without recorded digests first: if its digests are equal to the
        # recorded digests of the other, the other does not have to be read.
        if None in known_before and None not in known_after:
            was, before = _read(self._old, batch.read, old_memory)
            if before == known_after:
                return batch, before, before, []
            content, after = _read(self._new, batch.written, new_memory)
        else:
            content, after = _read(self._new, batch.written, new_memory)
            if after == known_before:
                return batch, after, after, []
            was, before = _read(self._old, batch.read, old_memory)
        return self._compare(batch, (was, before), (content, after))

    def _compare(
        self,
        batch: Batch,
        old: tuple[list[memoryview], list[bytes]],
        new: tuple[list[memoryview], list[bytes]],
    ) -> _ComparedBatch:
        """Encode the changes between the old and the new blocks of a batch with these digests."""
        (was, before), (content, after) = old, new
        changed = [at for at, digest in enumerate(after) if digest != before[at]]
        changes = self._encode(batch, changed, [(was[at], content[at]) for at in changed])
        return batch, before, after, list(changes)

    def _encode(
        self,
        batch: Batch,
        places: Sequence[int],
        blocks: Sequence[tuple[memoryview | None, memoryview]],
    ) -> Iterator[tuple[int, EncodedBlock]]:
        """Yield the changes of the blocks at some positions of a batch, from `(before, after)`."""
        columns = self._new.columns
        itemsizes_bytes = [
            columns.kinds[section.kind].dtype.itemsize_bytes
            for section in batch.written
            for _ in section.rows
        ]
        for at, (before, after) in zip(places, blocks, strict=True):
            change = encode_block(
                before, after, itemsizes_bytes[at], compressed=self._options.compression is not None
            )
            if change is not None:
                yield at, change

    def write_blocks(self, writer: DeltaWriter, threads: int) -> None:
        """Compare all blocks, and write the changes."""
        progress = self._options.progress
        total = int(self._work_items.target.tensor_bytes.sum())
        done = 0
        batches = self._work_items.batches(self._find_unknown(), self._sizes[0].batch_bytes)
        before, after = self._sizes
        results = run_in_threads(
            batches,
            self._look,
            lambda: WorkspacePair(before.new_workspace(), after.new_workspace()),
            threads,
        )
        try:
            for batch, digests_before, digests_after, changes in results:
                self._record(batch, digests_before, digests_after, changes, writer)
                done += batch.size_bytes
                if progress is not None:
                    progress(Progress(done, total, 0, self._work_items.last_name(batch)))
        finally:
            results.close()
        # A delta of files that changed while they were read would not fit either state.
        for source in (*self._files_a, *self._files_b):
            source.check_unchanged()

    def _record(
        self,
        batch: Batch,
        before: list[bytes],
        after: list[bytes],
        changes: list[tuple[int, EncodedBlock]],
        writer: DeltaWriter,
    ) -> None:
        numbers = batch.numbers
        self._blocks.note(numbers, b"".join(after))
        rows, _ = self._work_items.places(numbers)
        for at, change in changes:
            start = writer.append(change.payload)
            self._records.append(
                (
                    int(numbers[at]),
                    before[at],
                    start,
                    len(change.payload),
                    change.plain_bytes,
                    change.words,
                    change.coding,
                    change.flags,
                    0,
                )
            )
            row = int(rows[at])
            if self.kinds[row] == "kept":
                self.kinds[row] = "changed"
            if self.kinds[row] == "changed":
                element = self._new.columns.kinds[int(self._new.columns.kind[row])].dtype
                self.changed_bytes += change.words * word_bytes(element.itemsize_bytes)

    def finished_records(self) -> NDArray[Any]:
        """Return the records of the changed blocks, in order."""
        return np.sort(np.array(self._records, dtype=RECORD), order="block")

    def describe(self, writer: DeltaWriter) -> dict[str, Any]:
        """Return the JSON of the index; changed files and items are written to the payload."""
        columns, tensors = self._new.columns, []
        described = [[kind.dtype.name, list(kind.layout.shape)] for kind in columns.kinds]
        for name, kind, change in zip(
            columns.names, columns.kind.tolist(), self.kinds, strict=True
        ):
            row: list[Any] = [name, *described[kind], change]
            if change == "replaced":
                was = self.a.tensors[name]
                row += [was.dtype.name, list(was.shape)]
            tensors.append(row)
        content = {
            "tensors": tensors,
            "removed": [
                [name, self.a.tensors[name].dtype.name, list(self.a.tensors[name].shape)]
                for name in self._list_removed()
            ],
            "items": self._describe_items(writer),
            "files": self._describe_files(writer),
            "values": self._describe_values("values", Capability.VALUES),
            "metadata": self._describe_values("metadata", Capability.METADATA),
            "attributes": self._describe_values("attributes", Capability.ATTRIBUTES),
            "paths": {name: list(path) for name, path in self.b.paths.items()} or None,
            "compression": self._options.compression,
            "block_bytes": grid.BLOCK_BYTES,
        }
        return {**content, "notes": self.notes}

    def _list_removed(self) -> tuple[str, ...]:
        return tuple(name for name in self.a.tensors if name not in self.b.tensors)

    def _have_both(self, capability: Capability) -> bool:
        formats = [find_format(side.format) for side in (self.a, self.b)]
        return all(format is not None and capability in format.capabilities for format in formats)

    def _describe_values(self, what: str, capability: Capability) -> dict[str, Any] | None:
        """Return the second checkpoint's plain values, or None if a format cannot store them."""
        if not self._have_both(capability):
            return None
        own = find_format(self.b.format)
        format_keys = own.own_metadata if own is not None and what == "metadata" else frozenset()
        values = {}
        for name, value in getattr(self.b, what).items():
            if name in format_keys:
                continue
            try:
                values[name] = encode_value(value)
            except UsageError as error:
                self.notes.append(f"not in the delta: {name} ({error})")
        return values

    def _describe_items(self, writer: DeltaWriter) -> list[list[Any]] | None:
        if not self._have_both(Capability.ITEMS):
            return None
        rows = []
        for name, item in self.b.items.items():
            was = self.a.items.get(name)
            digest = item_digest(item, self._files_b)
            # An item without a start is unchanged: it is taken from the base.
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
            # A file without a start is unchanged: it is taken from the base.
            start = None
            if name not in self.a.carried or _digest_file(self.a.path(name)) != (digest, size):
                start = writer.payload_bytes
                with translate_os_errors("read another file", self.b.path(name)):
                    writer.append(self.b.path(name).read_bytes())
            rows.append([name, digest.hex(), size, start])
        return rows

    def report(self, writer: DeltaWriter, seconds_s: float) -> DeltaReport:
        """Return the summary."""

        def of_kind(kind: str) -> tuple[str, ...]:
            names = zip(self._new.columns.names, self.kinds, strict=True)
            return tuple(name for name, change in names if change == kind)

        files: tuple[SourceFile, ...] = (*self._files_a, *self._files_b)
        return DeltaReport(
            writer.path,
            len(self.kinds),
            of_kind("changed"),
            of_kind("added"),
            of_kind("replaced"),
            self._list_removed(),
            len(self.digests),
            len(self._records),
            self.changed_bytes,
            writer.payload_bytes,
            writer.path.stat().st_size,
            sum(file.read_bytes for file in files),
            seconds_s,
            tuple(self.notes),
        )


def _find_kinds(before: TensorColumns, after: TensorColumns) -> Iterator[str]:
    """Yield for each tensor afterwards `kept`, `replaced` or `added`, by headers."""
    numbers = before.kind.tolist()
    forms = [
        [(kind.dtype, kind.layout.shape) for kind in columns.kinds] for columns in (before, after)
    ]
    for name, kind in zip(after.names, after.kind.tolist(), strict=True):
        if name not in before:
            yield "added"
        else:
            is_same = forms[0][numbers[before.row(name)]] == forms[1][kind]
            yield "kept" if is_same else "replaced"


def _read(
    reader: BlockReader, sections: Sequence[Section], workspace: Workspace
) -> tuple[list[memoryview], list[bytes]]:
    """Return the blocks of sections, valid until the next call, and their digests.

    Raises:
        DigestError: bytes that differ from the bytes that were written.
        RunError: a file that cannot be read.
    """
    blocks, digests = reader.read_digested(sections, workspace)
    return [*itertools.chain.from_iterable(blocks)], [*itertools.chain.from_iterable(digests)]


def _list_known(reader: BlockReader, sections: Sequence[Section]) -> list[bytes | None]:
    """Return the recorded digests of the blocks of sections, with None for unknown digests."""
    recorded = reader.columns.digests
    return [
        None if recorded is None else recorded.of_block(row, section.block)
        for section in sections
        for row in section.rows.tolist()
    ]


def _digest_file(path: Path) -> tuple[bytes, int]:
    """Return the digest of a file's content, and its size."""
    digests, size = [], 0
    with translate_os_errors("read another file", path), path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digests.append(block_digest(piece))
            size += len(piece)
    return tensor_digest(digests).tensor, size
