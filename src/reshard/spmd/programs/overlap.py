"""Overlap of communication and computation: its cost, and matrix products split to permit it.

A trace with overlap has the steps and the order of the program (`program`, `steps`), executed
without elements::

    memory   registers, and for each reshard in flight its result and its buffers
    time     operators one after another, reshards one after another, and readers wait

Products are split into pieces that overlap with their reshards::

    n = all-gather(x)           n1, n2 = all-gather(x1), all-gather(x2)
    y = matmul(n, w)            y = concat(matmul(n1, w), matmul(n2, w))

    z = matmul(y, v)            z1, z2 = matmul(y1, v), matmul(y2, v)
    s = reduce-scatter(z)       s = concat(reduce-scatter(z1), reduce-scatter(z2))

While one piece is in flight, the product of another is computed (Wang et al., "Overlap
Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS
2023).

1. All reshards become operations of the graph.
2. A reshard is split together with the products that read its result, or with the product that
   computes its operand.
3. They are split along a dimension of the operand and the results that is not reduced. If it is
   sharded, a piece has an equal part of each shard, so that nothing else moves.
4. The number of pieces is the fastest, if that is faster than one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from reshard.errors import UsageError
from reshard.runs import IntArray
from reshard.sharding import ShardingSpec
from reshard.spmd.arrays.sharded_array import ShardedArray
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.operator import operator_of
from reshard.spmd.graph import Graph, Operation, Value
from reshard.spmd.programs.program import Preparation
from reshard.spmd.programs.steps import Action, ProgramStep
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.tracing.abstract_runner import AbstractRunner
from reshard.spmd.tracing.estimates import (
    InsertedReshard,
    TracedOperation,
    extra_bytes_of,
    held_bytes,
)
from reshard.spmd.tracing.trace import Trace, interpret, trace_graph


def check_overlap(overlap: Any) -> None:
    """Raise UsageError for an invalid number of reshards."""
    if not isinstance(overlap, int) or isinstance(overlap, bool) or overlap < 0:
        raise UsageError(
            f"overlap={overlap!r}; give how many movements may be under way beside what is "
            "computed, such as overlap=2, or 0 for none"
        )


def with_overlap(traced: Trace, overlap: int, library: str, donated: Sequence[int] = ()) -> Trace:
    """Estimate the memory and the time of a trace with overlap.

    Args:
        traced: of the function.
        overlap: how many movements are under way at most.
        library: whose collectives take the time.
        donated: inputs that the caller does not keep, by number.
    """
    graph = traced.graph
    kinds = {n: one for n, one in zip(graph.inputs, traced.inputs, strict=True) if one is not None}
    runner = AbstractRunner(graph.library)
    preparation = Preparation(runner, kinds)
    arrays = dict(graph.constants) | {
        number: runner.array(kind, ShardedArray) for number, kind in kinds.items()
    }
    interpret(graph, arrays, preparation)
    order = preparation.order(graph.outputs, overlap)
    gone = () if preparation.may_stop else donated
    inputs = preparation.registers([n for n in kinds if n not in gone])
    operations = _with_memory(traced, preparation, order, inputs)
    if traced.topology is None:
        return replace(traced, operations=operations)
    overlapped_s = _count_seconds(traced, preparation.steps, order, library)
    return replace(traced, operations=operations, overlapped_s=overlapped_s)


def _with_memory(
    traced: Trace, preparation: Preparation, order: Sequence[Action], inputs: Sequence[int]
) -> tuple[TracedOperation, ...]:
    ranks, steps = traced.ranks, preparation.steps
    sizes = {
        register: np.array(held_bytes([kind], ranks))
        for register, kind in preparation.kinds.items()
        # The caller keeps the arguments.
        if register not in set(inputs)
    }
    held: IntArray = np.array(held_bytes(traced.inputs, ranks))
    found: list[tuple[IntArray, IntArray] | None] = [None] * len(traced.operations)
    at = 0
    for action in order:
        one = steps[action.step]
        before, extra = held, np.zeros_like(held)
        if one.moved is not None:
            moved = InsertedReshard(0, *one.moved)
            extra = np.array(extra_bytes_of(moved, ranks))
        elif one.makes:
            # A function holds more within, before its results are there.
            within = traced.operations[one.operation].within
            extra = np.array([within.held_by(rank) for rank in ranks])
            for register in one.makes:
                extra = extra - sizes.get(register, 0)
            extra = np.maximum(extra, 0)
        if action.kind == "wait":
            held = held - extra
        else:
            for register in one.makes:
                held = held + sizes.get(register, 0)
        most = held + extra
        if action.kind == "begin":
            held = most
        else:
            at = one.operation
        known = found[at]
        found[at] = (before, most) if known is None else (known[0], np.maximum(known[1], most))
        for register in action.frees:
            held = held - sizes.get(register, 0)
    operations = []
    last = np.array(held_bytes(traced.inputs, ranks))
    for operation, counted in zip(traced.operations, found, strict=True):
        # An operation without a step has the memory of the previous operation.
        before, most = (last, last) if counted is None else counted
        last = before if counted is None else last
        operations.append(
            replace(operation, held_bytes=tuple(before.tolist()), live_bytes=tuple(most.tolist()))
        )
    return tuple(operations)


def _count_seconds(
    traced: Trace, steps: Sequence[ProgramStep], order: Sequence[Action], library: str
) -> float:
    """When the last step has ended, with what computes and what moves each on a line of its own."""
    computing = {one.operation: number for number, one in enumerate(steps) if one.moved is None}
    now_s = moved_s = 0.0
    ends_s: dict[int, float] = {}
    for action in order:
        one = steps[action.step]
        if action.kind == "wait":
            now_s = max(now_s, ends_s[action.step])
        elif one.moved is None:
            if computing[one.operation] == action.step:
                now_s += traced.operations[one.operation].busiest_s
        else:
            moved = InsertedReshard(0, *one.moved, traced.topology, library)
            moved_s = max(now_s, moved_s) + moved.seconds_s
            if action.kind == "begin":
                ends_s[action.step] = moved_s
            else:
                now_s = moved_s
    return now_s


PRODUCTS = ("matmul", "einsum")
COUNTS = (2, 4, 8)
"""Numbers of pieces."""
NO_RULE = OpShardingRule([], [], [])
"""Stands for the rule of an operation whose operands are not known yet."""


def overlapped(
    traced: Trace,
    overlap: int,
    library: str,
    donated: Sequence[int] = (),
    live_bytes: int | None = None,
) -> Trace:
    """Estimate a trace with overlap, and its products in pieces if that is faster.

    Args: those of `with_overlap`, and the most that a rank may hold.
    """
    whole = with_overlap(traced, overlap, library, donated)
    in_pieces = decomposed(traced, library)
    if in_pieces is None or whole.overlapped_s is None:
        return whole
    found = with_overlap(in_pieces, overlap, library, donated)
    fits = live_bytes is None or max(found.peak_bytes.values()) <= live_bytes
    is_quicker = found.overlapped_s is not None and found.overlapped_s < whole.overlapped_s
    return found if fits and is_quicker else whole


def decomposed(traced: Trace, library: str) -> Trace | None:
    """Trace the function with products in pieces; None if that is not faster.

    This is decided for each reshard separately, by the trace's topology and its devices. Without
    these nothing is split.
    """
    if traced.topology is None or traced.topology.device is None:
        return None
    placed = _MovedFunction(traced)
    taken: set[int] = set()
    chosen: dict[int, _Decomposition] = {}
    for place, step in enumerate(placed.steps):
        if step.target is None:
            continue
        for products in (placed.maker_of(place), placed.readers_of(place)):
            if not products or not taken.isdisjoint(products):
                continue
            pieces = placed.choose(place, products, library)
            if pieces is not None:
                chosen[place] = pieces
                taken.update(products)
                break
    if not chosen:
        return None
    graph = _PieceWriter(placed, chosen).run()
    return trace_graph(graph, traced.strategy, traced.topology, library)


@dataclass(frozen=True, slots=True)
class _Decomposition:
    """How a movement and products are cut.

    Args:
        products: their places.
        target: the sharding to which the value moves.
        factors: for each product, the factor of its rule along which it is split.
        dim: of the value that moves.
        parts: a piece has as much of each of so many parts of the dimension.
        count: of pieces.
    """

    products: tuple[int, ...]
    target: ShardingSpec
    factors: tuple[int, ...]
    dim: int
    parts: int
    count: int


class _MovedFunction:
    """A graph in which all reshards are operations, each with a value of its own.

    `traced` has the estimate of each of its operations; None for reshards.
    """

    def __init__(self, traced: Trace) -> None:
        self.graph, self.topology = traced.graph, traced.topology
        self.values = list(traced.graph.values)
        self.kinds: dict[int, ArrayType | None] = dict(
            zip(traced.graph.inputs, traced.inputs, strict=True)
        )
        self.steps: list[Operation] = []
        self.traced: list[TracedOperation | None] = []
        self._moved: dict[tuple[int, ShardingSpec], int] = {}
        for one in traced.operations:
            self._add(one)
        self.maker = {n: place for place, step in enumerate(self.steps) for n in step.results}
        self.readers: dict[int, list[int]] = {}
        for place, step in enumerate(self.steps):
            for number in dict.fromkeys(step.operands):
                self.readers.setdefault(number, []).append(place)

    def new_value(self, kind: ArrayType | None, shape: Sequence[int], dtype: str) -> int:
        number = len(self.values)
        self.values.append(Value(number, tuple(shape), dtype))
        self.kinds[number] = kind
        return number

    def _add(self, one: TracedOperation) -> None:
        """Append the reshards of its operands, the operation, and the reshards of its results."""
        reshards = [*one.before, *one.reused]
        operands = []
        for number, kind, spec in zip(
            one.operation.operands, one.operands, one.runs_with, strict=True
        ):
            at = number
            while kind is not None and kind.spec is not spec:
                found = [r for r in reshards if r.value == number and r.source is kind]
                if not found:
                    # Another sharding of the same layout.
                    break
                # To where a strategy wants it, and from there to what the operator runs with.
                (step, *_) = [r for r in found if r.target is spec] or found
                at, kind = self._move(at, step), step.result
            operands.append(at)
        results = one.operation.results
        # A `with_sharding` is a reshard already.
        after = () if one.operation.target is not None else one.after
        makes = {
            r.value: self.new_value(r.source, r.source.shape, r.source.dtype.name) for r in after
        }
        made = tuple(makes.get(number, number) for number in results)
        self.steps.append(replace(one.operation, operands=tuple(operands), results=made))
        self.traced.append(one)
        for number, kind in zip(results, one.results, strict=True):
            self.kinds[number] = kind
        for reshard in after:
            self._add_reshard(makes[reshard.value], reshard.value, reshard)

    def _move(self, number: int, reshard: InsertedReshard) -> int:
        key = (number, reshard.target)
        if key not in self._moved:
            kind = reshard.result
            self._moved[key] = made = self.new_value(kind, kind.shape, kind.dtype.name)
            self._add_reshard(number, made, reshard)
        return self._moved[key]

    def _add_reshard(self, source: int, result: int, reshard: InsertedReshard) -> None:
        shape = reshard.source.shape
        self.steps.append(Operation.with_sharding(source, result, shape, reshard.target))
        self.traced.append(None)

    def maker_of(self, place: int) -> tuple[int, ...]:
        """Return the product that makes what a movement moves, if nothing else reads that."""
        (source,) = self.steps[place].operands
        maker = self.maker.get(source, -1)
        if source in self.graph.outputs or self.readers[source] != [place]:
            return ()
        return (maker,) if maker >= 0 and self._is_product(maker) else ()

    def readers_of(self, place: int) -> tuple[int, ...]:
        """The products that read what a movement makes, if all they need is there for the first.

        Empty if another operation reads it first: it would need all pieces.
        """
        (made,) = self.steps[place].results
        readers = self.readers.get(made, [])
        products = [n for n in readers if self._is_product(n)]
        first = products[0] if products else 0
        if readers[:1] != products[:1]:
            return ()
        return tuple(
            n
            for n in products
            if all(self.maker.get(x, -1) < first for x in self.steps[n].operands)
        )

    def _is_product(self, place: int) -> bool:
        one = self.steps[place]
        # One value as both operands would be cut along two dimensions at once.
        return one.operator in PRODUCTS and len(set(one.operands)) == len(one.operands)

    def choose(self, place: int, products: tuple[int, ...], library: str) -> _Decomposition | None:
        """Return the fastest pieces, or None if the whole is faster."""
        moving = self.steps[place]
        source, target = (self.kinds[n] for n in (*moving.operands, *moving.results))
        if source is None or target is None or source.spec is None or target.spec is None:
            return None
        if source.spec.mesh is not target.spec.mesh:
            return None
        topology = self.topology
        whole = InsertedReshard(0, source, target.spec, topology, library)
        if not whole.moved_elements:
            return None
        calls = [self.traced[n] for n in products]
        computing_s = sum(one.busiest_s for one in calls if one is not None)
        best: _Decomposition | None = None
        best_s = whole.seconds_s + computing_s
        for dim, (factors, parts) in self._dims(place, products):
            copying_s = self._copying_s(place, products, factors, parts)
            for count in COUNTS:
                if source.shape[dim] % (parts * count):
                    break
                piece = _with_size(source, dim, source.shape[dim] // count)
                moving_s = InsertedReshard(0, piece, target.spec, topology, library).seconds_s
                each_s = computing_s / count
                total_s = moving_s + each_s + (count - 1) * max(moving_s, each_s) + copying_s
                if total_s < best_s:
                    best_s = total_s
                    best = _Decomposition(products, target.spec, factors, dim, parts, count)
        return best

    def _dims(
        self, place: int, products: tuple[int, ...]
    ) -> Iterator[tuple[int, tuple[tuple[int, ...], int]]]:
        """Dimensions along which it can be cut, with the products' factors and the parts."""
        moving = self.steps[place]
        (source,), (target,) = moving.operands, moving.results
        for dim in range(len(self.values[source].shape)):
            cuts = [self._parts(n, dim) for n in (source, target)]
            factors = []
            for number in products:
                step = self.steps[number]
                rule, tensors = step.rule, step.rule.tensors
                numbers = (*step.operands, *step.results)
                mapping = next(
                    one for one, n in zip(tensors, numbers, strict=True) if n in (source, target)
                )
                factor = mapping[dim][0] if len(mapping[dim]) == 1 else -1
                if not _is_free(rule, factor):
                    break
                factors.append(factor)
                for one, n in zip(tensors, numbers, strict=True):
                    cuts += [self._parts(n, at) for at, own in enumerate(one) if factor in own]
            parts = max((one or 0 for one in cuts), default=0)
            if len(factors) == len(products) and all(one and parts % one == 0 for one in cuts):
                yield dim, (tuple(factors), parts)

    def _parts(self, number: int, dim: int) -> int | None:
        """Return the number of equal shards of a dimension, or None if they are not equal."""
        kind = self.kinds[number]
        if kind is None or kind.spec is None:
            return None
        levels = kind.spec.dim_specs[dim].levels
        if len(levels) > 1 or any(not level.rule.is_default for level in levels):
            return None
        mesh = kind.spec.mesh
        parts = math.prod(mesh.axis_size(axis) for level in levels for axis in level.axes)
        return parts if kind.shape[dim] % parts == 0 else None

    def _copying_s(
        self, place: int, products: tuple[int, ...], factors: tuple[int, ...], parts: int
    ) -> float:
        """Return how long it takes to put results together, and to take pieces out of parts."""
        device = self.topology and self.topology.device
        assembled = {n for one in products for n in self.steps[one].results}
        if parts > 1:
            for one, factor in zip(products, factors, strict=True):
                step = self.steps[one]
                assembled.update(
                    n
                    for n, dims in zip(step.operands, step.rule.operands, strict=True)
                    if any(factor in own for own in dims)
                )
        size_bytes = sum(self._local_bytes(n) for n in assembled)
        return 2 * size_bytes / device.memory_bytes_per_s if device else 0.0

    def _local_bytes(self, number: int) -> float:
        kind = self.kinds[number]
        if kind is None:
            return 0.0
        cut = math.prod(self._parts(number, dim) or 1 for dim in range(kind.ndim))
        return math.prod(kind.shape) * kind.dtype.itemsize_bytes / cut


