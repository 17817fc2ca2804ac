"""Language models with linear attention that see: Qwen 3.5 with its vision tower."""

from __future__ import annotations

from typing import Any

from ..experts import share_experts
from ..family import DENSE, EXPERTS, Family
from ..heads import in_turn, share_width
from .linear_attention import LINEAR, PLAN_GATHERS, count_key_heads
from .state_space import fill_unvisited
from .vision_language import (
    DIFFERS,
    GRID,
    MORE_HEADS,
    QWEN_3_TOWER,
    ROPE,
    TEXT_HEADS_LOCAL,
    VISUAL_HEADS,
    WHOLE_TOWER,
    make_grids,
    text,
)

TEXT = text(
    head_dim=8,
    rope_parameters={**ROPE, "partial_rotary_factor": 0.75},
    **LINEAR,
)
MORE = {
    **MORE_HEADS,
    "text_config.linear_num_key_heads": 15,
    "text_config.linear_num_value_heads": 15,
}
FEW = {"text_config.num_key_value_heads": 1}
LOCAL = {
    **TEXT_HEADS_LOCAL,
    "text_config.num_attention_heads": ("*language_model.layers.3.self_attn.q_proj.weight", 0),
    "text_config.num_key_value_heads": ("*language_model.layers.3.self_attn.k_proj.weight", 0),
    "text_config.linear_num_value_heads": ("*linear_attn.A_log", 0),
    "text_config.linear_num_key_heads": lambda shapes, whole: count_key_heads(
        shapes, whole.text_config
    ),
    "vision_config.intermediate_size": ("*visual.blocks.0.mlp.linear_fc1.weight", 0),
}
TOWER = in_turn(
    fill_unvisited, VISUAL_HEADS, share_width("*visual.merger.linear_fc1", "linear_fc2")
)


def arrange(rank: Any) -> None:
    """The tower, and the experts of the language model."""
    TOWER(rank)
    share_experts(rank, "*.mlp.experts")


FAMILIES = [
    Family(
        name="qwen3_5",
        config={
            "model_type": "qwen3_5",
            **GRID,
            "text_config": TEXT,
            "vision_config": QWEN_3_TOWER,
        },
        variants=(MORE, FEW),
        auto="AutoModelForImageTextToText",
        parallelisms=(*DENSE, *WHOLE_TOWER),
        local=LOCAL,
        inputs=make_grids,
        read=("*visual.pos_embed",),
        prepare=TOWER,
        differs={**DIFFERS, **PLAN_GATHERS},
    ),
    Family(
        name="qwen3_5_moe",
        config={
            "model_type": "qwen3_5_moe",
            **GRID,
            "text_config": {
                **TEXT,
                "moe_intermediate_size": 11,
                "shared_expert_intermediate_size": 13,
                "num_experts": 7,
                "num_experts_per_tok": 3,
            },
            "vision_config": QWEN_3_TOWER,
        },
        variants=(FEW,),
        auto="AutoModelForImageTextToText",
        parallelisms=(*EXPERTS, *WHOLE_TOWER),
        local={
            **{
                key: share for key, share in LOCAL.items() if key != "text_config.intermediate_size"
            },
            "text_config.moe_intermediate_size": ("*mlp.experts.down_proj", 2),
            "text_config.shared_expert_intermediate_size": ("*shared_expert.up_proj.weight", 0),
            "text_config.num_experts": ("*mlp.experts.down_proj", 0),
        },
        whole={"text_config.num_experts": ("*.mlp.gate",)},
        sized_by_shard=("*visual.blocks.*.attn.*", "*visual.merger.*"),
        inputs=make_grids,
        read=("*visual.pos_embed",),
        prepare=arrange,
        differs={**DIFFERS, **PLAN_GATHERS},
    ),
]
