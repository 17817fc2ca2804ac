"""The format `sharded-safetensors`: a safetensors file of shards for each rank.

PyTorch's convention (`torch.distributed.checkpoint.HuggingFaceStorageWriter` with
`save_distributed=True`) names a rank's files `shard-0000R-model-0000I-of-0000N.safetensors`,
counting from 1, and stores the offsets of shards in their tensors in the metadata::

    DCP_VERSION         1.0
    DCP_SHARDING_INFO   {"lm_head.weight": {"saved_offsets": [7631, 0]}, ...}

It stores neither the shapes of whole tensors nor the list of files. Our manifest does. Without it,
the shape of a tensor is the extent of its shards, which must cover it, each element once. A missing
last shard cannot be noticed by that, so our files also contain their number (`RESHARD_FILES`); for
other files, a note reports the uncertainty. In our files, equal boxes of several ranks are copies.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from reshard.checkpoint.blocks.tensor_columns import TensorColumns, bind_shards
from reshard.checkpoint.contents import Checkpoint, StoredFile, StoredTensor
from reshard.checkpoint.formats.chunks import ChunkBinder, expect_covered
from reshard.checkpoint.formats.format import Capability, CheckpointFormat, Listing
from reshard.checkpoint.formats.safetensors.header import (
    FILES_KEY,
    LARGEST_OFFSET,
    OWN_METADATA,
    SHARDING_INFO_KEY,
    SUFFIX,
    VERSION_KEY,
    FileHeader,
    TensorHeader,
    drop_convention,
    find_offsets,
    has_metadata_key,
    list_files,
    read_header,
    select_files,
)
from reshard.checkpoint.formats.safetensors.header_writer import HeaderFile, place_rows
from reshard.checkpoint.formats.safetensors.huggingface import INDEX_NAME
from reshard.checkpoint.formats.write_plan import (
    NewCheckpoint,
    WritePlan,
    are_boxes,
    check_values,
    count_copy_bytes,
    find_kinds,
    find_storing_ranks,
    first_indices,
)
from reshard.checkpoint.manifest import MANIFEST_NAME, Manifest, can_describe
from reshard.checkpoint.storage.remote_paths import map_paths
from reshard.dtypes import DType
from reshard.errors import CheckpointError, CoverageError, FormatError, RecipeError
from reshard.geometry.regions import Region, dense_strides
from reshard.runs import IntArray, find_distinct

_FILE_NAME = r"shard-(\d{1,9})-model-(\d{1,9})-of-(\d{1,9})\.safetensors"


class ShardedFormat(CheckpointFormat):
    """The shards of each rank in a safetensors file."""

    name = "sharded-safetensors"
    evidence = f"shard files ending in `{SUFFIX}`"
    suffixes = (SUFFIX,)
    capabilities = frozenset({Capability.SHARDS, Capability.METADATA, Capability.REPLICAS})
    own_metadata = OWN_METADATA

    def detect(self, listing: Listing) -> bool:
        """Return whether a file has the offsets of shards, or all files are named as ranks'.

        A folder with an index contains whole tensors.

        Raises:
            FormatError: a file in the folder that is not a safetensors file.
        """
        if listing.is_folder:
            names = [] if INDEX_NAME in listing.names else select_files(listing.names)
            is_named = bool(names) and all(rank_of_file(name) is not None for name in names)
            return is_named or any(_is_sharded(listing.path / name) for name in names)
        try:
            return _is_sharded(listing.path)
        except CheckpointError:
            # Another format may know the file.
            return False

    def open(self, path: Path) -> Checkpoint:
        """Describe the checkpoint from its files alone."""
        if path.is_dir():
            return read_without_manifest(path, list_files(path))
        return read_without_manifest(path.parent, [path.name])

    def open_with_manifest(self, folder: Path, manifest: Manifest) -> Checkpoint:
        """Describe the checkpoint in the layouts of the manifest."""
        return read_with_manifest(folder, manifest)

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Plan a file of shards for each rank.

        Shards whose size is a multiple of pages come first, so that they begin at pages. PyTorch's
        convention describes a shard by its offset in each dimension. It is used if every shard is a
        box; otherwise none of the files has offsets, since interleaved and padded shards can only
        be read with our manifest.

        Raises:
            RecipeError: a partial layout; a checkpoint stores values, not contributions.
        """
        # The source's metadata may contain the offsets of its own shards.
        tensors, metadata = new.tensors, drop_convention(new.metadata)
        check_values(tensors)
        kinds, kind = find_kinds(tensors)
        names = tuple(tensors)
        for number, (_, layout, spec) in enumerate(kinds):
            if spec is None and not can_describe(layout):
                raise RecipeError(
                    f"tensor {names[int(np.argmax(kind == number))]!r} is laid out by a strategy "
                    "with interleaved, padded or halo elements, which a manifest can only "
                    "describe by a sharding; give rules instead"
                )
        numbers: dict[frozenset[int], int] = {}
        storing_of = find_storing_ranks(tensors, new.replicas).values()
        each = (numbers.setdefault(slots, len(numbers)) for slots in storing_of)
        stored, storing = np.fromiter(each, np.int64, len(tensors)), list(numbers)
        # A checkpoint without tensors has a file.
        ranks = sorted(frozenset().union(*storing)) or [0]
        # Tensors of equal layouts that the same ranks store have equal shards in every file.
        codes = kind * len(storing) + stored
        _, first, alike = find_distinct(codes)
        cuts = [(*kinds[int(kind[row])][:2], storing[int(stored[row])]) for row in first.tolist()]
        # A single such tensor suffices: with offsets for the others, the checkpoint would seem to
        # be readable by PyTorch.
        has_boxes = [are_boxes(layout, slots) for _, layout, slots in cuts]
        interleaved = np.flatnonzero(~np.array(has_boxes or [True])[alike])
        metadata, offsets_key = {"format": "pt", **metadata}, None
        if not len(interleaved):
            offsets_key = SHARDING_INFO_KEY
            # Each file gets its own offsets in place of the empty text.
            metadata |= {VERSION_KEY: "1.0", offsets_key: "", FILES_KEY: str(len(ranks))}
        placed = {}
        for rank in ranks:
            has_shard = np.array([rank in slots for _, _, slots in cuts] or [False])
            there = np.flatnonzero(has_shard)
            rows = np.flatnonzero(has_shard[alike])
            placed[rank] = place_rows(
                names,
                rows,
                [(cuts[n][0], cuts[n][1].local_shapes[rank]) for n in there.tolist()],
                np.searchsorted(there, alike[rows]),
                metadata,
                offsets_key,
                [first_indices(*cuts[n][1:])[rank] for n in there.tolist()],
            )
        many, total = max(map(len, placed.values())), sum(map(len, placed.values()))
        # A rank's tensors may take several files, which is known only now.
        if total > len(ranks) and offsets_key:
            metadata |= {FILES_KEY: str(total)}
            placed = {
                rank: [header.replace(metadata=metadata) for header in headers]
                for rank, headers in placed.items()
            }
        files, shards = [], []
        for rank, headers in placed.items():
            for number, header in enumerate(headers, start=1):
                file = shard_file_name(rank, number, many)
                files.append(HeaderFile.of(file, rank, header))
                shards.append((rank, file, header.rows, header.starts))
        stored_tensors = bind_shards(names, kinds, kind, shards)
        notes: tuple[str, ...] = ()
        if len(interleaved):
            notes = (
                f"{len(interleaved)} tensors have shards that are not a single box (first: "
                f"{names[int(interleaved[0])]}), so PyTorch's reader cannot read this checkpoint; "
                "reshard can",
            )
        copy_bytes = count_copy_bytes(tensors) if new.replicas == "every" else 0
        return WritePlan(
            self.name, new.mesh, stored_tensors, tuple(files), notes, copy_bytes=copy_bytes
        )


