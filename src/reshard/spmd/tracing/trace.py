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
from typing import Any, Protocol

from reshard.cost.formulas import check_library
from reshard.errors import ShardError, UsageError
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.arrays.argument_tree import leaves
from reshard.spmd.arrays.sharded_array import ShardedArray, array, plain_spec
from reshard.spmd.placement.pending_values import keep_pending
from reshard.spmd.placement.placement import explicit_reshards
from reshard.spmd.propagation.by_cost.cost_model import Machine
from reshard.spmd.propagation.by_cost.cost_propagation import propagate_by_cost
from reshard.spmd.propagation.graph import Graph, Operation
from reshard.spmd.propagation.propagation import PropagatedGraph
from reshard.spmd.propagation.strategies import propagate_graph
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.kept_reshards import moves_each_time
from reshard.spmd.shards.operation_call import Recorder, call, recording
from reshard.spmd.shards.runner import Runner, replicated, runner_for
from reshard.spmd.shards.settling import unsettled
from reshard.spmd.tracing.abstract_runner import AbstractRunner
from reshard.spmd.tracing.compute import with_compute
from reshard.spmd.tracing.document import trace_document
from reshard.spmd.tracing.graph_recording import (
    Recording,
    RunFunction,
    filled,
    library_for,
    record,
    type_of,
)
from reshard.spmd.tracing.memory import with_memory
from reshard.spmd.tracing.mesh_parts import meshes_of, place_parts, ranks_of
from reshard.spmd.tracing.operation_watcher import OperationWatcher
from reshard.spmd.tracing.page import trace_page
from reshard.spmd.tracing.reshard_reasons import reason_lines
from reshard.spmd.tracing.table import trace_table
from reshard.spmd.tracing.trace_record import TraceRecord
from reshard.topology import Topology

STRATEGIES = ("eager", "basic", "prioritized", "aggressive", "widest", "cost")
Spec = ShardingSpec | None


@dataclass(frozen=True, slots=True)
class Shardings:
    """The sharding wanted of each value of a graph; None where operations decide.

    Args:
        values: by number.
        operands: of each operation: in which shardings it is to read them.
    """

    values: tuple[Spec, ...]
    operands: tuple[tuple[Spec, ...], ...]


@dataclass(frozen=True)
class Trace(TraceRecord):
    """The operations, reshards, time and memory of a function. Create one with `trace`.

    Args: those of `TraceRecord`, and what `run` needs: the recorded function and the sharding of
    each of its values.
    """

    recording: Recording
    shardings: Shardings

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
        given = [leaf for _, leaf in leaves(list(arguments)) if type_of(leaf) is not None]
        wanted = [n for n in self.graph.inputs if n not in self.recording.constants]
        if len(given) != len(wanted):
            raise ShardError(
                f"{len(given)} arrays, but {len(wanted)} were traced: "
                f"{', '.join(self.names[: len(wanted)])}; give one for each of these"
            )
        # 2. The runner that was asked for, else that of the first array in shards, else by its
        # library.
        keeper = runner or next(
            (one.runner for one in given if isinstance(one, ArrayValue)), runner_for(*given[:1])
        )
        arrays = dict(zip(wanted, given, strict=True)) | dict(self.recording.constants)
        # 3. Each input as it was traced.
        for number, name, kind in zip(self.graph.inputs, self.names, self.inputs, strict=True):
            if kind is None:
                continue
            found = type_of(arrays[number])
            if found is None or (found.shape, found.dtype) != (kind.shape, kind.dtype):
                raise ShardError(f"{name} is {found}, but {kind} was traced; give such an array")
            if kind.spec is None and found.spec is not None:
                arrays[number] = arrays[number].to_dense()
            placed = array(arrays[number], kind.spec, runner=keeper)
            # Nobody writes to it while the function runs, so it keeps its reshards meanwhile.
            arrays[number] = ShardedArray.of_shards(placed.type, placed._shards, keeper)
        values = carry_out(self.recording, self.shardings, arrays)
        return filled(self.recording.results, values)

    def reasons(self) -> str:
        """The reasons of reshards: a line for each reshard that moves data.

        >>> from reshard import DeviceMesh, spec
        >>> from reshard.spmd import abstract
        >>> x = abstract((4, 4), "float32", spec(DeviceMesh.of(x=2), "-, x"))
        >>> print(trace(lambda x: x @ x, x).reasons())
        %1 = matmul: %0 all-gather(x) to `-, -`: x cuts [j] of %0
        """
        return "\n".join(reason_lines(self.operations))

    def html(self, title: str = "") -> str:
        """The trace as an HTML page, without scripts or external resources."""
        return trace_page(self, title)

    def to_json(self) -> str:
        """The trace as a JSON document, see `reshard.spmd.tracing.document`."""
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
    # The graph, without any sharding. Operations that keep their shardings are compiled once.
    runner = AbstractRunner(library_for(arguments))
    recorded = record_for(strategy, function, arguments, runner=runner)
    shardings = shardings_of(recorded, strategy, topology, library)
    moves_anew = _find_moved_anew(recorded, arguments) if strategy == "eager" else ()
    return trace_placed(recorded, shardings, strategy, topology, library, runner, moves_anew)


