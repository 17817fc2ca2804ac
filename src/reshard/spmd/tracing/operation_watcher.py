"""Operation watchers: the operations of a recorded function, as a trace reports them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.operator import find_operator
from reshard.spmd.graph import WITH_SHARDING, BodyCosts, Operation
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.kept_reshards import may_view
from reshard.spmd.shards.operation_call import CompiledCall
from reshard.spmd.shards.runner import replicated
from reshard.spmd.tracing.traced_operation import InsertedReshard, TracedOperation
from reshard.topology import Topology

Spec = ShardingSpec | None


class OperationWatcher:
    """Makes a `TracedOperation` of every operation that it sees.

    Args:
        topology, library: for times, see `reshard.spmd.tracing.trace.trace`.
        moves_anew: values that move wherever they are read, by number; others do once.
    """

    def __init__(
        self, topology: Topology | None, library: str, moves_anew: Collection[int] = ()
    ) -> None:
        self.found: list[TracedOperation] = []
        self._moves_anew = set(moves_anew)
        self.topology = topology
        self.library = library
        self._call: CompiledCall | None = None
        # Values that were moved, with the sharding: an array keeps what it was moved to.
        self._known: set[tuple[int, ArrayType, Spec]] = set()
        # Values that are an earlier one: `with_sharding` of what lies so gives the array itself.
        self._same: dict[int, int] = {}

    def record(
        self, call: CompiledCall, operands: Sequence[Any], results: Sequence[ArrayValue]
    ) -> None:
        """The call that carries an operation out."""
        self._call = call

    def record_reshard(self, operand: ArrayValue, result: ArrayValue) -> None:
        """Reshards are seen by `saw`."""

    def saw(
        self,
        operation: Operation,
        given: Sequence[Any],
        placed: Sequence[Any],
        made: Sequence[Any],
        results: Sequence[Any],
    ) -> None:
        """Append an operation; see `Watcher.saw`."""
        called, self._call = self._call, None
        # Views of what cannot keep its reshards have the same memory.
        is_view = operation.operator == WITH_SHARDING or (
            called is not None and may_view(find_operator(called.name), len(called.operands))
        )
        if is_view and not self._moves_anew.isdisjoint(operation.operands):
            self._moves_anew.update(operation.results)
        before: list[InsertedReshard] = []
        after: list[InsertedReshard] = []
        reused: list[InsertedReshard] = []
        runs_with = [x.type.spec if isinstance(x, ArrayValue) else None for x in placed]
        if called is not None:
            runs_with = list(called.runs_with)
        for number, x, there, spec in zip(
            operation.operands, given, placed, runs_with, strict=True
        ):
            if isinstance(x, ArrayValue):
                for source, target in ((x.type, there.type.spec), (there.type, spec)):
                    inserted = self._find_inserted(number, source, target)
                    # From the value itself: what was made on the way is not kept.
                    key = (self._same.get(number, number), source, target)
                    is_known = source is x.type and key in self._known
                    is_known = is_known and key[0] not in self._moves_anew
                    (reused if is_known else before).extend(inserted)
                    if source is x.type and inserted:
                        self._known.add(key)
        within = BodyCosts()
        if operation.body is not None:
            within = operation.body.count_costs([x.type for x in placed])
        computed = [x.type for x in made] if called is None else called.made
        for number, x, kind, there in zip(operation.results, made, computed, results, strict=True):
            after += self._find_inserted(number, kind, x.type.spec)
            # What `with_sharding` moves is its operand, which may have been there.
            if operation.operator == WITH_SHARDING and x is given[0]:
                own = self._same.get(operation.operands[0], operation.operands[0])
                key = (own, x.type, there.type.spec)
                if there.type is x.type:
                    self._same[number] = own
                if key in self._known and own not in self._moves_anew:
                    reused += self._find_inserted(*key)
                    continue
                self._known.add(key)
            after += self._find_inserted(number, x.type, there.type.spec)
        self.found.append(
            TracedOperation(
                operation,
                tuple(x.type if isinstance(x, ArrayValue) else None for x in given),
                tuple(runs_with),
                tuple(x.type for x in results),
                tuple(computed),
                tuple(before),
                tuple(after),
                tuple(reused),
                within=within,
                may_stop=called is not None and called.looks_at_elements,
            )
        )

    def _find_inserted(self, value: int, source: ArrayType, target: Spec) -> list[InsertedReshard]:
        if target is None or source.spec is target:
            return []
        before = source.spec or replicated(target.mesh, source.ndim)
        # Layouts are interned: different specs of one layout move nothing.
        if before.layout(source.shape) is target.layout(source.shape):
            return []
        return [InsertedReshard(value, source, target, self.topology, self.library)]
