"""What changed in a block comes back from its bytes, and bytes that are damaged are errors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoint.deltas.encoding import (
    COMPRESSED,
    DIFFERENCES,
    Coding,
    EncodedBlock,
    decode_block,
    encode_block,
    word_bytes,
)
from reshard.errors import FormatError

pytest.importorskip("xxhash")
pytest.importorskip("zstandard")


def decode(encoded: EncodedBlock, block: Any, **other: Any) -> None:
    fields = {
        "payload": encoded.payload,
        "coding": int(encoded.coding),
        "flags": encoded.flags,
        "words": encoded.words,
        "plain_bytes": encoded.plain_bytes,
        "label": "block 7",
        "has_before": True,
        **other,
    }
    decode_block(block=block, **fields)


def words_of(content: bytes, itemsize: int) -> Any:
    return np.frombuffer(bytearray(content), dtype=f"<u{word_bytes(itemsize)}")


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, bytes, bytes]:
    """An element size, and a block before and after: words changed, alone or in rows."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
    count = draw(st.integers(1, 3000))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    before = generator.integers(0, 256, count * itemsize, dtype=np.uint8)
    after = before.copy()
    share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]))
    rows = after.reshape(count, itemsize)
    rows[generator.random(count) < share] ^= draw(st.integers(1, 255))
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, count - 1))
        rows[begin : begin + draw(st.integers(1, 400))] ^= 1
    return itemsize, before.tobytes(), after.tobytes()


@given(changes(), st.booleans())
def test_encoded_changes_are_decoded_to_the_same_block(
    change: tuple[int, bytes, bytes], compressed: bool
) -> None:
    itemsize, before, after = change
    encoded = encode_block(memoryview(before), memoryview(after), itemsize, compressed=compressed)
    if before == after:
        assert encoded is None
        return
    assert encoded is not None
    assert len(encoded.payload) <= encoded.plain_bytes <= len(after)
    assert encoded.words == np.count_nonzero(
        words_of(before, itemsize) != words_of(after, itemsize)
    ) or (encoded.coding is Coding.WHOLE)
    block = words_of(before, itemsize)
    decode(encoded, block)
    assert block.tobytes() == after


@given(changes(), st.booleans())
def test_a_block_without_a_state_before(change: tuple[int, bytes, bytes], compressed: bool) -> None:
    itemsize, _, after = change
    encoded = encode_block(None, memoryview(after), itemsize, compressed=compressed)
    assert encoded is not None and encoded.coding is Coding.WHOLE
    assert not encoded.flags & DIFFERENCES
    block = words_of(bytes(len(after)), itemsize)
    decode(encoded, block, has_before=False)
    assert block.tobytes() == after


def made(share: float, size: int = 2, count: int = 1 << 16) -> tuple[bytes, bytes]:
    generator = np.random.default_rng(0)
    before = generator.integers(0, 1 << 15, count, dtype=f"<u{size}")
    after = before.copy()
    after[generator.random(count) < share] ^= 1
    return before.tobytes(), after.tobytes()


@pytest.mark.parametrize(
    ("share", "coding", "bytes_a_word"),
    [
        (0.001, Coding.GAPS, 8.0),
        (0.01, Coding.GAPS, 3.2),
        (0.03, Coding.GAPS, 3.1),
        (0.3, Coding.MASK, 2.5),
        (0.97, Coding.WHOLE, 2.1),
    ],
)
def test_the_shortest_way_is_taken(share: float, coding: Coding, bytes_a_word: float) -> None:
    before, after = made(share)
    encoded = encode_block(memoryview(before), memoryview(after), 2, compressed=False)
    assert encoded is not None and encoded.coding is coding
    assert len(encoded.payload) / encoded.words < bytes_a_word


def test_changed_rows_are_encoded_as_runs() -> None:
    before = np.zeros((64, 512), np.float32)
    after = before.copy()
    after[10:13] = 1
    after[40] = 2
    encoded = encode_block(
        memoryview(before.tobytes()), memoryview(after.tobytes()), 4, compressed=False
    )
    assert encoded is not None and encoded.coding is Coding.RUNS
    assert len(encoded.payload) == 4 + 2 * 8 + 4 * 512 * 4


def test_small_moves_are_compressed() -> None:
    before, after = made(0.03)
    plain = encode_block(memoryview(before), memoryview(after), 2, compressed=False)
    packed = encode_block(memoryview(before), memoryview(after), 2, compressed=True)
    assert plain is not None and packed is not None
    assert packed.flags & COMPRESSED and packed.flags & DIFFERENCES
    assert len(packed.payload) < 0.5 * len(plain.payload)


def test_incompressible_changes_are_not_compressed() -> None:
    content = np.random.default_rng(0).integers(0, 256, 100, dtype=np.uint8).tobytes()
    encoded = encode_block(None, memoryview(content), 1, compressed=True)
    assert encoded is not None and encoded.flags == 0 and encoded.payload == content


@pytest.mark.parametrize("share", [0.001, 0.03, 0.3, 0.97])
@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_payloads_are_errors_or_other_values(share: float, compressed: bool) -> None:
    before, after = made(share, count=4096)
    encoded = encode_block(memoryview(before), memoryview(after), 2, compressed=compressed)
    assert encoded is not None
    chance = random.Random(0)
    told = []
    for _ in range(300):
        payload = bytearray(encoded.payload)
        for _ in range(chance.randint(1, 4)):
            payload[chance.randrange(len(payload))] = chance.randrange(256)
        fields: dict[str, Any] = {"payload": bytes(payload[: chance.randint(0, 2 * len(payload))])}
        for name in ("coding", "flags"):
            if chance.random() < 0.2:
                fields[name] = chance.randrange(8)
        for name in ("words", "plain_bytes"):
            if chance.random() < 0.2:
                fields[name] = chance.randrange(1 << 32)
        try:
            decode(encoded, words_of(before, 2), **fields)
        except FormatError as error:
            told.append(str(error))
    assert len(told) > 20
    assert all(one.startswith("block 7") and "damaged" in one for one in told)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"coding": 9}, "an unknown coding 9"),
        ({"flags": 64}, "with flags 64"),
        ({"words": 0}, "0 words"),
        ({"plain_bytes": 1 << 30}, "for a block of 4096 words"),
        ({"payload": b""}, "a payload of 0 bytes"),
        ({"has_before": False}, "a block that did not exist"),
        ({"flags": COMPRESSED}, "not a Zstandard frame|would be decompressed"),
    ],
)
def test_damaged_payloads_are_refused(fields: dict[str, Any], told: str) -> None:
    before, after = made(0.03, count=4096)
    encoded = encode_block(memoryview(before), memoryview(after), 2, compressed=False)
    assert encoded is not None
    with pytest.raises(FormatError, match=told):
        decode(encoded, words_of(before, 2), **fields)


def test_a_frame_that_would_fill_the_memory() -> None:
    import zstandard

    frame = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    with pytest.raises(FormatError, match="would be decompressed to 268435456 bytes"):
        decode(EncodedBlock(Coding.WHOLE, COMPRESSED, 16, 32, frame), np.zeros(16, "<u2"))
