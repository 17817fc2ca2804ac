"""Elementwise operators, with NumPy's broadcasting.

`_unary` and `_binary` make the functions of operators that need only a record. Derivatives are
written with the operators themselves; the tape sums cotangents over broadcast dimensions. NumPy's
ufuncs can write their result into the memory of an operand, since they read each element before
they write it; `writing` has a list of PyTorch's functions that can.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from reshard.errors import SpecError
from reshard.spmd import namespace
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.backend import is_distributed, library, library_of
from reshard.spmd.core.local_work import Function, LocalWork
from reshard.spmd.core.operator import (
    Example,
    Infer,
    Operator,
    OperatorClass,
    Pullback,
    TapeStep,
    ship,
)
from reshard.spmd.core.result_types import asked, boolean, of_first
from reshard.spmd.ops.arguments import of_arrays
from reshard.spmd.rules.rule_builder import Inferred, Shape, elementwise_rule
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call, recorders
from reshard.spmd.shards.runner import in_process

# ---- Operands, and functions made of records


def whole(x: ArrayValue, array: Any) -> Any:
    """Convert a library's array to an operand for `x`; only a DTensor gets a sharding, its own."""
    if is_distributed(array):
        return namespace.find("array")(array, runner=x.runner)
    library = x.runner.library
    shard = library.array(array, like=next(iter(x._shards), None))
    kind = ArrayType(shard.shape, library.dtype_of(shard))
    return type(x).of_shards(kind, (shard,), x.runner)


def operands(*values: Any) -> list[Any]:
    """Convert values to operands of an operation, with the runner of the first sharded array.

    If runners differ, arrays of NumPy shards in this process are converted to the other runner.
    """
    arrays = [value for value in values if isinstance(value, ArrayValue)]
    if not arrays:
        return list(values)
    first = arrays[0]
    if len({array.runner for array in arrays}) > 1:
        # Arrays of NumPy are moved to the others, which may record gradients or be on a device.
        first = next((array for array in arrays if array.runner.library.name != "numpy"), first)
    converted = []
    for value in values:
        if not isinstance(value, ArrayValue):
            converted.append(value if library_of(value) is None else whole(first, value))
        else:
            converted.append(value if value.runner is first.runner else _convert_like(first, value))
    return converted


def _convert_like(first: ArrayValue, array: ArrayValue) -> ArrayValue:
    """Convert an array of NumPy shards to the runner of `first`; return other arrays unchanged."""
    runner = first.runner
    if array.runner is not in_process("numpy") or runner.is_abstract:
        return array
    for recorder in recorders.active:
        # The copy is a new array, on which no gradient depends: recorders must know of the read.
        recorder.record_read(array)
    mesh = None if array.type.spec is None else array.type.spec.mesh
    shards = dict(zip(array.runner.ranks(mesh), array._shards, strict=True))
    like = next(iter(first._shards), None)
    converted = [runner.library.array(shards[rank], like=like) for rank in runner.ranks(mesh)]
    result: ArrayValue = type(array).of_shards(array.type, tuple(converted), runner)
    return result


def make_function(operator: Operator) -> Function:
    """Return the function of an operator whose record has a `doc`."""
    name = operator.name

    def unary(x: Any, /) -> Any:
        return call(name, (x,))

    def binary(x1: Any, x2: Any, /) -> Any:
        # The shortest way for an array and an array or number whose operation is compiled.
        is_array = isinstance(x2, ArrayValue)
        if isinstance(x1, ArrayValue) and (not is_array or x1.runner is x2.runner):
            kind = x2.type if is_array else x2.__class__
            compiled = x1.runner.calls.get((name, x1.type, kind))
            if compiled is not None and not (compiled.factors or recorders.active):
                return compiled.run(x1, x2)
        return call(name, operands(x1, x2))

    def variadic(*arrays: Any, **attributes: Any) -> Any:
        return call(name, operands(*arrays), attributes)

    shapes, attributes = operator.example or ((), {})
    implementation: Any = (
        variadic if attributes else {1: unary, 2: binary}.get(len(shapes), variadic)
    )
    implementation.__name__ = implementation.__qualname__ = name
    implementation.__doc__ = operator.doc
    if operator.family == "elementwise":
        implementation.__doc__ += " Elementwise; operands broadcast, and may be Python numbers."
    function: Function = implementation
    return function


Derivative = Callable[..., Any]
_LOG2 = math.log(2)
_LOG10 = math.log(10)


