"""Rendezvous of ranks at a store: information on each peer, and notes of those that fail.

A store is the torch store that creates process groups. Each meeting has its own keys::

    generation                a meeting before which none is joined
    0/peer/2                  rank 2 of meeting 0: its job, its rank there, its host and process
    0/failed                  set once any rank of meeting 0 has failed
    0/note/2                  why rank 2 failed; empty if it only lost others

1. Every rank joins the first meeting that has not failed and that it has not joined before, so that
   ranks meet again even if some called more often than others. It stores its peer information, and
   waits for that of all others. Meanwhile it checks the process group's connections, which gloo
   closes if a process has ended. It runs none of the group's collectives: if another rank does not
   arrive, they would be matched with those of the user's program.
2. Ranks of a job share its name, which the first of them sets at the job's own store.
3. When connections break, ranks leave notes. A rank without a note after a second has ended, or
   hangs.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import ReshardError, RunError
from reshard.system import has_ended
from reshard.text import first_text
from reshard.torch.exchange.connections import Connections

# The interval between looks for notes, and how long to wait for them.
_LOOK_S, _NOTES_S = 0.05, 1.0
# The shortest interval between checks of a process group's connections.
_PROBE_S = 0.2
_PREFIX, _GENERATION = "reshard", "generation"
_PATIENCE, _CONNECT = datetime.timedelta(minutes=30), datetime.timedelta(minutes=1)
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Watch:
    """Conditions that end the waiting of a rendezvous early.

    Attributes:
        find_lost: returns why some rank will not arrive, or not continue; empty if unknown.
        find_silent: the same, including ranks that have no message in flight to this rank.
        is_cut_off: whether the store seems to be unreachable too: a failing rank then leaves no
            note, since the system would try to send it until another timeout.
        connect_s: the maximum seconds until all present ranks are connected.
        opening: entered while connections are opened.
    """

    find_lost: Callable[[], str]
    find_silent: Callable[[], str]
    is_cut_off: Callable[[], bool]
    connect_s: float

    opening: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A rank's information for its peers. `job` is a name that all ranks of the job share."""

    job: str
    home_rank: int
    host: str
    process: int


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A completed rendezvous, seen from the rank at `position`.

    `peers` are in the group's order. `store` is None if the group has none: then the group
    itself connects its ranks, and no notes are left. `address` is that of this rank for its peers;
    by its host's name if empty. `watch` ends the connecting early.
    """

    peers: tuple[PeerInfo, ...]
    position: int
    generation: int
    timeout: datetime.timedelta
    store: Any = None
    group: dist.ProcessGroup | None = None
    address: str = ""
    watch: Watch | None = None

    def connect(self) -> Any:
        """Return connections between all ranks, for CPU tensors."""
        if self.store is None:
            return self.group
        own = dist.PrefixStore(f"{self.generation}/gloo", self.store)
        options = dist.ProcessGroupGloo._Options()
        # All ranks have arrived: a rank that does not answer at once cannot be reached.
        limit = datetime.timedelta(seconds=self.watch.connect_s) if self.watch else _CONNECT
        options._timeout = min(self.timeout, limit)
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
        if self.address:
            device = dist.ProcessGroupGloo.create_device(hostname=self.address)
        elif interfaces:
            # As in torch's own gloo, if a host's name resolves to another address.
            device = dist.ProcessGroupGloo.create_device(interface=interfaces.split(",")[0])
        else:
            device = dist.ProcessGroupGloo.create_default_device()
        options._devices = [device]
        try:
            connections = self._connect_watched(own, options)
        except BaseException as error:
            self.leave_note("" if isinstance(error, RuntimeError) else str(error))
            if isinstance(error, RuntimeError):
                raise RunError(f"nothing was moved: ranks cannot connect ({error})") from error
            raise
        # The shorter timeout was for connecting; messages have that of the group.
        connections._set_default_timeout(self.timeout)
        return (
            Connections(connections, self.watch.find_silent)
            if self.watch
            else Connections(connections)
        )

    def _connect_watched(self, store: Any, options: Any) -> Any:
        """Return gloo's connections. Raises RuntimeError if they fail, or a rank is lost."""
        connected: list[Any] = []
        error: list[BaseException] = []
        watch = self.watch
        if watch is None:
            return dist.ProcessGroupGloo(store, self.position, len(self.peers), options)

        def begin() -> None:
            try:
                with watch.opening():
                    connected.append(
                        dist.ProcessGroupGloo(store, self.position, len(self.peers), options)
                    )
            except BaseException as raised:
                error.append(raised)

        # Gloo waits until its timeout for a rank that has ended; the thread is abandoned then.
        thread = threading.Thread(target=begin, name="reshard connect", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_S)
            if thread.is_alive() and (why := watch.find_lost() or self._find_note()):
                raise RuntimeError(why)
        if error:
            raise error[0]
        return connected[0]

    def _find_note(self) -> str:
        try:
            if _has_notes(self.store, self.generation, len(self.peers)):
                return self.find_causes(range(len(self.peers)))
        except RuntimeError as error:
            return f"the store does not answer: {error}"
        return ""

    def leave_note(self, note: str) -> None:
        """Leave a note with the reason why this rank fails; empty if it only lost others."""
        if self.store is not None and not (self.watch and self.watch.is_cut_off()):
            leave_note(self.store, self.generation, self.position, note)

    def find_causes(self, ranks: Sequence[int]) -> str:
        """Return which of `ranks`, in the group's order, failed and why; empty if unknown."""
        if self.store is None or (self.watch and self.watch.is_cut_off()):
            return ""
        peers = dict(enumerate(self.peers))
        return _find_causes(self.store, self.generation, self.position, ranks, peers, self.watch)


