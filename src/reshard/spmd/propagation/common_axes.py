"""Common axes: the axes of each factor while an operator runs, if its tensors conflict.

All tensors of an operator must be cut alike along a factor, no axis may cut two factors, and a
factor that each device needs whole is not cut. What cuts each factor is chosen thus:

1. if the tensors agree, that is the answer;
2. of two tensors (an elementwise or a moving operator) one is kept as it is: that without cuts
   along which elements move, else the larger, else the more sharded;
3. of more, each cut of a factor in some tensor, and each beginning of it, is a candidate. The
   candidate in whose favour the most elements speak (all tensors that are cut so, or further)
   goes first; then passed-through factors before reduced and moved ones; then more shards. What
   overlaps it is shortened, and the next one goes;
4. axes of factors that must be whole go to factors that all tensors have, where they divide them.

A factor of a dimension of several is a candidate only when the one before it is cut to single
indices. The choice is Shardy's (OpenXLA, explicit reshards of the export pipeline).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.mesh import DeviceMesh
from reshard.spmd.propagation.axis_parts import (
    AxisTable,
    Parts,
    are_apart,
    begins_strictly,
    joined,
    size_of,
    without,
)
from reshard.spmd.propagation.factor_shardings import FactorShardings
from reshard.spmd.rules.sharding_rule import OpShardingRule

Axes = list[Parts]
"""The axes that cut each factor, by its index."""


def common_axes(
    rule: OpShardingRule,
    factors: Sequence[FactorShardings],
    sizes: Sequence[int],
    mesh: DeviceMesh,
) -> Axes:
    """The axes that cut each factor while the operator runs.

    Args:
        rule: of the operator.
        factors: of its tensors, operands first.
        sizes: elements of each tensor.
        mesh: whose axes they are cut along.
    """
    found = _find_agreed(rule, factors)
    if found is not None:
        return found
    # Scalars have nothing to cut.
    arrays = [number for number, mapping in enumerate(rule.tensors) if mapping]
    has_compound = any(len(dim) > 1 for mapping in rule.tensors for dim in mapping)
    if len(arrays) == 2 and not rule.need_replication and not has_compound:
        return _follow_one(rule, factors, sizes, arrays, AxisTable.of(mesh))
    found = _Vote(rule, factors, sizes, mesh).axes()
    # The vote may have cut these as well; their axes go elsewhere, or are unused.
    for factor in rule.need_replication:
        axes, found[factor] = found[factor], ()
        if axes and _is_everywhere(rule, factor):
            _distribute(rule, axes, found)
    return found


def _find_agreed(rule: OpShardingRule, factors: Sequence[FactorShardings]) -> Axes | None:
    """The axes that cut each factor in all tensors; None where they disagree."""
    found: list[Parts | None] = [None] * len(rule.sizes)
    used: Parts = ()
    for tensor in factors:
        for factor, cut in tensor.items():
            if factor in rule.need_replication and cut.axes:
                return None
            known = found[factor]
            if known is None:
                if not all(are_apart(a, b) for a in cut.axes for b in used):
                    return None
                found[factor] = cut.axes
                used += cut.axes
            elif known != cut.axes:
                return None
    return [axes or () for axes in found]


def _follow_one(
    rule: OpShardingRule,
    factors: Sequence[FactorShardings],
    sizes: Sequence[int],
    arrays: Sequence[int],
    table: AxisTable,
) -> Axes:
    """The cuts of the preferred one of two tensors, and of the other what is apart from them."""

    def preference(number: int) -> tuple[bool, int, int]:
        cuts = factors[number]
        moves = any(factor in rule.permutation and cut.axes for factor, cut in cuts.items())
        shards = 1
        for cut in cuts.values():
            shards *= size_of(cut.axes)
        return (not moves, sizes[number], shards)

    first, second = arrays
    # Of equals the first tensor is followed.
    if preference(first) < preference(second):
        first, second = second, first
    found: Axes = [()] * len(rule.sizes)
    used: Parts = ()
    for factor, cut in factors[first].items():
        found[factor] = cut.axes
        used += cut.axes
    for factor, cut in factors[second].items():
        if factor not in factors[first]:
            found[factor] = _shorten(cut.axes, used, table)
    return found


def _shorten(axes: Parts, used: Parts, table: AxisTable) -> Parts:
    """The longest beginning of `axes` that is apart from `used`; of whole levels."""
    for place, part in enumerate(axes):
        found = without(part, used)
        if found != part:
            left = axes[:place] if found is None else (*axes[:place], found)
            return table.whole_levels(left)
    return axes


def _is_everywhere(rule: OpShardingRule, factor: int) -> bool:
    """Whether all tensors but scalars have a factor."""
    return all(any(factor in dim for dim in mapping) for mapping in rule.tensors if mapping)


def _distribute(rule: OpShardingRule, axes: Parts, found: Axes) -> None:
    """Cut factors that all tensors have along axes that are free, where they divide them."""
    special = {*rule.reduction, *rule.need_replication, *rule.permutation}
    # A level with a rule of its own stays where it is, and nothing cuts its parts further here.
    waiting = [part for part in axes if not part[3]]
    for factor, size in enumerate(rule.sizes):
        if factor in special or not size or not _is_everywhere(rule, factor):
            continue
        if any(part[3] for part in found[factor]):
            continue
        shards = size_of(found[factor])
        if size % shards:
            continue
        room = size // shards
        while waiting and room % waiting[0][2] == 0:
            room //= waiting[0][2]
            found[factor] = joined(found[factor], waiting.pop(0))


@dataclass(slots=True)
class _Candidate:
    factor: int
    axes: Parts
    elements: int
    shards: int


class _Vote:
    """The third step: candidates, and who goes first."""

    def __init__(
        self,
        rule: OpShardingRule,
        factors: Sequence[FactorShardings],
        sizes: Sequence[int],
        mesh: DeviceMesh,
    ) -> None:
        self.rule = rule
        # Ties go by the axes' names, not by their places in the mesh.
        order = sorted(range(len(mesh.axis_names)), key=lambda axis: mesh.axis_names[axis])
        self.rank = {axis: place for place, axis in enumerate(order)}
        self.full = mesh.shape
        self.table = AxisTable.of(mesh)
        # For each factor of a dimension of several, those right before it that are not single
        # indices yet.
        self.needs: dict[int, set[int]] = {}
        for mapping in rule.tensors:
            for dim in mapping:
                for before, factor in itertools.pairwise(dim):
                    self.needs.setdefault(factor, set()).add(before)
        proposed: dict[tuple[int, Parts], None] = {}
        for tensor in factors:
            for factor, cut in tensor.items():
                # Every beginning of a cut is a candidate, so that what is too long may be taken in
                # part.
                for count in range(len(cut.axes), 0, -1):
                    if self.table.whole_levels(cut.axes[:count]) == cut.axes[:count]:
                        proposed[factor, cut.axes[:count]] = None
        self.candidates = []
        for factor, axes in proposed:
            elements = sum(
                size
                for tensor, size in zip(factors, sizes, strict=True)
                if factor in tensor
                and (tensor[factor].axes == axes or begins_strictly(axes, tensor[factor].axes))
            )
            self.candidates.append(_Candidate(factor, axes, elements, size_of(axes)))

    def axes(self) -> Axes:
        """The axes that cut each factor."""
        found: Axes = [()] * len(self.rule.sizes)
        while True:
            valid = [one for one in self.candidates if not self.needs.get(one.factor)]
            if not valid:
                return found
            best = max(valid, key=self._key)
            factor, axes = best.factor, best.axes
            found[factor] = axes
            if size_of(axes) == self.rule.sizes[factor]:
                for needed in self.needs.values():
                    needed.discard(factor)
            self.candidates = [one for one in self.candidates if self._remains(one, best, found)]

    def _remains(self, one: _Candidate, best: _Candidate, found: Axes) -> bool:
        if one.factor == best.factor:
            # A longer cut of the same factor remains, counted by what it adds.
            one.shards = size_of(one.axes) // size_of(best.axes)
            return one is not best and begins_strictly(best.axes, one.axes)
        axes = _shorten(one.axes, best.axes, self.table)
        one.shards = size_of(axes)
        if axes != one.axes:
            one.axes = axes
            one.shards //= size_of(found[one.factor])
            return axes != found[one.factor]
        return True

    def _key(self, one: _Candidate) -> tuple[object, ...]:
        kind = 3
        if one.factor in self.rule.reduction:
            kind = 2
        elif one.factor in self.rule.permutation:
            kind = 1
        elif one.factor in self.rule.need_replication:
            kind = 0
        # The largest key goes first. Names decide last, so that an answer does not depend on the
        # places of axes in the mesh.
        names = tuple(
            (self.rank[part[0]], part[2] != self.full[part[0]], part[1], part[2])
            for part in one.axes
        )
        return (one.elements, kind, one.shards, one.factor, len(one.axes), names)
