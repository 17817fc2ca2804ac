"""Optimizer state in buckets: `dp_reshardable` and `dp_zero_gather_scatter`, without names.

For each model-parallel rank, the buckets of its distributed optimizer are 1-D tensors, or all of
its buffers are an object, in the form of a rank's `distrib_optim.pt`::

    optimizer.distributed.dp_group_idx_3.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)
      .bucket_idx_0.exp_avg                           rank 3 of tensor and pipeline parallelism
    optimizer.distributed.dp_group_idx_3.param_state/shard_0_1

1. The arguments specify the parallelism, from which the parameters of a rank and their blocks
   follow (`rank_layouts`), and their order (`order_key`).
2. The order determines the place of each parameter in a bucket (`rank_blocks`). The buckets'
   lengths must agree with the checkpoint.
3. Groups are in objects too; the first rank's groups are used.

State that does not fit is listed as unread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reshard.checkpoint.blocks.fusing import list_stored_regions
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.checkpoint.formats.chunks import WholeTensors
from reshard.checkpoint.formats.megatron import common_state, rank_blocks
from reshard.checkpoint.formats.megatron.modules import common_key, is_expert, sort_by_modules
from reshard.checkpoint.formats.megatron.rank_layouts import (
    Parallelism,
    RankPlace,
    StageLayouts,
)
from reshard.checkpoint.formats.optimizer_states import state_name
from reshard.checkpoint.formats.torch_files.nested_states import PlainValues
from reshard.checkpoint.formats.torch_files.reading import read_storage
from reshard.errors import RecipeError
from reshard.megatron.names import EMBEDDING
from reshard.mesh import DeviceMesh

_PREFIX = r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\."
_BUCKET = re.compile(_PREFIX + r"gbuf_idx_(\d+)\.dtype_\(.*\)\.bucket_idx_(\d+)\.(\w+)$")
# The parts of an optimizer's state other than buffers.
_STATE_PARTS = ("optimizer", "grad_scaler")
_OBJECT = re.compile(_PREFIX + r"(\w+)/shard_0_1$")


def is_of_buckets(name: str) -> bool:
    """Return whether a tensor or an object of `torch_dist` is a part of optimizer state in buckets.

    >>> is_of_buckets("optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1")
    True
    """
    return _BUCKET.match(name) is not None or _OBJECT.match(name) is not None


# The buckets of each key, by optimizer of the chain, rank and buffer.
_Buffers = dict[tuple[int, int, int], dict[str, rank_blocks.Buckets]]


def has_buckets(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has optimizer state in buckets."""
    return any(map(is_of_buckets, (*checkpoint.tensors, *checkpoint.items)))


def read_buckets(
    folder: Path, checkpoint: Checkpoint, plain: PlainValues, weights: Mapping[str, StoredTensor]
) -> tuple[Mapping[str, StoredTensor], list[tuple[str, str]]]:
    """Return the optimizer state of weights, by training formats' names, and the unread parts.

    Groups and the loss scaler are added to `plain`.
    """
    buffers = _collect(folder, checkpoint)
    _read_groups(folder, checkpoint, plain)
    try:
        return _assemble(folder, common_state.arguments_of(plain.values), buffers, weights), []
    except RecipeError as error:
        return {}, [("the optimizer's buckets", str(error))]


def _collect(folder: Path, checkpoint: Checkpoint) -> _Buffers:
    """Return the buckets of a checkpoint."""
    result: _Buffers = {}
    for name, tensor in checkpoint.tensors.items():
        match = _BUCKET.match(name)
        if match is not None:
            chain, rank, buffer, bucket = (int(number or 0) for number in match.groups()[:4])
            own = result.setdefault((chain, rank, buffer), {}).setdefault(match[5], {})
            own[bucket] = tensor.shape[0], tensor.dtype, [*list_stored_regions(tensor)]
    for name, item in checkpoint.items.items():
        match = _OBJECT.match(name)
        if match is None or match[3] != "param_state":
            continue
        # An object is a list of the values that the rank saved under the name.
        parts = common_state.read_object(folder, item)
        state = parts[0] if isinstance(parts, list) and len(parts) == 1 else None
        path, start_bytes = item.place.path, item.place.start_bytes
        for number, keyed in rank_blocks.read_buffers(state, item.rank, path, start_bytes).items():
            result.setdefault((int(match[1] or 0), int(match[2]), number), {}).update(keyed)
    return result


def _read_groups(folder: Path, checkpoint: Checkpoint, plain: PlainValues) -> None:
    """Add the groups and the loss scaler from the objects of the first rank."""
    chains = set()
    for name, item in sorted(checkpoint.items.items()):
        match = _OBJECT.match(name)
        part = match[3] if match else ""
        if match is None or part not in _STATE_PARTS or (match[1], part) in chains:
            continue
        chains.add((match[1], part))
        parts = common_state.read_object(folder, item)
        if isinstance(parts, list) and parts:
            path, start_bytes = folder / item.place.path, item.place.start_bytes
            read = partial(read_storage, path, start_bytes=start_bytes)
            common_state.add_optimizer(plain, {"optimizer": {}, part: parts[0]}, read)


