"""New files of nested values are what `torch.load` reads."""

from __future__ import annotations

import argparse
import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.binding import View
from reshard.checkpoint.formats.torch_files import zip_archives
from reshard.checkpoint.formats.torch_files.building import (
    NewArchive,
    NewStorage,
    NewTensor,
    NewTorchFile,
    is_writable,
    new_torch_file,
)
from reshard.checkpoint.formats.torch_files.pickles import Call, Global
from reshard.checkpoint.formats.torch_files.reading import read_archive, read_torch_value
from reshard.dtypes import ALL_DTYPES, DType, dtype
from reshard.errors import UsageError
from selection import choose, keep_spread

torch = pytest.importorskip("torch")

F32 = dtype("float32")


def filled(file: NewTorchFile) -> bytes:
    """The file with elements of 0 and 1."""
    content = bytearray(file.stored.size_bytes)

    def write(start: int, piece: bytes) -> None:
        assert not any(content[start : start + len(piece)])
        content[start : start + len(piece)] = piece

    for start, piece in file.known_bytes():
        write(start, piece)
    for storage, (_, start) in file.starts.items():
        assert start % (4096 if storage.size_bytes >= 16_384 else 64) == 0
        write(start, bytes(number % 2 for number in range(storage.size_bytes)))

    checked = set(file.checked_ranges)

    def checksum(start: int, size: int) -> int:
        assert (start, size) in checked
        return zlib.crc32(content[start : start + size])

    for start, piece in file.closing_bytes(checksum):
        write(start, piece)
    assert len(content) == file.stored.size_bytes
    assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None
    return bytes(content)


def same(found: Any, value: Any, content: bytes, file: NewTorchFile) -> bool:
    """Whether what `torch.load` gives is the value, with the elements that were written."""
    if isinstance(value, NewTensor):
        assert isinstance(found, torch.Tensor)
        assert (str(found.dtype)[6:], tuple(found.shape)) == (value.storage.dtype.name, value.shape)
        assert found.stride() == value.view.strides
        if found.numel() and found.is_contiguous():
            start = file.start_bytes(value)
            size = found.numel() * found.element_size()
            elements = found.reshape(-1).view(torch.uint8).numpy().tobytes()
            return elements == content[start : start + size]
        return True
    if isinstance(value, dict):
        return list(found) == list(value) and all(
            same(found[key], value[key], content, file) for key in value
        )
    if isinstance(value, list | tuple):
        pairs = zip(found, value, strict=True)
        return type(found) is type(value) and all(
            same(one, other, content, file) for one, other in pairs
        )
    return type(found) is type(value) and found == value


TENSORS = st.builds(
    NewTensor.of,
    st.sampled_from([one for one in ALL_DTYPES if is_writable(one)]),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
)
PLAIN = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text() | st.binary()
STATES = st.recursive(
    PLAIN | st.floats(allow_nan=False) | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=choose(60, 200), deadline=None)
@given(STATES)
def test_what_is_written_is_what_torch_loads(value: Any) -> None:
    file = new_torch_file("x.pt", value)
    content = filled(file)
    assert same(torch.load(io.BytesIO(content), weights_only=True), value, content, file)
    read_torch_value(lambda at, size: content[at : at + size], len(content), "x")


def test_tied_tensors_and_views_share_a_storage() -> None:
    storage = NewStorage(F32, 12)
    flat = NewTensor.of(F32, (12,), storage)
    column = NewTensor.of(F32, (4, 3), storage, View(0, (1, 4)))
    tail = NewTensor.of(F32, (2, 2), storage, View(8, (2, 1)))
    file = new_torch_file("x.pt", {"a": flat, "b": flat, "c": column, "d": tail})
    assert len(file.starts) == 1
    assert file.start_bytes(tail) == file.start_bytes(flat) + 32
    found = torch.load(io.BytesIO(filled(file)), weights_only=True)
    assert len({one.untyped_storage().data_ptr() for one in found.values()}) == 1
    assert found["c"].stride() == (1, 4)
    assert torch.equal(found["d"].reshape(-1), found["a"][8:])


def test_objects_of_classes_and_types_are_written() -> None:
    tensor = NewTensor.of(F32, (2,))
    options = Call(Global("argparse", "Namespace"), (), {"a": 1, "w": tensor}, is_new=True)
    groups = Call(Global("collections", "OrderedDict"), (), items={"b": 2})
    value = {"options": options, "groups": groups, "dtype": dtype("bfloat16")}
    found = torch.load(io.BytesIO(filled(new_torch_file("x", value))), weights_only=False)
    assert isinstance(found["options"], argparse.Namespace)
    assert found["options"].a == 1
    assert found["options"].w.shape == (2,)
    assert (dict(found["groups"]), found["dtype"]) == ({"b": 2}, torch.bfloat16)


def test_content_that_is_known_is_written() -> None:
    storage = NewStorage(
        dtype("int32"), 3, torch.tensor([5, 6, 7], dtype=torch.int32).numpy().tobytes()
    )
    tensor = NewTensor.of(dtype("int32"), (3,), storage)
    file = new_torch_file("x", {"ranks": tensor, "w": NewTensor.of(F32, (2,))})
    assert len(file.checked_ranges) == 1
    content = bytearray(file.stored.size_bytes)
    for start, piece in [*file.known_bytes(), *file.closing_bytes(lambda *_: zlib.crc32(bytes(8)))]:
        content[start : start + len(piece)] = piece
    assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None
    assert torch.load(io.BytesIO(content), weights_only=True)["ranks"].tolist() == [5, 6, 7]


