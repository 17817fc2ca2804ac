"""Defaults of a request that depend on its source.

Without a target, the source's layouts, format and number of files stay.

A mesh alone is sharded over by the recipe that fits the source's config.json: `to="tp=4"` is
`to="tp=4", recipe="auto"`. It is an error if nothing shards over an axis of the mesh, since a user
who names an axis means it to shard; axes of data and context parallelism hold copies.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import NoReturn

from reshard.checkpoint.blocks.tensor_columns import TensorColumns, shapes_of
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.format import Capability
from reshard.checkpoint.formats.opening import read_config
from reshard.checkpoint.formats.registry import find_format, written_names
from reshard.checkpoint.formats.write_plan import find_stored_replicas
from reshard.checkpoint.options import AUTO, ConversionRequest
from reshard.checkpoint.training.following import StateFollowers
from reshard.checkpoint.training.state import find_training_state
from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.recipes.library import choose_recipe, describe_unknown_model, suggest_rules
from reshard.recipes.overrides import IDLE_AXES
from reshard.recipes.recipe import REPLICA_AXES


def keep_target_by_default(request: ConversionRequest, checkpoint: Checkpoint) -> ConversionRequest:
    """Return the request with the source's mesh and format where it has no target.

    Args:
        request: of a conversion.
        checkpoint: its source.

    Raises:
        UsageError: a source of a format that is not written; names, or elements of other shapes,
            where the source is sharded.
    """
    if request.to is not None:
        return request
    name = request.format or checkpoint.format
    format = find_format(name)
    if format is None or name not in written_names():
        raise UsageError(
            f"{checkpoint.folder} is of the format {name}, which is not written; give the target's "
            f"layout and format: to='full' or a mesh, and a format of {', '.join(written_names())}"
        )
    holds_shards = Capability.SHARDS in format.capabilities
    is_whole = checkpoint.ranks == 1 and (checkpoint.mesh is None or not holds_shards)
    if is_whole and Capability.WHOLE in format.capabilities:
        return dataclasses.replace(request, kept="full", format=name)
    ranks = checkpoint.mesh.text if checkpoint.mesh else f"{checkpoint.ranks} ranks"
    if not holds_shards:
        raise UsageError(
            f"{checkpoint.folder} is sharded over {ranks}, and the format {name} holds whole "
            "tensors; give to='full', or another format"
        )
    others = {
        "names of other programs": request.source_names or request.target_names,
        "dequantize": request.dequantize,
        "quantize": request.quantize,
        "training": request.training,
    }
    for what, other in others.items():
        if other:
            raise UsageError(
                f"{what} without `to`: {checkpoint.folder} is sharded over {ranks}, and its "
                "layouts do not fit the new tensors. Give `to`, such as tp=2 or full"
            )
    replicas = request.replicas
    if replicas is None and Capability.REPLICAS in format.capabilities:
        replicas = find_stored_replicas(checkpoint.tensors)
    kept = checkpoint.mesh or checkpoint.ranks
    return dataclasses.replace(request, kept=kept, format=name, replicas=replicas)


def find_kept_files(request: ConversionRequest, checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return the source's file of each tensor, where whole tensors stay in as many files."""
    if request.kept != "full" or request.most_file_bytes is not None:
        return {}
    columns = TensorColumns.of(checkpoint.tensors)
    files = [kind.files[0] if kind.files else "" for kind in columns.kinds]
    return {
        name: files[kind] for name, kind in zip(columns.names, columns.kind.tolist(), strict=True)
    }


def choose_recipe_by_default(
    request: ConversionRequest, checkpoint: Checkpoint
) -> ConversionRequest:
    """Return the request with the recipe `auto` where it has a mesh, and nothing shards over it.

    Args:
        request: of a conversion.
        checkpoint: its source, as far as it is taken.

    Raises:
        UsageError: an axis to shard over, without a config.json that a recipe fits.
    """
    mesh = request.mesh
    if mesh is None or not (request.lacks_rules or request.recipe == AUTO):
        return request
    config = read_config(checkpoint)
    if config is not None and choose_recipe(config) is not None:
        return dataclasses.replace(request, recipe=AUTO)
    axes = [axis for axis in mesh.list_long_axes() if axis not in REPLICA_AXES]
    if request.recipe == AUTO or (axes and IDLE_AXES not in request.allow):
        _refuse_unknown_model(checkpoint, mesh, axes)
    return request


def _refuse_unknown_model(checkpoint: Checkpoint, mesh: DeviceMesh, axes: list[str]) -> NoReturn:
    shapes = shapes_of(checkpoint.tensors)
    weights = StateFollowers(shapes, find_training_state(checkpoint)).leaders
    rules = suggest_rules(weights, axes[0] if axes else mesh.axis_names[0])
    written = " ".join(f"--rule {shlex.quote(rule)}" for rule in rules)
    raise UsageError(
        f"nothing says how to shard {checkpoint.folder} over {mesh.text}: "
        f"{describe_unknown_model(read_config(checkpoint), weights)}. Rules are such as {written}. "
        f"To keep a copy of every tensor for each rank: --allow {IDLE_AXES}, in Python "
        f"allow=[{IDLE_AXES!r}]"
    )
