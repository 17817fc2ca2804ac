"""Auto: the shardings of a function's arguments for a mesh, under a limit of memory.

    found = sp.auto(step, mesh, weights, batch, live_bytes=8 << 30)
    weights, batch = found.place(weights, batch)
    loss, weights = found.program(weights, batch)

1. The function is recorded with its arguments whole. What it returns where an argument lies (a
   gradient, a new weight) stays tied to that.
2. Shardings of little time are looked for (`input_search`), without a price of memory first. If the
   program holds more than the limit, the price at which it does not is looked for.
3. In a small graph all others that might take less are judged as well (`least_inputs`).

Every program is judged as it runs: traced with strategy "cost", by its seconds and its peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reshard.errors import MeshError, PlanError, UsageError
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.array_type import ArrayType
from reshard.spmd.arrays.sharded_array import array
from reshard.spmd.programs.automatic.input_search import InputSearch
from reshard.spmd.programs.automatic.least_inputs import least_inputs
from reshard.spmd.programs.jit import JittedFunction, read_places
from reshard.spmd.programs.memory_limit import check_limit
from reshard.spmd.programs.overlap.overlapped_trace import check_overlap
from reshard.spmd.programs.simplification import simplified
from reshard.spmd.propagation.by_cost.cost_model import Machine
from reshard.spmd.shards.operation_call import unrecorded
from reshard.spmd.shards.runner import replicated
from reshard.spmd.tracing.argument_tree import leaves, replaced
from reshard.spmd.tracing.graph_recording import Recording, type_of
from reshard.spmd.tracing.mesh_parts import meshes_of
from reshard.spmd.tracing.trace import Starts, Trace, check_trace_options, record_for
from reshard.topology import Topology

# Operations of a graph in which the best is proven.
MOST_PROVEN = 16
# Prices of a byte, in parts of what the function takes for each byte of its arguments: first one
# that decides between equals, then those that are tried in turn to keep a limit.
LOWEST_PRICE = 1e-4
PRICES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)


@dataclass(frozen=True, slots=True)
class AutoPlacement:
    """Shardings of a function's arguments, and its program with them. Made by `auto`.

    Args:
        specs: in the places of the arguments: a sharding for each array, None for all else.
        program: the function as by `sp.jit`, to be called with arrays that lie so.
        trace: of the program: its operations, time, bytes and memory.
        is_exact: whether no other shardings of the arguments that keep the limit take less time.
    """

    specs: tuple[Any, ...]
    program: JittedFunction
    trace: Trace
    is_exact: bool

    def place(self, *arguments: Any) -> tuple[Any, ...]:
        """Arguments like those that were given, with arrays in their shardings.

        Raises UsageError for arguments in other lists, tuples and dictionaries.
        """
        given = [path for path, _ in leaves(list(arguments))]
        if given != [path for path, _ in leaves(list(self.specs))]:
            raise UsageError(
                f"{len(given)} arguments in other places than those that shardings were found for; "
                "give arguments like those of sp.auto"
            )
        specs = iter([spec for _, spec in leaves(list(self.specs))])

        def placed(leaf: Any) -> Any:
            spec = next(specs)
            return leaf if spec is None else array(leaf, spec)

        return tuple(replaced(list(arguments), placed))


def auto(
    function: Callable[..., Any],
    mesh: DeviceMesh,
    *arguments: Any,
    live_bytes: int | None = None,
    topology: Topology | None = None,
    library: str = "nccl",
    overlap: int = 0,
    donate: int | Sequence[int] = (),
) -> AutoPlacement:
    """The shardings of a function's arguments of least estimated time over a mesh.

    Args:
        function: of arrays in shards, as for `sp.jit`.
        mesh: over whose axes arguments may be cut.
        arguments: as for `sp.trace`: arrays from `sp.abstract` or with elements, and lists, tuples
            and dictionaries of them. Those in a sharding keep it; it is found for all others.
        live_bytes: the most that each rank may hold at any time, as for `sp.jit`. No limit when
            None.
        topology, library: of the times, as for `sp.trace`; hosts of eight H100 when None.
        overlap, donate: of the program, as for `sp.jit`.

    Returns:
        The shardings, and the program with strategy "cost". In a graph of up to 16 operations the
        shardings are proven to be the best where that takes few steps (`is_exact`): each axis of
        the mesh cuts one dimension, which it divides, or none. In larger ones they are the best of
        what a search sees.

    Raises:
        UsageError: what is no function, mesh, limit or topology; what cannot be traced.
        MeshError: an argument, or the function, over another mesh.
        PlanError: no shardings that keep the limit were found; it names the least that was.

    >>> import reshard.spmd as sp
    >>> from reshard import DeviceMesh
    >>> x, w = sp.abstract((4096, 64)), sp.abstract((64, 64))
    >>> found = sp.auto(lambda x, w: sp.tanh(x @ w), DeviceMesh.of(x=4), x, w)
    >>> print(*found.specs, sep="; ")
    x, -; -, -
    """
    if not callable(function):
        raise UsageError(
            f"sp.auto of {function!r}, a {type(function).__name__}; a function of arrays in shards "
            "was expected: sp.auto(f, mesh, x)"
        )
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"sp.auto over {mesh!r}, which is no mesh; give DeviceMesh.of(dp=2, tp=4)")
    check_trace_options("cost", topology, library)
    check_limit(live_bytes)
    check_overlap(overlap)
    places = read_places(donate)
    machine = Machine(topology, library)
    timed = _find_timed(machine, mesh)

    def make_program(limit: int | None, starts: Starts) -> JittedFunction:
        return JittedFunction(
            function, "cost", timed, library, limit, overlap, places, starts=starts
        )

    return _Choosing(function, mesh, arguments, live_bytes, machine, make_program).answer()


def _find_timed(machine: Machine, mesh: DeviceMesh) -> Topology:
    """The topology of a machine with how fast its devices are, so that programs have times."""
    one = machine.topology_for(mesh)
    if one.device is not None:
        return one
    links = one.within_host, one.between_hosts, one.between_racks
    return Topology(one.rank_host, one.host_rack, *links, one.overhead, machine.device)


class _Program(NamedTuple):
    """A program with some shardings of its arguments.

    Args:
        specs: of free inputs.
        starts: shardings of all values near which it was placed.
        trace: of it, without a limit.
    """

    specs: tuple[ShardingSpec, ...]
    starts: Starts
    trace: Trace

    @property
    def peak_bytes(self) -> int:
        """What the fullest rank holds."""
        return max(self.trace.peak_bytes.values())

    @property
    def seconds_s(self) -> float:
        """How long it takes: its topology says how fast devices are."""
        return self.trace.seconds_s or 0.0


class _Choosing:
    """The choice for one function."""

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: DeviceMesh,
        arguments: Sequence[Any],
        limit: int | None,
        machine: Machine,
        make_program: Callable[[int | None, Starts], JittedFunction],
    ) -> None:
        self._name = f"sp.auto of {function!r} over {mesh}"
        self._mesh = mesh
        self._arguments = list(arguments)
        self._limit = limit
        self._make_program = make_program
        self._known: dict[tuple[ShardingSpec, ...], _Program] = {}
        kinds = [type_of(leaf) for _, leaf in leaves(self._arguments)]
        arrays = [kind for kind in kinds if kind is not None]
        self._check_meshes(kind.spec.mesh for kind in arrays if kind.spec is not None)
        self._is_free = [kind.spec is None for kind in arrays]
        whole = self._fill(replicated(mesh, kind.ndim) for kind in arrays if kind.spec is None)
        with unrecorded():
            recorded = simplified(record_for("cost", function, whole, has_others=True))
        self._check_meshes(meshes_of(recorded))
        self._graph = recorded.graph
        self._search = self._begin(recorded, machine)

    def _check_meshes(self, meshes: Iterable[DeviceMesh]) -> None:
        other = next((one for one in meshes if one is not self._mesh), None)
        if other is not None:
            raise MeshError(
                f"{self._name}, with arrays over {other}; give arrays over the one mesh, or without"
                " a sharding, and a function that shards over no other"
            )

    def _fill(self, specs: Iterable[ShardingSpec]) -> list[Any]:
        """The arguments as types, free ones in some shardings."""
        left = iter(specs)

        def typed(leaf: Any) -> Any:
            kind = type_of(leaf)
            if kind is None:
                return leaf
            return kind if kind.spec is not None else kind.with_spec(next(left))

        filled: list[Any] = replaced(self._arguments, typed)
        return filled

    def _begin(self, recorded: Recording, machine: Machine) -> InputSearch:
        graph, types = recorded.graph, dict(zip(recorded.graph.inputs, recorded.types, strict=True))
        inputs = [number for number in graph.inputs if number not in recorded.constants]
        free = [number for number, is_free in zip(inputs, self._is_free, strict=True) if is_free]
        known = {n: kind.spec for n, kind in types.items() if kind is not None and n not in free}
        ties: dict[int, int] = {}
        for operation, action in zip(graph.operations, recorded.recorded_calls, strict=True):
            if action.like in free:
                ties[operation.results[0]] = action.like
            elif action.target is not None:
                known[operation.results[0]] = action.target
        annotations = {number: spec for number, spec in known.items() if spec is not None}
        return InputSearch(graph, annotations, free, ties, self._mesh, machine)

    def _judge(self, specs: tuple[ShardingSpec, ...], starts: Starts = ()) -> _Program:
        found = self._known.get(specs)
        if found is None:
            trace = self._make_program(None, starts).trace(*self._fill(specs))
            found = self._known[specs] = _Program(specs, starts, trace)
        return found

    def _keeps_limit(self, one: _Program) -> bool:
        return self._limit is None or one.peak_bytes <= self._limit

    def answer(self) -> AutoPlacement:
        """The best that was found."""
        is_exact = self._find()
        fitting = [one for one in self._known.values() if self._keeps_limit(one)]
        if fitting:
            best = min(fitting, key=lambda one: (one.seconds_s, one.peak_bytes))
        else:
            best = min(self._known.values(), key=lambda one: one.peak_bytes)
        program = self._make_program(self._limit, best.starts)
        filled = self._fill(best.specs)
        trace = best.trace if fitting else self._trace_within(program, filled, best)
        specs = replaced(filled, lambda leaf: leaf.spec if isinstance(leaf, ArrayType) else None)
        return AutoPlacement(tuple(specs), program, trace, is_exact and bool(fitting))

    def _trace_within(
        self, program: JittedFunction, filled: Sequence[Any], least: _Program
    ) -> Trace:
        """The trace of a program that keeps the limit by other strategies, or computing again."""
        try:
            return program.trace(*filled)
        except PlanError as error:
            raise PlanError(
                f"{self._name}: no shardings of its arguments were found with which each rank "
                f"holds at most live_bytes={self._limit:,}; the least that was found is "
                f"{least.peak_bytes:,}. Give live_bytes={least.peak_bytes:,}, a mesh of more "
                "devices, a smaller batch, or put layers that are differentiated under "
                "@sp.rematerialized"
            ) from error

    def _find(self) -> bool:
        """Judge what may be the best. Whether it is for sure."""
        search = self._search
        if not search.free:
            self._judge(())
            return True
        # 1. What takes least time, and of equals has the least memory.
        first = self._judge_price(LOWEST_PRICE)
        # 2. The lowest price at which the limit is kept, halving what is left of them.
        prices = [] if self._keeps_limit(first) else list(PRICES)
        while prices:
            middle = len(prices) // 2
            keeps = self._keeps_limit(self._judge_price(prices[middle]))
            prices = prices[:middle] if keeps else prices[middle + 1 :]
        # 3. All others that may be better.
        if len(self._graph.operations) > MOST_PROVEN:
            return False
        table, values = search.table, search.problem.values

        def judge(chosen: tuple[int, ...]) -> float:
            pairs = zip(search.free, chosen, strict=True)
            one = self._judge(tuple(table.decoded(values[n][choice]) for n, choice in pairs))
            return one.seconds_s if self._keeps_limit(one) else math.inf

        known_s = [one.seconds_s for one in self._known.values() if self._keeps_limit(one)]
        limit = math.inf if self._limit is None else self._limit
        return least_inputs(search, judge, min(known_s, default=math.inf), limit)

    def _judge_price(self, price: float) -> _Program:
        every = self._search.specs(self._search.least(price * self._search.byte_s))
        return self._judge(tuple(every[number] for number in self._search.free), (every,))
