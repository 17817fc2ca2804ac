"""Functions of neural networks: softmax, norms, losses, attention, lookups.

They are composed of operations that work on shards, so that a sharded axis stays sharded: a
softmax over a sharded axis exchanges its maximum and its sum, and never the array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from reshard._validation import check_int
from reshard.dtypes import dtype as as_dtype
from reshard.errors import SpecError
from reshard.spmd import namespace
from reshard.spmd.core.local_work import Function, LocalWork
from reshard.spmd.core.operator import JointPullback, TapeStep, ship
from reshard.spmd.core.result_types import kind_of
from reshard.spmd.ops import elementwise, reductions
from reshard.spmd.ops.arguments import of_arrays, portion
from reshard.spmd.ops.data_types import in_wide_types
from reshard.spmd.ops.elementwise import add, divide, exp, log, multiply, operands, subtract, where
from reshard.spmd.ops.indexing import take_along_axis
from reshard.spmd.ops.movement import expand_dims, squeeze
from reshard.spmd.rules.rule_builder import Inferred, Shape, axes_of, axis_of, counted, from_pattern
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call, recorders
from reshard.spmd.shards.partial_sums import settles

Axis = int | Sequence[int]


@of_arrays
@in_wide_types
def gelu(x: Any, /) -> Any:
    """Apply the Gaussian error linear unit, by its tanh approximation.

    Source: Hendrycks and Gimpel, 2016.
    """
    inner = multiply(add(x, multiply(elementwise.pow(x, 3), 0.044715)), math.sqrt(2 / math.pi))
    return multiply(multiply(x, add(elementwise.tanh(inner), 1.0)), 0.5)


@of_arrays
@in_wide_types
def logsumexp(x: Any, /, *, axis: Axis = -1, keepdims: bool = False) -> Any:
    """Compute the logarithm of the sum of exponentials along axes; -inf if empty."""
    if 0 in x.shape:
        # The logarithm of 0, the sum of no exponentials, would warn.
        nothing = reductions.sum(exp(x), axis=axis, keepdims=keepdims)
        return subtract(nothing, math.inf)
    _, most, total = take_off_most(x, axis)
    logarithm = add(log(total), most)
    return logarithm if keepdims else squeeze(logarithm, axis)


def take_off_most(x: Any, axis: Axis) -> tuple[Any, Any, Any]:
    """Return the array minus its maximum, the maximum, and the sum of the exponentials."""
    # Subtracting the maximum keeps all exponentials at or below 1.
    most = _find_most(x, axis)
    # If all elements are -inf, so is the result: nothing is subtracted, because -inf + inf is NaN.
    most = where(elementwise.isfinite(most), most, 0.0)
    apart = subtract(x, most)
    return apart, most, reductions.sum(exp(apart), axis=axis, keepdims=True)


def _find_most(x: Any, axis: Axis) -> Any:
    """Return the maximum along axes as a constant, since subtracting it does not affect results."""
    most = reductions.max(x, axis=axis, keepdims=True)
    # Differentiating the maximum would require finding the maximal elements on all ranks.
    is_differentiated = any(recorder.differentiates for recorder in recorders.active)
    return call("stop_gradient", (most,)) if is_differentiated else most


@of_arrays
@in_wide_types
def softmax(x: Any, /, *, axis: Axis = -1) -> Any:
    """Divide exponentials by their sum along axes."""
    if 0 in x.shape:
        # Raises for an axis that `x` does not have.
        axes_of(x.ndim, axis)
        return exp(x)
    powers = exp(subtract(x, _find_most(x, axis)))
    return divide(powers, reductions.sum(powers, axis=axis, keepdims=True))


@of_arrays
@in_wide_types
def log_softmax(x: Any, /, *, axis: Axis = -1) -> Any:
    """Compute the logarithm of `softmax`."""
    if 0 in x.shape:
        # Raises for an axis that `x` does not have.
        axes_of(x.ndim, axis)
        return log(exp(x))
    # Subtract from the difference, not from `x`: the logarithm would be lost in a large `x`.
    apart, _, total = take_off_most(x, axis)
    return subtract(apart, log(total))


# ---- layer_norm


@of_arrays
def layer_norm(
    x: Any, weight: Any = None, bias: Any = None, /, *, dims: int = 1, epsilon: float = 1e-5
) -> Any:
    """Normalize to mean 0 and variance 1 over the last `dims` dimensions.

    `weight` and `bias` have the shape of those dimensions.
    """
    axes = _last_axes(x, dims, weight, bias)
    x, weight, bias = operands(x, weight, bias)
    inputs = [operand for operand in (x, weight, bias) if operand is not None]
    # The operator does not support a bias without a weight.
    if (bias is None or weight is not None) and _may_be_one(len(axes), inputs):
        return call("layer_norm", inputs, {"dims": len(axes)}, {"epsilon": epsilon})
    return layer_norm_by_parts(x, weight, bias, axes=axes, epsilon=epsilon)


def _last_axes(x: Any, dims: int, *weights: Any) -> tuple[int, ...]:
    """Return the last axes. Raises SpecError for weights that do not have their sizes."""
    count = check_int(dims, "number of normalized dimensions", minimum=1)
    axes = axes_of(x.ndim, tuple(range(-count, 0)))
    sizes = tuple(x.shape[axis] for axis in axes)
    for weight in weights:
        if weight is not None and tuple(weight.shape) != sizes:
            raise SpecError(
                f"a weight of shape {list(weight.shape)} for the last {count} dimensions of "
                f"{list(x.shape)}; {list(sizes)} was expected"
            )
    return axes


def _may_be_one(dims: int, inputs: Sequence[Any]) -> bool:
    """Return whether a norm can be a single operation: the normalized axes must not be sharded."""
    # A strategy that has yet to choose shardings may shard the normalized axes.
    if not settles() or not all(isinstance(operand, ArrayValue) for operand in inputs):
        return False
    types = {operand.type.dtype for operand in inputs}
    if len(types) > 1 or kind_of(*types) != "real floating" or 0 in inputs[0].shape:
        return False
    specs = [operand.type.spec for operand in inputs if operand.type.spec is not None]
    return not any(
        spec.partial_axes or any(dim.levels for dim in spec.dim_specs[-dims:]) for spec in specs
    )


register = partial(ship, family="networks")


def norm_rule(shapes: Sequence[Shape], dims: int = 1) -> Inferred:
    """Infer the norm over the last dimensions, with optional weight and bias of their shape.

    >>> print(norm_rule([(4, 8), (8,)]).rule)
    ([i, j], [j]) -> ([i, j]) {i=4, j=8} need_replication={j}
    """
    if not 1 <= len(shapes) <= 3:
        counted("a norm", shapes, 1)
    pattern = "*a *n" + ", *n" * (len(shapes) - 1) + " -> *a *n"
    return from_pattern(pattern, shapes, lengths={"n": dims}, whole="n")


def _norm_kernel(work: LocalWork) -> Function:
    """Return a kernel for the norm of each row, with a weight and a bias if they are given."""
    if work.library.name == "numpy":
        return _norm_by_numpy(work)
    functional = import_module("torch").nn.functional
    dims, epsilon = work.attributes["dims"], work.attributes["epsilon"]
    normalised = functional.rms_norm if work.name == "rms_norm" else functional.layer_norm

    def function(x: Any, *others: Any) -> Any:
        return normalised(x, x.shape[x.ndim - dims :], *others, eps=epsilon)

    return function


def _norm_by_numpy(work: LocalWork) -> Function:
    rows = _Rows(work)

    def function(x: Any, *others: Any) -> Any:
        apart, scale = rows.scaled(x)
        normalized = (apart * scale[:, None]).reshape(x.shape)
        for combine, parameter in zip((np.multiply, np.add), others, strict=False):
            normalized = combine(normalized, parameter)
        return normalized.astype(x.dtype, copy=False)

    return function


class _Rows:
    """A conversion of the normalized dimensions to rows, of floats of 4 bytes or more."""

    def __init__(self, work: LocalWork) -> None:
        self.space = work.library.namespace
        self.is_centred = work.name.startswith("layer")
        is_numpy = work.library.name == "numpy"
        self.multiply: Any = np.multiply if is_numpy else import_module("torch").mul
        self._epsilon = work.attributes["epsilon"]
        # The operand, or the cotangent of its shape and type.
        array_type = next(operand for operand in work.operands if operand is not None)
        self.size = math.prod(array_type.shape[array_type.ndim - work.attributes["dims"] :])
        is_narrow = array_type.dtype.itemsize_bytes < 4
        self._wide = work.library.own_dtype(as_dtype("float32") if is_narrow else array_type.dtype)

    def of(self, x: Any) -> Any:
        """Return an array as rows."""
        return self.space.astype(x, self._wide, copy=False).reshape(-1, self.size)

    def like(self, x: Any, other: Any) -> Any:
        """Return rows in the shape and with the type of an array."""
        return self.space.astype(x, other.dtype, copy=False).reshape(other.shape)

    def scaled(self, x: Any) -> tuple[Any, Any]:
        """Return rows, centred if the norm subtracts means, and the factor that normalizes each."""
        x = self.of(x)
        if self.is_centred:
            x = x - self.space.mean(x, axis=-1, keepdims=True)
        length = self.space.linalg.vector_norm(x, axis=-1)
        return x, (length * length / self.size + self._epsilon) ** -0.5


_WHOLE = "the normalised axis is whole on each device"


def _pull_norm(step: TapeStep, g: Any) -> tuple[Any, ...]:
    x, *weights = step.operands
    dims, epsilon = step.attributes["dims"], step.attributes["epsilon"]
    cotangents = call(
        f"{step.name}_gradient", (g, x, *weights[:1]), {"dims": dims}, {"epsilon": epsilon}
    )
    # The bias was broadcast over rows: the tape sums its cotangent.
    return (*cotangents, *[g] * len(weights[1:])) if weights else (cotangents,)


register(
    "layer_norm",
    norm_rule,
    ([(4, 8), (8,), (8,)], {}),
    local=_norm_kernel,
    note=_WHOLE,
    pullback=JointPullback(_pull_norm),
)


# ---- rms_norm


@of_arrays
def rms_norm(x: Any, weight: Any = None, /, *, dims: int = 1, epsilon: float = 1e-5) -> Any:
    """Normalize by the root mean square over the last `dims` dimensions."""
    axes = _last_axes(x, dims, weight)
    x, weight = operands(x, weight)
    inputs = [x] if weight is None else [x, weight]
    if _may_be_one(len(axes), inputs):
        return call("rms_norm", inputs, {"dims": len(axes)}, {"epsilon": epsilon})
    return rms_norm_by_parts(x, weight, axes=axes, epsilon=epsilon)


register(
    "rms_norm",
    norm_rule,
    ([(4, 8), (8,)], {}),
    local=_norm_kernel,
    note=_WHOLE,
    pullback=JointPullback(_pull_norm),
)


@in_wide_types
def layer_norm_by_parts(
    x: Any, weight: Any = None, bias: Any = None, *, axes: Axis, epsilon: float
) -> Any:
    """Compute `layer_norm` by other operations, which may shard the normalized axes."""
    apart = subtract(x, reductions.mean(x, axis=axes, keepdims=True))
    spread = reductions.mean(elementwise.square(apart), axis=axes, keepdims=True)
    normalized = divide(apart, elementwise.sqrt(add(spread, epsilon)))
    normalized = normalized if weight is None else multiply(normalized, weight)
    return normalized if bias is None else add(normalized, bias)


@in_wide_types
def rms_norm_by_parts(x: Any, weight: Any = None, *, axes: Axis, epsilon: float) -> Any:
    """Compute `rms_norm` by other operations, which may shard the normalized axes."""
    size = reductions.mean(elementwise.square(x), axis=axes, keepdims=True)
    normalized = divide(x, elementwise.sqrt(add(size, epsilon)))
    return normalized if weight is None else multiply(normalized, weight)


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
    """Compute the cross-entropy loss of each element, from logits and integer labels.

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
    # Any class will do: an ignored label, often -100, would be out of range.
    targets = labels if ignored is None else where(ignored, 0, labels)
    targets = expand_dims(targets, axis=place)
    if 0 in logits.shape:
        chosen = take_along_axis(logits, targets, axis=place)
        return subtract(logsumexp(logits, axis=place), squeeze(chosen, place))
    apart, _, total = take_off_most(logits, place)
    log_total = squeeze(log(total), place)
    losses = subtract(log_total, squeeze(take_along_axis(apart, targets, axis=place), place))
    if label_smoothing:
        shared = subtract(log_total, reductions.mean(apart, axis=place))
        losses = add(multiply(losses, 1 - label_smoothing), multiply(shared, label_smoothing))
    return losses if ignored is None else where(ignored, 0.0, losses)


