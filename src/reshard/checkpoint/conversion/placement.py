"""Where the tensors of a new checkpoint go: the layout of each over the target's ranks.

The first of these that a request has says so:

1. the target's format, where it cuts by itself (`CheckpointFormat.place`);
2. an engine's layout: every rank holds what that engine's rank reads;
3. the source, where no target is given;
4. rules and a recipe, over the axes of a mesh;
5. a strategy, over a number of ranks;
6. nothing: every tensor is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from reshard._validation import check_used
from reshard.checkpoint.blocks.tensor_columns import shapes_of, types_of
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.conversion.engines.cuts import cut_by_engine
from reshard.checkpoint.conversion.source_names import NamedSource
from reshard.checkpoint.formats.opening import read_config
from reshard.checkpoint.formats.write_plan import PlannedTensor
from reshard.checkpoint.options import ConversionRequest
from reshard.checkpoint.quant_states import read_flat_shapes
from reshard.checkpoint.training.following import StateFollowers, assign_with_state
from reshard.checkpoint.training.state import find_training_state
from reshard.dtypes import dtype
from reshard.errors import RecipeError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import Assignment, assign
from reshard.recipes.naming import fused_spec
from reshard.recipes.overrides import IDLE_AXES
from reshard.recipes.recipe import Recipe, parse_options
from reshard.recipes.rules import Rule
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
    own = request.target_format.assign_layouts(source.checkpoint, request.mesh, request.ranks)
    if own is not None:
        _expect_placed_by_format(request)
        if request.keeps_layouts and not request.selection:
            _expect_kept(source.checkpoint, own)
        return PlacedTensors(_plan_tensors(source.checkpoint, own))
    if request.engine_layout is not None:
        layouts, notes = cut_by_engine(source.checkpoint, request.engine_layout)
        return PlacedTensors(_plan_tensors(source.checkpoint, layouts), notes=notes)
    if request.keeps_layouts:
        planned = {
            name: PlannedTensor(tensor.dtype, tensor.layout, tensor.spec)
            for name, tensor in source.checkpoint.tensors.items()
        }
        return PlacedTensors(planned)
    if request.mesh is not None and request.is_by_rules:
        return _place_by_rules(request, source, request.mesh)
    _expect_no_options(
        request,
        "the rules of a recipe read it where they shard tensors over a mesh, such as to='tp=2', "
        f"and to={request.to_text!r} is none",
    )
    placed, notes = _place_by_strategy(request, source.checkpoint)
    return PlacedTensors(_plan_tensors(source.checkpoint, placed), notes=notes)


def _expect_placed_by_format(request: ConversionRequest) -> None:
    """Refuse rules, options and a strategy, if the target's format places tensors by itself."""
    reader = f"the format {request.target_format.name} specifies by itself what each rank stores"
    # A recipe may be there for its names, or for the comparison with the model class.
    check_used("rules", not request.rules, reader)
    check_used(f"strategy={request.strategy!r}", request.strategy is None, reader)
    _expect_no_options(request, reader)


def _expect_kept(source: Checkpoint, layouts: Mapping[str, Layout]) -> None:
    """Raise UsageError if a format would store optimizer state of a source on other ranks."""
    state = find_training_state(source)
    for name in state.optimizer_names if state is not None else ():
        tensor = source.tensors[name]
        # Counts of steps are stored where the format has a place for them.
        if tensor.shape and name in layouts and layouts[name] != tensor.layout:
            raise UsageError(
                f"the mesh of {source.folder} does not determine the layout of {name!r} in new "
                f"files of the format {source.format}; give `to`, such as dp=2"
            )


def _expect_no_options(request: ConversionRequest, reader: str) -> None:
    for name, value in parse_options(request.options).items():
        check_used(f"the option {name}={value}", False, reader)


def _plan_tensors(
    checkpoint: Checkpoint, layouts: Mapping[str, Layout]
) -> dict[str, PlannedTensor]:
    # Equal ones are one object: there may be very many.
    plan = lru_cache(maxsize=None)(PlannedTensor)
    types = types_of(checkpoint.tensors)
    return {name: plan(types[name], layouts[name]) for name in checkpoint.tensors}


