"""Checkpoints that DeepSpeed's ranks saved, recorded by `tests/engines/deepspeed/record.py`."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden" / "engines" / "deepspeed"
#: Steps of one model by DeepSpeed and by FSDP2, recorded by `tests/engines/training/record.py`.
STEPS_OF_BOTH = GOLDEN.parent / "training" / "steps.tar.xz"


def recorded() -> list[str]:
    """The names of all records."""
    return sorted(path.name.removesuffix(".tar.xz") for path in GOLDEN.glob("*.tar.xz"))


def unpack(name: str, folder: Path) -> Path:
    """Unpack one record; the folder with `latest`."""
    return unpack_archive(GOLDEN / f"{name}.tar.xz", folder / name)


def unpack_archive(path: Path, folder: Path) -> Path:
    """Unpack an archive into a folder."""
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    return folder


def read_digests(folder: Path, name: str) -> dict[str, Any]:
    """What a record says of tensors; empty where it says nothing."""
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else {}
