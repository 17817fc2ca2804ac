"""Opening checkpoints of ranks' files: the states of all ranks, joined, in canonical names."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from reshard.checkpoint.contents import Checkpoint, StoredFile, StoredTensor
from reshard.checkpoint.formats import optimizer_states, rank_files
from reshard.checkpoint.formats.rank_files import plain_parts
from reshard.checkpoint.formats.rank_files.parts import (
    RankStates,
    join_parts,
    list_parameters,
    read_states,
)
from reshard.checkpoint.formats.source_sharding import SourceSharding, describe_numbering
from reshard.checkpoint.formats.torch_files.pickles import shortened
from reshard.checkpoint.formats.torch_files.reading import StorageChecksums
from reshard.errors import FormatError, UsageError

# FSDP1's name for the parameters of a module, concatenated without padding.
_FLAT = ("_flat_param", "flat_param")


def read_rank_files(folder: Path, cut: SourceSharding | None = None) -> Checkpoint:
    """Return the checkpoint in the files of ranks in a folder.

    Args:
        folder: of the files.
        cut: the sharding of tensors whose files do not describe it, or lack an axis.

    Raises:
        CheckpointError: the file of a rank that is missing.
        FormatError: files that are damaged, or do not fit together.
        CoverageError: parts that leave some of a tensor out.
        UsageError: plain tensors of several ranks, and no `cut`; or a `cut` for tensors that their
            files describe.
    """
    groups = rank_files.group_by_kind(folder, rank_files.find_rank_files(folder))
    ranks = len(next(iter(groups.values())))
    states = read_states(folder, groups)
    if not states.parts:
        raise FormatError(f"{folder}: the files of {ranks} ranks hold no tensors")
    flat = next((name for name in states.parts if name.split(".")[-1] in _FLAT), None)
    if flat is not None:
        raise FormatError(
            f"{folder} has the local state of FSDP1 (LOCAL_STATE_DICT): {flat!r} is many "
            "parameters in one, whose names and shapes the files lack. Load it where "
            "it was trained, and save it under SHARDED_STATE_DICT"
        )
    are_described = any(
        not part.is_plain for parts in states.parts.values() for _, part in parts.values()
    )
    if cut is None and not are_described and ranks > 1:
        cut = plain_parts.find_meta_cut(folder, states.parts, ranks)
    if cut is None and not are_described and ranks > 1 and rank_files.MODEL in groups:
        raise UsageError(
            f"{folder} has files of {ranks} ranks with plain tensors, whose sharding is not "
            f"described; give the mesh and rules: --source-mesh tp={ranks} --source-rule "
            "'PATTERN=tp, -' (mesh= and rules= of open_checkpoint), or --source-recipe. Where "
            f"several axes cut them, their product is {ranks}, and ranks next to each other are "
            "neighbours on the last: --source-mesh dp=...,tp=..."
        )
    mesh = None if cut is None else cut.mesh
    cut_tensors: dict[str, StoredTensor] = {}
    if cut is not None and are_described:
        cut_tensors, mesh = plain_parts.cut_lacking_parts(folder, states.parts, cut, ranks)
    elif cut is not None:
        cut_tensors = plain_parts.cut_plain_parts(folder, states.parts, cut, ranks)
    tensors = {
        name: cut_tensors[name] if name in cut_tensors else join_parts(folder, name, parts, ranks)
        for name, parts in states.parts.items()
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
    checksums = StorageChecksums()
    for name, parts in states.parts.items():
        for rank, (file, part) in parts.items():
            for tensor in part.tensors:
                checksums.add_whole(name, f"the part of rank {rank}", file, tensor)
    checkpoint = Checkpoint(
        folder,
        rank_files.FORMAT_NAME,
        tensors,
        files,
        mesh if mesh is not None else meshes.pop() if len(meshes) == 1 else None,
        checksums=checksums.list(),
        values=states.values,
        given_sharding=None if cut is None else str(cut),
        notes=() if cut is None or mesh is None else describe_numbering(cut, mesh),
        unread=tuple((shortened(name), why) for name, why in states.unread.items()),
        unreadable=states.unreadable,
    )
    return _name_optimizer_state(checkpoint, states, cut_tensors)


def _name_optimizer_state(
    checkpoint: Checkpoint, states: RankStates, cut: Collection[str]
) -> Checkpoint:
    """Return the checkpoint with optimizer state under the names of parameters, if known."""
    parameters = [(name, checkpoint[name].shape) for name in list_parameters(states.parts, cut)]
    inside = {
        name: tensor.shape
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(optimizer_states.OPTIMIZER_PREFIX)
    }
    groups: Any = checkpoint.values.get(optimizer_states.GROUPS)
    names, problem = optimizer_states.find_state_names(parameters, inside, groups)
    if problem is not None:
        note = f"optimizer state keeps the numbers of parameters: {problem}"
        return dataclasses.replace(checkpoint, notes=(*checkpoint.notes, note))
    if not names:
        return checkpoint
    names = {name: names.get(name, name) for name in checkpoint.tensors}
    return dataclasses.replace(
        checkpoint,
        tensors={
            new: dataclasses.replace(checkpoint.tensors[name], name=new)
            for name, new in names.items()
        },
        checksums=tuple(
            dataclasses.replace(checksum, tensor=names[checksum.tensor])
            for checksum in checkpoint.checksums
        ),
        values={
            **checkpoint.values,
            optimizer_states.GROUPS: [
                {**group, "params": [parameters[number][0] for number in group["params"]]}
                for group in groups
            ],
        },
    )
