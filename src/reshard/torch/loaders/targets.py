"""The parameters that a loader fills, before and after it runs.

A loader may write to a parameter, replace its storage (`param.data = loaded`) or replace the
parameter. Parameters are therefore looked up by name after it ran, and the changes are reverted
before it runs again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from reshard.errors import RunError, UsageError


class LoaderTargets:
    """The parameters and persistent buffers of a module, or the tensors of a dict.

    Raises UsageError for anything else, or if there are none.
    """

    def __init__(self, targets: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        if not isinstance(targets, torch.nn.Module | Mapping):
            raise UsageError(
                f"targets of {type(targets).__name__}; give the module that is loaded, or a dict "
                "of its tensors by name"
            )
        self.targets = targets
        for name, tensor in self.named().items():
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                raise UsageError(f"the target {name!r} is {tensor!r:.80}; give a dense tensor")
        if not self.named():
            raise UsageError("targets without a parameter; give the module that is loaded")

    def named(self) -> dict[str, torch.Tensor]:
        """Return the current tensors by name; shared tensors under each of their names."""
        if isinstance(self.targets, Mapping):
            return dict(self.targets)
        tensors: dict[str, torch.Tensor] = {}
        for prefix, module in self.targets.named_modules(remove_duplicate=False):
            entries = {**module._parameters}
            entries.update(
                (name, buffer)
                for name, buffer in module._buffers.items()
                if name not in module._non_persistent_buffers_set
            )
            for name, tensor in entries.items():
                if tensor is not None:
                    tensors[f"{prefix}.{name}" if prefix else name] = tensor
        return tensors

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore storages, parameters and attributes of modules on exit."""
        tensors = [(tensor, tensor.detach()) for tensor in self.named().values()]
        modules = list(self.targets.modules()) if isinstance(self.targets, torch.nn.Module) else []
        before = [
            (module, {k: _copy_table(v) for k, v in vars(module).items()}) for module in modules
        ]
        table = dict(self.targets) if isinstance(self.targets, dict) else None
        try:
            yield
        finally:
            for module, attributes in before:
                vars(module).clear()
                vars(module).update(attributes)
            if table is not None and isinstance(self.targets, dict):
                self.targets.clear()
                self.targets.update(table)
            for tensor, memory in tensors:
                if tensor.untyped_storage()._cdata != memory.untyped_storage()._cdata:
                    tensor.data = memory

    @contextmanager
    def in_memory(self, carrier: Any, value: float) -> Iterator[None]:
        """Replace each tensor by a CPU tensor filled with `value`, of dtype `carrier(dtype)`.

        The objects and their attributes stay, since loaders identify parameters by them.
        """
        storages: dict[int, torch.Tensor] = {}
        swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for name, tensor in self.named().items():
                if any(tensor is done for done, _ in swapped):
                    continue
                replacement = _make_alike(tensor, storages, carrier, value)
                if weakref.getweakrefs(tensor):
                    raise RunError(
                        f"the values of {name!r} cannot be traced: something refers to it weakly; "
                        "trace the model before it is compiled or wrapped"
                    )
                try:
                    torch.utils.swap_tensors(tensor, replacement)
                except RuntimeError as error:
                    raise RunError(
                        f"the values of {name!r} cannot be traced: {error}; give tensors without "
                        "other views (`detach()` makes one)"
                    ) from error
                swapped.append((tensor, replacement))
            yield
        finally:
            for tensor, replacement in swapped:
                torch.utils.swap_tensors(tensor, replacement)


def _copy_table(value: Any) -> Any:
    """Copy a module's tables of parameters and modules."""
    return value.copy() if isinstance(value, dict | set) else value


def _make_alike(
    tensor: torch.Tensor, storages: dict[int, torch.Tensor], carrier: Any, value: float
) -> torch.Tensor:
    """Return a CPU tensor with the strides and attributes of `tensor`; memory stays shared."""
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        size = storage.nbytes() // tensor.dtype.itemsize
        storages[storage._cdata] = torch.full((size,), value, dtype=carrier(tensor.dtype))
    flat = storages[storage._cdata]
    alike = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    if isinstance(tensor, torch.nn.Parameter):
        # Integer parameters cannot require gradients.
        needs = tensor.requires_grad and alike.is_floating_point()
        alike = torch.Tensor._make_subclass(type(tensor), alike, needs)
    vars(alike).update(vars(tensor))
    return alike
