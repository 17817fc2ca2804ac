"""A small model on disk, of tensors that divide badly, and looks at what became of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

COLUMNS = {"to": "tp=2", "rules": ["*.weight=-, tp", "*=..."]}
ROWS = {"to": "tp=3", "rules": ["*.weight=tp, -", "*=..."]}


def write_model(folder: Path, rows: int = 1, layers: int = 16) -> Path:
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


def contents(folder: Path) -> dict[str, str] | None:
    """The digest of every file under `folder` by its name; None where there is no folder."""
    if not folder.exists():
        return None
    return {
        path.relative_to(folder).as_posix(): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
