"""Movements of shards that hold copies of their neighbours' elements, and padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.dtypes import dtype
from reshard.execution.arrays import kind_of
from reshard.geometry.layout_change import LayoutChange
from reshard.plans.run import run_change
from reshard.spmd.core.backend import library as find_library
from reshard.spmd.shards.shard_copies import copies

FOUR = DeviceMesh.of(x=4)
MESH = DeviceMesh.of(x=2, y=2)
CUTS = (
    *("x@halo[1,1]", "x y@halo[1,0]", "y@halo[2,3]", "x@halo[1,1,padded]", "x@halo[1,1,fresh]"),
    *("x@balanced@halo[1,1]", "x@cyclic1", "x y", "x / y", "-"),
)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_sum_counts_each_element_once(library: str) -> None:
    with sp.running(sp.in_process(library)):
        x = sp.array(np.arange(8.0), spec(FOUR, "x@halo[1,1]"))
        assert [len(shard) for shard in x.shards.values()] == [3, 4, 4, 3]
        assert float(sp.sum(x)) == 28.0
        for shard in x.shard(spec(FOUR, "-")).shards.values():
            assert shard.tolist() == list(range(8))
        assert np.asarray(x + x).tolist() == [2.0 * n for n in range(8)]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("source", CUTS)
def test_every_cut_from_and_to_halos(source: str, library: str) -> None:
    data = np.arange(33.0).reshape(11, 3)
    with sp.running(sp.in_process(library)):
        x = sp.array(data, spec(MESH, f"{source}, -"))
        for target in CUTS:
            moved = x.shard(spec(MESH, f"{target}, -"))
            expected = sp.array(data, spec(MESH, f"{target}, -"))
            for rank, shard in moved.shards.items():
                np.testing.assert_array_equal(shard, expected.shards[rank], f"to {target}")
            assert float(sp.sum(moved)) == data.sum(), target
            np.testing.assert_array_equal(np.asarray(moved), data)


def test_parts_of_ranks_own_shards_are_views() -> None:
    texts = ("x, -", "x, y"), ("-, -", "y, -"), ("y, -", "y, -"), ("x, -", "x y, -")
    data = np.arange(32.0).reshape(8, 4)
    for before, after in texts:
        source, target = (spec(MESH, text).layout(data.shape) for text in (before, after))
        change = LayoutChange(source, target)
        own = tuple(sp.array(data, spec(MESH, before)).shards.values())
        found = copies(change, range(4), range(4), sp.in_process().library)(own)
        # Nothing is asked of other ranks, so that no transfers are listed.
        assert "transfers" not in vars(change), (before, after)
        right = sp.array(data, spec(MESH, after)).shards
        for rank, shard in enumerate(found):
            np.testing.assert_array_equal(shard, right[rank])
            assert np.shares_memory(shard, own[rank])


def test_ranks_that_need_others_shards_are_given_copies() -> None:
    texts = ("x, -", "-, -"), ("x, -", "y, -"), ("x@halo[1,1], -", "x, -"), ("x, -", "-, x")
    for before, after in texts:
        source, target = (spec(MESH, text).layout((6, 4)) for text in (before, after))
        change = LayoutChange(source, target)
        copies(change, range(4), range(4), sp.in_process().library)
        assert "transfers" in vars(change), (before, after)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_arrays_go_to_other_meshes(library: str) -> None:
    """Whatever ranks they share, and however both are cut."""
    if library == "torch":
        pytest.importorskip("torch")
    one = DeviceMesh.of(x=2)
    two = DeviceMesh.of(x=2, y=2, devices=range(2, 6))
    three = DeviceMesh.of(x=2, devices=(1, 3))
    value = np.arange(48.0).reshape(6, 8)
    ways = [
        (two, "x, y"),
        (two, "-, -"),
        (two, "y x, -"),
        (three, "x, -"),
        (three, "-, x@halo[1,1]"),
    ]
    with sp.running(sp.in_process(library)):
        for cut in ("x, -", "-, x", "-, -", "x@blocks[1,5], -", "x@cyclic1, -"):
            x = sp.array(value, spec(one, cut))
            for mesh, other in ways:
                moved = x.shard(spec(mesh, other))
                assert moved.mesh is mesh
                assert np.array_equal(np.asarray(moved.to_dense()), value)
                assert np.array_equal(np.asarray(moved.shard(x.spec).to_dense()), value)
        # Contributions are combined on the way.
        product = sp.array(value, spec(one, "-, x")) @ sp.array(value.T, spec(one, "x, -"))
        assert product.spec.partial_axes
        moved = product.shard(spec(two, "x, y"))
        np.testing.assert_allclose(np.asarray(moved.to_dense()), value @ value.T, rtol=1e-12)


def test_gradients_come_back_from_other_meshes() -> None:
    one, two = (DeviceMesh.of(x=2, devices=ranks) for ranks in ((0, 1), (2, 3)))
    x = sp.array(np.arange(12.0).reshape(4, 3), spec(one, "x, -"))

    def function(x: Any) -> Any:
        there = sp.sum(x.shard(spec(two, "-, -")) ** 2)
        return sp.sum(x * x) + there.shard(spec(one, ""))

    _, slope = sp.value_and_grad(function)(x)
    assert slope.spec is x.spec
    assert np.array_equal(slope.to_dense(), 4 * x.to_dense())


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("-, - | mean(x)", "x, -"),
        ("-, - | mean(x)", "-, x | max(y)"),
        ("x, -", "x@halo[1,1,padded], - | sum(y)"),
        ("-, - | product(x)", "-, y"),
    ],
)
def test_shards_have_the_bits_of_a_plan(source: str, target: str, library: str) -> None:
    change = LayoutChange(*(spec(MESH, text).layout((7, 3)) for text in (source, target)))
    contributions = np.random.default_rng(1).normal(size=(2, 7, 3))
    held = change.source
    for name in ("float16", "bfloat16", "float8_e4m3fn"):
        shards: dict[int, Any] = {}
        for rank in range(4):
            whole = contributions[held.cell_contribution[held.cells_of(rank)[0]]]
            (box,) = held.boxes(rank)
            shards[rank] = whole[tuple(map(slice, *box))].astype(dtype(name).numpy)
        if library == "torch":
            kind = getattr(torch, name)
            shards = {r: torch.from_numpy(a.astype(np.float32)).to(kind) for r, a in shards.items()}
        expected = run_change(change, shards)
        move = copies(change, range(4), range(4), find_library(library))
        for rank, shard in enumerate(move(tuple(shards.values()))):
            assert kind_of(shard, "").storage(shard).tobytes() == (
                kind_of(shard, "").storage(expected[rank]).tobytes()
            )
