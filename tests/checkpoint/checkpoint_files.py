"""Checkpoints written by hand, and read by the safetensors package: without reshard.

What a rank's shard should be comes from `oracle`, element by element.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import safetensors
from hypothesis import strategies as st
from numpy.typing import NDArray

from oracle import Contents, contents_of_spec
from reshard import system
from reshard.checkpoint.blocks import grid as blocks
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.safetensors.header import FileHeader, HeaderTensors, number_kinds
from reshard.checkpoint.formats.safetensors.header_writer import (
    NewHeader,
    aligned_rows,
    check_header,
)
from reshard.dtypes import ALL_DTYPES, DType
from reshard.dtypes import dtype as as_dtype
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from rule_definitions import NO_ELEMENT
from strategies import meshes, shapes, specs

MANIFEST = "reshard.manifest.json"
TAGGED = [dtype for dtype in ALL_DTYPES if dtype.safetensors_tag is not None]


class Tensor(NamedTuple):
    """A dense tensor: the bare bits of its elements, as an array of its shape."""

    dtype: DType
    bits: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    @property
    def size_bytes(self) -> int:
        return self.bits.nbytes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensor):
            return NotImplemented
        return (
            self.dtype is other.dtype
            and self.shape == other.shape
            and self.bits.tobytes() == other.bits.tobytes()
        )

    def __ne__(self, other: object) -> bool:
        # A tuple's own would compare the arrays.
        return not self == other

    def __hash__(self) -> int:
        return hash((self.dtype.name, self.bits.tobytes()))

    def __repr__(self) -> str:
        return f"<{self.dtype} {list(self.shape)}>"


def tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A tensor of random bits: every pattern, NaNs and negative zeros included."""
    element = as_dtype(dtype)
    random = np.random.default_rng(seed)
    if element.name == "bool":
        data = random.integers(0, 2, math.prod(shape), dtype=np.uint8).tobytes()
    else:
        data = random.bytes(math.prod(shape) * element.itemsize_bytes)
    return Tensor(element, np.frombuffer(data, dtype=element.storage).reshape(shape))


#: Name, dtype and shape of a tensor of a new file.
NamedTensor = tuple[str, DType, tuple[int, ...]]


def aligned_order(tensors: Iterable[NamedTensor]) -> tuple[NamedTensor, ...]:
    """Return tensors in the order of `aligned_rows`, in which `build_header` aligns them."""
    tensors = tuple(tensors)
    kinds, kind = number_kinds((element, shape) for _, element, shape in tensors)
    return tuple(tensors[row] for row in aligned_rows(kinds, kind).tolist())


def build_header(
    tensors: Iterable[NamedTensor],
    metadata: Mapping[str, str] | None = None,
    label: str = "new file",
) -> tuple[bytes, FileHeader]:
    """Return the first bytes of a safetensors file of `tensors` in this order, and its header."""
    tensors = tuple(tensors)
    kinds, kind = number_kinds((element, shape) for _, element, shape in tensors)
    names = tuple(name for name, _, _ in tensors)
    rows = np.arange(len(names))
    new = NewHeader(names, rows, kinds, kind, metadata or {})
    check_header(new, label)
    placed = HeaderTensors(names, kinds, kind, new.starts)
    return b"".join(new.pieces()), FileHeader(
        label, new.metadata, placed, new.data_start_bytes, new.file_size_bytes
    )


def write_holes(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], name: str = "model.safetensors"
) -> Path:
    """A checkpoint of one file of float32 tensors that are zero, and take no space."""
    folder.mkdir(exist_ok=True)
    tensors = [(one, as_dtype("float32"), shape) for one, shape in shapes.items()]
    content, header = build_header(tensors, {"format": "pt"}, label="holes")
    (folder / name).write_bytes(content)
    os.truncate(folder / name, header.file_size_bytes)
    return folder