def _find_moved_anew(recorded: Recording, arguments: Sequence[Any]) -> list[int]:
    """Inputs whose reshards eager operations cannot keep: they have memory of the program's."""
    inputs = [n for n in recorded.graph.inputs if n not in recorded.constants]
    given = [leaf for _, leaf in leaves(list(arguments)) if type_of(leaf) is not None]
    known = [*zip(inputs, given, strict=True), *recorded.constants.items()]
    return [n for n, x in known if isinstance(x, ArrayValue) and moves_each_time(x)]


def check_trace_options(strategy: str, topology: Topology | None, library: str) -> None:
    """Raises UsageError for an unknown strategy or library, and for what is no topology."""
    if topology is not None and not isinstance(topology, Topology):
        raise UsageError(
            f"{topology!r} is no Topology; give one, such as "
            'reshard.cost.load_preset("h100-8").topology()'
        )
    check_library(library)
    if strategy not in STRATEGIES:
        raise UsageError(f"unknown strategy {strategy!r}; it is one of {', '.join(STRATEGIES)}")


def record_for(
    strategy: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    has_others: bool = False,
    runner: AbstractRunner | None = None,
) -> Recording:
    """The function's graph, as a strategy is to place it; see `record`."""
    with nullcontext() if strategy == "eager" else unsettled():
        return record(function, arguments, has_others, runner)


def shardings_of(
    recorded: Recording, strategy: str, topology: Topology | None, library: str
) -> Shardings:
    """The sharding of each value of a recorded function by a strategy."""
    if strategy == "eager" or not meshes_of(recorded):
        return keep_given(recorded)
    machine = Machine(topology, library)

    def place(
        graph: Graph, known: dict[int, ShardingSpec], mesh: DeviceMesh
    ) -> tuple[Sequence[Spec], Sequence[Sequence[Spec]]]:
        found = _propagate(graph, known, mesh, strategy, machine)
        return found.values, found.operands

    values, operands = place_parts(recorded, place)
    return Shardings(tuple(values), tuple(operands))


def trace_placed(
    recorded: Recording,
    shardings: Shardings,
    strategy: str,
    topology: Topology | None,
    library: str,
    runner: AbstractRunner | None = None,
    moves_anew: Collection[int] = (),
) -> Trace:
    """The trace of a recorded function whose shardings a strategy has found; see `trace`.

    `moves_anew` are inputs that move wherever they are read, by number; others do once.
    """
    meshes = meshes_of(recorded)
    ranks = ranks_of(meshes)
    if topology is not None:
        topology.host_of(ranks)
    # 1. The recorded calls again, on abstract arrays that have these shardings.
    runner = AbstractRunner(recorded.library) if runner is None else runner
    inputs = []
    arrays: dict[int, Any] = dict(recorded.constants)
    for number, kind in zip(recorded.graph.inputs, recorded.types, strict=True):
        known = None if kind is None else kind.with_spec(shardings.values[number])
        inputs.append(known)
        if known is not None:
            arrays[number] = runner.array(known, ShardedArray)
    watcher = OperationWatcher(topology, library, moves_anew)
    values = carry_out(recorded, shardings, arrays, watcher)
    # 2. Memory and, where the device is known, computing are added to what was seen.
    operations = with_memory(recorded.graph, inputs, watcher.found, ranks)
    if topology is not None and topology.device is not None:
        operations = with_compute(operations, ranks, topology.device)
    return Trace(
        recorded.graph,
        strategy,
        meshes,
        recorded.names,
        tuple(inputs),
        operations,
        tuple(values[number].type for number in recorded.graph.outputs),
        topology,
        recorded,
        shardings,
    )


