"""Cooperation of several processes on one conversion.

They are started by `torchrun`, or by anything that sets its variables (RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT), and communicate through `torch.distributed` (gloo). They exchange
little: what process 0 decided, what each has done at the end, and at intervals a sign of life.

1. `share` hands a value of process 0 to all; `collect` hands everybody's to all.
2. An error in one process reaches the others: at once through `fail`, which they notice at
   their next `check`.
3. A process that was killed sends nothing. The others notice that its sign of life does not
   change, and stop after `timeout_s`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from reshard.errors import MissingExtraError, RunError, UsageError

Value = TypeVar("Value")

DEFAULT_TIMEOUT_S = 60.0
# Nothing waits so long: a process that is gone is noticed by its sign of life.
_LONGEST_TALK = datetime.timedelta(days=1)
_BEAT_S = 0.5
_WAIT_S = 0.02


class Processes(Protocol):
    """The processes of one run, seen from one of them."""

    rank: int
    size: int

    def share(self, value: Any) -> Any:
        """The value of process 0, on every process."""

    def collect(self, value: Value) -> list[Value]:
        """The values of all processes, on every process."""

    def check(self) -> None:
        """Say that this process is alive. Raises RunError when another failed or is gone."""

    def fail(self, message: str) -> None:
        """Tell the others that this process stops, and why."""


class OneProcess:
    """A run of one process."""

    rank = 0
    size = 1

    def share(self, value: Any) -> Any:
        return value

    def collect(self, value: Value) -> list[Value]:
        return [value]

    def check(self) -> None:
        return

    def fail(self, message: str) -> None:
        return


class HostProcesses:
    """The processes of this one's host, among all of a run; `host` is its number, from 0.

    All hosts call the same methods in the same order, since each call is one of all processes.

    Args:
        everybody: the processes of the run.
        hosts: the name of the host of each.

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
        """The value of this host's process 0, on every process of the host."""
        return self._everybody.collect(value)[self._members[0]]

    def collect(self, value: Value) -> list[Value]:
        """The values of this host's processes, on every process of the host."""
        found = self._everybody.collect(value)
        return [found[rank] for rank in self._members]

    def check(self) -> None:
        """Say that this process is alive. Raises RunError when another failed or is gone."""
        self._everybody.check()

    def fail(self, message: str) -> None:
        """Tell the others, of all hosts, that this process stops, and why."""
        self._everybody.fail(message)


class GlooProcesses:
    """The processes of a job, through `torch.distributed` with gloo.

    A thread gives this process's sign of life. Before processes talk, each waits until all
    have come to that point, looking after the others meanwhile; so a process that is gone is
    noticed whatever the network does.
    """

    def __init__(self, distributed: Any, group: Any, store: Any, timeout_s: float) -> None:
        self._distributed = distributed
        self._group = group
        self._store = store
        self._timeout_s = timeout_s
        self.rank: int = distributed.get_rank(group)
        self.size: int = distributed.get_world_size(group)
        self._meetings = 0
        self._last_look_s = 0.0
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._stop = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="reshard-alive", daemon=True)
        self._beating.start()

    def _beat(self) -> None:
        beats = 0
        while not self._stop.wait(_BEAT_S):
            beats += 1
            try:
                self._store.set(f"alive/{self.rank}", str(beats))
            except RuntimeError:
                # The store's process is gone: the next call to it raises.
                return

    def close(self) -> None:
        """End the sign of life."""
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
        """Wait until every process has come here."""
        # torch's own calls do not notice a process that is gone, so nobody enters one before all
        # are here.
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
        if self._store.check(["failed"]):
            raise RunError(f"another process stopped: {self._store.get('failed').decode()}")
        for other in range(self.size):
            key = f"alive/{other}"
            # To get a key that is not there waits for it.
            beat = self._store.get(key) if self._store.check([key]) else b""
            if other not in self._heard or beat != self._heard[other][0]:
                self._heard[other] = (beat, now_s)
            elif now_s - self._heard[other][1] > self._timeout_s:
                raise RunError(
                    f"process {other} has given no sign of life for {self._timeout_s:g} s; it was "
                    "killed or hangs. Run the same command again, it continues"
                )

    def fail(self, message: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set("failed", f"process {self.rank}: {message}")

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RunError(
                f"process {self.rank} cannot reach the others: {str(error).splitlines()[0]}. One "
                "of them ended; run the same command again, it continues"
            ) from error


@contextmanager
def running_processes(timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[Processes]:
    """The processes that this one was started with: one, unless WORLD_SIZE says otherwise.

    A process group that exists already is used; otherwise one is made, and taken down after.

    Raises:
        UsageError: variables that contradict each other.
        MissingExtraError: several processes, and torch is not installed.
        RunError: the other processes cannot be reached.
    """
    # 1. How many processes there are, by the variables that torchrun sets.
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdigit() or int(size) < 1:
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
    # 2. A gloo group of our own, also in a job whose own group is of another backend.
    own = not distributed.is_initialized()
    try:
        if own:
            distributed.init_process_group("gloo", timeout=_LONGEST_TALK)
        group = distributed.new_group(backend="gloo", timeout=_LONGEST_TALK)
        store = distributed.PrefixStore(
            "reshard", distributed.distributed_c10d._get_default_store()
        )
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"cannot reach the other {int(size) - 1} processes: {str(error).splitlines()[0]}"
        ) from error
    # 3. The sign of life, for as long as the caller works.
    processes = GlooProcesses(distributed, group, store, timeout_s)
    try:
        yield processes
    finally:
        processes.close()
        if own:
            distributed.destroy_process_group()
