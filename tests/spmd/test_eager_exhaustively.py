"""Every sharding over a 2x3 mesh, of every operand, against NumPy on the whole arrays.

Shapes do not divide. Floating results may differ by 1e-12 in parts and wholes of about 1, whole
numbers and truth values not at all.
"""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.sharding import ShardingSpec
from reshard.spmd import ShardedArray
from selection import choose
from spmd.eager_cases import ONE_OPERAND, TWO_OPERANDS, Case, ruled_specs, specs

MESH = DeviceMesh.of(x=2, y=3)
TOLERANCE = 1e-12


def dense(value: Any) -> list[np.ndarray]:
    """Whole arrays of a result, of several too."""
    if isinstance(value, tuple | list):
        return [array for one in value for array in dense(one)]
    return [np.asarray(value)]


def expect_equal(found: Any, expected: Any, what: object) -> None:
    for one, other in zip(dense(found), dense(expected), strict=True):
        assert one.shape == other.shape, what
        assert one.dtype == other.dtype, what
        if other.dtype.kind in "fc":
            np.testing.assert_allclose(one, other, TOLERANCE, TOLERANCE, err_msg=str(what))
        else:
            np.testing.assert_array_equal(one, other, err_msg=str(what))


def sharded(data: np.ndarray, spec: ShardingSpec) -> ShardedArray:
    """Data in shards; contributions are different numbers that add up to it."""
    if not spec.partial_axes:
        return sp.array(data, spec)
    layout = spec.layout(data.shape)
    count = layout.contributions
    random = np.random.default_rng(0)
    if data.dtype.kind in "fc":
        parts = [random.normal(size=data.shape).astype(data.dtype) for _ in range(count - 1)]
    else:
        parts = [random.integers(-9, 9, size=data.shape) for _ in range(count - 1)]
    parts.append(data - sum(parts))
    cut = ShardingSpec(spec.mesh, spec.dim_specs)
    placed = [sp.array(part, cut).shards for part in parts]
    shards = {}
    for rank in layout.holders:
        cell = layout.cells_of(rank)[0]
        shards[rank] = placed[int(layout.cell_contribution[cell])][rank]
    return sp.from_shards(shards, data.shape, spec)


@pytest.mark.parametrize("case", ONE_OPERAND, ids=lambda case: case.name)
def test_every_sharding_of_one_operand(case: Case) -> None:
    (data,) = case.arrays()
    expected = case.function(np, data)
    for one in [*specs(MESH, data.ndim), *ruled_specs(MESH, data.shape, Random(case.name), 6)]:
        found = case.function(sp, sharded(data, one))
        expect_equal(found, expected, f"{case.name} of {one}")


@pytest.mark.parametrize("case", TWO_OPERANDS, ids=lambda case: case.name)
def test_every_pair_of_shardings(case: Case) -> None:
    left, right = case.arrays()
    expected = case.function(np, left, right)
    lefts = [sp.array(left, one) for one in specs(MESH, left.ndim)]
    rights = [sp.array(right, one) for one in specs(MESH, right.ndim)]
    random = Random(case.name)
    ruled = [
        [sharded(one, at) for at in ruled_specs(MESH, one.shape, random, 6)]
        for one in (left, right)
    ]
    every = list(itertools.product([*lefts, sp.array(left)], [*rights, sp.array(right)]))
    # By default every other pair, each sharding of one side with half of the other's.
    for a, b in [*every[:: choose(2, 1)], *zip(*ruled, strict=True)]:
        found = case.function(sp, a, b)
        expect_equal(found, expected, f"{case.name} of {a.spec} and {b.spec}")


WITH_PENDING = """
add;subtract;multiply;divide;matmul;exp;maximum;negative;where;stack;astype;roll;sum 0;max 0;
cumulative_sum 0;cumulative_prod 1;permute_dims;tril;flip 0;concat 1;rfft;broadcast add;
reshape merge;slices;scalars;sum of all;take 1;matmul of whole numbers"""
LINEAR = [
    case
    for case in (*ONE_OPERAND, *TWO_OPERANDS)
    if case.name in WITH_PENDING.replace(chr(10), "").split(";")
]


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: case.name)
def test_every_sharding_with_pending_sums(case: Case) -> None:
    arrays = case.arrays()
    expected = case.function(np, *arrays)
    given = [
        [sharded(data, one) for one in specs(MESH, data.ndim, partial=True)] for data in arrays
    ]
    for operands in itertools.product(*given):
        if not any(x.spec is not None and x.spec.partial_axes for x in operands):
            continue
        found = case.function(sp, *operands)
        what = f"{case.name} of {' and '.join(str(x.spec) for x in operands)}"
        for one, other in zip(dense(found), dense(expected), strict=True):
            assert one.dtype == other.dtype, what
            np.testing.assert_allclose(one, other, 1e-9, 1e-9, err_msg=what)


def test_the_shardings_are_all_there() -> None:
    assert len(LINEAR) == WITH_PENDING.count(";") + 1
    assert len({str(one) for one in specs(MESH, 2)}) == 11
    assert len({str(one) for one in specs(MESH, 2, partial=True)}) == 18
    assert spec(MESH, "y x, -") in set(specs(MESH, 2))
