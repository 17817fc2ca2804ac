"""The worked example of the PartitionedShard proposal, and one where more differs.

Partitions lie one behind another. Unaligned, a shard has a piece of every partition; aligned,
whole partitions. Contents are entered by hand, as ranges of the tensor's indices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

import reshard
from conformance.checked_movement import Side, check, rows
from reshard.notation.dtensor import parse_partitioned

Ranges = list[tuple[int, int]]

# Four partitions of 6, 10, 12 and 4 over two shards. Shard 0 has 4, 6, 4 and 2 of them, shard 1
# has 2, 4, 8 and 2.
EXAMPLE = {
    "unaligned": "x@pieces[4:2,6:4,4:8,2:2]",
    "aligned": "x@whole[6,10,12,4]",
    "plain": "x",
    "replicated": "-",
}
EXAMPLE_CONTENTS: dict[str, list[Ranges]] = {
    "unaligned": [
        [(0, 4), (6, 12), (16, 20), (28, 30)],
        [(4, 6), (12, 16), (20, 28), (30, 32)],
    ],
    "aligned": [[(0, 16)], [(16, 32)]],
    "plain": [[(0, 16)], [(16, 32)]],
    "replicated": [[(0, 32)], [(0, 32)]],
}
EXAMPLE_MOVED = {
    ("unaligned", "aligned"): 12,
    ("aligned", "unaligned"): 12,
    ("unaligned", "plain"): 12,
    ("plain", "unaligned"): 12,
    ("aligned", "plain"): 0,
    ("plain", "aligned"): 0,
    ("unaligned", "replicated"): 32,
    ("aligned", "replicated"): 32,
    ("plain", "replicated"): 32,
}

# Six partitions of 5, 1, 7, 3, 0 and 2 over three shards, two a shard where they are aligned.
# Unaligned without sizes for each shard, every partition is cut by ceil.
UNEVEN = {
    "unaligned": "x@blocks[5,1,7,3,0,2]",
    "aligned": "x@whole[5,1,7,3,0,2]",
    "plain": "x",
    "replicated": "-",
}
UNEVEN_CONTENTS: dict[str, list[Ranges]] = {
    "unaligned": [
        [(0, 2), (5, 6), (6, 9), (13, 14), (16, 17)],
        [(2, 4), (9, 12), (14, 15), (17, 18)],
        [(4, 5), (12, 13), (15, 16)],
    ],
    "aligned": [[(0, 6)], [(6, 16)], [(16, 18)]],
    "plain": [[(0, 6)], [(6, 12)], [(12, 18)]],
    "replicated": [[(0, 18)]] * 3,
}
UNEVEN_MOVED = {
    # What the three shards lack: 2 to 4; 6 to 8, 12, 13 and 15; 16 and 17.
    ("unaligned", "aligned"): 3 + 6 + 2,
    # 6 to 8, 13 and 16; 2, 3 and 17; 4, 12 and 15.
    ("aligned", "unaligned"): 5 + 3 + 3,
    # 12 to 15 change hands.
    ("aligned", "plain"): 4,
    ("plain", "aligned"): 4,
    # 2 to 4; 6 to 8; 13, 14, 16 and 17. And 6 to 8, 13 and 16; 2, 3, 14 and 17; 4.
    ("unaligned", "plain"): 3 + 3 + 4,
    ("plain", "unaligned"): 5 + 4 + 1,
    ("unaligned", "replicated"): 36,
    ("aligned", "replicated"): 36,
    ("plain", "replicated"): 36,
}
KINDS = tuple(EXAMPLE)


# The same as placements; plain and replicated are DTensor's own.
PLACEMENTS = {
    "unaligned": "PartitionedShard(0, 4, ((4, 6, 4, 2), (2, 4, 8, 2)))",
    "aligned": "PartitionedShard(0, 4, (6, 10, 12, 4), aligned=True)",
    "plain": "Shard(0)",
    "replicated": "Replicate()",
}
UNEVEN_PLACEMENTS = {
    "unaligned": "PartitionedShard(0, 6, (5, 1, 7, 3, 0, 2))",
    "aligned": "PartitionedShard(0, 6, (5, 1, 7, 3, 0, 2), aligned=True)",
    "plain": "Shard(0)",
    "replicated": "Replicate()",
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_placements_say_the_same(kind: str) -> None:
    two, three = reshard.DeviceMesh.of(x=2), reshard.DeviceMesh.of(x=3)
    found = parse_partitioned(PLACEMENTS[kind], two, (32,))
    assert found is reshard.spec(two, EXAMPLE[kind])
    found = parse_partitioned(UNEVEN_PLACEMENTS[kind], three, (18,))
    assert found is reshard.spec(three, UNEVEN[kind])


def indices(ranges: Ranges) -> list[int]:
    return list(itertools.chain(*(range(a, b) for a, b in ranges)))


def check_contents(length: int, layouts: dict[str, str], contents: dict[str, list[Ranges]]) -> None:
    for kind, shards in contents.items():
        mesh = reshard.DeviceMesh.of(x=len(shards))
        plan = reshard.plan(
            reshard.Layout.replicated((length,), len(shards)),
            reshard.spec(mesh, layouts[kind]).layout((length,)),
        )
        found = plan.run(dict.fromkeys(range(len(shards)), np.arange(length)))
        assert [found[rank].tolist() for rank in range(len(shards))] == list(map(indices, shards))


def test_what_the_shards_hold() -> None:
    check_contents(32, EXAMPLE, EXAMPLE_CONTENTS)
    check_contents(18, UNEVEN, UNEVEN_CONTENTS)


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_all_pairs(source: str, target: str) -> None:
    two, three = reshard.DeviceMesh.of(x=2), reshard.DeviceMesh.of(x=3)
    # What stays as it is, and what is replicated already, moves nothing.
    check(
        Side.sharded(two, EXAMPLE[source], (32,)),
        Side.sharded(two, EXAMPLE[target], (32,)),
        EXAMPLE_MOVED.get((source, target), 0),
    )
    check(
        Side.sharded(three, UNEVEN[source], (18,)),
        Side.sharded(three, UNEVEN[target], (18,)),
        UNEVEN_MOVED.get((source, target), 0),
    )


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("dim", [0, 1])
def test_all_pairs_on_a_dimension_of_a_matrix(source: str, target: str, dim: int) -> None:
    mesh = reshard.DeviceMesh.of(x=2)
    shape = (32, 3) if dim == 0 else (3, 32)
    texts = [
        f"{EXAMPLE[kind]}, -" if dim == 0 else f"-, {EXAMPLE[kind]}" for kind in (source, target)
    ]
    check(
        *(Side.sharded(mesh, text, shape) for text in texts),
        3 * EXAMPLE_MOVED.get((source, target), 0),
    )


def traffic(source: str, target: str) -> list[list[int]]:
    """Elements that each shard gives each shard, its own part included."""
    mesh = reshard.DeviceMesh.of(x=2)
    plan = check(*(Side.sharded(mesh, EXAMPLE[kind], (32,)) for kind in (source, target)), 12)
    sent = [[0, 0], [0, 0]]
    for sender, receiver, _, _, (size,) in rows(plan):
        sent[sender][receiver] += size
    return sent


def test_what_each_shard_sends_to_each() -> None:
    assert traffic("unaligned", "aligned") == [[10, 6], [6, 10]]
    assert traffic("aligned", "unaligned") == [[10, 6], [6, 10]]


def piece_sizes(source: str, target: str, per_shard: Sequence[int]) -> list[list[int]]:
    """The pieces that come together in each shard, in the order of its memory."""
    mesh = reshard.DeviceMesh.of(x=2)
    plan = check(*(Side.sharded(mesh, EXAMPLE[kind], (32,)) for kind in (source, target)))
    placed = sorted((receiver, at, size) for _, receiver, _, (at,), (size,) in rows(plan))
    found = [[size for receiver, _, size in placed if receiver == shard] for shard in range(2)]
    assert [sum(sizes) for sizes in found] == list(per_shard)
    return found


def test_the_splits_of_the_proposal() -> None:
    assert piece_sizes("unaligned", "aligned", (16, 16)) == [[4, 2, 6, 4], [4, 8, 2, 2]]
    assert piece_sizes("aligned", "unaligned", (16, 16)) == [[4, 6, 4, 2], [2, 4, 8, 2]]


def test_aligned_partitions_that_do_not_divide_evenly() -> None:
    """Five over two shards: three and two, where the proposal asks for an even number."""
    mesh = reshard.DeviceMesh.of(x=2)
    aligned, plain = (Side.sharded(mesh, text, (16,)) for text in ("x@whole[3,1,2,4,6]", "x"))
    assert [aligned.layout.local_shape(rank) for rank in range(2)] == [(6,), (10,)]
    check(aligned, plain, 2)
    check(plain, aligned, 2)
