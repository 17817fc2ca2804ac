"""The parts of ranks joined: every tensor with a layout over ranks and addresses in their files.

1. Parts that all say one sharding have its layout; a rank's part must have the shape that it gives.
2. Parts of several meshes (copies of a model on each), and chunks of a `ShardedTensor`, are boxes.
3. A plain tensor is whole, on every rank that has it: a copy. Where every tensor is plain and
   there are several ranks, nothing says how they are cut; `plain_cuts` finds it by rules.

The parts must cover every tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reshard.binding import Binding, FileRange, View
from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.formats.rank_files.local_parts import LocalPart
from reshard.checkpoint.formats.torch_files.reading import find_address
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.errors import CoverageError, FormatError, ReshardError
from reshard.layout import Box, Layout
from reshard.sharding import ShardingSpec

Parts = Mapping[int, tuple[str, LocalPart]]


def join_parts(folder: Path, name: str, parts: Parts, slots: int) -> StoredTensor:
    """The tensor that the parts of ranks are, bound to their files.

    Raises:
        FormatError: parts that do not fit together.
        CoverageError: parts that leave some of the tensor out.
    """
    first_file, first = next(iter(parts.values()))
    for file, part in parts.values():
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            raise FormatError(
                f"tensor {name!r} is {first.dtype} {list(first.shape)} in {folder / first_file}, "
                f"but {part.dtype} {list(part.shape)} in {folder / file}; the files belong to "
                "different saves"
            )
    shardings = {part.sharding for _, part in parts.values()}
    try:
        if len(shardings) == 1 and None not in shardings:
            tensor = bind_sharding(folder, name, parts, next(iter(shardings)), slots)
        else:
            tensor = _bind_boxes(name, parts, slots)
        _ = tensor.assembly
    except CoverageError as error:
        raise CoverageError(f"{folder}: {error}") from error
    except FormatError:
        raise
    except ReshardError as error:
        raise FormatError(f"{folder}: tensor {name!r}: {error}") from error
    return tensor


def bind_sharding(
    folder: Path,
    name: str,
    parts: Parts,
    sharding: ShardingSpec | None,
    slots: int,
    shape: tuple[int, ...] | None = None,
) -> StoredTensor:
    """The tensor of `shape` that a sharding cuts into the parts.

    Raises:
        FormatError: a part of another shape than the sharding gives its rank.
    """
    first = next(iter(parts.values()))[1]
    shape = first.shape if shape is None else shape
    layout = Layout.whole(shape, sorted(parts), slots)
    if sharding is not None:
        layout = sharding.layout(shape)
    addresses: dict[int, FileRange] = {}
    views: dict[int, View] = {}
    for rank, (file, part) in parts.items():
        expected = layout.local_shape(rank) if rank < layout.slots else None
        found = part.tensors[0].shape
        if expected != found and not (expected is None and 0 in found):
            raise FormatError(
                f"tensor {name!r} of {list(shape)}, cut by `{sharding}`: rank {rank} has "
                f"{list(found)} in {folder / file}, expected "
                f"{'nothing' if expected is None else list(expected)}"
            )
        if expected is not None:
            address, view = find_address(file, part.tensors[0])
            addresses[rank] = address
            if view is not None:
                views[rank] = view
    return StoredTensor(
        name,
        first.dtype,
        Binding(layout, addresses, views),
        None if sharding is None else str(sharding),
    )


def _list_boxes(name: str, rank: int, part: LocalPart) -> tuple[tuple[Box, ArchivedTensor], ...]:
    """The boxes of a rank's part, with the tensor that has each."""
    if part.boxes is not None:
        return tuple(zip(part.boxes, part.tensors, strict=True))
    tensor = part.tensors[0]
    if part.sharding is None:
        return ((Box((0,) * len(part.shape), part.shape), tensor),)
    layout = part.sharding.layout(part.shape)
    boxes = layout.boxes(rank) if rank < layout.slots else ()
    if not boxes and 0 in tensor.shape:
        return ()
    if len(boxes) != 1 or boxes[0].shape != tensor.shape:
        raise FormatError(
            f"tensor {name!r}: rank {rank} has {list(tensor.shape)}, by `{part.sharding}` "
            f"it has {', '.join(map(str, boxes)) or 'nothing'}"
        )
    return ((boxes[0], tensor),)


def _bind_boxes(name: str, parts: Parts, slots: int) -> StoredTensor:
    """The tensor that boxes on ranks are."""
    first = next(iter(parts.values()))[1]
    pairs: list[tuple[int, Box]] = []
    addresses: dict[int, list[FileRange]] = {}
    views: dict[int, list[View]] = {}
    strided = set()
    for rank, (file, part) in parts.items():
        for box, tensor in _list_boxes(name, rank, part):
            # A box without elements is nothing, but the only one of a tensor without any.
            if not box.elements and 0 not in first.shape:
                continue
            address, view = find_address(file, tensor)
            pairs.append((rank, box))
            addresses.setdefault(rank, []).append(address)
            views.setdefault(rank, []).append(view or View.row_major(tensor.shape))
            if view is not None:
                strided.add(rank)
    if not pairs:
        raise CoverageError(f"tensor {name!r} of {list(first.shape)}: no rank has any of it")
    binding = Binding(
        Layout.from_boxes(first.shape, pairs, slots),
        {rank: tuple(found) for rank, found in addresses.items()},
        {rank: tuple(views[rank]) for rank in strided},
    )
    return StoredTensor(name, first.dtype, binding)
