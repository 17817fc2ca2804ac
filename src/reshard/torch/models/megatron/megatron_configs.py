"""What a Megatron model says of itself by its config: the numbers that a config.json has.

Its modules have a `TransformerConfig`. The numbers are those by which query groups are taken apart
and experts are counted; and some of what it says has no like on the Hub, where weights of these
names are multiplied in another way. Such a model goes only to another of Megatron's that says the
same, since its tensors would fit.

Source: `TransformerConfig` of Megatron-core 0.16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from reshard.errors import UsageError
from reshard.torch.models.given_models import MegatronModel, chunks_of

# By the names of config.json.
_NUMBERS = {
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "num_experts": "num_moe_experts",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
}
# Other names that configs on the Hub have for the same.
_ALSO = {"num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts")}
# What weights of the same names and shapes would be computed with otherwise.
_REFUSED = {
    "layernorm_zero_centered_gamma": "its norms add 1 to their weights",
    "rotary_interleaved": "rotary positions turn neighbouring elements, not halves",
    "attention_output_gate": "queries have gates beside them in linear_qkv",
}
_UNGATED = "gated_linear_unit"


@dataclass(frozen=True, slots=True)
class MegatronSelf:
    """What a Megatron model says of itself, and its user of it.

    Attributes:
        numbers: by the names of config.json.
        config: what the user gave of it.
        is_tied: whether its output layer is its embedding.
        unlike: in what its weights mean something else than those of their names on the Hub.
    """

    numbers: Mapping[str, Any]
    config: Mapping[str, Any]
    is_tied: bool
    unlike: tuple[str, ...] = ()

    @property
    def num_experts(self) -> int | None:
        """How many experts a layer of the whole model has; None where nobody says."""
        return _number_of(self.numbers, "num_experts") or _number_of(self.config, "num_experts")

    @property
    def vocabulary(self) -> int | None:
        """The length of the vocabulary without padding, where the user said it."""
        return _number_of(self.config, "vocab_size")


def read_config(model: MegatronModel) -> MegatronSelf | None:
    """What a Megatron model says of itself; None for modules without a config, and none given.

    Raises:
        UsageError: a config that is none, or says another number than the model.
    """
    given = _read_given(model.config)
    chunks = chunks_of(model)
    inner = chunks[0] if chunks else None
    if inner is not None:
        *_, inner = unwrap(inner)
    own = getattr(inner, "config", None)
    if not hasattr(own, "num_attention_heads") or not hasattr(own, _UNGATED):
        return MegatronSelf({}, given, bool(given.get("tie_word_embeddings"))) if given else None
    found = {ours: getattr(own, theirs, None) for ours, theirs in _NUMBERS.items()}
    numbers = {name: number for name, number in found.items() if type(number) is int}
    numbers["multi_latent_attention"] = int(bool(getattr(own, "multi_latent_attention", False)))
    for name, number in numbers.items():
        said = _number_of(given, name)
        if said not in (None, number):
            raise UsageError(
                f"config says {name}={said}, but the model has {number}; give the config of this "
                "model"
            )
    is_tied = getattr(inner, "share_embeddings_and_output_weights", False)
    return MegatronSelf(numbers, given, bool(is_tied), _find_unlike(own))


def unwrap(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A module, and those inside of it that it wraps: for 16 bits, or to reduce gradients.

    >>> wrapped = torch.nn.Module()
    >>> wrapped.module = torch.nn.Linear(2, 2)
    >>> list(unwrap(wrapped))[1]
    Linear(in_features=2, out_features=2, bias=True)
    """
    yield module
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module
        yield module


def _read_given(config: Any) -> dict[str, Any]:
    """What is used of a config that was given."""
    if config is None:
        return {}
    values = config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)()
    if not isinstance(values, Mapping) or not isinstance(values.get("model_type"), str):
        raise UsageError(
            f"config={config!r} says no model_type; give the content of config.json, or "
            "transformers' config"
        )
    return {
        name: value for name, value in values.items() if isinstance(value, str | int | float | None)
    }


def _find_unlike(config: Any) -> tuple[str, ...]:
    found = [f"{name}: {why}" for name, why in _REFUSED.items() if getattr(config, name, False)]
    if not getattr(config, _UNGATED):
        found.append(f"no {_UNGATED}: linear_fc1 is one layer, and not gate above up")
    return tuple(found)


def _number_of(values: Mapping[str, Any], name: str) -> int | None:
    for called in (name, *_ALSO.get(name, ())):
        if type(values.get(called)) is int:
            return int(values[called])
    return None
