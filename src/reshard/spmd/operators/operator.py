"""What has to be known of an operator to run it on shards?

An `Operator` is a row of the table of rules: from the shapes of its operands and its attributes
it says how their dimensions hang together, how its results look, and what it does to operands
that are partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, Literal

from reshard.errors import SpecError
from reshard.spmd.rules.rule_builder import Inferred, Shape, replicated_rule
from reshard.spmd.rules.sharding_rule import OpShardingRule

Linear = Literal["each", "one", "none"] | tuple[int, ...]
"""Which operands may be partial sums, the result being one then:

"each"    all of them together, along the same axes: `f(a + b, c + d) = f(a, c) + f(b, d)`
"one"     any one of them, the others being whole: `f(a + b, c) = f(a, c) + f(b, c)`
"none"    none: partial sums are reduced first
(1, 2)    those operands together, the others being whole
"""

Infer = Callable[..., Inferred]
"""From the operands' shapes and an operator's attributes to its rule and its results' shapes."""


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """One operator.

    Args:
        name: the array API's where it has the operator.
        family: the section of the table it stands in.
        infer: from the operands' shapes and the attributes to the rule and the results' shapes;
            None for an operator without a rule, whose operands are replicated.
        linear: which operands may be partial sums, or partial means.
        commutes: the other reductions whose contributions the operator may be applied to one by
            one, those of `linear` or else all operands together: `maximum` commutes with "max".
        linear_if: whether the attributes let the operator be so; always, when not given.
        note: one line for the table.
    """

    name: str
    family: str
    infer: Infer | None
    linear: Linear = "none"
    commutes: tuple[str, ...] = ()
    linear_if: Callable[..., bool] | None = None
    note: str = ""

    @property
    def has_rule(self) -> bool:
        """Whether there is a rule; without one, operands are replicated."""
        return self.infer is not None

    def rule(self, shapes: Sequence[Sequence[int]], **attributes: Any) -> OpShardingRule:
        """The rule for operands of these shapes.

        Raises:
            SpecError: shapes or attributes that the operator cannot have.
        """
        return self.inferred(shapes, **attributes).rule

    def result_shapes(
        self, shapes: Sequence[Sequence[int]], **attributes: Any
    ) -> tuple[Shape, ...]:
        """The shapes of the results for operands of these shapes."""
        return self.inferred(shapes, **attributes).result_shapes

    def adjusted(self, shapes: Sequence[Sequence[int]], **attributes: Any) -> tuple[int, ...]:
        """Factors of the rule along which a device has to know where its part lies.

        >>> from reshard.spmd.operators.table import operators
        >>> operators["take"].adjusted([(100, 8), (4,)], axis=0)
        (2,)
        """
        return self.inferred(shapes, **attributes).adjusted

    def partial_operands(
        self, count: int, reduction: str = "sum", **attributes: Any
    ) -> tuple[tuple[int, ...], ...]:
        """Sets of operands that may be partial together, the result being partial then.

        Args:
            count: of the operands.
            reduction: that of the contributions.
            attributes: of the operator; padding with ones, say, is not linear.

        >>> from reshard.spmd.operators.table import operators
        >>> operators["subtract"].partial_operands(2), operators["multiply"].partial_operands(2)
        (((0, 1),), ((0,), (1,)))
        >>> operators["exp"].partial_operands(1), operators["max"].partial_operands(1, "max")
        ((), ((0,),))
        """
        if self.linear_if is not None and not self.linear_if(**attributes):
            return ()
        together = self.linear if isinstance(self.linear, tuple) else tuple(range(count))
        if reduction in self.commutes:
            return (together,)
        if reduction not in ("sum", "mean") or self.linear == "none":
            return ()
        if self.linear == "one":
            return tuple((operand,) for operand in range(count))
        return (together,)

    def inferred(self, shapes: Sequence[Sequence[int]], **attributes: Any) -> Inferred:
        """The rule and the shapes of the results together; found once for equal questions."""
        frozen = tuple(sorted((name, _frozen(value)) for name, value in attributes.items()))
        key = tuple(tuple(int(size) for size in shape) for shape in shapes)
        return _inferred(self, key, _Attributes(frozen))


class _Attributes:
    """Attributes as a key. 1, 1.0 and True are different ones."""

    def __init__(self, items: tuple[tuple[str, Any], ...]) -> None:
        self.items = items
        self.key = repr(items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Attributes) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


@lru_cache(maxsize=65536)
def _inferred(operator: Operator, shapes: tuple[Shape, ...], attributes: _Attributes) -> Inferred:
    if operator.infer is None:
        return Inferred(replicated_rule(shapes), ())
    given = dict(attributes.items)
    try:
        return operator.infer(shapes, **given)
    except TypeError as error:
        # Only what the caller gave is the caller's: anything else goes on as it is.
        names = signature(operator.infer).parameters
        try:
            signature(operator.infer).bind(shapes, **given)
        except TypeError:
            known = ", ".join(list(names)[1:]) or "none"
            raise SpecError(
                f"operator {operator.name} with {', '.join(given) or 'no attributes'}: {error}; "
                f"its attributes are {known}"
            ) from None
        raise
