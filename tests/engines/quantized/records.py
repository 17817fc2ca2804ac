"""Records of quantised weights, in `tests/golden/engines/quantized`, and models made of them.

A record has a weight's stored tensors as `X` with the ends of their names, `values` that its
library makes of them, and in its metadata `quantization_config` and the versions of the libraries.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import reshard.checkpoint
from reshard.recipes import Recipe, Rule

RECORDS = Path(__file__).parents[2] / "golden" / "engines" / "quantized"
Tensors = dict[str, torch.Tensor]
NAME = "layers.0.up_proj"


class Record(NamedTuple):
    """What a library made: stored tensors by the ends of their names, config, values."""

    stored: Tensors
    config: dict[str, Any]
    values: torch.Tensor


def read_record(name: str) -> Record:
    """The record of a format."""
    path = RECORDS / f"{name}.safetensors"
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
    tensors = load_file(path)
    values = tensors.pop("values")
    return Record({end.removeprefix("X"): one for end, one in tensors.items()}, config, values)


def record_names() -> list[str]:
    """The formats that are recorded."""
    return sorted(path.stem for path in RECORDS.glob("*.safetensors"))


def write_record(name: str, record: Record, versions: dict[str, str]) -> None:
    """Keep what a library made."""
    tensors = {f"X{end}": one.contiguous() for end, one in record.stored.items()}
    metadata = {
        "quantization_config": json.dumps(record.config, sort_keys=True),
        "versions": json.dumps(versions, sort_keys=True),
    }
    RECORDS.mkdir(parents=True, exist_ok=True)
    tensors["values"] = record.values.contiguous()
    save_file(tensors, RECORDS / f"{name}.safetensors", metadata)


def write_model(folder: Path, stored: Tensors, config: dict[str, Any]) -> Path:
    """A checkpoint with the stored tensors of one weight, `NAME`."""
    folder.mkdir(parents=True)
    tensors = {NAME + end: one.clone() for end, one in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def cut_record(folder: Path, record: Record, dimension: int, parts: int) -> list[Tensors]:
    """What each rank stores of a record that is cut along a dimension by a recipe.

    Ranks that have nothing of the weight are left out.
    """
    items = ["-"] * record.values.ndim
    items[dimension] = "tp@{feed_forward}"
    rules = (Rule(f"{NAME}*", ", ".join(items)),)
    recipe = Recipe("records", "", (), ("tp",), rules, cuts={"feed_forward": "ceil"})
    model = write_model(folder / "model", record.stored, record.config)
    reshard.checkpoint.convert(model, folder / "cut", to=f"tp={parts}", recipe=recipe)
    opened = reshard.checkpoint.open(folder / "cut")
    layouts = {name: tensor.layout for name, tensor in opened.tensors.items()}
    ranks = []
    for rank in range(parts):
        shapes = {name: layout.local_shape(rank) for name, layout in layouts.items()}
        if any(shape is None or 0 in shape for shape in shapes.values()):
            continue
        # Bare elements, which need no package that calculates with them.
        arrays = {
            name: np.empty(shape, dtype=opened[name].dtype.storage)
            for name, shape in shapes.items()
            if shape is not None
        }
        reshard.checkpoint.load(opened, layouts, rank, out=arrays)
        ranks.append(
            {
                name.removeprefix(NAME): torch.frombuffer(
                    bytearray(array.tobytes()), dtype=getattr(torch, opened[name].dtype.name)
                ).reshape(array.shape)
                for name, array in arrays.items()
            }
        )
    return ranks
