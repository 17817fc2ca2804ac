"""What tensors has a Llama? Names and shapes, as its checkpoints have them."""

from __future__ import annotations

VOCABULARY = 128256


def llama_shapes(
    hidden: int, inner: int, key_value: int, layers: int
) -> dict[str, tuple[int, ...]]:
    """The parameters by name; `key_value` is the width of all key heads together."""
    ends = (VOCABULARY, hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": ends}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.self_attn.k_proj.weight": (key_value, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.v_proj.weight": (key_value, hidden),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": ends}
