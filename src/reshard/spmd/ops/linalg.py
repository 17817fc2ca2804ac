"""Linear algebra: the array API's `linalg` extension, and its functions in the main namespace.

Leading dimensions of stacks of matrices stay sharded; factorizations need each matrix replicated.
Derivatives are of stacks of real matrices. Sources: Giles, "Collected matrix derivative results for
forward and reverse mode algorithmic differentiation", 2008; Murray, "Differentiation of the
Cholesky decomposition", 2016; Walter and Lehmann, "Algorithmic differentiation of linear algebra
functions", 2010 (QR); Townsend, "Differentiating the singular value decomposition", 2016.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import SpecError, UsageError
from reshard.spmd.core.local_work import Function, LocalWork, find_function, own_attributes
from reshard.spmd.core.operator import (
    Attributes,
    Example,
    Infer,
    Operator,
    Sizes,
    TapeStep,
    Work,
    dimension_sizes,
    ship,
)
from reshard.spmd.core.result_types import kind_of, of_first
from reshard.spmd.ops import data_types, elementwise, movement, reductions
from reshard.spmd.ops.arguments import as_whole, of_arrays
from reshard.spmd.ops.data_types import in_wide_types
from reshard.spmd.ops.elementwise import operands, where, whole
from reshard.spmd.ops.filling import tril, triu
from reshard.spmd.ops.movement import matrix_transpose
from reshard.spmd.ops.products import matmul, outer, tensordot, vecdot
from reshard.spmd.rules import rule_builder as rules
from reshard.spmd.rules.rule_builder import Inferred, Shape, kept
from reshard.spmd.rules.sharding_rule import OpShardingRule
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


@of_arrays
def cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """Compute the cross product of vectors of three elements."""
    x1, x2 = operands(x1, x2)
    for array in (x1, x2):
        # Checked before `shape[axis]`, whose IndexError names no operator.
        rules.axis_of(array.ndim, axis)
    if x1.shape[axis] != 3 or x2.shape[axis] != 3:
        raise SpecError(f"cross of shapes {list(x1.shape)}, {list(x2.shape)}: axis {axis} is not 3")
    # a x b = (a1 b2 - a2 b1, ...): component i is a[i + 1] b[i + 2] - a[i + 2] b[i + 1].
    left = elementwise.multiply(movement.roll(x1, -1, axis=axis), movement.roll(x2, -2, axis=axis))
    other = elementwise.multiply(movement.roll(x1, -2, axis=axis), movement.roll(x2, -1, axis=axis))
    return elementwise.subtract(left, other)


# ---- diagonal


@of_arrays
def diagonal(x: Any, /, *, offset: int = 0) -> Any:
    """Return the diagonal of matrices."""
    place = as_whole(offset)
    if place is None:
        raise UsageError(f"the diagonal at {offset!r}; a whole number was expected")
    return call("diagonal", (_check_matrices(x, "diagonal", False),), {"offset": place})


def _check_matrices(x: Any, name: str, is_square: bool = True) -> Any:
    if x.ndim < 2 or (is_square and x.shape[-1] != x.shape[-2]):
        kind = "square matrices" if is_square else "matrices"
        raise SpecError(f"{name} of shape {list(x.shape)}; {kind} were expected")
    return x


_MATRIX = "the matrices are whole on each device"


register = partial(ship, family="linear algebra", note=_MATRIX)


def diagonal_rule(shapes: Sequence[Shape], offset: int = 0) -> Inferred:
    """Infer the diagonals of the last two dimensions."""

    def trailing(rows: int, columns: int) -> tuple[Shape, ...]:
        return ((max(min(rows + min(offset, 0), columns - max(offset, 0)), 0),),)

    return matrix_rule(trailing)(shapes)


def matrix_rule(trailing: Trailing, *, square: bool = False) -> Infer:
    """Infer an operator on the last two dimensions, repeated over the others.

    >>> print(matrix_rule(lambda m, n: ((min(m, n),),))([(2, 4, 8)]).rule)
    ([i, j, k]) -> ([i, l]) {i=2, j=4, k=8, l=4} need_replication={j, k, l}
    """

    def infer(shapes: Sequence[Shape], **attributes: Any) -> Inferred:
        shape = rules.one_operand("an operator on matrices", shapes)
        if len(shape) < 2 or (square and shape[-1] != shape[-2]):
            raise SpecError(
                f"shape {shape}; {'square ' * square}matrices [..., m, n] were expected"
            )
        *lead, rows, columns = range(len(shape))
        tails = trailing(*shape[-2:], **attributes)
        # The operand's rows and columns and the trailing dimensions of results share no factors.
        tail_dims = [[f"{n} {dim}" for dim in range(len(tail))] for n, tail in enumerate(tails)]
        whole = [rows, columns, *itertools.chain(*tail_dims)]
        results = [shape[:-2] + tail for tail in tails]
        outputs = [[*lead, *dims] for dims in tail_dims]
        return rules.from_dims(
            [range(len(shape))], outputs, shapes, results, order=range(len(shape)), whole=whole
        )

    return infer


Trailing = Callable[..., tuple[Shape, ...]]
"""From rows, columns and attributes to the trailing dimensions of each result."""

_STACK: Example = ([(2, 4, 8)], {})


def _diagonal_kernel(work: LocalWork) -> Function:
    """Return a kernel for the diagonals of matrices."""
    return partial(work.library.namespace.linalg.diagonal, offset=work.attributes["offset"])


def _pull_diagonal(step: TapeStep, g: Any, number: int) -> Any:
    rows, columns = step.operands[0].shape[-2:]
    return _spread_diagonal(g, rows, columns, step.attributes["offset"])


def _spread_diagonal(x: Any, rows: int, columns: int, offset: int = 0) -> Any:
    """Return matrices with these diagonals, and zeros elsewhere."""
    first = max(-offset, 0)
    line = movement.pad(x, [(0, 0)] * (x.ndim - 1) + [(first, rows - first - x.shape[-1])])
    at = np.eye(rows, columns, k=offset, dtype=bool)
    return where(whole(x, at), movement.expand_dims(line, axis=-1), 0.0)


register(
    "diagonal",
    diagonal_rule,
    _STACK,
    linear="each",
    local=_diagonal_kernel,
    reads_part=True,
    result_types=of_first,
    pullback=_pull_diagonal,
)


@of_arrays
def trace(x: Any, /, *, offset: int = 0, dtype: object = None) -> Any:
    """Compute the sum of the diagonal of matrices."""
    return reductions.sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


# ---- cholesky


@of_arrays
def cholesky(x: Any, /, *, upper: bool = False) -> Any:
    """Compute the Cholesky factor of positive definite matrices."""
    factor = call("cholesky", (_check_matrices(x, "cholesky"),))
    return elementwise.conj(matrix_transpose(factor)) if upper else factor


def register_factorisation(
    name: str,
    infer: Infer,
    example: Example,
    leading_term: Callable[[int, int], float],
    **options: Any,
) -> Operator:
    """Register an operator whose work is a leading term for matrices `[m, n]`."""
    return register(name, infer, example, work=of_matrices(leading_term), **options)


def of_matrices(leading_term: Callable[[int, int], float]) -> Work:
    """Return the work function of a factorization: a leading term per matrix `[m, n]` of a stack.

    Leading terms are from Golub and Van Loan, "Matrix Computations", 4th edition, chapters 3, 4, 5,
    7 and 8.
    """

    def work(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
        *lead, rows, columns = dimension_sizes(rule.operands[0], sizes)
        return math.prod(lead) * float(leading_term(rows, columns))

    return work


def same_matrix(shapes: Sequence[Shape], **_: Any) -> Inferred:
    """Infer matrices of the shape of square matrices.

    >>> print(same_matrix([(2, 4, 4)]).rule)
    ([i, j, k]) -> ([i, j, k]) {i=2, j=4, k=4} need_replication={j, k}
    """
    shape = rules.one_operand("an operator on matrices", shapes)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise SpecError(f"shape {shape}; square matrices [..., m, m] were expected")
    return kept(shape, whole=(len(shape) - 2, len(shape) - 1))


_SQUARES: Example = ([(2, 4, 4)], {})


def in_linalg(work: LocalWork) -> Function:
    """Return the function of the operator's name in the library's `linalg`."""
    function = find_function(work, work.library.namespace.linalg, work.name)
    return partial(function, **own_attributes(work)) if work.attributes else function


_SINGULAR: dict[str, Any] = {"local": in_linalg, "fails": "any"}
"""Options of operators that call LAPACK, which can fail: singular matrices, no convergence."""


def _pull_cholesky(step: TapeStep, g: Any, number: int) -> Any:
    root = step.result
    inner = _halve_diagonal(matmul(_t(root), g))
    back = solve(_t(root), inner)
    # L^-T inner L^-1: a solve from the left, then a solve from the right.
    cotangent = _t(solve(_t(root), _t(back)))
    return (cotangent + _t(cotangent)) * 0.5


def _halve_diagonal(x: Any) -> Any:
    """Return the lower triangle, with half of the diagonal."""
    size = x.shape[-1]
    return tril(x) * whole(x, np.where(np.eye(size, dtype=bool), 0.5, 1.0).astype(x.dtype.numpy))


def _t(x: Any) -> Any:
    return matrix_transpose(x)


register_factorisation(
    "cholesky", same_matrix, _SQUARES, lambda m, n: n**3 / 3, **_SINGULAR, pullback=_pull_cholesky
)


# ---- det


@of_arrays
def det(x: Any, /) -> Any:
    """Compute the determinant of square matrices."""
    return call("det", (_check_matrices(x, "det"),))


def _numbers(g: Any) -> Any:
    """Return a number for each matrix, as matrices of a single element."""
    return movement.expand_dims(movement.expand_dims(g, axis=-1), axis=-1)


register_factorisation(
    "det",
    matrix_rule(lambda m, n: ((),), square=True),
    _SQUARES,
    lambda m, n: 2 * n**3 / 3,
    **_SINGULAR,
    pullback=lambda step, g, number: _numbers(g * step.result) * _t(inv(step.operands[0])),
)


# ---- eigh


@of_arrays
def eigh(x: Any, /) -> EighResult:
    """Compute eigenvalues in ascending order, and eigenvectors, of Hermitian matrices."""
    return EighResult(*call("eigh", (_check_matrices(x, "eigh"),)))


def _pull_eigh(step: TapeStep, g: Any, number: int) -> Any:
    values, vectors = step.results
    of_values, of_vectors = g
    size = values.shape[-1]
    inner = _invert_differences(values) * matmul(_t(vectors), of_vectors)
    inner = inner + _spread_diagonal(of_values, size, size)
    cotangent = matmul(matmul(vectors, inner), _t(vectors))
    # The factorization reads only one triangle, so the cotangent is symmetrized.
    return (cotangent + _t(cotangent)) * 0.5


def _invert_differences(values: Any) -> Any:
    """Return `1 / (v[j] - v[i])` for each pair, and 0 on the diagonal."""
    apart = movement.expand_dims(values, axis=-2) - movement.expand_dims(values, axis=-1)
    same = whole(values, np.eye(values.shape[-1], dtype=bool))
    # The inner `where` keeps the diagonal from dividing by 0, which would warn.
    return where(same, 0.0, 1.0 / where(same, 1.0, apart))


register_factorisation(
    "eigh",
    matrix_rule(lambda m, n: ((m,), (m, m)), square=True),
    _SQUARES,
    lambda m, n: 9 * n**3,
    **_SINGULAR,
    pullback=_pull_eigh,
)


# ---- eigvalsh


@of_arrays
def eigvalsh(x: Any, /) -> Any:
    """Compute eigenvalues in ascending order of Hermitian matrices."""
    return call("eigvalsh", (_check_matrices(x, "eigvalsh"),))


def _pull_eigenvalues(step: TapeStep, g: Any, number: int) -> Any:
    vectors = eigh(step.operands[0]).eigenvectors
    return matmul(vectors * movement.expand_dims(g, axis=-2), _t(vectors))


register_factorisation(
    "eigvalsh",
    matrix_rule(lambda m, n: ((m,),), square=True),
    _SQUARES,
    lambda m, n: 4 * n**3 / 3,
    **_SINGULAR,
    pullback=_pull_eigenvalues,
)


# ---- inv


@of_arrays
def inv(x: Any, /) -> Any:
    """Compute the inverse of square matrices."""
    return call("inv", (_check_matrices(x, "inv"),))


def _pull_inverse(step: TapeStep, g: Any, number: int) -> Any:
    back = _t(step.result)
    return -matmul(matmul(back, g), back)


register_factorisation(
    "inv", same_matrix, _SQUARES, lambda m, n: 2 * n**3, **_SINGULAR, pullback=_pull_inverse
)


@of_arrays
def pinv(x: Any, /, *, rtol: float | None = None) -> Any:
    """Compute the pseudo-inverse; singular values below `rtol` times the largest count as 0.

    Computed by `svd`.
    """
    u, s, vh = svd(_check_matrices(x, "pinv", False), full_matrices=False)
    cutoff = _find_cutoff(x, s, rtol)
    # Small values are replaced before the division, which would warn of 0.
    is_large = elementwise.greater(s, cutoff)
    inverse = elementwise.where(
        is_large, elementwise.divide(1.0, elementwise.where(is_large, s, 1.0)), 0.0
    )
    v = elementwise.conj(matrix_transpose(vh))
    scaled = elementwise.multiply(v, movement.expand_dims(inverse, axis=-2))
    return matmul(scaled, elementwise.conj(matrix_transpose(u)))


def _find_cutoff(x: Any, s: Any, rtol: Any) -> Any:
    if rtol is None:
        # The default of numpy.linalg.matrix_rank: rounding errors grow with the size.
        rtol = max(x.shape[-2:]) * float(data_types.finfo(x.dtype).eps)
    # An empty matrix has no largest singular value.
    largest = reductions.max(s, axis=-1, keepdims=True) if s.shape[-1] else s
    relative = operands(x, rtol)[1]
    is_known = isinstance(relative, ArrayValue | int | float)
    if not is_known:
        raise UsageError(f"rtol {rtol!r}; a number, or an array of them, was expected")
    if not isinstance(relative, int | float) and relative.ndim:
        # A tolerance per matrix, which broadcasts against its singular values.
        relative = movement.expand_dims(relative, axis=-1)
    return elementwise.multiply(largest, relative)


# ---- qr


@of_arrays
def qr(x: Any, /, *, mode: str = "reduced") -> QRResult:
    """Compute the QR decomposition."""
    if mode not in ("reduced", "complete"):
        raise UsageError(f"mode {mode!r} of qr; it is 'reduced' or 'complete'")
    return QRResult(*call("qr", (_check_matrices(x, "qr", False),), {"mode": mode}))


def _qr_shapes(rows: int, columns: int, mode: str = "reduced") -> tuple[Shape, ...]:
    inner = rows if mode == "complete" else min(rows, columns)
    return (rows, inner), (inner, columns)


def _pull_qr(step: TapeStep, g: Any, number: int) -> Any:
    q, r = step.results
    of_q, of_r = g
    rows, columns = step.operands[0].shape[-2:]
    # The additional columns of Q are any basis of the rest.
    if (step.attributes.get("mode", "reduced") != "reduced" and rows != columns) or rows < columns:
        raise UsageError(
            f"the gradient of qr of {step.operands[0].type} in mode "
            f"{step.attributes.get('mode', 'reduced')!r}: Q is not determined by small changes; "
            "use mode 'reduced' with at least as many rows as columns"
        )
    m = matmul(r, _t(of_r)) - matmul(_t(of_q), q)
    # The lower triangle, mirrored.
    mirrored = tril(m) + _t(tril(m, k=-1))
    inner = of_q + matmul(q, mirrored)
    return _t(solve(r, _t(inner)))


register_factorisation(
    "qr",
    matrix_rule(_qr_shapes),
    _STACK,
    lambda m, n: 4 * (m * n * min(m, n) - min(m, n) ** 3 / 3),
    **_SINGULAR,
    pullback=_pull_qr,
)


# ---- slogdet


@of_arrays
def slogdet(x: Any, /) -> SlogdetResult:
    """Compute the sign and the logarithm of the absolute value of the determinant."""
    return SlogdetResult(*call("slogdet", (_check_matrices(x, "slogdet"),)))


register_factorisation(
    "slogdet",
    matrix_rule(lambda m, n: ((), ()), square=True),
    _SQUARES,
    lambda m, n: 2 * n**3 / 3,
    **_SINGULAR,
    pullback=lambda step, g, number: _numbers(g[1]) * _t(inv(step.operands[0])),
)


# ---- solve


@of_arrays
def solve(x1: Any, x2: Any, /) -> Any:
    """Solve linear systems: `x1 @ result == x2`."""
    x1, x2 = operands(x1, x2)
    return call("solve", (_check_matrices(x1, "solve"), x2))


def solve_rule(shapes: Sequence[Shape], **_: Any) -> Inferred:
    """Infer the solution of `[..., m, m] x = [..., m, n]`, whose columns are independent.

    >>> print(solve_rule([(2, 4, 4), (2, 4, 3)]).rule)
    ([i, j, l], [i, j, k]) -> ([i, l, k]) {i=2, j=4, k=3, l=4} need_replication={j, l}
    """
    rules.counted("solve", shapes, 2)
    left, right = shapes
    vector = len(right) == 1
    # The dimension of the unknowns, which has the size of the matrices.
    inner = right[-1:] if vector else right[-2:-1]
    if len(left) < 2 or left[-1:] != left[-2:-1] or inner != left[-1:]:
        raise SpecError(f"solve of {left} and {right}; [..., m, m] and [..., m, n] were expected")
    pattern = "... j l, j -> ... l" if vector else "... j l, ... j k -> ... l k"
    return rules.from_pattern(pattern, shapes, order=".jk", whole="jl")


def _pull_solve(step: TapeStep, g: Any, number: int) -> Any:
    a, b = step.operands
    x = step.result
    of_right = solve(_t(a), g)
    if number == 1:
        return of_right
    if b.ndim == 1:
        of_right, x = movement.expand_dims(of_right, axis=-1), movement.expand_dims(x, axis=-1)
    return movement.summed_to(-matmul(of_right, _t(x)), a.shape)


def of_systems(leading_term: Callable[[int, int], float]) -> Work:
    """Return a solver's work: the leading term for matrices `[n, n]` and right sides `[n, k]`."""

    def work(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
        left, right = rule.operands[0], rule.operands[1]
        own = {factor for dim in left for factor in dim}
        columns = math.prod(sizes[factor] for dim in right for factor in dim if factor not in own)
        *_, size = dimension_sizes(left, sizes)
        batch = {factor for part in (left[:-2], right) for dim in part for factor in dim} & own
        batch -= {factor for dim in left[-2:] for factor in dim}
        repeated = math.prod(sizes[factor] for factor in batch)
        return repeated * float(leading_term(size, columns))

    return work


register(
    "solve",
    solve_rule,
    ([(2, 4, 4), (2, 4, 3)], {}),
    note="columns of the right side pass through",
    linear=(1,),
    work=of_systems(lambda n, k: 2 * n**3 / 3 + 2 * n**2 * k),
    **_SINGULAR,
    pullback=_pull_solve,
)


@of_arrays
def triangular_solve(x1: Any, x2: Any, /, *, lower: bool = True) -> Any:
    """Solve linear systems with a triangular part of `x1`."""
    return solve(tril(x1) if lower else triu(x1), x2)


# ---- svd


@of_arrays
def svd(x: Any, /, *, full_matrices: bool = True) -> SVDResult:
    """Compute the singular value decomposition."""
    factors = call(
        "svd", (_check_matrices(x, "svd", False),), {"full_matrices": bool(full_matrices)}
    )
    return SVDResult(*factors)


def _svd_shapes(rows: int, columns: int, full_matrices: bool = True) -> tuple[Shape, ...]:
    least = min(rows, columns)
    if full_matrices:
        return (rows, rows), (least,), (columns, columns)
    return (rows, least), (least,), (least, columns)


def _pull_svd(step: TapeStep, g: Any, number: int) -> Any:
    u, s, vh = step.results
    of_u, of_s, of_vh = g
    rows, columns = step.operands[0].shape[-2:]
    if step.attributes.get("full_matrices", True) and rows != columns:
        raise UsageError(
            f"the gradient of svd of {step.operands[0].type} with full_matrices=True: the vectors "
            "beyond the singular values are not determined; give full_matrices=False"
        )
    size = s.shape[-1]
    squares = s * s
    f = _invert_differences(squares)
    v, of_v = _t(vh), _t(of_vh)
    left = f * (matmul(_t(u), of_u) - matmul(_t(of_u), u))
    right = f * (matmul(_t(v), of_v) - matmul(_t(of_v), v))
    across, down = movement.expand_dims(s, axis=-2), movement.expand_dims(s, axis=-1)
    inner = left * across + down * right + _spread_diagonal(of_s, size, size)
    cotangent = matmul(matmul(u, inner), vh)
    # The components of the vectors' cotangents outside the space that the vectors span.
    if rows > size:
        outside = of_u - matmul(u, matmul(_t(u), of_u))
        cotangent = cotangent + matmul(outside / across, vh)
    if columns > size:
        outside = of_v - matmul(v, matmul(_t(v), of_v))
        cotangent = cotangent + matmul(u / across, _t(outside))
    return cotangent


register_factorisation(
    "svd",
    matrix_rule(_svd_shapes),
    _STACK,
    lambda m, n: 4 * m * n * max(m, n) + 8 * max(m, n) * min(m, n) ** 2 + 9 * min(m, n) ** 3,
    **_SINGULAR,
    pullback=_pull_svd,
)


# ---- svdvals


@of_arrays
def svdvals(x: Any, /) -> Any:
    """Compute singular values in descending order."""
    return call("svdvals", (_check_matrices(x, "svdvals", False),))


def _pull_singular_values(step: TapeStep, g: Any, number: int) -> Any:
    u, _, vh = svd(step.operands[0], full_matrices=False)
    return matmul(u * movement.expand_dims(g, axis=-2), vh)


register_factorisation(
    "svdvals",
    matrix_rule(lambda m, n: ((min(m, n),),)),
    _STACK,
    lambda m, n: 4 * (max(m, n) - min(m, n) / 3) * min(m, n) ** 2,
    **_SINGULAR,
    pullback=_pull_singular_values,
)


@of_arrays
def matrix_rank(x: Any, /, *, rtol: Any = None) -> Any:
    """Count the singular values larger than `rtol` times the largest."""
    s = svdvals(x)
    return reductions.count_nonzero(elementwise.greater(s, _find_cutoff(x, s, rtol)), axis=-1)


@of_arrays
def matrix_power(x: Any, n: int, /) -> Any:
    """Compute powers of square matrices; of the inverse if `n` is negative."""
    _check_matrices(x, "matrix_power")
    if not hasattr(n, "__index__"):
        raise UsageError(f"matrix_power to the power {n!r}; give a whole number")
    if n < 0:
        return matrix_power(inv(x), -n)
    if n == 0:
        return movement.broadcast_to(whole(x, np.eye(x.shape[-1], dtype=x.dtype.numpy)), x.shape)
    power = x
    # Squares, from the second binary digit on; a digit of 1 multiplies once more.
    for digit in bin(n)[3:]:
        power = matmul(power, power)
        if digit == "1":
            power = matmul(power, x)
    return power


@of_arrays
@in_wide_types
def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    """Compute matrix norms: Frobenius ('fro'), sums (1, inf), singular values (2, 'nuc')."""
    _check_matrices(x, "matrix_norm", False)
    if ord == "fro":
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in (1, -1, math.inf, -math.inf):
        # Order inf is the largest sum of a row, order 1 the largest sum of a column.
        rows_last = ord in (math.inf, -math.inf)
        sums = reductions.sum(elementwise.abs(x), axis=-1 if rows_last else -2, keepdims=True)
        choose = reductions.max if ord > 0 else reductions.min
        norms = choose(sums, axis=(-2, -1), keepdims=keepdims)
    elif ord in (2, -2, "nuc"):
        s = svdvals(x)
        choose = {2: reductions.max, -2: reductions.min, "nuc": reductions.sum}[ord]
        norms = choose(s, axis=-1)
        if keepdims:
            norms = movement.reshape(norms, (*norms.shape, 1, 1))
    else:
        raise UsageError(f"matrix_norm of order {ord!r}; it is 'fro', 'nuc', 1, 2, inf or -these")
    return norms


@of_arrays
@in_wide_types
def vector_norm(
    x: Any, /, *, axis: int | Sequence[int] | None = None, keepdims: bool = False, ord: Any = 2
) -> Any:
    """Compute the norm of vectors; by default the Euclidean norm."""
    size = elementwise.abs(x)
    if not isinstance(ord, int | float):
        raise UsageError(f"vector_norm of order {ord!r}; a number was expected")
    if kind_of(size.dtype) != "real floating":
        raise UsageError(f"vector_norm of {x.dtype}; floating numbers were expected")
    if ord == math.inf:
        return reductions.max(size, axis=axis, keepdims=keepdims)
    if ord == -math.inf:
        return reductions.min(size, axis=axis, keepdims=keepdims)
    if ord == 0:
        counts = reductions.count_nonzero(size, axis=axis, keepdims=keepdims)
        return data_types.astype(counts, size.dtype)
    if ord == 1:
        return reductions.sum(size, axis=axis, keepdims=keepdims)
    if ord == 2:
        total = reductions.sum(elementwise.square(size), axis=axis, keepdims=keepdims)
        return elementwise.sqrt(total)
    powers = reductions.sum(elementwise.pow(size, float(ord)), axis=axis, keepdims=keepdims)
    return elementwise.pow(powers, 1.0 / ord)
