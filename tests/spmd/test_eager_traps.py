"""Where other systems are wrong, each against the dense result; and what stays in shards."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, DimSpec, ShardingSpec, spec
from reshard.collectives import ReduceScatter, find_program
from reshard.errors import ShardError, SpecError, UsageError
from reshard.spmd.shards.operation_call import CompiledCall, call

MESH = DeviceMesh.of(x=2, y=3)
RANDOM = np.random.default_rng(3)
A, B = RANDOM.normal(size=(7, 5)), RANDOM.normal(size=(5, 4))


def same(found: Any, expected: Any, text: str | None = None) -> None:
    np.testing.assert_allclose(found.to_dense(), expected, 1e-12, 1e-12)
    if text is not None:
        assert str(found.spec) == text


def test_adding_rows_over_x_to_rows_over_y() -> None:
    x, y = sp.array(A, spec(MESH, "x, -")), sp.array(2 * A, spec(MESH, "y, -"))
    same(x + y, 3 * A, "x, -")


def test_a_maximum_over_a_cut_axis_is_no_sum() -> None:
    found = sp.max(sp.array(A, spec(MESH, "x, y")), axis=0)
    same(found, A.max(0), "y | max(x)")
    same(sp.maximum(found, found), A.max(0), "y | max(x)")
    same(found + 1, A.max(0) + 1, "y")


def test_matrix_products_with_a_cut_inner_dimension() -> None:
    left = sp.array(A, spec(MESH, "-, x"))
    same(left @ sp.array(B), A @ B, "-, - | sum(x)")
    same(left @ sp.array(B, spec(MESH, "-, x")), A @ B)
    same(left @ sp.array(B, spec(MESH, "x, y")), A @ B, "-, y | sum(x)")


def test_pending_sums_go_on_where_that_is_right() -> None:
    partial = sp.array(A, spec(MESH, "-, x")) @ sp.array(B)
    dense = A @ B
    same(partial + partial, 2 * dense, "-, - | sum(x)")
    same(partial * 3.0, 3 * dense, "-, - | sum(x)")
    same(sp.array(np.array(3.0)) * partial, 3 * dense, "-, - | sum(x)")
    same(-partial, -dense, "-, - | sum(x)")
    same(sp.sum(partial, axis=0), dense.sum(0), "- | sum(x)")
    same(sp.reshape(partial, (28,)), dense.reshape(28), "- | sum(x)")
    same(partial @ sp.array(B.T, spec(MESH, "-, y")), dense @ B.T, "-, y | sum(x)")
    same(partial @ sp.array(B.T, spec(MESH, "y, -")), dense @ B.T, "-, - | sum(x y)")


def test_pending_sums_are_reduced_where_they_must_be() -> None:
    partial = sp.array(A, spec(MESH, "-, x")) @ sp.array(B)
    dense = A @ B
    same(partial + 1.0, dense + 1, "-, -")
    same(sp.exp(partial), np.exp(dense), "-, -")
    same(sp.maximum(partial, 0.0), np.maximum(dense, 0), "-, -")
    same(partial * partial, dense * dense)
    narrow = sp.astype(partial, "float32")
    assert str(narrow.spec) == "-, -"
    np.testing.assert_array_equal(np.asarray(narrow), np.asarray(partial).astype(np.float32))
    rounded = sp.sum(partial, axis=0, dtype="float32")
    assert str(rounded.spec) == "-"
    np.testing.assert_allclose(rounded.to_dense(), dense.sum(0), 1e-6)
    single = sp.array(A.astype(np.float32), spec(MESH, "-, x")) @ sp.array(B.astype(np.float32))
    assert str(sp.astype(single, "float64").spec) == "-, - | sum(x)"


INFINITE = np.array([[np.inf, -np.inf], [2.0, np.nan]])
PRODUCTS = [
    lambda xp, p, factor: p * factor[0],
    lambda xp, p, factor: factor[1] * p,
    lambda xp, p, factor: p @ factor,
    lambda xp, p, factor: xp.tensordot(p, factor, axes=1),
    lambda xp, p, factor: xp.vecdot(p[:2], factor),
    lambda xp, p, factor: xp.linalg.outer(p[0], factor[0]),
    lambda xp, p, factor: p * float(factor[0, 0]),
    lambda xp, p, factor: p * complex(0, float(factor[0, 1])),
]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_contributions_times_what_is_infinite_are_combined_first(
    product: Any, library: str
) -> None:
    """`3 inf - 1 inf` is no number, and `2 inf` is one."""
    runner = sp.in_process(library)
    left = np.array([[3.0, -1.0], [1.0, -1.0], [0.5, 7.0]])
    partial = sp.array(left, spec(MESH, "-, x"), runner=runner) @ np.ones((2, 2))
    dense = left @ np.ones((2, 2))
    for data in (np.ones((2, 2)), INFINITE, np.ones((2, 2)), INFINITE):
        for text in ("-, -", "y, -", "-, y", "x, -", None):
            factor = sp.array(data, None if text is None else spec(MESH, text), runner=runner)
            with np.errstate(all="ignore"):
                found, expected = product(sp, partial, factor), product(np, dense, data)
            np.testing.assert_array_equal(np.asarray(found), expected)
            if text in ("-, -", None):
                assert ("sum(x)" in str(found.spec)) == (data is not INFINITE)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("text", ["x, y", "y x, -", "-, x y", "-, x / y", "y, -", "y@balanced, x"])
def test_running_totals_of_a_cut_axis_stay_in_shards(text: str, library: str) -> None:
    numbers = RANDOM.integers(-9, 9, size=(13, 20))
    at = spec(MESH, text)
    for data in (numbers / 9, numbers, numbers.astype(np.int8), numbers[:, :2], numbers[:0]):
        x = sp.array(data, at, runner=sp.in_process(library))
        for axis in (0, 1):
            for function, dense in (
                (sp.cumulative_sum, np.cumsum),
                (sp.cumulative_prod, np.cumprod),
            ):
                with np.errstate(all="ignore"):
                    found, expected = function(x, axis=axis), dense(data, axis)
                assert np.asarray(found).dtype == expected.dtype
                if expected.dtype.kind == "i":
                    np.testing.assert_array_equal(np.asarray(found), expected)
                else:
                    np.testing.assert_allclose(np.asarray(found), expected, 1e-12, 1e-12)
                if data.shape == (13, 20) and "@" not in text:
                    assert found.spec is at


def test_running_totals_exchange_one_element_a_part() -> None:
    kind = sp.array(np.zeros((600, 4)), spec(MESH, "y, x"))
    traced = sp.trace(lambda x: sp.cumulative_sum(x, axis=0), kind)
    # An all-reduce of 2 rows of 2 numbers between 3 ranks, for each of 2 columns of ranks.
    assert traced.moved_bytes == 2 * 2 * 2 * (2 * 2 * 8)
    pending = sp.array(A, spec(MESH, "-, x")) @ sp.array(B, spec(MESH, "-, y"))
    same(sp.cumulative_sum(pending, axis=1), (A @ B).cumsum(1))


class Calls:
    """A recorder that keeps what it sees."""

    def __init__(self) -> None:
        self.calls: list[CompiledCall] = []
        self.reshards: list[tuple[Any, Any]] = []

    def record(self, call: CompiledCall, operands: Sequence[Any], results: Sequence[Any]) -> None:
        self.calls.append(call)

    def record_reshard(self, operand: Any, result: Any) -> None:
        self.reshards.append((operand, result))


def test_a_pending_sum_and_a_sharded_array_meet_by_a_reduce_scatter() -> None:
    mesh = DeviceMesh.of(x=2)
    left, right = RANDOM.normal(size=(8, 4)), RANDOM.normal(size=(4, 8))
    partial = sp.array(left, spec(mesh, "-, x")) @ sp.array(right)
    other = sp.array(np.ones((8, 8)), spec(mesh, "x, -"))
    seen = Calls()
    with sp.recording(seen):
        found = partial + other
        found.shard(spec(mesh, "-, x"))
    same(found, left @ right + 1, "x, -")
    (call,) = seen.calls
    assert call.operands[0] is not None and call.operands[0].spec is not None
    before, after = call.operands[0].spec, call.runs_with[0]
    assert after is not None
    steps = find_program(before, after, (8, 8)).steps
    assert [type(step) for step in steps] == [ReduceScatter]
    assert len(seen.reshards) == 1
    found + found
    assert len(seen.calls) == 1


def test_whole_numbers_wrap_as_they_do_in_the_whole_array() -> None:
    mesh = DeviceMesh.of(x=2)
    left = np.full((1, 4), 2**30, np.int32)
    right = np.full((4, 1), 3, np.int32)
    partial = sp.array(left, spec(mesh, "-, x")) @ sp.array(right)
    dense = left @ right
    assert str((partial + partial).spec) == "-, - | sum(x)"
    for function in (
        lambda xp, n: n / 3,
        lambda xp, n: xp.sum(n),
        lambda xp, n: xp.astype(n, "int64"),
        lambda xp, n: xp.astype(n, "float64"),
        lambda xp, n: n + xp.astype(n, "int64"),
        lambda xp, n: n == 0,
        lambda xp, n: n * np.ones((1, 1), np.int64),
        lambda xp, n: n @ np.ones((1, 1), np.float64),
        lambda xp, n: xp.sum(n, dtype="float64"),
    ):
        np.testing.assert_array_equal(np.asarray(function(sp, partial)), function(np, dense))


def test_truth_values_and_maxima_of_numbers() -> None:
    mesh = DeviceMesh.of(x=2)
    numbers = np.array([[-5, 0], [0, 0]])
    most = sp.max(sp.array(numbers, spec(mesh, "x, -")), axis=0)
    np.testing.assert_array_equal(
        sp.logical_or(sp.astype(most, "bool"), sp.astype(most, "bool")).to_dense(), [False, False]
    )
    some = sp.any(sp.array(numbers != 0, spec(mesh, "x, -")), axis=0)
    assert str(some.spec) == "- | max(x)"
    np.testing.assert_array_equal(sp.logical_or(some, some).to_dense(), [True, False])


@pytest.mark.parametrize("text", ["x y", "y x", "y / x", "y@balanced"])
def test_reshapes_that_split_or_merge_uneven_parts(text: str) -> None:
    data = RANDOM.normal(size=(6, 10))
    for at in (f"{text}, -", f"-, {text}"):
        x = sp.array(data, spec(MESH, at))
        for shape in ((60,), (2, 3, 10), (3, 2, 10), (6, 5, 2), (6, 2, 5), (4, 15), (12, 5)):
            same(sp.reshape(x, shape), data.reshape(shape))


def test_a_reshape_whose_parts_divide_stays_in_shards() -> None:
    mesh = DeviceMesh.of(a=4)
    x = sp.array(np.arange(8.0), spec(mesh, "a"))
    same(sp.reshape(x, (2, 4)), np.arange(8.0).reshape(2, 4), "a:(1)2, a:(2)2")
    x = sp.array(np.arange(24.0).reshape(8, 3), spec(mesh, "a, -"))
    same(sp.reshape(x, (24,)), np.arange(24.0), "a")


@pytest.mark.parametrize(
    "text", ["x / y", "y@stride2", "x@cyclic1", "y@balanced", "y@sizes[4,0,3]"]
)
def test_cuts_with_a_rule_of_their_own(text: str) -> None:
    other = RANDOM.normal(size=(7, 5))
    x, y = sp.array(A, spec(MESH, f"{text}, -")), sp.array(other, spec(MESH, "x, y"))
    same(x + y, A + other)
    same(x * x, A * A, f"{text}, -")
    same(sp.sum(x, axis=0), A.sum(0))
    same(x.T @ y, A.T @ other)
    same(sp.cumulative_sum(x, axis=0), A.cumsum(0))
    same(sp.take(x, np.array([6, 0, 3]), axis=0), A[[6, 0, 3]])
    same(sp.sort(x, axis=1), np.sort(A, 1), f"{text}, -")
    same(sp.tril(x), np.tril(A))


def test_arrays_without_elements_and_without_dimensions() -> None:
    nothing = sp.array(np.zeros((0, 5)), spec(MESH, "x, y"))
    same(nothing + nothing, np.zeros((0, 5)))
    same(sp.sum(nothing, axis=0), np.zeros(5))
    same(nothing.T @ nothing, np.zeros((5, 5)))
    assert sp.max(nothing, axis=1).shape == (0,)
    with pytest.raises(UsageError, match="no elements"):
        sp.max(nothing, axis=0)
    scalar = sp.array(np.array(2.0), ShardingSpec(MESH, []))
    same(scalar * scalar + 1, np.array(5.0))
    same(scalar * sp.array(A, spec(MESH, "x, y")), 2 * A, "x, y")
    few = sp.array(np.arange(2.0), spec(MESH, "x y"))
    same(few @ few, np.array(1.0))
    assert float(sp.max(few)) == 1.0


def test_an_operator_without_a_rule_warns_once_and_is_replicated() -> None:
    x = sp.array(A, spec(MESH, "x, y"))
    with pytest.warns(UserWarning, match="operator deg2rad has no sharding rule"):
        found = call("deg2rad", (x,))
    same(found, np.deg2rad(A), "-, -")


def test_numpys_functions_are_taken() -> None:
    x = sp.array(A, spec(MESH, "x, y"))
    same(np.exp(x), np.exp(A), "x, y")
    same(np.add(A, x), 2 * A)
    same(np.sum(x, axis=0), A.sum(0))
    same(np.mean(x, 1), A.mean(1))
    same(np.add.reduce(x, axis=1), A.sum(1))
    same(np.transpose(x), A.T, "y, x")
    same(np.concatenate([x, x], 1), np.concatenate([A, A], 1))
    same(np.where(x > 0, x, 0.0), np.where(A > 0, A, 0))
    same(np.linalg.svdvals(x), np.linalg.svdvals(A))
    same(np.fft.fft(x, axis=1), np.fft.fft(A, axis=1))
    np.testing.assert_array_equal(np.asarray(x), A)
    with pytest.raises(UsageError, match=r"numpy\.kron"):
        np.kron(x, x)
    with pytest.raises(UsageError, match=r"numpy\.add\.accumulate"):
        np.add.accumulate(x)


def test_functions_of_numpy_without_a_signature() -> None:
    """Before NumPy 2.4 those written in C have none."""

    def of_python_alone(function: Any) -> inspect.Signature:
        if not inspect.isfunction(function):
            raise ValueError(f"no signature found for builtin {function!r}")
        return inspect.signature(function)

    with mock.patch("reshard.spmd.arrays.sharded_array.signature", of_python_alone):
        x = sp.array(A, spec(MESH, "x, y"))
        same(np.concatenate([x, x], 1), np.concatenate([A, A], 1))
        assert str(np.empty_like(x, "float32").dtype) == "float32"
        with pytest.raises(UsageError, match=r"numpy\.where"):
            np.where(x > 0)


def test_the_seeds_questions() -> None:
    x = sp.array(A, spec(MESH, "x, y"))
    assert sp.has_sharded_inputs([1, x]) and not sp.has_sharded_inputs([sp.array(A), 2])
    assert sp.get_mesh_from_args([sp.array(A), x]) is MESH
    assert str(sp.infer_output_sharding("matmul", [x, sp.array(B)], MESH)) == "x, - | sum(y)"
    assert str(sp.infer_output_sharding("sum", [x], axis=0)) == "y | sum(x)"
    assert x.spec is not None
    for index, rank in enumerate(MESH.devices):
        part = sp.slice_for_shard(A, A.shape, x.spec, index)
        np.testing.assert_array_equal(part, x.shards[rank])
    same(sp.reshard_tensor(x, x.spec, spec(MESH, "y, x"), MESH), A, "y, x")
    same(sp.reshard_tensor(x, x.spec, None, MESH), A, "-, -")


def test_what_propagation_is_told_is_nothing_to_an_array() -> None:
    dims = [DimSpec(["x"], is_open=True, priority=1), DimSpec([], is_open=True)]
    x = sp.array(A).shard(MESH, dims)
    assert x.spec is spec(MESH, "x, -")


def test_contributions_to_a_mean_are_not_summed_over_a_cut_axis() -> None:
    x = sp.array(A).shard(MESH, [["x"], []])
    parts = {rank: (1 + rank % 3) * shard for rank, shard in x.shards.items()}
    pending = sp.from_shards(parts, A.shape, spec(MESH, "x, - | mean(y)"))
    dense = 2 * A
    same(pending, dense)
    same(pending + pending, 2 * dense, "x, - | mean(y)")
    same(sp.sum(pending, axis=1), dense.sum(1), "x | mean(y)")
    same(sp.sum(pending, axis=0), dense.sum(0), "- | sum(x)")
    same(pending[np.array([1, -1])], dense[[1, -1]])
    same(sp.permute_dims(pending, (1, 0)) @ sp.array(A, spec(MESH, "x, -")), dense.T @ A)


def test_truth_values_that_wait_are_no_numbers() -> None:
    ones = np.ones((4, 6), np.bool_)
    pending = sp.array(ones, spec(MESH, "-, x")) @ sp.array(ones.T)
    assert str(pending.spec) == "-, - | sum(x)"
    np.testing.assert_array_equal(pending * 1, np.ones((4, 4)))
    np.testing.assert_array_equal(sp.sum(pending, axis=0), np.full(4, 4))


def test_means_of_whole_numbers_do_not_wrap_around() -> None:
    large = np.full((4, 6), np.iinfo(np.int64).max // 2)
    x = sp.array(large, spec(MESH, "x, y"))
    same(sp.mean(x, axis=0), large.mean(0))
    same(sp.var(x), 0)


def test_sub_axes_that_do_not_fit_are_not_used_together() -> None:
    mesh = DeviceMesh.of(x=12)
    data = np.arange(7.0 * 15).reshape(7, 3, 5)
    x = sp.array(data, ShardingSpec(mesh, [DimSpec(), DimSpec(), DimSpec(["x:(1)2"])]))
    y = sp.array(data, ShardingSpec(mesh, [DimSpec(["x:(3)4"]), DimSpec(), DimSpec()]))
    same(x + y, 2 * data)
    same(sp.stack([x, x, y]), np.stack([data] * 3))


@pytest.mark.parametrize("key", [slice(9, -1, -2), slice(0, -1, -2), slice(None, 6, -3)])
def test_empty_slices_backwards(key: slice) -> None:
    for length in (0, 1, 7):
        data = np.arange(2.0 * length).reshape(length, 2)
        found = sp.array(data, spec(MESH, "y, x"))[key]
        assert found.shape == data[key].shape
        same(found, data[key])


def test_lists_are_indices_and_no_operands() -> None:
    x = sp.array(A, spec(MESH, "x, y"))
    same(x[[0, -1]], A[[0, -1]])
    same(x[[True, False] * 3 + [True]], A[::2])
    same(x[0, [1, -1]], A[0, [1, -1]])
    same(x[[0, 3], -1], A[[0, 3], -1])
    for other in ([1, 2, 3], (1.0, 2.0), "two", None):
        for function in (lambda y: x + y, lambda y: y * x, lambda y: x == y, x.__matmul__):
            with pytest.raises(UsageError, match="make it one with"):
                function(other)


@pytest.mark.parametrize("key", [True, np.True_, "x", 1.0, (np.ones(7, np.bool_), 0)])
def test_what_is_no_index_is_said(key: Any) -> None:
    with pytest.raises(ShardError, match=r"an index with a mask|of type"):
        sp.array(A, spec(MESH, "x, y"))[key]


@pytest.mark.parametrize(
    "function",
    [
        *(sp.argmax, sp.sort, sp.argsort, sp.cumulative_sum, sp.max, sp.mean, sp.var, sp.diff),
        *(sp.softmax, sp.sum, sp.fft.fft, sp.flip),
    ],
)
@pytest.mark.parametrize("axis", [2, -3, "x", 0.5])
def test_axes_that_are_not_there(function: Any, axis: Any) -> None:
    with pytest.raises(SpecError, match="of 2"):
        function(sp.array(A, spec(MESH, "x, y")), axis=axis)


def test_an_array_without_dimensions_is_an_axis() -> None:
    x, axis = sp.array(A, spec(MESH, "x, y")), np.array(1)
    assert np.array_equal(sp.flip(x, axis=axis).to_dense(), np.flip(A, 1))
    assert np.array_equal(sp.roll(x, 1, axis=axis).to_dense(), np.roll(A, 1, 1))
    assert sp.squeeze(x[:, :1], axis).shape == A.shape[:1]
    for axes in (np.array(1.5), np.array(7)):
        with pytest.raises(SpecError, match="of 2"):
            sp.flip(x, axis=axes)
    with pytest.raises(SpecError, match="permutation"):
        sp.permute_dims(x, axis)
    with pytest.raises(UsageError, match="give a size"):
        sp.max_pool(x, axis)


def test_arguments_that_cannot_be_are_said() -> None:
    x = sp.array(A, spec(MESH, "x, y"))
    with pytest.raises(SpecError, match="of 2"):
        sp.take_along_axis(x, np.array([[0]]), axis=2)
    with pytest.raises(SpecError, match="whole numbers were expected"):
        sp.reshape(x, (7.5, 5))
    with pytest.raises(SpecError, match="whole numbers were expected"):
        sp.roll(x, 1.5, axis=0)
    with pytest.raises(SpecError, match=r"shifts \(1, 2\) of axes"):
        sp.roll(x, (1, 2, 3)[:2], axis=(0, 1, 0))
    with pytest.raises(SpecError, match="give at least one"):
        sp.concat([])
    with pytest.raises(SpecError, match="of 2"):
        sp.split(x, 1, axis=7)
    with pytest.raises(UsageError, match="an array of whole numbers"):
        sp.take(x, [0, 1], axis=0)
    with pytest.raises(UsageError, match="of kind real floating"):
        x[np.array([0.5])]
    with pytest.raises(UsageError, match="no order"):
        sp.max(sp.array(A + 1j, spec(MESH, "x, y")))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_moves_named_as_numpy_names_them(library: str) -> None:
    x = sp.array(A, spec(MESH, "x, y"), runner=sp.in_process(library))
    same(sp.reshape(x, -1), A.reshape(-1))
    same(sp.tile(x, 2), np.tile(A, 2))
    same(sp.roll(x, (1, 2), axis=0), np.roll(A, (1, 2), axis=0))
    same(sp.roll(x, (1,), axis=(0, 1)), np.roll(A, (1,), axis=(0, 1)))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_what_a_library_refuses_is_said(library: str) -> None:
    x = sp.array(A, spec(MESH, "x, y"), runner=sp.in_process(library))
    truth = x > 0
    for function in (lambda: x & x, lambda: ~x, lambda: -truth, lambda: truth - truth):
        with pytest.raises(UsageError, match=rf"\[7, 5\].*: {library} cannot"):
            function()
    with pytest.raises(UsageError, match="inv of"):
        sp.linalg.inv((x @ x.T) * 0)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_sums_of_unsigned_numbers(library: str) -> None:
    data = np.full((7, 5), 200, np.uint8)
    x = sp.array(data, spec(MESH, "x, y"), runner=sp.in_process(library))
    same(sp.sum(x, axis=0), data.sum(0))
    same(sp.mean(x, axis=0), data.mean(0))
    same(sp.var(x, axis=1), data.var(1))


def test_what_is_no_sharding_is_said() -> None:
    with pytest.raises(UsageError, match="is neither a sharding nor a mesh"):
        sp.array(A, "x, y")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="as text"):
        sp.array(A).shard(MESH, "x, y")
    with pytest.raises(UsageError, match="is not a ShardingSpec"):
        sp.ones((4, 6), spec="x, y")
    with pytest.raises(UsageError, match="is neither a sharding nor a mesh"):
        sp.array(A).shard("x, y")


def test_arguments_of_numpy_that_are_not_taken_are_said() -> None:
    x = sp.array(A, spec(MESH, "x, y"))
    for function in (
        lambda: np.std(x, ddof=1),
        lambda: np.max(x, initial=3),
        lambda: np.where(x > 0),
        lambda: np.round(x, 1),
    ):
        with pytest.raises(UsageError, match=r"on an array in shards.*use reshard\.spmd\."):
            function()


def test_a_recorder_overrides_only_the_methods_of_what_it_observes() -> None:
    class Names(sp.Recorder):
        def __init__(self) -> None:
            self.found: list[str] = []

        def record(self, call: CompiledCall, operands: Any, results: Any) -> None:
            self.found.append(call.name)

    names, mesh = Names(), DeviceMesh.of(x=2)
    with sp.recording(names):
        x = sp.array(np.ones((2, 2)), spec(mesh, "x, -"))
        (x @ x).shard(spec(mesh, "-, x")).to_dense()
    assert names.found == ["matmul"]
