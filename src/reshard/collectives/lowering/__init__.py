"""Programs written as modules of other systems.

`LOWERINGS` maps the name of each system to a function that returns the text of a program there:
`mlir` (MLIR's `shard` dialect), `shardy` (XLA's partitioner) and `jax` (collectives under
`shard_map`). `shardings` has the shared part: the shardings that a program passes through,
rewritten over whole mesh axes, and the padded shards of uneven dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard.collectives.lowering.jax import jax_module
    from reshard.collectives.lowering.mlir import mlir_module
    from reshard.collectives.lowering.shardy import shardy_module
    from reshard.collectives.program import Program
    from reshard.dtypes import DType

    LOWERINGS: dict[str, Callable[[Program, DType | str], str]]
    """A function from a program and a dtype to text, by the name of the system that reads it."""

SYSTEMS = ("shardy", "jax", "mlir")
"""The names in `LOWERINGS`."""

WITHOUT_JOINT_STEPS = ("shardy", "mlir")
"""The systems without a joint all-to-all."""

__all__ = [
    "LOWERINGS",
    "SYSTEMS",
    "WITHOUT_JOINT_STEPS",
    "jax_module",
    "mlir_module",
    "shardy_module",
]

_load, __dir__ = attach(
    __name__,
    {f"reshard.collectives.lowering.{system}": [f"{system}_module"] for system in SYSTEMS},
)


def __getattr__(name: str) -> Any:
    if name != "LOWERINGS":
        return _load(name)
    lowerings = {system: _load(f"{system}_module") for system in SYSTEMS}
    globals()[name] = lowerings
    return lowerings
