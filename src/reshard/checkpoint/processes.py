"""Cooperation of several processes on one conversion.

The processes are started by `torchrun`, or by a launcher that sets the same variables (RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and communicate through `torch.distributed` (gloo). They
exchange little: the decisions of process 0, the results of each process, and heartbeats.

1. `share` sends a value of process 0 to all processes; `collect` sends the values of all processes
   to all.
2. A process that fails calls `fail`; the other processes raise its error at their next `check`.
3. A killed process sends no error. Processes on the same host detect that it has ended; processes
   on other hosts detect that its heartbeat does not change, and stop after `timeout_s`.
4. At first each process waits at most `wait_s` for all others, since processes start slowly on
   clusters. After 10 s it reports which processes are missing.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any, Protocol, TypeVar

from reshard._records import Record
from reshard.errors import MissingExtraError, RunError, UsageError
from reshard.log import WaitNotice
from reshard.system import find_process_start, name_process_space
from reshard.text import ranks_text

Value = TypeVar("Value")

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_WAIT_S = 300.0
_BEAT_S = 0.5
_WAIT_S = 0.02
# The number of times that this process has joined the others in an existing group.
_JOINED = itertools.count()


class OtherProcessError(RunError):
    """Another process stopped; `is_final` if the same command would fail again."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class Processes(Protocol):
    """The processes of a run, and the calls by which a process communicates with the others."""

    rank: int
    size: int

    def share(self, value: Any) -> Any:
        """Return the value of process 0, on every process."""

    def collect(self, value: Value) -> list[Value]:
        """Return the values of all processes, on every process."""

    def check(self) -> None:
        """Check the other processes. Raises RunError if a process has failed or ended."""

    def fail(self, message: str, *, is_final: bool = False) -> None:
        """Report to the others that this process stops; `is_final` if it would fail again."""


class OneProcess:
    """A run of a single process."""

    rank = 0
    size = 1

    def share(self, value: Any) -> Any:
        return value

    def collect(self, value: Value) -> list[Value]:
        return [value]

    def check(self) -> None:
        return

    def fail(self, message: str, *, is_final: bool = False) -> None:
        return


class HostProcesses:
    """The processes of a run that are on this process's host; `host` is its number, from 0.

    All hosts call the same methods in the same order, since each call is collective.

    Args:
        everybody: the processes of the run.
        hosts: the name of each process's host.

    >>> alone = HostProcesses(OneProcess(), ["a"])
    >>> alone.host, alone.hosts, alone.share("x")
    (0, 1, 'x')
    """

    def __init__(self, everybody: Processes, hosts: Sequence[str]) -> None:
        self._everybody = everybody
        names = list(dict.fromkeys(hosts))
        own = hosts[everybody.rank]
        self.host, self.hosts = names.index(own), len(names)
        self.host_of = [names.index(name) for name in hosts]
        self._members = [rank for rank, name in enumerate(hosts) if name == own]
        self.rank, self.size = self._members.index(everybody.rank), len(self._members)

    def share(self, value: Any) -> Any:
        """Return the value of this host's process 0, on every process of the host."""
        return self._everybody.collect(value)[self._members[0]]

    def collect(self, value: Value) -> list[Value]:
        """Return the values of this host's processes, on every process of the host."""
        values = self._everybody.collect(value)
        return [values[rank] for rank in self._members]

    def check(self) -> None:
        """Check the processes of all hosts. Raises RunError if any has failed or ended."""
        self._everybody.check()

    def fail(self, message: str, *, is_final: bool = False) -> None:
        """Report to the processes of all hosts that this process stops, and why."""
        self._everybody.fail(message, is_final=is_final)


