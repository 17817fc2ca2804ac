"""Planning of conversions: from a request and a source to a `Conversion`, by reading headers.

Each step is a function from what the step before gave:

1. the source, what is taken of it (`source_selection`), and a target apart from it;
2. training state, as the program of the target keeps it (`reshard.checkpoint.training`);
3. the recipe, where the request has none (`defaults`);
4. names: the recipe's, in which rules match, and the target's (`source_names`);
5. elements that are computed: casts, quantised weights, copies that the target's format has
   (`reshard.checkpoint.changes`);
6. layouts: by a format, an engine, rules and a recipe, or a strategy (`placement`);
7. files: the target's format finds a place for every shard (`reshard.checkpoint.formats`).
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from reshard.checkpoint.architectures.checking import (
    check_architecture,
    check_sharded_model,
    count_differences,
)
from reshard.checkpoint.blocks.tensor_columns import shapes_of, types_of
from reshard.checkpoint.changes.adapters import merge_adapters
from reshard.checkpoint.changes.planning import (
    ChangedElements,
    add_copies,
    change_elements,
    note_unscaled,
)
from reshard.checkpoint.changes.source_digests import find_absorbed
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.conversion.conversion import Conversion
from reshard.checkpoint.conversion.defaults import (
    choose_recipe_by_default,
    find_kept_files,
    keep_target_by_default,
)
from reshard.checkpoint.conversion.placement import place_tensors
from reshard.checkpoint.conversion.source_names import NamedSource, name_source
from reshard.checkpoint.conversion.source_selection import take_source
from reshard.checkpoint.copy_checks import expect_equal_copies
from reshard.checkpoint.formats.format import Capability
from reshard.checkpoint.formats.opening import open_checkpoint, read_config
from reshard.checkpoint.formats.registry import find_format
from reshard.checkpoint.formats.safetensors.huggingface import HuggingFaceFormat
from reshard.checkpoint.formats.write_plan import NewCheckpoint, PlannedTensor, WritePlan
from reshard.checkpoint.naming.renaming import find_meaning
from reshard.checkpoint.naming.selection import list_left_out
from reshard.checkpoint.options import ConversionRequest
from reshard.checkpoint.storage.filesystem import resolve_links, translate_os_errors
from reshard.checkpoint.storage.host_memory import release_freed_memory
from reshard.checkpoint.storage.remote_paths import RemotePath, as_path
from reshard.checkpoint.storage.uploads import expect_writable
from reshard.checkpoint.training.following import StateFollowers
from reshard.checkpoint.training.model_sets import bare_name, is_beside_model
from reshard.checkpoint.training.plain_state import in_plain_values
from reshard.checkpoint.training.state import find_training_state
from reshard.checkpoint.training.translation import translate
from reshard.dtypes import DType
from reshard.errors import UsageError
from reshard.layout import Layout
from reshard.plans.serialization import to_json
from reshard.recipes.adapters import is_of_adapter
from reshard.recipes.engine_layouts import EngineLayout
from reshard.recipes.recipe import Recipe, parse_options

if TYPE_CHECKING:
    from reshard.checkpoint.keywords import RequestArguments


def plan_conversion(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    request: ConversionRequest | None = None,
    **arguments: Unpack[RequestArguments],
) -> Conversion:
    """Plan a conversion; reads headers, writes nothing.

    Args:
        source: a checkpoint, or where it is.
        target: the folder that will hold the new one.
        request: what to cut for, and how; or its keywords: `to`, `rules`, `recipe`, `options`,
            `strategy`, `format`, `replicas`, `most_file_bytes`, `source_names`, `target_names`,
            `dtype`, `dequantize`, `quantize`, `layout`, `allow`, `include`, `exclude`,
            `strip_prefix`, `rename`, `select`, `training`, `adapters`, `source_layout`,
            `check_copies` (see `ConversionRequest`).

    Raises:
        CheckpointError: a source that cannot be used, such as one whose copies differ.
        RecipeError: rules or a recipe that do not fit.
        UsageError: arguments that contradict each other; a target inside the source.
        RunError: a target that the system does not let us look at.
    """
    if request is None:
        request = ConversionRequest(**arguments)
    elif arguments:
        raise UsageError(f"a request, and beside it {next(iter(arguments))!r}; put it into the one")
    checkpoint, target = open_apart(source, target)
    request = keep_target_by_default(request, checkpoint)
    checkpoint = _decode_items(request, checkpoint)
    whole, checkpoint = checkpoint, take_source(request, checkpoint)
    checkpoint.expect_readable()
    checkpoint = expect_equal_copies(
        checkpoint, check=request.check_copies, allow=tuple(request.allow)
    )
    request = choose_recipe_by_default(request, checkpoint)
    translated = _translate(request, checkpoint)
    named = name_source(request, translated.checkpoint)
    apart = find_absorbed(translated.checkpoint.tensors, named.checkpoint.tensors)
    checked = _check_architecture(request, named, whole)
    resolved = _resolve(request, named)
    changed = _change_elements(request, named.checkpoint)
    if request.changes_elements:
        named = named.replaced_by(changed.checkpoint)
    if translated.computed:
        computed = {**translated.computed, **changed.computed}
        changed = dataclasses.replace(changed, computed=computed)
    changed = add_copies(changed, request.target_format.copies(changed.checkpoint))
    named = dataclasses.replace(named, checkpoint=changed.checkpoint)
    placement = place_tensors(request, named)
    release_freed_memory(len(placement.tensors))
    checkpoint = named.checkpoint
    file_name = find_file_name(request, target, checkpoint)
    write_plan = request.target_format.plan_write(
        NewCheckpoint(
            placement.tensors,
            request.mesh,
            checkpoint.metadata,
            checkpoint.items,
            checkpoint.paths,
            checkpoint.attributes,
            request.stored_replicas,
            request.most_file_bytes,
            checkpoint.values,
            find_kept_files(request, checkpoint),
            file_name,
        )
    )
    expect_one_file(file_name, target, write_plan)
    about_model = _note_model_folder(request, checkpoint)
    noted = (*request.order_notes, *placement.notes, *checked, *about_model)
    return Conversion(
        dataclasses.replace(checkpoint, notes=(*checkpoint.notes, *noted)),
        target,
        write_plan,
        request,
        resolved,
        placement.assignment,
        changed.computed,
        changed.rewritten,
        is_single_file=file_name is not None,
        apart=apart,
    )


def _note_model_folder(request: ConversionRequest, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a note where a user may expect a model folder, and gets training state too."""
    is_safetensors = request.target_format.name == HuggingFaceFormat.name
    if not request.is_whole or not is_safetensors or find_training_state(checkpoint) is None:
        return ()
    return (
        "the target has the optimizer's state too; --for hf writes a model folder for "
        "from_pretrained of transformers, with the weights alone",
    )


