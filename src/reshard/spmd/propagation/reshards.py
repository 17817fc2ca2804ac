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

An operator runs with the same axes for a factor in all of its tensors. `common_axes` chooses them:

1. If the tensors agree, that is the answer.
2. Of two tensors (an elementwise or a moving operator) keep the sharding of the tensor without cuts
   along which elements move, else the larger, else the more sharded.
3. Of more tensors, each sharding of a factor in some tensor, and each prefix of it, is a candidate.
   The candidate that is supported by the most elements (those of all tensors that are sharded so,
   or further) is chosen first; then passed-through factors before reduced and moved ones; then more
   shards. Candidates that overlap it are shortened, and the next is chosen.
4. Axes of factors that must be replicated are moved to factors that all tensors have, if they
   divide them.

A factor of a dimension of several is a candidate only if the previous factor is sharded to single
indices. The choice is that of Shardy (OpenXLA, explicit reshards of the export pipeline).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from reshard.errors import SpecError
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.core.operator import operators
from reshard.spmd.graph import Operation
from reshard.spmd.propagation.axes import (
    AxisTable,
    FactorSharding,
    FactorShardings,
    Part,
    Parts,
    Sharding,
    are_alike,
    are_apart,
    begins_strictly,
    collected,
    joined,
    size_of,
    updated,
    without,
)
from reshard.spmd.propagation.propagation import OperationShardings, PropagatedGraph, carriers_of
from reshard.spmd.rules.sharding_rule import OpShardingRule

Axes = list[Parts]
"""The axes that cut each factor, by its index."""


def common_axes(
    rule: OpShardingRule,
    factors: Sequence[FactorShardings],
    sizes: Sequence[int],
    mesh: DeviceMesh,
) -> Axes:
    """Return the axes that cut each factor while the operator runs.

    Args:
        rule: of the operator.
        factors: of its tensors, operands first.
        sizes: elements of each tensor.
        mesh: whose axes they are cut along.
    """
    chosen = _find_agreed(rule, factors)
    if chosen is not None:
        return chosen
    # Scalars have nothing to cut.
    arrays = [number for number, mapping in enumerate(rule.tensors) if mapping]
    has_compound = any(len(dim) > 1 for mapping in rule.tensors for dim in mapping)
    if len(arrays) == 2 and not rule.need_replication and not has_compound:
        return _follow_one(rule, factors, sizes, arrays, AxisTable.of(mesh))
    chosen = _Vote(rule, factors, sizes, mesh).axes()
    # The vote may have cut these as well; their axes go elsewhere, or are unused.
    for factor in rule.need_replication:
        axes, chosen[factor] = chosen[factor], ()
        if axes and _is_everywhere(rule, factor):
            _distribute(rule, axes, chosen)
    return chosen


def _find_agreed(rule: OpShardingRule, factors: Sequence[FactorShardings]) -> Axes | None:
    """Return the axes of each factor, or None if tensors disagree."""
    agreed: list[Parts | None] = [None] * len(rule.sizes)
    used: Parts = ()
    for tensor in factors:
        for factor, cut in tensor.items():
            if factor in rule.need_replication and cut.axes:
                return None
            earlier = agreed[factor]
            if earlier is None:
                if not all(are_apart(a, b) for a in cut.axes for b in used):
                    return None
                agreed[factor] = cut.axes
                used += cut.axes
            elif earlier != cut.axes:
                return None
    return [axes or () for axes in agreed]


def _follow_one(
    rule: OpShardingRule,
    factors: Sequence[FactorShardings],
    sizes: Sequence[int],
    arrays: Sequence[int],
    table: AxisTable,
) -> Axes:
    """Return the axes of the preferred of two tensors, and disjoint axes of the other."""

    def preference(number: int) -> tuple[bool, int, int]:
        cuts = factors[number]
        moves = any(factor in rule.permutation and cut.axes for factor, cut in cuts.items())
        shards = 1
        for cut in cuts.values():
            shards *= size_of(cut.axes)
        return (not moves, sizes[number], shards)

    first, second = arrays
    # Of equals the first tensor is followed.
    if preference(first) < preference(second):
        first, second = second, first
    chosen: Axes = [()] * len(rule.sizes)
    used: Parts = ()
    for factor, cut in factors[first].items():
        chosen[factor] = cut.axes
        used += cut.axes
    for factor, cut in factors[second].items():
        if factor not in factors[first]:
            chosen[factor] = _shorten(cut.axes, used, table)
    return chosen


