"""Traces: what a function of sharded arrays does, before it runs.

`trace(f, *arguments)` records the function's graph (`graph_recording`) and executes it on arrays
without elements. For every operation, the trace has the shardings with which it runs, the reshards
before and after it and their collectives, the bytes that these move, the time of both, and the
memory of each rank. With a strategy other than "eager", shardings are propagated over the whole
graph first.

    operation        runs with         inserted              then
    x @ w            x, k . k, -       all-gather(k)         x, -
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from reshard.errors import ShardError, UsageError
from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.arrays.sharded_array import ShardedArray, array
from reshard.spmd.core.array_type import ArrayType, replicated
from reshard.spmd.core.operator import find_operator
from reshard.spmd.graph import WITH_SHARDING, BodyCosts, Graph, Operation, Spec
from reshard.spmd.propagation.by_cost.cost_model import Machine
from reshard.spmd.propagation.strategies import assign_shardings, ranks_of
from reshard.spmd.shards.array_value import ArrayValue, may_view, moves_each_time
from reshard.spmd.shards.operation_call import CompiledCall, Recorder, call, recording
from reshard.spmd.shards.partial_sums import unsettled
from reshard.spmd.shards.runner import Runner, runner_for
from reshard.spmd.tracing.abstract_runner import AbstractRunner
from reshard.spmd.tracing.document import trace_document
from reshard.spmd.tracing.estimates import (
    InsertedReshard,
    TracedOperation,
    TraceRecord,
    count_memory,
    estimate_compute,
)
from reshard.spmd.tracing.graph_recording import filled, library_for, record, type_of
from reshard.spmd.tracing.page import trace_page
from reshard.spmd.tracing.table import reason_lines, trace_table
from reshard.topology import Topology

Observe = Callable[
    [
        Operation,
        "CompiledCall | None",
        Sequence[Any],
        Sequence[Any],
        Sequence[Any],
        Sequence[Any],
    ],
    None,
]
"""Called after each operation of a graph that is executed, with

