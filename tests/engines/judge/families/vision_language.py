"""Language models that see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..family import DENSE, Family
from ..heads import in_turn, share_heads, share_width

PICTURE, START = 3, 4
# The vision tower is on every rank, as engines have it that do not cut it.
WHOLE_TOWER = ("tp=2 | vtp=", "tp=3 | vtp=", "tp=2,pp=2,fsdp=2 | vtp=")


def make_grids(config: Any, generator: Any) -> dict[str, Any]:
    """A text with a picture of 4 x 6 patches, and one with a picture of 2 x 4; four are a token."""
    vision, words = config.vision_config, config.text_config.vocab_size
    grids = torch.tensor([[1, 4, 6], [1, 2, 4]])
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    patches = torch.randn(32, width, generator=generator, dtype=torch.float64)
    tokens = torch.randint(6, words, (2, 11), generator=generator)
    tokens[0, 1], tokens[0, 2:8], tokens[1, 4], tokens[1, 5:7] = START, PICTURE, START, PICTURE
    return {
        "input_ids": tokens,
        "pixel_values": patches,
        "image_grid_thw": grids,
        "mm_token_type_ids": (tokens == PICTURE).int(),
    }


def make_pictures_in_text(count: int, **more: Any) -> Any:
    """Two texts, with a picture each that becomes `count` tokens."""

    def make(config: Any, generator: Any) -> dict[str, Any]:
        vision = config.vision_config
        shape = (2, vision.num_channels, vision.image_size, vision.image_size)
        tokens = torch.randint(
            6, config.text_config.vocab_size, (2, count + 5), generator=generator
        )
        tokens[0, 1 : 1 + count] = tokens[1, 3 : 3 + count] = PICTURE
        found = {
            "input_ids": tokens,
            "pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64),
        }
        if "token_type_ids" in more:
            found["token_type_ids"] = (tokens == PICTURE).long()
        if "image_sizes" in more:
            found["image_sizes"] = torch.tensor([[vision.image_size] * 2] * 2)
        return found

    return make


def text(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": 61,
        "hidden_size": 72,
        "intermediate_size": 43,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **changes,
    }


ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1]}
GRID = {
    "image_token_id": PICTURE,
    "video_token_id": 5,
    "vision_start_token_id": START,
    "vision_end_token_id": START,
    "tie_word_embeddings": False,
}
# Heads of the tower and of the text that tp=3 and tp=5 divide.
MORE_HEADS: Mapping[str, Any] = {
    "vision_config.num_heads": 15,
    "vision_config.hidden_size": 60,
    "text_config.num_attention_heads": 15,
    "text_config.num_key_value_heads": 15,
    "text_config.hidden_size": 90,
    "vision_config.out_hidden_size": 90,
}
# Key/value heads that several ranks hold.
FEW_KEYS = {"text_config.num_key_value_heads": 2}
TEXT_LOCAL = {
    "text_config.intermediate_size": ("*language_model.layers.0.mlp.up_proj.weight", 0),
    "text_config.vocab_size": ("*language_model.embed_tokens.weight", 0),
}
TEXT_HEADS_LOCAL = {
    **TEXT_LOCAL,
    "text_config.num_attention_heads": ("*language_model.layers.0.self_attn.q_proj.weight", 0),
    "text_config.num_key_value_heads": ("*language_model.layers.0.self_attn.k_proj.weight", 0),
}
TEXT_HEADS = share_heads(
    "*language_model.layers.*.self_attn", ("q_proj",), "o_proj", shared=("k_proj", "v_proj")
)
QWEN_3_TOWER = {
    "depth": 3,
    "hidden_size": 48,
    "out_hidden_size": 72,
    "intermediate_size": 41,
    "num_heads": 12,
    "in_channels": 3,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
}
VISUAL_HEADS = share_heads("*visual.blocks.*.attn", ("qkv",), "proj", blocks=3)
TOWER_HEADS = share_heads(
    "*vision_tower.*layers.*.self_attn", ("q_proj", "k_proj", "v_proj"), "out_proj"
)
PIXTRAL_HEADS = share_heads(
    "*vision_tower.*layers.*.attention", ("q_proj", "k_proj", "v_proj"), "o_proj"
)
PROJECTOR = share_width("*multi_modal_projector.linear_1", "linear_2")


def get_mlp_ratio(shapes: Mapping[str, Any], whole: Any) -> float:
    """Qwen2-VL's configs have the ratio of widths, not the width."""
    rows = shapes["model.visual.blocks.0.mlp.fc1.weight"][0]
    return float((rows + 0.5) / whole.vision_config.embed_dim)


