"""CRC-32C of bytes, the checksum of OCDBT's manifests and nodes.

    crc32c(head + tail) = advance(crc32c(head), len(tail)) ^ crc32c(tail)

Long content is cut into equally long lanes, whose checksums are found together, one byte of every
lane at a time, and joined by the line above.

Source: RFC 3720, appendix B.4 (the polynomial); Kadatch and Jenkins, "Everything we know about
CRC" (joining).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

# The polynomial 0x1EDC6F41 with its bits reversed.
_POLYNOMIAL = 0x82F63B78
_LANES = 1024


def _make_table() -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


_TABLE = _make_table()
_TABLE_LIST = _TABLE.tolist()


def crc32c(content: bytes, before: int = 0) -> int:
    """The CRC-32C of `content`, behind bytes whose CRC-32C is `before`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    >>> hex(crc32c(b"56789", crc32c(b"1234")))
    '0xe3069283'
    """
    lane_bytes = len(content) // _LANES
    checksum, rest = before, content
    if lane_bytes:
        lanes = np.frombuffer(content, np.uint8, _LANES * lane_bytes).reshape(_LANES, lane_bytes)
        states = np.full(_LANES, 0xFFFFFFFF, dtype=np.uint32)
        for column in lanes.T:
            states = _TABLE[(states ^ column) & 0xFF] ^ (states >> np.uint32(8))
        for state in (states ^ np.uint32(0xFFFFFFFF)).tolist():
            checksum = _advance(checksum, lane_bytes) ^ state
        rest = content[_LANES * lane_bytes :]
    state = 0xFFFFFFFF
    for byte in rest:
        state = _TABLE_LIST[(state ^ byte) & 0xFF] ^ (state >> 8)
    return _advance(checksum, len(rest)) ^ state ^ 0xFFFFFFFF


def _advance(checksum: int, size: int) -> int:
    """The checksum of content followed by `size` bytes, without what these bytes add."""
    found = 0
    for bit, column in enumerate(_find_columns(size)):
        if checksum >> bit & 1:
            found ^= column
    return found


@lru_cache(maxsize=64)
def _find_columns(size: int) -> tuple[int, ...]:
    """What each bit of a checksum becomes behind `size` zero bytes."""
    columns = tuple(1 << bit for bit in range(32))
    # One zero byte as a matrix over bits, by columns; then by squaring.
    step = tuple(_TABLE_LIST[(1 << bit) & 0xFF] ^ ((1 << bit) >> 8) for bit in range(32))
    while size:
        if size & 1:
            columns = tuple(_multiply(step, one) for one in columns)
        step = tuple(_multiply(step, one) for one in step)
        size >>= 1
    return columns


def _multiply(matrix: tuple[int, ...], vector: int) -> int:
    found = 0
    for bit, column in enumerate(matrix):
        if vector >> bit & 1:
            found ^= column
    return found
