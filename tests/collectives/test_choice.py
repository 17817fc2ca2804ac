"""The choice between programs and the exchange, of one tensor and of many."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import reshard
import selection
from collectives.sharding_pairs import Pair, pairs
from reshard.collectives import Exchange, Program, divide, find_program
from reshard.collectives.choice import Choice, choose
from reshard.cost import load_preset
from reshard.dtypes import DType, dtype
from reshard.errors import LayoutError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.topology import Link, Overhead, Topology

MESH = reshard.DeviceMesh.of(x=2, y=2, z=2)
NEAR, FAR = Link(450e9, 3.4e-6), Link(50e9, 14e-6)
ONE_HOST = Topology.of(hosts=1, ranks_per_host=8, within_host=NEAR)
TWO_HOSTS = Topology.of(hosts=2, ranks_per_host=4, within_host=NEAR, between_hosts=FAR)


def chosen(
    before: str, after: str, side: int, topology: Topology = ONE_HOST, **options: object
) -> Choice:
    source, target = (reshard.spec(MESH, text) for text in (before, after))
    return choose(source, target, (side, side), "bfloat16", topology, **options)  # type: ignore[arg-type]


def test_small_ones_take_fewer_messages_and_large_ones_fewer_bytes() -> None:
    small, large = (chosen("x y z, -", "-, x y", side) for side in (8, 8192))
    assert small.program is not large.program
    assert [step.name for step in small.program.steps] == ["joint all-to-all", "all-gather"]
    assert (small.method, large.method) == ("program", "exchange")
    assert small.reason == "the program is quicker: its messages cost less"
    assert large.reason == "the exchange is quicker: its bytes take less time"
    assert small.program_estimate.latency_s < small.exchange_estimate.latency_s
    assert large.exchange_estimate.transfer_s < large.program_estimate.transfer_s


def test_the_choice_flips_at_a_single_size() -> None:
    methods = [chosen("x y z, -", "-, x y", 8 << power).method for power in range(11)]
    flip = methods.index("exchange")
    assert flip > 0
    assert methods == ["program"] * flip + ["exchange"] * (11 - flip)


def test_hosts_flip_the_choice() -> None:
    # The program gathers along x, across hosts; the exchange fetches what is near from nearby.
    near, far = (chosen("-, z y x", "z, y", 8192, topology) for topology in (ONE_HOST, TWO_HOSTS))
    assert near.program is far.program
    assert (near.method, far.method) == ("program", "exchange")


def test_quicker_algorithms_flip_the_choice() -> None:
    # A ring has a message for each of the others, as the exchange has; doubling has three.
    ring, doubling = (chosen("x y z, -", "-, -", 8, library=name) for name in ("nccl", "any"))
    assert ring.reason == "both take as long, and collectives are tuned"
    assert ring.program_estimate.seconds_s == ring.exchange_estimate.seconds_s
    assert doubling.reason == "the program is quicker: its messages cost less"
    assert ring.method == doubling.method == "program"


def test_equal_times_choose_the_exchange_with_gloo() -> None:
    for side in (8, 8192):
        tuned, messages = (chosen("x y z, -", "-, -", side, library=n) for n in ("nccl", "gloo"))
        assert (tuned.method, messages.method) == ("program", "exchange")
        assert messages.program_estimate.seconds_s == messages.exchange_estimate.seconds_s
        assert messages.reason == "both take as long, and gloo's collectives are messages too"
    # What moves less is taken all the same.
    assert chosen("-, - | sum(x y z)", "-, -", 8192, library="gloo").method == "program"


def test_memory_leaves_the_exchange() -> None:
    free = chosen("x y z, -", "-, x y", 64)
    assert free.method == "program"
    least = free.program.extra_bytes(2)
    assert chosen("x y z, -", "-, x y", 64, extra_bytes=least).method == "program"
    tight = chosen("x y z, -", "-, x y", 64, extra_bytes=least - 1)
    assert tight.method == "exchange"
    assert f"holds {least:,} bytes" in tight.reason
    assert tight.estimate is tight.exchange_estimate


def test_nothing_to_do_and_no_program() -> None:
    same = chosen("x, -", "x, -", 8)
    assert (same.method, same.estimate.seconds_s) == ("program", 0)
    assert same.reason == "every rank has what it needs"
    other = reshard.DeviceMesh.of(a=2, devices=[6, 7])
    found = choose(
        reshard.spec(MESH, "x, -"), reshard.spec(other, "a, -"), (8, 8), "int8", ONE_HOST
    )
    assert (found.method, found.reason) == ("exchange", "no program of collectives was found")


def test_it_prints_both() -> None:
    lines = str(chosen("x y z, -", "-, x y", 8192)).splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["program", "joint"], ["*", "exchange"]]
    assert lines[4] == "the exchange is quicker: its bytes take less time"
    assert str(chosen("x, -", "x, -", 8)).splitlines()[2].startswith("* program   nothing to do")


@settings(max_examples=selection.choose(24, 80), deadline=None)
@given(pairs(max_devices=12), st.integers(0, 7), st.sampled_from([None, 0, 50, 500]))
def test_the_faster_method_is_chosen(pair: Pair, seed: int, extra_bytes: int | None) -> None:
    source, target, shape = pair
    ranks = max(*source.mesh.devices, *target.mesh.devices) + 1
    hosts = [0, *(rank * (seed + 3) // 2 % 2 for rank in range(1, ranks))]
    topology = Topology(hosts, None, Link(1e6, 1e-5), Link(1e5, 1e-4))
    found = choose(source, target, shape, "float32", topology, extra_bytes)
    seconds_s = {
        "program": found.program_estimate.seconds_s,
        "exchange": found.exchange_estimate.seconds_s,
    }
    fits = extra_bytes is None or found.program.extra_bytes(4) <= extra_bytes
    if not found.program.steps:
        assert found.method == "program"
    elif not fits or any(isinstance(step, Exchange) for step in found.program.steps):
        assert found.method == "exchange"
    else:
        assert seconds_s[found.method] == min(seconds_s.values())
    assert found.estimate.seconds_s == seconds_s[found.method]
    assert str(found)
    assert choose(source, target, shape, "float32", topology, extra_bytes) == found


def test_another_process_chooses_alike() -> None:
    program = """
