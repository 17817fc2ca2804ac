"""What Megatron-core saved, recorded (`tests/engines/megatron_core/ranks.py`), unpacked.

Each recording has the same state, saved in several ways: by the name of how it was sharded, or as
`legacy`, the folders of ranks.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np

from reshard import checkpoint
from reshard.checkpoint.contents import Checkpoint

RECORDINGS = Path(__file__).resolve().parents[3] / "golden" / "megatron_checkpoints"


def unpack(name: str, folder: Path) -> Path:
    """The folder of a recording, with one folder for each way of saving."""
    target = folder / name
    if not target.exists():
        with tarfile.open(RECORDINGS / f"{name}.tar.xz") as archive:
            archive.extractall(target, filter="data")
    return target


def state_of(path: Path | Checkpoint) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint."""
    opened = path if isinstance(path, Checkpoint) else checkpoint.open(path)
    return {name: np.asarray(checkpoint.read_tensor(opened, name)) for name in opened}


def expect_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """The same tensors with the same bytes."""
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name
