"""What `torch.save` wrote is read whole, as zip archives and as the files before them."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import random
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.checkpoint.formats.torch_files.archived_tensors import ArchivedTensor
from reshard.checkpoint.formats.torch_files.pickle_terms import Call, Global
from reshard.checkpoint.formats.torch_files.saved_files import (
    is_torch_file,
    read_torch_file,
    read_torch_value,
)
from reshard.checkpoint.formats.torch_files.saved_values import explain, numpy_array
from reshard.errors import CheckpointError, FormatError
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
def test_a_state_is_read_as_it_was_saved(value: Any, is_zip: bool, protocol: int) -> None:
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
def test_what_is_not_data_is_kept_and_nobody_makes_it(value: Any, reason: str) -> None:
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
def test_nothing_runs(tmp_path: Path, is_zip: bool) -> None:
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
def test_what_is_cut_off_is_an_error(is_zip: bool) -> None:
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
    with pytest.raises(FormatError, match="names of its storages are no list"):
        read(content[:start] + pickle.dumps(keys, protocol=2) + content[end:])
