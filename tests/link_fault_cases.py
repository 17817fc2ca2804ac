"""Runs links of which processes fail or come and go, and holds what they saw to what must be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from host_network import HostNetwork
from link_faults import PROCESSES, Case
from live_processes import expect_all_end_well, free_port, run_ranks

RATE_BITS_PER_S = 250_000_000


@dataclass(frozen=True)
class Seen:
    """What a case came to: the longest that a process was held, who raised, and who went on."""

    held_s: float
    raised: int
    went_on: int
    mixtures: int
    came: bool


@dataclass(frozen=True)
class Grown:
    """By how much a trainer's resident memory grew, in KiB."""

    joins_kib: int
    runs_kib: int


def run_leaks(joins: int, runs: int, timeout_s: float) -> Grown:
    """Engines join and leave so often, and then a link runs so often.

    Raises AssertionError where a run misses the engine that stays, or anything is left behind.
    """
    ended = run_ranks("link_leaks_process.py", 4, free_port(), joins, runs, timeout_s=timeout_s)
    expect_all_end_well(ended)
    first, after_joins, warm, after_runs = json.loads(ended[0].output.splitlines()[-1])
    # At the first look engines were there beside the one that stays. A thread that has ended may
    # be seen for a moment longer; what each join or run left behind would be far more.
    for what in ("files", "threads", "segments"):
        assert after_joins[what] <= first[what] + 2, (what, first, after_joins)
        assert after_runs[what] <= warm[what] + 2, (what, warm, after_runs)
    grown = [
        after["resident_kib"] - before["resident_kib"]
        for before, after in ((first, after_joins), (warm, after_runs))
    ]
    return Grown(*grown)


def run_case(case: Case, folder: Path, limit_s: float) -> Seen:
    """Raises AssertionError, with what all processes wrote, where anything was wrong.

    `limit_s` is beyond how long they wait where the fault gives no sign.
    """
    order = {
        "case": case.arguments(),
        "folder": str(folder),
        "ports": {"trainer": free_port(), "a": free_port()},
        "url": f"tcp://127.0.0.1:{free_port()}",
        "keepers": [],
    }
    if not case.needs_hosts:
        return _judge(case, order, limit_s)
    with HostNetwork(3, RATE_BITS_PER_S) as network:
        order |= {
            "keepers": network.host_pids,
            "url": f"tcp://{network.address(0)}:29400",
            "ports": {"trainer": 29401, "a": 29402},
        }
        return _judge(case, order, limit_s)


def _judge(case: Case, order: dict[str, object], limit_s: float) -> Seen:
    ended = run_ranks("link_fault_process.py", PROCESSES, json.dumps(order), timeout_s=150)
    told = f"{case}\n" + "\n".join(
        f"--- process {number}, code {one.code}\n{one.output}" for number, one in enumerate(ended)
    )
    gone = case.victims if case.way in ("killed", "stalls") else ()
    seen = []
    for number, one in enumerate(ended):
        if number in gone and one.code in (9, -9):
            continue
        assert one.code == 0, told
        seen.append(json.loads(one.output.splitlines()[-1]))
    waits_s = case.timeout_s if case.is_waited_for else 0.0
    for one in seen:
        assert one["is_ours"], told
        assert one["held_s"] < limit_s + waits_s, told
        assert case.way != "slow" or not (one["error"] or one["lost"]), told
    return Seen(
        max(one["held_s"] for one in seen) - waits_s,
        sum(bool(one["error"]) for one in seen),
        sum(not one["error"] for one in seen),
        sum(not one["usable"] for one in seen),
        any(one["came"] for one in seen),
    )
