"""Grids from what each rank knows of its own process groups."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import MeshError, SpecError
from reshard.megatron.groups import MegatronGrids
from reshard.megatron.names import MegatronNames
from reshard.megatron.ranks import MegatronRanks, places_along
from reshard.megatron.rosters import LocalParameter, gather_parameters
from selection import choose

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


def test_without_groups_of_experts_they_are_cut_as_all_else() -> None:
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
        ({}, "no rank says"),
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
def test_groups_that_cannot_be(groups: dict[int, Any], told: str) -> None:
    with pytest.raises(MeshError, match=told):
        MegatronGrids.from_groups(groups)


def test_layers_of_another_stack_are_no_copies() -> None:
    # Both stages have a layer 0 of their own, alike in all but what it is.
    names = MegatronNames(MegatronRanks(pp=2))
    rosters = {rank: [{"encoder.layers.0.w": LocalParameter((4, 2))}] for rank in (0, 1)}
    with pytest.raises(SpecError, match=r"is on stages \[0, 1\].*'decoder.layers', so name ano"):
        gather_parameters(names, rosters)
