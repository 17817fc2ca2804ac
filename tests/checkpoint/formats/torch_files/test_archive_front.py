"""The beginning of an archive says what its directory says, or is refused."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.checkpoint.formats.torch_files.archive import (
    FRONT_BYTES,
    read_archive,
    read_archive_front,
)
from reshard.checkpoint.formats.torch_files.archived_tensors import ArchivedTensor
from reshard.errors import FormatError
from selection import choose

torch = pytest.importorskip("torch")


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


def saved(value: Any) -> bytes:
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()


def whole(archive: bytes) -> ArchivedTensor:
    found = read_archive(lambda at, n: archive[at : at + n], 0, len(archive), "x")
    return replace(found, crc32=None)


VALUES = [
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


@pytest.mark.parametrize("number", range(len(VALUES)))
@pytest.mark.parametrize("save", [saved, streamed])
def test_the_beginning_says_what_the_directory_says(number: int, save: Any) -> None:
    archive = save(VALUES[number])
    assert read_archive_front(archive[:FRONT_BYTES], "x") == whole(archive)


def test_without_checksums() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        archive = saved(VALUES[0])
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_archive_front(archive, "x") == whole(archive)


@pytest.mark.parametrize("value", [{"w": torch.ones(2)}, 3, torch.ones(2).to_sparse()])
def test_what_is_no_tensor(value: Any) -> None:
    with pytest.raises(FormatError, match=r"^x is no tensor|a sparse tensor"):
        read_archive_front(saved(value), "x")


def test_every_shorter_beginning_is_refused_or_enough() -> None:
    archive = saved(VALUES[0])
    expected = whole(archive)
    for size in range(len(archive)):
        if size >= expected.start_bytes:
            assert read_archive_front(archive[:size], "x") == expected
            continue
        # All but the padding in front of the storage may be there.
        with contextlib.suppress(FormatError):
            assert read_archive_front(archive[:size], "x") == expected


@settings(max_examples=choose(90, 300))
@given(st.data())
def test_a_changed_byte_is_an_error_or_a_tensor(data: st.DataObject) -> None:
    archive = bytearray(saved(VALUES[0]))
    at = data.draw(st.integers(0, whole(bytes(archive)).start_bytes - 1))
    archive[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(FormatError):
        assert isinstance(read_archive_front(bytes(archive), "x"), ArchivedTensor)