TOWER = {
    "hidden_size": 60,
    "intermediate_size": 41,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 3,
}
MORE_TOWER_HEADS: Mapping[str, Any] = {
    "vision_config.num_attention_heads": 15,
    "text_config.num_attention_heads": 15,
    "text_config.num_key_value_heads": 15,
}
TOWER_LOCAL = {
    **TEXT_HEADS_LOCAL,
    "vision_config.intermediate_size": ("*vision_tower.*layers.0.mlp.fc1.weight", 0),
}
# transformers' plan leaves towers whole, as `vtp=` does here.
WHY = "the tower's heads and widths go over ranks too; `vtp=` leaves it whole"
DIFFERS = {"model.visual.*": WHY}
TOWER_DIFFERS = {"model.vision_tower.*": WHY}
PROJECTOR_DIFFERS = {"model.multi_modal_projector.*": WHY}
READ = ("*head.attention.out_proj",)

FAMILIES = [
    Family(
        name="qwen2_vl",
        config={
            "model_type": "qwen2_vl",
            **GRID,
            "text_config": text(rope_parameters=ROPE),
            "vision_config": {
                "depth": 3,
                "embed_dim": 48,
                "hidden_size": 72,
                "mlp_ratio": 1,
                "num_heads": 12,
                "in_channels": 3,
                "patch_size": 2,
                "temporal_patch_size": 2,
                "spatial_merge_size": 2,
            },
        },
        variants=(
            {
                "vision_config.num_heads": 15,
                "vision_config.embed_dim": 60,
                "vision_config.hidden_size": 90,
                "text_config.num_attention_heads": 15,
                "text_config.num_key_value_heads": 15,
                "text_config.hidden_size": 90,
            },
            FEW_KEYS,
        ),
        auto="AutoModelForImageTextToText",
        parallelisms=(*DENSE, *WHOLE_TOWER),
        local={**TEXT_LOCAL, "vision_config.mlp_ratio": get_mlp_ratio},
        inputs=make_grids,
        prepare=in_turn(TEXT_HEADS, VISUAL_HEADS, share_width("*visual.merger.mlp.0", "2")),
        differs=DIFFERS,
    ),
    Family(
        name="qwen2_5_vl",
        config={
            "model_type": "qwen2_5_vl",
            **GRID,
            "text_config": text(rope_parameters=ROPE),
            "vision_config": {
                "depth": 3,
                "hidden_size": 48,
                "out_hidden_size": 72,
                "intermediate_size": 41,
                "num_heads": 12,
                "in_channels": 3,
                "patch_size": 2,
                "temporal_patch_size": 2,
                "spatial_merge_size": 2,
                "window_size": 8,
                "fullatt_block_indexes": [1],
            },
        },
        variants=(MORE_HEADS, FEW_KEYS),
        auto="AutoModelForImageTextToText",
        parallelisms=(*DENSE, *WHOLE_TOWER),
        local={
            **TEXT_LOCAL,
            "vision_config.intermediate_size": ("*visual.blocks.0.mlp.up_proj.weight", 0),
        },
        inputs=make_grids,
        prepare=in_turn(TEXT_HEADS, VISUAL_HEADS, share_width("*visual.merger.mlp.0", "2")),
        differs=DIFFERS,
    ),
    Family(
        name="qwen3_vl",
        config={
            "model_type": "qwen3_vl",
            **GRID,
            "text_config": text(rope_parameters=ROPE, head_dim=6),
            "vision_config": {
                **QWEN_3_TOWER,
                "deepstack_visual_indexes": [0, 2],
            },
        },
        variants=(MORE_HEADS, FEW_KEYS),
        auto="AutoModelForImageTextToText",
        parallelisms=(*DENSE, *WHOLE_TOWER),
        local={
            **TEXT_HEADS_LOCAL,
            "vision_config.intermediate_size": ("*visual.blocks.0.mlp.linear_fc1.weight", 0),
        },
        inputs=make_grids,
        read=("*visual.pos_embed",),
        prepare=in_turn(
            VISUAL_HEADS,
            share_width("*visual.merger.linear_fc1", "linear_fc2"),
            share_width("*visual.deepstack_merger_list.*.linear_fc1", "linear_fc2"),
        ),
        differs={
            **DIFFERS,
            "model.language_model.*": "cut as the plan of Qwen3 says; the whole has none",
        },
    ),
    Family(
        name="llava",
        config={
            "model_type": "llava",
            "image_token_index": PICTURE,
            "vision_feature_layer": -1,
            "text_config": {"model_type": "llama", **text(head_dim=6, hidden_size=60)},
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 31, **TOWER},
        },
        variants=(MORE_TOWER_HEADS, FEW_KEYS),
        auto="AutoModelForImageTextToText",
        parallelisms=(*DENSE, *WHOLE_TOWER),
        local=TOWER_LOCAL,
        inputs=make_pictures_in_text(9),
        prepare=in_turn(TOWER_HEADS, PROJECTOR),
        differs={**TOWER_DIFFERS, **PROJECTOR_DIFFERS},
    ),
    Family(
        name="mistral3",
        config={
            "model_type": "mistral3",
            "image_token_index": PICTURE,
            "vision_feature_layer": -1,
            "spatial_merge_size": 2,
            "text_config": {"model_type": "mistral", **text(head_dim=6, hidden_size=60)},
            "vision_config": {
                "model_type": "pixtral",
                **TOWER,
                "image_size": 16,
                "hidden_size": 48,
            },
        },
        variants=({**MORE_TOWER_HEADS, "vision_config.hidden_size": 60}, FEW_KEYS),
        auto="AutoModelForImageTextToText",
        parallelisms=(*DENSE, *WHOLE_TOWER),
        local={
            **TEXT_HEADS_LOCAL,
            "vision_config.intermediate_size": (
                "*vision_tower.*layers.0.feed_forward.up_proj.weight",
                0,
            ),
        },
        inputs=make_pictures_in_text(4, image_sizes=True),
        prepare=in_turn(PIXTRAL_HEADS, PROJECTOR),
        differs={**TOWER_DIFFERS, **PROJECTOR_DIFFERS},
    ),
    Family(
        name="paligemma",
        config={
            "model_type": "paligemma",
            "image_token_index": PICTURE,
            "projection_dim": 60,
            "text_config": {
                "model_type": "gemma2",
                **text(head_dim=6, hidden_size=60),
                "tie_word_embeddings": True,
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                **TOWER,
                "vision_use_head": False,
                "projection_dim": 60,
            },
        },
        variants=(MORE_TOWER_HEADS, FEW_KEYS, {"text_config.model_type": "gemma"}),
        auto="AutoModelForImageTextToText",
        parallelisms=(*DENSE, *WHOLE_TOWER),
        local=TOWER_LOCAL,
        inputs=make_pictures_in_text(9, token_type_ids=True),
        read=READ,
        prepare=TOWER_HEADS,
        differs=TOWER_DIFFERS,
    ),
]
