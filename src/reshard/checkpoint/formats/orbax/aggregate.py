"""`checkpoint`: the one file in which older versions of Orbax, and Flax, kept a tree.

MessagePack: a map of maps, whose leaves are numbers, text, arrays, or the names of arrays that are
stored beside it (`PLACEHOLDER://params.w`). An array is an extension of type 1 with its shape, its
type and its bytes, which are read where they lie::

    {"params": {"w": ext 1 ((8, 4), "float32", <128 bytes>)}, "step": 7}

Source: the specification of MessagePack; `flax.serialization`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from reshard.checkpoint.formats.orbax.key_values import read_range
from reshard.checkpoint.formats.orbax.tree_metadata import TreePath
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import CheckpointError, FormatError, UnreadableTensorError, UsageError

PLACEHOLDER = "PLACEHOLDER://"
MOST_BYTES = 1 << 30
_MOST_DEPTH = 64
_CHUNKED = "__msgpack_chunked_array__"
_ARRAY, _COMPLEX, _SCALAR, _TUPLE = 1, 2, 3, 4
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    **dict(zip(range(0xCC, 0xD4), (">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), strict=True)),
}


class PackedArray(NamedTuple):
    """An array in the file: its bytes are at `start_bytes`."""

    dtype: DType
    shape: tuple[int, ...]
    start_bytes: int
    size_bytes: int


@dataclass
class _PackReader:
    """MessagePack, read from a place of a file's content on."""

    content: bytes
    label: str
    at: int = 0

    def fail(self, problem: str) -> FormatError:
        return FormatError(f"{self.label} {problem} at byte {self.at}; it is damaged")

    def take(self, size: int) -> bytes:
        found = self.content[self.at : self.at + size]
        if len(found) != size:
            raise self.fail("ends early")
        self.at += size
        return found

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def value(self, depth: int = 0) -> Any:
        if depth > _MOST_DEPTH:
            raise self.fail(f"is nested more than {_MOST_DEPTH} levels deep")
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
            raise self.fail("has a text that is none") from None

    def _list(self, size: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(self._check(size))]

    def _map(self, size: int, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(self._check(size)):
            key = self.value(depth + 1)
            if not isinstance(key, str | int) or str(key) in found:
                raise self.fail(f"has the key {str(key)[:50]!r}, which is none, or is twice there,")
            found[str(key)] = self.value(depth + 1)
        return found

    def _check(self, size: int) -> int:
        if size > len(self.content) - self.at:
            raise self.fail(f"has {size} entries in what is left")
        return size

    def _extension(self, size: int) -> Any:
        kind = self.number(">b")
        end = self.at + size
        if end > len(self.content):
            raise self.fail("ends early")
        inner = _PackReader(self.content[:end], self.label, self.at)
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
        # Bytes, or text of the older MessagePack, which had one kind for both.
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
    """The leaves of the file by their paths: plain values, `PackedArray`s, and placeholders; for an
    array that cannot be read, the error.

    Raises:
        FormatError: a file that is damaged.
        CheckpointError: a file that is too large.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise CheckpointError(
            f"{path} has {size} bytes, and is read as a whole; {MOST_BYTES} are the most"
        )
    reader = _PackReader(read_range(path, 0, size), str(path))
    tree = reader.value()
    if reader.at != size or not isinstance(tree, dict):
        raise reader.fail("is not one map")
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
