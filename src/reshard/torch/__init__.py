"""PyTorch tensors: DTensors as layouts, tensors moved between ranks and loaded from checkpoints.

This package imports torch, so it is only for programs that have it.
"""

from reshard.notation.objects import sharding_of
from reshard.torch.endpoint import layout_of, rank_of
from reshard.torch.exchange.consistency import is_usable
from reshard.torch.exchange.packing.copies import keep_memory
from reshard.torch.host_links import measure_links
from reshard.torch.links.link import WeightLink, connect
from reshard.torch.links.sync import SyncReport, WeightSync
from reshard.torch.loaders.module_layouts import module_layouts
from reshard.torch.loaders.tracing import trace_loading
from reshard.torch.models.model_inputs import MegatronModel, by_recipe
from reshard.torch.models.naming import renamed
from reshard.torch.partitioned_tensor import PartitionedTensor
from reshard.torch.redistribution import Redistribution, RedistributionOptions, redistribute
from reshard.torch.refitting.options import RefitOptions
from reshard.torch.refitting.refit import Refit, refit
from reshard.torch.refitting.reshard_plan import (
    ReshardPlan,
    build_centralized_reshard_plan,
    build_local_reshard_plan,
    execute_reshard_plan,
)
from reshard.torch.refitting.transforms import BlockQuantized, Cast, Transform
from reshard.torch.storage.loading import LoadReport, load
from reshard.torch.storage.reader import StorageReader
from reshard.torch.storage.writer import StorageWriter

__all__ = [
    "BlockQuantized",
    "Cast",
    "LoadReport",
    "MegatronModel",
    "PartitionedTensor",
    "Redistribution",
    "RedistributionOptions",
    "Refit",
    "RefitOptions",
    "ReshardPlan",
    "StorageReader",
    "StorageWriter",
    "SyncReport",
    "Transform",
    "WeightLink",
    "WeightSync",
    "build_centralized_reshard_plan",
    "build_local_reshard_plan",
    "by_recipe",
    "connect",
    "execute_reshard_plan",
    "is_usable",
    "keep_memory",
    "layout_of",
    "load",
    "measure_links",
    "module_layouts",
    "rank_of",
    "redistribute",
    "refit",
    "renamed",
    "sharding_of",
    "trace_loading",
]
