"""A tiny Llama for first steps: weights and configuration as Hugging Face stores them.

This module needs only NumPy. It writes the same bytes on every machine and with every version of
NumPy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.formats.safetensors.header import number_kinds
from reshard.checkpoint.formats.safetensors.header_writer import check_header, place_rows
from reshard.checkpoint.formats.safetensors.huggingface import SINGLE_FILE
from reshard.checkpoint.storage.filesystem import translate_os_errors
from reshard.dtypes import dtype
from reshard.errors import UsageError

CONFIG_FILE = "config.json"

_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 160,
    "max_position_embeddings": 256,
    "mlp_bias": False,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 512,
}


def write_example_model(folder: str | Path) -> Path:
    """Write a tiny Llama with random weights into a folder, and return the folder.

    The folder gets `config.json` and `model.safetensors`, less than a megabyte. It is created with
    its parents if it does not exist. If writing fails, the files are removed.

    Args:
        folder: a new or an empty folder.

    Raises:
        UsageError: the path is a file, or a folder that is not empty.
        RunError: the system refuses to write.
    """
    folder = Path(folder)
    with translate_os_errors("write the example model", folder):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; give a new or an empty folder for the example")
        if folder.is_dir() and (names := sorted(path.name for path in folder.iterdir())):
            raise UsageError(
                f"{folder} is not empty (it has {names[0]!r}); give a new or an empty folder for "
                "the example"
            )
        folder.mkdir(parents=True, exist_ok=True)
        # The weights are renamed last, so that an interrupted run leaves a folder without weights.
        draft = folder / f".{SINGLE_FILE}.part"
        try:
            (folder / CONFIG_FILE).write_text(json.dumps(_CONFIG, indent=2) + "\n")
            with open(draft, "xb") as file:
                file.writelines(_weight_pieces())
            draft.rename(folder / SINGLE_FILE)
        except BaseException:
            draft.unlink(missing_ok=True)
            (folder / CONFIG_FILE).unlink(missing_ok=True)
            raise
    return folder


def _weight_pieces() -> Iterator[bytes]:
    """Yield the bytes of the safetensors file."""
    shapes = _shapes()
    names = tuple(shapes)
    kinds, kind = number_kinds((dtype("float32"), shape) for shape in shapes.values())
    (header,) = place_rows(names, np.arange(len(names)), kinds, kind, {"format": "pt"})
    check_header(header)
    yield from header.pieces()
    for row in header.rows.tolist():
        yield _values(row, shapes[names[row]]).astype("<f4").tobytes()


def _shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter, by its name in transformers."""
    hidden, inner, vocabulary = (
        _CONFIG[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    queries, keys = (
        _CONFIG[key] * _CONFIG["head_dim"] for key in ("num_attention_heads", "num_key_value_heads")
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(_CONFIG["num_hidden_layers"]):
        of_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": of_layer[name] for name in of_layer}
    return {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def _values(seed: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return ones for a norm, or random uniform values of the usual deviation for a matrix."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    # A bit generator's output is stable between versions of NumPy; the distributions may change.
    # 24 bits, which float32 represents exactly.
    bits = np.random.PCG64(seed).random_raw(math.prod(shape)) >> np.uint64(40)
    uniform: NDArray[np.float32] = bits.astype(np.float32)
    uniform = uniform / np.float32(2**24) - np.float32(0.5)
    # The deviation of a uniform distribution of width 1 is 1 / sqrt(12).
    scale = np.float32(math.sqrt(12) * _CONFIG["initializer_range"])
    values: NDArray[np.float32] = uniform * scale
    return values.reshape(shape)
