"""Comparison of checkpoints: whether two hold the same tensors, bit for bit, in any sharding.

Both checkpoints are read block by block in the tensors' row-major order, with the blocks of small
tensors in batches, so shardings, formats and files do not matter. Manifests are not relied on: the
bytes are read, compared and digested.

1. Names, shapes and dtypes are compared without reading.
2. Threads read, compare and digest the blocks of the tensors that both checkpoints have.
3. Items that are not tensors are compared by their digests, if both formats can store such items.
4. The comparison reads a single copy of each element, so copies within a checkpoint that differ
   from each other are reported as differences too (`copy_checks`).

`check_digests` reads a single checkpoint in the same way. It compares the digests with the
manifest's, the bytes with the checksums that the files contain, and copies with each other.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Unpack

import numpy as np

from reshard._records import Record
from reshard.binding import FileRange
from reshard.checkpoint.blocks.block_io import (
    BlockMemory,
    BlockReader,
    OpenFiles,
    Section,
    Workspace,
    WorkspacePair,
    open_sources,
)
from reshard.checkpoint.blocks.grid import DIGEST_BYTES, block_digest, tensor_digest
from reshard.checkpoint.blocks.spans import target_tiles
from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.changes.computed_tensors import ComputedReader
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.checkpoint.conversion.checksums import damaged_ranges, item_digest, source_checksums
from reshard.checkpoint.conversion.conversion import Conversion
from reshard.checkpoint.conversion.work_items import Batch, BlockDigests, WorkItems
from reshard.checkpoint.copy_checks import compare_copies
from reshard.checkpoint.formats.format import Capability
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.checkpoint.formats.registry import find_format
from reshard.checkpoint.naming.selection import TensorSelection, select_from
from reshard.checkpoint.options import AUTO, CompareOptions
from reshard.checkpoint.storage.byte_ranges import split_equal_steps, strided_arrays
from reshard.checkpoint.storage.local_files import SourceFile
from reshard.checkpoint.storage.remote_files import choose_threads
from reshard.checkpoint.storage.threads import Progress, ProgressFunction, run_in_threads
from reshard.checkpoint.training.plain_state import decode_items, differing_values, in_plain_values
from reshard.errors import FormatError, UsageError
from reshard.recipes.overrides import DIFFERING_COPIES

if TYPE_CHECKING:
    from reshard.checkpoint.keywords import CompareArguments

Compared = str | os.PathLike[str] | Checkpoint | Conversion


class Difference(Record):
    """A tensor or value that differs, and how it differs.

    `elements` is the number of elements whose bits differ, if known.
    """

    name: str
    problem: str
    elements: int | None = None
    first_index: tuple[int, ...] | None = None
    is_tensor: bool = True

    @property
    def kind(self) -> str:
        """The kind of difference, for counts: `only in a`, `with other elements`.

        >>> Difference("w", "has shapes [2] and [3]").kind
        'of other shapes'
        """
        if self.elements is not None:
            return "with other elements"
        if self.problem.startswith("is only in "):
            return self.problem.removeprefix("is ")
        kinds = {
            "has shapes ": "of other shapes",
            "has dtypes ": "of other dtypes",
            "has copies ": "with copies that differ",
            "of ": "unreadable",
        }
        matching = (kind for start, kind in kinds.items() if self.problem.startswith(start))
        return next(matching, "with other values")


class Comparison(Record):
    """The outcome: `is_same`, the differences, a digest of every tensor that is the same, and
    notes, such as about copies that were not compared."""

    differences: tuple[Difference, ...]
    digests: dict[str, str]
    compared_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether both hold the same tensors, bit for bit."""
        return not self.differences


class DamagedBlock(Record):
    """A block whose bytes are not those that were written, and the ranges of files that hold it.

    `expected` and `found` are digests. A compressed archive that cannot be unpacked, and copies
    that differ from each other, have a `problem` instead of digests.
    """

    tensor: str
    box: str
    expected: str
    found: str
    places: tuple[str, ...]
    problem: str = ""


class DigestReport(Record):
    """The digests of tensors, the tensors without a recorded digest, and damaged blocks.

    A tensor with a part that cannot be unpacked does not have a digest.
    """

    digests: dict[str, str]
    without_digest: tuple[str, ...]
    damaged: tuple[DamagedBlock, ...]
    read_bytes: int


