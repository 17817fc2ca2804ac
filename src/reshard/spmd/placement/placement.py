"""Placement: the reshards of a graph in which every value has a sharding.

Operations run on tensors that are cut alike along each factor (`common_axes`). So each operand
that is not is resharded before, each result after, contributions are combined where they are not
wanted, and outputs become what was asked for::

    x : [-, y]   w : [y, -]                    x moves to [x, y]
    r = x @ w : [x, y] wanted                  the product is [x, -] and a sum over y
                                               it is reduced over y, and moves to [x, y]

How a movement is done is decided elsewhere: by `reshard.plan` and `find_program`.

`reduction` of a `Movement` names axes whose contributions are combined; the other movements keep
what they hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from reshard.errors import SpecError
from reshard.mesh import Axis
from reshard.sharding import ShardingSpec
from reshard.spmd.core.operator import operators
from reshard.spmd.graph import Operation
from reshard.spmd.propagation.axis_parts import (
    AxisTable,
    Part,
    Parts,
    Sharding,
    are_alike,
    are_apart,
    joined,
)
from reshard.spmd.propagation.common_axes import Axes, common_axes
from reshard.spmd.propagation.factor_shardings import FactorSharding, collected, updated
from reshard.spmd.propagation.propagation import OperationShardings, PropagatedGraph, carriers_of

Side = Literal["operand", "result", "output"]
Place = tuple[int | None, Side, int]


@dataclass(frozen=True, slots=True)
class Movement:
    """One value that changes its sharding, at one place.

    Args:
        value: its number.
        operation: the number of the operation that reads or makes it; None for an output.
        side: where it moves: before the operation, behind it, or behind the whole function.
        position: of the operand, result or output.
        source, target: shardings.
        reduced: axes along which contributions are combined; none for a reshard.
    """

    value: int
    operation: int | None
    side: Side
    position: int
    source: ShardingSpec
    target: ShardingSpec
    reduced: tuple[Axis, ...] = ()

    def __str__(self) -> str:
        where = f"{self.side} {self.position}"
        where += "" if self.operation is None else f" of operation {self.operation}"
        verb = f"reduced over {' '.join(map(str, self.reduced))}" if self.reduced else "resharded"
        return f"%{self.value}, {where}: {verb} from `{self.source}` to `{self.target}`"


@dataclass(frozen=True, slots=True)
class PlacedGraph:
    """A propagated graph with the shardings of its operations, and its reshards.

    Args:
        propagated: the graph and the shardings of its values.
        operands: for each operation, the shardings of its operands while it runs.
        results: for each operation, the shardings of its results right after it, including pending
            sums.
        moved: all reshards, in order.
    """

    propagated: PropagatedGraph
    operands: tuple[tuple[ShardingSpec, ...], ...]
    results: tuple[tuple[ShardingSpec, ...], ...]
    moved: tuple[Movement, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.moved)) or "nothing moves"


def explicit_reshards(propagated: PropagatedGraph) -> PlacedGraph:
    """Find the reshards of a graph whose values have shardings.

    Values without a sharding are replicated. Without any sharding nothing moves. Axes that do not
    fit a factor, and levels with a cut rule of their own that an operator does not propagate, are
    removed by a reshard before the operation and restored after it.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.spmd.graph import Graph
    >>> from reshard.spmd.propagation.strategies import propagate_graph
    >>> mesh = DeviceMesh.of(x=2, y=2)
    >>> graph = Graph.of(
    ...     [(8, 8), (8, 8)],
    ...     [("matmul", [0, 1], "([i, k], [k, j]) -> ([i, j]) {i=8, j=8, k=8} reduction={k}")],
    ...     [2],
    ... )
    >>> given = {0: spec(mesh, "-, y"), 1: spec(mesh, "y, -"), 2: spec(mesh, "x, -")}
    >>> print(explicit_reshards(propagate_graph(graph, given)))
    %0, operand 0 of operation 0: resharded from `-, y` to `x, y`
    %2, result 0 of operation 0: reduced over y from `x, - | sum(y)` to `x, -`
    """
    if not isinstance(propagated, PropagatedGraph):
        raise SpecError(f"{propagated!r} is not propagated; give what propagate_graph returns")
    if propagated.mesh is None:
        count = len(propagated.graph.operations)
        return PlacedGraph(propagated, ((),) * count, ((),) * count, ())
    run = _Placing(propagated, AxisTable.of(propagated.mesh))
    for number, operation in enumerate(propagated.graph.operations):
        if propagated.runs is None:
            run.place(number, operation)
        else:
            run.follow(number, operation, propagated.runs[number])
    run.deliver()
    return PlacedGraph(propagated, tuple(run.operands), tuple(run.results), tuple(run.moved))


class _Placing:
    """The walk over a graph's operations."""

    def __init__(self, propagated: PropagatedGraph, table: AxisTable) -> None:
        self.graph = propagated.graph
        self.asked = propagated.outputs
        self.table = table
        self.state = [
            _make_whole(len(value.shape))
            if spec is None
            else table.encoded(spec)._replace(replicated=())
            for value, spec in zip(self.graph.values, propagated.values, strict=True)
        ]
        self.operands: list[tuple[ShardingSpec, ...]] = []
        self.results: list[tuple[ShardingSpec, ...]] = []
        self.moved: list[Movement] = []

    def spec(self, sharding: Sharding) -> ShardingSpec:
        """A sharding as users see it: closed, since propagation is over."""
        closed = (True,) * len(sharding.dims)
        return self.table.decoded(sharding._replace(is_closed=closed))

    def move(
        self,
        value: int,
        place: Place,
        source: Sharding,
        target: Sharding,
        reduced: Parts = (),
    ) -> None:
        """Write a movement down."""
        axes = tuple(map(self.table.axis, reduced))
        self.moved.append(Movement(value, *place, self.spec(source), self.spec(target), axes))

    def place(self, number: int, operation: Operation) -> None:
        """Decide what one operation runs with, and what moves for it."""
        rule = operation.rule
        # 1. Contributions that pass through, and what cuts each factor beside them.
        wanted = self.state[operation.results[0]].partial if operation.results else ()
        kept = self._keep_partial(operation, wanted)
        shardings = self._add_partial(operation, kept)
        chosen = self._choose(operation, shardings)
        if not all(are_apart(part, other) for axes in chosen for part in axes for other in kept):
            # Axes with contributions are needed to cut: the contributions are combined first.
            kept = ()
            shardings = self._add_partial(operation, kept)
            chosen = self._choose(operation, shardings)
        # 2. The shardings of all tensors under those cuts, and the axes along which results are
        # partial.
        cut = [
            updated(
                mapping,
                rule.sizes,
                {
                    factor: FactorSharding(chosen[factor], (), True, place == len(dim) - 1)
                    for dim in mapping
                    for place, factor in enumerate(dim)
                },
                sharding,
            )
            for mapping, sharding in zip(rule.tensors, shardings, strict=True)
        ]
        # 3. Operands: combine contributions that do not pass through, then reshard.
        count = len(operation.operands)
        for position, value in enumerate(operation.operands):
            at: Place = (number, "operand", position)
            less = self._find_reduced(value, at, self.state[value], kept)
            if less.dims != cut[position].dims:
                self.move(value, at, less, cut[position])
        # 4. Results: the same, from what the operation makes to what the value is to be.
        made = []
        for position, value in enumerate(operation.results):
            target = self.state[value]
            reduced = rule.contributed[position]
            contributed = ordered((*kept, *(part for f in reduced for part in chosen[f])))
            found = cut[count + position]._replace(
                partial=contributed,
                reduction=self._find_combining(operation, kept) if contributed else None,
            )
            made.append(self.spec(found))
            at = (number, "result", position)
            less = self._find_reduced(value, at, found, _find_staying(found, target))
            if not are_alike(less, target):
                self.move(value, at, less, target)
        self.operands.append(tuple(map(self.spec, cut[:count])))
        self.results.append(tuple(made))

    def _add_partial(self, operation: Operation, kept: Parts) -> list[Sharding]:
        """The shardings of an operation's tensors, its operands' contributions combined."""
        operands = [
            _subtract(self.state[value], difference(self.state[value].partial, kept))
            for value in operation.operands
        ]
        # What a result has of contributions follows from how the operation runs.
        return operands + [
            _subtract(self.state[v], self.state[v].partial) for v in operation.results
        ]

    def _choose(self, operation: Operation, shardings: Sequence[Sharding]) -> Axes:
        """The axes that cut each factor. Axes that overflow a factor cut none."""
        rule = operation.rule
        carriers = carriers_of(rule)
        factors = [
            collected(mapping, rule.sizes, sharding, carriers, closed_if_missing=True)
            for mapping, sharding in zip(rule.tensors, shardings, strict=True)
        ]
        for cuts in factors:
            for cut in cuts.values():
                # They cut no factor, so that no other tensor can be cut alike: the reshard leaves
                # them.
                cut.overflow = ()
        places = (*operation.operands, *operation.results)
        sizes = [math.prod(self.graph.values[value].shape) for value in places]
        return common_axes(rule, factors, sizes, self.table.mesh)

    def _find_reduced(self, value: int, place: Place, source: Sharding, kept: Parts) -> Sharding:
        """Combine contributions that are not kept, and write that down."""
        combined = difference(source.partial, kept)
        if not combined:
            return source
        target = _subtract(source, combined)
        self.move(value, place, source, target, combined)
        return target

    def follow(self, number: int, operation: Operation, run: OperationShardings) -> None:
        """Write down what moves for an operation of which it is decided how it runs."""
        reads, makes = run
        for position, (value, target) in enumerate(zip(operation.operands, reads, strict=True)):
            self.bring(value, (number, "operand", position), self.state[value], target)
        for position, (value, source) in enumerate(zip(operation.results, makes, strict=True)):
            self.bring(value, (number, "result", position), source, self.state[value])
        self.operands.append(tuple(map(self.spec, reads)))
        self.results.append(tuple(map(self.spec, makes)))

    def bring(self, value: int, place: Place, source: Sharding, target: Sharding) -> None:
        """Write a movement down, if there is one: contributions and cuts at once."""
        if not are_alike(source, target):
            combined = difference(source.partial, _find_staying(source, target))
            self.move(value, place, source, target, combined)

    def _find_combining(self, operation: Operation, kept: Parts) -> str:
        """The reduction of the contributions that an operation makes, or carries."""
        carried = [self.state[value] for value in operation.operands] if kept else []
        found = [one.reduction for one in carried if one.partial and one.reduction]
        return found[0] if found else operation.rule.reduction_operator

    def _keep_partial(self, operation: Operation, wanted: Parts) -> Parts:
        """Partial axes that operands keep, since the operator passes contributions on.

        The result asks for them, and the operands that have them are such a set as the operator
        may be applied to contribution by contribution.
        """
        known = operators.get(operation.operator)
        if not wanted or known is None:
            return ()
        partial = [self.state[value].partial for value in operation.operands]
        having = tuple(position for position, axes in enumerate(partial) if axes)
        reductions = {self.state[operation.operands[position]].reduction for position in having}
        if not having or len({partial[position] for position in having}) > 1:
            return ()
        if len(reductions) > 1:
            return ()
        # The operands that may have contributions together: (0, 1) of subtract, (0,) or (1,) of
        # multiply.
        sets = known.partial_operands(
            len(partial), reductions.pop() or "sum", **operation.attributes
        )
        # The intersection: wanted without what of it the operands have not.
        both = difference(wanted, difference(wanted, partial[having[0]]))
        return both if having in sets else ()

    def deliver(self) -> None:
        """Make outputs what they are asked to be."""
        for position, (value, spec) in enumerate(zip(self.graph.outputs, self.asked, strict=True)):
            source = self.state[value]
            ndim = len(self.graph.values[value].shape)
            target = _make_whole(ndim) if spec is None else self.table.encoded(spec)
            target = target._replace(replicated=())
            at: Place = (None, "output", position)
            source = self._find_reduced(value, at, source, target.partial)
            if source.dims != target.dims or source.partial != target.partial:
                self.move(value, at, source, target)


