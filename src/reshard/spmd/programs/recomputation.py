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
            found = trace_graph(graph, traced.strategy, traced.topology, traced.library)
            if max(found.peak_bytes.values()) <= limit:
                return found
    return None


class _RecomputationSearch:
    """The search for what to compute again, on the fullest rank."""

    def __init__(self, traced: Trace, limit: int) -> None:
        self._limit = limit
        self._graph = graph = traced.graph
        rank = max(traced.peak_bytes, key=lambda one: traced.peak_bytes[one])
        place = traced.ranks.index(rank)
        # The caller has the inputs and gets the outputs, so that neither is ever freed.
        self._kept = {*graph.inputs, *graph.outputs}
        # The original of each recomputed value, and the place where each original is computed.
        self._first: dict[int, int] = {}
        self._makers = {n: at for at, one in enumerate(graph.operations) for n in one.results}
        self._next = len(graph.values)
        self._base = held_bytes(traced.inputs, traced.ranks)[place]
        self._meanwhile: list[int] = []
        self._costs: list[float | None] = []
        self._sizes: dict[int, int] = {}
        for one in traced.operations:
            kinds = held_bytes(one.operands, traced.ranks)[place]
            sizes = [held_bytes([kind], traced.ranks)[place] for kind in one.results]
            self._sizes.update(zip(one.operation.results, sizes, strict=True))
            self._meanwhile.append(one.live_bytes[place] - one.held_bytes[place])
            weight = _PRODUCT if len(one.operands) > 1 and one.operation.rule.reduction else 1
            cost = weight * (kinds + sum(sizes)) + _MOVED * one.moved_bytes
            # A loop may take any time.
            self._costs.append(None if one.operation.body is not None else cost)

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
                its = self._count(again)
                gain = (above - self._above(its)) / cost
                if gain > 0 and (best is None or gain > best[0]):
                    best = gain, again, its
            if best is None:
                return None
            _, uses, live = best
        return self._rebuild(uses)

    def _place(self, one: Operation) -> int:
        """Return the place of the operation that this is, or that this repeats."""
        made = one.results[0]
        return self._makers[self._first.get(made, made)]

    def _above(self, live: Sequence[int]) -> int:
        return sum(max(0, one - self._limit) for one in live)

    def _count(self, uses: Sequence[Operation]) -> list[int]:
        """Return the memory at each place."""
        last: dict[int, int] = {}
        for place, one in enumerate(uses):
            for value in (*one.results, *one.operands):
                last[value] = place
        held = self._base
        found = []
        for place, one in enumerate(uses):
            found.append(held + self._meanwhile[self._place(one)])
            held += sum(self._sizes[value] for value in one.results)
            for value in {*one.results, *one.operands}:
                if last[value] == place and value not in self._kept:
                    held -= self._sizes[value]
        return found

    def _candidates(self, uses: Sequence[Operation], peak: int) -> list[tuple[int, int]]:
        """Return values that are live but not read at the peak, and their next readers."""
        before: dict[int, int] = {}
        behind: dict[int, int] = {}
        for place, one in enumerate(uses):
            if place <= peak:
                before.update(dict.fromkeys((*one.results, *one.operands), place))
            else:
                for value in one.operands:
                    behind.setdefault(value, place)
        found = [
            (value, reader)
            for value, reader in behind.items()
            if before.get(value, peak) < peak and value not in self._kept and self._sizes[value]
        ]
        found.sort(key=lambda one: -self._sizes[one[0]] * (one[1] - before[one[0]]))
        return found[:_MAX_TRIED]

    def _again(
        self, uses: Sequence[Operation], value: int, peak: int, reader: int
    ) -> tuple[list[Operation], float] | None:
        """Return the operations with a value made again before a reader, and what that costs."""
        maker = {made: one for one in uses[:reader] for made in one.results}
        last: dict[int, int] = {}
        for place, one in enumerate(uses):
            last.update(dict.fromkeys(one.operands, place))
        # Values that are live after the peak are read as they are, and kept until then; of a value
        # that was computed several times, any of the copies.
        there = {
            self._first.get(made, made): made
            for made in maker
            if made != value and last.get(made, -1) > peak
        }
        new: dict[int, int] = {number: number for number in self._kept}
        chain: dict[tuple[int, ...], Operation] = {}
        cost = 0.0
        wanted = [value]
        while wanted:
            number = wanted.pop()
            one = maker[number]
            if one.results in chain:
                continue
            own = self._costs[self._place(one)]
            if own is None or len(chain) >= _MAX_CHAIN:
                return None
            chain[one.results] = one
            cost += own
            for operand in one.operands:
                found = there.get(self._first.get(operand, operand))
                if found is not None:
                    new[operand] = found
                elif operand not in self._kept:
                    wanted.append(operand)
        # In the order in which they were first computed; their results get new numbers.
        position = {one.results: place for place, one in enumerate(uses)}
        made = []
        for one in sorted(chain.values(), key=lambda one: position[one.results]):
            for result in one.results:
                new[result], self._next = self._next, self._next + 1
                self._sizes[new[result]] = self._sizes[result]
                self._first[new[result]] = self._first.get(result, result)
            made.append(
                replace(
                    one,
                    operands=tuple(new[n] for n in one.operands),
                    results=tuple(new[n] for n in one.results),
                )
            )
        behind = [
            replace(one, operands=tuple(new[n] if n == value else n for n in one.operands))
            if value in one.operands
            else one
            for one in uses[reader:]
        ]
        # Gains are divided by the cost, which may be 0.
        return [*uses[:reader], *made, *behind], max(cost, 1.0)

    def _rebuild(self, uses: Sequence[Operation]) -> Graph:
        """Return the graph of operations that may occur several times."""
        # Values of choices that were tried and dropped have numbers, too: those that are left are
        # numbered anew, after all originals.
        values = list(self._graph.values)
        numbers = {value.index: value.index for value in values}
        for one in uses:
            for result in one.results:
                if result not in numbers:
                    numbers[result] = len(values)
                    original = self._graph.values[self._first[result]]
                    values.append(replace(original, index=len(values)))
        operations = [
            replace(
                one,
                operands=tuple(numbers[n] for n in one.operands),
                results=tuple(numbers[n] for n in one.results),
            )
            for one in uses
        ]
        graph = self._graph
        return replace(graph, values=tuple(values), operations=tuple(operations), is_checked=True)