class _Side:
    """A side of a comparison: a checkpoint, or the tensors that a conversion would write."""

    def __init__(self, compared: Compared) -> None:
        self.conversion = compared if isinstance(compared, Conversion) else None
        if isinstance(compared, Conversion):
            self.checkpoint = compared.source
        else:
            self.checkpoint = (
                compared if isinstance(compared, Checkpoint) else open_checkpoint(compared)
            )
        self.computed = {} if self.conversion is None else self.conversion.computed
        self.files = open_sources(self.checkpoint)
        self.columns = TensorColumns.of(self.checkpoint.tensors)
        self._reader = BlockReader(self.columns, self.files)
        # Blocks are read in the order of the tensors, so few computed tensors are in use at a time.
        self._computed = lru_cache(maxsize=64)(self._open_computed)

    def _open_computed(self, name: str) -> ComputedReader:
        return ComputedReader(self.computed[name], self.files)

    def sections_of(self, columns: TensorColumns, sections: Sequence[Section]) -> list[Section]:
        """Return the sections of the same names here for sections of the other's columns."""
        rows = [self.columns.rows([columns.names[int(section.rows[0])]]) for section in sections]
        return [
            Section(int(self.columns.kind[row[0]]), row, section.block)
            for row, section in zip(rows, sections, strict=True)
        ]

    def read(self, sections: Sequence[Section], memory: Workspace) -> list[BlockMemory]:
        """Return the blocks of sections, valid until the next call."""
        name = self.columns.names[int(sections[0].rows[0])]
        if name not in self.computed:
            return self._reader.read(sections, memory)
        block, _ = self._computed(name).read_checked(sections[0].block, memory)
        return [BlockMemory(block, np.zeros(1, np.int64), block.nbytes)]

    def new_workspace(self, names: list[str], batch_bytes: int) -> Workspace:
        """Return the memory of a thread that reads these tensors."""
        if self.conversion is not None:
            return self.conversion.workspace_size(0).new_workspace()
        rows = self.columns.rows(names)
        return self._reader.workspace_size(rows).with_batches(batch_bytes).new_workspace()


