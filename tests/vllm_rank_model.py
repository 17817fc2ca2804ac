"""One rank of a model whose loader is written as vLLM's are, and what it loads."""

from __future__ import annotations

from collections.abc import Iterable

import torch

HIDDEN, WIDTH, VOCABULARY = 1024, 3072, 1000


class RankModel(torch.nn.Module):
    """One rank of two: fused rows, cut columns, a padded vocabulary, a computed parameter."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank = rank
        self.gate_up = torch.nn.Parameter(torch.empty(WIDTH, HIDDEN, dtype=dtype))
        self.down = torch.nn.Parameter(torch.empty(HIDDEN, WIDTH // 2, dtype=dtype))
        self.embedding = torch.nn.Parameter(torch.empty(VOCABULARY // 2 + 12, HIDDEN, dtype=dtype))
        self.A = torch.nn.Parameter(torch.empty(8))
        self.bias = torch.nn.Parameter(torch.empty(16, dtype=torch.float32))
        self.register_buffer("scale", torch.tensor(1.0))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            with torch.no_grad():
                if name in ("gate", "up"):
                    half = WIDTH // 2
                    target = self.gate_up.narrow(0, half * (name == "up"), half)
                    target.copy_(weight.narrow(0, half * self.rank, half))
                elif name == "down":
                    half = WIDTH // 2
                    self.down.copy_(weight.narrow(1, half * self.rank, half))
                elif name == "embedding":
                    half = VOCABULARY // 2
                    self.embedding[:half].copy_(weight[half * self.rank : half * (self.rank + 1)])
                    self.embedding[half:].fill_(0)
                elif name == "A_log":
                    self.A.copy_(-torch.exp(weight.float().narrow(0, 8 * self.rank, 8)))
                elif name == "bias":
                    self.bias.copy_(weight)


def make_weights() -> dict[str, torch.Tensor]:
    """What a checkpoint of both ranks has."""
    torch.manual_seed(0)
    shapes = {
        "gate": (WIDTH, HIDDEN),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
        "embedding": (VOCABULARY, HIDDEN),
        "A_log": (16,),
        "bias": (16,),
    }
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
