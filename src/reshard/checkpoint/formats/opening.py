"""Which kind of checkpoint is at a path?

1. A folder with our manifest is what the manifest says.
2. A folder with `.metadata`, or with `__0.metadata` and so on, was written by PyTorch's
   distributed checkpoint.
3. A folder with an index, or with `model.safetensors`, or with one safetensors file, holds
   whole tensors.
4. A folder whose safetensors files carry sharding offsets holds shards.
5. A safetensors file or an index file is taken by itself, with nothing beside it.

Other files in a folder are carried along when they are small; reshard never reads them, but
for `config.json`, in which recipes look up numbers.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.files.source_file import FileIdentity
from reshard.checkpoint.formats import huggingface, sharded_safetensors
from reshard.checkpoint.formats.safetensors_header import read_header
from reshard.checkpoint.formats.torch_dcp import reader as torch_dcp
from reshard.checkpoint.formats.torch_dcp.rank_metadata import is_rank_metadata, rank_metadata_names
from reshard.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from reshard.errors import CheckpointError, FormatError, UsageError

SUFFIX = ".safetensors"
LARGEST_CARRIED_BYTES = 64 * 1024 * 1024
# Weights in other formats: they say the same as the tensors, and would contradict them.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot")


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Describe the checkpoint at `path`: a folder, a safetensors file, or an index file.

    Only headers are read. Everything that can be wrong without reading the tensors is found.

    Raises:
        UsageError: what is no path.
        CheckpointError: nothing there, or nothing that is a checkpoint.
        FormatError: a file that is damaged, or not of its format.
        CoverageError: shards that do not make whole tensors.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise UsageError(f"a checkpoint at {path!r}; give a path as text, or a Path")
    try:
        return _open(Path(path))
    except OSError as error:
        raise CheckpointError(
            f"cannot read {error.filename or path}: {error.strerror}; give this user access, or "
            "another path"
        ) from error


def _open(path: Path) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: there is nothing of that name")
    if not path.is_dir():
        return _identified(_open_file(path))
    manifest = read_manifest(path)
    names = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(SUFFIX))
    if manifest is not None:
        checkpoint = _open_with_manifest(path, manifest)
    elif (path / torch_dcp.METADATA_NAME).exists() or rank_metadata_names(path):
        checkpoint = torch_dcp.read(path)
    elif (path / huggingface.INDEX_NAME).exists():
        checkpoint = huggingface.read_indexed(path / huggingface.INDEX_NAME)
    elif not names:
        raise CheckpointError(
            f"no checkpoint in {path}: expected `{huggingface.SINGLE_FILE}`, "
            f"`{huggingface.INDEX_NAME}`, `{torch_dcp.METADATA_NAME}` of PyTorch, or shard files "
            f"ending in `{SUFFIX}`"
        )
    elif any(_is_sharded(path / name) for name in names):
        checkpoint = sharded_safetensors.read_without_manifest(path, names)
    elif huggingface.SINGLE_FILE in names or len(names) == 1:
        single = huggingface.SINGLE_FILE if huggingface.SINGLE_FILE in names else names[0]
        checkpoint = huggingface.read_single(path / single)
    else:
        raise CheckpointError(
            f"{len(names)} safetensors files in {path} ({', '.join(names[:3])}...) and no "
            f"`{huggingface.INDEX_NAME}` that says which belong to it; name one of them, or add "
            "the index"
        )
    return _with_companions(_identified(checkpoint))


def _open_file(path: Path) -> Checkpoint:
    if path.name == torch_dcp.METADATA_NAME or is_rank_metadata(path.name):
        return torch_dcp.read(path.parent)
    if path.name.endswith(".index.json"):
        return huggingface.read_indexed(path)
    if _is_sharded(path):
        return sharded_safetensors.read_without_manifest(path.parent, [path.name])
    return huggingface.read_single(path)


def _is_sharded(path: Path) -> bool:
    return sharded_safetensors.SHARDING_INFO_KEY in read_header(path).metadata


def _open_with_manifest(folder: Path, manifest: Manifest) -> Checkpoint:
    for file in manifest.files:
        if not (folder / file.name).exists():
            raise CheckpointError(
                f"{folder / file.name} is missing; the manifest lists {len(manifest.files)} files "
                "that belong to this checkpoint"
            )
    if manifest.format == sharded_safetensors.FORMAT:
        return sharded_safetensors.read_with_manifest(folder, manifest)
    if manifest.format == torch_dcp.FORMAT:
        return torch_dcp.read_with_manifest(folder, manifest)
    if manifest.format != huggingface.FORMAT:
        raise FormatError(
            f"{folder / MANIFEST_NAME} is of format {manifest.format!r}, which this reshard does "
            "not know; update it"
        )
    index = folder / huggingface.INDEX_NAME
    if len(manifest.files) > 1:
        checkpoint = huggingface.read_indexed(index)
    else:
        checkpoint = huggingface.read_single(folder / manifest.files[0].name)
    written = {file.name: file.size_bytes for file in manifest.files}
    found = {file.name: file.size_bytes for file in checkpoint.files}
    for name in sorted({*written, *found}):
        if written.get(name) != found.get(name):
            raise CheckpointError(
                f"{folder / name} has {found.get(name, 'no')} bytes, the manifest says "
                f"{written.get(name, 'none')}; the files were replaced after the checkpoint was "
                f"written. If that was meant, delete {folder / MANIFEST_NAME}"
            )
    if {*checkpoint.tensors} != {*manifest.tensors}:
        name = min({*checkpoint.tensors} ^ {*manifest.tensors})
        raise FormatError(
            f"tensor {name!r} is {'not ' if name not in checkpoint.tensors else ''}in the files of "
            f"{folder}, other than the manifest says"
        )
    for name, tensor in checkpoint.tensors.items():
        described = manifest.tensors[name]
        if (tensor.dtype, tensor.shape) != (described.dtype, described.layout.shape):
            raise FormatError(
                f"tensor {name!r} in {folder} is {tensor.dtype.name} {list(tensor.shape)}, the "
                f"manifest says {described.dtype.name} {list(described.layout.shape)}"
            )
    tensors = {
        name: dataclasses.replace(tensor, digest=manifest.tensors[name].digest)
        for name, tensor in checkpoint.tensors.items()
    }
    return dataclasses.replace(checkpoint, tensors=tensors)


def _identified(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with what its files are now, so that nobody takes others for them."""
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
    return dataclasses.replace(checkpoint, identities=identities)