def _with_size(kind: ArrayType, dim: int, size: int) -> ArrayType:
    shape = (*kind.shape[:dim], size, *kind.shape[dim + 1 :])
    return ArrayType(shape, kind.dtype, kind.spec)


def _is_free(rule: OpShardingRule, factor: int) -> bool:
    """Return whether results have a factor, alone in its dimension wherever it is."""
    special = {*rule.reduction, *rule.need_replication, *rule.permutation, *rule.blocked}
    if factor < 0 or factor in special:
        return False
    dims = [own for mapping in rule.tensors for own in mapping if factor in own]
    in_all = all(any(factor in own for own in mapping) for mapping in rule.results)
    return in_all and all(len(own) == 1 for own in dims)


class _PieceWriter:
    """The operations with pieces in place of what was chosen."""

    def __init__(self, placed: _MovedFunction, chosen: dict[int, _Decomposition]) -> None:
        self._placed = placed
        self._chosen = chosen
        self._steps: list[Operation] = []
        # Of values that are put together, where they are read first: their pieces.
        self._waiting: dict[int, tuple[list[int], int, int]] = {}
        self._cut: dict[tuple[int, int, int, int], list[int]] = {}

    def run(self) -> Graph:
        placed, graph = self._placed, self._placed.graph
        first = {min(one.products): place for place, one in self._chosen.items()}
        replaced = {n for one in self._chosen.values() for n in one.products}
        for place, step in enumerate(placed.steps):
            if place in first:
                self._in_pieces(first[place], self._chosen[first[place]])
            if place in replaced or place in self._chosen:
                continue
            for number in step.operands:
                self._put_together(number)
            self._steps.append(step)
        for number in graph.outputs:
            self._put_together(number)
        operations = tuple(self._steps)
        return replace(graph, values=tuple(placed.values), operations=operations, is_checked=True)

    def _in_pieces(self, place: int, pieces: _Decomposition) -> None:
        moving = self._placed.steps[place]
        (source,), (moved,) = moving.operands, moving.results
        dim, parts, count = pieces.dim, pieces.parts, pieces.count
        is_before = all(moved in self._placed.steps[n].operands for n in pieces.products)
        made: dict[int, list[int]] = {moved: []}
        # All pieces first, so that each can be in flight during the previous product.
        sources = [self._piece(source, dim, pieces, n) for n in range(count)] if is_before else []
        for number in range(count):
            if is_before:
                made[moved].append(self._add_movement(sources[number], pieces.target))
            for product, factor in zip(pieces.products, pieces.factors, strict=True):
                step = self._placed.steps[product]
                inputs = [
                    made[moved][number]
                    if is_before and n == moved
                    else self._operand(n, dims, factor, pieces, number)
                    for n, dims in zip(step.operands, step.rule.operands, strict=True)
                ]
                (result,) = step.results
                known = self._placed.traced[product]
                own = self._add_operation(
                    replace(step, reads=step.reads if known is None else known.runs_with),
                    inputs,
                    self._placed.values[result].dtype,
                )
                made.setdefault(result, []).append(own)
                if not is_before:
                    made[moved].append(self._add_movement(own, pieces.target))
        if is_before:
            for product, factor in zip(pieces.products, pieces.factors, strict=True):
                operation = self._placed.steps[product]
                (dims,), (result,) = operation.rule.results, operation.results
                at = next(n for n, own in enumerate(dims) if factor in own)
                self._waiting[result] = (made[result], at, parts)
        self._waiting[moved] = (made[moved], dim, parts)

    def _operand(
        self,
        number: int,
        dims: Sequence[Sequence[int]],
        factor: int,
        pieces: _Decomposition,
        which: int,
    ) -> int:
        """Return a product's operand, or its piece where it has the factor."""
        self._put_together(number)
        at = next((n for n, own in enumerate(dims) if factor in own), None)
        return number if at is None else self._piece(number, at, pieces, which)

    def _piece(self, number: int, dim: int, pieces: _Decomposition, which: int) -> int:
        """Return a piece of a value, with as much of each part."""
        self._put_together(number)
        parts, count = pieces.parts, pieces.count
        shape = self._placed.values[number].shape
        size = shape[dim] // (parts * count)
        at = dim
        if parts > 1:
            apart = (*shape[:dim], parts, size * count, *shape[dim + 1 :])
            key = (number, dim, parts, 0)
            if key not in self._cut:
                self._cut[key] = [self._add_named("reshape", [number], shape=apart)]
            (number,), at, shape = self._cut[key], dim + 1, apart
        starts = tuple(which * size if n == at else 0 for n in range(len(shape)))
        limits = tuple((which + 1) * size if n == at else length for n, length in enumerate(shape))
        strides = (1,) * len(shape)
        found = self._add_named("slice", [number], starts=starts, limits=limits, strides=strides)
        if parts > 1:
            together = (*shape[:dim], parts * size, *shape[dim + 2 :])
            found = self._add_named("reshape", [found], shape=together)
        return found

    def _put_together(self, number: int) -> None:
        """The value of pieces that were made before, where it is read first."""
        if number not in self._waiting:
            return
        made, dim, parts = self._waiting.pop(number)
        if parts == 1:
            self._add_named("concat", made, number, axis=dim)
            return
        shape = self._placed.values[number].shape
        apart = (*shape[:dim], parts, shape[dim] // (parts * len(made)), *shape[dim + 1 :])
        rows = [self._add_named("reshape", [one], shape=apart) for one in made]
        self._add_named(
            "reshape", [self._add_named("concat", rows, axis=dim + 1)], number, shape=shape
        )

    def _add_named(
        self, name: str, operands: Sequence[int], result: int | None = None, **attributes: Any
    ) -> int:
        dtype = self._placed.values[operands[0]].dtype
        operation = Operation(name, (), (), NO_RULE, MappingProxyType(attributes))
        return self._add_operation(operation, operands, dtype, result)

    def _add_movement(self, number: int, spec: ShardingSpec) -> int:
        value = self._placed.values[number]
        made = self._placed.new_value(None, value.shape, value.dtype)
        self._steps.append(Operation.with_sharding(number, made, value.shape, spec))
        return made

    def _add_operation(
        self, like: Operation, operands: Sequence[int], dtype: str, result: int | None = None
    ) -> int:
        """Append an operation like another on other operands; its result is new if None."""
        shapes = [self._placed.values[n].shape for n in operands]
        inferred = operator_of(like.operator).inferred(shapes, **like.attributes)
        if result is None:
            result = self._placed.new_value(None, inferred.result_shapes[0], dtype)
        self._steps.append(
            replace(like, operands=tuple(operands), results=(result,), rule=inferred.rule)
        )
        return result
