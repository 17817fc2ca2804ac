"""Graphs: functions as values and the operations that compute them.

A `Graph` has values by number, some of which are inputs, operations in topological order, and
outputs. Its text is complete enough to be parsed::

    %0: float32[4, 8], %1: float32[8, 16]
    %2: float32[4, 16] = matmul(%0, %1) ([i, k], [k, j]) -> ([i, j]) {i=4, j=16, k=8} reduction={k}
    %3: float32[4] = sum(%2; axis=1) ([i, j]) -> ([i]) {i=4, j=16} reduction={j}
    return %3, %2

Passes take a graph and return a graph. A pass records its decisions in the graph:

    record              a function's graph, with the shardings that it asks for
    simplify            duplicate and unused operations are removed
    assign_shardings    every value has the sharding that a strategy chooses
    recompute           values are computed again to satisfy a memory limit
    insert_reshards     all reshards are operations
    decompose           products are split into pieces that overlap with their reshards

`trace_graph` estimates any of these graphs; `recompute` and `decompose`, which decide by estimates,
take such a trace. `compile_graph` makes a program of a graph with reshards: its steps, their order,
and the memory that they reuse.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import lru_cache
from operator import is_
from types import MappingProxyType
from typing import Any

from reshard._validation import check_type
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import NotationError, SpecError
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.backend import Library
from reshard.spmd.rules.sharding_rule import OpShardingRule

WITH_SHARDING = "with_sharding"
"""The operator whose result is its operand in a requested sharding."""

Spec = ShardingSpec | None
Shardings = tuple[tuple[Spec, ...], tuple[tuple[Spec, ...], ...]]
"""The sharding of each value, and for each operation those in which it reads its operands."""
NO_ATTRIBUTES: Mapping[Any, Any] = MappingProxyType({})


@lru_cache(maxsize=4096)
def identity_rule(shape: tuple[int, ...]) -> OpShardingRule:
    """Return the rule of an operator whose result has its operand's shape and sharding."""
    mapping = tuple((dim,) for dim in range(len(shape)))
    return OpShardingRule([mapping], [mapping], shape)


@dataclass(frozen=True, slots=True)
class BodyCosts:
    """The data movement and the memory of the body of a loop or branch.

    Args:
        moved_bytes: bytes received by all ranks together.
        held_bytes: the peak memory of each rank beyond the operands; under None that of all ranks
            that have no entry.
    """

    moved_bytes: int = 0
    held_bytes: Mapping[int | None, int] = field(default_factory=dict)

    def held_by(self, rank: int | None) -> int:
        """Return the peak memory of a rank beyond the operands, in bytes."""
        return self.held_bytes.get(rank, self.held_bytes.get(None, 0))

    def plus(self, types: Iterable[ArrayType]) -> BodyCosts:
        """Add the memory of arrays of these types."""
        held: dict[int | None, int] = {}
        for kind in types:
            # An array without a mesh is replicated on every rank.
            ranks = (None,) if kind.spec is None else kind.spec.mesh.devices
            for rank in ranks:
                shape = kind.shape if rank is None else kind.layout.local_shape(rank) or (0,)
                held[rank] = held.get(rank, 0) + math.prod(shape) * kind.dtype.itemsize_bytes
        everywhere = held.pop(None, 0)
        # None stands for all other ranks, so what they hold is added there as well.
        ranks_known = {None, *held, *self.held_bytes}
        return BodyCosts(
            self.moved_bytes,
            {rank: self.held_by(rank) + held.get(rank, 0) + everywhere for rank in ranks_known},
        )

    def maximum(self, other: BodyCosts) -> BodyCosts:
        """Return the maximum of both, separately for data movement and for each rank's memory."""
        ranks = {*self.held_bytes, *other.held_bytes}
        held = {rank: max(self.held_by(rank), other.held_by(rank)) for rank in ranks}
        return BodyCosts(max(self.moved_bytes, other.moved_bytes), held)


