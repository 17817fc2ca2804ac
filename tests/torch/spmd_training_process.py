"""One rank of a job that differentiates functions of arrays in shards, and trains."""

from __future__ import annotations

import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import reshard.spmd as sp
from rank_cases import report_each
from reshard import DeviceMesh
from reshard.errors import UsageError
from selection import choose
from spmd import transformer_block as block
from spmd.derivative_cases import CASES, GradientCase
from spmd.eager_cases import specs

MESH = DeviceMesh.of(x=2, y=2, devices=[2, 0, 3, 1])
# A part of all cases: each runs over processes as the others do.
STRIDE = choose(12, 6)


def gradients_of(case: GradientCase, given: list[Any]) -> Any:
    def value(*arrays: Any) -> Any:
        found = case.function(sp, *arrays)
        return sp.sum(sp.astype(found, sp.float64) * sp.array(weights_of(found.shape)))

    return sp.grad(value, tuple(range(len(given))))(*given)


def weights_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(7).uniform(-1, 1, size=shape)


def every_derivative_is_that_of_pytorch() -> None:
    for case in CASES[::STRIDE]:
        arrays = case.arrays()
        with sp.running(sp.in_process("numpy")):
            expected = [
                one.to_dense() for one in gradients_of(case, [sp.array(one) for one in arrays])
            ]
        generator = random.Random(case.name)
        given = [sp.array(one, generator.choice(list(specs(MESH, one.ndim)))) for one in arrays]
        for one, parameter, right in zip(gradients_of(case, given), given, expected, strict=True):
            assert one.spec is parameter.spec, case.name
            np.testing.assert_allclose(
                one.to_dense().numpy(), right, rtol=1e-9, atol=1e-9, err_msg=case.name
            )


def a_transformer_block_trains_as_in_pytorch() -> None:
    """Three steps of a transformer block, states cut over dp, as PyTorch takes them."""
    sizes = block.Sizes()
    data, batch = block.make_parameters(sizes), block.make_batch(sizes)
    leaves = {name: torch.tensor(one, requires_grad=True) for name, one in data.items()}
    expected = torch.optim.AdamW(leaves.values(), lr=1e-2)
    mesh = DeviceMesh.of(dp=2, tp=2)
    given = block.shardings(mesh)
    parameters = {name: sp.array(one, given[name]) for name, one in data.items()}
    tokens, targets = (sp.array(one, block.batch_sharding(mesh)) for one in batch)
    adam, over = sp.AdamW(1e-2), sp.specs_over(parameters, mesh, "dp")
    state = adam.init(parameters, over)
    step = sp.value_and_grad(block.loss, specs=over)
    for _ in range(3):
        expected.zero_grad()
        right = block.loss_in_torch(leaves, *map(torch.as_tensor, batch), sizes)
        right.backward()
        expected.step()
        value, slopes = step(parameters, tokens, targets, sizes)
        assert abs(float(value) - right.item()) < 1e-9
        parameters, state = adam.update(parameters, slopes, state)
    for name, one in parameters.items():
        assert one.spec is given[name]
        # Adam divides slopes by their own size: rounding shows where they are small.
        torch.testing.assert_close(one.to_dense(), leaves[name].detach(), rtol=0, atol=1e-6)


def invalid_functions_are_refused_on_every_rank() -> None:
    """Every rank refuses alike, before anything is sent."""
    x = sp.array(np.ones((4, 2)), next(iter(specs(MESH, 2))))
    with pytest.raises(UsageError, match="were asked for within"):
        sp.grad(lambda x: sp.sum(x) * float(sp.max(x)))(x)
    with pytest.raises(UsageError, match="one real number was expected"):
        sp.grad(lambda x: x * 2.0)(x)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with sp.running(sp.over_processes()):
        report_each(
            [
                every_derivative_is_that_of_pytorch,
                a_transformer_block_trains_as_in_pytorch,
                invalid_functions_are_refused_on_every_rank,
            ]
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
