"""Operators: a record holds all properties of an operator, and a registry finds it by name.

An operator's record has its sharding rule, the function that each rank computes, its derivative,
its cost, the element types of its results, and which operands may be partial sums. Runners,
propagation, traces, tapes and the cost model read only these records. Users add records with
`register(Operator(...))`, modules of the package with `ship(...)`.

`operators` has every operator by name. `rule_of` returns the rule of a name; the operands of an
unknown operator are replicated, with a warning that names it.
"""

from __future__ import annotations

import difflib
import enum
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

from reshard._validation import check_ints
from reshard.dtypes import DType
from reshard.errors import SpecError
from reshard.sharding import ShardingSpec
from reshard.spmd import namespace
from reshard.spmd.core.local_work import Function, LocalWork, MakeLocal, by_name
from reshard.spmd.rules.rule_builder import Inferred, Shape, replicated_rule
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.rules.templates import Template

Linear = Literal["each", "one", "none"] | tuple[int, ...]
"""Which operands may be partial sums, so that the result is a partial sum:

"each"    all of them together, along the same axes: `f(a + b, c + d) = f(a, c) + f(b, d)`
"one"     any single operand, if the others are whole: `f(a + b, c) = f(a, c) + f(b, c)`
"none"    none: partial sums are reduced first
(1, 2)    those operands together, if the others are whole
"""

Infer = Callable[..., Inferred]
"""From the operands' shapes and an operator's attributes to its rule and its results' shapes."""

Example = tuple[Sequence[Shape], Mapping[str, Any]]
"""Operands' shapes and attributes of an example of an operator."""

KnowsPlace = Callable[[Sequence[ShardingSpec], Sequence[Shape], Mapping[str, Any]], bool]
"""From operands' shardings and shapes and the attributes to whether ranks find their offsets."""

Placed = Callable[
    [Sequence[ShardingSpec], Sequence[Shape], Mapping[str, Any]],
    tuple[tuple[ShardingSpec, ...], tuple[ShardingSpec, ...]] | None,
]
"""From operands' shardings and shapes and the attributes to the shardings that an operation runs
with, of operands and of results, or to None if the rule determines them."""

Fails = Literal["never", "any", "whole numbers"]
"""The element types for which an operation may fail by its values: none, any, or integers."""


ResultTypes = Callable[[Sequence[DType], Mapping[str, Any], str], tuple[DType, ...]]
"""From arrays' element types, attributes and the library's name to the results' element types.

The last type applies to all further results.
"""

Sizes = Sequence[int]
Attributes = Mapping[str, Any]
Work = Callable[[OpShardingRule, Sizes, Attributes], float]
"""From a rule, the sizes of its factors on a rank, and the operation's attributes to the number of
additions and multiplications on that rank."""


