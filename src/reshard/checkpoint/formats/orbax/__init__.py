"""The format `orbax`: a tree of JAX arrays in Zarr chunks, in files or in an OCDBT database.

    run/                 steps               the last complete step is opened
      100/               items of a step     `default`, or the only item
        default/         a tree              with `_METADATA`, or `checkpoint` of older versions
          _METADATA

tree            the tree: `_METADATA`, or the single file `checkpoint` of older versions
shardings       `_sharding`: JAX's shardings
ocdbt           the key-value store: files, or an OCDBT database
zarr            dtypes, grids, codecs and chunks of arrays (Zarr 2 and 3)
optax_states    names of Optax's optimizer states
reader, writer  opening and planning checkpoints
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.format import (
    Capability,
    CheckpointFormat,
    Listing,
    check_against_manifest,
)
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan
from reshard.checkpoint.manifest import Manifest
from reshard.checkpoint.storage.remote_paths import walk_folder
from reshard.errors import (
    CheckpointError,
)

FORMAT_NAME = "orbax"
AGGREGATE_NAME = "checkpoint"
# A manager can be set to begin the names of steps with a prefix.
_STEP = r"(?:.*[^0-9])?(\d{1,18})"
# Orbax saves into a folder with this in its name, and renames it when the save is complete.
_UNFINISHED = ".orbax-checkpoint-tmp"

# Names of items that contain the model, the preferred first.
_PREFERRED = ("default", "state", "items", "params")

#: The folder of a tree, and notes for the user on how it was chosen.
TreeFolder = tuple[Path, tuple[str, ...]]


def find_tree(path: Path) -> TreeFolder | None:
    """Return the folder of the tree at `path`, or None if there is none.

    Raises:
        CheckpointError: a save that was not finished; several items, none of which is preferred.
    """
    if not path.is_dir():
        is_tree_file = path.name in (METADATA_NAME, MANIFEST_NAME)
        return (path.parent, ()) if is_tree_file and _has_tree(path.parent) else None
    if _has_tree(path):
        if _UNFINISHED in path.name:
            raise CheckpointError(
                f"{path} is a save of Orbax that was not finished; give one that was"
            )
        return path, ()
    result = _choose_item(path)
    if result is not None:
        return result
    steps = sorted(
        (int(match[1]), folder.name)
        for folder in _list_folders(path)
        if (match := re.fullmatch(_STEP, folder.name)) and _is_step(folder)
    )
    if not steps:
        return None
    number, name = steps[-1]
    step = path / name
    inner = (step, ()) if _has_tree(step) else _choose_item(step)
    if inner is None:
        return None
    folder, notes = inner
    if len(steps) > 1:
        others = ", ".join(name for _, name in steps[:-1][-8:])
        note = f"step {number} of {path}, the last; give the folder of another ({others})"
        notes = (*notes, note)
    return folder, notes


def _has_tree(folder: Path) -> bool:
    return (folder / METADATA_NAME).is_file() or is_aggregate(folder)


def is_aggregate(folder: Path) -> bool:
    """Return whether a folder has the single file of an older save, by its name and first byte."""
    path = folder / AGGREGATE_NAME
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.read(1)
    # The type of a map in MessagePack.
    return bool(first) and (first[0] >> 4 == 8 or first[0] in (0xDE, 0xDF))


def _list_folders(path: Path) -> Iterator[Path]:
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and _UNFINISHED not in folder.name and not folder.name.startswith("."):
            yield folder


def _is_step(folder: Path) -> bool:
    return _has_tree(folder) or any(map(_has_tree, _list_folders(folder)))


def _choose_item(step: Path) -> TreeFolder | None:
    """Return the folder of the item of a step that contains the model."""
    items = [folder.name for folder in _list_folders(step) if _has_tree(folder)]
    # The steps of a manager without items are trees, and not items.
    if not items or any(re.fullmatch(_STEP, name) for name in items):
        return None
    chosen = next((name for name in _PREFERRED if name in items), None)
    if chosen is None and len(items) > 1:
        raise CheckpointError(
            f"{step} has {len(items)} items: {', '.join(items)}; give the folder of one of them"
        )
    chosen = chosen or items[0]
    others = sorted({folder.name for folder in _list_folders(step)} - {chosen})
    notes: tuple[str, ...] = ()
    if others:
        notes = (f"item {chosen} of {step}; it also has {', '.join(others)}, which are not read",)
    return step / chosen, notes


_OWN = (
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

    def detect(self, listing: Listing) -> bool:
        """Return whether there is a tree in the folder, in an item of it, or in a step."""
        return find_tree(listing.path) is not None

    def open(self, path: Path) -> Checkpoint:
        """Describe the checkpoint of the tree."""
        from reshard.checkpoint.formats.orbax.reader import read

        tree_folder = find_tree(path)
        if tree_folder is None:
            raise CheckpointError(f"no tree of Orbax in {path}; give the folder of `_METADATA`")
        return read(*tree_folder)

    def open_with_manifest(self, folder: Path, manifest: Manifest) -> Checkpoint:
        """Describe the checkpoint with digests, in the names of the tree."""
        checkpoint = self.open(folder)
        first: dict[tuple[str | int, ...], str] = {}
        for name in checkpoint.tensors:
            if name in manifest.tensors:
                first.setdefault(checkpoint.paths[name], name)
        tensors = dict(manifest.tensors)
        for name in checkpoint.tensors:
            path = checkpoint.paths[name]
            # Other programs' weights are stored below `params`; a step count is stored once.
            for other in (name, ".".join(map(str, path[1:])), first.get(path, "")):
                if other in manifest.tensors and (other == name or name not in manifest.tensors):
                    tensors[name] = manifest.tensors[other]
                    if other not in checkpoint.tensors:
                        tensors.pop(other, None)
                    break
        named = manifest.replace(tensors=TensorColumns.of(tensors))
        return check_against_manifest(checkpoint, named)

    def has_file(self, name: str) -> bool:
        """Return False: names of files are hashes, or indices in a grid."""
        return False

    def own_files(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Return the files of metadata and of the database, and of arrays outside of it."""
        own: list[str] = []
        arrays: list[str] = []
        for parent, _, names in walk_folder(checkpoint.folder):
            inside = parent.relative_to(checkpoint.folder).as_posix() + "/"
            if ZARR2_NAME in names or ZARR3_NAME in names:
                arrays.append(inside)
            is_array = inside.startswith(tuple(arrays))
            relative = [name if inside == "./" else inside + name for name in names]
            own += [name for name in relative if is_array or re.fullmatch(_OWN, name)]
        return tuple(own)

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Plan a file of chunks for each rank."""
        from reshard.checkpoint.formats.orbax.writer import plan_files

        return plan_files(new)

    def final_files(self, write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
        """Return the tree, its shardings, and the database of the chunks' locations."""
        from reshard.checkpoint.formats.orbax.writer import list_final_files

        return list_final_files(write_plan)


FORMAT = OrbaxFormat()
MANIFEST_NAME = "manifest.ocdbt"
METADATA_NAME = "_METADATA"
ZARR2_NAME = ".zarray"
ZARR3_NAME = "zarr.json"
