"""Ring attention: keys and values are sent from rank to rank, and are never gathered.

Queries, keys and values have the same sharding along their sequences. In each step a rank receives
the keys and values of one other part, if its queries attend to some of them, computes attention
with them, and combines the result with its earlier results, by the logarithms of the sums of
exponentials. The backward pass sends the keys and values once more, and returns their cotangents to
the ranks that own them.

Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reshard.spmd.core.local_work import stretches_of
from reshard.spmd.core.operator import JointPullback, TapeStep
from reshard.spmd.gradients.rematerialization import without
from reshard.spmd.gradients.tape import add_step, find_tapes
from reshard.spmd.ops import elementwise as e
from reshard.spmd.ops.attention import pull_by_scores
from reshard.spmd.ops.elementwise import where
from reshard.spmd.ops.movement import expand_dims
from reshard.spmd.ops.reductions import sum as sum_over
from reshard.spmd.ops.ring_attention import is_reached, pull_turn
from reshard.spmd.shards.operation_call import call

Attributes = dict[str, Any]


def ring_attention(
    q: Any, k: Any, v: Any, is_causal: bool, window: int | None, scale: float
) -> Any:
    """Compute attention of sequences with equal shardings; `sp.attention` calls this."""
    shared: Attributes = {"is_causal": is_causal, "window": window}
    with without(find_tapes((q, k, v))):
        output, sums = _attend(q, k, v, shared, scale)

    def pull_back(step: TapeStep, g: Any) -> tuple[Any, ...]:
        q, k, v = step.operands
        by_scores = pull_by_scores(step.operands, g, **shared, scale=scale)
        if by_scores is not None:
            return by_scores
        return _pull_back(q, k, v, step.result, sums, g, shared, scale)

    add_step(TapeStep("attention", {}, (q, k, v), (output,), JointPullback(pull_back)))
    return output


def _list_turns(q: Any, k: Any, shared: Attributes) -> Iterator[Attributes]:
    """Return the attributes of all turns in which any query sees any key."""
    queries, keys = (stretches_of(x.type.spec, -2, x.shape[-2]) for x in (q, k))
    for turn in range(len(queries)):
        if any(
            is_reached(shared, stretch, keys[(number + turn) % len(keys)])
            for number, stretch in enumerate(queries)
        ):
            yield {**shared, "turn": turn, "query_parts": queries, "key_parts": keys}


def _in_passing(x: Any) -> Any:
    """Return the same array without a reshard cache: each part is needed for a single turn."""
    return x if x.runner.is_abstract else type(x).given(x.type, x._shards, x.runner)


def _attend(q: Any, k: Any, v: Any, shared: Attributes, scale: float) -> tuple[Any, Any]:
    """Return the weighted values and the logarithms of the sums."""
    k, v = _in_passing(k), _in_passing(v)
    output, sums = None, None
    for attributes in _list_turns(q, k, shared):
        part, logs = call("attention_turn", (q, k, v), attributes, {"scale": scale})
        if sums is None:
            output, sums = part, logs
            continue
        both = e.logaddexp(sums, logs)
        # If no key was seen yet, both are zeros.
        level = where(e.isfinite(both), both, 0.0)
        shares = (expand_dims(e.exp(log_sum - level), axis=-1) for log_sum in (sums, logs))
        output, sums = output * next(shares) + part * next(shares), both
    return output, sums


def _pull_back(
    q: Any, k: Any, v: Any, output: Any, sums: Any, g: Any, shared: Attributes, scale: float
) -> tuple[Any, ...]:
    """Return the cotangents of queries, keys and values, in the operands' shardings."""
    shift = e.negative(sum_over(g * output, axis=-1))
    arrays = (q, _in_passing(k), _in_passing(v))
    totals: list[Any] = []
    for attributes in _list_turns(q, k, shared):
        home = pull_turn(arrays, sums, shift, g, attributes, scale)
        totals = [a + b for a, b in zip(totals, home, strict=True)] if totals else list(home)
    return tuple(totals)
