"""Decomposition: matrix products in pieces that overlap with their reshards.

    n = all-gather(x)           n1, n2 = all-gather(x1), all-gather(x2)
    y = matmul(n, w)            y = concat(matmul(n1, w), matmul(n2, w))

    z = matmul(y, v)            z1, z2 = matmul(y1, v), matmul(y2, v)
    s = reduce-scatter(z)       s = concat(reduce-scatter(z1), reduce-scatter(z2))

While a piece is in flight, the product of another is computed (Wang et al., "Overlap
Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS
2023).

1. All reshards become operations of the graph (`reshard_insertion`).
2. A reshard is split together with the products that read its result, or with the product that
   computes its operand.
3. They are split along a dimension of the operand and the results that is not reduced. If it is
   sharded, a piece has an equal part of each shard, so that nothing else moves.
4. The number of pieces is the fastest, if that is faster than the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.operator import operator_of
from reshard.spmd.graph import Graph, Operation, Value
from reshard.spmd.programs.reshard_insertion import insert_reshards
from reshard.spmd.rules.sharding_rule import OpShardingRule
from reshard.spmd.tracing.abstract_runner import AbstractRunner
from reshard.spmd.tracing.estimates import InsertedReshard, TracedOperation
from reshard.spmd.tracing.trace import Trace, trace_graph
from reshard.topology import Topology

PRODUCTS = ("matmul", "einsum")
COUNTS = (2, 4, 8)
"""Numbers of pieces that are tried."""
NO_RULE = OpShardingRule([], [], [])
"""Stands for the rule of an operation whose operands are not known yet."""


def decompose(traced: Trace, runner: AbstractRunner | None = None) -> Trace | None:
    """Trace the function with products in pieces; None if that is not faster.

    This is decided for each reshard separately, by the trace's topology and its devices. Without
    these nothing is split.
    """
    topology = traced.topology
    if topology is None or topology.device is None:
        return None
    inserted = insert_reshards(traced.graph, is_final=False, runner=runner)
    graph = inserted.graph
    estimates = [
        None if operation.target is not None else traced.operations[place]
        for operation, place in zip(graph.operations, inserted.places, strict=True)
    ]
    chosen = _PieceSearch(graph, estimates, topology, traced.library).run()
    if not chosen:
        return None
    graph = _PieceWriter(graph, estimates, chosen).run()
    return trace_graph(graph, traced.strategy, topology, traced.library, runner)


class _Pieces(NamedTuple):
    """How a reshard and products are split.

    Args:
        products: their places.
        target: the sharding to which the value moves.
        factors: for each product, the factor of its rule along which it is split.
        dim: the dimension of the resharded value.
        parts: the number of equal shards of the dimension; a piece has an equal part of each.
        n_pieces: the number of pieces.
    """

    products: tuple[int, ...]
    target: ShardingSpec
    factors: tuple[int, ...]
    dim: int
    parts: int
    n_pieces: int


class _PieceSearch:
    """The choice of what is split.

    `graph` has its reshards as operations, and `estimates` those of its other operations.
    """

    def __init__(
        self,
        graph: Graph,
        estimates: Sequence[TracedOperation | None],
        topology: Topology,
        library: str,
    ) -> None:
        self._outputs, self._operations = graph.outputs, graph.operations
        self._estimates, self._topology, self._library = estimates, topology, library
        self._kinds = [value.type for value in graph.values]
        self._maker = {
            n: at for at, operation in enumerate(graph.operations) for n in operation.results
        }
        self._readers: dict[int, list[int]] = {}
        for place, operation in enumerate(graph.operations):
            for number in dict.fromkeys(operation.operands):
                self._readers.setdefault(number, []).append(place)

    def run(self) -> dict[int, _Pieces]:
        """Return the pieces of reshards and their products, by the places of the reshards."""
        taken: set[int] = set()
        chosen: dict[int, _Pieces] = {}
        for place, operation in enumerate(self._operations):
            if operation.target is None:
                continue
            for products in (self._maker_of(place), self._readers_of(place)):
                if not products or not taken.isdisjoint(products):
                    continue
                pieces = self._choose(place, products)
                if pieces is not None:
                    chosen[place] = pieces
                    taken.update(products)
                    break
        return chosen

    def _maker_of(self, place: int) -> tuple[int, ...]:
        """Return the product that makes what a movement moves, if nothing else reads that."""
        (source,) = self._operations[place].operands
        maker = self._maker.get(source, -1)
        if source in self._outputs or self._readers[source] != [place]:
            return ()
        return (maker,) if maker >= 0 and self._is_product(maker) else ()

    def _readers_of(self, place: int) -> tuple[int, ...]:
        """Return the products that read a reshard's result, if the first could compute all of them.

        Empty if another operation reads it first, which would need all pieces.
        """
        (result,) = self._operations[place].results
        readers = self._readers.get(result, [])
        products = [n for n in readers if self._is_product(n)]
        first = products[0] if products else 0
        if readers[:1] != products[:1]:
            return ()
        return tuple(
            n
            for n in products
            if all(self._maker.get(x, -1) < first for x in self._operations[n].operands)
        )

    def _is_product(self, place: int) -> bool:
        operation = self._operations[place]
        # One value as both operands would be cut along two dimensions at once.
        return operation.operator in PRODUCTS and len(set(operation.operands)) == len(
            operation.operands
        )

    def _choose(self, place: int, products: tuple[int, ...]) -> _Pieces | None:
        """Return the fastest pieces, or None if the whole is faster."""
        moving = self._operations[place]
        source, target = (self._kinds[n] for n in (*moving.operands, *moving.results))
        if source.spec is None or target.spec is None or source.spec.mesh is not target.spec.mesh:
            return None
        topology, library = self._topology, self._library
        whole = InsertedReshard(0, source, target.spec, topology, library)
        if not whole.moved_elements:
            return None
        calls = [self._estimates[n] for n in products]
        computing_s = sum(estimate.busiest_s for estimate in calls if estimate is not None)
        best: _Pieces | None = None
        best_s = whole.seconds_s + computing_s
        for dim, (factors, parts) in self._dims(place, products):
            copying_s = self._copying_s(place, products, factors, parts)
            for count in COUNTS:
                # Each count divides the next: if it does not divide the size, larger counts do not.
                if source.shape[dim] % (parts * count):
                    break
                shape = list(source.shape)
                shape[dim] //= count
                piece = ArrayType(tuple(shape), source.dtype, source.spec)
                moving_s = InsertedReshard(0, piece, target.spec, topology, library).seconds_s
                each_s = computing_s / count
                # The first and the last piece overlap with nothing; in between, the longer of
                # movement and product counts.
                total_s = moving_s + each_s + (count - 1) * max(moving_s, each_s) + copying_s
                if total_s < best_s:
                    best_s = total_s
                    best = _Pieces(products, target.spec, factors, dim, parts, count)
        return best

    def _dims(
        self, place: int, products: tuple[int, ...]
    ) -> Iterator[tuple[int, tuple[tuple[int, ...], int]]]:
        """Yield the dimensions that can be split, with the products' factors and the parts."""
        moving = self._operations[place]
        (source,), (target,) = moving.operands, moving.results
        for dim in range(self._kinds[source].ndim):
            cuts = [self._parts(n, dim) for n in (source, target)]
            factors = []
            for number in products:
                step = self._operations[number]
                rule, tensors = step.rule, step.rule.tensors
                numbers = (*step.operands, *step.results)
                mapping = next(
                    dims for dims, n in zip(tensors, numbers, strict=True) if n in (source, target)
                )
                factor = mapping[dim][0] if len(mapping[dim]) == 1 else -1
                if not _is_free(rule, factor):
                    break
                factors.append(factor)
                for dims, n in zip(tensors, numbers, strict=True):
                    cuts += [
                        self._parts(n, at)
                        for at, dim_factors in enumerate(dims)
                        if factor in dim_factors
                    ]
            parts = max((cut or 0 for cut in cuts), default=0)
            if len(factors) == len(products) and all(cut and parts % cut == 0 for cut in cuts):
                yield dim, (tuple(factors), parts)

    def _parts(self, number: int, dim: int) -> int | None:
        """Return the number of equal shards of a dimension, or None if they are not equal."""
        kind = self._kinds[number]
        if kind.spec is None:
            return None
        levels = kind.spec.dim_specs[dim].levels
        if len(levels) > 1 or any(not level.rule.is_default for level in levels):
            return None
        parts = kind.spec.mesh.joint_size(kind.spec.dim_specs[dim].axes)
        return parts if kind.shape[dim] % parts == 0 else None

    def _copying_s(
        self, place: int, products: tuple[int, ...], factors: tuple[int, ...], parts: int
    ) -> float:
        """Return how long it takes to put results together, and to take pieces out of parts."""
        device = self._topology.device
        assembled = {n for product in products for n in self._operations[product].results}
        if parts > 1:
            for product, factor in zip(products, factors, strict=True):
                step = self._operations[product]
                assembled.update(
                    n
                    for n, dims in zip(step.operands, step.rule.operands, strict=True)
                    if any(factor in dim for dim in dims)
                )
        size_bytes = sum(self._local_bytes(n) for n in assembled)
        # Each byte is read and written.
        return 2 * size_bytes / device.memory_bytes_per_s if device else 0.0

    def _local_bytes(self, number: int) -> float:
        kind = self._kinds[number]
        cut = math.prod(self._parts(number, dim) or 1 for dim in range(kind.ndim))
        return math.prod(kind.shape) * kind.dtype.itemsize_bytes / cut


