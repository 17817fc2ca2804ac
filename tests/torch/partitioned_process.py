"""One rank of a job: partitioned tensors, converted every way, against the dense tensor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from reshard.torch.partitioned_tensor import PartitionedTensor

EXAMPLE = ((4, 6, 4, 2), (2, 4, 8, 2))


def proposal() -> None:
    """The proposal's example, step by step."""
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    whole = torch.arange(32)
    pieces = torch.split(whole, [4, 2, 6, 4, 4, 8, 2, 2])
    local = torch.cat(pieces[rank::2])
    tensor = PartitionedTensor.of_splits(local, EXAMPLE[rank], mesh)
    aligned = tensor.to_aligned()
    assert aligned.splits == ((4, 2, 6, 4), (4, 8, 2, 2))[rank]
    assert torch.equal(aligned.local, whole[16 * rank :][:16])
    assert aligned.received_bytes == 6 * 8
    back = aligned.to_unaligned()
    assert torch.equal(back.local, local) and back.splits == EXAMPLE[rank]
    assert torch.equal(tensor.to_replicated().to_local(), whole)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_world_size() == 2:
        proposal()
    dist.barrier()
    dist.destroy_process_group()