def _expect_operands(least: int, most: int) -> Infer:
    def infer(shapes: Sequence[Shape], **attributes: Any) -> Inferred:
        if not least <= len(shapes) <= most:
            expected = least if least == most else f"{least} to {most}"
            raise SpecError(f"{len(shapes)} operands; {expected} were expected")
        return elementwise_rule(shapes, **attributes)

    return infer


_ONE, _TWO, _THREE, _UP_TO_THREE = (
    _expect_operands(1, 1),
    _expect_operands(2, 2),
    _expect_operands(3, 3),
    _expect_operands(1, 3),
)

_OF_ONE: Example = ([(4, 8)], {})
_OF_TWO: Example = ([(4, 8), (8,)], {})
_OF_THREE: Example = ([(4, 8)] * 3, {})

register = partial(ship, family="elementwise", operator_class=OperatorClass.ELEMENTWISE)
register_unary = partial(register, infer=_ONE, example=_OF_ONE)
register_binary = partial(register, infer=_TWO, example=_OF_TWO)


def _unary(name: str, doc: str, slope: Derivative | None = None, **options: Any) -> Function:
    """Register an operator and return its function; it is constant without a slope."""
    return make_function(
        register_unary(name, doc=doc, **_differentiate(slope and _of_one(slope), options))
    )


def _binary(name: str, doc: str, *slopes: Derivative, **options: Any) -> Function:
    """Register an operator of two operands and return its function; `slopes` are by operand."""
    pullback = _of_two(*slopes) if slopes else None
    return make_function(register_binary(name, doc=doc, **_differentiate(pullback, options)))


def _differentiate(pullback: Pullback | None, options: dict[str, Any]) -> dict[str, Any]:
    if pullback is None and "no_pullback" not in options:
        return {"is_constant": True, **options}
    return {"pullback": pullback, **options}


def _of_one(derivative: Derivative) -> Pullback:
    """Return a pullback from a function of the cotangent, the operand and the result."""

    def pullback(step: TapeStep, g: Any, number: int) -> Any:
        return derivative(g, step.operands[0], step.result)

    return pullback


def _of_two(*derivatives: Derivative) -> Pullback:
    """Return a pullback from a function of the cotangent, both operands and the result."""

    def pullback(step: TapeStep, g: Any, number: int) -> Any:
        return derivatives[number](g, *step.operands, step.result)

    return pullback


def _pass(g: Any, *_: Any) -> Any:
    return g


# ---- Unary operators


abs: Function = _unary("abs", "The absolute value.", lambda g, x, r: g * sign(x))
acos: Function = _unary("acos", "The inverse cosine.", lambda g, x, r: -g / sqrt(1.0 - x * x))

acosh: Function = _unary(
    # `x * x - 1` would lose digits near 1.
    "acosh",
    "The inverse hyperbolic cosine.",
    lambda g, x, r: g / (sqrt(x - 1.0) * sqrt(x + 1.0)),
)

asin: Function = _unary("asin", "The inverse sine.", lambda g, x, r: g / sqrt(1.0 - x * x))

asinh: Function = _unary(
    "asinh", "The inverse hyperbolic sine.", lambda g, x, r: g / sqrt(x * x + 1.0)
)

atan: Function = _unary("atan", "The inverse tangent.", lambda g, x, r: g / (x * x + 1.0))

atanh: Function = _unary(
    "atanh", "The inverse hyperbolic tangent.", lambda g, x, r: g / (1.0 - x * x)
)

bitwise_invert: Function = _unary("bitwise_invert", "Bitwise not.")
# Monotone functions commute with the maximum and the minimum.
ceil: Function = _unary("ceil", "The number rounded up to an integer.", commutes=("max", "min"))
conj: Function = _unary("conj", "The complex conjugate.", _pass, linear="each")
cos: Function = _unary("cos", "The cosine.", lambda g, x, r: -g * sin(x))
cosh: Function = _unary("cosh", "The hyperbolic cosine.", lambda g, x, r: g * sinh(x))
register_unary("copy", linear="each", pullback=_of_one(_pass))
exp: Function = _unary("exp", "The exponential.", lambda g, x, r: g * r)
expm1: Function = _unary("expm1", "The exponential minus 1.", lambda g, x, r: g * (r + 1.0))
floor: Function = _unary("floor", "The number rounded down to an integer.", commutes=("max", "min"))


