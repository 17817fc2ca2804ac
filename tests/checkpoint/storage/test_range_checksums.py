"""Checksums of ranges put together from pieces in any order are those of the whole."""

from __future__ import annotations

import itertools
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoint.storage.range_checksums import RangeChecksums, shift_crc32
from reshard.errors import UsageError


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_shifted_checksums_agree_with_zlib(front: bytes, back: bytes) -> None:
    both = shift_crc32(zlib.crc32(front), len(back)) ^ zlib.crc32(back)
    assert both == zlib.crc32(front + back)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 65_535, 65_536, 1_000_003, 1 << 24])
def test_moved_over_many_bytes(size: int) -> None:
    back = bytes(size)
    assert shift_crc32(zlib.crc32(b"front"), size) ^ zlib.crc32(back) == zlib.crc32(b"front" + back)


def test_moved_twice_is_moved_at_once_over_more_than_memory_holds() -> None:
    for size in (1 << 40, (1 << 41) + 12_345):
        assert shift_crc32(shift_crc32(77, size), size - 1) == shift_crc32(77, 2 * size - 1)


@given(st.binary(min_size=1, max_size=100), st.lists(st.integers(0, 100)), st.randoms())
def test_pieces_in_any_order(content: bytes, cuts: list[int], random: object) -> None:
    edges = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    pieces = list(itertools.pairwise(edges))
    random.shuffle(pieces)  # type: ignore[attr-defined]
    checksums = RangeChecksums({"a": [(7, len(content)), (1000, 5)], "b": [(7, 3)]})
    for start, stop in pieces:
        assert checksums.of("a", 7) is None
        checksums.add("a", 7 + start, memoryview(content)[start:stop])
    assert checksums.of("a", 7) == zlib.crc32(content)
    assert checksums.of("a", 1000) is None
    assert checksums.of("b", 7) is None


def test_bytes_in_no_range_do_not_matter() -> None:
    checksums = RangeChecksums({"a": [(10, 5), (20, 0)]})
    checksums.add("a", 0, b"0123456789")
    checksums.add("a", 15, b"56789")
    checksums.add("other", 10, b"01234")
    assert checksums.of("a", 10) is None
    assert checksums.of("a", 20) == 0


def test_bytes_across_an_end_and_ranges_that_are_not_there_are_refused() -> None:
    checksums = RangeChecksums({"a": [(10, 5)]})
    with pytest.raises(UsageError, match="cross the end of a range at 15"):
        checksums.add("a", 12, b"2345")
    with pytest.raises(UsageError, match="begins at byte 11"):
        checksums.of("a", 11)