def keep_given(recorded: Recording) -> Shardings:
    """Inputs as they were given; the rest as operations make it."""
    graph = recorded.graph
    values: list[Spec] = [None] * len(graph.values)
    for number, kind in zip(graph.inputs, recorded.types, strict=True):
        if kind is not None and kind.spec is not None:
            values[number] = plain_spec(kind.spec)
    return Shardings(tuple(values), tuple((None,) * len(o.operands) for o in graph.operations))


def _propagate(
    graph: Graph,
    known: dict[int, ShardingSpec],
    mesh: DeviceMesh,
    strategy: str,
    machine: Machine,
) -> Shardings:
    """Shardings of all values and operands, from those of the inputs and the `with_sharding`s."""
    if strategy == "cost":
        found = propagate_by_cost(graph, known, machine=machine).propagated
    else:
        found = keep_pending(propagate_graph(graph, known, strategy=strategy))
    return shardings_from(found, mesh)


def shardings_from(found: PropagatedGraph, mesh: DeviceMesh) -> Shardings:
    """The shardings of all values and operands of a propagated graph; those not known are whole."""
    values = tuple(
        replicated(mesh, len(value.shape)) if spec is None else plain_spec(spec)
        for value, spec in zip(found.graph.values, found.values, strict=True)
    )
    return Shardings(values, tuple(map(tuple, explicit_reshards(found).operands)))


class Watcher(Recorder, Protocol):
    """A recorder of the calls, which also sees operations with what is resharded around them."""

    def saw(
        self,
        operation: Operation,
        given: Sequence[Any],
        placed: Sequence[Any],
        made: Sequence[Any],
        results: Sequence[Any],
        run: RunFunction | None,
    ) -> None:
        """An operation: its operands, those that it was called with, and its results likewise.

        `run` carries out what is no operator; see `RecordedCall`.
        """


def carry_out(
    recorded: Recording,
    shardings: Shardings,
    inputs: Mapping[int, Any],
    watcher: Watcher | None = None,
) -> dict[int, Any]:
    """The inputs and outputs of a recorded function. A watcher sees every operation.

    Values between them are kept until the last operation that reads them.
    """
    values = dict(inputs)
    frees = recorded.graph.last_uses()
    for operation, action, wanted, unread in zip(
        recorded.graph.operations,
        recorded.recorded_calls,
        shardings.operands,
        frees,
        strict=True,
    ):
        given = [values[number] for number in operation.operands]
        placed = [_reshard(x, spec) for x, spec in zip(given, wanted, strict=True)]
        specs = [shardings.values[number] for number in operation.results]
        if action.target is not None:
            made, specs = placed, [action.target]
        elif action.run is not None:
            made = list(action.run(placed, find_runner(placed)))
        else:
            with nullcontext() if watcher is None else recording(watcher):
                found = call(action.name, placed, action.attributes, action.options)
            made = list(found) if isinstance(found, tuple) else [found]
        results = [_reshard(x, spec) for x, spec in zip(made, specs, strict=True)]
        if watcher is not None:
            watcher.saw(operation, given, placed, made, results, action.run)
        values.update(zip(operation.results, results, strict=True))
        # What holds them here would keep them until the next operation is done.
        del given, placed, made, results
        for number in unread:
            del values[number]
    return values


def find_runner(arrays: Sequence[Any]) -> Runner:
    """The runner of arrays, an abstract one where some have no elements."""
    found: Runner = max((x.runner for x in arrays), key=lambda runner: runner.is_abstract)
    return found


def _reshard(x: Any, spec: Spec) -> Any:
    if spec is None or not isinstance(x, ShardedArray) or x.type.spec is spec:
        return x
    return x.shard(spec)
