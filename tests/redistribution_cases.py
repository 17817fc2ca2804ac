"""The movements of DTensors that PyTorch's own tests make, and some that it cannot.

Placements are short words: `R`, `S0`, `P` (a partial sum), `SS0:2` (a strided shard of dimension 0
with split factor 2).
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

Shape = tuple[int, ...]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Case:
    """A tensor of `shape` on a mesh of `mesh` ranks, from some placements to others."""

    mesh: Shape
    shape: Shape
    before: str
    after: str
    dtype: str = "float32"

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)


# How many of the pairs on 2x2x2 are redistributed one by one, where not all are.
SAMPLE = 60


def sampled(pairs: list[Pair]) -> list[Pair]:
    """Some of many pairs, always the same."""
    return random.Random(0).sample(pairs, SAMPLE)


def words(count: int, kinds: tuple[str, ...]) -> list[str]:
    return [" ".join(chosen) for chosen in itertools.product(kinds, repeat=count)]


def on_one_axis(ranks: int) -> list[Case]:
    mesh = (ranks,)
    found = []
    for rows in (12, 13, 14):
        found += [Case(mesh, (rows, 3), *pair) for pair in (("S0", "R"), ("R", "S0"), ("P", "S0"))]
        found += [Case(mesh, (3, rows), *pair) for pair in (("S1", "R"), ("R", "S1"), ("P", "S1"))]
    for shape in ((8, 8), (8, 8, 8), (8, 5), (5, 8), (5, 5)):
        for dtype in ("float32", "complex64"):
            found += [Case(mesh, shape, "S0", "S1", dtype), Case(mesh, shape, "S1", "S0", dtype)]
    found += [Case(mesh, shape, "S0", "R") for shape in ((10, 5), (9, 5), (3, 5), (1, 3))]
    found += [Case(mesh, (6, 4), "P", "R"), Case(mesh, (6, 4), "R", "P")]
    found += [Case((1, ranks), (7, 5), "S0 S1", "R S0"), Case((ranks, 1), (7, 5), "S1 S0", "S0 R")]
    return found


ON_2X2 = [
    Case((2, 2), shape, before, after)
    for shape in ((8, 8), (5, 7))
    for before, after in (("S0 S1", "S0 S0"), ("S0 S1", "S1 S0"), ("S0 S0", "S1 S1"))
] + [
    Case((2, 2), shape, before, after)
    for shape in ((8, 8, 8), (5, 6, 7))
    for before, after in (("S0 S2", "S1 S0"), ("S1 S1", "S1 S2"))
]

# What DTensor cannot cut this way, or not move; see `strided` and `orders` too.
STRIDED_ON_2X2 = [
    Case((2, 2), (7, 3), "SS0:2 S0", after) for after in ("R R", "S0 S0", "S1 S0", "S0 R")
]
STRIDED_ON_4X2 = [
    Case((4, 2), shape, "SS0:2 S0", after)
    for shape in ((16, 3), (17, 3))
    for after in ("R R", "S0 S0", "S0 S1")
]


def placement_pairs(axes: int) -> list[Pair]:
    """Between all placements of two dimensions, contributions on the source's side only."""
    before, after = words(axes, ("R", "S0", "S1", "P")), words(axes, ("R", "S0", "S1"))
    return list(itertools.product(before, after))


def on_eight(is_all: bool) -> list[Case]:
    """(16, 24) between all placements on 8, 4x2 and 2x2x2, and (8, 8, 8) on 2x2x2."""
    found = []
    for mesh in ((8,), (4, 2), (2, 2, 2)):
        pairs = placement_pairs(len(mesh))
        if len(mesh) == 3 and not is_all:
            pairs = sampled(pairs)
        found += [Case(mesh, (16, 24), *pair) for pair in pairs]
    for before, after in (
        ("S0 S0 S0", "S1 S1 S1"),
        ("S0 S1 S0", "S1 S0 S0"),
        ("S0 S1 S2", "S2 S1 S0"),
        ("S0 S0 S1", "S0 S1 S2"),
    ):
        found.append(Case((2, 2, 2), (8, 8, 8), before, after))
    return found


def plain_cases(ranks: int, is_all: bool = False) -> list[Case]:
    """The cases that DTensor can move as well; all of them, or a sample of the many."""
    found = on_one_axis(ranks)
    if ranks == 4:
        found += ON_2X2
    if ranks == 8:
        found += on_eight(is_all)
    return found


def strided_cases(ranks: int) -> list[Case]:
    """The cases of `_StridedShard`."""
    return {4: STRIDED_ON_2X2, 8: STRIDED_ON_4X2}.get(ranks, [])


def orders(axes: tuple[str, ...]) -> list[str]:
    """Every way to cut two dimensions over mesh axes, in any order, as our own text."""
    found = []
    for use in itertools.product((0, 1, None), repeat=len(axes)):
        by_dim = [[axis for axis, dim in zip(axes, use, strict=True) if dim == d] for d in (0, 1)]
        for first in itertools.permutations(by_dim[0]):
            for second in itertools.permutations(by_dim[1]):
                found.append(", ".join(" / ".join(dim) or "-" for dim in (first, second)))
    return found


def order_pairs(ranks: int, is_all: bool = False) -> list[tuple[Shape, str, str]]:
    """From each order of (17, 5) to each, on 2x2 and, all or a sample, on 2x2x2."""
    if ranks == 4:
        texts = orders(("x", "y"))
        return [((2, 2), *pair) for pair in itertools.product(texts, repeat=2)]
    if ranks == 8:
        texts = orders(("x", "y", "z"))
        pairs = list(itertools.product(texts, repeat=2))
        return [((2, 2, 2), *pair) for pair in (pairs if is_all else sampled(pairs))]
    return []
