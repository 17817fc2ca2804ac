"""Every operator's derivative, against central differences, PyTorch, and over every sharding.

The value that is differentiated is a sum of the function's result times fixed numbers. Central
differences in float64 are good to 1e-8 of the largest slope, PyTorch and shards to rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh
from reshard.errors import UsageError
from reshard.spmd.core.operator import operators, shipped_operators
from reshard.spmd.gradients.tape import find_pullback
from selection import keep_spread, keep_where
from spmd.derivative_cases import CASES, SAME, GradientCase
from spmd.eager_cases import ruled_specs, specs
from spmd.test_eager_exhaustively import sharded

MESH = DeviceMesh.of(x=2, y=3)
STEP = 1e-4


def weights_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(7).uniform(-1, 1, size=shape)


def weighed(case: GradientCase) -> Callable[..., Any]:
    """The case's function as one number."""

    def value(*arrays: Any) -> Any:
        found = case.function(sp, *arrays)
        return sp.sum(sp.astype(found, sp.float64) * sp.array(weights_of(found.shape)))

    return value


def gradients_of(case: GradientCase, arrays: list[Any]) -> list[Any]:
    return list(sp.grad(weighed(case), tuple(range(len(arrays))))(*arrays))


def largest(numbers: np.ndarray) -> float:
    return float(np.abs(numbers).max(initial=1.0))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_central_differences(case: GradientCase) -> None:
    arrays = case.arrays()
    value = weighed(case)
    found = gradients_of(case, [sp.array(one) for one in arrays])
    # float32, in the middle of `astype`, rounds differences away.
    step, tolerance = (1e-2, 1e-4) if case.name == "astype" else (STEP, 1e-8)
    for number, data in enumerate(arrays):
        expected = np.zeros(data.shape)
        for place in np.ndindex(data.shape):
            # The rule of five points, whose error is of the fourth power of the step.
            for count, weight in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
                moved = data.copy()
                moved[place] += count * step
                given = [sp.array(one) for one in arrays]
                given[number] = sp.array(moved)
                expected[place] += weight * float(value(*given)) / (12 * step)
        error = np.abs(found[number].to_dense() - expected).max(initial=0.0)
        assert error <= tolerance * largest(expected), (case.name, number, error)


@pytest.mark.parametrize(
    "case", [one for one in CASES if one.by_torch is not None], ids=lambda case: case.name
)
def test_as_pytorch(case: GradientCase) -> None:
    torch = pytest.importorskip("torch")
    xp = pytest.importorskip("array_api_compat.torch")
    arrays = case.arrays()
    found = gradients_of(case, [sp.array(one) for one in arrays])
    leaves = [torch.tensor(one, requires_grad=True) for one in arrays]
    function = case.function if case.by_torch == SAME else case.by_torch
    assert callable(function)
    result = function(xp, *leaves)
    (result.double() * torch.as_tensor(weights_of(tuple(result.shape)))).sum().backward()
    for number, leaf in enumerate(leaves):
        expected = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        error = np.abs(found[number].to_dense() - expected).max(initial=0.0)
        assert error <= 1e-10 * largest(expected), (case.name, number, error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "stride",
    keep_where(lambda stride: stride > 1, (24, 1), "each operand in every sharding"),
    ids=("one of 24", "all"),
)
def test_every_sharding(case: GradientCase, stride: int) -> None:
    """Each operand in every sharding, the others in one that changes from run to run of it.

    By default each operand in one of 24 shardings, in others for the next case and operand.
    """
    arrays = case.arrays()
    expected = [one.to_dense() for one in gradients_of(case, [sp.array(one) for one in arrays])]
    choose = random.Random(case.name)
    for number, data in enumerate(arrays):
        others = [
            [*specs(MESH, one.ndim, partial=True), *ruled_specs(MESH, one.shape, choose, 9)]
            for one in arrays
        ]
        ruled = ruled_specs(MESH, data.shape, choose, 4)
        own = (*specs(MESH, data.ndim, partial=True), *ruled)
        for spec in own[(CASES.index(case) + number) % min(stride, len(own)) :: stride]:
            given = [
                sharded(one, choose.choice(any_)) for one, any_ in zip(arrays, others, strict=True)
            ]
            given[number] = sharded(data, spec)
            found = gradients_of(case, given)
            for one, parameter, right in zip(found, given, expected, strict=True):
                assert not one.spec.partial_axes
                assert one.spec.dim_specs == parameter.spec.dim_specs, (case.name, spec)
                assert one.dtype is parameter.dtype
                error = np.abs(one.to_dense() - right).max(initial=0.0)
                assert error <= 1e-9 * largest(right), (case.name, spec, error)


@pytest.mark.parametrize(
    "case",
    keep_spread(40, CASES, "shards are NumPy's by default"),
    ids=lambda case: case.name,
)
def test_torch_shards(case: GradientCase) -> None:
    torch = pytest.importorskip("torch")
    arrays = case.arrays()
    expected = [one.to_dense() for one in gradients_of(case, [sp.array(one) for one in arrays])]
    choose = random.Random(case.name)
    with sp.running(sp.in_process("torch")):
        for _ in range(3):
            given = [
                sp.array(torch.as_tensor(one), choose.choice(list(specs(MESH, one.ndim))))
                for one in arrays
            ]
            for one, right in zip(gradients_of(case, given), expected, strict=True):
                assert isinstance(one.to_dense(), torch.Tensor)
                error = np.abs(one.to_dense().numpy() - right).max(initial=0.0)
                assert error <= 1e-9 * largest(right), (case.name, error)


DIFFERENTIATED = {name for name in shipped_operators() if operators[name].pullback is not None}
REFUSED_OPERATORS = {name for name in shipped_operators() if operators[name].no_pullback}


def test_every_operator_has_a_derivative_or_a_reason() -> None:
    for name in shipped_operators():
        row = operators[name]
        known = [row.pullback is not None, row.is_constant, bool(row.no_pullback)]
        assert known.count(True) == 1, name


def test_every_derivative_is_tried() -> None:
    seen: set[str] = set()

    class Names:
        def record(self, call: Any, operands: Any, results: Any) -> None:
            seen.add(call.name)

        def record_reshard(self, operand: Any, result: Any) -> None:
            pass

    for case in CASES:
        with sp.recording(Names()):
            case.function(sp, *[sp.array(one) for one in case.arrays()])
    # Other names of operators above, which no function of the namespace carries out.
    untried = DIFFERENTIATED - seen - {"identity", "copy", "real"}
    assert not untried


@pytest.mark.parametrize("name", sorted(REFUSED_OPERATORS))
def test_a_refused_operator_says_why(name: str) -> None:
    class Call:
        pass

    call: Any = Call()
    call.name = name
    with pytest.raises(UsageError, match=f"the gradient of {name}: "):
        find_pullback(call)
