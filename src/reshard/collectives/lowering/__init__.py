"""Programs written for other systems: `LOWERINGS` by name.

jax, mlir, shardy  a program as text of each system
shard_module       MLIR's `shard` dialect as values, whose text is what is written
shardings          the shardings that a program passes, over few meshes
whole_axes         meshes cut so that no axis is used in part
ceil_shards        shards by ceil, which all three systems have
"""

from collections.abc import Callable

from reshard.collectives.lowering.jax import jax_module
from reshard.collectives.lowering.mlir import mlir_module
from reshard.collectives.lowering.shardy import shardy_module
from reshard.collectives.program import Program
from reshard.dtypes import DType

LOWERINGS: dict[str, Callable[[Program, DType | str], str]] = {
    "shardy": shardy_module,
    "jax": jax_module,
    "mlir": mlir_module,
}
"""A program and the dtype of its elements to text, by the name of the system that reads it."""

WITHOUT_JOINT_STEPS = ("shardy", "mlir")
"""The systems without a joint all-to-all."""

__all__ = [
    "LOWERINGS",
    "WITHOUT_JOINT_STEPS",
    "jax_module",
    "mlir_module",
    "shardy_module",
]
