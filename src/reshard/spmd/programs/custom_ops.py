"""Custom operators: functions that every rank applies to its shards.

`operator` creates an operator from a sharding rule and a local function, and registers it in the
tables of operators and of derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError, ShardError, SpecError, UsageError
from reshard.spmd.core.local_work import Function, LocalWork
from reshard.spmd.core.operator import (
    Attributes,
    Fails,
    Infer,
    Linear,
    Operator,
    ResultTypes,
    Work,
    infer_by_own_rule,
    no_operations,
    operators,
    register,
    shipped_operators,
)
from reshard.spmd.core.result_types import promoted
from reshard.spmd.gradients.tape import gradient as add_gradient
from reshard.spmd.gradients.tape import remove_gradient
from reshard.spmd.ops.elementwise import operands as as_operands
from reshard.spmd.rules.rule_builder import Inferred, Shape
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.rules.templates import Template
from reshard.spmd.shards.error_translation import REFUSALS
from reshard.spmd.shards.operation_call import call
from reshard.spmd.shards.runner import forget_calls

Rule = str | Template | Callable[..., "OpShardingRule | str"]
"""A rule for all shapes, or a function from shapes and attributes to the one for them."""

Operations = Callable[..., float]
"""From the shapes of a rank's parts to additions and multiplications there."""

_FAILS = ("never", "any", "whole numbers")


class OwnOperator:
    """An operator of the user's own, which is called with arrays as a function of `sp` is.

    Made by `operator`; `name` is what traces and errors call it.
    """

    def __init__(self, row: Operator) -> None:
        self.name = row.name
        self.__name__ = self.__qualname__ = row.name
        self.__doc__ = row.doc or f"The operator {row.name}."
        self._row = row

    def __call__(self, *arrays: Any, **attributes: Any) -> Any:
        """Return the operator's result for arrays and numbers; a tuple where it has several.

        Raises:
            UsageError: no array in shards; an attribute that is not a plain value; what the local
                function raises or returns, if that is not an array.
            SpecError: shapes that the rule does not fit.
            ShardError: a local function whose parts do not have the shapes of the rule.
        """
        # Calls look the operator up by name, so an older object would run the newer function.
        if operators.get(self.name) is not self._row:
            raise UsageError(
                f"operator {self.name} was registered again with another function since; call "
                "what sp.operator returned last, or give each a name of its own: name="
            )
        for name, value in attributes.items():
            _check_attribute(self.name, name, value)
        return call(self.name, as_operands(*arrays), attributes)

    def __repr__(self) -> str:
        return f"OwnOperator({self.name!r})"


def operator(
    rule: Rule,
    local_function: Function,
    *,
    name: str | None = None,
    gradient: Callable[..., Any] | None = None,
    operations: Operations | None = None,
    result_dtype: object = None,
    linear: Linear = "none",
    fails: Fails = "never",
) -> OwnOperator:
    """Create an operator: `local_function` runs on the shards of every rank, as `rule` allows.

    The operator works in eager mode, in `sp.trace`, `sp.jit` and `sp.grad`, with NumPy and PyTorch
    shards, in one process and over processes.

    Args:
        rule: the sharding rule, as a string without sizes, such as
            `"([i, k], [k, j]) -> ([i, j]) reduction={k}"`, or as a `Template`. If the number of
            dimensions varies: a function of the operands' shapes and the attributes that returns a
            rule or its string.
        local_function: a function of a rank's shards of the operands, with the attributes as
            keyword arguments. It returns the rank's shard of the result (a tuple for several
            results) as arrays of the same library. Shards may be empty. It must depend on nothing
            else, and must not write to its arguments.
        name: shown in traces and errors; the name of the function when not given. An earlier custom
            operator of that name is replaced.
        gradient: a function of the cotangent of the result (a tuple for several), the operands, the
            result, and the attributes as keyword arguments. It returns a tuple with a cotangent, or
            None, for each operand. Write it with functions of `sp`. Without it, gradients through
            the operator raise an error.
        operations: the cost: a function from the shapes of a rank's shards of the operands to the
            number of additions and multiplications, for time estimates and the strategy "cost"; 0
            when not given.
        result_dtype: the element type of the results, or a tuple with a type for each; the promoted
            type of the operands when not given.
        linear: which operands may be pending sums, see `reshard.spmd.core.operator.Linear`.
        fails: the element types for which the operator may fail on a single rank because of its
            elements: "never", "any" or "whole numbers". Ranks then check each other, which over
            processes takes an all-reduce of a number per call.

    Raises:
        NotationError, SpecError: an invalid rule, a rule with a factor that no result has and that
            is neither reduced nor replicated, or a rule for another number of operands than the
            function has.
        UsageError: an argument of a wrong kind; the name of a built-in operator.

    >>> import numpy as np
    >>> from reshard import DeviceMesh, spec
    >>> from reshard.spmd.arrays.sharded_array import array
    >>> def distances_here(x, y):
    ...     return np.abs(x[:, None] - y).sum(-1)
    >>> distances = operator("([i, k], [j, k]) -> ([i, j]) reduction={k}", distances_here)
    >>> x = array(np.eye(4), spec(DeviceMesh.of(a=2, b=2), "a, b"))
    >>> result = distances(x, np.eye(4)[:2])
    >>> print(result.spec)
    a, - | sum(b)
    >>> result.to_dense()[0].tolist()
    [0.0, 2.0]
    """
    if not callable(local_function):
        raise UsageError(f"the local function {local_function!r} is none; give a function")
    operator_name = _read_name(name, local_function)
    for value, said in ((gradient, "gradient"), (operations, "operations")):
        if value is not None and not callable(value):
            raise UsageError(f"{said}={value!r} of operator {operator_name}; give a function")
    if fails not in _FAILS:
        raise UsageError(f"fails={fails!r} of operator {operator_name}; it is {', '.join(_FAILS)}")
    if linear not in ("each", "one", "none") and not isinstance(linear, tuple):
        raise UsageError(
            f"linear={linear!r} of operator {operator_name}; it is each, one, none, or the "
            "places of some operands, as in (0, 1)"
        )
    infer = _make_infer(operator_name, rule, local_function)
    result_types = _make_result_types(operator_name, result_dtype)
    row = Operator(
        operator_name,
        "users' own",
        infer,
        linear,
        operator_class=None,
        local=_make_local(operator_name, infer, result_types, local_function),
        fails=fails,
        work=no_operations if operations is None else _make_work(operator_name, operations),
        result_types=result_types,
        note=(local_function.__doc__ or "").strip().partition("\n")[0],
    )
    register(row)
    # Compiled calls and derivatives of an earlier operator of that name are discarded.
    forget_calls(operator_name)
    remove_gradient(operator_name)
    if gradient is not None:
        add_gradient(operator_name)(gradient)
    return OwnOperator(row)


