"""What a file holds is proven: no overlap, no hole, nothing cut off, nothing left over."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoint.formats.safetensors.header import build_header, parse_header, read_header
from reshard.checkpoint.formats.safetensors.values import FileHeader, TensorHeader
from reshard.dtypes import dtype
from reshard.errors import FormatError


def entry(tag: str, shape: list[Any], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": tag, "shape": shape, "data_offsets": [start, stop]}


def parse(header: object, data_bytes: int) -> FileHeader:
    """What `header` says of a file with `data_bytes` bytes of data, named 'f'."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(text, 8 + len(text) + data_bytes, "f")


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        (
            {"v": entry("U8", [4], 0, 4), "w": entry("U8", [4], 3, 7)},
            7,
            r"^f: tensor 'w' takes bytes (\d+) to \d+ of the file and overlaps tensor 'v', which",
        ),
        (
            {"w": entry("U8", [2], 0, 2), "v": entry("U8", [4], 0, 4)},
            4,
            r"tensor 'v' takes .* overlaps tensor 'w'",
        ),
        (
            {"v": entry("U8", [2], 0, 2), "w": entry("U8", [0], 1, 1)},
            2,
            r"tensor 'w' takes .* overlaps tensor 'v'",
        ),
        (
            {"v": entry("U8", [2], 0, 2), "w": entry("U8", [1], 5, 6)},
            6,
            r"tensor 'w' takes .* the 3 bytes from \d+ to \d+ belong to no tensor",
        ),
        ({"w": entry("U8", [1], 1, 2)}, 2, r"'w' takes .* the 1 bytes from 68 to 69 belong to no"),
        ({"w": entry("U8", [1], 9, 10)}, 2, r"'w' takes bytes \d+ to \d+ .*, which lie outside it"),
        ({"w": entry("U8", [0], 5, 5)}, 0, r"'w' takes .* lie outside it"),
        (
            {
                "v": entry("U8", [2], 0, 2),
                "w": entry("U8", [7], 2, 9),
                "x": entry("U8", [1], 9, 10),
            },
            6,
            r"^f: the file is cut off.*; 4 bytes are missing, from tensor 'w' on",
        ),
        ({"w": entry("U8", [1], 0, 1)}, 4, r"^f: .*: the last 3 bytes belong to no tensor"),
        ({}, 1, r"^f: .*: the last 1 bytes belong to no tensor"),
    ],
)
def test_tensors_that_do_not_cover_the_data_are_named(
    header: object, data_bytes: int, message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        parse(header, data_bytes)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=4),
    st.integers(0, 6),
    st.permutations(range(4)),
)
def test_ranges_pass_exactly_where_counting_every_byte_does(
    ranges: list[tuple[int, int]], data_bytes: int, order: list[int]
) -> None:
    named = {f"t{index}": (start, start + size) for index, (start, size) in enumerate(ranges)}
    owners = np.zeros(32, np.int64)
    for start, stop in named.values():
        owners[start:stop] += 1
    covered = (owners[:data_bytes] == 1).all() and not owners[data_bytes:].any()
    # An empty tensor may lie between two others and at the ends, not inside or outside.
    between = {0, data_bytes} | {stop for start, stop in named.values() if start < stop}
    empty_ones_fit = all(start in between for start, stop in named.values() if start == stop)
    shuffled = [f"t{index}" for index in order if f"t{index}" in named]
    header = {
        name: entry("U8", [named[name][1] - named[name][0]], *named[name]) for name in shuffled
    }
    if covered and empty_ones_fit:
        assert len(parse(header, data_bytes).tensors) == len(ranges)
    else:
        with pytest.raises(FormatError):
            parse(header, data_bytes)


def test_every_truncation_of_a_file_is_noticed(tmp_path: Path) -> None:
    whole = safetensors.torch.save({"w": torch.ones(3), "b": torch.ones(1)}, {"a": "b"})
    path = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError):
            read_header(path)
    path.write_bytes(whole)
    assert len(read_header(path).tensors) == 2
    path.write_bytes(whole + b"x")
    with pytest.raises(FormatError, match="the last 1 bytes belong to no tensor"):
        read_header(path)


def test_a_header_can_be_copied_pickled_and_hashed_but_not_changed() -> None:
    _, header = build_header([("w", dtype("F32"), (2,))], {"a": "b"})
    for same in (copy.copy(header), copy.deepcopy(header), pickle.loads(pickle.dumps(header))):
        assert same == header
        assert hash(same) == hash(header)
    with pytest.raises(TypeError):
        header.metadata["a"] = "c"  # type: ignore[index]


def test_values_that_cannot_be_are_refused_when_built_directly() -> None:
    weight = TensorHeader("w", dtype("U8"), (2,), 10, 12)
    assert FileHeader("f", {}, (weight,), 10, 12).tensors == (weight,)
    with pytest.raises(FormatError, match="'w': bytes 12 to 10 are no range of a file"):
        TensorHeader("w", dtype("U8"), (2,), 12, 10)
    with pytest.raises(FormatError, match="f: tensor 'w' is there twice"):
        FileHeader("f", {}, (weight, weight), 10, 12)
    with pytest.raises(FormatError, match="the data starts at byte 10 of a file of 9 bytes"):
        FileHeader("f", {}, (), 10, 9)
    with pytest.raises(FormatError, match=r"'w' takes bytes 10 to 12 .* data starts at byte 11"):
        FileHeader("f", {}, (weight,), 11, 12)
