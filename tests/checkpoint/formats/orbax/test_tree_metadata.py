"""The tree of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reshard.checkpoint.formats.orbax.tree_metadata import (
    METADATA_NAME,
    Leaf,
    flatten,
    join_sequences,
    read_strings,
    read_tree,
    strings_bytes,
    tree_bytes,
)
from reshard.errors import FormatError

LEAVES = [
    Leaf(("a", 0, "b"), "jax.Array"),
    Leaf(("a", 1), "None"),
    Leaf(("s",), "string"),
    Leaf(("t/u",), "string"),
]


def test_there_and_back(tmp_path: Path) -> None:
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
def test_what_is_no_tree(tmp_path: Path, entries: Any) -> None:
    write(tmp_path, entries)
    with pytest.raises(FormatError):
        read_tree(tmp_path)


@pytest.mark.parametrize("content", [b"", b"3", b"{", b"\xff\xfe", b'{"a"' * 50000])
def test_what_is_no_json(tmp_path: Path, content: bytes) -> None:
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
