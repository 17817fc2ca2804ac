"""Shards that are PyTorch's tensors, all in one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import ShardError, UsageError
from spmd.eager_cases import ONE_OPERAND, TWO_OPERANDS, Case, specs
from spmd.test_eager_exhaustively import dense

MESH = DeviceMesh.of(x=2, y=2)


@pytest.mark.parametrize("case", [*ONE_OPERAND, *TWO_OPERANDS], ids=lambda case: case.name)
def test_operators_on_tensors(case: Case) -> None:
    arrays = case.arrays()
    expected = dense(case.function(np, *arrays))
    choices = list(itertools.product(*(list(specs(MESH, one.ndim)) for one in arrays)))
    with sp.running(sp.in_process("torch")):
        for given in choices[:: max(1, len(choices) // 4)]:
            operands = [sp.array(one, at) for one, at in zip(arrays, given, strict=True)]
            found = dense(case.function(sp, *operands))
            for one, other in zip(found, expected, strict=True):
                assert one.shape == other.shape
                assert one.dtype == other.dtype
                np.testing.assert_allclose(one, other, 1e-9, 1e-9, err_msg=str(given))


def test_tensors_keep_their_type() -> None:
    x = sp.array(torch.ones(3, 4, dtype=torch.bfloat16), spec(MESH, "x, y"))
    assert x.runner is sp.in_process("torch")
    assert x.dtype.name == "bfloat16"
    total = sp.sum(x @ x.T, axis=0)
    assert torch.equal(total.to_dense(), torch.full((3,), 12.0, dtype=torch.bfloat16))
    assert x.shards[0].dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["multiply", "floor_divide", "bitwise_left_shift", "equal"])
def test_whole_numbers_are_not_narrowed_to_the_type_of_the_array_with_dimensions(name: str) -> None:
    few = sp.array(torch.tensor([44, 2], dtype=torch.uint8), spec(MESH, "x"))
    for wide in (torch.uint16, torch.uint32, torch.uint64):
        with pytest.raises(UsageError, match=r"PyTorch promotes no uint.*sp\.astype"):
            getattr(sp, name)(sp.array(torch.tensor(300, dtype=wide)), few)
    found = sp.multiply(sp.array(torch.tensor(300, dtype=torch.int16)), few)
    assert found.to_dense().tolist() == [13200, 600]
    same = sp.multiply(sp.array(torch.tensor(300, dtype=torch.uint16)), 2)
    assert (int(same), same.dtype.name) == (600, "uint16")
    halves = sp.multiply(sp.array(torch.tensor(300, dtype=torch.uint16)), sp.array([0.5]))
    assert halves.to_dense().tolist() == [150.0]


def test_contributions_of_infinite_complex_numbers_are_their_sum() -> None:
    mesh = DeviceMesh.of(k=2)
    infinite = torch.tensor([complex(1, np.inf), complex(np.inf, 1), complex(-np.inf, np.nan)])
    zero = torch.zeros(3, dtype=infinite.dtype)
    for parts in ({0: zero, 1: infinite}, {0: infinite, 1: zero}):
        x = sp.from_shards(parts, (3,), spec(mesh, "- | sum(k)"))
        np.testing.assert_array_equal(x.reduced().to_dense(), infinite)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_tensor_whose_memory_was_freed_is_refused(library: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    parameter.untyped_storage().resize_(0)
    with (
        sp.running(sp.in_process(library)),
        pytest.raises(ShardError, match=r"shape \(3, 4\) whose memory was freed: 48 bytes"),
    ):
        sp.array(parameter, spec(MESH, "x, y"))
