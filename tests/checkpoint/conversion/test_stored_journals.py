"""Journals of conversions that an earlier version began: the same conversion continues them.

Each was left by a run that was killed. A conversion continues a journal that has its own
description; all of that but the place and time of the source is compared here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.blocks.block_io import open_sources
from reshard.checkpoint.conversion.journal import read_journal

JOURNALS = Path(__file__).parents[2] / "golden" / "journals"
WHOLE = {
    "layers.0.weight": tensor("float32", (16, 12), 1),
    "layers.0.bias": tensor("bfloat16", (33,), 2),
    "step": tensor("int64", (), 3),
}
# When these journals were written, tensors that no rule matches were copied, and copies of ranks
# were stored once unless `every` was asked for.
COPIED = {"allow": ["unknown"], "replicas": "once"}
HALVES = {"to": "tp=2", "rules": ["*.weight=tp, -"], **COPIED}
ARCHIVES = {"to": "tp=2", "rules": ["*.weight=-, tp"], "format": "torch-dcp", **COPIED}
SHARDS = {
    "to": "dp=2,tp=2",
    "rules": ["*.weight=tp, dp", "*.bias=tp"],
    **COPIED,
    "replicas": "every",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_file(path, WHOLE, {"format": "pt", "trained by": "me"})
    return path


def without_places(description: dict[str, Any]) -> dict[str, Any]:
    files = description["source files"].values()
    sizes = [(file["name"], file["size_bytes"]) for file in files]
    return {**description, "source": None, "source files": sizes}


@pytest.mark.parametrize(
    ("name", "source", "asked"),
    [
        ("shards", {}, SHARDS),
        ("whole", HALVES, {"to": "full", "most_file_bytes": 100}),
        ("archives", HALVES, {**ARCHIVES, "to": "tp=3"}),
        ("from-archives", ARCHIVES, {"to": 3, "replicas": "once"}),
    ],
)
def test_a_conversion_is_described_as_it_was(
    model: Path,
    tmp_path: Path,
    small_blocks: int,
    name: str,
    source: dict[str, Any],
    asked: dict[str, Any],
) -> None:
    if source:
        checkpoint.convert(model, tmp_path / "source", **source)
        model = tmp_path / "source"
    conversion = checkpoint.plan_conversion(model, tmp_path / "target", **asked)
    files = open_sources(conversion.source)
    description = json.loads(json.dumps(conversion.description(files)))
    files.close()
    record = read_journal(JOURNALS / f"{name}.journal")
    assert record is not None
    assert without_places(description) == without_places(record.description)
    assert len(record.finished.blocks) >= 8
    assert record.commit is None
