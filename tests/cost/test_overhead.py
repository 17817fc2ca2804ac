"""Copies, shared hosts, calls and steps in estimates: by hand."""

from __future__ import annotations

import dataclasses

import pytest

import reshard
from reshard.collectives import choose, find_program
from reshard.cost import LocalCopies, collective_cost, message_cost
from reshard.errors import LayoutError, UsageError
from reshard.topology import Link, Overhead, Topology

MESH = reshard.DeviceMesh.of(x=2, y=2)
LINK = Link(1.0, 100.0)
ONE = Overhead(copies=Link(0.5, 10.0))
SHARED = Overhead(shared_messages=Link(0.25, 1000.0), shared_copies=Link(0.125, 20.0))


def topology(overhead: Overhead, hosts: int = 1) -> Topology:
    return Topology.of(
        hosts=hosts,
        ranks_per_host=4 // hosts,
        within_host=LINK,
        between_hosts=LINK,
        overhead=overhead,
    )


def plan(before: str, after: str, shape: tuple[int, ...] = (8, 8)) -> reshard.Plan:
    source, target = (reshard.spec(MESH, text).layout(shape) for text in (before, after))
    return reshard.plan(source, target, "int8")


def test_a_rank_packs_and_keeps() -> None:
    # From rows to columns a rank has 2 x 8, packs three pieces of 2 x 2 in 2 runs each, keeps one
    # in 2 runs; what it receives is small, and the only piece from each: 2 x 2 in one run.
    part = plan("x y, -", "-, x y").estimate(topology(ONE)).parts[0]
    assert (part.messages, part.latency_s, part.transfer_s) == (3, 300, 12)
    assert part.copy_s == 4 * (2 * 10 + 4 / 0.5)
    assert part.seconds_s == part.latency_s + part.transfer_s + part.copy_s
    dense = plan("x y, -", "-, -").estimate(topology(ONE)).parts[0]
    # Only its own 16 bytes, one run.
    assert dense.copy_s == 10 + 16 / 0.5


def test_a_host_takes_as_long_as_all_its_ranks_together() -> None:
    moved = plan("x y, -", "-, x y")
    part = moved.estimate(topology(SHARED)).parts[0]
    assert (part.messages, part.busiest_bytes) == (12, 48)
    assert (part.latency_s, part.transfer_s) == (12 * 1000, 48 / 0.25)
    assert part.copy_s == 16 * (2 * 20 + 4 / 0.125)
    # Two hosts share the work; messages between them are no host's own.
    halved = moved.estimate(topology(SHARED, hosts=2)).parts[0]
    assert (halved.messages, halved.busiest_bytes) == (2, 8)
    assert halved.copy_s == 8 * (2 * 20 + 4 / 0.125)
    # Where a host has room, the busiest rank counts.
    wide = Overhead(shared_messages=Link(1e9), shared_copies=Link(1e9))
    assert moved.estimate(topology(wide)) == moved.estimate(topology(Overhead()))


def test_ranks_of_a_host_share_its_network_and_hosts_their_racks_uplink() -> None:
    moved = plan("x y, -", "-, x y")
    # Each rank sends four bytes to each other: of a host, eight each to the two on another.
    network = Overhead(shared_network=Link(0.01, 5.0))
    part = moved.estimate(topology(network, hosts=2)).parts[0]
    assert (part.messages, part.busiest_bytes) == (4, 16)
    assert (part.latency_s, part.transfer_s) == (4 * 5, 16 / 0.01)
    # Within a host nobody uses it, and a wide one is nobody's limit.
    assert moved.estimate(topology(network)) == moved.estimate(topology(Overhead()))
    wide = Overhead(shared_network=Link(1e9), shared_uplink=Link(1e9))
    assert moved.estimate(topology(wide, hosts=2)) == moved.estimate(topology(Overhead(), hosts=2))
    # Four hosts of one rank in two racks: what leaves a rack is 2 x 2 x 4 bytes.
    uplink = Overhead(shared_uplink=Link(0.01), shared_network=Link(0.5))
    racks = Topology([0, 1, 2, 3], [0, 0, 1, 1], None, LINK, LINK, uplink)
    part = moved.estimate(racks).parts[0]
    assert (part.messages, part.busiest_bytes, part.transfer_s) == (4, 16, 16 / 0.01)
    # What comes in counts as well: one rank wants what three hosts have.
    into = reshard.plan(
        reshard.spec(MESH, "x y, -").layout((8, 8)),
        reshard.spec(MESH, "-, - | only(x=0 y=0)").layout((8, 8)),
        "int8",
    )
    gathered = Topology([0, 1, 2, 3], None, None, LINK, overhead=Overhead(shared_network=Link(0.1)))
    part = into.estimate(gathered).parts[0]
    assert (part.messages, part.busiest_bytes, part.transfer_s) == (3, 48, 48 / 0.1)


