"""One target rank at a time gets what all get at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Box, Layout
from reshard.plans.run import run_change, run_rank
from reshard.testing.oracle import shards_of
from reshard.testing.strategies import layouts_with_contents, shapes

CASES = shapes(max_rank=3).flatmap(
    lambda shape: st.tuples(layouts_with_contents(shape), layouts_with_contents(shape))
)


@settings(max_examples=150)
@given(CASES)
def test_rank_by_rank_is_as_at_once(case: Any) -> None:
    (source, contents), (target, _) = case
    change = LayoutChange(source, target)
    random = np.random.default_rng(0)
    dense = [random.integers(1, 5, source.shape) for _ in range(contents.contributions)]
    shards = shards_of(contents, [array.astype(np.float64) for array in dense], rubbish=77.0)
    if not shards:
        return
    expected = run_change(change, shards)
    for rank in target.holders:
        found, copied = run_rank(change, rank, shards)
        assert found.tobytes() == expected[rank].tobytes()
        assert found.shape == expected[rank].shape and found.dtype == expected[rank].dtype
        assert copied == change.transfers.elements[change.transfers.target_slot == rank].sum()


def test_contributions_are_combined_scaled_and_filled() -> None:
    mesh = reshard.DeviceMesh.of(x=2)
    mean, partial = (reshard.spec(mesh, f"- | {how}(x)").layout((2,)) for how in ("mean", "max"))
    whole = Layout.replicated((2,), 2)
    held = {0: np.array([1.0, 2.0]), 1: np.array([3.0, 8.0])}
    change = LayoutChange(mean, whole)
    assert run_rank(change, 1, held)[0].tolist() == [2, 5]
    change = LayoutChange(whole, partial)
    found = [run_rank(change, rank, held)[0].tolist() for rank in range(2)]
    assert found == [[1, 2], [-np.inf, -np.inf]]


def test_only_senders_are_read() -> None:
    """Of two boxes on one rank, the second is asked for; the other rank's array is not."""
    boxes = [(0, Box((0, 0), (1, 4))), (0, Box((3, 0), (4, 4))), (1, Box((1, 0), (3, 4)))]
    wanted = [(0, Box((3, 0), (4, 4))), (1, Box((0, 0), (3, 4)))]
    change = LayoutChange(*(Layout.from_boxes((4, 4), side) for side in (boxes, wanted)))
    held = {0: np.arange(8), 1: "not an array"}
    found, copied = run_rank(change, 0, held)
    assert found.tolist() == [[4, 5, 6, 7]] and copied == 4


def test_the_check_is_called_before_every_copy() -> None:
    whole, parts = Layout.whole((4,), [0], 2), reshard.spec(reshard.DeviceMesh.of(x=4), "x")
    change = LayoutChange(parts.layout((4,)), whole)
    seen = []

    def check() -> None:
        seen.append(len(seen))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_rank(change, 0, {r: np.zeros(1) for r in range(4)}, check)
    assert seen == [0, 1, 2]
