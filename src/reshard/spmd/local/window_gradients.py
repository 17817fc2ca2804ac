"""Local functions of the gradients of convolution and pooling.

As the forward functions, they go through the places of a window, and work on all windows at once.
Cotangents of elements are added up over the span of the windows that are here, in the padding too;
what a rank has to make is taken out of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reshard.spmd.local.library import Library
from reshard.spmd.local.local_work import Function, LocalWork, Stretch
from reshard.spmd.local.window_reach import (
    Edges,
    WindowReach,
    find_edges,
    find_reaches,
    stretches_of_space,
)
from reshard.spmd.local.windows import find_least, slice_windows


@dataclass(frozen=True)
class _Span:
    """What a rank computes of the cotangent of elements.

    Args:
        taken: of the windows that are here, those that see its elements.
        counts: how many these are.
        lengths: of the span of these windows.
        inside: of the span, what are elements of its own.
        own: where these are among its own.
        shape: its elements of each dimension.
    """

    taken: tuple[slice, ...]
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    inside: tuple[slice, ...]
    own: tuple[slice, ...]
    shape: tuple[int, ...]

    def take_out(self, library: Library, spanned: Any) -> Any:
        """Its own elements, zeros where no window reaches."""
        lead = spanned.shape[: len(spanned.shape) - len(self.shape)]
        found = library.filled((*lead, *self.shape), 0, spanned)
        found[(..., *self.own)] = spanned[(..., *self.inside)]
        return found


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
        b = max(a, b)
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
    return _Span(*zip(*columns, strict=True)) if columns else _Span((), (), (), (), (), ())


def _find_places(
    work: LocalWork, reaches: Sequence[WindowReach], elements: int | None
) -> list[tuple[_Span, Edges]]:
    """For each rank here what it computes, and the edges of its elements.

    Args:
        work: of which the first operand has windows, and the result elements.
        reaches: the windows over each dimension.
        elements: the operand that has elements too, if one does.
    """
    count = len(reaches)
    made = [[(0, one.size) for one in reaches]]
    held = [[(0, one.count) for one in reaches]]
    seen = made
    first = work.operands[0]
    if work.result_specs and first is not None and first.spec is not None:
        made = stretches_of_space(work, 0, count, of_result=True)
        held = stretches_of_space(work, 0, count)
        seen = made if elements is None else stretches_of_space(work, elements, count)
    found = []
    for own, windows, others in zip(made, held, seen, strict=True):
        asked = [reach.seeing(one) for reach, one in zip(reaches, own, strict=True)]
        found.append((_find_span(reaches, own, windows), find_edges(reaches, asked, others)))
    return found


def convolution_input(work: LocalWork) -> list[Function]:
    """The cotangent of the input, from that of the result and the kernel."""
    library, space = work.library, work.library.namespace
    options = work.attributes
    strides, dilation = options["strides"], options["dilation"]
    kernel_type = work.operands[1]
    each, *window = (0,) if kernel_type is None else kernel_type.shape[1:]
    reaches = find_reaches(options["sizes"], window, strides, options["padding"], dilation)
    # A rank may have the channels of some of the groups only.
    shapes = work.result_shapes_here((0, each * options["groups"]))

    def make(span: _Span, wide: int) -> Function:
        def function(g: Any, kernel: Any) -> Any:
            g = g[(..., *span.taken)]
            outputs, each = kernel.shape[:2]
            groups = wide // each if each else 1
            found = library.filled((g.shape[0], wide, *span.lengths), 0, g)
            if 0 not in (*g.shape, groups, each, outputs):
                weights = kernel.reshape((groups, outputs // groups, each, *window))
                g = g.reshape((g.shape[0], groups, outputs // groups, math.prod(span.counts)))
                for places, slices in slice_windows(span.counts, window, strides, dilation):
                    turned = space.matrix_transpose(weights[(..., *places)])
                    product = space.matmul(turned, g)
                    found[(..., *slices)] += product.reshape((g.shape[0], wide, *span.counts))
            return library.linked(library.linked(span.take_out(library, found), g), kernel)

        return function

    places = _find_places(work, reaches, None)
    return [make(span, shape[1]) for (span, _), shape in zip(places, shapes, strict=True)]


def convolution_kernel(work: LocalWork) -> list[Function]:
    """The cotangent of the kernel, from the input and the cotangent of the result."""
    library, space = work.library, work.library.namespace
    options = work.attributes
    strides, dilation, window = options["strides"], options["dilation"], options["window"]
    count = len(window)
    x_type = work.operands[0]
    sizes = () if x_type is None else x_type.shape[2:]
    reaches = find_reaches(sizes, window, strides, options["padding"], dilation)
    held = [[(0, one.size) for one in reaches]]
    windows = [[(0, one.count) for one in reaches]]
    shapes: list[Any] = [None]
    if work.result_specs and x_type is not None and x_type.spec is not None:
        held, windows = (stretches_of_space(work, number, count) for number in (0, 1))
        shapes = list(work.result_shapes_here(()))

    def make(edges: Edges, shape: Any) -> Function:
        def function(x: Any, g: Any) -> Any:
            outputs = g.shape[1]
            each = x.shape[1] // options["groups"] if shape is None else shape[1]
            groups = x.shape[1] // each if each else 1
            if 0 in (*x.shape, *g.shape, groups):
                found = library.filled((outputs, each, *window), 0, g)
                return library.linked(library.linked(found, x), g)
            x = edges.apply(library, x)
            counts = g.shape[2:]
            pixels = x.shape[0] * math.prod(counts)
            # [groups, outputs a group, batch and pixels]
            g = space.moveaxis(g, 0, 1).reshape((groups, outputs // groups, pixels))
            made = []
            for _, slices in slice_windows(counts, window, strides, dilation):
                part = space.moveaxis(x[(..., *slices)], 0, 1).reshape((groups, each, pixels))
                made.append(space.matmul(g, space.matrix_transpose(part)))
            return space.stack(made, axis=-1).reshape((outputs, each, *window))

        return function

    return [
        make(find_edges(reaches, some, elements), shape)
        for some, elements, shape in zip(windows, held, shapes, strict=True)
    ]


def avg_pool(work: LocalWork) -> list[Function]:
    """The cotangent of what is pooled, from that of the means."""
    library, options = work.library, work.attributes
    window, strides = options["window"], options["strides"]
    reaches = find_reaches(options["sizes"], window, strides, options["padding"])
    ones = (1,) * len(window)

    def make(span: _Span) -> Function:
        def function(g: Any) -> Any:
            share = g[(..., *span.taken)] / math.prod(window)
            lead = g.shape[: len(g.shape) - len(window)]
            found = library.filled((*lead, *span.lengths), 0, g)
            for _, slices in slice_windows(span.counts, window, strides, ones):
                found[(..., *slices)] += share
            return library.linked(span.take_out(library, found), g)

        return function

    return [make(span) for span, _ in _find_places(work, reaches, None)]


def max_pool(work: LocalWork) -> list[Function]:
    """The cotangent of what is pooled, from that of the greatest, these, and what is pooled.

    The first of equal elements has all of it.
    """
    library, space, options = work.library, work.library.namespace, work.attributes
    window, strides = options["window"], options["strides"]
    pooled = work.operands[2]
    sizes = () if pooled is None else pooled.shape[pooled.ndim - len(window) :]
    reaches = find_reaches(sizes, window, strides, options["padding"])
    ones = (1,) * len(window)

    def make(span: _Span, edges: Edges) -> Function:
        def function(g: Any, greatest: Any, x: Any) -> Any:
            g, greatest = (one[(..., *span.taken)] for one in (g, greatest))
            padded = edges.apply(library, x, find_least(library, x))
            lead = g.shape[: len(g.shape) - len(window)]
            found = library.filled((*lead, *span.lengths), 0, g)
            nothing = space.zeros_like(g)
            is_free = space.ones_like(g) == 1
            for _, slices in slice_windows(span.counts, window, strides, ones):
                is_it = (padded[(..., *slices)] == greatest) & is_free
                is_free = is_free & ~is_it
                found[(..., *slices)] += space.where(is_it, g, nothing)
            return library.linked(span.take_out(library, found), g)

        return function

    return [make(*place) for place in _find_places(work, reaches, 2)]
