"""Encoding the changed elements of a block as bytes, and decoding them.

A block is an array of words: its elements, or the halves of elements of 16 bytes. A payload has the
positions of the changed words and their new values, in the shortest of four encodings::

    whole    all words of the block                                few unchanged words
    gaps     distances between changed words, a byte each          scattered, fewer than 1 in 8
    mask     a bit for every word                                  scattered, more than that
    runs     begins and ends of runs of changed words              rows and columns

1. A gap of 255 or more is written as bytes of 255, which skip 255 words each, and a last byte.
2. An uncompressed payload has the new values. A compressed payload has their differences (exclusive
   or) from the old values: the first bytes of all words, then the second bytes, and so on. Small
   changes differ in few bits, so most of these bytes are equal and compress well.

Compressed payloads are Zstandard frames, a frame for each block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.checkpoint.storage.byte_streams import import_zstandard
from reshard.errors import FormatError

_LEVEL = 1
_MAX_WINDOW_BYTES = 8 << 20
# Compressors are not thread-safe, so each thread has its own.
_thread = threading.local()


def compress(payload: bytes) -> bytes:
    """Compress a payload into a frame that records its length.

    Raises:
        MissingExtraError: zstandard is not installed.
    """
    if not hasattr(_thread, "compressor"):
        _thread.compressor = import_zstandard("the delta").ZstdCompressor(level=_LEVEL)
    return bytes(_thread.compressor.compress(payload))


def decompress(frame: Any, size_bytes: int, label: str) -> bytes:
    """Decompress a payload of `size_bytes`; `label` names it in errors.

    Raises:
        FormatError: a frame that is invalid or of another length.
        MissingExtraError: zstandard is not installed.
    """
    zstandard = import_zstandard("the delta")
    try:
        # This is checked before memory of that size is allocated.
        recorded = zstandard.frame_content_size(frame)
        if recorded != size_bytes:
            raise FormatError(
                f"{label} would be decompressed to {recorded} bytes, expected {size_bytes}; the "
                "delta is damaged, fetch it again"
            )
        decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        content = bytes(decoder.decompress(frame, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise FormatError(
            f"{label} is not a Zstandard frame ({error}); the delta is damaged, fetch it again"
        ) from error
    if len(content) != size_bytes:
        raise FormatError(
            f"{label} was decompressed to {len(content)} bytes, expected {size_bytes}; the delta "
            "is damaged, fetch it again"
        )
    return content


# A gap is a byte; this value adds 255 to the gap that the next byte ends, so that any gap can be
# encoded.
_SKIP = 255
_PART_WORDS = 1 << 18
_COUNT = np.dtype("<u4")


class Coding(IntEnum):
    """The encoding of the positions of changed words."""

    WHOLE = 0
    GAPS = 1
    MASK = 2
    RUNS = 3


#: Bits of a record's flags.
COMPRESSED, DIFFERENCES, PLANES = 1, 2, 4
_KNOWN_FLAGS = COMPRESSED | DIFFERENCES | PLANES


class EncodedBlock(NamedTuple):
    """The changes of a block: `payload`, which has `plain_bytes` before compression."""

    coding: Coding
    flags: int
    words: int
    plain_bytes: int
    payload: bytes


def word_bytes(itemsize_bytes: int) -> int:
    """Return the size of a word in a tensor with elements of `itemsize_bytes`.

    >>> [word_bytes(size) for size in (1, 2, 8, 16)]
    [1, 2, 8, 8]
    """
    return next(size for size in (8, 4, 2, 1) if itemsize_bytes % size == 0)


def encode_block(
    before: memoryview | None, after: memoryview, itemsize_bytes: int, *, compressed: bool
) -> EncodedBlock | None:
    """Encode the changes between two states of a block, or return None if there are none.

    `before` is None for a block without an earlier state.
    """
    size = word_bytes(itemsize_bytes)
    new = np.frombuffer(after, dtype=f"<u{size}")
    if before is None:
        return _pack(Coding.WHOLE, b"", new, None, compressed)
    old = np.frombuffer(before, dtype=f"<u{size}")
    return encode_words(new != old, new, old if compressed else None, compressed=compressed)


def encode_words(
    changed: NDArray[np.bool_], new: NDArray[Any], old: NDArray[Any] | None, *, compressed: bool
) -> EncodedBlock | None:
    """Encode the words of a block marked in `changed`, or return None if there are none.

    `old` are the words before, so that differences can be compressed, or None if unknown.
    """
    words = int(np.count_nonzero(changed))
    if not words:
        return None
    # Gaps take at least a byte per changed word, and a mask a bit per word. So a mask is shorter if
    # more than 1 in 8 words changed.
    is_sparse = words <= len(changed) // 8
    places = np.flatnonzero(changed) if is_sparse else None
    coding, head = _choose(changed, places, words, new.itemsize)
    if coding is Coding.WHOLE:
        return _pack(coding, b"", new, old, compressed)

    def take(block: NDArray[Any]) -> NDArray[Any]:
        return block[places] if places is not None else _take(block, changed, words)

    return _pack(coding, head, take(new), None if old is None else take(old), compressed)


def list_positions(chosen: NDArray[np.bool_]) -> Iterator[tuple[slice, NDArray[np.intp]]]:
    """Yield the positions of chosen words, for a part of the block at a time.

    NumPy gathers and scatters several times as fast by positions as by a mask, but the positions of
    a whole block can take more memory than the block.
    """
    for start in range(0, len(chosen), _PART_WORDS):
        part = slice(start, min(start + _PART_WORDS, len(chosen)))
        yield part, np.flatnonzero(chosen[part])


def _take(words: NDArray[Any], chosen: NDArray[np.bool_], count: int) -> NDArray[Any]:
    """Return the chosen words."""
    result = np.empty(count, dtype=words.dtype)
    at = 0
    for part, places in list_positions(chosen):
        result[at : at + len(places)] = words[part][places]
        at += len(places)
    return result


def _choose(
    changed: NDArray[np.bool_], places: NDArray[np.intp] | None, words: int, size: int
) -> tuple[Coding, bytes]:
    """Return the shortest encoding of the positions of changed words, and its bytes."""
    total = len(changed)
    # The bytes of each encoding in addition to the changed values. `whole` also stores the
    # unchanged words.
    costs = {Coding.WHOLE: (total - words) * size, Coding.MASK: -(-total // 8)}
    if places is not None:
        runs = 1 + np.count_nonzero(places[1:] != places[:-1] + 1)
    else:
        turns = np.count_nonzero(changed[1:] != changed[:-1])
        runs = (turns + int(changed[0]) + int(changed[-1])) // 2
    costs[Coding.RUNS] = _COUNT.itemsize + int(runs) * 8
    gaps: NDArray[Any] = np.empty(0, dtype=np.uint8)
    if places is not None:
        gaps = _encode_gaps(places)
        costs[Coding.GAPS] = _COUNT.itemsize + len(gaps)
    # The first of the cheapest encodings, so that equal changes have equal bytes.
    coding = min(costs, key=lambda option: (costs[option], option))
    if coding is Coding.GAPS:
        return coding, np.array(len(gaps), _COUNT).tobytes() + gaps.tobytes()
    if coding is Coding.MASK:
        return coding, np.packbits(changed, bitorder="little").tobytes()
    if coding is Coding.RUNS:
        zero = np.zeros(1, dtype=np.int8)
        edges = np.flatnonzero(np.diff(changed.view(np.int8), prepend=zero, append=zero))
        # Pairs: the distance from the end of the previous run, and the length of the run.
        steps = np.diff(edges, prepend=0).astype("<u4")
        return coding, np.array(len(steps) // 2, _COUNT).tobytes() + steps.tobytes()
    return coding, b""


def _encode_gaps(places: NDArray[np.intp]) -> NDArray[np.uint8]:
    gaps = places.astype(np.uint32)
    gaps[1:] -= gaps[:-1] + np.uint32(1)
    skips = gaps // np.uint32(_SKIP)
    # The common case: every gap fits into a byte.
    if not skips.any():
        return gaps.astype(np.uint8)
    ends = np.cumsum(skips + np.uint32(1))
    coded = np.full(int(ends[-1]), _SKIP, dtype=np.uint8)
    coded[ends - 1] = gaps - skips * np.uint32(_SKIP)
    return coded


def _pack(
    coding: Coding, head: bytes, new: NDArray[Any], old: NDArray[Any] | None, compressed: bool
) -> EncodedBlock:
    words = len(new)
    plain_bytes = len(head) + new.nbytes
    if compressed:
        values = new if old is None else new ^ old
        planes = np.ascontiguousarray(values.view(np.uint8).reshape(words, -1).T)
        payload = compress(head + planes.tobytes())
        # A payload that does not get smaller is stored uncompressed.
        if len(payload) < plain_bytes:
            flags = COMPRESSED | PLANES | (DIFFERENCES if old is not None else 0)
            return EncodedBlock(coding, flags, words, plain_bytes, payload)
    return EncodedBlock(coding, 0, words, plain_bytes, head + new.tobytes())


def decode_block(
    payload: Any,
    coding: int,
    flags: int,
    words: int,
    plain_bytes: int,
    block: NDArray[Any],
    label: str,
    *,
    has_before: bool,
) -> None:
    """Apply a payload to a block, given as its words; `label` names it in errors.

    Raises:
        FormatError: an invalid payload of such a block.
    """

    def damaged(what: str) -> FormatError:
        return FormatError(f"{label}: {what}; the delta is damaged, fetch it again")

    if flags & ~_KNOWN_FLAGS or coding not in [*Coding]:
        raise damaged(f"an unknown coding {coding} with flags {flags}")
    if plain_bytes > block.nbytes or not 0 < words <= len(block):
        raise damaged(f"{words} words in {plain_bytes} bytes for a block of {len(block)} words")
    if not has_before and (flags & DIFFERENCES or coding != Coding.WHOLE):
        raise damaged("changes of a block that did not exist")
    if flags & COMPRESSED:
        payload = decompress(payload, plain_bytes, label)
    if len(payload) != plain_bytes:
        raise damaged(f"a payload of {len(payload)} bytes, expected {plain_bytes}")
    chosen, values = read_changes(payload, coding, words, len(block), block.itemsize, label)
    if flags & PLANES:
        values = np.ascontiguousarray(values.reshape(block.itemsize, words).T).reshape(-1)
    numbers = np.frombuffer(values.tobytes(), dtype=block.dtype)
    if chosen is None:
        block[:] = numbers ^ block if flags & DIFFERENCES else numbers
    else:
        _put(block, chosen, numbers, differences=bool(flags & DIFFERENCES))


def read_changes(
    payload: Any, coding: int, words: int, total: int, size_bytes: int, label: str
) -> tuple[NDArray[Any] | None, NDArray[np.uint8]]:
    """Return the changed words of a block, and their bytes, from an uncompressed payload.

    Args:
        payload: the payload of a block of `total` words of `size_bytes`, `words` of which changed.
        label: the name of the payload in errors.

    Returns:
        The words, as positions or a mask (None: all), and the bytes.

    Raises:
        FormatError: an invalid payload of such a block.
    """

    def damaged(what: str) -> FormatError:
        return FormatError(f"{label}: {what}; the delta is damaged, fetch it again")

    content = np.frombuffer(payload, dtype=np.uint8)
    chosen, head_bytes = _find_changed(content, coding, total, damaged)
    if len(content) - head_bytes != words * size_bytes:
        raise damaged(f"{len(content) - head_bytes} bytes of values for {words} words")
    named = total if chosen is None else _count(chosen)
    if named != words:
        raise damaged(f"{named} words are named, expected {words}")
    return chosen, content[head_bytes:]


def _put(
    block: NDArray[Any], chosen: NDArray[Any], numbers: NDArray[Any], *, differences: bool
) -> None:
    """Change the chosen words, given by positions or a mask."""
    parts = list_positions(chosen) if chosen.dtype == bool else [(slice(None), chosen)]
    at = 0
    for part, places in parts:
        new = numbers[at : at + len(places)]
        words = block[part]
        words[places] = new ^ words[places] if differences else new
        at += len(places)


def _count(chosen: NDArray[Any]) -> int:
    return int(np.count_nonzero(chosen)) if chosen.dtype == bool else len(chosen)


def _find_changed(
    content: NDArray[np.uint8], coding: int, total: int, damaged: Any
) -> tuple[NDArray[Any] | None, int]:
    """Return the changed words, as positions or a mask (None: all), and the bytes used."""
    if coding == Coding.WHOLE:
        return None, 0
    if coding == Coding.MASK:
        size = -(-total // 8)
        if len(content) < size:
            raise damaged("a truncated mask")
        return np.unpackbits(content[:size], count=total, bitorder="little").view(bool), size
    if len(content) < _COUNT.itemsize:
        raise damaged("a payload without a length")
    count = int(np.frombuffer(content[: _COUNT.itemsize].tobytes(), _COUNT)[0])
    size = _COUNT.itemsize + count * (1 if coding == Coding.GAPS else 8)
    if len(content) < size or not count:
        raise damaged(f"{count} truncated positions")
    head = content[_COUNT.itemsize : size]
    if coding == Coding.GAPS:
        # Each byte moves past a changed word, except bytes of 255, which only skip words.
        steps = head.astype(np.int64)
        is_skip = head == _SKIP
        steps[~is_skip] += 1
        places = (np.cumsum(steps) - 1)[~is_skip]
        if is_skip[-1] or places[-1] >= total:
            raise damaged("gaps beyond the end of the block")
        return places, size
    edges = np.cumsum(np.frombuffer(head.tobytes(), "<u4").astype(np.int64))
    if edges[-1] > total or (np.diff(edges) <= 0).any():
        raise damaged("runs that are empty, touch, or reach beyond the end of the block")
    marks = np.zeros(total + 1, dtype=np.int8)
    marks[edges[::2]] = 1
    marks[edges[1::2]] = -1
    return np.cumsum(marks[:-1], dtype=np.int8).view(bool), size
