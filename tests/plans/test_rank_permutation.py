"""Permutations of ranks against all others, and the relabelled jobs."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from reshard.binding import Binding, FileRange, View
from reshard.dtypes import dtype
from reshard.errors import LayoutError, MissingExtraError, PlanError, UsageError
from reshard.layout import Layout
from reshard.plans.hierarchical import StagedJob
from reshard.plans.job import Job, JobItem
from reshard.plans.rank_permutation import RankPermutation, relabel
from reshard.sharding import ShardingSpec
from reshard.topology import Topology
from strategies import meshes, shapes, specs

FEW = 5
# Every dealing of the ranks is tried.
FEWER = settings(max_examples=settings().max_examples // 2)


@st.composite
def small_jobs(draw: st.DrawFn) -> tuple[Job, list[tuple[ShardingSpec, tuple[int, ...]]]]:
    """Jobs onto one mesh of at most `FEW` devices, and their target specs and shapes."""
    source_mesh = draw(meshes(max_devices=6))
    target_mesh = draw(meshes(max_devices=FEW))
    items, targets = [], []
    for name in range(draw(st.integers(1, 3))):
        shape = draw(shapes(max_elements=60))
        target = draw(specs(target_mesh, shape, reductions=()))
        source = draw(specs(source_mesh, shape))
        kind = dtype(draw(st.sampled_from(["int8", "bfloat16", "float32"])))
        layouts = source.layout(shape), target.layout(shape)
        items.append(JobItem.between_ranks(f"t{name}", kind, *layouts))
        targets.append((target, shape))
    return Job(items), targets


def moved_bytes_when(job: Job, rank_of: dict[int, int]) -> int:
    moved = 0
    for item in job.items:
        cells = item.change.target
        given_out = {slot: rank_of.get(slot, slot) for slot in cells.holders}
        target = Layout(
            cells.shape,
            cells.tables,
            max(given_out.values(), default=0) + 1,
            [given_out[slot] for slot in cells.cell_slot.tolist()],
            cells.cell_part,
        )
        plan = reshard.plan(item.change.source, target)
        moved += plan.lower_bound_elements * item.dtype.itemsize_bytes
    return moved


@given(small_jobs(), st.sets(st.integers(0, 9), max_size=1), st.booleans())
@FEWER
def test_no_other_permutation_moves_less(
    made: tuple[Job, list[tuple[ShardingSpec, tuple[int, ...]]]], more: set[int], shrink: bool
) -> None:
    job, targets = made
    places = sorted({slot for item in job.items for slot in item.change.target.holders})
    ranks = sorted({*places, *more}) if shrink else places
    found = relabel(job, ranks=ranks if shrink else None)
    # Fewest bytes first, then most ranks that keep their place.
    least, others = min(
        (
            moved_bytes_when(job, dict(zip(places, dealt, strict=True))),
            sum(a != b for a, b in zip(places, dealt, strict=True)),
        )
        for dealt in itertools.permutations(ranks, len(places))
    )
    assert found.moved_bytes == least
    assert sum(found.rank_of[place] != place for place in places) == others
    assert found.moved_bytes_before == moved_bytes_when(job, {}) == job.lower_bound_bytes
    again = found.job(job)
    assert again.moved_bytes == again.lower_bound_bytes == least
    for item, (target, shape) in zip(again.items, targets, strict=True):
        # The mesh in its new order says the same as the layouts.
        layout = found.spec(target).layout(shape)
        assert found.spec(target).mesh is found.mesh(target.mesh)
        assert layout.cell_slot.tolist() == item.change.target.cell_slot.tolist()
        assert layout.cell_part.tolist() == item.change.target.cell_part.tolist()


@given(small_jobs(), st.lists(st.integers(0, 1), min_size=12, max_size=12))
@FEWER
def test_within_hosts_no_other_permutation_moves_less(
    made: tuple[Job, list[tuple[ShardingSpec, tuple[int, ...]]]], hosts: list[int]
) -> None:
    job, _ = made
    topology = Topology([0, 1, *hosts])
    places = sorted({slot for item in job.items for slot in item.change.target.holders})
    found = relabel(job, topology=topology)
    host = topology.rank_host
    assert all(host[old] == host[new] for old, new in found.rank_of.items())
    assert found.moved_bytes == min(
        moved_bytes_when(job, dict(zip(places, dealt, strict=True)))
        for dealt in itertools.permutations(places)
        if all(host[old] == host[new] for old, new in zip(places, dealt, strict=True))
    )


@given(small_jobs(), st.lists(st.integers(0, 2), min_size=12, max_size=12))
@FEWER
def test_hosts_are_exchanged_for_fewest_bytes_across_them(
    made: tuple[Job, list[tuple[ShardingSpec, tuple[int, ...]]]], hosts: list[int]
) -> None:
    job, _ = made
    topology = Topology([0, 1, 2, *hosts])
    host = topology.rank_host
    places = sorted({slot for item in job.items for slot in item.change.target.holders})
    found = relabel(job, topology=topology, exchange_hosts=True)

    def cost(rank_of: dict[int, int]) -> tuple[int, int]:
        dealt = RankPermutation(rank_of, 0, 0, 0).job(job)
        across = StagedJob(dealt, topology).across_hosts_bound_bytes
        return across, dealt.lower_bound_bytes

    together = []
    for permuted in itertools.permutations(places):
        rank_of = dict(zip(places, permuted, strict=True))
        pairs = {(host[old], host[new]) for old, new in rank_of.items()}
        if len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs}):
            together.append(rank_of)
    assert dict(found.rank_of) in together
    assert cost(dict(found.rank_of)) == min(map(cost, together))
    assert found.moved_bytes == cost(dict(found.rank_of))[1]


def test_two_hosts_with_each_others_elements_are_exchanged() -> None:
    """Ranks 0, 1 hold the first half; the target wants it on ranks 2, 3, in the other order."""
    source = reshard.spec(reshard.DeviceMesh.of(x=4), "x").layout((8,))
    mesh = reshard.DeviceMesh.of(x=4, devices=[3, 2, 0, 1])
    job = job_of(source, reshard.spec(mesh, "x").layout((8,)))
    topology = Topology([0, 0, 1, 1])
    found = relabel(job, topology=topology, exchange_hosts=True)
    assert found.mesh(mesh).devices == (0, 1, 2, 3)
    assert (found.moved_bytes_before, found.moved_bytes) == (8, 0)
    assert relabel(job, topology=topology).moved_bytes == 8


def test_a_block_cyclic_matrix_moves_a_third_less() -> None:
    """100000 x 100000 in blocks of 100 x 100, from a 2 x 4 to a 4 x 2 grid.

    By hand, in rows and columns of blocks: rank r holds every second row, from r // 4, and
    every fourth column, from r % 4; place s needs every fourth row, from s // 2, and every
    second column, from s % 2. Where the parities of both agree they share a sixteenth of the
    matrix, half of what the place needs, and otherwise nothing. With r = s they agree for 0, 1,
    6 and 7, so a quarter of the matrix stays; dealt anew they agree for all, and half stays.
    """
    grids = reshard.DeviceMesh.of(p=2, q=4), reshard.DeviceMesh.of(p=4, q=2)
    old, new = (reshard.spec(grid, "p@cyclic100, q@cyclic100") for grid in grids)
    shape = (100_000, 100_000)
    plan = reshard.plan(old.layout(shape), new.layout(shape), dtype="float64")
    found = relabel(plan)
    whole = 8 * 100_000**2
    assert found.needed_bytes == whole
    assert (found.moved_bytes_before, found.moved_bytes) == (whole * 3 // 4, whole // 2)
    assert 3 * found.moved_bytes == 2 * found.moved_bytes_before
    again = reshard.plan(old.layout(shape), found.spec(new).layout(shape), dtype="float64")
    assert again.lower_bound_bytes == found.moved_bytes
    assert plan.lower_bound_bytes == found.moved_bytes_before


def job_of(source: Layout, target: Layout, kind: str = "int8") -> Job:
    return Job([JobItem.between_ranks("w", dtype(kind), source, target)])


def test_a_target_on_other_ranks_is_not_relabelled() -> None:
    source = reshard.spec(reshard.DeviceMesh.of(x=2), "x").layout((4,))
    mesh = reshard.DeviceMesh.of(x=2, devices=[3, 2])
    found = relabel(job_of(source, reshard.spec(mesh, "x").layout((4,))))
    assert dict(found.rank_of) == {2: 2, 3: 3}
    assert (found.moved_bytes, found.moved_bytes_before) == (4, 4)
    assert found.mesh(mesh) is mesh


def test_holders_of_an_overlapping_target_keep_elements() -> None:
    source = reshard.spec(reshard.DeviceMesh.of(x=4), "x").layout((8,))
    mesh = reshard.DeviceMesh.of(x=4, devices=[4, 5, 2, 1])
    found = relabel(job_of(source, reshard.spec(mesh, "x").layout((8,))))
    # Rank 1 takes the second quarter, which was rank 5's; rank 2 has its own.
    assert found.mesh(mesh).devices == (4, 1, 2, 5)
    assert (found.moved_bytes_before, found.moved_bytes) == (6, 4)


def test_a_target_that_shrinks_may_choose_its_ranks() -> None:
    heads = reshard.spec(reshard.DeviceMesh.of(x=8), "x").layout((8,))
    mesh = reshard.DeviceMesh.of(x=4)
    target = reshard.spec(mesh, "x").layout((8,))
    found = relabel(job_of(heads, target), ranks=range(8))
    assert found.moved_bytes == 4
    assert all(rank // 2 == place for place, rank in enumerate(found.mesh(mesh).devices))
    # Who was not asked about gets a number that is free.
    assert sorted(found.rank_of) == sorted(found.rank_of.values()) == list(range(8))


def test_an_equally_good_permutation_is_the_identity() -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=2)
    layout = reshard.spec(mesh, "x").layout((4,))
    assert dict(relabel(job_of(layout, layout)).rank_of) == {0: 0, 1: 1, 2: 2, 3: 3}
    nothing = Layout.whole((4,), [5], 6)
    assert dict(relabel(job_of(layout, nothing)).rank_of) == {5: 5}


def test_keeping_hosts_costs_bytes() -> None:
    source = reshard.spec(reshard.DeviceMesh.of(x=4), "x").layout((8,))
    turned = reshard.DeviceMesh.of(x=4, devices=[3, 2, 1, 0])
    target = reshard.spec(turned, "x").layout((8,))
    job = job_of(source, target, "bfloat16")
    assert relabel(job).mesh(turned).devices == (0, 1, 2, 3)
    assert relabel(job).moved_bytes == 0
    apart = relabel(job, topology=Topology([0, 0, 1, 1]))
    assert apart.moved_bytes == 16
    assert apart.mesh(turned) is turned
    assert relabel(job, topology=Topology([0, 1, 0, 1])).moved_bytes == 16
    assert relabel(job, topology=Topology([0, 1, 1, 0])).moved_bytes == 0


def test_views_and_addresses_go_with_their_shards() -> None:
    source = reshard.spec(reshard.DeviceMesh.of(x=2), "x, -").layout((4, 2))
    turned = reshard.DeviceMesh.of(x=2, devices=[1, 0])
    target = reshard.spec(turned, "x, -").layout((4, 2))
    plain = JobItem.between_ranks("w", dtype("int8"), source, target)
    views = {0: View(0, (1, 2)), 1: View(8, (2, 1))}
    item = JobItem(
        "w", plain.dtype, plain.change, plain.source, Binding(target, plain.target.addresses, views)
    )
    (found,) = relabel(Job([item])).job(Job([item])).items
    assert found.change.target is source
    assert found.target.views == {0: views[1], 1: views[0]}
    assert found.target.addresses == Binding.to_ranks(source).addresses


def test_shards_in_files_stay_where_they_are() -> None:
    layout = reshard.spec(reshard.DeviceMesh.of(x=2), "x").layout((4,))
    plain = JobItem.between_ranks("w", dtype("int8"), layout, layout)
    in_file = Binding(layout, {0: FileRange("a", 0), 1: FileRange("a", 2)}, {})
    item = JobItem("w", plain.dtype, plain.change, plain.source, in_file)
    found = relabel(Job([item]))
    with pytest.raises(PlanError, match=r"target shard 0 of 'w' is at FileRange"):
        found.job(Job([item]))


def test_invalid_jobs_are_not_relabelled() -> None:
    layout = reshard.spec(reshard.DeviceMesh.of(x=2), "x").layout((4,))
    job = job_of(layout, layout)
    with pytest.raises(PlanError, match=r"1 ranks \[7\] for 2 positions \[0, 1\]"):
        relabel(job, ranks=[7])
    with pytest.raises(PlanError, match="rank -1 in ranks: expected"):
        relabel(job, ranks=[-1, 0])
    with pytest.raises(PlanError, match=r"1 ranks \[0\] for 2 positions \[0, 1\] .* on host 0"):
        relabel(job, ranks=[0, 2], topology=Topology([0, 0, 1]))
    with pytest.raises(LayoutError, match="rank 1 of a topology"):
        relabel(job, topology=Topology([0]))
    with pytest.raises(PlanError, match="without a dtype"):
        relabel(reshard.plan(layout, layout))
    with pytest.raises(UsageError, match="exchange_hosts=True without a topology"):
        relabel(job, exchange_hosts=True)
    apart = Topology([0, 1, 2, 2])
    with pytest.raises(PlanError, match="ranks on 1 hosts for positions on 2 hosts"):
        relabel(job, ranks=[2, 3], topology=apart, exchange_hosts=True)
    with pytest.raises(PlanError, match="no host has 2 ranks left for the positions on host 0"):
        relabel(job, ranks=[2, 3], topology=Topology([0, 0, 1, 2]), exchange_hosts=True)
    with pytest.raises(PlanError, match="is not a permutation"):
        RankPermutation({0: 1, 1: 1}, 0, 0, 0)
    huge = Layout.flat_ranges((2**58, 1), {0: (0, 3), 1: (3, 2**58)})
    with pytest.raises(PlanError, match="cannot be compared exactly"):
        relabel(job_of(huge, huge))


@pytest.mark.parametrize("elements", [2**50 - 1, 2**50])
def test_worths_are_refused_from_the_limit_on(elements: int) -> None:
    """A position of two ranks with all elements but one, and that one: doubles have 53 bits."""
    source = Layout.flat_ranges((elements,), {0: (0, elements - 1), 1: (elements - 1, elements)})
    job = job_of(source, Layout.whole((elements,), [0], 2))
    if elements < 2**50:
        assert relabel(job, ranks=[0, 1]).moved_bytes == 1
        return
    with pytest.raises(PlanError, match=f"worth up to {2**51} units each cannot be compared"):
        relabel(job, ranks=[0, 1])


def test_without_scipy_the_error_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    layout = Layout.replicated((2,))
    with pytest.raises(MissingExtraError, match=r"pip install 'reshard\[planning\]'"):
        relabel(job_of(layout, layout))


def test_an_empty_job_is_not_relabelled() -> None:
    found = relabel(Job([]))
    assert (dict(found.rank_of), found.moved_bytes) == ({}, 0)


def test_many_ranks_are_dealt_exactly() -> None:
    generator = np.random.default_rng(5)
    order = generator.permutation(128).tolist()
    mesh = reshard.DeviceMesh.of(x=128, devices=order)
    source = reshard.spec(reshard.DeviceMesh.of(x=128), "x").layout((1000,))
    found = relabel(job_of(source, reshard.spec(mesh, "x").layout((1000,))))
    assert found.moved_bytes == 0 < found.moved_bytes_before
    assert found.mesh(mesh).devices[:125] == tuple(range(125))
