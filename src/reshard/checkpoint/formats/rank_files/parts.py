"""The parts of tensors in ranks' files: read by rank, and joined to whole tensors.

1. A DTensor is pickled with its local tensor, the mesh of its ranks and a placement for each mesh
   axis; FSDP1's `ShardedTensor` with its chunks and the offsets of all chunks. Both are read as
   calls of the pickle (`torch_files.pickles`); no class of PyTorch is needed or instantiated.
2. The states of all ranks get canonical names::

       model_..._rank_R     NAME                           as in the state
       optim_..._rank_R     optimizer.state.NAME.KEY       and the value optimizer.param_groups
       extra_state_...      PATH, or rank_R.PATH           if ranks differ: random states

3. Parts with equal shardings have that layout; a rank's part must have the shape that it implies.
   Parts of several meshes (copies of a model on each), and chunks of a `ShardedTensor`, are boxes.
   A plain tensor is whole on every rank that has it: a copy. If every tensor is plain and there
   are several ranks, the sharding comes from the user (`plain_parts`).

The parts must cover every tensor.

Source: `torch.distributed.tensor` and `torch.distributed._shard` of PyTorch 2.2 to 2.13.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard.binding import Binding, FileRange, View
from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.formats.chunks import expect_covered
from reshard.checkpoint.formats.optimizer_states import OPTIMIZER_PREFIX
from reshard.checkpoint.formats.rank_files import (
    EXTRA,
    OPTIMIZER,
    RankFile,
    name_of_rank,
)
from reshard.checkpoint.formats.safetensors.header import SUFFIX, read_header
from reshard.checkpoint.formats.torch_files import reading
from reshard.checkpoint.formats.torch_files.nested_states import flatten_state
from reshard.checkpoint.formats.torch_files.pickles import Call, Global, shortened
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor, as_sizes, explain
from reshard.checkpoint.storage.remote_paths import map_paths
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import (
    CoverageError,
    FormatError,
    ReshardError,
    UnreadableTensorError,
    UsageError,
)
from reshard.geometry.regions import bind_regions
from reshard.layout import Box, Layout
from reshard.mesh import DeviceMesh
from reshard.notation import dtensor
from reshard.sharding import ShardingSpec

# DTensor was in `_tensor` before PyTorch 2.5, and is still named so in the pickles of that time.
_WRAPPERS = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._shard")
_MAX_RANKS = 1 << 20

ReadElements = Callable[[ArchivedTensor], bytes]


class LocalPart(NamedTuple):
    """The part of a tensor in a rank's file.

    `sharding` determines the part, or `boxes` do, a box for each of its tensors; a plain tensor has
    neither. `shape` is the shape of the whole tensor, or of a plain tensor itself.
    """

    dtype: DType
    shape: tuple[int, ...]
    tensors: tuple[ArchivedTensor, ...]
    sharding: ShardingSpec | None = None
    boxes: tuple[Box, ...] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the file does not describe which part of a tensor it is."""
        return self.sharding is None and self.boxes is None

    def boxes_of(self, rank: int) -> tuple[Box, ...]:
        """Return the boxes of the tensor that a rank has, by its file."""
        if self.sharding is not None:
            layout = self.sharding.layout(self.shape)
            return layout.boxes(rank) if rank < layout.slots else ()
        return (Box.of(self.shape),) if self.boxes is None else self.boxes


def is_part(value: object) -> bool:
    """Return whether a value of a file is a tensor, or a part of a tensor."""
    return type(value) is ArchivedTensor or (isinstance(value, Call) and _find_wrapper(value) != "")


def _find_wrapper(call: Call) -> str:
    """Return the class of a tensor that wraps others, or empty text for other calls."""
    if call.function.name != "_rebuild_from_type_v2" or len(call.arguments) < 4:
        return ""
    kind = call.arguments[1]
    if isinstance(kind, Global) and kind.module.startswith(_WRAPPERS):
        return kind.name if kind.name in ("DTensor", "ShardedTensor") else ""
    return ""


