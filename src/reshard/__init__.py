"""reshard: describe how tensors are laid out, plan the cheapest movement, and run it.

>>> import reshard
>>> mesh = reshard.DeviceMesh.of(dp=2, tp=2)
>>> source = reshard.spec(mesh, "dp tp, -").layout((8, 4))
>>> target = reshard.spec(mesh, "dp, tp").layout((8, 4))
>>> reshard.plan(source, target).moved_elements
16
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard import checkpoint
    from reshard.binding import Binding, FileRange, RankMemory, TensorName, View
    from reshard.collectives.search.find_program import find_program
    from reshard.dtypes import dtype
    from reshard.errors import ReshardError
    from reshard.layout import Box, Layout
    from reshard.mesh import Axis, DeviceMesh
    from reshard.notation.objects import sharding_of
    from reshard.notation.registry import read_sharding, write_sharding
    from reshard.plans.hierarchical import StagedJob
    from reshard.plans.job import Job, JobItem
    from reshard.plans.plan import Plan, plan
    from reshard.plans.rank_permutation import relabel
    from reshard.plans.serialization import from_json, to_json
    from reshard.sharding import DimSpec, Level, ShardingSpec, spec
    from reshard.show.text_picture import change_picture, picture
    from reshard.topology import Link, Topology

if sys.platform == "win32":
    raise ImportError(
        "reshard needs a POSIX system, Linux or macOS, and this is Windows: install it and run it "
        "in WSL, the Windows Subsystem for Linux"
    )

__version__ = "0.2.0"

__all__ = [
    "Axis",
    "Binding",
    "Box",
    "DeviceMesh",
    "DimSpec",
    "FileRange",
    "Job",
    "JobItem",
    "Layout",
    "Level",
    "Link",
    "Plan",
    "RankMemory",
    "ReshardError",
    "ShardingSpec",
    "StagedJob",
    "TensorName",
    "Topology",
    "View",
    "change_picture",
    "checkpoint",
    "dtype",
    "find_program",
    "from_json",
    "picture",
    "plan",
    "read_sharding",
    "relabel",
    "sharding_of",
    "spec",
    "to_json",
    "write_sharding",
]

# So that importing reshard stays quick, and a command's help needs no NumPy.
__getattr__, __dir__ = attach(
    __name__,
    {
        "reshard": ["checkpoint"],
        "reshard.binding": ["Binding", "FileRange", "RankMemory", "TensorName", "View"],
        "reshard.collectives.search.find_program": ["find_program"],
        "reshard.dtypes": ["dtype"],
        "reshard.errors": ["ReshardError"],
        "reshard.layout": ["Box", "Layout"],
        "reshard.mesh": ["Axis", "DeviceMesh"],
        "reshard.notation.objects": ["sharding_of"],
        "reshard.notation.registry": ["read_sharding", "write_sharding"],
        "reshard.plans.hierarchical": ["StagedJob"],
        "reshard.plans.job": ["Job", "JobItem"],
        "reshard.plans.plan": ["Plan", "plan"],
        "reshard.plans.rank_permutation": ["relabel"],
        "reshard.plans.serialization": ["from_json", "to_json"],
        "reshard.sharding": ["DimSpec", "Level", "ShardingSpec", "spec"],
        "reshard.show.text_picture": ["change_picture", "picture"],
        "reshard.topology": ["Link", "Topology"],
    },
)
