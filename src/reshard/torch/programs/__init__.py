"""Programs of collectives between ranks: their choice (`methods`) and their execution.

`phases` derives a rank's part in each step, and the memory of its shards in between. `run` executes
a program for a redistribution, by the exchange of messages. A refit runs the same phases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard.torch.programs.run import PreparedMovement, agreed_sequence

__all__ = ["PreparedMovement", "agreed_sequence"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "reshard.torch.programs.run": ["agreed_sequence", "PreparedMovement"],
    },
)
