"""Files of a model folder other than weights, and weights that are stored once.

config.json and the tokenizer's files are taken from the folder that the user names. The default is
the checkpoint's folder, or else the folder `huggingface` in or next to it, which verl writes, or
the parent folder. config.json is written with the dtype of the weights, and specifies whether they
are tied.

If config.json ties the output layer to the input embedding and the checkpoint has both, they are
compared block by block. If they are equal, the output layer is left out. If they differ, the model
was not tied: both are kept, and config.json is changed accordingly.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from reshard.checkpoint.comparison import compare
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.opening import MAX_CARRIED_BYTES, MODEL_FILES
from reshard.checkpoint.storage.filesystem import read_json_file
from reshard.checkpoint.storage.permissions import describe_foreign_link
from reshard.checkpoint.storage.remote_paths import as_path
from reshard.dtypes import DType
from reshard.elements import is_castable
from reshard.errors import CheckpointError, FormatError, UsageError
from reshard.text import count_text

CONFIG = "config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")
# A model may come with code, which is copied too. A conversion never deletes code.
_COMPANIONS = (*MODEL_FILES, "*.py")


class ModelFiles(NamedTuple):
    """The config of a model, its folder, and the files next to it by their names."""

    config: dict[str, Any]
    folder: Path
    companions: dict[str, Path]


def find_model_files(
    checkpoint: Checkpoint, config: str | os.PathLike[str] | None = None
) -> ModelFiles:
    """Return the config of a checkpoint's model, and the files next to it.

    Args:
        checkpoint: the checkpoint whose folder is searched.
        config: a folder with config.json, or the path of a config.json.

    Raises:
        UsageError: a value that is not a path.
        CheckpointError: no config.json.
        FormatError: a config.json that is not a JSON object, or does not name a type of model.
    """
    if config is not None:
        if not isinstance(config, str | os.PathLike):
            raise UsageError(f"a config {config!r}; give the path of a folder or of config.json")
        path = as_path(config)
        path = path / CONFIG if path.is_dir() else path
        if not path.is_file():
            raise CheckpointError(
                f"no config.json at {config}; name the folder of the model that was trained, or "
                "its config.json"
            )
    else:
        folder = checkpoint.folder
        places = (folder, folder / "huggingface", folder.parent / "huggingface", folder.parent)
        path = next(
            (location / CONFIG for location in places if (location / CONFIG).is_file()), Path()
        )
        if not path.name:
            raise CheckpointError(
                f"no config.json in {folder}, which describes the model; name the folder of the "
                "model that was trained, or its config.json, with --config"
            )
        if (problem := describe_foreign_link(path, path.parent)) is not None:
            raise CheckpointError(
                f"{path} is {problem}, and links of a checkpoint are not followed out of it; if it "
                f"is the right one, name it with --config {path.resolve()}"
            )
    return ModelFiles(_read_config(path), path.parent, _find_companions(path.parent))


def _read_config(path: Path) -> dict[str, Any]:
    content = read_json_file(path)
    if content is None or not isinstance(content.get("model_type"), str):
        raise FormatError(
            f"{path} is no config of a model: it has no `model_type`; name the config.json of the "
            "model that was trained"
        )
    return content


def _find_companions(folder: Path) -> dict[str, Path]:
    result = {}
    for name in sorted(path.name for path in folder.iterdir()):
        path = folder / name
        # The config is not copied but written anew.
        is_known = name != CONFIG and any(fnmatchcase(name, pattern) for pattern in _COMPANIONS)
        if (
            is_known
            and describe_foreign_link(path, folder) is None
            and path.is_file()
            and path.stat().st_size <= MAX_CARRIED_BYTES
        ):
            result[name] = path
    return result


def most_common_type(checkpoint: Checkpoint) -> DType | None:
    """Return the type of most bytes of floating-point tensors, or None without such tensors."""
    sizes: Counter[DType] = Counter()
    for tensor in checkpoint.tensors.values():
        if is_castable(tensor.dtype):
            sizes[tensor.dtype] += tensor.size_bytes
    return max(sizes, key=lambda item: sizes[item]) if sizes else None


def with_dtype(config: Mapping[str, Any], dtype: DType | None) -> dict[str, Any]:
    """Return a config with a dtype, under the key that the config uses for it.

    >>> from reshard.dtypes import dtype
    >>> with_dtype({"torch_dtype": "bfloat16"}, dtype("float32"))
    {'torch_dtype': 'float32'}
    """
    result = dict(config)
    if dtype is None:
        return result
    # All versions of transformers read `torch_dtype`; only late ones read `dtype`.
    for key in [key for key in _DTYPE_KEYS if key in result] or ["torch_dtype"]:
        result[key] = dtype.name
    for key, part in result.items():
        # Parts of a multimodal model, such as `text_config`, have their own types.
        if key.endswith("_config") and isinstance(part, Mapping):
            typed = {item: dtype.name for item in _DTYPE_KEYS if part.get(item) is not None}
            result[key] = {**part, **typed}
    return result


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """Return the bytes of config.json, as transformers writes it."""
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


TIE = "tie_word_embeddings"
# Names of output layers, and of input embeddings, after any prefix of the architecture.
_OUTPUT = re.compile(
    r"(.*\.)?(lm_head|embed_out|proj_out|predictions\.decoder|lm_head\.decoder|"
    r"generator_lm_head|vocab_projector|decoder)\.weight"
)
_INPUT = re.compile(
    r"(.*\.)?(embed_tokens|wte|word_embeddings|embed_in|shared|embeddings|tok_embeddings)\.weight"
)


def store_tied_once(
    checkpoint: Checkpoint, config: Mapping[str, Any]
) -> tuple[Checkpoint, dict[str, Any], list[str]]:
    """Return the checkpoint without output layers that are equal to their embeddings.

    Also return a config that specifies whether they are tied, and notes.

    Raises:
        RunError: a file that cannot be read.
    """
    written = dict(config)
    if not is_tied(config):
        return checkpoint, written, []
    outputs = [name for name in checkpoint.tensors if _OUTPUT.fullmatch(name)]
    inputs = [name for name in checkpoint.tensors if _INPUT.fullmatch(name)]
    dropped, differing = [], []
    for output in outputs:
        alike = [input_ for input_ in inputs if _are_alike(checkpoint, output, input_)]
        if not alike:
            continue
        if any(_are_equal(checkpoint, output, member) for member in alike):
            dropped.append(output)
        else:
            differing.append((output, alike[0]))
    notes = []
    if dropped:
        notes.append(
            f"{', '.join(dropped)} left out: the same as the embedding, which config.json ties it "
            "to"
        )
    if differing:
        output, tied = differing[0]
        notes.append(
            f"config.json ties {output} to {tied}, and they differ: both are written, and its "
            f"{TIE} is false"
        )
        _set_tie(written)
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in dropped}
    checksums = tuple(
        checksum for checksum in checkpoint.checksums if checksum.tensor not in dropped
    )
    return checkpoint.replace(tensors=tensors, checksums=checksums), written, notes


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether a config ties the output layer to the input embedding.

    >>> is_tied({"text_config": {"tie_word_embeddings": True}})
    True
    """
    texts = config.get("text_config")
    for item in (config, texts if isinstance(texts, Mapping) else {}):
        if TIE in item:
            return item[TIE] is True
    return False


