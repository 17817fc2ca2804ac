"""Sizes and order of messages, and the parts of pipelines."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from plans.staged_jobs import FEWER, staged_jobs
from reshard.cost.estimate import Estimate, Part
from reshard.dtypes import dtype
from reshard.errors import UsageError
from reshard.plans.hierarchical import StagedJob
from reshard.plans.job import Job, JobItem
from reshard.plans.schedule import (
    ALIGNMENT_BYTES,
    LATENCIES_COUNT_BYTES,
    MAX_SMALL_MESSAGES,
    MESSAGE_BYTES,
    SMALL_MESSAGE_BYTES,
    STEPS_BETWEEN_STAGES,
    PipelineSpan,
    align,
    are_cut_alike,
    count_parts,
    cut_parts,
    divide_pipelines,
    divide_spans,
    fill_batches,
    find_pipeline_times,
    group_pieces,
    limit_message_bytes,
    list_steps,
    order_message,
    pipeline_s,
)
from reshard.topology import Link, Topology


@given(st.lists(st.integers(1, 1 << 19), max_size=30), st.integers(1, 1 << 16))
def test_every_piece_is_in_one_message_that_has_room_for_it(
    sizes_bytes: list[int], units: int
) -> None:
    message_bytes = units * ALIGNMENT_BYTES
    together, alone = group_pieces(sizes_bytes, message_bytes)
    numbers = [number for message in together for number in message]
    assert numbers == sorted(numbers)
    assert sorted(numbers + alone) == list(range(len(sizes_bytes)))
    for message in together:
        *others, last = (sizes_bytes[number] for number in message)
        assert sum(map(align, others)) + last <= message_bytes
    for before, message in itertools.pairwise(together):
        filled_bytes = sum(align(sizes_bytes[number]) for number in before)
        assert filled_bytes + sizes_bytes[message[0]] > message_bytes


@given(st.integers(0, 1 << 32), st.integers(1, 64))
def test_messages_of_all_peers_fit_in_a_limit(extra_bytes: int, peers: int) -> None:
    if extra_bytes < 4 * ALIGNMENT_BYTES * peers:
        with pytest.raises(UsageError, match=f"give at least {4 * ALIGNMENT_BYTES * peers}"):
            limit_message_bytes(extra_bytes, peers)
        return
    each = limit_message_bytes(extra_bytes, peers)
    assert each % ALIGNMENT_BYTES == 0
    assert ALIGNMENT_BYTES <= each <= MESSAGE_BYTES
    assert 4 * each * peers <= extra_bytes


@given(st.integers(64, 1 << 20), st.integers(1, 64), st.integers(0, 1 << 44))
def test_small_messages_are_few(extra_bytes: int, peers: int, moved_bytes: int) -> None:
    try:
        each = limit_message_bytes(extra_bytes, peers, moved_bytes)
    except UsageError as error:
        # What it says is enough is enough, and less is not.
        least = int(str(error).rpartition(" ")[2])
        assert extra_bytes < least
        each = limit_message_bytes(least, peers, moved_bytes)
        with pytest.raises(UsageError):
            limit_message_bytes(least - 1, peers, moved_bytes)
    assert each >= SMALL_MESSAGE_BYTES or moved_bytes <= each * MAX_SMALL_MESSAGES


@pytest.mark.parametrize("by_region", [False, True])
def test_sort_keys_of_messages_are_unique(by_region: bool) -> None:
    pairs = [pair for pair in itertools.product(range(5), repeat=2) if pair[0] != pair[1]]
    # By region, a rank sends each region of one contribution to a rank once.
    messages = list(itertools.product(range(2), range(3), pairs))
    keys = [order_message(o, n, *pair, 5, 2, by_region) for o, n, pair in messages]
    assert len(set(keys)) == len(keys)
    first = sorted(zip(keys, messages, strict=True))[: len(pairs)]
    assert {(o, n) for _, (o, n, _) in first} <= ({(0, 0)} if by_region else {(0, 0), (0, 1)})


def test_contributions_with_equal_boxes_are_cut_alike() -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=2)
    for source, target, expected in (
        ("-, - | sum(x)", "x, -", True),
        ("-, - | sum(x)", "-, -", True),
        ("y, - | sum(x)", "x, -", True),
        ("y, - | sum(x)", "-, -", False),
    ):
        layouts = (reshard.spec(mesh, one).layout((8, 8)) for one in (source, target))
        assert are_cut_alike(reshard.plan(*layouts).change) is expected, (source, target)


@given(st.lists(st.integers(0, 10), max_size=20))
def test_batches_follow_one_another_and_fit(sizes: list[int]) -> None:
    named = {str(number): size for number, size in enumerate(sizes)}
    batches = fill_batches(named, 10)
    assert list(batches.values()) == sorted(batches.values())
    for number in set(batches.values()):
        assert sum(named[name] for name, one in batches.items() if one == number) <= 10


@pytest.mark.parametrize("given", ["64M", 1.5, None, True, -1])
def test_invalid_limits_raise(given: Any) -> None:
    with pytest.raises(UsageError, match=f"extra_bytes {given!r} must"):
        limit_message_bytes(given)


MIB = 1 << 20


@given(staged_jobs(), st.integers(1, 5))
@FEWER
def test_parts_are_the_whole(made: tuple[StagedJob, object], parts: int) -> None:
    """Of every stage each element is in one part, at the places it had."""
    staged, _ = made
    for number, item in enumerate(staged.job.items):
        shape = item.change.target.shape
        for rows in staged.transfers(number):
            found = cut_parts(rows, shape, parts)
            assert len(found) == parts
            assert sorted(cells_of(rows)) == sorted(c for part in found for c in cells_of(part))


def cells_of(rows: object) -> list[tuple[int, ...]]:
    """Every element of transfers with its ends: where it comes from and goes to."""
    found = []
    for row in range(len(rows)):
        for index in np.ndindex(*rows.shape[row]):
            places = (rows.start, rows.source_start, rows.target_start)
            at = [int(a + i) for column in places for a, i in zip(column[row], index, strict=True)]
            ends = (rows.source_cell, rows.target_cell, rows.order, rows.stays)
            found.append((*(int(column[row]) for column in ends), *at))
    return found


@pytest.mark.parametrize("shape", [(64, 6), (5, 7), (6, 64), (3,)])
@pytest.mark.parametrize("cuts", [("fsdp, -", "-, -"), ("-, -", "-, -"), ("fsdp, -", "-, tp")])
@pytest.mark.parametrize("parts", [1, 3, 16])
def test_nothing_is_forwarded_early(
    shape: tuple[int, ...], cuts: tuple[str, str], parts: int
) -> None:
    """The steps one by one, on arrays; within a step what is handed on goes first."""
    trainer = reshard.DeviceMesh.of(fsdp=2)
    engine = reshard.DeviceMesh.of(dp=3, tp=2, devices=range(2, 8))
    before, after = (
        reshard.spec(mesh, ", ".join(cut.split(", ")[: len(shape)])).layout(shape)
        for mesh, cut in zip((trainer, engine), cuts, strict=True)
    )
    item = JobItem.between_ranks("w", dtype("int64"), before, after)
    staged = StagedJob(Job([item]), Topology([0, 0, 1, 1, 1, 2, 2, 2]))
    whole = np.arange(np.prod(shape)).reshape(shape)
    shards = {r: whole[box_of(before, r)] for r in before.holders if r < 2}
    filled = {r: np.full(after.local_shape(r), -1) for r in range(2, 8)}
    steps = sorted(
        list_steps(staged.transfers(0), shape, PipelineSpan(0, parts)), key=lambda s: (s[0], -s[1])
    )
    last = parts - 1 + STEPS_BETWEEN_STAGES * (len(staged.stage_names) - 1)
    assert max(step for step, _, _ in steps) <= last
    for _, stage, rows in steps:
        for row in range(len(rows)):
            source = (filled if stage else shards)[int(rows.source_slot[row])]
            taken = source[cut(rows.source_start[row], rows.shape[row])]
            filled[int(rows.target_slot[row])][cut(rows.target_start[row], rows.shape[row])] = taken
    for rank, found in filled.items():
        assert np.array_equal(found, whole[box_of(after, rank)])


def cut(start: object, shape: object) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def box_of(layout: reshard.Layout, rank: int) -> tuple[slice, ...]:
    (box,) = layout.boxes(rank)
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 9))
def test_spans_follow_one_another(sizes: list[int], parts: int) -> None:
    spans = list(divide_spans(sizes, parts))
    assert spans[0].first == 0 or not sizes[0]
    for one, other in itertools.pairwise(spans):
        assert one.first <= other.first <= one.first + one.parts
    assert all(s.first >= 0 and s.parts >= 1 and s.first + s.parts <= parts for s in spans)
    if sum(sizes) >= parts:
        assert max(s.first + s.parts for s in spans) == parts


@given(st.floats(0, 1e4), st.floats(1e-6, 1e3))
def test_no_other_number_of_parts_is_quicker(rest_s: float, latency_s: float) -> None:
    def take_s(parts: int) -> float:
        return rest_s / parts + parts * latency_s / 16

    parts = count_parts(rest_s, latency_s)
    best_s = min(map(take_s, range(1, 65)))
    # The root is rounded, which the sum hardly feels.
    assert 1 <= parts <= 64 and take_s(parts) <= 1.03 * best_s


def test_without_latency_the_number_of_parts_is_maximal() -> None:
    assert [count_parts(n, 0.0) for n in (0.0, 1e-9, 1.0)] == [1, 64, 64]


def test_smaller_batches_have_fewer_parts() -> None:
    spans = divide_pipelines([{"a": 300}, {"b": 50, "c": 50}], 20)
    assert spans["a"] == PipelineSpan(0, 17)
    assert (spans["b"].first, spans["c"].first + spans["c"].parts) == (0, 10)


@pytest.mark.parametrize("racks", [None, [0, 1]])
def test_links_determine_the_number_of_parts(racks: list[int] | None) -> None:
    """More where the rest takes longer beside a part's latencies; by bytes where nobody knows."""
    trainer, engine = reshard.DeviceMesh.of(x=2), reshard.DeviceMesh.of(y=2, devices=[2, 3])
    shape = (1 << 12, 1 << 12)
    ends = (reshard.spec(trainer, "x, -"), reshard.spec(engine, "-, -"))
    item = JobItem.between_ranks("w", dtype("int8"), *(one.layout(shape) for one in ends))

    def parts(*links: Link | None) -> int:
        return StagedJob(Job([item]), Topology([0, 0, 1, 1], racks, *links)).parts

    # In the fan-out each of both hands 8 MiB on, in one message; the exchange has one, too.
    far = Link(1e6, 1e-3)
    # Three of its parts are still to come where the last one has crossed.
    expected = np.sqrt(3 * 8 * MIB / 1e7 * 16 / (1e-3 + 1e-3))
    assert parts(Link(1e7, 1e-3), far, far) == min(round(float(expected)), 64)
    assert parts(Link(1e9, 1e-3), far, far) == round(float(expected) / 10)
    assert parts(None, far, far) == parts(Link(1e7, 1e-3), None, far) == parts()
    assert parts() == count_parts(16 * MIB, LATENCIES_COUNT_BYTES) == 16


