"""Files of `torch.save`, read without PyTorch: nested values whose tensors stay in the file.

A file is a zip archive, as PyTorch writes it since 1.6, or, before that, a row of pickles followed
by the storages::

    archive/data.pkl     the value; of a tensor: the storage, offset, size, strides
    archive/byteorder    little
    archive/data/0       a storage
    (directory)          the offset of each record

    magic number | protocol | machine | the value | names of storages | elements, storage | ...

1. The pickle of the value is read; nothing in it is run (`pickles`, `values`).
2. Storages of a zip archive are located by its directory; storages of a row of pickles by their
   names after the value, so that its pickle is read twice.
3. Pickle and records must agree: stored records, a storage as long as its record, tensors inside
   their storages.

Only the pickle and the directory are read, never an element.

An archive inside another file (`read_archive`), as distributed checkpoints have them, holds a
tensor. If the archive is compressed, its front can be had without the rest (`read_archive_front`):
the description precedes the storage, and each record has a header of its own::

    [header data.pkl][description][its size]...[header data/0][the storage ...
    |<------------------- front ----------------------------->|

1. Records follow each other. A size that its header leaves open follows the record after a mark;
   the mark counts only if size and checksum fit.
2. The first record of data is the storage. The description implies its length.

A front is provisional: when the whole archive is there, it is read by its directory, and both must
agree.

Source: the zip format (APPNOTE 6.3.3), and the files of PyTorch 1.6 and later.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from reshard._contexts import pause_gc
from reshard.binding import FileRange, View
from reshard.checkpoint.contents import StoredChecksum
from reshard.checkpoint.formats.safetensors.header import check_shape, is_text
from reshard.checkpoint.formats.torch_files.pickles import (
    Call,
    Global,
    PickleEndsEarlyError,
    Refer,
    Reference,
    read_pickle,
    read_pickle_at,
    shortened,
)
from reshard.checkpoint.formats.torch_files.values import (
    TYPED_STORAGES,
    ArchivedTensor,
    MakeError,
    ValueBuilder,
    explain,
)
from reshard.checkpoint.formats.torch_files.zip_archives import (
    DESCRIPTOR_SIGNATURE,
    ENCRYPTED,
    LOCAL_HEADER,
    LOCAL_SIGNATURE,
    SIZES_FOLLOW,
    ZipRecords,
)
from reshard.checkpoint.storage.byte_ranges import ByteRange
from reshard.checkpoint.storage.byte_streams import ReadRange
from reshard.checkpoint.storage.filesystem import Closing, read_range
from reshard.checkpoint.storage.remote_files import PrefetchedRanges
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import CheckpointError, FormatError, UnreadableTensorError
from reshard.geometry.regions import Region

ReadAhead = Callable[[Iterable[tuple[int, int]]], None]
ZIP_MAGIC = LOCAL_SIGNATURE
# The pickle of PyTorch's number 0x1950a86a20f9469cfc6c.
LEGACY_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
# `PROTOCOL_VERSION` of `torch.serialization`, unchanged since it exists.
_LEGACY_PROTOCOL = 1001
# A million tensors take about 150 MB of pickle, and 100 MB of directory; a tensor takes a few
# hundred bytes of each.
_MAX_PICKLE_BYTES = 1 << 30
_MAX_TENSOR_PICKLE_BYTES = _MAX_TENSOR_DIRECTORY_BYTES = 1 << 20
# Read first of a pickle whose end is unknown, and around a small request.
_FIRST_BYTES = 1 << 16
_WINDOW_BYTES = 1 << 14
#: Room for the description of a tensor, and for the padding before its storage.
FRONT_BYTES = 64 << 10
_OTHER_FILES = (
    (b"version https://git-lfs", "a pointer of Git LFS; run `git lfs pull`"),
    (b"\x89HDF", "a file of HDF5"),
    (b"GGUF", "a file of GGUF"),
    (b"\x80", "a pickle, but not one of torch.save; load it where you trust it and save tensors"),
)


def read_torch_dict(path: Path, expected: str) -> dict[Any, Any]:
    """Return the dict in a file of `torch.save`; `expected` describes it in the error.

    Raises:
        CheckpointError, FormatError: as `read_torch_file`, also for a file with another value.
    """
    value = read_torch_file(path)
    if not isinstance(value, dict):
        raise FormatError(f"{path} holds {explain(value)}, expected {expected}")
    return value


def read_torch_file(path: str | os.PathLike[str]) -> Any:
    """Return the nested value of a file of `torch.save`, with an `ArchivedTensor` for each tensor.

    Dicts, lists, tuples, numbers, text, bytes and None are themselves; element types are
    `Global`s. An object of a class is a `Call`.

    Raises:
        CheckpointError: a file that cannot be read.
        FormatError: a file that is damaged, compressed, or not of `torch.save`.
    """
    path = path if isinstance(path, Path) else Path(path)
    prefetched = PrefetchedRanges(path.parent)

    def read_ahead(ranges: Iterable[tuple[int, int]]) -> None:
        prefetched.fetch(ByteRange(path.name, start, stop) for start, stop in ranges)

    try:
        # Pickles may describe millions of objects, none of which is in a cycle.
        with WindowReader(path, prefetched) as reader, pause_gc():
            return read_torch_value(reader.read, reader.size_bytes, str(path), read_ahead)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def is_torch_file(path: Path) -> bool:
    """Return whether a file begins as files of `torch.save` do."""
    try:
        with path.open("rb") as file:
            front = file.read(64)
    except OSError:
        return False
    return front.startswith(ZIP_MAGIC) or _is_legacy(front)


def _is_legacy(front: bytes) -> bool:
    # Later protocols begin with the length of a frame.
    return front[:1] == b"\x80" and LEGACY_MAGIC in front[:24]


def read_torch_value(
    read: ReadRange, size_bytes: int, label: str, read_ahead: ReadAhead | None = None
) -> Any:
    """Return the nested value in `size_bytes` of `read(offset, size)`.

    `read_ahead` is called with the ranges `(start, stop)` that will be read in turn.

    Raises:
        FormatError: bytes that are damaged, compressed, or not of `torch.save`.
    """
    front = read(0, min(size_bytes, 512))
    if front.startswith(ZIP_MAGIC):
        return _read_zip(read, size_bytes, label, read_ahead)
    if _is_legacy(front):
        return _LegacyFile(read, size_bytes, label).value()
    # Archives of tar have their magic number at this offset.
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
    for beginning, what in _OTHER_FILES:
        if front.startswith(beginning):
            raise FormatError(f"{label} is {what}")
    content = "it is empty" if not front else f"it begins with {front[:8]!r}"
    raise FormatError(f"{label} is not a file of torch.save: {content}; fetch it again")


class WindowReader(Closing):
    """A reader of ranges of a file, which reads small ranges near each other at once.

    The file is opened when the first range is read that was not prefetched.
    """

    def __init__(self, path: Path, prefetched: PrefetchedRanges) -> None:
        self._path = path
        self._prefetched = prefetched
        self._file: BinaryIO | None = None
        self._start, self._window = 0, b""

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    @property
    def size_bytes(self) -> int:
        """The size of the file. Raises OSError."""
        return self._open().seek(0, os.SEEK_END)

    def _open(self) -> BinaryIO:
        if self._file is None:
            # The window is the buffer.
            self._file = self._path.open("rb", buffering=0)
        return self._file

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes of the file. Raises OSError, and FormatError if it has fewer."""
        at = offset - self._start
        if at >= 0 and at + size <= len(self._window):
            return self._window[at : at + size]
        prefetched = self._prefetched.get(self._path.name, offset, size)
        if prefetched is not None:
            return prefetched
        # Headers of small storages are near each other; headers of large storages are not.
        is_near = 0 <= at <= len(self._window) + _WINDOW_BYTES
        content = read_range(self._open(), offset, max(size, _WINDOW_BYTES) if is_near else size)
        if len(content) < size:
            raise FormatError(
                f"{self._path} ends at byte {offset + len(content)}, {size} bytes at {offset} were "
                "expected; it was cut off"
            )
        self._start = offset
        # Long content, such as the pickle, is not kept in memory twice.
        self._window = content if len(content) <= _WINDOW_BYTES else b""
        return content[:size]


