"""Configurations whose models have every parameter name of a model type.

Each is the model type's default configuration with few layers and experts, and what is set here
over it. A second one is for the names that come only with an option.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Keys of transformers' configurations that count layers and experts, and how many are enough.
FEWER = {
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "num_layers",
            "num_decoder_layers",
            "n_layer",
            "n_layers",
            "encoder_layers",
            "decoder_layers",
            "depth",
        ),
        4,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
}

_DECODER = {"is_decoder": True, "add_cross_attention": True}

# What is set over the default configuration, in one or more variants; dots for nested ones.
VARIANTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), ({}, _DECODER)),
    "ministral": ({"head_dim": 128},),
    "nemotron": ({"num_key_value_heads": 8, "head_dim": 128},),
    "t5": ({}, {"feed_forward_proj": "gated-gelu", "is_gated_act": True}),
    "umt5": ({}, {"feed_forward_proj": "gated-gelu", "is_gated_act": True}),
}


def variants(model_type: str) -> Iterator[Mapping[str, Any]]:
    """What is set over a model type's default configuration, once for each variant."""
    yield from VARIANTS.get(model_type, ({},))
