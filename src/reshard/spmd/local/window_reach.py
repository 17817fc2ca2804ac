"""Windows over one dimension: the elements of a window, and the windows of an element.

Windows are numbered; each begins a step behind the one before. The first begins in the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reshard.spmd.local.library import Library
from reshard.spmd.local.local_work import LocalWork, Stretch
from reshard.spmd.local.movement import pad_array

Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class WindowReach:
    """Windows over a dimension.

    Args:
        size: elements of the dimension.
        count: windows.
        step: from one window to the next.
        extent: from a window's first element to behind its last one.
        before: padding before the first element.

    >>> of_three = WindowReach(size=8, count=8, step=1, extent=3, before=1)
    >>> of_three.seen_by((0, 4)), of_three.seeing((4, 8)), of_three.spanned_by((0, 4))
    ((0, 5), (3, 8), (-1, 5))
    """

    size: int
    count: int
    step: int
    extent: int
    before: int

    @property
    def is_still(self) -> bool:
        """Whether each element has a window of its own."""
        return (self.step, self.extent, self.before, self.count) == (1, 1, 0, self.size)

    def spanned_by(self, windows: Stretch) -> Stretch:
        """Where windows begin and end, in the padding too; `(0, 0)` of none."""
        first, last = windows
        if first >= last:
            return 0, 0
        start = first * self.step - self.before
        return start, start + (last - 1 - first) * self.step + self.extent

    def seen_by(self, windows: Stretch) -> Stretch:
        """The elements between the first and the last that windows see."""
        # Windows in the padding see none.
        first, last = self.seeing((0, self.size))
        start, stop = self.spanned_by((max(first, windows[0]), min(last, windows[1])))
        low = min(max(start, 0), self.size)
        return low, max(min(stop, self.size), low)

    def seeing(self, elements: Stretch) -> Stretch:
        """The windows that reach over some of the elements; `(0, 0)` where none does."""
        start, stop = elements
        if start >= stop:
            return 0, 0
        first = max((start + self.before - self.extent) // self.step + 1, 0)
        last = min((stop - 1 + self.before) // self.step + 1, self.count)
        return (first, last) if first < last else (0, 0)

    def beside(self, elements: Stretch) -> Stretch:
        """The elements of all windows that reach over some of the elements."""
        return self.seen_by(self.seeing(elements))

    def edge(self, windows: Stretch, held: Stretch) -> tuple[slice, tuple[int, int]]:
        """What windows see of the elements that are held, and the padding around it."""
        start, stop = self.spanned_by(windows)
        low, high = self.seen_by(windows)
        before = low - start if low < high else stop - start
        after = stop - start - before - (high - low)
        return slice(low - held[0], high - held[0]), (before, after)


def find_reaches(
    sizes: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Pairs,
    dilation: Sequence[int] | None = None,
) -> tuple[WindowReach, ...]:
    """The windows over each dimension."""
    found = []
    gaps = dilation or (1,) * len(window)
    for size, wide, step, gap, (before, after) in zip(
        sizes, window, strides, gaps, padding, strict=True
    ):
        extent = gap * (wide - 1) + 1
        count = max((size + before + after - extent) // step + 1, 0)
        found.append(WindowReach(size, count, step, extent, before))
    return tuple(found)


@dataclass(frozen=True)
class Edges:
    """What a rank takes of its elements, and the padding around, in each dimension of space."""

    taken: tuple[slice, ...]
    pads: tuple[tuple[int, int], ...]

    def apply(self, library: Library, x: Any, value: float = 0) -> Any:
        """The elements of windows, padded with a value."""
        lead = len(x.shape) - len(self.taken)
        return pad_array(library, x[(..., *self.taken)], [(0, 0)] * lead + [*self.pads], value)


def find_edges(
    reaches: Sequence[WindowReach], windows: Sequence[Stretch], held: Sequence[Stretch]
) -> Edges:
    """The edges of a rank, of the windows that it computes and the elements that it has."""
    pairs = [
        (slice(None), (0, 0)) if reach.is_still else reach.edge(some, elements)
        for reach, some, elements in zip(reaches, windows, held, strict=True)
    ]
    taken, pads = zip(*pairs, strict=True) if pairs else ((), ())
    return Edges(taken, pads)


def whole_edges(reaches: Sequence[WindowReach]) -> Edges:
    """The edges where all elements are here, and all windows are computed."""
    return find_edges(
        reaches, [(0, one.count) for one in reaches], [(0, one.size) for one in reaches]
    )


def stretches_of_space(
    work: LocalWork, number: int, count: int, of_result: bool = False
) -> list[list[Stretch]]:
    """For each rank here, its stretch of each of the last dimensions of an operand or a result."""
    find = work.result_stretches_here if of_result else work.stretches_here
    shape = (
        work.result_shapes if of_result else [() if x is None else x.shape for x in work.operands]
    )[number]
    by_dim = [
        [_join(some) for some in find(number, axis)]
        for axis in range(len(shape) - count, len(shape))
    ]
    return [[some[rank] for some in by_dim] for rank in range(len(work.ranks))]


def _join(some: Sequence[Stretch]) -> Stretch:
    """One stretch as it is; of several, which windows of one element alone may have, the length."""
    if len(some) == 1:
        return some[0]
    return 0, sum(stop - start for start, stop in some)
