"""Copies of parts of tensors: whether the ranks that hold the same part hold the same bytes.

The layout of a stored tensor claims that some of its shards are copies: several ranks hold the same
box of it, or boxes that overlap. A reader takes the elements of a box from a single copy, so if
copies differ, the elements of the other copies are lost. Copies differ if each rank held another
tensor under the same name and shape, such as experts sharded over an axis that is missing from the
mesh in the files.

1. Checksums in the files (`Checkpoint.checksums`) are compared without reading the copies.
2. If a copy does not have a checksum, the first, middle and last 4 KiB of each copy are compared
   (`sample`). The total is at most 1 % of the bytes of the files, or 4 MiB if that is more. If the
   limit is too small for all copies, smaller copies are compared by their first 4 KiB alone, and
   the smallest are not compared. With `all`, every byte of every copy is compared.
3. If a manifest of reshard has the digest of a tensor, all its copies were equal when they were
   written, and the digest verifies the copy that is read. The smallest of these copies are sampled
   too, within the limits, unless they are at a URL; the others count as compared by checksum.
   Comparisons that read every byte of a checkpoint read every byte of these copies
   (`reads_recorded`).
4. State that differs from rank to rank by its nature, such as the running statistics of a batch
   norm, is listed (`CopyReport.by_nature`); `expect_equal_copies` raises an error for other copies
   that differ.

Formats do not compare copies themselves: they bind every copy that their files have. The writers of
some formats keep only one of several copies (`CheckpointFormat.drops_copies`), so they lose parts
that were wrongly taken for copies. Such a loss is detected if a router has more rows than there are
experts (`CopyReport.lost`).
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.checkpoint.blocks.block_io import OpenFiles, open_sources
from reshard.checkpoint.blocks.shard_reads import BUFFER_BYTES, read_region
from reshard.checkpoint.blocks.spans import Tile, source_tiles, usable_tiles
from reshard.checkpoint.blocks.tensor_columns import TensorColumns, TensorKind, shapes_of
from reshard.checkpoint.contents import Checkpoint, StoredChecksum
from reshard.checkpoint.formats.registry import find_format
from reshard.checkpoint.storage.local_files import AlignedBuffer, SourceFile
from reshard.checkpoint.storage.remote_files import choose_threads
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.checkpoint.storage.threads import run_in_threads
from reshard.errors import CoverageError, MissingExtraError
from reshard.geometry.regions import Region
from reshard.layout import Box, Layout
from reshard.recipes.overrides import DIFFERING_COPIES
from reshard.text import count_text, first_text, ranks_text

SAMPLE_BYTES = 4096
MAX_SAMPLED_SHARE = 0.01
MIN_SAMPLE_LIMIT_BYTES = 4 << 20
# The maximum number of copies to sample, from disks and from servers: a copy takes three reads.
_MAX_SAMPLED_COPIES, _MAX_REQUESTED_COPIES = 1 << 14, 1 << 8
# For tensors with a recorded digest: the number of bytes of the files for each sampled copy, and
# the minimum and maximum number of copies. Every rank that loads its part repeats these reads.
_RECORDED_COPY_BYTES, _MIN_RECORDED_COPIES, _MAX_RECORDED_COPIES = 4 << 20, 256, 1 << 11
_MAX_SHOWN = 3
# Boxes that overlap without being equal are compared in pairs, which takes quadratic time.
_MAX_OVERLAPPING_BOXES = 1 << 13
# The last parts of the names of state that differs from rank to rank.
_BY_NATURE = (
    r"(^|[._])(running_mean|running_var|num_batches_tracked|amax_history|tokens_per_expert|"
    r"steps?|seed|rng(_states?)?|random_states?)$"
)


class DifferingCopies(Record):
    """A part of a tensor whose copies on ranks differ.

    `ranks` groups the ranks whose copies are equal; `found_by` is how they were compared. `places`
    lists the file and first byte of each copy that differs from the lowest rank's.
    """

    tensor: str
    part: str
    ranks: tuple[tuple[int, ...], ...]
    found_by: str
    places: tuple[str, ...] = ()

    @property
    def how(self) -> str:
        """The ranks that differ, and in which part."""
        ranks = ", ".join(ranks_text(group, 24) for group in self.ranks[:4])
        more = f" and {len(self.ranks) - 4} others" if len(self.ranks) > 4 else ""
        return f"{ranks}{more} differ in {self.part or 'the element'} ({self.found_by})"

    def __str__(self) -> str:
        return f"{self.tensor}: {self.how}"


class CopyReport(Record):
    """The outcome of a comparison of copies.

    Attributes:
        differing: copies that differ and should not.
        by_nature: copies of state that differs from rank to rank by its nature.
        lost: evidence that the writer dropped parts that it took for copies and that were not.
        parts: the number of parts that several ranks hold.
        by_checksum: the number of parts compared by checksums of the files, or by a manifest.
        by_reading: the number of parts compared by reading bytes of them.
        read_bytes: the number of bytes read.
    """

    differing: tuple[DifferingCopies, ...] = ()
    by_nature: tuple[DifferingCopies, ...] = ()
    lost: tuple[str, ...] = ()
    parts: int = 0
    by_checksum: int = 0
    by_reading: int = 0
    read_bytes: int = 0

    @property
    def unchecked(self) -> int:
        """The number of parts that were not compared."""
        return self.parts - self.by_checksum - self.by_reading

    def describe(self) -> list[str]:
        """Return notes for the user on copies that differ by nature and parts not compared."""
        notes = [*self.lost[:_MAX_SHOWN]]
        if self.by_nature:
            notes.append(
                f"{_count_tensors(self.by_nature)} differ by rank, as such state does; the lowest "
                f"rank's are taken: {first_text(self.by_nature, _MAX_SHOWN, '; ')}"
            )
        if self.unchecked:
            notes.append(
                f"{self.unchecked} of {count_text(self.parts, 'part')} that several ranks hold "
                "were not compared, for more than 1 % of the bytes would have to be read: "
                "--check-copies all compares them"
            )
        return notes


def expect_equal_copies(
    checkpoint: Checkpoint,
    *,
    check: str | None = None,
    allow: Collection[str] = (),
    names: Iterable[str] | None = None,
) -> Checkpoint:
    """Compare the copies in a checkpoint, and return it with notes about them.

    Args:
        checkpoint: an opened checkpoint; its own `check_copies` and `allowed` apply too.
        check: `all`, `sample` or `none`; the checkpoint's own if None.
        allow: with `differing-copies`, copies may differ: the lowest rank's are read.
        names: the names of the tensors whose copies are compared; all if None.

    Raises:
        CoverageError: copies that differ.
        RunError: a file that cannot be read.
    """
    check = check or checkpoint.check_copies
    if check == "none":
        return checkpoint
    index = _Index.of(checkpoint)
    if not index.has_copies and not index.lost:
        return checkpoint
    passed = index.passed.setdefault(check, set())
    names = checkpoint.tensors if names is None else names
    names = [name for name in names if name not in passed]
    if not names:
        return checkpoint
    report = compare_copies(checkpoint, check, names)
    is_allowed = DIFFERING_COPIES in (*allow, *checkpoint.allowed)
    if report.lost and not is_allowed:
        raise CoverageError(
            f"{checkpoint.folder}: {report.lost[0]}. No option brings them back: save again with "
            "the axis of the experts in the mesh of their DTensors, with use_collectives=False, or "
            "as files of ranks, which --source-mesh ep=... and --source-rule read. --allow "
            "differing-copies takes what is there (allow=['differing-copies'] in Python)"
        )
    notes = report.describe()
    if report.differing:
        if not is_allowed:
            raise CoverageError(describe_differing(checkpoint, report.differing))
        notes.append(
            f"copies of {_count_tensors(report.differing)} differ, which was allowed; the lowest "
            f"rank's are taken: {first_text(report.differing, _MAX_SHOWN, '; ')}"
        )
    if not notes:
        passed.update(names)
        return checkpoint
    return checkpoint.replace(notes=(*checkpoint.notes, *notes))


def compare_copies(
    checkpoint: Checkpoint,
    check: str | None = None,
    names: Iterable[str] | None = None,
    *,
    reads_recorded: bool = False,
) -> CopyReport:
    """Compare the copies in a checkpoint.

    Args:
        checkpoint: an opened checkpoint.
        check: `all`, `sample` or `none`; the checkpoint's own if None.
        names: the names of the tensors whose copies are compared; all if None.
        reads_recorded: with `sample`, read every byte of copies of tensors whose digest a manifest
            records.

    Raises:
        RunError: a file that cannot be read.
    """
    check = check or checkpoint.check_copies
    if check == "none":
        return CopyReport()
    index = _Index.of(checkpoint)
    names = None if names is None else dict.fromkeys(names)
    lost = tuple(
        text for experts, text in index.lost if names is None or not experts.isdisjoint(names)
    )
    groups = list(index.list_groups(names))
    if not groups:
        return CopyReport(lost=lost)
    unlike: list[tuple[_Group, tuple[tuple[int, ...], ...], str]] = []
    unresolved = groups if check == "all" else []
    recorded: list[_Group] = []
    if check == "sample":
        for group in groups:
            if reads_recorded and group.has_digest:
                # Stored checksums describe the bytes as written: they do not show later damage.
                recorded.append(group)
                continue
            classes = group.classify(index)
            if classes is None:
                (recorded if group.has_digest else unresolved).append(group)
            elif len(classes) > 1:
                unlike.append((group, classes, "by the CRC-32 in the files"))
    chosen = _choose_reads(checkpoint, unresolved, check)
    if reads_recorded:
        proven = _choose_reads(checkpoint, recorded, "all")
    else:
        proven = _choose_reads(checkpoint, _choose_recorded(checkpoint, recorded), "sample")
    by_checksum = len(groups) - len(unresolved) - len(proven)
    read_bytes = 0
    chosen += proven
    for read, digests in _read_groups(checkpoint, chosen):
        group = read.group
        read_bytes += read.size_bytes
        classes = _group_equal(zip(group.ranks, digests, strict=True))
        if len(classes) > 1:
            unlike.append((group, classes, read.how))
    unlike.sort(key=lambda item: (index.columns.row(item[0].tensor), item[1]))
    differing: list[DifferingCopies] = []
    by_nature: list[DifferingCopies] = []
    for number, (group, classes, how) in enumerate(unlike):
        # Measuring reads the copies again, so only those that a message shows are measured.
        measured = _measure(checkpoint, group, classes) if number < _MAX_SHOWN else ""
        # A recorded digest shows that the copies were equal when written, whatever the name.
        is_natural = not group.has_digest and re.search(_BY_NATURE, group.tensor)
        (by_nature if is_natural else differing).append(group.describe(classes, how + measured))
    return CopyReport(
        tuple(differing),
        tuple(by_nature),
        lost,
        len(groups),
        by_checksum,
        len(chosen),
        read_bytes,
    )


def list_read_checksums(checkpoint: Checkpoint) -> tuple[StoredChecksum, ...]:
    """Return the checksums of a checkpoint, except those of copies that are not read.

    A reader of whole tensors takes each element from a single copy. The checksums of the other
    copies are compared with that copy's, without reading the copies.
    """
    if not checkpoint.checksums:
        return ()
    index = _Index.of(checkpoint)
    columns = index.columns
    read = {
        number: {
            kind.find_place(tile.slot, tile.number)[0]
            for tile in source_tiles(columns.sample(number).assembly).tiles
        }
        for number, kind in enumerate(columns.kinds)
        if _has_copies(kind)
    }
    if not read:
        return checkpoint.checksums
    skipped: set[tuple[str, int]] = set()
    needed: set[tuple[str, int]] = set()
    for row in range(len(columns)):
        number, first = int(columns.kind[row]), int(columns.first[row])
        kind = columns.kinds[number]
        for place, file in enumerate(kind.files):
            storage = index.find_storage(file, int(columns.starts[first + place]))
            if storage is not None:
                is_read = number not in read or place in read[number]
                (needed if is_read else skipped).add((file, storage[0]))
    # Copies that are not read may share a checksum with elements that are.
    unread = skipped - needed
    return tuple(
        checksum
        for checksum in checkpoint.checksums
        if (checksum.place.path, checksum.place.start_bytes) not in unread
    )


def describe_differing(checkpoint: Checkpoint, differing: Sequence[DifferingCopies]) -> str:
    """Return the error text for copies that differ: the copies, possible causes, and remedies."""
    names = list(dict.fromkeys(difference.tensor for difference in differing))
    text = (
        f"{checkpoint.folder}: ranks hold copies, by sizes and offsets, whose contents differ, of "
        f"{_count_tensors(differing)}: {first_text(differing, _MAX_SHOWN, '; ')}. "
    )
    if any(re.search(r"(^|\.)experts\.\d+\.", name) for name in names):
        text += (
            "Experts that each rank counts from 0 have the same names on all of them: number them "
            "over all ranks and save again. "
        )
    elif (
        checkpoint_format := find_format(checkpoint.format)
    ) is not None and checkpoint_format.takes_source_sharding:
        text += (
            "If each rank holds another part, such as its own experts, the files lack the axis: "
            f"specify it with {_suggest_cut(differing)} (mesh= and rules= of open_checkpoint). "
        )
    digest = checkpoint.tensors[names[0]].digest
    if digest is not None:
        text += (
            "They were written from one tensor, so a file changed since then: `reshard inspect "
            "--digest` lists where. "
        )
    return text + (
        "If the copies may differ, --allow differing-copies takes the lowest rank's "
        "(allow=['differing-copies'] in Python); --exclude leaves tensors out"
    )


class _Copy(NamedTuple):
    """A copy of boxes of a tensor: the rank, the location of its shard, and the boxes in the shard.

    The shard is at location number `place` of the tensor's kind, from its byte `offset_bytes` on.
    Offsets of `regions` are in elements of the shard. `is_whole` is whether the regions are the
    whole shard, without gaps.
    """

    slot: int
    place: int
    offset_bytes: int
    regions: tuple[Region, ...]
    is_whole: bool


class _Group(NamedTuple):
    """Copies of the same boxes of a tensor, with the file and first byte of each copy's shard."""

    tensor: str
    kind: TensorKind
    copies: tuple[_Copy, ...]
    places: tuple[tuple[str, int], ...]
    has_digest: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(copy.slot for copy in self.copies)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes that all copies have."""
        return tuple(region.box for region in self.copies[0].regions)

    @property
    def part_bytes(self) -> int:
        """The bytes of a copy."""
        return sum(box.elements for box in self.boxes) * self.kind.dtype.itemsize_bytes

    def classify(self, index: _Index) -> tuple[tuple[int, ...], ...] | None:
        """Group the ranks by the checksums of their files; None if these are not conclusive."""
        marks, are_exact, part_bytes = [], True, self.part_bytes
        for copy, (file, start) in zip(self.copies, self.places, strict=True):
            storage = index.find_storage(file, start)
            if storage is None:
                return None
            begin, size_bytes, crc32 = storage
            are_exact &= begin == start and copy.is_whole and size_bytes == part_bytes
            # A checksum covers the whole shard, so copies can be compared by it only if their
            # boxes have the same offsets and strides in their shards.
            marks.append((size_bytes, crc32, start - begin, copy.regions))
        # The common case: all copies are equal.
        if marks.count(marks[0]) == len(marks):
            return (self.ranks,)
        classes = _group_equal(zip(self.ranks, marks, strict=True))
        # A checksum that covers more than the copy can prove equality, but not a difference.
        return classes if are_exact or len(classes) == 1 else None

    def describe(self, classes: tuple[tuple[int, ...], ...], found_by: str) -> DifferingCopies:
        boxes = ", ".join(map(str, self.boxes[:2]))
        others = [rank for ranks in classes[1:] for rank in ranks]
        places = (self.places[self.ranks.index(rank)] for rank in sorted(others))
        texts = tuple(f"{file} from byte {start}" for file, start in places)
        return DifferingCopies(self.tensor, boxes, classes, found_by, texts)


def _group_equal(marks: Iterable[tuple[int, object]]) -> tuple[tuple[int, ...], ...]:
    classes: dict[object, list[int]] = {}
    for rank, mark in marks:
        classes.setdefault(mark, []).append(rank)
    return tuple(sorted(tuple(sorted(ranks)) for ranks in classes.values()))


# The copies of each layout.


class _Index:
    """The data of a checkpoint for comparisons, computed once for all reads of its tensors.

    `passed` has the names of tensors whose copies are equal, by the check that compared them.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.columns = TensorColumns.of(checkpoint.tensors)
        # For each kind of tensor, the copies of each part that several ranks hold.
        self._copies = [
            _find_copies(kind, self.columns.sample(number).stored_layout)
            if _has_copies(kind)
            else ()
            for number, kind in enumerate(self.columns.kinds)
        ]
        self.has_copies = any(self._copies)
        # The ranges of files that have a checksum: start, size and checksum, by start.
        self._storages: dict[str, list[tuple[int, int, int]]] = {}
        for checksum in checkpoint.checksums:
            storage = (checksum.place.start_bytes, checksum.size_bytes, checksum.crc32)
            self._storages.setdefault(checksum.place.path, []).append(storage)
        for storages in self._storages.values():
            storages.sort()
        self.lost = tuple(_find_lost_experts(checkpoint))
        self.passed: dict[str, set[str]] = {}

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Index:
        """Return the index of a checkpoint, cached in the checkpoint."""
        attributes = vars(checkpoint)
        result = attributes.get("_copy_index")
        if not isinstance(result, _Index):
            result = attributes["_copy_index"] = cls(checkpoint)
        return result

    def find_storage(self, file: str, start_bytes: int) -> tuple[int, int, int] | None:
        """Return start, size and checksum of the range of a file that contains a byte, or None."""
        storages = self._storages.get(file, [])
        at = bisect_right(storages, start_bytes, key=lambda item: item[0]) - 1
        if at < 0 or start_bytes >= storages[at][0] + storages[at][1]:
            return None
        return storages[at]

    def list_groups(self, names: Iterable[str] | None) -> Iterator[_Group]:
        """Yield the parts of the named tensors, or of all, that several ranks hold."""
        if not self.has_copies:
            return
        columns, digests = self.columns, self.columns.digests
        rows = range(len(columns)) if names is None else columns.rows(names).tolist()
        for row in rows:
            number, first = int(columns.kind[row]), int(columns.first[row])
            kind = columns.kinds[number]
            has_digest = digests is not None and (digests.known is None or bool(digests.known[row]))
            for copies in self._copies[number]:
                starts = (int(columns.starts[first + copy.place]) for copy in copies)
                places = tuple(
                    (kind.files[copy.place], start + copy.offset_bytes)
                    for copy, start in zip(copies, starts, strict=True)
                )
                # Several ranks may be bound to the same range of a file: it is not a copy.
                if len(set(places)) > 1:
                    yield _Group(columns.names[row], kind, copies, places, has_digest)


