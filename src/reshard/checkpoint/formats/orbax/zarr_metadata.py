"""What Zarr says of an array: its type, its grid of chunks, and what a chunk's bytes are.

Zarr 2 has `.zarray`, Zarr 3 `zarr.json`. An array is cut into a grid of equal chunks; those at its
end reach beyond it, and are stored as long as the others::

    shape 10, chunks 4      0.  [0 1 2 3]   1.  [4 5 6 7]   2.  [8 9 . .]

In Zarr 3, Orbax puts each chunk into a *shard*: the chunk's bytes, and behind them an index of
where they are.

Sources: the specifications of Zarr 2 and Zarr 3; Zarr 3's `sharding-indexed` codec.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.checkpoint.storage.json_text import parse_json
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import CheckpointError, FormatError, UnreadableTensorError, UsageError
from reshard.layout import Box

ZARR2_NAME, ZARR3_NAME = ".zarray", "zarr.json"
MOST_CHUNKS = 1_000_000
_LARGEST = 2**62
_NUMPY_TYPE = re.compile(r"([<>|=])([biufc])(\d{1,2})")
_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
_OWN_TYPE = re.compile(r"(bool|int|uint|float|complex)\d*")
# Types of less than a byte, which TensorStore has in the lower bits of one: their bits are read.
_NARROW = ("int4", "int2", "uint4", "float4_e2m1fn")
# Codecs whose streams are decoded, by the names of Zarr.
CODECS = {"zstd": "zstd", "gzip": "deflate", "zlib": "deflate"}


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The index of a Zarr 3 shard: of which chunks, and where it stands."""

    counts: tuple[int, ...]
    is_at_end: bool
    has_checksum: bool

    @property
    def size_bytes(self) -> int:
        """Its bytes: a start and a length for each chunk."""
        return 16 * math.prod(self.counts) + 4 * self.has_checksum


