"""Movements of shards that hold copies of their neighbours' elements, and padding."""

from __future__ import annotations

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec

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
