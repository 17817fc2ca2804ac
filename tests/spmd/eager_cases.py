"""Operations on arrays in shards, each with what NumPy computes of the whole arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec, spec

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """`function(xp, *arrays)`, for the namespaces of both sides, over arrays of these shapes."""

    name: str
    function: Function
    shapes: tuple[tuple[int, ...], ...]
    kind: str = "float"

    def arrays(self) -> list[np.ndarray]:
        random = np.random.default_rng(len(self.name))
        made = []
        for shape in self.shapes:
            if self.kind == "float":
                made.append(random.uniform(-2, 2, size=shape))
            elif self.kind == "positive":
                made.append(random.uniform(0.1, 0.9, size=shape))
            elif self.kind == "above one":
                made.append(random.uniform(1.1, 2.0, size=shape))
            elif self.kind == "int":
                made.append(random.integers(1, 6, size=shape))
            elif self.kind == "bool":
                made.append(random.integers(0, 2, size=shape).astype(bool))
            else:
                made.append(random.normal(size=shape) + 1j * random.normal(size=shape))
        return made


def specs(mesh: DeviceMesh, ndim: int, partial: bool = False) -> Iterator[ShardingSpec]:
    """Every sharding of `ndim` dimensions by whole axes, in every order of axes."""
    places = [*range(ndim), "copies", *(["contributions"] if partial else [])]
    for choice in itertools.product(places, repeat=len(mesh.axis_names)):
        cut: list[list[str]] = [[] for _ in range(ndim)]
        contributions = []
        for axis, place in zip(mesh.axis_names, choice, strict=True):
            if isinstance(place, int):
                cut[place].append(axis)
            elif place == "contributions":
                contributions.append(axis)
        for orders in itertools.product(*(list(itertools.permutations(axes)) for axes in cut)):
            yield ShardingSpec(mesh, orders, partial_axes=contributions)


def ruled_specs(
    mesh: DeviceMesh, shape: tuple[int, ...], choose: Random, count: int
) -> Iterator[ShardingSpec]:
    """Some shardings over a mesh of two axes that cut by rules of their own.

    One axis cuts a dimension, in blocks that are dealt out, in zigzag, or unevenly; the other has
    contributions, cuts another dimension or, by a rule or not, the parts of the first.
    """
    for _ in range(count if shape else 0):
        first, second = choose.sample(mesh.axis_names, 2)
        dims = ["-"] * len(shape)
        place = choose.randrange(len(shape))
        uneven = f"sizes[{_draw_sizes(mesh, first, shape[place], choose)}]"
        dims[place] = f"{first}@{choose.choice((*_RULES, uneven))}"
        other = choose.randrange(len(shape))
        behind = choose.choice(("", " | sum({second})", "inside", "beside"))
        if behind == "beside" and other != place:
            dims[other] = f"{second}@{choose.choice(_RULES)}"
        if behind == "inside":
            dims[place] += f" / {second}@{choose.choice(_RULES)}"
        ending = behind.format(second=second) if "|" in behind else ""
        yield spec(mesh, ", ".join(dims) + ending)


_RULES = ("cyclic1", "cyclic2+1", "zigzag", "balanced")


def _draw_sizes(mesh: DeviceMesh, axis: str, length: int, choose: Random) -> str:
    """Sizes of an axis's parts, of which some may be empty."""
    ends = sorted(choose.randint(0, length) for _ in range(mesh.axis_size(axis) - 1))
    return ",".join(str(b - a) for a, b in zip([0, *ends], [*ends, length], strict=True))


def _op(name: str, *more: Any, **options: Any) -> Function:
    return lambda xp, *arrays: getattr(xp, name)(*arrays, *more, **options)


ROWS = (7, 5)
UNARY = [
    Case(name, _op(name), (ROWS,), kind)
    for names, kind in (
        (
            "abs atan asinh ceil conj cos cosh exp expm1 floor imag isfinite isinf isnan negative",
            "",
        ),
        ("positive real round sign signbit sin sinh square tan tanh trunc reciprocal", ""),
        ("acos asin atanh log log1p log2 log10 sqrt", "positive"),
        ("acosh", "above one"),
        ("bitwise_invert", "int"),
        ("logical_not", "bool"),
    )
    for name in names.split()
    for kind in [kind or "float"]
]

