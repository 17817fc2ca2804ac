"""What a module or a state dict has by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from reshard.errors import UsageError

# What torch calls the state of a module that is no tensor.
_EXTRA_STATE = "_extra_state"
# What torch.compile calls the module inside the one that it gives.
_COMPILED = "_orig_mod."


def tensors_of(model: torch.nn.Module | Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors of a module, parameters and persistent buffers, or all that a state dict has.

    Raises:
        UsageError: neither of them.

    >>> [name for name, _ in tensors_of(torch.nn.Linear(2, 2))]
    ['weight', 'bias']
    """
    if isinstance(model, torch.nn.Module):
        state = {
            name.replace(_COMPILED, ""): value
            for name, value in model.state_dict(keep_vars=True).items()
        }
        return ((name, v) for name, v in state.items() if isinstance(v, torch.Tensor))
    if isinstance(model, Mapping):
        return ((name, v) for name, v in model.items() if not str(name).endswith(_EXTRA_STATE))
    raise UsageError(
        f"a model of type {type(model).__name__}; give a module, a state dict, "
        "{name: (tensor, Layout)}, a MegatronModel, or None"
    )
