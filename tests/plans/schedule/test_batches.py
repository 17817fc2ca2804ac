"""Batches of a job: all of it, in order, and no rank ever stages more than the limit."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from reshard.dtypes import dtype
from reshard.errors import PlanError
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.schedule.batches import Batch, batches
from reshard.plans.schedule.slices import POSITIONS, Slice, restrict
from reshard.testing.strategies import movements

# Each example is a few movements.
FEWER = settings(max_examples=max(settings().max_examples // 2, 1))


@st.composite
def jobs(draw: st.DrawFn) -> reshard.Job:
    """A few tensors of any layouts and widths."""
    items = []
    for number in range(draw(st.integers(0, 3))):
        (source, _), (target, _) = draw(movements())
        width = dtype(draw(st.sampled_from(["int8", "float32", "complex128"])))
        items.append(reshard.JobItem.between_ranks(f"t{number}", width, source, target))
    return reshard.Job(items)


def assert_batches(job: reshard.Job, found: tuple[Batch, ...], limit: int, align: int = 1) -> None:
    """Slices of each tensor follow one another to its end; staging is counted piece by piece."""
    reached: list[tuple[int, int | None]] = []
    for batch in found:
        assert batch.items
        staged = np.zeros(len(batch.staging_bytes), dtype=np.int64)
        for part in batch.items:
            if part.slice.start == 0:
                reached.append((part.item, 0))
            assert reached[-1] == (part.item, part.slice.start)
            reached[-1] = (part.item, part.slice.stop)
            item = job.items[part.item]
            transfers = job.transfers.get(item.name, Transfers.none(item.change.source.ndim))
            rows = restrict(transfers, part.slice).moving
            for row in range(len(rows)):
                size = int(rows.elements[row]) * item.dtype.itemsize_bytes
                for rank in (rows.source_slot[row], rows.target_slot[row]):
                    staged[rank] += -(-size // align) * align
        assert batch.staging_bytes.tolist() == staged.tolist()
        assert batch.peak_bytes == max(staged, default=0) <= limit
    assert reached == [(number, None) for number in range(len(job))]


def least_that_would_do(job: reshard.Job, limit: int, align: int = 1) -> int:
    with pytest.raises(PlanError, match="the least that would do") as raised:
        batches(job, limit, align)
    found = re.search(r"do is (\d+) bytes", str(raised.value))
    assert found is not None
    return int(found[1])


@FEWER
@given(jobs(), st.integers(0, 2000), st.sampled_from([1, 16]))
def test_no_rank_stages_more_than_the_limit(job: reshard.Job, limit: int, align: int) -> None:
    try:
        found = batches(job, limit, align)
    except PlanError:
        least = least_that_would_do(job, limit, align)
        assert least > limit
        # What is said to do does, and nothing less.
        assert_batches(job, batches(job, least, align), least, align)
        least_that_would_do(job, least - 1, align)
        return
    assert_batches(job, found, limit, align)
    again = batches(reshard.Job(job.items), limit, align)
    assert [batch.items for batch in again] == [batch.items for batch in found]


@FEWER
@given(jobs())
def test_with_room_for_all_there_is_one_batch(job: reshard.Job) -> None:
    ranks = max(len(job.sent_bytes), len(job.received_bytes))
    staged = np.zeros(ranks, dtype=np.int64)
    staged[: len(job.sent_bytes)] += job.sent_bytes
    staged[: len(job.received_bytes)] += job.received_bytes
    found = batches(job, int(staged.max(initial=0)))
    assert len(found) == min(len(job), 1)
    for batch in found:
        assert batch.staging_bytes.tolist() == staged.tolist()
        assert all(part.slice.is_whole for part in batch.items)


def rows_to_columns(size: int, count: int) -> reshard.Job:
    mesh = reshard.DeviceMesh.of(x=4)
    rows, columns = (reshard.spec(mesh, text).layout((size, size)) for text in ("x, -", "-, x"))
    return reshard.Job(
        [reshard.JobItem.between_ranks(f"t{i}", dtype("int8"), rows, columns) for i in range(count)]
    )


def test_a_large_tensor_is_cut_into_hardly_more_batches_than_it_takes() -> None:
    # Each rank sends and receives 3 of 16 parts.
    job = rows_to_columns(400, 1)
    found = batches(job, 6000)
    assert_batches(job, found, 6000)
    assert len(found) == 10  # of 60,000 bytes a rank


def test_what_fits_is_not_cut() -> None:
    job = rows_to_columns(40, 5)  # 600 bytes a rank and tensor
    found = batches(job, 1300)
    assert [[part.item for part in batch.items] for batch in found] == [[0, 1], [2, 3], [4]]
    assert all(part.slice == Slice() for batch in found for part in batch.items)


def test_what_is_left_of_a_cut_tensor_shares_its_batch() -> None:
    small, large = rows_to_columns(40, 1).items[0], rows_to_columns(400, 1).items[0]
    renamed = reshard.JobItem.between_ranks(
        "small", small.dtype, small.change.source, small.change.target
    )
    found = batches(reshard.Job([large, renamed]), 50_000)
    assert [[part.item for part in batch.items] for batch in found] == [[0], [0, 1]]
    assert [batch.peak_bytes for batch in found] == [50_000, 10_800]  # rows are 100 bytes


def test_a_tensor_that_only_stays_is_in_a_batch_too() -> None:
    layout = Layout.replicated((4,), 2)
    job = reshard.Job([reshard.JobItem.between_ranks("t", dtype("int8"), layout, layout)])
    found = batches(job, 0)
    assert [batch.peak_bytes for batch in found] == [0]
    assert [part.slice.is_whole for part in found[0].items] == [True]
    assert batches(reshard.Job([]), 0) == ()


def test_a_limit_that_is_too_small_is_refused_with_one_that_is_not() -> None:
    job = rows_to_columns(400, 2)
    with pytest.raises(PlanError, match=r"a limit of 99 bytes .* 't0' needs"):
        batches(job, 99)
    # A row of a 100 x 100 piece is the least that moves, and some rows are done together.
    assert 100 <= least_that_would_do(job, 99) <= 400


def test_rows_that_are_done_at_the_same_position_need_room_together() -> None:
    # Two transfers of three rows a position, and one byte a row, from one sender.
    size = 2 * 3 * POSITIONS
    halves = Layout.flat_ranges((size,), {1: (0, size // 2), 2: (size // 2, size)})
    item = reshard.JobItem.between_ranks("t", dtype("int8"), Layout.whole((size,), [0], 3), halves)
    assert least_that_would_do(reshard.Job([item]), 5) == 6
    assert least_that_would_do(reshard.Job([item]), 5, 16) == 32


@pytest.mark.parametrize(("limit", "alignment"), [(-1, 1), (100, 0)])
def test_bounds_that_are_none(limit: int, alignment: int) -> None:
    with pytest.raises(PlanError, match="it must be at least"):
        batches(rows_to_columns(8, 1), limit, alignment)
