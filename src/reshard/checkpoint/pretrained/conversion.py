"""Conversions from any training checkpoint to a model folder that `from_pretrained` loads.

1. Take the selected weights of the source, without names of wrappers (`names.take_weights`).
2. Rename them to the architecture's names: remove the trainer's prefix, and translate another
   program's names by the recipe for config.json's model type (`names`).
3. Remove rows that pad the vocabulary; check that all layers, experts and tensors of the
   architecture are there (`reshard.checkpoint.architectures`); store tied weights once.
4. Keep or cast element types, and write them to config.json (`model_folder`).
5. Write safetensors files with an index, as any conversion does.

`compare_pretrained` plans this conversion for a training checkpoint and for a model folder, such as
a model of the Hub. It compares the tensors that would be written, block by block, and does not
write them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from reshard._validation import check_used
from reshard.checkpoint.architectures.checking import check_architecture, find_padded_vocabulary
from reshard.checkpoint.blocks.fusing import slice_rows
from reshard.checkpoint.blocks.tensor_columns import shapes_of, types_of
from reshard.checkpoint.changes.adapters import merge_adapters
from reshard.checkpoint.changes.planning import (
    ChangedElements,
    change_elements,
    check_scales,
    find_unscaled,
)
from reshard.checkpoint.changes.source_digests import find_absorbed
from reshard.checkpoint.comparison import Comparison, compare
from reshard.checkpoint.contents import Checkpoint, read_again
from reshard.checkpoint.conversion.conversion import Conversion
from reshard.checkpoint.conversion.plan import (
    find_recipe,
    open_apart,
    plan_whole_files,
    take_source,
    unwritten_target,
)
from reshard.checkpoint.copy_checks import expect_equal_copies
from reshard.checkpoint.naming.renaming import (
    find_meaning,
    find_stacked_names,
    in_recipe_names,
    names_of,
)
from reshard.checkpoint.naming.selection import by_new_names, list_left_out
from reshard.checkpoint.options import PRETRAINED_OPTIONS, ConversionRequest
from reshard.checkpoint.pretrained.model_folder import (
    CONFIG,
    ModelFiles,
    config_bytes,
    describe_missing_output,
    find_model_files,
    most_common_type,
    store_tied_once,
    with_dtype,
)
from reshard.checkpoint.pretrained.names import (
    CONVENTIONS,
    ModelNames,
    describe_plain_rename,
    expect_single_model,
    find_llama_prefix,
    find_model_names,
    in_transformers_names,
    model_name,
    take_weights,
    translate_name,
)
from reshard.checkpoint.storage.remote_paths import as_path
from reshard.checkpoint.storage.threads import ProgressFunction
from reshard.checkpoint.training.state import find_training_state
from reshard.elements import is_castable
from reshard.errors import CheckpointError, RecipeError
from reshard.recipes.expressions import parse_expression
from reshard.recipes.library import choose_recipe
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule
from reshard.text import count_text

if TYPE_CHECKING:
    from reshard.checkpoint.keywords import PretrainedArguments
    from reshard.checkpoint.options import RecipeName


#: The maximum size of a file, as in `save_pretrained` of transformers 4; version 5 writes 50 GB.
MAX_FILE_BYTES = 5_000_000_000
_MAX_LISTED = 8


def plan_for_pretrained(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    recipe: RecipeName | None = None,
    source_names: str | None = None,
    most_file_bytes: int | None = MAX_FILE_BYTES,
    **arguments: Unpack[PretrainedArguments],
) -> Conversion:
    """Plan a folder that `from_pretrained` of transformers loads, from any training checkpoint.

    Args:
        source: a checkpoint, or its location.
        target: the folder that will hold the model.
        config: the folder of the model that was trained, or its config.json, if the checkpoint does
            not have a config.json. Tokenizer files next to it are taken too.
        recipe: the recipe for the model's names; chosen by config.json's model type if None.
        source_names: the convention of the source's names, such as `megatron`, `meta` or
            `torchtitan`; detected by the names if None.
        most_file_bytes: the maximum size of a file; a single file if None.
        dtype, adapters, source_layout: as in a `ConversionRequest`.
        include, exclude, strip_prefix, rename, select: as in a `ConversionRequest`. With
            `strip_prefix` or `rename`, no other prefix is removed.
        allow: accept differences from the tensors of the architecture: `incomplete` for tensors
            that are missing, `unknown` for tensors that the architecture does not have, `unscaled`
            for quantised weights without their scales.

    Raises:
        CheckpointError: a source that cannot be used, or lacks some or all weights; no config.json.
        RecipeError: several models without a selection; names that are ambiguous, or that do not
            fit the recipe.
        UsageError: invalid arguments.
    """
    for name, value in arguments.items():
        reader = "a model folder has whole weights, in the names and files that transformers reads"
        check_used(f"{name}={value!r}", name in PRETRAINED_OPTIONS, reader)
    request = ConversionRequest(
        to="full", format="safetensors", most_file_bytes=most_file_bytes, **arguments
    )
    checkpoint, target = open_apart(source, target)
    files = find_model_files(checkpoint, config)
    chosen = choose_recipe(files.config) if recipe is None else find_recipe(recipe, checkpoint)
    whole, checkpoint = checkpoint, take_source(request, checkpoint)
    weights, names = _name_weights(checkpoint, chosen, files.config, source_names, request)
    weights = _cut_padding(weights, files.config)
    left_out = _name_left_out(whole, names, chosen, files.config, request)
    if "incomplete" not in request.allow:
        _expect_all_outputs(weights, files.config, left_out)
        if chosen is not None:
            _expect_all_numbers(weights, chosen, files.config, left_out)
    checked = check_architecture(
        shapes_of(weights.tensors),
        types_of(weights.tensors),
        files.config,
        whole.folder,
        allow=request.allow,
        left_out=left_out,
    )
    weights, tied_config, tied_notes = store_tied_once(weights, files.config)
    check_scales(find_unscaled(weights, tied_config), checkpoint.folder, request.allow)
    apart = find_absorbed(take_weights(checkpoint).tensors, weights.tensors)
    changed = _change_elements(weights, tied_config, request)
    weights = changed.checkpoint
    content = config_bytes(with_dtype(tied_config, most_common_type(weights)))
    notes = [
        *weights.notes,
        *names.notes,
        *tied_notes,
        *_describe_place(files, checkpoint),
        *_describe_renames(whole, request),
        *checked,
    ]
    # transformers 4 refuses files of other frameworks: name PyTorch, whatever the source names.
    weights = weights.replace(metadata={**weights.metadata, "format": "pt"})
    write_plan = plan_whole_files(request, weights)
    recorded = request.list_recorded()
    resolved = {
        **{name: value for name, value in recorded.items() if name in PRETRAINED_OPTIONS},
        "for": "hf",
        "to": request.to_text,
        "recipe": chosen.name if chosen else None,
        "prefix": names.prefix,
        "source_names": names.convention,
        "dtype": request.dtype,
        "adapters": [str(as_path(path).resolve()) for path in request.adapters],
        # A run with another config must not continue this conversion.
        "config": hashlib.blake2b(content, digest_size=16).hexdigest(),
    }
    return Conversion(
        # Companions are in `rewritten`: they may come from another folder.
        weights.replace(carried=(), left_out=(), notes=tuple(notes)),
        target,
        write_plan,
        request,
        resolved,
        computed=changed.computed,
        rewritten={CONFIG: content, **files.companions},
        apart=apart,
    )


def _name_weights(
    checkpoint: Checkpoint,
    recipe: Recipe | None,
    config: Mapping[str, Any],
    source_names: str | None,
    request: ConversionRequest,
) -> tuple[Checkpoint, ModelNames]:
    """Return the weights of a checkpoint, in the names of the architecture."""
    keeps_prefix = bool(request.strip_prefix or request.rename)
    expect_single_model(checkpoint, recipe, keeps_prefix=keeps_prefix)
    containers = _find_containers(checkpoint)
    weights = expect_equal_copies(take_weights(checkpoint), allow=tuple(request.allow))
    is_open = source_names is None or source_names in CONVENTIONS
    llama_prefix = find_llama_prefix(weights) if is_open else None
    if llama_prefix is not None:
        weights, convention = in_transformers_names(
            weights, checkpoint, llama_prefix, config, source_names
        )
        return weights, ModelNames(llama_prefix, convention)
    if source_names in CONVENTIONS:
        raise CheckpointError(
            f"{checkpoint.folder} has no names of {source_names}, such as "
            "'layers.0.attention.wq.weight'; leave --source-names out"
        )
    if source_names is None:
        names = find_model_names(
            weights,
            recipe,
            config,
            containers=containers,
            keeps_prefix=keeps_prefix,
        )
    else:
        names = ModelNames("", source_names)
    new = {name: name.removeprefix(names.prefix) for name in weights.tensors}
    weights = by_new_names(weights, new)
    table = names_of("source_names", names.convention, recipe, config)
    if table is not None:
        weights = in_recipe_names(weights, table[1])
    stacked = find_stacked_names(weights, recipe, config)
    if stacked is not None:
        weights = in_recipe_names(weights, stacked[1])
    return weights, names


def _name_left_out(
    checkpoint: Checkpoint,
    names: ModelNames,
    recipe: Recipe | None,
    config: Mapping[str, Any],
    request: ConversionRequest,
) -> frozenset[str]:
    """Return the architecture's names of the tensors that the user left out by name."""
    is_llama = names.convention in CONVENTIONS
    table = None if is_llama else names_of("source_names", names.convention, recipe, config)
    left_out: set[str] = set()
    for item in list_left_out(checkpoint, request.selection):
        name = model_name(item).removeprefix(names.prefix)
        name = translate_name(name) if is_llama else name
        meaning = name if table is None else find_meaning(name, table[1])
        left_out |= {meaning} if isinstance(meaning, str) else {*meaning.tensors}
    return frozenset(left_out)


