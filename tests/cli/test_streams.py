"""Pipes that close, disks that are full, terminals, logs, and progress on each."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cli.command_runs import COMMAND, clean_environment, run_alone, run_here, write_model
from reshard.checkpoint import Progress
from reshard.cli.progress import LINES_EVERY_S, every_few_seconds, progress_text
from selection import keep_where

# The command with blocks slowed down to take long enough to show progress, in lines at once.
SLOWED = """
import sys, time
from reshard.checkpoint.blocks import block_io
from reshard.cli import main, progress
progress.LINES_EVERY_S = 0.0
read = block_io.BlockReader.read
def slowed(*arguments):
    time.sleep(0.05)
    return read(*arguments)
block_io.BlockReader.read = slowed
sys.exit(main())
"""
COLOR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|38|9[0-7])[;\d]*m")
LINE = re.compile(
    r"\d+ % \d[\d.]* k?M?B of 33\.6 MB"
    r"(, \d[\d.]* [kMG]?B/s(, \d[\d.]* (µs|ms|s|min)( \d+ s)? left)?)?"
)


@pytest.fixture
def large(folder: Path) -> Path:
    """A tensor of 32 MiB: eight blocks."""
    return write_model(folder / "large", weight=np.ones((2048, 4096), np.int32))


def shell(folder: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which `$R` is the command."""
    return subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env=clean_environment(R=" ".join(COMMAND), **environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    keep_where(
        lambda arguments: arguments in ("inspect deep --json", "convert --help"),
        ("inspect deep", "inspect deep --json", "plan deep --to 4", "convert --help", "--help"),
        "another text of the same output",
    ),
)
def test_a_reader_that_leaves_is_silent(folder: Path, arguments: str) -> None:
    tensors = {f"layer.{number}": np.zeros(2, np.int8) for number in range(3000)}
    write_model(folder / "deep", **tensors)
    done = shell(folder, f"$R {arguments} | head -1 | wc -l; echo ${{PIPESTATUS[0]}}")
    assert done.stdout == "1\n0\n"
    assert done.stderr == ""
    gone = shell(folder, f"$R {arguments} | true; echo ${{PIPESTATUS[0]}}")
    assert (gone.stdout, gone.stderr) == ("0\n", "")


def test_a_converter_outlives_its_readers(folder: Path) -> None:
    done = shell(folder, "$R convert model new --to 3 2>&1 | true; echo ${PIPESTATUS[0]}")
    assert done.stdout == "0\n"
    assert run_here("verify", "model", "new").code == 0


