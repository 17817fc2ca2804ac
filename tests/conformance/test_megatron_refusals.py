"""Refits that Megatron refuses work here; those that it accepts in silence are errors."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from conformance.refits import cut, moved, operations, uneven, whole
from reshard.errors import RuleError, SpecError
from reshard.megatron.parameters import MegatronParameter
from reshard.megatron.ranks import MegatronRanks
from reshard.megatron.tensor_pairs import reconcile, reconcile_all


def test_uneven_cuts() -> None:
    plan = moved(reconcile(uneven(5, 5, 3), uneven(7, 6)))
    assert [operations(plan, rank) for rank in (0, 1)] == [
        ["0[0:5]→[0:5]", "1[0:2]→[5:7]"],
        ["1[2:5]→[0:3]", "2[0:3]→[3:6]"],
    ]
    # Sizes that no rule gives, an empty rank included.
    plan = moved(reconcile(uneven(1, 0, 5), cut(2, 3, 2)))
    assert [operations(plan, rank) for rank in (0, 1)] == [
        ["0[0:1]→[0:1]", "2[0:2]→[1:3]"],
        ["2[2:5]→[0:3]"],
    ]


def test_an_uneven_gated_unit() -> None:
    """Gate and up of 5 rows each: rank 0 has 3 of both, rank 1 two."""
    plan = moved(reconcile(uneven(6, 4, partition_stride=2), whole(1, 10, 2)))
    assert operations(plan, 0) == [
        "0[0:3]→[0:3]",
        "1[0:2]→[3:5]",
        "0[3:6]→[5:8]",
        "1[2:4]→[8:10]",
    ]


def test_uneven_blocks() -> None:
    """Blocks of 5 and 3: ranks have 3 + 1 and 2 + 2."""
    plan = moved(
        reconcile(uneven(4, 4, partition_sizes=((3, 1), (2, 2))), uneven(8, partition_sizes=(5, 3)))
    )
    assert operations(plan, 0) == [
        "0[0:3]→[0:3]",
        "1[0:2]→[3:5]",
        "0[3:4]→[5:6]",
        "1[2:4]→[6:8]",
    ]


def test_vocabulary_padding() -> None:
    """50 words, padded to a multiple of 8 on each rank: 2 x 32 on one side, 4 x 16 on the other."""
    source, target = cut(2, 32, 2, true_length=50), cut(4, 16, 2, true_length=50)
    pair = reconcile(source, target)
    assert pair.shape == (50, 2)
    plan = moved(pair)
    assert [operations(plan, rank) for rank in range(4)] == [
        ["0[0:16]→[0:16]"],
        ["0[16:32]→[0:16]"],
        ["1[0:16]→[0:16]"],
        ["1[16:18]→[0:2]"],
    ]
    # An inference engine without padding, that has no mark and says nothing of it.
    plan = moved(reconcile(source, whole(1, 50, 2)))
    assert operations(plan, 0) == ["0[0:32]→[0:32]", "1[0:18]→[32:50]"]


def test_shared_key_value_heads_and_back() -> None:
    """4 heads of 3 rows: one a rank, or each on two neighbours."""
    source, target = cut(2, 6, 2, heads=4), cut(8, 3, 2, heads=4)
    plan = moved(reconcile(source, target))
    assert [operations(plan, rank) for rank in range(8)] == [
        ["0[0:3]→[0:3]"],
        ["0[0:3]→[0:3]"],
        ["0[3:6]→[0:3]"],
        ["0[3:6]→[0:3]"],
        ["1[0:3]→[0:3]"],
        ["1[0:3]→[0:3]"],
        ["1[3:6]→[0:3]"],
        ["1[3:6]→[0:3]"],
    ]
    back = moved(reconcile(target, source))
    assert [len(operations(back, rank)) for rank in (0, 1)] == [2, 2]
    assert set(back.transfers.source_slot[back.transfers.target_slot == 1].tolist()) <= {4, 5, 6, 7}
    # Rank 0 has head 0 and needs head 1 too; rank 1 needs heads 2 and 3.
    assert back.moved_elements == (1 + 2) * 6


# What Megatron accepts in silence, or finds out while it runs.
WRONG = [
    ("outside the cut", cut(2, 4, 8), cut(1, 8, 9), SpecError, "dimension 1, outside the cut"),
    ("copies", whole(1, 8), whole(1, 9), SpecError, "has 8 indices on the source and 9 on"),
    ("copies on more ranks", whole(2, 8), whole(4, 9), SpecError, "dimension 0, outside the cut"),
    ("dimensions", whole(1, 8), whole(1, 8, 1), SpecError, "1 dimensions.* the target 2"),
    (
        "a missing block",
        cut(2, 6, partition_sizes=(4, 2)),
        cut(1, 12, partition_sizes=(12,)),
        RuleError,
        "2 blocks .8, 4. over its ranks, the target of 1, .12.",
    ),
    (
        "other blocks",
        cut(2, 6, partition_sizes=(4, 2)),
        cut(1, 12, partition_sizes=(6, 6)),
        RuleError,
        "describe the same blocks",
    ),
    (
        "blocks against a stride",
        cut(2, 6, partition_sizes=(4, 2)),
        cut(2, 6, partition_stride=2),
        RuleError,
        "describe the same blocks",
    ),
    (
        "blocks that do not divide",
        cut(1, 8, partition_sizes=(5, 3)),
        cut(2, 4),
        RuleError,
        "cannot be cut over 2 ranks",
    ),
    (
        "element types",
        cut(2, 4, dtype="float32"),
        cut(2, 4, dtype="bfloat16"),
        SpecError,
        "the source is float32, the target bfloat16; to convert, say cast='bfloat16'",
    ),
    ("kinds", whole(1, 8), whole(1, 8, is_expert=True), SpecError, "on both sides or on neither"),
]


@pytest.mark.parametrize(
    ("source", "target", "error", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG]
)
def test_what_cannot_be_one_tensor(
    source: MegatronParameter, target: MegatronParameter, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        reconcile(source, target)
    with pytest.raises(error, match="parameter 'w': .*" + message):
        reconcile_all({"w": source}, {"w": target})


def test_sizes_that_are_not_the_local_length() -> None:
    with pytest.raises(RuleError, match=r"partition_sizes \[4, 2\] add up to 6, but .* has 8 ind"):
        cut(2, 8, partition_sizes=(4, 2))
    # Also where the mark is carried over from the other side.
    target = MegatronParameter(MegatronRanks(), (12,), partition_sizes=(8, 5))
    with pytest.raises(RuleError, match="add up to 13"):
        reconcile(cut(2, 6, partition_sizes=(4, 2)), target)


def test_a_cast_is_asked_for() -> None:
    source, target = cut(2, 4, dtype="float32"), cut(2, 4, dtype="bfloat16")
    assert reconcile(source, target, cast="bfloat16").shape == (8,)
    with pytest.raises(SpecError, match="cast='float16', but the target is bfloat16"):
        reconcile(source, target, cast="float16")
    both = {"a": source, "b": target}, {"a": target, "b": target}
    assert len(reconcile_all(*both, cast="bfloat16")) == 2
    assert len(reconcile_all(*both, cast={"a": "bfloat16"})) == 2
    with pytest.raises(SpecError, match="parameter 'a': the source is float32"):
        reconcile_all(*both, cast={"b": "bfloat16"})


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (["a", "b", "a"], ["a", "b"], "the source has 'a' twice"),
        (["a", "b"], ["a", "b", "b"], "the target has 'b' twice"),
        (["a"], ["a", "b", "c"], r"the source has no 'b', .*\(nor 1 others\)"),
        (["a", "b"], ["a"], "the target has no 'b', which the source has;"),
    ],
)
def test_names(source: Iterable[str], target: Iterable[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        reconcile_all(*([(name, whole(1, 4)) for name in names] for names in (source, target)))
