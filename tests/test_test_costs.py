"""The report of what tests cost, at the end of a run of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parent / "conftest.py"
ITEMS = """
import subprocess, sys, time, pytest

def use(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.mark.parametrize("name", ["listed[0]", "listed-other", "new"])
def test_dear(name):
    use(0.05)

def test_dear_child():
    program = "import time\\nwhile time.process_time() < 0.1: pass"
    subprocess.run([sys.executable, "-S", "-c", program])

@pytest.mark.exhaustive("slow")
def test_exhaustive():
    use(0.05)

def test_cheap():
    pass
"""


def test_dear_items_that_are_not_listed_are_new(tmp_path: Path) -> None:
    text = CONFTEST.read_text().replace("MIN_RUN_S = 60.0", "MIN_RUN_S = 0.0")
    (tmp_path / "conftest.py").write_text(text.replace("MAX_ITEM_S = 2.0", "MAX_ITEM_S = 0.04"))
    (tmp_path / "dear_tests.toml").write_text(
        '"test_items.py::test_dear[listed[0]]" = "a"\n"test_items.py::test_dear[listed-*]" = "b"'
    )
    (tmp_path / "test_items.py").write_text(ITEMS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = exhaustive(reason): slow")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CONFTEST.parent)},
        capture_output=True,
        text=True,
    )
    lines = run.stdout.splitlines()
    new = [line.split(": ")[2].split(";")[0] for line in lines if line.startswith("new: ")]
    assert {*new} == {"test_items.py::test_dear[new]", "test_items.py::test_dear_child"}, run.stdout
    assert "s of processor time, the dearest items" in run.stdout
    assert lines[-1].startswith("6 passed")
    assert run.returncode == 0
