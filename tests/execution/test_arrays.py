"""Arrays of each library: their memory, and their arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from execution.example_arrays import plan_of
from reshard.errors import ShardError
from reshard.execution.arrays import combine, kind_of, scale

INFINITE = np.array([complex(1, np.inf), complex(np.inf, 0)], np.complex64)
FINITE = np.array([complex(np.inf, 1), complex(1, 2)], np.complex64)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_infinite_complex_numbers_are_added_by_parts(convert: Any) -> None:
    total = combine("sum", convert(INFINITE), convert(FINITE))
    assert np.asarray(total).tolist() == (INFINITE + FINITE).tolist()
    assert not np.isnan(np.asarray(total)).any()
    # So does a plan, which torch's own sum would give `inf+nanj`.
    plan = plan_of("- | sum(y)", "-", (2,))
    kinds = zip(plan.source.cell_slot.tolist(), plan.source.cell_contribution, strict=True)
    parts = [INFINITE, FINITE, np.zeros_like(FINITE)]
    found = plan.run({slot: convert(parts[int(number)]) for slot, number in kinds})[0]
    assert np.asarray(found).tolist() == (INFINITE + FINITE).tolist()


def test_gradients_flow_through_contributions() -> None:
    x, y = (torch.tensor([2.0], requires_grad=True) for _ in range(2))
    scale(combine("product", x, y), 3, 2).backward()
    assert x.grad is not None and x.grad.tolist() == [3.0]


@pytest.mark.parametrize(
    "name", ["bfloat16", "float32", "int8", "complex64", "bool", "float8_e5m2"]
)
def test_plans_run_on_arrays_of_jax(name: str) -> None:
    jax = pytest.importorskip("jax")
    plan = plan_of("x, -", "-, y@pad", (4, 5))
    values = jax.numpy.arange(20).reshape(4, 5).astype(name)
    expected = plan.run({rank: np.asarray(values)[box] for rank, box in _boxes(plan).items()})
    found = plan.run({rank: values[box] for rank, box in _boxes(plan).items()})
    for rank, array in expected.items():
        assert isinstance(found[rank], jax.Array) and found[rank].dtype == values.dtype
        assert np.asarray(found[rank]).tobytes() == array.tobytes()


def test_contributions_of_jax_are_combined() -> None:
    jax = pytest.importorskip("jax")
    plan = plan_of("- | mean(y)", "- | max(x)", (3,))
    value = jax.numpy.array([1.5, 2.5, 3.0], "bfloat16")
    found = plan.run(dict.fromkeys(plan.source.holders, value))
    assert found[7].tolist() == [1.5, 2.5, 3.0] and found[1].tolist() == [-np.inf] * 3


def test_arrays_of_jax_that_are_refused() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(ShardError, match=r"x is a JAX array, which cannot be written; leave out"):
        kind_of(jax.numpy.zeros(2), "x").writable(jax.numpy.zeros(2), "x")
    with pytest.raises(ShardError, match=r"x is traced by JAX; call this outside of jax\.jit"):
        jax.jit(lambda x: kind_of(x, "x"))(jax.numpy.zeros(2))


def _boxes(plan: Any) -> dict[int, tuple[slice, ...]]:
    every = ((rank, plan.source.boxes(rank)[0]) for rank in plan.source.holders)
    return {rank: tuple(map(slice, *box)) for rank, box in every}
