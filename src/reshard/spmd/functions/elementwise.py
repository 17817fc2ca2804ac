"""The functions of the array API that work element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reshard.spmd.functions.array_arguments import of_arrays
from reshard.spmd.shards.array_type import ArrayType
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.library import library_of
from reshard.spmd.shards.operation_call import call, recorders

Unary = Callable[[Any], Any]
Binary = Callable[[Any, Any], Any]
Number = bool | int | float | complex


def whole(x: ArrayValue, array: Any) -> Any:
    """A library's array as one beside `x`, not sharded."""
    library = x.runner.library
    shard = library.array(array, beside=x._shards[0])
    kind = ArrayType(shard.shape, library.dtype_of(shard))
    return type(x).of_shards(kind, (shard,), x.runner)


def operands(*values: Any) -> list[Any]:
    """Values as operands of one operation, of the runner of the first array in shards."""
    first = next((one for one in values if isinstance(one, ArrayValue)), None)
    if first is None:
        return list(values)
    return [
        one if isinstance(one, ArrayValue) or library_of(one) is None else whole(first, one)
        for one in values
    ]


def _unary(name: str, text: str) -> Unary:
    def function(x: Any, /) -> Any:
        return call(name, (x,))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{text} Element by element, an array of the same sharding."
    return function


def _binary(name: str, text: str) -> Binary:
    def function(x1: Any, x2: Any, /) -> Any:
        try:
            found = x1.runner.calls[name, x1.type, x2.type]
        except (KeyError, AttributeError, TypeError):
            found = None
        is_known = found is not None and not found.factors
        if is_known and x2.runner is x1.runner and not recorders:
            return found.run(x1, x2)
        return call(name, operands(x1, x2))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{text} Element by element; operands broadcast, numbers are taken."
    return function


abs = _unary("abs", "The absolute value.")
acos = _unary("acos", "The inverse cosine.")
acosh = _unary("acosh", "The inverse hyperbolic cosine.")
asin = _unary("asin", "The inverse sine.")
asinh = _unary("asinh", "The inverse hyperbolic sine.")
atan = _unary("atan", "The inverse tangent.")
atanh = _unary("atanh", "The inverse hyperbolic tangent.")
bitwise_invert = _unary("bitwise_invert", "Every bit flipped.")
ceil = _unary("ceil", "The least whole number that is not less.")
conj = _unary("conj", "The complex conjugate.")
cos = _unary("cos", "The cosine.")
cosh = _unary("cosh", "The hyperbolic cosine.")
exp = _unary("exp", "The exponential.")
expm1 = _unary("expm1", "The exponential less 1.")
floor = _unary("floor", "The greatest whole number that is not greater.")
imag = _unary("imag", "The imaginary part.")
isfinite = _unary("isfinite", "Whether it is finite.")
isinf = _unary("isinf", "Whether it is infinite.")
isnan = _unary("isnan", "Whether it is no number.")
log = _unary("log", "The natural logarithm.")
log1p = _unary("log1p", "The natural logarithm of 1 more.")
log2 = _unary("log2", "The logarithm to base 2.")
log10 = _unary("log10", "The logarithm to base 10.")
logical_not = _unary("logical_not", "Whether it is false.")
negative = _unary("negative", "The negative.")
positive = _unary("positive", "The same number.")
real = _unary("real", "The real part.")
reciprocal = _unary("reciprocal", "One divided by it.")
round = _unary("round", "The nearest whole number, of two the even one.")
sign = _unary("sign", "Its sign.")
signbit = _unary("signbit", "Whether its sign bit is set.")
sin = _unary("sin", "The sine.")
sinh = _unary("sinh", "The hyperbolic sine.")
sqrt = _unary("sqrt", "The square root.")
square = _unary("square", "The square.")
tan = _unary("tan", "The tangent.")
tanh = _unary("tanh", "The hyperbolic tangent.")
trunc = _unary("trunc", "The whole number next to it towards 0.")

add = _binary("add", "The sum.")
atan2 = _binary("atan2", "The angle of a point.")
bitwise_and = _binary("bitwise_and", "Bits that are in both.")
bitwise_left_shift = _binary("bitwise_left_shift", "Bits moved to the left.")
bitwise_or = _binary("bitwise_or", "Bits that are in one of both.")
bitwise_right_shift = _binary("bitwise_right_shift", "Bits moved to the right.")
bitwise_xor = _binary("bitwise_xor", "Bits that are in exactly one of both.")
copysign = _binary("copysign", "The first with the sign of the second.")
divide = _binary("divide", "The quotient.")
equal = _binary("equal", "Whether they are equal.")
floor_divide = _binary("floor_divide", "The quotient rounded down.")
greater = _binary("greater", "Whether the first is greater.")
greater_equal = _binary("greater_equal", "Whether the first is not less.")
hypot = _binary("hypot", "The root of the sum of squares.")
less = _binary("less", "Whether the first is less.")
less_equal = _binary("less_equal", "Whether the first is not greater.")
logaddexp = _binary("logaddexp", "The logarithm of the sum of exponentials.")
logical_and = _binary("logical_and", "Whether both are true.")
logical_or = _binary("logical_or", "Whether one of both is true.")
logical_xor = _binary("logical_xor", "Whether exactly one of both is true.")
maximum = _binary("maximum", "The greater one.")
minimum = _binary("minimum", "The lesser one.")
multiply = _binary("multiply", "The product.")
nextafter = _binary("nextafter", "The next number from the first towards the second.")
not_equal = _binary("not_equal", "Whether they differ.")
pow = _binary("pow", "The first to the power of the second.")
remainder = _binary("remainder", "What division leaves, of the second's sign.")
subtract = _binary("subtract", "The difference.")
matmul = _binary("matmul", "The matrix product.")


@of_arrays
def clip(x: Any, /, min: Any = None, max: Any = None) -> Any:
    """Numbers below `min` become `min`, those above `max` become `max`; None is no bound."""
    x, min, max = operands(x, min, max)
    if min is None and max is None:
        return positive(x) if x.dtype.name != "bool" else x
    bounds = [one for one in (min, max) if one is not None]
    options = {"bounds": ("min",) * (min is not None) + ("max",) * (max is not None)}
    return call("clip", (x, *bounds), None, options)


@of_arrays
def where(condition: Any, x1: Any, x2: Any, /) -> Any:
    """`x1` where the condition holds, `x2` elsewhere; all three broadcast."""
    return call("where", operands(condition, x1, x2))
