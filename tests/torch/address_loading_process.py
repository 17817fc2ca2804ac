"""One of two ranks that load a model from an address at the same time, and share what both need.

By vLLM's load format, by `reshard.torch.load`, and by PyTorch's own load.

Arguments: the folder with the model, its address, and the type of the ranks' parameters.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard.torch
from rank_cases import reported
from reshard.torch.vllm import plugin
from vllm_rank_model import RankModel


def main(folder: str, url: str, dtype: str) -> None:
    dist.init_process_group("gloo")
    weights = load_file(Path(folder) / "model.safetensors")
    with reported("a rank of vLLM is loaded"):
        # Several rounds of what is not read in place.
        plugin.STAGED_BYTES = 4 << 20
        right, model = (RankModel(dist.get_rank(), getattr(torch, dtype)) for _ in range(2))
        right.load_weights(weights.items())
        report = plugin.load_rank(model, url, group=dist.group.WORLD)
        for name, tensor in right.state_dict().items():
            if not torch.equal(model.state_dict()[name], tensor):
                raise SystemExit(f"{name} differs on rank {dist.get_rank()}")
        sys.stdout.write(f"asked {report.read_bytes}\n")
    with reported("a module without loaders is loaded on both ranks"):
        state = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        reshard.torch.load(url, state, readers_on_host=2)
        for name, tensor in weights.items():
            if not torch.equal(state[name], tensor):
                raise SystemExit(f"{name} differs on rank {dist.get_rank()}")
    with reported("columns are loaded by the loader of PyTorch"):
        mesh = init_device_mesh("cpu", (2,))
        columns = {
            name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(1)])
            for name, tensor in weights.items()
            if tensor.ndim > 1
        }
        with warnings.catch_warnings(action="ignore"):
            dcp.load(columns, storage_reader=reshard.torch.StorageReader(url, readers_on_host=2))
        for name, tensor in columns.items():
            if not torch.equal(tensor.full_tensor(), weights[name]):
                raise SystemExit(f"{name} differs on rank {dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
