"""Operators of neural networks: softmax, norms, losses, attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.cut_rules import Windows
from reshard.errors import SpecError
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.spmd.local import attention as local
from reshard.spmd.local import ring_attention
from reshard.spmd.local.local_work import has_plain_parts
from reshard.spmd.operators.operator import Example, Infer, Operator
from reshard.spmd.operators.work import of_attention, of_attention_gradient, of_scores
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import axes_of, axis_of, counted, kept, one_operand


def softmax(shapes: Sequence[Shape], axis: int | Sequence[int] = -1) -> Inferred:
    """Exponentials over their sum along an axis.

    >>> print(softmax([(4, 8)]).rule)
    ([i, j]) -> ([i, j]) {i=4, j=8} need_replication={j}
    """
    shape = one_operand("softmax", shapes)
    return kept(shape, whole=axes_of(len(shape), axis))


def norm(shapes: Sequence[Shape], dims: int = 1) -> Inferred:
    """The norm over the last dimensions, with optional weight and bias of their shape.

    >>> print(norm([(4, 8), (8,)]).rule)
    ([i, j], [j]) -> ([i, j]) {i=4, j=8} need_replication={j}
    """
    if not 1 <= len(shapes) <= 3:
        counted("a norm", shapes, 1)
    shape = shapes[0]
    lead = len(shape) - dims
    if lead < 0 or any(other != shape[lead:] for other in shapes[1:]):
        raise SpecError(
            f"a norm of {', '.join(map(str, shapes))} over {dims} dimensions; weight and bias "
            "must have their sizes"
        )
    builder = RuleBuilder(shapes, [shape])
    # Weight and bias have the normalised dimensions alone.
    others = len(shapes) - 1
    for dim in range(len(shape)):
        if dim < lead:
            builder.factor([dim], [dim])
        else:
            builder.factor([dim, *[dim - lead] * others], [dim], kind="need_replication")
    return builder.build()


def batch_norm(shapes: Sequence[Shape], axis: int = 1) -> Inferred:
    """An array, and vectors along one axis: scale, offset, mean and variance that are known.

    >>> print(batch_norm([(4, 8), (8,), (8,), (8,), (8,)]).rule)
    ([i, j], [j], [j], [j], [j]) -> ([i, j]) {i=4, j=8}
    """
    counted("batch_norm", shapes, 5)
    shape = shapes[0]
    place = axis_of(len(shape), axis)
    if any(other != (shape[place],) for other in shapes[1:]):
        raise SpecError(f"batch_norm of {', '.join(map(str, shapes))}; vectors of axis {axis}")
    builder = RuleBuilder(shapes, [shape])
    for dim in range(len(shape)):
        builder.factor([dim, *([0] * 4 if dim == place else [])], [dim])
    return builder.build()


def cross_entropy(shapes: Sequence[Shape], axis: int = -1) -> Inferred:
    """The loss of each element: logits with the classes along an axis, and labels without it.

    >>> print(cross_entropy([(4, 10), (4,)]).rule)
    ([i, j], [i]) -> ([i]) {i=4, j=10} need_replication={j}
    """
    counted("cross_entropy", shapes, 2)
    logits, labels = shapes
    place = axis_of(len(logits), axis)
    if labels != logits[:place] + logits[place + 1 :]:
        raise SpecError(f"labels {labels} of logits {logits}; one for each but axis {axis}")
    builder = RuleBuilder(shapes, [labels])
    for dim in range(len(labels)):
        builder.factor([dim + (dim >= place), dim], [dim])
    builder.factor([place], kind="need_replication")
    return builder.build()


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


def attention_logsumexp(
    shapes: Sequence[Shape], is_causal: bool = False, window: int | None = None
) -> Inferred:
    """Queries and keys of attention: the logarithm of the sum of each query's exponentials.

    >>> print(attention_logsumexp([(2, 8, 5, 16), (2, 4, 7, 16)]).rule)
    ([i, jk, l, m], [i, j, n, m]) -> ([i, jk, l])
    {i=2, j=4, k=2, l=5, m=16, n=7} need_replication={m, n}
    """
    counted("attention_logsumexp", shapes, 2)
    queries, keys = shapes
    lead = len(queries) - 3
    builder = RuleBuilder(shapes, [queries[:-1]])
    for dim in range(lead):
        builder.factor([dim, dim], [dim])
    builder.factor([lead, lead], [lead], size=keys[lead])
    builder.factor([lead], [lead], size=queries[lead] // max(keys[lead], 1))
    builder.factor([lead + 1], [lead + 1], adjusted=is_causal or window is not None)
    builder.factor([lead + 2, lead + 2], kind="need_replication")
    return builder.build()


def attention_queries_gradient(
    shapes: Sequence[Shape], is_causal: bool = False, window: int | None = None
) -> Inferred:
    """Of attention, the cotangent of the queries.

    Operands are queries, keys, values, the logarithms of the sums, what is taken off the weights'
    cotangents, and the cotangent of the result.
    """
    counted("attention_queries_gradient", shapes, 6)
    queries, keys = shapes[:2]
    lead = len(queries) - 3
    builder = RuleBuilder(shapes, [queries])
    for dim in range(lead):
        builder.factor([dim] * 6, [dim])
    builder.factor([lead] * 6, [lead], size=keys[lead])
    each = queries[lead] // max(keys[lead], 1)
    builder.factor([lead, None, None, lead, lead, lead], [lead], size=each)
    place = lead + 1
    is_placed = is_causal or window is not None
    builder.factor([place, None, None, place, place, place], [place], adjusted=is_placed)
    builder.factor([lead + 2, lead + 2], [lead + 2], kind="need_replication")
    return builder.build()


def attention_keys_gradient(
    shapes: Sequence[Shape], is_causal: bool = False, window: int | None = None
) -> Inferred:
    """Of attention, the cotangents of the keys and of the values: operands as of the queries'.

    Queries add up, those of all heads of a group, so that each part of them has a contribution.
    """
    counted("attention_keys_gradient", shapes, 6)
    queries, keys, values = shapes[:3]
    lead = len(queries) - 3
    builder = RuleBuilder(shapes, [keys, values])
    for dim in range(lead):
        builder.factor([dim] * 6, [dim, dim])
    builder.factor([lead] * 6, [lead, lead], size=keys[lead])
    each = queries[lead] // max(keys[lead], 1)
    builder.factor([lead, None, None, lead, lead, lead], size=each, kind="reduction")
    place = lead + 1
    is_placed = is_causal or window is not None
    builder.factor([place, None, None, place, place, place], kind="reduction", adjusted=is_placed)
    builder.factor([None, place, place], [place, place], adjusted=is_placed)
    builder.factor([lead + 2, lead + 2], [lead + 2], kind="need_replication")
    builder.factor(
        [None, None, lead + 2, None, None, lead + 2], [None, lead + 2], kind="need_replication"
    )
    return builder.build()


def _finds_places(
    specs: Sequence[ShardingSpec], shapes: Sequence[Shape], attributes: Mapping[str, Any]
) -> bool:
    return all(map(has_plain_parts, specs[:2]))


Part = tuple[int, int]
Specs = tuple[ShardingSpec, ...]


def parts_of(spec: ShardingSpec, axis: int, size: int) -> tuple[Part, ...]:
    """Where the parts of a dimension start and stop, the empty ones too.

    >>> from reshard import DeviceMesh, spec
    >>> parts_of(spec(DeviceMesh.of(x=4), "x"), 0, 5)
    ((0, 2), (2, 4), (4, 5), (5, 5))
    """
    found, at = [], 0
    for length in spec.dim_specs[axis].table(spec.mesh, size).local_lengths:
        found.append((at, at + int(length)))
        at += int(length)
    return tuple(found)


def may_turn(specs: Sequence[ShardingSpec], shapes: Sequence[Shape]) -> bool:
    """Whether queries, keys and values `[..., h, s, d]` are cut alike along their sequences.

    Heads may be cut as well, where each part has the keys of its own groups.
    """
    queries, keys, values = specs[:3]
    cut = queries.dim_specs[-2]
    if not cut.levels or any(one.dim_specs[-2] != cut for one in (keys, values)):
        return False
    if not all(map(has_plain_parts, (queries, keys, values))):
        return False
    heads = math.prod(queries.mesh.axis_size(axis) for axis in queries.dim_specs[-3].axes)
    return shapes[0][-3] % heads == 0 and shapes[1][-3] % heads == 0


def attention_turn(
    shapes: Sequence[Shape],
    is_causal: bool,
    window: int | None,
    turn: int,
    query_parts: tuple[Part, ...],
    key_parts: tuple[Part, ...],
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
    query_parts: tuple[Part, ...],
    key_parts: tuple[Part, ...],
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


def _find_windows(attributes: Mapping[str, Any]) -> Windows:
    """For each part of the queries where the keys of its turn start and stop."""
    keys, turn = attributes["key_parts"], attributes["turn"]
    return Windows(tuple(keys[(number + turn) % len(keys)] for number in range(len(keys))))


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
    if tuple(parts_of(queries, -2, size) for size in sizes) != asked:
        return None
    mesh, whole = queries.mesh, DimSpec()
    lead, cut = queries.dim_specs[:-2], queries.dim_specs[-2]

    own = ShardingSpec(mesh, [*lead, cut, whole])
    numbers = ShardingSpec(mesh, [*lead, cut])
    level = Level(cut.axes, _find_windows(attributes))
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


_HEADS: list[Shape] = [(2, 8, 5, 16), (2, 4, 7, 16), (2, 4, 7, 32)]
_BACK: list[Shape] = [*_HEADS, (2, 8, 5), (2, 8, 5), (2, 8, 5, 32)]
_EVEN: list[Shape] = [(2, 8, 6, 16), (2, 4, 6, 16), (2, 4, 6, 32)]
_PARTS: tuple[Part, ...] = ((0, 3), (3, 6))
_TURN = {
    "is_causal": True,
    "window": None,
    "turn": 1,
    "query_parts": _PARTS,
    "key_parts": _PARTS,
}
_TURNS = "sequences that are cut alike stay so: a rank gets the keys of one other part"
_WHOLE = "the normalised axis is whole on each device"

OPERATORS: tuple[Operator, ...] = (
    _row("softmax", softmax, ([(4, 8)], {"axis": 1}), note=_WHOLE),
    _row("log_softmax", softmax, ([(4, 8)], {"axis": 1}), note=_WHOLE),
    _row("layer_norm", norm, ([(4, 8), (8,), (8,)], {}), note=_WHOLE),
    _row("rms_norm", norm, ([(4, 8), (8,)], {}), note=_WHOLE),
    _row(
        "batch_norm",
        batch_norm,
        ([(4, 8), (8,), (8,), (8,), (8,)], {}),
        note="mean and variance are known",
    ),
    _row(
        "cross_entropy",
        cross_entropy,
        ([(4, 10), (4,)], {}),
        note="classes are whole on each device",
    ),
    _row(
        "attention",
        attention,
        ([(2, 8, 5, 16), (2, 4, 7, 16), (2, 4, 7, 32)], {}),
        linear=(2,),
        work=of_attention,
        local=local.attention,
        knows_place=_finds_places,
        note="heads are cut by groups of keys; keys are whole along their sequence",
    ),
    _row(
        "attention_logsumexp",
        attention_logsumexp,
        (_HEADS[:2], {}),
        work=of_scores,
        local=local.attention_logsumexp,
        knows_place=_finds_places,
        note="for the gradient of attention",
    ),
    _row(
        "attention_queries_gradient",
        attention_queries_gradient,
        (_BACK, {}),
        work=of_attention_gradient,
        local=local.attention_queries_gradient,
        knows_place=_finds_places,
        note="weights are found again, block by block",
    ),
    _row(
        "attention_keys_gradient",
        attention_keys_gradient,
        (_BACK, {}),
        work=of_attention_gradient,
        local=local.attention_keys_gradient,
        knows_place=_finds_places,
        note="queries that are cut have contributions",
    ),
    _row(
        "attention_turn",
        attention_turn,
        (_EVEN, _TURN),
        local=ring_attention.attention_turn,
        placed=_place_forward,
        note=_TURNS,
    ),
    _row(
        "attention_turn_gradient",
        attention_turn_gradient,
        ([*_EVEN, (2, 8, 6), (2, 8, 6), (2, 8, 6, 32)], _TURN),
        local=ring_attention.attention_turn_gradient,
        placed=_place_back,
        note=_TURNS,
    ),
)
