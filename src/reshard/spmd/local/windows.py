"""Local functions of convolution and pooling.

A convolution is a matrix product for each place of its window, of the input moved by that place:
as many products as the window has places, and no copies of the input. Where space is cut, a rank
has the elements that its windows see, and pads at the ends of the whole space alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from reshard.spmd.local.library import Library
from reshard.spmd.local.local_work import Function, LocalWork, Stretch
from reshard.spmd.local.window_reach import (
    Edges,
    WindowReach,
    find_edges,
    find_reaches,
    stretches_of_space,
    whole_edges,
)


def slice_windows(
    counts: Sequence[int], window: Sequence[int], steps: Sequence[int], gaps: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """The places of a window, with the elements of the last dimensions that windows have there."""
    for places in itertools.product(*map(range, window)):
        # No windows have no elements: such a slice would count its end from the array's.
        yield (
            places,
            tuple(
                slice(place * gap, place * gap + (count - 1) * step + 1 if count else 0, step)
                for count, place, step, gap in zip(counts, places, steps, gaps, strict=True)
            ),
        )


def count_windows(
    space: Sequence[int], window: Sequence[int], steps: Sequence[int], gaps: Sequence[int]
) -> list[int]:
    """How many windows fit into what is padded."""
    return [
        max((size - gap * (wide - 1) - 1) // step + 1, 0)
        for size, wide, step, gap in zip(space, window, steps, gaps, strict=True)
    ]


FindReaches = Callable[[Sequence[int], Sequence[int]], tuple[WindowReach, ...]]
"""From the sizes of space and of the window to the windows over each dimension."""


def _on_edges(
    work: LocalWork,
    window: Sequence[int],
    find: FindReaches,
    make: Callable[[Callable[[Any], Edges]], Function],
) -> list[Function]:
    """The function of each rank, by the edges of what it has."""
    first = work.operands[0]
    count = len(window)
    if not work.result_specs or first is None or first.spec is None:
        # Everything is here.
        return [make(lambda x: whole_edges(find(x.shape[len(x.shape) - count :], window)))]
    reaches = find(first.shape[first.ndim - count :], window)

    def make_here(windows: Sequence[Stretch], held: Sequence[Stretch]) -> Function:
        edges = find_edges(reaches, windows, held)
        return make(lambda x: edges)

    made = stretches_of_space(work, 0, count, of_result=True)
    return list(map(make_here, made, stretches_of_space(work, 0, count)))


def convolution(work: LocalWork) -> list[Function]:
    """The convolution of a rank's channels; their groups follow from both operands."""
    library, space = work.library, work.library.namespace
    strides, padding = work.attributes["strides"], work.attributes["padding"]
    dilation = work.attributes["dilation"]
    kernel_type = work.operands[1]
    window = () if kernel_type is None else kernel_type.shape[2:]

    def find(sizes: Sequence[int], window: Sequence[int]) -> tuple[WindowReach, ...]:
        return find_reaches(sizes, window, strides, padding, dilation)

    def make(edges_of: Callable[[Any], Edges]) -> Function:
        def function(x: Any, kernel: Any) -> Any:
            x = edges_of(x).apply(library, x)
            counts = count_windows(x.shape[2:], window, strides, dilation)
            outputs, each = kernel.shape[:2]
            # From both operands, not from the attribute: a rank may have some of the groups only.
            groups = x.shape[1] // each if each else 1
            found = library.filled((x.shape[0], outputs, *counts), 0, x)
            if 0 in (*found.shape, groups, each):
                return library.linked(library.linked(found, x), kernel)
            # [groups, outputs a group, channels a group, *window]
            weights = kernel.reshape((groups, outputs // groups, each, *window))
            pixels = math.prod(counts)
            for places, slices in slice_windows(counts, window, strides, dilation):
                # [batch, groups, channels a group, pixels], so that matmul is one product a group.
                part = x[(..., *slices)].reshape((x.shape[0], groups, each, pixels))
                product = space.matmul(weights[(..., *places)], part)
                found = found + product.reshape(found.shape)
            return found

        return function

    return _on_edges(work, window, find, make)


def max_pool(work: LocalWork) -> list[Function]:
    """The greatest number of each window over the last dimensions."""
    return _pool(work, work.library.namespace.maximum, lambda x: find_least(work.library, x))


def avg_pool(work: LocalWork) -> list[Function]:
    """The mean of each window over the last dimensions, padding counted as zeros."""
    # All places of a window count, also those in the padding.
    count = math.prod(work.attributes["window"])
    pools = _pool(work, work.library.namespace.add, lambda x: 0)
    return [lambda x, pool=pool: pool(x) / count for pool in pools]


def _pool(work: LocalWork, combine: Function, padding_of: Callable[[Any], float]) -> list[Function]:
    library, window = work.library, work.attributes["window"]
    strides, padding = work.attributes["strides"], work.attributes["padding"]

    def find(sizes: Sequence[int], window: Sequence[int]) -> tuple[WindowReach, ...]:
        return find_reaches(sizes, window, strides, padding)

    def make(edges_of: Callable[[Any], Edges]) -> Function:
        def function(x: Any) -> Any:
            lead = len(x.shape) - len(window)
            x = edges_of(x).apply(library, x, padding_of(x))
            gaps = (1,) * len(window)
            counts = count_windows(x.shape[lead:], window, strides, gaps)
            found: Any = None
            for _, slices in slice_windows(counts, window, strides, gaps):
                part = x[(..., *slices)]
                found = part if found is None else combine(found, part)
            return found

        return function

    return _on_edges(work, window, find, make)


def find_least(library: Library, x: Any) -> float:
    """The least number of an array's type: the identity of `maximum`."""
    name = library.dtype_of(x).name
    return int(np.iinfo(name).min) if "int" in name else -math.inf
