"""The format `vllm-sharded-state`: safetensors files of each vLLM rank's parameters.

With vLLM's load format `sharded_state`, every rank reads its own files, and copies each tensor to
the parameter of its name::

    model-rank-0-part-0.safetensors           tp=2
    model-rank-1-part-0.safetensors
    model-pp-1-tp-0-part-0.safetensors        with stages

Tensors of equal names on different ranks are different tensors. Here names have the rank as a
prefix: `rank-1/model.norm.weight`, `pp-1-tp-0/model.norm.weight`. The tensors are whole, so such a
checkpoint is inspected and verified like others; an engine's layout determines which elements of
the model they contain.

Source: vLLM's `ShardedStateLoader`.
"""

from __future__ import annotations

import itertools
import re
from functools import partial
from pathlib import Path

import numpy as np

from reshard.binding import Binding, FileRange
from reshard.checkpoint.blocks.tensor_columns import bind_shards
from reshard.checkpoint.contents import Checkpoint, StoredFile, StoredTensor
from reshard.checkpoint.formats.format import Capability, CheckpointFormat, Listing
from reshard.checkpoint.formats.safetensors.header import (
    OWN_METADATA,
    SUFFIX,
    drop_convention,
    list_files,
    read_header,
    select_files,
)
from reshard.checkpoint.formats.safetensors.header_writer import HeaderFile
from reshard.checkpoint.formats.safetensors.huggingface import plan_headers
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan, find_kinds
from reshard.errors import CheckpointError, FormatError, UsageError
from reshard.layout import Layout

NAME = "vllm-sharded-state"
_FILE_NAME = r"model-(rank-\d{1,6}|pp-\d{1,6}-tp-\d{1,6})-part-(\d{1,9})\.safetensors"
_PREFIX = r"(rank-\d{1,6}|pp-\d{1,6}-tp-\d{1,6})/(.+)"


class VllmShardedStateFormat(CheckpointFormat):
    """The parameters of each of vLLM's ranks, in files of that rank."""

    name = NAME
    evidence = f"files such as `model-rank-0-part-0{SUFFIX}`"
    suffixes = (SUFFIX,)
    capabilities = frozenset({Capability.WHOLE, Capability.METADATA, Capability.FILE_LIMIT})
    own_metadata = OWN_METADATA
    written_for = "vllm"

    def detect(self, listing: Listing) -> bool:
        """Return whether the safetensors files of a folder are all named as parts of ranks."""
        names = select_files(listing.names)
        return bool(names) and all(re.fullmatch(_FILE_NAME, name) for name in names)

    def open(self, path: Path) -> Checkpoint:
        """Describe the checkpoint; names of tensors begin with the rank."""
        tensors: dict[str, StoredTensor] = {}
        files, metadata = [], dict[str, str]()
        ranks: dict[str, int] = {}
        # By number: as text, rank 10 would precede rank 9.
        names = sorted(list_files(path), key=_file_key)
        _expect_all_parts(path, names)
        for name in names:
            match = re.fullmatch(_FILE_NAME, name)
            if match is None:
                raise FormatError(f"{path / name} is no part of a rank; take it out of the folder")
            header = read_header(path / name)
            metadata.update(header.metadata)
            rank = ranks.setdefault(match[1], len(ranks))
            files.append(StoredFile(name, header.file_size_bytes, rank))
            for entry in header.tensors:
                full = f"{match[1]}/{entry.name}"
                if full in tensors:
                    raise FormatError(
                        f"{path / name} has {entry.name!r}, which another part of {match[1]} has "
                        "as well; files are left over from another save"
                    )
                binding = Binding(
                    Layout.whole(entry.shape, [0], 1), {0: FileRange(name, entry.start_bytes)}, {}
                )
                tensors[full] = StoredTensor(full, entry.dtype, binding)
        return Checkpoint(path, NAME, tensors, tuple(files), metadata=drop_convention(metadata))

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Plan the files of each rank, by the prefix of tensors' names.

        Raises:
            UsageError: names without the prefix of a rank.
        """
        kinds, kind = find_kinds(new.tensors)
        header_kinds = [(dtype, layout.shape) for dtype, layout, _ in kinds]
        names = tuple(new.tensors)
        by_rank: dict[str, dict[str, int]] = {}
        for row, name in enumerate(names):
            match = re.fullmatch(_PREFIX, name, re.DOTALL)
            if match is None:
                raise UsageError(
                    f"tensor {name!r} for the format {NAME}, whose tensors belong to single ranks; "
                    "convert with --for vllm --to tp=8, for so many ranks"
                )
            by_rank.setdefault(match[1], {})[match[2]] = row
        metadata = {"format": "pt", **drop_convention(new.metadata)}
        files: list[HeaderFile] = []
        shards = []
        for number, (rank, row_of) in enumerate(by_rank.items()):
            rows = np.array([*row_of.values()])
            sources = new.source_files and {
                name: new.source_files.get(names[row], "") for name, row in row_of.items()
            }
            headers = plan_headers(
                tuple(row_of),
                header_kinds,
                kind[rows],
                metadata,
                new.most_file_bytes,
                sources,
                partial(_name_part, rank),
            )
            files += [HeaderFile.of(file, number, header) for file, header in headers.items()]
            shards += [
                (0, file, rows[header.rows], header.starts) for file, header in headers.items()
            ]
        # The names of ranks are in the names of tensors, whose shardings are not of a mesh.
        whole = [(dtype, layout, None) for dtype, layout, _ in kinds]
        return WritePlan(NAME, None, bind_shards(names, whole, kind, shards), tuple(files))


FORMAT = VllmShardedStateFormat()


def rank_prefix(rank: int, tp: int, pp: int) -> str:
    """Return the prefix of the files and tensors of a rank.

    >>> rank_prefix(3, tp=4, pp=1), rank_prefix(3, tp=2, pp=2)
    ('rank-3', 'pp-1-tp-1')
    """
    return f"rank-{rank}" if pp == 1 else f"pp-{rank // tp}-tp-{rank % tp}"


def _name_part(rank: str, number: int, many: int) -> str:
    # vLLM counts parts from 0; the files of an index are counted from 1.
    return f"model-{rank}-part-{number - 1}{SUFFIX}"


def _expect_all_parts(path: Path, names: list[str]) -> None:
    """Raise CheckpointError if a rank or a part is missing before an existing one.

    The files do not specify how many ranks and parts there are.
    """
    parts: dict[tuple[int, ...], set[int]] = {}
    for name in names:
        match = re.fullmatch(_FILE_NAME, name)
        if match is not None:
            key = _file_key(name)
            parts.setdefault(key[:-1], set()).add(key[-1])
    expected_ranks = itertools.product(
        *(range(1 + max(each)) for each in zip(*parts, strict=False))
    )
    for rank in expected_ranks:
        own = parts.get(rank, set())
        missing = min({*range(1 + max(own, default=0))} - own, default=None)
        if missing is not None:
            called = f"rank-{rank[0]}" if len(rank) == 1 else f"pp-{rank[0]}-tp-{rank[1]}"
            raise CheckpointError(
                f"{path / f'model-{called}-part-{missing}{SUFFIX}'} is missing, and there are "
                "later ones; the checkpoint is incomplete, fetch it"
            )


def _file_key(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", name))
