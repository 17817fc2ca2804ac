"""Differences between two sets of layouts: those of a recipe, and those that an engine reads.

A tensor's layouts agree if every rank holds the same elements in both, whatever their order and
padding.

1. A rank holds a few products of stretches. Two such sets are equal if they have as
   many elements as they share.
2. Layouts are interned and few, so each pair is compared once, however many tensors have it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from reshard.layout import Layout
from reshard.recipes.engine_layouts.document import split_numbers
from reshard.recipes.engine_layouts.source_layouts import Product, Stretches, unite
from reshard.runs import OWNED


class LayoutDifference(NamedTuple):
    """A pattern of names, the first tensor of it that differs and how, and how many there are.

    `ours` and `theirs` are the parts of it that the rank `rank`, the first of `ranks`, holds.
    """

    pattern: str
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    ours: str
    theirs: str

    @property
    def rank(self) -> int:
        """The first rank with a difference."""
        return self.ranks[0]


def list_differences(
    ours: Mapping[str, Layout], theirs: Mapping[str, Layout]
) -> list[LayoutDifference]:
    """Return the tensors of both whose layouts differ, by patterns of their names.

    >>> from reshard import DeviceMesh, spec
    >>> mesh = DeviceMesh.of(tp=2)
    >>> rows, columns = (spec(mesh, text).layout((4, 4)) for text in ("tp, -", "-, tp"))
    >>> found = list_differences({"0.w": rows, "1.w": rows}, {"0.w": rows, "1.w": columns})
    >>> found[0].pattern, found[0].names, found[0].ranks
    ('*.w', ('1.w',), (0, 1))
    >>> found[0].ours, found[0].theirs
    ('[0:2, 0:4]', '[0:4, 0:2]')
    """
    groups: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, layout in ours.items():
        if name not in theirs:
            continue
        ranks = _find_differing_ranks(layout, theirs[name])
        if ranks:
            pattern = split_numbers(name)[0].replace("{}", "*")
            groups.setdefault(pattern, []).append((name, ranks))
    result = []
    for pattern, members in groups.items():
        name, ranks = members[0]
        texts = (_holding_text(side[name], ranks[0]) for side in (ours, theirs))
        names = tuple(name for name, _ in members)
        result.append(LayoutDifference(pattern, names, ranks, *texts))
    return result


@lru_cache(maxsize=1 << 14)
def _find_differing_ranks(first: Layout, second: Layout) -> tuple[int, ...]:
    """Return the ranks that do not hold the same elements in both."""
    if first is second:
        return ()
    ranks = range(max(first.slots, second.slots))
    return tuple(
        rank for rank in ranks if not _are_same(_holding(first, rank), _holding(second, rank))
    )


def _are_same(first: tuple[Product, ...], second: tuple[Product, ...]) -> bool:
    if first == second:
        return True
    # Products of a side share no element, so shared elements are counted pair by pair.
    shared = sum(_count_shared(a, b) for a in first for b in second)
    return shared == sum(map(_count, first)) == sum(map(_count, second))


def _count(product: Product) -> int:
    return math.prod(sum(stop - start for start, stop in stretches) for stretches in product)


def _count_shared(first: Product, second: Product) -> int:
    return math.prod(
        sum(max(0, min(b, d) - max(a, c)) for a, b in ours for c, d in theirs)
        for ours, theirs in zip(first, second, strict=True)
    )


@lru_cache(maxsize=1 << 16)
def _holding(layout: Layout, rank: int) -> tuple[Product, ...]:
    """Return the elements that a rank holds, without padding and copies of neighbours."""
    if rank >= layout.slots:
        return ()
    products: list[Product] = []
    for cell in layout.cells_of(rank):
        product: list[Stretches] = []
        for runs in layout.cell_runs(cell):
            owned = sorted((start, stop) for start, stop, _, role in runs if role == OWNED)
            (joined,) = unite([((stretch,),) for stretch in owned])[0] if owned else ((),)
            product.append(joined)
        if all(product):
            products.append(tuple(product))
    return unite(products)


def _holding_text(layout: Layout, rank: int) -> str:
    """Describe the elements that a rank holds, briefly."""
    products = _holding(layout, rank)
    if not products:
        return "nothing"
    if products == (tuple(((0, size),) for size in layout.shape),):
        return "all of it"
    boxes = []
    for product in products[:2]:
        dims = []
        for stretches in product:
            shown = [f"{start}:{stop}" for start, stop in stretches[:3]]
            dims.append(" ".join([*shown, *(["..."] if len(stretches) > 3 else [])]))
        boxes.append(f"[{', '.join(dims)}]")
    return " and ".join([*boxes, *(["more"] if len(products) > 2 else [])])
