"""Factorizations, solvers, norms of matrices, and Fourier transforms.

What an operator works on, it needs whole; only dimensions that it repeats itself over pass through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.spmd.core.operator import (
    Attributes,
    Example,
    Infer,
    Operator,
    Sizes,
    Work,
    dimension_sizes,
)
from reshard.spmd.core.result_types import of_first
from reshard.spmd.local import by_name, movement
from reshard.spmd.operators.reductions import whole_axes
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import (
    Axes,
    axes_of,
    axis_of,
    broadcast_factors,
    broadcast_shape,
    counted,
    kept,
    one_operand,
)
from reshard.spmd.rules.sharding_rule import OpShardingRule

Trailing = Callable[..., tuple[Shape, ...]]
"""From rows, columns and attributes to the trailing dimensions of each result."""


def matrix_rule(trailing: Trailing, *, square: bool = False) -> Infer:
    """An operator on the last two dimensions, repeated over the others.

    >>> print(matrix_rule(lambda m, n: ((min(m, n),),))([(2, 4, 8)]).rule)
    ([i, j, k]) -> ([i, l]) {i=2, j=4, k=8, l=4} need_replication={j, k, l}
    """

    def infer(shapes: Sequence[Shape], **attributes: Any) -> Inferred:
        shape = one_operand("an operator on matrices", shapes)
        if len(shape) < 2 or (square and shape[-1] != shape[-2]):
            raise SpecError(
                f"shape {shape}; {'square ' * square}matrices [..., m, n] were expected"
            )
        lead = len(shape) - 2
        tails = trailing(*shape[-2:], **attributes)
        builder = RuleBuilder([shape], [shape[:lead] + tail for tail in tails])
        for dim in range(lead):
            builder.factor([dim], [dim] * len(tails))
        # Rows and columns of the operand and the trailing dimensions of results have nothing in
        # common.
        for dim in (lead, lead + 1):
            builder.factor([dim], kind="need_replication")
        for number, tail in enumerate(tails):
            for dim in range(len(tail)):
                builder.factor((), [None] * number + [lead + dim], kind="need_replication")
        return builder.build()

    return infer


def same_matrix(shapes: Sequence[Shape], **_: Any) -> Inferred:
    """Square matrices in, matrices of that shape out.

    >>> print(same_matrix([(2, 4, 4)]).rule)
    ([i, j, k]) -> ([i, j, k]) {i=2, j=4, k=4} need_replication={j, k}
    """
    shape = one_operand("an operator on matrices", shapes)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise SpecError(f"shape {shape}; square matrices [..., m, m] were expected")
    return kept(shape, whole=(len(shape) - 2, len(shape) - 1))


def solve(shapes: Sequence[Shape], **_: Any) -> Inferred:
    """`[..., m, m] x = [..., m, n]`: columns of the right side are solved one by one.

    >>> print(solve([(2, 4, 4), (2, 4, 3)]).rule)
    ([i, j, l], [i, j, k]) -> ([i, l, k]) {i=2, j=4, k=3, l=4} need_replication={j, l}
    """
    counted("solve", shapes, 2)
    left, right = shapes
    vector = len(right) == 1
    # The dimension that is solved for, whose size is that of the matrices.
    inner = right[-1:] if vector else right[-2:-1]
    if len(left) < 2 or left[-1:] != left[-2:-1] or inner != left[-1:]:
        raise SpecError(f"solve of {left} and {right}; [..., m, m] and [..., m, n] were expected")
    batch = broadcast_shape([left[:-2], right[: -1 if vector else -2]])
    columns = () if vector else right[-1:]
    builder = RuleBuilder(shapes, [batch + inner + columns])
    if vector:
        for dim in range(len(batch)):
            builder.factor([dim], [dim])
    else:
        broadcast_factors(builder, batch, operands=range(2), skip=2)
    builder.factor([len(left) - 2, 0 if vector else len(right) - 2], kind="need_replication")
    if columns:
        builder.factor([None, len(right) - 1], [len(batch) + 1])
    builder.factor([len(left) - 1], [len(batch)], kind="need_replication")
    return builder.build()


def triangular_solve(shapes: Sequence[Shape], left_side: bool = True, **_: Any) -> Inferred:
    """`a x = b` for a triangular `a`, or `x a = b`.

    >>> print(triangular_solve([(4, 4), (3, 4)], left_side=False).rule)
    ([k, j], [i, j]) -> ([i, k]) {i=3, j=4, k=4} need_replication={j, k}
    """
    if left_side:
        return solve(shapes)
    counted("triangular_solve", shapes, 2)
    left, right = shapes
    if len(left) != len(right) or left[:-2] != right[:-2] or {*left[-2:]} != {*right[-1:]}:
        raise SpecError(f"triangular solve of {left} and {right}; [..., m, m] and [..., n, m]")
    lead = len(left) - 2
    builder = RuleBuilder(shapes, [right])
    for dim in range(lead):
        builder.factor([dim, dim], [dim])
    builder.factor([None, lead], [lead])
    builder.factor([lead + 1, lead + 1], kind="need_replication")
    builder.factor([lead], [lead + 1], kind="need_replication")
    return builder.build()


def cross(shapes: Sequence[Shape], axis: int = -1) -> Inferred:
    """Cross products of the vectors of 3 along an axis.

    >>> print(cross([(4, 3), (4, 3)]).rule)
    ([i, j], [i, j]) -> ([i, j]) {i=4, j=3} need_replication={j}
    """
    counted("cross", shapes, 2)
    result = broadcast_shape(shapes)
    # Counted from the end, since operands of other ranks broadcast to the left of it.
    back = axis if axis < 0 else axis - len(result)
    if any(len(shape) < -back or shape[back] != 3 for shape in shapes):
        raise SpecError(f"cross of {shapes[0]} and {shapes[1]}; axis {axis} must have size 3")
    builder = RuleBuilder(shapes, [result])
    for dim, size in enumerate(result):
        found: list[int | None] = []
        for tensor, shape in enumerate(shapes):
            own = dim - len(result) + len(shape)
            found.append(own if own >= 0 and shape[own] == size else None)
            if own >= 0 and shape[own] != size:
                builder.factor([None] * tensor + [own], size=1)
        kind = "need_replication" if dim == len(result) + back else "pass_through"
        builder.factor(found, [dim], size=size, kind=kind)  # type: ignore[arg-type]
    return builder.build()


def diagonal(shapes: Sequence[Shape], offset: int = 0) -> Inferred:
    """The diagonals of the last two dimensions."""

    def trailing(rows: int, columns: int) -> tuple[Shape, ...]:
        return ((max(min(rows + min(offset, 0), columns - max(offset, 0)), 0),),)

    return matrix_rule(trailing)(shapes)


def trace(shapes: Sequence[Shape], offset: int = 0) -> Inferred:
    """The sums of the diagonals of the last two dimensions."""
    return matrix_rule(lambda rows, columns: ((),))(shapes)


def vector_norm(
    shapes: Sequence[Shape],
    axis: Axes = None,
    keepdims: bool = False,
    ord: float = 2,
) -> Inferred:
    """Lengths of vectors along axes."""
    return whole_axes(shapes, axis, keepdims)


def matrix_norm(
    shapes: Sequence[Shape],
    keepdims: bool = False,
    ord: float | str = "fro",
) -> Inferred:
    """Norms of the last two dimensions."""
    return whole_axes(shapes, (-2, -1), keepdims)


def fourier(kind: str) -> Infer:
    """A transform along axes, each of which a device needs whole.

    Args:
        kind: "same" for as many results as elements, "half" for a real operand (`n // 2 + 1`
            results), "whole" for a real result.
    """

    def infer(
        shapes: Sequence[Shape],
        n: int | Sequence[int] | None = None,
        axis: Axes = -1,
        norm: str = "backward",
    ) -> Inferred:
        shape = one_operand("a Fourier transform", shapes)
        rank = len(shape)
        lengths = [n] if isinstance(n, int) else None if n is None else list(n)
        if axis is None:
            # As NumPy: lengths without axes are those of the last dimensions.
            named = list(range(rank - len(lengths) if lengths else 0, rank))
        else:
            named = [axis_of(rank, one) for one in ([axis] if isinstance(axis, int) else axis)]
        if not named or (lengths is not None and len(lengths) != len(named)):
            raise SpecError(f"a Fourier transform of {shape} over {named}: {lengths} lengths")
        last = named[-1]
        result = list(shape)
        for number, dim in enumerate(named):
            # irfft's default undoes rfft of an even number of elements, along the last axis alone.
            usual = 2 * (shape[dim] - 1) if kind == "whole" and dim == last else shape[dim]
            result[dim] = usual if lengths is None else lengths[number]
        if kind == "half":
            result[last] = result[last] // 2 + 1
        # Along an axis that changes its length a cut of one side does not fit the other.
        changed = [dim for dim in named if result[dim] != shape[dim]]
        return kept(shape, tuple(result), whole=named, blocked=changed)

    return infer


def shifted(shapes: Sequence[Shape], axes: Axes = None) -> Inferred:
    """Halves of axes swapped."""
    shape = one_operand("a shift", shapes)
    return kept(shape, moved=axes_of(len(shape), axes))


def _qr(rows: int, columns: int, mode: str = "reduced") -> tuple[Shape, ...]:
    inner = rows if mode == "complete" else min(rows, columns)
    return (rows, inner), (inner, columns)


def _svd(rows: int, columns: int, full_matrices: bool = True) -> tuple[Shape, ...]:
    least = min(rows, columns)
    if full_matrices:
        return (rows, rows), (least,), (columns, columns)
    return (rows, least), (least,), (least, columns)


def _pinv(rows: int, columns: int, rtol: float | None = None) -> tuple[Shape, ...]:
    return ((columns, rows),)


def _rank(rows: int, columns: int, rtol: float | None = None) -> tuple[Shape, ...]:
    return ((),)


_MATRIX = "the matrices are whole on each device"
_STACK: Example = ([(2, 4, 8)], {})
_SQUARES: Example = ([(2, 4, 4)], {})
_ALL = ("max", "min", "product")


def of_matrices(leading_term: Callable[[int, int], float]) -> Work:
    """The work of a factorisation: a leading term for each matrix `[m, n]` of a stack.

    Leading terms are those of Golub and Van Loan, "Matrix Computations", 4th edition, chapters 3,
    4, 5, 7 and 8.
    """

    def work(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
        *lead, rows, columns = dimension_sizes(rule.operands[0], sizes)
        return math.prod(lead) * float(leading_term(rows, columns))

    return work


def of_systems(leading_term: Callable[[int, int], float]) -> Work:
    """The work of a solver: the leading term for matrices `[n, n]` and right sides `[n, k]`."""

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


def _row(
    name: str, infer: Infer, example: Example, note: str = _MATRIX, **options: Any
) -> Operator:
    return Operator(name, "linear algebra", infer, example=example, note=note, **options)


def _factorisation(
    name: str,
    infer: Infer,
    example: Example,
    leading_term: Callable[[int, int], float],
    **options: Any,
) -> Operator:
    """A row of one whose work has a leading term for matrices `[m, n]`."""
    return _row(name, infer, example, work=of_matrices(leading_term), **options)


_SINGULAR: dict[str, Any] = {"local": by_name.in_linalg, "fails": "any"}
"""Options of LAPACK's functions, which fail for singular matrices, or do not converge."""


