"""Functions defined by rows of the table alone: elementwise ones, and `matmul`.

`clip` and `where`, which read their arguments, are written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reshard.spmd import namespace
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.backend import is_distributed, library_of
from reshard.spmd.core.operator import SHIPPED, Operator, operators
from reshard.spmd.functions.array_arguments import of_arrays
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call, recorders
from reshard.spmd.shards.runner import in_process

Function = Callable[..., Any]


def whole(x: ArrayValue, array: Any) -> Any:
    """A library's array as one beside `x`: not sharded, or in its own sharding."""
    if is_distributed(array):
        return namespace.find("array")(array, runner=x.runner)
    library = x.runner.library
    shard = library.array(array, beside=next(iter(x._shards), None))
    kind = ArrayType(shard.shape, library.dtype_of(shard))
    return type(x).of_shards(kind, (shard,), x.runner)


def operands(*values: Any) -> list[Any]:
    """Values as operands of one operation, of the runner of the first array in shards.

    Arrays of NumPy's shards in this process become operands beside those of another runner.
    """
    arrays = [one for one in values if isinstance(one, ArrayValue)]
    if not arrays:
        return list(values)
    first = arrays[0]
    if any(one.runner is not first.runner for one in arrays):
        first = next((one for one in arrays if one.runner.library.name != "numpy"), first)
    return [
        _beside(first, one)
        if isinstance(one, ArrayValue)
        else one
        if library_of(one) is None
        else whole(first, one)
        for one in values
    ]


def _beside(first: ArrayValue, one: ArrayValue) -> ArrayValue:
    """An array of NumPy's shards as one of another runner; any other array as it is."""
    runner = first.runner
    if one.runner is runner or one.runner is not in_process("numpy") or runner.is_abstract:
        return one
    for recorder in recorders:
        # The copy is another array, which depends on nothing.
        read = getattr(recorder, "record_read", None)
        if read is not None:
            read(one)
    mesh = None if one.type.spec is None else one.type.spec.mesh
    shards = dict(zip(one.runner.ranks(mesh), one._shards, strict=True))
    beside = next(iter(first._shards), None)
    made = [runner.library.array(shards[rank], beside=beside) for rank in runner.ranks(mesh)]
    found: ArrayValue = type(one).of_shards(one.type, tuple(made), runner)
    return found


def _make_unary(operator: Operator) -> Function:
    name = operator.name

    def function(x: Any, /) -> Any:
        return call(name, (x,))

    return function


def _make_binary(operator: Operator) -> Function:
    name = operator.name

    def function(x1: Any, x2: Any, /) -> Any:
        try:
            # The shortest way for two arrays whose operation is compiled. All else, numbers and
            # other libraries' arrays too, goes by `call`.
            found = x1.runner.calls[name, x1.type, x2.type]
        except (KeyError, AttributeError, TypeError):
            found = None
        is_known = found is not None and not found.factors
        if is_known and x2.runner is x1.runner and not recorders:
            return found.run(x1, x2)
        return call(name, operands(x1, x2))

    return function


def _make_any(operator: Operator) -> Function:
    name = operator.name

    def function(*arrays: Any, **attributes: Any) -> Any:
        return call(name, operands(*arrays), attributes)

    return function


def __getattr__(name: str) -> Any:
    """The function of an operator whose row has a `doc`, made when it is first used."""
    operator = operators.get(name)
    if operator is None or not operator.doc:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    shapes, attributes = operator.example or ((), {})
    makers = {} if attributes else {1: _make_unary, 2: _make_binary}
    function: Any = makers.get(len(shapes), _make_any)(operator)
    function.__name__ = function.__qualname__ = name
    function.__doc__ = operator.doc
    if operator.family == "elementwise":
        function.__doc__ += " Elementwise; operands broadcast, and may be Python numbers."
    if name in SHIPPED:  # A user's row may be replaced by another.
        globals()[name] = function
    return function


@of_arrays
def clip(x: Any, /, min: Any = None, max: Any = None) -> Any:
    """Numbers below `min` become `min`, those above `max` become `max`; None is no bound."""
    x, min, max = operands(x, min, max)
    if min is None and max is None:
        return call("positive", (x,)) if x.dtype.name != "bool" else x
    bounds = [one for one in (min, max) if one is not None]
    options = {"bounds": ("min",) * (min is not None) + ("max",) * (max is not None)}
    return call("clip", (x, *bounds), None, options)


@of_arrays
def where(condition: Any, x1: Any, x2: Any, /) -> Any:
    """`x1` where the condition holds, `x2` elsewhere; all three broadcast."""
    return call("where", operands(condition, x1, x2))
