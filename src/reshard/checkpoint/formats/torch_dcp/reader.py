"""Opening PyTorch's distributed checkpoints (`torch.distributed.checkpoint`, DCP).

A folder contains `.metadata` and files `__R_N.distcp`, file N of rank R. Each file consists of
consecutive items: the archive of a chunk of a tensor, or bytes that are not a tensor::

    __0_0.distcp   [lr][zip: w[0:4]][zip: b[0:2]]      .metadata   w = w[0:4] + w[4:8], ...
    __1_0.distcp   [zip: w[4:8]][zip: b[2:4]]                      w[0:4] in __0_0, 57:1762, ...

1. `.metadata` lists the chunks and their locations (`metadata`); a save without collectives has
   `__R.metadata` of each rank instead.
2. The bytes of each chunk must be inside its file. Its archive contains the offset of the elements
   (`torch_files.reading`), or, if it is compressed, their offset once it is decompressed
   (`packed_archives`); dtype and shape must agree with `.metadata`, which PyTorch does not check.
3. The chunks are bound to the tensor's layout, and must cover it once.

Nothing here imports PyTorch, and nothing in the files is executed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from reshard._contexts import pause_gc
from reshard.binding import FileRange
from reshard.checkpoint.blocks.tensor_columns import TensorColumns, TensorKind
from reshard.checkpoint.contents import Checkpoint, StoredChecksum, StoredFile, StoredItem
from reshard.checkpoint.formats.chunks import ChunkBinder, expect_covered
from reshard.checkpoint.formats.format import check_against_manifest
from reshard.checkpoint.formats.source_sharding import (
    DescribedPart,
    SourceSharding,
    describe_no_lacking,
    describe_numbering,
    find_missing_axes,
    select_by_rules,
)
from reshard.checkpoint.formats.torch_dcp import (
    FORMAT_NAME,
    METADATA_NAME,
    rank_metadata_names,
    rank_of_file,
)
from reshard.checkpoint.formats.torch_dcp.metadata import (
    DcpChunk,
    DcpMetadata,
    DcpTensor,
    StoredBytes,
    merge_rank_metadata,
    read_metadata,
)
from reshard.checkpoint.formats.torch_dcp.packed_archives import (
    PackedArchive,
    check_transforms,
    open_packed,
)
from reshard.checkpoint.formats.torch_files.reading import ArchiveReader, WindowReader
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.checkpoint.manifest import MANIFEST_NAME, Manifest, is_plain_name
from reshard.checkpoint.storage.byte_ranges import ByteRange
from reshard.checkpoint.storage.derived_files import DerivedFile, DerivedFiles
from reshard.checkpoint.storage.filesystem import Closing, read_file
from reshard.checkpoint.storage.remote_files import PrefetchedRanges
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.dtypes import DType
from reshard.errors import (
    CheckpointError,
    CoverageError,
    FormatError,
    UnreadableTensorError,
    UsageError,
)
from reshard.geometry.regions import Region
from reshard.layout import Box
from reshard.mesh import DeviceMesh
from reshard.runs import find_distinct
from reshard.text import rank_text

# Maximum sizes of data read into memory at once: metadata, and items that are compared.
MAX_METADATA_BYTES = 1 << 30
MAX_COMPARED_BYTES = 1 << 20


# Chunks and their metadata may be millions of objects, none of which is in a cycle.
@pause_gc()
def read(folder: Path, sharding: SourceSharding | None = None) -> Checkpoint:
    """Describe the checkpoint in a folder with `.metadata`, from its files alone.

    Args:
        folder: of the files.
        sharding: of the tensors of a save without collectives whose metadata lack a mesh axis.

    Raises:
        FormatError: a file that is damaged or contradicts another.
        CheckpointError: a file that is missing.
        MissingExtraError: a compressed tensor, and the package for it is not installed.
        CoverageError: chunks that overlap, or leave part of a tensor out.
    """
    # 1. The metadata of all ranks, or the merged metadata files of each rank.
    names = () if (folder / METADATA_NAME).exists() else rank_metadata_names(folder)
    if names:
        metadata, copies, other_items = merge_rank_metadata(
            [(name, _read_metadata_file(folder / name)) for name in names]
        )
    else:
        metadata, copies, other_items = _read_metadata_file(folder / METADATA_NAME), 0, []
    mesh = None
    notes: list[str] = []
    if sharding is not None:
        metadata, mesh = _shard_tensors(folder, metadata, sharding, len(names))
        notes += describe_numbering(sharding, mesh)
    files = _list_files(folder, metadata, other_items)
    ranks = {file.name: file.rank for file in files}
    sizes = {file.name: file.size_bytes for file in files}
    # 2. The archives: every chunk is found in its file and bound.
    items = {}
    metadata_name = "the metadata of its ranks" if names else METADATA_NAME
    with ChunkReader(folder, ranks, sizes, metadata_name) as chunks:
        tensors = chunks.bind(metadata.tensors)
        for name, place in metadata.items.items():
            chunks.check_inside(name, place)
            address = FileRange(place.file, place.start_bytes)
            rank = ranks[place.file]
            items[name] = StoredItem(name, address, place.size_bytes, rank, place.transforms)
        others = [*_list_other_items(metadata.items, other_items, chunks, ranks)]
    # 3. The contents that are not read, and notes for the user.
    unread = [
        (f"{METADATA_NAME}: {name}", "not an attribute of PyTorch's, nor a plain value")
        for name in metadata.other_attributes
    ]
    unread += others
    if names:
        copies_text = f"; {copies} shards are copies of those of a lower rank, which are read"
        notes.append(
            f"merged from the metadata of {len(names)} ranks, saved without collectives "
            f"(use_collectives=False){copies_text if copies else ''}"
        )
    packed = chunks.packed.files
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
        given_sharding=None if sharding is None else str(sharding),
    )


def _shard_tensors(
    folder: Path, metadata: DcpMetadata, sharding: SourceSharding, ranks: int
) -> tuple[DcpMetadata, DeviceMesh]:
    """Shard tensors whose descriptions lack a mesh axis by the user's rules.

    Raises UsageError if the parts over that axis are not in the files.
    """
    if ranks:
        tensors, mesh = shard_lacking_tensors(folder, metadata.tensors, sharding, ranks)
        return metadata.replace(tensors=tensors), mesh
    chosen = select_by_rules(metadata.tensors, sharding)
    if not chosen:
        raise UsageError(describe_no_lacking(folder, ()))
    stored = {rank_of_file(chunk.place.file) for chunk in metadata.tensors[chosen[0]].chunks}
    stored_text = rank_text(rank for rank in stored if rank is not None)
    raise UsageError(
        f"{folder}: {chosen[0]!r} has each of its parts once, stored by ranks {stored_text}: in a "
        "save with collectives, PyTorch stores a single part for each name and offset, so that "
        "parts over an axis that is not in the mesh of the DTensors are lost in this checkpoint, "
        "and no rule restores them. Save again with the axis in the mesh, under other names, with "
        "use_collectives=False, or as files of ranks (which --source-mesh reads). To read the "
        "stored parts, leave out the source's mesh and rules"
    )


def _list_other_items(
    items: Mapping[str, StoredBytes],
    other_items: Iterable[tuple[str, StoredBytes]],
    chunks: ChunkReader,
    ranks: Mapping[str, int],
) -> Iterator[tuple[str, str]]:
    """Yield the items of ranks whose bytes differ, or may differ, from the bytes that are used."""
    for name, place in other_items:
        chunks.check_inside(name, place)
        first = items[name]
        is_short = place.size_bytes <= MAX_COMPARED_BYTES
        is_alike = (place.size_bytes, place.transforms) == (first.size_bytes, first.transforms)
        if is_short and is_alike and chunks.read(place) == chunks.read(first):
            continue
        why = "differ from" if is_short or not is_alike else "are not compared with"
        yield (
            f"{name} of rank {ranks[place.file]}",
            f"its bytes {why} those of rank {ranks[first.file]}, which are used",
        )


def _describe_packed(packed: Mapping[str, DerivedFile]) -> str:
    archives = [archive for file in packed.values() for archive in file.parts]
    size_bytes = sum(archive.size_bytes for archive in archives)
    transforms = sorted(
        {
            name
            for archive in archives
            if isinstance(archive, PackedArchive)
            for name in archive.transforms
        }
    )
    return (
        f"{len(archives)} shards are compressed ({', '.join(transforms)}); only their beginnings "
        f"are checked until they are read. They are unpacked to {size_bytes} bytes of temporary "
        "files"
    )


def bind_to_manifest(checkpoint: Checkpoint, manifest: Manifest) -> Checkpoint:
    """Bind the tensors of a checkpoint to the layouts of its manifest.

    Raises:
        CheckpointError: files that are not those that were written.
        FormatError: files that contradict the manifest.
    """
    checked, described = check_against_manifest(checkpoint, manifest), manifest.tensors
    tensors = TensorColumns.of(checked.tensors)
    tensors = _bind_as_described(checkpoint.folder, tensors, described)
    digests = tensors.digests
    # Archives have a checksum each. It is not needed where the manifest has a digest.
    checksums = tuple(
        checksum
        for checksum in checkpoint.checksums
        if digests is None or digests.of(tensors.row(checksum.tensor)) is None
    )
    return checked.replace(tensors=tensors, mesh=manifest.mesh, checksums=checksums)


def _bind_as_described(
    folder: Path, tensors: TensorColumns, described: TensorColumns
) -> TensorColumns:
    """Return tensors in the layouts of the manifest, whose shards must be the ranks' chunks."""
    rows = described.rows(tensors.names)
    pairs, first, pair = find_distinct(np.column_stack([tensors.kind, described.kind[rows]]))
    # Tensors of equal kinds, in the files and in the manifest, are bound alike: each as the first.
    bound = [
        _match_kinds(folder, tensors.names[row], tensors.kinds[number], described.kinds[other])
        for (number, other), row in zip(pairs.tolist(), first.tolist(), strict=True)
    ]
    count = np.array([len(order) for _, order in bound] or [0], dtype=np.int64)
    begin = np.cumsum(count[pair]) - count[pair] if len(pair) else pair
    starts = np.empty(int(count[pair].sum()) if len(pair) else 0, dtype=np.int64)
    for number, (_, order) in enumerate(bound):
        alike = np.flatnonzero(pair == number)[:, None]
        places = np.array(order, dtype=np.int64)
        starts[begin[alike] + np.arange(len(places))] = tensors.starts[
            tensors.first[alike] + places
        ]
    return TensorColumns(tensors.names, [kind for kind, _ in bound], pair, starts, tensors.digests)


