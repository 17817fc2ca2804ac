"""Encoders: BERT and its kin."""

from __future__ import annotations

from typing import Any

from ..family import Family, make_tokens
from ..heads import share_heads

BERT_LOCAL = {
    "intermediate_size": ("*layer.0.intermediate.dense.weight", 0),
    "vocab_size": ("*word_embeddings.weight", 0),
}
BERT_HEADS = share_heads("*attention.self", ("query", "key", "value"), "^.output.dense")


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config with the keys of BERT's. The sizes are odd, but for what must be even."""
    return {
        "model_type": model_type,
        "vocab_size": 61,
        "hidden_size": 36,
        "intermediate_size": 43,
        "num_hidden_layers": 3,
        "num_attention_heads": 12,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        **changes,
    }


def make_tokens_and_states(config: Any, generator: Any) -> dict[str, Any]:
    """Tokens of a decoder, and what an encoder made of others."""
    import torch

    states = torch.randn(2, 5, config.hidden_size, generator=generator, dtype=torch.float64)
    return {**make_tokens(config, generator), "encoder_hidden_states": states}


# Heads that tp=3 and tp=5 divide.
MORE_HEADS = {"num_attention_heads": 15, "hidden_size": 45}
UNTIED = {"tie_word_embeddings": False}

FAMILIES = [
    *(
        Family(
            name=name,
            config=tiny(name),
            variants=(MORE_HEADS, UNTIED),
            auto="AutoModelForMaskedLM",
            local=BERT_LOCAL,
            prepare=BERT_HEADS,
        )
        for name in ("bert", "roberta", "xlm-roberta", "camembert")
    ),
    Family(
        name="bert-decoder",
        config=tiny("bert", is_decoder=True, add_cross_attention=True),
        variants=(MORE_HEADS,),
        auto="AutoModelForCausalLM",
        local=BERT_LOCAL,
        inputs=make_tokens_and_states,
        prepare=BERT_HEADS,
    ),
    Family(
        name="bert-classifier",
        config=tiny("bert"),
        variants=(MORE_HEADS,),
        auto="AutoModelForSequenceClassification",
        local=BERT_LOCAL,
        prepare=BERT_HEADS,
    ),
    Family(
        name="electra",
        config=tiny("electra", embedding_size=20),
        variants=(MORE_HEADS, UNTIED),
        auto="AutoModelForMaskedLM",
        local=BERT_LOCAL,
        prepare=BERT_HEADS,
    ),
    Family(
        name="electra-discriminator",
        config=tiny("electra", embedding_size=36),
        auto="AutoModelForPreTraining",
        local=BERT_LOCAL,
        prepare=BERT_HEADS,
    ),
    Family(
        name="distilbert",
        config={
            "model_type": "distilbert",
            "vocab_size": 61,
            "dim": 36,
            "hidden_dim": 43,
            "n_layers": 3,
            "n_heads": 12,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        },
        variants=({"n_heads": 15, "dim": 45}, UNTIED),
        auto="AutoModelForMaskedLM",
        local={
            "hidden_dim": ("*layer.0.ffn.lin1.weight", 0),
            "vocab_size": ("*word_embeddings.weight", 0),
        },
        prepare=share_heads("*layer.*.attention", ("q_lin", "k_lin", "v_lin"), "out_lin"),
    ),
    *(
        Family(
            name=f"deberta-v2{kind}",
            config=tiny(
                "deberta-v2",
                relative_attention=True,
                position_buckets=5,
                pos_att_type=["p2c", "c2p"],
                norm_rel_ebd="layer_norm",
                share_att_key=shared,
                conv_kernel_size=3,
                position_biased_input=False,
                attention_head_size=head,
            ),
            variants=({"num_attention_heads": 15, "hidden_size": 45},),
            auto="AutoModelForMaskedLM",
            local={**BERT_LOCAL},
            read=("*encoder.rel_embeddings",),
            prepare=share_heads(
                "*attention.self",
                ("query_proj", "key_proj", "value_proj", *positions),
                "^.output.dense",
            ),
        )
        for kind, shared, head, positions in (
            ("", True, 3, ()),
            ("-own-positions", False, 3, ("pos_query_proj", "pos_key_proj")),
        )
    ),
    Family(
        name="modernbert",
        config=tiny(
            "modernbert",
            attention_bias=True,
            mlp_bias=True,
            norm_bias=True,
            hidden_size=48,
            local_attention=4,
            global_attn_every_n_layers=2,
        ),
        variants=({"num_attention_heads": 15, "hidden_size": 60}, UNTIED),
        auto="AutoModelForMaskedLM",
        local={
            "intermediate_size": ("*layers.0.mlp.Wo.weight", 1),
            "vocab_size": ("*tok_embeddings.weight", 0),
        },
        prepare=share_heads("*layers.*.attn", ("Wqkv",), "Wo", blocks=3),
    ),
]
