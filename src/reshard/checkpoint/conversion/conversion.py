"""What will a conversion read, write and move?

A `Conversion` is the whole plan, made from headers alone: the source, every tensor's new
layout, and the files of the target. It can be looked at, and it can be run
(`reshard.checkpoint.conversion.run`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from reshard.checkpoint.blocks import grid as blocks
from reshard.checkpoint.blocks.block_io import BlockReader, BlockWriter, OpenFiles, Workspace
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.files.folders import refusals_explained
from reshard.checkpoint.files.source_file import SourceFile
from reshard.checkpoint.formats import huggingface, sharded_safetensors
from reshard.checkpoint.formats.arrangement import (
    Arrangement,
    PlannedTensor,
    arrange_shards,
    arrange_whole,
)
from reshard.checkpoint.formats.opening import open_checkpoint, read_config
from reshard.checkpoint.formats.torch_dcp import reader as torch_dcp
from reshard.checkpoint.formats.torch_dcp.arrangement import arrange_torch_dcp
from reshard.checkpoint.renaming import Names, in_names_of, in_recipe_names, names_of
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.integers import LARGEST_RANKS
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.plans.job import Job, JobItem
from reshard.recipes.assignment import Assignment, assign
from reshard.recipes.fused_sharding import fused_spec
from reshard.recipes.fusion import Fusion
from reshard.recipes.library import choose_recipe, load_recipe
from reshard.recipes.recipe import Recipe, parse_options
from reshard.recipes.rules import Rule
from reshard.recipes.strategies import by_recipe as recipe_strategy
from reshard.recipes.strategies import strategy as find_strategy

DEFAULT_MEMORY_BYTES = 256 * 1024 * 1024
DEFAULT_THREADS = 4
_METADATA_OF_FORMATS = ("format", *sharded_safetensors.CONVENTION_KEYS)
FORMATS = (huggingface.FORMAT, sharded_safetensors.FORMAT, torch_dcp.FORMAT)


@dataclass(frozen=True)
class Request:
    """What a user asked for, in words: it names the conversion in messages and journals."""

    to: str
    rules: tuple[str, ...]
    recipe: str | None
    options: tuple[str, ...]
    strategy: str | None
    replicas: str
    most_file_bytes: int | None
    source_names: str | None = None
    target_names: str | None = None


@dataclass(frozen=True)
class Conversion:
    """A conversion that is planned and not yet run.

    Attributes:
        source: the checkpoint to read.
        target: the folder it will become.
        arrangement: the files and tensors of the target.
        request: what was asked for.
        assignment: how rules and recipes matched; None where none were used.
    """

    source: Checkpoint
    target: Path
    arrangement: Arrangement
    request: Request
    assignment: Assignment | None = None

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Tensors that no rule matched: they are replicated."""
        return self.assignment.unmatched if self.assignment else ()

    @property
    def unused_rules(self) -> tuple[Rule, ...]:
        """Rules given for this conversion that matched no tensor."""
        return self.assignment.unused_rules if self.assignment else ()

    @property
    def losses(self) -> tuple[str, ...]:
        """What of the source will not be in the target, and why."""
        losses = []
        items = [name for name in self.source.items if name not in self.arrangement.items]
        if items:
            losses.append(
                f"not in the target, since {self.arrangement.format} holds tensors only: "
                f"{', '.join(items)}; --format {torch_dcp.FORMAT} holds them"
            )
        texts = [key for key in self.source.metadata if key not in _METADATA_OF_FORMATS]
        if texts and self.arrangement.format == torch_dcp.FORMAT:
            losses.append(
                f"not in the target, since {torch_dcp.FORMAT} has no text metadata: "
                f"{', '.join(texts)}"
            )
        if self.source.attributes and self.arrangement.format != torch_dcp.FORMAT:
            losses.append(
                f"not in the target, since {self.arrangement.format} has no attributes: "
                f"{', '.join(self.source.attributes)} of {torch_dcp.METADATA_NAME}; "
                f"--format {torch_dcp.FORMAT} keeps them"
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
        ]
        if self.assignment and not (self.request.rules or self.request.recipe):
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
            plan = LayoutChange(stored.layout, tensor.layout)
            items.append(JobItem(name, tensor.dtype, plan, stored.binding, tensor.binding))
        return Job(items)

    @cached_property
    def read_bytes_by_rank(self) -> Mapping[int, int]:
        """Bytes read from the files of each source rank."""
        total: dict[int, int] = {}
        for tensor in self.source.tensors.values():
            plan = tensor.assembly
            slots = plan.source.cell_slot[plan.routes.source_cell]
            for slot, elements in zip(slots.tolist(), plan.routes.elements.tolist(), strict=True):
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
        return Workspace.size_bytes(*self._buffers)

    @cached_property
    def _buffers(self) -> tuple[int, int]:
        nothing: OpenFiles[Any] = OpenFiles(_no_file)
        block = span = 0
        for name, tensor in self.arrangement.tensors.items():
            reader = BlockReader(self.source.tensors[name], nothing)
            writer = BlockWriter(tensor, nothing)
            block = max(block, reader.grid.largest_bytes)
            span = max(span, reader.span_bytes, writer.span_bytes)
        return block, span

    def new_workspace(self) -> Workspace:
        """The memory of one thread."""
        return Workspace(*self._buffers)

    def threads(self, memory_bytes: int, most: int | None = None) -> int:
        """How many threads fit into `memory_bytes`.

        Raises:
            UsageError: not even one does, or numbers that cannot be.
        """
        for what, given, least in (("a memory limit", memory_bytes, 0), ("threads", most, 1)):
            if given is not None and (type(given) is not int or given < least):
                raise UsageError(f"{what} of {given!r}; expected a whole number from {least}")
        fit = memory_bytes // self.workspace_bytes
        if fit < 1:
            raise UsageError(
                f"a memory limit of {memory_bytes} bytes; one thread needs {self.workspace_bytes} "
                "for one block of the largest tensor, give at least that"
            )
        return min(fit, most or DEFAULT_THREADS)

    def extra_bytes(
        self, memory_bytes: int = DEFAULT_MEMORY_BYTES, most_threads: int | None = None
    ) -> int:
        """The peak memory that a run allocates for its work."""
        return self.threads(memory_bytes, most_threads) * self.workspace_bytes

    def description(self, sources: OpenFiles[SourceFile]) -> dict[str, Any]:
        """What this conversion is, for a journal: two equal descriptions mean equal results."""
        arrangement = hashlib.blake2b(digest_size=16)
        for file in self.arrangement.files:
            arrangement.update(file.stored.name.encode() + b"\0" + file.content)
            for archive in file.archives:
                arrangement.update(archive.head())
        for name, tensor in self.arrangement.tensors.items():
            arrangement.update(name.encode() + b"\0" + tensor.layout.fingerprint)
        return {
            "source": str(self.source.folder.resolve()),
            "source files": {
                file.name: sources[file.name].identity.to_json() for file in self.source.files
            },
            **dataclasses.asdict(self.request),
            "format": self.arrangement.format,
            "target files": arrangement.hexdigest(),
            "block bytes": blocks.BLOCK_BYTES,
        }


