"""Streams of bytes."""

from __future__ import annotations

import tracemalloc

import pytest
import zstandard

from reshard.checkpoint.storage.byte_streams import DecodedStream, RangeStream
from reshard.errors import FormatError

CONTENT = bytes(range(256)) * 30_000


def unpack(packed: bytes, max_bytes: int) -> DecodedStream:
    stream = RangeStream(lambda at, size: packed[at : at + size], 0, len(packed))
    return DecodedStream("zstd", stream, max_bytes, "file", "its header")


def test_a_stream_takes_the_memory_of_its_content_not_of_its_limit() -> None:
    packed = zstandard.compress(b"small")
    tracemalloc.start()
    try:
        assert unpack(packed, 1 << 28).read(1 << 28) == b"small"
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 24


@pytest.mark.parametrize("size", [len(CONTENT), 5_000_000, 1000])
def test_a_request_returns_fewer_bytes_only_at_the_end(size: int) -> None:
    stream = unpack(zstandard.compress(CONTENT), len(CONTENT))
    assert stream.read(size) == CONTENT[:size]
    assert stream.read(len(CONTENT)) == CONTENT[size:]
    assert stream.read(1) == b""


def test_a_stream_longer_than_its_limit_is_an_error() -> None:
    with pytest.raises(FormatError, match="expands beyond"):
        unpack(zstandard.compress(CONTENT), len(CONTENT) - 1).read(len(CONTENT))
