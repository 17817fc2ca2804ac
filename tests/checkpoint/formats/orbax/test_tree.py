"""The tree of a checkpoint."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.checkpoint_files import beside
from checkpoint.formats.orbax.orbax_states import arrays
from reshard import checkpoint
from reshard.checkpoint.formats.orbax import METADATA_NAME
from reshard.checkpoint.formats.orbax.tree import (
    Leaf,
    flatten,
    join_sequences,
    read_aggregate,
    read_strings,
    read_tree,
    strings_bytes,
    tree_bytes,
)
from reshard.errors import CheckpointError, FormatError, ReshardError

LEAVES = [
    Leaf(("a", 0, "b"), "jax.Array"),
    Leaf(("a", 1), "None"),
    Leaf(("s",), "string"),
    Leaf(("t/u",), "string"),
]


def test_a_written_tree_is_read_again(tmp_path: Path) -> None:
    (tmp_path / METADATA_NAME).write_bytes(tree_bytes([(one, (2,)) for one in LEAVES], {"a": 1}))
    (tmp_path / "_strings.json").write_bytes(strings_bytes({"s": "ä", "t/u": "x"}))
    tree = read_tree(tmp_path)
    assert list(tree.leaves.values()) == LEAVES
    assert tree.custom == {"a": 1}
    assert read_strings(tmp_path, LEAVES[2:]) == {"s": "ä", "t/u": "x"}


def test_text_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="missing"):
        read_strings(tmp_path, LEAVES[2:])
    (tmp_path / "_strings.json").write_bytes(b'{"s": 3}')
    with pytest.raises(FormatError, match="no text 's'"):
        read_strings(tmp_path, LEAVES[2:])


def entry(*keys: Any, kind: Any = "jax.Array") -> Any:
    return {
        "key_metadata": [{"key": key, "key_type": 1 if type(key) is int else 2} for key in keys],
        "value_metadata": {"value_type": kind, "skip_deserialize": False},
    }


def write(folder: Path, entries: Any) -> None:
    (folder / METADATA_NAME).write_text(json.dumps({"tree_metadata": entries}))


def test_a_node_that_was_filled_later_is_no_leaf(tmp_path: Path) -> None:
    write(tmp_path, {"1": entry("a", kind="Dict"), "2": entry("a", "b")})
    assert list(read_tree(tmp_path).leaves) == ["a.b"]


@pytest.mark.parametrize(
    "entries",
    [
        None,
        [],
        {"1": None},
        {"1": {}},
        {"1": {"key_metadata": 3}},
        {"1": entry(-1)},
        {"1": {**entry("a"), "key_metadata": [{"key": "a", "key_type": 3}]}},
        {"1": {**entry("a"), "key_metadata": [{"key": "a", "key_type": 1}]}},
        {"1": entry("a.b"), "2": entry("a", "b")},
    ],
)
def test_invalid_trees_are_refused(tmp_path: Path, entries: Any) -> None:
    write(tmp_path, entries)
    with pytest.raises(FormatError):
        read_tree(tmp_path)


@pytest.mark.parametrize("content", [b"", b"3", b"{", b"\xff\xfe", b'{"a"' * 50000])
def test_invalid_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / METADATA_NAME).write_bytes(content)
    with pytest.raises(FormatError):
        read_tree(tmp_path)


def test_sequences_of_plain_values_are_one() -> None:
    value = [{"lr": 0.1, "names": ["a", "b"], "none": ()}, 3]
    leaves = dict(flatten(("g", "h"), value))
    assert join_sequences(leaves, []) == {("g", "h"): value}
    # With a tensor in it, the sequence is no value.
    assert join_sequences(leaves, [("g", "h", 2)]) == {
        ("g", "h", 0, "lr"): 0.1,
        ("g", "h", 0, "names"): ["a", "b"],
        ("g", "h", 0, "none"): (),
        ("g", "h", 1): 3,
    }


def pack(value: Any) -> bytes:
    """MessagePack of a value, arrays as Flax has them."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return struct.pack(">Bq", 0xD3, value) if not 0 <= value < 128 else bytes([value])
    if isinstance(value, float):
        return struct.pack(">Bd", 0xCB, value)
    if isinstance(value, str):
        content = value.encode()
        return struct.pack(">BH", 0xDA, len(content)) + content
    if isinstance(value, bytes):
        return struct.pack(">BI", 0xC6, len(value)) + value
    if isinstance(value, list):
        return bytes([0x90 | len(value)]) + b"".join(map(pack, value))
    if isinstance(value, dict):
        entries = b"".join(pack(key) + pack(one) for key, one in value.items())
        return struct.pack(">BH", 0xDE, len(value)) + entries
    inner = pack([list(value.shape), value.dtype.name, value.tobytes()])
    return struct.pack(">BIb", 0xC9, len(inner), 1) + inner