def _assemble(
    folder: Path,
    arguments: Mapping[str, Any],
    buffers: _Buffers,
    weights: Mapping[str, StoredTensor],
) -> Mapping[str, StoredTensor]:
    if "tensor_model_parallel_size" not in arguments:
        raise RecipeError(
            "there are no arguments with the model's parallelism, so the parameters of the "
            "parts of a bucket are not known"
        )
    sizes = Parallelism.of_arguments(arguments, str(folder))
    if sizes.etp != sizes.tp:
        raise RecipeError(
            f"buckets of {sizes} are not read; load it with Megatron-core and save it with "
            "--dist-ckpt-optim-fully-reshardable"
        )
    if any(map(is_expert, weights)) and common_state.has_stacked_experts(arguments):
        raise RecipeError(
            "buckets with all experts of a layer in one weight (GroupedMLP) are not read; load "
            "it with Megatron-core and save it with --dist-ckpt-optim-fully-reshardable"
        )
    mesh = DeviceMesh.of(vp=sizes.vp, pp=sizes.pp, ep=sizes.ep, tp=sizes.tp)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    stages = StageLayouts(mesh, shapes, arguments)
    ordered = _sort(stages, arguments)
    dtypes = {stages.engine[name]: tensor.dtype for name, tensor in weights.items()}
    has_chain = any(chain for chain, _, _ in buffers)
    whole = WholeTensors(folder)
    for chain in sorted({chain for chain, _, _ in buffers}):
        ranks = sorted({rank for owner, rank, _ in buffers if owner == chain})
        for rank in ranks:
            place = _find_place(sizes, rank, is_expert=chain == 1)
            own = {n: b for (owner, at, n), b in buffers.items() if (owner, at) == (chain, rank)}
            parameters = stages.parameters(ordered, place, dtypes)
            split = rank_blocks.split_chain(parameters, 2 if has_chain else 1)
            _add(whole, stages, place, split[min(chain, len(split) - 1)], own, arguments)
    slots = max((tensor.layout.slots for tensor in weights.values()), default=1)
    return whole.stored(slots)


def _add(
    whole: WholeTensors,
    stages: StageLayouts,
    place: RankPlace,
    parameters: Sequence[rank_blocks.RankParameter],
    own: Mapping[int, Mapping[str, rank_blocks.Buckets]],
    arguments: Mapping[str, Any],
) -> None:
    """Add the blocks in the buffers of a rank."""
    is_shared = stages.sizes.pp > 1 and stages.is_tied
    for number, buffer in enumerate(
        rank_blocks.list_buffers(parameters, is_embedding_shared=is_shared)
    ):
        stored = own.get(number, {})
        plan = rank_blocks.find_plan(
            buffer, rank_blocks.lengths_of(stored), rank_blocks.bucket_sizes(arguments)
        )
        label = f"buffer {number} of tensor-parallel rank {place.tp}, stage {place.pp}"
        if plan is None:
            raise RecipeError(
                f"{label} has other lengths than its {len(buffer)} parameters, from "
                f"{buffer[0].name!r} to {buffer[-1].name!r}, would have; the parts "
                "are ambiguous"
            )
        for key, buckets in stored.items():
            for parameter, bucket, start in plan.places:
                # The last stage has a copy of the embedding.
                if place.pp > 0 and parameter.name == EMBEDDING:
                    continue
                block = stages.block(parameter.name, stages.weights[parameter.name], place)
                if block.block_shape != block.shape or place.tp == 0:
                    name = state_name(parameter.name, common_key(key))
                    dtype, regions = rank_blocks.take_block(buckets, bucket, start, parameter.shape)
                    whole.add(name, dtype, block, regions, label)


def _sort(stages: StageLayouts, arguments: Mapping[str, Any]) -> list[str]:
    """Return the parameters of the model in the order of its modules."""
    ordered, unknown = sort_by_modules(stages.weights, arguments)
    if unknown:
        raise RecipeError(
            f"the place of {unknown[0]!r} among Megatron's modules is not known, so the "
            "parts of a bucket are ambiguous"
        )
    # Buffers of modules, such as a router's bias, are not parameters.
    return [name for name in ordered if not name.endswith("expert_bias")]


def _find_place(sizes: Parallelism, rank: int, *, is_expert: bool) -> RankPlace:
    """Return the place of a model-parallel rank; tensor parallelism is the fastest axis."""
    tp, rest = rank % sizes.tp, rank // sizes.tp
    return RankPlace(tp, rest // sizes.ep, rest % sizes.ep) if is_expert else RankPlace(tp, rest)
