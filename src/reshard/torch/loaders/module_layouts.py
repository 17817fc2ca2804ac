"""Modules that say themselves how they are cut, as layouts of an engine.

=======================================  =========================================================
what `build(rank)` gives                 how its parameters are cut
=======================================  =========================================================
a module, a state dict                   DTensors as they say (`fully_shard`, `parallelize_module`);
                                         other tensors are whole on every rank that has them
Megatron-core's `sharded_state_dict()`   by global offsets, with what factories make of a tensor
=======================================  =========================================================

1. `build` makes the model of each rank in turn, on the `meta` device, while this process pretends
   to be that rank.
2. Each parameter is read as a box of a whole tensor: of its own name, or of Megatron's key.
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
from reshard.torch.distributed_tensor import layout_of
from reshard.torch.loaders.pretended_ranks import pretend_rank
from reshard.torch.loaders.tracing import find_tied

# What Megatron-core's sharded state dicts hold, by the names of the classes: it need not be here.
_SHARDED, _FACTORY, _OBJECT = "ShardedTensor", "ShardedTensorFactory", "ShardedObject"

Sources = dict[str, SourceTensor]


def module_layouts(
    build: Callable[[int], Any], mesh: DeviceMesh, engine: str = "torch", version: str = ""
) -> EngineLayout:
    """The layouts of a model on all ranks, from the sharding information of its parameters.

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
        with pretend_rank(rank, max(mesh.devices) + 1), torch.device("meta"):
            model = build(rank)
            entries = model.state_dict() if isinstance(model, torch.nn.Module) else model
            parameters = {one.name: one for one in read_parameters(entries, rank, sources)}
            tied = find_tied(_list_local(entries, parameters))
        ranks.append(RankLayout(rank, parameters, tied=tied))
    # Which sources a rank does not read is known when all ranks have named theirs.
    ranks = [replace(one, unread=_find_unread(one, sources)) for one in ranks]
    return EngineLayout(engine, version or torch.__version__, mesh, sources, ranks)


def read_parameters(entries: Any, rank: int, sources: Sources) -> Iterator[ParameterLayout]:
    """The parameters of a rank's state dict; the whole tensors go into `sources`.

    Raises:
        UsageError: a model that is no module and no state dict.
        LayoutError: a whole tensor that another rank has with another shape or element type.
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
            # Pickled state, such as what layers of other libraries keep beside their weights.
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
    """A DTensor as this rank has it, or a plain tensor, which is whole."""
    kind, shape = as_dtype(tensor.dtype), tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        layout, place = layout_of(tensor), rank
        # A rank outside of the tensor's mesh has nothing of it.
        if rank >= layout.slots:
            return None, {name: SourceTensor(kind, shape)}
    else:
        layout, place = Layout.whole(shape, [0], 1), 0
    return shard_parameter(name, kind, layout, place), {name: SourceTensor(kind, shape)}


def _list_shards(built: Any) -> Iterator[Any]:
    """A sharded tensor, or those that a factory builds: nested dicts and lists of them."""
    if isinstance(built, Mapping):
        built = list(built.values())
    if isinstance(built, list | tuple):
        for one in built:
            yield from _list_shards(one)
    elif type(built).__name__ == _FACTORY:
        yield from _list_shards(built.build())
    elif type(built).__name__ == _SHARDED:
        yield built


def _fill(name: str, data: torch.Tensor, shards: list[Any]) -> tuple[ParameterLayout, Sources]:
    """A parameter of `data`'s shape, of which each shard's data is a part."""
    shape = tuple(data.shape)
    pieces: list[SourcePiece] = []
    sources: Sources = {}
    for shard in shards:
        if getattr(shard, "flattened_range", None) is not None:
            raise LayoutError(
                f"{name!r} is a range of a flattened tensor, {shard.flattened_range}; ask for the "
                "sharded state dict of the model, not of its optimizer"
            )
        whole = tuple(shard.global_shape)
        local = tuple(shard.local_shape)
        sources[shard.key] = SourceTensor(as_dtype(data.dtype), whole)
        strides = View.row_major(whole).strides
        first = sum(at * step for at, step in zip(shard.global_offset, strides, strict=True))
        # Leading dimensions, such as that of layers, are the whole tensor's only.
        box = _find_box(name, data, shard.data, local)
        pieces.append(SourcePiece(box, shard.key, View(first, strides[len(whole) - len(local) :])))
    return ParameterLayout.of(name, shape, as_dtype(data.dtype), pieces), sources


def _find_box(name: str, data: torch.Tensor, part: torch.Tensor, shape: tuple[int, ...]) -> Box:
    """Where `part`, a view of `data`, lies in it."""
    same = part.untyped_storage()._cdata == data.untyped_storage()._cdata
    strides = View.row_major(tuple(data.shape)).strides
    if not same or tuple(data.stride()) != strides or tuple(part.shape) != shape:
        raise LayoutError(
            f"{name!r} is saved as {list(shape)}, which is no part of the {list(data.shape)} that "
            "the rank holds: it is computed, or stored in another order"
        )
    rest = part.storage_offset() - data.storage_offset()
    start = []
    for stride, size in zip(strides, shape, strict=True):
        at, rest = divmod(rest, stride) if stride else (0, rest)
        start.append(at if size else 0)
    box = Box(tuple(start), tuple(a + n for a, n in zip(start, shape, strict=True)))
    if math.prod(shape) and tuple(part.stride()) != strides:
        raise LayoutError(f"{name!r} is saved with strides {part.stride()}, not as it lies")
    return box


def _list_local(entries: Mapping[str, Any], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The rank's own part of each parameter."""
    found = {}
    for name in names:
        entry = entries[name]
        tensor = entry if isinstance(entry, torch.Tensor) else entry.data
        found[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def _find_unread(rank: RankLayout, sources: Sources) -> tuple[str, ...]:
    read = {source for one in rank.parameters.values() for source in one.sources}
    return tuple(name for name in sources if name not in read)