def _match_kinds(
    folder: Path, name: str, stored: TensorKind, described: TensorKind
) -> tuple[TensorKind, list[int]]:
    """Return a kind of tensors in the layout of the manifest, and the number of each place before.

    Raises:
        FormatError: chunks in the files that are not the shards of the manifest.
    """
    layout = described.layout
    # Only the shape of an empty tensor is stored.
    if 0 in layout.shape:
        return stored, [*range(len(stored.places))]
    places, order = [], []
    for slot in stored.layout.holders:
        boxes = layout.boxes(slot) if slot in layout.holders else ()
        chunks = {box: number for number, box in enumerate(stored.layout.boxes(slot))}
        if {*boxes} != {*chunks} or len(boxes) != len(layout.cells_of(slot)):
            raise FormatError(
                f"{folder}: {METADATA_NAME} has {name!r} in other shards than {MANIFEST_NAME}; if "
                "the files were saved again, delete the manifest"
            )
        for number, box in enumerate(boxes):
            places.append((slot, number))
            order.append(stored.find_place(slot, chunks[box])[0])
    files = tuple(stored.files[at] for at in order)
    kind = TensorKind(stored.dtype, layout, tuple(places), files, described.spec)
    expect_covered(folder, kind.tensor(name, [0] * len(places)))
    return kind, order