def _read_zip(read: ReadRange, size_bytes: int, label: str, read_ahead: ReadAhead | None) -> Any:
    records = ZipRecords(read, 0, size_bytes, f"{label} is not a file", size_bytes)
    if records.has("constants.pkl"):
        raise FormatError(
            f"{label} is a program of TorchScript; load it with torch.jit.load and save its "
            "state_dict()"
        )
    if read_ahead is not None:
        read_ahead(records.list_headers())
    return _read_records(records, _MAX_PICKLE_BYTES, label)


def _read_records(records: ZipRecords, max_pickle_bytes: int, label: str) -> Any:
    """Return the value of an archive."""
    order = records.content("byteorder", 16) if records.has("byteorder") else b"little"
    if order != b"little":
        raise records.wrong(f"its byte order is {order!r}, expected b'little'; save it again")
    pickle = records.content("data.pkl", max_pickle_bytes)
    builder = ValueBuilder(records.storage, records.wrong)
    return read_pickle(pickle, label, builder.make, builder.refer)


class _LegacyFile:
    """A row of pickles followed by storages."""

    def __init__(self, read: ReadRange, size_bytes: int, label: str) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._label = label
        # The start and the size of each storage.
        self._storages: dict[str, tuple[int, int]] = {}

    def wrong(self, reason: str) -> FormatError:
        """Return the error for a malformed file."""
        return FormatError(f"{self._label} is not a file as torch.save wrote it: {reason}")

    def storage(self, key: str, size_bytes: int) -> tuple[int, int, int]:
        """Return a storage's start, its size, and 0, since such files lack checksums."""
        storage = self._storages.get(key)
        if storage is None:
            raise self.wrong(f"it has no storage {shortened(repr(key))}")
        return *storage, 0

    def value(self) -> Any:
        """Return the value of the file."""
        _, at = self._read_pickle(0)
        protocol, at = self._read_pickle(at)
        if protocol != _LEGACY_PROTOCOL:
            raise self.wrong(f"its protocol is {protocol!r}, expected {_LEGACY_PROTOCOL}")
        machine, start = self._read_pickle(at)
        if isinstance(machine, dict) and machine.get("little_endian") is False:
            raise self.wrong("its bytes are in the other order; save it again")
        # The first time, only the element sizes of storages are noted: tensors need their offsets,
        # which follow the value.
        itemsizes_bytes: dict[str, int] = {}

        def note(key: Any) -> Reference:
            match key:
                case ("storage", Global(_, kind), str(record), *_):
                    element = TYPED_STORAGES.get(kind)
                    # The length of an untyped storage is in bytes.
                    size = 1 if element is None else as_dtype(element).itemsize_bytes
                    itemsizes_bytes.setdefault(record, size)
            return Reference(None)

        _, at = self._read_pickle(start, note)
        keys, at = self._read_pickle(at)
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise self.wrong("the names of its storages are not a list of text")
        for key in keys:
            itemsize_bytes = itemsizes_bytes.get(key)
            if itemsize_bytes is None:
                raise self.wrong(f"nothing refers to its storage {shortened(repr(key))}")
            count = int.from_bytes(self._bytes(at, 8), "little")
            self._storages[key] = at + 8, count * itemsize_bytes
            at += 8 + count * itemsize_bytes
            if at > self._size_bytes:
                raise self.wrong(f"it ends in the storage {shortened(repr(key))}; it was cut off")
        return self._read_pickle(start)[0]

    def _bytes(self, offset: int, size: int) -> bytes:
        if offset + size > self._size_bytes:
            raise self.wrong(f"it ends at byte {self._size_bytes}; it was cut off")
        return self._read(offset, size)

    def _read_pickle(self, start: int, refer: Refer | None = None) -> tuple[Any, int]:
        """Return the value of the pickle at an offset of the file, and the pickle's end."""
        size, builder = _FIRST_BYTES, ValueBuilder(self.storage, self.wrong)
        while True:
            max_size = min(self._size_bytes - start, _MAX_PICKLE_BYTES)
            content = self._bytes(start, min(size, max_size))
            try:
                value, stop = read_pickle_at(
                    content, 0, self._label, builder.make, refer or builder.refer
                )
            except PickleEndsEarlyError:
                if size >= max_size:
                    raise
                # The next attempt parses from the beginning, so the size grows fast.
                size *= 8
            else:
                return value, start + stop


