"""Weights from a trainer to an inference engine that runs beside it, after every step.

`torchrun --nproc-per-node=4 examples/refit.py` trains with FSDP2 on ranks 0 and 1, in float32. The
engine has the model on ranks 2 and 3, tensor parallel, in bfloat16. After every step the engine's
logits are compared with the trainer's.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from reshard.torch import Refit

STEPS, VOCABULARY, WIDTH = 3, 48, 16
TRAINERS, ENGINES = [0, 1], [2, 3]


class Model(torch.nn.Module):
    """A language model of one layer, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.down(torch.relu(self.up(hidden))))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # A mesh has process groups: all ranks make it, also those that are not in it.
    training, serving = (DeviceMesh("cpu", ranks) for ranks in (TRAINERS, ENGINES))
    torch.manual_seed(rank)
    trainer = engine = None
    if rank in TRAINERS:
        trainer = fully_shard(Model(), mesh=training)
        optimizer = torch.optim.Adam(trainer.parameters(), lr=0.01)
    else:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        engine = parallelize_module(Model().to(torch.bfloat16), serving, plan)

    refit = Refit.prepare(
        trainer,
        engine,
        ties={"head.weight": "embed.weight"},
        cast=True,
    )
    for step in range(STEPS):
        torch.manual_seed(step)
        tokens = torch.randint(VOCABULARY, (8, 12))
        if trainer is not None:
            loss = torch.nn.functional.cross_entropy(
                trainer(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        refit.run()
        compare(trainer, engine, tokens, step)
    print(
        f"rank {rank}: {refit.sent_bytes} bytes out, {refit.received_bytes} in, each time",
        flush=True,
    )
    dist.destroy_process_group()


def compare(
    trainer: torch.nn.Module | None, engine: torch.nn.Module | None, tokens: torch.Tensor, step: int
) -> None:
    """The engine says what the trainer says, as far as bfloat16 goes."""
    with torch.no_grad():
        logits = (trainer if trainer is not None else engine)(tokens).float()
    told = logits.clone()
    dist.broadcast(told, TRAINERS[0])
    difference = float((logits - told).abs().max() / told.abs().max())
    assert difference < 0.05, f"step {step}: off by {difference:.3f}"
    if engine is not None:
        weights = engine.state_dict()
        assert torch.equal(weights["head.weight"], weights["embed.weight"])


if __name__ == "__main__":
    main()
    os._exit(0)
