"""Conversions that are planned: what one will read, write and move.

A `Conversion` is the whole plan, made from headers alone: the source, every tensor's new
layout, and the files of the target. It can be looked at, and it can be run
(`reshard.checkpoint.conversion.run`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from reshard.checkpoint.blocks import grid as blocks
from reshard.checkpoint.blocks.block_io import BlockReader, BlockWriter, OpenFiles, Workspace
from reshard.checkpoint.changes.computed import SCRATCH_BYTES, ComputedReader, ComputedTensor
from reshard.checkpoint.changes.planning import ChangedElements, change_elements
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.conversion.engine_cuts import cut_by_engine
from reshard.checkpoint.conversion.request import ConversionRequest, RequestArguments
from reshard.checkpoint.files.folders import refusals_explained
from reshard.checkpoint.files.source_file import SourceFile
from reshard.checkpoint.formats.arrangement import Arrangement, NewCheckpoint, PlannedTensor
from reshard.checkpoint.formats.format import CheckpointFormat, Holding
from reshard.checkpoint.formats.opening import open_checkpoint, read_config
from reshard.checkpoint.formats.registry import find_format, written_names
from reshard.checkpoint.quant_states import read_flat_shapes
from reshard.checkpoint.renaming import (
    NameTable,
    find_stacked_names,
    in_names_of,
    in_recipe_names,
    names_of,
)
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.plans.documents.serialization import to_json
from reshard.plans.job import Job
from reshard.plans.job_item import JobItem
from reshard.recipes.assignment import Assignment, assign
from reshard.recipes.fusion import Fusion
from reshard.recipes.library import choose_recipe, describe_unknown_model, load_recipe
from reshard.recipes.recipe import Recipe, parse_options
from reshard.recipes.rules import Rule
from reshard.recipes.shardings.fused_sharding import fused_spec
from reshard.recipes.strategies import strategy as find_strategy

DEFAULT_EXTRA_BYTES = 256 * 1024 * 1024
DEFAULT_THREADS = 4


@dataclass(frozen=True)
class Conversion:
    """A conversion that is planned and not yet run.

    Attributes:
        source: the checkpoint to read.
        target: the folder it will become.
        arrangement: the files and tensors of the target.
        request: what was asked for.
        resolved: the same as plain values, with the recipe and names found: it distinguishes one
            conversion from another in journals.
        assignment: how rules and recipes matched; None where none were used.
        computed: tensors that are not moved as they are, by name.
        rewritten: files beside the tensors with other content than in the source.
    """

    source: Checkpoint
    target: Path
    arrangement: Arrangement
    request: ConversionRequest
    resolved: Mapping[str, Any]
    assignment: Assignment | None = None
    computed: Mapping[str, ComputedTensor] = field(default_factory=dict)
    rewritten: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def format(self) -> CheckpointFormat:
        """The format of the target."""
        return self.request.target_format

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Tensors that no rule matched: they are replicated."""
        return self.assignment.unmatched if self.assignment else ()

    @property
    def uncomputable(self) -> tuple[str, ...]:
        """What ranks could not compute with, where that is allowed."""
        return self.assignment.uncomputable if self.assignment else ()

    @property
    def unused_rules(self) -> tuple[Rule, ...]:
        """Rules given for this conversion that matched no tensor."""
        return self.assignment.unused_rules if self.assignment else ()

    @property
    def losses(self) -> tuple[str, ...]:
        """The parts of the source that the target cannot hold, each with the reason."""
        losses = []
        source, target = find_format(self.source.format), self.format
        items = [name for name in self.source.items if name not in self.arrangement.items]
        if items:
            losses.append(
                f"not in the target, since {target.name} holds tensors only: "
                f"{', '.join(items)}; {_name_formats(Holding.ITEMS)}"
            )
        own = source.own_metadata if source is not None else frozenset()
        texts = [key for key in self.source.metadata if key not in own]
        if texts and Holding.METADATA not in target.can_hold:
            losses.append(
                f"not in the target, since {target.name} has no text metadata: {', '.join(texts)}"
            )
        if self.source.attributes and Holding.ATTRIBUTES not in target.can_hold:
            losses.append(
                f"not in the target, since {target.name} has no attributes: "
                f"{', '.join(self.source.attributes)}; {_name_formats(Holding.ATTRIBUTES)}"
            )
        losses += [f"not in the target: {name} ({why})" for name, why in self.source.unread]
        return tuple(losses)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about the result, beside unmatched tensors and unused rules."""
        notes = [
            *self.losses,
            *self.source.notes,
            *self.arrangement.notes,
            *(self.assignment.notes if self.assignment else ()),
            *(f"not to be computed with: {text}" for text in self.uncomputable),
        ]
        if self.assignment and not (self.request.rules or self.resolved["recipe"]):
            config = read_config(self.source)
            known = choose_recipe(config) if config else None
            hint = f"; --recipe {known.name} fits its config.json" if known else ""
            notes.append(f"no rule and no recipe was given, so every tensor is replicated{hint}")
        elif self.assignment and self.assignment.unused_axes:
            axes = ", ".join(self.assignment.unused_axes)
            notes.append(f"no rule uses the mesh axes {axes}: their ranks hold copies")
        return tuple(notes)

    @cached_property
    def job(self) -> Job:
        """The same conversion as a movement between ranks, for what it would move."""
        items = []
        for name, tensor in self.arrangement.tensors.items():
            stored = self.source.tensors[name]
            change = LayoutChange(stored.layout, tensor.layout)
            items.append(JobItem(name, tensor.dtype, change, stored.binding, tensor.binding))
        return Job(items)

    @cached_property
    def read_bytes_by_rank(self) -> Mapping[int, int]:
        """Bytes read from the files of each source rank."""
        total: dict[int, int] = {}
        stored = [t for name, t in self.source.tensors.items() if name not in self.computed]
        inputs = {one.name: one for made in self.computed.values() for one in made.sources}
        for tensor in (*stored, *inputs.values()):
            change = tensor.assembly
            # One row a route of the assembly: the rank that it reads from, and how many elements.
            slots = change.source.cell_slot[change.routes.source_cell]
            for slot, elements in zip(slots.tolist(), change.routes.elements.tolist(), strict=True):
                total[slot] = total.get(slot, 0) + elements * tensor.dtype.itemsize_bytes
        return dict(sorted(total.items()))

    @cached_property
    def write_bytes_by_rank(self) -> Mapping[int, int]:
        """Bytes of the files written for each target rank, headers included."""
        total: dict[int, int] = {}
        for file in self.arrangement.files:
            total[file.stored.rank] = total.get(file.stored.rank, 0) + file.stored.size_bytes
        return total

    @property
    def workspace_bytes(self) -> int:
        """Memory that one thread needs."""
        scratch = SCRATCH_BYTES if self.computed else 0
        return Workspace.size_bytes(*self._buffers) + scratch

    @cached_property
    def _buffers(self) -> tuple[int, int, tuple[int, ...]]:
        # One size for all tensors, the largest block and span of any: a thread allocates once.
        nothing: OpenFiles[Any] = OpenFiles(_no_file)
        block = span = 0
        inputs: tuple[int, ...] = ()
        for name, tensor in self.arrangement.tensors.items():
            if name in self.computed:
                made = ComputedReader(self.computed[name], nothing)
                pairs = itertools.zip_longest(inputs, made.input_bytes, fillvalue=0)
                inputs = tuple(max(pair) for pair in pairs)
                block, span = max(block, made.grid.largest_bytes), max(span, made.span_bytes)
            else:
                reader = BlockReader(self.source.tensors[name], nothing)
                block, span = max(block, reader.grid.largest_bytes), max(span, reader.span_bytes)
            span = max(span, BlockWriter(tensor, nothing).span_bytes)
        return block, span, inputs

    def new_workspace(self) -> Workspace:
        """The memory of one thread."""
        return Workspace(*self._buffers)

    def threads(self, extra_bytes: int, most: int | None = None) -> int:
        """How many threads fit into `extra_bytes`.

        Raises:
            UsageError: not even one does, or numbers that cannot be.
        """
        for what, given, least in (("a memory limit", extra_bytes, 0), ("threads", most, 1)):
            if given is not None and (type(given) is not int or given < least):
                raise UsageError(f"{what} of {given!r}; expected a whole number from {least}")
        fit = extra_bytes // self.workspace_bytes
        if fit < 1:
            raise UsageError(
                f"a memory limit of {extra_bytes} bytes; one thread needs {self.workspace_bytes} "
                "for one block of the largest tensor, give at least that"
            )
        return min(fit, most or DEFAULT_THREADS)

    def extra_bytes(
        self, extra_bytes: int = DEFAULT_EXTRA_BYTES, most_threads: int | None = None
    ) -> int:
        """The peak memory that a run allocates for its work."""
        return self.threads(extra_bytes, most_threads) * self.workspace_bytes

    def description(self, sources: OpenFiles[SourceFile]) -> dict[str, Any]:
        """What this conversion is, for a journal: two equal descriptions mean equal results."""
        arrangement = hashlib.blake2b(digest_size=16)
        for file in self.arrangement.files:
            arrangement.update(file.stored.name.encode() + b"\0")
            for _, content in file.known_bytes():
                arrangement.update(content)
        for name, tensor in self.arrangement.tensors.items():
            arrangement.update(name.encode() + b"\0" + tensor.layout.fingerprint)
        return {
            "source": str(self.source.folder.resolve()),
            "source files": {
                file.name: sources[file.name].identity.to_json() for file in self.source.files
            },
            **self.resolved,
            "format": self.arrangement.format,
            "target files": arrangement.hexdigest(),
            "block bytes": blocks.BLOCK_BYTES,
        }


def _no_file(name: str) -> Any:
    raise UsageError(f"{name} is not read while planning")


def _name_formats(holding: Holding) -> str:
    return f"--format {' or '.join(written_names(holding))} keeps them"


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
            `dtype`, `dequantize`, `quantize`, `layout`, `allow` (see `ConversionRequest`).

    Raises:
        CheckpointError: a source that cannot be used.
        RecipeError: rules or a recipe that do not fit.
        UsageError: arguments that contradict each other; a target inside the source.
        RunError: a target that the system does not let us look at.
    """
    # 1. The source, and a target apart from it.
    if request is None:
        request = ConversionRequest(**arguments)
    elif arguments:
        raise UsageError(f"a request, and beside it {next(iter(arguments))!r}; put it into the one")
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if not isinstance(target, str | os.PathLike):
        raise UsageError(f"a target {target!r}; give a path")
    target = Path(target)
    with refusals_explained("look at the target", target):
        check_apart(
            checkpoint,
            target,
            whole_folder=isinstance(source, Checkpoint) or Path(os.fspath(source)).is_dir(),
        )
    # 2. Names: from the source's to those of the recipe, in which rules match, to the target's.
    recipe = _find_recipe_of(request, checkpoint)
    config = read_config(checkpoint) if recipe is not None else None
    from_names = names_of("source_names", request.source_names, recipe, config)
    to_names = names_of("target_names", request.target_names, recipe, config)
    # Other names are told for the recipe's, which a source with stacked experts does not have.
    if from_names is None and isinstance(request.target_names, str):
        from_names = find_stacked_names(checkpoint, recipe, config)
    resolved = _resolve(request, recipe, from_names, to_names)
    if from_names is not None:
        checkpoint = in_recipe_names(checkpoint, from_names.table)
    by_own_names, names = checkpoint, {name: name for name in checkpoint}
    fused: dict[str, Fusion] = {}
    if to_names is not None:
        checkpoint, names, fused = in_names_of(checkpoint, to_names.table)
    changed = ChangedElements(checkpoint)
    if request.changes_elements:
        changed = change_elements(
            checkpoint,
            read_config(checkpoint),
            dtype_name=request.dtype,
            dequantize=request.dequantize,
            quantize=request.quantize,
        )
        checkpoint = changed.checkpoint
        if to_names is None:
            by_own_names, names = checkpoint, {name: name for name in checkpoint}
    # 3. Layouts: by an engine, by rules and a recipe over a mesh, by a strategy, or whole.
    mesh, assignment, planned = request.mesh, None, {}
    engine = request.engine_layout
    if engine is not None:
        layouts, notes = cut_by_engine(checkpoint, engine)
        checkpoint = dataclasses.replace(checkpoint, notes=(*checkpoint.notes, *notes))
        for name, tensor in checkpoint.tensors.items():
            planned[name] = PlannedTensor(tensor.dtype, layouts[name])
    elif mesh is not None and request.is_by_rules:
        assignment = assign_tensors(by_own_names, mesh, request.parsed_rules, recipe, request.allow)
        storage_axes = recipe.map_axes(mesh).get("fsdp", ()) if recipe is not None else ()
        shapes = {name: tensor.shape for name, tensor in by_own_names.tensors.items()}
        for name, tensor in checkpoint.tensors.items():
            spec, layout = assignment.specs[names[name]], assignment.layouts[names[name]]
            # A fused parameter is cut as its members are, so that ranks keep whole members.
            if name in fused:
                spec = fused_spec(name, fused[name], assignment.specs, shapes, storage_axes)
                layout = spec.layout(tensor.shape)
            planned[name] = PlannedTensor(tensor.dtype, layout, str(spec))
    else:
        placed = _place_by_strategy(request, checkpoint)
        for name, tensor in checkpoint.tensors.items():
            planned[name] = PlannedTensor(tensor.dtype, placed[name])
    # 4. Files: the format finds a place for every shard.
    arrangement = request.target_format.arrange(
        NewCheckpoint(
            planned,
            mesh,
            checkpoint.metadata,
            checkpoint.items,
            checkpoint.paths,
            checkpoint.attributes,
            request.replicas,
            request.most_file_bytes,
        )
    )
    return Conversion(
        checkpoint,
        target,
        arrangement,
        request,
        resolved,
        assignment,
        changed.computed,
        changed.rewritten,
    )