def test_nobody_left_to_tell_of_an_error(folder: Path) -> None:
    done = shell(folder, "$R inspect nowhere 2>&1 | true; echo ${PIPESTATUS[0]}")
    assert (done.stdout, done.stderr) == ("2\n", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("arguments", ["inspect model", "inspect model --json", "--help"])
def test_a_full_disk_for_the_output_is_an_error(folder: Path, arguments: str) -> None:
    done = shell(folder, f"$R {arguments} > /dev/full")
    assert done.returncode == 3
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams(folder: Path, closed: str) -> None:
    assert shell(folder, f"$R inspect model --digest {closed}").returncode == 0
    assert shell(folder, f"$R inspect nowhere {closed}").returncode == 2


def test_no_character_is_too_much_for_an_encoding(folder: Path) -> None:
    write_model(folder / "names", **{"層.weight": np.zeros((4, 4), np.int8)})
    for encoding in ("ascii", "latin-1", "utf-8"):
        run = run_alone(
            "inspect",
            "names",
            "--picture",
            "層.weight",
            cwd=folder,
            PYTHONIOENCODING=encoding,
        )
        assert (run.code, run.errors) == (0, "")
        assert ("層.weight" in run.output) == (encoding == "utf-8")
        assert ("┌" in run.output) == (encoding == "utf-8")


def test_a_log_gets_plain_lines(folder: Path, large: Path) -> None:
    for arguments in (
        ("convert", "large", "new", "--to", "2"),
        ("verify", "large", "new"),
        ("inspect", "new", "--digest"),
    ):
        run = run_alone(*arguments, cwd=folder, code=SLOWED)
        assert run.code == 0
        lines = run.errors.splitlines()
        assert len(lines) == 8
        assert all(LINE.fullmatch(line) for line in lines), lines
        assert lines[-1].startswith("100 % 33.6 MB of 33.6 MB")
        assert "\x1b" not in run.output and "%" not in run.output


def test_progress_stays_out_of_json_and_quiet(folder: Path, large: Path) -> None:
    run = run_alone("convert", "large", "a", "--to", "2", "--json", cwd=folder, code=SLOWED)
    assert run.json["tensors"] == 1
    assert len(run.errors.splitlines()) == 8
    quiet = run_alone("convert", "large", "b", "--to", "2", "-q", cwd=folder, code=SLOWED)
    assert (quiet.code, quiet.output, quiet.errors) == (0, "", "")


def on_a_terminal(folder: Path, *arguments: str, **environment: str) -> str:
    """What a terminal gets to see of a slowed run."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWED, *arguments],
        cwd=folder,
        env=clean_environment(**environment),
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:
            break
        if not chunk:
            break
        seen += chunk
    os.close(ours)
    assert process.wait(60) == 0
    return seen.decode()


def test_a_terminal_gets_a_bar(folder: Path, large: Path) -> None:
    seen = on_a_terminal(folder, "convert", "large", "a", "--to", "2", TERM="xterm-256color")
    assert "converting" in seen
    assert "/33.6 MB" in seen
    assert "MB/s" in seen
    assert COLOR.search(seen)
    assert "1 tensor, 33.6 MB" in seen


def test_no_color_is_respected(folder: Path, large: Path) -> None:
    seen = on_a_terminal(
        folder, "convert", "large", "a", "--to", "2", TERM="xterm-256color", NO_COLOR="1"
    )
    assert "converting" in seen
    assert not COLOR.search(seen)


def test_a_dumb_terminal_gets_lines(folder: Path, large: Path) -> None:
    seen = on_a_terminal(folder, "convert", "large", "a", "--to", "2", TERM="dumb")
    assert "\x1b" not in seen
    assert LINE.fullmatch(seen.splitlines()[0])


def test_lines_are_seconds_apart() -> None:
    now_s, lines = 0.0, []
    show = every_few_seconds(progress_text, lines.append, clock=lambda: now_s)
    for tenth in range(1, 601):
        now_s = tenth / 10
        show(Progress(tenth, 600, 0, "wte"))
    assert len(lines) == 60 / LINES_EVERY_S
    assert lines[0] == "8 % 50 B of 600 B, 10 B/s, 55.0 s left"
    assert lines[-1] == "100 % 600 B of 600 B, 10 B/s, 0 s left"


def test_the_first_second_estimates_no_days() -> None:
    now_s, lines = 0.0, []
    show = every_few_seconds(
        progress_text,
        lambda line: lines.append((now_s, line)),
        clock=lambda: now_s,
        every_s=0.01,
    )
    # A disk wakes, files are opened: 100 MB/s only after the first two seconds.
    terabyte = 10**12
    for tenth in range(1, 2001):
        now_s = tenth / 10
        show(Progress(1000 * tenth + max(0, tenth - 20) * 10**7, terabyte, 0, "wte"))
    assert lines[0] == (0.1, "0 % 1.00 kB of 1.00 TB, 10.0 kB/s")
    # From 100 s on, when the rate is known to 2 %.
    first_s, first = next(said for said in lines if said[1].endswith("left"))
    assert 100.0 <= first_s < 102.0
    assert first.endswith(", 2 h 48 min left")
    assert lines[-1][1].endswith(", 2 h 45 min left")


def test_bytes_of_an_earlier_run_do_not_count_for_the_rate() -> None:
    assert progress_text(Progress(900, 1000, 800, "wte"), 10.0).endswith("10 B/s, 10.0 s left")
    assert progress_text(Progress(800, 1000, 800, "wte"), 10.0) == "80 % 800 B of 1.00 kB"
    assert progress_text(Progress(0, 0, 0, "wte"), 0.0) == "100 % 0 B of 0 B"
