"""Run a benchmark again as the ranks of a job on this machine, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NoReturn


def is_rank() -> bool:
    """Whether this process is a rank already."""
    return "RANK" in os.environ


def run_as_ranks(ranks: int) -> NoReturn:
    """Run this program with its arguments as gloo ranks, and end as they end."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    raise SystemExit(
        subprocess.run([sys.executable, *command, *sys.argv], env=environment).returncode
    )
