"""A module that holds parameters by name, and whose loss has the gradients that are asked for.

With it a recorded step is taken again, without the model that had the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


class HeldParameters(torch.nn.Module):
    """The parameters of one module, by the last part of their names."""

    def forward(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        own = dict(self.named_parameters(recurse=False))
        return sum((own[key] * value).sum() for key, value in gradients.items())


class HeldModel(torch.nn.Module):
    """All of a model's parameters, under names such as `decoder.layers.0.mlp.linear_fc1.weight`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, HeldParameters())
                module = module.get_submodule(part)
            module.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A loss whose derivative by each parameter is the gradient given for it."""
        modules: dict[str, dict[str, torch.Tensor]] = {}
        for name, gradient in gradients.items():
            path, _, last = name.rpartition(".")
            modules.setdefault(path, {})[last] = gradient
        return sum(self.get_submodule(path)(own) for path, own in modules.items())


def make_adamw(model: torch.nn.Module, names: Iterable[Iterable[str]]) -> torch.optim.AdamW:
    """AdamW with groups of parameters of these names, whose rates are those of no training."""
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in own]} for own in names]
    return torch.optim.AdamW(groups, lr=1.0, weight_decay=0.5, betas=(0.1, 0.2))
