"""Products that sum over factors: matrix products, dot products, einsum.

Each operand's cotangent is a product of the other operands with the result's cotangent. The
backward product sums over axes that the forward product does not sum over. If such an axis is
sharded, the gradient is partial: the gradient of a weight holds contributions of the ranks that
have parts of the batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from reshard.errors import SpecError, UsageError
from reshard.spmd import namespace
from reshard.spmd.core.backend import records_gradient
from reshard.spmd.core.local_work import Function, LocalWork
from reshard.spmd.core.operator import TapeStep, of_product, ship
from reshard.spmd.ops import elementwise
from reshard.spmd.ops.arguments import of_arrays
from reshard.spmd.ops.elementwise import make_function, operands
from reshard.spmd.ops.movement import (
    broadcast_to,
    expand_dims,
    matrix_transpose,
    moveaxis,
    permute_dims,
    reshape,
    summed_to,
)
from reshard.spmd.rules import rule_builder as rules
from reshard.spmd.rules.rule_builder import Inferred, Shape
from reshard.spmd.rules.templates import einsum_template
from reshard.spmd.shards.operation_call import call

# ---- vecdot


@of_arrays
def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """Sum products over an axis; the first operand is conjugated."""
    x1, x2 = operands(x1, x2)
    # Counted from the end, where operands are lined up.
    least = min(x1.ndim, x2.ndim)
    return call("vecdot", (x1, x2), {"axis": rules.axis_of(least, axis) - least})


register = partial(ship, family="products", linear="one", work=of_product)


def vecdot_rule(shapes: Sequence[Shape], axis: int = -1) -> Inferred:
    """Infer products summed over an axis; the other axes broadcast.

    >>> print(vecdot_rule([(4, 8), (8,)]).rule)
    ([i, j], [j]) -> ([i]) {i=4, j=8} reduction={j}
    """
    rules.counted("vecdot", shapes, 2)
    # Counted from the end, where operands are aligned; an axis that is counted from the start
    # refers to the operand with fewer dimensions.
    least = min(map(len, shapes))
    trailing = -1 - (rules.axis_of(least, axis) - least if axis >= 0 else axis)
    pattern = "... k *b, ... k *b -> ... *b"
    return rules.from_pattern(pattern, shapes, lengths={"b": trailing}, broadcast="b", reduced="k")


def _pull_vecdot(step: TapeStep, g: Any, number: int) -> Any:
    axis = step.attributes.get("axis", -1)
    if axis >= 0:
        # Counted from the end, where operands are lined up.
        axis -= min(operand.ndim for operand in step.operands)
    return expand_dims(g, axis=axis) * step.operands[1 - number]


register(
    "vecdot",
    vecdot_rule,
    ([(4, 8), (8,)], {}),
    note="the left operand is conjugated",
    pullback=_pull_vecdot,
)


# ---- tensordot


@of_arrays
def tensordot(x1: Any, x2: Any, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Any:
    """Sum products over pairs of axes."""
    is_pair = isinstance(axes, Sequence) and not isinstance(axes, str) and len(axes) == 2
    if not isinstance(axes, int) and not (is_pair and all(isinstance(n, Sequence) for n in axes)):
        raise SpecError(f"tensordot over axes {axes!r}; give how many, or a list of axes of each")
    pairs = axes if isinstance(axes, int) else (tuple(axes[0]), tuple(axes[1]))
    return call("tensordot", operands(x1, x2), {"axes": pairs})


def tensordot_rule(
    shapes: Sequence[Shape], axes: int | Sequence[int | Sequence[int]] = 2
) -> Inferred:
    """Infer products summed over pairs of axes; the result has the other axes, the left's first.

    >>> print(tensordot_rule([(4, 8, 2), (2, 8, 5)], axes=[[1, 2], [1, 0]]).rule)
    ([i, k, l], [l, k, j]) -> ([i, j]) {i=4, j=5, k=8, l=2} reduction={k, l}
    """
    rules.counted("tensordot", shapes, 2)
    summed = _find_summed(shapes, axes)
    if len(summed[0]) != len(summed[1]) or any(len(set(side)) != len(side) for side in summed):
        raise SpecError(f"axes {axes} of a tensordot; name the same number of each side, each once")
    return product_of_pairs(shapes, ((), ()), summed)


def product_of_pairs(
    shapes: Sequence[Shape], batching: Sequence[Sequence[int]], summed: Sequence[Sequence[int]]
) -> Inferred:
    """Infer products of two operands summed over pairs of axes.

    The result has the pairs of batch axes, then the other axes of the left, then of the right.
    """
    tensors = []
    for side, shape in enumerate(shapes):
        dims = [f"{'left' if side == 0 else 'right'} {dim}" for dim in range(len(shape))]
        for kind, axes in (("batch", batching[side]), ("summed", summed[side])):
            for number, axis in enumerate(axes):
                dims[axis] = f"{kind} {number}"
        tensors.append(dims)
    batch = [f"batch {number}" for number in range(len(batching[0]))]
    sums = [f"summed {number}" for number in range(len(summed[0]))]
    free = [dim for dims in tensors for dim in dims if dim not in (*batch, *sums)]
    return rules.from_dims(
        tensors, [[*batch, *free]], shapes, order=[*batch, *free, *sums], reduced=sums
    )


def _find_summed(
    shapes: Sequence[Shape], axes: int | Sequence[int | Sequence[int]]
) -> list[list[int]]:
    """Return the axes of both operands that a tensordot sums over, counted from the start."""
    left, right = map(len, shapes)
    sides: list[Sequence[int]] = []
    if isinstance(axes, int):
        if not 0 <= axes <= min(left, right):
            raise SpecError(
                f"tensordot over {axes} axes of {shapes[0]} and {shapes[1]}; they have fewer"
            )
        sides = [range(left - axes, left), range(axes)]
    else:
        sides = [[side] if isinstance(side, int) else list(side) for side in axes]
    return [
        [rules.axis_of(rank, axis) for axis in side]
        for rank, side in zip((left, right), sides, strict=True)
    ]


def _pull_tensordot(step: TapeStep, g: Any, number: int) -> Any:
    x, y = step.operands
    summed = _find_summed((x.shape, y.shape), step.attributes["axes"])
    free = [
        [dim for dim in range(array.ndim) if dim not in axes]
        for array, axes in zip((x, y), summed, strict=True)
    ]
    if number == 0:
        trailing = list(range(len(free[0]), g.ndim))
        cotangent = tensordot(g, y, axes=(trailing, free[1]))
        # The remaining dimensions of `y` keep their order.
        order = free[0] + [summed[0][summed[1].index(dim)] for dim in sorted(summed[1])]
    else:
        leading = list(range(len(free[0])))
        cotangent = tensordot(x, g, axes=(free[0], leading))
        order = [summed[1][summed[0].index(dim)] for dim in sorted(summed[0])] + free[1]
    return permute_dims(cotangent, [order.index(dim) for dim in range(len(order))])


register(
    "tensordot",
    tensordot_rule,
    ([(4, 8, 2), (2, 8, 5)], {"axes": [[1, 2], [1, 0]]}),
    pullback=_pull_tensordot,
)


@of_arrays
def outer(x1: Any, x2: Any, /) -> Any:
    """Compute the outer product of two vectors."""
    x1, x2 = operands(x1, x2)
    if x1.ndim != 1 or x2.ndim != 1:
        raise SpecError(f"outer of shapes {list(x1.shape)} and {list(x2.shape)}; give vectors")
    return elementwise.multiply(expand_dims(x1, axis=1), expand_dims(x2, axis=0))


# ---- einsum


def einsum(subscripts: str, /, *arrays: Any) -> Any:
    """Sum products over subscripts, as `numpy.einsum`.

    If an operand has a letter twice, its diagonal is taken first.

    >>> import reshard.spmd as sp
    >>> x = sp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> float(einsum("ii", x)), einsum("ij,jk->k", x, x).to_dense().tolist()
    (5.0, [22.0, 32.0])
    """
    if not isinstance(subscripts, str):
        raise UsageError(f"einsum of {subscripts!r}; give its text first, 'ij,jk->ik' say")
    converted = list(operands(*arrays))
    inputs, arrow, result = "".join(subscripts.split()).partition("->")
    terms = inputs.split(",")
    if len(terms) == len(converted) and any(map(_find_repeated, terms)):
        if not arrow:
            result = implied_result("".join(terms))
        pairs = map(_take_diagonals, terms, converted)
        terms, converted = (list(column) for column in zip(*pairs, strict=True))
        subscripts = f"{','.join(terms)}->{result}"
    return call("einsum", converted, {"subscripts": subscripts})


def _take_diagonals(letters: str, x: Any) -> tuple[str, Any]:
    """Take diagonals of an operand until no letter occurs twice in its subscripts."""
    while letter := _find_repeated(letters):
        before, dots, after = letters.partition("...")
        if len(before) + len(after) > x.ndim or not (dots or len(before) == x.ndim):
            # The subscripts do not fit the operand; the rule raises the error.
            return letters, x
        axes = [n for n, char in enumerate(before) if char == letter]
        axes += [x.ndim - len(after) + n for n, char in enumerate(after) if char == letter]
        first, second = axes[:2]
        if x.shape[first] != x.shape[second]:
            raise SpecError(
                f"einsum with {letter!r} twice in {letters!r}, for dimensions of {x.shape[first]} "
                f"and {x.shape[second]} elements; a letter has one length"
            )
        # The diagonal becomes the last dimension.
        x = namespace.find("linalg").diagonal(moveaxis(x, (first, second), (-2, -1)))
        letters = letters.replace(letter, "", 2) + letter
    return letters, x


def _find_repeated(letters: str) -> str:
    """Return the first letter that occurs twice in an operand's subscripts, or an empty string."""
    return next((x for x in letters if x != "." and letters.count(x) > 1), "")


