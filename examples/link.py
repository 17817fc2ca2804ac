"""Weights from a trainer to an inference engine that is a job of its own, after every step.

Start both, in any order; each has its own ranks, from 0::

    torchrun --nproc-per-node=2 --master-port=29500 examples/link.py trainer tcp://127.0.0.1:29400
    torchrun --nproc-per-node=2 --master-port=29501 examples/link.py engine tcp://127.0.0.1:29400

The trainer is FSDP2 in float32; the engine has the model tensor parallel, in bfloat16. After every
step the engine says what it predicts. When the trainer ends, so does the engine.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from reshard.errors import LinkError
from reshard.torch import connect

STEPS, VOCABULARY, WIDTH = 3, 48, 16


class Model(torch.nn.Module):
    """A language model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.down(torch.relu(self.up(hidden))))


def train(url: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = fully_shard(Model(), mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with connect(url, "trainer", rank=rank, ranks=ranks) as link:
        sync = link.prepare(model, cast=True)
        for step in range(STEPS):
            torch.manual_seed(step)
            tokens = torch.randint(VOCABULARY, (8, 12))
            loss = torch.nn.functional.cross_entropy(
                model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = sync.run(step)
            with torch.no_grad():
                tell("trainer", step, model(torch.arange(4)[None]))
            if rank == 0:
                print(f"{report.sent_bytes} bytes to {list(report.engines)}", flush=True)


def serve(url: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (ranks,))
    model = parallelize_module(Model().to(torch.bfloat16), mesh, plan)
    with connect(url, "engine", rank=rank, ranks=ranks) as link:
        sync = link.prepare(model)
        while True:
            try:
                sync.run()
            except LinkError as ended:
                print(f"engine: {ended}", flush=True)
                return
            with torch.no_grad():
                tell("engine", sync.version, model(torch.arange(4)[None]))


def tell(side: str, version: int, logits: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        print(f"{side} {version}: {logits.argmax(-1).flatten().tolist()}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    side, url = sys.argv[1:]
    (train if side == "trainer" else serve)(url)
    dist.destroy_process_group()
    os._exit(0)
