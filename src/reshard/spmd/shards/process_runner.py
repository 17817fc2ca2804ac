"""One shard per process, over `torch.distributed`: each process has the shard of its own rank.

Every process runs the same program: all processes call the operations that move elements, in the
same order. Elements that are in the process's own shard are copied without a message. The others
move by the program that `chosen_program` finds, or by the direct exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reshard._contexts import set_context
from reshard.collectives.steps import Exchange
from reshard.errors import MeshError, ReshardError, RunError, UsageError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.core.backend import library
from reshard.spmd.shards.chosen_program import chosen_program
from reshard.spmd.shards.process_gradients import given, refuse_gradient, taken, with_gradient
from reshard.spmd.shards.runner import Begin, Runner, Transport, replicated
from reshard.spmd.shards.shard_copies import Movement, Shards, copies
from reshard.torch.exchange.agreement import CallSignature, agree, share
from reshard.torch.exchange.groups import RankGroup, rank_group
from reshard.torch.programs.run import PreparedMovement
from reshard.torch.programs.sequence import agreed_sequence
from reshard.torch.redistribution import redistribute


class OverProcesses(Runner):
    """A runner that stores this process's shard only. Create it with `over_processes`."""

    has_every_shard = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(library("torch"))
        self.group = group
        self.rank = dist.get_rank()

    def _find_ranks(self, mesh: DeviceMesh) -> tuple[int, ...]:
        missing = set(mesh.devices) - set(self._everyone)
        if missing:
            raise MeshError(
                f"{mesh!r} has rank {min(missing)}, which is none of {len(self._everyone)} "
                "processes; give a mesh of theirs"
            )
        return (self.rank,) if self.rank in mesh.devices else ()

    @cached_property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self.group or dist.group.WORLD))

    def has_everyone(self, mesh: DeviceMesh | None) -> bool:
        return mesh is None or len(mesh.devices) == len(self._everyone)

    def _new_movement(self, source: ArrayType, spec: ShardingSpec) -> Movement:
        move = super()._new_movement(source, spec)
        return with_gradient(self, source, spec, move) if source.spec is None else move

    def _make_movement(self, source: ArrayType, spec: ShardingSpec, plan: LayoutChange) -> Movement:
        # No elements move, for instance from a whole copy to a part of it: no messages, no waiting.
        if not plan.moved_elements and plan.target.reduction is None:
            ranks = self.ranks(spec.mesh)
            if not ranks:
                return lambda shards: ()
            return copies(plan, ranks, ranks, self.library)
        return with_gradient(self, source, spec, self._move_by_messages(source, spec))

    def _cross_meshes(self, source: ArrayType, mesh: DeviceMesh, spec: ShardingSpec) -> Movement:
        if set(mesh.devices) != set(spec.mesh.devices):
            return with_gradient(self, source, spec, self._move_by_messages(source, spec))
        plan = LayoutChange(source.layout, spec.layout(source.shape))
        if plan.source is plan.target:
            return lambda shards: shards
        return self._make_movement(source, spec, plan)

    def _move_by_messages(self, source: ArrayType, spec: ShardingSpec) -> Movement:
        program = chosen_program(source, spec)
        prepared = PreparedMovement(program, source.dtype, self.group)
        is_exchange = any(isinstance(step, Exchange) for step in program.steps)
        by_hosts = self._move_by_exchange(source, spec.layout(source.shape))

        def moved(shards: Shards) -> Shards:
            if is_exchange and self._has_hosts():
                return by_hosts(shards)
            agreed = _agreed.get()
            is_own = agreed is not None and agreed.runner is self
            made = prepared.run(_read_own(shards), agreed.group if agreed and is_own else None)
            return () if made is None else (made,)

        return moved

    def _has_hosts(self) -> bool:
        agreed = _agreed.get()
        # In a sequence that has failed, `rank_group` would wait for a rendezvous of all ranks.
        group = rank_group(self.group) if agreed is None else agreed.group
        return len(set(group.hosts)) > 1

    def transport(self, source: ArrayType, spec: ShardingSpec) -> Transport:
        """Return how the shards of an array are moved to another sharding."""
        before = source.spec or replicated(spec.mesh, source.ndim)
        plan = LayoutChange(before.layout(source.shape), spec.layout(source.shape))
        if not plan.moved_elements and plan.target.reduction is None:
            return "here"
        # Between hosts, ranks agree on each direct exchange separately.
        program = chosen_program(source, spec)
        is_exchange = any(isinstance(step, Exchange) for step in program.steps)
        return "together" if is_exchange and self._has_hosts() else "messages"

    def _move_by_exchange(self, source: ArrayType, target: Layout) -> Movement:
        def moved(shards: Shards) -> Shards:
            own = _read_own(shards)
            dtype = getattr(torch, source.dtype.name)
            options: dict[str, Any] = {"source": source.layout, "group": self.group, "dtype": dtype}
            found = redistribute(own, target, **options)
            return () if found is None else (found,)

        return moved

    def in_lockstep(self, digest: bytes) -> AbstractContextManager[Begin | None]:
        """Check on entry that all ranks have equal digests, and on exit that all have succeeded.

        If not, all ranks raise PlanError or RunError, see
        `reshard.torch.programs.sequence.agreed_sequence`.
        """
        return self._agree(digest)

    @contextmanager
    def _agree(self, digest: bytes) -> Iterator[Begin]:
        with agreed_sequence(self.group, digest) as sequence:

            def begin(move: Movement, shards: Shards) -> Callable[[], Shards]:
                # Streams of a device belong to threads.
                is_here = any(one.device.type != "cpu" for one in shards)
                return sequence.begin(partial(move, shards), is_here).result

            with set_context(_agreed, _Agreed(self, sequence.group)):
                yield begin

    def independent(self) -> AbstractContextManager[None]:
        return set_context(_agreed, None)

    def collective_error(self, error: Exception) -> Exception:
        rank_group(self.group).note_known(error)
        return error

    def on_any_rank(self, is_so: bool) -> bool:
        """Return whether a condition holds on any rank; all ranks must call this."""
        group = rank_group(self.group)
        with group.turn():
            return bool(agree(CallSignature({"a condition": b""}, notes=(int(is_so),)), group)[0])

    def failure_of_any(self, failure: Exception | None) -> Exception | None:
        """Return the failure of the first rank that failed, on all ranks."""
        group = rank_group(self.group)
        with group.turn():
            # Numbers decrease with the rank: the maximum belongs to the first rank that failed.
            own = 0 if failure is None else group.slots - group.rank
            (first,) = agree(CallSignature({"a failure": b""}, notes=(own,)), group)
            if not first:
                return None
            # Send the text, not the error itself: errors of libraries may not be picklable.
            told = None if failure is None else (_choose_error(failure), str(failure))
            kind, text = share(told, group.slots - first, group)
        repeated = self.collective_error(kind(text))
        repeated.__cause__ = failure
        return repeated

    def dense(self, source: ArrayType, shards: Shards) -> Any:
        if source.spec is None:
            return shards[0]
        # Every process of the group gets a copy, including processes outside the mesh.
        whole = Layout.whole(source.shape, self._everyone, max(self._everyone) + 1)
        if source.layout is whole:
            return taken(self, source, shards[0], lambda shard: shard)
        gather = self._move_by_exchange(source, whole)
        if not self.has_everyone(source.spec.mesh):
            refuse_gradient(self, source, shards)
            return gather(shards)[0]
        return taken(self, source, shards[0], lambda shard: gather((shard,))[0])

    def wrap_input(self, kind: ArrayType, shards: Shards) -> Shards:
        return tuple([given(self, kind, shard) for shard in shards])

    def unwrap_output(self, kind: ArrayType, shards: Shards) -> Shards:
        return tuple([taken(self, kind, shard) for shard in shards])

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError(
            "an array over processes cannot be pickled: each process has its own shard. Pickle "
            "x.shards and x.spec, and make it anew with sp.from_shards; or save a checkpoint"
        )

    def __repr__(self) -> str:
        return f"over_processes() of rank {self.rank}"


def _read_own(shards: Shards) -> torch.Tensor | None:
    """Return this rank's shard, or None if it has none."""
    return torch.as_tensor(shards[0]).contiguous() if shards else None


class _Agreed(NamedTuple):
    runner: OverProcesses
    group: RankGroup


# The runner whose movements all ranks have agreed on, and the ranks' group.
_agreed: ContextVar[_Agreed | None] = ContextVar("agreed", default=None)


def _choose_error(failure: Exception) -> type[Exception]:
    """Return the class to raise on every rank; its only argument must be the text."""
    return type(failure) if isinstance(failure, ReshardError) else RunError


@lru_cache(maxsize=8)
def over_processes(group: dist.ProcessGroup | None = None) -> Runner:
    """Return the runner with one shard in each process of a group (of all processes when None).

    Raises:
        MissingExtraError: where `array_api_compat` is not installed.
        UsageError: outside a `torch.distributed` job.
    """
    if not dist.is_initialized():
        raise UsageError(
            "over processes, without a job of them; call torch.distributed.init_process_group "
            "before, or compute in this process: sp.in_process('torch')"
        )
    return OverProcesses(group)
