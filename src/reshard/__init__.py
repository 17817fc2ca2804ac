"""reshard: describe how tensors are laid out, plan the cheapest movement, and run it.

>>> import reshard
>>> mesh = reshard.DeviceMesh.of(dp=2, tp=2)
>>> source = reshard.spec(mesh, "dp tp, -").layout((8, 4))
>>> target = reshard.spec(mesh, "dp, tp").layout((8, 4))
>>> reshard.plan(source, target).moved_elements
16
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.dtypes import dtype
from reshard.errors import ReshardError
from reshard.later_names import load_later
from reshard.layout import Box, Layout
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.sharding_text import spec

if TYPE_CHECKING:
    from reshard import checkpoint
    from reshard.binding import Binding, FileRange, RankMemory, TensorName, View
    from reshard.collectives.search.find_program import find_program
    from reshard.notation.objects import sharding_of
    from reshard.notation.registry import read_sharding, write_sharding
    from reshard.plans.documents.serialization import from_json, to_json
    from reshard.plans.hosts.staged_job import StagedJob
    from reshard.plans.job import Job
    from reshard.plans.job_item import JobItem
    from reshard.plans.plan import Plan, plan
    from reshard.plans.relabelling import relabel
    from reshard.show.pictures.text_picture import change_picture, picture
    from reshard.topology import Link, Topology

__version__ = "0.1.0"

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

# So that importing reshard stays quick.
__getattr__, __dir__ = load_later(
    __name__,
    {
        "Binding": "reshard.binding",
        "FileRange": "reshard.binding",
        "Job": "reshard.plans.job",
        "JobItem": "reshard.plans.job_item",
        "Link": "reshard.topology",
        "Plan": "reshard.plans.plan",
        "RankMemory": "reshard.binding",
        "StagedJob": "reshard.plans.hosts.staged_job",
        "TensorName": "reshard.binding",
        "Topology": "reshard.topology",
        "View": "reshard.binding",
        "checkpoint": "reshard.checkpoint",
        "change_picture": "reshard.show.pictures.text_picture",
        "find_program": "reshard.collectives.search.find_program",
        "from_json": "reshard.plans.documents.serialization",
        "picture": "reshard.show.pictures.text_picture",
        "plan": "reshard.plans.plan",
        "read_sharding": "reshard.notation.registry",
        "relabel": "reshard.plans.relabelling",
        "sharding_of": "reshard.notation.objects",
        "to_json": "reshard.plans.documents.serialization",
        "write_sharding": "reshard.notation.registry",
    },
)
