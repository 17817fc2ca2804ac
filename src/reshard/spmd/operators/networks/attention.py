"""Attention, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.sharding import ShardingSpec
from reshard.spmd.core.local_work import has_plain_parts
from reshard.spmd.core.operator import Attributes, Example, Infer, Operator, Sizes, dimension_sizes
from reshard.spmd.local import attention as local
from reshard.spmd.local.attention import SeenKeys
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import counted
from reshard.spmd.rules.sharding_rule import OpShardingRule


def attention(
    shapes: Sequence[Shape], is_causal: bool = False, window: int | None = None
) -> Inferred:
    """Queries `[..., h, s, d]`, keys `[..., g, t, d]`, values `[..., g, t, e]`, maybe a mask.

    The `h` heads of the queries are `g` groups, each with keys and values of its own. The mask
    broadcasts to `[..., h, s, t]`. A causal query has to know its place.

    >>> print(attention([(2, 8, 5, 16), (2, 4, 7, 16), (2, 4, 7, 32)]).rule)
    ([i, jk, l, n], [i, j, o, n], [i, j, o, m]) -> ([i, jk, l, m])
    {i=2, j=4, k=2, l=5, m=32, n=16, o=7} need_replication={n, o}
    """
    if len(shapes) != 4:
        counted("attention", shapes, 3)
    queries, keys, values = shapes[:3]
    rank = len(queries)
    lead = rank - 3
    if (
        lead < 0
        or len(keys) != rank
        or keys[:-1] != values[:-1]
        or queries[:lead] != keys[:lead]
        or queries[-1] != keys[-1]
        or queries[lead] % max(keys[lead], 1)
    ):
        raise SpecError(
            f"attention of {', '.join(map(str, shapes))}; [..., h, s, d], [..., g, t, d] and "
            "[..., g, t, e] were expected, g dividing h"
        )
    # Heads are the product of groups and the heads of each, groups being the major factor.
    heads, groups = queries[lead], keys[lead]
    each = heads // max(groups, 1)
    scores = (*queries[:-1], keys[-2])
    mask = shapes[3] if len(shapes) == 4 else ()
    missing = rank - len(mask)
    if missing < 0 or any(b not in (1, a) for a, b in zip(scores[missing:], mask, strict=True)):
        raise SpecError(f"mask {mask} of scores {scores}; it must broadcast to them")

    def of_mask(dim: int) -> int | None:
        own = dim - missing
        is_there = len(shapes) == 4 and own >= 0 and mask[own] == scores[dim]
        return own if is_there else None

    is_placed = is_causal or window is not None
    builder = RuleBuilder(shapes, [(*queries[:-1], values[-1])])

    def factor(dims: Sequence[int | None], result: int | None, **kind: object) -> None:
        given = list(dims) if len(shapes) == 4 else list(dims)[:3]
        builder.factor(given, [result], **kind)  # type: ignore[arg-type]

    # Batch, groups of heads, heads of a group, queries, and the elements of values pass through.
    for dim in range(lead):
        factor([dim, dim, dim, of_mask(dim)], dim)
    factor([lead, lead, lead, of_mask(lead)], lead, size=groups)
    if each != 1:
        factor([lead, None, None, of_mask(lead)], lead, size=each)
    factor([rank - 2, None, None, of_mask(rank - 2)], rank - 2, adjusted=is_placed)
    factor([None, None, rank - 1, None], rank - 1)
    # Scores must be complete before the softmax, and the softmax sees all keys: neither sum over a
    # part can be combined later.
    factor([rank - 1, rank - 1, None, None], None, kind="need_replication")
    factor([None, rank - 2, rank - 2, of_mask(rank - 1)], None, kind="need_replication")
    return builder.build()


def attention_gradient(
    shapes: Sequence[Shape], is_causal: bool = False, window: int | None = None
) -> Inferred:
    """Of attention, the cotangents of queries, keys and values: of these and of the result's.

    Those of keys and values add up queries, and all heads of a group: ranks that have parts of
    these have contributions.

    >>> print(attention_gradient([(2, 8, 5, 16), (2, 4, 7, 16), (2, 4, 7, 32), (2, 8, 5, 32)]).rule)
    ([i, jk, l, n], [i, j, m, n], [i, j, m, o], [i, jk, l, o]) ->
    ([i, jk, l, n], [i, j, m, n], [i, j, m, o])
    {i=2, j=4, k=2, l=5, m=7, n=16, o=32} reduction={k, l} need_replication={m, n, o}
    """
    counted("attention_gradient", shapes, 4)
    queries, keys, values = shapes[:3]
    lead = len(queries) - 3
    builder = RuleBuilder(shapes, [queries, keys, values])
    for dim in range(lead):
        builder.factor([dim] * 4, [dim] * 3)
    builder.factor([lead] * 4, [lead] * 3, size=keys[lead])
    each = queries[lead] // max(keys[lead], 1)
    builder.factor([lead, None, None, lead], [lead], size=each, kind="reduction")
    place, channel = lead + 1, lead + 2
    is_placed = is_causal or window is not None
    builder.factor([place, None, None, place], [place], kind="reduction", adjusted=is_placed)
    builder.factor([None, place, place], [None, place, place], kind="need_replication")
    builder.factor([channel] * 2, [channel] * 2, kind="need_replication")
    of_values = [None, None, channel]
    builder.factor([*of_values, channel], of_values, kind="need_replication")
    return builder.build()


def _finds_places(
    specs: Sequence[ShardingSpec], shapes: Sequence[Shape], attributes: Mapping[str, Any]
) -> bool:
    # Queries are cut as the mask and cotangents are, too.
    return all(map(has_plain_parts, specs))


def of_attention(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
    """Scores, for each of the queries' channels, and what they weigh, for each of the values'.

    >>> from reshard.spmd.core.operator import rule_of
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
        (dimension_sizes(mapping, rule.sizes)[-2], dimension_sizes(mapping, sizes)[-2])
        for mapping in rule.operands[:2]
    )
    seen = SeenKeys(attributes.get("is_causal", False), attributes.get("window"))
    return seen.most_pairs(queries, keys)


