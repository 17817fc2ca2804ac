"""ctrl-C in the middle of work: a line that says what to do, and the same command continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cli.command_runs import Run, clean_environment, entries, run_here, write_model
from reshard.checkpoint.blocks import grid

# The command, with every block of a tensor slowed down, and a file that tells of the ninth.
SLOWED = """
import signal, sys, time
from pathlib import Path
from reshard.checkpoint.blocks import block_io, grid
grid.BLOCK_BYTES = 1 << 18
# A shell may have started the tests with it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
blocks = 0
def slowed(read):
    def read_slowly(*arguments):
        global blocks
        blocks += 1
        if blocks == 9:
            Path("working").touch()
        time.sleep(0.1)
        return read(*arguments)
    return read_slowly
block_io.BlockReader.read = slowed(block_io.BlockReader.read)
from reshard.cli import main
sys.exit(main())
"""
ARGUMENTS = ("convert", "large", "new", "--to", "tp=4", "--rule", "*=-, tp")
ROWS, COLUMNS = 768, 1024


def write_rows(folder: Path, rows: int, columns: int) -> Path:
    values = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    return write_model(folder / "large", weight=values)


@pytest.fixture
def large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tensor of a dozen blocks, which are smaller than usual."""
    monkeypatch.setattr(grid, "BLOCK_BYTES", 1 << 18)
    return write_rows(folder, ROWS, COLUMNS)


def interrupted(folder: Path, *arguments: str, times: int = 1) -> Run:
    """What a run says that gets SIGINT while it works on its ninth block."""
    (folder / "working").unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWED, *arguments],
        cwd=folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline_s = time.monotonic() + 60
    while not (folder / "working").exists() and process.poll() is None:
        assert time.monotonic() < deadline_s, "the run did not reach its ninth block"
        time.sleep(0.005)
    (folder / "working").unlink()
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    output, errors = process.communicate(timeout=60)
    return Run(process.returncode, output, errors)


def test_the_same_command_continues(folder: Path, large: Path) -> None:
    stopped = interrupted(folder, *ARGUMENTS)
    assert stopped.code == 3
    assert stopped.output == ""
    assert stopped.errors.startswith("reshard: interrupted")
    assert "the same command continues" in stopped.errors
    assert stopped.errors.count("\n") == 1
    assert not (folder / "new").exists()

    finished = run_here(*ARGUMENTS, "--json")
    assert finished.code == 0
    assert 0 < finished.json["resumed_bytes"] < ROWS * COLUMNS * 4
    assert finished.json["read_bytes"] < ROWS * COLUMNS * 4
    assert run_here("verify", "large", "new").code == 0
    assert entries(folder) == {"model", "large", "new"}


def test_the_report_mentions_the_earlier_run(folder: Path, large: Path) -> None:
    as_json = interrupted(folder, *ARGUMENTS, "--json")
    assert as_json.code == 3
    assert as_json.json["error"]["kind"] == "InterruptedRunError"
    finished = run_here(*ARGUMENTS)
    assert "continued an earlier run, which had done " in finished.output


def test_restart_begins_anew(folder: Path, large: Path) -> None:
    assert interrupted(folder, *ARGUMENTS).code == 3
    finished = run_here(*ARGUMENTS, "--restart", "--json")
    assert finished.code == 0
    assert finished.json["resumed_bytes"] == 0
    assert run_here("verify", "large", "new").code == 0


def test_an_old_target_is_untouched(folder: Path, large: Path) -> None:
    assert run_here("convert", "model", "new", "--to", "3").code == 0
    assert interrupted(folder, *ARGUMENTS, "--overwrite").code == 3
    assert run_here("verify", "model", "new").code == 0
    assert run_here(*ARGUMENTS, "--overwrite").code == 0
    assert run_here("verify", "large", "new").code == 0


def test_impatience_changes_nothing(folder: Path, large: Path) -> None:
    stopped = interrupted(folder, *ARGUMENTS, times=3)
    assert stopped.code == 3
    assert "interrupted" in stopped.errors
    assert "Traceback" not in stopped.errors
    assert run_here(*ARGUMENTS).code == 0
    assert run_here("verify", "large", "new").code == 0


@pytest.mark.parametrize(
    "arguments", [("verify", "large", "large"), ("inspect", "large", "--digest")]
)
def test_reading_is_interrupted_in_one_line(
    folder: Path, large: Path, arguments: tuple[str, ...]
) -> None:
    stopped = interrupted(folder, *arguments, "--json")
    assert stopped.code == 3
    assert stopped.errors == "reshard: interrupted; nothing was written\n"
    assert stopped.json["error"]["kind"] == "InterruptedRunError"


def test_a_signal_at_any_moment_leaves_a_checkpoint_or_a_resumable_folder(folder: Path) -> None:
    write_rows(folder, 3072, 4096)
    command = [sys.executable, "-c", "from reshard.cli import main; raise SystemExit(main())"]
    for delay_s in (0.3, 0.5, 0.7, 0.9):
        process = subprocess.Popen(
            [*command, *ARGUMENTS, "--restart", "--overwrite"],
            cwd=folder,
            env=clean_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        process.wait(60)
        if os.path.exists("new"):
            assert run_here("verify", "large", "new").code == 0
    assert run_here(*ARGUMENTS, "--overwrite").code == 0
    assert run_here("verify", "large", "new").code == 0
