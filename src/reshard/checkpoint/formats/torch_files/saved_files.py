"""Files of `torch.save`: the nested value, with every tensor where it lies in the file.

A file is a zip archive (`archive`), as PyTorch writes it since 1.6, or a row of pickles with the
storages behind them, as it did before::

    magic number | protocol | this machine | the value | names of storages | size, elements | ...

1. The pickle of the value is read; nothing in it is run (`restricted_pickle`, `saved_values`).
2. Storages of a zip archive are found by its directory; those of a row of pickles by their names
   behind the value, so that its pickle is read twice.

What is read at once is the pickle and the directory, never an element.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from reshard.checkpoint.formats.torch_files.archived_tensors import TYPED_STORAGES, Records
from reshard.checkpoint.formats.torch_files.pickle_terms import Global, Reference, shortened
from reshard.checkpoint.formats.torch_files.restricted_pickle import (
    PickleEndsEarlyError,
    build_pickle,
)
from reshard.checkpoint.formats.torch_files.saved_values import ValueBuilder
from reshard.checkpoint.formats.torch_files.zip_records import ReadRange, ZipRecords
from reshard.checkpoint.storage.filesystem import read_range
from reshard.checkpoint.storage.remote_files import NamedRange, PrefetchedRanges
from reshard.dtypes import dtype as as_dtype
from reshard.errors import CheckpointError, FormatError

ReadAhead = Callable[[Iterable[tuple[int, int]]], None]
ZIP_MAGIC = b"PK\x03\x04"
# The pickle of PyTorch's number 0x1950a86a20f9469cfc6c.
LEGACY_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_LEGACY_PROTOCOL = 1001
# A million tensors take about 150 MB of pickle, and 100 MB of directory.
_LARGEST_PICKLE_BYTES = 1 << 30
# What is read at first of a pickle whose end is not known, and around a small request.
_FIRST_BYTES = 1 << 16
_WINDOW_BYTES = 1 << 14
_BEGINNINGS = (
    (b"version https://git-lfs", "a pointer of Git LFS; run `git lfs pull`"),
    (b"\x89HDF", "a file of HDF5"),
    (b"GGUF", "a file of GGUF"),
    (b"\x80", "a pickle, but not one of torch.save; load it where you trust it and save tensors"),
)


def read_torch_file(path: str | os.PathLike[str]) -> Any:
    """The nested value of a file of `torch.save`, with an `ArchivedTensor` for every tensor.

    Dicts, lists, tuples, numbers, text, bytes and None are themselves; element types are
    `Global`s. An object of a class is a `Call`.

    Raises:
        CheckpointError: a file that cannot be read.
        FormatError: one that is damaged, compressed, or not of `torch.save`.
    """
    path = path if isinstance(path, Path) else Path(path)
    try:
        with path.open("rb", buffering=0) as file:
            size_bytes = file.seek(0, os.SEEK_END)
            reader = _WindowReader(file, path)
            return read_torch_value(reader.read, size_bytes, str(path), reader.read_ahead)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def is_torch_file(path: Path) -> bool:
    """Whether a file begins as those of `torch.save` do."""
    try:
        with path.open("rb") as file:
            front = file.read(64)
    except OSError:
        return False
    return front.startswith(ZIP_MAGIC) or _is_legacy(front)


def _is_legacy(front: bytes) -> bool:
    # Later protocols have the length of a frame in front.
    return front[:1] == b"\x80" and LEGACY_MAGIC in front[:24]


def read_torch_value(
    read: ReadRange, size_bytes: int, label: str, read_ahead: ReadAhead | None = None
) -> Any:
    """The nested value in the `size_bytes` that `read(offset, size)` gives.

    `read_ahead` is told the ranges `(start, stop)` that will be read one after the other.

    Raises:
        FormatError: what is damaged, compressed, or not of `torch.save`.
    """
    front = read(0, min(size_bytes, 512))
    if front.startswith(ZIP_MAGIC):
        return _read_zip(read, size_bytes, label, read_ahead)
    if _is_legacy(front):
        return _LegacyFile(read, size_bytes, label).value()
    if front[257:262] == b"ustar":
        raise FormatError(
            f"{label} is of PyTorch before 0.1.10, a tar archive; load it there and save it again"
        )
    if (
        front[8:].lstrip(b" \t\n\r")[:1] == b"{"
        and int.from_bytes(front[:8], "little") < size_bytes
    ):
        raise FormatError(
            f"{label} is a file of safetensors under another name; rename it to end in .safetensors"
        )
    for beginning, what in _BEGINNINGS:
        if front.startswith(beginning):
            raise FormatError(f"{label} is {what}")
    found = "empty" if not front else f"it begins with {front[:8]!r}"
    raise FormatError(f"{label} is no file of torch.save: {found}; fetch it again")


class _WindowReader:
    """Reads ranges of an open file; small ones near each other at once."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._window = b""
        self._start = 0
        self._ahead = PrefetchedRanges(path.parent)

    def read_ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Ask a store for ranges together. Raises OSError."""
        self._ahead.ask(NamedRange(self._path.name, start, stop) for start, stop in ranges)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the file. Raises FormatError where it has fewer."""
        known = self._ahead.find(self._path.name, offset, size)
        if known is not None:
            return known
        begin = offset - self._start
        if begin >= 0 and begin + size <= len(self._window):
            return self._window[begin : begin + size]
        # Headers of small storages lie near each other; those of large ones do not.
        is_near = 0 <= begin <= 2 * _WINDOW_BYTES
        content = read_range(self._file, offset, max(size, _WINDOW_BYTES) if is_near else size)
        if len(content) < size:
            raise FormatError(
                f"{self._path} ends at byte {offset + len(content)}, {size} bytes at {offset} were "
                "expected; it was cut off"
            )
        self._start = offset
        self._window = content if len(content) <= _WINDOW_BYTES else b""
        return content[:size]


