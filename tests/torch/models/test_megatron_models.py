"""What Megatron's config says, and what has no like on the Hub."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reshard.errors import UsageError
from reshard.megatron.parameters import LocalParameter
from reshard.torch import MegatronModel
from reshard.torch.models.megatron_models import find_gated, mark_gated, read_config, split_grouped


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


def test_given_configs_are_validated() -> None:
    given = {"model_type": "qwen3", "num_key_value_heads": 2, "vocab_size": 30, "rope": {"a": 1}}
    # As transformers has it.
    found = read_config(MegatronModel(chunk(), config=SimpleNamespace(to_dict=lambda: given)))
    assert found is not None and found.vocabulary == 30 and "rope" not in found.config
    with pytest.raises(UsageError, match="says num_key_value_heads=4, but the model has 2"):
        read_config(MegatronModel(chunk(), config={**given, "num_key_value_heads": 4}))
    with pytest.raises(UsageError, match="has no model_type"):
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
def test_settings_that_change_the_meaning_of_weights_are_listed(
    config: dict[str, Any], told: str
) -> None:
    found = read_config(MegatronModel(chunk(**config)))
    assert found is not None
    (one,) = found.unlike
    assert told in one


EXPERTS, HIDDEN, WIDE = 3, 4, 10


def test_each_expert_multiplies_as_the_grouped_layer_does() -> None:
    rows = torch.randn(EXPERTS, 5, HIDDEN)
    first = torch.randn(HIDDEN, EXPERTS * 2 * WIDE)
    second = torch.randn(EXPERTS * WIDE, HIDDEN)
    grouped = rows @ first.view(EXPERTS, HIDDEN, -1)
    found = split_grouped("layers.1.mlp.experts.weight1", first, EXPERTS, is_cut=True)
    assert found is not None
    for number, (name, view, parameter) in enumerate(found):
        assert name == f"layers.1.mlp.experts.local_experts.{number}.linear_fc1.weight"
        assert (parameter.shape, parameter.partition_dim) == ((2 * WIDE, HIDDEN), 0)
        assert parameter.is_expert and parameter.tensor_model_parallel
        torch.testing.assert_close(torch.nn.functional.linear(rows[number], view), grouped[number])
    wide = grouped[..., :WIDE]
    grouped = wide @ second.view(EXPERTS, -1, HIDDEN)
    found = split_grouped("experts.weight2", second, EXPERTS, is_cut=False)
    assert found is not None
    for number, (_, view, parameter) in enumerate(found):
        assert (parameter.shape, parameter.partition_dim) == ((HIDDEN, WIDE), 1)
        torch.testing.assert_close(torch.nn.functional.linear(wide[number], view), grouped[number])
        # It is the grouped tensor's memory.
        view.zero_()
    assert not second.any()


def test_tensors_that_are_not_grouped_are_not_split() -> None:
    square = torch.ones(6, 6)
    assert split_grouped("mlp.experts.linear_fc1.weight1", square, 3, False) is None
    assert split_grouped("mlp.experts.weight1", square, 0, False) is None
    assert split_grouped("mlp.experts.weight1", square, 5, False) is None
    assert split_grouped("mlp.experts.weight1", torch.ones(6), 3, False) is None


class Layer(torch.nn.Module):
    """A layer with its config, as Megatron's are."""

    def __init__(self, says: object) -> None:
        super().__init__()
        self.config = SimpleNamespace(gated_linear_unit=says)
        self.linear_fc1, self.linear_fc2 = torch.nn.Linear(2, 8), torch.nn.Linear(4, 2)
        self.weight1 = torch.nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize("says", [True, False, None, 1])
def test_gates_are_found_by_the_config_of_their_module(says: object) -> None:
    layer = Layer(says)
    found = find_gated(torch.nn.Sequential(torch.nn.Linear(2, 2), layer))
    gated = [layer.linear_fc1.weight, layer.linear_fc1.bias, layer.weight1]
    assert found == (set(map(id, gated)) if says is True else set())


@pytest.mark.parametrize(
    "says",
    [
        {},
        {"partition_dim": 1},
        {"partition_stride": 2},
        {"partition_sizes": (8, 4)},
        {"heads": 2},
        {"true_length": 11},
    ],
)
def test_parameters_that_state_their_sharding_are_unchanged(says: dict[str, object]) -> None:
    one = LocalParameter((12, 4), **{"tensor_model_parallel": bool(says), **says})  # type: ignore[arg-type]
    assert mark_gated(one) == one
