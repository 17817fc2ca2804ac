"""The rules of operators that work element by element, with NumPy's broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.errors import SpecError
from reshard.spmd.operators.operator import Infer, Linear, Operator
from reshard.spmd.operators.shapes import broadcast_factors, broadcast_shape
from reshard.spmd.rules.rule_builder import Inferred, RuleBuilder, Shape


def elementwise(shapes: Sequence[Shape], **_: Any) -> Inferred:
    """Operands that broadcast to the result.

    >>> print(elementwise([(4, 8), (8,)]).rule)
    ([i, j], [j]) -> ([i, j]) {i=4, j=8}
    """
    result = broadcast_shape(shapes)
    builder = RuleBuilder(shapes, [result])
    broadcast_factors(builder, result, operands=range(len(shapes)))
    return builder.build()


def _of_count(least: int, most: int) -> Infer:
    def infer(shapes: Sequence[Shape], **attributes: Any) -> Inferred:
        if not least <= len(shapes) <= most:
            wanted = least if least == most else f"{least} to {most}"
            raise SpecError(f"{len(shapes)} operands; {wanted} were expected")
        return elementwise(shapes, **attributes)

    return infer


_ONE, _TWO, _THREE, _UP_TO_THREE = (
    _of_count(1, 1),
    _of_count(2, 2),
    _of_count(3, 3),
    _of_count(1, 3),
)

# The names of each kind: those of the array API, then a few of networks.
_UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_invert cos cosh exp expm1 isfinite isinf isnan "
    "log log1p log2 log10 logical_not reciprocal signbit sin sinh sqrt square tan tanh angle cbrt "
    "degrees radians erf relu rsqrt sigmoid silu gelu softplus exp2 sinc i0 spacing"
)
_LINEAR_UNARY = "negative real imag conj positive copy"
_MONOTONE_UNARY = "ceil floor round sign trunc"
_BINARY = (
    "atan2 bitwise_left_shift bitwise_right_shift bitwise_xor copysign equal floor_divide greater "
    "greater_equal hypot less less_equal logaddexp logical_xor nextafter not_equal pow remainder "
    "heaviside gcd lcm ldexp fmod float_power logaddexp2"
)


def _operator(
    name: str,
    infer: Infer,
    linear: Linear = "none",
    commutes: tuple[str, ...] = (),
    note: str = "",
) -> Operator:
    return Operator(name, "elementwise", infer, linear, commutes, note=note)


def _same_type(**attributes: Any) -> bool:
    return "dtype" not in attributes or bool(attributes.get("widening", False))


OPERATORS: tuple[Operator, ...] = (
    *(_operator(name, _ONE) for name in _UNARY.split()),
    *(_operator(name, _ONE, "each") for name in _LINEAR_UNARY.split()),
    *(_operator(name, _ONE, commutes=("max", "min")) for name in _MONOTONE_UNARY.split()),
    *(_operator(name, _TWO) for name in _BINARY.split()),
    _operator("add", _TWO, "each"),
    _operator("subtract", _TWO, "each"),
    _operator("multiply", _TWO, "one", ("product",)),
    _operator("divide", _TWO, note="parts over a divisor of 0 would be inf - inf: reduced first"),
    _operator("maximum", _TWO, commutes=("max",)),
    _operator("minimum", _TWO, commutes=("min",)),
    _operator("fmax", _TWO),
    _operator("fmin", _TWO),
    _operator("logical_or", _TWO, commutes=("max",), note="of truth values, contributions by max"),
    _operator("logical_and", _TWO, commutes=("min",), note="of truth values, contributions by min"),
    _operator("bitwise_or", _TWO),
    _operator("bitwise_and", _TWO),
    _operator("clip", _UP_TO_THREE, note="bounds that are arrays broadcast as operands do"),
    _operator("clamp", _THREE, note="operands are the lower bound, the array, the upper bound"),
    _operator(
        "where",
        _THREE,
        (1, 2),
        ("max", "min", "product"),
        note="both branches partial under a whole condition",
    ),
    _operator("select", _THREE, (1, 2), ("max", "min", "product"), note="where, by another name"),
    Operator(
        "astype",
        "elementwise",
        _ONE,
        "each",
        linear_if=_same_type,
        note="partial sums stay partial only where the type is said to be widening",
    ),
)
