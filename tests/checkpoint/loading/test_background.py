"""Work in the background: handles that are waited for, cancelled, awaited."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard import checkpoint
from reshard.checkpoint import BackgroundWork, Progress
from reshard.errors import CheckpointError, InterruptedRunError, RunError, UsageError

WHOLE = {f"w{n}": tensor("float32", (64, 64), n) for n in range(8)}
TOTAL = 8 * 64 * 64 * 4


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_file(tmp_path / "model.safetensors", WHOLE)
    return tmp_path / "model.safetensors"


def test_a_load(source: Path) -> None:
    told: list[Progress] = []
    work = checkpoint.load_async(source, progress=told.append)
    found = work.result(60)
    assert work.done() and work.wait(0)
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: one.bits.tobytes() for name, one in WHOLE.items()
    }
    assert told and work.progress == told[-1]
    assert work.progress is not None and work.progress.done_bytes == TOTAL
    assert "done" in repr(work)


def test_errors_come_with_the_result(source: Path) -> None:
    work = checkpoint.load_async(source.parent / "nothing")
    assert work.wait(60)
    with pytest.raises(CheckpointError, match="nothing of that name"):
        work.result()
    # A conversion is planned at once.
    with pytest.raises(UsageError, match="cannot read the target"):
        checkpoint.convert_async(source, source.parent / "t", to="x")


def test_a_conversion_is_cancelled_and_continues(
    source: Path, tmp_path: Path, small_blocks: int
) -> None:
    target, reached, go_on = tmp_path / "target", threading.Event(), threading.Event()

    def hold(progress: Progress) -> None:
        reached.set()
        assert go_on.wait(60)

    work = checkpoint.convert_async(source, target, to="full", progress=hold, threads=1)
    assert reached.wait(60)
    assert not work.done()
    assert not work.wait(0.01)
    with pytest.raises(RunError, match="has not come to its end in"):
        work.result(0.01)
    work.cancel()
    assert "cancelled" in repr(work)
    go_on.set()
    with pytest.raises(InterruptedRunError, match="the same command continues"):
        work.result(60)
    assert work.done()
    assert not target.exists()
    report = checkpoint.convert_async(source, target, to="full").result(60)
    assert report.resumed_bytes > 0
    assert checkpoint.compare(source, target).is_same


def test_a_stopped_conversion_continues(source: Path, tmp_path: Path, small_blocks: int) -> None:
    stop = threading.Event()
    with pytest.raises(InterruptedRunError, match="interrupted when"):
        checkpoint.convert(
            source, tmp_path / "t", to="full", stop=stop, progress=lambda _: stop.set(), threads=1
        )
    with pytest.raises(InterruptedRunError, match="interrupted"):
        checkpoint.convert(source, tmp_path / "t", to="full", stop=stop)
    stop.clear()
    report = checkpoint.convert(source, tmp_path / "t", to="full", stop=stop)
    assert 0 < report.resumed_bytes < TOTAL


def test_awaited_in_a_coroutine(source: Path) -> None:
    async def both() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        first, second = checkpoint.load_async(source), checkpoint.load_async(source)
        return await first, await second

    one, other = asyncio.run(both())
    assert one.keys() == other.keys() == WHOLE.keys()


def test_a_cancelled_task_leaves_the_work() -> None:
    go_on = threading.Event()

    def hold(progress: object, stop: threading.Event) -> bool:
        return go_on.wait(60)

    async def give_up(work: BackgroundWork[bool]) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_await(work), 0.01)

    work = BackgroundWork(hold, None)
    asyncio.run(give_up(work))
    assert not work.done()
    go_on.set()
    assert work.result(60)


async def _await(work: BackgroundWork[bool]) -> bool:
    return await work


def test_ctrl_c_interrupts_a_wait() -> None:
    go_on = threading.Event()

    def hold(progress: object, stop: threading.Event) -> bool:
        return go_on.wait(60)

    work = BackgroundWork(hold, None)
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    # A shell may have started the tests with it ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            work.wait(60)
    finally:
        interrupt.join()
        signal.signal(signal.SIGINT, handler)
        go_on.set()
    assert work.result(60)


def test_work_of_any_kind() -> None:
    def count(progress: object, stop: threading.Event) -> int:
        return 3

    assert BackgroundWork(count, None).result() == 3
