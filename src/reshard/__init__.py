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
from reshard.plans.job import Job, JobItem
from reshard.plans.plan import Plan, plan
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.sharding_text import spec

if TYPE_CHECKING:
    from reshard import checkpoint
    from reshard.plans.hosts.staged_job import StagedJob
    from reshard.plans.relabelling import relabel
    from reshard.plans.schedule.batches import batches
    from reshard.plans.schedule.rounds import message_rounds
    from reshard.topology import Link, Topology

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
    "Link",
    "Plan",
    "ReshardError",
    "ShardingSpec",
    "StagedJob",
    "Topology",
    "batches",
    "checkpoint",
    "message_rounds",
    "plan",
    "relabel",
    "spec",
]

# Loaded when they are first used, so that importing reshard stays quick.
_LOADED_LATER = {
    "Link": "reshard.topology",
    "StagedJob": "reshard.plans.hosts.staged_job",
    "Topology": "reshard.topology",
    "batches": "reshard.plans.schedule.batches",
    "message_rounds": "reshard.plans.schedule.rounds",
    "relabel": "reshard.plans.relabelling",
}


def __getattr__(name: str) -> Any:
    """Load a part of the package when it is first used."""
    if name == "checkpoint":
        return import_module("reshard.checkpoint")
    if name in _LOADED_LATER:
        return getattr(import_module(_LOADED_LATER[name]), name)
    raise AttributeError(f"module 'reshard' has no attribute {name!r}")
