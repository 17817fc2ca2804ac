"""What `torch.save` wrote is read whole, as zip archives and as the files before them."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import pickle
import random
import tarfile
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.binding import View
from reshard.checkpoint.formats.torch_files.pickles import Call, Global
from reshard.checkpoint.formats.torch_files.reading import (
    FRONT_BYTES,
    ArchiveReader,
    is_torch_file,
    read_archive,
    read_archive_front,
    read_torch_file,
    read_torch_value,
)
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor, explain, numpy_array
from reshard.errors import CheckpointError, FormatError, UnreadableTensorError
from selection import choose

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
torch = pytest.importorskip("torch")

BASE = torch.arange(120.0).reshape(2, 3, 4, 5)
FORMS = [True, False]


def saved(value: Any, *, is_zip: bool = True, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=is_zip, **options)
    return stream.getvalue()


def read(content: bytes) -> Any:
    return read_torch_value(lambda at, size: content[at : at + size], len(content), "file x")


def same(found: Any, value: Any, content: bytes) -> bool:
    """Whether what was read is what was saved, tensors by their bytes in the file."""
    if isinstance(value, torch.Tensor):
        assert isinstance(found, ArchivedTensor)
        assert (found.dtype.name, found.shape) == (str(value.dtype)[6:], tuple(value.shape))
        storage = content[found.start_bytes : found.start_bytes + found.storage_bytes]
        flat = np.frombuffer(storage, dtype=found.dtype.storage)
        dense = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        expected = dense.view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return flat[found.view.positions(found.shape)].tobytes() == expected
    if isinstance(value, dict):
        assert type(found) is dict
        assert list(found) == list(value)
        return all(same(found[key], value[key], content) for key in value)
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        assert type(found) is kind
        pairs = zip(found, value, strict=True)
        return all(same(one, other, content) for one, other in pairs)
    return type(found) is type(value) and found == value


DTYPES = st.sampled_from(
    [
        *(torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint16),
        *(torch.float8_e4m3fn, torch.complex64, torch.uint8, torch.float64),
    ]
)


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """Dense tensors, slices, transposed ones, scalars, empty ones, parameters."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(np.prod(shape))
    tensor = (torch.arange(count) % 2).to(draw(DTYPES)).reshape(shape)
    if shape and draw(st.booleans()):
        tensor = tensor.transpose(0, len(shape) - 1)
    if shape and draw(st.booleans()):
        tensor = tensor[draw(st.integers(0, 2)) :]
    if tensor.is_floating_point() and draw(st.booleans()):
        tensor = torch.nn.Parameter(tensor)
    return tensor


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text() | st.binary()
STATES = st.recursive(
    PLAIN | st.floats(allow_nan=False) | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=choose(60, 200), deadline=None)
@given(STATES, st.booleans(), st.integers(2, 5))
def test_a_state_is_read_as_saved(value: Any, is_zip: bool, protocol: int) -> None:
    content = saved(value, is_zip=is_zip, pickle_protocol=protocol)
    assert same(read(content), value, content)


@pytest.mark.parametrize("is_zip", FORMS)
def test_tied_tensors_and_views_share_their_storage(is_zip: bool) -> None:
    content = saved({"a": BASE, "b": BASE, "c": BASE[1, 1:, ::2]}, is_zip=is_zip)
    found = read(content)
    assert found["a"] == found["b"]
    assert found["a"].start_bytes == found["c"].start_bytes
    assert found["c"].view.strides == (20, 10, 1)


@pytest.mark.parametrize("is_zip", FORMS)
def test_the_attributes_of_a_state_dict_do_not_matter(is_zip: bool) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    assert state._metadata
    content = saved({"model": state}, is_zip=is_zip)
    assert same(read(content), {"model": dict(state)}, content)


@pytest.mark.parametrize("is_zip", FORMS)
def test_values_of_torch_and_numpy_are_understood(is_zip: bool) -> None:
    value = {
        "size": BASE.shape,
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "cpu": torch.device("cpu"),
        "number": np.float64(3.5),
        "count": np.int32(7),
        "default": collections.defaultdict(list, a=1),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "random": random.getstate(),
    }
    found = read(saved(value, is_zip=is_zip))
    array = numpy_array(found.pop("array"))
    assert array is not None
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found == {
        "size": (2, 3, 4, 5),
        "dtype": Global("torch", "bfloat16"),
        "device": "cuda:1",
        "cpu": "cpu",
        "number": 3.5,
        "count": 7,
        "default": {"a": 1},
        "random": random.getstate(),
    }


