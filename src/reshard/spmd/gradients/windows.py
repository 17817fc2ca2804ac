"""Derivatives of convolution, pooling and attention.

As the forward functions, they go through the places of a window, and work on all windows at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from reshard.spmd.functions import elementwise as e
from reshard.spmd.functions.elementwise import where
from reshard.spmd.functions.manipulation import reshape, stack, take_ranges
from reshard.spmd.functions.networks import einsum
from reshard.spmd.functions.statistics import sum as sum_over
from reshard.spmd.functions.windows import pad
from reshard.spmd.gradients.movement import put_ranges
from reshard.spmd.gradients.tape import OF_GRAPHS, JointPullback, Pullback, TapeStep
from reshard.spmd.shards.operation_call import call

Ranges = list[tuple[int, int, int]]


def _list_places(
    window: Sequence[int], counts: Sequence[int], steps: Sequence[int], gaps: Sequence[int]
) -> Iterator[Ranges]:
    """For each place of a window the elements of the padded space that all windows have there."""
    for places in itertools.product(*map(range, window)):
        yield [
            (place * gap, place * gap + (count - 1) * step + 1, step)
            for place, count, step, gap in zip(places, counts, steps, gaps, strict=True)
        ]


def _pad(x: Any, lead: int, padding: Sequence[tuple[int, int]], value: float = 0) -> Any:
    pairs = [(0, 0)] * lead + list(padding)
    return pad(x, pairs, constant_values=value) if any(map(any, pairs)) else x


def _unpad(x: Any, lead: int, padding: Sequence[tuple[int, int]]) -> Any:
    ends = {
        lead + dim: (before, x.shape[lead + dim] - after, 1)
        for dim, (before, after) in enumerate(padding)
    }
    return take_ranges(x, ends)


def _take(x: Any, lead: int, ranges: Ranges) -> Any:
    return take_ranges(x, {lead + dim: one for dim, one in enumerate(ranges)})


def _put(x: Any, shape: Sequence[int], ranges: Ranges) -> Any:
    lead = len(shape) - len(ranges)
    return put_ranges(x, shape, [(0, size, 1) for size in shape[:lead]] + ranges)


def _pull_convolution(step: TapeStep, g: Any, number: int) -> Any:
    x, kernel = step.operands
    attributes = step.attributes
    groups, padding = attributes["groups"], attributes["padding"]
    padded = _pad(x, 2, padding)
    outputs, each, *window = kernel.shape
    counts = g.shape[2:]
    places = _list_places(window, counts, attributes["strides"], attributes["dilation"])
    # The dimensions of space, in the texts of einsum.
    space = "uvwxyz"[: len(counts)]
    # Channels by group: [n, g, o, *space], [g, o, c, *window].
    apart = reshape(g, (g.shape[0], groups, outputs // groups, *counts))
    if number == 0:
        weights = reshape(kernel, (groups, outputs // groups, each, *window))
        found = None
        for at, ranges in zip(itertools.product(*map(range, window)), places, strict=True):
            part = einsum(f"ngo{space},goc->ngc{space}", apart, weights[(..., *at)])
            part = reshape(part, (g.shape[0], groups * each, *counts))
            part = _put(part, padded.shape, ranges)
            found = part if found is None else found + part
        return _unpad(found, 2, padding)
    parts = []
    for ranges in places:
        seen = _take(padded, 2, ranges)
        seen = reshape(seen, (x.shape[0], groups, each, *counts))
        parts.append(einsum(f"ngo{space},ngc{space}->goc", apart, seen))
    found = stack(parts, axis=-1)
    return reshape(found, kernel.shape)


def _list_pool_places(step: TapeStep, g: Any) -> tuple[int, list[Ranges]]:
    attributes = step.attributes
    window = attributes["window"]
    lead = g.ndim - len(window)
    ones = (1,) * len(window)
    return lead, list(_list_places(window, g.shape[lead:], attributes["strides"], ones))


def _pull_max_pool(step: TapeStep, g: Any, number: int) -> Any:
    (x,) = step.operands
    padding = step.attributes["padding"]
    lead, places = _list_pool_places(step, g)
    padded = _pad(x, lead, padding, -math.inf)
    found, taken = None, None
    for ranges in places:
        hits = e.equal(_take(padded, lead, ranges), step.result)
        # The first of equal elements has all of it.
        first = hits if taken is None else e.logical_and(hits, e.logical_not(taken))
        taken = hits if taken is None else e.logical_or(hits, taken)
        part = _put(where(first, g, 0.0), padded.shape, ranges)
        found = part if found is None else found + part
    return _unpad(found, lead, padding)


def _pull_avg_pool(step: TapeStep, g: Any, number: int) -> Any:
    (x,) = step.operands
    padding = step.attributes["padding"]
    lead, places = _list_pool_places(step, g)
    share = g / math.prod(step.attributes["window"])
    sizes = [
        size + before + after for size, (before, after) in zip(x.shape[lead:], padding, strict=True)
    ]
    found = None
    for ranges in places:
        part = _put(share, (*x.shape[:lead], *sizes), ranges)
        found = part if found is None else found + part
    return _unpad(found, lead, padding)


def _pull_attention(step: TapeStep, g: Any) -> tuple[Any, ...]:
    q, k, v = step.operands
    names = ("is_causal", "window")
    attributes = {name: step.attributes[name] for name in names}
    options = {"scale": step.attributes["scale"]}
    sums = call("attention_logsumexp", (q, k), attributes, options)
    shift = e.negative(sum_over(e.multiply(g, step.result), axis=-1))
    operands = (q, k, v, sums, shift, g)
    of_queries = call("attention_queries_gradient", operands, attributes, options)
    of_keys, of_values = call("attention_keys_gradient", operands, attributes, options)
    return of_queries, of_keys, of_values


PULLBACKS: dict[str, Pullback] = {
    "convolution": _pull_convolution,
    "max_pool": _pull_max_pool,
    "avg_pool": _pull_avg_pool,
    "attention": JointPullback(_pull_attention),
}
"""By operator."""

_MADE = "softmax log_softmax layer_norm rms_norm cross_entropy"
_SECOND = """
attention_logsumexp attention_queries_gradient attention_keys_gradient attention_turn
attention_turn_gradient
"""

REFUSED: dict[str, str] = {
    **dict.fromkeys(("sum_pool", "batch_norm"), OF_GRAPHS),
    **{
        name: f"sp.{name} is made of other operators, which have derivatives"
        for name in _MADE.split()
    },
    **dict.fromkeys(
        _SECOND.split(),
        "sp.attention has a gradient of the first order; with a mask, of zeros say, it has all",
    ),
}
"""Operators without a derivative, with the reason."""
