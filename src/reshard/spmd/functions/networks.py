"""Functions of neural networks: softmax, norms, losses, attention, lookups.

They are composed of operations that work on shards, so that an axis that is cut stays so: a
softmax over a cut axis exchanges its maximum and its sum, and never the array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard.errors import SpecError, UsageError
from reshard.spmd import namespace
from reshard.spmd.core.result_types import kind_of
from reshard.spmd.functions import data_types, elementwise, statistics
from reshard.spmd.functions.array_arguments import of_arrays, portion, whole_number
from reshard.spmd.functions.elementwise import (
    add,
    divide,
    exp,
    log,
    matmul,
    multiply,
    operands,
    subtract,
    where,
    whole,
)
from reshard.spmd.functions.indexing import take, take_along_axis
from reshard.spmd.functions.manipulation import (
    expand_dims,
    matrix_transpose,
    moveaxis,
    reshape,
    squeeze,
)
from reshard.spmd.functions.wide_types import in_wide_types
from reshard.spmd.operators.networks.ring_attention import may_turn
from reshard.spmd.operators.products import implied_result
from reshard.spmd.rules.shapes import axes_of, axis_of
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call, recorders
from reshard.spmd.shards.settling import settles

Axis = int | Sequence[int]


@of_arrays
def relu(x: Any, /) -> Any:
    """The elementwise maximum of a number and 0; its derivative at 0 is 0.

    >>> import reshard.spmd as sp
    >>> relu(sp.array([-1.0, 0.0, 2.0])).to_dense().tolist()
    [0.0, 0.0, 2.0]
    """
    return call("relu", (x,))


@of_arrays
def sigmoid(x: Any, /) -> Any:
    """`1 / (1 + exp(-x))`, without overflow or underflow to 0."""
    return call("sigmoid", (x,))


@of_arrays
def silu(x: Any, /) -> Any:
    """`x * sigmoid(x)`."""
    return call("silu", (x,))


@of_arrays
@in_wide_types
def gelu(x: Any, /) -> Any:
    """The Gaussian error linear unit, by its tanh approximation.

    Source: Hendrycks and Gimpel, 2016.
    """
    inner = multiply(add(x, multiply(elementwise.pow(x, 3), 0.044715)), math.sqrt(2 / math.pi))
    return multiply(multiply(x, add(elementwise.tanh(inner), 1.0)), 0.5)


@of_arrays
@in_wide_types
def logsumexp(x: Any, /, *, axis: Axis = -1, keepdims: bool = False) -> Any:
    """The logarithm of the sum of exponentials along axes, without overflow; -inf if empty."""
    if 0 in x.shape:
        nothing = statistics.sum(exp(x), axis=axis, keepdims=keepdims)
        return subtract(nothing, math.inf)
    _, most, total = _take_off_most(x, axis)
    found = add(log(total), most)
    return found if keepdims else squeeze(found, axis)


def _find_most(x: Any, axis: Axis) -> Any:
    """The greatest along axes, as a constant: what is taken off changes no result."""
    most = statistics.max(x, axis=axis, keepdims=True)
    # A derivative of the greatest would have to find who it was, on all ranks.
    is_differentiated = any(hasattr(one, "record_read") for one in recorders)
    return call("stop_gradient", (most,)) if is_differentiated else most


def _take_off_most(x: Any, axis: Axis) -> tuple[Any, Any, Any]:
    """The array less its greatest, the greatest, and the sum of the exponentials of the first."""
    # No exponential is above 1 then.
    most = _find_most(x, axis)
    # Where all are -inf, so is the result: nothing is taken off.
    most = where(elementwise.isfinite(most), most, 0.0)
    apart = subtract(x, most)
    return apart, most, statistics.sum(exp(apart), axis=axis, keepdims=True)


@of_arrays
@in_wide_types
def softmax(x: Any, /, *, axis: Axis = -1) -> Any:
    """Exponentials divided by their sum along axes."""
    if 0 in x.shape:
        axes_of(x.ndim, axis)
        return exp(x)
    powers = exp(subtract(x, _find_most(x, axis)))
    return divide(powers, statistics.sum(powers, axis=axis, keepdims=True))


@of_arrays
@in_wide_types
def log_softmax(x: Any, /, *, axis: Axis = -1) -> Any:
    """The logarithm of `softmax`."""
    if 0 in x.shape:
        axes_of(x.ndim, axis)
        return log(exp(x))
    # Of the difference, not of `x`: a logarithm beside a million would be rounded away.
    apart, _, total = _take_off_most(x, axis)
    return subtract(apart, log(total))


def _last_axes(x: Any, dims: int, *weights: Any) -> tuple[int, ...]:
    """The last axes. Raises for weights that do not have their sizes."""
    count = whole_number("a norm over dimensions:", dims, 1)
    axes = axes_of(x.ndim, tuple(range(-count, 0)))
    sizes = tuple(x.shape[axis] for axis in axes)
    for weight in weights:
        if weight is not None and tuple(weight.shape) != sizes:
            raise SpecError(
                f"a weight of shape {list(weight.shape)} for the last {count} dimensions of "
                f"{list(x.shape)}; {list(sizes)} was expected"
            )
    return axes


@of_arrays
def layer_norm(
    x: Any, weight: Any = None, bias: Any = None, /, *, dims: int = 1, epsilon: float = 1e-5
) -> Any:
    """Layer normalization over the last `dims` dimensions.

    `weight` and `bias` have the shape of those dimensions.
    """
    axes = _last_axes(x, dims, weight, bias)
    x, weight, bias = operands(x, weight, bias)
    given = [one for one in (x, weight, bias) if one is not None]
    # A row with an offset alone is none of the operator's.
    if (bias is None or weight is not None) and _may_be_one(len(axes), given):
        return call("layer_norm", given, {"dims": len(axes)}, {"epsilon": epsilon})
    return layer_norm_by_parts(x, weight, bias, axes=axes, epsilon=epsilon)


@of_arrays
def rms_norm(x: Any, weight: Any = None, /, *, dims: int = 1, epsilon: float = 1e-5) -> Any:
    """Root mean square normalization over the last `dims` dimensions."""
    axes = _last_axes(x, dims, weight)
    x, weight = operands(x, weight)
    given = [x] if weight is None else [x, weight]
    if _may_be_one(len(axes), given):
        return call("rms_norm", given, {"dims": len(axes)}, {"epsilon": epsilon})
    return rms_norm_by_parts(x, weight, axes=axes, epsilon=epsilon)


def _may_be_one(dims: int, given: Sequence[Any]) -> bool:
    """Whether a norm may be one operation on each rank: what is normalised is whole there."""
    # A strategy that is yet to place all values may cut what is normalised.
    if not settles() or not all(isinstance(one, ArrayValue) for one in given):
        return False
    types = {one.type.dtype for one in given}
    if len(types) > 1 or kind_of(*types) != "real floating" or 0 in given[0].shape:
        return False
    specs = [one.type.spec for one in given if one.type.spec is not None]
    return not any(
        one.partial_axes or any(dim.levels for dim in one.dim_specs[-dims:]) for one in specs
    )


@in_wide_types
def layer_norm_by_parts(
    x: Any, weight: Any = None, bias: Any = None, *, axes: Axis, epsilon: float
) -> Any:
    """The norm, see `layer_norm`, of other operations, whose axes may be cut."""
    apart = subtract(x, statistics.mean(x, axis=axes, keepdims=True))
    spread = statistics.mean(elementwise.square(apart), axis=axes, keepdims=True)
    found = divide(apart, elementwise.sqrt(add(spread, epsilon)))
    found = found if weight is None else multiply(found, weight)
    return found if bias is None else add(found, bias)


@in_wide_types
def rms_norm_by_parts(x: Any, weight: Any = None, *, axes: Axis, epsilon: float) -> Any:
    """The norm, see `rms_norm`, of other operations, whose axes may be cut."""
    size = statistics.mean(elementwise.square(x), axis=axes, keepdims=True)
    found = divide(x, elementwise.sqrt(add(size, epsilon)))
    return found if weight is None else multiply(found, weight)


@of_arrays
@in_wide_types
def cross_entropy(
    logits: Any,
    labels: Any,
    /,
    *,
    axis: int = -1,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Any:
    """Cross-entropy loss of each element, from logits and integer labels.

    Classes may be sharded: each rank computes with its own logits, ranks exchange three numbers for
    each element, and the gradient exchanges none.

    Args:
        logits: `[..., classes]`, with the classes along `axis`.
        labels: integers `[...]`, the classes.
        axis: of the classes.
        ignore_index: the label of elements whose loss and gradient are 0.
        label_smoothing: the part of each label's weight, from 0 to 1, that is distributed over all
            classes.

    Raises:
        ArrayIndexError: a label that is not a class, on every process.
        UsageError: a smoothing that is not from 0 to 1.
    """
    label_smoothing = portion("label_smoothing=", label_smoothing)
    logits, labels = operands(logits, labels)
    place = axis_of(logits.ndim, axis)
    ignored = None if ignore_index is None else elementwise.equal(labels, ignore_index)
    wanted = labels if ignored is None else where(ignored, 0, labels)
    wanted = expand_dims(wanted, axis=place)
    if 0 in logits.shape:
        chosen = take_along_axis(logits, wanted, axis=place)
        return subtract(logsumexp(logits, axis=place), squeeze(chosen, place))
    apart, _, total = _take_off_most(logits, place)
    every = squeeze(log(total), place)
    found = subtract(every, squeeze(take_along_axis(apart, wanted, axis=place), place))
    if label_smoothing:
        shared = subtract(every, statistics.mean(apart, axis=place))
        found = add(multiply(found, 1 - label_smoothing), multiply(shared, label_smoothing))
    return found if ignored is None else where(ignored, 0.0, found)


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
    """Scaled dot-product attention, with grouped queries, causal masks and windows.

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
    for name, one in (("queries", queries), ("keys", keys), ("values", values)):
        if one.ndim < 3:
            raise SpecError(
                f"attention with {name} of shape {list(one.shape)}; [..., heads, places, features] "
                "was expected: add a dimension of heads with sp.expand_dims"
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
        window = whole_number("attention in a window of", window, 1)
    factor = 1 / math.sqrt(size) if scale is None else scale
    if mask is None and _may_go_by_blocks(queries, keys, values):
        attributes = {"is_causal": bool(is_causal), "window": window}
        queries, keys, values = operands(queries, keys, values)
        specs = [one.type.spec for one in (queries, keys, values)]
        if None not in specs and may_turn(specs, (queries.shape, keys.shape)):
            # It stands above this module, with the gradient that is its own.
            go_round = namespace.find("ring_attention")
            return go_round(queries, keys, values, bool(is_causal), window, factor)
        return call("attention", (queries, keys, values), attributes, {"scale": factor})
    # 2. Otherwise the scores are an array.
    return attend_by_scores(
        queries, keys, values, mask, is_causal=is_causal, window=window, factor=factor
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
    """Attention, see `attention`, of other operations, with an array of scores."""
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
    # 2. What a query may not see gets -inf, whose exponential is 0.
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
    # 3. The weighed values, groups and their heads merged again: zeros where no key is seen.
    weights = scores
    if 0 not in scores.shape:
        apart, _, _ = _take_off_most(scores, -1)
        powers = exp(apart)
        total = statistics.sum(powers, axis=-1, keepdims=True)
        weights = divide(powers, where(elementwise.equal(total, 0), 1.0, total))
    if groups != heads:
        weights = reshape(weights, (*lead, groups, heads // groups, length, keys.shape[-2]))
    found = matmul(weights, values)
    return reshape(found, (*lead, heads, length, values.shape[-1]))


def _may_go_by_blocks(queries: Any, *others: Any) -> bool:
    """Whether attention may be one operation on each rank, without scores of their own."""
    types = {one.dtype for one in (queries, *others)}
    if len(types) > 1 or kind_of(queries.dtype) != "real floating":
        return False
    if any(0 in one.shape for one in (queries, *others)):
        return False
    # Where keys alone are cut, their parts of each sum are exchanged, and no key is.
    of_queries = _axes_along(queries, -2)
    return all(_axes_along(one, -2) <= of_queries for one in others)


def _axes_along(x: Any, dim: int) -> set[str]:
    """The names of the axes that cut a dimension."""
    spec = x.type.spec if isinstance(x, ArrayValue) else None
    return set() if spec is None else {axis.name for axis in spec.dim_specs[dim].axes}


@of_arrays
def embedding(indices: Any, table: Any, /) -> Any:
    """Look up rows of a table `[v, d]`, which may be sharded: each rank returns its own rows."""
    table, indices = operands(table, indices)
    return take(table, indices, axis=0)


@of_arrays
def one_hot(indices: Any, num_classes: int, /, *, axis: int = -1, dtype: object = None) -> Any:
    """One-hot encoding: the classes are a new dimension.

    An index that is not a class has no ones.
    """
    num_classes = whole_number("classes:", num_classes)
    if kind_of(indices.dtype) not in ("signed integer", "unsigned integer"):
        raise UsageError(f"one_hot of {indices.dtype}; give an array of whole numbers")
    place = axis_of(indices.ndim + 1, axis)
    shape = [num_classes if dim == place else 1 for dim in range(indices.ndim + 1)]
    classes = whole(indices, np.arange(num_classes).reshape(shape))
    found = elementwise.equal(expand_dims(indices, axis=place), classes)
    return data_types.astype(found, data_types.float32 if dtype is None else dtype)


@of_arrays
def top_k(x: Any, k: int, /, *, axis: int = -1) -> tuple[Any, Any]:
    """The `k` largest elements along an axis, in descending order, and their indices."""
    statistics.check_ordered(x, "top_k")
    attributes = {"k": whole_number("the largest", k), "axis": axis_of(x.ndim, axis)}
    found: tuple[Any, Any] = call("top_k", (x,), attributes)
    return found


def einsum(subscripts: str, /, *arrays: Any) -> Any:
    """Sums of products over subscripts, as `numpy.einsum`.

    Of a letter that an operand has twice, the diagonal is taken first.

    >>> import reshard.spmd as sp
    >>> x = sp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> float(einsum("ii", x)), einsum("ij,jk->k", x, x).to_dense().tolist()
    (5.0, [22.0, 32.0])
    """
    if not isinstance(subscripts, str):
        raise UsageError(f"einsum of {subscripts!r}; give its text first, 'ij,jk->ik' say")
    given = list(operands(*arrays))
    inputs, arrow, result = "".join(subscripts.split()).partition("->")
    every = inputs.split(",")
    if len(every) == len(given) and any(map(_find_repeated, every)):
        if not arrow:
            result = implied_result("".join(every))
        pairs = map(_take_diagonals, every, given)
        every, given = (list(one) for one in zip(*pairs, strict=True))
        subscripts = f"{','.join(every)}->{result}"
    return call("einsum", given, {"subscripts": subscripts})


def _find_repeated(letters: str) -> str:
    """The first letter of an operand's subscripts that is there twice; else nothing."""
    return next((x for x in letters if x != "." and letters.count(x) > 1), "")


def _take_diagonals(letters: str, x: Any) -> tuple[str, Any]:
    """An operand in whose subscripts no letter is there twice."""
    while letter := _find_repeated(letters):
        before, dots, after = letters.partition("...")
        if len(before) + len(after) > x.ndim or not (dots or len(before) == x.ndim):
            # The rule says what is wrong with it.
            return letters, x
        axes = [n for n, one in enumerate(before) if one == letter]
        axes += [x.ndim - len(after) + n for n, one in enumerate(after) if one == letter]
        first, second = axes[:2]
        if x.shape[first] != x.shape[second]:
            raise SpecError(
                f"einsum with {letter!r} twice in {letters!r}, for dimensions of {x.shape[first]} "
                f"and {x.shape[second]} elements; a letter has one length"
            )
        x = namespace.find("linalg").diagonal(moveaxis(x, (first, second), (-2, -1)))
        letters = letters.replace(letter, "", 2) + letter
    return letters, x
