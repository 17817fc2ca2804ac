"""Every header and pickle field of small checkpoints in every format, mutated one at a time.

All mutations are listed once, in a fixed order that mixes formats; a seed is a place in that list.
"""

from __future__ import annotations

import io
import itertools
import random
import shutil
import struct
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.tensor import Shard

import deepspeed_records
from checkpoint import torch_checkpoints
from checkpoint.checkpoint_files import Tensor, tensor, write_file
from reshard.checkpoint import convert, diff, open_checkpoint
from reshard.checkpoint.formats.orbax.crc32c import crc32c
from reshard.checkpoint.formats.orbax.ocdbt import MANIFEST_MAGIC, NODE_MAGIC
from soak.damaged_inputs import (
    archive_with,
    limit_memory,
    read_damaged_archive,
    read_damaged_checkpoint,
    read_damaged_delta,
)
from soak.mutated_fields import mutated_bytes, mutated_json, mutated_pickle

from checkpoint.formats.torch_dcp.test_reader import as_torch  # isort: skip

WHOLES = {
    "w": tensor("float32", (5, 4), 1),
    "b": tensor("bfloat16", (3,), 2),
    "s": tensor("int64", (), 3),
    "e": tensor("float16", (0, 2), 4),
}


COMPRESSED = "compressed"
EVERY = 25


def small_checkpoints(folder: Path) -> Iterator[Path]:
    """Checkpoints of the same tensors in every format, as others and as reshard write them."""
    (folder / "one file").mkdir()
    write_file(folder / "one file" / "model.safetensors", WHOLES, {"format": "pt"})
    yield folder / "one file"
    source = folder / "one file"
    rules = ["w=tp, -", "b=tp", "*=..."]
    convert(source, folder / "index", to="full", most_file_bytes=60)
    (folder / "index" / "reshard.manifest.json").unlink()
    yield folder / "index"
    convert(source, folder / "manifest", to="tp=2", rules=rules)
    yield folder / "manifest"
    shutil.copytree(folder / "manifest", folder / "shards")
    (folder / "shards" / "reshard.manifest.json").unlink()
    yield folder / "shards"
    convert(source, folder / "torch-dcp", to="tp=2", rules=rules, format="torch-dcp")
    yield folder / "torch-dcp"

    def state(rank: int) -> dict[str, object]:
        mesh = torch_checkpoints.mesh_of(2)
        cut = torch_checkpoints.cut(as_torch(WHOLES["w"]), mesh, [Shard(0)])
        return {"w": cut, "b": as_torch(WHOLES["b"]), "step": 3}

    torch_checkpoints.save(folder / "PyTorch", 2, state)
    yield folder / "PyTorch"
    torch_checkpoints.save(folder / COMPRESSED, 2, state, _extensions=[ZStandard()])
    yield folder / COMPRESSED
    for rank in range(2):
        with torch_checkpoints.standing_for(rank, 2):
            writer = dcp.FileSystemWriter(folder / "ranks apart")
            dcp.save(state(rank), storage_writer=writer, use_collectives=False)
    yield folder / "ranks apart"
    (folder / "rank files").mkdir()
    for rank in range(2):
        with torch_checkpoints.standing_for(rank, 2):
            torch.save(state(rank), folder / "rank files" / f"rank{rank}.pt")
    yield folder / "rank files"
    nested = {"model": {"w": as_torch(WHOLES["w"])}, "step": 3, "b": as_torch(WHOLES["b"])}
    for name, is_zip in (("torch.save", True), ("torch.save before 1.6", False)):
        (folder / name).mkdir()
        path = folder / name / "model.pt"
        torch.save(nested, path, _use_new_zipfile_serialization=is_zip)
        yield folder / name
    for name in ("zero1-bf16-2-plain", "zero3-bf16-2-plain"):
        yield next(deepspeed_records.unpack(name, folder).glob("global_step*"))

    orbax = {name: one for name, one in WHOLES.items() if name != "e"}
    (folder / "for orbax").mkdir()
    write_file(folder / "for orbax" / "model.safetensors", orbax)
    convert(folder / "for orbax", folder / "orbax", to="tp=2", rules=rules, format="orbax")
    (folder / "orbax" / "reshard.manifest.json").unlink()
    yield folder / "orbax"


