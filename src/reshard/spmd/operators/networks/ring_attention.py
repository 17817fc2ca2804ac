"""Steps of ring attention: a rank gets the keys of one other part of the sequence.

In turn `j` the queries of part `p` see the keys of part `p + j`, counted around, and only ranks
whose queries see some of those keys get them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.cut_rules import CutRule, Joined, Windows, Zigzag
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.spmd.core.local_work import Stretch, stretches_of
from reshard.spmd.core.operator import (
    Attributes,
    Example,
    Infer,
    Operator,
)
from reshard.spmd.local import ring_attention
from reshard.spmd.operators.networks.attention import of_pair, of_pair_gradient
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import counted
from reshard.spmd.rules.sharding_rule import OpShardingRule

Specs = tuple[ShardingSpec, ...]


def may_turn(specs: Sequence[ShardingSpec], shapes: Sequence[Shape]) -> bool:
    """Whether queries, keys and values `[..., h, s, d]` are cut alike along their sequences.

    Parts are stretches, or the two of a zigzag. Heads may be cut as well, where each part has the
    keys of its own groups.
    """
    queries, keys, values = specs[:3]
    cut = queries.dim_specs[-2]
    if not cut.levels or any(one.dim_specs[-2] != cut for one in (keys, values)):
        return False
    if not all(map(_may_turn_dims, (queries, keys, values))):
        return False
    heads = math.prod(queries.mesh.axis_size(axis) for axis in queries.dim_specs[-3].axes)
    return shapes[0][-3] % heads == 0 and shapes[1][-3] % heads == 0


def _may_turn_dims(spec: ShardingSpec) -> bool:
    """Whether parts of sequences are one stretch or two, and those of other dimensions one."""
    return all(
        level.rule.is_default or (isinstance(level.rule, Zigzag) and dim is spec.dim_specs[-2])
        for dim in spec.dim_specs
        for level in dim.levels
    )


def attention_turn(
    shapes: Sequence[Shape],
    is_causal: bool,
    window: int | None,
    turn: int,
    query_parts: tuple[tuple[Stretch, ...], ...],
    key_parts: tuple[tuple[Stretch, ...], ...],
) -> Inferred:
    """Queries, keys and values: what is weighed in a turn, and the logarithms of the sums."""
    counted("attention_turn", shapes, 3)
    queries, keys, values = shapes
    lead = len(queries) - 3
    builder = RuleBuilder(shapes, [(*queries[:-1], values[-1]), queries[:-1]])
    for dim in range(lead):
        builder.factor([dim] * 3, [dim] * 2)
    builder.factor([lead] * 3, [lead] * 2, size=keys[lead])
    builder.factor([lead], [lead] * 2, size=queries[lead] // max(keys[lead], 1))
    builder.factor([lead + 1], [lead + 1] * 2, kind="need_replication")
    builder.factor([None, None, lead + 2], [lead + 2])
    return builder.build()


def attention_turn_gradient(
    shapes: Sequence[Shape],
    is_causal: bool,
    window: int | None,
    turn: int,
    query_parts: tuple[tuple[Stretch, ...], ...],
    key_parts: tuple[tuple[Stretch, ...], ...],
) -> Inferred:
    """Of a turn, the cotangents of queries, keys and values: operands as of attention's."""
    counted("attention_turn_gradient", shapes, 6)
    queries, keys, values = shapes[:3]
    lead = len(queries) - 3
    builder = RuleBuilder(shapes, [queries, keys, values])
    for dim in range(lead):
        builder.factor([dim] * 6, [dim] * 3)
    builder.factor([lead] * 6, [lead] * 3, size=keys[lead], kind="need_replication")
    each = queries[lead] // max(keys[lead], 1)
    builder.factor([lead, None, None, lead, lead, lead], [lead], size=each, kind="need_replication")
    for dim in (lead + 1, lead + 2):
        builder.factor([dim], [dim], kind="need_replication")
        builder.factor([None, dim], [None, dim], kind="need_replication")
        builder.factor([None, None, dim], [None, None, dim], kind="need_replication")
    return builder.build()


