"""The format `megatron-fsdp`: Megatron FSDP's DTensors in a distributed checkpoint.

    model.module.decoder.layers.0.mlp.linear_fc1.weight_w       the halves of a gated layer
    optimizer.state.module.decoder.layers.0. ... .exp_avg
    optimizer.param_to_group_meta.module.decoder. ... .lr       the group of each parameter

1. It is opened as a distributed checkpoint of PyTorch; ranks' uneven parts are chunks.
2. The prefixes `model.` and `module.` are removed, halves are joined, and optimizer state gets the
   names of all training formats. The weights are those that the optimizer updates, float32 if it
   has them.
3. Parameters with equal settings form a group.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.checkpoint.formats.megatron import MegatronFormat, find_iteration
from reshard.checkpoint.formats.torch_dcp import METADATA_NAME

if TYPE_CHECKING:
    from reshard.checkpoint.formats.source_sharding import SourceSharding

FORMAT_NAME = "megatron-fsdp"
_STEP_FOLDER = r"iter_\d{7}|release"
_META = "optimizer.param_to_group_meta."
# Megatron saves its own version, also without an optimizer.
_VERSION = "checkpoint_version"
_HALF = r"_[wv]$"
# Larger objects are not settings of a group.
_LARGEST_VALUE_BYTES = 1 << 20


def read(folder: Path) -> Checkpoint:
    """Describe the checkpoint of a step; one of another program is left unchanged.

    Raises:
        CheckpointError, FormatError, CoverageError: as a distributed checkpoint of PyTorch.
    """
    from reshard.checkpoint.formats.megatron.common_state import add_state, read_object
    from reshard.checkpoint.formats.megatron.modules import engine_name
    from reshard.checkpoint.formats.optimizer_states import GROUPS, split_state_name
    from reshard.checkpoint.formats.torch_dcp.reader import read as read_chunks
    from reshard.checkpoint.formats.torch_files.nested_states import PlainValues

    result = read_chunks(folder)
    if not _is_of_fsdp(result):
        return result
    state, metas, items = PlainValues(), dict[str, dict[str, Any]](), {}
    for name, item in result.items.items():
        if name.startswith(_META):
            parameter, _, key = name.removeprefix(_META).rpartition(".")
            metas.setdefault(_bare(parameter), {})[key] = read_object(folder, item)
        elif (
            name.startswith(("rng_state", "rerun_state")) or item.size_bytes > _LARGEST_VALUE_BYTES
        ):
            items[name] = item
        else:
            add_state(state, result.paths.get(name, (name,)), read_object(folder, item), name)
    tensors = {tensor.name: tensor for tensor in _name_tensors(result)}
    weights = [name for name in tensors if split_state_name(name) is None]
    groups: list[dict[str, Any]] = []
    for parameter, meta in metas.items():
        name = engine_name(re.sub(_HALF, "", parameter), weights)
        matching = next((g for g in groups if _settings(g) == meta), None)
        if matching is None:
            groups.append(matching := {**meta, "params": []})
        matching["params"].append(name)
    for group in groups:
        # A gated layer has settings for each half.
        group["params"] = [*dict.fromkeys(group["params"])]
    if groups:
        state.values[GROUPS] = groups
    return dataclasses.replace(
        result,
        format=FORMAT_NAME,
        tensors=tensors,
        items=items,
        values=state.values,
        paths=state.paths,
        checksums=tuple(checksum for checksum in result.checksums if checksum.tensor in tensors),
        unread=(*result.unread, *state.unread),
    )


def _is_of_fsdp(checkpoint: Checkpoint) -> bool:
    """Return whether a distributed checkpoint of PyTorch is a save of Megatron FSDP.

    Names of weights do not suffice: any wrapped model has `model.module.`.
    """
    if not any(name.startswith("model.module.") for name in checkpoint.tensors):
        return False
    # Resolved, since the path may be `.`, which lacks a name.
    return (
        re.fullmatch(_STEP_FOLDER, checkpoint.folder.resolve().name) is not None
        or _VERSION in checkpoint.items
        or any(name.startswith(_META) for name in checkpoint.items)
    )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _bare(name: str) -> str:
    """Return a parameter's name without the wrappers around the model.

    >>> _bare("module.module.output_layer.weight")
    'output_layer.weight'
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _name_tensors(checkpoint: Checkpoint) -> Iterator[StoredTensor]:
    from reshard.checkpoint.formats.megatron.torch_dist.stacked_names import (
        name_parameters,
        name_state,
    )
    from reshard.checkpoint.formats.optimizer_states import split_state_name

    def name_all() -> Iterator[StoredTensor]:
        for name, tensor in checkpoint.tensors.items():
            state = split_state_name(name)
            if state is not None:
                yield name_state((_bare(state[0]), state[1]), tensor)
            elif name.startswith("model."):
                yield dataclasses.replace(tensor, name=_bare(name.removeprefix("model.")))
            else:
                yield tensor

    yield from name_parameters(name_all(), checkpoint.folder)


class MegatronFsdpFormat(MegatronFormat):
    """A folder with `.metadata` of PyTorch, and nothing else of Megatron."""

    name = FORMAT_NAME
    evidence = f"`{METADATA_NAME}` with the names of Megatron FSDP"

    def detect_step(self, folder: Path) -> bool:
        """Return whether a folder has a distributed checkpoint, whose names `read` looks at.

        It is the checkpoint of PyTorch if it has other names. Its metadata are read once, which
        from a store takes a while.
        """
        return (folder / METADATA_NAME).is_file() and not (folder / "common.pt").exists()

    def open_sharded(self, path: Path, sharding: SourceSharding) -> Checkpoint:
        """Open as a distributed checkpoint of PyTorch, which specifies its shardings."""
        from reshard.checkpoint.formats.torch_dcp import FORMAT

        return FORMAT.open_sharded(find_iteration(path) or path, sharding)

    def read_step(self, folder: Path) -> Checkpoint:
        """Describe the distributed checkpoint."""
        return read(folder)


FORMAT = MegatronFsdpFormat()
