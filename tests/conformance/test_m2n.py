"""From M ranks to N others: the cases of NCCL's M2N test matrix, and what it leaves out.

Source and target have no rank in common, so every rank of the target receives all of its part:
the elements moved are those of the tensor, as many times as the target has copies. Tensors
that are too large to fill are planned and verified as they are, and run scaled down.
"""

from __future__ import annotations

import itertools
import math

import pytest

import reshard
from conformance.checked_movement import Side, check, check_geometry, rows
from selection import keep_alternate

# Each tensor of the matrix, and what is run in its place: the same ratios of the dimensions.
SHAPES = {
    (200, 200): (25, 25),
    (240, 240): (30, 30),
    (576, 576): (24, 24),
    (3072, 3072): (12, 12),
    (3072, 6144): (12, 24),
    (64, 128, 128): (4, 8, 8),
    (128, 64, 64): (8, 4, 4),
    (8192,): (32,),
    (16384,): (64,),
}
# Ranks of the source and of the target: 3:1, 1:3, and the same with four and twelve.
RATIOS = [(3, 1), (1, 3), (12, 4), (4, 12)]
OTHER_RATIOS = "other numbers of ranks for a shape that default cases move between two pairs"


def line(ranks: int, first: int = 0) -> reshard.DeviceMesh:
    """Ranks in a line."""
    return reshard.DeviceMesh.of(x=ranks, devices=range(first, first + ranks))


def grid(ranks: int, first: int = 0) -> reshard.DeviceMesh:
    """Ranks in a grid of two rows, of one where they are odd."""
    high = 1 if ranks % 2 else 2
    devices = range(first, first + ranks)
    return reshard.DeviceMesh.of(x=high, y=ranks // high, devices=devices)


def one_axis_on(dim: int, axis: str, dims: int) -> str:
    return ", ".join(axis if d == dim else "-" for d in range(dims))


def placements(dims: int, axes: str) -> list[str]:
    """Replicate, and one axis on one dimension: every choice of both."""
    cuts = [one_axis_on(d, axis, dims) for axis in axes for d in range(dims)]
    return [", ".join("-" * dims), *cuts]


def copies(mesh: reshard.DeviceMesh, text: str) -> int:
    used = math.prod(mesh.axis_size(axis) for axis in mesh.axis_names if axis in text)
    return mesh.size // used


@pytest.mark.parametrize(("shape", "ratio"), keep_alternate(SHAPES, RATIOS, OTHER_RATIOS), ids=str)
def test_the_matrix(shape: tuple[int, ...], ratio: tuple[int, int]) -> None:
    """On lines and grids of ranks: replicated, and all pairs of cut dimensions."""
    dims, (sources, targets) = len(shape), ratio
    before = [(line(sources), text) for text in placements(dims, "x")]
    before += [(grid(sources), text) for text in placements(dims, "xy")[1:]]
    after = [(line(targets, sources), text) for text in placements(dims, "x")]
    after += [(grid(targets, sources), text) for text in placements(dims, "xy")[1:]]
    for (one, source), (other, target) in itertools.product(before, after):
        size = math.prod(shape) * copies(other, target)
        check_geometry(
            reshard.spec(one, source).layout(shape), reshard.spec(other, target).layout(shape), size
        )


@pytest.mark.parametrize(
    ("shape", "ratio"), keep_alternate(SHAPES.values(), RATIOS[:3], OTHER_RATIOS), ids=str
)
def test_the_matrix_scaled_down_on_arrays(shape: tuple[int, ...], ratio: tuple[int, int]) -> None:
    dims, (sources, targets) = len(shape), ratio
    for make in (line, grid):
        axes = "x" if make is line else "xy"
        one, other = make(sources), make(targets, sources)
        for source, target in itertools.product(placements(dims, axes), repeat=2):
            size = math.prod(shape) * copies(other, target)
            check(Side.sharded(one, source, shape), Side.sharded(other, target, shape), size)


# Beyond it: two cut dimensions, or one dimension cut by two axes, flat and nested.
TWO_AXES = ["x, y", "y, x", "x y, -", "-, x / y", "y / x, -"]


@pytest.mark.parametrize("source", TWO_AXES)
@pytest.mark.parametrize("target", TWO_AXES)
@pytest.mark.parametrize("ratio", [(12, 4), (4, 12), (6, 10)], ids=str)
def test_two_cut_axes_a_side(source: str, target: str, ratio: tuple[int, int]) -> None:
    sources, targets = ratio
    # 25 and 22 divide by none of the numbers of ranks.
    for shape in ((24, 48), (25, 22)):
        check(
            Side.sharded(grid(sources), source, shape),
            Side.sharded(grid(targets, sources), target, shape),
            math.prod(shape),
        )


@pytest.mark.parametrize("source", range(4))
@pytest.mark.parametrize("target", range(4))
@pytest.mark.parametrize("shape", [(6, 6, 12, 6), (7, 5, 4, 3)], ids=str)
def test_rank_four(source: int, target: int, shape: tuple[int, ...]) -> None:
    """Each axis on a dimension: neighbours on the source's side, two apart on the target's."""
    texts = []
    for first, second in ((source, (source + 1) % 4), (target, (target + 2) % 4)):
        words = ["-"] * 4
        words[first], words[second] = "x", "y"
        texts.append(", ".join(words))
    check(
        Side.sharded(grid(6), texts[0], shape),
        Side.sharded(grid(4, 6), texts[1], shape),
        math.prod(shape),
    )


@pytest.mark.parametrize("shape", [(200, 200), (7, 5), (64, 128, 128), (13,)], ids=str)
@pytest.mark.parametrize("ratio", [(9, 3), (5, 7), (17, 3)], ids=str)
def test_what_does_not_divide(shape: tuple[int, ...], ratio: tuple[int, int]) -> None:
    sources, targets = ratio
    for source, target in itertools.product(placements(len(shape), "x")[1:], repeat=2):
        one = reshard.spec(line(sources), source).layout(shape)
        other = reshard.spec(line(targets, sources), target).layout(shape)
        check_geometry(one, other, math.prod(shape))
    if math.prod(shape) < 100:
        check(
            Side.sharded(line(sources), source, shape),
            Side.sharded(line(targets, sources), target, shape),
            math.prod(shape),
        )


@pytest.mark.parametrize(
    ("source", "target", "each"),
    [
        # 48 rows on 48 ranks, 24 rows on each of two: so many senders for each receiver.
        ("x, -", "x, -", 24),
        # Every receiver needs columns of all rows.
        ("x, -", "-, x", 48),
        # Every receiver needs all of it.
        ("x, -", "-, -", 48),
    ],
)
def test_more_than_sixteen_sources_a_shard(source: str, target: str, each: int) -> None:
    shape = (48, 6)
    copied = 2 if target == "-, -" else 1
    plan = check(
        Side.sharded(line(48), source, shape),
        Side.sharded(line(2, 48), target, shape),
        math.prod(shape) * copied,
    )
    senders = {rank: {row[0] for row in rows(plan) if row[1] == rank} for rank in (48, 49)}
    assert {rank: len(ranks) for rank, ranks in senders.items()} == {48: each, 49: each}


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_ranks_on_both_sides_keep_what_they_have(ranks: int) -> None:
    """The same cuts where the target's ranks are the source's, or overlap with them."""
    for first in (0, 1, ranks // 2):
        for source, target in itertools.product(("x, -", "-, x", "-, -"), repeat=2):
            check(
                Side.sharded(line(ranks), source, (7, 12)),
                Side.sharded(line(ranks, first), target, (7, 12)),
            )
