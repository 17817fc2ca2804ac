"""Opening a checkpoint: detecting its format, and listing the other files of its folder.

1. The format of a folder with our manifest is the manifest's.
2. Otherwise the first format that detects the path is used (`registry`).
3. A file is opened by itself, without the other files of its folder.
4. If no format detects the path, the error describes its contents (`detection_errors`).

Small files of other kinds are carried along to a target. Except for `config.json`, from which
recipes take numbers, they are not read. Links that lead out of the folder are listed and not
followed: a downloaded folder must not determine which of the user's files are copied.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint.contents import CHECK_COPIES, Checkpoint
from reshard.checkpoint.formats.format import CheckpointFormat, Listing
from reshard.checkpoint.formats.registry import (
    all_formats,
    describe_broken_formats,
    detect_format,
    find_format,
    is_format_file,
)
from reshard.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from reshard.checkpoint.storage.filesystem import MAX_JSON_BYTES, read_json_file
from reshard.checkpoint.storage.local_files import FileIdentity
from reshard.checkpoint.storage.permissions import describe_foreign_link
from reshard.checkpoint.storage.remote_paths import RemotePath, as_path, walk_folder
from reshard.checkpoint.storage.upload_marker import check_committed
from reshard.errors import CheckpointError, FormatError, UsageError
from reshard.mesh import DeviceMesh
from reshard.recipes.overrides import DIFFERING_COPIES, parse_allowed
from reshard.system import release_freed_memory

if TYPE_CHECKING:
    from reshard.checkpoint.formats.source_sharding import SourceSharding
    from reshard.recipes.recipe import Recipe
    from reshard.recipes.rules import Rule

_FOLDER_LINK = "a link to a folder, which is not entered"
# Files that are read are carried along.
MAX_CARRIED_BYTES = MAX_JSON_BYTES
_MAX_INNER_FOLDERS = 64
# Weights in other formats: they are copies of the tensors, and would become outdated.
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot")
# Files without weights that belong to a model, as publishers of models name them.
MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template*", "*processor_config.json", "LICENSE*", "README.md"),
)


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    mesh: DeviceMesh | str | None = None,
    rules: Iterable[Rule | str] = (),
    recipe: str | os.PathLike[str] | Recipe | None = None,
    check_copies: str = CHECK_COPIES[0],
    allow: Iterable[str] = (),
) -> Checkpoint:
    """Describe the checkpoint at `path`: a folder, a safetensors file, or an index file.

    Only headers are read. All errors that can be found without reading the tensors are raised.

    Args:
        path: of a folder, a file, or an index file.
        mesh: of the ranks that wrote it, if their files have plain tensors and do not specify the
            shardings: `"tp=2"`.
        rules: the shardings over that mesh: `["*.weight=tp, -", "*=..."]`.
        recipe: the same by a recipe's rules: a name, a file, or `auto` by config.json.
        check_copies: how parts that several ranks hold are compared when tensors are read: by
            checksums of the files and samples (`sample`), every byte (`all`), or not at all
            (`none`).
        allow: `["differing-copies"]` if they may differ: the copy of the lowest rank is read.

    Raises:
        UsageError: an argument that is not a path; an unknown value of `check_copies`.
        CheckpointError: a path that does not exist, or is not a checkpoint.
        FormatError: a file that is damaged, or not of its format.
        CoverageError: shards that do not cover their tensors.
    """
    allowed = parse_allowed(allow, (DIFFERING_COPIES,))
    try:
        place = as_path(path)
        checkpoint = _open(place, _source_cut(place, mesh, rules, recipe))
    except OSError as error:
        where = str(error.filename or path)
        remedy = "give this user access"
        if "://" in where:
            is_setting = error.errno == errno.EINVAL
            remedy = "set that right" if is_setting else "see that its server runs and lets you in"
        raise CheckpointError(
            f"cannot read {where}: {error.strerror}; {remedy}, or give another path"
        ) from error
    release_freed_memory(len(checkpoint.tensors))
    return checkpoint.replace(check_copies=check_copies, allowed=allowed)


def _source_cut(
    path: Path,
    mesh: DeviceMesh | str | None,
    rules: Iterable[Rule | str],
    recipe: str | os.PathLike[str] | Recipe | None,
) -> SourceSharding | None:
    if mesh is None:
        if rules or recipe is not None:
            raise UsageError("rules or a recipe for a source without its mesh; give it: tp=2")
        return None
    # Few checkpoints need these, and all commands open a checkpoint.
    from reshard.checkpoint.formats.source_sharding import SourceSharding
    from reshard.recipes.library import choose_recipe, load_recipe
    from reshard.recipes.recipe import Recipe

    config = read_json_file(path / "config.json")
    if recipe == "auto":
        recipe = None if config is None else choose_recipe(config)
        if recipe is None:
            raise UsageError(
                f"the recipe 'auto' of a source needs a config.json in {path} that a shipped "
                "recipe fits; name a recipe, or give rules"
            )
    elif recipe is not None and not isinstance(recipe, Recipe):
        recipe = load_recipe(os.fspath(recipe))
    return SourceSharding.of(mesh, rules, recipe, config)


def _open(path: Path, sharding: SourceSharding | None = None) -> Checkpoint:
    if not path.exists():
        from reshard.checkpoint.formats.detection_errors import describe_missing

        raise CheckpointError(describe_missing(path))
    if not (isinstance(path, RemotePath) or path.is_dir() or path.is_file()):
        # Reading from a pipe would wait for its writer.
        raise CheckpointError(
            f"{path}: not a regular file, expected the folder or the file of a checkpoint; save "
            "what comes out of a pipe as a file first"
        )
    check_committed(path)
    manifest = read_manifest(path) if path.is_dir() else None
    try:
        format = _detect(path) if manifest is None else _find_format_of(path, manifest)
        if sharding is not None:
            checkpoint = format.open_sharded(path, sharding)
        elif manifest is None:
            checkpoint = format.open(path)
        else:
            checkpoint = _open_with_manifest(format, path, manifest)
    except FormatError as error:
        # A pointer of git-LFS is not a damaged header: report the kind of the file first.
        from reshard.checkpoint.formats.detection_errors import describe_wrong_files

        wrong = describe_wrong_files(path, str(error))
        if wrong is None:
            raise
        raise FormatError(wrong) from error
    checkpoint = _identify(checkpoint)
    return _add_companions(checkpoint) if path.is_dir() else checkpoint


def has_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint of any format, or has a manifest.

    >>> has_checkpoint(Path("/nowhere"))
    False
    """
    if not path.exists():
        return False
    listing = Listing(path)
    return MANIFEST_NAME in listing.names or detect_format(listing) is not None