def describe_missing_output(checkpoint: Checkpoint, config: Mapping[str, Any]) -> str | None:
    """Describe a missing output layer of a causal model that config.json does not tie."""
    texts = config.get("text_config")
    ties = [item[TIE] for item in (config, texts) if isinstance(item, Mapping) and TIE in item]
    architectures = config.get("architectures")
    is_causal = isinstance(architectures, list) and any(
        str(architecture).endswith("ForCausalLM") for architecture in architectures
    )
    if not is_causal or not ties or ties[0] is not False:
        return None
    if any(_OUTPUT.fullmatch(name) for name in checkpoint.tensors):
        return None
    return (
        f"{checkpoint.folder} has no output layer (lm_head.weight) in "
        f"{count_text(len(checkpoint), 'weight')}, and config.json does not tie it to the "
        f"embedding ({TIE} is false); if it is tied, say so in config.json, else the checkpoint is "
        "incomplete"
    )


def _set_tie(config: dict[str, Any]) -> None:
    texts = config.get("text_config")
    if TIE in config or not isinstance(texts, Mapping):
        config[TIE] = False
    if isinstance(texts, Mapping) and TIE in texts:
        config["text_config"] = {**texts, TIE: False}


def _are_alike(checkpoint: Checkpoint, first: str, other: str) -> bool:
    a, b = checkpoint.tensors[first], checkpoint.tensors[other]
    return first != other and (a.dtype, a.shape) == (b.dtype, b.shape)


def _are_equal(checkpoint: Checkpoint, first: str, other: str) -> bool:
    """Return whether two tensors have the same bytes."""
    a, b = checkpoint.tensors[first], checkpoint.tensors[other]
    if a.binding == b.binding:
        return True
    # Recorded digests avoid reading the tensors.
    if a.digest is not None and b.digest is not None:
        return a.digest.tensor == b.digest.tensor
    left, right = (
        checkpoint.replace(
            tensors={"": tensor.replace(name="")},
            items={},
            values={},
            checksums=(),
        )
        for tensor in (a, b)
    )
    return compare(left, right).is_same
