"""Operator priorities: which operators propagate first, and in which direction.

Operators through which data passes unchanged come first: what they carry costs nothing. The
stages, each of which adds to those before it:

====  =======================================================================================
0     elementwise, reshape and transpose, both ways; dynamic slices, forwards; but not where an
      operand is read by several operators, which might disagree
1     the same with several readers
2     all others along the factors that no device needs to combine, move or have whole;
      broadcasts backwards only
3     all factors, except forwards through broadcasts
4     all
====  =======================================================================================

The stages are Shardy's (OpenXLA), op priority propagation.
"""

from __future__ import annotations

from functools import lru_cache

from reshard.spmd.core.operator import OperatorClass, find_operator
from reshard.spmd.propagation.merging import Direction
from reshard.spmd.rules.sharding_rule import OpShardingRule

STAGES = 5
ANY_STAGE = STAGES - 1


@lru_cache(maxsize=4096)
def class_of(name: str, rule: OpShardingRule) -> OperatorClass:
    """The class of an operator: that of its row, or its rule's where the row says none.

    >>> class_of("add", OpShardingRule.parse("([i], [i]) -> ([i]) {i=4}")).name
    'ELEMENTWISE'
    >>> class_of("sort", OpShardingRule.parse("([i]) -> ([i]) {i=4}")).name
    'OTHER'
    """
    known = find_operator(name).operator_class
    if known is not None:
        return known
    special = rule.reduction or rule.need_replication or rule.permutation or rule.blocked
    mappings = {mapping for mapping in rule.tensors if mapping}
    is_plain = all(len(dim) <= 1 for mapping in mappings for dim in mapping)
    is_elementwise = not special and len(mappings) <= 1 and is_plain
    return OperatorClass.ELEMENTWISE if is_elementwise else OperatorClass.OTHER


@lru_cache(maxsize=4096)
def directions(
    rule: OpShardingRule, kind: OperatorClass, is_shared: bool, stage: int
) -> tuple[Direction, ...]:
    """The directions in which an operator propagates in a stage, factor by factor.

    Args:
        rule: of the operator.
        kind: its class.
        is_shared: whether another operator reads one of its operands, scalars aside.
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
    found = Direction.NONE
    # Each stage adds to those before it, see the table of the module.
    if stage >= 1 or not is_shared:
        if kind in (OperatorClass.ELEMENTWISE, OperatorClass.REARRANGING):
            found |= Direction.BOTH
        if kind is OperatorClass.SLICING:
            found |= Direction.FORWARD
    is_broadcast = kind is OperatorClass.BROADCASTING
    if stage >= 2 and not is_special:
        found |= Direction.BACKWARD if is_broadcast else Direction.BOTH
    if stage >= 3:
        found |= Direction.BACKWARD if is_broadcast else Direction.BOTH
    if stage >= ANY_STAGE:
        found |= Direction.BOTH
    return found
