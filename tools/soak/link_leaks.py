"""Links on which engines come and go, and which run very often: nothing is left of either.

1. Of four processes one is a trainer and one an engine that stays; two are engines that come, take
   weights and leave, 20 times in all. The one that stays is in every run, and misses none.
2. 1,000 runs follow.
3. The trainer has no more files, threads and mapped segments after either than before it. What its
   memory grew by is counted; the allocator keeps some, so it decides nothing.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from link_fault_cases import run_leaks

JOINS, RUNS = 20, 1000


class LinkLeaks:
    """The campaign."""

    goal = "joins"
    is_in_memory = False

    def __init__(self, folder: Path) -> None:
        del folder

    def run(self, seed: int) -> Counter[str]:
        del seed
        grown = run_leaks(JOINS, RUNS, timeout_s=110)
        return Counter(
            {
                "joins": JOINS,
                "runs": RUNS,
                "KiB that the trainer grew by in joins": grown.joins_kib,
                "KiB that the trainer grew by in runs": grown.runs_kib,
            }
        )