def _has_copies(kind: TensorKind) -> bool:
    """Return whether the shards of a kind's tensors have more elements in total than the tensor."""
    layout = kind.layout
    if len(kind.places) < 2:
        return False
    held = layout.cell_elements
    slots = {slot for slot, _ in kind.places}
    if len(slots) < len(layout.holders):
        held = held[np.isin(layout.cell_slot, sorted(slots))]
    return int(held.sum()) > math.prod(layout.shape)


def _find_copies(kind: TensorKind, layout: Layout) -> tuple[tuple[_Copy, ...], ...]:
    """Return the copies of each part of a kind's tensors that several shards of a layout hold."""
    alike: dict[object, list[_Copy]] = {}
    # A halo that is not fresh is never read, and may be older than the elements that it copies.
    for tile in usable_tiles(layout).tiles:
        copy = _make_copy(kind, tile)
        cell = layout.cells_of(tile.slot)[tile.number]
        if copy.regions and copy.regions[0].elements:
            boxes = tuple(region.box for region in copy.regions)
            alike.setdefault((boxes, int(layout.cell_contribution[cell])), []).append(copy)
    equal = [tuple(copies) for copies in alike.values() if len(copies) > 1]
    return (*equal, *_find_overlaps(layout, [copies[0] for copies in alike.values()]))


