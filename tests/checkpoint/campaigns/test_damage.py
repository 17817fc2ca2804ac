"""Checkpoints of every kind, cut off, incomplete or hostile: an error that says so, or no change.

Changed bytes and fields are in the campaign `mutations` (`tools/soak`).
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.campaigns.small_checkpoints import SOURCES, Source
from reshard.checkpoint import Checkpoint, read_tensor
from reshard.errors import ReshardError
from selection import choose, keep_first_of

# Files without which a checkpoint is another, and whole as far as anyone can tell: the last rank's,
# the state of an optimizer that only one file has, chunks that would be of one value.
ALONE = {
    "vLLM": ["model-rank-1-part-0.safetensors"],
    "Megatron ranks by buckets": ["distrib_optim.pt"],
    "Orbax zarr": ["0", "0.0", "0.1", "1.0", "1.1"],
}
MAX_FILES = 8
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


ONE_OF_EACH_FORMAT = keep_first_of(
    lambda source: source.format,
    SOURCES,
    "another checkpoint of a format that a default case damages",
)


def read(opened: Checkpoint) -> dict[str, Any]:
    """All elements, bit for bit."""
    return {
        name: (one.dtype, one.shape, read_tensor(opened, name).tobytes())
        for name, one in opened.tensors.items()
    }


def expect_error_or(expected: dict[str, Any], source: Source, path: Path) -> bool:
    """Read what was damaged; whether it is refused. What is not, is as it was."""
    with contextlib.suppress(ReshardError):
        assert read(source.open(path)) == expected
        return False
    return True


@pytest.mark.parametrize("source", ONE_OF_EACH_FORMAT, ids=lambda one: one.name)
def test_files_that_end_early_or_are_gone(source: Source, tmp_path: Path) -> None:
    path = source.make(tmp_path)
    expected = read(source.open(path))
    files = sorted(one for one in path.rglob("*") if one.is_file())
    refused = 0
    # Of many files some, spread over them.
    for file in files[:: 1 + len(files) // MAX_FILES]:
        content = file.read_bytes()
        for size in {5, len(content) // 3, len(content) - 1}:
            if 0 <= size < len(content):
                file.write_bytes(content[:size])
                refused += expect_error_or(expected, source, path)
        file.unlink()
        if file.name not in ALONE.get(source.name, ()):
            refused += expect_error_or(expected, source, path)
        file.write_bytes(content)
    assert refused >= 2
    assert read(source.open(path)) == expected


class Hostile:
    """What makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def save(state: Any, **options: Any) -> bytes:
    """What `torch.save` writes."""
    made = io.BytesIO()
    torch.save(state, made, **options)
    return made.getvalue()


@pytest.mark.parametrize("source", ONE_OF_EACH_FORMAT, ids=lambda one: one.name)
def test_pickles_that_run_something(source: Source, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    path = source.make(tmp_path / "made")
    ran = Hostile(tmp_path / "ran")
    state = {"w": torch.ones(3), "b": ran, "model": {"x": ran}}
    contents = [save(state), save(state, _use_new_zipfile_serialization=False), pickle.dumps(state)]
    files = sorted(one for one in path.rglob("*") if one.is_file())
    for file in files[:: 1 + len(files) // choose(3, MAX_FILES)]:
        content = file.read_bytes()
        for hostile in contents:
            file.write_bytes(hostile)
            # What is left of it may be read.
            with contextlib.suppress(ReshardError):
                read(source.open(path))
            assert not ran.folder.exists()
        file.write_bytes(content)
    pickle.loads(pickle.dumps(ran))
    assert ran.folder.exists()
