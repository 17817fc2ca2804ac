"""The cuts of PyTorch's distributed checkpoint, against its own reads.

Which rank reads what from which saved chunk is asked of PyTorch itself: a plan's boxes are its
read items, and the figures of its one-dimensional cases are entered by hand.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import reshard
from conformance.checked_movement import Row, Side, check, rows
from reshard.layout import Layout

Piece = tuple[int, int, int, int]

# Length, ranks before and after, elements that move, and every piece: who, to whom, from where in
# the tensor, how many.
CASES: list[tuple[int, int, int, int, list[Piece]]] = [
    (
        128,
        8,
        4,
        16 + 32 + 32 + 32,
        [
            *((0, 0, 0, 16), (1, 0, 16, 16), (2, 1, 32, 16), (3, 1, 48, 16)),
            *((4, 2, 64, 16), (5, 2, 80, 16), (6, 3, 96, 16), (7, 3, 112, 16)),
        ],
    ),
    (
        128,
        4,
        8,
        7 * 16,
        [
            *((0, 0, 0, 16), (0, 1, 16, 16), (1, 2, 32, 16), (1, 3, 48, 16)),
            *((2, 4, 64, 16), (2, 5, 80, 16), (3, 6, 96, 16), (3, 7, 112, 16)),
        ],
    ),
    (
        120,
        4,
        3,
        10 + 20 + 30,
        [
            *((0, 0, 0, 30), (1, 0, 30, 10), (1, 1, 40, 20)),
            *((2, 1, 60, 20), (2, 2, 80, 10), (3, 2, 90, 30)),
        ],
    ),
]


def sharded(shape: tuple[int, ...], dim: int, ranks: int) -> Side:
    mesh = reshard.DeviceMesh.of(x=ranks)
    text = ", ".join("x" if d == dim else "-" for d in range(len(shape)))
    return Side.sharded(mesh, text, shape)


@pytest.mark.parametrize(("length", "before", "after", "moved", "pieces"), CASES)
def test_one_dimension(
    length: int, before: int, after: int, moved: int, pieces: list[Piece]
) -> None:
    plan = check(sharded((length,), 0, before), sharded((length,), 0, after), moved)
    sizes = (length // before, length // after)
    assert rows(plan) == {
        (sender, receiver, (start % sizes[0],), (start % sizes[1],), (size,))
        for sender, receiver, start, size in pieces
    }


def chunks_of(layout: Layout) -> list[tuple[int, ChunkStorageMetadata]]:
    """The chunk of every slot that has something; each has one box here."""
    found = []
    for slot in layout.holders:
        for box in layout.boxes(slot):
            chunk = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
            found.append((slot, chunk))
    return found


def read_items(source: Layout, target: Layout) -> set[Row]:
    """What PyTorch would read into each slot's chunk, in the form of `rows`."""
    savers, chunks = zip(*chunks_of(source), strict=True)
    saved = TensorStorageMetadata(TensorProperties(), torch.Size(source.shape), list(chunks))
    found = set()
    for slot, chunk in chunks_of(target):
        for item in create_read_items_for_chunk_list("t", saved, [chunk]):
            starts = (tuple(item.storage_offsets), tuple(item.dest_offsets))
            found.add((savers[item.storage_index.index], slot, *starts, tuple(item.lengths)))
    return found


@pytest.mark.parametrize(("length", "before", "after", "moved", "pieces"), CASES)
def test_one_dimension_as_pytorch_reads(
    length: int, before: int, after: int, moved: int, pieces: list[Piece]
) -> None:
    plan = check(sharded((length,), 0, before), sharded((length,), 0, after), moved)
    assert rows(plan) == read_items(plan.source, plan.target)
    assert len(pieces) == len(rows(plan)) == before + after - math.gcd(before, after)


@pytest.mark.parametrize(
    ("shape", "before", "after"),
    [
        ((512, 512), 4, 2),
        ((512, 512), 2, 4),
        ((24, 36), 6, 4),
        ((7, 11), 3, 5),
        ((6, 5, 8), 5, 2),
    ],
    ids=str,
)
def test_several_dimensions_as_pytorch_reads(
    shape: tuple[int, ...], before: int, after: int
) -> None:
    for one, other in itertools.product(range(len(shape)), repeat=2):
        source, target = sharded(shape, one, before), sharded(shape, other, after)
        plan = check(source, target)
        assert rows(plan) == read_items(plan.source, plan.target)


def test_blocks_of_any_kind_as_pytorch_reads() -> None:
    """Chunks that form no grid: what FSDP and ragged shards write, each as a list of boxes."""
    box = reshard.Box
    pinwheel = [box((0, 0), (2, 4)), box((2, 0), (6, 2)), box((4, 2), (6, 6)), box((0, 4), (4, 6))]
    pinwheel.append(box((2, 2), (4, 4)))
    bricks = [box((r, c), (r + 2, min(c + 3, 6))) for r in (0, 2, 4) for c in (0, 3)]
    sides = [Side.boxes((6, 6), list(enumerate(boxes))) for boxes in (pinwheel, bricks)]
    for source, target in itertools.product(sides, repeat=2):
        plan = check(source, target)
        assert rows(plan) == read_items(plan.source, plan.target)
