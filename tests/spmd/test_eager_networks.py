"""What networks are made of, on every sharding over a 2x3 mesh, against PyTorch or NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from spmd.eager_cases import specs

MESH = DeviceMesh.of(x=2, y=3)
RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(7, 5))


def by_torch(function: Callable[..., Any], *arrays: np.ndarray, **options: Any) -> Any:
    made = function(*(torch.from_numpy(one) for one in arrays), **options)
    return [one.numpy() for one in made] if isinstance(made, tuple | list) else made.numpy()


def expect_on_every_sharding(
    function: Callable[..., Any], arrays: list[np.ndarray], expected: Any, pairs: int = 200
) -> None:
    kinds = [list(specs(MESH, one.ndim)) for one in arrays]
    chosen = list(itertools.product(*kinds))
    if len(chosen) > pairs:
        picked = np.random.default_rng(0).choice(len(chosen), pairs, replace=False)
        chosen = [chosen[number] for number in picked]
    for given in chosen:
        operands = [sp.array(one, at) for one, at in zip(arrays, given, strict=True)]
        found = function(*operands)
        results = found if isinstance(found, tuple) else (found,)
        wanted = expected if isinstance(expected, list) else [expected]
        for one, other in zip(results, wanted, strict=True):
            np.testing.assert_allclose(
                one.to_dense(), other, 1e-11, 1e-11, err_msg=" and ".join(map(str, given))
            )


ONE: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
    ("relu", sp.relu, functional.relu),
    ("sigmoid", sp.sigmoid, torch.sigmoid),
    ("silu", sp.silu, functional.silu),
    ("gelu", sp.gelu, lambda x: functional.gelu(x, approximate="tanh")),
    ("softmax 0", lambda x: sp.softmax(x, axis=0), lambda x: functional.softmax(x, 0)),
    ("softmax 1", lambda x: sp.softmax(x, axis=1), lambda x: functional.softmax(x, 1)),
    ("log_softmax", lambda x: sp.log_softmax(x, axis=0), lambda x: functional.log_softmax(x, 0)),
    ("logsumexp", lambda x: sp.logsumexp(x, axis=0), lambda x: torch.logsumexp(x, 0)),
    ("layer_norm", lambda x: sp.layer_norm(x), lambda x: functional.layer_norm(x, (5,))),
    ("rms_norm", lambda x: sp.rms_norm(x), lambda x: functional.rms_norm(x, (5,), eps=1e-5)),
    ("top_k 0", lambda x: sp.top_k(x, 3, axis=0), lambda x: torch.topk(x, 3, dim=0)),
    ("top_k 1", lambda x: sp.top_k(x, 2, axis=1), lambda x: torch.topk(x, 2, dim=1)),
    ("pad", lambda x: sp.pad(x, [(1, 2), (0, 3)]), lambda x: functional.pad(x, (0, 3, 1, 2))),
    ("split", lambda x: sp.split(x, [2, 3], axis=0), lambda x: torch.tensor_split(x, [2, 3])),
    (
        "dynamic_slice",
        lambda x: sp.dynamic_slice(x, [sp.array(np.int64(5)), 0], (3, 5)),
        lambda x: x[4:7],
    ),
]


@pytest.mark.parametrize(("name", "function", "dense"), ONE, ids=[name for name, _, _ in ONE])
def test_one_operand(name: str, function: Callable[..., Any], dense: Callable[..., Any]) -> None:
    expected = by_torch(dense, X)
    expect_on_every_sharding(function, [X], expected)


def test_norms_with_weights() -> None:
    weight, bias = RANDOM.normal(size=5), RANDOM.normal(size=5)
    expected = by_torch(lambda x, w, b: functional.layer_norm(x, (5,), w, b), X, weight, bias)
    expect_on_every_sharding(sp.layer_norm, [X, weight, bias], expected)


def test_a_softmax_of_a_cut_axis_stays_in_shards() -> None:
    found = sp.softmax(sp.array(X, spec(MESH, "x, y")), axis=0)
    assert str(found.spec) == "x, y"


def test_cross_entropy_with_cut_classes_and_batch() -> None:
    labels = np.array([0, 4, 2, 2, 1, 3, 0])
    expected = by_torch(lambda x, y: functional.cross_entropy(x, y, reduction="none"), X, labels)
    expect_on_every_sharding(sp.cross_entropy, [X, labels], expected)


def test_rows_of_a_cut_table_at_cut_indices() -> None:
    indices = np.array([6, 0, -1, 3, 3])
    expect_on_every_sharding(sp.embedding, [indices, X], X[indices])
    table = sp.array(X, spec(MESH, "x, -"))
    found = sp.embedding(sp.array(indices, spec(MESH, "y")), table)
    assert str(found.spec) == "y, - | sum(x)"


def test_one_hot() -> None:
    classes = np.array([[0, 2, 1], [4, 4, 3]])
    expect_on_every_sharding(lambda x: sp.one_hot(x, 5), [classes], np.eye(5)[classes])


def test_scatter_sets_and_adds() -> None:
    indices, updates = np.array([6, 1, 3]), RANDOM.normal(size=(3, 5))
    expected = X.copy()
    expected[indices] = updates
    expect_on_every_sharding(sp.scatter, [X, indices, updates], expected)
    twice = np.array([1, 1, 6])
    expected = X.copy()
    np.add.at(expected, twice, updates)
    add = lambda x, i, u: sp.scatter(x, i, u, mode="add")  # noqa: E731
    expect_on_every_sharding(add, [X, twice, updates], expected)
    columns = RANDOM.normal(size=(7, 2))
    expected = X.copy()
    expected[:, [4, 0]] = columns
    along = lambda x, u: sp.scatter(x, np.array([4, 0]), u, axis=1)  # noqa: E731
    expect_on_every_sharding(along, [X, columns], expected)


def test_an_update_of_a_rectangle() -> None:
    update = RANDOM.normal(size=(3, 5))
    expected = X.copy()
    expected[4:7] = update
    put = lambda x, u: sp.dynamic_update_slice(x, u, [6, 0])  # noqa: E731
    expect_on_every_sharding(put, [X, update], expected)


def test_einsum() -> None:
    other = RANDOM.normal(size=(7, 5, 4))
    expected = np.einsum("ab,abc->ca", X, other)
    expect_on_every_sharding(lambda a, b: sp.einsum("ab,abc->ca", a, b), [X, other], expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution(groups: int) -> None:
    image = RANDOM.normal(size=(2, 4, 7, 5))
    kernel = RANDOM.normal(size=(6, 4 // groups, 3, 2))
    options = {"stride": (2, 1), "padding": 1, "dilation": (1, 2), "groups": groups}
    expected = by_torch(functional.conv2d, image, kernel, **options)
    function = lambda x, k: sp.convolution(  # noqa: E731
        x, k, strides=(2, 1), padding=1, dilation=(1, 2), groups=groups
    )
    expect_on_every_sharding(function, [image, kernel], expected)


def test_convolution_of_height_width_and_channels_in_shards() -> None:
    image, kernel = RANDOM.normal(size=(3, 5, 7, 7)), RANDOM.normal(size=(5, 5, 3, 3))
    expected = by_torch(functional.conv2d, image, kernel)
    for text, of_kernel in (
        ("-, -, x, -", "-, -, -, -"),
        ("-, -, -, y", "-, -, -, -"),
        ("-, x, y, -", "-, -, -, -"),
        ("-, -, x, y", "y, -, -, -"),
        ("y, -, -, -", "x, -, -, -"),
    ):
        found = sp.convolution(
            sp.array(image, spec(MESH, text)), sp.array(kernel, spec(MESH, of_kernel))
        )
        assert found.shape == expected.shape
        np.testing.assert_allclose(found.to_dense(), expected, 1e-11, 1e-11)


def test_pooling() -> None:
    image = RANDOM.normal(size=(2, 3, 7, 5))
    most = by_torch(lambda x: functional.max_pool2d(x, 3, 2, 1), image)
    expect_on_every_sharding(
        lambda x: sp.max_pool(x, (3, 3), strides=2, padding=1), [image], most, 60
    )
    mean = by_torch(lambda x: functional.avg_pool2d(x, (2, 3)), image)
    expect_on_every_sharding(lambda x: sp.avg_pool(x, (2, 3)), [image], mean, 60)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("groups", [6, 3])
def test_attention(is_causal: bool, groups: int) -> None:
    queries = RANDOM.normal(size=(2, 6, 5, 4))
    keys, values = RANDOM.normal(size=(2, groups, 5, 4)), RANDOM.normal(size=(2, groups, 5, 3))
    expected = by_torch(
        lambda q, k, v: functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=groups != 6
        ),
        queries,
        keys,
        values,
    )
    function = lambda q, k, v: sp.attention(q, k, v, is_causal=is_causal)  # noqa: E731
    expect_on_every_sharding(function, [queries, keys, values], expected, 60)
