"""Execution in this process: an engine that copies, combines and fills arrays.

It takes columns of copies between the cells of two layouts, whatever they come from: `plans.run`
makes them for plans and jobs, `collectives` for programs.

engine  the steps of a run for each tensor; start here
copies  the columns, as NumPy copies that threads share
memory  the arrays that are read and written, checked before anything is copied
arrays  arrays of NumPy, torch and JAX as memory, and the arithmetic of contributions
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard.execution.arrays import check_reduction, combine, identity, missing_bytes, scale
    from reshard.execution.engine import element_positions

__all__ = [
    "check_reduction",
    "combine",
    "element_positions",
    "identity",
    "missing_bytes",
    "scale",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "reshard.execution.arrays": [
            "check_reduction",
            "combine",
            "identity",
            "missing_bytes",
            "scale",
        ],
        "reshard.execution.engine": ["element_positions"],
    },
)
