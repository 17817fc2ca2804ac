"""Arrays of Zarr: dtype, grid of chunks and codec, and the chunks as shards of tensors.

`.zarray` of Zarr 2, or `zarr.json` of Zarr 3, describes an array. It is divided into a grid of
equal chunks; the chunks at its end extend beyond it, and are stored in full length::

    shape 10, chunks 4      0.  [0 1 2 3]   1.  [4 5 6 7]   2.  [8 9 . .]

In Zarr 3, Orbax puts each chunk into a *shard*: the chunk's bytes, followed by an index of their
locations.

1. A chunk without compression is read in place, as a range of a file.
2. A compressed chunk, or a chunk in a node of the database, is unpacked when it is first read: into
   the memory of a reader that requests all of it, or else into a file (`storage.derived_files`).
3. A chunk that is not stored, in a checkpoint that omits chunks of zeros, is a hole in that file.

Sources: the specifications of Zarr 2 and Zarr 3; Zarr 3's `sharding-indexed` codec.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard._records import Record
from reshard.binding import FileRange
from reshard.checkpoint.formats.orbax.ocdbt import KeyValues, StoredValue, crc32c
from reshard.checkpoint.storage.byte_streams import (
    PIECE_BYTES,
    ByteStream,
    DecodedStream,
    RangeStream,
    ReadRange,
    read_pieces,
)
from reshard.checkpoint.storage.derived_files import DerivedFiles, DerivedPart
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import (
    CheckpointError,
    CoverageError,
    DigestError,
    FormatError,
    UnreadableTensorError,
    UsageError,
)
from reshard.layout import Box
from reshard.text import parse_json

MAX_CHUNKS = 1_000_000
# The sum of two such numbers still fits into int64.
_LARGEST = 2**62
_NUMPY_TYPE = re.compile(r"([<>|=])([biufc])(\d{1,2})")
_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
_OWN_TYPE = re.compile(r"(bool|int|uint|float|complex)\d*")

# Dtypes of less than a byte, which TensorStore stores in the lower bits of a byte.
_NARROW = ("int4", "int2", "uint4", "float4_e2m1fn")

# Codecs whose streams are decoded, by the names of Zarr.
CODECS = {"zstd": "zstd", "gzip": "deflate", "zlib": "deflate"}


class ShardIndex(Record):
    """The index of a Zarr 3 shard: the grid of its chunks, and its location."""

    counts: tuple[int, ...]
    is_at_end: bool
    has_checksum: bool

    @property
    def size_bytes(self) -> int:
        """The size of the index: an offset and a length for each chunk."""
        return 16 * math.prod(self.counts) + 4 * self.has_checksum


class ArrayMetadata(Record):
    """The description of an array.

    Attributes:
        dtype: with which it is read.
        stored_type: the dtype's name in Zarr.
        shape: of the array.
        chunk: the shape of chunks, in shards if there are any.
        shard: the shape of the part that is stored under a key.
        codec: `""`, `"zstd"` or `"deflate"`.
        order: the order of a chunk's dimensions in its bytes, outermost first.
        has_checksum: whether a CRC-32C follows a chunk's bytes.
        separator: between the indices of a key.
        prefix: of a key: `c` in Zarr 3.
        index: of shards.
        fills_zeros: whether chunks that are not stored are zeros.
    """

    dtype: DType
    stored_type: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    shard: tuple[int, ...]
    codec: str
    order: tuple[int, ...]
    has_checksum: bool
    separator: str
    prefix: str
    index: ShardIndex | None
    fills_zeros: bool

    @property
    def chunk_bytes(self) -> int:
        """The size of a chunk's elements."""
        return math.prod(self.chunk) * self.dtype.itemsize_bytes

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of a chunk's dimensions, in elements."""
        strides = [0] * len(self.chunk)
        step = 1
        for dimension in reversed(self.order):
            strides[dimension] = step
            step *= self.chunk[dimension]
        return tuple(strides)

    def list_keys(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the keys of the array, each with the index at which its part begins."""
        counts = [-(-size // step) for size, step in zip(self.shape, self.shard, strict=True)]
        for at in itertools.product(*map(range, counts)):
            start = tuple(i * step for i, step in zip(at, self.shard, strict=True))
            parts = [self.prefix, *map(str, at)] if self.prefix else list(map(str, at))
            # The key of the only chunk of an array without dimensions, by Zarr 2.
            yield self.separator.join(parts) or "0", start

    def box(self, start: tuple[int, ...]) -> Box | None:
        """Return the box of the chunk that begins at `start`, or None if it is outside."""
        stop = tuple(
            min(a + step, n) for a, step, n in zip(start, self.chunk, self.shape, strict=True)
        )
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)


def read_array(content: bytes, label: str) -> ArrayMetadata:
    """Parse `.zarray` or `zarr.json`; `label` names it in errors.

    Raises:
        FormatError: content that does not describe an array.
        CheckpointError: an unknown codec or dtype.
    """
    try:
        described = parse_json(content.decode())
        version = described["zarr_format"]
        if version not in (2, 3):
            raise FormatError(f"{label} is of Zarr {version!r}; known are 2 and 3")
        result = (_read_zarr2 if version == 2 else _read_zarr3)(described, label)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, IndexError) as error:
        if isinstance(error, FormatError | CheckpointError):
            raise
        raise FormatError(
            f"{label} does not describe an array ({type(error).__name__}: {str(error)[:100]}); it "
            "is damaged"
        ) from None
    _check(result, label)
    return result


def _check(array: ArrayMetadata, label: str) -> None:
    dims = len(array.shape)
    for what in (array.chunk, array.shard):
        if len(what) != dims or any(step < 1 for step in what):
            raise FormatError(f"{label} has chunks {list(what)} of shape {list(array.shape)}")
    grid = math.prod(-(-n // step) for n, step in zip(array.shape, array.shard, strict=True))
    inner = math.prod(array.index.counts) if array.index else 1
    if grid * inner > MAX_CHUNKS:
        raise FormatError(
            f"{label} has {grid * inner} chunks, {MAX_CHUNKS} are the most that are read; save it "
            "with larger chunks"
        )
    # The widest elements have 16 bytes.
    if array.chunk_bytes > _LARGEST or math.prod(array.shape) > _LARGEST // 16:
        raise FormatError(f"{label} has the shape {list(array.shape)}, more than any file holds")


def _read_zarr2(described: Mapping[str, Any], label: str) -> ArrayMetadata:
    compressor = described.get("compressor")
    if described.get("filters"):
        raise UnreadableTensorError(
            f"an array whose {label} has filters ({str(described['filters'])[:100]}), which are "
            "not known here; save it without"
        )
    codec = ""
    if compressor is not None:
        if compressor["id"] not in CODECS:
            raise _refuse_codec([str(compressor["id"])], label)
        codec = CODECS[compressor["id"]]
    shape, chunk = _read_shape(described["shape"]), _read_shape(described["chunks"])
    order = str(described.get("order", "C"))
    if order not in ("C", "F"):
        raise FormatError(f"{label} has the order {order!r}, expected C or F")
    dimensions = tuple(range(len(shape)))
    name = str(described["dtype"])
    return ArrayMetadata(
        _find_type(name, label),
        name,
        shape,
        chunk,
        chunk,
        codec,
        dimensions if order == "C" else dimensions[::-1],
        False,
        _read_separator(described.get("dimension_separator", "."), label),
        "",
        None,
        _is_zero(described.get("fill_value")),
    )


def _read_zarr3(described: Mapping[str, Any], label: str) -> ArrayMetadata:
    if described["node_type"] != "array" or described["chunk_grid"]["name"] != "regular":
        raise FormatError(f"{label} is not an array with a regular grid")
    encoding = described.get("chunk_key_encoding", {"name": "default"})
    default = encoding["name"] == "default"
    # The defaults of the specification for the encodings `default` and `v2`.
    separator = encoding.get("configuration", {}).get("separator", "/" if default else ".")
    shape = _read_shape(described["shape"])
    shard = _read_shape(described["chunk_grid"]["configuration"]["chunk_shape"])
    codecs, chunk, index = described["codecs"], shard, None
    if codecs[0]["name"] == "sharding_indexed":
        sharding = codecs[0]["configuration"]
        if len(codecs) > 1:
            raise _refuse_codec([entry["name"] for entry in codecs[1:]], label)
        chunk, codecs = _read_shape(sharding["chunk_shape"]), sharding["codecs"]
        counts = tuple(a // b for a, b in zip(shard, chunk, strict=True))
        if any(a % b for a, b in zip(shard, chunk, strict=True)):
            raise FormatError(f"{label} has chunks {list(chunk)} in shards {list(shard)}")
        names = [entry["name"] for entry in sharding["index_codecs"]]
        if names not in (["bytes"], ["bytes", "crc32c"]):
            raise _refuse_codec(names, label)
        place = sharding.get("index_location", "end")
        index = ShardIndex(counts, place == "end", "crc32c" in names)
    order = tuple(range(len(shape)))
    codec, has_checksum = "", False
    for number, entry in enumerate(codecs):
        name, settings = entry["name"], entry.get("configuration") or {}
        if name == "transpose" and number == 0:
            order = tuple(map(int, settings["order"]))
            if sorted(order) != list(range(len(shape))):
                raise FormatError(f"{label} has dimensions in the order {order}")
        elif name == "bytes":
            if settings.get("endian", "little") != "little":
                raise _refuse_codec(["bytes, big-endian"], label)
        elif name in CODECS and not codec and not has_checksum:
            codec = CODECS[name]
        elif name == "crc32c" and number == len(codecs) - 1:
            has_checksum = True
        else:
            raise _refuse_codec([name], label)
    name = str(described["data_type"])
    return ArrayMetadata(
        _find_type(name, label),
        name,
        shape,
        chunk,
        shard,
        codec,
        order,
        has_checksum,
        _read_separator(separator, label),
        "c" if default else "",
        index,
        _is_zero(described.get("fill_value")),
    )


def _read_shape(value: Any) -> tuple[int, ...]:
    result = tuple(value)
    # NumPy 1 supports 32 dimensions.
    if len(result) > 32 or any(type(n) is not int or not 0 <= n <= _LARGEST for n in result):
        raise ValueError(f"shape {str(value)[:100]}")
    return result


def _read_separator(value: Any, label: str) -> str:
    if value not in (".", "/"):
        raise FormatError(f"{label} has keys with {value!r} between indices, expected . or /")
    return str(value)


def _is_zero(value: Any) -> bool:
    return value is None or value is False or (type(value) in (int, float) and value == 0)


def _refuse_codec(names: list[str], label: str) -> UnreadableTensorError:
    return UnreadableTensorError(
        f"an array that by {label} is encoded by {', '.join(names)[:100]}; known are "
        f"{', '.join(CODECS)}, and no compression. Save it with one of these"
    )


def _find_type(name: str, label: str) -> DType:
    """Return the dtype of a name of Zarr.

    >>> _find_type("<f4", "w"), _find_type("bfloat16", "w"), _find_type("int4", "w")
    (DType('float32'), DType('bfloat16'), DType('uint8'))
    """
    match = _NUMPY_TYPE.fullmatch(name)
    # Elements of a single byte have no byte order.
    if match and match[1] == ">" and match[3] != "1":
        raise UnreadableTensorError(
            f"an array whose {label} has elements {name!r}, with the greatest byte first; save it "
            "on this machine"
        )
    spelling = name
    if match:
        width = "" if match[2] == "b" else str(8 * int(match[3]))
        spelling = f"{_KINDS[match[2]]}{width}"
    try:
        return as_dtype("uint8" if spelling in _NARROW else spelling)
    except UsageError:
        raise UnreadableTensorError(
            f"an array whose {label} has elements of the type {name[:50]!r}, which is not known "
            "here"
        ) from None


def is_narrow(stored_type: str) -> bool:
    """Return whether a dtype of Zarr has less than a byte, and is read as uint8."""
    return stored_type in _NARROW


def array_bytes(stored_type: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> bytes:
    """Return the content of `.zarray` for an array without compression."""
    content = {
        "chunks": list(chunk),
        "compressor": None,
        "dimension_separator": ".",
        "dtype": stored_type,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def name_type(dtype: DType) -> str:
    """Return the name of a dtype in TensorStore's Zarr 2.

    >>> name_type(as_dtype("float32")), name_type(as_dtype("bfloat16"))
    ('<f4', 'bfloat16')
    """
    match = _OWN_TYPE.fullmatch(dtype.name)
    if match is None:
        return dtype.name
    letter = next(letter for letter, kind in _KINDS.items() if kind == match[1])
    return f"{'|' if dtype.itemsize_bytes == 1 else '<'}{letter}{dtype.itemsize_bytes}"


# The offset and size of a chunk that a shard does not contain, by Zarr's `sharding_indexed` codec.
_NOTHING = 2**64 - 1
# The checksum that the codec `crc32c` appends.
_CHECKSUM_BYTES = 4


class PackedChunk(DerivedPart):
    """A chunk that must be unpacked.

    Attributes:
        stored: the stored bytes, or None for a chunk of zeros, which is not stored.
        codec: of the stored bytes.
        has_checksum: whether a CRC-32C follows them.
    """

    stored: StoredValue | None
    codec: str
    has_checksum: bool

    @classmethod
    def of(cls, label: str, array: ArrayMetadata, stored: StoredValue | None) -> PackedChunk:
        """Return a chunk of an array."""
        place = None if stored is None else stored.place
        start = 0 if place is None else place.start_bytes
        size = 0 if stored is None else stored.size_bytes
        return cls(label, start, size, array.chunk_bytes, stored, array.codec, array.has_checksum)

    def create(self, read: ReadRange) -> Iterator[bytes]:
        """Yield the elements, and check that these are all."""
        if self.stored is None:
            return
        start, packed_bytes = self.source_start_bytes, self.source_bytes
        if self.stored.place is None:
            # The bytes are in a node of the database, not in the file.
            content = self.stored.content or b""
            read, start = (lambda offset, size: content[offset : offset + size]), 0
        if self.has_checksum:
            packed_bytes = max(0, packed_bytes - _CHECKSUM_BYTES)
            self._check(read, start, packed_bytes)
        stream: ByteStream = RangeStream(read, start, packed_bytes)
        if self.codec:
            promise = "its array's metadata"
            stream = DecodedStream(self.codec, stream, self.size_bytes, self.label, promise)
        yield from read_pieces(stream, self.size_bytes, self.label)
        if stream.read(1):
            raise FormatError(
                f"{self.label} continues after its {self.size_bytes} bytes; it is damaged, or of "
                "another save"
            )

    def _check(self, read: ReadRange, start: int, size: int) -> None:
        """Verify the CRC-32C that follows the stored bytes."""
        checksum = 0
        # A chunk may be a shard of any size.
        for at in range(0, size, PIECE_BYTES):
            checksum = crc32c(read(start + at, min(PIECE_BYTES, size - at)), checksum)
        stored = int.from_bytes(read(start + size, _CHECKSUM_BYTES), "little")
        if checksum != stored:
            raise DigestError(
                f"{self.label} is not what was written: its CRC-32C is {checksum:08x}, and "
                f"{stored:08x} by the file; fetch it again"
            )


def read_scalar(value: StoredValue, array: ArrayMetadata, label: str, folder: Path) -> bytes:
    """Read the only chunk of an array without dimensions.

    Raises FormatError or DigestError for a chunk that is damaged.
    """
    chunk = value if array.index is None else _list_inner(value, array, label, folder)[0]
    if chunk is None:
        raise CoverageError(f"{label} has an empty shard")
    content = chunk.read(folder)
    packed = PackedChunk.of(label, array, StoredValue(len(content), content=content))
    return b"".join(packed.create(lambda offset, size: b""))


def list_chunks(
    name: str,
    array: ArrayMetadata,
    values: KeyValues,
    packed: DerivedFiles,
    anchor: str,
    *,
    has_all: bool,
) -> Iterator[tuple[Box, FileRange]]:
    """Yield the box of each chunk of an array, and the location of its bytes.

    Chunks that must be unpacked are added to `packed`, under `anchor` if they are in no file.

    Raises:
        CoverageError: a chunk that is missing, unless missing chunks are zeros.
        FormatError: a chunk of another size.
    """
    for key, start in array.list_keys():
        value = values.find(f"{name}/{key}")
        label = f"{values.folder / name / key}"
        chunks: Iterable[tuple[tuple[int, ...], StoredValue | None]] = [(start, value)]
        if array.index is not None:
            starts = (
                tuple(a + i * n for a, i, n in zip(start, at, array.chunk, strict=True))
                for at in itertools.product(*map(range, array.index.counts))
            )
            inner = None if value is None else _list_inner(value, array, label, values.folder)
            # `repeat` is endless, so the lengths differ.
            chunks = zip(starts, itertools.repeat(None) if inner is None else inner, strict=False)
        for at, chunk in chunks:
            box = array.box(at)
            if box is None:
                continue
            if chunk is None:
                # A missing chunk is all zeros if the checkpoint omits such chunks.
                if has_all or not array.fills_zeros:
                    raise CoverageError(
                        f"{label} is missing, which has {box} of tensor {name!r}; the checkpoint "
                        "was not written completely"
                    )
                yield box, packed.add(anchor, PackedChunk.of(label, array, None))
            elif chunk.place is not None and not array.codec and not array.has_checksum:
                if chunk.size_bytes != array.chunk_bytes:
                    raise FormatError(
                        f"{label} has {chunk.size_bytes} bytes, expected {array.chunk_bytes} for "
                        f"chunks {list(array.chunk)} of {array.dtype.name}"
                    )
                yield box, chunk.place
            else:
                place = anchor if chunk.place is None else chunk.place.path
                yield box, packed.add(place, PackedChunk.of(label, array, chunk))


def _list_inner(
    value: StoredValue, array: ArrayMetadata, label: str, folder: Path
) -> list[StoredValue | None]:
    """Return the bytes of each chunk in a shard, or None if it is not stored."""
    index = array.index
    if index is None or value.size_bytes < index.size_bytes:
        raise FormatError(f"{label} has {value.size_bytes} bytes, too few for an index of chunks")
    start = value.size_bytes - index.size_bytes if index.is_at_end else 0
    content = value.read(folder, start, index.size_bytes)
    if index.has_checksum:
        content, stored = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if crc32c(content) != int.from_bytes(stored, "little"):
            raise FormatError(
                f"{label} is not what was written: the CRC-32C of its index of chunks differs; "
                "fetch it again"
            )
    numbers = struct.unpack(f"<{2 * math.prod(index.counts)}Q", content)
    result: list[StoredValue | None] = []
    for begin, size in zip(numbers[::2], numbers[1::2], strict=True):
        if begin == _NOTHING and size == _NOTHING:
            result.append(None)
            continue
        if begin + size > value.size_bytes:
            raise FormatError(
                f"{label} has a chunk in bytes {begin}:{begin + size} of its "
                f"{value.size_bytes}; it was cut off, or is damaged"
            )
        if value.place is None:
            part = (value.content or b"")[begin : begin + size]
            result.append(StoredValue(size, content=part))
        else:
            place = FileRange(value.place.path, value.place.start_bytes + begin)
            result.append(StoredValue(size, place))
    return result
