"""The manifest of a checkpoint written by reshard: shapes, shardings, files and digests.

The manifest is a JSON file next to the tensor files. Neither safetensors nor PyTorch's convention
for sharded safetensors stores the shape of a sharded tensor, or the set of files that belong
together. The manifest stores both, and the mesh, the shardings, the size of every file, and a
digest of every block::

    {"format_version": 1, "format": "sharded-safetensors", "conversion_id": "...",
     "mesh": {"name": "mesh", "shape": [2], "axis_names": ["tp"], "devices": [0, 1]},
     "files": {"shard-00001-...": {"size_bytes": 4096, "rank": 0}, ...},
     "tensors": {"lm_head.weight": {"dtype": "bfloat16", "shape": [8, 4], "spec": "tp, -",
                                    "digest": "...", "block_digests": "..."}},
     "carried": ["config.json"]}

A tensor whose layout is not a sharding has `"boxes": [[rank, start, stop], ...]` instead of
`"spec"`. The manifest does not list the ranks that store a copy of their shard: the tensor files
show this.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from reshard._records import Record
from reshard.checkpoint.blocks.grid import DIGEST_BYTES
from reshard.checkpoint.blocks.tensor_columns import DigestColumns, TensorColumns, TensorKind
from reshard.checkpoint.contents import StoredFile, StoredTensor, TensorDigest
from reshard.checkpoint.storage.filesystem import read_whole
from reshard.errors import CheckpointError, FormatError, ReshardError
from reshard.layout import Box, Layout
from reshard.mesh import DeviceMesh
from reshard.plans.documents import read_dtype, read_int, read_ints, read_json
from reshard.sharding import spec
from reshard.text import first_duplicate, parse_json

MANIFEST_NAME = "reshard.manifest.json"
FORMAT_VERSION = 1
_DIGEST_CHARACTERS = 2 * DIGEST_BYTES
_NO_DIGIT = re.compile("[^0-9a-f]")
# The position of the tensors in the text. No JSON string contains a line end, so it is unique.
_TENSORS_PLACE = '\n "tensors": null'
_AFTER_TENSORS = '\n },\n "carried"'
_TENSORS_A_PIECE = 10_000
_TENSOR = (
    rb'\n  "([^"\\\x00-\x1f]*)": (\{\n   "dtype": "[^"\\\n]*",\n   "shape": \[[0-9,\s]*\],'
    rb'\n   (?:"spec": "[^"\\\n]*"|"boxes": \[[0-9,\s\[\]]*\]))'
    rb'(?:,\n   "digest": "([0-9a-f]{32})",\n   "block_digests": "([0-9a-f]*)")?\n  \}(,?)'
)
# The errors that reading JSON of an unexpected form can raise.
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Manifest(Record):
    """The manifest of a checkpoint; `conversion_id` names the run that wrote it.

    `tensors` have types, layouts, shardings and digests, but not addresses. `items` has the digests
    of values that are not tensors, in formats that store such values.
    """

    format: str
    conversion_id: str
    mesh: DeviceMesh | None
    files: tuple[StoredFile, ...]
    tensors: TensorColumns
    carried: tuple[str, ...]
    items: Mapping[str, bytes] = field(default_factory=dict)

    def renamed(self, names: Mapping[str, str]) -> Manifest:
        """Return the manifest with other names of its tensors; names not in `names` stay."""
        tensors = self.tensors
        new_names = [names.get(name, name) for name in tensors.names]
        renamed = TensorColumns(new_names, tensors.kinds, tensors.kind, (), tensors.digests)
        return self.replace(tensors=renamed)

    def to_json(self) -> str:
        """Return the text of the manifest file."""
        return "".join(self.json_pieces())

    def json_pieces(self) -> Iterator[str]:
        """Yield the text of the manifest file in pieces, which take little memory."""
        mesh = self.mesh
        content: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "format": self.format,
            "conversion_id": self.conversion_id,
            "mesh": mesh
            and {
                "name": mesh.name,
                "shape": mesh.shape,
                "axis_names": mesh.axis_names,
                "devices": mesh.devices,
            },
            "files": {
                file.name: {"size_bytes": file.size_bytes, "rank": file.rank} for file in self.files
            },
            "tensors": None,
            "carried": self.carried,
        }
        if self.items:
            content["items"] = {name: digest.hex() for name, digest in self.items.items()}
        # The tensors are written in pieces: 100,000 of them would take 100 MB as JSON objects.
        before, after = json.dumps(content, indent=1).split(_TENSORS_PLACE)
        yield before + _TENSORS_PLACE.removesuffix("null") + "{"
        yield from _describe_tensors(self.tensors)
        yield ("\n }" if len(self.tensors) else "}") + after + "\n"


def _describe_tensors(tensors: TensorColumns) -> Iterator[str]:
    """Yield the text of the tensors; the text of a kind is made only once."""
    kinds = [_describe_kind(kind) for kind in tensors.kinds]
    digests = tensors.digests
    for low in range(0, len(tensors), _TENSORS_A_PIECE):
        high = min(low + _TENSORS_A_PIECE, len(tensors))
        names = map(json.dumps, tensors.names[low:high])
        bodies = [kinds[number] for number in tensors.kind[low:high].tolist()]
        ends = [""] * (high - low) if digests is None else _describe_digests(digests, low, high)
        entries = zip(names, bodies, ends, strict=True)
        text = ",".join([f"\n  {name}: {body}{end}\n  }}" for name, body, end in entries])
        yield f",{text}" if low else text


def _describe_kind(kind: TensorKind) -> str:
    layout = kind.layout
    content: dict[str, Any] = {"dtype": kind.dtype.name, "shape": layout.shape}
    if kind.spec is not None:
        content["spec"] = kind.spec
    else:
        content["boxes"] = [(slot, box.start, box.stop) for slot, box in _list_boxes(layout)]
    # Indented by two levels, and without the closing brace, since the digests are appended.
    return json.dumps(content, indent=1).replace("\n", "\n  ").removesuffix("\n  }")


def _describe_digests(digests: DigestColumns, low: int, high: int) -> list[str]:
    """Return the text of the digests of each tensor in rows `low` to `high`."""
    first = digests.first[low : high + 1].tolist()
    # Written at once, and then divided, since there may be very many tensors.
    whole = digests.tensors[low * DIGEST_BYTES : high * DIGEST_BYTES].hex()
    blocks = digests.blocks[first[0] * DIGEST_BYTES : first[-1] * DIGEST_BYTES].hex()
    wholes = [
        whole[at : at + _DIGEST_CHARACTERS] for at in range(0, len(whole), _DIGEST_CHARACTERS)
    ]
    ends = [(number - first[0]) * _DIGEST_CHARACTERS for number in first]
    has_digest = digests.is_known(np.arange(low, high)).tolist()
    return [
        f',\n   "digest": "{whole}",\n   "block_digests": "{blocks[a:b]}"' if is_known else ""
        for is_known, whole, (a, b) in zip(
            has_digest, wholes, itertools.pairwise(ends), strict=True
        )
    ]


def _list_boxes(layout: Layout) -> list[tuple[int, Box]]:
    """Return the boxes of every slot, or an empty box if its shard does not have elements."""
    return [
        (slot, box)
        for slot in layout.holders
        for box in layout.boxes(slot) or [_make_empty_box(layout, slot)]
    ]


def _make_empty_box(layout: Layout, slot: int) -> Box:
    shape = layout.local_shape(slot) or ()
    return Box((0,) * layout.ndim, shape if len(shape) == layout.ndim else (0,) * layout.ndim)


def can_describe(layout: Layout) -> bool:
    """Return whether a manifest can describe a layout without a sharding, by its boxes alone.

    >>> can_describe(Layout.whole((2, 3), [1], 2))
    True
    """
    if layout.is_padded:
        return False
    return Layout.from_boxes(layout.shape, _list_boxes(layout), layout.slots) is layout


def manifest_of(
    format_name: str,
    conversion_id: str,
    mesh: DeviceMesh | None,
    files: tuple[StoredFile, ...],
    tensors: Mapping[str, StoredTensor],
    digests: Mapping[str, TensorDigest] | DigestColumns,
    carried: tuple[str, ...],
    items: Mapping[str, bytes],
) -> Manifest:
    """Return the manifest of tensors about to be committed, with their digests."""
    columns = TensorColumns.of(tensors)
    if not isinstance(digests, DigestColumns):
        digests = DigestColumns.of_each(map(digests.get, columns.names))
    described = columns.with_digests(digests)
    return Manifest(format_name, conversion_id, mesh, files, described, carried, items)


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint folder, or None if it has none.

    Raises:
        FormatError: a manifest that is damaged, of a later version, or contradicts itself.
        CheckpointError: a manifest that cannot be read.
    """
    path = folder / MANIFEST_NAME
    try:
        text = read_whole(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    try:
        # A text in another form, or a damaged text, is parsed as JSON below, which raises errors.
        with contextlib.suppress(ValueError):
            begin, end = _find_tensors(text)
            content = parse_json((text[:begin] + b"{}" + text[end:]).decode())
            # Otherwise a part of another object was taken for the tensors.
            if content.get("tensors") == {}:
                return _parse(content, _read_entries(text, begin, end))
        content = parse_json(text.decode())
        return _parse(content, _list_entries(content))
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text: {error}") from error
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except (ReshardError, *_DAMAGE) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise FormatError(
            f"{path} is not a manifest of reshard: {reason}. It was damaged or edited; without "
            "the file, the checkpoint is read by what its tensor files say"
        ) from error


# A tensor of a manifest: its name, a key of its kind, the JSON object or text of the kind, and its
# digests.
_Entry = tuple[str, str, Mapping[str, Any] | str, tuple[Any, Any] | None]


def _find_tensors(text: bytes) -> tuple[int, int]:
    """Return the start and the stop of the tensors' object in a text that this package wrote.

    Raises ValueError for a text in another form, as `_read_entries` does.
    """
    begin = text.find(_TENSORS_PLACE.removesuffix("null").encode() + b"{\n")
    end = text.rfind(_AFTER_TENSORS.encode())
    if not 0 <= begin < end:
        raise ValueError("no tensors where they are expected")
    return begin + len(_TENSORS_PLACE.removesuffix("null")), end + len("\n }")


def _read_entries(text: bytes, begin: int, end: int) -> Iterator[_Entry]:
    """Yield the tensors one at a time, since each takes 1 KB as a JSON object."""
    at, more = begin + 1, b","
    tensor = re.compile(_TENSOR)
    kinds: dict[bytes, str] = {}
    while more:
        entry = tensor.match(text, at)
        if entry is None:
            raise ValueError("other entries")
        name, kind_text, digest, blocks, more = entry.groups()
        kind = kinds.get(kind_text) or kinds.setdefault(kind_text, kind_text.decode())
        digests = None if digest is None else (digest.decode(), blocks.decode())
        yield name.decode(), kind, kind, digests
        at = entry.end()
    if at != end - len("\n }"):
        raise ValueError("more than entries")


def _list_entries(content: Mapping[str, Any]) -> Iterator[_Entry]:
    for name, item in content["tensors"].items():
        # Equal texts are equal kinds.
        key = repr([item.get(part) for part in ("shape", "dtype", "spec", "boxes")])
        has_digest = "digest" in item
        yield name, key, item, (item["digest"], item["block_digests"]) if has_digest else None


def _parse(content: Mapping[str, Any], entries: Iterable[_Entry]) -> Manifest:
    version = content["format_version"]
    if version != FORMAT_VERSION:
        raise FormatError(
            f"format version {version!r}; this reshard reads {FORMAT_VERSION}, update it"
        )
    mesh = None
    if content["mesh"] is not None:
        fields = content["mesh"]
        mesh = DeviceMesh(
            read_json(fields["name"], str, "the name of the mesh"),
            read_ints(fields["shape"], "the shape of the mesh", 0),
            [read_json(name, str, "an axis name") for name in fields["axis_names"]],
            read_ints(fields["devices"], "the devices of the mesh", 0),
        )
    files = []
    for name, fields in content["files"].items():
        if not is_name_inside(name):
            raise FormatError(f"the file name {name!r} leads outside the checkpoint")
        size_bytes = read_int(fields["size_bytes"], f"the size of {name}", 0)
        files.append(
            StoredFile(name, size_bytes, read_int(fields["rank"], f"the rank of {name}", 0))
        )
    if not files:
        raise FormatError("no files are listed, at least one was expected")
    return Manifest(
        read_json(content["format"], str, "the format"),
        read_json(content["conversion_id"], str, "the conversion's identity"),
        mesh,
        tuple(files),
        _parse_tensors(mesh, files, entries),
        tuple(read_json(name, str, "a carried file") for name in content["carried"]),
        {
            name: _parse_digests(item, 1, "", name)
            for name, item in content.get("items", {}).items()
        },
    )


def _parse_tensors(
    mesh: DeviceMesh | None, files: list[StoredFile], entries: Iterable[_Entry]
) -> TensorColumns:
    kinds: list[TensorKind] = []
    block_counts: list[int] = []
    numbers: dict[str, int] = {}
    names, kind, has_digest, first = [], [], [], [0]
    blocks, whole = bytearray(), bytearray()
    for name, key, item, digests in entries:
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(kinds)
            described = parse_json(f"{item}}}") if isinstance(item, str) else item
            kinds.append(_parse_kind(mesh, files, name, described))
            # The number of digests must be the number of blocks, or later comparisons would fail.
            block_counts.append(kinds[-1].grid.count)
        names.append(name)
        kind.append(number)
        has_digest.append(digests is not None)
        if digests is None:
            whole += bytes(DIGEST_BYTES)
        else:
            blocks += _parse_digests(digests[1], block_counts[number], "the blocks of ", name)
            whole += _parse_digests(digests[0], 1, "", name)
        first.append(len(blocks) // DIGEST_BYTES)
    if len(set(names)) != len(names):
        raise FormatError(f"the key {first_duplicate(names)!r} appears twice")
    columns = DigestColumns(
        np.array(first, dtype=np.int64),
        bytes(blocks),
        bytes(whole),
        None if all(has_digest) else np.array(has_digest, dtype=bool),
    )
    return TensorColumns(names, kinds, kind, (), columns if any(has_digest) else None)


def _parse_kind(
    mesh: DeviceMesh | None, files: list[StoredFile], name: str, item: Mapping[str, Any]
) -> TensorKind:
    shape = read_ints(item["shape"], f"the shape of {name!r}", 0)
    dtype = read_dtype(item["dtype"], f"the dtype of {name!r}")
    size_bytes = math.prod(shape) * dtype.itemsize_bytes
    total_bytes = sum(file.size_bytes for file in files)
    if size_bytes > total_bytes:
        # Checked before the layout is built: the layout of a wrong shape may take much memory.
        raise FormatError(
            f"tensor {name!r} of {size_bytes} bytes in files of {total_bytes} bytes together"
        )
    text = item.get("spec")
    if text is not None:
        if mesh is None:
            raise FormatError(f"tensor {name!r} has a sharding {text!r} without a mesh")
        layout = spec(mesh, read_json(text, str, f"the sharding of {name!r}")).layout(shape)
    else:
        boxes = [
            (
                read_int(slot, f"a rank of {name!r}", 0),
                Box(
                    read_ints(start, f"a box of {name!r}", 0),
                    read_ints(stop, f"a box of {name!r}", 0),
                ),
            )
            for slot, start, stop in item["boxes"]
        ]
        # A rank that has a file but not a box of this tensor counts too.
        ranks = [file.rank for file in files] + [slot for slot, _ in boxes]
        layout = Layout.from_boxes(shape, boxes, max(ranks) + 1)
    if layout.contributions > 1:
        raise FormatError(
            f"tensor {name!r} is partial (`{text}`); a checkpoint holds values, no contributions"
        )
    return TensorKind(dtype, layout, (), (), text)


def _parse_digests(value: Any, count: int, what: str, name: str) -> bytes:
    joined = read_json(value, str, f"the digest of {what}{name!r}")
    if len(joined) != count * _DIGEST_CHARACTERS or _NO_DIGIT.search(joined):
        raise FormatError(
            f"the digest of {what}{name!r} is {joined[:40]!r}, expected {count} times "
            f"{_DIGEST_CHARACTERS} hexadecimal digits"
        )
    return bytes.fromhex(joined)


def is_name_inside(name: str) -> bool:
    """Return whether a file's path, relative to its folder, is inside that folder.

    >>> [is_name_inside(name) for name in ("a.pt", "step1/a.pt", "../a.pt", "/a.pt", "a//b.pt")]
    [True, True, False, False, False]
    """
    return all(is_plain_name(part) for part in name.split("/"))


def is_plain_name(name: str) -> bool:
    """Return whether a file name read from a file names a file directly in its folder.

    >>> [is_plain_name(name) for name in ("a.safetensors", "../a", "/a", "sub/a", "")]
    [True, False, False, False, False]
    """
    return name not in ("", ".", "..") and not {"/", "\\", "\0"} & {*name}
