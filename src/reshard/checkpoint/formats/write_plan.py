"""New checkpoints: their contents, and how a format arranges these in files.

1. A conversion says what the new checkpoint holds (`NewCheckpoint`): tensors in their layouts,
   and what else the source has.
2. Its format answers with an `WritePlan`: files of known sizes, and where in them each rank's
   shards lie. Elements are written there by anyone, in any order.
3. A file may have bytes that are known beforehand, such as a header, and bytes that follow from
   the checksums of its elements, which are written last (`NewFile`).

Where ranks hold copies of one shard, a format stores one of them, or each (`find_storing_ranks`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from reshard.binding import REPLICAS
from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.contents import StoredFile, StoredItem, StoredTensor
from reshard.dtypes import DType
from reshard.errors import RecipeError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.runs import OWNED, IntArray, RunTable

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
        source_files: the source's file of each tensor, where whole tensors of one file stay in one.
        file_name: of the only file, where the target is that file; the format's own when None.

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
    source_files: Mapping[str, str] = field(default_factory=dict)
    file_name: str | None = None

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
class WritePlan:
    """The new checkpoint: tensors bound to files. `notes` are for the user.

    `items` are bytes that are no tensors, where they will be; `paths`, `attributes` and `values` as
    in a `Checkpoint`, those that the target has. `copy_bytes` counts the bytes of shards that the
    files of other ranks hold too, all but one copy of each.
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
    copy_bytes: int = 0


def check_values(tensors: Mapping[str, PlannedTensor]) -> None:
    """Raise RecipeError for a layout that is partial."""
    for name, tensor in tensors.items():
        if tensor.layout.contributions > 1:
            raise RecipeError(
                f"tensor {name!r} would be partial (`{tensor.spec}`); a checkpoint holds values, "
                "take the partial axes out of its rule"
            )


def group_by_file(names: Iterable[str], files: Mapping[str, str]) -> list[list[str]]:
    """Return the tensors of each file of a source, in the order of the files' names.

    >>> group_by_file(["a", "b", "c"], {"a": "y", "b": "x", "c": "y"})
    [['b'], ['a', 'c']]
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(files.get(name, ""), []).append(name)
    return [groups[file] for file in sorted(groups)] or [[]]


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


def count_copy_bytes(tensors: Mapping[str, PlannedTensor]) -> int:
    """Return the bytes of copies where every rank stores its shards, all but one of each."""
    return sum(
        (len(slots) - 1) * elements * tensor.dtype.itemsize_bytes
        for tensor in tensors.values()
        for slots, elements in _group_equal_shards(tensor.layout)
    )


def find_stored_replicas(tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return how a checkpoint stores equal shards, `once` or `every`; None if it has none."""
    has_copies = False
    columns = TensorColumns.of(tensors)
    for kind in columns.kinds:
        stored = {slot for slot, _ in kind.places}
        for slots, _ in _group_equal_shards(kind.layout):
            if not stored.issuperset(slots):
                return "once"
            has_copies |= len(slots) > 1
    return "every" if has_copies else None


