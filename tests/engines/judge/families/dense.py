"""Dense decoders."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..family import EXPERTS, Family

WIDTHS = {
    "intermediate_size": ("*layers.0.mlp.down_proj.weight", 1),
    "vocab_size": ("*embed_tokens.weight", 0),
}
# The keys of Llama's config that a rank has a share of.
HEADS = {
    "num_attention_heads": ("*layers.0.self_attn.q_proj.weight", 0),
    "num_key_value_heads": ("*layers.0.self_attn.k_proj.weight", 0),
    **WIDTHS,
}


def length(suffix: str, dimension: int) -> Any:
    """The length of a rank's parameter, for a key that the whole model's config may leave out."""
    return lambda shapes, whole: next(
        shape[dimension] for name, shape in shapes.items() if name.endswith(suffix)
    )


# Of configs that leave it out: a rank has the whole model's, whatever its number of heads.
HEAD_WIDTH = {"head_dim": lambda shapes, whole: whole.hidden_size // whole.num_attention_heads}


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


def narrow(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config that leaves the width of a head to be found."""
    found = tiny(model_type, hidden_size=48, **changes)
    del found["head_dim"]
    return found


# Key/value heads that tp=3 and tp=5 divide; and fewer than ranks, so that several hold one.
VARIANTS = (
    {"num_attention_heads": 15, "num_key_value_heads": 15, "hidden_size": 45},
    {"num_attention_heads": 20, "num_key_value_heads": 2, "hidden_size": 40},
)
NARROW = (
    {"num_attention_heads": 15, "num_key_value_heads": 15, "hidden_size": 60},
    {"num_attention_heads": 20, "num_key_value_heads": 2, "hidden_size": 80},
)
TIED = {"tie_word_embeddings": True}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
NO_EMBEDDING = "the plan cuts the output layer and no embedding; here both are cut"