def _read_metadata_file(path: Path) -> DcpMetadata:
    return read_metadata(read_file(path, MAX_METADATA_BYTES), str(path))


def _list_files(
    folder: Path, metadata: DcpMetadata, other_items: Iterable[tuple[str, StoredBytes]]
) -> tuple[StoredFile, ...]:
    """Return the files that contain items, each with its rank, in the order of ranks."""
    users: dict[str, list[str]] = {}
    for name, tensor in metadata.tensors.items():
        for chunk in tensor.chunks:
            users.setdefault(chunk.place.file, []).append(name)
    for name, place in (*metadata.items.items(), *other_items):
        users.setdefault(place.file, []).append(name)
    files = []
    for number, file in enumerate(sorted(users)):
        if not is_plain_name(file):
            raise FormatError(
                f"{folder / METADATA_NAME} says that {users[file][0]!r} is in {file!r}, which "
                "leads outside the checkpoint; only files in the same folder are read"
            )
        path = folder / file
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing; {METADATA_NAME} says that {len(users[file])} items are in "
                f"it, {users[file][0]!r} first. Fetch it again, the checkpoint is incomplete"
            )
        rank = rank_of_file(file)
        files.append(StoredFile(file, path.stat().st_size, number if rank is None else rank))
    return tuple(sorted(files, key=lambda file: file.rank))