FORMAT = ShardedFormat()


def _is_sharded(path: Path) -> bool:
    return has_metadata_key(path, SHARDING_INFO_KEY)


def shard_file_name(rank: int, number: int = 1, many: int = 1) -> str:
    """Return the name of file `number` of the `many` of a rank, counted from 1.

    >>> shard_file_name(0)
    'shard-00001-model-00001-of-00001.safetensors'
    """
    return f"shard-{rank + 1:05d}-model-{number:05d}-of-{many:05d}.safetensors"


def rank_of_file(name: str) -> int | None:
    """Return the rank in a file name, or None.

    >>> rank_of_file("shard-00003-model-00001-of-00001.safetensors"), rank_of_file("a.safetensors")
    (2, None)
    """
    match = re.fullmatch(_FILE_NAME, name)
    return int(match[1]) - 1 if match and int(match[1]) > 0 else None


def read_with_manifest(folder: Path, manifest: Manifest) -> Checkpoint:
    """Describe a checkpoint of shards with a manifest.

    Raises:
        CheckpointError: a file that is missing, or was not written with this size.
        FormatError: shards that contradict the manifest.
    """
    described = manifest.tensors
    shards = []
    metadata: dict[str, str] = {}
    # 1. Every file must have the size and the rank with which it was written, and contain the
    # shards that the manifest lists. Headers may be long: a single header is in memory at a time.
    headers = map_paths(read_header, (folder / file.name for file in manifest.files))
    for file, header in zip(manifest.files, headers, strict=True):
        held, starts, file_metadata = _read_shards(folder, file, header, described)
        metadata.update(file_metadata)
        shards.append((file.rank, file.name, held, starts))
    # 2. The shards in the manifest's layouts, with its digests, which must cover each tensor.
    kinds = [(kind.dtype, kind.layout, kind.spec) for kind in described.kinds]
    # A rank may have several files.
    shards.sort(key=lambda shard: shard[0])
    tensors = bind_shards(described.names, kinds, described.kind, shards, described.digests)
    for number in range(len(tensors.kinds)):
        expect_covered(folder, tensors.sample(number))
    return Checkpoint(folder, FORMAT.name, tensors, manifest.files, manifest.mesh, metadata)


