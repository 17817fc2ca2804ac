"""Derivatives of reductions and cumulative operators.

The cotangent of a total is spread over what was added up. Extremes share theirs evenly between
equal elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard.spmd.core.operator import Pullback, TapeStep
from reshard.spmd.functions import elementwise as e
from reshard.spmd.functions.data_types import astype
from reshard.spmd.functions.elementwise import where, whole
from reshard.spmd.functions.manipulation import (
    broadcast_to,
    expand_dims,
    flip,
    moveaxis,
    reshape,
    take_ranges,
)
from reshard.spmd.functions.statistics import prod
from reshard.spmd.functions.statistics import sum as sum_over
from reshard.spmd.gradients.tape import OF_GRAPHS
from reshard.spmd.rules.shapes import axes_of
from reshard.spmd.shards.operation_call import call


def _keep_dims(step: TapeStep, reduced: Any) -> Any:
    """What was reduced, or its cotangent, with dimensions of 1 in the reduced ones' places."""
    shape = step.operands[0].shape
    axes = axes_of(len(shape), step.attributes["axis"])
    return reshape(reduced, [1 if dim in axes else size for dim, size in enumerate(shape)])


def _pull_sum(step: TapeStep, g: Any, number: int) -> Any:
    return broadcast_to(_keep_dims(step, g), step.operands[0].shape)


def _pull_extreme(step: TapeStep, g: Any, number: int) -> Any:
    (x,) = step.operands
    equal = e.equal(x, _keep_dims(step, step.result))
    # Narrow floats have no number above 65,504 (float16), and not each above 256 (bfloat16).
    wide = g.dtype if g.dtype.itemsize_bytes > 2 else "float32"
    count = sum_over(astype(equal, wide), axis=step.attributes["axis"], keepdims=True)
    # Where nothing is equal to the extreme, that is no number.
    share = astype(_keep_dims(step, g), wide) / where(e.equal(count, 0), 1.0, count)
    return where(equal, astype(share, g.dtype), 0.0)


def _pull_product(step: TapeStep, g: Any, number: int) -> Any:
    (x,) = step.operands
    axis = step.attributes["axis"]
    # Without dividing by 0: a single 0 has the product of the others, of two each has 0.
    is_zero = e.equal(x, 0)
    others = where(is_zero, 1.0, x)
    product = prod(others, axis=axis, keepdims=True)
    zeros = sum_over(astype(is_zero, g.dtype), axis=axis, keepdims=True)
    of_zero = where(e.equal(zeros, 1), product, 0.0)
    slope = where(is_zero, of_zero, where(e.equal(zeros, 0), product / others, 0.0))
    return _keep_dims(step, g) * slope


def _without_initial(step: TapeStep, g: Any) -> Any:
    axis = step.attributes["axis"]
    if not step.attributes.get("include_initial"):
        return g
    return take_ranges(g, {axis: (1, g.shape[axis], 1)})


def _pull_running_sum(step: TapeStep, g: Any, number: int) -> Any:
    axis, parts = step.attributes["axis"], step.attributes.get("parts")
    # What comes behind each place, summed from the end.
    turned = flip(_without_initial(step, g), axis=axis)
    more = {} if parts is None else {"parts": tuple(reversed(parts))}
    return flip(call("cumulative_sum", (turned,), {"axis": axis, **more}), axis=axis)


def _pull_running_product(step: TapeStep, g: Any, number: int) -> Any:
    (x,) = step.operands
    axis, size = step.attributes["axis"], step.operands[0].shape[step.attributes["axis"]]
    g = moveaxis(_without_initial(step, g), axis, -1)
    # [..., i, j]: the factors but the i-th, their running products, those from the i-th on. So no
    # product is divided by a factor, which may be 0.
    ones = whole(x, np.eye(size, dtype=bool))
    factors = where(ones, 1.0, expand_dims(moveaxis(x, axis, -1), axis=-2))
    places = np.arange(size)
    parts = step.attributes.get("parts")
    more = {} if parts is None else {"parts": parts}
    part_of = np.zeros(size, int) if parts is None else np.repeat(np.arange(len(parts)), parts)
    behind = (places[None, :] >= places[:, None]) & (part_of[None, :] == part_of[:, None])
    products = call("cumulative_prod", (factors,), {"axis": x.ndim, **more})
    slopes = where(whole(x, behind), products, 0.0) * expand_dims(g, axis=-2)
    return moveaxis(sum_over(slopes, axis=-1), -1, axis)


PULLBACKS: dict[str, Pullback] = {
    "sum": _pull_sum,
    "max": _pull_extreme,
    "min": _pull_extreme,
    "prod": _pull_product,
    "cumulative_sum": _pull_running_sum,
    "cumulative_prod": _pull_running_product,
}
"""By operator."""

CONSTANT = frozenset(("all", "any", "argmax", "argmin", "count_nonzero"))
"""Operators whose results are places, counts and truth values."""

REFUSED: dict[str, str] = {
    **dict.fromkeys(("mean", "var", "std"), "sp.mean, sp.var and sp.std are made of sums"),
    "logsumexp": "sp.logsumexp is made of exponentials and sums",
    **dict.fromkeys(
        ("cumulative_max", "cumulative_min"),
        OF_GRAPHS,
    ),
}
"""Operators without a derivative, with the reason."""
