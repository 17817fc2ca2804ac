"""The positions of parameters in ZeRO's flat buffers, and the ranks that share experts.

Stages 1 and 2 concatenate the parameters of a group, pad the end, and split the whole into equal
partitions, a partition for each rank::

    | w w w w w w w | b b b | v v v v . |      group of 3 parameters, 16 elements with the padding
    |    rank 0     |      rank 1      |      partitions of 8 elements

Stage 3 splits each parameter into equal parts of `ceil(elements / ranks)`; a rank has the
concatenated parts of a group of parameters::

    | w w w w | b b | v v |                   rank 0
    | w w w . | b . | v v |                   rank 1

A parameter's pieces are regions of its elements, flattened; the container is a rank, and the
offset counts from the start of its buffer.

Experts are parallel over some of the data-parallel ranks. Every expert's weights are a file, under
names with the expert's number in the whole model. In flat buffers, a group of experts' parameters
is partitioned over the ranks that have the same experts, and names have the expert's number on its
rank::

    4 ranks, 2 of expert parallelism      rank 0  rank 1  rank 2  rank 3
    experts of a layer of 4                0 1     2 3     0 1     2 3
    partition of that group                first   first   second  second

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, and the files of DeepSpeed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reshard.errors import UsageError
from reshard.geometry.regions import Region

# 4 bytes of a 16-bit type, to which DeepSpeed aligns what NCCL sends.
#: DeepSpeed's partitions are multiples of this many elements.
ALIGNMENT = 2
#: With `parameter_alignment` parameters begin at multiples of this many bytes.
PARAMETER_ALIGNMENT_BYTES = 16


def partition_size(elements: int, ranks: int) -> int:
    """Return the size of each rank's partition of a group of `elements`, inner paddings included.

    >>> partition_size(583, 2), partition_size(3, 4)
    (292, 2)
    """
    alignment = ALIGNMENT * ranks
    return math.ceil(elements / alignment) * alignment // ranks


def parameter_paddings(elements: Sequence[int], itemsize_bytes: int) -> list[int]:
    """Return the padding after each parameter but the last under `parameter_alignment`.

    >>> parameter_paddings([3, 8, 1], itemsize_bytes=2)
    [5, 0, 0]
    """
    alignment = PARAMETER_ALIGNMENT_BYTES // math.gcd(PARAMETER_ALIGNMENT_BYTES, itemsize_bytes)
    paddings, at = [], 0
    for count in elements:
        at += count
        paddings.append(-at % alignment)
        at += paddings[-1]
    return [*paddings[:-1], 0] if paddings else []


def flat_pieces(
    elements: Sequence[int], paddings: Sequence[int], size: int
) -> list[tuple[Region, ...]]:
    """Return the pieces of each parameter of a group in partitions of `size`, stages 1 and 2.

    >>> [str(piece) for piece in flat_pieces([7, 3, 4], [0, 0, 0], 8)[1]]
    ['[0:1] at 7 of 0', '[1:3] at 0 of 1']
    """
    group, at = [], 0
    for count, padding in zip(elements, paddings, strict=True):
        pieces = []
        begin, end = at, at + count
        # A parameter may extend over the partitions of several ranks.
        while begin < end:
            rank = begin // size
            stop = min(end, (rank + 1) * size)
            offset = begin - rank * size
            pieces.append(Region((begin - at,), (stop - at,), rank, offset, (1,)))
            begin = stop
        group.append(tuple(pieces))
        at = end + padding
    return group


def part_size(elements: int, ranks: int) -> int:
    """Return the size of each rank's part of a parameter, stage 3."""
    return -(-elements // ranks)


def own_pieces(elements: int, ranks: int, offset: int) -> tuple[Region, ...]:
    """Return the pieces of a parameter of stage 3 whose part is at `offset` on every rank.

    >>> [str(piece) for piece in own_pieces(5, 2, 10)]
    ['[0:3] at 10 of 0', '[3:5] at 10 of 1']
    """
    size = part_size(elements, ranks)
    if not size:
        return ()
    # The last ranks of a short parameter have only padding.
    return tuple(
        Region((rank * size,), (min((rank + 1) * size, elements),), rank, offset, (1,))
        for rank in range(-(-elements // size))
    )


def deal_round_robin(count: int, ranks: int) -> list[int]:
    """Return the order of a group's parameters under `round_robin_gradients`.

    >>> deal_round_robin(5, 2)
    [0, 2, 4, 1, 3]
    """
    # Backward computes neighbours one after the other: dealt out, their gradients are copied to
    # host memory by different ranks at the same time.
    return [number for rank in range(ranks) for number in range(rank, count, ranks)]


def sub_groups(parts: Sequence[int], most: int) -> list[list[int]]:
    """Return the parameters of each sub-group of stage 3, which ends at `most` elements of parts.

    >>> sub_groups([4, 3, 5, 2], 6)
    [[0, 1], [2, 3]]
    """
    # As DeepSpeed's loop does: a sub-group is closed by the parameter that fills it and belongs to
    # it, so that sub-groups may be larger than asked for.
    if most >= sum(parts):
        return [[*range(len(parts))]]
    groups: list[list[int]] = []
    group: list[int] = []
    filled = 0
    for number, part in enumerate(parts):
        group.append(number)
        filled += part
        if filled >= most or number == len(parts) - 1:
            groups.append(group)
            group, filled = [], 0
    return groups


_EXPERT = r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,7})(\..*)"


class GroupCopy(NamedTuple):
    """A group of parameters and the ranks that have them, in the order of its partitions.

    `names` are the parameters' names in the whole model.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]


def expert_sets(ranks: int, sets: int, is_data_first: bool = False) -> tuple[tuple[int, ...], ...]:
    """Return the `sets` of ranks that have the same experts.

    With `is_data_first` the ranks of a set have consecutive numbers.

    >>> expert_sets(4, 2), expert_sets(4, 2, is_data_first=True)
    (((0, 2), (1, 3)), ((0, 1), (2, 3)))
    """
    each = ranks // sets
    if is_data_first:
        return tuple(tuple(range(n * each, (n + 1) * each)) for n in range(sets))
    return tuple(tuple(range(n, sets * each, sets)) for n in range(sets))


def spread(
    names: Sequence[str], partitions: int, ranks: int, is_data_first: bool = False
) -> tuple[GroupCopy, ...]:
    """Return the copies of a group in `partitions` among `ranks`, a copy for each set of experts.

    With `is_data_first` the ranks of a set have consecutive numbers.

    >>> name = "moe.deepspeed_moe.experts.deepspeed_experts.0.up"
    >>> for copy in spread([name], 2, 4):
    ...     print(copy.ranks, copy.names[0][-4:])
    (0, 2) 0.up
    (1, 3) 1.up
    """
    sets = max(1, ranks // max(1, partitions))
    if sets == 1:
        return (GroupCopy(tuple(range(ranks)), tuple(names)),)
    # A rank's file has the numbers that experts have on it.
    local = {layer: max(experts) + 1 for layer, experts in list_layers(names).items()}
    copies = []
    for number, members in enumerate(expert_sets(ranks, sets, is_data_first)):
        own = tuple(_move(name, number * local.get(_layer(name), 0)) for name in names)
        copies.append(GroupCopy(members, own))
    return tuple(copies)


def deal(names: Sequence[str], sets: Sequence[tuple[int, ...]]) -> tuple[GroupCopy, ...]:
    """Return the copies of a group of all experts' parameters, a copy for each set of ranks.

    Each has its experts layer by layer, as in a model.

    Raises:
        UsageError: a layer whose experts cannot be divided evenly.

    >>> of = "moe.deepspeed_moe.experts.deepspeed_experts."
    >>> names = [of + "0.up", of + "2.up", of + "1.up", of + "3.up"]
    >>> [[n[-4:] for n in copy.names] for copy in deal(names, expert_sets(4, 2))]
    [['0.up', '1.up'], ['2.up', '3.up']]
    """
    by_set: list[list[str]] = [[] for _ in sets]
    for layer, experts in list_layers(names).items():
        if len(experts) % len(sets) or sorted(experts) != [*range(len(experts))]:
            raise UsageError(
                f"{layer}* has the experts {', '.join(map(str, sorted(experts)[:8]))} "
                f"({len(experts)} in all), which {len(sets)} sets of ranks cannot share out "
                "evenly; give another number for `ep` in --to"
            )
        local = len(experts) // len(sets)
        for expert in sorted(experts):
            by_set[expert // local] += experts[expert]
    return tuple(GroupCopy(*pair) for pair in zip(sets, map(tuple, by_set), strict=True))


def list_layers(names: Iterable[str]) -> dict[str, dict[int, list[str]]]:
    """Return the parameters of each expert of each layer, by the part of names before it."""
    layers: dict[str, dict[int, list[str]]] = {}
    for name in names:
        if match := match_expert(name):
            layers.setdefault(match[1], {}).setdefault(int(match[2]), []).append(name)
    return layers


def local_names(copies: Sequence[GroupCopy]) -> list[dict[str, str]]:
    """Return the names of each copy's parameters on its ranks, by names in the whole model."""
    renamed = []
    for copy in copies:
        least = {layer: min(experts) for layer, experts in list_layers(copy.names).items()}
        renamed.append({name: _move(name, -least.get(_layer(name), 0)) for name in copy.names})
    return renamed


def match_expert(name: str) -> re.Match[str] | None:
    """Match a parameter of an expert: the text before the expert's number, the number, the rest."""
    return re.fullmatch(_EXPERT, name, re.DOTALL)


def _layer(name: str) -> str:
    match = match_expert(name)
    return match[1] if match else ""


def _move(name: str, by: int) -> str:
    """Return the name of the same parameter of the expert whose number is larger by `by`."""
    match = match_expert(name)
    return f"{match[1]}{int(match[2]) + by}{match[3]}" if match else name
