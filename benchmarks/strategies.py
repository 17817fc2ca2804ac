"""`parallel` against `simple`: bytes, memory and time of each process, at 1, 2 and 4 processes.

`python benchmarks/strategies.py [MIB]` reshards a model of MIB (256) from 3 ranks to 8, its arrays
mapped from files, five times each way, and tells medians. Processes begin together. `simple`
gives whole tensors in turn; `sharded` cuts rows as `parallel` does, one rank after the other.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import reshard
from reshard.checkpoint import running_processes
from reshard.recipes import TensorMetadata, create_strategy

SOURCES, TARGETS, TENSORS, WIDTH, ROUNDS = 3, 8, 8, 1024, 5
# What each process holds beside the source, which is mapped: its own memory, in kilobytes.
MEMORY = "RssAnon"


def memory_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(MEMORY):
            return int(line.split()[1]) << 10
    raise SystemExit(f"this system does not tell {MEMORY}")


def write(folder: Path, size_bytes: int) -> None:
    length = size_bytes // (TENSORS * WIDTH * 4)
    for rank, part in enumerate(np.array_split(np.arange(length), SOURCES)):
        (folder / str(rank)).mkdir()
        for number in range(TENSORS):
            array = np.full((len(part), WIDTH), rank * TENSORS + number, dtype=np.float32)
            np.save(folder / str(rank) / f"t{number}.npy", array)


def measure(folder: Path, way: str) -> None:
    """One process's part, ROUNDS times."""
    held = [
        {path.stem: np.load(path, mmap_mode="r") for path in sorted((folder / str(rank)).iterdir())}
        for rank in range(SOURCES)
    ]
    metadata = {}
    for name in held[0]:
        boxes, begin = [], 0
        for rank, named in enumerate(held):
            stop = begin + len(named[name])
            boxes.append((rank, reshard.Box((begin, 0), (stop, WIDTH))))
            begin = stop
        layout = reshard.Layout.from_boxes((begin, WIDTH), boxes)
        metadata[name] = TensorMetadata("float32", layout)
    with running_processes() as coordinator:
        strategy = create_strategy(way, coordinator)
        plan = strategy.create_plan(metadata, TARGETS)
        times_s = []
        copied = used = 0
        for turn in range(ROUNDS + 1):
            before = memory_bytes()
            coordinator.collect(None)
            result = strategy.execute(plan, held)
            assert result.success
            if turn:
                times_s.append(result.duration_s)
            else:
                # The first turn reads the files, and takes memory that later ones have already.
                copied, used = result.copied_bytes, memory_bytes() - before
            del result
        if coordinator.rank == 0:
            print(json.dumps((statistics.median(times_s), copied, used)))


def run(folder: Path, way: str, processes: int) -> list[float]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--measure", str(folder), way],
            env={
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(processes),
                "RANK": str(rank),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), outputs
    found: list[float] = json.loads(outputs[0])
    return found


def main(mebibytes: int = 256) -> None:
    print(f"{mebibytes} MiB in {TENSORS} tensors, {SOURCES} ranks to {TARGETS}; of process 0:")
    print(f"{'way':<10} {'processes':>9} {'copied MiB':>11} {'memory MiB':>11} {'median s':>9}")
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), mebibytes << 20)
        ways = [("simple", 1), ("sharded", 1), ("parallel", 1), ("parallel", 2), ("parallel", 4)]
        for way, processes in ways:
            time_s, copied, memory = run(Path(name), way, processes)
            sizes = f"{copied / (1 << 20):>11.1f} {memory / (1 << 20):>11.1f}"
            print(f"{way:<10} {processes:>9} {sizes} {time_s:>9.3f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]), sys.argv[3])
    else:
        main(*map(int, sys.argv[1:]))
