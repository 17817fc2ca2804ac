"""The seed's own program, and what an array says of itself."""

from __future__ import annotations

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import spec
from reshard.errors import MeshError, ShardError, SpecError, UsageError
from reshard.spmd import DeviceMesh, DimSpec, Tensor


def test_the_seeds_program_runs() -> None:
    mesh = DeviceMesh("test", (2,), ("x",))
    a = Tensor.ones((4, 8)).trace()
    w = sp.array(np.arange(24.0, dtype=np.float32).reshape(8, 3))
    a_sharded = a.shard(mesh, [DimSpec(["x"]), DimSpec([])])
    b = (a_sharded @ w).with_sharding(mesh, [DimSpec([]), DimSpec([])])
    assert str((a_sharded @ w).spec) == "x, -"
    assert str(b.spec) == "-, -"
    np.testing.assert_array_equal(b.to_dense(), np.ones((4, 8)) @ w.to_dense())


def test_operations_leave_their_operands_alone() -> None:
    mesh = DeviceMesh.of(x=2)
    data = np.arange(6.0)
    x = sp.array(data, spec(mesh, "x"))
    y = x + 1
    np.testing.assert_array_equal(x.to_dense(), data)
    np.testing.assert_array_equal(y.to_dense(), data + 1)
    with pytest.raises(ShardError, match="assignment to index 0"):
        x[0] = 1.0


def test_a_reshard_back_and_forth_is_what_it_was() -> None:
    mesh = DeviceMesh.of(x=2, y=3)
    data = np.random.default_rng(0).normal(size=(7, 5))
    x = sp.array(data, spec(mesh, "x, y"))
    for text in ("y, x", "-, x y", "y x, -", "-, -", "y / x, -", "x, y"):
        x = x.shard(spec(mesh, text))
        assert str(x.spec) == text
        np.testing.assert_array_equal(x.to_dense(), data)
        for rank, shard in x.shards.items():
            assert shard.shape == x.type.layout.local_shape(rank)


def test_shards_given_by_rank_are_the_array() -> None:
    mesh = DeviceMesh.of(x=2, y=3)
    x = sp.array(np.arange(35).reshape(7, 5), spec(mesh, "x, y"))
    assert x.spec is not None
    again = sp.from_shards(x.shards, x.shape, x.spec)
    np.testing.assert_array_equal(again.to_dense(), x.to_dense())
    with pytest.raises(ShardError, match=r"shards of ranks \[0\]"):
        sp.from_shards({0: x.shards[0]}, x.shape, x.spec)
    wrong = {**x.shards, 3: np.zeros((9, 9), np.int64)}
    with pytest.raises(ShardError, match=r"rank 3 has shape \[9, 9\]"):
        sp.from_shards(wrong, x.shape, x.spec)


def test_two_meshes_are_an_error_that_names_both() -> None:
    one = sp.array(np.ones(4), spec(DeviceMesh.of(x=2), "x"))
    other = sp.array(np.ones(4), spec(DeviceMesh.of(name="other", x=2), "x"))
    with pytest.raises(MeshError, match=r"DeviceMesh\(x=2\).*DeviceMesh\('other', x=2\)"):
        one + other


def test_what_cannot_be_is_said() -> None:
    mesh = DeviceMesh.of(x=2)
    x = sp.array(np.ones((4, 2)), spec(mesh, "x, -"))
    with pytest.raises(SpecError, match="for arrays of 1 dimensions"):
        x.shard(spec(mesh, "x"))
    with pytest.raises(UsageError, match="give a DimSpec for each dimension"):
        x.shard(mesh)
    with pytest.raises(SpecError, match="leaves out devices"):
        x.shard(spec(mesh, "-, - | only(x=1)"))
    with pytest.raises(SpecError):
        x @ sp.array(np.ones((3, 2)))
    with pytest.raises(UsageError, match=r"at least one sp\.array"):
        sp.add(1, 2)