def _find_overlaps(layout: Layout, copies: list[_Copy]) -> Iterator[tuple[_Copy, ...]]:
    """Yield the copies of the overlaps of boxes that are not equal."""
    held = sum(region.elements for copy in copies for region in copy.regions)
    # Partial shards differ by their nature. Boxes do not overlap if the shards do not have more
    # elements than the tensor.
    if layout.contributions > 1 or held <= math.prod(layout.shape):
        return
    is_simple = all(len(copy.regions) == 1 for copy in copies)
    if not is_simple or len(copies) > _MAX_OVERLAPPING_BOXES:
        return
    starts = np.array([copy.regions[0].start for copy in copies])
    stops = np.array([copy.regions[0].stop for copy in copies])
    for number, copy in enumerate(copies):
        # The overlaps of all later copies with this copy, shape (later copies, dims).
        low = np.maximum(starts[number + 1 :], starts[number])
        high = np.minimum(stops[number + 1 :], stops[number])
        for later in np.flatnonzero((low < high).all(axis=1)).tolist():
            shared = Box(tuple(low[later].tolist()), tuple(high[later].tolist()))
            yield _narrow(copy, shared), _narrow(copies[number + 1 + later], shared)


def _narrow(copy: _Copy, box: Box) -> _Copy:
    """Return the part of a copy of a single box that is inside a smaller box."""
    part = copy.regions[0].intersect(*box)
    is_whole = copy.is_whole and part == copy.regions[0]
    return copy._replace(regions=() if part is None else (part,), is_whole=is_whole)


