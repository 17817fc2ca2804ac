"""Offsets in the files of a new checkpoint for each part of a save by all ranks.

The plans of all ranks list their boxes of tensors. The coordinator passes them to the format, which
plans the files (`NewCheckpoint`), and sends each rank the offsets of its boxes::

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
from reshard.checkpoint.formats.write_plan import NewCheckpoint, PlannedTensor, WritePlan
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.layout import Box, Layout
from reshard.text import first_text

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class WritePlace:
    """The location of a box in a file: in the array of `shape` that begins at a byte of the file.

    `local` is the box's offset in that array. `file_bytes` is the size of the file, and
    `is_checked` is whether the file has a checksum of the array's bytes.
    """

    file: str
    file_bytes: int
    start_bytes: int
    shape: tuple[int, ...]
    local: tuple[int, ...]
    is_checked: bool


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """The coordinator's answer to a rank: its folder, its number, and the place of every item.

    Items without elements and items that are not tensors have no place. `own_files` lists the files
    that the rank alone writes (`OwnFiles`), in a save to an address; None in a save to a folder.
    """

    folder: str
    rank: int
    places: tuple[WritePlace | None, ...]
    own_files: Any = None


def find_box(item: WriteItem) -> Box:
    """Return the box of a tensor that an item denotes."""
    chunk = item.tensor_data.chunk
    return Box.of(chunk.sizes, chunk.offsets)


def list_values(plans: Sequence[SavePlan]) -> list[str]:
    """Return the names of values that are not tensors."""
    return [
        item.index.fqn
        for plan in plans
        for item in plan.items
        if item.type == WriteItemType.BYTE_IO
    ]


def check_values(format: CheckpointFormat, plans: Sequence[SavePlan]) -> None:
    """Raise UsageError for values that are not tensors if the format cannot store them."""
    names = list_values(plans)
    if names and Capability.ITEMS not in format.capabilities:
        raise UsageError(
            f"{first_text([*map(repr, names)], _SHOWN)} are no tensors, and {format.name} has "
            "no place for them in a save; leave them out of the state dict, or save with "
            "format='torch-dcp' and convert that"
        )


def plan_save_files(
    format: CheckpointFormat, plans: Sequence[SavePlan], metadata: Mapping[str, str]
) -> WritePlan:
    """Plan the files of a save, for the plans of all ranks.

    Raises:
        UsageError: plans that were omitted because they had not changed; a dtype or sharding that
            the format cannot represent; ranks that describe a tensor differently.
    """
    if not all(plan.usable for plan in plans):
        raise UsageError(
            "a plan was left out because it had not changed; save without enable_plan_caching: the "
            "files of every save are planned anew"
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
        # Rank 0 stores tensors without elements, and all of formats that have no shards.
        if name not in boxes or Capability.SHARDS not in format.capabilities:
            layout = Layout.whole(shape, [0], len(plans))
        else:
            layout = Layout.from_boxes(shape, boxes[name], len(plans))
        planned[name] = PlannedTensor(dtype, layout)
    return format.plan_write(NewCheckpoint(planned, metadata=metadata))


def find_places(write_plan: WritePlan, plans: Sequence[SavePlan], folder: str) -> list[RankPlaces]:
    """Return the places of each rank's items.

    Raises:
        UsageError: a format that stores other data than boxes of ranks.
    """
    files = {
        file.stored.name: (file.stored.size_bytes, bool(file.checked_ranges))
        for file in write_plan.files
    }
    rank_places = []
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
        rank_places.append(RankPlaces(folder, rank, tuple(places)))
    return rank_places


def _find_place(
    tensor: StoredTensor,
    rank: int,
    box: Box,
    files: Mapping[str, tuple[int, bool]],
    format: str,
    cells: dict[tuple[str, int], dict[Box, int]],
) -> WritePlace:
    layout = tensor.layout
    whole = Box.of(layout.shape)
    # The rank's own shard, or the shard of the single rank that stores the whole tensor.
    for slot in (rank, *tensor.stored_slots[:1]):
        if slot not in tensor.binding.addresses:
            continue
        # Cached, since a rank may have very many boxes.
        if (tensor.name, slot) not in cells:
            cells[tensor.name, slot] = _number_boxes(layout, slot)
        numbers = cells[tensor.name, slot]
        stored = next((part for part in (box, whole) if part in numbers), None)
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
    """Return the boxes of a slot with their cell numbers; empty if a cell has several boxes."""
    boxes = layout.boxes(slot)
    if len(boxes) != len(layout.cells_of(slot)):
        return {}
    return {box: number for number, box in enumerate(boxes)}


def as_paths(planner_data: Any) -> dict[str, tuple[str | int, ...]]:
    """Return the paths of names in the nested state dict, if given in the form of PyTorch's."""
    if not isinstance(planner_data, Mapping):
        return {}
    return {
        name: tuple(path)
        for name, path in planner_data.items()
        if isinstance(name, str)
        and isinstance(path, tuple | list)
        and all(type(step) in (str, int) for step in path)
    }