def _make_whole(ndim: int) -> Sharding:
    return Sharding(((),) * ndim, (True,) * ndim)


def _find_staying(source: Sharding, target: Sharding) -> Parts:
    """The contributions of a sharding that another has as well: of one kind, along these axes."""
    return target.partial if source.reduction == target.reduction else ()


def _subtract(sharding: Sharding, combined: Parts) -> Sharding:
    """A sharding without contributions along some axes."""
    left = difference(sharding.partial, combined)
    return sharding._replace(partial=left, reduction=sharding.reduction if left else None)


def ordered(parts: Sequence[Part]) -> Parts:
    """Parts in the order of the mesh, those that follow one another joined.

    >>> ordered([(1, 1, 2, 0), (0, 2, 2, 0), (0, 1, 2, 0)])
    ((0, 1, 4, 0), (1, 1, 2, 0))
    """
    found: Parts = ()
    for part in sorted(parts):
        found = joined(found, part)
    return found


def difference(parts: Parts, other: Parts) -> Parts:
    """The first parts without the second ones, in the order of the mesh.

    >>> difference(((0, 1, 8, 0),), ((0, 2, 2, 0),))
    ((0, 1, 2, 0), (0, 4, 2, 0))
    """
    if not other:
        return ordered(parts)
    left = list(parts)
    for taken in other:
        kept: list[Part] = []
        for axis, pre, size, level in left:
            # An axis part covers the strides from `pre` to `pre * size`; what is left of it lies
            # before `low` or behind `high`.
            low, high = max(pre, taken[1]), min(pre * size, taken[1] * taken[2])
            if (axis, pre, size) == taken[:3]:  # Of an axis of size 1 too, which has no strides.
                continue
            if axis != taken[0] or low >= high:
                kept.append((axis, pre, size, level))
                continue
            if pre < low:
                kept.append((axis, pre, low // pre, 0))
            if high < pre * size:
                kept.append((axis, high, pre * size // high, 0))
        left = kept
    return ordered(left)