def _find_recipe_of(request: ConversionRequest, checkpoint: Checkpoint) -> Recipe | None:
    """The recipe that a request asks for, with its options."""
    recipe = find_recipe("auto" if request.is_by_recipe else request.recipe, checkpoint)
    options = parse_options(request.options)
    if recipe is not None:
        return recipe.with_options(options)
    if options:
        raise UsageError(
            f"the option {next(iter(options))!r} without a recipe that has it; name the recipe"
        )
    return None


def _resolve(
    request: ConversionRequest,
    recipe: Recipe | None,
    from_names: NameTable | None,
    to_names: NameTable | None,
) -> dict[str, Any]:
    """A request as plain values. Journals on disk have these keys and values."""
    options = parse_options(request.options)
    # Only where they were given: journals of other conversions have no such keys.
    changes = {
        key: getattr(request, key)
        for key in ("dtype", "dequantize", "quantize")
        if getattr(request, key)
    }
    if request.engine_layout is not None:
        text = to_json(request.engine_layout).encode()
        changes["layout"] = hashlib.blake2b(text, digest_size=16).hexdigest()
    # What is allowed is left out: it changes whether a conversion is done, and not what it writes.
    return {
        "to": request.to_text,
        "rules": tuple(f"{rule.pattern}={rule.spec}" for rule in request.parsed_rules),
        "recipe": recipe.name if recipe else None,
        "options": tuple(f"{name}={value}" for name, value in sorted(options.items())),
        "strategy": request.strategy,
        "replicas": request.replicas,
        "most_file_bytes": request.most_file_bytes,
        "source_names": None if from_names is None else from_names.text,
        "target_names": None if to_names is None else to_names.text,
        **changes,
    }


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


