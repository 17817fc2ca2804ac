"""Conversions of every kind on a disk that gives less than was asked for, fails, or is full.

A seed chooses a conversion, the kind of trouble, and where it begins; what must hold is in
`tests/checkpoint/campaigns/troubles.py`.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from checkpoint.any_conversion import plan_any
from checkpoint.campaigns.large_conversions import make_large
from checkpoint.campaigns.small_checkpoints import CONVERSIONS
from checkpoint.campaigns.troubles import TROUBLES, Trouble, count_calls, try_in_trouble
from checkpoint.model_files import contents
from reshard.checkpoint import run_conversion
from reshard.checkpoint.blocks import grid as blocks

BLOCK_BYTES = 64 * 1024
# Of small checkpoints, so that they have several blocks.
SMALL_BLOCK_BYTES = 512

_SMALL = {row.name: row for row in CONVERSIONS}

Run = Callable[[Path], object]
Planned = tuple[Path, Mapping[str, Any], int]


class BadDisks:
    """The campaign."""

    goal = "troubles"
    is_in_memory = False

    def __init__(self, folder: Path) -> None:
        warnings.simplefilter("ignore")
        self._folder = folder
        # Digests of manifests are those of blocks.
        blocks.BLOCK_BYTES = BLOCK_BYTES
        self._large = make_large(folder, layers=3)
        self._planned: dict[str, Planned] = {}
        self._expected: dict[str, dict[str, str] | None] = {}
        self._counted: dict[tuple[str, str, int], int] = {}

    def _make(self, name: str) -> Planned:
        """The source of a name, with what is asked of it and the size of its blocks."""
        if name in self._large:
            return *self._large[name], BLOCK_BYTES
        own = self._folder / "made" / name
        own.mkdir(parents=True)
        blocks.BLOCK_BYTES = SMALL_BLOCK_BYTES
        return *_SMALL[name].make(own), SMALL_BLOCK_BYTES

    def run(self, seed: int) -> Counter[str]:
        choose = random.Random(seed)
        # Half of the cases with large tensors, by direct I/O.
        name = choose.choice(sorted(self._large if choose.random() < 0.5 else _SMALL))
        kind = choose.choice(sorted(TROUBLES))
        threads = choose.choice([1, 4])
        run = self._find_run(name, threads)
        # Most trouble begins anywhere, some of it at the end, where all is put in place.
        key = (name, kind, threads)
        if key not in self._counted:
            self._counted[key] = count_calls(kind, run, self._folder / "counted")
            shutil.rmtree(self._folder / "counted")
        calls = self._counted[key]
        begin = choose.randrange(calls) if choose.random() < 0.7 else max(0, calls - 25)
        begin += choose.randrange(25) if begin == calls - 25 else 0
        place = self._folder / "place"
        place.mkdir()
        try:
            trouble = Trouble(kind, choose, begin)
            hits = try_in_trouble(trouble, run, place / "target", self._expected[name])
        finally:
            shutil.rmtree(place)
        return Counter({"troubles": 1, name: 1, kind: 1, "calls that were hit": hits})

    def _find_run(self, name: str, threads: int) -> Run:
        """Runs the conversion of a name; its source is made when it is first asked for."""
        if name not in self._planned:
            self._planned[name] = self._make(name)
            self._find_run(name, 1)(self._folder / "expected")
            self._expected[name] = contents(self._folder / "expected")
            shutil.rmtree(self._folder / "expected")
        source, options, block_bytes = self._planned[name]

        def run(target: Path) -> object:
            blocks.BLOCK_BYTES = block_bytes
            conversion = plan_any(source, target, **options)
            return run_conversion(
                conversion, overwrite=True, threads=threads, sync_bytes=4 * block_bytes
            )

        return run
