"""Derivatives of convolution, pooling, norms and attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.spmd import namespace
from reshard.spmd.core.operator import JointPullback, Pullback, TapeStep
from reshard.spmd.functions import elementwise as e
from reshard.spmd.functions.elementwise import where, whole
from reshard.spmd.functions.manipulation import (
    expand_dims,
    matrix_transpose,
    reshape,
)
from reshard.spmd.functions.networks import (
    attend_by_scores,
    layer_norm_by_parts,
    rms_norm_by_parts,
)
from reshard.spmd.functions.statistics import sum as sum_over
from reshard.spmd.gradients.tape import OF_GRAPHS
from reshard.spmd.local.ring_attention import seen_keys
from reshard.spmd.shards.operation_call import call, is_watched, placed


def pull_by_scores(
    arrays: Sequence[Any], g: Any, *, is_causal: bool, window: int | None, scale: float
) -> tuple[Any, ...] | None:
    """The cotangents of attention's operands, of operations that have derivatives themselves.

    None where no tape asks for those, and scores need not be there.
    """
    if not is_watched((*arrays, g)):
        return None
    options: dict[str, Any] = {"is_causal": is_causal, "window": window, "factor": scale}

    def attend(q: Any, k: Any, v: Any) -> Any:
        return attend_by_scores(q, k, v, None, **options)

    # It stands above this module.
    _, pullback = namespace.find("vjp")(attend, *arrays)
    found: tuple[Any, ...] = pullback(g)
    return found


def _pull_attention(step: TapeStep, g: Any) -> tuple[Any, ...]:
    q, k, v = step.operands
    every = ("is_causal", "window", "scale")
    found = pull_by_scores(step.operands, g, **{name: step.attributes[name] for name in every})
    if found is not None:
        return found
    attributes = {name: step.attributes[name] for name in ("is_causal", "window")}
    options = {"scale": step.attributes["scale"]}
    made: tuple[Any, ...] = call("attention_gradient", (q, k, v, g), attributes, options)
    return made


def _pull_attention_turn(step: TapeStep, cotangents: Any) -> tuple[Any, ...]:
    """Where a traced function that has turns of ring attention is carried out again."""
    g, of_sums = cotangents
    found, sums = step.results
    # Of queries that see no key in this turn the logarithm has no slope.
    shift = where(e.isfinite(sums), of_sums - sum_over(g * found, axis=-1), 0.0)
    attributes = dict(step.attributes)
    scale = attributes.pop("scale")
    return pull_turn(step.operands, sums, shift, g, attributes, scale)


def pull_turn(
    arrays: Sequence[Any], sums: Any, shift: Any, g: Any, attributes: dict[str, Any], scale: float
) -> tuple[Any, ...]:
    """The cotangents of a turn's queries, keys and values, in the shardings of those.

    Args:
        arrays: the queries, keys and values.
        sums: the logarithms of the sums of the keys that the queries see.
        shift: what is added to the weights' cotangents.
        g: the cotangent of what is weighed.
        attributes: of the turn.
        scale: of the scores.
    """
    operands = (*arrays, sums, shift, g)
    made = call("attention_turn_gradient", operands, attributes, {"scale": scale})
    return tuple(placed(one, x.type.spec) for one, x in zip(made, arrays, strict=True))


def _pull_attention_gradient(step: TapeStep, cotangents: Any) -> tuple[Any, ...]:
    """By scores, where a traced function that has the gradient is differentiated."""
    attributes = {name: step.attributes[name] for name in ("is_causal", "window")}
    factor = step.attributes["scale"]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return attend_by_scores(q, k, v, None, factor=factor, **attributes)

    def pull_back(q: Any, k: Any, v: Any, g: Any) -> Any:
        return namespace.find("vjp")(attend, q, k, v)[1](g)

    return _pull_again(pull_back, step, cotangents)


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
        # The keys of a group serve all of its heads.
        both = (sum_over(one, axis=-3) for one in (of_keys, of_values))
        return (reshape(of_scores @ keys, q.shape), *both)

    return _pull_again(pull_back, step, cotangents)


def _group_heads(x: Any, groups: int) -> Any:
    """Heads `[..., h, s, d]` as those of each group, `[..., g, r, s, d]`."""
    *lead, heads, length, size = x.shape
    return reshape(x, (*lead, groups, heads // groups, length, size))


def _find_met(attributes: Mapping[str, Any], shape: Sequence[int]) -> Any:
    """Which queries and keys meet in a turn, `[s, t]`."""
    low, high = seen_keys(attributes).limits
    before = np.arange(shape[0])[:, None] - np.arange(shape[1])
    met = np.zeros(shape, dtype=bool)
    keys = attributes["key_parts"]
    for number, own in enumerate(attributes["query_parts"], attributes["turn"]):
        for one, other in itertools.product(own, keys[number % len(keys)]):
            met[slice(*one), slice(*other)] = True
    return met & (before >= low) & (before <= high)


def _pull_again(pull_back: Callable[..., Any], step: TapeStep, cotangents: Any) -> tuple[Any, ...]:
    """The cotangents of a gradient's operands, by the gradient as a function of them."""
    # It stands above this module.
    found: tuple[Any, ...] = namespace.find("vjp")(pull_back, *step.operands)[1](
        cotangents if isinstance(cotangents, tuple) else (cotangents,)
    )
    return found


def _pull_norm(step: TapeStep, g: Any) -> tuple[Any, ...]:
    x, *weights = step.operands
    dims, epsilon = step.attributes["dims"], step.attributes["epsilon"]
    made = call(f"{step.name}_gradient", (g, x, *weights[:1]), {"dims": dims}, {"epsilon": epsilon})
    # The tape sums what was added to each row.
    return (*made, *[g] * len(weights[1:])) if weights else (made,)


def _pull_norm_gradient(step: TapeStep, g: Any) -> tuple[Any, ...]:
    dims, epsilon = step.attributes["dims"], step.attributes["epsilon"]
    by_parts = rms_norm_by_parts if step.name.startswith("rms") else layer_norm_by_parts

    def pull_back(cotangent: Any, x: Any, *weights: Any) -> Any:
        axes = tuple(range(x.ndim - dims, x.ndim))
        made = namespace.find("vjp")(
            lambda *own: by_parts(*own, axes=axes, epsilon=epsilon), x, *weights
        )
        return made[1](cotangent)

    return _pull_again(pull_back, step, g)


PULLBACKS: dict[str, Pullback] = {
    "attention": JointPullback(_pull_attention),
    "attention_gradient": JointPullback(_pull_attention_gradient),
    "attention_turn": JointPullback(_pull_attention_turn),
    "attention_turn_gradient": JointPullback(_pull_turn_gradient),
    "layer_norm": JointPullback(_pull_norm),
    "rms_norm": JointPullback(_pull_norm),
    "layer_norm_gradient": JointPullback(_pull_norm_gradient),
    "rms_norm_gradient": JointPullback(_pull_norm_gradient),
}


_MADE = "softmax log_softmax cross_entropy"


REFUSED: dict[str, str] = {
    **dict.fromkeys(("sum_pool", "batch_norm"), OF_GRAPHS),
    **{
        name: f"sp.{name} is made of other operators, which have derivatives"
        for name in _MADE.split()
    },
}
"""Operators without a derivative, with the reason."""
