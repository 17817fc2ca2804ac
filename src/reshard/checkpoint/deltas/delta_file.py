"""The file of a delta: the changes from one checkpoint to another.

::

    0             64                                   index_start
    | header      | payload                            | index                        |
    | position of | changes of blocks; items and files | tensors, changed blocks,     |
    | the index   | other than tensors                 | digests of all blocks        |

1. Numbers are little-endian. `docs/deltas.md` has every field.
2. The index is written last, and its digest is in the header: a truncated file is not a delta.
3. Tensors are divided into blocks by `reshard.checkpoint.blocks.grid`, in the same way for every
   sharding. The delta has the digest of each block afterwards, and the digest of each changed
   block before. So it fits a single state of a checkpoint, in any sharding and format.
4. A process with a block needs only a single range of the file to update it.

Values and files other than tensors are JSON in the index. JSON has fewer types than a state dict:
tuples, bytes, dicts with keys other than strings, and non-finite floats are encoded as objects with
a single key that names their type.

>>> decode_value(encode_value({"betas": (0.9, 0.95), "steps": [1, 2]}))
{'betas': (0.9, 0.95), 'steps': [1, 2]}
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard._validation import MAX_RANKS
from reshard.checkpoint.blocks import grid
from reshard.checkpoint.blocks.grid import DIGEST_BYTES, BlockGrid, block_digest
from reshard.checkpoint.formats.safetensors.header import check_shape
from reshard.checkpoint.manifest import MANIFEST_NAME, is_plain_name
from reshard.checkpoint.storage.filesystem import open_new, sync_folder, translate_os_errors
from reshard.checkpoint.storage.local_files import FileIdentity
from reshard.checkpoint.storage.permissions import common_mode_bits, restrict_mode
from reshard.checkpoint.storage.remote_paths import check_path_text
from reshard.dtypes import DType
from reshard.errors import CheckpointError, FormatError, ReshardError, UsageError
from reshard.plans.documents import read_dtype, read_int, read_ints, read_json, read_strings
from reshard.system import sync
from reshard.text import parse_json

# Deeper values would exhaust the stack of the recursive functions below.
_MAX_DEPTH = 64


def encode_value(value: Any, depth: int = 0) -> Any:
    """Return a plain value as JSON.

    Raises:
        UsageError: a value of another type.
    """
    if depth > _MAX_DEPTH:
        raise UsageError(f"a value nested more than {_MAX_DEPTH} levels deep")
    # Not isinstance: a subclass, such as an enum, would be read as its base class.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind in (list, tuple):
        items = [encode_value(item, depth + 1) for item in value]
        return items if kind is list else {"tuple": items}
    if kind is dict:
        pairs = [
            [encode_value(key, depth + 1), encode_value(item, depth + 1)]
            for key, item in value.items()
        ]
        return {"dict": pairs}
    raise UsageError(f"a value of type {kind.__name__}, which deltas do not support")


def decode_value(content: Any, depth: int = 0) -> Any:
    """Return the value that `encode_value` wrote.

    Raises:
        FormatError: any other content.
    """
    if depth > _MAX_DEPTH:
        raise FormatError(f"a value nested more than {_MAX_DEPTH} levels deep")
    if isinstance(content, list):
        return [decode_value(item, depth + 1) for item in content]
    if not isinstance(content, dict):
        return content
    if len(content) != 1:
        raise FormatError(f"a value with the keys {[*content][:5]}, expected one")
    ((kind, inner),) = content.items()
    try:
        if kind == "float":
            return float(inner)
        if kind == "bytes":
            return base64.b64decode(inner, validate=True)
        if kind == "tuple":
            return tuple(decode_value(item, depth + 1) for item in inner)
        if kind == "dict":
            return {
                decode_value(key, depth + 1): decode_value(item, depth + 1) for key, item in inner
            }
    except (TypeError, ValueError, binascii.Error) as error:
        raise FormatError(f"a value that cannot be read: {error}") from error
    raise FormatError(f"a value of the unknown kind {kind!r}")


def is_plain_path(name: str) -> bool:
    """Return whether a file's name stays inside its folder, and is not reserved.

    >>> [is_plain_path(name) for name in ("config.json", "a/b.txt", "../a", ".metadata", "/a")]
    [True, True, False, False, False]
    """
    parts = name.split("/")
    return name != MANIFEST_NAME and all(
        is_plain_name(part) and not part.startswith(".") for part in parts
    )


MAGIC = b"RSHDELTA"
VERSION = 1
HEADER_BYTES = 64
_HEADER = struct.Struct("<8sIIQQ16s")
# A larger size is a sign of a damaged header: no memory is allocated for it.
_MAX_INDEX_BYTES = 1 << 32
KINDS = ("kept", "changed", "added", "replaced")
# A row for each changed block, in the order of tensors and blocks.
RECORD = np.dtype(
    [
        ("block", "<u8"),
        # Not S16, from which NumPy strips zeros at the end.
        ("before", "V16"),
        ("start", "<u8"),
        ("size", "<u4"),
        ("plain", "<u4"),
        ("words", "<u4"),
        ("coding", "u1"),
        ("flags", "u1"),
        ("reserved", "<u2"),
    ]
)


class DeltaTensor(NamedTuple):
    """A tensor after a delta; its blocks are numbered from `first_block` on.

    `kind` is kept, changed, added, or replaced (by a tensor of another type or shape). `before` has
    the previous type and shape, or is None.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    kind: str
    first_block: int
    grid: BlockGrid
    before: tuple[DType, tuple[int, ...]] | None

    @property
    def blocks(self) -> slice:
        """The blocks of the tensor among those of the delta."""
        return slice(self.first_block, self.first_block + self.grid.count)


