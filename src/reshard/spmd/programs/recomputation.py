"""Recomputation: values that are freed, and recomputed before they are read.

    %2 = exp(%0)                    %2 = exp(%0)
    %3 = sin(%2)                    %3 = sin(%2)        %2 is free from here
    ...  the peak                   ...  less
    %9 = multiply(%8, %2)           %10 = exp(%0)
                                    %9 = multiply(%8, %10)

If the memory exceeds a limit, values are chosen in turn, as in XLA's rematerialization:
the value with the best ratio of memory saved above the limit to the cost of recomputing it.
Operands that are free by then are recomputed, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reshard.spmd.graph import Graph, Operation
from reshard.spmd.tracing.estimates import held_bytes
from reshard.spmd.tracing.trace import Trace, trace_graph

_MAX_CHAIN = 12
"""Operations that are repeated for a single value."""
_MAX_TRIED = 8
"""Values that are tried for each choice, by size times lifetime."""
_PRODUCT, _MOVED = 16, 8
"""The costs of a byte of a product, and of a byte that moves, relative to other operators."""


def recompute(traced: Trace, limit: int) -> Trace | None:
    """Return the trace of the function with values computed again so that a limit is kept.

    Args:
        traced: of the function, in its placement.
        limit: the most bytes of `Trace.peak_bytes` on any rank.

    Returns:
        None if no solution is found.
    """
    # The search counts operands that are moved as it finds them in the trace, and the new graph
    # may keep them longer: if that exceeds the limit, a lower goal is tried.
    for goal in (limit, limit - limit // 16):
        graph = _RecomputationSearch(traced, goal).run()
        if graph is not None:
            recomputed = trace_graph(graph, traced.strategy, traced.topology, traced.library)
            if max(recomputed.peak_bytes.values()) <= limit:
                return recomputed
    return None


class _RecomputationSearch:
    """The search for what to compute again, on the fullest rank."""

    def __init__(self, traced: Trace, limit: int) -> None:
        self._limit = limit
        self._graph = graph = traced.graph
        rank = max(traced.peak_bytes, key=traced.peak_bytes.__getitem__)
        place = traced.ranks.index(rank)
        # The caller has the inputs and gets the outputs, so that neither is ever freed.
        self._kept = {*graph.inputs, *graph.outputs}
        # The original of each recomputed value, and the place where each original is computed.
        self._first: dict[int, int] = {}
        self._makers = {
            n: at for at, operation in enumerate(graph.operations) for n in operation.results
        }
        self._next = len(graph.values)
        self._base = held_bytes(traced.inputs, traced.ranks)[place]
        self._meanwhile: list[int] = []
        self._costs: list[float | None] = []
        self._sizes: dict[int, int] = {}
        for estimate in traced.operations:
            kinds = held_bytes(estimate.operands, traced.ranks)[place]
            sizes = [held_bytes([kind], traced.ranks)[place] for kind in estimate.results]
            self._sizes.update(zip(estimate.operation.results, sizes, strict=True))
            self._meanwhile.append(estimate.live_bytes[place] - estimate.held_bytes[place])
            weight = (
                _PRODUCT if len(estimate.operands) > 1 and estimate.operation.rule.reduction else 1
            )
            cost = weight * (kinds + sum(sizes)) + _MOVED * estimate.moved_bytes
            # A loop may take any time.
            self._costs.append(None if estimate.operation.body is not None else cost)

    def run(self) -> Graph | None:
        """Return a graph that satisfies the limit, or None."""
        uses: Sequence[Operation] = self._graph.operations
        live = self._count(uses)
        if not live:
            return None
        while max(live) > self._limit:
            above = self._above(live)
            peak = max(range(len(live)), key=live.__getitem__)
            best: tuple[float, Sequence[Operation], list[int]] | None = None
            for value, reader in self._candidates(uses, peak):
                tried = self._again(uses, value, peak, reader)
                if tried is None:
                    continue
                again, cost = tried
                new_live = self._count(again)
                gain = (above - self._above(new_live)) / cost
                if gain > 0 and (best is None or gain > best[0]):
                    best = gain, again, new_live
            if best is None:
                return None
            _, uses, live = best
        return self._rebuild(uses)

    def _place(self, operation: Operation) -> int:
        """Return the place of an operation, or of the original that it repeats."""
        result = operation.results[0]
        return self._makers[self._first.get(result, result)]

    def _above(self, live: Sequence[int]) -> int:
        return sum(max(0, size - self._limit) for size in live)

    def _count(self, uses: Sequence[Operation]) -> list[int]:
        """Return the memory at each place."""
        last: dict[int, int] = {}
        for place, operation in enumerate(uses):
            for value in (*operation.results, *operation.operands):
                last[value] = place
        held = self._base
        memory = []
        for place, operation in enumerate(uses):
            memory.append(held + self._meanwhile[self._place(operation)])
            held += sum(self._sizes[value] for value in operation.results)
            for value in {*operation.results, *operation.operands}:
                if last[value] == place and value not in self._kept:
                    held -= self._sizes[value]
        return memory

    def _candidates(self, uses: Sequence[Operation], peak: int) -> list[tuple[int, int]]:
        """Return values that are live but not read at the peak, and their next readers."""
        last_uses: dict[int, int] = {}
        next_readers: dict[int, int] = {}
        for place, operation in enumerate(uses):
            if place <= peak:
                last_uses.update(dict.fromkeys((*operation.results, *operation.operands), place))
            else:
                for value in operation.operands:
                    next_readers.setdefault(value, place)
        candidates = [
            (value, reader)
            for value, reader in next_readers.items()
            if last_uses.get(value, peak) < peak and value not in self._kept and self._sizes[value]
        ]
        candidates.sort(key=lambda pair: -self._sizes[pair[0]] * (pair[1] - last_uses[pair[0]]))
        return candidates[:_MAX_TRIED]

    def _again(
        self, uses: Sequence[Operation], value: int, peak: int, reader: int
    ) -> tuple[list[Operation], float] | None:
        """Return the operations with a value recomputed before a reader, and the cost of that."""
        maker = {result: operation for operation in uses[:reader] for result in operation.results}
        last: dict[int, int] = {}
        for place, operation in enumerate(uses):
            last.update(dict.fromkeys(operation.operands, place))
        # Values that are live after the peak are read as they are, and kept until then; of a value
        # that was computed several times, any of the copies.
        there = {
            self._first.get(result, result): result
            for result in maker
            if result != value and last.get(result, -1) > peak
        }
        new: dict[int, int] = {number: number for number in self._kept}
        chain: dict[tuple[int, ...], Operation] = {}
        cost = 0.0
        needed = [value]
        while needed:
            number = needed.pop()
            operation = maker[number]
            if operation.results in chain:
                continue
            operation_cost = self._costs[self._place(operation)]
            if operation_cost is None or len(chain) >= _MAX_CHAIN:
                return None
            chain[operation.results] = operation
            cost += operation_cost
            for operand in operation.operands:
                available = there.get(self._first.get(operand, operand))
                if available is not None:
                    new[operand] = available
                elif operand not in self._kept:
                    needed.append(operand)
        # In the order in which they were first computed; their results get new numbers.
        position = {operation.results: place for place, operation in enumerate(uses)}
        repeated = []
        for operation in sorted(chain.values(), key=lambda operation: position[operation.results]):
            for result in operation.results:
                new[result], self._next = self._next, self._next + 1
                self._sizes[new[result]] = self._sizes[result]
                self._first[new[result]] = self._first.get(result, result)
            repeated.append(
                replace(
                    operation,
                    operands=tuple(new[n] for n in operation.operands),
                    results=tuple(new[n] for n in operation.results),
                )
            )
        rest = [
            replace(
                operation, operands=tuple(new[n] if n == value else n for n in operation.operands)
            )
            if value in operation.operands
            else operation
            for operation in uses[reader:]
        ]
        # Gains are divided by the cost, which may be 0.
        return [*uses[:reader], *repeated, *rest], max(cost, 1.0)

    def _rebuild(self, uses: Sequence[Operation]) -> Graph:
        """Return the graph of operations that may occur several times."""
        # Values of choices that were tried and dropped have numbers, too: those that are left are
        # numbered anew, after all originals.
        values = list(self._graph.values)
        numbers = {value.index: value.index for value in values}
        for operation in uses:
            for result in operation.results:
                if result not in numbers:
                    numbers[result] = len(values)
                    original = self._graph.values[self._first[result]]
                    values.append(replace(original, index=len(values)))
        operations = [
            replace(
                operation,
                operands=tuple(numbers[n] for n in operation.operands),
                results=tuple(numbers[n] for n in operation.results),
            )
            for operation in uses
        ]
        graph = self._graph
        return replace(graph, values=tuple(values), operations=tuple(operations), is_checked=True)
