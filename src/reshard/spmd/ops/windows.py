"""Convolution and pooling, whose windows move over the last dimensions.

Batch, channels and space may stay sharded: ranks get the edges of other parts that their windows
see (`halos`).

A convolution is a sum of matrix products, one for each position in its window, of the input shifted
by that position. This needs no copies of the input. Gradients iterate over the same positions.
Cotangents of elements are added up over the span of a rank's windows, including padding; the rank's
own elements are then sliced from the span.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from reshard._validation import check_int
from reshard.errors import SpecError, UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.core.backend import Library
from reshard.spmd.core.local_work import Function, LocalWork, Stretch
from reshard.spmd.core.operator import Example, Placed, TapeStep, of_product, operators, ship
from reshard.spmd.core.result_types import kind_of, of_first
from reshard.spmd.ops import elementwise as e
from reshard.spmd.ops import halos
from reshard.spmd.ops.arguments import has_entries, of_arrays, whole_numbers, whole_pairs
from reshard.spmd.ops.elementwise import operands, where
from reshard.spmd.ops.halos import Edges, WindowReach
from reshard.spmd.ops.movement import pad, take_ranges
from reshard.spmd.rules import rule_builder as rules
from reshard.spmd.rules.rule_builder import Inferred, Shape
from reshard.spmd.shards.operation_call import call

Sizes = int | Sequence[int]
Padding = int | Sequence[Sequence[int]]
Pads = Sequence[Sequence[int]]
Shapes = Sequence[Shape]
Attributes = Mapping[str, Any]
_POOLED: Example = ([(2, 3, 8)], {"window": (2,)})
_POOL_BACK = {"window": (2,), "strides": (2,), "padding": ((0, 0),)}
FindReaches = Callable[[Sequence[int], Sequence[int]], tuple[WindowReach, ...]]
"""From the sizes of space and of the window to the windows over each dimension."""

Ranges = list[tuple[int, int, int]]


def slice_windows(
    counts: Sequence[int], window: Sequence[int], steps: Sequence[int], gaps: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield the positions in a window, with the slices of the elements at each position."""
    for places in itertools.product(*map(range, window)):
        # Without windows the slice must be empty; its computed end would be negative.
        yield (
            places,
            tuple(
                slice(place * gap, place * gap + (count - 1) * step + 1 if count else 0, step)
                for count, place, step, gap in zip(counts, places, steps, gaps, strict=True)
            ),
        )


def _on_edges(
    work: LocalWork,
    window: Sequence[int],
    find: FindReaches,
    make: Callable[[Callable[[Any], Edges]], Function],
) -> list[Function]:
    """Return a function for each rank, made from the edges of its elements."""
    first = work.operands[0]
    count = len(window)
    if not work.result_specs or first is None or first.spec is None:
        # Nothing is sharded.
        return [make(lambda x: halos.whole_edges(find(x.shape[len(x.shape) - count :], window)))]
    reaches = find(first.shape[first.ndim - count :], window)

    def make_here(windows: Sequence[Stretch], held: Sequence[Stretch]) -> Function:
        edges = halos.find_edges(reaches, windows, held)
        return make(lambda x: edges)

    result_stretches = halos.stretches_of_space(work, 0, count, of_result=True)
    return list(map(make_here, result_stretches, halos.stretches_of_space(work, 0, count)))


register = partial(ship, family="windows")
_register_product = partial(register, linear="one", work=of_product)


