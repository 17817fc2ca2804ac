"""The ranks of a job as real processes, that end in time whatever happens to them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Ended:
    """How one rank ended. `code` is negative where a signal ended it."""

    code: int
    output: str

    def cases(self, result: str) -> list[str]:
        """Return the cases that this rank reports to have `"ended"` or `"failed"`."""
        start = f'{{"{result}": '
        lines = self.output.splitlines()
        return [json.loads(line)[result] for line in lines if line.startswith(start)]


running_item: Any = None
"""The item of pytest that runs; failing cases of its ranks are reported as items of it."""


def free_port() -> int:
    """A port of this machine that nobody listens on.

    The system gives ports from 32768 on to whoever asks for any, such as gloo: one of those could
    be somebody's before it is used.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a rank of a job on this machine finds in its environment."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def run_rank_programs(
    command: Sequence[object],
    ranks: int,
    environment: Mapping[str, str] | None = None,
    *,
    timeout_s: float = 400,
) -> list[str]:
    """What the ranks of a job print, each of which runs a command in a process of its own.

    Raises RuntimeError, with what ranks printed, where one of them fails.

    Raises TimeoutError where one of them hangs. None of them is left.
    """
    port = free_port()
    end_s = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as name:
        outputs = [Path(name) / str(rank) for rank in range(ranks)]
        processes = []
        try:
            for rank, output in enumerate(outputs):
                with output.open("wb") as file:
                    processes.append(
                        subprocess.Popen(
                            [str(word) for word in command],
                            env={
                                **os.environ,
                                **rank_variables(rank, ranks, port),
                                **(environment or {}),
                            },
                            stdout=file,
                            stderr=subprocess.STDOUT,
                        )
                    )
            # A rank that failed leaves the others waiting for it.
            while any(one.poll() is None for one in processes) and time.monotonic() < end_s:
                if any(one.returncode for one in processes):
                    time.sleep(1)
                    break
                time.sleep(0.05)
            left = [rank for rank, one in enumerate(processes) if one.poll() is None]
            codes = [one.poll() for one in processes]
        finally:
            for one in processes:
                one.kill()
                one.wait()
        texts = [output.read_text(errors="replace") for output in outputs]
        told = "\n".join(f"--- rank {n}\n{text[-4000:]}" for n, text in enumerate(texts))
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}\n{told}")
    if left:
        raise TimeoutError(f"ranks {left} did not end within {timeout_s} s\n{told}")
    return texts


class Jobs:
    """The process that forks jobs, from outside: `live_job.py`, started once for all of them."""

    processor_time_s = 0.0
    """What the jobs that have ended took, ranks included, in all."""

    def __init__(self) -> None:
        # A session of its own: a ctrl-C ends the tests, whose end this process sees.
        self._process = subprocess.Popen(
            [sys.executable, TESTS / "live_job.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        atexit.register(self.close)

    def run(self, order: dict[str, Any], timeout_s: float) -> int | None:
        """Run an order and return how the job ended, or None where it had to be ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        job = self._read_number()
        is_ended = False
        try:
            is_ended = bool(select.select([self._process.stdout], [], [], timeout_s)[0])
        finally:
            if not is_ended:
                os.killpg(job, signal.SIGKILL)
            code = self._read_number()
            self.processor_time_s += self._read_number() / 1000
        return code if is_ended else None

    def close(self) -> None:
        self._process.communicate()

    def _read_number(self) -> int:
        # Byte by byte: what a buffer has already read cannot be waited for.
        assert self._process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._process.stdout.fileno(), 1)
            if not byte:
                raise RuntimeError(f"live_job.py ended with code {self._process.wait()}")
            line += byte
        return int(line)


jobs = functools.cache(Jobs)


def jobs_processor_time_s() -> float:
    """Return the processor time of the jobs that this process has run and that have ended."""
    return jobs().processor_time_s if jobs.cache_info().currsize else 0.0


def run_ranks(script: str, ranks: int, *arguments: object, timeout_s: float = 180) -> list[Ended]:
    """Run a script of `tests/torch` as the ranks of a gloo job, and wait for all of them.

    The ranks are forks of one process that has imported torch, so that many of them start fast.
    Raises TimeoutError, with what every rank wrote, where one of them hangs.
    """
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        order = {
            "folder": name,
            "ranks": ranks,
            "script": str(TESTS / "torch" / script),
            "arguments": [str(argument) for argument in arguments],
            "environment": environment,
        }
        code = jobs().run(order, timeout_s)
        files = [folder / f"output{rank}" for rank in range(ranks)]
        outputs = [path.read_text() if path.exists() else "" for path in files]
        told = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(outputs))
        if code is None:
            raise TimeoutError(f"the job did not end within {timeout_s} s\n{told}")
        if code:
            raise RuntimeError(f"the job did not start: {(folder / 'job').read_text()}")
        codes = json.loads((folder / "codes").read_text())
    return [Ended(*rank) for rank in zip(codes, outputs, strict=True)]


def expect_all_end_well(ended: list[Ended]) -> None:
    """Fail with what the ranks wrote, where one of them failed.

    Cases that ranks report (`rank_cases.reported`) are shown as items: those that ended on all
    ranks, in order, and those that failed on any.
    """
    first, *others = ([*dict.fromkeys(rank.cases("ended"))] for rank in ended)
    for case in first:
        if all(case in cases for cases in others):
            with subtest(case):
                pass
    outputs = "\n".join(f"--- rank {n}\n{rank.output}" for n, rank in enumerate(ended))
    failed = dict.fromkeys(case for rank in ended for case in rank.cases("failed"))
    for case in failed:
        with subtest(case):
            raise AssertionError(outputs)
    message = f"ranks failed in {', '.join(failed)}" if failed else outputs
    assert [rank.code for rank in ended] == [0] * len(ended), message


def subtest(name: str) -> AbstractContextManager[None, bool | None]:
    """Return a context whose failure pytest reports as an item of this name, and goes on.

    Before pytest 9, the failure is that of the test.
    """
    try:
        subtests = running_item._request.getfixturevalue("subtests")
    except (AttributeError, LookupError):
        return contextlib.nullcontext()
    context: AbstractContextManager[None, bool | None] = subtests.test(name)
    return context
