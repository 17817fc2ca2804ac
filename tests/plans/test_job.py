"""Identities of transfers: equal on both ends, unique, and unchanged when ranks are added."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from plans.test_source_selection import EVERY_KIND, jobs
from reshard.dtypes import dtype
from reshard.layout import Box, Layout
from reshard.plans.job import Job, JobItem, JobTransfers

# What moves: name, identity, sender, receiver, box.
Pieces = dict[str, tuple[str, int, int, str]]


def pieces(found: JobTransfers) -> Pieces:
    named: Pieces = {}
    for name, transfers in found.items():
        for row, identity in enumerate(found.identities(name)):
            assert identity not in named
            sender, receiver = int(transfers.source_slot[row]), int(transfers.target_slot[row])
            named[identity] = name, sender, receiver, str(transfers.box(row))
    return named


@given(jobs())
def test_both_ends_have_the_same_identities(example: tuple[Job, object]) -> None:
    job, _ = example
    slots = max(max(item.change.source.slots, item.change.target.slots) for item in job.items)
    seen = Counter[str]()
    whole = pieces(job.transfers)
    for rank in range(slots):
        part = pieces(job.for_rank(rank))
        assert part == {name: whole[name] for name in part}
        seen.update(part.keys())
    ends = {identity: len({sender, to}) for identity, (_, sender, to, _) in whole.items()}
    assert seen == ends


def replicas_of_halves(replicas: int, name: str, shape: tuple[int, ...]) -> JobItem:
    """From two replicas of two halves to some replicas of four quarters, behind them."""
    source = reshard.spec(reshard.DeviceMesh.of(dp=2, tp=2), "tp, -").layout(shape)
    devices = range(4, 4 + 4 * replicas)
    mesh = reshard.DeviceMesh.of(dp=replicas, tp=4, devices=list(devices))
    return JobItem.between_ranks(
        name, dtype("int8"), source, reshard.spec(mesh, "tp, -").layout(shape)
    )


@pytest.mark.parametrize("sources", EVERY_KIND)
@given(before=st.integers(1, 3), more=st.integers(1, 3), length=st.integers(4, 9))
def test_further_target_ranks_keep_identities(
    sources: str, before: int, more: int, length: int
) -> None:
    few, many = (
        Job([replicas_of_halves(count, name, (length, 3)) for name in "ab"], sources)
        for count in (before, before + more)
    )
    old, new = pieces(few.transfers), pieces(many.transfers)
    whole = {(name, to, box) for name, _, to, box in old.values()}
    kept = {key: value for key, value in new.items() if value[2] < 4 + 4 * before}
    if sources == "stable":
        # Senders and boxes too.
        assert kept == old
    else:
        unsplit = {key for key, (name, _, to, box) in kept.items() if (name, to, box) in whole}
        assert unsplit <= old.keys()
        assert unsplit


def test_stable_senders_do_not_depend_on_other_tensors() -> None:
    alone = Job([replicas_of_halves(3, "a", (8, 3))], "stable")
    other = Layout.replicated((100,), 4), Layout.whole((100,), [6], 7)
    beside = Job(
        [
            JobItem.between_ranks("b", dtype("int8"), *other),
            replicas_of_halves(3, "a", (8, 3)),
        ],
        "stable",
    )
    assert str(alone.transfers["a"]) == str(beside.transfers["a"])


def test_stable_senders_spread_too() -> None:
    job = Job([replicas_of_halves(4, f"{i}", (8, 3)) for i in range(3)], "stable")
    assert job.sent_bytes.tolist() == [3 * 4 * 8 * 3 // 4] * 4


def test_parts_of_a_box_add_their_elements() -> None:
    item = JobItem.between_ranks(
        "a", dtype("int8"), Layout.replicated((4, 5), 2), Layout.whole((4, 5), [2], 3)
    )
    parts, whole = Job([item]), Job([item], "stable")
    assert parts.transfers.count == 2
    assert whole.transfers.count == 1
    assert not pieces(parts.transfers).keys() & pieces(whole.transfers).keys()


def test_a_box_needed_twice_has_two_identities() -> None:
    box = Box((0,), (4,))
    target = Layout.from_boxes((4,), [(1, box), (1, box)])
    job = Job([JobItem.between_ranks("a", dtype("int8"), Layout.whole((4,), [0], 2), target)])
    job.verify()
    assert len(pieces(job.transfers)) == 2


def test_an_identity_is_the_same_everywhere() -> None:
    item = JobItem.between_ranks(
        "a", dtype("int8"), Layout.whole((4, 5), [0], 1), Layout.whole((4, 5), [2], 3)
    )
    assert Job([item]).transfers.identities("a") == ["577e18d570a4cc32241a22e450a416f3"]
