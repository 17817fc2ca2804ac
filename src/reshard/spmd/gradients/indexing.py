"""Derivatives of indexing, scattering and sorting.

What was looked up gets back the cotangents of all places that looked it up, added.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard.sharding import ShardingSpec
from reshard.spmd.core.local_work import has_plain_parts
from reshard.spmd.core.operator import Pullback, TapeStep
from reshard.spmd.functions import elementwise as e
from reshard.spmd.functions.elementwise import where, whole
from reshard.spmd.functions.filling import zeros_like
from reshard.spmd.functions.manipulation import broadcast_to, expand_dims, moveaxis, reshape
from reshard.spmd.functions.searching import argsort
from reshard.spmd.functions.statistics import sum as sum_over
from reshard.spmd.shards.operation_call import call

_FEW = 16
"""Indices along an axis up to which each is compared with all places."""


def _pull_take(step: TapeStep, g: Any, number: int) -> Any:
    x, indices = step.operands
    return _add_at(x, indices, g, step.attributes["axis"])


def _add_at(x: Any, indices: Any, updates: Any, axis: int) -> Any:
    """Zeros like an array, with updates added to slices of an axis."""
    attributes = {"axis": axis, "mode": "add"}
    return call("scatter", (zeros_like(x), indices, updates), attributes)


def _pull_take_along(step: TapeStep, g: Any, number: int) -> Any:
    x, indices = step.operands
    return _add_along(x, indices, g, step.attributes["axis"])


def _add_along(x: Any, indices: Any, g: Any, axis: int) -> Any:
    """Zeros like an array, with an update added at an index along an axis for each other place."""
    axis %= x.ndim
    spec = x.type.spec
    size, count = x.shape[axis], indices.shape[axis]
    indices, g = moveaxis(indices, axis, -1), moveaxis(g, axis, -1)
    if count <= _FEW:
        # Each place compares itself with the indices, so that places may be cut.
        places = whole(x, np.arange(size))
        if spec is not None and has_plain_parts(spec):
            places = places.shard(ShardingSpec(spec.mesh, [spec.dim_specs[axis]]))
        if count == 1:
            return moveaxis(where(e.equal(places, indices), g, 0.0), -1, axis)
        chosen = e.equal(expand_dims(places, axis=1), expand_dims(indices, axis=-2))
        found = sum_over(where(chosen, expand_dims(g, axis=-2), 0.0), axis=-1)
        return moveaxis(found, -1, axis)
    # All places in one line: a lookup for each element.
    lead = g.shape[:-1]
    rows = int(np.prod(lead, dtype=np.int64))
    first = whole(x, np.arange(rows).reshape((*lead, 1)) * size)
    at = reshape(broadcast_to(indices, g.shape) + first, (-1,))
    line = reshape(zeros_like(moveaxis(x, axis, -1)), (-1,))
    found = _add_at(line, at, reshape(g, (-1,)), 0)
    return moveaxis(reshape(found, (*lead, size)), -1, axis)


def _pull_scatter(step: TapeStep, g: Any, number: int) -> Any:
    x, indices, updates = step.operands
    axis, mode = step.attributes["axis"], step.attributes["mode"]
    if mode == "add":
        return g if number == 0 else call("take", (g, indices), {"axis": axis})
    if number == 0:
        return call("scatter", (g, indices, zeros_like(updates)), {"axis": axis, "mode": "set"})
    found = call("take", (g, indices), {"axis": axis})
    # Of equal indices one was set: the same one sets its number here.
    flat = reshape(indices, (-1,))
    numbers = whole(x, np.arange(flat.shape[0]))
    marks = whole(x, np.full(x.shape[axis], -1))
    marked = call("scatter", (marks, flat, numbers), {"axis": 0, "mode": "set"})
    was_set = e.equal(call("take", (marked, flat), {"axis": 0}), numbers)
    behind = (1,) * (updates.ndim - axis - indices.ndim)
    return where(reshape(was_set, indices.shape + behind), found, 0.0)


def _pull_window(step: TapeStep, g: Any, number: int) -> Any:
    x, *starts = step.operands
    return call("dynamic_update_slice", (zeros_like(x), g, *starts)) if number == 0 else None


def _pull_written_window(step: TapeStep, g: Any, number: int) -> Any:
    _, update, *starts = step.operands
    if number == 0:
        return call("dynamic_update_slice", (g, zeros_like(update), *starts))
    return call("dynamic_slice", (g, *starts), {"sizes": update.shape})


def _pull_sort(step: TapeStep, g: Any, number: int) -> Any:
    axis = step.attributes["axis"]
    order = argsort(step.operands[0], axis=axis, descending=step.attributes["descending"])
    # The place that each element went to is the order's own order.
    return call("take_along_axis", (g, argsort(order, axis=axis)), {"axis": axis})


def _pull_largest(step: TapeStep, g: Any, number: int) -> Any:
    return _add_along(step.operands[0], step.results[1], g[0], step.attributes["axis"])


PULLBACKS: dict[str, Pullback] = {
    "take": _pull_take,
    "take_along_axis": _pull_take_along,
    "scatter": _pull_scatter,
    "dynamic_slice": _pull_window,
    "dynamic_update_slice": _pull_written_window,
    "sort": _pull_sort,
    "top_k": _pull_largest,
}
"""By operator."""

CONSTANT = frozenset(("argsort", "checked_index", "isin", "one_hot", "searchsorted"))
"""Operators whose results are places and truth values."""

_VALUES = "how many results there are depends on the elements, which are read"

_UNKNOWN = "nonzero unique_all unique_counts unique_inverse unique_values"

REFUSED: dict[str, str] = {
    "embedding": "sp.embedding is sp.take",
    **dict.fromkeys(_UNKNOWN.split(), _VALUES),
}
"""Operators without a derivative, with the reason."""