class AuxiliaryBytes(NamedTuple):
    """A file or an item other than a tensor, after a delta: kept, or in the payload."""

    name: str
    digest: bytes
    size_bytes: int
    start_bytes: int | None = None
    transforms: tuple[str, ...] = ()
    rank: int = 0


class Delta(Record):
    """The changes from one checkpoint to another.

    Attributes:
        path: the path of the file.
        identity: the identity of the file.
        digest: the digest of the index.
        payload_bytes: the size of the payload.
        tensors: the tensors afterwards, by name, in order.
        removed: the type and shape of removed tensors, by name.
        digests: the digest of every block afterwards, of shape `(blocks, 16)`.
        records: the changed blocks, rows of `RECORD`.
        items: byte values other than tensors, or None if unknown because a format cannot store
            them.
        files: other files.
        values: the values afterwards, as in a `Checkpoint`, or None if unknown.
        metadata: see `values`.
        paths: see `values`.
        attributes: see `values`.
        compression: the compression of the payload, or None.
        notes: notes for the user.
    """

    path: Path
    identity: FileIdentity
    digest: bytes
    payload_bytes: int
    tensors: Mapping[str, DeltaTensor]
    removed: Mapping[str, tuple[DType, tuple[int, ...]]]
    digests: NDArray[np.uint8]
    records: NDArray[Any]
    items: Mapping[str, AuxiliaryBytes] | None
    files: Mapping[str, AuxiliaryBytes]
    values: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] | None = None
    paths: Mapping[str, tuple[str | int, ...]] | None = None
    attributes: Mapping[str, Any] | None = None
    compression: str | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self.identity.size_bytes

    @property
    def changed_words(self) -> int:
        """The number of changed words of all tensors."""
        return int(self.records["words"].sum(dtype=np.int64))

    @cached_property
    def _block_of_record(self) -> NDArray[np.int64]:
        blocks: NDArray[np.int64] = self.records["block"].astype(np.int64)
        return blocks

    def records_of(self, tensor: DeltaTensor) -> NDArray[Any]:
        """Return the records of a tensor's changed blocks."""
        first, stop = np.searchsorted(
            self._block_of_record, [tensor.blocks.start, tensor.blocks.stop]
        )
        rows: NDArray[Any] = self.records[first:stop]
        return rows

    def find_record(self, tensor: DeltaTensor, block: int) -> Any:
        """Return the record of a tensor's block, or None if it did not change."""
        rows = self.records_of(tensor)
        number = tensor.first_block + block
        at = int(np.searchsorted(rows["block"], number))
        return rows[at] if at < len(rows) and int(rows["block"][at]) == number else None

    def digest_after(self, tensor: DeltaTensor, block: int) -> bytes:
        """Return the digest of a tensor's block after the delta."""
        return bytes(self.digests[tensor.first_block + block])

    def digests_before(self, tensor: DeltaTensor) -> NDArray[np.uint8]:
        """Return the digests of a tensor's blocks before the delta, of shape `(blocks, 16)`."""
        before = self.digests[tensor.blocks].copy()
        rows = self.records_of(tensor)
        at = rows["block"].astype(np.int64) - tensor.first_block
        before[at] = np.frombuffer(rows["before"].tobytes(), np.uint8).reshape(-1, DIGEST_BYTES)
        return before


