"""One process of a link of which one fails: see `link_faults`.

Argument: a case as JSON, with a folder, ports and, where each job has a host of its own, hosts. The
last line of the output is what this process saw, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from host_network import enter_host
from link_ends import NAME, NUMBER, PORTS, RANK, RANKS, SIDE, begin_job, cut, set_values
from link_faults import PROCESSES, Case, Fault
from live_processes import free_port
from refit_models import expect, local_of, values, zeros
from reshard.errors import ReshardError
from reshard.torch import connect, is_usable

BUCKET_BYTES = 400
AGAIN_S = 60.0


class Witness:
    """What one process saw of the fault: how long it was held, what it raised, and what it has."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.held_s = 0.0
        self.error = ""
        self.is_ours = True
        self.lost: dict[str, str] = {}
        self.model: Any = None
        self.sync: Any = None

    def see(self, call: Callable[[], Any]) -> Any:
        """Make a call, and measure how long it is held from the fault on."""
        begun_s = time.monotonic()
        try:
            return call()
        finally:
            since_s = self.fault.since_s()
            ended_s = time.monotonic()
            if since_s is not None and ended_s > since_s:
                self.held_s = max(self.held_s, ended_s - max(begun_s, since_s))

    def check(self) -> None:
        """What is said of the weights is so, bit for bit."""
        if SIDE == "trainer" or self.sync is None:
            return
        version, usable = self.sync.version, self.sync.is_usable
        if not usable:
            expect(version is None, f"version {version} of what is not usable")
            return
        whole = zeros(values()) if version is None else values(version)
        expected = whole if NAME == "b" else cut(whole)
        for name, tensor in self.model.items():
            found, right = local_of(tensor), local_of(expected[name])
            expect(bool((found == right).all()), f"{name} is not that of version {version}")
            expect(is_usable(tensor), f"{name} of version {version} is said to be unusable")


def live(witness: Witness, order: dict[str, Any], timeout_s: float) -> None:
    """The whole life of a link."""
    fault, see = witness.fault, witness.see
    fault.begin("connect")
    given: dict[str, Any] = {"rank": RANK, "ranks": RANKS, "timeout_s": timeout_s}
    given |= {"engines": 2} if SIDE == "trainer" else {"name": NAME}
    end = see(lambda: connect(order["url"], SIDE, secret="s", **given))
    try:
        given_values = values() if SIDE == "trainer" else zeros(values())
        witness.model = model = given_values if NAME == "b" else cut(given_values)
        fault.begin("prepare")
        options = {"buckets": BUCKET_BYTES} if SIDE == "trainer" else {}
        witness.sync = sync = see(lambda: end.prepare(model, **options))
        for step in range(3):
            if SIDE == "trainer":
                set_values(model, step)
            if step == 1:
                fault.begin("run")
            report = see(sync.run)
            witness.lost |= report.lost
            if step == 1:
                fault.begin("verify")
                see(sync.verify)
        fault.begin("leave")
    finally:
        see(end.close)


def link_again(survivors: list[int], place: Path) -> None:
    """Those that are left link with each other: the first of them sends to all others.

    It says at `place` which port it serves, that it finds free only now: one that was found when
    the case began may be another program's by then.
    """
    if len(survivors) < 2:
        return
    is_first = survivors[0] == NUMBER
    if is_first:
        written = place.with_suffix(".part")
        written.write_text(f"tcp://127.0.0.1:{free_port()}")
        written.rename(place)
    until_s = time.monotonic() + AGAIN_S
    while not place.exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    url = place.read_text()
    given: dict[str, Any] = {"rank": 0, "ranks": 1, "timeout_s": AGAIN_S}
    given |= {"engines": len(survivors) - 1} if is_first else {"name": str(NUMBER)}
    with connect(url, "trainer" if is_first else "engine", **given) as end:
        model = values(9) if is_first else zeros(values())
        sync = end.prepare(model)
        report = sync.run()
        expect(report is not None and not report.lost, f"{report}")
        expect(all(bool((model[name] == one).all()) for name, one in values(9).items()), "again")


def main(order: dict[str, Any]) -> None:
    case = Case(**order["case"])
    folder = Path(order["folder"])
    PORTS.update(order["ports"])
    if order["keepers"]:
        enter_host(order["keepers"][{"trainer": 0, "a": 1, "b": 2}[NAME]])
    begin_job()
    fault = Fault(case, NUMBER, folder / "fault")
    witness = Witness(fault)
    try:
        live(witness, order, case.timeout_s)
    except Exception as error:
        witness.error = f"{type(error).__name__}: {error}"
        # What a user's code raises, or the system, the process itself gets as it is.
        witness.is_ours = isinstance(error, ReshardError) or case.victim == NUMBER
        if not witness.is_ours:
            traceback.print_exc()
    witness.check()
    (folder / f"done{NUMBER}").write_text("")
    if not order["keepers"]:
        # What fails before it leaves does not fail in what comes then.
        fault.begin("again")
        link_again([n for n in range(PROCESSES) if n not in case.victims], folder / "again")
    told = {
        "name": f"{NAME} rank {RANK}",
        "held_s": witness.held_s,
        "error": witness.error,
        "is_ours": witness.is_ours,
        "lost": witness.lost,
        "came": fault.since_s() is not None,
        "usable": witness.sync is None or witness.sync.is_usable,
    }
    sys.stdout.write(f"{json.dumps(told)}\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
