"""Groups of ranks that move tensors: their members, and private connections between them.

A torch process group specifies the members. On first use, all of its ranks meet at its store
(`rendezvous`), and each receives from all others

1. *the number*. Within a job this is the global rank. A group may also span several jobs, which
   were started separately and number their ranks from 0 each; its ranks then have the numbers that
   the group gives::

       trainer's job      0  1        a rank of each job at home
       engine's job             0  1
       the group          0  1  2  3  the numbers in layouts, plans and errors

2. *the host and process*, for error messages.

CPU tensors are sent over private gloo connections, so that other messages of the user's program do
not interfere. Ranks that can share memory use it for the messages of exchanges (`one_host`). A rank
that fails leaves a note at the store and closes its connections. The ranks that wait for it notice
this at once, close theirs and read the notes: all raise the same cause, long before the group's
timeout. Tensors on devices are sent by the group's backend for them.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from reshard.errors import ReshardError, RunError, ShardError, UsageError
from reshard.mesh import DeviceMesh
from reshard.torch.exchange.allreduce_max import (
    MAX_BY_FIRST,
    gather_near,
    reduce_far_max,
    reduce_near_max,
)
from reshard.torch.exchange.connections import Connections
from reshard.torch.exchange.one_host.device_memory import NO_DEVICES, DeviceMemory, seen_devices
from reshard.torch.exchange.one_host.direct_reads import connect_direct_reads
from reshard.torch.exchange.one_host.fd_passing import connect_shared_memory
from reshard.torch.exchange.one_host.shared_memory import MAX_NOTE_BYTES, SharedMemory
from reshard.torch.exchange.packing.copies import empty_bytes
from reshard.torch.exchange.rendezvous import Rendezvous, meet

CPU = torch.device("cpu")
# Default names of threads, whose numbers differ between ranks with equal calls.
_UNNAMED = re.compile(r"MainThread$|(Thread|Dummy|ThreadPoolExecutor)-\d+")


# Cached, since a thread compares its name in every call.
@lru_cache(maxsize=64)
def is_named_thread(name: str) -> bool:
    """Return whether the user named a thread.

    >>> is_named_thread("MainThread"), is_named_thread("Thread-3 (run)"), is_named_thread("loader")
    (False, False, True)
    """
    return _UNNAMED.match(name) is None


class RankGroup:
    """The ranks of a group, as seen from this rank. Returned by `rank_group`.

    Args:
        meeting: of all of them.
        given: their process group, or None.
        compares_threads: whether calls from threads of different names may be different calls;
            False if the creator of the group orders its calls.

    Attributes:
        ranks: their numbers, in the group's order.
        rank: the number of this rank.
        hosts: of each, in the same order.
        is_across_jobs: whether they belong to several jobs, each of which numbers its ranks from 0.
        generation: the number of groups that met at the same store before.
        is_fake: whether it has the backend `fake`, whose other ranks do not exist.
    """

    # As a carrier (`carrier`): of all messages that are not sent by shared memory.
    lends = takes_spans = False

    def __init__(
        self,
        meeting: Rendezvous,
        process_group: dist.ProcessGroup | None,
        *,
        compares_threads: bool = True,
    ) -> None:
        self._compares_threads = compares_threads
        self._meeting = meeting
        # When torch destroys a group, its cached objects are released.
        self._found_by = None if process_group is None else weakref.ref(process_group)
        self.is_fake = process_group is not None and dist.get_backend(process_group) == "fake"
        peers = meeting.peers
        self.position = meeting.position
        self.hosts = tuple(peer.host for peer in peers)
        self.generation = meeting.generation
        self.is_across_jobs = len({peer.job for peer in peers}) > 1
        is_numbered = process_group is not None and not self.is_across_jobs
        self.ranks = tuple(peer.home_rank if is_numbered else n for n, peer in enumerate(peers))
        self.rank = self.ranks[self.position]
        self._positions = {rank: position for position, rank in enumerate(self.ranks)}
        own_job = peers[self.position].job
        self._at_home = {
            peer.home_rank: rank
            for peer, rank in zip(peers, self.ranks, strict=True)
            if peer.job == own_job
        }
        self._transport: Any = meeting.connect()
        # Segments and the ranks that map them; None if no rank shares memory with this rank.
        self.shared_memory: SharedMemory | None = None
        # For messages of a few bytes between all ranks, several times faster than connections.
        self._near: SharedMemory | None = None
        # Reentrant: a thread in a sequence takes a turn for each call inside.
        self._turn = threading.RLock()
        self._is_in_turn = False
        self._has_threads = False
        # Exchanges in progress, which are dropped if a rank fails.
        self.running: weakref.WeakSet[Any] = weakref.WeakSet()
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._count = 0
        self._known_error: BaseException | None = None
        if meeting.store is not None and len(peers) > 1:
            self._share_memory(meeting.timeout.total_seconds())

    def _share_memory(self, timeout_s: float) -> None:
        with self.errors("nothing was moved"):
            sockets_by_position, is_complete = connect_shared_memory(
                self.position, len(self.ranks), timeout_s, self.all_gather
            )
            ratios = connect_direct_reads(sockets_by_position, self.position, self.all_gather)
            own = torch.frombuffer(bytearray(seen_devices()), dtype=torch.uint8)
            seen = {bytes(devices.numpy()) for devices in self.all_gather(own)}
        if sockets_by_position:
            sockets = {
                self.ranks[position]: connected
                for position, connected in sockets_by_position.items()
            }
            # Ranks can map each other's device memory only if they see the same devices.
            devices = DeviceMemory() if len(seen) == 1 and NO_DEVICES not in seen else None
            self.shared_memory = SharedMemory(sockets, timeout_s, is_complete, devices, ratios)
            # Only waits for connections check the watch for unreachable peers.
            if is_complete and self._meeting.watch is None:
                self._near = self.shared_memory

    @property
    def _given(self) -> dist.ProcessGroup | None:
        process_group = None if self._found_by is None else self._found_by()
        if process_group is None and self._found_by is not None:
            raise RunError("the process group was destroyed; make another, and prepare anew")
        return process_group

    @property
    def has_failed(self) -> bool:
        """Whether its connections are closed, since a rank failed."""
        return self._transport is None

    @property
    def slots(self) -> int:
        """The largest rank plus 1."""
        return max(self.ranks) + 1

    @property
    def is_everyone(self) -> bool:
        """Whether it is the group of all ranks of a job."""
        return self._given is not None and self._given is dist.group.WORLD

    def backend_of(self, device: torch.device) -> str:
        """Return the transport for tensors of a device: `gloo`, `nccl` or another torch backend."""
        if device.type == "cpu" or self._given is None:
            return "gloo"
        return backend_of(self._given, device)

    def is_hosted(self, device: torch.device) -> bool:
        """Return whether a device's tensors are sent through host memory, as gloo requires."""
        return device.type != "cpu" and self.backend_of(device) == "gloo"

    @property
    def numbering(self) -> tuple[object, ...]:
        """A key of the mapping from ranks of this process's job to the group."""
        return self.rank, tuple(self._at_home.items()) if self.is_across_jobs else None

    def find_rank(self, home_rank: int) -> int:
        """Return the number in this group of a rank of this process's job.

        Raises ShardError if the group spans several jobs, and does not contain that rank.
        """
        if not self.is_across_jobs:
            return home_rank
        if home_rank not in self._at_home:
            raise ShardError(
                f"rank {home_rank} of this job is not in the group, which has its ranks "
                f"{sorted(self._at_home)}; make the group of all ranks that have a part"
            )
        return self._at_home[home_rank]

    def find_offset(self, home_rank: int) -> int:
        """Return the offset from ranks of this job, from `home_rank` on, to their numbers here.

        Raises ShardError if the offsets of the ranks differ.
        """
        if not self.is_across_jobs:
            return 0
        steps = {rank - home for home, rank in self._at_home.items() if home >= home_rank}
        if len(steps) != 1:
            raise ShardError(
                f"the ranks {sorted(self._at_home)} of this job are "
                f"{sorted(self._at_home.values())} of the group, which is another distance for "
                "each; say where they begin by source_offset or target_offset, or give DTensors"
            )
        return steps.pop()

    def place(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return a mesh of this process's job over the group's numbers. Raises as `find_rank`."""
        if not self.is_across_jobs:
            return mesh
        return mesh.replace(devices=map(self.find_rank, mesh.devices))

    def next_number(self) -> int:
        """Return a number for a call of the group: the n-th is the same on all ranks."""
        self._count += 1
        return self._count

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Enter a call: calls of several threads of a process that use the group are sequential.

        Raises UsageError inside another call of the thread, such as in a transform.
        """
        with self.sequence():
            if self._is_in_turn:
                raise UsageError(
                    "this group is in the middle of a run, such as in a transform; other calls "
                    "come before or after it, or have a group of their own"
                )
            self._is_in_turn = True
            try:
                yield
            finally:
                self._is_in_turn = False

    @contextmanager
    def sequence(self) -> Iterator[None]:
        """Enter a sequence of calls: calls of other threads come before or after all of them.

        Each call still takes its own `turn`.
        """
        # Count before the turn: a thread in the middle of a run must know that another waits.
        thread = threading.current_thread()
        if thread not in self._threads:
            self._threads.add(thread)
            # Threads that have ended do not call again, so later calls need not look.
            self._has_threads |= sum(other.is_alive() for other in list(self._threads)) > 1
        with self._turn:
            yield

    def compares_thread(self, name: str) -> bool:
        """Return whether calls of a thread of this name may differ from those of others."""
        return self._compares_threads and (self._has_threads or is_named_thread(name))

    def allreduce_max(self, numbers: Sequence[int]) -> list[int]:
        """Return the maximum over ranks of each of a few 64-bit integers, as many on every rank.

        Raises RuntimeError if a rank is lost.
        """
        # Gloo's own reduction sends seven times as many messages among four ranks, from a separate
        # thread; creating tensors of so few numbers takes torch as long as a message.
        most = np.array(numbers, dtype=np.int64)
        near = self._near if most.nbytes <= MAX_NOTE_BYTES and not self.has_failed else None
        if near is not None:
            most = reduce_near_max(near, most, self.ranks, self.position)
        else:
            ends = self.position, len(self.ranks), self._find_end_s()
            most = reduce_far_max(self._connections(), most, *ends)
        values: list[int] = most.tolist()
        return values

    def broadcast(self, tensor: torch.Tensor, sender: int) -> None:
        """Broadcast a CPU tensor of rank `sender` in place."""
        connections, position = self._connections(), self._positions[sender]
        if isinstance(connections, Connections):
            connections.broadcast(tensor, position, self._find_end_s())
            return
        options = dist.BroadcastOptions()
        options.rootRank = position
        connections.broadcast([tensor], options).wait()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the CPU tensors of all ranks, of equal shapes, in the group's order."""
        connections = self._connections()
        is_small = 0 < len(self.ranks) * tensor.nbytes <= MAX_NOTE_BYTES
        if self._near is not None and is_small and len(self.ranks) <= MAX_BY_FIRST:
            own = bytes_of(tensor.view(torch.uint8))
            gathered = gather_near(self._near, own, self.ranks, self.position)
            words = tensor_of(gathered).view(tensor.dtype)
            return list(words.view(len(self.ranks), *tensor.shape))
        if isinstance(connections, Connections):
            return connections.all_gather(tensor, self._find_end_s())
        tensors = [torch.empty_like(tensor) for _ in self.ranks]
        connections.allgather([tensors], [tensor]).wait()
        return tensors

    def _find_end_s(self) -> float:
        """Return the deadline of an operation that begins now.

        Its rounds share the deadline, so that a rank that hangs does not cost a timeout in each.
        """
        return time.monotonic() + self._meeting.timeout.total_seconds()

    def send(self, data: Any, receiver: int, tag: int = 0) -> Any:
        """Begin to send a dense tensor."""
        return self._transport_of(data.device).send([data], self._positions[receiver], tag)

    def receive(self, into: Any, sender: int, tag: int = 0) -> Any:
        """Begin to receive into a dense tensor."""
        return self._transport_of(into.device).recv([into], self._positions[sender], tag)

    def takes_memory(self, address: int, row_bytes: int, receivers: int) -> bool:
        """Return False: connections send dense memory."""
        return False

    def staging_memory(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Return staging memory for messages of a device; on the host, other ranks can map it."""
        is_hosted = self.is_hosted(device)
        if self.shared_memory is None or not (is_hosted or device.type == "cpu"):
            return empty_bytes(size_bytes, device, is_hosted)
        return self.shared_memory.staging_memory(size_bytes, device)

    def swap_bytes(
        self, sent: Mapping[int, bytes], expected_bytes: Mapping[int, int]
    ) -> dict[int, bytes]:
        """Send bytes to other ranks, and return the expected number of bytes from each."""
        received = {
            rank: torch.empty(length, dtype=torch.uint8) for rank, length in expected_bytes.items()
        }
        # As in `allreduce_max`.
        works: list[Any] = []
        try:
            for rank, data in sent.items():
                works.append(self.send(tensor_of(data), rank))
            for rank, into in received.items():
                works.append(self.receive(into, rank))
            while works:
                works.pop().wait()
        finally:
            works.clear()
        return {rank: bytes_of(data) for rank, data in received.items()}

    def post_together(self, messages: Sequence[tuple[bool, torch.Tensor, int]]) -> list[Any]:
        """Begin messages `(is_sent, tensor, other rank)` at once, as NCCL needs it."""
        if all(tensor.device.type == "cpu" for _, tensor, _ in messages):
            return [
                (self.send if is_sent else self.receive)(tensor, rank)
                for is_sent, tensor, rank in messages
            ]
        # On devices the group's own collectives take messages of all pairs together.
        operations = [
            dist.P2POp(
                dist.isend if is_sent else dist.irecv,
                tensor,
                group=self._given,
                group_peer=self._positions[rank],
            )
            for is_sent, tensor, rank in messages
        ]
        return list(dist.batch_isend_irecv(operations))

    def _transport_of(self, device: torch.device) -> Any:
        return self._connections() if device.type == "cpu" else self._given

    def _connections(self) -> Any:
        transport = self._transport
        if transport is None:
            raise RunError("a rank of this group failed before")
        return transport

    @contextmanager
    def errors(self, otherwise: str) -> Iterator[None]:
        """Convert errors of torch to RunError, with the prefix `otherwise`."""
        try:
            yield
        except RuntimeError as error:
            self.lose(otherwise, error)

    def lose(self, otherwise: str, error: BaseException) -> NoReturn:
        """Raise the reason why a rank does not answer, on this rank and soon on all others."""
        # After the first sentence gloo gives debugging advice.
        line = (str(error).splitlines() or [type(error).__name__])[0].partition(". This is")[0]
        # Omit the location in gloo's sources, which does not help users, and differs between
        # builds.
        line = re.sub(r"\[/\S+:\d+\] ", "", line)
        self._close("")
        causes = self._meeting.find_causes(self.ranks)
        text = f"{causes} ({line})" if causes else f"a rank does not answer ({line})"
        raise RunError(f"{otherwise}: {text}") from error

    def break_off(self, error: BaseException) -> None:
        """Notify all ranks that this rank cannot continue, unless they have been notified."""
        cause: BaseException | None = error
        while cause is not None and cause is not self._known_error:
            cause = cause.__cause__
        if cause is None:
            # The library's errors explain themselves; the text of another may be a bare key.
            kind = "" if isinstance(error, ReshardError) else f"{type(error).__name__}: "
            self._close(f"{kind}{error}" or type(error).__name__)

    def expecting_all(self) -> AbstractContextManager[None]:
        """Stop waiting inside as soon as any rank is lost.

        For phases in which no messages of the other ranks can be in flight.
        """
        connections, watch = self._connections(), self._meeting.watch
        return nullcontext() if watch is None else connections.heeding(watch.find_lost)

    @contextmanager
    def errors_on_all(self) -> Iterator[None]:
        """Raise errors inside, such as for a lack of memory, on all ranks."""
        try:
            yield
        except BaseException as error:
            self.break_off(error)
            raise

    def raise_on_all(self, error: ReshardError, cause: BaseException | None = None) -> NoReturn:
        """Raise an error that all ranks raise; the group stays usable."""
        self.note_known(error)
        raise error from cause

    def note_known(self, error: BaseException) -> None:
        """Note an error that every rank raises by itself, so that no rank has to be notified."""
        self._known_error = error

    def _close(self, note: str) -> None:
        if self._transport is not None:
            self._meeting.leave_note(note)
            transport, self._transport = self._transport, None
            if isinstance(transport, Connections):
                transport.close()
            if self.shared_memory is not None:
                self.shared_memory.close()
            for exchange in list(self.running):
                exchange.fail()


def tensor_of(data: bytes) -> torch.Tensor:
    """Return bytes as a tensor, to send."""
    # Writable, since torch warns of tensors in memory that is not.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def bytes_of(data: torch.Tensor) -> bytes:
    """Return the bytes of a tensor of `tensor_of`."""
    return bytes(data.numpy())


_LOCK = threading.Lock()
# Weak: the ranks of a group that torch destroyed are forgotten with it.
_MET: weakref.WeakKeyDictionary[dist.ProcessGroup, RankGroup] = weakref.WeakKeyDictionary()
_MEETS: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


def rank_group(group: dist.ProcessGroup | RankGroup | None) -> RankGroup:
    """Return the ranks of a torch process group; of all ranks when None.

    The first time, and after a rank has failed, all ranks of the group must call this.

    Raises:
        UsageError: a rank outside the group, or no process groups at all.
        RunError: a rank that does not arrive.
    """
    if isinstance(group, RankGroup):
        return group
    check_member(group)
    process_group = group or dist.group.WORLD
    met = _MET.get(process_group)
    if met is not None and not met.has_failed:
        return met
    with _LOCK:
        # A lock for each group, since meeting waits for other ranks, perhaps for the ranks of
        # another group.
        turn = _MEETS.setdefault(process_group, threading.Lock())
    # If several threads call this first, a single thread meets the other ranks.
    with turn:
        met = _MET.get(process_group)
        if met is None or met.has_failed:
            met = _MET[process_group] = RankGroup(meet(process_group), process_group)
    return met


def check_member(group: dist.ProcessGroup | None) -> None:
    """Raise UsageError if this process is not in the group, or there are no process groups."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "no process group: torch.distributed is not initialised. Start the ranks with "
            "torchrun, and call torch.distributed.init_process_group in each"
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError(
            f"rank {dist.get_rank()} is not in the group; only the group's ranks call this"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"group={group!r}; give a torch process group, or None for all ranks")


def real_group(group: dist.ProcessGroup | RankGroup | None) -> RankGroup:
    """Return the ranks of a group, as `rank_group` does, between which tensors can be moved.

    Raises UsageError for fake groups too, and inside modes in which tensors have no memory.
    """
    for mode in _get_current_dispatch_mode_stack():
        name = type(mode).__name__
        if name in ("FakeTensorMode", "LocalTensorMode", "FunctionalTensorMode"):
            raise UsageError(
                f"inside {name} tensors have no elements of their own, so nothing can be moved; "
                "leave the mode, or plan without elements: reshard.plan, reshard.spmd.trace"
            )
    result = rank_group(group)
    if result.is_fake:
        raise UsageError(
            "a group of the backend 'fake' has no other ranks, so nothing can be moved; use a real "
            "backend such as gloo, or plan without ranks: reshard.plan, reshard.spmd.trace"
        )
    return result


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return a process group's backend for tensors of a device, such as `gloo`.

    Groups may have several, such as `cpu:gloo,cuda:nccl`, also by default. Raises UsageError if it
    has none for the device.
    """
    try:
        backend = group._get_backend(torch.device(device.type))
    except RuntimeError as error:
        types = sorted(device_type.type for device_type in group._device_types)
        raise UsageError(
            f"the group has no backend for tensors on {device.type}, but for {', '.join(types)}; "
            "make it with backend='cpu:gloo,cuda:nccl', or with none named"
        ) from error
    return str(backend.name()).lower()
