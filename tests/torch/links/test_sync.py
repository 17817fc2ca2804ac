"""Runs of the syncs of one link that several threads ask for, without the link."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from reshard.errors import LinkError, UsageError
from reshard.torch.links.sync import (
    BucketEvent,
    RunControl,
    SyncReport,
    WeightSync,
)


class Place:
    """Where runs would meet, if two were under way."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(2)
        self.has_met = False


class Meeting(WeightSync):
    """A sync whose runs come to a place."""

    def __init__(self, place: Place, number: int = 0) -> None:
        members: Any = None
        super().__init__(members, number, place.turn)
        self.place = place
        self.versions: list[int] = []

    def _run(self, version: int, control: Any) -> SyncReport:
        try:
            self.place.barrier.wait(0.2)
            self.place.has_met = True
        except threading.BrokenBarrierError:
            self.place.barrier.reset()
        self.versions.append(version)
        return SyncReport(version)

    def _check_version(self, version: int | None) -> int:
        return len(self.versions) if version is None else version

    def _verify(self) -> None:
        self._run(-1, None)


class Failing(Meeting):
    """A sync whose runs fail."""

    def _run(self, version: int, control: Any) -> SyncReport:
        super()._run(version, control)
        raise LinkError("it failed")


def call_together(calls: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=one) for one in calls]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


@pytest.mark.parametrize("begins", [False, True])
def test_runs_of_several_threads_follow_one_another(begins: bool) -> None:
    sync = Meeting(Place())
    if begins:
        sync.run(async_op=True)
    call_together([sync.run, sync.run, lambda: sync.run(async_op=True)])
    sync.verify()
    assert not sync.place.has_met
    assert sync.versions == [*range(3 + begins), -1]


@pytest.mark.parametrize("begins", [False, True])
def test_so_do_runs_of_several_models(begins: bool) -> None:
    place = Place()
    syncs = [Meeting(place, number) for number in range(2)]
    if begins:
        syncs[0].run(async_op=True)
    call_together([syncs[1].run, lambda: syncs[0].run(async_op=True), syncs[1].verify])
    syncs[0].wait()
    assert not place.has_met
    assert syncs[0].versions == [*range(1 + begins)]
    assert sorted(syncs[1].versions) == [-1, 0]


@pytest.mark.parametrize("begins", [False, True])
def test_one_that_fails_gives_its_turn_on(begins: bool) -> None:
    place = Place()
    failing, sync = Failing(place), Meeting(place, 1)
    if begins:
        failing.run(async_op=True)
    else:
        with pytest.raises(LinkError, match="it failed"):
            failing.run()
    sync.run()
    assert sync.versions == [0]
    if begins:
        with pytest.raises(LinkError, match="it failed"):
            failing.run()
        sync.run()


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
        RunControl(**given)
