"""Run cases as one rank of a gloo job, report each by its name, and end."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

import torch.distributed as dist


def run_cases(cases: Iterable[Callable[[], object]]) -> NoReturn:
    """Run every case in turn on all ranks, and leave the job and the process together."""
    dist.init_process_group("gloo")
    report_each(cases)
    dist.barrier()
    dist.destroy_process_group()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)


def report_each(cases: Iterable[Callable[..., object]], *arguments: object) -> None:
    """Run every case in turn with the arguments, and report it by its name."""
    for case in cases:
        with reported(getattr(case, "__name__", repr(case))):
            case(*arguments)


@contextlib.contextmanager
def reported(case: str) -> Iterator[None]:
    """Write a line of JSON after a case, with how it ended.

    `live_processes.expect_all_end_well` shows the cases that ranks report.
    """
    result = "failed"
    try:
        yield
        result = "ended"
    finally:
        sys.stdout.write(json.dumps({result: case}) + "\n")
        sys.stdout.flush()
