"""Links beside the tensors of a checkpoint, and which of them are followed.

A downloaded folder must not decide which files of this machine are copied into a new checkpoint. A
link is followed if its target is in the folder, or, in a snapshot of the Hugging Face cache, in the
folder of the same repository: all files of a snapshot are links to its `blobs`::

    models--meta--llama/blobs/0f3c...
    models--meta--llama/snapshots/c0ffee/config.json -> ../../blobs/0f3c...
"""

from __future__ import annotations

import os
from pathlib import Path

from reshard.checkpoint.files.places.place_path import PlacePath

_REPOSITORIES = ("models--", "datasets--", "spaces--")


def is_link(path: Path) -> bool:
    """Whether a path is a link; objects of stores are none."""
    return not isinstance(path, PlacePath) and path.is_symlink()


def describe_foreign_link(path: Path, folder: Path) -> str | None:
    """Return why a file of a checkpoint's folder is not followed; None if it may be read.

    >>> describe_foreign_link(Path("/nowhere/config.json"), Path("/nowhere")) is None
    True
    """
    if not is_link(path):
        return None
    target = path.resolve()
    if any(target.is_relative_to(one) for one in _allowed_folders(folder.resolve())):
        return None
    return f"a link to {os.readlink(path)}, outside the folder"


def _allowed_folders(folder: Path) -> tuple[Path, ...]:
    """The folders that links in a resolved folder may lead into.

    >>> [path.name for path in _allowed_folders(Path("/hub/models--a--b/snapshots/c0ffee"))]
    ['c0ffee', 'models--a--b']
    """
    repository = folder.parent.parent
    is_snapshot = folder.parent.name == "snapshots" and repository.name.startswith(_REPOSITORIES)
    return (folder, repository) if is_snapshot else (folder,)
