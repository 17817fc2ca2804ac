"""For all tests: one thread a process, Hypothesis's same examples in every run, ctrl-C, slow files.

A run of a minute or more ends with a table of the test files that took longest.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

# Before NumPy or PyTorch is loaded, here or in a process that a test starts: with several workers
# on few cores, threads that wait for each other in small kernels cost up to ten times the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background jobs ignore ctrl-C, and their children with them: there it would not be felt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

EXAMPLES = int(os.environ.get("RESHARD_HYPOTHESIS_EXAMPLES", "0"))

settings.register_profile(
    "reshard",
    derandomize=EXAMPLES == 0,
    deadline=None,
    print_blob=True,
    max_examples=EXAMPLES or 100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("reshard")

SLOW_FILES = 12
LEAST_S = 60.0

seconds_by_file: Counter[str] = Counter()
tests_by_file: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count what a test took, here where all workers of a parallel run report."""
    file = report.nodeid.split("::")[0]
    seconds_by_file[file] += report.duration
    tests_by_file[file] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    total_s = sum(seconds_by_file.values())
    if total_s < LEAST_S:
        return
    terminalreporter.section(f"slow files of {total_s:.0f} s", sep="-")
    for file, taken_s in seconds_by_file.most_common(SLOW_FILES):
        share = 100 * taken_s / total_s
        terminalreporter.write_line(
            f"{taken_s:6.1f} s {share:3.0f} % {tests_by_file[file]:5} tests  {file}"
        )
