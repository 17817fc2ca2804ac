"""One rank of a job that trains as the example does, and goes on over other meshes."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    common = ["--tiny", "--dtype", "float64", "--every", "20", "--folder", sys.argv[1]]
    for mesh, zero, order, steps in (
        ("dp=4", "1", "", "80"),
        ("pp=2,dp=2", "2", "zb-v", "100"),
        ("dp=2,tp=2", "3", "", "180"),
        ("pp=2,tp=2", "0", "zb-h1", "200"),
    ):
        words = ["--mesh", mesh, "--zero", zero, "--order", order, "--steps", steps]
        run = train.train(train.read_arguments([*common, *words]))
        assert len(run.losses) == int(steps)
        # A process has the parameters of its stages.
        is_whole = len(run.parameters) == len(train.TINY.shapes())
        assert is_whole == (not order), (mesh, len(run.parameters))
    # Groups of processes have threads: as many as four meshes need, whatever number of arrays.
    assert len(list(Path("/proc/self/task").iterdir())) < 200
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