# Archives of a tensor.


def read_archive(read: ReadRange, start_bytes: int, size_bytes: int, label: str) -> ArchivedTensor:
    """Return the tensor in the archive of `size_bytes` at `start_bytes` of a file.

    `read(offset, size)` returns bytes of the file; `label` names the archive in errors.

    Raises:
        FormatError: bytes that are damaged, or not an archive of a tensor.
        UnreadableTensorError: a tensor of another class, or of another element type.
    """
    wrong = f"{label} is not a tensor"
    records = ZipRecords(read, start_bytes, size_bytes, wrong, _MAX_TENSOR_DIRECTORY_BYTES)
    value = _read_records(records, _MAX_TENSOR_PICKLE_BYTES, label)
    return _expect_tensor(value, records.wrong)


class _Template(NamedTuple):
    """The bytes that describe a tensor in an archive, which equal archives share.

    `reads` has the ranges `(offset, size)` of an archive to read; `parts` the bytes that must be in
    each, with their offsets in it. The CRC-32 of the elements is at `crc32_bytes` of the last.
    """

    reads: tuple[tuple[int, int], ...]
    parts: tuple[tuple[tuple[int, bytes], ...], ...]
    crc32_bytes: int
    tensor: ArchivedTensor


class ArchiveReader:
    """Reads archives of tensors, and parses those once that differ only in their elements.

    A checkpoint has an archive for each part of each tensor. To parse one takes far longer than to
    compare its bytes with those of an archive that was parsed before.
    """

    def __init__(self) -> None:
        self._templates: dict[Hashable, _Template] = {}

    def match(
        self, read: ReadRange, start_bytes: int, size_bytes: int, key: Hashable
    ) -> tuple[ArchivedTensor, int | None] | None:
        """Return what `parse` does for an archive that equals an earlier archive, or else None.

        `key` is a guess at what is equal, such as type and shape: the last archive of the same
        size and key is compared.
        """
        template = self._templates.get((size_bytes, key))
        if template is None:
            return None
        for (offset, size), parts in zip(template.reads, template.parts, strict=True):
            content = read(start_bytes + offset, size)
            for at, part in parts:
                if not content.startswith(part, at):
                    return None
        at = template.crc32_bytes
        # 0 means that PyTorch was set not to compute checksums.
        return template.tensor, int.from_bytes(content[at : at + 4], "little") or None

    def parse(
        self, read: ReadRange, start_bytes: int, size_bytes: int, label: str, key: Hashable
    ) -> tuple[ArchivedTensor, int | None]:
        """Return the tensor of an archive, as if it began at byte 0, and its checksum.

        Raises:
            FormatError, UnreadableTensorError: as `read_archive`.
        """
        wrong, most = f"{label} is not a tensor", _MAX_TENSOR_DIRECTORY_BYTES
        records = ZipRecords(read, start_bytes, size_bytes, wrong, most, is_recorded=True)
        value = _read_records(records, _MAX_TENSOR_PICKLE_BYTES, label)
        archived = _expect_tensor(value, records.wrong)
        start = archived.start_bytes - start_bytes
        tensor = dataclasses.replace(archived, start_bytes=start, crc32=None)
        used = records.list_used()
        # The checksum of the elements is in the directory, which follows them.
        if (
            used is not None
            and used[1] > start
            and sum(len(content) for _, content in used[0]) <= _MAX_TEMPLATE_BYTES
        ):
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            self._templates[size_bytes, key] = _make_template(*used, tensor)
        return tensor, archived.crc32