# Many tensors of a model are cut alike.
@lru_cache(maxsize=4096)
def _group_equal_shards(layout: Layout) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The slots that hold each shard, and how many elements their memory has."""
    # For each dimension, the first part with the same runs: equal shards get equal numbers.
    columns = [
        _find_first_equal_parts(table)[layout.cell_part[:, d]]
        for d, table in enumerate(layout.tables)
    ]
    number = _number_rows(np.stack(columns, axis=1)) if columns else layout.cell_slot * 0
    # An empty shard is the same as no shard, but a tensor must be somewhere.
    is_filled = layout.cell_elements > 0
    groups: dict[int | tuple[int, ...], list[int]] = {}
    if layout.cells == len(layout.holders):
        own = np.where(is_filled, number, -1).tolist()
        for slot, shard in zip(layout.holders, own, strict=True):
            groups.setdefault(shard, []).append(slot)
    else:
        for slot in layout.holders:
            cells = layout.cells_of(slot)
            held = slice(cells.start, cells.stop)
            several = tuple(number[held].tolist()) if is_filled[held].any() else -1
            groups.setdefault(several, []).append(slot)
    if len(groups) > 1:
        groups.pop(-1, None)
    shapes = layout.local_shapes
    return tuple((tuple(slots), math.prod(shapes[slots[0]])) for slots in groups.values())


def _number_rows(rows: IntArray) -> IntArray:
    """Numbers of rows: equal ones have the same."""
    _, number = np.unique(rows, axis=0, return_inverse=True)
    return number.reshape(-1)


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
    single = table.single_runs()
    count = np.bincount(single.part, minlength=table.parts)
    first = np.arange(table.parts)
    first[count == 0] = int(np.argmin(count))
    # Nearly all parts are one run each, and there may be very many.
    alone = np.flatnonzero(count[single.part] == 1)
    if len(alone):
        runs = np.stack([single.start, single.length, single.role], axis=1)[alone]
        _, at, of = np.unique(runs, axis=0, return_index=True, return_inverse=True)
        first[single.part[alone]] = single.part[alone][at][of.reshape(-1)]
    seen: dict[tuple[tuple[int, int, int, int], ...], int] = {}
    for part in np.flatnonzero(count > 1).tolist():
        first[part] = seen.setdefault(tuple(table.runs_of(part)), part)
    return first


@dataclass(frozen=True, eq=False)
class _Owned:
    """What slots own of a tensor, a row for each.

    Attributes:
        boxes: how many boxes, shape `(slots,)`.
        begins, shapes: of the first box where there is one, shape `(slots, dims)`.
        local: the shape of the memory, shape `(slots, dims)`.
    """

    boxes: IntArray
    begins: IntArray
    shapes: IntArray
    local: IntArray


def _find_owned(layout: Layout, slots: Collection[int]) -> _Owned | None:
    """What these slots own, in their order; None if some hold several cells, or none."""
    given = np.fromiter(slots, np.int64, len(slots))
    rows = np.searchsorted(layout.cell_slot, given)
    counts = np.searchsorted(layout.cell_slot, given, side="right") - rows
    if not (counts == 1).all():
        return None
    columns = []
    for d, table in enumerate(layout.tables):
        single = table.single_runs()
        own = single.take(single.role == OWNED)
        found = np.zeros((3, table.parts), dtype=np.int64)
        found[0] = np.bincount(own.part, minlength=table.parts)
        # Of several the first is written last.
        found[1, own.part[::-1]] = own.start[::-1]
        found[2, own.part[::-1]] = own.length[::-1]
        columns.append(found[:, layout.cell_part[rows, d]])
    count, begins, shapes = (
        np.array([column[n] for column in columns], np.int64).reshape(layout.ndim, len(given)).T
        for n in range(3)
    )
    return _Owned(count.prod(axis=1), begins, shapes, layout.cell_shape[rows])


# Many tensors of a model are cut alike.
@lru_cache(maxsize=4096)
def are_boxes(layout: Layout, slots: frozenset[int]) -> bool:
    """Whether every stored shard is one box of the tensor, with nothing else in it.

    PyTorch's reader knows shards by where they begin, so no two may begin at one place.
    """
    begins = first_indices(layout, slots)
    if len(begins) < len(slots):
        return False
    owned = _find_owned(layout, slots)
    if owned is None:
        are_single = all(_is_box(layout, slot) for slot in slots)
    else:
        is_one = (owned.boxes == 1) & (owned.shapes == owned.local).all(axis=1)
        # A part of padding alone is no box, nor is an empty one that is longer than the tensor.
        fits = (owned.local <= np.array(layout.shape, np.int64)).all(axis=1)
        is_none = (owned.boxes == 0) & (owned.local == 0).any(axis=1) & fits
        are_single = bool((is_one | is_none).all())
    placed = {(begin, layout.local_shapes[slot]) for slot, begin in begins.items()}
    return are_single and len(placed) == len({*begins.values()})


def _is_box(layout: Layout, slot: int) -> bool:
    """Whether the cells of a slot are one box together."""
    boxes, shape = layout.boxes(slot), layout.local_shapes[slot]
    if boxes or len(shape) != layout.ndim:
        return len(boxes) == 1 and boxes[0].shape == shape
    return 0 in shape and all(map(operator.le, shape, layout.shape))


@lru_cache(maxsize=4096)
def first_indices(layout: Layout, slots: frozenset[int]) -> dict[int, tuple[int, ...]]:
    """Where in the tensor the shards of those slots begin that have one.

    An empty shard ends where the tensor does: who knows a tensor by its shards sees it whole.
    """
    owned = _find_owned(layout, slots)
    if owned is not None:
        ends = np.maximum(np.array(layout.shape, np.int64) - owned.local, 0)
        begins = np.where(owned.boxes[:, None] > 0, owned.begins, ends)
        return dict(zip(slots, map(tuple, begins.tolist()), strict=True))
    found = {}
    for slot in slots.intersection(layout.holders):
        boxes = layout.boxes(slot)
        own = layout.local_shapes[slot]
        # Several cells have no shape together.
        own = own if len(own) == layout.ndim else (0,) * layout.ndim
        ends = (max(0, n - size) for n, size in zip(layout.shape, own, strict=True))
        found[slot] = boxes[0].start if boxes else tuple(ends)
    return found