def no_operations(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
    """Return 0: the operator only reads and writes."""
    return 0.0


def of_product(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
    """Return two operations, a product and a sum, for each index of all factors.

    >>> rule = OpShardingRule.parse("([i, k], [k]) -> ([i]) {i=4, k=8} reduction={k}")
    >>> of_product(rule, (4, 8), {})
    64.0
    """
    return float(math.prod(sizes) * 2)


def of_own_rule(rule: OpShardingRule, sizes: Sizes, attributes: Attributes) -> float:
    """Return the work of an operator with a rule alone: a product's if operands are reduced."""
    arrays = sum(bool(mapping) for mapping in rule.operands)
    return of_product(rule, sizes, attributes) if rule.reduction and arrays > 1 else 0.0


def dimension_sizes(mapping: Iterable[Iterable[int]], sizes: Sizes) -> list[int]:
    """Return the sizes of an array's dimensions on a rank, from those of the rule's factors."""
    return [math.prod(sizes[factor] for factor in dim) for dim in mapping]


@dataclass(frozen=True, slots=True, eq=False)
class TapeStep:
    """An executed operation on a tape.

    Args:
        name: the operator's.
        attributes: of the operator, its options among them.
        operands: arrays and numbers.
        results: the arrays that it returned.
        pullback: its derivative.
        combined: for each operand whose contributions were combined first, the sharding that the
            operation ran with; None for others.
    """

    name: str
    attributes: Mapping[str, Any]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    pullback: Pullback
    combined: tuple[ShardingSpec | None, ...] = ()

    @property
    def result(self) -> Any:
        """The first result."""
        return self.results[0]


@dataclass(frozen=True, slots=True)
class JointPullback:
    """A pullback that returns the cotangents of all operands at once, or None for an operand."""

    function: Callable[[TapeStep, Any], Sequence[Any]]


Pullback = Callable[[TapeStep, Any, int], Any] | JointPullback
"""From a step, the cotangents of its results and an operand's number to the operand's cotangent, or
None if it has none. The cotangents are one array for an operator of one result, else a tuple."""


class OperatorClass(enum.Enum):
    """How an operator treats its operands' elements, which orders propagation."""

    OTHER = 0
    ELEMENTWISE = 1
    REARRANGING = 2
    SLICING = 3
    BROADCASTING = 4

    @property
    def is_elementwise(self) -> bool:
        """Whether each element of the result depends on the same position of the operands."""
        return self is OperatorClass.ELEMENTWISE


# Records are keys of caches by identity: comparing their fields at each look-up would be slow.
@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """A record of an operator's properties.

    Args:
        name: the array API's name if it has the operator.
        family: the section of the table that lists it.
        infer: from the operands' shapes and the attributes to the rule and the results' shapes;
            None for an operator without a rule, whose operands are replicated.
        linear: which operands may be partial sums, or partial means.
        commutes: the other reductions whose contributions the operator may be applied to
            separately, for the operands of `linear` or else for all operands together: `maximum`
            commutes with "max".
        linear_if: whether the attributes let the operator be linear; always when not given.
        operator_class: the class that orders propagation; derived from its rule when None.
        local: makes the function that each rank computes; the library's function of that name when
            not given.
        knows_place: whether the local function finds its offset along adjusted factors, so that
            these may be sharded; never when None.
        placed: shardings that a rule cannot express, for ranks that need other parts of an operand
            than they have; the rule alone when not given.
        fails: the element types for which an operation may fail on a single rank, so that all
            ranks must agree.
        pullback: the derivative: from the cotangents of the results to those of the operands.
        is_constant: whether results do not change with small changes of the operands, such as the
            results of comparisons.
        no_pullback: why an operator that is not constant lacks a pullback.
        work: additions and multiplications, from the rule, the sizes of its factors on a rank, and
            the attributes.
        reads_part: whether it reads at most as many elements of its first operand as it writes.
        result_types: of the results' elements; as the library promotes when None.
        example: small shapes and attributes, for the page of rules and for tests.
        doc: a sentence that describes the operator. An operator with a `doc` becomes a function of
            `reshard.spmd` by this record alone; the others are called by functions that read
            arguments, or occur in graphs only.
        note: a line for the page of rules.
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
    pullback: Pullback | None = None
    is_constant: bool = False
    no_pullback: str = ""
    work: Work = no_operations
    reads_part: bool = False
    result_types: ResultTypes | None = None
    example: Example | None = None
    doc: str = ""
    note: str = ""

    @property
    def has_rule(self) -> bool:
        """Whether there is a rule; otherwise operands are replicated."""
        return self.infer is not None

    def rule(self, shapes: Sequence[Sequence[int]], **attributes: Any) -> OpShardingRule:
        """Return the rule for operands of these shapes.

        Raises:
            SpecError: shapes or attributes that the operator cannot have.
        """
        return self.inferred(shapes, **attributes).rule

    def result_shapes(
        self, shapes: Sequence[Sequence[int]], **attributes: Any
    ) -> tuple[Shape, ...]:
        """Return the shapes of the results for operands of these shapes."""
        return self.inferred(shapes, **attributes).result_shapes

    def adjusted(self, shapes: Sequence[Sequence[int]], **attributes: Any) -> tuple[int, ...]:
        """Return the factors of the rule along which a device has to know its part's offset.

        >>> from reshard.spmd.core.operator import operators
        >>> operators["take"].adjusted([(100, 8), (4,)], axis=0)
        (2,)
        """
        return self.inferred(shapes, **attributes).adjusted

    def partial_operands(
        self, count: int, reduction: str = "sum", **attributes: Any
    ) -> tuple[tuple[int, ...], ...]:
        """Return the sets of operands that may be partial together, which makes the result partial.

        Args:
            count: the number of operands.
            reduction: the reduction that combines the contributions.
            attributes: of the operator; padding with 1, for instance, is not linear.

        >>> from reshard.spmd.core.operator import operators
        >>> operators["subtract"].partial_operands(2), operators["multiply"].partial_operands(2)
        (((0, 1),), ((0,), (1,)))
        >>> operators["exp"].partial_operands(1), operators["max"].partial_operands(1, "max")
        ((), ((0,),))
        """
        if self.linear_if is not None and not self.linear_if(**attributes):
            return ()
        # A tuple names the operands that are partial together; otherwise all operands are.
        together = self.linear if isinstance(self.linear, tuple) else tuple(range(count))
        if reduction in self.commutes:
            return (together,)
        # A mean is a sum divided by a constant, so a linear operator preserves both.
        if reduction not in ("sum", "mean") or self.linear == "none":
            return ()
        if self.linear == "one":
            return tuple((operand,) for operand in range(count))
        return (together,)

    def inferred(self, shapes: Sequence[Sequence[int]], **attributes: Any) -> Inferred:
        """Return the rule and the shapes of the results; cached by shapes and attributes."""
        # Lists become tuples, and names are sorted, so that equal arguments have equal keys.
        frozen = {name: _freeze(attributes[name]) for name in sorted(attributes)}
        key = tuple([tuple(map(int, shape)) for shape in shapes])
        # Written out, since 1, 1.0 and True are equal, but not the same attribute.
        cached = (self, key, repr(frozen))
        result = _inferred.get(cached)
        if result is None:
            if len(_inferred) >= _MAX_INFERRED:
                _inferred.clear()
            result = _inferred[cached] = _infer(self, key, frozen)
        return result

    def local_functions(self, work: LocalWork) -> list[Function]:
        """Return for each rank here the function that it applies to its parts.

        Raises UsageError for an operator that the library does not have.
        """
        functions = self.local(work)
        return functions if isinstance(functions, list) else [functions] * len(work.ranks)

    def may_fail(self, work: LocalWork, has_everyone: bool = True) -> bool:
        """Return whether a single rank may fail because of its elements, so that all must agree.

        `has_everyone` is whether all processes have shards of the operands.

        Examples: an index out of range, a singular matrix, an integer division by 0.
        """
        if self.fails == "never":
            return False
        is_cut = any(x is not None and x.is_cut for x in work.operands)
        if has_everyone and not is_cut:
            # If no operand is sharded, every rank has the same elements, and fails in the same way.
            return False
        types = [x.dtype.name for x in work.operands if x is not None]
        return self.fails == "any" or all("int" in name or name == "bool" for name in types)


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list | tuple) else value


_inferred: dict[tuple[Operator, tuple[Shape, ...], str], Inferred] = {}
_MAX_INFERRED = 1 << 16


def _infer(operator: Operator, shapes: tuple[Shape, ...], attributes: dict[str, Any]) -> Inferred:
    if operator.infer is None:
        return Inferred(replicated_rule(shapes), ())
    try:
        return operator.infer(shapes, **attributes)
    except SpecError as error:
        # Errors of patterns do not name the operator.
        if not str(error).startswith("shapes "):
            raise
        raise SpecError(f"{operator.name} of {error}") from None
    except TypeError as error:
        # Only errors about the caller's own arguments are translated; others are raised unchanged.
        names = signature(operator.infer).parameters
        try:
            signature(operator.infer).bind(shapes, **attributes)
        except TypeError:
            accepted = ", ".join(list(names)[1:]) or "none"
            raise SpecError(
                f"operator {operator.name} with {', '.join(attributes) or 'no attributes'}: "
                f"{error}; its attributes are {accepted}"
            ) from None
        raise


_table: dict[str, Operator] = {}
_shipped: set[str] = set()


class _Operators(Mapping[str, Operator]):
    # Families that arrays do without are imported when a name is looked up that others lack.
    def __getitem__(self, name: str) -> Operator:
        if name not in _table:
            namespace.load_families()
        return _table[name]

    def __iter__(self) -> Iterator[str]:
        namespace.load_families()
        return iter(_table)

    def __len__(self) -> int:
        namespace.load_families()
        return len(_table)


operators: Mapping[str, Operator] = _Operators()
"""Every registered operator, by name."""


def shipped_operators() -> set[str]:
    """Return the names of the operators that are part of the package, without custom operators."""
    namespace.load_families()
    return _shipped


def documented_operators() -> list[str]:
    """Return the names of the package's operators that are functions by their records alone."""
    return [name for name in _shipped if _table[name].doc]


_warned: set[str] = set()


def find_operator(name: str) -> Operator:
    """Return the record of a name; a name that is not in the table gets a record without a rule."""
    record = _table.get(name) or operators.get(name)
    if record is None:
        return Operator(name, "without a rule", None, operator_class=None, work=of_own_rule)
    return record


def ship(
    name: str, infer: Infer | None, example: Example | None = None, *, family: str, **fields: Any
) -> Operator:
    """Add an operator of the package, which no other replaces if it has a rule."""
    _shipped.add(name)
    _table[name] = operator = Operator(name, family, infer, example=example, **fields)
    return operator


def operator_of(name: str) -> Operator:
    """Return the operator of a name; a name that is not in the table is an operator without a rule.

    Warns once for each operator without a rule: its operands are replicated.

    >>> operator_of("matmul").linear
    'one'
    """
    operator = find_operator(name)
    # Each name warns once, also for a layer that runs many times.
    if not operator.has_rule and name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"operator {name} has no sharding rule: its operands are replicated on every device; "
            f'give it one with @reshard.spmd.rule("{name}"){likely_name(name)}',
            UserWarning,
            # The caller of the function that looked the operator up.
            stacklevel=3,
        )
    return operator


def likely_name(name: str) -> str:
    """Return the end of a message with the operators whose names resemble an unknown name.

    >>> likely_name("matmull"), likely_name("my_own_kernel")
    ("; did you mean 'matmul'?", '')
    """
    near = difflib.get_close_matches(name, operators, 2, 0.8)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def rule_of(
    name: str,
    shapes: Iterable[Sequence[int]],
    *,
    result_shapes: Iterable[Sequence[int]] = (),
    **attributes: Any,
) -> OpShardingRule:
    """Return the rule of an operator for operands of these shapes.

    Args:
        name: of the operator.
        shapes: of its operands.
        result_shapes: for an operator without a rule: the shapes of its results.
        attributes: of the operator, such as `axis`.

    Raises:
        SpecError: shapes or attributes that the operator does not accept.

    >>> print(rule_of("matmul", [(4, 8), (8, 16)]))
    ([i, k], [k, j]) -> ([i, j]) {i=4, j=16, k=8} reduction={k}
    >>> print(rule_of("max", [(4, 8)], axis=1))
    ([i, j]) -> ([i]) {i=4, j=8} reduction={j:max}
    """
    operator = operator_of(name)
    operand_shapes = [check_ints(shape, "shape", SpecError) for shape in shapes]
    if not operator.has_rule:
        return replicated_rule(
            operand_shapes, [check_ints(shape, "shape", SpecError) for shape in result_shapes]
        )
    return operator.rule(operand_shapes, **attributes)


def register(operator: Operator) -> Operator:
    """Add a row to the table. A custom row of the same name is replaced.

    The operator then runs on shards, and is traced, propagated and costed by that row. If it has a
    `doc`, it becomes a function of `reshard.spmd` with its name.

    Raises SpecError for the name of a built-in row that has a rule.

    >>> from reshard.spmd.rules.rule_builder import elementwise_rule
    >>> row = Operator("twice", "users' own", elementwise_rule, "each", doc="Two of it.")
    >>> twice = register(row)
    >>> str(rule_of("twice", [(4,)]))
    '([i]) -> ([i]) {i=4}'
    """
    _check_replaceable(operator.name)
    _table[operator.name] = operator
    return operator


def infer_by_own_rule(name: str, rule: Any, shapes: Sequence[Shape]) -> Inferred:
    """Return an operator as a user's rule, or its text, describes it for some shapes.

    Raises SpecError if it is neither, or is for other shapes.
    """
    if isinstance(rule, str):
        # With its sizes or without: they are the operands'.
        template = Template.parse(rule)
        try:
            rule = template.rule(*shapes)
        except SpecError as error:
            raise SpecError(f"{name}: {error}") from None
    if not isinstance(rule, OpShardingRule):
        raise SpecError(
            f"the rule of {name} is {rule!r}; return an OpShardingRule or its text, such as "
            "([i, j]) -> ([i]) reduction={j}"
        )
    # If the factors' sizes do not multiply to the shapes, shards would have wrong sizes.
    if rule.operand_shapes != tuple(shapes):
        raise SpecError(
            f"the rule {rule} of {name} is for operands {rule.operand_shapes}, but they are "
            f"{tuple(shapes)}; its factors' sizes must make up their shapes"
        )
    return Inferred(rule, rule.result_shapes)


def _check_replaceable(name: str) -> None:
    if name in shipped_operators() and _table[name].has_rule:
        raise SpecError(f"operator {name} has a rule of the package's; name yours differently")


RuleFunction = Callable[..., OpShardingRule | str]


def rule(
    name: str, *, linear: Linear = "none", note: str = ""
) -> Callable[[RuleFunction], RuleFunction]:
    """Register a custom rule for the operator of a name, as a decorator.

    The function receives the operands' shapes and the operator's attributes, and returns a rule or
    its text. It replaces an earlier custom rule of that name, but no built-in rule.

    Args:
        name: of the operator.
        linear: which operands may be pending sums; see `Linear`.
        note: a line about it.

    Raises:
        SpecError: the name of a built-in operator. At the first use: a rule that does not fit the
            shapes of the operands.

    >>> @rule("outer_sum", linear="each")
    ... def outer_sum(shapes):
    ...     (i,), (j,) = shapes
    ...     return f"([i], [j]) -> ([i, j]) {{i={i}, j={j}}}"
    >>> print(rule_of("outer_sum", [(4,), (8,)]))
    ([i], [j]) -> ([i, j]) {i=4, j=8}
    """
    if not isinstance(name, str):
        raise SpecError(f'operator {name!r}; give its name as a str: @rule("name")')
    if linear not in ("each", "one", "none") and not isinstance(linear, tuple):
        raise SpecError(
            f"linear={linear!r} of operator {name}; it is each, one, none, or the places of some "
            "operands, as in (0, 1)"
        )
    _check_replaceable(name)

    def add(function: RuleFunction) -> RuleFunction:
        # The result of a user's function may depend on the shapes: it is checked at each use.
        def infer(shapes: Sequence[Shape], **attributes: Any) -> Inferred:
            return infer_by_own_rule(name, function(shapes, **attributes), shapes)

        register(
            Operator(
                name,
                "users' own",
                infer,
                linear,
                operator_class=None,
                work=of_own_rule,
                note=note,
            )
        )
        return function

    return add
