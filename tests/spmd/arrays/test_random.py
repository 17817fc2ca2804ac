"""Random numbers by key: the same in every sharding and library, and distributed as they should."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, ShardingSpec, spec
from reshard.errors import UsageError
from spmd.eager_cases import specs

MESH = DeviceMesh.of(x=2, y=3)
KEY = sp.random.key(11)
CUT = spec(MESH, "x, y")
CUTS = ("x@cyclic1, -", "x@sizes[2,5], y@balanced", "x / y, -")


def every_cut(shape: tuple[int, ...]) -> list[ShardingSpec]:
    more = [spec(MESH, text) for text in CUTS] if shape == (7, 5) else []
    return [*specs(MESH, len(shape)), *more]


@pytest.mark.parametrize("shape", [(), (9,), (7, 5), (4, 6, 3), (0, 4), (3, 1, 8)], ids=str)
@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_numbers_are_the_same_in_every_sharding(name: str, shape: tuple[int, ...]) -> None:
    draw = getattr(sp.random, name)
    expected = draw(KEY, shape).to_dense()
    assert expected.shape == shape
    for cut in every_cut(shape):
        found = draw(KEY, shape, spec=cut)
        assert found.spec is cut
        np.testing.assert_array_equal(found.to_dense(), expected, err_msg=str(cut))


def test_a_shard_is_drawn_without_moving_anything() -> None:
    trace = sp.trace(lambda x, key: sp.dropout(x, key, 0.3), sp.ones((8, 6), spec=CUT), KEY)
    assert trace.moved_bytes == 0
    assert str(sp.dropout(sp.ones((8, 6), spec=CUT), KEY, 0.3).spec) == "x, y"


def test_words_are_those_of_philox() -> None:
    raw = np.random.Philox(key=np.array([11, 0], np.uint64), counter=0).random_raw(12)
    found = sp.random.uniform(KEY, (3, 4), spec=CUT).to_dense()
    np.testing.assert_array_equal(found, ((raw >> np.uint64(11)) * 2.0**-53).reshape(3, 4))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_both_libraries_draw_the_same(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    for name in ("uniform", "normal"):
        draw = getattr(sp.random, name)
        expected = draw(KEY, (7, 5), dtype=dtype, spec=CUT)
        assert expected.dtype.name == dtype
        with sp.running(sp.in_process("torch")):
            found = draw(sp.random.key(11), (7, 5), dtype=dtype, spec=CUT)
        assert found.to_dense().dtype is getattr(torch, dtype)
        np.testing.assert_array_equal(
            found.to_dense().double().numpy(), expected.to_dense().astype(np.float64)
        )


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_uniform_numbers_are_below_one(dtype: str) -> None:
    found = sp.random.uniform(KEY, 1 << 17, dtype=dtype).to_dense().astype(np.float64)
    assert found.min() >= 0
    assert found.max() < 1
    assert abs(found.mean() - 0.5) < (0.01 if dtype == "bfloat16" else 0.005)


def test_moments_of_normal_and_scaled_numbers() -> None:
    count = 1 << 18
    found = sp.random.normal(KEY, count).to_dense()
    # Five deviations of each mean: of the numbers, their squares and their fourth powers.
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (4, 3, 96)):
        assert abs((found**power).mean() - mean) < 5 * math.sqrt(variance / count)
    wide = sp.random.uniform(KEY, count, low=-3.0, high=5.0).to_dense()
    assert -3 <= wide.min() < wide.max() <= 5
    assert abs(wide.mean() - 1) < 5 * 8 / math.sqrt(12 * count)


def test_keys_of_a_key_are_apart() -> None:
    keys = [KEY, *sp.random.split(KEY, 5), *sp.random.split(sp.random.key(12), 5)]
    assert len({tuple(one.to_dense().tolist()) for one in keys}) == len(keys)
    drawn = np.stack([sp.random.normal(one, 4096).to_dense() for one in keys])
    off = np.abs(np.corrcoef(drawn) - np.eye(len(keys)))
    assert off.max() < 5 / math.sqrt(4096)
    for place, one in enumerate(sp.random.split(KEY, 5)):
        np.testing.assert_array_equal(sp.random.fold_in(KEY, place).to_dense(), one.to_dense())
    far = sp.random.fold_in(KEY, 1 << 40).to_dense()
    assert far.tolist() not in [one.to_dense().tolist() for one in keys]
    assert sp.random.key((1 << 64) - 1).to_dense()[0] == -1


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_keys_of_numbers_in_arrays(library: str) -> None:
    numbers = (0, 3, 1 << 40, (1 << 63) - 1)
    expected = [sp.random.fold_in(KEY, number).to_dense().tolist() for number in numbers]
    with sp.running(sp.in_process(library)):
        key = sp.random.key(11)
        program = sp.jit(sp.random.fold_in)
        for number, own in zip(numbers, expected, strict=True):
            assert program(key, sp.asarray(number)).to_dense().tolist() == own
            assert sp.random.fold_in(key, sp.asarray(number)).to_dense().tolist() == own
        assert program.traced_count == 1
        pending = sp.sum(sp.array(np.arange(3), spec(MESH, "x")))
        assert sp.random.fold_in(key, pending).to_dense().tolist() == expected[1]

        def turn(number: Any, _: Any) -> tuple[Any, Any]:
            return number + 1, sp.random.normal(sp.random.fold_in(key, number), (2,))

        _, drawn = sp.scan(turn, sp.asarray(0), length=3)
        for number, own in enumerate(drawn.to_dense()):
            alone = sp.random.normal(sp.random.fold_in(key, number), (2,))
            assert own.tolist() == alone.to_dense().tolist()


def test_a_key_of_each_step_compiles_nothing_anew() -> None:
    runner = sp.in_process("numpy")
    with sp.running(runner):
        key = sp.random.key(0)
        sp.random.fold_in(key, 0)
        before = len(runner.calls)
        for step in range(1, 50):
            sp.random.fold_in(key, step)
    assert len(runner.calls) == before


def test_whole_numbers_and_truth_values() -> None:
    found = sp.random.integers(KEY, (600, 100), -3, 4, spec=CUT)
    counts = np.bincount(found.to_dense().reshape(-1) + 3, minlength=7)
    assert len(counts) == 7
    assert np.abs(counts - 60000 / 7).max() < 5 * math.sqrt(60000 / 7)
    info = np.iinfo(np.int64)
    extreme = sp.random.integers(KEY, 64, int(info.min), int(info.max) + 1).to_dense()
    assert (extreme < 0).any() and (extreme > 0).any()
    chances = np.array([[0.0], [0.25], [1.0]]) * np.ones(20000)
    truths = sp.random.bernoulli(KEY, sp.array(chances, spec(MESH, "-, y")))
    assert truths.dtype.name == "bool" and str(truths.spec) == "-, y"
    first, second, last = truths.to_dense().mean(axis=1)
    assert first == 0 and last == 1 and abs(second - 0.25) < 0.02
    np.testing.assert_array_equal(
        sp.random.bernoulli(KEY, 0.25, (3, 20000)).to_dense()[1], truths.to_dense()[1]
    )


def test_categories_are_drawn_by_their_weights_and_logits_stay_where_they_are() -> None:
    weights = np.array([0.1, 0.0, 0.2, 0.7])
    with np.errstate(divide="ignore"):
        logits = np.tile(np.log(weights), (20000, 1))
    expected = sp.random.categorical(KEY, sp.array(logits)).to_dense()
    shares = np.bincount(expected, minlength=4) / len(expected)
    assert shares[1] == 0
    assert np.abs(shares - weights).max() < 0.02
    expected = sp.random.categorical(KEY, sp.array(logits[:500])).to_dense()
    for cut in specs(MESH, 2):
        found = sp.random.categorical(KEY, sp.array(logits[:500], cut))
        np.testing.assert_array_equal(found.to_dense(), expected)
    rows = sp.array(np.zeros((50, 1200)), spec(MESH, "-, x y"))
    trace = sp.trace(lambda z: sp.random.categorical(KEY, z), rows)
    assert trace.moved_bytes <= 2 * 50 * 8 * 2 * 6
    columns = sp.random.categorical(KEY, sp.array(logits[:30].T), axis=0)
    assert columns.shape == (30,)


@pytest.mark.parametrize("run", [lambda f: f, sp.jit])
def test_no_logits_are_an_error(run: Any) -> None:
    logits = np.zeros((3, 5))
    logits[0, 1] = np.nan
    logits[1] = -np.inf
    logits[2, 2:4] = np.inf
    draw = run(lambda z: sp.random.categorical(KEY, z))
    for cut in specs(MESH, 2):
        assert draw(sp.array(logits, cut)).to_dense().tolist() == [4, 0, 2]


def test_permutations() -> None:
    order = sp.random.permutation(KEY, 100).to_dense()
    assert sorted(order.tolist()) == list(range(100))
    assert order.tolist() != list(range(100))
    rows = np.arange(300.0).reshape(100, 3)
    for text in ("x, -", "x y, -", "-, y"):
        found = sp.random.permutation(KEY, sp.array(rows, spec(MESH, text)))
        np.testing.assert_array_equal(found.to_dense(), rows[order])


def test_dropout_and_its_gradient_are_the_same_in_every_sharding() -> None:
    data = np.random.default_rng(0).normal(size=(7, 5))
    kept = sp.random.uniform(KEY, (7, 5), dtype="float32").to_dense() >= 0.4
    expected = np.where(kept, data / 0.6, 0.0)
    for cut in specs(MESH, 2, partial=True):
        x = sp.array(data, cut)
        np.testing.assert_allclose(sp.dropout(x, KEY, 0.4).to_dense(), expected, 1e-12)
        found = sp.grad(lambda x: sp.sum(sp.square(sp.dropout(x, KEY, 0.4))))(x)
        np.testing.assert_allclose(found.to_dense(), 2 * expected / 0.6, 1e-12)
    assert sp.dropout(sp.array(data), KEY, 0).shape == (7, 5)
    assert not sp.dropout(sp.array(data), KEY, 1).to_dense().any()
    share = sp.dropout(sp.ones(1 << 16), KEY, 0.1).to_dense()
    assert abs((share == 0).mean() - 0.1) < 0.01
    many = sp.dropout(sp.array(np.array([np.inf, np.nan] * 50)), KEY, 0.5).to_dense()
    assert (many == 0).any()


def test_dropout_through_pytorch_and_computed_again() -> None:
    torch = pytest.importorskip("torch")
    leaf = torch.ones(7, 5, dtype=torch.float64, requires_grad=True)
    with sp.running(sp.in_process("torch")):
        key = sp.random.key(11)
        sp.sum(sp.dropout(sp.array(leaf, CUT), key, 0.4)).to_dense().backward()
        x = sp.array(leaf.detach(), CUT)
        again = sp.grad(sp.rematerialized(lambda x: sp.sum(sp.dropout(x, key, 0.4))))(x)
    assert leaf.grad is not None
    np.testing.assert_array_equal(again.to_dense().numpy(), leaf.grad.numpy())
    assert set(np.unique(leaf.grad.numpy()).round(6)) == {0, round(1 / 0.6, 6)}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: sp.random.key(-1), "a seed of -1"),
        (lambda: sp.random.key(1 << 64), "to 2\\*\\*64 - 1"),
        (lambda: sp.random.key(0.5), "a seed of 0.5"),
        (lambda: sp.random.uniform(7, (3,)), "random numbers by 7, a int; a key was expected"),
        (lambda: sp.random.uniform(sp.ones(2), (3,)), "a key was expected: sp.random.key"),
        (lambda: sp.random.uniform(KEY, (3,), dtype="int64"), "dtype int64; one of float64"),
        (lambda: sp.random.uniform(KEY, (-3,)), "shape"),
        (lambda: sp.random.uniform(KEY, (4,), spec=spec(MESH, "x | sum(y)")), "sums are pending"),
        (lambda: sp.random.split(KEY, 0), "number of keys 0 must be at least 1"),
        (lambda: sp.random.fold_in(KEY, -1), "a key of number -1; a whole number from 0"),
        (lambda: sp.random.fold_in(KEY, 1 << 63), r"to 2\*\*63 - 1"),
        (lambda: sp.random.fold_in(KEY, sp.asarray(-1)), "part -1 of a key"),
        (lambda: sp.random.fold_in(KEY, sp.ones(())), r"a key of number float64\[\]"),
        (lambda: sp.random.fold_in(KEY, sp.asarray([1, 2])), r"a key of number int64\[2\]"),
        (lambda: sp.random.integers(KEY, 3, 4, 4), "integers from 4 to 4"),
        (lambda: sp.random.integers(KEY, 3, 0, 1 << 64), "within int64"),
        (lambda: sp.random.bernoulli(KEY, 1.5), "a probability of 1.5"),
        (lambda: sp.random.categorical(KEY, sp.ones((3, 0))), "give one class"),
        (lambda: sp.random.permutation(KEY, -1), "length of a permutation -1 must not"),
        (lambda: sp.dropout(sp.ones(3), KEY, 2), "dropout at a rate of 2"),
        (lambda: sp.dropout(sp.ones(3), KEY, "a"), "dropout at a rate of 'a'"),
        (lambda: sp.random.bernoulli(KEY, "a"), "a probability of 'a'"),
        (lambda: sp.random.bernoulli(KEY, sp.ones((4, 3)), 3), r"of shape \[4, 3\] for numbers of"),
        (lambda: sp.random.uniform(KEY, 3, low="a"), "numbers from 'a' to 1.0"),
        (lambda: sp.dropout(sp.ones(3), 7, 0.5), "a key was expected"),
        (lambda: sp.dropout(sp.ones(3, dtype="int64"), KEY, 0.5), "real floating numbers"),
        (lambda: sp.dropout([1.0], KEY, 0.5), "an sp.array was expected"),
    ],
)
def test_what_is_refused(wrong: object, text: str) -> None:
    assert callable(wrong)
    with pytest.raises(UsageError, match=text):
        wrong()
