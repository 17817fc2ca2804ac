"""Ranks of DeepSpeed as real processes, over gloo on this machine."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from live_job import become_rank
from live_processes import free_port

ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "DS_BUILD_OPS": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}


def run_ranks(
    function: Callable[..., None], ranks: int, folder: Path, *arguments: Any, timeout_s: float = 240
) -> None:
    """Run `function(rank, *arguments)` as every rank of a job; what they print goes to `folder`.

    They are forks of this process, so that DeepSpeed is imported once. Raises RuntimeError with
    what a rank printed where one of them fails or hangs.
    """
    os.environ.update(ENVIRONMENT)
    import deepspeed

    # Its own collectives would be compiled when a job starts, behind a lock in the home folder that
    # a rank which is killed leaves for good. Ranks speak over gloo without them.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    folder.mkdir(parents=True, exist_ok=True)
    fork = multiprocessing.get_context("fork")
    port = free_port()
    processes = [
        fork.Process(target=_be_rank, args=(function, rank, ranks, port, folder, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    end_s = time.monotonic() + timeout_s
    # A rank that failed leaves the others waiting for it.
    while any(process.is_alive() for process in processes) and time.monotonic() < end_s:
        if any(process.exitcode not in (None, 0) for process in processes):
            time.sleep(1)
            break
        time.sleep(0.02)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    if failed:
        told = "\n".join(
            f"--- rank {rank}\n{(folder / f'output{rank}').read_text()[-3000:]}" for rank in failed
        )
        raise RuntimeError(f"ranks {failed} of {ranks} failed\n{told}")


def _be_rank(
    function: Callable[..., None],
    rank: int,
    ranks: int,
    port: int,
    folder: Path,
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}

    def run() -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        function(rank, *arguments)

    become_rank(rank, folder, run)
