"""The metadata of single ranks, of a save without collectives, as those of one checkpoint.

`torch.distributed.checkpoint.save(..., use_collectives=False)` lets every rank write metadata of
its own, `__R.metadata`, which knows that rank's part only. Here they are one checkpoint::

    __0.metadata   w = w[0:4] of [8], b = b[0:2], step      w = w[0:4] + w[4:8]
    __1.metadata   w = w[4:8] of [8], b = b[0:2], step      b = b[0:2] (of rank 0), step (of rank 0)

1. The ranks must be 0, 1, 2 and so on: a rank's file that is missing is noticed.
2. All ranks must say the same of a tensor's shape and type.
3. A box that several ranks have is a copy. All of them are kept, so that they are compared
   (`reshard.checkpoint.copy_checks`) and a user can specify that they are none.
4. So are bytes that are no tensors. They can be others on each rank; those that are not taken
   are listed, for the caller to compare.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.checkpoint.formats.source_sharding import (
    DescribedPart,
    SourceSharding,
    describe_no_lacking,
    find_missing_axes,
    select_by_rules,
)
from reshard.checkpoint.formats.torch_dcp.files import rank_of_file
from reshard.checkpoint.formats.torch_dcp.metadata import (
    DcpMetadata,
    DcpTensor,
    StatePath,
    StoredBytes,
)
from reshard.errors import CheckpointError, CoverageError, FormatError, UsageError
from reshard.layout import Box
from reshard.mesh import DeviceMesh

_NAME = re.compile(r"__(0|[1-9]\d{0,6})\.metadata")


@dataclass(frozen=True, slots=True)
class MergedMetadata:
    """The metadata of all ranks as one.

    `copies` counts the boxes of tensors that a lower rank has too; `other_items` are the names and
    places of bytes that were left to a lower rank.
    """

    metadata: DcpMetadata
    copies: int
    other_items: tuple[tuple[str, StoredBytes], ...]


def is_rank_metadata(name: str) -> bool:
    """Whether a file of that name is the metadata of one rank.

    >>> is_rank_metadata("__12.metadata"), is_rank_metadata(".metadata")
    (True, False)
    """
    return _NAME.fullmatch(name) is not None


def rank_metadata_names(folder: Path) -> tuple[str, ...]:
    """The metadata files of single ranks in a folder, in the order of ranks; often none.

    Raises:
        CheckpointError: a rank has none, while one behind it has.
    """
    names = [path.name for path in folder.glob("__*.metadata")]
    ranks = sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))
    for expected, rank in enumerate(ranks):
        if rank != expected:
            raise CheckpointError(
                f"{folder / f'__{expected}.metadata'} is missing, while there is "
                f"__{rank}.metadata; without collectives every rank writes its own. Fetch it "
                "again, the checkpoint is incomplete"
            )
    return tuple(f"__{rank}.metadata" for rank in ranks)


def merged_metadata(parts: Sequence[tuple[str, DcpMetadata]]) -> MergedMetadata:
    """The metadata of all ranks, given with the names of their files, as one.

    Raises:
        CoverageError: ranks that disagree about what a tensor is.
    """
    tensors: dict[str, DcpTensor] = {}
    items: dict[str, StoredBytes] = {}
    paths: dict[str, StatePath] = {}
    others: list[tuple[str, StoredBytes]] = []
    unlike: dict[str, None] = {}
    unreadable: dict[str, str] = {}
    origin: dict[str, str] = {}
    boxes: dict[str, set[Box]] = {}
    copies = 0
    for file, part in parts:
        unreadable = {**part.unreadable, **unreadable}
        for name, tensor in part.tensors.items():
            first = tensors.get(name)
            _check_same_kind(name, file, origin, is_same=name not in items)
            if first is None:
                tensors[name] = tensor
                continue
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                raise CoverageError(
                    f"tensor {name!r} is {first.dtype} {list(first.shape)} by {origin[name]}, but "
                    f"{tensor.dtype} {list(tensor.shape)} by {file}; they belong to different "
                    "saves, or ranks gave different tensors one name"
                )
            known = boxes.setdefault(name, {chunk.box for chunk in first.chunks})
            copies += sum(chunk.box in known for chunk in tensor.chunks)
            known.update(chunk.box for chunk in tensor.chunks)
            chunks = (*first.chunks, *tensor.chunks)
            tensors[name] = DcpTensor(first.dtype, first.shape, chunks)
        for name, place in part.items.items():
            _check_same_kind(name, file, origin, is_same=name not in tensors)
            if name in items:
                others.append((name, place))
            else:
                items[name] = place
        # Where ranks differ, the lowest rank's entry stays.
        paths = {**part.paths, **paths}
        unlike |= dict.fromkeys(part.other_attributes)
    attributes, differing = _join_attributes([part for _, part in parts])
    other_attributes = (*unlike, *(name for name in differing if name not in unlike))
    tensors = {name: one for name, one in tensors.items() if name not in unreadable}
    metadata = DcpMetadata(tensors, items, paths, other_attributes, attributes, unreadable)
    return MergedMetadata(metadata, copies, tuple(others))


def cut_lacking_tensors(
    folder: Path, tensors: Mapping[str, DcpTensor], cut: SourceSharding, ranks: int
) -> tuple[dict[str, DcpTensor], DeviceMesh]:
    """Return tensors of which ranks have the same boxes, cut by a mesh and rules instead.

    The mesh has its ranks as they were counted (`find_missing_axes`).

    Raises:
        FormatError: chunks that contradict the rules.
        RecipeError: rules that do not fit.
        UsageError: a mesh of other ranks; rules that match no such tensor.
    """
    cut.expect_ranks(folder, ranks)
    lacking = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.shape and len({chunk.box for chunk in tensor.chunks}) < len(tensor.chunks)
    }
    chosen = select_by_rules(lacking, cut)
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
                    "of no rank; expected one part a rank that a rule can set apart"
                )
            of_tensor[rank] = DescribedPart(chunk.box, lacking[name].shape)
    cuts, mesh = find_missing_axes(parts, cut, folder)
    changed = dict(tensors)
    for name, (_, layout) in cuts.items():
        chunks = []
        for chunk in lacking[name].chunks:
            boxes = layout.boxes(rank_of_file(chunk.place.file) or 0)
            box = boxes[0] if boxes else Box((0,) * len(chunk.box.start), chunk.box.shape)
            chunks.append(dataclasses.replace(chunk, box=box))
        changed[name] = DcpTensor(lacking[name].dtype, layout.shape, tuple(chunks))
    return changed, mesh


def _check_same_kind(name: str, file: str, origin: dict[str, str], *, is_same: bool) -> None:
    if not is_same:
        raise CoverageError(
            f"{name!r} is a tensor by one of {origin[name]} and {file}, and none by the other; "
            "they belong to different saves"
        )
    origin.setdefault(name, file)


def _join_attributes(
    parts: Sequence[DcpMetadata],
) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """Attributes of all ranks, dicts joined; and the names of those that contradict each other."""
    joined: dict[str, object] = {}
    differing: dict[str, None] = {}
    for part in parts:
        for name, value in part.attributes.items():
            first = joined.setdefault(name, value)
            if isinstance(first, dict) and isinstance(value, dict):
                if any(first[key] != value[key] for key in first if key in value):
                    differing[name] = None
                joined[name] = {**value, **first}
            elif first != value:
                differing[name] = None
    return {name: one for name, one in joined.items() if name not in differing}, tuple(differing)
