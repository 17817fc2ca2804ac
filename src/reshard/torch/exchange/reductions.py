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
from reshard.geometry.layout_change import LayoutChange
from reshard.torch.exchange.messages import cut

# How much of a tensor is computed at once: what that needs beside it stays small, at most 15
# times this for elements of a byte, that are computed in float32.
_AT_ONCE_BYTES = 1 << 18
_OPERATIONS = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def combine(reduction: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Put the combination of both, of equal shape and dtype, into `target`."""
    parts = zip(cut(target, _AT_ONCE_BYTES), cut(source, _AT_ONCE_BYTES), strict=True)
    for into, part in parts:
        if target.device.type == "cpu":
            kind = TorchTensors(into)
            storage = kind.storage(into)
            storage[...] = kind.combine(reduction, storage, kind.storage(part))
        else:
            wide = _computed_in(target.dtype)
            into.copy_(_OPERATIONS[reduction](into.to(wide), part.to(wide)))


def complete(plan: LayoutChange, cells: Mapping[int, torch.Tensor]) -> None:
    """Scale the means in a rank's target cells, and fill those that combine nothing.

    Raises ShardError for a contribution to be filled on another device than the CPU.
    """
    numerator, denominator = plan.scale
    for cell, tensor in cells.items():
        if not plan.combines[int(plan.target.cell_contribution[cell])]:
            _fill(plan, cell, tensor)
        elif numerator != denominator:
            for part in cut(tensor, _AT_ONCE_BYTES):
                _scale(part, numerator, denominator)


def _fill(plan: LayoutChange, cell: int, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ShardError(
            f"a contribution that combines nothing on {tensor.device}; reshard to partial layouts "
            "on the CPU"
        )
    kind = TorchTensors(tensor)
    finish_contributions(plan, kind, {cell: kind.storage(tensor)})


def _scale(tensor: torch.Tensor, numerator: int, denominator: int) -> None:
    if tensor.device.type == "cpu":
        kind = TorchTensors(tensor)
        storage = kind.storage(tensor)
        storage[...] = kind.scale(storage, numerator, denominator)
        return
    wide = _computed_in(tensor.dtype)
    tensor.copy_(tensor.to(wide) * numerator / denominator)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    if dtype == torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.itemsize == 1 and dtype.is_floating_point else dtype
