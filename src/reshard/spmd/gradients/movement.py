"""Derivatives of operators that move elements: the cotangents are moved back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from reshard.spmd.core.operator import Pullback, TapeStep
from reshard.spmd.functions.manipulation import (
    expand_dims,
    flip,
    permute_dims,
    reshape,
    roll,
    take_ranges,
)
from reshard.spmd.functions.statistics import summed_to
from reshard.spmd.functions.windows import pad


def _reshape_back(step: TapeStep, g: Any, number: int) -> Any:
    return reshape(g, step.operands[0].shape)


def _sum_back(step: TapeStep, g: Any, number: int) -> Any:
    return summed_to(g, step.operands[0].shape)


def _permute_back(step: TapeStep, g: Any, number: int) -> Any:
    axes = [axis % g.ndim for axis in step.attributes["axes"]]
    return permute_dims(g, [axes.index(dim) for dim in range(g.ndim)])


def _roll_back(step: TapeStep, g: Any, number: int) -> Any:
    shifts = tuple(-shift for shift in step.attributes["shift"])
    return roll(g, shifts, axis=step.attributes["axis"])


def _take_part(step: TapeStep, g: Any, number: int) -> Any:
    axis = step.attributes["axis"]
    sizes = [one.shape[axis] for one in step.operands]
    start = sum(sizes[:number])
    return take_ranges(g, {axis: (start, start + sizes[number], 1)})


def _unpad(step: TapeStep, g: Any, number: int) -> Any:
    pairs = zip(step.attributes["pad_width"], g.shape, strict=True)
    return take_ranges(
        g, {dim: (before, size - after, 1) for dim, ((before, after), size) in enumerate(pairs)}
    )


def _pull_slice(step: TapeStep, g: Any, number: int) -> Any:
    attributes = step.attributes
    ranges = zip(attributes["starts"], attributes["limits"], attributes["strides"], strict=True)
    return put_ranges(g, step.operands[0].shape, list(ranges))


def put_ranges(x: Any, shape: Sequence[int], ranges: Sequence[tuple[int, int, int]]) -> Any:
    """Zeros of a shape, with elements at every `step`-th place from `start` on of each dimension.

    >>> import reshard.spmd as sp
    >>> put_ranges(sp.array([1, 2]), (6,), [(1, 6, 3)]).to_dense().tolist()
    [0, 1, 0, 0, 2, 0]
    """
    for dim, (_, _, step) in enumerate(ranges):
        if step == 1 or x.shape[dim] == 0:
            continue
        # `step - 1` zeros behind each element; those behind the last one go.
        spread = pad(
            expand_dims(x, axis=dim + 1),
            [(0, (step - 1) * (d == dim + 1)) for d in range(x.ndim + 1)],
        )
        count = x.shape[dim]
        x = reshape(spread, (*x.shape[:dim], count * step, *x.shape[dim + 1 :]))
        x = take_ranges(x, {dim: (0, (count - 1) * step + 1, 1)})
    pairs = [
        (start if here else 0, size - here - (start if here else 0))
        for (start, _, _), here, size in zip(ranges, x.shape, shape, strict=True)
    ]
    return pad(x, pairs) if any(itertools.chain(*pairs)) else x


PULLBACKS: dict[str, Pullback] = {
    "permute_dims": _permute_back,
    **dict.fromkeys(("reshape", "expand_dims", "squeeze"), _reshape_back),
    "broadcast_to": _sum_back,
    "flip": lambda step, g, number: flip(g, axis=step.attributes["axis"]),
    "roll": _roll_back,
    "concat": _take_part,
    "slice": _pull_slice,
    "pad": _unpad,
}
"""By operator."""

_MADE = """
matrix_transpose moveaxis flatten broadcast_arrays stack unstack split tile repeat meshgrid tril
triu diff
"""

REFUSED: dict[str, str] = {
    name: f"sp.{name} is made of other operators, which have derivatives" for name in _MADE.split()
}
"""Operators without a derivative, with the reason."""
