"""Work: additions and multiplications of an operator on one rank, which its row names.

Products of matrices and operators built on them count two for each index of all factors together
(einsum, convolution), attention those of its two products, factorisations the leading term of what
LAPACK does. Operators that only read and write count none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from reshard.spmd.rules.sharding_rule import OpShardingRule

Sizes = Sequence[int]
Work = Callable[[OpShardingRule, Sizes], float]
"""From a rule and the sizes of its factors on a rank to additions and multiplications there."""


def no_operations(rule: OpShardingRule, sizes: Sizes) -> float:
    """None: the operator reads and writes."""
    return 0.0


def of_product(rule: OpShardingRule, sizes: Sizes) -> float:
    """Two for each index of all factors together: what is multiplied is added up.

    >>> of_product(OpShardingRule.parse("([i, k], [k]) -> ([i]) {i=4, k=8} reduction={k}"), (4, 8))
    64.0
    """
    return float(math.prod(sizes) * 2)


def of_own_rule(rule: OpShardingRule, sizes: Sizes) -> float:
    """The work of an operator with a rule alone: that of a product where operands are reduced."""
    arrays = sum(bool(mapping) for mapping in rule.operands)
    return of_product(rule, sizes) if rule.reduction and arrays > 1 else 0.0


def of_attention(rule: OpShardingRule, sizes: Sizes) -> float:
    """Scores, for each of the queries' channels, and what they weigh, for each of the values'."""
    # By dimensions: what only a gradient reads has factors of its own in the rule.
    queries, keys, values = (_dimensions(mapping, sizes) for mapping in rule.operands[:3])
    pairs = math.prod(queries[:-1]) * keys[-2]
    return float(2 * pairs * (queries[-1] + values[-1]))


def of_scores(rule: OpShardingRule, sizes: Sizes) -> float:
    """Scores alone: two for each query, key and channel of both."""
    return float(2 * math.prod(sizes))


def of_attention_gradient(rule: OpShardingRule, sizes: Sizes) -> float:
    """Scores and the agreement of values, found again, and the products with their slopes."""
    return 2 * of_attention(rule, sizes)


def of_pair(rule: OpShardingRule, sizes: Sizes) -> float:
    """Of attention, for a query and a key of each head; none on a rank without keys."""
    queries, keys, values = (_dimensions(mapping, sizes) for mapping in rule.operands[:3])
    return float(2 * math.prod(queries[:-2]) * (queries[-1] + values[-1]) * (keys[-2] > 0))


def of_matrices(leading_term: Callable[[int, int], float]) -> Work:
    """The work of a factorisation: a leading term for each matrix `[m, n]` of a stack.

    Leading terms are those of Golub and Van Loan, "Matrix Computations", 4th edition, chapters 3,
    4, 5, 7 and 8.
    """

    def work(rule: OpShardingRule, sizes: Sizes) -> float:
        *lead, rows, columns = _dimensions(rule.operands[0], sizes)
        return math.prod(lead) * float(leading_term(rows, columns))

    return work


def of_systems(leading_term: Callable[[int, int], float]) -> Work:
    """The work of a solver: the leading term for matrices `[n, n]` and right sides `[n, k]`."""

    def work(rule: OpShardingRule, sizes: Sizes) -> float:
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