def _same_kernel(work: LocalWork) -> Function:
    """Return a kernel that returns the array, detached from PyTorch's graph to stop gradients."""
    if work.name == "stop_gradient" and work.library.name == "torch":
        return lambda x: x.detach()
    return lambda x: x


identity: Function = _unary(
    "identity",
    "The same number, in another array.",
    _pass,
    linear="each",
    commutes=("max", "min", "product"),
    local=_same_kernel,
    result_types=of_first,
)


def _imag_kernel(work: LocalWork) -> Function:
    """Return a kernel for the imaginary part."""
    space, (operand,) = work.library.namespace, work.operands
    is_complex = operand is not None and operand.dtype.name.startswith("complex")
    # PyTorch does not support real numbers here; their imaginary part is 0.
    function: Function = space.imag if is_complex else space.zeros_like
    return function


imag: Function = _unary("imag", "The imaginary part.", linear="each", local=_imag_kernel)
isfinite: Function = _unary("isfinite", "Whether it is finite.", result_types=boolean)
isinf: Function = _unary("isinf", "Whether it is infinite.", result_types=boolean)
isnan: Function = _unary("isnan", "Whether it is NaN.", result_types=boolean)
log: Function = _unary("log", "The natural logarithm.", lambda g, x, r: g / x)

log1p: Function = _unary(
    "log1p", "The natural logarithm of 1 plus the number.", lambda g, x, r: g / (x + 1.0)
)

log2: Function = _unary("log2", "The logarithm to base 2.", lambda g, x, r: g / (x * _LOG2))
log10: Function = _unary("log10", "The logarithm to base 10.", lambda g, x, r: g / (x * _LOG10))
logical_not: Function = _unary("logical_not", "Logical not.", result_types=boolean)
negative: Function = _unary("negative", "The negative.", lambda g, x, r: -g, linear="each")
positive: Function = _unary("positive", "The same number.", _pass, linear="each")
real: Function = _unary("real", "The real part.", _pass, linear="each")

reciprocal: Function = _unary(
    "reciprocal", "1 divided by the number.", lambda g, x, r: -g * (r * r)
)

round: Function = _unary(
    "round", "The number rounded to the nearest integer, ties to even.", commutes=("max", "min")
)

sign: Function = _unary("sign", "The sign of the number.", commutes=("max", "min"))
signbit: Function = _unary("signbit", "Whether its sign bit is set.", result_types=boolean)
sin: Function = _unary("sin", "The sine.", lambda g, x, r: g * cos(x))
sinh: Function = _unary("sinh", "The hyperbolic sine.", lambda g, x, r: g * cosh(x))
sqrt: Function = _unary("sqrt", "The square root.", lambda g, x, r: g * 0.5 / r)
square: Function = _unary("square", "The square.", lambda g, x, r: g * (2.0 * x))

stop_gradient: Function = _unary(
    "stop_gradient",
    "The same number, as a constant for gradients.",
    linear="each",
    commutes=("max", "min", "product"),
    local=_same_kernel,
    result_types=of_first,
)

tan: Function = _unary("tan", "The tangent.", lambda g, x, r: g * (r * r + 1.0))
tanh: Function = _unary("tanh", "The hyperbolic tangent.", lambda g, x, r: g * (1.0 - r * r))

trunc: Function = _unary(
    "trunc", "The number rounded towards 0 to an integer.", commutes=("max", "min")
)


# ---- Binary operators


add: Function = _binary("add", "The sum.", _pass, _pass, linear="each")

atan2: Function = _binary(
    "atan2",
    "The angle of the point `(x2, x1)`.",
    lambda g, y, x, r: g * (x / (x * x + y * y)),
    lambda g, y, x, r: -g * (y / (x * x + y * y)),
)

bitwise_and: Function = _binary("bitwise_and", "Bitwise and.")
bitwise_left_shift: Function = _binary("bitwise_left_shift", "Bits shifted left.")
bitwise_or: Function = _binary("bitwise_or", "Bitwise or.")
bitwise_right_shift: Function = _binary("bitwise_right_shift", "Bits shifted right.")
bitwise_xor: Function = _binary("bitwise_xor", "Bitwise exclusive or.")


copysign: Function = _binary(
    "copysign",
    "The first operand with the sign of the second.",
    # By sign bits, since 0.0 and -0.0 are equal.
    lambda g, x, y, r: where(equal(signbit(x), signbit(r)), g, -g),
    lambda g, x, y, r: None,
)

