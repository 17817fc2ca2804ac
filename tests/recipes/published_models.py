"""Parameters of published models, entered by hand from their files and configurations."""

from __future__ import annotations

import math
from typing import NamedTuple

Shapes = dict[str, tuple[int, ...]]


class PublishedModel(NamedTuple):
    """A model's config.json, as far as recipes read it, and its parameters."""

    config: dict[str, object]
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
    return PublishedModel({"model_type": "bert", "num_attention_heads": 12}, shapes)


def _llama(
    layers: int, hidden: int, heads: int, key_value_heads: int, intermediate: int, vocabulary: int
) -> PublishedModel:
    key_value_rows = hidden // heads * key_value_heads
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.mlp.down_proj.weight": (hidden, intermediate),
            f"{at}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{at}.mlp.up_proj.weight": (intermediate, hidden),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.self_attn.k_proj.weight": (key_value_rows, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.v_proj.weight": (key_value_rows, hidden),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    config: dict[str, object] = {
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
    }
    return PublishedModel(config, shapes)


MINI_LM = _mini_lm()
LLAMA_3_8B = _llama(32, 4096, 32, 8, 14336, 128256)
TINY_LLAMA = _llama(22, 2048, 32, 4, 5632, 32000)
