"""Planning of conversions: from a request and a source to a `Conversion`, by reading headers.

Each step takes the result of the previous step:

1. Open the source, check that the target is apart from it, and take the selected tensors.
2. Translate training state for the program of the target (`reshard.checkpoint.training`).
3. Fill in defaults that depend on the source. If the request has no target, the source's layouts,
   format and number of files stay. If it has only a mesh, the recipe that fits the source's
   config.json shards the tensors: `to="tp=4"` is `to="tp=4", recipe="auto"`. An axis over which no
   tensor is sharded is an error, except for axes of data and context parallelism.
4. Rename tensors: first to the recipe's names, which rules match, and then to the target's::

       source's names  --source_names-->  recipe's names  --target_names-->  target's names

5. Add computed elements: casts, quantised weights, copies that the target's format stores
   (`reshard.checkpoint.changes`).
6. Assign a layout to each tensor, by the first of these that the request has: the target's format
   (`CheckpointFormat.assign_layouts`), an engine's layout, the source's layouts, rules and a recipe
   over the axes of a mesh, a strategy over a number of ranks. If it has none, tensors are whole.
7. Let the target's format plan the files (`CheckpointFormat.plan_write`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from reshard._records import Record
from reshard._validation import check_used
from reshard.checkpoint.blocks.tensor_columns import TensorColumns, shapes_of, types_of
from reshard.checkpoint.changes.planning import (
    ChangedElements,
    add_copies,
    change_elements,
    note_unscaled,
)
from reshard.checkpoint.changes.quantization import read_flat_shapes
from reshard.checkpoint.changes.source_digests import find_absorbed
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.conversion.conversion import Conversion
from reshard.checkpoint.copy_checks import expect_equal_copies
from reshard.checkpoint.formats.format import Capability, CheckpointFormat
from reshard.checkpoint.formats.opening import open_checkpoint, read_config
from reshard.checkpoint.formats.registry import find_format, written_names
from reshard.checkpoint.formats.safetensors.huggingface import HuggingFaceFormat
from reshard.checkpoint.formats.write_plan import (
    NewCheckpoint,
    PlannedTensor,
    WritePlan,
    find_stored_replicas,
)
from reshard.checkpoint.naming.renaming import (
    NameTable,
    find_meaning,
    find_stacked_names,
    in_names_of,
    in_recipe_names,
    names_of,
)
from reshard.checkpoint.naming.selection import list_left_out, select_from
from reshard.checkpoint.options import AUTO, NO_RECIPE, ConversionRequest
from reshard.checkpoint.storage.filesystem import resolve_links, translate_os_errors
from reshard.checkpoint.storage.remote_paths import RemotePath, as_path
from reshard.checkpoint.training.model_sets import bare_name, is_auxiliary
from reshard.checkpoint.training.state import find_training_state
from reshard.checkpoint.training.state_sharding import StateSharding
from reshard.dtypes import DType, dtype
from reshard.errors import RecipeError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.recipes.adapters import is_of_adapter
from reshard.recipes.assignment import Assignment, assign
from reshard.recipes.naming import Fusion, make_fused_spec
from reshard.recipes.overrides import IDLE_AXES
from reshard.recipes.rank_order import describe_order
from reshard.recipes.recipe import REPLICA_AXES, Recipe, parse_options
from reshard.recipes.rules import Rule
from reshard.system import release_freed_memory

if TYPE_CHECKING:
    from reshard.checkpoint.changes.computed_tensors import ComputedTensor
    from reshard.checkpoint.keywords import RequestArguments

# The format of the states of engines' ranks, which alone can be taken apart into a model's tensors.
# Its name is repeated here: conversions of other formats do not import its module.
_ENGINE_STATE = "vllm-sharded-state"


def plan_conversion(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    request: ConversionRequest | None = None,
    **arguments: Unpack[RequestArguments],
) -> Conversion:
    """Plan a conversion; reads headers, writes nothing.

    Args:
        source: a checkpoint, or its path.
        target: the folder of the new checkpoint.
        request: the mesh, layouts, names and elements of the target; or its fields as keywords (see
            `ConversionRequest`).

    Raises:
        CheckpointError: an unusable source, such as a source whose copies differ.
        RecipeError: rules or a recipe that do not fit.
        UsageError: arguments that contradict each other; a target inside the source.
        RunError: a target that the system does not let us look at.
    """
    # 1. The source, and the selected tensors of it.
    request = ConversionRequest.of(request, arguments)
    whole, target = open_apart(source, target)
    if request.to is None:
        # First, since all further steps depend on the target's format.
        request = _keep_target(request, whole)
    whole = _decode_items(request, whole)
    checkpoint = take_source(request, whole)
    checkpoint.expect_readable()
    checkpoint = expect_equal_copies(
        checkpoint, check=request.check_copies, allow=tuple(request.allow)
    )
    request = choose_recipe_by_default(request, checkpoint)
    # 2. Training state, names and elements.
    translated = _translate(request, checkpoint)
    named = name_source(request, translated.checkpoint)
    apart = find_absorbed(translated.checkpoint.tensors, named.checkpoint.tensors)
    checked: tuple[str, ...] = ()
    if named.recipe is not None:
        checked = _check_architecture(request, named, named.recipe, whole)
    resolved = _resolve(request, named)
    computed: Mapping[str, ComputedTensor] = translated.computed
    rewritten: Mapping[str, bytes] = {}
    if request.changes_elements:
        changed = _change_elements(request, named.checkpoint)
        named = named.replaced_by(changed.checkpoint)
        # Casts of very many tensors are a single object; a dict of them would take much memory.
        computed = {**computed, **changed.computed} if computed else changed.computed
        rewritten = changed.rewritten
    else:
        named = named.replace(checkpoint=note_unscaled(named.checkpoint, read_config))
    if copies := request.target_format.copies(named.checkpoint):
        copied = add_copies(ChangedElements(named.checkpoint, computed), copies)
        named, computed = named.replace(checkpoint=copied.checkpoint), copied.computed
    # 3. Layouts and files.
    tensors, assignment, placement_notes = place_tensors(request, named)
    release_freed_memory(len(tensors))
    checkpoint = named.checkpoint
    write_plan, single_file = plan_files(request, target, checkpoint, tensors, request.mesh)
    notes = [*checkpoint.notes, *_describe_order(request), *placement_notes, *checked]
    is_model_folder = request.is_whole and request.target_format.name == HuggingFaceFormat.name
    if is_model_folder and find_training_state(checkpoint) is not None:
        notes.append(
            "the target has the optimizer's state too; --for hf writes a model folder for "
            "from_pretrained of transformers, with the weights alone"
        )
    return Conversion(
        checkpoint.replace(notes=tuple(notes)),
        target,
        write_plan,
        request,
        resolved,
        assignment,
        computed,
        rewritten,
        apart,
        single_file=single_file,
    )


def _describe_order(request: ConversionRequest) -> tuple[str, ...]:
    """Return a note if the ranks are not counted in the order of the axes in `to`."""
    if request.mesh is None or not isinstance(request.to, str) or "=" not in request.to:
        return ()
    return describe_order(request.mesh, DeviceMesh.parse(request.to))


def _check_architecture(
    request: ConversionRequest, named: RenamedSource, recipe: Recipe, whole: Checkpoint
) -> tuple[str, ...]:
    """Compare the weights with the model class for which the recipe or the names are made.

    Returns the notes for the user.

    Raises:
        CheckpointError: missing, unknown or misshapen tensors that are not allowed.
    """
    config, source = read_config(whole), named.by_recipe
    if config is None or "adapter_config" in config or config.get("model_type") is None:
        return ()
    if any(is_of_adapter(name) for name in source.tensors):
        return ("the tensors were not checked against an architecture: they have adapters",)
    from reshard.checkpoint.architectures.checking import check_architecture, check_sharded_model

    shapes, types = shapes_of(source.tensors), types_of(source.tensors)
    models = _list_models(source, shapes, types, recipe, config)
    left_out = set()
    for name in list_left_out(whole, request.selection):
        for prefix in models.keys() | {""}:
            meaning = bare_name(name).removeprefix(prefix)
            if named.from_names is not None:
                meant = find_meaning(meaning, named.from_names[1])
                left_out |= {meant} if isinstance(meant, str) else {*meant.tensors}
            else:
                left_out.add(meaning)
    # A user's rule for a tensor shows that the tensor is intended, unless it matches all tensors.
    by_hand = [rule for rule in request.parsed_rules if rule.pattern.strip("*")]
    notes = dict[str, None]()
    for names in models.values():
        about = (_rename(names, shapes), _rename(names, types), config, whole.folder)
        if request.target_names is not None:
            checked = check_architecture(*about, allow=request.allow, left_out=left_out)
        else:
            checked = check_sharded_model(
                *about,
                allow=request.allow,
                left_out=left_out,
                is_meant=lambda name: any(rule.matches(name) for rule in by_hand),
            )
        notes |= dict.fromkeys(checked)
    if len(models) > 1:
        listed = ", ".join(f"{prefix}* ({len(names)})" for prefix, names in models.items())
        notes[f"{len(models)} models with the same names are sharded: {listed}"] = None
    return (*notes,)


def _list_models(
    source: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    types: Mapping[str, DType],
    recipe: Recipe,
    config: Mapping[str, Any],
) -> dict[str, dict[str, str]]:
    """Return, for each model's prefix, the weights of that model by the recipe's names."""
    state = find_training_state(source)
    names = {bare_name(name): name for name in source.tensors if not is_auxiliary(name)}
    if state is not None:
        names = dict(state.weights)
    if not names:
        return {}
    own = {name: shapes[name] for name in names.values()}
    models = StateSharding(own, None, recipe=recipe).list_models()
    if {*models} == {""}:
        return {"": names}

    from reshard.checkpoint.architectures.checking import count_differences

    def count(model: Mapping[str, str]) -> int:
        return count_differences(_rename(model, shapes), _rename(model, types), config)

    is_plain = count(names) <= min(map(count, models.values()))
    return {"": names} if is_plain else models


def _rename(names: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {new: values[name] for new, name in names.items()}


def open_apart(
    source: str | os.PathLike[str] | Checkpoint, target: str | os.PathLike[str]
) -> tuple[Checkpoint, Path]:
    """Return the source, and the path of a target that is apart from it.

    Raises:
        CheckpointError: a source that cannot be used.
        UsageError: a target that is not a path, that would replace its source or be inside it.
        RunError: a target that the system does not let us look at.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if not isinstance(target, str | os.PathLike):
        raise UsageError(f"a target {target!r}; give a path")
    target = as_path(target)
    if isinstance(target, RemotePath):
        from reshard.checkpoint.storage.uploads import expect_writable

        expect_writable(target)
    with translate_os_errors("look at the target", target):
        _check_apart(
            checkpoint,
            target,
            # A target may be in the folder of a source that is a single file.
            whole_folder=isinstance(source, Checkpoint) or as_path(source).is_dir(),
        )
    return checkpoint, target


