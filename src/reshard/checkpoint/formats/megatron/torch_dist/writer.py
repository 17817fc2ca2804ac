"""Planning a new `torch_dist` checkpoint, which Megatron-core loads under any parallelism.

1. Parameters are stored under Megatron's keys: in stacks of layers, if these are equal, and of
   experts (`stacked_names`). Optimizer state has the form of `fully_reshardable`, or of an
   optimizer that is not distributed, by the argument `use_distributed_optimizer`.
2. Chunks are as in a distributed checkpoint (`torch_dcp.writer`), each in a single layer.
3. Megatron expects an object of extra state for each linear layer. Objects that the source lacks
   are None, in a file of their own.
4. `common.pt` contains the plain values, with the optimizer's groups in Megatron's form.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from reshard.checkpoint.contents import StoredFile
from reshard.checkpoint.formats.megatron import common_state, modules, torch_dist
from reshard.checkpoint.formats.megatron.torch_dist.stacked_names import (
    find_places,
    find_read_name,
    whole_of_half,
)
from reshard.checkpoint.formats.optimizer_states import split_state_name, state_name
from reshard.checkpoint.formats.torch_dcp import METADATA_NAME
from reshard.checkpoint.formats.torch_dcp.metadata import StoredBytes
from reshard.checkpoint.formats.torch_dcp.writer import StackedPlace, metadata_bytes, plan_chunks
from reshard.checkpoint.formats.torch_files.building import saved_bytes
from reshard.checkpoint.formats.write_plan import (
    NewCheckpoint,
    NewFile,
    PlannedTensor,
    WritePlan,
)
from reshard.errors import RecipeError

# The second file of rank 0: the first has its chunks (`data_file_name`).
OBJECTS_NAME = "__0_1.distcp"
_LINEAR = re.compile(r"^(.*\.linear_\w+)\.weight$")


def plan_files(new: NewCheckpoint) -> WritePlan:
    """Plan a file of chunks for each rank, and a file of the extra states that the source lacks.

    Raises:
        RecipeError: names that a reader would take for others.
        RecipeError, UsageError: as for a distributed checkpoint of PyTorch.
    """
    modules.expect_mixers(new.tensors, in_parts=True)
    if common_state.step_of(new.values) is not None:
        new = common_state.without_steps(new)
    places = _find_all_places(new.tensors, new.values)
    _expect_read_names(new.tensors, places)
    write_plan = plan_chunks(new, places)
    content, _ = _extra_states(places, write_plan.items)
    files = write_plan.files
    if content:
        files += (NewFile(StoredFile(OBJECTS_NAME, len(content), 0), content),)
    return dataclasses.replace(
        write_plan,
        format=torch_dist.FORMAT_NAME,
        files=files,
        values=common_state.held_values(new),
        paths=dict(new.paths),
        notes=(*write_plan.notes, *common_state.describe_decay(new.values, new.tensors)),
    )


def list_final_files(write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
    """Yield `common.pt`, `metadata.json`, and `.metadata` last."""
    places = _find_all_places(write_plan.tensors, write_plan.values)
    _, objects = _extra_states(places, write_plan.items)
    is_stacked = any(place.counts for place in places.values())
    yield torch_dist.COMMON_NAME, saved_bytes(_common_state(write_plan, is_stacked))
    config = {
        "sharded_backend": torch_dist.BACKEND,
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    yield torch_dist.CONFIG_NAME, json.dumps(config).encode()
    yield METADATA_NAME, metadata_bytes(write_plan, places, objects)


def _is_distributed(values: Mapping[str, Any]) -> bool:
    return bool(values.get("args.use_distributed_optimizer", True))


def _find_all_places(
    tensors: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, StackedPlace]:
    """Return the place in a stack of each weight, and of each tensor of optimizer state."""
    by_key: dict[str, dict[str, str]] = {}
    for name in tensors:
        parameter, key = split_state_name(name) or (name, "")
        by_key.setdefault(key, {})[parameter] = name
    # An optimizer that is not distributed wraps PyTorch's, and calls its own 32-bit weights so.
    master = "param" if _is_distributed(values) else "fp32_param"
    is_local = values.get("args.transformer_impl") == "local"
    parameters = {parameter for names in by_key.values() for parameter in names}
    places = {}
    for key, names in by_key.items():
        # The same places as the weights', as Megatron expects.
        keyed = {
            parameter: modules.keyed_name(
                modules.engine_name(parameter, parameters), is_local=is_local
            )
            for parameter in names
        }
        of_keys = find_places(
            {
                keyed[parameter]: (tensors[name].dtype, tensors[name].layout)
                for parameter, name in names.items()
            }
        )
        for parameter, name in names.items():
            place = of_keys[keyed[parameter]]
            if key:
                place = place._replace(key=modules.megatron_name(place.key, key, master))
            places[name] = place
    return places


def _expect_read_names(
    tensors: Mapping[str, PlannedTensor], places: Mapping[str, StackedPlace]
) -> None:
    """Raise RecipeError unless a reader finds every tensor in its place, and under its name."""
    read = {
        name: find_read_name(place, tensors[name].layout.shape) for name, place in places.items()
    }
    as_engine = modules.find_read_names([*read.values()])
    expected = modules.find_read_names(tensors)
    halves: dict[str, str] = {}
    for name, other in read.items():
        other = as_engine.get(other, other)
        parameter, key = split_state_name(other) or (other, "")
        whole = whole_of_half(parameter)
        if whole is not None:
            joined = state_name(whole, key) if key else whole
            first = halves.setdefault(joined, name)
            if first != name:
                raise RecipeError(
                    f"{first!r} and {name!r} would be read from torch_dist as the halves of "
                    f"{joined!r}; give them other names (--rename), or choose another format"
                )
        if other != expected.get(name, name):
            raise RecipeError(
                f"{name!r} would be read from torch_dist as {other!r}, since layers and experts "
                "are stacked there, and optimizer state has its key before the parameter; give it "
                "another name (--rename), or choose another format"
            )


def _extra_states(
    places: Mapping[str, StackedPlace], items: Collection[str]
) -> tuple[bytes, dict[str, StoredBytes]]:
    """Return the missing extra states of linear layers: their bytes, and the location of each."""
    # Megatron loads an object as the list of what ranks saved under its name.
    nothing = saved_bytes([None])
    content, objects = b"", {}
    for place in places.values():
        match = None if place.key.startswith("optimizer.") else _LINEAR.match(place.key)
        if match is None:
            continue
        index, counts = place.at or (0,), place.counts or (1,)
        shard = f"shard_{'.'.join(map(str, index))}_{'.'.join(map(str, counts))}"
        name = f"{match[1]}{common_state.EXTRA_STATE}{shard}"
        if name not in items:
            objects[name] = StoredBytes(OBJECTS_NAME, len(content), len(nothing))
            content += nothing
    return content, objects


def _common_state(write_plan: WritePlan, is_stacked: bool) -> dict[str, Any]:
    """Return the nested state of `common.pt`."""
    state = common_state.nest_values(write_plan.values, write_plan.paths, _axis_sizes(write_plan))
    is_distributed = _is_distributed(write_plan.values)
    if any(split_state_name(name) for name in write_plan.tensors):
        state["optimizer"] = _optimizer_state(write_plan, is_distributed)
    content: dict[str, Any] = {
        "singleton_local_shards": False,
        "non_homogeneous_layers": not is_stacked,
        "chained_optim_avoid_prefix": True,
    }
    if is_distributed:
        content["distrib_optim_sharding_type"] = "fully_reshardable"
        content["distrib_optim_fully_reshardable_mem_efficient"] = False
    metadata = state.get("content_metadata")
    state["content_metadata"] = {**(metadata if isinstance(metadata, dict) else {}), **content}
    return state


def _axis_sizes(write_plan: WritePlan) -> dict[str, int]:
    mesh = write_plan.mesh
    return {} if mesh is None else dict(zip(mesh.axis_names, mesh.shape, strict=True))


def _optimizer_state(write_plan: WritePlan, is_distributed: bool) -> dict[Any, Any]:
    """Return the optimizer's state without tensors, if needed for dense parameters and experts."""

    def make(of_experts: bool) -> dict[str, Any]:
        result = common_state.optimizer_state(write_plan.values, of_experts=of_experts)
        if not is_distributed and common_state.COMMON_STEP in write_plan.values:
            result["optimizer"]["state"] = {"common_step": common_state.step_of(write_plan.values)}
        if is_distributed:
            result["param_state_sharding_type"] = "fully_reshardable"
        return result

    has_experts = any(map(modules.is_expert, write_plan.tensors))
    if has_experts and _axis_sizes(write_plan).get("ep", 1) > 1:
        # Megatron chains two optimizers; the optimizer of dense parameters comes first.
        return {0: make(False), 1: make(True)}
    return make(False)
