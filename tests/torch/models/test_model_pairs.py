"""Names on the Hub. With Megatron-core itself: `tests/engines/megatron_core/test_links.py`."""

from __future__ import annotations

from typing import Any

import pytest

from reshard.errors import RecipeError, UsageError
from reshard.recipes.naming import Fusion
from reshard.torch.models.model_pairs import are_megatron_names, find_hub_names, name_pattern
from reshard.torch.models.naming import member_pattern, resolve_name

NUMBERS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 3}
LAYER = "model.layers.*."


def test_names_choose_the_recipe() -> None:
    dense = [f"{LAYER}mlp.gate_proj.weight"]
    for patterns, recipe in (
        (dense, "qwen3_moe"),
        ([*dense, f"{LAYER}mlp.shared_expert.gate_proj.weight"], "qwen2_moe"),
        ([f"{LAYER}block_sparse_moe.gate.weight"], "mixtral"),
        # As transformers has them in a module.
        ([f"{LAYER}mlp.experts.gate_up_proj", f"{LAYER}mlp.gate.weight"], "qwen3_moe"),
    ):
        assert find_hub_names({}, NUMBERS, patterns).recipe == recipe
    latent = {**NUMBERS, "multi_latent_attention": 1}
    assert find_hub_names({}, latent, dense).recipe == "deepseek_v3"
    # What somebody says counts.
    assert find_hub_names({"model_type": "mixtral"}, NUMBERS, dense).recipe == "mixtral"


def test_experts_and_query_groups() -> None:
    hub = find_hub_names({}, NUMBERS, [])
    found = resolve_name("decoder.layers.5.mlp.experts.linear_fc1.weight2", hub.megatron)
    assert isinstance(found, Fusion)
    assert found.members == (
        "model.layers.5.mlp.experts.2.gate_proj.weight",
        "model.layers.5.mlp.experts.2.up_proj.weight",
    )
    fused = hub.megatron["decoder.layers.*.self_attention.linear_qkv.weight"]
    assert isinstance(fused, Fusion) and (fused.shares, fused.groups) == ((4, 2, 2), 2)
    assert hub.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert hub.list_unnamed(["output_layer.weight", "mtp.layers.0.norm.weight"]) == [
        "mtp.layers.0.norm.weight"
    ]


def test_stacks_of_the_other_side_are_the_same_experts() -> None:
    hub = find_hub_names({"model_type": "mixtral"}, NUMBERS, [])
    for stack, members in (
        ("gate_up_proj", ("w1.weight", "w3.weight")),
        ("down_proj", ("w2.weight",)),
    ):
        pattern = member_pattern(f"model.layers.7.mlp.experts.{stack}", hub.stacks)
        assert pattern is not None
        found = resolve_name(pattern.replace("{}", "2"), hub.others)
        names = found.members if isinstance(found, Fusion) else (found,)
        layer = "model.layers.7.block_sparse_moe.experts.2."
        assert names == tuple(layer + member for member in members)


@pytest.mark.parametrize(
    ("config", "numbers", "told"),
    [
        ({"model_type": "no such"}, NUMBERS, "no recipe is for the model type 'no such'"),
        ({"model_type": "bert"}, NUMBERS, "no names of 'megatron'"),
        ({"model_type": "qwen3"}, {}, "num_attention_heads"),
    ],
)
def test_configs_that_lack_numbers_are_refused(config: Any, numbers: Any, told: str) -> None:
    with pytest.raises((UsageError, RecipeError), match=told):
        find_hub_names(config, numbers, [])


def test_megatrons_own_names_are_recognized() -> None:
    assert are_megatron_names([name_pattern("decoder.layers.3.mlp.linear_fc1.weight")])
    assert not are_megatron_names(
        [name_pattern("model.decoder.layers.3.fc1.weight"), "lm_head.weight"]
    )