def _shorten(axes: Parts, used: Parts, table: AxisTable) -> Parts:
    """Return the longest beginning of `axes` that is apart from `used`; of whole levels."""
    for place, part in enumerate(axes):
        prefix = without(part, used)
        if prefix != part:
            left = axes[:place] if prefix is None else (*axes[:place], prefix)
            return table.whole_levels(left)
    return axes


def _is_everywhere(rule: OpShardingRule, factor: int) -> bool:
    """Return whether all tensors but scalars have a factor."""
    return all(any(factor in dim for dim in mapping) for mapping in rule.tensors if mapping)


def _distribute(rule: OpShardingRule, axes: Parts, chosen: Axes) -> None:
    """Shard factors that all tensors have along free axes that divide them."""
    special = {*rule.reduction, *rule.need_replication, *rule.permutation}
    # A level with a rule of its own stays where it is, and nothing cuts its parts further here.
    waiting = [part for part in axes if not part[3]]
    for factor, size in enumerate(rule.sizes):
        if factor in special or not size or not _is_everywhere(rule, factor):
            continue
        if any(part[3] for part in chosen[factor]):
            continue
        shards = size_of(chosen[factor])
        if size % shards:
            continue
        room = size // shards
        while waiting and room % waiting[0][2] == 0:
            room //= waiting[0][2]
            chosen[factor] = joined(chosen[factor], waiting.pop(0))


@dataclass(slots=True)
class _Candidate:
    """A sharding of a factor, the elements of the tensors that support it, and its shards."""

    factor: int
    axes: Parts
    elements: int
    shards: int


class _Vote:
    """The choice among several tensors' shardings: their candidates, and which comes first."""

    def __init__(
        self,
        rule: OpShardingRule,
        factors: Sequence[FactorShardings],
        sizes: Sequence[int],
        mesh: DeviceMesh,
    ) -> None:
        self.rule = rule
        # Ties go by the axes' names, not by their places in the mesh.
        order = sorted(range(len(mesh.axis_names)), key=lambda axis: mesh.axis_names[axis])
        self.rank = {axis: place for place, axis in enumerate(order)}
        self.full = mesh.shape
        self.table = AxisTable.of(mesh)
        # For each factor of a dimension of several, those right before it that are not single
        # indices yet.
        self.needs: dict[int, set[int]] = {}
        for mapping in rule.tensors:
            for dim in mapping:
                for before, factor in itertools.pairwise(dim):
                    self.needs.setdefault(factor, set()).add(before)
        proposed: dict[tuple[int, Parts], None] = {}
        for tensor in factors:
            for factor, cut in tensor.items():
                # Every beginning of a cut is a candidate, so that what is too long may be taken in
                # part.
                for count in range(len(cut.axes), 0, -1):
                    if self.table.whole_levels(cut.axes[:count]) == cut.axes[:count]:
                        proposed[factor, cut.axes[:count]] = None
        self.candidates = []
        for factor, axes in proposed:
            elements = sum(
                size
                for tensor, size in zip(factors, sizes, strict=True)
                if factor in tensor
                and (tensor[factor].axes == axes or begins_strictly(axes, tensor[factor].axes))
            )
            self.candidates.append(_Candidate(factor, axes, elements, size_of(axes)))

    def axes(self) -> Axes:
        """Return the axes that cut each factor."""
        chosen: Axes = [()] * len(self.rule.sizes)
        while True:
            valid = [
                candidate for candidate in self.candidates if not self.needs.get(candidate.factor)
            ]
            if not valid:
                return chosen
            best = max(valid, key=self._key)
            factor, axes = best.factor, best.axes
            chosen[factor] = axes
            if size_of(axes) == self.rule.sizes[factor]:
                for needed in self.needs.values():
                    needed.discard(factor)
            self.candidates = [
                candidate for candidate in self.candidates if self._remains(candidate, best, chosen)
            ]

    def _remains(self, candidate: _Candidate, best: _Candidate, chosen: Axes) -> bool:
        if candidate.factor == best.factor:
            # A longer cut of the same factor remains, counted by what it adds.
            candidate.shards = size_of(candidate.axes) // size_of(best.axes)
            return candidate is not best and begins_strictly(best.axes, candidate.axes)
        axes = _shorten(candidate.axes, best.axes, self.table)
        candidate.shards = size_of(axes)
        if axes != candidate.axes:
            candidate.axes = axes
            candidate.shards //= size_of(chosen[candidate.factor])
            return axes != chosen[candidate.factor]
        return True

    def _key(self, candidate: _Candidate) -> tuple[object, ...]:
        kind = 3
        if candidate.factor in self.rule.reduction:
            kind = 2
        elif candidate.factor in self.rule.permutation:
            kind = 1
        elif candidate.factor in self.rule.need_replication:
            kind = 0
        # The largest key goes first. Names decide last, so that an answer does not depend on the
        # places of axes in the mesh.
        names = tuple(
            (self.rank[part[0]], part[2] != self.full[part[0]], part[1], part[2])
            for part in candidate.axes
        )
        return (
            candidate.elements,
            kind,
            candidate.shards,
            candidate.factor,
            len(candidate.axes),
            names,
        )


