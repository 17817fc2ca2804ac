"""Convolution, pooling and cumulative operators: results that see neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.sharding import ShardingSpec
from reshard.spmd.local import reductions, windows
from reshard.spmd.local.local_work import has_plain_parts, part_lengths
from reshard.spmd.operators.operator import Example, Infer, Operator
from reshard.spmd.operators.result_types import of_first, total
from reshard.spmd.operators.work import of_product
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import axis_of, counted, kept, one_operand

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


def cumulative(
    shapes: Sequence[Shape],
    axis: int | None = None,
    include_initial: bool = False,
    parts: Sequence[int] | None = None,
) -> Inferred:
    """Running totals along an axis; one more element with the initial value.

    With lengths of parts, the totals begin anew at each: a device that has one part needs no other.

    >>> print(cumulative([(4, 8)], axis=1).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} permutation={j}
    >>> print(cumulative([(4, 8)], axis=1, parts=(3, 3, 2)).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8}
    """
    shape = one_operand("a cumulative operator", shapes)
    if axis is None and len(shape) != 1:
        raise SpecError(f"running totals of {shape} without an axis; say along which")
    place = axis_of(len(shape), axis or 0)
    if parts is not None:
        if include_initial or sum(parts) != shape[place]:
            raise SpecError(f"parts {tuple(parts)} of {shape[place]}; their sum must be that size")
        builder = RuleBuilder([shape], [shape])
        for dim in range(len(shape)):
            # `_begins_at_parts` tells whether a rank's part is one of those: only then may the axis
            # be cut.
            builder.factor([dim], [dim], adjusted=dim == place)
        return builder.build()
    result = (*shape[:place], shape[place] + bool(include_initial), *shape[place + 1 :])
    return kept(shape, result, moved=[] if result[place] == 1 else [place])


def _begins_at_parts(
    specs: Sequence[ShardingSpec], shapes: Sequence[Shape], attributes: Mapping[str, Any]
) -> bool:
    """Totals that begin anew where the ranks' parts do need nothing of other parts."""
    if attributes.get("parts") is None or not all(map(has_plain_parts, specs)):
        return False
    axis = attributes["axis"]
    return part_lengths(specs[0], axis, shapes[0][axis]) == tuple(attributes["parts"])


def _row(name: str, infer: Infer, example: Example, **options: Any) -> Operator:
    return Operator(name, "windows", infer, example=example, **options)


_POOLED: Example = ([(2, 3, 8)], {"window": (2,)})
_TOTALLED: Example = ([(4, 8)], {"axis": 1})
_SPACE = "space is whole on each device: windows reach into other parts"
_TOTALS = "totals of other parts are needed"

OPERATORS: tuple[Operator, ...] = (
    _row(
        "convolution",
        convolution,
        ([(2, 6, 8, 8), (10, 3, 3, 3)], {"groups": 2}),
        linear="one",
        local=windows.convolution,
        work=of_product,
        note=_SPACE,
    ),
    _row(
        "max_pool",
        pooling,
        _POOLED,
        commutes=("max",),
        local=windows.max_pool,
        result_types=of_first,
        note=_SPACE,
    ),
    _row("avg_pool", pooling, _POOLED, linear="each", local=windows.avg_pool, note=_SPACE),
    _row("sum_pool", pooling, _POOLED, linear="each", note=_SPACE),
    _row(
        "cumulative_sum",
        cumulative,
        _TOTALLED,
        linear="each",
        local=reductions.running_totals,
        knows_place=_begins_at_parts,
        result_types=total,
        note=_TOTALS,
    ),
    _row(
        "cumulative_prod",
        cumulative,
        _TOTALLED,
        commutes=("product",),
        local=reductions.running_totals,
        knows_place=_begins_at_parts,
        result_types=total,
        note=_TOTALS,
    ),
    _row("cumulative_max", cumulative, _TOTALLED, commutes=("max",), note=_TOTALS),
    _row("cumulative_min", cumulative, _TOTALLED, commutes=("min",), note=_TOTALS),
)
