"""Planning the files of a new PyTorch distributed checkpoint.

1. Every element of a tensor is stored once, in boxes. A shard that is a box is a chunk; an
   interleaved or padded shard is a chunk for each of its boxes, without the padding. If shards
   overlap, the boxes of higher ranks are reduced by the boxes of lower ranks.
2. A rank's chunks are consecutive archives in its file `__R_0.distcp`. Bytes that are not tensors
   come first, in the file of the first rank; plain values are archives of `torch.save` in a second
   file of the first rank, and are read as items.
3. `.metadata` lists the location of each of them. It is written last.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from reshard.binding import FileRange
from reshard.checkpoint.blocks.tensor_columns import TensorColumns, TensorKind
from reshard.checkpoint.contents import StoredFile, StoredItem
from reshard.checkpoint.formats.torch_dcp import FORMAT_NAME, data_file_name
from reshard.checkpoint.formats.torch_dcp.metadata import (
    DcpChunk,
    DcpMetadata,
    DcpTensor,
    StoredBytes,
    metadata_pickle,
)
from reshard.checkpoint.formats.torch_files.building import NewArchive, saved_bytes
from reshard.checkpoint.formats.write_plan import (
    NewCheckpoint,
    NewFile,
    PlannedTensor,
    WritePlan,
    are_boxes,
    check_values,
    find_storing_ranks,
)
from reshard.errors import RecipeError
from reshard.layout import Box, Layout

# Each chunk is an archive of its own, and an entry in every reader's plan.
MAX_CHUNKS = 100_000


class ArchiveFile(NewFile):
    """A new file of consecutive archives."""

    archives: tuple[NewArchive, ...] = ()

    def known_bytes(self) -> Iterator[tuple[int, bytes]]:
        """Yield the heads of the archives, each with its offset."""
        for archive in self.archives:
            yield archive.start_bytes, archive.head()

    @property
    def checked_ranges(self) -> tuple[tuple[int, int], ...]:
        """The byte ranges of the storages."""
        return tuple(
            (archive.storage_start_bytes, archive.storage_bytes) for archive in self.archives
        )

    def closing_bytes(self, checksum: Callable[[int, int], int]) -> Iterator[tuple[int, bytes]]:
        """Yield the tails of the archives, which contain the checksums of their storages."""
        for archive in self.archives:
            start, size = archive.storage_start_bytes, archive.storage_bytes
            yield start + size, archive.tail(checksum(start, size))


class StackedPlace(NamedTuple):
    """The index of a tensor in a stack of tensors, which is stored under the name `key`.

    `at` are its indices in the leading dimensions of the stack, whose lengths are `counts`.
    """

    key: str
    at: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


def plan_chunks(new: NewCheckpoint, places: Mapping[str, StackedPlace] | None = None) -> WritePlan:
    """Plan a file of chunks for each rank; items go into the first rank's.

    Args:
        new: the contents of the checkpoint.
        places: the place in a stack of each tensor, by name, for formats that stack layers.

    Raises:
        RecipeError: a partial layout; a tensor in more than `MAX_CHUNKS` boxes.
        UsageError: a type that PyTorch does not have.
    """
    tensors, items = new.tensors, new.items
    places = places or {}
    check_values(tensors)
    storing = find_storing_ranks(tensors, "once")
    splits = {
        name: _split_into_boxes(name, tensor, storing[name]) for name, tensor in tensors.items()
    }
    # The tensors that each rank stores.
    stored_by: dict[int, list[str]] = {}
    for name, (_, boxes) in splits.items():
        for rank in boxes:
            stored_by.setdefault(rank, []).append(name)
    ranks = sorted(stored_by) or [0]
    files = []
    placed: dict[str, StoredItem] = {}
    starts: dict[str, list[int]] = {name: [] for name in tensors}
    for rank in ranks:
        file = data_file_name(rank)
        end = 0
        # Items come first in the first rank's file, followed by the archives.
        for item in items.values() if rank == ranks[0] else ():
            place = FileRange(file, end)
            placed[item.name] = StoredItem(item.name, place, item.size_bytes, rank, item.transforms)
            end += item.size_bytes
        archives = []
        for name in stored_by.get(rank, ()):
            # An archive has a dimension of length 1 for each dimension of the stack.
            ones = (1,) * len(places[name].at) if name in places else ()
            for box in splits[name][1][rank]:
                archive = NewArchive.at(tensors[name].dtype, (*ones, *box.shape), end)
                archives.append(archive)
                starts[name].append(archive.storage_start_bytes)
                end = archive.stop_bytes
        files.append(ArchiveFile(StoredFile(file, end, rank), archives=tuple(archives)))
    stored = _bind(tensors, splits, starts)
    return WritePlan(
        FORMAT_NAME,
        new.mesh,
        stored,
        tuple(files),
        items=placed,
        paths=dict(new.paths),
        attributes=new.attributes,
    )


_Split = tuple[Layout, dict[int, tuple[Box, ...]]]


def _bind(
    tensors: Mapping[str, PlannedTensor],
    splits: Mapping[str, _Split],
    starts: Mapping[str, list[int]],
) -> TensorColumns:
    """Return the tensors of which each rank stores boxes, from `starts` on in its file."""
    numbers: dict[Hashable, int] = {}
    kinds: list[TensorKind] = []
    kind = []
    for name, (layout, boxes) in splits.items():
        tensor = tensors[name]
        # The sharding describes the layout only if the tensor was not split further.
        spec = tensor.spec if layout is tensor.layout else None
        counts = tuple((rank, len(boxes[rank])) for rank in sorted(boxes))
        key = tensor.dtype, layout, spec, counts
        if key not in numbers:
            numbers[key] = len(kinds)
            cells = tuple((rank, cell) for rank, count in counts for cell in range(count))
            files = tuple(data_file_name(rank) for rank, _ in cells)
            kinds.append(TensorKind(tensor.dtype, layout, cells, files, spec))
        kind.append(numbers[key])
    each = np.fromiter(itertools.chain.from_iterable(starts.values()), np.int64)
    return TensorColumns(splits, kinds, kind, each)


def metadata_bytes(
    write_plan: WritePlan,
    places: Mapping[str, StackedPlace] | None = None,
    objects: Mapping[str, StoredBytes] | None = None,
) -> bytes:
    """Return the content of `.metadata` for a write plan, with `places` as in `plan_chunks`.

    `objects` are further bytes that are not tensors.
    """
    tensors: Mapping[str, DcpTensor] = _ChunkedTensors(write_plan)
    if places:
        joined: dict[str, DcpTensor] = {}
        for name, tensor in tensors.items():
            place = places.get(name) or StackedPlace(name)
            at, stop = place.at, tuple(index + 1 for index in place.at)
            chunks = [
                DcpChunk(Box((*at, *box.start), (*stop, *box.stop)), of_box)
                for box, of_box in tensor.chunks
            ]
            shape = (*place.counts, *tensor.shape)
            previous = joined.get(place.key, DcpTensor(tensor.dtype, shape, ()))
            joined[place.key] = DcpTensor(tensor.dtype, shape, (*previous.chunks, *chunks))
        tensors = joined
    items = {
        name: StoredBytes(item.place.path, item.place.start_bytes, item.size_bytes, item.transforms)
        for name, item in write_plan.items.items()
    }
    items |= objects or {}
    # As in PyTorch, a name without a known path is at the top of the state dict.
    paths = {name: write_plan.paths.get(name, (name,)) for name in (*tensors, *items)}
    return metadata_pickle(DcpMetadata(tensors, items, paths, attributes=write_plan.attributes))


class _ChunkedTensors(Mapping[str, DcpTensor]):
    """The tensors of a write plan with their chunks, computed on access: there may be very many."""

    def __init__(self, write_plan: WritePlan) -> None:
        self._tensors = TensorColumns.of(write_plan.tensors)
        self._archives = {
            file.stored.name: file.archives
            for file in write_plan.files
            if isinstance(file, ArchiveFile)
        }

    def __getitem__(self, name: str) -> DcpTensor:
        kind, row = self._tensors.kind_of(name), self._tensors.row(name)
        first = int(self._tensors.first[row])
        starts = self._tensors.starts[first : first + len(kind.places)].tolist()
        chunks = []
        for (slot, cell), file, start in zip(kind.places, kind.files, starts, strict=True):
            archives = self._archives[file]
            archive = archives[bisect_left(archives, start, key=attrgetter("storage_start_bytes"))]
            place = StoredBytes(file, archive.start_bytes, archive.stop_bytes - archive.start_bytes)
            chunks.append(DcpChunk(_list_stored_boxes(kind.layout, slot)[cell or 0], place))
        return DcpTensor(kind.dtype, kind.layout.shape, tuple(chunks))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


# Many tensors of a model have equal layouts.
@lru_cache(maxsize=4096)
def _list_stored_boxes(layout: Layout, slot: int) -> tuple[Box, ...]:
    """Return the boxes of a slot, or an empty box if it holds no element."""
    boxes = layout.boxes(slot)
    return boxes or (Box.of(layout.local_shape(slot) or (0,) * layout.ndim),)


def _split_into_boxes(name: str, tensor: PlannedTensor, storing: frozenset[int]) -> _Split:
    """Return the layout in which a tensor is stored, and the boxes that each rank stores."""
    split, count = _split_layout(tensor.layout, storing)
    if split is None:
        raise RecipeError(
            f"tensor {name!r} sharded by `{tensor.spec}` is {count} boxes, PyTorch's "
            f"distributed checkpoint has each in an archive of its own; {MAX_CHUNKS} are the most. "
            "Shard it coarser, or choose the format sharded-safetensors"
        )
    return split


@lru_cache(maxsize=1024)
def _split_layout(layout: Layout, storing: frozenset[int]) -> tuple[_Split | None, int]:
    """Return a split and its number of boxes; without a split if these are more than allowed."""
    whole = Box.of(layout.shape)
    if not whole.elements:
        # Only the shape is stored.
        slot = min(storing)
        return (Layout.whole(layout.shape, [slot], layout.slots), {slot: (whole,)}), 1
    pairs = [(slot, box) for slot in sorted(storing) for box in layout.boxes(slot)]
    # Together they cover the tensor, so they are disjoint if the sums are equal.
    are_disjoint = sum(box.elements for _, box in pairs) == whole.elements
    are_single = all(len(layout.cells_of(slot)) == 1 for slot in storing)
    if are_boxes(layout, storing) and are_single and are_disjoint:
        return (layout, {slot: (box,) for slot, box in pairs}), len(pairs)
    if len(pairs) > MAX_CHUNKS:
        return None, len(pairs)
    if not are_disjoint:
        pairs = _make_disjoint(pairs)
    boxes: dict[int, list[Box]] = {}
    for slot, box in pairs:
        boxes.setdefault(slot, []).append(box)
    stored = Layout.from_boxes(layout.shape, pairs, layout.slots)
    return (stored, {slot: tuple(slot_boxes) for slot, slot_boxes in boxes.items()}), len(pairs)


def _make_disjoint(pairs: list[tuple[int, Box]]) -> list[tuple[int, Box]]:
    """Subtract from each box all boxes before it."""
    disjoint: list[tuple[int, Box]] = []
    for slot, box in pairs:
        parts = [box]
        for _, other in disjoint:
            parts = [part for whole in parts for part in whole.subtract(other)]
        disjoint += [(slot, part) for part in parts]
    return disjoint


# The second file of rank 0, as PyTorch numbers the files of a rank's threads.
VALUES_FILE = "__0_1.distcp"


def add_values(
    write_plan: WritePlan, values: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]
) -> WritePlan:
    """Return a write plan with a file of plain values, if there are any.

    Raises:
        UsageError: a value that cannot be stored in a pickle of plain values.
    """
    if not values:
        return write_plan
    content = b"".join(saved_bytes(value) for value in values.values())
    file = NewFile(StoredFile(VALUES_FILE, len(content), 0), content)
    return write_plan.replace(
        files=(*write_plan.files, file),
        values=dict(values),
        paths={**write_plan.paths, **{name: paths[name] for name in values if name in paths}},
    )


def with_value_items(write_plan: WritePlan) -> WritePlan:
    """Return a write plan whose items are also its values."""
    items, start = dict(write_plan.items), 0
    for name, value in write_plan.values.items():
        size = len(saved_bytes(value))
        items[name] = StoredItem(name, FileRange(VALUES_FILE, start), size)
        start += size
    return write_plan.replace(items=items)
