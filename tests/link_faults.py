"""Faults of links: at which points processes fail, in which way, and what must hold then.

A case is one job of the processes of `link_ends`: a trainer of two, engine a of two, and engine b.
One of them fails at a point of a stage: it is killed, raises, stalls, runs out of memory, or its
host loses its link. All others have to raise an error of ours within a time, or go on, and say the
truth of what they have; then they link with each other anew.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROCESSES = 5
STAGES = ("connect", "prepare", "run", "verify", "leave")
WAYS = ("killed", "raises", "stalls", "memory", "cut", "slow")
# Where processes may not know of each other yet, they wait for as long as they are told to.
EARLY_S, PATIENT_S, STALLED_S = 6.0, 60.0, 8.0
# Packets wait for up to seconds: netem, which would delay each alike, is not in every kernel.
_SLOW = ("tbf", "rate", "200kbit", "burst", "2000", "latency", "5000ms")


@dataclass(frozen=True)
class Point:
    """A call in a stage, before or after which a process fails.

    `calls` is how often it is made in the stage at least, of which a case chooses one. `is_early`
    where the others cannot know yet that the process is there. `thread` is the one whose calls
    count; all where empty. `needs_hosts` where it is only reached by jobs on hosts of their own.
    """

    stage: str
    path: str
    is_after: bool = False
    calls: int = 1
    is_early: bool = False
    sides: tuple[str, ...] = ("trainer", "engine")
    thread: str = ""
    needs_hosts: bool = False


_LINKS = "reshard.torch.links"
_LINK = f"{_LINKS}.link"
_EXCHANGE = "reshard.torch.exchange"
POINTS: Mapping[str, Point] = {
    "before the store": Point("connect", f"{_LINK}:LinkAddress.open_store", is_early=True),
    "before it is announced": Point("connect", f"{_LINKS}.handshake:announce", is_early=True),
    "before its card": Point("connect", f"{_LINKS}.membership:meet_at", is_early=True),
    "after its card": Point("connect", f"{_EXCHANGE}.rendezvous:Rendezvous.connect"),
    "in gloo's connect": Point(
        "connect", "reshard.torch.links.sealed_store:SealedStore.set", thread="reshard connect"
    ),
    "after gloo's connect": Point(
        "connect", f"{_EXCHANGE}.rendezvous:Rendezvous.connect", is_after=True
    ),
    "at another's door": Point("connect", f"{_EXCHANGE}.groups:connect_shared_memory"),
    "before its proof": Point("connect", f"{_LINKS}.handshake:prove_secret"),
    "after its proof": Point("connect", f"{_LINKS}.handshake:prove_secret", is_after=True),
    "before it prepares": Point("prepare", f"{_LINK}:Refit.prepare"),
    "while it prepares": Point("prepare", f"{_EXCHANGE}.groups:RankGroup.all_gather", calls=3),
    "when it is prepared": Point("prepare", f"{_LINK}:Refit.prepare", is_after=True),
    # The first run belongs to the stage, in which engines connect with each other.
    "before an engine's card for another": Point(
        "prepare", f"{_LINKS}.membership:meet_at", sides=("engine",), needs_hosts=True
    ),
    "in an engine's connect with another": Point(
        "prepare",
        "reshard.torch.links.sealed_store:SealedStore.set",
        sides=("engine",),
        thread="reshard connect",
        needs_hosts=True,
    ),
    "after an engine's connect with another": Point(
        "prepare",
        f"{_EXCHANGE}.rendezvous:Rendezvous.connect",
        is_after=True,
        sides=("engine",),
        needs_hosts=True,
    ),
    "before an order": Point("run", "reshard.torch.links.messages:Order.read"),
    "before it agrees": Point("run", "reshard.torch.refitting.refit:Refit.run"),
    "before a bucket": Point("run", f"{_EXCHANGE}.exchange:MessageExchange.start", calls=4),
    "in a bucket": Point("run", f"{_EXCHANGE}.exchange:MessageExchange.finish", calls=4),
    "after a bucket": Point(
        "run", f"{_EXCHANGE}.exchange:MessageExchange.finish", is_after=True, calls=4
    ),
    "when it lends memory": Point(
        "run", f"{_EXCHANGE}.one_host.shared_memory:NearRank.lend", True, 2, sides=("trainer",)
    ),
    "when it takes memory": Point(
        "run",
        f"{_EXCHANGE}.one_host.shared_memory:NearMessage.give_back",
        calls=2,
        sides=("engine",),
    ),
    "before the outcome": Point("run", "reshard.torch.links.messages:RunOutcome.read"),
    "before it verifies": Point("verify", "reshard.torch.refitting.refit:Refit.verify"),
    "while it verifies": Point("verify", f"{_EXCHANGE}.groups:RankGroup.all_gather"),
    "before it leaves": Point("leave", f"{_LINK}:WeightLink.close"),
}


@dataclass(frozen=True)
class Case:
    """Who fails, where and how. Processes are counted as in `link_ends`.

    `call` is which call of the point, or which allocation of the stage, from 0.
    """

    point: str
    victim: int
    way: str
    call: int = 0

    def __str__(self) -> str:
        return f"process {self.victim}, {self.point}, call {self.call}: {self.way}"

    @property
    def needs_hosts(self) -> bool:
        """Whether each job has to have a host of its own."""
        return self.way in ("cut", "slow") or POINTS[self.point].needs_hosts

    @property
    def timeout_s(self) -> float:
        """How long its processes wait for each other."""
        if self.way == "stalls":
            return STALLED_S
        return EARLY_S if POINTS[self.point].is_early else PATIENT_S

    @property
    def is_waited_for(self) -> bool:
        """Whether the others cannot know of the fault, and so wait for as long as they are told."""
        return self.way == "stalls" or POINTS[self.point].is_early

    @property
    def victims(self) -> tuple[int, ...]:
        """Those that cannot go on: a host's are cut together."""
        if self.way in ("slow", "raises", "memory"):
            return ()
        if self.way == "cut":
            return {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3), 4: (4,)}[self.victim]
        return (self.victim,)

    def arguments(self) -> dict[str, Any]:
        """What a process is told, as JSON."""
        return asdict(self)


