"""Conversions by real processes that talk through gloo; in every other one a process is killed."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

from checkpoint.checkpoint_files import tensor, write_file
from checkpoint.process_runs import content, run
from soak.wrong import Wrong

FORMATS = ("sharded-safetensors", "torch-dcp")


class Jobs:
    """The campaign."""

    goal = "jobs"
    is_in_memory = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._source = folder / "source"
        self._source.mkdir()
        wholes = {
            "w": tensor("float32", (300, 200), 1),
            "v": tensor("bfloat16", (101, 500), 2),
            "s": tensor("int64", (), 3),
        }
        write_file(self._source / "model.safetensors", wholes)
        self._expected: dict[str, dict[str, bytes]] = {}

    def run(self, seed: int) -> Counter[str]:
        choose = random.Random(seed)
        form = choose.choice(FORMATS)
        if form not in self._expected:
            self._convert(1, self._folder / form, form)
            self._expected[form] = content(self._folder / form)
        target = self._folder / "target"
        counts: Counter[str] = Counter()
        try:
            count = choose.choice([2, 3, 4])
            if seed % 2:
                killed, record = choose.randrange(count), choose.randint(1, 2)
                outcome = run(count, self._source, target, form, killed, record)
                if outcome[killed][0] != -9 or any("Traceback" in text for _, text in outcome):
                    raise Wrong(f"process {killed} of {count} was killed: {outcome}")
                if target.exists():
                    raise Wrong("a job without one of its processes put the target in place")
                counts[f"one of {count} processes killed"] += 1
                count = choose.choice([1, 2, 3])
            self._convert(count, target, form)
            counts[f"by {count} processes to {form}"] += 1
            if content(target) != self._expected[form]:
                raise Wrong(f"{count} processes wrote other bytes than one")
        finally:
            shutil.rmtree(target, ignore_errors=True)
        return counts + Counter({"jobs": 1})

    def _convert(self, count: int, target: Path, form: str) -> None:
        outcome = run(count, self._source, target, form)
        if any(code for code, _ in outcome):
            raise Wrong(f"{count} processes to {form}: {outcome}")
