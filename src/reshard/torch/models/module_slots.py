"""Slots of modules: whether a module still has the tensors with which it was listed.

A refit reads and writes the tensors that a module had when it was prepared. Code that puts another
parameter in the place of one, such as `module.weight = torch.nn.Parameter(...)`, leaves it with one
that nobody computes with any more. So before each run the slots are compared.

DTensors are left out: FSDP2 puts whole parameters in their places while it computes, and them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reshard.torch.models.given_models import MegatronModel, Model, chunks_of


@dataclass(frozen=True, slots=True, eq=False)
class ModuleSlots:
    """Slots: the table of a submodule, the name in it, the tensor that was there, its whole name.

    >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> slots = ModuleSlots.of(module, module.parameters())
    >>> slots.find_replaced()
    ''
    >>> module[0].bias = torch.nn.Parameter(torch.zeros(2))
    >>> slots.find_replaced()
    '0.bias'
    """

    slots: tuple[tuple[dict[str, Any], str, torch.Tensor, str], ...] = ()

    @classmethod
    def of(cls, model: Model, used: Iterable[torch.Tensor]) -> ModuleSlots:
        """Those of tensors of a model that are used; none where the model is no module."""
        if isinstance(model, MegatronModel):
            modules = chunks_of(model)
        elif isinstance(model, torch.nn.Module):
            modules = [model]
        else:
            return cls()
        chosen = {id(tensor) for tensor in used if not isinstance(tensor, DTensor)}
        return cls(
            tuple(
                (table, key, tensor, f"{path}.{key}" if path else key)
                for module in modules
                for path, part in module.named_modules()
                for table in (part._parameters, part._buffers)
                for key, tensor in table.items()
                if tensor is not None and id(tensor) in chosen
            )
        )

    def find_replaced(self) -> str:
        """The name of the first slot that has another tensor; empty where none has."""
        for table, key, tensor, name in self.slots:
            if table.get(key) is not tensor:
                return name
        return ""
