"""Conversions of large tensors between formats, of which direct I/O has several blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoint.model_files import COLUMNS, ROWS, write_model
from reshard.checkpoint import convert


def make_large(folder: Path, layers: int) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Write the sources below a folder; each with the arguments of `plan_any`, by a name."""
    whole, rows, torch = folder / "whole", folder / "rows", folder / "torch"
    write_model(whole, layers=layers)
    convert(whole, rows, **ROWS)
    convert(whole, torch, format="torch-dcp", **ROWS)
    return {
        "shards to shards": (rows, COLUMNS),
        "shards to one file": (rows, {"to": "full"}),
        "shards to torch-dcp": (rows, {"format": "torch-dcp", **COLUMNS}),
        "torch-dcp to files": (torch, {"to": "full", "most_file_bytes": 2_000_000}),
    }