def of_pair(rule: OpShardingRule, sizes: Sizes) -> float:
    """Of attention, for a query and a key of each head; none on a rank without keys."""
    return _of_products(rule, sizes, 1, 1)


def of_pair_gradient(rule: OpShardingRule, sizes: Sizes) -> float:
    """Return the work of attention's gradient for a query and a key of each head."""
    return _of_products(rule, sizes, 3, 2)


def _of_products(rule: OpShardingRule, sizes: Sizes, of_queries: int, of_values: int) -> float:
    """So many products of the queries' channels and of the values', for a pair of each head."""
    # By dimensions: what only a gradient reads has factors of its own in the rule.
    queries, keys, values = (dimension_sizes(mapping, sizes) for mapping in rule.operands[:3])
    channels = of_queries * queries[-1] + of_values * values[-1]
    return float(2 * math.prod(queries[:-2]) * channels * (keys[-2] > 0))


def _row(name: str, infer: Infer, example: Example, **options: Any) -> Operator:
    return Operator(name, "networks", infer, example=example, **options)


_HEADS: list[Shape] = [(2, 8, 5, 16), (2, 4, 7, 16), (2, 4, 7, 32)]

OPERATORS: tuple[Operator, ...] = (
    _row(
        "attention",
        attention,
        (_HEADS, {}),
        linear=(2,),
        work=of_attention,
        local=local.attention,
        knows_place=_finds_places,
        note="heads are cut by groups of keys; keys are whole along their sequence",
    ),
    _row(
        "attention_gradient",
        attention_gradient,
        ([*_HEADS, (2, 8, 5, 32)], {}),
        work=of_attention_gradient,
        local=local.attention_gradient,
        knows_place=_finds_places,
        note="weights are found again; queries that are cut have contributions",
    ),
)
