"""Reshard insertion: a graph in which every reshard is an operation.

    %2 = matmul(%0, %1)             %3 = with_sharding(%0)      %0 moves to where the product runs
                                    %4 = matmul(%3, %1)
                                    %2 = with_sharding(%4)      its sum over devices is reduced

Operands move to where a strategy wants them, and from there to what the operator runs with. A value
moves to a sharding once, however many operations read it so. Only operators that take halos of
their operands move these themselves.
"""

from __future__ import annotations

from dataclasses import replace

from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.operator import find_operator
from reshard.spmd.graph import Graph, Operation, Value
from reshard.spmd.tracing.estimates import TracedOperation
from reshard.spmd.tracing.trace import Trace


def insert_reshards(traced: Trace) -> tuple[Graph, list[TracedOperation | None]]:
    """Return the graph of a trace with its reshards as operations.

    Every value has the sharding in which it is made, and keeps its number. The list has the
    estimate of each operation; None for reshards.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.spmd import abstract, trace
    >>> x = abstract((4, 4), "float32", spec(DeviceMesh.of(x=2), "-, x"))
    >>> graph, _ = insert_reshards(trace(lambda x: x @ x, x))
    >>> [(op.operator, op.operands, op.results) for op in graph.operations]
    [('with_sharding', (0,), (2,)), ('matmul', (2, 0), (1,))]
    """
    graph = traced.graph
    values = list(graph.values)
    operations: list[Operation] = []
    estimates: list[TracedOperation | None] = []
    moved: dict[tuple[int, ShardingSpec], int] = {}

    def add_value(kind: ArrayType) -> int:
        values.append(Value(len(values), kind.shape, kind.dtype.name, kind.spec))
        return len(values) - 1

    def add_reshard(source: int, result: int, target: ShardingSpec) -> None:
        shape = values[source].shape
        operations.append(Operation.with_sharding(source, result, shape, target))
        estimates.append(None)

    for one in traced.operations:
        # An operator that finds its operands' neighbours itself would do so again.
        is_placed = find_operator(one.operation.operator).placed is not None
        reshards = [] if is_placed else [*one.before, *one.reused]
        operands = []
        for number, kind, spec in zip(
            one.operation.operands, one.operands, one.runs_with, strict=True
        ):
            at = number
            while kind is not None and kind.spec is not spec:
                found = [r for r in reshards if r.value == number and r.source is kind]
                if not found:
                    # Another sharding of the same layout, or one that the operator makes.
                    break
                (step, *_) = [r for r in found if r.target is spec] or found
                key = (at, step.target)
                if key not in moved:
                    moved[key] = add_value(step.result)
                    add_reshard(at, moved[key], step.target)
                at, kind = moved[key], step.result
            operands.append(at)
        for number, kind in zip(one.operation.results, one.results, strict=True):
            values[number] = replace(values[number], sharding=kind.spec)
        # A `with_sharding` is a reshard already.
        after = () if one.operation.target is not None else one.after
        made = {reshard.value: add_value(reshard.source) for reshard in after}
        results = tuple(made.get(number, number) for number in one.operation.results)
        operations.append(replace(one.operation, operands=tuple(operands), results=results))
        estimates.append(one)
        for reshard in after:
            add_reshard(made[reshard.value], reshard.value, reshard.target)
    graph = replace(graph, values=tuple(values), operations=tuple(operations), is_checked=True)
    return graph, estimates
