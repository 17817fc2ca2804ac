"""Experts in one tensor, against the product that Megatron's grouped layer computes of them."""

from __future__ import annotations

import torch

from reshard.torch.models.megatron_parameters import split_grouped

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