# Parts of an archive that are nearer to each other are read at once.
_TEMPLATE_GAP_BYTES = 4096
# Descriptions of tensors have about a kilobyte. These limits bound the memory of templates.
_MAX_TEMPLATES, _MAX_TEMPLATE_BYTES = 1 << 12, 1 << 14


def _make_template(
    used: list[tuple[int, bytes]], crc32_bytes: int, tensor: ArchivedTensor
) -> _Template:
    """Return the template of the bytes by which an archive was read, given with their offsets."""
    groups: list[list[tuple[int, bytes]]] = [[]]
    stop = 0
    for offset, content in sorted(used):
        if offset > stop + _TEMPLATE_GAP_BYTES:
            groups.append([])
        groups[-1].append((offset, content))
        stop = max(stop, offset + len(content))
    reads, parts = [], []
    for group in groups:
        begin = group[0][0]
        reads.append((begin, max(at + len(content) for at, content in group) - begin))
        parts.append(tuple((at - begin, part) for at, part in group))
    return _Template(tuple(reads), tuple(parts), crc32_bytes - reads[-1][0], tensor)


def read_archive_front(front: bytes, label: str) -> ArchivedTensor:
    """Return the tensor in the archive that begins with `front`; without a checksum.

    Raises:
        FormatError, UnreadableTensorError: as `read_archive`.
    """
    return _Front(front, label).tensor()


