# ruff: noqa: E501
"""Tiny models of many families: random configurations whose sizes tell heads, ranks and padding apart.

`write_model(family, folder)` writes `config.json` and `names.json`: names, shapes and dtypes of the
checkpoint as the Hub has it, made by transformers' class of that family on the meta device. No weights.

Usage: python models.py FAMILY FOLDER, in an environment that has transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple


class TinyModel(NamedTuple):
    """A configuration by transformers' name of its type, and the sizes of tp that its heads allow."""

    model_type: str
    tp: tuple[int, ...]
    values: dict[str, Any]
    auto: str = "AutoModelForCausalLM"


_BASE = {
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 380,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {**_BASE, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_MLA = {
    **_MOE,
    "num_key_value_heads": 12,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA = {
    **_BASE,
    "mamba_n_heads": 12,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_TP = (1, 2, 4)

MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("llama", (1, 2, 3, 4), {**_BASE, "num_key_value_heads": 1}),
    "llama-8": TinyModel("llama", (1, 2, 4), {**_BASE, "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama4": TinyModel("llama4_text", _TP, {**_BASE, "intermediate_size_mlp": 144, "num_local_experts": 4, "head_dim": 8, "intermediate_size": 48, "interleave_moe_layer_step": 2}),
    "mistral": TinyModel("mistral", _TP, {**_BASE, "head_dim": 8}),
    "ministral3": TinyModel("ministral3", _TP, {**_BASE, "head_dim": 8}),
    "mixtral": TinyModel("mixtral", _TP, {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": TinyModel("qwen2", _TP, _BASE),
    "qwen2-moe": TinyModel("qwen2_moe", _TP, {**_MOE, "num_experts": 6, "shared_expert_intermediate_size": 96}),
    "qwen3": TinyModel("qwen3", _TP, {**_BASE, "head_dim": 16}),
    "qwen3-moe": TinyModel("qwen3_moe", _TP, {**_MOE, "num_experts": 6, "head_dim": 16}),
    "qwen3-next": TinyModel("qwen3_next", (1, 2, 4), {**_MOE, "num_experts": 6, "head_dim": 16, "shared_expert_intermediate_size": 48, "num_hidden_layers": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_attention_heads": 8, "num_key_value_heads": 2}),
    "gemma": TinyModel("gemma", _TP, {**_BASE, "head_dim": 8}),
    "gemma2": TinyModel("gemma2", _TP, {**_BASE, "head_dim": 8}),
    "gemma3": TinyModel("gemma3_text", _TP, {**_BASE, "head_dim": 8}),
    "phi": TinyModel("phi", _TP, {**_BASE, "num_key_value_heads": 12}),
    "phi3": TinyModel("phi3", _TP, _BASE),
    "gpt-oss": TinyModel("gpt_oss", _TP, {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "intermediate_size": 128, "hidden_size": 96}),
    "deepseek-v2": TinyModel("deepseek_v2", (1, 2, 3, 4), _MLA),
    "deepseek-v3": TinyModel("deepseek_v3", (1, 2, 3, 4), {**_MLA, "topk_method": "noaux_tc"}),
    "glm4": TinyModel("glm4", _TP, {**_BASE, "head_dim": 8}),
    "glm4-moe": TinyModel("glm4_moe", _TP, {**_MOE, "head_dim": 8, "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True}),
    "olmo": TinyModel("olmo", _TP, _BASE),
    "olmo2": TinyModel("olmo2", _TP, _BASE),
    "olmoe": TinyModel("olmoe", _TP, {**_BASE, "num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 12}),
    "granite": TinyModel("granite", _TP, _BASE),
    "granitemoe": TinyModel("granitemoe", _TP, {**_BASE, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "granite-hybrid": TinyModel("granitemoehybrid", _TP, {**_MAMBA, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 96, "layer_types": ["mamba", "attention"]}),
    "falcon": TinyModel("falcon", (1, 2, 4), {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12, "num_kv_heads": 4, "vocab_size": 380, "new_decoder_architecture": True, "bias": False}),
    "falcon-h1": TinyModel("falcon_h1", _TP, {**_MAMBA, "mamba_d_ssm": 192}),
    "nemotron-h": TinyModel("nemotron_h", _TP, {**_BASE, "mamba_num_heads": 12, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "head_dim": 8}),
    "minimax-m2": TinyModel("minimax_m2", _TP, {**_BASE, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "intermediate_size": 48, "rotary_dim": 4, "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True}),
    "ernie4-5": TinyModel("ernie4_5", _TP, {**_BASE, "head_dim": 8}),
    "ernie4-5-moe": TinyModel("ernie4_5_moe", _TP, {**_MOE, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1}),
    "cohere": TinyModel("cohere", _TP, _BASE),
    "cohere2": TinyModel("cohere2", _TP, _BASE),
    "starcoder2": TinyModel("starcoder2", _TP, _BASE),
    "smollm3": TinyModel("smollm3", _TP, _BASE),
    "stablelm": TinyModel("stablelm", _TP, _BASE),
    "gpt2": TinyModel("gpt2", _TP, {"n_embd": 96, "n_head": 12, "n_layer": 2, "vocab_size": 380, "n_positions": 128}),
    "gpt-neox": TinyModel("gpt_neox", _TP, {k: v for k, v in _BASE.items() if k != "num_key_value_heads"}),
    "opt": TinyModel("opt", _TP, {"hidden_size": 96, "ffn_dim": 144, "num_hidden_layers": 2, "num_attention_heads": 12, "vocab_size": 380, "max_position_embeddings": 128, "word_embed_proj_dim": 96}),
    "bloom": TinyModel("bloom", _TP, {"hidden_size": 96, "n_head": 12, "n_layer": 2, "vocab_size": 380}),
    "mamba2": TinyModel("mamba2", _TP, {"hidden_size": 96, "num_heads": 12, "head_dim": 16, "state_size": 8, "n_groups": 1, "num_hidden_layers": 2, "vocab_size": 380, "expand": 2}),
    "jamba": TinyModel("jamba", _TP, {**_BASE, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 6, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}),
    "exaone4": TinyModel("exaone4", _TP, {**_BASE, "sliding_window": 32}),
    "seed-oss": TinyModel("seed_oss", _TP, {**_BASE, "head_dim": 8}),
    "lfm2": TinyModel("lfm2", _TP, {**_BASE, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "conv_dim": 96, "block_dim": 96, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "block_ff_dim": 144}),
}  # fmt: skip


def write_model(family: str, folder: Path) -> None:
    """Write the configuration of a family, and the names, shapes and dtypes of its checkpoint."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    tiny = MODELS[family]
    config = transformers.AutoConfig.for_model(tiny.model_type, **tiny.values)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = getattr(transformers, tiny.auto).from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    state = model.state_dict()
    # Of tensors that are tied a checkpoint has one.
    tied = set(model.all_tied_weights_keys or {})
    state = {name: tensor for name, tensor in state.items() if name not in tied}
    state = revert_weight_conversion(model, state)
    names = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in state.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    (folder / "names.json").write_text(json.dumps(names, indent=0))


if __name__ == "__main__":
    for one in list(MODELS) if sys.argv[1] == "all" else sys.argv[1].split(","):
        write_model(one, Path(sys.argv[2]) / one)
