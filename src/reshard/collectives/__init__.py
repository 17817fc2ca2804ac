"""Programs of collectives between two shardings: found, verified, estimated and run.

search      `find_program`, start here
program     the steps from a sharding to another, in sequence
steps       the effect of each collective, and its groups of ranks
estimates   the seconds of steps on a topology
choice      a program or the direct exchange, for a tensor (`choose`) or many (`divide`)
lowering    programs as modules of MLIR, Shardy and JAX
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard.collectives.choice import Choice, Division, choose, divide
    from reshard.collectives.lowering import LOWERINGS, jax_module, mlir_module, shardy_module
    from reshard.collectives.program import Program
    from reshard.collectives.search.find_program import SEARCHES, find_program
    from reshard.collectives.search.states import STEPS
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

__getattr__, __dir__ = attach(
    __name__,
    {
        "reshard.collectives.choice": ["Choice", "choose", "divide", "Division"],
        "reshard.collectives.lowering": ["jax_module", "LOWERINGS", "mlir_module", "shardy_module"],
        "reshard.collectives.program": ["Program"],
        "reshard.collectives.search.find_program": ["find_program", "SEARCHES"],
        "reshard.collectives.search.states": ["STEPS"],
        "reshard.collectives.steps": [
            "AllGather",
            "AllReduce",
            "AllToAll",
            "Exchange",
            "JointAllToAll",
            "Permute",
            "ReduceScatter",
            "Slice",
            "Step",
        ],
    },
)
