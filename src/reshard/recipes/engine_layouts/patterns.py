"""Patterns: how a parameter is filled, with numbers in the place of its sources' names.

The layers of a model, and the experts of a layer, are filled alike: their parameters share one
pattern, which is checked once, and only the names of their sources differ. A stacked parameter of
hundreds of experts has as many pieces, so a pattern keeps them in columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from reshard._interning import Interned
from reshard._validation import check_ints
from reshard.binding import View
from reshard.dtypes import DType
from reshard.errors import LayoutError
from reshard.geometry.box_intersections import Boxes, intersecting_boxes
from reshard.layout import Box
from reshard.recipes.engine_layouts.pieces import Constant
from reshard.runs import IntArray


class ComputedPattern(NamedTuple):
    """A box that is computed from sources, which are given by their numbers (see `Computed`)."""

    box: Box
    operations: tuple[str, ...]
    sources: tuple[int, ...]
    view: View | None = None


class PieceColumns(NamedTuple):
    """The pieces of a parameter: boxes and regions of sources, a row each.

    `start`, `stop` and `strides` have shape `(pieces, dims)`, `source`, `offset` and `steps` shape
    `(pieces,)`; the last are numbers into a list of steps.
    """

    start: IntArray
    stop: IntArray
    source: IntArray
    offset: IntArray
    strides: IntArray
    steps: IntArray

    @classmethod
    def empty(cls, dims: int) -> PieceColumns:
        """No pieces of a parameter of `dims` dimensions."""
        table, column = np.zeros((0, dims), np.int64), np.zeros(0, np.int64)
        return cls(table, table, column, column, table, column)

    def take(self, rows: IntArray) -> PieceColumns:
        """The chosen rows, in the order asked for."""
        return PieceColumns(*(column[rows] for column in self))


class ParameterPattern(Interned):
    """How a parameter of `shape` is filled, interned; pieces are sorted by where they begin.

    Args:
        shape, dtype: of the parameter.
        columns: its pieces.
        steps: the lists of steps that rows of `columns` have by number.
        computed, constants, unfilled: the rest of it.

    Raises:
        LayoutError: regions that overlap, leave a part of the parameter out or do not lie in it.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: DType,
        columns: PieceColumns,
        steps: Sequence[tuple[str, ...]] = ((),),
        computed: Sequence[ComputedPattern] = (),
        constants: Sequence[Constant] = (),
        unfilled: Sequence[Box] = (),
    ) -> None:
        self.shape = check_ints(shape, "shape", LayoutError)
        self.dtype = dtype
        dims = len(self.shape)
        given = [np.asarray(column, dtype=np.int64) for column in columns]
        tables = [given[i].reshape(-1, dims) if dims else given[i] for i in (0, 1, 4)]
        rows = len(given[2])
        if any(len(column) != rows for column in (*tables, *given)):
            raise LayoutError(f"columns of pieces of lengths {[len(column) for column in given]}")
        # The last key is the first to sort by: boxes in row-major order of their first elements.
        order = np.lexsort(tables[0].T[::-1]) if dims and rows else np.arange(rows)
        self.columns = PieceColumns(
            tables[0], tables[1], given[2], given[3], tables[2], given[5]
        ).take(order)
        self.steps = tuple(tuple(one) for one in steps)
        self.computed = tuple(sorted(computed, key=lambda one: one.box))
        self.constants = tuple(sorted(constants, key=lambda one: one.box))
        self.unfilled = tuple(sorted(unfilled))
        self._check()
        for column in self.columns:
            column.flags.writeable = False

    def _check(self) -> None:
        columns = self.columns
        if len(columns.source) and (
            columns.source.min() < 0
            or columns.offset.min() < 0
            or columns.steps.min() < 0
            or columns.steps.max() >= len(self.steps)
        ):
            raise LayoutError(
                f"pieces of a parameter of shape {list(self.shape)} have negative numbers of "
                f"sources or offsets, or steps that are not in {list(self.steps)}"
            )
        others = [one.box for one in self.computed] + [one.box for one in self.constants]
        others += self.unfilled
        dims = len(self.shape)
        start = np.concatenate([columns.start, _as_table([b.start for b in others], dims)])
        stop = np.concatenate([columns.stop, _as_table([b.stop for b in others], dims)])
        outside = (start < 0).any(axis=1) | (stop > np.array(self.shape, np.int64)).any(axis=1)
        outside |= (start >= stop).any(axis=1)
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            box = Box(tuple(start[at].tolist()), tuple(stop[at].tolist()))
            raise LayoutError(f"box {box} has no element in a parameter of shape {self.shape}")
        held, size = int((stop - start).prod(axis=1).sum()), math.prod(self.shape)
        is_disjoint = len(start) <= 1 if dims == 0 else not _overlap(start, stop, self.shape)
        if held != size or not is_disjoint:
            raise LayoutError(
                f"the boxes of a parameter of shape {list(self.shape)} have {held:,} elements of "
                f"{size:,}{'' if is_disjoint else ', some twice'}; each element is in one box: "
                "copied, computed, constant or not filled"
            )

    def interning_key(self) -> object:
        columns = tuple(column.tobytes() for column in self.columns)
        # Of two that are equal in Python, such as -0.0 and 0.0, the text may differ.
        rest = (self.computed, repr(self.constants), self.unfilled)
        return (self.shape, self.dtype, len(self.columns.source), columns, self.steps, rest)

    def __reduce__(self) -> tuple[Any, ...]:
        rest = (self.steps, self.computed, self.constants, self.unfilled)
        return (ParameterPattern, (self.shape, self.dtype, self.columns, *rest))

    @cached_property
    def sources(self) -> int:
        """How many sources it has, numbered from 0."""
        numbers = [*self.columns.source.tolist(), *(n for c in self.computed for n in c.sources)]
        return max(numbers, default=-1) + 1

    @cached_property
    def reach(self) -> tuple[IntArray, IntArray]:
        """The least and the last element that it reads of each source: shape `(sources,)` each."""
        low = np.full(self.sources, np.iinfo(np.int64).max)
        high = np.full(self.sources, -1, dtype=np.int64)
        for source, first, last in zip(*self._reach_of_regions(), strict=True):
            np.minimum.at(low, source, first)
            np.maximum.at(high, source, last)
        return low, high

    def _reach_of_regions(self) -> tuple[list[Any], list[Any], list[Any]]:
        columns = self.columns
        further = (columns.stop - columns.start - 1) * columns.strides
        sources: list[Any] = [columns.source]
        first: list[Any] = [columns.offset + np.minimum(further, 0).sum(axis=1)]
        last: list[Any] = [columns.offset + np.maximum(further, 0).sum(axis=1)]
        for one in self.computed:
            if one.view is not None:
                ends = [(n - 1) * s for n, s in zip(one.box.shape, one.view.strides, strict=True)]
                sources.append(one.sources[0])
                first.append(one.view.offset + sum(min(end, 0) for end in ends))
                last.append(one.view.offset + sum(max(end, 0) for end in ends))
        return sources, first, last

    def __repr__(self) -> str:
        return (
            f"<ParameterPattern {self.dtype.name} {list(self.shape)}, {len(self.columns.source)} "
            f"pieces of {self.sources} sources>"
        )


def _as_table(corners: list[tuple[int, ...]], dims: int) -> IntArray:
    return np.array(corners, dtype=np.int64).reshape(len(corners), dims)


def _overlap(start: IntArray, stop: IntArray, shape: tuple[int, ...]) -> bool:
    """Whether two of the boxes share an element."""
    if len(start) < 2:
        return False
    # Most parameters are cut along one dimension: sorted along it, none begins before the last.
    for dimension in range(start.shape[1]):
        order = np.argsort(start[:, dimension], kind="stable")
        if (start[order[1:], dimension] >= stop[order[:-1], dimension]).all():
            return False
    boxes = Boxes(np.ascontiguousarray(start.T), np.ascontiguousarray(stop.T))
    return any((first != second).any() for first, second in intersecting_boxes(boxes, boxes, shape))
