"""Folders that a new checkpoint replaces: what would be lost with them, and how open they are.

A replaced folder is deleted with everything in it. The files of the checkpoint there are meant to
go, and those with a name in the new checkpoint are written anew. Anything else, such as a data set,
a `.git` folder, a link or an optimizer's state, is no part of that checkpoint::

    model/model.safetensors     of the checkpoint
    model/config.json           of the checkpoint: its manifest lists it, or every model has it
    model/.git/                 lost
    model/evals -> /data        lost
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from reshard.checkpoint.formats.opening import OTHER_WEIGHTS, open_checkpoint
from reshard.checkpoint.formats.registry import all_formats, find_format
from reshard.checkpoint.manifest import MANIFEST_NAME, read_manifest
from reshard.checkpoint.storage.filesystem import is_attribute_file
from reshard.checkpoint.storage.permissions import describe_foreign_link, is_link
from reshard.checkpoint.storage.remote_paths import RemotePath, walk_folder
from reshard.checkpoint.storage.upload_marker import MARKER_FOLDER
from reshard.errors import ReshardError, UsageError

_MAX_LISTED = 12
# Files beside weights that belong to the model, as publishers of models name them.
_MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template*", "*processor_config.json", "LICENSE*", "README.md"),
)
# Made again by whoever needs it: how files were downloaded, compiled modules, views of folders.
_CACHES = (".cache/huggingface", "__pycache__", ".DS_Store")


def expect_nothing_lost(target: Path, written: Collection[str]) -> None:
    """Raise UsageError where replacing a folder would lose what is no part of its checkpoint.

    Args:
        target: the folder, or the address of one; it need not exist.
        written: the files of the new checkpoint, relative to the folder.
    """
    others = [*find_others(target, written)]
    if not others:
        return
    more = len(others) - _MAX_LISTED
    listed = "\n".join(f"  {name}" for name in others[:_MAX_LISTED])
    listed += f"\n  and {more} more" if more > 0 else ""
    raise UsageError(
        f"replacing {target} would delete what is no part of the checkpoint there:\n{listed}\n"
        "expected a folder for the checkpoint alone: move these away, choose another target, or "
        "delete them with --discard-others (discard_others=True)"
    )


def find_others(target: Path, written: Collection[str]) -> Iterator[str]:
    """List what is in a folder and no part of its checkpoint; a folder of such ends with `/`.

    Args:
        target: the folder, which need not exist.
        written: files that are written anew, relative to the folder.
    """
    if not target.is_dir():
        return
    own = {*written, *_list_checkpoint_files(target)}
    # Every folder that has one of these files in it.
    within = {parent.as_posix() for name in own for parent in Path(name).parents}
    for parent, folders, files in walk_folder(target):
        inner = parent.relative_to(target).as_posix()
        prefix = "" if inner == "." else f"{inner}/"
        entered = []
        for name in folders:
            relative = prefix + name
            if is_link(parent / name):
                if relative not in own:
                    yield f"{relative} (a link to {os.readlink(parent / name)})"
            elif relative in within:
                entered.append(name)
            elif relative == ".cache":
                # `hf download --local-dir` keeps notes there.
                if any(one.name != "huggingface" for one in (parent / name).iterdir()):
                    yield f"{relative}/"
            elif not _is_cache(target, relative):
                yield f"{relative}/"
        # In place: only the folders that are left in the list are entered.
        folders[:] = entered
        for name in files:
            relative = prefix + name
            if relative not in own and not _is_cache(target, relative):
                path = parent / name
                yield relative + (f" (a link to {os.readlink(path)})" if is_link(path) else "")


def _is_cache(target: Path, relative: str) -> bool:
    """Whether a name is that of a cache; markers of uploads are kept apart from checkpoints."""
    is_marker = isinstance(target, RemotePath) and relative == MARKER_FOLDER
    name = relative.rpartition("/")[2]
    return is_marker or name in _CACHES or is_attribute_file(name)


def _list_checkpoint_files(target: Path) -> Iterator[str]:
    """List the files of the checkpoint in a folder, also of a damaged one."""
    yield MANIFEST_NAME
    try:
        checkpoint = open_checkpoint(target)
        manifest = read_manifest(target)
    except ReshardError:
        yield from _list_model_files(target)
        yield from _list_by_name(target, is_checkpoint_file)
        return
    format = find_format(checkpoint.format)
    yield from (file.name for file in checkpoint.files)
    yield from format.own_files(checkpoint) if format is not None else ()
    # Such as an index, which neither lists.
    yield from _list_by_name(target, is_checkpoint_file, but=dict(checkpoint.left_out))
    if manifest is not None:
        yield from manifest.carried
        return
    yield from _list_model_files(target)
    if format is not None and format.carries_weights:
        yield from (name for name in checkpoint.carried if name.endswith(OTHER_WEIGHTS))


def is_checkpoint_file(name: str) -> bool:
    """Whether the name of a file is one of a checkpoint's own, of any format.

    >>> is_checkpoint_file("model.safetensors"), is_checkpoint_file("config.json")
    (True, False)
    """
    last = name.rpartition("/")[2]
    return last in (MANIFEST_NAME, ".metadata") or any(one.has_file(last) for one in all_formats())


def _list_by_name(
    target: Path, is_own: Callable[[str], bool], but: Collection[str] = ()
) -> Iterator[str]:
    """List the files with such a name, relative to the folder."""
    for parent, _, files in walk_folder(target):
        for name in files:
            relative = (parent / name).relative_to(target).as_posix()
            if relative not in but and is_own(relative):
                yield relative


def _list_model_files(target: Path) -> Iterator[str]:
    """List the files beside weights that models have; what links lead to is not in the folder."""
    for name in _list_by_name(target, _is_model_file):
        if describe_foreign_link(target / name, target) is None:
            yield name


def _is_model_file(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _MODEL_FILES)
