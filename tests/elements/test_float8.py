"""Tables of 8-bit types and rounding to them, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reshard.dtypes import dtype
from reshard.elements.float8 import decode_float8, float8_values, round_to_e4m3fn
from reshard.errors import UsageError

TYPES = [
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]


@pytest.mark.parametrize("name", TYPES)
def test_values_are_those_of_torch(name: str) -> None:
    patterns = torch.arange(256, dtype=torch.uint8)
    expected = patterns.view(getattr(torch, name)).float().numpy()
    assert np.array_equal(float8_values(name), expected, equal_nan=True)
    assert np.array_equal(decode_float8(patterns.numpy(), dtype(name)), expected, equal_nan=True)


def test_rounding_is_that_of_torch() -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    near = np.arange(1 << 16, dtype=np.uint32) << 16
    values = np.concatenate([bits, near, near - 1, near + 1]).view(np.float32)
    values = np.concatenate([values, random.standard_normal(1 << 16).astype(np.float32) * 100])
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    found, is_nan = round_to_e4m3fn(values), np.isnan(values)
    assert np.array_equal(found[~is_nan], expected[~is_nan])
    assert (found[is_nan] & 0x7F == 0x7F).all()
    assert round_to_e4m3fn(values[:6].reshape(2, 3)).shape == (2, 3)


def test_unknown_types_are_refused() -> None:
    with pytest.raises(UsageError, match="no values are known of float8_e3m4"):
        float8_values("float8_e3m4")
