"""New checkpoints: their contents, and how a format arranges these in files.

1. A conversion says what the new checkpoint holds (`NewCheckpoint`): tensors in their layouts,
   and what else the source has.
2. Its format answers with an `Arrangement`: files of known sizes, and where in them each rank's
   shards lie. Elements are written there by anyone, in any order.
3. A file may have bytes that are known beforehand, such as a header, and bytes that follow from
   the checksums of its elements, which are written last (`NewFile`).

Where ranks hold copies of one shard, a format stores one of them, or each (`find_storing_ranks`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from reshard.binding import REPLICAS
from reshard.checkpoint.contents import StoredFile, StoredItem, StoredTensor
from reshard.dtypes import DType
from reshard.errors import RecipeError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.runs import IntArray, RunTable

_Tensor = TypeVar("_Tensor")


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the new checkpoint: its type, its layout, and the sharding's text if any."""

    dtype: DType
    layout: Layout
    spec: str | None = None


@dataclass(frozen=True)
class NewCheckpoint:
    """The contents of a new checkpoint.

    Attributes:
        tensors: in their layouts, by name; `mesh` is what they are cut for, where known.
        metadata: the text metadata of the source's files.
        items, paths, attributes: those of the source, as in a `Checkpoint`.
        replicas: `once` stores one copy of equal shards, `every` one for each rank.
        most_file_bytes: begin a new file beyond so many bytes.
        values: plain values beside the tensors, as in a `Checkpoint`.

    Raises:
        UsageError: another word for `replicas`.
    """

    tensors: Mapping[str, PlannedTensor]
    mesh: DeviceMesh | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    items: Mapping[str, StoredItem] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    replicas: str = REPLICAS[0]
    most_file_bytes: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.replicas not in REPLICAS:
            raise UsageError(f"replicas {self.replicas!r}; expected one of {', '.join(REPLICAS)}")


@dataclass(frozen=True)
class NewFile:
    """A file of the new checkpoint, with the bytes it begins with.

    A format whose files have more than that makes a class of its own of it.
    """

    stored: StoredFile
    content: bytes = b""

    def known_bytes(self) -> Iterator[tuple[int, bytes]]:
        """The bytes that are known before the elements are: where they begin, and the bytes."""
        yield 0, self.content

    @property
    def checked_ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges of elements, `(start, size)` in bytes, whose CRC-32 the file itself has."""
        return ()

    def closing_bytes(self, checksum: Callable[[int, int], int]) -> Iterator[tuple[int, bytes]]:
        """The bytes that are known when all elements are written: where they begin, and the bytes.

        `checksum(start, size)` returns the CRC-32 of one of the `checked_ranges`.
        """
        return iter(())


@dataclass(frozen=True)
class Arrangement:
    """The new checkpoint: tensors bound to files. `notes` are for the user.

    `items` are bytes that are no tensors, where they will be; `paths`, `attributes` and `values` as
    in a `Checkpoint`, those that the target has.
    """

    format: str
    mesh: DeviceMesh | None
    tensors: Mapping[str, StoredTensor]
    files: tuple[NewFile, ...]
    notes: tuple[str, ...] = ()
    items: Mapping[str, StoredItem] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


def check_values(tensors: Mapping[str, PlannedTensor]) -> None:
    """Raise RecipeError for a layout that is partial."""
    for name, tensor in tensors.items():
        if tensor.layout.contributions > 1:
            raise RecipeError(
                f"tensor {name!r} would be partial (`{tensor.spec}`); a checkpoint holds values, "
                "take the partial axes out of its rule"
            )


def group_by_bytes(
    tensors: Iterable[_Tensor], size_bytes: Callable[[_Tensor], int], most_bytes: int | None
) -> list[list[_Tensor]]:
    """The tensors of each file, in their order: at most so many bytes, or one that alone is larger.

    Without tensors, or without `most_bytes`, it is one file.

    >>> group_by_bytes([3, 9, 2, 2], int, 5)
    [[3], [9], [2, 2]]
    """
    groups: list[list[_Tensor]] = [[]]
    filled_bytes = 0
    for tensor in tensors:
        size = size_bytes(tensor)
        # A tensor larger than the limit gets a file of its own, never an empty one before it.
        if groups[-1] and most_bytes is not None and filled_bytes + size > most_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(tensor)
        filled_bytes += size
    return groups


def find_storing_ranks(
    tensors: Mapping[str, PlannedTensor], replicas: str
) -> dict[str, frozenset[int]]:
    """Which ranks store their shard of each tensor.

    Of the ranks that hold the same shard, it is that with the fewest bytes so far, or all of them
    where `replicas` is `every`.
    """
    stored_bytes: dict[int, int] = {}
    storing: dict[str, frozenset[int]] = {}
    # Equal ones are one object: there may be very many.
    make_set = lru_cache(maxsize=None)(frozenset[int])
    for name, tensor in tensors.items():
        chosen: list[int] = []
        for slots, elements in _group_equal_shards(tensor.layout):
            # Of copies the least loaded rank writes, so that the work of writing is spread.
            storing_slots = slots
            if replicas == "once" and len(slots) > 1:
                storing_slots = (min(slots, key=lambda slot: (stored_bytes.get(slot, 0), slot)),)
            chosen += storing_slots
            for slot in storing_slots:
                size_bytes = elements * tensor.dtype.itemsize_bytes
                stored_bytes[slot] = stored_bytes.get(slot, 0) + size_bytes
        storing[name] = make_set(tuple(chosen))
    return storing


# Many tensors of a model are cut alike.
@lru_cache(maxsize=4096)
def _group_equal_shards(layout: Layout) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The slots that hold each shard, and how many elements their memory has."""
    # For each dimension, the first part with the same runs: equal shards get equal keys.
    same = [_find_first_equal_parts(table) for table in layout.tables]
    groups: dict[bytes, list[int]] = {}
    for slot in layout.holders:
        cells = layout.cells_of(slot)
        # An empty shard is the same as no shard, but a tensor must be somewhere.
        empty = not layout.cell_elements[cells.start : cells.stop].any()
        parts = layout.cell_part[cells.start : cells.stop]
        columns = [first[parts[:, d]].tobytes() for d, first in enumerate(same)]
        # The dot tells the key of a scalar, which has no dimensions, from that of an empty shard.
        key = b"" if empty else b"".join(columns) + b"."
        groups.setdefault(key, []).append(slot)
    if len(groups) > 1:
        groups.pop(b"", None)
    shapes = layout.local_shapes
    return tuple((tuple(slots), math.prod(shapes[slots[0]])) for slots in groups.values())


