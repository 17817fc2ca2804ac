"""Attention on one rank, in memory that grows linearly with the sequence.

Scores are computed for a block of queries and a block of keys at a time. For each query, the
maximum score so far, the sum of the exponentials relative to it, and the sum of the values weighted
by them are kept; a larger score rescales both sums. Blocks in which no query sees any key are
skipped. The gradient computes the weights of a block of queries again, over all keys that they see,
and from them the cotangents of queries, keys and values.

For tensors, PyTorch's own kernels do both.

Source: Rabe and Staats, Self-attention Does Not Need O(n^2) Memory, 2021.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from reshard._validation import check_int
from reshard.cut_rules import Zigzag
from reshard.errors import SpecError, UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd import namespace
from reshard.spmd.core.backend import Library
from reshard.spmd.core.local_work import Function, LocalWork, by_name, have_plain_parts
from reshard.spmd.core.operator import Attributes, JointPullback, Sizes, TapeStep, dimension_sizes
from reshard.spmd.core.result_types import kind_of
from reshard.spmd.ops import data_types, elementwise, networks, reductions
from reshard.spmd.ops.arguments import of_arrays
from reshard.spmd.ops.data_types import in_wide_types
from reshard.spmd.ops.elementwise import add, divide, exp, multiply, operands, where, whole
from reshard.spmd.ops.movement import expand_dims, matrix_transpose, reshape
from reshard.spmd.ops.networks import pull_again, take_off_most
from reshard.spmd.ops.products import matmul
from reshard.spmd.rules.rule_builder import Inferred, Shape, counted, from_dims, from_pattern
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call, is_watched

# ---- attention


@of_arrays
@in_wide_types
def attention(
    queries: Any,
    keys: Any,
    values: Any,
    mask: Any = None,
    /,
    *,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> Any:
    """Compute scaled dot-product attention, with grouped queries, causal masks and windows.

    Without a mask, memory grows linearly with the sequences, here and in the gradient. With a mask,
    or if keys are sharded along their sequence and queries are not, the scores are computed as an
    array.

    Args:
        queries: `[..., h, s, d]`.
        keys: `[..., g, t, d]`; `g` divides `h`, and each serves `h / g` heads.
        values: `[..., g, t, e]`.
        mask: booleans (or numbers to add) that broadcast to `[..., h, s, t]`.
        is_causal: whether a query attends only to keys up to its own position.
        window: the number of keys that a query attends to up to and including its own position, and
            (unless `is_causal`) as many from its own position on; all when None.
        scale: of the scores; `1 / sqrt(d)` when None.
    """
    # 1. Shapes.
    for name, array in (("queries", queries), ("keys", keys), ("values", values)):
        if array.ndim < 3:
            raise SpecError(
                f"attention with {name} of shape {list(array.shape)}; [..., heads, places, "
                "features] was expected: add a dimension of heads with sp.expand_dims"
            )
    heads, groups = queries.shape[-3], keys.shape[-3]
    if groups == 0 or heads % groups:
        raise SpecError(f"{heads} heads of queries over {groups} of keys; give a divisor of them")
    size = queries.shape[-1]
    if keys.shape[-1] != size or keys.shape[-2] != values.shape[-2] or values.shape[-3] != groups:
        raise SpecError(
            f"queries of shape {list(queries.shape)}, keys of {list(keys.shape)}, values of "
            f"{list(values.shape)}; keys have the queries' features, values the keys' heads and "
            "places"
        )
    if not size and scale is None:
        raise UsageError("attention of queries without features has no scale; give scale=")
    if window is not None:
        window = check_int(window, "window of attention", minimum=1)
    factor = 1 / math.sqrt(size) if scale is None else scale
    if mask is None and _may_go_by_blocks(queries, keys, values):
        attributes = {"is_causal": bool(is_causal), "window": window}
        queries, keys, values = operands(queries, keys, values)
        specs = [array.type.spec for array in (queries, keys, values)]
        if None not in specs and may_turn(specs, (queries.shape, keys.shape)):
            # Found by name, because it depends on this module.
            go_round = namespace.find("ring_attention")
            return go_round(queries, keys, values, bool(is_causal), window, factor)
        return call("attention", (queries, keys, values), attributes, {"scale": factor})
    # 2. Otherwise the scores are an array.
    return attend_by_scores(
        queries, keys, values, mask, is_causal=is_causal, window=window, factor=factor
    )


def _may_go_by_blocks(queries: Any, *others: Any) -> bool:
    """Return whether attention can be a single operation on each rank, without a scores array."""
    types = {array.dtype for array in (queries, *others)}
    if len(types) > 1 or kind_of(queries.dtype) != "real floating":
        return False
    if any(0 in array.shape for array in (queries, *others)):
        return False
    # If only keys are sharded, ranks exchange their parts of the sums instead of the keys.
    of_queries = _axes_along(queries, -2)
    return all(_axes_along(array, -2) <= of_queries for array in others)


def _axes_along(x: Any, dim: int) -> set[str]:
    """Return the names of the axes that cut a dimension."""
    spec = x.type.spec if isinstance(x, ArrayValue) else None
    return set() if spec is None else {axis.name for axis in spec.dim_specs[dim].axes}


def attention_rule(
    shapes: Sequence[Shape], is_causal: bool = False, window: int | None = None
) -> Inferred:
    """Infer attention: queries `[..., h, s, d]`, keys `[..., g, t, d]`, values `[..., g, t, e]`.

    The `h` heads of the queries are `g` groups, each with keys and values of its own. The mask
    broadcasts to `[..., h, s, t]`. A causal query has to know its place.

    >>> print(attention_rule([(2, 8, 5, 16), (2, 4, 7, 16), (2, 4, 7, 32)]).rule)
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
    # Heads are the product of groups (the major factor) and the heads of each group.
    groups = keys[lead]
    sizes = {"g": groups, "r": queries[lead] // max(groups, 1)}
    rows = [*range(lead), ("g", "r") if sizes["r"] != 1 else "g", "s"]
    columns = [*range(lead), "g", "t"]
    masks = []
    if len(shapes) == 4:
        mask, scores = shapes[3], (*queries[:-1], keys[-2])
        missing = rank - len(mask)
        if missing < 0 or any(b not in (1, a) for a, b in zip(scores[missing:], mask, strict=True)):
            raise SpecError(f"mask {mask} of scores {scores}; it must broadcast to them")
        aligned = zip([*rows, "t"][missing:], scores[missing:], mask, strict=True)
        masks.append([dim if size == expected else None for dim, expected, size in aligned])
    # Keys and channels of queries stay whole: scores must be complete before the softmax, which
    # sees all keys, and neither sum over a part can be combined later.
    is_placed = is_causal or window is not None
    return from_dims(
        [[*rows, "d"], [*columns, "d"], [*columns, "e"], *masks],
        [[*rows, "e"]],
        shapes,
        sizes=sizes,
        adjusted=["s"] if is_placed else (),
    )


_HEADS: list[Shape] = [(2, 8, 5, 16), (2, 4, 7, 16), (2, 4, 7, 32)]


def _work_of_attention(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
    """Return the work of attention: scores per channel of queries, and sums per channel of values.

    >>> from reshard.spmd.core.operator import rule_of
    >>> rule = rule_of("attention", [(1, 8, 16)] * 3)
    >>> causal = {"is_causal": True}
    >>> _work_of_attention(rule, rule.sizes, {}), _work_of_attention(rule, rule.sizes, causal)
    (4096.0, 2304.0)
    """
    return of_pair(rule, sizes) * _count_pairs(rule, sizes, attributes)


def of_pair(rule: OpShardingRule, sizes: Sizes) -> float:
    """Return the work of attention for a query and a key of each head; 0 on a rank without keys."""
    return _of_products(rule, sizes, 1, 1)


def _of_products(rule: OpShardingRule, sizes: Sizes, of_queries: int, of_values: int) -> float:
    """Return the work of products over the queries' and the values' channels, for a pair per head.

    `of_queries` and `of_values` are the numbers of such products.
    """
    # Sizes are read by dimension, because attention and its gradient have different factors.
    queries, keys, values = (dimension_sizes(mapping, sizes) for mapping in rule.operands[:3])
    channels = of_queries * queries[-1] + of_values * values[-1]
    return float(2 * math.prod(queries[:-2]) * channels * (keys[-2] > 0))


def _count_pairs(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> int:
    """Return the number of pairs of a query and a key that it sees, on the busiest rank."""
    queries, keys = (
        (dimension_sizes(mapping, rule.sizes)[-2], dimension_sizes(mapping, sizes)[-2])
        for mapping in rule.operands[:2]
    )
    seen = SeenKeys(attributes.get("is_causal", False), attributes.get("window"))
    return seen.most_pairs(queries, keys)


@dataclass(frozen=True)
class SeenKeys:
    """A description of which keys a query sees, by their positions in the sequences.

    Args:
        is_causal: whether a query does not see keys at later positions.
        window: a query sees only keys less than this many positions before (or after) it; all keys
            when None.
        query_start, key_start: the positions of the first query and of the first key of a part.
    """

    is_causal: bool = False
    window: int | None = None
    query_start: int = 0
    key_start: int = 0

    def reaches(self, queries: tuple[int, int], keys: tuple[int, int]) -> tuple[bool, bool]:
        """Return whether any query of a block sees any key of a block, and whether all see all.

        Blocks are `(start, stop)` in the part.

        >>> SeenKeys(is_causal=True).reaches((0, 4), (4, 8)), SeenKeys().reaches((0, 4), (4, 8))
        ((False, False), (True, True))
        """
        ahead = self.query_start - self.key_start
        # The minimum and the maximum of the distances from a key of the block forward to a query
        # of the block.
        least = ahead + queries[0] - (keys[1] - 1)
        most = ahead + queries[1] - 1 - keys[0]
        low, high = self.limits
        return low <= most and least <= high, low <= least and most <= high

    @property
    def limits(self) -> tuple[float, float]:
        """The minimum and the maximum distance from a key forward to a query that sees it."""
        reach = math.inf if self.window is None else self.window - 1
        return (0 if self.is_causal else -reach), reach

    def count_pairs(self, queries: tuple[int, int], keys: tuple[int, int]) -> int:
        """Return the number of pairs of a query of a block and a key of a block that it sees.

        >>> SeenKeys(is_causal=True).count_pairs((0, 4), (0, 4))
        10
        """
        ahead = self.query_start - self.key_start
        low, high = self.limits
        places = np.arange(*queries) + ahead
        # For each query, the first key that it sees, and the end of the keys that it sees.
        first = np.maximum(places - high, keys[0])
        stop = np.minimum(places - low + 1, keys[1])
        return int(np.maximum(stop - first, 0).sum())

    def most_pairs(self, queries: tuple[int, int], keys: tuple[int, int]) -> int:
        """Return the maximum number of pairs over all parts of evenly split queries and keys.

        Args:
            queries, keys: the length of the sequence, and the length of a part.

        >>> seen = SeenKeys(is_causal=True)
        >>> seen.most_pairs((8, 8), (8, 8)), seen.most_pairs((8, 4), (8, 8))
        (36, 26)
        """
        if 0 in (*queries, *keys):
            return 0
        if not self.is_causal and self.window is None:
            return queries[1] * keys[1]
        return _most_pairs(self, queries, keys)

    def mask(self, space: Any, queries: tuple[int, int], keys: tuple[int, int], like: Any) -> Any:
        """Return booleans `[queries, keys]` for a block of queries and a block of keys."""
        # NumPy accepts `device` only from version 2 on, so only PyTorch gets it.
        device = {"device": like.device} if type(like).__module__ == "torch" else {}
        ahead = self.query_start - self.key_start
        rows = space.arange(queries[0], queries[1], **device)[:, None]
        columns = space.arange(keys[0], keys[1], **device)[None, :]
        before = rows - columns + ahead
        low, high = self.limits
        # Without a limit all are true, in the shape and on the device of the rest.
        seen = before >= (low if math.isfinite(low) else before)
        return seen & (before <= high) if math.isfinite(high) else seen


@lru_cache(maxsize=4096)
def _most_pairs(seen: SeenKeys, queries: tuple[int, int], keys: tuple[int, int]) -> int:
    parts = [
        [(start, min(start + block, size)) for start in range(0, size, block)]
        for size, block in (queries, keys)
    ]
    return max(
        seen.count_pairs(query_block, key_block)
        for query_block, key_block in itertools.product(*parts)
    )


def _attention_kernel(work: LocalWork) -> Function | list[Function]:
    """Return the kernels of attention."""
    # With a mask it is an operator of imported graphs: `by_name` raises that no library has it.
    if len(work.operands) != 3:
        return by_name(work)
    if work.library.name == "torch":
        return [_by_torch(kernel, work.library) for kernel in _kernels(work)]
    return [_by_blocks(kernel) for kernel in _kernels(work)]


def _by_blocks(kernel: Attention) -> Function:
    def function(q: Any, k: Any, v: Any) -> Any:
        weighted, _ = kernel.forward(
            grouped(q, k.shape[-3]), k[..., None, :, :], v[..., None, :, :]
        )
        return weighted.reshape((*q.shape[:-1], v.shape[-1]))

    return function


class Attention:
    """A kernel of attention on a library's arrays, block by block.

    Args:
        space: the library's namespace.
        scale: of the scores.
        seen: which keys the queries see.

    Queries are `[..., g, r, s, d]`: `g` groups of `r` heads. Keys are `[..., g, 1, t, d]`, values
    `[..., g, 1, t, e]`.
    """

    def __init__(self, space: Any, scale: float, seen: SeenKeys) -> None:
        self.space = space
        self.scale = scale
        self.seen = seen

    def _scores(self, q: Any, k: Any, queries: Any, keys: Any, is_all: bool) -> Any:
        space = self.space
        rows, columns = q[..., queries[0] : queries[1], :], k[..., keys[0] : keys[1], :]
        scores = space.matmul(rows, space.matrix_transpose(columns)) * self.scale
        if is_all:
            return scores
        mask = self.seen.mask(space, queries, keys, q)
        return space.where(mask, scores, space.full_like(scores, -math.inf))

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return weighted values `[..., g, r, s, e]` and logarithms of sums `[..., g, r, s]`.

        A query that sees no key gets zeros, and -inf.
        """
        space = self.space
        weighed, sums = [], []
        for queries in blocks(q.shape[-2]):
            part = q[..., queries[0] : queries[1], :]
            most = space.full_like(part[..., :1], -math.inf)
            total = space.zeros_like(part[..., :1])
            shape = (*part.shape[:-1], v.shape[-1])
            # `*_like` has the type and the device in both libraries; older NumPy accepts no
            # `device`.
            output = space.zeros_like(space.broadcast_to(part[..., :1], shape))
            for keys in blocks(k.shape[-2]):
                is_any, is_all = self.seen.reaches(queries, keys)
                if not is_any:
                    continue
                scores = self._scores(q, k, queries, keys, is_all)
                greatest = space.maximum(most, space.max(scores, axis=-1, keepdims=True))
                level = self._level(greatest)
                weights = space.exp(scores - level)
                # 0 for the first block, whose maximum before is -inf.
                rescale = space.exp(most - level)
                total = total * rescale + space.sum(weights, axis=-1, keepdims=True)
                output = output * rescale + space.matmul(weights, v[..., keys[0] : keys[1], :])
                most = greatest
            is_none = total == 0
            ones = space.ones_like(total)
            weighed.append(output / space.where(is_none, ones, total))
            logs = self._level(most) + space.log(space.where(is_none, ones, total))
            sums.append(space.where(is_none, most, logs)[..., 0])
        return space.concat(weighed, axis=-2), space.concat(sums, axis=-1)

    def back(self, q: Any, k: Any, v: Any, g: Any, of_all: tuple[Any, Any] | None = None) -> Any:
        """Return the cotangents of queries, keys and values; keys' and values' per group of heads.

        Args:
            q, k, v: as for `forward`.
            g: the cotangent of the weighted values.
            of_all: needed if the queries also see other keys: the second result of `forward` over
                all keys, and the term that is added to the weights' cotangents.
        """
        space = self.space
        of_keys, of_values = space.zeros_like(k), space.zeros_like(v)
        of_queries = []
        for queries, keys in self._rows(q.shape[-2], k.shape[-2]):
            rows, cotangents = (x[..., queries[0] : queries[1], :] for x in (q, g))
            columns, values = (x[..., keys[0] : keys[1], :] for x in (k, v))
            is_all = self.seen.reaches(queries, keys)[1]
            scores = self._scores(q, k, queries, keys, is_all)
            agreed = space.matmul(cotangents, space.matrix_transpose(values))
            # The cotangent of a softmax with weights w is w * (a - sum(w * a)), summed over all
            # keys.
            if of_all is None:
                weights = self._softmax(scores)
                shift = -space.sum(weights * agreed, axis=-1, keepdims=True)
            else:
                sums, shift = (x[..., queries[0] : queries[1], None] for x in of_all)
                weights = space.exp(scores - self._level(sums))
            slopes = weights * (agreed + shift) * self.scale
            of_queries.append(space.matmul(slopes, columns))
            for target, left, right in (
                (of_keys, slopes, rows),
                (of_values, weights, cotangents),
            ):
                target[..., keys[0] : keys[1], :] += _sum_heads(space, left, right)
        return space.concat(of_queries, axis=-2), of_keys, of_values

    def _rows(self, size: int, others: int) -> Iterator[tuple[Any, Any]]:
        """Yield blocks of queries, each with the interval of all keys that any of them sees.

        The more keys there are, the fewer queries a block has.
        """
        ahead = self.seen.query_start - self.seen.key_start
        low, high = self.seen.limits
        for start, stop in blocks(size, max(_BLOCK**2 // max(others, _BLOCK), _LEAST)):
            first = min(max(start + ahead - high, 0), others)
            last = max(min(stop - 1 + ahead - low + 1, others), first)
            yield (start, stop), (int(first), int(last))

    def _level(self, most: Any) -> Any:
        """Return the shift before exponentials: 0 where no key is seen."""
        # -inf - -inf would be NaN.
        return self.space.where(self.space.isfinite(most), most, self.space.zeros_like(most))

    def _softmax(self, scores: Any) -> Any:
        space = self.space
        if not scores.shape[-1]:
            return scores
        weights = space.exp(scores - self._level(space.max(scores, axis=-1, keepdims=True)))
        total = space.sum(weights, axis=-1, keepdims=True)
        return weights / space.where(total == 0, space.ones_like(total), total)


_BLOCK = 256
"""The length of a block of queries, and of a block of keys."""


def blocks(size: int, length: int = _BLOCK) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of the blocks of a sequence.

    >>> list(blocks(300))
    [(0, 256), (256, 300)]
    """
    # An empty part has a single empty block, whose result is empty.
    for start in range(0, max(size, 1), length):
        yield start, min(start + length, size)


_LEAST = 32
"""The length of the smallest block of queries in the gradient."""


def _sum_heads(space: Any, weights: Any, rows: Any) -> Any:
    """Sum rows `[..., r, s, d]` by weights `[..., r, s, t]`: `[..., 1, t, d]`."""
    products = space.matmul(space.matrix_transpose(weights), rows)
    return space.sum(products, axis=-3, keepdims=True)


def grouped(x: Any, groups: int) -> Any:
    """Split heads `[..., h, s, d]` into groups: `[..., g, r, s, d]`."""
    lead, (heads, *rest) = x.shape[:-3], x.shape[-3:]
    return x.reshape((*lead, groups, heads // max(groups, 1), *rest))


def _by_torch(kernel: Attention, library: Library) -> Function:
    weigh = _torch_kernel(kernel)

    def function(q: Any, k: Any, v: Any) -> Any:
        if 0 not in (*q.shape, *k.shape, *v.shape):
            return weigh(q, k, v)
        result = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        for operand in (q, k, v):
            result = library.linked(result, operand)
        return result

    return function


def _torch_kernel(kernel: Attention) -> Function:
    """Return PyTorch's kernel, for operands that are not empty."""
    compute = import_module("torch").nn.functional.scaled_dot_product_attention
    seen = kernel.seen

    def function(q: Any, k: Any, v: Any) -> Any:
        options: dict[str, Any] = {"scale": kernel.scale, "enable_gqa": k.shape[-3] != q.shape[-3]}
        whole = (0, q.shape[-2]), (0, k.shape[-2])
        if not seen.reaches(*whole)[1]:
            # PyTorch's causal mask is aligned at the first query and the first key. It needs no
            # memory, which a mask of all scores does.
            is_plain = seen.window is None and seen.query_start == seen.key_start
            if is_plain:
                options["is_causal"] = True
            else:
                options["attn_mask"] = seen.mask(kernel.space, *whole, q)
        return compute(q, k, v, **options)

    return function


def _kernels(work: LocalWork) -> list[Attention]:
    """Return the kernel of each rank here."""
    options = work.attributes
    rank = len(work.operand_shapes_here(0)[0])
    return [
        Attention(
            work.library.namespace,
            options["scale"],
            SeenKeys(options["is_causal"], options["window"], query_start, key_start),
        )
        for query_start, key_start in zip(
            work.starts_here(0, rank - 2), work.starts_here(1, rank - 2), strict=True
        )
    ]


def _pull_attention(step: TapeStep, g: Any) -> tuple[Any, ...]:
    q, k, v = step.operands
    names = ("is_causal", "window", "scale")
    cotangents = pull_by_scores(step.operands, g, **{name: step.attributes[name] for name in names})
    if cotangents is not None:
        return cotangents
    attributes = {name: step.attributes[name] for name in ("is_causal", "window")}
    options = {"scale": step.attributes["scale"]}
    gradients: tuple[Any, ...] = call("attention_gradient", (q, k, v, g), attributes, options)
    return gradients


def pull_by_scores(
    arrays: Sequence[Any], g: Any, *, is_causal: bool, window: int | None, scale: float
) -> tuple[Any, ...] | None:
    """Return the cotangents of attention's operands by operations that have derivatives.

    Returns None if no tape records the gradient; then the scores need not be stored.
    """
    if not is_watched((*arrays, g)):
        return None
    attend = _by_scores(is_causal=is_causal, window=window, scale=scale)
    # Found by name, because it depends on this module.
    _, pullback = namespace.find("vjp")(attend, *arrays)
    cotangents: tuple[Any, ...] = pullback(g)
    return cotangents


def _by_scores(*, is_causal: bool, window: int | None, scale: float) -> Function:
    """Return attention as a function of queries, keys and values, with an array of scores."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        return attend_by_scores(q, k, v, None, is_causal=is_causal, window=window, factor=scale)

    return attend


networks.register(
    "attention",
    attention_rule,
    (_HEADS, {}),
    linear=(2,),
    work=_work_of_attention,
    local=_attention_kernel,
    knows_place=have_plain_parts,
    note="heads are cut by groups of keys; keys are whole along their sequence",
    pullback=JointPullback(_pull_attention),
)


def may_turn(specs: Sequence[ShardingSpec], shapes: Sequence[Shape]) -> bool:
    """Return whether queries, keys and values have the same sharding along their sequences.

    Their shapes are `[..., h, s, d]`. Parts are intervals, or pairs of intervals in a zigzag. Heads
    may be sharded as well, if each part has the keys of its own groups.
    """
    queries, keys, values = specs[:3]
    cut = queries.dim_specs[-2]
    if not cut.levels or any(spec.dim_specs[-2] != cut for spec in (keys, values)):
        return False
    if not all(map(_may_turn_dims, (queries, keys, values))):
        return False
    heads = queries.mesh.joint_size(queries.dim_specs[-3].axes)
    return shapes[0][-3] % heads == 0 and shapes[1][-3] % heads == 0


def _may_turn_dims(spec: ShardingSpec) -> bool:
    """Return whether sequences are split into intervals or a zigzag, other dimensions evenly."""
    return all(
        level.rule.is_default or (isinstance(level.rule, Zigzag) and dim is spec.dim_specs[-2])
        for dim in spec.dim_specs
        for level in dim.levels
    )


def attend_by_scores(
    queries: Any,
    keys: Any,
    values: Any,
    mask: Any,
    *,
    is_causal: bool,
    window: int | None,
    factor: float,
) -> Any:
    """Compute attention by other operations, with an array of scores; see `attention`."""
    heads, groups = queries.shape[-3], keys.shape[-3]
    *lead, _, length, size = queries.shape
    # 1. Scores. Queries are put into groups, so that keys broadcast and need no copies.
    if groups != heads:
        queries = reshape(queries, (*lead, groups, heads // groups, length, size))
        keys, values = expand_dims(keys, axis=-3), expand_dims(values, axis=-3)
    scores = matmul(queries, matrix_transpose(keys))
    scores = multiply(scores, factor)
    if groups != heads:
        scores = reshape(scores, (*lead, heads, length, keys.shape[-2]))
    # 2. Keys that a query may not see get -inf, whose exponential is 0.
    if is_causal or window is not None:
        before = np.arange(length)[:, None] - np.arange(scores.shape[-1])
        seen = before >= 0 if is_causal else np.ones_like(before, dtype=bool)
        if window is not None:
            seen &= np.abs(before) < window
        scores = where(whole(scores, seen), scores, -math.inf)
    if mask is not None:
        (allowed,) = operands(scores, mask)[1:]
        is_truth = allowed.dtype is data_types.bool
        scores = where(allowed, scores, -math.inf) if is_truth else add(scores, allowed)
    # 3. The weighted values, with groups and their heads merged: zeros if no key is seen.
    weights = scores
    if 0 not in scores.shape:
        apart, _, _ = take_off_most(scores, -1)
        powers = exp(apart)
        total = reductions.sum(powers, axis=-1, keepdims=True)
        weights = divide(powers, where(elementwise.equal(total, 0), 1.0, total))
    if groups != heads:
        weights = reshape(weights, (*lead, groups, heads // groups, length, keys.shape[-2]))
    weighted = matmul(weights, values)
    return reshape(weighted, (*lead, heads, length, values.shape[-1]))


# ---- attention_gradient


def attention_gradient_rule(
    shapes: Sequence[Shape], is_causal: bool = False, window: int | None = None
) -> Inferred:
    """Infer the cotangents of queries, keys and values, from these and the result's.

    Those of keys and values add up queries, and all heads of a group: ranks that have parts of
    these have contributions.

    >>> shapes = [(2, 8, 5, 16), (2, 4, 7, 16), (2, 4, 7, 32), (2, 8, 5, 32)]
    >>> print(attention_gradient_rule(shapes).rule)
    ([i, jk, l, n], [i, j, m, n], [i, j, m, o], [i, jk, l, o]) ->
    ([i, jk, l, n], [i, j, m, n], [i, j, m, o])
    {i=2, j=4, k=2, l=5, m=7, n=16, o=32} reduction={k, l} need_replication={m, n, o}
    """
    counted("attention_gradient", shapes, 4)
    return from_pattern(
        "*b gr s d, *b g t d, *b g t e, *b gr s e -> *b gr s d, *b g t d, *b g t e",
        shapes,
        order="bgrst",
        sizes=count_groups(shapes),
        reduced="rs",
        whole="tde",
        adjusted="s" if is_causal or window is not None else "",
    )


def count_groups(shapes: Sequence[Shape]) -> dict[str, int]:
    """Return the sizes of the factors of heads: `g` groups of `r` heads each."""
    groups = shapes[1][-3]
    return {"g": groups, "r": shapes[0][-3] // max(groups, 1)}


def _work_of_gradient(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
    """Return the work of attention's gradient: two recomputed products, and three with these."""
    return of_pair_gradient(rule, sizes) * _count_pairs(rule, sizes, attributes)


def of_pair_gradient(rule: OpShardingRule, sizes: Sizes) -> float:
    """Return the work of attention's gradient for a query and a key of each head."""
    return _of_products(rule, sizes, 3, 2)


def _attention_gradient_kernel(work: LocalWork) -> list[Function]:
    """Return the cotangents of queries, keys and values."""
    make = _back_by_torch if work.library.name == "torch" else _back_by_blocks
    return [make(kernel) for kernel in _kernels(work)]


def _back_by_torch(kernel: Attention) -> Function:
    torch = import_module("torch")
    weigh, by_blocks = _torch_kernel(kernel), _back_by_blocks(kernel)

    def function(*operands: Any) -> Any:
        # The inner autograd call is not differentiable, so blocks are used under a gradient.
        is_watched = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
        # torch.compile can trace the blocks, but not a call of autograd.
        is_watched = is_watched or torch.compiler.is_compiling()
        if is_watched or any(0 in operand.shape for operand in operands):
            return by_blocks(*operands)
        *arrays, g = operands
        with torch.enable_grad():
            watched = [array.detach().requires_grad_() for array in arrays]
            weighted = weigh(*watched)
        return torch.autograd.grad(weighted, watched, g)

    return function


def _back_by_blocks(kernel: Attention) -> Function:
    def function(q: Any, k: Any, v: Any, g: Any) -> tuple[Any, ...]:
        groups = k.shape[-3]
        cotangents = kernel.back(
            grouped(q, groups), k[..., None, :, :], v[..., None, :, :], grouped(g, groups)
        )
        return tuple(
            cotangent.reshape(x.shape) for cotangent, x in zip(cotangents, (q, k, v), strict=True)
        )

    return function


def _pull_attention_gradient(step: TapeStep, cotangents: Any) -> tuple[Any, ...]:
    """Pull back through the gradient by scores, if a traced function with it is differentiated."""
    attend = _by_scores(
        **{name: step.attributes[name] for name in ("is_causal", "window", "scale")}
    )

    def pull_back(q: Any, k: Any, v: Any, g: Any) -> Any:
        return namespace.find("vjp")(attend, q, k, v)[1](g)

    return pull_again(pull_back, step, cotangents)


networks.register(
    "attention_gradient",
    attention_gradient_rule,
    ([*_HEADS, (2, 8, 5, 32)], {}),
    work=_work_of_gradient,
    local=_attention_gradient_kernel,
    knows_place=have_plain_parts,
    note="weights are found again; queries that are cut have contributions",
    pullback=JointPullback(_pull_attention_gradient),
)