class Attribute:
    """Something that a pickle would make."""

    def __init__(self) -> None:
        self.w = torch.ones(2)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Attribute(), "an object of"),
        (argparse.Namespace(a=1), "an object of argparse.Namespace"),
        (torch.ones(2, 2).to_sparse(), "a sparse tensor"),
        (torch.ones(2, dtype=torch.complex64).conj(), "repeated or computed"),
        (torch.ones(2).expand(1000, 2), "repeated or computed"),
        (torch.ones(2, device="meta"), "a meta tensor"),
        ({1, 2}, "an object of __builtin__.set"),
    ],
    ids=["class", "namespace", "sparse", "conj", "expanded", "meta", "set"],
)
def test_other_values_stay_calls(value: Any, reason: str) -> None:
    found = read(saved({"x": value, "w": BASE}))
    assert isinstance(found["x"], Call)
    assert reason in explain(found["x"])
    assert isinstance(found["w"], ArchivedTensor)


class Harm:
    """What an attacker pickles."""

    def __init__(self, *called: Any) -> None:
        self.called = called

    def __reduce__(self) -> Any:
        return self.called[0], self.called[1:]


@pytest.mark.parametrize("is_zip", FORMS)
def test_nothing_in_a_file_is_run(tmp_path: Path, is_zip: bool) -> None:
    import os

    value = {"w": BASE, "x": Harm(os.system, f"touch {tmp_path / 'ran'}")}
    found = read(saved(value, is_zip=is_zip))
    assert explain(found["x"]) == "an object of posix.system"
    assert not (tmp_path / "ran").exists()


def test_a_part_of_a_tensor_that_is_part_of_something_else_is_kept() -> None:
    # Sizes are let go once their tensor is made: this one is recalled.
    content = saved({"w": BASE})
    pickled = zipfile.ZipFile(io.BytesIO(content)).read("archive/data.pkl")
    at = pickled.index(b"(K\x02K\x03K\x04K\x05tq")
    number = pickled[at + 11 : at + 12]
    assert pickled.endswith(b"s.")
    changed = pickled[:-1] + b"X\x01\x00\x00\x00nh" + number + b"s."
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(name, changed if name.endswith("data.pkl") else old.read(name))
    assert read(stream.getvalue())["n"] == (2, 3, 4, 5)


def test_an_empty_tensor_may_have_any_strides() -> None:
    found = read(saved(torch.ones(1).expand(4, 1)[:, :0]))
    assert isinstance(found, ArchivedTensor)
    assert found.shape == (4, 0)


def test_files_are_read_in_place(tmp_path: Path) -> None:
    value = {f"w{number}": torch.full((number,), 1.0 * number) for number in range(300)}
    for is_zip in FORMS:
        path = tmp_path / f"{is_zip}.pt"
        torch.save(value, path, _use_new_zipfile_serialization=is_zip)
        assert is_torch_file(path)
        assert same(read_torch_file(path), value, path.read_bytes())


def tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as file:
        file.addfile(tarfile.TarInfo("storages"))
    return stream.getvalue()