def plan_files(
    request: ConversionRequest,
    target: Path,
    checkpoint: Checkpoint,
    tensors: Mapping[str, PlannedTensor],
    mesh: DeviceMesh | None,
) -> tuple[WritePlan, str | None]:
    """Return the files of a target, and the name of its only file; None if it is a folder.

    Args:
        request: the request for the conversion.
        target: the target.
        checkpoint: the source, by the names of the target.
        tensors: the tensors of the target.
        mesh: the mesh of the target, if any.

    Raises:
        UsageError: the name of a file for a target at an address, of several files, or that is a
            file of the source.
    """
    file_name = _find_file_name(request, target, checkpoint)
    write_plan = request.target_format.plan_write(
        NewCheckpoint(
            tensors,
            mesh,
            checkpoint.metadata,
            checkpoint.items,
            checkpoint.paths,
            checkpoint.attributes,
            request.stored_replicas,
            request.most_file_bytes,
            checkpoint.values,
            _find_kept_files(request, checkpoint),
            file_name,
            tuple(request.allow),
        )
    )
    if file_name is not None and len(write_plan.files) > 1:
        raise UsageError(
            f"the target {target} has the name of a file, but {len(write_plan.files)} files would "
            f"be written; give a name without {target.suffix} for a folder"
        )
    return write_plan, file_name


