"""One rank of a job that computes what networks are made of, on shards one a process."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import reshard.spmd as sp
from reshard import DeviceMesh
from spmd.network_cases import CASES

MESHES = {2: DeviceMesh.of(x=2), 4: DeviceMesh.of(x=2, y=2, devices=[2, 0, 3, 1])}
SHARDINGS = {2: 2, 4: 2}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = MESHES[dist.get_world_size()]
    with sp.running(sp.over_processes()):
        for case in CASES:
            for given in case.shardings(mesh, SHARDINGS[mesh.size]):
                try:
                    case.check(given, mesh)
                except BaseException as error:
                    raise RuntimeError(f"{case.name} of {' and '.join(map(str, given))}") from error
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
