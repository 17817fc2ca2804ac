"""Which files will a new checkpoint have, and where in them does each shard go?

1. Every tensor has its layout. Where ranks hold copies of the same shard, one copy is stored,
   by the rank that has the fewest bytes so far (`replicas="once"`), or every rank stores its
   own (`replicas="every"`).
2. A rank's shards go into one file, page-sized ones first, so that they begin on pages.
3. PyTorch's convention says where a shard begins in its tensor by one offset a dimension. It
   is used for the whole checkpoint if that is true of every shard; interleaved or padded
   shards need our manifest to be understood, and then the files do not pretend otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from reshard.binding import Binding, FileRange
from reshard.checkpoint.contents import StoredFile, StoredItem, StoredTensor
from reshard.checkpoint.formats import huggingface, sharded_safetensors
from reshard.checkpoint.formats.safetensors_header import FileHeader, NamedTensor
from reshard.checkpoint.formats.torch_files.archive_writing import NewArchive
from reshard.checkpoint.manifest import can_describe
from reshard.dtypes import DType
from reshard.errors import RecipeError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.runs import IntArray, RunTable

REPLICAS = ("once", "every")


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the new checkpoint: its type, its layout, and the sharding's text if any."""

    dtype: DType
    layout: Layout
    spec: str | None = None


@dataclass(frozen=True)
class NewFile:
    """A file of the new checkpoint, with the bytes it begins with.

    `header` is that of a safetensors file; `archives` are what a file of PyTorch's has.
    """

    stored: StoredFile
    content: bytes
    header: FileHeader | None
    archives: tuple[NewArchive, ...] = ()

    def known_bytes(self) -> Iterator[tuple[int, bytes]]:
        """The bytes that are known before the tensors are: where they begin, and they."""
        yield 0, self.content
        for archive in self.archives:
            yield archive.start_bytes, archive.head()


@dataclass(frozen=True)
class Arrangement:
    """The new checkpoint: tensors bound to files. `notes` are worth telling the user.

    `items` are bytes that are no tensors, where they will be; `paths` and `attributes` as in a
    `Checkpoint`.
    """

    format: str
    mesh: DeviceMesh | None
    tensors: Mapping[str, StoredTensor]
    files: tuple[NewFile, ...]
    notes: tuple[str, ...] = ()
    items: Mapping[str, StoredItem] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)


def arrange_whole(
    tensors: Mapping[str, PlannedTensor], metadata: Mapping[str, str], most_file_bytes: int | None
) -> Arrangement:
    """Whole tensors in the files of Hugging Face."""
    named = [(name, tensor.dtype, tensor.layout.shape) for name, tensor in tensors.items()]
    files = []
    addresses: dict[str, FileRange] = {}
    for name, content, header in huggingface.arrange_files(named, metadata, most_file_bytes):
        files.append(NewFile(StoredFile(name, header.file_size_bytes, 0), content, header))
        for entry in header.tensors:
            addresses[entry.name] = FileRange(name, entry.start_bytes)
    stored = {
        name: StoredTensor(name, tensor.dtype, Binding(tensor.layout, {0: addresses[name]}, {}))
        for name, tensor in tensors.items()
    }
    return Arrangement(huggingface.FORMAT, None, stored, tuple(files))


def arrange_shards(
    tensors: Mapping[str, PlannedTensor],
    mesh: DeviceMesh | None,
    metadata: Mapping[str, str],
    replicas: str = "once",
) -> Arrangement:
    """Shards in one file a rank.

    Raises:
        UsageError: another word than `once` or `every` for replicas.
        RecipeError: a partial layout; a checkpoint holds values, not contributions.
    """
    if replicas not in REPLICAS:
        raise UsageError(f"replicas {replicas!r}; expected one of {', '.join(REPLICAS)}")
    check_values(tensors)
    for name, tensor in tensors.items():
        if tensor.spec is None and not can_describe(tensor.layout):
            raise RecipeError(
                f"tensor {name!r} is laid out by a strategy with interleaved, padded or halo "
                "elements, which a manifest can only describe by a sharding; give rules instead"
            )
    storing = storing_slots(tensors, replicas)
    ranks = sorted({slot for slots in storing.values() for slot in slots}) or [0]
    interleaved = [
        name for name, tensor in tensors.items() if not are_boxes(tensor.layout, storing[name])
    ]
    files = []
    addresses: dict[str, dict[int, FileRange]] = {name: {} for name in tensors}
    for rank in ranks:
        named: list[NamedTensor] = []
        offsets: dict[str, tuple[int, ...]] = {}
        for name, tensor in tensors.items():
            if rank in storing[name]:
                named.append((name, tensor.dtype, tensor.layout.local_shape(rank) or ()))
                if not interleaved:
                    offsets[name] = _offset(tensor.layout, rank)
        file = sharded_safetensors.shard_file_name(rank)
        content, header = sharded_safetensors.arrange_file(
            named, metadata, None if interleaved else offsets, len(ranks), file
        )
        files.append(NewFile(StoredFile(file, header.file_size_bytes, rank), content, header))
        for entry in header.tensors:
            addresses[entry.name][rank] = FileRange(file, entry.start_bytes)
    stored = {
        name: StoredTensor(
            name, tensor.dtype, Binding(tensor.layout, addresses[name], {}), tensor.spec
        )
        for name, tensor in tensors.items()
    }
    notes: tuple[str, ...] = ()
    if interleaved:
        notes = (
            f"{len(interleaved)} tensors have shards that are no single box (first: "
            f"{interleaved[0]}), so PyTorch's reader cannot read this checkpoint; reshard can",
        )
    return Arrangement(sharded_safetensors.FORMAT, mesh, stored, tuple(files), notes)