def _expect_tensor(value: Any, wrong: MakeError) -> ArchivedTensor:
    if type(value) is ArchivedTensor:
        return value
    if type(value) is Call:
        raise UnreadableTensorError(explain(value))
    raise wrong(f"it holds {shortened(explain(value))}, expected a tensor")


class _Front:
    """The records at the beginning of an archive."""

    def __init__(self, front: bytes, label: str) -> None:
        self._front = front
        self._label = label
        self._storage: tuple[str, int] | None = None

    def wrong(self, reason: str) -> FormatError:
        """Return the error for a malformed archive."""
        return FormatError(f"{self._label} is not a tensor as torch.save writes it: {reason}")

    def tensor(self) -> ArchivedTensor:
        """Return the described tensor, with the start of its storage."""
        pickle = None
        for name, begin, stop in self._list_records():
            if name == "data.pkl":
                pickle = self._front[begin:stop]
            elif name.startswith("data/"):
                self._storage = name.removeprefix("data/"), begin
        if pickle is None:
            raise self.wrong("it does not begin with its record 'data.pkl'")
        builder = ValueBuilder(self.storage, self.wrong)
        value = read_pickle(pickle, self._label, builder.make, builder.refer)
        return _expect_tensor(value, self.wrong)

    def storage(self, key: str, size_bytes: int) -> tuple[int, int, int]:
        """Return the start of the storage, and the size that it must have."""
        if self._storage is None or self._storage[0] != key:
            raise self.wrong(
                f"its record {shortened(f'data/{key}')!r} does not begin in its first "
                f"{len(self._front)} bytes"
            )
        return self._storage[1], size_bytes, 0

    def _list_records(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, start and stop of each record up to the first of data, whose stop is open."""
        at, prefix = 0, None
        while at + LOCAL_HEADER.size <= len(self._front):
            fields = LOCAL_HEADER.unpack_from(self._front, at)
            signature, _, flags, method = fields[:4]
            size, name_size, extra_size = fields[8:11]
            if signature != LOCAL_SIGNATURE:
                return
            if method != 0 or flags & ENCRYPTED:
                raise self.wrong("one of its records is compressed or encrypted")
            at += LOCAL_HEADER.size
            try:
                name = self._front[at : at + name_size].decode("utf-8")
            except UnicodeDecodeError as error:
                raise self.wrong(f"the name of a record is damaged ({error})") from error
            begin = at + name_size + extra_size
            prefix = name[: name.find("/") + 1] if prefix is None else prefix
            name = name.removeprefix(prefix)
            if name.startswith("data/"):
                yield name, begin, begin
                return
            is_open = flags & SIZES_FOLLOW
            stop = self._find_end(name, begin) if is_open else begin + size
            yield name, begin, stop
            # An open record is followed by mark, checksum and two sizes, of four bytes each.
            at = stop + 16 if is_open else stop

    def _find_end(self, name: str, begin: int) -> int:
        """Return the end of a record that is followed by its size."""
        stop = begin
        while (stop := self._front.find(DESCRIPTOR_SIGNATURE, stop)) >= 0:
            fields = self._front[stop + 4 : stop + 16]
            if len(fields) == 12:
                crc32, packed, size = struct.unpack("<3I", fields)
                # The mark's bytes may also be part of the record.
                fits = packed == size == stop - begin
                # PyTorch can be set not to compute checksums; they are 0 then.
                if fits and crc32 in (0, zlib.crc32(self._front[begin:stop])):
                    return stop
            stop += 1
        raise self.wrong(
            f"its record {shortened(name)!r} does not end in its first {len(self._front)} bytes"
        )


# Tensors of files as parts of a checkpoint.

# Many tensors of a model have the same shape.
_is_dense = lru_cache(maxsize=4096)(View.is_dense)


def check_tensor(path: Path, name: str, dtype: DType, shape: tuple[int, ...]) -> None:
    """Raise FormatError for a shape or a name in a file that no checkpoint can have."""
    try:
        check_shape(name, dtype, shape)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    if not is_text(name):
        raise FormatError(f"{path}: the name {name!r} cannot be encoded as UTF-8")


def read_storage(path: Path, tensor: ArchivedTensor, start_bytes: int = 0) -> bytes:
    """Return the storage of a small tensor, whose value begins at `start_bytes` of the file.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            start_bytes += tensor.start_bytes
            return read_range(file, start_bytes, tensor.storage_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def find_address(file: str, tensor: ArchivedTensor) -> tuple[FileRange, View | None]:
    """Return the address of a tensor of a file, and its view unless it is dense."""
    if not _is_dense(tensor.view, tensor.shape):
        return FileRange(file, tensor.start_bytes), tensor.view
    # The offset of a dense tensor becomes part of the address.
    offset_bytes = tensor.view.offset * tensor.dtype.itemsize_bytes
    return FileRange(file, tensor.start_bytes + offset_bytes), None


def region_of(file: str, tensor: ArchivedTensor, offset_bytes: int = 0) -> Region:
    """Return a tensor of a file as a region of the file, in bytes.

    `offset_bytes` is the offset of the tensor's archive in the file.

    >>> from reshard.dtypes import dtype
    >>> w = ArchivedTensor(dtype("float32"), (2, 3), View(1, (1, 2)), 64, 28, None)
    >>> region_of("w.pt", w)
    Region(start=(0, 0), stop=(2, 3), container='w.pt', offset=68, strides=(4, 8))
    """
    shape, itemsize_bytes = tensor.shape, tensor.dtype.itemsize_bytes
    start = offset_bytes + tensor.start_bytes + tensor.view.offset * itemsize_bytes
    strides = tuple(stride * itemsize_bytes for stride in tensor.view.strides)
    return Region((0,) * len(shape), shape, file, start, strides)


class StorageChecksums:
    """The checksums of the storages in files, by the tensors that are read of them."""

    def __init__(self) -> None:
        # By storage: the first tensor that reads it, with name and part; and the ranges that are
        # read, or None if a strided view reads them.
        self._first: dict[tuple[str, int], tuple[str, str, ArchivedTensor]] = {}
        self._ranges: dict[tuple[str, int], list[tuple[int, int]] | None] = {}

    def add(
        self,
        name: str,
        part: str,
        file: str,
        tensor: ArchivedTensor,
        ranges: Iterable[tuple[int, int]] | None,
    ) -> None:
        """Add `part` of the tensor `name`, which reads the byte `ranges` of the file.

        The ranges are None for a strided view.
        """
        if tensor.crc32 is None or not tensor.storage_bytes:
            return
        key = file, tensor.start_bytes
        self._first.setdefault(key, (name, part, tensor))
        collected = self._ranges.setdefault(key, [])
        if ranges is None:
            self._ranges[key] = None
        elif collected is not None:
            collected += ranges

    def add_whole(self, name: str, part: str, file: str, tensor: ArchivedTensor) -> None:
        """Add `part` of the tensor `name`, which reads all of a tensor of the file.

        A storage that several tensors view is read once more for its checksum: any of them may be
        left out of a conversion, or read twice.
        """
        address, view = find_address(file, tensor)
        start = address.start_bytes
        stop = start + math.prod(tensor.shape) * tensor.dtype.itemsize_bytes
        is_dense = view is None and (file, tensor.start_bytes) not in self._first
        self.add(name, part, file, tensor, [(start, stop)] if is_dense else None)

    def list(self) -> tuple[StoredChecksum, ...]:
        """Return the checksums of the storages that have a checksum."""
        return tuple(self._checksum(*key) for key in self._first)

    def _checksum(self, file: str, start_bytes: int) -> StoredChecksum:
        """Return a checksum, with the ranges that are not read if the others are read once."""
        name, part, tensor = self._first[file, start_bytes]
        ranges = self._ranges[file, start_bytes]
        padding, at, is_once = [], start_bytes, ranges is not None
        for start, stop in sorted(ranges or ()):
            # Bytes that two tensors share are read for each of them.
            is_once = is_once and start >= at
            if start > at:
                padding.append((at, start - at))
            at = max(at, stop)
        end = start_bytes + tensor.storage_bytes
        if at < end:
            padding.append((at, end - at))
        return StoredChecksum(
            name,
            part,
            FileRange(file, start_bytes),
            tensor.storage_bytes,
            tensor.crc32 or 0,
            is_once,
            tuple(padding) if is_once else (),
        )
