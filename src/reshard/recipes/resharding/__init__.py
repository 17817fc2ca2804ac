"""Strategies of whole checkpoints in memory: N ranks' arrays become M ranks' arrays.

strategies          the strategies, and how they are found: start here
redistributions     a job as a list of slices by tensor and rank, and what a run gives
run                 one run in one process: checks, copies, cancellation
"""

from reshard.recipes.resharding.redistributions import ReshardingPlan, ReshardingResult
from reshard.recipes.resharding.strategies import (
    ReshardingStrategy,
    TensorMetadata,
    create_strategy,
)

__all__ = [
    "ReshardingPlan",
    "ReshardingResult",
    "ReshardingStrategy",
    "TensorMetadata",
    "create_strategy",
]