def test_an_object_that_is_met_again_is_the_same() -> None:
    options = Call(Global("argparse", "Namespace"), (), {"a": 1}, is_new=True)
    found = torch.load(
        io.BytesIO(filled(new_torch_file("x", [options, options]))), weights_only=False
    )
    assert found[0] is found[1]


@pytest.mark.parametrize(
    "count", keep_spread(1, (60, 66_000), "seconds; a lower limit on entries by default")
)
def test_many_storages_have_an_end_of_64_bits(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if count < zip_archives._MAX_NARROW_ENTRIES:
        monkeypatch.setattr(zip_archives, "_MAX_NARROW_ENTRIES", 50)
    tensors = [NewTensor.of(dtype("uint8"), (1,)) for _ in range(count)]
    file = new_torch_file("x", tensors)
    content = filled(file)
    found = read_torch_value(lambda at, size: content[at : at + size], len(content), "x")
    assert found[-1].start_bytes == file.start_bytes(tensors[-1])
    reader = torch._C.PyTorchFileReader(io.BytesIO(content))
    assert reader.get_record_offset(f"data/{count - 1}") == file.start_bytes(tensors[-1])


def test_an_end_of_16_bits_counts_less_than_65535_entries() -> None:
    """A count whose bits are all 1 refers readers to the end of 64 bits."""
    few, many = (zip_archives.directory_end(count, 10, 10) for count in (65_534, 65_535))
    assert few.startswith(b"PK\5\6") and many.startswith(b"PK\6\6")


def test_storages_beyond_4_gib_are_written(tmp_path: Any) -> None:
    large, small = NewTensor.of(dtype("uint8"), (5, 1 << 30)), NewTensor.of(F32, (3,))
    file = new_torch_file("x", {"large": large, "small": small})
    path = tmp_path / "x.pt"
    with path.open("wb") as written:
        for start, piece in [*file.known_bytes(), *file.closing_bytes(lambda start, size: 7)]:
            written.seek(start)
            written.write(piece)
    assert path.stat().st_size == file.stored.size_bytes
    with path.open("rb") as opened:

        def read(at: int, size: int) -> bytes:
            opened.seek(at)
            return opened.read(size)

        found = read_torch_value(read, file.stored.size_bytes, "x")
    assert found["large"].start_bytes == file.start_bytes(large)
    assert found["small"].start_bytes == file.start_bytes(small) > 5 << 30
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["small"].tolist() == [0, 0, 0]


def test_values_that_cannot_be_written_are_errors() -> None:
    with pytest.raises(UsageError, match="PyTorch has no type float8_e3m4"):
        NewTensor.of(dtype("float8_e3m4"), (1,))
    with pytest.raises(UsageError, match="a storage of 3 float32"):
        NewTensor.of(F32, (2, 2), NewStorage(F32, 3))
    with pytest.raises(UsageError, match="a storage of 3 float16"):
        NewTensor.of(F32, (2,), NewStorage(dtype("float16"), 3))
    with pytest.raises(UsageError, match="a object cannot be written"):
        new_torch_file("x", {"a": object()})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="too deep"):
        new_torch_file("x", loop)


# Archives of one tensor.

OFFSET = 20
SHAPES: list[tuple[int, ...]] = [(), (1,), (3, 4), (0, 4), (100, 100), (2, 3, 4, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("element", [d for d in ALL_DTYPES if is_writable(d)], ids=str)
def test_an_archive_is_read_by_torch(element: DType, shape: tuple[int, ...]) -> None:
    archive = NewArchive.at(element, shape, OFFSET)
    storage = bytes(number % 251 for number in range(archive.storage_bytes))
    if element.name == "bool":
        storage = bytes(byte % 2 for byte in storage)
    content = archive.head() + storage + archive.tail(zlib.crc32(storage))
    assert OFFSET + len(content) == archive.stop_bytes
    assert OFFSET + len(archive.head()) == archive.storage_start_bytes
    assert archive.storage_start_bytes % (4096 if len(storage) >= 16_384 else 64) == 0
    value = torch.load(io.BytesIO(content), weights_only=True)
    assert (value.dtype, tuple(value.shape)) == (getattr(torch, element.name), shape)
    found = read_archive(lambda at, size: content[at - OFFSET :][:size], OFFSET, len(content), "x")
    assert (found.start_bytes, found.storage_bytes) == (archive.storage_start_bytes, len(storage))
    if value.numel():
        assert value.reshape(-1).view(torch.uint8).numpy().tobytes() == storage
    assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None


def test_types_missing_from_torch_are_errors() -> None:
    with pytest.raises(UsageError, match="PyTorch has no type float8_e3m4"):
        NewArchive.at(dtype("float8_e3m4"), (3,), 0)


def test_archives_of_more_than_4_gib_are_written(tmp_path: Path) -> None:
    """Written into a file of holes; only what describes the storage is looked at."""
    archive = NewArchive.at(dtype("uint8"), (5, 1 << 30), 0)
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(archive.head())
        file.seek(archive.storage_start_bytes + archive.storage_bytes)
        file.write(archive.tail(0x12345678))
    assert path.stat().st_size == archive.stop_bytes

    with path.open("rb") as file:

        def read_range(at: int, size: int) -> bytes:
            file.seek(at)
            return file.read(size)

        found = read_archive(read_range, 0, archive.stop_bytes, "large")
    assert (found.shape, found.storage_bytes, found.crc32) == ((5, 1 << 30), 5 << 30, 0x12345678)
    assert found.start_bytes == archive.storage_start_bytes
    record = zipfile.ZipFile(path).getinfo("archive/data/0")
    assert (record.file_size, record.CRC) == (5 << 30, 0x12345678)
    reader = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record_offset("data/0") == archive.storage_start_bytes
