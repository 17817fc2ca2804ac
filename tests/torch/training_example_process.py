"""One rank of a job that trains as the example does: begun over dp, resumed over dp and tp."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train

import reshard.spmd as sp


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    common = ["--tiny", "--dtype", "float64", "--every", "50", "--folder", sys.argv[1]]
    with sp.running(sp.over_processes()):
        for mesh, zero, steps in (("dp=4", "1", "100"), ("dp=2,tp=2", "3", "200")):
            words = ["--mesh", mesh, "--zero", zero, "--steps", steps]
            run = train.train(train.read_arguments([*common, *words]))
            assert len(run.losses) == int(steps)
        # Groups of processes have threads: as many as two meshes need, whatever number of arrays.
        assert len(list(Path("/proc/self/task").iterdir())) < 200
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
