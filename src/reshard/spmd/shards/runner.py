"""Runners: one process stores all shards of an array, or each process stores a single shard.

A runner stores the shards of arrays and moves them between shardings. Operations ask it which
ranks' shards are in this process (`ranks`), and compute on these alone: the same code runs in one
process and in many.

    runner                 shards here        computes with       moves by
    InProcess              of all ranks       NumPy, PyTorch      copies in memory
    OverProcesses          of this rank       PyTorch             messages between processes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Literal
from weakref import WeakSet

from reshard._contexts import set_context
from reshard.errors import UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType, replicated
from reshard.spmd.core.backend import Library, library, library_of
from reshard.spmd.core.local_work import Function, LocalWork
from reshard.spmd.core.operator import Operator
from reshard.spmd.core.result_types import check_promotion, widened_functions
from reshard.spmd.shards.shard_copies import Movement, Shards, copies

Transport = Literal["here", "messages", "together"]
"""How elements move: without messages, by messages alone, or by a collective call of all ranks."""

Begin = Callable[[Movement, Shards], Callable[[], Shards]]
"""Begins a movement, and returns a function that waits for its result. No other movement may run
until all movements that have begun were waited for."""

# More than any program's number of different operations; it only bounds the memory.
MAX_CACHED = 1 << 16


_runners: WeakSet[Runner] = WeakSet()


def forget_calls(name: str) -> None:
    """Forget an operator's compiled operations in all runners, because its record was replaced."""
    for runner in list(_runners):
        for key in [key for key in list(runner.calls) if key[0] == name]:
            runner.calls.pop(key, None)


class Runner:
    """A base class of runners, which caches everything that depends on operand types alone.

    `calls` are the compiled operations, see `reshard.spmd.shards.operation_call`. An abstract
    runner has arrays without elements, and also accepts other runners' arrays as operands.
    """

    is_abstract = False
    # Whether all ranks' shards are in this process.
    has_every_shard = True

    def __init__(self, library: Library) -> None:
        self.library = library
        self.calls: dict[Any, Any] = {}
        _runners.add(self)
        # Created when an array is first resharded, see `array_value`.
        self.reshard_cache: Any = None
        self._movements: dict[tuple[ArrayType, ShardingSpec], Movement] = {}
        # An array without a mesh is a single shard, which every runner has.
        self._ranks: dict[DeviceMesh | None, tuple[int, ...]] = {None: (0,)}

    @property
    def computing(self) -> Library:
        """The library that computes, whose element types results have."""
        return self.library

    def ranks(self, mesh: DeviceMesh | None) -> tuple[int, ...]:
        """Return the ranks of a mesh whose shards are here, in the mesh's order.

        An array without a mesh has one shard: all of it. An array over a mesh without this process
        has no shards here: its operations compute nothing, and take part in collective calls.
        """
        ranks = self._ranks.get(mesh)
        if ranks is None and mesh is not None:
            ranks = self._ranks[mesh] = self._find_ranks(mesh)
        return ranks or ()

    def functions(self, operator: Operator, work: LocalWork) -> list[Function]:
        """Return the functions of an operation that the ranks here compute."""
        if not work.ranks:
            return []
        if self.library.name == "numpy":
            return widened_functions(operator, work)
        check_promotion(operator, work)
        return operator.local_functions(work)

    def movement(self, source: ArrayType, spec: ShardingSpec) -> Movement:
        """Return a function that moves shards of an array of type `source` to `spec`."""
        movement = self._movements.get((source, spec))
        if movement is None:
            if len(self._movements) >= MAX_CACHED:
                self._movements.clear()
            movement = self._movements[source, spec] = self._new_movement(source, spec)
        return movement

    def moved_once(self, source: ArrayType, spec: ShardingSpec, shards: Shards) -> Shards:
        """Move shards by a movement that is not cached, because it depends on elements."""
        return self._new_movement(source, spec)(shards)

    def _new_movement(self, source: ArrayType, spec: ShardingSpec) -> Movement:
        ranks = self.ranks(spec.mesh)
        if source.spec is None:
            # An array without a mesh is a copy on each device: the same object for all devices.
            whole = source.with_spec(replicated(spec.mesh, source.ndim))
            move = self.movement(whole, spec)
            return lambda shards: move(shards * len(ranks))
        if source.spec.mesh is not spec.mesh:
            return self._cross_meshes(source, source.spec.mesh, spec)
        before, after = source.layout, spec.layout(source.shape)
        # Layouts are interned: specs with the same layout need no movement.
        if before is after:
            return lambda shards: shards
        return self._make_movement(source, spec, LayoutChange(before, after))

    def _cross_meshes(self, source: ArrayType, mesh: DeviceMesh, spec: ShardingSpec) -> Movement:
        """Return a movement between two meshes. Raises MeshError if the runner has none."""
        raise NotImplementedError

    def has_everyone(self, mesh: DeviceMesh | None) -> bool:
        """Return whether every process has shards of arrays over a mesh."""
        return True

    def on_any_rank(self, is_so: bool) -> bool:
        """Return whether a condition holds on any rank. All ranks ask, and get the same answer."""
        return is_so

    def failure_of_any(self, failure: Exception | None) -> Exception | None:
        """Return the failure of a rank, or None if no rank failed. All ranks get the same."""
        return failure

    def is_moved(self, source: ArrayType, spec: ShardingSpec) -> bool:
        """Return whether elements move between ranks when an array is moved to another sharding."""
        before = source.spec or replicated(spec.mesh, source.ndim)
        change = LayoutChange(before.layout(source.shape), spec.layout(source.shape))
        # Contributions are made anew even if no elements move, for example from copies.
        return bool(change.moved_elements) or change.target.reduction is not None

    def transport(self, source: ArrayType, spec: ShardingSpec) -> Transport:
        """Return how the shards of an array are moved to another sharding."""
        return "here"

    def in_lockstep(self, digest: bytes) -> AbstractContextManager[Begin | None]:
        """Let every rank do the same movements inside in the same order; `digest` identifies them.

        Enters with a function that begins a movement while the program computes, or None if the
        runner lacks such a function; see `Begin`.
        """
        return nullcontext()

    def independent(self) -> AbstractContextManager[None]:
        """Allow movements inside `in_lockstep` that its digest does not cover."""
        return nullcontext()

    def collective_error(self, error: Exception) -> Exception:
        """Mark an error as raised by every rank at the same place, and return it."""
        return error

    def wrap_input(self, kind: ArrayType, shards: Shards) -> Shards:
        """Convert shards that a program passes to shards of an array: see `process_runner`."""
        return shards

    def unwrap_output(self, kind: ArrayType, shards: Shards) -> Shards:
        """Convert an array's shards to shards for a program: see `process_runner`."""
        return shards

    def _find_ranks(self, mesh: DeviceMesh) -> tuple[int, ...]:
        raise NotImplementedError

    def _make_movement(self, source: ArrayType, spec: ShardingSpec, plan: LayoutChange) -> Movement:
        raise NotImplementedError

    def dense(self, source: ArrayType, shards: Shards) -> Any:
        """Return the whole array, on every process."""
        raise NotImplementedError


