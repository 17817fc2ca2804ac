"""Loads of senders in the cases in which other planners overload a rank."""

from __future__ import annotations

import numpy as np
import pytest

import reshard
from reshard.dtypes import dtype
from reshard.layout import Box, Layout
from reshard.plans.job import Job, JobItem
from reshard.runs import IntArray

BFLOAT16 = dtype("bfloat16")


def later(layout: Layout, by: int) -> Layout:
    """The same on slots of numbers `by` higher."""
    return Layout(
        layout.shape, layout.tables, layout.slots + by, layout.cell_slot + by, layout.cell_part
    )


def job_of(source: Layout, target: Layout, count: int = 5) -> Job:
    return Job([JobItem.between_ranks(f"t{i}", BFLOAT16, source, target) for i in range(count)])


def layout(mesh: reshard.DeviceMesh, text: str, shape: tuple[int, ...]) -> Layout:
    return reshard.spec(mesh, text).layout(shape)


@pytest.mark.parametrize("shape", [(64, 48), (63, 5), (7,)])
def test_eight_replicas_to_eight_others(shape: tuple[int, ...]) -> None:
    # Megatron: 8.0 of the mean. Here every replica serves one rank, whole tensors.
    whole = Layout.replicated(shape, 8)
    job = job_of(whole, later(whole, 8))
    assert np.ptp(job.sent_bytes) == 0
    assert job.transfers.count == 5 * 8
    for rank in range(8):
        assert set(job.for_rank(rank)["t0"].moving.source_slot.tolist()) == {rank}


@pytest.mark.parametrize("shape", [(64, 48), (63, 5)])
def test_eight_replicas_to_four_of_them_and_four_others(shape: tuple[int, ...]) -> None:
    target = Layout.whole(shape, range(4, 12), 12)
    job = job_of(Layout.replicated(shape, 8), target)
    assert job.moved_bytes == 5 * 4 * 2 * int(np.prod(shape))
    assert job.sent_bytes.max() <= 1.05 * job.moved_bytes / 8


def test_half_as_many_replicas_of_halves() -> None:
    # Megatron: 2.0 of the mean.
    source = layout(reshard.DeviceMesh.of(dp=2, tp=4), "tp, -", (64, 48))
    target = later(layout(reshard.DeviceMesh.of(tp=8), "tp, -", (64, 48)), 8)
    job = job_of(source, target)
    assert np.ptp(job.sent_bytes) == 0
    assert job.transfers.count == 5 * 8


def test_half_as_many_replicas_of_halves_on_the_same_ranks() -> None:
    # BoxParts 0 and 3 have one receiver that lacks them, 1 and 2 have two.
    source = layout(reshard.DeviceMesh.of(dp=2, tp=4), "tp, -", (64, 48))
    job = job_of(source, layout(reshard.DeviceMesh.of(tp=8), "tp, -", (64, 48)))
    part = 5 * 2 * 64 * 48 // 8
    half = part // 2
    expected = [half, part, part, half, half, part, part, half]
    assert np.abs(job.sent_bytes - expected).max() <= part / 32


