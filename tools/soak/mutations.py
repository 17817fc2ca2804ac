"""Small checkpoints of every format, damaged in one place.

1. A seed chooses a kind of checkpoint (`tests/checkpoint/campaigns/small_checkpoints.py`), a file
   of it, and what is done to that: a field of a header, an opcode of a pickle or some bytes are
   replaced, or it ends early, is longer, or is gone.
2. What is read then is an error of reshard's own, or a checkpoint that can be converted.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import struct
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import zstandard

from checkpoint.campaigns.small_checkpoints import (
    CHANGED,
    SOURCES,
    WHOLES,
    Source,
    make_file,
)
from checkpoint.checkpoint_files import write_file
from reshard.checkpoint import diff
from reshard.checkpoint.formats.orbax.ocdbt import MANIFEST_MAGIC, NODE_MAGIC, crc32c
from soak.damaged_inputs import (
    archive_with,
    limit_memory,
    read_damaged_archive,
    read_damaged_checkpoint,
    read_damaged_delta,
)
from soak.mutated_fields import mutated_bytes, mutated_json, mutated_pickle
from soak.wrong import Wrong

from checkpoint.formats.torch_dcp.test_reader import as_torch  # isort: skip

ARCHIVE, DELTAS = "an archive alone", ("a delta", "a compressed delta")
_SOURCES = {source.name: source for source in SOURCES}
_JSON = (".json", ".zarray", ".zgroup", ".zattrs")
_NAMES_OF_JSON = ("_METADATA", "_sharding", "_CHECKPOINT_METADATA")
# How many bytes of a file are replaced at most by one change.
_WINDOW = 9

Change = Callable[[bytes, random.Random], bytes]


def small_checkpoints(folder: Path) -> Iterator[tuple[Source, Path]]:
    """A checkpoint of every kind, each in a folder of its own."""
    for source in SOURCES:
        own = folder / source.name
        own.mkdir()
        yield source, source.make(own)


def list_changes(path: Path, content: bytes) -> list[tuple[str, Change]]:
    """What can be done to a file by what is in it, each with the name that it counts under."""
    changes: list[tuple[str, Change]] = [("bytes", _change_bytes), ("length", _change_length)]
    if path.suffix in _JSON or path.name in _NAMES_OF_JSON:
        changes += 3 * [("fields", partial(_draw, mutated_json))]
    elif path.suffix == ".safetensors":
        changes += 3 * [("fields", partial(_draw, _mutated_headers))]
    elif content.startswith(b"PK\x03\x04") and _has_pickle(content):
        changes += 3 * [("fields", _change_archive)]
    elif content[:1] == b"\x80":
        changes += 3 * [("fields", partial(_draw, mutated_pickle))]
    elif _is_frame(content):
        changes += 3 * [("fields", _change_frame)]
    return changes


def _draw(
    mutated: Callable[[bytes, random.Random], Iterator[bytes]],
    content: bytes,
    choose: random.Random,
) -> bytes:
    """One of the mutations at some place."""
    return choose.choice([*mutated(content, choose)])


def _change_archive(content: bytes, choose: random.Random) -> bytes:
    return archive_with(content, _draw(mutated_pickle, pickle_in(content), choose))


def _change_bytes(content: bytes, choose: random.Random) -> bytes:
    if len(content) < 2:
        return content + b"\0"
    # Half of the changes where files begin and end: what describes the rest is there.
    ends = min(len(content) - 1, 4096)
    at = choose.choice(
        [choose.randrange(len(content)), choose.randrange(ends), -1 - choose.randrange(ends)]
    )
    at %= len(content)
    window = content[at : at + _WINDOW]
    changed = choose.choice([*mutated_bytes(window, 0, len(window))])
    return content[:at] + changed + content[at + _WINDOW :]


def _change_length(content: bytes, choose: random.Random) -> bytes:
    at = choose.randrange(len(content) + 1)
    ended = content[:at]
    return choose.choice(
        [ended, ended + bytes(len(content) - at), content + b"\0", content * 2, b""]
    )


def _mutated_headers(content: bytes, choose: random.Random) -> Iterator[bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    for other in mutated_json(header, choose):
        yield struct.pack("<Q", len(other)) + other + data
    yield choose.choice([*mutated_bytes(content, 0, 8)])
    for more in (b"", b"\0", data):
        yield content[: 8 + length] + more
    yield content + b"\0"


def _change_frame(content: bytes, choose: random.Random) -> bytes:
    """The body of a frame of OCDBT, with the checksum that it has then."""
    body = zstandard.ZstdDecompressor().decompress(content[14:-4], max_output_size=1 << 20)
    other = _change_bytes(body, choose)
    head = content[:4] + (len(other) + 18).to_bytes(8, "little") + b"\0\0" + other
    return head + crc32c(head).to_bytes(4, "little")


def _is_frame(content: bytes) -> bool:
    return int.from_bytes(content[:4], "big") in (MANIFEST_MAGIC, NODE_MAGIC)


def an_archive() -> tuple[bytes, bytes]:
    """A tensor as `torch.save` writes it, and the pickle in it."""
    made = io.BytesIO()
    torch.save(as_torch(WHOLES["w"]), made)
    content = made.getvalue()
    return content, pickle_in(content)


def _has_pickle(content: bytes) -> bool:
    try:
        return bool(pickle_in(content))
    except (zipfile.BadZipFile, ValueError):
        return False


def pickle_in(content: bytes) -> bytes:
    """The pickle in an archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        return archive.read(name)


