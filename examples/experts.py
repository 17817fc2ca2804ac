"""A layer of experts that are spread over ranks: each token visits the expert that it chose.

`torchrun --nproc-per-node=2 examples/experts.py` runs it, and compares it, gradients too, with
one process that has all experts.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from reshard.torch import PartitionedTensor

EXPERTS, WIDTH = 5, 8


def through_experts(
    tokens: torch.Tensor, choice: torch.Tensor, weights: dict[int, torch.Tensor], mesh: DeviceMesh
) -> torch.Tensor:
    """What the experts make of this rank's tokens; `choice` is each token's expert."""
    order = choice.argsort(stable=True)
    counts = choice.bincount(minlength=EXPERTS)
    sorted_tokens = PartitionedTensor.of_splits(tokens[order], counts, mesh)
    at_experts = sorted_tokens.to_aligned()
    made = [part @ weights[expert] for expert, part in at_experts.partitions.items()]
    returned = at_experts.with_local(torch.cat([at_experts.local[:0], *made])).to_unaligned()
    return torch.zeros_like(returned.local).index_copy(0, order, returned.local)


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    every = torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64)
    # Each rank has other tokens, and not as many as the next.
    torch.manual_seed(rank + 1)
    tokens = torch.randn(6 + 3 * rank, WIDTH, dtype=torch.float64)
    choice = torch.randint(EXPERTS, (len(tokens),))

    own = -(-EXPERTS // ranks)
    weights = {e: every[e] for e in range(EXPERTS) if e // own == rank}
    moving = tokens.clone().requires_grad_()
    result = through_experts(moving, choice, weights, mesh)
    result.square().sum().backward()

    alone = tokens.clone().requires_grad_()
    expected = torch.einsum("tw,twv->tv", alone, every[choice])
    expected.square().sum().backward()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(moving.grad, alone.grad)
    print(f"rank {rank}: {len(tokens)} tokens went to their experts and back")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