@dataclass(frozen=True, slots=True)
class Body:
    """The body of an operation that no operator executes: a loop, a branch, an eager function.

    Args:
        run: executes it: from the operands and their runner to the results.
        count_costs: from the operands' types to its costs; data-dependent sizes count as if the
            data were evenly distributed.
        meshes: those of the arrays inside.
        result_meshes: the mesh of each result; None if it is replicated everywhere.
    """

    run: Callable[[Sequence[Any], Any], Sequence[Any]]
    count_costs: Callable[[Sequence[ArrayType]], BodyCosts] = lambda types: BodyCosts()
    meshes: tuple[DeviceMesh, ...] = ()
    result_meshes: tuple[DeviceMesh | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Value:
    """An array of a graph.

    Args:
        index: its number in the graph.
        shape: the shape of the array.
        dtype: the name of its element type, such as float32.
        sharding: for an input, that in which it is given; after `assign_shardings`, that which the
            strategy chose. None if operations decide.

    >>> print(Value(2, (4, 16)))
    %2: float32[4, 16]
    """

    index: int
    shape: tuple[int, ...]
    dtype: str = "float32"
    sharding: Spec = None

    @property
    def type(self) -> ArrayType:
        """Its shape, element type and sharding."""
        return ArrayType(self.shape, as_dtype(self.dtype), self.sharding)

    def __str__(self) -> str:
        return f"%{self.index}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Operation:
    """One application of an operator.

    Args:
        operator: the operator's name.
        operands: numbers of the values it reads.
        results: numbers of the values it computes.
        rule: its sharding rule.
        attributes: those of the operator, such as `axis`.
        options: arguments of `reshard.spmd.shards.operation_call.call` that no rule depends on.
        target: for `with_sharding`, the requested sharding.
        like: for `with_sharding`, the input whose sharding is requested, whatever that is.
        body: for a loop, a branch or an eager function, its body.
        reads: the shardings in which a strategy has it read its operands; empty if it decides.
    """

    operator: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: OpShardingRule
    attributes: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRIBUTES)
    options: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRIBUTES)
    target: Spec = None
    like: int | None = None
    body: Body | None = None
    reads: tuple[Spec, ...] = ()

    @classmethod
    def with_sharding(
        cls, operand: int, result: int, shape: Sequence[int], target: ShardingSpec
    ) -> Operation:
        """Create an operation that reshards a value to a target."""
        rule = identity_rule(tuple(shape))
        return cls(WITH_SHARDING, (operand,), (result,), rule, target=target)

    def renumbered(self, new: Mapping[int, int]) -> Operation:
        """Return the operation with the numbers of its values replaced."""
        # Passes make as many operations as a graph has; `replace` takes twice as long.
        return Operation(
            self.operator,
            tuple([new[number] for number in self.operands]),
            tuple([new[number] for number in self.results]),
            self.rule,
            self.attributes,
            self.options,
            self.target,
            None if self.like is None else new.get(self.like),
            self.body,
            self.reads,
        )

    @property
    def text_attributes(self) -> dict[str, Any]:
        """The attributes as they are printed: element types by name, and the target."""
        texts = {
            name: value.name if isinstance(value, DType) else value
            for name, value in self.attributes.items()
        }
        return texts if self.target is None else {**texts, "sharding": str(self.target)}

    def __str__(self) -> str:
        words = ", ".join(f"%{operand}" for operand in self.operands)
        attributes = self.text_attributes
        if attributes:
            words += "; " + ", ".join(f"{name}={value!r}" for name, value in attributes.items())
        return f"{self.operator}({words}) {self.rule}"


