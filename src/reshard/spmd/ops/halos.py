"""Halos: over a sharded dimension, windows need only the edges of neighbouring shards.

The windows are sharded like the elements. Each rank gets the elements that its windows see: it has
its own elements, and receives halos from its neighbours::

    elements      0 1 2 3 | 4 5 6 7      windows of 3, padding of 1
    windows       0 1 2 3 | 4 5 6 7
    a rank has    0 1 2 3 4 |
                        | 3 4 5 6 7

Windows are numbered; each begins a step after the previous window. The first begins in the padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from reshard.cut_rules import Windows
from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.spmd.core.array_type import with_cut
from reshard.spmd.core.backend import Library
from reshard.spmd.core.local_work import LocalWork, Stretch, parts_of
from reshard.spmd.ops.movement import pad_array
from reshard.spmd.rules.alignment import aligned
from reshard.spmd.rules.rule_builder import Inferred, Shape

Padded = Sequence[tuple[int, int]]
NOTE = "of space that is cut, the edges that windows reach over move"
Specs = tuple[ShardingSpec, ...]


@dataclass(frozen=True)
class WindowReach:
    """Windows over a dimension.

    Args:
        size: the number of elements of the dimension.
        count: the number of windows.
        step: the distance between the starts of adjacent windows.
        extent: the distance from a window's start to its end.
        before: the padding before the first element.

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
        """Whether each window is exactly an element, and each element has a window."""
        return (self.step, self.extent, self.before, self.count) == (1, 1, 0, self.size)

    def spanned_by(self, windows: Stretch) -> Stretch:
        """Return the interval that windows span, including padding; `(0, 0)` without windows."""
        first, last = windows
        if first >= last:
            return 0, 0
        start = first * self.step - self.before
        return start, start + (last - 1 - first) * self.step + self.extent

    def seen_by(self, windows: Stretch) -> Stretch:
        """Return the interval of elements from the first to the last that windows see."""
        # Windows that are entirely in the padding see no elements.
        first, last = self.seeing((0, self.size))
        start, stop = self.spanned_by((max(first, windows[0]), min(last, windows[1])))
        # Clipped to the elements: the rest of the span is padding.
        low = min(max(start, 0), self.size)
        return low, max(min(stop, self.size), low)

    def seeing(self, elements: Stretch) -> Stretch:
        """Return the windows that overlap the elements, or `(0, 0)` if there are none."""
        start, stop = elements
        if start >= stop:
            return 0, 0
        # The first window whose end is past the start of the elements.
        first = max((start + self.before - self.extent) // self.step + 1, 0)
        last = min((stop - 1 + self.before) // self.step + 1, self.count)
        return (first, last) if first < last else (0, 0)

    def beside(self, elements: Stretch) -> Stretch:
        """Return the elements of all windows that overlap the elements."""
        return self.seen_by(self.seeing(elements))

    def edge(self, windows: Stretch, held: Stretch) -> tuple[slice, tuple[int, int]]:
        """Return the slice of the held elements that windows see, and the padding around it."""
        start, stop = self.spanned_by(windows)
        low, high = self.seen_by(windows)
        # Windows that see no element consist of padding alone.
        before = low - start if low < high else stop - start
        after = stop - start - before - (high - low)
        return slice(low - held[0], high - held[0]), (before, after)


def find_reaches(
    sizes: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Padded,
    dilation: Sequence[int] | None = None,
) -> tuple[WindowReach, ...]:
    """Return the windows over each dimension."""
    reaches = []
    gaps = dilation or (1,) * len(window)
    for size, wide, step, gap, (before, after) in zip(
        sizes, window, strides, gaps, padding, strict=True
    ):
        extent = gap * (wide - 1) + 1
        count = max((size + before + after - extent) // step + 1, 0)
        reaches.append(WindowReach(size, count, step, extent, before))
    return tuple(reaches)


@dataclass(frozen=True)
class Edges:
    """A slice of a rank's elements and the padding around it, in each spatial dimension."""

    taken: tuple[slice, ...]
    pads: tuple[tuple[int, int], ...]

    def apply(self, library: Library, x: Any, value: float = 0) -> Any:
        """Return the slice of the elements, padded with a value."""
        lead = len(x.shape) - len(self.taken)
        return pad_array(library, x[(..., *self.taken)], [(0, 0)] * lead + [*self.pads], value)


def find_edges(
    reaches: Sequence[WindowReach], windows: Sequence[Stretch], held: Sequence[Stretch]
) -> Edges:
    """Return the edges of a rank, from the windows that it computes and the elements it has."""
    pairs = [
        (slice(None), (0, 0)) if reach.is_still else reach.edge(some, elements)
        for reach, some, elements in zip(reaches, windows, held, strict=True)
    ]
    taken, pads = zip(*pairs, strict=True) if pairs else ((), ())
    return Edges(taken, pads)


def whole_edges(reaches: Sequence[WindowReach]) -> Edges:
    """Return the edges for a rank that has all elements and computes all windows."""
    return find_edges(
        reaches, [(0, reach.count) for reach in reaches], [(0, reach.size) for reach in reaches]
    )


def stretches_of_space(
    work: LocalWork, number: int, count: int, of_result: bool = False
) -> list[list[Stretch]]:
    """Return for each rank here its intervals of the last dimensions of an operand or result."""
    find = work.result_stretches_here if of_result else work.stretches_here
    shape = (
        work.result_shapes if of_result else [() if x is None else x.shape for x in work.operands]
    )[number]
    by_dim = [
        [_join_stretches(some) for some in find(number, axis)]
        for axis in range(len(shape) - count, len(shape))
    ]
    return [[some[rank] for some in by_dim] for rank in range(len(work.ranks))]


def _join_stretches(some: Sequence[Stretch]) -> Stretch:
    """Return a single interval unchanged, and for several an interval of their total length.

    Only windows of a single element allow several intervals.
    """
    if len(some) == 1:
        return some[0]
    return 0, sum(stop - start for start, stop in some)


def _place_first(
    specs: Sequence[ShardingSpec],
    shapes: Sequence[Shape],
    reaches: Sequence[WindowReach],
    inferred: Inferred,
    needed: Callable[[DimSpec, DeviceMesh, WindowReach], DimSpec],
) -> tuple[Specs, Specs] | None:
    """Keep the spatial sharding in results, and give the first operand the halos they need."""
    lead = len(shapes[0]) - len(reaches)
    cuts = find_cuts(specs, shapes, 0, lead, reaches)
    if not cuts:
        return None
    runs, results = align_others(specs, shapes, cuts, inferred)
    for dim, cut in cuts.items():
        wide = needed(cut, runs[0].mesh, reaches[dim - lead])
        runs = (with_cut(runs[0], dim, wide), *runs[1:])
        results = (with_cut(results[0], dim, cut), *results[1:])
    return runs, results


def _find_seen(cut: DimSpec, mesh: DeviceMesh, reach: WindowReach) -> DimSpec:
    return cut_by_windows(cut, mesh, reach.count, reach.size, reach.seen_by)


def _find_seeing(cut: DimSpec, mesh: DeviceMesh, reach: WindowReach) -> DimSpec:
    return cut_by_windows(cut, mesh, reach.size, reach.count, reach.seeing)


place_windows = partial(_place_first, needed=_find_seen)
"""Return the shardings of an operation that computes windows, or None if space is whole."""

place_elements_gradient = partial(_place_first, needed=_find_seeing)
"""Return shardings to compute the elements' cotangent from the windows', the first operand.

The elements are sharded like the windows; each rank gets the windows that see its elements.
"""


def place_largest_gradient(
    specs: Sequence[ShardingSpec],
    shapes: Sequence[Shape],
    reaches: Sequence[WindowReach],
    inferred: Inferred,
) -> tuple[Specs, Specs] | None:
    """Return shardings to compute the elements' cotangent of a maximum over windows.

    Operands are the windows' cotangent, their maxima, and all elements of these windows.
    """
    lead = len(shapes[0]) - len(reaches)
    cuts = find_cuts(specs, shapes, 0, lead, reaches)
    if not cuts:
        return None
    runs, results = align_others(specs, shapes, cuts, inferred)
    of_windows, largest, elements = runs
    for dim, cut in cuts.items():
        reach = reaches[dim - lead]
        mesh = of_windows.mesh
        seeing = _find_seeing(cut, mesh, reach)
        seen = cut_by_windows(cut, mesh, reach.size, reach.size, reach.beside)
        of_windows, largest = (with_cut(spec, dim, seeing) for spec in (of_windows, largest))
        elements = with_cut(elements, dim, seen)
        results = (with_cut(results[0], dim, cut), *results[1:])
    return (of_windows, largest, elements), results


def place_kernel_gradient(
    specs: Sequence[ShardingSpec],
    shapes: Sequence[Shape],
    reaches: Sequence[WindowReach],
    inferred: Inferred,
) -> tuple[Specs, Specs] | None:
    """Return shardings to compute a kernel's cotangent from elements and the windows' cotangent.

    Each part of the windows gives a contribution.
    """
    lead = len(shapes[0]) - len(reaches)
    # Either operand may bring the sharding of space; the elements come first.
    number = 0 if any(dim.levels for dim in specs[0].dim_specs[lead:]) else 1
    cuts = find_cuts(specs, shapes, number, lead, reaches)
    if not cuts:
        return None
    runs, (result,) = align_others(specs, shapes, cuts, inferred)
    elements, of_windows = runs
    axes = list(result.partial_axes)
    for dim, cut in cuts.items():
        reach = reaches[dim - lead]
        seen = cut_by_windows(cut, elements.mesh, reach.count, reach.size, reach.seen_by)
        elements, of_windows = with_cut(elements, dim, seen), with_cut(of_windows, dim, cut)
        axes += cut.axes
    result = ShardingSpec(result.mesh, result.dim_specs, partial_axes=axes)
    return (elements, of_windows), (result,)


def find_cuts(
    specs: Sequence[ShardingSpec],
    shapes: Sequence[Shape],
    number: int,
    lead: int,
    reaches: Sequence[WindowReach],
) -> dict[int, DimSpec]:
    """Return the sharded spatial dimensions of an operand that need halos, with plain shardings.

    A dimension is left out if its axes also shard a larger operand, which then does not move.
    """
    # Without windows or elements nothing is seen from either side.
    if any(0 in shape for shape in shapes) or any(reach.count == 0 for reach in reaches):
        return {}
    size = math.prod(shapes[number])
    cuts = {}
    for dim, reach in enumerate(reaches, lead):
        cut = specs[number].dim_specs[dim]
        is_plain = all(level.rule.is_default for level in cut.levels)
        # If each element has its own window, the rule passes any sharding through.
        if not cut.levels or (reach.is_still and not is_plain):
            continue
        names = _names(cut)
        if not any(
            other != number and math.prod(shape) > size and _uses(spec, names)
            for other, (spec, shape) in enumerate(zip(specs, shapes, strict=True))
        ):
            cuts[dim] = DimSpec(cut.axes)
    return cuts


def _names(cut: DimSpec) -> set[str]:
    return {axis.name for axis in cut.axes}


def _uses(spec: ShardingSpec, names: set[str]) -> bool:
    return any(_names(dim) & names for dim in spec.dim_specs)


def align_others(
    specs: Sequence[ShardingSpec],
    shapes: Sequence[Shape],
    cuts: Mapping[int, DimSpec],
    inferred: Inferred,
) -> tuple[Specs, Specs]:
    """Return the shardings by an operator's rule, without the axes of spatial dimensions."""
    names = {name for cut in cuts.values() for name in _names(cut)}
    others = [
        ShardingSpec(
            spec.mesh, [DimSpec() if _names(dim) & names else dim for dim in spec.dim_specs]
        )
        for spec in specs
    ]
    return aligned(inferred.rule, tuple(others), tuple(shapes), tuple(inferred.result_shapes), ())


def cut_by_windows(
    cut: DimSpec,
    mesh: DeviceMesh,
    count: int,
    size: int,
    needed: Callable[[Stretch], Stretch],
) -> DimSpec:
    """Return a sharding by windows, in which a part has the elements that it needs and its own.

    Args:
        cut: the plain sharding of the computed and of the existing elements.
        mesh: of the devices.
        count: the number of computed elements along the dimension.
        size: the size of the dimension.
        needed: maps computed elements to the elements that they need.
    """
    plain = ShardingSpec(mesh, [cut])
    windows = []
    for computed, own in zip(parts_of(plain, 0, count), parts_of(plain, 0, size), strict=True):
        start, stop = needed(computed)
        if start >= stop:
            start, stop = own
        elif own[0] < own[1]:
            # A part keeps its own elements, so that the parts together have every element.
            start, stop = min(start, own[0]), max(stop, own[1])
        windows.append((start, stop))
    return DimSpec([Level(cut.axes, Windows(tuple(windows)))])
