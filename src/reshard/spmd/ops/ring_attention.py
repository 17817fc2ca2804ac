"""A step of ring attention on a rank: its queries and the keys of one part.

The sequences are split into parts, each of one or several intervals. In turn `j` the queries of
part `p` see the keys of part `p + j`, modulo the number of parts. A rank has its queries and, for
the turn, the keys of that part that they see::

    parts of 4, in zigzag     0 . . . . . . 0   . 1 . . . . 1 .   . . 2 . . 2 . .   . . . 3 3 . . .
    causal, turn 1            0: the first 1    1: the first 2    2: the first 3    3: the whole 0
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.cut_rules import CutRule, Joined, Windows
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.spmd.core.local_work import Function, LocalWork, Stretch, stretches_of
from reshard.spmd.core.operator import JointPullback, TapeStep
from reshard.spmd.ops import elementwise as e
from reshard.spmd.ops import networks
from reshard.spmd.ops.attention import (
    Attention,
    SeenKeys,
    count_groups,
    grouped,
    may_turn,
    of_pair,
    of_pair_gradient,
)
from reshard.spmd.ops.elementwise import where, whole
from reshard.spmd.ops.movement import expand_dims, matrix_transpose, reshape
from reshard.spmd.ops.networks import pull_again
from reshard.spmd.ops.reductions import sum as sum_over
from reshard.spmd.rules.rule_builder import Inferred, Shape, counted, from_pattern
from reshard.spmd.shards.operation_call import call, placed

# ---- attention_turn


def attention_turn_rule(
    shapes: Sequence[Shape],
    is_causal: bool,
    window: int | None,
    turn: int,
    query_parts: tuple[tuple[Stretch, ...], ...],
    key_parts: tuple[tuple[Stretch, ...], ...],
) -> Inferred:
    """Infer weighted values and logarithms of sums of a turn, from queries, keys and values."""
    counted("attention_turn", shapes, 3)
    pattern = "*b gr s _, *b g _ _, *b g _ e -> *b gr s e, *b gr s"
    return from_pattern(pattern, shapes, sizes=count_groups(shapes), whole="s")


_EVEN: list[Shape] = [(2, 8, 6, 16), (2, 4, 6, 16), (2, 4, 6, 32)]
_PARTS: tuple[tuple[Stretch, ...], ...] = (((0, 3),), ((3, 6),))

_TURN = {
    "is_causal": True,
    "window": None,
    "turn": 1,
    "query_parts": _PARTS,
    "key_parts": _PARTS,
}


def count_pairs(attributes: Any) -> int:
    """Return the number of pairs of a query and a key on the busiest rank of a turn."""
    queries, keys = attributes["query_parts"], attributes["key_parts"]
    seen = seen_keys(attributes)
    return max(
        sum(
            seen.count_pairs(rows, columns) for rows in part for columns in keys[turned % len(keys)]
        )
        for turned, part in enumerate(queries, attributes["turn"])
    )


def seen_keys(options: Any, query_start: int = 0, key_start: int = 0) -> SeenKeys:
    """Return which keys the queries of a part see, from an operation's attributes."""
    return SeenKeys(options["is_causal"], options["window"], query_start, key_start)


def _turn_kernel(work: LocalWork) -> list[Function]:
    """Make weighted values and the logarithms of sums: zeros and -inf where no key is seen."""

    def make(turn: _Turn) -> Function:
        space = turn.space

        def function(q: Any, k: Any, v: Any) -> Any:
            groups = k.shape[-3]
            weighed, sums = [], []
            for rows, seen in turn.meetings(k):
                some = grouped(q[..., rows[0] : rows[1], :], groups)
                both = None
                for columns, kernel in seen:
                    keys, values = (x[..., None, columns[0] : columns[1], :] for x in (k, v))
                    part = kernel.forward(some, keys, values)
                    both = part if both is None else _join(space, both, part)
                block, logs = both or _make_unseen(space, some, v.shape[-1])
                weighed.append(block)
                sums.append(logs)
            if not weighed:
                block, logs = _make_unseen(space, grouped(q, groups), v.shape[-1])
                weighed, sums = [block], [logs]
            shape = q.shape[:-1]
            output = space.concat(weighed, axis=-2).reshape((*shape, v.shape[-1]))
            total = space.concat(sums, axis=-1).reshape(shape)
            # All ranks must record the same gradients, including ranks whose queries see no key.
            for operand in (q, k, v):
                output, total = (work.library.linked(array, operand) for array in (output, total))
            return output, total

        return function

    return [make(turn) for turn in _list_turns(work)]


