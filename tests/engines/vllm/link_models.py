"""Configurations of tiny models that vLLM runs on the CPU: it has no kernels for heads below 64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 380,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
_SHARED = {
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "topk_method": "noaux_tc",
}
_LINEAR = {
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
# By the families' names: transformers' type, and sizes other than these.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "phi3": ("phi3", {}),
    "glm4": ("glm4", {"partial_rotary_factor": 0.5}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    # 48 rows of each expert are 64 in the kernel.
    "qwen3_moe-padded": ("qwen3_moe", {**_EXPERTS, "moe_intermediate_size": 48}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {**_EXPERTS, "num_key_value_heads": 4, "intermediate_size": 128}),
    "glm4_moe": ("glm4_moe", {**_SHARED, "use_qk_norm": True}),
    "deepseek_v3": ("deepseek_v3", {**_SHARED, **_LATENT}),
    "qwen3_next": ("qwen3_next", {**_EXPERTS, **_LINEAR}),
}


def write_config(family: str, folder: Path, **more: Any) -> None:
    """A `config.json`, and no weights. What it has `more` counts before the family's."""
    import transformers

    model_type, sizes = FAMILIES[family]
    config = transformers.AutoConfig.for_model(model_type, **_SIZES | sizes | more)
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
