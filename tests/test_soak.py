"""The soak itself works: a few cases of each campaign, and a case that must fail is told."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

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


def list_arguments(counts: dict[str, int]) -> list[str]:
    options = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    left_out = [word for name in CAMPAIGNS if name not in counts for word in (f"--{name}", "0")]
    return [*options, *left_out, "--seed", "1", "--workers", "1"]


def expect_done(counts: dict[str, int], output: str) -> None:
    for name, wanted in counts.items():
        found = re.search(rf"^{name}: (\d+) of {wanted} in", output, re.MULTILINE)
        assert found and int(found[1]) >= wanted, output
    assert output.endswith("nothing failed\n")


@pytest.mark.exhaustive(reason="processes that import torch; a campaign runs here by default")
def test_a_few_cases_of_the_quick_campaigns() -> None:
    counts = {"kills": 1, "troubles": 2, "mutations": 40, "conversions": 8}
    done = run(*list_arguments(counts))
    assert done.returncode == 0, done.stdout + done.stderr
    expect_done(counts, done.stdout)


def test_a_few_cases_in_this_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread is the worker: a process would import torch for seconds."""

    def start_threads(workers: int, context: Any, begin: Any, arguments: Any) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(workers, initializer=begin, initargs=arguments)

    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    soak, campaign = (importlib.import_module(f"soak.{name}") for name in ("__main__", "campaign"))
    monkeypatch.setattr(campaign, "ProcessPoolExecutor", start_threads)
    monkeypatch.setattr(campaign._Worker, "_watch", lambda self: None)
    counts = {"conversions": 2}
    monkeypatch.setattr(sys, "argv", ["soak", *list_arguments(counts)])
    assert soak.main() == 0
    expect_done(counts, capsys.readouterr().out)


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
