"""The gradients of a transformer block against PyTorch's, and what crosses for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, ShardingSpec, spec
from spmd.transformer_block import (
    Sizes,
    batch_sharding,
    chosen_experts,
    loss,
    loss_in_torch,
    make_batch,
    make_parameters,
    shardings,
)

SMALL = Sizes()
LARGE = Sizes(4, 512, 512, 8, 4, 1024, 8, 4096)


def assert_gradients_of_pytorch(
    function: Callable[..., Any], mesh: DeviceMesh, given: dict[str, ShardingSpec], library: str
) -> None:
    """The value and gradients of a loss of the block, for parameters in given shardings."""
    torch = pytest.importorskip("torch")
    data, batch = make_parameters(SMALL), make_batch(SMALL)
    leaves = {name: torch.tensor(one, requires_grad=True) for name, one in data.items()}
    expected = loss_in_torch(leaves, *map(torch.as_tensor, batch), SMALL)
    expected.backward()
    with sp.running(sp.in_process(library)):
        parameters = {name: sp.array(one, given[name]) for name, one in data.items()}
        tokens, targets = (sp.array(one, batch_sharding(mesh)) for one in batch)
        value, gradients = function(parameters, tokens, targets)
        assert float(value) == pytest.approx(expected.item(), abs=1e-12)
        for name, one in gradients.items():
            assert one.spec is given[name]
            right = leaves[name].grad.numpy()
            np.testing.assert_allclose(np.asarray(one.to_dense()), right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 4}, {"dp": 2, "tp": 3}])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_gradients_of_a_block_are_those_of_pytorch(
    axes: dict[str, int], fsdp: bool, library: str
) -> None:
    def step(p: Any, tokens: Any, targets: Any) -> Any:
        return sp.value_and_grad(loss)(p, tokens, targets, SMALL)

    mesh = DeviceMesh.of(**axes)
    assert_gradients_of_pytorch(step, mesh, shardings(mesh, fsdp), library)


@pytest.mark.parametrize(
    ("axes", "compiled"), [({"dp": 2, "tp": 2}, True), ({"tp": 4}, False), ({"dp": 4}, False)]
)
def test_experts_by_their_rows_have_the_gradients_of_pytorch(
    axes: dict[str, int], compiled: bool
) -> None:
    cut = [axis for axis in axes if axis == "tp"]
    experts = chosen_experts(cut)

    def step(p: Any, tokens: Any, targets: Any) -> Any:
        return sp.value_and_grad(lambda p: loss(p, tokens, targets, SMALL, experts=experts))(p)

    mesh = DeviceMesh.of(**axes)
    over_experts = spec(mesh, "tp, -, -" if cut else "-, -, -")
    given = shardings(mesh) | dict.fromkeys(("gate", "up", "down"), over_experts)
    assert_gradients_of_pytorch(sp.jit(step) if compiled else step, mesh, given, "torch")


def test_a_strategy_trains_the_block_alike() -> None:
    data, batch = make_parameters(SMALL), make_batch(SMALL)
    mesh = DeviceMesh.of(dp=2, tp=2)
    given = shardings(mesh)
    parameters = {name: sp.array(one, given[name]) for name, one in data.items()}
    tokens, targets = (sp.array(one, batch_sharding(mesh)) for one in batch)

    def step(p: object, tokens: object, targets: object) -> object:
        return sp.value_and_grad(loss)(p, tokens, targets, SMALL)

    value, expected = step(parameters, tokens, targets)  # type: ignore[misc]
    for strategy in ("basic", "aggressive"):
        traced = sp.trace(step, parameters, tokens, targets, strategy=strategy)
        again, found = traced.run(parameters, tokens, targets)
        assert float(again) == pytest.approx(float(value), rel=1e-12)
        for name, one in expected.items():
            np.testing.assert_allclose(found[name].to_dense(), one.to_dense(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 4}])
def test_strategies_move_no_more_than_eager_does(axes: dict[str, int]) -> None:
    mesh = DeviceMesh.of(**axes)
    given = shardings(mesh)
    parameters = {
        name: sp.abstract(shape, "float32", given[name]) for name, shape in SMALL.shapes().items()
    }
    tokens = sp.abstract((SMALL.batch, SMALL.length), "int64", batch_sharding(mesh))

    def moved_bytes(strategy: str) -> int:
        def step(p: object, tokens: object) -> object:
            return sp.value_and_grad(loss)(p, tokens, tokens, SMALL)

        return sp.trace(step, parameters, tokens, strategy=strategy).moved_bytes

    eager = moved_bytes("eager")
    for strategy in ("basic", "aggressive", "widest"):
        assert 0 < moved_bytes(strategy) <= eager


@pytest.mark.parametrize(
    ("axes", "fsdp", "forward", "both"),
    [
        ({"dp": 2, "tp": 2}, False, 25_214_992, 182_755_344),
        ({"tp": 4}, False, 75_644_928, 151_535_616),
        ({"dp": 4}, False, 24, 383_963_160),
        ({"dp": 2, "tp": 2}, True, 57_864_208, 127_311_888),
        ({"dp": 4}, True, 72_517_656, 179_736_600),
    ],
)
def test_the_bytes_of_the_eager_block(
    axes: dict[str, int], fsdp: bool, forward: int, both: int
) -> None:
    mesh = DeviceMesh.of(**axes)
    given = shardings(mesh, fsdp)
    parameters = {
        name: sp.abstract(shape, "float32", given[name]) for name, shape in LARGE.shapes().items()
    }
    tokens = sp.abstract((LARGE.batch, LARGE.length), "int64", batch_sharding(mesh))

    def value(p: object, tokens: object) -> object:
        return loss(p, tokens, tokens, LARGE)  # type: ignore[arg-type]

    assert sp.trace(value, parameters, tokens).moved_bytes == forward
    traced = sp.trace(sp.value_and_grad(value), parameters, tokens)
    assert traced.moved_bytes == both
    if fsdp:
        # Gradients end by a reduce-scatter over dp, none by an all-reduce of a weight's size.
        assert not [
            one
            for operation in traced.operations
            for one in operation.reshards
            if "all-reduce(dp)" in str(one) and one.moved_bytes > 1 << 20
        ]