divide: Function = _binary(
    "divide",
    "The quotient.",
    lambda g, x, y, r: g / y,
    lambda g, x, y, r: -g * (r / y),
    note="parts over a divisor of 0 would be inf - inf: reduced first",
)

equal: Function = _binary("equal", "Whether they are equal.", result_types=boolean)

floor_divide: Function = _binary(
    "floor_divide", "The quotient rounded down.", fails="whole numbers"
)

greater: Function = _binary("greater", "Whether the first is greater.", result_types=boolean)
greater_equal: Function = _binary(
    "greater_equal", "Whether the first is greater or equal.", result_types=boolean
)


def _pull_hypot(g: Any, x: Any, r: Any) -> Any:
    # `where` computes both branches: 0 / 0 would be NaN, with a warning.
    return g * where(equal(r, 0), 0.0, x / where(equal(r, 0), 1.0, r))


hypot: Function = _binary(
    "hypot",
    "The square root of the sum of squares.",
    lambda g, x, y, r: _pull_hypot(g, x, r),
    lambda g, x, y, r: _pull_hypot(g, y, r),
)

less: Function = _binary("less", "Whether the first is less.", result_types=boolean)
less_equal: Function = _binary(
    "less_equal", "Whether the first is less or equal.", result_types=boolean
)


def _pull_logarithm(g: Any, x: Any, r: Any) -> Any:
    # If both numbers are -inf, both derivatives are 0.
    return g * exp(x - where(equal(r, -math.inf), 0.0, r))


logaddexp: Function = _binary(
    "logaddexp",
    "The logarithm of the sum of exponentials.",
    lambda g, x, y, r: _pull_logarithm(g, x, r),
    lambda g, x, y, r: _pull_logarithm(g, y, r),
)

logical_and: Function = _binary(
    "logical_and",
    "Logical and.",
    commutes=("min",),
    note="of truth values, contributions by min",
    result_types=boolean,
)

logical_or: Function = _binary(
    "logical_or",
    "Logical or.",
    commutes=("max",),
    note="of truth values, contributions by max",
    result_types=boolean,
)

logical_xor: Function = _binary("logical_xor", "Logical exclusive or.", result_types=boolean)


def _pull_greater(g: Any, x: Any, y: Any, r: Any) -> Any:
    # If both are equal, each gets half of the cotangent.
    return where(equal(x, r), where(equal(x, y), g * 0.5, g), 0.0)


maximum: Function = _binary(
    "maximum",
    "The maximum.",
    _pull_greater,
    lambda g, x, y, r: _pull_greater(g, y, x, r),
    commutes=("max",),
)

minimum: Function = _binary(
    "minimum",
    "The minimum.",
    _pull_greater,
    lambda g, x, y, r: _pull_greater(g, y, x, r),
    commutes=("min",),
)

multiply: Function = _binary(
    "multiply",
    "The product.",
    lambda g, x, y, r: g * y,
    lambda g, x, y, r: g * x,
    linear="one",
    commutes=("product",),
)

nextafter: Function = _binary(
    "nextafter",
    "The next number from the first towards the second.",
    no_pullback="the next number is a rounding apart, which has no slope",
)

not_equal: Function = _binary("not_equal", "Whether they differ.", result_types=boolean)


def _pull_power(g: Any, x: Any, y: Any, r: Any) -> Any:
    # For a power of 0 the derivative is 0, also at x = 0, where 0 * x ** -1 would be NaN.
    if not isinstance(y, ArrayValue):
        return g * 0.0 if y == 0 else g * (y * pow(x, y - 1))
    is_zero = equal(y, 0)
    slope = multiply(y, pow(x, where(is_zero, 1.0, subtract(y, 1))))
    return g * where(is_zero, 0.0, slope)


def _pull_exponent(g: Any, x: Any, y: Any, r: Any) -> Any:
    # 0 to any power above 0 stays 0.
    if not isinstance(x, ArrayValue):
        return g * (r * (math.log(x) if x > 0 else 0.0 if x == 0 else math.nan))
    return g * where(equal(x, 0), 0.0, r * log(where(equal(x, 0), 1.0, x)))


pow: Function = _binary("pow", "The first to the power of the second.", _pull_power, _pull_exponent)

remainder: Function = _binary(
    "remainder",
    "The remainder of division, with the sign of the second operand.",
    _pass,
    lambda g, x, y, r: -g * floor_divide(x, y),
    fails="whole numbers",
)