def mutated_files(checkpoint: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file of a checkpoint with headers or fields in it, mutated in every way."""
    for path in sorted(one for one in checkpoint.rglob("*") if one.is_file()):
        content = path.read_bytes()
        if path.suffix == ".json" or path.name in ("_METADATA", "_sharding"):
            mutated = mutated_json(content)
        elif path.suffix == ".safetensors":
            mutated = _mutated_headers(content)
        elif path.name.endswith(".metadata"):
            mutated = mutated_pickle(content)
        elif path.name.endswith("states.pt"):
            # The pickles of DeepSpeed's files are long: some of the mutations, spread over them.
            pickles = itertools.islice(mutated_pickle(pickle_in(content)), 0, None, EVERY)
            mutated = (archive_with(content, pickle) for pickle in pickles)
        elif path.suffix == ".pt":
            mutated = mutated_bytes(content, 0, len(content))
        elif path.suffix == ".distcp" and checkpoint.name == COMPRESSED:
            mutated = _mutated_streams(content)
        elif path.name == "manifest.ocdbt" or path.parent.name == "d":
            mutated = _mutated_frames(content)
        else:
            continue
        for other in mutated:
            yield path, other


def _mutated_headers(content: bytes) -> Iterator[bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    for other in mutated_json(header):
        yield struct.pack("<Q", len(other)) + other + data
    yield from mutated_bytes(content, 0, 8)
    for more in (b"", b"\0", data):
        yield content[: 8 + length] + more
    yield content + b"\0"


def _mutated_frames(content: bytes) -> Iterator[bytes]:
    """A frame of OCDBT: its own bytes, and those of its body, with the checksum that they have."""
    magic = int.from_bytes(content[:4], "big")
    if magic not in (MANIFEST_MAGIC, NODE_MAGIC):
        return
    yield from mutated_bytes(content, 0, 14)
    body = zstandard.ZstdDecompressor().decompress(content[14:-4], max_output_size=1 << 20)
    for other in mutated_bytes(body, 0, len(body)):
        length = (len(other) + 18).to_bytes(8, "little")
        head = content[:4] + length + b"\0\0" + other
        yield head + crc32c(head).to_bytes(4, "little")


def _mutated_streams(content: bytes) -> Iterator[bytes]:
    """Compressed bytes, each of them changed; and the file as long as before, or shorter."""
    for at in range(len(content)):
        for other in (content[at] ^ 1, content[at] ^ 0x80, 0xFF):
            yield content[:at] + bytes([other]) + content[at + 1 :]
        yield content[:at]
        yield content[:at] + bytes(len(content) - at)


def an_archive() -> tuple[bytes, bytes]:
    """A tensor as `torch.save` writes it, and the pickle in it."""
    made = io.BytesIO()
    torch.save(as_torch(WHOLES["w"]), made)
    content = made.getvalue()
    return content, pickle_in(content)


def pickle_in(content: bytes) -> bytes:
    """The pickle in an archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        return archive.read(name)


def a_delta(base: Path, after: Path, compression: str | None) -> bytes:
    """What changed from a checkpoint to the same with other elements in two of its tensors."""
    others = {
        "w": Tensor(WHOLES["w"].dtype, WHOLES["w"].bits ^ np.eye(5, 4, dtype=np.uint32)),
        "s": tensor("int64", (), 9),
    }
    after.mkdir(exist_ok=True)
    write_file(after / "model.safetensors", {**WHOLES, **others}, {"format": "pt"})
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
        self._cases: list[tuple[str, Callable[[], str]]] = []
        target = self._folder / "target"
        for checkpoint in small_checkpoints(self._folder):
            # Whatever is loaded when it is first needed is loaded now.
            open_checkpoint(checkpoint)
            read_damaged_checkpoint(checkpoint, target)
            for path, content in mutated_files(checkpoint):
                name = f"{checkpoint.name}: {path.suffix or path.name}"
                self._cases.append((name, partial(self._read, checkpoint, path, content, target)))
        archive, pickle = an_archive()
        for other in mutated_pickle(pickle):
            damaged = archive_with(archive, other)
            self._cases.append(("data.pkl", partial(read_damaged_archive, damaged, self._folder)))
        for damaged in mutated_bytes(archive, 0, len(archive)):
            self._cases.append(("archive", partial(read_damaged_archive, damaged, self._folder)))
        base, after = self._folder / "one file", self._folder / "after"
        for compression in (None, "zstd"):
            for damaged in mutated_bytes(
                content := a_delta(base, after, compression), 0, len(content)
            ):
                self._cases.append(
                    ("delta", partial(read_damaged_delta, damaged, base, after, target))
                )
        random.Random(0).shuffle(self._cases)
        limit_memory()

    def run(self, seed: int) -> Counter[str]:
        name, read = self._cases[seed % len(self._cases)]
        return Counter({"mutations": 1, f"{name}, {read()}": 1})

    def _read(self, checkpoint: Path, path: Path, content: bytes, target: Path) -> str:
        kept = path.read_bytes()
        path.write_bytes(content)
        try:
            return read_damaged_checkpoint(checkpoint, target)
        finally:
            path.write_bytes(kept)
            shutil.rmtree(target, ignore_errors=True)
            shutil.rmtree(target.with_name(".target.reshard-staging"), ignore_errors=True)
