"""Dense decoders."""

from __future__ import annotations

from typing import Any

from ..family import Family

# The keys of Llama's config that a rank has a share of.
HEADS = {
    "num_attention_heads": ("*layers.0.self_attn.q_proj.weight", 0),
    "num_key_value_heads": ("*layers.0.self_attn.k_proj.weight", 0),
    "intermediate_size": ("*layers.0.mlp.up_proj.weight", 0),
    "vocab_size": ("*embed_tokens.weight", 0),
}


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config with the keys of Llama's. The sizes are odd, but for what must be even."""
    return {
        "model_type": model_type,
        "vocab_size": 61,
        "hidden_size": 36,
        "intermediate_size": 43,
        "num_hidden_layers": 3,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **changes,
    }


# Key/value heads that tp=3 and tp=5 divide; and fewer than ranks, so that several hold one.
VARIANTS = (
    {"num_attention_heads": 15, "num_key_value_heads": 15, "hidden_size": 45},
    {"num_attention_heads": 20, "num_key_value_heads": 2, "hidden_size": 40},
)

FAMILIES = [
    Family(
        name="llama",
        config=tiny("llama", attention_bias=True, mlp_bias=True),
        variants=(*VARIANTS, {"tie_word_embeddings": True}),
        local=HEADS,
    ),
    Family(name="mistral", config=tiny("mistral"), variants=VARIANTS, local=HEADS),
    Family(name="qwen2", config=tiny("qwen2"), variants=VARIANTS, local=HEADS),
    Family(name="qwen3", config=tiny("qwen3"), variants=VARIANTS, local=HEADS),
]
