"""Which folder has the tree: Orbax's own, that of an item, of a step, or of a CheckpointManager.

run/                 steps                     the last one that is complete
  100/               items of a step           `default`, or the one that there is
    default/         a tree                    with `_METADATA`, or `checkpoint` of older ones
      _METADATA
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reshard.checkpoint.formats.orbax.key_values import MANIFEST_NAME
from reshard.checkpoint.formats.orbax.tree_metadata import METADATA_NAME
from reshard.errors import CheckpointError

FORMAT_NAME = "orbax"
AGGREGATE_NAME = "checkpoint"
_STEP = re.compile(r"(?:.*[^0-9])?(\d{1,18})")
_UNFINISHED = ".orbax-checkpoint-tmp"
# Of several items, the one that has the model.
_PREFERRED = ("default", "state", "items", "params")


@dataclass(frozen=True, slots=True)
class TreeFolder:
    """The folder of a tree, and what a user should know of how it was chosen."""

    folder: Path
    notes: tuple[str, ...] = ()


def find_tree(path: Path) -> TreeFolder | None:
    """The folder of the tree at `path`; None where there is none.

    Raises:
        CheckpointError: a save that was not finished; several items, none of which is known.
    """
    if not path.is_dir():
        known = path.name in (METADATA_NAME, MANIFEST_NAME)
        return TreeFolder(path.parent) if known and _has_tree(path.parent) else None
    if _has_tree(path):
        if _UNFINISHED in path.name:
            raise CheckpointError(
                f"{path} is a save of Orbax that was not finished; give one that was"
            )
        return TreeFolder(path)
    found = _choose_item(path)
    if found is not None:
        return found
    steps = sorted(
        (int(match[1]), folder.name)
        for folder in _list_folders(path)
        if (match := _STEP.fullmatch(folder.name)) and _is_step(folder)
    )
    if not steps:
        return None
    number, name = steps[-1]
    step = path / name
    inner = TreeFolder(step) if _has_tree(step) else _choose_item(step)
    if inner is None:
        return None
    notes = list(inner.notes)
    if len(steps) > 1:
        others = ", ".join(name for _, name in steps[:-1][-8:])
        notes.append(f"step {number} of {path}, the last; give the folder of another ({others})")
    return TreeFolder(inner.folder, tuple(notes))


def _has_tree(folder: Path) -> bool:
    return (folder / METADATA_NAME).is_file() or is_aggregate(folder)


def is_aggregate(folder: Path) -> bool:
    """Whether a folder has the one file of an older save: other programs call theirs so too."""
    path = folder / AGGREGATE_NAME
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.read(1)
    # A map of msgpack.
    return bool(first) and (first[0] >> 4 == 8 or first[0] in (0xDE, 0xDF))


def _list_folders(path: Path) -> Iterator[Path]:
    for one in sorted(path.iterdir()):
        if one.is_dir() and _UNFINISHED not in one.name and not one.name.startswith("."):
            yield one


def _is_step(folder: Path) -> bool:
    return _has_tree(folder) or any(map(_has_tree, _list_folders(folder)))


def _choose_item(step: Path) -> TreeFolder | None:
    """The item of a step that has the model."""
    items = [folder.name for folder in _list_folders(step) if _has_tree(folder)]
    # Steps of a manager without items are trees, too.
    if not items or any(_STEP.fullmatch(name) for name in items):
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
    return TreeFolder(step / chosen, notes)
