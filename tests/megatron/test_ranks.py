"""Megatron's ranks against groups listed by hand, and against the sum that defines them.

Grids from what each rank knows of its own process groups.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import MeshError, SpecError
from reshard.megatron.names import MegatronNames
from reshard.megatron.parameters import LocalParameter, gather_parameters
from reshard.megatron.ranks import MegatronGrids, MegatronRanks, places_along, rank_grid
from selection import choose

# 16 ranks, tensor parallel 2, pipeline parallel 4: the groups that Megatron's documentation lists.
SIXTEEN = {
    "dp": "0 2, 1 3, 4 6, 5 7, 8 10, 9 11, 12 14, 13 15",
    "tp": "0 1, 2 3, 4 5, 6 7, 8 9, 10 11, 12 13, 14 15",
    "pp": "0 4 8 12, 1 5 9 13, 2 6 10 14, 3 7 11 15",
    "tp-pp": "0 1 4 5 8 9 12 13, 2 3 6 7 10 11 14 15",
}


def listed(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, group.split())) for group in text.split(","))


@pytest.mark.parametrize(("words", "groups"), SIXTEEN.items())
def test_the_groups_of_sixteen_ranks(words: str, groups: str) -> None:
    ranks = MegatronRanks.of_world(16, tp=2, pp=4)
    assert ranks.groups(words) == listed(groups)
    assert ranks.groups("-".join(reversed(words.split("-")))) == listed(groups)


def test_another_order() -> None:
    ranks = MegatronRanks(tp=2, pp=2, dp=2, order="tp-pp-dp")
    assert ranks.groups("dp") == listed("0 4, 1 5, 2 6, 3 7")
    assert ranks.groups("pp") == listed("0 2, 1 3, 4 6, 5 7")


def test_experts_have_a_grid_of_their_own() -> None:
    """Attention over tp=2 x cp=2 x dp=2, experts over etp=1 x ep=4 x edp=2 of the same ranks."""
    ranks = MegatronRanks(tp=2, cp=2, dp=2, ep=4, etp=1)
    assert ranks.groups("tp") == listed("0 1, 2 3, 4 5, 6 7")
    assert ranks.groups("cp") == listed("0 2, 1 3, 4 6, 5 7")
    assert ranks.groups("dp-cp") == listed("0 2 4 6, 1 3 5 7")
    assert ranks.groups("ep") == listed("0 1 2 3, 4 5 6 7")
    assert ranks.groups("edp") == listed("0 4, 1 5, 2 6, 3 7")
    assert (ranks.edp, ranks.world_size) == (2, 8)


def test_an_offset_moves_every_rank() -> None:
    ranks = MegatronRanks(tp=2, dp=2, offset=10)
    assert ranks.groups("tp") == listed("10 11, 12 13")
    assert ranks.expert.devices == (10, 11, 12, 13)


def test_words_of_size_one_may_be_left_out() -> None:
    assert MegatronRanks(tp=2, dp=3, order="TP-DP").dense.shape == (1, 1, 3, 2)
    assert MegatronRanks(tp=2, dp=3, order="dp-tp").groups("tp") == listed("0 3, 1 4, 2 5")


@given(st.permutations(["tp", "cp", "ep", "dp", "pp"]), st.data())
def test_groups_are_those_of_the_sum(order: list[str], data: st.DataObject) -> None:
    """A rank is the sum of its places times the sizes before each; a group varies some of them."""
    small = st.integers(1, 3)
    sizes = {word: data.draw(small) for word in ("tp", "cp", "dp", "pp")}
    ranks = MegatronRanks(**sizes, etp=1, order="-".join(order)) if order[-1] == "pp" else None
    grid = rank_grid(sizes, "-".join(order))
    chosen = data.draw(st.sets(st.sampled_from(list(sizes)), min_size=1))
    words = [word for word in order if word in sizes]
    stride = {word: math.prod(sizes[w] for w in words[:i]) for i, word in enumerate(words)}

    def places(of: list[str]) -> list[dict[str, int]]:
        """All places along some words, the first varying fastest."""
        found = itertools.product(*(range(sizes[word]) for word in reversed(of)))
        return [dict(zip(reversed(of), place, strict=True)) for place in found]

    expected = tuple(
        tuple(
            sum(at * stride[word] for word, at in {**outside, **inside}.items())
            for inside in places([word for word in words if word in chosen])
        )
        for outside in places([word for word in words if word not in chosen])
    )
    assert grid.groups([axis for axis in grid.axis_names if axis in chosen]) == expected
    if ranks is not None:
        assert ranks.groups("-".join(chosen)) == expected


@given(
    st.sampled_from(["tp-cp-ep-dp-pp", "ep-tp-dp-cp-pp", "cp-dp-ep-tp-pp"]),
    *[st.sampled_from([1, 2, 3])] * 4,
    st.sampled_from([1, 2]),
)
def test_both_grids_have_the_same_stages(
    order: str, tp: int, cp: int, dp: int, pp: int, ep: int
) -> None:
    if (tp * cp * dp) % ep:
        with pytest.raises(MeshError, match="must divide the number of ranks"):
            MegatronRanks(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=1, order=order)
        return
    ranks = MegatronRanks(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=1, order=order)
    assert (
        sorted(ranks.dense.devices) == sorted(ranks.expert.devices) == list(range(ranks.dense.size))
    )
    assert ranks.dense.groups(["pp"]) == ranks.expert.groups(["pp"]) == ranks.groups("pp")


def test_a_pipeline_that_would_differ_between_the_grids() -> None:
    """Of dense tensors rank 1 would be on stage 1, of experts on stage 0."""
    with pytest.raises(MeshError, match=r"\(dp 4\) and on another for its experts \(edp 2\)"):
        MegatronRanks(dp=4, pp=2, ep=2, order="tp-ep-pp-dp")
    # Megatron asks for pp last or equally many copies; it is enough that the stages agree.
    ranks = MegatronRanks(dp=4, pp=2, ep=2, order="tp-pp-ep-dp")
    assert ranks.dense.groups(["pp"]) == ranks.expert.groups(["pp"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "parallel size tp 0 must be at least 1"),
        ({"dp": 2.0}, r"parallel size dp 2\.0 must be a whole number"),
        ({"dp": True}, "parallel size dp True must be a whole number"),
        ({"offset": -1}, "first rank -1 must not be negative"),
        ({"tp": 2, "order": "dp-pp"}, "leaves out tp, whose size is 2"),
        ({"dp": 2, "order": "tp-dp-dp"}, "at most once"),
        ({"order": "tp-xp"}, "order 'tp-xp'; write each of tp, cp, ep, dp, pp"),
        ({"dp": 2, "ep": 3}, "2 ranks .* etp 1 x ep 3 x pp 1 = 3; it must divide"),
        ({"tp": 2, "etp": 4}, "2 ranks .* etp 4 x ep 1 x pp 1 = 4"),
        ({"tp": 2, "etp": 1, "order": "tp-ep-pp"}, "leaves out edp, whose size is 2"),
    ],
)
def test_contradictory_sizes_are_errors(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        MegatronRanks(**sizes)  # type: ignore[arg-type]


def test_a_number_of_ranks_that_sizes_do_not_divide_is_an_error() -> None:
    with pytest.raises(MeshError, match="10 ranks cannot be cut into tp x cp x pp = 4"):
        MegatronRanks.of_world(10, tp=2, pp=2)
    with pytest.raises(MeshError, match="0 ranks"):
        MegatronRanks.of_world(0)


@pytest.mark.parametrize("words", ["tp-ep", "xp", "tp-tp", ""])
def test_missing_groups_are_errors(words: str) -> None:
    with pytest.raises(MeshError, match="write words of one grid once each"):
        MegatronRanks(tp=2, dp=2).groups(words)


AXES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp")


def groups_of(ranks: MegatronRanks, axes: tuple[str, ...] = AXES) -> dict[int, dict[str, Any]]:
    """What every rank says of its groups."""
    found: dict[int, dict[str, Any]] = {rank: {} for rank in ranks.dense.devices}
    for axis in axes:
        for group in ranks.groups(axis):
            for rank in group:
                found[rank][axis] = group
    return found


@st.composite
def all_ranks(draw: st.DrawFn) -> MegatronRanks:
    tp, etp, ep = (draw(st.sampled_from([1, 2])) for _ in range(3))
    cp, pp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    dp = etp * ep * draw(st.sampled_from([1, 2]))
    offset = draw(st.sampled_from([0, 5]))
    return MegatronRanks(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, offset=offset)


@settings(max_examples=choose(18, 60))
@given(all_ranks())
def test_the_places_are_those_of_the_sizes(ranks: MegatronRanks) -> None:
    grids = MegatronGrids.from_groups(groups_of(ranks))
    for mesh, found in ((ranks.dense, grids.dense), (ranks.expert, grids.expert)):
        assert set(mesh.axis_names) == set(found.axis_names)
        for axis in mesh.axis_names:
            assert places_along(mesh, axis) == places_along(found, axis)
    sizes = (ranks.tp, ranks.pp, ranks.dp, ranks.ep, ranks.expert_tp)
    assert sizes == (grids.tp, grids.pp, grids.dp, grids.ep, grids.expert_tp)


@settings(max_examples=choose(18, 60))
@given(all_ranks())
def test_what_holds_copies_needs_no_groups(ranks: MegatronRanks) -> None:
    grids = MegatronGrids.from_groups(groups_of(ranks, ("tp", "cp", "pp", "ep", "etp")))
    for mesh, found in ((ranks.dense, grids.dense), (ranks.expert, grids.expert)):
        for axis in ("tp", "cp", "pp", "ep", "etp"):
            if axis in mesh.axis_names:
                assert places_along(mesh, axis) == places_along(found, axis)
        assert mesh.shape == found.shape


def test_experts_without_groups_are_sharded_as_other_parameters() -> None:
    grids = MegatronGrids.from_groups(groups_of(MegatronRanks(tp=2, dp=4), ("tp",)))
    assert (grids.expert_tp, grids.ep) == (2, 1)
    grids = MegatronGrids.from_groups(groups_of(MegatronRanks(tp=2, dp=4, ep=2), ("tp", "ep")))
    assert (grids.expert_tp, grids.ep, grids.dp) == (2, 2, 4)


def test_ranks_in_any_order_with_gaps() -> None:
    tp, pp = {8: (8, 3), 3: (8, 3), 5: (5, 6), 6: (5, 6)}, {8: (5, 8), 5: (5, 8), 3: (6, 3)}
    pp[6] = pp[3]
    grids = MegatronGrids.from_groups({rank: {"tp": tp[rank], "pp": pp[rank]} for rank in tp})
    assert dict(places_along(grids.dense, "tp")) == {8: 0, 3: 1, 5: 0, 6: 1}
    assert dict(places_along(grids.dense, "pp")) == {5: 0, 8: 1, 6: 0, 3: 1}
    half = LocalParameter((4, 2), tensor_model_parallel=True)
    names = MegatronNames(grids)
    rosters = {rank: [{"w": half}] if rank in (5, 6) else [{}] for rank in tp}
    found = gather_parameters(names, rosters)["w"]
    layout = found.spec().layout(found.global_shape)
    assert [layout.boxes(rank)[0].start[0] for rank in (5, 6)] == [0, 4]
    assert layout.holders == (5, 6)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ({}, "no process groups; give those of at least one rank"),
        ({0: {"tpp": (0,)}}, "along 'tpp'; the axes are tp, cp"),
        ({0: {"tp": (0, 1)}, 1: {}}, "rank 1 has no process group along tp"),
        ({0: {"tp": (1,)}, 1: {"tp": (1,)}}, "rank 0 has the ranks .1. for its group along tp"),
        ({0: {"tp": (0, 1)}}, "rank 1 in its group along tp, which has no part of the model"),
        ({0: {"tp": (0, 1)}, 1: {"tp": (1,)}}, r"rank 0 has the group \[0, 1\] along tp, but ra"),
        (
            {0: {"tp": (0, 1)}, 1: {"tp": (0, 1)}, 2: {"tp": (2,)}},
            "3 ranks make no grid of tp 2, cp 1, dp 2, pp 1: 1 places are no rank's",
        ),
        (
            {rank: {"tp": (0, 1), "pp": (0, 1)} for rank in (0, 1)},
            "2 places are no rank's",
        ),
        (
            {rank: {"tp": (rank,), "dp": (rank,)} for rank in (0, 1)},
            r"ranks \[0, 1\] have one place",
        ),
    ],
)
def test_contradictory_groups_are_errors(groups: dict[int, Any], told: str) -> None:
    with pytest.raises(MeshError, match=told):
        MegatronGrids.from_groups(groups)


def test_layers_of_another_stack_are_not_copies() -> None:
    # Both stages have a layer 0 of their own, alike in all but what it is.
    names = MegatronNames(MegatronRanks(pp=2))
    rosters = {rank: [{"encoder.layers.0.w": LocalParameter((4, 2))}] for rank in (0, 1)}
    with pytest.raises(SpecError, match=r"is on stages \[0, 1\].*'decoder.layers', so name ano"):
        gather_parameters(names, rosters)
