"""One turn of a benchmark: a process, or the ranks of a job, its time and its peak of memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True)
class Turn:
    """What one turn took: of several ranks, the slowest's time and all ranks' bytes together.

    `peak_bytes` is resident memory, with the imports. `read_bytes` are what read calls returned,
    `processor_s` is the time of all processors together.
    """

    seconds_s: float
    peak_bytes: int
    read_bytes: int
    processor_s: float = 0.0


def in_a_process(script: str, *arguments: object) -> Turn:
    """Run `script` again with a hidden command, and see what it took.

    Its time is what it prints, if it prints a turn: then start-up does not count.
    """
    answer = subprocess.run(
        [sys.executable, script, "--turn", *map(str, arguments)],
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    return Turn(**json.loads(answer)) if answer else Turn(0.0, 0, 0)


def timed(action: Callable[[], object]) -> Turn:
    """Do it and see what it took, in this process and those that it started."""
    before_bytes, before_s = _read_bytes(), _processor_s()
    start_s = time.perf_counter()
    action()
    seconds_s = time.perf_counter() - start_s
    processor_s = _processor_s() - before_s
    children_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    peak_kib = max(_peak_kib(), children_kib)
    return Turn(seconds_s, peak_kib * 1024, _read_bytes() - before_bytes, processor_s)


def _peak_kib() -> int:
    """Of this process. `getrusage` counts what started it too, whose memory it had until `exec`."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def _processor_s() -> float:
    found = os.times()
    return found.user + found.system + found.children_user + found.children_system


def show(turn: Turn) -> None:
    """Print a turn for the process that waits for it."""
    print(json.dumps(turn.__dict__))


def in_ranks(script: str, ranks: int, *arguments: object) -> Turn:
    """Run `script` as the ranks of a job, each of which prints a turn or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "BENCHMARK_STORE": f"{folder}/store"}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        environment["BENCHMARK_RANKS"] = str(ranks)
        processes = [
            subprocess.Popen(
                [sys.executable, script, "--turn", *map(str, arguments)],
                stdout=subprocess.PIPE,
                env={**environment, "BENCHMARK_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        answers = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{arguments} ended with {[p.returncode for p in processes]}")
    turns = [Turn(**json.loads(answer)) for answer in answers if answer]
    return Turn(
        max((turn.seconds_s for turn in turns), default=0.0),
        sum(turn.peak_bytes for turn in turns),
        sum(turn.read_bytes for turn in turns),
        sum(turn.processor_s for turn in turns),
    )


def this_rank() -> int:
    """Which rank of a job this process is."""
    return int(os.environ["BENCHMARK_RANK"])


def join_job() -> int:
    """Become a rank of a gloo job; answers which."""
    import torch

    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['BENCHMARK_STORE']}",
        rank=this_rank(),
        world_size=int(os.environ["BENCHMARK_RANKS"]),
    )
    return this_rank()


def timed_together(action: Callable[[], object]) -> Turn:
    """The same as `timed` on every rank of a job: all begin, and end, at a barrier."""
    import torch

    def together() -> None:
        action()
        torch.distributed.barrier()

    torch.distributed.barrier()
    return timed(together)


def _read_bytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(": ")
        if name == "rchar":
            return int(value)
    return 0


def prepare(source: Path, cache: str) -> None:
    """Nothing is left to be written, and the source is in the page cache or it is not."""
    os.sync()
    for path in (path for path in source.iterdir() if path.is_file()):
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while cache == "warm" and file.read(16 * MIB):
                pass
