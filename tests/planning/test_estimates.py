"""The seconds of plans: by hand, and what has to be given."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from collectives.sharding_pairs import Pair, pairs
from reshard.errors import LayoutError, PlanError
from reshard.topology import Link, Topology

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
def test_plans_by_hand(before: str, after: str, latency_s: float, transfer_s: float) -> None:
    estimate = reshard.plan(layout(before), layout(after), "int8").estimate(TOPOLOGY)
    assert (estimate.latency_s, estimate.transfer_s) == (latency_s, transfer_s)
    assert estimate.seconds_s == latency_s + transfer_s
    wide = reshard.plan(layout(before), layout(after), "float64").estimate(TOPOLOGY)
    assert (wide.latency_s, wide.transfer_s) == (latency_s, 8 * transfer_s)


def test_it_prints_as_a_table() -> None:
    estimate = reshard.plan(layout("x, -"), layout("-, x"), "int8").estimate(TOPOLOGY)
    words = " ".join(str(estimate).splitlines()[-1].split())
    assert words == "exchange direct 3 12 B 35 min 1 min 24 s 36 min 24 s"


def test_what_is_missing_is_said() -> None:
    with pytest.raises(PlanError, match="seconds of a plan without a dtype"):
        reshard.plan(layout("x, -"), layout("-, x")).estimate(TOPOLOGY)
    plan = reshard.plan(layout("x, -"), layout("-, x"), "int8")
    with pytest.raises(LayoutError, match="rank 2 of a topology over ranks 0 to 1"):
        plan.estimate(Topology([0, 0]))
    with pytest.raises(LayoutError, match="has no within_host link"):
        plan.estimate(Topology([0, 0, 1, 1]))


@settings(max_examples=60, deadline=None)
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
