"""Runs of a program of collectives between the ranks of a process group.

1. This rank's phases, and its shards between them, follow from the program (`phases`).
2. The phases run in order, each by the same exchange of messages as other movements,
   within the ranks of its group. Equally sharded contributions are combined region by region, so an
   all-reduce reads each region while it is in a cache. A slice is a view, or a copy.
3. If the backend's collectives are faster than messages (NCCL, not gloo), all-gathers use the
   backend's own, if the group has all ranks. Gloo's own are messages too, and slower: they require
   dense memory, and ranks wait for one another, while messages are sent from and to any strides.
4. Contributions are combined by the same code as in a single process, in the order of the plan. So
   every rank gets the same bits, equal to those of the direct plan if a single step combines all,
   for any dtype.

*Process groups.* An all-gather works within groups of a mesh: along `x` of a mesh `x=2, y=2` they
are 0, 2 and 1, 3. Creating a process group is a collective of all ranks of the job, members or not,
so all of them create all groups of a step, in the same order. Each group is created once, and kept
as long as the job's own group::

    step 0 over x     {0, 2}  {1, 3}       every rank creates these two,
    step 1 over y     {0, 1}  {2, 3}       then these; a rank is in one of each step

Within a group of fewer ranks, the others do not call, so no further groups can be created, and none
is used. torch can create groups by their members alone, but names them by the number of groups that
a process has, so that members with further groups wait for each other forever.

*Repeated runs.* A redistribution exchanges and compares its ranks' calls, moves and confirms. If an
array moves as others did before, all but the elements is known: a `PreparedMovement` has the
program and the digest of the call. Ranks that run a list of movements in the same order agree on
it once (`MovementSequence`)::

    each alone      agree  move           agree  move           agree  move
    a sequence      agree  move           move                  move           confirm

Movements may also run in a thread of the sequence, in the order in which they were begun, while the
rank computes::

    the rank      begin a   compute   begin b   compute   wait for a   compute   wait for b
    the thread         | a ---------------------- | b ----------------------- |

All ranks begin movements in the same order, so that each waits for a single message at a time.

The ranks of a process group are numbered in ascending order, whatever the mesh's order: use global
ranks.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from reshard.collectives.program import Program
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ShardError
from reshard.geometry.transfers import Transfers
from reshard.plans.schedule import ALIGNMENT_BYTES
from reshard.torch.exchange.agreement import CallSignature, Group, agree, confirm, device_of
from reshard.torch.exchange.all_gather import AllGatherRounds, is_all_gather
from reshard.torch.exchange.consistency import is_usable
from reshard.torch.exchange.exchange import DEFAULT_EXTRA_BYTES, MessageExchange
from reshard.torch.exchange.groups import CPU, RankGroup, rank_group
from reshard.torch.exchange.packing.copies import empty_result
from reshard.torch.exchange.packing.messages import RankTransfers
from reshard.torch.exchange.rendezvous import timeout_of
from reshard.torch.exchange.timeline import start_thread
from reshard.torch.exchange.transfer import Transfer, TransferBatch
from reshard.torch.programs.phases import Phase, ShardBuffers, directions_of, phases_of


class MovementSequence:
    """The movements of a run of a program, on which all ranks have agreed.

    Args:
        group: of all ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._begun: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[Any] | None = None

    def begin(self, move: Callable[[], Any], is_here: bool = False) -> Future[Any]:
        """Run a movement after those that have begun.

        The data that it reads must not change before it has been waited for, and no movement may
        run in another thread until all of the sequence are waited for.

        Args:
            move: runs the movement.
            is_here: whether it must run in this thread, at once.
        """
        begun: Future[Any] = Future()
        if is_here:
            if self._last is not None:
                self._last.result()
            _fulfil(begun, move)
            return begun
        self._last = begun
        if self._thread is None:
            # PyTorch's modes are those of a thread, so they are passed on like the context.
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            self._thread = start_thread("reshard movements", self._run, *modes)
        self._begun.put((move, begun))
        return begun

    def close(self) -> None:
        """End the thread after the movements that have begun."""
        if self._thread is not None:
            self._begun.put(None)
            self._thread.join()

    def _run(self, has_gradients: bool, is_inference: bool) -> None:
        error: BaseException | None = None
        with torch.inference_mode(is_inference), torch.set_grad_enabled(has_gradients):
            while (listed := self._begun.get()) is not None:
                move, begun = listed
                # A source is freed as soon as no other reference to it is left.
                del listed
                if error is None:
                    error = _fulfil(begun, move)
                else:
                    begun.set_exception(error)
                del move


