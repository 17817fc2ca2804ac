"""The geometry of a change of layouts: which elements move, for a shape and two layouts.

Start at `layout_change`: `LayoutChange(source, target)` is the core that plans, jobs, collectives
and checkpoints share. It knows no dtype, runner, cost or picture. In the order of the computation:

regions       boxes of a tensor and the locations of their elements; parts of them, merged again
boxes         many boxes as columns, and runs, that intersect
strided_overlap  where the values of a region come from that was written through other regions
holders       the slots that hold each element of the source
overlap       the indices that target parts and cells take from each holder
routes        which source cell feeds which target cell
transfers     routes expanded to boxes, and adjacent boxes coalesced
volumes       the fewest elements that must move
verification  transfers checked against the two layouts
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard.geometry.layout_change import LayoutChange
    from reshard.geometry.transfers import Transfers

__all__ = ["LayoutChange", "Transfers"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "reshard.geometry.layout_change": ["LayoutChange"],
        "reshard.geometry.transfers": ["Transfers"],
    },
)
