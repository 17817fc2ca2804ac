"""The tutorial's program."""

import runpy
from pathlib import Path

import pytest


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "examples" / "spmd.py"
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [
        "matmul -> dp, tp",
        "relu -> dp, tp",
        "matmul -> dp, - | sum(tp)",
        "add -> dp, -",
    ]