def _detect(path: Path) -> CheckpointFormat:
    format = detect_format(Listing(path))
    if format is not None:
        return format
    from reshard.checkpoint.formats.detection_errors import (
        describe_folder,
        folders_within,
        list_names,
        list_some,
    )

    text = describe_folder(path)
    if text is None:
        # Reversed, since the usual formats are detected last.
        evidence = "; ".join(format.evidence for format in reversed(all_formats()))
        names = list_names(path)
        text = f"no checkpoint in {path}: expected {evidence}"
        text += f"; it has {list_some(names)}" if names else "; it is empty"
    within = [
        inner.relative_to(path).as_posix()
        for inner in itertools.islice(folders_within(path), _MAX_INNER_FOLDERS)
        if detect_format(Listing(inner)) is not None
    ]
    hint = f". There are checkpoints in it, name one: {list_some(within)}" if within else ""
    raise CheckpointError(text + hint + describe_broken_formats())


def _find_format_of(folder: Path, manifest: Manifest) -> CheckpointFormat:
    format = find_format(manifest.format)
    if format is None:
        raise FormatError(
            f"{folder / MANIFEST_NAME} is of format {manifest.format!r}, which this reshard does "
            f"not know; update it, or install the plug-in that has it{describe_broken_formats()}"
        )
    return format