def _find_file_name(request: ConversionRequest, target: Path, source: Checkpoint) -> str | None:
    """Return the name of the target's only file, or None if the target's name is not a file's."""
    suffixes = request.target_format.single_suffixes
    if not suffixes or not target.name.endswith(suffixes):
        return None
    problem = ""
    if isinstance(target, RemotePath):
        problem = "conversions write folders to addresses"
    elif target.resolve() in {source.path(file.name).resolve() for file in source.files}:
        problem = "it is a file of the source"
    if problem:
        raise UsageError(
            f"the target {target} has the name of a file, but {problem}; choose another name, "
            f"without {target.suffix} for a folder"
        )
    return target.name


def unwritten_target(source: str | os.PathLike[str]) -> Path:
    """Return a target for a conversion that is only planned: an unused name next to the source.

    >>> unwritten_target("/data/model")
    PosixPath('/data/model.planned')
    """
    place = source if isinstance(source, Path) else as_path(source)
    if isinstance(place, RemotePath):
        place = Path.cwd() / place.name
    # Not `resolve`, which raises for a link to itself: opening the source reports such a link.
    place = Path(os.path.realpath(place))
    return place.with_name(f"{place.name}.planned")


def plan_whole_files(request: ConversionRequest, checkpoint: Checkpoint) -> WritePlan:
    """Plan the files of a target that stores each tensor of a checkpoint whole."""
    return request.target_format.plan_write(
        NewCheckpoint(
            {
                name: PlannedTensor(tensor.dtype, Layout.whole(tensor.shape, [0], 1))
                for name, tensor in checkpoint.tensors.items()
            },
            metadata=checkpoint.metadata,
            most_file_bytes=request.most_file_bytes,
        )
    )