class GlooProcesses:
    """The processes of a job, through `torch.distributed` with gloo.

    A thread sends this process's heartbeat. Before a collective call, each process waits until all
    have reached it, and checks the others meanwhile. An ended process is therefore detected even if
    the network does not report it.
    """

    def __init__(
        self,
        distributed: Any,
        group: Any,
        store: Any,
        timeout_s: float,
        marks: Mapping[int, ProcessMark],
    ) -> None:
        self._distributed = distributed
        self._group = group
        self._store = store
        self._timeout_s = timeout_s
        self._marks = marks
        self.rank: int = distributed.get_rank(group)
        self.size: int = distributed.get_world_size(group)
        self._meetings = 0
        self._last_look_s = 0.0
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._stop = threading.Event()
        # A daemon, so that a process that ends without `close` does not wait for it.
        self._beating = threading.Thread(target=self._beat, name="reshard-alive", daemon=True)
        self._beating.start()

    def _beat(self) -> None:
        beats = 0
        while not self._stop.wait(_BEAT_S):
            beats += 1
            try:
                self._store.set(f"alive/{self.rank}", str(beats))
            except RuntimeError:
                # The process of the store has ended: the next call to the store raises an error.
                return

    def close(self) -> None:
        """Stop the heartbeat."""
        self._stop.set()
        self._beating.join()

    def share(self, value: Any) -> Any:
        box = [value]
        with self._explain_errors():
            self._meet()
            self._distributed.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def collect(self, value: Value) -> list[Value]:
        values: list[Any] = [None] * self.size
        with self._explain_errors():
            self._meet()
            self._distributed.all_gather_object(values, value, group=self._group)
        return values

    def _meet(self) -> None:
        """Wait until every process has called this."""
        # torch's collective calls do not detect an ended process, so no process enters such a call
        # before all have reached it.
        self._meetings += 1
        self._store.set(f"meeting/{self._meetings}/{self.rank}", "")
        everybody = [f"meeting/{self._meetings}/{rank}" for rank in range(self.size)]
        while not self._store.check(everybody):
            self.check()
            time.sleep(_WAIT_S)

    def check(self) -> None:
        now_s = time.monotonic()
        if now_s - self._last_look_s < _BEAT_S:
            return
        self._last_look_s = now_s
        with self._explain_errors():
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        gone = [rank for rank, mark in self._marks.items() if mark.is_gone]
        if gone:
            raise RunError(f"process {gone[0]} has ended; run the same command again, it continues")
        if self._store.check(["failed"]):
            message, is_final = json.loads(self._store.get("failed"))
            raise OtherProcessError(f"another process stopped: {message}", is_final)
        for other in range(self.size):
            key = f"alive/{other}"
            # `get` would wait for a missing key.
            beat = self._store.get(key) if self._store.check([key]) else b""
            if other not in self._heard or beat != self._heard[other][0]:
                self._heard[other] = (beat, now_s)
            elif now_s - self._heard[other][1] > self._timeout_s:
                raise RunError(
                    f"process {other} has given no sign of life for {self._timeout_s:g} s; it was "
                    "killed or hangs. Run the same command again, it continues"
                )

    def fail(self, message: str, *, is_final: bool = False) -> None:
        # Without the store's process, the others find out by themselves.
        with contextlib.suppress(RuntimeError):
            self._store.set("failed", json.dumps([f"process {self.rank}: {message}", is_final]))

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RunError(
                f"process {self.rank} cannot reach the others: {str(error).splitlines()[0]}. One "
                "of them ended; run the same command again, it continues"
            ) from error