def compare(
    left: Compared,
    right: Compared,
    options: CompareOptions | None = None,
    **arguments: Unpack[CompareArguments],
) -> Comparison:
    """Compare two checkpoints bit for bit, and their other values if both formats have such.

    Args:
        left, right: checkpoints, or their locations; a planned conversion stands for the tensors
            that it would write, including changed elements.
        options: which tensors are compared, under which names; or its fields as keywords (see
            `CompareOptions`).

    Raises:
        CheckpointError: a checkpoint cannot be used.
        RecipeError: names of a recipe that do not fit.
        UsageError: a prefix or pattern that no tensor has; options for the names or elements of a
            planned conversion.
        RunError: a file cannot be read.
    """
    options = CompareOptions.of(options, arguments)
    progress = options.progress
    left, right = _select_both(left, right, options.selection)
    left, right = _name_both(left, right, options)
    sides = (_Side(_change(left, options)), _Side(right))
    a, b = sides[0].checkpoint, sides[1].checkpoint
    threads = choose_threads(options.threads, a.folder, b.folder)
    mine, others = sides[0].columns, sides[1].columns
    differences = _compare_descriptions(a, b, mine, others)
    unequal = {difference.name for difference in differences}
    files_a, files_b = sides[0].files, sides[1].files
    rows = np.flatnonzero([name in others and name not in unequal for name in mine.names])
    computed = {*sides[0].computed, *sides[1].computed}
    only = (name for name in mine.names if name not in others)
    blocks = BlockDigests(WorkItems(others, mine, {*unequal, *computed, *only}))
    # Computed tensors are compared block by block, in the conversion's own memory.
    is_stored = all(side.conversion is None for side in sides)
    batch_bytes = blocks.work_items.batched_bytes if is_stored else 0

    def work(
        batch: Batch, memory: WorkspacePair
    ) -> tuple[Batch, bytes, list[tuple[int, int, int]]]:
        """Return the digests of a batch, and for each differing block its number, the number of its
        differing elements, and the first of them.
        """
        read_a = sides[0].read(batch.written, memory.first)
        # A batch of tensors that a side computes does not have sections to read.
        sections = batch.read or sides[1].sections_of(mine, batch.written)
        read_b = sides[1].read(sections, memory.second)
        digests = b"".join(
            block_digest(block) for section_blocks in read_a for block in section_blocks
        )
        unlike, first = [], 0
        for section, left, right in zip(batch.written, read_a, read_b, strict=True):
            itemsize = mine.kinds[section.kind].dtype.itemsize_bytes
            for at, elements, begin in _find_unlike(left, right, itemsize):
                unlike.append((int(batch.numbers[first + at]), elements, begin))
            first += len(section.rows)
        return batch, digests, unlike

    def new_memory() -> WorkspacePair:
        names = [mine.names[row] for row in rows.tolist()]
        return WorkspacePair(*(side.new_workspace(names, batch_bytes) for side in sides))

    first_differences: dict[int, tuple[int, int, int]] = {}
    total, done = int(mine.tensor_bytes[rows].sum()), 0
    numbers = blocks.work_items.blocks_of(rows)
    batches = blocks.work_items.batches(numbers, batch_bytes)
    results = run_in_threads(batches, work, new_memory, threads)
    try:
        # Some formats can only store tensors: then missing values are not a difference.
        holds_items = all(_can_hold(item.format, Capability.ITEMS) for item in (a, b))
        holds_values = all(_can_hold(item.format, Capability.VALUES) for item in (a, b))
        # A format may pickle a whole value that another stores plainly or in parts: unpickle both.
        if holds_values and {*a.items} != {*b.items}:
            a, b = in_plain_values(a), in_plain_values(b)
        elif holds_items:
            differences += _compare_items(a, b, files_a, files_b)
        if holds_values:
            differences += [
                Difference(*difference, is_tensor=False) for difference in differing_values(a, b)
            ]
        for batch, digests_of_batch, unlike in results:
            blocks.note(batch.numbers, digests_of_batch)
            for number, count, first in unlike:
                (row,), (block,) = (
                    column.tolist() for column in blocks.work_items.places(np.array([number]))
                )
                # Blocks arrive in the order in which they are finished, so the first difference is
                # the smallest (block, element).
                before, first_block, first_at = first_differences.get(row, (0, math.inf, 0))
                earliest = min((first_block, first_at), (block, first))
                first_differences[row] = (before + count, int(earliest[0]), int(earliest[1]))
            done += batch.size_bytes
            if progress is not None:
                progress(Progress(done, total, 0, blocks.work_items.last_name(batch)))
    finally:
        # Stop the threads before closing the files that they read.
        results.close()
        files_a.close()
        files_b.close()
    # Convert offsets in blocks to indices in tensors.
    for row, (count, block, at) in first_differences.items():
        name, shape = mine.names[row], mine.kinds[int(mine.kind[row])].layout.shape
        box = blocks.work_items.grids[int(mine.kind[row])].box(block)
        offset = np.unravel_index(at, box.shape) if box.shape else ()
        index = tuple(int(s + o) for s, o in zip(box.start, offset, strict=True))
        problem = f"{count} of {math.prod(shape)} elements differ, the first at {list(index)}"
        differences.append(Difference(name, problem, count, index))
    # Only tensors that are the same in both checkpoints have a digest in the result.
    digests = blocks.digests(row for row in rows.tolist() if row not in first_differences)
    copies, notes = _compare_copies([side.checkpoint for side in sides if side.conversion is None])
    for copy in copies:
        digests.pop(copy.name, None)
    return Comparison((*differences, *copies), digests, done, tuple(notes))


def _open(side: Compared, option: str) -> Checkpoint:
    """Return the checkpoint of a side to which an option applies."""
    if isinstance(side, Conversion):
        raise UsageError(f"{option} for a conversion; give it to what plans that")
    return side if isinstance(side, Checkpoint) else open_checkpoint(side)


def _select_both(
    left: Compared, right: Compared, selection: TensorSelection
) -> tuple[Compared, Compared]:
    """Return the selected parts of both sides."""
    if not selection:
        return left, right
    option = " ".join(f"{name} {value!r}" for name, value in selection.to_json().items())
    left = select_from(_open(left, option), selection)
    # Names that change select from the left side only: the right has the new names already.
    if not selection.changes_names:
        # A name that only one side has is a difference, not a mistake in the pattern.
        right = select_from(_open(right, option), selection, is_expected=False)
    return left, right


