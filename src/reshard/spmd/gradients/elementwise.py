"""Derivatives of elementwise operators.

Each is written with the operators themselves. What broadcasting repeated is summed by the tape, and
so is not said here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from reshard.spmd.core.operator import Pullback, TapeStep
from reshard.spmd.functions import elementwise as e
from reshard.spmd.functions.elementwise import clip, where
from reshard.spmd.functions.networks import sigmoid
from reshard.spmd.gradients.tape import OF_GRAPHS
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call

Derivative = Callable[..., Any]


def _of_one(derivative: Derivative) -> Pullback:
    """From the cotangent, the operand and the result to the operand's cotangent."""

    def pullback(step: TapeStep, g: Any, number: int) -> Any:
        return derivative(g, step.operands[0], step.result)

    return pullback


def _of_two(*derivatives: Derivative) -> Pullback:
    """From the cotangent, both operands and the result to the cotangent of each."""

    def pullback(step: TapeStep, g: Any, number: int) -> Any:
        return derivatives[number](g, *step.operands, step.result)

    return pullback


def _pass(g: Any, *_: Any) -> Any:
    return g


def _pull_power(g: Any, x: Any, y: Any, r: Any) -> Any:
    # At 0 to the power of 0 the slope is 0, where 0 * x ** -1 is no number.
    if not isinstance(y, ArrayValue):
        return g * 0.0 if y == 0 else g * (y * e.pow(x, y - 1))
    is_zero = e.equal(y, 0)
    slope = e.multiply(y, e.pow(x, where(is_zero, 1.0, e.subtract(y, 1))))
    return g * where(is_zero, 0.0, slope)


def _pull_logarithm(g: Any, x: Any, r: Any) -> Any:
    # Of two numbers of -inf neither counts.
    return g * e.exp(x - where(e.equal(r, -math.inf), 0.0, r))


def _pull_exponent(g: Any, x: Any, y: Any, r: Any) -> Any:
    # 0 to any power above 0 stays 0.
    if not isinstance(x, ArrayValue):
        return g * (r * (math.log(x) if x > 0 else 0.0 if x == 0 else math.nan))
    return g * where(e.equal(x, 0), 0.0, r * e.log(where(e.equal(x, 0), 1.0, x)))


def _pull_silu(g: Any, x: Any, r: Any) -> Any:
    return call("silu_gradient", (g, x))


def _pull_silu_gradient(g: Any, cotangent: Any, x: Any, r: Any) -> Any:
    share = sigmoid(x)
    return g * cotangent * (share * (1.0 - share) * (2.0 + x * (1.0 - 2.0 * share)))


def _pull_greater(g: Any, x: Any, y: Any, r: Any) -> Any:
    # Where both are equal, each has half.
    return where(e.equal(x, r), where(e.equal(x, y), g * 0.5, g), 0.0)


def _pull_hypot(g: Any, x: Any, r: Any) -> Any:
    return g * where(e.equal(r, 0), 0.0, x / where(e.equal(r, 0), 1.0, r))


def _pull_copysign(g: Any, x: Any, y: Any, r: Any) -> Any:
    return where(e.equal(e.signbit(x), e.signbit(r)), g, -g)


def _pull_clip(step: TapeStep, g: Any, number: int) -> Any:
    x, *bounds = step.operands
    names = step.attributes["bounds"]
    least = bounds[names.index("min")] if "min" in names else None
    most = bounds[names.index("max")] if "max" in names else None
    if number == 0:
        inside = e.equal(x, clip(x, least, most))
        return where(inside, g, 0.0)
    # The upper bound is the one that holds where both do.
    if names[number - 1] == "max":
        return where(e.greater(x if least is None else e.maximum(x, least), most), g, 0.0)
    below = e.less(x, least)
    if most is not None:
        below = e.logical_and(below, e.less_equal(least, most))
    return where(below, g, 0.0)


def _pull_where(step: TapeStep, g: Any, number: int) -> Any:
    condition = step.operands[0]
    return where(condition, g, 0.0) if number == 1 else where(condition, 0.0, g)


_LOG2, _LOG10 = math.log(2), math.log(10)

