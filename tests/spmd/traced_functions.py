"""Functions to trace, with arguments for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import reshard.spmd as sp
from reshard import DeviceMesh, spec

MESH = DeviceMesh.of(x=2, y=3)


@dataclass(frozen=True)
class Traced:
    """A function, and shape and sharding of each argument; none where it is empty."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[tuple[tuple[int, ...], str | None], ...]

    def types(self) -> list[sp.ArrayType]:
        return [
            sp.abstract(shape, "float64", None if text is None else spec(MESH, text))
            for shape, text in self.arguments
        ]

    def arrays(self) -> list[np.ndarray]:
        random = np.random.default_rng(len(self.name))
        return [random.normal(size=shape) for shape, _ in self.arguments]


def _mlp(x: Any, up: Any, down: Any) -> Any:
    return sp.relu(x @ up) @ down


def _attention(x: Any, q: Any, k: Any, v: Any) -> Any:
    scores = sp.softmax((x @ q) @ sp.matrix_transpose(x @ k), axis=-1)
    return scores @ (x @ v) + x


FUNCTIONS = [
    Traced("mlp", _mlp, (((7, 5), "x, -"), ((5, 9), "-, y"), ((9, 5), "y, -"))),
    Traced(
        "mlp, reduced",
        lambda *a: _mlp(*a).reduced(),
        (
            ((7, 5), "x, -"),
            ((5, 9), "-, y"),
            ((9, 5), "y, -"),
        ),
    ),
    Traced("conflict", lambda a, b: a + b, (((7, 5), "x, -"), ((7, 5), "y, -"))),
    Traced("both ways", lambda a, b: (a + b.mT) * 2.0, (((7, 5), "x, y"), ((5, 7), "x, y"))),
    Traced("over both", lambda a: sp.sum(a, axis=0) + 1.0, (((7, 5), "x y, -"),)),
    Traced(
        "scattered",
        lambda a, b: (a @ b).shard(spec(MESH, "y, x")),
        (
            ((8, 6), "-, x y"),
            ((6, 8), "x y, -"),
        ),
    ),
    Traced("gathered twice", lambda a: a @ a.mT @ a, (((6, 6), "x, y"),)),
    Traced(
        "attention",
        _attention,
        (
            ((7, 6), "x, -"),
            ((6, 6), "-, y"),
            ((6, 6), "-, y"),
            ((6, 6), "-, y"),
        ),
    ),
    Traced(
        "read twice",
        lambda a, b: [sp.rms_norm(a @ b), sp.log_softmax(a @ b), (a.mT, sp.exp(b) @ a)],
        (((7, 6), "-, x"), ((6, 7), "x, -")),
    ),
    Traced("sorted", lambda a: sp.sort(a, axis=0), (((7, 5), "x, y"),)),
    Traced("reshaped", lambda a: sp.reshape(a, (5, 7)) + 1.0, (((7, 5), "x, y"),)),
    Traced("several results", lambda a: list(sp.unstack(a, axis=0)), (((2, 5), "-, y"),)),
    Traced("not sharded", lambda a: sp.exp(a) + a, (((3, 2), None),)),
    Traced("as it came", lambda a, b: (b, a, a), (((3, 2), "x, -"), ((2,), None))),
    Traced("nested", lambda a: {"s": (sp.max(a, axis=1), [a + a])}, (((4, 6), "x, y"),)),
    Traced("a constant", lambda a: a + np.arange(5.0), (((7, 5), "x, y"),)),
    Traced(
        "a constant in shards",
        lambda a: a @ sp.ones((5, 2), spec=spec(MESH, "y, -")),
        (((7, 5), "x, -"),),
    ),
    Traced(
        "fixed inside",
        lambda a, b: sp.exp(a.shard(spec(MESH, "-, y"))) @ b,
        (
            ((7, 6), None),
            ((6, 4), None),
        ),
    ),
    Traced(
        "ring attention",
        lambda q, k, v: sp.attention(q, k, v, is_causal=True),
        (((2, 7, 3), "-, y x, -"),) * 3,
    ),
    Traced(
        "pooled",
        lambda a: sp.max_pool(a, (3, 2), strides=(1, 2), padding=1),
        (((2, 9, 6), "-, y, x"),),
    ),
    Traced(
        "convolved",
        sp.grad(lambda a, b: sp.sum(sp.convolution(a, b, padding=1) ** 2), (0, 1)),
        (((2, 3, 7, 6), "-, -, x, y"), ((2, 3, 3, 3), None)),
    ),
]
