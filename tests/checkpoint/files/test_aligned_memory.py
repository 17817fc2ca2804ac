"""Memory for direct I/O: where regions lie, and what belongs to whom."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoint.files.aligned_memory import PAGE_BYTES, AlignedBuffer, BufferRegion
from reshard.errors import UsageError


def address_of(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


@given(
    st.lists(
        st.tuples(st.integers(0, 2**50), st.integers(1, 5 * PAGE_BYTES)), min_size=1, max_size=6
    ),
    st.integers(0, PAGE_BYTES),
)
def test_regions_are_congruent_and_their_pages_are_their_own(pieces, at):
    sizes = [AlignedBuffer.capacity_for(size) for _, size in pieces]
    with AlignedBuffer(PAGE_BYTES + sum(sizes)) as buffer:
        base = address_of(buffer.region(0, 1).memory)
        assert base % PAGE_BYTES == 0
        regions = []
        end = at
        for offset, size in pieces:
            region = buffer.region(offset, size, at=end)
            regions.append(region)
            first = address_of(region.memory)
            first_page = address_of(region.pages)
            assert region.memory.nbytes == size
            assert first % PAGE_BYTES == offset % PAGE_BYTES
            assert first_page % PAGE_BYTES == 0
            assert first_page - base >= end
            assert first - first_page == region.lead_bytes < PAGE_BYTES
            assert region.pages.nbytes % PAGE_BYTES == 0
            assert first_page + region.pages.nbytes >= first + size
            assert first_page + region.pages.nbytes == base + region.end_bytes
            end = region.end_bytes
        for number, region in enumerate(regions):
            region.pages[:] = bytes([number + 1]) * region.pages.nbytes
        for number, region in enumerate(regions):
            assert bytes(region.memory) == bytes([number + 1]) * region.memory.nbytes


def test_memory_is_a_view_of_its_pages():
    with AlignedBuffer(3 * PAGE_BYTES) as buffer:
        region = buffer.region(100, 5000)
        region.memory[:] = b"x" * 5000
        assert bytes(region.pages) == b"\0" * 100 + b"x" * 5000 + b"\0" * (8192 - 5100)


def test_capacity_for_is_enough_everywhere_and_not_a_page_too_much():
    for size, lead in itertools.product((0, 1, 4095, 4096, 4097, 8192), (0, 1, 4095)):
        with AlignedBuffer(AlignedBuffer.capacity_for(size)) as buffer:
            assert buffer.region(lead, size).memory.nbytes == size
    with (
        AlignedBuffer(AlignedBuffer.capacity_for(5000) - PAGE_BYTES) as buffer,
        pytest.raises(UsageError, match="does not fit"),
    ):
        buffer.region(4095, 5000)


@pytest.mark.parametrize(("offset", "size", "at"), [(-1, 1, 0), (0, -1, 0), (0, 1, -1)])
def test_negative_numbers_are_refused(offset, size, at):
    with AlignedBuffer(PAGE_BYTES) as buffer, pytest.raises(UsageError, match="negative"):
        buffer.region(offset, size, at)


def test_a_negative_capacity_is_refused():
    with pytest.raises(UsageError, match="-1 bytes"):
        AlignedBuffer(-1)


def test_what_does_not_fit_says_what_would():
    with AlignedBuffer(PAGE_BYTES) as buffer:
        with pytest.raises(UsageError, match=r"4096 bytes for file offset 1 .* room up to 8192"):
            buffer.region(1, 4096)
        with pytest.raises(UsageError, match="behind position 1"):
            buffer.region(0, 1, at=1)


def test_a_region_outlives_its_buffer_but_a_closed_buffer_gives_none():
    buffer = AlignedBuffer(PAGE_BYTES)
    region = buffer.region(0, 10)
    buffer.close()
    buffer.close()
    region.memory[:] = b"0123456789"
    assert bytes(region.memory) == b"0123456789"
    with pytest.raises(UsageError, match="closed"):
        buffer.region(0, 10)
    assert repr(buffer) == "AlignedBuffer(closed)"


def test_a_region_that_is_not_its_pages_is_refused():
    memory = memoryview(bytearray(2 * PAGE_BYTES))
    with pytest.raises(UsageError, match="4096 bytes of pages: expected 8192"):
        BufferRegion(memory=memory[1:4097], pages=memory[:4096], lead_bytes=1, end_bytes=4096)
    with pytest.raises(UsageError, match="4096 bytes into its first page"):
        BufferRegion(memory=memory[4096:], pages=memory, lead_bytes=4096, end_bytes=8192)
