"""Linear attention (gated delta rule) in turn with attention."""

from __future__ import annotations

from typing import Any

from ..experts import share_experts
from ..family import EXPERTS, Family
from .state_space import fill_unvisited, tiny


def arrange(rank: Any) -> None:
    """The convolution's weights are used without calling it; experts are shared."""
    fill_unvisited(rank)
    share_experts(rank, "*.mlp.experts")


LINEAR = {
    "linear_num_key_heads": 12,
    "linear_num_value_heads": 24,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}
MORE_LINEAR = {"linear_num_key_heads": 15, "linear_num_value_heads": 15}
LOCAL = {
    "num_attention_heads": ("*self_attn.q_proj.weight", 0),
    "num_key_value_heads": ("*self_attn.k_proj.weight", 0),
    "linear_num_value_heads": ("*linear_attn.A_log", 0),
    "vocab_size": ("*embed_tokens.weight", 0),
}
EXPERT_SIZES = {
    "moe_intermediate_size": ("*mlp.experts.down_proj", 2),
    "shared_expert_intermediate_size": ("*shared_expert.up_proj.weight", 0),
    "num_experts": ("*mlp.experts.down_proj", 0),
}

FAMILIES = [
    Family(
        name="qwen3_next",
        config={
            **tiny("qwen3_next", num_attention_heads=12, num_key_value_heads=4, head_dim=8),
            **LINEAR,
            "num_hidden_layers": 4,
            "intermediate_size": 37,
            "moe_intermediate_size": 11,
            "shared_expert_intermediate_size": 13,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
        },
        variants=(
            {
                **MORE_LINEAR,
                "num_attention_heads": 15,
                "num_key_value_heads": 5,
                "tie_word_embeddings": True,
            },
            {"num_key_value_heads": 1, "attention_bias": True},
        ),
        local={
            **LOCAL,
            **EXPERT_SIZES,
            "linear_num_key_heads": ("*linear_attn.in_proj_qkvz.weight", 0),
            "intermediate_size": ("*layers.1.mlp.up_proj.weight", 0),
        },
        whole={"num_experts": ("*.mlp.gate",)},
        parallelisms=EXPERTS,
        prepare=arrange,
    ),
]
