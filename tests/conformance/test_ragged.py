"""Ragged shards, as veScale and FSDP2 have them: leading dimensions flattened, cut in units.

A rank has as many units as `local_units` says; a unit is the flattened leading dimensions over
the sum of all units. Where a range begins and ends is entered by hand.
"""

from __future__ import annotations

import itertools
import math

import pytest

import reshard
from conformance.checked_movement import Side, check
from reshard.errors import LayoutError
from reshard.notation.ragged import parse_ragged

RANKS = 4
Units = tuple[int, ...]

# Of each shape: where the four ranks' elements begin and end, and over how many leading
# dimensions the units divide.
SMALL = (2, 64)
SMALL_EDGES: dict[Units, tuple[int, ...]] = {
    (1, 1, 0, 0): (0, 64, 128, 128, 128),
    (21, 21, 22, 0): (0, 42, 84, 128, 128),
}
SMALL_DIMS = {(1, 1, 0, 0): (1, 2), (21, 21, 22, 0): (2,)}
LARGE = (5, 3, 6, 7)
LARGE_EDGES: dict[Units, tuple[int, ...]] = {
    (1, 1, 0, 0): (0, 315, 630, 630, 630),
    (3, 7, 4, 1): (0, 126, 420, 588, 630),
    (43, 23, 7, 17): (0, 301, 462, 511, 630),
    (17, 13, 31, 2): (0, 170, 300, 610, 630),
}
LARGE_DIMS = {
    (1, 1, 0, 0): (3, 4),
    (3, 7, 4, 1): (2, 3, 4),
    (43, 23, 7, 17): (3, 4),
    (17, 13, 31, 2): (4,),
}
# Elements that change hands, either way.
MOVED = {
    (SMALL, (1, 1, 0, 0), (21, 21, 22, 0)): 22 + 44,
    (LARGE, (1, 1, 0, 0), (3, 7, 4, 1)): 399,
    (LARGE, (1, 1, 0, 0), (43, 23, 7, 17)): 182,
    (LARGE, (1, 1, 0, 0), (17, 13, 31, 2)): 460,
    (LARGE, (3, 7, 4, 1), (43, 23, 7, 17)): 294,
    (LARGE, (3, 7, 4, 1), (17, 13, 31, 2)): 186,
    (LARGE, (43, 23, 7, 17), (17, 13, 31, 2)): 391,
}


def ragged(shape: tuple[int, ...], units: Units, dims: int) -> Side:
    edges = SMALL_EDGES[units] if shape == SMALL else LARGE_EDGES[units]
    width = math.prod(shape[dims:])
    assert all(edge % width == 0 for edge in edges)
    ranges = {
        rank: (start // width, stop // width)
        for rank, (start, stop) in enumerate(itertools.pairwise(edges))
    }
    return Side.flat(shape, ranges, dims)


def cases() -> list[tuple[tuple[int, ...], Units, int]]:
    found = [(SMALL, units, dims) for units, counts in SMALL_DIMS.items() for dims in counts]
    return found + [(LARGE, units, dims) for units, counts in LARGE_DIMS.items() for dims in counts]


CASES = cases()


@pytest.mark.parametrize(("shape", "units", "dims"), CASES, ids=str)
def test_a_rank_has_its_units(shape: tuple[int, ...], units: Units, dims: int) -> None:
    unit, rest = divmod(math.prod(shape[:dims]), sum(units))
    assert rest == 0
    held = ragged(shape, units, dims).contents.elements
    sizes = [held[rank].size for rank in range(RANKS)]
    assert sizes == [count * unit * math.prod(shape[dims:]) for count in units]
    text = f"RaggedShard(dims={tuple(range(dims))}, local_units={units})"
    assert parse_ragged(text, shape=shape) is ragged(shape, units, dims).layout


@pytest.mark.parametrize(("shape", "units", "dims"), CASES, ids=str)
def test_from_ragged_to_ragged(shape: tuple[int, ...], units: Units, dims: int) -> None:
    for other, others, other_dims in CASES:
        if other != shape:
            continue
        key = (shape, units, others)
        moved = 0 if units == others else MOVED.get(key, MOVED.get((shape, others, units)))
        assert moved is not None
        check(ragged(shape, units, dims), ragged(shape, others, other_dims), moved)


@pytest.mark.parametrize(("shape", "units", "dims"), CASES, ids=str)
def test_between_ragged_and_shards_of_each_dimension(
    shape: tuple[int, ...], units: Units, dims: int
) -> None:
    mesh = reshard.DeviceMesh.of(x=RANKS)
    uneven = ragged(shape, units, dims)
    for dim in range(len(shape)):
        text = ", ".join("x" if d == dim else "-" for d in range(len(shape)))
        plain = Side.sharded(mesh, text, shape)
        there, back = check(uneven, plain), check(plain, uneven)
        # Both sides hold each element once, so what stays is the same.
        assert there.moved_elements == back.moved_elements


def test_shards_by_hand() -> None:
    mesh = reshard.DeviceMesh.of(x=RANKS)
    rows, columns = (Side.sharded(mesh, text, SMALL) for text in ("x, -", "-, x"))
    # Two ranks have a row each, as two units do.
    check(ragged(SMALL, (1, 1, 0, 0), 1), rows, 0)
    # Sixteen columns of both rows: two ranks have one row of them, two have nothing.
    check(ragged(SMALL, (1, 1, 0, 0), 2), columns, 16 + 16 + 32 + 32)
    # Rank 0 has 42 of row 0; rank 1 has 22 of row 0 and 20 of row 1, rank 2 has the rest.
    check(ragged(SMALL, (21, 21, 22, 0), 2), rows, 22 + 44)
    # Of its columns, rank 0 has row 0, rank 1 has 4 of row 1, and rank 2 has row 1.
    check(ragged(SMALL, (21, 21, 22, 0), 2), columns, 16 + (32 - 4) + 16 + 32)
    # Rows of five go 2, 2, 1, 0: ranges of 252, 252, 126 and nothing.
    five = Side.sharded(mesh, "x, -, -, -", LARGE)
    check(ragged(LARGE, (1, 1, 0, 0), 3), five, 630 - 252 - 189)
    check(ragged(LARGE, (3, 7, 4, 1), 2), five, 630 - 126 - 168 - 84)


@pytest.mark.parametrize(("shape", "units", "dims"), CASES, ids=str)
def test_between_ragged_and_replicated(shape: tuple[int, ...], units: Units, dims: int) -> None:
    uneven, full = ragged(shape, units, dims), Side.whole(shape, range(RANKS), RANKS)
    check(uneven, full, (RANKS - 1) * math.prod(shape))
    check(full, uneven, 0)


def test_ragged_shards_on_other_ranks() -> None:
    uneven = ragged(LARGE, (3, 7, 4, 1), 4)
    edges = LARGE_EDGES[43, 23, 7, 17]
    ranges = {4 + rank: window for rank, window in enumerate(itertools.pairwise(edges))}
    check(uneven, Side.flat(LARGE, ranges, 4), 630)


def test_a_range_that_is_not_of_the_tensor() -> None:
    with pytest.raises(LayoutError, match="range 420:631 of rank 1"):
        reshard.Layout.flat_ranges(LARGE, {0: (0, 420), 1: (420, 631)})