def test_an_unknown_rack_link_raises() -> None:
    mesh = reshard.DeviceMesh.of(x=2)
    ends = [reshard.spec(mesh, text).layout((1 << 10,)) for text in ("x", "-")]
    item = JobItem.between_ranks("w", dtype("int8"), *ends)
    near = Link(1e9, 1e-3)
    assert StagedJob(Job([item]), Topology([0, 1], [0, 1], near, near)).parts == 1


def test_only_the_longest_stage_runs_all_the_time() -> None:
    stages = tuple(
        Part(name, "direct", 1, 0.0, latency_s, moving_s)
        for name, latency_s, moving_s in (("exchange", 0.5, 40.0), ("fan-out", 0.25, 8.0))
    )
    estimate = Estimate(stages, 2.0)
    across = stages[0]
    times = find_pipeline_times(estimate, across)
    assert pipeline_s(*times, 1) == estimate.seconds_s == 50.75
    # Parts that are under way together have their latencies once.
    assert pipeline_s(*times, 4) == 2 + 40 + 3 * 8 / 4 + 0.75
    assert pipeline_s(*times, 17) == 2 + 40 + 3 * 8 / 17 + 2 * 0.75
    # Of few parts all others are still to come.
    assert pipeline_s(*times, 2) == pipeline_s(*times, 1)
    # Two stages on the same links take their time together.
    both = Estimate((stages[0], Part("between hosts", "direct", 1, 0.0, 0.5, 30.0), stages[1]))
    across = Part("across", "direct", 1, 0.0, 0.5, 60.0)
    assert pipeline_s(*find_pipeline_times(both, across), 4) == 60 + 3 * 18 / 4 + 1.25
