"""The key-value store of an Orbax checkpoint: files, or OCDBT, a database of TensorStore.

Zarr stores an array as values of keys: `NAME/.zarray` describes it, `NAME/0.1` is a chunk. Orbax
stores these as files in the folder, or in a database (`KeyValues`). A value is a range of a file,
or, if it is small, bytes in a node of the database.

OCDBT is a B+tree of keys in append-only files. The manifest refers to the root; a leaf contains
small values, and the locations of larger values in data files::

    manifest.ocdbt   ->  root  ->  leaf:  w/.zarray  {"shape": ...}
                                          w/0.0      bytes 4096:8192 of d/5ddf57...

1. The manifest and every node consist of `magic, length, version, compression`, a body, and a
   CRC-32C of these.
2. A body consists of columns: all lengths, then all kinds, then all offsets. Numbers are varints.
3. Paths of files in a node are relative to the base path of the node's file: a database that was
   merged from the databases of several processes refers to their files.

TensorStore itself is not used: its key-value store lists 200,000 keys in 0.1 s, and this module
opens them in 0.9 s, but it does not return the locations of values. With these, chunks are read,
verified and resumed as ranges of files, in bounded memory; and its package has 68 MB. Nor does it
write a database of values that are in files already: it takes their bytes, and copies these into
files of its own. For 50,000 small values that takes 0.4 s of processor time, and 0.3 s here.

The CRC-32C of long content is computed in equally long lanes, a byte of every lane at a time, which
are joined by `crc32c(head + tail) = advance(crc32c(head), len(tail)) ^ crc32c(tail)`.

Sources: the documentation of TensorStore's `ocdbt` driver, "Storage format"; RFC 3720, appendix B.4
(the polynomial of CRC-32C); Kadatch and Jenkins, "Everything we know about CRC" (joining).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reshard.binding import FileRange
from reshard.checkpoint.formats.orbax import MANIFEST_NAME
from reshard.checkpoint.manifest import is_plain_name
from reshard.checkpoint.storage.byte_streams import DecodedStream, RangeStream, import_zstandard
from reshard.checkpoint.storage.filesystem import read_file, read_file_range
from reshard.errors import CheckpointError, FormatError
from reshard.runs import IntArray

# The polynomial 0x1EDC6F41 with its bits reversed.
_POLYNOMIAL = 0x82F63B78
_LANES = 1024


def _make_table() -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


_TABLE = _make_table()
_TABLE_LIST = _TABLE.tolist()


def crc32c(content: bytes, before: int = 0) -> int:
    """Return the CRC-32C of `content`, which follows bytes whose CRC-32C is `before`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    >>> hex(crc32c(b"56789", crc32c(b"1234")))
    '0xe3069283'
    """
    lane_bytes = len(content) // _LANES
    checksum, rest = before, content
    if lane_bytes:
        lanes = np.frombuffer(content, np.uint8, _LANES * lane_bytes).reshape(_LANES, lane_bytes)
        states = np.full(_LANES, 0xFFFFFFFF, dtype=np.uint32)
        for column in lanes.T:
            states = _TABLE[(states ^ column) & 0xFF] ^ (states >> np.uint32(8))
        for state in (states ^ np.uint32(0xFFFFFFFF)).tolist():
            checksum = _advance(checksum, lane_bytes) ^ state
        rest = content[_LANES * lane_bytes :]
    state = 0xFFFFFFFF
    for byte in rest:
        state = _TABLE_LIST[(state ^ byte) & 0xFF] ^ (state >> 8)
    return _advance(checksum, len(rest)) ^ state ^ 0xFFFFFFFF


def _advance(checksum: int, size: int) -> int:
    """Return the contribution of content to its checksum if `size` bytes follow it."""
    result = 0
    for bit, column in enumerate(_find_columns(size)):
        if checksum >> bit & 1:
            result ^= column
    return result


@lru_cache(maxsize=64)
def _find_columns(size: int) -> tuple[int, ...]:
    """Return the image of each bit of a checksum under `size` zero bytes."""
    columns = tuple(1 << bit for bit in range(32))
    # The columns of the matrix of a zero byte over bits, raised to the power by squaring.
    step = tuple(_TABLE_LIST[(1 << bit) & 0xFF] ^ ((1 << bit) >> 8) for bit in range(32))
    while size:
        if size & 1:
            columns = tuple(_multiply(step, column) for column in columns)
        step = tuple(_multiply(step, column) for column in step)
        size >>= 1
    return columns


def _multiply(matrix: tuple[int, ...], vector: int) -> int:
    result = 0
    for bit, column in enumerate(matrix):
        if vector >> bit & 1:
            result ^= column
    return result


MANIFEST_MAGIC = 0x0CDB3A2A
NODE_MAGIC = 0x0CDB20DE

# The limit of a decoded body: Orbax's nodes have at most 100 MB.
MAX_BODY_BYTES = 256 << 20
_HEADER = struct.Struct(">I")
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_FRAME_BYTES = _HEADER.size + _LENGTH.size + 2 + _CHECKSUM.size

# The database's configuration in `encode_manifest`. Values up to the first limit are in leaves.
MAX_INLINE_BYTES = 1024
_MAX_ENCODED_NODE_BYTES = 100_000_000
# The default of TensorStore.
_ARITY_LOG2 = 4


class NodePlace(NamedTuple):
    """The range of a data file that is a node, its height in the tree, and its keys' prefix.

    Paths in the node are relative to `base`.
    """

    base: str
    path: str
    start_bytes: int
    size_bytes: int
    height: int
    prefix: bytes


class StoredValue(NamedTuple):
    """The value of a key: `size_bytes` at `place`, or `content` if it is in a node."""

    size_bytes: int
    place: FileRange | None = None
    content: bytes | None = None

    def read(self, folder: Path, start_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        """Read `size_bytes` from `start_bytes` on, by default all bytes.

        Raises FormatError for bytes that are missing, or too many to be read at once.
        """
        size = self.size_bytes - start_bytes if size_bytes is None else size_bytes
        if self.place is None:
            return (self.content or b"")[start_bytes : start_bytes + size]
        start_bytes += self.place.start_bytes
        return read_file_range(folder / self.place.path, start_bytes, size, MAX_NODE_BYTES)


class _NodeColumns:
    """The body of a manifest or a node, read column by column."""

    def __init__(self, body: bytes, label: str) -> None:
        self._bytes = np.frombuffer(body, dtype=np.uint8)
        self._body = body
        self._at = 0
        self._label = label

    def fail(self, problem: str) -> FormatError:
        return FormatError(f"{self._label} {problem}; the file is damaged, fetch it again")

    def varints(self, count: int) -> IntArray:
        window = self._bytes[self._at : self._at + 10 * count]
        ends = np.flatnonzero(window < 128)[:count]
        if len(ends) < count:
            raise self.fail("ends within its tables")
        starts = np.concatenate([[0], ends[:-1] + 1]) if count else ends
        lengths = ends - starts + 1
        values = np.zeros(count, dtype=np.uint64)
        if count:
            if lengths.max() > 10:
                raise self.fail("has a number of more than 64 bits")
            for k in range(int(lengths.max())):
                more = lengths > k
                bits = (window[starts[more] + k] & 127).astype(np.uint64)
                values[more] |= bits << np.uint64(7 * k)
            self._at += int(ends[-1]) + 1
        # A missing value is encoded with all bits set; here it is negative.
        return values.view(np.int64)

    def varint(self) -> int:
        return int(self.varints(1)[0])

    def take(self, count: int) -> bytes:
        if count < 0:
            raise self.fail("has a value of a negative length")
        result = self._body[self._at : self._at + count]
        if len(result) != count:
            raise self.fail("ends within its tables")
        self._at += count
        return result

    def count(self) -> int:
        """Return a number of rows, each of which takes at least a byte."""
        result = self.varint()
        if not 0 <= result <= len(self._body) - self._at:
            raise self.fail(f"has {result} rows in {len(self._body)} bytes")
        return result

    def prefixed(self, prefixes: IntArray, suffixes: IntArray) -> list[bytes]:
        """Return texts, each of which shares a prefix with the text before."""
        result: list[bytes] = []
        last = b""
        for prefix, suffix in zip([0, *prefixes.tolist()], suffixes.tolist(), strict=False):
            if not 0 <= prefix <= len(last) or not 0 <= suffix <= 65535:
                raise self.fail("has a key with a longer prefix than the key before it has")
            last = last[:prefix] + self.take(suffix)
            result.append(last)
        return result

    def files(self, transitive: str) -> list[tuple[str, str]]:
        """Return the table of data files: base paths and whole paths."""
        count = self.count()
        prefixes, suffixes = self.varints(max(count - 1, 0)), self.varints(count)
        bases = self.varints(count).tolist()
        result = []
        for path, base in zip(self.prefixed(prefixes, suffixes), bases, strict=True):
            try:
                text = path.decode()
            except UnicodeDecodeError:
                raise self.fail(f"names a file {path!r}") from None
            result.append((transitive + path[:base].decode(errors="replace"), transitive + text))
        return result

    def places(
        self, files: Sequence[tuple[str, str]], numbers: IntArray, starts: IntArray, sizes: IntArray
    ) -> list[tuple[tuple[str, str], int, int]]:
        """Return ranges of files of the table: a base path and a whole path, start and size."""
        if any((column < 0).any() for column in (numbers, starts, sizes)):
            raise self.fail("refers to a negative offset")
        rows = zip(numbers.tolist(), starts.tolist(), sizes.tolist(), strict=True)
        try:
            return [(files[number], start, size) for number, start, size in rows]
        except IndexError:
            raise self.fail(f"refers to a data file beyond the {len(files)} of its table") from None

    def end(self) -> None:
        if self._at != len(self._body):
            raise self.fail(f"has {len(self._body) - self._at} bytes after its tables")


def _open_frame(content: bytes, magic: int, label: str) -> _NodeColumns:
    """Return the body of a manifest or a node, after verifying its checksum."""
    if len(content) < _FRAME_BYTES:
        raise FormatError(f"{label} has {len(content)} bytes; it was cut off, fetch it again")
    (found_magic,) = _HEADER.unpack_from(content)
    (length,) = _LENGTH.unpack_from(content, _HEADER.size)
    version, compression = content[_HEADER.size + _LENGTH.size :][:2]
    (checksum,) = _CHECKSUM.unpack(content[-_CHECKSUM.size :])
    if found_magic != magic:
        raise FormatError(
            f"{label} begins with {found_magic:08x}, expected {magic:08x}; it is not of "
            "OCDBT, or damaged"
        )
    if length != len(content):
        raise FormatError(
            f"{label} has {len(content)} bytes, and {length} by its header; it was cut off, or "
            "belongs to another save"
        )
    if version != 0 or compression > 1:
        raise FormatError(
            f"{label} is of version {version}, compressed by method {compression}; known are "
            "version 0 and the methods 0 and 1. Save it again with an older TensorStore"
        )
    if crc32c(content[: -_CHECKSUM.size]) != checksum:
        raise FormatError(
            f"{label} is not what was written: its CRC-32C is not the recorded {checksum:08x}; "
            "it was damaged, fetch it again"
        )
    start = _HEADER.size + _LENGTH.size + 2
    body = content[start : -_CHECKSUM.size]
    if compression:
        packed = RangeStream(lambda at, size: body[at : at + size], 0, len(body))
        stream = DecodedStream("zstd", packed, MAX_BODY_BYTES, label, "OCDBT")
        body = stream.read(MAX_BODY_BYTES + 1)
    return _NodeColumns(body, label)


def decode_manifest(content: bytes, label: str) -> NodePlace | None:
    """Return the root of the latest version of a manifest, or None if the database is empty.

    Raises:
        FormatError: a manifest that is damaged, or in parts (`numbered`).
    """
    columns = _open_frame(content, MANIFEST_MAGIC, label)
    # The UUID of the database.
    columns.take(16)
    kind = columns.varint()
    if kind:
        raise FormatError(
            f"{label} is of kind {kind}, which has its versions in other files; save it with "
            "manifest_kind 'single', as Orbax does"
        )
    # The limits of values in nodes and of nodes; then the arity of the tree of versions, and the
    # compression, which Zstandard follows by its level.
    columns.varints(2)
    columns.take(1)
    if columns.varint():
        columns.take(4)
    files = columns.files("")
    count = columns.count()
    columns.varints(count)
    heights = columns.take(count)
    numbers, starts, sizes = (columns.varints(count) for _ in range(3))
    keys = columns.varints(count)
    if not count or not keys[-1]:
        return None
    # Only the latest version is used; earlier versions may be missing.
    (((base, path), start, size),) = columns.places(files, numbers[-1:], starts[-1:], sizes[-1:])
    return NodePlace(base, path, start, size, heights[-1], b"")


def decode_node(
    content: bytes, node: NodePlace, label: str
) -> tuple[dict[bytes, StoredValue], list[NodePlace]]:
    """Return the values of a leaf by key, or the children of an interior node.

    Raises:
        FormatError: a node that is damaged, or of another height than its parent records.
    """
    columns = _open_frame(content, NODE_MAGIC, label)
    height = columns.take(1)[0]
    if height != node.height:
        raise columns.fail(f"is of height {height}, where {node.height} leads to it")
    files = columns.files(node.base)
    count = columns.count()
    prefixes, suffixes = columns.varints(max(count - 1, 0)), columns.varints(count)
    if not height:
        keys = columns.prefixed(prefixes, suffixes)
        lengths, kinds = columns.varints(count), columns.varints(count)
        apart = int((kinds == 1).sum())
        if apart + int((kinds == 0).sum()) != count:
            raise columns.fail("has values of an unknown kind")
        numbers, starts = columns.varints(apart), columns.varints(apart)
        places = iter(columns.places(files, numbers, starts, lengths[kinds == 1]))
        values: dict[bytes, StoredValue] = {}
        for key, length, kind in zip(keys, lengths.tolist(), kinds.tolist(), strict=True):
            if kind:
                (_, path), start, size = next(places)
                values[node.prefix + key] = StoredValue(size, FileRange(path, start))
            else:
                values[node.prefix + key] = StoredValue(length, content=columns.take(length))
        columns.end()
        return values, []
    common = columns.varints(count).tolist()
    keys = columns.prefixed(prefixes, suffixes)
    children = columns.places(files, *(columns.varints(count) for _ in range(3)))
    return {}, [
        NodePlace(base, path, start, size, height - 1, node.prefix + key[:shared])
        for key, shared, ((base, path), start, size) in zip(keys, common, children, strict=True)
    ]


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _varints(values: Iterable[int]) -> bytes:
    return b"".join(map(_varint, values))


def _frame(magic: int, body: bytes) -> bytes:
    zstandard = import_zstandard("an OCDBT database")
    packed: bytes = zstandard.ZstdCompressor(level=1).compress(body)
    length = _FRAME_BYTES + len(packed)
    # Version 0, and compression 1, by Zstandard.
    head = _HEADER.pack(magic) + _LENGTH.pack(length) + b"\0\1" + packed
    return head + _CHECKSUM.pack(crc32c(head))


def _encode_files(paths: Sequence[str]) -> bytes:
    """Return a table of data files without base paths."""
    encoded = [path.encode() for path in paths]
    lengths = list(map(len, encoded))
    # Prefixes are not shared: there are few files.
    tables = (_varints([0] * max(len(paths) - 1, 0)), _varints(lengths), _varints([0] * len(paths)))
    return _varint(len(paths)) + b"".join(tables) + b"".join(encoded)


def _split_keys(keys: Sequence[bytes]) -> tuple[bytes, bytes, bytes]:
    """Return the columns of keys: shared prefixes, lengths of suffixes, and suffixes."""
    shared, suffixes, last = [], [], b""
    for key in keys:
        same = 0
        for a, b in zip(last, key, strict=False):
            if a != b:
                break
            same += 1
        shared.append(same)
        suffixes.append(key[same:])
        last = key
    return _varints(shared[1:]), _varints(map(len, suffixes)), b"".join(suffixes)


class NewNode(NamedTuple):
    """A new node: its bytes, and the statistics that its parent records."""

    content: bytes
    first_key: bytes
    keys: int
    tree_bytes: int
    apart_bytes: int


def _encode_leaf(values: Sequence[tuple[bytes, StoredValue]]) -> NewNode:
    """Encode a leaf of values in the order of their keys."""
    places = [value.place for _, value in values if value.place is not None]
    paths = sorted({place.path for place in places})
    numbers = {path: number for number, path in enumerate(paths)}
    prefixes, suffixes, text = _split_keys([key for key, _ in values])
    body = b"".join(
        (
            b"\0",
            _encode_files(paths),
            _varint(len(values)),
            prefixes,
            suffixes,
            text,
            _varints(value.size_bytes for _, value in values),
            bytes(value.place is not None for _, value in values),
            _varints(numbers[place.path] for place in places),
            _varints(place.start_bytes for place in places),
            *(value.content or b"" for _, value in values if value.place is None),
        )
    )
    content = _frame(NODE_MAGIC, body)
    apart = sum(value.size_bytes for _, value in values if value.place is not None)
    return NewNode(content, values[0][0], len(values), len(content), apart)


def _encode_parent(leaves: Sequence[NewNode], path: str, starts: Sequence[int]) -> NewNode:
    """Encode the parent of leaves that begin at `starts` of the file at `path`."""
    prefixes, suffixes, text = _split_keys([leaf.first_key for leaf in leaves])
    # The leaves are in the first file of the table, and leave out no prefix of their keys.
    zeros = _varints([0] * len(leaves))
    body = b"".join(
        (
            b"\1",
            _encode_files([path]),
            _varint(len(leaves)),
            prefixes,
            suffixes,
            zeros,
            text,
            zeros,
            _varints(starts),
            _varints(len(leaf.content) for leaf in leaves),
            _varints(leaf.keys for leaf in leaves),
            _varints(leaf.tree_bytes for leaf in leaves),
            _varints(leaf.apart_bytes for leaf in leaves),
        )
    )
    content = _frame(NODE_MAGIC, body)
    return NewNode(
        content,
        leaves[0].first_key,
        sum(leaf.keys for leaf in leaves),
        len(content) + sum(leaf.tree_bytes for leaf in leaves),
        sum(leaf.apart_bytes for leaf in leaves),
    )


def _encode_manifest(root: NewNode, path: str, start: int, height: int, identity: bytes) -> bytes:
    """Encode a manifest with a single version, whose root begins at `start` of a file."""
    body = b"".join(
        (
            identity,
            _varint(0),
            _varint(MAX_INLINE_BYTES),
            _varint(_MAX_ENCODED_NODE_BYTES),
            bytes([_ARITY_LOG2]),
            # Zstandard at its default level.
            _varint(1) + bytes(4),
            _encode_files([path]),
            _varint(1),
            # Generation 1, whose root is in the first file.
            _varint(1) + bytes([height]) + _varint(0),
            _varint(start),
            _varint(len(root.content)),
            _varint(root.keys),
            _varint(root.tree_bytes),
            _varint(root.apart_bytes),
            # The time is zero, so that equal contents result in equal files.
            bytes(8),
            _varint(0),
        )
    )
    return _frame(MANIFEST_MAGIC, body)


def encode_database(
    values: Sequence[tuple[bytes, StoredValue]],
    path: str,
    identity: bytes,
    max_keys: int = 1 << 17,
) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a database: the file of all nodes at `path`, and the manifest.

    Args:
        values: by key, in order.
        path: of the file of nodes.
        identity: 16 bytes, unique to the database.
        max_keys: of a leaf.
    """
    nodes = [_encode_leaf(values[at : at + max_keys]) for at in range(0, len(values), max_keys)]
    starts = [*itertools.accumulate((len(node.content) for node in nodes), initial=0)]
    if len(nodes) > 1:
        nodes.append(_encode_parent(nodes, path, starts[:-1]))
    height, start = int(len(nodes) > 1), starts[len(nodes) - 1]
    yield path, b"".join(node.content for node in nodes)
    yield MANIFEST_NAME, _encode_manifest(nodes[-1], path, start, height, identity)