1. the operation, and the call that executed it; None for a reshard and for a body;
2. its operands, and these in the shardings in which it reads them;
3. its results, and these in the shardings of their values.
"""


class _LastCall(Recorder):
    """A recorder of the call that executes an operation."""

    def __init__(self) -> None:
        self.call: CompiledCall | None = None

    def record(
        self, call: CompiledCall, operands: Sequence[Any], results: Sequence[ArrayValue]
    ) -> None:
        """Keep the call."""
        self.call = call


class _OperationTracer:
    """Makes a `TracedOperation` of every operation that it observes.

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
        # Values that were moved, with the sharding: an array keeps what it was moved to.
        self._known: set[tuple[int, ArrayType, Spec]] = set()
        # Values that are the same array as an earlier value: a `with_sharding` that moves nothing.
        self._same: dict[int, int] = {}

    def observe(
        self,
        operation: Operation,
        called: CompiledCall | None,
        operands: Sequence[Any],
        placed: Sequence[Any],
        outputs: Sequence[Any],
        results: Sequence[Any],
    ) -> None:
        """Append an operation; see `Observe`."""
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
            operation.operands, operands, placed, runs_with, strict=True
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
        computed = [x.type for x in outputs] if called is None else called.made
        for number, x, kind, there in zip(
            operation.results, outputs, computed, results, strict=True
        ):
            after += self._find_inserted(number, kind, x.type.spec)
            # A `with_sharding` moves its operand, which may have been moved there already.
            if operation.operator == WITH_SHARDING and x is operands[0]:
                origin = self._same.get(operation.operands[0], operation.operands[0])
                key = (origin, x.type, there.type.spec)
                if there.type is x.type:
                    self._same[number] = origin
                if key in self._known and origin not in self._moves_anew:
                    reused += self._find_inserted(*key)
                    continue
                self._known.add(key)
            after += self._find_inserted(number, x.type, there.type.spec)
        self.found.append(
            TracedOperation(
                operation,
                tuple(x.type if isinstance(x, ArrayValue) else None for x in operands),
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
        # Layouts are interned: different specs of the same layout move nothing.
        if before.layout(source.shape) is target.layout(source.shape):
            return []
        return [InsertedReshard(value, source, target, self.topology, self.library)]


STRATEGIES = ("eager", "basic", "prioritized", "aggressive", "widest", "cost")


@dataclass(frozen=True)
class Trace(TraceRecord):
    """The operations, reshards, time and memory of a function, created by `trace`.

    Args: those of `TraceRecord`.
    """

    def run(self, *arguments: Any, runner: Runner | None = None) -> Any:
        """Execute the function in the shardings of the trace.

        Args:
            arguments: like those that were traced, with elements.
            runner: where the shards are stored, see `reshard.spmd.array`.

        Raises:
            ShardError: arguments of another number, shape or element type.

        >>> import numpy as np
        >>> from reshard import DeviceMesh, spec
        >>> from reshard.spmd import abstract
        >>> rows = abstract((4, 2), "float64", spec(DeviceMesh.of(x=2), "x, -"))
        >>> double = trace(lambda x: x + x, rows, strategy="basic")
        >>> double.run(np.ones((4, 2))).type
        ArrayType(float64[4, 2], 'x, -')
        """
        # 1. The arrays among the arguments, in the order in which inputs were recorded.
        passed = [leaf for _, leaf in leaves(list(arguments)) if type_of(leaf) is not None]
        expected = self.graph.arguments
        if len(passed) != len(expected):
            raise ShardError(
                f"{len(passed)} arrays, but {len(expected)} were traced: "
                f"{', '.join(self.names[: len(expected)])}; give one for each of these"
            )
        # 2. The runner that was asked for, else that of the first array in shards, else by its
        # library.
        keeper = runner or next(
            (x.runner for x in passed if isinstance(x, ArrayValue)), runner_for(*passed[:1])
        )
        arrays = dict(zip(expected, passed, strict=True)) | dict(self.graph.constants)
        # 3. Each input as it was traced.
        for number, name, kind in zip(self.graph.inputs, self.names, self.inputs, strict=True):
            if kind is None:
                continue
            actual = type_of(arrays[number])
            if actual is None or (actual.shape, actual.dtype) != (kind.shape, kind.dtype):
                raise ShardError(f"{name} is {actual}, but {kind} was traced; give such an array")
            if kind.spec is None and actual.spec is not None:
                arrays[number] = arrays[number].to_dense()
            placed = array(arrays[number], kind.spec, runner=keeper)
            # Nobody writes to it while the function runs, so it keeps its reshards meanwhile.
            arrays[number] = ShardedArray.of_shards(placed.type, placed._shards, keeper)
        return filled(self.graph.returned, interpret(self.graph, arrays))

    def reasons(self) -> str:
        """Return the reasons of reshards: a line for each reshard that moves data.

        >>> from reshard import DeviceMesh, spec
        >>> from reshard.spmd import abstract
        >>> x = abstract((4, 4), "float32", spec(DeviceMesh.of(x=2), "-, x"))
        >>> print(trace(lambda x: x @ x, x).reasons())
        %1 = matmul: %0 all-gather(x) to `-, -`: x cuts [j] of %0
        """
        return "\n".join(reason_lines(self.operations))

    def html(self, title: str = "") -> str:
        """Return the trace as an HTML page, without scripts or external resources."""
        return trace_page(self, title)

    def to_json(self) -> str:
        """Return the trace as a JSON document, see `reshard.spmd.tracing.document`."""
        return trace_document(self)

    def __str__(self) -> str:
        return trace_table(self)

    def __repr__(self) -> str:
        return (
            f"<Trace of {len(self.operations)} operations, {self.strategy}, which move "
            f"{self.moved_bytes:,} bytes>"
        )


def trace(
    function: Callable[..., Any],
    *arguments: Any,
    strategy: str = "eager",
    topology: Topology | None = None,
    library: str = "nccl",
) -> Trace:
    """Trace a function of sharded arrays: its operations, reshards, time and memory.

    Args:
        function: a function of sharded arrays, with the functions of `reshard.spmd`.
        arguments: arrays from `abstract`, which have no elements; sharded, NumPy or PyTorch arrays;
            and lists, tuples and dictionaries of them. Everything else is passed unchanged.
        strategy: "eager": each operation chooses its reshards separately, as in eager mode.
            "basic", "prioritized", "aggressive", "widest" or "cost": shardings are propagated over
            the whole function first.
        topology: the hosts of the ranks, the links between them and their devices, for time
            estimates and for "cost", which assumes hosts of eight H100 when None.
        library: whose collectives are assumed, a key of `reshard.cost.LIBRARIES`.

    Raises:
        UsageError: an unknown strategy or library; not a topology; a function that reads elements,
            as `if x > 0:` does, uses an operator without a rule, or returns something other than
            arrays.
        MeshError: an operation on arrays over several meshes.
        LayoutError: a rank that the topology does not have, or a link of unknown speed.

    >>> from reshard import DeviceMesh, spec
    >>> from reshard.spmd import abstract
    >>> mesh = DeviceMesh.of(x=4)
    >>> x, w = abstract((8, 16), "float32", spec(mesh, "-, x")), abstract((16, 8))
    >>> traced = trace(lambda x, w: (x @ w).reduced(), x, w)
    >>> traced.moved_bytes, traced.peak_bytes[0]
    (1536, 1920)
    """
    check_trace_options(strategy, topology, library)
    # One runner, so that operations that keep their shardings are compiled once.
    runner = AbstractRunner(library_for(arguments))
    recorded = record_for(strategy, function, arguments, runner=runner)
    moved_again: list[int] = []
    if strategy == "eager":
        # Arrays that view memory of the caller, who may write to it: their reshards are not cached.
        passed = [leaf for _, leaf in leaves(list(arguments)) if type_of(leaf) is not None]
        numbered = [*zip(recorded.arguments, passed, strict=True), *recorded.constants.items()]
        moved_again = [n for n, x in numbered if isinstance(x, ArrayValue) and moves_each_time(x)]
    graph = assign_shardings(recorded, strategy, topology, library)
    return trace_graph(graph, strategy, topology, library, runner, moved_again)


def check_trace_options(strategy: str, topology: Topology | None, library: str) -> None:
    """Raise UsageError for an unknown strategy or library, or an invalid topology."""
    # A machine checks both.
    Machine(topology, library)
    if strategy not in STRATEGIES:
        raise UsageError(f"unknown strategy {strategy!r}; it is one of {', '.join(STRATEGIES)}")


def record_for(
    strategy: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    has_others: bool = False,
    runner: AbstractRunner | None = None,
) -> Graph:
    """Record a function's graph for a strategy; see `record`."""
    with nullcontext() if strategy == "eager" else unsettled():
        return record(function, arguments, has_others, runner)


def trace_graph(
    graph: Graph,
    strategy: str = "eager",
    topology: Topology | None = None,
    library: str = "nccl",
    runner: AbstractRunner | None = None,
    moved_again: Collection[int] = (),
) -> Trace:
    """Estimate a graph to which shardings are assigned: its reshards, time and memory.

    Args:
        graph: the graph; see `assign_shardings`.
        strategy: the name of the strategy that chose its shardings.
        topology, library: as for `trace`.
        runner: the abstract runner to execute it with; if None, a new runner.
        moved_again: inputs that are resharded each time they are read; others once per sharding.
    """
    ranks = ranks_of(graph.meshes)
    if topology is not None:
        topology.host_of(ranks)
    # 1. Execute the graph on abstract arrays in these shardings.
    runner = AbstractRunner(graph.library) if runner is None else runner
    tracer = _OperationTracer(topology, library, moved_again)
    values = interpret(graph, abstract_inputs(graph, runner), tracer.observe)
    # 2. Add memory, and computation times if the topology describes devices.
    operations = count_memory(graph, graph.input_types, tracer.found, ranks)
    if topology is not None and topology.device is not None:
        operations = estimate_compute(operations, ranks, topology.device)
    outputs = tuple(values[number].type for number in graph.outputs)
    return Trace(graph, strategy, operations, outputs, topology, library=library)


def abstract_inputs(graph: Graph, runner: AbstractRunner) -> dict[int, Any]:
    """Return the inputs of a graph, for `interpret`: arrays without elements, and numbers."""
    inputs = dict(graph.constants)
    for number, kind in zip(graph.inputs, graph.input_types, strict=True):
        if kind is not None:
            inputs[number] = runner.array(kind, ShardedArray)
    return inputs


def interpret(
    graph: Graph, inputs: Mapping[int, Any], observe: Observe | None = None
) -> dict[int, Any]:
    """Execute a graph operation by operation, and return its inputs and outputs by number.

    Intermediate values are freed after the last operation that reads them.
    """
    values = dict(inputs)
    last = _LastCall()
    for operation, unread in zip(graph.operations, graph.last_uses(), strict=True):
        operands = [values[number] for number in operation.operands]
        reads = operation.reads
        placed = list(map(_reshard, operands, reads)) if reads else operands
        specs = [graph.values[number].sharding for number in operation.results]
        if operation.target is not None:
            outputs, specs = placed, [operation.target]
        elif operation.body is not None:
            outputs = list(operation.body.run(placed, find_runner(placed)))
        else:
            with nullcontext() if observe is None else recording(last):
                output = call(operation.operator, placed, operation.attributes, operation.options)
            outputs = list(output) if isinstance(output, tuple) else [output]
        results = [_reshard(x, spec) for x, spec in zip(outputs, specs, strict=True)]
        if observe is not None:
            called, last.call = last.call, None
            observe(operation, called, operands, placed, outputs, results)
        values.update(zip(operation.results, results, strict=True))
        # These references would keep the arrays until the next operation is done.
        del operands, placed, outputs, results
        for number in unread:
            del values[number]
    return values


def find_runner(arrays: Sequence[Any]) -> Runner:
    """Return the runner of arrays: an abstract runner if any of them has no elements."""
    runner: Runner = max((x.runner for x in arrays), key=lambda runner: runner.is_abstract)
    return runner


def _reshard(x: Any, spec: Spec) -> Any:
    if spec is None or not isinstance(x, ShardedArray) or x.type.spec is spec:
        return x
    return x.shard(spec)