def _is_free(rule: OpShardingRule, factor: int) -> bool:
    """Return whether results have a factor, alone in its dimension wherever it is."""
    special = {*rule.reduction, *rule.need_replication, *rule.permutation, *rule.blocked}
    if factor < 0 or factor in special:
        return False
    dims = [dim for mapping in rule.tensors for dim in mapping if factor in dim]
    in_all = all(any(factor in dim for dim in mapping) for mapping in rule.results)
    return in_all and all(len(dim) == 1 for dim in dims)


class _PieceWriter:
    """Writes the graph with pieces in place of the chosen reshards and products."""

    def __init__(
        self,
        graph: Graph,
        estimates: Sequence[TracedOperation | None],
        chosen: dict[int, _Pieces],
    ) -> None:
        self._graph = graph
        self._estimates = estimates
        self._chosen = chosen
        self._values = list(graph.values)
        self._steps: list[Operation] = []
        # Of values that are put together, where they are read first: their pieces.
        self._waiting: dict[int, tuple[list[int], int, int]] = {}
        self._cut: dict[tuple[int, int, int], int] = {}

    def run(self) -> Graph:
        graph = self._graph
        first = {min(pieces.products): place for place, pieces in self._chosen.items()}
        replaced = {n for pieces in self._chosen.values() for n in pieces.products}
        for place, step in enumerate(graph.operations):
            if place in first:
                self._in_pieces(first[place], self._chosen[first[place]])
            if place in replaced or place in self._chosen:
                continue
            for number in step.operands:
                self._put_together(number)
            self._steps.append(step)
        for number in graph.outputs:
            self._put_together(number)
        values, operations = tuple(self._values), tuple(self._steps)
        return replace(graph, values=values, operations=operations, is_checked=True)

    def _in_pieces(self, place: int, pieces: _Pieces) -> None:
        moving = self._graph.operations[place]
        (source,), (moved,) = moving.operands, moving.results
        dim, parts, count = pieces.dim, pieces.parts, pieces.n_pieces
        is_before = all(moved in self._graph.operations[n].operands for n in pieces.products)
        piece_numbers: dict[int, list[int]] = {moved: []}
        # All pieces first, so that each can be in flight during the previous product.
        sources = [self._piece(source, dim, pieces, n) for n in range(count)] if is_before else []
        for number in range(count):
            if is_before:
                piece_numbers[moved].append(self._add_movement(sources[number], pieces.target))
            for product, factor in zip(pieces.products, pieces.factors, strict=True):
                step = self._graph.operations[product]
                inputs = [
                    piece_numbers[moved][number]
                    if is_before and n == moved
                    else self._operand(n, dims, factor, pieces, number)
                    for n, dims in zip(step.operands, step.rule.operands, strict=True)
                ]
                (result,) = step.results
                estimate = self._estimates[product]
                piece_result = self._add_operation(
                    replace(step, reads=step.reads if estimate is None else estimate.runs_with),
                    inputs,
                    self._values[result].dtype,
                )
                piece_numbers.setdefault(result, []).append(piece_result)
                if not is_before:
                    piece_numbers[moved].append(self._add_movement(piece_result, pieces.target))
        if is_before:
            for product, factor in zip(pieces.products, pieces.factors, strict=True):
                operation = self._graph.operations[product]
                (dims,), (result,) = operation.rule.results, operation.results
                at = next(n for n, dim_factors in enumerate(dims) if factor in dim_factors)
                self._waiting[result] = (piece_numbers[result], at, parts)
        self._waiting[moved] = (piece_numbers[moved], dim, parts)

    def _operand(
        self,
        number: int,
        dims: Sequence[Sequence[int]],
        factor: int,
        pieces: _Pieces,
        which: int,
    ) -> int:
        """Return a product's operand, or its piece where it has the factor."""
        self._put_together(number)
        at = next((n for n, dim_factors in enumerate(dims) if factor in dim_factors), None)
        return number if at is None else self._piece(number, at, pieces, which)

    def _piece(self, number: int, dim: int, pieces: _Pieces, which: int) -> int:
        """Return a piece of a value, with as much of each part."""
        self._put_together(number)
        parts, count = pieces.parts, pieces.n_pieces
        shape = self._values[number].shape
        size = shape[dim] // (parts * count)
        at = dim
        if parts > 1:
            # With the parts as a dimension of their own, a slice takes an equal piece of each.
            apart = (*shape[:dim], parts, size * count, *shape[dim + 1 :])
            key = (number, dim, parts)
            if key not in self._cut:
                self._cut[key] = self._add_named("reshape", [number], shape=apart)
            number, at, shape = self._cut[key], dim + 1, apart
        starts = tuple(which * size if n == at else 0 for n in range(len(shape)))
        limits = tuple((which + 1) * size if n == at else length for n, length in enumerate(shape))
        strides = (1,) * len(shape)
        piece = self._add_named("slice", [number], starts=starts, limits=limits, strides=strides)
        if parts > 1:
            together = (*shape[:dim], parts * size, *shape[dim + 2 :])
            piece = self._add_named("reshape", [piece], shape=together)
        return piece

    def _put_together(self, number: int) -> None:
        """Assemble a value from its pieces, before it is first read."""
        if number not in self._waiting:
            return
        piece_numbers, dim, parts = self._waiting.pop(number)
        if parts == 1:
            self._add_named("concat", piece_numbers, number, axis=dim)
            return
        shape = self._values[number].shape
        apart = (*shape[:dim], parts, shape[dim] // (parts * len(piece_numbers)), *shape[dim + 1 :])
        rows = [self._add_named("reshape", [piece], shape=apart) for piece in piece_numbers]
        self._add_named(
            "reshape", [self._add_named("concat", rows, axis=dim + 1)], number, shape=shape
        )

    def _add_value(self, shape: tuple[int, ...], dtype: str) -> int:
        self._values.append(Value(len(self._values), shape, dtype))
        return len(self._values) - 1

    def _add_named(
        self, name: str, operands: Sequence[int], result: int | None = None, **attributes: Any
    ) -> int:
        dtype = self._values[operands[0]].dtype
        operation = Operation(name, (), (), NO_RULE, MappingProxyType(attributes))
        return self._add_operation(operation, operands, dtype, result)

    def _add_movement(self, number: int, spec: ShardingSpec) -> int:
        value = self._values[number]
        result = self._add_value(value.shape, value.dtype)
        self._steps.append(Operation.with_sharding(number, result, value.shape, spec))
        return result

    def _add_operation(
        self, like: Operation, operands: Sequence[int], dtype: str, result: int | None = None
    ) -> int:
        """Append an operation like another on other operands; its result is new if None."""
        shapes = [self._values[n].shape for n in operands]
        inferred = operator_of(like.operator).inferred(shapes, **like.attributes)
        if result is None:
            result = self._add_value(inferred.result_shapes[0], dtype)
        self._steps.append(
            replace(like, operands=tuple(operands), results=(result,), rule=inferred.rule)
        )
        return result