BINARY = [
    Case(name, _op(name), (ROWS, ROWS), kind)
    for names, kind in (
        ("add atan2 copysign divide equal floor_divide greater greater_equal hypot less", ""),
        ("less_equal logaddexp maximum minimum multiply nextafter not_equal remainder", ""),
        ("subtract", ""),
        ("pow", "positive"),
        ("bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor", "int"),
        ("logical_and logical_or logical_xor", "bool"),
    )
    for name in names.split()
    for kind in [kind or "float"]
]

PRODUCTS = [
    Case("matmul", _op("matmul"), ((7, 5), (5, 4))),
    Case("matmul of whole numbers", _op("matmul"), ((7, 5), (5, 4)), "int"),
    Case("tensordot", lambda xp, a, b: xp.tensordot(a, b, axes=((1,), (0,))), ((7, 5), (5, 4))),
    Case("vecdot", lambda xp, a, b: xp.vecdot(a, b), ((7, 5), (7, 5))),
    Case("concat 0", lambda xp, a, b: xp.concat([a, b], axis=0), ((7, 5), (3, 5))),
    Case("concat 1", lambda xp, a, b: xp.concat([a, b], axis=1), ((7, 5), (7, 2))),
    Case("stack", lambda xp, a, b: xp.stack([a, b], axis=1), (ROWS, ROWS)),
    Case("broadcast add", _op("add"), ((7, 1), (1, 5))),
    Case("where", lambda xp, a, b: xp.where(a > 0, a, b), (ROWS, ROWS)),
    Case("solve", lambda xp, a, b: xp.linalg.solve(a + 9 * np.eye(5), b), ((5, 5), (5, 4))),
    Case(
        "take_along_axis",
        lambda xp, a, b: xp.take_along_axis(a, b, axis=0),
        ((7, 5), (4, 5)),
        "int",
    ),
    Case("searchsorted", lambda xp, a, b: xp.searchsorted(xp.sort(a), b), ((7,), (5,))),
    Case("take 0", lambda xp, a, b: xp.take(a, b, axis=0), ((7, 5), (4,)), "int"),
    Case("outer", lambda xp, a, b: xp.linalg.outer(a, b), ((7,), (5,))),
    Case("cross", lambda xp, a, b: xp.linalg.cross(a, b), ((7, 3), (7, 3))),
]

ALONG = [
    Case(f"{name} {axis}", _op(name, axis=axis), (ROWS,))
    for name in [
        "sum",
        "prod",
        "max",
        "min",
        "mean",
        "var",
        "std",
        "any",
        "all",
        "argmax",
        "argmin",
        "sort",
        "argsort",
        "flip",
        "cumulative_sum",
        "cumulative_prod",
        "diff",
        "unstack",
        "count_nonzero",
    ]
    for axis in (0, 1)
]