def a_delta(base: Path, after: Path, compression: str | None) -> bytes:
    """What changed from a checkpoint to the same with other elements in two of its tensors."""
    after.mkdir(exist_ok=True)
    write_file(after / "model.safetensors", {**WHOLES, **CHANGED}, {"format": "pt"})
    path = after.with_name("delta")
    diff(base, after, path, compression=compression, overwrite=True)
    return path.read_bytes()


class Mutations:
    """The campaign."""

    goal = "mutations"
    is_in_memory = True

    def __init__(self, folder: Path) -> None:
        warnings.simplefilter("ignore")
        self._folder = folder
        self._target = folder / "target"
        self._made: dict[str, Path] = {}
        (folder / "one file").mkdir()
        self._base, self._after = make_file(folder / "one file"), folder / "after"
        self._deltas = {
            name: a_delta(self._base, self._after, compression)
            for name, compression in zip(DELTAS, (None, "zstd"), strict=True)
        }
        self._archive, _ = an_archive()
        limit_memory()

    def run(self, seed: int) -> Counter[str]:
        choose = random.Random(seed)
        name = choose.choice([*_SOURCES, ARCHIVE, *DELTAS])
        if name == ARCHIVE:
            change = choose.choice([_change_archive, _change_bytes])
            what, found = "bytes", read_damaged_archive(change(self._archive, choose), self._folder)
        elif name in DELTAS:
            content = _change_bytes(self._deltas[name], choose)
            what = "bytes"
            found = read_damaged_delta(content, self._base, self._after, self._target)
        else:
            what, found = self._change(_SOURCES[name], choose)
        return Counter({"mutations": 1, f"{name}: {found}": 1, f"all of {what}: {found}": 1})

    def _make(self, source: Source) -> Path:
        """The checkpoint of a kind, made when it is first asked for."""
        if source.name not in self._made:
            own = self._folder / "made" / source.name
            own.mkdir(parents=True)
            path = self._made[source.name] = source.make(own)
            # Whatever is loaded when it is first needed is loaded now.
            source.open(path)
            if read_damaged_checkpoint(path, self._target, source.opening) != "accepted":
                raise Wrong(f"{source.name} is not accepted as it is")
        return self._made[source.name]

    def _change(self, source: Source, choose: random.Random) -> tuple[str, str]:
        folder = self._make(source)
        path = choose.choice(sorted(one for one in folder.rglob("*") if one.is_file()))
        kept = path.read_bytes()
        what, change = choose.choice(list_changes(path, kept))
        if choose.random() < 0.01:
            what = "whole files"
            path.unlink()
        else:
            path.write_bytes(change(kept, choose))
        try:
            return what, read_damaged_checkpoint(folder, self._target, source.opening)
        finally:
            os.makedirs(path.parent, exist_ok=True)
            path.write_bytes(kept)
            shutil.rmtree(self._target, ignore_errors=True)
            staging = self._target.with_name(".target.reshard-staging")
            shutil.rmtree(staging, ignore_errors=True)