def test_combining_takes_some_times_as_long_as_copying() -> None:
    summed = plan("-, - | sum(x)", "-, y", (8, 8))
    once = summed.estimate(topology(ONE)).parts[0]
    thrice = summed.estimate(topology(dataclasses.replace(ONE, combining=3.0))).parts[0]
    # Each rank combines the 8 x 4 bytes of one other contribution with its own.
    assert thrice.copy_s - once.copy_s == 2 * 32 / 0.5


def test_a_call_and_steps_are_added() -> None:
    overhead = Overhead(call_s=1000.0, step_s=50.0)
    moved = plan("x y, -", "-, x y")
    assert moved.estimate(topology(overhead)).seconds_s == 1000 + 312
    before, after = reshard.spec(MESH, "x y, -"), reshard.spec(MESH, "-, x")
    program = find_program(before, after, (8, 8))
    assert len(program.steps) == 2
    plain = program.estimate("int8", topology(Overhead()), "gloo")
    slower = program.estimate("int8", topology(overhead), "gloo")
    assert slower.call_s == 1000 and slower.latency_s == plain.latency_s + 1000 + 2 * 50
    assert slower.seconds_s == plain.seconds_s + 1100
    lines = str(slower).splitlines()
    assert lines[2].split()[0] == "call" and "copies" not in lines[0]
    assert "copies" in str(moved.estimate(topology(ONE))).splitlines()[0]


def test_jobs_count_what_plans_count() -> None:
    layouts = [reshard.spec(MESH, text).layout((8, 8)) for text in ("x y, -", "-, x y")]
    kind = reshard.plan(*layouts, "int8").dtype
    assert kind is not None
    job = reshard.Job([reshard.JobItem.between_ranks("t", kind, *layouts)])
    every = dataclasses.replace(SHARED, call_s=7.0, copies=Link(0.5, 10.0))
    moved = plan("x y, -", "-, x y").estimate(topology(every))
    assert job.estimate(topology(every)) == moved


def test_a_kind_has_a_link_of_its_own_within_a_host() -> None:
    overhead = Overhead(collectives=(("all-reduce", Link(0.5, 1.0)),))
    one, two = topology(overhead), topology(overhead, hosts=2)
    assert collective_cost("all-reduce", range(4), 8, one, "gloo").latency_s == 6
    assert collective_cost("all-reduce", range(4), 8, two, "gloo").latency_s == 600
    assert collective_cost("all-gather", range(4), 8, one, "gloo").latency_s == 300


def test_all_to_alls_take_their_link_where_it_is_known() -> None:
    kinds = Overhead(collectives=(("all-to-all", Link(0.5, 1.0)),))
    program = find_program(reshard.spec(MESH, "x y, -"), reshard.spec(MESH, "-, x y"), (8, 8))
    (part,) = program.estimate("int8", topology(kinds)).parts
    assert (part.algorithm, part.latency_s, part.transfer_s) == ("pairwise", 3, 24)
    (plain,) = program.estimate("int8", topology(Overhead())).parts
    assert (plain.algorithm, plain.latency_s) == ("direct", 300)


