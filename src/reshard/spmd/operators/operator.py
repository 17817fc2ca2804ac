"""Operators: the rows of the table, with all properties of an operator.

A row says how an operator's dimensions hang together (its rule), what each rank computes, how much
that is, the element types of its results, which operands may be partial sums, and how it is shown
on the page of rules. Runners, propagation, traces, the cost model and the page read rows alone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, Literal

from reshard.errors import SpecError
from reshard.sharding import ShardingSpec
from reshard.spmd.local.by_name import by_name
from reshard.spmd.local.local_work import Function, LocalWork, MakeLocal
from reshard.spmd.operators.result_types import ResultTypes
from reshard.spmd.operators.work import Work, no_operations
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

Example = tuple[Sequence[Shape], Mapping[str, Any]]
"""Operands' shapes and attributes to show an operator with."""

KnowsPlace = Callable[[Sequence[ShardingSpec], Sequence[Shape], Mapping[str, Any]], bool]
"""From operands' shardings and shapes and the attributes to whether ranks find their own places."""

Placed = Callable[
    [Sequence[ShardingSpec], Sequence[Shape], Mapping[str, Any]],
    tuple[tuple[ShardingSpec, ...], tuple[ShardingSpec, ...]] | None,
]
"""From operands' shardings and shapes and the attributes to the shardings that an operation runs
with, of operands and of results; None where its rule is to say so."""

Fails = Literal["never", "any", "whole numbers"]
"""The element types for which an operation may fail by its values: none, any, or integers."""


class OperatorClass(enum.Enum):
    """How an operator treats what passes through it, which orders propagation."""

    OTHER = 0
    ELEMENTWISE = 1
    REARRANGING = 2
    SLICING = 3
    BROADCASTING = 4

    @property
    def is_elementwise(self) -> bool:
        """Whether each element of the result comes from the same place of the operands."""
        return self is OperatorClass.ELEMENTWISE


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
        operator_class: by which it propagates; derived from its rule when None.
        local: makes what each rank computes; the library's function of that name when not given.
        knows_place: whether the local function finds its own places along adjusted factors, so
            that these may be cut; never when None.
        placed: shardings that no rule can say, of ranks that need other parts of an operand than
            they have; its rule alone when not given.
        fails: whose elements may make it fail on one rank alone, so that all ranks must agree.
        work: additions and multiplications, from the rule, the sizes of its factors on a rank, and
            the attributes.
        reads_part: whether it reads no more of its first operand than it writes.
        result_types: of the results' elements; as the library promotes when None.
        example: small shapes and attributes, for the page of rules and for tests.
        doc: what it computes, in a sentence. An operator with one is a function of
            `reshard.spmd` by this row alone; the others are called by functions that read
            arguments, or are for graphs only.
        note: one line for the page of rules.
    """

    name: str
    family: str
    infer: Infer | None
    linear: Linear = "none"
    commutes: tuple[str, ...] = ()
    linear_if: Callable[..., bool] | None = None
    operator_class: OperatorClass | None = OperatorClass.OTHER
    local: MakeLocal = by_name
    knows_place: KnowsPlace | None = None
    placed: Placed | None = None
    fails: Fails = "never"
    work: Work = no_operations
    reads_part: bool = False
    result_types: ResultTypes | None = None
    example: Example | None = None
    doc: str = ""
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
        # A tuple names the operands that are partial together; else all are.
        together = self.linear if isinstance(self.linear, tuple) else tuple(range(count))
        if reduction in self.commutes:
            return (together,)
        # A mean is a sum over a constant, so that what is linear keeps both.
        if reduction not in ("sum", "mean") or self.linear == "none":
            return ()
        if self.linear == "one":
            return tuple((operand,) for operand in range(count))
        return (together,)

    def inferred(self, shapes: Sequence[Sequence[int]], **attributes: Any) -> Inferred:
        """The rule and the shapes of the results together; found once for equal questions."""
        # Lists become tuples, and names an order, so that equal questions have equal keys.
        frozen = tuple(sorted((name, _freeze(value)) for name, value in attributes.items()))
        key = tuple(tuple(int(size) for size in shape) for shape in shapes)
        return _infer(self, key, _Attributes(frozen))

    def local_functions(self, work: LocalWork) -> list[Function]:
        """The function that each rank here applies to its parts.

        Raises UsageError for an operator that the library has not.
        """
        found = self.local(work)
        return found if isinstance(found, list) else [found] * len(work.ranks)

    def may_fail(self, work: LocalWork, has_everyone: bool = True) -> bool:
        """Whether one rank's elements alone may make it fail, so that all ranks must agree.

        `has_everyone` is whether all processes have shards of the operands.

        An index is out of range, a matrix singular, a whole number divided by 0.
        """
        is_cut = any(x is not None and x.is_cut for x in work.operands)
        if self.fails == "never" or (has_everyone and not is_cut):
            # Without a cut every rank has the same elements, and fails alike.
            return False
        types = [x.dtype.name for x in work.operands if x is not None]
        return self.fails == "any" or all("int" in one or one == "bool" for one in types)


class _Attributes:
    """Attributes as a key. 1, 1.0 and True are different ones."""

    def __init__(self, items: tuple[tuple[str, Any], ...]) -> None:
        self.items = items
        self.key = repr(items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Attributes) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list | tuple) else value


@lru_cache(maxsize=65536)
def _infer(operator: Operator, shapes: tuple[Shape, ...], attributes: _Attributes) -> Inferred:
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
