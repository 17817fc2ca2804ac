"""Derivatives of products: each operand's cotangent is a product of the others with the result's.

Along an axis that is cut and that the forward product does not sum over, the backward one does: the
gradient of a weight holds contributions of the ranks that have parts of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from reshard.spmd.core.operator import Pullback, TapeStep
from reshard.spmd.functions.elementwise import matmul
from reshard.spmd.functions.linalg import tensordot
from reshard.spmd.functions.manipulation import (
    broadcast_to,
    expand_dims,
    matrix_transpose,
    permute_dims,
    reshape,
)
from reshard.spmd.functions.networks import einsum
from reshard.spmd.functions.statistics import summed_to
from reshard.spmd.gradients.tape import OF_GRAPHS

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _pull_matmul(step: TapeStep, g: Any, number: int) -> Any:
    x, y = step.operands
    # 1. Vectors as matrices of one row or one column.
    if x.ndim == 1:
        x, g = expand_dims(x, axis=0), expand_dims(g, axis=-1 if y.ndim == 1 else -2)
    if y.ndim == 1:
        y, g = expand_dims(y, axis=1), expand_dims(g, axis=-1)
    # 2. One matrix for a whole batch: its cotangent is summed over the batch by the product itself.
    shape = step.operands[number].shape
    if number == 1 and y.ndim == 2:
        rows = list(range(x.ndim - 1))
        return reshape(tensordot(x, g, axes=(rows, rows)), shape)
    if number == 0 and x.ndim == 2 and y.ndim > 2:
        batch = list(range(y.ndim - 2))
        last = y.ndim - 1
        return reshape(tensordot(g, y, axes=([*batch, last], [*batch, last])), shape)
    # 3. Matrix by matrix; where one broadcasts, its cotangents are summed.
    if number == 0:
        return reshape(summed_to(matmul(g, matrix_transpose(y)), x.shape), shape)
    return reshape(summed_to(matmul(matrix_transpose(x), g), y.shape), shape)


def _pull_vecdot(step: TapeStep, g: Any, number: int) -> Any:
    axis = step.attributes.get("axis", -1)
    if axis >= 0:
        # Counted from the end, where operands are lined up.
        axis -= min(one.ndim for one in step.operands)
    return expand_dims(g, axis=axis) * step.operands[1 - number]


def _read_axes(step: TapeStep) -> tuple[list[int], list[int]]:
    """The axes of both operands that a tensordot sums over."""
    x, y = step.operands
    axes = step.attributes["axes"]
    if isinstance(axes, int):
        return list(range(x.ndim - axes, x.ndim)), list(range(axes))
    left, right = axes
    return [one % x.ndim for one in left], [one % y.ndim for one in right]


def _pull_tensordot(step: TapeStep, g: Any, number: int) -> Any:
    x, y = step.operands
    summed = _read_axes(step)
    free = [
        [dim for dim in range(one.ndim) if dim not in axes]
        for one, axes in zip((x, y), summed, strict=True)
    ]
    if number == 0:
        behind = list(range(len(free[0]), g.ndim))
        found = tensordot(g, y, axes=(behind, free[1]))
        # What is left of `y` is in its own order of dimensions.
        order = free[0] + [summed[0][summed[1].index(dim)] for dim in sorted(summed[1])]
    else:
        ahead = list(range(len(free[0])))
        found = tensordot(x, g, axes=(free[0], ahead))
        order = [summed[1][summed[0].index(dim)] for dim in sorted(summed[0])] + free[1]
    return permute_dims(found, [order.index(dim) for dim in range(len(order))])


def _spell_out(subscripts: str, shapes: Sequence[tuple[int, ...]]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, with those of ellipses."""
    text = re.sub(r"\s", "", subscripts)
    inputs = text.partition("->")[0].split(",")
    spare = [letter for letter in _LETTERS if letter not in text]
    lengths = [
        len(shape) - len(own.replace("...", "")) if "..." in own else 0
        for own, shape in zip(inputs, shapes, strict=True)
    ]
    ellipsis = "".join(spare[: max(lengths, default=0)])
    if "->" in text:
        result = text.partition("->")[2]
    else:
        every = "".join(inputs).replace(".", "")
        once = sorted(letter for letter in set(every) if every.count(letter) == 1)
        result = ("..." if "..." in text else "") + "".join(once)
    spelt = [
        own.replace("...", ellipsis[len(ellipsis) - length :])
        for own, length in zip(inputs, lengths, strict=True)
    ]
    return spelt, result.replace("...", ellipsis)


def _pull_einsum(step: TapeStep, g: Any, number: int) -> Any:
    inputs, result = _spell_out(step.attributes["subscripts"], [one.shape for one in step.operands])
    own, shape = inputs[number], step.operands[number].shape
    texts = [result] + [one for n, one in enumerate(inputs) if n != number]
    arrays = [g] + [one for n, one in enumerate(step.operands) if n != number]
    # Letters of this operand alone were summed over: its cotangent is the same along them.
    known = [letter for letter in own if any(letter in text for text in texts)]
    found = einsum(f"{','.join(texts)}->{''.join(known)}", *arrays)
    kept = [size if letter in known else 1 for letter, size in zip(own, shape, strict=True)]
    return broadcast_to(reshape(found, kept), shape)


PULLBACKS: dict[str, Pullback] = {
    "matmul": _pull_matmul,
    "vecdot": _pull_vecdot,
    "tensordot": _pull_tensordot,
    "einsum": _pull_einsum,
}
"""By operator."""

REFUSED: dict[str, str] = {
    "dot_general": OF_GRAPHS,
    "outer": "sp.linalg.outer is made of sp.multiply",
}
"""Operators without a derivative, with the reason."""
