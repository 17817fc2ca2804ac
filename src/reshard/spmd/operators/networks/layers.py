"""Operators of layers: softmax, norms and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.spmd.core.operator import Example, Infer, Operator
from reshard.spmd.local import reductions as norms
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import axes_of, axis_of, counted, kept, one_operand


def softmax(shapes: Sequence[Shape], axis: int | Sequence[int] = -1) -> Inferred:
    """Exponentials over their sum along an axis.

    >>> print(softmax([(4, 8)]).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} need_replication={j}
    """
    shape = one_operand("softmax", shapes)
    return kept(shape, whole=axes_of(len(shape), axis))


def norm(shapes: Sequence[Shape], dims: int = 1) -> Inferred:
    """The norm over the last dimensions, with optional weight and bias of their shape.

    >>> print(norm([(4, 8), (8,)]).rule)
    ([i, j], [j]) -> ([i, j]) {i=4, j=8} need_replication={j}
    """
    if not 1 <= len(shapes) <= 3:
        counted("a norm", shapes, 1)
    shape = shapes[0]
    lead = len(shape) - dims
    if lead < 0 or any(other != shape[lead:] for other in shapes[1:]):
        raise SpecError(
            f"a norm of {', '.join(map(str, shapes))} over {dims} dimensions; weight and bias "
            "must have their sizes"
        )
    builder = RuleBuilder(shapes, [shape])
    # Weight and bias have the normalised dimensions alone.
    others = len(shapes) - 1
    for dim in range(len(shape)):
        if dim < lead:
            builder.factor([dim], [dim])
        else:
            builder.factor([dim, *[dim - lead] * others], [dim], kind="need_replication")
    return builder.build()


def norm_gradient(shapes: Sequence[Shape], dims: int = 1) -> Inferred:
    """Of a norm, the cotangents of its operand and of the weight, from that of the result.

    Weights are of all rows: ranks that have parts of these have contributions to its cotangent.

    >>> print(norm_gradient([(4, 8), (4, 8), (8,)]).rule)
    ([i, j], [i, j], [j]) -> ([i, j], [j]) {i=4, j=8} reduction={i} need_replication={j}
    """
    if len(shapes) != 3:
        counted("the gradient of a norm", shapes, 2)
    shape, *others = shapes[1:]
    lead = len(shape) - dims
    if shapes[0] != shape or lead < 0 or any(other != shape[lead:] for other in others):
        raise SpecError(
            f"the gradient of a norm of {', '.join(map(str, shapes))} over {dims} dimensions; a "
            "cotangent of the operand's shape and a weight of those dimensions were expected"
        )
    builder = RuleBuilder(shapes, [shape, *others])
    for dim in range(len(shape)):
        if dim >= lead:
            own = [dim - lead] * len(others)
            builder.factor([dim, dim, *own], [dim, *own], kind="need_replication")
        elif others:
            builder.factor([dim, dim], [dim], kind="reduction")
        else:
            builder.factor([dim, dim], [dim])
    return builder.build()


def batch_norm(shapes: Sequence[Shape], axis: int = 1) -> Inferred:
    """An array, and vectors along one axis: scale, offset, mean and variance that are known.

    >>> print(batch_norm([(4, 8), (8,), (8,), (8,), (8,)]).rule)
    ([i, j], [j], [j], [j], [j]) -> ([i, j]) {i=4, j=8}
    """
    counted("batch_norm", shapes, 5)
    shape = shapes[0]
    place = axis_of(len(shape), axis)
    if any(other != (shape[place],) for other in shapes[1:]):
        raise SpecError(f"batch_norm of {', '.join(map(str, shapes))}; vectors of axis {axis}")
    builder = RuleBuilder(shapes, [shape])
    for dim in range(len(shape)):
        builder.factor([dim, *([0] * 4 if dim == place else [])], [dim])
    return builder.build()


def cross_entropy(shapes: Sequence[Shape], axis: int = -1) -> Inferred:
    """The loss of each element: logits with the classes along an axis, and labels without it.

    >>> print(cross_entropy([(4, 10), (4,)]).rule)
    ([i, j], [i]) -> ([i]) {i=4, j=10} need_replication={j}
    """
    counted("cross_entropy", shapes, 2)
    logits, labels = shapes
    place = axis_of(len(logits), axis)
    if labels != logits[:place] + logits[place + 1 :]:
        raise SpecError(f"labels {labels} of logits {logits}; one for each but axis {axis}")
    builder = RuleBuilder(shapes, [labels])
    for dim in range(len(labels)):
        builder.factor([dim + (dim >= place), dim], [dim])
    builder.factor([place], kind="need_replication")
    return builder.build()


def _row(name: str, infer: Infer, example: Example, **options: Any) -> Operator:
    return Operator(name, "networks", infer, example=example, **options)


_WHOLE = "the normalised axis is whole on each device"

OPERATORS: tuple[Operator, ...] = (
    _row("softmax", softmax, ([(4, 8)], {"axis": 1}), note=_WHOLE),
    _row("log_softmax", softmax, ([(4, 8)], {"axis": 1}), note=_WHOLE),
    _row("layer_norm", norm, ([(4, 8), (8,), (8,)], {}), local=norms.norm, note=_WHOLE),
    _row("rms_norm", norm, ([(4, 8), (8,)], {}), local=norms.norm, note=_WHOLE),
    *(
        _row(
            name,
            norm_gradient,
            ([(4, 8), (4, 8), (8,)], {}),
            local=norms.norm_gradient,
            note="rows that are cut have contributions to the weight's cotangent",
        )
        for name in ("layer_norm_gradient", "rms_norm_gradient")
    ),
    _row(
        "batch_norm",
        batch_norm,
        ([(4, 8), (8,), (8,), (8,), (8,)], {}),
        note="mean and variance are known",
    ),
    _row(
        "cross_entropy",
        cross_entropy,
        ([(4, 10), (4,)], {}),
        note="classes are whole on each device",
    ),
)
