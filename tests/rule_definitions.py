"""Definitions of the cut rules by their source systems, index by index.

No runs are used. `parts_of` returns for every part of a dimension the index at each local position,
as a list of `Place`s.

1. A rule that deals indices is the list of their owners, by the formula of its source.
2. A rule made of blocks applies the rule of a block to block after block.
3. A nested split splits positions, which are mapped through the part that is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from reshard.cut_rules import (
    Balanced,
    BlockCyclic,
    Blocks,
    Ceil,
    CutRule,
    Grouped,
    Halo,
    Heads,
    Joined,
    Nested,
    Padded,
    Pieces,
    Sizes,
    Strided,
    WholeBlocks,
    Windows,
    Zigzag,
)
from reshard.errors import RuleError

NO_ELEMENT = -1


class Place(NamedTuple):
    """A local position of a part: the index it holds (`NO_ELEMENT` for padding), and its role."""

    global_index: int
    role: str = "owned"


Part = list[Place]


def parts_of(rule: CutRule, length: int, parts: int) -> list[Part]:
    """Return the places of every part of a dimension of `length`, in local order.

    Raises:
        RuleError: a kind of rule this oracle has no definition of.

    >>> [[place.global_index for place in part] for part in parts_of(BlockCyclic(2), 7, 2)]
    [[0, 1, 4, 5], [2, 3, 6]]
    """
    # Each case is the formula of the rule's source, read literally.
    match rule:
        case Ceil():
            # As torch.chunk: equal numbers of units, the last parts shorter or empty.
            units = -(-length // rule.unit)
            units_each = max(-(-units // parts), 1)
            return _deal(parts, [i // rule.unit // units_each for i in range(length)])
        case Balanced():
            pieces = np.array_split(np.arange(length), parts)
            return [[Place(int(i)) for i in piece] for piece in pieces]
        case Sizes():
            return _deal(parts, [p for p, size in enumerate(rule.sizes) for _ in range(size)])
        case Windows():
            return [[Place(i) for i in range(start, stop)] for start, stop in rule.windows]
        case Heads():
            return _heads(rule.count, length, parts)
        case Strided():
            block = max(-(-length // rule.stride), 1)
            sizes = [min(block, length - start) for start in range(0, length, block)]
            return _blocks(sizes, [Ceil()] * len(sizes), parts)
        case Blocks():
            return _blocks(rule.sizes, [rule.rule] * len(rule.sizes), parts)
        case Joined():
            return _blocks(rule.sizes, rule.rules, parts)
        case Grouped():
            groups = parts_of(rule.rule, length // rule.size, parts)
            return [
                [
                    place
                    if place.global_index == NO_ELEMENT
                    else Place(place.global_index * rule.size + at, place.role)
                    for place in part
                    for at in range(rule.size)
                ]
                for part in groups
            ]
        case Pieces():
            owner = [
                p for block in rule.pieces for p, size in enumerate(block) for _ in range(size)
            ]
            return _deal(parts, owner)
        case WholeBlocks():
            each = max(-(-len(rule.sizes) // parts), 1)
            block_owner = [b // each for b in range(len(rule.sizes))]
            if rule.counts is not None:
                block_owner = [p for p, count in enumerate(rule.counts) for _ in range(count)]
            owner = [
                part
                for part, size in zip(block_owner, rule.sizes, strict=True)
                for _ in range(size)
            ]
            return _deal(parts, owner)
        case BlockCyclic():
            return _deal(parts, [(i // rule.block + rule.first) % parts for i in range(length)])
        case Zigzag():
            block = max(-(-length // (2 * parts)), 1)
            return _deal(
                parts, [min(i // block, 2 * parts - 1 - i // block) for i in range(length)]
            )
        case Padded():
            width = -(-length // (rule.multiple * parts)) * rule.multiple
            return [
                [
                    Place(i) if i < length else Place(NO_ELEMENT, "pad")
                    for i in range(part * width, (part + 1) * width)
                ]
                for part in range(parts)
            ]
        case Halo():
            inner = parts_of(rule.rule, length, parts)
            return [_with_halo(rule, part, length) for part in inner]
        case Nested():
            return nested_parts(rule.levels, length)
    raise RuleError(f"the oracle has no definition of {rule!r}; add it to `rule_definitions`")


def _deal(parts: int, owner: Iterable[int]) -> list[Part]:
    """Append index `i` to part `owner[i]`."""
    dealt: list[Part] = [[] for _ in range(parts)]
    for index, part in enumerate(owner):
        dealt[part].append(Place(index))
    return dealt


def _heads(count: int, length: int, parts: int) -> list[Part]:
    width = length // count
    heads = [[Place(i) for i in range(head * width, (head + 1) * width)] for head in range(count)]
    if parts > count:
        # More parts than heads: adjacent parts hold replicas of a head.
        return [heads[part * count // parts] for part in range(parts)]
    each = -(-count // parts)
    dealt: list[Part] = [[] for _ in range(parts)]
    for number, head in enumerate(heads):
        dealt[number // each] += head
    return dealt


def _blocks(sizes: Sequence[int], rules: Sequence[CutRule], parts: int) -> list[Part]:
    dealt: list[Part] = [[] for _ in range(parts)]
    start = 0
    for size, rule in zip(sizes, rules, strict=True):
        # Each part has its piece of every block, block after block.
        for whole, piece in zip(dealt, parts_of(rule, size, parts), strict=True):
            whole += [
                place if place.role == "pad" else Place(start + place.global_index, place.role)
                for place in piece
            ]
        start += size
    return dealt


def _with_halo(rule: Halo, part: Part, length: int) -> Part:
    if not part:
        return []
    inside = {place.global_index for place in part}
    role = "fresh halo" if rule.fresh else "halo"
    places: Part = []
    # A halo continues the range from the part's first to its last index.
    for index in range(min(inside) - rule.before, max(inside) + 1 + rule.after):
        if index in inside:
            places.append(Place(index))
        elif 0 <= index < length:
            places.append(Place(index, role))
        elif rule.padded_edges:
            places.append(Place(NO_ELEMENT, "pad"))
    return places


def nested_parts(levels: Sequence[tuple[CutRule, int]], length: int) -> list[Part]:
    """Return the parts of nested levels: each splits the local positions of the previous level."""
    current: list[Part] = [[Place(i) for i in range(length)]]
    for rule, count in levels:
        current = [
            [_see_through(outer, place) for place in inner]
            for outer in current
            for inner in parts_of(rule, len(outer), count)
        ]
    return current


def _see_through(outer: Part, place: Place) -> Place:
    """Return a place of an inner split as a place of the whole dimension.

    A copy of a copy is as old as the older of the two: it is fresh only if both are.
    """
    if place.role == "pad" or outer[place.global_index].role == "pad":
        return Place(NO_ELEMENT, "pad")
    roles = {place.role, outer[place.global_index].role}
    # In order of age: a stale copy of anything is stale.
    role = next(role for role in ("halo", "fresh halo", "owned") if role in roles)
    return Place(outer[place.global_index].global_index, role)