class ProcessMark(Record):
    """A process as others on its host identify it: its host, its number and its start.

    >>> ProcessMark.of_this_process().is_gone
    False
    """

    place: str
    number: int
    start: str

    @classmethod
    def of_this_process(cls) -> ProcessMark:
        """Return the mark of the calling process."""
        return cls(name_process_space(), os.getpid(), find_process_start(os.getpid()))

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; False if this host cannot determine it."""
        return (
            self.place == name_process_space() != ""
            and find_process_start(self.number) != self.start != ""
        )


def _meet_first(store: Any, rank: int, size: int, wait_s: float) -> dict[int, ProcessMark]:
    """Wait until all processes have joined, and return the marks of the others.

    Raises RunError if a process does not join in time, or ends after it has joined.
    """
    mark = ProcessMark.of_this_process()
    store.set(f"come/{rank}", json.dumps(astuple(mark)))
    missing = [other for other in range(size) if other != rank]
    marks: dict[int, ProcessMark] = {}
    notice = WaitNotice(lambda: f"{ranks_text(missing)} of {size}, which have not come")
    begun_s = time.monotonic()
    while missing:
        for other in [other for other in missing if store.check([f"come/{other}"])]:
            marks[other] = ProcessMark(*json.loads(store.get(f"come/{other}")))
            missing.remove(other)
        gone = [other for other, mark in marks.items() if mark.is_gone]
        if gone and missing:
            raise RunError(f"{ranks_text(gone)} ended before the others came; start all again")
        if missing and time.monotonic() - begun_s > wait_s:
            raise RunError(
                f"{ranks_text(missing)} of {size} did not come within {wait_s:g} s; see whether "
                "they were started and with which MASTER_ADDR and MASTER_PORT, or give them longer "
                "with --wait-for-ranks"
            )
        notice.check()
        if missing:
            time.sleep(_WAIT_S)
    return marks


def _open_store(distributed: Any, rank: int, wait_s: float) -> Any:
    """Return the store that `torchrun` serves, or else process 0 serves. Raises RunError."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = rank == 0 and not is_agents
    if not is_server:
        _wait_for_server(host, port, wait_s)
    timeout = datetime.timedelta(seconds=wait_s)
    # `_meet_first` waits for the others, and reports which are missing.
    store = distributed.TCPStore(
        host, port, None, is_server, timeout, wait_for_workers=False, multi_tenant=True
    )
    # The agent's store outlives a restart of the processes, with the keys of the earlier attempt.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"reshard/{attempt}", store)


def _wait_for_server(host: str, port: int, wait_s: float) -> None:
    """Wait until a server listens at an address; torch would log every try. Raises RunError."""
    import socket

    notice = WaitNotice(lambda: f"rank 0, which does not listen at {host}:{port}")
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            socket.create_connection((host, port), timeout=wait_s).close()
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise RunError(
                    f"rank 0 did not come within {wait_s:g} s: {host}:{port}: "
                    f"{error.strerror or error}; see whether it was started, or give it longer "
                    "with --wait-for-ranks"
                ) from error
        notice.check()
        time.sleep(_BEAT_S)


@contextmanager
def running_processes(
    timeout_s: float = DEFAULT_TIMEOUT_S, wait_s: float = DEFAULT_WAIT_S
) -> Iterator[Processes]:
    """Connect this process to those started with it; without WORLD_SIZE, it runs alone.

    An existing process group is used; otherwise a group is created, and destroyed on exit.

    Args:
        timeout_s: the time without a heartbeat after which a process counts as ended.
        wait_s: the time to wait for all processes to join.

    Raises:
        UsageError: variables that contradict each other; invalid times.
        MissingExtraError: several processes, and torch is not installed.
        RunError: the other processes do not join, or cannot be reached.
    """
    # 1. Read the number of processes from the variables that torchrun sets.
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdecimal() or int(size) < 1:
        raise UsageError(f"WORLD_SIZE is {size!r}; expected the number of processes")
    if int(size) == 1:
        yield OneProcess()
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UsageError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set; start the processes with "
            "torchrun, or set its variables"
        )
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise MissingExtraError(
            f"{size} processes talk through torch.distributed; pip install torch, or run one"
        ) from error
    # 2. Wait for all other processes here, since torch would wait without reporting progress.
    rank, own = int(os.environ["RANK"]), not distributed.is_initialized()
    longest = datetime.timedelta(seconds=max(wait_s, timeout_s))
    try:
        if own:
            store = _open_store(distributed, rank, wait_s)
            marks = _meet_first(store, rank, int(size), wait_s)
            distributed.init_process_group(
                "gloo", store=store, rank=rank, world_size=int(size), timeout=longest
            )
        else:
            rank = distributed.get_rank()
            world = distributed.distributed_c10d._get_default_store()
            store = distributed.PrefixStore(f"reshard/{next(_JOINED)}", world)
            marks = _meet_first(store, rank, distributed.get_world_size(), wait_s)
        # A separate gloo group, since the job's default group may use another backend.
        group = distributed.new_group(backend="gloo", timeout=longest)
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"cannot reach the other {int(size) - 1} processes: {str(error).splitlines()[0]}"
        ) from error
    # 3. Send heartbeats for as long as the caller works.
    processes = GlooProcesses(distributed, group, store, timeout_s, marks)
    try:
        yield processes
    finally:
        processes.close()
        if own:
            distributed.destroy_process_group()