def _make_copy(kind: TensorKind, tile: Tile) -> _Copy:
    """Return the shard of a tile as a copy of its boxes, in the tensor's order."""
    place, offset_bytes = kind.find_place(tile.slot, tile.number, tile.offset)
    regions = tuple(sorted(tile.regions(kind.view(tile.slot, tile.number))))
    is_whole = len(regions) == 1 and regions[0].shape == tile.local_shape and regions[0].is_dense()
    return _Copy(tile.slot, place, offset_bytes, regions, is_whole)


# Detecting parts that a writer dropped.


def _find_lost_experts(checkpoint: Checkpoint) -> Iterator[tuple[frozenset[str], str]]:
    """Yield the names of experts that a writer dropped as copies, with the evidence.

    A router has a row for each expert. If every rank numbers its own experts from 0, and the writer
    keeps one of the tensors with the same name, only a fraction of the experts is stored.
    """
    checkpoint_format = find_format(checkpoint.format)
    ranks = {file.rank for file in checkpoint.files}
    if (
        checkpoint_format is None
        or not checkpoint_format.drops_copies(checkpoint)
        or len(ranks) < 2
    ):
        return
    counts: dict[str, set[int]] = {}
    numbered: dict[str, set[int]] = {}
    members: dict[str, list[str]] = {}
    routers: dict[str, tuple[str, int]] = {}
    # Compiled here, not at each start: few formats drop copies.
    expert = re.compile(r"^(.*?)\.?\bexperts\.(?:(\d+)\.)?")
    gate = re.compile(r"^(.*?)\.?\b(?:router|gate)\.(?:\w+\.)*weight$")
    for name, shape in shapes_of(checkpoint.tensors).items():
        if match := expert.search(name):
            layer, number = match.groups()
            if number is not None:
                numbered.setdefault(layer, set()).add(int(number))
            elif len(shape) >= 3:
                counts.setdefault(layer, set()).add(shape[0])
            members.setdefault(layer, []).append(name)
        elif len(shape) == 2 and (match := gate.search(name)):
            routers[match[1]] = name, shape[0]
    for layer, (router, rows) in routers.items():
        own = numbered.get(layer, set())
        stacked_counts = counts.get(layer, set()) or (
            {len(own)} if own == {*range(len(own))} else set()
        )
        if (
            len(stacked_counts) != 1
            or not 0 < (count := next(iter(stacked_counts))) < rows
            or rows % count
        ):
            continue
        first = members[layer][0]
        stored = checkpoint.tensors[first].stored_slots
        if len(stored) < len(ranks):
            yield (
                frozenset(members[layer]),
                (
                    f"{first} is of {count} experts, stored by {ranks_text(stored)} of "
                    f"{len(ranks)}, and {router} chooses among {rows}: ranks saved different "
                    "experts under the same names and offsets, of which the writer keeps one as a "
                    f"copy, so that {rows - count} of {rows} are lost"
                ),
            )


