"""Which of many tensors go by programs: never slower than one exchange of all, and why."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import reshard
from collectives.sharding_pairs import Pair, pairs
from reshard.collectives import Exchange, Program, divide, find_program
from reshard.dtypes import DType, dtype
from reshard.errors import LayoutError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.topology import Link, Overhead, Topology
from selection import choose

MESH = reshard.DeviceMesh.of(x=2, y=4)
SHAPE = (64, 32)
Tensor = tuple[LayoutChange, DType, Program]


def tensor(before: str, after: str, shape: tuple[int, int] = SHAPE) -> Tensor:
    ends = reshard.spec(MESH, before), reshard.spec(MESH, after)
    change = LayoutChange(*(end.layout(shape) for end in ends))
    return change, dtype("float32"), find_program(*ends, shape)


def one_host(latency_s: float, **overhead: float) -> Topology:
    link = Link(1e9, latency_s)
    return Topology.of(hosts=1, ranks_per_host=8, within_host=link, overhead=Overhead(**overhead))


SUMS = tensor("-, - | sum(x y)", "-, -")
PARTS = tensor("-, - | sum(x y)", "x y, -")
GATHER = tensor("x y, -", "-, -")


def test_only_what_moves_less_goes_by_its_program() -> None:
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


def test_nothing_and_what_has_nothing_to_do() -> None:
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


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown library 'mpi'"):
        divide([SUMS], one_host(0.0), "mpi")
    with pytest.raises(LayoutError, match="no within_host link"):
        divide([SUMS], Topology([0] * 8))


@settings(max_examples=choose(18, 60), deadline=None)
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
