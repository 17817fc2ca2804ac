"""One of two ranks that save with torch, convert with reshard, and load with torch.

Argument: the folder of the checkpoint; the converted one lies beside it.
"""

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from reshard import checkpoint


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.arange(77.0).reshape(11, 7)
    dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)]), "lr": 0.5}, checkpoint_id=folder)
    made = folder + "-made"
    if dist.get_rank() == 0:
        checkpoint.convert(folder, made, to="tp=3", rules=["w=-, tp"], format="torch-dcp")
    dist.barrier()
    expected = distribute_tensor(whole, mesh, [Shard(1)])
    state = {"w": distribute_tensor(torch.zeros(11, 7), mesh, [Shard(1)]), "lr": None}
    dcp.load(state, checkpoint_id=made)
    assert torch.equal(state["w"].to_local(), expected.to_local())
    assert state["lr"] == 0.5
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
