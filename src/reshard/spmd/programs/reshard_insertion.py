"""Reshard insertion: a graph in which every reshard is an operation.

    %2 = matmul(%0, %1)             %3 = with_sharding(%0)      %0 moves to where the product runs
                                    %2 = matmul(%3, %1)
                                    %4 = with_sharding(%2)      its sum over devices is reduced

Operands move to where a strategy wants them, and from there to what the operator runs with. A value
moves to a sharding once, however many operations read it so; a `with_sharding` of a value that is
in the sharding already is removed.

A graph that is executed again by `interpret` keeps some reshards in their operations: halos, which
operators find themselves, and those that move nothing between devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from reshard.sharding import ShardingSpec
from reshard.spmd.arrays.argument_tree import replaced
from reshard.spmd.core.array_type import ArrayType, replicated
from reshard.spmd.core.operator import find_operator
from reshard.spmd.graph import Graph, Operation, Spec, Value
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import CompiledCall
from reshard.spmd.tracing.abstract_runner import AbstractRunner
from reshard.spmd.tracing.trace import abstract_inputs, interpret


class ReshardInsertion:
    """Writes the graph with reshards, from the operations that it observes.

    Args:
        graph: which `interpret` executes while this observes it.
        is_final: whether the new graph is compiled, so that all reshards are operations; else it
            is executed by `interpret` again.

    Attributes:
        calls: for each operation of the new graph, the call that executed it; None for a reshard
            and for a body.
        operands: for each, the types of its operands in the shardings that it reads, and numbers as
            they are.
        places: for each, the place of the operation of `graph` that it is for.
        types: the types of the values of the new graph that are arrays, by number.
    """

    def __init__(self, graph: Graph, is_final: bool = True) -> None:
        self.calls: list[CompiledCall | None] = []
        self.operands: list[tuple[Any, ...]] = []
        self.places: list[int] = []
        # Kept, because it takes long to make the types of values anew.
        self.types: dict[int, ArrayType] = {
            number: kind
            for number, kind in zip(graph.inputs, graph.input_types, strict=True)
            if kind is not None
        }
        self._graph = graph
        self._is_final = is_final
        self._values = list(graph.values)
        self._operations: list[Operation] = []
        # The new number of each value, which is another where it is resharded when it is made.
        self._numbers = {number: number for number in graph.inputs}
        self._moved: dict[tuple[int, ShardingSpec], int] = {}
        self._place = -1

    @cached_property
    def graph(self) -> Graph:
        """The graph with reshards, once all operations were observed.

        Every value has the sharding in which it is made.
        """

        def renumber(leaf: Any) -> Any:
            return self._values[self._numbers[leaf.index]] if isinstance(leaf, Value) else leaf

        return replace(
            self._graph,
            values=tuple(self._values),
            operations=tuple(self._operations),
            outputs=tuple(self.numbers(self._graph.outputs)),
            returned=replaced(self._graph.returned, renumber),
            is_checked=True,
        )

    def numbers(self, values: Sequence[int]) -> list[int]:
        """Return the numbers in the new graph of inputs and outputs of the other graph."""
        return [self._numbers[number] for number in values]

    @property
    def looks_at_elements(self) -> bool:
        """Whether elements may be unforeseen: whether any call looks at elements of its factors."""
        return any(called is not None and called.looks_at_elements for called in self.calls)

    def observe(
        self,
        operation: Operation,
        called: CompiledCall | None,
        inputs: Sequence[Any],
        placed: Sequence[Any],
        outputs: Sequence[Any],
        results: Sequence[Any],
    ) -> None:
        """Append an operation and the reshards around it; see `Observe`."""
        self._place += 1
        # Executed again, an operator would look for the halos of operands that have them already.
        moves = self._is_final or find_operator(operation.operator).placed is None
        input_types, types = (
            tuple([x.type if isinstance(x, ArrayValue) else x for x in arrays])
            for arrays in (inputs, placed)
        )
        operands = [self._numbers[number] for number in operation.operands]
        if moves:
            specs = [kind.spec if isinstance(kind, ArrayType) else None for kind in types]
            operands = list(map(self._move, operands, input_types, specs))
        if moves and called is not None:
            operands = list(map(self._move, operands, types, called.runs_with))
        if operation.target is not None:
            (number,), (x,), (at,) = operation.results, outputs, operands
            self._numbers[number] = self._move(at, x.type, operation.target, number)
            return
        kinds = [x.type for x in outputs] if called is None else called.made
        for number, kind in zip(operation.results, kinds, strict=True):
            self._set_value(number, kind)
        if operands != list(operation.operands):
            operation = replace(operation, operands=tuple(operands))
        self._add(operation, types, called)
        for number, kind, x, there in zip(operation.results, kinds, outputs, results, strict=True):
            at = self._move(number, kind, x.type.spec)
            self._numbers[number] = self._move(at, x.type, there.type.spec)

    def _set_value(self, number: int, kind: ArrayType) -> None:
        self.types[number] = kind
        self._values[number] = Value(number, kind.shape, kind.dtype.name, kind.spec)

    def _add(
        self,
        operation: Operation,
        operands: tuple[Any, ...],
        called: CompiledCall | None = None,
    ) -> None:
        self._operations.append(operation)
        self.operands.append(operands)
        self.calls.append(called)
        self.places.append(self._place)

    def _move(self, number: int, kind: Any, spec: Spec, result: int | None = None) -> int:
        """Return the number of a value in a sharding, to which it is resharded if necessary.

        The resharded value has the number `result`, or a new number if None.
        """
        if spec is None or not isinstance(kind, ArrayType) or kind.spec is spec:
            return number
        moved = self._moved.get((number, spec))
        if moved is not None:
            return moved
        if not self._is_resharded(kind, spec):
            result = number
        else:
            if result is None:
                result = len(self._values)
                self._values.append(self._values[number])
            self._set_value(result, kind.with_spec(spec))
            self._add(Operation.with_sharding(number, result, kind.shape, spec), (kind,))
        self._moved[number, spec] = result
        return result

    def _is_resharded(self, kind: ArrayType, spec: ShardingSpec) -> bool:
        before = kind.spec or replicated(spec.mesh, kind.ndim)
        # Layouts are interned: different specs of the same layout move nothing.
        if before.layout(kind.shape) is not spec.layout(kind.shape):
            return True
        # Shards are in the order of the mesh's devices; without a mesh there is only one.
        return self._is_final and (kind.spec is None or before.mesh.devices != spec.mesh.devices)


def insert_reshards(
    graph: Graph, is_final: bool = True, runner: AbstractRunner | None = None
) -> ReshardInsertion:
    """Insert the reshards of a graph to which shardings are assigned, without executing it.

    Args:
        graph: the graph; see `assign_shardings`.
        is_final: as for `ReshardInsertion`.
        runner: an abstract runner that has compiled such operations already; if None, a new runner.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.spmd import abstract, trace
    >>> x = abstract((4, 4), "float32", spec(DeviceMesh.of(x=2), "-, x"))
    >>> graph = insert_reshards(trace(lambda x: x @ x, x).graph).graph
    >>> [(op.operator, op.operands, op.results) for op in graph.operations]
    [('with_sharding', (0,), (2,)), ('matmul', (2, 0), (1,))]
    """
    insertion = ReshardInsertion(graph, is_final)
    runner = AbstractRunner(graph.library) if runner is None else runner
    interpret(graph, abstract_inputs(graph, runner), insertion.observe)
    return insertion