def _check_apart(checkpoint: Checkpoint, target: Path, *, whole_folder: bool) -> None:
    """Raise UsageError if a target would replace its source, or be inside it."""
    try:
        source, goal = checkpoint.folder.resolve(), resolve_links(target)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UsageError(
            f"the target {target} is a link that leads back to itself; choose another target"
        ) from None
    if whole_folder and _is_among(source, goal.parents):
        raise UsageError(
            f"the target {target} lies inside the source {checkpoint.folder}; put it elsewhere"
        )
    # The commit deletes the old target with all of its contents.
    if _is_among(goal, source.parents) or (_is_among(goal, [source]) and not whole_folder):
        raise UsageError(
            f"the source {checkpoint.folder} lies inside the target {target}, and would be deleted "
            "with it; choose another target"
        )


def _is_among(path: Path, others: Iterable[Path]) -> bool:
    """Return whether a path is among others, also under another name of the same folder."""
    others = list(others)
    if path in others:
        return True
    # File systems that ignore case give a folder many names.
    paths = [item for item in (path, *others) if not isinstance(item, RemotePath) and item.exists()]
    return path in paths and any(path.samefile(other) for other in paths if other != path)


def _decode_items(request: ConversionRequest, checkpoint: Checkpoint) -> Checkpoint:
    """Decode pickled items to plain values if the target's program looks for them there."""
    source, target = find_format(checkpoint.format), request.target_format
    keeps_others = Capability.ITEMS in target.capabilities
    # Megatron's formats store both values and items, but Megatron does not read the items of other
    # programs, so these are decoded.
    has_values = Capability.VALUES in target.capabilities and (
        not keeps_others or target.training is not None
    )
    # A program's own values stay pickled; its other formats store them in other places.
    is_of_program = source is not None and source.training == target.training is not None
    if not has_values or is_of_program:
        return checkpoint
    from reshard.checkpoint.training.plain_state import in_plain_values

    return in_plain_values(checkpoint, keeps_others=keeps_others)


def _translate(request: ConversionRequest, checkpoint: Checkpoint) -> ChangedElements:
    """Return the source with its training state in the form of the target's program."""
    style = request.training_style
    if style is None or (request.training is None and find_training_state(checkpoint) is None):
        return ChangedElements(checkpoint)
    # All formats of a program store training state in the same form: no translation is needed.
    source = find_format(checkpoint.format)
    is_same = source is request.target_format
    if request.training is None and source is not None and source.training == style.name:
        return ChangedElements(checkpoint)
    has_items = Capability.ITEMS in request.target_format.capabilities
    from reshard.checkpoint.training.translation import translate

    translated = translate(
        checkpoint, style, has_items=has_items, keeps_items=has_items and is_same
    )
    renames = request.source_names is not None or request.target_names is not None
    if translated.computed and renames:
        raise UsageError(
            f"{next(iter(translated.computed))!r} has to be made of what the source has, which "
            "cannot go together with names of other programs; convert in two steps, the training "
            "state first"
        )
    return translated