@pytest.mark.parametrize(
    ("before", "after"),
    [("-, x y", "-, -"), ("-, - | sum(x y)", "x y, -"), ("y, - | sum(x)", "y, x")],
)
def test_collectives_on_gloo_cost_what_the_exchange_costs(before: str, after: str) -> None:
    ends = reshard.spec(MESH, before), reshard.spec(MESH, after)
    # Also where a link of their kind is known, of another library.
    kinds = (("reduce-scatter", Link(1, 1)), ("all-gather", Link(1, 1)))
    known = dataclasses.replace(SHARED, collectives=kinds)
    choice = choose(*ends, (8, 8), "int8", topology(known), library="gloo")
    assert len(choice.program.steps) == 1
    assert choice.program_estimate.seconds_s == choice.exchange_estimate.seconds_s
    # A library that tunes its collectives has them of equals, gloo has not.
    assert choice.reason == "both take as long, and gloo's collectives are messages too"
    steps = dataclasses.replace(SHARED, step_s=1.0)
    slower = choose(*ends, (8, 8), "int8", topology(steps), library="gloo")
    assert slower.reason == "the exchange is quicker: its messages cost less"


def test_a_last_slice_is_copied() -> None:
    program = find_program(reshard.spec(MESH, "-, -"), reshard.spec(MESH, "x y, -"), (8, 8))
    (part,) = program.estimate("int8", topology(ONE), "gloo").parts
    assert part.copy_s == 10 + 16 / 0.5
    assert program.estimate("int8", topology(Overhead())).seconds_s == 0


def test_what_lies_apart_in_a_view_is_packed() -> None:
    # Slicing columns leaves a view; the permute behind it packs 4 x 4 bytes in 4 runs, or copies
    # them so where they stay.
    before, after = reshard.spec(MESH, "x, -"), reshard.spec(MESH, "y, x")
    program = find_program(before, after, (8, 8))
    assert [step.name for step in program.steps] == ["slice", "permute"]
    sliced, permuted = program.estimate("int8", topology(ONE), "gloo").parts
    assert (sliced.seconds_s, permuted.copy_s) == (0, 4 * 10 + 16 / 0.5)
    whole = find_program(reshard.spec(MESH, "x, y"), after, (8, 8))
    (alone,) = whole.estimate("int8", topology(ONE), "gloo").parts
    # The busiest rank sends its shard from where it lies. All together copy two that stay.
    assert alone.copy_s == 0
    shared = whole.estimate("int8", topology(SHARED), "gloo").parts[0]
    assert shared.copy_s == 2 * (20 + 16 / 0.125)


def test_overheads_make_topologies_differ() -> None:
    assert topology(ONE) is topology(Overhead(copies=Link(0.5, 10.0)))
    assert topology(ONE) is not topology(SHARED)
    kinds = (("permute", LINK), ("all-reduce", LINK))
    assert Overhead(collectives=kinds) == Overhead(collectives=kinds[::-1])


def test_copies_are_added_up_by_rank() -> None:
    one = LocalCopies([0, 2, 0], [4, 8, 16], [1, 2, 3], [0, 8, 0])
    size_bytes, runs, combined = LocalCopies.joined([one, LocalCopies.none(), one]).by_rank(3)
    assert size_bytes.tolist() == [40, 0, 16]
    assert (runs.tolist(), combined.tolist()) == ([8, 0, 4], [0, 0, 16])
    part = message_cost([], [], [], topology(dataclasses.replace(ONE, combining=2.0)), copies=one)
    assert part.copy_s == max(4 * 10 + 20 / 0.5, 2 * 10 + 16 / 0.5)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([0], [1, 2], [1]), "as many entries in each"),
        (([0], [-1], [1]), "a number below 0"),
        (([0], [1], [1], [-1]), "a number below 0"),
    ],
)
def test_copies_that_cannot_be(columns: tuple[list[int], ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LocalCopies(*columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"call_s": -1.0}, "call_s is -1.0"),
        ({"step_s": "soon"}, "step_s is 'soon'"),
        ({"combining": float("inf")}, "combining is inf"),
        ({"call_s": True}, "call_s is True"),
        ({"copies": 3.0}, "3.0 is no link"),
        ({"collectives": (("permute", 1),)}, "1 is no link"),
    ],
)
def test_overheads_that_cannot_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Overhead(**fields)  # type: ignore[arg-type]
