"""Stages that were changed are found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import reshard
from plans.staged_jobs import (
    HOSTS,
    ON_HOSTS,
    spec_job,
)
from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.geometry.transfers import Transfers
from reshard.layout import Layout
from reshard.plans.hosts.staged_job import StagedJob
from reshard.plans.hosts.verification import verify_stages

STAGED = StagedJob(
    spec_job("gpu, - | only(host=0)", "- , - | only(host=1)", (16, 8), HOSTS), ON_HOSTS
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a, b: (a.take(slice(1, None)), b),
            "before it brings 0 of its 32 elements",
        ),
        (lambda a, b: (a, b.take(slice(1, None))), "rank 5 receives 96 elements .* of 128"),
        (
            lambda a, b: (a.take(np.append(np.arange(len(a)), 0)), b),
            "before it brings 64",
        ),
        (lambda a, b: (a, b.take(np.append(np.arange(len(b)), 0))), "receives 160 elements"),
        (
            lambda a, b: (a, replace(b, start=np.add(b.start, [1, 0]))),
            "the relay does not have these indices of dimension 0",
        ),
        (
            lambda a, b: (
                a,
                replace(
                    b,
                    start=np.subtract(b.start, [1, 0]),
                    source_start=np.subtract(b.source_start, [1, 0]),
                ),
            ),
            "does not have these indices",
        ),
        (
            lambda a, b: (a, replace(b, source_slot=b.source_slot[::-1].copy())),
            "the source rank has no such cell",
        ),
        (
            lambda a, b: (replace(a, source_start=np.add(a.source_start, [0, 1])), b),
            "the source does not have these indices",
        ),
        (
            lambda a, b: (
                a,
                replace(
                    b,
                    source_slot=b.target_slot,
                    source_cell=b.target_cell,
                    target_slot=b.source_slot,
                    target_cell=b.source_cell,
                ),
            ),
            "before it brings 0 of its 32",
        ),
        (
            lambda a, b: (replace(a, shape=np.subtract(a.shape, [1, 0])), b),
            "before it brings 24 of its 32",
        ),
    ],
)
def test_stages_that_were_changed_are_found_out(
    change: Callable[[Transfers, Transfers], tuple[Transfers, Transfers]], message: str
) -> None:
    plan = STAGED.job.items[0].change
    exchange, fan_out = STAGED.transfers(0)
    verify_stages(plan, exchange, fan_out)
    with pytest.raises(PlanError, match=message):
        verify_stages(plan, *change(exchange, fan_out))


def test_what_the_receiver_holds_must_not_be_handed_to_it() -> None:
    """Two ranks hold all: a fan-out from one to the other is wrong, in place of what stays too."""
    mesh = reshard.DeviceMesh.of(x=2)
    whole = reshard.spec(mesh, "-").layout((4,))
    plan = LayoutChange(whole, whole)
    stays = plan.transfers
    again = replace(
        stays.take([0]),
        target_slot=np.array([1]),
        target_cell=np.array([1]),
        stays=np.array([False]),
    )
    verify_stages(plan, stays, stays.take(slice(0, 0)))
    with pytest.raises(PlanError, match="held it already"):
        verify_stages(plan, stays, again)
    with pytest.raises(PlanError, match="held it already"):
        verify_stages(plan, stays.take([0]), again)


def test_what_a_rank_sent_must_not_come_back_to_it() -> None:
    plan = LayoutChange(Layout.whole((4,), [0], 2), Layout.replicated((4,), 2))
    stays, moves = plan.transfers.take([0]), plan.transfers.take([1])
    back = replace(
        moves,
        source_slot=np.array([1]),
        source_cell=np.array([1]),
        target_slot=np.array([0]),
        target_cell=np.array([0]),
    )
    verify_stages(plan, plan.transfers, stays.take(slice(0, 0)))
    with pytest.raises(PlanError, match="exactly when both ranks are one"):
        verify_stages(plan, moves, back)
