"""torchstore's resharding cases: 512 x 512 of float32, put on one mesh and taken on another.

Moved elements are counted by hand in blocks of 128 x 128, of which the tensor has four by four:
every mesh here cuts at their edges. Arrays are torch tensors, cut as DTensor
cuts them.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Shard

import reshard
from conformance.checked_movement import check_geometry
from reshard.layout import Layout
from reshard.notation.dtensor import parse_dtensor

SHAPE = (512, 512)
BLOCK = 128 * 128
Placements = tuple[int, ...]


def text_of(placements: Placements) -> str:
    """The cut of each mesh axis (x, then y) on its dimension; two on one are nested, as in DTensor.

    >>> text_of((0, 0)), text_of((1, 0))
    ('x / y, -', 'y, x')
    """
    dims = [[axis for axis, d in zip("xy", placements, strict=False) if d == dim] for dim in (0, 1)]
    return ", ".join(" / ".join(axes) or "-" for axes in dims)


@pytest.mark.parametrize("placements", list(itertools.product((0, 1), repeat=2)), ids=str)
def test_the_placements_say_the_same(placements: Placements) -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=2)
    listed = f"[{', '.join(f'Shard({dim})' for dim in placements)}]"
    assert parse_dtensor(listed, mesh, SHAPE) is reshard.spec(mesh, text_of(placements))


def layout_of(mesh: tuple[int, ...], placements: Placements, first: int = 0) -> Layout:
    axes = dict(zip("xy", mesh, strict=False))
    count = torch.Size(mesh).numel()
    devices = reshard.DeviceMesh.of(**axes, devices=range(first, first + count))
    return reshard.spec(devices, text_of(placements)).layout(SHAPE)


def chunks_of(
    tensor: torch.Tensor, mesh: tuple[int, ...], placements: Placements, first: int = 0
) -> dict[int, torch.Tensor]:
    """The local tensors: each mesh axis chunks what the one before left."""
    pieces = [tensor]
    for size, dim in zip(mesh, placements, strict=True):
        pieces = [
            piece
            for whole in pieces
            for piece in Shard(dim)._split_tensor(whole, size, with_padding=False)[0]
        ]
    return {first + rank: piece for rank, piece in enumerate(pieces)}


# Mesh and placements of both sides, and the blocks that must move where ranks are the same.
CASES = [
    # Rank 0 has a quarter of what it needs, or rank 0 and 1 have a quarter each.
    *[((4,), (a,), (2,), (b,), 12) for a, b in itertools.product((0, 1), repeat=2)],
    # Ranks 1 to 3 lack all of their row, or ranks 0 and 1 lack half and ranks 2 and 3 all.
    *[((2,), (a,), (4,), (b,), 12) for a, b in itertools.product((0, 1), repeat=2)],
    # Column r of rank r, where ranks 0 and 3 have half of their quarter in it.
    ((2, 2), (1, 1), (2, 2), (0, 1), 12),
    ((2, 2), (1, 0), (2, 2), (1, 0), 0),
    # Row r of rank r, always in its own half: two blocks each.
    ((2, 2), (0, 0), (2, 2), (0, 1), 8),
    # One block in four is in both row r and column r.
    ((2, 2), (1, 1), (2, 2), (0, 0), 12),
    ((4,), (0,), (2, 2), (0, 0), 0),
    ((4,), (0,), (2, 2), (0, 1), 8),
    ((4,), (0,), (2, 2), (1, 0), 12),
    ((4,), (0,), (2, 2), (1, 1), 12),
    ((4,), (1,), (2, 2), (0, 0), 12),
    ((4,), (1,), (2, 2), (0, 1), 12),
    ((4,), (1,), (2, 2), (1, 0), 8),
    ((4,), (1,), (2, 2), (1, 1), 0),
]
# And back: all shards are of four blocks, so as much moves.
CASES += [
    (*case[2:4], *case[:2], case[4]) for case in CASES if (case[0], case[2]) == ((4,), (2, 2))
]


@pytest.mark.parametrize(("mesh", "placements", "other", "others", "blocks"), CASES, ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["same ranks", "other ranks"])
def test_put_and_get(
    mesh: tuple[int, ...],
    placements: Placements,
    other: tuple[int, ...],
    others: Placements,
    blocks: int,
    shared: bool,
) -> None:
    first = 0 if shared else 4
    plan = check_geometry(
        layout_of(mesh, placements),
        layout_of(other, others, first),
        blocks * BLOCK if shared else 16 * BLOCK,
    )
    tensor = torch.arange(512 * 512, dtype=torch.float32).reshape(SHAPE)
    result = plan.run(chunks_of(tensor, mesh, placements))
    expected = chunks_of(tensor, other, others, first)
    assert result.keys() == expected.keys()
    for rank, piece in expected.items():
        assert result[rank].dtype == torch.float32
        assert torch.equal(result[rank], piece)


@pytest.mark.parametrize("shape", [(500, 510), (511, 3), (5, 7)], ids=str)
@pytest.mark.parametrize("placements", list(itertools.product((0, 1), repeat=2)), ids=str)
def test_what_torch_chunks_unevenly(shape: tuple[int, int], placements: Placements) -> None:
    """Nested chunks of chunks, where torch gives the last ranks less."""
    mesh = reshard.DeviceMesh.of(x=2, y=2)
    nested = reshard.spec(mesh, text_of(placements)).layout(shape)
    rows = reshard.spec(mesh, "x y, -").layout(shape)
    tensor = torch.arange(shape[0] * shape[1]).reshape(shape)
    whole = Layout.replicated(shape, 4)
    cut = check_geometry(whole, nested, 0).run(dict.fromkeys(range(4), tensor))
    expected = chunks_of(tensor, (2, 2), placements)
    assert all(torch.equal(cut[rank], expected[rank]) for rank in range(4))
    through = check_geometry(rows, nested).run(check_geometry(nested, rows).run(cut))
    assert all(torch.equal(through[rank], expected[rank]) for rank in range(4))
