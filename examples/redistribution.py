"""Tensors get other layouts between the ranks of a running job.

Run it on four ranks: torchrun --nproc-per-node=4 examples/redistribution.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import reshard
from reshard.torch import redistribute


def to_another_mesh(tensor: DTensor) -> DTensor:
    """From four row shards to blocks on a 2 x 2 mesh, which DTensor refuses."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return redistribute(tensor, (square, [Shard(0), Shard(1)]))


def to_other_ranks(whole: torch.Tensor) -> torch.Tensor | None:
    """From ranks 0 and 1 to ranks 2 and 3."""
    rank = dist.get_rank()
    trainer, engine = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    if rank < 2:
        rows = DTensor.from_local(whole.chunk(2)[rank], trainer, [Shard(0)])
        redistribute(rows, (engine, [Shard(1)]))
        return None
    columns = redistribute(None, (engine, [Shard(1)]))
    return columns.to_local()


def to_a_layout_of_no_mesh(tensor: DTensor, shape: torch.Size) -> torch.Tensor:
    """Ranges of the flattened tensor, as ZeRO has them, into memory that exists."""
    ranges = {0: (0, 10), 1: (10, 20), 2: (20, 90), 3: (90, 96)}
    ragged = reshard.Layout.flat_ranges(shape, ranges)
    local_shape = ragged.local_shape(dist.get_rank())
    buffer = torch.zeros(local_shape)
    redistribute(tensor, ragged, out=buffer)
    return buffer


def in_the_background(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    """Something else is done meanwhile; the tensor must not change before `wait`."""
    begun = redistribute(tensor, (mesh, [Replicate()]), async_op=True)
    everywhere = begun.wait()
    assert begun.received_bytes == tensor.numel() * 4 * 3 // 4
    return everywhere


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(8.0 * 12).reshape(8, 12)
    mesh = init_device_mesh("cpu", (ranks,))
    tensor = DTensor.from_local(whole.chunk(ranks)[rank], mesh, [Shard(0)])
    block = whole.chunk(2)[rank // 2].chunk(2, dim=1)[rank % 2]
    assert torch.equal(to_another_mesh(tensor).to_local(), block)
    columns = to_other_ranks(whole)
    assert columns is None or torch.equal(columns, whole.chunk(2, dim=1)[rank - 2])
    buffer = to_a_layout_of_no_mesh(tensor, whole.shape)
    start, stop = [(0, 10), (10, 20), (20, 90), (90, 96)][rank]
    assert torch.equal(buffer.reshape(-1), whole.reshape(-1)[start:stop])
    assert torch.equal(in_the_background(tensor, mesh).to_local(), whole)
    if rank == 0:
        print("every tensor arrived", flush=True)


if __name__ == "__main__":
    main()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
