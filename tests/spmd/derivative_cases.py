"""Functions of arrays in shards with something to differentiate, for every operator that can be.

`function(xp, *arrays)` runs in `reshard.spmd` and, where PyTorch has the names, in the array API's
namespace of PyTorch; `by_torch` says it otherwise, None that PyTorch has no such function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.spmd.shards.operation_call import call

Function = Callable[..., Any]
SAME = "the same function"


@dataclass(frozen=True)
class GradientCase:
    """A function, and arrays to differentiate it at.

    Args:
        name: of the case; its first word is that of the operator.
        function: of a namespace and arrays.
        shapes: of the arrays.
        low, high: between which their numbers lie.
        by_torch: the function in PyTorch.
    """

    name: str
    function: Function
    shapes: tuple[tuple[int, ...], ...]
    low: float = -2.0
    high: float = 2.0
    by_torch: Function | str | None = SAME

    def arrays(self) -> list[np.ndarray]:
        """Numbers that are apart from one another, so that none is at a kink."""
        random = np.random.default_rng(len(self.name))
        made = []
        for shape in self.shapes:
            count = math.prod(shape)
            spread = (np.arange(count) + random.uniform(0.2, 0.8, size=count)) / max(count, 1)
            numbers = self.low + (self.high - self.low) * random.permutation(spread)
            made.append(numbers.reshape(shape))
        return made


def _op(name: str, *more: Any, **options: Any) -> Function:
    return lambda xp, *arrays: getattr(xp, name)(*arrays, *more, **options)


def _torch(name: str) -> Function:
    def function(xp: Any, *arrays: Any) -> Any:
        import torch

        return getattr(torch.nn.functional, name)(*arrays)

    return function


def _nn() -> Any:
    import torch

    return torch.nn.functional


def _einsum(*operands: Any) -> Any:
    import torch

    return torch.einsum(*operands)


ROWS = (7, 5)
_SMOOTH = "abs asinh atan cos cosh exp expm1 negative positive sin sinh square tanh conj"
_UNIT = "acos asin atanh log log1p log2 log10 reciprocal sqrt tan"
_PAIRS = "add atan2 hypot logaddexp maximum minimum multiply subtract copysign"
_MASK = np.arange(35).reshape(ROWS) % 3 == 0


def _masked(x: Any) -> Any:
    """The mask as the library of an array has it."""
    if type(x).__module__.startswith("torch"):
        import torch

        return torch.as_tensor(_MASK)
    return _MASK


def _indices(x: Any, *numbers: Any) -> Any:
    found = np.array(numbers)
    if type(x).__module__.startswith("torch"):
        import torch

        return torch.as_tensor(found)
    return found


ELEMENTWISE = [
    *(GradientCase(name, _op(name), (ROWS,)) for name in _SMOOTH.split()),
    *(GradientCase(name, _op(name), (ROWS,), 0.1, 0.9) for name in _UNIT.split()),
    GradientCase("acosh", _op("acosh"), (ROWS,), 1.1, 2.0),
    *(GradientCase(name, _op(name), (ROWS, ROWS)) for name in _PAIRS.split()),
    GradientCase("divide", _op("divide"), (ROWS, ROWS), 0.5, 2.0),
    GradientCase("pow", _op("pow"), (ROWS, ROWS), 0.1, 0.9),
    GradientCase("pow by a number", lambda xp, x: x**3 + x**0 + 2.0**x, (ROWS,)),
    GradientCase("remainder", _op("remainder"), (ROWS, ROWS), 0.6, 2.0),
    GradientCase("add that broadcasts", _op("add"), ((7, 1), (1, 5))),
    GradientCase("multiply that broadcasts", _op("multiply"), (ROWS, (5,))),
    GradientCase("divide by numbers", lambda xp, x: 1 - (2 * x + 1) / 3 + 2 / x, (ROWS,), 0.5),
    GradientCase("clip", lambda xp, x: xp.clip(x, -1.0, 1.0), (ROWS,)),
    GradientCase(
        "clip by arrays", lambda xp, x, a, b: xp.clip(x, a, b), (ROWS, ROWS, ROWS), -2, 2, None
    ),
    GradientCase("where", lambda xp, a, b: xp.where(_masked(a), a, b), (ROWS, ROWS)),
    GradientCase("where of numbers", lambda xp, a: xp.where(a > 0, a * a, 0.5), (ROWS,)),
    GradientCase("astype", lambda xp, x: xp.astype(x, xp.float32), (ROWS,)),
    GradientCase("relu", _op("relu"), (ROWS,), by_torch=_torch("relu")),
    GradientCase("sigmoid", _op("sigmoid"), (ROWS,), by_torch=_torch("sigmoid")),
    GradientCase("silu", _op("silu"), (ROWS,), by_torch=_torch("silu")),
    GradientCase(
        "silu_gradient", lambda xp, g, x: call("silu_gradient", (g, x)), (ROWS, ROWS), by_torch=None
    ),
    GradientCase(
        "gelu",
        _op("gelu"),
        (ROWS,),
        by_torch=lambda xp, x: _nn().gelu(x, approximate="tanh"),
    ),
]

PRODUCTS = [
    GradientCase("matmul", _op("matmul"), ((7, 5), (5, 4))),
    GradientCase("matmul of stacks", _op("matmul"), ((2, 3, 5), (2, 5, 4))),
    GradientCase("matmul of a stack", _op("matmul"), ((2, 3, 5), (5, 4))),
    GradientCase("matmul by a stack", _op("matmul"), ((3, 5), (2, 5, 4))),
    GradientCase("matmul that broadcasts", _op("matmul"), ((3, 1, 4, 5), (2, 5, 4))),
    GradientCase("matmul of vectors", _op("matmul"), ((5,), (5,))),
    GradientCase("matmul of a vector", _op("matmul"), ((5,), (5, 4))),
    GradientCase("matmul by a vector", _op("matmul"), ((7, 5), (5,))),
    GradientCase("matmul of a stack by a vector", _op("matmul"), ((2, 3, 5), (5,))),
    GradientCase("matmul of a vector by a stack", _op("matmul"), ((5,), (2, 5, 4))),
    GradientCase(
        "tensordot",
        lambda xp, a, b: xp.tensordot(a, b, axes=((2, 0), (1, 2))),
        ((4, 3, 5), (2, 5, 4)),
    ),
    GradientCase(
        "tensordot over two", lambda xp, a, b: xp.tensordot(a, b, axes=2), ((2, 5, 4), (5, 4, 3))
    ),
    GradientCase("vecdot", lambda xp, a, b: xp.vecdot(a, b), ((7, 5), (7, 5))),
    GradientCase(
        "vecdot along the first", lambda xp, a, b: xp.vecdot(a, b, axis=-2), ((7, 5), (7, 5))
    ),
    GradientCase(
        "einsum",
        lambda xp, a, b: xp.einsum("abc,cd->bd", a, b),
        ((2, 3, 5), (5, 4)),
        by_torch=lambda xp, a, b: _einsum("abc,cd->bd", a, b),
    ),
    GradientCase(
        "einsum with an ellipsis",
        lambda xp, a, b: xp.einsum("...ik,...kj", a, b),
        ((2, 3, 5), (2, 5, 4)),
        by_torch=_op("matmul"),
    ),
]


def _norm_gradient(name: str) -> Callable[..., Any]:
    def function(xp: Any, g: Any, x: Any, w: Any) -> Any:
        made, to_weight = call(name, (g, x, w), {"dims": 1}, {"epsilon": 1e-3})
        return made + to_weight

    return function


REDUCTIONS = [
    *(
        GradientCase(f"{name} {axis}", _op(name, axis=axis), (ROWS,))
        for name in ("sum", "prod", "max", "min", "mean", "var", "std")
        for axis in (0, 1)
    ),
    GradientCase("sum of all", _op("sum"), (ROWS,)),
    GradientCase("sum that keeps", _op("sum", axis=(0, 2), keepdims=True), ((3, 4, 5),)),
    GradientCase("max of all", _op("max"), (ROWS,)),
    *(
        GradientCase(f"{name} {axis}", _op(name, axis=axis), (ROWS,))
        for name in ("cumulative_sum", "cumulative_prod")
        for axis in (0, 1)
    ),
    GradientCase(
        "cumulative_sum from 0", _op("cumulative_sum", axis=0, include_initial=True), (ROWS,)
    ),
    GradientCase(
        "logsumexp", _op("logsumexp", axis=1), (ROWS,), by_torch=lambda xp, x: x.logsumexp(1)
    ),
    GradientCase("softmax", _op("softmax", axis=0), (ROWS,), by_torch=lambda xp, x: x.softmax(0)),
    GradientCase(
        "log_softmax", _op("log_softmax"), (ROWS,), by_torch=lambda xp, x: x.log_softmax(-1)
    ),
    GradientCase(
        "layer_norm",
        lambda xp, x, w, b: xp.layer_norm(x, w, b),
        (ROWS, (5,), (5,)),
        by_torch=lambda xp, x, w, b: _nn().layer_norm(x, (5,), w, b),
    ),
    GradientCase(
        "rms_norm",
        lambda xp, x, w: xp.rms_norm(x, w, epsilon=1e-6),
        (ROWS, (5,)),
        by_torch=lambda xp, x, w: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w,
    ),
]

REDUCTIONS += [
    GradientCase(name, _norm_gradient(name), (ROWS, ROWS, (5,)), by_torch=None)
    for name in ("layer_norm_gradient", "rms_norm_gradient")
]

MOVED = [
    GradientCase("permute_dims", _op("permute_dims", (2, 0, 1)), ((3, 4, 5),)),
    GradientCase("moveaxis", _op("moveaxis", 0, -1), (ROWS,)),
    GradientCase("reshape", _op("reshape", (5, 7)), (ROWS,)),
    GradientCase("reshape that merges", _op("reshape", (24,)), ((6, 4),)),
    GradientCase("reshape that splits", _op("reshape", (3, 2, 2, 2)), ((6, 4),)),
    GradientCase("expand_dims", _op("expand_dims", axis=1), (ROWS,)),
    GradientCase("squeeze", _op("squeeze", 1), ((7, 1),)),
    GradientCase("broadcast_to", _op("broadcast_to", (3, 7, 5)), ((7, 1),)),
    GradientCase("flip", _op("flip", axis=0), (ROWS,)),
    GradientCase("roll", _op("roll", 2, axis=0), (ROWS,)),
    GradientCase("roll of all", _op("roll", 3), (ROWS,)),
    GradientCase("tile", _op("tile", (2, 3)), (ROWS,)),
    GradientCase("repeat", _op("repeat", 3, axis=1), (ROWS,)),
    GradientCase("concat", lambda xp, a, b: xp.concat([a, b], axis=0), ((7, 5), (3, 5))),
    GradientCase("stack", lambda xp, a, b: xp.stack([a, b], axis=1), (ROWS, ROWS)),
    GradientCase("slice", lambda xp, x: x[1:6, 2:], (ROWS,)),
    GradientCase("slice with steps", lambda xp, x: x[1:6:2, ::3], (ROWS,)),
    GradientCase("index", lambda xp, x: x[-2] * 2 + x[3, 1], (ROWS,)),
    GradientCase("new axes", lambda xp, x: x[..., None, 3], (ROWS,)),
    GradientCase("tril", _op("tril", k=1), (ROWS,), by_torch=lambda xp, x: x.tril(1)),
    GradientCase("diff", _op("diff", axis=0), (ROWS,)),
    GradientCase(
        "pad",
        lambda xp, x: xp.pad(x, [(1, 2), (0, 3)], constant_values=2.0),
        (ROWS,),
        by_torch=lambda xp, x: _nn().pad(x, (0, 3, 1, 2)),
    ),
    GradientCase("unstack", lambda xp, x: xp.unstack(x, axis=1)[2], (ROWS,)),
    GradientCase(
        "split",
        lambda xp, x: xp.split(x, [2, 4], axis=0)[1],
        (ROWS,),
        by_torch=lambda xp, x: x[2:4],
    ),
    GradientCase("meshgrid", lambda xp, a, b: xp.meshgrid(a, b)[0] * 2, ((4,), (3,))),
]

LOOKED_UP = [
    GradientCase("take", lambda xp, x: xp.take(x, _indices(x, 3, 0, 3), axis=1), (ROWS,)),
    GradientCase(
        "take of rows", lambda xp, x: xp.take(x, _indices(x, 6, 0, 3, 6), axis=0), (ROWS,)
    ),
    GradientCase(
        "take_along_axis",
        lambda xp, x: xp.take_along_axis(x, _indices(x, *[[n % 5, 0] for n in range(7)]), axis=1),
        (ROWS,),
    ),
    GradientCase(
        "take_along_axis of many",
        lambda xp, x: xp.take_along_axis(
            x, _indices(x, *[[(3 * n + m) % 5 for m in range(20)] for n in range(7)]), axis=1
        ),
        (ROWS,),
    ),
    GradientCase(
        "index by arrays", lambda xp, x: x[_indices(x, 1, 1, 4), _indices(x, 2, 0, 2)], (ROWS,)
    ),
    GradientCase("sort", _op("sort", axis=0), (ROWS,)),
    GradientCase("sort falling", _op("sort", axis=1, descending=True), (ROWS,)),
    GradientCase(
        "top_k",
        lambda xp, x: xp.top_k(x, 3, axis=1)[0],
        (ROWS,),
        by_torch=lambda xp, x: x.topk(3, 1)[0],
    ),
    GradientCase(
        "scatter that adds",
        lambda xp, x, u: xp.scatter(x, _indices(x, 3, 0, 3), u, axis=0, mode="add"),
        (ROWS, (3, 5)),
        by_torch=lambda xp, x, u: x.index_add(0, _indices(x, 3, 0, 3), u),
    ),
    GradientCase(
        "scatter that sets",
        lambda xp, x, u: xp.scatter(x, _indices(x, 3, 0, 1), u, axis=1),
        (ROWS, (7, 3)),
        by_torch=lambda xp, x, u: x.index_copy(1, _indices(x, 3, 0, 1), u),
    ),
    GradientCase(
        "scatter of equal indices",
        lambda xp, x, u: xp.scatter(x, _indices(x, 3, 0, 3), u, axis=0),
        (ROWS, (3, 5)),
        by_torch=None,
    ),
    GradientCase(
        "dynamic_slice",
        lambda xp, x: xp.dynamic_slice(x, (2, 1), (3, 5)),
        (ROWS,),
        by_torch=lambda xp, x: x[2:5],
    ),
    GradientCase(
        "dynamic_update_slice",
        lambda xp, x, u: xp.dynamic_update_slice(x, u, (2, 1)),
        (ROWS, (3, 2)),
        by_torch=None,
    ),
    GradientCase(
        "cross_entropy",
        lambda xp, x: xp.cross_entropy(x, _indices(x, 1, 0, 4, 2, 2, 3, 1)),
        (ROWS,),
        by_torch=lambda xp, x: _nn().cross_entropy(
            x, _indices(x, 1, 0, 4, 2, 2, 3, 1), reduction="none"
        ),
    ),
    GradientCase(
        "cross_entropy smoothed, that ignores",
        lambda xp, x: xp.cross_entropy(
            x, _indices(x, 1, -100, 4, 2, -100, 3, 1), ignore_index=-100, label_smoothing=0.3
        ),
        (ROWS,),
        by_torch=lambda xp, x: _nn().cross_entropy(
            x, _indices(x, 1, -100, 4, 2, -100, 3, 1), reduction="none", label_smoothing=0.3
        ),
    ),
    GradientCase("logsumexp", _op("logsumexp"), (ROWS,), by_torch=lambda xp, x: x.logsumexp(-1)),
    GradientCase(
        "embedding",
        lambda xp, x: xp.embedding(_indices(x, [1, 0], [6, 1]), x),
        (ROWS,),
        by_torch=lambda xp, x: x[_indices(x, [1, 0], [6, 1])],
    ),
]


def _attend(xp: Any, q: Any, k: Any, v: Any) -> Any:
    return xp.attention(q, k, v, is_causal=True)


def _torch_attend(xp: Any, q: Any, k: Any, v: Any) -> Any:
    import torch

    k, v = (one.repeat_interleave(2, dim=-3) for one in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attend_in_a_turn(xp: Any, q: Any, k: Any, v: Any) -> Any:
    parts = (((0, 2),), ((2, 3),))
    shared = {"is_causal": False, "window": None, "turn": 1}
    attributes = {**shared, "query_parts": parts, "key_parts": parts}
    found, sums = call("attention_turn", (q, k, v), attributes, {"scale": 0.3})
    return xp.sum(xp.square(found), axis=-1) + xp.square(sums)


def _attend_back(xp: Any, *operands: Any) -> Any:
    options = {"is_causal": True, "window": None}, {"scale": 0.3}
    return sum(xp.sum(xp.sin(one)) for one in call("attention_gradient", operands, *options))


def _attend_back_in_a_turn(xp: Any, *operands: Any) -> Any:
    parts = (((0, 1), (2, 3)), ((1, 2),))
    shared = {"is_causal": True, "window": 2, "turn": 1}
    attributes = {**shared, "query_parts": parts, "key_parts": parts}
    found = call("attention_turn_gradient", operands, attributes, {"scale": 0.3})
    return sum(xp.sum(xp.sin(one)) for one in found)


def _convolve(**options: Any) -> tuple[Function, Function]:
    def by_torch(xp: Any, x: Any, kernel: Any) -> Any:
        import torch

        named = {"strides": "stride"}
        found = {named.get(name, name): value for name, value in options.items()}
        return torch.nn.functional.conv1d(x, kernel, **found)

    return (lambda xp, x, kernel: xp.convolution(x, kernel, **options)), by_torch


_PLAIN = _convolve()
_STRIDED = _convolve(strides=2, padding=1, dilation=2, groups=2)

_CONVOLVED = {"strides": (2,), "padding": ((1, 1),), "dilation": (1,), "groups": 2}
_POOLED = {"window": (3,), "strides": (2,), "padding": ((1, 1),)}


def _pool_back(xp: Any, x: Any, g: Any) -> Any:
    x = xp.stop_gradient(x)
    greatest = xp.max_pool(x, (3,), strides=2, padding=1)
    return call("max_pool_gradient", (g, greatest, x), _POOLED)


WINDOWS = [
    GradientCase(
        "convolution_input_gradient",
        lambda xp, g, k: call("convolution_input_gradient", (g, k), {"sizes": (8,), **_CONVOLVED}),
        ((2, 6, 4), (6, 2, 3)),
        by_torch=None,
    ),
    GradientCase(
        "convolution_kernel_gradient",
        lambda xp, x, g: call(
            "convolution_kernel_gradient", (x, g), {"window": (3,), **_CONVOLVED}
        ),
        ((2, 4, 8), (2, 6, 4)),
        by_torch=None,
    ),
    GradientCase("max_pool_gradient", _pool_back, ((2, 3, 7), (2, 3, 4)), by_torch=None),
    GradientCase(
        "avg_pool_gradient",
        lambda xp, g: call("avg_pool_gradient", (g,), {"sizes": (7,), **_POOLED}),
        ((2, 3, 4),),
        by_torch=None,
    ),
    GradientCase("convolution", _PLAIN[0], ((2, 4, 7), (6, 4, 3)), by_torch=_PLAIN[1]),
    GradientCase(
        "convolution with strides", _STRIDED[0], ((2, 4, 9), (6, 2, 3)), by_torch=_STRIDED[1]
    ),
    GradientCase(
        "convolution of images",
        lambda xp, x, k: xp.convolution(x, k, padding=((1, 1), (0, 1))),
        ((2, 2, 4, 3), (2, 2, 3, 2)),
        by_torch=None,
    ),
    GradientCase(
        "max_pool",
        lambda xp, x: xp.max_pool(x, (3,), strides=2, padding=1),
        ((2, 3, 7),),
        by_torch=lambda xp, x: _nn().max_pool1d(x, 3, 2, 1),
    ),
    GradientCase(
        "avg_pool",
        lambda xp, x: xp.avg_pool(x, (2,), padding=1),
        ((2, 3, 8),),
        by_torch=lambda xp, x: _nn().avg_pool1d(x, 2, padding=1),
    ),
    GradientCase(
        "attention of all, in a window",
        lambda xp, q, k, v: xp.attention(q, k, v, window=2, scale=0.3),
        ((4, 5, 3), (4, 5, 3), (4, 5, 2)),
        by_torch=None,
    ),
    GradientCase(
        "attention", _attend, ((2, 4, 3, 5), (2, 2, 3, 5), (2, 2, 3, 4)), by_torch=_torch_attend
    ),
    GradientCase(
        "attention_turn",
        _attend_in_a_turn,
        ((2, 4, 3, 5), (2, 2, 3, 5), (2, 2, 3, 4)),
        by_torch=None,
    ),
    GradientCase(
        "attention_gradient",
        _attend_back,
        ((1, 4, 3, 3), (1, 2, 3, 3), (1, 2, 3, 2), (1, 4, 3, 2)),
        by_torch=None,
    ),
    GradientCase(
        "attention_turn_gradient",
        _attend_back_in_a_turn,
        ((4, 3, 3), (2, 3, 3), (2, 3, 2), (4, 3), (4, 3), (4, 3, 2)),
        by_torch=None,
    ),
]


def _positive(xp: Any, x: Any) -> Any:
    size = x.shape[-1]
    unit = np.eye(size)
    if type(x).__module__.startswith("torch"):
        import torch

        unit = torch.as_tensor(unit)
    return xp.matmul(x, xp.matrix_transpose(x)) + 3.0 * unit


def _symmetric(xp: Any, x: Any) -> Any:
    return x + xp.matrix_transpose(x)


SQUARE = (2, 4, 4)
LINEAR_ALGEBRA = [
    GradientCase("cholesky", lambda xp, x: xp.linalg.cholesky(_positive(xp, x)), (SQUARE,)),
    GradientCase("det", lambda xp, x: xp.linalg.det(x), (SQUARE,)),
    GradientCase("slogdet", lambda xp, x: xp.linalg.slogdet(x)[1], (SQUARE,)),
    GradientCase("inv", lambda xp, x: xp.linalg.inv(_positive(xp, x)), (SQUARE,)),
    GradientCase(
        "solve", lambda xp, x, b: xp.linalg.solve(_positive(xp, x), b), (SQUARE, (2, 4, 3))
    ),
    GradientCase(
        "solve of vectors", lambda xp, x, b: xp.linalg.solve(_positive(xp, x), b), ((4, 4), (4,))
    ),
    GradientCase("eigvalsh", lambda xp, x: xp.linalg.eigvalsh(_symmetric(xp, x)), (SQUARE,)),
    GradientCase("eigh", lambda xp, x: xp.abs(xp.linalg.eigh(_symmetric(xp, x))[1]), (SQUARE,)),
    GradientCase("qr", lambda xp, x: xp.abs(xp.linalg.qr(x)[0]), ((2, 5, 3),)),
    GradientCase("qr of the triangle", lambda xp, x: xp.abs(xp.linalg.qr(x)[1]), ((2, 5, 3),)),
    GradientCase("svdvals", lambda xp, x: xp.linalg.svdvals(x), ((2, 5, 3),)),
    GradientCase(
        "svd", lambda xp, x: xp.abs(xp.linalg.svd(x, full_matrices=False)[0]), ((2, 5, 3),)
    ),
    GradientCase(
        "svd of wide ones",
        lambda xp, x: xp.abs(xp.linalg.svd(x, full_matrices=False)[2]),
        ((2, 3, 5),),
    ),
    GradientCase("pinv", lambda xp, x: xp.linalg.pinv(x), ((2, 5, 3),)),
    GradientCase("diagonal", lambda xp, x: xp.linalg.diagonal(x, offset=-1), ((2, 5, 4),)),
    GradientCase("trace", lambda xp, x: xp.linalg.trace(x, offset=1), ((2, 4, 5),)),
    GradientCase("cross", lambda xp, a, b: xp.linalg.cross(a, b), ((7, 3), (7, 3))),
    GradientCase("outer", lambda xp, a, b: xp.linalg.outer(a, b), ((4,), (3,))),
    GradientCase("vector_norm", lambda xp, x: xp.linalg.vector_norm(x, axis=0, ord=3), (ROWS,)),
    GradientCase("matrix_norm", lambda xp, x: xp.linalg.matrix_norm(x), ((2, 4, 5),)),
    GradientCase("matrix_power", lambda xp, x: xp.linalg.matrix_power(x, 3), (SQUARE,)),
]

CASES = [
    *ELEMENTWISE,
    *PRODUCTS,
    *REDUCTIONS,
    *MOVED,
    *LOOKED_UP,
    *WINDOWS,
    *LINEAR_ALGEBRA,
]