def meet(group: dist.ProcessGroup) -> Rendezvous:
    """Meet the other ranks of a process group, all of which call this.

    Raises RunError if a rank does not come within the group's timeout, or its process has ended.
    """
    position, timeout = group.rank(), timeout_of(group) or _PATIENCE
    store = _find_store(group)
    if store is None:
        numbers = dist.get_process_group_ranks(group)
        peers = tuple(PeerInfo("", number, "", 0) for number in numbers)
        return Rendezvous(peers, position, 0, timeout, group=group)
    try:
        generation = _find_generation(store, position)
    except RuntimeError as error:
        raise _describe_loss(error) from error
    return meet_at(store, position, group.size(), timeout, generation, _loss_finder(group))


def _find_generation(store: Any, position: int) -> int:
    """Return the first meeting that has not failed, and that this rank has not joined."""
    generation = int(store.get(_GENERATION)) if store.check([_GENERATION]) else 0
    while store.check([peer_key(generation, position)]) or store.check([_failed_key(generation)]):
        generation += 1
    store.set(_GENERATION, str(generation))
    return generation


def _loss_finder(group: dist.ProcessGroup) -> Callable[[], str]:
    """Return a function that returns which ranks of a group have ended; empty if unknown."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return str
    if not isinstance(backend, dist.ProcessGroupGloo):
        return str
    connections, others = Connections(backend), [*range(group.size())]
    others.remove(group.rank())
    begun_s = time.monotonic()
    next_s = begun_s + _PROBE_S

    def find_loss() -> str:
        nonlocal next_s
        now_s = time.monotonic()
        if now_s < next_s:
            return ""
        # Each check leaks a few hundred bytes in gloo, so the interval grows with the time waited.
        next_s = now_s + max(_PROBE_S, (now_s - begun_s) / 8)
        closed = [rank for rank in others if connections.is_closed(rank)]
        return f"the connections to {first_text(closed, _SHOWN)} are closed" if closed else ""

    return find_loss


def meet_at(
    store: Any,
    position: int,
    ranks: int,
    timeout: datetime.timedelta,
    generation: int = 0,
    find_loss: Callable[[], str] = str,
    *,
    job: str | None = None,
    home_rank: int = 0,
    address: str = "",
    watch: Watch | None = None,
) -> Rendezvous:
    """Meet at a store: all ranks call this with equal generations. Raises as `meet` does.

    Args:
        find_loss: returns why a rank will not arrive; empty if unknown.
        job, home_rank: a name that all ranks of this process's job share, and its rank there, if
            torch does not know them.
        address: by which other ranks reach this rank.
        watch: ends the waiting early.
    """
    if job is None or dist.is_initialized():
        home_rank = _find_home_rank()
    own = PeerInfo(job or _name_job(), home_rank, socket.gethostname(), os.getpid())
    peers: dict[int, PeerInfo] = {position: own}
    keys = {number: peer_key(generation, number) for number in range(ranks)}
    begun_s, limit_s = time.monotonic(), timeout.total_seconds()
    try:
        store.set(keys[position], json.dumps(asdict(own)))
        while len(peers) < ranks:
            here = [n for n, key in keys.items() if n not in peers and store.check([key])]
            peers |= {number: PeerInfo(**json.loads(store.get(keys[number]))) for number in here}
            waited_s = time.monotonic() - begun_s
            lost = find_loss() or (watch.find_lost() if watch else "")
            if not here and (lost or _has_notes(store, generation, ranks) or waited_s > limit_s):
                # An empty note: this rank only lost others, and is not the cause.
                leave_note(store, generation, position, "")
                causes = _find_causes(store, generation, position, range(ranks), peers, watch)
                raise RunError(f"nothing was moved: {causes or lost}")
            # The interval grows with the time waited.
            time.sleep(min(waited_s / 8, _LOOK_S))
    except BaseException as error:
        # Leave a note, so that the others do not wait for this rank.
        leave_note(store, generation, position, "" if isinstance(error, RunError) else str(error))
        if isinstance(error, RuntimeError | ValueError | TypeError):
            raise _describe_loss(error) from error
        raise
    peers_of = tuple(peers[number] for number in range(ranks))
    return Rendezvous(peers_of, position, generation, timeout, store, None, address, watch)


def peer_key(generation: int, position: int) -> str:
    """Return the key of a rank's peer information, at the store of a meeting."""
    return f"{generation}/peer/{position}"


