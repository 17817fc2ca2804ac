"""Recipes and strategies: from the names of a model's tensors to their layouts.

    recipe, rules, recipe_file           a recipe, its rules, and the TOML file that holds them
    expressions                          numbers and conditions of config.json in rules
    coupling                             shards that an operator needs together
    shipped/, library                    the recipes that come with reshard, a file each
    assignment                           rules and a mesh give every tensor a layout
    axis_mapping, layer_placement        its parts: mesh axes, and the ranks of layers and experts
    adapters                             low-rank adapters, sharded as their base weights
    naming                               names of other programs, and fused parameters
    quantization, quantized_sharding     stored tensors of quantised weights, sharded together
    strategies                           layouts without rules: whole tensors in turn, by size
    resharding                           strategies that also run their plans on arrays
    rank_order, overrides                the order of ranks; errors that a user may accept
    engine_layouts/                      the layouts that loaders of engines give a checkpoint

Start at `recipe` and `assignment`. To add a recipe, add a file to `shipped/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard.recipes.assignment import Assignment, assign
    from reshard.recipes.engine_layouts import (
        Computed,
        Constant,
        EngineLayout,
        ParameterLayout,
        RankLayout,
        SourcePiece,
        SourceTensor,
    )
    from reshard.recipes.engine_layouts.engines import derive_layout, register_engine
    from reshard.recipes.library import choose_recipe, load_recipe, shipped_recipes
    from reshard.recipes.recipe import Recipe
    from reshard.recipes.resharding import (
        ReshardingPlan,
        ReshardingResult,
        ReshardingStrategy,
        TensorMetadata,
        create_strategy,
    )
    from reshard.recipes.rules import Rule
    from reshard.recipes.strategies import Strategy, register_strategy, strategy, strategy_names

__all__ = [
    "Assignment",
    "Computed",
    "Constant",
    "EngineLayout",
    "ParameterLayout",
    "RankLayout",
    "Recipe",
    "ReshardingPlan",
    "ReshardingResult",
    "ReshardingStrategy",
    "Rule",
    "SourcePiece",
    "SourceTensor",
    "Strategy",
    "TensorMetadata",
    "assign",
    "choose_recipe",
    "create_strategy",
    "derive_layout",
    "load_recipe",
    "register_engine",
    "register_strategy",
    "shipped_recipes",
    "strategy",
    "strategy_names",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "reshard.recipes.assignment": ["assign", "Assignment"],
        "reshard.recipes.engine_layouts": [
            "Computed",
            "Constant",
            "EngineLayout",
            "ParameterLayout",
            "RankLayout",
            "SourcePiece",
            "SourceTensor",
        ],
        "reshard.recipes.engine_layouts.engines": ["derive_layout", "register_engine"],
        "reshard.recipes.library": ["choose_recipe", "load_recipe", "shipped_recipes"],
        "reshard.recipes.recipe": ["Recipe"],
        "reshard.recipes.resharding": [
            "create_strategy",
            "ReshardingPlan",
            "ReshardingResult",
            "ReshardingStrategy",
            "TensorMetadata",
        ],
        "reshard.recipes.rules": ["Rule"],
        "reshard.recipes.strategies": [
            "register_strategy",
            "Strategy",
            "strategy",
            "strategy_names",
        ],
    },
)
