"""Vision encoders, and pairs of a vision and a text encoder."""

from __future__ import annotations

from typing import Any

import torch

from ..family import Family, make_tokens
from ..heads import share_heads


def make_pictures(config: Any, generator: Any) -> dict[str, Any]:
    """Two pictures."""
    config = getattr(config, "vision_config", config)
    shape = (2, config.num_channels, config.image_size, config.image_size)
    return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}


def make_pictures_and_tokens(config: Any, generator: Any) -> dict[str, Any]:
    """Two pictures and two texts."""
    tokens = torch.randint(0, config.text_config.vocab_size, (2, 7), generator=generator)
    return {**make_pictures(config, generator), "input_ids": tokens}


def make_patches(config: Any, generator: Any) -> dict[str, Any]:
    """Two pictures as patches, of 3 x 2, the last two of the second being none."""
    config = getattr(config, "vision_config", config)
    width = config.num_channels * config.patch_size**2
    patches = torch.randn(2, 6, width, generator=generator, dtype=torch.float64)
    shapes = torch.tensor([[3, 2], [2, 2]])
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def make_patches_and_tokens(config: Any, generator: Any) -> dict[str, Any]:
    tokens = torch.randint(0, config.text_config.vocab_size, (2, 7), generator=generator)
    return {**make_patches(config, generator), "input_ids": tokens}


VISION = {
    "hidden_size": 60,
    "intermediate_size": 43,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 3,
}
TEXT = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 37,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "projection_size": 60,
}
# Heads that tp=3 and tp=5 divide.
MORE_HEADS = {
    "vision_config.num_attention_heads": 15,
    "text_config.num_attention_heads": 15,
    "text_config.hidden_size": 45,
}
ATTENTION = ("q_proj", "k_proj", "v_proj")
TOWERS_LOCAL = {
    "vision_config.intermediate_size": ("*vision_model.encoder.layers.0.mlp.fc1.weight", 0),
    "text_config.intermediate_size": ("*text_model.encoder.layers.0.mlp.fc1.weight", 0),
    "text_config.vocab_size": ("*token_embedding.weight", 0),
}
TOWER_LOCAL = {"intermediate_size": ("*encoder.layers.0.mlp.fc1.weight", 0)}
TOWER_HEADS = share_heads("*layers.*.self_attn", ATTENTION, "out_proj")


# SigLIP's pooling attention reads its output layer, SigLIP 2 its positions.
READ = ("*head.attention.out_proj", "vision_model.embeddings.position_embedding")


def get_similarity(found: Any) -> Any:
    return (found.logits_per_image, found.image_embeds, found.text_embeds)


def get_states(found: Any) -> Any:
    return (found.last_hidden_state, found.pooler_output)


FAMILIES = [
    Family(
        name="vit",
        config={"model_type": "vit", **VISION},
        variants=({"num_attention_heads": 15},),
        auto="AutoModelForImageClassification",
        local={"intermediate_size": ("*layers.0.mlp.fc1.weight", 0)},
        inputs=make_pictures,
        prepare=share_heads("*layers.*.attention", ATTENTION, "o_proj"),
    ),
    Family(
        name="clip",
        config={
            "model_type": "clip",
            "projection_dim": 31,
            "vision_config": {"projection_dim": 31, **VISION},
            "text_config": {"projection_dim": 31, **TEXT},
        },
        variants=(MORE_HEADS,),
        auto="AutoModel",
        local=TOWERS_LOCAL,
        inputs=make_pictures_and_tokens,
        outputs=get_similarity,
        stacks=("text_model", "vision_model"),
        read=READ,
        prepare=TOWER_HEADS,
    ),
    Family(
        name="siglip",
        config={"model_type": "siglip", "vision_config": VISION, "text_config": TEXT},
        variants=(MORE_HEADS,),
        auto="AutoModel",
        local=TOWERS_LOCAL,
        inputs=make_pictures_and_tokens,
        outputs=get_similarity,
        stacks=("text_model", "vision_model"),
        read=READ,
        prepare=TOWER_HEADS,
    ),
    Family(
        name="siglip2",
        config={
            "model_type": "siglip2",
            "vision_config": {**VISION, "num_patches": 9},
            "text_config": TEXT,
        },
        variants=(MORE_HEADS,),
        auto="AutoModel",
        local=TOWERS_LOCAL,
        inputs=make_patches_and_tokens,
        outputs=get_similarity,
        stacks=("text_model", "vision_model"),
        read=READ,
        prepare=TOWER_HEADS,
    ),
    *(
        Family(
            name=name,
            config={"model_type": name, **VISION, "projection_dim": 31},
            variants=({"num_attention_heads": 15},),
            auto=model_class,
            local=TOWER_LOCAL,
            inputs=make_pictures,
            outputs=get_states,
            read=READ,
            prepare=TOWER_HEADS,
        )
        for name, model_class in (
            ("clip_vision_model", "CLIPVisionModel"),
            ("siglip_vision_model", "SiglipVisionModel"),
        )
    ),
    *(
        Family(
            name=name,
            config={"model_type": name, **TEXT, "projection_dim": 31},
            variants=({"num_attention_heads": 15, "hidden_size": 45},),
            auto=model_class,
            local={**TOWER_LOCAL, "vocab_size": ("*token_embedding.weight", 0)},
            inputs=make_tokens,
            outputs=get_states,
            read=READ,
            prepare=TOWER_HEADS,
        )
        for name, model_class in (
            ("clip_text_model", "CLIPTextModel"),
            ("siglip_text_model", "SiglipTextModel"),
        )
    ),
]
