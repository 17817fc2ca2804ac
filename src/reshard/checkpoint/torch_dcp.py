"""Checkpoints of PyTorch's distributed checkpoint (`torch.distributed.checkpoint`, DCP).

A folder with `.metadata` and files `__R_N.distcp`, file N of rank R. Each file is a row of
items, one behind the other: the archive of a chunk of a tensor, or bytes that are no tensor::

    __0_0.distcp   [lr][zip: w[0:4]][zip: b[0:2]]      .metadata   w = w[0:4] + w[4:8], ...
    __1_0.distcp   [zip: w[4:8]][zip: b[2:4]]                      w[0:4] in __0_0, 57:1762, ...

1. `.metadata` says which chunks there are and where (`torch_dcp_metadata`).
2. Each archive says where in it the elements lie (`torch_archive`); type and shape must be
   those that `.metadata` says, which PyTorch does not look at.
3. The chunks are proven to cover each tensor once.

What a tensor's archive was transformed with (compression) hides its elements; such a
checkpoint is refused, by name. Nothing here imports PyTorch, and nothing in the files is run.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from reshard.binding import Binding, FileRange, View
from reshard.checkpoint.contents import (
    Checkpoint,
    StoredChecksum,
    StoredFile,
    StoredItem,
    StoredTensor,
)
from reshard.checkpoint.manifest import MANIFEST_NAME, Manifest, ManifestTensor, is_plain_name
from reshard.checkpoint.sharded_safetensors import check_disjoint
from reshard.checkpoint.strided_spans import is_dense
from reshard.checkpoint.torch_archive import ArchivedTensor, read_archive
from reshard.checkpoint.torch_dcp_metadata import (
    DcpChunk,
    DcpMetadata,
    DcpTensor,
    StoredBytes,
    read_metadata,
)
from reshard.errors import CheckpointError, CoverageError, FormatError
from reshard.layout import Box, Layout

FORMAT = "torch-dcp"
METADATA_NAME = ".metadata"
SUFFIX = ".distcp"
LARGEST_METADATA_BYTES = 1 << 30
_FILE_NAME = re.compile(r"__(\d+)_(\d+)\.distcp")


def data_file_name(rank: int) -> str:
    """The name of a rank's file.

    >>> data_file_name(3)
    '__3_0.distcp'
    """
    return f"__{rank}_0{SUFFIX}"


def rank_of_file(name: str) -> int | None:
    """The rank that a file name names, or None.

    >>> rank_of_file("__12_1.distcp"), rank_of_file("weights.distcp")
    (12, None)
    """
    match = _FILE_NAME.fullmatch(name)
    return int(match[1]) if match and len(match[1]) < 8 else None


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a folder with `.metadata`, by what the files themselves say.

    Raises:
        FormatError: a file that is damaged or contradicts another.
        CheckpointError: a file that is missing; a tensor that was transformed.
        CoverageError: chunks that overlap, or leave part of a tensor out.
    """
    metadata = read_metadata(_metadata_bytes(folder), str(folder / METADATA_NAME))
    files = _files(folder, metadata)
    ranks = {file.name: file.rank for file in files}
    sizes = {file.name: file.size_bytes for file in files}
    tensors = {}
    checksums: list[StoredChecksum] = []
    with _opened(folder) as opened:
        for name, described in metadata.tensors.items():
            tensors[name] = _stored(folder, name, described, ranks, sizes, opened, checksums)
    items = {}
    for name, place in metadata.items.items():
        _check_inside(folder, name, place, sizes)
        address = FileRange(place.file, place.start_bytes)
        rank = ranks[place.file]
        items[name] = StoredItem(name, address, place.size_bytes, rank, place.transforms)
    left_out = tuple(
        (f"{METADATA_NAME}: {name}", "an attribute that PyTorch has not")
        for name in metadata.other_attributes
    )
    return Checkpoint(
        folder,
        FORMAT,
        tensors,
        files,
        left_out=left_out,
        items=items,
        paths=metadata.paths,
        checksums=tuple(checksums),
    )