def _fulfil(begun: Future[Any], move: Callable[[], Any]) -> BaseException | None:
    """Run a movement. Return its error, or None."""
    try:
        begun.set_result(move())
    except BaseException as error:
        begun.set_exception(error)
        return error
    return None


@contextmanager
def agreed_sequence(group: Group, digest: bytes) -> Iterator[MovementSequence]:
    """Enter a sequence of movements that all ranks run in the same order, compared by its digest.

    Movements inside run as agreed. A rank that raises inside closes the group's connections, so
    that the others raise its cause at once.

    Raises:
        PlanError: the sequences of ranks differ.
        RunError: a rank does not arrive, or does not reach the end.
    """
    among: RankGroup = rank_group(group)
    with among.sequence():
        agree(CallSignature({"the program": digest}), among)
        sequence = MovementSequence(among)
        try:
            yield sequence
        except BaseException as error:
            # Notify before waiting for the thread, which may be in the middle of a movement.
            among.break_off(error)
            raise
        finally:
            sequence.close()
        confirm(among)


# The size of the smallest messages of any phase, for each rank of the group.
_SMALLEST_BYTES = 4 * ALIGNMENT_BYTES

_Key = tuple[dist.ProcessGroup, tuple[int, ...]]
_MADE: dict[_Key, dist.ProcessGroup | None] = {}


def min_extra_bytes(program: Program, itemsize_bytes: int, ranks: int) -> int:
    """Return the minimum memory beyond source and target to run a program on so many ranks.

    It holds shards in neither source nor target, and the smallest messages of other phases.
    """
    phases = phases_of(program, program.source.mesh.devices[0])
    return phases.most_between_elements * itemsize_bytes + max(ranks, 2) * _SMALLEST_BYTES


