"""Reading the header of a safetensors file, which contains the byte range of each tensor.

::

    0        8                        data_start_bytes                  file_size_bytes
    |length  |{"__metadata__": {...}, |  "w"          | "b" | "x"       |
    |8 bytes,|  "w": {"dtype": "F32", |  elements, row-major, little    |
    |little  |        "shape": [2, 3],|  end first; no byte belongs to  |
    |end     |        "data_offsets": |  two tensors, none to nobody    |
    |first   |        [0, 24]}, ...}  |                                 |

1. The length is checked against the size of the file before the header is read.
2. The JSON is parsed strictly: ambiguous text, such as a repeated key, is an error.
3. Every entry is checked: its keys, their types, and that its byte range has exactly the size of
   its shape.
4. The tensors are sorted by offset. In a `FileHeader` each tensor starts at the end of the tensor
   before it, the first at the start of the data, and the last stops at the end of the file. This
   comparison, made for all tensors at once, excludes overlaps, holes and truncation.

Files may have headers of 100,000 tensors and more (`HeaderTensors` has them as columns). The
safetensors package and reshard write entries with their keys in a fixed order and without spaces::

    "w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}

Such text is parsed by a regular expression, a megabyte at a time (`read_columns`). Any other text,
even if invalid, is left to the JSON parser, which reports errors.

The format is defined by the safetensors package. In cases that it leaves open (an empty name,
several empty tensors at an offset), files that the package loads are accepted.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import stat
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from reshard._records import Record
from reshard.checkpoint.storage.filesystem import is_attribute_file
from reshard.dtypes import DType, dtype
from reshard.errors import CheckpointError, FormatError, UsageError
from reshard.runs import IntArray, concatenate
from reshard.text import first_duplicate

#: The size of the length of the header, with which a file begins.
LENGTH_BYTES = 8

#: The largest header that the safetensors package accepts, without the 8 bytes of its length.
LARGEST_HEADER_BYTES = 100_000_000

#: The largest offset in a file, and the largest index of NumPy.
LARGEST_OFFSET = 2**63 - 1
_MAX_DIMENSIONS = 32  # of an array, in the oldest NumPy supported

# Values in a damaged header may be of any size and depth; errors show their beginning.
_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = 200
shown = _shortener.repr


def tensor_size_bytes(element: DType, shape: Sequence[int]) -> int:
    """Return the size in bytes of a tensor; a 0-d tensor has a single element.

    >>> from reshard.dtypes import dtype
    >>> tensor_size_bytes(dtype("bfloat16"), (2, 3)), tensor_size_bytes(dtype("I64"), ())
    (12, 8)
    """
    return math.prod(shape) * element.itemsize_bytes


#: Dtype and shape.
HeaderKind = tuple[DType, tuple[int, ...]]


class TensorHeader(NamedTuple):
    """A tensor of a file, which takes bytes `start_bytes` to `stop_bytes` of the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start_bytes: int
    stop_bytes: int

    @property
    def size_bytes(self) -> int:
        """The number of bytes of the tensor."""
        return self.stop_bytes - self.start_bytes


def number_kinds(kinds: Iterable[HeaderKind]) -> tuple[tuple[HeaderKind, ...], IntArray]:
    """Return the distinct kinds, and the number of each tensor's."""
    numbers: dict[HeaderKind, int] = {}
    kind = [numbers.setdefault((element, tuple(shape)), len(numbers)) for element, shape in kinds]
    return tuple(numbers), np.array(kind, dtype=np.int64)


