"""The soak itself works: a few cases of each campaign, and a case that must fail is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from selection import keep_where

pytest.importorskip("torch")
ROOT = Path(__file__).parent.parent
CAMPAIGNS = (
    *("kills", "troubles", "mutations", "conversions"),
    *("jobs", "failures", "joins", "fuzzers", "uploads"),
)
PATH = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tools", "tests"))


def run(*arguments: str, program: str = "-m soak") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program.split(" ", 1), *arguments],
        env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "counts",
    keep_where(
        lambda counts: "kills" not in counts,
        [
            {"mutations": 3},
            {"kills": 1, "troubles": 2, "mutations": 40, "conversions": 8},
        ],
        "more cases, and campaigns that tests/checkpoint/campaigns runs",
    ),
    ids=("few", "more"),
)
def test_a_few_cases_of_the_quick_campaigns(counts: dict[str, int]) -> None:
    options = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    left_out = [word for name in CAMPAIGNS if name not in counts for word in (f"--{name}", "0")]
    done = run(*options, *left_out, "--seed", "1", "--workers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    for name, wanted in counts.items():
        found = re.search(rf"^{name}: (\d+) of {wanted} in", done.stdout, re.MULTILINE)
        assert found and int(found[1]) >= wanted, done.stdout
    assert done.stdout.endswith("nothing failed\n")


BROKEN = """
import sys
from collections import Counter
from pathlib import Path
from soak.campaign import Outcome, reproduce, run_campaign

class Broken:
    goal = "cases"
    is_in_memory = True
    def __init__(self, folder: Path) -> None:
        pass
    def run(self, seed: int) -> Counter:
        if seed == 12:
            raise ValueError("twelve")
        return Counter(cases=1)

if __name__ == "__main__":
    outcome = run_campaign(Broken, 30, 10, 60, 1)
    (failure,) = outcome.failures
    print(outcome.counts["cases"], failure.seed, "twelve" in failure.text)
    print(reproduce("cases", failure.seed))
"""


def test_a_case_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    done = run(program=str(tmp_path / "broken.py"))
    assert done.returncode == 0, done.stderr
    counted, command = done.stdout.splitlines()
    assert counted.split()[1:] == ["12", "True"]
    assert command == 'make soak SOAK="--only cases --cases 1 --seed 12"'
