"""Decoders whose modules take the sizes of heads from the whole width."""

from __future__ import annotations

from typing import Any

from ..family import Family, make_tokens
from .dense import HEAD_WIDTH, NARROW, WIDTHS, length, narrow, share_of_heads

SIZES = {"vocab_size": 61, "max_position_embeddings": 64}


def make_padded_tokens(config: Any, generator: Any) -> dict[str, Any]:
    """Tokens with an attention mask, which Bloom makes its biases of."""
    import torch

    inputs = make_tokens(config, generator)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, :2] = 0
    return inputs


def share_slopes(rank: Any) -> None:
    """Every head has a bias of its own, by its number in the whole model."""
    columns = rank.indices("transformer.h.0.self_attention.dense.weight", 1)
    heads = rank.whole.n_head
    width = rank.whole.hidden_size // heads
    numbers = columns[::width] // width
    for _, module in rank.modules("transformer"):
        build = module.build_alibi_tensor

        def forward(mask: Any, num_heads: int, dtype: Any, build: Any = build) -> Any:
            whole = build(mask, heads, dtype)
            whole = whole.reshape(mask.shape[0], heads, *whole.shape[1:])
            return whole[:, numbers].flatten(0, 1)

        module.build_alibi_tensor = forward
    share_of_heads("*.self_attention", "dense.weight", 1, "num_heads")(rank)


def share_of_key_values(rank: Any) -> None:
    share_of_heads("*.self_attn", "q_proj.weight", 0, "num_heads")(rank)
    share_of_heads("*.self_attn", "k_proj.weight", 0, "num_key_value_heads")(rank)
    for _, module in rank.modules("*.self_attn"):
        module.num_key_value_groups = module.num_heads // module.num_key_value_heads


def share_of_bigcode_heads(rank: Any) -> None:
    keys = ["embed_dim", "num_heads"] + ["num_key_value_groups"] * rank.whole.multi_query
    share_of_heads("*.attn", "c_proj.weight", 1, *keys)(rank)


FAMILIES = [
    Family(
        name="gpt_bigcode",
        config={
            "model_type": "gpt_bigcode",
            "vocab_size": 61,
            "n_embd": 60,
            "n_head": 12,
            "n_layer": 3,
            "n_inner": 43,
            "n_positions": 32,
        },
        variants=({"n_head": 15}, {"multi_query": False}, {"tie_word_embeddings": False}),
        local={"n_inner": length("h.0.mlp.c_fc.weight", 0), "vocab_size": ("*wte.weight", 0)},
        sized_by_shard=("*.attn.c_attn.*", "*.attn.c_proj.weight"),
        prepare=share_of_bigcode_heads,
    ),
    Family(
        name="bloom",
        config={
            "model_type": "bloom",
            "vocab_size": 61,
            "hidden_size": 60,
            "n_head": 12,
            "n_layer": 3,
        },
        variants=({"n_head": 15}, {"tie_word_embeddings": False}),
        local={"vocab_size": ("*word_embeddings.weight", 0)},
        inputs=make_padded_tokens,
        sized_by_shard=(
            "*.query_key_value.*",
            "*.self_attention.dense.weight",
            "*.dense_h_to_4h.*",
            "*.dense_4h_to_h.weight",
        ),
        prepare=share_slopes,
    ),
    Family(
        name="opt",
        config={
            "model_type": "opt",
            "hidden_size": 60,
            "ffn_dim": 43,
            "num_attention_heads": 12,
            "num_hidden_layers": 3,
            "word_embed_proj_dim": 60,
            "pad_token_id": None,
            **SIZES,
        },
        variants=(
            {"num_attention_heads": 15, "word_embed_proj_dim": 37, "do_layer_norm_before": False},
            {"tie_word_embeddings": False},
        ),
        local={"ffn_dim": ("*layers.0.fc1.weight", 0), "vocab_size": ("*embed_tokens.weight", 0)},
        sized_by_shard=("*.self_attn.[qkv]_proj.*", "*.self_attn.out_proj.weight"),
        prepare=share_of_heads("*.self_attn", "out_proj.weight", 1, "num_heads"),
    ),
    Family(
        name="phi",
        config=narrow("phi", partial_rotary_factor=0.5),
        variants=(*NARROW, {"tie_word_embeddings": True}),
        local={
            **HEAD_WIDTH,
            "num_attention_heads": ("*layers.0.self_attn.q_proj.weight", 0),
            "num_key_value_heads": ("*layers.0.self_attn.k_proj.weight", 0),
            "intermediate_size": ("*layers.0.mlp.fc1.weight", 0),
            "vocab_size": ("*embed_tokens.weight", 0),
        },
    ),
    Family(
        name="stablelm",
        config=narrow("stablelm", use_qkv_bias=True, partial_rotary_factor=0.5),
        variants=(*NARROW, {"use_parallel_residual": True}),
        local=WIDTHS,
        sized_by_shard=("*.self_attn.[qkv]_proj.*", "*.self_attn.o_proj.weight"),
        prepare=share_of_key_values,
    ),
]
