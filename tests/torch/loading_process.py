"""One process of a job: fill DTensors from several checkpoints, and compare with the original.

Arguments: the folder with the original model, then the folders to load from.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import reshard.torch
from rank_cases import reported


def load(folder: str, mesh: DeviceMesh, whole: dict[str, torch.Tensor]) -> None:
    """Load columns of all tensors, and compare them with those of the whole."""
    expected: dict[str, DTensor] = {
        name: distribute_tensor(value, mesh, [Shard(value.ndim - 1)], src_data_rank=None)
        for name, value in whole.items()
    }
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    saved = {name: (value._version, value.to_local()._version) for name, value in state.items()}
    reshard.torch.load(folder, state)
    for name, value in state.items():
        if not torch.equal(value.to_local(), expected[name].to_local()):
            raise SystemExit(f"{name} differs on rank {dist.get_rank()}")
        # Autograd has to detect that values it saved were overwritten.
        versions = value._version, value.to_local()._version
        if not all(after > before for after, before in zip(versions, saved[name], strict=True)):
            raise SystemExit(f"{name} has the versions {versions} of before")


def main(original: str, *folders: str) -> None:
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = load_file(Path(original) / "model.safetensors")
        for folder in folders:
            with reported(f"the ranks load {Path(folder).name}"):
                load(folder, mesh, whole)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
