"""The format `rank-files`: a file for each rank, without a description of all ranks.

The names of files identify the program, the rank, and the kind of state::

    model_world_size_8_rank_3.pt, optim_world_size_8_rank_3.pt,        verl, SkyRL
        extra_state_world_size_8_rank_3.pt
    pytorch_model_fsdp_0_rank3.bin, optimizer_0_rank3.bin              Accelerate
    consolidated.03.pth                                                Llama, as Meta published it
    mp_rank_03.pt, rank3.pt, rank_3.safetensors, model_rank03.pt,      others
        rank_3_of_8.pt, rank-00003-of-00008.pt, rank_3

Files of each kind must be present for every rank from 0 on. A file without a suffix counts if it
begins as files of `torch.save` do.

`parts` reads the parts of tensors in the files of ranks and joins them, `plain_parts` shards plain
tensors by rules of the user, `reader` opens checkpoints, and `writer` plans new ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.format import Capability, CheckpointFormat, Listing
from reshard.checkpoint.formats.torch_files.reading import is_torch_file
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan
from reshard.checkpoint.storage.filesystem import is_attribute_file
from reshard.errors import CheckpointError

_SUFFIX = r"\.(?:pt|pth|bin|ckpt|safetensors)"
_PATTERNS = (
    re.compile(
        rf"(?P<stem>.*?)[._-]?world_size_(?P<ranks>\d{{1,7}})_rank_(?P<rank>\d{{1,7}}){_SUFFIX}"
    ),
    re.compile(
        rf"(?P<stem>|.*[._-])(?:mp_|tp_)?rank[._-]?(?P<rank>\d{{1,7}})"
        rf"(?:[._-]of[._-](?P<ranks>\d{{1,7}}))?{_SUFFIX}"
    ),
    re.compile(r"(?P<stem>consolidated)\.(?P<rank>\d{1,7})\.pth"),
)
# Coordinates on several axes: `tp_rank_0_pp_rank_1.pt`.
_AXIS = r"([a-z]+)_rank[._-]?\d+"
_PLACES = re.compile(rf"(?:.*[._-])?{_AXIS}[._-](?:.*[._-])?{_AXIS}(?:{_SUFFIX})?")
FORMAT_NAME = "rank-files"
MODEL, OPTIMIZER, EXTRA = "model", "optimizer", "extra state"
_OF_RANK = re.compile(r"rank_(\d{1,7})\.(.+)", re.DOTALL)


class RankFile(NamedTuple):
    """The file of a rank: name, kind of state, rank, and the number of ranks if the name has it."""

    name: str
    kind: str
    stem: str
    rank: int
    ranks: int | None = None


def split_rank_name(name: str) -> tuple[int, str] | None:
    """Return the rank of a name of its state, and the name in its file; None for other names.

    >>> split_rank_name("rank_3.rng.cpu"), split_rank_name("rng.cpu")
    ((3, 'rng.cpu'), None)
    """
    match = _OF_RANK.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def name_of_rank(name: str, rank: int, ranks: int) -> str:
    """Return the checkpoint's name of the state `name` in the file of a rank.

    The first rank keeps the state of ranks that do not exist; a name may contain its rank.

    >>> name_of_rank("rng.cpu", 3, 4), name_of_rank("rank_7.rng.cpu", 0, 4)
    ('rank_3.rng.cpu', 'rank_7.rng.cpu')
    >>> name_of_rank("rank_3.step", 3, 4)
    'rank_3.step'
    """
    split = split_rank_name(name)
    is_kept = split is not None and (split[0] == rank or (rank == 0 and split[0] >= ranks))
    return name if is_kept else f"rank_{rank}.{name}"


def read_file_name(name: str) -> RankFile | None:
    """Return the parts of the name of a rank's file, or None for another file.

    >>> read_file_name("optim_world_size_8_rank_3.pt")
    RankFile(name='optim_world_size_8_rank_3.pt', kind='optimizer', stem='optim', rank=3, ranks=8)
    >>> read_file_name("mp_rank_01.pt").rank, read_file_name("model.pt")
    (1, None)
    >>> read_file_name("rank-00001-of-00004.pt").ranks
    4
    """
    for pattern in _PATTERNS:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        stem = match["stem"].rstrip("._-")
        # Trainers save the random states of ranks next to checkpoints of other formats too.
        if stem.startswith(("rng", "random")):
            return None
        kind = OPTIMIZER if "optim" in stem else EXTRA if stem.startswith("extra") else MODEL
        ranks = match.groupdict().get("ranks")
        return RankFile(name, kind, stem, int(match["rank"]), int(ranks) if ranks else None)
    return None


def find_rank_files(folder: Path) -> tuple[RankFile, ...]:
    """Return the files of ranks in a folder, by kind and rank."""
    files = []
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        if is_attribute_file(name):
            continue
        file = read_file_name(name)
        bare = read_file_name(f"{name}.pt") if file is None else None
        if bare is not None and (folder / name).is_file() and is_torch_file(folder / name):
            file = bare._replace(name=name)
        if file is not None:
            files.append(file)
    kinds = (MODEL, OPTIMIZER, EXTRA)
    return tuple(sorted(files, key=lambda file: (kinds.index(file.kind), file.stem, file.rank)))


def group_by_kind(folder: Path, files: tuple[RankFile, ...]) -> Mapping[str, tuple[RankFile, ...]]:
    """Return the files of each kind, a file for each rank.

    Raises:
        CheckpointError: files of several saves, or a rank whose file is missing.
    """
    groups: dict[str, list[RankFile]] = {}
    for file in files:
        if (places := _PLACES.fullmatch(file.name)) is not None:
            raise CheckpointError(
                f"{folder / file.name} is named by its places on several axes ({places[1]}, "
                f"{places[2]}), and their order is not known; call the files rank0.pt, rank1.pt "
                "and so on, those of neighbours on the last axis next to each other, and give "
                f"--source-mesh {places[1]}=...,{places[2]}=... with rules"
            )
        groups.setdefault(file.kind, []).append(file)
    ranks = 1 + max(file.rank for file in files)
    recorded = sorted({file.ranks for file in files if file.ranks is not None})
    if len(recorded) > 1:
        raise CheckpointError(
            f"{folder} has files of {recorded[0]} and of {recorded[1]} ranks; files are left over "
            "from another save. Move those of one save to a folder of their own"
        )
    if recorded and recorded[0] < ranks:
        raise CheckpointError(
            f"{folder} has a file of rank {ranks - 1}, and files of {recorded[0]} ranks"
        )
    for kind, group in groups.items():
        stems = sorted({file.stem for file in group})
        if len(stems) > 1:
            raise CheckpointError(
                f"{folder} has {kind} files of ranks under several names, {stems[0]!r} and "
                f"{stems[1]!r}; move those of one save to a folder of their own"
            )
        there = {file.rank for file in group}
        if len(there) != len(group):
            raise CheckpointError(f"{folder} has two {kind} files of one rank under {stems[0]!r}")
        missing = sorted(set(range(recorded[0] if recorded else ranks)) - there)
        if missing:
            raise CheckpointError(
                f"{folder} has {len(there)} {kind} files ({group[0].name}, ...), and none of rank "
                f"{missing[0]}; the checkpoint is incomplete, fetch the file"
            )
    return {kind: tuple(group) for kind, group in groups.items()}


if TYPE_CHECKING:
    from reshard.checkpoint.formats.source_sharding import SourceSharding


class RankFilesFormat(CheckpointFormat):
    """A file of `torch.save` or safetensors for each rank, without common metadata."""

    name = FORMAT_NAME
    evidence = "files of ranks, such as `model_world_size_8_rank_3.pt` or `rank3.safetensors`"

    capabilities = frozenset({Capability.SHARDS, Capability.VALUES})
    takes_source_sharding = True

    def detect(self, listing: Listing) -> bool:
        """Return whether a folder has files of ranks with a model or an optimizer."""
        if not listing.is_folder:
            return False
        # Extra state alone, such as random states, accompanies checkpoints of other formats too.
        return any(file.kind in (MODEL, OPTIMIZER) for file in find_rank_files(listing.path))

    def open(self, path: Path) -> Checkpoint:
        """Open files that describe the sharding of their tensors."""
        from reshard.checkpoint.formats.rank_files.reader import read_rank_files

        return read_rank_files(path)

    def open_sharded(self, path: Path, cut: SourceSharding) -> Checkpoint:
        """Open files that do not describe the sharding of their tensors; `cut` does."""
        from reshard.checkpoint.formats.rank_files.reader import read_rank_files

        return read_rank_files(path, cut)

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Return a file of DTensors for each rank."""
        from reshard.checkpoint.formats.rank_files.writer import RankFilesPlanner

        return RankFilesPlanner(new).plan_files()


FORMAT = RankFilesFormat()
