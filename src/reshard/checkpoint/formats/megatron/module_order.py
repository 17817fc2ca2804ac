"""The order of Megatron's modules, in which its optimizers keep parameters without names.

    embedding, decoder.layers.0, ..., decoder.final_layernorm, output_layer

In a layer the order is that in which its modules are made: the norm in front, attention with its
output before queries, keys and values, the norm behind, the layers of the MLP or the experts.
Transformer Engine has a norm inside of the layer behind it, before its weight; the local
implementation has it in front. Grouped experts have all first layers before all second ones.

Source: the constructors of Megatron-core 0.16's GPT models.
"""

from __future__ import annotations

import re

_TOP = ("embedding.word_embeddings.", "embedding.position_embeddings.", "decoder.layers.")
_BEHIND = ("decoder.final_layernorm.", "output_layer.")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")
_INNER = (
    "input_layernorm.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
    "mlp.experts.",
    "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
    "mlp.shared_experts.gate_weight",
)
_LAST = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
_INSIDE = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}

OrderKey = tuple[int, ...]


def order_key(name: str, *, is_local: bool, is_grouped: bool = False) -> OrderKey | None:
    """What sorts parameters of the whole model; None for one whose place is not known.

    >>> names = ["output_layer.weight", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    ...          "decoder.layers.0.self_attention.linear_proj.weight"]
    >>> sorted(names, key=lambda name: order_key(name, is_local=True))[0]
    'decoder.layers.0.self_attention.linear_proj.weight'
    """
    match = _LAYER.match(name)
    if match is None:
        tops = (*_TOP, *_BEHIND)
        place = next((n for n, top in enumerate(tops) if name.startswith(top)), None)
        return None if place is None else (place, 0, *_last(name))
    inner = match[2]
    if is_local:
        for inside, norm in _INSIDE.items():
            if inner.startswith(inside):
                inner = norm + inner[len(inside) :]
    place = next((n for n, part in enumerate(_INNER) if inner.startswith(part)), None)
    if place is None:
        return None
    expert = _EXPERT.match(inner)
    if expert is not None:
        layer = int(".linear_fc2." in inner)
        number = int(expert[1])
        which = (layer, number) if is_grouped else (number, layer)
        return (2, int(match[1]), place, *which, *_last(inner))
    return (2, int(match[1]), place, *_last(inner))


def _last(name: str) -> OrderKey:
    """The place of a parameter among those of one module."""
    last = name.rpartition(".")[2]
    return (_LAST.index(last),) if last in _LAST else (len(_LAST),)