def _read_name(name: object, function: Function) -> str:
    operator_name = getattr(function, "__name__", None) if name is None else name
    if not isinstance(operator_name, str) or not operator_name.isidentifier():
        asked = f"the function's name is {operator_name!r}" if name is None else f"name={name!r}"
        raise UsageError(f"{asked}: an operator needs a plain one; give it as in name='kernel'")
    if operator_name in shipped_operators():
        raise UsageError(
            f"operator {operator_name} is one of the package's; name yours differently: name="
        )
    return operator_name


def _check_attribute(operator: str, name: str, value: object) -> None:
    # Attributes are compared by their text, which is complete for these types only.
    if isinstance(value, tuple | list):
        for item in value:
            _check_attribute(operator, name, item)
    elif not (value is None or isinstance(value, bool | int | float | complex | str | DType)):
        raise UsageError(
            f"attribute {name}={value!r} of operator {operator}, a {type(value).__name__}; "
            "numbers, texts, None and tuples of them were expected: arrays are given as operands"
        )


def _make_infer(name: str, rule: Rule, function: Function) -> Infer:
    """Return the function from shapes and attributes to the rule, which is checked if known."""
    if isinstance(rule, str):
        rule = Template.parse(rule)
    if isinstance(rule, Template):
        _check_counted(name, rule)
        if not rule.repeats:
            _check_arity(name, function, len(rule.operands))
    elif not callable(rule):
        raise SpecError(
            f"the rule of operator {name} is {rule!r}; give its text, such as "
            "([i, k], [k, j]) -> ([i, j]) reduction={k}, a Template, or a function of shapes"
        )

    def infer(shapes: Sequence[Shape], **attributes: Any) -> Inferred:
        if isinstance(rule, Template):
            try:
                inferred: Any = rule.rule(*shapes)
            except SpecError as error:
                raise SpecError(f"{name}: {error}") from None
            return Inferred(inferred, inferred.result_shapes)
        result = infer_by_own_rule(name, rule(shapes, **attributes), shapes)
        _check_counted(name, result.rule)
        return result

    return infer


def _check_counted(name: str, rule: Template | OpShardingRule) -> None:
    """Raise SpecError for a factor whose parts no result has, and nobody combines."""
    if not rule.results:
        raise SpecError(f"the rule {rule} of operator {name} has no result; give it one")
    of_results = {factor for mapping in rule.results for dim in mapping for factor in dim}
    # Without a kind, parts of such a factor would give wrong results, unnoticed.
    handled = {*of_results, *rule.reduction, *rule.need_replication}
    for mapping in rule.operands:
        for dim in mapping:
            if not handled.issuperset(dim):
                raise SpecError(
                    f"the rule {rule} of operator {name} has a factor in operands alone; say "
                    "reduction={...} of it, if results of its parts add up, or "
                    "need_replication={...}, if each rank needs all of it"
                )


