"""Plans carried out on arrays: every element type, every reduction, both kinds of array."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (registers the types that DType.numpy gives)
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import reshard
from reshard.dtypes import ALL_DTYPES, DType, dtype
from reshard.errors import PlanError, ShardError
from reshard.execution.arrays import identity, kind_of
from reshard.layout import Layout

MESH = reshard.DeviceMesh.of(x=2, y=3, devices=[7, 0, 2, 1, 5, 3])
REDUCTIONS = ("sum", "max", "min", "mean", "product")
Shards = dict[int, Any]


def plan_of(source: str, target: str, shape: tuple[int, ...]) -> reshard.Plan:
    return reshard.plan(*(reshard.spec(MESH, text).layout(shape) for text in (source, target)))


def random_bits(kind: DType, shape: tuple[int, ...], seed: int = 0) -> NDArray[Any]:
    """Elements of any bit pattern, as a NumPy array of bare storage."""
    size = (*shape, kind.itemsize_bytes)
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    if kind.name == "bool":
        data &= 1
    return data.view(kind.storage).reshape(shape)


def to_torch(bits: NDArray[Any], kind: DType) -> torch.Tensor:
    carrier = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
    name = carrier[kind.itemsize_bytes]
    return torch.from_numpy(bits.view(name).copy()).view(getattr(torch, kind.name))


def torch_bits(tensor: torch.Tensor, kind: DType) -> NDArray[Any]:
    carrier = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
    plain = tensor.contiguous().view(getattr(torch, carrier[kind.itemsize_bytes]))
    return plain.numpy().view(kind.storage)


def cut(bits: NDArray[Any], layout: Layout) -> dict[int, NDArray[Any]]:
    found = {}
    for slot in layout.holders:
        (box,) = layout.boxes(slot)
        found[slot] = bits[tuple(slice(a, b) for a, b in zip(*box, strict=True))]
    return found


TORCH_DTYPES = [kind for kind in ALL_DTYPES if hasattr(torch, kind.name)]


@pytest.mark.parametrize("kind", ALL_DTYPES, ids=str)
def test_numpy_elements_of_every_type_keep_their_bits(kind: DType) -> None:
    plan = plan_of("x, y", "y, x", (6, 9))
    bits = random_bits(kind, (6, 9))
    shards = {rank: part.view(kind.numpy) for rank, part in cut(bits, plan.source).items()}
    result = plan.run(shards)
    expected = cut(bits, plan.target)
    assert result.keys() == expected.keys()
    for rank, array in result.items():
        assert array.dtype == kind.numpy
        assert array.view(kind.storage).tobytes() == expected[rank].tobytes()
        assert array.shape == expected[rank].shape


@pytest.mark.parametrize("kind", TORCH_DTYPES, ids=str)
def test_torch_elements_of_every_type_keep_their_bits(kind: DType) -> None:
    plan = plan_of("x, y", "y, x", (6, 9))
    bits = random_bits(kind, (6, 9))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        shards = {rank: to_torch(part, kind) for rank, part in cut(bits, plan.source).items()}
        result = plan.run(shards)
    for rank, part in cut(bits, plan.target).items():
        assert result[rank].dtype == getattr(torch, kind.name)
        assert torch_bits(result[rank], kind).tobytes() == part.tobytes()


@pytest.mark.parametrize("kind", ["float32", "complex64", "complex128", "bfloat16", "bool"])
def test_torch_views_of_any_strides_are_read_as_they_are(kind: str) -> None:
    plan = plan_of("x, -", "-, y", (6, 9))
    bits = random_bits(dtype(kind), (9, 12))
    whole = to_torch(bits, dtype(kind))
    # Transposed, and every other column.
    seen = whole.T[::2, :]
    shards = {}
    for rank in plan.source.holders:
        (box,) = plan.source.boxes(rank)
        shards[rank] = seen[box.start[0] : box.stop[0]]
        assert not shards[rank].is_contiguous()
    result = plan.run(shards)
    for rank in plan.target.holders:
        (box,) = plan.target.boxes(rank)
        expected = seen[:, box.start[1] : box.stop[1]]
        found = torch_bits(result[rank], dtype(kind)).tobytes()
        assert found == torch_bits(expected.contiguous(), dtype(kind)).tobytes()


def test_numpy_views_of_any_strides_are_read_as_they_are() -> None:
    plan = plan_of("x, -", "-, y", (6, 9))
    seen = np.arange(9 * 12, dtype=np.float32).reshape(9, 12).T[::-2, ::-1]
    shards = cut(seen, plan.source)
    assert not any(shard.flags.c_contiguous for shard in shards.values())
    result = plan.run(shards)
    for rank, part in cut(seen, plan.target).items():
        assert np.array_equal(result[rank], part)


def test_read_only_arrays_and_broadcasts_are_sources_too() -> None:
    plan = plan_of("-, -", "x, y", (6, 9))
    whole = np.broadcast_to(np.arange(9.0), (6, 9))
    result = plan.run(dict.fromkeys(plan.source.holders, whole))
    assert result[2].tolist() == [[6, 7, 8]] * 3


def test_conjugates_and_negatives_are_resolved() -> None:
    plan = plan_of("x", "-", (4,))
    data = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    lazy = data.conj()
    assert lazy.is_conj()
    shards = {rank: lazy[box.start[0] : box.stop[0]] for rank, box in boxes(plan.source).items()}
    assert torch.equal(plan.run(shards)[0], torch.complex(data.real, -data.imag))
    negative = data.conj().imag
    assert negative.is_neg()
    shards = {
        rank: negative[box.start[0] : box.stop[0]] for rank, box in boxes(plan.source).items()
    }
    assert torch.equal(plan.run(shards)[0], -data.imag)


def boxes(layout: Layout) -> dict[int, reshard.Box]:
    return {rank: layout.boxes(rank)[0] for rank in layout.holders}


def test_parameters_are_read_without_their_gradients() -> None:
    plan = plan_of("x", "-", (4,))
    weight = torch.nn.Parameter(torch.arange(4.0))
    shards = {rank: weight[box.start[0] : box.stop[0]] for rank, box in boxes(plan.source).items()}
    assert all(shard.requires_grad for shard in shards.values())
    result = plan.run(shards)
    assert not any(shard.requires_grad for shard in result.values())
    result[0][0] = 99
    assert weight[0] == 0


@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_sources_are_untouched_and_nothing_is_shared(module: str) -> None:
    plan = plan_of("x, y", "x, y", (6, 9))
    whole = np.arange(54, dtype=np.float32).reshape(6, 9)
    shards: Shards = cut(whole.copy(), plan.source)
    if module == "torch":
        shards = {rank: torch.from_numpy(shard) for rank, shard in shards.items()}
    result = plan.run(shards)
    for rank, made in result.items():
        assert not np.shares_memory(np.asarray(made), np.asarray(shards[rank]))
        made[...] = -1
    for rank, part in cut(whole, plan.source).items():
        assert np.array_equal(np.asarray(shards[rank]), part)


def test_scalars_and_tensors_without_elements() -> None:
    scalar = plan_of("", "", ())
    result = scalar.run({rank: np.array(rank * 0 + 5) for rank in MESH.devices})
    assert {rank: int(value) for rank, value in result.items()} == dict.fromkeys(MESH.devices, 5)
    assert scalar.run(dict.fromkeys(MESH.devices, np.int64(5)))[0].shape == ()
    empty = plan_of("x, -", "-, y", (4, 0))
    result = empty.run({rank: np.zeros((2, 0), np.int8) for rank in MESH.devices})
    assert {array.shape for array in result.values()} == {(4, 0)}


def test_padding_of_the_target_is_zero_and_of_the_source_unread() -> None:
    mesh = reshard.DeviceMesh.of(x=2)
    padded, plain = (reshard.spec(mesh, text).layout((3,)) for text in ("x@pad4", "x"))
    out = reshard.plan(plain, padded).run({0: np.array([1, 2]), 1: np.array([3])})
    assert out[0].tolist() == [1, 2, 3, 0]
    assert out[1].tolist() == [0, 0, 0, 0]
    rubbish = {0: np.array([1, 2, 3, 99]), 1: np.array([99] * 4)}
    back = reshard.plan(padded, plain).run(rubbish)
    assert (back[0].tolist(), back[1].tolist()) == ([1, 2], [3])


# Reductions. Values are small, so that no sum or product of them is rounded in any type.

VALUES = {0: [1, 2, 0], 1: [2, 1, 2], 2: [1, 4, 1]}
REDUCED = {
    "sum": [4, 7, 3],
    "max": [2, 4, 2],
    "min": [1, 1, 0],
    "product": [2, 8, 0],
}
WITH_ARITHMETIC = [
    (kind, module)
    for kind in ALL_DTYPES
    if kind.name not in ("bool", "float8_e8m0fnu") and not kind.name.startswith("complex")
    for module in ("numpy", "torch")
    if module == "numpy" or hasattr(torch, kind.name)
]
WITH_FRACTIONS = [pair for pair in WITH_ARITHMETIC if "float" in pair[0].name]


def array_of(values: list[float], kind: DType, module: str) -> Any:
    if module == "torch":
        return torch.tensor(values, dtype=torch.float64).to(getattr(torch, kind.name))
    return np.array(values).astype(kind.numpy)


def numbers(array: Any) -> list[float]:
    if isinstance(array, torch.Tensor):
        return array.to(torch.float64).tolist()
    return array.astype(np.float64).tolist()


def contribution_shards(plan: reshard.Plan, make: Callable[[int], Any]) -> Shards:
    cells = zip(plan.source.cell_slot.tolist(), plan.source.cell_contribution, strict=True)
    return {slot: make(int(contribution)) for slot, contribution in cells}


@pytest.mark.parametrize("reduction", REDUCED)
@pytest.mark.parametrize(("kind", "module"), WITH_ARITHMETIC, ids=str)
def test_contributions_are_reduced_in_every_type(kind: DType, reduction: str, module: str) -> None:
    plan = plan_of(f"- | {reduction}(y)", "-", (3,))
    shards = contribution_shards(plan, lambda c: array_of(VALUES[c], kind, module))
    for array in plan.run(shards).values():
        assert numbers(array) == REDUCED[reduction]


@pytest.mark.parametrize(("kind", "module"), WITH_FRACTIONS, ids=str)
def test_means_are_exact_in_narrow_types_too(kind: DType, module: str) -> None:
    # 17 is no number of most float8 types; a mean over 17 must divide by 17 all the same.
    mesh = reshard.DeviceMesh.of(x=17)
    plan = reshard.plan(*(reshard.spec(mesh, text).layout((1,)) for text in ("- | mean(x)", "-")))
    shards = contribution_shards(plan, lambda c: array_of([8.5 if c == 0 else 0], kind, module))
    expected = numbers(array_of([numbers(shards[0])[0] / 17], kind, module))
    assert numbers(plan.run(shards)[3]) == expected


@pytest.mark.parametrize("module", ["numpy", "torch"])
@pytest.mark.parametrize("kind", ["complex64", "complex128"])
def test_complex_numbers_add_multiply_and_average(kind: str, module: str) -> None:
    values = [np.array([1 + 2j]), np.array([2 - 1j]), np.array([3j])]

    def make(contribution: int) -> Any:
        array = values[contribution].astype(kind)
        return torch.from_numpy(array) if module == "torch" else array

    for reduction, expected in (("sum", 3 + 4j), ("product", -9 + 12j), ("mean", (3 + 4j) / 3)):
        plan = plan_of(f"- | {reduction}(y)", "-", (1,))
        result = plan.run(contribution_shards(plan, make))[0]
        np.testing.assert_allclose(np.asarray(result), [expected], rtol=1e-6)


@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_truth_values_are_or_and_and(module: str) -> None:
    def make(contribution: int) -> Any:
        array = np.array([[True, False, False], [True, True, False], [True, False, False]])
        return torch.from_numpy(array[contribution]) if module == "torch" else array[contribution]

    either, both = [True, True, False], [True, False, False]
    for reduction, expected in (("sum", either), ("max", either), ("min", both), ("product", both)):
        plan = plan_of(f"- | {reduction}(y)", "-", (3,))
        assert plan.run(contribution_shards(plan, make))[0].tolist() == expected


@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_whole_numbers_wrap_around_alike(module: str) -> None:
    plan = plan_of("- | sum(y)", "-", (1,))

    def make(_: int) -> Any:
        array = np.array([100], np.uint8)
        return torch.from_numpy(array) if module == "torch" else array

    assert plan.run(contribution_shards(plan, make))[0].tolist() == [300 - 256]


def test_contributions_are_combined_in_their_order() -> None:
    # In this order the large ones cancel first; in any other 1 is lost.
    values = {0: 1e20, 1: -1e20, 2: 1.0}
    plan = plan_of("- | sum(y)", "x", (2,))
    shards = contribution_shards(plan, lambda c: np.full(2, values[c]))
    assert {tuple(array.tolist()) for array in plan.run(shards).values()} == {(1.0,)}


def test_overflow_and_what_is_no_number_pass_without_a_warning() -> None:
    values = {0: [3e38, np.inf], 1: [3e38, -np.inf], 2: [0, 0]}
    plan = plan_of("- | sum(y)", "-", (2,))
    shards = contribution_shards(plan, lambda c: np.array(values[c], np.float32))
    found = plan.run(shards)[0]
    assert np.isinf(found[0]) and np.isnan(found[1])


# From and to partial.


def contributions(plan: reshard.Plan, result: Mapping[int, Any]) -> dict[int, list[float]]:
    """What each contribution of the target is, every copy of it the same."""
    found: dict[int, list[float]] = {}
    cells = zip(plan.target.cell_slot.tolist(), plan.target.cell_contribution, strict=True)
    for slot, contribution in cells:
        values = numbers(result[slot])
        assert found.setdefault(int(contribution), values) == values
    return found


IDENTITIES = {"sum": 0.0, "mean": 5.0, "max": -np.inf, "min": np.inf, "product": 1.0}


@pytest.mark.parametrize("module", ["numpy", "torch"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_replicated_tensor_made_partial_keeps_one_copy(reduction: str, module: str) -> None:
    plan = plan_of("-", f"- | {reduction}(y)", (1,))
    whole = array_of([5], dtype("float32"), module)
    result = plan.run(dict.fromkeys(MESH.devices, whole))
    rest = IDENTITIES[reduction]
    assert contributions(plan, result) == {0: [5.0], 1: [rest], 2: [rest]}
    assert plan.moved_elements == 0


@pytest.mark.parametrize(("kind", "module"), WITH_ARITHMETIC, ids=str)
@pytest.mark.parametrize("reduction", ["max", "min", "sum", "product"])
def test_the_identity_of_every_type_changes_nothing(
    kind: DType, reduction: str, module: str
) -> None:
    array_kind = kind_of(array_of([1], kind, module), "example")
    neutral = identity(reduction, array_kind)
    assert neutral.shape == (1,)
    bits = np.arange(256).astype(np.uint8)
    every = bits.view(kind.storage) if kind.itemsize_bytes == 1 else random_bits(kind, (256,))
    combined = array_kind.combine(reduction, np.broadcast_to(neutral, every.shape).copy(), every)
    before, after = (kind_numbers(storage, kind) for storage in (every, combined))
    real = ~np.isnan(before)
    # Narrow types without infinities may only lose them, which they do not have.
    np.testing.assert_array_equal(after[real], before[real])


def kind_numbers(storage: NDArray[Any], kind: DType) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        return storage.view(kind.numpy).astype(np.float64)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("- | sum(y)", "- | sum(y)"),
        ("- | sum(y)", "- | sum(x)"),
        ("- | sum(x y)", "- | sum(y)"),
        ("- | sum(y)", "- | sum(x y)"),
        ("- | sum(y)", "- | max(y)"),
        ("- | max(y)", "- | sum(x)"),
        ("- | min(x)", "- | product(y)"),
        ("x | sum(y)", "y | sum(x)"),
        ("- | mean(y)", "- | mean(x)"),
        ("- | mean(y)", "- | sum(y)"),
        ("- | sum(x)", "- | mean(y)"),
        ("- | mean(y)", "-"),
        ("-", "- | mean(y)"),
    ],
)
def test_partial_to_partial_means_the_same_tensor(source: str, target: str) -> None:
    shape = (6,)
    plan = plan_of(source, target, shape)
    count = plan.source.contributions
    dense = np.random.default_rng(3).integers(1, 9, (count, *shape)).astype(np.float64)
    shards = {}
    for cell, slot in enumerate(plan.source.cell_slot.tolist()):
        (box,) = plan.source.boxes(slot)
        carried = plan.source.cell_contribution[cell]
        shards[slot] = dense[carried, box.start[0] : box.stop[0]]
    result = plan.run(shards)
    made = np.full((plan.target.contributions, *shape), np.nan)
    for cell, slot in enumerate(plan.target.cell_slot.tolist()):
        (box,) = plan.target.boxes(slot)
        made[plan.target.cell_contribution[cell], box.start[0] : box.stop[0]] = result[slot]

    def reduce(reduction: str | None, parts: NDArray[Any]) -> NDArray[Any]:
        return {
            None: lambda: parts[0],
            "sum": lambda: parts.sum(0),
            "max": lambda: parts.max(0),
            "min": lambda: parts.min(0),
            "product": lambda: parts.prod(0),
            "mean": lambda: parts.mean(0),
        }[reduction]()

    expected = reduce(plan.source.reduction, dense)
    np.testing.assert_allclose(reduce(plan.target.reduction, made), expected, rtol=1e-12)


def test_the_same_partial_layout_moves_nothing() -> None:
    plan = plan_of("x | sum(y)", "x | sum(y)", (6,))
    assert plan.moved_elements == 0


# Errors.

ROWS_TO_COLUMNS = plan_of("x, -", "-, x", (4, 4))


def good_shards() -> Shards:
    return {rank: np.zeros((2, 4), np.float32) for rank in MESH.devices}


def replaced(rank: int, array: Any) -> Shards:
    return good_shards() | {rank: array}


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (dict, r"no array for slot 0; the source holds data on slots \[0, 1, 2, 3, 5, 7\]"),
        (
            lambda: {rank: array for rank, array in good_shards().items() if rank != 5},
            r"no array for slot 5; .* got \[0, 1, 2, 3, 7\]",
        ),
        (
            lambda: replaced(3, np.zeros((4, 2), np.float32)),
            r"array of slot 3 has shape \[4, 2\], but the source layout says \[2, 4\]",
        ),
        (
            lambda: replaced(3, np.zeros((2, 4), np.float64)),
            "slot 3 is NumpyArrays of float64, that of slot 0 NumpyArrays of float32",
        ),
        (
            lambda: replaced(3, torch.zeros((2, 4))),
            "slot 3 is TorchTensors of float32, that of slot 0 NumpyArrays",
        ),
        (lambda: replaced(3, [[0.0] * 4] * 2), "the array of slot 3 is a list"),
        (
            lambda: replaced(3, np.full((2, 4), None)),
            "the array of slot 3: dtype 'object'",
        ),
        (
            lambda: replaced(3, np.zeros((2, 4), ">f4")),
            "the array of slot 3: .* other order",
        ),
        (
            lambda: {rank: torch.zeros((2, 4), device="meta") for rank in MESH.devices},
            r"a tensor on device meta; .* tensor.cpu\(\)",
        ),
        (
            lambda: {rank: torch.zeros((2, 4)).to_sparse() for rank in MESH.devices},
            "a tensor of layout torch.sparse_coo; dense tensors are expected",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(shards: Callable[[], Shards], message: str) -> None:
    with pytest.raises(ShardError, match=message):
        ROWS_TO_COLUMNS.run(shards())


def test_arrays_of_another_type_than_the_plans_are_refused() -> None:
    layout = Layout.replicated((2,))
    plan = reshard.plan(layout, layout, dtype="bfloat16")
    with pytest.raises(ShardError, match="arrays of float32 for a plan of bfloat16"):
        plan.run({0: np.zeros(2, np.float32)})


@pytest.mark.parametrize("module", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("source", "target", "kind", "message"),
    [
        ("- | mean(y)", "-", "int8", "a mean of int8 is not exact"),
        ("- | mean(y)", "-", "bool", "a mean of bool is not exact"),
        ("- | max(y)", "-", "complex64", "max of complex64: complex numbers have no order"),
        ("-", "- | min(y)", "complex64", "min of complex64: complex numbers have no order"),
    ],
)
def test_reductions_that_a_type_has_not_are_refused(
    source: str, target: str, kind: str, message: str, module: str
) -> None:
    plan = plan_of(source, target, (2,))
    array = array_of([1, 1], dtype(kind), module)
    with pytest.raises(ShardError, match=message):
        plan.run(dict.fromkeys(MESH.devices, array))


def test_a_source_that_holds_nothing_cannot_be_run() -> None:
    plan = reshard.plan(Layout.whole((2,), [], 1), Layout.replicated((2,)))
    with pytest.raises(ShardError, match="the source layout holds nothing"):
        plan.run({})


def test_a_source_with_a_hole_fails_before_anything_is_made() -> None:
    half = Layout.flat_ranges((4,), {0: (0, 2)})
    with pytest.raises(PlanError, match="only 2 of the 4 elements"):
        reshard.plan(half, Layout.replicated((4,))).run({0: np.zeros(2)})


def test_arrays_on_slots_that_hold_nothing_are_ignored() -> None:
    plan = reshard.plan(Layout.whole((2,), [1], 2), Layout.whole((2,), [0], 1))
    result = plan.run({0: np.zeros(7), 1: np.array([3, 4])})
    assert result.keys() == {0}
    assert result[0].tolist() == [3, 4]
