"""Merging: the sharding of a factor on which conflicting tensors agree.

Each tensor of an operator has a sharding for each of its factors. A strategy decides which axes
propagate along a factor, from all tensors that have it to all others:

BASIC takes the longest common prefix of all tensors, up to the first axis that conflicts, because
another factor uses it in any tensor. All tensors get the same::

    i: a b | a | (none)       a b to all three
    i: a b | a c | (none)     a to the third, nothing to the others

PRIORITIZED takes the same prefix, of the tensors that have joined: a dimension of a weaker user
priority does not hinder a stronger dimension, which wins a conflict. In Shardy, and so in BASIC, a
dimension that waits is closed, and the weaker sharding still blocks the stronger one::

    i: a (priority 0) | b (priority 1) | (none)     a to the third; in BASIC nothing

AGGRESSIVE considers conflicts within each tensor only, so that more is sharded, at the cost of
reshards. If two factors conflict over an axis of a tensor, the factor with the larger source (the
largest tensor that has the agreed axes already) has precedence; for elementwise operators then the
factor with more shards; then the factor whose source comes first; then the first factor.

WIDEST is for tensors that disagree: it takes the sharding with the most parts that have elements,
of equals that of the larger tensor, then that of the first. If two factors conflict over an axis
of a tensor, the factor with more parts has precedence::

    i: a (2) | b (4) | (none)     b to the third

All strategies only extend existing shardings. The results of BASIC and AGGRESSIVE are those of
Shardy's basic and aggressive factor propagation (OpenXLA, `docs/propagation.md`). PRIORITIZED and
WIDEST are what nabla's document calls BASIC and AGGRESSIVE.

Operators through which data passes unchanged propagate first, since what they propagate costs
nothing. Each stage of operator priority adds to the previous ones:

====  =======================================================================================
0     elementwise, reshape and transpose, both ways; dynamic slices, forwards; but not if an
      operand is read by several operators, which might disagree
1     the same with several readers
2     all others along factors that are not reduced, permuted or replicated; broadcasts
      backwards only
3     all factors, except forwards through broadcasts
4     all
====  =======================================================================================
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from reshard.spmd.core.operator import OperatorClass, find_operator
from reshard.spmd.propagation.axes import (
    AxisTable,
    FactorSharding,
    FactorShardings,
    Part,
    Parts,
    begins,
    begins_strictly,
    covers,
    size_of,
    without,
)
from reshard.spmd.rules.sharding_rule import OpShardingRule


class Direction(enum.IntFlag):
    """The directions in which an operator propagates along a factor.

    >>> Direction.FORWARD | Direction.BACKWARD is Direction.BOTH
    True
    """

    NONE = 0
    FORWARD = 1
    BACKWARD = 2
    BOTH = 3


class OperatorTensors:
    """The factors of an operator's tensors, as far as they are merged.

    Args:
        rule: of the operator.
        table: of the mesh's axes.
        factors: those of each tensor, operands first. They are extended in place.
        replicated: axes that each tensor may not be cut along: its replicated and partial ones.
        is_elementwise: whether the operator is.
    """

    def __init__(
        self,
        rule: OpShardingRule,
        table: AxisTable,
        factors: list[FactorShardings],
        replicated: list[Parts],
        is_elementwise: bool,
    ) -> None:
        self.rule = rule
        self.table = table
        self.factors = factors
        self.replicated = replicated
        self.is_elementwise = is_elementwise
        self.changed: set[int] = set()

    @property
    def count_of_operands(self) -> int:
        """The tensors before the results."""
        return len(self.rule.operands)

    def extend(self, tensor: int, factor: int, axes: Parts) -> None:
        """Shard a factor of a tensor along `axes`, if these extend its axes."""
        cut = self.factors[tensor].get(factor)
        if cut is not None and begins_strictly(cut.axes, axes):
            cut.axes = axes
            self.changed.add(tensor)


Strategy = Callable[[OperatorTensors, Sequence[Direction]], None]


def merge_basic(tensors: OperatorTensors, directions: Sequence[Direction]) -> None:
    """Extend all tensors by what all of them agree on, factor by factor."""
    for factor, direction in enumerate(directions):
        agreed = _find_agreed(tensors, factor, direction)
        if agreed:
            _extend_all(tensors, factor, agreed, range(len(tensors.factors)))


def merge_prioritized(tensors: OperatorTensors, directions: Sequence[Direction]) -> None:
    """Extend the tensors that have joined by what these agree on, factor by factor."""
    for factor, direction in enumerate(directions):
        agreed = _find_agreed(tensors, factor, direction)
        if agreed:
            cuts = [factors.get(factor) for factors in tensors.factors]
            joined = [n for n, cut in enumerate(cuts) if cut is None or not cut.is_waiting]
            _extend_all(tensors, factor, agreed, joined)


def _extend_all(
    tensors: OperatorTensors, factor: int, agreed: Parts, numbers: Sequence[int]
) -> None:
    """Extend the tensors of these numbers by the prefix of the agreed axes that all can take."""
    axes = _fit_all(tensors, factor, agreed, numbers)
    if axes:
        for tensor in numbers:
            tensors.extend(tensor, factor, axes)


def merge_aggressive(tensors: OperatorTensors, directions: Sequence[Direction]) -> None:
    """Extend each tensor by what fits there, the preferred factors first."""
    agreed = [_find_agreed(tensors, factor, way) for factor, way in enumerate(directions)]
    if any(agreed):
        _extend_each(tensors, agreed, _sort_by_preference(tensors, agreed))


def merge_widest(tensors: OperatorTensors, directions: Sequence[Direction]) -> None:
    """Extend each tensor by the cut into the most parts, as far as it fits there."""
    widest = [_find_widest(tensors, factor, way) for factor, way in enumerate(directions)]
    if any(widest):
        # The sort is stable: among factors with equal parts the preferred is first.
        preferred = _sort_by_preference(tensors, widest)
        by_parts = sorted(preferred, key=lambda f: -_count_parts(tensors, f, widest[f]))
        _extend_each(tensors, widest, by_parts)


def _extend_each(tensors: OperatorTensors, agreed: Sequence[Parts], factors: Sequence[int]) -> None:
    """Extend each tensor by what fits there of each factor, in the order of the factors."""
    count = tensors.count_of_operands
    for factor in factors:
        # Results first: what they could not take, elementwise operands do not take either.
        for tensor in (*range(count, len(tensors.factors)), *range(count)):
            axes = _fit_one(tensors, tensor, factor, agreed[factor])
            if axes and tensor < count and tensors.is_elementwise:
                axes = _limit_to_results(tensors, factor, axes)
            if axes:
                tensors.extend(tensor, factor, axes)


STRATEGIES: dict[str, Strategy] = {
    "basic": merge_basic,
    "prioritized": merge_prioritized,
    "aggressive": merge_aggressive,
    "widest": merge_widest,
}


def _find_widest(tensors: OperatorTensors, factor: int, direction: Direction) -> Parts:
    """Return the sharding of a factor with the most shards, of the tensors of a direction."""
    count = tensors.count_of_operands
    from_operands, from_results = direction & Direction.FORWARD, direction & Direction.BACKWARD
    # A single part shards nothing.
    best: tuple[int, int] = (1, -1)
    axes: Parts = ()
    for number, factors in enumerate(tensors.factors):
        cut = factors.get(factor)
        if cut is None or not (from_operands if number < count else from_results):
            continue
        elements = math.prod(tensors.rule.sizes[f] for f in factors)
        candidate = (_count_parts(tensors, factor, cut.axes), elements)
        if cut.axes and candidate > best:
            best, axes = candidate, cut.axes
    return axes


def _count_parts(tensors: OperatorTensors, factor: int, axes: Parts) -> int:
    """Return the number of nonempty shards into which axes cut a factor."""
    # Further parts would be empty.
    return min(size_of(axes), max(tensors.rule.sizes[factor], 1))


def _find_agreed(tensors: OperatorTensors, factor: int, direction: Direction) -> Parts:
    """Return the longest beginning the tensors agree on along a factor, conflicts aside."""
    if direction is Direction.NONE:
        return ()
    count = tensors.count_of_operands
    # One direction: only the group it comes from may lengthen the answer, the other may shorten it.
    first, second = tensors.factors[:count], tensors.factors[count:]
    if direction is Direction.BACKWARD:
        first, second = second, first
    axes: Parts = ()
    can_extend = True
    for group in (first, second):
        for factors in group:
            cut = factors.get(factor)
            if cut is not None:
                axes, can_extend = _find_common(axes, cut.axes, can_extend)
        if direction is not Direction.BOTH:
            can_extend = False
    return axes


def _find_common(old: Parts, new: Parts, can_extend: bool) -> tuple[Parts, bool]:
    """Return the common beginning of two sequences of axes, and whether more may follow.

    Without `can_extend` the answer is at most `old`.
    """
    if old == new:
        return old, can_extend
    shared = min(len(old), len(new))
    for place in range(shared):
        old_part, new_part = old[place], new[place]
        if old_part == new_part:
            continue
        # `new` has only the beginning of this axis: the answer ends there if `new` goes on.
        if begins(new_part, old_part):
            if len(new) > place + 1:
                return (*old[:place], new_part), False
            return old, can_extend
        # The other way round: `old` ends within an axis of `new`, which may be taken as it is.
        if begins(old_part, new_part):
            if not can_extend or len(old) > place + 1:
                return (*old[:place], old_part), False
            return new, can_extend
        return old[:place], False
    if len(old) >= len(new):
        return old, can_extend
    return (new if can_extend else old), can_extend


def _truncate(table: AxisTable, axes: Parts, fit: Callable[[Part, int], Part | None]) -> Parts:
    """Return the axes up to the first that does not fit, or fits in part."""
    before = 1
    for place, part in enumerate(axes):
        fitting = fit(part, before)
        if fitting is None:
            return table.whole_levels(axes[:place])
        if fitting != part:
            return table.whole_levels((*axes[:place], fitting))
        before *= part[2]
    return axes


def _fit_all(tensors: OperatorTensors, factor: int, axes: Parts, numbers: Sequence[int]) -> Parts:
    """Return the prefix of the agreed axes that the tensors of these numbers can all take."""
    size = tensors.rule.sizes[factor]

    def fit(part: Part, before: int) -> Part | None:
        for number in numbers:
            factors = tensors.factors[number]
            fitting = _fit_with(factors, factor, part)
            cut = factors.get(factor)
            if fitting is not None and cut is not None:
                fitting = _fit_within(cut, tensors.replicated[number], fitting, before, size)
            if fitting is None:
                return None
            part = fitting
        return part

    return _truncate(tensors.table, axes, fit)


def _fit_one(tensors: OperatorTensors, tensor: int, factor: int, axes: Parts) -> Parts:
    """Return the prefix of the agreed axes that a tensor can take along a factor."""
    factors = tensors.factors[tensor]
    cut = factors.get(factor)
    if cut is None or not axes:
        return ()
    size = tensors.rule.sizes[factor]
    replicated = tensors.replicated[tensor]
    axes = _truncate(
        tensors.table, axes, lambda part, before: _fit_within(cut, replicated, part, before, size)
    )
    if not begins_strictly(cut.axes, axes):
        return ()
    return _truncate(tensors.table, axes, lambda part, _: _fit_with(factors, factor, part))


def _fit_with(factors: FactorShardings, factor: int, part: Part) -> Part | None:
    """Return the beginning of an axis that no other factor of the tensor uses."""
    remaining: Part | None = part
    for other, cut in factors.items():
        if other != factor and (cut.axes or cut.overflow):
            remaining = without(part, cut.overflow + cut.axes)
            if remaining is None:
                return None
            part = remaining
    return remaining


def _fit_within(
    cut: FactorSharding, replicated: Parts, part: Part, before: int, size: int
) -> Part | None:
    """Return the beginning of an axis by which a factor can be cut further, or is cut already.

    Args:
        cut: of the factor.
        replicated: axes the tensor may not be cut along.
        part: the axis.
        before: parts into which the axes before it cut.
        size: of the factor.
    """
    free = without(part, replicated)
    if free is None:
        return None
    # Cut by it already.
    if any(covers(axis, free) for axis in cut.axes):
        return free
    # Behind axes that overflow nothing can be added: they are the last of their dimension.
    if not cut.is_closed and not cut.overflow:
        # The minor-most factor may be cut unevenly, all others only in parts that divide them.
        if cut.is_last:
            return free
        if size % before == 0:
            common = math.gcd(size // before, free[2])
            if common == free[2]:
                return free
            # A part of a level with a rule of its own cannot be shortened.
            if common != 1 and not free[3]:
                return (free[0], free[1], common, 0)
    if cut.axes and begins(cut.axes[-1], free):
        return cut.axes[-1]
    return None


def _sort_by_preference(tensors: OperatorTensors, agreed: Sequence[Parts]) -> list[int]:
    """Return the factors in the order in which they may take axes."""
    # The elements and the number of each factor's source: the largest tensor that is cut so
    # already.
    sizes = [-1] * len(agreed)
    indices = [-1] * len(agreed)
    for number, factors in enumerate(tensors.factors):
        elements = math.prod(tensors.rule.sizes[factor] for factor in factors)
        for factor, cut in factors.items():
            axes = agreed[factor]
            is_source = axes and (axes == cut.axes or begins_strictly(axes, cut.axes))
            if is_source and elements > sizes[factor]:
                sizes[factor], indices[factor] = elements, number
    shards = [size_of(axes) if tensors.is_elementwise else 0 for axes in agreed]
    return sorted(
        range(len(agreed)),
        key=lambda factor: (-sizes[factor], -shards[factor], indices[factor], factor),
    )


def _limit_to_results(tensors: OperatorTensors, factor: int, axes: Parts) -> Parts:
    """Return the prefix of the axes that every result has: operands take no more."""
    for factors in tensors.factors[tensors.count_of_operands :]:
        cut = factors.get(factor)
        if cut is not None and begins_strictly(cut.axes, axes):
            axes = cut.axes
    return axes


STAGES = 5
ANY_STAGE = STAGES - 1


@lru_cache(maxsize=4096)
def class_of(name: str, rule: OpShardingRule) -> OperatorClass:
    """Return the class of an operator: that of its record, or the class that its rule implies.

    >>> class_of("add", OpShardingRule.parse("([i], [i]) -> ([i]) {i=4}")).name
    'ELEMENTWISE'
    >>> class_of("sort", OpShardingRule.parse("([i]) -> ([i]) {i=4}")).name
    'OTHER'
    """
    operator_class = find_operator(name).operator_class
    if operator_class is not None:
        return operator_class
    special = rule.reduction or rule.need_replication or rule.permutation or rule.blocked
    mappings = {mapping for mapping in rule.tensors if mapping}
    is_plain = all(len(dim) <= 1 for mapping in mappings for dim in mapping)
    is_elementwise = not special and len(mappings) <= 1 and is_plain
    return OperatorClass.ELEMENTWISE if is_elementwise else OperatorClass.OTHER


@lru_cache(maxsize=4096)
def directions(
    rule: OpShardingRule, kind: OperatorClass, is_shared: bool, stage: int
) -> tuple[Direction, ...]:
    """Return the directions in which an operator propagates in a stage, factor by factor.

    Args:
        rule: of the operator.
        kind: its class.
        is_shared: whether another operator reads any of its operands, scalars aside.
        stage: 0 to 4.

    >>> rule = OpShardingRule.parse("([i, k], [k, j]) -> ([i, j]) {i=8, j=8, k=8} reduction={k}")
    >>> [way.name for way in directions(rule, OperatorClass.OTHER, False, 2)]
    ['BOTH', 'BOTH', 'NONE']
    >>> rule = OpShardingRule.parse("([i]) -> ([i, j]) {i=4, j=2}")
    >>> [directions(rule, OperatorClass.BROADCASTING, False, stage)[0].name for stage in (3, 4)]
    ['BACKWARD', 'BOTH']
    """
    special = {*rule.reduction, *rule.need_replication, *rule.permutation}
    return tuple(
        Direction.NONE
        if factor in rule.blocked
        else _find_direction(kind, is_shared, stage, factor in special)
        for factor in range(len(rule.sizes))
    )


def _find_direction(
    kind: OperatorClass, is_shared: bool, stage: int, is_special: bool
) -> Direction:
    direction = Direction.NONE
    # Each stage adds to those before it, see the table of the module.
    if stage >= 1 or not is_shared:
        if kind in (OperatorClass.ELEMENTWISE, OperatorClass.REARRANGING):
            direction |= Direction.BOTH
        if kind is OperatorClass.SLICING:
            direction |= Direction.FORWARD
    is_broadcast = kind is OperatorClass.BROADCASTING
    if stage >= 2 and not is_special:
        direction |= Direction.BACKWARD if is_broadcast else Direction.BOTH
    if stage >= 3:
        direction |= Direction.BACKWARD if is_broadcast else Direction.BOTH
    if stage >= ANY_STAGE:
        direction |= Direction.BOTH
    return direction