def _check_arity(name: str, function: Function, count: int) -> None:
    try:
        parameters = signature(function)
    except (TypeError, ValueError):  # Of some built-in functions nothing is known.
        return
    try:
        # Partially, since attributes may be required keyword arguments.
        parameters.bind_partial(*[None] * count)
    except TypeError:
        raise SpecError(
            f"the rule of operator {name} has {count} operands, but its local function is "
            f"{name}{parameters}; give it one parameter for each"
        ) from None


def _make_result_types(name: str, result_dtype: object) -> ResultTypes:
    if result_dtype is None:
        return promoted
    values = result_dtype if isinstance(result_dtype, tuple | list) else (result_dtype,)
    if not values:
        raise UsageError(
            f"result_dtype={result_dtype!r} of operator {name}; give a type for each result"
        )
    types = tuple(map(as_dtype, values))

    def named(
        dtypes: Sequence[DType], attributes: Mapping[str, Any], library: str
    ) -> tuple[DType, ...]:
        return types

    return named


def _make_work(name: str, operations: Operations) -> Work:
    def work(rule: OpShardingRule, sizes: Sequence[int], attributes: Attributes) -> float:
        shapes = [
            tuple(math.prod(sizes[factor] for factor in dim) for dim in mapping)
            for mapping in rule.operands
        ]
        count = operations(*shapes)
        is_number = isinstance(count, int | float) and not isinstance(count, bool)
        if not is_number or not 0 <= count < math.inf:
            raise UsageError(
                f"the operations of operator {name} on parts of shapes {shapes} are {count!r}; a "
                "number of additions and multiplications, 0 or more, was expected"
            )
        return float(count)

    return work


def _make_local(
    name: str, infer: Infer, result_types: ResultTypes, function: Function
) -> Callable[[LocalWork], list[Function]]:
    """Return what makes each rank's function: the user's function, with its results checked."""

    def local(work: LocalWork) -> list[Function]:
        shapes = [() if operand is None else operand.shape for operand in work.operands]
        result_shapes = infer(shapes, **work.attributes).result_shapes
        operand_types = [operand.dtype for operand in work.operands if operand is not None]
        types = result_types(operand_types, work.attributes, work.library.name)
        if len(types) > len(result_shapes):
            raise UsageError(
                f"operator {name} has {len(types)} types in result_dtype, and "
                f"{len(result_shapes)} results"
            )
        result_dtypes = (*types, *types[-1:] * (len(result_shapes) - len(types)))
        layouts = work.result_layouts

        def make(rank: int) -> Function:
            expected = [
                (
                    tuple(layouts[n].local_shape(rank) or ()) if layouts else result_shapes[n],
                    result_dtypes[n],
                )
                for n in range(len(result_shapes))
            ]

            def computed(*parts: Any) -> Any:
                try:
                    output = function(*parts, **work.attributes)
                except REFUSALS as error:
                    if isinstance(error, ReshardError):
                        raise
                    sizes = ", ".join(str(list(getattr(x, "shape", ()))) for x in parts)
                    raise UsageError(
                        f"the local function of operator {name} failed on rank {rank}, on parts "
                        f"of shapes {sizes}: {type(error).__name__}: {error}; it must take every "
                        "part that its rule allows, empty ones too"
                    ) from error
                if len(expected) == 1 and not isinstance(output, tuple | list):
                    return _check_part(work, rank, 0, output, *expected[0])
                if not isinstance(output, tuple | list) or len(output) != len(expected):
                    count = f"{len(output)} of them" if isinstance(output, tuple | list) else ""
                    raise ShardError(
                        f"the local function of operator {name} returned a "
                        f"{type(output).__name__} {count}".rstrip()
                        + f"; its rule has {len(expected)} results: return an array for one, a "
                        "tuple of them for several"
                    )
                return tuple(
                    _check_part(work, rank, n, part, *expected[n]) for n, part in enumerate(output)
                )

            return computed

        return [make(rank) for rank in work.ranks]

    return local


def _check_part(
    work: LocalWork, rank: int, number: int, part: Any, shape: tuple[int, ...], dtype: DType
) -> Any:
    """Return a shard of a result as the library's array. Raises ShardError if it does not fit."""
    said = f"the local function of operator {work.name} made result {number} on rank {rank}"
    if not work.library.is_array(part):
        raise UsageError(
            f"{said} as a {type(part).__name__}; an array of {work.library.name}'s was expected, "
            "as the parts of the operands are"
        )
    if tuple(part.shape) != shape:
        raise ShardError(
            f"{said} of shape {list(part.shape)}, but by its rule it has {list(shape)} there; "
            "the rule and what is computed must fit"
        )
    actual = work.library.dtype_of(part)
    if actual is not dtype:
        raise ShardError(
            f"{said} of {actual.name}, but {dtype.name} was expected; convert it, or say what it "
            f'makes: result_dtype="{actual.name}"'
        )
    # Sums of all elements are numbers of NumPy's.
    return work.library.array(part) if isinstance(part, np.generic) else part