def read_with_manifest(folder: Path, manifest: Manifest) -> Checkpoint:
    """A checkpoint that reshard wrote: what `.metadata` says, in the layouts of the manifest.

    Raises:
        FormatError: files that are not what the manifest says.
        CheckpointError: as `read`.
    """
    found = read(folder)
    # A checkpoint of nothing has an empty file that nothing lies in.
    written = {(file.name, file.size_bytes) for file in manifest.files if file.size_bytes}
    others = sorted({(file.name, file.size_bytes) for file in found.files} ^ written)
    names = sorted({*found.tensors} ^ {*manifest.tensors})
    if others or names:
        what = f"the tensor {names[0]!r}" if names else f"{others[0][0]} of {others[0][1]} bytes"
        raise FormatError(
            f"{folder / METADATA_NAME} and {MANIFEST_NAME} do not belong together: only one of "
            f"them has {what}. If the files were saved again, delete the manifest"
        )
    tensors = {
        name: _as_described(folder, tensor, manifest.tensors[name])
        for name, tensor in found.tensors.items()
    }
    items = {
        name: dataclasses.replace(item, digest=manifest.items.get(name))
        for name, item in found.items.items()
    }
    checksums = tuple(one for one in found.checksums if tensors[one.tensor].digest is None)
    return dataclasses.replace(
        found, tensors=tensors, mesh=manifest.mesh, items=items, checksums=checksums
    )


def _as_described(folder: Path, tensor: StoredTensor, described: ManifestTensor) -> StoredTensor:
    """A tensor in the layout of the manifest, its ranks' chunks those of the layout."""
    layout, found = described.layout, tensor.layout
    wrong = FormatError(
        f"{folder}: {METADATA_NAME} has {tensor.name!r} as {tensor.dtype} {list(tensor.shape)}, "
        f"in other shards than the {described.dtype} {list(layout.shape)} of {MANIFEST_NAME}. If "
        "the files were saved again, delete the manifest"
    )
    if (tensor.dtype, tensor.shape) != (described.dtype, layout.shape):
        raise wrong
    if 0 in layout.shape:
        return dataclasses.replace(tensor, digest=described.digest)
    addresses: dict[int, tuple[FileRange, ...]] = {}
    for slot in found.holders:
        boxes = layout.boxes(slot) if slot in layout.holders else ()
        chunks = {box: number for number, box in enumerate(found.boxes(slot))}
        if {*boxes} != {*chunks} or len(boxes) != len(layout.cells_of(slot)):
            raise wrong
        addresses[slot] = tuple(tensor.file_range(slot, chunks[box]) for box in boxes)
    bound = StoredTensor(
        tensor.name,
        tensor.dtype,
        Binding(layout, addresses, {}),
        described.spec,
        described.digest,
    )
    _ = bound.assembly
    return bound


def _metadata_bytes(folder: Path) -> bytes:
    path = folder / METADATA_NAME
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_METADATA_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > LARGEST_METADATA_BYTES:
        raise FormatError(
            f"{path} has over {LARGEST_METADATA_BYTES} bytes, no metadata is so large"
        )
    return content


def _files(folder: Path, metadata: DcpMetadata) -> tuple[StoredFile, ...]:
    """The files that items lie in, each with its rank, in the order of ranks."""
    users: dict[str, list[str]] = {}
    for name, tensor in metadata.tensors.items():
        for chunk in tensor.chunks:
            users.setdefault(chunk.place.file, []).append(name)
    for name, place in metadata.items.items():
        users.setdefault(place.file, []).append(name)
    found = []
    for number, file in enumerate(sorted(users)):
        if not is_plain_name(file):
            raise FormatError(
                f"{folder / METADATA_NAME} says that {users[file][0]!r} is in {file!r}, which "
                "leads outside the checkpoint; only files beside it are read"
            )
        path = folder / file
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing; {METADATA_NAME} says that {len(users[file])} items are in "
                f"it, {users[file][0]!r} first. Fetch it again, the checkpoint is incomplete"
            )
        rank = rank_of_file(file)
        found.append(StoredFile(file, path.stat().st_size, number if rank is None else rank))
    return tuple(sorted(found, key=lambda file: file.rank))


class _OpenFiles:
    """The files of a folder, each opened once; a few at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Bytes of a file. Raises FormatError where it has fewer."""
        path = self._folder / name
        try:
            file = self._files.get(name)
            if file is None:
                if len(self._files) >= 64:
                    self._files.pop(next(iter(self._files))).close()
                file = self._files[name] = path.open("rb", buffering=0)
            # The system may give less than was asked for; at the end of the file it gives nothing.
            content = b""
            while more := os.pread(file.fileno(), size - len(content), offset + len(content)):
                content += more
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        if len(content) != size:
            raise FormatError(
                f"{path} ends at byte {offset + len(content)}, {size} bytes at {offset} were "
                "expected; it was cut off"
            )
        return content

    def close(self) -> None:
        """Close all."""
        for file in self._files.values():
            file.close()