def _find_rule(attributes: Mapping[str, Any]) -> CutRule:
    """Where the keys of a turn are: with the part that sees them, or where they were."""
    queries, keys = attributes["query_parts"], attributes["key_parts"]
    count = len(keys)
    places: list[tuple[Stretch, int]] = []
    for number, part in enumerate(keys):
        seeing = (number - attributes["turn"]) % count
        for stretch in part:
            is_seen = ring_attention.is_reached(attributes, queries[seeing], (stretch,))
            places.append((stretch, seeing if is_seen else number))
    sizes, rules = [], []
    for (start, stop), holder in sorted(places):
        size = stop - start
        sizes.append(size)
        rules.append(Windows(tuple((0, size * (one == holder)) for one in range(count))))
    return Joined(tuple(sizes), tuple(rules))


def _place(
    specs: Sequence[ShardingSpec],
    shapes: Sequence[Shape],
    attributes: Mapping[str, Any],
    results: int,
) -> tuple[Specs, Specs] | None:
    if not may_turn(specs, shapes):
        return None
    queries = specs[0]
    sizes = shapes[0][-2], shapes[1][-2]
    asked = attributes["query_parts"], attributes["key_parts"]
    if tuple(stretches_of(queries, -2, size) for size in sizes) != asked:
        return None
    mesh, whole = queries.mesh, DimSpec()
    lead, cut = queries.dim_specs[:-2], queries.dim_specs[-2]

    own = ShardingSpec(mesh, [*lead, cut, whole])
    numbers = ShardingSpec(mesh, [*lead, cut])
    turned = own
    if attributes["turn"]:
        level = Level(cut.axes, _find_rule(attributes))
        turned = ShardingSpec(mesh, [*lead, DimSpec([level]), whole])
    if results == 2:
        return (own, turned, turned), (own, numbers)
    return (own, turned, turned, numbers, numbers, own), (own, turned, turned)


def _place_forward(
    specs: Sequence[ShardingSpec], shapes: Sequence[Shape], attributes: Mapping[str, Any]
) -> tuple[Specs, Specs] | None:
    return _place(specs, shapes, attributes, 2)


def _place_back(
    specs: Sequence[ShardingSpec], shapes: Sequence[Shape], attributes: Mapping[str, Any]
) -> tuple[Specs, Specs] | None:
    return _place(specs, shapes, attributes, 3)


def _row(name: str, infer: Infer, example: Example, **options: Any) -> Operator:
    return Operator(name, "networks", infer, example=example, **options)


def _work_forward(rule: OpShardingRule, sizes: Sequence[int], attributes: Attributes) -> float:
    return of_pair(rule, sizes) * ring_attention.count_pairs(attributes)


def _work_back(rule: OpShardingRule, sizes: Sequence[int], attributes: Attributes) -> float:
    return of_pair_gradient(rule, sizes) * ring_attention.count_pairs(attributes)


_EVEN: list[Shape] = [(2, 8, 6, 16), (2, 4, 6, 16), (2, 4, 6, 32)]
_PARTS: tuple[tuple[Stretch, ...], ...] = (((0, 3),), ((3, 6),))
_TURN = {
    "is_causal": True,
    "window": None,
    "turn": 1,
    "query_parts": _PARTS,
    "key_parts": _PARTS,
}
_TURNS = "sequences that are cut alike stay so: a rank gets the keys of one other part"

OPERATORS: tuple[Operator, ...] = (
    _row(
        "attention_turn",
        attention_turn,
        (_EVEN, _TURN),
        work=_work_forward,
        local=ring_attention.attention_turn,
        placed=_place_forward,
        note=_TURNS,
    ),
    _row(
        "attention_turn_gradient",
        attention_turn_gradient,
        ([*_EVEN, (2, 8, 6), (2, 8, 6), (2, 8, 6, 32)], _TURN),
        work=_work_back,
        local=ring_attention.attention_turn_gradient,
        placed=_place_back,
        note=_TURNS,
    ),
)
