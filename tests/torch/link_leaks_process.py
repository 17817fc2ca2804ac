"""One process of a link on which engines come and go, and which runs very often.

Of four processes one is the trainer, one an engine that stays, and two are engines that come and
go in turn, with models of other dtypes and buckets of other sizes. Arguments: a port, joins, runs.
The trainer and the engine that stays end with what they had open before and after, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from refit_models import expect, values, zeros
from reshard.errors import LinkError
from reshard.torch import connect

NUMBER = int(os.environ.get("RANK", 0))
WAIT_S = 120.0
# After so many runs what is kept for the next one is there.
WARM = 5


def open_things() -> dict[str, int]:
    """Files, threads, mapped segments of memory, and resident memory of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "segments": Path("/proc/self/maps").read_text().count("memfd:reshard"),
        "resident_kib": int(resident.split()[1]),
    }


def send(end: Any, runs: int) -> list[dict[str, int]]:
    """The trainer's part: until all have come, then as many runs with the engine that stays."""
    model = values()
    sync = end.prepare(model, cast=True, buckets=400)
    found, seen = [], set[str]()
    while not {"last 2", "last 3"} <= seen:
        report = sync.run()
        expect("stays" in report.engines, f"{report}")
        seen |= set(report.engines)
        if len(seen) > 1 and not found:
            found.append(open_things())
        # The engines that come do something else, too.
        time.sleep(0.005)
    # The last may have runs to come, and those that left are closed at the next run.
    while set(report.engines) != {"stays"}:
        report = sync.run()
    found.append(open_things())
    for step in range(runs):
        if step == WARM:
            found.append(open_things())
        report = sync.run()
        expect("stays" in report.engines, f"run {step}: {report}")
    found.append(open_things())
    return found


def stay(end: Any) -> list[dict[str, int]]:
    """The engine that stays: until the trainer leaves."""
    model = zeros(values())
    sync = end.prepare(model)
    found = []
    while True:
        try:
            sync.run()
        except LinkError as error:
            expect("still has version" in str(error), str(error))
            break
        if sync.version == WARM:
            found.append(open_things())
    for name, value in values().items():
        expect(torch.equal(model[name], value), name)
    found.append(open_things())
    return found


def count_connections() -> int:
    """How many of this process's files are connections by TCP."""
    files = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    held = {os.readlink(file) for file in files if os.path.lexists(file)}
    lines = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    fields = [line.split() for table in lines for line in table.splitlines()[1:]]
    return sum(f"socket:[{one[9]}]" in held for one in fields)


def come_and_go(url: str, joins: int) -> None:
    """An engine that comes, takes weights, and leaves, `joins` times."""
    # Connections go with the link's end, not when garbage is collected.
    gc.disable()
    connections = []
    for turn in range(joins):
        name = f"last {NUMBER}" if turn == joins - 1 else f"e{NUMBER}"
        dtype = (torch.float32, torch.bfloat16)[turn % 2]
        model = zeros(values(dtype=dtype))
        with connect(url, "engine", rank=0, ranks=1, name=name, timeout_s=WAIT_S) as end:
            sync = end.prepare(model)
            for _ in range(1 + turn % 3):
                sync.run()
        for tensor, value in values(dtype=dtype).items():
            expect(torch.equal(model[tensor], value), f"{tensor} after {turn} joins")
        connections.append(count_connections())
    expect(connections[-1] <= connections[0] + 1, f"connections after joins: {connections}")


def open_signs() -> dist.Store:
    """Where the processes tell each other how far they are."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, None, NUMBER == 0, wait_for_workers=False)


def main(port: str, joins: int, runs: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    given: dict[str, Any] = {"rank": 0, "ranks": 1, "timeout_s": WAIT_S}
    signs = open_signs()
    if NUMBER > 1:
        # The trainer's first engine is the one that stays.
        signs.wait(["begun"])
        come_and_go(url, joins // 2)
        return
    given |= {"engines": 1} if NUMBER == 0 else {"name": "stays"}
    with connect(url, "engine" if NUMBER else "trainer", **given) as end:
        if NUMBER == 0:
            signs.set("begun", "")
        found = stay(end) if NUMBER else send(end, runs)
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.flush()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
