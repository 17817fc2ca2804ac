"""What networks are made of, each with what PyTorch or NumPy makes of the whole arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import reshard.spmd as sp
from reshard import DeviceMesh, ShardingSpec
from spmd.eager_cases import specs

RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(7, 5))
TOLERANCE = 1e-11

Function = Callable[..., Any]


@dataclass(frozen=True)
class NetworkCase:
    """`function(*arrays)`, of arrays in shards, is `expected`; `most` shardings are tried."""

    name: str
    function: Function
    arrays: tuple[np.ndarray, ...]
    expected: tuple[np.ndarray, ...]
    most: int = 200

    def shardings(self, mesh: DeviceMesh, most: int) -> Iterator[tuple[ShardingSpec, ...]]:
        """Shardings of all operands together: all, or so many of them."""
        chosen = list(itertools.product(*(list(specs(mesh, one.ndim)) for one in self.arrays)))
        if len(chosen) > most:
            picked = np.random.default_rng(len(self.name)).choice(len(chosen), most, replace=False)
            chosen = [chosen[number] for number in picked]
        yield from chosen

    def check(self, given: tuple[ShardingSpec, ...], mesh: DeviceMesh) -> None:
        """Fails where the function of arrays in these shardings is not what it should be."""
        operands = [sp.array(one, at) for one, at in zip(self.arrays, given, strict=True)]
        found = self.function(*operands)
        results = found if isinstance(found, tuple) else (found,)
        what = f"{self.name} of {' and '.join(map(str, given))} over {mesh}"
        for one, other in zip(results, self.expected, strict=True):
            assert one.shape == other.shape, what
            np.testing.assert_allclose(np.asarray(one), other, TOLERANCE, TOLERANCE, err_msg=what)


CASES: list[NetworkCase] = []


def add(
    name: str, function: Function, arrays: list[np.ndarray], expected: Any, most: int = 200
) -> None:
    given = tuple(expected) if isinstance(expected, tuple | list) else (expected,)
    CASES.append(NetworkCase(name, function, tuple(arrays), given, most))


def by_torch(function: Function, *arrays: np.ndarray, **options: Any) -> Any:
    made = function(*(torch.from_numpy(one) for one in arrays), **options)
    return [one.numpy() for one in made] if isinstance(made, tuple | list) else made.numpy()


def of_torch(name: str, function: Function, dense: Function) -> None:
    add(name, function, [X], by_torch(dense, X))


of_torch("relu", sp.relu, functional.relu)
of_torch("sigmoid", sp.sigmoid, torch.sigmoid)
of_torch("silu", sp.silu, functional.silu)
of_torch("gelu", sp.gelu, lambda x: functional.gelu(x, approximate="tanh"))
of_torch("softmax 0", lambda x: sp.softmax(x, axis=0), lambda x: functional.softmax(x, 0))
of_torch("softmax 1", lambda x: sp.softmax(x, axis=1), lambda x: functional.softmax(x, 1))
of_torch("log_softmax", lambda x: sp.log_softmax(x, axis=0), lambda x: functional.log_softmax(x, 0))
of_torch("logsumexp", lambda x: sp.logsumexp(x, axis=0), lambda x: torch.logsumexp(x, 0))
of_torch("layer_norm", sp.layer_norm, lambda x: functional.layer_norm(x, (5,)))
of_torch("rms_norm", sp.rms_norm, lambda x: functional.rms_norm(x, (5,), eps=1e-5))
of_torch("top_k 0", lambda x: sp.top_k(x, 3, axis=0), lambda x: torch.topk(x, 3, dim=0))
of_torch("top_k 1", lambda x: sp.top_k(x, 2, axis=1), lambda x: torch.topk(x, 2, dim=1))
of_torch("pad", lambda x: sp.pad(x, [(1, 2), (0, 3)]), lambda x: functional.pad(x, (0, 3, 1, 2)))
of_torch(
    "split",
    lambda x: sp.split(x, [2, 3], axis=0),
    lambda x: [one.clone() for one in torch.tensor_split(x, [2, 3])],
)
of_torch(
    "dynamic_slice",
    lambda x: sp.dynamic_slice(x, [sp.array(np.int64(5)), 0], (3, 5)),
    lambda x: x[4:7],
)


def _weights() -> None:
    weight, bias = RANDOM.normal(size=5), RANDOM.normal(size=5)
    add(
        "layer_norm with weights",
        sp.layer_norm,
        [X, weight, bias],
        by_torch(lambda x, w, b: functional.layer_norm(x, (5,), w, b), X, weight, bias),
    )
    add(
        "rms_norm with weights",
        sp.rms_norm,
        [X, weight],
        by_torch(lambda x, w: functional.rms_norm(x, (5,), w, 1e-5), X, weight),
    )


def _lookups() -> None:
    labels = np.array([0, 4, 2, 2, 1, 3, 0])
    add(
        "cross_entropy",
        sp.cross_entropy,
        [X, labels],
        by_torch(lambda x, y: functional.cross_entropy(x, y, reduction="none"), X, labels),
    )
    ignoring = np.array([0, 4, -100, 2, 1, -100, 0])
    for name, options, given in (
        ("that ignores", {"ignore_index": -100}, ignoring),
        ("that ignores a class", {"ignore_index": 2}, labels),
        ("smoothed", {"label_smoothing": 0.2}, labels),
        ("smoothed, that ignores", {"label_smoothing": 0.2, "ignore_index": -100}, ignoring),
    ):
        add(
            f"cross_entropy {name}",
            lambda x, y, options=options: sp.cross_entropy(x, y, **options),
            [X, given],
            by_torch(
                lambda x, y, options=options: functional.cross_entropy(
                    x, y, reduction="none", **options
                ),
                X,
                given,
            ),
        )
    indices = np.array([6, 0, -1, 3, 3])
    add("embedding", sp.embedding, [indices, X], X[indices])
    classes = np.array([[0, 2, 1], [4, 4, 3]])
    add("one_hot", lambda x: sp.one_hot(x, 5), [classes], np.eye(5)[classes])


def _writes() -> None:
    indices, updates = np.array([6, 1, 3]), RANDOM.normal(size=(3, 5))
    expected = X.copy()
    expected[indices] = updates
    add("scatter", sp.scatter, [X, indices, updates], expected)
    twice = np.array([1, 1, -1])
    expected = X.copy()
    np.add.at(expected, twice, updates)
    add(
        "scatter that adds",
        lambda x, i, u: sp.scatter(x, i, u, mode="add"),
        [X, twice, updates],
        expected,
    )
    columns = RANDOM.normal(size=(7, 2))
    expected = X.copy()
    expected[:, [4, 0]] = columns
    add(
        "scatter of columns",
        lambda x, u: sp.scatter(x, np.array([4, 0]), u, axis=1),
        [X, columns],
        expected,
    )
    update = RANDOM.normal(size=(3, 5))
    expected = X.copy()
    expected[4:7] = update
    add(
        "dynamic_update_slice",
        lambda x, u: sp.dynamic_update_slice(x, u, [6, 0]),
        [X, update],
        expected,
    )


def _windows() -> None:
    other = RANDOM.normal(size=(7, 5, 4))
    add(
        "einsum",
        lambda a, b: sp.einsum("ab,abc->ca", a, b),
        [X, other],
        np.einsum("ab,abc->ca", X, other),
    )
    image = RANDOM.normal(size=(2, 4, 7, 5))
    for groups in (1, 2):
        kernel = RANDOM.normal(size=(6, 4 // groups, 3, 2))
        add(
            f"convolution in {groups} groups",
            lambda x, k, groups=groups: sp.convolution(
                x, k, strides=(2, 1), padding=1, dilation=(1, 2), groups=groups
            ),
            [image, kernel],
            by_torch(
                functional.conv2d,
                image,
                kernel,
                stride=(2, 1),
                padding=1,
                dilation=(1, 2),
                groups=groups,
            ),
        )
    image = RANDOM.normal(size=(2, 3, 7, 5))
    add(
        "max_pool",
        lambda x: sp.max_pool(x, (3, 3), strides=2, padding=1),
        [image],
        by_torch(lambda x: functional.max_pool2d(x, 3, 2, 1), image),
        60,
    )
    add(
        "avg_pool",
        lambda x: sp.avg_pool(x, (2, 3)),
        [image],
        by_torch(lambda x: functional.avg_pool2d(x, (2, 3)), image),
        60,
    )


def _attention() -> None:
    for groups, is_causal in itertools.product((6, 3), (False, True)):
        arrays = [
            RANDOM.normal(size=(2, heads, 5, size))
            for heads, size in ((6, 4), (groups, 4), (groups, 3))
        ]
        add(
            f"attention of 6 to {groups} heads{', causal' * is_causal}",
            lambda q, k, v, is_causal=is_causal: sp.attention(q, k, v, is_causal=is_causal),
            arrays,
            by_torch(
                functional.scaled_dot_product_attention,
                *arrays,
                is_causal=is_causal,
                enable_gqa=groups != 6,
            ),
            60,
        )


def _random_numbers() -> None:
    # Of the whole array, by the same key.
    kept = sp.random.uniform(sp.random.key(3), X.shape, dtype="float32").to_dense() >= 0.25
    add(
        "dropout",
        lambda x: sp.dropout(x, sp.random.key(3), 0.25),
        [X],
        np.where(kept, X / 0.75, 0.0),
    )


def _windowed_attention() -> None:
    arrays = [RANDOM.normal(size=(2, heads, 7, 4)) for heads in (4, 2, 2)]
    before = np.subtract.outer(np.arange(7), np.arange(7))
    for is_causal in (False, True):
        seen = (np.abs(before) < 3) & ((before >= 0) | (not is_causal))
        add(
            f"attention in a window{', causal' * is_causal}",
            lambda q, k, v, is_causal=is_causal: sp.attention(
                q, k, v, is_causal=is_causal, window=3
            ),
            arrays,
            by_torch(
                lambda q, k, v, seen=seen: functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=torch.from_numpy(seen), enable_gqa=True
                ),
                *arrays,
            ),
            60,
        )


_random_numbers()
_weights()
_lookups()
_writes()
_windows()
_attention()
_windowed_attention()
