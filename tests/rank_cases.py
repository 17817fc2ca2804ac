"""Run cases as one rank of a gloo job, report each by its name, and end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
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


def report_each(cases: Iterable[Callable[[], object]]) -> None:
    """Run every case in turn, and write a line of JSON after each.

    `live_processes.find_ended_cases` reads the lines.
    """
    for case in cases:
        case()
        name = getattr(case, "__name__", repr(case))
        sys.stdout.write(json.dumps({"ended": name}) + "\n")
        sys.stdout.flush()