# Choosing and reading samples.


class _Read(NamedTuple):
    """A group whose copies are read, and the windows of each box."""

    group: _Group
    windows: tuple[tuple[int, Box], ...]
    how: str = "by a sample"

    @property
    def size_bytes(self) -> int:
        elements = sum(window.elements for _, window in self.windows)
        return elements * self.group.kind.dtype.itemsize_bytes * len(self.group.places)


def _choose_reads(checkpoint: Checkpoint, groups: list[_Group], check: str) -> list[_Read]:
    """Return the reads of each group: all its bytes, or samples within the limits."""
    if check == "all":
        return [
            _Read(
                group,
                tuple(
                    (number, window)
                    for number, box in enumerate(group.boxes)
                    for window in _split(box.shape, group.kind.dtype.itemsize_bytes, BUFFER_BYTES)
                ),
                "every byte compared",
            )
            for group in groups
        ]
    stored_bytes = sum(file.size_bytes for file in checkpoint.files)
    limit_bytes = max(int(stored_bytes * MAX_SAMPLED_SHARE), MIN_SAMPLE_LIMIT_BYTES)
    # Derived files, such as unpacked archives, cannot be sampled without unpacking all of them.
    plain = [
        group for group in groups if not any(file in checkpoint.derived for file, _ in group.places)
    ]
    is_remote = isinstance(checkpoint.folder, RemotePath)
    max_copies = _MAX_REQUESTED_COPIES if is_remote else _MAX_SAMPLED_COPIES
    chosen: list[_Read] = []
    # Read the first window of as many groups as possible, then the other windows of the largest.
    for group in sorted(plain, key=lambda group: -group.part_bytes):
        first = _window(group.boxes[0].shape, group.kind.dtype.itemsize_bytes, 0.0)
        read = _Read(group, ((0, first),))
        max_copies -= len(group.places)
        if read.size_bytes > limit_bytes or max_copies < 0:
            break
        limit_bytes -= read.size_bytes
        chosen.append(read)
    for number, read in enumerate(chosen):
        whole = _Read(read.group, tuple(_sample(read.group)))
        if whole.size_bytes - read.size_bytes > limit_bytes:
            break
        limit_bytes -= whole.size_bytes - read.size_bytes
        chosen[number] = whole
    return chosen


