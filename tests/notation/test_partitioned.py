"""PartitionedShard: its value, its cut, its text, and its place among DTensor's placements."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.cut_rules import Balanced, Blocks, Pieces, WholeBlocks
from reshard.errors import NotationError, RuleError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.notation.dtensor import (
    dtensor_text,
    parse_dtensor,
    parse_partitioned,
    partitioned_text,
)
from reshard.notation.partitioned import PartitionedShard
from reshard.sharding import ShardingSpec
from reshard.sharding import spec as native
from strategies import specs_with_shapes

TWO = DeviceMesh.of(ep=2)
BY_RANK = ((4, 6, 4, 2), (2, 4, 8, 2))
FLAT = (4, 6, 4, 2, 2, 4, 8, 2)
SIZES = (6, 10, 12, 4)


def held_by(spec: ShardingSpec, length: int) -> list[list[int]]:
    layout = spec.layout((length,))
    whole = Layout.replicated((length,), layout.slots)
    held = reshard.plan(whole, layout).run(dict.fromkeys(range(layout.slots), np.arange(length)))
    return [held[rank].tolist() for rank in range(layout.slots)]


def stretches(*ranges: tuple[int, int]) -> list[int]:
    return [index for start, stop in ranges for index in range(start, stop)]


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        # The proposal's example: partitions of 6, 10, 12 and 4, begin at 0, 6, 16 and 28.
        (
            PartitionedShard(0, 4, BY_RANK),
            [
                stretches((0, 4), (6, 12), (16, 20), (28, 30)),
                stretches((4, 6), (12, 16), (20, 28), (30, 32)),
            ],
        ),
        (PartitionedShard(0, 4, SIZES, aligned=True), [stretches((0, 16)), stretches((16, 32))]),
        # By ceil: 3 and 3, 5 and 5, 6 and 6, 2 and 2.
        (
            PartitionedShard(0, 4, SIZES),
            [
                stretches((0, 3), (6, 11), (16, 22), (28, 30)),
                stretches((3, 6), (11, 16), (22, 28), (30, 32)),
            ],
        ),
    ],
    ids=str,
)
def test_the_example_of_the_proposal(shard: PartitionedShard, expected: list[list[int]]) -> None:
    assert shard.partition_sizes == SIZES
    spec = parse_partitioned(str(shard), TWO, (32,))
    assert held_by(spec, 32) == expected
    assert partitioned_text(spec) == f"[{shard}]"


def test_partitions_of_any_size() -> None:
    three = DeviceMesh.of(ep=3)
    aligned = parse_partitioned(
        "PartitionedShard(0, 5, (0, 3, 0, 2, 1), aligned=True)", three, (6,)
    )
    # By ceil of their number: two, two and one partition.
    assert held_by(aligned, 6) == [[0, 1, 2], [3, 4], [5]]
    few = parse_partitioned("PartitionedShard(0, 2, (4, 2), aligned=True)", three, (6,))
    assert held_by(few, 6) == [[0, 1, 2, 3], [4, 5], []]
    unaligned = parse_partitioned("PartitionedShard(0, 5, (0, 3, 0, 2, 1))", three, (6,))
    assert held_by(unaligned, 6) == [[0, 3, 5], [1, 4], [2]]
    rows = "PartitionedShard(0, 2, ((0, 3), (0, 0), (1, 2)))"
    assert held_by(parse_partitioned(rows, three, (6,)), 6) == [[1, 2, 3], [], [0, 4, 5]]
    for text in ("PartitionedShard(0, 0, ())", "PartitionedShard(0, 0, ((), (), ()))"):
        spec = parse_partitioned(text, three, (0,))
        assert held_by(spec, 0) == [[], [], []]
        assert partitioned_text(spec) == f"[{text}]"


def of_two_ranks(count: int) -> st.SearchStrategy[list[tuple[int, ...]]]:
    row = st.lists(st.integers(0, 5), min_size=count, max_size=count).map(tuple)
    return st.lists(row, min_size=2, max_size=2)


splits = st.integers(0, 4).flatmap(of_two_ranks)


@given(splits, st.sampled_from(["ceil", "matrix", "aligned"]), st.integers(0, 2))
def test_every_rank_has_its_slice_of_every_partition(
    rows: list[tuple[int, ...]], kind: str, dim: int
) -> None:
    sizes = tuple(map(sum, zip(*rows, strict=True)))
    given_splits: Any = rows if kind == "matrix" else sizes
    shard = PartitionedShard(dim - 3, len(sizes), given_splits, kind == "aligned")
    expected: list[list[int]] = [[], []]
    start = 0
    for number, size in enumerate(sizes):
        if kind == "aligned":
            first = size if number < -(-len(sizes) // 2) else 0
        else:
            first = rows[0][number] if kind == "matrix" else -(-size // 2)
        expected[0] += range(start, start + first)
        expected[1] += range(start + first, start + size)
        start += size
    shape = tuple(start if d == dim else 1 for d in range(3))
    spec = parse_partitioned(f"[{shard}]", TWO, shape)
    assert parse_partitioned(partitioned_text(spec), TWO, shape) is spec
    cut = ShardingSpec(TWO, [spec.dim_specs[dim]])
    assert held_by(cut, start) == expected
    assert [d.levels for d in spec.dim_specs].count(()) == 2


def test_it_is_a_value() -> None:
    shard = PartitionedShard(0, 4, [[4, 6, 4, 2], [2, 4, 8, 2]])  # type: ignore[arg-type]
    assert shard == PartitionedShard(0, 4, BY_RANK)
    assert hash(shard) == hash(PartitionedShard(0, 4, BY_RANK))
    assert shard != PartitionedShard(0, 4, SIZES)
    assert PartitionedShard(0, 4, SIZES) != PartitionedShard(0, 4, SIZES, aligned=True)
    assert pickle.loads(pickle.dumps(shard)) == copy.deepcopy(shard) == shard
    with pytest.raises(AttributeError):
        shard.dim = 1  # type: ignore[misc]
    assert isinstance(shard.rule, Pieces)
    assert PartitionedShard(0, 1, (3,)).rule == Blocks((3,))
    assert PartitionedShard(0, 1, (3,), aligned=True).rule == WholeBlocks((3,))


def test_splits_may_be_lists_arrays_or_flat() -> None:
    expected = PartitionedShard(0, 4, BY_RANK)
    rows = [np.array(row) for row in BY_RANK]
    for given_splits in ([list(row) for row in BY_RANK], np.array(BY_RANK), rows, list(FLAT)):
        shard = PartitionedShard(np.int64(0), 4, given_splits)  # type: ignore[arg-type]
        assert shard == expected
        assert hash(shard) == hash(expected)
        assert str(shard) == str(expected)
    assert PartitionedShard(0, 4, np.array(SIZES)) == PartitionedShard(0, 4, SIZES)  # type: ignore[arg-type]
    text = f"PartitionedShard(0, 4, {list(FLAT)})"
    assert parse_partitioned(text, TWO, (32,)) is parse_partitioned(str(expected), TWO, (32,))


def test_splits_of_torch() -> None:
    torch = pytest.importorskip("torch")
    expected = PartitionedShard(0, 4, BY_RANK)
    rows = [torch.tensor(row) for row in BY_RANK]
    for given_splits in (torch.tensor(BY_RANK), rows, torch.tensor(FLAT, dtype=torch.int32)):
        assert PartitionedShard(0, torch.tensor(4), given_splits) == expected  # type: ignore[arg-type]


def test_errors_of_flat_lists_that_fit_as_sizes_of_each_rank_name_both() -> None:
    spec = parse_partitioned("PartitionedShard(0, 2, (4, 6))", TWO, (20,))
    message = r"sizes of whole blocks; if they are the sizes on each of 2 parts, give \[8, 12\]"
    with pytest.raises(RuleError, match=message):
        spec.layout((20,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PartitionedShard(0, 3, (4, 6)), "give 2 sizes for 3 partitions"),
        (
            lambda: PartitionedShard(0, 4, (4, 6, 4, 2, 2, 4)),
            "give 4, or as many for every rank, such as 8 for 2 ranks",
        ),
        (lambda: PartitionedShard(0, 2, ()), "give 0 sizes for 2 partitions"),
        (lambda: PartitionedShard(0, 2, (4, 6.0)), "splits of .*: 6.0 is not a whole number"),  # type: ignore
        (lambda: PartitionedShard(0, 2, np.ones((2, 2))), "1.0 is not a whole number"),  # type: ignore
        (lambda: PartitionedShard(0, 2, ("4", "6")), "'4' is not a whole number"),  # type: ignore
        (lambda: PartitionedShard(0, 1, (((4,),),)), "are nested deeper"),  # type: ignore
        (lambda: PartitionedShard(0, 1, 4), r"splits 4 .* give a number per partition"),  # type: ignore
        (lambda: PartitionedShard(0.5, 1, (4,)), "dim of .*: 0.5 is not a whole number"),  # type: ignore
        (lambda: PartitionedShard(0, 2.0, (4, 6)), "num_partitions of .*: 2.0 is not"),  # type: ignore
        (lambda: PartitionedShard(0, 2, ((4, 6), (1,))), "give 1 sizes for 2 partitions"),
        (lambda: PartitionedShard(0, 2, (4, -6)), r"splits \(4, -6\) .* must not be negative"),
        (lambda: PartitionedShard(0, 1, ((4,), (-6,))), "must not be negative"),
        (lambda: PartitionedShard(0, 2, (4, (6,))), "are numbers and rows"),  # type: ignore
        (
            lambda: PartitionedShard(0, 3, ((4, 6), (1, 1)), aligned=True),
            "give 2 sizes where rank 0 has 4: 2 of 3 whole partitions, each in 2 pieces",
        ),
    ],
)
def test_invalid_splits_are_refused(make: Any, message: str) -> None:
    with pytest.raises(NotationError, match=message):
        make()


ALIGNED_ROWS = ((4, 2, 6, 4), (4, 8, 2, 2))


@pytest.mark.parametrize(
    "splits", [ALIGNED_ROWS, sum(ALIGNED_ROWS, ()), np.array(ALIGNED_ROWS)], ids=str
)
def test_aligned_rows_are_the_pieces_of_whole_partitions(splits: Any) -> None:
    """The proposal prints aligned splits so: P00, P10, P01, P11 and P02, P12, P03, P13."""
    shard = PartitionedShard(0, 4, splits, aligned=True)
    assert shard.partition_sizes == SIZES
    found = parse_partitioned(str(shard), TWO, (32,)).layout((32,))
    sizes = PartitionedShard(0, 4, SIZES, aligned=True)
    assert found is parse_partitioned(str(sizes), TWO, (32,)).layout((32,))
    with pytest.raises(NotationError, match="sizes for 2 ranks, but axis ep has 4"):
        parse_partitioned(str(shard), DeviceMesh.of(ep=4), (32,))


def test_aligned_rows_of_ranks_with_fewer_partitions() -> None:
    shard = PartitionedShard(0, 3, ((1, 1, 2, 3), (4, 5)), aligned=True)
    assert shard.partition_sizes == (2, 5, 9)
    assert PartitionedShard(0, 1, ((1, 1), ()), aligned=True).partition_sizes == (2,)


def test_a_shard_keeps_its_partitions_when_its_alignment_changes() -> None:
    unaligned = PartitionedShard(0, 4, BY_RANK)
    for shard in (unaligned, dataclasses.replace(unaligned, dim=1)):
        aligned = dataclasses.replace(shard, aligned=True)
        assert aligned.partition_sizes == unaligned.partition_sizes == SIZES
        assert dataclasses.replace(aligned, aligned=False).partition_sizes == SIZES


def test_texts_must_fit_the_mesh_and_the_tensor() -> None:
    with pytest.raises(NotationError, match="sizes for 2 ranks, but axis ep has 3"):
        parse_partitioned(f"PartitionedShard(0, 4, {BY_RANK})", DeviceMesh.of(ep=3), (32,))
    with pytest.raises(NotationError, match="shards dimension 1 of a tensor of 1 dimensions"):
        parse_partitioned("PartitionedShard(1, 1, (4,))", TWO, (4,))
    for text in ("(4, 6)", "((4, 1), (0, 5))", "(4, 6), aligned=True"):
        spec = parse_partitioned(f"PartitionedShard(0, 2, {text})", TWO, (11,))
        with pytest.raises(RuleError, match="add up to 10, but the length is 11"):
            spec.layout((11,))


def test_among_the_placements_of_dtensor() -> None:
    mesh = DeviceMesh.of(dp=2, ep=2)
    text = "[Shard(0), PartitionedShard(0, 2, (3, 1))]"
    spec = parse_dtensor(text, mesh, (8, 2))
    assert str(spec) == "dp / ep@blocks[3,1], -"
    assert partitioned_text(spec) == text
    assert parse_partitioned(text, mesh, (8, 2)) is spec
    # dp has 0:4 and 4:8, and ep 2 and 1 of three, then 1 and 0 of one.
    assert held_by(ShardingSpec(mesh, spec.dim_specs[:1]), 8) == [[0, 1, 3], [2], [4, 5, 7], [6]]
    with pytest.raises(NotationError, match=r"DTensor cannot express `ep@blocks\[3,1\]`"):
        dtensor_text(spec)
    mixed = "[Partial(sum), PartitionedShard(1, 2, ((1, 0), (0, 3)))]"
    assert partitioned_text(parse_dtensor(mixed, mesh, (8, 4))) == mixed
    ordered = "[PartitionedShard(0, 2, (3, 1))[1], Shard(0)[0]]"
    assert str(parse_dtensor(ordered, mesh, (8,))) == "ep / dp@blocks[3,1]"
    assert partitioned_text(parse_dtensor(ordered, mesh, (8,))) == ordered


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ep@balanced", "`ep@balanced`"),
        ("ep@balanced@blocks[4,2]", r"`ep@balanced@blocks\[4,2\]`"),
        ("ep@whole[4,2,1;1,2]", r"`ep@whole\[4,2,1;1,2\]`"),
        ("ep@pieces[4:2:1]", r"`ep@pieces\[4:2:1\]`"),
    ],
)
def test_errors_name_the_rule_that_it_cannot_express(text: str, message: str) -> None:
    with pytest.raises(NotationError, match=f"DTensor cannot express {message}"):
        partitioned_text(native(TWO, text))


def test_rules_that_placements_cannot_express_have_no_placement() -> None:
    assert PartitionedShard.from_rule(0, Balanced(), 2) is None
    assert PartitionedShard.from_rule(0, Blocks((3,), Balanced()), 2) is None
    assert PartitionedShard.from_rule(1, Pieces(((1, 2),)), 3) is None
    assert PartitionedShard.from_rule(1, Pieces(((1, 2),)), 2) == PartitionedShard(
        1, 1, ((1,), (2,))
    )


@given(specs_with_shapes())
def test_a_sharding_is_written_so_that_it_reads_back_or_refused(
    pair: tuple[ShardingSpec, tuple[int, ...]],
) -> None:
    spec, shape = pair
    try:
        text = partitioned_text(spec)
    except NotationError:
        return
    without_marks = ShardingSpec(
        spec.mesh, spec.dim_specs, (), spec.partial_axes, spec.reduction or "sum"
    )
    assert parse_partitioned(text, spec.mesh, shape) is without_marks
