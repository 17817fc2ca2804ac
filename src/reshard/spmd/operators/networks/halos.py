"""Halos: over a sharded dimension, windows need edges of neighbouring shards, and only those.

The windows are cut as the elements were. Each rank gets the elements that its windows see: its own
are there, and edges come from its neighbours::

    elements      0 1 2 3 | 4 5 6 7      windows of 3, padding of 1
    windows       0 1 2 3 | 4 5 6 7
    a rank has    0 1 2 3 4 |
                        | 3 4 5 6 7
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from reshard.cut_rules import Windows
from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.spmd.local.local_work import Stretch, parts_of
from reshard.spmd.local.window_reach import WindowReach
from reshard.spmd.rules.alignment import aligned
from reshard.spmd.rules.rule_builder import Inferred, Shape

NOTE = "of space that is cut, the edges that windows reach over move"

Specs = tuple[ShardingSpec, ...]


def place_windows(
    specs: Sequence[ShardingSpec],
    shapes: Sequence[Shape],
    reaches: Sequence[WindowReach],
    inferred: Inferred,
) -> tuple[Specs, Specs] | None:
    """Shardings of what computes windows over an operand's space; None where none is cut."""
    return _place_first(specs, shapes, reaches, inferred, _find_seen)


def place_elements_gradient(
    specs: Sequence[ShardingSpec],
    shapes: Sequence[Shape],
    reaches: Sequence[WindowReach],
    inferred: Inferred,
) -> tuple[Specs, Specs] | None:
    """Shardings of what computes a cotangent of elements from one of windows, the first operand.

    The elements are cut as the windows are; each rank gets the windows that see its own.
    """
    return _place_first(specs, shapes, reaches, inferred, _find_seeing)


def _place_first(
    specs: Sequence[ShardingSpec],
    shapes: Sequence[Shape],
    reaches: Sequence[WindowReach],
    inferred: Inferred,
    needed: Callable[[DimSpec, DeviceMesh, WindowReach], DimSpec],
) -> tuple[Specs, Specs] | None:
    """The first operand's cut space stays cut in results, and it is cut by what those need."""
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


def place_largest_gradient(
    specs: Sequence[ShardingSpec],
    shapes: Sequence[Shape],
    reaches: Sequence[WindowReach],
    inferred: Inferred,
) -> tuple[Specs, Specs] | None:
    """Likewise, from windows, what was the greatest of each, and all elements of those windows."""
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
        of_windows, largest = (with_cut(one, dim, seeing) for one in (of_windows, largest))
        elements = with_cut(elements, dim, seen)
        results = (with_cut(results[0], dim, cut), *results[1:])
    return (of_windows, largest, elements), results


def place_kernel_gradient(
    specs: Sequence[ShardingSpec],
    shapes: Sequence[Shape],
    reaches: Sequence[WindowReach],
    inferred: Inferred,
) -> tuple[Specs, Specs] | None:
    """Shardings of what computes a kernel's cotangent from elements and the one of windows.

    Each part of the windows has a contribution.
    """
    lead = len(shapes[0]) - len(reaches)
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
    """The dimensions of an operand's space whose cuts windows reach over, cut plainly.

    Where an axis cuts a larger operand as well, that one stays where it is.
    """
    if any(0 in shape for shape in shapes) or any(reach.count == 0 for reach in reaches):
        return {}
    own = math.prod(shapes[number])
    found = {}
    for dim, reach in enumerate(reaches, lead):
        cut = specs[number].dim_specs[dim]
        is_plain = all(level.rule.is_default for level in cut.levels)
        # Where each element has its own window, a rule may let any cut pass.
        if not cut.levels or (reach.is_still and not is_plain):
            continue
        names = _names(cut)
        if not any(
            other != number and math.prod(shape) > own and _uses(spec, names)
            for other, (spec, shape) in enumerate(zip(specs, shapes, strict=True))
        ):
            found[dim] = DimSpec(cut.axes)
    return found


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
    """The shardings by an operator's rule, without the axes of space."""
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
    """A dimension cut by what each part needs of it, and what it has of it already.

    Args:
        cut: plain, of what is computed and of what is there.
        mesh: of the devices.
        count: elements that are computed along the dimension.
        size: of the dimension.
        needed: the elements that some of those computed need.
    """
    plain = ShardingSpec(mesh, [cut])
    windows = []
    for computed, own in zip(parts_of(plain, 0, count), parts_of(plain, 0, size), strict=True):
        start, stop = needed(computed)
        if start >= stop:
            start, stop = own
        elif own[0] < own[1]:
            # Together the parts have every element: its own stay where they are.
            start, stop = min(start, own[0]), max(stop, own[1])
        windows.append((start, stop))
    return DimSpec([Level(cut.axes, Windows(tuple(windows)))])


def with_cut(spec: ShardingSpec, dim: int, cut: DimSpec) -> ShardingSpec:
    """A sharding with another cut of a dimension."""
    dims = [*spec.dim_specs[:dim], cut, *spec.dim_specs[dim + 1 :]]
    return ShardingSpec(
        spec.mesh, dims, partial_axes=spec.partial_axes, reduction=spec.reduction or "sum"
    )