class _Turn:
    """A rank's part of a turn: its intervals, in the order of its memory."""

    def __init__(
        self, work: LocalWork, queries: Sequence[Stretch], keys: Sequence[Stretch]
    ) -> None:
        self.options = work.attributes
        self.space = work.library.namespace
        self._queries = queries
        self._keys = keys

    def meetings(self, k: Any) -> Iterator[tuple[Stretch, list[tuple[Stretch, Attention]]]]:
        """Yield the rank's intervals of queries, with the intervals of keys that they see.

        Each interval of keys comes with the kernel that computes its attention.
        """
        options = self.options
        parts = options["query_parts"]
        here = []
        for number, part in enumerate(parts):
            for stretch in part:
                rows = _find_place(self._queries, stretch)
                if rows is not None:
                    here.append((rows, stretch, number))
        # Sorted by location, because zigzag parts are not in the order of the sequence.
        for rows, stretch, number in sorted(here):
            reached = []
            for other in options["key_parts"][(number + options["turn"]) % len(parts)]:
                columns = _find_place(self._keys, other)
                # The few elements that determine the results' types do not have all keys.
                is_here = columns is not None and columns[1] <= k.shape[-2]
                if columns is not None and is_here and is_reached(options, (stretch,), (other,)):
                    seen = seen_keys(options, stretch[0], other[0])
                    reached.append((columns, Attention(self.space, options["scale"], seen)))
            yield rows, reached


def _find_place(stretches: Sequence[Stretch], stretch: Stretch) -> Stretch | None:
    """Return the location of an interval of the sequence in memory, or None if it is not here."""
    before = 0
    for start, stop in stretches:
        if start <= stretch[0] and stretch[1] <= stop:
            return before + stretch[0] - start, before + stretch[1] - start
        before += stop - start
    return None


def is_reached(options: Any, queries: Part, keys: Part) -> bool:
    """Return whether any query of a part of the sequence sees any key of another part."""
    reaches = seen_keys(options).reaches
    return any(
        query[0] < query[1] and key[0] < key[1] and reaches(query, key)[0]
        for query in queries
        for key in keys
    )


Part = Sequence[Stretch]
"""The intervals of a sequence on a rank."""


def _list_turns(work: LocalWork) -> list[_Turn]:
    axis = len(work.operand_shapes_here(0)[0]) - 2
    pairs = zip(work.stretches_here(0, axis), work.stretches_here(1, axis), strict=True)
    return [_Turn(work, *both) for both in pairs]


def _make_unseen(space: Any, q: Any, width: int) -> tuple[Any, Any]:
    rows = q[..., :1]
    zeros = space.zeros_like(space.broadcast_to(rows, (*q.shape[:-1], width)))
    return zeros, space.full_like(rows[..., 0], -math.inf)


