"""Megatron-core's own sharded state dicts, against what recipes and Megatron's names say.

Models are built for every rank on the `meta` device; the recipe knows only the model's config.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

if os.environ.get("RESHARD_ENGINE") != "megatron":
    pytest.skip("needs Megatron-core", allow_module_level=True)

import torch

from reshard.recipes.engine_layouts import EngineLayout
from reshard.torch.loaders.module_layouts import module_layouts

from .records import CONFIG, SIZES, Held, hold_by_recipe, mesh_of, shapes, write_record
from .training_process import parallel_sizes

# Without a device there is none to ask for.
torch.cuda.current_device = lambda: "cpu"
warnings.simplefilter("ignore")


def build(sizes: dict[str, int], experts: int | None) -> Any:
    """A function that builds a rank's model and gives its sharded state dict."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel = parallel_sizes(sizes)

    def build_rank(rank: int) -> Any:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**parallel)
        config = TransformerConfig(
            num_layers=CONFIG["num_hidden_layers"],
            hidden_size=CONFIG["hidden_size"],
            num_attention_heads=CONFIG["num_attention_heads"],
            num_query_groups=CONFIG["num_key_value_heads"],
            kv_channels=CONFIG["head_dim"],
            ffn_hidden_size=CONFIG["intermediate_size"],
            moe_ffn_hidden_size=CONFIG["moe_intermediate_size"] if experts else None,
            num_moe_experts=experts,
            gated_linear_unit=True,
            add_bias_linear=False,
            normalization="RMSNorm",
            use_cpu_initialization=True,
            perform_initialization=False,
            pipeline_dtype=torch.bfloat16,
            **parallel,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm"),
            vocab_size=CONFIG["vocab_size"],
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        return model.sharded_state_dict()

    return build_rank


# Megatron keys a norm by the layer behind it, and stacked experts by one name.
KEYS = {
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.{0}."
    "input_layernorm.weight",
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": "decoder.layers.{0}."
    "pre_mlp_layernorm.weight",
    "decoder.layers.mlp.experts.experts.linear_fc1.weight": "decoder.layers.{0}.mlp.experts."
    "local_experts.{1}.linear_fc1.weight",
    "decoder.layers.mlp.experts.experts.linear_fc2.weight": "decoder.layers.{0}.mlp.experts."
    "local_experts.{1}.linear_fc2.weight",
}


def regions(found: EngineLayout) -> Held:
    """What every rank has of each tensor, by names with layers and experts."""
    held: Held = {}
    for key, layout in found.source_layouts().items():
        name = KEYS.get(key, key.replace("decoder.layers.", "decoder.layers.{0}."))
        # Leading dimensions are of layers and experts.
        outer = sum(f"{{{n}}}" in name for n in (0, 1))
        for rank in layout.holders:
            for box in layout.boxes(rank):
                numbers = [range(a, b) for a, b in zip(box.start, box.stop, strict=True)][:outer]
                for layer in numbers[0] if numbers else [0]:
                    for expert in numbers[1] if outer > 1 else [0]:
                        boxes = held.setdefault(name.format(layer, expert), {})
                        at = [list(box.start[outer:]), list(box.stop[outer:])]
                        boxes.setdefault(str(rank), []).append(at)
    return {
        name: {rank: sorted(boxes) for rank, boxes in by_rank.items()}
        for name, by_rank in held.items()
    }


@pytest.mark.parametrize(("sizes", "experts"), SIZES)
def test_recipes_cut_for_megatron_as_it_does(sizes: dict[str, int], experts: int | None) -> None:
    import megatron.core

    version = megatron.core.__version__
    found = module_layouts(build(sizes, experts), mesh_of(sizes), "megatron", version)
    theirs = regions(found)
    ours, used = hold_by_recipe(sizes, experts, theirs)
    assert ours == theirs
    # Every tensor of the model is one that Megatron has.
    assert used == set(shapes(experts))
    if os.environ.get("RESHARD_UPDATE_GOLDEN"):
        write_record(sizes, experts, version, theirs)
