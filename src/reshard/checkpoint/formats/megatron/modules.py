"""The parameters of Megatron's modules: their names, their order, and how they are sharded.

Names differ between Megatron's two implementations of a layer. The local implementation has
separate norms; Transformer Engine has them inside of the next layer, and `dist_checkpointing` uses
its names for both. Experts are named by the module that computes them (`engine_name`)::

    local                               Transformer Engine, torch_dist
    input_layernorm.weight              self_attention.linear_qkv.layer_norm_weight
    pre_mlp_layernorm.weight            mlp.linear_fc1.layer_norm_weight       in dense layers
                                        pre_mlp_layernorm.weight               in layers of experts
    experts.local_experts.3.linear_fc1.weight     experts.linear_fc1.weight3   grouped

For a Mamba layer `torch_dist` has the parts of two weights (`mixer.in_proj.weight.z`, `.x` and so
on), and ranks' folders have the weights; neither is converted into the other here.

Optimizer state has the key before the parameter's name in `torch_dist`, with a prefix for each
optimizer of a chain (dense parameters, experts)::

    optimizer.state.exp_avg.decoder.final_layernorm.weight
    optimizer.state.fp32_param.decoder.final_layernorm.weight       `param` in other versions
    chained_1.optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight

The formats that are read have `optimizer.state.decoder.final_layernorm.weight.exp_avg`, with
`master` for float32 weights (`split_megatron_name`).

Tensor parallelism shards parameters by their names (`find_cut`)::

    column-parallel   linear_qkv, linear_fc1, linear_q_up_proj, linear_kv_up_proj, output_layer,
                      word_embeddings           rows, and a bias
    row-parallel      linear_proj, linear_fc2   columns; the bias is replicated
    replicated        norms, routers, position_embeddings, linear_kv_down_proj

Each rank has a part of both halves of a gated `linear_fc1` (a stride of 2). Experts have tensor
parallelism of their own.

Optimizers that store parameters without names store them in the order in which modules are
constructed (`order_key`)::

    embedding, decoder.layers.0, ..., decoder.final_layernorm, output_layer

In a layer that is the first norm, attention with its output before queries, keys and values, the
second norm, and the layers of the MLP or the experts. In Transformer Engine a norm is inside of the
next layer, before its weight. Grouped experts have all first layers before all second layers.

Sources: the constructors of Megatron-core 0.16's GPT models, and the `partition_dim` and
`partition_stride` of their parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from reshard.checkpoint.formats.optimizer_states import split_state_name, state_name
from reshard.errors import RecipeError

_NORM = re.compile(r"^(.*layers\.\d+\.)(input_layernorm|pre_mlp_layernorm)\.(weight|bias)$")

_FUSED_NORM = re.compile(
    r"^(.*layers\.\d+\.)(self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_(weight|bias)$"
)

_LAYER_OF_NORM = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
}
_NORM_OF = {layer: norm for norm, layer in _LAYER_OF_NORM.items()}
_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
_BUFFERS = re.compile(r"(?:^|\.)(?:expert_bias|local_tokens_per_expert|inv_freq|_extra_state\d*)$")
_MIXER = re.compile(r"^decoder\.layers\.\d+\.mixer\.(?:in_proj|conv1d)\.(?:weight|bias)(\.\w+)?$")
# An expert that is a module, or a weight among those of grouped experts.
_EXPERT = re.compile(
    r"(.*?\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)(?=\d+$)))(\d+)(|\..*)$"
)
_SEPARATE = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")


def split_layer(name: str) -> tuple[str, int, str] | None:
    """Return what precedes the number of a layer in a name, the number, and the rest.

    >>> split_layer("decoder.layers.3.mlp.linear_fc1.weight")
    ('decoder.layers.', 3, '.mlp.linear_fc1.weight')
    >>> split_layer("decoder.final_layernorm.weight") is None
    True
    """
    match = re.match(r"((?:.*?\.)?layers\.)(\d+)(\..+)$", name)
    return None if match is None else (match[1], int(match[2]), match[3])


def count_layers(names: Iterable[str]) -> dict[str, int]:
    """Return the number of layers of each sequence of layers, by what precedes their numbers.

    >>> count_layers(["decoder.layers.0.mlp.weight", "decoder.layers.3.mlp.weight"])
    {'decoder.layers.': 4}
    """
    counts: dict[str, int] = {}
    for name in names:
        if (layer := split_layer(name)) is not None:
            row, number, _ = layer
            counts[row] = max(counts.get(row, 0), number + 1)
    return counts


def split_expert(name: str) -> tuple[str, int, str] | None:
    """Return what precedes the number of an expert in a name, the number, and the rest.

    >>> split_expert("mlp.experts.local_experts.3.linear_fc1.weight")
    ('mlp.experts.local_experts.', 3, '.linear_fc1.weight')
    >>> split_expert("mlp.experts.linear_fc1.weight3")
    ('mlp.experts.linear_fc1.weight', 3, '')
    """
    match = _EXPERT.match(name)
    return None if match is None else (match[1], int(match[2]), match[3])


def renumber(name: str, first_layer: Callable[[str], int], first_expert: int) -> str:
    """Return a name with the numbers of its layer and expert counted on, as on other ranks.

    `first_layer` returns the number of a rank's first layer, by what precedes the numbers.

    >>> renumber("decoder.layers.1.mlp.experts.linear_fc1.weight0", lambda row: 4, 8)
    'decoder.layers.5.mlp.experts.linear_fc1.weight8'
    """
    if (layer := split_layer(name)) is not None:
        row, number, rest = layer
        name = f"{row}{number + first_layer(row)}{rest}"
    if (expert := split_expert(name)) is not None:
        before, number, rest = expert
        name = f"{before}{number + first_expert}{rest}"
    return name


def engine_name(name: str, names: Collection[str]) -> str:
    """Return a parameter as Transformer Engine's layers and separate experts have it.

    `names` are all names of the model: a norm becomes part of the next layer, if there is one.

    >>> engine_name("decoder.layers.0.input_layernorm.weight",
    ...             {"decoder.layers.0.self_attention.linear_qkv.weight"})
    'decoder.layers.0.self_attention.linear_qkv.layer_norm_weight'
    """
    inside = _FUSED_NORM.match(name)
    if inside is not None and f"{inside[1]}{inside[2]}.weight" not in names:
        # In layers of experts no layer follows the norm; the local implementation uses the same
        # key.
        return f"{inside[1]}{_NORM_OF[inside[2]]}.{inside[3]}"
    match = _NORM.match(name)
    if match is not None:
        layer = f"{match[1]}{_LAYER_OF_NORM[match[2]]}"
        if f"{layer}.weight" in names:
            return f"{layer}.layer_norm_{match[3]}"
        return name
    return _GROUPED.sub(r".experts.local_experts.\3.\1.\2", name)


def find_read_names(names: Collection[str]) -> dict[str, str]:
    """Map names of weights and optimizer state to those that a reader of Megatron's files gives.

    In files, norms and experts' weights have the same names for both implementations of layers.

    >>> find_read_names(["decoder.layers.0.input_layernorm.weight",
    ...                  "decoder.layers.0.self_attention.linear_qkv.weight"])
    {'decoder.layers.0.input_layernorm.weight': \
'decoder.layers.0.self_attention.linear_qkv.layer_norm_weight'}
    """
    parts = {name: split_state_name(name) or (name, "") for name in names}
    parameters = {parameter for parameter, _ in parts.values()}
    result = {}
    for name, (parameter, key) in parts.items():
        read = engine_name(parameter, parameters)
        if read != parameter:
            result[name] = state_name(read, key) if key else read
    return result


def is_expert(name: str) -> bool:
    """Return whether a parameter is an expert's, by its name."""
    return ".local_experts." in name or re.search(r"\.experts\.(?!local)", name) is not None


