"""Model folders of what Megatron-core saved: transformers computes what Megatron did.

Megatron-core 0.16.1 trained models of Llama's and Mixtral's architectures for two steps on two
ranks, and its own forward gave the recorded logits (`tests/engines/megatron_core/ranks.py`).
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("RESHARD_ENGINE") != "transformers":
    pytest.skip("needs transformers", allow_module_level=True)

import numpy as np
import torch
import transformers

from checkpoint.formats.megatron.recordings import state_of, unpack
from reshard.checkpoint import convert, plan_for_pretrained, run_conversion

# In 32 bits, whose sums are in another order.
TOLERANCE = 1e-5
HEADS, GROUPS, EXPERTS = 4, 2, 4
CONFIG: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": 2,
    "vocab_size": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "max_position_embeddings": 8,
    "torch_dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 6,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
    },
}
LAYER = "decoder.layers.{}."


def hub_weights(state: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """The weights by the Hub's names, taken apart here: queries, keys and values of each group."""
    found = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
        "lm_head.weight": state["output_layer.weight"],
    }
    for layer in range(2):
        here, there = LAYER.format(layer), f"model.layers.{layer}."
        attention = f"{here}self_attention."
        fused = state[f"{attention}linear_qkv.weight"].reshape(GROUPS, -1, 2, 8)
        split = {"q": fused[:, :-2], "k": fused[:, -2:-1], "v": fused[:, -1:]}
        for letter, part in split.items():
            found[f"{there}self_attn.{letter}_proj.weight"] = part.reshape(-1, 8)
        found |= {
            f"{there}self_attn.o_proj.weight": state[f"{attention}linear_proj.weight"],
            f"{there}input_layernorm.weight": state[f"{attention}linear_qkv.layer_norm_weight"],
        }
        norm = (
            "pre_mlp_layernorm.weight" if name == "mixtral" else "mlp.linear_fc1.layer_norm_weight"
        )
        found[f"{there}post_attention_layernorm.weight"] = state[here + norm]
        if name == "llama":
            first, second = (state[f"{here}mlp.linear_fc{n}.weight"] for n in (1, 2))
            gate, up = np.split(first, 2)
            found |= {
                f"{there}mlp.gate_proj.weight": gate,
                f"{there}mlp.up_proj.weight": up,
                f"{there}mlp.down_proj.weight": second,
            }
            continue
        found[f"{there}block_sparse_moe.gate.weight"] = state[f"{here}mlp.router.weight"]
        for expert in range(EXPERTS):
            own = f"{here}mlp.experts.local_experts.{expert}.linear_fc"
            w1, w3 = np.split(state[f"{own}1.weight"], 2)
            found |= {
                f"{there}block_sparse_moe.experts.{expert}.{kind}.weight": value
                for kind, value in (("w1", w1), ("w3", w3), ("w2", state[f"{own}2.weight"]))
            }
    return found


@pytest.mark.parametrize("through", ["torch-dist", "megatron-legacy"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_what_megatron_did(name: str, through: str, tmp_path: Path) -> None:
    recording = unpack(name, tmp_path)
    source, target = recording / "fully_reshardable", tmp_path / "hf"
    state = state_of(source)
    if through == "megatron-legacy":
        source = tmp_path / "folders"
        convert(recording / "fully_reshardable", source, to="tp=2", format=through)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, **MODELS[name]}))
    run_conversion(plan_for_pretrained(source, target, config=config))
    expected = hub_weights(state, name)
    made = state_of(target)
    assert sorted(made) == sorted(expected)
    for key, value in expected.items():
        assert made[key].tobytes() == value.tobytes(), key
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            target, output_loading_info=True
        )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    then = torch.load(recording / "then" / "logits.pt", weights_only=True)
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        logits = model(then["tokens"]).logits
    assert then["logits"].abs().max() > 0.1
    torch.testing.assert_close(logits, then["logits"], rtol=0, atol=TOLERANCE)
