"""Graph recording: the graph of a Python function.

The function is called once with arrays that have no elements (`abstract_runner`). A recorder sees
every operation, as eager arrays carry them out, and writes it down:

1. every array is a value of the graph, known by the object that it is;
2. an operation's rule is that of its operator for the operands' shapes;
3. `x.shard(spec)` is an operation `with_sharding`, whose result has that sharding;
4. arrays and numbers that the function brings along are inputs too: its constants.

A recorded function can be carried out again, on arrays with elements or without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.array_type import ArrayType
from reshard.spmd.arrays.argument_tree import leaves, replaced
from reshard.spmd.arrays.sharded_array import ShardedArray, plain_spec
from reshard.spmd.local.library import Library, library_of
from reshard.spmd.operators.table import operator_of
from reshard.spmd.propagation.graph import WITH_SHARDING, Graph, Operation, Value
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import (
    Attributes,
    CompiledCall,
    recorders,
    recording,
)
from reshard.spmd.shards.runner import runner_for
from reshard.spmd.tracing.abstract_runner import AbstractRunner
from reshard.spmd.tracing.traced_operation import WithinCosts


@dataclass(frozen=True, slots=True)
class RunFunction:
    """What carries out an operation that is no operator: a loop, a branch, what needs elements.

    Args:
        function: from arrays and their runner to arrays.
        count_within: from the operands' types to what it moves and holds within; what elements
            decide is counted for even elements.
        meshes: of the arrays within.
    """

    function: Callable[[Sequence[Any], Any], Sequence[Any]]
    count_within: Callable[[Sequence[ArrayType]], WithinCosts] = lambda types: WithinCosts()
    meshes: tuple[DeviceMesh, ...] = ()

    def __call__(self, arrays: Sequence[Any], runner: Any) -> Sequence[Any]:
        return self.function(arrays, runner)


@dataclass(frozen=True, slots=True)
class ValuePlace:
    """The place of an array in arguments or results: the number of its value."""

    value: int


def abstract(
    shape: Iterable[int], dtype: object = "float32", spec: ShardingSpec | None = None
) -> ArrayType:
    """An array without elements, for `trace`: a shape, an element type and a sharding.

    Raises:
        UsageError: an unknown element type; an invalid shape or sharding.
        SpecError: a sharding with another number of dimensions.

    >>> from reshard import DeviceMesh, spec
    >>> abstract((64, 32), "bfloat16", spec(DeviceMesh.of(x=2), "x, -"))
    ArrayType(bfloat16[64, 32], 'x, -')
    """
    sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in sizes):
        raise UsageError(f"{shape!r} is no shape; give whole numbers, 0 or more, as in (64, 32)")
    if spec is not None and not isinstance(spec, ShardingSpec):
        raise UsageError(f"{spec!r} is no sharding; give reshard.spec(mesh, 'x, -')")
    return ArrayType(sizes, as_dtype(dtype), spec)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """The call that carries out an operation of a graph.

    Args:
        name: of the operator.
        attributes, options: as `reshard.spmd.shards.operation_call.call` takes them.
        target: the sharding of a `with_sharding`; None for other operators.
        like: the input where the result of a `with_sharding` is to lie, whatever sharding that has,
            by number; None where the target was asked for by itself.
        run: of an operation that is a function itself (a loop or a branch); None for operators.
        meshes: of its results; None for those that are whole on every device.
    """

    name: str
    attributes: Attributes
    options: Attributes
    target: ShardingSpec | None = None
    like: int | None = None
    run: RunFunction | None = None
    meshes: tuple[DeviceMesh | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """A function's graph, and what is needed to carry it out again. Make one with `record`.

    Args:
        graph: of the function.
        names: what the function calls its inputs, in their order.
        types: of its inputs in their order, with the shardings given; None for a number.
        constants: inputs that the function brings along: arrays and numbers, by value number.
        recorded_calls: one an operation.
        arguments: what the function was called with, the places of arrays being their values.
        results: what it returned, likewise.
        library: of its arrays.
    """

    graph: Graph
    names: tuple[str, ...]
    types: tuple[ArrayType | None, ...]
    constants: Mapping[int, Any]
    recorded_calls: tuple[RecordedCall, ...]
    arguments: Any
    results: Any
    library: Library


class GraphRecorder:
    """Writes operations of one runner down, see `reshard.spmd.shards.operation_call.Recorder`."""

    def __init__(self, runner: AbstractRunner) -> None:
        self.runner = runner
        self.values: list[Value] = []
        self.inputs: list[int] = []
        self.names: list[str] = []
        self.types: list[ArrayType | None] = []
        self.constants: dict[int, Any] = {}
        self.operations: list[Operation] = []
        self.recorded_calls: list[RecordedCall] = []
        self._number_of: dict[Any, int] = {}
        # Inputs, and what is the same in another array.
        self._input_of: dict[int, int] = {}
        # Arrays are known by their identity, so none of them may be freed.
        self._kept: list[Any] = []

    @property
    def kinds(self) -> tuple[ArrayType | None, ...]:
        """The types of all values, in the shardings that they have; None for numbers."""
        return tuple(one.type if isinstance(one, ArrayValue) else None for one in self._kept)

    def input(self, array: Any, kind: ArrayType | None, name: str) -> int:
        """A new input of the graph."""
        index = self._add_value(array, () if kind is None else kind.shape, _dtype_name(array, kind))
        self.inputs.append(index)
        self._input_of[index] = index
        self.names.append(name)
        self.types.append(kind)
        return index

    def _add_value(self, array: Any, shape: tuple[int, ...], dtype: str) -> int:
        index = len(self.values)
        self.values.append(Value(index, shape, dtype))
        self._number_of[_identify(array)] = index
        self._kept.append(array)
        return index

    def value_of(self, array: Any) -> int:
        """The number of an array; one that is not known is a constant."""
        found = self._number_of.get(_identify(array))
        if found is not None:
            return found
        kind = array.type if isinstance(array, ArrayValue) else None
        index = self.input(array, kind, "constant" if kind is not None else repr(array))
        self.constants[index] = array
        return index

    def record(
        self, call: CompiledCall, operands: Sequence[Any], results: Sequence[ArrayValue]
    ) -> None:
        """An operation; one on constants alone was carried out, and its result is a constant."""
        # Arrays with elements have another runner.
        if results[0].runner is not self.runner:
            return
        shapes = [() if one is None else one.shape for one in call.operands]
        rule = operator_of(call.name).rule(shapes, **call.attributes)
        action = RecordedCall(call.name, call.attributes, call.options)
        self.add(action, operands, results, rule, call.attributes)

    def record_reshard(self, operand: ArrayValue, result: ArrayValue) -> None:
        """A sharding that the function asks for."""
        spec = result.type.spec
        if result.runner is not self.runner or spec is None:
            return
        mapping = tuple((dim,) for dim in range(operand.type.ndim))
        rule = OpShardingRule([mapping], [mapping], operand.type.shape)
        action = RecordedCall(WITH_SHARDING, {}, {}, spec)
        self.add(action, [operand], [result], rule, {"sharding": str(spec)})

    def record_end(self, result: ArrayValue, like: ArrayValue) -> None:
        """What was just resharded is to lie where an input does."""
        made, input_ = (self._number_of.get(_identify(one)) for one in (result, like))
        if made is None or input_ is None or self.operations[-1].results != (made,):
            return
        known = self._input_of.get(input_)
        self.recorded_calls[-1] = replace(self.recorded_calls[-1], like=known)

    def add(
        self,
        action: RecordedCall,
        operands: Sequence[Any],
        results: Sequence[ArrayValue],
        rule: OpShardingRule,
        attributes: Attributes,
    ) -> None:
        """A new operation of the graph."""
        reads = tuple([self.value_of(one) for one in operands])
        makes = tuple(
            [self._add_value(one, one.type.shape, one.type.dtype.name) for one in results]
        )
        said = {name: _as_text(value) for name, value in attributes.items()}
        self.operations.append(Operation(action.name, reads, makes, rule, MappingProxyType(said)))
        self.recorded_calls.append(action)
        if action.name == "identity" and reads[0] in self._input_of:
            self._input_of[makes[0]] = self._input_of[reads[0]]

    def add_run(
        self,
        name: str,
        run: RunFunction,
        operands: Sequence[Any],
        kinds: Sequence[ArrayType],
        attributes: Attributes = MappingProxyType({}),
    ) -> list[Any]:
        """The results, of these types, of a new operation that is no operator."""
        results = [self.runner.array(kind, ShardedArray) for kind in kinds]
        # Nothing propagates through it: each dimension has a factor of its own.
        sizes: list[int] = []

        def mapping(kind: ArrayType) -> list[list[int]]:
            sizes.extend(kind.shape)
            return [[len(sizes) - kind.ndim + dim] for dim in range(kind.ndim)]

        read = [mapping(one.type) for one in operands]
        made = [mapping(kind) for kind in kinds]
        rule = OpShardingRule(read, made, sizes)
        meshes = tuple(None if kind.spec is None else kind.spec.mesh for kind in kinds)
        action = RecordedCall(name, {}, {}, run=run, meshes=meshes)
        self.add(action, operands, results, rule, attributes)
        for one in recorders:
            if hasattr(one, "record_operands"):
                one.record_operands(operands)
        return results


def listening_recorder() -> GraphRecorder | None:
    """The recorder of the innermost function that is traced; None where none is."""
    found = [one for one in recorders if isinstance(one, GraphRecorder)]
    return found[-1] if found else None


def is_recorded(runner: Any) -> bool:
    """Whether what a runner without elements carries out is written down.

    So it is where a function that was recorded is carried out again within another one, for its
    gradient.
    """
    recorder = listening_recorder()
    return recorder is not None and recorder.runner is runner


def _identify(array: Any) -> Any:
    """The key of an array is its identity, that of a number its value and type."""
    # repr tells 1, 1.0 and True apart, which are equal as keys of a dictionary.
    return id(array) if isinstance(array, ArrayValue) else repr(array)


def _as_text(value: Any) -> Any:
    return value.name if isinstance(value, DType) else value


def _dtype_name(array: Any, kind: ArrayType | None) -> str:
    if kind is not None:
        return kind.dtype.name
    names = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
    return names[type(array)]


def type_of(leaf: Any) -> ArrayType | None:
    """The type of the array that an argument is, or stands for; None for any other argument."""
    if isinstance(leaf, ArrayType):
        return leaf
    if isinstance(leaf, ArrayValue):
        return leaf.type
    found = library_of(leaf)
    return None if found is None else ArrayType(leaf.shape, found.dtype_of(leaf))


def filled(tree: Any, arrays: Mapping[int, Any] | Sequence[Any]) -> Any:
    """Arguments or results with the arrays of their values at their places."""
    return replaced(tree, lambda leaf: arrays[leaf.value] if isinstance(leaf, ValuePlace) else leaf)


def _name_leaves(
    function: Callable[..., Any], arguments: Sequence[Any]
) -> Iterator[tuple[str, Any]]:
    """Each leaf of the arguments, with what the function calls it."""
    try:
        bound = inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise UsageError(
            f"{len(arguments)} arguments for the function {function!r}: {error}; give what it is "
            "called with"
        ) from error
    except ValueError:  # A function that does not tell its parameters.
        yield from leaves(list(arguments), "argument")
        return
    for name, argument in bound.arguments.items():
        yield from leaves(argument, name)


def record(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    has_others: bool = False,
    runner: AbstractRunner | None = None,
) -> Recording:
    """The graph of a function.

    Args:
        function: of arrays in shards.
        arguments: arrays in shards or of a library, types from `abstract`, and lists, tuples and
            dictionaries of them; all else is passed as it is.
        has_others: whether it may return other things than arrays, which are results as they are.
        runner: of a traced function around it, whose arrays it may read as constants; a new one
            when None.

    Raises:
        UsageError: a function that asks for elements, or returns none but other things.

    >>> from reshard.spmd.functions.elementwise import exp
    >>> print(record(lambda x: exp(x) * 2, [abstract((4, 8))]).graph)
    %0: float32[4, 8], %2: int64[]
    %1: float32[4, 8] = exp(%0) ([i, j]) -> ([i, j]) {i=4, j=8}
    %3: float32[4, 8] = multiply(%1, %2) ([i, j], []) -> ([i, j]) {i=4, j=8}
    return %3
    """
    runner = runner or AbstractRunner(library_for(arguments))
    recorder = GraphRecorder(runner)
    # 1. Arguments become abstract arrays, each an input of the graph.
    arrays: list[Any] = []
    names = [name for name, _ in _name_leaves(function, arguments)]

    def entered(leaf: Any) -> Any:
        # `leaves` and `replaced` go through arguments in one order.
        name = names.pop(0)
        kind = type_of(leaf)
        if kind is None:
            return leaf
        # The function sees where elements are; the graph keeps what is open, for propagation.
        plain = kind if kind.spec is None else kind.with_spec(plain_spec(kind.spec))
        arrays.append(runner.array(plain, ShardedArray))
        return ValuePlace(recorder.input(arrays[-1], kind, name))

    places = replaced(list(arguments), entered)
    given = filled(places, arrays)
    # 2. The call, every operation of which is recorded.
    with recording(recorder):
        returned = function(*given)

    # 3. Results become the numbers of their values.
    def left(leaf: Any) -> Any:
        if not isinstance(leaf, ArrayValue):
            if has_others:
                return leaf
            raise UsageError(
                f"the function returned {leaf!r}, which is no array in shards; return arrays, or "
                "lists, tuples and dictionaries of them"
            )
        return ValuePlace(recorder.value_of(leaf))

    results = replaced(returned, left)
    graph = Graph(
        tuple(recorder.values),
        tuple(recorder.inputs),
        tuple(recorder.operations),
        tuple(place.value for _, place in leaves(results) if isinstance(place, ValuePlace)),
    )
    return Recording(
        graph,
        tuple(recorder.names),
        tuple(recorder.types),
        MappingProxyType(recorder.constants),
        tuple(recorder.recorded_calls),
        places,
        results,
        runner.computing,
    )


def library_for(arguments: Sequence[Any]) -> Library:
    """The library of the first array in shards; where there is none, of arrays that are made."""
    given = [leaf for _, leaf in leaves(list(arguments)) if type_of(leaf) is not None]
    sharded = (one.runner for one in given if isinstance(one, ArrayValue))
    return next(sharded, runner_for(*given[:1])).computing