def read_delta(path: str | os.PathLike[str]) -> Delta:
    """Read the index of a delta; its payload is not read.

    Raises:
        CheckpointError: a file that does not exist or cannot be read.
        FormatError: a file that is not a delta, is damaged, or of a later version.
        UsageError: a path with a null character.
    """
    path = Path(check_path_text(path))
    try:
        with path.open("rb") as file:
            identity = FileIdentity.of(path.name, os.fstat(file.fileno()))
            index, digest = _read_index(file, identity.size_bytes, path)
    except OSError as error:
        raise CheckpointError(f"cannot read the delta {path}: {error.strerror}") from error
    try:
        return _parse_index(path, identity, index, digest)
    except FormatError as error:
        raise FormatError(f"{path}: {error}; the delta is damaged, fetch it again") from error
    except (ReshardError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
        raise FormatError(
            f"{path}: its index cannot be read: {reason}; the delta is damaged, fetch it again"
        ) from error


def _read_index(file: BinaryIO, size_bytes: int, path: Path) -> tuple[bytes, bytes]:
    header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise FormatError(
            f"{path} is not a delta: it begins with {header[:8]!r}; give a file that `reshard "
            "diff` wrote"
        )
    _, version, reserved, start, size, digest = _HEADER.unpack_from(header)
    if version != VERSION or reserved:
        raise FormatError(
            f"{path} is a delta of version {version}; this reshard reads {VERSION}, update it"
        )
    if start < HEADER_BYTES or start + size != size_bytes or size > _MAX_INDEX_BYTES:
        raise FormatError(
            f"{path} has {size_bytes} bytes, its index should be in bytes {start}:{start + size}; "
            "the delta was truncated, fetch it again"
        )
    file.seek(start)
    index = file.read(size)
    if block_digest(index) != digest:
        raise FormatError(
            f"{path}: its index is not what was written, by its digest; the delta is damaged, "
            "fetch it again"
        )
    return index, digest


def _parse_index(path: Path, identity: FileIdentity, index: bytes, digest: bytes) -> Delta:
    if len(index) < 24:
        raise FormatError("an index without its sizes")
    text_bytes, blocks, changed = struct.unpack_from("<3Q", index)
    if 24 + text_bytes + blocks * DIGEST_BYTES + changed * RECORD.itemsize != len(index):
        raise FormatError(f"an index of {len(index)} bytes for {blocks} blocks, {changed} changed")
    content = parse_json(index[24 : 24 + text_bytes].decode("utf-8"))
    payload_bytes = identity.size_bytes - len(index) - HEADER_BYTES
    columns = memoryview(index)[24 + text_bytes :]
    digests = np.frombuffer(columns[: blocks * DIGEST_BYTES], np.uint8).reshape(-1, DIGEST_BYTES)
    records = np.frombuffer(columns[blocks * DIGEST_BYTES :], RECORD)
    if content["block_bytes"] != grid.BLOCK_BYTES:
        raise FormatError(f"blocks of {content['block_bytes']!r} bytes, not {grid.BLOCK_BYTES}")
    tensors = _parse_tensors(content["tensors"], blocks)
    _check_records(records, tensors, payload_bytes)
    removed = {}
    for name, dtype, shape in content["removed"]:
        if read_json(name, str, "a removed tensor") in tensors or name in removed:
            raise FormatError(f"the removed tensor {name!r} appears twice")
        removed[name] = _parse_kind(name, dtype, shape)
    items = content["items"]
    return Delta(
        path,
        identity,
        digest,
        payload_bytes,
        tensors,
        removed,
        digests,
        records,
        None if items is None else _parse_auxiliary(items, payload_bytes, is_file=False),
        _parse_auxiliary(content["files"], payload_bytes, is_file=True),
        _parse_mapping(content["values"]),
        _parse_mapping(content["metadata"]),
        _parse_paths(content["paths"]),
        _parse_mapping(content["attributes"]),
        content["compression"],
        tuple(read_strings(content["notes"], "the notes")),
    )


def _parse_kind(name: str, dtype: Any, shape: Any) -> tuple[DType, tuple[int, ...]]:
    kind, lengths = read_dtype(dtype, f"tensor {name!r}"), read_ints(shape, f"tensor {name!r}", 0)
    check_shape(name, kind, lengths)
    return kind, lengths


def _parse_tensors(rows: Any, blocks: int) -> dict[str, DeltaTensor]:
    tensors: dict[str, DeltaTensor] = {}
    first = 0
    for name, dtype, shape, kind, *before in rows:
        if read_json(name, str, "a tensor") in tensors or kind not in KINDS:
            raise FormatError(f"tensor {name!r} appears twice, or has the kind {kind!r}")
        own = _parse_kind(name, dtype, shape)
        was = None if kind == "added" else own
        if kind == "replaced":
            was = _parse_kind(name, *before)
        # The grid is not stored, since the shape and the element size determine it.
        blocked = BlockGrid.of(own[1], own[0].itemsize_bytes)
        tensors[name] = DeltaTensor(name, *own, kind, first, blocked, was)
        first += blocked.count
        if first > blocks:
            break
    if first != blocks:
        raise FormatError(f"{blocks} blocks are listed, which is not the number of its tensors")
    return tensors


def _check_records(
    records: NDArray[Any], tensors: Mapping[str, DeltaTensor], payload_bytes: int
) -> None:
    """Raise FormatError for invalid records of changed blocks."""
    # Signed, since differences of unsigned numbers wrap around.
    at = records["block"].astype(np.int64)
    if len(at) and ((np.diff(at) <= 0).any() or at[0] < 0):
        raise FormatError("changed blocks that are not in order")
    start, size = records["start"], records["size"].astype(np.uint64)
    # A large start is found before its sum with the size can wrap around.
    if len(at) and ((start > payload_bytes).any() or (start + size > payload_bytes).any()):
        raise FormatError("a changed block outside of the payload")
    for tensor in tensors.values():
        first, stop = np.searchsorted(at, [tensor.blocks.start, tensor.blocks.stop])
        count, is_whole = int(stop - first), tensor.kind in ("added", "replaced")
        if (is_whole and count != tensor.grid.count) or (tensor.kind == "kept" and count):
            raise FormatError(
                f"{count} blocks of {tensor.name!r} changed, which is {tensor.kind} and has "
                f"{tensor.grid.count}"
            )
        if count and int(size[first:stop].max()) > tensor.grid.largest_bytes:
            raise FormatError(f"a change of {tensor.name!r} that is larger than its block")


def _parse_auxiliary(rows: Any, payload_bytes: int, *, is_file: bool) -> dict[str, AuxiliaryBytes]:
    entries: dict[str, AuxiliaryBytes] = {}
    for name, digest, size, start, *others in rows:
        if read_json(name, str, "a file") in entries or (is_file and not is_plain_path(name)):
            raise FormatError(f"the file {name!r} appears twice, or leads outside its folder")
        size = read_int(size, f"the size of {name!r}", 0)
        stop = size + (0 if start is None else read_int(start, f"the start of {name!r}", 0))
        if start is not None and stop > payload_bytes:
            raise FormatError(f"{name!r} is outside of the payload")
        raw = bytes.fromhex(read_json(digest, str, f"the digest of {name!r}"))
        if len(raw) != DIGEST_BYTES:
            raise FormatError(f"the digest {digest!r} of {name!r}")
        transforms: tuple[str, ...] = ()
        rank = 0
        if others:
            transforms = tuple(read_strings(others[0], f"the transforms of {name!r}"))
            rank = read_int(others[1], f"the rank of {name!r}", 0)
            if rank >= MAX_RANKS:
                raise FormatError(f"rank {rank} of {name!r}")
        entries[name] = AuxiliaryBytes(name, raw, size, start, transforms, rank)
    return entries


def _parse_mapping(content: Any) -> dict[str, Any] | None:
    if content is None:
        return None
    return {name: decode_value(value) for name, value in content.items()}


def _parse_paths(content: Any) -> dict[str, tuple[str | int, ...]] | None:
    if content is None:
        return None
    paths = {}
    for name, path in content.items():
        if not all(type(step) in (str, int) for step in path):
            raise FormatError(f"the path {path!r} of {name!r}")
        paths[name] = tuple(path)
    return paths


class DeltaWriter:
    """A delta that is being written, payload first and index last, under a temporary name.

    Leaving it as a context manager without `finish` removes the partial file. The mode of the file
    is limited to `open_bits`, and to the mode of the file that it replaces.

    Raises:
        UsageError: a file that exists and is not to be replaced; a missing folder.
        RunError: a file that cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, overwrite: bool = False, open_bits: int = 0o777
    ) -> None:
        self.path = Path(check_path_text(path))
        self._open_bits = open_bits & common_mode_bits([self.path])
        if self.path.is_dir():
            raise UsageError(f"{self.path} is a folder; a delta is a file")
        if not self.path.parent.is_dir():
            parent = self.path.parent
            raise UsageError(f"{parent} is not a folder; create it first, or write elsewhere")
        # A link to a missing file would be replaced too.
        if not overwrite and os.path.lexists(self.path):
            raise UsageError(f"{self.path} exists; give --overwrite to replace it")
        self._temporary = self.path.with_name(f".{self.path.name}.reshard-partial")
        self.payload_bytes = 0
        self._is_finished = False
        with translate_os_errors("write the delta", self._temporary):
            self._file = os.fdopen(open_new(self._temporary), "wb")
            # The header is written last, so that an incomplete file is not taken for a delta.
            self._file.write(bytes(HEADER_BYTES))

    def __enter__(self) -> DeltaWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_finished:
            self._file.close()
            with contextlib.suppress(OSError):
                self._temporary.unlink()

    def append(self, payload: bytes | memoryview) -> int:
        """Add bytes to the payload, and return their position in it."""
        start = self.payload_bytes
        with translate_os_errors("write the delta", self._temporary):
            self._file.write(payload)
        self.payload_bytes += len(payload)
        return start

    def finish(
        self, content: Mapping[str, Any], digests: NDArray[np.uint8], records: NDArray[Any]
    ) -> None:
        """Write the index and the header, and rename the file to its final name."""
        text = json.dumps(content, separators=(",", ":")).encode()
        sizes = struct.pack("<3Q", len(text), len(digests), len(records))
        index = b"".join([sizes, text, digests.tobytes(), records.tobytes()])
        start = HEADER_BYTES + self.payload_bytes
        header = _HEADER.pack(MAGIC, VERSION, 0, start, len(index), block_digest(index))
        with translate_os_errors("write the delta", self._temporary):
            self._file.write(index)
            self._file.seek(0)
            self._file.write(header)
            self._file.flush()
            # The content must be durable before the file gets its final name.
            sync(self._file.fileno())
            self._file.close()
            # Before the rename: otherwise others could open the file under its name for a moment.
            restrict_mode(self._temporary, self._open_bits)
            self._temporary.replace(self.path)
            self._is_finished = True
            # The new name is durable as soon as its folder is.
            sync_folder(self.path.absolute().parent)
