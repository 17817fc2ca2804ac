"""Experts of DeepSpeed's MoE layers: which ranks have which, in files and in flat buffers.

Every expert's weights are a file, under names with the expert's number in the whole model. In flat
buffers, a group of experts' parameters is cut over the ranks that have the same experts, and names
have the expert's number on its rank::

    4 ranks, 2 of expert parallelism      rank 0  rank 1  rank 2  rank 3
    experts of a layer of 4                0 1     2 3     0 1     2 3
    partition of that group                first   first   second  second
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reshard.checkpoint.formats.deepspeed.files import SavedFiles
from reshard.checkpoint.formats.deepspeed.saved_states import Shape, read_tensors
from reshard.errors import UsageError

_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,7})(\..*)", re.DOTALL)


@dataclass(frozen=True)
class ExpertRanks:
    """Which of `ranks` have the same experts: `sets` of them have different ones.

    `is_data_first` numbers the ranks of one set of experts before the next set's.

    >>> ExpertRanks(4, 2).members(1), ExpertRanks(4, 2, is_data_first=True).members(1)
    ((1, 3), (2, 3))
    """

    ranks: int
    sets: int = 1
    is_data_first: bool = False

    def members(self, number: int) -> tuple[int, ...]:
        """The ranks of a set."""
        each = self.ranks // self.sets
        if self.is_data_first:
            return tuple(range(number * each, (number + 1) * each))
        return tuple(range(number, self.sets * each, self.sets))


@dataclass(frozen=True)
class GroupCopy:
    """A group of parameters on the ranks that have the same ones, in the order of its partitions.

    `names` are those of the whole model.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]


def spread(
    names: list[str], partitions: int, ranks: int, is_data_first: bool = False
) -> tuple[GroupCopy, ...]:
    """The copies of a group in `partitions` among `ranks`: one for each set of experts.

    `is_data_first` numbers the ranks of one set of experts before the next set's.

    >>> name = "moe.deepspeed_moe.experts.deepspeed_experts.0.up"
    >>> for copy in spread([name], 2, 4):
    ...     print(copy.ranks, copy.names[0][-4:])
    (0, 2) 0.up
    (1, 3) 1.up
    """
    sets = max(1, ranks // max(1, partitions))
    shared = ExpertRanks(ranks, sets, is_data_first)
    if sets == 1:
        return (GroupCopy(tuple(range(ranks)), tuple(names)),)
    local: dict[str, int] = {}
    for name in names:
        if match := _EXPERT.fullmatch(name):
            local[match[1]] = max(local.get(match[1], 0), int(match[2]) + 1)
    found = []
    for number in range(sets):
        own = tuple(_move(name, number * local.get(_layer(name), 0)) for name in names)
        found.append(GroupCopy(shared.members(number), own))
    return tuple(found)


def deal(names: Sequence[str], shared: ExpertRanks) -> tuple[GroupCopy, ...]:
    """The copies of a group of all experts' parameters: one for each set of ranks.

    Each has its experts of a layer, then those of the next, as a model has them.

    Raises:
        UsageError: a layer whose experts cannot be shared out evenly.

    >>> of = "moe.deepspeed_moe.experts.deepspeed_experts."
    >>> names = [of + "0.up", of + "2.up", of + "1.up", of + "3.up"]
    >>> [[n[-4:] for n in copy.names] for copy in deal(names, ExpertRanks(4, 2))]
    [['0.up', '1.up'], ['2.up', '3.up']]
    """
    layers = list_layers(names)
    found: list[list[str]] = [[] for _ in range(shared.sets)]
    for layer, experts in layers.items():
        if len(experts) % shared.sets or sorted(experts) != [*range(len(experts))]:
            raise UsageError(
                f"{layer}* has the experts {', '.join(map(str, sorted(experts)[:8]))} "
                f"({len(experts)} in all), which {shared.sets} sets of ranks cannot share out "
                "evenly; give another number for `ep` in --to"
            )
        local = len(experts) // shared.sets
        for expert in sorted(experts):
            found[expert // local] += experts[expert]
    return tuple(GroupCopy(shared.members(number), tuple(own)) for number, own in enumerate(found))


def list_layers(names: Iterable[str]) -> dict[str, dict[int, list[str]]]:
    """The parameters of each expert of each layer, by what stands before their numbers."""
    layers: dict[str, dict[int, list[str]]] = {}
    for name in names:
        if match := _EXPERT.fullmatch(name):
            layers.setdefault(match[1], {}).setdefault(int(match[2]), []).append(name)
    return layers


def local_names(copies: Sequence[GroupCopy]) -> list[dict[str, str]]:
    """The names of each copy's parameters on its ranks, by those of the whole model."""
    found = []
    for copy in copies:
        least = {layer: min(experts) for layer, experts in list_layers(copy.names).items()}
        found.append({name: _move(name, -least.get(_layer(name), 0)) for name in copy.names})
    return found


def is_expert(name: str) -> bool:
    """Whether a parameter is an expert's."""
    return _EXPERT.fullmatch(name) is not None


def _layer(name: str) -> str:
    match = _EXPERT.fullmatch(name)
    return match[1] if match else ""


def _move(name: str, by: int) -> str:
    """An expert's parameter, whose expert has a number more by so much."""
    match = _EXPERT.fullmatch(name)
    return f"{match[1]}{int(match[2]) + by}{match[3]}" if match else name


def list_local_weights(
    saved: SavedFiles, dense: list[tuple[str, Shape]], rank: int, mp: int
) -> list[tuple[str, Shape]]:
    """All weights of an expert-parallel rank in the order of the model, experts' behind their gate.

    `dense` are those that all ranks have. The ranks share out the experts of a layer evenly.
    """
    ranks = 1 + max((rank for rank, own in saved.expert_optimizers if own == mp), default=0)
    layers: dict[int, list[int]] = {}
    for layer, expert, own in sorted(saved.experts):
        if own == mp:
            layers.setdefault(layer, []).append(expert)
    found = [*dense]
    for layer, numbers in layers.items():
        local = len(numbers) // ranks
        for expert in numbers[rank * local : (rank + 1) * local]:
            tensors = read_tensors(saved.folder, saved.experts[layer, expert, mp])
            for name, archived in tensors.items():
                match = _EXPERT.fullmatch(name)
                before = match[1].removesuffix("experts.deepspeed_experts.") if match else ""
                places = [i for i, (one, _) in enumerate(found) if one.startswith(before)]
                at = places[-1] + 1 if places else len(found)
                found.insert(at, (name, archived.shape))
    return found
