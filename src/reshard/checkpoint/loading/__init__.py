"""Loading arrays of checkpoints on disk, and checkpoints of arrays in memory.

`arrays` fills one rank's arrays of any layout; `request` finds the layouts by a mesh and rules, a
recipe or a strategy; `rank_arrays` describes the arrays of ranks as a checkpoint; `background`
loads and converts while the program goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard.checkpoint.loading.rank_arrays import hold_arrays

__all__ = ["hold_arrays"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "reshard.checkpoint.loading.rank_arrays": ["hold_arrays"],
    },
)
