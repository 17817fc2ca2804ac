"""The parts of tensors in a rank's file: DTensors, FSDP1's ShardedTensors, and plain tensors.

A DTensor is pickled with its own part, the mesh of its ranks and a placement for each axis of it; a
`ShardedTensor` with its chunks and the places of all chunks. Both are read as the calls that the
pickle has (`torch_files.pickles`); no class of PyTorch is needed, or made.

Source: `torch.distributed.tensor` and `torch.distributed._shard` of PyTorch 2.2 to 2.13.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.checkpoint.formats.torch_files.pickles import Call, Global, shortened
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor, as_sizes, explain
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import FormatError, ReshardError, UnreadableTensorError, UsageError
from reshard.layout import Box
from reshard.mesh import DeviceMesh
from reshard.notation.dtensor import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    sharding_of_placements,
)
from reshard.sharding import ShardingSpec

_WRAPPERS = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._shard")
_MOST_RANKS = 1 << 20

ReadElements = Callable[[ArchivedTensor], bytes]


@dataclass(frozen=True, slots=True)
class LocalPart:
    """What a rank's file has of a tensor.

    Either `sharding` says which part it is, or `boxes`, one for each of its tensors; a plain tensor
    has neither. `shape` is the whole tensor's, a plain one's own.
    """

    dtype: DType
    shape: tuple[int, ...]
    tensors: tuple[ArchivedTensor, ...]
    sharding: ShardingSpec | None = None
    boxes: tuple[Box, ...] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing says which part of a tensor it is."""
        return self.sharding is None and self.boxes is None


def is_part(value: object) -> bool:
    """Whether a value of a file is a tensor, or a part of one."""
    return type(value) is ArchivedTensor or (isinstance(value, Call) and _find_wrapper(value) != "")


def _find_wrapper(call: Call) -> str:
    """The class of a tensor that wraps others, or nothing."""
    if call.function.name != "_rebuild_from_type_v2" or len(call.arguments) < 4:
        return ""
    kind = call.arguments[1]
    if isinstance(kind, Global) and kind.module.startswith(_WRAPPERS):
        return kind.name if kind.name in ("DTensor", "ShardedTensor") else ""
    return ""