class ProgramRun:
    """A program on a rank, prepared to run once. All ranks of `group` create and finish it.

    `sent_bytes`, `received_bytes` and `extra_bytes`, the memory beyond source and target, are of
    this rank; `extra_bytes` is known after the run.

    Args:
        program: the program to run.
        source, target: this rank's local tensors, or None.
        dtype: of both.
        group: of all ranks of the program; of all ranks when None.
        device: of the tensors.
        extra_bytes: the maximum memory beyond source and target; the same on all ranks, and at
            least `min_extra_bytes`.
        by_collectives: whether to gather by the process group's own all-gather; by default unless
            the backend is gloo. The group must have all ranks.
    """

    # Each step has tags of its own, and may create process groups in the main thread.
    tag, can_leave_its_thread = 0, False

    def __init__(
        self,
        program: Program,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        dtype: torch.dtype,
        group: Group,
        device: torch.device,
        extra_bytes: int,
        by_collectives: bool | None = None,
    ) -> None:
        self._group = among = rank_group(group)
        is_gloo = among.backend_of(device) == "gloo"
        self._by_collectives = not is_gloo if by_collectives is None else by_collectives
        self._rank = among.rank
        self._dtype = dtype
        self._device = device
        self._limit_bytes = extra_bytes
        self._phases = phases_of(program, self._rank)
        self._buffers = ShardBuffers(self._phases, self._rank, source, target, dtype, device)
        moving = [
            directions_of(phase, self._rank, only_moving=True) for phase in self._phases.phases
        ]
        self.received_bytes = sum(_count_bytes(rows, dtype) for rows, _ in moving)
        self.sent_bytes = sum(_count_bytes(rows, dtype) for _, rows in moving)
        self.extra_bytes = 0
        self.has_failed = False

    def start(self) -> None:
        """Do nothing: steps depend on each other, so `finish` runs all of them."""

    def run(self) -> None:
        """Run the program, as `finish` does."""
        self.finish()

    def finish(self) -> None:
        """Run the program.

        Raises RunError if a rank does not answer; the target is then not usable.
        """
        step = "the program"
        try:
            # Create groups before any step: this is a collective, which a failed rank cannot join.
            groups = [self._find_group(phase) for phase in self._phases.phases]
            for number, transfers in self._buffers.transfers():
                phase = self._phases.phases[number]
                step = f"step {phase.step}"
                exchange = self._prepare(number, phase, groups[number], transfers)
                exchange.run()
                used_bytes = self._buffers.allocated_bytes + exchange.extra_bytes
                self.extra_bytes = max(self.extra_bytes, used_bytes)
        except BaseException as error:
            self.has_failed = True
            # An error of torch if a rank does not answer.
            if isinstance(error, RuntimeError):
                self._group.lose(f"{step} did not end", error)
            raise

    def _find_group(self, phase: Phase) -> dist.ProcessGroup | None:
        """Return the process group of a phase, or None if it needs none, or none can be made."""
        # All ranks of the job must take part in creating a group.
        if not self._by_collectives or phase.kind != "all-gather" or not self._group.is_everyone:
            return None
        return process_group(None, phase.step.groups, self._rank)

    def _prepare(
        self,
        number: int,
        phase: Phase,
        group: dist.ProcessGroup | None,
        transfers: RankTransfers,
    ) -> MessageExchange | AllGatherRounds:
        """Prepare the exchange of a phase, in the memory that its shards leave."""
        between_bytes = self._phases.between_elements(number) * self._dtype.itemsize
        limit_bytes = self._limit_bytes - between_bytes
        if group is not None and is_all_gather(phase.change):
            memory = (self._dtype, self._device, limit_bytes)
            return AllGatherRounds(transfers, self._rank, group, *memory)
        return MessageExchange(
            [transfers], self._group, self._device, limit_bytes, by_region=phase.by_region
        )


def _count_bytes(rows: Transfers, dtype: torch.dtype) -> int:
    return int(rows.elements.sum()) * int(dtype.itemsize)


def process_group(
    whole: dist.ProcessGroup | None, groups: Iterable[tuple[int, ...]], rank: int
) -> dist.ProcessGroup | None:
    """Return the process group of a rank among disjoint groups; create it if it does not exist.

    All ranks of `whole` call this, with all groups of each step, in the order of the steps.

    Args:
        whole: a process group of all ranks that call this; the group of all ranks when None.
        groups: global ranks.
        rank: this rank.

    Returns:
        The process group of the rank's group; None if it is in none, or alone, or if `whole` does
        not have all ranks.
    """
    everyone = dist.group.WORLD
    # All ranks of the job must take part in creating a group; here are only those of `whole`.
    if whole is not None and whole is not everyone:
        return None
    _forget_ended()
    own_group = None
    for ranks in groups:
        # In the same order on all ranks: new_group is a collective of the whole job.
        members = tuple(sorted(ranks))
        if len(members) == dist.get_world_size():
            group: dist.ProcessGroup | None = everyone
        elif len(members) < 2:
            continue
        elif (everyone, members) in _MADE:
            group = _MADE[everyone, members]
        else:
            # By default it has torch's timeout, not the job's.
            group = dist.new_group(list(members), timeout=timeout_of(everyone))
            # For others torch returns a marker that is not a group.
            group = group if rank in members else None
            _MADE[everyone, members] = group
        own_group = group if rank in members else own_group
    return own_group


def _forget_ended() -> None:
    """Drop groups of a job that has ended in this process."""
    for everyone, members in list(_MADE):
        if everyone is not dist.group.WORLD:
            del _MADE[everyone, members]