class InProcess(Runner):
    """A runner that stores all shards in this process. Create it with `in_process`."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self._gathers: dict[ArrayType, Movement] = {}

    def _find_ranks(self, mesh: DeviceMesh) -> tuple[int, ...]:
        return mesh.devices

    def _make_movement(self, source: ArrayType, spec: ShardingSpec, plan: LayoutChange) -> Movement:
        ranks = self.ranks(spec.mesh)
        return copies(plan, ranks, ranks, self.library)

    def _cross_meshes(self, source: ArrayType, mesh: DeviceMesh, spec: ShardingSpec) -> Movement:
        plan = LayoutChange(source.layout, spec.layout(source.shape))
        return copies(plan, self.ranks(mesh), self.ranks(spec.mesh), self.library)

    def dense(self, source: ArrayType, shards: Shards) -> Any:
        if source.spec is None:
            return shards[0]
        gather = self._gathers.get(source)
        if gather is None:
            if len(self._gathers) >= MAX_CACHED:
                self._gathers.clear()
            devices, before = source.spec.mesh.devices, source.layout
            # A single rank gathers the whole array: the others need no copy.
            whole = Layout.whole(source.shape, devices[:1], before.slots)
            plan = LayoutChange(before, whole)
            gather = self._gathers[source] = copies(plan, devices, devices[:1], self.library)
        return gather(shards)[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return (in_process, (self.library.name,))

    def __repr__(self) -> str:
        return f"in_process({self.library.name!r})"


def in_process(name: str = "numpy") -> Runner:
    """Return the runner that stores all shards in this process, as arrays of `numpy` or `torch`.

    Raises:
        UsageError: another library.
        MissingExtraError: a library that is not installed.

    >>> in_process() is in_process("numpy")
    True
    """
    return _in_process(name)


@lru_cache(maxsize=2)
def _in_process(name: str) -> Runner:
    return InProcess(library(name))


_chosen: ContextVar[Runner | None] = ContextVar("runner", default=None)


@contextmanager
def running(runner: Runner) -> Iterator[Runner]:
    """Use a runner for arrays that are created inside the block.

    >>> import reshard.spmd as sp
    >>> with sp.running(sp.in_process("numpy")):
    ...     sp.ones((2, 2)).runner
    in_process('numpy')
    """
    if not isinstance(runner, Runner):
        raise UsageError(
            f"running {runner!r}, a {type(runner).__name__}; give sp.in_process('numpy') or "
            "sp.over_processes()"
        )
    with set_context(_chosen, runner):
        yield runner


def runner_for(data: object = None) -> Runner:
    """Return the runner of a new array: the chosen runner, else the runner of `data`'s library."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    backend = library_of(data)
    return in_process("numpy" if backend is None else backend.name)