class PartReader:
    """Reads the parts in the file of `rank`, of `ranks` files; `label` names it in errors."""

    def __init__(self, label: str, rank: int, ranks: int, read: ReadElements) -> None:
        self._label = label
        self._rank = rank
        self._ranks = ranks
        self._read = read
        # Tensors of a file share their meshes.
        self._meshes: dict[int, DeviceMesh] = {}

    def part(self, name: str, value: Any) -> LocalPart:
        """What a value of the file is a part of.

        Raises:
            FormatError: one that is described in another way than PyTorch's, or is partial.
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
        placements = [_placement(where, one) for one in spec["placements"]]
        if any(isinstance(one, Partial) for one in placements):
            raise FormatError(
                f"{where} is partial: ranks hold contributions to its values. Save it after "
                "`redistribute` to Shard or Replicate"
            )
        sharding = sharding_of_placements(
            self._mesh(where, spec["mesh"]), placements, len(shape), _shard_order(spec)
        )
        if local.dtype is not dtype:
            raise FormatError(f"{where} is {dtype}, its own part {local.dtype}")
        return LocalPart(dtype, shape, (local,), sharding)

    def _mesh(self, where: str, call: Call) -> DeviceMesh:
        found = self._meshes.get(id(call))
        if found is None:
            state = _attributes(call)
            if "_layout" in state:
                shape, ranks = self._new_mesh(state)
            else:
                shape, ranks = self._old_mesh(state)
            if not shape or math.prod(shape) != len(ranks) or len(ranks) > _MOST_RANKS:
                raise FormatError(f"{where}: a mesh of {list(shape)} with {len(ranks)} ranks")
            if any(type(rank) is not int or not 0 <= rank < self._ranks for rank in ranks):
                raise FormatError(
                    f"{where}: it is cut over {len(ranks)} ranks ({', '.join(map(str, ranks[:8]))}"
                    f"{', ...' if len(ranks) > 8 else ''}), and there are files of {self._ranks}; "
                    "the checkpoint is incomplete, fetch the others"
                )
            names = state.get("_mesh_dim_names", state.get("mesh_dim_names"))
            axes = names or tuple(f"dim{number}" for number in range(len(shape)))
            found = DeviceMesh("torch", tuple(shape), tuple(axes), ranks)
            self._meshes[id(call)] = found
        return found

    def _old_mesh(self, state: dict[Any, Any]) -> tuple[tuple[int, ...], list[int]]:
        """Shape and ranks of a mesh that is a tensor of ranks, as before PyTorch 2.9."""
        mesh = state["mesh"]
        return mesh.shape, self._numbers(mesh)

    def _new_mesh(self, state: dict[Any, Any]) -> tuple[tuple[int, ...], list[int]]:
        """Shape and ranks of a mesh with sizes and strides over the ranks of its root.

        Of a part of the root's axes, it is the mesh that this file's rank is in.
        """
        ranks = state.get("_flatten_rank_map")
        ranks = list(ranks) if ranks is not None else self._numbers(state["_rank_map"])
        axes = [_attributes(axis) for axis in _attributes(state["_layout"])["axes"]]
        shape = tuple(math.prod(axis["shape"]) for axis in axes)
        # An axis that was flattened has several sizes.
        sizes = [size for axis in axes for size in axis["shape"]]
        strides = [stride for axis in axes for stride in axis["stride"]]
        # One rank has an axis without sizes.
        if math.prod(sizes) > _MOST_RANKS:
            raise ValueError(f"a mesh of {sizes}")
        steps = itertools.product(*(range(size) for size in sizes))
        places = [sum(n * s for n, s in zip(step, strides, strict=True)) for step in steps]
        here, first, last = ranks.index(self._rank), min(places), max(places)
        # This rank stands at one of the places, counted from where its mesh begins.
        for place in places:
            start = here - place
            is_inside = start + first >= 0 and start + last < len(ranks)
            if is_inside and _begins_mesh(start, sizes, strides):
                return shape, [ranks[start + other] for other in places]
        raise ValueError(f"rank {self._rank} is in no mesh of sizes {sizes}, strides {strides}")

    def _numbers(self, tensor: Any) -> list[int]:
        """The elements of a small tensor of whole numbers."""
        if type(tensor) is not ArchivedTensor or math.prod(tensor.shape) > _MOST_RANKS:
            raise ValueError("the ranks of a mesh are no tensor")
        flat = np.frombuffer(self._read(tensor), dtype=tensor.dtype.numpy)
        numbers: list[int] = flat[tensor.view.positions(tensor.shape)].reshape(-1).tolist()
        return numbers

    def _read_sharded_tensor(self, where: str, call: Call) -> LocalPart:
        dtype, shape = _dtype_and_shape(where, call)
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
                raise FormatError(f"{where}: its shard {box} is no tensor of that shape")
            if tensor.dtype is not dtype:
                raise FormatError(f"{where} is {dtype}, its shard {tensor.dtype}")
            tensors.append(tensor)
            boxes.append(box)
        return LocalPart(dtype, shape, tuple(tensors), boxes=tuple(boxes))


def _begins_mesh(start: int, sizes: list[int], strides: list[int]) -> bool:
    """Whether a mesh may begin at a place: none of its own axes has a step in it."""
    return all(
        size == 1 or (start // stride) % size == 0
        for size, stride in zip(sizes, strides, strict=True)
    )


def _attributes(value: Any) -> dict[Any, Any]:
    """The attributes of an object: its state, a dict, or one behind a place for another."""
    state = value.state if isinstance(value, Call) else value
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state = state[1]
    if not isinstance(state, dict):
        raise ValueError(f"no attributes of {shortened(repr(value))}")
    return state


def _dtype_and_shape(where: str, call: Call) -> tuple[DType, tuple[int, ...]]:
    """The type and shape that stand beside the class of a wrapper."""
    made = call.arguments[2]
    shape = as_sizes(made[2])
    if shape is None or not isinstance(made[1], Global):
        raise ValueError("no element type and shape")
    try:
        return as_dtype(made[1].name), shape
    except UsageError as error:
        raise UnreadableTensorError(f"of {error}") from error


def _placement(where: str, call: Call) -> Placement:
    name, state = call.function.name, call.state
    # In the order of the fields, where the state is none of names.
    values = [*state.values()] if isinstance(state, dict) else [*call.arguments]
    match name, values:
        case "Shard", [int(dim), *_]:
            return Shard(dim)
        case "_StridedShard", [int(dim), int(factor), *_]:
            return StridedShard(dim, factor)
        case "Replicate", _:
            return Replicate()
        case (("Partial" | "_Partial"), _):
            return Partial()
    raise FormatError(
        f"{where} has the placement {shortened(str(call.function))}, expected Shard, "
        "_StridedShard or Replicate"
    )


def _shard_order(spec: dict[Any, Any]) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """The order in which axes cut, where there is one."""
    order = spec.get("shard_order")
    if order is None:
        return None
    entries: Iterator[Any] = (one.arguments if isinstance(one, Call) else one for one in order)
    return tuple((dim, tuple(axes)) for dim, axes in entries)