@dataclass(frozen=True, slots=True)
class Graph:
    """A function as a graph of values and operations.

    Args:
        values: all of them, by their numbers.
        inputs: numbers of the function's arguments.
        operations: in topological order: each after those whose results it reads.
        outputs: numbers of the values that it returns; a value may occur several times.
        names: for a recorded function, the names of its inputs.
        constants: inputs that a recorded function brings along, by number: arrays and numbers.
        returned: the tree that a recorded function returned, with a `Value` for each array.
        library: the library of a recorded function's arrays.
        is_checked: whether it is known to be valid; passes make valid graphs of valid graphs.

    Raises:
        SpecError: a value that is read before it is computed, is computed twice, or does not exist;
            an operation whose number of operands or results, or their numbers of dimensions, differ
            from its rule.

    >>> text = '''%0: float32[4, 8], %1: float32[4, 8]
    ... %2: float32[4, 8] = add(%0, %1) ([i, j], [i, j]) -> ([i, j]) {i=4, j=8}
    ... return %2'''
    >>> graph = Graph.parse(text)
    >>> str(graph) == text, graph.operations[0].results
    (True, (2,))
    """

    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[int, ...]
    names: tuple[str, ...] = field(default=(), compare=False)
    constants: Mapping[int, Any] = field(default_factory=lambda: NO_ATTRIBUTES, compare=False)
    returned: Any = field(default=None, compare=False)
    library: Library | None = field(default=None, compare=False)
    is_checked: InitVar[bool] = False

    def __post_init__(self, is_checked: bool) -> None:
        if is_checked:
            return
        # Values are found by their number as an index, so numbers must be 0, 1, 2 and so on.
        numbers = [value.index for value in self.values]
        if numbers != list(range(len(numbers))):
            raise SpecError(f"values are numbered {numbers}; number them 0, 1, 2 and so on")
        defined = set(self.inputs)
        for operation in self.operations:
            for operand in operation.operands:
                if operand not in defined:
                    raise SpecError(
                        f"%{operand} of {operation} is read before it is made; order operations so "
                        "that each follows those it reads from"
                    )
            for result in operation.results:
                if result in defined or not 0 <= result < len(self.values):
                    raise SpecError(f"%{result} of {operation} is made twice, or is no value")
                defined.add(result)
            self._check_ranks(operation)
        for output in self.outputs:
            if output not in defined:
                raise SpecError(f"output %{output} is not made by any operation")

    @property
    def arguments(self) -> list[int]:
        """The numbers of the inputs that are not constants."""
        return [number for number in self.inputs if number not in self.constants]

    @property
    def input_types(self) -> tuple[ArrayType | None, ...]:
        """The type of each input; None for a Python number."""
        return tuple(
            None
            if isinstance(self.constants.get(number), int | float | complex)
            else self.values[number].type
            for number in self.inputs
        )

    @property
    def meshes(self) -> tuple[DeviceMesh, ...]:
        """The meshes that the function uses, in the order in which it names them."""
        specs = [self.values[number].sharding for number in self.inputs]
        meshes = [spec.mesh for spec in specs if spec is not None]
        for operation in self.operations:
            if operation.target is not None:
                meshes.append(operation.target.mesh)
            if operation.body is not None:
                meshes += operation.body.meshes
        return tuple(dict.fromkeys(meshes))

    @property
    def requested(self) -> dict[int, ShardingSpec]:
        """The shardings of inputs and those requested by `with_sharding`, by value."""
        specs = {n: self.values[n].sharding for n in self.inputs}
        specs |= {
            operation.results[0]: operation.target
            for operation in self.operations
            if operation.target is not None
        }
        return {number: spec for number, spec in specs.items() if spec is not None}

    @property
    def shardings(self) -> Shardings:
        """The shardings of all values and of the operands of all operations."""
        return (
            tuple(value.sharding for value in self.values),
            tuple(
                operation.reads or (None,) * len(operation.operands)
                for operation in self.operations
            ),
        )

    def has_same_operations(self, other: Graph) -> bool:
        """Return whether both graphs apply the same operators to values of the same numbers."""
        return len(self.operations) == len(other.operations) and all(
            mine.operator == theirs.operator and mine.operands == theirs.operands
            for mine, theirs in zip(self.operations, other.operations, strict=True)
        )

    def with_shardings(
        self, values: Sequence[Spec], reads: Sequence[Sequence[Spec]] | None = None
    ) -> Graph:
        """Return the graph with other shardings.

        Args:
            values: a sharding for each value.
            reads: for each operation those of its operands; all decide themselves if None.
        """
        updated = [
            value if value.sharding is spec else Value(value.index, value.shape, value.dtype, spec)
            for value, spec in zip(self.values, values, strict=True)
        ]
        if reads is None and all(map(is_, updated, self.values)):
            return self
        operations = self.operations
        if reads is not None:
            operations = tuple(
                operation
                if operation.reads == tuple(specs)
                else replace(operation, reads=tuple(specs))
                for operation, specs in zip(operations, reads, strict=True)
            )
        return replace(self, values=tuple(updated), operations=operations, is_checked=True)

    def selected(
        self,
        inputs: Sequence[int],
        operations: Sequence[Operation],
        outputs: Sequence[int],
        returned: Callable[[Mapping[int, int]], Any] = lambda numbers: None,
    ) -> Graph:
        """Return a graph of some of the operations, with values renumbered in their order.

        Args:
            inputs, operations, outputs: those of the new graph, in the numbers of this graph.
            returned: makes the tree that it returns, from the new numbers by old ones.
        """
        results = {number for operation in operations for number in operation.results}
        # Numbers follow the old order, so that the texts of both graphs can be compared.
        new = {old: index for index, old in enumerate(sorted({*inputs, *results}))}

        def renumbered(numbers: Iterable[int]) -> tuple[int, ...]:
            return tuple([new[number] for number in numbers])

        values = [self.values[old] for old in new]
        names = dict(zip(self.inputs, self.names, strict=False))
        return Graph(
            tuple([Value(index, v.shape, v.dtype, v.sharding) for index, v in enumerate(values)]),
            renumbered(inputs),
            tuple([operation.renumbered(new) for operation in operations]),
            renumbered(outputs),
            tuple([names.get(number, f"%{number}") for number in inputs]),
            MappingProxyType({new[n]: x for n, x in self.constants.items() if n in new}),
            returned(new),
            self.library,
            is_checked=True,
        )

    def last_uses(self) -> list[list[int]]:
        """Return, for each operation, the values last read by it, except inputs and outputs.

        >>> graph = Graph.parse('''%0: float32[4]
        ... %1: float32[4] = exp(%0) ([i]) -> ([i]) {i=4}
        ... %2: float32[4] = exp(%1) ([i]) -> ([i]) {i=4}
        ... return %2''')
        >>> graph.last_uses()
        [[], [1]]
        """
        # A result that nobody reads is freed at once; a dictionary keeps the last of equal keys.
        last = {
            value: index
            for index, operation in enumerate(self.operations)
            for value in (*operation.results, *operation.operands)
        }
        freed: list[list[int]] = [[] for _ in self.operations]
        # Inputs are the caller's, and outputs are returned.
        for value in last.keys() - {*self.inputs, *self.outputs}:
            freed[last[value]].append(value)
        return freed

    def _check_ranks(self, operation: Operation) -> None:
        numbers = (*operation.operands, *operation.results)
        mappings = operation.rule.tensors
        counts = len(operation.operands), len(operation.results)
        if counts != (len(operation.rule.operands), len(operation.rule.results)):
            raise SpecError(
                f"{operation} has {counts[0]} operands and {counts[1]} results; its rule is for "
                f"{len(operation.rule.operands)} and {len(operation.rule.results)}"
            )
        for number, mapping in zip(numbers, mappings, strict=True):
            if len(self.values[number].shape) != len(mapping):
                raise SpecError(
                    f"{self.values[number]} of {operation} has {len(self.values[number].shape)} "
                    f"dimensions; the rule has {len(mapping)}"
                )

    @classmethod
    def of(
        cls,
        inputs: Sequence[Sequence[int]],
        operations: Iterable[tuple[str, Sequence[int], OpShardingRule | str]],
        outputs: Sequence[int],
    ) -> Graph:
        """Create a graph of float32 values whose shapes are those of the rules.

        Args:
            inputs: the arguments' shapes; they are values 0, 1 and so on.
            operations: the name, operands and rule of each; its results are the next values.
            outputs: numbers of the values it returns.

        >>> print(Graph.of([(4, 8)], [("exp", [0], "([i, j]) -> ([i, j]) {i=4, j=8}")], [1]))
        %0: float32[4, 8]
        %1: float32[4, 8] = exp(%0) ([i, j]) -> ([i, j]) {i=4, j=8}
        return %1
        """
        values = [Value(number, tuple(shape)) for number, shape in enumerate(inputs)]
        nodes = []
        for name, operands, rule in operations:
            rule = OpShardingRule.parse(rule) if isinstance(rule, str) else rule
            results = range(len(values), len(values) + len(rule.results))
            values += [
                Value(number, shape)
                for number, shape in zip(results, rule.result_shapes, strict=True)
            ]
            nodes.append(Operation(name, tuple(operands), tuple(results), rule))
        return cls(tuple(values), tuple(range(len(inputs))), tuple(nodes), tuple(outputs))

    @classmethod
    def parse(cls, text: str) -> Graph:
        """Parse the text of a graph.

        Raises:
            NotationError: a line that is not an operation.
            SpecError: a graph that cannot be.
        """
        check_type(text, str, "text of a graph", "give a str", NotationError)
        lines = [line.strip() for line in text.strip().splitlines()]
        if len(lines) < 2 or not lines[-1].startswith("return"):
            raise NotationError(
                f"{text!r} is not a graph; write its inputs, a line an operation, and return %0"
            )
        values = _parse_values(lines[0])
        inputs = tuple(value.index for value in values)
        operations = []
        for line in lines[1:-1]:
            match = re.fullmatch(r"(?P<results>[^=]*?) = (?P<name>\w+)\((?P<rest>.*)", line)
            # The rule follows the first `) `.
            arguments, close, rule = match["rest"].partition(") ") if match else ("", "", "")
            if match is None or not close:
                raise NotationError(
                    f"{line!r} is not an operation; write %2: float32[4] = exp(%1) and its rule"
                )
            results = _parse_values(match["results"])
            operands, _, attributes = arguments.partition(";")
            operations.append(
                Operation(
                    match["name"],
                    _parse_numbers(operands),
                    tuple(value.index for value in results),
                    OpShardingRule.parse(rule),
                    MappingProxyType(_parse_attributes(attributes)),
                )
            )
            values += results
        ordered = tuple(sorted(values, key=lambda value: value.index))
        outputs = _parse_numbers(lines[-1].removeprefix("return"))
        return cls(ordered, inputs, tuple(operations), outputs)

    def __str__(self) -> str:
        lines = [", ".join(str(self.values[number]) for number in self.inputs)]
        for operation in self.operations:
            results = ", ".join(str(self.values[number]) for number in operation.results)
            lines.append(f"{results} = {operation}")
        return "\n".join([*lines, "return " + ", ".join(f"%{n}" for n in self.outputs)])


def _parse_values(text: str) -> list[Value]:
    matches = re.findall(r"%(\d+): (\w+)\[([\d, ]*)\]", text)
    values = [
        Value(int(number), tuple(int(size) for size in shape.split(",") if size.strip()), dtype)
        for number, dtype, shape in matches
    ]
    # findall skips what does not match; written again, the values show whether anything was.
    if ", ".join(map(str, values)) != text.strip():
        raise NotationError(f"{text!r} is not a list of values; write %0: float32[4, 8], %1: ...")
    return values


def _parse_numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(re.fullmatch(r"%\d+", word) for word in words):
        raise NotationError(f"{text!r} is not a list of values; write %0, %1")
    return tuple(int(word[1:]) for word in words)


def _parse_attributes(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        # Read as keywords of a call, so that Python finds where each ends; only literals are
        # evaluated.
        call = ast.parse(f"f({text})", mode="eval").body
        # Text such as `1) + f(2` would parse as something other than a single call.
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(text)
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError):
        raise NotationError(f"{text!r} are not attributes; write axis=1, keepdims=True") from None