def _change_elements(request: ConversionRequest, checkpoint: Checkpoint) -> ChangedElements:
    from reshard.checkpoint.changes.adapters import merge_adapters

    checkpoint, merged = merge_adapters(checkpoint, request.adapters)
    state = find_training_state(checkpoint)
    return change_elements(
        checkpoint,
        read_config(checkpoint),
        dtype_name=request.dtype,
        dequantize=request.dequantize,
        quantize=request.quantize,
        # Optimizer state is neither cast nor quantised.
        kept=() if state is None else state.optimizer_names,
        made=merged,
        allow=request.allow,
    )


def _resolve(request: ConversionRequest, named: RenamedSource) -> dict[str, Any]:
    """Return a request as plain values. Journals on disk have these keys and values."""
    options = sorted(request.recipe_options.items())
    # Entries that depend on the source too, or whose values are not plain.
    plain = {
        "to": request.to_text,
        "rules": tuple(f"{rule.pattern}={rule.spec}" for rule in request.parsed_rules),
        "recipe": named.recipe.name if named.recipe else None,
        "options": tuple(f"{name}={value}" for name, value in options),
        "replicas": request.stored_replicas,
        "source_names": None if named.from_names is None else named.from_names[0],
        "target_names": None if named.to_names is None else named.to_names[0],
    }
    extra = {"cut": "as the source"} if request.keeps_layouts else {}
    return {**request.list_recorded(), **plain, **extra}


def _keep_target(request: ConversionRequest, checkpoint: Checkpoint) -> ConversionRequest:
    """Return a request without a target, with the mesh and the format of its source.

    Raises:
        UsageError: a source of a format that reshard does not write; a sharded source together with
            new names, or with elements of other shapes.
    """
    name = request.format or checkpoint.format
    format = expect_written(checkpoint, name)
    holds_shards = Capability.SHARDS in format.capabilities
    is_whole = checkpoint.ranks == 1 and (checkpoint.mesh is None or not holds_shards)
    if is_whole and Capability.WHOLE in format.capabilities:
        return request.replace(kept="full", format=name)
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
    mesh_or_ranks = checkpoint.mesh or checkpoint.ranks
    replicas = keep_replicas(request, format, checkpoint)
    return request.replace(kept=mesh_or_ranks, format=name, replicas=replicas)


def keep_replicas(
    request: ConversionRequest, format: CheckpointFormat, checkpoint: Checkpoint
) -> str | None:
    """Return the replicas of a target in the source's layouts: as requested, or as in the source.

    None stands for the default of the format.
    """
    if request.replicas is not None or Capability.REPLICAS not in format.capabilities:
        return request.replicas
    return find_stored_replicas(checkpoint.tensors)


