"""Plain values come back from JSON as they were.

A delta file that was cut off, damaged or made to deceive is an error of ours, or still right."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import Tensor, tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.blocks.grid import block_digest
from reshard.checkpoint.deltas import delta_file
from reshard.checkpoint.deltas.delta_file import (
    HEADER_BYTES,
    RECORD,
    decode_value,
    encode_value,
    is_plain_path,
)
from reshard.errors import CheckpointError, FormatError, ReshardError, RunError, UsageError
from selection import choose

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(
    plain | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=10,
)


@given(values)
def test_encoded_values_are_decoded_with_their_types(value: Any) -> None:
    found = decode_value(json.loads(json.dumps(encode_value(value))))
    assert found == value and repr(found) == repr(value)


def test_a_nan_is_decoded_as_a_nan() -> None:
    assert math.isnan(decode_value(encode_value(float("nan"))))


def test_unsupported_values_are_refused() -> None:
    with pytest.raises(UsageError, match="a value of type object"):
        encode_value([object()])
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(UsageError, match="nested more than 64 levels"):
        encode_value(deep)
    with pytest.raises(FormatError, match="nested more than 64 levels"):
        decode_value(deep)


@pytest.mark.parametrize(
    "content",
    [{"set": []}, {}, {"a": 1, "b": 2}, {"bytes": "?"}, {"tuple": 3}, {"dict": [1]}, {"float": []}],
)
def test_invalid_values_are_refused(content: Any) -> None:
    with pytest.raises(FormatError):
        decode_value(content)


def test_only_paths_inside_the_folder_are_plain() -> None:
    names = ["a/b", "a//b", "/a", "a/../b", "", "reshard.manifest.json", "a/.hidden"]
    assert [is_plain_path(name) for name in names] == [True] + 6 * [False]


WHOLE = {
    "a": tensor("float32", (40, 20), 1),
    "b": tensor("bfloat16", (33, 7), 2),
    "gone": tensor("int8", (4,), 3),
}


@pytest.fixture(params=[None, "zstd"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a base, what it became, and the delta."""
    bits = WHOLE["a"].bits.copy()
    bits[::3, 5] ^= 1
    after = {"a": Tensor(WHOLE["a"].dtype, bits), "b": WHOLE["b"], "new": tensor("int16", (9,), 9)}
    for name, tensors in (("base", WHOLE), ("after", after)):
        (tmp_path / name).mkdir()
        write_file(tmp_path / name / "model.safetensors", tensors)
        (tmp_path / name / "config.json").write_text(name)
    checkpoint.diff(
        tmp_path / "base", tmp_path / "after", tmp_path / "delta", compression=request.param
    )
    return tmp_path


def rebuilt(content: bytes, change: Callable[[dict[str, Any], Any, Any], None]) -> bytes:
    """A delta with another index, whose digest is right."""
    start, size = struct.unpack_from("<QQ", content, 16)
    index = content[start : start + size]
    text_bytes, blocks, changed = struct.unpack_from("<3Q", index)
    text = json.loads(index[24 : 24 + text_bytes])
    columns = index[24 + text_bytes :]
    digests = np.frombuffer(columns[: 16 * blocks], np.uint8).reshape(-1, 16).copy()
    records = np.frombuffer(columns[16 * blocks :], RECORD).copy()
    assert len(records) == changed
    change(text, digests, records)
    raw = json.dumps(text).encode()
    index = struct.pack("<3Q", len(raw), len(digests), len(records)) + raw
    index += digests.tobytes() + records.tobytes()
    header = struct.pack("<8sIIQQ16s", content[:8], 1, 0, start, len(index), block_digest(index))
    return header.ljust(HEADER_BYTES, b"\0") + content[HEADER_BYTES:start] + index


def outcome(folder: Path, content: bytes) -> str:
    """What applying a delta comes to: an error of ours, or the right checkpoint."""
    (folder / "damaged").write_bytes(content)
    try:
        checkpoint.apply(folder / "base", folder / "damaged", folder / "out", overwrite=True)
    except ReshardError as error:
        return type(error).__name__
    finally:
        shutil.rmtree(folder / ".out.reshard-staging", ignore_errors=True)
    assert not checkpoint.check_digests(folder / "out").damaged
    return "right" if checkpoint.compare(folder / "after", folder / "out").is_same else "another"


