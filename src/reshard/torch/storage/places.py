"""Where in the files of a new checkpoint each part of a save by all ranks lies.

The plans of all ranks say which box of which tensor each of them has. The coordinator turns them
into what a format arranges (`NewCheckpoint`), and tells each rank where its boxes go::

    plans of ranks             layouts                 files                  to each rank
    rank 0: w [0:4, 0:8]  -->  w: rank 0 and 1    -->  __0_0.distcp  -->      w at byte 4096
    rank 1: w [4:8, 0:8]                               __1_0.distcp           w at byte 4096
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.formats.format import Capability, CheckpointFormat
from reshard.checkpoint.formats.write_plan import (
    NewCheckpoint,
    PlannedTensor,
    WritePlan,
)
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.layout import Box, Layout
from reshard.text import first_text

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class WritePlace:
    """Where a rank writes a box: into the array of `shape` that begins at a byte of a file.

    `local` is where the box begins in that array. `file_bytes` is the size of the file, and
    `is_checked` says whether it has the checksum of these bytes.
    """

    file: str
    file_bytes: int
    start_bytes: int
    shape: tuple[int, ...]
    local: tuple[int, ...]
    is_checked: bool


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """What a rank is told: the folder to write in, its number, and the place of every item.

    An item without elements, or that is no tensor, has none. `own_files` say, of a save to an
    address, which files the rank writes alone (`OwnFiles`); None into a folder.
    """

    folder: str
    rank: int
    places: tuple[WritePlace | None, ...]
    own_files: Any = None


def find_box(item: WriteItem) -> Box:
    """The box of a tensor that an item is."""
    chunk = item.tensor_data.chunk
    start = tuple(chunk.offsets)
    return Box(start, tuple(a + n for a, n in zip(start, chunk.sizes, strict=True)))


def list_values(plans: Sequence[SavePlan]) -> list[str]:
    """The names of what is no tensor."""
    return [
        item.index.fqn
        for plan in plans
        for item in plan.items
        if item.type == WriteItemType.BYTE_IO
    ]


def check_values(format: CheckpointFormat, plans: Sequence[SavePlan]) -> None:
    """Raise UsageError for values that are no tensors, where the format has no place for them."""
    names = list_values(plans)
    if names and Capability.ITEMS not in format.capabilities:
        raise UsageError(
            f"{first_text([*map(repr, names)], _SHOWN)} are no tensors, and {format.name} has "
            "no place for them in a save; leave them out of the state dict, or save with "
            "format='torch-dcp' and convert that"
        )


def arrange_save(
    format: CheckpointFormat, plans: Sequence[SavePlan], metadata: Mapping[str, str]
) -> WritePlan:
    """The files of a save, for the plans of all ranks.

    Raises:
        UsageError: plans that were left out since they had not changed; a type or a cut that the
            format cannot say; two ranks that speak of one tensor differently.
    """
    if not all(plan.usable for plan in plans):
        raise UsageError(
            "a plan was left out because it had not changed; save without enable_plan_caching: the "
            "files of every save are arranged anew"
        )
    check_values(format, plans)
    boxes: dict[str, list[tuple[int, Box]]] = {}
    kinds: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                continue
            name, data = item.index.fqn, item.tensor_data
            kind = (as_dtype(data.properties.dtype), tuple(data.size))
            if kinds.setdefault(name, kind) != kind:
                raise UsageError(
                    f"rank {rank} has {name!r} as {kind[0]} {list(kind[1])}, another rank as "
                    f"{kinds[name][0]} {list(kinds[name][1])}; one name is one tensor"
                )
            box = find_box(item)
            if box.elements:
                boxes.setdefault(name, []).append((rank, box))
    planned = {}
    for name, (dtype, shape) in kinds.items():
        if name not in boxes or Capability.SHARDS not in format.capabilities:
            layout = Layout.whole(shape, [0], len(plans))
        else:
            layout = Layout.from_boxes(shape, boxes[name], len(plans))
        planned[name] = PlannedTensor(dtype, layout)
    return format.plan_write(NewCheckpoint(planned, metadata=metadata))


def find_places(write_plan: WritePlan, plans: Sequence[SavePlan], folder: str) -> list[RankPlaces]:
    """Where each rank's items go.

    Raises:
        UsageError: a format that stores something else than boxes of ranks.
    """
    files = {
        file.stored.name: (file.stored.size_bytes, bool(file.checked_ranges))
        for file in write_plan.files
    }
    found = []
    cells: dict[tuple[str, int], dict[Box, int]] = {}
    for rank, plan in enumerate(plans):
        places: list[WritePlace | None] = []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO or not find_box(item).elements:
                places.append(None)
                continue
            tensor = write_plan.tensors[item.index.fqn]
            places.append(
                _find_place(tensor, rank, find_box(item), files, write_plan.format, cells)
            )
        found.append(RankPlaces(folder, rank, tuple(places)))
    return found


def _find_place(
    tensor: StoredTensor,
    rank: int,
    box: Box,
    files: Mapping[str, tuple[int, bool]],
    format: str,
    cells: dict[tuple[str, int], dict[Box, int]],
) -> WritePlace:
    layout = tensor.layout
    whole = Box((0,) * layout.ndim, layout.shape)
    # The rank's own shard, or that of the one rank that stores all of the tensor.
    for slot in (rank, *tensor.stored_slots[:1]):
        if slot not in tensor.binding.addresses:
            continue
        # A rank may have very many boxes: they are listed once.
        if (tensor.name, slot) not in cells:
            cells[tensor.name, slot] = _number_boxes(layout, slot)
        numbers = cells[tensor.name, slot]
        stored = next((one for one in (box, whole) if one in numbers), None)
        if stored is None or tensor.view(slot, numbers[stored]) is not None:
            continue
        number = numbers[stored]
        offset = int(layout.cell_offset[layout.cells_of(slot)[number]])
        place = tensor.file_range(slot, number, offset)
        local = tuple(a - b for a, b in zip(box.start, stored.start, strict=True))
        size, is_checked = files[place.path]
        return WritePlace(place.path, size, place.start_bytes, stored.shape, local, is_checked)
    raise UsageError(
        f"the format {format} has no one place for {box} of tensor {tensor.name!r} of rank {rank}; "
        "save with format='torch-dcp', and convert that"
    )


def _number_boxes(layout: Layout, slot: int) -> dict[Box, int]:
    """The boxes of a slot, each with the number of its cell; none where a cell has several."""
    boxes = layout.boxes(slot)
    if len(boxes) != len(layout.cells_of(slot)):
        return {}
    return {box: number for number, box in enumerate(boxes)}


def as_paths(planner_data: Any) -> dict[str, tuple[str | int, ...]]:
    """Where names stood in the nested state dict, where a planner says so as PyTorch's does."""
    if not isinstance(planner_data, Mapping):
        return {}
    return {
        name: tuple(path)
        for name, path in planner_data.items()
        if isinstance(name, str)
        and isinstance(path, tuple | list)
        and all(type(step) in (str, int) for step in path)
    }