def _place_by_rules(
    request: ConversionRequest, source: NamedSource, mesh: DeviceMesh
) -> PlacedTensors:
    recipe, by_recipe = source.recipe, source.by_recipe
    assignment = assign_tensors(by_recipe, mesh, request.parsed_rules, recipe, request.allow)
    _expect_used_axes(assignment, mesh, recipe, request.allow)
    if recipe is not None and (options := parse_options(request.options)):
        recipe.expect_options_read(options, mesh, {*assignment.matched.values()})
    storage_axes = recipe.map_axes(mesh).get("fsdp", ()) if recipe is not None else ()
    shapes, types = shapes_of(by_recipe.tensors), types_of(source.checkpoint.tensors)
    own_shapes = shapes_of(source.checkpoint.tensors)
    planned = {}
    # Equal ones are one object: there may be very many.
    plan, write = lru_cache(maxsize=None)(PlannedTensor), lru_cache(maxsize=None)(str)
    for name in source.checkpoint.tensors:
        known = source.recipe_names[name]
        spec, layout = assignment.specs[known], assignment.layouts[known]
        # A fused parameter is cut as its members are, so that ranks keep whole members.
        if name in source.fused:
            fusion = source.fused[name]
            spec = fused_spec(name, fusion, assignment.specs, shapes, storage_axes)
            layout = spec.layout(own_shapes[name])
        planned[name] = plan(types[name], layout, write(spec))
    return PlacedTensors(planned, assignment)


def _expect_used_axes(
    assignment: Assignment, mesh: DeviceMesh, recipe: Recipe | None, allow: Iterable[str]
) -> None:
    """Raise RecipeError for an axis of the mesh over which a recipe shards nothing."""
    idle = assignment.list_idle_axes(mesh, recipe)
    if recipe is None or not idle or IDLE_AXES in allow:
        return
    axes = [axis for axis in recipe.axes if axis not in recipe.replicas]
    is_free = axes and axes[0] not in mesh.axis_names
    renamed = f", name it for one of the recipe's (--option {axes[0]}={idle[0]})" * bool(is_free)
    raise RecipeError(
        f"no tensor is sharded over the axis {idle[0]} of {mesh.text}, so that its "
        f"{mesh.axis_size(idle[0])} ranks would hold copies; the recipe {recipe.name!r} shards "
        f"over {', '.join(axes)}, and copies are along {', '.join(recipe.replicas)}. Rename the "
        f"axis{renamed}, or accept the copies: --allow {IDLE_AXES}, in Python allow=[{IDLE_AXES!r}]"
    )


def _place_by_strategy(
    request: ConversionRequest, checkpoint: Checkpoint
) -> tuple[Mapping[str, Layout], tuple[str, ...]]:
    """The layouts that a strategy gives the tensors, or whole ones, with notes for the user.

    Optimizer state goes where its parameter does.
    """
    shapes = shapes_of(checkpoint.tensors)
    if request.is_whole:
        whole = {shape: Layout.whole(shape, [0], 1) for shape in {*shapes.values()}}
        return {name: whole[shape] for name, shape in shapes.items()}, ()
    followers = StateFollowers(shapes, find_training_state(checkpoint))
    # The parameters of an optimizer alone are no tensors of it.
    types = {name: dtype("float32") for name in followers.leaders}
    types |= types_of(checkpoint.tensors)
    place = find_strategy(request.strategy or "simple")
    layouts = place(
        {
            name: (types.get(name, dtype("float32")), shape)
            for name, shape in followers.leaders.items()
        },
        request.ranks,
        read_config(checkpoint) if request.strategy else None,
    )
    return followers.spread_layouts(layouts), followers.notes


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
    by_hand = tuple(rules)
    types = types_of(checkpoint.tensors)
    itemsizes_bytes = {name: element.itemsize_bytes for name, element in types.items()}

    def assign_leaders(
        shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]
    ) -> Assignment:
        return assign(
            shapes,
            mesh,
            by_hand,
            recipe,
            read_config(checkpoint),
            # The parameters of an optimizer alone are no tensors of it.
            {name: itemsizes_bytes.get(name, 4) for name in shapes},
            read_flat_shapes(checkpoint),
            allow=allow,
            aliases=aliases,
        )

    return assign_with_state(checkpoint, by_hand, recipe, mesh, assign_leaders)
