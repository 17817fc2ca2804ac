"""Small models that Megatron-core and transformers have alike, by the names of their records."""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 30,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "max_position_embeddings": 16,
    "attn_implementation": "eager",
}
# Megatron-core's vocabulary is padded.
JOB: dict[str, Any] = {
    "hidden": 16,
    "ffn": 24,
    "layers": 2,
    "heads": 4,
    "groups": 2,
    "vocab": 32,
    "true_vocab": 30,
    "qk_norm": True,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MIXTRAL = {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 12,
}
GROUPED = {"experts": 4, "grouped": True}
# By name: ranks, the config of transformers, and the job of Megatron-core.
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tensor": (2, {}, {"sizes": {"tp": 2}}),
    "stages_tied": (2, {"tie_word_embeddings": True}, {"sizes": {"pp": 2}, "tied": True}),
    "few_heads": (
        2,
        {"model_type": "qwen2", "num_key_value_heads": 1},
        {"sizes": {"tp": 2}, "groups": 1, "qk_norm": False, "qkv_bias": True},
    ),
    "experts": (2, EXPERTS, {"sizes": {"ep": 2}, "experts": 4}),
    "grouped": (2, MIXTRAL, {"sizes": {"ep": 2}, **GROUPED, "qk_norm": False}),
    "grouped_parts": (2, EXPERTS, {"sizes": {"tp": 2}, **GROUPED}),
    "copies_tied": (2, {"tie_word_embeddings": True}, {"tied": True}),
    # Sizes for which vLLM has kernels of experts.
    "experts_in_stages_tied": (
        2,
        {
            **EXPERTS,
            "hidden_size": 32,
            "head_dim": 8,
            "moe_intermediate_size": 32,
            "tie_word_embeddings": True,
        },
        {"sizes": {"pp": 2}, "experts": 4, "tied": True, "hidden": 32, "ffn": 64},
    ),
    "virtual": (
        4,
        {"num_hidden_layers": 4},
        {"sizes": {"tp": 2, "pp": 2, "vp": 2}, "layers": 4},
    ),
}
