"""Traffic between ranks against sums over transfers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.dtypes import dtype
from reshard.layout import Layout
from reshard.plans.job import Job, JobItem
from reshard.plans.tables import format_movements
from reshard.plans.traffic import Traffic, find_top_ranks
from strategies import movements

DemandRanges = dict[tuple[int, int], int]
COLUMNS = st.lists(st.tuples(*[st.integers(0, 6)] * 2, st.integers(1, 99)), max_size=30)


def pairs_of(traffic: Traffic) -> DemandRanges:
    columns = (traffic.sender.tolist(), traffic.receiver.tolist(), traffic.amount.tolist())
    return {(a, b): amount for a, b, amount in zip(*columns, strict=True)}


def gathered(rows: list[tuple[int, int, int]]) -> Traffic:
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for i in range(3)]
    return Traffic.gathered(7, *columns)


def summed(rows: list[tuple[int, int, int]]) -> DemandRanges:
    total: DemandRanges = {}
    for a, b, amount in rows:
        total[a, b] = total.get((a, b), 0) + amount
    return total


@given(COLUMNS, st.integers(1, 8))
def test_pairs_add_up_and_are_in_order(rows: list[tuple[int, int, int]], size: int) -> None:
    traffic = gathered(rows)
    found = pairs_of(traffic)
    assert found == summed(rows)
    assert list(found) == sorted(found)
    together = traffic.taken_together(size)
    assert pairs_of(together) == summed([(a // size, b // size, n) for a, b, n in rows])
    assert together.ranks == -(-7 // size)
    for rank in range(7):
        assert traffic.sent[rank] == sum(n for a, _, n in rows if a == rank)
        assert traffic.received[rank] == sum(n for _, b, n in rows if b == rank)
        assert traffic.receivers[rank] == len({b for a, b, _ in rows if a == rank})
        assert traffic.senders[rank] == len({a for a, b, _ in rows if b == rank})
    kinds = traffic.kinds()
    busy = sorted({a for a, _, _ in rows} | {b for _, b, _ in rows})
    assert sorted(rank for kind in kinds for rank in kind.ranks) == busy
    for kind in kinds:
        for rank in kind.ranks:
            assert kind[1:] == (
                *(traffic.sent[rank], traffic.receivers[rank]),
                *(traffic.received[rank], traffic.senders[rank]),
            )


@given(movements())
def test_a_plans_traffic_is_that_of_its_transfers(
    case: tuple[tuple[Layout, object], tuple[Layout, object]],
) -> None:
    (source, _), (target, _) = case
    plan = reshard.plan(source, target)
    expected: DemandRanges = {}
    moving = plan.transfers.moving
    for row, elements in enumerate(moving.elements.tolist()):
        pair = (int(moving.source_slot[row]), int(moving.target_slot[row]))
        expected[pair] = expected.get(pair, 0) + elements
    traffic = Traffic.of_transfers(plan.transfers, max(source.slots, target.slots))
    assert pairs_of(traffic) == {pair: n for pair, n in expected.items() if n}
    assert traffic.total == plan.moved_elements
    text = format_movements(moving, traffic, max_rows=3)
    assert len(text.split("\n")) <= 2 + 3 + 1


def test_a_jobs_traffic_is_in_bytes() -> None:
    mesh = reshard.DeviceMesh.of(tp=2)
    rows, columns = (reshard.spec(mesh, text).layout((4, 4)) for text in ("tp, -", "-, tp"))
    job = Job(
        [
            JobItem.between_ranks("a", dtype("int8"), rows, columns),
            JobItem.between_ranks("b", dtype("float32"), rows, columns),
            JobItem.between_ranks("c", dtype("float32"), columns, rows),
        ]
    )
    assert pairs_of(job.traffic) == {(0, 1): 4 * (1 + 4 + 4), (1, 0): 4 * (1 + 4 + 4)}
    assert job.traffic.total == job.moved_bytes
    assert Job([]).traffic.total == 0


def test_times_and_the_busiest() -> None:
    traffic = gathered([(0, 1, 3), (2, 1, 3)]).times(4)
    assert traffic.amount.tolist() == [12, 12]
    assert find_top_ranks(traffic.sent) == (12, [0, 2])
    assert find_top_ranks(traffic.received) == (24, [1])
    assert find_top_ranks(np.zeros(3, dtype=np.int64)) == (0, [])
