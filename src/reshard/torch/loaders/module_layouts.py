"""Layouts of modules that describe their own sharding, as layouts of an engine.

=======================================  =========================================================
result of `build(rank)`                  sharding of its parameters
=======================================  =========================================================
a module, a state dict                   DTensors by their placements (`fully_shard`,
                                         `parallelize_module`); other tensors are replicated
Megatron-core's `sharded_state_dict()`   by global offsets, with the shards that factories build
=======================================  =========================================================

1. `build` creates the model of each rank in turn, on the `meta` device, in `fake_rank`.
2. Each parameter is a box of a full tensor: of its own name, or of Megatron's key.
3. All ranks together are an `EngineLayout`.

Sources: `torch.distributed.tensor` of PyTorch 2.13, `core.dist_checkpointing.mapping` of
Megatron-core 0.16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reshard.binding import View
from reshard.dtypes import dtype as as_dtype
from reshard.errors import LayoutError, UsageError
from reshard.layout import Box, Layout
from reshard.mesh import DeviceMesh
from reshard.recipes.engine_layouts import (
    EngineLayout,
    ParameterLayout,
    RankLayout,
    SourcePiece,
    SourceTensor,
)
from reshard.recipes.engine_layouts.parameter_layout import shard_parameter
from reshard.torch.endpoint import layout_of
from reshard.torch.loaders.fake_ranks import fake_rank
from reshard.torch.loaders.tracing import find_shared_memory

# Class names in Megatron-core's sharded state dicts; the package need not be installed.
_SHARDED, _FACTORY, _OBJECT = "ShardedTensor", "ShardedTensorFactory", "ShardedObject"

Sources = dict[str, SourceTensor]


def module_layouts(
    build: Callable[[int], Any], mesh: DeviceMesh, engine: str = "torch", version: str = ""
) -> EngineLayout:
    """Return the layouts of a model on all ranks, from the sharding of its parameters.

    Args:
        build: creates the model of a rank, given its number, as a program on that rank would;
            called once for each rank, with `meta` as the default device.
        mesh: the ranks, and their arrangement.
        engine, version: the software of the model; PyTorch's version by default.

    Raises:
        UsageError: an unsupported kind of model; a process that is part of a job.
        LayoutError: ranks whose full tensors of one name differ, or a parameter that is not a box.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    >>> def build(rank):
    ...     ranks = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     return parallelize_module(torch.nn.Linear(3, 8, bias=False), ranks, ColwiseParallel())
    >>> found = module_layouts(build, DeviceMesh.of(tp=2))
    >>> print(found.rank(1)["weight"])
    weight float32 [4, 3]
      [0:4, 0:3] weight from 12, strides 3, 1
    """
    sources: Sources = {}
    ranks = []
    for rank in sorted(mesh.devices):
        with fake_rank(rank, max(mesh.devices) + 1), torch.device("meta"):
            model = build(rank)
            entries = model.state_dict() if isinstance(model, torch.nn.Module) else model
            parameters = {
                parameter.name: parameter for parameter in read_parameters(entries, rank, sources)
            }
            tied = find_shared_memory(_list_local(entries, parameters))
        ranks.append(RankLayout(rank, parameters, tied=tied))
    # The unread sources of a rank are known once all ranks have named theirs.
    ranks = [replace(parameter, unread=_find_unread(parameter, sources)) for parameter in ranks]
    return EngineLayout(engine, version or torch.__version__, mesh, sources, ranks)


def read_parameters(entries: Any, rank: int, sources: Sources) -> Iterator[ParameterLayout]:
    """Yield the parameters of a rank's state dict; add the full tensors to `sources`.

    Raises:
        UsageError: a model that is neither a module nor a state dict.
        LayoutError: ranks whose full tensors of one name differ in shape or dtype.
    """
    if not isinstance(entries, Mapping):
        raise UsageError(
            f"build({rank}) gives a {type(entries).__name__}; a module, a state dict, or what "
            "sharded_state_dict() of Megatron gives was expected"
        )
    for name, entry in entries.items():
        kind = type(entry).__name__
        if isinstance(entry, torch.Tensor):
            parameter, whole = _read_tensor(name, entry, rank)
        elif kind in (_SHARDED, _FACTORY):
            parameter, whole = _fill(name, entry.data, list(_list_shards(entry)))
        elif kind == _OBJECT or entry is None:
            # Pickled state, such as layers of other libraries save with their weights.
            continue
        else:
            raise UsageError(f"{name!r} on rank {rank} is a {kind}; a tensor was expected")
        for source, tensor in whole.items():
            if sources.setdefault(source, tensor) != tensor:
                raise LayoutError(
                    f"{source!r} is {sources[source].dtype.name} {list(sources[source].shape)} on "
                    f"one rank, and {tensor.dtype.name} {list(tensor.shape)} on rank {rank}"
                )
        if parameter is not None:
            yield parameter


def _read_tensor(
    name: str, tensor: torch.Tensor, rank: int
) -> tuple[ParameterLayout | None, Sources]:
    """Return the rank's part of a DTensor, or a plain tensor, which is replicated."""
    dtype, shape = as_dtype(tensor.dtype), tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        layout, slot = layout_of(tensor), rank
        # A rank outside the tensor's mesh holds none of it.
        if rank >= layout.slots:
            return None, {name: SourceTensor(dtype, shape)}
    else:
        layout, slot = Layout.whole(shape, [0], 1), 0
    return shard_parameter(name, dtype, layout, slot), {name: SourceTensor(dtype, shape)}