def _check_architecture(
    request: ConversionRequest, named: NamedSource, whole: Checkpoint
) -> tuple[str, ...]:
    """Compare the weights with those of the model class, where a recipe or names are for it.

    Returns the notes for the user; none where nothing says that the source is such a model.

    Raises:
        CheckpointError: missing, unknown or misshapen tensors that are not allowed.
    """
    if named.recipe is None or not request.recipe_is_for_model:
        return ()
    config, source = read_config(whole), named.by_recipe
    if config is None or "adapter_config" in config or config.get("model_type") is None:
        return ()
    if any(is_of_adapter(name) for name in source.tensors):
        return ("the tensors were not checked against an architecture: they have adapters",)
    shapes, types = shapes_of(source.tensors), types_of(source.tensors)
    models = _list_models(source, shapes, types, named.recipe, config)
    left_out = set()
    for name in list_left_out(whole, request.selection):
        for prefix in models.keys() | {""}:
            meaning = bare_name(name).removeprefix(prefix)
            if named.from_names is not None:
                known = find_meaning(meaning, named.from_names.table)
                left_out |= {known} if isinstance(known, str) else {*known.tensors}
            else:
                left_out.add(meaning)
    # A rule by hand for a tensor shows that the user means it, except for one for all tensors.
    by_hand = [rule for rule in request.parsed_rules if rule.pattern.strip("*")]
    notes = dict[str, None]()
    for names in models.values():
        about = (_rename(names, shapes), _rename(names, types), config, whole.folder)
        if request.target_names is not None:
            found = check_architecture(*about, allow=request.allow, left_out=left_out)
        else:
            found = check_sharded_model(
                *about,
                allow=request.allow,
                left_out=left_out,
                is_meant=lambda name: any(rule.matches(name) for rule in by_hand),
            )
        notes |= dict.fromkeys(found)
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
    """Return the weights of each model of a source by the recipe's names, by the model's prefix."""
    state = find_training_state(source)
    names = {bare_name(name): name for name in source.tensors if not is_beside_model(name)}
    if state is not None:
        names = dict(state.weights)
    if not names:
        return {}
    followers = StateFollowers({name: shapes[name] for name in names.values()}, None)
    followers.with_recipe(recipe)
    models = followers.list_models()
    if {*models} == {""}:
        return {"": names}

    def count(model: Mapping[str, str]) -> int:
        return count_differences(_rename(model, shapes), _rename(model, types), config)

    is_plain = count(names) <= min(map(count, models.values()))
    return {"": names} if is_plain else models


