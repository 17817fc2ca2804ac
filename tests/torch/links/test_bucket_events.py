"""Events of buckets, and what a run takes beside its weights."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("torch")

from reshard.checkpoint.storage.threads import Progress, StoppedError
from reshard.errors import LinkError, UsageError
from reshard.torch.links.bucket_events import (
    BucketCounter,
    BucketEvent,
    FilledBuckets,
    RunOptions,
    SentBuckets,
)


def test_events_come_with_the_batch_that_completes_them() -> None:
    told: list[Progress] = []
    options = RunOptions(progress=told.append)
    counter, events = BucketCounter(options), [BucketEvent("ab", 3), BucketEvent("c", 4)]
    counter.expect(7)
    # The refit has three batches: the second event comes with its first, the first with its last.
    filled = FilledBuckets(options, counter, events, [2, 0])
    seen = []
    for number in range(3):
        filled.begin(number)
        filled.end(number)
        seen.append([event.is_done for event in events])
    assert seen == [[False, True], [False, True], [True, True]]
    assert told == [Progress(4, 7, 0, "c"), Progress(7, 7, 0, "b")]
    # A second refit that fills the engine tells nothing again.
    FilledBuckets(options, counter, events, [0, 0]).end(0)
    assert len(told) == 2
    assert events[0].wait(0)


def test_an_event_that_will_not_come() -> None:
    event = BucketEvent(["norm"], 4)
    assert not event.wait(0) and not event.is_done
    event._fail(LinkError("the trainer is gone"))
    with pytest.raises(LinkError, match=r"BucketEvent\(norm\) is not complete: the trainer is"):
        event.wait()
    assert not event.is_done
    done = BucketEvent(["up"], 4)
    done._set()
    done._fail(LinkError("the trainer is gone"))
    assert done.wait() and done.is_done


def test_a_guard_is_left_when_a_bucket_fails() -> None:
    lock = threading.Lock()
    filled = FilledBuckets(RunOptions(guard=lock), BucketCounter(RunOptions()), [], [])
    filled.begin(0)
    assert lock.locked()
    filled.close()
    assert not lock.locked()


def test_a_run_stops_before_its_next_bucket() -> None:
    stop = threading.Event()
    counter = BucketCounter(RunOptions(stop=stop))
    sent = SentBuckets(counter, [8, 0], ["up", ""])
    sent.begin(0)
    stop.set()
    sent.end(0)
    with pytest.raises(StoppedError):
        sent.begin(1)
    assert counter.is_stopped()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"progress": 3}, "progress=3; give a function"),
        ({"stop": True}, "stop=True: expected a threading.Event"),
        ({"guard": 3}, "guard=3; give a lock"),
    ],
)
def test_what_a_run_does_not_take(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        RunOptions(**given)
