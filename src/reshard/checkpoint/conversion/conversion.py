"""Planned conversions: the bytes that they read, write and move.

A `Conversion` is the whole plan, made from headers alone (by `plan`): the source, every tensor's
new layout, and the files of the target. It can be inspected, and it can be run (`run`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard._records import Record
from reshard.checkpoint.blocks import grid as blocks
from reshard.checkpoint.blocks.block_io import OpenFiles, Workspace, WorkspaceSize
from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.changes.computed_tensors import (
    SCRATCH_BYTES,
    ComputedReader,
    ComputedTensor,
    split_casts,
)
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.checkpoint.conversion.work_items import WorkItems
from reshard.checkpoint.formats.format import Capability, CheckpointFormat
from reshard.checkpoint.formats.opening import read_config
from reshard.checkpoint.formats.registry import find_format, written_names
from reshard.checkpoint.formats.write_plan import WritePlan
from reshard.checkpoint.options import DEFAULT_EXTRA_BYTES, ConversionRequest, check_limits
from reshard.checkpoint.storage.local_files import SourceFile
from reshard.checkpoint.storage.permissions import ModeLimits, find_mode_limits
from reshard.checkpoint.storage.range_checksums import crc32
from reshard.checkpoint.storage.remote_files import choose_threads
from reshard.checkpoint.storage.remote_paths import as_path
from reshard.elements import CastCounts
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.recipes.assignment import Assignment
from reshard.recipes.rules import Rule
from reshard.text import count_text

if TYPE_CHECKING:
    from reshard.plans.job import Job

# The maximum number of uncopied files that a note names.
_MAX_FILES = 8
HIDDEN = "the target's own file has that name"


def find_hidden(names: Iterable[str], own: Collection[str]) -> tuple[str, ...]:
    """Return the names that cannot be next to the target's `own` files.

    These are the names of own files and of folders that contain them, and names below an own file.

    >>> find_hidden(["a", "a.txt", "b", "c/d"], {"a", "b/x", "c"})
    ('a', 'b', 'c/d')
    """
    taken = {*own, *(str(folder) for name in own for folder in PurePosixPath(name).parents)}
    return tuple(
        name
        for name in names
        if name in taken or any(str(folder) in own for folder in PurePosixPath(name).parents)
    )


class Conversion(Record):
    """A planned conversion, which was not run yet.

    Attributes:
        source: the checkpoint to read.
        target: the folder it will become.
        write_plan: the files and tensors of the target.
        request: the request for the conversion.
        resolved: the request as plain values, with the chosen recipe and names, which distinguish
            conversions in journals.
        assignment: how rules and recipes matched; None if none were used.
        computed: tensors that are not moved as they are, by name.
        rewritten: other files whose content is not the source's, or that come from
            elsewhere: the content of each, or where it is copied from.
        apart: tensors with digests that are parts of other tensors in the target.
        digest_hint: a possible cause of a wrong digest other than damage.
        single_file: the name of the file that the target is; None if the target is a folder.
    """

    source: Checkpoint
    target: Path
    write_plan: WritePlan
    request: ConversionRequest
    resolved: Mapping[str, Any]
    assignment: Assignment | None = None
    computed: Mapping[str, ComputedTensor] = field(default_factory=dict)
    rewritten: Mapping[str, bytes | Path] = field(default_factory=dict)
    apart: tuple[StoredTensor, ...] = ()
    digest_hint: str = ""
    single_file: str | None = None

    @property
    def arrangement(self) -> WritePlan:
        """The old name of `write_plan`."""
        import warnings

        warnings.warn("Conversion.arrangement is now write_plan", DeprecationWarning, stacklevel=2)
        return self.write_plan

    @property
    def format(self) -> CheckpointFormat:
        """The format of the target."""
        return self.request.target_format

    @cached_property
    def companions(self) -> Mapping[str, bytes | Path]:
        """The files without tensors: the content of each, or the path from which it is copied."""
        if self.single_file is not None:
            return {}
        carried = (name for name in self.source.carried if name not in self._hidden)
        return {name: self.source.path(name) for name in carried} | {**self.rewritten}

    @cached_property
    def _hidden(self) -> tuple[str, ...]:
        """Other files of the source in whose places are files with the target's tensors."""
        return find_hidden(
            self.source.carried, {file.stored.name for file in self.write_plan.files}
        )

    @property
    def written_names(self) -> frozenset[str]:
        """The files that the target gets, except files that its format adds, such as an index."""
        files = (file.stored.name for file in self.write_plan.files)
        return frozenset((*files, *self.companions))

    @property
    def open_bits(self) -> ModeLimits:
        """The limits of the mode bits of the target's files: the bits of the source's files."""
        read = [self.source.path(file.name) for file in self.source.files]
        for adapter in map(as_path, self.request.adapters):
            read += [adapter] if adapter.is_file() else [*adapter.iterdir()]
        copied = {name: path for name, path in self.companions.items() if isinstance(path, Path)}
        return find_mode_limits(self.source.folder, read, copied)

    @property
    def recipe_name(self) -> str | None:
        """The recipe that shards the tensors, given or chosen by config.json."""
        return self.resolved.get("recipe") if self.assignment is not None else None

    @property
    def unknown(self) -> tuple[str, ...]:
        """Tensors that no rule matched: they are replicated."""
        return self.assignment.unknown if self.assignment else ()

    @property
    def uncomputable(self) -> tuple[str, ...]:
        """Shards with which ranks cannot compute, if the request allows them."""
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
        items = [name for name in self.source.items if name not in self.write_plan.items]
        if items:
            losses.append(
                f"not in the target, since {target.name} holds tensors only: "
                f"{', '.join(items)}; {_name_formats(Capability.ITEMS)}"
            )
        values = [
            name
            for name, value in self.source.values.items()
            if name not in self.write_plan.values
            and not (source is not None and source.is_own_value(name, value))
        ]
        if values and Capability.VALUES in target.capabilities:
            losses.append(
                f"not in the target, since {target.name} has no place for them: {', '.join(values)}"
            )
        elif values:
            losses.append(
                f"not in the target, since {target.name} holds only tensors: "
                f"{', '.join(values)}; {_name_formats(Capability.VALUES)}"
            )
        own = source.own_metadata if source is not None else frozenset()
        texts = [key for key in self.source.metadata if key not in own]
        if texts and Capability.METADATA not in target.capabilities:
            losses.append(
                f"not in the target, since {target.name} has no text metadata: {', '.join(texts)}"
            )
        if self.source.attributes and Capability.ATTRIBUTES not in target.capabilities:
            losses.append(
                f"not in the target, since {target.name} has no attributes: "
                f"{', '.join(self.source.attributes)}; {_name_formats(Capability.ATTRIBUTES)}"
            )
        losses += [f"not in the target: {name} ({why})" for name, why in self.source.unread]
        return tuple(losses)

    @property
    def plan_notes(self) -> tuple[str, ...]:
        """Notes on the result for the user, without those about rules and axes of the mesh."""
        notes = [*self.losses, *self._list_unwritten(), *self.source.notes, *self.write_plan.notes]
        if self.assignment is not None:
            notes += self.assignment.notes
            notes += (f"not computable: {text}" for text in self.uncomputable)
        return tuple(notes)

    def _list_unwritten(self) -> Iterator[str]:
        """Yield notes on other files of the source that are not written."""
        hidden = ((name, HIDDEN) for name in self._hidden)
        if left_out := (*self.source.left_out, *hidden):
            files = ", ".join(f"{name} ({why})" for name, why in left_out[:_MAX_FILES])
            more = len(left_out) - _MAX_FILES
            rest = f", and {more} more, which `reshard inspect` lists" if more > 0 else ""
            yield f"other files that are not copied: {files}{rest}"
        other_files = dict.fromkeys((*self.source.carried, *self.rewritten))
        if self.single_file is not None and other_files:
            names = ", ".join([*other_files][:_MAX_FILES])
            yield (
                "the target is a single file, so the other files are not written; a folder as the "
                f"target gets them: {names}"
            )

    @property
    def uncopied(self) -> tuple[str, ...]:
        """Notes on other files that are not written, which `plan_notes` has too."""
        import warnings

        text = "the notes of Conversion.uncopied are in plan_notes"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return tuple(self._list_unwritten())

    @property
    def folders(self) -> tuple[Path, Path]:
        """The folder of the source, `source.folder`, and `target`, under their former name."""
        import warnings

        text = "Conversion.folders is now source.folder and target"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return self.source.folder, self.target

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the result for the user, without unknown tensors and unused rules."""
        notes = [*self.plan_notes]
        if self.assignment and not (self.request.rules or self.resolved["recipe"]):
            from reshard.recipes.library import choose_recipe

            config = read_config(self.source)
            recipe = choose_recipe(config) if config else None
            hint = f"; --recipe {recipe.name} fits its config.json" if recipe else ""
            notes.append(f"no rule and no recipe was given, so every tensor is replicated{hint}")
        else:
            notes += self.axis_notes
        return tuple(notes)

    @property
    def axis_notes(self) -> tuple[str, ...]:
        """A note of the mesh axes over which nothing is sharded, if there are any."""
        mesh, unused = self.request.mesh, self.assignment.unused_axes if self.assignment else ()
        axes = [axis for axis in unused if mesh is not None and axis in mesh.list_long_axes()]
        if not axes:
            return ()
        return (f"no tensor is sharded over {', '.join(axes)}, whose ranks hold copies",)

    @cached_property
    def job(self) -> Job:
        """The same conversion as a job that moves tensors between ranks, to count moved bytes."""
        from reshard.plans.job import Job, JobItem

        items = []
        for name, tensor in self.write_plan.tensors.items():
            stored = self.source.tensors[name]
            change = LayoutChange(stored.layout, tensor.layout)
            items.append(JobItem(name, tensor.dtype, change, stored.binding, tensor.binding))
        return Job(items)

    @cached_property
    def read_bytes_by_rank(self) -> Mapping[int, int]:
        """Bytes read from the files of each source rank."""
        total: dict[int, int] = {}
        stored = [t for name, t in self.source.tensors.items() if name not in self.computed]
        inputs = {
            source.name: source
            for computed in self.computed.values()
            for source in computed.sources
        }
        for tensor in (*stored, *inputs.values()):
            change = tensor.assembly
            # A row for each route of the assembly: the rank that it reads from, and its elements.
            slots = change.source.cell_slot[change.routes.source_cell]
            for slot, elements in zip(slots.tolist(), change.routes.elements.tolist(), strict=True):
                total[slot] = total.get(slot, 0) + elements * tensor.dtype.itemsize_bytes
        return dict(sorted(total.items()))

    @cached_property
    def write_bytes_by_rank(self) -> Mapping[int, int]:
        """Bytes of the files written for each target rank, headers included."""
        total: dict[int, int] = {}
        for file in self.write_plan.files:
            total[file.stored.rank] = total.get(file.stored.rank, 0) + file.stored.size_bytes
        return total

    @cached_property
    def work_items(self) -> WorkItems:
        """The blocks of all tensors."""
        stored, computed = split_casts(self.source.tensors, self.computed)
        return WorkItems(
            TensorColumns.of(stored), TensorColumns.of(self.write_plan.tensors), computed
        )

    @property
    def workspace_bytes(self) -> int:
        """The memory that a thread needs."""
        return self.workspace_size(0).size_bytes

    @cached_property
    def _least(self) -> WorkspaceSize:
        # Room for the largest block and span of any tensor, so that a thread allocates only once.
        # Sizes are known without opening a file.
        nothing: OpenFiles[Any] = OpenFiles(dict[str, Any]().__getitem__)
        block, span = self.work_items.largest_bytes
        inputs: tuple[int, ...] = ()
        if self.work_items.is_cast.any():
            inputs = (self.work_items.cast_bytes,)
        for row in np.flatnonzero(self.work_items.source_rows < 0).tolist():
            reader = ComputedReader(self.computed[self.work_items.target.names[row]], nothing)
            pairs = itertools.zip_longest(inputs, reader.input_bytes, fillvalue=0)
            inputs = tuple(max(pair) for pair in pairs)
            block, span = max(block, reader.grid.largest_bytes), max(span, reader.span_bytes)
        return WorkspaceSize(block, span, inputs, SCRATCH_BYTES if self.computed else 0)

    def workspace_size(self, extra_bytes: int) -> WorkspaceSize:
        """Return the memory of a thread in a run that may use `extra_bytes`.

        Batches of small tensors are made smaller if they would not fit.
        """
        batch_bytes, has_casts = self.work_items.batched_bytes, bool(self.work_items.is_cast.any())
        while batch_bytes:
            size = self._least.with_batches(batch_bytes, has_inputs=has_casts)
            if size.size_bytes <= extra_bytes:
                return size
            batch_bytes //= 2
        return self._least

    def workspace_bytes_of(self, extra_bytes: int) -> int:
        """Return `workspace_size(extra_bytes).size_bytes`, under its former name."""
        return self._find_size("workspace_bytes_of", extra_bytes).size_bytes

    def batch_bytes(self, extra_bytes: int) -> int:
        """Return `workspace_size(extra_bytes).batch_bytes`, under its former name."""
        return self._find_size("batch_bytes", extra_bytes).batch_bytes

    def new_workspace(self, extra_bytes: int = DEFAULT_EXTRA_BYTES) -> Workspace:
        """Return `workspace_size(extra_bytes).new_workspace()`, under its former name."""
        return self._find_size("new_workspace", extra_bytes).new_workspace()

    def _find_size(self, former: str, extra_bytes: int) -> WorkspaceSize:
        import warnings

        text = f"Conversion.{former} is now workspace_size"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        return self.workspace_size(extra_bytes)

    def threads(self, extra_bytes: int, most: int | None = None) -> int:
        """Return the number of threads that fit into `extra_bytes`.

        Raises:
            UsageError: `extra_bytes` is too small for one thread; invalid numbers.
        """
        check_limits(extra_bytes, most)
        fit = extra_bytes // self.workspace_size(extra_bytes).size_bytes
        if fit < 1:
            raise UsageError(
                f"a memory limit of {extra_bytes} bytes; one thread needs {self.workspace_bytes} "
                "for one block of the largest tensor, give at least that"
            )
        return min(fit, choose_threads(most, self.source.folder, self.target))

    def expect_runnable(
        self, extra_bytes: int = DEFAULT_EXTRA_BYTES, most_threads: int | None = None
    ) -> int:
        """Return `threads`, and raise the errors for which a run is refused, except its target's.

        `Staging.check` checks the target.

        Raises:
            UsageError: too small a memory limit.
            MissingExtraError: a library is not installed.
        """
        threads = self.threads(extra_bytes, most_threads)
        # Both import a library when they are first called.
        blocks.block_digest(b"")
        if self.source.checksums or any(file.checked_ranges for file in self.write_plan.files):
            crc32(b"")
        return threads

    def extra_bytes(
        self, extra_bytes: int = DEFAULT_EXTRA_BYTES, most_threads: int | None = None
    ) -> int:
        """Return the peak memory that a run allocates for its work."""
        threads = self.threads(extra_bytes, most_threads)
        return threads * self.workspace_size(extra_bytes).size_bytes

    def description(self, sources: OpenFiles[SourceFile]) -> dict[str, Any]:
        """Describe this conversion for a journal: equal descriptions mean equal results."""
        # A begun run continues only with an equal description. Journals on disk have these keys and
        # values: after a change of any of them, no begun run would continue.
        import hashlib

        write_plan = hashlib.blake2b(digest_size=16)
        for file in self.write_plan.files:
            write_plan.update(file.stored.name.encode() + b"\0")
            for _, content in file.known_bytes():
                write_plan.update(content)
        # A fingerprint per kind, since there may be very many tensors.
        target = self.work_items.target
        prints = [kind.layout.fingerprint for kind in target.kinds]
        for name, kind in zip(target.names, target.kind.tolist(), strict=True):
            write_plan.update(name.encode() + b"\0" + prints[kind])
        return {
            "source": str(self.source.folder.resolve()),
            "source files": {
                file.name: sources[file.name].identity.to_json() for file in self.source.files
            },
            **self.resolved,
            # The same files give other tensors if the user specifies other shardings for them.
            **({"source cut": self.source.given_sharding} if self.source.given_sharding else {}),
            "format": self.write_plan.format,
            "target files": write_plan.hexdigest(),
            # The journal lists blocks by their numbers, which depend on their size.
            "block bytes": blocks.BLOCK_BYTES,
        }


class ConversionReport(Record):
    """The outcome of a run.

    `resumed_bytes` were written before this run; `was_complete` is whether all bytes were.
    `size_bytes` counts each tensor once; `copy_bytes` counts the copies in files of other ranks.
    `read_bytes` and `written_bytes` are totals of all processes; `by_process` has both numbers of
    each process, and `buffers_by_process` the bytes that each process allocated for its work.
    """

    target: Path
    tensors: int
    files: int
    size_bytes: int
    read_bytes: int
    written_bytes: int
    resumed_bytes: int
    seconds_s: float
    was_complete: bool
    notes: tuple[str, ...]
    by_process: tuple[tuple[int, int], ...] = ((0, 0),)
    buffers_by_process: tuple[int, ...] = (0,)
    copy_bytes: int = 0


def describe_counts(counts: CastCounts) -> Iterator[str]:
    """Describe the elements that the new type cannot represent."""
    if counts.overflowed:
        yield (
            f"{count_text(counts.overflowed, 'element')} were too great for the new type and are "
            "infinite there; bf16 has the range of fp32"
        )
    if counts.not_finite:
        yield f"{count_text(counts.not_finite, 'element')} read were infinite or no number (NaN)"


def _name_formats(capability: Capability) -> str:
    names = written_names(capability)
    return (
        f"--format {' or '.join(names)} keeps them" if names else "no format that is written does"
    )
