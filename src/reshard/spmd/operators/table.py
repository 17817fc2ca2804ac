"""The families of operators that are not yet homes."""

from __future__ import annotations

from reshard.spmd.core.operator import register
from reshard.spmd.operators import (
    arrangement,
    creation,
    elementwise,
    indexing,
    linear_algebra,
    movement,
    ordering,
    products,
    reductions,
    windows,
)
from reshard.spmd.operators.networks import attention, layers, ring_attention

for _module in (
    elementwise,
    products,
    reductions,
    movement,
    arrangement,
    indexing,
    ordering,
    windows,
    layers,
    attention,
    ring_attention,
    linear_algebra,
    creation,
):
    for _operator in _module.OPERATORS:
        register(_operator)
