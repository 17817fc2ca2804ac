"""Checkpoints of PyTorch's distributed checkpoint (`torch.distributed.checkpoint`, DCP).

A folder with `.metadata` and files `__R_N.distcp`, file N of rank R. Each file is a row of
items, one behind the other: the archive of a chunk of a tensor, or bytes that are no tensor::

    __0_0.distcp   [lr][zip: w[0:4]][zip: b[0:2]]      .metadata   w = w[0:4] + w[4:8], ...
    __1_0.distcp   [zip: w[4:8]][zip: b[2:4]]                      w[0:4] in __0_0, 57:1762, ...

1. `.metadata` says which chunks there are and where (`metadata`).
2. Each archive says where in it the elements lie (`torch_files.archive`); type and shape must be
   those that `.metadata` says, which PyTorch does not look at.
3. The chunks are proven to cover each tensor once.

A save without collectives has `__R.metadata` of each rank instead (`rank_metadata`).
A compressed archive is looked into; what it holds is unpacked when it is read
(`packed_archives`). Nothing here imports PyTorch, and nothing in the files is run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from reshard.binding import Binding, FileRange
from reshard.checkpoint.contents import (
    Checkpoint,
    StoredFile,
    StoredItem,
    StoredTensor,
)
from reshard.checkpoint.files.descriptors import read_up_to
from reshard.checkpoint.formats.source_sharding import (
    SourceSharding,
    describe_no_lacking,
    describe_numbering,
    select_by_rules,
)
from reshard.checkpoint.formats.torch_dcp.chunks import ChunkReader
from reshard.checkpoint.formats.torch_dcp.files import FORMAT_NAME, METADATA_NAME, rank_of_file
from reshard.checkpoint.formats.torch_dcp.metadata import (
    DcpMetadata,
    StoredBytes,
    read_metadata,
)
from reshard.checkpoint.formats.torch_dcp.packed_archives import PackedFile
from reshard.checkpoint.formats.torch_dcp.rank_metadata import (
    MergedMetadata,
    cut_lacking_tensors,
    merged_metadata,
    rank_metadata_names,
)
from reshard.checkpoint.manifest import MANIFEST_NAME, Manifest, ManifestTensor, is_plain_name
from reshard.errors import CheckpointError, FormatError, UsageError
from reshard.mesh import DeviceMesh
from reshard.text import rank_text

# Bounds on what is read into memory at once: metadata, and items that are compared.
LARGEST_METADATA_BYTES = 1 << 30
LARGEST_COMPARED_BYTES = 1 << 20


def read(folder: Path, cut: SourceSharding | None = None) -> Checkpoint:
    """Describe the checkpoint in a folder with `.metadata`, from its files alone.

    With `cut`, a save without collectives whose metadata lack an axis is cut by it.

    Raises:
        FormatError: a file that is damaged or contradicts another.
        CheckpointError: a file that is missing.
        MissingExtraError: a compressed tensor, and the package for it is not installed.
        CoverageError: chunks that overlap, or leave part of a tensor out.
    """
    # 1. The metadata: one for all ranks, or those of each rank merged.
    merged = None
    names = () if (folder / METADATA_NAME).exists() else rank_metadata_names(folder)
    if names:
        merged = merged_metadata([(name, _read_metadata_file(folder / name)) for name in names])
    metadata = merged.metadata if merged else _read_metadata_file(folder / METADATA_NAME)
    mesh = None
    notes: list[str] = []
    if cut is not None:
        metadata, mesh = _cut_tensors(folder, metadata, cut, len(names))
        notes += describe_numbering(cut, mesh)
    files = _list_files(folder, metadata, merged.other_items if merged else ())
    ranks = {file.name: file.rank for file in files}
    sizes = {file.name: file.size_bytes for file in files}
    # 2. The archives: every chunk is found in its file and bound.
    items = {}
    others: list[tuple[str, str]] = []
    metadata_name = "the metadata of its ranks" if merged else METADATA_NAME
    with ChunkReader(folder, ranks, sizes, metadata_name) as chunks:
        tensors = {tensor.name: tensor for tensor in chunks.bind(metadata.tensors)}
        for name, place in metadata.items.items():
            chunks.check_inside(name, place)
            address = FileRange(place.file, place.start_bytes)
            rank = ranks[place.file]
            items[name] = StoredItem(name, address, place.size_bytes, rank, place.transforms)
        if merged:
            others += _list_other_items(merged, chunks, ranks)
    # 3. What cannot be carried to a target, and what a user should know.
    unread = [
        (f"{METADATA_NAME}: {name}", "an attribute that PyTorch has not, and no plain value")
        for name in metadata.other_attributes
    ]
    if merged:
        unread += others
        copies = f"; {merged.copies} shards are copies of those of a lower rank, which are read"
        notes.append(
            f"merged from the metadata of {len(names)} ranks, which did not talk when they saved "
            f"(use_collectives=False){copies if merged.copies else ''}"
        )
    packed = {name: PackedFile(tuple(found)) for name, found in chunks.packed.items()}
    if packed:
        notes.append(_describe_packed(packed))
    return Checkpoint(
        folder,
        FORMAT_NAME,
        tensors,
        files,
        items=items,
        paths=metadata.paths,
        checksums=tuple(chunks.checksums),
        derived=packed,
        attributes=metadata.attributes,
        unread=tuple(unread),
        notes=tuple(notes),
        unreadable={**metadata.unreadable, **chunks.unreadable},
        mesh=mesh,
        said_cut=None if cut is None else str(cut),
    )


def _cut_tensors(
    folder: Path, metadata: DcpMetadata, cut: SourceSharding, ranks: int
) -> tuple[DcpMetadata, DeviceMesh]:
    """Return the metadata with tensors whose descriptions lack an axis cut by a user's rules.

    Raises UsageError where the axis cannot be had back from the files.
    """
    if ranks:
        tensors, mesh = cut_lacking_tensors(folder, metadata.tensors, cut, ranks)
        return dataclasses.replace(metadata, tensors=tensors), mesh
    chosen = select_by_rules(metadata.tensors, cut)
    if not chosen:
        raise UsageError(describe_no_lacking(folder, ()))
    stored = {rank_of_file(chunk.place.file) for chunk in metadata.tensors[chosen[0]].chunks}
    stored_text = rank_text(rank for rank in stored if rank is not None)
    raise UsageError(
        f"{folder}: {chosen[0]!r} has each of its parts once, stored by ranks {stored_text}: when "
        "the ranks talk, PyTorch saves one of the parts that several ranks have under the same "
        "name and offset, so that parts over an axis that is not in the mesh of the DTensors are "
        "lost in this checkpoint, and no rule brings them back. Save again with the axis in the "
        "mesh, under other names, with use_collectives=False, or as files of ranks (which "
        "--source-mesh reads); without the source's mesh and rules, what is there is read"
    )


def _list_other_items(
    merged: MergedMetadata, chunks: ChunkReader, ranks: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Items of ranks whose bytes differ, or may differ, from those that are taken."""
    for name, place in merged.other_items:
        chunks.check_inside(name, place)
        first = merged.metadata.items[name]
        is_short = place.size_bytes <= LARGEST_COMPARED_BYTES
        is_alike = (place.size_bytes, place.transforms) == (first.size_bytes, first.transforms)
        if is_short and is_alike and chunks.read(place) == chunks.read(first):
            continue
        why = "are others than" if is_short or not is_alike else "are not compared with"
        yield (
            f"{name} of rank {ranks[place.file]}",
            f"its bytes {why} those of rank {ranks[first.file]}, which are taken",
        )


