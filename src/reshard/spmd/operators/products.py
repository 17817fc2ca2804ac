"""Products that sum over factors: matrix products, dot products, einsum."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.spmd.core.operator import Example, Infer, Operator, of_product
from reshard.spmd.local import by_name
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import axis_of, broadcast_factors, broadcast_shape, counted
from reshard.spmd.rules.templates import einsum_template

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _check_same(name: str, left: int, right: int, shapes: Sequence[Shape]) -> None:
    if left != right:
        raise SpecError(
            f"{name} of shapes {', '.join(map(str, shapes))}: {left} and {right} are multiplied "
            "along one factor; they must be equal"
        )


def matmul(shapes: Sequence[Shape]) -> Inferred:
    """`[..., i, k] @ [..., k, j] -> [..., i, j]`; a vector has no `i`, or no `j`.

    >>> print(matmul([(2, 4, 8), (8, 16)]).rule)
    ([i, j, l], [l, k]) -> ([i, j, k]) {i=2, j=4, k=16, l=8} reduction={l}
    """
    counted("matmul", shapes, 2)
    left, right = shapes
    if not left or not right:
        raise SpecError(f"matmul of {left} and {right}; a scalar is multiplied by multiply")
    # The right operand's second to last dimension; a vector's only one.
    inner = max(len(right) - 2, 0)
    _check_same("matmul", left[-1], right[inner], shapes)
    batch = broadcast_shape([left[:-2], right[:-2]])
    rows = left[-2:-1]
    columns = right[-1:] if len(right) > 1 else ()
    builder = RuleBuilder(shapes, [batch + rows + columns])
    broadcast_factors(builder, batch, operands=range(2), skip=2)
    if rows:
        builder.factor([len(left) - 2], [len(batch)])
    if columns:
        builder.factor([None, len(right) - 1], [len(batch) + len(rows)])
    builder.factor([len(left) - 1, inner], kind="reduction")
    return builder.build()


def vecdot(shapes: Sequence[Shape], axis: int = -1) -> Inferred:
    """Products summed over one axis, the others broadcast.

    >>> print(vecdot([(4, 8), (8,)]).rule)
    ([i, j], [j]) -> ([i]) {i=4, j=8} reduction={j}
    """
    counted("vecdot", shapes, 2)
    # Counted from the end, since operands are lined up there; an axis from the start is meant in
    # the operand of fewer dimensions.
    back = axis_of(min(map(len, shapes)), axis) - min(map(len, shapes)) if axis >= 0 else axis
    dims = [axis_of(len(shape), back) for shape in shapes]
    _check_same("vecdot", shapes[0][dims[0]], shapes[1][dims[1]], shapes)
    full = broadcast_shape(shapes)
    reduced = len(full) + back
    builder = RuleBuilder(shapes, [full[:reduced] + full[reduced + 1 :]])
    for dim, size in enumerate(full):
        if dim == reduced:
            continue
        found: list[int | None] = [None, None]
        for tensor, shape in enumerate(shapes):
            own = dim - len(full) + len(shape)
            if own >= 0 and shape[own] == size:
                found[tensor] = own
            elif own >= 0:
                builder.factor([None] * tensor + [own], size=1)
        builder.factor(found, [dim - (dim > reduced)], size=size)
    builder.factor(dims, kind="reduction")
    return builder.build()


def tensordot(shapes: Sequence[Shape], axes: int | Sequence[int | Sequence[int]] = 2) -> Inferred:
    """Products summed over pairs of axes; the result has the other axes, the left's first.

    >>> print(tensordot([(4, 8, 2), (2, 8, 5)], axes=[[1, 2], [1, 0]]).rule)
    ([i, k, l], [l, k, j]) -> ([i, j]) {i=4, j=5, k=8, l=2} reduction={k, l}
    """
    counted("tensordot", shapes, 2)
    left, right = shapes
    if isinstance(axes, int):
        if not 0 <= axes <= min(len(left), len(right)):
            raise SpecError(f"tensordot over {axes} axes of {left} and {right}; they have fewer")
        given: list[Sequence[int]] = [range(len(left) - axes, len(left)), range(axes)]
    else:
        given = [[side] if isinstance(side, int) else list(side) for side in axes]
    pairs = [
        [axis_of(len(shape), axis) for axis in side]
        for shape, side in zip(shapes, given, strict=True)
    ]
    if len(pairs[0]) != len(pairs[1]) or any(len(set(side)) != len(side) for side in pairs):
        raise SpecError(f"axes {axes} of a tensordot; name the same number of each side, each once")
    for one, other in zip(*pairs, strict=True):
        _check_same("tensordot", left[one], right[other], shapes)
    free = [
        [dim for dim in range(len(shape)) if dim not in side]
        for shape, side in zip(shapes, pairs, strict=True)
    ]
    result = tuple(left[dim] for dim in free[0]) + tuple(right[dim] for dim in free[1])
    builder = RuleBuilder(shapes, [result])
    for number, dim in enumerate(free[0]):
        builder.factor([dim], [number])
    for number, dim in enumerate(free[1]):
        builder.factor([None, dim], [len(free[0]) + number])
    for one, other in zip(*pairs, strict=True):
        builder.factor([one, other], kind="reduction")
    return builder.build()


def outer(shapes: Sequence[Shape]) -> Inferred:
    """`[i], [j] -> [i, j]`.

    >>> print(outer([(4,), (8,)]).rule)
    ([i], [j]) -> ([i, j]) {i=4, j=8}
    """
    return einsum(shapes, "a,b->ab")


def dot_general(
    shapes: Sequence[Shape],
    batching: Sequence[Sequence[int]] = ((), ()),
    contracting: Sequence[Sequence[int]] = ((), ()),
) -> Inferred:
    """XLA's product: batch dimensions first, then the left's, then the right's.

    >>> print(dot_general([(2, 4, 8), (2, 8, 5)], [[0], [0]], [[2], [1]]).rule)
    ([i, j, l], [i, l, k]) -> ([i, j, k]) {i=2, j=4, k=5, l=8} reduction={l}
    """
    counted("dot_general", shapes, 2)
    left, right = shapes
    gone = [{*batching[side], *contracting[side]} for side in range(2)]
    free = [
        [dim for dim in range(len(shape)) if dim not in gone[side]]
        for side, shape in enumerate(shapes)
    ]
    sizes = [left[dim] for dim in (*batching[0], *free[0])] + [right[dim] for dim in free[1]]
    builder = RuleBuilder(shapes, [tuple(sizes)])
    for place, (one, other) in enumerate(zip(*batching, strict=True)):
        _check_same("dot_general", left[one], right[other], shapes)
        builder.factor([one, other], [place])
    lead = len(batching[0])
    for number, dim in enumerate(free[0]):
        builder.factor([dim], [lead + number])
    lead += len(free[0])
    for number, dim in enumerate(free[1]):
        builder.factor([None, dim], [lead + number])
    for one, other in zip(*contracting, strict=True):
        _check_same("dot_general", left[one], right[other], shapes)
        builder.factor([one, other], kind="reduction")
    return builder.build()


def implied_result(letters: str) -> str:
    """The subscripts of einsum's result where they are left out, from those of all operands.

    >>> implied_result("...ik...kj")
    '...ij'
    """
    once = sorted(x for x in set(letters) - {"."} if letters.count(x) == 1)
    return "..." * ("..." in letters) + "".join(once)


def einsum(shapes: Sequence[Shape], subscripts: str) -> Inferred:
    """What `numpy.einsum` computes; `...` stands for leading dimensions, and `->` may be left out.

    >>> print(einsum([(2, 4, 8), (2, 8, 5)], "...ik,...kj").rule)
    ([i, j, l], [i, l, k]) -> ([i, j, k]) {i=2, j=4, k=5, l=8} reduction={l}
    """
    text = re.sub(r"\s", "", subscripts)
    inputs = text.partition("->")[0].split(",")
    counted(f"einsum {subscripts!r}", shapes, len(inputs))
    # 1. Letters for the dimensions of the longest ellipsis.
    spare = [letter for letter in _LETTERS if letter not in text]
    lengths = [
        len(shape) - len(own.replace("...", "")) if "..." in own else 0
        for own, shape in zip(inputs, shapes, strict=True)
    ]
    most = max(lengths)
    ellipsis = spare[: max(most, 0)]
    # 2. The result, which by default has the letters that are there once, in alphabetical order.
    if "->" in text:
        result = text.partition("->")[2]
    else:
        result = implied_result("".join(inputs))
    # 3. Each ellipsis spelt out, lined up at the end as in broadcasting.
    inputs = [
        own.replace("...", "".join(ellipsis[most - length :]) if length > 0 else "")
        for own, length in zip(inputs, lengths, strict=True)
    ]
    result = result.replace("...", "".join(ellipsis))
    rule = einsum_template(f"{','.join(inputs)}->{result}").rule(*shapes)
    return Inferred(rule, rule.result_shapes)


def _row(name: str, infer: Infer, example: Example, **options: Any) -> Operator:
    return Operator(name, "products", infer, "one", work=of_product, example=example, **options)


OPERATORS: tuple[Operator, ...] = (
    _row("matmul", matmul, ([(2, 4, 8), (8, 16)], {}), doc="The matrix product."),
    _row("vecdot", vecdot, ([(4, 8), (8,)], {}), note="the left operand is conjugated"),
    _row("tensordot", tensordot, ([(4, 8, 2), (2, 8, 5)], {"axes": [[1, 2], [1, 0]]})),
    _row(
        "dot_general",
        dot_general,
        ([(2, 4, 8), (2, 8, 5)], {"batching": [[0], [0]], "contracting": [[2], [1]]}),
        note="XLA's dot, with batch axes",
    ),
    _row(
        "einsum",
        einsum,
        ([(2, 4, 8), (2, 5, 8)], {"subscripts": "bik,bjk->bij"}),
        local=by_name.einsum,
        note="letters not in the result are summed; `sp.einsum` takes diagonals where a letter is "
        "twice in an operand",
    ),
    _row("outer", outer, ([(4,), (8,)], {})),
)
