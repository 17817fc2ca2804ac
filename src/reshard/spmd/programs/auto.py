"""Auto: shardings of a function's arguments over a mesh, within a memory limit.

    placement = sp.auto(step, mesh, weights, batch, live_bytes=8 << 30)
    weights, batch = placement.place(weights, batch)
    loss, weights = placement.program(weights, batch)

1. The function is recorded with replicated arguments. A result that belongs to an argument (a
   gradient, a new weight) is constrained to the argument's sharding.
2. Fast shardings are searched for (`input_search`), then alternately those of the values between
   the arguments, by the strategy "cost", and of all values near them; the search also starts from
   arguments that are sharded over all axes, as in fully sharded data parallelism.
3. If the program exceeds the limit, bytes get a price: those of arguments, and all bytes at the
   peak. The lowest price at which the limit is satisfied is searched for, then the lowest near the
   fastest program that satisfies it.
4. In a small graph, all other shardings that might be faster are evaluated as well
   (`optimal_inputs`).

Every program is evaluated by its trace: its time and its peak memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from reshard._validation import check_type
from reshard.errors import MeshError, PlanError, UsageError
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.arrays.argument_tree import leaves, replaced
from reshard.spmd.arrays.sharded_array import array
from reshard.spmd.core.array_type import ArrayType, replicated
from reshard.spmd.graph import Graph, Shardings
from reshard.spmd.programs.input_search import (
    InputLayout,
    InputSearch,
    candidate_layouts,
    optimal_inputs,
)
from reshard.spmd.programs.jit import JitOptions, JittedFunction
from reshard.spmd.programs.simplification import simplify
from reshard.spmd.propagation.by_cost.cost_model import Machine
from reshard.spmd.propagation.by_cost.cost_propagation import Choices
from reshard.spmd.propagation.strategies import shardings_from
from reshard.spmd.shards.error_translation import check_function
from reshard.spmd.shards.operation_call import unrecorded
from reshard.spmd.tracing.graph_recording import type_of
from reshard.spmd.tracing.trace import Trace, record_for
from reshard.topology import Topology

# Operations of a graph for which shardings are proven optimal: a proof may take exponential time.
MAX_PROVEN_OPERATIONS = 16
# Prices of a byte, relative to the time of the function for each byte of its arguments: a price
# that only breaks ties, the first that is tried to satisfy a limit, and the highest; and how many
# are tried.
LOWEST_PRICE = 1e-4
FIRST_PRICE = 0.3
HIGHEST_PRICE = 100.0
MAX_PRICES = 6
# The same near a program that satisfies the limit.
NEAR_PRICE = 1.0
MAX_NEAR_PRICES = 4
# Operations of a graph in which inputs and intermediate values are placed in turn, and how often.
MAX_TURN_OPERATIONS = 512
MAX_TURNS = 3
# Candidate layouts that are evaluated, the fastest first: without a limit; and with a limit, until
# enough satisfy it.
FREE_CANDIDATES = 2
MAX_CANDIDATES = 8
ENOUGH_CANDIDATES = 2


@dataclass(frozen=True, slots=True)
class AutoPlacement:
    """Shardings of a function's arguments, and its program with them. Created by `auto`.

    Args:
        specs: in the structure of the arguments: a sharding for each array, None for everything
            else.
        program: the function as compiled by `sp.jit`, to be called with arrays in these shardings.
        trace: the trace of the program: its operations, time, bytes and memory.
        is_exact: whether no other shardings of the arguments within the limit take less time.
    """

    specs: tuple[Any, ...]
    program: JittedFunction
    trace: Trace
    is_exact: bool

    def place(self, *arguments: Any) -> tuple[Any, ...]:
        """Return the arguments, with their arrays in these shardings.

        Raises UsageError for arguments in other lists, tuples and dictionaries.
        """
        paths = [path for path, _ in leaves(list(arguments))]
        if paths != [path for path, _ in leaves(list(self.specs))]:
            raise UsageError(
                f"{len(paths)} arguments in other places than those that shardings were found for; "
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
    """Find shardings of a function's arguments that minimize its estimated time over a mesh.

    Args:
        function: a function of sharded arrays, as for `sp.jit`.
        mesh: the mesh; arguments may be sharded over all its axes.
        arguments: as for `sp.trace`: arrays from `sp.abstract` or with elements, and lists, tuples
            and dictionaries of them. Arguments that have a sharding keep it.
        live_bytes: a limit on the memory of each rank, as for `sp.jit`. No limit when None.
        topology, library: for time estimates, as for `sp.trace`; hosts of eight H100 when None.
        overlap, donate: options of the program, as for `sp.jit`.

    Returns:
        The shardings, and the program with the strategy "cost". In a graph of up to 16 operations
        the shardings are proven optimal if that takes few steps (`is_exact`), among those in which
        each axis of the mesh shards at most one dimension of an argument and divides it evenly. In
        larger graphs they are the best that a heuristic search finds.

    Raises:
        UsageError: an invalid function, mesh, limit or topology; a function that cannot be traced.
        MeshError: an argument, or the function, uses another mesh.
        PlanError: no shardings within the limit were found; the message has the lowest peak found.

    >>> import reshard.spmd as sp
    >>> from reshard import DeviceMesh
    >>> x, w = sp.abstract((4096, 64)), sp.abstract((64, 64))
    >>> placement = sp.auto(lambda x, w: sp.tanh(x @ w), DeviceMesh.of(x=4), x, w)
    >>> print(*placement.specs, sep="; ")
    x, -; -, -
    """
    check_function("auto", function, "sp.auto(f, mesh, x)")
    check_type(mesh, DeviceMesh, "mesh", "give DeviceMesh.of(dp=2, tp=4)")
    options = JitOptions(
        strategy="cost",
        topology=topology,
        library=library,
        live_bytes=live_bytes,
        overlap=overlap,
        donate=donate,
    )
    machine = Machine(topology, library)
    # Programs are compared by their times, for which devices have to be known.
    timed = machine.topology_for(mesh)
    if timed.device is None:
        links = timed.within_host, timed.between_hosts, timed.between_racks
        timed = Topology(timed.rank_host, timed.host_rack, *links, timed.overhead, machine.device)
    options = replace(options, topology=timed)
    return _Choosing(function, mesh, arguments, options, machine).answer()


class _Program(NamedTuple):
    """A program with some shardings of its arguments.

    Args:
        specs: of free inputs.
        shardings: of all its values; those that "cost" finds when None.
        trace: of it, without a limit.
    """

    specs: tuple[ShardingSpec, ...]
    shardings: Shardings | None
    trace: Trace

    @property
    def peak_bytes(self) -> int:
        """The maximum peak memory of a rank."""
        return max(self.trace.peak_bytes.values())

    @property
    def seconds_s(self) -> float:
        """The estimated time; its topology always describes devices."""
        return self.trace.seconds_s or 0.0


class _Choosing:
    """The search for shardings of a function's arguments, and the programs that it evaluated."""

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: DeviceMesh,
        arguments: Sequence[Any],
        options: JitOptions,
        machine: Machine,
    ) -> None:
        self._name = f"sp.auto of {function!r} over {mesh}"
        self._mesh = mesh
        self._arguments = list(arguments)
        self._function = function
        self._options = options
        self._limit = options.live_bytes
        self._known: dict[object, _Program] = {}
        kinds = [type_of(leaf) for _, leaf in leaves(self._arguments)]
        arrays = [kind for kind in kinds if kind is not None]
        self._check_meshes(kind.spec.mesh for kind in arrays if kind.spec is not None)
        self._is_free = [kind.spec is None for kind in arrays]
        replicated_arguments = self._fill(
            replicated(mesh, kind.ndim) for kind in arrays if kind.spec is None
        )
        with unrecorded():
            graph = simplify(record_for("cost", function, replicated_arguments, has_others=True))
        self._check_meshes(graph.meshes)
        self._graph = graph
        self._search = self._begin(graph, machine)
        self._is_small = len(self._graph.operations) <= MAX_PROVEN_OPERATIONS

    def _check_meshes(self, meshes: Iterable[DeviceMesh]) -> None:
        other = next((mesh for mesh in meshes if mesh is not self._mesh), None)
        if other is not None:
            raise MeshError(
                f"{self._name}, with arrays over {other}; give arrays over the one mesh, or without"
                " a sharding, and a function that shards over no other"
            )

    def _fill(self, specs: Iterable[ShardingSpec]) -> list[Any]:
        """Return the arguments as types, free ones in some shardings."""
        left = iter(specs)

        def typed(leaf: Any) -> Any:
            kind = type_of(leaf)
            if kind is None:
                return leaf
            return kind if kind.spec is not None else kind.with_spec(next(left))

        filled: list[Any] = replaced(self._arguments, typed)
        return filled

    def _begin(self, graph: Graph, machine: Machine) -> InputSearch:
        pairs = zip(graph.arguments, self._is_free, strict=True)
        free = [number for number, is_free in pairs if is_free]
        shardings = {n: graph.values[n].sharding for n in graph.inputs if n not in free}
        ties: dict[int, int] = {}
        for operation in graph.operations:
            if operation.like in free:
                ties[operation.results[0]] = operation.like
            elif operation.target is not None:
                shardings[operation.results[0]] = operation.target
        annotations = {number: spec for number, spec in shardings.items() if spec is not None}
        return InputSearch(graph, annotations, free, ties, self._mesh, machine)

    def _make_program(self, limit: int | None, shardings: Shardings | None) -> JittedFunction:
        placed = None if shardings is None else self._graph.with_shardings(*shardings)
        options = replace(self._options, live_bytes=limit, placed=placed)
        return JittedFunction(self._function, options)

    def _judge(
        self, specs: tuple[ShardingSpec, ...], shardings: Shardings | None = None
    ) -> _Program:
        program = self._known.get((specs, shardings))
        if program is None:
            # Without a limit: with it, the trace would be of another strategy's program where this
            # exceeds it.
            trace = self._make_program(None, shardings).trace(*self._fill(specs))
            program = self._known[specs, shardings] = _Program(specs, shardings, trace)
        return program

    def _keeps_limit(self, program: _Program) -> bool:
        return self._limit is None or program.peak_bytes <= self._limit

    def answer(self) -> AutoPlacement:
        """Return the fastest program within the limit."""
        is_exact = self._find()
        fitting = self._find_best()
        best = self._find_within() if fitting is None else fitting
        program = self._make_program(self._limit, best.shardings)
        specs = replaced(
            self._fill(best.specs), lambda leaf: leaf.spec if isinstance(leaf, ArrayType) else None
        )
        return AutoPlacement(tuple(specs), program, best.trace, is_exact and fitting is not None)

    def _find_within(self) -> _Program:
        """Return the fastest program within the limit by other strategies, or by recomputation."""
        least = sorted(self._known.values(), key=lambda program: program.peak_bytes)
        programs, refused = [], []
        # Each sharding of the inputs once, as it holds the least.
        for specs, program in {
            program.specs: program for program in reversed(least[:MAX_CANDIDATES])
        }.items():
            try:
                trace = self._make_program(self._limit, program.shardings).trace(*self._fill(specs))
                programs.append(program._replace(trace=trace))
            except PlanError as error:
                refused.append(error)
        if programs:
            return min(programs, key=_by_time)
        raise PlanError(
            f"{self._name}: no shardings of its arguments were found with which each rank "
            f"holds at most live_bytes={self._limit:,}; the least that was found is "
            f"{least[0].peak_bytes:,}. Give live_bytes={least[0].peak_bytes:,}, a mesh of more "
            "devices, a smaller batch, or put layers that are differentiated under "
            "@sp.rematerialized"
        ) from refused[-1]

    def _find(self) -> bool:
        """Evaluate programs that may be the fastest; return whether the best is proven."""
        search = self._search
        if not search.free:
            self._judge(())
            return True
        # 1. The fastest program; among equals that with the least memory.
        inputs = frozenset(search.free)
        first = self._judge_price(LOWEST_PRICE, inputs)
        if not self._is_small and self._keeps_limit(first):
            begun = [self._judge(layout.specs) for layout in self._candidates[:FREE_CANDIDATES]]
            self._improve([first, *begun], LOWEST_PRICE, inputs)
        # 2. The lowest price of memory at which the limit is kept.
        if not self._keeps_limit(min(self._known.values(), key=_by_time)):
            self._find_price(inputs | held_at_peak(first.trace))
        # 3. All others that may be better.
        if not self._is_small:
            return False
        search.problem.charge([])
        table, values = search.table, search.problem.values

        def judge(chosen: tuple[int, ...]) -> float:
            pairs = zip(search.free, chosen, strict=True)
            program = self._judge(tuple(table.decoded(values[n][choice]) for n, choice in pairs))
            return program.seconds_s if self._keeps_limit(program) else math.inf

        known_s = [
            program.seconds_s for program in self._known.values() if self._keeps_limit(program)
        ]
        limit = math.inf if self._limit is None else self._limit
        return optimal_inputs(search, judge, min(known_s, default=math.inf), limit)

    @cached_property
    def _candidates(self) -> list[InputLayout]:
        """Candidate layouts whose inputs satisfy the limit."""
        limit = math.inf if self._limit is None else self._limit
        return [layout for layout in candidate_layouts(self._search) if layout.size_bytes <= limit]

    def _find_price(self, held: frozenset[int]) -> None:
        """Evaluate the results for several prices, down to the lowest that satisfies the limit.

        Bytes have the price of what some program holds at its peak, `held` to begin with. In a
        large graph candidate layouts are evaluated first, and neighbours of the best at the end.
        """
        if not self._is_small:
            self._judge_candidates(held)
        low, high, price = LOWEST_PRICE, HIGHEST_PRICE, FIRST_PRICE
        for _ in range(MAX_PRICES):
            program, best = self._judge_price(price, held), self._find_best()
            if self._keeps_limit(program):
                high = price
            elif best is not None and best.seconds_s <= program.seconds_s:
                # Higher prices take longer.
                break
            else:
                low = price
                if self._has_same_values(program.trace):
                    held |= held_at_peak(program.trace)
            # The geometric mean, because prices differ by orders of magnitude.
            price = math.sqrt(low * high)
        if not self._is_small:
            self._approach_limit()

    def _find_best(self) -> _Program | None:
        """Return the fastest program so far that satisfies the limit."""
        fitting = [program for program in self._known.values() if self._keeps_limit(program)]
        return min(fitting, key=_by_time, default=None)

    def _approach_limit(self) -> None:
        """Evaluate programs for prices near the fastest within the limit, as long as that helps.

        The values that it holds at its peak have the price.
        """
        for _ in range(MAX_TURNS):
            best = self._find_best()
            if best is None or not self._has_same_values(best.trace):
                return
            held = frozenset(self._search.free) | held_at_peak(best.trace)
            low, high, price = LOWEST_PRICE, HIGHEST_PRICE, NEAR_PRICE
            for _ in range(MAX_NEAR_PRICES):
                program = self._judge_price(price, held, best)
                low, high = (low, price) if self._keeps_limit(program) else (price, high)
                price = math.sqrt(low * high)
            if self._find_best() is best:
                break

    def _judge_candidates(self, held: frozenset[int]) -> None:
        """Evaluate candidate layouts until a few satisfy the limit.

        Those that seem to satisfy it come first, then those that hold the least; the first of them
        are ordered by time, after the intermediate values have descended.
        """
        search, limit = self._search, self._limit or 0

        def find_need(chosen: Choices, seconds_s: float) -> tuple[float, float]:
            return max(search.held_bytes(chosen, held), limit), seconds_s

        first = sorted(
            self._candidates, key=lambda layout: find_need(layout.chosen, layout.seconds_s)
        )
        descended = [
            (search.descended(layout.chosen), layout.specs) for layout in first[:MAX_CANDIDATES]
        ]
        fitting = 0
        for _, specs in sorted(descended, key=lambda pair: find_need(*pair[0])):
            fitting += self._keeps_limit(self._judge(specs))
            if fitting == ENOUGH_CANDIDATES:
                break

    def _improve(self, begun: Sequence[_Program], price: float, held: frozenset[int]) -> None:
        """Place intermediate values, then inputs as well, in turn, as long as that helps."""
        best_s = math.inf
        if len(self._graph.operations) > MAX_TURN_OPERATIONS:
            return
        for _ in range(MAX_TURNS):
            # With the inputs' shardings alone, "cost" places the values between them.
            evaluated = [self._judge(program.specs) for program in begun]
            improved = [self._judge_price(price, held, program) for program in evaluated]
            best = min(improved, key=_by_time)
            if best.seconds_s >= best_s:
                break
            begun, best_s = [best], best.seconds_s

    def _has_same_values(self, traced: Trace) -> bool:
        """Return whether values have the same numbers: overlap and ring attention change them."""
        return traced.graph.has_same_operations(self._graph)

    def _judge_price(
        self, price: float, held: frozenset[int], near: _Program | None = None
    ) -> _Program:
        """Evaluate the program that is found for a price, starting from another program."""
        search = self._search
        starts = []
        if near is not None and self._has_same_values(near.trace):
            starts = [near.trace.graph.shardings[0]]
        placed = search.placed(search.least(price * search.byte_s, held, starts))
        free_specs = [placed.values[number] for number in search.free]
        specs = tuple([spec for spec in free_specs if spec is not None])
        # Small graphs are placed by "cost" anew, which proves what is best.
        return self._judge(specs, None if self._is_small else shardings_from(placed, self._mesh))


def _by_time(program: _Program) -> tuple[float, int]:
    return program.seconds_s, program.peak_bytes


def held_at_peak(traced: Trace) -> frozenset[int]:
    """Return the values that are live at the peak of the fullest rank, and its operation.

    Operations are numbered after the values.
    """
    graph, frees = traced.graph, traced.graph.last_uses()
    peaks = [max(operation.live_bytes) for operation in traced.operations]
    at = max(range(len(peaks)), key=peaks.__getitem__, default=0)
    held = {*graph.inputs, len(graph.values) + at} if peaks else {*graph.inputs}
    for index, operation in enumerate(graph.operations[: at + 1]):
        held.update(operation.results)
        # The operation at the peak still has its operands.
        held.difference_update(frees[index] if index < at else ())
    return frozenset(held)