def _read_zip(read: ReadRange, size_bytes: int, label: str, read_ahead: ReadAhead | None) -> Any:
    records = ZipRecords(read, 0, size_bytes, f"{label} is no file", size_bytes)
    if records.has("constants.pkl"):
        raise FormatError(
            f"{label} is a program of TorchScript; load it with torch.jit.load and save its "
            "state_dict()"
        )
    if read_ahead is not None:
        read_ahead(records.list_headers())
    order = records.content("byteorder", 16) if records.has("byteorder") else b"little"
    if order != b"little":
        raise records.wrong(f"its byte order is {order!r}, expected b'little'; save it again")
    pickle = records.content("data.pkl", _LARGEST_PICKLE_BYTES)
    value, _ = build_pickle(pickle, ValueBuilder(records), label)
    return value


class _LegacyFile:
    """A row of pickles with storages behind them."""

    def __init__(self, read: ReadRange, size_bytes: int, label: str) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._label = label
        # Of each storage: where it begins, its size.
        self._places: dict[str, tuple[int, int]] = {}

    def wrong(self, reason: str) -> FormatError:
        """The error for a file that is not what it should be."""
        return FormatError(f"{self._label} is no file as torch.save wrote it: {reason}")

    def storage(self, key: str, size_bytes: int) -> tuple[int, int, int]:
        """Where a storage begins, its bytes, and 0 for the checksum that there is not."""
        place = self._places.get(key)
        if place is None:
            raise self.wrong(f"it has no storage {shortened(repr(key))}")
        return *place, 0

    def value(self) -> Any:
        """The value, with the places of its tensors."""
        _, at = self._pickle(0, ValueBuilder(self))
        protocol, at = self._pickle(at, ValueBuilder(self))
        if protocol != _LEGACY_PROTOCOL:
            raise self.wrong(f"its protocol is {protocol!r}, expected {_LEGACY_PROTOCOL}")
        machine, start = self._pickle(at, ValueBuilder(self))
        if isinstance(machine, dict) and machine.get("little_endian") is False:
            raise self.wrong("its bytes are in the other order; save it again")
        storages = _StorageCollector(self)
        _, at = self._pickle(start, storages)
        keys, at = self._pickle(at, ValueBuilder(self))
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise self.wrong("the names of its storages are no list")
        for key in keys:
            itemsize_bytes = storages.itemsizes_bytes.get(key)
            if itemsize_bytes is None:
                raise self.wrong(f"nothing refers to its storage {shortened(repr(key))}")
            count = int.from_bytes(self._bytes(at, 8), "little")
            self._places[key] = at + 8, count * itemsize_bytes
            at += 8 + count * itemsize_bytes
            if at > self._size_bytes:
                raise self.wrong(f"it ends in the storage {shortened(repr(key))}; it was cut off")
        value, _ = self._pickle(start, ValueBuilder(self))
        return value

    def _bytes(self, offset: int, size: int) -> bytes:
        if offset + size > self._size_bytes:
            raise self.wrong(f"it ends at byte {self._size_bytes}; it was cut off")
        return self._read(offset, size)

    def _pickle(self, start: int, builder: Any) -> tuple[Any, int]:
        """The pickle at a place of the file, whose end is found by reading it."""
        size = _FIRST_BYTES
        while True:
            most = min(self._size_bytes - start, _LARGEST_PICKLE_BYTES)
            content = self._bytes(start, min(size, most))
            try:
                value, stop = build_pickle(content, builder, self._label)
            except PickleEndsEarlyError:
                if size >= most:
                    raise
                size *= 8
            else:
                return value, start + stop


class _StorageCollector(ValueBuilder):
    """Finds the element size of every storage of a pickle; makes no tensors."""

    def __init__(self, records: Records) -> None:
        super().__init__(records)
        self.itemsizes_bytes: dict[str, int] = {}

    def refer(self, key: Any) -> Any:
        """Nothing; what it says of a storage is kept."""
        match key:
            case ("storage", Global(_, kind), str(record), *_):
                element = TYPED_STORAGES.get(kind)
                size = 1 if element is None else as_dtype(element).itemsize_bytes
                self.itemsizes_bytes.setdefault(record, size)
        return Reference(None)
