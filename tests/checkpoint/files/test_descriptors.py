"""Descriptors of files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from reshard.checkpoint.files.descriptors import read_range, read_up_to

# Allocating it fails, so only a request that is cut to the file can pass.
HUGE_BYTES = 1 << 60
CONTENT = bytes(range(256)) * 5000


@pytest.mark.parametrize("buffering", [-1, 0])
@pytest.mark.parametrize("start", [0, 300, len(CONTENT), len(CONTENT) + 5])
def test_no_more_memory_is_asked_for_than_the_file_has(
    tmp_path: Path, buffering: int, start: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with path.open("rb", buffering=buffering) as file:
        assert read_range(file, start, HUGE_BYTES) == CONTENT[start:]
        file.seek(start)
        assert read_up_to(file, HUGE_BYTES) == CONTENT[start:]


def test_a_stream_without_a_descriptor_is_read_up_to_its_end() -> None:
    class Stream(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            assert size <= len(CONTENT)
            return super().read(size)

    assert read_range(Stream(CONTENT), 300, HUGE_BYTES) == CONTENT[300:]


def test_a_short_range_is_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with path.open("rb") as file:
        assert read_range(file, 10, 5) == CONTENT[10:15]
        file.seek(10)
        assert read_up_to(file, 5) == CONTENT[10:15]
        assert file.tell() == 15
