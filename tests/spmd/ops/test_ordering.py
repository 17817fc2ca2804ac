"""Sorts along a cut axis against NumPy's: what they find, where it lies, and what moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.geometry.layout_change import LayoutChange
from reshard.spmd.ops.ordering import _SampleSort
from reshard.spmd.shards.runner import InProcess, Runner

MESH = DeviceMesh("permuted", (2, 3), ("x", "y"), (3, 1, 5, 0, 4, 2))
COUNT = 60_011


def numbers(kind: str, dtype: str) -> np.ndarray:
    random = np.random.default_rng(len(kind))
    made = random.normal(size=COUNT) * 30
    if kind == "many equal":
        made[: COUNT // 2] = 3
    elif kind == "rising":
        made.sort()
    elif kind == "falling":
        made = -np.sort(made)
    elif kind == "special" and dtype.startswith("float"):
        made[random.integers(0, COUNT, 500)] = np.nan
        made[[5, 7, 9, 11]] = -0.0, np.inf, 0.0, -np.inf
    return made.astype(dtype)


def dense_order(data: np.ndarray, descending: bool) -> np.ndarray:
    """Where the elements of the sorted array were; equal ones in the order that they had."""
    if not descending:
        return np.argsort(data, stable=True)
    return len(data) - 1 - np.argsort(data[::-1], stable=True)[::-1]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("cut", ["x y", "x / y", "y"])
@pytest.mark.parametrize("kind", ["any", "many equal", "rising", "falling", "special"])
def test_a_cut_dimension_is_sorted_and_stays_cut(kind: str, cut: str, library: str) -> None:
    pytest.importorskip(library)
    for dtype, descending in (("float64", False), ("int8", True), ("float32", True)):
        data = numbers(kind, dtype)
        x = sp.array(data, spec(MESH, cut), runner=sp.in_process(library))
        found = sp.sort(x, descending=descending)
        expected = np.sort(data)[::-1] if descending else np.sort(data)
        np.testing.assert_array_equal(np.asarray(found.to_dense()), expected)
        assert found.spec is x.spec
        order = sp.argsort(x, descending=descending)
        assert np.array_equal(np.asarray(order.to_dense()), dense_order(data, descending))
        assert order.dtype.name == "int64"
        # Places have 8 bytes each: narrow numbers are gathered for less.
        assert (order.spec is x.spec) == (dtype != "int8" and cut != "y")


def test_parts_that_have_no_elements() -> None:
    # Of 9 over 6 by ceil, the last part has none.
    few = np.array([4, 1, 3, 1, 9, 0, 2, 2, 1])
    mesh = DeviceMesh.of(x=6)
    x = sp.array(few, spec(mesh, "x"))
    found = _SampleSort(x, (2, 2, 2, 2, 1, 0), False).run(wants_places=True)
    assert np.array_equal(found.to_dense(), np.argsort(few, stable=True))
    assert found.spec is x.spec


@pytest.mark.parametrize("name", ["sort", "argsort"])
def test_the_rows_of_a_matrix_are_cut_while_its_columns_are_sorted(name: str) -> None:
    data = np.random.default_rng(1).integers(0, 9, size=(50, 3, 11))
    function: Any = getattr(sp, name)
    for cut in ("x y, -, -", "y, -, x", "y x, -, -"):
        x = sp.array(data, spec(MESH, cut))
        found = function(x, axis=0)
        assert found.spec is x.spec
        options = {} if name == "sort" else {"stable": True}
        assert np.array_equal(found.to_dense(), getattr(np, name)(data, axis=0, **options))


class _Moves:
    """The bytes that ranks receive, by the movements that a runner makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moved_bytes = 0
        make = Runner._new_movement

        def counting(runner: Runner, source: Any, target: Any) -> Any:
            if source.spec is not None:
                change = LayoutChange(source.layout, target.layout(source.shape))
                self.moved_bytes += change.moved_elements * source.dtype.itemsize_bytes
            return make(runner, source, target)

        monkeypatch.setattr(Runner, "_new_movement", counting)


def test_less_moves_than_a_gather_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = DeviceMesh("of eight", (8,), ("x",))
    x = sp.array(np.random.default_rng(2).normal(size=400_000), spec(mesh, "x"))
    gathered_bytes = sp.trace(sp.sort, x, strategy="basic").moved_bytes
    assert gathered_bytes == 7 * 400_000 * 8
    for function in (sp.sort, sp.argsort):
        traced_bytes = sp.trace(function, x).moved_bytes
        moves = _Moves(monkeypatch)
        # A runner that has made no movement yet.
        function(sp.array(x.to_dense(), x.spec, runner=InProcess(x.runner.library)))
        assert 0 < moves.moved_bytes < gathered_bytes
        # A trace knows no elements, so that it counts as many as move in any order.
        assert abs(moves.moved_bytes - traced_bytes) < traced_bytes / 4


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_programs_sort_by_samples_too(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = sp.in_process(library)
    program = sp.jit(lambda x: (sp.sort(x) * 2.0, sp.argsort(x, descending=True)))
    gathered = sp.jit(lambda x: sp.sort(x), strategy="basic")
    for seed in range(3):
        data = np.random.default_rng(seed).normal(size=COUNT)
        x = sp.array(data, spec(MESH, "x y"), runner=runner)
        moves = _Moves(monkeypatch)
        found, order = program(x)
        assert moves.moved_bytes < 5 * COUNT * (8 + 8)
        assert found.spec is x.spec and order.spec is x.spec
        assert np.array_equal(np.asarray(found.to_dense()), np.sort(data) * 2)
        assert np.array_equal(np.asarray(order.to_dense()), dense_order(data, True))
        assert np.array_equal(np.asarray(gathered(x).to_dense()), np.sort(data))
    if library == "torch":
        # PyTorch's own gradient goes through a gather.
        leaf = torch.tensor(data, requires_grad=True)
        sp.sum(sp.square(program(sp.array(leaf, spec(MESH, "x y")))[0])).to_dense().backward()
        np.testing.assert_allclose(leaf.grad, 8 * data)


def test_what_is_small_differentiated_or_seen_is_gathered() -> None:
    x = sp.array(np.array([3.0, 1.0, 2.0, 5.0]), spec(MESH, "y"))
    assert str(sp.sort(x).spec) == "-"
    data = np.random.default_rng(3).normal(size=COUNT)
    long = sp.array(data, spec(MESH, "x y"))
    weights = np.arange(float(COUNT))
    gradient = sp.grad(lambda x: sp.sum(sp.sort(x) * weights))(long)
    expected = np.empty(COUNT)
    expected[np.argsort(data)] = weights
    assert np.array_equal(gradient.to_dense(), expected)