def shard_lacking_tensors(
    folder: Path, tensors: Mapping[str, DcpTensor], sharding: SourceSharding, ranks: int
) -> tuple[dict[str, DcpTensor], DeviceMesh]:
    """Shard tensors whose ranks have equal boxes by a mesh and rules instead.

    The mesh that is returned numbers its ranks as the boxes require (`find_missing_axes`).

    Raises:
        FormatError: chunks that contradict the rules.
        RecipeError: rules that do not fit.
        UsageError: a mesh of other ranks; rules that match no such tensor.
    """
    sharding.expect_ranks(folder, ranks)
    lacking = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.shape and len({chunk.box for chunk in tensor.chunks}) < len(tensor.chunks)
    }
    chosen = select_by_rules(lacking, sharding)
    if not chosen:
        raise UsageError(describe_no_lacking(folder, lacking))
    parts: dict[str, dict[int, DescribedPart]] = {}
    for name in chosen:
        of_tensor = parts.setdefault(name, {})
        for chunk in lacking[name].chunks:
            rank = rank_of_file(chunk.place.file)
            if rank is None or rank in of_tensor:
                raise FormatError(
                    f"{folder}: tensor {name!r}: {chunk.place.file} has several parts of it, or is "
                    "of no rank; expected a single part for each rank"
                )
            of_tensor[rank] = DescribedPart(chunk.box, lacking[name].shape)
    layouts, mesh = find_missing_axes(parts, sharding, folder)
    changed = dict(tensors)
    for name, (_, layout) in layouts.items():
        chunks = []
        for chunk in lacking[name].chunks:
            boxes = layout.boxes(rank_of_file(chunk.place.file) or 0)
            box = boxes[0] if boxes else Box.of(chunk.box.shape)
            chunks.append(chunk._replace(box=box))
        changed[name] = DcpTensor(lacking[name].dtype, layout.shape, tuple(chunks))
    return changed, mesh


# The parts of an archive that are read to open it: its first records, and its directory.
_HEAD_BYTES = 1 << 10
_TAIL_BYTES = 4 << 10
# Chunks that are requested from a store at once, and that are read in the order of files.
_REQUESTED_CHUNKS, _READ_CHUNKS = 1 << 11, 1 << 14
_MAX_OPEN_FILES = 64


# An archive of a tensor: its file and offset, the tensor as if the archive began at byte 0, and the
# checksum of the storage.
_Archived = tuple[str, int, ArchivedTensor, int | None]