def _open_with_manifest(format: CheckpointFormat, folder: Path, manifest: Manifest) -> Checkpoint:
    for file in manifest.files:
        if not (folder / file.name).exists():
            raise CheckpointError(
                f"{folder / file.name} is missing; the manifest lists {len(manifest.files)} files "
                "that belong to this checkpoint"
            )
    # The manifest has the names of the conversion; the files have the names of their format.
    read = format.find_read_names(manifest.tensors)
    return format.open_with_manifest(folder, manifest.renamed(read) if read else manifest)


def _identify(checkpoint: Checkpoint) -> Checkpoint:
    """Add the identities of the files, by which a replaced file is noticed."""
    identities = {}
    for file in checkpoint.files:
        try:
            state = checkpoint.path(file.name).stat()
        except OSError as error:
            raise CheckpointError(
                f"cannot look at {checkpoint.path(file.name)}: {error.strerror}; it was there a "
                "moment ago, does another program write here?"
            ) from error
        identities[file.name] = FileIdentity.of(Path(file.name).name, state)
    return checkpoint.replace(identities=identities)


def _add_companions(checkpoint: Checkpoint) -> Checkpoint:
    """Add the other files of the folder, and the list of files that are left out."""
    folder = checkpoint.folder
    own = {file.name for file in checkpoint.files} | {MANIFEST_NAME}
    checkpoint_format = find_format(checkpoint.format)
    carries_weights = checkpoint_format is not None and checkpoint_format.carries_weights
    own.update(checkpoint_format.own_files(checkpoint) if checkpoint_format is not None else ())
    carried, left_out = [], list(checkpoint.left_out)
    for parent, folders, files in walk_folder(folder):
        # In place: only the folders that stay in the list are entered.
        # Hidden folders are caches of downloads, and repositories.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if (parent / name).is_symlink():
                left_out.append(((parent / name).relative_to(folder).as_posix(), _FOLDER_LINK))
        for name in files:
            path = parent / name
            relative = path.relative_to(folder).as_posix()
            if relative in own or name.startswith("."):
                continue
            if is_format_file(name):
                left_out.append((relative, "not a file of this checkpoint"))
            elif name.endswith(OTHER_WEIGHTS) and not carries_weights:
                left_out.append((relative, "weights in another format"))
            elif (problem := describe_foreign_link(path, folder)) is not None:
                left_out.append((relative, problem))
            elif not path.is_file():
                left_out.append((relative, "not a regular file"))
            elif path.stat().st_size > MAX_CARRIED_BYTES:
                left_out.append((relative, f"larger than {MAX_CARRIED_BYTES} bytes"))
            else:
                carried.append(relative)
    return checkpoint.replace(carried=tuple(carried), left_out=tuple(left_out))


def read_config(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Return the content of the model's `config.json`, or None if there is none.

    For an adapter it is the file in its folder, or in the folder of the model that
    `adapter_config.json` names; the key `adapter_config` contains `adapter_config.json`.

    Raises:
        FormatError: a file that is not a JSON object.
    """
    result = read_json_file(checkpoint.folder / "config.json")
    adapter = read_adapter_config(checkpoint)
    if adapter is None:
        return result
    # An adapter has the config of its base model, if that is a local folder.
    base = adapter.get("base_model_name_or_path")
    if result is None and isinstance(base, str) and base:
        result = read_json_file(Path(base) / "config.json")
    return None if result is None else {**result, "adapter_config": adapter}


def read_adapter_config(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Return the content of `adapter_config.json`, or None if there is none.

    Raises:
        FormatError: a file that is not a JSON object.
    """
    return read_json_file(checkpoint.folder / "adapter_config.json")
