"""One object for every type, whatever it is called."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from reshard.dtypes import ALL_DTYPES, DType, dtype
from reshard.errors import MissingExtraError, UsageError

NAMES = [known.name for known in ALL_DTYPES]
TORCH_NAMES = [name for name in NAMES if isinstance(getattr(torch, name, None), torch.dtype)]

# The tags of the safetensors package and the torch types it reads them as.
TAGS = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}


@pytest.mark.parametrize("name", NAMES)
def test_every_type_has_one_object_and_one_width(name: str) -> None:
    if name == "complex32" and not hasattr(ml_dtypes, name):
        pytest.skip("this ml_dtypes has no complex32")
    value = dtype(name)
    assert value.name == name == str(value)
    assert dtype(value) is value
    assert value.storage.itemsize == value.itemsize_bytes == value.numpy.itemsize
    assert dtype(value.numpy) is value
    assert dtype(value.numpy.type) is value


@pytest.mark.parametrize("name", NAMES)
def test_copies_are_the_same_object(name: str) -> None:
    value = dtype(name)
    assert pickle.loads(pickle.dumps(value)) is value
    assert copy.copy(value) is value
    assert copy.deepcopy(value) is value


@pytest.mark.parametrize(("tag", "torch_dtype"), TAGS.items())
def test_safetensors_tags_mean_what_the_package_reads(tag: str, torch_dtype: torch.dtype) -> None:
    value = dtype(tag)
    assert value.safetensors_tag == tag
    assert value is dtype(torch_dtype)
    assert value.itemsize_bytes == torch_dtype.itemsize


def test_no_tag_is_left_out_and_none_is_used_twice() -> None:
    tags = [known.safetensors_tag for known in ALL_DTYPES if known.safetensors_tag is not None]
    assert sorted(tags) == sorted(TAGS)
    assert len(set(NAMES)) == len(NAMES)


def test_torch_types_are_found_by_their_text() -> None:
    assert len(TORCH_NAMES) >= 21
    for name in TORCH_NAMES:
        assert dtype(getattr(torch, name)) is dtype(name)
    assert dtype(torch.long) is dtype("int64")


@pytest.mark.parametrize("name", NAMES)
def test_storage_copies_and_compares_bits(name: str) -> None:
    value = dtype(name)
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 256, 12 * value.itemsize_bytes, dtype=np.uint8)
    raw[: 2 * value.itemsize_bytes] = 0xFF  # not a number in most types, and equal as bits
    source = raw.view(value.storage).reshape(3, 4)
    target = np.empty((4, 3), value.storage)
    target[:] = source.T
    assert np.array_equal(target.T, source)
    assert target.T.tobytes() == raw.tobytes()


def test_bool_is_taken_and_other_python_types_are_refused() -> None:
    assert dtype(bool) is dtype("bool")
    for python_type in (int, float, complex):
        with pytest.raises(UsageError, match=f"dtype {python_type.__name__}: .*different"):
            dtype(python_type)


@pytest.mark.parametrize(
    "value",
    [
        "F4",
        "F6_E2M3",
        "F6_E3M2",
        "int4",
        "uint1",
        "nf4",
        "quint4x2",
        ml_dtypes.int4,
        np.dtype(ml_dtypes.uint2),
        ml_dtypes.float4_e2m1fn,
        torch.float4_e2m1fn_x2,
        torch.uint7,
    ],
)
def test_types_narrower_than_a_byte_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="not supported, its elements are not whole bytes"):
        dtype(value)


@pytest.mark.parametrize("text", [">f4", ">i8", ">c8"])
def test_the_other_byte_order_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="bytes are in the other order"):
        dtype(np.dtype(text))


@pytest.mark.parametrize(
    ("value", "near"),
    [("float23", "float32"), ("bf16", "BF16"), ("f16", "F16"), ("Int64", "int64"), ("F3", "F32")],
)
def test_an_unknown_name_lists_near_ones(value: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"'{value}': unknown.*{near}"):
        dtype(value)


def test_a_name_near_nothing_lists_all() -> None:
    with pytest.raises(UsageError, match=r"Known types: bool, int8, .*float8_e8m0fnu"):
        dtype("???")


@pytest.mark.parametrize(
    "value",
    [
        "",
        "void128",
        "object",
        np.dtype(object),
        np.dtype("V16"),
        np.dtype("datetime64[s]"),
        str,
        np.dtype([("a", "f4")]),
        np.longdouble,
        torch.quint8,
        np.floating,
        dict,
    ],
)
def test_types_that_are_no_numbers_are_unknown(value: object) -> None:
    with pytest.raises(UsageError, match="unknown"):
        dtype(value)


@pytest.mark.parametrize("value", [None, 4, np.zeros(3), torch.zeros(3), ["float32"], b"float32"])
def test_values_that_name_no_type_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="expected a name such as"):
        dtype(value)


def test_a_value_whose_storage_does_not_fit_cannot_be_built() -> None:
    with pytest.raises(UsageError, match="expected 4"):
        DType("made_up", 4, None, np.dtype("u2"))


def test_arithmetic_without_ml_dtypes_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(MissingExtraError, match=r"'bfloat16'.*pip install --upgrade ml_dtypes"):
        _ = dtype("bfloat16").numpy
    assert dtype("float32").numpy == np.float32


def test_nothing_but_numpy_is_imported() -> None:
    program = (
        "import sys; from reshard.dtypes import dtype; dtype('bfloat16'); dtype('F8_E4M3');"
        "print([m for m in ('torch', 'ml_dtypes', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"
