"""Pending values: sums that are reduced later, where fewer bytes move.

A product over a sharded dimension gives contributions. They may be reduced immediately, or after
operators that can be applied to each contribution separately::

    x @ u + y @ v     x, y : [-, k]  u, v : [k, -]

    combined at once      two all-reduces, after each product
    combined later        the addition works on contributions, and a single all-reduce follows

An operation *waits* if it runs on contributions. Then all operations that read any of these
operands wait, too, so that a value is reduced in a single place: after the last waiting operation.
Operations that wait together are a *group*. A group saves the reduction of its operands, and
requires that of its results; it depends on the groups that compute its operands. The set of waiting
groups is the maximum-weight closure of these gains, in bytes.

Values with an explicit sharding, and outputs, do not wait.

A set of groups that has with each group those that it depends on is closed. The closed set with the
maximum sum of gains is a minimum cut::

    gains 5, -2, -4; 0 needs 1, 1 needs 2        {}: 5 - 2 - 4 < 0
    gains 5, -2, -2; the same                    {0, 1, 2}: 1

Source: Picard, "Maximal closure of a graph and applications to combinatorial problems" (1976); the
minimum cut by shortest augmenting paths, Edmonds and Karp (1972).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from reshard.dtypes import dtype
from reshard.errors import SpecError
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType, with_partial
from reshard.spmd.core.operator import Operator, operators
from reshard.spmd.graph import Operation
from reshard.spmd.propagation.axes import AxisTable, Parts, are_apart, size_of
from reshard.spmd.propagation.propagation import PropagatedGraph
from reshard.spmd.propagation.reshards import explicit_reshards
from reshard.spmd.shards.operation_call import infer_specs
from reshard.spmd.shards.partial_sums import types_allow_partial


def largest_closure(gains: Sequence[int], needs: Sequence[Iterable[int]]) -> set[int]:
    """Return the closed set of the greatest gain; of several the smallest.

    Args:
        gains: of each thing.
        needs: for each, the others without which it is not taken.

    >>> largest_closure([5, -2, -2], [[1], [2], []]), largest_closure([5, -2, -4], [[1], [2], []])
    ({0, 1, 2}, set())
    """
    source, sink = len(gains), len(gains) + 1
    # More than all that can flow, so that no least cut lies there.
    most = sum(gain for gain in gains if gain > 0) + 1
    room: list[dict[int, int]] = [{} for _ in range(len(gains) + 2)]

    def join(start: int, end: int, size: int) -> None:
        room[start][end] = room[start].get(end, 0) + size
        room[end].setdefault(start, 0)

    for thing, gain in enumerate(gains):
        if gain > 0:
            join(source, thing, gain)
        elif gain < 0:
            join(thing, sink, -gain)
        for needed in needs[thing]:
            join(thing, needed, most)
    while True:
        before = _find_paths(room, source)
        if sink not in before:
            # The reachable items are the smallest closed set with the maximum gain.
            return {thing for thing in before if thing < source}
        path, end = [], sink
        while end != source:
            path.append((before[end], end))
            end = before[end]
        flow = min(room[start][end] for start, end in path)
        for start, end in path:
            room[start][end] -= flow
            room[end][start] += flow


def _find_paths(room: Sequence[dict[int, int]], source: int) -> dict[int, int]:
    """Return each reachable node with its predecessor on a shortest path."""
    before = {source: source}
    waiting = deque([source])
    while waiting:
        start = waiting.popleft()
        for end, size in room[start].items():
            if size > 0 and end not in before:
                before[end] = start
                waiting.append(end)
    return before


def keep_partial(propagated: PropagatedGraph) -> PropagatedGraph:
    """Return the graph with sums that wait, where fewer bytes move then.

    The shardings of each operation are recorded as well. A graph that has them already, as from
    the strategy "cost", is returned unchanged.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.spmd.graph import Graph
    >>> from reshard.spmd.propagation.strategies import propagate_graph
    >>> mesh = DeviceMesh.of(k=2)
    >>> product = "([i, k], [k, j]) -> ([i, j]) {i=8, j=8, k=8} reduction={k}"
    >>> graph = Graph.of(
    ...     [(8, 8)] * 4,
    ...     [
    ...         ("matmul", [0, 1], product),
    ...         ("matmul", [2, 3], product),
    ...         ("add", [4, 5], "([i, j], [i, j]) -> ([i, j]) {i=8, j=8}"),
    ...     ],
    ...     [6],
    ... )
    >>> annotations = {n: spec(mesh, "k, -" if n % 2 else "-, k") for n in range(4)}
    >>> print(explicit_reshards(keep_partial(propagate_graph(graph, annotations))))
    %6, result 0 of operation 2: reduced over k from `-, - | sum(k)` to `-, -`
    """
    if not isinstance(propagated, PropagatedGraph):
        raise SpecError(f"{propagated!r} is not propagated; give what propagate_graph returns")
    if propagated.mesh is None or propagated.runs is not None:
        return propagated
    return _Waiting(propagated, propagated.mesh).answer()


@dataclass(frozen=True, slots=True)
class _PendingRun:
    """How an operation works on contributions.

    Args:
        places: of the operands that are contributions then.
        reads: the shardings of all operands.
        makes: those of its results.
    """

    places: tuple[int, ...]
    reads: tuple[ShardingSpec, ...]
    makes: tuple[ShardingSpec, ...]


class _Waiting:
    """The choice of the operations of a graph that wait."""

    def __init__(self, propagated: PropagatedGraph, mesh: DeviceMesh) -> None:
        self.propagated = propagated
        self.graph = propagated.graph
        self.placed = explicit_reshards(propagated)
        self.table = AxisTable.of(mesh)
        self.outputs = frozenset(propagated.graph.outputs)
        # The shardings of values that operations can leave in contributions, and the operations
        # that can work on those.
        self.pending: dict[int, ShardingSpec] = {}
        self.runs: dict[int, _PendingRun] = {}
        self.maker: dict[int, int] = {}
        self.readers: list[list[tuple[int, int]]] = [[] for _ in self.graph.values]

    def answer(self) -> PropagatedGraph:
        """Return the graph with the shardings that each operation runs with, and contributions."""
        self._find_runs()
        self._drop_stopped()
        waiting = self._choose()
        pending_values = {value for number in waiting for value in self._pending_operands(number)}
        runs = []
        for number, both in enumerate(zip(self.placed.operands, self.placed.results, strict=True)):
            run = self.runs.get(number) if number in waiting else None
            reads, makes = both if run is None else (run.reads, run.makes)
            encoded = self.table.encoded
            runs.append((tuple(map(encoded, reads)), tuple(map(encoded, makes))))
        values = tuple(
            self.pending[number] if number in pending_values else spec
            for number, spec in enumerate(self.propagated.values)
        )
        return replace(self.propagated, values=values, runs=tuple(runs))

    def _pending_operands(self, number: int) -> list[int]:
        """Return the values that an operation reads as contributions if it waits."""
        operands = self.graph.operations[number].operands
        return [operands[place] for place in self.runs[number].places]

    def _find_runs(self) -> None:
        """Find the values that may be contributions, and the operations that may work on them."""
        for number, operation in enumerate(self.graph.operations):
            for place, value in enumerate(operation.operands):
                self.readers[value].append((number, place))
            run = self._find_run(number, operation)
            makes = self.placed.results[number]
            if run is not None:
                self.runs[number] = run
                makes = run.makes
            for value, spec in zip(operation.results, makes, strict=True):
                self.maker[value] = number
                if spec.partial_axes and self._may_wait(value, spec):
                    self.pending[value] = spec

    def _may_wait(self, value: int, result_spec: ShardingSpec) -> bool:
        """Return whether a value has no requested sharding and needs only to be reduced."""
        if value in self.propagated.annotated or value in self.outputs:
            return False
        spec = self.propagated.values[value]
        return self.table.encoded(result_spec).dims == self._dims(spec, result_spec.ndim)

    def _dims(self, spec: ShardingSpec | None, ndim: int) -> tuple[Parts, ...]:
        return ((),) * ndim if spec is None else self.table.encoded(spec).dims

    def _find_run(self, number: int, operation: Operation) -> _PendingRun | None:
        """Return how an operation works on contributions of its operands; None if it does not."""
        operator = operators.get(operation.operator)
        if operator is None or not operator.has_rule:
            return None
        places = [n for n, value in enumerate(operation.operands) if value in self.pending]
        # All together, as for addition, or a single operand, as for multiplication.
        for chosen in [places, *([place] for place in places if len(places) > 1)]:
            specs = [self.pending[operation.operands[place]] for place in chosen]
            kinds = {(spec.partial_axes, spec.reduction) for spec in specs}
            if len(kinds) == 1:
                run = self._try_run(number, operation, operator, tuple(chosen), *kinds.pop())
                if run is not None:
                    return run
        return None

    def _try_run(
        self,
        number: int,
        operation: Operation,
        operator: Operator,
        places: tuple[int, ...],
        axes: tuple[Axis, ...],
        reduction: str | None,
    ) -> _PendingRun | None:
        reads, makes = self.placed.operands[number], self.placed.results[number]
        parts = [self.table.part(axis) for axis in axes]
        if any(
            spec.partial_axes
            or not all(are_apart(p, q) for dim in self._dims(spec, 0) for p in dim for q in parts)
            for spec in (*reads, *makes)
        ):
            return None
        reads = tuple(
            with_partial(spec, axes, reduction) if place in places else spec
            for place, spec in enumerate(reads)
        )
        makes = tuple(with_partial(spec, axes, reduction) for spec in makes)
        # The operation is asked as when it is carried out: it is to run so, and in no other way.
        operands = self._types(operation.operands, reads)
        if not types_allow_partial(operands, self._types(operation.results, makes)):
            return None
        try:
            op_specs = infer_specs(operator, operands, operation.attributes, self.table.mesh)
        except SpecError:
            # A rule that is not the operator's own, as text may have it.
            return None
        is_as_asked = op_specs.runs_with == reads and op_specs.result_specs == makes
        return _PendingRun(places, reads, makes) if is_as_asked else None

    def _types(self, values: Sequence[int], specs: Sequence[ShardingSpec]) -> list[ArrayType]:
        graph_values = [self.graph.values[value] for value in values]
        return [
            ArrayType(value.shape, dtype(value.dtype), spec)
            for value, spec in zip(graph_values, specs, strict=True)
        ]

    def _drop_stopped(self) -> None:
        """Leave out operations whose operands are whole: they are made so, or read so elsewhere."""
        waiting = list(self.runs)
        while waiting:
            number = waiting.pop()
            if number not in self.runs:
                continue
            values = self._pending_operands(number)
            if all(map(self._stays_pending, values)):
                continue
            # Operations that depend on it are checked again.
            for value in (*values, *self.graph.operations[number].results):
                waiting += [reader for reader, _ in self.readers[value]]
            del self.runs[number]

    def _stays_pending(self, value: int) -> bool:
        maker = self.maker[value]
        if not self._arises(value) and maker not in self.runs:
            return False
        return all(
            reader in self.runs and place in self.runs[reader].places
            for reader, place in self.readers[value]
        )

    def _arises(self, value: int) -> bool:
        """Return whether the operation that makes a value makes contributions of whole operands."""
        maker = self.maker[value]
        place = self.graph.operations[maker].results.index(value)
        return bool(self.placed.results[maker][place].partial_axes)

    def _choose(self) -> frozenset[int]:
        """Return the operations that wait."""
        # 1. Groups: all operations that read a value are in the same group.
        group = {number: number for number in self.runs}

        def find(number: int) -> int:
            while group[number] != number:
                # Python assigns to `group[number]` before `number`, so this halves the path.
                group[number] = number = group[group[number]]
            return number

        for number in self.runs:
            for value in self._pending_operands(number):
                for reader, _ in self.readers[value]:
                    group[find(reader)] = find(number)
        names = sorted({find(number) for number in self.runs})
        place_of = {name: place for place, name in enumerate(names)}
        # 2. The bytes that they save, and the groups that they depend on.
        gains = [0] * len(names)
        needs: list[set[int]] = [set() for _ in names]
        for number in self.runs:
            place = place_of[find(number)]
            run, operation = self.runs[number], self.graph.operations[number]
            for value, spec in zip(operation.results, run.makes, strict=True):
                gains[place] -= self._count_bytes(value, spec)
            for value in self._pending_operands(number):
                if not self._arises(value):
                    needs[place].add(place_of[find(self.maker[value])])
        for value in {value for number in self.runs for value in self._pending_operands(number)}:
            # All readers of the value are in the same group.
            reader = self.readers[value][0][0]
            gains[place_of[find(reader)]] += self._count_bytes(value, self.pending[value])
        chosen = largest_closure(gains, needs)
        return frozenset(number for number in self.runs if place_of[find(number)] in chosen)

    def _count_bytes(self, value: int, result_spec: ShardingSpec) -> int:
        """Return the bytes that each device moves to reduce the contributions of a value."""
        spec = self.propagated.values[value]
        partial = self.table.encoded(result_spec).partial
        if spec is not None and self.table.encoded(spec).partial == partial:
            return 0
        tensor = self.graph.values[value]
        dims = self._dims(spec, result_spec.ndim)
        cuts = [size_of(parts) for parts in self.table.encoded(result_spec).dims]
        local_elements = math.prod(
            -(-size // cut) for size, cut in zip(tensor.shape, cuts, strict=True)
        )
        local_bytes = local_elements * dtype(tensor.dtype).itemsize_bytes
        is_scattered = any(not are_apart(p, q) for dim in dims for p in dim for q in partial)
        # An all-reduce is a reduce-scatter and an all-gather of its parts.
        return local_bytes if is_scattered else 2 * local_bytes