def _failed_key(generation: int) -> str:
    return f"{generation}/failed"


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Return the timeout of a process group, or None if unknown."""
    # Among several backends, the timeout of the CPU's is used.
    for device in sorted(group._device_types, key=lambda device: device.type != "cpu"):
        try:
            timeout = group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):
            continue
        if isinstance(timeout, datetime.timedelta):
            return timeout
    return None


def _find_store(group: dist.ProcessGroup) -> Any:
    """Return a process group's store, or None if it has none or is fake."""
    try:
        store = group.get_group_store()
        store.check([_PREFIX])
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    return dist.PrefixStore(_PREFIX, store)


def _name_job() -> str:
    """Return a unique name that all ranks of this process's job share."""
    own = uuid.uuid4().hex
    if not dist.is_initialized():
        return own
    try:
        # The first rank that arrives sets the name.
        name = dist.distributed_c10d._get_default_store().compare_set(f"{_PREFIX}/job", "", own)
    except (RuntimeError, NotImplementedError):
        return own
    return str(name.decode())


def _find_home_rank() -> int:
    return int(dist.get_rank()) if dist.is_initialized() else 0


def leave_note(store: Any, generation: int, position: int, note: str) -> None:
    """Leave the reason why a rank fails at the store, for the ranks that wait for it."""
    # If the store is gone with its rank, others notice that too.
    with contextlib.suppress(RuntimeError, ReshardError):
        # First, so that no rank joins a meeting in which others already read notes.
        store.set(_failed_key(generation), "")
        store.set(f"{generation}/note/{position}", json.dumps(note))


def _has_notes(store: Any, generation: int, ranks: int) -> bool:
    return any(store.check([f"{generation}/note/{number}"]) for number in range(ranks))


def _find_causes(
    store: Any,
    generation: int,
    position: int,
    ranks: Sequence[int],
    peers: Mapping[int, PeerInfo],
    watch: Watch | None,
) -> str:
    """Wait a while for notes. Return which ranks failed and why."""
    notes: dict[int, str] = {position: ""}
    deadline_s = time.monotonic() + _NOTES_S
    silent: Sequence[int] = ()
    try:
        while True:
            silent = [n for n in range(len(ranks)) if n not in notes]
            for number in silent:
                if store.check([key := f"{generation}/note/{number}"]):
                    notes[number] = str(json.loads(store.get(key)))
            if any(notes.values()) or not silent or time.monotonic() > deadline_s:
                break
            # A note from an unreachable host does not arrive.
            if watch is not None and watch.find_silent():
                break
            time.sleep(_LOOK_S)
        # A rank that is only late leaves no note either.
        silent = [n for n in silent if n in peers and _has_ended(peers[n])] or silent
    except RuntimeError:
        # The store ended with its process.
        silent = [n for n, peer in peers.items() if _has_ended(peer)]
    causes = [f"{_describe(n, ranks, peers)}: {note}" for n, note in sorted(notes.items()) if note]
    if causes:
        return "; ".join(causes)
    names = first_text([_describe(number, ranks, peers) for number in silent], _SHOWN)
    return f"{names} does not answer, or its process has ended" if silent else ""


def _describe(number: int, ranks: Sequence[int], peers: Mapping[int, PeerInfo]) -> str:
    peer = peers.get(number)
    where = "" if peer is None else f" ({name_process(peer.host, peer.process)})"
    return f"rank {ranks[number]}{where}"


def name_process(host: str, process: int) -> str:
    """Return a process's name for errors.

    >>> name_process("gpu-3", 4711)
    'host gpu-3, process 4711'
    """
    return f"host {host}, process {process}"


def _has_ended(peer: PeerInfo) -> bool:
    """Return whether a process of this host has ended; False if unknown."""
    if peer.host != socket.gethostname():
        return False
    return has_ended(peer.process)


def _describe_loss(error: Exception) -> RunError:
    return RunError(f"nothing was moved: a rank does not answer (the group's store: {error})")