def test_a_flipped_byte_anywhere_is_detected(folder: Path) -> None:
    content = (folder / "delta").read_bytes()
    found = set()
    for at in range(0, len(content), choose(7, 3)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        found.add(outcome(folder, bytes(damaged)))
    # Reserved bytes of the header mean nothing.
    assert {"FormatError", "DigestError"} <= found <= {"FormatError", "DigestError", "right"}


def test_a_truncated_or_extended_delta_is_refused(folder: Path) -> None:
    content = (folder / "delta").read_bytes()
    for size in range(0, len(content), 7):
        assert outcome(folder, content[:size]) == "FormatError"
    assert outcome(folder, content + b"more") == "FormatError"


def test_inconsistent_indexes_are_refused(folder: Path) -> None:
    content = (folder / "delta").read_bytes()
    chance = random.Random(0)

    def change(text: dict[str, Any], digests: Any, records: Any) -> None:
        what = chance.randrange(4)
        if what == 0 and len(records):
            name = chance.choice(RECORD.names or ())
            row = records[chance.randrange(len(records)) :][:1]
            row[name] = bytes(16) if name == "before" else chance.randrange(256)
        elif what == 1:
            digests[chance.randrange(len(digests)), 3] ^= 1
        elif what == 2:
            key = chance.choice([*text])
            text[key] = chance.choice([None, 7, "x", [], {}, [["a", 1]], [[1, 2, 3, 4]], {"a": {}}])
        else:
            row = chance.choice(text["tensors"])
            row[chance.randrange(4)] = chance.choice(
                ["a", "b", "kept", "added", "changed", "float32", [1 << 40], [-1], [5, 5], None, 3]
            )

    found = {outcome(folder, rebuilt(content, change)) for _ in range(choose(50, 400))}
    assert {"FormatError", "DigestError"} <= found
    # With other names, it is the delta of another checkpoint.
    assert found <= {
        "FormatError",
        "DigestError",
        "CheckpointError",
        "UsageError",
        "right",
        "another",
    }


def set_in(key: str, value: Any) -> Callable[[dict[str, Any], Any, Any], None]:
    def change(text: dict[str, Any], digests: Any, records: Any) -> None:
        text[key] = value

    return change


def set_record(name: str, value: Any) -> Callable[[dict[str, Any], Any, Any], None]:
    def change(text: dict[str, Any], digests: Any, records: Any) -> None:
        records[0:1][name] = value

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (set_in("tensors", [["a", "float32", [1 << 50, 1 << 50], "added"]]), "tensor 'a'"),
        (set_in("tensors", [["a", "float32", [1 << 40], "added"]]), "not the number of its"),
        (set_in("files", [["../x", "00" * 16, 1, 0]]), "leads outside"),
        (set_in("files", [["x", "00" * 16, 1 << 40, 0]]), "outside of the payload"),
        (set_in("files", [["x", "00", 1, 0]]), "the digest '00'"),
        (set_in("block_bytes", 4096), "blocks of 4096 bytes"),
        (set_in("values", {"a": {"set": []}}), "the unknown kind 'set'"),
        (set_record("start", 1 << 60), "outside of the payload"),
        (set_record("size", (1 << 32) - 1), "outside of the payload"),
        (set_record("block", 1 << 63), "not in order"),
    ],
)
def test_errors_of_deltas_are_explained(
    folder: Path, change: Callable[[dict[str, Any], Any, Any], None], told: str
) -> None:
    content = rebuilt((folder / "delta").read_bytes(), change)
    (folder / "damaged").write_bytes(content)
    with pytest.raises(FormatError, match=f"(?s){told}.*the delta is damaged, fetch it again"):
        checkpoint.read_delta(folder / "damaged")


def test_a_file_of_tensors_is_not_overwritten(folder: Path) -> None:
    def change(text: dict[str, Any], digests: Any, records: Any) -> None:
        text["files"][0][0] = "model.safetensors"

    assert outcome(folder, rebuilt((folder / "delta").read_bytes(), change)) == "FormatError"


def test_a_delta_that_cannot_be_renamed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(delta_file, "restrict_mode", fail)
    with (
        pytest.raises(RunError, match="not permitted"),
        delta_file.DeltaWriter(tmp_path / "changes") as writer,
    ):
        writer.finish({}, np.empty(0, np.uint8), np.empty(0, RECORD))
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_not_deltas(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read the delta .*No such file"):
        checkpoint.read_delta(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="cannot read the delta"):
        checkpoint.read_delta(tmp_path)
    (tmp_path / "text").write_text("some text that is longer than the header of a delta, by far so")
    with pytest.raises(FormatError, match="is not a delta: it begins with b'some tex'"):
        checkpoint.read_delta(tmp_path / "text")
    (tmp_path / "later").write_bytes(b"RSHDELTA" + struct.pack("<I", 2) + bytes(60))
    with pytest.raises(FormatError, match="a delta of version 2; this reshard reads 1, update it"):
        checkpoint.read_delta(tmp_path / "later")
