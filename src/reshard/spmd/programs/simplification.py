"""Simplification: a graph without duplicate and unused operations.

Operations are pure, so two operations of an operator with the same operands and attributes are
merged, and operations none of whose results are needed are removed:

    %2 = matmul(%0, %1)         %2 = matmul(%0, %1)
    %3 = matmul(%0, %1)         %3 = add(%2, %2)
    %4 = exp(%2)                return %3
    %5 = add(%2, %3)
    return %5

An `identity` is never merged, nor is any operation that reads it: `sp.rematerialized` uses it to
compute values again instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.spmd.arrays.argument_tree import replaced
from reshard.spmd.graph import Graph, Operation, Value


def simplify(graph: Graph) -> Graph:
    """Merge duplicate operations and remove unused ones.

    >>> from reshard.spmd.ops.elementwise import exp
    >>> from reshard.spmd.tracing.graph_recording import abstract, record
    >>> def twice(x):
    ...     exp(x * 3)
    ...     return exp(x) + exp(x)
    >>> print(simplify(record(twice, [abstract((4,))])))
    %0: float32[4]
    %1: float32[4] = exp(%0) ([i]) -> ([i]) {i=4}
    %2: float32[4] = add(%1, %1) ([i], [i]) -> ([i]) {i=4}
    return %2
    """
    # 1. Find the first value that is equal to each value.
    same = list(range(len(graph.values)))
    seen: dict[Any, Operation] = {}
    first: list[Operation] = []
    for operation in graph.operations:
        operands = tuple([same[number] for number in operation.operands])
        key: tuple[Any, ...] = (
            operation.operator,
            operands,
            _freeze(operation.attributes),
            _freeze(operation.options),
            operation.target,
            operation.like,
            operation.body,
        )
        # Merged, a value that `rematerialized` computes again would be kept from the first time.
        if operation.operator == "identity":
            key = (*key, operation.results)
        before = seen.setdefault(key, operation)
        if before is operation:
            is_same = operands == operation.operands
            first.append(operation if is_same else replace(operation, operands=operands))
        else:
            for number, earlier in zip(operation.results, before.results, strict=True):
                same[number] = earlier
    outputs = [same[number] for number in graph.outputs]
    # 2. Keep the operations that outputs depend on, from the last to the first.
    needed = set(outputs)
    used = []
    for operation in reversed(first):
        if needed.intersection(operation.results):
            needed.update(operation.operands)
            used.append(operation)
    used.reverse()

    # 3. Keep all arguments, needed or not.
    def make_returned(new: Mapping[int, int]) -> Any:
        def renumber(leaf: Any) -> Any:
            return replace(leaf, index=new[same[leaf.index]]) if isinstance(leaf, Value) else leaf

        return replaced(graph.returned, renumber)

    inputs = [n for n in graph.inputs if n not in graph.constants or n in needed]
    return graph.selected(inputs, used, outputs, make_returned)


def _freeze(values: Mapping[str, Any]) -> tuple[Any, ...]:
    # As text, because 1, 1.0 and True are equal.
    return tuple([(name, repr(value)) for name, value in values.items()])
