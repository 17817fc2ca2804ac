"""Slices, masks and indices in arrays, on random shardings, against NumPy's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import reshard.spmd as sp
from conformance.test_array_api import any_spec
from reshard.errors import ArrayIndexError
from selection import choose


@given(st.data())
@settings(max_examples=choose(60, 200), deadline=None)
def test_indices(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6))
    array = np.arange(math.prod(shape)).reshape(shape)
    key = data.draw(hnp.basic_indices(shape, allow_newaxis=True))
    seed = data.draw(st.integers(0, 99))
    x = sp.array(array, any_spec(np.random.default_rng(seed), len(shape)))
    found, expected = x[key], array[key]
    assert found.shape == expected.shape and found.dtype.name == str(expected.dtype)
    np.testing.assert_array_equal(np.asarray(found), expected)


@given(st.data())
@settings(max_examples=choose(45, 150), deadline=None)
def test_masks(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    array = np.arange(math.prod(shape)).reshape(shape)
    masks = st.one_of(
        st.just(shape),
        st.integers(0, len(shape)).map(lambda count: shape[:count]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    )
    mask = data.draw(hnp.arrays(np.bool_, data.draw(masks)))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = sp.array(array, any_spec(random, len(shape)))
    for key in (mask, sp.array(mask, any_spec(random, mask.ndim))):
        try:
            expected = array[mask]
        except IndexError:
            with pytest.raises(ArrayIndexError, match="a mask of shape"):
                x[key]
        else:
            assert x[key].shape == expected.shape
            np.testing.assert_array_equal(np.asarray(x[key]), expected)


@given(st.data())
@settings(max_examples=choose(45, 150), deadline=None)
def test_indices_in_arrays(data: st.DataObject) -> None:
    """Whole numbers in arrays and alone for leading dimensions; one array anywhere."""
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5))
    array = np.arange(math.prod(shape)).reshape(shape)
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = sp.array(array, any_spec(random, len(shape)))
    lead = data.draw(hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=4))

    def places(size: int) -> np.ndarray:
        return np.asarray(random.integers(-size, size, size=lead))

    if data.draw(st.booleans()):
        count = data.draw(st.integers(1, len(shape)))
        key: list[Any] = [places(size) for size in shape[:count]]
        if count > 1 and data.draw(st.booleans()):
            key[-1] = int(random.integers(-shape[count - 1], shape[count - 1]))
    else:
        dim = data.draw(st.integers(0, len(shape) - 1))
        key = [data.draw(hnp.basic_indices((n,), min_dims=1, max_dims=1)) for n in shape]
        key = [one[0] if isinstance(one, tuple) else one for one in key]
        key = [slice(None) if one is Ellipsis else one for one in key]
        key[dim] = places(shape[dim])
        other = data.draw(st.sampled_from(["new axis", "the rest", "all before", "nothing"]))
        if other == "new axis":
            key.insert(data.draw(st.integers(0, len(key))), None)
        elif other == "the rest":
            key = [*key[: dim + 1], ...]
        elif other == "all before":
            key = [..., *key[dim:]]
    expected = array[tuple(key)]
    sharded = [
        sp.array(one, any_spec(random, one.ndim)) if isinstance(one, np.ndarray) else one
        for one in key
    ]
    for given_key in (key, sharded):
        found = x[tuple(given_key)]
        assert found.shape == expected.shape
        np.testing.assert_array_equal(np.asarray(found), expected)