def find_recipe(
    recipe: str | os.PathLike[str] | Recipe | None, checkpoint: Checkpoint
) -> Recipe | None:
    """The recipe of a name or a path; `auto` is the one that fits the checkpoint's config.json.

    Raises:
        RecipeError: no such recipe, or one that cannot be read.
        UsageError: `auto` without a config.json, or with one that no shipped recipe fits.
    """
    if recipe is None or isinstance(recipe, Recipe):
        return recipe
    if recipe != "auto":
        return load_recipe(os.fspath(recipe) if isinstance(recipe, os.PathLike) else recipe)
    config = read_config(checkpoint)
    if config is None:
        raise UsageError(
            f"recipe 'auto' looks in config.json, and {checkpoint.folder} has none; name a recipe"
        )
    found = choose_recipe(config)
    if found is None:
        raise UsageError(describe_unknown_model(config, checkpoint.tensors))
    return found


def check_apart(checkpoint: Checkpoint, target: Path, *, whole_folder: bool) -> None:
    source, goal = checkpoint.folder.resolve(), target.resolve()
    if whole_folder and source in goal.parents:
        raise UsageError(
            f"the target {target} lies inside the source {checkpoint.folder}; put it elsewhere"
        )
    # The commit replaces the target with everything in it.
    if goal in source.parents or (goal == source and not whole_folder):
        raise UsageError(
            f"the source {checkpoint.folder} lies inside the target {target}, and would be deleted "
            "with it; choose another target"
        )
