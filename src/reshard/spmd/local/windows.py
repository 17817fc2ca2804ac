"""Local functions of convolution and pooling.

A convolution is a matrix product for each place of its window, of the input moved by that place:
as many products as the window has places, and no copies of the input.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reshard.spmd.local.library import Library
from reshard.spmd.local.local_work import Function, LocalWork
from reshard.spmd.local.movement import pad_array


def _slice_windows(
    x: Any, sizes: Sequence[int], places: Sequence[int], steps: Sequence[int], gaps: Sequence[int]
) -> Any:
    """The elements of all windows at one place within them."""
    windows = [
        slice(place * gap, place * gap + (size - 1) * step + 1, step)
        for size, place, step, gap in zip(sizes, places, steps, gaps, strict=True)
    ]
    return x[(..., *windows)]


def _count_windows(
    space: Sequence[int], window: Sequence[int], steps: Sequence[int], gaps: Sequence[int]
) -> list[int]:
    return [
        max((size - gap * (wide - 1) - 1) // step + 1, 0)
        for size, wide, step, gap in zip(space, window, steps, gaps, strict=True)
    ]


def convolution(work: LocalWork) -> Function:
    """The convolution of a rank's channels; their groups follow from both operands."""
    library, space = work.library, work.library.namespace
    strides, padding = work.attributes["strides"], work.attributes["padding"]
    dilation = work.attributes["dilation"]

    def function(x: Any, kernel: Any) -> Any:
        x = pad_array(library, x, [(0, 0), (0, 0), *padding])
        window = kernel.shape[2:]
        counts = _count_windows(x.shape[2:], window, strides, dilation)
        outputs, each = kernel.shape[:2]
        # From both operands, not from the attribute: a rank may have some of the groups only.
        groups = x.shape[1] // each if each else 1
        found = library.filled((x.shape[0], outputs, *counts), 0, x)
        if 0 in (*found.shape, groups, each):
            return library.linked(library.linked(found, x), kernel)
        # [groups, outputs a group, channels a group, *window]
        weights = kernel.reshape((groups, outputs // groups, each, *window))
        pixels = math.prod(counts)
        for places in itertools.product(*map(range, window)):
            part = _slice_windows(x, counts, places, strides, dilation)
            # [batch, groups, channels a group, pixels], so that matmul is one product a group.
            part = part.reshape((x.shape[0], groups, each, pixels))
            found = found + space.matmul(weights[(..., *places)], part).reshape(found.shape)
        return found

    return function


def max_pool(work: LocalWork) -> Function:
    """The greatest number of each window over the last dimensions."""
    return _pool(work, work.library.namespace.maximum, lambda x: _find_least(work.library, x))


def avg_pool(work: LocalWork) -> Function:
    """The mean of each window over the last dimensions, padding counted as zeros."""
    pool = _pool(work, work.library.namespace.add, lambda x: 0)
    # All places of a window count, also those in the padding.
    count = math.prod(work.attributes["window"])
    return lambda x: pool(x) / count


def _pool(work: LocalWork, combine: Function, padding_of: Callable[[Any], float]) -> Function:
    library, window = work.library, work.attributes["window"]
    strides, padding = work.attributes["strides"], work.attributes["padding"]

    def function(x: Any) -> Any:
        lead = len(x.shape) - len(window)
        x = pad_array(library, x, [(0, 0)] * lead + list(padding), padding_of(x))
        gaps = (1,) * len(window)
        counts = _count_windows(x.shape[lead:], window, strides, gaps)
        found: Any = None
        for places in itertools.product(*map(range, window)):
            part = _slice_windows(x, counts, places, strides, gaps)
            found = part if found is None else combine(found, part)
        return found

    return function


def _find_least(library: Library, x: Any) -> float:
    """The least number of an array's type: the identity of `maximum`."""
    name = library.dtype_of(x).name
    return int(np.iinfo(name).min) if "int" in name else -math.inf
