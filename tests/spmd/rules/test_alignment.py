"""Cuts that are bound to the length of their dimension, where another length comes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec

MESH = DeviceMesh.of(x=2, y=2)
DATA = np.arange(48.0).reshape(8, 6)
CUTS = (
    *("x@sizes[5,3], -", "x@blocks[2,6], -", "x@whole[4,4], -", "x@windows[0:5,3:8], -"),
    *("x@sizes[5,3], y", "-, y@sizes[1,5]"),
)
KERNEL = np.ones((1, 1, 3, 3))


def images(x: Any) -> Any:
    return x[None, None]


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "concat": lambda xp, x: xp.concat([x, x]),
    "concat 1": lambda xp, x: xp.concat([x, x], axis=1),
    "hstack": lambda xp, x: np.hstack([x, x]),
    "append": lambda xp, x: xp.diff(x, axis=0, append=x[:1]),
    "prepend": lambda xp, x: xp.diff(x, axis=1, prepend=x[:, :2]),
}
WINDOWS: dict[str, Callable[[Any], Any]] = {
    "padded convolution": lambda x: sp.convolution(images(x), KERNEL, padding=1),
    "strided convolution": lambda x: sp.convolution(images(x), KERNEL, strides=2),
    "padded pooling": lambda x: sp.max_pool(images(x), (2, 2), padding=1),
    "strided pooling": lambda x: sp.avg_pool(images(x), (2, 2), strides=3),
    "pad": lambda x: sp.pad(x, 1),
    "repeat": lambda x: sp.repeat(x, 2, axis=0),
    "with initial": lambda x: sp.cumulative_sum(x, axis=0, include_initial=True),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *WINDOWS])
@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_that_is_bound_to_a_length_meets_another(cut: str, name: str) -> None:
    x = sp.array(DATA, spec(MESH, cut))
    if name in FUNCTIONS:
        function: Callable[[Any], Any] = lambda a: FUNCTIONS[name](sp, a)  # noqa: E731
        expected = FUNCTIONS[name](np, DATA)
    else:
        function = WINDOWS[name]
        expected = np.asarray(function(sp.array(DATA)))
    np.testing.assert_array_equal(np.asarray(function(x)), expected)
    for strategy in ("basic", "aggressive", "cost"):
        traced = sp.trace(function, x, strategy=strategy)
        np.testing.assert_array_equal(np.asarray(traced.run(x)), expected)
