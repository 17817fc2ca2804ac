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
from collections.abc import Mapping
from dataclasses import dataclass

from reshard.checkpoint.formats.deepspeed.files import SavedFiles
from reshard.checkpoint.formats.deepspeed.saved_states import Shape, read_tensors

_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,7})(\..*)", re.DOTALL)


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
    if sets == 1:
        return (GroupCopy(tuple(range(ranks)), tuple(names)),)
    local: dict[str, int] = {}
    for name in names:
        if match := _EXPERT.fullmatch(name):
            local[match[1]] = max(local.get(match[1], 0), int(match[2]) + 1)
    found = []
    for number in range(sets):
        if is_data_first:
            own = range(number * partitions, (number + 1) * partitions)
        else:
            own = range(number, sets * partitions, sets)
        found.append(GroupCopy(tuple(own), tuple(_globalize(n, number, local) for n in names)))
    return tuple(found)


def is_expert(name: str) -> bool:
    """Whether a parameter is an expert's."""
    return _EXPERT.fullmatch(name) is not None


def _globalize(name: str, number: int, local: Mapping[str, int]) -> str:
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}{number * local[match[1]] + int(match[2])}{match[3]}"


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