def is_buffer(name: str) -> bool:
    """Return whether a tensor of a module's state is a buffer, not a parameter, by its name.

    >>> is_buffer("decoder.layers.0.mlp.router.expert_bias")
    True
    """
    return _BUFFERS.search(name) is not None


def local_name(name: str) -> str:
    """Return a parameter as the local implementation of a layer has it.

    >>> local_name("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")
    'decoder.layers.0.pre_mlp_layernorm.weight'
    """
    match = _FUSED_NORM.match(name)
    return name if match is None else f"{match[1]}{_NORM_OF[match[2]]}.{match[3]}"


def keyed_name(name: str, *, is_local: bool) -> str:
    """Return the key of a parameter of `engine_name` in `torch_dist`, by the implementation of
    layers.

    >>> keyed_name("decoder.layers.0.pre_mlp_layernorm.weight", is_local=True)
    'decoder.layers.0.mlp.linear_fc1.layer_norm_weight'
    """
    match = _NORM.match(name) if is_local else None
    return name if match is None else f"{match[1]}{_LAYER_OF_NORM[match[2]]}.layer_norm_{match[3]}"


def grouped_name(name: str) -> str:
    """Return an expert's parameter as grouped experts have it.

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


_MEGATRON = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.([A-Za-z_]\w*)\.(.+)$")

# Keys of float32 weights in different versions.
MASTER_KEYS = ("param", "fp32_param", "master_param")


def split_megatron_name(name: str) -> tuple[str, str] | None:
    """Return the parameter and the key in a name of `torch_dist`, or None for other names.

    >>> split_megatron_name("chained_0.optimizer.state.fp32_param.output_layer.weight")
    ('output_layer.weight', 'master')
    """
    match = _MEGATRON.match(name)
    if match is None:
        return None
    return match[2], common_key(match[1])


def common_key(key: str) -> str:
    """Return the name of a key of Megatron's optimizer in every training format.

    >>> common_key("fp32_param"), common_key("exp_avg")
    ('master', 'exp_avg')
    """
    return "master" if key in MASTER_KEYS else key


def megatron_name(parameter: str, key: str, master: str) -> str:
    """Return the name in `torch_dist`, where weights of 32 bits are called `master`.

    >>> megatron_name("output_layer.weight", "master", "param")
    'optimizer.state.param.output_layer.weight'
    """
    return f"optimizer.state.{master if key == 'master' else key}.{parameter}"


_ROWS = re.compile(
    r"(?:word_embeddings\.weight|output_layer\.(?:weight|bias)|"
    r"linear_(?:qkv|fc1|q_proj|q_up_proj|kv_up_proj)\.(?:weight|bias)\d*)$"
)
_COLUMNS = re.compile(r"linear_(?:proj|fc2)\.weight\d*$")

_WHOLE = re.compile(
    r"(?:norm\w*\.(?:weight|bias)|layer_norm_(?:weight|bias)|linear_(?:proj|fc2)\.bias\d*|"
    r"router\.\w+|position_embeddings\.weight|tokentype_embeddings\.weight|"
    r"linear_kv_down_proj\.\w+|gate_weight|eh_proj\.weight)$"
)
_Q_DOWN = re.compile(r"linear_q_down_proj\.weight$")
_FIRST = re.compile(r"linear_fc1\.(weight|bias)(\d*)$")


# The sharded dimension, or None, and the number of stretches of each part.
ParameterCut = tuple[int | None, int]


def find_cut(
    name: str, shapes: Mapping[str, tuple[int, ...]], q_rank: int | None = None
) -> ParameterCut | None:
    """Return how a parameter is sharded, or None if it is unknown.

    Args:
        name: of the parameter, in the model or on its rank.
        shapes: of the parameters on a rank, by such names.
        q_rank: the rank of compressed queries, if there is one.

    >>> find_cut("mlp.linear_fc1.weight", {"mlp.linear_fc1.weight": (16, 8),
    ...                                    "mlp.linear_fc2.weight": (8, 8)})
    (0, 2)
    """
    first = _FIRST.search(name)
    if first is not None:
        second = f"{name[: first.start()]}linear_fc2.weight{first[2]}"
        # A gated layer has two rows for each column of the next layer.
        is_gated = second in shapes and shapes[name][0] == 2 * shapes[second][1]
        return 0, 2 if is_gated else 1
    if _ROWS.search(name):
        return 0, 1
    if _COLUMNS.search(name):
        return 1, 1
    if _Q_DOWN.search(name) and q_rank is not None:
        return None if shapes[name][0] == q_rank else 0, 1
    return (None, 1) if _WHOLE.search(name) else None


# The layers that pipeline stages share out.
DECODER = "decoder.layers."
_FIRST_MODULES = ("embedding.word_embeddings.", "embedding.position_embeddings.", DECODER)
_LAST_MODULES = ("decoder.final_layernorm.", "output_layer.")
_LAYER_MODULES = (
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
_LAST_PARAMETERS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")

OrderKey = tuple[int, ...]


def order_key(name: str, *, is_local: bool, is_grouped: bool = False) -> OrderKey | None:
    """Return a key that sorts the parameters of a model, or None for an unknown parameter.

    >>> names = ["output_layer.weight", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    ...          "decoder.layers.0.self_attention.linear_proj.weight"]
    >>> sorted(names, key=lambda name: order_key(name, is_local=True))[0]
    'decoder.layers.0.self_attention.linear_proj.weight'
    """
    layer = split_layer(local_name(name) if is_local else name)
    if layer is None or layer[0] != DECODER:
        tops = (*_FIRST_MODULES, *_LAST_MODULES)
        place = next((n for n, top in enumerate(tops) if name.startswith(top)), None)
        return None if place is None else (place, 0, *_order_in_module(name))
    _, number, inner = layer
    place = next((n for n, part in enumerate(_LAYER_MODULES) if inner.startswith(part, 1)), None)
    if place is None:
        return None
    which: OrderKey = ()
    if (expert := split_expert(inner)) is not None:
        which = (expert[1], int(".linear_fc2." in inner))
    # Grouped experts have all first layers before all second layers.
    which = which[::-1] if is_grouped else which
    return (_FIRST_MODULES.index(DECODER), number, place, *which, *_order_in_module(inner))


def sort_by_modules(
    names: Iterable[str], arguments: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return parameters in the order of the modules, unknown names last; and the unknown names.

    `arguments` are Megatron's, which determine the implementation of layers and of experts.
    """
    is_local = arguments.get("transformer_impl") == "local"
    is_grouped = bool(arguments.get("moe_grouped_gemm"))
    keys = {n: order_key(n, is_local=is_local, is_grouped=is_grouped) for n in names}
    # After every known place.
    last = (1 << 30,)
    ordered = sorted(keys, key=lambda name: keys[name] or last)
    return ordered, [name for name, key in keys.items() if key is None]


def _order_in_module(name: str) -> OrderKey:
    """Return a key that sorts the parameters of a module."""
    last = name.rpartition(".")[2]
    return (_LAST_PARAMETERS.index(last),) if last in _LAST_PARAMETERS else (len(_LAST_PARAMETERS),)
