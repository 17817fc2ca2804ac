"""Where engines place tensors otherwise than recipes do, and why ranks compute with both."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """A difference that is known: of which engine, families and tensors, and why it is there."""

    engine: str
    families: str
    patterns: tuple[str, ...]
    reason: str


VOCABULARY = (
    "*embed_tokens.weight",
    "*word_embeddings.weight",
    "*wte.weight",
    "*embeddings.weight",
    "*embed_in.weight",
    "embed_out.weight",
    "*lm_head.weight",
    "*lm_head.bias",
)
KNOWN = (
    Known("vllm", "*", VOCABULARY, "pads the whole vocabulary to a multiple of 64, then divides"),
    Known("vllm", "gpt-oss", ("*down_proj_bias",), "the first rank alone adds the bias"),
    Known("vllm", "olm*", ("*[qk]_norm.weight",), "whole: a rank takes its part when it computes"),
    Known("vllm", "*", ("*model.norm.weight", "*ln_f.*", "*wpe.weight"), "every stage has it"),
    *(
        Known(
            "vllm",
            family,
            ("*shared_expert*",),
            "whole where experts are over replicas: ranks share the tokens, not the expert",
        )
        for family in ("deepseek-v3", "llama4")
    ),
    *(
        Known("transformers", family, (pattern,), "gathers the output, so any cut will do")
        for family, pattern in (
            ("glm*", "*gate_up_proj.weight"),
            ("phi3", "*gate_up_proj.weight"),
            ("phi3", "*qkv_proj.weight"),
            ("qwen3_*", "*linear_attn.*"),
        )
    ),
)
