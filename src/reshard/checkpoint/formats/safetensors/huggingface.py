"""Checkpoints of whole tensors, as Hugging Face writes them.

One safetensors file, or many with an index that says which tensor is in which::

    model.safetensors                        model-00001-of-00002.safetensors
    config.json, tokenizer.json, ...         model-00002-of-00002.safetensors
                                             model.safetensors.index.json

Reading gives every tensor whole on rank 0. Writing keeps tensors in order, beginning a new
file where one would outgrow the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from reshard.checkpoint.blocks.tensor_columns import bind_shards
from reshard.checkpoint.contents import Checkpoint, StoredFile
from reshard.checkpoint.formats.arrangement import (
    Arrangement,
    NewCheckpoint,
    NewFile,
    find_kinds,
    group_by_bytes,
)
from reshard.checkpoint.formats.format import CheckpointFormat, Holding, check_against_manifest
from reshard.checkpoint.formats.safetensors.header import (
    OWN_METADATA,
    SUFFIX,
    FileHeader,
    NamedTensor,
    aligned_order,
    build_header,
    drop_convention,
    list_files,
    read_header,
    tensor_size_bytes,
)
from reshard.checkpoint.formats.safetensors.index_files import (
    check_weight_map,
    expect_files,
    index_text,
    read_weight_map,
)
from reshard.checkpoint.manifest import Manifest
from reshard.dtypes import DType
from reshard.errors import CheckpointError
from reshard.layout import Layout

SINGLE_FILE = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


class HuggingFaceFormat(CheckpointFormat):
    """Whole tensors in one safetensors file, or in many with an index."""

    name = "safetensors"
    evidence = f"`{SINGLE_FILE}`, or `{INDEX_NAME}`"
    suffixes = (SUFFIX, INDEX_NAME)
    can_hold = frozenset({Holding.WHOLE, Holding.METADATA, Holding.REPLICAS, Holding.FILE_LIMIT})
    own_metadata = OWN_METADATA

    def detect(self, path: Path) -> bool:
        """Whether it is a file, or a folder with an index or a safetensors file."""
        return not path.is_dir() or (path / INDEX_NAME).exists() or bool(list_files(path))

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint of an index, or of a single file.

        Raises:
            CheckpointError: several files, and nothing that says which belong to it.
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
        """The checkpoint in the files of the manifest; others may lie beside them."""
        if len(manifest.files) > 1:
            found = read_indexed(folder / INDEX_NAME)
        else:
            found = read_single(folder / manifest.files[0].name)
        return check_against_manifest(found, manifest)

    def own_files(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """The index."""
        return (INDEX_NAME,)

    def arrange(self, new: NewCheckpoint) -> Arrangement:
        """Whole tensors in one file, or in files up to a limit."""
        named = [(name, tensor.dtype, tensor.layout.shape) for name, tensor in new.tensors.items()]
        metadata = {"format": "pt", **drop_convention(new.metadata)}
        rows = {name: row for row, name in enumerate(new.tensors)}
        files, shards = [], []
        for name, content, header in arrange_files(named, metadata, new.most_file_bytes):
            files.append(NewFile(StoredFile(name, header.file_size_bytes, 0), content))
            columns = header.columns
            held = np.fromiter(map(rows.__getitem__, columns.names), np.int64)
            shards.append((0, name, held, columns.starts))
        kinds, kind = find_kinds(new.tensors)
        stored = bind_shards(tuple(new.tensors), kinds, kind, shards)
        return Arrangement(self.name, None, stored, tuple(files))

    def final_files(self, arrangement: Arrangement) -> Iterator[tuple[str, bytes]]:
        """The index, where there are several files."""
        if len(arrangement.files) > 1:
            yield INDEX_NAME, index_text(arrangement.tensors.values()).encode()


FORMAT = HuggingFaceFormat()


def read_single(path: Path) -> Checkpoint:
    """The checkpoint that is one safetensors file."""
    return _checkpoint(path.parent, [read_header(path)], [path.name])


def read_indexed(index: Path) -> Checkpoint:
    """The checkpoint that an index file describes.

    Raises:
        FormatError: an index that is no such JSON, names files outside its folder or a tensor
            twice, or says something else than its files.
        CheckpointError: a file of it is missing.
    """
    weight_map = read_weight_map(index)
    names = sorted(set(weight_map.values()))
    expect_files(index, weight_map)
    headers = [read_header(index.parent / name) for name in names]
    found = {name: header.columns.names for name, header in zip(names, headers, strict=True)}
    check_weight_map(index, weight_map, found)
    return _checkpoint(index.parent, headers, names)


def _checkpoint(folder: Path, headers: list[FileHeader], names: list[str]) -> Checkpoint:
    metadata: dict[str, str] = {}
    names_in: list[str] = []
    kinds: dict[tuple[DType, tuple[int, ...]], int] = {}
    kind, shards, first = [np.zeros(0, dtype=np.int64)], [], 0
    for name, header in zip(names, headers, strict=True):
        metadata.update(header.metadata)
        columns = header.columns
        names_in += columns.names
        # Many tensors of a model are of one kind.
        numbers = [kinds.setdefault(one, len(kinds)) for one in columns.kinds]
        kind.append(np.array(numbers or [0], dtype=np.int64)[columns.kind])
        shards.append((0, name, first + np.arange(len(columns)), columns.starts))
        first += len(columns)
    whole = [(element, Layout.whole(shape, [0], 1), None) for element, shape in kinds]
    tensors = bind_shards(names_in, whole, np.concatenate(kind), shards)
    files = tuple(
        StoredFile(name, header.file_size_bytes, 0)
        for name, header in zip(names, headers, strict=True)
    )
    return Checkpoint(folder, FORMAT.name, tensors, files, metadata=metadata)


def arrange_files(
    tensors: Iterable[NamedTensor], metadata: Mapping[str, str], most_bytes: int | None
) -> tuple[tuple[str, bytes, FileHeader], ...]:
    """The files of a new checkpoint: name, header bytes, header.

    Without `most_bytes` there is one file; with it, a file holds that many bytes of tensors,
    or one tensor that alone is larger.
    """
    groups = group_by_bytes(tensors, lambda one: tensor_size_bytes(one[1], one[2]), most_bytes)
    many = len(groups)
    files = []
    for number, group in enumerate(groups, start=1):
        name = SINGLE_FILE if many == 1 else f"model-{number:05d}-of-{many:05d}.safetensors"
        content, header = build_header(aligned_order(group), dict(metadata), label=name)
        files.append((name, content, header))
    return tuple(files)
