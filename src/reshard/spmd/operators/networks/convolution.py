"""Convolution, and the operators of its gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.sharding import ShardingSpec
from reshard.spmd.local import window_gradients, windows
from reshard.spmd.local.window_reach import WindowReach, find_reaches
from reshard.spmd.operators.networks import halos
from reshard.spmd.operators.operator import Example, Infer, Operator
from reshard.spmd.operators.result_types import of_first
from reshard.spmd.operators.work import of_product
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import counted

Pairs = Sequence[Sequence[int]]


def window_sizes(
    sizes: Sequence[int],
    window: Sequence[int],
    strides: int | Sequence[int] = 1,
    padding: int | Pairs = 0,
    dilation: int | Sequence[int] = 1,
) -> Shape:
    """How many windows fit in each dimension.

    >>> window_sizes((8, 8), (3, 3), strides=2, padding=1)
    (4, 4)
    """
    count = len(sizes)
    steps = (strides,) * count if isinstance(strides, int) else tuple(strides)
    gaps = (dilation,) * count if isinstance(dilation, int) else tuple(dilation)
    ends = (
        ((padding, padding),) * count
        if isinstance(padding, int)
        else tuple((before, after) for before, after in padding)
    )
    if not len(window) == len(steps) == len(gaps) == len(ends) == count:
        raise SpecError(
            f"window {tuple(window)}, strides {steps}, padding {ends}, dilation {gaps} over "
            f"{tuple(sizes)}; give one of each per dimension"
        )
    found = []
    for size, wide, step, gap, (before, after) in zip(
        sizes, window, steps, gaps, ends, strict=True
    ):
        # From a window's first element to its last one.
        reach = gap * (wide - 1) + 1
        padded = size + before + after
        found.append((padded - reach) // step + 1 if padded >= reach else 0)
    return tuple(found)


def convolution(
    shapes: Sequence[Shape],
    strides: int | Sequence[int] = 1,
    padding: int | Pairs = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    batch_groups: int = 1,
) -> Inferred:
    """`[n, g c, *space], [g o, c, *window] -> [n, g o, *space]`; a bias is added afterwards.

    With `batch_groups` the batch is `[b n]` and the output channels `[b o]`.

    >>> print(convolution([(2, 6, 8), (10, 6, 3)]).rule)
    ([i, k, j], [l, k, m]) -> ([i, l, j]) {i=2, j=6, k=6, l=10, m=3}
    reduction={k} need_replication={m} permutation={j}
    """
    counted("convolution", shapes, 2)
    image, kernel = shapes
    space = len(image) - 2
    if space < 0 or len(kernel) != len(image):
        raise SpecError(f"convolution of {image} by {kernel}; ranks must be equal, and 2 or more")
    channels, outputs = image[1], kernel[0]
    fits = groups > 0 and batch_groups > 0 and 1 in (groups, batch_groups)
    if (
        not fits
        or kernel[1] * groups != channels
        or outputs % (groups * batch_groups)
        or image[0] % batch_groups
    ):
        raise SpecError(
            f"convolution of {', '.join(map(str, shapes))} in {groups} groups of channels and "
            f"{batch_groups} of the batch; channels and outputs must divide into them"
        )
    # The order of factors decides ties of propagation: groups of the batch, batch, space, channels,
    # outputs. A group is the major factor of each dimension that it is in.
    places = window_sizes(image[2:], kernel[2:], strides, padding, dilation)
    builder = RuleBuilder(shapes, [(image[0] // batch_groups, outputs, *places)])
    if batch_groups > 1:
        builder.factor([0, 0], [1], size=batch_groups)
    is_shared = image[0] != batch_groups or batch_groups == 1
    builder.factor([0] if is_shared else [], [0], size=image[0] // batch_groups)
    for dim in range(space):
        # Of the result's size: windows that step or reach over the end make the operand's another.
        builder.factor([2 + dim], [2 + dim], size=places[dim], kind="permutation")
    if groups > 1:
        builder.factor([1, 0], [1], size=groups)
        # A depthwise kernel has one channel a group: its dimension of size 1 has no factor to
        # share.
        inner = [None if kernel[1] == 1 else 1, 1]
        builder.factor(inner, size=kernel[1], kind="reduction")
    else:
        builder.factor([1, 1], size=channels, kind="reduction")
    own = outputs // (groups * batch_groups)
    if own != 1 or groups * batch_groups == 1:
        builder.factor([None, 0], [1], size=own)
    return builder.build()


def convolution_input_gradient(
    shapes: Sequence[Shape],
    sizes: Sequence[int],
    strides: Sequence[int],
    padding: Pairs,
    dilation: Sequence[int],
    groups: int,
) -> Inferred:
    """The cotangent of the input `[n, g c, *sizes]`, from that of the result and the kernel.

    >>> shapes, options = [(2, 10, 6), (10, 6, 3)], {"padding": ((0, 0),), "groups": 1}
    >>> print(convolution_input_gradient(shapes, (8,), (1,), dilation=(1,), **options).rule)
    ([i, k, j], [k, l, m]) -> ([i, l, j]) {i=2, j=8, k=10, l=6, m=3}
    reduction={k} need_replication={m} permutation={j}
    """
    counted("convolution_input_gradient", shapes, 2)
    g, kernel = shapes
    each, own = kernel[1], kernel[0] // groups
    builder = RuleBuilder(shapes, [(g[0], groups * each, *sizes)])
    builder.factor([0], [0], size=g[0])
    for dim, size in enumerate(sizes, 2):
        builder.factor([dim], [dim], size=size, kind="permutation")
    if groups > 1:
        builder.factor([1, 0], [1], size=groups)
    if own != 1 or groups == 1:
        builder.factor([1, 0], size=own, kind="reduction")
    if each != 1 or groups == 1:
        builder.factor([None, 1], [1], size=each)
    return builder.build()


def convolution_kernel_gradient(
    shapes: Sequence[Shape],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Pairs,
    dilation: Sequence[int],
    groups: int,
) -> Inferred:
    """The cotangent of the kernel `[g o, c, *window]`, from the input and that of the result.

    >>> shapes, options = [(2, 6, 8), (2, 10, 6)], {"padding": ((0, 0),), "groups": 1}
    >>> print(convolution_kernel_gradient(shapes, (3,), (1,), dilation=(1,), **options).rule)
    ([i, k, l], [i, j, l]) -> ([j, k, m]) {i=2, j=10, k=6, l=6, m=3}
    reduction={i} need_replication={m} permutation={l}
    """
    counted("convolution_kernel_gradient", shapes, 2)
    x, g = shapes
    each, own = x[1] // groups, g[1] // groups
    builder = RuleBuilder(shapes, [(g[1], each, *window)])
    builder.factor([0, 0], size=x[0], kind="reduction")
    if groups > 1:
        builder.factor([1, 1], [0], size=groups)
    if own != 1 or groups == 1:
        builder.factor([None, 1], [0], size=own)
    if each != 1 or groups == 1:
        builder.factor([1], [1], size=each)
    for dim, size in enumerate(window, 2):
        # Space may stay cut, as edges of other parts are there: see `halos`.
        builder.factor([dim, dim], size=g[dim], kind="permutation")
        builder.factor([], [dim], size=size, kind="need_replication")
    return builder.build()


Specs = Sequence[ShardingSpec]
Shapes = Sequence[Shape]
Attributes = Mapping[str, Any]
Placed = tuple[halos.Specs, halos.Specs] | None


def _find_reaches(
    sizes: Sequence[int], window: Sequence[int], attributes: Attributes
) -> tuple[WindowReach, ...]:
    names = "strides", "padding", "dilation"
    return find_reaches(sizes, window, *(attributes[name] for name in names))


def _place(specs: Specs, shapes: Shapes, attributes: Attributes) -> Placed:
    reaches = _find_reaches(shapes[0][2:], shapes[1][2:], attributes)
    return halos.place_windows(specs, shapes, reaches, convolution(shapes, **attributes))


def _place_input_gradient(specs: Specs, shapes: Shapes, attributes: Attributes) -> Placed:
    reaches = _find_reaches(attributes["sizes"], shapes[1][2:], attributes)
    inferred = convolution_input_gradient(shapes, **attributes)
    return halos.place_elements_gradient(specs, shapes, reaches, inferred)


def _place_kernel_gradient(specs: Specs, shapes: Shapes, attributes: Attributes) -> Placed:
    reaches = _find_reaches(shapes[0][2:], attributes["window"], attributes)
    inferred = convolution_kernel_gradient(shapes, **attributes)
    return halos.place_kernel_gradient(specs, shapes, reaches, inferred)


def _row(name: str, infer: Infer, example: Example, **options: Any) -> Operator:
    return Operator(
        name, "windows", infer, linear="one", work=of_product, example=example, **options
    )


_BACK = {"strides": (1, 1), "padding": ((1, 1), (0, 0)), "dilation": (1, 1), "groups": 2}

OPERATORS: tuple[Operator, ...] = (
    _row(
        "convolution",
        convolution,
        ([(2, 6, 8, 8), (10, 3, 3, 3)], {"groups": 2}),
        local=windows.convolution,
        placed=_place,
        note=halos.NOTE,
    ),
    _row(
        "convolution_input_gradient",
        convolution_input_gradient,
        ([(2, 10, 8, 6), (10, 3, 3, 3)], {"sizes": (8, 8), **_BACK}),
        local=window_gradients.convolution_input,
        placed=_place_input_gradient,
        result_types=of_first,
        note=halos.NOTE,
    ),
    _row(
        "convolution_kernel_gradient",
        convolution_kernel_gradient,
        ([(2, 6, 8, 8), (2, 10, 8, 6)], {"window": (3, 3), **_BACK}),
        local=window_gradients.convolution_kernel,
        placed=_place_kernel_gradient,
        result_types=of_first,
        note="each part of the windows has a contribution",
    ),
)
