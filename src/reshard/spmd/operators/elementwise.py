"""Elementwise operators, with NumPy's broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.spmd.core.local_work import MakeLocal, by_name
from reshard.spmd.core.operator import Example, Infer, Operator, OperatorClass
from reshard.spmd.core.result_types import asked, boolean, of_first
from reshard.spmd.local import elementwise as elementwise_functions
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape
from reshard.spmd.rules.shapes import broadcast_factors, broadcast_shape


def elementwise(shapes: Sequence[Shape], **_: Any) -> Inferred:
    """Operands that broadcast to the result.

    >>> print(elementwise([(4, 8), (8,)]).rule)
    ([i, j], [j]) -> ([i, j]) {i=4, j=8}
    """
    result = broadcast_shape(shapes)
    builder = RuleBuilder(shapes, [result])
    broadcast_factors(builder, result, operands=range(len(shapes)))
    return builder.build()


def _expect_operands(least: int, most: int) -> Infer:
    def infer(shapes: Sequence[Shape], **attributes: Any) -> Inferred:
        if not least <= len(shapes) <= most:
            wanted = least if least == most else f"{least} to {most}"
            raise SpecError(f"{len(shapes)} operands; {wanted} were expected")
        return elementwise(shapes, **attributes)

    return infer


_ONE, _TWO, _THREE, _UP_TO_THREE = (
    _expect_operands(1, 1),
    _expect_operands(2, 2),
    _expect_operands(3, 3),
    _expect_operands(1, 3),
)

# What each computes, by kind: those of the array API, which are functions by these rows alone.
_UNARY = {
    "abs": "The absolute value.",
    "acos": "The inverse cosine.",
    "acosh": "The inverse hyperbolic cosine.",
    "asin": "The inverse sine.",
    "asinh": "The inverse hyperbolic sine.",
    "atan": "The inverse tangent.",
    "atanh": "The inverse hyperbolic tangent.",
    "bitwise_invert": "Bitwise not.",
    "cos": "The cosine.",
    "cosh": "The hyperbolic cosine.",
    "exp": "The exponential.",
    "expm1": "The exponential minus 1.",
    "isfinite": "Whether it is finite.",
    "isinf": "Whether it is infinite.",
    "isnan": "Whether it is NaN.",
    "log": "The natural logarithm.",
    "log1p": "The natural logarithm of 1 plus the number.",
    "log2": "The logarithm to base 2.",
    "log10": "The logarithm to base 10.",
    "logical_not": "Logical not.",
    "reciprocal": "1 divided by the number.",
    "signbit": "Whether its sign bit is set.",
    "sin": "The sine.",
    "sinh": "The hyperbolic sine.",
    "sqrt": "The square root.",
    "square": "The square.",
    "tan": "The tangent.",
    "tanh": "The hyperbolic tangent.",
}
# Linear over the reals: each contribution may be worked on by itself.
_LINEAR_UNARY = {
    "negative": "The negative.",
    "real": "The real part.",
    "imag": "The imaginary part.",
    "conj": "The complex conjugate.",
    "positive": "The same number.",
}
# The same array, known by another name: nothing is computed or copied.
_SAME = {
    "identity": "The same number, in another array.",
    "stop_gradient": "The same number, as a constant for gradients.",
}
# The greatest element stays the greatest: these commute with "max" and "min".
_MONOTONE_UNARY = {
    "ceil": "The number rounded up to an integer.",
    "floor": "The number rounded down to an integer.",
    "round": "The number rounded to the nearest integer, ties to even.",
    "sign": "The sign of the number.",
    "trunc": "The number rounded towards 0 to an integer.",
}
_BINARY = {
    "atan2": "The angle of the point `(x2, x1)`.",
    "bitwise_left_shift": "Bits shifted left.",
    "bitwise_right_shift": "Bits shifted right.",
    "bitwise_xor": "Bitwise exclusive or.",
    "copysign": "The first operand with the sign of the second.",
    "equal": "Whether they are equal.",
    "floor_divide": "The quotient rounded down.",
    "greater": "Whether the first is greater.",
    "greater_equal": "Whether the first is greater or equal.",
    "hypot": "The square root of the sum of squares.",
    "less": "Whether the first is less.",
    "less_equal": "Whether the first is less or equal.",
    "logaddexp": "The logarithm of the sum of exponentials.",
    "logical_xor": "Logical exclusive or.",
    "nextafter": "The next number from the first towards the second.",
    "not_equal": "Whether they differ.",
    "pow": "The first to the power of the second.",
    "remainder": "The remainder of division, with the sign of the second operand.",
}
# Those of graphs: networks, and other libraries' functions.
_OTHER_UNARY = (
    "angle cbrt degrees radians erf rsqrt sigmoid silu gelu softplus exp2 sinc i0 spacing"
)
_OTHER_BINARY = "heaviside gcd lcm ldexp fmod float_power logaddexp2"
_TRUTH = (
    "equal greater greater_equal isfinite isinf isnan less less_equal logical_and logical_not "
    "logical_or logical_xor not_equal signbit"
)
_OF_ONE: Example = ([(4, 8)], {})
_OF_TWO: Example = ([(4, 8), (8,)], {})
_OF_THREE: Example = ([(4, 8)] * 3, {})


def _row(name: str, infer: Infer, example: Example, doc: str = "", **options: Any) -> Operator:
    return Operator(
        name,
        "elementwise",
        infer,
        operator_class=OperatorClass.ELEMENTWISE,
        **{"result_types": boolean if name in _TRUTH.split() else None, **options},
        example=example,
        doc=doc,
    )


def _unary(name: str, doc: str = "", **options: Any) -> Operator:
    return _row(name, _ONE, _OF_ONE, doc, **options)


def _binary(name: str, doc: str = "", **options: Any) -> Operator:
    return _row(name, _TWO, _OF_TWO, doc, **options)


def _same_type(**attributes: Any) -> bool:
    # Rounding is not linear: a sum of rounded contributions is not the rounded sum.
    return "dtype" not in attributes or bool(attributes.get("widening", False))


_LOCAL: dict[str, MakeLocal] = {
    "imag": elementwise_functions.imag,
    "sigmoid": elementwise_functions.sigmoid,
    "silu": elementwise_functions.silu,
}
_INTEGERS_FAIL = ("floor_divide", "remainder")  # By 0.

OPERATORS: tuple[Operator, ...] = (
    *(_unary(name, doc) for name, doc in _UNARY.items()),
    *(_unary(name, local=_LOCAL.get(name, by_name)) for name in _OTHER_UNARY.split()),
    *(
        _unary(name, doc, linear="each", local=_LOCAL.get(name, by_name))
        for name, doc in _LINEAR_UNARY.items()
    ),
    _unary("copy", linear="each"),
    _unary(
        "relu",
        "The number where it is positive, 0 elsewhere.",
        commutes=("max", "min"),
        local=elementwise_functions.relu,
    ),
    *(
        _unary(
            name,
            doc,
            linear="each",
            commutes=("max", "min", "product"),
            local=elementwise_functions.same,
            result_types=of_first,
        )
        for name, doc in _SAME.items()
    ),
    *(_unary(name, doc, commutes=("max", "min")) for name, doc in _MONOTONE_UNARY.items()),
    *(
        _binary(name, doc, fails="whole numbers" if name in _INTEGERS_FAIL else "never")
        for name, doc in _BINARY.items()
    ),
    *(_binary(name) for name in _OTHER_BINARY.split()),
    _binary("add", "The sum.", linear="each"),
    _binary("subtract", "The difference.", linear="each"),
    _binary("multiply", "The product.", linear="one", commutes=("product",)),
    _binary(
        "divide",
        "The quotient.",
        note="parts over a divisor of 0 would be inf - inf: reduced first",
    ),
    _binary("maximum", "The maximum.", commutes=("max",)),
    _binary("minimum", "The minimum.", commutes=("min",)),
    _binary("fmax"),
    _binary("fmin"),
    _binary(
        "logical_or",
        "Logical or.",
        commutes=("max",),
        note="of truth values, contributions by max",
    ),
    _binary(
        "logical_and",
        "Logical and.",
        commutes=("min",),
        note="of truth values, contributions by min",
    ),
    _binary("bitwise_or", "Bitwise or."),
    _binary("bitwise_and", "Bitwise and."),
    _binary(
        "silu_gradient",
        linear=(0,),
        local=elementwise_functions.silu_gradient,
        note="of a cotangent and silu's operand",
    ),
    _row(
        "clip",
        _UP_TO_THREE,
        _OF_THREE,
        local=elementwise_functions.clip,
        note="bounds that are arrays broadcast as operands do",
    ),
    _row(
        "clamp",
        _THREE,
        ([(), (4, 8), ()], {}),
        note="operands are the lower bound, the array, the upper bound",
    ),
    _row(
        "where",
        _THREE,
        _OF_THREE,
        linear=(1, 2),
        commutes=("max", "min", "product"),
        note="both branches partial under a whole condition",
    ),
    _row(
        "select",
        _THREE,
        _OF_THREE,
        linear=(1, 2),
        commutes=("max", "min", "product"),
        note="where, by another name",
    ),
    Operator(
        "astype",
        "elementwise",
        _ONE,
        "each",
        linear_if=_same_type,
        operator_class=OperatorClass.ELEMENTWISE,
        local=elementwise_functions.cast,
        result_types=asked,
        example=_OF_ONE,
        note="partial sums stay partial only where the type is said to be widening",
    ),
)
