"""Two descriptions of one parameter. The cases of Megatron's own tests are in tests/conformance."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import LayoutError, RuleError, SpecError
from reshard.megatron.parameters import MegatronParameter
from reshard.megatron.ranks import MegatronRanks
from reshard.megatron.tensor_pairs import TensorPair, reconcile, reconcile_all


def cut(tp: int, *shape: int, **attributes: Any) -> MegatronParameter:
    return MegatronParameter(MegatronRanks(tp=tp), shape, True, **attributes)


def whole(tp: int, *shape: int, **attributes: Any) -> MegatronParameter:
    return MegatronParameter(MegatronRanks(tp=tp), shape, **attributes)


def texts(pair: TensorPair) -> tuple[str, str]:
    return str(pair.source), str(pair.target)


@pytest.mark.parametrize(
    ("source", "target", "shape", "expected"),
    [
        # One side has no mark, and its local length says that it is cut all the same.
        (cut(2, 8), whole(4, 4), (16,), ("tp", "tp")),
        (whole(4, 4), cut(2, 8), (16,), ("tp", "tp")),
        # Equal lengths on equally many ranks: each takes from its own like, cut or not.
        (cut(2, 8), whole(2, 8), (16,), ("tp", "tp")),
        # Cut as the other: its stride, its heads, its padding.
        (cut(1, 8, partition_stride=2), whole(2, 4), (8,), ("tp@stride2[8]", "tp@stride2[4,4]")),
        (cut(8, 2, heads=4), whole(2, 4), (8,), ("tp@heads4", "tp@heads4")),
        (cut(2, 8, true_length=13), whole(4, 4), (13,), ("tp@pad8", "tp@pad4")),
        # One side cut, the other whole on several ranks.
        (cut(2, 8), whole(4, 16), (16,), ("tp", "-")),
        (whole(2, 16), cut(4, 4), (16,), ("-", "tp")),
        (cut(8, 2, heads=4), whole(4, 8), (8,), ("tp@heads4", "-")),
        (cut(2, 8, true_length=13), whole(4, 13), (13,), ("tp@pad8", "-")),
        # Marked on both, whole on every rank of both.
        (cut(2, 8), cut(4, 8), (8,), ("-", "-")),
        (cut(2, 8), whole(3, 8), (8,), ("-", "-")),
        (cut(2, 6, partition_sizes=(4, 2)), cut(1, 6, partition_sizes=(4, 2)), (6,), ("-", "-")),
        # Along other dimensions.
        (cut(2, 4, 6), cut(3, 8, 2, partition_dim=1), (8, 6), ("tp, -", "-, tp")),
        (
            cut(2, 6, 6, partition_sizes=(4, 2)),
            cut(2, 12, 3, partition_dim=1, partition_sizes=(2, 1)),
            (12, 6),
            ("tp@blocks[8,4], -", "-, tp@blocks[4,2]"),
        ),
        # Padded as the other, or not at all.
        (cut(2, 8, true_length=13), whole(1, 16), (13,), ("tp@pad8", "tp@pad16")),
        (cut(2, 8, true_length=13), whole(1, 13), (13,), ("tp@pad8", "tp@pad13")),
        # Strides of their own.
        (cut(2, 8, partition_stride=2), cut(2, 8), (16,), ("tp@stride2[8,8]", "tp")),
        # Blocks of one side, which may be a stride's.
        (cut(2, 6, partition_sizes=(4, 2)), whole(4, 3), (12,), ("tp@blocks[8,4]",) * 2),
        (
            cut(2, 6, partition_sizes=(3, 3)),
            cut(1, 12, partition_stride=2),
            (12,),
            ("tp@blocks[6,6]", "tp@stride2[12]"),
        ),
        # Neither is marked.
        (whole(2, 3, 4), whole(5, 3, 4), (3, 4), ("-, -", "-, -")),
        (whole(2), whole(3), (), ("", "")),
    ],
)  # fmt: skip
def test_both_sides_get_the_reading_in_which_they_agree(
    source: MegatronParameter,
    target: MegatronParameter,
    shape: tuple[int, ...],
    expected: tuple[str, str],
) -> None:
    pair = reconcile(source, target)
    assert pair.shape == shape
    assert texts(pair) == expected
    back = reconcile(target, source)
    assert (back.shape, texts(back)) == (shape, expected[::-1])
    # What was said of the local shapes is what the ranks have.
    for side, sharding in zip((source, target), pair[1:], strict=True):
        layout = sharding.layout(shape)
        for rank in layout.holders:
            assert layout.local_shape(rank) == side.local_shapes[rank % side.parts]


pairs_of_sides = st.tuples(
    *[st.tuples(st.integers(1, 4), st.integers(1, 12), st.booleans()) for _ in range(2)]
)


@given(pairs_of_sides)
def test_readings_that_fit_never_differ(given_sides: tuple[tuple[int, int, bool], ...]) -> None:
    """All readings of the lengths, tried: they give one length for the whole, or an error."""
    sides = [MegatronParameter(MegatronRanks(tp=tp), (n,), marked) for tp, n, marked in given_sides]
    local = tuple(n for _, n, _ in given_sides)
    if any(marked for _, _, marked in given_sides):
        readings = {tuple(tp * n for tp, n, _ in given_sides)}
        readings |= {tuple(tp * n if marked else n for tp, n, marked in given_sides)}
        readings |= {local} if given_sides[0][0] != given_sides[1][0] else set()
    else:
        readings = {local}
    lengths = {a for a, b in readings if a == b}
    assert len(lengths) <= 1
    if not lengths:
        with pytest.raises(SpecError):
            reconcile(*sides)
        return
    pair = reconcile(*sides)
    assert {pair.shape[0]} == lengths
    for side, sharding in zip(sides, pair[1:], strict=True):
        assert sharding.layout(pair.shape).local_shape(0) == side.local_shapes[0]


@given(st.data())
def test_a_round_trip_through_any_cuts(data: st.DataObject) -> None:
    """From one cut to another and back, every rank has what it had."""
    stride, unit = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    tps = data.draw(st.tuples(*[st.sampled_from([1, 2, 3, 4, 6])] * 2))
    local = [12 // tp * stride * unit for tp in tps]
    sides = [cut(tp, n, 2, partition_stride=stride) for tp, n in zip(tps, local, strict=True)]
    there, back = reconcile(*sides), reconcile(*reversed(sides))
    layouts = [sharding.layout(there.shape) for sharding in there[1:]]
    assert [sharding.layout(back.shape) for sharding in back[1:]] == layouts[::-1]
    rng = np.random.default_rng(0)
    arrays = {rank: rng.integers(0, 99, (local[0], 2)) for rank in layouts[0].holders}
    moved = reshard.plan(*layouts).run(arrays)
    returned = reshard.plan(*layouts[::-1]).run(moved)
    assert all(np.array_equal(returned[rank], arrays[rank]) for rank in arrays)
    assert sum(array.size for array in moved.values()) == math.prod(there.shape)


@pytest.mark.parametrize(
    ("source", "target", "error", "message"),
    [
        # Copies of the padded whole are not padded parts.
        (cut(2, 8, true_length=13), whole(4, 16), SpecError, "no reading"),
        (cut(2, 8), cut(4, 5), SpecError, r"\(both cut: 16 and 20; neither cut: 8 and 5\)"),
        (cut(2, 8), whole(4, 5), SpecError, r"both cut: 16 and 20; as marked: 16 and 5; neither"),
        (cut(2, 8, true_length=16), cut(4, 8, true_length=15), SpecError, "both cut: 16 and 15"),
        # A marked side that is whole cannot stand against one that is cut.
        (cut(2, 16), cut(4, 4), SpecError, "no reading"),
        # Padding that no side explains.
        (cut(2, 8, true_length=13), whole(1, 15), SpecError, r"\(as marked: 13 and 15\)"),
        (cut(2, 8, true_length=13), whole(4, 5), SpecError, "as marked: 13 and 5"),
        # Ranks of 8 copies, not 8 of 16 of which the second half is padding.
        (cut(2, 8, true_length=7), whole(2, 8), SpecError, "as marked: 7 and 8"),
        (
            cut(2, 6, partition_sizes=(4, 2)),
            cut(4, 3, heads=4),
            RuleError,
            r"blocks \[8, 4\] of the other side cannot be cut over 4 ranks",
        ),
        (cut(2, 3, partition_stride=2), cut(2, 3, partition_stride=2), RuleError, "of stride 2"),
    ],
)
def test_sides_that_do_not_fit_together_are_errors(
    source: MegatronParameter, target: MegatronParameter, error: type[LayoutError], message: str
) -> None:
    for pair in itertools.permutations((source, target)):
        with pytest.raises(error, match=message if pair[0] is source else None):
            reconcile(*pair)


def test_a_cast_of_unknown_types() -> None:
    with pytest.raises(SpecError, match="whose dtype is not given on both sides"):
        reconcile(cut(2, 4), cut(2, 4), cast="float32")
    assert reconcile(cut(2, 4, dtype="float32"), cut(2, 4)).shape == (8,)


def test_tied_names_are_served_by_the_source_that_has_one_of_them() -> None:
    one = whole(1, 4)
    chain = {"c": "b", "b": "a"}
    assert list(reconcile_all({"a": one}, {"a": one, "b": one, "c": one}, ties=chain)) == [
        "a",
        "b",
        "c",
    ]
    assert list(reconcile_all({"c": one}, {"b": one}, ties=chain)) == ["b"]
    # Each from its own where the source has both.
    other = MegatronParameter(MegatronRanks(offset=1), (4,))
    found = reconcile_all({"a": one, "b": other}, {"a": one, "b": one}, ties=chain)
    assert found["b"].source.mesh.devices == (1,)
    with pytest.raises(SpecError, match="go round in a circle: a -> b -> a"):
        reconcile_all({"a": one}, {"a": one}, ties={"a": "b", "b": "a"})
    with pytest.raises(SpecError, match="the target has no 'z'"):
        reconcile_all({"a": one, "z": one}, {"a": one}, ties=chain)