class HeaderTensors:
    """The tensors of a file in the order of their offsets, as columns.

    Args:
        names: of the tensors.
        kinds: the distinct kinds.
        kind: the number of each tensor's kind, shape `(tensors,)`.
        starts: the offset of each tensor in the file, in bytes, shape `(tensors,)`.

    >>> from reshard.dtypes import dtype
    >>> columns = HeaderTensors(["v", "w"], [(dtype("I8"), (4,))], [0, 0], [64, 68])
    >>> columns[1].stop_bytes, columns.stops.tolist()
    (72, [68, 72])
    """

    def __init__(
        self,
        names: Iterable[str],
        kinds: Sequence[HeaderKind],
        kind: Sequence[int] | IntArray,
        starts: Sequence[int] | IntArray,
    ) -> None:
        self.names = tuple(names)
        self.kinds = tuple(kinds)
        self.kind: IntArray = np.asarray(kind, dtype=np.int64)
        self.starts: IntArray = np.asarray(starts, dtype=np.int64)

    def without(self, names: Container[str]) -> HeaderTensors:
        """Return the tensors that are not named."""
        rows = [row for row, name in enumerate(self.names) if name not in names]
        remaining = [self.names[row] for row in rows]
        return HeaderTensors(remaining, self.kinds, self.kind[rows], self.starts[rows])

    @classmethod
    def of(cls, tensors: Iterable[TensorHeader]) -> HeaderTensors:
        """Return tensors as columns."""
        tensors = tuple(tensors)
        kinds, kind = number_kinds((tensor.dtype, tensor.shape) for tensor in tensors)
        names, starts = [t.name for t in tensors], [t.start_bytes for t in tensors]
        return cls(names, kinds, kind, starts)

    @cached_property
    def sizes(self) -> IntArray:
        """The size of each tensor in bytes, shape `(tensors,)`."""
        sizes = [tensor_size_bytes(element, shape) for element, shape in self.kinds]
        each: IntArray = np.array(sizes or [0], dtype=np.int64)[self.kind]
        return each

    @cached_property
    def stops(self) -> IntArray:
        """The end of each tensor in the file, shape `(tensors,)`."""
        stops: IntArray = self.starts + self.sizes
        return stops

    def __getitem__(self, index: int) -> TensorHeader:
        element, shape = self.kinds[int(self.kind[index])]
        start, stop = int(self.starts[index]), int(self.stops[index])
        return TensorHeader(self.names[index], element, shape, start, stop)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[TensorHeader]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeaderTensors) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class FileHeader(Record):
    """The contents of a safetensors file. Each data byte belongs to a single tensor.

    Attributes:
        label: names the file in errors.
        metadata: of the file; it cannot be changed.
        tensors: in the order of their offsets.
        data_start_bytes: the offset of the data in the file.
        file_size_bytes: of the file.
        unreadable: the reason for each tensor of an unknown dtype; in `tensors` its bytes are
            uint8.

    Raises:
        FormatError: tensors that overlap, leave holes or are outside the file, a file that is
            truncated or continues after them, or two tensors of a name.
    """

    label: str
    metadata: Mapping[str, str] = field(hash=False)
    tensors: HeaderTensors
    data_start_bytes: int
    file_size_bytes: int
    unreadable: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_metadata(self.label, self.metadata)
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))
        names = self.tensors.names
        if len(set(names)) != len(names):
            twice = first_duplicate(names)
            raise FormatError(
                f"{self.label}: tensor {shown(twice)} is there twice, expected every name once"
            )
        _check_coverage(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only view of a dictionary cannot be pickled, the dictionary can.
        metadata = dict(self.metadata)
        places = (self.data_start_bytes, self.file_size_bytes)
        return FileHeader, (self.label, metadata, self.tensors, *places, dict(self.unreadable))


def is_text(value: object) -> bool:
    """Return whether `value` is text that UTF-8 can encode, without unpaired surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_metadata(label: str, metadata: object) -> None:
    if not isinstance(metadata, Mapping):
        raise FormatError(
            f"{label}: __metadata__ is {shown(metadata)}, expected an object of texts"
        )
    for key, value in metadata.items():
        if not is_text(key) or not is_text(value):
            raise FormatError(
                f"{label}: __metadata__ key {shown(key)} has the value {shown(value)}, "
                f"expected UTF-8 text for both"
            )


def check_shape(name: str, element: DType, shape: tuple[int, ...]) -> None:
    if len(shape) > _MAX_DIMENSIONS:
        raise FormatError(
            f"tensor {shown(name)}: {len(shape)} dimensions, expected at most {_MAX_DIMENSIONS}"
        )
    for length in shape:
        if type(length) is not int or length < 0:
            raise FormatError(
                f"tensor {shown(name)}: shape {shown(list(shape))}, expected integers from 0 up"
            )
    # NumPy's limit: it counts a dimension of 0 as 1 here, since it strides over the others.
    elements = math.prod(shape) or math.prod(length or 1 for length in shape)
    if elements * element.itemsize_bytes > LARGEST_OFFSET:
        raise FormatError(
            f"tensor {shown(name)}: shape {shown(list(shape))} of {element} is too large, "
            f"expected fewer than 2**63 bytes"
        )


def _check_coverage(header: FileHeader) -> None:
    """Raise FormatError unless the tensors follow each other from the data's start to the end."""
    label, tensors, size = header.label, header.tensors, header.file_size_bytes
    if not LENGTH_BYTES <= header.data_start_bytes <= size:
        raise FormatError(
            f"{label}: the data starts at byte {header.data_start_bytes} of a file of {size} "
            f"bytes, expected {LENGTH_BYTES} to {size}. If the file was cut off, copy it again"
        )
    starts, stops = tensors.starts, tensors.stops
    expected = np.concatenate(([header.data_start_bytes], stops))
    misplaced = np.flatnonzero(starts != expected[:-1])
    if len(misplaced):
        # Tensors before the first misplaced tensor are in place, so it determines the error.
        first = int(misplaced[0])
        raise _explain_place(header, first, int(expected[first]))
    end = int(expected[-1])
    if end > size:
        cut = tensors[int(np.flatnonzero(stops > size)[0])]
        raise FormatError(
            f"{label}: the file is cut off: it has {size} bytes, expected {end}; {end - size} "
            f"bytes are missing, from tensor {shown(cut.name)} on (bytes {cut.start_bytes} to "
            f"{cut.stop_bytes}). Fetch or copy it again"
        )
    if end < size:
        raise FormatError(
            f"{label}: the file has {size} bytes, expected {end}: the last {size - end} bytes "
            f"belong to no tensor"
        )


def _explain_place(header: FileHeader, index: int, expected: int) -> FormatError:
    tensor = header.tensors[index]
    description = (
        f"{header.label}: tensor {shown(tensor.name)} takes bytes {tensor.start_bytes} to "
        f"{tensor.stop_bytes} of the file"
    )
    if tensor.start_bytes > header.file_size_bytes:
        return FormatError(
            f"{description}, which lie outside it: it has {header.file_size_bytes} bytes. The "
            f"tensor was expected at byte {expected}"
        )
    if tensor.start_bytes > expected:
        return FormatError(
            f"{description}, expected a start at {expected}: the {tensor.start_bytes - expected} "
            f"bytes from {expected} to {tensor.start_bytes} belong to no tensor"
        )
    if index == 0:
        return FormatError(f"{description}, but the data starts at byte {header.data_start_bytes}")
    other = header.tensors[index - 1]
    return FormatError(
        f"{description} and overlaps tensor {shown(other.name)}, which takes bytes "
        f"{other.start_bytes} to {other.stop_bytes}. Expected no byte in two tensors"
    )


# All offsets below 2**63. The JSON parser reports longer numbers.
_NUMBER = "(?:0|[1-9][0-9]{0,18})"

_ENTRY = (
    r'"([^"\\\x00-\x1f]*)":\{"dtype":"([A-Z0-9_a-z]{1,32})",'
    rf'"shape":\[((?:{_NUMBER}(?:,{_NUMBER})*)?)\],"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}},'
)

# An entry of the sharding information, as PyTorch and this package write it.
_OFFSETS = (
    r'"([^"\\\x00-\x1f]*)": \{"saved_offsets": '
    r"\[((?:(?:0|[1-9][0-9]{0,18})(?:, (?:0|[1-9][0-9]{0,18}))*)?)\]\}(?:, (?=\")|\}$)"
)
_FIXED_CHARACTERS = len('"":{"dtype":"","shape":[],"data_offsets":[,]},')
_PIECE_CHARACTERS = 1 << 20
# Metadata are mostly a few hundred bytes; offsets of shards, which are longer, follow their key.
_FRONT_BYTES = 1 << 16

#: Whitespace in JSON.
JSON_SPACES = " \t\n\r"
SUFFIX = ".safetensors"

#: Keys of text metadata in PyTorch's convention for a rank's shards, and a key of ours.
SHARDING_INFO_KEY = "DCP_SHARDING_INFO"
VERSION_KEY = "DCP_VERSION"
FILES_KEY = "RESHARD_FILES"
CONVENTION_KEYS = (SHARDING_INFO_KEY, VERSION_KEY, FILES_KEY)

#: All keys of text metadata that belong to the formats, not to the user.
OWN_METADATA = frozenset(["format", *CONVENTION_KEYS])
_LONGEST_TAG = 32  # characters; beyond that it is not worth looking for near matches
_ENTRY_KEYS = frozenset(["dtype", "shape", "data_offsets"])


def read_header(path: str | os.PathLike[str], *, allows_unknown: bool = False) -> FileHeader:
    """Read the header of the safetensors file at `path`, without its data.

    Raises:
        CheckpointError: a file that is missing or cannot be read.
        FormatError: a file that is not of the format, or has tensors of unknown dtypes unless
            `allows_unknown`.
    """
    label, header_json, file_size_bytes = _read_header_json(path)
    text, data_start_bytes = _decode(header_json, label), LENGTH_BYTES + len(header_json)
    # It may be long, and the text has the same size.
    del header_json
    header = _parse_text(text, data_start_bytes, file_size_bytes, label)
    for name, why in {} if allows_unknown else header.unreadable.items():
        raise _refuse_unknown(label, name, why)
    return header


def _read_header_json(
    path: str | os.PathLike[str], max_bytes: int = LARGEST_HEADER_BYTES
) -> tuple[str, bytes, int]:
    """Return the name of a file in errors, its header's JSON, and its size in bytes.

    If the JSON is longer than `max_bytes`, only its beginning is returned.
    """
    label = os.fspath(path)
    try:
        place = path if isinstance(path, Path) else Path(path)
        # Opening a named pipe would wait for a writer.
        if not stat.S_ISREG(place.stat().st_mode):
            raise CheckpointError(f"{label}: not a regular file, expected a safetensors file")
        with place.open("rb") as file:
            file_size_bytes = file.seek(0, os.SEEK_END)
            file.seek(0)
            length = _header_length(file.read(LENGTH_BYTES), file_size_bytes, label)
            length = min(length, max_bytes)
            header_json = file.read(length)
    except FormatError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{label}: no such file. Expected a safetensors file; if a checkpoint's index or "
            f"manifest names it, the checkpoint is incomplete"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = error.strerror if isinstance(error, OSError) else "null character in its path"
        raise CheckpointError(
            f"{label}: cannot be read: {reason}. Expected a safetensors file this user may read"
        ) from error
    if len(header_json) != length:
        raise FormatError(
            f"{label}: read {len(header_json)} bytes of header, expected {length}. The file "
            f"became shorter while it was read"
        )
    return label, header_json, file_size_bytes


def list_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files in a folder, sorted."""
    return sorted(select_files(entry.name for entry in folder.iterdir()))


def select_files(names: Iterable[str]) -> list[str]:
    """Select the names of safetensors files, without files of attributes.

    >>> select_files(["a.safetensors", "._a.safetensors", "b.bin"])
    ['a.safetensors']
    """
    return [name for name in names if name.endswith(SUFFIX) and not is_attribute_file(name)]


def drop_convention(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return text metadata without the keys of PyTorch's convention for shards."""
    return {key: value for key, value in metadata.items() if key not in CONVENTION_KEYS}


def _header_length(first_bytes: bytes, file_size_bytes: int, label: str) -> int:
    if len(first_bytes) < LENGTH_BYTES:
        raise FormatError(
            f"{label}: the file has {len(first_bytes)} bytes, expected at least {LENGTH_BYTES} "
            f"for the length of its header. It is no safetensors file, or was cut off"
        )
    length = int.from_bytes(first_bytes, "little")
    if length > LARGEST_HEADER_BYTES:
        raise FormatError(
            f"{label}: the first 8 bytes {first_bytes!r} give a header of {length} bytes, "
            f"expected at most {LARGEST_HEADER_BYTES} (100 MB). If they are text, the file is "
            f"no safetensors file but perhaps a Git LFS pointer or a web page: fetch it again"
        )
    if LENGTH_BYTES + length > file_size_bytes:
        raise FormatError(
            f"{label}: the header has {length} bytes, but only "
            f"{max(file_size_bytes - LENGTH_BYTES, 0)} bytes follow its length. The file is "
            f"{LENGTH_BYTES + length - file_size_bytes} bytes too short for its header alone: "
            f"fetch or copy it again"
        )
    return length


def parse_header(header_json: bytes, file_size_bytes: int, label: str) -> FileHeader:
    """Parse `header_json`, which follows the 8 bytes of its length.

    >>> text = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    >>> header = parse_header(text, 8 + len(text) + 8, "w.safetensors")
    >>> header.tensors[0].shape, header.tensors[0].start_bytes == 8 + len(text)
    ((2,), True)

    Raises FormatError, naming `label`, if the header or the file size is wrong.
    """
    if len(header_json) > LARGEST_HEADER_BYTES:
        raise FormatError(
            f"{label}: the header has {len(header_json)} bytes, expected at most "
            f"{LARGEST_HEADER_BYTES} (100 MB)"
        )
    data_start_bytes = LENGTH_BYTES + len(header_json)
    header = _parse_text(_decode(header_json, label), data_start_bytes, file_size_bytes, label)
    for name, why in header.unreadable.items():
        raise _refuse_unknown(label, name, why)
    return header


def _refuse_unknown(label: str, name: str, why: str) -> FormatError:
    return FormatError(f"{label}: tensor {shown(name)}: {why.removeprefix('of ')}")


def _parse_text(text: str, data_start_bytes: int, file_size_bytes: int, label: str) -> FileHeader:
    # Avoid a copy, which may be long.
    text = text if text[:1] == "{" else text.lstrip(JSON_SPACES)
    unreadable: dict[str, str] = {}
    try:
        tensors, metadata = read_columns(text, data_start_bytes)
    except (ValueError, OverflowError, RecursionError):
        # Text of another form, or wrong text, for which the JSON parser reports an error.
        entries = _parse_json(text, label)
        metadata = entries.pop("__metadata__", {})
        listed = [
            _tensor(label, name, entries[name], data_start_bytes, unreadable) for name in entries
        ]
        tensors = sorted_by_offset(HeaderTensors.of(listed))
    unchecked: Any = metadata  # `FileHeader` checks its type.
    return FileHeader(label, unchecked, tensors, data_start_bytes, file_size_bytes, unreadable)


def has_metadata_key(path: str | os.PathLike[str], key: str) -> bool:
    """Return whether the text metadata of the file at `path` have a key.

    Only the beginning of a header is read if its metadata come first, as in nearly all files.
    Raises as `read_header`.
    """
    _, front, _ = _read_header_json(path, _FRONT_BYTES)
    text = front.decode(errors="replace")
    begin = re.match(r'\s*\{\s*"__metadata__"\s*:\s*(?=\{)', text)
    if begin is not None:
        try:
            return key in json.JSONDecoder().raw_decode(text, begin.end())[0]
        except (ValueError, RecursionError):
            # All of the text is in the metadata. Quotation marks in texts are escaped, so the key
            # cannot be a part of another text.
            if f'"{key}":' in text:
                return True
    # Many programs write no metadata: searching for them takes a fiftieth of parsing the header.
    _, header_json, _ = _read_header_json(path)
    if b'"__metadata__"' not in header_json:
        return False
    return key in read_header(path, allows_unknown=True).metadata


def _decode(header_json: bytes, label: str) -> str:
    try:
        return header_json.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{label}: byte {LENGTH_BYTES + error.start} of the file is no UTF-8 text "
            f"({error.reason}), expected a header that is JSON in UTF-8"
        ) from error