def _find_kept_files(request: ConversionRequest, checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return the source's file of each tensor, if the target keeps whole tensors in these files."""
    if request.kept != "full" or request.most_file_bytes is not None:
        return {}
    columns = TensorColumns.of(checkpoint.tensors)
    files = [kind.files[0] if kind.files else "" for kind in columns.kinds]
    return {
        name: files[kind] for name, kind in zip(columns.names, columns.kind.tolist(), strict=True)
    }


def expect_written(checkpoint: Checkpoint, name: str) -> CheckpointFormat:
    """Return the format of a target that keeps the source's.

    Raises:
        UsageError: a format that is not written.
    """
    format = find_format(name)
    if format is None or name not in written_names():
        raise UsageError(
            f"{checkpoint.folder} is of the format {name}, which is not written; give the target's "
            f"layout and format: to='full' or a mesh, and a format of {', '.join(written_names())}"
        )
    return format


def choose_recipe_by_default(
    request: ConversionRequest, checkpoint: Checkpoint
) -> ConversionRequest:
    """Return the request, with the recipe `auto` if it has a mesh but does not specify shardings.

    Args:
        request: the request for a conversion.
        checkpoint: the selected part of its source.

    Raises:
        UsageError: the mesh has an axis to shard over, and no recipe fits config.json.
    """
    mesh = request.mesh
    if mesh is None:
        return request
    is_given = request.recipe is not None or request.rules or request.strategy is not None
    # Formats that determine all layouts use a recipe only for its names.
    needs_rules = not request.target_format.shards_itself or request.has_conventions
    lacks_rules = request.is_by_rules and needs_rules and not is_given
    if not lacks_rules and request.recipe != AUTO:
        return request
    # Recipes are files: nothing about them is imported where rules are given.
    from reshard.recipes.library import choose_recipe

    config = read_config(checkpoint)
    if config is not None and choose_recipe(config) is not None:
        return request.replace(recipe=AUTO)
    axes = [axis for axis in mesh.list_long_axes() if axis not in REPLICA_AXES]
    if request.recipe == AUTO or (axes and IDLE_AXES not in request.allow):
        _refuse_unknown_model(checkpoint, mesh, axes)
    return request


def _refuse_unknown_model(checkpoint: Checkpoint, mesh: DeviceMesh, axes: list[str]) -> NoReturn:
    import shlex

    from reshard.recipes.library import describe_unknown_model, suggest_rules

    shapes = shapes_of(checkpoint.tensors)
    weights = StateSharding(shapes, find_training_state(checkpoint)).leaders
    rules = suggest_rules(weights, axes[0] if axes else mesh.axis_names[0])
    written = " ".join(f"--rule {shlex.quote(rule)}" for rule in rules)
    raise UsageError(
        f"nothing says how to shard {checkpoint.folder} over {mesh.text}: "
        f"{describe_unknown_model(read_config(checkpoint), weights)}. Rules are such as {written}. "
        f"To keep a copy of every tensor for each rank: --allow {IDLE_AXES}, in Python "
        f"allow=[{IDLE_AXES!r}]"
    )


class RenamedSource(Record):
    """A checkpoint in the names of the target, and the recipe's name of each tensor.

    Attributes:
        checkpoint: the checkpoint in the target's names.
        by_recipe: the checkpoint in the recipe's names, which rules match.
        recipe: the recipe with its options, or None.
        recipe_names: the recipe's name for each of the target's names; for a fused parameter, the
            name of its first member.
        fused: the fused parameters of the target, by name.
        from_names, to_names: the tables that were used.
    """

    checkpoint: Checkpoint
    by_recipe: Checkpoint
    recipe: Recipe | None
    recipe_names: Mapping[str, str]
    fused: Mapping[str, Fusion] = field(default_factory=dict)
    from_names: NameTable | None = None
    to_names: NameTable | None = None

    def replaced_by(self, checkpoint: Checkpoint) -> RenamedSource:
        """Return the same with another checkpoint: other elements, and perhaps other tensors."""
        if self.to_names is not None:
            return self.replace(checkpoint=checkpoint)
        names = {name: name for name in checkpoint}
        return self.replace(checkpoint=checkpoint, by_recipe=checkpoint, recipe_names=names)


def take_source(request: ConversionRequest, checkpoint: Checkpoint) -> Checkpoint:
    """Return the requested part of a checkpoint; for an engine's ranks, the model's tensors.

    Raises:
        RecipeError: a layout of other ranks; two tensors or items of the same name.
        UsageError: a pattern that matches no tensor; a selection without tensors.
    """
    layout = request.source_engine_layout
    if layout is not None or checkpoint.format == _ENGINE_STATE != request.target_format.name:
        from reshard.checkpoint.conversion.engine_states import as_model, find_layout

        layout = layout or find_layout(checkpoint)
        if layout is not None:
            checkpoint = as_model(checkpoint, layout)
    return select_from(checkpoint, request.selection)


def name_source(request: ConversionRequest, checkpoint: Checkpoint) -> RenamedSource:
    """Return a checkpoint in the names that a request specifies.

    Raises:
        RecipeError: an unknown recipe; tables that do not fit the tensors.
        UsageError: `auto`, and no recipe fits config.json.
    """
    asked = AUTO if request.is_by_recipe else request.recipe
    recipe = find_recipe(asked, checkpoint, request.options)
    config = read_config(checkpoint) if recipe is not None else None
    from_names = names_of("source_names", request.source_names, recipe, config)
    to_names = names_of("target_names", request.target_names, recipe, config)
    # The tables start from the recipe's names, which a source with stacked experts lacks.
    if from_names is None and isinstance(request.target_names, str):
        from_names = find_stacked_names(checkpoint, recipe, config)
    by_recipe = checkpoint
    if from_names is not None:
        by_recipe = in_recipe_names(checkpoint, from_names[1])
    if to_names is None:
        names = {name: name for name in by_recipe}
        return RenamedSource(by_recipe, by_recipe, recipe, names, from_names=from_names)
    checkpoint, names, fused = in_names_of(by_recipe, to_names[1])
    return RenamedSource(checkpoint, by_recipe, recipe, names, fused, from_names, to_names)


def find_recipe(
    recipe: str | os.PathLike[str] | Recipe | None,
    checkpoint: Checkpoint,
    options: Mapping[str, str] | Iterable[str] = (),
) -> Recipe | None:
    """Load a recipe by name or path, with options.

    `auto` chooses the recipe by config.json, `none` stands for no recipe.

    Raises:
        RecipeError: an unknown or unreadable recipe; options that it lacks.
        UsageError: `auto` without a config.json, or with a config.json that no shipped recipe fits;
            options without a recipe.
    """
    loaded = _load(recipe, checkpoint)
    parsed = parse_options(options)
    if loaded is not None:
        return loaded.with_options(parsed)
    if parsed:
        raise UsageError(
            f"the option {next(iter(parsed))!r} without a recipe that has it; name the recipe"
        )
    return None


def _load(recipe: str | os.PathLike[str] | Recipe | None, checkpoint: Checkpoint) -> Recipe | None:
    if recipe is None or recipe == NO_RECIPE:
        return None
    if isinstance(recipe, Recipe):
        return recipe
    from reshard.recipes.library import choose_recipe, describe_unknown_model, load_recipe

    if recipe != AUTO:
        return load_recipe(os.fspath(recipe) if isinstance(recipe, os.PathLike) else recipe)
    config = read_config(checkpoint)
    if config is None:
        raise UsageError(
            f"recipe 'auto' looks in config.json, and {checkpoint.folder} has none; name a recipe"
        )
    chosen = choose_recipe(config)
    if chosen is None:
        raise UsageError(describe_unknown_model(config, checkpoint.tensors))
    return chosen


# The tensors of the target in their layouts, how rules and recipes matched if they were used, and
# notes for the user.
Placement = tuple[Mapping[str, PlannedTensor], Assignment | None, tuple[str, ...]]


def place_tensors(request: ConversionRequest, source: RenamedSource) -> Placement:
    """Assign a layout to each tensor of a source, by its name in the target.

    Raises:
        RecipeError: rules, a recipe or an engine's layout that do not fit.
        UsageError: an invalid strategy.
    """
    own = request.target_format.assign_layouts(source.checkpoint, request.mesh, request.ranks)
    if own is not None:
        _expect_placed_by_format(request)
        if request.keeps_layouts and not request.selection:
            _expect_kept(source.checkpoint, own)
        return _plan_tensors(source.checkpoint, own), None, ()
    if request.engine_layout is not None:
        from reshard.checkpoint.conversion.engine_states import shard_by_engine

        layouts, notes = shard_by_engine(source.checkpoint, request.engine_layout)
        return _plan_tensors(source.checkpoint, layouts), None, notes
    if request.keeps_layouts:
        planned = {
            name: PlannedTensor(tensor.dtype, tensor.layout, tensor.spec)
            for name, tensor in source.checkpoint.tensors.items()
        }
        return planned, None, ()
    if request.mesh is not None and request.is_by_rules:
        return _place_by_rules(request, source, request.mesh)
    _expect_no_options(
        request,
        "the rules of a recipe read it where they shard tensors over a mesh, such as to='tp=2', "
        f"and to={request.to_text!r} is none",
    )
    placed, notes = _place_by_strategy(request, source.checkpoint)
    return _plan_tensors(source.checkpoint, placed), None, notes


def _expect_placed_by_format(request: ConversionRequest) -> None:
    """Refuse rules, options and a strategy if the target's format determines all layouts."""
    reader = f"the format {request.target_format.name} specifies by itself what each rank stores"
    # A recipe is not refused: its names, or the comparison with the model class, may be wanted.
    check_used("rules", not request.rules, reader)
    check_used(f"strategy={request.strategy!r}", request.strategy is None, reader)
    _expect_no_options(request, reader)


def _expect_kept(source: Checkpoint, layouts: Mapping[str, Layout]) -> None:
    """Raise UsageError if a format would store optimizer state of a source on other ranks."""
    state = find_training_state(source)
    for name in state.optimizer_names if state is not None else ():
        tensor = source.tensors[name]
        # Scalars, such as step counts, may move: the format determines which file stores them.
        if tensor.shape and name in layouts and layouts[name] != tensor.layout:
            raise UsageError(
                f"the mesh of {source.folder} does not determine the layout of {name!r} in new "
                f"files of the format {source.format}; give `to`, such as dp=2"
            )


def _expect_no_options(request: ConversionRequest, reader: str) -> None:
    for name, value in request.recipe_options.items():
        check_used(f"the option {name}={value}", False, reader)


def _plan_tensors(
    checkpoint: Checkpoint, layouts: Mapping[str, Layout]
) -> dict[str, PlannedTensor]:
    # Equal tensors share an object: there may be very many.
    plan = lru_cache(maxsize=None)(PlannedTensor)
    types = types_of(checkpoint.tensors)
    return {name: plan(types[name], layouts[name]) for name in checkpoint.tensors}


def _place_by_rules(
    request: ConversionRequest, source: RenamedSource, mesh: DeviceMesh
) -> Placement:
    recipe, by_recipe = source.recipe, source.by_recipe
    assignment = assign_tensors(by_recipe, mesh, request.parsed_rules, recipe, request.allow)
    _expect_used_axes(assignment, mesh, recipe, request.allow)
    if recipe is not None and request.recipe_options:
        matched = {*assignment.matched.values()}
        recipe.expect_options_read(request.recipe_options, mesh, matched)
    storage_axes = recipe.map_axes(mesh).get("fsdp", ()) if recipe is not None else ()
    shapes, types = shapes_of(by_recipe.tensors), types_of(source.checkpoint.tensors)
    own_shapes = shapes_of(source.checkpoint.tensors)
    planned = {}
    # Equal tensors share an object: there may be very many.
    plan, write = lru_cache(maxsize=None)(PlannedTensor), lru_cache(maxsize=None)(str)
    for name in source.checkpoint.tensors:
        recipe_name = source.recipe_names[name]
        spec, layout = assignment.specs[recipe_name], assignment.layouts[recipe_name]
        # A fused parameter is sharded like its members, so that ranks hold the same parts of them.
        if name in source.fused:
            fusion = source.fused[name]
            spec = make_fused_spec(name, fusion, assignment.specs, shapes, storage_axes)
            layout = spec.layout(own_shapes[name])
        planned[name] = plan(types[name], layout, write(spec))
    return planned, assignment, ()


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
    """Return the layouts that a strategy assigns, or layouts of whole tensors; and notes.

    Optimizer state is placed like its parameter.
    """
    shapes = shapes_of(checkpoint.tensors)
    if request.is_whole:
        whole = {shape: Layout.whole(shape, [0], 1) for shape in {*shapes.values()}}
        return {name: whole[shape] for name, shape in shapes.items()}, ()
    followers = StateSharding(shapes, find_training_state(checkpoint))
    # A checkpoint of optimizer state alone lacks the parameters, so their types are unknown.
    types = {name: dtype("float32") for name in followers.leaders}
    types |= types_of(checkpoint.tensors)
    from reshard.recipes.strategies import strategy as find_strategy

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
    """Assign shardings to the tensors of a checkpoint by rules and a recipe.

    Raises:
        RecipeError: rules or a recipe that do not fit.
    """
    by_hand = tuple(rules)
    shapes, types = shapes_of(checkpoint.tensors), types_of(checkpoint.tensors)
    # Optimizer state follows its parameters, which alone rules shard.
    followers = StateSharding(shapes, find_training_state(checkpoint), by_hand, recipe)
    assignment = assign(
        followers.leaders,
        mesh,
        by_hand,
        recipe,
        read_config(checkpoint),
        # A checkpoint of optimizer state alone lacks the parameters; 4 bytes is the default.
        {name: types[name].itemsize_bytes if name in types else 4 for name in followers.leaders},
        read_flat_shapes(checkpoint),
        allow=allow,
        aliases=followers.aliases,
    )
    return followers.spread(assignment, mesh)
