"""Parameters of published models, by hand from their files, configurations and reports.

Each list is made from the numbers of a config.json; the counts of parameters that the models'
authors publish are checked in `test_shipped_recipes`. Elements are bytes unless `itemsizes`
says otherwise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

Shapes = dict[str, tuple[int, ...]]
Config = dict[str, object]


class PublishedModel(NamedTuple):
    """A model's config.json, as far as recipes read it, and its parameters."""

    config: Config
    shapes: Shapes

    @property
    def parameters(self) -> int:
        """Numbers in the model, buffers such as position_ids included."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def _mini_lm() -> PublishedModel:
    """sentence-transformers/all-MiniLM-L6-v2, in the order of its safetensors header."""
    norm = (384,)
    shapes: Shapes = {
        "embeddings.position_ids": (1, 512),
        "embeddings.LayerNorm.bias": norm,
        "embeddings.LayerNorm.weight": norm,
        "embeddings.position_embeddings.weight": (512, 384),
        "embeddings.token_type_embeddings.weight": (2, 384),
        "embeddings.word_embeddings.weight": (30522, 384),
    }
    for layer in range(6):
        at = f"encoder.layer.{layer}"
        shapes |= {
            f"{at}.attention.output.LayerNorm.bias": norm,
            f"{at}.attention.output.LayerNorm.weight": norm,
            f"{at}.attention.output.dense.bias": (384,),
            f"{at}.attention.output.dense.weight": (384, 384),
            f"{at}.attention.self.key.bias": (384,),
            f"{at}.attention.self.key.weight": (384, 384),
            f"{at}.attention.self.query.bias": (384,),
            f"{at}.attention.self.query.weight": (384, 384),
            f"{at}.attention.self.value.bias": (384,),
            f"{at}.attention.self.value.weight": (384, 384),
            f"{at}.intermediate.dense.bias": (1536,),
            f"{at}.intermediate.dense.weight": (1536, 384),
            f"{at}.output.LayerNorm.bias": norm,
            f"{at}.output.LayerNorm.weight": norm,
            f"{at}.output.dense.bias": (384,),
            f"{at}.output.dense.weight": (384, 1536),
        }
    shapes |= {"pooler.dense.bias": (384,), "pooler.dense.weight": (384, 384)}
    config: Config = {"model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 6}
    return PublishedModel(config, shapes)


def _gpt2(layers: int, hidden: int, heads: int, positions: int, vocabulary: int) -> PublishedModel:
    """The files of openai-community: no prefix, no output layer, the causal mask kept."""
    shapes: Shapes = {"wte.weight": (vocabulary, hidden), "wpe.weight": (positions, hidden)}
    for layer in range(layers):
        at = f"h.{layer}"
        shapes |= {
            f"{at}.ln_1.weight": (hidden,),
            f"{at}.ln_1.bias": (hidden,),
            f"{at}.attn.bias": (1, 1, positions, positions),
            f"{at}.attn.c_attn.weight": (hidden, 3 * hidden),
            f"{at}.attn.c_attn.bias": (3 * hidden,),
            f"{at}.attn.c_proj.weight": (hidden, hidden),
            f"{at}.attn.c_proj.bias": (hidden,),
            f"{at}.ln_2.weight": (hidden,),
            f"{at}.ln_2.bias": (hidden,),
            f"{at}.mlp.c_fc.weight": (hidden, 4 * hidden),
            f"{at}.mlp.c_fc.bias": (4 * hidden,),
            f"{at}.mlp.c_proj.weight": (4 * hidden, hidden),
            f"{at}.mlp.c_proj.bias": (hidden,),
        }
    shapes |= {"ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}
    config: Config = {"model_type": "gpt2", "n_layer": layers, "n_head": heads, "n_embd": hidden}
    return PublishedModel(config, shapes)


def _attention(
    at: str, hidden: int, heads: int, key_value_heads: int, width: int, kind: str
) -> Shapes:
    """Grouped-query attention of one layer, with the norms around and in it."""
    shapes: Shapes = {
        f"{at}.input_layernorm.weight": (hidden,),
        f"{at}.post_attention_layernorm.weight": (hidden,),
        f"{at}.self_attn.k_proj.weight": (key_value_heads * width, hidden),
        f"{at}.self_attn.o_proj.weight": (hidden, heads * width),
        f"{at}.self_attn.q_proj.weight": (heads * width, hidden),
        f"{at}.self_attn.v_proj.weight": (key_value_heads * width, hidden),
    }
    if kind == "qwen2":
        shapes |= {
            f"{at}.self_attn.q_proj.bias": (heads * width,),
            f"{at}.self_attn.k_proj.bias": (key_value_heads * width,),
            f"{at}.self_attn.v_proj.bias": (key_value_heads * width,),
        }
    if kind in ("qwen3", "qwen3_moe"):
        shapes |= {
            f"{at}.self_attn.q_norm.weight": (width,),
            f"{at}.self_attn.k_norm.weight": (width,),
        }
    return shapes


def _feed_forward(at: str, hidden: int, intermediate: int) -> Shapes:
    return {
        f"{at}.down_proj.weight": (hidden, intermediate),
        f"{at}.gate_proj.weight": (intermediate, hidden),
        f"{at}.up_proj.weight": (intermediate, hidden),
    }


def _ends(hidden: int, vocabulary: int, *, is_tied: bool) -> Shapes:
    ends: Shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    return ends if is_tied else ends | {"lm_head.weight": (vocabulary, hidden)}


def _dense(
    kind: str,
    layers: int,
    hidden: int,
    heads: int,
    key_value_heads: int,
    intermediate: int,
    vocabulary: int,
    *,
    head_width: int | None = None,
    is_tied: bool = False,
) -> PublishedModel:
    """Llama and those that are like it."""
    width = head_width or hidden // heads
    shapes = _ends(hidden, vocabulary, is_tied=is_tied)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= _attention(at, hidden, heads, key_value_heads, width, kind)
        shapes |= _feed_forward(f"{at}.mlp", hidden, intermediate)
    config: Config = {
        "model_type": kind,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "tie_word_embeddings": is_tied,
    }
    return PublishedModel(config, shapes)


def _mixtral(
    layers: int,
    hidden: int,
    heads: int,
    key_value_heads: int,
    intermediate: int,
    experts: int,
    vocabulary: int,
) -> PublishedModel:
    shapes = _ends(hidden, vocabulary, is_tied=False)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= _attention(at, hidden, heads, key_value_heads, hidden // heads, "mixtral")
        shapes[f"{at}.block_sparse_moe.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            inside = f"{at}.block_sparse_moe.experts.{expert}"
            shapes |= {
                f"{inside}.w1.weight": (intermediate, hidden),
                f"{inside}.w2.weight": (hidden, intermediate),
                f"{inside}.w3.weight": (intermediate, hidden),
            }
    config: Config = {
        "model_type": "mixtral",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "num_local_experts": experts,
        "intermediate_size": intermediate,
        "tie_word_embeddings": False,
    }
    return PublishedModel(config, shapes)


def _qwen3_moe(
    layers: int,
    hidden: int,
    heads: int,
    key_value_heads: int,
    intermediate: int,
    experts: int,
    vocabulary: int,
) -> PublishedModel:
    shapes = _ends(hidden, vocabulary, is_tied=False)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= _attention(at, hidden, heads, key_value_heads, 128, "qwen3_moe")
        shapes[f"{at}.mlp.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            shapes |= _feed_forward(f"{at}.mlp.experts.{expert}", hidden, intermediate)
    config: Config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "num_experts": experts,
        "moe_intermediate_size": intermediate,
        "tie_word_embeddings": False,
    }
    return PublishedModel(config, shapes)


def _with_scales(shapes: Shapes) -> Shapes:
    """8-bit weights with the scales of their blocks of 128 by 128."""
    found: Shapes = {}
    for name, shape in shapes.items():
        found[name] = shape
        if name.endswith(("_proj.weight", "_with_mqa.weight")):
            found[f"{name}_scale_inv"] = tuple(-(-size // 128) for size in shape)
    return found


def _deepseek_v3(
    layers: int,
    further_layers: int,
    hidden: int,
    heads: int,
    intermediate: int,
    expert_intermediate: int,
    experts: int,
    dense_layers: int,
    vocabulary: int,
) -> PublishedModel:
    """Multi-head latent attention: ranks 1536 and 512, heads of 128 + 64 and values of 128."""
    shapes = _ends(hidden, vocabulary, is_tied=False)
    for layer in range(layers + further_layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.self_attn.kv_a_layernorm.weight": (512,),
            f"{at}.self_attn.q_a_layernorm.weight": (1536,),
        }
        weights: Shapes = {
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (512 + 64, hidden),
            f"{at}.self_attn.kv_b_proj.weight": (heads * (128 + 128), 512),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * 128),
            f"{at}.self_attn.q_a_proj.weight": (1536, hidden),
            f"{at}.self_attn.q_b_proj.weight": (heads * (128 + 64), 1536),
        }
        if layer < dense_layers:
            weights |= _feed_forward(f"{at}.mlp", hidden, intermediate)
        else:
            shapes |= {
                f"{at}.mlp.gate.weight": (experts, hidden),
                f"{at}.mlp.gate.e_score_correction_bias": (experts,),
            }
            weights |= _feed_forward(f"{at}.mlp.shared_experts", hidden, expert_intermediate)
            for expert in range(experts):
                weights |= _feed_forward(f"{at}.mlp.experts.{expert}", hidden, expert_intermediate)
        shapes |= _with_scales(weights)
        if layer >= layers:
            shapes |= {
                f"{at}.embed_tokens.weight": (vocabulary, hidden),
                f"{at}.eh_proj.weight": (hidden, 2 * hidden),
                f"{at}.enorm.weight": (hidden,),
                f"{at}.hnorm.weight": (hidden,),
                f"{at}.shared_head.head.weight": (vocabulary, hidden),
                f"{at}.shared_head.norm.weight": (hidden,),
            }
    config: Config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": further_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": experts,
        "moe_intermediate_size": expert_intermediate,
        "tie_word_embeddings": False,
    }
    return PublishedModel(config, shapes)


MINI_LM = _mini_lm()
GPT2 = _gpt2(12, 768, 12, 1024, 50257)
LLAMA_3_8B = _dense("llama", 32, 4096, 32, 8, 14336, 128256)
LLAMA_3_405B = _dense("llama", 126, 16384, 128, 8, 53248, 128256)
TINY_LLAMA = _dense("llama", 22, 2048, 32, 4, 5632, 32000)
MISTRAL_7B = _dense("mistral", 32, 4096, 32, 8, 14336, 32000)
QWEN2_HALF_B = _dense("qwen2", 24, 896, 14, 2, 4864, 151936, is_tied=True)
QWEN2_7B = _dense("qwen2", 28, 3584, 28, 4, 18944, 152064)
QWEN3_HALF_B = _dense("qwen3", 28, 1024, 16, 8, 3072, 151936, head_width=128, is_tied=True)
QWEN3_8B = _dense("qwen3", 36, 4096, 32, 8, 12288, 151936, head_width=128)
MIXTRAL_8X7B = _mixtral(32, 4096, 32, 8, 14336, 8, 32000)
QWEN3_30B_A3B = _qwen3_moe(48, 2048, 32, 4, 768, 128, 151936)
DEEPSEEK_V3 = _deepseek_v3(61, 1, 7168, 128, 18432, 2048, 256, 3, 129280)
# Of the same widths, so that its rules are those of the whole, and quick to look at.
SHORT_DEEPSEEK_V3 = _deepseek_v3(8, 1, 7168, 128, 18432, 2048, 256, 3, 129280)

MODELS = {
    "bert": MINI_LM,
    "gpt2": GPT2,
    "llama": LLAMA_3_8B,
    "tiny_llama": TINY_LLAMA,
    "mistral": MISTRAL_7B,
    "qwen2_tied": QWEN2_HALF_B,
    "qwen2": QWEN2_7B,
    "qwen3_tied": QWEN3_HALF_B,
    "qwen3": QWEN3_8B,
    "mixtral": MIXTRAL_8X7B,
    "qwen3_moe": QWEN3_30B_A3B,
    "deepseek_v3": DEEPSEEK_V3,
}
