"""Comparison of checkpoints: whether two hold the same tensors, bit for bit, however they are cut.

Both are read block by block in the tensors' own order, so cuts, formats and files do not
matter. Nothing is taken from manifests: the bytes are read, compared and digested.

1. Names, shapes and dtypes are compared without reading.
2. Threads read the blocks of the tensors that both have, compare and digest them.
3. Items that are not tensors are compared by their digests, if both formats can hold such.

`check_digests` reads one checkpoint in the same way, and compares its digests with those that
its manifest recorded, and its bytes with the checksums that files have of their own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from reshard.binding import FileRange
from reshard.checkpoint.blocks.block_io import BlockReader, OpenFiles, Workspace, open_sources
from reshard.checkpoint.blocks.grid import BlockGrid, block_digest, tensor_digest
from reshard.checkpoint.blocks.tiles import target_tiles
from reshard.checkpoint.changes.computed import ComputedReader
from reshard.checkpoint.contents import Checkpoint, StoredChecksum
from reshard.checkpoint.conversion.conversion import DEFAULT_THREADS, Conversion
from reshard.checkpoint.conversion.file_checksums import (
    damaged_ranges,
    item_digest,
    source_checksums,
)
from reshard.checkpoint.files.pipeline import run_in_threads
from reshard.checkpoint.files.progress import Progress, ProgressFunction
from reshard.checkpoint.files.source_file import SourceFile
from reshard.checkpoint.formats.format import Holding
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.formats.registry import find_format
from reshard.checkpoint.training.plain_state import decode_items, in_plain_values
from reshard.errors import FormatError

Compared = str | os.PathLike[str] | Checkpoint | Conversion


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that differs, and how. `elements` counts those whose bits differ, if known."""

    name: str
    problem: str
    elements: int | None = None
    first_index: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome: `is_same`, the differences, and a digest of every tensor that is the same."""

    differences: tuple[Difference, ...]
    digests: dict[str, str]
    compared_bytes: int

    @property
    def is_same(self) -> bool:
        """Whether both hold the same tensors, bit for bit."""
        return not self.differences


@dataclass(frozen=True, slots=True)
class DamagedBlock:
    """A block whose bytes are not those that were written, and the bytes of the files it is in.

    `expected` and `found` are digests; a compressed archive that cannot be unpacked has none, but
    a `problem`.
    """

    tensor: str
    box: str
    expected: str
    found: str
    places: tuple[str, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DigestReport:
    """Digests of the tensors as found, those without a recorded digest, and damaged blocks.

    A tensor with a part that cannot be unpacked has no digest.
    """

    digests: dict[str, str]
    without_digest: tuple[str, ...]
    damaged: tuple[DamagedBlock, ...]
    read_bytes: int


class _PairWorkspace:
    """The memory of one thread that reads two checkpoints."""

    def __init__(self, left: Workspace, right: Workspace) -> None:
        self.left = left
        self.right = right

    def close(self) -> None:
        self.left.close()
        self.right.close()


class _Side:
    """One of two that are compared: a checkpoint, or what a conversion would write."""

    def __init__(self, given: Compared) -> None:
        self._conversion = given if isinstance(given, Conversion) else None
        if isinstance(given, Conversion):
            self.checkpoint = given.source
        else:
            self.checkpoint = given if isinstance(given, Checkpoint) else open_checkpoint(given)
        self.files = open_sources(self.checkpoint)
        self.reader = lru_cache(maxsize=64)(self._open_reader)

    def _open_reader(self, name: str) -> BlockReader | ComputedReader:
        if self._conversion is not None and name in self._conversion.computed:
            return ComputedReader(self._conversion.computed[name], self.files)
        return BlockReader(self.checkpoint[name], self.files)

    def read(self, name: str, block: int, memory: Workspace) -> memoryview:
        """The bytes of a block, valid until the next call."""
        reader = self.reader(name)
        if isinstance(reader, ComputedReader):
            return reader.read_checked(block, memory)[0]
        return reader.read(block, memory)

    def new_workspace(self, names: list[str]) -> Workspace:
        """The memory of one thread that reads these tensors."""
        if self._conversion is not None:
            return self._conversion.new_workspace(0)
        return Workspace(*_find_workspace_sizes(self.checkpoint, names))


def compare(
    left: Compared,
    right: Compared,
    *,
    threads: int = DEFAULT_THREADS,
    progress: ProgressFunction | None = None,
) -> Comparison:
    """Compare two checkpoints bit for bit, and what is no tensor if both can hold such.

    Args:
        left, right: checkpoints, or where they are; a planned conversion stands for the tensors
            that it would write, other elements included.
        threads: at most so many at a time.
        progress: called after every block.

    Raises:
        CheckpointError: one of them cannot be used.
        RunError: a file cannot be read.
    """
    sides = (_Side(left), _Side(right))
    a, b = sides[0].checkpoint, sides[1].checkpoint
    differences = _compare_descriptions(a, b)
    unequal = {difference.name for difference in differences}
    names = [name for name in a.tensors if name in b.tensors and name not in unequal]
    total = sum(a[name].size_bytes for name in names)
    files_a, files_b = sides[0].files, sides[1].files

    def work(task: tuple[str, int], memory: _PairWorkspace) -> tuple[str, int, bytes, int, int]:
        name, block = task
        bytes_a = sides[0].read(name, block, memory.left)
        bytes_b = sides[1].read(name, block, memory.right)
        digest = block_digest(bytes_a)
        if bytes_a == bytes_b:
            return name, block, digest, 0, -1
        # Bytes, not values: 0.0 and -0.0 differ, and a NaN equals itself. A row below is an
        # element.
        differ = np.frombuffer(bytes_a, np.uint8) != np.frombuffer(bytes_b, np.uint8)
        elements = differ.reshape(-1, a[name].dtype.itemsize_bytes).any(axis=1)
        return name, block, digest, int(elements.sum()), int(np.argmax(elements))

    def new_memory() -> _PairWorkspace:
        return _PairWorkspace(*(side.new_workspace(names) for side in sides))

    blocks: dict[str, dict[int, bytes]] = {name: {} for name in names}
    found: dict[str, tuple[int, int, int]] = {}
    done = 0
    results = run_in_threads(_list_tasks(a, names), work, new_memory, threads)
    try:
        holds_values = all(_can_hold(one.format, Holding.VALUES) for one in (a, b))
        # One may have pickles of what the other has as values, or of parts of it.
        if holds_values and {*a.items} != {*b.items}:
            differences += _compare_values(in_plain_values(a), in_plain_values(b))
        else:
            differences += _compare_items(a, b, files_a, files_b)
            differences += _compare_values(a, b) if holds_values else ()
        for name, block, digest, count, first in results:
            blocks[name][block] = digest
            if count:
                # Blocks come in the order they are finished: the smallest (block, place) is the
                # first.
                before, first_block, first_at = found.get(name, (0, math.inf, 0))
                earliest = min((first_block, first_at), (block, first))
                found[name] = (before + count, int(earliest[0]), int(earliest[1]))
            done += sides[0].reader(name).grid.size_bytes(block)
            if progress is not None:
                progress(Progress(done, total, 0, name))
    finally:
        # The threads end before the files they read are closed.
        results.close()
        files_a.close()
        files_b.close()
    # From the place in the block to the index in the tensor.
    for name, (count, block, at) in found.items():
        box = BlockGrid.of(a[name].shape, a[name].dtype.itemsize_bytes).box(block)
        offset = np.unravel_index(at, box.shape) if box.shape else ()
        index = tuple(int(s + o) for s, o in zip(box.start, offset, strict=True))
        problem = (
            f"{count} of {math.prod(a[name].shape)} elements differ, the first at {list(index)}"
        )
        differences.append(Difference(name, problem, count, index))
    digests = {
        name: tensor_digest(blocks[name][i] for i in range(len(blocks[name]))).tensor.hex()
        for name in names
        if name not in found
    }
    return Comparison(tuple(differences), digests, done)


def _compare_descriptions(a: Checkpoint, b: Checkpoint) -> list[Difference]:
    """Differences in names, shapes and dtypes, found without reading any bytes."""
    differences = []
    for name in [*a.tensors, *(name for name in b.tensors if name not in a.tensors)]:
        if name not in b.tensors:
            differences.append(Difference(name, f"is only in {a.folder}"))
        elif name not in a.tensors:
            differences.append(Difference(name, f"is only in {b.folder}"))
        elif a[name].shape != b[name].shape:
            shapes = f"{list(a[name].shape)} and {list(b[name].shape)}"
            differences.append(Difference(name, f"has shapes {shapes}"))
        elif a[name].dtype is not b[name].dtype:
            dtypes = f"{a[name].dtype.name} and {b[name].dtype.name}"
            differences.append(Difference(name, f"has dtypes {dtypes}"))
    return differences


def _list_tasks(checkpoint: Checkpoint, names: list[str]) -> Iterator[tuple[str, int]]:
    for name in names:
        tensor = checkpoint[name]
        for block in range(BlockGrid.of(tensor.shape, tensor.dtype.itemsize_bytes).count):
            yield name, block


def _find_workspace_sizes(checkpoint: Checkpoint, names: list[str]) -> tuple[int, int]:
    block = span = 0
    files = open_sources(checkpoint)
    for name in names:
        reader = BlockReader(checkpoint[name], files)
        block = max(block, reader.grid.largest_bytes)
        span = max(span, reader.span_bytes)
    return block, span


def check_digests(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    threads: int = DEFAULT_THREADS,
    progress: ProgressFunction | None = None,
) -> DigestReport:
    """Digest every tensor, and compare with the digests that the manifest recorded.

    Compressed archives are unpacked first; tensors with one that is damaged are not read further.

    Raises:
        CheckpointError: a checkpoint that cannot be used.
        RunError: a file that cannot be read.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    names = list(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        # The manifest must agree with itself before it is compared with anything.
        if tensor.digest is not None and tensor_digest(tensor.digest.blocks) != tensor.digest:
            raise FormatError(
                f"{checkpoint.folder}: the manifest's digest of {name!r} is not that of its "
                "blocks' digests; the manifest was damaged or edited"
            )
    files = open_sources(checkpoint)
    damaged: list[DamagedBlock] = []
    try:
        damaged += _find_damaged_sources(checkpoint, files, threads)
    except BaseException:
        files.close()
        raise
    # What cannot be unpacked has no bytes to digest.
    unreadable = {block.tensor for block in damaged}
    names = [name for name in names if name not in unreadable]
    # The files' own checksums are found in passing, for tensors without a digest.
    own = [one for one in checkpoint.checksums if one.tensor in names]
    seen = source_checksums(own)
    watch = seen.add if own else None
    readers = lru_cache(maxsize=64)(lambda name: BlockReader(checkpoint[name], files, watch))
    sizes = _find_workspace_sizes(checkpoint, names)
    total = sum(checkpoint[name].size_bytes for name in names)

    def work(task: tuple[str, int], memory: Workspace) -> tuple[str, int, bytes]:
        name, block = task
        return name, block, block_digest(readers(name).read(block, memory))

    blocks: dict[str, dict[int, bytes]] = {name: {} for name in names}
    done = 0
    results = run_in_threads(
        _list_tasks(checkpoint, names), work, lambda: Workspace(*sizes), threads
    )
    try:
        for name, block, digest in results:
            blocks[name][block] = digest
            done += readers(name).grid.size_bytes(block)
            if progress is not None:
                progress(Progress(done, total, 0, name))
        damaged += [
            _describe_damaged_range(one, found) for one, found in damaged_ranges(own, seen, files)
        ]
        damaged += _find_damaged_items(checkpoint, files)
    finally:
        results.close()
        files.close()
    for name in names:
        recorded = checkpoint[name].digest
        for block in range(len(blocks[name])) if recorded else ():
            if recorded and blocks[name][block] != recorded.blocks[block]:
                reader = readers(name)
                box = reader.grid.box(block)
                damaged.append(
                    DamagedBlock(
                        name,
                        str(box),
                        recorded.blocks[block].hex(),
                        blocks[name][block].hex(),
                        reader.places(block),
                    )
                )
    digests = {
        name: tensor_digest(blocks[name][i] for i in range(len(blocks[name]))).tensor.hex()
        for name in names
    }
    without = tuple(name for name in checkpoint if checkpoint[name].digest is None)
    return DigestReport(digests, without, tuple(damaged), done)


def _find_damaged_sources(
    checkpoint: Checkpoint, files: OpenFiles[SourceFile], threads: int
) -> list[DamagedBlock]:
    """The parts of tensors in derived files whose source, such as an archive, is damaged."""

    def work(task: tuple[str, str, FileRange], memory: Workspace) -> DamagedBlock | None:
        name, box, place = task
        found = files[place.path].find_damage(place.start_bytes)
        if found is None:
            return None
        stop_bytes = found.start_bytes + found.size_bytes
        where = f"{found.name} bytes {found.start_bytes}:{stop_bytes}"
        return DamagedBlock(name, box, "", "", (where,), found.problem)

    def tasks() -> Iterator[tuple[str, str, FileRange]]:
        for name, tensor in checkpoint.tensors.items() if checkpoint.derived else ():
            for tile in target_tiles(tensor.stored_layout).tiles:
                place = tensor.file_range(tile.slot, tile.number, tile.offset)
                if place.path in checkpoint.derived and tile.bounds.elements:
                    yield name, str(tile.bounds), place

    results = run_in_threads(tasks(), work, lambda: Workspace(0, 0), threads)
    # Threads finish in any order; the report is in that of the checkpoint.
    order = {name: number for number, name in enumerate(checkpoint)}
    damaged = [block for block in results if block is not None]
    return sorted(damaged, key=lambda block: (order[block.tensor], block.places))


def _find_damaged_items(checkpoint: Checkpoint, files: OpenFiles[SourceFile]) -> list[DamagedBlock]:
    """The items whose digest differs from the recorded one."""
    damaged = []
    for name, item in checkpoint.items.items():
        found = item_digest(item, files) if item.digest is not None else None
        if item.digest is not None and found is not None and item.digest != found:
            start = item.place.start_bytes
            place = f"{item.place.path} bytes {start}:{start + item.size_bytes}"
            what = "the bytes"
            damaged.append(DamagedBlock(name, what, item.digest.hex(), found.hex(), (place,)))
    return damaged


def _compare_items(
    a: Checkpoint, b: Checkpoint, files_a: OpenFiles[SourceFile], files_b: OpenFiles[SourceFile]
) -> list[Difference]:
    """Differences in items that are not tensors, if both formats can hold such."""
    # A format that holds tensors only has lost the items by its nature: that is no difference.
    if not all(_can_hold(checkpoint.format, Holding.ITEMS) for checkpoint in (a, b)):
        return []
    differences = []
    for name in [*a.items, *(name for name in b.items if name not in a.items)]:
        if name not in a.items or name not in b.items:
            folder = a.folder if name in a.items else b.folder
            differences.append(Difference(name, f"is only in {folder}"))
        elif item_digest(a.items[name], files_a) != item_digest(b.items[name], files_b):
            # A value may be pickled in several ways; as many bytes that differ are damage.
            is_as_long = a.items[name].size_bytes == b.items[name].size_bytes
            (left, _), (right, _) = decode_items(a, [name]), decode_items(b, [name])
            if is_as_long or not left or repr(left) != repr(right):
                differences.append(Difference(name, "is no tensor, and has other bytes"))
    return differences


def _compare_values(a: Checkpoint, b: Checkpoint) -> list[Difference]:
    """Differences in plain values beside the tensors."""
    differences = []
    # Formats keep a list as one value, or each of what is in it.
    left, right = dict(_list_leaves(a.values)), dict(_list_leaves(b.values))
    for name in [*left, *(name for name in right if name not in left)]:
        if name not in left or name not in right:
            folder = a.folder if name in left else b.folder
            differences.append(Difference(name, f"is only in {folder}"))
        # By their texts: a NaN is equal to itself, and True is not 1.
        elif repr(left[name]) != repr(right[name]):
            differences.append(Difference(name, f"is {left[name]!r} and {right[name]!r}"))
    return differences


def _list_leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What lists and dicts have in them, by its path; empty ones are values themselves."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, list | tuple) and value:
            yield from _list_leaves(dict(enumerate(value)), f"{path}.")
        elif isinstance(value, dict) and value:
            yield from _list_leaves(value, f"{path}.")
        else:
            yield path, value


def _can_hold(name: str, what: Holding) -> bool:
    format = find_format(name)
    return format is not None and what in format.can_hold


def _describe_damaged_range(one: StoredChecksum, found: int) -> DamagedBlock:
    """A range of a file that contradicts the file's own checksum, as a damaged block."""
    start = one.place.start_bytes
    place = f"{one.place.path} bytes {start}:{start + one.size_bytes}"
    return DamagedBlock(one.tensor, one.part, f"{one.crc32:08x}", f"{found:08x}", (place,))
