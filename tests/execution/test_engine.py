"""Contributions combined: every reduction, in every element type, to and from partial layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import reshard
from execution.example_arrays import MESH, Shards, array_of, numbers, plan_of, random_bits
from reshard.dtypes import ALL_DTYPES, DType, dtype
from reshard.errors import ShardError
from reshard.execution.arrays import identity, kind_of

REDUCTIONS = ("sum", "max", "min", "mean", "product")

# Values are small, so that no sum or product of them is rounded in any type.

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


def test_overflow_and_nan_give_no_warning() -> None:
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
    neutral = array_kind.element(identity(reduction, kind))
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
