"""Derivatives of factorizations and solvers, for stacks of real matrices.

Sources: Giles, "Collected matrix derivative results for forward and reverse mode algorithmic
differentiation", 2008; Murray, "Differentiation of the Cholesky decomposition", 2016; Walter and
Lehmann, "Algorithmic differentiation of linear algebra functions", 2010 (QR); Townsend,
"Differentiating the singular value decomposition", 2016.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard.errors import UsageError
from reshard.spmd.core.operator import Pullback, TapeStep
from reshard.spmd.functions.elementwise import matmul, where, whole
from reshard.spmd.functions.filling import tril
from reshard.spmd.functions.linalg import eigh, inv, solve, svd
from reshard.spmd.functions.manipulation import expand_dims, matrix_transpose
from reshard.spmd.functions.statistics import summed_to
from reshard.spmd.functions.windows import pad


def _t(x: Any) -> Any:
    return matrix_transpose(x)


def _numbers(g: Any) -> Any:
    """A number for each matrix, as matrices of one element."""
    return expand_dims(expand_dims(g, axis=-1), axis=-1)


def _spread_diagonal(x: Any, rows: int, columns: int, offset: int = 0) -> Any:
    """Matrices with these diagonals, zero elsewhere."""
    first = max(-offset, 0)
    line = pad(x, [(0, 0)] * (x.ndim - 1) + [(first, rows - first - x.shape[-1])])
    at = np.eye(rows, columns, k=offset, dtype=bool)
    return where(whole(x, at), expand_dims(line, axis=-1), 0.0)


def _pull_inverse(step: TapeStep, g: Any, number: int) -> Any:
    back = _t(step.result)
    return -matmul(matmul(back, g), back)


def _pull_determinant(step: TapeStep, g: Any, number: int) -> Any:
    return _numbers(g * step.result) * _t(inv(step.operands[0]))


def _pull_log_determinant(step: TapeStep, g: Any, number: int) -> Any:
    return _numbers(g[1]) * _t(inv(step.operands[0]))


def _pull_solve(step: TapeStep, g: Any, number: int) -> Any:
    a, b = step.operands
    x = step.result
    of_right = solve(_t(a), g)
    if number == 1:
        return of_right
    if b.ndim == 1:
        of_right, x = expand_dims(of_right, axis=-1), expand_dims(x, axis=-1)
    return summed_to(-matmul(of_right, _t(x)), a.shape)


def _halve_diagonal(x: Any) -> Any:
    """The lower triangle, with half of the diagonal."""
    size = x.shape[-1]
    return tril(x) * whole(x, np.where(np.eye(size, dtype=bool), 0.5, 1.0).astype(x.dtype.numpy))


def _pull_cholesky(step: TapeStep, g: Any, number: int) -> Any:
    root = step.result
    inner = _halve_diagonal(matmul(_t(root), g))
    back = solve(_t(root), inner)
    # L^-T inner L^-1: a solve from the left, then one from the right.
    found = _t(solve(_t(root), _t(back)))
    return (found + _t(found)) * 0.5


def _invert_differences(values: Any) -> Any:
    """`1 / (v[j] - v[i])` for each pair, 0 on the diagonal."""
    apart = expand_dims(values, axis=-2) - expand_dims(values, axis=-1)
    same = whole(values, np.eye(values.shape[-1], dtype=bool))
    return where(same, 0.0, 1.0 / where(same, 1.0, apart))


def _pull_eigh(step: TapeStep, g: Any, number: int) -> Any:
    values, vectors = step.results
    of_values, of_vectors = g
    size = values.shape[-1]
    inner = _invert_differences(values) * matmul(_t(vectors), of_vectors)
    inner = inner + _spread_diagonal(of_values, size, size)
    found = matmul(matmul(vectors, inner), _t(vectors))
    # As the factorisation reads them: one triangle, the other being the same.
    return (found + _t(found)) * 0.5


def _pull_eigenvalues(step: TapeStep, g: Any, number: int) -> Any:
    vectors = eigh(step.operands[0]).eigenvectors
    return matmul(vectors * expand_dims(g, axis=-2), _t(vectors))


def _pull_qr(step: TapeStep, g: Any, number: int) -> Any:
    q, r = step.results
    of_q, of_r = g
    rows, columns = step.operands[0].shape[-2:]
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
    across, down = expand_dims(s, axis=-2), expand_dims(s, axis=-1)
    inner = left * across + down * right + _spread_diagonal(of_s, size, size)
    found = matmul(matmul(u, inner), vh)
    # What of the vectors' cotangents lies outside of the space that the vectors span.
    if rows > size:
        outside = of_u - matmul(u, matmul(_t(u), of_u))
        found = found + matmul(outside / across, vh)
    if columns > size:
        outside = of_v - matmul(v, matmul(_t(v), of_v))
        found = found + matmul(u / across, _t(outside))
    return found


def _pull_singular_values(step: TapeStep, g: Any, number: int) -> Any:
    u, _, vh = svd(step.operands[0], full_matrices=False)
    return matmul(u * expand_dims(g, axis=-2), vh)


def _pull_diagonal(step: TapeStep, g: Any, number: int) -> Any:
    rows, columns = step.operands[0].shape[-2:]
    return _spread_diagonal(g, rows, columns, step.attributes["offset"])


PULLBACKS: dict[str, Pullback] = {
    "cholesky": _pull_cholesky,
    "det": _pull_determinant,
    "diagonal": _pull_diagonal,
    "eigh": _pull_eigh,
    "eigvalsh": _pull_eigenvalues,
    "inv": _pull_inverse,
    "qr": _pull_qr,
    "slogdet": _pull_log_determinant,
    "solve": _pull_solve,
    "svd": _pull_svd,
    "svdvals": _pull_singular_values,
}
"""By operator."""

_COMPLEX = "its numbers are complex, which have no gradients here"
_OF_COMPLEX = "fft fftn hfft ifft ifftn ihfft irfft irfftn rfft rfftn eig eigvals"
_MADE = "cross matrix_norm matrix_power matrix_rank pinv trace triangular_solve vector_norm"

REFUSED: dict[str, str] = {
    **dict.fromkeys(_OF_COMPLEX.split(), _COMPLEX),
    **{
        name: f"sp.linalg.{name} is made of other operators, which have derivatives"
        for name in _MADE.split()
    },
    **dict.fromkeys(("fftshift", "ifftshift"), "sp.fft.fftshift and ifftshift are sp.roll"),
}
"""Operators without a derivative, with the reason."""
