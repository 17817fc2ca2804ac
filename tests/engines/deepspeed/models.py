"""Small models whose gradients are the same on every number of ranks.

The loss is the sum of every parameter times coefficients that are small fractions of powers of
two, so gradients are exact in 16 bits, and so are their sums over ranks: what an optimizer does
with them is equal bit for bit however many ranks there are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

KINDS = ("plain", "groups", "tied", "frozen")


class Product(nn.Module):
    """Adds its parameters times coefficients of a step."""

    def __init__(self, *shape: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(shape[:1])) if bias else None

    def forward(self, total: Tensor, step: Tensor) -> Tensor:
        for number, parameter in enumerate(self.parameters(recurse=False)):
            total = total + (parameter * coefficients(parameter.shape, step, number)).sum()
        return total


def coefficients(shape: torch.Size, step: Tensor, number: int) -> Tensor:
    """Multiples of 1/16 between -1 and 1 that differ by element and step."""
    at = torch.arange(shape.numel()).view(shape)
    return (((at * 7 + int(step) * 5 + number * 3) % 31) - 15).to(step.dtype) / 16


class Sums(nn.Module):
    """Parameters of shapes that no number of ranks divides; tied, frozen and buffers as asked."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = Product(13, 6, bias=False)
        self.layers = nn.ModuleList([Product(9, 5), Product(3, 5, 7), Product(11, bias=False)])
        self.scale = Product(1, bias=False)
        self.head = Product(13, 6, bias=False)
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "frozen":
            self.layers[0].requires_grad_(False)
            self.scale.requires_grad_(False)
        if kind != "groups":
            self.register_buffer("seen", torch.tensor([3, 1, 4]))
            self.register_buffer("running", torch.tensor([0.5, 0.25]))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, step: Tensor) -> Tensor:
        total = step.new_zeros(())
        for module in (self.embed, *self.layers, self.scale, self.head):
            total = module(total, step)
        return total


def parameter_groups(model: nn.Module, kind: str) -> list[dict[str, object]]:
    """One group; for `groups`, one with and one without weight decay, and one of its own rate."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if kind != "groups":
        return [{"params": [p for _, p in named]}]
    own = [p for n, p in named if n.startswith("head")]
    decayed = [p for n, p in named if p.ndim > 1 and not n.startswith("head")]
    others = [p for n, p in named if p.ndim <= 1]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
        {"params": own, "weight_decay": 0.0, "lr": 0.03},
    ]
