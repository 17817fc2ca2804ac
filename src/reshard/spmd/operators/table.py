"""The table of operators: one row for each, from the modules of their families.

`operators` is the table: every operator that is known, by name. `rule_of` asks it, and replicates
the operands of an operator it does not know, with one warning that names it. `register` adds a row,
`rule` one of which the rule alone is known.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from reshard.errors import SpecError
from reshard.spmd.operators import (
    arrangement,
    creation,
    elementwise,
    indexing,
    linear_algebra,
    movement,
    ordering,
    products,
    reductions,
    windows,
)
from reshard.spmd.operators.networks import attention, convolution, layers, pooling, ring_attention
from reshard.spmd.operators.operator import Linear, Operator
from reshard.spmd.operators.work import of_own_rule
from reshard.spmd.rules.rule_builder import Inferred, Shape, replicated_rule
from reshard.spmd.rules.sharding_rule import OpShardingRule

_table: dict[str, Operator] = {}
for _module in (
    elementwise,
    products,
    reductions,
    movement,
    arrangement,
    indexing,
    ordering,
    windows,
    convolution,
    pooling,
    layers,
    attention,
    ring_attention,
    linear_algebra,
    creation,
):
    for _operator in _module.OPERATORS:
        if _operator.name in _table:
            raise SpecError(f"operator {_operator.name} is twice in the table; keep one")
        _table[_operator.name] = _operator

SHIPPED = frozenset(_table)
"""The names of the operators that come with the package, without users' own."""

# A view: rows are added by `register` alone.
operators: Mapping[str, Operator] = MappingProxyType(_table)
"""Every operator with its rule, by name."""

_warned: set[str] = set()


def row_of(name: str) -> Operator:
    """The row of a name, which is one without a rule where the table has none."""
    return _table.get(name) or Operator(
        name, "without a rule", None, operator_class=None, work=of_own_rule
    )


def operator_of(name: str) -> Operator:
    """Return the operator of a name; a name that is not in the table is an operator without a rule.

    Warns once for each operator without a rule: its operands are replicated.

    >>> operator_of("matmul").linear
    'one'
    """
    operator = row_of(name)
    # Once a name: a layer that runs many times warns once.
    if not operator.has_rule and name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"operator {name} has no sharding rule: its operands are replicated on every device; "
            f'give it one with @reshard.spmd.rule("{name}"){likely_name(name)}',
            UserWarning,
            stacklevel=3,
        )
    return operator


def likely_name(name: str) -> str:
    """Return the end of a message with the operators whose names resemble this unknown one.

    >>> likely_name("matmull"), likely_name("my_own_kernel")
    ("; did you mean 'matmul'?", '')
    """
    near = difflib.get_close_matches(name, _table, 2, 0.8)
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
    known = [_read_shape(shape) for shape in shapes]
    if not operator.has_rule:
        return replicated_rule(known, [_read_shape(shape) for shape in result_shapes])
    return operator.rule(known, **attributes)


def _read_shape(given: object) -> Shape:
    is_shape = isinstance(given, Sequence) and not isinstance(given, str)
    sizes = tuple(given) if is_shape and isinstance(given, Sequence) else (None,)
    if not all(hasattr(size, "__index__") and size >= 0 for size in sizes):
        raise SpecError(f"{given!r} is no shape; give whole numbers, 0 or more, as in (4, 8)")
    return sizes


def register(operator: Operator) -> Operator:
    """Add a row to the table. A custom row of the same name is replaced.

    The operator then runs on shards, and is traced, propagated and costed by that row. If it has a
    `doc`, it becomes a function of `reshard.spmd` with its name.

    Raises SpecError for the name of a built-in row that has a rule.

    >>> from reshard.spmd.operators.elementwise import elementwise
    >>> twice = register(Operator("twice", "users' own", elementwise, "each", doc="Two of it."))
    >>> str(rule_of("twice", [(4,)]))
    '([i]) -> ([i]) {i=4}'
    """
    name = operator.name
    if name in SHIPPED and _table[name].has_rule:
        raise SpecError(f"operator {name} has a rule of the package's; name yours differently")
    _table[name] = operator
    return operator


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
        note: one line about it.

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
    if name in SHIPPED and _table[name].has_rule:
        raise SpecError(f"operator {name} has a rule of the package's; name yours differently")

    def add(function: RuleFunction) -> RuleFunction:
        # What a user's function returns is checked at each use: it is not known before.
        def infer(shapes: Sequence[Shape], **attributes: Any) -> Inferred:
            found = function(shapes, **attributes)
            if isinstance(found, str):
                found = OpShardingRule.parse(found)
            if not isinstance(found, OpShardingRule):
                raise SpecError(
                    f"the rule of {name} is {found!r}; return an OpShardingRule or its text, such "
                    "as ([i, j]) -> ([i]) {i=4, j=8} reduction={j}"
                )
            # Sizes of factors that do not make up the shapes would give shards of the wrong sizes.
            if found.operand_shapes != tuple(shapes):
                raise SpecError(
                    f"the rule {found} of {name} is for operands {found.operand_shapes}, but they "
                    f"are {tuple(shapes)}; its factors' sizes must make up their shapes"
                )
            return Inferred(found, found.result_shapes)

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