def _name_both(
    left: Compared, right: Compared, options: CompareOptions
) -> tuple[Compared, Compared]:
    """Return both sides in the recipe's names, if options are about names."""
    if not options.is_by_recipe:
        return left, right
    from reshard.checkpoint.conversion.plan import find_recipe
    from reshard.checkpoint.formats.opening import read_config
    from reshard.checkpoint.naming.renaming import find_stacked_names, in_recipe_names, names_of

    names_by_option = {"left_names": options.left_names, "right_names": options.right_names}
    opened = [_open(left, "left_names or recipe"), _open(right, "right_names or recipe")]
    # Tables of names need no recipe, and no config.
    is_by_recipe = options.recipe is not None or str in map(type, names_by_option.values())
    configs = [read_config(checkpoint) if is_by_recipe else None for checkpoint in opened]
    # Both checkpoints are of the same model: if the first lacks a config.json, use the second's.
    with_config = opened[1] if configs[0] is None and configs[1] is not None else opened[0]
    recipe = find_recipe(options.recipe or AUTO, with_config) if is_by_recipe else None
    renamed = []
    for option, checkpoint, config in zip(names_by_option, opened, configs, strict=True):
        other = next((item for item in (config, *configs) if item is not None), None)
        named = names_of(option, names_by_option[option], recipe, other)
        if named is None:
            named = find_stacked_names(checkpoint, recipe, other)
        renamed.append(checkpoint if named is None else in_recipe_names(checkpoint, named[1]))
    return renamed[0], renamed[1]


def _change(left: Compared, options: CompareOptions) -> Compared:
    """Return the left side, or the conversion that changes its elements as options specify."""
    if not options.changes:
        return left
    from reshard.checkpoint.conversion.plan import plan_conversion, unwritten_target

    name, value = next(iter(options.changes.items()))
    opened = _open(left, f"{name} {value!r}")
    return plan_conversion(opened, unwritten_target(opened.folder), to="full", **options.changes)


def _compare_copies(checkpoints: Sequence[Checkpoint]) -> tuple[list[Difference], list[str]]:
    """Return the copies that differ within a checkpoint, and notes about copies not compared."""
    differences, notes = [], []
    for checkpoint in checkpoints:
        report = compare_copies(checkpoint, reads_recorded=True)
        texts = [f"copies in {checkpoint.folder}: {difference}" for difference in report.differing]
        if DIFFERING_COPIES in checkpoint.allowed:
            notes += texts
        else:
            how: dict[str, list[str]] = {}
            for difference in report.differing:
                how.setdefault(difference.tensor, []).append(difference.how)
            differences += [
                Difference(
                    name, f"has copies that differ in {checkpoint.folder}: {'; '.join(parts[:4])}"
                )
                for name, parts in how.items()
            ]
        notes += [f"{checkpoint.folder}: {note}" for note in report.describe()]
    return differences, notes


