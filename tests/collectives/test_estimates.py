"""The seconds of programs, step by step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from collectives.sharding_pairs import Pair, pairs
from reshard.collectives import AllGather, Exchange, Slice, find_program
from reshard.collectives.estimates import estimate_steps
from reshard.cost import LIBRARIES, Estimate
from reshard.errors import LayoutError, UsageError
from reshard.topology import Link, Overhead, Topology
from selection import choose

# A byte takes a second within a host, ten between hosts.
NEAR, FAR = Link(1.0, 100.0), Link(0.1, 1000.0)
TOPOLOGY = Topology.of(hosts=2, ranks_per_host=4, within_host=NEAR, between_hosts=FAR)
MESH = reshard.DeviceMesh.of(x=2, y=2, z=2)


def estimate(before: str, after: str, shape: tuple[int, ...], library: str = "nccl") -> Estimate:
    program = find_program(reshard.spec(MESH, before), reshard.spec(MESH, after), shape)
    return program.estimate("int8", TOPOLOGY, library)


@pytest.mark.parametrize(
    ("before", "after", "shape", "parts"),
    [
        # Sixteen elements in two parts: eight come, from the same host along z.
        ("z", "-", (16,), [("all-gather(z)", 1, 100, 8)]),
        # Along x from the other host.
        ("x", "-", (16,), [("all-gather(x)", 1, 1000, 80)]),
        # Rings of four: within a host, and over both.
        ("y z", "-", (16,), [("all-gather(y z)", 3, 300, 12)]),
        ("x y", "-", (16,), [("all-gather(x y)", 3, 3000, 120)]),
        # Uneven: ranks hold 3, 3 and 3 of 9, and one nothing.
        ("y z", "-", (9,), [("all-gather(y z)", 3, 300, 9)]),
        ("-", "z", (16,), [("slice(z)", 0, 0, 0)]),
        ("z, -", "-, z", (4, 4), [("all-to-all(z)", 1, 100, 4)]),
        ("x, -", "-, x", (4, 4), [("all-to-all(x)", 1, 1000, 40)]),
        ("z, y", "y, z", (4, 4), [("permute", 1, 100, 4)]),
        ("- | sum(z)", "z", (16,), [("reduce-scatter(z)", 1, 100, 8)]),
        # A reduce-scatter and an all-gather, each of half of four elements.
        ("x y | sum(z)", "x y", (16,), [("all-reduce(z)", 2, 200, 4)]),
        ("-", "-", (16,), []),
    ],
)
def test_steps_take_the_seconds_computed_by_hand(
    before: str,
    after: str,
    shape: tuple[int, ...],
    parts: list[tuple[str, int, float, float]],
) -> None:
    counted = estimate(before, after, shape)
    assert [
        (part.name.split("(")[0], part.messages, part.latency_s, part.transfer_s)
        for part in counted.parts
    ] == [(name.split("(")[0], *numbers) for name, *numbers in parts]
    assert counted.seconds_s == sum(latency + transfer for _, _, latency, transfer in parts)


def test_libraries_differ_in_latency() -> None:
    assert estimate("x y z", "-", (8,)).latency_s == 7000
    assert estimate("x y z", "-", (8,), "any").latency_s == 3000
    with pytest.raises(UsageError, match="unknown library 'mpi'"):
        estimate("x y z", "-", (8,), "mpi")


def test_wider_elements_take_longer() -> None:
    program = find_program(reshard.spec(MESH, "y z"), reshard.spec(MESH, "-"), (16,))
    assert program.estimate("float32", TOPOLOGY).transfer_s == 48


def test_missing_information_raises() -> None:
    program = find_program(reshard.spec(MESH, "y z"), reshard.spec(MESH, "-"), (16,))
    with pytest.raises(LayoutError, match="rank 6 of a topology over ranks 0 to 5"):
        program.estimate("int8", Topology([0] * 6, None, NEAR))
    with pytest.raises(LayoutError, match="no within_host link"):
        program.estimate("int8", Topology([0] * 8))


@settings(max_examples=choose(18, 60), deadline=None)
@given(pairs(), st.sampled_from(sorted(LIBRARIES)))
def test_every_program_has_seconds_that_its_bytes_and_messages_need(
    pair: Pair, library: str
) -> None:
    source, target, shape = pair
    program = find_program(source, target, shape)
    ranks = max(*source.mesh.devices, *target.mesh.devices) + 1
    one_host = Topology([0] * ranks, None, Link(2.0, 1.0))
    found = program.estimate("int8", one_host, library)
    assert len(found.parts) == len(program.steps)
    for step, part in zip(program.steps, found.parts, strict=True):
        busiest = int(max(step.sent_elements.max(initial=0), step.received_elements.max(initial=0)))
        if part.algorithm in ("ring", "doubling", "halving", "halving-doubling", "-"):
            assert part.transfer_s == busiest / 2
        assert part.seconds_s >= busiest / 2
        assert (part.messages == 0) == (step.moved_elements == 0)
    far = Topology(list(range(ranks)), None, None, Link(1.0, 4.0))
    slower = program.estimate("int8", far, library)
    assert slower.seconds_s >= 2 * found.seconds_s
    if any(isinstance(step, Exchange) for step in program.steps):
        plan = reshard.plan(source.layout(shape), target.layout(shape), "int8")
        assert found.seconds_s == plan.estimate(one_host).seconds_s


@pytest.mark.parametrize("parts", [3, 5, 6, 7, 12])
@pytest.mark.parametrize("length", range(1, 100, 7))
def test_equal_sizes_take_exactly_as_long(parts: int, length: int) -> None:
    # A ring and an exchange: equal bytes must tie, whatever the shares of a ring round to.
    mesh = reshard.DeviceMesh.of(x=parts)
    source, target = reshard.spec(mesh, "x"), reshard.spec(mesh, "-")
    shape = (parts * length,)
    one_host = Topology([0] * parts, None, Link(450e9, 3.4e-6))
    by_ring = find_program(source, target, shape).estimate("bfloat16", one_host)
    plan = reshard.plan(source.layout(shape), target.layout(shape), "bfloat16")
    assert [part.algorithm for part in by_ring.parts] == ["ring"]
    assert by_ring.seconds_s == plan.estimate(one_host).seconds_s


def test_uneven_shards_count_as_the_largest() -> None:
    # Five elements over twelve ranks: one each for five of them, so one from each in a ring.
    mesh = reshard.DeviceMesh.of(x=12)
    one_host = Topology([0] * 12, None, NEAR)
    gather = find_program(reshard.spec(mesh, "x"), reshard.spec(mesh, "-"), (5,))
    scatter = find_program(reshard.spec(mesh, "- | sum(x)"), reshard.spec(mesh, "x"), (5,))
    for name, program in (("all-gather", gather), ("reduce-scatter", scatter)):
        assert [step.name for step in program.steps] == [name]
        found = program.estimate("int8", one_host)
        assert (found.latency_s, found.transfer_s) == (1100, 11)


@pytest.mark.parametrize("length", range(1, 60))
def test_bytes_of_uneven_all_reduces_are_exact(length: int) -> None:
    mesh = reshard.DeviceMesh.of(x=12)
    program = find_program(reshard.spec(mesh, "- | sum(x)"), reshard.spec(mesh, "-"), (length,))
    assert [step.name for step in program.steps] == ["all-reduce"]
    # Its own share from each of the others, and then theirs.
    share = -(-length // 12)
    found = program.estimate("int8", Topology([0] * 12, None, NEAR), "gloo")
    assert (found.latency_s, found.transfer_s) == (2200, 11 * share + length - share)


@pytest.mark.parametrize("hosts", [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize(("before", "after"), [("x y", "x"), ("y x, -", "y, x"), ("x, y", "-, y")])
def test_the_slowest_group_counts(hosts: list[int], before: str, after: str) -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=2)
    source, target = reshard.spec(mesh, before), reshard.spec(mesh, after)
    found = find_program(source, target, (4,) * len(source.dim_specs))
    assert len(found.steps) == 1 and len(found.steps[0].groups) == 2
    crosses = any(len({hosts[rank] for rank in group}) > 1 for group in found.steps[0].groups)
    topology = Topology(hosts, None, NEAR, FAR)
    assert (found.estimate("int8", topology).latency_s == 1000) == crosses


def test_a_permute_sends_whole_shards() -> None:
    program = find_program(reshard.spec(MESH, "z, y"), reshard.spec(MESH, "y, z"), (4, 4))
    assert [step.name for step in program.steps] == ["permute"]
    found = program.estimate("float32", TOPOLOGY)
    assert (found.latency_s, found.transfer_s) == (100, 16)


def test_a_gather_by_messages_copies_its_own_part_unless_it_is_in_place() -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=2)
    whole, halves, quarters = (reshard.spec(mesh, text) for text in ("-", "x", "x y"))
    topology = Topology([0] * 4, None, NEAR, overhead=Overhead(copies=Link(1.0)))
    gather = AllGather((8,), halves, whole, ("x",))
    to_halves = AllGather((8,), quarters, halves, ("y",))
    cut = Slice((8,), whole, halves, ("x",))
    # In the caller's array; in the array of the gather before; a view of the array that was cut.
    for before, copy_s in (([], 4), ([to_halves], 0), ([cut], 4)):
        part = estimate_steps([*before, gather], "int8", topology, "gloo").parts[-1]
        assert (part.latency_s, part.transfer_s, part.copy_s) == (100, 4, copy_s)
