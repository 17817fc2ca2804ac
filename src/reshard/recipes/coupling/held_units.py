"""Held units: which units of a cut each rank has of one tensor.

A dimension, or a block of it, is made of equal units: heads, or single indices. They are listed
for each rank, in the order of its memory::

    8 rows in 4 heads over 2 ranks      rank 0: heads 0-1       rank 1: heads 2-3

1. The axes that only divide storage are taken out of the sharding before.
2. The runs of a rank's part that lie in the block are brought to its beginning, and joined.
3. Both ends of each are divided by the length of a unit; where that leaves a rest, the unit is cut
   through.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import cached_property

from reshard.layout import Layout
from reshard.runs import PAD

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class HeldUnits:
    """The units of a tensor's block on each rank that has any.

    Attributes:
        ranges: by rank, stretches `(start, stop)` of units in the order of its memory.
        through: a rank and the indices `(start, stop)` of it that are no whole units; or None.
        also_cut: another dimension that is cut, and should not be; or None.
    """

    ranges: dict[int, Ranges]
    through: tuple[int, tuple[int, int]] | None = None
    also_cut: int | None = None

    @cached_property
    def key(self) -> frozenset[tuple[int, Ranges]]:
        """Equal for what is held alike."""
        return frozenset(self.ranges.items())


def held_units(
    layout: Layout,
    dimension: int,
    block: tuple[int, int],
    unit: int,
    ranks: Container[int] | None = None,
) -> HeldUnits:
    """What each rank has of the block `(start, stop)` of a dimension, in units of `unit` indices.

    Other ranks than `ranks`, if given, are left out.

    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.sharding_text import spec
    >>> rows = spec(DeviceMesh.of(tp=2), "tp, -").layout((8, 3))
    >>> held_units(rows, 0, (0, 8), 2).ranges
    {0: ((0, 2),), 1: ((2, 4),)}
    >>> held_units(rows, 0, (0, 8), 8).through
    (0, (0, 4))
    """
    table = layout.tables[dimension]
    of_part: dict[int, Ranges] = {}
    ranges: dict[int, list[tuple[int, int]]] = {}
    through = None
    parts = layout.cell_part[:, dimension].tolist()
    for rank, part in zip(layout.cell_slot.tolist(), parts, strict=True):
        if ranks is not None and rank not in ranks:
            continue
        if part not in of_part:
            runs = [(a, b) for a, b, _, role in table.runs_of(part) if role != PAD]
            of_part[part] = _join_ranges(_bring_into_block(runs, block))
        for start, stop in of_part[part]:
            if through is None and (start % unit or stop % unit):
                through = (rank, (start, stop))
            ranges.setdefault(rank, []).append((start // unit, stop // unit))
    return HeldUnits({rank: tuple(found) for rank, found in ranges.items()}, through)


def _bring_into_block(
    runs: Iterable[tuple[int, int]], block: tuple[int, int]
) -> Iterable[tuple[int, int]]:
    first, last = block
    for start, stop in runs:
        if max(start, first) < min(stop, last):
            yield max(start, first) - first, min(stop, last) - first


def _join_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Those that follow one another as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)