def _find_unlike(
    left: BlockMemory, right: BlockMemory, itemsize_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Return the differing blocks of a section: row, number of elements, and the first of them."""
    size = left.size_bytes
    for a, b in split_equal_steps(left.at, right.at):
        # Bytes, not values: 0.0 and -0.0 differ, and a NaN equals itself. A row is a block.
        mine = strided_arrays(left.memory, np.dtype(np.uint8), (size,), left.at[a:b])
        others = strided_arrays(right.memory, np.dtype(np.uint8), (size,), right.at[a:b])
        for at in np.flatnonzero((mine != others).any(axis=1)).tolist():
            differ = (mine[at] != others[at]).reshape(-1, itemsize_bytes).any(axis=1)
            yield a + at, int(differ.sum()), int(np.argmax(differ))


def _compare_descriptions(
    a: Checkpoint, b: Checkpoint, mine: TensorColumns, others: TensorColumns
) -> list[Difference]:
    """List differences in names, shapes and dtypes, without reading any bytes."""

    # Tensors of the same kind on both sides share a comparison.
    @cache
    def compare_kinds(left: int, right: int) -> str | None:
        kinds = mine.kinds[left], others.kinds[right]
        shapes = [list(kind.layout.shape) for kind in kinds]
        if shapes[0] != shapes[1]:
            return f"has shapes {shapes[0]} and {shapes[1]}"
        if kinds[0].dtype is not kinds[1].dtype:
            return f"has dtypes {kinds[0].dtype.name} and {kinds[1].dtype.name}"
        return None

    differences = [
        Difference(name, f"of {item.folder} cannot be read: it is {why}")
        for item in (a, b)
        for name, why in item.unreadable.items()
    ]
    unreadable = {*a.unreadable, *b.unreadable}
    right_kinds = others.kind.tolist()
    for name, kind in zip(mine.names, mine.kind.tolist(), strict=True):
        if name in unreadable:
            continue
        if name not in others:
            differences.append(Difference(name, f"is only in {a.folder}"))
            continue
        problem = compare_kinds(kind, right_kinds[others.row(name)])
        if problem is not None:
            differences.append(Difference(name, problem))
    only = (name for name in others.names if name not in mine and name not in unreadable)
    return differences + [Difference(name, f"is only in {b.folder}") for name in only]


def check_digests(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
) -> DigestReport:
    """Digest every tensor, and compare with the digests that the manifest recorded.

    Compressed archives are unpacked first; tensors with a damaged archive are not read further.

    Raises:
        CheckpointError: a checkpoint that cannot be used.
        RunError: a file that cannot be read.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    threads = choose_threads(threads, checkpoint.folder)
    columns = TensorColumns.of(checkpoint.tensors)
    recorded = columns.digests
    has_digest = [False] * len(columns)
    if recorded is not None:
        for row, name in enumerate(columns.names):
            digest = recorded.of(row)
            has_digest[row] = digest is not None
            # The manifest must be consistent before anything is compared with it.
            if digest is not None and tensor_digest(digest.blocks) != digest:
                raise FormatError(
                    f"{checkpoint.folder}: the manifest's digest of {name!r} is not that of its "
                    "blocks' digests; the manifest was damaged or edited"
                )
    files = open_sources(checkpoint)
    try:
        damaged = _find_damaged_sources(checkpoint, files, threads)
    except BaseException:
        files.close()
        raise
    # Parts that cannot be unpacked have no bytes to digest.
    unreadable = {block.tensor for block in damaged}
    rows = np.flatnonzero([name not in unreadable for name in columns.names])
    # The checksums that files contain are compared with the bytes that are read anyway.
    checksums = [
        checksum
        for checksum in checkpoint.checksums
        if checksum.tensor in columns and checksum.tensor not in unreadable
    ]
    seen = source_checksums(checksums)
    reader = BlockReader(columns, files, seen.add if checksums else None)
    blocks = BlockDigests(WorkItems(columns, columns))

    def work(batch: Batch, memory: Workspace) -> tuple[Batch, bytes]:
        read = reader.read(batch.read, memory)
        return batch, b"".join(
            block_digest(block) for section_blocks in read for block in section_blocks
        )

    total, done = int(columns.tensor_bytes[rows].sum()), 0
    batch_bytes = blocks.work_items.batched_bytes
    size = reader.workspace_size(rows).with_batches(batch_bytes)
    batches = blocks.work_items.batches(blocks.work_items.blocks_of(rows), batch_bytes)
    results = run_in_threads(batches, work, size.new_workspace, threads)
    try:
        for batch, digests in results:
            blocks.note(batch.numbers, digests)
            done += batch.size_bytes
            if progress is not None:
                progress(Progress(done, total, 0, blocks.work_items.last_name(batch)))
        for stored, actual in damaged_ranges(checksums, seen, files):
            start, crc32s = stored.place.start_bytes, (f"{stored.crc32:08x}", f"{actual:08x}")
            place = f"{stored.place.path} bytes {start}:{start + stored.size_bytes}"
            damaged.append(DamagedBlock(stored.tensor, stored.part, *crc32s, (place,)))
        damaged += _find_damaged_items(checkpoint, files)
        # Copies with checksums in the files were compared with those above.
        checked = {part.tensor for part in checksums}
        recorded_names = itertools.compress(columns.names, has_digest)
        damaged += _find_damaged_copies(
            checkpoint, [name for name in recorded_names if name not in checked]
        )
    finally:
        # As above, the threads first: they read these files.
        results.close()
        files.close()
    for row in rows.tolist():
        if recorded is not None and has_digest[row] and recorded.of_blocks(row) != blocks.of(row):
            damaged += _list_damaged(columns.tensor(row), blocks.of(row), files)
    without = tuple(itertools.compress(columns.names, (not item for item in has_digest)))
    return DigestReport(blocks.digests(rows.tolist()), without, tuple(damaged), done)


def _list_damaged(
    tensor: StoredTensor, digests: bytes, files: OpenFiles[SourceFile]
) -> Iterator[DamagedBlock]:
    """Yield the blocks of a tensor whose digests are not those that were recorded."""
    reader = BlockReader(tensor, files)
    for block, expected in enumerate(tensor.digest.blocks if tensor.digest is not None else ()):
        digest = digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
        if digest != expected:
            box = str(reader.grid(0).box(block))
            yield DamagedBlock(tensor.name, box, expected.hex(), digest.hex(), reader.places(block))


def _find_damaged_sources(
    checkpoint: Checkpoint, files: OpenFiles[SourceFile], threads: int
) -> list[DamagedBlock]:
    """Return the parts of tensors in derived files whose source, such as an archive, is damaged."""

    def work(task: tuple[str, str, FileRange], memory: Workspace) -> DamagedBlock | None:
        name, box, place = task
        damage = files[place.path].find_damage(place.start_bytes)
        if damage is None:
            return None
        stop_bytes = damage.start_bytes + damage.size_bytes
        where = f"{damage.name} bytes {damage.start_bytes}:{stop_bytes}"
        return DamagedBlock(name, box, "", "", (where,), damage.problem)

    def tasks() -> Iterator[tuple[str, str, FileRange]]:
        for name, tensor in checkpoint.tensors.items() if checkpoint.derived else ():
            for tile in target_tiles(tensor.stored_layout).tiles:
                place = tensor.file_range(tile.slot, tile.number, tile.offset)
                if place.path in checkpoint.derived and tile.bounds.elements:
                    yield name, str(tile.bounds), place

    results = run_in_threads(tasks(), work, lambda: Workspace(0, 0), threads)
    # Threads finish in any order; report the parts in the order of the checkpoint.
    order = {name: number for number, name in enumerate(checkpoint)}
    damaged = [block for block in results if block is not None]
    return sorted(damaged, key=lambda block: (order[block.tensor], block.places))


def _find_damaged_copies(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[DamagedBlock]:
    """Yield the parts of tensors with recorded digests whose copies differ from each other."""
    if DIFFERING_COPIES in checkpoint.allowed:
        return
    for copies in compare_copies(checkpoint, names=names, reads_recorded=True).differing:
        yield DamagedBlock(copies.tensor, copies.part, "", "", copies.places, copies.how)


def _find_damaged_items(checkpoint: Checkpoint, files: OpenFiles[SourceFile]) -> list[DamagedBlock]:
    """Return the items whose digest differs from the recorded digest."""
    damaged = []
    for name, item in checkpoint.items.items():
        if item.digest is not None and item.digest != (digest := item_digest(item, files)):
            start = item.place.start_bytes
            place = f"{item.place.path} bytes {start}:{start + item.size_bytes}"
            digests = (item.digest.hex(), digest.hex())
            damaged.append(DamagedBlock(name, "the bytes", *digests, (place,)))
    return damaged


def _compare_items(
    a: Checkpoint, b: Checkpoint, files_a: OpenFiles[SourceFile], files_b: OpenFiles[SourceFile]
) -> Iterator[Difference]:
    """List the items that differ."""
    for name in [*a.items, *(name for name in b.items if name not in a.items)]:
        if name not in a.items or name not in b.items:
            where = (a if name in a.items else b).folder
            yield Difference(name, f"is only in {where}", is_tensor=False)
        elif item_digest(a.items[name], files_a) != item_digest(b.items[name], files_b):
            # A value can be pickled in several ways, so pickles of different lengths are compared
            # by value. Different bytes of the same length are reported: they may be damage.
            is_as_long = a.items[name].size_bytes == b.items[name].size_bytes
            (left, _), (right, _) = decode_items(a, [name]), decode_items(b, [name])
            if is_as_long or not left or repr(left) != repr(right):
                yield Difference(name, "is no tensor, and has other bytes", is_tensor=False)


def _can_hold(name: str, what: Capability) -> bool:
    format = find_format(name)
    return format is not None and what in format.capabilities