@of_arrays
def convolution(
    x: Any,
    kernel: Any,
    /,
    *,
    strides: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Any:
    """Convolve `[n, g c, *space]` with `[g o, c, *window]`, which gives `[n, g o, *space]`.

    Channels may be sharded: sharded input channels give a pending sum, and sharded output channels
    a sharded result. Spatial dimensions may be sharded, too: halos are exchanged.
    """
    x, kernel = operands(x, kernel)
    count = x.ndim - 2
    if count < 0 or kernel.ndim != x.ndim:
        raise SpecError(
            f"convolution of shapes {list(x.shape)} and {list(kernel.shape)}; as many dimensions "
            "were expected: [n, channels, *space] and [outputs, channels, *window]"
        )
    attributes = {
        "strides": whole_numbers("strides", strides, count, 1),
        "padding": whole_pairs("padding", padding, count),
        "dilation": whole_numbers("dilation", dilation, count, 1),
        "groups": check_int(groups, "groups", minimum=1),
    }
    return call("convolution", (x, kernel), attributes)


def window_sizes(
    sizes: Sequence[int],
    window: Sequence[int],
    strides: int | Sequence[int] = 1,
    padding: int | Pads = 0,
    dilation: int | Sequence[int] = 1,
) -> Shape:
    """Return the number of windows that fit in each dimension.

    >>> window_sizes((8, 8), (3, 3), strides=2, padding=1)
    (4, 4)
    """
    count = len(sizes)
    steps = (strides,) * count if isinstance(strides, int) else tuple(strides)
    gaps = (dilation,) * count if isinstance(dilation, int) else tuple(dilation)
    pairs = [(padding, padding)] * count if isinstance(padding, int) else padding
    ends = [(before, after) for before, after in pairs]
    if not len(window) == len(steps) == len(gaps) == len(ends) == count:
        raise SpecError(
            f"window {tuple(window)}, strides {steps}, padding {ends}, dilation {gaps} over "
            f"{tuple(sizes)}; give one of each per dimension"
        )
    return tuple(reach.count for reach in halos.find_reaches(sizes, window, steps, ends, gaps))


def _convolution_rule(
    shapes: Sequence[Shape],
    strides: int | Sequence[int] = 1,
    padding: int | Pads = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    batch_groups: int = 1,
) -> Inferred:
    """Infer `[n, g c, *space], [g o, c, *window] -> [n, g o, *space]`. A bias comes later.

    With `batch_groups` the batch is `[b n]` and the output channels `[b o]`.

    >>> print(_convolution_rule([(2, 6, 8), (10, 6, 3)]).rule)
    ([i, k, j], [l, k, m]) -> ([i, l, j]) {i=2, j=6, k=6, l=10, m=3}
    reduction={k} need_replication={m} permutation={j}
    """
    rules.counted("convolution", shapes, 2)
    image, kernel = shapes
    space = len(image) - 2
    if space < 0 or len(kernel) != len(image):
        raise SpecError(f"convolution of {image} by {kernel}; ranks must be equal, and 2 or more")
    channels, outputs = image[1], kernel[0]
    # StableHLO allows groups of channels or groups of the batch, but not both.
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
    places = window_sizes(image[2:], kernel[2:], strides, padding, dilation)
    sizes = {
        "b": batch_groups,
        "n": image[0] // batch_groups,
        "g": groups,
        "c": kernel[1],
        "o": outputs // (groups * batch_groups),
        # Of the results' sizes; strides and padding make the operand's sizes differ.
        **{f"s{dim}": size for dim, size in enumerate(places)},
    }
    # A group is the major factor of each dimension that it is in. A depthwise kernel has a
    # channel per group: its dimension of size 1 has no factor to share.
    batch = _name_factors("b", "n", sizes)
    inputs = "g" if groups > 1 and sizes["c"] == 1 else _name_factors("g", "c", sizes)
    outs = "b" * (batch_groups > 1) + "g" * (groups > 1) + "o" * (sizes["o"] != 1)
    pattern = f"{batch} {inputs} *s, {outs or 'o'} c *_ -> n {outs or 'o'} *s"
    # The order of factors decides ties of propagation.
    return rules.from_pattern(pattern, shapes, order="bnsgco", sizes=sizes, reduced="c", moved="s")


def _name_factors(groups: str, each: str, sizes: Mapping[str, int]) -> str:
    """Return the factors of a dimension of groups; a factor of size 1 is left to the other."""
    if sizes[groups] == 1:
        return each
    return groups if sizes[each] == 1 else groups + each


def _reaches_of_convolution(
    sizes: Sequence[int], window: Sequence[int], attributes: Attributes
) -> tuple[WindowReach, ...]:
    names = "strides", "padding", "dilation"
    return halos.find_reaches(sizes, window, *(attributes[name] for name in names))


def _placed(
    name: str,
    find: Callable[[Shapes, Attributes], tuple[WindowReach, ...]],
    place: Callable[..., Any],
) -> Placed:
    """Return the function that shards space where windows need halos.

    Args:
        name: of the operator.
        find: from the operands' shapes and the attributes to the windows over each dimension.
        place: a function of `halos`.
    """

    def placed(specs: Sequence[ShardingSpec], shapes: Shapes, attributes: Attributes) -> Any:
        # The rule is cached by the operator: a search by cost asks for many shardings of the same.
        inferred = operators[name].inferred(shapes, **attributes)
        return place(specs, shapes, find(shapes, attributes), inferred)

    return placed


def _convolution_kernel(work: LocalWork) -> list[Function]:
    """Return a kernel for the convolution of a rank's channels."""
    library, space = work.library, work.library.namespace
    strides, padding = work.attributes["strides"], work.attributes["padding"]
    dilation = work.attributes["dilation"]
    kernel_type = work.operands[1]
    window = () if kernel_type is None else kernel_type.shape[2:]

    def find(sizes: Sequence[int], window: Sequence[int]) -> tuple[WindowReach, ...]:
        return halos.find_reaches(sizes, window, strides, padding, dilation)

    def make(edges_of: Callable[[Any], Edges]) -> Function:
        def function(x: Any, kernel: Any) -> Any:
            x = edges_of(x).apply(library, x)
            # The edges have the padding already.
            counts = window_sizes(x.shape[2:], window, strides, 0, dilation)
            outputs, each = kernel.shape[:2]
            # Groups are counted by both operands, because a rank may have only some of them.
            groups = x.shape[1] // each if each else 1
            # A rank without channels of the sum contributes zeros.
            result = library.filled((x.shape[0], outputs, *counts), 0, x)
            # Nothing is added, but all ranks have to record the same gradients.
            if 0 in (*result.shape, groups, each):
                return library.linked(library.linked(result, x), kernel)
            # [groups, outputs a group, channels a group, *window]
            weights = kernel.reshape((groups, outputs // groups, each, *window))
            pixels = math.prod(counts)
            for places, slices in slice_windows(counts, window, strides, dilation):
                # [batch, groups, channels a group, pixels], so that matmul is a product per group.
                part = x[(..., *slices)].reshape((x.shape[0], groups, each, pixels))
                product = space.matmul(weights[(..., *places)], part)
                result = result + product.reshape(result.shape)
            return result

        return function

    return _on_edges(work, window, find, make)


def _pull_convolution(step: TapeStep, g: Any, number: int) -> Any:
    x, kernel = step.operands
    if number == 0:
        return _find_input(g, kernel, step, x.shape[2:])
    return _find_kernel(x, g, step, kernel.shape[2:])


def _call_convolution(name: str, first: Any, second: Any, step: TapeStep, **sizes: Any) -> Any:
    names = "strides", "padding", "dilation", "groups"
    shared = {key: step.attributes[key] for key in names}
    return call(name, (first, second), {**sizes, **shared})


def _find_input(g: Any, kernel: Any, step: TapeStep, sizes: Sequence[int]) -> Any:
    return _call_convolution("convolution_input_gradient", g, kernel, step, sizes=tuple(sizes))


def _find_kernel(x: Any, g: Any, step: TapeStep, window: Sequence[int]) -> Any:
    return _call_convolution("convolution_kernel_gradient", x, g, step, window=tuple(window))


_register_product(
    "convolution",
    _convolution_rule,
    ([(2, 6, 8, 8), (10, 3, 3, 3)], {"groups": 2}),
    local=_convolution_kernel,
    placed=_placed(
        "convolution",
        lambda shapes, own: _reaches_of_convolution(shapes[0][2:], shapes[1][2:], own),
        halos.place_windows,
    ),
    note=halos.NOTE,
    pullback=_pull_convolution,
)

_BACK = {"strides": (1, 1), "padding": ((1, 1), (0, 0)), "dilation": (1, 1), "groups": 2}


def _input_gradient_rule(
    shapes: Sequence[Shape],
    sizes: Sequence[int],
    strides: Sequence[int],
    padding: Pads,
    dilation: Sequence[int],
    groups: int,
) -> Inferred:
    """Infer the cotangent of the input `[n, g c, *sizes]` from the result's and the kernel.

    >>> shapes, options = [(2, 10, 6), (10, 6, 3)], {"padding": ((0, 0),), "groups": 1}
    >>> print(_input_gradient_rule(shapes, (8,), (1,), dilation=(1,), **options).rule)
    ([i, k, j], [k, l, m]) -> ([i, l, j]) {i=2, j=8, k=10, l=6, m=3}
    reduction={k} need_replication={m} permutation={j}
    """
    rules.counted("convolution_input_gradient", shapes, 2)
    outputs, each = shapes[1][:2]
    factor_sizes = {"g": groups, "o": outputs // groups, "c": each}
    outs, inputs = (
        _name_factors("g", "o", factor_sizes),
        _name_factors("g", "c", factor_sizes),
    )
    pattern = f"n {outs} *s, {outs} {'c' if 'c' in inputs else '_'} *_ -> n {inputs} *s"
    factor_sizes |= {f"s{dim}": size for dim, size in enumerate(sizes)}
    return rules.from_pattern(
        pattern, shapes, order="nsgoc", sizes=factor_sizes, reduced="o", moved="s"
    )


@dataclass(frozen=True)
class _Span:
    """A rank's part of the cotangent of elements, in each spatial dimension.

    Args:
        taken: the slices of the rank's windows that see its elements.
        counts: the numbers of these windows.
        lengths: the lengths of the span of these windows.
        inside: the slices of the span that are elements of the rank.
        own: the slices of these elements among the rank's elements.
        shape: the numbers of the rank's elements.
    """

    taken: tuple[slice, ...]
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    inside: tuple[slice, ...]
    own: tuple[slice, ...]
    shape: tuple[int, ...]

    def take_out(self, library: Library, spanned: Any) -> Any:
        """Return the rank's elements of a span, with zeros that no window sees."""
        lead = spanned.shape[: len(spanned.shape) - len(self.shape)]
        elements = library.filled((*lead, *self.shape), 0, spanned)
        elements[(..., *self.own)] = spanned[(..., *self.inside)]
        return elements


def _find_span(
    reaches: Sequence[WindowReach], elements: Sequence[Stretch], held: Sequence[Stretch]
) -> _Span:
    columns: list[tuple[Any, ...]] = []
    for reach, (low, high), (first, _) in zip(reaches, elements, held, strict=True):
        if reach.is_still:
            size = high - low
            columns.append((slice(None), size, size, slice(None), slice(None), size))
            continue
        windows = reach.seeing((low, high))
        start, stop = reach.spanned_by(windows)
        a, b = max(low, start), min(high, stop)
        # Elements outside the span give an empty interval, whose stop would be before its start.
        b = max(a, b)
        # Without windows, a start below 0 would count from the end.
        taken = slice(windows[0] - first, windows[1] - first) if stop > start else slice(0, 0)
        columns.append(
            (
                taken,
                windows[1] - windows[0],
                stop - start,
                slice(a - start, b - start),
                slice(a - low, b - low),
                high - low,
            )
        )
    # `zip` of no columns has nothing to unpack.
    return _Span(*zip(*columns, strict=True)) if columns else _Span((), (), (), (), (), ())


def _find_places(
    work: LocalWork, reaches: Sequence[WindowReach], elements: int | None
) -> list[tuple[_Span, Edges]]:
    """Return for each rank here the span that it computes, and the edges of its elements.

    Args:
        work: an operation whose first operand has windows, and whose result has elements.
        reaches: the windows over each dimension.
        elements: the number of another operand that has elements, or None.
    """
    count = len(reaches)
    stretches = [[(0, reach.size) for reach in reaches]]
    held = [[(0, reach.count) for reach in reaches]]
    seen = stretches
    first = work.operands[0]
    if work.result_specs and first is not None and first.spec is not None:
        stretches = halos.stretches_of_space(work, 0, count, of_result=True)
        held = halos.stretches_of_space(work, 0, count)
        seen = stretches if elements is None else halos.stretches_of_space(work, elements, count)
    places = []
    for own, windows, others in zip(stretches, held, seen, strict=True):
        asked = [reach.seeing(stretch) for reach, stretch in zip(reaches, own, strict=True)]
        places.append((_find_span(reaches, own, windows), halos.find_edges(reaches, asked, others)))
    return places


def _input_gradient_kernel(work: LocalWork) -> list[Function]:
    """Return kernels for the input's cotangent, from the result's cotangent and the kernel."""
    library, space = work.library, work.library.namespace
    options = work.attributes
    strides, dilation = options["strides"], options["dilation"]
    kernel_type = work.operands[1]
    each, *window = (0,) if kernel_type is None else kernel_type.shape[1:]
    reaches = halos.find_reaches(options["sizes"], window, strides, options["padding"], dilation)
    # A rank may have the channels of only some groups.
    shapes = work.result_shapes_here((0, each * options["groups"]))

    def make(span: _Span, wide: int) -> Function:
        def function(g: Any, kernel: Any) -> Any:
            g = g[(..., *span.taken)]
            outputs, each = kernel.shape[:2]
            groups = wide // each if each else 1
            spanned = library.filled((g.shape[0], wide, *span.lengths), 0, g)
            if 0 not in (*g.shape, groups, each, outputs):
                weights = kernel.reshape((groups, outputs // groups, each, *window))
                g = g.reshape((g.shape[0], groups, outputs // groups, math.prod(span.counts)))
                for places, slices in slice_windows(span.counts, window, strides, dilation):
                    turned = space.matrix_transpose(weights[(..., *places)])
                    product = space.matmul(turned, g)
                    # The elements of a slice differ, so `+=` adds to each of them once.
                    spanned[(..., *slices)] += product.reshape((g.shape[0], wide, *span.counts))
            return library.linked(library.linked(span.take_out(library, spanned), g), kernel)

        return function

    places = _find_places(work, reaches, None)
    return [make(span, shape[1]) for (span, _), shape in zip(places, shapes, strict=True)]


# Each of the three operators is linear in both operands, and is pulled back by the other two.
def _pull_input_gradient(step: TapeStep, cotangent: Any, number: int) -> Any:
    g, kernel = step.operands
    if number == 0:
        return _call_convolution("convolution", cotangent, kernel, step)
    return _find_kernel(cotangent, g, step, kernel.shape[2:])


_register_product(
    "convolution_input_gradient",
    _input_gradient_rule,
    ([(2, 10, 8, 6), (10, 3, 3, 3)], {"sizes": (8, 8), **_BACK}),
    local=_input_gradient_kernel,
    placed=_placed(
        "convolution_input_gradient",
        lambda shapes, own: _reaches_of_convolution(own["sizes"], shapes[1][2:], own),
        halos.place_elements_gradient,
    ),
    result_types=of_first,
    note=halos.NOTE,
    pullback=_pull_input_gradient,
)


def _kernel_gradient_rule(
    shapes: Sequence[Shape],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Pads,
    dilation: Sequence[int],
    groups: int,
) -> Inferred:
    """Infer the cotangent of the kernel `[g o, c, *window]` from the input and the result's.

    >>> shapes, options = [(2, 6, 8), (2, 10, 6)], {"padding": ((0, 0),), "groups": 1}
    >>> print(_kernel_gradient_rule(shapes, (3,), (1,), dilation=(1,), **options).rule)
    ([i, k, l], [i, j, l]) -> ([j, k, m]) {i=2, j=10, k=6, l=6, m=3}
    reduction={i} need_replication={m} permutation={l}
    """
    rules.counted("convolution_kernel_gradient", shapes, 2)
    x, g = shapes
    factor_sizes = {"g": groups, "o": g[1] // groups, "c": x[1] // groups}
    outs, inputs = (
        _name_factors("g", "o", factor_sizes),
        _name_factors("g", "c", factor_sizes),
    )
    pattern = f"n {inputs} *s, n {outs} *s -> {outs} {'c' if 'c' in inputs else '_'} *w"
    # Space may stay sharded, because ranks get the edges of other parts: see `halos`.
    factor_sizes |= {f"s{dim}": size for dim, size in enumerate(g[2:])}
    factor_sizes |= {f"w{dim}": size for dim, size in enumerate(window)}
    return rules.from_pattern(
        pattern,
        shapes,
        [(g[1], x[1] // groups, *window)],
        order="ngocsw",
        lengths={"w": len(window)},
        sizes=factor_sizes,
        reduced="n",
        whole="w",
        moved="s",
    )


def _kernel_gradient_kernel(work: LocalWork) -> list[Function]:
    """Return kernels for the cotangent of the kernel, from the input and the result's cotangent."""
    library, space = work.library, work.library.namespace
    options = work.attributes
    strides, dilation, window = options["strides"], options["dilation"], options["window"]
    count = len(window)
    x_type = work.operands[0]
    sizes = () if x_type is None else x_type.shape[2:]
    reaches = halos.find_reaches(sizes, window, strides, options["padding"], dilation)
    held = [[(0, reach.size) for reach in reaches]]
    windows = [[(0, reach.count) for reach in reaches]]
    # None for the few elements that determine the results' types.
    shapes: list[Any] = [None]
    if work.result_specs and x_type is not None and x_type.spec is not None:
        held, windows = (halos.stretches_of_space(work, number, count) for number in (0, 1))
        shapes = list(work.result_shapes_here(()))

    def make(edges: Edges, shape: Any) -> Function:
        def function(x: Any, g: Any) -> Any:
            outputs = g.shape[1]
            # A rank may have the channels of only some groups: their size then follows from the
            # result's shape.
            each = x.shape[1] // options["groups"] if shape is None else shape[1]
            groups = x.shape[1] // each if each else 1
            if 0 in (*x.shape, *g.shape, groups):
                zeros = library.filled((outputs, each, *window), 0, g)
                return library.linked(library.linked(zeros, x), g)
            x = edges.apply(library, x)
            counts = g.shape[2:]
            pixels = x.shape[0] * math.prod(counts)
            # [groups, outputs a group, batch and pixels]
            g = space.moveaxis(g, 0, 1).reshape((groups, outputs // groups, pixels))
            products = []
            for _, slices in slice_windows(counts, window, strides, dilation):
                part = space.moveaxis(x[(..., *slices)], 0, 1).reshape((groups, each, pixels))
                products.append(space.matmul(g, space.matrix_transpose(part)))
            return space.stack(products, axis=-1).reshape((outputs, each, *window))

        return function

    return [
        make(halos.find_edges(reaches, some, elements), shape)
        for some, elements, shape in zip(windows, held, shapes, strict=True)
    ]


def _pull_kernel_gradient(step: TapeStep, cotangent: Any, number: int) -> Any:
    x, g = step.operands
    if number == 0:
        return _find_input(g, cotangent, step, x.shape[2:])
    return _call_convolution("convolution", x, cotangent, step)


_register_product(
    "convolution_kernel_gradient",
    _kernel_gradient_rule,
    ([(2, 6, 8, 8), (2, 10, 8, 6)], {"window": (3, 3), **_BACK}),
    local=_kernel_gradient_kernel,
    placed=_placed(
        "convolution_kernel_gradient",
        lambda shapes, own: _reaches_of_convolution(shapes[0][2:], own["window"], own),
        halos.place_kernel_gradient,
    ),
    result_types=of_first,
    note="each part of the windows has a contribution",
    pullback=_pull_kernel_gradient,
)


@of_arrays
def max_pool(
    x: Any, /, window: Sequence[int], *, strides: Sizes | None = None, padding: Padding = 0
) -> Any:
    """Compute the maximum of each window over the last dimensions."""
    return _call_pool("max_pool", x, window, strides, padding)


@of_arrays
def avg_pool(
    x: Any, /, window: Sequence[int], *, strides: Sizes | None = None, padding: Padding = 0
) -> Any:
    """Compute the mean of each window over the last dimensions; padding counts as zeros."""
    return _call_pool("avg_pool", x, window, strides, padding)


def _call_pool(
    name: str, x: Any, window: Sequence[int], strides: Sizes | None, padding: Padding
) -> Any:
    if not hasattr(window, "__len__") or not has_entries(window):
        raise UsageError(f"window {window!r}; give a size for each dimension that it moves over")
    if kind_of(x.dtype) == "complex floating" and name == "max_pool":
        raise UsageError(f"max_pool of {x.dtype}: complex numbers have no order; take real or abs")
    count = len(window)
    sizes = whole_numbers("window", window, count, 1)
    attributes = {
        "window": sizes,
        "strides": sizes if strides is None else whole_numbers("strides", strides, count, 1),
        "padding": whole_pairs("padding", padding, count),
    }
    return call(name, (x,), attributes)


def _pooling_rule(
    shapes: Sequence[Shape],
    window: Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: int | Pads = 0,
    dilation: int | Sequence[int] = 1,
) -> Inferred:
    """Infer a window over the last dimensions, with strides of its own size when not given.

    >>> print(_pooling_rule([(2, 3, 8, 8)], window=(2, 2)).rule)
    ([i, j, k, l]) -> ([i, j, k, l]) {i=2, j=3, k=4, l=4} permutation={k, l}
    """
    shape = rules.one_operand("pooling", shapes)
    lead = len(shape) - len(window)
    if lead < 0:
        raise SpecError(f"window {tuple(window)} over {shape}; it has more dimensions")
    steps = tuple(window) if strides is None else strides
    places = window_sizes(shape[lead:], window, steps, padding, dilation)
    return _infer_windows([shape], places, window, steps, padding)


def _infer_windows(
    shapes: Sequence[Shape],
    sizes: Sequence[int],
    window: Sequence[int],
    strides: int | Sequence[int],
    padding: int | Pads,
) -> Inferred:
    """Infer a result whose last dimensions have these sizes: of windows, or of elements."""
    dims, lead = range(len(shapes[0])), len(shapes[0]) - len(window)
    # Windows of a single element need no neighbours.
    moved = [lead + n for n in range(len(window)) if not _is_still(n, window, strides, padding)]
    return rules.from_dims(
        [dims] * len(shapes), [dims], shapes, sizes=dict(enumerate(sizes, lead)), moved=moved
    )


def _is_still(
    dim: int, window: Sequence[int], strides: int | Sequence[int], padding: int | Pads
) -> bool:
    """Return whether windows are single elements that leave a dimension unchanged."""
    step = strides if isinstance(strides, int) else strides[dim]
    ends = (padding,) if isinstance(padding, int) else padding[dim]
    return window[dim] == 1 and step == 1 and not any(ends)


def _reaches_of_pooling(sizes: Sequence[int], attributes: Attributes) -> tuple[WindowReach, ...]:
    window = attributes["window"]
    own = sizes[len(sizes) - len(window) :]
    return halos.find_reaches(own, window, attributes["strides"], attributes["padding"])


def _pool_kernel(
    work: LocalWork, combine: Function, padding_of: Callable[[Any], float]
) -> list[Function]:
    library, window = work.library, work.attributes["window"]
    strides, padding = work.attributes["strides"], work.attributes["padding"]

    def find(sizes: Sequence[int], window: Sequence[int]) -> tuple[WindowReach, ...]:
        return halos.find_reaches(sizes, window, strides, padding)

    def make(edges_of: Callable[[Any], Edges]) -> Function:
        def function(x: Any) -> Any:
            lead = len(x.shape) - len(window)
            x = edges_of(x).apply(library, x, padding_of(x))
            gaps = (1,) * len(window)
            counts = window_sizes(x.shape[lead:], window, strides)
            # The first position is the start, so that no identity of the type is needed.
            pooled: Any = None
            for _, slices in slice_windows(counts, window, strides, gaps):
                part = x[(..., *slices)]
                pooled = part if pooled is None else combine(pooled, part)
            return pooled

        return function

    return _on_edges(work, window, find, make)


def _avg_pool_kernel(work: LocalWork) -> list[Function]:
    """Return kernels for the mean of each window over the last dimensions; padding counts as 0."""
    # All positions of a window count, including the padding.
    count = math.prod(work.attributes["window"])
    pools = _pool_kernel(work, work.library.namespace.add, lambda x: 0)
    return [lambda x, pool=pool: pool(x) / count for pool in pools]


def find_least(library: Library, x: Any) -> float:
    """Return the minimum of an array's type, which is the identity of `maximum`."""
    name = library.dtype_of(x).name
    return int(np.iinfo(name).min) if "int" in name else -math.inf


def _pull_max_pool(step: TapeStep, g: Any, number: int) -> Any:
    (x,) = step.operands
    return call("max_pool_gradient", (g, step.result, x), _pooling(step))


def _pull_avg_pool(step: TapeStep, g: Any, number: int) -> Any:
    (x,) = step.operands
    options = _pooling(step)
    sizes = x.shape[x.ndim - len(options["window"]) :]
    return call("avg_pool_gradient", (g,), {"sizes": sizes, **options})


def _pooling(step: TapeStep) -> dict[str, Any]:
    return {name: step.attributes[name] for name in ("window", "strides", "padding")}


register(
    "max_pool",
    _pooling_rule,
    _POOLED,
    commutes=("max",),
    local=lambda work: _pool_kernel(
        work, work.library.namespace.maximum, lambda x: find_least(work.library, x)
    ),
    placed=_placed(
        "max_pool", lambda shapes, own: _reaches_of_pooling(shapes[0], own), halos.place_windows
    ),
    result_types=of_first,
    note=halos.NOTE,
    pullback=_pull_max_pool,
)

register(
    "avg_pool",
    _pooling_rule,
    _POOLED,
    linear="each",
    local=_avg_pool_kernel,
    placed=_placed(
        "avg_pool", lambda shapes, own: _reaches_of_pooling(shapes[0], own), halos.place_windows
    ),
    note=halos.NOTE,
    pullback=_pull_avg_pool,
)

register(
    "sum_pool",
    _pooling_rule,
    _POOLED,
    linear="each",
    note="space is whole on each device: windows reach into other parts",
    no_pullback="it stands in other programs' graphs, and no rank computes it",
)


def _max_gradient_rule(
    shapes: Sequence[Shape], window: Sequence[int], strides: Sequence[int], padding: Pads
) -> Inferred:
    """Infer the pooled array's cotangent from the maxima's cotangent, the maxima and the array."""
    rules.counted("max_pool_gradient", shapes, 3)
    sizes = shapes[2][len(shapes[2]) - len(window) :]
    return _infer_windows(shapes, sizes, window, strides, padding)


def _avg_gradient_rule(
    shapes: Sequence[Shape],
    sizes: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Pads,
) -> Inferred:
    """Infer the cotangent of the pooled array `[..., *sizes]` from the cotangent of the means."""
    shape = rules.one_operand("avg_pool_gradient", shapes)
    return _infer_windows([shape], sizes, window, strides, padding)


def _max_gradient_kernel(work: LocalWork) -> list[Function]:
    """Return kernels for the pooled array's cotangent, from the maxima's cotangent.

    The other operands are the maxima and the array. The first of equal elements gets all of the
    cotangent.
    """
    library, space, options = work.library, work.library.namespace, work.attributes
    window, strides = options["window"], options["strides"]
    pooled = work.operands[2]
    sizes = () if pooled is None else pooled.shape[pooled.ndim - len(window) :]
    reaches = halos.find_reaches(sizes, window, strides, options["padding"])
    ones = (1,) * len(window)

    def make(span: _Span, edges: Edges) -> Function:
        def function(g: Any, greatest: Any, x: Any) -> Any:
            g, greatest = (array[(..., *span.taken)] for array in (g, greatest))
            padded = edges.apply(library, x, find_least(library, x))
            lead = g.shape[: len(g.shape) - len(window)]
            spanned = library.filled((*lead, *span.lengths), 0, g)
            nothing = space.zeros_like(g)
            # By a comparison, booleans are on the device of `g` in both libraries.
            is_free = space.ones_like(g) == 1
            for _, slices in slice_windows(span.counts, window, strides, ones):
                is_it = (padded[(..., *slices)] == greatest) & is_free
                is_free = is_free & ~is_it
                spanned[(..., *slices)] += space.where(is_it, g, nothing)
            return library.linked(span.take_out(library, spanned), g)

        return function

    return [make(*place) for place in _find_places(work, reaches, 2)]


def _avg_gradient_kernel(work: LocalWork) -> list[Function]:
    """Return kernels for the pooled array's cotangent, from the cotangent of the means."""
    library, options = work.library, work.attributes
    window, strides = options["window"], options["strides"]
    reaches = halos.find_reaches(options["sizes"], window, strides, options["padding"])
    ones = (1,) * len(window)

    def make(span: _Span) -> Function:
        def function(g: Any) -> Any:
            share = g[(..., *span.taken)] / math.prod(window)
            lead = g.shape[: len(g.shape) - len(window)]
            spanned = library.filled((*lead, *span.lengths), 0, g)
            for _, slices in slice_windows(span.counts, window, strides, ones):
                spanned[(..., *slices)] += share
            return library.linked(span.take_out(library, spanned), g)

        return function

    return [make(span) for span, _ in _find_places(work, reaches, None)]


def _pull_max_pool_gradient(step: TapeStep, cotangent: Any, number: int) -> Any:
    if number != 0:
        # The position of the maximum does not change with small changes of the elements.
        return None
    g, greatest, x = step.operands
    if 0 in g.shape:
        return g
    padding = step.attributes["padding"]
    lead, places = _list_pool_places(step, g)
    padded, cotangents = _pad(x, lead, padding, -math.inf), _pad(cotangent, lead, padding)
    result, taken = None, None
    for ranges in places:
        hits = e.equal(_take(padded, lead, ranges), greatest)
        # The first of equal elements gets all of the cotangent.
        first = hits if taken is None else e.logical_and(hits, e.logical_not(taken))
        taken = hits if taken is None else e.logical_or(hits, taken)
        part = where(first, _take(cotangents, lead, ranges), 0.0)
        result = part if result is None else result + part
    return result


def _list_places(
    window: Sequence[int], counts: Sequence[int], steps: Sequence[int], gaps: Sequence[int]
) -> Iterator[Ranges]:
    """Yield for each position in a window the elements of the padded space at that position."""
    for places in itertools.product(*map(range, window)):
        yield [
            (place * gap, place * gap + (count - 1) * step + 1, step)
            for place, count, step, gap in zip(places, counts, steps, gaps, strict=True)
        ]


def _pad(x: Any, lead: int, padding: Sequence[tuple[int, int]], value: float = 0) -> Any:
    pairs = [(0, 0)] * lead + list(padding)
    return pad(x, pairs, constant_values=value) if any(map(any, pairs)) else x


def _take(x: Any, lead: int, ranges: Ranges) -> Any:
    return take_ranges(x, {lead + dim: bounds for dim, bounds in enumerate(ranges)})


def _list_pool_places(step: TapeStep, g: Any) -> tuple[int, list[Ranges]]:
    attributes = step.attributes
    window = attributes["window"]
    lead = g.ndim - len(window)
    ones = (1,) * len(window)
    return lead, list(_list_places(window, g.shape[lead:], attributes["strides"], ones))


register(
    "max_pool_gradient",
    _max_gradient_rule,
    ([(2, 3, 4), (2, 3, 4), (2, 3, 8)], _POOL_BACK),
    linear=(0,),
    local=_max_gradient_kernel,
    placed=_placed(
        "max_pool_gradient",
        lambda shapes, own: _reaches_of_pooling(shapes[2], own),
        halos.place_largest_gradient,
    ),
    result_types=of_first,
    note=halos.NOTE,
    pullback=_pull_max_pool_gradient,
)


register(
    "avg_pool_gradient",
    _avg_gradient_rule,
    ([(2, 3, 4)], {"sizes": (8,), **_POOL_BACK}),
    linear="each",
    local=_avg_gradient_kernel,
    placed=_placed(
        "avg_pool_gradient",
        lambda shapes, own: _reaches_of_pooling(own["sizes"], own),
        halos.place_elements_gradient,
    ),
    result_types=of_first,
    note=halos.NOTE,
    pullback=lambda step, g, number: call("avg_pool", (g,), _pooling(step)),
)
