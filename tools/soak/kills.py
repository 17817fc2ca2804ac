"""Conversions killed at random points, or left without power there, and run again.

1. Each worker has a few conversions between formats, all in processes that are killed at a
   given system call that changes something: `tests/checkpoint/faulty_process.py`.
2. A seed chooses one, the call, whether an old target is replaced, the number of threads, and
   whether the run that goes on is killed too, or all that was not synced is lost.
3. Whoever looks sees the old target or the new one, whole; the same command makes it the new.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

from checkpoint.faulty_process import FaultyProcesses
from checkpoint.killed_conversion import (
    Case,
    run_again,
    run_until_the_power_fails,
    write_old,
)
from checkpoint.model_files import COLUMNS, ROWS, contents, write_model
from reshard.checkpoint import convert


class Kills:
    """The campaign."""

    goal = "kills"
    is_in_memory = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes = FaultyProcesses()
        whole = write_model(folder / "whole", layers=6)
        rows = folder / "rows"
        torch = folder / "torch"
        convert(whole, rows, **ROWS)
        convert(whole, torch, format="torch-dcp", **ROWS)
        self._cases = {
            "shards to shards": self._case("columns", rows, **COLUMNS),
            "shards to one file": self._case("one file", rows, to="full"),
            "shards to torch-dcp": self._case("to torch", rows, format="torch-dcp", **COLUMNS),
            "torch-dcp to files": self._case(
                "from torch", torch, to="full", most_file_bytes=2_000_000
            ),
        }

    def _case(self, name: str, source: Path, **options: object) -> Case:
        folder = self._folder / name
        folder.mkdir()
        return Case(folder, self._processes, source, **options)

    def run(self, seed: int) -> Counter[str]:
        choose = random.Random(seed)
        name = choose.choice(sorted(self._cases))
        case = self._cases[name]
        has_old = choose.random() < 0.5
        threads = choose.choice([1, 2, 4])
        kind = choose.choice(["kill", "kill", "kill while it goes on", "power failure"])
        place = self._folder / "place"
        place.mkdir()
        try:
            target = place / "target"
            if has_old:
                write_old(target)
            old = contents(target)
            kill_at = choose.randrange(len(case.calls(has_old, threads)))
            if kind == "power failure":
                killed = run_until_the_power_fails(case, target, has_old, kill_at)
            else:
                killed = case.run(target, has_old, threads=threads, kill_at=kill_at)
            kills = int(killed.was_killed)
            if kind == "kill while it goes on" and contents(target) == old:
                again = choose.randrange(1 + kill_at)
                kills += case.run(target, has_old, threads=threads, kill_at=again).was_killed
            run_again(case, target, has_old, old)
        finally:
            shutil.rmtree(place)
        return Counter({"kills": kills, name: kills, kind: kills})
