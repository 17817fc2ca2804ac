"""Experts in one tensor, against the product that Megatron's grouped layer computes of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from reshard.megatron.parameters import LocalParameter
from reshard.torch.models.megatron.megatron_parameters import find_gated, mark_gated, split_grouped

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


def test_other_tensors_are_left() -> None:
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
def test_what_says_how_it_is_cut_is_cut_so(says: dict[str, object]) -> None:
    one = LocalParameter((12, 4), **{"tensor_model_parallel": bool(says), **says})  # type: ignore[arg-type]
    assert mark_gated(one) == one
