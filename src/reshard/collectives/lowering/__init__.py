"""Programs written for other systems: `LOWERINGS` by name.

lowerings          which there are
jax, mlir, shardy  a program as text of each system
shard_module       MLIR's `shard` dialect as values, whose text is what is written
shardings          the shardings that a program passes, over few meshes
whole_axes         meshes cut so that no axis is used in part
ceil_shards        shards by ceil, which all three systems have
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard.collectives.lowering.jax import jax_module
    from reshard.collectives.lowering.lowerings import LOWERINGS
    from reshard.collectives.lowering.mlir import mlir_module
    from reshard.collectives.lowering.shardy import shardy_module

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

__getattr__, __dir__ = attach(
    __name__,
    {
        "LOWERINGS": "reshard.collectives.lowering.lowerings",
        "jax_module": "reshard.collectives.lowering.jax",
        "mlir_module": "reshard.collectives.lowering.mlir",
        "shardy_module": "reshard.collectives.lowering.shardy",
    },
)
