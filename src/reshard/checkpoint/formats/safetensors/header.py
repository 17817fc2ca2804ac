"""The header of one safetensors file, read and written: where in the file each tensor lies.

::

    0        8                        data_start_bytes                  file_size_bytes
    |length  |{"__metadata__": {...}, |  "w"          | "b" | "x"       |
    |8 bytes,|  "w": {"dtype": "F32", |  elements, row-major, little    |
    |little  |        "shape": [2, 3],|  end first; no byte belongs to  |
    |end     |        "data_offsets": |  two tensors, none to nobody    |
    |first   |        [0, 24]}, ...}  |                                 |

Reading:

1. the length is checked against the file before anything of that size is read;
2. the JSON is read strictly: one meaning or an error, so a key given twice is an error;
3. every entry is checked by itself: its keys, their types, and that its range of bytes
   holds exactly its shape;
4. the tensors are sorted by offset, and `FileHeader` proves that they cover the data.

Writing lays tensors out in the order given and pads the header with spaces, so that the
data starts at a multiple of the file system's blocks.

The format is that of the safetensors package; where its text leaves room (an empty name,
several empty tensors at one offset), what that package loads is accepted.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reshard.checkpoint.formats.safetensors.header_text import (
    JSON_SPACES,
    find_metadata,
    read_columns,
    sorted_by_offset,
)
from reshard.checkpoint.formats.safetensors.new_header import (
    LARGEST_HEADER_BYTES,
    NewHeader,
    aligned_rows,
    number_kinds,
    place_header,
)
from reshard.checkpoint.formats.safetensors.values import (
    LARGEST_OFFSET,
    LENGTH_BYTES,
    FileHeader,
    HeaderTensors,
    TensorHeader,
    is_text,
    shown,
    tensor_size_bytes,
)
from reshard.checkpoint.storage.filesystem import is_attribute_file
from reshard.checkpoint.storage.json_text import first_duplicate
from reshard.dtypes import DType, dtype
from reshard.errors import CheckpointError, FormatError, UsageError

__all__ = [
    "CONVENTION_KEYS",
    "FILES_KEY",
    "LARGEST_HEADER_BYTES",
    "OWN_METADATA",
    "SHARDING_INFO_KEY",
    "SUFFIX",
    "VERSION_KEY",
    "FileHeader",
    "NamedTensor",
    "TensorHeader",
    "aligned_order",
    "build_header",
    "drop_convention",
    "list_files",
    "parse_header",
    "read_header",
    "read_metadata",
    "tensor_size_bytes",
]

SUFFIX = ".safetensors"

#: Keys of text metadata in PyTorch's convention for a rank's shards, and one of ours.
SHARDING_INFO_KEY = "DCP_SHARDING_INFO"
VERSION_KEY = "DCP_VERSION"
FILES_KEY = "RESHARD_FILES"
CONVENTION_KEYS = (SHARDING_INFO_KEY, VERSION_KEY, FILES_KEY)
#: All keys of text metadata that belong to the formats, not to the user.
OWN_METADATA = frozenset(["format", *CONVENTION_KEYS])

#: (name, dtype, shape): what a header says of a tensor before it has a place in a file.
NamedTensor = tuple[str, DType, tuple[int, ...]]

_LONGEST_TAG = 32  # characters; beyond that it is not worth looking for near matches
_ENTRY_KEYS = frozenset(["dtype", "shape", "data_offsets"])


def read_header(path: str | os.PathLike[str], *, allows_unknown: bool = False) -> FileHeader:
    """The header of the safetensors file at `path`; its data is not read.

    Raises CheckpointError if the file is missing or cannot be read, FormatError if its
    bytes are not what the format promises, or if it has tensors of unknown element types and
    they are not allowed.
    """
    label, header_json, file_size_bytes = _read_header_json(path)
    text, data_start_bytes = _decode(header_json, label), LENGTH_BYTES + len(header_json)
    # It may be long, and the text is as long again.
    del header_json
    header = _parse_text(text, data_start_bytes, file_size_bytes, label)
    for name, why in {} if allows_unknown else header.unreadable.items():
        raise _refuse_unknown(label, name, why)
    return header


def _read_header_json(path: str | os.PathLike[str]) -> tuple[str, bytes, int]:
    """The name of a file in errors, its header's JSON, and its size in bytes."""
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
    """The names of the safetensors files in a folder, sorted."""
    names = [entry.name for entry in folder.iterdir() if entry.name.endswith(SUFFIX)]
    return sorted(name for name in names if not is_attribute_file(name))


