"""Linear algebra: the array API's `linalg` extension, and its functions in the main namespace.

Leading dimensions of stacks of matrices stay sharded; factorizations need each matrix replicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import SpecError, UsageError
from reshard.spmd.core.result_types import kind_of
from reshard.spmd.functions import data_types, elementwise, statistics
from reshard.spmd.functions.array_arguments import as_whole, of_arrays
from reshard.spmd.functions.elementwise import matmul, operands, whole
from reshard.spmd.functions.filling import tril, triu
from reshard.spmd.functions.manipulation import (
    broadcast_to,
    expand_dims,
    matrix_transpose,
    reshape,
    roll,
)
from reshard.spmd.functions.wide_types import in_wide_types
from reshard.spmd.rules.shapes import axis_of
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call

__all__ = [
    "cholesky",
    "cross",
    "det",
    "diagonal",
    "eigh",
    "eigvalsh",
    "inv",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "outer",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
    "tensordot",
    "trace",
    "triangular_solve",
    "vecdot",
    "vector_norm",
]


class EighResult(NamedTuple):
    """The result of `eigh`."""

    eigenvalues: Any
    eigenvectors: Any


class QRResult(NamedTuple):
    """The result of `qr`."""

    Q: Any
    R: Any


class SlogdetResult(NamedTuple):
    """The result of `slogdet`."""

    sign: Any
    logabsdet: Any


class SVDResult(NamedTuple):
    """The result of `svd`."""

    U: Any
    S: Any
    Vh: Any


def _check_matrices(x: Any, name: str, is_square: bool = True) -> Any:
    if x.ndim < 2 or (is_square and x.shape[-1] != x.shape[-2]):
        kind = "square matrices" if is_square else "matrices"
        raise SpecError(f"{name} of shape {list(x.shape)}; {kind} were expected")
    return x


@of_arrays
def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """Sum of products over an axis; the first operand is conjugated."""
    x1, x2 = operands(x1, x2)
    # Counted from the end, where operands are lined up.
    least = min(x1.ndim, x2.ndim)
    return call("vecdot", (x1, x2), {"axis": axis_of(least, axis) - least})


@of_arrays
def tensordot(x1: Any, x2: Any, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Any:
    """Sum of products over pairs of axes."""
    is_pair = isinstance(axes, Sequence) and not isinstance(axes, str) and len(axes) == 2
    if not isinstance(axes, int) and not (is_pair and all(isinstance(n, Sequence) for n in axes)):
        raise SpecError(f"tensordot over axes {axes!r}; give how many, or a list of axes of each")
    pairs = axes if isinstance(axes, int) else (tuple(axes[0]), tuple(axes[1]))
    return call("tensordot", operands(x1, x2), {"axes": pairs})


@of_arrays
def outer(x1: Any, x2: Any, /) -> Any:
    """The outer product of two vectors."""
    x1, x2 = operands(x1, x2)
    if x1.ndim != 1 or x2.ndim != 1:
        raise SpecError(f"outer of shapes {list(x1.shape)} and {list(x2.shape)}; give vectors")
    return elementwise.multiply(expand_dims(x1, axis=1), expand_dims(x2, axis=0))


@of_arrays
def cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """The cross product of vectors of three elements."""
    x1, x2 = operands(x1, x2)
    for one in (x1, x2):
        axis_of(one.ndim, axis)
    if x1.shape[axis] != 3 or x2.shape[axis] != 3:
        raise SpecError(f"cross of shapes {list(x1.shape)}, {list(x2.shape)}: axis {axis} is not 3")
    # a x b = (a1 b2 - a2 b1, ...): the next component of one by the one after next of the other.
    one = elementwise.multiply(roll(x1, -1, axis=axis), roll(x2, -2, axis=axis))
    other = elementwise.multiply(roll(x1, -2, axis=axis), roll(x2, -1, axis=axis))
    return elementwise.subtract(one, other)


@of_arrays
def diagonal(x: Any, /, *, offset: int = 0) -> Any:
    """The diagonal of matrices."""
    place = as_whole(offset)
    if place is None:
        raise UsageError(f"the diagonal at {offset!r}; a whole number was expected")
    return call("diagonal", (_check_matrices(x, "diagonal", False),), {"offset": place})


@of_arrays
def trace(x: Any, /, *, offset: int = 0, dtype: object = None) -> Any:
    """The sum of the diagonal of matrices."""
    return statistics.sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


@of_arrays
def cholesky(x: Any, /, *, upper: bool = False) -> Any:
    """The Cholesky factor of positive definite matrices."""
    found = call("cholesky", (_check_matrices(x, "cholesky"),))
    return elementwise.conj(matrix_transpose(found)) if upper else found


@of_arrays
def det(x: Any, /) -> Any:
    """The determinant of square matrices."""
    return call("det", (_check_matrices(x, "det"),))


@of_arrays
def eigh(x: Any, /) -> EighResult:
    """Eigenvalues in ascending order, and eigenvectors, of Hermitian matrices."""
    return EighResult(*call("eigh", (_check_matrices(x, "eigh"),)))


@of_arrays
def eigvalsh(x: Any, /) -> Any:
    """Eigenvalues in ascending order of Hermitian matrices."""
    return call("eigvalsh", (_check_matrices(x, "eigvalsh"),))


@of_arrays
def inv(x: Any, /) -> Any:
    """The inverse of square matrices."""
    return call("inv", (_check_matrices(x, "inv"),))


@of_arrays
def pinv(x: Any, /, *, rtol: float | None = None) -> Any:
    """The pseudo-inverse; singular values smaller than `rtol` times the largest count as 0.

    Computed by `svd`.
    """
    u, s, vh = svd(_check_matrices(x, "pinv", False), full_matrices=False)
    cutoff = _find_cutoff(x, s, rtol)
    # Small values are replaced before the division, which would warn of 0.
    kept = elementwise.greater(s, cutoff)
    inverse = elementwise.where(kept, elementwise.divide(1.0, elementwise.where(kept, s, 1.0)), 0.0)
    v = elementwise.conj(matrix_transpose(vh))
    scaled = elementwise.multiply(v, expand_dims(inverse, axis=-2))
    return matmul(scaled, elementwise.conj(matrix_transpose(u)))


def _find_cutoff(x: Any, s: Any, rtol: Any) -> Any:
    if rtol is None:
        # The default of numpy.linalg.matrix_rank: rounding errors grow with the size.
        rtol = max(x.shape[-2:]) * float(data_types.finfo(x.dtype).eps)
    largest = statistics.max(s, axis=-1, keepdims=True) if s.shape[-1] else s
    relative = operands(x, rtol)[1]
    is_known = isinstance(relative, ArrayValue | int | float)
    if not is_known:
        raise UsageError(f"rtol {rtol!r}; a number, or an array of them, was expected")
    if not isinstance(relative, int | float) and relative.ndim:
        # One tolerance a matrix, beside the singular values of each.
        relative = expand_dims(relative, axis=-1)
    return elementwise.multiply(largest, relative)


@of_arrays
def qr(x: Any, /, *, mode: str = "reduced") -> QRResult:
    """The QR decomposition."""
    if mode not in ("reduced", "complete"):
        raise UsageError(f"mode {mode!r} of qr; it is 'reduced' or 'complete'")
    return QRResult(*call("qr", (_check_matrices(x, "qr", False),), {"mode": mode}))


@of_arrays
def slogdet(x: Any, /) -> SlogdetResult:
    """The sign and the logarithm of the absolute value of the determinant."""
    return SlogdetResult(*call("slogdet", (_check_matrices(x, "slogdet"),)))


@of_arrays
def solve(x1: Any, x2: Any, /) -> Any:
    """Solve linear systems: `x1 @ result == x2`."""
    x1, x2 = operands(x1, x2)
    return call("solve", (_check_matrices(x1, "solve"), x2))


@of_arrays
def triangular_solve(x1: Any, x2: Any, /, *, lower: bool = True) -> Any:
    """Solve linear systems with a triangular part of `x1`."""
    return solve(tril(x1) if lower else triu(x1), x2)


@of_arrays
def svd(x: Any, /, *, full_matrices: bool = True) -> SVDResult:
    """The singular value decomposition."""
    found = call("svd", (_check_matrices(x, "svd", False),), {"full_matrices": bool(full_matrices)})
    return SVDResult(*found)


@of_arrays
def svdvals(x: Any, /) -> Any:
    """Singular values in descending order."""
    return call("svdvals", (_check_matrices(x, "svdvals", False),))


@of_arrays
def matrix_rank(x: Any, /, *, rtol: Any = None) -> Any:
    """The number of singular values larger than `rtol` times the largest."""
    s = svdvals(x)
    return statistics.count_nonzero(elementwise.greater(s, _find_cutoff(x, s, rtol)), axis=-1)


@of_arrays
def matrix_power(x: Any, n: int, /) -> Any:
    """Powers of square matrices; of the inverse if `n` is negative."""
    _check_matrices(x, "matrix_power")
    if not hasattr(n, "__index__"):
        raise UsageError(f"matrix_power to the power {n!r}; give a whole number")
    if n < 0:
        return matrix_power(inv(x), -n)
    if n == 0:
        return broadcast_to(whole(x, np.eye(x.shape[-1], dtype=x.dtype.numpy)), x.shape)
    found = x
    # Squares, from the second binary digit on; a digit of 1 multiplies once more.
    for digit in bin(n)[3:]:
        found = matmul(found, found)
        if digit == "1":
            found = matmul(found, x)
    return found


@of_arrays
@in_wide_types
def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    """The norm of matrices: Frobenius ('fro'), of sums (1, inf), of singular values (2, 'nuc')."""
    _check_matrices(x, "matrix_norm", False)
    if ord == "fro":
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in (1, -1, math.inf, -math.inf):
        # Order inf is the largest sum of a row, order 1 that of a column.
        rows_last = ord in (math.inf, -math.inf)
        sums = statistics.sum(elementwise.abs(x), axis=-1 if rows_last else -2, keepdims=True)
        choose = statistics.max if ord > 0 else statistics.min
        found = choose(sums, axis=(-2, -1), keepdims=keepdims)
    elif ord in (2, -2, "nuc"):
        s = svdvals(x)
        choose = {2: statistics.max, -2: statistics.min, "nuc": statistics.sum}[ord]
        found = choose(s, axis=-1)
        if keepdims:
            found = reshape(found, (*found.shape, 1, 1))
    else:
        raise UsageError(f"matrix_norm of order {ord!r}; it is 'fro', 'nuc', 1, 2, inf or -these")
    return found


@of_arrays
@in_wide_types
def vector_norm(
    x: Any, /, *, axis: int | Sequence[int] | None = None, keepdims: bool = False, ord: Any = 2
) -> Any:
    """The norm of vectors; by default the Euclidean norm."""
    size = elementwise.abs(x)
    if not isinstance(ord, int | float):
        raise UsageError(f"vector_norm of order {ord!r}; a number was expected")
    if kind_of(size.dtype) != "real floating":
        raise UsageError(f"vector_norm of {x.dtype}; floating numbers were expected")
    if ord == math.inf:
        return statistics.max(size, axis=axis, keepdims=keepdims)
    if ord == -math.inf:
        return statistics.min(size, axis=axis, keepdims=keepdims)
    if ord == 0:
        counts = statistics.count_nonzero(size, axis=axis, keepdims=keepdims)
        return data_types.astype(counts, size.dtype)
    if ord == 1:
        return statistics.sum(size, axis=axis, keepdims=keepdims)
    if ord == 2:
        total = statistics.sum(elementwise.square(size), axis=axis, keepdims=keepdims)
        return elementwise.sqrt(total)
    powers = statistics.sum(elementwise.pow(size, float(ord)), axis=axis, keepdims=keepdims)
    return elementwise.pow(powers, 1.0 / ord)