def share_of_heads(pattern: str, weight: str, dimension: int, *keys: str) -> Any:
    """Tell attention modules, which take their sizes from the whole width, a rank's heads.

    The rank's share is that of a dimension of its parameter `weight`.
    """

    def prepare(rank: Any) -> None:
        for name, module in rank.modules(pattern):
            parameter = f"{name}.{weight}"
            length = rank.cut.assignment.layouts[parameter].shape[dimension]
            here = len(rank.indices(parameter, dimension))
            for key in keys:
                setattr(module, key, getattr(module, key) * here // length)

    return prepare


def set_falcon_heads(rank: Any) -> None:
    keys = ["num_heads"]
    if rank.whole.new_decoder_architecture or not rank.whole.multi_query:
        keys.append("num_kv_heads")
    share_of_heads("*.self_attention", "dense.weight", 1, *keys)(rank)


def share_of_full_heads(shapes: Any, whole: Any) -> Any:
    """Gemma 4's settings by layer: the key/value heads of layers with full attention."""
    found = {}
    for key, values in whole.to_dict()["per_layer_config"].items():
        rows = shapes.get(f"model.layers.{key}.self_attn.k_proj.weight", (0,))[0]
        found[int(key)] = dict(values)
        if "num_key_value_heads" in values:
            found[int(key)]["num_key_value_heads"] = rows // values["head_dim"]
    return found


def share_gemma_experts(rank: Any) -> None:
    from ..experts import share_experts

    share_experts(rank, "*.experts")


def llama_like(name: str, **changes: Any) -> Family:
    """A family whose config has the keys of Llama's, with the width of a head."""
    return Family(
        name=name,
        config=tiny(changes.pop("model_type", name), **changes),
        variants=(*VARIANTS, {"tie_word_embeddings": not changes.get("tie_word_embeddings")}),
        local=HEADS,
    )


GEMMA4 = Family(
    name="gemma4",
    config=tiny(
        "gemma4_text",
        num_hidden_layers=4,
        layer_types=LAYER_TYPES[:2] * 2,
        tie_word_embeddings=True,
        sliding_window=4,
        global_head_dim=8,
        vocab_size_per_layer_input=61,
        hidden_size_per_layer_input=5,
    ),
    variants=(
        {"num_attention_heads": 15, "num_key_value_heads": 5, "hidden_size_per_layer_input": 0},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
        {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "intermediate_size": 44},
    ),
    local={
        **HEADS,
        "vocab_size_per_layer_input": ("*embed_tokens_per_layer.weight", 0),
        "per_layer_config": share_of_full_heads,
    },
    differs={"*embed_tokens_per_layer.weight": "the plan names no embedding of the layers"},
)

FAMILIES = [
    llama_like("llama", attention_bias=True, mlp_bias=True),
    llama_like("arcee"),
    llama_like("cwm", layer_types=LAYER_TYPES, sliding_window=4),
    Family(
        name="helium",
        config=narrow("helium", attention_bias=True) | {"head_dim": 4},
        variants=NARROW,
        local=HEADS,
        sized_by_shard=("*.o_proj.weight",),
    ),
    llama_like("seed_oss", attention_bias=True, attention_out_bias=True),
    llama_like("internlm3", qkv_bias=True, bias=True),
    llama_like("iquestcoder"),
    llama_like("exaone4", layer_types=LAYER_TYPES, sliding_window=4),
    llama_like("hunyuan", model_type="hunyuan_v1_dense"),
    llama_like("apertus"),
    llama_like("jais2", attention_bias=True, mlp_bias=True),
    llama_like(
        "vaultgemma",
        tie_word_embeddings=True,
        sliding_window=4,
        layer_types=LAYER_TYPES,
        query_pre_attn_scalar=6,
    ),
    llama_like("mistral", sliding_window=4),
    llama_like("ministral", sliding_window=4, layer_types=LAYER_TYPES),
    llama_like("ministral3"),
    llama_like("qwen3"),
    llama_like("gemma", tie_word_embeddings=True),
    llama_like(
        "gemma2",
        tie_word_embeddings=True,
        sliding_window=4,
        layer_types=LAYER_TYPES,
        query_pre_attn_scalar=6,
    ),
    llama_like(
        "gemma3",
        model_type="gemma3_text",
        tie_word_embeddings=True,
        sliding_window=4,
        layer_types=LAYER_TYPES,
        query_pre_attn_scalar=6,
    ),
    GEMMA4,
    dataclasses.replace(
        GEMMA4,
        name="gemma4_unified",
        config={**GEMMA4.config, "model_type": "gemma4_unified_text"},
        differs={},
    ),
    Family(
        name="gemma4-experts",
        config=tiny(
            "gemma4_text",
            num_hidden_layers=4,
            layer_types=LAYER_TYPES[:2] * 2,
            tie_word_embeddings=True,
            sliding_window=4,
            global_head_dim=8,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=7,
            top_k_experts=3,
            moe_intermediate_size=13,
        ),
        local={
            **HEADS,
            "num_experts": ("*layers.0.experts.down_proj", 0),
            "moe_intermediate_size": ("*layers.0.experts.down_proj", 2),
        },
        variants=VARIANTS[:1],
        whole={"num_experts": ("*.router",)},
        prepare=share_gemma_experts,
        parallelisms=EXPERTS,
    ),
    llama_like("ernie4_5", tie_word_embeddings=True, use_bias=True),
    llama_like("nemotron", attention_bias=True, mlp_bias=True),
    Family(
        name="qwen2",
        config=narrow("qwen2"),
        variants=(*NARROW, TIED),
        local=HEADS | HEAD_WIDTH,
    ),
    Family(
        name="olmo",
        config=narrow("olmo", clip_qkv=0.8),
        variants=NARROW,
        local=HEADS | HEAD_WIDTH,
    ),
    Family(
        name="granite",
        config=narrow(
            "granite",
            attention_bias=True,
            mlp_bias=True,
            embedding_multiplier=3.0,
            residual_multiplier=0.7,
            attention_multiplier=0.4,
            logits_scaling=2.0,
        ),
        variants=(*NARROW, TIED),
        local=HEADS | HEAD_WIDTH,
    ),
    Family(
        name="smollm3",
        config=narrow("smollm3", tie_word_embeddings=True, no_rope_layers=[1, 0, 1]),
        variants=(*NARROW, {"tie_word_embeddings": False}),
        local=HEADS | HEAD_WIDTH,
    ),
    Family(
        name="olmo2",
        config=narrow("olmo2"),
        variants=NARROW,
        local=HEADS | HEAD_WIDTH,
        wide_norms=("*.q_norm", "*.k_norm"),
        differs={"*_norm.weight": "the plan gathers queries and keys; here their norms are cut"},
    ),
    Family(
        name="olmo3",
        config=narrow("olmo3", sliding_window=4, layer_types=LAYER_TYPES),
        variants=NARROW,
        local=HEADS | HEAD_WIDTH,
        wide_norms=("*.q_norm", "*.k_norm"),
        differs={"*_norm.weight": "the plan gathers queries and keys; here their norms are cut"},
    ),
    Family(
        name="cohere",
        config=narrow("cohere", tie_word_embeddings=True, use_qk_norm=True, logit_scale=0.5),
        differs={"*_norm.weight": "the plan leaves these norms of every head whole"},
        variants=NARROW,
        local=HEADS | HEAD_WIDTH,
    ),
    Family(
        name="cohere2",
        config=narrow(
            "cohere2", tie_word_embeddings=True, sliding_window=4, layer_types=LAYER_TYPES
        ),
        variants=NARROW,
        local=HEADS | HEAD_WIDTH,
    ),
    Family(
        name="starcoder2",
        config=narrow("starcoder2", tie_word_embeddings=True, use_bias=True, sliding_window=4),
        variants=(*NARROW, {"tie_word_embeddings": False, "use_bias": False}),
        local={**HEADS, **HEAD_WIDTH, "intermediate_size": ("*layers.0.mlp.c_fc.weight", 0)},
    ),
    Family(
        name="phi3",
        config=narrow("phi3", sliding_window=4),
        # Phi-4 has 40 and 10 heads.
        variants=(
            *NARROW,
            {"num_attention_heads": 40, "num_key_value_heads": 10, "hidden_size": 80},
        ),
        local={
            **HEAD_WIDTH,
            **WIDTHS,
            "num_attention_heads": ("*layers.0.self_attn.o_proj.weight", 1),
            "num_key_value_heads": lambda shapes, whole: (
                (
                    shapes["model.layers.0.self_attn.qkv_proj.weight"][0]
                    - shapes["model.layers.0.self_attn.o_proj.weight"][1]
                )
                // (2 * (whole.hidden_size // whole.num_attention_heads))
            ),
        },
    ),
    Family(
        name="glm",
        config=tiny("glm", attention_bias=True),
        variants=VARIANTS,
        local=HEADS,
    ),
    Family(
        name="glm4",
        config=tiny("glm4", attention_bias=True),
        variants=VARIANTS,
        local=HEADS,
    ),
    Family(
        name="gpt2",
        config={
            "model_type": "gpt2",
            "vocab_size": 61,
            "n_embd": 60,
            "n_head": 12,
            "n_layer": 3,
            "n_inner": 43,
            "n_positions": 32,
        },
        variants=({"n_head": 15}, {"n_inner": None}, {"tie_word_embeddings": False}),
        local={"n_inner": length("h.0.mlp.c_fc.weight", 1), "vocab_size": ("*wte.weight", 0)},
        sized_by_shard=("*.attn.c_attn.*", "*.attn.c_proj.weight"),
        prepare=share_of_heads("*.attn", "c_proj.weight", 0, "split_size", "num_heads"),
    ),
    Family(
        name="gpt_neox",
        config={
            "model_type": "gpt_neox",
            "vocab_size": 61,
            "hidden_size": 120,
            "num_attention_heads": 12,
            "intermediate_size": 43,
            "num_hidden_layers": 3,
            "max_position_embeddings": 64,
        },
        variants=(
            {"num_attention_heads": 15, "use_parallel_residual": False},
            {"tie_word_embeddings": True},
        ),
        local={
            "intermediate_size": ("*layers.0.mlp.dense_4h_to_h.weight", 1),
            "vocab_size": ("*embed_in.weight", 0),
        },
        sized_by_shard=("*.attention.query_key_value.*", "*.attention.dense.weight"),
        differs={"*embed_in.weight": NO_EMBEDDING},
    ),
    Family(
        name="falcon",
        config={
            "model_type": "falcon",
            "vocab_size": 61,
            "hidden_size": 48,
            "num_attention_heads": 12,
            "num_hidden_layers": 3,
            "ffn_hidden_size": 43,
            "bias": True,
        },
        variants=(
            {"new_decoder_architecture": True, "num_kv_heads": 4},
            {"new_decoder_architecture": True, "num_kv_heads": 6, "bias": False},
            {"multi_query": False, "parallel_attn": False},
            {"num_attention_heads": 15, "hidden_size": 60, "tie_word_embeddings": False},
        ),
        local={
            "ffn_hidden_size": ("*h.0.mlp.dense_4h_to_h.weight", 1),
            "vocab_size": ("*word_embeddings.weight", 0),
        },
        sized_by_shard=("*.query_key_value.*", "*.self_attention.dense.weight"),
        prepare=set_falcon_heads,
    ),
]