@contextmanager
def _opened(folder: Path) -> Iterator[_OpenFiles]:
    files = _OpenFiles(folder)
    try:
        yield files
    finally:
        files.close()


def _check_inside(folder: Path, name: str, place: StoredBytes, sizes: dict[str, int]) -> None:
    if place.start_bytes + place.size_bytes > sizes[place.file]:
        raise FormatError(
            f"{folder / place.file} has {sizes[place.file]} bytes, but {name!r} should be in "
            f"bytes {place.start_bytes}:{place.start_bytes + place.size_bytes}; the file was cut "
            "off, or belongs to another save"
        )


def _stored(
    folder: Path,
    name: str,
    described: DcpTensor,
    ranks: dict[str, int],
    sizes: dict[str, int],
    files: _OpenFiles,
    checksums: list[StoredChecksum],
) -> StoredTensor:
    """A tensor bound to its chunks, proven to be covered by them; adds to `checksums`."""
    chunks = _needed_chunks(described)
    if not chunks:
        raise CoverageError(
            f"tensor {name!r} of shape {list(described.shape)} has no chunk in "
            f"{folder / METADATA_NAME}; a rank's part of the save is missing"
        )
    chunks.sort(key=lambda chunk: ranks[chunk.place.file])
    boxes: list[tuple[int, Box]] = []
    addresses: dict[int, list[FileRange]] = {}
    views: dict[int, list[View]] = {}
    strided: set[int] = set()
    for chunk in chunks:
        place = chunk.place
        _check_inside(folder, name, place, sizes)
        archived = _archived(folder, name, described, chunk, files)
        rank = ranks[place.file]
        start_bytes = archived.start_bytes
        view = archived.view
        dense = is_dense(view, archived.shape)
        if archived.crc32 is not None and archived.storage_bytes:
            size = chunk.box.elements * described.dtype.itemsize_bytes
            storage = FileRange(place.file, start_bytes)
            once = dense and size == archived.storage_bytes
            checksums.append(
                StoredChecksum(
                    name, str(chunk.box), storage, archived.storage_bytes, archived.crc32, once
                )
            )
        if dense:
            start_bytes += view.offset * described.dtype.itemsize_bytes
            view = View.row_major(archived.shape)
        else:
            strided.add(rank)
        boxes.append((rank, chunk.box))
        addresses.setdefault(rank, []).append(FileRange(place.file, start_bytes))
        views.setdefault(rank, []).append(view)
    check_disjoint(folder, name, [(chunk.place.file, chunk.box) for chunk in chunks])
    layout = Layout.from_boxes(described.shape, boxes, max(ranks.values()) + 1)
    binding = Binding(
        layout,
        {rank: tuple(ranges) for rank, ranges in addresses.items()},
        {rank: tuple(views[rank]) for rank in strided},
    )
    tensor = StoredTensor(name, described.dtype, binding)
    _ = tensor.assembly
    return tensor


def _needed_chunks(tensor: DcpTensor) -> list[DcpChunk]:
    """The chunks that hold something; one that holds nothing, for a tensor of no elements."""
    filled = [chunk for chunk in tensor.chunks if chunk.box.elements]
    return filled or list(tensor.chunks[:1])


def _archived(
    folder: Path, name: str, described: DcpTensor, chunk: DcpChunk, files: _OpenFiles
) -> ArchivedTensor:
    """Where a chunk's elements are, checked against what `.metadata` says of it."""
    place = chunk.place
    label = f"{folder / place.file}: {chunk.box} of tensor {name!r}"
    if place.transforms:
        raise CheckpointError(
            f"{label} was transformed by {', '.join(place.transforms)}, which hides its elements; "
            "save it again without extensions of the storage writer"
        )
    archived = read_archive(
        lambda offset, size: files.read(place.file, offset, size),
        place.start_bytes,
        place.size_bytes,
        label,
    )
    if archived.dtype is not described.dtype or archived.shape != chunk.box.shape:
        raise FormatError(
            f"{label} is {archived.dtype} {list(archived.shape)} in the file, expected "
            f"{described.dtype} {list(chunk.box.shape)} by {METADATA_NAME}; they belong to "
            "different saves"
        )
    return archived
