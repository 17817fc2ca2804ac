"""The format `safetensors`: whole tensors in one or several files, as Hugging Face has them.

    model.safetensors                        model-00001-of-00002.safetensors
    config.json, tokenizer.json, ...         model-00002-of-00002.safetensors
                                             model.safetensors.index.json

Every tensor is read whole on rank 0. New files keep the order of tensors; a file is begun when the
next tensor would exceed the limit. The index maps each tensor to its file, in the same form as
for files of `torch.save` (`pytorch_model.bin.index.json`)::

    {"metadata": {"total_size": 96}, "weight_map": {"lm_head.weight": "model-00001-of-00002..."}}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from reshard.checkpoint.blocks.tensor_columns import bind_shards
from reshard.checkpoint.contents import Checkpoint, StoredFile, StoredTensor
from reshard.checkpoint.formats.format import (
    Capability,
    CheckpointFormat,
    Listing,
    check_against_manifest,
)
from reshard.checkpoint.formats.safetensors.header import (
    OWN_METADATA,
    SUFFIX,
    FileHeader,
    HeaderKind,
    drop_convention,
    list_files,
    read_header,
    select_files,
    tensor_size_bytes,
)
from reshard.checkpoint.formats.safetensors.header_writer import HeaderFile, NewHeader, place_rows
from reshard.checkpoint.formats.write_plan import (
    NewCheckpoint,
    WritePlan,
    find_kinds,
    group_by_bytes,
    group_by_file,
)
from reshard.checkpoint.manifest import Manifest, is_plain_name
from reshard.checkpoint.storage.filesystem import read_json_object
from reshard.checkpoint.storage.remote_paths import map_paths
from reshard.dtypes import DType
from reshard.errors import CheckpointError, FormatError
from reshard.layout import Layout
from reshard.runs import IntArray

SINGLE_FILE = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


class HuggingFaceFormat(CheckpointFormat):
    """Whole tensors in a safetensors file, or in several files with an index."""

    name = "safetensors"
    evidence = f"`{SINGLE_FILE}`, or `{INDEX_NAME}`"
    suffixes = (SUFFIX, INDEX_NAME)
    capabilities = frozenset({Capability.WHOLE, Capability.METADATA, Capability.FILE_LIMIT})
    single_suffixes = (SUFFIX,)
    own_metadata = OWN_METADATA

    def detect(self, listing: Listing) -> bool:
        """Return whether it is a file, or a folder with an index or a safetensors file."""
        names = listing.names
        return not listing.is_folder or INDEX_NAME in names or bool(select_files(names))

    def open(self, path: Path) -> Checkpoint:
        """Return the checkpoint of an index, or of a single file.

        Raises:
            CheckpointError: several files without an index.
        """
        if not path.is_dir():
            return read_indexed(path) if path.name.endswith(".index.json") else read_single(path)
        if (path / INDEX_NAME).exists():
            return read_indexed(path / INDEX_NAME)
        names = list_files(path)
        if SINGLE_FILE not in names and len(names) > 1:
            raise CheckpointError(
                f"{len(names)} safetensors files in {path} ({', '.join(names[:3])}...) and no "
                f"`{INDEX_NAME}` that says which belong to it; name one of them, or add the index"
            )
        return read_single(path / (SINGLE_FILE if SINGLE_FILE in names else names[0]))

    def open_with_manifest(self, folder: Path, manifest: Manifest) -> Checkpoint:
        """Describe the checkpoint in the files of the manifest; the folder may have others."""
        if len(manifest.files) > 1:
            checkpoint = read_indexed(folder / INDEX_NAME)
        else:
            checkpoint = read_single(folder / manifest.files[0].name)
        return check_against_manifest(checkpoint, manifest)

    def own_files(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Return the index."""
        return (INDEX_NAME,)

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Plan a file of whole tensors, or several files up to a limit."""
        # transformers refuses files that do not name a framework.
        metadata = {"format": "pt", **drop_convention(new.metadata)}
        kinds, kind = find_kinds(new.tensors)
        names = tuple(new.tensors)
        of_header = tuple((element, layout.shape) for element, layout, _ in kinds)
        limit, sources = new.most_file_bytes, new.source_files
        headers = plan_headers(names, of_header, kind, metadata, limit, sources)
        if len(headers) == 1 and new.file_name is not None:
            headers = dict.fromkeys([new.file_name], *headers.values())
        files = tuple(HeaderFile.of(name, 0, header) for name, header in headers.items())
        shards = [(0, name, header.rows, header.starts) for name, header in headers.items()]
        return WritePlan(self.name, None, bind_shards(names, kinds, kind, shards), files)

    def final_files(self, write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
        """Yield the index, if there are several files."""
        if len(write_plan.files) > 1:
            yield INDEX_NAME, index_text(write_plan.tensors.values()).encode()


FORMAT = HuggingFaceFormat()


def read_single(path: Path) -> Checkpoint:
    """Describe the checkpoint in a single safetensors file."""
    return _checkpoint(path.parent, [read_header(path, allows_unknown=True)], [path.name])


def read_indexed(index: Path) -> Checkpoint:
    """Return the checkpoint that an index file describes.

    Raises:
        FormatError: an index that is not such JSON, names files outside its folder or a tensor
            twice, or contradicts its files.
        CheckpointError: a file of it is missing.
    """
    weight_map = read_weight_map(index)
    names = sorted(set(weight_map.values()))
    expect_files(index, weight_map)
    read = partial(read_header, allows_unknown=True)
    headers = [*map_paths(read, (index.parent / name for name in names))]
    names_by_file = {
        name: header.tensors.names for name, header in zip(names, headers, strict=True)
    }
    check_weight_map(index, weight_map, names_by_file)
    return _checkpoint(index.parent, headers, names)


def _checkpoint(folder: Path, headers: list[FileHeader], names: list[str]) -> Checkpoint:
    metadata: dict[str, str] = {}
    names_in: list[str] = []
    kinds: dict[tuple[DType, tuple[int, ...]], int] = {}
    kind, shards, first = [np.zeros(0, dtype=np.int64)], [], 0
    unreadable: dict[str, str] = {}
    for name, header in zip(names, headers, strict=True):
        metadata.update(header.metadata)
        columns = header.tensors
        if header.unreadable:
            unknown = header.unreadable.items()
            unreadable |= {tensor: f"in {header.label}, {why}" for tensor, why in unknown}
            columns = columns.without(header.unreadable)
        names_in += columns.names
        # Many tensors of a model are of the same kind.
        numbers = [kinds.setdefault(header_kind, len(kinds)) for header_kind in columns.kinds]
        kind.append(np.array(numbers or [0], dtype=np.int64)[columns.kind])
        shards.append((0, name, first + np.arange(len(columns)), columns.starts))
        first += len(columns)
    whole = [(element, Layout.whole(shape, [0], 1), None) for element, shape in kinds]
    tensors = bind_shards(names_in, whole, np.concatenate(kind), shards)
    files = tuple(
        StoredFile(name, header.file_size_bytes, 0)
        for name, header in zip(names, headers, strict=True)
    )
    return Checkpoint(folder, FORMAT.name, tensors, files, metadata=metadata, unreadable=unreadable)


def plan_headers(
    names: Sequence[str],
    kinds: Sequence[HeaderKind],
    kind: IntArray,
    metadata: Mapping[str, str],
    max_bytes: int | None,
    source_files: Mapping[str, str] | None = None,
    make_name: Callable[[int, int], str] | None = None,
) -> dict[str, NewHeader]:
    """Return the files of a new checkpoint: the header of each, by its name.

    Without `max_bytes` there is a single file; otherwise a file contains at most this number of
    bytes of tensors, or a single larger tensor. If a header would be too long, there are several
    files.

    Args:
        names: of the tensors; `kind` has the number in `kinds` of each, shape `(tensors,)`.
        metadata: text for each file.
        max_bytes: of the tensors of a file.
        source_files: the source's file of each tensor, instead of a limit.
        make_name: the name of a file by its number, from 1, and their number; `name_file` if None.
    """
    make_name = make_name or name_file
    sizes, numbers = [tensor_size_bytes(*header_kind) for header_kind in kinds], kind.tolist()
    if source_files:
        row_of = {name: row for row, name in enumerate(names)}
        by_file = group_by_file(names, source_files)
        groups = [[row_of[name] for name in group] for group in by_file]
    else:
        groups = group_by_bytes(range(len(names)), lambda row: sizes[numbers[row]], max_bytes)
    placed: list[NewHeader] = []
    for group in groups:
        rows = np.array(group, dtype=np.int64)
        placed += place_rows(names, rows, kinds, kind[rows], metadata)
    many = len(placed)
    return {make_name(number, many): header for number, header in enumerate(placed, start=1)}


def name_file(number: int, many: int) -> str:
    """Return the name of file `number` of `many`, counted from 1.

    >>> name_file(1, 1), name_file(2, 3)
    ('model.safetensors', 'model-00002-of-00003.safetensors')
    """
    return SINGLE_FILE if many == 1 else f"model-{number:05d}-of-{many:05d}.safetensors"


# The limit of safetensors for a header, which has more about each tensor.
_LARGEST_INDEX_BYTES = 100_000_000


def read_weight_map(index: Path) -> Mapping[str, str]:
    """Return the file of each tensor.

    Raises:
        CheckpointError: an index that cannot be read.
        FormatError: an index that is not such JSON, or names files outside its folder.
    """
    weight_map = read_json_object(index, _LARGEST_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise FormatError(f"{index} has no `weight_map` from tensor names to file names")
    for tensor, file in weight_map.items():
        if not is_plain_name(file):
            raise FormatError(
                f"{index} says that tensor {tensor!r} is in {file!r}, which leads outside the "
                "checkpoint; only files in the folder of the index are read"
            )
    return weight_map


def expect_files(index: Path, weight_map: Mapping[str, str]) -> None:
    """Raise CheckpointError for a file that is missing."""
    for name in sorted(set(weight_map.values())):
        if not (index.parent / name).exists():
            raise CheckpointError(
                f"{index} names the file {name!r}, which is missing; "
                f"{sum(file == name for file in weight_map.values())} tensors are in it. Fetch it "
                "again, the checkpoint is incomplete"
            )


def check_weight_map(
    index: Path, weight_map: Mapping[str, str], names_by_file: Mapping[str, Collection[str]]
) -> None:
    """Raise FormatError unless each file has exactly the tensors that the index lists.

    `names_by_file` has the names of the tensors in each file.
    """
    listed: dict[str, set[str]] = {name: set() for name in names_by_file}
    for tensor, file in weight_map.items():
        listed[file].add(tensor)
    for name, tensors in names_by_file.items():
        there = set(tensors)
        for tensor in sorted(listed[name] - there):
            raise FormatError(
                f"{index} says that tensor {tensor!r} is in {name}, but it is not; the index "
                "and the files do not belong together"
            )
        for tensor in sorted(there - listed[name]):
            where = weight_map.get(tensor)
            raise FormatError(
                f"{index.parent / name} holds tensor {tensor!r}, which {index.name} "
                f"{'does not list' if where is None else f'says is in {where}'}; the index and "
                "the files do not belong together"
            )


def index_text(tensors: Iterable[StoredTensor]) -> str:
    """Return the index of tensors in several files, as Hugging Face writes it."""
    weight_map = {}
    total = 0
    for tensor in tensors:
        weight_map[tensor.name] = tensor.file_range(0).path
        total += tensor.size_bytes
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2) + "\n"
