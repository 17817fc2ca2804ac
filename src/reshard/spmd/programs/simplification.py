"""Simplification: a recorded function without duplicate and unused operations.

Operations are pure, so two of one operator with the same operands and attributes are one, and one
of which no result is needed is none:

    %2 = matmul(%0, %1)         %2 = matmul(%0, %1)
    %3 = matmul(%0, %1)         %3 = add(%2, %2)
    %4 = exp(%2)                return %3
    %5 = add(%2, %3)
    return %5

An `identity` is one by itself, and so is all that reads it: with it `sp.rematerialized` computes
again what is not to be kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from reshard.spmd.arrays.argument_tree import replaced
from reshard.spmd.propagation.graph import Graph, Operation
from reshard.spmd.tracing.graph_recording import RecordedCall, Recording, ValuePlace


def simplified(recorded: Recording) -> Recording:
    """The same function in the fewest operations: common ones once, those not needed never.

    >>> from reshard.spmd.functions.elementwise import exp
    >>> from reshard.spmd.tracing.graph_recording import abstract, record
    >>> def twice(x):
    ...     exp(x * 3)
    ...     return exp(x) + exp(x)
    >>> print(simplified(record(twice, [abstract((4,))])).graph)
    %0: float32[4]
    %1: float32[4] = exp(%0) ([i]) -> ([i]) {i=4}
    %2: float32[4] = add(%1, %1) ([i], [i]) -> ([i]) {i=4}
    return %2
    """
    graph = recorded.graph
    # 1. Which value each is the same as.
    same = list(range(len(graph.values)))
    known: dict[Any, Operation] = {}
    first: list[tuple[Operation, RecordedCall]] = []
    for operation, action in zip(graph.operations, recorded.recorded_calls, strict=True):
        operands = tuple(same[number] for number in operation.operands)
        said = (_freeze(action.attributes), _freeze(action.options), action.target, action.like)
        key: tuple[Any, ...] = (action.name, operands, said, action.run)
        # Merged, what `rematerialized` computes again would be kept from the first time on.
        if action.name == "identity":
            key = (*key, operation.results)
        before = known.setdefault(key, operation)
        if before is operation:
            first.append((replace(operation, operands=operands), action))
        else:
            for number, earlier in zip(operation.results, before.results, strict=True):
                same[number] = earlier
    outputs = [same[number] for number in graph.outputs]
    # 2. What is needed for the outputs, from the last operation to the first.
    needed = set(outputs)
    kept = []
    for operation, action in reversed(first):
        if needed.intersection(operation.results):
            needed.update(operation.operands)
            kept.append((operation, action))
    kept.reverse()
    # 3. Arguments stay, needed or not; values get new numbers in the old order.
    inputs = [n for n in graph.inputs if n not in recorded.constants or n in needed]
    made = {number for operation, _ in kept for number in operation.results}
    new = {old: place for place, old in enumerate(sorted({*inputs, *made}))}

    def renumbered(numbers: Iterable[int]) -> tuple[int, ...]:
        return tuple(new[number] for number in numbers)

    names = dict(zip(graph.inputs, zip(recorded.names, recorded.types, strict=True), strict=True))
    return Recording(
        Graph(
            tuple(replace(graph.values[old], index=place) for old, place in new.items()),
            renumbered(inputs),
            tuple(
                replace(one, operands=renumbered(one.operands), results=renumbered(one.results))
                for one, _ in kept
            ),
            renumbered(outputs),
        ),
        tuple(names[number][0] for number in inputs),
        tuple(names[number][1] for number in inputs),
        MappingProxyType({new[n]: x for n, x in recorded.constants.items() if n in new}),
        tuple(
            action if action.like is None else replace(action, like=new.get(action.like))
            for _, action in kept
        ),
        _renumber(recorded.arguments, same, new),
        _renumber(recorded.results, same, new),
        recorded.library,
    )


def _renumber(tree: Any, same: list[int], new: dict[int, int]) -> Any:
    return replaced(
        tree,
        lambda leaf: ValuePlace(new[same[leaf.value]]) if isinstance(leaf, ValuePlace) else leaf,
    )


def _freeze(values: Any) -> tuple[Any, ...]:
    # By text, so that 1, 1.0 and True differ.
    return tuple((name, repr(value)) for name, value in values.items())