def _choose_recorded(checkpoint: Checkpoint, groups: list[_Group]) -> list[_Group]:
    """Return the smallest groups, with at most a copy for each 4 MiB of the files.

    Reading them takes a few percent of the time in which the files are read. A server would take
    longer, so from a server nothing is read.
    """
    if isinstance(checkpoint.folder, RemotePath):
        return []
    stored_bytes = sum(file.size_bytes for file in checkpoint.files)
    max_copies = max(stored_bytes // _RECORDED_COPY_BYTES, _MIN_RECORDED_COPIES)
    max_copies = min(max_copies, _MAX_RECORDED_COPIES)
    ordered = sorted(groups, key=lambda group: group.part_bytes)
    copies = itertools.accumulate(len(group.places) for group in ordered)
    return [group for group, count in zip(ordered, copies, strict=True) if count <= max_copies]


def _sample(group: _Group) -> Iterator[tuple[int, Box]]:
    """Yield the first, middle and last window of a region, each with the number of its box."""
    itemsize_bytes = group.kind.dtype.itemsize_bytes
    boxes = group.boxes
    if group.part_bytes <= 3 * SAMPLE_BYTES and len(boxes) == 1:
        yield 0, Box.of(boxes[0].shape)
        return
    for number, share in ((0, 0.0), (len(boxes) // 2, 0.5), (len(boxes) - 1, 1.0)):
        yield number, _window(boxes[number].shape, itemsize_bytes, share)


def _window(shape: tuple[int, ...], itemsize_bytes: int, share: float) -> Box:
    """Return a window of at most 4 KiB that begins at the fraction `share` of a box.

    >>> _window((8, 4096), 4, 0.5)
    Box(start=(4, 1536), stop=(5, 2560))
    """
    room = max(1, SAMPLE_BYTES // itemsize_bytes)
    lengths = []
    for size in reversed(shape):
        length = max(1, min(size, room))
        lengths.append(length)
        room //= length
    lengths.reverse()
    start = tuple(int((size - n) * share + 0.5) for size, n in zip(shape, lengths, strict=True))
    return Box.of(lengths, start)


def _split(shape: tuple[int, ...], itemsize_bytes: int, max_bytes: int) -> Iterator[Box]:
    """Split a box of this shape into windows of at most `max_bytes`, in row-major order."""
    inner, row = len(shape), 1
    room = max(1, max_bytes // itemsize_bytes)
    while inner and row * shape[inner - 1] <= room:
        inner -= 1
        row *= shape[inner]
    if not inner:
        yield Box.of(shape)
        return
    rest, step = shape[inner:], max(1, room // row)
    for lead in np.ndindex(*shape[: inner - 1]):
        for begin in range(0, shape[inner - 1], step):
            end = min(begin + step, shape[inner - 1])
            stop = (*(i + 1 for i in lead), end, *rest)
            yield Box((*lead, begin, *(0 for _ in rest)), stop)


def _read_groups(checkpoint: Checkpoint, reads: list[_Read]) -> Iterator[tuple[_Read, list[bytes]]]:
    """Yield each read of a group, with a digest of the bytes of each copy."""
    if not reads:
        return
    files = open_sources(checkpoint)
    tasks = [
        (place, number, member)
        for number, read in enumerate(reads)
        for member, place in enumerate(read.group.places)
    ]
    # Read in the order of the files, so that a disk reads forward.
    tasks.sort()

    def work(
        task: tuple[tuple[str, int], int, int], buffer: AlignedBuffer
    ) -> tuple[int, int, bytes]:
        _, number, member = task
        return number, member, _digest(reads[number], member, files, buffer)

    digests_of_reads: list[dict[int, bytes]] = [{} for _ in reads]
    threads = choose_threads(None, checkpoint.folder)
    results = run_in_threads(tasks, work, lambda: AlignedBuffer.of(BUFFER_BYTES), threads)
    try:
        for number, member, digest in results:
            digests_of_reads[number][member] = digest
    finally:
        # Ends the threads, which still read if an error ended the loop, before their files are
        # closed.
        results.close()
        files.close()
    for read, digests in zip(reads, digests_of_reads, strict=True):
        yield read, [digests[n] for n in range(len(digests))]


def _measure(checkpoint: Checkpoint, group: _Group, classes: tuple[tuple[int, ...], ...]) -> str:
    """Return how much samples of two unequal copies differ: a little, or altogether."""
    if any(file in checkpoint.derived for file, _ in group.places):
        return ""
    read, dtype = _Read(group, tuple(_sample(group))), group.kind.dtype
    samples: list[NDArray[Any]] = []
    files = open_sources(checkpoint)
    try:
        with AlignedBuffer.of(BUFFER_BYTES) as buffer:
            for rank in (classes[0][0], classes[1][0]):
                parts = _read_windows(read, group.ranks.index(rank), files, buffer)
                samples.append(np.concatenate([part.reshape(-1) for part in parts]))
    finally:
        files.close()
    first, second = samples
    # Bytes, since a NaN equals no value; some types of torch have no values in NumPy.
    unlike = (first.view(np.uint8) != second.view(np.uint8)).reshape(len(first), -1).any(axis=1)
    text = f"; {int(unlike.sum())} of {len(first)} sampled elements differ"
    try:
        values = [sample.view(dtype.numpy).astype(np.float64) for sample in samples]
    except (MissingExtraError, TypeError, ValueError):
        return text
    largest = max(float(np.abs(value).max()) for value in values)
    difference = float(np.abs(values[0] - values[1]).max())
    is_finite = math.isfinite(difference) and largest > 0
    return text + (f", by up to {difference / largest:.1g} of the largest" if is_finite else "")


def _read_windows(
    read: _Read, member: int, files: OpenFiles[SourceFile], buffer: AlignedBuffer
) -> Iterator[NDArray[Any]]:
    """Yield the bare elements of a copy in each window."""
    group = read.group
    copy, (file, start_bytes) = group.copies[member], group.places[member]
    for number, window in read.windows:
        elements = np.empty(window.shape, dtype=group.kind.dtype.storage)
        region = copy.regions[number]
        for d, (low, high) in enumerate(zip(*window, strict=True)):
            region = region.narrow(d, region.start[d] + low, region.start[d] + high)
        read_region(files[file], start_bytes, region, elements, buffer)
        yield elements


def _digest(read: _Read, member: int, files: OpenFiles[SourceFile], buffer: AlignedBuffer) -> bytes:
    hasher = _make_hasher()
    for elements in _read_windows(read, member, files, buffer):
        hasher.update(elements.reshape(-1).view(np.uint8))
    digest: bytes = hasher.digest()
    return digest


def _make_hasher() -> Any:
    """Return a hasher: the fastest that is installed."""
    try:
        import xxhash
    except ImportError:
        # Digests are compared only with others of the same run, so any hash serves.
        import hashlib

        return hashlib.blake2b(digest_size=16)
    return xxhash.xxh3_128()


# Suggesting remedies.


def _suggest_cut(differing: Sequence[DifferingCopies]) -> str:
    """Return the options that specify the axis which the files lack."""
    pattern = _find_pattern(list(dict.fromkeys(difference.tensor for difference in differing)))
    first = [difference for difference in differing if difference.tensor == differing[0].tensor]
    classes = first[0].ranks
    missing, replicas = len(classes), len(classes[0])
    is_regular = all(
        len(part.ranks) == missing and {*map(len, part.ranks)} == {replicas} for part in first
    )
    if not is_regular:
        return f"--source-mesh fsdp=...,ep=... --source-rule '{pattern}=ep / fsdp, ...'"
    # If neighbouring ranks hold different copies of a part, the missing axis is the last.
    is_last = missing < 2 or classes[1][0] == classes[0][0] + 1
    sizes = {"dp": replicas, "fsdp": len(first)}
    axes = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    axes.insert(len(axes) if is_last else 0, f"ep={missing}")
    cut = "ep / fsdp" if len(first) > 1 else "ep"
    return f"--source-mesh {','.join(axes)} --source-rule '{pattern}={cut}, ...'"


def _find_pattern(names: list[str]) -> str:
    if all("experts." in name for name in names):
        return "*experts.*"
    return names[0] if len(names) == 1 else "PATTERN"


def _count_tensors(differing: Sequence[DifferingCopies]) -> str:
    return count_text(len({difference.tensor for difference in differing}), "tensor")
