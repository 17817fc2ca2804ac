"""Optimizer state by name, as `torch_dist` has it.

`dist_checkpointing` puts the key in front of the parameter's name, with a prefix for each of
several optimizers in a chain (dense parameters, experts)::

    optimizer.state.exp_avg.decoder.final_layernorm.weight
    optimizer.state.fp32_param.decoder.final_layernorm.weight       `param` in other versions
    chained_1.optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight

and all formats that are read have `optimizer.state.decoder.final_layernorm.weight.exp_avg`, with
`master` for weights of 32 bits.
"""

from __future__ import annotations

import re

_MEGATRON = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.([A-Za-z_]\w*)\.(.+)$")
# How the weights of 32 bits are called, by what the optimizer's state is called in code.
MASTER_KEYS = ("param", "fp32_param", "master_param")


def split_megatron_name(name: str) -> tuple[str, str] | None:
    """The parameter and the key in a name of `torch_dist`; None for what is no optimizer state.

    >>> split_megatron_name("chained_0.optimizer.state.fp32_param.output_layer.weight")
    ('output_layer.weight', 'master')
    """
    match = _MEGATRON.match(name)
    if match is None:
        return None
    return match[2], common_key(match[1])


def common_key(key: str) -> str:
    """What a key of Megatron's optimizer is called in every training format.

    >>> common_key("fp32_param"), common_key("exp_avg")
    ('master', 'exp_avg')
    """
    return "master" if key in MASTER_KEYS else key


def megatron_name(parameter: str, key: str, master: str) -> str:
    """The name in `torch_dist`, where weights of 32 bits are called `master`.

    >>> megatron_name("output_layer.weight", "master", "param")
    'optimizer.state.param.output_layer.weight'
    """
    return f"optimizer.state.{master if key == 'master' else key}.{parameter}"
