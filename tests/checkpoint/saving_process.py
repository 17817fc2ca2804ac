"""One of two ranks that save the tensors of a file as torch writes safetensors.

Arguments: the file, a folder to be written with one file a rank, one with two files a rank.
"""

import sys
import warnings

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def main(source: str, *targets: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    cuts = {"w": [Shard(0)], "h": [Shard(1)], "b": [Shard(0)], "i": [Replicate()]}
    state = {
        name: distribute_tensor(value, mesh, cuts[name]) if name in cuts else value
        for name, value in load_file(source).items()
    }
    mapping = {name: 1 + number % 2 for number, name in enumerate(sorted(state))}
    for target, files in zip(targets, [None, mapping], strict=True):
        writer = dcp.HuggingFaceStorageWriter(target, files, save_distributed=True)
        dcp.save(state, storage_writer=writer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