@dataclass(frozen=True, slots=True)
class ArrayMetadata:
    """One array.

    Attributes:
        dtype: of its elements as they are read.
        stored_type: what Zarr calls it.
        shape: of the array.
        chunk: the shape of all chunks; of those in shards, where there are such.
        shard: the shape of what a key has.
        codec: `""`, `"zstd"` or `"deflate"`.
        order: the order of a chunk's dimensions in its bytes, outermost first.
        has_checksum: whether a CRC-32C follows a chunk's bytes.
        separator: between the indices of a key; in Zarr 3 they begin with `c`.
        index: of shards.
        fills_zeros: whether what is not stored is zero.
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
        """Bytes of a chunk, as elements."""
        return math.prod(self.chunk) * self.dtype.itemsize_bytes

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of a chunk's dimensions, in elements."""
        found = [0] * len(self.chunk)
        step = 1
        for dimension in reversed(self.order):
            found[dimension] = step
            step *= self.chunk[dimension]
        return tuple(found)

    def list_keys(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The keys of the array, and where in it each begins."""
        counts = [-(-size // step) for size, step in zip(self.shape, self.shard, strict=True)]
        for at in itertools.product(*map(range, counts)):
            start = tuple(i * step for i, step in zip(at, self.shard, strict=True))
            parts = [self.prefix, *map(str, at)] if self.prefix else list(map(str, at))
            yield self.separator.join(parts) or "0", start

    def box(self, start: tuple[int, ...]) -> Box | None:
        """What of the array is in the chunk that begins at `start`; None where nothing is."""
        stop = tuple(
            min(a + step, n) for a, step, n in zip(start, self.chunk, self.shape, strict=True)
        )
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)


def read_array(content: bytes, label: str) -> ArrayMetadata:
    """What `.zarray` or `zarr.json` says; `label` names it in errors.

    Raises:
        FormatError: what is no description of an array.
        CheckpointError: a codec or a type that is not known.
    """
    try:
        described = parse_json(content.decode())
        version = described["zarr_format"]
        if version not in (2, 3):
            raise FormatError(f"{label} is of Zarr {version!r}; known are 2 and 3")
        found = (_read_zarr2 if version == 2 else _read_zarr3)(described, label)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, IndexError) as error:
        if isinstance(error, FormatError | CheckpointError):
            raise
        raise FormatError(
            f"{label} does not describe an array ({type(error).__name__}: {str(error)[:100]}); it "
            "is damaged"
        ) from None
    _check(found, label)
    return found


def _check(found: ArrayMetadata, label: str) -> None:
    dims = len(found.shape)
    for what in (found.chunk, found.shard):
        if len(what) != dims or any(step < 1 for step in what):
            raise FormatError(f"{label} has chunks {list(what)} of shape {list(found.shape)}")
    grid = math.prod(-(-n // step) for n, step in zip(found.shape, found.shard, strict=True))
    inner = math.prod(found.index.counts) if found.index else 1
    if grid * inner > MOST_CHUNKS:
        raise FormatError(
            f"{label} has {grid * inner} chunks, {MOST_CHUNKS} are the most that are read; save it "
            "with larger chunks"
        )
    if found.chunk_bytes > _LARGEST or math.prod(found.shape) > _LARGEST // 16:
        raise FormatError(f"{label} has the shape {list(found.shape)}, more than any file holds")


def _read_zarr2(described: Mapping[str, Any], label: str) -> ArrayMetadata:
    compressor = described.get("compressor")
    if described.get("filters"):
        raise UnreadableTensorError(
            f"an array whose {label} has filters ({str(described['filters'])[:100]}), which are "
            "not known here; save it without"
        )
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
        "" if compressor is None else _find_codec(compressor["id"], label),
        dimensions if order == "C" else dimensions[::-1],
        False,
        _read_separator(described.get("dimension_separator", "."), label),
        "",
        None,
        _is_zero(described.get("fill_value")),
    )


def _read_zarr3(described: Mapping[str, Any], label: str) -> ArrayMetadata:
    if described["node_type"] != "array" or described["chunk_grid"]["name"] != "regular":
        raise FormatError(f"{label} is no array with a regular grid")
    encoding = described.get("chunk_key_encoding", {"name": "default"})
    default = encoding["name"] == "default"
    separator = encoding.get("configuration", {}).get("separator", "/" if default else ".")
    shape = _read_shape(described["shape"])
    shard = _read_shape(described["chunk_grid"]["configuration"]["chunk_shape"])
    codecs, chunk, index = described["codecs"], shard, None
    if codecs[0]["name"] == "sharding_indexed":
        sharding = codecs[0]["configuration"]
        if len(codecs) > 1:
            raise _refuse_codec([one["name"] for one in codecs[1:]], label)
        chunk, codecs = _read_shape(sharding["chunk_shape"]), sharding["codecs"]
        counts = tuple(a // b for a, b in zip(shard, chunk, strict=True))
        if any(a % b for a, b in zip(shard, chunk, strict=True)):
            raise FormatError(f"{label} has chunks {list(chunk)} in shards {list(shard)}")
        names = [one["name"] for one in sharding["index_codecs"]]
        if names not in (["bytes"], ["bytes", "crc32c"]):
            raise _refuse_codec(names, label)
        place = sharding.get("index_location", "end")
        index = ShardIndex(counts, place == "end", "crc32c" in names)
    order = tuple(range(len(shape)))
    codec, has_checksum = "", False
    for number, one in enumerate(codecs):
        name, given = one["name"], one.get("configuration") or {}
        if name == "transpose" and number == 0:
            order = tuple(map(int, given["order"]))
            if sorted(order) != list(range(len(shape))):
                raise FormatError(f"{label} has dimensions in the order {order}")
        elif name == "bytes":
            if given.get("endian", "little") != "little":
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
    found = tuple(value)
    if len(found) > 32 or any(type(n) is not int or not 0 <= n <= _LARGEST for n in found):
        raise ValueError(f"shape {str(value)[:100]}")
    return found


def _read_separator(value: Any, label: str) -> str:
    if value not in (".", "/"):
        raise FormatError(f"{label} has keys with {value!r} between indices, expected . or /")
    return str(value)


def _is_zero(value: Any) -> bool:
    return value is None or value is False or (type(value) in (int, float) and value == 0)


def _find_codec(name: Any, label: str) -> str:
    if name not in CODECS:
        raise _refuse_codec([str(name)], label)
    return CODECS[name]


def _refuse_codec(names: list[str], label: str) -> UnreadableTensorError:
    return UnreadableTensorError(
        f"an array that by {label} is encoded by {', '.join(names)[:100]}; known are "
        f"{', '.join(CODECS)}, and no compression. Save it with one of these"
    )


def _find_type(name: str, label: str) -> DType:
    """The type that a name of Zarr means.

    >>> _find_type("<f4", "w"), _find_type("bfloat16", "w"), _find_type("int4", "w")
    (DType('float32'), DType('bfloat16'), DType('uint8'))
    """
    match = _NUMPY_TYPE.fullmatch(name)
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
    """Whether a type of Zarr has less than a byte, and is read as one of a byte."""
    return stored_type in _NARROW


def array_bytes(stored_type: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> bytes:
    """The `.zarray` of an array without compression."""
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
    """What Zarr 2, as TensorStore has it, calls a type.

    >>> name_type(as_dtype("float32")), name_type(as_dtype("bfloat16"))
    ('<f4', 'bfloat16')
    """
    match = _OWN_TYPE.fullmatch(dtype.name)
    if match is None:
        return dtype.name
    letter = next(letter for letter, kind in _KINDS.items() if kind == match[1])
    return f"{'|' if dtype.itemsize_bytes == 1 else '<'}{letter}{dtype.itemsize_bytes}"
