"""The transfers of a rank are its part of the transfers of all ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import LayoutError, PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Box, Layout
from reshard.plans.job import JobTransfers
from reshard.plans.plan import Plan
from reshard.runs import RunTable
from strategies import LayoutAndContents, movements

Movement = tuple[LayoutAndContents, LayoutAndContents]


def rows(transfers: Transfers) -> Counter[tuple[object, ...]]:
    columns = [getattr(transfers, name) for name in Transfers.__dataclass_fields__]
    lists = [column.tolist() for column in columns]
    return Counter(
        tuple(tuple(value) if isinstance(value, list) else value for value in row)
        for row in zip(*lists, strict=True)
    )


@pytest.mark.parametrize("kind", [LayoutChange, Plan])
@given(movement=movements())
def test_the_parts_of_all_ranks_are_the_plan(
    kind: type[LayoutChange | Plan], movement: Movement
) -> None:
    (source, _), (target, _) = movement
    plan = kind(source, target)
    ranks = range(max(source.slots, target.slots))
    # Asked on a plan of its own, which has not looked at the whole.
    parts = {rank: plan.for_rank(rank) for rank in ranks}
    received, sent = Counter[tuple[object, ...]](), Counter[tuple[object, ...]]()
    for rank, part in parts.items():
        ends_here = part.target_slot == rank
        assert (ends_here | (part.source_slot == rank)).all()
        received += rows(part.take(ends_here))
        sent += rows(part.take(~ends_here))
    assert received == rows(plan.transfers)
    assert sent == rows(plan.transfers.moving)


@pytest.mark.parametrize("kind", [LayoutChange, Plan])
@given(movement=movements())
def test_the_totals_are_those_of_the_transfers(
    kind: type[LayoutChange | Plan], movement: Movement
) -> None:
    (source, _), (target, _) = movement
    plan = kind(source, target)
    moving = plan.transfers.moving
    for counted, slots, slot in (
        (plan.sent_elements, source.slots, moving.source_slot),
        (plan.received_elements, target.slots, moving.target_slot),
    ):
        expected = np.zeros(slots, dtype=np.int64)
        np.add.at(expected, slot, moving.elements)
        assert counted.tolist() == expected.tolist()


@given(movements(), st.sampled_from([None, "int8", "float64"]))
def test_a_plan_is_a_job_of_one_tensor(movement: Movement, dtype: str | None) -> None:
    (source, _), (target, _) = movement
    plan = reshard.plan(source, target, dtype)
    job = reshard.Job([reshard.JobItem.between_ranks("w", dtype or "uint8", source, target)])
    assert rows(plan.transfers) == rows(job.transfers.get("w", Transfers.none(source.ndim)))
    assert (plan.sent_elements * job.items[0].dtype.itemsize_bytes == job.sent_bytes).all()
    assert (plan.received_elements * job.items[0].dtype.itemsize_bytes == job.received_bytes).all()
    if plan.change.is_determined:
        assert rows(plan.transfers) == rows(plan.change.transfers)


def test_held_elements_stay() -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=3)
    layout = reshard.spec(mesh, "x, y").layout((6, 6))
    plan = reshard.plan(layout, layout)
    assert plan.moved_elements == 0
    assert len(plan.transfers.moving) == 0
    assert plan.transfers.stays.all()


def test_replicas_divide_their_bytes() -> None:
    whole, one = Layout.replicated((4,), 4), Layout.replicated((4,), 12)
    plan = reshard.plan(whole, one)
    assert plan.sent_elements.tolist() == [8, 8, 8, 8]


def test_a_rank_beyond_both_layouts_has_no_transfers() -> None:
    mesh = reshard.DeviceMesh.of(x=2)
    rows_layout, columns_layout = (
        reshard.spec(mesh, text).layout((4, 4)) for text in ("x, -", "-, x")
    )
    assert len(reshard.plan(rows_layout, columns_layout).for_rank(5)) == 0


def test_a_group_may_have_nothing_to_move() -> None:
    on = [Layout.from_boxes((4,), [(rank, Box((0,), (4,)))]) for rank in range(2)]
    job = reshard.Job([reshard.JobItem.between_ranks("a", "int8", on[0], on[1])])
    (group,) = job.for_rank(0).groups
    empty = replace(
        group, transfers=group.transfers.take(slice(0, 0)), begin=np.zeros_like(group.begin)
    )
    found = JobTransfers(("a",), [empty])
    assert found.shared() == {} == dict(found)


def test_a_source_without_some_elements_raises() -> None:
    table = RunTable(6, 1, [(0, 0, 4, 0)])
    partial = Layout((6,), [table], 1, [0], [[0]])
    plan = reshard.plan(partial, Layout.replicated((6,), 2))
    with pytest.raises(PlanError, match=r"only 4 of the 6 elements that rank 0 .*index 4 of dim"):
        _ = plan.transfers
    with pytest.raises(PlanError, match="rank 1"):
        plan.for_rank(1)


def test_a_hole_between_boxes_is_found() -> None:
    boxes = [(0, reshard.Box((0, 0), (1, 2))), (1, reshard.Box((1, 1), (2, 2)))]
    plan = reshard.plan(Layout.from_boxes((2, 2), boxes), Layout.replicated((2, 2)))
    with pytest.raises(PlanError, match="only 3 of the 4 elements"):
        plan.verify()


def test_layouts_of_different_shapes_raise() -> None:
    with pytest.raises(PlanError, match="both layouts must be of the same tensor"):
        reshard.plan(Layout.replicated((4,)), Layout.replicated((5,)))


def test_a_sharding_without_a_shape_raises() -> None:
    spec = reshard.spec(reshard.DeviceMesh.of(x=2), "x")
    with pytest.raises(PlanError, match="the source is ShardingSpec"):
        reshard.plan(spec, spec)


@pytest.mark.parametrize("rank", [-1, 0.5, "0", None, False])
def test_an_invalid_rank_of_a_plan_raises(rank: Any) -> None:
    plan = reshard.plan(Layout.replicated((4,)), Layout.replicated((4,), 2))
    with pytest.raises(LayoutError, match=r"-1|must be a whole number"):
        plan.for_rank(rank)


def test_bytes_need_a_dtype() -> None:
    plan = reshard.plan(Layout.replicated((4,)), Layout.replicated((4,), 2))
    for name in ("moved_bytes", "lower_bound_bytes"):
        with pytest.raises(PlanError, match=f"{name} of a plan without a dtype"):
            getattr(plan, name)


def test_a_plan_is_one_object() -> None:
    layouts = Layout.replicated((4,)), Layout.replicated((4,), 2)
    assert reshard.plan(*layouts, dtype="int8") is reshard.plan(*layouts, dtype=np.int8)
    assert reshard.plan(*layouts) is not reshard.plan(*layouts, dtype="int8")


def test_a_thousand_rows_to_a_thousand_columns() -> None:
    mesh = reshard.DeviceMesh.of(x=1024)
    rows_layout, columns_layout = (
        reshard.spec(mesh, text).layout((2048, 1024)) for text in ("x, -", "-, x")
    )
    plan = reshard.plan(rows_layout, columns_layout, dtype="bfloat16")
    mine = plan.for_rank(17)
    assert len(mine) == 1024 + 1023
    assert len(plan.transfers) == 1024 * 1024 == 1_048_576
    assert plan.moved_elements == plan.lower_bound_elements == 2048 * 1023
    plan.verify()
    row = int(np.flatnonzero((mine.source_slot == 5) & (mine.target_slot == 17))[0])
    assert mine.box(row) == reshard.Box((10, 17), (12, 18))
    assert (mine.source_start[row].tolist(), mine.target_start[row].tolist()) == ([0, 17], [10, 0])