from reshard import DeviceMesh, spec
from reshard.collectives.choice import choose
from reshard.cost import load_preset
mesh = DeviceMesh.of(x=2, y=2, z=2)
found = choose(spec(mesh, "x y z, -"), spec(mesh, "-, x y"), (640, 640), "bfloat16",
               load_preset("h100-8").topology())
print(found.method, found.program_estimate.seconds_s.hex(), found.exchange_estimate.seconds_s.hex())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    source, target = (reshard.spec(MESH, text) for text in ("x y z, -", "-, x y"))
    here = choose(source, target, (640, 640), "bfloat16", load_preset("h100-8").topology())
    assert done.stdout.split() == [
        here.method,
        here.program_estimate.seconds_s.hex(),
        here.exchange_estimate.seconds_s.hex(),
    ]


def test_invalid_arguments_raise() -> None:
    with pytest.raises(UsageError, match="extra_bytes=-1: a limit of memory; give 0 or more"):
        chosen("x, -", "-, x", 8, extra_bytes=-1)
    with pytest.raises(UsageError, match="unknown library 'mpi'"):
        chosen("x, -", "-, x", 8, library="mpi")
    with pytest.raises(LayoutError, match="no within_host link"):
        chosen("x, -", "-, x", 8, Topology([0] * 8))


LINE = reshard.DeviceMesh.of(x=2, y=4)
SHAPE = (64, 32)
Tensor = tuple[LayoutChange, DType, Program]


def tensor(before: str, after: str, shape: tuple[int, int] = SHAPE) -> Tensor:
    ends = reshard.spec(LINE, before), reshard.spec(LINE, after)
    change = LayoutChange(*(end.layout(shape) for end in ends))
    return change, dtype("float32"), find_program(*ends, shape)


def one_host(latency_s: float, **overhead: float) -> Topology:
    link = Link(1e9, latency_s)
    return Topology.of(hosts=1, ranks_per_host=8, within_host=link, overhead=Overhead(**overhead))


SUMS = tensor("-, - | sum(x y)", "-, -")
PARTS = tensor("-, - | sum(x y)", "x y, -")
GATHER = tensor("x y, -", "-, -")


