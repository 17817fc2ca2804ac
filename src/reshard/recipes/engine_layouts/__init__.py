"""Layouts by engines: the destination of each checkpoint element, given by the engine's loader.

    pieces             regions of a parameter: copied, computed, constant, not filled
    patterns           those of one parameter without the names, shared by layers and ranks
    parameter_layout   one parameter of one rank: a pattern and the names of its sources
    engine_layout      all parameters of a rank, all ranks of an engine
    strided_regions    a strided region of a tensor, as indices along each dimension
    shard_parameters   parameters that are shards of tensors of their own names
    source_layouts     which rank holds which part of each source
    name_columns       many thousand names as patterns and columns of numbers
    document           an engine's layout as JSON, and back
    layout_file        files with such a document
    layout_differences where an engine's layouts and a recipe's differ
    engines            engines whose layouts can be derived

Start at `engine_layout`. `reshard.torch.trace_loading` makes the layout of a rank.
"""

from reshard.recipes.engine_layouts.engine_layout import EngineLayout, RankLayout, SourceTensor
from reshard.recipes.engine_layouts.parameter_layout import (
    Computed,
    Constant,
    ParameterLayout,
    SourcePiece,
)

__all__ = [
    "Computed",
    "Constant",
    "EngineLayout",
    "ParameterLayout",
    "RankLayout",
    "SourcePiece",
    "SourceTensor",
]
