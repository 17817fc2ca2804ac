"""Writing the headers of new safetensors files from columns.

A checkpoint of 100,000 tensors over 8 ranks has 8 headers of 20 MB each. A conversion computes
their sizes when it plans, and makes them when it writes them, a piece at a time::

    |length |{"__metadata__":{...,"DCP_SHARDING_INFO":"{\"w\": ... | \"x\": ..."},"w":{ | ...

1. `place_rows` divides tensors among files.
2. `NewHeader.pieces` yields its bytes. The parts of entries that depend only on the kind of a
   tensor are formatted once. The header is padded with spaces, so that the data starts at a
   multiple of the file system's blocks.
3. A `HeaderFile` is a file of a new checkpoint that begins with a header, which is checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from json.encoder import encode_basestring, encode_basestring_ascii

import numpy as np

from reshard._records import Record
from reshard.checkpoint.contents import StoredFile
from reshard.checkpoint.formats.safetensors.header import (
    LARGEST_HEADER_BYTES,
    LARGEST_OFFSET,
    LENGTH_BYTES,
    HeaderKind,
    check_metadata,
    check_shape,
    is_text,
    shown,
    tensor_size_bytes,
)
from reshard.checkpoint.formats.write_plan import NewFile
from reshard.errors import FormatError, UsageError
from reshard.runs import IntArray, find_distinct

# Tensors begin at a page, so that files can be written by direct I/O and mapped.
_ALIGNMENT_BYTES = 4096
_TENSORS_A_PIECE = 8192
_WRITTEN_BYTES = 1 << 18


class NewHeader(Record, eq=False):
    """The header of a new file of consecutive tensors.

    Attributes:
        names: of tensors; `rows`, shape `(tensors,)`, selects the tensors of the file.
        kinds: the distinct kinds; `kind` has the number of each tensor's, shape `(tensors,)`.
        metadata: text. The value of the key `offsets_key` is made from `offsets`, which are the
            offsets in their tensors of the shards of each kind.
    """

    names: Sequence[str]
    rows: IntArray
    kinds: tuple[HeaderKind, ...]
    kind: IntArray
    metadata: Mapping[str, str]
    offsets_key: str | None = None
    offsets: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def text_bytes(self) -> int:
        """The size of the JSON, without padding."""
        return sum(len(piece.encode()) for piece in self._text())

    @property
    def data_start_bytes(self) -> int:
        """The offset of the first tensor, after length, JSON and padding."""
        used_bytes = LENGTH_BYTES + self.text_bytes
        return used_bytes + -used_bytes % _ALIGNMENT_BYTES

    @cached_property
    def _kind_bytes(self) -> IntArray:
        sizes = [tensor_size_bytes(element, shape) for element, shape in self.kinds]
        return np.array(sizes or [0], dtype=np.int64)

    @property
    def starts(self) -> IntArray:
        """The offset of each tensor in the file, in bytes, shape `(tensors,)`."""
        each = self._kind_bytes[self.kind]
        starts: IntArray = np.cumsum(each) - each + self.data_start_bytes
        return starts

    @property
    def file_size_bytes(self) -> int:
        """The size of the file."""
        counts = np.bincount(self.kind, minlength=len(self._kind_bytes)).tolist()
        sizes = self._kind_bytes.tolist()
        elements = sum(size * count for size, count in zip(sizes, counts, strict=True))
        return self.data_start_bytes + int(elements)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the file up to its first tensor."""
        yield (self.data_start_bytes - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
        for piece in self._text():
            yield piece.encode()
        yield b" " * (self.data_start_bytes - LENGTH_BYTES - self.text_bytes)

    def _text(self) -> Iterator[str]:
        between = "{"
        if self.metadata:
            between = '{"__metadata__":{'
            for key, value in self.metadata.items():
                text = "" if key == self.offsets_key else encode_basestring(value)
                yield f"{between}{encode_basestring(key)}:{text}"
                if key == self.offsets_key:
                    yield from self._offsets_text()
                between = ","
            between = "},"
        texts = [
            f'":{{"dtype":"{element.safetensors_tag}","shape":[{",".join(map(str, shape))}],'
            for element, shape in self.kinds
        ]
        end = 0
        for names, kind in self._parts():
            stops = end + np.cumsum(self._kind_bytes[kind])
            starts = [end, *stops[:-1].tolist()]
            columns = zip(
                map(encode_basestring, names), kind.tolist(), starts, stops.tolist(), strict=True
            )
            yield between + ",".join(
                f'{name[:-1]}{texts[number]}"data_offsets":[{start},{stop}]}}'
                for name, number, start, stop in columns
            )
            between, end = ",", int(stops[-1])
        yield "}" if len(self.rows) else "}}" if self.metadata else "{}"

    def _parts(self) -> Iterator[tuple[list[str], IntArray]]:
        """Yield batches of names and kinds."""
        for low in range(0, len(self.rows), _TENSORS_A_PIECE):
            high = low + _TENSORS_A_PIECE
            yield [self.names[row] for row in self.rows[low:high].tolist()], self.kind[low:high]

    def _offsets_text(self) -> Iterator[str]:
        """Yield `{"w": {"saved_offsets": [0, 0]}, ...}` as a JSON string, with escaped quotes."""
        texts = [f': {{\\"saved_offsets\\": {json.dumps(offsets)}}}' for offsets in self.offsets]
        between = '"{'
        for names, kind in self._parts():
            # Quoted twice: this JSON, in ASCII as of `json.dumps`, is a text in the header's JSON.
            quoted = map(encode_basestring, map(encode_basestring_ascii, names))
            pairs = zip(quoted, kind.tolist(), strict=True)
            yield between + ", ".join([f"{name[1:-1]}{texts[number]}" for name, number in pairs])
            between = ", "
        yield '}"' if len(self.rows) else '"{}"'


class HeaderFile(NewFile):
    """A file that begins with a header, whose bytes are made on each access."""

    header: NewHeader | None = None

    @classmethod
    def of(cls, name: str, rank: int, header: NewHeader) -> HeaderFile:
        """Return the file of a header. Raises UsageError as `check_header`."""
        check_header(header, name)
        return cls(StoredFile(name, header.file_size_bytes, rank), header=header)

    def known_bytes(self) -> Iterator[tuple[int, bytes]]:
        """Yield the header, in pieces."""
        at, gathered = 0, bytearray()
        for piece in self.header.pieces() if self.header else ():
            gathered += piece
            # Gather pieces, since most are a few characters and each yield causes a write.
            if len(gathered) >= _WRITTEN_BYTES:
                yield at, bytes(gathered)
                at, gathered = at + len(gathered), bytearray()
        if gathered:
            yield at, bytes(gathered)


def aligned_rows(kinds: Sequence[HeaderKind], kind: IntArray) -> IntArray:
    """Return the rows of tensors in an order that aligns them in a file.

    Tensors whose size is a multiple of the file system's blocks come first; otherwise the order is
    kept. Each of these then starts at such a multiple, so that whole blocks can be written without
    reading adjacent bytes.

    >>> from reshard.dtypes import dtype
    >>> aligned_rows([(dtype("F32"), (3,)), (dtype("F32"), (2, 1024))], np.array([0, 1])).tolist()
    [1, 0]
    """
    is_rest = [tensor_size_bytes(*header_kind) % _ALIGNMENT_BYTES > 0 for header_kind in kinds]
    rows: IntArray = np.argsort(np.array(is_rest or [False])[kind], kind="stable")
    return rows


def place_rows(
    names: Sequence[str],
    rows: IntArray,
    kinds: Sequence[HeaderKind],
    kind: IntArray,
    metadata: Mapping[str, str],
    offsets_key: str | None = None,
    offsets: Sequence[tuple[int, ...]] = (),
) -> list[NewHeader]:
    """Return the headers of as many files as are needed to keep each header below the limit.

    Args:
        names: of tensors; those in `rows` are stored in the files.
        rows: in the order of the files; in each file, tensors of whole pages come first.
        kinds: the distinct kinds; `kind` has the number of each row's.
        metadata, offsets_key, offsets: as in a `NewHeader`.

    Raises:
        UsageError: a name that a file cannot contain.
    """
    # The length of text that UTF-8 cannot encode is undefined.
    _check_names("new file", [names[row] for row in rows.tolist()])
    files = 1
    while True:
        placed = []
        for part in np.array_split(np.arange(len(rows)), files):
            used, _, numbers = find_distinct(kind[part])
            of_file = tuple(kinds[number] for number in used.tolist())
            begins = tuple(offsets[number] for number in used.tolist()) if offsets else ()
            order = aligned_rows(of_file, numbers)
            own = rows[part[order]]
            header = NewHeader(names, own, of_file, numbers[order], metadata, offsets_key, begins)
            placed.append(header)
        longest = max(header.data_start_bytes for header in placed)
        # A page is left for metadata that depends on the number of files.
        if longest <= LARGEST_HEADER_BYTES - _ALIGNMENT_BYTES or files >= len(rows):
            return placed
        files = min(len(rows), max(files + 1, -(-files * longest // LARGEST_HEADER_BYTES)))


def check_header(header: NewHeader, label: str = "new file") -> None:
    """Check a header; `label` names its file in errors.

    Raises:
        UsageError: a type without a tag, a name given twice or reserved, an impossible shape,
            metadata that is not text, a header over 100 MB.
    """
    try:
        check_metadata(label, header.metadata)
        names = [header.names[row] for row in header.rows.tolist()]
        _check_names(label, names)
        for number, (element, shape) in enumerate(header.kinds):
            name = names[int(np.argmax(header.kind == number))]
            if element.safetensors_tag is None:
                raise UsageError(
                    f"{label}: tensor {shown(name)}: safetensors has no tag for {element}. "
                    f"Convert the tensor to another type, or store its bytes as uint8"
                )
            check_shape(name, element, shape)
    except FormatError as error:
        raise UsageError(str(error)) from error
    size_bytes = header.file_size_bytes - header.data_start_bytes
    if size_bytes > LARGEST_OFFSET:
        raise UsageError(f"{label}: {size_bytes} bytes of tensors, expected fewer than 2**63")
    length = header.data_start_bytes - LENGTH_BYTES
    if length > LARGEST_HEADER_BYTES:
        raise UsageError(
            f"{label}: the header has {length} bytes, expected at most {LARGEST_HEADER_BYTES} "
            "(100 MB)"
        )


def _check_names(label: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    # All at once first: nearly always they are valid.
    if all(isinstance(name, str) for name in names) and is_text("".join(names)):
        seen.update(names)
        if len(seen) == len(names) and "__metadata__" not in seen:
            return
        seen.clear()
    for name in names:
        if not is_text(name) or name == "__metadata__" or name in seen:
            raise UsageError(
                f"{label}: tensor {shown(name)}: no name for a tensor here. Expected text "
                f"that UTF-8 can say, not '__metadata__', and every name once"
            )
        seen.add(name)