MOVED = [
    Case("sum of all", _op("sum"), (ROWS,)),
    Case("sum keeping dims", _op("sum", axis=0, keepdims=True), (ROWS,), "int"),
    Case("argmax of all", _op("argmax"), (ROWS,)),
    Case("permute_dims", _op("permute_dims", (1, 0)), (ROWS,)),
    Case("matrix_transpose", _op("matrix_transpose"), (ROWS,)),
    Case("moveaxis", _op("moveaxis", 0, -1), (ROWS,)),
    Case("reshape to 35", _op("reshape", (35,)), (ROWS,)),
    Case("reshape to 5, 7", _op("reshape", (5, 7)), (ROWS,)),
    Case("reshape merge", _op("reshape", (24,)), ((6, 4),)),
    Case("reshape split", _op("reshape", (3, 2, 2, 2)), ((6, 4),)),
    Case("reshape back", lambda xp, x: xp.reshape(xp.reshape(x, (24,)), (4, 6)), ((6, 4),)),
    Case("expand_dims", _op("expand_dims", axis=1), (ROWS,)),
    Case("squeeze", _op("squeeze", 1), ((7, 1),)),
    Case("broadcast_to", _op("broadcast_to", (3, 7, 5)), ((7, 1),)),
    Case("roll", _op("roll", 2, axis=0), (ROWS,)),
    Case("roll of all", _op("roll", 3), (ROWS,)),
    Case("tile", _op("tile", (2, 1, 3)), (ROWS,)),
    Case("repeat", _op("repeat", 3, axis=1), (ROWS,)),
    Case("repeat unevenly", _op("repeat", np.array([1, 0, 2, 1, 1]), axis=1), (ROWS,)),
    Case("slices", lambda xp, x: x[1:6:2, ::-1], (ROWS,)),
    Case("index", lambda xp, x: x[-2], (ROWS,)),
    Case("new axes", lambda xp, x: x[..., None, 3], (ROWS,)),
    Case("mask", lambda xp, x: x[x > 0], (ROWS,)),
    Case("take 1", _op("take", np.array([3, 0, 3]), axis=1), (ROWS,)),
    Case("sort falling", lambda xp, x: xp.flip(xp.sort(x, axis=0), axis=0), (ROWS,)),
    Case("clip", lambda xp, x: xp.clip(x, -1.0, 1.0), (ROWS,)),
    Case("tril", _op("tril", k=1), (ROWS,)),
    Case("triu", _op("triu", k=-1), (ROWS,)),
    Case("astype", _op("astype", "float32"), (ROWS,)),
    Case("zeros_like", _op("zeros_like"), (ROWS,)),
    Case("full_like", _op("full_like", 3.0), (ROWS,)),
    Case("scalars", lambda xp, x: 1 - (2 * x + 1) / 3, (ROWS,)),
    Case("nonzero", lambda xp, x: xp.nonzero(xp.where(x > 0, x, 0.0))[1], (ROWS,)),
    Case("unique_counts", lambda xp, x: xp.unique_counts(x)[1], (ROWS,), "int"),
    Case("isin", lambda xp, x: xp.isin(x, np.array([1, 2])), (ROWS,), "int"),
    Case("rfft", lambda xp, x: xp.fft.rfft(x, axis=0), (ROWS,)),
    Case("fftn", lambda xp, x: xp.fft.fftn(x), (ROWS,)),
    Case("irfft", lambda xp, x: xp.fft.irfft(x, axis=1), (ROWS,), "complex"),
    Case("fftshift", lambda xp, x: xp.fft.fftshift(x), (ROWS,)),
    Case("cholesky", lambda xp, x: xp.linalg.cholesky(x @ x.T + 9 * np.eye(5)), ((5, 4),)),
    Case("qr", lambda xp, x: xp.linalg.qr(x)[1], (ROWS,)),
    Case("svdvals", lambda xp, x: xp.linalg.svdvals(x), (ROWS,)),
    Case("det", lambda xp, x: xp.linalg.det(x), ((5, 5),)),
    Case("inv", lambda xp, x: xp.linalg.inv(x), ((5, 5),)),
    Case("pinv", lambda xp, x: xp.linalg.pinv(x), (ROWS,)),
    Case("slogdet", lambda xp, x: xp.linalg.slogdet(x)[1], ((5, 5),)),
    Case("eigvalsh", lambda xp, x: xp.linalg.eigvalsh(x + x.T), ((5, 5),)),
    Case("matrix_power", lambda xp, x: xp.linalg.matrix_power(x, 5), ((5, 5),)),
    Case("matrix_rank", lambda xp, x: xp.linalg.matrix_rank(x), (ROWS,)),
    Case("trace", lambda xp, x: xp.linalg.trace(x, offset=1), (ROWS,)),
    Case("vector_norm", lambda xp, x: xp.linalg.vector_norm(x, axis=0, ord=3), (ROWS,)),
    Case("matrix_norm", lambda xp, x: xp.linalg.matrix_norm(x), (ROWS,)),
    Case("matrix_norm by rows", lambda xp, x: xp.linalg.matrix_norm(x, ord=np.inf), (ROWS,)),
]

ONE_OPERAND = [*UNARY, *ALONG, *MOVED]
TWO_OPERANDS = [*BINARY, *PRODUCTS]