def test_only_programs_that_save_time_are_used() -> None:
    found = divide([GATHER, SUMS, PARTS, SUMS], one_host(0.0))
    assert found.by_program == (False, True, False, True)
    assert found.ways[1] is found.ways[3]
    size_bytes = 4 * 64 * 32
    # All contributions of seven others; or a part and then all others' parts.
    assert found.ways[1].exchange_s == pytest.approx(7 * size_bytes / 1e9)
    assert found.ways[1].program_s == pytest.approx(2 * 7 / 8 * size_bytes / 1e9)
    assert found.exchange_s - found.seconds_s == pytest.approx(2 * 5.25 * size_bytes / 1e9)


def test_the_wait_between_steps_is_there_once() -> None:
    # One alone saves less than its waits take; a hundred together save more.
    topology = one_host(2 * 64 * 32 * 4 / 1e9)
    assert divide([SUMS], topology, "gloo").by_program == (False,)
    assert divide([SUMS] * 100, topology, "gloo").by_program == (True,) * 100
    assert divide([GATHER, *[SUMS] * 100], topology, "gloo").by_program == (False, *[True] * 100)


def test_programs_without_steps() -> None:
    assert divide([], one_host(1e-5)).by_program == ()
    same = tensor("x, y", "x, y")
    copies = Topology.of(
        hosts=1,
        ranks_per_host=8,
        within_host=Link(1e9),
        overhead=Overhead(copies=Link(1e9), call_s=1.0),
    )
    found = divide([same, same], copies)
    # Not even copied, if it went by its program.
    assert found.by_program == (False, False)
    assert found.seconds_s == found.exchange_s > 1.0


def test_invalid_divisions_raise() -> None:
    with pytest.raises(UsageError, match="unknown library 'mpi'"):
        divide([SUMS], one_host(0.0), "mpi")
    with pytest.raises(LayoutError, match="no within_host link"):
        divide([SUMS], Topology([0] * 8))


@settings(max_examples=selection.choose(18, 60), deadline=None)
@given(st.lists(pairs(max_devices=8), min_size=1, max_size=4), st.sampled_from([0.0, 1e-6, 1e-3]))
def test_it_is_never_slower_than_the_exchange_of_all(chosen: list[Pair], latency_s: float) -> None:
    tensors: list[Tensor] = []
    for source, target, shape in chosen:
        program = find_program(source, target, shape)
        assume(not any(isinstance(step, Exchange) for step in program.steps))
        ends = source.layout(shape), target.layout(shape)
        tensors.append((LayoutChange(*ends), dtype("int16"), program))
    slots = max(max(change.source.slots, change.target.slots) for change, _, _ in tensors)
    topology = Topology([0] * slots, None, Link(1e6, latency_s))
    found = divide(tensors, topology)
    every = {
        chosen: seconds_s
        for chosen in itertools.product((False, True), repeat=len(tensors))
        if (seconds_s := together_s(tensors, chosen, topology)) is not None
    }
    assert found.exchange_s == pytest.approx(every[(False,) * len(tensors)])
    assert found.seconds_s == pytest.approx(every[found.by_program])
    assert found.seconds_s <= found.exchange_s
    if not latency_s:
        assert found.seconds_s == pytest.approx(min(every.values()))
    assert divide(tensors, topology) == found


def together_s(
    tensors: list[Tensor], by_program: tuple[bool, ...], topology: Topology
) -> float | None:
    """The seconds of tensors that move together, by the estimates of each; None where none is."""
    moving_s, stages = 0.0, dict[int, float]()
    for (change, kind, program), is_chosen in zip(tensors, by_program, strict=True):
        direct = reshard.plan(change.source, change.target, kind)
        estimate = program.estimate("int16", topology) if is_chosen else direct.estimate(topology)
        if is_chosen and not estimate.seconds_s:
            # A step at least is there to carry out what stays.
            return None
        parts = [part for part in estimate.parts if part.seconds_s]
        for stage, part in enumerate(parts):
            moving_s += part.transfer_s + part.copy_s
            stages[stage] = max(stages.get(stage, 0.0), part.latency_s)
    return moving_s + sum(stages.values())
