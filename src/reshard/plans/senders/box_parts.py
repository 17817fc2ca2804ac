"""Parts of a box that several ranks send.

A box is cut by ranges of its elements in row-major order. A cut at the end of a row of the first
dimension leaves one box on each side, one at any element up to `2 * dims - 1`::

    +-----------+          +-----------+
    |  sender 0 |          |  sender 0 |
    |-----------|          |    +------|
    |  sender 1 |          |----+   1  |
    +-----------+          +-----------+

So cuts are moved to the end of a box or of a row where that is near enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.layout import flat_range_boxes
from reshard.runs import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class BoxParts:
    """Boxes inside of boxes, each sent by one: part `p` is of box `of[p]`, from its index
    `start[p]` and element `first_element[p]` on.
    """

    of: IntArray
    sender: IntArray
    start: IntArray
    shape: IntArray
    first_element: IntArray

    @classmethod
    def none(cls, ndim: int) -> BoxParts:
        """No parts, of boxes of `ndim` dimensions."""
        nothing, boxes = np.zeros(0, dtype=np.int64), np.zeros((0, ndim), dtype=np.int64)
        return cls(nothing, nothing, boxes, boxes, nothing)

    @classmethod
    def of_ranges(
        cls, of: IntArray, sender: IntArray, shape: IntArray, begin: IntArray, stop: IntArray
    ) -> BoxParts:
        """Ranges of elements of boxes of `shape`, each range as the fewest boxes."""
        # Tensors of a group are alike, so the same box is cut at the same elements again and again.
        known: dict[tuple[object, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        row: list[int] = []
        starts: list[tuple[int, ...]] = []
        shapes: list[tuple[int, ...]] = []
        columns = zip(map(tuple, shape.tolist()), begin.tolist(), stop.tolist(), strict=True)
        for number, (size, low, high) in enumerate(columns):
            if (size, low, high) not in known:
                boxes = flat_range_boxes(size, low, high)
                known[size, low, high] = [(box.start, box.shape) for box in boxes]
            for start, inside in known[size, low, high]:
                row.append(number)
                starts.append(start)
                shapes.append(inside)
        at = np.array(row, dtype=np.int64)
        ndim = shape.shape[1]
        corner = np.array(starts, dtype=np.int64).reshape(len(row), ndim)
        extent = np.array(shapes, dtype=np.int64).reshape(len(row), ndim)
        # Row-major strides of each cut box: the corner's place in it is its first element.
        steps = np.ones((len(row), ndim), dtype=np.int64)
        for d in range(ndim - 2, -1, -1):
            steps[:, d] = steps[:, d + 1] * shape[at, d + 1]
        return cls(of[at], sender[at], corner, extent, (corner * steps).sum(axis=1))


def rounding_elements(shape: IntArray, rounding: int) -> IntArray:
    """The elements that cuts of boxes are multiples of: of the whole box, of a row of its first
    dimension, of its second ..., whatever first is not more than `rounding`; one if nothing is.
    """
    # From a row of the last dimension to the whole box: the largest that is small enough.
    unit = np.ones(len(shape), dtype=np.int64)
    size = np.ones(len(shape), dtype=np.int64)
    for d in range(shape.shape[1] - 1, -1, -1):
        size *= shape[:, d]
        unit = np.where(size <= rounding, size, unit)
    return unit
