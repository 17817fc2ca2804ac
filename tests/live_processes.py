"""The ranks of a job as real processes, that end in time whatever happens to them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Ended:
    """How one rank ended. `code` is negative where a signal ended it."""

    code: int
    output: str


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


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
        command = [TESTS / "live_job.py", folder, ranks, TESTS / "torch" / script, *arguments]
        # A session of its own: the job and its ranks can be ended together.
        with (folder / "job").open("w") as told_by_job:
            job = subprocess.Popen(
                [sys.executable, *map(str, command)],
                env=environment,
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=told_by_job,
            )
        hangs = False
        try:
            job.wait(timeout_s)
        except subprocess.TimeoutExpired:
            hangs = True
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        files = [folder / f"output{rank}" for rank in range(ranks)]
        outputs = [path.read_text() if path.exists() else "" for path in files]
        told = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(outputs))
        if hangs:
            raise TimeoutError(f"the job did not end within {timeout_s} s\n{told}")
        if job.returncode:
            raise RuntimeError(f"the job did not start: {(folder / 'job').read_text()}")
        codes = json.loads((folder / "codes").read_text())
    return [Ended(code, output) for code, output in zip(codes, outputs, strict=True)]


def expect_all_end_well(ended: list[Ended]) -> None:
    """Fail with what the ranks wrote, where one of them failed."""
    told = "\n".join(f"--- rank {rank}\n{one.output}" for rank, one in enumerate(ended))
    assert [one.code for one in ended] == [0] * len(ended), told
