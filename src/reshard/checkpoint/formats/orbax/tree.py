"""The tree of an Orbax checkpoint: its leaves, in `_METADATA` or in a file of older versions.

`_METADATA` has the path of each leaf, of keys of dicts and of sequences, and its kind::

    {"tree_metadata": {"('b', '0')": {
        "key_metadata": [{"key": "b", "key_type": 2}, {"key": "0", "key_type": 1}],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": false}}}}

A leaf's name is its keys, joined by dots: `b.0`. Empty nodes and None are leaves without a value,
text is in `_strings.json`, and a number is an array without dimensions.

Older versions of Orbax, and Flax, store a tree in the single file `checkpoint` (`read_aggregate`).
It is MessagePack: a map of maps, whose leaves are numbers, text, arrays, or the names of arrays
that are stored separately (`PLACEHOLDER://params.w`). An array is an extension of type 1 with its
shape, its dtype and its bytes, which are read in place::

    {"params": {"w": ext 1 ((8, 4), "float32", <128 bytes>)}, "step": 7}

Sources: the specification of MessagePack; `flax.serialization`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from reshard._records import Record
from reshard.checkpoint.formats.orbax import METADATA_NAME
from reshard.checkpoint.formats.orbax.ocdbt import MAX_NODE_BYTES
from reshard.checkpoint.storage.filesystem import read_file, read_json_object
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import FormatError, UnreadableTensorError, UsageError

STRINGS_NAME = "_strings.json"
# Values of `key_type`.
_SEQUENCE, _DICT = 1, 2
ARRAY, NUMPY, SCALAR, STRING = "jax.Array", "np.ndarray", "scalar", "string"

# Kinds of leaves without a value, and the Python values that they stand for.
_EMPTY: dict[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": ()}
TreePath = tuple[str | int, ...]


class Leaf(Record):
    """A leaf: its path, and its kind (`jax.Array`, `scalar`, `None`, ...)."""

    path: TreePath
    kind: str

    @property
    def name(self) -> str:
        """The keys, joined by dots."""
        return ".".join(map(str, self.path))

    @property
    def is_empty(self) -> bool:
        """Whether the leaf lacks a value, such as an empty dict."""
        return self.kind in _EMPTY

    @property
    def empty_value(self) -> Any:
        """The Python value of an empty leaf."""
        return _EMPTY[self.kind]


class TreeMetadata(Record):
    """The leaves of a tree, and how their arrays are stored.

    Attributes:
        leaves: by name, in the order of the file.
        has_all: whether chunks that consist of the fill value are stored too.
        custom: the user's metadata.
    """

    leaves: Mapping[str, Leaf]
    has_all: bool = True
    custom: Any = None


def read_tree(folder: Path) -> TreeMetadata:
    """Read the `_METADATA` of a folder.

    Raises:
        CheckpointError: a file that cannot be read.
        FormatError: a file that is damaged.
    """
    path = folder / METADATA_NAME
    content = read_json_object(path, MAX_NODE_BYTES)
    entries = content.get("tree_metadata")
    if not isinstance(entries, dict):
        raise FormatError(f"{path} has no `tree_metadata`; it is damaged, or not of Orbax")
    leaves: dict[str, Leaf] = {}
    for entry in entries.values():
        try:
            keys = entry["key_metadata"]
            leaf = Leaf(
                tuple(_read_key(key) for key in keys), str(entry["value_metadata"]["value_type"])
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise FormatError(f"{path} has the leaf {str(entry)[:200]}; it is damaged") from None
        if leaf.name in leaves:
            raise FormatError(
                f"{path} has two leaves {leaf.name!r}, which Orbax stores under one name; rename "
                "one of them and save again"
            )
        leaves[leaf.name] = leaf
    # A node that was empty in the first save, and was filled later, is not a leaf.
    inner = {leaf.path[:size] for leaf in leaves.values() for size in range(len(leaf.path))}
    return TreeMetadata(
        {name: leaf for name, leaf in leaves.items() if leaf.path not in inner},
        bool(content.get("store_array_data_equal_to_fill_value", False)),
        content.get("custom_metadata"),
    )


def _read_key(key: Mapping[str, Any]) -> str | int:
    text, kind = key["key"], key["key_type"]
    if kind == _SEQUENCE:
        number = int(text)
        if number < 0:
            raise ValueError(text)
        return number
    if kind != _DICT or not isinstance(text, str | int):
        raise ValueError(text)
    return str(text)


def read_strings(folder: Path, leaves: Iterable[Leaf]) -> dict[str, str]:
    """Read the texts of leaves from `_strings.json`.

    Raises FormatError for a leaf that is not in the file.
    """
    leaves = list(leaves)
    path = folder / STRINGS_NAME
    if not leaves:
        return {}
    if not path.exists():
        raise FormatError(f"{path} is missing, which has the text {leaves[0].name!r}")
    content = read_json_object(path, MAX_NODE_BYTES)
    result = {}
    for leaf in leaves:
        value: Any = content
        # Orbax uses the name as a path in the JSON, with slashes between levels.
        for key in leaf.name.split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, str):
            raise FormatError(f"{path} has no text {leaf.name!r}; it belongs to another save")
        result[leaf.name] = value
    return result


def tree_bytes(leaves: Iterable[tuple[Leaf, tuple[int, ...] | None]], custom: Any) -> bytes:
    """Return the content of `_METADATA`, for leaves and the shapes of their chunks."""
    entries = {}
    for leaf, chunk in leaves:
        value: dict[str, Any] = {"value_type": leaf.kind, "skip_deserialize": leaf.is_empty}
        if chunk is not None:
            value["write_shape"] = list(chunk)
        keys = [
            {"key": str(key), "key_type": _SEQUENCE if isinstance(key, int) else _DICT}
            for key in leaf.path
        ]
        entries[str(tuple(map(str, leaf.path)))] = {"key_metadata": keys, "value_metadata": value}
    content = {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": False,
        # Readers must report a chunk that is missing instead of taking it for zeros.
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": custom,
    }
    return json.dumps(content).encode()


def strings_bytes(strings: Mapping[str, str]) -> bytes:
    """Return the content of `_strings.json`."""
    content: dict[str, Any] = {}
    for name, text in strings.items():
        _put(content, name.split("/"), text)
    return json.dumps(content).encode()


def join_sequences(
    values: Mapping[TreePath, Any], tensors: Iterable[TreePath]
) -> dict[TreePath, Any]:
    """Combine the plain values of each sequence without tensors into a value.

    >>> join_sequences({("g", 0, "lr"): 0.1, ("g", 1, "lr"): 0.2, ("n",): 3}, [])
    {('g',): [{'lr': 0.1}, {'lr': 0.2}], ('n',): 3}
    """
    inner = {path[:size] for path in tensors for size in range(len(path))}
    joined: dict[TreePath, Any] = {}
    for path, value in values.items():
        sizes = (
            size
            for size in range(1, len(path))
            if isinstance(path[size], int) and path[:size] not in inner
        )
        size = next(sizes, len(path))
        if size == len(path):
            joined[path] = value
            continue
        _put(joined.setdefault(path[:size], {}), path[size:], value)
    return {path: _as_sequences(value) for path, value in joined.items()}


def _put(content: dict[Any, Any], keys: Sequence[Any], value: Any) -> None:
    """Put a value into nested dicts, which are created as needed."""
    for key in keys[:-1]:
        content = content.setdefault(key, {})
    content[keys[-1]] = value


def _as_sequences(value: Any) -> Any:
    """Return a dict with the keys 0, 1, 2, ... as a list, and other values unchanged."""
    if not isinstance(value, dict) or not value:
        return value
    parts = {key: _as_sequences(part) for key, part in value.items()}
    if all(isinstance(key, int) for key in parts) and sorted(parts) == list(range(len(parts))):
        return [parts[key] for key in sorted(parts)]
    return {str(key): part for key, part in parts.items()}


def flatten(path: TreePath, value: Any) -> list[tuple[TreePath, Any]]:
    """Return the leaves of a plain value; an empty container is a leaf.

    >>> flatten(("g",), [{"lr": 0.1}, ()])
    [(('g', 0, 'lr'), 0.1), (('g', 1), ())]
    """
    if not isinstance(value, list | tuple | dict) or not value:
        return [(path, value)]
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, inner in pairs for leaf in flatten((*path, key), inner)]


def kind_of(value: Any) -> str | None:
    """Return the kind of a plain value as a leaf, or None if Orbax cannot store it.

    >>> kind_of(3), kind_of("x"), kind_of(()), kind_of(b"x")
    ('scalar', 'string', 'Tuple', None)
    """
    if isinstance(value, bool | float):
        return SCALAR
    if isinstance(value, int):
        # Scalars are stored as int64.
        return SCALAR if -(2**63) <= value < 2**63 else None
    if isinstance(value, str):
        return STRING
    for kind, empty in _EMPTY.items():
        if value == empty and type(value) is type(empty):
            return kind
    return None


PLACEHOLDER = "PLACEHOLDER://"
MAX_BYTES = 1 << 30
# Each level takes several calls of Python's limited stack.
_MAX_DEPTH = 64
_CHUNKED = "__msgpack_chunked_array__"
_ARRAY, _COMPLEX, _SCALAR, _TUPLE = 1, 2, 3, 4

_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    **dict(zip(range(0xCC, 0xD4), (">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), strict=True)),
}


class PackedArray(NamedTuple):
    """An array in the file, whose bytes begin at `start_bytes`."""

    dtype: DType
    shape: tuple[int, ...]
    start_bytes: int
    size_bytes: int


@dataclass
class _PackReader:
    """A parser of MessagePack in bytes `at:end` of a file's content."""

    content: bytes
    label: str
    at: int
    end: int

    def fail(self, problem: str) -> FormatError:
        return FormatError(f"{self.label} {problem} at byte {self.at}; it is damaged")

    def take(self, size: int) -> bytes:
        start, stop = self.at, self.at + size
        if stop > self.end:
            raise self.fail("ends early")
        self.at = stop
        return self.content[start:stop]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def value(self, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            raise self.fail(f"is nested more than {_MAX_DEPTH} levels deep")
        first = self.number(">B")
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 256
        if first < 0x90:
            return self._map(first & 15, depth)
        if first < 0xA0:
            return self._list(first & 15, depth)
        if first < 0xC0:
            return self._text(first & 31)
        if first in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[first]
        if first in _NUMBERS:
            return self.number(_NUMBERS[first])
        sized: dict[int, tuple[str, Callable[[int], Any]]] = {
            **{0xC4 + n: (form, self.take) for n, form in enumerate((">B", ">H", ">I"))},
            **{0xC7 + n: (form, self._extension) for n, form in enumerate((">B", ">H", ">I"))},
            **{0xD9 + n: (form, self._text) for n, form in enumerate((">B", ">H", ">I"))},
        }
        if first in sized:
            form, read = sized[first]
            return read(self.number(form))
        if 0xD4 <= first <= 0xD8:
            return self._extension(1 << (first - 0xD4))
        if first in (0xDC, 0xDD):
            return self._list(self.number(">H" if first == 0xDC else ">I"), depth)
        if first in (0xDE, 0xDF):
            return self._map(self.number(">H" if first == 0xDE else ">I"), depth)
        raise self.fail(f"has a byte {first:#x} that begins nothing")

    def _text(self, size: int) -> str:
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise self.fail("has a text that is not UTF-8") from None

    def _list(self, size: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(self._check(size))]

    def _map(self, size: int, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for _ in range(self._check(size)):
            key = self.value(depth + 1)
            if not isinstance(key, str | int) or str(key) in result:
                raise self.fail(f"has an invalid or repeated key {str(key)[:50]!r}")
            result[str(key)] = self.value(depth + 1)
        return result

    def _check(self, size: int) -> int:
        # An entry takes a byte at least, so a wrong size is found before it costs memory.
        if size > self.end - self.at:
            raise self.fail(f"has {size} entries in what is left")
        return size

    def _extension(self, size: int) -> Any:
        kind = self.number(">b")
        end = self.at + size
        if end > self.end:
            raise self.fail("ends early")
        # Not a slice of the content, which would be copied for every array.
        inner = _PackReader(self.content, self.label, self.at, end)
        self.at = end
        if kind in (_ARRAY, _SCALAR):
            return inner._array()
        if kind == _TUPLE:
            return tuple(inner.value(1))
        raise self.fail(f"has an extension of type {kind}")

    def _array(self) -> PackedArray | UnreadableTensorError:
        if self.take(1) != b"\x93":
            raise self.fail("has an array without shape, type and bytes")
        shape, name = self.value(1), self.value(1)
        name = name.decode(errors="replace") if isinstance(name, bytes) else name
        first = self.number(">B")
        # Bytes, or text of older versions of MessagePack, which had a single type for both.
        forms = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
        size = self.number(forms[first]) if first in forms else first & 31
        if first not in forms and not 0xA0 <= first < 0xC0:
            raise self.fail("has an array without bytes")
        start = self.at
        self.take(size)
        if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
            raise self.fail(f"has an array of the shape {str(shape)[:50]}")
        try:
            kind = as_dtype(name)
        except UsageError:
            return UnreadableTensorError(
                f"an array of the type {str(name)[:50]!r}, which is not known here"
            )
        elements = kind.itemsize_bytes
        for length in shape:
            elements *= length
        if elements != size:
            raise self.fail(f"has {size} bytes for an array {kind.name} {shape}")
        return PackedArray(kind, tuple(shape), start, size)


def read_aggregate(path: Path) -> list[tuple[TreePath, Any]]:
    """Read the leaves of the single file of older versions, with their paths.

    A leaf is a plain value, a `PackedArray`, a placeholder, or the error of an array that cannot be
    read.

    Raises FormatError for a file that is damaged, or too large to be read as a whole.
    """
    content = read_file(path, MAX_BYTES)
    reader = _PackReader(content, str(path), 0, len(content))
    tree = reader.value()
    if reader.at != len(content) or not isinstance(tree, dict):
        raise reader.fail("is not a single map")
    return list(_list_leaves(tree, (), path))


def _list_leaves(value: Any, at: TreePath, path: Path) -> Iterator[tuple[TreePath, Any]]:
    if isinstance(value, dict) and _CHUNKED in value:
        yield (
            at,
            UnreadableTensorError(
                "an array in pieces, as those beyond 1 GiB are; save it with a newer Orbax"
            ),
        )
        return
    is_empty = not isinstance(value, dict | list | tuple) or not value
    if is_empty or isinstance(value, PackedArray):
        yield at, value
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        yield from _list_leaves(inner, (*at, key), path)
