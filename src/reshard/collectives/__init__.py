"""Programs of collectives between two shardings: found, checked, estimated, run.

search      `find_program`, start here
program     what it finds: steps, one after another
steps       what each collective does, and in which groups
estimates   seconds of steps on a topology; `step_table` prints both
choice      a program or the direct exchange, for one tensor; `division` for many
lowering    programs written for other systems
"""

from reshard.collectives.choice import Choice, choose
from reshard.collectives.division import Division, divide
from reshard.collectives.lowering import LOWERINGS, jax_module, mlir_module, shardy_module
from reshard.collectives.program import Program
from reshard.collectives.search.find_program import SEARCHES, STEPS, find_program
from reshard.collectives.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    JointAllToAll,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)

__all__ = [
    "LOWERINGS",
    "SEARCHES",
    "STEPS",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Choice",
    "Division",
    "Exchange",
    "JointAllToAll",
    "Permute",
    "Program",
    "ReduceScatter",
    "Slice",
    "Step",
    "choose",
    "divide",
    "find_program",
    "jax_module",
    "mlir_module",
    "shardy_module",
]
