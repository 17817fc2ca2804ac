"""One file's header: what is written is read, what is broken is named."""

from __future__ import annotations

import copy
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import NamedTensor, aligned_order, build_header
from reshard.checkpoint.formats.safetensors import header_writer
from reshard.checkpoint.formats.safetensors.header import (
    LARGEST_HEADER_BYTES,
    FileHeader,
    HeaderTensors,
    TensorHeader,
    find_offsets,
    has_metadata_key,
    parse_header,
    read_header,
    tensor_size_bytes,
)
from reshard.dtypes import ALL_DTYPES, dtype
from reshard.errors import CheckpointError, FormatError, UsageError

TAGGED = [known for known in ALL_DTYPES if known.safetensors_tag is not None]


def entry(tag: str, shape: list[Any], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": tag, "shape": shape, "data_offsets": [start, stop]}


def parse(header: object, data_bytes: int) -> FileHeader:
    """What `header` says of a file with `data_bytes` bytes of data, named 'f'."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(text, 8 + len(text) + data_bytes, "f")


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 4), max_size=5).map(tuple)

named_tensors = st.lists(
    st.tuples(names, st.sampled_from(TAGGED), shapes), max_size=8, unique_by=lambda item: item[0]
)
metadata = st.dictionaries(names, names, max_size=3)


# Round trips


@given(named_tensors, metadata, st.sampled_from([1, 8, 64, 4096]))
def test_built_headers_are_parsed(
    tensors: list[NamedTensor], metadata: dict[str, str], alignment_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header_writer, "_ALIGNMENT_BYTES", alignment_bytes)
        first_bytes, built = build_header(tensors, metadata, label="x")
    (length,) = struct.unpack("<Q", first_bytes[:8])
    assert 8 + length == len(first_bytes) == built.data_start_bytes
    assert len(first_bytes) % alignment_bytes == 0
    assert parse_header(first_bytes[8:], built.file_size_bytes, "x") == built
    assert built.metadata == metadata
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in built.tensors] == tensors
    offset = built.data_start_bytes
    for tensor in built.tensors:
        assert tensor.start_bytes == offset
        offset += tensor_size_bytes(tensor.dtype, tensor.shape)
        assert tensor.stop_bytes == offset
    assert built.file_size_bytes == offset


@given(named_tensors, metadata)
def test_the_safetensors_package_reads_what_is_built(
    tensors: list[NamedTensor], metadata: dict[str, str]
) -> None:
    first_bytes, built = build_header(tensors, metadata)
    data = bytes(index % 2 for index in range(built.file_size_bytes - len(first_bytes)))
    whole = first_bytes + data
    found = dict(safetensors.deserialize(whole))
    assert found.keys() == {name for name, _, _ in tensors}
    for tensor in built.tensors:
        view = found[tensor.name]
        assert view["dtype"] == tensor.dtype.safetensors_tag
        assert tuple(view["shape"]) == tensor.shape
        assert bytes(view["data"]) == whole[tensor.start_bytes : tensor.stop_bytes]


def test_a_file_built_here_loads_with_numpy_and_torch(tmp_path: Path) -> None:
    arrays = {
        "odd": np.arange(3, dtype=np.float32),
        "matrix": np.arange(2048, dtype=np.float32).reshape(2, 1024),
        "scalar": np.array(7, dtype=np.int64),
        "empty": np.zeros((0, 5), np.float16),
        "also empty": np.zeros((3, 0), np.uint8),
        "flags": np.array([True, False]),
        "complex": np.array([1 + 2j], np.complex64),
    }
    order = aligned_order((name, dtype(value.dtype), value.shape) for name, value in arrays.items())
    assert [name for name, _, _ in order][:3] == ["matrix", "empty", "also empty"]
    first_bytes, header = build_header(order, {"format": "pt"})
    assert header.tensors[0].start_bytes == len(first_bytes) == 4096
    path = tmp_path / "model.safetensors"
    path.write_bytes(first_bytes + b"".join(arrays[name].tobytes() for name, _, _ in order))
    assert read_header(path) == FileHeader(
        str(path), {"format": "pt"}, header.tensors, 4096, header.file_size_bytes
    )
    as_numpy = safetensors.numpy.load_file(path)
    as_torch = safetensors.torch.load_file(path)
    assert as_numpy.keys() == as_torch.keys() == arrays.keys()
    for name, expected in arrays.items():
        assert as_numpy[name].dtype == expected.dtype
        assert as_numpy[name].shape == tuple(as_torch[name].shape) == expected.shape
        assert np.array_equal(as_numpy[name], expected)
        assert np.array_equal(as_torch[name].numpy(), expected)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("element", TAGGED, ids=str)
def test_a_file_of_the_package_is_read(element: Any, tmp_path: Path) -> None:
    tensors = {
        "w": torch.zeros((2, 3), dtype=torch.uint8).to(getattr(torch, element.name)),
        "scalar": torch.zeros((), dtype=getattr(torch, element.name)),
        "empty": torch.zeros((4, 0, 2), dtype=getattr(torch, element.name)),
    }
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(tensors, path, {"a": "é"})
    header = read_header(path)
    assert header.metadata == {"a": "é"}
    assert header.file_size_bytes == path.stat().st_size
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors} == {
        name: (element, tuple(value.shape)) for name, value in tensors.items()
    }


def test_bytes_are_at_the_offsets_of_the_header(tmp_path: Path) -> None:
    arrays = {name: np.full(4, ord(name), np.int16) for name in "zya"}
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file(arrays, path)
    header = read_header(os.fspath(path))
    whole = path.read_bytes()
    for tensor in header.tensors:
        found = np.frombuffer(whole[tensor.start_bytes : tensor.stop_bytes], np.int16)
        assert np.array_equal(found, arrays[tensor.name])
    assert [tensor.size_bytes for tensor in header.tensors] == [8, 8, 8]


@given(named_tensors)
def test_aligned_order_puts_whole_blocks_first_and_changes_nothing_else(
    tensors: list[NamedTensor],
) -> None:
    def is_whole(tensor: NamedTensor) -> bool:
        return tensor_size_bytes(tensor[1], tensor[2]) % 16 == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header_writer, "_ALIGNMENT_BYTES", 16)
        ordered = aligned_order(tensors)
        _, header = build_header(ordered)
    whole = [tensor for tensor in tensors if is_whole(tensor)]
    assert list(ordered) == whole + [tensor for tensor in tensors if not is_whole(tensor)]
    assert all(tensor.start_bytes % 16 == 0 for tensor in [*header.tensors][: len(whole)])


def test_a_header_of_many_tensors_is_read() -> None:
    count = 20_000
    tensors = [(f"layers.{index}.weight", dtype("BF16"), (2,)) for index in range(count)]
    first_bytes, header = build_header(tensors)
    assert [tensor.name for tensor in header.tensors] == [name for name, _, _ in tensors]
    assert header.file_size_bytes == len(first_bytes) + 4 * count


# What the package accepts


def test_files_that_the_package_accepts_are_accepted() -> None:
    assert not parse({}, 0).tensors
    assert parse({"": entry("U8", [1], 0, 1)}, 1).tensors[0].name == ""
    assert parse(b'{"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}} \n\t ', 1).tensors
    shared = {
        "a": entry("U8", [2], 0, 2),
        "b": entry("U8", [0], 2, 2),
        "c": entry("F32", [0, 2**40], 0, 0),
        "d": entry("U8", [0], 0, 0),
    }
    assert [tensor.name for tensor in parse(shared, 2).tensors] == ["c", "d", "a", "b"]


# What is broken


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        # one entry
        ({"w": 3}, 0, r"^f: tensor 'w': its entry is 3, expected an object with \['data_off"),
        ({"w": ["U8", [1], [0, 1]]}, 1, r"tensor 'w': its entry is \["),
        ({"w": {"dtype": "U8", "shape": [1]}}, 1, r"'w': its entry has the keys \['dtype', 'sh"),
        ({"w": entry("U8", [1], 0, 1) | {"axis": 0}}, 1, r"keys \['axis', .*expected \['data_"),
        ({"w": entry("F9", [1], 0, 1)}, 1, r"^f: tensor 'w': dtype 'F9': unknown"),
        ({"w": entry("F4", [2], 0, 1)}, 1, r"^f: tensor 'w': dtype 'F4': not supported, its el"),
        ({"w": entry("float32", [1], 0, 4)}, 4, r"dtype 'float32', expected a tag such as 'F32'"),
        ({"w": entry("complex128", [1], 0, 16)}, 16, r"dtype 'complex128', expected a tag such"),
        ({"w": entry("F" * 90, [1], 0, 1)}, 1, r"dtype 'FFF.*, expected a tag such as"),
        ({"w": entry(3, [1], 0, 1)}, 1, r"dtype 3, expected a tag such as 'F32'"),  # type: ignore
        ({"w": entry("U8", 1, 0, 1)}, 1, r"'w': shape 1, expected a list of in"),  # type: ignore
        ({"w": entry("U8", [True], 0, 1)}, 1, r"'w': shape \[True\], expected a list of in"),
        ({"w": entry("U8", [1.0], 0, 1)}, 1, r"'w': shape \[1.0\], expected a list of in"),
        ({"w": entry("U8", ["1"], 0, 1)}, 1, r"'w': shape \['1'\], expected a list of in"),
        ({"w": entry("U8", [float("nan")], 0, 1)}, 1, r"'w': shape \[nan\], expected a list"),
        ({"w": entry("U8", [-1, -1], 0, 1)}, 1, r"^f: .*'w': shape \[-1, -1\], expected integers"),
        ({"w": entry("U8", [1] * 33, 0, 1)}, 1, r"^f: .*'w': 33 dimensions, expected at most 32"),
        ({"w": entry("U8", [2**64], 0, 1)}, 1, r"^f: .*'w': shape \[184.*too large.*data_off"),
        ({"w": entry("U8", [0, 2**40, 2**40], 0, 0)}, 0, r"'w': shape .* is too large"),
        ({"w": entry("F32", [2**31, 2**30], 0, 4)}, 4, r"'w': shape .* is too large"),
        (
            {"w": entry("F32", [2, 3], 0, 20)},
            20,
            r"'w': .* are 20 bytes, expected 24 for fl",
        ),
        (
            {"w": entry("F32", [], 0, 0)},
            0,
            r"are 0 bytes, expected 4 for float32 of shape \[\]",
        ),
        ({"w": entry("F32", [0], 0, 4)}, 4, r"data_offsets \[0, 4\] are 4 bytes, expected 0"),
        ({"w": {**entry("U8", [1], 0, 1), "data_offsets": [0]}}, 1, r"\[0\], expected a list of t"),
        ({"w": {**entry("U8", [1], 0, 1), "data_offsets": [0, 1, 1]}}, 1, r"expected a list of tw"),
        ({"w": {**entry("U8", [1], 0, 1), "data_offsets": None}}, 1, r"data_offsets None, expecte"),
        ({"w": entry("U8", [1], False, True)}, 1, r"data_offsets \[False, True\], expected a lis"),
        ({"w": entry("U8", [1], 1, 0)}, 1, r"'w': data_offsets \[1, 0\], expected 0 <= start"),
        ({"w": entry("U8", [1], -1, 0)}, 1, r"'w': data_offsets \[-1, 0\], expected 0 <= start"),
        ({"w": entry("U8", [1], 2**64, 2**64 + 1)}, 1, r"'w': data_offsets .*, expected 0 <= st"),
        ({"w": entry("U8", [1], 2**63 - 2, 2**63 - 1)}, 1, r"'w': bytes .* are no range of a file"),
        ({"w": entry("U8", [10**4299 * 9], 0, 10**4299 * 9)}, 1, r"data_offsets \[0, 90000.*0"),
        # metadata
        ({"__metadata__": {"a": 1}}, 0, r"^f: __metadata__ key 'a' has the value 1, expected UTF"),
        ({"__metadata__": {"a": None}}, 0, r"__metadata__ key 'a' has the value None"),
        ({"__metadata__": {"a": {"b": "c"}}}, 0, r"__metadata__ key 'a' has the value {'b': 'c'}"),
        ({"__metadata__": None}, 0, r"^f: __metadata__ is None, expected an object"),
        ({"__metadata__": "a"}, 0, r"^f: __metadata__ is 'a', expected an object"),
        (b'{"__metadata__": {"a": "\\ud800"}}', 0, r"__metadata__ key 'a' .*, expected UTF-8 text"),
        # JSON
        (b"", 0, r"^f: the header begins with '', expected a JSON object"),
        (b"[]", 0, r"^f: the header begins with '\[\]', expected a JSON object"),
        (b'\x0b{"a": 3}', 0, r"^f: the header begins with '\\x0b{\"a\": 3}', expected"),
        (b'{"a": 3}\x0b', 0, r"^f: the header is not JSON"),
        (b'\xef\xbb\xbf{"a": 3}', 0, r"^f: the header begins with '\\ufeff{"),
        (b'{"\xff": 3}', 0, r"^f: byte 10 of the file is no UTF-8 text \(invalid start byte\)"),
        (b'{"w": ', 0, r"^f: the header is not JSON: Expecting value"),
        (b"{} {}", 0, r"^f: the header is not JSON: Extra data"),
        (b"{}\0", 0, r"^f: the header is not JSON: Extra data"),
        (b'{"a\n": 3}', 0, r"^f: the header is not JSON: Invalid control character"),
        (b'{"w": ' + b"[" * 100_000, 0, r"^f: the header is not JSON: .*recursion"),
        (b'{"w": ' + b'{"w":' * 100_000, 0, r"^f: the header is not JSON: .*recursion"),
        (b'{"w": ' + b"9" * 5000 + b"}", 0, r"^f: the header is not JSON: .*digits"),
        (b'{"\\ud800": 3}', 0, r"^f: tensor '\\ud800': the name is half of a UTF-16 pair"),
        (b'{"w": 3, "w": 4}', 0, r"^f: key 'w' is there twice in one object of the header"),
        (b'{"w": {"dtype": "U8", "dtype": "I8"}}', 0, r"^f: key 'dtype' is there twice"),
        (b'{"__metadata__": {"a": "1", "a": "2"}}', 0, r"^f: key 'a' is there twice"),
    ],
)
def test_a_broken_header_is_named(header: object, data_bytes: int, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse(header, data_bytes)


@pytest.mark.parametrize("is_compact", [True, False])
@pytest.mark.parametrize(("before", "behind"), [(" \t\r\n", ""), ("", "\n\t \r "), ("\n", "\n")])
def test_spaces_around_a_header_are_read(
    is_compact: bool, before: str, behind: str, tmp_path: Path
) -> None:
    """As safetensors 0.8 reads them; its metadata alone, too."""
    entries = {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    }
    separators = (",", ":") if is_compact else None
    text = (before + json.dumps(entries, separators=separators) + behind).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    header = read_header(path)
    assert [(one.name, one.start_bytes) for one in header.tensors] == [("w", 8 + len(text))]
    assert header.metadata == {"format": "pt"}
    assert has_metadata_key(path, "format") and not has_metadata_key(path, "w")


def test_a_long_text_is_not_repeated_in_full() -> None:
    with pytest.raises(FormatError) as caught:
        parse({"n" * 10_000: entry("U8", ["x"] * 10_000, 0, 1)}, 1)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file has 0 bytes, expected at least 8"),
        (b"\2\0\0\0\0\0\0", "the file has 7 bytes, expected at least 8"),
        (b"\3\0\0\0\0\0\0\0{}", "the header has 3 bytes, but only 2 bytes follow.* 1 bytes too sh"),
        (b"\0" * 8, "the header begins with ''"),
        (struct.pack("<Q", LARGEST_HEADER_BYTES) + b"{}", "bytes too short for its header alone"),
        (
            struct.pack("<Q", LARGEST_HEADER_BYTES + 1) + b"{}",
            r"100000001 bytes.*at most 100000000",
        ),
        (b"\xff" * 20, "a header of 18446744073709551615 bytes, expected at most 100000000"),
        (b"version https://git-lfs.github.com/spec/v1", "b'version ' give .* a Git LFS pointer"),
    ],
)
def test_a_broken_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=f"^{path}: .*{message}"):
        read_header(path)


def test_a_header_over_the_limit_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FormatError, match="the header has 100000001 bytes, expected at most"):
        parse_header(b" " * (LARGEST_HEADER_BYTES + 1), LARGEST_HEADER_BYTES + 9, "f")
    monkeypatch.setattr(header_writer, "_ALIGNMENT_BYTES", LARGEST_HEADER_BYTES + 9)
    with pytest.raises(UsageError, match="bytes, expected at most 100000000"):
        build_header([])


def test_a_file_that_cannot_be_read_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.safetensors: no such file"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        read_header(tmp_path / "file" / "under")
    with pytest.raises(CheckpointError, match="cannot be read: null character in its path"):
        read_header("a\0b")


def test_a_file_this_user_may_not_read_is_a_checkpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret.safetensors"
    path.write_bytes(b"")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.open", refuse)  # a mode would not stop the superuser
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        read_header(path)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ([("w", dtype("complex128"), (1,))], {}, "'w': safetensors has no tag for complex128"),
        ([("w", dtype("U8"), (1,))] * 2, {}, "'w': .*every name once"),
        ([("__metadata__", dtype("U8"), (1,))], {}, "'__metadata__': no name for a tensor"),
        ([("\ud800", dtype("U8"), (1,))], {}, "no name for a tensor here"),
        ([("w", dtype("U8"), (-1,))], {}, r"'w': shape \[-1\], expected integers"),
        ([("w", dtype("U8"), (2**63,))], {}, "'w': .* is too large"),
        ([("w", dtype("U8"), (1.5,))], {}, "'w': shape .*, expected integers"),
        ([], {"a": 1}, "__metadata__ key 'a' has the value 1"),
        ([], {"a": "\ud800"}, "__metadata__ key 'a'"),
    ],
)
def test_invalid_contents_are_refused(tensors: Any, metadata: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_header(tensors, metadata)


@given(named_tensors, metadata, st.data())
def test_a_damaged_header_is_consistent_or_refused(
    tensors: list[NamedTensor], metadata: dict[str, str], data: st.DataObject
) -> None:
    # With little padding, most damage is in the JSON.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header_writer, "_ALIGNMENT_BYTES", 8)
        first_bytes, built = build_header(tensors, metadata)
    damaged = bytearray(first_bytes[8:])
    interesting = st.sampled_from(list(b'0123456789-.,:"{}[]\\ eE\0\xff')) | st.integers(0, 255)
    for _ in range(data.draw(st.integers(1, 4), label="damages")):
        position = data.draw(st.integers(0, len(damaged) - 1), label="position")
        damaged[position] = data.draw(interesting, label="value")
    try:
        header = parse_header(bytes(damaged), built.file_size_bytes, "x")
    except FormatError:
        return
    covered = np.zeros(header.file_size_bytes - header.data_start_bytes, np.int64)
    for tensor in header.tensors:
        size = int(np.prod(tensor.shape, dtype=np.int64)) * tensor.dtype.itemsize_bytes
        assert tensor.stop_bytes - tensor.start_bytes == size
        start, stop = (
            at - header.data_start_bytes for at in (tensor.start_bytes, tensor.stop_bytes)
        )
        assert 0 <= start <= stop <= len(covered)
        covered[start:stop] += 1
    assert (covered == 1).all()


@given(st.binary(max_size=64))
def test_any_bytes_are_a_file_or_refused(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except FormatError:
        return
    assert header.file_size_bytes == len(content)


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
    one, none = HeaderTensors.of([weight]), HeaderTensors.of([])
    assert [*FileHeader("f", {}, one, 10, 12).tensors] == [weight]
    with pytest.raises(FormatError, match="f: tensor 'w' is there twice"):
        FileHeader("f", {}, HeaderTensors.of([weight, weight]), 10, 12)
    with pytest.raises(FormatError, match="the data starts at byte 10 of a file of 9 bytes"):
        FileHeader("f", {}, none, 10, 9)
    with pytest.raises(FormatError, match=r"'w' takes bytes 10 to 12 .* data starts at byte 11"):
        FileHeader("f", {}, one, 11, 12)


@pytest.mark.parametrize(
    ("text", "of", "found"),
    [
        (
            '{"a": {"saved_offsets": [0, 2]}, "b": {"saved_offsets": []}}',
            "ab",
            {"a": (0, 2), "b": ()},
        ),
        ('{"a": {"saved_offsets": [0, 2]}, "b": {"saved_offsets": []}}', "a", None),
        ('{"a": {"saved_offsets": [0, 2]}, "b": {"saved_offsets": []}}', "ba", None),
        ('{"a": {"saved_offsets": [0, 2]}, ', "a", None),
        ('{"a": {"saved_offsets": [0, 2]}', "a", None),
        ("{}", "", None),
    ],
)
def test_offsets_are_of_all_tensors_and_of_no_others(
    text: str, of: str, found: dict[str, tuple[int, ...]] | None
) -> None:
    assert find_offsets(text, list(of)) == found
