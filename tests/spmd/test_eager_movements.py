"""What eager operations move: least where one cut goes on from another, and never above BASIC."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.spmd import ShardedArray
from spmd.eager_cases import ONE_OPERAND, TWO_OPERANDS, Case, specs

MESH = DeviceMesh.of(x=2, y=3)
NAMES = {
    *("add", "where", "broadcast add", "matmul", "tensordot", "outer", "concat 0", "stack"),
    *("sum 0", "max 1", "mean 0", "argmax 0", "sort 0", "flip 0", "permute_dims", "take 1"),
    *("reshape merge", "cumulative_sum 0", "rfft"),
}
CASES = [case for case in (*ONE_OPERAND, *TWO_OPERANDS) if case.name in NAMES]


def moved_bytes(case: Case, operands: list[ShardedArray], strategy: str) -> int:
    traced = sp.trace(lambda *arrays: case.function(sp, *arrays), *operands, strategy=strategy)
    return traced.moved_bytes


def test_the_cases_are_all_there() -> None:
    assert {case.name for case in CASES} == NAMES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_operator_moves_no_more_than_with_reshards_placed_by_propagation(case: Case) -> None:
    arrays = case.arrays()
    # Half of the pairs: the same ones every time.
    chosen = list(itertools.product(*(list(specs(MESH, one.ndim)) for one in arrays)))
    for given in chosen[:: max(1, len(arrays))]:
        operands = [sp.array(one, at) for one, at in zip(arrays, given, strict=True)]
        found = moved_bytes(case, operands, "eager")
        assert found <= moved_bytes(case, operands, "basic"), [str(one) for one in given]


def sharded(text: str, shape: tuple[int, ...] = (12, 12)) -> ShardedArray:
    return sp.array(np.ones(shape), spec(MESH, text))


@pytest.mark.parametrize(
    ("one", "other", "result", "moves"),
    [
        ("x, -", "x y, -", "x y, -", False),
        ("x y, -", "x, -", "x y, -", False),
        ("-, x", "-, x y", "-, x y", False),
        ("-, x", "y, -", "y, x", False),
        ("x, -", "y x, -", "x, -", True),
        ("x, y", "x y, -", "x, y", True),
        ("x / y, -", "x, -", "x / y, -", False),
        ("x, -", "x / y, -", "x, -", True),
    ],
)
def test_a_cut_that_goes_on_from_another_stays(
    one: str, other: str, result: str, moves: bool
) -> None:
    traced = sp.trace(lambda a, b: a + b, sharded(one), sharded(other))
    assert str(traced.outputs[0].spec) == result
    assert (traced.moved_bytes > 0) == moves


def test_a_cut_is_taken_as_far_as_its_axes_are_free() -> None:
    product = sp.trace(lambda a, b: a @ b, sharded("x, -"), sharded("-, y x"))
    assert str(product.outputs[0].spec) == "x, y"
    # Each device lacks half of the third of the columns that it has a sixth of.
    assert product.moved_bytes == 6 * 12 * 2 * 8


def test_a_larger_operand_s_cut_stays() -> None:
    def added(large: Any, small: Any) -> Any:
        return large + small

    traced = sp.trace(added, sharded("x, -"), sharded("y", (12,)))
    assert str(traced.outputs[0].spec) == "x, y"
    traced = sp.trace(added, sharded("x, -"), sharded("x", (12,)))
    assert str(traced.outputs[0].spec) == "x, -"