PULLBACKS: dict[str, Pullback] = {
    "abs": _of_one(lambda g, x, r: g * e.sign(x)),
    "acos": _of_one(lambda g, x, r: -g / e.sqrt(1.0 - x * x)),
    "acosh": _of_one(lambda g, x, r: g / (e.sqrt(x - 1.0) * e.sqrt(x + 1.0))),
    "asin": _of_one(lambda g, x, r: g / e.sqrt(1.0 - x * x)),
    "asinh": _of_one(lambda g, x, r: g / e.sqrt(x * x + 1.0)),
    "atan": _of_one(lambda g, x, r: g / (x * x + 1.0)),
    "atanh": _of_one(lambda g, x, r: g / (1.0 - x * x)),
    "cos": _of_one(lambda g, x, r: -g * e.sin(x)),
    "cosh": _of_one(lambda g, x, r: g * e.sinh(x)),
    "exp": _of_one(lambda g, x, r: g * r),
    "expm1": _of_one(lambda g, x, r: g * (r + 1.0)),
    "log": _of_one(lambda g, x, r: g / x),
    "log1p": _of_one(lambda g, x, r: g / (x + 1.0)),
    "log2": _of_one(lambda g, x, r: g / (x * _LOG2)),
    "log10": _of_one(lambda g, x, r: g / (x * _LOG10)),
    "reciprocal": _of_one(lambda g, x, r: -g * (r * r)),
    "sin": _of_one(lambda g, x, r: g * e.cos(x)),
    "sinh": _of_one(lambda g, x, r: g * e.cosh(x)),
    "sqrt": _of_one(lambda g, x, r: g * 0.5 / r),
    "square": _of_one(lambda g, x, r: g * (2.0 * x)),
    "tan": _of_one(lambda g, x, r: g * (r * r + 1.0)),
    "sigmoid": _of_one(lambda g, x, r: g * r * (1.0 - r)),
    "silu": _of_one(_pull_silu),
    "silu_gradient": _of_two(lambda g, c, x, r: call("silu_gradient", (g, x)), _pull_silu_gradient),
    "relu": _of_one(lambda g, x, r: where(e.less_equal(r, 0), 0.0, g)),
    "tanh": _of_one(lambda g, x, r: g * (1.0 - r * r)),
    "negative": _of_one(lambda g, x, r: -g),
    **{name: _of_one(_pass) for name in ("positive", "real", "conj", "copy", "identity", "astype")},
    "atan2": _of_two(
        lambda g, y, x, r: g * (x / (x * x + y * y)),
        lambda g, y, x, r: -g * (y / (x * x + y * y)),
    ),
    "copysign": _of_two(_pull_copysign, lambda g, x, y, r: None),
    "hypot": _of_two(
        lambda g, x, y, r: _pull_hypot(g, x, r), lambda g, x, y, r: _pull_hypot(g, y, r)
    ),
    "logaddexp": _of_two(
        lambda g, x, y, r: _pull_logarithm(g, x, r), lambda g, x, y, r: _pull_logarithm(g, y, r)
    ),
    "pow": _of_two(_pull_power, _pull_exponent),
    # `x / y` may be rounded up to a whole number that the remainder was not taken by.
    "remainder": _of_two(_pass, lambda g, x, y, r: -g * e.floor_divide(x, y)),
    "add": _of_two(_pass, _pass),
    "subtract": _of_two(_pass, lambda g, x, y, r: -g),
    "multiply": _of_two(lambda g, x, y, r: g * y, lambda g, x, y, r: g * x),
    "divide": _of_two(lambda g, x, y, r: g / y, lambda g, x, y, r: -g * (r / y)),
    "maximum": _of_two(_pull_greater, lambda g, x, y, r: _pull_greater(g, y, x, r)),
    "minimum": _of_two(_pull_greater, lambda g, x, y, r: _pull_greater(g, y, x, r)),
    "clip": _pull_clip,
    "where": _pull_where,
}
"""By operator: those whose derivative is not 0 everywhere."""

_CONSTANT = """
ceil floor floor_divide imag round sign trunc stop_gradient
bitwise_and bitwise_invert bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor
equal greater greater_equal isfinite isinf isnan less less_equal logical_and logical_not
logical_or logical_xor not_equal signbit
"""
_OF_GRAPHS = """
angle cbrt clamp degrees erf exp2 float_power fmax fmin fmod gcd heaviside i0 lcm ldexp
logaddexp2 radians rsqrt select sinc softplus spacing
"""

CONSTANT = frozenset(_CONSTANT.split())
"""Operators whose results do not change with small changes of their operands."""

REFUSED: dict[str, str] = {
    "nextafter": "the next number is a rounding apart, which has no slope",
    "gelu": "sp.gelu is made of tanh",
    **dict.fromkeys(_OF_GRAPHS.split(), OF_GRAPHS),
}
"""Operators without a derivative, with the reason."""