def write_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """A safetensors file, put together by hand: the package cannot write every type it reads."""
    content = {
        name: {"dtype": t.dtype.safetensors_tag, "shape": list(t.shape), "data": t.bits.tobytes()}
        for name, t in tensors.items()
    }
    path.write_bytes(raw_file(content, metadata))


def raw_file(content: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file with these entries, put together by hand."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, entry in content.items():
        size = len(entry["data"])
        entries[name] = {
            "dtype": entry["dtype"],
            "shape": entry["shape"],
            "data_offsets": [at, at + size],
        }
        at += size
    return with_header(entries, b"".join(entry["data"] for entry in content.values()))


def with_header(entries: object, data: bytes) -> bytes:
    """A safetensors file whose header is this JSON."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def split_file(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file as JSON, and its data."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a file as the safetensors package reads them."""
    found = {}
    for name, entry in safetensors.deserialize(path.read_bytes()):
        element = as_dtype(entry["dtype"])
        bits = np.frombuffer(bytes(entry["data"]), dtype=element.storage)
        found[name] = Tensor(element, bits.reshape(entry["shape"]))
    return found


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file."""
    metadata = split_file(path.read_bytes())[0].get("__metadata__", {})
    assert isinstance(metadata, dict)
    return metadata


def rank_files(folder: Path) -> dict[int, Path]:
    """The shard file of each rank, by the names of the convention."""
    found = {}
    for path in folder.glob("*.safetensors"):
        match = re.fullmatch(r"shard-(\d{5})-model-00001-of-00001\.safetensors", path.name)
        assert match, path
        found[int(match[1]) - 1] = path
    return found


def read_ranks(folder: Path) -> dict[int, dict[str, Tensor]]:
    """The shards of every rank that has a file."""
    return {rank: read_file(path) for rank, path in rank_files(folder).items()}


def shard(whole: Tensor, elements: NDArray[np.int64], rubbish: int = 0) -> Tensor:
    """What a rank holds that has `elements` of a tensor; padding is `rubbish` bytes."""
    flat = whole.bits.reshape(-1)
    bits = np.frombuffer(
        bytes([rubbish]) * (elements.size * whole.dtype.itemsize_bytes), dtype=whole.dtype.storage
    ).reshape(elements.shape)
    bits = bits.copy()
    real = elements != NO_ELEMENT
    bits[real] = flat[elements[real]]
    return Tensor(whole.dtype, bits)


def check_shards(
    folder: Path,
    tensors: Mapping[str, Tensor],
    specs: Mapping[str, ShardingSpec],
    replicas: str = "every",
) -> None:
    """Every stored shard is bit for bit what the oracle says, and all are stored, or once."""
    stored = read_ranks(folder)
    seen: set[tuple[int, str]] = set()
    for name, whole in tensors.items():
        contents = contents_of_spec(specs[name], whole.shape)
        holders: dict[bytes, list[int]] = {}
        for rank, elements in contents.elements.items():
            if name in stored.get(rank, {}):
                assert stored[rank][name] == shard(whole, elements), (name, rank)
                seen.add((rank, name))
            holders.setdefault(held(contents, rank), []).append(rank)
        storing = {
            key: [rank for rank in ranks if name in stored.get(rank, {})]
            for key, ranks in holders.items()
        }
        if len(storing) > 1:
            assert storing.pop(b"", []) == [], "an empty shard needs no file"
        for key, ranks in storing.items():
            assert ranks, (name, holders[key])
            if replicas == "every":
                assert ranks == holders[key], name
            elif "fresh" not in str(specs[name]):
                # A fresh halo with what another rank owns is a shard of another kind.
                assert len(ranks) == 1, (name, ranks)
    assert seen == {(rank, name) for rank, found in stored.items() for name in found}


def held(contents: Contents, rank: int) -> bytes:
    """What makes two shards copies of one another; empty for one without elements."""
    elements = contents.elements[rank]
    if not (elements != NO_ELEMENT).any():
        return b""
    shape = np.array(elements.shape).tobytes()
    return shape + elements.tobytes() + contents.is_source[rank].tobytes()


def write_ranks(
    folder: Path,
    tensors: Mapping[str, Tensor],
    mesh: DeviceMesh,
    specs: Mapping[str, ShardingSpec],
    rubbish: int = 0xA5,
) -> None:
    """A checkpoint of shards with a manifest, by hand: every rank stores its own.

    Padding and halos that are not fresh are rubbish: nothing may depend on them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {
        "format_version": 1,
        "format": "sharded-safetensors",
        "conversion_id": "by hand",
        "mesh": {
            "name": mesh.name,
            "shape": mesh.shape,
            "axis_names": mesh.axis_names,
            "devices": mesh.devices,
        },
        "files": {},
        "tensors": {
            name: {"dtype": t.dtype.name, "shape": t.shape, "spec": str(specs[name])}
            for name, t in tensors.items()
        },
        "carried": [],
    }
    contents = {name: contents_of_spec(specs[name], t.shape) for name, t in tensors.items()}
    for rank in mesh.devices:
        shards = {}
        for name, whole in tensors.items():
            found = contents[name]
            if rank not in found.elements:
                continue
            usable = np.where(found.is_source[rank], found.elements[rank], NO_ELEMENT)
            shards[name] = shard(whole, usable, rubbish)
        file = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        write_file(folder / file, shards, {"format": "pt"})
        size = (folder / file).stat().st_size
        manifest["files"][file] = {"size_bytes": size, "rank": rank}
    (folder / MANIFEST).write_text(json.dumps(manifest))


@st.composite
def tensors(draw: st.DrawFn, most: int = 4) -> dict[str, Tensor]:
    """A few tensors of any type and of 0 to 4 dimensions."""
    found = {}
    for number in range(draw(st.integers(1, most))):
        shape = draw(shapes(max_rank=4, max_elements=300))
        dtype = draw(st.sampled_from(TAGGED))
        found[f"t{number}"] = tensor(dtype.name, shape, seed=number)
    return found


Cut = tuple[DeviceMesh, dict[str, ShardingSpec]]


@st.composite
def cuts(draw: st.DrawFn, whole: Mapping[str, Tensor]) -> Cut:
    """A mesh, and a sharding over it for every tensor."""
    mesh = draw(meshes(max_devices=8))
    return mesh, {name: draw(specs(mesh, t.shape, reductions=())) for name, t in whole.items()}


@contextmanager
def small_folder(block_bytes: int | None = None) -> Iterator[Path]:
    """A folder for one example of Hypothesis, blocks of that size, and no waiting for the disk."""
    parent = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    try:
        with mock.patch.object(blocks, "BLOCK_BYTES", block_bytes or blocks.BLOCK_BYTES):
            yield Path(parent)
    finally:
        shutil.rmtree(parent)


def beside(folder: Path, mark: str) -> Path:
    """A path beside a folder, which no other test has."""
    return folder.with_name(f"{folder.name}-{mark}")


def list_open_files(folder: Path) -> list[str]:
    """Return the files in a folder that this process has open, deleted ones too.

    Other descriptors are left out: what earlier tests left open may be closed at any moment.
    """
    opened = []
    for number in system.list_descriptors():
        # The descriptor that lists the others is closed by now.
        with suppress(FileNotFoundError):
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(path for path in opened if path.startswith(f"{folder}/") or path == str(folder))


def change_last_copy(checkpoint: Checkpoint) -> None:
    """Change the first byte of the copy of the last rank, of a tensor that several ranks have."""
    for tensor in checkpoint.tensors.values():
        first, last = tensor.stored_slots[0], tensor.stored_slots[-1]
        if first != last and tensor.layout.boxes(first) == tensor.layout.boxes(last):
            place = tensor.file_range(last)
            content = bytearray(checkpoint.path(place.path).read_bytes())
            content[place.start_bytes] ^= 1
            checkpoint.path(place.path).write_bytes(content)
            return
    raise AssertionError("no tensor has copies")