class PartReader:
    """A reader of the parts in the file of `rank`, of `ranks` files; `label` names it in errors."""

    def __init__(self, label: str, rank: int, ranks: int, read: ReadElements) -> None:
        self._label = label
        self._rank = rank
        self._ranks = ranks
        self._read = read
        # Tensors of a file share their meshes.
        self._meshes: dict[int, DeviceMesh] = {}

    def part(self, name: str, value: Any) -> LocalPart:
        """Return the part that a value of the file describes.

        Raises:
            FormatError: a value that is not described as by PyTorch, or is partial.
        """
        if type(value) is ArchivedTensor:
            return LocalPart(value.dtype, value.shape, (value,))
        where = f"{self._label}: tensor {name!r}"
        try:
            if _find_wrapper(value) == "DTensor":
                return self._read_dtensor(where, value)
            return self._read_sharded_tensor(where, value)
        except ReshardError as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"{where}: {error}") from error
        except (KeyError, AttributeError, TypeError, IndexError, ValueError) as error:
            raise FormatError(
                f"{where} is described in another way than by PyTorch 2.2 to 2.13 ({error})"
            ) from error

    def _read_dtensor(self, where: str, call: Call) -> LocalPart:
        dtype, shape = _dtype_and_shape(where, call)
        state = _attributes(call.arguments[3])
        local, spec = state["_local_tensor"], _attributes(state["_spec"])
        # The tensor of an asynchronous collective wraps another.
        what = local
        if isinstance(local, Call) and len(local.arguments) > 3:
            inner = local.arguments[3]
            local = inner.get("elem") if isinstance(inner, dict) else None
        if type(local) is not ArchivedTensor:
            raise UnreadableTensorError(f"a DTensor whose part is {explain(what)}")
        placements = [_placement(where, placement) for placement in spec["placements"]]
        if any(isinstance(placement, dtensor.Partial) for placement in placements):
            raise FormatError(
                f"{where} is partial: ranks hold contributions to its values. Save it after "
                "`redistribute` to Shard or Replicate"
            )
        sharding = dtensor.sharding_of_placements(
            self._mesh(where, spec["mesh"]), placements, len(shape), _shard_order(spec)
        )
        if local.dtype is not dtype:
            raise FormatError(f"{where} is {dtype}, its own part {local.dtype}")
        return LocalPart(dtype, shape, (local,), sharding)

    def _mesh(self, where: str, call: Call) -> DeviceMesh:
        mesh = self._meshes.get(id(call))
        if mesh is None:
            state = _attributes(call)
            # PyTorch 2.9 replaced the tensor of ranks by sizes and strides over the root's ranks.
            if "_layout" in state:
                shape, ranks = self._new_mesh(state)
            else:
                shape, ranks = state["mesh"].shape, self._numbers(state["mesh"])
            if not shape or math.prod(shape) != len(ranks) or len(ranks) > _MAX_RANKS:
                raise FormatError(f"{where}: a mesh of {list(shape)} with {len(ranks)} ranks")
            if any(type(rank) is not int or not 0 <= rank < self._ranks for rank in ranks):
                raise FormatError(
                    f"{where}: it is cut over {len(ranks)} ranks ({', '.join(map(str, ranks[:8]))}"
                    f"{', ...' if len(ranks) > 8 else ''}), and there are files of {self._ranks}; "
                    "the checkpoint is incomplete, fetch the others"
                )
            names = state.get("_mesh_dim_names", state.get("mesh_dim_names"))
            axes = names or tuple(f"dim{number}" for number in range(len(shape)))
            mesh = DeviceMesh("torch", tuple(shape), tuple(axes), ranks)
            self._meshes[id(call)] = mesh
        return mesh

    def _new_mesh(self, state: dict[Any, Any]) -> tuple[tuple[int, ...], list[int]]:
        """Return shape and ranks of a mesh with sizes and strides over the ranks of its root.

        For a part of the root's axes, it is the mesh that contains this file's rank.
        """
        ranks = state.get("_flatten_rank_map")
        ranks = list(ranks) if ranks is not None else self._numbers(state["_rank_map"])
        axes = [_attributes(axis) for axis in _attributes(state["_layout"])["axes"]]
        shape = tuple(math.prod(axis["shape"]) for axis in axes)
        # An axis that was flattened has several sizes.
        sizes = [size for axis in axes for size in axis["shape"]]
        strides = [stride for axis in axes for stride in axis["stride"]]
        # A single rank has an axis without sizes.
        if math.prod(sizes) > _MAX_RANKS:
            raise ValueError(f"a mesh of {sizes}")
        steps = itertools.product(*(range(size) for size in sizes))
        places = [sum(n * s for n, s in zip(step, strides, strict=True)) for step in steps]
        here, first, last = ranks.index(self._rank), min(places), max(places)
        # This rank has a place among these offsets from the beginning of its mesh.
        for place in places:
            start = here - place
            is_inside = start + first >= 0 and start + last < len(ranks)
            if is_inside and _begins_mesh(start, sizes, strides):
                return shape, [ranks[start + other] for other in places]
        raise ValueError(f"rank {self._rank} is in no mesh of sizes {sizes}, strides {strides}")

    def _numbers(self, tensor: Any) -> list[int]:
        """Return the elements of a small tensor of whole numbers."""
        if type(tensor) is not ArchivedTensor or math.prod(tensor.shape) > _MAX_RANKS:
            raise ValueError("the ranks of a mesh are not a tensor")
        flat = np.frombuffer(self._read(tensor), dtype=tensor.dtype.numpy)
        numbers: list[int] = flat[tensor.view.positions(tensor.shape)].reshape(-1).tolist()
        return numbers

    def _read_sharded_tensor(self, where: str, call: Call) -> LocalPart:
        dtype, shape = _dtype_and_shape(where, call)
        # Its state begins with the local shards; metadata of all shards and the group follow.
        shards = call.arguments[3][0]
        tensors, boxes = [], []
        for shard in shards:
            state = _attributes(shard)
            tensor, place = state["tensor"], _attributes(state["metadata"])
            start, sizes = as_sizes(place["shard_offsets"]), as_sizes(place["shard_sizes"])
            if start is None or sizes is None or len(start) != len(shape) != len(sizes):
                raise ValueError("a shard without a place")
            box = Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
            if any(stop > size for stop, size in zip(box.stop, shape, strict=True)):
                raise FormatError(f"{where}: its shard {box} lies outside of {list(shape)}")
            if type(tensor) is not ArchivedTensor or tensor.shape != sizes:
                raise FormatError(f"{where}: its shard {box} is not a tensor of that shape")
            if tensor.dtype is not dtype:
                raise FormatError(f"{where} is {dtype}, its shard {tensor.dtype}")
            tensors.append(tensor)
            boxes.append(box)
        return LocalPart(dtype, shape, tuple(tensors), boxes=tuple(boxes))