def drop_convention(metadata: Mapping[str, str]) -> dict[str, str]:
    """Text metadata without the keys of the convention for shards."""
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
    """The header written as `header_json`, which follows the 8 bytes of its length.

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
    # A copy of it may be long.
    text = text if text[:1] == "{" else text.lstrip(JSON_SPACES)
    unreadable: dict[str, str] = {}
    try:
        tensors, metadata = read_columns(text, data_start_bytes)
    except (ValueError, OverflowError, RecursionError):
        # Written in another way, or wrong: then it is said what is.
        entries = _parse_json(text, label)
        metadata = entries.pop("__metadata__", {})
        listed = [
            _tensor(label, name, entries[name], data_start_bytes, unreadable) for name in entries
        ]
        tensors = sorted_by_offset(HeaderTensors.of(listed))
    given: Any = metadata  # `FileHeader` sees whether it is what it should be
    return FileHeader(label, given, tensors, data_start_bytes, file_size_bytes, unreadable)


def read_metadata(path: str | os.PathLike[str]) -> Mapping[str, str]:
    """The text metadata of the file at `path`, where that can be told without its tensors.

    Raises as `read_header`.
    """
    label, header_json, file_size_bytes = _read_header_json(path)
    metadata = find_metadata(_decode(header_json, label).lstrip(JSON_SPACES))
    if metadata is None or not all(is_text(value) for value in metadata.values()):
        return parse_header(header_json, file_size_bytes, label).metadata
    return {key: str(value) for key, value in metadata.items()}


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
        found = dict(pairs)
        if len(found) != len(pairs):
            raise FormatError(
                f"{label}: key {shown(first_duplicate(key for key, _ in pairs))} is there twice "
                f"in one object of the header: {shown(pairs)}. Expected every tensor and every "
                f"key once"
            )
        return found

    if not text.startswith("{"):
        raise FormatError(
            f"{label}: the header begins with {text[:16]!r}, expected a JSON object: '{{'"
        )
    try:
        found = json.loads(text, object_pairs_hook=unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5000 digits
        raise FormatError(f"{label}: the header is not JSON: {error}") from error
    entries: dict[str, Any] = found  # the text began with "{"
    return entries


def _tensor(
    label: str, name: str, entry: Any, data_start_bytes: int, unreadable: dict[str, str]
) -> TensorHeader:
    def wrong(found: str, expected: str) -> FormatError:
        return FormatError(f"{label}: tensor {shown(name)}: {found}, expected {expected}")

    if not is_text(name):
        raise wrong("the name is half of a UTF-16 pair", "text that UTF-8 can say")
    if not isinstance(entry, dict):
        raise wrong(f"its entry is {shown(entry)}", f"an object with {sorted(_ENTRY_KEYS)}")
    # Exactly these keys: an unknown one might change what the bytes mean.
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
        # Another version may know it; the bytes around it have their tensors all the same.
        unreadable[name] = f"of {error}"
        element, shape = dtype("uint8"), [stop - start]
        tag = element.safetensors_tag
    # Other spellings, such as "float32", name a type but are no tags.
    if element.safetensors_tag != tag:
        raise wrong(f"dtype {tag!r}", f"a tag such as {element.safetensors_tag or 'F32'!r}")
    try:
        return TensorHeader(
            name, element, tuple(shape), data_start_bytes + start, data_start_bytes + stop
        )
    except FormatError as error:
        raise FormatError(f"{label}: {error}. Its data_offsets are {shown(offsets)}") from error


def aligned_order(
    tensors: Iterable[NamedTensor], alignment_bytes: int = 4096
) -> tuple[NamedTensor, ...]:
    """The tensors whose size is a multiple of `alignment_bytes` first, otherwise as given.

    Laid out in that order by `build_header`, each of those starts at such a multiple, and
    whole blocks of the file system can be written without reading what is beside them.

    >>> small, large = ("b", dtype("F32"), (3,)), ("w", dtype("F32"), (2, 1024))
    >>> [name for name, _, _ in aligned_order([small, large])]
    ['w', 'b']
    """
    tensors = tuple(tensors)
    kinds, kind = number_kinds((element, shape) for _, element, shape in tensors)
    return tuple(tensors[row] for row in aligned_rows(kinds, kind, alignment_bytes).tolist())


def build_header(
    tensors: Iterable[NamedTensor],
    metadata: Mapping[str, str] | None = None,
    alignment_bytes: int = 4096,
    label: str = "new file",
) -> tuple[bytes, FileHeader]:
    """The first bytes of a file that holds `tensors` in this order, and the header they encode.

    The bytes (length, JSON and padding) end where the data starts, at a multiple of
    `alignment_bytes`; `FileHeader.tensors` gives each tensor's place, in the order given,
    and `FileHeader.file_size_bytes` the size of the whole file.

    >>> first_bytes, header = build_header([("w", dtype("F32"), (2,)), ("b", dtype("I8"), ())])
    >>> len(first_bytes), [(tensor.start_bytes, tensor.stop_bytes) for tensor in header.tensors]
    (4096, [(4096, 4104), (4104, 4105)])

    Raises UsageError for what such a file cannot say: a type without a tag, a name given
    twice or reserved, an impossible shape, metadata that is not text, a header over 100 MB.
    """
    tensors = tuple(tensors)
    kinds, kind = number_kinds((element, shape) for _, element, shape in tensors)
    names = tuple(name for name, _, _ in tensors)
    rows = np.arange(len(names))
    new = NewHeader(names, rows, kinds, kind, metadata or {}, alignment_bytes=alignment_bytes)
    place_header(new, label)
    placed = HeaderTensors(names, kinds, kind, new.starts)
    return b"".join(new.pieces()), FileHeader(
        label, new.metadata, placed, new.data_start_bytes, new.file_size_bytes
    )


def _are_integers(value: object) -> bool:
    # type, not isinstance: True is an integer to Python and not to JSON.
    return isinstance(value, list) and all(type(item) is int for item in value)
