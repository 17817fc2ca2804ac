"""The folders of Megatron's ranks: one for each place of model parallelism.

    iter_0002000/mp_rank_01_003_000/      tensor-parallel rank 1, stage 3, expert-parallel rank 0
        model_optim_rng.pt     weights, and the state of an optimizer that is not distributed
        distrib_optim.pt       the state of a distributed one, of all data-parallel ranks

A number is there for the stage where there are several, and one for experts where these are
parallel: with two numbers, the arguments in the files say which the second is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from reshard.errors import CheckpointError, FormatError

FORMAT_NAME = "megatron-legacy"
MODEL_NAMES = ("model_optim_rng.pt", "model_rng.pt")
OPTIMIZER_NAME = "distrib_optim.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3}))?(?:_(\d{3}))?")


class RankPlace(NamedTuple):
    """The place of a rank in tensor, pipeline and expert parallelism; `vp` is a chunk of it."""

    tp: int = 0
    pp: int = 0
    ep: int = 0
    vp: int = 0


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The sizes of model parallelism; `vp` is how many chunks of the model a stage has."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vp: int = 1

    def __str__(self) -> str:
        return f"tp {self.tp}, pp {self.pp}, ep {self.ep}, etp {self.etp}, vp {self.vp}"

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any], label: str) -> Parallelism:
        """The sizes that Megatron's arguments say; `label` names their file.

        Raises FormatError for what is no size.
        """

        def size(name: str, usual: int) -> int:
            found = arguments.get(name)
            if found is None:
                return usual
            if type(found) is not int or not 1 <= found <= 1 << 16:
                raise FormatError(f"{label}: args.{name} is {found!r}, expected a number from 1 on")
            return found

        tp = size("tensor_model_parallel_size", 1)
        return cls(
            tp,
            size("pipeline_model_parallel_size", 1),
            size("expert_model_parallel_size", 1),
            size("expert_tensor_parallel_size", tp),
            size("virtual_pipeline_model_parallel_size", 1),
        )

    def folder_name(self, place: RankPlace) -> str:
        """The name of a rank's folder.

        >>> Parallelism(tp=2, pp=4).folder_name(RankPlace(1, 3))
        'mp_rank_01_003'
        """
        name = f"mp_rank_{place.tp:02d}"
        if self.pp > 1:
            name += f"_{place.pp:03d}"
        return f"{name}_{place.ep:03d}" if self.ep > 1 else name

    def places(self) -> list[RankPlace]:
        """The places that have a folder, in the order of ranks: tp first, pp last."""
        found = [
            RankPlace(tp, pp, ep)
            for pp in range(self.pp)
            for ep in range(self.ep)
            for tp in range(self.tp)
        ]
        if self.etp == self.tp or self.ep == 1:
            return found
        # Experts are on the ranks of several tensor-parallel ones: these move together.
        return [one for one in found if self._shares_rank(one)]

    def _shares_rank(self, place: RankPlace) -> bool:
        """Whether a rank can have both numbers: ranks are counted through either grid."""
        period = self.ep * self.etp
        return any(
            n % self.tp == place.tp and n // self.etp % self.ep == place.ep
            for n in range(max(period, self.tp) * min(self.tp, period))
        )


def list_rank_folders(folder: Path) -> dict[str, tuple[int, ...]]:
    """The folders of ranks, with the numbers in their names."""
    found = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _FOLDER.fullmatch(path.name)
        if match is not None and path.is_dir():
            found[path.name] = tuple(int(number) for number in match.groups() if number)
    return found


def find_model_file(folder: Path) -> Path:
    """The file of a rank. Raises CheckpointError where there is none."""
    for name in MODEL_NAMES:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(
        f"{folder / MODEL_NAMES[0]} is missing; this rank's part of the save is not there, fetch it"
    )


def check_complete(folder: Path, sizes: Parallelism) -> None:
    """Raise CheckpointError for ranks whose folders are missing, by their places."""
    there = list_rank_folders(folder)
    missing = [one for one in sizes.places() if sizes.folder_name(one) not in there]
    if missing:
        first = missing[0]
        raise CheckpointError(
            f"{folder / sizes.folder_name(first)} is missing, of tensor-parallel rank {first.tp}, "
            f"stage {first.pp}, expert-parallel rank {first.ep}"
            f"{f', and {len(missing) - 1} more' if missing[1:] else ''}; the arguments say "
            f"tp {sizes.tp}, pp {sizes.pp}, ep {sizes.ep}. Fetch it, the checkpoint is incomplete"
        )
    names = [sizes.folder_name(one) for one in sizes.places()]
    without = [name for name in names if not (folder / name / OPTIMIZER_NAME).is_file()]
    if without and len(without) < len(names):
        raise CheckpointError(
            f"{folder / without[0] / OPTIMIZER_NAME} is missing, which {len(names) - len(without)} "
            "other ranks have; fetch it, or take it out of all of them for the weights alone"
        )