class PreparedMovement:
    """A program on a rank, for tensors of a dtype. All ranks of the group run it.

    Args:
        program: from the layout of the tensors to that of the results.
        dtype: of their elements.
        group: of all ranks of the program; of all ranks when None.
    """

    def __init__(
        self, program: Program, dtype: DType, group: dist.ProcessGroup | None = None
    ) -> None:
        self.program = program
        self.dtype = dtype
        self._group = group
        ranks = dist.get_world_size(group)
        least_bytes = min_extra_bytes(program, dtype.itemsize_bytes, ranks)
        self.extra_bytes = max(DEFAULT_EXTRA_BYTES, least_bytes)
        self._source = program.source.layout(program.shape)
        self._target = program.target.layout(program.shape)
        self._intent = CallSignature(
            {
                "dtype": dtype.name.encode(),
                "source": self._source.fingerprint,
                "target": self._target.fingerprint,
                "method": method_digest(program),
            }
        )

    def run(
        self, tensor: torch.Tensor | None, agreed: RankGroup | None = None
    ) -> torch.Tensor | None:
        """Return this rank's part of the result, from its part of the source, or None.

        Args:
            tensor: dense, with the program's dtype, and the local shape of its source.
            agreed: the group, within a sequence of movements, on which all ranks have already
                agreed.

        Raises:
            RunError: on every rank, a rank that cannot take part; on ranks that wait for it, a rank
                that fails during the run.
            PlanError: on every rank, ranks whose calls differ.
            ShardError: an agreed run of a tensor that a failed run has left partly written.
        """
        group = rank_group(self._group) if agreed is None else agreed
        # A sequence has taken the turn for all of its threads.
        with group.turn() if agreed is None else nullcontext():
            if agreed is not None:
                result = self._make_result(tensor, group.rank)
            else:
                result = self._agree_on_result(tensor, group)
            device = next((x.device for x in (tensor, result) if x is not None), CPU)
            dtype = getattr(torch, self.dtype.name)
            run = ProgramRun(self.program, tensor, result, dtype, group, device, self.extra_bytes)
            # Ranks that wait for a failed rank raise; a sequence confirms its end.
            Transfer([TransferBatch([run])], group, confirms=False).run()
            return result

    def _agree_on_result(
        self, tensor: torch.Tensor | None, group: RankGroup
    ) -> torch.Tensor | None:
        try:
            result = self._make_result(tensor, group.rank)
        except Exception as error:
            # Errors such as lack of memory are reported too, since the others wait for this rank.
            agree(replace(self._intent, problem=f"{type(error).__name__}: {error}"), group)
            raise
        agree(self._intent, group)
        return result

    def _make_result(self, tensor: torch.Tensor | None, rank: int) -> torch.Tensor | None:
        before, after = (
            layout.local_shape(rank) if rank < layout.slots else None
            for layout in (self._source, self._target)
        )
        shape = None if tensor is None else tuple(tensor.shape)
        if shape != before or (tensor is not None and as_dtype(tensor.dtype) != self.dtype):
            said = "none" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise ShardError(
                f"a shard, {said}, where {self.dtype.name} of shape {before} moves to shape "
                f"{after}; give shards as the arrays have them"
            )
        if tensor is not None and not is_usable(tensor):
            raise ShardError(
                f"a shard, {tensor.dtype} of shape {list(tensor.shape)}, is partly new and partly "
                "old after a run into it that failed; fill it again"
            )
        if after is None:
            return None
        device = device_of(self._group) if tensor is None else tensor.device
        result = empty_result(after, getattr(torch, self.dtype.name), device)
        # Zero the result, since padding is not sent.
        return result.zero_() if self._target.is_padded else result


@lru_cache(maxsize=1024)
def method_digest(program: Program | None) -> bytes:
    """Return a digest of a method: the steps of a program, with their groups and shards."""
    if program is None:
        return b"exchange"
    hasher = hashlib.blake2b(b"program", digest_size=16)
    for step in program.steps:
        hasher.update(step.name.encode() + step.target_layout.fingerprint)
        hasher.update(repr(step.groups).encode())
    return hasher.digest()