Side = Literal["operand", "result", "output"]
Place = tuple[int | None, Side, int]


@dataclass(frozen=True, slots=True)
class Movement:
    """A change of the sharding of a value.

    Args:
        value: its number.
        operation: the number of the operation that reads or makes it; None for an output.
        side: where it moves: before the operation, after it, or after the whole function.
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
    """The reshards of a propagated graph, and the shardings between which they are.

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
    >>> annotations = {0: spec(mesh, "-, y"), 1: spec(mesh, "y, -"), 2: spec(mesh, "x, -")}
    >>> print(explicit_reshards(propagate_graph(graph, annotations)))
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
    """The reshards so far, and how operations run, from the first operation to the last."""

    def __init__(self, propagated: PropagatedGraph, table: AxisTable) -> None:
        self.graph = propagated.graph
        self.asked = propagated.outputs
        self.table = table
        self.state = [
            Sharding.whole(len(value.shape))
            if spec is None
            # Replicated axes only restrict propagation, which is over.
            else table.encoded(spec)._replace(replicated=())
            for value, spec in zip(self.graph.values, propagated.values, strict=True)
        ]
        self.operands: list[tuple[ShardingSpec, ...]] = []
        self.results: list[tuple[ShardingSpec, ...]] = []
        self.moved: list[Movement] = []

    def spec(self, sharding: Sharding) -> ShardingSpec:
        """Return a sharding as users see it: closed, since propagation is over."""
        return self.table.closed(sharding)

    def move(
        self,
        value: int,
        place: Place,
        source: Sharding,
        target: Sharding,
        reduced: Parts = (),
    ) -> None:
        """Append a movement."""
        axes = tuple(map(self.table.axis, reduced))
        self.moved.append(Movement(value, *place, self.spec(source), self.spec(target), axes))

    def place(self, number: int, operation: Operation) -> None:
        """Choose the shardings of an operation, and append its movements."""
        rule = operation.rule
        # 1. Contributions that pass through, and the other axes of each factor.
        result_partial = self.state[operation.results[0]].partial if operation.results else ()
        passed = self._keep_partial(operation, result_partial)
        shardings = self._add_partial(operation, passed)
        chosen = self._choose(operation, shardings)
        if not all(are_apart(part, other) for axes in chosen for part in axes for other in passed):
            # Axes with contributions are needed to cut: the contributions are combined first.
            passed = ()
            shardings = self._add_partial(operation, passed)
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
            less = self._find_reduced(value, at, self.state[value], passed)
            if less.dims != cut[position].dims:
                self.move(value, at, less, cut[position])
        # 4. Results: the same, from what the operation makes to what the value is to be. They
        # combine like the contributions that it passes on, or by the rule.
        carried = [self.state[value] for value in operation.operands] if passed else []
        reductions = [
            sharding.reduction for sharding in carried if sharding.partial and sharding.reduction
        ]
        reduction = reductions[0] if reductions else rule.reduction_operator
        result_specs = []
        for position, value in enumerate(operation.results):
            target = self.state[value]
            reduced = rule.contributed[position]
            contributed = ordered((*passed, *(part for f in reduced for part in chosen[f])))
            computed = cut[count + position]._replace(
                partial=contributed,
                reduction=reduction if contributed else None,
            )
            result_specs.append(self.spec(computed))
            at = (number, "result", position)
            less = self._find_reduced(value, at, computed, _find_staying(computed, target))
            if not are_alike(less, target):
                self.move(value, at, less, target)
        self.operands.append(tuple(map(self.spec, cut[:count])))
        self.results.append(tuple(result_specs))

    def _add_partial(self, operation: Operation, passed: Parts) -> list[Sharding]:
        """Return the shardings of an operation's tensors, its operands' contributions combined."""
        operands = [
            _subtract(self.state[value], difference(self.state[value].partial, passed))
            for value in operation.operands
        ]
        # The contributions of a result follow from how the operation runs.
        return operands + [
            _subtract(self.state[v], self.state[v].partial) for v in operation.results
        ]

    def _choose(self, operation: Operation, shardings: Sequence[Sharding]) -> Axes:
        """Return the axes that cut each factor. Axes that overflow a factor cut none."""
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
        """Combine contributions that are not kept, and append that movement."""
        combined = difference(source.partial, kept)
        if not combined:
            return source
        target = _subtract(source, combined)
        self.move(value, place, source, target, combined)
        return target

    def follow(self, number: int, operation: Operation, run: OperationShardings) -> None:
        """Append the movements of an operation whose shardings a strategy has chosen."""
        reads, makes = run
        for position, (value, target) in enumerate(zip(operation.operands, reads, strict=True)):
            self.bring(value, (number, "operand", position), self.state[value], target)
        for position, (value, source) in enumerate(zip(operation.results, makes, strict=True)):
            self.bring(value, (number, "result", position), source, self.state[value])
        self.operands.append(tuple(map(self.spec, reads)))
        self.results.append(tuple(map(self.spec, makes)))

    def bring(self, value: int, place: Place, source: Sharding, target: Sharding) -> None:
        """Append a movement, if needed: contributions and axes together."""
        if not are_alike(source, target):
            combined = difference(source.partial, _find_staying(source, target))
            self.move(value, place, source, target, combined)

    def _keep_partial(self, operation: Operation, requested: Parts) -> Parts:
        """Return the partial axes that operands keep, because the operator passes them on.

        The result requests them, and the operator may be applied to contributions of just the
        operands that have them.
        """
        operator = operators.get(operation.operator)
        if not requested or operator is None:
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
        sets = operator.partial_operands(
            len(partial), reductions.pop() or "sum", **operation.attributes
        )
        # The intersection: wanted without the parts that the operands lack.
        both = difference(requested, difference(requested, partial[having[0]]))
        return both if having in sets else ()

    def deliver(self) -> None:
        """Append the movements of outputs to their requested shardings."""
        for position, (value, spec) in enumerate(zip(self.graph.outputs, self.asked, strict=True)):
            source = self.state[value]
            ndim = len(self.graph.values[value].shape)
            target = Sharding.whole(ndim) if spec is None else self.table.encoded(spec)
            target = target._replace(replicated=())
            at: Place = (None, "output", position)
            source = self._find_reduced(value, at, source, target.partial)
            if source.dims != target.dims or source.partial != target.partial:
                self.move(value, at, source, target)