def _raise(error: OSError) -> None:
    """A folder that cannot be listed would be passed over in silence otherwise."""
    raise error


def _with_companions(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the other files of its folder, and those that are left out."""
    folder = checkpoint.folder
    own = {file.name for file in checkpoint.files} | {MANIFEST_NAME, huggingface.INDEX_NAME}
    carried, left_out = [], list(checkpoint.left_out)
    has_metadata = (folder / torch_dcp.METADATA_NAME).exists()
    for parent, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(parent) / name
            relative = path.relative_to(folder).as_posix()
            if relative in own or name.startswith("."):
                continue
            if is_rank_metadata(name):
                if checkpoint.format != torch_dcp.FORMAT or has_metadata or parent != str(folder):
                    left_out.append((relative, "not a file of this checkpoint"))
            elif name.endswith((SUFFIX, torch_dcp.SUFFIX)):
                left_out.append((relative, "not a file of this checkpoint"))
            elif name.endswith(_OTHER_WEIGHTS) and checkpoint.format != torch_dcp.FORMAT:
                left_out.append((relative, "weights in another format"))
            elif not path.is_file():
                left_out.append((relative, "not a regular file"))
            elif path.stat().st_size > LARGEST_CARRIED_BYTES:
                left_out.append((relative, f"larger than {LARGEST_CARRIED_BYTES} bytes"))
            else:
                carried.append(relative)
    return dataclasses.replace(checkpoint, carried=tuple(carried), left_out=tuple(left_out))


def read_config(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """The model's `config.json` beside the tensors, or None where there is none.

    Raises:
        FormatError: a file that is not a JSON object.
    """
    path = checkpoint.folder / "config.json"
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise FormatError(f"{path} is not a JSON object, but a {type(content).__name__}")
    return content
