"""Processes of a link between jobs that fail at random points, in random ways.

1. A seed chooses the point, the process of the five, the way, and which call of the point it is;
   `tests/link_faults.py` has the table.
2. All others raise an error of reshard's own within five seconds beyond what they were told to
   wait for, or go on; an engine has exactly the version that it says, or says that it has none.
3. Those that are left link with each other anew.

Where namespaces are not allowed, links are neither cut nor slowed down, and engines do not connect
with each other.
"""

from __future__ import annotations

import math
import random
import shutil
from collections import Counter
from pathlib import Path

from host_network import why_not
from link_fault_cases import run_case
from link_faults import POINTS, PROCESSES, WAYS, Case

LIMIT_S = 5.0


class LinkFailures:
    """The campaign."""

    goal = "failures"
    is_in_memory = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        has_hosts = not why_not()
        self._ways = [way for way in WAYS if way not in ("cut", "slow") or has_hosts]
        self._points = sorted(
            name for name, point in POINTS.items() if has_hosts or not point.needs_hosts
        )

    def run(self, seed: int) -> Counter[str]:
        choose = random.Random(seed)
        name = choose.choice(self._points)
        point = POINTS[name]
        victims = [
            number
            for number in range(PROCESSES)
            if ("trainer" if number < 2 else "engine") in point.sides
        ]
        way = choose.choice(self._ways)
        case = Case(name, choose.choice(victims), way, choose.randrange(point.calls))
        place = self._folder / "place"
        place.mkdir()
        try:
            seen = run_case(case, place, LIMIT_S)
        finally:
            shutil.rmtree(place)
        return Counter(
            {
                "failures": 1,
                f"{way}, others held for at most {math.ceil(max(seen.held_s, 1))} s": 1,
                "processes that raised": seen.raised,
                "processes that went on": seen.went_on,
                "engines that say they have a mixture": seen.mixtures,
                "not reached": int(not seen.came),
            }
        )