subtract: Function = _binary(
    "subtract", "The difference.", _pass, lambda g, x, y, r: -g, linear="each"
)


# ---- Activations


def _relu_kernel(work: LocalWork) -> Function:
    """Return a kernel for positive numbers, and 0 elsewhere; NaN stays NaN."""
    (operand,) = work.operands
    if work.library.name == "torch" and operand is not None and "float" in operand.dtype.name:
        return import_module("torch").nn.functional.relu  # type: ignore[no-any-return]
    maximum = work.library.namespace.maximum
    return lambda x: maximum(x, 0)


relu: Function = _unary(
    "relu",
    "The maximum of the number and 0; its derivative at 0 is 0.",
    lambda g, x, r: where(less_equal(r, 0), 0.0, g),
    commutes=("max", "min"),
    local=_relu_kernel,
)


def _sigmoid_kernel(work: LocalWork) -> Function:
    """Return a kernel for `1 / (1 + exp(-x))`, with exponentials of at most 1."""
    if work.library.name == "torch":
        return import_module("torch").sigmoid  # type: ignore[no-any-return]

    def function(x: Any) -> Any:
        small = np.exp(-np.abs(x))
        return np.where(x >= 0, np.ones_like(small), small) / (1 + small)

    return function


sigmoid: Function = _unary(
    "sigmoid",
    "`1 / (1 + exp(-x))`, without overflow or underflow to 0.",
    lambda g, x, r: g * r * (1.0 - r),
    local=_sigmoid_kernel,
)


def _silu_kernel(work: LocalWork) -> Function:
    """Return a kernel for `x * sigmoid(x)`, PyTorch's fused kernel for floating-point types."""
    own, (operand,) = _sigmoid_kernel(work), work.operands
    if work.library.name == "torch" and operand is not None and "float" in operand.dtype.name:
        return import_module("torch").nn.functional.silu  # type: ignore[no-any-return]
    return lambda x: x * own(x)


silu: Function = _unary(
    "silu",
    "`x * sigmoid(x)`.",
    lambda g, x, r: call("silu_gradient", (g, x)),
    local=_silu_kernel,
)


def _silu_gradient_kernel(work: LocalWork) -> Function:
    """Return a kernel for a cotangent times SiLU's derivative, fused by PyTorch."""
    own, (_, operand) = _sigmoid_kernel(work), work.operands
    if work.library.name == "torch" and operand is not None and "float" in operand.dtype.name:
        return import_module("torch").ops.aten.silu_backward  # type: ignore[no-any-return]

    def function(g: Any, x: Any) -> Any:
        share = own(x)
        slope = 1 - share
        slope *= x
        slope += 1
        slope *= share
        return g * slope

    return function


def _pull_silu_gradient(g: Any, cotangent: Any, x: Any, r: Any) -> Any:
    share = sigmoid(x)
    return g * cotangent * (share * (1.0 - share) * (2.0 + x * (1.0 - 2.0 * share)))


register_binary(
    "silu_gradient",
    linear=(0,),
    local=_silu_gradient_kernel,
    note="of a cotangent and silu's operand",
    pullback=_of_two(lambda g, c, x, r: call("silu_gradient", (g, x)), _pull_silu_gradient),
)


# ---- clip, where and astype


@of_arrays
def clip(x: Any, /, min: Any = None, max: Any = None) -> Any:
    """Limit numbers to the interval from `min` to `max`; None means no bound."""
    x, min, max = operands(x, min, max)
    if min is None and max is None:
        # NumPy's `positive` does not take booleans.
        return call("positive", (x,)) if x.dtype.name != "bool" else x
    bounds = [bound for bound in (min, max) if bound is not None]
    options = {"bounds": ("min",) * (min is not None) + ("max",) * (max is not None)}
    return call("clip", (x, *bounds), None, options)


def _clip_kernel(work: LocalWork) -> Function:
    """Return a kernel that limits numbers by a bound or two."""
    limit = work.library.namespace.clip
    if work.attributes["bounds"] == ("max",):
        return lambda x, most: limit(x, None, most)
    if work.attributes["bounds"] == ("min",):
        return lambda x, least: limit(x, least, None)
    return lambda x, least, most: limit(x, least, most)