def einsum_rule(shapes: Sequence[Shape], subscripts: str) -> Inferred:
    """Infer as `numpy.einsum`: `...` stands for leading dimensions, and `->` may be left out.

    >>> print(einsum_rule([(2, 4, 8), (2, 8, 5)], "...ik,...kj").rule)
    ([i, j, l], [i, l, k]) -> ([i, j, k]) {i=2, j=4, k=5, l=8} reduction={l}
    """
    inputs, result = _spell_out(subscripts, shapes)
    rule = einsum_template(f"{','.join(inputs)}->{result}").rule(*shapes)
    return Inferred(rule, rule.result_shapes)


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _spell_out(subscripts: str, shapes: Sequence[Shape]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result of an einsum, without ellipses."""
    text = re.sub(r"\s", "", subscripts)
    inputs = text.partition("->")[0].split(",")
    rules.counted(f"einsum {subscripts!r}", shapes, len(inputs))
    spare = [letter for letter in _LETTERS if letter not in text]
    lengths = [
        len(shape) - len(own.replace("...", "")) if "..." in own else 0
        for own, shape in zip(inputs, shapes, strict=True)
    ]
    # Ellipses are aligned at the end, as in broadcasting.
    ellipsis = "".join(spare[: max(0, *lengths)])
    result = text.partition("->")[2] if "->" in text else implied_result("".join(inputs))
    spelt = [
        own.replace("...", ellipsis[len(ellipsis) - max(length, 0) :])
        for own, length in zip(inputs, lengths, strict=True)
    ]
    return spelt, result.replace("...", ellipsis)


def implied_result(letters: str) -> str:
    """Return the implied subscripts of einsum's result, given the subscripts of all operands.

    >>> implied_result("...ik...kj")
    '...ij'
    """
    once = sorted(x for x in set(letters) - {"."} if letters.count(x) == 1)
    return "..." * ("..." in letters) + "".join(once)


def _einsum_kernel(work: LocalWork) -> Function:
    """Return the library's own einsum, which the array API does not have."""
    name, text = work.library.name, work.attributes["subscripts"]
    if name != "numpy":
        return torch_einsum(text)

    @lru_cache(maxsize=8)
    def find_path(shapes: tuple[tuple[int, ...], ...]) -> Any:
        # Without a path, NumPy loops over all letters at once, without BLAS. For few elements that
        # is faster than a path.
        if sum(map(math.prod, shapes)) < _FEW_ELEMENTS:
            return False
        # Only shapes matter for a path: broadcast arrays take no memory.
        arrays = (np.broadcast_to(0.0, shape) for shape in shapes)
        return np.einsum_path(text, *arrays, optimize="greedy")[0]

    def function(*arrays: Any) -> Any:
        return np.einsum(
            text, *arrays, optimize=find_path(tuple([array.shape for array in arrays]))
        )

    return function


def torch_einsum(text: str) -> Function:
    """Return PyTorch's einsum, which multiplies stacked matrices, as of experts, separately.

    PyTorch's einsum computes `btd,edf->btef` and `btef,efd->btd` as a single matrix product, for
    which it copies all weights if the two dimensions to be merged are not adjacent in memory.
    """
    torch = import_module("torch")
    spaceless = text.replace(" ", "")
    multiply: Callable[..., Any]
    if match := _TO_EACH.fullmatch(spaceless):
        rows, summed, stacked, matrix, free = match.groups()
        multiply, last = _multiply_with_each, free
    elif match := _OVER_ALL.fullmatch(spaceless):
        rows, stacked, summed, matrix, free = match.groups()
        multiply, last = _multiply_over_all, summed
    if match is None or not _is_product(rows, stacked, summed, free, matrix):
        return lambda *arrays: torch.einsum(text, *arrays)
    by_slices = partial(multiply, turned=matrix[0] != summed)
    second = matrix.index(last) + 1

    def function(x: Any, weights: Any) -> Any:
        # PyTorch's einsum is used under a gradient, because it records a single step; for small
        # matrices, because copying is faster; and if the weights need no copy.
        if (
            type(x) is torch.Tensor
            and type(weights) is torch.Tensor
            and x.device.type == "cpu"
            and x.dtype == weights.dtype
            and x.dtype in (torch.float32, torch.float64)
            and math.prod(weights.shape[1:]) >= _MATRIX_ELEMENTS
            and weights.shape[0] > 1
            and weights.stride(0) != weights.stride(second) * weights.shape[second]
            and not records_gradient(x)
            and not records_gradient(weights)
        ):
            return by_slices(x, weights)
        return torch.einsum(text, x, weights)

    return function


def _multiply_with_each(x: Any, weights: Any, turned: bool) -> Any:
    """Multiply `[..., k]` by each of `[e, k, n]`, or of `[e, n, k]` transposed: `[..., e, n]`."""
    torch = import_module("torch")
    matrices = weights.transpose(1, 2) if turned else weights
    products = x.new_empty((*x.shape[:-1], matrices.shape[0], matrices.shape[2]))
    rows, places = x.reshape(-1, x.shape[-1]), products.view(-1, *products.shape[-2:])
    for number, matrix in enumerate(matrices.unbind()):
        # Written in place: products that are stacked afterwards would be copied.
        torch.mm(rows, matrix, out=places[:, number])
    return products


_TO_EACH = re.compile(r"(\w+)(\w),(\w)(\w\w)->\1\3(\w)")


def _multiply_over_all(x: Any, weights: Any, turned: bool) -> Any:
    """Sum the products of `[..., e, k]` and `[e, k, n]`, or `[e, n, k]` transposed: `[..., n]`."""
    matrices = weights.transpose(1, 2) if turned else weights
    rows = x.reshape(-1, *x.shape[-2:])
    total = rows[:, 0] @ matrices[0]
    for number in range(1, matrices.shape[0]):
        total.addmm_(rows[:, number], matrices[number])
    return total.view(*x.shape[:-2], total.shape[-1])


def _is_product(rows: str, stacked: str, summed: str, free: str, matrix: str) -> bool:
    """Return whether all letters differ, and the matrix has just the summed and the free letter."""
    letters = f"{rows}{stacked}{summed}{free}"
    return len(set(letters)) == len(letters) and sorted(matrix) == sorted(summed + free)


_MATRIX_ELEMENTS = 16_384
"""The size of a matrix from which on a product takes far longer than the call overhead."""

_OVER_ALL = re.compile(r"(\w+)(\w)(\w),\2(\w\w)->\1(\w)")
_FEW_ELEMENTS = 256


def _pull_einsum(step: TapeStep, g: Any, number: int) -> Any:
    inputs, result = _spell_out(
        step.attributes["subscripts"], [operand.shape for operand in step.operands]
    )
    letters, shape = inputs[number], step.operands[number].shape
    texts = [result] + [text for n, text in enumerate(inputs) if n != number]
    arrays = [g] + [operand for n, operand in enumerate(step.operands) if n != number]
    # Letters that only this operand has were summed over: its cotangent is constant along them.
    shared = [letter for letter in letters if any(letter in text for text in texts)]
    cotangent = einsum(f"{','.join(texts)}->{''.join(shared)}", *arrays)
    sizes = [size if letter in shared else 1 for letter, size in zip(letters, shape, strict=True)]
    return broadcast_to(reshape(cotangent, sizes), shape)


register(
    "einsum",
    einsum_rule,
    ([(2, 4, 8), (2, 5, 8)], {"subscripts": "bik,bjk->bij"}),
    local=_einsum_kernel,
    note="letters not in the result are summed; `sp.einsum` takes diagonals where a letter is "
    "twice in an operand",
    pullback=_pull_einsum,
)


# ---- matmul


def matmul_rule(shapes: Sequence[Shape]) -> Inferred:
    """Infer `[..., i, k] @ [..., k, j] -> [..., i, j]`; a vector lacks `i`, or `j`.

    >>> print(matmul_rule([(2, 4, 8), (8, 16)]).rule)
    ([i, j, l], [l, k]) -> ([i, j, k]) {i=2, j=4, k=16, l=8} reduction={l}
    """
    rules.counted("matmul", shapes, 2)
    left, right = shapes
    if not left or not right:
        raise SpecError(f"matmul of {left} and {right}; a scalar is multiplied by multiply")
    rows, columns = "i" * (len(left) > 1), "j" * (len(right) > 1)
    pattern = f"... {rows} k, ... k {columns} -> ... {rows} {columns}"
    return rules.from_pattern(pattern, shapes, reduced="k")


def _pull_matmul(step: TapeStep, g: Any, number: int) -> Any:
    x, y = step.operands
    # 1. Treat vectors as matrices with a single row or column.
    if x.ndim == 1:
        x, g = expand_dims(x, axis=0), expand_dims(g, axis=-1 if y.ndim == 1 else -2)
    if y.ndim == 1:
        y, g = expand_dims(y, axis=1), expand_dims(g, axis=-1)
    # 2. A single matrix for a whole batch: the product itself sums its cotangent over the batch.
    shape = step.operands[number].shape
    if number == 1 and y.ndim == 2:
        rows = list(range(x.ndim - 1))
        return reshape(tensordot(x, g, axes=(rows, rows)), shape)
    if number == 0 and x.ndim == 2 and y.ndim > 2:
        batch = list(range(y.ndim - 2))
        last = y.ndim - 1
        return reshape(tensordot(g, y, axes=([*batch, last], [*batch, last])), shape)
    # 3. Multiply matrix by matrix; cotangents of a broadcast operand are summed.
    if number == 0:
        return reshape(summed_to(matmul(g, matrix_transpose(y)), x.shape), shape)
    return reshape(summed_to(matmul(matrix_transpose(x), g), y.shape), shape)


matmul = make_function(
    register(
        "matmul",
        matmul_rule,
        ([(2, 4, 8), (8, 16)], {}),
        doc="The matrix product.",
        pullback=_pull_matmul,
    )
)
