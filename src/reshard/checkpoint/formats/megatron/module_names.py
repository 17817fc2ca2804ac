"""Names of Megatron's modules: those of its two implementations of a layer, and of experts.

The local implementation has norms of their own, Transformer Engine has them inside of the layer
behind; `dist_checkpointing` keys both as Transformer Engine does. Experts are named by who computes
them::

    local                               Transformer Engine, torch_dist
    input_layernorm.weight              self_attention.linear_qkv.layer_norm_weight
    pre_mlp_layernorm.weight            mlp.linear_fc1.layer_norm_weight       in dense layers
                                        pre_mlp_layernorm.weight               in layers of experts
    experts.local_experts.3.linear_fc1.weight     experts.linear_fc1.weight3   grouped

Of a Mamba layer `torch_dist` has the parts of two weights (`mixer.in_proj.weight.z`, `.x` and so
on), and ranks' folders the weights; neither is made of the other here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from reshard.checkpoint.formats.torch_files.optimizer_states import split_state_name, state_name
from reshard.errors import RecipeError

_NORM = re.compile(r"^(.*layers\.\d+\.)(input_layernorm|pre_mlp_layernorm)\.(weight|bias)$")
_INSIDE = re.compile(
    r"^(.*layers\.\d+\.)(self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_(weight|bias)$"
)
_BEHIND = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
}
_NORM_OF = {layer: norm for norm, layer in _BEHIND.items()}
_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
_MIXER = re.compile(r"^decoder\.layers\.\d+\.mixer\.(?:in_proj|conv1d)\.(?:weight|bias)(\.\w+)?$")
_SEPARATE = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")


def engine_name(name: str, names: Collection[str]) -> str:
    """A parameter as Transformer Engine's layers and separate experts have it.

    `names` are those of the model: a norm goes into the layer behind it where there is one.

    >>> engine_name("decoder.layers.0.input_layernorm.weight",
    ...             {"decoder.layers.0.self_attention.linear_qkv.weight"})
    'decoder.layers.0.self_attention.linear_qkv.layer_norm_weight'
    """
    inside = _INSIDE.match(name)
    if inside is not None and f"{inside[1]}{inside[2]}.weight" not in names:
        # Layers of experts have no layer behind the norm; the local implementation keys it alike.
        return f"{inside[1]}{_NORM_OF[inside[2]]}.{inside[3]}"
    match = _NORM.match(name)
    if match is not None:
        behind = f"{match[1]}{_BEHIND[match[2]]}"
        if f"{behind}.weight" in names:
            return f"{behind}.layer_norm_{match[3]}"
        return name
    return _GROUPED.sub(r".experts.local_experts.\3.\1.\2", name)


def find_read_names(names: Collection[str]) -> dict[str, str]:
    """Map names of weights and optimizer state to those that a reader of Megatron's files gives.

    Files have one name for the norm of a layer, and one for an expert's weight, by whichever
    implementation of layers they were called before.

    >>> find_read_names(["decoder.layers.0.input_layernorm.weight",
    ...                  "decoder.layers.0.self_attention.linear_qkv.weight"])
    {'decoder.layers.0.input_layernorm.weight': \
'decoder.layers.0.self_attention.linear_qkv.layer_norm_weight'}
    """
    parts = {name: split_state_name(name) or (name, "") for name in names}
    known = {parameter for parameter, _ in parts.values()}
    found = {}
    for name, (parameter, key) in parts.items():
        read = engine_name(parameter, known)
        if read != parameter:
            found[name] = state_name(read, key) if key else read
    return found


def local_name(name: str) -> str:
    """A parameter as the local implementation of a layer has it.

    >>> local_name("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")
    'decoder.layers.0.pre_mlp_layernorm.weight'
    """
    match = _INSIDE.match(name)
    return name if match is None else f"{match[1]}{_NORM_OF[match[2]]}.{match[3]}"


def keyed_name(name: str, *, is_local: bool) -> str:
    """The key of a parameter of `engine_name` in `torch_dist`, by the implementation of layers.

    >>> keyed_name("decoder.layers.0.pre_mlp_layernorm.weight", is_local=True)
    'decoder.layers.0.mlp.linear_fc1.layer_norm_weight'
    """
    match = _NORM.match(name) if is_local else None
    return name if match is None else f"{match[1]}{_BEHIND[match[2]]}.layer_norm_{match[3]}"


def grouped_name(name: str) -> str:
    """An expert's parameter as grouped experts have it.

    >>> grouped_name("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight")
    'decoder.layers.0.mlp.experts.linear_fc1.weight3'
    """
    return _SEPARATE.sub(r".experts.\2.\3\1", name)


def expect_mixers(names: Iterable[str], *, in_parts: bool) -> None:
    """Raise RecipeError for weights of Mamba layers that are not as a format has them.

    `in_parts` is whether it has their parts.
    """
    for name in names:
        match = _MIXER.match(name)
        if match is None or (match[1] is not None) == in_parts:
            continue
        if in_parts:
            raise RecipeError(
                f"{name!r} is a weight of a Mamba layer as folders of ranks have it; torch_dist "
                "has its parts (z, x, B, C, dt), which it is not taken apart into. Load the "
                "folders with Megatron-core and save them as torch_dist"
            )
        raise RecipeError(
            f"{name!r} is a part of a Mamba layer's weight, as torch_dist has it; folders of ranks "
            "have the whole weight, which it is not put together to. Convert to torch-dist"
        )
