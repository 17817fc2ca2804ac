"""Plans of new checkpoints: their contents, and the files in which a format stores these.

1. A conversion specifies the contents (`NewCheckpoint`): tensors in their layouts, and the other
   contents of the source.
2. The format returns a `WritePlan`: files of known sizes, and the file range of each rank's
   shards. Elements are written to these ranges by any process, in any order.
3. A file may have bytes that are known in advance, such as a header, and bytes that depend on the
   checksums of its elements, which are written last (`NewFile`).

If ranks hold replicas of a shard, a format stores the first or all (`find_storing_ranks`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import field
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from reshard._records import Record
from reshard.binding import REPLICAS
from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.contents import StoredFile, StoredItem, StoredTensor
from reshard.dtypes import DType
from reshard.errors import RecipeError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.runs import OWNED, IntArray, RunTable, find_distinct

_Tensor = TypeVar("_Tensor")


class PlannedTensor(Record):
    """A tensor of a new checkpoint: its dtype, its layout, and the text of its sharding, if any."""

    dtype: DType
    layout: Layout
    spec: str | None = None


class NewCheckpoint(Record):
    """The contents of a new checkpoint.

    Attributes:
        tensors: by name.
        mesh: of their layouts, if known.
        metadata: the text metadata of the source's files.
        items, paths, attributes: of the source, as in a `Checkpoint`.
        replicas: `once` stores a single replica of equal shards, `every` the replica of each rank.
        most_file_bytes: the size beyond which a new file is begun.
        values: plain values, as in a `Checkpoint`.
        source_files: the source's file of each tensor, if whole tensors stay in their files.
        file_name: of a target that is a single file; by default the format chooses a name.
        allow: conditions that are errors unless the user allows them.

    Raises:
        UsageError: an unknown value of `replicas`.
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
    allow: Collection[str] = ()

    def __post_init__(self) -> None:
        if self.replicas not in REPLICAS:
            raise UsageError(f"replicas {self.replicas!r}; expected one of {', '.join(REPLICAS)}")


class NewFile(Record):
    """A file of a new checkpoint, and the bytes with which it begins.

    Formats derive from it for files with a larger header or with checksums.
    """

    stored: StoredFile
    content: bytes = b""

    def known_bytes(self) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes that are known before the elements: offset and content."""
        yield 0, self.content

    @property
    def checked_ranges(self) -> tuple[tuple[int, int], ...]:
        """The byte ranges `(start, size)` of elements whose CRC-32 the file contains."""
        return ()

    def closing_bytes(self, checksum: Callable[[int, int], int]) -> Iterator[tuple[int, bytes]]:
        """Return the bytes that are known after all elements are written: offset and content.

        `checksum(start, size)` returns the CRC-32 of a range of `checked_ranges`.
        """
        return iter(())


class WritePlan(Record):
    """The tensors and files of a new checkpoint.

    Attributes:
        format: its name.
        mesh: of the layouts, if known.
        tensors: bound to the files, by name.
        files: in which elements are stored.
        notes: for the user.
        items: bytes that are not tensors, with their locations.
        paths, attributes, values: as in a `Checkpoint`, if the format stores them.
        copy_bytes: bytes of shards in files of other ranks, not counting the first replica of each.
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
    """Raise RecipeError if a layout is partial."""
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
    tensors: Iterable[_Tensor], size_bytes: Callable[[_Tensor], int], max_bytes: int | None
) -> list[list[_Tensor]]:
    """Split tensors into files of at most `max_bytes`; a larger tensor has a file of its own.

    Without tensors, or without `max_bytes`, there is a single file.

    >>> group_by_bytes([3, 9, 2, 2], int, 5)
    [[3], [9], [2, 2]]
    """
    groups: list[list[_Tensor]] = [[]]
    filled_bytes = 0
    for tensor in tensors:
        size = size_bytes(tensor)
        # A file is never empty, also if the first tensor is larger than the limit.
        if groups[-1] and max_bytes is not None and filled_bytes + size > max_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(tensor)
        filled_bytes += size
    return groups


def find_storing_ranks(
    tensors: Mapping[str, PlannedTensor], replicas: str
) -> dict[str, frozenset[int]]:
    """Return the ranks that store their shard of each tensor.

    Among replicas, the rank with the fewest bytes so far stores the shard, or all ranks if
    `replicas` is `every`.
    """
    stored_bytes: dict[int, int] = {}
    storing: dict[str, frozenset[int]] = {}
    # Equal sets share an object, since there may be very many.
    make_set = lru_cache(maxsize=None)(frozenset[int])
    for name, tensor in tensors.items():
        chosen: list[int] = []
        for slots, elements in _group_equal_shards(tensor.layout):
            # Among replicas, the least loaded rank writes.
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
    """Return the bytes of replicas beyond the first, if every rank stores its shards."""
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


