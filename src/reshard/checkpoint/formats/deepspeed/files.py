"""The files of DeepSpeed's checkpoints, by their names.

A save is a folder, its *tag*, beside a file `latest` that names it::

    latest                                                      global_step100
    global_step100/mp_rank_00_model_states.pt                   weights, and what is no tensor
    global_step100/zero_pp_rank_3_mp_rank_00_optim_states.pt    a partition of ZeRO, of rank 3
    global_step100/zero_pp_rank_3_mp_rank_00_model_states.pt    the same of weights, stage 3
    global_step100/layer_04-model_00-model_states.pt            a layer of a pipeline
    global_step100/layer_0_expert_5_mp_rank_00_model_states.pt  an expert
    global_step100/expp_rank_1_mp_rank_00_optim_states.pt       optimizer state of experts' ranks
    latest_universal                                            global_step100_universal
    global_step100_universal/zero/lm_head.weight/exp_avg.pt     a universal checkpoint

`mp_rank` numbers stages and tensor-parallel ranks, stages first. Partitions of 16-bit runs begin
with `bf16_`; old names have no `_` before `optim_states`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reshard.errors import CheckpointError, FormatError
from reshard.text import first_text

SUFFIXES = ("model_states.pt", "optim_states.pt")
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
# What DeepSpeed copies beside its checkpoints, and Accelerate beside those.
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
UNIVERSAL_FOLDER = "zero"
UNIVERSAL_STATE = "zero/optimizer_state.pt"
_LONGEST_TAG_BYTES = 4096
_MOST_LISTED = 8

_NUMBER = r"(\d{1,7})"
_RANK = rf"zero_pp_rank_{_NUMBER}_mp_rank_{_NUMBER}"
_PARTITION = re.compile(rf"(?:bf16_|fp16_)?{_RANK}_?optim_states\.pt")
_MODEL_PARTITION = re.compile(rf"{_RANK}_model_states\.pt")
_MODEL = re.compile(rf"mp_rank_{_NUMBER}_model_states\.pt")
_LAYER = re.compile(rf"layer_{_NUMBER}(?:-model_{_NUMBER})?-model_states\.pt")
_EXPERT = re.compile(rf"(?:layer_{_NUMBER}_)?expert_{_NUMBER}_mp_rank_{_NUMBER}_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(rf"expp_rank_{_NUMBER}_mp_rank_{_NUMBER}_optim_states\.pt")


@dataclass(frozen=True)
class SavedFiles:
    """The files of one save, by what they are of; names are relative to its folder.

    Attributes:
        folder: the folder of the tag.
        models: weights by `mp_rank`.
        model_partitions: weights of stage 3 by `(mp_rank, rank)`.
        partitions: optimizer state by `(mp_rank, rank)`.
        layers: of a pipeline, by `(layer, tensor-parallel rank)`.
        experts: by `(layer, expert, mp_rank)`; the layer is -1 where names have none.
        expert_optimizers: by `(rank, mp_rank)`.
        is_universal: whether it has a file of each parameter's state.
    """

    folder: Path
    models: Mapping[int, str] = field(default_factory=dict)
    model_partitions: Mapping[tuple[int, int], str] = field(default_factory=dict)
    partitions: Mapping[tuple[int, int], str] = field(default_factory=dict)
    layers: Mapping[tuple[int, int], str] = field(default_factory=dict)
    experts: Mapping[tuple[int, int, int], str] = field(default_factory=dict)
    expert_optimizers: Mapping[tuple[int, int], str] = field(default_factory=dict)
    is_universal: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is none of them."""
        found = (self.models, self.model_partitions, self.partitions, self.layers, self.experts)
        return not any(found) and not self.is_universal

    @property
    def mp_ranks(self) -> int:
        """How many stages times tensor-parallel ranks there are."""
        numbers = {*self.models}
        numbers.update(mp for mp, _ in (*self.model_partitions, *self.partitions))
        return max(numbers, default=0) + 1

    @property
    def ranks(self) -> int:
        """How many data-parallel ranks have files."""
        return max((rank for _, rank in (*self.model_partitions, *self.partitions)), default=0) + 1


def find_files(folder: Path) -> SavedFiles:
    """The files of a save in the folder of its tag.

    Raises:
        FormatError: two files for the same part.
    """
    models: dict[int, str] = {}
    model_partitions: dict[tuple[int, int], str] = {}
    partitions: dict[tuple[int, int], str] = {}
    layers: dict[tuple[int, int], str] = {}
    experts: dict[tuple[int, int, int], str] = {}
    expert_optimizers: dict[tuple[int, int], str] = {}

    def add(found: dict, key: object, name: str) -> None:  # type: ignore[type-arg]
        if key in found:
            raise FormatError(
                f"{folder} has {found[key]} and {name}, which are for the same part; one of them "
                "is left over from another save, take it out of the folder"
            )
        found[key] = name

    for name in sorted(path.name for path in folder.iterdir() if path.is_file()):
        if match := _PARTITION.fullmatch(name):
            add(partitions, (int(match[2]), int(match[1])), name)
        elif match := _MODEL_PARTITION.fullmatch(name):
            add(model_partitions, (int(match[2]), int(match[1])), name)
        elif match := _MODEL.fullmatch(name):
            add(models, int(match[1]), name)
        elif match := _LAYER.fullmatch(name):
            add(layers, (int(match[1]), int(match[2] or 0)), name)
        elif match := _EXPERT.fullmatch(name):
            layer = -1 if match[1] is None else int(match[1])
            add(experts, (layer, int(match[2]), int(match[3])), name)
        elif match := _EXPERT_OPTIMIZER.fullmatch(name):
            add(expert_optimizers, (int(match[1]), int(match[2])), name)
    universal = (folder / UNIVERSAL_FOLDER).is_dir()
    return SavedFiles(
        folder, models, model_partitions, partitions, layers, experts, expert_optimizers, universal
    )


