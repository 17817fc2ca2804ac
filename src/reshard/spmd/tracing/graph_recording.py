"""Graph recording: the graph of a Python function.

The function is called once with arrays that have no elements (`abstract_runner`). A recorder
observes each eager operation and appends it to the graph:

1. each array is a value of the graph, identified by the object;
2. the rule of an operation is that of its operator for the operands' shapes;
3. `x.shard(spec)` is an operation `with_sharding`, whose result has that sharding;
4. arrays and numbers from the enclosing scope are inputs too: the graph's constants.

`interpret` (in `trace`) executes a recorded graph on arrays with or without elements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from reshard._validation import check_type
from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.arrays.argument_tree import leaves, replaced
from reshard.spmd.arrays.sharded_array import ShardedArray
from reshard.spmd.core.array_type import ArrayType, plain_spec
from reshard.spmd.core.backend import Library, library_of
from reshard.spmd.graph import NO_ATTRIBUTES, Body, Graph, Operation, Value
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import (
    Attributes,
    CompiledCall,
    Recorder,
    recorders,
    recording,
)
from reshard.spmd.shards.runner import runner_for
from reshard.spmd.tracing.abstract_runner import AbstractRunner


def abstract(
    shape: Iterable[int], dtype: object = "float32", spec: ShardingSpec | None = None
) -> ArrayType:
    """Return an array without elements, for `trace`: a shape, an element type and a sharding.

    Raises:
        UsageError: an unknown element type; an invalid shape or sharding.
        SpecError: a sharding with another number of dimensions.

    >>> from reshard import DeviceMesh, spec
    >>> abstract((64, 32), "bfloat16", spec(DeviceMesh.of(x=2), "x, -"))
    ArrayType(bfloat16[64, 32], 'x, -')
    """
    sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in sizes):
        raise UsageError(
            f"shape {shape!r} is not valid; give whole numbers, 0 or more, as in (64, 32)"
        )
    if spec is not None:
        check_type(spec, ShardingSpec, "sharding", "give reshard.spec(mesh, 'x, -')")
    return ArrayType(sizes, as_dtype(dtype), spec)


class GraphRecorder(Recorder):
    """A recorder that appends the operations of a runner to a graph."""

    takes_bodies = True

    def __init__(self, runner: AbstractRunner) -> None:
        self.runner = runner
        self.values: list[Value] = []
        self.inputs: list[int] = []
        self.names: list[str] = []
        self.constants: dict[int, Any] = {}
        self.operations: list[Operation] = []
        self._number_of: dict[Any, int] = {}
        # Inputs, and the identities of inputs.
        self._input_of: dict[int, int] = {}
        # Arrays are identified by their addresses, so none of them may be freed.
        self._kept: list[Any] = []

    @property
    def types(self) -> tuple[ArrayType | None, ...]:
        """The types of all values, in their shardings at recording time; None for numbers."""
        return tuple(x.type if isinstance(x, ArrayValue) else None for x in self._kept)

    def graph(self, returned: Any) -> Graph:
        """Return the graph so far of a function that returns a tree with its values."""
        outputs = [leaf.index for _, leaf in leaves(returned) if isinstance(leaf, Value)]
        return Graph(
            tuple(self.values),
            tuple(self.inputs),
            tuple(self.operations),
            tuple(outputs),
            tuple(self.names),
            MappingProxyType(self.constants),
            returned,
            self.runner.computing,
            is_checked=True,
        )

    def input(self, array: Any, kind: ArrayType | None, name: str) -> Value:
        """Add an input; `kind` is None for a Python number."""
        if kind is None:
            value = self._add_value(array, (), _NUMBER_TYPES[type(array)])
        else:
            value = self._add_value(array, kind.shape, kind.dtype.name, kind.spec)
        self.inputs.append(value.index)
        self._input_of[value.index] = value.index
        self.names.append(name)
        return value

    def _add_value(
        self, array: Any, shape: tuple[int, ...], dtype: str, spec: ShardingSpec | None = None
    ) -> Value:
        value = Value(len(self.values), shape, dtype, spec)
        self.values.append(value)
        self._number_of[_identify(array)] = value.index
        self._kept.append(array)
        return value

    def value_of(self, array: Any) -> Value:
        """Return the value of an array, which is a new constant if it is unknown."""
        number = self._number_of.get(_identify(array))
        if number is not None:
            return self.values[number]
        kind = array.type if isinstance(array, ArrayValue) else None
        value = self.input(array, kind, "constant" if kind is not None else repr(array))
        self.constants[value.index] = array
        return value

    def record(
        self, call: CompiledCall, operands: Sequence[Any], results: Sequence[ArrayValue]
    ) -> None:
        """Append an operation. The result of an operation on constants alone is a constant."""
        # Arrays with elements have another runner. Its own refuses operators without a rule.
        if results[0].runner is not self.runner or call.rule is None:
            return
        self._add(call.name, call.rule, operands, results, call.attributes, call.options)

    def record_reshard(self, operand: ArrayValue, result: ArrayValue) -> None:
        """Append a `with_sharding`."""
        spec = result.type.spec
        if result.runner is self.runner and spec is not None:
            number = self.value_of(operand).index
            result_number = self._add_value(
                result, operand.type.shape, operand.type.dtype.name
            ).index
            shape = operand.type.shape
            self.operations.append(Operation.with_sharding(number, result_number, shape, spec))

    def record_end(self, result: ArrayValue, like: ArrayValue) -> None:
        """Mark the last `with_sharding` as requesting the sharding of an input."""
        result_number, input_ = (self._number_of.get(_identify(x)) for x in (result, like))
        if (
            result_number is None
            or input_ is None
            or self.operations[-1].results != (result_number,)
        ):
            return
        self.operations[-1] = replace(self.operations[-1], like=self._input_of.get(input_))

    def _add(
        self,
        name: str,
        rule: OpShardingRule,
        operands: Sequence[Any],
        results: Sequence[ArrayValue],
        attributes: Attributes,
        options: Attributes = NO_ATTRIBUTES,
        body: Body | None = None,
    ) -> None:
        """Append an operation."""
        reads = tuple([self.value_of(x).index for x in operands])
        makes = tuple([self._add_value(x, x.type.shape, x.type.dtype.name).index for x in results])
        operation = Operation(name, reads, makes, rule, attributes, options, body=body)
        self.operations.append(operation)
        if name == "identity" and reads[0] in self._input_of:
            self._input_of[makes[0]] = self._input_of[reads[0]]

    def add_body(
        self,
        name: str,
        body: Body,
        operands: Sequence[Any],
        types: Sequence[ArrayType],
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> list[Any]:
        """Append an operation with a body, and return its results, which have these types."""
        results = [self.runner.array(kind, ShardedArray) for kind in types]
        # Nothing propagates through it: each dimension has a factor of its own.
        sizes: list[int] = []

        def mapping(kind: ArrayType) -> list[list[int]]:
            sizes.extend(kind.shape)
            return [[len(sizes) - kind.ndim + dim] for dim in range(kind.ndim)]

        read = [mapping(x.type) for x in operands]
        rule = OpShardingRule(read, [mapping(kind) for kind in types], sizes)
        meshes = tuple(None if kind.spec is None else kind.spec.mesh for kind in types)
        body = replace(body, result_meshes=meshes)
        self._add(name, rule, operands, results, attributes, body=body)
        for recorder in recorders.active:
            recorder.record_operands(operands)
        return results


_NUMBER_TYPES = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}


def listening_recorder() -> GraphRecorder | None:
    """Return the recorder of the innermost traced function, or None outside of tracing."""
    graph_recorders = [
        recorder for recorder in recorders.active if isinstance(recorder, GraphRecorder)
    ]
    return graph_recorders[-1] if graph_recorders else None


def is_recorded(runner: Any) -> bool:
    """Return whether the operations of an abstract runner are recorded.

    They are when a recorded function is executed again inside another, for its gradient.
    """
    recorder = listening_recorder()
    return recorder is not None and recorder.runner is runner


def _identify(array: Any) -> Any:
    """Return a key: the identity of an array, or the value and type of a number."""
    # repr distinguishes 1, 1.0 and True, which are equal as keys of a dictionary.
    return id(array) if isinstance(array, ArrayValue) else repr(array)


def type_of(leaf: Any) -> ArrayType | None:
    """Return the type of an array or abstract array; None for any other argument."""
    if isinstance(leaf, ArrayType):
        return leaf
    if isinstance(leaf, ArrayValue):
        return leaf.type
    library = library_of(leaf)
    return None if library is None else ArrayType(leaf.shape, library.dtype_of(leaf))


def filled(tree: Any, arrays: Mapping[int, Any] | Sequence[Any]) -> Any:
    """Replace the values in a tree of arguments or results with arrays, by number."""
    return replaced(tree, lambda leaf: arrays[leaf.index] if isinstance(leaf, Value) else leaf)


def filled_in_order(tree: Any, arrays: Iterable[Any]) -> Any:
    """Replace the values in a tree of results with arrays, in the order of the values."""
    left = iter(arrays)
    return replaced(tree, lambda leaf: next(left) if isinstance(leaf, Value) else leaf)


def _name_leaves(
    function: Callable[..., Any], arguments: Sequence[Any]
) -> Iterator[tuple[str, Any]]:
    """Yield each leaf of the arguments with its name in the function."""
    try:
        bound = inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise UsageError(
            f"{len(arguments)} arguments for the function {function!r}: {error}; give what it is "
            "called with"
        ) from error
    except ValueError:  # A function without a signature.
        yield from leaves(list(arguments), "argument")
        return
    for name, argument in bound.arguments.items():
        yield from leaves(argument, name)


def record(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    has_others: bool = False,
    runner: AbstractRunner | None = None,
) -> Graph:
    """Record the graph of a function.

    Args:
        function: a function of sharded arrays.
        arguments: arrays in shards or of a library, types from `abstract`, and lists, tuples and
            dictionaries of them; everything else is passed unchanged.
        has_others: whether it may also return leaves that are not arrays, which are kept.
        runner: that of an enclosing traced function, whose arrays it may read as constants; if
            None, a new runner.

    Raises:
        UsageError: a function that reads elements, or that returns something other than arrays.

    >>> from reshard.spmd.ops.elementwise import exp
    >>> print(record(lambda x: exp(x) * 2, [abstract((4, 8))]))
    %0: float32[4, 8], %2: int64[]
    %1: float32[4, 8] = exp(%0) ([i, j]) -> ([i, j]) {i=4, j=8}
    %3: float32[4, 8] = multiply(%1, %2) ([i, j], []) -> ([i, j]) {i=4, j=8}
    return %3
    """
    runner = runner or AbstractRunner(library_for(arguments))
    recorder = GraphRecorder(runner)
    # 1. Arguments become abstract arrays, each an input of the graph.
    names = [name for name, _ in _name_leaves(function, arguments)]

    def enter(leaf: Any) -> Any:
        # `leaves` and `replaced` visit arguments in the same order.
        name = names.pop(0)
        kind = type_of(leaf)
        if kind is None:
            return leaf
        # The function sees the current sharding; the graph keeps open dimensions for propagation.
        plain = kind if kind.spec is None else kind.with_spec(plain_spec(kind.spec))
        array = runner.array(plain, ShardedArray)
        recorder.input(array, kind, name)
        return array

    entered = replaced(list(arguments), enter)
    # 2. Every operation of the call is recorded.
    with recording(recorder):
        returned = function(*entered)

    # 3. Returned arrays become values.
    def leave(leaf: Any) -> Any:
        if isinstance(leaf, ArrayValue):
            return recorder.value_of(leaf)
        if has_others:
            return leaf
        raise UsageError(
            f"the function returned {leaf!r}, which is not an array in shards; return arrays, or "
            "lists, tuples and dictionaries of them"
        )

    return recorder.graph(replaced(returned, leave))


def library_for(arguments: Sequence[Any]) -> Library:
    """Return the library of the first sharded array, or of new arrays if there is none."""
    arrays = [leaf for _, leaf in leaves(list(arguments)) if type_of(leaf) is not None]
    sharded = (x.runner for x in arrays if isinstance(x, ArrayValue))
    return next(sharded, runner_for(*arrays[:1])).computing