def _find_staying(source: Sharding, target: Sharding) -> Parts:
    """Return the contributions that are kept between two shardings."""
    return target.partial if source.reduction == target.reduction else ()


def _subtract(sharding: Sharding, combined: Parts) -> Sharding:
    """Return a sharding without contributions along some axes."""
    if not sharding.partial:
        return sharding
    left = difference(sharding.partial, combined)
    return sharding._replace(partial=left, reduction=sharding.reduction if left else None)


def ordered(parts: Sequence[Part]) -> Parts:
    """Return parts in the order of the mesh, with consecutive parts joined.

    >>> ordered([(1, 1, 2, 0), (0, 2, 2, 0), (0, 1, 2, 0)])
    ((0, 1, 4, 0), (1, 1, 2, 0))
    """
    merged: Parts = ()
    for part in sorted(parts):
        merged = joined(merged, part)
    return merged


def difference(parts: Parts, other: Parts) -> Parts:
    """Return the first parts without the second ones, in the order of the mesh.

    >>> difference(((0, 1, 8, 0),), ((0, 2, 2, 0),))
    ((0, 1, 2, 0), (0, 4, 2, 0))
    """
    if not (parts and other):
        return ordered(parts)
    left = list(parts)
    for removed in other:
        remaining: list[Part] = []
        for axis, pre, size, level in left:
            # An axis part covers the strides from `pre` to `pre * size`; what is left of it lies
            # before `low` or after `high`.
            low, high = max(pre, removed[1]), min(pre * size, removed[1] * removed[2])
            if (axis, pre, size) == removed[:3]:  # An axis of size 1, too, which lacks strides.
                continue
            if axis != removed[0] or low >= high:
                remaining.append((axis, pre, size, level))
                continue
            if pre < low:
                remaining.append((axis, pre, low // pre, 0))
            if high < pre * size:
                remaining.append((axis, high, pre * size // high, 0))
        left = remaining
    return ordered(left)
