"""Factor shardings: conversion between the axes of dimensions and the axes of factors.

*Collect* hands a dimension's axes to its factors, from the major one on. A factor that is not the
last takes axes while they divide it, a part of an axis where only a part does::

    [ij] of 8 = 2 x 4, cut over a of size 4         i takes a:(1)2, j takes a:(2)2
    [ij] of 8 = 2 x 4, cut over a of size 3         3 divides neither: it overflows i

Axes that overflow cut the dimension and no factor: they do not propagate, but are there again
when the dimension is put together. The last factor takes all that is left, whether or not it
divides. *Update* puts the axes of the factors together again, up to the first factor that is not
cut to single indices: beyond it a shard would have holes.

A level with a rule of its own stays with a factor that is a dimension by itself, and overflows
elsewhere, as DESIGN's second idea says.

Source: Shardy's notion of a sharding projection (OpenXLA, `docs/propagation.md`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.spmd.propagation.axis_parts import Parts, Sharding, joined
from reshard.spmd.rules.sharding_rule import Mapping


@dataclass(slots=True)
class FactorSharding:
    """The cut of one factor of one tensor.

    Args:
        axes: that cut it, major to minor.
        overflow: axes of its dimension that follow and cut no factor.
        is_closed: whether it may not be cut further.
        is_last: whether it is the minor-most factor of its dimension.
        is_waiting: whether its dimension joins later, by a weaker user priority.
    """

    axes: Parts = ()
    overflow: Parts = ()
    is_closed: bool = False
    is_last: bool = True
    is_waiting: bool = False


FactorShardings = dict[int, FactorSharding]
"""The factors of one tensor."""


def collected(
    mapping: Mapping,
    sizes: Sequence[int],
    sharding: Sharding | None,
    carriers: frozenset[int],
    *,
    closed_if_missing: bool = False,
) -> FactorShardings:
    """The cuts of a tensor's factors under its sharding.

    Args:
        mapping: the tensor's dimensions in factors.
        sizes: of the factors.
        sharding: of the tensor; None where it has none.
        carriers: factors that carry levels with a rule of their own.
        closed_if_missing: whether a tensor without a sharding may not be cut.

    >>> dims = (((0, 1, 4, 0),),)
    >>> found = collected(((0, 1),), (2, 4), Sharding(dims, (True,)), frozenset())
    >>> found[0].axes, found[1].axes
    (((0, 1, 2, 0),), ((0, 2, 2, 0),))
    """
    found: FactorShardings = {}
    for dim, factors in enumerate(mapping):
        axes: Parts = () if sharding is None else sharding.dims[dim]
        is_closed = closed_if_missing if sharding is None else sharding.is_closed[dim]
        if len(factors) == 1:
            factor = factors[0]
            if factor not in carriers and any(part[3] for part in axes):
                found[factor] = FactorSharding((), axes, is_closed)
            else:
                found[factor] = FactorSharding(axes, (), is_closed)
        elif factors:
            _collect_compound(found, factors, sizes, axes, is_closed)
        if sharding is not None and dim in sharding.waiting:
            for factor in factors:
                if factor in found:
                    found[factor].is_waiting = True
    return found


def _collect_compound(
    found: FactorShardings,
    factors: Sequence[int],
    sizes: Sequence[int],
    axes: Parts,
    is_closed: bool,
) -> None:
    waiting = list(axes)
    has_levels = any(part[3] for part in axes)
    has_overflow = False
    for place, factor in enumerate(factors):
        is_last = place == len(factors) - 1
        cut = found[factor] = FactorSharding((), (), is_closed or has_overflow, is_last)
        if has_overflow:
            # This one may not be cut. Those behind it are as if they were not in the tensor.
            return
        if has_levels:
            cut.overflow = axes
            has_overflow = True
            continue
        if is_last:
            for part in waiting:
                cut.axes = joined(cut.axes, part)
            continue
        # Take axes while they divide what is left of the factor; of one that is too large, the part
        # that divides it, and leave the rest to the next factor.
        left, taken = sizes[factor], []
        while waiting:
            part = waiting[0]
            common = math.gcd(left, part[2])
            # The axis and what is left have no divisor in common: it overflows here.
            if part[2] != 1 and common == 1:
                break
            if part[2] > common:
                taken.append((part[0], part[1], common, 0))
                waiting[0] = (part[0], part[1] * common, part[2] // common, 0)
            else:
                taken.append(waiting.pop(0))
            left //= common
        cut.axes = tuple(taken)
        if left > 1 and waiting:
            has_overflow = True
            for part in waiting:
                cut.overflow = joined(cut.overflow, part)


def updated(
    mapping: Mapping,
    sizes: Sequence[int],
    factors: FactorShardings,
    sharding: Sharding | None,
) -> Sharding:
    """A tensor's sharding from the cuts of its factors.

    Args:
        mapping: the tensor's dimensions in factors.
        sizes: of the factors.
        factors: their cuts.
        sharding: of the tensor before, whose replicated and partial axes stay.

    >>> cuts = {0: FactorSharding(((0, 1, 2, 0),)), 1: FactorSharding(((0, 2, 4, 0),))}
    >>> updated(((0, 1),), (2, 4), cuts, None).dims
    (((0, 1, 8, 0),),)
    """
    dims: list[Parts] = []
    closed: list[bool] = []
    for dim, indices in enumerate(mapping):
        if not indices:
            dims.append(sharding.dims[dim] if sharding else ())
            closed.append(sharding.is_closed[dim] if sharding else False)
            continue
        if len(indices) == 1:
            cut = factors[indices[0]]
            dims.append(cut.axes + cut.overflow if cut.overflow else cut.axes)
            closed.append(cut.is_closed)
            continue
        axes: Parts = ()
        is_closed = False
        for factor in indices:
            cut = factors[factor]
            is_closed |= cut.is_closed
            size = 1
            for place, part in enumerate(cut.axes):
                size *= part[2]
                # An axis that was split between two factors is one again.
                axes = (*axes, part) if place else joined(axes, part)
            if cut.overflow:
                for place, part in enumerate(cut.overflow):
                    axes = (*axes, part) if place else joined(axes, part)
                break
            # Not cut to single indices: a cut of the next factor would leave holes in the shards.
            if size < sizes[factor]:
                break
        dims.append(axes)
        closed.append(is_closed)
    if sharding is None:
        return Sharding(tuple(dims), tuple(closed))
    return sharding._replace(dims=tuple(dims), is_closed=tuple(closed))