def _list_shards(built: Any) -> Iterator[Any]:
    """Yield the sharded tensors in nested dicts and lists, with those that factories build."""
    if isinstance(built, Mapping):
        built = list(built.values())
    if isinstance(built, list | tuple):
        for item in built:
            yield from _list_shards(item)
    elif type(built).__name__ == _FACTORY:
        yield from _list_shards(built.build())
    elif type(built).__name__ == _SHARDED:
        yield built


def _fill(name: str, data: torch.Tensor, shards: list[Any]) -> tuple[ParameterLayout, Sources]:
    """Return a parameter of `data`'s shape, composed of the data of shards."""
    shape = tuple(data.shape)
    pieces: list[SourcePiece] = []
    sources: Sources = {}
    for shard in shards:
        if getattr(shard, "flattened_range", None) is not None:
            raise LayoutError(
                f"{name!r} is a range of a flattened tensor, {shard.flattened_range}; give the "
                "sharded state dict of the model, not of its optimizer"
            )
        whole = tuple(shard.global_shape)
        local = tuple(shard.local_shape)
        sources[shard.key] = SourceTensor(as_dtype(data.dtype), whole)
        strides = View.row_major(whole).strides
        first = sum(at * step for at, step in zip(shard.global_offset, strides, strict=True))
        # Leading dimensions, such as the layer, exist in the full tensor only.
        box = _find_box(name, data, shard.data, local)
        pieces.append(SourcePiece(box, shard.key, View(first, strides[len(whole) - len(local) :])))
    return ParameterLayout.of(name, shape, as_dtype(data.dtype), pieces), sources


def _find_box(name: str, data: torch.Tensor, part: torch.Tensor, shape: tuple[int, ...]) -> Box:
    """Return the box of `data` that `part`, a view of it, covers."""
    same = part.untyped_storage()._cdata == data.untyped_storage()._cdata
    strides = View.row_major(tuple(data.shape)).strides
    if not same or tuple(data.stride()) != strides or tuple(part.shape) != shape:
        raise LayoutError(
            f"{name!r} is saved as {list(shape)}, which is not a part of the {list(data.shape)} "
            "that the rank holds: it is computed, or stored in another order"
        )
    rest = part.storage_offset() - data.storage_offset()
    start = []
    for stride, size in zip(strides, shape, strict=True):
        at, rest = divmod(rest, stride) if stride else (0, rest)
        start.append(at if size else 0)
    box = Box.of(shape, start)
    if math.prod(shape) and tuple(part.stride()) != strides:
        raise LayoutError(f"{name!r} is saved with strides {part.stride()}, not as stored")
    return box


def _list_local(entries: Mapping[str, Any], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the rank's local part of each parameter."""
    local_tensors = {}
    for name in names:
        entry = entries[name]
        tensor = entry if isinstance(entry, torch.Tensor) else entry.data
        local_tensors[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local_tensors


def _find_unread(rank: RankLayout, sources: Sources) -> tuple[str, ...]:
    read = {source for parameter in rank.parameters.values() for source in parameter.sources}
    return tuple(name for name in sources if name not in read)