@pytest.mark.parametrize("stacked", [True, False])
def test_256_experts_with_eight_replicas(stacked: bool) -> None:
    # Megatron: 8.0 of the mean. 64 source ranks of 32 experts, 256 target ranks of 8.
    shape, later_by = (16, 24), 64
    if stacked:
        source = layout(reshard.DeviceMesh.of(dp=8, ep=8), "ep, -, -", (256, *shape))
        target = layout(reshard.DeviceMesh.of(dp=8, ep=32), "ep, -, -", (256, *shape))
        job = job_of(source, later(target, later_by), 2)
        assert job.transfers.count == 2 * 256
    else:
        items = []
        for expert in range(256):
            source = Layout.whole(shape, [8 * dp + expert // 32 for dp in range(8)], 64)
            ranks = [later_by + 32 * dp + expert // 8 for dp in range(8)]
            items.append(
                JobItem.between_ranks(
                    f"{expert}", BFLOAT16, source, Layout.whole(shape, ranks, later_by + 256)
                )
            )
        job = Job(items)
        assert job.transfers.count == 256 * 8
    assert np.ptp(job.sent_bytes) == 0
    assert job.moved_bytes == job.lower_bound_bytes


def test_eight_replicas_to_one_rank() -> None:
    job = job_of(Layout.replicated((1000, 100), 8), Layout.whole((1000, 100), [8], 9), 3)
    assert job.sent_bytes.max() <= 1.02 * job.moved_bytes / 8
    # Seven cuts; two of the eight stretches end where a tensor does, or near.
    assert 3 < job.transfers.count <= 3 + 7
    job.verify()


def test_a_large_tensor_is_relieved_by_small_ones() -> None:
    # Rank 0 alone has the large one; ranks 1 and 2 send all the rest.
    large = JobItem.between_ranks(
        "large", BFLOAT16, Layout.whole((800,), [0], 4), Layout.whole((800,), [3], 4)
    )
    small = [
        JobItem.between_ranks(
            f"{i}", BFLOAT16, Layout.whole((100,), [0, 1, 2], 4), Layout.whole((100,), [3], 4)
        )
        for i in range(16)
    ]
    job = Job([*small, large])
    assert np.abs(job.sent_bytes - [1600, 1600, 1600, 0]).max() <= 1600 / 32


def test_several_parts_of_the_same_holders() -> None:
    boxes = [Box((0,), (100,)), Box((100,), (400,))]
    source = Layout.from_boxes((400,), [(slot, box) for slot in (0, 1, 2) for box in boxes])
    job = job_of(source, Layout.whole((400,), [3], 4), 8)
    job.verify()
    assert np.abs(job.sent_bytes - 8 * 2 * 400 // 3).max() <= 8 * 2 * 400 // 3 / 32


def test_ranks_without_elements_take_no_part() -> None:
    source, target = Layout.whole((12,), [2, 3], 4), Layout.whole((12,), [0, 1], 4)
    job = job_of(source, target, 1)
    assert job.sent_bytes.tolist() == [0, 0, 24, 24]
    assert len(job.for_rank(17)) == 0
    assert job.for_rank(0).count == 1


def test_a_cut_follows_the_rows_of_a_box() -> None:
    job = job_of(Layout.replicated((401, 1000), 2), Layout.whole((401, 1000), [2], 3), 1)
    assert str(job.transfers["t0"]).splitlines() == [
        "0 -> 2 [0:201, 0:1000]",
        "1 -> 2 [201:401, 0:1000]",
    ]


def test_few_rows_are_split_within_a_row() -> None:
    job = job_of(Layout.replicated((3, 7), 2), Layout.whole((3, 7), [2], 3), 1)
    assert str(job.transfers["t0"]).splitlines() == [
        "0 -> 2 [0:1, 0:7]",
        "0 -> 2 [1:2, 0:4]",
        "1 -> 2 [1:2, 4:7]",
        "1 -> 2 [2:3, 0:7]",
    ]


def test_a_few_elements_of_several_sizes() -> None:
    layouts = Layout.replicated((3,), 2), Layout.whole((3,), [2], 3)
    items = [JobItem.between_ranks(name, dtype(name), *layouts) for name in ("int8", "int64")]
    job = Job(items)
    job.verify()
    # 27 bytes: an element of 8 bytes is not divided.
    assert job.sent_bytes.max() <= 13.5 + 8


def loads(job: Job) -> IntArray:
    return job.sent_bytes[job.sent_bytes > 0]


def test_key_value_heads_held_twice() -> None:
    mesh = reshard.DeviceMesh.of(tp=8)
    source = layout(mesh, "tp@heads4, -", (8, 64))
    job = job_of(source, later(layout(mesh, "tp, -", (8, 64)), 8))
    assert loads(job).tolist() == [5 * 2 * 64] * 8
    job.verify()


def test_ragged_shards_with_copies() -> None:
    boxes = [Box((0, 0), (3, 10)), Box((3, 0), (4, 10)), Box((4, 0), (10, 10))]
    holders = [(0, 1), (0, 2), (2, 3)]
    source = Layout.from_boxes(
        (10, 10), [(slot, box) for box, slots in zip(boxes, holders, strict=True) for slot in slots]
    )
    job = job_of(source, Layout.whole((10, 10), [4], 5), 4)
    job.verify()
    # 240, 80 and 480 bytes: ranks 2 and 3 share the last, 0 and 1 the rest.
    assert np.abs(job.sent_bytes - [160, 160, 240, 240]).max() <= 8