W = np.arange(12, dtype=np.float32).reshape(3, 4)
TREE = {"params": {"w": W, "i": np.int32(7).reshape(())}, "step": 300, "lr": 0.5, "names": ["a"]}
TREE |= {"none": None, "flag": True, "empty": {}}


def test_a_tree_in_a_single_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(pack(TREE))
    found = checkpoint.open(tmp_path)
    assert found.format == "orbax"
    assert {*found} == {"params.w", "params.i"}
    assert np.array_equal(checkpoint.read_tensor(found, "params.w"), W)
    assert checkpoint.read_tensor(found, "params.i") == 7
    assert dict(found.values) == {
        "step": 300,
        "lr": 0.5,
        "names": ["a"],
        "none": None,
        "flag": True,
        "empty": {},
    }
    checkpoint.convert(tmp_path, beside(tmp_path, "t"), to="full", format="orbax")
    assert checkpoint.compare(tmp_path, beside(tmp_path, "t")).is_same


@pytest.mark.parametrize("variant", ["ocdbt", "zarr"])
def test_arrays_next_to_a_single_file_are_read(saved: Path, tmp_path: Path, variant: str) -> None:
    """As versions before `_METADATA` saved: placeholders for what is in Zarr."""
    folder = shutil.copytree(saved / variant, tmp_path / "old")
    (folder / "_METADATA").unlink()
    name = "params.layers.0.w"
    tree = {"params": {"layers": {"0": {"w": f"PLACEHOLDER://{name}"}}}, "step": 9}
    (folder / "checkpoint").write_bytes(pack(tree))
    found = checkpoint.open(folder)
    assert {*found} == {name}
    assert np.array_equal(checkpoint.read_tensor(found, name), arrays()[name])
    assert dict(found.values) == {"step": 9}


def test_every_place_where_it_is_cut_off(tmp_path: Path) -> None:
    content = pack(TREE)
    path = tmp_path / "checkpoint"
    for size in range(1, len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(FormatError):
            read_aggregate(path)


def test_flipped_bytes_are_errors_of_ours_or_values(tmp_path: Path) -> None:
    content = pack(TREE)
    path = tmp_path / "checkpoint"
    for at in range(len(content)):
        for other in (0, 0xFF, content[at] ^ 1, content[at] ^ 0x80):
            path.write_bytes(content[:at] + bytes([other]) + content[at + 1 :])
            with contextlib.suppress(ReshardError):
                read_aggregate(path)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"w": {"__msgpack_chunked_array__": True, "shape": {"0": 4}}}, "in pieces"),
        ({"w": np.zeros(2, dtype="U3")}, "not known here"),
    ],
)
def test_arrays_of_unknown_types_are_unreadable(tmp_path: Path, tree: Any, says: str) -> None:
    (tmp_path / "checkpoint").write_bytes(pack(tree))
    opened = checkpoint.open(tmp_path)
    assert not opened.tensors
    with pytest.raises(CheckpointError, match=says):
        _ = opened["w"]


def test_trees_that_are_nested_too_deep_are_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(b"\x81\xa1a" * 1000 + b"\xc0")
    with pytest.raises(FormatError, match="levels deep"):
        checkpoint.open(tmp_path)