def _read_shards(
    folder: Path, file: StoredFile, header: FileHeader, described: TensorColumns
) -> tuple[IntArray, IntArray, Mapping[str, str]]:
    """Return the rows of the tensors of a file's shards, the offset of each, and the metadata."""
    path = folder / file.name
    if header.file_size_bytes != file.size_bytes:
        raise CheckpointError(
            f"{path} has {header.file_size_bytes} bytes, the manifest says {file.size_bytes}; it "
            "is not the file that was written"
        )
    if rank_of_file(file.name) not in (None, file.rank):
        raise FormatError(
            f"{path} is the file of rank {rank_of_file(file.name)}, the manifest says of rank "
            f"{file.rank}"
        )
    offsets = None
    if SHARDING_INFO_KEY in header.metadata:
        offsets = _read_offsets(path, header)
    columns = header.tensors
    for name in columns.names:
        if name not in described:
            raise FormatError(f"{path} holds tensor {name!r}, which the manifest does not know")
    held = described.rows(columns.names)
    # Shards that are equal in the file and in the manifest are checked once.
    alike = [columns.kind, described.kind[held]]
    if offsets is not None:
        numbers: dict[tuple[int, ...], int] = {}
        each = (numbers.setdefault(offsets[name], len(numbers)) for name in columns.names)
        alike.append(np.fromiter(each, np.int64, len(columns.names)))
    _, first, _ = find_distinct(np.column_stack(alike))
    for at in first.tolist():
        entry = columns[at]
        offset = offsets[entry.name] if offsets else None
        _check_shard(path, entry, described[entry.name], file.rank, offset)
    return held, columns.starts, drop_convention(header.metadata)


