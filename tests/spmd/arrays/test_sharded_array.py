"""What an array gives other libraries."""

from __future__ import annotations

from inspect import signature

import numpy as np
import pytest
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, spec

DATA = np.arange(12.0).reshape(4, 3)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_dlpack_takes_what_the_standard_says(library: str) -> None:
    names = signature(sp.ShardedArray.__dlpack__).parameters
    assert list(names)[1:] == ["stream", "max_version", "dl_device", "copy"]
    with sp.running(sp.in_process(library)):
        x = sp.array(DATA, spec(DeviceMesh.of(x=2), "x, -"))
    np.testing.assert_array_equal(torch.from_dlpack(x), DATA)
    np.testing.assert_array_equal(np.from_dlpack(x), DATA)
    assert x.__dlpack__(stream=None, dl_device=(1, 0), max_version=None, copy=None) is not None
    with pytest.raises(BufferError, match=r"dl_device \(2, 0\)"):
        x.__dlpack__(dl_device=(2, 0))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_copy_for_numpy_has_memory_of_its_own(library: str) -> None:
    with sp.running(sp.in_process(library)):
        x = sp.array(DATA, spec(DeviceMesh.of(x=2), "-, -"))
    np.array(x)[:] = -1
    np.array(x, copy=True)[:] = -1
    np.array(x, dtype=np.float64)[:] = -1
    np.testing.assert_array_equal(np.asarray(x), DATA)


def test_a_dimension_is_added_by_place_too() -> None:
    assert sp.expand_dims(sp.array(DATA), 0).shape == (1, 4, 3)
    assert sp.expand_dims(sp.array(DATA), axis=-1).shape == (4, 3, 1)
