"""How are contributions of a partial tensor combined, on any device and for any dtype?

On the CPU by the same code as in one process (`reshard.execution.arrays`), so both give the
same bits; elsewhere by torch, in the dtype itself or, where torch cannot compute in it, in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from reshard.errors import ShardError
from reshard.execution.arrays import TorchTensors
from reshard.execution.local import finish_contributions
from reshard.planning.plan import Plan

_OPERATIONS = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def combine(reduction: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Put the combination of both, of equal shape and dtype, into `target`."""
    if target.device.type == "cpu":
        kind = TorchTensors(target)
        storage = kind.storage(target)
        storage[...] = kind.combine(reduction, storage, kind.storage(source))
        return
    wide = _computed_in(target.dtype)
    target.copy_(_OPERATIONS[reduction](target.to(wide), source.to(wide)))


def complete(plan: Plan, cells: Mapping[int, torch.Tensor]) -> None:
    """Scale the means in a rank's target cells, and fill those that combine nothing.

    Raises ShardError for a contribution to be filled on another device than the CPU.
    """
    if not cells or (plan.scale == (1, 1) and all(plan.combines)):
        return
    example = next(iter(cells.values()))
    if example.device.type == "cpu":
        kind = TorchTensors(example)
        storages = {cell: kind.storage(tensor) for cell, tensor in cells.items()}
        finish_contributions(plan, kind, storages)
        return
    numerator, denominator = plan.scale
    for cell, tensor in cells.items():
        if not plan.combines[int(plan.target.cell_contribution[cell])]:
            raise ShardError(
                f"a contribution that combines nothing on {tensor.device}; reshard to partial "
                "layouts on the CPU"
            )
        if numerator != denominator:
            wide = _computed_in(tensor.dtype)
            tensor.copy_(tensor.to(wide) * numerator / denominator)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    if dtype == torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.itemsize == 1 and dtype.is_floating_point else dtype