def _join(space: Any, left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
    """Join the weighted values and the logarithms of sums over keys of two stretches."""
    total = space.logaddexp(left[1], right[1])
    # If no key was seen yet, both are zeros.
    level = space.where(space.isfinite(total), total, space.zeros_like(total))
    parts = [weighed * space.exp(logs - level)[..., None] for weighed, logs in (left, right)]
    return parts[0] + parts[1], total


def _place(
    specs: Sequence[ShardingSpec],
    shapes: Sequence[Shape],
    attributes: Mapping[str, Any],
) -> tuple[Specs, Specs] | None:
    """Shard a turn, or its gradient, along the sequence: each rank gets the keys of a part."""
    if not may_turn(specs, shapes):
        return None
    queries = specs[0]
    sizes = shapes[0][-2], shapes[1][-2]
    asked = attributes["query_parts"], attributes["key_parts"]
    # The attributes name the parts that the turn was made for; other shardings run by the rule.
    if tuple(stretches_of(queries, -2, size) for size in sizes) != asked:
        return None
    mesh, whole = queries.mesh, DimSpec()
    lead, cut = queries.dim_specs[:-2], queries.dim_specs[-2]

    own = ShardingSpec(mesh, [*lead, cut, whole])
    numbers = ShardingSpec(mesh, [*lead, cut])
    turned = own
    if attributes["turn"]:
        level = Level(cut.axes, _find_key_rule(attributes))
        turned = ShardingSpec(mesh, [*lead, DimSpec([level]), whole])
    # A turn has the queries, keys and values; its gradient has three operands more.
    if len(specs) == 3:
        return (own, turned, turned), (own, numbers)
    return (own, turned, turned, numbers, numbers, own), (own, turned, turned)


Specs = tuple[ShardingSpec, ...]


def _find_key_rule(attributes: Mapping[str, Any]) -> CutRule:
    """Return the cut of the keys of a turn: each interval on the part that sees it, or unmoved."""
    queries, keys = attributes["query_parts"], attributes["key_parts"]
    count = len(keys)
    places: list[tuple[Stretch, int]] = []
    for number, part in enumerate(keys):
        seeing = (number - attributes["turn"]) % count
        for stretch in part:
            # Keys that nobody sees in this turn stay, so that they are not sent.
            is_seen = is_reached(attributes, queries[seeing], (stretch,))
            places.append((stretch, seeing if is_seen else number))
    sizes, rules = [], []
    for (start, stop), holder in sorted(places):
        size = stop - start
        sizes.append(size)
        rules.append(Windows(tuple((0, size * (index == holder)) for index in range(count))))
    return Joined(tuple(sizes), tuple(rules))


_TURNS = "sequences that are cut alike stay so: a rank gets the keys of one other part"


def _pull_attention_turn(step: TapeStep, cotangents: Any) -> tuple[Any, ...]:
    """Pull back through a turn that a traced function recorded."""
    g, of_sums = cotangents
    weighted, sums = step.results
    # For queries that see no key in this turn, the logarithm is -inf and has no derivative.
    shift = where(e.isfinite(sums), of_sums - sum_over(g * weighted, axis=-1), 0.0)
    attributes = dict(step.attributes)
    scale = attributes.pop("scale")
    return pull_turn(step.operands, sums, shift, g, attributes, scale)


def pull_turn(
    arrays: Sequence[Any], sums: Any, shift: Any, g: Any, attributes: dict[str, Any], scale: float
) -> tuple[Any, ...]:
    """Return the cotangents of a turn's queries, keys and values, in the operands' shardings.

    Args:
        arrays: the queries, keys and values.
        sums: the logarithms of the sums of the keys that the queries see.
        shift: the term that is added to the weights' cotangents.
        g: the cotangent of the weighted values.
        attributes: of the turn.
        scale: of the scores.
    """
    operands = (*arrays, sums, shift, g)
    cotangents = call("attention_turn_gradient", operands, attributes, {"scale": scale})
    return tuple(
        placed(cotangent, x.type.spec) for cotangent, x in zip(cotangents, arrays, strict=True)
    )


networks.register(
    "attention_turn",
    attention_turn_rule,
    (_EVEN, _TURN),
    work=lambda rule, sizes, own: of_pair(rule, sizes) * count_pairs(own),
    local=_turn_kernel,
    placed=_place,
    note=_TURNS,
    pullback=JointPullback(_pull_attention_turn),
)


# ---- attention_turn_gradient


def attention_turn_gradient_rule(
    shapes: Sequence[Shape],
    is_causal: bool,
    window: int | None,
    turn: int,
    query_parts: tuple[tuple[Stretch, ...], ...],
    key_parts: tuple[tuple[Stretch, ...], ...],
) -> Inferred:
    """Infer the cotangents of a turn's queries, keys and values."""
    counted("attention_turn_gradient", shapes, 6)
    return from_pattern(
        "*b gr s d, *b g t c, *b g u e, *b gr _, *b gr _, *b gr _ _ "
        "-> *b gr s d, *b g t c, *b g u e",
        shapes,
        order="bgrstudce",
        sizes=count_groups(shapes),
        whole="grstudce",
    )


def _turn_gradient_kernel(work: LocalWork) -> list[Function]:
    """Return kernels for the cotangents of the queries, and of the turn's keys and values."""
    if work.result_layouts:
        lengths = [(work.result_layouts[1].local_shape(rank) or (0, 0))[-2] for rank in work.ranks]
    else:
        lengths = [shape[-2] for shape in work.operand_shapes_here(1)]

    def make(turn: _Turn, length: int) -> Function:
        space = turn.space

        def function(q: Any, k: Any, v: Any, sums: Any, shift: Any, g: Any) -> Any:
            groups = k.shape[-3]
            of_queries = space.zeros_like(q)
            of_keys, of_values = (_zeros(space, x, length) for x in (k, v))
            for rows, seen in turn.meetings(k):
                of_rows = [x[..., rows[0] : rows[1], :] for x in (q, g)]
                some, cotangents = (grouped(x, groups) for x in of_rows)
                numbers = (x[..., rows[0] : rows[1], None] for x in (sums, shift))
                of_all = tuple(grouped(x, groups)[..., 0] for x in numbers)
                for columns, kernel in seen:
                    keys, values = (x[..., None, columns[0] : columns[1], :] for x in (k, v))
                    of_block, *others = kernel.back(some, keys, values, cotangents, of_all)
                    of_queries[..., rows[0] : rows[1], :] += of_block.reshape(of_rows[0].shape)
                    for total, part in zip((of_keys, of_values), others, strict=True):
                        total[..., columns[0] : columns[1], :] += part[..., 0, :, :]
            return of_queries, of_keys, of_values

        return function

    return [make(turn, length) for turn, length in zip(_list_turns(work), lengths, strict=True)]


def _zeros(space: Any, x: Any, length: int) -> Any:
    # NumPy's `zeros` takes no device but "cpu".
    device = {"device": x.device} if type(x).__module__ == "torch" else {}
    return space.zeros((*x.shape[:-2], length, x.shape[-1]), dtype=x.dtype, **device)


def _pull_turn_gradient(step: TapeStep, cotangents: Any) -> tuple[Any, ...]:
    """Pull back by scores."""
    attributes = step.attributes

    def pull_back(q: Any, k: Any, v: Any, sums: Any, shift: Any, g: Any) -> Any:
        groups = k.shape[-3]
        some, slopes = (_group_heads(x, groups) for x in (q, g))
        keys, values = (expand_dims(x, axis=-3) for x in (k, v))
        levels, shifts = (
            _group_heads(expand_dims(x, axis=-1), groups)
            for x in (where(e.isfinite(sums), sums, 0.0), shift)
        )
        scores = some @ matrix_transpose(keys) * attributes["scale"]
        met = whole(scores, _find_met(attributes, scores.shape[-2:]))
        weights = e.exp(where(met, scores - levels, -math.inf))
        of_scores = weights * (slopes @ matrix_transpose(values) + shifts) * attributes["scale"]
        of_keys = matrix_transpose(of_scores) @ some
        of_values = matrix_transpose(weights) @ slopes
        # All heads of a group use the same keys.
        both = (sum_over(cotangent, axis=-3) for cotangent in (of_keys, of_values))
        return (reshape(of_scores @ keys, q.shape), *both)

    return pull_again(pull_back, step, cotangents)


def _group_heads(x: Any, groups: int) -> Any:
    """Split heads `[..., h, s, d]` into groups, `[..., g, r, s, d]`."""
    *lead, heads, length, size = x.shape
    return reshape(x, (*lead, groups, heads // groups, length, size))


def _find_met(attributes: Mapping[str, Any], shape: Sequence[int]) -> Any:
    """Return booleans `[s, t]`: which keys each query sees in a turn."""
    low, high = seen_keys(attributes).limits
    before = np.arange(shape[0])[:, None] - np.arange(shape[1])
    met = np.zeros(shape, dtype=bool)
    keys = attributes["key_parts"]
    for number, part in enumerate(attributes["query_parts"], attributes["turn"]):
        for rows, columns in itertools.product(part, keys[number % len(keys)]):
            met[slice(*rows), slice(*columns)] = True
    return met & (before >= low) & (before <= high)


networks.register(
    "attention_turn_gradient",
    attention_turn_gradient_rule,
    ([*_EVEN, (2, 8, 6), (2, 8, 6), (2, 8, 6, 32)], _TURN),
    work=lambda rule, sizes, own: of_pair_gradient(rule, sizes) * count_pairs(own),
    local=_turn_gradient_kernel,
    placed=_place,
    note=_TURNS,
    pullback=JointPullback(_pull_turn_gradient),
)
