"""OCDBT, both ways, against TensorStore."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from reshard.binding import FileRange
from reshard.checkpoint.formats.orbax.ocdbt import (
    MANIFEST_MAGIC,
    NODE_MAGIC,
    NodePlace,
    StoredValue,
    crc32c,
    decode_manifest,
    decode_node,
    encode_database,
    open_key_values,
)
from reshard.errors import CheckpointError, FormatError


def bit_by_bit(content: bytes) -> int:
    state = 0xFFFFFFFF
    for byte in content:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def test_checksums_match_the_standard() -> None:
    # RFC 3720, appendix B.4.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 5000])
def test_checksums_of_any_length_are_right(size: int) -> None:
    content = random.Random(size).randbytes(size)
    assert crc32c(content) == bit_by_bit(content)


def inline(content: bytes) -> StoredValue:
    """A value in a node."""
    return StoredValue(len(content), content=content)


def open_by_tensorstore(folder: Path) -> object:
    tensorstore = pytest.importorskip("tensorstore")
    spec = {"driver": "ocdbt", "base": f"file://{folder}/"}
    return tensorstore.KvStore.open(spec).result()


def values_of(folder: Path) -> dict[str, bytes]:
    """The values of a database by TensorStore."""
    store = open_by_tensorstore(folder)
    keys = store.list().result()  # type: ignore[attr-defined]
    return {key.decode(): store.read(key).result().value for key in keys}  # type: ignore[attr-defined]


@pytest.mark.parametrize("most_node_bytes", [300, 1 << 20])
def test_a_database_of_tensorstore_is_read(tmp_path: Path, most_node_bytes: int) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    config = {"max_decoded_node_bytes": most_node_bytes, "max_inline_value_bytes": 8}
    spec = {"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": config}
    store = tensorstore.KvStore.open(spec).result()
    transaction = tensorstore.Transaction()
    written = {f"a/long prefix {n:03d}/{'x' * (n % 7)}": bytes([n]) * n for n in range(60)}
    for key, value in written.items():
        store.with_transaction(transaction)[key] = value
    transaction.commit_sync()
    found = open_key_values(tmp_path)
    assert {key: found.find(key).read(tmp_path) for key in written} == written  # type: ignore[union-attr]
    assert found.find("a/nothing") is None


@pytest.mark.parametrize("max_keys", [7, 1000])
def test_tensorstore_reads_our_database(tmp_path: Path, max_keys: int) -> None:
    data = bytes(range(256)) * 4
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "data").write_bytes(data)
    values: list[tuple[bytes, StoredValue]] = []
    for n in range(300):
        place = StoredValue(n + 1, FileRange("d/data", n))
        values.append((f"k/{n:04d}/x".encode(), inline(b"v" * n) if n % 2 else place))
    for name, content in encode_database(values, "d/nodes", bytes(16), max_keys):
        (tmp_path / name).write_bytes(content)
    expected = {
        key.decode(): b"v" * n if n % 2 else data[n : 2 * n + 1]
        for n, (key, _) in enumerate(values)
    }
    assert values_of(tmp_path) == expected
    found = open_key_values(tmp_path)
    assert {key: found.find(key).read(tmp_path) for key in expected} == expected  # type: ignore[union-attr]


def small_database() -> dict[str, bytes]:
    return dict(
        encode_database(
            [(b"a", inline(b"1")), (b"b", StoredValue(4, FileRange("d/x", 3)))], "d/n", bytes(16)
        )
    )


def test_every_flipped_byte_is_noticed() -> None:
    files = small_database()
    node = NodePlace("", "d/n", 0, len(files["d/n"]), 0, b"")
    for at in range(len(files["d/n"])):
        damaged = bytearray(files["d/n"])
        damaged[at] ^= 1
        with pytest.raises(FormatError):
            decode_node(bytes(damaged), node, "d/n")
    for at in range(len(files["manifest.ocdbt"])):
        damaged = bytearray(files["manifest.ocdbt"])
        damaged[at] ^= 1
        with pytest.raises(FormatError):
            decode_manifest(bytes(damaged), "manifest.ocdbt")


def framed(magic: int, body: bytes) -> bytes:
    """An uncompressed frame with a right checksum."""
    head = struct.pack(">IQ", magic, 0)[:4] + struct.pack("<Q", len(body) + 18) + b"\0\0" + body
    return head + struct.pack("<I", crc32c(head))


HOSTILE = {
    "no body": b"",
    "a million rows": b"\0\0\xc0\x84\x3d",
    "a number without end": b"\0\0" + b"\xff" * 20,
    "rows of all bits": b"\0\0" + b"\xff" * 9 + b"\1",
    "a key that begins with nothing": b"\0\0\2\5\1\1ab\0\0\0\0",
    "a value of an unknown kind": b"\0\0\1\1a\0\5",
    "a file beyond the table": b"\0\0\1\1a\1\1\7\0",
    "a place of all bits": b"\0\1\1\0a\1\1b\1\1\0" + b"\xff" * 9 + b"\1",
    "more behind it": b"\0\0\1\1a\0\0more",
    "another height": b"\1\0\0",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_bodies_are_refused(name: str) -> None:
    node = NodePlace("", "d/nodes", 0, 0, 0, b"")
    with pytest.raises(FormatError):
        decode_node(framed(NODE_MAGIC, HOSTILE[name]), node, "node")


def test_a_manifest_in_parts_is_refused() -> None:
    body = bytes(16) + b"\1" + b"\0" * 20
    with pytest.raises(FormatError, match="of kind 1"):
        decode_manifest(framed(MANIFEST_MAGIC, body), "manifest.ocdbt")


def write_database(folder: Path, *values: tuple[bytes, StoredValue]) -> None:
    (folder / "d").mkdir()
    for name, content in encode_database(values, "d/n", bytes(16)):
        (folder / name).write_bytes(content)


def test_values_without_a_database_are_files(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "0.0").write_bytes(b"abc")
    values = open_key_values(tmp_path)
    assert values.find("w/0.0") == StoredValue(3, FileRange("w/0.0", 0))
    assert values.find("w/0.1") is None
    assert values.sizes == {"w/0.0": 3}


@pytest.mark.parametrize("key", ["../x", "/etc/passwd", "w/../../x", "w//x"])
def test_keys_that_lead_out_of_the_folder_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(FormatError, match="outside"):
        open_key_values(tmp_path).find(key)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "d/../../x", ""])
def test_places_out_of_the_folder_are_refused(tmp_path: Path, path: str) -> None:
    write_database(tmp_path, (b"a", StoredValue(1, FileRange(path, 0))))
    with pytest.raises(FormatError, match="outside"):
        open_key_values(tmp_path)


def test_places_that_no_file_has_are_an_error(tmp_path: Path) -> None:
    missing, short = StoredValue(9, FileRange("d/x", 0)), StoredValue(1 << 40, FileRange("d/n", 0))
    write_database(tmp_path, (b"a", missing), (b"b", short))
    values = open_key_values(tmp_path)
    with pytest.raises(CheckpointError, match="missing"):
        values.find("a")
    with pytest.raises(FormatError, match="cut off"):
        values.find("b")


def test_missing_nodes_are_an_error(tmp_path: Path) -> None:
    write_database(tmp_path, (b"a", inline(b"1")))
    (tmp_path / "d" / "n").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        open_key_values(tmp_path)