# Many tensors of a model have equal layouts.
@lru_cache(maxsize=4096)
def _group_equal_shards(layout: Layout) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return the slots that hold each shard, and the number of elements of their memory."""
    # Each part is numbered by the first part with the same runs: equal shards get equal numbers.
    columns = [
        _find_first_equal_parts(table)[layout.cell_part[:, d]]
        for d, table in enumerate(layout.tables)
    ]
    number = find_distinct(np.stack(columns, axis=1))[2] if columns else layout.cell_slot * 0
    # An empty shard is stored only if all shards of the tensor are empty.
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


def find_kinds(
    tensors: Mapping[str, PlannedTensor],
) -> tuple[list[tuple[DType, Layout, str | None]], IntArray]:
    """Return the distinct dtypes, layouts and shardings, and the number of each tensor's."""
    numbers: dict[tuple[DType, Layout, str | None], int] = {}
    # Equal tensors mostly share an object.
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
    """Return the first part with the same runs for each part: several may hold a key/value head."""
    single = table.single_runs()
    count = np.bincount(single.part, minlength=table.parts)
    first = np.arange(table.parts)
    # Parts without runs are equal to the first of them.
    first[count == 0] = int(np.argmin(count))
    # Nearly all parts are a single run, and there may be very many.
    alone = np.flatnonzero(count[single.part] == 1)
    if len(alone):
        runs = np.stack([single.start, single.length, single.role], axis=1)[alone]
        _, at, numbers = find_distinct(runs)
        first[single.part[alone]] = single.part[alone][at][numbers]
    seen: dict[tuple[tuple[int, int, int, int], ...], int] = {}
    for part in np.flatnonzero(count > 1).tolist():
        first[part] = seen.setdefault(tuple(table.runs_of(part)), part)
    return first


class _Owned(NamedTuple):
    """The parts of a tensor that slots own, a row for each slot.

    Attributes:
        boxes: the number of boxes, shape `(slots,)`.
        begins, shapes: of the first box, if any, shape `(slots, dims)`.
        local: the shape of the memory, shape `(slots, dims)`.
    """

    boxes: IntArray
    begins: IntArray
    shapes: IntArray
    local: IntArray


def _find_owned(layout: Layout, slots: Collection[int]) -> _Owned | None:
    """Return the parts that slots own, in their order, or None unless each holds a single cell."""
    numbers = np.fromiter(slots, np.int64, len(slots))
    rows = np.searchsorted(layout.cell_slot, numbers)
    counts = np.searchsorted(layout.cell_slot, numbers, side="right") - rows
    if not (counts == 1).all():
        return None
    columns = []
    for d, table in enumerate(layout.tables):
        single = table.single_runs()
        own = single.take(single.role == OWNED)
        values = np.zeros((3, table.parts), dtype=np.int64)
        values[0] = np.bincount(own.part, minlength=table.parts)
        # If there are several, the first is written last.
        values[1, own.part[::-1]] = own.start[::-1]
        values[2, own.part[::-1]] = own.length[::-1]
        columns.append(values[:, layout.cell_part[rows, d]])
    count, begins, shapes = (
        np.array([column[n] for column in columns], np.int64).reshape(layout.ndim, len(numbers)).T
        for n in range(3)
    )
    return _Owned(count.prod(axis=1), begins, shapes, layout.cell_shape[rows])


@lru_cache(maxsize=4096)
def are_boxes(layout: Layout, slots: frozenset[int]) -> bool:
    """Return whether every stored shard is a box of the tensor, without padding.

    PyTorch's reader identifies shards by their offsets, so these must be distinct.
    """
    begins = first_indices(layout, slots)
    if len(begins) < len(slots):
        return False
    owned = _find_owned(layout, slots)
    if owned is None:
        are_single = all(_is_box(layout, slot) for slot in slots)
    else:
        is_one = (owned.boxes == 1) & (owned.shapes == owned.local).all(axis=1)
        # Padding alone is not a box, nor is an empty part that is longer than the tensor.
        fits = (owned.local <= np.array(layout.shape, np.int64)).all(axis=1)
        is_none = (owned.boxes == 0) & (owned.local == 0).any(axis=1) & fits
        are_single = bool((is_one | is_none).all())
    placed = {(begin, layout.local_shapes[slot]) for slot, begin in begins.items()}
    return are_single and len(placed) == len({*begins.values()})


def _is_box(layout: Layout, slot: int) -> bool:
    """Return whether the cells of a slot form a single box."""
    boxes, shape = layout.boxes(slot), layout.local_shapes[slot]
    if boxes or len(shape) != layout.ndim:
        return len(boxes) == 1 and boxes[0].shape == shape
    return 0 in shape and all(map(operator.le, shape, layout.shape))


@lru_cache(maxsize=4096)
def first_indices(layout: Layout, slots: frozenset[int]) -> dict[int, tuple[int, ...]]:
    """Return the offset in the tensor of the shard of each slot that has a shard.

    An empty shard ends at the end of the tensor, so that the shards extend over all of it.
    """
    owned = _find_owned(layout, slots)
    if owned is not None:
        ends = np.maximum(np.array(layout.shape, np.int64) - owned.local, 0)
        begins = np.where(owned.boxes[:, None] > 0, owned.begins, ends)
        return dict(zip(slots, map(tuple, begins.tolist()), strict=True))
    result = {}
    for slot in slots.intersection(layout.holders):
        boxes = layout.boxes(slot)
        own = layout.local_shapes[slot]
        # A shard of several cells is flat: it does not have a length in each dimension.
        own = own if len(own) == layout.ndim else (0,) * layout.ndim
        ends = (max(0, n - size) for n, size in zip(layout.shape, own, strict=True))
        result[slot] = boxes[0].start if boxes else tuple(ends)
    return result
