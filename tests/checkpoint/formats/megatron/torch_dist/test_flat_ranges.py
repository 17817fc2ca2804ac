"""Flat ranges of blocks, as Megatron-core to 0.15 keeps them (`fully_sharded_model_space`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reshard import checkpoint
from reshard.binding import Binding, FileRange
from reshard.checkpoint.contents import Checkpoint, StoredFile, StoredTensor
from reshard.checkpoint.formats.megatron.torch_dist.flat_ranges import bind_flat_ranges
from reshard.dtypes import dtype
from reshard.errors import FormatError
from reshard.layout import Box, Layout

KEY = "nd_reformulated_orig_global_shape"


def flat_tensor(folder: Path, whole: np.ndarray) -> tuple[StoredTensor, Checkpoint]:
    """A tensor of (4, 6) in two blocks of rows, of which the first is shared by two ranks."""
    flat = whole.reshape(2, 1, 12)
    boxes = [
        (0, Box((0, 0, 0), (1, 1, 7))),
        (0, Box((1, 0, 0), (2, 1, 12))),
        (1, Box((0, 0, 7), (1, 1, 12))),
    ]
    addresses: dict[int, list[FileRange]] = {0: [], 1: []}
    content = b""
    for rank, box in boxes:
        addresses[rank].append(FileRange("data", len(content)))
        index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        content += flat[index].tobytes()
    (folder / "data").write_bytes(content)
    binding = Binding(
        Layout.from_boxes((2, 1, 12), boxes, 2), {r: tuple(a) for r, a in addresses.items()}, {}
    )
    tensor = StoredTensor("w", dtype("float32"), binding)
    files = (StoredFile("data", len(content), 0),)
    return tensor, Checkpoint(folder, "torch-dist", {"w": tensor}, files)


def test_ranges_are_boxes_of_the_parameter(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensor, _ = flat_tensor(tmp_path, whole)
    bound = bind_flat_ranges(tensor, {KEY: (4, 6)})
    assert bound.shape == (4, 6)
    files = (StoredFile("data", 96, 0),)
    found = checkpoint.read_tensor(Checkpoint(tmp_path, "torch-dist", {"w": bound}, files), "w")
    assert np.array_equal(found, whole)


def test_blocks_that_do_not_make_the_shape(tmp_path: Path) -> None:
    tensor, _ = flat_tensor(tmp_path, np.zeros((4, 6), np.float32))
    with pytest.raises(FormatError, match="they do not make the shape"):
        bind_flat_ranges(tensor, {KEY: (4, 5)})
    # Of a tensor that was not flattened, nothing is said.
    assert bind_flat_ranges(tensor, {}) is tensor
