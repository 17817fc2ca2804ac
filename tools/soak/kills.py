"""Conversions killed at random points, or left without power there, and run again.

1. Each worker has conversions of every kind between formats, all in processes that are killed at a
   given system call that changes something: `tests/checkpoint/faulty_process.py`.
2. A seed chooses one, the call, whether an old target is replaced, the number of threads, and
   whether the run that goes on is killed too, or all that was not synced is lost.
3. Whoever looks sees the old target or the new one, whole; the same command makes it the new.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

from checkpoint.campaigns.large_conversions import make_large
from checkpoint.campaigns.small_checkpoints import CONVERSIONS
from checkpoint.faulty_process import FaultyProcesses
from checkpoint.killed_conversion import (
    Case,
    run_again,
    run_until_the_power_fails,
    write_old,
)
from checkpoint.model_files import contents
from reshard.checkpoint.blocks import grid as blocks

SMALL_BLOCK_BYTES = 512
_SMALL = {row.name: row for row in CONVERSIONS}


class Kills:
    """The campaign."""

    goal = "kills"
    is_in_memory = False

    def __init__(self, folder: Path) -> None:
        warnings.simplefilter("ignore")
        self._folder = folder
        self._processes = FaultyProcesses()
        self._large = make_large(folder, layers=6)
        self._cases: dict[str, Case] = {}

    def _find_case(self, name: str) -> Case:
        """The conversion of a name; it is made when it is first asked for."""
        if name not in self._cases:
            folder = self._folder / name
            folder.mkdir()
            if name in self._large:
                source, options = self._large[name]
            else:
                (folder / "made").mkdir()
                # So that there are several; digests of manifests are those of blocks.
                with mock.patch.object(blocks, "BLOCK_BYTES", SMALL_BLOCK_BYTES):
                    source, options = _SMALL[name].make(folder / "made")
                options |= {"block_bytes": SMALL_BLOCK_BYTES, "sync_bytes": 2 * SMALL_BLOCK_BYTES}
            self._cases[name] = Case(folder, self._processes, source, **options)
        return self._cases[name]

    def run(self, seed: int) -> Counter[str]:
        choose = random.Random(seed)
        # Half of the kills while large tensors are written.
        name = choose.choice(sorted(self._large if choose.random() < 0.5 else _SMALL))
        case = self._find_case(name)
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
