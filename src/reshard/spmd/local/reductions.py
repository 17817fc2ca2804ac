"""Local functions of reductions: of empty shards, cumulative sums of shards, norms."""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from reshard.dtypes import dtype as as_dtype
from reshard.spmd.core.local_work import Function, LocalWork, find_function, own_attributes


def extremum(work: LocalWork) -> list[Function]:
    """A part without elements gives what any number replaces."""
    function = partial(
        find_function(work, work.library.namespace, work.name), **own_attributes(work)
    )
    functions: list[Function] = []
    for shape, result in zip(work.operand_shapes_here(), work.result_shapes_here(()), strict=True):
        # A library refuses the maximum of nothing; the identity leaves other ranks' contributions
        # alone.
        is_empty = bool(work.result_specs) and 0 in shape
        functions.append(partial(_fill_identity, work, result) if is_empty else function)
    return functions


def _fill_identity(work: LocalWork, shape: tuple[int, ...], x: Any) -> Any:
    """Least for `max`, greatest for `min`."""
    made = work.library.filled(shape, work.library.identity(work.name, x), x)
    return work.library.linked(made, x)


def running_totals(work: LocalWork) -> Function:
    """Totals up to each place of an axis; with lengths of parts, anew at the start of each."""
    options = own_attributes(work)
    parts, axis = options.pop("parts", None), options["axis"]
    scan = partial(find_function(work, work.library.namespace, work.name), **options)
    if parts is None or work.is_cut(0, axis):
        # A part that is cut off is all of one that begins anew.
        return scan
    ends = np.cumsum(parts).tolist()
    windows = [
        (slice(None),) * axis + (slice(end - size, end),)
        for end, size in zip(ends, parts, strict=True)
    ]
    concat = work.library.namespace.concat
    return lambda x: concat([scan(x[window]) for window in windows], axis=axis)


def norm(work: LocalWork) -> Function:
    """A norm of each row, with a weight and an offset where these are given."""
    if work.library.name == "numpy":
        return _norm_by_numpy(work)
    functional = import_module("torch").nn.functional
    dims, epsilon = work.attributes["dims"], work.attributes["epsilon"]
    normalised = functional.rms_norm if work.name == "rms_norm" else functional.layer_norm

    def function(x: Any, *others: Any) -> Any:
        return normalised(x, x.shape[x.ndim - dims :], *others, eps=epsilon)

    return function


def _norm_by_numpy(work: LocalWork) -> Function:
    rows = _Rows(work)

    def function(x: Any, *others: Any) -> Any:
        apart, scale = rows.scaled(x)
        found = (apart * scale[:, None]).reshape(x.shape)
        for combine, one in zip((np.multiply, np.add), others, strict=False):
            found = combine(found, one)
        return found.astype(x.dtype, copy=False)

    return function


def norm_gradient(work: LocalWork) -> Function:
    """The cotangents of a norm's operand and weight."""
    rows = _Rows(work)
    if rows.is_centred and work.library.name != "numpy":
        return _layer_norm_gradient_by_torch(rows, work.attributes["epsilon"])

    def function(g: Any, x: Any, *weights: Any) -> Any:
        # With h the cotangent of the row before its weight and n the row after its norm, it is
        # (h - mean(h n) n) / deviation, less its mean where the row's own was taken off.
        apart, scale = rows.scaled(x)
        slope = rows.of(g)
        shared = slope * apart
        to_weights = [rows.like(scale @ shared, one) for one in weights]
        # New memory of this size takes longer than to compute: the result lies in that of a step.
        if weights:
            weight = rows.of(weights[0])[0]
            agreement = shared @ weight
            found = rows.multiply(slope, weight, out=shared)
            found *= scale[:, None]
        else:
            agreement = rows.space.sum(shared, axis=-1)
            found = rows.multiply(slope, scale[:, None], out=shared)
        agreement *= scale * scale * scale / -rows.size
        if rows.is_centred:
            apart *= agreement[:, None]
            found += apart
            found -= rows.space.mean(found, axis=-1, keepdims=True)
        else:
            found += apart * agreement[:, None]
        found = rows.like(found, x)
        return (found, *to_weights) if weights else found

    return function


def _layer_norm_gradient_by_torch(rows: _Rows, epsilon: float) -> Function:
    aten = import_module("torch").ops.aten

    def function(g: Any, x: Any, *weights: Any) -> Any:
        own = rows.of(x)
        weight = rows.of(weights[0])[0] if weights else None
        _, mean, scale = aten.native_layer_norm(own, [rows.size], weight, None, epsilon)
        wanted = [True, weight is not None, False]
        found, to_weight, _ = aten.native_layer_norm_backward(
            rows.of(g), own, [rows.size], mean, scale, weight, None, wanted
        )
        found = rows.like(found, x)
        return (found, rows.like(to_weight, weights[0])) if weights else found

    return function


class _Rows:
    """What is normalised, as rows of floats that are not narrow."""

    def __init__(self, work: LocalWork) -> None:
        self.space = work.library.namespace
        self.is_centred = work.name.startswith("layer")
        is_numpy = work.library.name == "numpy"
        self.multiply: Any = np.multiply if is_numpy else import_module("torch").mul
        self._epsilon = work.attributes["epsilon"]
        # The operand, or the cotangent of its shape and type.
        given = next(one for one in work.operands if one is not None)
        self.size = math.prod(given.shape[given.ndim - work.attributes["dims"] :])
        is_narrow = given.dtype.itemsize_bytes < 4
        self._wide = work.library.own_dtype(as_dtype("float32") if is_narrow else given.dtype)

    def of(self, x: Any) -> Any:
        """An array as rows."""
        return self.space.astype(x, self._wide, copy=False).reshape(-1, self.size)

    def like(self, x: Any, other: Any) -> Any:
        """Rows in the shape and of the type of an array."""
        return self.space.astype(x, other.dtype, copy=False).reshape(other.shape)

    def scaled(self, x: Any) -> tuple[Any, Any]:
        """Rows, less their means where these are taken off, and what they are multiplied by."""
        x = self.of(x)
        if self.is_centred:
            x = x - self.space.mean(x, axis=-1, keepdims=True)
        length = self.space.linalg.vector_norm(x, axis=-1)
        return x, (length * length / self.size + self._epsilon) ** -0.5
