"""What eager operations move: least where one cut goes on from another, and never above BASIC."""

from __future__ import annotations

import itertools
import math
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


LINE = DeviceMesh.of(n=4)


def line(text: str, *shape: int, dtype: str = "float32") -> sp.ArrayType:
    return sp.abstract(shape, dtype, spec(LINE, text))


def gathered(*shape: int) -> int:
    """The bytes of an all-gather over the line, and of a reduce-scatter: float32."""
    return 4 * 3 * math.prod(shape)


def test_a_batch_over_the_axis_of_the_weights_stays_cut() -> None:
    x = line("n, -, -", 4, 8, 16)
    for columns in (4, 16, 64):
        traced = sp.trace(lambda x, w: sp.relu(x @ w), x, line("n, -", 16, columns))
        assert str(traced.outputs[0].spec) == "n, -, -"
        # 64 columns are more than the batch is.
        assert traced.moved_bytes == gathered(16, columns)
    wide = line("n, -", 16, 4096)
    many = line("n, -", 4, 16)
    traced = sp.trace(lambda x, w: sp.relu(x @ w), many, wide)
    assert traced.moved_bytes == gathered(4, 16) // 4 + gathered(4, 4096)
    assert str(traced.outputs[0].spec) == "n, -"
    tokens = line("n, -", 4, 8, dtype="int64")
    traced = sp.trace(lambda t, table: sp.embedding(t, table), tokens, line("n, -", 4096, 16))
    # Indices of 8 bytes are gathered, which were checked where they were.
    assert traced.moved_bytes == 2 * gathered(4, 8) + gathered(4, 8, 16)
    assert str(traced.outputs[0].spec) == "n, -, -"
    traced = sp.trace(lambda t, table: sp.embedding(t, table), tokens, line("-, n", 4096, 16))
    assert traced.moved_bytes == 2 * gathered(4, 8) + gathered(4, 8, 16) // 4
    assert str(traced.outputs[0].spec) == "n, -, -"


def test_tensor_parallel_layers_move_what_megatron_moves() -> None:
    table, up, down = line("n, -", 4096, 64), line("-, n", 64, 256), line("n, -", 256, 64)

    def layer(tokens: Any, table: Any, up: Any, down: Any) -> Any:
        x = sp.embedding(tokens, table)
        return x + sp.relu(sp.rms_norm(x) @ up) @ down

    # 1. Whole sequences: an all-reduce of the embedding, and of what the layer makes.
    tokens = line("-, -", 2, 16, dtype="int64")
    assert str(sp.trace(sp.embedding, tokens, table).outputs[0].spec) == "-, -, - | sum(n)"
    assert sp.trace(sp.embedding, tokens, table).moved_bytes == 0
    traced = sp.trace(lambda *all_: layer(*all_).reduced(), tokens, table, up, down)
    assert traced.moved_bytes == 2 * 2 * gathered(2, 16, 64)
    # 2. Sequences cut over the same axis: reduce-scatters, and an all-gather between them.
    tokens = line("-, n", 2, 16, dtype="int64")
    traced = sp.trace(layer, tokens, table, up, down)
    assert str(traced.outputs[0].spec) == "-, n, -"
    assert traced.moved_bytes == 2 * gathered(2, 16) + 3 * gathered(2, 16, 64)
