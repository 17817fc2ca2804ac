"""Pooling, and the operators of its gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.sharding import ShardingSpec
from reshard.spmd.local import window_gradients, windows
from reshard.spmd.local.window_reach import WindowReach, find_reaches
from reshard.spmd.operators.networks import halos
from reshard.spmd.operators.networks.convolution import Pairs, window_sizes
from reshard.spmd.operators.operator import Example, Infer, Operator
from reshard.spmd.operators.result_types import of_first
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import counted, one_operand


def pooling(
    shapes: Sequence[Shape],
    window: Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: int | Pairs = 0,
    dilation: int | Sequence[int] = 1,
) -> Inferred:
    """A window over the last dimensions, moved by its own size when no strides are given.

    >>> print(pooling([(2, 3, 8, 8)], window=(2, 2)).rule)
    ([i, j, k, l]) -> ([i, j, k, l]) {i=2, j=3, k=4, l=4} permutation={k, l}
    """
    shape = one_operand("pooling", shapes)
    lead = len(shape) - len(window)
    if lead < 0:
        raise SpecError(f"window {tuple(window)} over {shape}; it has more dimensions")
    steps = tuple(window) if strides is None else strides
    places = window_sizes(shape[lead:], window, steps, padding, dilation)
    builder = RuleBuilder([shape], [shape[:lead] + places])
    for dim in range(len(shape)):
        # Leading dimensions, and windows of one element, need no neighbours.
        still = dim < lead or _is_still(dim - lead, window, steps, padding)
        builder.factor(
            [dim],
            [dim],
            size=shape[dim] if dim < lead else places[dim - lead],
            kind="pass_through" if still else "permutation",
        )
    return builder.build()


def _is_still(
    dim: int, window: Sequence[int], strides: int | Sequence[int], padding: int | Pairs
) -> bool:
    """Whether windows of one element, each at its own place, leave a dimension as it is."""
    step = strides if isinstance(strides, int) else strides[dim]
    ends = (padding,) if isinstance(padding, int) else padding[dim]
    return window[dim] == 1 and step == 1 and not any(ends)


def avg_pool_gradient(
    shapes: Sequence[Shape],
    sizes: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Pairs,
) -> Inferred:
    """The cotangent of what is pooled, `[..., *sizes]`, from that of the means."""
    shape = one_operand("avg_pool_gradient", shapes)
    return _back([shape], sizes, window, strides, padding)


def max_pool_gradient(
    shapes: Sequence[Shape], window: Sequence[int], strides: Sequence[int], padding: Pairs
) -> Inferred:
    """The cotangent of what is pooled, from that of the greatest, these, and what is pooled."""
    counted("max_pool_gradient", shapes, 3)
    sizes = shapes[2][len(shapes[2]) - len(window) :]
    return _back(shapes, sizes, window, strides, padding)


def _back(
    shapes: Sequence[Shape],
    sizes: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Pairs,
) -> Inferred:
    shape = shapes[0]
    lead = len(shape) - len(window)
    builder = RuleBuilder(shapes, [shape[:lead] + tuple(sizes)])
    for dim in range(len(shape)):
        still = dim < lead or _is_still(dim - lead, window, strides, padding)
        builder.factor(
            [dim] * len(shapes),
            [dim],
            size=shape[dim] if dim < lead else sizes[dim - lead],
            kind="pass_through" if still else "permutation",
        )
    return builder.build()


Specs = Sequence[ShardingSpec]
Shapes = Sequence[Shape]
Attributes = Mapping[str, Any]
Placed = tuple[halos.Specs, halos.Specs] | None


def _find_reaches(sizes: Sequence[int], attributes: Attributes) -> tuple[WindowReach, ...]:
    window = attributes["window"]
    own = sizes[len(sizes) - len(window) :]
    return find_reaches(own, window, attributes["strides"], attributes["padding"])


def _place(specs: Specs, shapes: Shapes, attributes: Attributes) -> Placed:
    reaches = _find_reaches(shapes[0], attributes)
    return halos.place_windows(specs, shapes, reaches, pooling(shapes, **attributes))


def _place_avg_back(specs: Specs, shapes: Shapes, attributes: Attributes) -> Placed:
    reaches = _find_reaches(attributes["sizes"], attributes)
    inferred = avg_pool_gradient(shapes, **attributes)
    return halos.place_elements_gradient(specs, shapes, reaches, inferred)


def _place_max_back(specs: Specs, shapes: Shapes, attributes: Attributes) -> Placed:
    reaches = _find_reaches(shapes[2], attributes)
    inferred = max_pool_gradient(shapes, **attributes)
    return halos.place_largest_gradient(specs, shapes, reaches, inferred)


def _row(name: str, infer: Infer, example: Example, **options: Any) -> Operator:
    return Operator(name, "windows", infer, example=example, **options)


_POOLED: Example = ([(2, 3, 8)], {"window": (2,)})
_BACK = {"window": (2,), "strides": (2,), "padding": ((0, 0),)}

OPERATORS: tuple[Operator, ...] = (
    _row(
        "max_pool",
        pooling,
        _POOLED,
        commutes=("max",),
        local=windows.max_pool,
        placed=_place,
        result_types=of_first,
        note=halos.NOTE,
    ),
    _row(
        "avg_pool",
        pooling,
        _POOLED,
        linear="each",
        local=windows.avg_pool,
        placed=_place,
        note=halos.NOTE,
    ),
    _row(
        "sum_pool",
        pooling,
        _POOLED,
        linear="each",
        note="space is whole on each device: windows reach into other parts",
    ),
    _row(
        "max_pool_gradient",
        max_pool_gradient,
        ([(2, 3, 4), (2, 3, 4), (2, 3, 8)], _BACK),
        linear=(0,),
        local=window_gradients.max_pool,
        placed=_place_max_back,
        result_types=of_first,
        note=halos.NOTE,
    ),
    _row(
        "avg_pool_gradient",
        avg_pool_gradient,
        ([(2, 3, 4)], {"sizes": (8,), **_BACK}),
        linear="each",
        local=window_gradients.avg_pool,
        placed=_place_avg_back,
        result_types=of_first,
        note=halos.NOTE,
    ),
)
