"""OCDBT, both ways, against TensorStore."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from reshard.checkpoint.formats.orbax.crc32c import crc32c
from reshard.checkpoint.formats.orbax.key_values import open_key_values
from reshard.checkpoint.formats.orbax.ocdbt import (
    MANIFEST_MAGIC,
    NODE_MAGIC,
    DataPlace,
    NodePlace,
    decode_manifest,
    decode_node,
    encode_database,
)
from reshard.errors import FormatError

tensorstore = pytest.importorskip("tensorstore")
PLACE = DataPlace("", "d/nodes", 0, 0)


def open_by_tensorstore(folder: Path) -> object:
    spec = {"driver": "ocdbt", "base": f"file://{folder}/"}
    return tensorstore.KvStore.open(spec).result()


def values_of(folder: Path) -> dict[str, bytes]:
    """The values of a database by TensorStore."""
    store = open_by_tensorstore(folder)
    keys = store.list().result()  # type: ignore[attr-defined]
    return {key.decode(): store.read(key).result().value for key in keys}  # type: ignore[attr-defined]


@pytest.mark.parametrize("most_node_bytes", [300, 1 << 20])
def test_what_tensorstore_writes(tmp_path: Path, most_node_bytes: int) -> None:
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


@pytest.mark.parametrize("most_keys", [7, 1000])
def test_what_tensorstore_reads(tmp_path: Path, most_keys: int) -> None:
    data = bytes(range(256)) * 4
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "data").write_bytes(data)
    values: list[tuple[bytes, bytes | DataPlace]] = []
    for n in range(300):
        place = DataPlace("", "d/data", n, n + 1)
        values.append((f"k/{n:04d}/x".encode(), b"v" * n if n % 2 else place))
    for name, content in encode_database(values, "d/nodes", bytes(16), most_keys):
        (tmp_path / name).write_bytes(content)
    expected = {
        key.decode(): value if isinstance(value, bytes) else data[value.start_bytes :][: n + 1]
        for n, (key, value) in enumerate(values)
    }
    assert values_of(tmp_path) == expected
    found = open_key_values(tmp_path)
    assert {key: found.find(key).read(tmp_path) for key in expected} == expected  # type: ignore[union-attr]


def small_database() -> dict[str, bytes]:
    return dict(
        encode_database([(b"a", b"1"), (b"b", DataPlace("", "d/x", 3, 4))], "d/n", bytes(16))
    )


def test_every_flipped_byte_is_noticed() -> None:
    files = small_database()
    node = NodePlace(DataPlace("", "d/n", 0, len(files["d/n"])), 0, b"")
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
def test_bodies_that_cannot_be(name: str) -> None:
    with pytest.raises(FormatError):
        decode_node(framed(NODE_MAGIC, HOSTILE[name]), NodePlace(PLACE, 0, b""), "node")


def test_a_manifest_in_parts_is_refused() -> None:
    body = bytes(16) + b"\1" + b"\0" * 20
    with pytest.raises(FormatError, match="of kind 1"):
        decode_manifest(framed(MANIFEST_MAGIC, body), "manifest.ocdbt")


def test_a_node_that_leads_to_itself(tmp_path: Path) -> None:
    # A node of height 0 cannot lead on; one of height 1 to itself is of another height there.
    files = dict(encode_database([(f"{n}".encode(), b"v") for n in range(9)], "d/n", bytes(16), 4))
    (tmp_path / "d").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert len(values_of(tmp_path)) == 9
    assert open_key_values(tmp_path).find("8") is not None
