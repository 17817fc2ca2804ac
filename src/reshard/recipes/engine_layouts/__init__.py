"""Layouts by engines: the destination of each checkpoint element, given by the engine's loader.

    parameter_layout   a parameter of a rank: regions of its sources, computed and constant parts
    engine_layout      all parameters of a rank, all ranks of an engine
    source_layouts     which rank holds which part of each source
    document           an engine's layout as JSON, and back; files with such a document
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
