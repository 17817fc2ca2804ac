"""A policy of senders is a function and a row of `POLICIES`."""

from __future__ import annotations

import numpy as np
import pytest

import reshard
from reshard.errors import PlanError
from reshard.plans import source_selection as selection
from reshard.plans.source_selection import SenderAssignment
from reshard.runs import IntArray

WHOLE = reshard.Layout.replicated((6,), 3)
PARTS = reshard.Layout.whole((6,), [3, 4], 5)


def find_last(assignment: SenderAssignment, row: IntArray, receiver: IntArray) -> IntArray:
    """The last rank of those that hold each row."""
    return assignment.set_slot[assignment.set_begin[assignment.rows.holder_set[row] + 1] - 1]


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selection.POLICIES, "last", find_last)


def make_job(sources: str) -> reshard.Job:
    dtype = reshard.dtype("float32")
    return reshard.Job(
        [reshard.JobItem.between_ranks(name, dtype, WHOLE, PARTS) for name in "ab"], sources
    )


def test_a_job_has_its_senders() -> None:
    assert make_job("last").sent_bytes.tolist() == [0, 0, 96]
    assert make_job("balanced").sent_bytes.tolist() == [32, 32, 32]


def test_all_ranks_find_the_same() -> None:
    job = make_job("last")
    assert [*job.for_rank(0), *job.for_rank(1)] == []
    assert [str(job.for_rank(rank)["a"]).splitlines() for rank in (2, 3, 4)] == [
        ["2 -> 3 [0:6]", "2 -> 4 [0:6]"],
        ["2 -> 3 [0:6]"],
        ["2 -> 4 [0:6]"],
    ]
    job.verify()


def test_data_arrives() -> None:
    value = np.arange(6, dtype=np.float32)
    found = make_job("last").run({name: dict.fromkeys(range(3), value) for name in "ab"})
    for name in "ab":
        assert {rank: array.tolist() for rank, array in found[name].items()} == {
            rank: value.tolist() for rank in (3, 4)
        }


def test_another_policy_is_another_job() -> None:
    assert make_job("last").digest != make_job("stable").digest
    text = reshard.to_json(make_job("last"))
    assert reshard.from_json(text) == make_job("last")


def test_unknown_policies_raise() -> None:
    with pytest.raises(PlanError, match=r"sources='first': expected 'balanced', .*, or 'last'"):
        make_job("first")