# ---- layer_norm_gradient


def norm_gradient_rule(shapes: Sequence[Shape], dims: int = 1) -> Inferred:
    """Infer the cotangents of a norm's operand and weight from the result's cotangent.

    The weight applies to all rows, so ranks that have parts of the rows have contributions to its
    cotangent.

    >>> print(norm_gradient_rule([(4, 8), (4, 8), (8,)]).rule)
    ([i, j], [i, j], [j]) -> ([i, j], [j]) {i=4, j=8} reduction={i} need_replication={j}
    """
    if len(shapes) != 3:
        counted("the gradient of a norm", shapes, 2)
    weight = ", *n" * (len(shapes) - 2)
    pattern = f"*a *n, *a *n{weight} -> *a *n{weight}"
    return from_pattern(
        pattern, shapes, lengths={"n": dims}, reduced="a" if weight else "", whole="n"
    )


def _norm_gradient_kernel(work: LocalWork) -> Function:
    """Return a kernel for the cotangents of a norm's operand and weight."""
    rows = _Rows(work)
    if rows.is_centred and work.library.name != "numpy":
        return _layer_norm_gradient_by_torch(rows, work.attributes["epsilon"])

    def function(g: Any, x: Any, *weights: Any) -> Any:
        # Let h be the cotangent of the normalized row n, before the weight. The row's cotangent is
        # (h - mean(h n) n) / deviation, minus its mean if the norm subtracts the row's mean.
        apart, scale = rows.scaled(x)
        slope = rows.of(g)
        shared = slope * apart
        to_weights = [rows.like(scale @ shared, parameter) for parameter in weights]
        # Allocating memory of this size takes longer than computing, so `shared` is reused.
        if weights:
            weight = rows.of(weights[0])[0]
            agreement = shared @ weight
            cotangent = rows.multiply(slope, weight, out=shared)
            cotangent *= scale[:, None]
        else:
            agreement = rows.space.sum(shared, axis=-1)
            cotangent = rows.multiply(slope, scale[:, None], out=shared)
        agreement *= scale * scale * scale / -rows.size
        if rows.is_centred:
            apart *= agreement[:, None]
            cotangent += apart
            cotangent -= rows.space.mean(cotangent, axis=-1, keepdims=True)
        else:
            cotangent += apart * agreement[:, None]
        cotangent = rows.like(cotangent, x)
        return (cotangent, *to_weights) if weights else cotangent

    return function