def _transform(name: str, kind: str) -> Operator:
    return Operator(
        name,
        "Fourier transforms",
        fourier(kind),
        "each",
        local=by_name.in_fft,
        example=([(4, 8)], {}),
        note="the transformed axes are whole on each device",
    )


def _shift(name: str) -> Operator:
    return Operator(
        name,
        "Fourier transforms",
        shifted,
        "each",
        _ALL,
        result_types=of_first,
        example=([(4, 8)], {"axes": 1}),
    )


# Of factorisations the last entry is the leading term of their work, from the source that
# `of_matrices` names.
OPERATORS: tuple[Operator, ...] = (
    _factorisation("cholesky", same_matrix, _SQUARES, lambda m, n: n**3 / 3, **_SINGULAR),
    _factorisation("inv", same_matrix, _SQUARES, lambda m, n: 2 * n**3, **_SINGULAR),
    _factorisation(
        "matrix_power",
        lambda shapes, n=1: same_matrix(shapes),
        ([(2, 4, 4)], {"n": 2}),
        lambda m, n: 2 * n**3,
    ),
    _factorisation(
        "qr",
        matrix_rule(_qr),
        _STACK,
        lambda m, n: 4 * (m * n * min(m, n) - min(m, n) ** 3 / 3),
        **_SINGULAR,
    ),
    _factorisation(
        "svd",
        matrix_rule(_svd),
        _STACK,
        lambda m, n: 4 * m * n * max(m, n) + 8 * max(m, n) * min(m, n) ** 2 + 9 * min(m, n) ** 3,
        **_SINGULAR,
    ),
    _factorisation(
        "svdvals",
        matrix_rule(lambda m, n: ((min(m, n),),)),
        _STACK,
        lambda m, n: 4 * (max(m, n) - min(m, n) / 3) * min(m, n) ** 2,
        **_SINGULAR,
    ),
    _factorisation(
        "eigh",
        matrix_rule(lambda m, n: ((m,), (m, m)), square=True),
        _SQUARES,
        lambda m, n: 9 * n**3,
        **_SINGULAR,
    ),
    _factorisation(
        "eigvalsh",
        matrix_rule(lambda m, n: ((m,),), square=True),
        _SQUARES,
        lambda m, n: 4 * n**3 / 3,
        **_SINGULAR,
    ),
    _factorisation(
        "eig",
        matrix_rule(lambda m, n: ((m,), (m, m)), square=True),
        _SQUARES,
        lambda m, n: 25 * n**3,
    ),
    _factorisation(
        "eigvals",
        matrix_rule(lambda m, n: ((m,),), square=True),
        _SQUARES,
        lambda m, n: 10 * n**3,
    ),
    _factorisation(
        "pinv",
        matrix_rule(_pinv),
        _STACK,
        lambda m, n: 14 * max(m, n) * min(m, n) ** 2 + 8 * min(m, n) ** 3,
    ),
    _factorisation(
        "matrix_rank",
        matrix_rule(_rank),
        _STACK,
        lambda m, n: 4 * (max(m, n) - min(m, n) / 3) * min(m, n) ** 2,
    ),
    _factorisation(
        "det",
        matrix_rule(lambda m, n: ((),), square=True),
        _SQUARES,
        lambda m, n: 2 * n**3 / 3,
        **_SINGULAR,
    ),
    _factorisation(
        "slogdet",
        matrix_rule(lambda m, n: ((), ()), square=True),
        _SQUARES,
        lambda m, n: 2 * n**3 / 3,
        **_SINGULAR,
    ),
    _row("matrix_norm", matrix_norm, _STACK),
    _row("vector_norm", vector_norm, _STACK, "the axes are whole on each device"),
    _row(
        "solve",
        solve,
        ([(2, 4, 4), (2, 4, 3)], {}),
        "columns of the right side pass through",
        linear=(1,),
        work=of_systems(lambda n, k: 2 * n**3 / 3 + 2 * n**2 * k),
        **_SINGULAR,
    ),
    _row(
        "triangular_solve",
        triangular_solve,
        ([(2, 4, 4), (2, 4, 3)], {}),
        "as solve",
        linear=(1,),
        work=of_systems(lambda n, k: n**2 * k),
    ),
    _row(
        "cross",
        cross,
        ([(4, 3), (4, 3)], {}),
        "the axis of 3 is whole on each device",
        linear="one",
    ),
    _row(
        "diagonal",
        diagonal,
        _STACK,
        linear="each",
        local=movement.diagonal,
        reads_part=True,
        result_types=of_first,
    ),
    _row("trace", trace, _STACK, linear="each", reads_part=True),
    *(_transform(name, "same") for name in ("fft", "ifft", "fftn", "ifftn")),
    *(_transform(name, "half") for name in ("rfft", "rfftn", "ihfft")),
    *(_transform(name, "whole") for name in ("irfft", "irfftn", "hfft")),
    _shift("fftshift"),
    _shift("ifftshift"),
)
