"""Kept reshards: moved once, never stale, within a bound, the same on every rank, by threads."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import UsageError
from reshard.spmd import ShardedArray
from reshard.spmd.shards.array_value import ReshardCache, take_moved
from reshard.spmd.shards.runner import InProcess, Runner

MESH = DeviceMesh.of(x=2, y=3)
LIBRARIES = ["numpy", "torch"]


class Counted:
    """A runner of its own, whose movements are counted."""

    def __init__(self, name: str) -> None:
        self.runner: Runner = InProcess(sp.in_process(name).library)
        self.count = 0
        make = self.runner._make_movement

        def counted(*given: Any) -> Any:
            move = make(*given)

            def moved(shards: Any) -> Any:
                self.count += 1
                return move(shards)

            return moved

        self.runner._make_movement = counted  # type: ignore[method-assign]

    def rows(self, shape: tuple[int, ...] = (12, 6), text: str = "x, -") -> ShardedArray:
        """An array that an operation made."""
        data = np.arange(np.prod(shape), dtype="float64").reshape(shape)
        return sp.array(data, spec(MESH, text), runner=self.runner) * 2.0

    def pending(self) -> ShardedArray:
        """Contributions over `y`."""
        left = sp.array(np.ones((4, 6)), spec(MESH, "-, y"), runner=self.runner)
        right = sp.array(np.arange(48.0).reshape(6, 8), spec(MESH, "y, -"), runner=self.runner)
        return left @ right


@pytest.fixture(params=LIBRARIES)
def counted(request: pytest.FixtureRequest) -> Counted:
    return Counted(request.param)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (sp.rms_norm, 1),
        (lambda x: sp.log_softmax(x, axis=1), 1),
        # Its mean is combined by itself: one number a row.
        (sp.layer_norm, 2),
        (lambda x: sp.exp(x) + sp.sin(x) * sp.sqrt(x), 1),
    ],
    ids=["rms_norm", "log_softmax", "layer_norm", "elementwise"],
)
def test_contributions_are_combined_once(
    counted: Counted, function: Callable[[Any], Any], count: int
) -> None:
    x = counted.pending()
    assert str(x.spec) == "-, - | sum(y)"
    expected = function(sp.array(x.to_dense(), runner=counted.runner)).to_dense()
    counted.count = 0
    found = function(x)
    assert counted.count == count
    np.testing.assert_allclose(found.to_dense(), expected, 1e-12)


def test_parts_that_three_products_need_are_gathered_once(counted: Counted) -> None:
    x = counted.rows(text="x, -")
    weights = [
        sp.array(np.full((6, 4), n), spec(MESH, "-, x"), runner=counted.runner) for n in (1, 2, 3)
    ]
    counted.count = 0
    whole = [x.shard(spec(MESH, "-, -")) @ w for w in weights]
    assert counted.count == 1
    assert [str(one.spec) for one in whole] == ["-, x"] * 3
    # Another sharding is another movement, and an array of its own is its own.
    x.shard(spec(MESH, "-, x"))
    (x + 1.0).shard(spec(MESH, "-, -"))
    assert counted.count == 3


def test_given_data_that_a_program_writes_to_is_moved_again(counted: Counted) -> None:
    numpy = np.arange(12.0).reshape(6, 2)
    own = counted.runner.library.array(numpy)
    parts = {rank: own[2 * (rank % 3) : 2 * (rank % 3) + 2] for rank in range(6)}
    x = sp.from_shards(parts, (6, 2), spec(MESH, "y, -"), runner=counted.runner)
    whole = sp.array(own, spec(MESH, "y, -"), runner=counted.runner)
    views = [x, whole, x.T, sp.reshape(x, (6, 2)), x[:, ::-1], sp.squeeze(x[:, None, :], axis=1)]
    targets = [spec(MESH, "-, -")] * len(views)
    for one, target in zip(views, targets, strict=True):
        one.shard(target)
    own[:] = 7.0
    for one, target in zip(views, targets, strict=True):
        # Some are views of what was given, some copies: they are what their own shards are.
        np.testing.assert_array_equal(one.shard(target).shards[0], one.to_dense())
    # NumPy's were copied when they were first moved; tensors are moved again.
    seen = np.arange(12.0).reshape(6, 2) if counted.runner.library.name == "numpy" else 7.0
    assert (np.asarray(x.shard(targets[0]).shards[5]) == seen).all()


def qkv(x: Any, weights: list[Any]) -> list[Any]:
    return [x @ one for one in weights]


@pytest.mark.parametrize(
    ("given", "count"), [("numpy", 1), ("torch", 3), ("list", 1), ("cast", 1), ("view", 3)]
)
def test_three_products_of_a_given_array_gather_as_often_as_traced(given: str, count: int) -> None:
    counted = Counted("torch" if given in ("torch", "view") else "numpy")
    data = np.arange(32.0).reshape(4, 8)
    tensor = torch.from_numpy(data)
    kinds = {"list": data.tolist(), "cast": data.astype("float32"), "numpy": data}
    x = sp.array(
        kinds.get(given, tensor.mT if given == "view" else tensor),
        spec(MESH, "-, x" if given == "view" else "x, -"),
        dtype="float64" if given == "cast" else None,
        runner=counted.runner,
    )
    if given == "view":
        x = x.mT
    weights = [
        sp.array(np.full((8, 64), n), spec(MESH, "-, x"), dtype="float64", runner=counted.runner)
        for n in (1, 2, 3)
    ]
    traced = sp.trace(qkv, x, weights)
    assert [bool(one.before) for one in traced.operations] == [True, count > 1, count > 1]
    counted.count = 0
    found = qkv(x, weights)
    assert counted.count == count
    for n, one in enumerate(found, 1):
        np.testing.assert_allclose(one.to_dense(), data @ np.full((8, 64), float(n)))
    # Programs move an argument once.
    program = sp.jit(qkv)
    assert sum(bool(one.before) for one in program.trace(x, weights).operations) == 1


def test_views_are_traced_as_they_move(counted: Counted) -> None:
    own = counted.runner.library.array(np.arange(32.0).reshape(8, 4))
    x = sp.array(own, spec(MESH, "-, x"), runner=counted.runner)
    weight = sp.array(np.ones((8, 64)), spec(MESH, "-, x"), runner=counted.runner)

    def turned(x: Any, weight: Any) -> list[Any]:
        view = x.mT
        return [view @ weight, sp.exp(view @ weight)]

    traced = sp.trace(turned, x, weight)
    counted.count = 0
    turned(x, weight)
    # Of NumPy's, the view is copied when it is moved.
    expected = 1 if counted.runner.library.name == "numpy" else 2
    assert counted.count == sum(bool(one.before) for one in traced.operations) == expected


def test_views_of_given_data_are_not_copied() -> None:
    data = np.arange(12.0).reshape(6, 2)
    x = sp.array(data, runner=Counted("numpy").runner)
    rows = x.shard(spec(MESH, "y, -"))
    assert np.shares_memory(data, rows.shards[0]) and x.is_given and rows.is_given


def test_shards_that_were_taken_are_moved_unchanged() -> None:
    counted = Counted("numpy")
    x = sp.array(np.zeros((6, 2)), spec(MESH, "y, -"), runner=counted.runner)
    first, counted.count = x.shards[0], 0
    x.shard(spec(MESH, "-, -"))
    first[...] = 5.0
    assert x.shard(spec(MESH, "-, -")).to_dense()[:2].tolist() == [[5.0, 5.0]] * 2
    assert x.is_given and counted.count == 2


def test_shards_that_were_taken_and_written_to_are_moved_again(counted: Counted) -> None:
    x = counted.rows()
    target = spec(MESH, "-, -")
    first = x.shard(target)
    for shard in x.shards.values():
        shard[...] = 5.0
    assert (np.asarray(x.shard(target).to_dense()) == 5.0).all()
    # What was moved is written to: it is not what another one gets.
    y = counted.rows()
    moved = y.shard(target)
    for shard in moved.shards.values():
        shard[...] = 9.0
    np.testing.assert_array_equal(y.shard(target).to_dense(), y.to_dense())
    np.testing.assert_array_equal(first.to_dense(), counted.rows().to_dense())


def test_the_cache_is_bounded_and_evicts_the_oldest_first(counted: Counted) -> None:
    arrays = [counted.rows() for _ in range(4)]
    target = spec(MESH, "-, -")
    # Six copies of 12 * 6 numbers of 8 bytes; two such are kept.
    counted.runner.reshard_cache = ReshardCache(counted.runner, 2 * 6 * 576 + 100)
    for one in arrays:
        one.shard(target)
    assert counted.runner.reshard_cache.size_bytes == 2 * 6 * 576
    counted.count = 0
    arrays[3].shard(target)
    arrays[2].shard(target)
    assert counted.count == 0
    arrays[0].shard(target)
    assert counted.count == 1
    arrays[2].shard(target)
    assert counted.count == 2
    # One above the bound is not kept at all.
    counted.runner.reshard_cache = ReshardCache(counted.runner, 100)
    arrays[1].shard(target)
    arrays[1].shard(target)
    assert (counted.count, counted.runner.reshard_cache.size_bytes) == (4, 0)


def test_caching_does_not_depend_on_when_arrays_are_freed() -> None:
    counts = []
    for collects in (False, True):
        counted = Counted("numpy")
        counted.runner.reshard_cache = ReshardCache(counted.runner, 2 * 6 * 576 + 100)
        last = counted.rows()
        target = spec(MESH, "-, -")
        last.shard(target)
        for _ in range(3):
            other = [counted.rows()]
            other[0].shard(target)
            other.append(other)  # type: ignore[arg-type]
            del other
            if collects:
                gc.collect()
        last.shard(target)
        counts.append(counted.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("is_given", [True, False])
def test_constants_of_a_traced_function_keep_their_elements(
    counted: Counted, is_given: bool
) -> None:
    whole = counted.runner.library.array(np.arange(12.0).reshape(2, 6))
    weight = sp.array(whole, spec(MESH, "x, -"), runner=counted.runner)
    weight = weight if is_given else weight * 1.0
    x = counted.rows((6, 2), "y, x")
    traced = sp.trace(lambda x: x @ weight, x)
    assert weight.cached_reshards() in (None, {})
    for found in (traced.run(x), x @ weight, sp.jit(lambda x: x @ weight)(x)):
        np.testing.assert_array_equal(found.to_dense(), x.to_dense() @ weight.to_dense())
    moved = weight.shard(spec(MESH, "-, y")).to_dense()
    np.testing.assert_array_equal(moved, weight.to_dense())


def test_cached_reshards_are_freed_with_their_array(counted: Counted) -> None:
    x = counted.rows()
    x.shard(spec(MESH, "-, -"))
    kept = x.cached_reshards()
    assert kept is not None and len(kept) == 1
    copy = pickle.loads(pickle.dumps(sp.array(np.ones(3)) * 2.0))
    assert copy.cached_reshards() == {}


def test_gradients_go_through_cached_reshards() -> None:
    leaf = torch.arange(12.0, dtype=torch.float64).reshape(6, 2).requires_grad_()
    x = sp.array(leaf, spec(MESH, "x, -")) * 2.0
    target = spec(MESH, "-, -")
    with torch.no_grad():
        x.shard(target)
    total = sp.sum(x.shard(target) * x.shard(target))
    total.to_dense().backward()
    np.testing.assert_allclose(leaf.grad, 8.0 * leaf.detach())


def test_written_shards_are_refused_over_processes() -> None:
    # One rank that moved again alone would wait for the others, so it is told instead.
    counted = Counted("torch")
    counted.runner.has_every_shard = False
    x = counted.rows()
    x.shard(spec(MESH, "-, -"))
    x._shards[0].add_(1.0)
    with pytest.raises(UsageError, match="was written to after it was moved"):
        x.shard(spec(MESH, "-, -"))


def test_threads_share_the_cache() -> None:
    counted = Counted("numpy")
    target = spec(MESH, "-, -")
    counted.runner.reshard_cache = ReshardCache(counted.runner, 10 * 6 * 576)
    arrays = [counted.rows() for _ in range(30)]
    expected = arrays[0].to_dense().copy()
    move = counted.runner.movement(arrays[0].type, target)

    def work(number: int) -> bool:
        own = [arrays[(number * 7 + step) % 30] for step in range(200)]
        return all((take_moved(one, target, move)[0] == expected).all() for one in own)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
    keeper = counted.runner.reshard_cache
    assert keeper.size_bytes == sum(size for _, size in keeper._order) <= keeper.max_bytes
