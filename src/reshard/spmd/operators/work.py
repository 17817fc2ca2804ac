"""Work: additions and multiplications of an operator on one rank, which its row names.

Products of matrices and operators built on them count two for each index of all factors together
(einsum, convolution), attention those of its two products, factorisations the leading term of what
LAPACK does. Operators that only read and write count none. What attributes say counts as well: of
attention, the pairs of a query and a key that see each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from reshard.spmd.local.attention import SeenKeys
from reshard.spmd.rules.sharding_rule import OpShardingRule

Sizes = Sequence[int]
Attributes = Mapping[str, Any]
Work = Callable[[OpShardingRule, Sizes, Attributes], float]
"""From a rule, the sizes of its factors on a rank, and the attributes of the operation to additions
and multiplications there."""


def no_operations(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
    """None: the operator reads and writes."""
    return 0.0


def of_product(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
    """Two for each index of all factors together: what is multiplied is added up.

    >>> rule = OpShardingRule.parse("([i, k], [k]) -> ([i]) {i=4, k=8} reduction={k}")
    >>> of_product(rule, (4, 8), {})
    64.0
    """
    return float(math.prod(sizes) * 2)


def of_own_rule(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
    """The work of an operator with a rule alone: that of a product where operands are reduced."""
    arrays = sum(bool(mapping) for mapping in rule.operands)
    return of_product(rule, sizes, attributes) if rule.reduction and arrays > 1 else 0.0


def of_attention(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
    """Scores, for each of the queries' channels, and what they weigh, for each of the values'.

    >>> from reshard.spmd.operators.table import rule_of
    >>> rule = rule_of("attention", [(1, 8, 16)] * 3)
    >>> of_attention(rule, rule.sizes, {}), of_attention(rule, rule.sizes, {"is_causal": True})
    (4096.0, 2304.0)
    """
    return of_pair(rule, sizes) * _count_pairs(rule, sizes, attributes)


def of_attention_gradient(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
    """Scores and the agreement of values, found again, and the three products with them."""
    return of_pair_gradient(rule, sizes) * _count_pairs(rule, sizes, attributes)


def _count_pairs(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> int:
    """Pairs of a query and a key of a head that see each other, on the busiest rank."""
    queries, keys = (
        (_dimensions(mapping, rule.sizes)[-2], _dimensions(mapping, sizes)[-2])
        for mapping in rule.operands[:2]
    )
    seen = SeenKeys(attributes.get("is_causal", False), attributes.get("window"))
    return seen.most_pairs(queries, keys)


def of_pair(rule: OpShardingRule, sizes: Sizes) -> float:
    """Of attention, for a query and a key of each head; none on a rank without keys."""
    return _of_products(rule, sizes, 1, 1)


def of_pair_gradient(rule: OpShardingRule, sizes: Sizes) -> float:
    """Of attention's gradient, likewise."""
    return _of_products(rule, sizes, 3, 2)


def _of_products(rule: OpShardingRule, sizes: Sizes, of_queries: int, of_values: int) -> float:
    """So many products of the queries' channels and of the values', for a pair of each head."""
    # By dimensions: what only a gradient reads has factors of its own in the rule.
    queries, keys, values = (_dimensions(mapping, sizes) for mapping in rule.operands[:3])
    channels = of_queries * queries[-1] + of_values * values[-1]
    return float(2 * math.prod(queries[:-2]) * channels * (keys[-2] > 0))


def of_matrices(leading_term: Callable[[int, int], float]) -> Work:
    """The work of a factorisation: a leading term for each matrix `[m, n]` of a stack.

    Leading terms are those of Golub and Van Loan, "Matrix Computations", 4th edition, chapters 3,
    4, 5, 7 and 8.
    """

    def work(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
        *lead, rows, columns = _dimensions(rule.operands[0], sizes)
        return math.prod(lead) * float(leading_term(rows, columns))

    return work


def of_systems(leading_term: Callable[[int, int], float]) -> Work:
    """The work of a solver: the leading term for matrices `[n, n]` and right sides `[n, k]`."""

    def work(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
        left, right = rule.operands[0], rule.operands[1]
        own = {factor for dim in left for factor in dim}
        columns = math.prod(sizes[factor] for dim in right for factor in dim if factor not in own)
        *_, size = _dimensions(left, sizes)
        batch = {factor for part in (left[:-2], right) for dim in part for factor in dim} & own
        batch -= {factor for dim in left[-2:] for factor in dim}
        repeated = math.prod(sizes[factor] for factor in batch)
        return repeated * float(leading_term(size, columns))

    return work


def _dimensions(mapping: Iterable[Iterable[int]], sizes: Sizes) -> list[int]:
    return [math.prod(sizes[factor] for factor in dim) for dim in mapping]