def _pull_clip(step: TapeStep, g: Any, number: int) -> Any:
    x, *bounds = step.operands
    names = step.attributes["bounds"]
    least = bounds[names.index("min")] if "min" in names else None
    most = bounds[names.index("max")] if "max" in names else None
    if number == 0:
        # At a bound itself the cotangent passes, as in PyTorch.
        inside = equal(x, clip(x, least, most))
        return where(inside, g, 0.0)
    # Where both bounds apply, the upper bound wins.
    if names[number - 1] == "max":
        return where(greater(x if least is None else maximum(x, least), most), g, 0.0)
    below = less(x, least)
    if most is not None:
        below = logical_and(below, less_equal(least, most))
    return where(below, g, 0.0)


register(
    "clip",
    _UP_TO_THREE,
    _OF_THREE,
    local=_clip_kernel,
    note="bounds that are arrays broadcast as operands do",
    pullback=_pull_clip,
)


@of_arrays
def where(condition: Any, x1: Any, x2: Any, /) -> Any:
    """Return `x1` where the condition holds, `x2` elsewhere; all three broadcast."""
    return call("where", operands(condition, x1, x2))


def _pull_where(step: TapeStep, g: Any, number: int) -> Any:
    condition = step.operands[0]
    return where(condition, g, 0.0) if number == 1 else where(condition, 0.0, g)


register(
    "where",
    _THREE,
    _OF_THREE,
    linear=(1, 2),
    commutes=("max", "min", "product"),
    note="both branches partial under a whole condition",
    pullback=_pull_where,
)


def _same_type(**attributes: Any) -> bool:
    # Rounding is not linear: a sum of rounded contributions is not the rounded sum.
    return "dtype" not in attributes or bool(attributes.get("widening", False))


def _cast_kernel(work: LocalWork) -> Function:
    """Return a kernel that casts to another element type."""
    own = work.library.own_dtype(work.attributes["dtype"])
    if work.library.name == "numpy":
        return lambda x: x.astype(own)
    return lambda x: x.to(own)


register_unary(
    "astype",
    linear="each",
    linear_if=_same_type,
    local=_cast_kernel,
    result_types=asked,
    note="partial sums stay partial only where the type is said to be widening",
    pullback=_of_one(_pass),
)


# ---- Results written into existing memory


_TORCH_NAMES = """
abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_invert bitwise_left_shift
bitwise_or bitwise_right_shift bitwise_xor copysign cos cosh divide equal erf exp exp2 expm1
floor_divide fmod gcd greater greater_equal heaviside hypot lcm less less_equal log
log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor maximum
minimum multiply negative nextafter not_equal pow reciprocal rsqrt sigmoid sin sinc sinh sqrt
square subtract tan tanh
"""

# Functions of `torch.nn.functional` do not accept `out`, but the operators of ATen do.
_ATEN_NAMES = "relu silu"


def writing(function: Function) -> Callable[..., Any] | None:
    """Return a variant of a function that takes an argument `out` and returns it, or None.

    A function of PyTorch returns a new tensor if it cannot write to `out`, for instance if a
    gradient is recorded.

    >>> x = np.array([1.0, 2.0])
    >>> writing(np.negative)(x, out=x) is x, x.tolist()
    (True, [-1.0, -2.0])
    >>> print(writing(np.sum), writing(np.matmul))
    None None
    """
    if isinstance(function, np.ufunc):
        # Ufuncs with a signature do not work element by element.
        return function if function.signature is None else None
    return _torch_writing().get(function) if "torch" in sys.modules else None


@cache
def _torch_writing() -> dict[Function, Callable[..., Any]]:
    torch, space = sys.modules["torch"], library("torch").namespace
    writers: dict[Function, Callable[..., Any]] = {}
    for name in _TORCH_NAMES.split():
        function = getattr(space, name)
        writers[function] = partial(_write, function, function)
    for name in _ATEN_NAMES.split():
        function = getattr(torch.nn.functional, name)
        writers[function] = partial(_write, function, getattr(torch.ops.aten, name).out)
    return writers


def _write(function: Function, write: Callable[..., Any], *operands: Any, out: Any) -> Any:
    torch = sys.modules["torch"]
    is_recorded = torch.is_grad_enabled() and any(
        getattr(operand, "requires_grad", False) for operand in operands
    )
    # A subclass may define its own functions, and some functions do not accept a number with `out`.
    if is_recorded or type(out) is not torch.Tensor or not isinstance(operands[0], torch.Tensor):
        return function(*operands)
    return write(*operands, out=out)