def _check_shard(
    path: Path,
    entry: TensorHeader,
    described: StoredTensor,
    rank: int,
    offsets: tuple[int, ...] | None,
) -> None:
    expected = described.layout.local_shape(rank) if rank < described.layout.slots else None
    if expected is None:
        raise FormatError(
            f"{path} holds a shard of {entry.name!r}, but the manifest gives rank {rank} none"
        )
    if entry.shape != expected or entry.dtype is not described.dtype:
        raise FormatError(
            f"{path}: the shard of {entry.name!r} is {entry.dtype.name} {list(entry.shape)}, the "
            f"manifest says {described.dtype.name} {list(expected)}"
        )
    boxes = described.layout.boxes(rank)
    if offsets is not None and boxes and boxes[0].start != offsets:
        raise FormatError(
            f"{path}: the shard of {entry.name!r} begins at {list(offsets)} of its tensor, the "
            f"manifest says at {list(boxes[0].start)}"
        )


def read_without_manifest(folder: Path, names: list[str]) -> Checkpoint:
    """Describe a checkpoint of shards from its files alone.

    Raises:
        CheckpointError: files without offsets.
        FormatError: some files without offsets, or offsets that do not fit.
        CoverageError: shards of a tensor that differ in dtype or number of dimensions, overlap, or
            do not cover it; another number of files than they record.
    """
    counts: dict[str, str | None] = {}
    shards: dict[str, list[tuple[int, DType, Region]]] = {}
    files = []
    metadata: dict[str, str] = {}
    headers = map_paths(read_header, (folder / name for name in names))
    for number, (name, header) in enumerate(zip(names, headers, strict=True)):
        rank = rank_of_file(name)
        # Files of other names are numbered in the order of their names.
        rank = number if rank is None else rank
        files.append(StoredFile(name, header.file_size_bytes, rank))
        metadata.update(header.metadata)
        counts[name] = header.metadata.get(FILES_KEY)
        if SHARDING_INFO_KEY not in header.metadata:
            raise _explain_no_offsets(folder, name, names)
        offsets = _read_offsets(folder / name, header)
        for tensor, dtype, shape, start, _ in header.tensors:
            begin, strides = offsets[tensor], dense_strides(shape, dtype.itemsize_bytes)
            stop = tuple(map(operator.add, begin, shape))
            region = Region(begin, stop, name, start, strides)
            shards.setdefault(tensor, []).append((rank, dtype, region))
    _check_file_numbers(folder, names)
    # Other programs write each box once: a second file is left over from another save.
    has_copies = all(count is not None for count in counts.values())
    binder = ChunkBinder(folder)
    for name, of_tensor in shards.items():
        binder.add(name, *_join_shards(folder, name, of_tensor), has_copies=has_copies)
    notes = _check_file_counts(folder, counts)
    return Checkpoint(
        folder,
        FORMAT.name,
        binder.bind(),
        tuple(files),
        metadata=drop_convention(metadata),
        notes=notes,
    )


def _explain_no_offsets(folder: Path, name: str, names: list[str]) -> CheckpointError:
    """Return the error for the file `name` without offsets of shards."""
    if any(_is_sharded(folder / other) for other in names):
        return FormatError(
            f"{folder / name} has no {SHARDING_INFO_KEY} in its metadata, while other files have; "
            "whole and sharded tensors cannot be in one checkpoint"
        )
    return CheckpointError(
        f"{len(names)} files of ranks in {folder} ({', '.join(names[:3])}) do not say where in "
        f"their tensors their shards are; {MANIFEST_NAME} does, and it is missing. Fetch it again: "
        "shards that are interleaved or padded, such as those of fused parameters, are described "
        "nowhere else"
    )


