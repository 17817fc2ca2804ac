"""Gradients that PyTorch takes through shards that are all in this process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import UsageError
from spmd.gradient_cases import (
    COMMON,
    EXTREME,
    NO_GRADIENT,
    PLAIN,
    check_gradient,
    check_movement,
    operator_cases,
    shardings,
)

MESH = DeviceMesh.of(x=2, y=2)
UNEVEN = DeviceMesh.of(x=2, y=3)
OPERATORS = {name: rest for name, *rest in operator_cases()}


@pytest.fixture(autouse=True)
def tensors() -> Iterator[None]:
    with sp.running(sp.in_process("torch")):
        yield


@pytest.mark.parametrize("source", [*PLAIN, *EXTREME, *COMMON])
def test_a_gradient_goes_through_every_movement(source: str) -> None:
    for target in (*PLAIN, *EXTREME, *COMMON):
        check_movement(MESH, source, target)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_gradient_goes_through_every_operator(name: str) -> None:
    function, dense, arrays = OPERATORS[name]
    for given in shardings(UNEVEN, arrays, 3, len(name)):
        what = f"{name} of {' and '.join(map(str, given))}"
        check_gradient(what, function, dense, arrays, given)


def test_operators_without_gradients_are_few_and_known() -> None:
    assert len(OPERATORS) > 100 and len(NO_GRADIENT) < 10


def test_what_ends_a_gradient_is_refused() -> None:
    leaf = torch.ones(4, 3, requires_grad=True)
    with sp.running(sp.in_process("numpy")):
        with pytest.raises(UsageError, match=r"shape \[4, 3\] that requires a gradient.*detach"):
            sp.array(leaf, spec(MESH, "x, -"))
        # Where nothing is recorded, nothing ends.
        assert sp.array(leaf.detach()).shape == (4, 3)
        with torch.no_grad():
            assert sp.array(leaf).shape == (4, 3)
    x = sp.array(leaf, spec(MESH, "x, -"))
    with pytest.raises(UsageError, match="the gradient would end there"):
        np.asarray(x)
    with pytest.raises(UsageError, match="the gradient would end there"):
        sp.unique_values(x)


def test_a_weight_that_is_copied_gets_what_all_copies_do() -> None:
    """A contribution from each of 4 devices: 4, not 1."""
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    x = sp.array(np.ones(4), spec(DeviceMesh.of(x=4), "x"))
    pending = sp.sum(x * sp.array(weight)).shard(spec(DeviceMesh.of(x=4), "| mean(x)"))
    pending.to_dense().backward()
    assert weight.grad is not None and weight.grad.item() == 4.0


def test_pytorchs_gradients_stop_where_they_are_told_to() -> None:
    plain = torch.arange(8.0).reshape(4, 2).requires_grad_()
    x = sp.array(plain, spec(MESH, "x, -"))
    sp.sum(x * sp.stop_gradient(x)).to_dense().backward()
    assert plain.grad is not None
    # Half of that of a square.
    assert torch.equal(plain.grad, plain.detach())
