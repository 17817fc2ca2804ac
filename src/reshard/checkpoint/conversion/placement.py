"""Where the tensors of a new checkpoint go: the layout of each over the target's ranks.

The first of these that a request has says so:

1. the target's format, where it cuts by itself (`CheckpointFormat.place`);
2. an engine's layout: every rank holds what that engine's rank reads;
3. rules and a recipe, over the axes of a mesh;
4. a strategy, over a number of ranks;
5. nothing: every tensor is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.conversion.engine_cuts import cut_by_engine
from reshard.checkpoint.conversion.request import ConversionRequest
from reshard.checkpoint.conversion.source_names import NamedSource
from reshard.checkpoint.formats.arrangement import PlannedTensor
from reshard.checkpoint.formats.opening import read_config
from reshard.checkpoint.quant_states import read_flat_shapes
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import Assignment, assign
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule
from reshard.recipes.shardings.fused_sharding import fused_spec
from reshard.recipes.strategies import strategy as find_strategy


@dataclass(frozen=True)
class PlacedTensors:
    """The layout of every tensor of the target, by its name there.

    `assignment` says how rules and recipes matched, where they were used; `notes` are for the user.
    """

    tensors: Mapping[str, PlannedTensor]
    assignment: Assignment | None = None
    notes: tuple[str, ...] = ()


def place_tensors(request: ConversionRequest, source: NamedSource) -> PlacedTensors:
    """Where a request puts the tensors of a source.

    Raises:
        RecipeError: rules, a recipe or an engine's layout that do not fit.
        UsageError: a strategy that cannot be.
    """
    own = request.target_format.place(source.checkpoint, request.mesh, request.ranks)
    if own is not None:
        return PlacedTensors(_plan_tensors(source.checkpoint, own))
    if request.engine_layout is not None:
        layouts, notes = cut_by_engine(source.checkpoint, request.engine_layout)
        return PlacedTensors(_plan_tensors(source.checkpoint, layouts), notes=notes)
    if request.mesh is not None and request.is_by_rules:
        return _place_by_rules(request, source, request.mesh)
    return PlacedTensors(
        _plan_tensors(source.checkpoint, _place_by_strategy(request, source.checkpoint))
    )


def _plan_tensors(
    checkpoint: Checkpoint, layouts: Mapping[str, Layout]
) -> dict[str, PlannedTensor]:
    return {
        name: PlannedTensor(tensor.dtype, layouts[name])
        for name, tensor in checkpoint.tensors.items()
    }


def _place_by_rules(
    request: ConversionRequest, source: NamedSource, mesh: DeviceMesh
) -> PlacedTensors:
    recipe, by_recipe = source.recipe, source.by_recipe
    assignment = assign_tensors(by_recipe, mesh, request.parsed_rules, recipe, request.allow)
    storage_axes = recipe.map_axes(mesh).get("fsdp", ()) if recipe is not None else ()
    shapes = {name: tensor.shape for name, tensor in by_recipe.tensors.items()}
    planned = {}
    for name, tensor in source.checkpoint.tensors.items():
        known = source.recipe_names[name]
        spec, layout = assignment.specs[known], assignment.layouts[known]
        # A fused parameter is cut as its members are, so that ranks keep whole members.
        if name in source.fused:
            fusion = source.fused[name]
            spec = fused_spec(name, fusion, assignment.specs, shapes, storage_axes)
            layout = spec.layout(tensor.shape)
        planned[name] = PlannedTensor(tensor.dtype, layout, str(spec))
    return PlacedTensors(planned, assignment)


def _place_by_strategy(request: ConversionRequest, checkpoint: Checkpoint) -> Mapping[str, Layout]:
    """The layouts that a strategy gives the tensors, or whole ones."""
    if request.is_whole:
        shapes = {tensor.shape for tensor in checkpoint.tensors.values()}
        whole = {shape: Layout.whole(shape, [0], 1) for shape in shapes}
        return {name: whole[tensor.shape] for name, tensor in checkpoint.tensors.items()}
    place = find_strategy(request.strategy or "simple")
    return place(
        {name: (tensor.dtype, tensor.shape) for name, tensor in checkpoint.tensors.items()},
        request.ranks,
        read_config(checkpoint) if request.strategy else None,
    )


def assign_tensors(
    checkpoint: Checkpoint,
    mesh: DeviceMesh,
    rules: Iterable[Rule],
    recipe: Recipe | None,
    allow: Iterable[str] = (),
) -> Assignment:
    """How rules and a recipe cut the tensors of a checkpoint over a mesh.

    Raises:
        RecipeError: rules or a recipe that do not fit.
    """
    tensors = checkpoint.tensors
    return assign(
        {name: tensor.shape for name, tensor in tensors.items()},
        mesh,
        tuple(rules),
        recipe,
        read_config(checkpoint),
        {name: tensor.dtype.itemsize_bytes for name, tensor in tensors.items()},
        read_flat_shapes(checkpoint),
        allow=allow,
    )