def has_saved_files(folder: Path) -> bool:
    """Whether there is a file that only DeepSpeed's checkpoints have.

    Pipelines, experts and ranks alone do not tell; the names of other programs are no such.
    """
    patterns = (_PARTITION, _MODEL_PARTITION, _MODEL, _EXPERT, _EXPERT_OPTIMIZER)
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return False
    return any(pattern.fullmatch(name) for name in names for pattern in patterns)


def read_tag(folder: Path) -> str | None:
    """The tag that `latest`, or `latest_universal`, of a folder names; None where neither is one.

    The latter counts where there is no `latest`.
    """
    for name in (LATEST, LATEST_UNIVERSAL):
        try:
            with (folder / name).open("rb") as file:
                content = file.read(_LONGEST_TAG_BYTES + 1)
            tag = content.decode("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            continue
        is_one = len(content) <= _LONGEST_TAG_BYTES and tag.isprintable()
        if tag and is_one and "/" not in tag and tag not in (".", ".."):
            return tag
    return None


def is_save(folder: Path) -> bool:
    """Whether a folder is DeepSpeed's: that of a tag, or one with `latest` beside tags."""
    if has_saved_files(folder):
        return True
    tag = read_tag(folder)
    return tag is not None and (
        has_saved_files(folder / tag) or any(map(has_saved_files, _list_folders(folder)))
    )


def find_tag_folder(folder: Path) -> Path:
    """The folder with the files: that which `latest` names, or `folder` itself.

    Raises:
        CheckpointError: `latest` names a folder that is not there, or has no such files.
    """
    if has_saved_files(folder):
        return folder
    tag = read_tag(folder)
    if tag is None:
        raise CheckpointError(
            f"{folder} has no file {LATEST} that names the folder of a save; give the path of one, "
            f"such as {folder / 'global_step100'}"
        )
    if has_saved_files(folder / tag):
        return folder / tag
    others = [path.name for path in _list_folders(folder) if has_saved_files(path)]
    what = "is not there" if not (folder / tag).is_dir() else "has none of DeepSpeed's files"
    raise CheckpointError(
        f"{folder / LATEST} names {tag!r}, and {folder / tag} {what}; "
        f"{_list_names(others) or 'no other folder there'} "
        f"{'has' if len(others) < 2 else 'have'} DeepSpeed's files. Give the path of the one you "
        "mean, or fetch the missing one"
    )


def expect_complete(saved: SavedFiles, ranks: int, mp_ranks: int) -> None:
    """Raise CheckpointError where files of some ranks are missing, naming them.

    `ranks` is the number of data-parallel ranks that the files speak of.
    """
    missing = []
    if saved.model_partitions:
        wanted = _product(mp_ranks, ranks)
        gaps = [key for key in wanted if key not in saved.model_partitions]
        missing += [f"zero_pp_rank_{r}_mp_rank_{mp:02d}_model_states.pt" for mp, r in gaps]
    else:
        missing += [
            f"mp_rank_{mp:02d}_model_states.pt" for mp in range(mp_ranks) if mp not in saved.models
        ]
    if saved.partitions:
        prefix = next(iter(saved.partitions.values())).partition("zero_pp_rank_")[0]
        gaps = [key for key in _product(mp_ranks, ranks) if key not in saved.partitions]
        missing += [f"{prefix}zero_pp_rank_{r}_mp_rank_{mp:02d}_optim_states.pt" for mp, r in gaps]
    if missing:
        raise CheckpointError(
            f"{saved.folder} is incomplete: it is of {ranks} data-parallel "
            f"{'rank' if ranks == 1 else 'ranks'}"
            f"{f' and {mp_ranks} model-parallel ones' if mp_ranks > 1 else ''}, and "
            f"{_list_names(missing)} {'is' if len(missing) == 1 else 'are'} missing. Fetch "
            f"{'it' if len(missing) == 1 else 'them'} from the machine that saved"
        )


def _product(mp_ranks: int, ranks: int) -> Iterable[tuple[int, int]]:
    return ((mp, rank) for mp in range(mp_ranks) for rank in range(ranks))


def _list_folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _list_names(names: list[str]) -> str:
    return first_text(names, _MOST_LISTED)
