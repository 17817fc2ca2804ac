"""An engine's events, progress and guard follow the batches of the refit that fills it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

from reshard.checkpoint.storage.threads import Progress
from reshard.torch.links.engine_sync import FilledBuckets
from reshard.torch.links.relay_tree import BucketGate
from reshard.torch.links.sync import BucketEvent, RunControl


def filled_buckets(
    control: RunControl, events: Sequence[BucketEvent], needs: Sequence[int]
) -> FilledBuckets:
    return FilledBuckets(control, events, needs, BucketGate(), lambda: None)


def test_events_come_with_the_batch_that_completes_them() -> None:
    told: list[Progress] = []
    control, events = RunControl(told.append), [BucketEvent("ab", 3), BucketEvent("c", 4)]
    control.expect(7)
    # The refit has three batches: the second event comes with its first, the first with its last.
    filled = filled_buckets(control, events, [2, 0])
    seen = []
    for number in range(3):
        filled.begin(number)
        filled.end(number)
        seen.append([event.is_done for event in events])
    assert seen == [[False, True], [False, True], [True, True]]
    assert told == [Progress(4, 7, 0, "c"), Progress(7, 7, 0, "b")]
    # A second refit that fills the engine tells nothing again.
    filled_buckets(control, events, [0, 0]).end(0)
    assert len(told) == 2
    assert events[0].wait(0)


def test_a_guard_is_left_when_a_bucket_fails() -> None:
    lock = threading.Lock()
    filled = filled_buckets(RunControl(guard=lock), [], [])
    filled.begin(0)
    assert lock.locked()
    filled.close()
    assert not lock.locked()


def test_the_engine_is_marked_before_a_bucket_is_written_and_forwarded_after_it() -> None:
    gate, marked = BucketGate(), [0]

    def mark() -> None:
        marked[0] += 1

    filled = FilledBuckets(RunControl(), [], [], gate, mark)
    filled.begin(0)
    assert marked == [1]
    filled.end(0)
    gate.wait(0)
