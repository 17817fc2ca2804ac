"""One rank of a job that trains as the example does, and goes on over other meshes.

Arguments: the folder of checkpoints; the number of steps, a multiple of ten.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train

from rank_cases import reported


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    folder, tenth = sys.argv[1], int(sys.argv[2]) // 10
    common = ["--tiny", "--dtype", "float64", "--every", str(tenth), "--folder", folder]
    for mesh, zero, order, tenths in (
        ("dp=4", "1", "", 4),
        ("pp=2,dp=2", "2", "zb-v", 5),
        ("dp=2,tp=2", "3", "", 9),
        ("pp=2,tp=2", "0", "zb-h1", 10),
    ):
        with reported(f"training reaches {tenths} tenths of its steps on {mesh}"):
            steps = str(tenths * tenth)
            words = ["--mesh", mesh, "--zero", zero, "--order", order, "--steps", steps]
            run = train.train(train.read_arguments([*common, *words]))
            assert len(run.losses) == int(steps)
            # A process has the parameters of its stages.
            is_whole = len(run.parameters) == len(train.TINY.shapes())
            assert is_whole == (not order), (mesh, len(run.parameters))
    with reported("groups of processes have few threads"):
        # Groups of processes have threads: as many as four meshes need, whatever number of arrays.
        assert len(list(Path("/proc/self/task").iterdir())) < 200
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