def _rename(names: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {new: values[name] for new, name in names.items()}


def open_apart(
    source: str | os.PathLike[str] | Checkpoint, target: str | os.PathLike[str]
) -> tuple[Checkpoint, Path]:
    """The source, and the path of a target that is apart from it.

    Raises:
        CheckpointError: a source that cannot be used.
        UsageError: a target that is no path, that would replace its source, or stand in it.
        RunError: a target that the system does not let us look at.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if not isinstance(target, str | os.PathLike):
        raise UsageError(f"a target {target!r}; give a path")
    target = as_path(target)
    if isinstance(target, RemotePath):
        expect_writable(target)
    with translate_os_errors("look at the target", target):
        _check_apart(
            checkpoint,
            target,
            whole_folder=isinstance(source, Checkpoint) or as_path(source).is_dir(),
        )
    return checkpoint, target


def find_file_name(request: ConversionRequest, target: Path, source: Checkpoint) -> str | None:
    """Return the name of the target's only file, where the target's name is that of a file.

    Raises:
        UsageError: a file of the source, or a file at an address.
    """
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


def expect_one_file(file_name: str | None, target: Path, write_plan: WritePlan) -> None:
    """Raise UsageError where a target with the name of a file would be several files."""
    if file_name is not None and len(write_plan.files) > 1:
        raise UsageError(
            f"the target {target} has the name of a file, but {len(write_plan.files)} files would "
            f"be written; give a name without {target.suffix} for a folder"
        )


def unwritten_target(source: str | os.PathLike[str]) -> Path:
    """A target for a conversion that is planned and not run: a name alone, apart from its source.

    >>> unwritten_target("/data/model")
    PosixPath('/data/model.planned')
    """
    place = source if isinstance(source, Path) else as_path(source)
    if isinstance(place, RemotePath):
        place = Path.cwd() / place.name
    # A source that is a link to itself is reported when it is opened.
    place = Path(os.path.realpath(place))
    return place.with_name(f"{place.name}.planned")


def arrange_whole(request: ConversionRequest, checkpoint: Checkpoint) -> WritePlan:
    """The files of a target that has the tensors of a checkpoint, and each of them whole."""
    return request.target_format.plan_write(
        NewCheckpoint(
            {
                name: PlannedTensor(one.dtype, Layout.whole(one.shape, [0], 1))
                for name, one in checkpoint.tensors.items()
            },
            metadata=checkpoint.metadata,
            most_file_bytes=request.most_file_bytes,
        )
    )


def _check_apart(checkpoint: Checkpoint, target: Path, *, whole_folder: bool) -> None:
    """Raise UsageError where a target would replace its source, or stand in it."""
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
    # The commit replaces the target with everything in it.
    if _is_among(goal, source.parents) or (_is_among(goal, [source]) and not whole_folder):
        raise UsageError(
            f"the source {checkpoint.folder} lies inside the target {target}, and would be deleted "
            "with it; choose another target"
        )


def _is_among(path: Path, others: Iterable[Path]) -> bool:
    """Return whether a path is one of others, also by another name of the same folder."""
    others = list(others)
    if path in others:
        return True
    # File systems that ignore case give a folder many names.
    paths = [one for one in (path, *others) if not isinstance(one, RemotePath) and one.exists()]
    return path in paths and any(path.samefile(other) for other in paths if other != path)


def _decode_items(request: ConversionRequest, checkpoint: Checkpoint) -> Checkpoint:
    """The source with plain values for pickled items, where the target's program looks there."""
    source, target = find_format(checkpoint.format), request.target_format
    keeps_others = Capability.ITEMS in target.capabilities
    # Megatron has both, and asks for no items of another program's names.
    has_values = Capability.VALUES in target.capabilities and (
        not keeps_others or target.training is not None
    )
    # What a program pickles beside tensors is for itself: its other formats have it elsewhere.
    is_of_program = source is not None and source.training == target.training is not None
    if not has_values or is_of_program:
        return checkpoint
    return in_plain_values(checkpoint, keeps_others=keeps_others)


def _translate(request: ConversionRequest, checkpoint: Checkpoint) -> ChangedElements:
    """The source with its training state as the target's program keeps it."""
    style = request.training_style
    if style is None or (request.training is None and find_training_state(checkpoint) is None):
        return ChangedElements(checkpoint)
    # The state of a format, and of others of the same program, is as that program keeps it.
    source = find_format(checkpoint.format)
    is_same = source is request.target_format
    if request.training is None and source is not None and source.training == style.name:
        return ChangedElements(checkpoint)
    has_items = Capability.ITEMS in request.target_format.capabilities
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
    if not request.changes_elements:
        return ChangedElements(note_unscaled(checkpoint, read_config))
    checkpoint, merged = merge_adapters(checkpoint, request.adapters)
    return change_elements(
        checkpoint,
        read_config(checkpoint),
        dtype_name=request.dtype,
        dequantize=request.dequantize,
        quantize=request.quantize,
        kept=_list_optimizer_state(checkpoint),
        made=merged,
        allow=request.allow,
    )


def _list_optimizer_state(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The tensors of a checkpoint that are optimizer state: they are neither cast nor quantised."""
    state = find_training_state(checkpoint)
    return () if state is None else state.optimizer_names


def _resolve(request: ConversionRequest, named: NamedSource) -> dict[str, Any]:
    """A request as plain values. Journals on disk have these keys and values."""
    options = parse_options(request.options)
    # Only where they were given: journals of other conversions have no such keys.
    changes = {
        key: getattr(request, key)
        for key in ("dtype", "dequantize", "quantize", "training", "adapters")
        if getattr(request, key)
    }
    if request.engine_layout is not None:
        text = to_json(request.engine_layout).encode()
        changes["layout"] = hashlib.blake2b(text, digest_size=16).hexdigest()
    if isinstance(request.source_layout, EngineLayout):
        text = to_json(request.source_layout).encode()
        changes["source_layout"] = hashlib.blake2b(text, digest_size=16).hexdigest()
    if request.keeps_layouts:
        changes["cut"] = "as the source"
    # What is allowed is left out: it changes whether a conversion is done, and not what it writes.
    return {
        "to": request.to_text,
        "rules": tuple(f"{rule.pattern}={rule.spec}" for rule in request.parsed_rules),
        "recipe": named.recipe.name if named.recipe else None,
        "options": tuple(f"{name}={value}" for name, value in sorted(options.items())),
        "strategy": request.strategy,
        "replicas": request.stored_replicas,
        "most_file_bytes": request.most_file_bytes,
        "source_names": None if named.from_names is None else named.from_names.text,
        "target_names": None if named.to_names is None else named.to_names.text,
        **changes,
        **request.selection.to_json(),
    }