def check_values(tensors: Mapping[str, PlannedTensor]) -> None:
    """Raise RecipeError for a layout that is partial."""
    for name, tensor in tensors.items():
        if tensor.layout.contributions > 1:
            raise RecipeError(
                f"tensor {name!r} would be partial (`{tensor.spec}`); a checkpoint holds values, "
                "take the partial axes out of its rule"
            )


def storing_slots(tensors: Mapping[str, PlannedTensor], replicas: str) -> dict[str, frozenset[int]]:
    """Which ranks store their shard of each tensor."""
    stored_bytes: dict[int, int] = {}
    storing: dict[str, frozenset[int]] = {}
    for name, tensor in tensors.items():
        layout = tensor.layout
        same = [_first_equal_parts(table) for table in layout.tables]
        groups: dict[bytes, list[int]] = {}
        for slot in layout.holders:
            cells = layout.cells_of(slot)
            # An empty shard is the same as no shard, but a tensor must be somewhere.
            empty = not layout.cell_elements[cells.start : cells.stop].any()
            parts = layout.cell_part[cells.start : cells.stop]
            columns = [first[parts[:, d]].tobytes() for d, first in enumerate(same)]
            key = b"" if empty else b"".join(columns) + b"."
            groups.setdefault(key, []).append(slot)
        if len(groups) > 1:
            groups.pop(b"", None)
        chosen: set[int] = set()
        for slots in groups.values():
            kept = slots if replicas == "every" else [_least(slots, stored_bytes)]
            chosen.update(kept)
            for slot in kept:
                size = int(np.prod(layout.local_shape(slot) or (), dtype=np.int64))
                stored_bytes[slot] = stored_bytes.get(slot, 0) + size * tensor.dtype.itemsize_bytes
        storing[name] = frozenset(chosen)
    return storing


@lru_cache(maxsize=1024)
def _first_equal_parts(table: RunTable) -> IntArray:
    """For each part the first part with the same runs: key/value heads are held by several."""
    first: dict[tuple[tuple[int, int, int, int], ...], int] = {}
    parts = range(table.parts)
    equal = [first.setdefault(tuple(table.runs_of(part)), part) for part in parts]
    return np.array(equal, dtype=np.int64)


def _least(slots: list[int], stored_bytes: Mapping[int, int]) -> int:
    return min(slots, key=lambda slot: (stored_bytes.get(slot, 0), slot))


# Many tensors of a model are cut alike.
@lru_cache(maxsize=4096)
def are_boxes(layout: Layout, slots: frozenset[int]) -> bool:
    """Whether every stored shard is one box of the tensor, with nothing else in it.

    PyTorch's reader knows shards by where they begin, so no two may begin at one place.
    """
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for slot in slots:
        boxes = layout.boxes(slot)
        shape = layout.local_shape(slot)
        if shape is None or (boxes and (len(boxes) > 1 or boxes[0].shape != shape)):
            return False
        if not boxes and np.prod(shape, dtype=np.int64) != 0:
            return False
        if shapes.setdefault(_offset(layout, slot), shape) != shape:
            return False
    return True


@lru_cache(maxsize=4096)
def _offset(layout: Layout, slot: int) -> tuple[int, ...]:
    boxes = layout.boxes(slot)
    return boxes[0].start if boxes else (0,) * layout.ndim
