"""What Megatron's config says, and what has no like on the Hub."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reshard.errors import UsageError
from reshard.torch import MegatronModel
from reshard.torch.models.megatron.megatron_configs import read_config


def chunk(**config: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    given = {"num_attention_heads": 8, "num_query_groups": 2, "num_moe_experts": None}
    module.config = SimpleNamespace(**given, **{"gated_linear_unit": True, **config})  # type: ignore[assignment]
    return module


def test_numbers_have_the_names_of_config_json() -> None:
    found = read_config(MegatronModel(chunk()))
    assert found is not None and not found.is_tied and found.num_experts is None
    assert found.numbers["num_attention_heads"] == 8 and found.numbers["num_key_value_heads"] == 2
    inner = chunk()
    inner.share_embeddings_and_output_weights = True  # type: ignore[assignment]
    wrapped = torch.nn.Module()
    wrapped.module = inner
    found = read_config(MegatronModel([wrapped]))
    assert found is not None and found.is_tied


def test_what_somebody_gives_is_checked() -> None:
    given = {"model_type": "qwen3", "num_key_value_heads": 2, "vocab_size": 30, "rope": {"a": 1}}
    # As transformers has it.
    found = read_config(MegatronModel(chunk(), config=SimpleNamespace(to_dict=lambda: given)))
    assert found is not None and found.vocabulary == 30 and "rope" not in found.config
    with pytest.raises(UsageError, match="says num_key_value_heads=4, but the model has 2"):
        read_config(MegatronModel(chunk(), config={**given, "num_key_value_heads": 4}))
    with pytest.raises(UsageError, match="says no model_type"):
        read_config(MegatronModel(chunk(), config={"vocab_size": 30}))
    experts = {"model_type": "mixtral", "num_local_experts": 4}
    with pytest.raises(UsageError, match="says num_experts=4, but the model has 8"):
        read_config(_with_experts(experts))


def _with_experts(config: Any) -> MegatronModel:
    module = chunk()
    module.config.num_moe_experts = 8  # type: ignore[union-attr,assignment]
    return MegatronModel(module, config=config)


def test_modules_without_a_config() -> None:
    assert read_config(MegatronModel(torch.nn.Linear(2, 2))) is None
    found = read_config(MegatronModel(torch.nn.Linear(2, 2), config={"model_type": "qwen3"}))
    assert found is not None and not found.numbers


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"gated_linear_unit": False}, "linear_fc1 is one layer"),
        ({"layernorm_zero_centered_gamma": True}, "its norms add 1"),
        ({"rotary_interleaved": True}, "rotary positions turn neighbouring elements"),
        ({"attention_output_gate": True}, "queries have gates"),
    ],
)
def test_weights_that_mean_something_else(config: dict[str, Any], told: str) -> None:
    found = read_config(MegatronModel(chunk(**config)))
    assert found is not None
    (one,) = found.unlike
    assert told in one