# Limits of the keys of a database, and of the bytes that are read into memory at once.
MAX_KEYS = 20_000_000
MAX_NODE_BYTES = 256 << 20
MAX_READ_BYTES = 64 << 20


class KeyValues:
    """The values of a checkpoint by key, in files or in a database."""

    def __init__(self, folder: Path, values: Mapping[str, StoredValue] | None) -> None:
        self.folder = folder
        self._values = values
        self._sizes: dict[str, int] = {}

    @property
    def is_database(self) -> bool:
        """Whether they are in an OCDBT database."""
        return self._values is not None

    def find(self, key: str) -> StoredValue | None:
        """Return the location of a value, or None if the key is missing.

        Raises:
            FormatError: a key that leads out of the folder; a range that is not in its file.
        """
        if self._values is not None:
            result = self._values.get(key)
            if result is not None and result.place is not None:
                self._check_inside(key, result.place, result.size_bytes)
            return result
        if not is_inside(key):
            raise FormatError(f"the key {key!r} in {self.folder} would lie outside of the folder")
        size = self._find_size(key)
        return None if size < 0 else StoredValue(size, FileRange(key, 0))

    def _check_inside(self, key: str, place: FileRange, size_bytes: int) -> None:
        size = self._find_size(place.path)
        if size < 0:
            raise CheckpointError(
                f"{self.folder / place.path} is missing, which should have {key!r}; the checkpoint "
                "is not complete"
            )
        if place.start_bytes + size_bytes > size:
            raise FormatError(
                f"{self.folder / place.path} has {size} bytes, but {key!r} should be in bytes "
                f"{place.start_bytes}:{place.start_bytes + size_bytes}; the file was cut off, or "
                "belongs to another save"
            )

    def _find_size(self, name: str) -> int:
        """Return the size of a file, or -1 if it is missing."""
        if name not in self._sizes:
            try:
                path = self.folder / name
                self._sizes[name] = path.stat().st_size if path.is_file() else -1
            except (OSError, ValueError):
                self._sizes[name] = -1
        return self._sizes[name]

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of the files in which values were found, by name."""
        return {name: size for name, size in self._sizes.items() if size >= 0}


def is_inside(path: str) -> bool:
    """Return whether a path from a file stays inside its folder.

    >>> is_inside("ocdbt.process_0/d/5ddf"), is_inside("d/../../x"), is_inside("/etc/x")
    (True, False, False)
    """
    return all(map(is_plain_name, path.split("/")))


def open_key_values(folder: Path) -> KeyValues:
    """Open the database in a folder, or the folder's files if there is none.

    Raises:
        CheckpointError: a file that is missing.
        FormatError: a database that is damaged.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        return KeyValues(folder, None)
    root = decode_manifest(read_file(path, MAX_NODE_BYTES), str(path))
    values: dict[str, StoredValue] = {}
    waiting = [root] if root else []
    seen: set[tuple[str, int]] = set()
    while waiting:
        node = waiting.pop()
        start, size = node.start_bytes, node.size_bytes
        name = f"{node.path} bytes {start}:{start + size}"
        # A node that is reached twice may be part of a cycle.
        if (node.path, start) in seen:
            raise FormatError(f"{path} leads to {name} twice; it is damaged")
        seen.add((node.path, start))
        _expect_inside({node.path}, path)
        content = read_file_range(folder / node.path, start, size, MAX_NODE_BYTES)
        stored, children = decode_node(content, node, f"{folder / name}")
        # The last is taken first, so that keys come in order.
        waiting += reversed(children)
        _expect_inside({value.place.path for value in stored.values() if value.place}, path)
        for key, value in stored.items():
            try:
                values[key.decode()] = value
            except UnicodeDecodeError:
                raise FormatError(
                    f"{path} has the key {key!r}, which is not text; it is damaged"
                ) from None
        if len(values) > MAX_KEYS:
            raise FormatError(f"{path} has more than {MAX_KEYS} keys; it is damaged")
    return KeyValues(folder, values)


def _expect_inside(names: Iterable[str], path: Path) -> None:
    for name in names:
        if not is_inside(name):
            raise FormatError(f"{path} refers to {name!r}, outside of its folder; it is damaged")
