"""Commands, conversions and kills where the system has none of Linux's own calls.

The folder `without_linux` takes them away from each Python that has it in PYTHONPATH: that of
pytest, and those that its tests start.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
GOLDEN = "cli/test_golden_output.py"
CONVERSIONS = "checkpoint/campaigns/test_small_checkpoints.py"
KILLS = "checkpoint/test_kill_resume.py"
SOME = [
    *(
        f"{GOLDEN}::test_output_is_as_checked_by_eye[{name}]"
        for name in ("inspect_digest", "convert")
    ),
    *(
        f"{CONVERSIONS}::test_a_conversion_is_to_what_it_says[{name}]"
        for name in (
            "torch.save to torch-dcp",
            "FSDP2 to torch-pickle",
            "torch.save before 1.6 to orbax",
            "with a delta",
        )
    ),
    f"{KILLS}::test_killed_at_points_spread_over_the_run[overwrite-42]",
    f"{KILLS}::test_killed_at_each_of_the_last_calls[overwrite-5]",
    "checkpoint/test_staging_kills.py::test_killed_at_any_call_then_run_again[move aside-old]",
]
ALL = [
    *(GOLDEN, "cli/test_program.py", "cli/commands", CONVERSIONS, KILLS),
    *("checkpoint/campaigns/test_kills.py", "checkpoint/test_staging_kills.py"),
    *("checkpoint/conversion/test_staging.py", "checkpoint/conversion/test_journal.py"),
    *("checkpoint/loading", "checkpoint/deltas", "checkpoint/storage", "checkpoint/blocks"),
    *("execution", "spmd/arrays"),
]


@pytest.mark.linux_only(reason="takes away what other systems do not have")
@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(SOME, id="some"),
        pytest.param(
            ALL,
            id="all",
            marks=pytest.mark.exhaustive(reason="minutes; one test of each kind runs by default"),
        ),
    ],
)
def test_what_runs_on_linux_runs_without_its_own_calls(tests: list[str]) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTHONPATH": str(TESTS / "without_linux"),
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=TESTS.parent,
            capture_output=True,
            text=True,
            check=False,
        )

    assert run("-c", "import os; print(hasattr(os, 'O_DIRECT'))").stdout == "False\n"
    done = run("-m", "pytest", "-q", "-x", *(f"tests/{name}" for name in tests))
    assert done.returncode == 0, done.stdout[-4000:]