def script() -> bytes:
    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), stream)
    return stream.getvalue()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: b"", "empty"),
        (lambda: b"hello", "begins with b'hello'"),
        (lambda: pickle.dumps({"a": 1}), "a pickle, but not one of torch.save"),
        (lambda: b"version https://git-lfs.github.com/spec/v1", "pointer of Git LFS"),
        (lambda: (2).to_bytes(8, "little") + b"{}" + b" ", "file of safetensors"),
        (tar, "a tar archive"),
        (script, "a program of TorchScript"),
    ],
    ids=["empty", "text", "pickle", "lfs", "safetensors", "tar", "script"],
)
def test_other_files_are_named(content: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message) as error:
        read(content())
    assert "file x" in str(error.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        read_torch_file(tmp_path / "none.pt")


@pytest.mark.parametrize("is_zip", FORMS)
def test_a_truncated_file_is_an_error(is_zip: bool) -> None:
    content = saved({"w": BASE, "v": torch.ones(3)}, is_zip=is_zip)
    for size in range(0, len(content), 13):
        with pytest.raises(FormatError, match="file x"):
            read(content[:size])


@settings(max_examples=choose(90, 300), deadline=None)
@given(st.data(), st.booleans())
def test_a_changed_byte_is_an_error_or_a_value(data: st.DataObject, is_zip: bool) -> None:
    content = bytearray(saved({"w": BASE, "v": [torch.ones(3), "text"]}, is_zip=is_zip))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    try:
        found = read(bytes(content))
    except FormatError:
        return
    for tensor in (found or {}).values() if isinstance(found, dict) else ():
        if isinstance(tensor, ArchivedTensor):
            assert tensor.start_bytes + tensor.storage_bytes <= len(content)


@pytest.mark.parametrize("keys", [("0",), [7]], ids=["no list", "no text"])
def test_names_of_storages_are_a_list_of_texts(keys: Any) -> None:
    content = saved({"w": BASE}, is_zip=False)
    start = content.rindex(b"\x80\x02]")
    end = content.index(b"a.", start) + 2
    assert all(isinstance(key, str) for key in pickle.loads(content[start:end]))
    with pytest.raises(FormatError, match="names of its storages are not a list"):
        read(content[:start] + pickle.dumps(keys, protocol=2) + content[end:])


# Archives of one tensor.

BEFORE = b"what another item has"


def read_one(archive: bytes) -> ArchivedTensor:
    """What is read of an archive in the middle of a file."""
    file = BEFORE + archive + b"PK\x05\x06 and more"
    return read_archive(lambda at, size: file[at : at + size], len(BEFORE), len(archive), "item x")


def elements(archive: bytes) -> Any:
    """The tensor, by what is read of where it lies."""
    found = read_one(archive)
    storage = (BEFORE + archive)[found.start_bytes : found.start_bytes + found.storage_bytes]
    assert found.crc32 == (zlib.crc32(storage) or None)
    flat = np.frombuffer(storage, dtype=found.dtype.storage)
    return flat[found.view.positions(found.shape)]


def parse_in(archives: ArchiveReader, content: bytes, at: int = 0) -> Any:
    def read(offset: int, size: int) -> bytes:
        return content[offset : offset + size]

    size = len(content) - at
    return archives.match(read, at, size, "w") or archives.parse(read, at, size, "x", "w")


def test_archives_that_differ_in_elements_match() -> None:
    archives = ArchiveReader()
    first, second = saved(torch.zeros(40, 50)), saved(torch.ones(40, 50))
    tensor, _ = parse_in(archives, first)
    crc32 = zlib.crc32(np.ones((40, 50), np.float32).tobytes())
    found = archives.match(
        lambda at, size: (BEFORE + second)[at:][:size], len(BEFORE), len(second), "w"
    )
    assert found == (tensor, crc32)
    assert found[0] == replace(
        read_archive(lambda at, n: second[at:][:n], 0, len(second), ""), crc32=None
    )


def test_what_matches_is_what_would_be_parsed() -> None:
    """Of an archive with any byte changed, unless its elements and unread records."""
    content = saved(torch.zeros(2, 3))
    archives = ArchiveReader()
    parse_in(archives, content)
    matched = 0
    for at in range(len(content)):
        changed = content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :]
        found = archives.match(
            lambda start, n, c=changed: c[start : start + n], 0, len(content), "w"
        )  # type: ignore[misc]
        if found is not None:
            matched += 1
            assert found == parse_in(ArchiveReader(), changed)
    # The bytes by which it was read are about half of them.
    assert 100 < matched < len(content) - 400


@pytest.mark.parametrize(
    "value",
    [
        BASE,
        BASE[1, 1:, ::2],
        BASE.permute(3, 1, 0, 2),
        BASE.to(memory_format=torch.channels_last),
        BASE[1, 2, 3, 4],
        BASE[:0],
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, requires_grad=True),
    ],
    ids=["whole", "slice", "permuted", "channels last", "scalar", "empty", "parameter", "grad"],
)
def test_offsets_and_strides_are_honoured(value: Any) -> None:
    found = elements(saved(value)).view(np.float32)
    assert found.shape == tuple(value.shape)
    assert (found == value.detach().numpy()).all()


def test_a_slice_has_the_offset_and_strides_of_its_base() -> None:
    found = read_one(saved(BASE[1, 1:, ::2]))
    assert found.view == View(80, (20, 10, 1))
    assert found.storage_bytes == 480


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"w": torch.ones(2)}, "expected a tensor"),
        ([torch.ones(2)], "expected a tensor"),
        (torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (torch.ones(2).expand(1000, 2), "repeated or computed"),
        (torch.ones(2, 2).to_sparse(), "a sparse tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "a quantized tens"),
        (torch.ones(2, device="meta"), "a meta tensor"),
        (Attribute(), "Attribute"),
    ],
    ids=["dict", "list", "conj", "neg", "expanded", "sparse", "quantized", "meta", "class"],
)
def test_archives_of_anything_but_a_dense_tensor_are_errors(value: Any, message: str) -> None:
    # Some cannot be made without a warning.
    archive = saved(value() if callable(value) else value)
    with pytest.raises(FormatError, match=message) as error:
        read_one(archive)
    assert "item x" in str(error.value) or isinstance(error.value, UnreadableTensorError)


