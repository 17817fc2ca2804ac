"""The calls into which a program was compiled, to look at or to replace."""

from __future__ import annotations

import inspect
from typing import Any


def find_runs(recorded: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Return the list that the program executes, of calls and the registers that each frees."""
    run_on = inspect.getclosurevars(recorded._program).nonlocals["run_on"]
    runs: list[tuple[Any, tuple[int, ...]]] = inspect.getclosurevars(run_on).nonlocals["runs"]
    return runs
