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
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3_moe": _EXPERTS}


def write_config(family: str, folder: Path) -> None:
    """A `config.json`, and no weights."""
    import transformers

    config = transformers.AutoConfig.for_model(family, **_SIZES, **FAMILIES[family])
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
