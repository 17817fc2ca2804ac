"""A tensor in memory is the tensor that was cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import (
    TAGGED,
    Tensor,
    cuts,
    small_folder,
    tensor,
    tensors,
    write_file,
    write_ranks,
)
from reshard import checkpoint
from reshard.dtypes import DType
from reshard.errors import CheckpointError


@given(st.data(), tensors(), st.sampled_from([16, 64, 4 << 20]))
def test_tensors_are_put_together(
    data: st.DataObject, whole: dict[str, Tensor], block_bytes: int
) -> None:
    mesh, specs = data.draw(cuts(whole))
    with small_folder(block_bytes) as folder:
        write_ranks(folder / "cut", whole, mesh, specs)
        found = checkpoint.open(folder / "cut")
        for name, expected in whole.items():
            array = checkpoint.read_tensor(found, name)
            assert array.shape == expected.shape
            assert array.tobytes() == expected.bits.tobytes()


@pytest.mark.parametrize("dtype", TAGGED, ids=str)
def test_types(tmp_path: Path, dtype: DType) -> None:
    whole = tensor(dtype.name, (3, 5), 1)
    write_file(tmp_path / "model.safetensors", {"w": whole})
    array = checkpoint.read_tensor(checkpoint.open(tmp_path), "w")
    assert array.dtype == dtype.numpy
    assert array.tobytes() == whole.bits.tobytes()


def test_an_array_is_the_callers_own(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (3, 5), 1)})
    found = checkpoint.open(tmp_path)
    array = checkpoint.read_tensor(found, "w")
    array[...] = 0
    assert np.any(checkpoint.read_tensor(found, "w").view(np.uint32) != 0)


def test_an_unknown_name(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (3, 5), 1)})
    with pytest.raises(CheckpointError, match="no tensor 'v' in"):
        checkpoint.read_tensor(checkpoint.open(tmp_path), "v")
