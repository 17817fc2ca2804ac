"""Checkpoints that DeepSpeed's ranks saved, recorded by `tests/engines/deepspeed/record.py`."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden" / "engines" / "deepspeed"


def recorded() -> list[str]:
    """The names of all records."""
    return sorted(path.name.removesuffix(".tar.xz") for path in GOLDEN.glob("*.tar.xz"))


def unpack(name: str, folder: Path) -> Path:
    """Unpack one record; the folder with `latest`."""
    target = folder / name
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        archive.extractall(target, filter="data")
    return target


def read_digests(folder: Path, name: str) -> dict[str, Any]:
    """What a record says of tensors; empty where it says nothing."""
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else {}
