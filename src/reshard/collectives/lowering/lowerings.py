"""The systems that programs can be written for."""

from __future__ import annotations

from collections.abc import Callable

from reshard.collectives.lowering import SYSTEMS
from reshard.collectives.lowering.jax import jax_module
from reshard.collectives.lowering.mlir import mlir_module
from reshard.collectives.lowering.shardy import shardy_module
from reshard.collectives.program import Program
from reshard.dtypes import DType

LOWERINGS: dict[str, Callable[[Program, DType | str], str]] = dict(
    zip(SYSTEMS, (shardy_module, jax_module, mlir_module), strict=True)
)
"""A program and the dtype of its elements to text, by the name of the system that reads it."""