class Fault:
    """The fault of a case in the process that has it; the file tells others when it came."""

    def __init__(self, case: Case, number: int, file: Path) -> None:
        self.case, self.file = case, file
        self._is_victim = number == case.victim
        self._calls = 0
        self._is_armed = False
        if self._is_victim:
            self._hook()

    def begin(self, stage: str) -> None:
        """A stage begins."""
        self._is_armed, self._calls = POINTS[self.case.point].stage == stage, 0

    def since_s(self) -> float | None:
        """When it came, by the clock of all processes; None before it did."""
        try:
            return float(self.file.read_text())
        except (OSError, ValueError):
            return None

    def _hook(self) -> None:
        if self.case.way == "memory":
            torch = importlib.import_module("torch")
            for owner, name in ((torch, "empty"), (torch, "empty_like"), (os, "memfd_create")):
                self._wrap(owner, name, False)
            return
        point = POINTS[self.case.point]
        module, _, path = point.path.partition(":")
        *ahead, name = path.split(".")
        owner = functools.reduce(getattr, ahead, importlib.import_module(module))
        self._wrap(owner, name, point.is_after)

    def _wrap(self, owner: Any, name: str, is_after: bool) -> None:
        given = vars(owner)[name]
        is_bound = isinstance(given, classmethod)
        called: Callable[..., Any] = given.__func__ if is_bound else given

        @functools.wraps(called)
        def call(*args: Any, **named: Any) -> Any:
            found = called(*args, **named) if is_after else None
            if self._is_armed and self._is_counted():
                self._calls += 1
                if self._calls == self.case.call + 1:
                    self._is_armed = False
                    self._fail()
            return found if is_after else called(*args, **named)

        setattr(owner, name, classmethod(call) if is_bound else call)

    def _is_counted(self) -> bool:
        thread = POINTS[self.case.point].thread if self.case.way != "memory" else ""
        return thread in ("", threading.current_thread().name)

    def _fail(self) -> None:
        made = self.file.with_suffix(".made")
        made.write_text(repr(time.monotonic()))
        made.rename(self.file)
        way = self.case.way
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif way == "raises":
            raise ValueError("no more")
        elif way == "memory":
            raise MemoryError("you tried to allocate 12884901888 bytes")
        elif way == "stalls":
            # Until all others are done, which leave a file each.
            end_s = time.monotonic() + 60
            while time.monotonic() < end_s and len(list(self.file.parent.glob("done*"))) < 4:
                time.sleep(0.1)
            sys.stdout.flush()
            os._exit(9)
        elif way == "cut":
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        else:
            subprocess.run(["tc", "qdisc", "replace", "dev", "eth0", "root", *_SLOW], check=True)
