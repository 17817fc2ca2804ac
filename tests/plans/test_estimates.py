"""Local copies against local arrays, and the seconds of plans and jobs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from collectives.sharding_pairs import Pair, pairs
from reshard.binding import Binding, FileRange
from reshard.dtypes import dtype
from reshard.errors import LayoutError, PlanError
from reshard.geometry.transfers import Transfers
from reshard.layout import Box, Layout
from reshard.plans.estimates import find_copies
from reshard.plans.schedule import LARGE_PIECE_BYTES
from reshard.topology import Link, Topology
from selection import choose


def offsets(
    layout: Layout, cell: int, start: list[int], shape: list[int]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Where the elements of a box lie in the memory of a cell, in the order of the box."""
    whole = layout.cell_shape[cell].tolist()
    numbers = np.arange(int(np.prod(whole))).reshape(whole)
    index = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
    return numbers[index].reshape(-1)


def breaks(*sides: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Runs of memory: one, and one more wherever a side does not go on."""
    goes_on = np.ones(len(sides[0]) - 1, dtype=bool)
    for side in sides:
        goes_on &= np.diff(side) == 1
    return 1 + int((~goes_on).sum())


def counted(rows: Transfers, source: Layout, target: Layout, width: int) -> dict[int, list[int]]:
    """Bytes, runs and combined bytes of each rank."""
    ranks = max(source.slots, target.slots)
    totals = {rank: [0, 0, 0] for rank in range(ranks)}
    between: dict[tuple[int, int, int], int] = {}
    keys = list(
        zip(rows.order.tolist(), rows.source_slot.tolist(), rows.target_slot.tolist(), strict=True)
    )
    sizes = (rows.elements * width).tolist()
    for key, size in zip(keys, sizes, strict=True):
        if key[1] != key[2] and size < LARGE_PIECE_BYTES:
            between[key] = between.get(key, 0) + 1
    for row, (key, size) in enumerate(zip(keys, sizes, strict=True)):
        shape = rows.shape[row].tolist()
        here = offsets(source, rows.source_cell[row], rows.source_start[row].tolist(), shape)
        there = offsets(target, rows.target_cell[row], rows.target_start[row].tolist(), shape)
        order, sender, receiver = key
        combined = size if order else 0
        if rows.stays[row]:
            runs = max(breaks(here), breaks(there))
            for place, more in enumerate((size, runs, combined)):
                totals[receiver][place] += more
            continue
        together = size < LARGE_PIECE_BYTES and between[key] > 1
        for rank, side, is_end in ((sender, here, False), (receiver, there, True)):
            if together or breaks(side) > 1 or (is_end and order):
                extra = combined if is_end else 0
                for place, more in enumerate((size, breaks(side), extra)):
                    totals[rank][place] += more
    return totals


@settings(max_examples=choose(24, 80), deadline=None)
@given(pairs())
def test_copies_are_those_of_local_arrays(pair: Pair) -> None:
    before, after, shape = pair
    source, target = before.layout(shape), after.layout(shape)
    plan = reshard.plan(source, target)
    if not len(plan.transfers) or not plan.transfers.elements.all():
        return
    found = find_copies(plan.transfers, source, target, 2)
    expected = counted(plan.transfers, source, target, 2)
    columns = found.by_rank(len(expected))
    assert {rank: [int(c[rank]) for c in columns] for rank in expected} == expected


def test_elements_in_place_are_not_copied() -> None:
    mesh = reshard.DeviceMesh.of(x=2)
    rows, columns = (reshard.spec(mesh, text).layout((4, 4)) for text in ("x, -", "-, x"))
    transfers = reshard.plan(rows, columns).transfers
    kept, moved = (find_copies(transfers, rows, columns, 1, keeps=k) for k in (True, False))
    assert kept.by_rank(2)[0].tolist() == [8, 8]
    assert moved.by_rank(2)[0].tolist() == [4, 4]


def test_small_pieces_are_packed_and_large_ones_are_not() -> None:
    # Rank 1 gets two stretches of rank 0's: packed at both ends where they are small, though each
    # lies in one run.
    for length, packed in ((8, True), (LARGE_PIECE_BYTES, False)):
        shape = (4 * length,)
        source = Layout.from_boxes(shape, [(0, Box((0,), shape))])
        target = Layout.from_boxes(
            shape, [(1, Box((0,), (length,))), (1, Box((2 * length,), (3 * length,)))]
        )
        found = find_copies(reshard.plan(source, target).transfers, source, target, 1)
        expected = [2 * length, 2 * length] if packed else [0, 0]
        assert found.by_rank(2)[0].tolist() == expected
    alone = Layout.from_boxes((8,), [(1, Box((0,), (4,)))])
    whole = Layout.from_boxes((8,), [(0, Box((0,), (8,)))])
    found = find_copies(reshard.plan(whole, alone).transfers, whole, alone, 1)
    assert not len(found.rank)


# A byte takes a second within a host, ten between hosts.
TOPOLOGY = Topology.of(
    hosts=2, ranks_per_host=2, within_host=Link(1.0, 100.0), between_hosts=Link(0.1, 1000.0)
)
MESH = reshard.DeviceMesh.of(x=4)


def layout(text: str, shape: tuple[int, ...] = (8, 8)) -> reshard.Layout:
    return reshard.spec(MESH, text).layout(shape)


@pytest.mark.parametrize(
    ("before", "after", "latency_s", "transfer_s"),
    [
        # Four bytes to each of the others, one of whom is near.
        ("x, -", "-, x", 100 + 2000, 4 + 2 * 40),
        # Sixteen from each of the others.
        ("x, -", "-, -", 100 + 2000, 16 + 2 * 160),
        ("-, -", "x, -", 0, 0),
        ("x, -", "x, -", 0, 0),
    ],
)
def test_a_plan_takes_the_seconds_computed_by_hand(
    before: str, after: str, latency_s: float, transfer_s: float
) -> None:
    estimate = reshard.plan(layout(before), layout(after), "int8").estimate(TOPOLOGY)
    assert (estimate.latency_s, estimate.transfer_s) == (latency_s, transfer_s)
    assert estimate.seconds_s == latency_s + transfer_s
    wide = reshard.plan(layout(before), layout(after), "float64").estimate(TOPOLOGY)
    assert (wide.latency_s, wide.transfer_s) == (latency_s, 8 * transfer_s)


def test_it_prints_as_a_table() -> None:
    estimate = reshard.plan(layout("x, -"), layout("-, x"), "int8").estimate(TOPOLOGY)
    words = " ".join(str(estimate).splitlines()[-1].split())
    assert words == "exchange direct 3 12 B 35 min 1 min 24 s 36 min 24 s"


def test_missing_information_raises() -> None:
    with pytest.raises(PlanError, match="seconds of a plan without a dtype"):
        reshard.plan(layout("x, -"), layout("-, x")).estimate(TOPOLOGY)
    plan = reshard.plan(layout("x, -"), layout("-, x"), "int8")
    with pytest.raises(LayoutError, match="rank 2 of a topology over ranks 0 to 1"):
        plan.estimate(Topology([0, 0]))
    with pytest.raises(LayoutError, match="has no within_host link"):
        plan.estimate(Topology([0, 0, 1, 1]))


@settings(max_examples=choose(18, 60), deadline=None)
@given(pairs(), st.integers(0, 1 << 20))
def test_seconds_lie_between_those_of_one_link_and_of_all_turns(pair: Pair, seed: int) -> None:
    source, target, shape = pair
    plan = reshard.plan(source.layout(shape), target.layout(shape), "int16")
    ranks = max(plan.source.slots, plan.target.slots)
    hosts = [(rank * (seed | 1) >> 3) % 2 if rank > 1 else rank for rank in range(ranks)]
    topology = Topology(hosts, None, Link(4.0, 1.0), Link(0.5, 16.0))
    seconds_s = plan.estimate(topology).seconds_s
    moved = plan.transfers.moving
    pairs_of_ranks = set(zip(moved.source_slot.tolist(), moved.target_slot.tolist(), strict=True))
    busiest = max(plan.sent_elements.max(initial=0), plan.received_elements.max(initial=0))
    assert seconds_s >= 2 * busiest / 4
    assert seconds_s <= 16 * len(pairs_of_ranks) + 2 * plan.moved_elements / 0.5
    assert (seconds_s == 0) == (not plan.moved_elements)


def job_of(count: int, before: str, after: str) -> reshard.Job:
    return reshard.Job(
        reshard.JobItem.between_ranks(f"t{number}", dtype("int8"), layout(before), layout(after))
        for number in range(count)
    )


def test_the_messages_of_a_job_carry_all_of_its_tensors() -> None:
    one, three = (job_of(count, "x, -", "-, x").estimate(TOPOLOGY) for count in (1, 3))
    plan = reshard.plan(layout("x, -"), layout("-, x"), "int8").estimate(TOPOLOGY)
    assert one == plan
    assert (three.latency_s, three.transfer_s) == (one.latency_s, 3 * one.transfer_s)
    assert reshard.Job([]).estimate(TOPOLOGY).seconds_s == 0
    narrow, wide = (
        reshard.JobItem.between_ranks(name, dtype(name), layout("x, -"), layout("-, x"))
        for name in ("int8", "float64")
    )
    both = reshard.Job([narrow, wide]).estimate(TOPOLOGY)
    assert (both.latency_s, both.transfer_s) == (one.latency_s, 9 * one.transfer_s)


def test_stages_spare_the_network() -> None:
    # Two ranks of a host need what two of the other have: 32 bytes each.
    job = job_of(1, "x, -", "-, -")
    exchange, fan_out = reshard.StagedJob(job, TOPOLOGY).estimate().parts
    # Each rank brings in half of what its host lacks, 16 bytes, and passes it on; meanwhile it
    # sends 16 bytes to the neighbour.
    assert (exchange.name, fan_out.name) == ("exchange", "fan-out")
    assert fan_out.seconds_s == 100 + 16
    assert exchange.transfer_s == 16 + 160
    direct = job.estimate(TOPOLOGY)
    assert direct.transfer_s == 16 + 320


def test_a_job_from_files_has_no_estimate() -> None:
    item = job_of(1, "x, -", "-, x").items[0]
    addresses = {slot: FileRange("f", 16 * slot) for slot in range(4)}
    bound = Binding(item.source.layout, addresses, {})
    job = reshard.Job([reshard.JobItem("t", item.dtype, item.change, bound, item.target)])
    with pytest.raises(PlanError, match="shard 0 of 't' is at FileRange"):
        job.estimate(TOPOLOGY)
