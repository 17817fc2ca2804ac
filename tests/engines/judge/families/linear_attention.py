"""Linear attention (gated delta rule) in turn with attention."""

from __future__ import annotations

from typing import Any

from ..experts import share_experts
from ..family import EXPERTS, Family
from .state_space import Shapes, fill_unvisited, find_shape, tiny


def arrange(rank: Any) -> None:
    """The convolution's weights are used without calling it; experts are shared."""
    fill_unvisited(rank)
    share_experts(rank, "*.mlp.experts")


def arrange_lfm2(rank: Any) -> None:
    fill_unvisited(rank)
    share_experts(rank, "*.feed_forward.experts")


LFM2 = {
    "num_attention_heads": ("*self_attn.q_proj.weight", 0),
    "num_key_value_heads": ("*self_attn.k_proj.weight", 0),
    "vocab_size": ("*embed_tokens.weight", 0),
}
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

PLAN_GATHERS = {
    "*.linear_attn.*": "the plan gathers what linear attention's layers answer; here it stays cut"
}


def count_key_heads(shapes: Shapes, whole: Any) -> int:
    """The key heads that a rank has: of queries and keys, which are in front of the values."""
    values = find_shape(shapes, ".linear_attn.out_proj.weight")[1]
    keys = find_shape(shapes, ".linear_attn.conv1d.weight")[0] - values
    return int(keys // 2 // whole.linear_key_head_dim)


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
        differs=PLAN_GATHERS,
    ),
    Family(
        name="qwen3_5_text",
        config={
            **tiny("qwen3_5_text", num_attention_heads=12, num_key_value_heads=4, head_dim=8),
            **LINEAR,
            "num_hidden_layers": 4,
            "intermediate_size": 37,
        },
        variants=(
            {
                **MORE_LINEAR,
                "num_attention_heads": 15,
                "num_key_value_heads": 5,
                "tie_word_embeddings": True,
            },
            {"num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 8},
            {"num_key_value_heads": 1},
        ),
        local={
            **LOCAL,
            "linear_num_key_heads": count_key_heads,
            "intermediate_size": ("*layers.1.mlp.up_proj.weight", 0),
        },
        prepare=fill_unvisited,
        differs=PLAN_GATHERS,
    ),
    Family(
        name="qwen3_5_moe_text",
        config={
            **tiny("qwen3_5_moe_text", num_attention_heads=12, num_key_value_heads=4, head_dim=8),
            **LINEAR,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 11,
            "shared_expert_intermediate_size": 13,
            "num_experts": 7,
            "num_experts_per_tok": 3,
        },
        variants=(
            {"num_key_value_heads": 1, "linear_num_key_heads": 2},
            {"num_key_value_heads": 1},
        ),
        local={**LOCAL, **EXPERT_SIZES, "linear_num_key_heads": count_key_heads},
        whole={"num_experts": ("*.mlp.gate",)},
        parallelisms=EXPERTS,
        prepare=arrange,
        differs=PLAN_GATHERS,
    ),
    Family(
        # transformers saves the Hub's three convolutions right only where they are equally long.
        name="olmo_hybrid",
        config={
            **tiny("olmo_hybrid", num_attention_heads=12, num_key_value_heads=4, hidden_size=48),
            "linear_num_key_heads": 12,
            "linear_num_value_heads": 12,
            "linear_key_head_dim": 5,
            "linear_value_head_dim": 5,
            "num_hidden_layers": 4,
            "intermediate_size": 37,
        },
        variants=(
            {
                **MORE_LINEAR,
                "hidden_size": 30,
                "num_attention_heads": 15,
                "num_key_value_heads": 5,
            },
            {"num_key_value_heads": 1, "linear_allow_neg_eigval": False},
        ),
        local={
            **LOCAL,
            "head_dim": lambda shapes, whole: whole.hidden_size // whole.num_attention_heads,
            "linear_num_key_heads": ("*linear_attn.q_proj.weight", 0),
            "intermediate_size": ("*layers.1.mlp.up_proj.weight", 0),
        },
        wide_norms=("*.self_attn.[qk]_norm",),
        prepare=fill_unvisited,
        differs={
            "*_norm.weight": "the plan gathers queries and keys; here their norms are cut",
            "*.linear_attn.*": "the plan leaves linear attention whole",
        },
    ),
    Family(
        name="lfm2",
        config={
            **tiny("lfm2", num_attention_heads=12, num_key_value_heads=4, hidden_size=60),
            "head_dim": 6,
            "num_hidden_layers": 4,
            "intermediate_size": 37,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
        },
        variants=(
            {"num_attention_heads": 15, "num_key_value_heads": 5, "conv_bias": True},
            {"num_key_value_heads": 1, "tie_word_embeddings": True},
        ),
        local={**LFM2, "intermediate_size": ("*layers.0.feed_forward.w1.weight", 0)},
        sized_by_shard=("*.conv.*",),
        prepare=fill_unvisited,
        differs={"*": "transformers has no plan for it"},
    ),
    Family(
        name="lfm2_moe",
        config={
            **tiny("lfm2_moe", num_attention_heads=12, num_key_value_heads=4, hidden_size=60),
            "head_dim": 6,
            "num_hidden_layers": 4,
            "intermediate_size": 37,
            "moe_intermediate_size": 11,
            "num_dense_layers": 1,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
        },
        variants=(
            {"num_attention_heads": 15, "num_key_value_heads": 5},
            {"num_key_value_heads": 1},
        ),
        local={
            **LFM2,
            "intermediate_size": ("*layers.0.feed_forward.w1.weight", 0),
            "moe_intermediate_size": ("*feed_forward.experts.down_proj", 2),
            "num_experts": ("*feed_forward.experts.down_proj", 0),
        },
        whole={"num_experts": ("*.feed_forward.gate",)},
        sized_by_shard=("*.conv.*", "*.expert_bias"),
        parallelisms=EXPERTS,
        prepare=arrange_lfm2,
        differs={
            "*.conv.*": "the plan cuts experts only",
            "*.self_attn.*": "the plan cuts experts only",
            "*.feed_forward.w?.weight": "the plan cuts experts only",
        },
    ),
]
