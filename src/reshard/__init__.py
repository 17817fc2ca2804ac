"""reshard: describe how tensors are laid out, plan the cheapest movement, and run it.

>>> import reshard
>>> mesh = reshard.DeviceMesh.of(dp=2, tp=2)
>>> source = reshard.spec(mesh, "dp tp, -").layout((8, 4))
>>> target = reshard.spec(mesh, "dp, tp").layout((8, 4))
>>> reshard.plan(source, target).moved_elements
16
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.errors import ReshardError
from reshard.layout import Box, Layout
from reshard.mesh import Axis, DeviceMesh
from reshard.planning.job import Job, JobItem
from reshard.planning.plan import Plan, plan
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.sharding_text import spec

if TYPE_CHECKING:
    from reshard import checkpoint

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "Box",
    "DeviceMesh",
    "DimSpec",
    "Job",
    "JobItem",
    "Layout",
    "Level",
    "Plan",
    "ReshardError",
    "ShardingSpec",
    "checkpoint",
    "plan",
    "spec",
]


def __getattr__(name: str) -> Any:
    """Load `reshard.checkpoint` when it is first used, so that importing reshard stays quick."""
    if name == "checkpoint":
        return import_module("reshard.checkpoint")
    raise AttributeError(f"module 'reshard' has no attribute {name!r}")
