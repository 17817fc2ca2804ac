"""Descriptions of arrays in Zarr, valid and invalid."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reshard.checkpoint.formats.orbax.zarr import array_bytes, name_type, read_array
from reshard.dtypes import ALL_DTYPES, dtype
from reshard.errors import CheckpointError, FormatError, ReshardError
from reshard.layout import Box

ZARR2: dict[str, Any] = {
    "chunks": [4, 8],
    "compressor": {"id": "zstd", "level": 1},
    "dimension_separator": ".",
    "dtype": "<f4",
    "fill_value": None,
    "filters": None,
    "order": "C",
    "shape": [10, 8],
    "zarr_format": 2,
}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}

ZARR3: dict[str, Any] = {
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 8]}},
    "chunk_key_encoding": {"name": "default"},
    "codecs": [BYTES, {"name": "zstd", "configuration": {"level": 3}}],
    "data_type": "float32",
    "fill_value": 0.0,
    "node_type": "array",
    "shape": [10, 8],
    "zarr_format": 3,
}


def read(described: dict[str, Any], **changes: Any) -> Any:
    return read_array(json.dumps({**described, **changes}).encode(), "w")


def test_an_array_lists_the_keys_and_boxes_of_its_chunks() -> None:
    array = read(ZARR2)
    assert [key for key, _ in array.list_keys()] == ["0.0", "1.0", "2.0"]
    assert array.box((8, 0)) == Box((8, 0), (10, 8))
    assert array.box((12, 0)) is None
    assert [key for key, _ in read(ZARR3).list_keys()] == ["c/0/0", "c/1/0", "c/2/0"]
    assert [key for key, _ in read(ZARR2, shape=[], chunks=[]).list_keys()] == ["0"]
    scalar = read(
        ZARR3, shape=[], chunk_grid={"name": "regular", "configuration": {"chunk_shape": []}}
    )
    assert [key for key, _ in scalar.list_keys()] == ["c"]


def test_the_order_of_a_chunk_gives_its_strides() -> None:
    assert read(ZARR2).strides == (8, 1)
    assert read(ZARR2, order="F").strides == (1, 4)
    turned = {"name": "transpose", "configuration": {"order": [1, 0]}}
    assert read(ZARR3, codecs=[turned, BYTES]).strides == (1, 4)


def test_every_dtype_is_written_and_read_back() -> None:
    for one in ALL_DTYPES:
        if one.name not in ("complex32", "float8_e4m3"):
            found = read_array(array_bytes(name_type(one), (4,), (2,)), "w")
            assert found.dtype is one
    assert read(ZARR2, dtype="int4").dtype is dtype("uint8")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": ">f4"}, "greatest byte first"),
        ({"dtype": "<U8"}, "type '<U8'"),
        ({"filters": [{"id": "delta"}]}, "filters"),
        ({"compressor": {"id": "blosc"}}, "blosc"),
        ({"dtype": [["a", "<f4"]]}, "not known"),
    ],
)
def test_unknown_codecs_and_dtypes_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read(ZARR2, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [10]},
        {"chunks": [0, 8]},
        {"chunks": [-1, 8]},
        {"chunks": "ab"},
        {"shape": [2**62, 2**62], "chunks": [2**61, 2**62]},
        {"shape": [2**40, 8]},
        {"shape": [1.5, 2]},
        {"shape": None},
        {"zarr_format": 4},
        {"order": "K"},
        {"compressor": 3},
        {"dimension_separator": "../"},
    ],
)
def test_invalid_descriptions_of_arrays_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        read(ZARR2, **changes)


@pytest.mark.parametrize(
    "codecs",
    [
        [],
        [{"name": "blosc"}],
        [{"name": "bytes", "configuration": {"endian": "big"}}],
        [{"name": "transpose", "configuration": {"order": [0, 0]}}, BYTES],
        [BYTES, {"name": "zstd"}, {"name": "zstd"}],
        [{"name": "sharding_indexed", "configuration": {}}],
        "bytes",
        None,
    ],
)
def test_invalid_codecs_are_refused(codecs: Any) -> None:
    with pytest.raises(ReshardError):
        read(ZARR3, codecs=codecs)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100000, b'{"a":1,"a":1}'])
def test_invalid_json_is_refused(content: bytes) -> None:
    with pytest.raises(FormatError):
        read_array(content, "w")
