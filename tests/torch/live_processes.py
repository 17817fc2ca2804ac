"""The ranks of a job as real processes, that end in time whatever happens to them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


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


def run_ranks(script: str, ranks: int, *arguments: object, timeout_s: float = 120) -> list[Ended]:
    """Run a script of this folder as the ranks of a gloo job, and wait for all of them.

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
    command = [sys.executable, str(Path(__file__).parent / script), *map(str, arguments)]
    running = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs: list[str] = []
    deadline_s = time.monotonic() + timeout_s
    hung: list[int] = []
    try:
        for rank, process in enumerate(running):
            try:
                left_s = max(deadline_s - time.monotonic(), 0.1)
                outputs.append(process.communicate(timeout=left_s)[0])
            except subprocess.TimeoutExpired:
                hung.append(rank)
                process.kill()
                outputs.append(process.communicate()[0])
    finally:
        for process in running:
            process.kill()
    if hung:
        told = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(outputs))
        raise TimeoutError(f"ranks {hung} did not end within {timeout_s} s\n{told}")
    return [
        Ended(process.returncode, output) for process, output in zip(running, outputs, strict=True)
    ]


def expect_all_end_well(ended: list[Ended]) -> None:
    """Fail with what the ranks wrote, where one of them failed."""
    told = "\n".join(f"--- rank {rank}\n{one.output}" for rank, one in enumerate(ended))
    assert [one.code for one in ended] == [0] * len(ended), told
