"""Runners: one process stores all shards of an array, or each process stores one.

A runner keeps the shards of arrays and moves them between shardings. Operations ask it which
ranks' shards are here (`ranks`), compute on those, and never look at the others: the same code
runs in one process and in many.

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
from reshard.sharding import DimSpec, ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.backend import Library, library, library_of
from reshard.spmd.core.local_work import Function, LocalWork
from reshard.spmd.core.operator import Operator
from reshard.spmd.shards.element_types import check_promotion, widened_functions
from reshard.spmd.shards.shard_copies import Movement, Shards, copies

Transport = Literal["here", "messages", "together"]
"""Of a movement: without messages, by messages alone, or by what all ranks come to together."""

Begin = Callable[[Movement, Shards], Callable[[], Shards]]
"""Begins a movement, and returns a function that waits for what it makes. Until all that have begun
are waited for, no other movement may run."""

# Beyond any program's number of different operations; a bound all the same.
MOST_KEPT = 1 << 16


_runners: WeakSet[Runner] = WeakSet()


def forget_calls(name: str) -> None:
    """Forgets what was compiled for an operator, in all runners: another one has its name."""
    for runner in list(_runners):
        for key in [one for one in list(runner.calls) if one[0] == name]:
            runner.calls.pop(key, None)


class Runner:
    """The base of all runners, which caches what depends on the operands' types alone.

    `calls` are the compiled operations, see `reshard.spmd.shards.operation_call`. An abstract
    runner has arrays without elements, and takes other runners' arrays as operands beside them.
    """

    is_abstract = False
    # Whether all ranks' shards are in this process.
    has_every_shard = True

    def __init__(self, library: Library) -> None:
        self.library = library
        self.calls: dict[Any, Any] = {}
        _runners.add(self)
        # What `reshard_cache` keeps for it.
        self.kept: Any = None
        self._movements: dict[tuple[ArrayType, ShardingSpec], Movement] = {}
        # An array without a mesh is one shard, which every runner has.
        self._ranks: dict[DeviceMesh | None, tuple[int, ...]] = {None: (0,)}

    @property
    def computing(self) -> Library:
        """The library that computes, whose element types results have."""
        return self.library

    def ranks(self, mesh: DeviceMesh | None) -> tuple[int, ...]:
        """The ranks of a mesh whose shards are here, in the mesh's order.

        An array without a mesh has one shard: all of it. One over a mesh without this process has
        none here: its operations compute nothing, and join what all ranks do.
        """
        found = self._ranks.get(mesh)
        if found is None and mesh is not None:
            found = self._ranks[mesh] = self._find_ranks(mesh)
        return found or ()

    def functions(self, operator: Operator, work: LocalWork) -> list[Function]:
        """The functions that the ranks here compute of an operation."""
        if not work.ranks:
            return []
        if self.library.name == "numpy":
            return widened_functions(operator, work)
        check_promotion(operator, work)
        return operator.local_functions(work)

    def movement(self, source: ArrayType, spec: ShardingSpec) -> Movement:
        """A function that makes the shards of `spec` from those of an array of type `source`."""
        found = self._movements.get((source, spec))
        if found is None:
            if len(self._movements) >= MOST_KEPT:
                self._movements.clear()
            found = self._movements[source, spec] = self._new_movement(source, spec)
        return found

    def moved_once(self, source: ArrayType, spec: ShardingSpec, shards: Shards) -> Shards:
        """Shards of another sharding, by a movement that is not kept: the elements chose it."""
        return self._new_movement(source, spec)(shards)

    def _new_movement(self, source: ArrayType, spec: ShardingSpec) -> Movement:
        ranks = self.ranks(spec.mesh)
        if source.spec is None:
            # One array without a mesh is a copy on each device: the same object for all of them.
            whole = source.with_spec(replicated(spec.mesh, source.ndim))
            move = self.movement(whole, spec)
            return lambda shards: move(shards * len(ranks))
        if source.spec.mesh is not spec.mesh:
            return self._cross_meshes(source, source.spec.mesh, spec)
        before, after = source.layout, spec.layout(source.shape)
        # Layouts are interned: different specs of one layout move nothing.
        if before is after:
            return lambda shards: shards
        return self._make_movement(source, spec, LayoutChange(before, after))

    def _cross_meshes(self, source: ArrayType, mesh: DeviceMesh, spec: ShardingSpec) -> Movement:
        """A movement from a mesh to another. Raises MeshError where there is none."""
        raise NotImplementedError

    def has_everyone(self, mesh: DeviceMesh | None) -> bool:
        """Whether every process has shards of arrays over a mesh."""
        return True

    def on_any_rank(self, is_so: bool) -> bool:
        """Whether a condition holds on any rank. All ranks ask, and get the same answer."""
        return is_so

    def failure_of_any(self, failure: Exception | None) -> Exception | None:
        """Why some rank failed to compute; None where all could. All ranks get the same."""
        return failure

    def transport(self, source: ArrayType, spec: ShardingSpec) -> Transport:
        """How the shards of an array come to another sharding."""
        return "here"

    def in_lockstep(self, digest: bytes) -> AbstractContextManager[Begin | None]:
        """Inside, every rank does the same movements in one order, of which this is a digest.

        It gives a function that begins a movement of messages beside what is computed, if there is
        one; see `Begin`.
        """
        return nullcontext()

    def independent(self) -> AbstractContextManager[None]:
        """Inside something `agreed`, what its digest does not know of."""
        return nullcontext()

    def collective_error(self, error: Exception) -> Exception:
        """An error that every rank raises at the same place."""
        return error

    def wrap_input(self, kind: ArrayType, shards: Shards) -> Shards:
        """Shards that a program gives, as those of an array: see `process_gradients`."""
        return shards

    def unwrap_output(self, kind: ArrayType, shards: Shards) -> Shards:
        """An array's shards, as a program takes them."""
        return shards

    def _find_ranks(self, mesh: DeviceMesh) -> tuple[int, ...]:
        raise NotImplementedError

    def _make_movement(self, source: ArrayType, spec: ShardingSpec, plan: LayoutChange) -> Movement:
        raise NotImplementedError

    def dense(self, source: ArrayType, shards: Shards) -> Any:
        """The whole array, on every process."""
        raise NotImplementedError


class InProcess(Runner):
    """All shards in this process. Get one with `in_process`."""

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
            if len(self._gathers) >= MOST_KEPT:
                self._gathers.clear()
            devices, before = source.spec.mesh.devices, source.layout
            # One place that wants all of it: the others need no copy.
            whole = Layout.whole(source.shape, devices[:1], before.slots)
            plan = LayoutChange(before, whole)
            gather = self._gathers[source] = copies(plan, devices, devices[:1], self.library)
        return gather(shards)[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return (in_process, (self.library.name,))

    def __repr__(self) -> str:
        return f"in_process({self.library.name!r})"


def replicated(mesh: DeviceMesh, ndim: int) -> ShardingSpec:
    """The sharding that has a whole copy on every device."""
    return _make_replicated(mesh, ndim)


@lru_cache(maxsize=1024)
def _make_replicated(mesh: DeviceMesh, ndim: int) -> ShardingSpec:
    return ShardingSpec(mesh, [DimSpec()] * ndim)


def in_process(name: str = "numpy") -> Runner:
    """The runner that stores all shards in this process, as arrays of `numpy` or `torch`.

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
    """Arrays that are created inside the block use this runner.

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
    """The runner of a new array: the chosen one, else the one whose library `data` is from."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    found = library_of(data)
    return in_process("numpy" if found is None else found.name)