def _no_file(name: str) -> Any:
    raise UsageError(f"{name} is not read while planning")


def plan_conversion(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    *,
    to: str | int | DeviceMesh,
    rules: Iterable[str | Rule] = (),
    recipe: str | os.PathLike[str] | Recipe | None = None,
    options: Mapping[str, str] | Iterable[str] = (),
    strategy: str | None = None,
    format: str | None = None,
    replicas: str = "once",
    most_file_bytes: int | None = None,
    source_names: Names | None = None,
    target_names: Names | None = None,
) -> Conversion:
    """LayoutChange a conversion; reads headers, writes nothing.

    Args:
        source: a checkpoint, or where it is.
        target: the folder that will hold the new one.
        to: the target mesh (`"tp=2,dp=2"`), a number of ranks, or `"full"` for whole tensors.
        rules: `pattern=spec`, a glob on names and the native notation; the first match wins.
        recipe: the name of a shipped recipe, or a TOML file; its rules come behind `rules`.
            `"auto"` chooses by the source's config.json.
        options: of the recipe, by name, or as `"name=value"` (see `Recipe.with_options`).
        strategy: where the tensors go, instead of rules; `simple` for a number of ranks.
        format: `safetensors`, `sharded-safetensors` or `torch-dcp`; one of the first two, by
            `to`, when None.
        replicas: `once` stores one copy of equal shards, `every` one for each rank.
        most_file_bytes: begin a new file beyond so many bytes; for whole tensors.
        source_names, target_names: what the tensors are called there, and which are fused, where
            that is not as in the recipe: a convention of it, such as `megatron`, or a table as
            `Recipe.naming` gives it. Rules are for the recipe's names.

    Raises:
        CheckpointError: a source that cannot be used.
        RecipeError: rules or a recipe that do not fit.
        UsageError: arguments that contradict each other; a target inside the source.
        RunError: a target that the system does not let us look at.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if not isinstance(target, str | os.PathLike):
        raise UsageError(f"a target {target!r}; give a path")
    target = Path(target)
    with refusals_explained("look at the target", target):
        _check_apart(
            checkpoint,
            target,
            whole_folder=isinstance(source, Checkpoint) or Path(os.fspath(source)).is_dir(),
        )
    if format not in (None, *FORMATS):
        raise UsageError(f"unknown format {format!r}; expected one of {', '.join(FORMATS)}")
    parsed = _parse_rules(rules)
    if most_file_bytes is not None and (type(most_file_bytes) is not int or most_file_bytes < 1):
        raise UsageError(f"files of at most {most_file_bytes!r} bytes; give a whole number from 1")
    mesh, world_size = _parse_target(to)
    by_recipe = strategy is not None and find_strategy(strategy).function is recipe_strategy
    _refuse(by_recipe and recipe is not None, "a recipe", f"the strategy {strategy!r}")
    chosen = find_recipe("auto" if by_recipe else recipe, checkpoint)
    chosen_options = parse_options(options)
    if chosen is not None:
        chosen = chosen.with_options(chosen_options)
    elif chosen_options:
        raise UsageError(
            f"the option {next(iter(chosen_options))!r} without a recipe that has it; name the "
            "recipe"
        )
    config = read_config(checkpoint) if chosen is not None else None
    from_names = names_of("source_names", source_names, chosen, config)
    to_names = names_of("target_names", target_names, chosen, config)
    request = Request(
        mesh.text if mesh else str(to),
        tuple(f"{rule.pattern}={rule.spec}" for rule in parsed),
        chosen.name if chosen else None,
        tuple(f"{name}={value}" for name, value in sorted(chosen_options.items())),
        strategy,
        replicas,
        most_file_bytes,
        None if from_names is None else from_names.text,
        None if to_names is None else to_names.text,
    )
    if from_names is not None:
        checkpoint = in_recipe_names(checkpoint, from_names.table)
    by_own_names, names = checkpoint, {name: name for name in checkpoint}
    fused: dict[str, Fusion] = {}
    if to_names is not None:
        checkpoint, names, fused = in_names_of(checkpoint, to_names.table)
    # A recipe may be there for its names alone.
    is_for_names = from_names is not None or to_names is not None
    metadata = {
        key: value
        for key, value in checkpoint.metadata.items()
        if key not in sharded_safetensors.CONVENTION_KEYS
    }
    is_dcp = format == torch_dcp.FORMAT

    def arranged(planned: Mapping[str, PlannedTensor]) -> Arrangement:
        if is_dcp:
            return arrange_torch_dcp(
                planned, mesh, checkpoint.items, checkpoint.paths, checkpoint.attributes
            )
        return arrange_shards(planned, mesh, metadata, replicas)

    _refuse(is_dcp and replicas != "once", f"replicas {replicas!r}", f"the format {format}")
    _refuse(is_dcp and most_file_bytes is not None, "a limit for files", f"the format {format}")
    if mesh is None and world_size is None:
        _refuse(format == sharded_safetensors.FORMAT, "to 'full'", f"the format {format}")
        _refuse(bool(parsed), "to 'full'", "rules")
        _refuse(chosen is not None and not is_for_names, "to 'full'", "a recipe")
        _refuse(strategy is not None, "to 'full'", "a strategy")
        whole = {
            name: PlannedTensor(tensor.dtype, Layout.whole(tensor.shape, [0], 1))
            for name, tensor in checkpoint.tensors.items()
        }
        if is_dcp:
            return Conversion(checkpoint, target, arranged(whole), request)
        arrangement = arrange_whole(whole, {"format": "pt", **metadata}, most_file_bytes)
        return Conversion(checkpoint, target, arrangement, request)
    _refuse(format == huggingface.FORMAT, f"to {request.to!r}", f"the format {format}")
    _refuse(most_file_bytes is not None, f"to {request.to!r}", "a limit for files")
    if by_recipe and mesh is None and world_size is not None:
        mesh = DeviceMesh.of(tp=world_size)
    if mesh is not None and (strategy is None or by_recipe):
        assignment = assign_tensors(by_own_names, mesh, parsed, chosen)
        storage_axes = chosen.players(mesh).get("fsdp", ()) if chosen is not None else ()
        shapes = {name: tensor.shape for name, tensor in by_own_names.tensors.items()}
        planned = {}
        for name, tensor in checkpoint.tensors.items():
            spec, layout = assignment.specs[names[name]], assignment.layouts[names[name]]
            if name in fused:
                spec = fused_spec(name, fused[name], assignment.specs, shapes, storage_axes)
                layout = spec.layout(tensor.shape)
            planned[name] = PlannedTensor(tensor.dtype, layout, str(spec))
        return Conversion(checkpoint, target, arranged(planned), request, assignment)
    by_strategy = f"the strategy {strategy or 'simple'!r}"
    _refuse(bool(parsed), by_strategy, "rules")
    _refuse(chosen is not None and not is_for_names, by_strategy, "a recipe")
    place = find_strategy(strategy or "simple")
    layouts = place(
        {name: (tensor.dtype, tensor.shape) for name, tensor in checkpoint.tensors.items()},
        world_size if mesh is None else mesh.size,  # type: ignore[arg-type]
        read_config(checkpoint) if strategy else None,
    )
    placed = {
        name: PlannedTensor(tensor.dtype, layouts[name])
        for name, tensor in checkpoint.tensors.items()
    }
    return Conversion(checkpoint, target, arranged(placed), request)


def assign_tensors(
    checkpoint: Checkpoint, mesh: DeviceMesh, rules: Iterable[Rule], recipe: Recipe | None
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
    )


def _parse_rules(rules: Iterable[str | Rule]) -> tuple[Rule, ...]:
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise UsageError(f"rules {rules!r}; give a list of them, such as ['*.weight=tp, -']")
    parsed = []
    for rule in rules:
        if not isinstance(rule, str | Rule):
            raise UsageError(f"the rule {rule!r}; expected a text pattern=spec, or a Rule")
        parsed.append(rule if isinstance(rule, Rule) else Rule.parse(rule))
    return tuple(parsed)


def _refuse(condition: bool, what: str, other: str) -> None:
    if condition:
        raise UsageError(f"{other} cannot go together with {what}; leave one of them out")


def _parse_target(to: str | int | DeviceMesh) -> tuple[DeviceMesh | None, int | None]:
    if isinstance(to, DeviceMesh):
        return to, None
    text = str(to).strip()
    if text == "full":
        return None, None
    if text.isdigit():
        if int(text) < 1:
            raise UsageError(f"{to} ranks: a checkpoint is cut for at least 1")
        if int(text) > LARGEST_RANKS:
            raise UsageError(f"{to} ranks: at most {LARGEST_RANKS} are supported")
        return None, int(text)
    if "=" not in text:
        raise UsageError(
            f"cannot read the target {text!r}; give a mesh such as tp=2,dp=2, a number of ranks, "
            "or `full`"
        )
    return DeviceMesh.parse(text), None


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
        raise UsageError(
            f"no shipped recipe for the model type {config.get('model_type')!r}; give rules, or a "
            "recipe file"
        )
    return found


def _check_apart(checkpoint: Checkpoint, target: Path, *, whole_folder: bool) -> None:
    source, goal = checkpoint.folder.resolve(), target.resolve()
    if whole_folder and source in goal.parents:
        raise UsageError(
            f"the target {target} lies inside the source {checkpoint.folder}; put it elsewhere"
        )
    if goal in source.parents or (goal == source and not whole_folder):
        raise UsageError(
            f"the source {checkpoint.folder} lies inside the target {target}, and would be deleted "
            "with it; choose another target"
        )
