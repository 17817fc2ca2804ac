"""Processes of a link fail at various points: no other hangs, or uses weights of two versions.

`make soak SOAK="--only failures"` runs as many of these cases as there is time for.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import pytest

pytest.importorskip("torch")

from host_network import why_not
from link_fault_cases import run_case, run_leaks
from link_faults import PATIENT_S, POINTS, Case

# Far beyond the second or two that it takes, and below the 60 that they would wait, or the 30 that
# a trainer would wait for an engine.
LIMIT_S = 25.0
CASES = (
    Case("in gloo's connect", 1, "killed"),
    Case("in a bucket", 1, "killed", 2),
    Case("in a bucket", 4, "stalls"),
    Case("before a bucket", 3, "memory", 0),
    Case("before a bucket", 1, "memory", 0),
)


@pytest.mark.parametrize("point", POINTS)
def test_a_point_of_failure_names_a_function(point: str) -> None:
    module, _, path = POINTS[point].path.partition(":")
    assert callable(functools.reduce(getattr, path.split("."), importlib.import_module(module)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_other_processes_continue_after_a_failure(case: Case, tmp_path: Path) -> None:
    seen = run_case(case, tmp_path, LIMIT_S)
    assert seen.came or case.way == "memory"
    # Whoever runs already goes on without an engine that is lost.
    if case.victim >= 2 and POINTS[case.point].stage == "run":
        # All of the trainer and of the other engine, also where an engine hangs.
        assert seen.went_on >= (4 if case.victim == 4 else 3)


def test_other_processes_continue_after_a_host_lost_its_network(tmp_path: Path) -> None:
    if missing := why_not():
        pytest.skip(missing)
    seen = run_case(Case("in a bucket", 4, "cut", 1), tmp_path, LIMIT_S)
    assert seen.came and seen.raised == 1 and seen.went_on == 4


def test_an_engine_ends_while_another_connects_to_it(tmp_path: Path) -> None:
    if missing := why_not():
        pytest.skip(missing)
    # Engines wait a quarter of that for each other where they know of nothing.
    limit_s = PATIENT_S / 5
    seen = run_case(
        Case("in an engine's connect with another", 2, "killed"), tmp_path, limit_s=limit_s
    )
    assert seen.came and seen.raised == 1 and seen.went_on == 3


def test_runs_and_closed_engines_leak_nothing() -> None:
    run_leaks(10, 100, timeout_s=150)
