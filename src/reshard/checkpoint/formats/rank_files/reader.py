"""Checkpoints of ranks' files: the states of all ranks as one, in canonical names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from reshard.checkpoint.contents import Checkpoint, StoredFile
from reshard.checkpoint.formats.rank_files.file_names import (
    MODEL,
    find_rank_files,
    group_by_kind,
)
from reshard.checkpoint.formats.rank_files.joining import join_parts
from reshard.checkpoint.formats.rank_files.plain_cuts import cut_plain_parts
from reshard.checkpoint.formats.rank_files.rank_states import (
    OPTIMIZER_PREFIX,
    RankStates,
    read_states,
)
from reshard.checkpoint.formats.source_cut import SourceCut
from reshard.checkpoint.formats.torch_files.bound_tensors import list_checksums
from reshard.checkpoint.formats.torch_files.pickle_terms import shortened
from reshard.checkpoint.training.state import find_training_state
from reshard.errors import FormatError, UsageError

FORMAT_NAME = "rank-files"


def read_rank_files(folder: Path, cut: SourceCut | None = None) -> Checkpoint:
    """The checkpoint that the files of ranks in a folder are.

    Args:
        folder: where they are.
        cut: how plain tensors were cut, which their files do not say.

    Raises:
        CheckpointError: the file of a rank that is missing.
        FormatError: files that are damaged, or do not fit together.
        CoverageError: parts that leave some of a tensor out.
        UsageError: plain tensors of several ranks, and no `cut`; or a `cut` that is not asked for.
    """
    groups = group_by_kind(folder, find_rank_files(folder))
    ranks = len(next(iter(groups.values())))
    states = read_states(folder, groups)
    if not states.parts:
        raise FormatError(f"{folder}: the files of {ranks} ranks hold no tensors")
    says_cuts = any(
        not part.is_plain for parts in states.parts.values() for _, part in parts.values()
    )
    if cut is not None and says_cuts:
        raise UsageError(
            f"the files in {folder} say themselves how tensors are cut; leave the source's mesh "
            "and rules out"
        )
    if cut is None and not says_cuts and ranks > 1 and MODEL in groups:
        raise UsageError(
            f"{folder} has files of {ranks} ranks with plain tensors, and nothing says how they "
            f"are cut; give the mesh and rules: --source-mesh tp={ranks} --source-rule "
            "'PATTERN=tp, -' (mesh= and rules= of open_checkpoint), or --source-recipe"
        )
    if cut is not None:
        tensors = cut_plain_parts(folder, states.parts, cut, ranks)
    else:
        tensors = {
            name: join_parts(folder, name, parts, ranks) for name, parts in states.parts.items()
        }
    meshes = {
        part.sharding.mesh
        for parts in states.parts.values()
        for _, part in parts.values()
        if part.sharding is not None
    }
    files = tuple(
        StoredFile(file.name, (folder / file.name).stat().st_size, file.rank)
        for group in groups.values()
        for file in group
    )
    archived = (
        (name, f"the part of rank {rank}", file, tensor)
        for name, parts in states.parts.items()
        for rank, (file, part) in parts.items()
        for tensor in part.tensors
    )
    checkpoint = Checkpoint(
        folder,
        FORMAT_NAME,
        tensors,
        files,
        cut.mesh if cut is not None else meshes.pop() if len(meshes) == 1 else None,
        checksums=list_checksums(archived),
        values=states.values,
        unread=tuple((shortened(name), why) for name, why in states.unread.items()),
    )
    return _name_optimizer_state(checkpoint, states)


def _name_optimizer_state(checkpoint: Checkpoint, states: RankStates) -> Checkpoint:
    """The checkpoint with optimizer state under the names of parameters.

    Programs save `optimizer.state_dict()`, in which parameters have numbers.
    """
    inside = [name for name in checkpoint.tensors if name.startswith(OPTIMIZER_PREFIX)]
    if not inside:
        return checkpoint
    # Under FSDP2 parameters are DTensors, and buffers are plain: only the former have numbers.
    buffers = {
        name
        for name, parts in states.parts.items()
        if not name.startswith(OPTIMIZER_PREFIX)
        and all(part.is_plain for _, part in parts.values())
    }
    if len(buffers) + len(inside) == len(checkpoint.tensors):
        buffers = set()
    parameters = {n: one for n, one in checkpoint.tensors.items() if n not in buffers}
    found = find_training_state(dataclasses.replace(checkpoint, tensors=parameters))
    if found is None:
        return checkpoint
    names = {name: name for name in checkpoint.tensors}
    for name, (parameter, key) in found.tensors.items():
        if name.startswith(OPTIMIZER_PREFIX) and key:
            names[name] = f"{OPTIMIZER_PREFIX}state.{parameter}.{key}"
    if len(set(names.values())) != len(names):
        return checkpoint
    tensors = {
        new: dataclasses.replace(checkpoint.tensors[name], name=new) for name, new in names.items()
    }
    checksums = tuple(
        dataclasses.replace(one, tensor=names[one.tensor]) for one in checkpoint.checksums
    )
    values = dict(checkpoint.values)
    groups = values.get(OPTIMIZER_PREFIX + "param_groups")
    numbered = next((found.numbers[one] for one in found.numbers), ())
    if isinstance(groups, list) and numbered:
        values[OPTIMIZER_PREFIX + "param_groups"] = [
            {**group, "params": [_name_of(numbered, one) for one in group.get("params", ())]}
            for group in groups
        ]
    notes = _note_unplaced(found.unplaced)
    return dataclasses.replace(
        checkpoint, tensors=tensors, checksums=checksums, values=values, notes=notes
    )


def _name_of(names: tuple[str, ...], number: object) -> object:
    is_known = isinstance(number, int) and 0 <= number < len(names)
    return names[number] if is_known and isinstance(number, int) else number


def _note_unplaced(unplaced: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    left = list(unplaced)
    if not left:
        return ()
    return (f"{len(left)} tensors of optimizer state keep their numbers: {left[0][1]}",)