def _check_file_counts(folder: Path, counts: Mapping[str, str | None]) -> tuple[str, ...]:
    """Check the number of files that they record; return a note if they do not record it."""
    for name, count in counts.items():
        if count is not None and count != str(len(counts)):
            raise CoverageError(
                f"{folder / name} says that it is one of {count[:20]} files written together, and "
                f"here are {len(counts)} with shards; one is missing, or files are left over from "
                "another save. Open the folder that has exactly those of one save"
            )
    if any(count is not None for count in counts.values()):
        return ()
    return (
        "neither a manifest nor the files say how many files with shards there were: tensors have "
        "the shapes that the shards found reach to, and if a last file is missing, they are too "
        "small",
    )


def _check_file_numbers(folder: Path, names: list[str]) -> None:
    """Check that a rank's files are numbered 1 to N, and that all names agree on N."""
    matches = [match for name in names if (match := re.fullmatch(_FILE_NAME, name))]
    totals = sorted({int(match[3]) for match in matches})
    if len(totals) > 1:
        raise CoverageError(
            f"{folder} has shard files of {totals[0]} and of {totals[1]} files a rank; files are "
            "left over from another save"
        )
    numbers = {int(match[2]) for match in matches}
    for number in range(1, max(totals, default=0) + 1):
        if number not in numbers:
            raise CheckpointError(
                f"no rank in {folder} has a file {number} of {totals[0]}: expected a name such as "
                f"shard-00001-model-{number:05d}-of-{totals[0]:05d}.safetensors. The checkpoint "
                "is incomplete"
            )


def _read_offsets(path: Path, header: FileHeader) -> dict[str, tuple[int, ...]]:
    columns, text = header.tensors, header.metadata[SHARDING_INFO_KEY]
    try:
        offsets = find_offsets(text, columns.names)
        if offsets is None:
            info = json.loads(text)
            offsets = {name: tuple(info[name]["saved_offsets"]) for name in columns.names}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(
            f"{path}: {SHARDING_INFO_KEY} does not give `saved_offsets` for every tensor of the "
            f"file: {'no ' if isinstance(error, KeyError) else ''}{error}"
        ) from error
    checked: set[tuple[tuple[int, ...], int]] = set()
    for name, number in zip(columns.names, columns.kind.tolist(), strict=True):
        start = offsets[name]
        # Values such as True are equal to numbers, and lists are not hashable: these are checked.
        if all(type(offset) is int for offset in start) and (start, number) in checked:
            continue
        shape = columns.kinds[number][1]
        if len(start) != len(shape) or not all(
            type(offset) is int and 0 <= offset <= LARGEST_OFFSET - size
            for offset, size in zip(start, shape, strict=True)
        ):
            raise FormatError(
                f"{path}: offsets {list(start)} of {name!r}, expected "
                f"{len(shape)} numbers of 0 or more"
            )
        checked.add((start, number))
    return offsets


def _join_shards(
    folder: Path, name: str, shards: list[tuple[int, DType, Region]]
) -> tuple[DType, tuple[int, ...], list[tuple[int, Region]], int]:
    """Return the dtype and the shape of the tensor of shards, its chunks, and its number of ranks.

    Raises CoverageError for shards that do not belong together.
    """
    _, dtype, first = shards[0]
    files: dict[int, Path] = {}
    for rank, element, region in shards:
        file = folder / region.container
        if element is not dtype or len(region.start) != len(first.start):
            raise CoverageError(
                f"tensor {name!r} is {dtype.name} of {len(first.start)} dimensions in "
                f"{folder / first.container}, but {element.name} of {len(region.start)} dimensions "
                f"in {file}"
            )
        if rank in files:
            raise CoverageError(
                f"rank {rank} has two shards of {name!r}, in {files[rank]} and {file}; the files "
                "do not belong together"
            )
        files[rank] = file
    # The files do not contain the shape of the tensor: it is the extent of its shards.
    ends = [region.stop for _, _, region in shards]
    shape = tuple(max(column) for column in zip(*ends, strict=True)) if first.start else ()
    return dtype, shape, [(rank, region) for rank, _, region in shards], max(files) + 1
