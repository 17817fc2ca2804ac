"""Runs of one sync that several threads ask for, without a link."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("torch")

from reshard.torch.links.sync import SyncReport, WeightSync


class Meeting(WeightSync):
    """A sync whose runs would meet at a barrier, if two were under way."""

    def __init__(self) -> None:
        super().__init__("a test")
        self.barrier = threading.Barrier(2)
        self.has_met = False
        self.versions: list[int] = []

    def _run(self, version: int, options: Any) -> SyncReport:
        try:
            self.barrier.wait(0.2)
            self.has_met = True
        except threading.BrokenBarrierError:
            self.barrier.reset()
        self.versions.append(version)
        return SyncReport(version)

    def _check_version(self, version: int | None) -> int:
        return len(self.versions) if version is None else version

    def _verify(self) -> None:
        self._run(-1, None)


@pytest.mark.parametrize("begins", [False, True])
def test_runs_of_several_threads_follow_one_another(begins: bool) -> None:
    sync = Meeting()
    if begins:
        sync.run(async_op=True)
    calls = [sync.run, sync.run, lambda: sync.run(async_op=True)]
    threads = [threading.Thread(target=one) for one in calls]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    sync.verify()
    assert not sync.has_met
    assert sync.versions == [*range(3 + begins), -1]
