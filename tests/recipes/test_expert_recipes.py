"""Recipes of mixtures of experts, on the names and sizes of published checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from reshard import DeviceMesh
from reshard.recipes.assignment import Assignment, assign
from reshard.recipes.library import choose_recipe

Shapes = dict[str, tuple[int, ...]]


def assign_over(shapes: Shapes, config: dict[str, Any], **axes: int) -> Assignment:
    recipe = choose_recipe(config)
    assert recipe is not None
    return assign(shapes, DeviceMesh.of(**axes), (), recipe, config)


def held(found: Assignment, name: str, rank: int) -> tuple[int, ...] | None:
    layout = found.layouts[name]
    return layout.local_shape(rank) if layout.cells_of(rank) else None


def list_predicting_layer(of: str, hidden: int, words: int) -> Shapes:
    """What a layer that predicts a further token has beside an ordinary one."""
    return {
        f"{of}eh_proj.weight": (hidden, 2 * hidden),
        f"{of}enorm.weight": (hidden,),
        f"{of}hnorm.weight": (hidden,),
        f"{of}embed_tokens.weight": (words, hidden),
        f"{of}shared_head.norm.weight": (hidden,),
        f"{of}shared_head.head.weight": (words, hidden),
    }


def list_experts(of: str, experts: int, width: int, hidden: int) -> Shapes:
    return {
        f"{of}{one}.{which}_proj.weight": (hidden, width) if which == "down" else (width, hidden)
        for one in range(experts)
        for which in ("gate", "up", "down")
    }


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [
        (
            "glm4_moe",
            {
                "q_proj.weight": (96 * 128, 4096),
                "q_proj.bias": (96 * 128,),
                "k_proj.weight": (8 * 128, 4096),
                "k_proj.bias": (8 * 128,),
                "v_proj.weight": (8 * 128, 4096),
                "v_proj.bias": (8 * 128,),
                "o_proj.weight": (4096, 96 * 128),
            },
        ),
        (
            "kimi_k2",
            {
                "q_a_proj.weight": (1536, 4096),
                "q_a_layernorm.weight": (1536,),
                "q_b_proj.weight": (96 * 192, 1536),
                "kv_a_proj_with_mqa.weight": (576, 4096),
                "kv_a_layernorm.weight": (512,),
                "kv_b_proj.weight": (96 * 256, 512),
                "o_proj.weight": (4096, 96 * 128),
            },
        ),
    ],
)
def test_layers_that_predict_further_tokens(
    model_type: str, attention: dict[str, tuple[int, ...]]
) -> None:
    config = {
        "model_type": model_type,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 96,
        "num_key_value_heads": 8 if model_type == "glm4_moe" else 96,
        "n_routed_experts": 4,
        "moe_intermediate_size": 1408,
    }
    shapes: Shapes = {"model.embed_tokens.weight": (151552, 4096), "model.norm.weight": (4096,)}
    for layer in range(3):
        of = f"model.layers.{layer}."
        shapes |= {f"{of}self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= list_experts(f"{of}mlp.experts.", 4, 1408, 4096)
        shapes |= {
            f"{of}mlp.gate.weight": (4, 4096),
            f"{of}mlp.gate.e_score_correction_bias": (4,),
            f"{of}input_layernorm.weight": (4096,),
            f"{of}post_attention_layernorm.weight": (4096,),
        }
    shapes |= list_predicting_layer("model.layers.2.", 4096, 151552)
    found = assign_over(shapes, config, pp=2, tp=4, ep=2)
    assert not found.unknown
    # Ranks 0 to 7 are the first stage, 8 to 15 the last, which predicts.
    assert held(found, "model.layers.2.eh_proj.weight", 0) is None
    assert held(found, "model.layers.2.eh_proj.weight", 8) == (4096, 8192)
    assert held(found, "model.layers.2.shared_head.head.weight", 15) == (151552 // 4, 4096)
    assert held(found, "model.layers.2.mlp.experts.3.up_proj.weight", 8) is None
    assert held(found, "model.layers.2.mlp.experts.3.up_proj.weight", 9) == (352, 4096)
    assert held(found, "model.layers.0.self_attn.o_proj.weight", 0) == (4096, 96 * 128 // 4)


def test_llama_4_with_its_vision_tower() -> None:
    config = {
        "model_type": "llama4",
        "text_config": {
            "num_hidden_layers": 2,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "intermediate_size": 8192,
        },
        "vision_config": {"num_attention_heads": 16, "num_hidden_layers": 34},
    }
    of, seen = "language_model.model.layers.1.", "vision_model.model.layers.33."
    shapes: Shapes = {
        "language_model.model.embed_tokens.weight": (202048, 5120),
        "language_model.model.norm.weight": (5120,),
        "language_model.lm_head.weight": (202048, 5120),
        f"{of}self_attn.q_proj.weight": (5120, 5120),
        f"{of}self_attn.k_proj.weight": (1024, 5120),
        f"{of}self_attn.o_proj.weight": (5120, 5120),
        f"{of}feed_forward.experts.gate_up_proj": (16, 5120, 16384),
        f"{of}feed_forward.experts.down_proj": (16, 8192, 5120),
        f"{of}feed_forward.router.weight": (16, 5120),
        f"{of}feed_forward.shared_expert.down_proj.weight": (5120, 8192),
        f"{of}input_layernorm.weight": (5120,),
        f"{seen}self_attn.q_proj.weight": (1408, 1408),
        f"{seen}self_attn.q_proj.bias": (1408,),
        f"{seen}self_attn.o_proj.weight": (1408, 1408),
        f"{seen}self_attn.o_proj.bias": (1408,),
        f"{seen}mlp.fc1.weight": (5632, 1408),
        f"{seen}mlp.fc2.weight": (1408, 5632),
        f"{seen}input_layernorm.bias": (1408,),
        "vision_model.class_embedding": (1408,),
        "vision_model.patch_embedding.linear.weight": (1408, 588),
        "vision_model.vision_adapter.mlp.fc1.weight": (4096, 5632),
        "multi_modal_projector.linear_1.weight": (5120, 4096),
    }
    found = assign_over(shapes, config, pp=2, ep=2, tp=4)
    assert not found.unknown
    # Stage 0 is ranks 0 to 7; in it experts 0 to 7 are on ranks 0 to 3.
    assert held(found, f"{seen}self_attn.q_proj.weight", 0) == (352, 1408)
    assert held(found, f"{seen}mlp.fc2.weight", 8) is None
    assert held(found, f"{of}feed_forward.experts.gate_up_proj", 8) == (8, 5120, 4096)
    # Gate of this rank's rows, then up of them.
    table = found.layouts[f"{of}feed_forward.experts.gate_up_proj"].tables[2]
    assert [run[:2] for run in table.runs_of(1)] == [(2048, 4096), (10240, 12288)]
    assert held(found, f"{of}self_attn.q_proj.weight", 0) is None
    assert held(found, "language_model.lm_head.weight", 8) == (50512, 5120)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_gpt_oss_in_four_bits(tp: int) -> None:
    """Columns of gate and up alternate; rows of down are cut between groups of 32."""
    of = "model.layers.0."
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "intermediate_size": 2880,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    shapes: Shapes = {
        f"{of}self_attn.sinks": (64,),
        f"{of}self_attn.q_proj.weight": (4096, 2880),
        f"{of}mlp.router.weight": (32, 2880),
        f"{of}mlp.router.bias": (32,),
        f"{of}mlp.experts.gate_up_proj_blocks": (32, 5760, 90, 16),
        f"{of}mlp.experts.gate_up_proj_scales": (32, 5760, 90),
        f"{of}mlp.experts.gate_up_proj_bias": (32, 5760),
        f"{of}mlp.experts.down_proj_blocks": (32, 2880, 90, 16),
        f"{of}mlp.experts.down_proj_scales": (32, 2880, 90),
        f"{of}mlp.experts.down_proj_bias": (32, 2880),
    }
    found = assign_over(shapes, config, tp=tp)
    assert not found.unknown
    groups = -(-90 // tp)
    for rank in range(tp):
        here = min(groups, 90 - groups * rank)
        rows = f"{of}mlp.experts.gate_up_proj"
        assert held(found, f"{rows}_blocks", rank) == (32, 64 * here, 90, 16)
        assert held(found, f"{rows}_scales", rank) == (32, 64 * here, 90)
        assert held(found, f"{rows}_bias", rank) == (32, 64 * here)
        assert held(found, f"{of}mlp.experts.down_proj_blocks", rank) == (32, 2880, here, 16)
        assert held(found, f"{of}self_attn.sinks", rank) == (64 // tp,)