def _parse_json(text: str, label: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise FormatError(
                f"{label}: key {shown(first_duplicate(key for key, _ in pairs))} is there twice "
                f"in one object of the header: {shown(pairs)}. Expected every tensor and every "
                f"key once"
            )
        return result

    if not text.startswith("{"):
        raise FormatError(
            f"{label}: the header begins with {text[:16]!r}, expected a JSON object: '{{'"
        )
    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5000 digits
        raise FormatError(f"{label}: the header is not JSON: {error}") from error
    entries: dict[str, Any] = parsed  # the text began with "{"
    return entries


def _tensor(
    label: str, name: str, entry: Any, data_start_bytes: int, unreadable: dict[str, str]
) -> TensorHeader:
    def wrong(actual: str, expected: str) -> FormatError:
        return FormatError(f"{label}: tensor {shown(name)}: {actual}, expected {expected}")

    if not is_text(name):
        raise wrong("the name is half of a UTF-16 pair", "text that UTF-8 can say")
    if not isinstance(entry, dict):
        raise wrong(f"its entry is {shown(entry)}", f"an object with {sorted(_ENTRY_KEYS)}")
    # Exactly these keys: others might change the meaning of the bytes.
    if entry.keys() != _ENTRY_KEYS:
        raise wrong(f"its entry has the keys {shown(sorted(entry))}", f"{sorted(_ENTRY_KEYS)}")
    tag, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _are_integers(shape):
        raise wrong(f"shape {shown(shape)}", "a list of integers")
    if not _are_integers(offsets) or len(offsets) != 2:
        raise wrong(f"data_offsets {shown(offsets)}", "a list of two integers")
    start, stop = offsets
    if not 0 <= start <= stop <= LARGEST_OFFSET:
        raise wrong(f"data_offsets {shown(offsets)}", "0 <= start <= stop < 2**63")
    if not isinstance(tag, str) or len(tag) > _LONGEST_TAG:
        raise wrong(f"dtype {shown(tag)}", "a tag such as 'F32' or 'BF16'")
    try:
        element = dtype(tag)
    except UsageError as error:
        # A newer dtype, perhaps. The other tensors can be read.
        unreadable[name] = f"of {error}"
        element, shape = dtype("uint8"), [stop - start]
        tag = element.safetensors_tag
    # Other spellings of dtypes, such as "float32", are not tags.
    if element.safetensors_tag != tag:
        raise wrong(f"dtype {tag!r}", f"a tag such as {element.safetensors_tag or 'F32'!r}")
    start, stop = data_start_bytes + start, data_start_bytes + stop
    try:
        check_shape(name, element, tuple(shape))
    except FormatError as error:
        raise FormatError(f"{label}: {error}. Its data_offsets are {shown(offsets)}") from error
    if stop > LARGEST_OFFSET:
        raise wrong(f"bytes {start} to {stop} are no range of a file", "an end below 2**63")
    expected = tensor_size_bytes(element, shape)
    if stop - start != expected:
        actual = f"data_offsets {shown(offsets)} are {stop - start} bytes"
        raise wrong(actual, f"{expected} for {element} of shape {shape}")
    return TensorHeader(name, element, tuple(shape), start, stop)


def _are_integers(value: object) -> bool:
    # `type` instead of `isinstance`, since bool is a subclass of int.
    return isinstance(value, list) and all(type(item) is int for item in value)


def read_columns(text: str, data_start_bytes: int) -> tuple[HeaderTensors, Mapping[str, object]]:
    """Parse the text of a header as the safetensors package writes it.

    Returns:
        The tensors in the order of their offsets, and the metadata.

    Raises:
        ValueError: text of another form, or wrong text.
    """
    end = _find_end(text)
    at = 1
    metadata: dict[str, object] = {}
    if not text.startswith("{") or text[end - 1 : end] != "}":
        raise ValueError("no object")
    if text.startswith('{"__metadata__":{'):
        # The JSON parser reports repeated keys.
        # From character 16 on, after `{"__metadata__":`.
        metadata, at = json.JSONDecoder(object_pairs_hook=_expect_unique).raw_decode(text, 16)
        if at == end - 1:
            return HeaderTensors((), (), (), ()), metadata
        if text[at : at + 1] != ",":
            raise ValueError("no comma")
        at += 1
    names: list[str] = []
    numbers: dict[tuple[str, str], int] = {}
    kind: list[IntArray] = []
    starts: list[IntArray] = []
    stops: list[IntArray] = []
    for piece in _split_pieces(text, at, end - 1):
        entries = re.findall(_ENTRY, piece)
        if not entries:
            raise ValueError("no entries")
        columns = list(zip(*entries, strict=True))
        # Matches do not overlap: if they contain all characters, nothing is between them.
        characters = sum(sum(map(len, column)) for column in columns)
        if characters + len(entries) * _FIXED_CHARACTERS != len(piece):
            raise ValueError("other entries")
        names += columns[0]
        pairs = zip(columns[1], columns[2], strict=True)
        kind.append(np.array([numbers.setdefault(pair, len(numbers)) for pair in pairs]))
        starts.append(np.array(list(map(int, columns[3])), dtype=np.int64))
        stops.append(np.array(list(map(int, columns[4])), dtype=np.int64))
    kinds = [_read_kind(*pair) for pair in numbers]
    if stops and max(int(stop.max()) for stop in stops) > LARGEST_OFFSET - data_start_bytes:
        raise ValueError("offsets beyond any file")
    tensors = HeaderTensors(names, kinds, concatenate(kind), concatenate(starts) + data_start_bytes)
    is_wrong = (tensors.stops != concatenate(stops) + data_start_bytes).any()
    if is_wrong or "__metadata__" in names:
        raise ValueError("offsets that do not fit, or metadata")
    return sorted_by_offset(tensors), metadata


def _find_end(text: str) -> int:
    """Return the offset of trailing whitespace, without a copy of the text, which may be long."""
    end = len(text)
    while end and text[end - 1] in JSON_SPACES:
        begin = max(end - _PIECE_CHARACTERS, 0)
        end = begin + len(text[begin:end].rstrip(JSON_SPACES))
    return end


def find_offsets(text: str, names: Sequence[str]) -> dict[str, tuple[int, ...]] | None:
    """Parse sharding information as it is mostly written, with few tuples for very many tensors.

    Returns None for text of other tensors or in another order, which may be correct.
    """
    offsets: dict[str, tuple[int, ...]] = {}
    by_text: dict[str, tuple[int, ...]] = {}
    at = 1 if text.startswith("{") else len(text)
    match = re.compile(_OFFSETS).match
    for name in names:
        entry = match(text, at)
        if entry is None or entry[1] != name:
            return None
        parsed = by_text.get(entry[2])
        if parsed is None:
            parsed = tuple(map(int, entry[2].split(", "))) if entry[2] else ()
            by_text[entry[2]] = parsed
        offsets[name] = parsed
        at = entry.end()
    return offsets if names and at == len(text) and text.endswith("}}") else None


def sorted_by_offset(tensors: HeaderTensors) -> HeaderTensors:
    """Sort tensors by offset; empty tensors come before others of the same offset."""
    if (np.diff(tensors.starts) > 0).all():
        return tensors
    order = np.lexsort((tensors.stops, tensors.starts))
    names = [tensors.names[row] for row in order.tolist()]
    return HeaderTensors(names, tensors.kinds, tensors.kind[order], tensors.starts[order])


def _split_pieces(text: str, begin: int, end: int) -> Iterator[str]:
    """Yield the text in pieces of whole entries, each with a comma after its last."""
    while begin < end:
        # Names contain no quotation marks.
        cut = text.find(']},"', begin + _PIECE_CHARACTERS, end)
        stop = end if cut < 0 else cut + 2
        yield text[begin:stop] + ","
        begin = stop + 1


def _read_kind(tag: str, shape: str) -> HeaderKind:
    try:
        element = dtype(tag)
        lengths = tuple(map(int, shape.split(","))) if shape else ()
        check_shape("any", element, lengths)
    except (UsageError, FormatError) as error:
        raise ValueError(str(error)) from error
    if element.safetensors_tag != tag:
        raise ValueError(tag)
    return element, lengths


def _expect_unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is there twice")
    return result
