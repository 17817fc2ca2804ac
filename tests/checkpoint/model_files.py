"""A small model on disk, of tensors that divide badly, and looks at what became of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

COLUMNS = {"to": "tp=2", "rules": ["*.weight=-, tp", "*=..."]}
ROWS = {"to": "tp=3", "rules": ["*.weight=tp, -", "*=..."]}


def write_model(folder: Path, rows: int = 1, layers: int = 6) -> Path:
    """A checkpoint of one file: `rows` of 1,100,000 numbers, and layers of some 100 KB."""
    random = np.random.default_rng(rows)
    tensors = {
        f"layers.{layer}.weight": random.standard_normal((90 + layer, 301), dtype=np.float32)
        for layer in range(layers)
    }
    tensors |= {f"layers.{layer}.bias": np.arange(layer, dtype=np.int64) for layer in range(layers)}
    tensors["embedding.weight"] = random.standard_normal((rows, 1_100_000), dtype=np.float32)
    tensors["scale"] = np.array(3.0)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "small"}')
    (folder / "inner").mkdir()
    (folder / "inner" / "tokenizer.txt").write_text("words")
    return folder


def write_llama(folder: Path) -> Path:
    """A very small Llama: eight heads of queries, two of keys and values."""
    random = np.random.default_rng(7)
    shapes = {"model.embed_tokens.weight": (50, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{one}_proj.weight": (16, 16) for one in "qo"}
        shapes |= {f"{at}.self_attn.{one}_proj.weight": (4, 16) for one in "kv"}
        shapes |= {f"{at}.mlp.{one}_proj.weight": (24, 16) for one in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (16, 24)
        shapes |= {f"{at}.{one}_layernorm.weight": (16,) for one in ("input", "post_attention")}
    shapes["lm_head.weight"] = (50, 16)
    folder.mkdir(parents=True)
    tensors = {name: random.standard_normal(one, np.float32) for name, one in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 16,
        "vocab_size": 50,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def contents(folder: Path) -> dict[str, str] | None:
    """The digest of every file under `folder` by its name; None where there is no folder."""
    if not folder.exists():
        return None
    return {
        path.relative_to(folder).as_posix(): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