def rewritten(
    archive: bytes, change: dict[str, bytes | None], method: int = zipfile.ZIP_STORED
) -> bytes:
    """An archive with other records, as `zipfile` writes it."""
    old = zipfile.ZipFile(io.BytesIO(archive))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as new:
        for name in old.namelist():
            content = change.get(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return stream.getvalue()


def test_archives_that_others_wrote_are_read() -> None:
    archive = rewritten(saved(BASE), {})
    assert (elements(archive).view(np.float32) == BASE.numpy()).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"archive/byteorder": b"big"}, "byte order is b'big'"),
        ({"archive/data/0": bytes(8)}, "storage '0' has 8 bytes, expected 480"),
        ({"archive/data/0": None}, "no record 'data/0'"),
        ({"archive/data.pkl": None}, "no record 'data.pkl'"),
        ({"archive/data.pkl": b"\x80\x02cposix\nsystem\n."}, "expected a tensor"),
        ({"archive/data.pkl": bytes(1 << 21)}, "too many"),
    ],
)
def test_inconsistent_records_are_errors(change: dict[str, bytes | None], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_one(rewritten(saved(BASE), change))


def test_compressed_records_are_refused() -> None:
    with pytest.raises(FormatError, match="compressed"):
        read_one(rewritten(saved(BASE), {}, zipfile.ZIP_DEFLATED))


def test_a_truncated_archive_is_an_error() -> None:
    archive = saved(BASE)
    for size in range(0, len(archive), 7):
        with pytest.raises(FormatError, match="item x"):
            read_one(archive[:size])


@settings(max_examples=choose(90, 300))
@given(st.data())
def test_a_changed_byte_of_an_archive_is_an_error_or_irrelevant(data: st.DataObject) -> None:
    archive = saved(BASE)
    before = read_one(archive)
    changed = bytearray(archive)
    # Not in the storage: its checksum is compared when it is read.
    outside = [*range(before.start_bytes - len(BEFORE)), *range(len(archive) - 700, len(archive))]
    at = data.draw(st.sampled_from(outside))
    changed[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(FormatError):
        found = read_one(bytes(changed))
        same = (found.dtype, found.shape, found.view, found.storage_bytes) == (
            before.dtype,
            before.shape,
            before.view,
            before.storage_bytes,
        )
        # A place or a checksum that was changed is noticed by the checksum.
        assert same
        start = found.start_bytes - len(BEFORE)
        storage = changed[start : start + found.storage_bytes]
        assert found.start_bytes == before.start_bytes or zlib.crc32(storage) != found.crc32


# Fronts of archives.


def streamed(value: Any) -> bytes:
    """As PyTorch writes it into a stream that cannot go back."""
    made = io.BytesIO()

    class Stream(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, content: Any) -> int:
            return made.write(content)

    torch.save(value, Stream())
    return made.getvalue()


def read_whole(archive: bytes) -> ArchivedTensor:
    found = read_archive(lambda at, n: archive[at : at + n], 0, len(archive), "x")
    return replace(found, crc32=None)


FRONTS = [
    torch.arange(12.0).reshape(3, 4),
    torch.arange(12.0).reshape(3, 4).t(),
    torch.arange(100)[3:50:2],
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.zeros(0, 3),
    torch.nn.Parameter(torch.ones(2, 2)),
    torch.ones(3, dtype=torch.uint32),
    torch.ones((1,) * 64),
    torch.zeros(100_000),
]


@pytest.mark.parametrize("number", range(len(FRONTS)))
@pytest.mark.parametrize("save", [saved, streamed])
def test_a_front_is_read_as_its_archive(number: int, save: Any) -> None:
    archive = save(FRONTS[number])
    assert read_archive_front(archive[:FRONT_BYTES], "x") == read_whole(archive)


def test_a_front_without_checksums_is_read() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        archive = saved(FRONTS[0])
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_archive_front(archive, "x") == read_whole(archive)


@pytest.mark.parametrize("value", [{"w": torch.ones(2)}, 3, torch.ones(2).to_sparse()])
def test_fronts_of_anything_but_a_tensor_are_errors(value: Any) -> None:
    with pytest.raises(FormatError, match=r"^x is not a tensor|a sparse tensor"):
        read_archive_front(saved(value), "x")


def test_a_shorter_front_is_an_error_or_enough() -> None:
    archive = saved(FRONTS[0])
    expected = read_whole(archive)
    for size in range(len(archive)):
        if size >= expected.start_bytes:
            assert read_archive_front(archive[:size], "x") == expected
            continue
        # All but the padding in front of the storage may be there.
        with contextlib.suppress(FormatError):
            assert read_archive_front(archive[:size], "x") == expected


@settings(max_examples=choose(90, 300))
@given(st.data())
def test_a_changed_byte_of_a_front_is_an_error_or_a_tensor(data: st.DataObject) -> None:
    archive = bytearray(saved(FRONTS[0]))
    at = data.draw(st.integers(0, read_whole(bytes(archive)).start_bytes - 1))
    archive[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(FormatError):
        assert isinstance(read_archive_front(bytes(archive), "x"), ArchivedTensor)
