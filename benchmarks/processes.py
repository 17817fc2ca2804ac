"""What each process of a conversion reads, writes and holds, at 1, 2, 3 and 4 processes.

`python benchmarks/processes.py [MIB]` converts a checkpoint of MIB (1024) in four row shards to
two column shards. Bytes are those that read and write calls moved; *resident* is the most memory
that a process had during the conversion, beyond what it had when all was imported. Of each figure
the largest of all processes is told.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from reshard.checkpoint import convert, plan_conversion, run_conversion, running_processes

ROWS, COLUMNS = 4096, 2048
SMALL_BYTES = ROWS * COLUMNS * 4
HERE = Path(__file__)


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise SystemExit(f"this system does not tell {name}")


def write(folder: Path, mebibytes: int) -> None:
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)
    whole = folder / "whole"
    whole.mkdir()
    count = max(1, (mebibytes << 20) // SMALL_BYTES)
    tensors = {
        f"w{number}": random.standard_normal((ROWS, COLUMNS), dtype=np.float32)
        for number in range(count)
    }
    save_file(tensors, whole / "model.safetensors")
    convert(whole, folder / "rows", to="x=4", rules=["*=x, -"])
    shutil.rmtree(whole)


def measure(source: str, target: str) -> None:
    with running_processes() as processes:
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
        conversion = plan_conversion(source, target, to="x=2", rules=["*=-, x"])
        report = run_conversion(conversion, processes=processes)
        held = processes.collect(status_bytes("VmHWM") - before)
        if processes.rank == 0:
            read, written = (max(column) for column in zip(*report.by_process, strict=True))
            buffers = max(report.buffers_by_process)
            print(json.dumps((report.seconds_s, read, written, buffers, max(held))), flush=True)


def run(folder: Path, processes: int) -> list[float]:
    arguments = [HERE, "--measure", folder / "rows", folder / "columns"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    start = [sys.executable, *(torchrun if processes > 1 else []), *map(str, arguments)]
    done = subprocess.run(start, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    shutil.rmtree(folder / "columns")
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(mebibytes: int = 1024) -> None:
    print("processes  read MiB  written MiB  buffers MiB  resident MiB  seconds")
    with tempfile.TemporaryDirectory(dir=".") as name:
        write(Path(name), mebibytes)
        for processes in (1, 2, 3, 4):
            seconds, *sizes = run(Path(name), processes)
            read, written, buffers, held = (size / (1 << 20) for size in sizes)
            line = f"{processes:>9} {read:>9.1f} {written:>12.1f} {buffers:>12.1f} {held:>13.1f}"
            print(f"{line} {seconds:>8.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
    else:
        main(*map(int, sys.argv[1:]))