def _describe_packed(packed: Mapping[str, PackedFile]) -> str:
    archives = [archive for found in packed.values() for archive in found.archives]
    size_bytes = sum(archive.front.storage_bytes for archive in archives)
    transforms = sorted({name for archive in archives for name in archive.transforms})
    return (
        f"{len(archives)} shards are compressed ({', '.join(transforms)}); of each, only the "
        f"beginning is known until it is read. They are unpacked to {size_bytes} bytes of "
        "temporary files"
    )


def read_with_manifest(folder: Path, manifest: Manifest) -> Checkpoint:
    """A checkpoint that reshard wrote: what `.metadata` says, in the layouts of the manifest.

    Raises:
        FormatError: files that are not what the manifest says.
        CheckpointError: as `read`.
    """
    return bind_to_manifest(read(folder), manifest)


def bind_to_manifest(found: Checkpoint, manifest: Manifest) -> Checkpoint:
    """A checkpoint as it was found in the files, in the layouts of the manifest.

    Raises:
        FormatError: files that are not what the manifest says.
    """
    folder = found.folder
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
        name: _bind_as_described(folder, tensor, manifest.tensors[name])
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


def _bind_as_described(
    folder: Path, tensor: StoredTensor, described: ManifestTensor
) -> StoredTensor:
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


def _read_metadata_file(path: Path) -> DcpMetadata:
    try:
        with path.open("rb") as file:
            content = read_up_to(file, LARGEST_METADATA_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > LARGEST_METADATA_BYTES:
        raise FormatError(
            f"{path} has over {LARGEST_METADATA_BYTES} bytes, no metadata is so large"
        )
    return read_metadata(content, str(path))


def _list_files(
    folder: Path, metadata: DcpMetadata, other_items: Iterable[tuple[str, StoredBytes]]
) -> tuple[StoredFile, ...]:
    """The files that items lie in, each with its rank, in the order of ranks."""
    users: dict[str, list[str]] = {}
    for name, tensor in metadata.tensors.items():
        for chunk in tensor.chunks:
            users.setdefault(chunk.place.file, []).append(name)
    for name, place in (*metadata.items.items(), *other_items):
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
