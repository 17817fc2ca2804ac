"""Seconds of messages, collectives, and overheads."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.collectives import choose, find_program
from reshard.cost import LocalCopies, collective_cost, message_cost
from reshard.errors import LayoutError, UsageError
from reshard.topology import Link, Overhead, Topology

# Whole numbers of seconds, so that sums are exact.
NEAR, FAR, FARTHEST = Link(1.0, 1.0), Link(0.5, 8.0), Link(0.25, 64.0)
TOPOLOGY = Topology([0, 0, 1, 1, 2, 2], [0, 0, 1], NEAR, FAR, FARTHEST)
Pieces = list[tuple[int, int, int]]
pieces = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 50)), max_size=30)


def seconds_of(found: Pieces) -> float:
    columns = [[piece[place] for piece in found] for place in range(3)]
    return message_cost(*columns, TOPOLOGY).seconds_s


def link_between(one: int, other: int) -> Link:
    if one // 2 == other // 2:
        return NEAR
    return FAR if max(one, other) < 4 else FARTHEST


def counted(found: Pieces) -> float:
    """The longest that any rank sends or receives, message by message."""
    messages: dict[tuple[int, int], int] = {}
    for sender, receiver, size_bytes in found:
        if sender != receiver:
            messages[sender, receiver] = messages.get((sender, receiver), 0) + size_bytes
    busy = {(side, rank): 0.0 for side in (0, 1) for rank in range(6)}
    for pair, size_bytes in messages.items():
        link = link_between(*pair)
        for side in (0, 1):
            busy[side, pair[side]] += link.latency_s + size_bytes / link.bandwidth_bytes_per_s
    return max(busy.values())


@given(pieces)
def test_seconds_are_those_of_the_busiest_rank(found: Pieces) -> None:
    assert seconds_of(found) == counted(found)


@given(pieces, st.randoms(use_true_random=False), st.tuples(*[st.integers(0, 5)] * 3))
def test_order_does_not_matter_and_more_never_takes_less(
    found: Pieces, order: random.Random, more: tuple[int, int, int]
) -> None:
    shuffled = found[:]
    order.shuffle(shuffled)
    assert seconds_of(shuffled) == seconds_of(found)
    assert seconds_of([*found, more]) >= seconds_of(found)


def test_the_busiest_sender_determines_the_cost_of_messages() -> None:
    # Rank 0 sends 3 bytes next door in two pieces, one message, and 2 bytes to the other host.
    part = message_cost([0, 0, 0, 4], [1, 1, 2, 4], [1, 2, 2, 1000], TOPOLOGY, "mine")
    assert (part.name, part.algorithm, part.messages, part.busiest_bytes) == (
        "mine",
        "direct",
        2,
        5,
    )
    assert (part.latency_s, part.transfer_s, part.seconds_s) == (9.0, 7.0, 16.0)


def test_a_receiver_may_be_the_busiest() -> None:
    part = message_cost([0, 1, 3], [2, 2, 2], [1, 1, 1], TOPOLOGY)
    assert (part.messages, part.seconds_s) == (3, 2 * (8 + 2) + 2)


def test_nothing_takes_no_time() -> None:
    assert seconds_of([]) == 0
    assert seconds_of([(3, 3, 100)]) == 0


def test_large_sizes_are_counted_exactly() -> None:
    size_bytes = (1 << 52) + 1
    assert message_cost([0], [1], [size_bytes], TOPOLOGY).busiest_bytes == size_bytes


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        (([0], [1, 2], [3]), UsageError, r"shapes \[\(1,\), \(2,\), \(1,\)\]"),
        (([[0]], [[1]], [[1]]), UsageError, "one sender, one receiver"),
        (([0], [1], [-3]), UsageError, "a piece of -3 bytes"),
        (([0], [6], [1]), LayoutError, "rank 6 of a topology over ranks 0 to 5"),
    ],
)
def test_invalid_values_are_refused(
    columns: tuple[list[int], list[int], list[int]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        message_cost(*columns, TOPOLOGY)


def test_a_link_in_use_must_be_known() -> None:
    with pytest.raises(LayoutError, match="no within_host link"):
        message_cost([0], [1], [1], Topology([0, 0]))
    assert message_cost([0], [0], [1], Topology([0, 0])).seconds_s == 0


TWO_HOSTS = Topology.of(
    hosts=2, ranks_per_host=4, within_host=Link(1000.0, 1.0), between_hosts=Link(100.0, 5.0)
)


def test_on_one_host_and_across_two() -> None:
    near = collective_cost("all-gather", range(4), 4000, TWO_HOSTS)
    assert (near.latency_s, near.transfer_s) == (3.0, 3.0)
    far = collective_cost("all-gather", [0, 1, 2, 4], 4000, TWO_HOSTS)
    assert (far.latency_s, far.transfer_s, far.seconds_s) == (15.0, 30.0, 45.0)
    assert (far.name, far.algorithm, far.messages, far.busiest_bytes) == (
        "all-gather",
        "ring",
        3,
        3000.0,
    )


def test_a_library_decides_the_algorithm() -> None:
    any_one = collective_cost("all-gather", range(4), 40, TWO_HOSTS, "any", "mine")
    assert (any_one.name, any_one.algorithm, any_one.latency_s) == ("mine", "doubling", 2.0)
    assert collective_cost("all-gather", range(4), 40, TWO_HOSTS).algorithm == "ring"


def test_a_rank_by_itself_needs_no_link() -> None:
    assert collective_cost("all-reduce", [1], 1000, Topology([0, 0])).seconds_s == 0


@pytest.mark.parametrize("ranks", [[], [1, 1]])
def test_a_group_is_of_different_ranks(ranks: list[int]) -> None:
    with pytest.raises(UsageError, match=r"a group of ranks \["):
        collective_cost("all-reduce", ranks, 1, TWO_HOSTS)


def test_missing_ranks_and_links_are_refused() -> None:
    with pytest.raises(LayoutError, match="rank 8 "):
        collective_cost("all-reduce", [8], 1, TWO_HOSTS)
    with pytest.raises(LayoutError, match="no between_hosts link"):
        collective_cost("all-reduce", [0, 1], 1, Topology([0, 1]))
    with pytest.raises(UsageError, match="unknown kind"):
        collective_cost("gossip", [0, 1], 1, TWO_HOSTS)
    with pytest.raises(UsageError, match="unknown library"):
        collective_cost("permute", [0], 1, TWO_HOSTS, "mpi")


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


def test_jobs_and_plans_have_equal_estimates() -> None:
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
def test_collectives_on_gloo_cost_as_much_as_the_exchange(before: str, after: str) -> None:
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


def test_scattered_elements_of_a_view_are_packed() -> None:
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
def test_invalid_copies_are_refused(columns: tuple[list[int], ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LocalCopies(*columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"call_s": -1.0}, "call_s is -1.0"),
        ({"step_s": "soon"}, "step_s is 'soon'"),
        ({"combining": float("inf")}, "combining is inf"),
        ({"call_s": True}, "call_s is True"),
        ({"copies": 3.0}, "3.0 is not a Link"),
        ({"collectives": (("permute", 1),)}, "1 is not a Link"),
    ],
)
def test_invalid_overheads_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Overhead(**fields)  # type: ignore[arg-type]
