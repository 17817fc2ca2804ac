"""Set-up of all tests: a thread a process, equal Hypothesis examples, ctrl-C, no syncs, costs.

A run with `test_house.py` ends with its census: modules, classes and dialect of each package.

A run of a minute of processor time or more ends with a table of the dearest items and with those
that are new: over two seconds, and not listed in `dear_tests.toml`.
"""

from __future__ import annotations

import fnmatch
import gc
import os
import resource
import signal
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import live_processes
import selection
from skipped_syncs import skip_syncs

# Before NumPy or PyTorch is loaded, here or in a process that a test starts: with several workers
# on few cores, threads that wait for each other in small kernels cost up to ten times the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background jobs ignore ctrl-C, and their children with them: there it would not be felt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

EXAMPLES = int(os.environ.get("RESHARD_HYPOTHESIS_EXAMPLES", "0"))


def pytest_configure(config: pytest.Config) -> None:
    """Load the profile of Hypothesis, which has fewer examples without exhaustive cases."""
    selection.is_exhaustive = "not exhaustive" not in config.option.markexpr
    os.environ["RESHARD_EXHAUSTIVE_TESTS"] = str(int(selection.is_exhaustive))
    settings.register_profile(
        "reshard",
        derandomize=EXAMPLES == 0,
        deadline=None,
        print_blob=True,
        max_examples=EXAMPLES or selection.choose(20, 100),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("reshard")


def pytest_sessionstart() -> None:
    skip_syncs()
    # Items and modules, millions of objects, stay until the end: passes over them find nothing.
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


HAS_LINUX_CALLS = sys.platform == "linux" and hasattr(os, "O_DIRECT")
"""Whether this is Linux with its own calls: `tests/without_linux` takes them away."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `linux_only` on other systems."""
    mark = item.get_closest_marker("linux_only")
    if mark is not None and not HAS_LINUX_CALLS:
        pytest.skip(f"Linux only: {mark.kwargs['reason']}")


BEGUN_S = pytest.StashKey[float]()
MAX_LISTED = 10
MIN_RUN_S = 60.0
MAX_ITEM_S = 2.0
DEAR_TESTS = Path(__file__).parent / "dear_tests.toml"

processor_seconds: dict[str, float] = {}
census: list[str] = []
exhaustive: set[str] = set()


def processor_time_s() -> float:
    """Return the processor time of this process, of its children and of rank jobs that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own_s = sum(usage.ru_utime + usage.ru_stime for usage in used)
    return own_s + live_processes.jobs_processor_time_s()


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[BEGUN_S] = processor_time_s()
    live_processes.running_item = item
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Attach the processor time of an item, fixtures included, to its last report.

    Properties of a report are what pytest-xdist carries from a worker to the process that prints.
    """
    if call.when == "teardown":
        is_exhaustive = item.get_closest_marker("exhaustive") is not None
        cost = (processor_time_s() - item.stash[BEGUN_S], is_exhaustive)
        item.user_properties.append(("processor_time_s", cost))
    yield


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == "processor_time_s" and report.when == "teardown":
            processor_seconds[report.nodeid], is_exhaustive = value
            if is_exhaustive:
                exhaustive.add(report.nodeid)
        if name == "census" and report.when == "call":
            census.append(value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the census of the house, and the dearest items: see this module's docstring."""
    for table in census:
        terminalreporter.section("the house", sep="-")
        terminalreporter.write_line(table)
    total_s = sum(processor_seconds.values())
    if total_s < MIN_RUN_S:
        return
    dearest = sorted(processor_seconds, key=processor_seconds.__getitem__, reverse=True)
    terminalreporter.section(f"{total_s:.0f} s of processor time, the dearest items", sep="-")
    for item in dearest[:MAX_LISTED]:
        terminalreporter.write_line(f"{processor_seconds[item]:6.1f} s  {item}")
    listed = tomllib.loads(DEAR_TESTS.read_text())
    new = [
        item
        for item in dearest
        if processor_seconds[item] > MAX_ITEM_S
        and item not in exhaustive
        and not any(fnmatch.fnmatchcase(item, escape_brackets(name)) for name in listed)
    ]
    for item in new:
        terminalreporter.write_line(
            f"new: {processor_seconds[item]:.1f} s of processor time: {item}; make it cheaper, or"
            f" list it in tests/{DEAR_TESTS.name} with the reason"
        )


def escape_brackets(name: str) -> str:
    """Return a pattern in which `*` is the only wildcard: items have brackets in their names."""
    return name.replace("[", "[[]")
