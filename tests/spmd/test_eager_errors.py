"""What cannot be asked of an eager array is said: the value, what was expected, what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import ArrayIndexError, ReshardError

MESH = DeviceMesh.of(x=2, y=3)
DATA = np.arange(35.0).reshape(7, 5)


def sharded(data: Any = DATA, library: str = "numpy") -> Any:
    text = ", ".join(["x", "y", *"----"][: np.ndim(data)])
    return sp.array(data, spec(MESH, text), runner=sp.in_process(library))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_narrow_floats_are_summed_wide(library: str) -> None:
    data = np.linspace(0, 6e4, 40).astype(np.float16)
    x = sharded(data, library)
    for axis in (None, 0):
        mean = sp.mean(x, axis=axis)
        assert mean.dtype.name == "float16"
        np.testing.assert_allclose(np.asarray(mean), data.astype(float).mean(), 1e-3)
        np.testing.assert_allclose(np.asarray(sp.std(x, axis=axis)), data.astype(float).std(), 1e-3)
    small = (data / np.float16(500)).astype(np.float16)
    variance = sp.var(sharded(small, library), correction=1)
    assert variance.dtype.name == "float16"
    np.testing.assert_allclose(np.asarray(variance), small.astype(float).var(ddof=1), 1e-3)


def test_variances_of_bfloat16_are_around_a_mean_that_is_not_rounded() -> None:
    x = sp.astype(sharded(np.array([1000, 1000, 1004] * 2, np.float32), "torch"), "bfloat16")
    assert sp.var(x).dtype.name == "bfloat16"
    assert abs(float(sp.var(x)) - 32 / 9) < 0.02


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (9, r"index 9 of a dimension of size 7; give one of -7 to 6"),
        (-8, r"index -8 .* -7 to 6"),
        ((0, 5), r"index 5 .* -5 to 4"),
        (np.array([1, 9]), r"index 9 .* -7 to 6"),
        ([1, -8], r"index -8 .* -7 to 6"),
        ((..., ...), r"2 times \.\.\. .* at most once"),
        ((0, 0, 0), r"3 indices for shape \[7, 5\]; give at most 2"),
        ((np.array([0]),) * 3, r"3 indices for shape \[7, 5\]; give at most 2"),
        (slice(None, None, 0), r"slice ::0 .* a step that is not 0"),
        (slice(1.5, 2), r"slice 1\.5:2: .* give whole numbers"),
    ],
)
def test_indices_that_are_not_there(key: Any, said: str) -> None:
    with pytest.raises(ArrayIndexError, match=said) as caught:
        sharded()[key]
    assert isinstance(caught.value, ReshardError)
    assert isinstance(caught.value, IndexError)


def test_an_array_is_iterated_to_its_end() -> None:
    assert len(list(sharded())) == 7


def test_indices_that_are_known_are_checked_along_cut_axes() -> None:
    for function in (sp.take, sp.take_along_axis):
        with pytest.raises(ArrayIndexError, match="index 7 of a dimension of size 7"):
            function(sharded(), np.array([[7]]), axis=0)
