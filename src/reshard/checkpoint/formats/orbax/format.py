"""The format `orbax`: checkpoints of JAX programs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.format import (
    Capability,
    CheckpointFormat,
    check_against_manifest,
)
from reshard.checkpoint.formats.orbax.folders import FORMAT_NAME, find_tree
from reshard.checkpoint.formats.orbax.zarr_metadata import ZARR2_NAME, ZARR3_NAME
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan
from reshard.checkpoint.manifest import Manifest
from reshard.checkpoint.storage.remote_paths import walk_folder
from reshard.errors import CheckpointError

_OWN = re.compile(
    r"_METADATA|_sharding|_strings\.json|_CHECKPOINT_METADATA|commit_success\.txt|checkpoint"
    r"|manifest\.ocdbt|(d|ocdbt_data|ocdbt_meta|array_metadatas|descriptor|ocdbt\.process_[^/]*)/.*"
)


class OrbaxFormat(CheckpointFormat):
    """A tree of arrays in Zarr chunks, in files or in an OCDBT database."""

    name = FORMAT_NAME
    training = "optax"
    evidence = "`_METADATA` of Orbax, or numbered steps with such folders"
    capabilities = frozenset(
        {Capability.WHOLE, Capability.SHARDS, Capability.VALUES, Capability.ATTRIBUTES}
    )

    def detect(self, path: Path) -> bool:
        """Whether there is a tree in the folder, in an item of it, or in a step."""
        return find_tree(path) is not None

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint of the tree."""
        from reshard.checkpoint.formats.orbax.reader import read

        found = find_tree(path)
        if found is None:
            raise CheckpointError(f"no tree of Orbax in {path}; give the folder of `_METADATA`")
        return read(found)

    def open_with_manifest(self, folder: Path, manifest: Manifest) -> Checkpoint:
        """The checkpoint of the tree, with digests; its names are those of the tree."""
        checkpoint = self.open(folder)
        first: dict[tuple[str | int, ...], str] = {}
        for name in checkpoint.tensors:
            if name in manifest.tensors:
                first.setdefault(checkpoint.paths[name], name)
        tensors = dict(manifest.tensors)
        for name in checkpoint.tensors:
            path = checkpoint.paths[name]
            # Other programs' weights are placed among `params`; a count of steps is written once.
            for other in (name, ".".join(map(str, path[1:])), first.get(path, "")):
                if other in manifest.tensors and (other == name or name not in manifest.tensors):
                    tensors[name] = manifest.tensors[other]
                    if other not in checkpoint.tensors:
                        tensors.pop(other, None)
                    break
        return check_against_manifest(checkpoint, dataclasses.replace(manifest, tensors=tensors))

    def has_file(self, name: str) -> bool:
        """No names of files tell: they are hashes, or places in a grid."""
        return False

    def own_files(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """What says where the arrays are, and the database."""
        found: list[str] = []
        arrays: list[str] = []
        for parent, _, names in walk_folder(checkpoint.folder):
            inside = parent.relative_to(checkpoint.folder).as_posix() + "/"
            if ZARR2_NAME in names or ZARR3_NAME in names:
                arrays.append(inside)
            is_array = inside.startswith(tuple(arrays))
            relative = [name if inside == "./" else inside + name for name in names]
            found += [name for name in relative if is_array or _OWN.fullmatch(name)]
        return tuple(found)

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Chunks in one file a rank."""
        from reshard.checkpoint.formats.orbax.arrangement import arrange_chunks

        return arrange_chunks(new)

    def final_files(self, write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
        """The tree, its shardings, and the database that says where the chunks are."""
        from reshard.checkpoint.formats.orbax.arrangement import list_final_files

        return list_final_files(write_plan)


FORMAT = OrbaxFormat()