class ChunkReader(Closing):
    """A reader of chunks, which binds the tensors of a checkpoint to its files.

    Args:
        folder: of the files.
        ranks, sizes: of the files, by name.
        metadata_name: for errors.

    Attributes:
        checksums: of the archives that were read.
        packed: compressed archives.
        unreadable: the reason for each tensor that cannot be read.
    """

    def __init__(
        self, folder: Path, ranks: Mapping[str, int], sizes: Mapping[str, int], metadata_name: str
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        self._sizes = sizes
        self._metadata_name = metadata_name
        self._files: dict[str, WindowReader] = {}
        self._archives = ArchiveReader()
        self._prefetched = PrefetchedRanges(folder)
        self.checksums: list[StoredChecksum] = []
        self.packed = DerivedFiles()
        self.unreadable: dict[str, str] = {}

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def check_inside(self, name: str, place: StoredBytes) -> None:
        """Raise FormatError unless all bytes of an item are in their file."""
        size_bytes = self._sizes[place.file]
        if place.start_bytes + place.size_bytes > size_bytes:
            raise FormatError(
                f"{self._folder / place.file} has {size_bytes} bytes, but {name!r} should be in "
                f"bytes {place.start_bytes}:{place.start_bytes + place.size_bytes}; the file was "
                "cut off, or belongs to another save"
            )

    def read(self, place: StoredBytes) -> bytes:
        """Return the bytes of an item, still transformed."""
        return self._read(place.file, place.start_bytes, place.size_bytes)

    def _read(self, name: str, offset: int, size: int) -> bytes:
        file = self._files.get(name)
        if file is None:
            # There may be thousands of files: the oldest is closed.
            if len(self._files) >= _MAX_OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            file = self._files[name] = WindowReader(self._folder / name, self._prefetched)
        try:
            return file.read(offset, size)
        except OSError as error:
            path = self._folder / name
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error

    def bind(self, tensors: Mapping[str, DcpTensor]) -> TensorColumns:
        """Return tensors bound to their chunks, each covered by them once.

        Tensors that cannot be read are left out; `unreadable` has the reason for each.
        """
        binder, slots = ChunkBinder(self._folder), max(self._ranks.values(), default=0) + 1
        is_remote = isinstance(self._folder, RemotePath)
        for group in _group_by_chunks(tensors, _REQUESTED_CHUNKS if is_remote else _READ_CHUNKS):
            chunks = {name: self._list_chunks(name, tensors[name]) for name in group}
            self._prefetch(chunk for listed in chunks.values() for chunk in listed)
            archives = self._find_archives(tensors, chunks)
            for name in group:
                if name not in self.unreadable:
                    dtype, shape, _ = tensors[name]
                    located = self._locate(name, dtype, chunks[name], archives)
                    binder.add(name, dtype, shape, located, slots)
        return binder.bind()

    def _prefetch(self, chunks: Iterable[DcpChunk]) -> None:
        """Request the heads and tails of archives from a store together."""

        def list_ranges() -> Iterator[ByteRange]:
            for place in (chunk.place for chunk in chunks if not chunk.place.transforms):
                start, stop = place.start_bytes, place.start_bytes + place.size_bytes
                if stop <= self._sizes[place.file]:
                    yield ByteRange(place.file, start, min(start + _HEAD_BYTES, stop))
                    yield ByteRange(place.file, max(stop - _TAIL_BYTES, start), stop)

        try:
            self._prefetched.fetch(list_ranges())
        except OSError as error:
            raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error

    def _list_chunks(self, name: str, described: DcpTensor) -> list[DcpChunk]:
        """Return the chunks of a tensor in the order of ranks."""
        # Empty chunks do not count, unless all are empty.
        filled = [chunk for chunk in described.chunks if chunk.box.elements]
        chunks = filled or described.chunks[:1]
        if not chunks:
            raise CoverageError(
                f"tensor {name!r} of shape {list(described.shape)} has no chunk in "
                f"{self._metadata_name} of {self._folder}; a rank's part of the save is missing"
            )
        return sorted(chunks, key=lambda chunk: self._ranks[chunk.place.file])

    def _find_archives(
        self, tensors: Mapping[str, DcpTensor], chunks: Mapping[str, Sequence[DcpChunk]]
    ) -> dict[StoredBytes, _Archived]:
        """Return the archives of chunks by their places; tensors in `unreadable` lack some."""
        ordered = [(chunk, name) for name, listed in chunks.items() for chunk in listed]
        # In the order of the files, each of which is then opened once.
        ordered.sort(key=lambda pair: (self._ranks[pair[0].place.file], pair[0].place))
        archives: dict[StoredBytes, _Archived] = {}
        for chunk, name in ordered:
            self.check_inside(name, chunk.place)
            if name not in self.unreadable:
                try:
                    archives[chunk.place] = self._find_archived(name, tensors[name], chunk)
                except UnreadableTensorError as error:
                    self.unreadable[name] = str(error)
        return archives

    def _locate(
        self,
        name: str,
        dtype: DType,
        chunks: Sequence[DcpChunk],
        archives: Mapping[StoredBytes, _Archived],
    ) -> list[tuple[int, Region]]:
        """Return the chunks of a tensor as regions of their files."""
        itemsize_bytes = dtype.itemsize_bytes
        located = []
        for chunk in chunks:
            file, begin, archived, crc32 = archives[chunk.place]
            # The archive's checksum is of the whole storage. It can be computed while the chunk is
            # read only if the chunk is the storage, in order.
            if crc32 is not None and archived.storage_bytes:
                self.checksums.append(
                    StoredChecksum(
                        name,
                        str(chunk.box),
                        FileRange(file, begin + archived.start_bytes),
                        archived.storage_bytes,
                        crc32,
                        _is_whole_storage(archived),
                        (),
                    )
                )
            start = begin + archived.start_bytes + archived.view.offset * itemsize_bytes
            strides = tuple([stride * itemsize_bytes for stride in archived.view.strides])
            rank = self._ranks[chunk.place.file]
            located.append((rank, Region(*chunk.box, file, start, strides)))
        return located

    def _find_archived(self, name: str, described: DcpTensor, chunk: DcpChunk) -> _Archived:
        """Return the archive of a chunk, checked against `.metadata`."""
        place, shape = chunk.place, chunk.box.shape
        alike = described.dtype.name, shape
        read = partial(self._read, place.file)
        if not place.transforms:
            cached = self._archives.match(read, place.start_bytes, place.size_bytes, alike)
            if cached is not None:
                return place.file, place.start_bytes, *cached
        path, end_bytes = self._folder / place.file, place.start_bytes + place.size_bytes
        label = f"{path} bytes {place.start_bytes}:{end_bytes}: {chunk.box} of tensor {name!r}"
        # Only the front of a compressed archive is unpacked: it describes the tensor.
        if place.transforms:
            try:
                check_transforms(place.transforms, label)
            except CheckpointError as error:
                raise UnreadableTensorError(f"hidden by a transform: {error}") from error
            tensor_bytes = chunk.box.elements * described.dtype.itemsize_bytes
            packed = open_packed(
                read,
                place.start_bytes,
                place.size_bytes,
                place.transforms,
                tensor_bytes,
                label,
            )
            archived, crc32 = packed.front, packed.front.crc32
        else:
            archived, crc32 = self._archives.parse(
                read, place.start_bytes, place.size_bytes, label, alike
            )
        if archived.dtype is not described.dtype or archived.shape != shape:
            raise FormatError(
                f"{label} is {archived.dtype} {list(archived.shape)} in the file, expected "
                f"{described.dtype} {list(shape)} by {self._metadata_name}; they belong "
                "to different saves"
            )
        if not place.transforms:
            return place.file, place.start_bytes, archived, crc32
        unpacked = self.packed.add(place.file, packed)
        archived = dataclasses.replace(archived, start_bytes=0)
        return unpacked.path, unpacked.start_bytes, archived, crc32


# Archives of a checkpoint have few different tensors.
@lru_cache(maxsize=4096)
def _is_whole_storage(archived: ArchivedTensor) -> bool:
    """Return whether a tensor is all elements of its storage, in their order."""
    itemsize_bytes = archived.dtype.itemsize_bytes
    size_bytes = math.prod(archived.shape) * itemsize_bytes
    return size_bytes == archived.storage_bytes and archived.view.is_dense(archived.shape)


def _group_by_chunks(tensors: Mapping[str, DcpTensor], chunks: int) -> Iterator[list[str]]:
    """Yield the names of tensors in batches of about so many chunks."""
    names, count = [], 0
    for name, tensor in tensors.items():
        names.append(name)
        count += len(tensor.chunks)
        if count >= chunks:
            yield names
            names, count = [], 0
    yield names