def find_kinds(
    tensors: Mapping[str, PlannedTensor],
) -> tuple[list[tuple[DType, Layout, str | None]], IntArray]:
    """Type, layout and sharding of equal tensors, and the number of these for each tensor."""
    numbers: dict[tuple[DType, Layout, str | None], int] = {}
    # Those of equal tensors are mostly one object.
    by_identity: dict[int, int] = {}
    kind = np.zeros(len(tensors), dtype=np.int64)
    for row, tensor in enumerate(tensors.values()):
        number = by_identity.get(id(tensor))
        if number is None:
            key = (tensor.dtype, tensor.layout, tensor.spec)
            number = by_identity[id(tensor)] = numbers.setdefault(key, len(numbers))
        kind[row] = number
    return list(numbers), kind


@lru_cache(maxsize=1024)
def _find_first_equal_parts(table: RunTable) -> IntArray:
    """The first part with the same runs, for each part: several may hold one key/value head."""
    first: dict[tuple[tuple[int, int, int, int], ...], int] = {}
    parts = range(table.parts)
    equal = [first.setdefault(tuple(table.runs_of(part)), part) for part in parts]
    return np.array(equal, dtype=np.int64)


# Many tensors of a model are cut alike.
@lru_cache(maxsize=4096)
def are_boxes(layout: Layout, slots: frozenset[int]) -> bool:
    """Whether every stored shard is one box of the tensor, with nothing else in it.

    PyTorch's reader knows shards by where they begin, so no two may begin at one place.
    """
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    begins = first_indices(layout)
    for slot in slots:
        boxes = layout.boxes(slot)
        shape = layout.local_shapes.get(slot)
        if shape is None or (boxes and (len(boxes) > 1 or boxes[0].shape != shape)):
            return False
        # A part of padding alone is no box, nor is an empty one that is longer than the tensor.
        if not boxes and (0 not in shape or any(map(operator.gt, shape, layout.shape))):
            return False
        if shapes.setdefault(begins[slot], shape) != shape:
            return False
    return True


@lru_cache(maxsize=4096)
def first_indices(layout: Layout) -> dict[int, tuple[int, ...]]:
    """Where in the tensor the shard of each slot begins.

    An empty shard ends where the tensor does: who knows a tensor by its shards sees it whole.
    """
    begins = {}
    for slot in layout.holders:
        boxes = layout.boxes(slot)
        local = zip(layout.shape, layout.local_shapes[slot], strict=True)
        begins[slot] = boxes[0].start if boxes else tuple(max(0, n - own) for n, own in local)
    return begins
