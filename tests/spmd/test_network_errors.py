"""What networks are made of, asked for what cannot be: said, and never rounded in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import ReshardError, ShardError, SpecError, UsageError

MESH = DeviceMesh.of(x=2, y=3)
X = np.arange(35.0).reshape(7, 5)
IMAGE, KERNEL = np.ones((2, 4, 7, 5)), np.ones((6, 4, 3, 3))
HEADS = np.ones((4, 5, 2))


def x() -> Any:
    return sp.array(X, spec(MESH, "x, y"))


def image() -> Any:
    return sp.array(IMAGE, spec(MESH, "x, -, y, -"))


def heads(*shape: int) -> Any:
    return sp.array(np.ones(shape or HEADS.shape))


CASES: list[tuple[Callable[[], Any], type[ReshardError], str]] = [
    (lambda: sp.einsum("ii", sp.ones((3, 4))), SpecError, "'i' twice in 'ii', for dimensions of 3"),
    (lambda: sp.einsum("iij", sp.ones((3, 3))), SpecError, "einsum"),
    (lambda: sp.convolution(image(), np.ones((6, 4, 3))), SpecError, "as many dimensions"),
    (lambda: sp.convolution(sp.ones(3), sp.ones(3)), SpecError, "as many dimensions"),
    (lambda: sp.convolution(image(), KERNEL, groups=0), UsageError, "groups 0 must be at least 1"),
    (
        lambda: sp.convolution(image(), KERNEL, strides=0),
        UsageError,
        "strides 0 must be at",
    ),
    (lambda: sp.convolution(image(), KERNEL, strides=1.5), UsageError, r"strides 1\.5; give 2"),
    (lambda: sp.convolution(image(), KERNEL, strides=(1,)), UsageError, r"strides \(1,\); give 2"),
    (
        lambda: sp.convolution(image(), KERNEL, dilation=0),
        UsageError,
        "dilation 0 must be at",
    ),
    (
        lambda: sp.convolution(image(), KERNEL, padding=-1),
        UsageError,
        "padding -1 must not be negative",
    ),
    (lambda: sp.convolution(image(), KERNEL, padding=(1, 1)), UsageError, "before, after"),
    (lambda: sp.convolution(image(), KERNEL, padding="same"), UsageError, "before, after"),
    (lambda: sp.max_pool(image(), (0, 2)), UsageError, "window \\[0, 2\\] must be at least 1"),
    (lambda: sp.max_pool(image(), 2), UsageError, "window 2; give a size for each"),
    (lambda: sp.avg_pool(image(), (2, 2), strides=0), UsageError, "strides 0 must be at least 1"),
    (lambda: sp.max_pool(image() + 0j, (2, 2)), UsageError, "no order"),
    (lambda: sp.pad(x(), [(1, 1)]), UsageError, "for each of 2 dimensions"),
    (lambda: sp.pad(x(), [(1, 1, 1), (0, 0)]), UsageError, "give 2 whole numbers"),
    (lambda: sp.pad(x(), [(-1, 0), (0, 0)]), UsageError, "pads \\[-1, 0\\] must not be negative"),
    (lambda: sp.split(x(), 0), UsageError, "equal parts 0 must be at least 1"),
    (lambda: sp.split(x(), 2), SpecError, "give a divisor"),
    (lambda: sp.split(x(), 2.5), UsageError, r"split at 2\.5; give whole"),
    (lambda: sp.split(x(), [1.5]), UsageError, r"start of a part 1\.5 must"),
    (lambda: sp.scatter(x(), [0], X[:1]), UsageError, "indices of kind list"),
    (
        lambda: sp.scatter(sp.astype(x(), "int64"), np.array([0]), X[:1] / 2),
        UsageError,
        "float64 into int64 would round",
    ),
    (
        lambda: sp.dynamic_update_slice(sp.astype(x(), "int64"), X[:1] / 2, [0, 0]),
        UsageError,
        "float64 into int64 would round",
    ),
    (lambda: sp.dynamic_slice(x(), [0.5, 0], (2, 2)), UsageError, r"begins at 0\.5"),
    (lambda: sp.dynamic_slice(x(), [sp.ones(()), 0], (2, 2)), UsageError, "begins at <Sharded"),
    (lambda: sp.dynamic_slice(x(), [0, 0], (2,)), UsageError, r"sizes \(2,\); give 2"),
    (lambda: sp.layer_norm(x(), dims=0), UsageError, "dimensions 0 must be at least 1"),
    (lambda: sp.layer_norm(x(), dims=3), SpecError, "of 2"),
    (lambda: sp.layer_norm(x(), np.ones(4)), SpecError, r"weight of shape \[4\].*\[5\] was"),
    (lambda: sp.rms_norm(x(), np.ones(1)), SpecError, r"weight of shape \[1\].*\[5\] was"),
    (lambda: sp.one_hot(x(), 5), UsageError, "one_hot of float64"),
    (lambda: sp.one_hot(sp.arange(3), 2.5), UsageError, r"num_classes 2\.5 must be"),
    (lambda: sp.top_k(x(), 1.5), UsageError, r"k of top_k 1\.5 must be"),
    (lambda: sp.top_k(x(), 9), SpecError, "top 9 of 5"),
    (lambda: sp.attention(heads(), heads(4, 5, 3), heads()), SpecError, "queries' features"),
    (lambda: sp.attention(heads(), heads(4, 6, 2), heads()), SpecError, "keys' heads and places"),
    (lambda: sp.attention(*[heads(4, 5, 0)] * 3), UsageError, "give scale="),
    (lambda: sp.einsum(5, x()), UsageError, "einsum of 5; give its text"),  # type: ignore[arg-type]
    (lambda: sp.tensordot(x(), x(), axes="a"), SpecError, "axes 'a'; give how many"),
    (lambda: sp.linalg.vector_norm(x(), ord="z"), UsageError, "order 'z'; a number"),
    (lambda: sp.running("numpy").__enter__(), UsageError, "running 'numpy', a str"),
    (lambda: sp.linalg.matrix_rank(x(), rtol="a"), UsageError, "rtol 'a'; a number"),
    (lambda: sp.var(x(), correction="a"), UsageError, "correction 'a'"),
    (lambda: sp.recording(None).__enter__(), UsageError, "recording by None"),
    (lambda: sp.over_processes(), UsageError, "init_process_group"),
    (lambda: sp.from_shards([1], (3,), spec(MESH, "x")), ShardError, "a dict of them by rank"),
]


@pytest.mark.parametrize(("function", "kind", "said"), CASES, ids=[said for *_, said in CASES])
def test_what_cannot_be_is_said(
    function: Callable[[], Any], kind: type[ReshardError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        function()


@pytest.mark.parametrize("places", [[2, 3], [5, 2], [-2], [0, 0, 9], [], (3,)])
def test_parts_are_numpy_s(places: Any) -> None:
    for axis in (0, 1):
        found = sp.split(x(), places, axis=axis)
        for one, other in zip(found, np.split(X, places, axis), strict=True):
            np.testing.assert_array_equal(np.asarray(one), other)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_exponentials_of_nothing(library: str) -> None:
    with sp.running(sp.in_process(library)):
        nothing = sp.array(np.zeros((0, 5)), spec(MESH, "x, y"))
        for axis in (0, 1, (0, 1)):
            assert sp.softmax(nothing, axis=axis).shape == (0, 5)
            assert sp.log_softmax(nothing, axis=axis).shape == (0, 5)
        np.testing.assert_array_equal(np.asarray(sp.logsumexp(nothing, axis=0)), [-np.inf] * 5)
        assert sp.logsumexp(nothing, axis=1).shape == (0,)
        with pytest.raises(SpecError, match="of 2"):
            sp.softmax(nothing, axis=2)


@pytest.mark.parametrize("keys", [0, 4])
def test_attention_to_nothing_and_of_nothing(keys: int) -> None:
    k = sp.array(np.ones((2, 3, keys, 5)), spec(MESH, "x, -, -, -"))
    for queries in (0, 4) if keys == 0 else (0,):
        q = sp.array(np.ones((2, 3, queries, 5)), spec(MESH, "x, -, y, -"))
        found = sp.attention(q, k, k)
        np.testing.assert_array_equal(np.asarray(found), np.zeros((2, 3, queries, 5)))


def test_an_index_that_is_no_class_has_no_ones() -> None:
    np.testing.assert_array_equal(np.asarray(sp.one_hot(sp.array([-1, 7]), 5)), np.zeros((2, 5)))
