"""Parts that are sent in threads of their own."""

from __future__ import annotations

import threading
import time

import pytest

from reshard.checkpoint.storage.uploads import PartSender
from reshard.errors import RunError


def test_every_part_is_sent_once() -> None:
    sent: list[int] = []
    with PartSender(sent.append, 3) as sender:
        for part in range(500):
            sender.put(part)
        sender.finish()
        assert sorted(sent) == list(range(500))
        # It goes on after that.
        sender.put(500)
        sender.finish()
    assert sent[-1] == 500


def test_putting_more_parts_than_threads_waits() -> None:
    go, started = threading.Event(), threading.Semaphore(0)

    def send(part: int) -> None:
        started.release()
        assert go.wait(60)

    with PartSender(send, 4) as sender:
        for part in range(4):
            sender.put(part)
            assert started.acquire(timeout=60)
        waiting = threading.Thread(target=sender.put, args=(99,))
        waiting.start()
        time.sleep(0.05)
        assert waiting.is_alive() and not started.acquire(blocking=False)
        go.set()
        waiting.join(60)
        sender.finish()
        assert started.acquire(blocking=False)


def test_a_failed_part_is_raised_by_every_later_call() -> None:
    def send(part: int) -> None:
        if part == 1:
            raise RunError("the store refuses")

    with PartSender(send, 4) as sender:
        sender.put(0)
        sender.put(1)
        with pytest.raises(RunError, match="the store refuses"):
            sender.finish()
        with pytest.raises(RunError, match="the store refuses"):
            sender.put(2)
        with pytest.raises(RunError, match="the store refuses"):
            sender.check()
        # Who waits for the others does not hang.
        with pytest.raises(RunError, match="the store refuses"):
            sender.finish()


def test_no_thread_is_left() -> None:
    sender = PartSender(lambda part: time.sleep(0.01), 3)
    for part in range(8):
        sender.put(part)
    sender.close()
    sender.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("reshard-send")]
