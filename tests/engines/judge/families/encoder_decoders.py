"""Encoder-decoders: T5, BART, Whisper and their kin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..family import Family
from ..heads import in_turn, share_heads
from ..modules import RankModule


def make_two_texts(config: Any, generator: Any) -> dict[str, Any]:
    """What is read, and what is said so far."""

    def make(length: int) -> Any:
        return torch.randint(3, config.vocab_size, (2, length), generator=generator)

    return {"input_ids": make(7), "decoder_input_ids": make(5)}


def make_sound(config: Any, generator: Any) -> dict[str, Any]:
    """A spectrogram, and what is said so far."""
    length = 2 * config.max_source_positions
    sound = torch.randn(2, config.num_mel_bins, length, generator=generator, dtype=torch.float64)
    said = torch.randint(3, config.vocab_size, (2, 5), generator=generator)
    return {"input_features": sound, "decoder_input_ids": said}


def tiny_t5(model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": 61,
        "d_model": 35,
        "d_kv": 3,
        "d_ff": 43,
        "num_layers": 3,
        "num_decoder_layers": 4,
        "num_heads": 12,
        "relative_attention_num_buckets": 9,
        "relative_attention_max_distance": 6,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        **changes,
    }


T5_LOCAL = {
    "num_heads": ("*encoder.block.0.layer.0.SelfAttention.q.weight", 0),
    "d_ff": ("*encoder.block.0.layer.1.DenseReluDense.wo.weight", 1),
    "vocab_size": ("shared.weight", 0),
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def tiny_bart(model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": 61,
        "d_model": 60,
        "encoder_layers": 3,
        "decoder_layers": 4,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 43,
        "decoder_ffn_dim": 41,
        "max_position_embeddings": 32,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
        **changes,
    }


# Heads that tp=3 and tp=5 divide; different ones on the two sides.
BART_VARIANTS: tuple[Mapping[str, Any], ...] = (
    {"encoder_attention_heads": 15, "decoder_attention_heads": 30},
)
BART_LOCAL = {
    "encoder_ffn_dim": ("*encoder.layers.0.fc1.weight", 0),
    "decoder_ffn_dim": ("*decoder.layers.0.fc1.weight", 0),
}
BART_HEADS = share_heads("*layers.*_attn", ("q_proj", "k_proj", "v_proj"), "out_proj")


def gather_behind_the_bias(rank: RankModule) -> None:
    """A rank adds its part of the logits' bias to its logits: all are put together behind it."""
    vars(rank.model.lm_head).pop("forward", None)

    def gather(model: Any, given: Any, found: Any) -> Any:
        weight = rank.names[id(model.lm_head.weight)]
        found.logits = rank.put_side_by_side("logits", found.logits, weight, 0)
        return found

    rank.model.register_forward_hook(gather)


FAMILIES = [
    *(
        Family(
            name=name,
            config=tiny_t5(name),
            variants=({"num_heads": 15}, GATED),
            auto="AutoModelForSeq2SeqLM",
            local=T5_LOCAL,
            inputs=make_two_texts,
            stacks=("decoder",),
            own=("*relative_attention_bias",),
        )
        for name in ("t5", "mt5", "umt5")
    ),
    Family(
        name="bart",
        config=tiny_bart("bart"),
        variants=BART_VARIANTS,
        auto="AutoModelForSeq2SeqLM",
        local={**BART_LOCAL, "vocab_size": ("model.shared.weight", 0)},
        inputs=make_two_texts,
        stacks=("model.decoder",),
        prepare=in_turn(BART_HEADS, gather_behind_the_bias),
    ),
    Family(
        name="mbart",
        config=tiny_bart("mbart"),
        variants=BART_VARIANTS,
        auto="AutoModelForSeq2SeqLM",
        local={**BART_LOCAL, "vocab_size": ("model.shared.weight", 0)},
        inputs=make_two_texts,
        stacks=("model.decoder",),
        prepare=in_turn(BART_HEADS, gather_behind_the_bias),
    ),
    Family(
        name="whisper",
        config=tiny_bart(
            "whisper", num_mel_bins=8, max_source_positions=10, max_target_positions=16
        ),
        variants=(*BART_VARIANTS, {"tie_word_embeddings": False}),
        auto="AutoModelForSpeechSeq2Seq",
        local={**BART_LOCAL, "vocab_size": ("model.decoder.embed_tokens.weight", 0)},
        inputs=make_sound,
        stacks=("model.decoder",),
        prepare=BART_HEADS,
    ),
]