def _layer_norm_gradient_by_torch(rows: _Rows, epsilon: float) -> Function:
    aten = import_module("torch").ops.aten

    def function(g: Any, x: Any, *weights: Any) -> Any:
        flat = rows.of(x)
        weight = rows.of(weights[0])[0] if weights else None
        # PyTorch's backward function needs both, and the forward pass has kept neither.
        _, mean, scale = aten.native_layer_norm(flat, [rows.size], weight, None, epsilon)
        output_mask = [True, weight is not None, False]
        cotangent, to_weight, _ = aten.native_layer_norm_backward(
            rows.of(g), flat, [rows.size], mean, scale, weight, None, output_mask
        )
        cotangent = rows.like(cotangent, x)
        return (cotangent, rows.like(to_weight, weights[0])) if weights else cotangent

    return function


def _pull_norm_gradient(step: TapeStep, g: Any) -> tuple[Any, ...]:
    dims, epsilon = step.attributes["dims"], step.attributes["epsilon"]
    by_parts = rms_norm_by_parts if step.name.startswith("rms") else layer_norm_by_parts

    def pull_back(cotangent: Any, x: Any, *weights: Any) -> Any:
        axes = tuple(range(x.ndim - dims, x.ndim))
        _, pullback = namespace.find("vjp")(
            lambda *operands: by_parts(*operands, axes=axes, epsilon=epsilon), x, *weights
        )
        return pullback(cotangent)

    return pull_again(pull_back, step, g)


def pull_again(pull_back: Callable[..., Any], step: TapeStep, cotangents: Any) -> tuple[Any, ...]:
    """Return the cotangents of a gradient's operands, by differentiating the gradient function."""
    # Found by name, because it depends on this module.
    result: tuple[Any, ...] = namespace.find("vjp")(pull_back, *step.operands)[1](
        cotangents if isinstance(cotangents, tuple) else (cotangents,)
    )
    return result


register(
    "layer_norm_gradient",
    norm_gradient_rule,
    ([(4, 8), (4, 8), (8,)], {}),
    local=_norm_gradient_kernel,
    note="rows that are cut have contributions to the weight's cotangent",
    pullback=JointPullback(_pull_norm_gradient),
)


# ---- rms_norm_gradient


register(
    "rms_norm_gradient",
    norm_gradient_rule,
    ([(4, 8), (4, 8), (8,)], {}),
    local=_norm_gradient_kernel,
    note="rows that are cut have contributions to the weight's cotangent",
    pullback=JointPullback(_pull_norm_gradient),
)
