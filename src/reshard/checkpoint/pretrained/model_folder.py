"""Files beside the weights of a model folder: its config.json, and what a tokenizer needs.

They are taken from the folder that the user names, else from that of the checkpoint, else from
`huggingface` in it or beside it, as verl has it, or from the folder above. config.json is written
with what is true of the weights: their type, and whether they are tied.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.opening import LARGEST_CARRIED_BYTES
from reshard.checkpoint.storage.json_text import parse_json
from reshard.checkpoint.storage.permissions import describe_foreign_link
from reshard.checkpoint.storage.remote_paths import as_path
from reshard.dtypes import DType
from reshard.elements import is_castable
from reshard.errors import CheckpointError, FormatError, UsageError

CONFIG = "config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")
_COMPANIONS = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "chat_template*"),
    *("preprocessor_config.json", "processor_config.json", "image_processor_config.json"),
    *("video_preprocessor_config.json", "*.py", "LICENSE*", "README.md"),
)


class ModelFiles(NamedTuple):
    """The config of a model, where it was found, and the files beside it by their names."""

    config: dict[str, Any]
    folder: Path
    companions: dict[str, Path]


def find_model_files(
    checkpoint: Checkpoint, given: str | os.PathLike[str] | None = None
) -> ModelFiles:
    """The config of the model that a checkpoint is of, and the files beside it.

    Args:
        checkpoint: whose folder is looked at.
        given: a folder with config.json, or such a file.

    Raises:
        UsageError: what is no path.
        CheckpointError: no config.json.
        FormatError: one that is not a JSON object, or that names no type of model.
    """
    if given is not None:
        if not isinstance(given, str | os.PathLike):
            raise UsageError(f"a config {given!r}; give the path of a folder or of config.json")
        path = as_path(given)
        path = path / CONFIG if path.is_dir() else path
        if not path.is_file():
            raise CheckpointError(
                f"no config.json at {given}; name the folder of the model that was trained, or its "
                "config.json"
            )
    else:
        folder = checkpoint.folder
        places = (folder, folder / "huggingface", folder.parent / "huggingface", folder.parent)
        path = next((one / CONFIG for one in places if (one / CONFIG).is_file()), Path())
        if not path.name:
            raise CheckpointError(
                f"no config.json in {folder}, which says what the model is; name the folder of the "
                "model that was trained, or its config.json, with --config"
            )
        if (problem := describe_foreign_link(path, path.parent)) is not None:
            raise CheckpointError(
                f"{path} is {problem}, and links of a checkpoint are not followed out of it; if it "
                f"is the right one, name it with --config {path.resolve()}"
            )
    return ModelFiles(_read_config(path), path.parent, _find_companions(path.parent))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise FormatError(
            f"{path} is no config of a model: it has no `model_type`; name the config.json of the "
            "model that was trained"
        )
    return content


def _find_companions(folder: Path) -> dict[str, Path]:
    found = {}
    for name in sorted(path.name for path in folder.iterdir()):
        path = folder / name
        is_one = any(fnmatchcase(name, pattern) for pattern in _COMPANIONS)
        is_foreign = describe_foreign_link(path, folder) is not None
        if (
            is_one
            and not is_foreign
            and path.is_file()
            and path.stat().st_size <= LARGEST_CARRIED_BYTES
        ):
            found[name] = path
    return found


def most_common_type(checkpoint: Checkpoint) -> DType | None:
    """The type that most bytes of floating-point tensors have; None where there are none."""
    sizes: Counter[DType] = Counter()
    for tensor in checkpoint.tensors.values():
        if is_castable(tensor.dtype):
            sizes[tensor.dtype] += tensor.size_bytes
    return max(sizes, key=lambda one: sizes[one]) if sizes else None


def with_dtype(config: Mapping[str, Any], dtype: DType | None) -> dict[str, Any]:
    """A config that says a type, under the key that it has for it.

    >>> from reshard.dtypes import dtype
    >>> with_dtype({"torch_dtype": "bfloat16"}, dtype("float32"))
    {'torch_dtype': 'float32'}
    """
    found = dict(config)
    if dtype is None:
        return found
    for key in [key for key in _DTYPE_KEYS if key in found] or ["torch_dtype"]:
        found[key] = dtype.name
    for key, part in found.items():
        # Parts of models of several kinds, such as `text_config`, have types of their own.
        if key.endswith("_config") and isinstance(part, Mapping):
            typed = {one: dtype.name for one in _DTYPE_KEYS if part.get(one) is not None}
            found[key] = {**part, **typed}
    return found


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """config.json, as transformers writes it."""
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