def _describe_renames(checkpoint: Checkpoint, request: ConversionRequest) -> list[str]:
    """Return a note if the user renames tensors whose rows have another order."""
    if not request.rename:
        return []
    new = {name: request.selection.new_name(name) for name in checkpoint.tensors}
    note = describe_plain_rename({old: name for old, name in new.items() if name is not None})
    return [] if note is None else [note]


def _find_containers(checkpoint: Checkpoint) -> list[str]:
    """Return the prefixes of weights that belong to the trainer, as its state shows."""
    state = find_training_state(checkpoint)
    shown = [*state.weight_prefixes] if state is not None else []
    fronts = {path[:-1] for name, path in checkpoint.paths.items() if name in checkpoint.tensors}
    shown += [".".join(map(str, front)) + "." for front in fronts if front]
    return [model_name(f"{name}x").removesuffix("x") for name in shown if name]


def _cut_padding(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint without rows that exceed the vocabulary of config.json."""
    rows = find_padded_vocabulary(shapes_of(checkpoint.tensors), config)
    if not rows:
        return checkpoint
    size = next(iter(rows.values()))
    padded = {name: checkpoint.tensors[name] for name in rows}
    first, shape = next((name, item.shape) for name, item in padded.items())
    note = (
        f"{count_text(len(padded), 'tensor')} cut to the {size} rows of config.json's vocab_size "
        f"(first: {first}, which has {shape[0]}): the others pad it for ranks"
    )
    cut = {name: slice_rows(tensor, size) for name, tensor in padded.items()}
    return checkpoint.replace(
        tensors={**checkpoint.tensors, **cut},
        checksums=read_again(checkpoint.checksums, cut),
        notes=(*checkpoint.notes, note),
    )


def _expect_all_outputs(
    checkpoint: Checkpoint, config: Mapping[str, Any], left_out: Collection[str]
) -> None:
    """Raise CheckpointError if an output layer is missing and is not tied."""
    missing = None if left_out else describe_missing_output(checkpoint, config)
    if missing is not None:
        raise CheckpointError(missing)


def _expect_all_numbers(
    checkpoint: Checkpoint, recipe: Recipe, config: Mapping[str, Any], left_out: Collection[str]
) -> None:
    """Raise CheckpointError if the numbers of layers or experts have gaps."""
    present: dict[str, set[int]] = {}
    # Names that differ only in digits match the same rule, so a single name is matched.
    rule_of: dict[str, Rule | None] = {}
    for name in (*checkpoint.tensors, *left_out):
        kind = re.sub(r"\d", "0", name)
        if kind not in rule_of:
            rule_of[kind] = next((rule for rule in recipe.rules if rule.matches(name)), None)
        rule = rule_of[kind]
        if rule is not None:
            for number, value in (rule.numbers_in(name) or {}).items():
                present.setdefault(number, set()).add(value)
    for number, values in present.items():
        try:
            count = parse_expression(recipe.numbers[number].count).value(config, {})
        # The recipe or the configuration lacks the count.
        except (KeyError, RecipeError):
            continue
        missing = sorted({*range(int(count))} - values)
        if missing:
            shown = ", ".join(map(str, missing[:_MAX_LISTED]))
            shown += f"... {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
            raise CheckpointError(
                f"{checkpoint.folder} lacks {number} {shown}, of {count} that config.json says; "
                "name the whole checkpoint, or the config.json that is true of it"
            )


def _change_elements(
    checkpoint: Checkpoint, config: Mapping[str, Any], request: ConversionRequest
) -> ChangedElements:
    checkpoint, merged = merge_adapters(checkpoint, request.adapters)
    kinds = {tensor.dtype for tensor in checkpoint.tensors.values() if is_castable(tensor.dtype)}
    # A model that was trained in a single dtype does not keep any tensor in float32 on purpose.
    if len(kinds) == 1:
        config = {
            key: value for key, value in config.items() if not key.endswith(("dtype", "_config"))
        }
    return change_elements(
        checkpoint, config, dtype_name=request.dtype, made=merged, allow=request.allow
    )


def _describe_place(files: ModelFiles, checkpoint: Checkpoint) -> list[str]:
    if files.folder == checkpoint.folder:
        return []
    count = len(files.companions)
    others = f" and {count_text(count, 'file')} beside it" if count else ""
    return [f"{CONFIG}{others} of {files.folder}"]


def compare_pretrained(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    model: str | os.PathLike[str] | Checkpoint,
    *,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
    config: str | os.PathLike[str] | None = None,
    recipe: RecipeName | None = None,
    source_names: str | None = None,
    **arguments: Unpack[PretrainedArguments],
) -> Comparison:
    """Compare a training checkpoint, converted to a model folder, with an existing model folder.

    Args:
        checkpoint: a checkpoint, or its location.
        model: a folder with config.json and whole weights, in the architecture's names.
        threads: the maximum number of threads; if None, 4, or 16 for a checkpoint at a URL.
        progress: called after every block.
        config, recipe, source_names: for `checkpoint`, as in `plan_for_pretrained`. The default
            config is the model's.
        **arguments: for `checkpoint`, as in `plan_for_pretrained`.

    Raises:
        CheckpointError: a checkpoint or a model that cannot be used, or that lacks weights.
        RecipeError: names that are ambiguous, or that do not fit the recipe.
        UsageError: invalid arguments.
        RunError: a file cannot be read.
    """
    config = config or (model.folder if isinstance(model, Checkpoint) else model)
    ours = _plan(checkpoint, config=config, recipe=recipe, source_names=source_names, **arguments)
    theirs = _plan(model, config=config, recipe=recipe)
    return compare(ours, theirs, threads=threads, progress=progress)


def _plan(checkpoint: str | os.PathLike[str] | Checkpoint, **arguments: Any) -> Conversion:
    """Return the conversion to a model folder. It is never run, so its target is only a name."""
    folder = checkpoint.folder if isinstance(checkpoint, Checkpoint) else checkpoint
    return plan_for_pretrained(checkpoint, unwritten_target(folder), **arguments)
