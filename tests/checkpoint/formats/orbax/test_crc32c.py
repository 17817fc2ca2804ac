"""CRC-32C, short and in lanes."""

from __future__ import annotations

import random

import pytest

from reshard.checkpoint.formats.orbax.crc32c import crc32c


def bit_by_bit(content: bytes) -> int:
    state = 0xFFFFFFFF
    for byte in content:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def test_vectors_of_the_standard() -> None:
    # RFC 3720, appendix B.4.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 5000])
def test_lengths(size: int) -> None:
    content = random.Random(size).randbytes(size)
    assert crc32c(content) == bit_by_bit(content)
