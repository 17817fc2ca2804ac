"""A model of Megatron: the positions of its ranks, and the attributes of its parameters.

    ranks             the grids of ranks, from sizes or from live process groups
    names             names of tensors on a rank and in the whole model; layers of each stage
    parameters        the attributes of parameters, on one rank and gathered from all
    tensor_pairs      the same tensor in two models

Start at `parameters`. The same as text is `reshard.notation.megatron`.
"""

from reshard.megatron.names import LayerPlace, MegatronNames, PipelineLayers
from reshard.megatron.parameters import LocalParameter, MegatronParameter, gather_parameters
from reshard.megatron.ranks import MegatronGrids, MegatronRanks
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
