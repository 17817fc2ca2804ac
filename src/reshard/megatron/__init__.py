"""A model of Megatron: the places of its ranks, and the attributes of its parameters.

    ranks, groups     the grids of ranks, from sizes or from live process groups
    layers            the layers of each pipeline stage
    names             a rank's own names of tensors, and those of the whole model
    parameters        what a parameter's attributes say: cut, stride, blocks, experts
    rosters           the parameters of all ranks, gathered
    tensor_pairs      the same tensor in two models

Start at `parameters`. The text notation of the same is `reshard.notation.megatron`.
"""

from reshard.megatron.groups import MegatronGrids
from reshard.megatron.layers import LayerPlace, PipelineLayers
from reshard.megatron.names import MegatronNames
from reshard.megatron.parameters import MegatronParameter
from reshard.megatron.ranks import MegatronRanks
from reshard.megatron.rosters import LocalParameter, gather_parameters
from reshard.megatron.tensor_pairs import reconcile, reconcile_all

__all__ = [
    "LayerPlace",
    "LocalParameter",
    "MegatronGrids",
    "MegatronNames",
    "MegatronParameter",
    "MegatronRanks",
    "PipelineLayers",
    "gather_parameters",
    "reconcile",
    "reconcile_all",
]
