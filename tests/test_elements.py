"""Casts and 8-bit floats, against ml_dtypes and torch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from reshard.dtypes import dtype
from reshard.elements import cast_elements, cast_type, decode_float8, float8_values, round_to_e4m3fn
from reshard.errors import UsageError

SIGNED = {2: np.int16, 4: np.int32, 8: np.int64}


def bits_of(name: str) -> np.ndarray:
    """All patterns of 16 bits; of 32 and 64 those around where 16-bit types round, and others."""
    random = np.random.default_rng(0)
    if dtype(name).itemsize_bytes == 2:
        return np.arange(1 << 16, dtype=np.uint16)
    if name == "float64":
        values = random.standard_normal(1 << 16) * 10.0 ** random.integers(-320, 300, 1 << 16)
        return values.view(np.uint64)
    near = np.arange(1 << 18, dtype=np.uint32) << 14
    anything = random.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    return np.concatenate([near - 1, near, near + 1, anything])


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32"])
def test_bits_are_those_of_torch(source: str, target: str) -> None:
    bits = bits_of(source)
    found = np.empty(len(bits), dtype=dtype(target).storage)
    counts = cast_elements(bits, dtype(source), found, dtype(target))
    values = torch.from_numpy(bits.view(SIGNED[bits.itemsize])).view(getattr(torch, source))
    expected = values.to(getattr(torch, target))
    own = torch.from_numpy(found.view(SIGNED[found.itemsize])).view(getattr(torch, target))
    is_nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(own), is_nan)
    # Signs of zeros too, so bits are compared and not numbers.
    width = getattr(torch, f"int{found.itemsize * 8}")
    assert torch.equal(own.view(width)[~is_nan], expected.view(width)[~is_nan])
    if source != target:
        assert counts.not_finite == int((~torch.isfinite(values)).sum())
        assert counts.overflowed == int((torch.isinf(expected) & torch.isfinite(values)).sum())


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32"])
def test_float64_is_rounded_once(target: str) -> None:
    """By integers: each result is the nearest of the exact value's neighbours."""
    bits = bits_of("float64")
    values = bits.view(np.float64)
    found = np.empty(len(bits), dtype=dtype(target).storage)
    cast_elements(bits, dtype("float64"), found, dtype(target))
    kind = dtype(target).numpy
    own = found.view(kind)
    with np.errstate(all="ignore"):
        if target != "bfloat16":
            assert np.array_equal(found, values.astype(kind).view(found.dtype))
        finite = np.isfinite(own.astype(np.float64))
        error = np.abs(own.astype(np.float64) - values)
        for step in (1, -1):
            other = (found.astype(np.int64) + step).astype(found.dtype).view(kind)
            is_worse = np.abs(other.astype(np.float64) - values) >= error
            assert (is_worse | ~finite | np.isnan(other.astype(np.float64))).all()


def test_integers_are_not_cast() -> None:
    with pytest.raises(UsageError, match="elements of int8 cannot be cast"):
        cast_elements(np.zeros(1, np.uint8), dtype("int8"), np.zeros(1, np.uint16), dtype("F16"))


def test_ml_dtypes_agrees() -> None:
    bits = bits_of("float32")
    found = np.empty(len(bits), dtype=np.uint16)
    cast_elements(bits, dtype("float32"), found, dtype("bfloat16"))
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert np.array_equal(found[~np.isnan(values)], expected[~np.isnan(values)])


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_types_have_the_names_of_pytorch_and_config_json(name: object) -> None:
    assert cast_type(name).name == "bfloat16"


@pytest.mark.parametrize("name", ["fp8", "float8_e4m3fn", "torch.int8", "auto"])
def test_other_types_name_the_option_that_quantizes(name: str) -> None:
    with pytest.raises(UsageError, match="--quantize fp8-block128"):
        cast_type(name)


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
    with pytest.raises(UsageError, match="the values of float8_e3m4 are unknown"):
        float8_values("float8_e3m4")
