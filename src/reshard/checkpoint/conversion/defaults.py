"""Defaults of a request that depend on its source.

A mesh alone is sharded over by the recipe that fits the source's config.json: `to="tp=4"` is
`to="tp=4", recipe="auto"`. It is an error if nothing shards over an axis of the mesh, since a user
who names an axis means it to shard; axes of data and context parallelism hold copies.
"""

from __future__ import annotations

import dataclasses
import shlex
from typing import NoReturn

from reshard.checkpoint.blocks.tensor_columns import shapes_of
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.conversion.request import AUTO, ConversionRequest
from reshard.checkpoint.formats.opening import read_config
from reshard.checkpoint.training.following import StateFollowers
from reshard.checkpoint.training.state import find_training_state
from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.recipes.coupling.allowances import IDLE_AXES
from reshard.recipes.library import choose_recipe, describe_unknown_model, suggest_rules
from reshard.recipes.recipe import REPLICA_AXES


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