def _begins_mesh(start: int, sizes: list[int], strides: list[int]) -> bool:
    """Return whether a mesh may begin at a place: none of its own axes has a step in it."""
    return all(
        size == 1 or (start // stride) % size == 0
        for size, stride in zip(sizes, strides, strict=True)
    )


def _attributes(value: Any) -> dict[Any, Any]:
    """Return the attributes of an object: its state, or the second of a pair of states."""
    state = value.state if isinstance(value, Call) else value
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state = state[1]
    if not isinstance(state, dict):
        raise ValueError(f"no attributes of {shortened(repr(value))}")
    return state


def _dtype_and_shape(where: str, call: Call) -> tuple[DType, tuple[int, ...]]:
    """Return the type and shape in the call of a wrapper's class."""
    # `_rebuild_wrapper_subclass` has class, element type, size, strides, offset, and more.
    arguments = call.arguments[2]
    shape = as_sizes(arguments[2])
    if shape is None or not isinstance(arguments[1], Global):
        raise ValueError("no element type and shape")
    try:
        return as_dtype(arguments[1].name), shape
    except UsageError as error:
        raise UnreadableTensorError(f"of {error}") from error


def _placement(where: str, call: Call) -> dtensor.Placement:
    name, state = call.function.name, call.state
    # A state without names has its values in the order of the fields.
    values = [*state.values()] if isinstance(state, dict) else [*call.arguments]
    match name, values:
        case "Shard", [int(dim), *_]:
            return dtensor.Shard(dim)
        case "_StridedShard", [int(dim), int(factor), *_]:
            return dtensor.StridedShard(dim, factor)
        case "Replicate", _:
            return dtensor.Replicate()
        # `_Partial` in early versions of PyTorch.
        case (("Partial" | "_Partial"), _):
            return dtensor.Partial()
    raise FormatError(
        f"{where} has the placement {shortened(str(call.function))}, expected Shard, "
        "_StridedShard or Replicate"
    )


def _shard_order(spec: dict[Any, Any]) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """Return the order in which mesh axes shard, or None if absent."""
    order = spec.get("shard_order")
    if order is None:
        return None
    entries: Iterator[Any] = (
        entry.arguments if isinstance(entry, Call) else entry for entry in order
    )
    return tuple((dim, tuple(axes)) for dim, axes in entries)


# Keys under which programs keep the state of the model, in files with other contents.
_MODEL_KEYS = ("model", "state_dict", "module", "model_state_dict")


class RankStates(NamedTuple):
    """The states in the files of all ranks.

    Attributes:
        parts: for each name the part of each rank, and its file.
        values: plain values that are equal on all ranks; others under `rank_R.`.
        unread: other values, with the reason.
        unreadable: tensors that cannot be read on some rank, with their type.
    """

    parts: dict[str, dict[int, tuple[str, LocalPart]]]
    values: dict[str, Any]
    unread: dict[str, str]
    unreadable: dict[str, str]


def read_states(folder: Path, groups: Mapping[str, tuple[RankFile, ...]]) -> RankStates:
    """Return the states in the files of each kind.

    Raises:
        CheckpointError: a file that cannot be read.
        FormatError: a file that is damaged, or not a state.
    """
    states = RankStates({}, {}, {}, {})
    paths = [folder / file.name for files in groups.values() for file in files]
    contents = map_paths(
        lambda path: (
            _read_safetensors(path) if path.name.endswith(SUFFIX) else reading.read_torch_file(path)
        ),
        paths,
    )
    for kind, files in groups.items():
        values: dict[str, dict[int, Any]] = {}
        for file in files:
            path, content = folder / file.name, next(contents)
            unreadable: dict[str, str] = {}
            parts = _find_parts(path, content, file, len(files), values, states, unreadable)
            begin = OPTIMIZER_PREFIX if kind == OPTIMIZER else ""
            states.unreadable.update({begin + n: why for n, why in unreadable.items()})
            for name, part in parts.items():
                full_name = name_of_rank(name, file.rank, len(files)) if kind == EXTRA else name
                if kind == OPTIMIZER:
                    full_name = OPTIMIZER_PREFIX + name
                states.parts.setdefault(full_name, {})[file.rank] = file.name, part
        for name, by_rank in values.items():
            name = OPTIMIZER_PREFIX + name if kind == OPTIMIZER else name
            listed = [*by_rank.values()]
            # By their texts too, in which a NaN is equal to itself.
            first, text = listed[0], repr(listed[0])
            are_equal = all(value == first or repr(value) == text for value in listed)
            if len(listed) == len(files) and are_equal:
                states.values[name] = listed[0]
            else:
                of_ranks = by_rank.items()
                states.values.update({name_of_rank(name, r, len(files)): v for r, v in of_ranks})
    # A tensor that some rank cannot read is incomplete.
    for name in states.unreadable:
        states.parts.pop(name, None)
    return states


def list_parameters(
    parts: Mapping[str, Mapping[int, tuple[str, LocalPart]]], cut: Collection[str] = ()
) -> list[str]:
    """Return the names of the model's parameters in their order.

    If other tensors are parts, plain tensors are buffers, except those that a user has `cut`. Among
    tied tensors, the first counts.
    """
    model = {name: own for name, own in parts.items() if not name.startswith(OPTIMIZER_PREFIX)}
    are_described = any(not part.is_plain for own in model.values() for _, part in own.values())
    seen = set()
    names = []
    for name, own in model.items():
        first = next(iter(own.values()))[1]
        if (are_described and first.is_plain and name not in cut) or name.startswith("rank_"):
            continue
        place = tuple(
            (rank, file, tensor.start_bytes, tensor.view, tensor.shape)
            for rank, (file, part) in own.items()
            for tensor in part.tensors
            if tensor.storage_bytes
        )
        # Tensors without storage share no bytes, so they are not tied.
        if not place or place not in seen:
            names.append(name)
        seen.add(place)
    return names


def _find_parts(
    path: Path,
    state: Any,
    file: RankFile,
    ranks: int,
    values: dict[str, dict[int, Any]],
    states: RankStates,
    unreadable: dict[str, str],
) -> dict[str, LocalPart]:
    """Return the parts in a file; add its plain values to `values`, and list the others."""
    if path.name.endswith(SUFFIX):
        own: dict[str, LocalPart] = state
        return own
    # A state dict in a dict with more in it has the names of the model.
    if isinstance(state, dict) and file.kind != OPTIMIZER:
        inner = [key for key in _MODEL_KEYS if isinstance(state.get(key), dict)]
        if len(inner) == 1 and not any(is_part(value) for value in state.values()):
            rest = {key: value for key, value in state.items() if key != inner[0]}
            state = {**rest, **state[inner[0]]}
    flat = flatten_state(state, str(path), is_part)
    if "" in flat.unread:
        raise FormatError(f"{path} holds {flat.unread['']}, no state; save its state_dict()")
    reader = PartReader(str(path), file.rank, ranks, partial(reading.read_storage, path))
    parts = {}
    for name, value in flat.tensors.items():
        try:
            parts[name] = part = reader.part(name, value)
        except UnreadableTensorError as error:
            unreadable[name] = str(error)
            continue
        reading.check_tensor(path, name, part.dtype, part.shape)
    for name, value in flat.values.items():
        # An empty state is unnamed.
        if not name:
            continue
        values.setdefault(name, {})[file.rank] = value
    for name, why in flat.unread.items():
        (unreadable if name in flat.unread_tensors else states.unread)[name] = why
    return parts


def _read_safetensors(path: Path) -> dict[str, LocalPart]:
    parts = {}
    for entry in read_header(path).tensors:
        size_bytes = entry.stop_bytes - entry.start_bytes
        view = View.row_major(entry.shape)
        tensor = ArchivedTensor(entry.dtype, entry.shape, view, entry.start_bytes, size_bytes, None)
        parts[entry.name] = LocalPart(entry.dtype, entry.shape, (tensor,))
    return parts


Parts = Mapping[int, tuple[str, LocalPart]]


def join_parts(folder: Path, name: str, parts: Parts, slots: int) -> StoredTensor:
    """Return the tensor that consists of the parts of ranks, bound to their files.

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
    # A common sharding keeps its text; parts of several meshes are bound box by box.
    shardings = {part.sharding for _, part in parts.values()}
    try:
        if len(shardings) == 1 and None not in shardings:
            return bind_sharding(folder, name, parts, next(iter(shardings)), slots)
        return _bind_boxes(folder, name, parts, slots)
    # These name the files already.
    except (CoverageError, FormatError):
        raise
    except ReshardError as error:
        raise FormatError(f"{folder}: tensor {name!r}: {error}") from error


def bind_sharding(
    folder: Path,
    name: str,
    parts: Parts,
    sharding: ShardingSpec | None,
    slots: int,
    shape: tuple[int, ...] | None = None,
) -> StoredTensor:
    """Return the tensor of `shape` that a sharding cuts into the parts.

    Raises:
        FormatError: a part of another shape than the sharding gives its rank.
        CoverageError: parts that leave some of the tensor out.
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
        local = part.tensors[0].shape
        # A rank outside of a DTensor's mesh has a local tensor without elements.
        if expected != local and not (expected is None and 0 in local):
            raise FormatError(
                f"tensor {name!r} of {list(shape)}, cut by `{sharding}`: rank {rank} has "
                f"{list(local)} in {folder / file}, expected "
                f"{'nothing' if expected is None else list(expected)}"
            )
        if expected is not None:
            address, view = reading.find_address(file, part.tensors[0])
            addresses[rank] = address
            if view is not None:
                views[rank] = view
    spec = None if sharding is None else str(sharding)
    tensor = StoredTensor(name, first.dtype, Binding(layout, addresses, views), spec)
    expect_covered(folder, tensor)
    return tensor


def _list_boxes(name: str, rank: int, part: LocalPart) -> tuple[tuple[Box, ArchivedTensor], ...]:
    """Return the boxes of a rank's part, with the tensor that has each."""
    boxes = part.boxes_of(rank)
    if part.sharding is not None:
        shape = part.tensors[0].shape
        if not boxes and 0 in shape:
            return ()
        if len(boxes) != 1 or boxes[0].shape != shape:
            raise FormatError(
                f"tensor {name!r}: rank {rank} has {list(shape)}, by `{part.sharding}` "
                f"it has {', '.join(map(str, boxes)) or 'nothing'}"
            )
    return tuple(zip(boxes, part.tensors, strict=True))


def _bind_boxes(folder: Path, name: str, parts: Parts, slots: int) -> StoredTensor:
    """Return the tensor that consists of boxes on ranks."""
    first = next(iter(parts.values()))[1]
    # A box without elements counts only for a tensor without elements.
    regions = [
        (rank, reading.region_of(file, tensor).translate(box.start))
        for rank, (file, part) in parts.items()
        for box, tensor in _list_boxes(name, rank, part)
        if box.elements or 0 in first.shape
    ]
    if not regions:
        raise CoverageError(
            f"{folder}: tensor {name!r} of {list(first.shape)}: no rank has any of it"
        )
    binding = bind_regions(first.shape, regions, slots, first.dtype.itemsize_bytes)
    tensor = StoredTensor(name, first.dtype, binding)
    expect_covered(folder, tensor)
    return tensor
