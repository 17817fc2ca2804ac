"""Computability: whether ranks can compute with what they hold of an operator's tensors.

Each rank computes with its own shards, and the results are concatenated over columns or summed
over rows. The result is correct if, along the axes that shard an operator,

1. a rank holds the same units of all tensors that have them: query rows, output columns;
2. each unit is on exactly one rank: a unit on two ranks would be counted twice in the sum;
3. every rank holds equally many heads, if the units are heads;
4. of a member that units share, a rank holds exactly the parts that its units use, and each part
   is used by equally many units.

::

    40 query, 10 key_value heads over 4 ranks, each sharded by ceil

    query       0-9        10-19      20-29      30-39
    use         0-2        2-4        5-7        7-9
    key_value   0-2        3-5        6-8        9           rank 1 lacks its head 2

Source: tensor parallelism of attention and feed-forward layers, Shoeybi et al. 2019.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reshard.recipes.coupling.cut_marks import CutName
from reshard.recipes.coupling.held_units import HeldUnits, Ranges


class CutTensor(NamedTuple):
    """A tensor, or a block of it, of an operator: by what it is cut, and what ranks hold."""

    tensor: str
    name: CutName
    held: HeldUnits


def sizes_that_do(unit: int, others: Iterable[int]) -> tuple[int, ...]:
    """The numbers of ranks that heads can be cut for.

    Args:
        unit: how many units there are.
        others: how many of each other member.

    >>> sizes_that_do(40, [10])
    (1, 2, 5, 10, 20, 40)
    """
    found = []
    for ranks in range(1, unit + 1):
        each, rest = divmod(unit, ranks)
        shares = [unit // other for other in others if other <= unit]
        if not rest and all(each % share == 0 or share % each == 0 for share in shares):
            found.append(ranks)
    return tuple(found)


def find_mismatch(tensors: Sequence[CutTensor], *, is_unit: bool) -> str | None:
    """What is wrong with tensors of one member, or one cut, that ranks do not hold alike.

    `is_unit` for indices that are heads or the like.
    """
    for one in tensors:
        if one.held.also_cut is not None:
            return (
                f"dimension {one.held.also_cut} of {one.tensor} would be cut too, beside {one.name}"
            )
        if one.held.through is not None:
            rank, (start, stop) = one.held.through
            return (
                f"rank {rank} would hold {start}:{stop} of {one.tensor}, which cuts through what "
                f"belongs together ({one.name})"
            )
    first, *others = tensors
    for other in others:
        if other.held.key == first.held.key:
            continue
        for rank in sorted({*first.held.ranges, *other.held.ranges}):
            has, lacks = (one.held.ranges.get(rank, ()) for one in (first, other))
            if has != lacks:
                return (
                    f"rank {rank} would hold {_say(first.name, has, is_unit)} of {first.tensor}, "
                    f"and {_say(None, lacks, is_unit)} of {other.tensor}; both are computed with "
                    "together"
                )
    return None


def find_repetition(
    one: CutTensor, units: int, groups: Iterable[Sequence[int]], *, is_unit: bool
) -> str | None:
    """What is wrong where a unit is not on exactly one rank of each group that holds any."""
    for group in groups:
        holders = [rank for rank in group if rank in one.held.ranges]
        if not holders:
            continue
        # In the order of units: each stretch begins where the one before it ends.
        stretches = sorted((*part, rank) for rank in holders for part in one.held.ranges[rank])
        reached, last = 0, holders[0]
        for start, stop, rank in [*stretches, (units, units, holders[-1])]:
            if start < reached:
                twice = ((start, min(stop, reached)),)
                return (
                    f"ranks {last} and {rank} would both hold {_say(one.name, twice, is_unit)} of "
                    f"{one.tensor}, which would count twice in the sum over ranks"
                )
            if start > reached:
                return (
                    f"no rank of {_list_ranks(group)} would hold "
                    f"{_say(one.name, ((reached, start),), is_unit)} of {one.tensor}"
                )
            reached, last = stop, rank
    return None


def find_uneven(one: CutTensor, groups: Iterable[Sequence[int]]) -> str | None:
    """What is wrong where ranks of a group that holds any do not hold equally many units."""
    for group in groups:
        counts = {rank: _count(one.held.ranges.get(rank, ())) for rank in group}
        if not any(counts.values()):
            continue
        few, many = min(group, key=counts.__getitem__), max(group, key=counts.__getitem__)
        if counts[few] != counts[many]:
            return (
                f"rank {many} would hold {counts[many]} of {one.name} of {one.tensor}, and rank "
                f"{few} {counts[few]}; every rank needs equally many"
            )
    return None


def find_unshared(unit: CutTensor, shared: CutTensor, units: int, count: int) -> str | None:
    """What is wrong with what ranks hold of a member that units share, or have several of.

    Args:
        unit, shared: tensors of the unit and of the member.
        units, count: how many there are of each.
    """
    # Ranks that hold the same, such as copies, are asked once.
    ranks: dict[tuple[Ranges, Ranges], int] = {}
    for rank in sorted({*unit.held.ranges, *shared.held.ranges}):
        both = (unit.held.ranges.get(rank, ()), shared.held.ranges.get(rank, ()))
        ranks.setdefault(both, rank)
    for (has, held), rank in ranks.items():
        used = _find_used(has, units, count)
        if held != used:
            return (
                f"rank {rank} would hold {_say(shared.name, held)} of {shared.tensor}, and its "
                f"{_say(unit.name, has)} of {unit.tensor} {_say(None, used, verb='use')}"
            )
    for (has, _), rank in ranks.items():
        share = max(units // count, 1)
        uses = Counter(one // share for start, stop in has for one in range(start, stop))
        few, many = min(uses, key=uses.__getitem__), max(uses, key=uses.__getitem__)
        if uses[few] != uses[many]:
            return (
                f"of the {_say(unit.name, has)} of {unit.tensor} on rank {rank}, {uses[many]} use "
                f"{shared.name} {many} and {uses[few]} use {few}; all that a rank holds must be "
                "used by equally many"
            )
    return None


def _find_used(has: Ranges, units: int, count: int) -> Ranges:
    """What units use of a member that there are `count` of, in the order of the units."""
    if count >= units:
        return tuple((start * (count // units), stop * (count // units)) for start, stop in has)
    share = units // count
    used: list[tuple[int, int]] = []
    for start, stop in has:
        low, high = start // share, (stop - 1) // share + 1
        # Stretches that use one together, or that follow one another.
        if used and used[-1][0] <= low <= used[-1][1]:
            low, high = used.pop()[0], max(high, low)
        used.append((low, high))
    return tuple(used)


def _count(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _list_ranks(ranks: Sequence[int]) -> str:
    return f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def _say(name: CutName | None, ranges: Ranges, is_unit: bool = True, verb: str = "") -> str:
    """`heads.query 10-19`, `feed_forward 0:4`, or `no heads.query`."""
    if not ranges:
        return f"{verb} none".strip() if name is None else f"no {name}"
    words = []
    for start, stop in ranges[:3]:
        last = f"{start}-{stop - 1}" if stop - start > 1 else str(start)
        words.append(last if is_unit else f"{start}:{stop}")
    text = ", ".join(words) + (f" and {len(ranges) - 3} stretches more" if len(ranges) > 3 else "")
    words = [verb, "" if name is None else str(name), text]
    return " ".join(word for word in words if word)
